//! Commands on runs: start, cancel, resume; the worker that drives every run; this replica's part
//! in the queue and the leases.
//!
//! Reads do not come through here: handlers ask the store. Wire formats are `http/`'s, decisions
//! inside a run the engine's.

mod answers;
mod audit_chain;
mod background;
mod bus;
mod capacity;
mod child_ids;
mod claimed_run;
mod definition_compiler;
mod delegation;
mod deltas;
mod driven_runs;
mod dry_run;
mod edited_arguments;
mod files;
mod follower;
mod heartbeat;
mod history;
mod housekeeping;
mod idempotency;
mod identity;
mod input;
mod input_labels;
mod journal_poller;
pub mod journals;
pub mod jwt;
mod key_revocation;
pub mod keys;
mod live_runs;
mod loaded_agents;
mod logins;
mod memory;
mod missing_requirements;
mod ownership;
mod parents;
mod policy_cases;
mod probation;
mod queue;
mod queue_admission;
mod rate_limits;
mod recovery;
mod refused_children;
mod replay;
mod replica;
mod reservations;
mod resumption;
mod retention;
mod server_requests;
mod sessions;
mod slots;
mod start;
mod store_retries;
mod transcript;
mod tree_budget;
mod uploads;
mod usage_sums;
mod webhooks;
mod worker;
mod workspaces;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use uuid::Uuid;

use self::bus::Bus;
use self::capacity::Capacity;
use self::driven_runs::DrivenRuns;
use self::housekeeping::Housekeeping;
use self::idempotency::IdempotencyKeys;
use self::loaded_agents::LoadedAgents;
use self::queue::Queue;
use self::replica::Replica;
use self::reservations::Reservations;
use self::slots::RunSlots;
use self::workspaces::Workspaces;
use crate::agents::{Catalogue, Definition, DefinitionError, Skills};
use crate::bounds::key_locks::KeyLocks;
use crate::bounds::memory::TenantPermit;
use crate::engine::{FoldError, Handlers, Rules, State};
use crate::event::Event;
use crate::message::Conversation;
use crate::providers::router::Router;
use crate::run::RunStatus;
use crate::store::RunLimits;
use crate::store::writer::{OnDurable, Writer};
use crate::store::{CancelOutcome, RateLimit, RunWrite, Store, StoreError};
use crate::tools::Tool;
use crate::tools::registry::Registry;
use crate::tools::use_skill::UseSkill;

pub use crate::governance::Decision;
pub use answers::{
    AnswerError, Approver, CallRef, KnownRequests, OutstandingRequests, ReviewFinding,
};
pub use audit_chain::{AuditChain, AuditKey};
pub use bus::{Published, StreamItem};
pub use child_ids::ChildIds;
pub use dry_run::DryRunOutcome;
pub use files::{FileOwner, FileUsers, Files, FilesError};
pub use follower::{FollowEnd, Follower, PagePermit};
pub use heartbeat::HeartbeatStore;
pub use history::{RunTurns, TurnSource, own_turns, turn_sources};
pub use logins::{LoginRefusal, Logins};
pub use memory::recollection;
pub use parents::MAX_DEPTH as MAX_ANCESTORS;
pub use policy_cases::{CaseDecision, NotJudged, PolicyBench, PolicyCase};
pub use queue::Backlog;
pub use rate_limits::{RateLimitStatus, RateLimits};
pub use replay::{Change, NewDecisions, PolicyReplay, Replay, ReplayError, ReplayQuery};
pub use start::{Accepted, Mode, StartError, StartRequest, Started, WaitError};
pub use transcript::{KeptTurn, Transcript, transcript};
pub use uploads::{FileCopy, Upload, UploadError, Uploads};
pub use webhooks::{WebhookSender, Webhooks};
pub use workspaces::{Sharing, WorkspaceSettings, object_store_fault, shared_volume_fault};

