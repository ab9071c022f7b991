//! Events as they are served: to readers of a run, to webhooks and in lists.
//!
//! A fact has one name in the whole API. Where the journal has another one, it is given its name
//! here, and nowhere else: `termination_reason`, and `total_tokens` and `cost_usd` of a usage. What a
//! server wants to have back unread is left out.
//! [`stored`] is the way back for those who read what is served. The API document describes this
//! form; a test of the document holds one event of each type against it.

use serde_json::{Map, Value};

use super::{Awaited, Event, ModelInterrupted, ModelResponded, ModelRetried, RunEvent};
use crate::message::Usage;
use crate::run::{TerminationReason, Usd};

impl Event {
    /// The event as JSON text for those outside.
    ///
    /// # Errors
    /// Where it cannot be written as JSON.
    pub fn served_text(&self) -> serde_json::Result<String> {
        if self.what.has_other_names() {
            return self.served().map(|event| event.to_string());
        }
        serde_json::to_string(self)
    }

    /// The event as JSON for those outside.
    ///
    /// # Errors
    /// Where it cannot be written as JSON.
    pub fn served(&self) -> serde_json::Result<Value> {
        let mut event = serde_json::to_value(self)?;
        let Some(data) = event.get_mut("data") else { return Ok(event) };
        match &self.what {
            RunEvent::ModelResponded(ModelResponded { usage, .. })
            | RunEvent::ModelRetried(ModelRetried { usage: Some(usage), .. })
            | RunEvent::ModelInterrupted(ModelInterrupted { usage, .. }) => name_usage(data, usage),
            RunEvent::ContextCompacted(compacted) => {
                if let (Some(call), Some(told)) = (&compacted.call, data.get_mut("call")) {
                    name_usage(told, &call.usage);
                }
            }
            RunEvent::IterationStarted { limit, .. } => {
                if let (Some(limit), Some(told)) = (limit, data.get_mut("limit")) {
                    name_reason(told, limit.reason);
                }
            }
            RunEvent::RunCompleted(ending)
            | RunEvent::RunFailed(ending)
            | RunEvent::RunCancelled(ending) => name_reason(data, ending.outcome.reason()),
            RunEvent::ToolCallAwaitingClient(_) => {
                if let Some(Value::Object(input)) = data.get_mut("input") {
                    input.shift_remove("request_state"); // between us and the server
                    input.shift_remove("requests_uncounted");
                }
            }
            RunEvent::RunQueued {}
            | RunEvent::RunStarted { .. }
            | RunEvent::SessionLoaded { .. }
            | RunEvent::SkillActivated(_)
            | RunEvent::RunResumed { .. }
            | RunEvent::AttemptStarted { .. }
            | RunEvent::CallGiven(_)
            | RunEvent::ToolCallStarted(_)
            | RunEvent::ToolCallCompleted(_)
            | RunEvent::ToolCallBlocked(_)
            | RunEvent::ToolCallAwaitingChild(_)
            | RunEvent::ApprovalRequested(_)
            | RunEvent::ApprovalResolved(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::ScanWarned(_)
            | RunEvent::LabelsChanged(_)
            | RunEvent::BudgetWarned { .. }
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::ToolChoiceUnmet { .. }
            | RunEvent::AnswerBlank { .. }
            | RunEvent::ModelRetried(_)
            | RunEvent::RunCancelRequested { .. } => {}
        }
        Ok(event)
    }
}

impl RunEvent {
    /// Whether a field of it has another name outside, or none.
    fn has_other_names(&self) -> bool {
        let (Self::ModelResponded(_)
        | Self::ModelRetried(ModelRetried { usage: Some(_), .. })
        | Self::ModelInterrupted(_)
        | Self::ContextCompacted(_)
        | Self::ToolCallAwaitingClient(Awaited { input: Some(_), .. })
        | Self::IterationStarted { limit: Some(_), .. }
        | Self::RunCompleted(_)
        | Self::RunFailed(_)
        | Self::RunCancelled(_)) = self
        else {
            return false;
        };
        true
    }
}

fn name_usage(told: &mut Value, usage: &Usage) {
    let Some(Value::Object(told)) = told.get_mut("usage") else { return };
    told.shift_remove("cost_micro_usd");
    told.insert("total_tokens".to_owned(), usage.total_tokens().into());
    told.insert(
        "cost_usd".to_owned(),
        usage.cost_micro_usd.map(|cost| Usd::from_micro(cost).dollars()).into(),
    );
}

fn name_reason(told: &mut Value, reason: TerminationReason) {
    let Value::Object(told) = told else { return };
    told.shift_remove("reason");
    told.insert("termination_reason".to_owned(), reason.as_str().into());
}

/// An event that was served, as the journal has it.
pub fn stored(mut event: Value) -> Value {
    let Some(data) = event.get_mut("data") else { return event };
    for place in ["", "/limit"] {
        if let Some(Value::Object(told)) = data.pointer_mut(place) {
            rename(told, "termination_reason", "reason", |reason| reason);
        }
    }
    for place in ["/usage", "/call/usage"] {
        if let Some(Value::Object(told)) = data.pointer_mut(place) {
            rename(told, "cost_usd", "cost_micro_usd", |cost| {
                serde_json::from_value::<Usd>(cost).ok().map(Usd::micro).into()
            });
        }
    }
    event
}

fn rename(told: &mut Map<String, Value>, from: &str, to: &str, read: impl FnOnce(Value) -> Value) {
    if let Some(value) = told.shift_remove(from) {
        told.insert(to.to_owned(), read(value));
    }
}
