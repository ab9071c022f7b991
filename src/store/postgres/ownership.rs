//! Who drives a run: cancel requests, giving runs back, and taking them from dead replicas.
//!
//! A run that nobody drives is queued, and nothing is decided here: whoever claims it asks the
//! run's state machine. A takeover locks first and requeues second, in two statements of one
//! transaction, so that it waits for what its runs' owner is committing.

use std::time::Duration;

use sqlx::Connection;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use super::statements::{
    BURY, DESCENDANTS, DISOWN, FORGET, LOCK_ORPHANS, LOCK_STALE, REQUEST_CANCEL, REQUEUE, RUN,
    STRAYS,
};
use super::wakeups::{CHANNEL, cancel_payload};
use crate::store::decode::Columns;
use crate::store::{CancelOutcome, PARENT_ENDED, RunRecord, StoreError};

/// Runs that are taken over in one transaction.
const CHUNK: i64 = 64;

/// See [`crate::store::Store::request_cancel`]. One run after the other: whoever commits for
/// several of them locks their rows in no particular order.
pub(super) async fn request_cancel(
    connection: &mut PgConnection,
    tenant: &str,
    run: Uuid,
    reason: Option<&str>,
) -> Result<Option<CancelOutcome>, StoreError> {
    let requested = cancel_one(connection, tenant, run, reason).await?;
    let descendants: Vec<Uuid> =
        sqlx::query_scalar(DESCENDANTS).bind(run).fetch_all(&mut *connection).await?;
    let outcome = if let Some(run) = requested {
        CancelOutcome::Requested(run)
    } else {
        let row = sqlx::query(RUN).bind(tenant).bind(run);
        let Some(row) = row.fetch_optional(&mut *connection).await? else { return Ok(None) };
        CancelOutcome::AlreadyEnded(Columns(&row).run()?)
    };
    for descendant in descendants {
        cancel_one(connection, tenant, descendant, reason).await?;
    }
    Ok(Some(outcome))
}

async fn cancel_one(
    connection: &mut PgConnection,
    tenant: &str,
    run: Uuid,
    reason: Option<&str>,
) -> Result<Option<RunRecord>, StoreError> {
    let request = sqlx::query(REQUEST_CANCEL).bind(tenant).bind(run).bind(reason);
    let request = request.bind(CHANNEL).bind(cancel_payload(run));
    let row = request.fetch_optional(connection).await?;
    row.map(|row| Columns(&row).run()).transpose()
}

/// Asks children to cancel whose parent has ended without them.
pub(super) async fn cancel_strays(connection: &mut PgConnection) -> Result<(), StoreError> {
    let strays: Vec<(String, Uuid)> =
        sqlx::query_as(STRAYS).bind(CHUNK).fetch_all(&mut *connection).await?;
    for (tenant, run) in strays {
        cancel_one(connection, &tenant, run, Some(PARENT_ENDED)).await?;
    }
    Ok(())
}

/// Marks replicas dead whose lease has run out, and fences them; how many.
pub(super) async fn bury(
    connection: &mut PgConnection,
    sweeper: &str,
    lease: Duration,
) -> Result<u64, StoreError> {
    let lease = i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
    let mut tx = connection.begin().await?;
    let stale: Vec<String> =
        sqlx::query_scalar(LOCK_STALE).bind(lease).bind(sweeper).fetch_all(&mut *tx).await?;
    if !stale.is_empty() {
        sqlx::query(BURY).bind(&stale).execute(&mut *tx).await?;
        sqlx::query(DISOWN).bind(&stale).execute(&mut *tx).await?;
        sqlx::query(FORGET).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    Ok(stale.len() as u64)
}

/// Queues some runs without a living owner; none where none is left.
pub(super) async fn requeue_orphans(
    connection: &mut PgConnection,
) -> Result<Vec<Uuid>, StoreError> {
    let mut tx = connection.begin().await?;
    let runs: Vec<Uuid> = sqlx::query_scalar(LOCK_ORPHANS).bind(CHUNK).fetch_all(&mut *tx).await?;
    sqlx::query(REQUEUE).bind(&runs).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(runs)
}
