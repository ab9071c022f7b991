//! Deleting what was kept for long enough, inside the caller's `BEGIN IMMEDIATE`. Why this needs no
//! index of its own is said in [`crate::store::postgres`]'s file of the same name.

use chrono::{DateTime, Utc};
use sqlx::sqlite::SqliteConnection;

use crate::store::definitions::SPARED;
use crate::store::{SessionDeleted, StoreError};

/// All tenants that have runs, by one look-up each; the last row is NULL.
macro_rules! tenants {
    () => {
        "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM runs UNION ALL \
         SELECT (SELECT min(tenant) FROM runs r WHERE r.tenant > t.tenant) FROM tenants t WHERE t.tenant IS NOT NULL) "
    };
}

const ENDED: &str = concat!(
    tenants!(),
    "SELECT id FROM runs WHERE tenant IN (SELECT tenant FROM tenants) AND created_at < $1 AND finished_at < $1 LIMIT $2"
);

/// `$1`: the ids, a JSON array. The runs themselves go last.
const DELETE: [&str; 9] = [
    "DELETE FROM run_events WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM iterations WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM tool_calls WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM observations WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM audit_log WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM approvals WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM budget_holds WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM budgets WHERE root_run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM runs WHERE id IN (SELECT value FROM json_each($1))",
];

const OF_SESSION: &str =
    "SELECT id, finished_at IS NULL AS live FROM runs WHERE tenant = $1 AND session_id = $2";

/// Runs and all that they delegated to; `$2`: the ids, a JSON array.
const WITH_CHILDREN: &str = "WITH RECURSIVE family (id) AS (SELECT value FROM json_each($2) \
     UNION SELECT r.id FROM family f JOIN runs r ON r.tenant = $1 AND r.parent_run_id = f.id) SELECT id FROM family";

/// `$2`: whatever was used since then is kept.
const DELETE_DEFINITIONS: &str = concat!(
    tenants!(),
    "DELETE FROM definitions WHERE used_at < $2 AND hash NOT IN (SELECT definition_hash FROM runs \
     WHERE tenant IN (SELECT tenant FROM tenants) AND created_at < $1)"
);

/// See [`crate::store::Store::delete_ended`].
pub(super) async fn delete_ended(
    connection: &mut SqliteConnection,
    before: DateTime<Utc>,
    limit: u32,
) -> Result<u64, StoreError> {
    let ended = sqlx::query_scalar(ENDED).bind(before.timestamp_micros()).bind(limit);
    let ended: Vec<String> = ended.fetch_all(&mut *connection).await?;
    let deleted = ended.len() as u64;
    if !ended.is_empty() {
        delete(connection, ended).await?;
    }
    if deleted < u64::from(limit) {
        let delete = sqlx::query(DELETE_DEFINITIONS).bind(before.timestamp_micros());
        delete.bind((before - SPARED).timestamp_micros()).execute(connection).await?;
    }
    Ok(deleted)
}

/// See [`crate::store::Store::delete_session`].
pub(super) async fn delete_session(
    connection: &mut SqliteConnection,
    tenant: &str,
    session: &str,
) -> Result<SessionDeleted, StoreError> {
    let runs = sqlx::query_as(OF_SESSION).bind(tenant).bind(session);
    let runs: Vec<(String, bool)> = runs.fetch_all(&mut *connection).await?;
    if runs.is_empty() {
        return Ok(SessionDeleted::Unknown);
    }
    if runs.iter().any(|(_, live)| *live) {
        return Ok(SessionDeleted::Busy);
    }
    let runs: serde_json::Value = runs.into_iter().map(|(id, _)| id).collect();
    let family = sqlx::query_scalar(WITH_CHILDREN).bind(tenant).bind(runs.to_string());
    let family: Vec<String> = family.fetch_all(&mut *connection).await?;
    delete(connection, family).await?;
    Ok(SessionDeleted::Gone)
}

async fn delete(connection: &mut SqliteConnection, runs: Vec<String>) -> Result<(), StoreError> {
    let runs = serde_json::Value::from(runs).to_string();
    for statement in DELETE {
        sqlx::query(statement).bind(&runs).execute(&mut *connection).await?;
    }
    Ok(())
}
