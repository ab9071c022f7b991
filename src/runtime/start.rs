//! Starting a run: everything that can be refused is refused here, before anything is stored.
//!
//! A run is driven by this replica at once, or queued for any of them. A repeated idempotency key
//! starts nothing: it finds the run that it stands for.

mod checks;
mod error;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout_at};
use uuid::Uuid;

pub(super) use self::checks::{Checked, opening};
pub use self::error::StartError;
use self::error::at;
use super::identity::{Lineage, RunIdentity};
use super::ownership::FIRST;
use super::queue_admission;
use super::slots::RunSlot;
use super::uploads::Uploads;
use super::worker::{DrivenRun, RunNotices};
use super::workspaces::{OpenError, User};
use super::{Follower, Runtime};
use crate::agents::Agent;
use crate::agents::prompt::{Background, Opening};
use crate::engine::{AppendFailed, Entry, State, Stopped};
use crate::event::{Act, AuditAction, Event, RunEvent};
use crate::run::{Caller, Overrides, RunKind, RunStatus, Totals};
use crate::store::writer::AppendError;
use crate::store::{Idempotency, QueuePlace, RunRecord};

/// How long files of a run may take to be here, however short the caller waits.
const SOON: Duration = Duration::from_millis(500);

/// Which replica drives a run, and when its acceptance is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// This replica; the caller waits for the end only.
    Now,
    /// This replica; accepted when its row is stored.
    Stored,
    /// The same, for a caller that follows the run from its first moment.
    Followed,
    /// Whichever replica takes it from the queue; accepted when its row is stored.
    Queued,
}

/// A run to start.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// Who asks; the run keeps these scopes.
    pub caller: Arc<Caller>,
    /// The agent's name.
    pub agent: String,
    /// Single shot or loop.
    pub kind: RunKind,
    /// Here or by the queue.
    pub mode: Mode,
    /// What makes a repetition of this request known.
    pub idempotency: Option<Idempotency>,
    /// The caller's place in a trace (W3C `traceparent`).
    pub traceparent: Option<String>,
    /// The run's id, where the caller chose one.
    pub run_id: Option<Uuid>,
    /// Inputs, an object.
    pub inputs: Value,
    /// Labels.
    pub metadata: BTreeMap<String, String>,
    /// The session, where the caller names one.
    pub session_id: Option<String>,
    /// What the request narrows.
    pub overrides: Overrides,
    /// Where the caller wants events of the run sent.
    pub webhook: Option<String>,
    /// Files for the run's workspace.
    pub uploads: Option<Arc<Uploads>>,
    /// When it is taken from the queue.
    pub queue: QueuePlace,
    /// Until when the caller waits, where it then takes a run that waits for a replica.
    pub until: Option<Instant>,
}

/// Why a request could not be answered with the outcome of its run.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// Another replica took over, the store went away, or the service is stopping. The run goes on
    /// or is recovered; ask for it by id.
    #[error("run {0} continues in the background")]
    Detached(Uuid),
    /// The run is parked; it is read by its id.
    #[error("run {0} is parked")]
    Parked(Uuid),
}

/// What became of a request to start a run.
pub enum Accepted {
    /// It is driven here.
    Started(Started),
    /// It waits for a replica.
    Queued(Uuid),
    /// The idempotency key stands for this run, which may be over or still going on.
    Known(Uuid),
}

/// A run that this replica drives.
pub struct Started {
    /// Its id.
    pub run_id: Uuid,
    /// Its events from the first one on, where they were asked for.
    pub follower: Option<Follower>,
    end: oneshot::Receiver<Option<RunRecord>>,
}

impl Started {
    /// Resolves when the run has ended and its end is durable. Dropping it does not stop the run.
    pub async fn finished(self) -> Result<RunRecord, WaitError> {
        let end = self.end.await.map_err(|_| WaitError::Detached(self.run_id))?;
        end.ok_or(WaitError::Parked(self.run_id))
    }
}

/// A run that this replica drives from its start.
pub(super) struct Launch {
    pub(super) checked: Checked,
    pub(super) opening: Opening,
    pub(super) background: Background,
    /// Where it stands, if another run started it.
    pub(super) lineage: Option<Arc<Lineage>>,
    pub(super) slot: RunSlot,
    pub(super) mode: Mode,
}

