//! The words of a conversation: turns, tool calls, tool results, usage.
//!
//! A conversation that a provider would refuse cannot be built here: an assistant turn is pushed
//! together with exactly one result for each of its tool calls ([`Conversation::push_turn`]).
//! Nothing in this file knows a provider's wire format; adapters in `providers/` translate.

pub mod visible;

use std::collections::HashSet;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

/// JSON text with sorted keys and no white space: the same for equal values, so that it can be
/// hashed.
pub fn canonical_json(mut value: Value) -> String {
    value.sort_all_objects();
    value.to_string()
}

/// What a call in an assistant message is addressed to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum CallTarget {
    /// A tool of the registry, or a name that no tool has.
    Tool,
    /// The output tool of a structured contract: proposes an output.
    Output,
    /// The submit tool of a reflected contract: ends the attempt.
    Submit,
}

/// One tool call that a model asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolCall {
    /// Ours: stable, unique, used in events, rows and URLs.
    pub id: Uuid,
    /// The provider's own id, sent back to it verbatim and shown nowhere else.
    pub provider_id: String,
    /// Our name of the tool, e.g. `mcp:time/now`; an unknown wire name is kept as it came.
    pub name: String,
    /// The arguments exactly as the model wrote them; may be malformed JSON.
    pub arguments: String,
    /// What the call is addressed to.
    pub target: CallTarget,
}

/// The one answer to one tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolResult {
    /// The call that this answers.
    pub call_id: Uuid,
    /// What the model reads.
    pub content: String,
    /// Whether the call failed, was blocked or was not executed.
    pub is_error: bool,
}

/// Content blocks as one provider sent them, kept verbatim because that provider wants them back
/// byte for byte (thinking with its signature, redacted thinking, blocks that we do not know).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OpaqueBlocks {
    /// The provider they came from; other providers never see them.
    pub provider: String,
    /// The blocks' JSON text, untouched.
    pub json: String,
}

/// What the model said in one response.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AssistantMessage {
    /// The visible text, empty where there is none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub text: String,
    /// Thinking that the provider showed in plain text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// The tool calls, in the model's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The provider's own blocks, where it needs them back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub opaque: Option<OpaqueBlocks>,
    /// The JSON text of the decision that this was read from, where the model was asked for one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
}

/// One turn of a conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Turn {
    /// Something said to the model.
    User(String),
    /// A response with one result per tool call; built only by [`Conversation`].
    Assistant(AssistantTurn),
}

/// A response and the results of its calls, in call order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssistantTurn {
    message: AssistantMessage,
    results: Vec<ToolResult>,
}

impl AssistantTurn {
    /// The model's message.
    pub fn message(&self) -> &AssistantMessage {
        &self.message
    }

    /// One result per tool call of the message, in the same order.
    pub fn results(&self) -> &[ToolResult] {
        &self.results
    }
}

/// A system prompt and turns that every provider accepts.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Conversation {
    system: String,
    turns: Vec<Turn>,
    /// How many of them come from earlier runs; the run's first message follows them.
    #[serde(default)]
    history: usize,
}

/// Turns at the end of a conversation that nothing is taken from.
const LAST_TURNS: usize = 2;

/// Results do not answer the calls one by one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tool results do not match the tool calls: expected {expected:?}, got {got:?}")]
pub struct OrphanedCall {
    /// Call ids in the order of the message.
    pub expected: Vec<Uuid>,
    /// Call ids in the order of the results.
    pub got: Vec<Uuid>,
}

/// Turns that must stay: the run's first message, and the last two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{turns} turns cannot be replaced: {replaceable} can")]
pub struct NotReplaceable {
    /// How many were to be replaced.
    pub turns: usize,
    /// How many may be.
    pub replaceable: usize,
}

impl Conversation {
    /// Starts with a system prompt and no turns.
    pub fn new(system: impl Into<String>) -> Self {
        Self { system: system.into(), turns: Vec::new(), history: 0 }
    }

    /// What was pushed so far comes from earlier runs.
    pub fn end_history(&mut self) {
        self.history = self.turns.len();
    }

    /// How many of the turns come from earlier runs; 0 also where a summary that stands for them
    /// covers turns of this run as well.
    pub fn history(&self) -> usize {
        self.history
    }

    /// The first message of the run.
    pub fn first_message(&self) -> Option<&Turn> {
        self.turns.get(self.history)
    }

    /// The system prompt.
    pub fn system(&self) -> &str {
        &self.system
    }

    /// The turns so far.
    pub fn turns(&self) -> &[Turn] {
        &self.turns
    }

    /// Adds something said to the model.
    pub fn push_user(&mut self, text: impl Into<String>) {
        self.turns.push(Turn::User(text.into()));
    }

    /// Adds a response together with the results of its calls.
    ///
    /// # Errors
    /// [`OrphanedCall`] unless there is exactly one result per call, in call order.
    pub fn push_turn(
        &mut self,
        message: AssistantMessage,
        results: Vec<ToolResult>,
    ) -> Result<(), OrphanedCall> {
        let expected = message.tool_calls.iter().map(|c| c.id);
        if !expected.clone().eq(results.iter().map(|r| r.call_id)) {
            return Err(OrphanedCall {
                expected: expected.collect(),
                got: results.iter().map(|r| r.call_id).collect(),
            });
        }
        self.turns.push(Turn::Assistant(AssistantTurn { message, results }));
        Ok(())
    }

