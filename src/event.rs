//! The one closed list of what can happen in a run.
//!
//! Events are the journal, numbered 1, 2, 3 … per run, and the source of truth: the loop's state,
//! the rows that are queried, SSE and logs are all made from them. An event says what happened and
//! never what should happen next; that is decided in `engine::state`.

use std::borrow::Cow;

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::message::{AssistantMessage, CallTarget, FinishReason, Turn, Usage};
use crate::run::{
    Autonomy, Consumption, Effect, OnUnknownOutcome, Outcome, RunError, TerminationReason, Totals,
};

mod waiting;

pub use waiting::{Awaited, Resolution, Resolved, WaitKind};

/// One journal entry, as stored, streamed and served.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// 1, 2, 3 … within the run, without gaps.
    pub seq: i64,
    /// When it was appended, UTC, microseconds.
    pub at: DateTime<Utc>,
    /// The run it belongs to.
    pub run_id: Uuid,
    /// What happened: `type` and `data` in JSON.
    #[serde(flatten)]
    pub what: RunEvent,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", content = "data")]
pub enum RunEvent {
    /// Accepted, waits for a replica.
    #[serde(rename = "run.queued")]
    RunQueued {},
    /// Execution began: the opening conversation.
    #[serde(rename = "run.started")]
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
        /// What the caller should know.
        warnings: Vec<String>,
    },
    /// What was taken from the earlier runs of the session; before `run.started`.
    #[serde(rename = "session.loaded")]
    SessionLoaded {
        /// The session.
        session_id: String,
        /// Earlier runs whose turns are used.
        runs: usize,
        /// Their turns.
        turns: usize,
        /// Their tokens, estimated.
        tokens: u64,
    },
    /// A skill's instructions and bounds hold from here on.
    #[serde(rename = "skill.activated")]
    SkillActivated(SkillActivated),
    /// Another replica, or this one after a restart, goes on.
    #[serde(rename = "run.resumed")]
    RunResumed {
        /// The ownership number it goes on with.
        epoch: i64,
        /// Replicas that died while they owned it, so far.
        #[serde(default, skip_serializing_if = "is_none")]
        deaths: u32,
        /// Whether it is driven alone, because it may be what crashes its replicas.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        is_alone: bool,
    },
    /// An attempt began.
    #[serde(rename = "attempt.started")]
    AttemptStarted {
        /// 1-based.
        attempt: u32,
    },
    /// An iteration began.
    #[serde(rename = "iteration.started")]
    IterationStarted {
        /// The attempt, 1-based.
        attempt: u32,
        /// The iteration within the attempt, 1-based.
        iteration: u32,
        /// Whether the model is asked for nothing but the final answer that it has decided on.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        answer_only: bool,
        /// The limit that was reached, where this is the last model call, without tools.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<LimitReached>,
    },
    /// A model answered.
    #[serde(rename = "model.responded")]
    ModelResponded(ModelResponded),
    /// A tool call passed the gate and is dispatched.
    #[serde(rename = "tool_call.started")]
    ToolCallStarted(ToolCallStarted),
    /// A tool call has its result.
    #[serde(rename = "tool_call.completed")]
    ToolCallCompleted(ToolCallCompleted),
    /// The gate, or an interceptor, refused a tool call; the reason is its result.
    #[serde(rename = "tool_call.blocked")]
    ToolCallBlocked(ToolCallBlocked),
    /// A call of a tool that the caller executes waits for its result.
    #[serde(rename = "tool_call.awaiting_client")]
    ToolCallAwaitingClient(Awaited),
    /// Somebody has to decide before the run goes on.
    #[serde(rename = "approval.requested")]
    ApprovalRequested(Awaited),
    /// What was waited for has come, or is not waited for any more.
    #[serde(rename = "approval.resolved")]
    ApprovalResolved(Resolved),
    /// The conversation was handed to another agent.
    #[serde(rename = "handoff.started")]
    HandoffStarted {
        /// The call that asked for it.
        call_id: Uuid,
        /// Who has it now.
        agent: String,
        /// Why, in the model's words.
        reason: Option<String>,
    },
    /// A stop condition that only warns is met.
    #[serde(rename = "budget.warned")]
    BudgetWarned {
        /// The place of the condition in the definition, 0-based.
        condition: usize,
        /// What the caller should know.
        warning: String,
    },
    /// A call of the output tool proposed an output.
    #[serde(rename = "output.proposed")]
    OutputProposed {
        /// The proposing call.
        call_id: Option<Uuid>,
        /// The attempt, 1-based.
        attempt: u32,
        /// What was proposed; the raw text where it is not JSON.
        output: Value,
        /// Why the proposal is not JSON, if it is not.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        problem: Option<String>,
    },
    /// What a proposal looks like when it is used; the result of the proposing call.
    #[serde(rename = "output.reflected")]
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
    /// A proposal was not accepted; also the feedback that the model gets.
    #[serde(rename = "validation.failed")]
    ValidationFailed {
        /// The attempt that failed, 1-based.
        attempt: u32,
        /// The proposing call, which gets the errors as its result; none for a text answer.
        call_id: Option<Uuid>,
        /// What is wrong, with JSON pointers into the output.
        errors: Vec<ValidationError>,
        /// The user message that asks for another attempt.
        feedback: String,
    },
    /// A text answer was met with the request to verify it.
    #[serde(rename = "confirmation.requested")]
    ConfirmationRequested {
        /// What the model is asked.
        prompt: String,
    },
    /// The model had to write a decision, and its answer holds none; also what it is told.
    #[serde(rename = "decision.extraction_failed")]
    DecisionExtractionFailed(DecisionFailed),
    /// The model's decision is not one that it may make; also what it is told.
    #[serde(rename = "decision.validation_failed")]
    DecisionValidationFailed(DecisionFailed),
    /// A tool call was demanded and did not come.
    #[serde(rename = "tool_choice.unmet")]
    ToolChoiceUnmet {
        /// The attempt, 1-based.
        attempt: u32,
        /// What the model is asked, where it is asked once more.
        prompt: Option<String>,
        /// What the caller should know, where the answer is accepted as it is.
        warning: Option<String>,
    },
    /// The model answered with neither text nor a call, and is asked once more.
    #[serde(rename = "answer.blank")]
    AnswerBlank {
        /// The attempt, 1-based.
        attempt: u32,
        /// What the model is asked.
        prompt: String,
    },
    /// The conversation was made smaller.
    #[serde(rename = "context.compacted")]
    ContextCompacted(ContextCompacted),
    /// Somebody asked to cancel the run.
    #[serde(rename = "run.cancel_requested")]
    RunCancelRequested {
        /// The reason that was given.
        reason: Option<String>,
    },
    /// The run ended with an output.
    #[serde(rename = "run.completed")]
    RunCompleted(Ending),
    /// The run ended with an error.
    #[serde(rename = "run.failed")]
    RunFailed(Ending),
    /// The run was ended on request.
    #[serde(rename = "run.cancelled")]
    RunCancelled(Ending),
}

