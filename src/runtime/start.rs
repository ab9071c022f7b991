//! Starting a run: everything that can be refused is refused here, before anything is stored.

use std::collections::BTreeMap;
use std::sync::Arc;

use chrono::{SubsecRound, Utc};
use serde_json::Value;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::Runtime;
use super::worker::{Head, Owned, Tell};
use crate::engine::{AppendFailed, Plan, State, Stopped};
use crate::event::ValidationError;
use crate::run::{Caller, Overrides, RunKind, RunStatus};
use crate::store::{NewRun, RunRecord, StoreError};
use crate::tools::Workspace;

/// A run to start.
#[derive(Debug, Clone)]
pub struct StartRequest {
    /// Who asks; the run keeps these scopes.
    pub caller: Arc<Caller>,
    /// The agent's name.
    pub agent: String,
    /// Single shot or loop.
    pub kind: RunKind,
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
    /// An override is out of range or cannot work; pointers are into the request body.
    #[error("{}", .0.message)]
    InvalidOverride(ValidationError),
    /// The chosen run id exists.
    #[error("the run id {0} is taken")]
    RunIdTaken(Uuid),
    /// Too many runs at once.
    #[error("too many runs are in progress")]
    Overloaded,
    /// The service is stopping.
    #[error("the service is shutting down")]
    Draining,
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
}

/// A run that was accepted.
pub struct Started {
    /// Its id.
    pub run_id: Uuid,
    end: oneshot::Receiver<RunRecord>,
}

impl Started {
    /// Resolves when the run has ended and its end is durable. Dropping it does not stop the run.
    pub async fn finished(self) -> Result<RunRecord, WaitError> {
        self.end.await.map_err(|_| WaitError::Detached(self.run_id))
    }
}

impl Runtime {
    /// Checks everything that can be refused, then starts the run on this replica.
    ///
    /// # Errors
    /// [`StartError`]; nothing was stored then.
    pub async fn start(&self, request: StartRequest) -> Result<Started, StartError> {
        let inner = &self.inner;
        if self.is_draining() {
            return Err(StartError::Draining);
        }
        if !inner.writer.is_available() {
            inner.store.ping().await?; // writes are waiting: refuse at once, or be the first to find it back
        }
        let slot = Arc::clone(&inner.slots).try_acquire_owned().map_err(|_| StartError::Overloaded)?;
        let agent =
            inner.catalogue.agent(&request.agent).ok_or_else(|| StartError::UnknownAgent(request.agent.clone()))?;
        agent.check_inputs(&request.inputs).map_err(StartError::InvalidInputs)?;
        let loaded = inner.loaded.get(&agent).map_err(|e| broken(&request.agent, &e))?;
        let plan = Plan::new(agent, loaded.executor.infos(), &request.overrides, request.kind)
            .map_err(|e| StartError::InvalidOverride(e.0))?;
        inner.router.resolve(&plan.model).map_err(|e| refused("/model", e.to_string()))?;
        let opening =
            plan.opening(&request.inputs).map_err(|e| StartError::InvalidInputs(vec![at("", e.to_string())]))?;

        let chosen = request.run_id;
        let run_id = chosen.unwrap_or_else(Uuid::now_v7);
        let directory = plan.agent.workspace_of(run_id, request.session_id.as_deref());
        let workspace = Workspace::open(&inner.settings.workspace, &request.caller.tenant, &directory)
            .map_err(|e| broken(&request.agent, &e))?;
        let state = State::new(plan.rules.clone());
        let new = Arc::new(NewRun {
            id: run_id,
            agent: request.agent,
            agent_version: plan.agent.definition.version.clone(),
            definition: loaded.snapshot,
            kind: request.kind,
            status: RunStatus::Running,
            inputs: Arc::new(request.inputs),
            overrides: serde_json::to_value(&request.overrides).unwrap_or_default(),
            session_id: request.session_id,
            parent_run_id: None,
            metadata: request.metadata.into_iter().map(|(k, v)| (k, Value::String(v))).collect(),
            created_at: Utc::now().trunc_subsecs(6),
            idempotency: None,
            traceparent: None,
        });
        let head = Head { new, caller: request.caller, epoch: 1 };
        let mut owned = Owned::new(self, head, Arc::new(plan), loaded.executor, workspace, state, Some(slot));
        owned.run.open(opening).map_err(|e| broken(&owned.head.new.agent, &e))?;
        let (stored, is_stored) = oneshot::channel();
        let (tell, end) = oneshot::channel();
        owned.spawn(Tell { stored: chosen.map(|_| stored), end: Some(tell) });
        if chosen.is_some() {
            is_stored.await.unwrap_or(Err(Stopped::Journal(AppendFailed::Unavailable))).map_err(|e| match e {
                Stopped::Journal(AppendFailed::IdTaken) => StartError::RunIdTaken(run_id),
                other => StartError::Store(StoreError::Unavailable(other.to_string())),
            })?;
        }
        Ok(Started { run_id, end })
    }
}

fn broken(agent: &str, error: &dyn std::error::Error) -> StartError {
    StartError::BrokenAgent { agent: agent.to_owned(), message: error.to_string() }
}

fn at(pointer: &str, message: String) -> ValidationError {
    ValidationError { pointer: pointer.to_owned(), message }
}

fn refused(pointer: &str, message: String) -> StartError {
    StartError::InvalidOverride(at(pointer, message))
}
