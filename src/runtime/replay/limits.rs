//! Judges a recorded call by a definition's tools and budget, in the state of its run at that time.
//!
//! Calls, files, lines and network requests are checked before a call; iterations, tokens and dollars before an
//! iteration. Time is not checked, because other rules may take other time. The consumption of other runs of a tree
//! is ignored.

use std::collections::HashSet;

use crate::agents::Definition;
use crate::bounds::name::means;
use crate::engine::state::State;
use crate::run::{Budget, Consumption, Overrides};

/// The tools that a definition has, and what its runs may consume.
pub(super) struct ReplayLimits {
    /// Tools of this service and of the definition.
    tools: HashSet<String>,
    /// Names and globs as written, which may match tools that this service no longer has.
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

    /// The limit that would have ended the run before its next iteration. Estimates of the next call are ignored,
    /// so that a run is never ended by its own limits.
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

    /// The limit that a call with this consumption would exceed, if known.
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