/// A model's answer and what it took.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelResponded {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The provider that answered.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// What it said.
    pub message: AssistantMessage,
    /// Why it stopped.
    pub finish_reason: FinishReason,
    /// Tokens and cost of the answer.
    pub usage: Usage,
    /// Milliseconds from the first try to the answer.
    pub latency_ms: u64,
    /// Failed tries before it.
    pub retries: u32,
    /// Whether a fallback model answered.
    pub fallback: bool,
    /// What the caller should know about the call.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// An answer of which no decision could be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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

/// What was taken from the conversation so that the next model call fits the model's context
/// window.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ContextCompacted {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// Why.
    pub cause: CompactionCause,
    /// The calls whose results gave way to a note of their size.
    pub cleared: Vec<Uuid>,
    /// What the oldest turns gave way to.
    pub summary: Option<Summary>,
    /// The model call that wrote the summary, also where what it wrote is of no use.
    pub call: Option<SummaryCall>,
    /// Failed tries: of the call that did not fit and of the one that wrote the summary.
    pub failed_tries: u32,
    /// Tokens that the model reads and writes at most, where that is known.
    pub window: Option<u64>,
    /// Tokens that the next model call would have read, estimated.
    pub tokens_before: u64,
    /// Tokens that it reads now, estimated.
    pub tokens_after: u64,
    /// Bytes of system prompt and turns before.
    pub bytes_before: u64,
    /// Bytes of system prompt and turns now.
    pub bytes_after: u64,
}

impl ContextCompacted {
    /// Whether anything was gained.
    pub fn shrank(&self) -> bool {
        self.bytes_after < self.bytes_before
    }
}

