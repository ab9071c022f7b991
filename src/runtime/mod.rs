//! Commands on runs: start, cancel; the worker that drives every run.
//!
//! Reads do not come through here: handlers ask the store. Wire formats are `http/`'s.

pub mod keys;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde_json::Value;
use uuid::Uuid;

use crate::event::{Event, ValidationError};
use crate::message::Conversation;
use crate::run::{Caller, Overrides, RunKind};
use crate::store::{CancelOutcome, RunRecord, StoreError};

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
}

impl Started {
    /// Resolves when the run has ended and its end is durable. Dropping it does not stop the run.
    pub async fn finished(self) -> Result<RunRecord, WaitError> {
        Err(WaitError::Detached(self.run_id))
    }
}

/// The service behind the API; cheap to clone.
#[derive(Clone)]
pub struct Runtime {}

impl Runtime {
    /// Checks everything that can be refused, then starts the run on this replica.
    pub async fn start(&self, request: StartRequest) -> Result<Started, StartError> {
        Err(StartError::UnknownAgent(request.agent))
    }

    /// Cancels a run. `None`: no such run of this tenant.
    pub async fn cancel(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let _ = (tenant, run, reason);
        Ok(None)
    }

    /// Whether the service is stopping.
    pub fn is_draining(&self) -> bool {
        false
    }
}

/// The conversation that a journal tells of, for reading.
pub fn conversation(events: &[Event]) -> Conversation {
    let _ = events;
    Conversation::default()
}
