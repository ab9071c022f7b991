//! Model providers: one request type, one completion type, one error type.
//!
//! An adapter translates between these and one wire format and makes exactly one HTTP call; only
//! the [`router`] retries, falls back and tracks health. `drivers/` and `engine/` decide what to
//! ask a model and what its answer means for the run.

pub mod adapter;
pub mod anthropic;
mod arguments;
mod call_ids;
pub mod capabilities;
pub mod estimate;
mod failure;
pub mod names;
mod normalization;
pub mod ollama;
mod opaque;
pub mod openai;
mod passed_options;
pub mod prices;
pub mod responses;
pub mod router;
pub mod scripted;
pub mod wire;

use crate::message::tool_schema::ToolSchema;
use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use serde_json::{Map, Value};

use crate::message::{Conversation, FinishReason, OpaqueBlocks, Usage};
use crate::run::{Sampling, Thinking, TraceSpan};
use strum::IntoStaticStr;

pub use capabilities::Capabilities;
pub use names::WireNames;
pub use passed_options::PassedOptions;

/// Replaces a blank text, which a server would refuse.
const NOTHING: &str = "(empty)";

/// A tool that is offered to a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolOffer {
    pub name: String,
    /// For the model.
    pub description: String,
    /// JSON Schema 2020-12 of the arguments, which adapters send in the form that providers take.
    pub input_schema: ToolSchema,
}

impl ToolOffer {
    /// About how many bytes it has in a request.
    pub fn bytes(&self) -> usize {
        self.name.len() + self.description.len() + self.input_schema.json_len()
    }

    /// The description, followed by what the sent form of the schema cannot express.
    fn full_description(&self) -> Cow<'_, str> {
        match (self.description.trim_end(), self.input_schema.left_to_say()) {
            (_, "") => Cow::Borrowed(&self.description),
            ("", words) => Cow::Borrowed(words),
            (description, words) => Cow::Owned(format!("{description}\n{words}")),
        }
    }

    /// The same, with the description cut so that all of it has at most `most` characters, for APIs that
    /// refuse longer ones.
    fn description_within(&self, most: usize) -> Cow<'_, str> {
        let full = self.full_description();
        if full.len() <= most || full.chars().count() <= most {
            return full;
        }
        let words = self.input_schema.left_to_say();
        if words.is_empty() {
            return Cow::Owned(cut(&self.description, most));
        }
        let room = most.saturating_sub(words.chars().count() + 1);
        Cow::Owned(format!("{}\n{words}", cut(&self.description, room)))
    }
}

/// The beginning of a text, in so many characters: up to the end of a sentence if one ends in the
/// second half, else of a word.
fn cut(text: &str, most: usize) -> String {
    let end = text.char_indices().nth(most.saturating_sub(2)).map_or(text.len(), |(at, _)| at);
    let begun = &text[..end];
    let ends = |at: &usize| begun[..*at].ends_with(['.', '!', '?', ':', ';', '\n']);
    let words = begun.rmatch_indices(char::is_whitespace).map(|(at, _)| at);
    let mut words = words.take_while(|at| *at >= end / 2);
    let sentence = words.clone().find(ends);
    match sentence {
        Some(at) => format!("{} …", begun[..at].trim_end()),
        None => format!("{}…", begun[..words.next().unwrap_or(end)].trim_end()),
    }
}

/// Whether the model must call a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// The model must not call any.
    None,
    /// The model must call one.
    Required,
    /// The model must call this one (our name).
    Tool(String),
}

/// Options that not every model supports, and those that are passed on by name. The provider's defaults
/// apply to absent ones.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    pub top_p: Option<f64>,
    /// Texts that end the answer.
    pub stop: &'a [String],
    pub seed: Option<i64>,
    pub presence_penalty: Option<f64>,
    pub frequency_penalty: Option<f64>,
    pub passed: PassedOptions<'a>,
}

impl<'a> Options<'a> {
    pub fn new(sampling: &'a Sampling, passed: &'a Map<String, Value>) -> Self {
        Self {
            top_p: sampling.top_p,
            stop: sampling.stops(),
            seed: sampling.seed,
            presence_penalty: sampling.presence_penalty,
            frequency_penalty: sampling.frequency_penalty,
            passed: PassedOptions::new(passed),
        }
    }

