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
use tokio::time::{Instant, timeout, timeout_at};
use uuid::Uuid;

pub(super) use self::checks::{Checked, opening};
pub use self::error::StartError;
use self::error::at;
use super::identity::{Lineage, RunIdentity};
use super::ownership::FIRST_EPOCH;
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
use crate::fairness::{CpuAccount, FairTask};
use crate::run::{Caller, Overrides, RunKind, RunStatus, Totals};
use crate::store::writer::AppendError;
use crate::store::{Idempotency, QueuePlace, RunRecord};

/// The least time to wait for the files of a run, however short the caller waits.
const LEAST_FILES_WAIT: Duration = Duration::from_millis(500);
/// How long a start waits for the audit records of its files.
const RECORD_TIMEOUT: Duration = Duration::from_secs(10);

/// Which replica drives a run, and when its acceptance is reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// This replica; the caller waits for the end only.
    Now,
    /// This replica; accepted when its row is stored.
    Stored,
    /// The same, for a caller that follows the run from its first event.
    Followed,
    /// Whichever replica takes it from the queue; accepted when its row is stored.
    Queued,
}

/// A run to start.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// The caller; the run keeps its scopes.
    pub caller: Arc<Caller>,
    /// The agent's name.
    pub agent: String,
    /// Single shot or loop.
    pub kind: RunKind,
    /// Here or by the queue.
    pub mode: Mode,
    /// The idempotency key.
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
    /// The webhook for events of the run.
    pub webhook: Option<String>,
    /// Files for the run's workspace.
    pub uploads: Option<Arc<Uploads>>,
    /// Its priority and start time in the queue.
    pub queue: QueuePlace,
    /// Until when the caller waits, if it accepts a queued run then.
    pub until: Option<Instant>,
}

/// Why a request could not be answered with the outcome of its run.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// Another replica took the run over, the store is unavailable, or the service is stopping. The run
    /// continues; read it by its id.
    #[error("run {0} continues in the background")]
    Detached(Uuid),
    /// The run is parked; it is read by its id.
    #[error("run {0} is parked")]
    Parked(Uuid),
}

