//! All mistakes in a definition that does not load, for `toolloop check`: the loader stops at the
//! first one.
//!
//! What it complains about is taken out, and the rest is loaded again. So every mistake is found by
//! the very checks that refuse the file; one that hides behind another may be told only when that
//! one is mended.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{Agent, DefinitionError};
use crate::bounds::yaml;

/// At most this many are told.
const MOST: usize = 20;

/// What is wrong with a file, each with its place in it; nothing where it loads.
pub(super) fn all(
    stem: &str,
    text: &str,
    outside: impl Fn(&Agent) -> Result<(), DefinitionError>,
) -> Vec<DefinitionError> {
    let load = |text: &str| Agent::from_yaml(stem, text).and_then(|agent| outside(&agent));
    let Err(first) = load(text) else { return Vec::new() };
    let first = first.located_in(text);
    let Ok(value) = yaml::read::<Value>(text) else { return vec![first] };
    let mut rest = Rest { value, left: BTreeMap::new(), removed: Vec::new() };
    let mut key = first.key.clone();
    let mut found = vec![first];
    while found.len() < MOST && rest.take_out(&key, stem) {
        let Err(error) = load(&rest.value.to_string()) else { break };
        key.clone_from(&error.key);
        if rest.is_made_by_us(&error) {
            continue;
        }
        let error = DefinitionError { place: None, key: rest.original(&key), ..error };
        if found.iter().any(|known| known.key == error.key) {
            break;
        }
        found.push(error.located_in(text));
    }
    found
}

/// An agent without those examples of its rules that fail, and what each of them says.
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
    let mut rest = Rest { value, left: BTreeMap::new(), removed: Vec::new() };
    let mut failed = Vec::new();
    let mut error = first;
    loop {
        let Some((list, number)) = example_of(&error.key) else { return Err(error) };
        if !rest.take_out(&error.key, stem) {
            return Err(error);
        }
        // The examples that were taken out of the same list all stood before this one.
        let taken = rest.removed.iter().filter_map(|key| example_of(key));
        let before = taken.filter(|(other, _)| *other == list).count() - 1;
        let told = DefinitionError::at(format!("{list}[{}]", number + before), &error.message);
        failed.push(told.located_in(text));
        error = match Agent::from_yaml(stem, &rest.value.to_string()) {
            Ok(agent) => return Ok((agent, failed)),
            Err(next) => next,
        };
    }
}

/// The list and the number that a key names, where it names an example of a rule.
fn example_of(key: &str) -> Option<(&str, usize)> {
    let (list, number) = key.strip_suffix(']')?.rsplit_once('[')?;
    let (_, name) = list.rsplit_once('.')?;
    let is_example = ["match", "no_match"].contains(&name);
    Some((list, number.parse().ok()?)).filter(|_| is_example)
}

/// What is left of a file.
struct Rest {
    value: Value,
    /// The numbers, in the file, of what is left of a list, by the list's key.
    left: BTreeMap<String, Vec<usize>>,
    removed: Vec<String>,
}