impl Runtime {
    /// Checks everything that can be refused, then starts the run.
    ///
    /// # Errors
    /// [`StartError`]; nothing was stored then.
    pub async fn start(&self, request: StartRequest) -> Result<Accepted, StartError> {
        let Some(idempotency) = request.idempotency.clone() else {
            return Box::pin(self.begin(request)).await;
        };
        let caller = Arc::clone(&request.caller);
        let keys = &self.inner.idempotency_keys;
        let _lock = keys.lock(&caller.tenant, &idempotency.key).await;
        if let Some(known) = keys.run_of(&caller, &idempotency).await? {
            return Ok(Accepted::Known(known));
        }
        match Box::pin(self.begin(request)).await {
            // The same request may have come to another replica at the same time, which was faster.
            Err(
                taken @ (StartError::RunIdTaken(_)
                | StartError::SessionBusy(_)
                | StartError::Overloaded
                | StartError::SessionContended
                | StartError::TooManyRuns(_)),
            ) => keys.run_of(&caller, &idempotency).await?.map(Accepted::Known).ok_or(taken),
            outcome => outcome,
        }
    }

    async fn begin(&self, request: StartRequest) -> Result<Accepted, StartError> {
        let inner = &self.inner;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        if !inner.writer.is_available() {
            inner.store.check_writable().await?; // writes are waiting: refuse at once, or be the first to find it back
        }
        let session_id = request.session_id.clone();
        let has_rival =
            request.run_id.is_some() || request.idempotency.is_some() || session_id.is_some();
        let mode = if request.mode == Mode::Now && has_rival { Mode::Stored } else { request.mode };
        if let Some(id) = request.run_id.filter(|_| request.uploads.is_some())
            && inner.store.run(&request.caller.tenant, id).await?.is_some()
        {
            return Err(StartError::RunIdTaken(id)); // before its files are replaced
        }
        if request.queue.available_at.is_some() && mode != Mode::Queued {
            let why = "needs a queued run: send `Prefer: respond-async`";
            return Err(StartError::InvalidOverride(at("/available_at", why.into())));
        }
        let busy = request.overrides.on_session_busy;
        let checked = self.check(self.agent(&request.agent)?, request, Vec::new())?;
        match session_id {
            None => self.admit(checked, mode).await,
            Some(session_id) => {
                let busy = busy.unwrap_or(checked.plan.agent.definition.on_session_busy);
                self.begin_in(&session_id, checked, mode, busy).await
            }
        }
    }

    pub(super) fn agent(&self, name: &str) -> Result<Arc<Agent>, StartError> {
        self.inner.agents.named(name).ok_or_else(|| StartError::UnknownAgent(name.to_owned()))
    }

    /// Starts it here, or puts it into the queue.
    pub(super) async fn admit(
        &self,
        mut checked: Checked,
        mode: Mode,
    ) -> Result<Accepted, StartError> {
        let inner = &self.inner;
        let is_late = match checked.until {
            Some(until) if mode == Mode::Stored => !self.has_files_by(until, &checked).await,
            _ => false,
        };
        if mode == Mode::Queued || is_late {
            let admitted = inner.queue.admission.admit(|| inner.store.queued()).await??;
            checked.new.status = RunStatus::Queued;
            return self.enqueue(checked, admitted).await.map(Accepted::Queued);
        }
        if inner.workspaces.fault().is_some() {
            return Err(StartError::NoWorkspace);
        }
        let place = inner.capacity.places.take(&checked.new, &checked.caller).await?;
        let slot = inner.capacity.slots.free().ok_or(StartError::Overloaded)?.with_place(place);
        self.start_here(checked, slot, mode).await.map(Accepted::Started)
    }

    /// Whether the files of a run are here soon enough. What makes them unusable is found out later.
    async fn has_files_by(&self, until: Instant, checked: &Checked) -> bool {
        let workspaces = &self.inner.workspaces;
        if !workspaces.are_brought() || workspaces.fault().is_some() {
            return true;
        }
        let until = until.max(Instant::now() + SOON);
        let directory = checked.directory();
        let opened = workspaces.open(&checked.caller.tenant, &directory, User::Caller);
        timeout_at(until, opened).await.is_ok()
    }

    /// Puts the files that came with the request into the run's workspace, where they replace others.
    async fn receive(&self, checked: &Checked) -> Result<(), StartError> {
        let Some(uploads) = &checked.uploads else { return Ok(()) };
        let Checked { new, caller, loaded, .. } = checked;
        let directory = checked.directory();
        let placed = self.place_uploads(&caller.tenant, loaded, &directory, uploads).await;
        for placed in placed.map_err(StartError::Upload)? {
            let act = Act {
                tenant: caller.tenant.clone(),
                subject: caller.subject.clone(),
                action: AuditAction::FileWritten,
                run_id: Some(new.id),
                reason: None,
                details: placed.details(&new.agent, new.session_id.as_deref()),
            };
            self.inner.store.record_act(act).await?;
        }
        Ok(())
    }

