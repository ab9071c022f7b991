//! Deleting what was kept for long enough, inside the caller's `BEGIN IMMEDIATE`. Why this needs no
//! index of its own is said in [`crate::store::postgres`]'s file of the same name.

use chrono::{DateTime, Utc};
use sqlx::sqlite::SqliteConnection;

use crate::store::StoreError;
use crate::store::definitions::SPARED;

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
const DELETE: [&str; 8] = [
    "DELETE FROM run_events WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM iterations WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM tool_calls WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM audit_log WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM approvals WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM budget_holds WHERE run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM budgets WHERE root_run_id IN (SELECT value FROM json_each($1))",
    "DELETE FROM runs WHERE id IN (SELECT value FROM json_each($1))",
];

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
        let ended = serde_json::Value::from(ended).to_string();
        for statement in DELETE {
            sqlx::query(statement).bind(&ended).execute(&mut *connection).await?;
        }
    }
    if deleted < u64::from(limit) {
        let delete = sqlx::query(DELETE_DEFINITIONS).bind(before.timestamp_micros());
        delete.bind((before - SPARED).timestamp_micros()).execute(connection).await?;
    }
    Ok(deleted)
}