    /// The texts that end the answer, if there are any.
    fn stops(self) -> Option<&'a [String]> {
        Some(self.stop).filter(|stop| !stop.is_empty())
    }
}

/// One model call.
#[derive(Debug, Clone)]
pub struct ModelRequest<'a> {
    /// Without the provider.
    pub model: &'a str,
    /// Set by the router, which has removed from this request what the model does not support.
    pub capabilities: &'a Capabilities,
    pub conversation: &'a Conversation,
    /// In stable order.
    pub tools: &'a [ToolOffer],
    pub names: &'a WireNames,
    pub tool_choice: ToolChoice,
    /// Ignored if the provider has no such switch.
    pub parallel_tool_calls: Option<bool>,
    /// 0..=2; the provider's default if absent.
    pub temperature: Option<f64>,
    pub options: Options<'a>,
    /// In tokens; the provider's default if absent.
    pub max_output_tokens: Option<u32>,
    /// What budgets leave for thinking and answer together, in tokens; never less than
    /// `max_output_tokens`.
    pub output_left: Option<u32>,
    /// Ignored if the model cannot think.
    pub thinking: Option<Thinking>,
    /// Whether the stable prefix (tools, system prompt, turns so far) is marked for the provider's
    /// cache.
    pub prompt_caching: bool,
    /// Receives the answer while it is written; without a receiver nothing is streamed.
    pub deltas: Deltas<'a>,
    /// Structured output of a single-shot run, if the provider supports it.
    pub output_schema: Option<&'a Value>,
    /// Whether the answer is JSON of any form; `output_schema` says more.
    pub json_mode: bool,
    /// The run's inputs, for `scripted` only.
    pub inputs: &'a Value,
    /// 1-based number of this call within the run, failed tries included: the router increments it
    /// with every retry. Part of generated call ids, and the step of a scenario.
    pub step: u32,
    /// The span that is sent to HTTP providers as `traceparent`.
    pub trace: Option<TraceSpan>,
}

/// A piece of a streamed answer. Pieces of one kind are concatenated in order; the [`Completion`]
/// is authoritative.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    Text(String),
    Thinking(String),
    ToolCall {
        /// 0-based index among the calls of the answer.
        index: usize,
        /// Only with the first piece of a call.
        wire_name: Option<String>,
        /// The next piece of the arguments' JSON text; may be empty.
        arguments: String,
    },
    /// The try failed and another one may follow: discard what came so far. Sent by the router.
    Restarted,
}

impl Delta {
    /// Bytes that the model wrote.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text(text) | Self::Thinking(text) => text.len(),
            Self::ToolCall { wire_name, arguments, .. } => {
                wire_name.as_ref().map_or(0, String::len) + arguments.len()
            }
            Self::Restarted => 0,
        }
    }
}

/// An optional receiver of deltas, which must not block.
#[derive(Clone, Copy, Default)]
pub struct Deltas<'a>(pub Option<&'a (dyn Fn(Delta) + Send + Sync)>);

impl Deltas<'_> {
    pub fn are_wanted(self) -> bool {
        self.0.is_some()
    }

    pub fn send(self, delta: Delta) {
        if let Some(receive) = self.0 {
            receive(delta);
        }
    }
}

impl fmt::Debug for Deltas<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Deltas(wanted: {})", self.are_wanted())
    }
}

/// A tool call as a provider sent it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawToolCall {
    /// The provider's id; adapters generate one if it is missing or repeated.
    pub id: String,
    pub wire_name: String,
    /// JSON text as the model wrote it; NUL is escaped.
    pub arguments: String,
}

/// A model's complete answer. Text and arguments hold no NUL characters.
#[derive(Debug, Clone, PartialEq)]
pub struct Completion {
    /// Empty if there is none.
    pub text: String,
    /// In plain text.
    pub thinking: Option<String>,
    pub tool_calls: Vec<RawToolCall>,
    /// Blocks that the provider needs back.
    pub opaque: Option<OpaqueBlocks>,
    pub finish_reason: FinishReason,
    /// In our convention; `None` if nothing was reported.
    pub usage: Option<Usage>,
}

