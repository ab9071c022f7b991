//! What the journal records about the run when a call is judged.

use super::State;
use crate::event::{BudgetSpent, Circumstances};
use crate::run::Usd;

impl State {
    /// The labels of the run, and its consumption of each limited budget.
    pub fn circumstances(&self) -> Circumstances {
        let (totals, budget) = (&self.totals, &self.rules.budget);
        let spent = totals.usage.cost_micro_usd.filter(|cost| *cost != 0);
        let consumed = &totals.consumption;
        let used = BudgetSpent {
            iterations: totals.iterations.into(),
            tool_calls: totals.tool_calls_made.into(),
            total_tokens: budget.max_total_tokens.map_or(0, |_| totals.usage.total_tokens()),
            cost_usd: budget.max_cost_usd.and(spent).map(Usd::from_micro),
            files_modified: consumed.files(),
            lines_changed: consumed.lines_changed,
            network_requests: self
                .rules
                .max_network_requests
                .map_or(0, |_| consumed.network_requests),
        };
        Circumstances { labels: self.labels(), used, rate: None }
    }
}