/// How long a cancel request waits for the end of a run that is not driven.
const END_TIMEOUT: Duration = Duration::from_secs(2);
/// How long, and how often, a cancel request looks for a run that is being stored.
const STORED_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Runtime settings.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Runs that this replica drives at once.
    pub max_concurrent_runs: usize,
    /// How many of them may be of one tenant, or of one key, on all replicas together.
    pub run_limits: RunLimits,
    /// Runs that may wait in the queue, of all replicas together.
    pub max_queued_runs: u64,
    /// How many of them may have been begun from the queue; resumed runs do not count.
    pub queue_workers: usize,
    /// A replica counts as dead after this time without a heartbeat.
    pub lease: Duration,
    /// How long a run waits for an unavailable store.
    pub store_patience: Duration,
    /// Crashes of its replica after which a run is ended.
    pub max_crashes: u32,
    /// How long an ended run is kept; for ever where absent.
    pub retention: Option<Duration>,
    /// How long an entry of the audit log is kept; for ever where absent.
    pub audit_retention: Option<Duration>,
    /// What signs the stretches of the audit log; absent: they are not signed.
    pub audit_key: Option<AuditKey>,
    /// Who may approve a call.
    pub approver: Approver,
    /// The rate limit of keys without limits of their own, for invocations and tool calls.
    pub rate_limit: RateLimit,
    /// The client and secrets of webhooks; absent: webhooks are disabled.
    pub webhooks: Option<Webhooks>,
    /// Where the files of runs are.
    pub workspaces: WorkspaceSettings,
    /// The share of traces that are recorded, of those that begin here; 0..=1.
    pub sample_ratio: f64,
}

struct Inner {
    settings: Settings,
    store: Arc<Store>,
    writer: Writer,
    agents: Arc<LoadedAgents>,
    router: Arc<Router>,
    handlers: Arc<Handlers>,
    child_ids: ChildIds,
    replica: Replica,
    driven: Arc<DrivenRuns>,
    capacity: Capacity,
    queue: Arc<Queue>,
    idempotency_keys: IdempotencyKeys,
    /// Locks by session, held while a run with uploaded files begins.
    session_uploads: KeyLocks<(String, String)>,
    rate_limits: Arc<RateLimits>,
    workspaces: Arc<Workspaces>,
    bus: Arc<Bus>,
    housekeeping: Housekeeping,
}

/// The service behind the API; cheap to clone.
#[derive(Clone)]
pub struct Runtime {
    inner: Arc<Inner>,
}

impl Runtime {
    /// Puts the parts together; [`Runtime::join`] makes this process a replica. `observer` gets
    /// the writes of this replica once they are durable.
    pub fn new(
        store: Arc<Store>,
        catalogue: Arc<Catalogue>,
        router: Arc<Router>,
        registry: Arc<Registry>,
        child_ids: ChildIds,
        settings: Settings,
        observer: OnDurable,
    ) -> Self {
        let replica = Replica::new(settings.lease);
        let (bus, queue) = (Arc::<Bus>::default(), Arc::new(Queue::new(settings.max_queued_runs)));
        let driven = Arc::<DrivenRuns>::default();
        let reservations = Arc::new(Reservations::new(
            settings.run_limits,
            Arc::clone(&store),
            Arc::clone(&replica.id),
            Arc::clone(&queue.changed),
        ));
        let slots = RunSlots::new(settings.max_concurrent_runs, settings.queue_workers);
        let requests = registry.requests_of_servers().cloned();
        let housekeeping = Housekeeping::new(&store, &settings, requests);
        let on_durable = {
            let (bus, queue, reservations) =
                (Arc::clone(&bus), Arc::clone(&queue), Arc::clone(&reservations));
            let (driven, webhooks) = (Arc::clone(&driven), Arc::clone(&housekeeping.webhooks));
            Arc::new(move |write: &RunWrite| {
                reservations.on_written(write);
                driven.probation.on_written(write);
                bus.publish(write.run_id, &write.events);
                observer(write);
                if write.fills_outbox() {
                    webhooks.outbox_grew();
                }
                queue.on_written(write);
            })
        };
        let inner = Arc::new_cyclic(|inner| Inner {
            writer: Writer::spawn(
                Arc::clone(&store),
                Arc::clone(&replica.id),
                settings.store_patience,
                on_durable,
                driven.on_cancelling(),
            ),
            agents: Arc::new(LoadedAgents::new(
                registry,
                catalogue,
                Arc::new(delegation::Children(inner.clone())),
            )),
            router,
            handlers: Arc::default(),
            child_ids,
            driven,
            capacity: Capacity::new(slots, reservations),
            queue,
            idempotency_keys: IdempotencyKeys::new(Arc::clone(&store)),
            session_uploads: KeyLocks::default(),
            rate_limits: Arc::new(RateLimits::new(Arc::clone(&store), settings.rate_limit)),
            workspaces: Arc::new(Workspaces::new(
                &settings.workspaces,
                Arc::clone(&store),
                &replica.id,
                settings.store_patience,
            )),
            bus,
            housekeeping,
            store,
            settings,
            replica,
        });
        Self { inner }
    }

