//! Starting a run: everything that can be refused is refused here, before anything is stored.
//!
//! A run is driven by this replica at once, or queued for any of them. A repeated idempotency key
//! starts nothing: it finds the run that it stands for.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::Arc;

use chrono::{SubsecRound, TimeDelta};
use serde_json::Value;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::background::SkillError;
use super::delegation::Lineage;
use super::entrance;
use super::loaded::LoadedAgent;
use super::slots::RunSlot;
use super::uploads::{UploadError, Uploads};
use super::worker::{DrivenRun, Notify, RunIdentity, write};
use super::workspaces::{OpenError, User};
use super::{Follower, Runtime};
use crate::agents::Agent;
use crate::agents::prompt::{ActiveSkill, Background, Opening};
use crate::bounds::secrets;
use crate::clock;
use crate::engine::{AppendFailed, Entry, Plan, State, Stopped};
use crate::event::{
    Act, AuditAction, Event, RunEvent, ScanWarned, SkillActivated, ValidationError,
};
use crate::run::{Caller, OnInjection, Overrides, RunKind, RunStatus, Totals};
use crate::store::writer::AppendError;
use crate::store::{Idempotency, LimitReached, NewRun, QueuePlace, RunRecord, StoreError};
use crate::tools::scan::scan_inputs;

/// For how long a repeated idempotency key finds its run.
const KEY_KEPT: TimeDelta = TimeDelta::hours(24);

/// How much a caller may prefer some of its queued runs to others.
const PRIORITIES: RangeInclusive<i64> = -100..=100;
/// How long a run may be kept in the queue by its caller.
const LONGEST_DELAY: TimeDelta = TimeDelta::days(30);

/// Who drives a run, and when its acceptance is told.
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
}

/// Why no run was started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No agent of that name.
    #[error("there is no agent named {0:?}")]
    UnknownAgent(String),
    /// The inputs miss the agent's schema.
    #[error("the inputs do not match the agent's input schema")]
    InvalidInputs(Vec<ValidationError>),
    /// The inputs look like a prompt injection; the pointer is into the request body.
    #[error("{}", .0.message)]
    PromptInjection(ValidationError),
    /// An override is out of range or cannot work; pointers are into the request body.
    #[error("{}", .0.message)]
    InvalidOverride(ValidationError),
    /// No secret is configured with which webhooks are signed.
    #[error("webhooks are disabled: this service has no secret to sign them with")]
    WebhooksDisabled,
    /// The caller may execute none of the tools that the run would be offered.
    #[error("this requires the scope `{0}`, because the run would not be allowed any of its tools")]
    MissingScope(String),
    /// The chosen run id exists.
    #[error("the run id {0} is taken")]
    RunIdTaken(Uuid),
    /// Another run holds the session, or waits for it.
    #[error("the session is busy with run {0}")]
    SessionBusy(Uuid),
    /// The session was opened by another agent, which is named.
    #[error("the session belongs to the agent {0:?}")]
    SessionOfOtherAgent(String),
    /// The idempotency key stands for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyMismatch,
    /// Too many runs at once, or in the queue.
    #[error("too many runs are in progress")]
    Overloaded,
    /// The caller's tenant or key has as many runs under way as it may.
    #[error(transparent)]
    TooManyRuns(LimitReached),
    /// The service is stopping.
    #[error("the service is shutting down")]
    Draining,
    /// A file that came with the request cannot be put into the run's workspace.
    #[error(transparent)]
    Upload(UploadError),
    /// Files cannot be written on this replica at the moment.
    #[error("the workspace of this replica is not available")]
    NoWorkspace,
    /// The run could not be stored.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The definition cannot run on this service.
    #[error("agent {agent:?} cannot run: {message}")]
    BrokenAgent {
        /// Which.
        agent: String,
        /// Why.
        message: String,
    },
}

