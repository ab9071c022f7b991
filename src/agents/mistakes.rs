//! All mistakes in a definition that does not load, for `toolloop check`, and all examples of its
//! rules that fail.

use std::sync::LazyLock;

use serde_json::Value;

use super::{Agent, Definition, DefinitionError};
use crate::bounds::mistakes::{self, Rest};
use crate::bounds::nearest::nearest;
use crate::bounds::yaml;

/// Keys of one name in different sections, at most, that are reported.
const MAX_PLACES: usize = 3;
/// Sections within sections.
const MAX_DEPTH: usize = 4;

/// The mistakes in a file, each with its place; none if it loads.
pub(super) fn all(
    stem: &str,
    text: &str,
    outside: impl Fn(&Agent) -> Result<(), DefinitionError>,
) -> Vec<DefinitionError> {
    let load = |text: &str| Agent::from_yaml(stem, text).and_then(|agent| outside(&agent));
    mistakes::all(text, |key| required_default(stem, key), load)
}

/// A valid value of a required key, so that the rest of the file can be checked.
fn required_default(stem: &str, key: &str) -> Option<String> {
    match key {
        "name" => Some(stem.to_owned()),
        "model" => Some("scripted/x".to_owned()),
        _ => None,
    }
}

/// The paths of all keys of a definition, without those in lists and tables of free names.
static KEYS: LazyLock<Vec<String>> = LazyLock::new(|| {
    let schema = schemars::schema_for!(Definition).to_value();
    let mut keys = Vec::new();
    collect_keys(&schema, &schema, "", &mut keys);
    keys.sort_unstable_by(|a, b| depth(a).cmp(&depth(b)).then_with(|| a.cmp(b)));
    keys.dedup();
    keys
});

fn depth(key: &str) -> usize {
    key.matches('.').count()
}

fn collect_keys(root: &Value, at: &Value, section: &str, keys: &mut Vec<String>) {
    let definition = at["$ref"].as_str().and_then(|path| root.pointer(path.strip_prefix('#')?));
    if let Some(definition) = definition {
        collect_keys(root, definition, section, keys);
    }
    for choice in ["anyOf", "oneOf", "allOf"] {
        for inner in at[choice].as_array().into_iter().flatten() {
            collect_keys(root, inner, section, keys);
        }
    }
    // The content of a JSON schema in a definition is free.
    let is_schema = section == "inputs" || section.ends_with("schema");
    if is_schema || depth(section) + 1 == MAX_DEPTH {
        return;
    }
    for (name, inner) in at["properties"].as_object().into_iter().flatten() {
        let key = if section.is_empty() { name.clone() } else { format!("{section}.{name}") };
        collect_keys(root, inner, &key, keys);
        keys.push(key);
    }
}

/// The error about an unknown key, with the sections around or beneath it that have a key of such a
/// name.
pub(super) fn with_section(error: DefinitionError) -> DefinitionError {
    let suggestion = || {
        let (name, rest) =
            error.message.strip_prefix("unknown key `")?.split_once("`, expected ")?;
        let section = error.key.strip_suffix(name)?;
        let near = || {
            KEYS.iter().filter_map(|key| {
                let last = key.rsplit('.').next()?;
                let other = key.strip_suffix(last)?;
                (section.starts_with(other) || other.starts_with(section)).then_some((last, key))
            })
        };
        let is_there = near().any(|(last, _)| last == name);
        let meant = if is_there { name } else { nearest(name, near().map(|(last, _)| last))? };
        let places = near().filter(|(last, _)| *last == meant);
        let places: Vec<String> = places.map(|(_, key)| format!("`{key}`")).collect();
        (places.len() <= MAX_PLACES).then(|| {
            format!("unknown key `{name}` (did you mean {}?), expected {rest}", places.join(" or "))
        })
    };
    match suggestion() {
        Some(message) => DefinitionError { message, ..error },
        None => error,
    }
}

/// An agent without the failing examples of its rules, and the error of each.
///
/// # Errors
/// What else is wrong, with line, column and key.
pub fn without_failed_examples(
    stem: &str,
    text: &str,
) -> Result<(Agent, Vec<DefinitionError>), DefinitionError> {
    let first = match Agent::from_yaml(stem, text) {
        Ok(agent) => return Ok((agent, Vec::new())),
        Err(error) if example_of(&error.key).is_some() => error,
        Err(error) => return Err(error),
    };
    let Ok(value) = yaml::read::<Value>(text) else { return Err(first) };
    let mut rest = Rest::of(value);
    let mut failed = Vec::new();
    let mut error = first;
    loop {
        let Some((list, number)) = example_of(&error.key) else { return Err(error) };
        if !rest.remove(&error.key, required_default(stem, &error.key).as_deref()) {
            return Err(error);
        }
        // The examples that were taken out of the same list all stood before this one.
        let taken = rest.removed.iter().filter_map(|key| example_of(key));
        let before = taken.filter(|(other, _)| *other == list).count() - 1;
        let failure = DefinitionError::at(format!("{list}[{}]", number + before), &error.message);
        failed.push(failure.located_in(text));
        error = match Agent::from_yaml(stem, &rest.value.to_string()) {
            Ok(agent) => return Ok((agent, failed)),
            Err(next) => next,
        };
    }
}

