//! Drives runs: owned by this replica, executed by the engine, journalled under a fence.
//!
//! Runs that are started here, claimed from the queue and recovered after a crash all pass through
//! [`DrivenRun`]. The folded journal tells where to continue; the engine decides what to do next.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::claimed_run::{ResumeError, Resumption};
use super::deltas::Followers;
use super::identity::RunIdentity;
use super::ownership::OwnedRun;
use super::parents::{Parent, ParentGuard};
use super::rate_limits::CallLimits;
use super::refused_children::RefusedAgents;
use super::slots::RunSlot;
use super::{Follower, Runtime};
use crate::drivers::{DecisionFields, Driver, Native, React};
use crate::engine::journal::{Ack, Append};
use crate::engine::{AppendFailed, Driven, Entry, Journal, Plan, Run, RunControl, State, Stopped};
use crate::event::{Event, RunEvent, SERVICE};
use crate::fairness::{CpuAccount, FairTask};
use crate::store::writer::{AppendError, Appender};
use crate::store::{NewRun, RunRecord};
use crate::tools::executor::{Executor, RunScope};
use crate::tools::requests::RequestsLeft;
use crate::tools::{Listener, Standing, Workspace};

/// A run that this replica drives.
pub(super) struct DrivenRun {
    pub(super) runtime: Runtime,
    pub(super) identity: RunIdentity,
    pub(super) run: Run,
    /// Its concurrency slot.
    pub(super) slot: RunSlot,
    /// What is left to do before it is driven, if it was claimed.
    pub(super) resumption: Option<Resumption>,
    registration: Registration,
}

/// Whether a run is registered by its id. It is not before its row is stored, because the id may be taken.
enum Registration {
    /// With its registration as a parent, if it can start child runs.
    Pending(Option<Box<Parent>>),
    Done {
        _guard: Option<ParentGuard>,
    },
}

/// Channels that are notified of a run's progress.
#[derive(Default)]
pub(super) struct RunNotices {
    /// Notified once the run's row is stored, or cannot be stored.
    pub(super) stored: Option<oneshot::Sender<Result<Option<Follower>, Stopped>>>,
    /// Whether the receiver of `stored` wants to follow the run.
    pub(super) is_followed: bool,
    /// Gets the ended run, or `None` if it is parked; dropped if this replica sees neither.
    pub(super) end: Option<oneshot::Sender<Option<RunRecord>>>,
}

/// The tool-calling protocol of the run's model.
pub(super) fn driver(plan: &Plan) -> Box<dyn Driver> {
    let Some(react) = &plan.rules.react else { return Box::new(Native) };
    let described = react.decision_schema.clone();
    let schema = plan.agent.decision_validator.clone();
    Box::new(React {
        final_via_inference: react.final_via_inference,
        fields: described
            .zip(schema)
            .map(|(described, schema)| DecisionFields { described, schema }),
    })
}

impl DrivenRun {
    pub(super) fn new(
        runtime: &Runtime,
        mut identity: RunIdentity,
        plan: Arc<Plan>,
        executor: Arc<Executor>,
        workspace: Workspace,
        state: State,
        slot: RunSlot,
    ) -> Self {
        identity.planned(&plan);
        let is_new = state.last_seq() == 0 && identity.epoch == 1;
        // A client often follows its queued run a moment later, while the first answer is being written. It also
        // returns to a run that is taken up again: its stream broke with the other replica, or it decided a call.
        let expects_followers = !is_new && !identity.origin.is_child;
        let driver = driver(&plan);
        let workspace = workspace.of_run(identity.new.id, identity.epoch);
        let directory = workspace.directory();
        let control = Arc::new(RunControl::default());
        let standing = control.standing(Arc::clone(&runtime.inner.replica.lease));
        let scope = run_scope(&identity, &plan, workspace, &state, standing);
        let is_open = Arc::new(AtomicBool::new(identity.lineage.is_some()));
        let parent = Parent {
            identity: identity.clone(),
            plan: Arc::clone(&plan),
            control: Arc::clone(&control),
            is_open: Arc::clone(&is_open),
            has_budget: AtomicBool::default(),
            directory,
            slot: slot.parent_slot(),
            refused: RefusedAgents::default(),
        };
        let run = Run {
            is_child: identity.origin.is_child,
            shared: runtime.sharing(&identity, &plan, &is_open),
            plan,
            executor,
            scope,
            handlers: Arc::clone(&runtime.inner.handlers),
            router: Arc::clone(&runtime.inner.router),
            driver,
            control,
            lease: Arc::clone(&runtime.inner.replica.lease),
            admission: Box::new(CallLimits {
                rates: Arc::clone(&runtime.inner.rate_limits),
                patience: runtime.inner.settings.store_patience,
                caller: Arc::clone(&identity.caller),
            }),
            audience: Box::new(Followers::new(
                Arc::clone(&runtime.inner.bus),
                identity.new.id,
                expects_followers,
            )),
            journal: Journal::new(RunAppender {
                commits: runtime.inner.writer.appender(),
                new: is_new.then(|| Arc::clone(&identity.new)),
                identity: identity.clone(),
            }),
            inputs: Arc::clone(&identity.new.inputs),
            trace: identity.origin.trace,
            state,
            outbox: Vec::new(),
            audit: Vec::new(),
            memory_share: runtime
                .inner
                .capacity
                .conversation_memory
                .share(identity.origin.is_child),
            large_answer: None,
        };
        let runtime = runtime.clone();
        let registration = Registration::Pending(Some(Box::new(parent)));
        Self { runtime, identity, run, slot, resumption: None, registration }
    }

