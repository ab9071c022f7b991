//! The thin shell around the state machine: performs one step, journals what happened, asks again.
//!
//! It decides only *when* events must be durable. `tool_call.started`, and all events before it, must be
//! durable before the tool runs, unless the tool only reads. All events must be durable before the end is
//! published. A model call overlaps the commit of earlier events; its answer is used when all entries older than
//! [`MAY_LAG`] are durable. So a crash repeats at most the last two model calls, of which one may be in progress, and
//! those whose answers came less than this time before the last answer.

mod budget_reservations;
mod calls;
mod compact;
pub mod conversation_memory;
mod given_call;
pub mod large_answers;
mod model_calls;
mod outbox;
mod waiting;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use self::outbox::Outbox;
use super::budget::SharedBudget;
use super::handlers::Handlers;
use super::journal::{AppendFailed, Journal};
use super::plan::Plan;
use super::reflection;
use super::state::{FoldError, Proposal, State, Step};
use super::validation::{self, Verdict};
use crate::agents::prompt::{Background, Opening};
use crate::clock;
use crate::drivers::Driver;
use crate::event::{AuditRecord, CallRate, Event, LabelCause, LabelsChanged, ModelDelta, RunEvent};
use crate::message::Turn;
use crate::providers::router::Router;
use crate::run::{RunStatus, TraceContext};
use crate::tools::Listener;
use crate::tools::executor::{Executor, RunScope};
use crate::tools::file_store::NotStored;
use crate::tools::lease::{Lease, Standing};
use crate::tools::results;

/// The age up to which entries may not be durable yet when a model's answer is used: longer than a commit, and
/// shorter than most model calls.
const MAY_LAG: Duration = Duration::from_millis(100);

/// Receives the pieces of one answer; passes on the rest when it is dropped.
pub type Pieces = Box<dyn Fn(ModelDelta) + Send + Sync>;

/// The followers of a run. What they receive comes after the event with the given number, which may not be
/// durable yet.
pub trait Audience: Send + Sync {
    /// The receiver for the pieces of the next answer; `None` if the run has no followers and none are expected.
    fn pieces(&self, after: i64) -> Option<Pieces>;

    /// The listener for the progress of the next tool calls.
    fn listener(&self, after: i64) -> Listener;
}

/// The limits on how often the caller of a run may call tools.
#[async_trait]
pub trait Admission: Send + Sync {
    /// Whether this tool may be called now; `per_minute` is the limit in its options.
    async fn admit(
        &self,
        tool: &str,
        per_minute: Option<u32>,
    ) -> Result<CallAdmission, AppendFailed>;
}

/// Whether a call may be made now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallAdmission {
    /// Why not; `None` if it may.
    pub refused: Option<String>,
    /// State of the limit with the fewest calls left; `None` where there is no limit.
    pub rate: Option<CallRate>,
}

/// The handle by which other tasks reach a run in progress.
#[derive(Debug, Default)]
pub struct RunControl {
    token: CancellationToken,
    reason: OnceLock<Option<String>>,
    /// Whether its end is decided, so that cancelling has no effect.
    has_ended: Mutex<bool>,
    lost: CancellationToken,
    /// Its state, during a call that delegates to another agent.
    delegating: Mutex<Option<Arc<State>>>,
}

impl RunControl {
    /// Requests cancellation. The first reason counts. False if the run has already ended, perhaps not yet
    /// durably.
    pub fn cancel(&self, reason: Option<String>) -> bool {
        let has_ended = self.has_ended.lock();
        if !*has_ended {
            let _ = self.reason.set(reason);
            self.token.cancel();
        }
        !*has_ended
    }

    /// Marks the run as ended; false if cancellation was requested.
    fn end(&self) -> bool {
        let mut has_ended = self.has_ended.lock();
        *has_ended = !self.token.is_cancelled();
        *has_ended
    }

    /// What tells tools whether the run may still change something under this replica's lease.
    pub fn standing(&self, lease: Arc<Lease>) -> Standing {
        Standing::new(lease, self.lost.clone())
    }

    /// Marks the run as owned by another replica: it stops at once and writes nothing more.
    pub fn lose(&self) {
        self.lost.cancel();
    }

    /// Whether this replica has lost the run.
    pub fn is_lost(&self) -> bool {
        self.lost.is_cancelled()
    }

