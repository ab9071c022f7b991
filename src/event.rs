//! All events of a run.
//!
//! Events are the journal, numbered 1, 2, 3 … per run, and the source of truth: the loop's state,
//! the rows, SSE and logs are derived from them. An event records what happened; `engine::state`
//! decides what happens next.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{IntoStaticStr, VariantNames};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::message::{AssistantMessage, Turn};
use crate::run::{Action, Autonomy, Outcome, RunError, TerminationReason};

mod audit;
mod calls;
mod changes;
mod circumstances;
mod compaction;
mod delta;
mod input;
mod labels;
mod models;
mod progress;
mod scan;
mod served_form;
mod totals;
mod waiting;

pub use audit::{Act, AuditAction, AuditRecord, SERVICE};
pub use calls::{
    CallFailure, NetworkUse, Reconciled, Replaced, SharedRequests, ToolCallBlocked,
    ToolCallCompleted, ToolCallStarted,
};
pub use changes::{ChangeKind, FileChange, MAX_DIFF};
pub use circumstances::{BudgetSpent, CallRate, Circumstances};
pub use compaction::{CompactionCause, ContextCompacted, Summary, SummaryCall};
pub use delta::{ModelDelta, Piece};
pub use input::{
    InputAction, InputAnswer, InputRequest, InputRequired, InputResponse, InputResponses,
};
pub use labels::{LabelCause, LabelsChanged};
pub use models::{CallGiven, DecisionFailed, ModelInterrupted, ModelResponded, ModelRetried};
pub use progress::ToolProgress;
pub use scan::{Disguise, InjectionKind, ScanSource, ScanWarned, Suspicion};
pub use served_form::stored;
pub use waiting::{ApprovalBasis, Awaited, Resolution, Resolved, WaitKind};

/// One journal entry, as stored, streamed and served.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// 1, 2, 3 … within the run, without gaps.
    pub seq: i64,
    /// Time of the append, UTC, microseconds.
    pub at: DateTime<Utc>,
    pub run_id: Uuid,
    #[serde(flatten)]
    pub what: RunEvent,
}

