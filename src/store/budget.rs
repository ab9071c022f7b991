//! Budgets that the runs of a tree share: amounts are reserved before they are spent, and settled afterwards.
//!
//! A run's budget has a row once the run has started its first child run: that of the root, and that of a child
//! run with caps of its own. It binds the run and all runs below it, so that a run reserves in the budgets of all
//! its ancestors, or in none. A hold has the amounts that one run has reserved in one budget, and the total that
//! it has spent. Settling sets the run's total, so repeating it, even after a crash, changes nothing. A
//! transaction locks the budgets' rows first, and then decides; it checks in later statements that the replica
//! still owns the run. So it sees the settlement of a replica that took the run over, or that replica settles
//! later. The total of a run only grows. The engine decides what is reserved, and when.

use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::sql::{Query, Row};
use super::{Store, StoreError};
use crate::run::{Amounts, CapExceeded, Caps, Consumption, Reserved};

/// Holds that one sweep settles, at most.
pub(super) const CHUNK: i64 = 256;

/// A budget that the runs of a tree share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SharedBudget {
    /// The caps of the run whose budget it is.
    pub caps: Caps,
    /// The amounts that this run and all runs below it have spent.
    pub spent: Amounts,
    /// The amounts that they have reserved in addition.
    pub reserved: Amounts,
}

/// The ownership under which a replica drives a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ownership<'o> {
    /// The replica.
    pub owner: &'o str,
    /// The epoch of the ownership.
    pub epoch: i64,
}

/// The outcome of a settlement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    Done,
    /// Another replica owns the run.
    Fenced,
}

/// The condition that this owner drives the run, or that the run has ended under this epoch.
pub(super) const IS_OWNED: &str = "EXISTS (SELECT 1 FROM runs WHERE runs.id = :run AND runs.epoch = :epoch \
    AND ((runs.status = 'running' AND runs.owner = :owner) OR runs.finished_at IS NOT NULL))";

impl SharedBudget {
    fn read(row: &Row) -> Result<Self, StoreError> {
        let caps = Caps {
            tokens: row.read("max_tokens")?,
            micro_usd: row.read("max_micro_usd")?,
            tool_calls: row.read("max_tool_calls")?,
            iterations: row.read("max_iterations")?,
            files: row.read("max_files")?,
            lines: row.read("max_lines")?,
            requests: row.read("max_requests")?,
        };
        let reserved = Amounts {
            tokens: row.read("reserved_tokens")?,
            micro_usd: row.read("reserved_micro_usd")?,
            tool_calls: row.read("reserved_tool_calls")?,
            iterations: row.read("reserved_iterations")?,
            files: row.read("reserved_files")?,
            lines: row.read("reserved_lines")?,
            requests: row.read("reserved_requests")?,
        };
        Ok(Self { caps, spent: spent(row)?, reserved })
    }
}

fn spent(row: &Row) -> Result<Amounts, StoreError> {
    Ok(Amounts {
        tokens: row.read("spent_tokens")?,
        micro_usd: row.read("spent_micro_usd")?,
        tool_calls: row.read("spent_tool_calls")?,
        iterations: row.read("spent_iterations")?,
        files: row.read("spent_files")?,
        lines: row.read("spent_lines")?,
        requests: row.read("spent_requests")?,
    })
}

/// Binds `:tokens`, `:micro_usd`, `:tool_calls`, `:iterations`, `:files`, `:lines` and `:requests`.
fn amounts(query: Query, amounts: Amounts) -> Query {
    query
        .bind("tokens", amounts.tokens)
        .bind("micro_usd", amounts.micro_usd)
        .bind("tool_calls", amounts.tool_calls)
        .bind("iterations", amounts.iterations)
        .bind("files", amounts.files)
        .bind("lines", amounts.lines)
        .bind("requests", amounts.requests)
}

