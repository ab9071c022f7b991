//! A conversation that is made to fit the context window.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::message::Usage;

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