/// What happened; `type` and `data` in JSON.
#[derive(
    Debug, Clone, PartialEq, Serialize, Deserialize, IntoStaticStr, VariantNames, ToSchema,
)]
#[serde(tag = "type", content = "data")]
pub enum RunEvent {
    /// The run was accepted and waits for a replica.
    #[serde(rename = "run.queued")]
    #[strum(serialize = "run.queued")]
    RunQueued {},
    /// Execution began, with the opening conversation.
    #[serde(rename = "run.started")]
    #[strum(serialize = "run.started")]
    RunStarted {
        /// The compiled system prompt.
        system: String,
        /// History and the first user message.
        turns: Vec<Turn>,
        /// How many of the turns come from earlier runs.
        #[serde(default, skip_serializing_if = "is_zero")]
        history: usize,
        /// Whether there is exactly one model call, without tools.
        single_shot: bool,
        /// For the caller.
        warnings: Vec<String>,
    },
    /// Turns of earlier runs of the session were loaded; before `run.started`.
    #[serde(rename = "session.loaded")]
    #[strum(serialize = "session.loaded")]
    SessionLoaded {
        /// The session.
        session_id: String,
        /// Earlier runs whose turns are used.
        runs: usize,
        /// The number of their turns.
        turns: usize,
        /// Their tokens, estimated.
        tokens: u64,
    },
    /// A skill's instructions and restrictions apply from here on.
    #[serde(rename = "skill.activated")]
    #[strum(serialize = "skill.activated")]
    SkillActivated(SkillActivated),
    /// Another replica, or this one after a restart, continues the run.
    #[serde(rename = "run.resumed")]
    #[strum(serialize = "run.resumed")]
    RunResumed {
        /// The new ownership epoch.
        epoch: i64,
        /// Replicas that died while they owned it, so far.
        #[serde(default, skip_serializing_if = "is_zero_u32")]
        deaths: u32,
        /// Whether the replica drives no other run, because this one may be what crashes replicas.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_alone: bool,
        /// Milliseconds that it waited for that. They do not count as its duration.
        #[serde(default, skip_serializing_if = "is_zero_u64")]
        waited_ms: u64,
    },
    /// An attempt began: iterations until an output is proposed, which is then validated.
    #[serde(rename = "attempt.started")]
    #[strum(serialize = "attempt.started")]
    AttemptStarted {
        /// 1-based.
        attempt: u32,
    },
    /// The model is called.
    #[serde(rename = "iteration.started")]
    #[strum(serialize = "iteration.started")]
    IterationStarted {
        /// The attempt, 1-based.
        attempt: u32,
        /// The iteration within the attempt, 1-based.
        iteration: u32,
        /// Whether the model only writes the final answer that it has decided on.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        answer_only: bool,
        /// The limit that was reached, if this is the last model call, without tools.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        limit: Option<LimitReached>,
    },
    /// A try of a model call failed, and the model, or one that takes over, is asked again.
    #[serde(rename = "model.retried")]
    #[strum(serialize = "model.retried")]
    ModelRetried(ModelRetried),
    /// A model call was given up or failed for good when a part of its answer had come.
    #[serde(rename = "model.interrupted")]
    #[strum(serialize = "model.interrupted")]
    ModelInterrupted(ModelInterrupted),
    /// The model has answered.
    #[serde(rename = "model.responded")]
    #[strum(serialize = "model.responded")]
    ModelResponded(ModelResponded),
    /// The caller made a tool call in the agent's name; no model was asked.
    #[serde(rename = "call.given")]
    #[strum(serialize = "call.given")]
    CallGiven(CallGiven),
    /// A tool call passed the gate and is dispatched.
    #[serde(rename = "tool_call.started")]
    #[strum(serialize = "tool_call.started")]
    ToolCallStarted(ToolCallStarted),
    /// A tool call has its result.
    #[serde(rename = "tool_call.completed")]
    #[strum(serialize = "tool_call.completed")]
    ToolCallCompleted(ToolCallCompleted),
    /// The gate, or an interceptor, refused a tool call; the reason is its result.
    #[serde(rename = "tool_call.blocked")]
    #[strum(serialize = "tool_call.blocked")]
    ToolCallBlocked(ToolCallBlocked),
    /// A call of a tool that the caller executes waits for its result.
    #[serde(rename = "tool_call.awaiting_client")]
    #[strum(serialize = "tool_call.awaiting_client")]
    ToolCallAwaitingClient(Awaited),
    /// A call that delegated to another agent waits for its child run, which is parked.
    #[serde(rename = "tool_call.awaiting_child")]
    #[strum(serialize = "tool_call.awaiting_child")]
    ToolCallAwaitingChild(Awaited),
    /// A decision is needed before the run continues.
    #[serde(rename = "approval.requested")]
    #[strum(serialize = "approval.requested")]
    ApprovalRequested(Awaited),
    /// A pending request was answered or expired.
    #[serde(rename = "approval.resolved")]
    #[strum(serialize = "approval.resolved")]
    ApprovalResolved(Resolved),
    /// The conversation was handed to another agent.
    #[serde(rename = "handoff.started")]
    #[strum(serialize = "handoff.started")]
    HandoffStarted {
        /// The call that asked for it.
        call_id: Uuid,
        /// The agent that takes over.
        agent: String,
        /// Why, in the model's words.
        reason: Option<String>,
    },
    /// An input, a result or a memory looks like an attempt to give the model instructions. Before
    /// the result.
    #[serde(rename = "scan.warned")]
    #[strum(serialize = "scan.warned")]
    ScanWarned(ScanWarned),
    /// The run has read something that labels it; before the result.
    #[serde(rename = "labels.changed")]
    #[strum(serialize = "labels.changed")]
    LabelsChanged(LabelsChanged),
    /// A stop condition that only warns is met.
    #[serde(rename = "budget.warned")]
    #[strum(serialize = "budget.warned")]
    BudgetWarned {
        /// 0-based index of the condition in the definition.
        condition: usize,
        /// For the caller.
        warning: String,
    },
    /// A call of the output tool proposed an output.
    #[serde(rename = "output.proposed")]
    #[strum(serialize = "output.proposed")]
    OutputProposed {
        /// The proposing call.
        call_id: Option<Uuid>,
        /// The attempt, 1-based.
        attempt: u32,
        /// The raw text if it is not JSON.
        #[schema(value_type = Value)]
        output: Arc<Value>,
        /// Why the proposal is not JSON.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        problem: Option<String>,
    },
    /// A proposal was rendered for the model; the result of the proposing call.
    #[serde(rename = "output.reflected")]
    #[strum(serialize = "output.reflected")]
    OutputReflected {
        /// The proposing call.
        call_id: Uuid,
        /// The attempt, 1-based.
        attempt: u32,
        /// What the model reads.
        content: String,
        /// Whether the reflection failed.
        is_error: bool,
    },
    /// A proposal was rejected, with the feedback for the model.
    #[serde(rename = "validation.failed")]
    #[strum(serialize = "validation.failed")]
    ValidationFailed {
        /// The attempt that failed, 1-based.
        attempt: u32,
        /// The proposing call, whose result holds the errors; null for a text answer.
        call_id: Option<Uuid>,
        /// What is wrong with the proposal.
        errors: Vec<ValidationError>,
        /// The user message that asks for another attempt.
        feedback: String,
    },
    /// The model was asked to verify its text answer.
    #[serde(rename = "confirmation.requested")]
    #[strum(serialize = "confirmation.requested")]
    ConfirmationRequested {
        /// The message to the model.
        prompt: String,
    },
    /// The model's answer holds no decision; with the feedback for it.
    #[serde(rename = "decision.extraction_failed")]
    #[strum(serialize = "decision.extraction_failed")]
    DecisionExtractionFailed(DecisionFailed),
    /// The model's decision is invalid; with the feedback for it.
    #[serde(rename = "decision.validation_failed")]
    #[strum(serialize = "decision.validation_failed")]
    DecisionValidationFailed(DecisionFailed),
    /// A required tool call was not made.
    #[serde(rename = "tool_choice.unmet")]
    #[strum(serialize = "tool_choice.unmet")]
    ToolChoiceUnmet {
        /// The attempt, 1-based.
        attempt: u32,
        /// The message to the model, if it is asked again.
        prompt: Option<String>,
        /// For the caller, if the answer is accepted nevertheless.
        warning: Option<String>,
    },
    /// The model answered with neither text nor a call and is asked again.
    #[serde(rename = "answer.blank")]
    #[strum(serialize = "answer.blank")]
    AnswerBlank {
        /// The attempt, 1-based.
        attempt: u32,
        /// The message to the model.
        prompt: String,
    },
    /// The conversation was shortened.
    #[serde(rename = "context.compacted")]
    #[strum(serialize = "context.compacted")]
    ContextCompacted(ContextCompacted),
    /// A cancellation was requested.
    #[serde(rename = "run.cancel_requested")]
    #[strum(serialize = "run.cancel_requested")]
    RunCancelRequested {
        /// Given by the caller.
        reason: Option<String>,
    },
    /// The run ended with an output.
    #[serde(rename = "run.completed")]
    #[strum(serialize = "run.completed")]
    RunCompleted(Ending),
    /// The run ended with an error.
    #[serde(rename = "run.failed")]
    #[strum(serialize = "run.failed")]
    RunFailed(Ending),
    /// The run was cancelled.
    #[serde(rename = "run.cancelled")]
    #[strum(serialize = "run.cancelled")]
    RunCancelled(Ending),
}