impl Store {
    /// Creates the budget that a run shares with its descendants, with its caps and the amounts that the run has
    /// spent. Does nothing if the budget exists or another replica owns the run.
    pub async fn open_budget(
        &self,
        root: Uuid,
        by: Ownership<'_>,
        caps: Caps,
        spent: Amounts,
    ) -> Result<(), StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let open = Query::new(
            "INSERT INTO budgets (root_run_id, max_tokens, max_micro_usd, max_tool_calls, \
             max_iterations, max_files, max_lines, max_requests, spent_tokens, spent_micro_usd, \
             spent_tool_calls, spent_iterations, spent_files, spent_lines, spent_requests) \
             SELECT :root, :max_tokens, :max_micro_usd, :max_tool_calls, :max_iterations, \
             :max_files, :max_lines, :max_requests, :tokens, :micro_usd, :tool_calls, \
             :iterations, :files, :lines, :requests WHERE ",
        );
        let open =
            open.push(IS_OWNED).push(" ON CONFLICT (root_run_id) DO NOTHING RETURNING root_run_id");
        let open = bind_ownership(open, root, by)
            .bind("root", root)
            .bind("max_tokens", caps.tokens)
            .bind("max_micro_usd", caps.micro_usd)
            .bind("max_tool_calls", caps.tool_calls)
            .bind("max_iterations", caps.iterations)
            .bind("max_files", caps.files)
            .bind("max_lines", caps.lines)
            .bind("max_requests", caps.requests);
        if !tx.run(amounts(open, spent)).await?.is_empty() {
            let hold = Query::new(
                "INSERT INTO budget_holds (run_id, root_run_id, spent_tokens, spent_micro_usd, \
                 spent_tool_calls, spent_iterations, spent_files, spent_lines, spent_requests) \
                 VALUES (:root, :root, :tokens, :micro_usd, :tool_calls, :iterations, :files, \
                 :lines, :requests) \
                 ON CONFLICT (run_id, root_run_id) DO NOTHING",
            );
            tx.run(amounts(hold.bind("root", root), spent)).await?;
        }
        tx.commit().await
    }

    /// Reserves amounts of the budgets of these runs for a run: of all that exist, or of none. `None` if another
    /// replica owns the run.
    pub async fn reserve(
        &self,
        (budgets, run): (&[Uuid], Uuid),
        by: Ownership<'_>,
        wanted: Amounts,
    ) -> Result<Option<Reserved>, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let locked = lock(&mut *tx, budgets).await?;
        let mut refusals = Vec::new();
        for row in &locked {
            let SharedBudget { caps, spent, reserved } = SharedBudget::read(row)?;
            refusals.extend(caps.refuses(spent, reserved, wanted));
        }
        if let Some(refusal) = refusals.into_iter().min_by_key(CapExceeded::may_settle) {
            let is_owned = is_owned(&mut *tx, run, by).await?;
            tx.commit().await?;
            return Ok(is_owned.then_some(Reserved::Refused(refusal)));
        }
        let is_reserved = reserve_in_all(&mut *tx, (&locked, run), by, wanted).await?;
        if is_reserved {
            tx.commit().await?;
        }
        Ok(is_reserved.then_some(Reserved::Granted))
    }

    /// Reserves amounts of the budgets of these runs for a run, even those that are not left. False if another
    /// replica owns the run.
    pub async fn reserve_beyond(
        &self,
        (budgets, run): (&[Uuid], Uuid),
        by: Ownership<'_>,
        wanted: Amounts,
    ) -> Result<bool, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let locked = lock(&mut *tx, budgets).await?;
        let is_reserved = reserve_in_all(&mut *tx, (&locked, run), by, wanted).await?;
        if is_reserved {
            tx.commit().await?;
        }
        Ok(is_reserved)
    }

    /// Sets the total that a run has spent so far in the budgets of these runs, and releases what it has reserved.
    /// `ended`: the run spends no more.
    pub async fn settle(
        &self,
        (budgets, run): (&[Uuid], Uuid),
        by: Ownership<'_>,
        spent: Amounts,
        ended: bool,
    ) -> Result<Settled, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let locked = lock(&mut *tx, budgets).await?;
        let is_owned = locked.is_empty() || is_owned(&mut *tx, run, by).await?;
        if is_owned {
            for row in &locked {
                settle(&mut *tx, (row.read("root_run_id")?, run), spent, ended).await?;
            }
        }
        tx.commit().await?;
        Ok(if is_owned { Settled::Done } else { Settled::Fenced })
    }

    /// The budget of a root.
    pub async fn shared_budget(&self, root: Uuid) -> Result<Option<SharedBudget>, StoreError> {
        let look = Query::new("SELECT * FROM budgets WHERE root_run_id = :root");
        let rows = self.backend.read(Work::Data, look.bind("root", root)).await?;
        rows.first().map(SharedBudget::read).transpose()
    }

    /// Settles leftover holds of runs that have ended or are no longer driven, with the totals in the runs' rows.
    pub(super) async fn settle_leftover_holds(&self) -> Result<(), StoreError> {
        let unsettled = Query::new(
            "SELECT h.run_id, h.root_run_id, r.input_tokens + r.output_tokens AS spent_tokens, \
             COALESCE(r.cost_micro_usd, 0) AS spent_micro_usd, \
             r.tool_calls_made AS spent_tool_calls, r.iterations AS spent_iterations, \
             r.consumption, r.finished_at IS NOT NULL AS is_over \
             FROM budget_holds h JOIN runs r ON r.id = h.run_id \
             WHERE h.ended = 0 AND (r.finished_at IS NOT NULL OR (r.status <> 'running' \
             AND h.reserved_tokens + h.reserved_micro_usd + h.reserved_tool_calls \
             + h.reserved_iterations + h.reserved_files + h.reserved_lines \
             + h.reserved_requests > 0)) LIMIT :limit",
        );
        for row in self.backend.read(Work::Data, unsettled.bind("limit", CHUNK)).await? {
            match self.settle_leftover_hold(&row).await {
                Err(error) if !error.is_transient() => {
                    tracing::warn!(%error, "the hold of a run that is not driven cannot be settled");
                }
                settled => settled?,
            }
        }
        Ok(())
    }

    async fn settle_leftover_hold(&self, row: &Row) -> Result<(), StoreError> {
        let (root, run): (Uuid, Uuid) = (row.read("root_run_id")?, row.read("run_id")?);
        let consumption: Consumption = row.read("consumption")?;
        let spent = Amounts {
            tokens: row.read("spent_tokens")?,
            micro_usd: row.read("spent_micro_usd")?,
            tool_calls: row.read("spent_tool_calls")?,
            iterations: row.read("spent_iterations")?,
            files: consumption.files_of_tools(),
            lines: consumption.lines_changed,
            requests: consumption.network_requests,
        };
        let mut tx = self.backend.begin(Work::Data).await?;
        lock(&mut *tx, &[root]).await?;
        // It may have been claimed since then, and may have new reservations.
        let driven = Query::new("SELECT 1 FROM runs WHERE id = :run AND status = 'running'");
        if tx.run(driven.bind("run", run)).await?.is_empty() {
            settle(&mut *tx, (root, run), spent, row.read("is_over")?).await?;
        }
        tx.commit().await
    }
}

