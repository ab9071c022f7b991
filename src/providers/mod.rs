//! Model providers: one request type, one completion type, one error type.
//!
//! An adapter translates between these and one wire format and makes exactly one HTTP call; it
//! never retries. Retrying, fallback and health are the [`router`]'s, and nobody else's. What to
//! ask a model, and what its answer means for the run, is decided in `drivers/` and `engine/`.

pub mod anthropic;
mod arguments;
pub mod capabilities;
pub mod estimate;
mod failure;
mod frames;
pub mod names;
pub mod ollama;
pub mod openai;
pub mod prices;
mod received;
pub mod responses;
pub mod router;
pub mod scripted;
pub mod wire;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::Value;

use crate::message::{Conversation, FinishReason, OpaqueBlocks, Usage};
use crate::run::{Thinking, TraceSpan};

pub use capabilities::{Capabilities, ProviderKind};
pub use names::WireNames;

/// A tool as a model sees it.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOffer {
    /// Our name.
    pub name: String,
    /// What it does, for the model.
    pub description: String,
    /// JSON Schema 2020-12 of the arguments; `type: object`.
    pub input_schema: Arc<Value>,
}

/// Whether and which tool the model must call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// No call.
    None,
    /// Any call.
    Required,
    /// This tool (our name).
    Tool(String),
}

/// One model call.
#[derive(Debug, Clone)]
pub struct ModelRequest<'a> {
    /// The model, without the provider.
    pub model: &'a str,
    /// What the model can be asked for. The router sets it, and has taken out of this request what
    /// the model cannot do.
    pub capabilities: &'a Capabilities,
    /// System prompt and turns.
    pub conversation: &'a Conversation,
    /// Offered tools, in stable order.
    pub tools: &'a [ToolOffer],
    /// How our tool names read on the wire, and back.
    pub names: &'a WireNames,
    /// Whether the model must call.
    pub tool_choice: ToolChoice,
    /// Passed through where the provider has the switch.
    pub parallel_tool_calls: Option<bool>,
    /// 0..=2; left to the provider where absent.
    pub temperature: Option<f64>,
    /// Output cap in tokens; the provider's default where absent.
    pub max_output_tokens: Option<u32>,
    /// Whether and how much the model thinks before it answers, where it can.
    pub thinking: Option<Thinking>,
    /// Whether the stable prefix (tools, system prompt, turns so far) is marked for the provider's
    /// cache.
    pub prompt_caching: bool,
    /// Who follows the answer while it is written; where nobody does, it may be fetched in one
    /// piece.
    pub deltas: Deltas<'a>,
    /// Structured output of a single shot, where the provider has it.
    pub output_schema: Option<&'a Value>,
    /// The run's inputs. Only `scripted` reads them.
    pub inputs: &'a Value,
    /// 1-based number of this call within the run, failed tries included. Only `scripted` reads it;
    /// the router raises it with every retry.
    pub step: u32,
    /// The call's place in a trace, told to providers that are called over HTTP.
    pub trace: Option<TraceSpan>,
}

/// A piece of an answer that is still being written. Pieces of one kind are to be put together in
/// order; what counts is the [`Completion`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// Visible text.
    Text(String),
    /// Thinking that the provider shows.
    Thinking(String),
    /// A tool call: its name comes with the first piece, its arguments' JSON text in pieces.
    ToolCall {
        /// 0-based place among the calls of the answer.
        index: usize,
        /// The name on the wire, with the first piece.
        wire_name: Option<String>,
        /// The next piece of the arguments; may be empty.
        arguments: String,
    },
    /// The try failed and is repeated: what came so far does not count. Sent by the router.
    Restarted,
}

/// Who follows an answer, if anybody does. Never blocks.
#[derive(Clone, Copy, Default)]
pub struct Deltas<'a>(pub Option<&'a (dyn Fn(Delta) + Send + Sync)>);

impl Deltas<'_> {
    /// Whether an answer should be streamed.
    pub fn are_followed(self) -> bool {
        self.0.is_some()
    }

    /// Passes a piece on.
    pub fn send(self, delta: Delta) {
        if let Some(follower) = self.0 {
            follower(delta);
        }
    }
}

impl fmt::Debug for Deltas<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Deltas(followed: {})", self.are_followed())
    }
}

/// A tool call as a provider sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawToolCall {
    /// The provider's id; adapters synthesise one where it is missing or repeated.
    pub id: String,
    /// The name on the wire.
    pub wire_name: String,
    /// The arguments' JSON text, as it came; a NUL character is escaped.
    pub arguments: String,
}

/// A model's complete answer. Text and arguments hold no NUL characters.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// The visible text; empty where there is none.
    pub text: String,
    /// Thinking shown in plain text.
    pub thinking: Option<String>,
    /// Tool calls in order.
    pub tool_calls: Vec<RawToolCall>,
    /// Blocks that the provider wants back.
    pub opaque: Option<OpaqueBlocks>,
    /// Why it stopped.
    pub finish_reason: FinishReason,
    /// Tokens as reported, normalised; `None` where nothing was reported.
    pub usage: Option<Usage>,
}

/// What kind of failure, and so what may be done about it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FailureKind {
    /// Connection, timeout, 408/409/425/5xx/529, truncated or unparsable answer: may be retried.
    Transient,
    /// 429 with or without Retry-After: may be retried after it.
    RateLimited,
    /// Spend limit or quota: will not go away soon.
    QuotaExhausted,
    /// 401 or 403.
    Unauthorized,
    /// 404: no such model or path.
    NotFound,
    /// Any other 4xx: our request is wrong.
    BadRequest,
    /// The input does not fit the context window.
    ContextLength,
    /// The provider's content filter refused the request.
    ContentFilter,
}

impl FailureKind {
    /// The name used in metrics and traces.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Transient => "transient",
            Self::RateLimited => "rate_limited",
            Self::QuotaExhausted => "quota_exhausted",
            Self::Unauthorized => "unauthorized",
            Self::NotFound => "not_found",
            Self::BadRequest => "bad_request",
            Self::ContextLength => "context_length",
            Self::ContentFilter => "content_filter",
        }
    }
}

/// A failed model call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider}: {message}")]
pub struct ProviderError {
    /// Which provider.
    pub provider: String,
    /// What kind of failure.
    pub kind: FailureKind,
    /// HTTP status, where there was an answer.
    pub status: Option<u16>,
    /// The provider's own error code or type.
    pub code: Option<String>,
    /// The provider's own message, capped at 1 KiB, free of our secrets.
    pub message: String,
    /// How long it asked us to wait.
    pub retry_after: Option<Duration>,
    /// Whether it said that repeating the call helps, or does not (`x-should-retry`).
    pub should_retry: Option<bool>,
}

impl ProviderError {
    /// Whether the same call may succeed when repeated: as the provider says, else by its kind.
    pub fn is_retryable(&self) -> bool {
        let by_kind = matches!(self.kind, FailureKind::Transient | FailureKind::RateLimited);
        self.should_retry.unwrap_or(by_kind)
    }
}

/// One model provider. Dropping the future of [`Provider::complete`] closes the connection.
#[async_trait]
pub trait Provider: Send + Sync {
    /// Makes one model call.
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError>;
}