    /// Resolves when this replica has lost the run.
    pub async fn lost(&self) {
        self.lost.cancelled().await;
    }

    /// The run's state, during a call that delegates to another agent.
    pub fn delegating(&self) -> Option<Arc<State>> {
        self.delegating.lock().clone()
    }

    fn set_delegating(&self, state: Option<State>) {
        *self.delegating.lock() = state.map(Arc::new);
    }

    /// Resolves when cancellation is requested.
    pub async fn cancelled(&self) {
        self.token.cancelled().await;
    }

    fn requested(&self) -> Option<RunEvent> {
        self.token
            .is_cancelled()
            .then(|| RunEvent::RunCancelRequested { reason: self.reason.get().cloned().flatten() })
    }
}

/// Why a run stopped without an end; it continues on another replica or later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    /// The journal did not take an entry.
    #[error(transparent)]
    Journal(#[from] AppendFailed),
    /// The lease of this replica expired, and the tool calls in progress were stopped.
    #[error("the lease of this replica ran out during a tool call")]
    LeaseOver,
    /// The object store or the database was unavailable for too long.
    #[error("the files of the run cannot be synchronised with the object store at the moment")]
    FilesNotStored,
    /// The conversations in memory, this one included, would be too large.
    #[error("there is not enough memory for a conversation of this size")]
    OutOfMemory,
    /// An event did not fit the state: a fault of the service.
    #[error("the journal does not fit the state: {0}")]
    Fold(#[from] FoldError),
}

impl From<NotStored> for Stopped {
    fn from(not_stored: NotStored) -> Self {
        match not_stored {
            NotStored::Unavailable => Self::FilesNotStored,
            NotStored::Fenced | NotStored::Orphaned => Self::Journal(AppendFailed::Fenced),
        }
    }
}

/// How far a run was driven.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Driven {
    /// Its end is durable.
    Ended,
    /// It is parked, without an owner, until a replica claims it.
    Parked,
}

/// One run under way on this replica.
pub struct Run {
    /// What it executes.
    pub plan: Arc<Plan>,
    /// Its tools.
    pub executor: Arc<Executor>,
    /// The context of its tools.
    pub scope: RunScope,
    /// The endpoints that validate and reflect its outputs.
    pub handlers: Arc<Handlers>,
    /// Its models.
    pub router: Arc<Router>,
    /// The protocol by which they call tools.
    pub driver: Box<dyn Driver>,
    /// Its inputs.
    pub inputs: Arc<Value>,
    /// Its place in a trace.
    pub trace: TraceContext,
    /// Its handle for other tasks.
    pub control: Arc<RunControl>,
    /// Whether this replica's lease is valid.
    pub lease: Arc<Lease>,
    /// The rate limits of its caller.
    pub admission: Box<dyn Admission>,
    /// Its followers.
    pub audience: Box<dyn Audience>,
    /// Whether another run delegated to it.
    pub is_child: bool,
    /// The budget that it shares with other runs; `None` if there can be no other runs.
    pub shared: Option<SharedBudget>,
    /// Where it is recorded.
    pub journal: Journal,
    /// What happened so far.
    pub state: State,
    /// Events that are applied and not appended to the journal yet.
    pub outbox: Vec<Event>,
    /// Their audit records.
    pub audit: Vec<AuditRecord>,
    /// Memory for its conversation.
    pub memory_share: conversation_memory::MemoryShare,
    /// Held while a large answer, or large results of calls, are not used yet.
    pub large_answer: Option<large_answers::MemoryPermit>,
}

