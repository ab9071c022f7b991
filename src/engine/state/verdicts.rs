//! What the verdict on a proposed output, or the lack of one, means for a run.
//!
//! [`crate::engine::validation`] makes the verdict.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::{Proposal, State};
use crate::engine::phrases;
use crate::event::{RunEvent, ValidationError};
use crate::run::{Outcome, RunError, TerminationReason};

const NOT_VALID: (TerminationReason, &str) =
    (TerminationReason::ValidationFailed, "No attempt produced a valid output.");
const VALIDATOR_UNAVAILABLE: &str = "VALIDATOR_UNAVAILABLE";

impl State {
    /// The events for the verdict on a proposal; an empty list of errors accepts it.
    pub fn judged(
        &self,
        proposal: &Proposal,
        errors: Vec<ValidationError>,
        now: DateTime<Utc>,
    ) -> Vec<RunEvent> {
        if errors.is_empty() {
            let output = Value::clone(&proposal.output);
            return vec![self.ended(now, self.completed(output))];
        }
        let feedback = match &self.rules.react {
            None => phrases::another_attempt(&errors, self.output_tool(), self.submit_tool()),
            Some(_) if self.is_reflected() => {
                phrases::another_attempt(&errors, self.output_tool(), self.submit_tool())
            }
            Some(_) => phrases::another_final_answer(&errors),
        };
        self.attempt_failed(proposal.call_id, errors, feedback, NOT_VALID, now)
    }

    /// The events if the validator is unavailable: the run ends, because the model cannot correct that.
    pub fn validator_unavailable(&self, why: &str, now: DateTime<Utc>) -> Vec<RunEvent> {
        let error = RunError {
            code: VALIDATOR_UNAVAILABLE.to_owned(),
            message: format!("The output could not be validated: the validator {why}."),
            context: json!({"attempt": self.attempt}),
        };
        let (reason, raw_response) = (TerminationReason::Error, self.raw_response.clone());
        let end = self.ended(now, Outcome::Failed { reason, error, raw_response });
        self.ended_mid_turn("the output could not be validated", end)
    }

    /// Begins the next attempt, or ends the run for this reason if it was the last.
    pub(super) fn attempt_failed(
        &self,
        call_id: Option<uuid::Uuid>,
        errors: Vec<ValidationError>,
        feedback: String,
        (reason, message): (TerminationReason, &str),
        now: DateTime<Utc>,
    ) -> Vec<RunEvent> {
        let last = self.single_shot || self.attempt >= self.rules.limits.max_attempts;
        let context = json!({"attempt": self.attempt, "max_attempts": self.rules.limits.max_attempts, "errors": errors});
        let failed =
            RunEvent::ValidationFailed { attempt: self.attempt, call_id, errors, feedback };
        if !last {
            return vec![failed];
        }
        vec![failed, self.failed(now, reason, message, context)]
    }
}
