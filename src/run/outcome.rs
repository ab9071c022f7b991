//! How a run ended.
//!
//! An outcome is the content of a run's last event. The state machine decides when a run ends, and with which
//! outcome.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use super::{RunStatus, TerminationReason};

/// The error of a run that did not complete.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct RunError {
    /// Stable code; each termination reason has one.
    pub code: String,
    /// One sentence for people.
    pub message: String,
    /// Details by code, e.g. `{attempt, iteration_count, max_iterations}`.
    #[serde(default)]
    pub context: Value,
}

/// How a run ended: the terminal status with its evidence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Outcome {
    /// With an output.
    Completed {
        /// The accepted output.
        output: Value,
        /// The model's last text or arguments, as it wrote them.
        raw_response: String,
        /// `completed`, or the limit that forced a partial answer.
        reason: TerminationReason,
        /// Whether a limit forced the output.
        partial: bool,
        /// What a forced output was not checked against.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        unchecked: Vec<String>,
    },
    /// With an error.
    Failed {
        /// Why the run ended.
        reason: TerminationReason,
        /// What went wrong.
        error: RunError,
        /// The model's last text; empty if there is none.
        raw_response: String,
    },
    /// By its caller, or with the run that started it.
    Cancelled {
        /// Code `EXECUTION_CANCELLED`, context `{phase, attempt, iteration, reason?}`.
        error: RunError,
        /// The model's last text; empty if there is none.
        raw_response: String,
    },
}

/// The text of an output that is nothing but a text.
pub fn text_of(output: &Value) -> Option<&str> {
    output
        .as_object()
        .filter(|fields| fields.len() == 1)
        .and_then(|fields| fields.get("result")?.as_str())
}

impl Outcome {
    /// A warning that names what a forced output was not checked against.
    pub fn unchecked(&self) -> Option<String> {
        match self {
            Self::Completed { unchecked, .. } if !unchecked.is_empty() => Some(format!(
                "A limit forced this output; it was not checked against {}.",
                unchecked.join(", ")
            )),
            Self::Completed { .. } | Self::Failed { .. } | Self::Cancelled { .. } => None,
        }
    }

    /// A failure with the error code of its reason.
    pub fn failed(
        reason: TerminationReason,
        message: impl Into<String>,
        context: Value,
        raw_response: String,
    ) -> Self {
        let code = reason.code().unwrap_or("INTERNAL").to_owned();
        Self::Failed {
            reason,
            error: RunError { code, message: message.into(), context },
            raw_response,
        }
    }

    pub fn status(&self) -> RunStatus {
        match self {
            Self::Completed { .. } => RunStatus::Completed,
            Self::Failed { .. } => RunStatus::Failed,
            Self::Cancelled { .. } => RunStatus::Cancelled,
        }
    }

    pub fn reason(&self) -> TerminationReason {
        match self {
            Self::Completed { reason, .. } | Self::Failed { reason, .. } => *reason,
            Self::Cancelled { .. } => TerminationReason::Cancelled,
        }
    }

    pub fn error(&self) -> Option<&RunError> {
        match self {
            Self::Completed { .. } => None,
            Self::Failed { error, .. } | Self::Cancelled { error, .. } => Some(error),
        }
    }

    pub fn output(&self) -> Option<&Value> {
        match self {
            Self::Completed { output, .. } => Some(output),
            _ => None,
        }
    }

    pub fn is_partial(&self) -> bool {
        matches!(self, Self::Completed { partial: true, .. })
    }

    pub fn raw_response(&self) -> &str {
        match self {
            Self::Completed { raw_response, .. }
            | Self::Failed { raw_response, .. }
            | Self::Cancelled { raw_response, .. } => raw_response,
        }
    }
}
