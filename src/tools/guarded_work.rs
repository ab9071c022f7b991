//! A piece of a tool's work: bounded in time, with its panics caught.
//!
//! How a failure becomes the call's result, or ends the run, is the executor's.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures::FutureExt;
use uuid::Uuid;

use super::ToolError;
use crate::event::{CallFailure, InputRequired};
use crate::run::Effect;

/// The note for the model about a call that may have changed something.
pub(super) const MAY_HAVE_EFFECT: &str =
    "It is unknown whether the call took effect; check before you repeat it.";

/// How a guarded piece of a tool's work failed.
pub(super) enum Failure {
    /// Returned to the model.
    ForModel(CallFailure, String),
    /// The run ends.
    Fatal(String),
    /// The call waits for this child run.
    AwaitsChild(Uuid),
    /// The call waits for input.
    AwaitsInput(Box<InputRequired>),
    /// A crash interrupted the call, and its tool was asked but does not know its outcome, for this
    /// reason.
    Unsettled(String),
}

impl Failure {
    /// The failure of a call whose run has ended.
    pub(super) fn cancelled(effect: Effect) -> Self {
        let known = match effect {
            Effect::Read => "",
            Effect::Idempotent | Effect::Once => "; it is unknown whether it took effect",
        };
        Self::ForModel(CallFailure::Cancelled, format!("The run ended during this call{known}."))
    }

    /// The failure of an interrupted call whose run ended before its tool answered about the outcome.
    pub(super) fn cancelled_before_answer() -> Self {
        let why = "The service restarted while this call was running, and the run ended before it was \
                   found out whether it took effect.";
        Self::ForModel(CallFailure::UnknownOutcome, why.to_owned())
    }

    /// The failure of a call whose run had ended before it began.
    pub(super) fn not_begun() -> Self {
        let why = "Not executed, the run ended before this call began.";
        Self::ForModel(CallFailure::NotExecuted, why.to_owned())
    }

    pub(super) fn into_message(self) -> String {
        match self {
            Self::ForModel(_, message) | Self::Fatal(message) | Self::Unsettled(message) => message,
            Self::AwaitsChild(child) => format!("it waits for the run {child}"),
            Self::AwaitsInput(asked) => format!("{} asks for input", asked.server),
        }
    }
}

/// The outcome of a call for the audit log, with the text of its result.
pub(super) fn audited(result: &Result<String, Failure>) -> (&'static str, Option<&str>) {
    match result {
        Ok(text) => ("succeeded", Some(text)),
        Err(Failure::ForModel(CallFailure::Cancelled, _)) => ("cancelled", None),
        Err(Failure::ForModel(CallFailure::NotExecuted, _)) => ("not_executed", None),
        Err(Failure::ForModel(CallFailure::Timeout, _)) => ("timed_out", None),
        // A call that awaits input keeps this outcome until it is repeated.
        Err(Failure::ForModel(CallFailure::UnknownOutcome, _) | Failure::AwaitsInput(_)) => {
            ("unknown", None)
        }
        Err(Failure::ForModel(_, message)) => ("failed", Some(message)),
        Err(_) => ("failed", None),
    }
}

/// A tool's work, which has this effect, bounded in time and with its panics caught.
pub(super) async fn guarded<T>(
    limit: Duration,
    effect: Effect,
    work: impl Future<Output = Result<T, ToolError>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, AssertUnwindSafe(work).catch_unwind()).await {
        Ok(Ok(Ok(done))) => Ok(done),
        Ok(Ok(Err(ToolError::ForModel(message)))) => {
            Err(Failure::ForModel(CallFailure::ToolError, message))
        }
        Ok(Ok(Err(ToolError::OverBudget(message)))) => {
            Err(Failure::ForModel(CallFailure::OverBudget, message))
        }
        Ok(Ok(Err(ToolError::Fatal(message)))) => Err(Failure::Fatal(message)),
        Ok(Ok(Err(ToolError::AwaitsChild(child)))) => Err(Failure::AwaitsChild(child)),
        Ok(Ok(Err(ToolError::AwaitsInput(asked)))) => Err(Failure::AwaitsInput(asked)),
        Ok(Err(_panic)) => {
            let message = "The tool crashed on this call; try other arguments or another tool.";
            Err(Failure::ForModel(CallFailure::Panicked, with_doubt(message.to_owned(), effect)))
        }
        Err(_elapsed) => {
            let message = format!(
                "The tool did not finish within {} seconds and was cancelled.",
                limit.as_secs_f64()
            );
            Err(Failure::ForModel(CallFailure::Timeout, with_doubt(message, effect)))
        }
    }
}

/// A message for the model about a call of this effect that did not come to its end.
pub(super) fn with_doubt(message: String, effect: Effect) -> String {
    if effect == Effect::Read { message } else { format!("{message} {MAY_HAVE_EFFECT}") }
}
