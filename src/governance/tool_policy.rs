//! The tool policy rule: the definition's policy for a tool by name: deny, ask or allow.
//!
//! `allow` is not a grant, only the absence of an objection: the other rules still judge.

use super::gate::{PolicyError, Question, Ruling};
use super::{Decision, ToolPolicy, ToolRule};
use crate::bounds::glob::Glob;

/// Globs on tool names. `*` matches `/` too, so that `"*": deny` covers every tool.
pub(super) struct ToolPolicies(Vec<Compiled>);

struct Compiled {
    tools: Glob,
    policy: ToolPolicy,
    observes: bool,
}

impl ToolPolicies {
    pub(super) fn new(rules: &[ToolRule]) -> Result<Self, PolicyError> {
        let compile = |rule: &ToolRule| match Glob::of_names(&rule.tools) {
            Ok(tools) => Ok(Compiled { tools, policy: rule.policy, observes: rule.observes }),
            Err(error) => Err(PolicyError {
                setting: "tool_policies",
                pattern: rule.tools.clone(),
                message: error.0,
            }),
        };
        rules.iter().map(compile).collect::<Result<_, _>>().map(Self)
    }

    /// The glob that allows a tool.
    pub(super) fn allowing(&self, tool: &str) -> Option<String> {
        let mut allowing = self.0.iter().filter(|rule| rule.policy == ToolPolicy::Allow);
        let rule = allowing.find(|rule| rule.tools.is_match(tool))?;
        Some(rule.tools.written().to_owned())
    }
}

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let tool = question.call.tool;
    let matching = question.policy.tools.0.iter().filter(|rule| rule.tools.is_match(tool));
    let objections = matching.filter_map(|rule| {
        let would_be = match rule.policy {
            ToolPolicy::Allow => return None,
            ToolPolicy::Ask => Decision::Escalated,
            ToolPolicy::Deny => Decision::Blocked,
        };
        let decision = if rule.observes { Decision::Warned } else { would_be };
        Some((decision, would_be, rule.tools.written()))
    });
    let strictest = objections.max_by_key(|(decision, would_be, _)| (*decision, *would_be));
    let Some((decision, would_be, policy)) = strictest else { return Ruling::NoObjection };
    let reason = match (decision, would_be) {
        (Decision::Warned, Decision::Escalated) => format!(
            "the policy for {policy} would have a person decide on every call of {tool}, but only \
             observes"
        ),
        (Decision::Warned, _) => {
            format!("the policy for {policy} would deny every call of {tool}, but only observes")
        }
        (Decision::Escalated, _) => {
            format!("the policy for {policy} has a person decide on every call of {tool}")
        }
        _ => format!("the policy for {policy} denies every call of {tool}; continue without it"),
    };
    if decision == Decision::Warned {
        return Ruling::Observed(would_be, reason, Some(policy.to_owned()));
    }
    Ruling::Matched(decision, reason, policy.to_owned())
}
