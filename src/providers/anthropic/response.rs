//! A Messages answer as a completion.
//!
//! The presence of calls decides, not the stop reason, unless the answer was truncated or refused.
//! If an answer has blocks that the API needs back (signed thinking, redacted thinking, unknown
//! blocks), all its blocks are kept in order and byte for byte; a call is kept as a placeholder,
//! because the call itself is stored already. Truncated thinking without a signature cannot be sent
//! back and is not kept.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::bounds::json::AtMost;
use crate::message::{FinishReason, OpaqueBlocks, Usage};
use crate::providers::failure::{self, Reported};
use crate::providers::normalization::{self, MAX_PARTS, Unusable};
use crate::providers::{Completion, RawToolCall};

/// Placeholder of a call among the kept blocks.
const CALL_MARK: &str = r#"{"type":"tool_use"}"#;

/// A complete block of an answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Block {
    Text(String),
    /// Thinking, shown or redacted; `json` is the block to send back, if it can be.
    Thinking {
        text: String,
        json: Option<String>,
    },
    /// `input` is JSON text.
    ToolUse {
        id: String,
        name: String,
        input: String,
    },
    /// JSON text of any other block.
    Other(String),
}

/// Why the model stopped, in the API's terms.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Stop {
    pub(super) stop_reason: Option<String>,
    stop_details: Option<StopDetails>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct StopDetails {
    explanation: Option<String>,
}

/// Tokens in the API's convention, which counts cached input separately. Absent is not zero: a
/// stream reports them in parts.
#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
pub(super) struct WireUsage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    cache_creation_input_tokens: Option<u64>,
    cache_read_input_tokens: Option<u64>,
    output_tokens_details: Option<OutputDetails>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
#[serde(default)]
struct OutputDetails {
    thinking_tokens: Option<u64>,
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    content: Option<AtMost<&'a RawValue, MAX_PARTS>>,
    stop_reason: Option<String>,
    stop_details: Option<StopDetails>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Typed<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct TextBlock {
    #[serde(default)]
    text: String,
}

/// A thinking block; a stream sends it in pieces.
#[derive(Debug, Default, Deserialize, Serialize)]
#[serde(default)]
pub(super) struct ThinkingBlock {
    r#type: Cow<'static, str>,
    pub(super) thinking: String,
    pub(super) signature: String,
}

/// The block of a call; a stream sends the input in pieces.
#[derive(Deserialize)]
pub(super) struct ToolUseBlock<'a> {
    #[serde(default)]
    pub(super) id: String,
    pub(super) name: String,
    #[serde(borrow)]
    pub(super) input: Option<&'a RawValue>,
}

/// Reads a whole answer. `step` is part of the ids generated for calls without one.
pub(super) fn parse(body: &[u8], provider: &str, step: u32) -> Result<Completion, Unusable> {
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|error| malformed("the answer is not a message", &error))?;
    if answer.error.is_some() {
        return Err(Unusable::Error(reported(body)));
    }
    let content =
        answer.content.ok_or_else(|| Unusable::Malformed("the answer has no content".into()))?;
    let blocks = content.into_iter().map(block).collect::<Result<_, _>>()?;
    let usage =
        answer.usage.and_then(|raw| serde_json::from_str(raw.get()).ok()).unwrap_or_default();
    let said = Stop { stop_reason: answer.stop_reason, stop_details: answer.stop_details };
    completion(blocks, said, usage, provider, step)
}

/// The usage that an answer reports, even if the rest of it is unusable.
pub(super) fn usage_of(body: &[u8]) -> Option<Usage> {
    let said = normalization::member_usage(body)?.get();
    serde_json::from_str::<WireUsage>(said).ok()?.normalised()
}

/// Reads one block, which in a stream may be only its beginning.
pub(super) fn block(raw: &RawValue) -> Result<Block, Unusable> {
    let read = |error| malformed("a block of the answer cannot be read", &error);
    let Typed { r#type } = serde_json::from_str(raw.get()).map_err(read)?;
    Ok(match r#type.as_ref() {
        "text" => Block::Text(serde_json::from_str::<TextBlock>(raw.get()).map_err(read)?.text),
        "thinking" => {
            let thinking: ThinkingBlock = serde_json::from_str(raw.get()).map_err(read)?;
            let json = (!thinking.signature.is_empty()).then(|| raw.get().to_owned());
            Block::Thinking { text: thinking.thinking, json }
        }
        "tool_use" => {
            let call: ToolUseBlock = serde_json::from_str(raw.get()).map_err(read)?;
            let input = call.input.map(|input| input.get().to_owned()).unwrap_or_default();
            Block::ToolUse { id: call.id, name: call.name, input }
        }
        _ => Block::Other(raw.get().to_owned()),
    })
}

