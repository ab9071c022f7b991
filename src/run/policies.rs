//! Policies for stop conditions, limits, unknown outcomes and busy sessions; and client tools.

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use strum::IntoStaticStr;
use utoipa::ToSchema;

use super::{Action, ActionKind, Effect};

/// What expressions of interceptors of calls may use.
pub const OF_CALLS: [&str; 5] = ["args", "inputs", "reads", "tool", "writes"];
/// What expressions and templates of interceptors of results may use.
pub const OF_RESULTS: [&str; 5] = ["args", "inputs", "is_error", "result", "tool"];

/// An expression over `usage`, `counters` and `elapsed`, evaluated before every iteration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StopCondition {
    /// CEL, true where the condition is met: `usage.{input_tokens, output_tokens,
    /// cached_input_tokens, cache_write_tokens, reasoning_tokens, total_tokens, cost_usd}`,
    /// `counters.{iterations, attempts, tool_calls, files_read, files_written, files_modified,
    /// lines_changed, commands, network_requests}`, `elapsed` in seconds.
    pub when: String,
    /// What happens when the condition is first met.
    #[serde(default)]
    pub action: StopAction,
}

/// Whether denials and required approvals are enforced or only recorded.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    ToSchema,
    JsonSchema,
)]
#[schema(as = GovernanceMode)]
#[serde(rename_all = "snake_case")]
pub enum GovernanceMode {
    /// They are blocked, or wait for an approval.
    #[default]
    Enforce,
    /// They are executed, `warned`, and it is recorded what would have become of them. What the
    /// caller's scopes do not allow is blocked nevertheless.
    Observe,
}

impl GovernanceMode {
    /// Whether it is the usual one, which is not written out.
    pub fn is_enforce(&self) -> bool {
        *self == Self::Enforce
    }
}

/// The action of a stop condition.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum StopAction {
    /// End the run.
    #[default]
    Stop,
    /// Park the run until it is decided whether it continues.
    Escalate,
    /// Add a warning for the caller.
    Warn,
}

/// What happens to a call that must not be repeated and whose outcome is unknown after a crash.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnUnknownOutcome {
    /// Park the run for a review.
    #[default]
    Review,
    /// Report the unknown outcome to the model.
    Report,
    /// Execute the call again.
    Retry,
}

impl OnUnknownOutcome {
    pub fn is_review(&self) -> bool {
        *self == Self::Review
    }
}

/// What happens to a run at a limit of iterations, calls, tokens or dollars.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnLimit {
    /// The run fails.
    #[default]
    Fail,
    /// The model is asked once more, without tools, and its text is a partial output.
    Answer,
}

/// What happens to a run whose session has another unfinished run.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnSessionBusy {
    /// The new run is rejected.
    #[default]
    Reject,
    /// The new run waits for the other one.
    Enqueue,
    /// The other run is cancelled and the new one takes its place.
    Interrupt,
}

/// What happens to a text that looks like a prompt injection.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum OnInjection {
    /// An input is refused; a result is withheld from the model.
    Block,
    /// It is let through, and the event `scan.warned` says so.
    #[default]
    Warn,
    /// Nothing is scanned.
    Off,
}

/// A tool that the caller executes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ClientTool {
    /// `^[A-Za-z0-9_-]{1,64}$`, and no tool of the agent.
    #[schema(min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9_-]{1,64}$")]
    pub name: String,
    /// Description for the model.
    #[serde(default, deserialize_with = "null_as_default")]
    #[schema(nullable = false)]
    pub description: String,
    /// JSON Schema 2020-12 of the arguments, of type object.
    pub input_schema: Value,
    /// What repeating a call does; `once` where that is not declared.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub effect: Option<Effect>,
    /// Whether a call loses what exists.
    #[serde(
        default,
        deserialize_with = "null_as_default",
        skip_serializing_if = "std::ops::Not::not"
    )]
    pub destructive: bool,
}

impl ClientTool {
    /// What the gate judges of a call.
    pub fn action(&self) -> Action {
        let effect = self.effect.unwrap_or(Effect::Once);
        let what = ActionKind::Call { tool: self.name.clone() };
        Action { destructive: self.destructive, ..Action::new(what, effect) }
    }
}

/// Reads a field in which `null` is the same as no field.
pub fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Option::deserialize(deserializer).map(Option::unwrap_or_default)
}

/// How well programs are confined.
#[derive(
    Debug,
    Clone,
    Copy,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Serialize,
    Deserialize,
    IntoStaticStr,
    ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum SandboxLevel {
    #[default]
    Unavailable,
    Partial,
    Enforced,
}
