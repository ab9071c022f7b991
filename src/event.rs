//! All events of a run.
//!
//! Events are the journal, numbered 1, 2, 3 … per run, and the source of truth: the loop's state,
//! the rows, SSE and logs are derived from them. An event records what happened; `engine::state`
//! decides what happens next.

use std::borrow::Cow;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use strum::{IntoStaticStr, VariantNames};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::message::{AssistantMessage, CallTarget, FinishReason, Turn, Usage};
use crate::run::{
    Action, Autonomy, Consumption, Effect, OnUnknownOutcome, Outcome, RunError, TerminationReason,
};

mod audit;
mod changes;
mod delta;
mod labels;
mod progress;
mod scan;
mod served;
mod totals;
mod waiting;

pub use audit::{Act, AuditAction, AuditRecord, SERVICE};
pub use changes::{ChangeKind, FileChange, MAX_DIFF};
pub use delta::{ModelDelta, Piece};
pub use labels::{LabelCause, LabelsChanged};
pub use progress::ToolProgress;
pub use scan::{Disguise, InjectionKind, ScanSource, ScanWarned, Suspicion};
pub use served::stored;
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
    /// The model has answered.
    #[serde(rename = "model.responded")]
    #[strum(serialize = "model.responded")]
    ModelResponded(ModelResponded),
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
        output: Value,
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

/// A model's answer with its usage.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ModelResponded {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The provider that answered.
    pub provider: String,
    /// The model that answered, without the provider.
    pub model: String,
    /// The answer.
    pub message: AssistantMessage,
    /// Why the model stopped.
    pub finish_reason: FinishReason,
    /// Tokens and cost of the call.
    pub usage: Usage,
    /// Milliseconds from the first try to the answer.
    pub latency_ms: u64,
    /// Failed tries before the answer.
    pub retries: u32,
    /// Whether a fallback model answered.
    pub fallback: bool,
    /// Whether the model was asked before, and its answer lost with the replica. The usage has that
    /// call too, estimated to be as much.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeated: bool,
    /// For the caller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A failed try of a model call that is not the last one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelRetried {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The provider that was asked.
    pub provider: String,
    /// The model that was asked, without the provider.
    pub model: String,
    /// What was wrong: `transient`, `rate_limited`, `quota_exhausted`, `not_found` or
    /// `context_length`.
    pub reason: String,
    /// HTTP status, if there was an answer.
    pub status: Option<u16>,
    /// The provider's message.
    pub message: String,
    /// Milliseconds until the next try.
    pub wait_ms: u64,
    /// The model that takes over, as `provider/model`, if another one is asked next.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub fallback: Option<String>,
}

/// An answer without a valid decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DecisionFailed {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// What is wrong with the answer.
    pub error: String,
    /// The user message that asks for another decision.
    pub feedback: String,
}

/// A compaction of the conversation, so that the next model call fits the context window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ContextCompacted {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// Why the conversation was compacted.
    pub cause: CompactionCause,
    /// The calls whose results were replaced by a note of their size.
    pub cleared: Vec<Uuid>,
    /// Replaces the oldest turns.
    pub summary: Option<Summary>,
    /// The model call that wrote the summary, even if the summary was unusable.
    pub call: Option<SummaryCall>,
    /// Failed tries of the call that did not fit and of the one that wrote the summary.
    pub failed_tries: u32,
    /// The model's context window in tokens, if known.
    pub window: Option<u64>,
    /// Estimated input tokens of the next model call before the compaction.
    pub tokens_before: u64,
    /// Estimated input tokens of the next model call after the compaction.
    pub tokens_after: u64,
    /// Bytes of system prompt and turns before the compaction.
    pub bytes_before: u64,
    /// Bytes of system prompt and turns after the compaction.
    pub bytes_after: u64,
}

impl ContextCompacted {
    pub fn shrank(&self) -> bool {
        self.bytes_after < self.bytes_before
    }
}

/// Why a conversation was compacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CompactionCause {
    /// By our estimate.
    WindowNearlyFull,
    /// The provider rejected a call that did not fit.
    ProviderRefused,
}

/// What replaces the oldest turns of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ContextSummary)]
pub struct Summary {
    /// Number of turns that it replaces: the oldest, except the run's first message and the last
    /// two.
    pub turns: usize,
    /// The user message that replaces them.
    pub text: String,
}

/// The model call that wrote a summary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SummaryCall {
    /// The provider that answered.
    pub provider: String,
    /// The model that answered, without the provider.
    pub model: String,
    /// Tokens and cost of the call.
    pub usage: Usage,
    /// Milliseconds from the first try to the answer.
    pub latency_ms: u64,
}

