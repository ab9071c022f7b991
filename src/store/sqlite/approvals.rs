//! What parked runs wait for, inside the caller's `BEGIN IMMEDIATE`, which is the lock.

use chrono::{DateTime, Utc};
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::statements::{INSERT_AUDIT, RUN};
use crate::event::Resolution;
use crate::store::decode::Columns;
use crate::store::projection::{audit_of, json};
use crate::store::{Answer, ApprovalStatus, RunRecord, StoreError};

pub(super) const INSERT_APPROVALS: &str = "
INSERT INTO approvals (run_id, seq, call_id, tenant, at, expires_at, kind, tool, reason, arguments, status)
SELECT
    value ->> 'run_id', value ->> 'seq', value ->> 'call_id', value ->> 'tenant', value ->> 'at',
    value ->> 'expires_at', value ->> 'kind', value ->> 'tool', value ->> 'reason', value ->> 'arguments',
    value ->> 'status'
FROM json_each($1) WHERE true
ON CONFLICT DO NOTHING";

pub(super) const VOID_APPROVALS: &str = "UPDATE approvals SET status = 'void' WHERE status = 'pending' \
     AND run_id IN (SELECT value ->> 'run_id' FROM json_each($1))";

const ANSWER: &str = "UPDATE approvals SET status = $4, decided_at = $5, decided_by = $6, decision_reason = $7, \
     resolution = $8 WHERE run_id = $1 AND call_id = $2 AND status = 'pending' \
     AND kind IN (SELECT value FROM json_each($3)) AND (expires_at IS NULL OR expires_at > $5)";

/// A run that still waits is in the status of what it waits for: a review before a decision before
/// a result.
const STILL_WAITS: &str = "UPDATE runs SET status = (SELECT CASE min(CASE a.kind WHEN 'review' THEN 0 WHEN 'client' THEN 2 ELSE 1 END) \
     WHEN 0 THEN 'needs_review' WHEN 1 THEN 'awaiting_approval' ELSE 'awaiting_tool_results' END \
     FROM approvals a WHERE a.run_id = runs.id AND a.status = 'pending') \
     WHERE id IN (SELECT value FROM json_each($1)) AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
     AND EXISTS (SELECT 1 FROM approvals w WHERE w.run_id = runs.id AND w.status = 'pending')";

/// A parked run that waits for nothing any more, or is to be cancelled, goes on.
const GO_ON: &str = "UPDATE runs SET status = 'queued', available_at = $2 \
     WHERE id IN (SELECT value FROM json_each($1)) \
     AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
     AND (cancel_requested_at IS NOT NULL OR NOT EXISTS \
     (SELECT 1 FROM approvals WHERE run_id = runs.id AND approvals.status = 'pending'))";

pub(super) const IS_DUE: &str =
    "SELECT 1 FROM approvals WHERE status = 'pending' AND expires_at <= $1 LIMIT 1";

const EXPIRE: &str = "UPDATE approvals SET status = 'expired', decided_at = $1, resolution = $2 \
     WHERE status = 'pending' AND expires_at <= $1 RETURNING run_id";

/// See [`crate::store::Store::answer`].
pub(super) async fn answer(
    connection: &mut SqliteConnection,
    tenant: &str,
    run: Uuid,
    call: Uuid,
    answer: &Answer,
) -> Result<Option<RunRecord>, StoreError> {
    let now = Utc::now();
    let lookup = || sqlx::query(RUN).bind(tenant).bind(run.to_string());
    if lookup().fetch_optional(&mut *connection).await?.is_none() {
        return Ok(None);
    }
    let kinds: Vec<&str> = answer.kinds.iter().map(|kind| kind.as_str()).collect();
    let taken = sqlx::query(ANSWER)
        .bind(run.to_string())
        .bind(call.to_string())
        .bind(json(&kinds)?)
        .bind(ApprovalStatus::after(&answer.resolution).as_str())
        .bind(now.timestamp_micros())
        .bind(&answer.decided_by)
        .bind(&answer.reason)
        .bind(json(&answer.resolution)?);
    if taken.execute(&mut *connection).await?.rows_affected() == 0 {
        return Ok(None);
    }
    if let Some(record) = &answer.audit {
        let row = audit_of(tenant, &answer.decided_by, run, record);
        sqlx::query(INSERT_AUDIT).bind(json(&[row])?).execute(&mut *connection).await?;
    }
    go_on(connection, &[run.to_string()], now).await?;
    let row = lookup().fetch_one(connection).await?;
    Columns(&row).run().map(Some)
}

/// Queues those of these parked runs that wait for nothing any more.
pub(super) async fn go_on(
    connection: &mut SqliteConnection,
    runs: &[String],
    now: DateTime<Utc>,
) -> Result<(), StoreError> {
    sqlx::query(STILL_WAITS).bind(json(runs)?).execute(&mut *connection).await?;
    sqlx::query(GO_ON).bind(json(runs)?).bind(now.timestamp_micros()).execute(connection).await?;
    Ok(())
}

/// See [`crate::store::Store::expire_approvals`].
pub(super) async fn expire(
    connection: &mut SqliteConnection,
    now: DateTime<Utc>,
) -> Result<u64, StoreError> {
    let expired =
        sqlx::query_scalar(EXPIRE).bind(now.timestamp_micros()).bind(json(&Resolution::Expired)?);
    let runs: Vec<String> = expired.fetch_all(&mut *connection).await?;
    if !runs.is_empty() {
        go_on(connection, &runs, now).await?;
    }
    Ok(runs.len() as u64)
}
