//! Deletes expired data: ended runs with all their data, then definitions that no run refers to. The files of the
//! runs are deleted with them ([`MoveToTrash`]). The audit log ([`super::audit`]) and the sums of usage remain.
//!
//! A run is kept longer if a client may still repeat its idempotency key, or if its webhooks are not delivered
//! yet. The child runs of a kept run are kept, too.
//!
//! There is no index for this alone. A run that ended before an instant was also created before it, so the oldest
//! entries of each tenant's list of runs contain all expired runs. Few of these entries cannot be deleted, unless
//! most runs have idempotency keys that are kept longer than the runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::audit::{act_of_service, add_act};
use super::backend::{Transaction, Work};
use super::definitions::KEPT_AFTER_USE;
use super::sql::Query;
use super::tables::ids;
use super::usage::keep_usage;
use super::workspaces::delete_beneath;
use super::{DeletedRun, IDEMPOTENCY_KEYS_KEPT, MoveToTrash, RemovedFiles, Store, StoreError};
use crate::event::AuditAction;

/// All tenants that have runs, by one look-up each; the last row is NULL.
const TENANTS: &str = "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM runs UNION ALL \
    SELECT (SELECT min(tenant) FROM runs r WHERE r.tenant > t.tenant) FROM tenants t \
    WHERE t.tenant IS NOT NULL) ";

/// How long a run is kept for deliveries of webhooks after the end of their retries: nothing sends them any more if
/// webhooks are disabled.
const UNSENT_KEPT: Duration = Duration::from_hours(7 * 24);

/// The condition that a run is live, ended too recently, or needed for a repeated request or a webhook.
macro_rules! is_kept {
    ($run:literal) => {
        concat!(
            "(",
            $run,
            ".finished_at IS NULL OR ",
            $run,
            ".finished_at >= :before OR (",
            $run,
            ".idempotency_key IS NOT NULL AND ",
            $run,
            ".created_at >= {now} - :keys_kept) OR EXISTS (SELECT 1 FROM webhook_outbox o \
             WHERE o.run_id = ",
            $run,
            ".id AND o.status = 'pending' AND o.retry_until >= {now} - :unsent_kept))",
        )
    };
}

/// The condition that a run `r` may be deleted: neither the run nor any of its ancestors is kept. (The usage of a
/// tree is added up from the rows of its runs.)
const IS_NOT_NEEDED: &str = concat!(
    "NOT ",
    is_kept!("r"),
    " AND (r.parent_run_id IS NULL OR NOT EXISTS (\
     WITH RECURSIVE above (parent_run_id, is_kept) AS (\
     SELECT p.parent_run_id, ",
    is_kept!("p"),
    " FROM runs p WHERE p.id = r.parent_run_id UNION SELECT p.parent_run_id, ",
    is_kept!("p"),
    " FROM above a JOIN runs p ON p.id = a.parent_run_id) SELECT 1 FROM above WHERE is_kept))"
);

/// The tables with rows of a run, and the column with its id. The runs are deleted last.
const TABLES: [(&str, &str); 9] = [
    ("run_events", "run_id"),
    ("iterations", "run_id"),
    ("tool_calls", "run_id"),
    ("observations", "run_id"),
    ("approvals", "run_id"),
    ("webhook_outbox", "run_id"),
    ("budget_holds", "run_id"),
    ("budgets", "root_run_id"),
    ("runs", "id"),
];

