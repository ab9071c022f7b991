//! Events as they are served: to readers of a run, to webhooks and in lists.
//!
//! A field has the same name in the whole API. Only here are fields of the journal renamed to it:
//! `termination_reason`, and `total_tokens` and `cost_usd` of a usage. The opaque state of an MCP server is
//! left out. [`stored`] is the inverse, for programs that read served events. The API document describes the
//! served form; a test checks one event of each type against it.

use serde_json::{Map, Value};

use super::{Awaited, Event, ModelInterrupted, ModelResponded, ModelRetried, RunEvent};
use crate::message::Usage;
use crate::run::{TerminationReason, Usd};

impl Event {
    /// The served event as JSON text.
    ///
    /// # Errors
    /// Where it cannot be written as JSON.
    pub fn served_text(&self) -> serde_json::Result<String> {
        if self.what.has_other_names() {
            return self.served().map(|event| event.to_string());
        }
        serde_json::to_string(self)
    }

    /// The served event as JSON.
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
                if let (Some(call), Some(fields)) = (&compacted.call, data.get_mut("call")) {
                    name_usage(fields, &call.usage);
                }
            }
            RunEvent::IterationStarted { limit, .. } => {
                if let (Some(limit), Some(fields)) = (limit, data.get_mut("limit")) {
                    name_reason(fields, limit.reason);
                }
            }
            RunEvent::RunCompleted(ending)
            | RunEvent::RunFailed(ending)
            | RunEvent::RunCancelled(ending) => name_reason(data, ending.outcome.reason()),
            RunEvent::ToolCallAwaitingClient(_) => {
                if let Some(Value::Object(input)) = data.get_mut("input") {
                    input.shift_remove("request_state"); // opaque state of the MCP server
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
    /// Whether a field of it is renamed or left out.
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

fn name_usage(fields: &mut Value, usage: &Usage) {
    let Some(Value::Object(fields)) = fields.get_mut("usage") else { return };
    fields.shift_remove("cost_micro_usd");
    fields.insert("total_tokens".to_owned(), usage.total_tokens().into());
    fields.insert(
        "cost_usd".to_owned(),
        usage.cost_micro_usd.map(|cost| Usd::from_micro(cost).dollars()).into(),
    );
}

fn name_reason(fields: &mut Value, reason: TerminationReason) {
    let Value::Object(fields) = fields else { return };
    fields.shift_remove("reason");
    fields.insert("termination_reason".to_owned(), reason.as_str().into());
}

/// Converts a served event back to the form of the journal.
pub fn stored(mut event: Value) -> Value {
    let Some(data) = event.get_mut("data") else { return event };
    for place in ["", "/limit"] {
        if let Some(Value::Object(fields)) = data.pointer_mut(place) {
            rename(fields, "termination_reason", "reason", |reason| reason);
        }
    }
    for place in ["/usage", "/call/usage"] {
        if let Some(Value::Object(fields)) = data.pointer_mut(place) {
            rename(fields, "cost_usd", "cost_micro_usd", |cost| {
                serde_json::from_value::<Usd>(cost).ok().map(Usd::micro).into()
            });
        }
    }
    event
}

fn rename(
    fields: &mut Map<String, Value>,
    from: &str,
    to: &str,
    read: impl FnOnce(Value) -> Value,
) {
    if let Some(value) = fields.shift_remove(from) {
        fields.insert(to.to_owned(), read(value));
    }
}