    /// Cancels a run on behalf of this subject. `None`: no such run of this tenant.
    pub async fn cancel(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let outcome = self.request_cancel(tenant, run, subject, reason).await?;
        let Some(CancelOutcome::Requested(requested)) = outcome else { return Ok(outcome) };
        let reached = self.inner.driven.cancel(run, reason);
        if requested.status == RunStatus::Running {
            let until = match reached {
                Some(true) => return Ok(Some(CancelOutcome::Requested(requested))),
                // It has ended here already, but the store refuses such an end after the request. It ends as cancelled,
                // unless it was interrupted.
                Some(false) => Instant::now() + END_TIMEOUT,
                None => Instant::now(), // it is not driven here
            };
            let found = self.wait(tenant, run, until).await?;
            let is_too_late =
                |status: RunStatus| status.is_terminal() && status != RunStatus::Cancelled;
            return Ok(found.map(|run| {
                if is_too_late(run.status) {
                    CancelOutcome::AlreadyEnded(run)
                } else {
                    CancelOutcome::Requested(run)
                }
            }));
        }
        // It is not driven: end it here, unless another replica was faster.
        self.end_cancelled().await?;
        let ended = self.wait(tenant, run, Instant::now() + END_TIMEOUT).await?;
        Ok(ended.map(CancelOutcome::Requested))
    }

    /// Stores the cancel request; if the run's first commit is in progress here, after that commit.
    async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let until = Instant::now() + STORED_TIMEOUT;
        loop {
            let is_beginning = self.inner.driven.owned.has_started(run, tenant);
            let outcome = self.inner.store.request_cancel(tenant, run, subject, reason).await?;
            if outcome.is_some() || !is_beginning || Instant::now() >= until {
                return Ok(outcome);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Whether this replica can drive runs, by the last check of its workspace directory.
    pub fn has_workspace(&self) -> bool {
        self.inner.workspaces.fault().is_none()
    }

    /// The id of the child run of a dispatched call, if it delegates to another agent.
    pub fn child_of(&self, tool: &str, effect_key: &str) -> Option<Uuid> {
        self.inner.child_ids.of_tool(tool, effect_key)
    }

    /// The closed stretches of the audit log.
    pub fn audit_chain(&self) -> &AuditChain {
        &self.inner.housekeeping.audit_chain
    }

    /// Which keys are in use, and which logins were refused.
    pub fn logins(&self) -> &Logins {
        &self.inner.housekeeping.logins
    }

    /// How often keys may invoke, and their runs call tools.
    pub fn rate_limits(&self) -> &RateLimits {
        &self.inner.rate_limits
    }

    /// A replay of a policy, in its turn.
    pub fn policy_replay(&self, turn: TenantPermit<'static>) -> PolicyReplay {
        PolicyReplay {
            store: Arc::clone(&self.inner.store),
            loaded: Arc::clone(&self.inner.agents),
            turn: Arc::new(turn),
        }
    }

    /// The sender of webhooks.
    pub fn webhooks(&self) -> &WebhookSender {
        &self.inner.housekeeping.webhooks
    }

    /// How many runs this replica drives now.
    pub fn in_flight(&self) -> usize {
        self.inner.driven.live.len()
    }

    /// Whether the last commit to the store succeeded.
    pub fn is_storing(&self) -> bool {
        self.inner.writer.is_available()
    }

    /// Whether the service is stopping.
    pub fn is_draining(&self) -> bool {
        self.inner.replica.is_draining()
    }
}

/// The tool that reads skills, for the list of tools. The one of an agent knows the names of its skills.
pub fn use_skill(skills: &Arc<Skills>) -> Arc<dyn Tool> {
    Arc::new(UseSkill::new(&[], definition_compiler::lookup(skills)))
}

/// Why a definition cannot run with these tools, if it cannot.
pub fn check_tools(
    registry: &Registry,
    skills: &Arc<Skills>,
    definition: &Definition,
) -> Result<(), DefinitionError> {
    definition_compiler::executor(registry, skills, definition, std::iter::empty())
        .map(|_| ())
        .map_err(|e| e.0)
}

/// The messages of a run, from its journal; complete turns only.
///
/// # Errors
/// [`FoldError`] where the journal is damaged.
pub fn conversation(events: &[Event]) -> Result<Conversation, FoldError> {
    let mut state = State::new(Rules::default());
    events.iter().try_for_each(|event| state.apply(event))?;
    Ok(state.conversation().clone())
}

#[cfg(test)]
#[path = "simulation_tests.rs"]
mod simulation;