    /// The turns that something may be taken from, the oldest first: all but the run's first
    /// message and the last two.
    pub fn replaceable(&self) -> impl Iterator<Item = &Turn> + Clone {
        self.places().map(move |place| &self.turns[place])
    }

    /// The last turns, which nothing is taken from; without the run's first message.
    pub fn last_turns(&self) -> impl Iterator<Item = &Turn> + Clone {
        let first = self.turns.len().saturating_sub(LAST_TURNS);
        (first..self.turns.len())
            .filter(move |place| *place != self.history)
            .map(move |place| &self.turns[place])
    }

    fn places(&self) -> impl Iterator<Item = usize> + Clone + use<> {
        let history = self.history;
        (0..self.turns.len().saturating_sub(LAST_TURNS)).filter(move |place| *place != history)
    }

    /// Replaces what calls in replaceable turns brought by a note of its size; other calls keep
    /// their results.
    pub fn clear_results(&mut self, calls: &[Uuid]) {
        let calls: HashSet<_> = calls.iter().collect();
        for place in self.places() {
            let Turn::Assistant(turn) = &mut self.turns[place] else { continue };
            for result in turn.results.iter_mut().filter(|result| calls.contains(&result.call_id)) {
                result.content = cleared(result.content.len());
            }
        }
    }

    /// Replaces the oldest so many replaceable turns by something said to the model. It stands
    /// where they stood; where they are more than the history, after the run's first message.
    ///
    /// # Errors
    /// [`NotReplaceable`] where there are fewer, or none are to be replaced.
    pub fn summarise(
        &mut self,
        turns: usize,
        summary: impl Into<String>,
    ) -> Result<(), NotReplaceable> {
        let replaceable = self.places().count();
        if turns == 0 || turns > replaceable {
            return Err(NotReplaceable { turns, replaceable });
        }
        let summary = Turn::User(summary.into());
        if turns <= self.history {
            self.turns.splice(..turns, [summary]);
            self.history -= turns - 1;
        } else {
            self.turns.splice(self.history + 1..=turns, [summary]);
            self.turns.drain(..self.history);
            self.history = 0;
        }
        Ok(())
    }
}

/// What is left of a result of so many bytes.
fn cleared(bytes: usize) -> String {
    format!("[result cleared: {bytes} bytes]")
}

/// Why the model stopped, in our words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// It was done.
    Stop,
    /// It wants tools executed.
    ToolCalls,
    /// The output cap cut it off.
    Length,
    /// The provider's filter or the model itself refused.
    Refusal,
    /// The provider paused a long turn and wants it sent back as it is.
    Pause,
    /// A reason that we do not know; treated as [`FinishReason::Stop`].
    Other,
}

impl FinishReason {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stop => "stop",
            Self::ToolCalls => "tool_calls",
            Self::Length => "length",
            Self::Refusal => "refusal",
            Self::Pause => "pause",
            Self::Other => "other",
        }
    }
}

/// Tokens and money of one response or of a whole run.
///
/// `input_tokens` is the whole input: `cached_input_tokens` and `cache_write_tokens` are parts of
/// it, as `reasoning_tokens` is part of `output_tokens`, whatever the provider's own convention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Usage {
    /// Tokens read by the model.
    pub input_tokens: u64,
    /// Tokens written by the model.
    pub output_tokens: u64,
    /// Part of the input that came from the provider's cache.
    pub cached_input_tokens: u64,
    /// Part of the input that was written to the provider's cache.
    pub cache_write_tokens: u64,
    /// Part of the output that was reasoning.
    pub reasoning_tokens: u64,
    /// Cost in micro-dollars; `None` where a model has no price.
    pub cost_micro_usd: Option<i64>,
    /// Whether any number is our estimate because the provider reported none.
    pub estimated: bool,
}

impl Usage {
    /// Input plus output.
    pub fn total_tokens(&self) -> u64 {
        self.input_tokens.saturating_add(self.output_tokens)
    }

    /// Adds another response's usage. The sum has a cost only where every part has one.
    pub fn add(&mut self, other: &Usage) {
        let first = self.total_tokens() == 0;
        self.input_tokens = self.input_tokens.saturating_add(other.input_tokens);
        self.output_tokens = self.output_tokens.saturating_add(other.output_tokens);
        self.cached_input_tokens =
            self.cached_input_tokens.saturating_add(other.cached_input_tokens);
        self.cache_write_tokens = self.cache_write_tokens.saturating_add(other.cache_write_tokens);
        self.reasoning_tokens = self.reasoning_tokens.saturating_add(other.reasoning_tokens);
        self.estimated |= other.estimated;
        self.cost_micro_usd = match (self.cost_micro_usd, other.cost_micro_usd) {
            (Some(a), Some(b)) => Some(a.saturating_add(b)),
            (None, Some(b)) if first => Some(b),
            _ => None,
        };
    }
}
