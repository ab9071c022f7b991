//! Who drives a run: cancel requests, and taking runs from earlier processes.
//!
//! All of it runs inside `BEGIN IMMEDIATE`, which is the lock. A run that nobody drives is queued,
//! and nothing is decided here: whoever claims it asks the run's state machine.

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::statements::{BURY, DESCENDANTS, FORGET, REQUEST_CANCEL, REQUEUE_ORPHANS, RUN, STRAYS};
use crate::store::decode::Columns;
use crate::store::{CancelOutcome, PARENT_ENDED, RunRecord, StoreError};

/// Children that are cancelled at a time.
const CHUNK: i64 = 64;

/// See [`crate::store::Store::request_cancel`].
pub(super) async fn request_cancel(
    connection: &mut SqliteConnection,
    tenant: &str,
    run: Uuid,
    reason: Option<&str>,
) -> Result<Option<CancelOutcome>, StoreError> {
    let run = run.to_string();
    let requested = cancel_one(connection, tenant, &run, reason).await?;
    let outcome = if let Some(run) = requested {
        CancelOutcome::Requested(run)
    } else {
        let row = sqlx::query(RUN).bind(tenant).bind(&run);
        let Some(row) = row.fetch_optional(&mut *connection).await? else { return Ok(None) };
        CancelOutcome::AlreadyEnded(Columns(&row).run()?)
    };
    let descendants: Vec<String> =
        sqlx::query_scalar(DESCENDANTS).bind(&run).fetch_all(&mut *connection).await?;
    for descendant in descendants {
        cancel_one(connection, tenant, &descendant, reason).await?;
    }
    Ok(Some(outcome))
}

async fn cancel_one(
    connection: &mut SqliteConnection,
    tenant: &str,
    run: &str,
    reason: Option<&str>,
) -> Result<Option<RunRecord>, StoreError> {
    let request = sqlx::query(REQUEST_CANCEL).bind(tenant).bind(run).bind(reason);
    let row = request.bind(Utc::now().timestamp_micros()).fetch_optional(connection).await?;
    row.map(|row| Columns(&row).run()).transpose()
}

/// Asks children to cancel whose parent has ended without them; whether there were any.
pub(super) async fn cancel_strays(connection: &mut SqliteConnection) -> Result<bool, StoreError> {
    let strays: Vec<(String, String)> =
        sqlx::query_as(STRAYS).bind(CHUNK).fetch_all(&mut *connection).await?;
    for (tenant, run) in &strays {
        cancel_one(connection, tenant, run, Some(PARENT_ENDED)).await?;
    }
    Ok(!strays.is_empty())
}

/// Marks replicas dead that do not live in this process or whose heartbeat is too old; how many.
pub(super) async fn bury(
    connection: &mut SqliteConnection,
    sweeper: &str,
    oldest: DateTime<Utc>,
    living: &[String],
) -> Result<u64, StoreError> {
    let living = serde_json::Value::from(living).to_string();
    let bury = sqlx::query(BURY).bind(oldest.timestamp_micros()).bind(living).bind(sweeper);
    let buried = bury.execute(&mut *connection).await?.rows_affected();
    let forgotten = Utc::now() - TimeDelta::days(1);
    sqlx::query(FORGET).bind(forgotten.timestamp_micros()).execute(connection).await?;
    Ok(buried)
}

/// Queues the runs without a living owner.
pub(super) async fn requeue_orphans(
    connection: &mut SqliteConnection,
) -> Result<Vec<Uuid>, StoreError> {
    let requeue = sqlx::query_scalar(REQUEUE_ORPHANS).bind(Utc::now().timestamp_micros());
    let runs: Vec<String> = requeue.fetch_all(connection).await?;
    let damaged = |error| StoreError::Failed(format!("the id of a run cannot be read: {error}"));
    runs.iter().map(|run| Uuid::parse_str(run).map_err(damaged)).collect()
}
