//! A batch as one statement a table, inside the caller's transaction.
//!
//! The fence comes first; what follows is written only for the runs that passed it.

use std::collections::HashSet;

use chrono::{DateTime, Utc};
use serde::Serialize;
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::approvals::{INSERT_APPROVALS, VOID_APPROVALS};
use super::statements::{
    INSERT_AUDIT, INSERT_CALLS, INSERT_EVENTS, INSERT_ITERATIONS, INSERT_OBSERVATIONS, INSERT_RUNS,
    STORED_EARLIER, UPDATE_CALLS, UPDATE_RUNS,
};
use crate::store::changes::Changes;
use crate::store::{RunWrite, StoreError};

/// Writes the changes; the runs that passed the fence.
pub(super) async fn write(
    connection: &mut SqliteConnection,
    owner: &str,
    changes: &Changes<'_>,
    now: DateTime<Utc>,
) -> Result<HashSet<Uuid>, StoreError> {
    let runs = json(&changes.runs)?;
    let mut written = HashSet::new();
    if changes.runs.iter().any(|run| run.new.is_none()) {
        let update = sqlx::query_scalar(UPDATE_RUNS).bind(owner).bind(&runs);
        collect(&mut written, update.fetch_all(&mut *connection).await?)?;
    }
    if changes.runs.iter().any(|run| run.new.is_some()) {
        let insert =
            sqlx::query_scalar(INSERT_RUNS).bind(owner).bind(runs).bind(now.timestamp_micros());
        collect(&mut written, insert.fetch_all(&mut *connection).await?)?;
    }
    let passed = |run: &Uuid| written.contains(run);
    insert(connection, INSERT_EVENTS, changes.events.iter().filter(|row| passed(&row.run_id)))
        .await?;
    insert(
        connection,
        INSERT_ITERATIONS,
        changes.iterations.iter().filter(|row| passed(&row.run_id)),
    )
    .await?;
    let (new_calls, known_calls): (Vec<_>, Vec<_>) = changes
        .calls
        .iter()
        .filter(|row| passed(&row.run_id))
        .partition(|row| row.proposed.is_some());
    insert(connection, INSERT_CALLS, new_calls.into_iter()).await?;
    insert(connection, UPDATE_CALLS, known_calls.into_iter()).await?;
    insert(connection, INSERT_AUDIT, changes.audit.iter().filter(|row| passed(&row.run_id)))
        .await?;
    insert(
        connection,
        INSERT_OBSERVATIONS,
        changes.observations.iter().filter(|row| passed(&row.run_id)),
    )
    .await?;
    insert(
        connection,
        INSERT_APPROVALS,
        changes.approvals.iter().filter(|row| passed(&row.run_id)),
    )
    .await?;
    insert(connection, VOID_APPROVALS, changes.voided.iter().filter(|row| passed(&row.run_id)))
        .await?;
    Ok(written)
}

/// Whether a repeated write that did not pass is durable all the same.
pub(super) async fn stored_earlier(
    connection: &mut SqliteConnection,
    write: &RunWrite,
) -> Result<bool, StoreError> {
    let Some(last) = write.events.last() else { return Ok(false) };
    let stored = sqlx::query(STORED_EARLIER)
        .bind(write.run_id.to_string())
        .bind(last.seq)
        .bind(write.epoch)
        .bind(last.at.timestamp_micros());
    Ok(stored.fetch_optional(connection).await?.is_some())
}

async fn insert<'r, T: Serialize + 'r>(
    connection: &mut SqliteConnection,
    statement: &'static str,
    rows: impl Iterator<Item = &'r T>,
) -> Result<(), StoreError> {
    let rows: Vec<&'r T> = rows.collect();
    if !rows.is_empty() {
        sqlx::query(statement).bind(json(&rows)?).execute(connection).await?;
    }
    Ok(())
}

fn collect(written: &mut HashSet<Uuid>, ids: Vec<String>) -> Result<(), StoreError> {
    for id in ids {
        written.insert(
            Uuid::parse_str(&id)
                .map_err(|error| StoreError::Failed(format!("a run id: {error}")))?,
        );
    }
    Ok(())
}

fn json<T: Serialize>(rows: &T) -> Result<String, StoreError> {
    serde_json::to_string(rows)
        .map_err(|error| StoreError::Failed(format!("rows are not JSON: {error}")))
}
