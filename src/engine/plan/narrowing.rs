//! The limits of a run: those of the definition, narrowed by the request.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use super::{Plan, PlanError, Rules, refused};
use crate::agents::Definition;
use crate::run::{Budget, Limits, Overrides, Usd};
use crate::tools::ToolInfo;

/// Which caps of a child run come from its parent: the parent's cap, or what was left of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[expect(clippy::struct_excessive_bools, reason = "each is a cap of its own")]
pub struct CapsOfTree {
    /// `max_files_modified`
    pub files: bool,
    /// `max_lines_changed`
    pub lines: bool,
    /// `max_total_tokens`
    #[serde(default)]
    pub tokens: bool,
    /// `max_cost_usd`
    #[serde(default)]
    pub cost: bool,
}

impl CapsOfTree {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
    pub(super) fn are_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Plan {
    /// The rules of a run. The budget of a child run is narrowed by its parent.
    pub fn rules_of(&self, is_child: bool) -> Rules {
        let (own, now) = (&self.agent.definition.governance.budget, &self.rules.budget);
        let (files, tokens, cost) =
            (now.max_files_modified, now.max_total_tokens, now.max_cost_usd);
        let caps_of_tree = CapsOfTree {
            files: is_child && files.is_some() && files != own.max_files_modified,
            lines: is_child && now.max_lines_changed < own.max_lines_changed,
            tokens: is_child && tokens.is_some() && tokens != own.max_total_tokens,
            cost: is_child && cost.is_some() && cost != own.max_cost_usd,
        };
        Rules { caps_of_tree, ..self.rules.clone() }
    }
}

/// Refuses a value below the least one that a request may ask for.
fn at_least<T: PartialOrd + Copy + Display>(
    field: &str,
    wanted: Option<T>,
    least: T,
) -> Result<(), PlanError> {
    match wanted {
        Some(wanted) if wanted < least => Err(refused(field, format!("must be at least {least}"))),
        _ => Ok(()),
    }
}

pub(super) fn narrowed_limits(limits: Limits, o: &Overrides) -> Result<Limits, PlanError> {
    at_least("/max_attempts", o.max_attempts, 1)?;
    at_least("/max_iterations", o.max_iterations, 1)?;
    at_least("/max_iterations_per_attempt", o.max_iterations_per_attempt, 1)?;
    at_least("/max_tool_calls_per_iteration", o.max_tool_calls_per_iteration, 1)?;
    at_least("/tool_call_timeout_seconds", o.tool_call_timeout_seconds, 1)?;
    at_least("/error_threshold", o.error_threshold, 1)?;
    Ok(limits.narrowed_by(o))
}

/// Warnings about values of a request that exceed the definition's, which apply instead.
pub(super) fn not_widened<'t>(
    definition: &Definition,
    tools: impl Iterator<Item = &'t ToolInfo>,
    o: &Overrides,
) -> Vec<String> {
    let (limits, budget) = (&definition.limits, &definition.governance.budget);
    let of_budget = o.budget.clone().unwrap_or_default();
    let counts = [
        ("max_attempts", o.max_attempts.map(u64::from), limits.max_attempts.into()),
        ("max_iterations", o.max_iterations.map(u64::from), limits.max_iterations.into()),
        (
            "max_iterations_per_attempt",
            o.max_iterations_per_attempt.map(u64::from),
            limits.max_iterations_per_attempt.into(),
        ),
        (
            "max_tool_calls_per_iteration",
            o.max_tool_calls_per_iteration.map(u64::from),
            limits.max_tool_calls_per_iteration.into(),
        ),
        ("tool_call_timeout_seconds", o.tool_call_timeout_seconds, longest_call(definition, tools)),
        ("error_threshold", o.error_threshold.map(u64::from), limits.error_threshold.into()),
        ("budget.max_iterations", of_budget.max_iterations, budget.max_iterations),
        (
            "budget.max_duration_seconds",
            of_budget.max_duration_seconds,
            budget.max_duration_seconds,
        ),
        ("budget.max_tool_calls", of_budget.max_tool_calls, budget.max_tool_calls),
        (
            "budget.max_total_tokens",
            of_budget.max_total_tokens,
            budget.max_total_tokens.unwrap_or(u64::MAX),
        ),
        ("budget.max_files_modified", of_budget.max_files_modified, budget.files()),
        ("budget.max_lines_changed", of_budget.max_lines_changed, budget.max_lines_changed),
    ];
    let warning = |field: &str, asked: &dyn Display, allowed: &dyn Display| {
        format!("{field}: the agent allows {allowed}, which holds, and not {asked}.")
    };
    let counts = counts.into_iter().filter_map(|(field, asked, allowed)| {
        asked.filter(|asked| *asked > allowed).map(|asked| warning(field, &asked, &allowed))
    });
    let cost = of_budget.max_cost_usd.zip(budget.max_cost_usd);
    let cost = cost.filter(|(asked, allowed)| asked > allowed);
    counts
        .chain(cost.map(|(asked, allowed)| warning("budget.max_cost_usd", &asked, &allowed)))
        .collect()
}

/// Seconds that the longest of the agent's calls may take.
fn longest_call<'t>(definition: &Definition, tools: impl Iterator<Item = &'t ToolInfo>) -> u64 {
    let limits = &definition.limits;
    let options = definition.tool_options.values().filter_map(|options| options.timeout_seconds);
    let longest = options.fold(limits.call_seconds(), u64::max);
    if limits.tool_call_timeout_seconds.is_some() {
        return longest;
    }
    let delegation = delegation_seconds(limits, &definition.governance.budget);
    let delegation = definition.delegates().next().map(|_| delegation);
    let own = tools.filter_map(|tool| tool.defaults.timeout).map(|timeout| timeout.as_secs());
    own.chain(delegation).fold(longest, u64::max)
}

/// Seconds that a call may take that delegates to another agent.
pub(super) fn delegation_seconds(limits: &Limits, budget: &Budget) -> u64 {
    limits.tool_call_timeout_seconds.unwrap_or(budget.max_duration_seconds)
}

pub(super) fn narrowed_budget(budget: Budget, o: &Overrides) -> Result<Budget, PlanError> {
    let Some(wanted) = &o.budget else { return Ok(budget) };
    at_least("/budget/max_iterations", wanted.max_iterations, 1)?;
    at_least("/budget/max_duration_seconds", wanted.max_duration_seconds, 1)?;
    at_least("/budget/max_total_tokens", wanted.max_total_tokens, 1)?;
    at_least("/budget/max_cost_usd", wanted.max_cost_usd, Usd::from_micro(1))?;
    Ok(budget.narrowed_by(wanted))
}