    async fn start_here(
        &self,
        checked: Checked,
        slot: RunSlot,
        mode: Mode,
    ) -> Result<Started, StartError> {
        let Checked { new, caller, plan, earlier, .. } = &checked;
        let background = self.background(plan, caller, new, earlier).await?;
        let opening = opening(plan, &new.inputs, &background)?;
        self.receive(&checked).await?;
        self.launch(Launch { checked, opening, background, lineage: None, slot, mode }).await
    }

    /// Drives a run from its start; accepted as its mode says.
    pub(super) async fn launch(&self, launch: Launch) -> Result<Started, StartError> {
        let Launch { checked, opening, background, lineage, slot, mode } = launch;
        let directory = checked.directory();
        let Checked { new, caller, loaded, plan, .. } = checked;
        let run_id = new.id;
        self.refuse_known(run_id)?;
        let user = if new.parent_run_id.is_some() { User::Run } else { User::Caller };
        let workspace = match self.inner.workspaces.open(&caller.tenant, &directory, user).await {
            Err(OpenError::NotHere(_)) => return Err(StartError::NoWorkspace),
            opened => opened.map_err(|e| StartError::broken(&new.agent, &e))?,
        };
        if slot.has_lost_its_place() {
            return Err(StartError::lost_place());
        }
        let state = State::new(plan.rules_of(new.parent_run_id.is_some()));
        let identity = RunIdentity {
            lineage,
            ..RunIdentity::new(Arc::new(new), caller, FIRST, self.inner.settings.sample_ratio)
        };
        let mut owned =
            DrivenRun::new(self, identity, plan, loaded.executor, workspace, state, slot);
        owned
            .run
            .open(opening, background)
            .map_err(|e| StartError::broken(&owned.identity.new.agent, &e))?;
        let (stored, is_stored) = oneshot::channel();
        let (tell, end) = oneshot::channel();
        let tell_stored = mode != Mode::Now;
        let is_followed = mode == Mode::Followed;
        let tenant = &owned.identity.caller.tenant;
        let ownership = self.inner.driven.owned.own_new(run_id, owned.identity.epoch, tenant);
        let stored = tell_stored.then_some(stored);
        owned.spawn(ownership, RunNotices { stored, is_followed, end: Some(tell) });
        let mut follower = None;
        if tell_stored {
            follower = is_stored
                .await
                .unwrap_or(Err(Stopped::Journal(AppendFailed::Unavailable)))
                .map_err(|e| match e {
                    Stopped::Journal(AppendFailed::IdTaken) => StartError::RunIdTaken(run_id),
                    other => StartError::not_stored(&other),
                })?;
        }
        Ok(Started { run_id, follower, end })
    }

    /// Spares the store what is known here to be taken, and the run that has the id the company of
    /// writes that would be refused.
    fn refuse_known(&self, run: Uuid) -> Result<(), StartError> {
        match self.inner.driven.live.get(run) {
            Some(_) => Err(StartError::RunIdTaken(run)),
            None => Ok(()),
        }
    }

    async fn enqueue(
        &self,
        checked: Checked,
        admitted: queue_admission::Admitted,
    ) -> Result<Uuid, StartError> {
        // What it brings along is looked up when it begins.
        opening(&checked.plan, &checked.new.inputs, &Background::default())?;
        let run_id = checked.new.id;
        self.refuse_known(run_id)?;
        self.receive(&checked).await?;
        let Checked { new, caller, .. } = checked;
        let queued = Event { seq: 1, at: new.created_at, run_id, what: RunEvent::RunQueued {} };
        let identity = RunIdentity::new(Arc::new(new), caller, 0, self.inner.settings.sample_ratio);
        let first = Entry {
            events: vec![queued],
            audit: Vec::new(),
            totals: Totals::default(),
            park: None,
        };
        let durable =
            self.inner.writer.append(identity.write(Some(Arc::clone(&identity.new)), first));
        // It is on its way until then, whether its caller waits for that or not.
        let durable = tokio::spawn(async move {
            let stored = durable.await;
            drop(admitted);
            stored
        });
        durable.await.unwrap_or(Err(AppendError::Unavailable)).map_err(|e| match e {
            AppendError::IdTaken => StartError::RunIdTaken(run_id),
            other => StartError::not_stored(&other),
        })?;
        self.inner.queue.grew();
        Ok(run_id)
    }
}