impl Run {
    /// Runs until the end is durable, or until the run waits and is given back.
    pub async fn drive(&mut self) -> Result<Driven, Stopped> {
        self.count_below().await?;
        loop {
            if !self.state.is_cancel_requested()
                && self.state.ending().is_none()
                && let Some(request) = self.control.requested()
            {
                self.record(request)?;
            }
            let step = self.state.next(clock::now());
            if self.state.begins_iteration(&step) {
                self.make_room().await?; // before the iteration counts: a resumption would count it again
            }
            // The last step of a run writes the remaining events itself.
            let is_last = matches!(step, Step::Suspend(_) | Step::Done);
            if self.large_answer.is_some() && !is_last && !matches!(step, Step::Record(_)) {
                self.persist_earlier().await?;
                self.large_answer = None;
            }
            match step {
                Step::Open => self.record(RunEvent::interrupted("the run was never opened"))?,
                Step::Record(events) => self.record_all(events)?,
                Step::Compact(compaction) => self.compact(compaction, None).await?,
                Step::GiveCall(given) => self.give_call(&given)?,
                Step::CallModel(choice) => {
                    self.make_room().await?;
                    self.call_model(choice).await?;
                }
                Step::CallTools(calls) => self.call_tools(calls).await?,
                Step::Suspend(status) => {
                    self.park(status).await?;
                    self.large_answer = None;
                    return Ok(Driven::Parked);
                }
                Step::Reflect(proposal) => self.reflect(proposal).await?,
                Step::EvaluateStopConditions => self.evaluate_stop_conditions().await?,
                Step::Check(proposal) => self.check(&proposal).await?,
                Step::Done => {
                    self.persist().await?;
                    self.settle().await?;
                    return Ok(Driven::Ended);
                }
            }
        }
    }

    /// Applies an event and keeps it for the next commit. A terminal event is ignored if cancellation
    /// was requested first.
    pub fn record(&mut self, what: RunEvent) -> Result<(), FoldError> {
        let is_other_end = matches!(what, RunEvent::RunCompleted(_) | RunEvent::RunFailed(_));
        if is_other_end && !self.state.is_cancel_requested() && !self.control.end() {
            return Ok(());
        }
        let at = clock::now();
        if !matches!(what, RunEvent::ToolCallCompleted(_)) {
            self.note_lost(&what);
        }
        let event = Event { seq: self.state.last_seq() + 1, at, run_id: self.scope.run_id, what };
        self.state.apply(&event)?;
        if matches!(event.what, RunEvent::SkillActivated(_)) {
            self.scope.skills = self.state.skills().into();
        }
        self.scope.labels = self.state.labels();
        self.outbox.push(event);
        Ok(())
    }

    fn note_lost(&mut self, what: &RunEvent) {
        let labels = self.state.labels();
        self.audit.extend(
            self.state.settles(what).map(|call| results::audit_of_unfinished_call(call, labels)),
        );
    }

    /// Reserves the memory that the conversation needs now.
    async fn make_room(&mut self) -> Result<(), Stopped> {
        if self.memory_share.resize(self.state.bytes()) {
            return Ok(());
        }
        self.persist_earlier().await?;
        Err(Stopped::OutOfMemory)
    }

    /// Appends what is recorded and waits until all of it is durable.
    pub async fn persist(&mut self) -> Result<(), Stopped> {
        self.hand_over();
        Ok(self.journal.settle().await?)
    }

    /// The same, except for the start of an iteration whose model call is not made yet.
    async fn persist_earlier(&mut self) -> Result<(), Stopped> {
        self.hand_over_earlier();
        Ok(self.journal.settle().await?)
    }

    /// Records the opening of the conversation.
    pub fn open(&mut self, opening: Opening, background: Background) -> Result<(), FoldError> {
        let history = background.turns.len();
        if let Some(loaded) = background.session {
            self.record(loaded)?;
        }
        let mut turns = background.turns;
        turns.push(Turn::User(opening.user));
        let single_shot = self.plan.rules.single_shot;
        let warnings = self.plan.warnings.iter().cloned().chain(background.left_out).collect();
        self.record(RunEvent::RunStarted {
            system: opening.system,
            turns,
            history,
            single_shot,
            warnings,
        })?;
        if !background.labels.are_none() {
            let (labels, cause) = (background.labels, LabelCause::Opening);
            let changed = LabelsChanged { labels, cause, call_id: None, tool: None };
            self.record(RunEvent::LabelsChanged(changed))?;
        }
        let warned = background.warnings.into_iter().map(RunEvent::ScanWarned);
        warned.into_iter().try_for_each(|warned| self.record(warned))?;
        background
            .active
            .into_iter()
            .try_for_each(|skill| self.record(RunEvent::SkillActivated(skill.bounds)))
    }