/// A reached limit that allows one last model call for an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LimitReached {
    /// The limit.
    pub reason: TerminationReason,
    /// The run's error if the model does not answer.
    pub error: RunError,
}

/// A skill and its restrictions.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct SkillActivated {
    /// Its name.
    #[schema(required)]
    pub skill: String,
    /// Names and globs of the only tools that may be called; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub allowed_tools: Option<Vec<String>>,
    /// Names and globs of tools that may not be called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disallowed_tools: Vec<String>,
    /// Narrows the agent's autonomy.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub autonomy: Option<Autonomy>,
    /// Names and globs of tools whose calls need approval.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub approval_required: Vec<String>,
    /// Whether it is active in the run that started this one, and only its restrictions apply here.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub inherited: bool,
}

/// An error in a proposed output or an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ValidationError {
    /// JSON pointer to the invalid value; empty for the whole document.
    #[schema(example = "/notes/0")]
    pub pointer: String,
    /// What is wrong.
    pub message: String,
}

/// Data of a terminal event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Ending {
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Milliseconds from the start to the end.
    pub latency_ms: u64,
}

impl RunEvent {
    /// The terminal event for an outcome.
    pub fn ended(outcome: Outcome, latency_ms: u64) -> Self {
        let ending = Ending { outcome, latency_ms };
        match ending.outcome {
            Outcome::Completed { .. } => Self::RunCompleted(ending),
            Outcome::Failed { .. } => Self::RunFailed(ending),
            Outcome::Cancelled { .. } => Self::RunCancelled(ending),
        }
    }

