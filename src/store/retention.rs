//! Deleting what was kept for long enough: ended runs with everything that belongs to them, then
//! definitions that no run refers to.
//!
//! No index serves this alone: a run that ended before an instant was also created before it, so
//! each tenant's list of runs, read from its old end, has what is looked for. What cannot be
//! deleted there is what is still going on or parked, and that is little.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::definitions::SPARED;
use super::sessions::ids;
use super::sql::Query;
use super::{Store, StoreError};

/// All tenants that have runs, by one look-up each; the last row is NULL.
const TENANTS: &str = "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM runs UNION ALL \
    SELECT (SELECT min(tenant) FROM runs r WHERE r.tenant > t.tenant) FROM tenants t \
    WHERE t.tenant IS NOT NULL) ";

/// Where rows of a run are, and the column that names it. The runs themselves go last.
const TABLES: [(&str, &str); 9] = [
    ("run_events", "run_id"),
    ("iterations", "run_id"),
    ("tool_calls", "run_id"),
    ("observations", "run_id"),
    ("audit_log", "run_id"),
    ("approvals", "run_id"),
    ("budget_holds", "run_id"),
    ("budgets", "root_run_id"),
    ("runs", "id"),
];

impl Store {
    /// Deletes up to `limit` runs of all tenants that ended before that instant, with their
    /// journals and audit records; how many. When no such run is left, definitions that no run
    /// refers to and that were not used for some hours go as well.
    pub async fn delete_ended(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        // Rows that another replica deletes at the moment are left to it.
        let ended = Query::new(TENANTS).push(
            "SELECT id FROM runs WHERE tenant IN (SELECT tenant FROM tenants) \
             AND created_at < :before AND finished_at < :before LIMIT :limit{skip_locked}",
        );
        let ended = tx.run(ended.bind("before", before).bind("limit", limit)).await?;
        delete_runs(&mut *tx, &ids(&ended)?).await?;
        tx.commit().await?;
        if ended.len() < limit as usize {
            let unused = Query::new(TENANTS).push(
                "DELETE FROM definitions WHERE used_at < :unused AND hash NOT IN \
                 (SELECT definition_hash FROM runs WHERE tenant IN (SELECT tenant FROM tenants) \
                 AND created_at < :before)",
            );
            let unused = unused.bind("before", before).bind("unused", before - SPARED);
            self.backend.write(Work::Data, unused).await?;
        }
        Ok(ended.len() as u64)
    }
}

/// Deletes runs and all that belongs to them.
pub(super) async fn delete_runs(tx: &mut dyn Transaction, runs: &[Uuid]) -> Result<(), StoreError> {
    if !runs.is_empty() {
        for (table, run) in TABLES {
            let delete = Query::new(format!("DELETE FROM {table} WHERE {run} IN :runs"));
            tx.run(delete.bind("runs", runs)).await?;
        }
    }
    Ok(())
}