/// Why a started run's end could not be told.
#[derive(Debug, thiserror::Error)]
pub enum WaitError {
    /// Another replica took over, the store went away, or the service is stopping. The run goes on
    /// or is recovered; ask for it by id.
    #[error("run {0} goes on without this connection")]
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

/// A request that passed every check.
#[derive(Clone)]
pub(super) struct Checked {
    pub(super) new: NewRun,
    pub(super) caller: Arc<Caller>,
    pub(super) loaded: LoadedAgent,
    pub(super) plan: Arc<Plan>,
    /// The runs of its session before it, the oldest first.
    pub(super) earlier: Vec<Uuid>,
    pub(super) uploads: Option<Arc<Uploads>>,
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
            return self.begin(request).await;
        };
        let caller = Arc::clone(&request.caller);
        let _lock = self.inner.key_locks.lock(&caller.tenant, &idempotency.key).await;
        if let Some(known) = self.known(&caller, &idempotency).await? {
            return Ok(Accepted::Known(known));
        }
        match self.begin(request).await {
            // The same request may have come to another replica at the same time, which was faster.
            Err(
                taken @ (StartError::RunIdTaken(_)
                | StartError::SessionBusy(_)
                | StartError::Overloaded
                | StartError::TooManyRuns(_)),
            ) => self.known(&caller, &idempotency).await?.map(Accepted::Known).ok_or(taken),
            outcome => outcome,
        }
    }

    /// The run that a key stands for.
    async fn known(
        &self,
        caller: &Caller,
        idempotency: &Idempotency,
    ) -> Result<Option<Uuid>, StartError> {
        let (store, tenant) = (&self.inner.store, &caller.tenant);
        let Some(known) = store.idempotent_run(tenant, &idempotency.key).await? else {
            return Ok(None);
        };
        let expired = clock::now() - KEY_KEPT;
        if known.created_at < expired {
            store.forget_idempotency_key(tenant, &idempotency.key, expired).await?;
            return Ok(None);
        }
        // The answer shows the run, which only its caller may see without the scope for it.
        let may_see = known.subject == caller.subject || caller.has("runs:read");
        if known.request_hash == idempotency.request_hash && may_see {
            Ok(Some(known.id))
        } else {
            Err(StartError::IdempotencyMismatch)
        }
    }

    async fn begin(&self, request: StartRequest) -> Result<Accepted, StartError> {
        let inner = &self.inner;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        if !inner.writer.is_available() {
            inner.store.take_writes().await?; // writes are waiting: refuse at once, or be the first to find it back
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
            let why = "is for runs that are queued: with the header Prefer: respond-async";
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
        self.inner.catalogue.agent(name).ok_or_else(|| StartError::UnknownAgent(name.to_owned()))
    }

    /// Starts it here, or puts it into the queue.
    pub(super) async fn admit(
        &self,
        mut checked: Checked,
        mode: Mode,
    ) -> Result<Accepted, StartError> {
        let inner = &self.inner;
        if mode == Mode::Queued {
            let entered = inner.entrance.enter(|| inner.store.queued()).await?;
            let entered = entered.ok_or(StartError::Overloaded)?;
            checked.new.status = RunStatus::Queued;
            self.receive(&checked).await?;
            return self.enqueue(checked, entered).await.map(Accepted::Queued);
        }
        if inner.workspaces.fault().is_some() {
            return Err(StartError::NoWorkspace);
        }
        let place = self.place_of(&checked).await?;
        let slot = inner.slots.free().ok_or(StartError::Overloaded)?.with_place(place);
        self.receive(&checked).await?;
        self.start_here(checked, slot, mode).await.map(Accepted::Started)
    }

    /// Puts the files that came with the request into the run's workspace.
    async fn receive(&self, checked: &Checked) -> Result<(), StartError> {
        let Some(uploads) = &checked.uploads else { return Ok(()) };
        let Checked { new, caller, .. } = checked;
        for placed in self.place_uploads(checked, uploads).await.map_err(StartError::Upload)? {
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

    /// Checks everything that can be refused. `inherited` are the skills of the run that starts this
    /// one, if another one does.
    pub(super) fn check(
        &self,
        agent: Arc<Agent>,
        mut request: StartRequest,
        inherited: Vec<SkillActivated>,
    ) -> Result<Checked, StartError> {
        let inner = &self.inner;
        check_queue(request.queue)?;
        secrets::remove_known(&mut request.inputs);
        let webhook = inner.webhooks.address(request.webhook.as_deref())?;
        agent.check_inputs(&request.inputs).map_err(StartError::InvalidInputs)?;
        if agent.definition.governance.injection.inputs == OnInjection::Block
            && let Some(warned) = scan_inputs(&request.inputs)
        {
            return Err(StartError::PromptInjection(suspicious(warned)));
        }
        let loaded = inner.loaded.get(&agent).map_err(|e| broken(&request.agent, &e))?;
        let mut active =
            self.active_skills(&agent.definition, &request.overrides).map_err(|e| match e {
                SkillError::Refused(error) => StartError::InvalidOverride(error),
                SkillError::Missing(_) => broken(&request.agent, &e),
            })?;
        active.extend(inherited.into_iter().map(ActiveSkill::inherited));
        let plan = Plan::new(agent, &loaded.executor, &request.overrides, request.kind, active)
            .map_err(|e| StartError::InvalidOverride(e.0))?;
        check_tools(&plan, &request.caller)?;
        if plan.rules.given.is_none() {
            plan.check_models(&inner.router).map_err(|e| StartError::InvalidOverride(e.0))?;
        }
        let plan = plan.informed(&inner.router);
        let new = NewRun {
            id: request.run_id.unwrap_or_else(Uuid::now_v7),
            agent: request.agent,
            agent_version: plan.agent.definition.version.clone(),
            definition: Arc::clone(&loaded.snapshot),
            kind: request.kind,
            status: RunStatus::Running,
            inputs: Arc::new(request.inputs),
            overrides: serde_json::to_value(&request.overrides).unwrap_or_default(),
            session_id: request.session_id,
            session_place: None,
            parent_run_id: None,
            metadata: request.metadata.into_iter().map(|(k, v)| (k, Value::String(v))).collect(),
            idempotency: request.idempotency,
            traceparent: request.traceparent,
            webhook,
            queue: QueuePlace {
                available_at: request.queue.available_at.filter(|at| *at > clock::now()),
                ..request.queue
            },
            created_at: clock::now().trunc_subsecs(6),
        };
        Ok(Checked {
            new,
            caller: request.caller,
            loaded,
            plan: Arc::new(plan),
            earlier: Vec::new(),
            uploads: request.uploads,
        })
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
        self.launch(Launch { checked, opening, background, lineage: None, slot, mode }).await
    }

    /// Drives a run from its start; accepted as its mode says.
    pub(super) async fn launch(&self, launch: Launch) -> Result<Started, StartError> {
        let Launch { checked, opening, background, lineage, slot, mode } = launch;
        let Checked { new, caller, loaded, plan, .. } = checked;
        let run_id = new.id;
        self.refuse_known(run_id)?;
        let directory = plan.agent.workspace_of(run_id, new.session_id.as_deref());
        let user = if new.parent_run_id.is_some() { User::Run } else { User::Caller };
        let workspace = match self.inner.workspaces.open(&caller.tenant, &directory, user).await {
            Err(OpenError::NotHere(_)) => return Err(StartError::NoWorkspace),
            opened => opened.map_err(|e| broken(&new.agent, &e))?,
        };
        if slot.has_lost_its_place() {
            return Err(lost_place());
        }
        let state = State::new(plan.rules_of(new.parent_run_id.is_some()));
        let identity = RunIdentity {
            lineage,
            ..RunIdentity::new(Arc::new(new), caller, 1, self.inner.settings.sample_ratio)
        };
        let mut owned =
            DrivenRun::new(self, identity, plan, loaded.executor, workspace, state, slot);
        owned.run.open(opening, background).map_err(|e| broken(&owned.identity.new.agent, &e))?;
        let (stored, is_stored) = oneshot::channel();
        let (tell, end) = oneshot::channel();
        let tell_stored = mode != Mode::Now;
        let is_followed = mode == Mode::Followed;
        let ownership = self.inner.owned.own(run_id, owned.identity.epoch);
        let stored = tell_stored.then_some(stored);
        owned.spawn(ownership, Notify { stored, is_followed, end: Some(tell) });
        let mut follower = None;
        if tell_stored {
            follower = is_stored
                .await
                .unwrap_or(Err(Stopped::Journal(AppendFailed::Unavailable)))
                .map_err(|e| match e {
                    Stopped::Journal(AppendFailed::IdTaken) => StartError::RunIdTaken(run_id),
                    other => not_stored(&other),
                })?;
        }
        Ok(Started { run_id, follower, end })
    }

    /// Spares the store what is known here to be taken, and the run that has the id the company of
    /// writes that would be refused.
    fn refuse_known(&self, run: Uuid) -> Result<(), StartError> {
        match self.inner.live.get(run) {
            Some(_) => Err(StartError::RunIdTaken(run)),
            None => Ok(()),
        }
    }

    async fn enqueue(
        &self,
        Checked { new, caller, plan, .. }: Checked,
        entered: entrance::Entry,
    ) -> Result<Uuid, StartError> {
        opening(&plan, &new.inputs, &Background::default())?; // what it brings along is looked up when it begins
        let run_id = new.id;
        self.refuse_known(run_id)?;
        let queued = Event { seq: 1, at: new.created_at, run_id, what: RunEvent::RunQueued {} };
        let identity = RunIdentity::new(Arc::new(new), caller, 0, self.inner.settings.sample_ratio);
        let first = Entry {
            events: vec![queued],
            audit: Vec::new(),
            totals: Totals::default(),
            park: None,
        };
        let durable =
            self.inner.writer.append(write(&identity, Some(Arc::clone(&identity.new)), first));
        // It is on its way until then, whether its caller waits for that or not.
        let durable = tokio::spawn(async move {
            let stored = durable.await;
            drop(entered);
            stored
        });
        durable.await.unwrap_or(Err(AppendError::Unavailable)).map_err(|e| match e {
            AppendError::IdTaken => StartError::RunIdTaken(run_id),
            other => not_stored(&other),
        })?;
        self.inner.queue.grew();
        Ok(run_id)
    }
}

/// Refuses a run whose every tool call would be blocked for want of a scope.
fn check_queue(queue: QueuePlace) -> Result<(), StartError> {
    let refused = |pointer, why: &str| Err(StartError::InvalidOverride(at(pointer, why.into())));
    if !PRIORITIES.contains(&queue.priority) {
        return refused("/priority", "must be from -100 to 100");
    }
    if queue.available_at.is_some_and(|at| at > clock::now() + LONGEST_DELAY) {
        return refused("/available_at", "must be at most 30 days ahead");
    }
    Ok(())
}

fn check_tools(plan: &Plan, caller: &Caller) -> Result<(), StartError> {
    let tools: Vec<&str> = plan.tools().collect();
    let is_allowed =
        |tool: &&str| caller.may_execute(tool) || plan.client_tools.tool(tool).is_some();
    let mut names = tools.iter();
    match (names.next(), names.next()) {
        (None, _) => Ok(()),
        _ if tools.iter().any(is_allowed) => Ok(()),
        (Some(only), None) => Err(StartError::MissingScope(format!("tools:{only}"))),
        _ => Err(StartError::MissingScope("tools:execute".to_owned())),
    }
}

/// The first messages; what cannot be rendered is the inputs' fault.
pub(super) fn opening(
    plan: &Plan,
    inputs: &Value,
    background: &Background,
) -> Result<Opening, StartError> {
    plan.opening(inputs, background)
        .map_err(|e| StartError::InvalidInputs(vec![at("", e.to_string())]))
}

fn lost_place() -> StartError {
    let why = "this replica was declared dead while the run began";
    StartError::Store(StoreError::Unavailable(why.to_owned()))
}

fn not_stored(reason: &dyn std::error::Error) -> StartError {
    StartError::Store(StoreError::Unavailable(reason.to_string()))
}

fn broken(agent: &str, error: &dyn std::error::Error) -> StartError {
    StartError::BrokenAgent { agent: agent.to_owned(), message: error.to_string() }
}

fn suspicious(ScanWarned { pointer, suspicion, .. }: ScanWarned) -> ValidationError {
    let message = format!("looks like a prompt injection: {}", suspicion.in_words());
    ValidationError { pointer: pointer.unwrap_or_default(), message }
}

fn at(pointer: &str, message: String) -> ValidationError {
    ValidationError { pointer: pointer.to_owned(), message }
}