impl Rest {
    /// Takes out what a key means, or what is there of the way to it. False where nothing is left
    /// to take.
    fn take_out(&mut self, key: &str, stem: &str) -> bool {
        // Without these nothing loads; others may be right all the same.
        let instead = match key {
            "name" => Some(stem),
            "model" => Some("scripted/x"),
            _ => None,
        };
        self.removed.push(key.to_owned());
        if let (Some(instead), Some(fields)) = (instead, self.value.as_object_mut()) {
            let before = fields.insert(key.to_owned(), instead.into());
            return before.as_ref().and_then(Value::as_str) != Some(instead);
        }
        let mut way: Vec<&str> = segments(key).collect();
        while let Some(last) = way.pop() {
            let at = way.iter().try_fold(&mut self.value, |at, segment| inner(at, segment));
            match (at, last.parse::<usize>()) {
                (Some(Value::Object(fields)), _) if fields.contains_key(last) => {
                    fields.shift_remove(last);
                    return true;
                }
                (Some(Value::Array(items)), Ok(number)) if number < items.len() => {
                    let all = (0..items.len()).collect();
                    items.remove(number);
                    let list = key[..key.rfind('[').unwrap_or(key.len())].to_owned();
                    self.left.entry(list).or_insert(all).remove(number);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// Whether something is missing only because it was taken out.
    fn is_made_by_us(&self, error: &DefinitionError) -> bool {
        let missing = error.message.strip_prefix("missing field `");
        let missing = missing.and_then(|rest| rest.split('`').next());
        missing.is_some_and(|name| {
            let key = if error.key.is_empty() { name } else { &format!("{}.{name}", error.key) };
            self.removed.iter().any(|removed| removed == key)
        })
    }

    /// The key as it is in the file, where lists have all their items.
    fn original(&self, key: &str) -> String {
        let Some((list, end)) = key.split_once('[') else { return key.to_owned() };
        let Some((number, end)) = end.split_once(']') else { return key.to_owned() };
        let number = number.parse::<usize>().ok();
        let before = number.and_then(|number| self.left.get(list)?.get(number).copied());
        match before.or(number) {
            Some(number) => format!("{list}[{number}]{end}"),
            None => key.to_owned(),
        }
    }
}

fn segments(key: &str) -> impl Iterator<Item = &str> {
    key.split(['.', '[']).map(|part| part.trim_end_matches(']')).filter(|part| !part.is_empty())
}

fn inner<'a>(value: &'a mut Value, segment: &str) -> Option<&'a mut Value> {
    match value {
        Value::Object(fields) => fields.get_mut(segment),
        Value::Array(items) => items.get_mut(segment.parse::<usize>().ok()?),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> Vec<String> {
        let no_ghosts = |agent: &Agent| {
            let ghost = agent.definition.tools.iter().position(|tool| tool == "ghost");
            ghost
                .map_or(Ok(()), |i| Err(DefinitionError::at(format!("tools[{i}]"), "no such tool")))
        };
        all("ab", text, no_ghosts).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_mistake_is_told_where_it_is() {
        let told = told(
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
            assert!(told.iter().any(|line| line.starts_with(start)), "{start}\n{told:#?}");
        }
        assert_eq!(told.len(), starts.len(), "{told:#?}");
    }

    #[test]
    fn examples_that_fail_are_taken_out_and_told() {
        let text = "name: ab\nmodel: m/x\ngovernance:\n  commands:\n    deny:\n      - command: git\n        \
            args: push\n        match: [git log, git push, git pull]\n        no_match: [git push]\n";
        let (agent, failed) = without_failed_examples("ab", text).unwrap();
        assert_eq!(agent.definition.governance.commands.deny[0].matches, ["git push"]);
        let told: Vec<String> = failed.iter().map(ToString::to_string).collect();
        let starts = [
            "line 8, column 17: governance.commands.deny[0].match[0]: the rule does not match \"git log\"",
            "line 8, column 36: governance.commands.deny[0].match[2]: the rule does not match \"git pull\"",
            "line 9, column 20: governance.commands.deny[0].no_match[0]: the rule matches \"git push\"",
        ];
        assert_eq!(told, starts);
        let whole = text.replace("m/x", "m/x\nlimits: {max_attempts: 0}");
        assert_eq!(without_failed_examples("ab", &whole).unwrap_err().key, "limits.max_attempts");
        assert_eq!(without_failed_examples("ab", "name: ab\nmodel: m/x\n").unwrap().1, []);
    }

    #[test]
    fn a_file_that_loads_has_none_and_one_that_is_no_yaml_has_one() {
        assert!(told("name: ab\nmodel: m/x\n").is_empty());
        assert_eq!(told("name: [").len(), 1);
        assert_eq!(told("[]").len(), 1);
        assert_eq!(told("name: ab\n").len(), 1, "a missing key is told once");
        assert_eq!(told("name: other\nmodel: x\nlimits: {max_attempts: 0}").len(), 3);
    }
}
