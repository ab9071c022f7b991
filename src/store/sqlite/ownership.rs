//! Who drives a run: cancelling one that nobody drives, and taking over those of earlier processes.
//!
//! All of it runs inside `BEGIN IMMEDIATE`, which is the lock; what to do is decided in
//! [`crate::store::takeover`].

use chrono::{DateTime, TimeDelta, Utc};
use sqlx::sqlite::SqliteConnection;
use uuid::Uuid;

use super::approvals;
use super::commit;
use super::statements::{
    BURY, DESCENDANTS, FORGET, ORPHANS, OUTCOME_UNKNOWN, OWNED, PARK, REQUEST_CANCEL, REQUEUE, RUN,
    SEIZE, STRAYS, TAIL, UNDER_WAY,
};
use crate::run::RunStatus;
use crate::store::decode::Columns;
use crate::store::projection::project;
use crate::store::takeover::{
    CARETAKER, Locked, STRAY, cancelled, decide, may_have_acted, requeue_delay, reviews,
    waiting_phase,
};
use crate::store::{CancelOutcome, RunWrite, StoreError, Swept};

/// Runs that are taken over at a time.
const CHUNK: i64 = 64;

/// See [`crate::store::Store::request_cancel`].
pub(super) async fn request_cancel(
    connection: &mut SqliteConnection,
    tenant: &str,
    run: Uuid,
    reason: Option<&str>,
) -> Result<Option<CancelOutcome>, StoreError> {
    let now = Utc::now();
    let row = sqlx::query(RUN).bind(tenant).bind(run.to_string());
    let Some(row) = row.fetch_optional(&mut *connection).await? else { return Ok(None) };
    let descendants =
        sqlx::query_scalar(DESCENDANTS).bind(run.to_string()).fetch_all(&mut *connection).await?;
    cancel_all(connection, descendants, reason).await?;
    let mut locked = Columns(&row).locked()?;
    let status = locked.record.status;
    Ok(Some(if status.is_terminal() {
        CancelOutcome::AlreadyEnded(locked.record)
    } else if status == RunStatus::Running {
        let flag = sqlx::query(REQUEST_CANCEL)
            .bind(run.to_string())
            .bind(reason)
            .bind(now.timestamp_micros());
        let row = flag.fetch_one(connection).await?;
        CancelOutcome::Requested(Columns(&row).run()?)
    } else {
        read_tail(connection, &mut locked).await?;
        let ending = cancelled(&locked, waiting_phase(status), reason, now);
        seize(connection, run, 0).await?;
        end(connection, &[ending], now).await?;
        let row = sqlx::query(RUN).bind(tenant).bind(run.to_string());
        let row = row.fetch_one(connection).await?;
        CancelOutcome::EndedNow(Columns(&row).run()?)
    }))
}

/// Cancels runs: those that are driven are flagged, the others end here. How many did.
async fn cancel_all(
    connection: &mut SqliteConnection,
    runs: Vec<String>,
    reason: Option<&str>,
) -> Result<u64, StoreError> {
    if runs.is_empty() {
        return Ok(0);
    }
    let now = Utc::now();
    let under_way = sqlx::query(UNDER_WAY).bind(serde_json::Value::from(runs).to_string());
    let rows = under_way.fetch_all(&mut *connection).await?;
    let mut endings = Vec::new();
    for row in &rows {
        let mut run = Columns(row).locked()?;
        let (id, status) = (run.record.id, run.record.status);
        if status == RunStatus::Running {
            let flag = sqlx::query(REQUEST_CANCEL)
                .bind(id.to_string())
                .bind(reason)
                .bind(now.timestamp_micros());
            flag.execute(&mut *connection).await?;
        } else {
            read_tail(connection, &mut run).await?;
            endings.push(cancelled(&run, waiting_phase(status), reason, now));
            seize(connection, id, 0).await?;
        }
    }
    end(connection, &endings, now).await?;
    Ok(endings.len() as u64)
}