impl Completion {
    /// Of everything that the model wrote.
    pub fn bytes(&self) -> usize {
        let calls = self.tool_calls.iter();
        self.text.len()
            + self.thinking.as_ref().map_or(0, String::len)
            + calls.map(|call| call.wire_name.len() + call.arguments.len()).sum::<usize>()
            + self.opaque.as_ref().map_or(0, |blocks| blocks.json.len())
    }
}

/// Decides how a failure is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum FailureKind {
    /// Connection, timeout, 408/409/425/5xx/529, truncated or unparsable answer: may be retried.
    Transient,
    /// 429 with or without Retry-After: may be retried after it.
    RateLimited,
    /// Spend limit or quota: a retry does not help.
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
    /// The answer is larger than the limit. It is paid for, and a retry would give one as large.
    TooLarge,
}

impl FailureKind {
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A failed model call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{provider}: {message}")]
pub struct ProviderError {
    pub provider: String,
    pub kind: FailureKind,
    /// HTTP status, if there was an answer.
    pub status: Option<u16>,
    /// The provider's own error code or type.
    pub code: Option<String>,
    /// The provider's message if it reported the failure, else ours; capped at 1 KiB, without our
    /// secrets.
    pub message: String,
    /// The provider's Retry-After.
    pub retry_after: Option<Duration>,
    /// The provider's `x-should-retry`.
    pub should_retry: Option<bool>,
    /// The usage of the failed try, if the provider reported it with an unusable answer.
    pub usage: Option<Box<Usage>>,
}

impl ProviderError {
    /// Whether the message is the provider's own: it answered with an error.
    pub fn is_reported(&self) -> bool {
        self.status.is_some_and(|status| !(200..300).contains(&status))
    }

    /// Whether a retry may succeed, by `should_retry`, else by the kind.
    pub fn is_retryable(&self) -> bool {
        let by_kind = matches!(self.kind, FailureKind::Transient | FailureKind::RateLimited);
        self.should_retry.unwrap_or(by_kind)
    }
}

/// One model provider. Dropping the future of [`Provider::complete`] closes the connection.
#[async_trait]
pub trait Provider: Send + Sync {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError>;
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_long_description_ends_with_a_sentence_or_a_word() {
        let sentence = "Reads each file of a directory. ";
        for (text, most, expected) in [
            (sentence.repeat(3), 70, format!("{} …", sentence.repeat(2).trim())),
            ("a word ".repeat(20), 20, "a word a word a…".to_owned()),
            ("ä".repeat(50), 20, format!("{}…", "ä".repeat(18))),
            (format!("a {}", "x".repeat(50)), 20, format!("a {}…", "x".repeat(16))),
        ] {
            assert_eq!(cut(&text, most), expected);
            assert!(cut(&text, most).chars().count() <= most);
        }
    }

    #[test]
    fn what_a_schema_leaves_to_say_is_said_behind_a_description_that_is_cut() {
        let offer = |description: String, schema| ToolOffer {
            name: "t".into(),
            description,
            input_schema: ToolSchema::from(schema),
        };
        let plain = json!({"type": "object", "properties": {}});
        let long = offer("Does a thing. ".repeat(100), plain.clone());
        let told = long.description_within(1024).into_owned();
        assert!(told.chars().count() <= 1024 && told.ends_with("thing. …"), "{told}");
        assert_eq!(long.full_description().len(), 1400);
        let wide = offer("ä".repeat(1024), plain);
        assert_eq!(
            wide.description_within(1024),
            wide.full_description(),
            "characters are counted"
        );
        let either = json!({"type": "object", "properties": {}, "anyOf": [{"required": ["a"]}]});
        let told =
            offer("Does a thing. ".repeat(100), either).description_within(1024).into_owned();
        let words = "thing. …\nAt least one of these holds: has \"a\".";
        assert!(told.chars().count() <= 1024 && told.ends_with(words), "{told}");
    }
}
