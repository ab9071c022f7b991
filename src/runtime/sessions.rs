//! Starts runs in sessions, by the policy for busy sessions, and deletes sessions.
//!
//! The store ensures that one run at a time holds a session. A request is placed here by the present state of
//! the session, and placed again if that has changed in the meantime. Waiting runs are claimed from the queue
//! like other queued runs, so a client that disconnects delays no other run.

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

/// How often a request is placed again because its session has changed in the meantime.
const TRIES: usize = 8;
/// The pause before a request is placed again in a session that looks unchanged.
const PAUSE: Duration = Duration::from_millis(50);
/// How often this replica looks for runs that should have been interrupted.
const POLL_INTERVAL: Duration = Duration::from_secs(2);
/// Runs that are interrupted at a time.
const BATCH: u32 = 100;

impl Runtime {
    /// Deletes a session with its runs and files, even if the caller disconnects.
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
        let trashed = Arc::default();
        let move_to_trash = |runs: &[DeletedRun]| workspaces.move_to_trash(runs, &trashed);
        let deleted = store.delete_session(tenant, session, subject, &move_to_trash).await;
        let is_gone = matches!(deleted, Ok(SessionDeleted::Gone));
        workspaces.settle(trashed, is_gone).await;
        if is_gone {
            workspaces.empty_bin().await;
        }
        deleted
    }

    /// Starts a run in its session: at once if the session is free, otherwise by the policy for busy sessions.
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
            let earlier: Option<&SessionRecord> = seen.as_ref().and_then(Option::as_ref);
            let is_deleted = earlier.is_some_and(|earlier| {
                session.as_ref().is_none_or(|now| now.created_at != earlier.created_at)
            });
            if is_deleted && checked.uploads.is_some() {
                return Err(StartError::SessionContended); // the files went with it
            }
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
                // It joins the session's queue at its start time, and delays no other run before.
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

    /// The earlier runs of a claimed run's session, the oldest first.
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

    /// The earlier runs of a session for a run that would start now.
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

    /// Cancels the run that holds the session, and the runs that are queued for it before this run.
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

/// Cancels the runs that a queued run should interrupt, if the request that queued it did not finish that.
/// Runs until `stop`.
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
