//! What a model answered, and what it failed to.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::message::{AssistantMessage, FinishReason, Usage};

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
    /// The model's context window in tokens, if known.
    pub window: Option<u64>,
    /// Whether the model was asked before, and its answer lost with the replica. The usage has that
    /// call too, estimated to be as much.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub repeated: bool,
    /// For the caller.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A tool call that the caller made in the agent's name. It takes the place of a model's answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CallGiven {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The message with the call, as the conversation has it.
    pub message: AssistantMessage,
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
    /// What was wrong: `transient`, `rate_limited`, `quota_exhausted`, `not_found`, `too_large` or
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
    /// The usage of the try: as the provider reports it, else estimated from the
    /// part of the answer that had arrived; absent if nothing had arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub usage: Option<Usage>,
}

impl ModelRetried {
    /// When the next try is made, where this one failed then.
    pub fn next_try(&self, failed_at: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let wait = TimeDelta::try_milliseconds(i64::try_from(self.wait_ms).ok()?)?;
        failed_at.checked_add_signed(wait)
    }
}

/// A model call that was cancelled or failed finally after a part of its answer had arrived.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelInterrupted {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    /// The provider that was asked.
    pub provider: String,
    /// The model that was asked, without the provider.
    pub model: String,
    /// The usage of the call: as the provider reports it, else estimated from the part of the answer that had
    /// arrived.
    pub usage: Usage,
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