/// The outcome of a request to start a run.
pub enum Accepted {
    /// It is driven here.
    Started(Started),
    /// It is queued.
    Queued(Uuid),
    /// The idempotency key belongs to this run, which may have ended or not.
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
    /// Its lineage, if another run started it.
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
            // Another replica may have handled the same request faster.
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
            inner.store.check_writable().await?; // fail fast while the store is unavailable, unless it is back
        }
        let session_id = request.session_id.clone();
        let has_rival =
            request.run_id.is_some() || request.idempotency.is_some() || session_id.is_some();
        let mode = if request.mode == Mode::Now && has_rival { Mode::Stored } else { request.mode };
        if let Some(id) = request.run_id.filter(|_| request.uploads.is_some())
            && inner.store.has_run(id).await?
        {
            return Err(StartError::RunIdTaken(id)); // before its files are replaced
        }
        if request.queue.available_at.is_some() && mode != Mode::Queued {
            let why = "needs a queued run: send `Prefer: respond-async`";
            return Err(StartError::InvalidOverride(at("/available_at", why.into())));
        }
        let busy = request.overrides.on_session_busy;
        let has_files = request.uploads.is_some();
        let checked = self.check(self.agent(&request.agent)?, request, Vec::new())?;
        let files = has_files.then(|| checked.clone());
        let started = match session_id {
            None => self.admit(checked, mode).await,
            Some(session_id) => {
                let busy = busy.unwrap_or(checked.plan.agent.definition.on_session_busy);
                // Of two requests with files here, the second sees the first one's run before it replaces files.
                let tenant = &checked.caller.tenant;
                let _turn = if has_files {
                    Some(inner.session_uploads.lock((tenant.clone(), session_id.clone())).await)
                } else {
                    None
                };
                self.begin_in(&session_id, checked, mode, busy).await
            }
        };
        // After an error of the store, the run may be stored nevertheless.
        let is_refused = matches!(&started, Err(error) if !matches!(error, StartError::Store(_)));
        if let Some(files) = files.filter(|_| is_refused) {
            self.take_back(&files).await;
        }
        started
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
        let reservation =
            inner.capacity.reservations.reserve(&checked.new, &checked.caller).await?;
        let slot = inner
            .capacity
            .slots
            .try_acquire()
            .ok_or(StartError::Overloaded)?
            .with_reservation(reservation);
        self.start_here(checked, slot, mode).await.map(Accepted::Started)
    }

    /// Whether the files of a run are available in time. Other errors are reported later.
    async fn has_files_by(&self, until: Instant, checked: &Checked) -> bool {
        let workspaces = &self.inner.workspaces;
        if !workspaces.are_downloaded() || workspaces.fault().is_some() {
            return true;
        }
        let until = until.max(Instant::now() + LEAST_FILES_WAIT);
        let directory = checked.directory();
        let opened = workspaces.open(&checked.caller.tenant, &directory, User::Caller);
        timeout_at(until, opened).await.is_ok()
    }

    /// Records the files of the request, and puts them into the run's workspace, where they may replace others.
    /// This is completed even if the client disconnects.
    async fn receive(&self, checked: &Checked) -> Result<(), StartError> {
        let Some(uploads) = checked.uploads.clone() else { return Ok(()) };
        let (runtime, checked) = (self.clone(), checked.clone());
        let payer = CpuAccount::tenant(&checked.caller.tenant);
        let receiving = async move { runtime.record_and_place(&checked, &uploads).await };
        let received = self.inner.driven.tasks.spawn(FairTask::new(payer, receiving)).await;
        received.unwrap_or_else(|stopped| Err(StartError::not_stored(&stopped)))
    }

    async fn record_and_place(
        &self,
        checked: &Checked,
        uploads: &Uploads,
    ) -> Result<(), StartError> {
        let Checked { new, caller, loaded, .. } = checked;
        let directory = checked.directory();
        let ready = self.ready_uploads(&caller.tenant, loaded, &directory, uploads).await;
        let ready = ready.map_err(StartError::Upload)?;
        let act = |details: Value| Act {
            tenant: caller.tenant.clone(),
            subject: caller.subject.clone(),
            action: AuditAction::FileWritten,
            run_id: Some(new.id),
            reason: None,
            details,
        };
        let details = ready.details(&new.agent, new.session_id.as_deref());
        let acts: Vec<Act> = details.into_iter().map(act).collect();
        let recording = async {
            for act in acts {
                self.inner.store.record_act(act).await?;
            }
            Ok::<(), StartError>(())
        };
        let recorded = timeout(RECORD_TIMEOUT, recording).await;
        recorded.unwrap_or_else(|late| Err(StartError::not_stored(&late)))?;
        let placed = self.place_uploads(&caller.tenant, loaded, &directory, uploads, ready).await;
        placed.map_err(StartError::Upload)
    }

    /// Takes the files of a refused request out of the run's workspace again.
    async fn take_back(&self, checked: &Checked) {
        let Some(uploads) = &checked.uploads else { return };
        // A run of this id, if any, may be the one that the files came with.
        if self.inner.store.has_run(checked.new.id).await.unwrap_or(true) {
            return;
        }
        let (tenant, directory) = (&checked.caller.tenant, checked.directory());
        self.take_back_uploads(tenant, &checked.loaded, &directory, uploads).await;
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
        if slot.has_lost_its_reservation() {
            return Err(StartError::lost_reservation());
        }
        let state = State::new(plan.rules_of(new.parent_run_id.is_some()));
        let identity = RunIdentity {
            lineage,
            ..RunIdentity::new(Arc::new(new), caller, FIRST_EPOCH, self.inner.settings.sample_ratio)
        };
        let mut owned =
            DrivenRun::new(self, identity, plan, loaded.executor, workspace, state, slot);
        owned
            .run
            .open(opening, background)
            .map_err(|e| StartError::broken(&owned.identity.new.agent, &e))?;
        let (stored, is_stored) = oneshot::channel();
        let (end_sender, end) = oneshot::channel();
        let waits_until_stored = mode != Mode::Now;
        let is_followed = mode == Mode::Followed;
        let tenant = &owned.identity.caller.tenant;
        let ownership = self.inner.driven.owned.own_new(run_id, owned.identity.epoch, tenant);
        let stored = waits_until_stored.then_some(stored);
        owned.spawn(ownership, RunNotices { stored, is_followed, end: Some(end_sender) });
        let mut follower = None;
        if waits_until_stored {
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

    /// Refuses an id that is known here to be taken. This spares the store a query, and the commits of the
    /// existing run a refused write in the same batch.
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
        // Its background is looked up when it begins.
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
        // It counts as being inserted until then, even if its caller disconnects.
        let durable = tokio::spawn(async move {
            let stored = durable.await;
            drop(admitted);
            stored
        });
        durable.await.unwrap_or(Err(AppendError::Unavailable)).map_err(|e| match e {
            AppendError::IdTaken => StartError::RunIdTaken(run_id),
            other => StartError::not_stored(&other),
        })?;
        self.inner.queue.note_queued();
        Ok(run_id)
    }
}
