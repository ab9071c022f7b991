//! Who drives a run: cancelling one that nobody drives, and taking over those of dead replicas.
//!
//! Both lock first and read second, in two statements of one transaction: one statement would
//! decide on a snapshot older than its lock and could miss a dispatch or a cancel request. What to
//! do is decided in [`crate::store::takeover`].

use std::time::Duration;

use chrono::Utc;
use sqlx::Connection;
use sqlx::postgres::PgConnection;
use uuid::Uuid;

use super::approvals;
use super::commit;
use super::statements::{
    BURY, DESCENDANTS, DISOWN, FORGET, LOCK_ORPHANS, LOCK_OWNED, LOCK_RUN, LOCK_STALE, LOCKED_RUNS,
    OUTCOME_UNKNOWN, PARK, RELEASE, REQUEST_CANCEL, REQUEUE, RUN, SEIZE, STRAYS, TAIL,
};
use super::wakeups::{CHANNEL, cancel_payload};
use crate::event::Event;
use crate::run::RunStatus;
use crate::store::decode::Columns;
use crate::store::projection::project;
use crate::store::takeover::{
    CARETAKER, Locked, STRAY, cancelled, decide, may_have_acted, requeue_delay, reviews,
    waiting_phase,
};
use crate::store::{CancelOutcome, RunWrite, StoreError, Swept};

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
    let outcome = cancel_one(connection, tenant, run, reason).await?;
    if outcome.is_some() {
        let descendants: Vec<Uuid> =
            sqlx::query_scalar(DESCENDANTS).bind(run).fetch_all(&mut *connection).await?;
        for descendant in descendants {
            cancel_one(connection, tenant, descendant, reason).await?;
        }
    }
    Ok(outcome)
}

async fn cancel_one(
    connection: &mut PgConnection,
    tenant: &str,
    run: Uuid,
    reason: Option<&str>,
) -> Result<Option<CancelOutcome>, StoreError> {
    let mut tx = connection.begin().await?;
    let row = sqlx::query(LOCK_RUN).bind(tenant).bind(run).fetch_optional(&mut *tx).await?;
    let Some(row) = row else {
        tx.rollback().await?;
        return Ok(None);
    };
    let mut locked = [Columns(&row).locked()?];
    let status = locked[0].record.status;
    let outcome = if status.is_terminal() {
        let [Locked { record, .. }] = locked;
        CancelOutcome::AlreadyEnded(record)
    } else if status == RunStatus::Running {
        let flag = sqlx::query(REQUEST_CANCEL)
            .bind(run)
            .bind(reason)
            .bind(CHANNEL)
            .bind(cancel_payload(run));
        let row = flag.fetch_one(&mut *tx).await?;
        CancelOutcome::Requested(Columns(&row).run()?)
    } else {
        read_tails(&mut tx, &mut locked).await?;
        let ending = cancelled(&locked[0], waiting_phase(status), reason, Utc::now());
        seize(&mut tx, &[run], 0).await?;
        end(&mut tx, &[ending]).await?;
        let row = sqlx::query(RUN).bind(tenant).bind(run).fetch_one(&mut *tx).await?;
        CancelOutcome::EndedNow(Columns(&row).run()?)
    };
    tx.commit().await?;
    Ok(Some(outcome))
}

/// Cancels what the sweep finds without a parent that waits for it.
pub(super) async fn cancel_strays(
    connection: &mut PgConnection,
    swept: &mut Swept,
) -> Result<(), StoreError> {
    let strays: Vec<(String, Uuid)> =
        sqlx::query_as(STRAYS).bind(CHUNK).fetch_all(&mut *connection).await?;
    for (tenant, run) in strays {
        let outcome = cancel_one(connection, &tenant, run, Some(STRAY)).await?;
        swept.cancelled += u64::from(matches!(outcome, Some(CancelOutcome::EndedNow(_))));
    }
    Ok(())
}

