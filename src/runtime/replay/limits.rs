//! What a definition's tools and budget say to a recorded call, at that moment of its run.
//!
//! Calls, files, lines and requests to the network are judged before a call; iterations, tokens and
//! dollars before an iteration, after which the run would have made no further call. Time is not
//! judged, for other rules may take other time, and what other runs of a tree used is not looked at.

use std::collections::HashSet;

use crate::agents::Definition;
use crate::bounds::name::means;
use crate::engine::state::State;
use crate::run::{Budget, Consumption, Overrides};

/// The tools that a definition has, and what its runs may consume.
pub(super) struct ReplayLimits {
    /// Tools of this service and those that come with the definition.
    tools: HashSet<String>,
    /// Names and globs as they are written: tools that this service has no more.
    written: Vec<String>,
    budget: Budget,
    max_iterations: u32,
    max_network_requests: Option<u64>,
}

impl ReplayLimits {
    pub(super) fn new<'t>(definition: &Definition, tools: impl Iterator<Item = &'t str>) -> Self {
        Self {
            tools: tools.map(str::to_owned).collect(),
            written: definition.tools.clone(),
            budget: definition.governance.budget.clone(),
            max_iterations: definition.limits.max_iterations,
            max_network_requests: definition.governance.network.max_requests,
        }
    }

    /// Whether the definition has this tool.
    pub(super) fn have(&self, tool: &str) -> bool {
        self.tools.contains(tool) || self.written.iter().any(|name| means(name, tool))
    }

    /// The budget of a run whose request narrowed it.
    pub(super) fn budget_of(&self, overrides: &Overrides) -> Budget {
        let requested = overrides.budget.clone().unwrap_or_default();
        self.budget.clone().narrowed_by(&requested)
    }

    /// The limit that would have ended the run before its next iteration. Estimates of what it
    /// needs are left out, so that a run that was made is never ended by its own limits.
    pub(super) fn ended_by(&self, state: &State, budget: &Budget) -> Option<&'static str> {
        let totals = state.totals();
        let max_iterations = u64::from(self.max_iterations).min(budget.max_iterations);
        let (tokens, spent) = (totals.usage.total_tokens(), totals.usage.cost_micro_usd);
        let limits = [
            (u64::from(totals.iterations) >= max_iterations, "max_iterations"),
            (budget.max_total_tokens.is_some_and(|max| tokens >= max), "max_total_tokens"),
            (
                budget.max_cost_usd.zip(spent).is_some_and(|(max, spent)| spent >= max.micro()),
                "max_cost_usd",
            ),
        ];
        limits.into_iter().find_map(|(is_reached, limit)| is_reached.then_some(limit))
    }

    /// The limit that a call would exceed which consumes so much, where that is known.
    pub(super) fn exceeded_by(
        &self,
        consumes: Option<&Consumption>,
        state: &State,
        budget: &Budget,
    ) -> Option<&'static str> {
        let totals = state.totals();
        let made = u64::from(totals.tool_calls_made) + state.calls_under_way() as u64;
        if made >= budget.max_tool_calls {
            return Some("max_tool_calls");
        }
        let (used, wanted) = (&totals.consumption, consumes?);
        let new = || wanted.files_modified.difference(&used.files_modified).count() as u64;
        let files = || budget.counted_files(used).saturating_add(new());
        let lines = used.lines_changed.saturating_add(wanted.lines_changed);
        let requests = used.network_requests.saturating_add(wanted.network_requests);
        if !wanted.files_modified.is_empty() && files() > budget.files() {
            return Some("max_files_modified");
        }
        if wanted.lines_changed > 0 && lines > budget.max_lines_changed {
            return Some("max_lines_changed");
        }
        let is_over = self.max_network_requests.is_some_and(|max| requests > max);
        (wanted.network_requests > 0 && is_over).then_some("network.max_requests")
    }
}