impl Store {
    /// Deletes up to `limit` runs of all tenants that ended before that instant, with their journals, and records
    /// that; returns their number. If no such run remains, also deletes definitions that no run refers to and that
    /// were not used for some hours.
    pub async fn delete_ended(
        &self,
        before: DateTime<Utc>,
        limit: u32,
        move_to_trash: MoveToTrash<'_>,
    ) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        // One replica at a time: the one that deletes the last runs of a session also deletes its files.
        let turn = tx.run(Query::new("SELECT {try_retention} AS is_mine")).await?;
        if !turn.first().map_or(Ok(false), |row| row.read("is_mine"))? {
            tx.commit().await?;
            return Ok(0);
        }
        // Skip locked rows, for example those that the deletion of a session has locked.
        let ended = Query::new(TENANTS)
            .push(
                "SELECT r.id FROM runs r WHERE r.tenant IN (SELECT tenant FROM tenants) \
                 AND r.created_at < :before AND ",
            )
            .push(IS_NOT_NEEDED)
            .push(" LIMIT :limit{skip_locked}")
            .bind("keys_kept", IDEMPOTENCY_KEYS_KEPT)
            .bind("unsent_kept", UNSENT_KEPT);
        let ended = tx.run(ended.bind("before", before).bind("limit", limit)).await?;
        let expired = ids(&ended)?;
        let mut by_tenant = BTreeMap::<String, Vec<DeletedRun>>::new();
        for run in runs_to_delete(&mut *tx, &expired).await? {
            by_tenant.entry(run.tenant.clone()).or_default().push(run);
        }
        for (tenant, runs) in by_tenant {
            let workspaces = delete_kept_files(&mut *tx, move_to_trash(&runs).await).await?;
            let details = json!({"runs": runs.len(), "workspaces": workspaces, "before": before});
            add_act(&mut *tx, act_of_service(tenant, AuditAction::RunsDeleted, details)).await?;
        }
        // Last, since new runs of the same sessions wait for it.
        delete_runs(&mut *tx, &expired).await?;
        tx.commit().await?;
        if ended.len() < limit as usize {
            let unused = Query::new(TENANTS).push(
                "DELETE FROM definitions WHERE used_at < :unused AND hash NOT IN \
                 (SELECT definition_hash FROM runs WHERE tenant IN (SELECT tenant FROM tenants) \
                 AND created_at < :before)",
            );
            let unused = unused.bind("before", before).bind("unused", before - KEPT_AFTER_USE);
            self.backend.write(Work::Data, unused).await?;
        }
        Ok(ended.len() as u64)
    }
}

/// Deletes runs and all their data, except the sums of usage.
pub(super) async fn delete_runs(tx: &mut dyn Transaction, runs: &[Uuid]) -> Result<(), StoreError> {
    if runs.is_empty() {
        return Ok(());
    }
    tx.run(keep_usage(runs)).await?;
    for (table, run) in TABLES {
        let delete = Query::new(format!("DELETE FROM {table} WHERE {run} IN :runs"));
        tx.run(delete.bind("runs", runs)).await?;
    }
    Ok(())
}

/// Deletes the stored files of deleted runs; returns the number of directories.
pub(super) async fn delete_kept_files(
    tx: &mut dyn Transaction,
    RemovedFiles { directories, kept }: RemovedFiles,
) -> Result<usize, StoreError> {
    for (tenant, directory) in &kept {
        delete_beneath(tx, tenant, directory).await?;
    }
    Ok(directories.max(kept.len()))
}

/// Runs that are to be deleted, with what their files are found by.
pub(super) async fn runs_to_delete(
    tx: &mut dyn Transaction,
    runs: &[Uuid],
) -> Result<Vec<DeletedRun>, StoreError> {
    if runs.is_empty() {
        return Ok(Vec::new());
    }
    let those =
        Query::new("SELECT id, tenant, session_id, definition_hash FROM runs WHERE id IN :runs");
    let those = tx.run(those.bind("runs", runs)).await?;
    let staying = Query::new(
        "SELECT DISTINCT o.tenant, o.session_id, o.definition_hash FROM \
         (SELECT DISTINCT tenant, session_id FROM runs WHERE id IN :runs AND session_id IS NOT NULL) s \
         JOIN runs o ON o.tenant = s.tenant AND o.session_id = s.session_id \
         WHERE NOT (o.id IN :runs)",
    );
    let staying = tx.run(staying.bind("runs", runs)).await?;
    let hashes = those.iter().chain(&staying).map(|row| row.read::<String>("definition_hash"));
    let hashes: Vec<String> = hashes.collect::<Result<BTreeSet<_>, _>>()?.into_iter().collect();
    let definitions = Query::new("SELECT hash, body FROM definitions WHERE hash IN :hashes");
    let mut bodies = BTreeMap::<String, Arc<str>>::new();
    for row in tx.run(definitions.bind("hashes", &*hashes)).await? {
        let body: String = row.read("body")?;
        bodies.insert(row.read("hash")?, body.into());
    }
    let mut in_use = BTreeMap::<(String, String), Vec<Arc<str>>>::new();
    for row in &staying {
        let session = (row.read("tenant")?, row.read("session_id")?);
        let body = bodies.get(&row.read::<String>("definition_hash")?).cloned();
        in_use.entry(session).or_default().extend(body);
    }
    let deleted = those.iter().map(|row| {
        let hash: String = row.read("definition_hash")?;
        let (tenant, session_id): (String, Option<String>) =
            (row.read("tenant")?, row.read("session_id")?);
        let session = session_id.clone().map(|session| (tenant.clone(), session));
        Ok(DeletedRun {
            id: row.read("id")?,
            tenant,
            session_id,
            staying: session.and_then(|session| in_use.get(&session).cloned()).unwrap_or_default(),
            definition: bodies.get(&hash).cloned(),
        })
    });
    deleted.collect()
}
