//! Deleting what was kept for long enough: ended runs with everything that belongs to them, then
//! definitions that nobody needs any more.
//!
//! No index serves this alone: a run that ended before an instant was also created before it, so
//! each tenant's list of runs, read from its old end, has what is looked for. What cannot be
//! deleted there is what is still going on or parked, and that is little.

use chrono::{DateTime, Utc};
use sqlx::Connection;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use crate::store::definitions::SPARED;
use crate::store::{SessionDeleted, StoreError};

/// All tenants that have runs, by one look-up each; the last row is NULL.
macro_rules! tenants {
    () => {
        "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM runs UNION ALL \
         SELECT (SELECT min(tenant) FROM runs r WHERE r.tenant > t.tenant) FROM tenants t WHERE t.tenant IS NOT NULL) "
    };
}

/// Rows that another replica deletes at the moment are left to it.
const ENDED: &str = concat!(
    tenants!(),
    "SELECT old.id FROM tenants t CROSS JOIN LATERAL (SELECT id FROM runs r \
     WHERE r.tenant = t.tenant AND r.created_at < $1 AND r.finished_at < $1 \
     ORDER BY r.created_at, r.id LIMIT $2 FOR UPDATE SKIP LOCKED) old LIMIT $2"
);

const DELETE: &str = "WITH journal AS (DELETE FROM run_events WHERE run_id = ANY($1)), \
     responses AS (DELETE FROM iterations WHERE run_id = ANY($1)), \
     calls AS (DELETE FROM tool_calls WHERE run_id = ANY($1)), \
     audited AS (DELETE FROM audit_log WHERE run_id = ANY($1)), \
     observed AS (DELETE FROM observations WHERE run_id = ANY($1)), \
     asked AS (DELETE FROM approvals WHERE run_id = ANY($1)), \
     held AS (DELETE FROM budget_holds WHERE run_id = ANY($1)), \
     shared AS (DELETE FROM budgets WHERE root_run_id = ANY($1)) \
     DELETE FROM runs WHERE id = ANY($1)";

/// A session's runs; locked, so that none of them begins meanwhile.
const OF_SESSION: &str = "SELECT id, finished_at IS NULL AS live FROM runs WHERE tenant = $1 AND session_id = $2 ORDER BY id FOR UPDATE";

/// Runs and all that they delegated to.
const WITH_CHILDREN: &str = "WITH RECURSIVE family (id) AS (SELECT unnest($2::uuid[]) \
     UNION SELECT r.id FROM family f JOIN runs r ON r.tenant = $1 AND r.parent_run_id = f.id) SELECT id FROM family";

/// `$2`: whatever was used since then is kept.
const DELETE_DEFINITIONS: &str = concat!(
    tenants!(),
    "DELETE FROM definitions WHERE used_at < $2 AND NOT hash = ANY (ARRAY(SELECT r.definition_hash \
     FROM tenants t CROSS JOIN LATERAL (SELECT definition_hash FROM runs \
     WHERE tenant = t.tenant AND created_at < $1 ORDER BY created_at, id) r))"
);

/// See [`crate::store::Store::delete_ended`].
pub(super) async fn delete_ended(
    connection: &mut PgConnection,
    before: DateTime<Utc>,
    limit: u32,
) -> Result<u64, StoreError> {
    let mut tx = connection.begin().await?;
    let ended = sqlx::query_scalar(ENDED).bind(before).bind(i64::from(limit));
    let ended: Vec<Uuid> = ended.fetch_all(&mut *tx).await?;
    if !ended.is_empty() {
        sqlx::query(DELETE).bind(&ended).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    let deleted = ended.len() as u64;
    if deleted < u64::from(limit) {
        sqlx::query(DELETE_DEFINITIONS)
            .bind(before)
            .bind(before - SPARED)
            .execute(connection)
            .await?;
    }
    Ok(deleted)
}

/// See [`crate::store::Store::delete_session`].
pub(super) async fn delete_session(
    connection: &mut PgConnection,
    tenant: &str,
    session: &str,
) -> Result<SessionDeleted, StoreError> {
    let mut tx = connection.begin().await?;
    let runs: Vec<(Uuid, bool)> =
        sqlx::query_as(OF_SESSION).bind(tenant).bind(session).fetch_all(&mut *tx).await?;
    if runs.iter().any(|(_, live)| *live) {
        tx.rollback().await?;
        return Ok(SessionDeleted::Busy);
    }
    if runs.is_empty() {
        tx.rollback().await?;
        return Ok(SessionDeleted::Unknown);
    }
    let runs: Vec<Uuid> = runs.into_iter().map(|(id, _)| id).collect();
    let family: Vec<Uuid> =
        sqlx::query_scalar(WITH_CHILDREN).bind(tenant).bind(runs).fetch_all(&mut *tx).await?;
    sqlx::query(DELETE).bind(family).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(SessionDeleted::Gone)
}