/// Why a conversation is made smaller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CompactionCause {
    /// By our estimate, the model's window was nearly full.
    WindowNearlyFull,
    /// The provider refused a call because it did not fit.
    ProviderRefused,
}

/// What stands for the oldest turns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Summary {
    /// How many turns it replaces: the oldest of all but the run's first message and the last two.
    pub turns: usize,
    /// The message that replaces them.
    pub text: String,
}

/// A model call outside the iterations.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SummaryCall {
    /// The provider that answered.
    pub provider: String,
    /// The model, without the provider.
    pub model: String,
    /// Tokens and cost.
    pub usage: Usage,
    /// Milliseconds from the first try to the answer.
    pub latency_ms: u64,
}

/// A dispatched call, stored before the tool runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCallStarted {
    /// Our id of the call.
    pub call_id: Uuid,
    /// The tool.
    pub tool: String,
    /// What it does to the world.
    pub effect: Effect,
    /// Stable over crashes: hash of run, attempt, iteration, index, tool and canonical arguments.
    pub effect_key: String,
    /// `allowed` or `warned`; `escalated` where somebody approved.
    pub decision: String,
    /// The gate's reason, where it gave one.
    pub reason: Option<String>,
    /// What it takes of the run's budget.
    #[serde(default, skip_serializing_if = "Consumption::is_nothing")]
    pub consumes: Consumption,
    /// What becomes of it where it must not be repeated and a crash leaves its outcome unknown.
    #[serde(default, skip_serializing_if = "OnUnknownOutcome::is_review")]
    pub on_unknown_outcome: OnUnknownOutcome,
}

/// A limit that leaves one model call, to answer with what there is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LimitReached {
    /// Why the run ends.
    pub reason: TerminationReason,
    /// What the caller would learn if no answer came.
    pub error: RunError,
}

/// A skill as a run knows it, and its bounds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SkillActivated {
    /// Its name.
    pub skill: String,
    /// Names and globs of the only tools that may be called; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub allowed_tools: Option<Vec<String>>,
    /// Names and globs of tools that may not be called.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disallowed_tools: Vec<String>,
    /// How much may be done unasked, where the skill narrows it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub autonomy: Option<Autonomy>,
    /// Names and globs of tools whose calls need approval.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub approval_required: Vec<String>,
}

/// Why a call has an error result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallFailure {
    /// No tool of that name.
    UnknownTool,
    /// The arguments are not JSON, or miss the tool's schema.
    InvalidArguments,
    /// The tool said so.
    ToolError,
    /// The tool panicked.
    Panicked,
    /// The tool took longer than it may.
    Timeout,
    /// One call too many in a response; does not count as failing.
    Excess,
    /// The response was cut off in the middle of the call.
    Truncated,
    /// The run ended before the call did.
    Cancelled,
    /// A limit struck before the call was executed.
    NotExecuted,
    /// A crash left it open whether the call happened.
    UnknownOutcome,
}

impl CallFailure {
    /// Whether the call counts towards `error_threshold`.
    pub fn counts_as_failing(self) -> bool {
        !matches!(self, Self::Excess | Self::Cancelled | Self::NotExecuted)
    }
}

/// A call's result.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCallCompleted {
    /// Our id of the call.
    pub call_id: Uuid,
    /// The tool, or the unknown name.
    pub tool: String,
    /// What the call was addressed to; only calls of tools are counted and listed.
    pub target: CallTarget,
    /// The result.
    pub content: String,
    /// Why it is an error, if it is one.
    pub failure: Option<CallFailure>,
    /// Milliseconds of execution.
    pub duration_ms: u64,
    /// Whether an earlier identical call's result was used.
    pub cached: bool,
    /// What the loop adds to what the model reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub note: Option<String>,
}

impl ToolCallCompleted {
    /// What the model reads: the result, and the note after it.
    pub fn told(&self) -> Cow<'_, str> {
        match &self.note {
            None => Cow::Borrowed(&self.content),
            Some(note) => Cow::Owned(format!("{}\n\n{note}", self.content)),
        }
    }
}

/// A call that was refused.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ToolCallBlocked {
    /// Our id of the call.
    pub call_id: Uuid,
    /// The tool.
    pub tool: String,
    /// The rule that decided.
    pub rule: String,
    /// `blocked`.
    pub decision: String,
    /// Why, in words.
    pub reason: String,
    /// What the model reads.
    pub content: String,
}

