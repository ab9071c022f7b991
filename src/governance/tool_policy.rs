//! Rule 1: the definition's policy for a tool by name: deny, ask or allow.
//!
//! `allow` is not a grant, only the absence of an objection: the other rules still judge.

use super::gate::{PolicyError, Question, Ruling};
use super::{Decision, ToolPolicy};
use crate::bounds::glob::Glob;

/// Globs on tool names. `*` matches `/` too, so that `"*": deny` covers every tool.
pub(super) struct ToolPolicies(Vec<(Glob, ToolPolicy)>);

impl ToolPolicies {
    pub(super) fn new(policies: &[(String, ToolPolicy)]) -> Result<Self, PolicyError> {
        let compile = |(pattern, policy): &(String, ToolPolicy)| match Glob::of_names(pattern) {
            Ok(glob) => Ok((glob, *policy)),
            Err(error) => Err(PolicyError {
                setting: "tool_policies",
                pattern: pattern.clone(),
                message: error.0,
            }),
        };
        policies.iter().map(compile).collect::<Result<_, _>>().map(Self)
    }
}

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let tool = question.call.tool;
    let matching = question.policy.tools.0.iter().filter(|(glob, _)| glob.is_match(tool));
    let objections = matching.filter_map(|(glob, policy)| match policy {
        ToolPolicy::Allow => None,
        ToolPolicy::Ask => Some((Decision::Escalated, glob)),
        ToolPolicy::Deny => Some((Decision::Blocked, glob)),
    });
    objections.max_by_key(|(decision, ..)| *decision).map_or(
        Ruling::NoObjection,
        |(decision, glob)| {
            let policy = glob.written();
            let reason = if decision == Decision::Escalated {
                format!("the policy for {policy} has a person decide on every call of {tool}")
            } else {
                format!("the policy for {policy} denies every call of {tool}; do without it")
            };
            Ruling::Matched(decision, reason, policy.to_owned())
        },
    )
}