/// A dispatched call; stored before the tool runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolCallStarted {
    /// The call.
    pub call_id: Uuid,
    /// Its tool.
    pub tool: String,
    /// What repeating the call would do.
    pub effect: Effect,
    /// Idempotency key, stable across crashes: hash of run, attempt, iteration, index, tool and
    /// canonical arguments.
    pub effect_key: String,
    /// `allowed`, `warned`, or `escalated` after an approval.
    pub decision: String,
    /// The gate's reason, if any.
    pub reason: Option<String>,
    /// What the gate judged.
    #[serde(default, skip_serializing_if = "is_unknown")]
    #[schema(value_type = Vec<Action>)]
    pub actions: Arc<[Action]>,
    /// What the call takes of the run's budget.
    #[serde(default, skip_serializing_if = "Consumption::is_nothing")]
    pub consumes: Consumption,
    /// What happens if a crash leaves the call's outcome unknown; absent for `review`.
    #[serde(default, skip_serializing_if = "OnUnknownOutcome::is_review")]
    pub on_unknown_outcome: OnUnknownOutcome,
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

/// Why a call has an error result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallFailure {
    /// No tool of that name.
    UnknownTool,
    /// The arguments are not JSON or do not match the tool's schema.
    InvalidArguments,
    /// The tool reported an error.
    ToolError,
    Panicked,
    Timeout,
    /// Beyond the number of calls per response; does not count as failing.
    Excess,
    /// The response was truncated within the call.
    Truncated,
    /// The run ended before the call did.
    Cancelled,
    /// A limit was reached before the call was executed.
    NotExecuted,
    /// It is unknown after a crash whether the call took effect.
    UnknownOutcome,
    /// The result looks like an attempt to give the model instructions, and was withheld from it.
    Withheld,
}

impl CallFailure {
    /// Whether the text of the failure is the tool's, and not the service's.
    pub fn is_of_tool(self) -> bool {
        matches!(self, Self::ToolError)
    }

    /// Whether the call counts towards `error_threshold`.
    pub fn counts_as_failing(self) -> bool {
        !matches!(self, Self::Excess | Self::Cancelled | Self::NotExecuted)
    }
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolCallCompleted {
    /// The call.
    pub call_id: Uuid,
    /// The tool, or the unknown name.
    pub tool: String,
    /// Only calls of tools are counted and listed.
    pub target: CallTarget,
    /// What the model reads.
    pub content: String,
    /// Why the call has an error result; null if it succeeded.
    pub failure: Option<CallFailure>,
    /// Milliseconds of execution.
    pub duration_ms: u64,
    /// Whether the result of an earlier identical call was reused.
    pub cached: bool,
    /// A note of the loop, shown to the model after the result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub note: Option<String>,
    /// What the call did to files; absent where that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub changes: Option<Vec<FileChange>>,
    /// What the call's programs asked the network; absent where that is nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub network: Option<NetworkUse>,
    /// What the tool returned is not what the model reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub replaced: Option<Replaced>,
}

/// What the programs of a call asked the network.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NetworkUse {
    /// Requests that were sent.
    #[schema(required)]
    pub requests: u64,
    /// Requests that were refused.
    #[schema(required)]
    pub refused: u64,
    /// Whether the run's budget refused one of them, which ends the run.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub over_budget: bool,
}

/// A result that an interceptor replaced; what the tool returned is not kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = ReplacedResult)]
pub struct Replaced {
    /// The place of the interceptor among `interceptors.after`, 1-based.
    pub interceptor: usize,
    /// Bytes of what the tool returned.
    pub bytes: u64,
}

impl ToolCallCompleted {
    /// The result with the note.
    pub fn model_text(&self) -> Cow<'_, str> {
        match &self.note {
            None => Cow::Borrowed(&self.content),
            Some(note) => Cow::Owned(format!("{}\n\n{note}", self.content)),
        }
    }
}

/// A call that the gate or an interceptor rejected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct ToolCallBlocked {
    /// The call.
    pub call_id: Uuid,
    /// Its tool.
    pub tool: String,
    /// The rule that decided.
    pub rule: String,
    /// `blocked`.
    pub decision: String,
    /// Why, in words.
    pub reason: String,
    /// What the model reads.
    pub content: String,
    /// What the gate judged; empty where it could not be told what the call would do.
    #[serde(default, skip_serializing_if = "is_unknown")]
    #[schema(value_type = Vec<Action>)]
    pub actions: Arc<[Action]>,
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
            | Self::ModelResponded(_)
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

    /// The name in JSON, SQL and SSE.
    pub fn type_name(&self) -> &'static str {
        self.into()
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero_u32(count: &u32) -> bool {
    *count == 0
}

fn is_unknown(actions: &Arc<[Action]>) -> bool {
    actions.is_empty()
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "required by serde")]
fn is_zero(count: &usize) -> bool {
    *count == 0
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
