//! Amounts and caps of a budget that a tree of runs shares.

use super::{Budget, Totals, Usd};

/// Amounts of everything that a shared budget caps.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Amounts {
    /// Input plus output of model calls.
    pub tokens: u64,
    /// Millionths of a dollar.
    pub micro_usd: u64,
    /// Calls of tools.
    pub tool_calls: u64,
    /// Model responses.
    pub iterations: u64,
    /// Files modified. Each run counts its own: one that two runs modify counts for both.
    pub files: u64,
    /// Lines changed.
    pub lines: u64,
    /// Requests to the network.
    pub requests: u64,
}

/// The caps of a shared budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Caps {
    /// Absent: no cap.
    pub tokens: Option<u64>,
    /// Millionths of a dollar; absent: no cap.
    pub micro_usd: Option<u64>,
    /// Calls of tools.
    pub tool_calls: u64,
    /// Model responses.
    pub iterations: u64,
    /// Files modified.
    pub files: u64,
    /// Lines changed.
    pub lines: u64,
    /// Requests to the network; absent: no cap.
    pub requests: Option<u64>,
}

/// The result of a reservation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reserved {
    Granted,
    /// Not enough is left; nothing is reserved.
    Refused(CapExceeded),
}

/// The cap that a reservation would exceed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapExceeded {
    /// The name of the setting, e.g. `max_total_tokens`.
    pub limit: &'static str,
    /// Spent; cost in millionths of a dollar.
    pub used: u64,
    /// Reserved in addition, by calls in progress.
    pub reserved: u64,
    /// What was asked for.
    pub wanted: u64,
    /// The cap.
    pub max: u64,
}

impl CapExceeded {
    /// Whether the reservation may succeed once the calls in progress have settled.
    pub fn may_settle(&self) -> bool {
        self.may_be_less() && self.used.saturating_add(self.wanted) <= self.max
    }

    /// Whether this is a cap of model calls, which mostly take less than they reserve, and do not wait while they
    /// have a reservation.
    pub fn may_be_less(&self) -> bool {
        matches!(self.limit, "max_total_tokens" | "max_cost_usd")
    }
}

impl Amounts {
    pub fn of(totals: &Totals) -> Self {
        Self {
            tokens: totals.usage.total_tokens(),
            micro_usd: totals.usage.cost_micro_usd.map_or(0, i64::unsigned_abs),
            tool_calls: totals.tool_calls_made.into(),
            iterations: totals.iterations.into(),
            files: totals.consumption.files_of_tools(),
            lines: totals.consumption.lines_changed,
            requests: totals.consumption.network_requests,
        }
    }

    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            tokens: self.tokens.saturating_add(other.tokens),
            micro_usd: self.micro_usd.saturating_add(other.micro_usd),
            tool_calls: self.tool_calls.saturating_add(other.tool_calls),
            iterations: self.iterations.saturating_add(other.iterations),
            files: self.files.saturating_add(other.files),
            lines: self.lines.saturating_add(other.lines),
            requests: self.requests.saturating_add(other.requests),
        }
    }
}

impl Caps {
    /// The caps of a run's budget that its children share.
    pub fn of(budget: &Budget, max_network_requests: Option<u64>) -> Self {
        Self {
            tokens: budget.max_total_tokens,
            micro_usd: budget.max_cost_usd.map(Usd::micro).map(i64::unsigned_abs),
            tool_calls: budget.max_tool_calls,
            iterations: budget.max_iterations,
            files: budget.files(),
            lines: budget.max_lines_changed,
            requests: max_network_requests,
        }
    }

    /// Caps of tokens and dollars alone; `None` if neither is given.
    pub fn of_model_calls(tokens: Option<u64>, micro_usd: Option<u64>) -> Option<Self> {
        let unlimited = u64::MAX;
        (tokens.is_some() || micro_usd.is_some()).then_some(Self {
            tokens,
            micro_usd,
            tool_calls: unlimited,
            iterations: unlimited,
            files: unlimited,
            lines: unlimited,
            requests: None,
        })
    }

