//! What becomes of a run at its bounds: stop conditions, limits, a busy session; and the tools of a
//! caller.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// An expression over `usage`, `counters` and `elapsed` that is looked at before every iteration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopCondition {
    /// CEL, true where the condition is met: `usage.{input_tokens, output_tokens,
    /// cached_input_tokens, cache_write_tokens, reasoning_tokens, total_tokens, cost_usd}`,
    /// `counters.{iterations, attempts, tool_calls, files_read, files_written, files_modified,
    /// lines_changed, commands, network_requests}`, `elapsed` in seconds.
    pub when: String,
    /// What happens then; once.
    #[serde(default)]
    pub action: StopAction,
}

/// What a stop condition does.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum StopAction {
    /// The run ends.
    #[default]
    Stop,
    /// Somebody decides whether it goes on.
    Escalate,
    /// The caller is warned.
    Warn,
}

/// What becomes of a call that must not be repeated and whose outcome a crash left unknown.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknownOutcome {
    /// The run is parked until somebody finds out.
    #[default]
    Review,
    /// The model is told that it is unknown.
    Report,
    /// It is executed again.
    Retry,
}

impl OnUnknownOutcome {
    /// Whether the run waits for somebody to find out.
    pub fn is_review(&self) -> bool {
        *self == Self::Review
    }
}

/// What becomes of a run that reached a limit of iterations, calls, tokens or dollars.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnLimit {
    /// It fails.
    #[default]
    Fail,
    /// The model is asked once more, without tools, and its text is a partial output.
    Answer,
}

/// What becomes of a run whose session has another run under way.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnSessionBusy {
    /// It is refused.
    #[default]
    Reject,
    /// It waits for the other one.
    Enqueue,
    /// It takes the place of the other one, which is cancelled.
    Interrupt,
}

/// A tool that the caller executes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClientTool {
    /// `^[A-Za-z0-9_-]{1,64}$`, and no tool of the agent.
    pub name: String,
    /// For the model.
    #[serde(default)]
    pub description: String,
    /// JSON Schema 2020-12 of the arguments; an object's.
    pub input_schema: Value,
}