/// Cancels what the sweep finds without a parent that waits for it; whether there was something.
pub(super) async fn cancel_strays(
    connection: &mut SqliteConnection,
    swept: &mut Swept,
) -> Result<bool, StoreError> {
    let strays: Vec<String> =
        sqlx::query_scalar(STRAYS).bind(CHUNK).fetch_all(&mut *connection).await?;
    let found = !strays.is_empty();
    swept.cancelled += cancel_all(connection, strays, Some(STRAY)).await?;
    Ok(found)
}

/// See [`crate::store::Store::release`].
pub(super) async fn release(
    connection: &mut SqliteConnection,
    owner: &str,
    run: Option<Uuid>,
) -> Result<u64, StoreError> {
    let now = Utc::now();
    let select = sqlx::query(OWNED).bind(owner).bind(run.map(|run| run.to_string()));
    let rows = select.fetch_all(&mut *connection).await?;
    for row in &rows {
        let mut run = Columns(row).locked()?;
        read_tail(connection, &mut run).await?;
        if may_have_acted(&run) {
            park(connection, &run, now).await?;
        } else {
            requeue(connection, run.record.id, now).await?;
        }
    }
    Ok(rows.len() as u64)
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

/// Takes over some runs without a living owner and counts them; `false` when none is left.
pub(super) async fn take_over(
    connection: &mut SqliteConnection,
    max_crashes: u32,
    swept: &mut Swept,
) -> Result<bool, StoreError> {
    let now = Utc::now();
    let rows = sqlx::query(ORPHANS).bind(CHUNK).fetch_all(&mut *connection).await?;
    let mut runs = rows.iter().map(|row| Columns(row).locked()).collect::<Result<Vec<_>, _>>()?;
    for run in &mut runs {
        read_tail(connection, run).await?;
        seize(connection, run.record.id, 1).await?;
    }
    let decided = decide(&runs, max_crashes, now, swept);
    end(connection, &decided.endings, now).await?;
    for run in runs.iter().filter(|run| decided.review.contains(&run.record.id)) {
        park(connection, run, now).await?;
    }
    for (run, crashes) in decided.requeue {
        requeue(connection, run, now + requeue_delay(crashes)).await?;
    }
    Ok(!runs.is_empty())
}

/// Parks a run until somebody has found out what it did; one of which that was told already is
/// queued.
async fn park(
    connection: &mut SqliteConnection,
    run: &Locked,
    now: DateTime<Utc>,
) -> Result<(), StoreError> {
    let id = run.record.id.to_string();
    approvals::ask(connection, &reviews(run, now)).await?;
    sqlx::query(PARK).bind(&id).execute(&mut *connection).await?;
    sqlx::query(OUTCOME_UNKNOWN).bind(&id).execute(&mut *connection).await?;
    approvals::go_on(connection, &[id], now).await
}

async fn requeue(
    connection: &mut SqliteConnection,
    run: Uuid,
    turn: DateTime<Utc>,
) -> Result<(), StoreError> {
    sqlx::query(REQUEUE)
        .bind(run.to_string())
        .bind(turn.timestamp_micros())
        .execute(connection)
        .await?;
    Ok(())
}

async fn read_tail(connection: &mut SqliteConnection, run: &mut Locked) -> Result<(), StoreError> {
    let tail = sqlx::query(TAIL).bind(run.record.id.to_string());
    let rows = tail.fetch_all(connection).await?;
    run.tail = rows.iter().map(|row| Columns(row).event()).collect::<Result<_, _>>()?;
    Ok(())
}

async fn seize(
    connection: &mut SqliteConnection,
    run: Uuid,
    crashes: i64,
) -> Result<(), StoreError> {
    let seize = sqlx::query(SEIZE).bind(run.to_string()).bind(CARETAKER).bind(crashes);
    seize.execute(connection).await?;
    Ok(())
}

async fn end(
    connection: &mut SqliteConnection,
    endings: &[RunWrite],
    now: DateTime<Utc>,
) -> Result<(), StoreError> {
    let written = commit::write(connection, CARETAKER, &project(endings)?, now).await?;
    if written.len() == endings.len() {
        Ok(())
    } else {
        Err(StoreError::Failed("a seized run did not take its ending".to_owned()))
    }
}