    /// The terminal event of a run that failed for a reason outside the loop.
    pub fn interrupted(message: impl Into<String>) -> Self {
        let reason = TerminationReason::Interrupted;
        Self::ended(Outcome::failed(reason, message, Value::Null, String::new()), 0)
    }

    /// The terminal event of a run that is cancelled outside the loop, in the given phase of an
    /// attempt's iteration.
    pub fn cancelled(
        phase: &str,
        (attempt, iteration): (u32, u32),
        reason: Option<&str>,
        raw_response: String,
        latency_ms: u64,
    ) -> Self {
        let mut context =
            serde_json::json!({"phase": phase, "attempt": attempt, "iteration": iteration});
        if let Some(reason) = reason {
            context["reason"] = reason.into();
        }
        let code = TerminationReason::Cancelled.code().unwrap_or_default().to_owned();
        let error =
            RunError { code, message: format!("The run was cancelled (phase: {phase})."), context };
        Self::ended(Outcome::Cancelled { error, raw_response }, latency_ms)
    }

    /// `None` unless this is a terminal event.
    pub fn ending(&self) -> Option<&Ending> {
        match self {
            Self::RunCompleted(e) | Self::RunFailed(e) | Self::RunCancelled(e) => Some(e),
            Self::RunQueued {}
            | Self::RunStarted { .. }
            | Self::SessionLoaded { .. }
            | Self::SkillActivated(_)
            | Self::RunResumed { .. }
            | Self::AttemptStarted { .. }
            | Self::IterationStarted { .. }
            | Self::ModelRetried(_)
            | Self::ModelInterrupted(_)
            | Self::ModelResponded(_)
            | Self::CallGiven(_)
            | Self::ToolCallStarted(_)
            | Self::ToolCallCompleted(_)
            | Self::ToolCallBlocked(_)
            | Self::ToolCallAwaitingClient(_)
            | Self::ToolCallAwaitingChild(_)
            | Self::ApprovalRequested(_)
            | Self::ApprovalResolved(_)
            | Self::HandoffStarted { .. }
            | Self::ScanWarned(_)
            | Self::LabelsChanged(_)
            | Self::BudgetWarned { .. }
            | Self::OutputProposed { .. }
            | Self::OutputReflected { .. }
            | Self::ValidationFailed { .. }
            | Self::ConfirmationRequested { .. }
            | Self::DecisionExtractionFailed(_)
            | Self::DecisionValidationFailed(_)
            | Self::ToolChoiceUnmet { .. }
            | Self::AnswerBlank { .. }
            | Self::ContextCompacted(_)
            | Self::RunCancelRequested { .. } => None,
        }
    }

    /// The message of the event that says what is to be called, with the place in the run.
    pub fn proposed(&self) -> Option<(&AssistantMessage, u32, u32)> {
        match self {
            Self::ModelResponded(ModelResponded { message, attempt, iteration, .. })
            | Self::CallGiven(CallGiven { message, attempt, iteration }) => {
                Some((message, *attempt, *iteration))
            }
            _ => None,
        }
    }

    /// The name in JSON, SQL and SSE.
    pub fn type_name(&self) -> &'static str {
        self.into()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero_u32(count: &u32) -> bool {
    *count == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero_u64(count: &u64) -> bool {
    *count == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}

fn is_unknown(actions: &Arc<[Action]>) -> bool {
    actions.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn type_names_are_those_in_json() {
        let unknown = serde_json::from_value::<RunEvent>(serde_json::json!({"type": "?"}));
        let unknown = unknown.unwrap_err().to_string();
        let known: Vec<&str> = unknown.split('`').skip(3).step_by(2).collect();
        assert_eq!(RunEvent::VARIANTS, known, "{unknown}");
    }
}