/// See [`crate::store::Store::release`].
pub(super) async fn release(
    connection: &mut PgConnection,
    owner: &str,
    run: Option<Uuid>,
) -> Result<u64, StoreError> {
    let mut tx = connection.begin().await?;
    let ids: Vec<Uuid> =
        sqlx::query_scalar(LOCK_OWNED).bind(owner).bind(run).fetch_all(&mut *tx).await?;
    let runs = read_locked(&mut tx, &ids).await?;
    let (review, requeue): (Vec<&Locked>, Vec<&Locked>) =
        runs.iter().partition(|run| may_have_acted(run));
    park(&mut tx, &review).await?;
    let requeue: Vec<Uuid> = requeue.into_iter().map(|run| run.record.id).collect();
    sqlx::query(RELEASE).bind(requeue).execute(&mut *tx).await?;
    tx.commit().await?;
    Ok(runs.len() as u64)
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

/// Takes over some runs without a living owner and counts them; `false` when none is left.
pub(super) async fn take_over(
    connection: &mut PgConnection,
    max_crashes: u32,
    swept: &mut Swept,
) -> Result<bool, StoreError> {
    let mut tx = connection.begin().await?;
    let ids: Vec<Uuid> = sqlx::query_scalar(LOCK_ORPHANS).bind(CHUNK).fetch_all(&mut *tx).await?;
    if ids.is_empty() {
        tx.rollback().await?;
        return Ok(false);
    }
    let runs = read_locked(&mut tx, &ids).await?;
    let mut counted = *swept;
    let decided = decide(&runs, max_crashes, Utc::now(), &mut counted);
    seize(&mut tx, &ids, 1).await?;
    end(&mut tx, &decided.endings).await?;
    let review: Vec<&Locked> =
        runs.iter().filter(|run| decided.review.contains(&run.record.id)).collect();
    park(&mut tx, &review).await?;
    for (run, crashes) in &decided.requeue {
        let delay = i64::try_from(requeue_delay(*crashes).as_micros()).unwrap_or(i64::MAX);
        sqlx::query(REQUEUE).bind(run).bind(delay).execute(&mut *tx).await?;
    }
    tx.commit().await?;
    *swept = counted;
    Ok(true)
}

/// Statement two: the locked rows and the ends of their journals, as they are now.
async fn read_locked(
    connection: &mut PgConnection,
    ids: &[Uuid],
) -> Result<Vec<Locked>, StoreError> {
    let rows = sqlx::query(LOCKED_RUNS).bind(ids).fetch_all(&mut *connection).await?;
    let mut runs = rows.iter().map(|row| Columns(row).locked()).collect::<Result<Vec<_>, _>>()?;
    read_tails(connection, &mut runs).await?;
    Ok(runs)
}

/// Parks runs until somebody has found out what they did; one of which that was told already is
/// queued.
async fn park(connection: &mut PgConnection, runs: &[&Locked]) -> Result<(), StoreError> {
    if runs.is_empty() {
        return Ok(());
    }
    for run in runs {
        approvals::ask(connection, &reviews(run, Utc::now())).await?;
    }
    let runs: Vec<Uuid> = runs.iter().map(|run| run.record.id).collect();
    sqlx::query(PARK).bind(&runs).execute(&mut *connection).await?;
    sqlx::query(OUTCOME_UNKNOWN).bind(&runs).execute(&mut *connection).await?;
    approvals::go_on(connection, &runs).await?;
    Ok(())
}

async fn read_tails(connection: &mut PgConnection, runs: &mut [Locked]) -> Result<(), StoreError> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.record.id).collect();
    let rows = sqlx::query(TAIL).bind(&ids).fetch_all(connection).await?;
    for row in &rows {
        let event: Event = Columns(row).event()?;
        if let Some(run) = runs.iter_mut().find(|run| run.record.id == event.run_id) {
            run.tail.push(event);
        }
    }
    Ok(())
}

async fn seize(
    connection: &mut PgConnection,
    runs: &[Uuid],
    crashes: i64,
) -> Result<(), StoreError> {
    let seize = sqlx::query(SEIZE).bind(runs).bind(CARETAKER).bind(crashes);
    seize.execute(connection).await?;
    Ok(())
}

async fn end(connection: &mut PgConnection, endings: &[RunWrite]) -> Result<(), StoreError> {
    if endings.is_empty() {
        return Ok(());
    }
    let written = commit::write(connection, CARETAKER, &project(endings)?).await?;
    if written.len() == endings.len() {
        Ok(())
    } else {
        Err(StoreError::Failed("a seized run did not take its ending".to_owned()))
    }
}