/// Locks the budgets of these runs, in an order that is the same for all; returns the rows of those that exist.
async fn lock(tx: &mut dyn Transaction, budgets: &[Uuid]) -> Result<Vec<Row>, StoreError> {
    let lock = Query::new(
        "SELECT * FROM budgets WHERE root_run_id IN :budgets ORDER BY root_run_id{for_update}",
    );
    tx.run(lock.bind("budgets", budgets)).await
}

/// Reserves amounts of all these locked budgets for a run; false if another replica owns the run, and then the
/// transaction must not be committed.
async fn reserve_in_all(
    tx: &mut dyn Transaction,
    (locked, run): (&[Row], Uuid),
    by: Ownership<'_>,
    wanted: Amounts,
) -> Result<bool, StoreError> {
    for row in locked {
        if !reserve(&mut *tx, (row.read("root_run_id")?, run), by, wanted).await? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Reserves amounts of a locked budget for a run; false if another replica owns the run.
async fn reserve(
    tx: &mut dyn Transaction,
    (root, run): (Uuid, Uuid),
    by: Ownership<'_>,
    wanted: Amounts,
) -> Result<bool, StoreError> {
    let reserve = Query::new(
        "UPDATE budgets SET reserved_tokens = reserved_tokens + :tokens, \
         reserved_micro_usd = reserved_micro_usd + :micro_usd, \
         reserved_tool_calls = reserved_tool_calls + :tool_calls, \
         reserved_iterations = reserved_iterations + :iterations, \
         reserved_files = reserved_files + :files, \
         reserved_lines = reserved_lines + :lines, \
         reserved_requests = reserved_requests + :requests WHERE root_run_id = :root AND ",
    );
    let reserve = bind_ownership(reserve.push(IS_OWNED).push(" RETURNING root_run_id"), run, by);
    if tx.run(amounts(reserve.bind("root", root), wanted)).await?.is_empty() {
        return Ok(false);
    }
    let hold = Query::new(
        "INSERT INTO budget_holds (run_id, root_run_id, reserved_tokens, \
         reserved_micro_usd, reserved_tool_calls, reserved_iterations, reserved_files, \
         reserved_lines, reserved_requests) VALUES (:run, :root, :tokens, :micro_usd, \
         :tool_calls, :iterations, :files, :lines, :requests) \
         ON CONFLICT (run_id, root_run_id) DO UPDATE SET \
         reserved_tokens = budget_holds.reserved_tokens + excluded.reserved_tokens, \
         reserved_micro_usd = budget_holds.reserved_micro_usd + excluded.reserved_micro_usd, \
         reserved_tool_calls = budget_holds.reserved_tool_calls + excluded.reserved_tool_calls, \
         reserved_iterations = budget_holds.reserved_iterations + excluded.reserved_iterations, \
         reserved_files = budget_holds.reserved_files + excluded.reserved_files, \
         reserved_lines = budget_holds.reserved_lines + excluded.reserved_lines, \
         reserved_requests = budget_holds.reserved_requests + excluded.reserved_requests",
    );
    tx.run(amounts(hold.bind("root", root).bind("run", run), wanted)).await?;
    Ok(true)
}

/// Binds the parameters of [`IS_OWNED`].
fn bind_ownership(query: Query, run: Uuid, by: Ownership<'_>) -> Query {
    query.bind("run", run).bind("owner", by.owner).bind("epoch", by.epoch)
}

async fn is_owned(
    tx: &mut dyn Transaction,
    run: Uuid,
    by: Ownership<'_>,
) -> Result<bool, StoreError> {
    let look = bind_ownership(Query::new("SELECT 1 AS is_owned WHERE ").push(IS_OWNED), run, by);
    Ok(!tx.run(look).await?.is_empty())
}

/// Settles a run; the budget must be locked.
async fn settle(
    tx: &mut dyn Transaction,
    (root, run): (Uuid, Uuid),
    spent: Amounts,
    ended: bool,
) -> Result<(), StoreError> {
    // A run without reservations may have spent something.
    let hold = Query::new(
        "INSERT INTO budget_holds (run_id, root_run_id) SELECT :run, root_run_id FROM budgets \
         WHERE root_run_id = :root ON CONFLICT (run_id, root_run_id) DO NOTHING",
    );
    tx.run(hold.bind("run", run).bind("root", root)).await?;
    let state = Query::new(
        "UPDATE budgets SET reserved_tokens = budgets.reserved_tokens - h.reserved_tokens, \
         reserved_micro_usd = budgets.reserved_micro_usd - h.reserved_micro_usd, \
         reserved_tool_calls = budgets.reserved_tool_calls - h.reserved_tool_calls, \
         reserved_iterations = budgets.reserved_iterations - h.reserved_iterations, \
         reserved_files = budgets.reserved_files - h.reserved_files, \
         reserved_lines = budgets.reserved_lines - h.reserved_lines, \
         reserved_requests = budgets.reserved_requests - h.reserved_requests, \
         spent_tokens = budgets.spent_tokens + {greatest}(:tokens - h.spent_tokens, 0), \
         spent_micro_usd = \
         budgets.spent_micro_usd + {greatest}(:micro_usd - h.spent_micro_usd, 0), \
         spent_tool_calls = \
         budgets.spent_tool_calls + {greatest}(:tool_calls - h.spent_tool_calls, 0), \
         spent_iterations = \
         budgets.spent_iterations + {greatest}(:iterations - h.spent_iterations, 0), \
         spent_files = budgets.spent_files + {greatest}(:files - h.spent_files, 0), \
         spent_lines = budgets.spent_lines + {greatest}(:lines - h.spent_lines, 0), \
         spent_requests = \
         budgets.spent_requests + {greatest}(:requests - h.spent_requests, 0) \
         FROM budget_holds h WHERE h.run_id = :run AND h.root_run_id = :root \
         AND budgets.root_run_id = :root",
    );
    tx.run(amounts(state.bind("run", run).bind("root", root), spent)).await?;
    let release = Query::new(
        "UPDATE budget_holds SET reserved_tokens = 0, reserved_micro_usd = 0, \
         reserved_tool_calls = 0, reserved_iterations = 0, reserved_files = 0, \
         reserved_lines = 0, reserved_requests = 0, \
         spent_tokens = {greatest}(spent_tokens, :tokens), \
         spent_micro_usd = {greatest}(spent_micro_usd, :micro_usd), \
         spent_tool_calls = {greatest}(spent_tool_calls, :tool_calls), \
         spent_iterations = {greatest}(spent_iterations, :iterations), \
         spent_files = {greatest}(spent_files, :files), \
         spent_lines = {greatest}(spent_lines, :lines), \
         spent_requests = {greatest}(spent_requests, :requests), \
         ended = CASE WHEN :ended = 1 THEN 1 ELSE ended END \
         WHERE run_id = :run AND root_run_id = :root",
    );
    let release = release.bind("run", run).bind("root", root).bind("ended", i64::from(ended));
    tx.run(amounts(release, spent)).await?;
    Ok(())
}
