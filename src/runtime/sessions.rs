//! Which run of a session goes on, what becomes of one that finds it taken, and how a session is
//! deleted.
//!
//! That one run at a time holds a session is decided by the store; here a request is placed by what
//! the session looks like, and placed anew where that has changed in the meantime. Who waits is claimed
//! from the queue like any other queued run, so a client that disconnects costs no run its turn.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::start::{Accepted, Checked, Mode, StartError};
use super::{FilesError, Runtime};
use crate::agents::definition::HistorySection;
use crate::clock;
use crate::run::{Caller, OnSessionBusy};
use crate::store::{
    DeletedRun, NewRun, SessionDeleted, SessionPlace, SessionRecord, Store, StoreError,
};

/// How often a request is placed anew because its session has changed in the meantime.
const TRIES: usize = 8;
/// Before a request is placed anew in a session that looks the same.
const PAUSE: Duration = Duration::from_millis(50);
/// The pause between two looks for runs that were to be interrupted.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Runs that are interrupted after one look.
const BATCH: u32 = 100;

impl Runtime {
    /// Deletes a session with its runs and files, also where the caller does not wait for that.
    ///
    /// # Errors
    /// [`FilesError`]; nothing was deleted then.
    pub async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
        subject: &str,
    ) -> Result<SessionDeleted, FilesError> {
        if let Some(fault) = self.inner.workspaces.fault() {
            return Err(io::Error::other(fault).into());
        }
        let (tenant, session) = (tenant.to_owned(), session.to_owned());
        let (runtime, subject) = (self.clone(), subject.to_owned());
        let tasks = &self.inner.driven.tasks;
        let deletion = tasks
            .spawn(async move { runtime.delete_with_files(&tenant, &session, &subject).await });
        let deleted = deletion.await.map_err(|stopped| io::Error::other(stopped.to_string()))?;
        Ok(deleted?)
    }

    async fn delete_with_files(
        &self,
        tenant: &str,
        session: &str,
        subject: &str,
    ) -> Result<SessionDeleted, StoreError> {
        let (workspaces, store) = (&self.inner.workspaces, &self.inner.store);
        let throwing = Arc::default();
        let move_to_trash = |runs: &[DeletedRun]| workspaces.move_to_trash(runs, &throwing);
        let deleted = store.delete_session(tenant, session, subject, &move_to_trash).await;
        let is_gone = matches!(deleted, Ok(SessionDeleted::Gone));
        workspaces.settle(throwing, is_gone).await;
        if is_gone {
            workspaces.empty_bin().await;
        }
        deleted
    }

    /// Starts a run in its session: at once where that is free, else by the policy for busy ones.
    pub(super) async fn begin_in(
        &self,
        session_id: &str,
        checked: Checked,
        mode: Mode,
        busy: OnSessionBusy,
    ) -> Result<Accepted, StartError> {
        let tenant = checked.caller.tenant.clone();
        let mut seen = None;
        for _ in 0..TRIES {
            let session =
                self.session_of(&tenant, session_id, checked.plan.agent.definition.history).await?;
            if seen.as_ref() == Some(&session) {
                if self.inner.store.is_taken(&tenant, &checked.new).await? {
                    return Err(StartError::RunIdTaken(checked.new.id));
                }
                tokio::time::sleep(PAUSE).await; // the session may be about to be deleted
            }
            if let Some(session) =
                session.as_ref().filter(|session| session.agent != checked.new.agent)
            {
                return Err(StartError::SessionOfOtherAgent(session.agent.clone()));
            }
            let live = session.as_ref().map_or(&[][..], |session| &session.live);
            if live.contains(&checked.new.id) {
                return Err(StartError::RunIdTaken(checked.new.id));
            }
            let mut placed = checked.clone();
            let is_delayed = checked.new.queue.available_at.is_some();
            if is_delayed && (live.is_empty() || busy != OnSessionBusy::Reject) {
                // It joins the line when its time has come, and holds up no other run before.
                placed.new.session_place = Some(SessionPlace::Waits);
                return self.admit(placed, Mode::Queued).await;
            }
            if let Some(holder) = live.first() {
                let place = match busy {
                    OnSessionBusy::Reject => return Err(StartError::SessionBusy(*holder)),
                    OnSessionBusy::Enqueue => SessionPlace::Waits,
                    OnSessionBusy::Interrupt => SessionPlace::Next,
                };
                placed.new.session_place = Some(place);
                let accepted = self.admit(placed, Mode::Queued).await?;
                if place == SessionPlace::Next
                    && let Err(error) = self
                        .interrupt_those_before(&checked.caller, session_id, checked.new.id)
                        .await
                {
                    error.log_retry("the other runs of a session are interrupted later");
                }
                return Ok(accepted);
            }
            let turn = session.as_ref().map_or(0, |session| session.turn) + 1;
            placed.new.session_place = Some(SessionPlace::Holds { turn });
            placed.earlier =
                session.as_ref().map(|session| session.ended.clone()).unwrap_or_default();
            match self.admit(placed, mode).await {
                Err(StartError::RunIdTaken(_)) => seen = Some(session),
                outcome => return outcome,
            }
        }
        Err(StartError::SessionContended)
    }

    /// The runs of a claimed run's session before it, the oldest first.
    pub(super) async fn earlier_runs(
        &self,
        tenant: &str,
        new: &NewRun,
        bounds: HistorySection,
    ) -> Result<Vec<Uuid>, StoreError> {
        let Some(session_id) = new.session_id.as_deref().filter(|_| new.parent_run_id.is_none())
        else {
            return Ok(Vec::new());
        };
        let session = self.session_of(tenant, session_id, bounds).await?;
        Ok(session.map(|session| session.ended).unwrap_or_default())
    }

    /// The runs of a session that a run could begin in now, as a start would find them.
    pub(super) async fn runs_before(
        &self,
        tenant: &str,
        new: &NewRun,
        bounds: HistorySection,
        busy: OnSessionBusy,
    ) -> Result<Vec<Uuid>, StartError> {
        let Some(session_id) = new.session_id.as_deref() else { return Ok(Vec::new()) };
        let Some(session) = self.session_of(tenant, session_id, bounds).await? else {
            return Ok(Vec::new());
        };
        match session.live.first() {
            _ if session.agent != new.agent => Err(StartError::SessionOfOtherAgent(session.agent)),
            Some(holder) if busy == OnSessionBusy::Reject => Err(StartError::SessionBusy(*holder)),
            _ => Ok(session.ended),
        }
    }

    async fn session_of(
        &self,
        tenant: &str,
        session_id: &str,
        bounds: HistorySection,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let ended = if bounds.max_tokens == 0 { 0 } else { bounds.max_runs };
        self.inner.store.session(tenant, session_id, ended).await
    }

    /// Cancels the run that holds the session, and those queued for it before this run.
    async fn interrupt_those_before(
        &self,
        caller: &Caller,
        session_id: &str,
        run: Uuid,
    ) -> Result<(), StoreError> {
        let tenant = &caller.tenant;
        let session = self.inner.store.session(tenant, session_id, 0).await?;
        let live = session.map(|session| session.live).unwrap_or_default();
        let before = live.iter().take_while(|live| **live != run).filter(|_| live.contains(&run));
        for other in before {
            self.cancel(tenant, *other, &caller.subject, Some(&interrupted_by(run))).await?;
        }
        self.inner.queue.changed.notify_one();
        Ok(())
    }
}

/// Cancels what a run takes the place of where the request that queued it could not do that to its end,
/// until `stop`.
pub(super) async fn interrupt_displaced(store: Arc<Store>, stop: CancellationToken) {
    let mut look = clock::every(POLL_INTERVAL);
    while stop.run_until_cancelled(look.tick()).await.is_some() {
        if let Err(error) = interrupt_those_displaced(&store).await {
            error.log_retry("the other runs of a session are interrupted later");
        }
    }
}

async fn interrupt_those_displaced(store: &Store) -> Result<(), StoreError> {
    for (tenant, run, by, subject) in store.displaced_runs(BATCH).await? {
        store.request_cancel(&tenant, run, &subject, Some(&interrupted_by(by))).await?;
    }
    Ok(())
}

fn interrupted_by(run: Uuid) -> String {
    format!("Interrupted by run {run} of the same session.")
}