/// The list and the index that a key names, if it names an example of a rule.
fn example_of(key: &str) -> Option<(&str, usize)> {
    let (list, number) = key.strip_suffix(']')?.rsplit_once('[')?;
    let (_, name) = list.rsplit_once('.')?;
    let is_example = ["match", "no_match"].contains(&name);
    Some((list, number.parse().ok()?)).filter(|_| is_example)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mistakes_of(text: &str) -> Vec<String> {
        let no_ghosts = |agent: &Agent| {
            let ghost = agent.definition.tools.iter().position(|tool| tool == "ghost");
            ghost
                .map_or(Ok(()), |i| Err(DefinitionError::at(format!("tools[{i}]"), "no such tool")))
        };
        all("ab", text, no_ghosts).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_mistake_is_reported_with_its_place() {
        let mistakes = mistakes_of(
            "name: ab\nmodel: m/x\ntool: [file_ops]\ntools: [a, ghost, b, b, ghost]\nlimits:\n  max_attempts: 0\n  \
             max_iterations: 99999\ngovernance: {autonomy: total}\noutput: {schema: {type: text}}\n",
        );
        let starts = [
            "line 3, column 1: tool: unknown key `tool` (did you mean `tools`?)",
            "line 8, column 14: governance.autonomy: ",
            "line 4, column 22: tools[3]: \"b\" is listed twice",
            "line 4, column 25: tools[4]: \"ghost\" is listed twice",
            "line 9, column 10: output.schema",
            "line 6, column 3: limits.max_attempts: 0 is not between",
            "line 7, column 3: limits.max_iterations: 99999 is not between",
            "line 4, column 12: tools[1]: no such tool",
        ];
        for start in starts {
            assert!(mistakes.iter().any(|line| line.starts_with(start)), "{start}\n{mistakes:#?}");
        }
        assert_eq!(mistakes.len(), starts.len(), "{mistakes:#?}");
    }

    #[test]
    fn a_key_in_the_wrong_section_and_a_wrong_kind_of_value_are_reported_in_plain_words() {
        let mistakes = mistakes_of(
            "name: ab\nmodel: m/x\ntemprature: 1\nstop_conditions: []\nmax_iterations: 5\ncolour: red\ntools: file_ops\n\
             governance: {autonomy: [full], budget: {max_tokens: 1}, paths: x}\nlimits: {max_attempts: many}\n",
        );
        let starts = [
            "line 3, column 1: temprature: unknown key `temprature` (did you mean `sampling.temperature` or `react.final_sampling.temperature`?), expected one of",
            "line 4, column 1: stop_conditions: unknown key `stop_conditions` (did you mean `governance.budget.stop_conditions`?)",
            "line 5, column 1: max_iterations: unknown key `max_iterations` (did you mean `limits.max_iterations` or `governance.budget.max_iterations`?)",
            "line 6, column 1: colour: unknown key `colour`, expected one of",
            "line 7, column 1: tools: must be a list",
            "line 8, column 14: governance.autonomy: must be a name, or a section with one key",
            "line 8, column 41: governance.budget.max_tokens: unknown key `max_tokens`, expected one of max_iterations",
            "line 8, column 57: governance.paths: must be a section of keys",
            "line 9, column 10: limits.max_attempts: must be a whole number, not less than 0",
        ];
        for start in starts {
            assert!(mistakes.iter().any(|line| line.starts_with(start)), "{start}\n{mistakes:#?}");
        }
        assert_eq!(mistakes.len(), starts.len(), "{mistakes:#?}");
        let twice =
            all("ab", "name: ab\nmodel: m/x\nlimits: {max_attempts: 1, max_attempts: 2}\n", |_| {
                Ok(())
            });
        assert_eq!(twice[0].to_string(), "line 3, column 27: limits.max_attempts: is given twice");
    }

    #[test]
    fn examples_that_fail_are_taken_out_and_reported() {
        let text = "name: ab\nmodel: m/x\ngovernance:\n  commands:\n    deny:\n      - command: git\n        \
            args: push\n        match: [git log, git push, git pull]\n        no_match: [git push]\n";
        let (agent, failed) = without_failed_examples("ab", text).unwrap();
        assert_eq!(agent.definition.governance.commands.deny[0].matches, ["git push"]);
        let failures: Vec<String> = failed.iter().map(ToString::to_string).collect();
        let starts = [
            "line 8, column 17: governance.commands.deny[0].match[0]: the rule does not match \"git log\"",
            "line 8, column 36: governance.commands.deny[0].match[2]: the rule does not match \"git pull\"",
            "line 9, column 20: governance.commands.deny[0].no_match[0]: the rule matches \"git push\"",
        ];
        assert_eq!(failures, starts);
        let whole = text.replace("m/x", "m/x\nlimits: {max_attempts: 0}");
        assert_eq!(without_failed_examples("ab", &whole).unwrap_err().key, "limits.max_attempts");
        assert_eq!(without_failed_examples("ab", "name: ab\nmodel: m/x\n").unwrap().1, []);
    }

    #[test]
    fn a_file_that_loads_has_none_and_one_that_is_no_yaml_has_one() {
        assert!(mistakes_of("name: ab\nmodel: m/x\n").is_empty());
        assert_eq!(mistakes_of("name: [").len(), 1);
        assert_eq!(mistakes_of("[]").len(), 1);
        assert_eq!(mistakes_of("name: ab\n").len(), 1, "a missing key is reported once");
        assert_eq!(mistakes_of("name: other\nmodel: x\nlimits: {max_attempts: 0}").len(), 3);
    }
}
