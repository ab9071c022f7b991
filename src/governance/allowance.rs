//! Finds the entry of the definition that allows a call to which no rule objects, for the audit log.

use super::ActionKind;
use super::gate::{CompiledPolicy, Question};
use crate::run::Action;

/// What allows a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowance {
    /// The check whose list has the entry.
    pub rule: &'static str,
    /// The entry, if it is one.
    pub pattern: Option<String>,
}

/// The allowlist entry that permits a call: from the most specific list, for the first action that
/// needs one. `None` where no list of the policy names it.
pub(super) fn of(question: &Question<'_>) -> Option<Allowance> {
    let policy = question.policy;
    let first = |entry: fn(&CompiledPolicy, &Action) -> Option<String>| {
        question.call.actions.iter().find_map(|action| entry(policy, action))
    };
    let found = |rule, pattern: Option<String>| {
        pattern.map(|pattern| Allowance { rule, pattern: Some(pattern) })
    };
    found("command", first(command))
        .or_else(|| found("network", first(network)))
        .or_else(|| found("path", first(path)))
        .or_else(|| found("tool_policy", policy.tools.allowing(question.call.tool)))
}

fn command(policy: &CompiledPolicy, action: &Action) -> Option<String> {
    match &action.what {
        ActionKind::Exec { argv, declared: false } => policy.commands.allowed_by(argv),
        _ => None,
    }
}

fn network(policy: &CompiledPolicy, action: &Action) -> Option<String> {
    match &action.what {
        ActionKind::Fetch(target) if !target.declared => policy.network.allowed_by(target),
        _ => None,
    }
}

fn path(policy: &CompiledPolicy, action: &Action) -> Option<String> {
    match &action.what {
        ActionKind::Read { path } => policy.paths.read_by(path),
        ActionKind::Write { path } => policy.paths.written_by(path),
        _ => None,
    }
}
