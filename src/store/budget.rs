//! Budgets that the runs of a tree share: what is reserved before it is spent, and settled
//! afterwards.
//!
//! A budget has a row from the moment when its root starts another run; a run that starts none
//! never comes here. A hold says what one run has reserved and, in all, spent: settling states the
//! run's totals, so that doing it twice, or after a crash, changes nothing. The statements are the
//! same for both databases but for the type of ids. What is asked for, and when, is the engine's.

use crate::run::{Amounts, Caps};

/// `$1`: the root; `$2`..`$5`: the caps; `$6`..`$9`: what the root has spent.
pub(super) const OPEN: &str = "INSERT INTO budgets (root_run_id, max_tokens, max_micro_usd, max_tool_calls, \
     max_iterations, spent_tokens, spent_micro_usd, spent_tool_calls, spent_iterations) \
     VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT (root_run_id) DO NOTHING";

/// The root's own hold; `$2`..`$5`: what it has spent. Written only with its budget.
pub(super) const OPEN_HOLD: &str = "INSERT INTO budget_holds (run_id, root_run_id, spent_tokens, spent_micro_usd, \
     spent_tool_calls, spent_iterations) VALUES ($1, $1, $2, $3, $4, $5) ON CONFLICT (run_id) DO NOTHING";

/// `$2`..`$5`: what is wanted. No row: refused, or there is no such budget.
pub(super) const RESERVE: &str = "UPDATE budgets SET reserved_tokens = reserved_tokens + $2, \
     reserved_micro_usd = reserved_micro_usd + $3, reserved_tool_calls = reserved_tool_calls + $4, \
     reserved_iterations = reserved_iterations + $5 WHERE root_run_id = $1 \
     AND ($2 = 0 OR max_tokens IS NULL OR reserved_tokens + spent_tokens + $2 <= max_tokens) \
     AND ($3 = 0 OR max_micro_usd IS NULL OR reserved_micro_usd + spent_micro_usd + $3 <= max_micro_usd) \
     AND ($4 = 0 OR reserved_tool_calls + spent_tool_calls + $4 <= max_tool_calls) \
     AND ($5 = 0 OR reserved_iterations + spent_iterations + $5 <= max_iterations)";

/// `$1`: the run, `$2`: the root, `$3`..`$6`: what was reserved.
pub(super) const HOLD: &str = "INSERT INTO budget_holds (run_id, root_run_id, reserved_tokens, reserved_micro_usd, \
     reserved_tool_calls, reserved_iterations) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT (run_id) DO UPDATE SET \
     reserved_tokens = budget_holds.reserved_tokens + excluded.reserved_tokens, \
     reserved_micro_usd = budget_holds.reserved_micro_usd + excluded.reserved_micro_usd, \
     reserved_tool_calls = budget_holds.reserved_tool_calls + excluded.reserved_tool_calls, \
     reserved_iterations = budget_holds.reserved_iterations + excluded.reserved_iterations";

/// `$1`: the run, `$2`: the root. A run that reserved nothing yet has spent something all the same.
pub(super) const SETTLE_HOLD: &str = "INSERT INTO budget_holds (run_id, root_run_id) \
     SELECT $1, root_run_id FROM budgets WHERE root_run_id = $2 ON CONFLICT (run_id) DO NOTHING";

/// `$1`: the run; `$2`..`$5`: all that it has spent.
pub(super) const SETTLE: &str = "UPDATE budgets SET reserved_tokens = budgets.reserved_tokens - h.reserved_tokens, \
     reserved_micro_usd = budgets.reserved_micro_usd - h.reserved_micro_usd, \
     reserved_tool_calls = budgets.reserved_tool_calls - h.reserved_tool_calls, \
     reserved_iterations = budgets.reserved_iterations - h.reserved_iterations, \
     spent_tokens = budgets.spent_tokens + $2 - h.spent_tokens, \
     spent_micro_usd = budgets.spent_micro_usd + $3 - h.spent_micro_usd, \
     spent_tool_calls = budgets.spent_tool_calls + $4 - h.spent_tool_calls, \
     spent_iterations = budgets.spent_iterations + $5 - h.spent_iterations \
     FROM budget_holds h WHERE h.run_id = $1 AND budgets.root_run_id = h.root_run_id";

/// `$2`..`$5`: all that the run has spent; `$6`: 1 where it spends no more.
pub(super) const RELEASE_HOLD: &str = "UPDATE budget_holds SET reserved_tokens = 0, reserved_micro_usd = 0, \
     reserved_tool_calls = 0, reserved_iterations = 0, spent_tokens = $2, spent_micro_usd = $3, spent_tool_calls = $4, \
     spent_iterations = $5, ended = CASE WHEN $6 = 1 THEN 1 ELSE ended END WHERE run_id = $1";

pub(super) const BUDGET: &str = "SELECT max_tokens, max_micro_usd, max_tool_calls, max_iterations, spent_tokens, \
     spent_micro_usd, spent_tool_calls, spent_iterations, reserved_tokens, reserved_micro_usd, reserved_tool_calls, \
     reserved_iterations FROM budgets WHERE root_run_id = $1";

/// Holds of runs that ended, or that nobody drives any more, before they were settled; `$1`: how
/// many.
pub(super) const UNSETTLED: &str = "SELECT CAST(h.run_id AS text) AS run_id, CAST(h.root_run_id AS text) AS root_run_id, \
     CAST(r.input_tokens + r.output_tokens AS bigint) AS spent_tokens, \
     CAST(COALESCE(r.cost_micro_usd, 0) AS bigint) AS spent_micro_usd, \
     CAST(r.tool_calls_made AS bigint) AS spent_tool_calls, CAST(r.iterations AS bigint) AS spent_iterations, \
     CAST(CASE WHEN r.finished_at IS NULL THEN 0 ELSE 1 END AS bigint) AS ended \
     FROM budget_holds h JOIN runs r ON r.id = h.run_id WHERE h.ended = 0 AND (r.finished_at IS NOT NULL \
     OR (r.status <> 'running' AND h.reserved_tokens + h.reserved_micro_usd + h.reserved_tool_calls \
     + h.reserved_iterations > 0)) LIMIT $1";

/// Holds that one sweep settles.
pub(super) const CHUNK: i64 = 256;

/// A budget that the runs of a tree share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedBudget {
    /// Its caps: those of the root.
    pub caps: Caps,
    /// What all runs of the tree have spent.
    pub spent: Amounts,
    /// What they have reserved besides.
    pub reserved: Amounts,
}

/// A hold that nobody has settled, with what its run's row says.
#[derive(Debug)]
pub(super) struct Unsettled {
    pub(super) run: uuid::Uuid,
    pub(super) root: uuid::Uuid,
    pub(super) spent: Amounts,
    pub(super) ended: bool,
}

/// As databases hold them: tokens, millionths of a dollar, calls, iterations.
pub(super) fn columns(amounts: Amounts) -> [i64; 4] {
    let Amounts { tokens, micro_usd, tool_calls, iterations } = amounts;
    [tokens, micro_usd, tool_calls, iterations].map(super::changes::int)
}