/// The completion of an answer's blocks.
pub(super) fn completion(
    blocks: Vec<Block>,
    said: Stop,
    usage: WireUsage,
    provider: &str,
    step: u32,
) -> Result<Completion, Unusable> {
    let opaque = opaque(&blocks, provider);
    let (mut text, mut thinking, mut tool_calls) =
        (String::new(), String::new(), Vec::<RawToolCall>::new());
    for block in blocks {
        match block {
            Block::Text(piece) => text.push_str(&piece),
            Block::Thinking { text: piece, .. } => thinking.push_str(&piece),
            Block::ToolUse { .. } if tool_calls.len() == normalization::CALLS_READ => {}
            Block::ToolUse { id, name, input } => {
                tool_calls.push(normalization::tool_call(id, name, input, &tool_calls, step));
            }
            Block::Other(_) => {}
        }
    }
    let finish_reason = finish_reason(said.stop_reason.as_deref(), !tool_calls.is_empty())?;
    if finish_reason == FinishReason::Refusal && text.is_empty() {
        text = said.stop_details.and_then(|details| details.explanation).unwrap_or_default();
    }
    Ok(Completion {
        text: normalization::text(text),
        thinking: Some(normalization::text(thinking)).filter(|thinking| !thinking.is_empty()),
        tool_calls,
        opaque,
        finish_reason,
        usage: usage.normalised(),
    })
}

fn finish_reason(said: Option<&str>, has_calls: bool) -> Result<FinishReason, Unusable> {
    Ok(match said {
        None => {
            return Err(Unusable::Malformed(
                "the answer has no stop_reason: it is not complete".into(),
            ));
        }
        Some("model_context_window_exceeded") => {
            let message =
                "the answer was cut off at the end of the model's context window".to_owned();
            let code = Some("model_context_window_exceeded".to_owned());
            return Err(Unusable::Error(Reported { code, status: Some(200), message }));
        }
        Some("max_tokens") => FinishReason::Length,
        Some("refusal") => FinishReason::Refusal,
        _ if has_calls => FinishReason::ToolCalls,
        Some("pause_turn") => FinishReason::Pause,
        Some("end_turn" | "stop_sequence" | "tool_use") => FinishReason::Stop,
        Some(_) => FinishReason::Other,
    })
}

/// All blocks in order, if the provider needs any of them back.
fn opaque(blocks: &[Block], provider: &str) -> Option<OpaqueBlocks> {
    blocks
        .iter()
        .find(|block| matches!(block, Block::Thinking { json: Some(_), .. } | Block::Other(_)))?;
    let mut calls = 0;
    let kept = blocks.iter().filter_map(|block| match block {
        Block::Text(text) => serde_json::to_string(text)
            .ok()
            .map(|text| format!(r#"{{"type":"text","text":{text}}}"#)),
        Block::Thinking { json, .. } => json.clone(),
        Block::ToolUse { .. } => {
            calls += 1;
            (calls <= normalization::MAX_CALLS).then(|| CALL_MARK.to_owned())
        }
        Block::Other(json) => Some(json.clone()),
    });
    let kept: Vec<String> = kept.collect();
    Some(OpaqueBlocks { provider: provider.to_owned(), json: format!("[{}]", kept.join(",")) })
}

/// An error object, with the HTTP status of its type.
pub(super) fn reported(body: &[u8]) -> Reported {
    let mut reported = failure::read_body(body);
    reported.status = match reported.code.as_deref() {
        Some("invalid_request_error") => Some(400),
        Some("authentication_error") => Some(401),
        Some("billing_error") => Some(402),
        Some("permission_error") => Some(403),
        Some("not_found_error") => Some(404),
        Some("request_too_large") => Some(413),
        Some("rate_limit_error") => Some(429),
        Some("api_error") => Some(500),
        Some("timeout_error") => Some(504),
        Some("overloaded_error") => Some(529),
        _ => reported.status,
    };
    reported
}

pub(super) fn malformed(what: &str, error: &serde_json::Error) -> Unusable {
    Unusable::Malformed(format!("{what}: {error}"))
}

impl ThinkingBlock {
    /// The complete block; without a signature it cannot be sent back.
    pub(super) fn whole(mut self) -> Block {
        self.r#type = Cow::Borrowed("thinking");
        let json = if self.signature.is_empty() { None } else { serde_json::to_string(&self).ok() };
        Block::Thinking { text: self.thinking, json }
    }
}

impl WireUsage {
    /// Takes newer numbers, which are cumulative.
    pub(super) fn update(&mut self, said: Self) {
        self.input_tokens = said.input_tokens.or(self.input_tokens);
        self.output_tokens = said.output_tokens.or(self.output_tokens);
        self.cache_creation_input_tokens =
            said.cache_creation_input_tokens.or(self.cache_creation_input_tokens);
        self.cache_read_input_tokens =
            said.cache_read_input_tokens.or(self.cache_read_input_tokens);
        self.output_tokens_details = said.output_tokens_details.or(self.output_tokens_details);
    }

    /// In our convention; `None` if nothing was reported.
    pub(super) fn normalised(self) -> Option<Usage> {
        self.input_tokens.or(self.output_tokens)?;
        let cached_input_tokens = self.cache_read_input_tokens.unwrap_or_default();
        let cache_write_tokens = self.cache_creation_input_tokens.unwrap_or_default();
        let input = self.input_tokens.unwrap_or_default();
        let output_tokens = self.output_tokens.unwrap_or_default();
        let thinking = self
            .output_tokens_details
            .and_then(|details| details.thinking_tokens)
            .unwrap_or_default();
        Some(Usage {
            input_tokens: input
                .saturating_add(cached_input_tokens)
                .saturating_add(cache_write_tokens),
            output_tokens,
            cached_input_tokens,
            cache_write_tokens,
            reasoning_tokens: thinking.min(output_tokens),
            ..Usage::default()
        })
    }
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
