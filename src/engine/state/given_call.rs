//! A run of one tool call that the caller made in the agent's name: no model is asked, and the call's
//! result is the output.

use chrono::{DateTime, Utc};
use serde_json::json;

use super::{State, Step};
use crate::engine::output;
use crate::message::Turn;
use crate::run::{GivenCall, Outcome, TerminationReason};

impl State {
    /// The step between iterations of a run that consists of the given call.
    pub(super) fn with_given(&self, given: &GivenCall, now: DateTime<Utc>) -> Step {
        let answered = match self.conversation.turns().last() {
            Some(Turn::Assistant(turn)) if self.iteration > 0 => turn.results().first(),
            _ => None,
        };
        let Some(result) = answered else { return Step::GiveCall(given.clone()) };
        let said = result.content.len().saturating_sub(result.note_bytes);
        let content = result.content.get(..said).unwrap_or(&result.content);
        Step::Record(vec![if result.is_error {
            let about = json!({"tool": given.tool, "call_id": result.call_id, "result": content});
            let message = format!("The call of {} failed.", given.tool);
            self.failed(now, TerminationReason::ToolFailure, message, about)
        } else {
            self.ended(
                now,
                Outcome::Completed {
                    output: output::from_text(content),
                    raw_response: content.to_owned(),
                    reason: TerminationReason::Completed,
                    partial: false,
                    unchecked: Vec::new(),
                },
            )
        }])
    }
}