    fn is_registered(&self) -> bool {
        matches!(self.registration, Registration::Done { .. })
    }

    /// Registers it by its id, for cancel requests, followers and waiting parents.
    fn register(&mut self) {
        if let Registration::Pending(parent) = &mut self.registration {
            let driven = &self.runtime.inner.driven;
            let known = parent.take().and_then(|parent| driven.parents.note(*parent));
            self.registration = Registration::Done { _guard: known };
            driven.insert(self.identity.new.id, self.identity.epoch, &self.run.control);
            if self.runtime.inner.replica.gives_back.is_cancelled() {
                self.run.control.lose(); // it may be too late to be given back with the others
            }
        }
    }

    /// Removes its registrations, unless the run is already driven here again.
    fn unregister(&self, is_parked: bool) {
        let (inner, id) = (&self.runtime.inner, self.identity.new.id);
        if inner.driven.remove(id, self.identity.epoch, &self.run.control) {
            inner.agents.release_run(id, is_parked);
        }
    }

    /// Drives the run in a detached task, and notifies the given channels.
    pub(super) fn spawn(
        mut self,
        ownership: OwnedRun,
        RunNotices { stored, is_followed, end }: RunNotices,
    ) {
        let (runtime, id) = (self.runtime.clone(), self.identity.new.id);
        let control = Arc::clone(&self.run.control);
        let payer = CpuAccount::tenant(&self.identity.caller.tenant);
        if !runtime.serves_the_queue() {
            runtime.inner.driven.note_own(self.identity.root());
        }
        if stored.is_none() {
            self.register();
        }
        let task = async move {
            let ended = tokio::select! {
                biased;
                () = control.lost() => Ok(Err(Stopped::Journal(AppendFailed::Fenced).into())),
                ended = AssertUnwindSafe(self.store_and_drive(stored, is_followed)).catch_unwind() => ended,
            };
            if self.is_registered() {
                self.unregister(matches!(ended, Ok(Ok(Driven::Parked))));
            }
            match ended {
                Ok(Ok(Driven::Parked)) => {
                    // A child may have ended since its state was read.
                    self.runtime.inner.queue.children_ended(awaited_children(&self.run.state));
                    if let Some(end) = end {
                        let _ = end.send(None); // the receiver may be gone
                    }
                }
                Ok(Ok(Driven::Ended)) => {
                    let parked: Vec<Uuid> = awaited_children(&self.run.state).collect();
                    self.runtime.cancel_children(&self.identity.caller.tenant, parked).await;
                    if let (Some(end), Some(record)) =
                        (end, record(&self.identity, &self.run.state))
                    {
                        let _ = end.send(Some(record));
                    }
                }
                Ok(Err(reason)) if !self.is_registered() => self.not_begun(ownership, &reason),
                Ok(Err(ResumeError::Stopped(Stopped::Journal(reason)))) => {
                    self.runtime
                        .not_recorded(&self.identity, ownership, reason, control.is_lost())
                        .await;
                }
                Ok(Err(ResumeError::Stopped(reason @ Stopped::LeaseOver))) => {
                    tracing::warn!(run_id = %id, %reason, "run stopped on this replica");
                    self.runtime.inner.driven.live.abandon(ownership);
                }
                Ok(Err(error)) => self.runtime.not_resumed(&self.identity, ownership, error).await,
                Err(_panic) if !self.is_registered() => {
                    self.runtime.inner.driven.live.abandon(ownership);
                }
                Err(_panic) => {
                    let _ = self.run.journal.settle().await; // the end must follow all appended entries
                    let reason = "the service failed while running it".into();
                    self.runtime.interrupt(&self.identity, ownership, reason).await;
                }
            }
            let runtime = self.runtime.clone();
            drop(self); // and with it its slot
            runtime.inner.queue.worker_freed();
        };
        runtime.inner.driven.tasks.spawn(FairTask::new(payer, task));
    }