/// One thing that is wrong with a proposed output or an input.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ValidationError {
    /// JSON pointer to the offending value; empty for the whole.
    #[schema(example = "/notes/0")]
    pub pointer: String,
    /// What is wrong.
    pub message: String,
}

/// The terminal event's data.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Ending {
    /// Status and evidence.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Milliseconds from the start to the end.
    pub latency_ms: u64,
}

/// What the audit log keeps of one decision and, where the call was executed, its execution.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    /// When.
    pub at: DateTime<Utc>,
    /// The call it is about.
    pub call_id: Uuid,
    /// The tool.
    pub tool: String,
    /// The rule that decided; `none` where no rule objected.
    pub rule: String,
    /// `allowed`, `warned`, `escalated` or `blocked`.
    pub decision: String,
    /// Why, in words.
    pub reason: Option<String>,
    /// The arguments as JSON text, capped.
    pub arguments: String,
    /// `succeeded`, `failed`, `cancelled`, `not_executed` or `unknown`.
    pub outcome: String,
    /// Milliseconds of execution.
    pub duration_ms: Option<u64>,
}

/// A piece of an answer that a model is still writing: told to those who follow the run, without a
/// number and never kept. The whole answer follows as [`ModelResponded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ModelDelta {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The piece.
    #[serde(flatten)]
    pub piece: Piece,
}

/// What a [`ModelDelta`] adds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Piece {
    /// Visible text.
    Text(String),
    /// Thinking that the provider shows.
    Thinking(String),
    /// A tool call, in pieces.
    ToolCall {
        /// 0-based place among the calls of the answer.
        index: usize,
        /// Our name of the tool, with the first piece.
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The next piece of the arguments' JSON text.
        arguments: String,
    },
    /// The answer broke off and is begun anew: what came of it so far does not count.
    Restarted(bool),
}

impl ModelDelta {
    /// The name in SSE.
    pub const TYPE_NAME: &'static str = "model.delta";

    /// Appends a later piece where both add to the same thing; gives it back otherwise.
    pub fn extend(&mut self, later: Self) -> Result<(), Self> {
        if (self.attempt, self.iteration) != (later.attempt, later.iteration) {
            return Err(later);
        }
        match (&mut self.piece, &later.piece) {
            (Piece::Text(text), Piece::Text(more))
            | (Piece::Thinking(text), Piece::Thinking(more)) => {
                text.push_str(more);
            }
            (
                Piece::ToolCall { index, arguments, .. },
                Piece::ToolCall { index: same, name: None, arguments: more },
            ) if index == same => arguments.push_str(more),
            _ => return Err(later),
        }
        Ok(())
    }
}

impl RunEvent {
    /// The terminal event that fits an outcome.
    pub fn ended(outcome: Outcome, latency_ms: u64) -> Self {
        let ending = Ending { outcome, latency_ms };
        match ending.outcome {
            Outcome::Completed { .. } => Self::RunCompleted(ending),
            Outcome::Failed { .. } => Self::RunFailed(ending),
            Outcome::Cancelled { .. } => Self::RunCancelled(ending),
        }
    }

    /// The terminal event of a run that could not go on for a reason outside the loop.
    pub fn interrupted(message: impl Into<String>) -> Self {
        let reason = TerminationReason::Interrupted;
        Self::ended(Outcome::failed(reason, message, Value::Null, String::new()), 0)
    }

    /// The terminal event of a run that is cancelled outside the loop, in the given phase.
    pub fn cancelled(
        phase: &str,
        reason: Option<&str>,
        raw_response: String,
        latency_ms: u64,
    ) -> Self {
        let mut context = serde_json::json!({ "phase": phase });
        if let Some(reason) = reason {
            context["reason"] = reason.into();
        }
        let code = TerminationReason::Cancelled.code().unwrap_or_default().to_owned();
        let error =
            RunError { code, message: format!("The run was cancelled (phase: {phase})."), context };
        Self::ended(Outcome::Cancelled { error, raw_response }, latency_ms)
    }

