//! A tool call from its start to its result.

use std::borrow::Cow;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::{Circumstances, FileChange};
use crate::message::CallTarget;
use crate::run::{Action, Consumption, Effect, OnUnknownOutcome, SandboxLevel};

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
    #[serde(default, skip_serializing_if = "super::is_unknown")]
    #[schema(value_type = Vec<Action>)]
    pub actions: Arc<[Action]>,
    /// What the call takes of the run's budget.
    #[serde(default, skip_serializing_if = "Consumption::is_nothing")]
    pub consumes: Consumption,
    /// What happens if a crash leaves the call's outcome unknown; absent for `review`.
    #[serde(default, skip_serializing_if = "OnUnknownOutcome::is_review")]
    pub on_unknown_outcome: OnUnknownOutcome,
    /// What else the call was judged by.
    #[serde(default, skip_serializing_if = "Circumstances::are_none")]
    pub circumstances: Circumstances,
    /// How well the programs of the call are confined; absent for calls that start none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub sandbox: Option<SandboxLevel>,
    /// SHA-256 of the tool's declaration, where the tool can be asked after a crash what became of the
    /// call; absent where it cannot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reconcilable_by: Option<String>,
    /// The arguments of the call, where interceptors or an approver have changed those that the model
    /// wrote; absent where they are the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object, nullable = false)]
    pub arguments: Option<Arc<Value>>,
}

/// Whether a call took effect, as its tool answered after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reconciled {
    /// It took effect; the result is that of the answer.
    Happened,
    /// It did not take effect, and was executed then.
    DidNotHappen,
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
    /// The run that the call started was ended by the budget that both share, which is judged before
    /// the next model call; does not count as failing.
    OverBudget,
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

    /// Whether the call counts towards `error_threshold` in any run.
    pub fn counts_as_failing(self) -> bool {
        !matches!(self, Self::Excess | Self::Cancelled | Self::NotExecuted | Self::OverBudget)
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
    /// Further changes, which are counted and not listed; absent where there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    #[schema(required = false)]
    pub changes_omitted: u64,
    /// How well the programs were confined; absent where the tool starts none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub sandbox: Option<SandboxLevel>,
    /// Network requests of the call; absent if there were none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub network: Option<NetworkUse>,
    /// What the tool returned is not what the model reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub replaced: Option<Replaced>,
    /// The run that a call of another agent started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub child_run_id: Option<Uuid>,
    /// Whether the call took effect, as its tool answered after a crash; absent if the tool
    /// was not asked or did not know.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reconciled: Option<Reconciled>,
    /// Whether a person found out after a crash that the call took effect; its duration is unknown.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    #[schema(required = false)]
    pub found_out: bool,
}

/// Network requests of a call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(default)]
pub struct NetworkUse {
    /// Requests that were sent.
    #[schema(required)]
    pub requests: u64,
    /// Requests that were refused.
    #[schema(required)]
    pub refused: u64,
    /// How many of the sent requests were already counted when the call started.
    #[serde(skip_serializing_if = "is_zero")]
    pub announced: u64,
    /// Whether the run's budget refused one of them, which ends the run.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub over_budget: bool,
    /// Whether that was the budget that the run shares with others; absent where it was its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub shared: Option<SharedRequests>,
}

/// The requests of all runs that share a budget, when it refused one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SharedRequests {
    /// Requests sent and reserved.
    pub used: u64,
    /// Requests that they may send together.
    pub max: u64,
}

impl NetworkUse {
    /// Requests that were sent beyond those that the start of the call counted.
    pub fn uncounted(&self) -> u64 {
        self.requests.saturating_sub(self.announced)
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "what serde asks for")]
fn is_zero(count: &u64) -> bool {
    *count == 0
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
    /// A result of which nothing else is known.
    pub fn new(
        call_id: Uuid,
        tool: String,
        target: CallTarget,
        content: String,
        failure: Option<CallFailure>,
    ) -> Self {
        Self {
            call_id,
            tool,
            target,
            content,
            failure,
            duration_ms: 0,
            cached: false,
            note: None,
            changes: None,
            changes_omitted: 0,
            sandbox: None,
            network: None,
            replaced: None,
            child_run_id: None,
            reconciled: None,
            found_out: false,
        }
    }

    /// Milliseconds of execution; `None` where they are unknown: the outcome was found out, or given up, after a
    /// crash.
    pub fn known_duration_ms(&self) -> Option<u64> {
        let is_known = match self.failure {
            Some(CallFailure::UnknownOutcome) => false,
            Some(CallFailure::Cancelled) => self.duration_ms > 0,
            _ => !self.found_out,
        };
        is_known.then_some(self.duration_ms)
    }

    /// Whether the tool was executed, and this is what came of it.
    pub(super) fn has_result(&self) -> bool {
        use CallFailure::{ToolError, Withheld};
        self.failure.is_none_or(|failure| matches!(failure, ToolError | Withheld))
    }

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
    /// What the gate judged; empty if the call's actions are unknown.
    #[serde(default, skip_serializing_if = "super::is_unknown")]
    #[schema(value_type = Vec<Action>)]
    pub actions: Arc<[Action]>,
    /// What else the call was judged by.
    #[serde(default, skip_serializing_if = "Circumstances::are_none")]
    pub circumstances: Circumstances,
}

impl ToolCallBlocked {
    /// The rule of the limits of calls a minute.
    pub const RATE_LIMIT: &str = "rate_limit";

    /// Whether the caller made too many calls in this minute.
    pub fn is_one_too_many(&self) -> bool {
        self.rule == Self::RATE_LIMIT
    }
}