    /// The first cap that `wanted` would exceed; amounts of zero are not checked.
    pub fn refuses(
        &self,
        spent: Amounts,
        reserved: Amounts,
        wanted: Amounts,
    ) -> Option<CapExceeded> {
        type Part = fn(&Amounts) -> u64;
        let caps: [(&str, Part, Option<u64>); 7] = [
            ("max_total_tokens", |it| it.tokens, self.tokens),
            ("max_cost_usd", |it| it.micro_usd, self.micro_usd),
            ("max_tool_calls", |it| it.tool_calls, Some(self.tool_calls)),
            ("max_iterations", |it| it.iterations, Some(self.iterations)),
            ("max_files_modified", |it| it.files, Some(self.files)),
            ("max_lines_changed", |it| it.lines, Some(self.lines)),
            ("network.max_requests", |it| it.requests, self.requests),
        ];
        let refusals = caps.into_iter().filter_map(|(limit, part, max)| {
            let (used, reserved, wanted) = (part(&spent), part(&reserved), part(&wanted));
            let all = used.saturating_add(reserved).saturating_add(wanted);
            let max = max.filter(|max| wanted > 0 && all > *max)?;
            Some(CapExceeded { limit, used, reserved, wanted, max })
        });
        refusals.min_by_key(CapExceeded::may_settle)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_exceeded_cap_refuses() {
        let caps = Caps {
            tokens: Some(100),
            micro_usd: None,
            tool_calls: 2,
            iterations: 3,
            files: 4,
            lines: 5,
            requests: Some(6),
        };
        let used = Amounts {
            tokens: 90,
            micro_usd: 1_000,
            tool_calls: 2,
            iterations: 2,
            files: 3,
            lines: 5,
            requests: 6,
        };
        let none = Amounts::default();
        let table = [
            (none, None),
            (Amounts { tokens: 10, micro_usd: 1_000, iterations: 1, ..none }, None),
            (Amounts { tokens: 11, ..none }, Some(("max_total_tokens", 90, 100))),
            (Amounts { tool_calls: 1, ..none }, Some(("max_tool_calls", 2, 2))),
            (Amounts { tokens: 10, iterations: 2, ..none }, Some(("max_iterations", 2, 3))),
            (Amounts { files: 1, ..none }, None),
            (Amounts { files: 2, ..none }, Some(("max_files_modified", 3, 4))),
            (Amounts { requests: 1, ..none }, Some(("network.max_requests", 6, 6))),
            (Amounts { files: 1, lines: 1, ..none }, Some(("max_lines_changed", 5, 5))),
        ];
        for (wanted, expected) in table {
            let refused = caps
                .refuses(used, none, wanted)
                .map(|refusal| (refusal.limit, refusal.used, refusal.max));
            assert_eq!(refused, expected, "{wanted:?}");
        }
    }

    #[test]
    fn reserved_amounts_may_settle() {
        let caps = Caps {
            tokens: Some(100),
            micro_usd: Some(100),
            tool_calls: 2,
            iterations: 3,
            files: 4,
            lines: 5,
            requests: None,
        };
        let none = Amounts::default();
        let table = [
            ((40, 0), (50, 0), (60, 0), Some(("max_total_tokens", true))),
            ((41, 0), (50, 0), (60, 0), Some(("max_total_tokens", false))),
            ((0, 40), (0, 50), (1, 60), Some(("max_cost_usd", true))),
            ((0, 90), (90, 0), (20, 20), Some(("max_cost_usd", false))),
            ((0, 40), (0, 50), (0, 10), None),
        ];
        let of = |(tokens, micro_usd)| Amounts { tokens, micro_usd, ..none };
        for (spent, reserved, wanted, expected) in table {
            let refusal = caps.refuses(of(spent), of(reserved), of(wanted));
            let refused = refusal.map(|refusal| (refusal.limit, refusal.may_settle()));
            assert_eq!(refused, expected, "{spent:?} {reserved:?} {wanted:?}");
        }
        let calls = Amounts { tool_calls: 2, ..none };
        let refusal = caps.refuses(none, Amounts { tool_calls: 1, ..none }, calls).unwrap();
        assert!(!refusal.may_settle(), "a call that is under way is made");
    }
}