    fn record_all(&mut self, events: Vec<RunEvent>) -> Result<(), FoldError> {
        for mut event in events {
            if let RunEvent::ToolCallCompleted(call) = &mut event {
                if Self::is_from_outside(call) {
                    self.revise(call);
                    self.label(call, self.yields_from_outside(&call.tool))?;
                }
                let warned = self.scanned(call); // a client's result
                warned.into_iter().try_for_each(|warned| self.record(warned))?;
                self.note_lost(&event); // results of what was executed here are recorded one by one
            }
            self.record(event)?;
        }
        Ok(())
    }

    fn hand_over(&mut self) {
        self.hand_over_as(None);
    }

    fn hand_over_as(&mut self, park: Option<RunStatus>) {
        let mut outbox = Outbox::of(&mut self.journal, &mut self.outbox, &mut self.audit);
        outbox.hand_over(self.state.totals(), park);
    }

    fn hand_over_earlier(&mut self) {
        let mut outbox = Outbox::of(&mut self.journal, &mut self.outbox, &mut self.audit);
        outbox.hand_over_earlier(self.state.totals());
    }

    /// Parks the run and gives it back.
    async fn park(&mut self, status: RunStatus) -> Result<(), Stopped> {
        self.settle().await?;
        self.hand_over_as(Some(status));
        Ok(self.journal.settle().await?)
    }

    /// Shows the model what its proposal looks like.
    async fn reflect(&mut self, proposal: Proposal) -> Result<(), Stopped> {
        let Some(call_id) = proposal.call_id else { return Ok(()) };
        let reflected = if let Some(problem) = &proposal.malformed {
            Err(problem.clone())
        } else {
            self.hand_over();
            let deadline = self.state.deadline().map(instant_of);
            let (agent, run_id) = (&self.plan.agent, self.scope.run_id);
            tokio::select! {
                biased;
                () = self.control.token.cancelled() => return Ok(()),
                () = until(deadline) => return Ok(()),
                reflected = reflection::reflect(agent, &proposal.output, &self.inputs, run_id, &self.handlers) => reflected,
            }
        };
        let attempt = self.state.attempt();
        let (content, is_error) =
            reflected.map_or_else(|error| (format!("Error: {error}"), true), |text| (text, false));
        Ok(self.record(RunEvent::OutputReflected { call_id, attempt, content, is_error })?)
    }

    /// Evaluates the stop conditions before the next iteration.
    async fn evaluate_stop_conditions(&mut self) -> Result<(), Stopped> {
        let below = self.descendants().await?;
        let (now, agent) = (clock::now(), &self.plan.agent);
        let facts = self.state.facts(&below, now);
        let met = agent.condition_met(self.state.conditions_met(), &facts);
        let id = Uuid::now_v7();
        let patience = agent.definition.governance.approval_timeout;
        let events = self.state.stop_conditions_evaluated(met, facts, id, patience, now);
        Ok(self.record_all(events)?)
    }

    /// Validates a proposal. If the run is cancelled or out of time in the meantime, the verdict is dropped.
    async fn check(&mut self, proposal: &Proposal) -> Result<(), Stopped> {
        if self
            .plan
            .agent
            .definition
            .output
            .as_ref()
            .is_some_and(|output| output.validator.is_some())
        {
            self.hand_over(); // it may take a while
        }
        let deadline = self.state.deadline().map(instant_of);
        let (agent, run_id) = (&self.plan.agent, self.scope.run_id);
        let verdict = tokio::select! {
            biased;
            () = self.control.token.cancelled() => return Ok(()),
            () = until(deadline) => return Ok(()),
            verdict = validation::verdict_on(agent, proposal, &self.inputs, run_id, &self.handlers) => verdict,
        };
        let now = clock::now();
        let events = match verdict {
            Verdict::Errors(errors) => self.state.judged(proposal, errors, now),
            Verdict::Undecided(why) => self.state.validator_unavailable(&why, now),
        };
        Ok(self.record_all(events)?)
    }
}

/// The monotonic instant of a wall-clock time.
fn instant_of(at: DateTime<Utc>) -> Instant {
    Instant::now() + (at - clock::now()).to_std().unwrap_or_default()
}

/// Resolves when cancellation is requested, or the deadline is reached.
async fn until_cancelled_or_due(control: &RunControl, deadline: Option<Instant>) {
    tokio::select! {
        () = control.cancelled() => {}
        () = until(deadline) => {}
    }
}

async fn until(deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}
