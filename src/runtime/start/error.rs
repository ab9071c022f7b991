//! Why no run was started.

use uuid::Uuid;

use crate::event::ValidationError;
use crate::runtime::queue_admission::QueueRefusal;
use crate::runtime::reservations::NoReservation;
use crate::runtime::uploads::UploadError;
use crate::store::{LimitReached, StoreError};

/// Why no run was started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// No agent of that name.
    #[error("there is no agent named {0:?}")]
    UnknownAgent(String),
    /// The inputs do not match the agent's schema.
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
    /// The idempotency key stands for a run that the caller may not see.
    #[error(
        "the idempotency key was used by another caller, whose run this one may not see without the \
         scope runs:read"
    )]
    IdempotencyKeyOfOther,
    /// The idempotency key stands for another request.
    #[error("the idempotency key was used for another request")]
    IdempotencyMismatch,
    /// Too many runs at once, or in the queue.
    #[error("too many runs are in progress or queued")]
    Overloaded,
    /// Other requests took the session each time that this one was placed in it.
    #[error("the session changed too often in the meantime; try again")]
    SessionContended,
    /// The caller's tenant or key has as many runs under way as it may.
    #[error(transparent)]
    TooManyRuns(LimitReached),
    /// The service is stopping.
    #[error("the service is shutting down")]
    Draining,
    /// A file that came with the request cannot be put into the run's workspace.
    #[error(transparent)]
    Upload(UploadError),
    /// Files cannot be written on this replica now.
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

impl From<NoReservation> for StartError {
    fn from(error: NoReservation) -> Self {
        match error {
            NoReservation::Limit(reached) => Self::TooManyRuns(reached),
            NoReservation::Store(error) => Self::Store(error),
        }
    }
}

impl From<QueueRefusal> for StartError {
    fn from(refusal: QueueRefusal) -> Self {
        match refusal {
            QueueRefusal::Full => Self::Overloaded,
            QueueRefusal::NotCounted => {
                let why = "the queue length could not be read in time";
                Self::Store(StoreError::Unavailable(why.to_owned()))
            }
        }
    }
}

impl StartError {
    pub(super) fn lost_reservation() -> Self {
        let why = "this replica was declared dead while the run began";
        Self::Store(StoreError::Unavailable(why.to_owned()))
    }

    pub(super) fn not_stored(reason: &dyn std::error::Error) -> Self {
        Self::Store(StoreError::Unavailable(reason.to_string()))
    }

    pub(in crate::runtime) fn broken(agent: &str, error: &dyn std::error::Error) -> Self {
        Self::BrokenAgent { agent: agent.to_owned(), message: error.to_string() }
    }
}

pub(super) fn at(pointer: &str, message: String) -> ValidationError {
    ValidationError { pointer: pointer.to_owned(), message }
}
