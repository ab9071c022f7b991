//! Calls that a crash interrupted and whose tools can be asked about them: the recorded start of a call,
//! and the answer of its tool.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use chrono::TimeDelta;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::CallOutcome;
use super::guarded_work::Failure;
use crate::bounds::json;
use crate::clock;
use crate::event::{AuditRecord, Reconciled, ToolCallStarted};
use crate::message::ToolCall;
use crate::run::{Action, OnUnknownOutcome};

/// The rule by which the audit log shows answers.
pub(super) const RULE: &str = "reconcile";

/// The arguments and actions of a call, as its start was recorded.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RecordedCall {
    /// Its arguments, where they are not those that the model wrote.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    arguments: Option<Arc<Value>>,
    /// What the gate judged.
    #[serde(default)]
    actions: Arc<[Action]>,
}

impl RecordedCall {
    /// What the start of a call says.
    pub fn of(started: &ToolCallStarted) -> Self {
        let ToolCallStarted { arguments, actions, .. } = started;
        Self { arguments: arguments.clone(), actions: Arc::clone(actions) }
    }

    /// The call with the arguments with which it was made.
    pub fn made<'a>(&self, call: &'a ToolCall) -> Cow<'a, ToolCall> {
        self.arguments.as_ref().map_or(Cow::Borrowed(call), |arguments| {
            Cow::Owned(ToolCall { arguments: arguments.to_string(), ..call.clone() })
        })
    }

    /// The arguments and the actions, for the person who reviews the call. If its start has no arguments,
    /// these are the approver's, if there are any, or else the model's.
    pub fn shown(&self, call: &ToolCall, edited: Option<&Value>) -> (Value, Arc<[Action]>) {
        let of_model = || {
            json::read(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()))
        };
        let arguments = self.arguments.as_deref().or(edited).cloned().unwrap_or_else(of_model);
        (arguments, Arc::clone(&self.actions))
    }
}

/// A call whose outcome a crash left unknown, as its start was recorded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InterruptedCall {
    /// Identifies the declaration of the tool that can be asked.
    pub tool_hash: String,
    /// Identifies the call with its arguments.
    pub effect_key: String,
    /// How the call is treated if the tool does not know its outcome.
    pub on_unknown_outcome: OnUnknownOutcome,
    /// For the person who reviews the call, if the tool does not know its outcome.
    #[serde(default)]
    pub made_with: RecordedCall,
}

/// What is known of a call that a crash interrupted and whose tool is asked about it first.
#[derive(Debug)]
pub(super) struct Reconciliation {
    interrupted: InterruptedCall,
    answer: OnceLock<Answer>,
}

/// What a tool has answered.
#[derive(Debug)]
struct Answer {
    reconciled: Option<Reconciled>,
    record: AuditRecord,
}

impl Reconciliation {
    pub(super) fn of(interrupted: InterruptedCall) -> Self {
        Self { interrupted, answer: OnceLock::new() }
    }

    /// How the call is treated if the tool does not know its outcome.
    pub(super) fn on_unknown_outcome(&self) -> OnUnknownOutcome {
        self.interrupted.on_unknown_outcome
    }

    /// Whether the tool was asked, even if it did not know.
    pub(super) fn is_answered(&self) -> bool {
        self.answer.get().is_some()
    }

    /// The tool's answer, if it knew the outcome.
    pub(super) fn reconciled(&self) -> Option<Reconciled> {
        self.answer.get().and_then(|answer| answer.reconciled)
    }

    /// The audit records of the call and of the query, if there was one. If the call was not executed
    /// again, the record of the query replaces its own.
    pub(super) fn records(
        &self,
        result: &Result<String, Failure>,
        mut requests: Vec<AuditRecord>,
        call: AuditRecord,
    ) -> (Vec<AuditRecord>, AuditRecord) {
        let Some(Answer { record, .. }) = self.answer.get() else {
            return (requests, call);
        };
        if self.reconciled() == Some(Reconciled::Happened)
            || matches!(result, Err(Failure::Unsettled(_)))
        {
            return (requests, record.clone());
        }
        requests.push(record.clone());
        let at = call.at.max(record.at + TimeDelta::microseconds(1));
        (requests, AuditRecord { at, ..call })
    }

    /// Notes what the tool has answered; `call` is the audit record of its call.
    pub(super) fn answered(&self, outcome: &CallOutcome, duration: Duration, call: AuditRecord) {
        let (reconciled, audited, reason, bytes) = match outcome {
            CallOutcome::Happened(result) => {
                let (Ok(text) | Err(text)) = result;
                let reason =
                    "The tool was asked after a crash, and says that the call took effect.";
                let failed = if result.is_ok() { "succeeded" } else { "failed" };
                (Some(Reconciled::Happened), failed, reason.to_owned(), Some(text.len() as u64))
            }
            CallOutcome::DidNotHappen => {
                let reason =
                    "The tool was asked after a crash, and says that the call had no effect.";
                (Some(Reconciled::DidNotHappen), "not_executed", reason.to_owned(), None)
            }
            CallOutcome::Unknown(why) => {
                let reason =
                    format!("The tool was asked after a crash, without success: {}", sentence(why));
                (None, "unknown", reason, None)
            }
        };
        let duration_ms = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let record = AuditRecord {
            at: clock::now(),
            rule: RULE.to_owned(),
            pattern: None,
            reason: Some(reason),
            result_bytes: bytes,
            outcome: audited.to_owned(),
            duration_ms: Some(duration_ms),
            ..call
        };
        let _ = self.answer.set(Answer { reconciled, record });
    }
}

/// A clause, or a sentence, with one full stop.
pub(super) fn sentence(why: &str) -> String {
    format!("{}.", why.trim_end_matches('.'))
}
