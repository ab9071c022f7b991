//! What parked runs wait for. The run's row is locked first, then the rows that it waits for are
//! looked at by another statement: so of two answers to the last two of them, one sees the other
//! and queues the run, and an answer that comes while the run is being parked is seen by one side
//! or the other.

use sqlx::Connection;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use super::statements::{LOCK_RUN, RUN};
use crate::event::Resolution;
use crate::store::decode::Columns;
use crate::store::projection::{audit_of, json};
use crate::store::{Answer, ApprovalStatus, RunRecord, StoreError};

/// Runs that are looked at for what has expired, in one transaction.
const CHUNK: i64 = 256;

const ANSWER: &str = "UPDATE approvals SET status = $4, decided_at = clock_timestamp(), decided_by = $5, \
     decision_reason = $6, resolution = $7::json WHERE run_id = $1 AND call_id = $2 AND kind = ANY($3) \
     AND status = 'pending' AND (expires_at IS NULL OR expires_at > clock_timestamp())";

const AUDIT: &str = "INSERT INTO audit_log (tenant, at, id, run_id, call_id, subject, tool, rule, decision, reason, \
     outcome, arguments, duration_ms) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)";

/// A run that still waits is in the status of what it waits for: a review before a decision before
/// a result.
const STILL_WAITS: &str = "UPDATE runs SET status = (SELECT CASE min(CASE a.kind WHEN 'review' THEN 0 WHEN 'client' THEN 2 ELSE 1 END) \
     WHEN 0 THEN 'needs_review' WHEN 1 THEN 'awaiting_approval' ELSE 'awaiting_tool_results' END \
     FROM approvals a WHERE a.run_id = runs.id AND a.status = 'pending') \
     WHERE id = ANY($1) AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
     AND EXISTS (SELECT 1 FROM approvals w WHERE w.run_id = runs.id AND w.status = 'pending')";

/// A parked run that waits for nothing any more, or is to be cancelled, goes on.
const GO_ON: &str = "UPDATE runs r SET status = 'queued', available_at = clock_timestamp() WHERE id = ANY($1) \
     AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
     AND (cancel_requested_at IS NOT NULL OR NOT EXISTS \
     (SELECT 1 FROM approvals a WHERE a.run_id = r.id AND a.status = 'pending'))";

const DUE: &str = "SELECT DISTINCT run_id FROM approvals WHERE status = 'pending' AND expires_at <= clock_timestamp() \
     LIMIT $1";

const LOCK_DUE: &str = "SELECT id FROM runs WHERE id = ANY($1) ORDER BY id FOR UPDATE SKIP LOCKED";

const EXPIRE: &str = "UPDATE approvals SET status = 'expired', decided_at = clock_timestamp(), resolution = $2::json \
     WHERE run_id = ANY($1) AND status = 'pending' AND expires_at <= clock_timestamp()";

/// See [`crate::store::Store::answer`].
pub(super) async fn answer(
    connection: &mut PgConnection,
    tenant: &str,
    run: Uuid,
    call: Uuid,
    answer: &Answer,
) -> Result<Option<RunRecord>, StoreError> {
    let mut tx = connection.begin().await?;
    if sqlx::query(LOCK_RUN).bind(tenant).bind(run).fetch_optional(&mut *tx).await?.is_none() {
        tx.rollback().await?;
        return Ok(None);
    }
    let kinds: Vec<&str> = answer.kinds.iter().map(|kind| kind.as_str()).collect();
    let taken = sqlx::query(ANSWER)
        .bind(run)
        .bind(call)
        .bind(kinds)
        .bind(ApprovalStatus::after(&answer.resolution).as_str())
        .bind(&answer.decided_by)
        .bind(&answer.reason)
        .bind(json(&answer.resolution)?);
    if taken.execute(&mut *tx).await?.rows_affected() == 0 {
        tx.rollback().await?;
        return Ok(None);
    }
    if let Some(record) = &answer.audit {
        let row = audit_of(tenant, &answer.decided_by, run, record);
        let audit = sqlx::query(AUDIT)
            .bind(row.tenant)
            .bind(row.at)
            .bind(row.id)
            .bind(row.run_id)
            .bind(row.call_id);
        let audit = audit
            .bind(row.subject)
            .bind(row.tool)
            .bind(row.rule)
            .bind(row.decision)
            .bind(row.reason);
        audit.bind(row.outcome).bind(row.arguments).bind(row.duration_ms).execute(&mut *tx).await?;
    }
    go_on(&mut tx, &[run]).await?;
    let row = sqlx::query(RUN).bind(tenant).bind(run).fetch_one(&mut *tx).await?;
    let record = Columns(&row).run()?;
    tx.commit().await?;
    Ok(Some(record))
}

/// Queues those of these parked runs that wait for nothing any more; their rows are locked. How
/// many.
pub(super) async fn go_on(connection: &mut PgConnection, runs: &[Uuid]) -> Result<u64, StoreError> {
    sqlx::query(STILL_WAITS).bind(runs).execute(&mut *connection).await?;
    Ok(sqlx::query(GO_ON).bind(runs).execute(connection).await?.rows_affected())
}

/// See [`crate::store::Store::expire_approvals`].
pub(super) async fn expire(connection: &mut PgConnection) -> Result<u64, StoreError> {
    let due: Vec<Uuid> = sqlx::query_scalar(DUE).bind(CHUNK).fetch_all(&mut *connection).await?;
    if due.is_empty() {
        return Ok(0);
    }
    let mut tx = connection.begin().await?;
    let runs: Vec<Uuid> = sqlx::query_scalar(LOCK_DUE).bind(&due).fetch_all(&mut *tx).await?;
    let expire = sqlx::query(EXPIRE).bind(&runs).bind(json(&Resolution::Expired)?);
    let expired = expire.execute(&mut *tx).await?.rows_affected();
    go_on(&mut tx, &runs).await?;
    tx.commit().await?;
    Ok(expired)
}