    async fn store_and_drive(
        &mut self,
        stored: Option<oneshot::Sender<Result<Option<Follower>, Stopped>>>,
        is_followed: bool,
    ) -> Result<Driven, ResumeError> {
        if let Some(resumption) = self.resumption.take() {
            self.prepare_resumption(resumption).await?;
        }
        if let Some(stored) = stored {
            let outcome = self.run.persist().await;
            if outcome.is_ok() {
                self.register();
            }
            let follower = (outcome.is_ok() && is_followed).then(|| {
                self.runtime.follow_live(
                    &self.identity.caller.tenant,
                    self.identity.new.id,
                    self.run.state.last_seq(),
                )
            });
            let _ = stored.send(outcome.clone().map(|()| follower)); // the receiver may be gone
            outcome?;
        }
        Ok(self.run.drive().await?)
    }

    /// Handles a start that was not acknowledged. A run with this id is another one, unless only the
    /// acknowledgement was lost.
    fn not_begun(&self, ownership: OwnedRun, reason: &ResumeError) {
        tracing::debug!(run_id = %ownership.run(), %reason, "run not begun");
        if matches!(reason, ResumeError::Stopped(Stopped::Journal(AppendFailed::Unavailable))) {
            self.runtime.inner.driven.live.abandon(ownership);
        }
    }
}

/// The child runs that a run waits for, or was waiting for when it ended.
fn awaited_children(state: &State) -> impl Iterator<Item = Uuid> {
    state.waiting().filter_map(|awaited| awaited.child_run_id)
}

impl Runtime {
    /// Cancels the parked children of a run that has ended. The sweep finds those that are missed here.
    async fn cancel_children(&self, tenant: &str, children: Vec<Uuid>) {
        let reason = Some("the run that waited for it has ended");
        for child in children {
            if let Err(error) = self.cancel(tenant, child, SERVICE, reason).await {
                tracing::debug!(run_id = %child, %error, "the child run is cancelled later");
            }
        }
    }

    /// Handles a failed append to the journal of a driven run.
    async fn not_recorded(
        &self,
        identity: &RunIdentity,
        ownership: OwnedRun,
        reason: AppendFailed,
        is_lost: bool,
    ) {
        match reason {
            AppendFailed::Refused => {
                self.interrupt(identity, ownership, "the store refused to record it".into()).await;
            }
            AppendFailed::Cancelling => self.end_as_cancelled(ownership).await,
            AppendFailed::Fenced if !is_lost => self.fenced(ownership).await,
            AppendFailed::Fenced if self.is_draining() => {
                tracing::info!(run_id = %ownership.run(), "run is given back to the queue");
            }
            reason => {
                tracing::warn!(run_id = %ownership.run(), %reason, "run stopped on this replica");
                if reason == AppendFailed::Unavailable {
                    self.inner.driven.live.abandon(ownership);
                }
            }
        }
    }
}

/// The context of a run's tools.
pub(super) fn run_scope(
    identity: &RunIdentity,
    plan: &Plan,
    workspace: Workspace,
    state: &State,
    standing: Standing,
) -> RunScope {
    RunScope {
        run_id: identity.new.id,
        agent: identity.new.agent.as_str().into(),
        caller: Arc::clone(&identity.caller),
        workspace,
        timeout: Duration::from_secs(plan.rules.limits.call_seconds()),
        delegation_timeout: Duration::from_secs(plan.delegation_seconds()),
        longest: plan.longest_call_seconds.map(Duration::from_secs),
        tools: Arc::new(plan.callable()),
        inputs: Arc::clone(&identity.new.inputs),
        labels: state.labels(),
        trace: Some(identity.origin.trace),
        skills: state.skills().into(),
        standing,
        listener: Listener::default(),
        requests_left: RequestsLeft::default(),
        files_left: None,
    }
}

/// Appends the entries of one run to the group-commit writer.
struct RunAppender {
    commits: Appender,
    identity: RunIdentity,
    /// The run's row, until it is appended.
    new: Option<Arc<NewRun>>,
}

impl Append for RunAppender {
    fn append(&mut self, entry: Entry) -> Ack {
        let durable = self.commits.append(self.identity.write(self.new.take(), entry));
        Box::pin(durable.map(|outcome| outcome.map_err(failed)))
    }
}

fn failed(error: AppendError) -> AppendFailed {
    match error {
        AppendError::Fenced => AppendFailed::Fenced,
        AppendError::Cancelling => AppendFailed::Cancelling,
        AppendError::IdTaken => AppendFailed::IdTaken,
        AppendError::Refused => AppendFailed::Refused,
        AppendError::Unavailable => AppendFailed::Unavailable,
    }
}

/// The ended run as the store has it, without asking the store.
fn record(identity: &RunIdentity, state: &State) -> Option<RunRecord> {
    let (ending, at) = state.ending()?;
    let what = RunEvent::ended(ending.outcome.clone(), ending.latency_ms);
    let end = Event { seq: state.last_seq(), at, run_id: identity.new.id, what };
    let totals = state.totals().clone();
    let entry = Entry { events: vec![end], audit: Vec::new(), totals, park: None };
    let write = identity.write(Some(Arc::clone(&identity.new)), entry);
    let record = RunRecord::after("", &write).ok()?;
    Some(RunRecord { started_at: state.started_at(), ..record })
}
