//! What is wrong with rules about programs, found by their own examples.

use super::Check;
use crate::agents::Definition;
use crate::agents::definition::CommandRule;
use crate::agents::yaml::DefinitionError;
use crate::bounds::command_line::{self, shown};
use crate::bounds::pattern::{Author, Pattern};
use crate::bounds::text::quoted;
use crate::run::GovernanceMode;

/// Rules of one list, and examples of one rule.
const MAX_RULES: usize = 200;
const MAX_EXAMPLES: usize = 100;

pub(super) fn check(d: &Definition) -> Check {
    let commands = &d.governance.commands;
    let lists = [
        ("allow", &commands.allow),
        ("deny", &commands.deny),
        ("require_approval", &commands.require_approval),
    ];
    for (list, rules) in lists {
        if rules.len() > MAX_RULES {
            let key = format!("governance.commands.{list}");
            return Err(DefinitionError::at(key, format!("has more than {MAX_RULES} entries")));
        }
        for (i, rule) in rules.iter().enumerate() {
            let key = format!("governance.commands.{list}[{i}]");
            check_rule(&key, rule)?;
            if list == "allow" && rule.mode == GovernanceMode::Observe {
                let why = "has no meaning here: what is allowed is executed anyway";
                return Err(DefinitionError::at(format!("{key}.mode"), why));
            }
        }
    }
    if d.tools.iter().any(|tool| tool == "shell")
        && commands.allow.is_empty()
        && commands.require_approval.is_empty()
    {
        let message = "\"shell\" runs nothing without `governance.commands`; list what may run";
        return Err(DefinitionError::at("tools", message));
    }
    Ok(())
}

fn check_rule(key: &str, rule: &CommandRule) -> Check {
    let command = &rule.command;
    let has_odd = |c: char| c.is_whitespace() || c.is_control();
    let is_path = command.starts_with('/');
    if command.is_empty()
        || command.len() > 256
        || command.contains(has_odd)
        || (!is_path && command.contains('/'))
    {
        let message =
            format!("{} is neither a program's name nor its absolute path", quoted(command));
        return Err(DefinitionError::at(format!("{key}.command"), message));
    }
    let pattern = rule.args.as_deref().map(|args| Pattern::compile(args, Author::Operator));
    let pattern = pattern
        .transpose()
        .map_err(|refused| DefinitionError::at(format!("{key}.args"), refused.0))?;
    if rule.matches.len().max(rule.no_matches.len()) > MAX_EXAMPLES {
        return Err(DefinitionError::at(key, format!("has more than {MAX_EXAMPLES} examples")));
    }
    let examples = [("match", &rule.matches, true), ("no_match", &rule.no_matches, false)];
    for (name, lines, expected) in examples {
        for (i, line) in lines.iter().enumerate() {
            let at = format!("{key}.{name}[{i}]");
            let is_about = is_about(command, pattern.as_ref(), line)
                .map_err(|message| DefinitionError::at(&at, message))?;
            if is_about != expected {
                let what = if is_about { "matches" } else { "does not match" };
                let message = format!("the rule {what} {}", quoted(line));
                return Err(DefinitionError::at(at, message));
            }
        }
    }
    Ok(())
}

/// Whether any command of an example is what a rule is about.
fn is_about(command: &str, pattern: Option<&Pattern>, line: &str) -> Result<bool, String> {
    let parsed = command_line::parse(line).map_err(|refused| format!("the example {refused}"))?;
    let mut commands = parsed.pipelines.iter().flat_map(|pipeline| &pipeline.commands);
    Ok(commands.any(|simple| {
        let words: Vec<String> = simple.words.iter().map(command_line::Word::text).collect();
        let Some((program, arguments)) = words.split_first() else { return false };
        let name = command.rsplit('/').next().unwrap_or_default();
        let is_named = program == command || program.rsplit('/').next() == Some(name);
        is_named && pattern.is_none_or(|pattern| pattern.is_match(&shown(arguments)))
    }))
}