    /// How the run ended, if this is its terminal event.
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
            | Self::ModelResponded(_)
            | Self::ToolCallStarted(_)
            | Self::ToolCallCompleted(_)
            | Self::ToolCallBlocked(_)
            | Self::ToolCallAwaitingClient(_)
            | Self::ApprovalRequested(_)
            | Self::ApprovalResolved(_)
            | Self::HandoffStarted { .. }
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
        match self {
            Self::RunQueued {} => "run.queued",
            Self::RunStarted { .. } => "run.started",
            Self::SessionLoaded { .. } => "session.loaded",
            Self::SkillActivated(_) => "skill.activated",
            Self::RunResumed { .. } => "run.resumed",
            Self::AttemptStarted { .. } => "attempt.started",
            Self::IterationStarted { .. } => "iteration.started",
            Self::ModelResponded(_) => "model.responded",
            Self::ToolCallStarted(_) => "tool_call.started",
            Self::ToolCallCompleted(_) => "tool_call.completed",
            Self::ToolCallBlocked(_) => "tool_call.blocked",
            Self::ToolCallAwaitingClient(_) => "tool_call.awaiting_client",
            Self::ApprovalRequested(_) => "approval.requested",
            Self::ApprovalResolved(_) => "approval.resolved",
            Self::HandoffStarted { .. } => "handoff.started",
            Self::BudgetWarned { .. } => "budget.warned",
            Self::OutputProposed { .. } => "output.proposed",
            Self::OutputReflected { .. } => "output.reflected",
            Self::ValidationFailed { .. } => "validation.failed",
            Self::ConfirmationRequested { .. } => "confirmation.requested",
            Self::DecisionExtractionFailed(_) => "decision.extraction_failed",
            Self::DecisionValidationFailed(_) => "decision.validation_failed",
            Self::ToolChoiceUnmet { .. } => "tool_choice.unmet",
            Self::AnswerBlank { .. } => "answer.blank",
            Self::ContextCompacted(_) => "context.compacted",
            Self::RunCancelRequested { .. } => "run.cancel_requested",
            Self::RunCompleted(_) => "run.completed",
            Self::RunFailed(_) => "run.failed",
            Self::RunCancelled(_) => "run.cancelled",
        }
    }
}

impl Totals {
    /// Adds one event. The same sum is kept live, after a crash and when rows are rebuilt.
    pub fn apply(&mut self, event: &RunEvent) {
        match event {
            RunEvent::RunStarted { warnings, .. } => self.warn(warnings),
            RunEvent::AttemptStarted { attempt } => self.attempts = *attempt,
            RunEvent::ModelResponded(r) => {
                self.iterations += 1;
                self.usage.add(&r.usage);
                self.retries += r.retries;
                self.model = Some(format!("{}/{}", r.provider, r.model));
                self.warn(&r.warnings);
            }
            RunEvent::ToolChoiceUnmet { warning, .. } => self.warn(warning.as_slice()),
            RunEvent::ContextCompacted(c) => {
                self.retries += c.failed_tries;
                if let Some(call) = &c.call {
                    self.usage.add(&call.usage);
                    self.model = Some(format!("{}/{}", call.provider, call.model));
                }
            }
            RunEvent::BudgetWarned { warning, .. } => self.warn(std::slice::from_ref(warning)),
            RunEvent::ToolCallStarted(c) => {
                self.tools_used.insert(c.tool.clone());
                self.consumption.add(&c.consumes);
            }
            RunEvent::ToolCallCompleted(c) if c.failure == Some(CallFailure::NotExecuted) => {}
            RunEvent::ToolCallCompleted(c) if c.target == CallTarget::Tool => {
                self.tool_calls_made += 1;
            }
            RunEvent::ToolCallBlocked(_) => self.tool_calls_made += 1,
            RunEvent::RunQueued {}
            | RunEvent::AnswerBlank { .. }
            | RunEvent::SessionLoaded { .. }
            | RunEvent::SkillActivated(_)
            | RunEvent::RunResumed { .. }
            | RunEvent::IterationStarted { .. }
            | RunEvent::ToolCallCompleted(_)
            | RunEvent::ToolCallAwaitingClient(_)
            | RunEvent::ApprovalRequested(_)
            | RunEvent::ApprovalResolved(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::AnswerBlank { .. }
            | RunEvent::RunCancelRequested { .. }
            | RunEvent::RunCompleted(_)
            | RunEvent::RunFailed(_)
            | RunEvent::RunCancelled(_) => {}
        }
    }

    /// A warning is told once, however often there is reason for it.
    fn warn(&mut self, warnings: &[String]) {
        for warning in warnings {
            if !self.warnings.contains(warning) {
                self.warnings.push(warning.clone());
            }
        }
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_none(count: &u32) -> bool {
    *count == 0
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &usize) -> bool {
    *count == 0
}
