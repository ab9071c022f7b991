//! A Chat Completions answer, of OpenAI or a compatible server, as a completion.
//!
//! The presence of calls decides, not the finish reason. Missing or repeated call ids are generated
//! deterministically; deviations of compatible servers (content as parts, arguments as an object,
//! no usage) are accepted. An empty answer without a finish reason is a transport error.
//! [`stream`](super::stream) turns a streamed answer into the same [`Parts`].

use serde::Deserialize;
use serde_json::value::RawValue;

use super::reasoning::Reasoning;
use crate::bounds::json::{AtMost, First, UpTo};
use crate::message::{FinishReason, Usage};
use crate::providers::adapter::Call;
use crate::providers::normalization::{self, CALLS_READ, MAX_PARTS, Unusable};
use crate::providers::{Completion, RawToolCall, failure};

/// The parts of an answer, whole or streamed.
pub(super) struct Parts {
    /// `None` if the message has no content, which differs from empty content.
    pub(super) content: Option<String>,
    /// Why the model refuses to answer.
    pub(super) refusal: Option<String>,
    /// Reasoning in plain text, from compatible servers.
    pub(super) thinking: Option<String>,
    /// The same, as they need it back.
    pub(super) reasoning: Reasoning,
    pub(super) tool_calls: Vec<RawToolCall>,
    /// What they attached to each of the calls.
    pub(super) extra_content: Vec<Option<Box<RawValue>>>,
    /// In the server's terms.
    pub(super) finish_reason: Option<String>,
    pub(super) usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Answer<'a> {
    #[serde(borrow)]
    choices: Option<First<Choice<'a>>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    message: Option<Message<'a>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    content: Option<&'a RawValue>,
    refusal: Option<String>,
    #[serde(borrow)]
    reasoning_content: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning: Option<&'a RawValue>,
    #[serde(borrow)]
    reasoning_details: Option<&'a RawValue>,
    #[serde(borrow)]
    tool_calls: Option<UpTo<CallMade<'a>, CALLS_READ>>,
}

#[derive(Deserialize)]
struct CallMade<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    function: Option<Function<'a>>,
    #[serde(borrow)]
    extra_content: Option<&'a RawValue>,
}

/// A called function, or in a stream a piece of it.
#[derive(Deserialize)]
pub(super) struct Function<'a> {
    pub(super) name: Option<String>,
    #[serde(borrow)]
    pub(super) arguments: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
    refusal: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WireUsage {
    prompt_tokens: Option<u64>,
    completion_tokens: Option<u64>,
    prompt_tokens_details: Option<PromptDetails>,
    completion_tokens_details: Option<CompletionDetails>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct PromptDetails {
    cached_tokens: Option<u64>,
    cache_write_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

/// Reads the whole answer to a call.
pub(super) fn parse(body: &[u8], call: Call<'_>) -> Result<Completion, Unusable> {
    let answer: Answer = serde_json::from_slice(body).map_err(|error| {
        Unusable::Malformed(format!("the answer is not a chat completion: {error}"))
    })?;
    let Some(choice) = answer.choices.and_then(|choices| choices.0) else {
        return Err(match answer.error {
            Some(_) => Unusable::Error(failure::read_embedded(body)),
            None => Unusable::Malformed("empty choices: the answer has none".into()),
        });
    };
    let Some(message) = choice.message else {
        return Err(Unusable::Malformed("the first choice has no message".into()));
    };
    let mut reasoning = Reasoning::default();
    let thinking = reasoning.add(message.reasoning_content, message.reasoning);
    reasoning.take_details(message.reasoning_details);
    let calls = message.tool_calls.unwrap_or_default().0;
    let extra = |call: &CallMade<'_>| call.extra_content.map(ToOwned::to_owned);
    Parts {
        content: message.content.map(content_text).transpose()?,
        refusal: message.refusal,
        thinking: thinking.filter(|text| !text.is_empty()),
        reasoning,
        extra_content: calls.iter().map(extra).collect(),
        tool_calls: tool_calls(calls, call.step),
        finish_reason: choice.finish_reason,
        usage: answer.usage.and_then(usage),
    }
    .complete(call)
}

impl Parts {
    /// # Errors
    /// The answer is empty and has no finish reason.
    pub(super) fn complete(self, call: Call<'_>) -> Result<Completion, Unusable> {
        let Self { content, refusal, thinking, tool_calls, finish_reason: said, usage, .. } = self;
        let opaque = self.reasoning.blocks(&self.extra_content, call.provider, call.model);
        let refusal = refusal.filter(|text| !text.trim().is_empty());
        let finish_reason =
            finish_reason(said.as_deref(), !tool_calls.is_empty(), refusal.is_some());
        if content.is_none() && tool_calls.is_empty() && refusal.is_none() && said.is_none() {
            return Err(Unusable::Malformed(
                "the message has neither content nor tool calls, and no end".into(),
            ));
        }
        let text = content.filter(|text| !text.is_empty()).or(refusal).unwrap_or_default();
        Ok(Completion {
            text: normalization::text(text),
            thinking: thinking.map(normalization::text),
            tool_calls,
            opaque,
            finish_reason,
            usage,
        })
    }
}

fn finish_reason(said: Option<&str>, has_calls: bool, refused: bool) -> FinishReason {
    match said {
        Some("length") => FinishReason::Length,
        Some("content_filter") => FinishReason::Refusal,
        _ if refused => FinishReason::Refusal,
        _ if has_calls => FinishReason::ToolCalls,
        Some("stop" | "tool_calls" | "function_call") => FinishReason::Stop,
        _ => FinishReason::Other,
    }
}

fn tool_calls(calls: Vec<CallMade<'_>>, step: u32) -> Vec<RawToolCall> {
    let mut read: Vec<RawToolCall> = Vec::with_capacity(calls.len());
    for call in calls {
        let id = call.id.and_then(normalization::string).unwrap_or_default();
        let (name, arguments) = call.function.map_or((None, None), |f| (f.name, f.arguments));
        let arguments = arguments.map(call_text).unwrap_or_default();
        read.push(normalization::tool_call(id, name.unwrap_or_default(), arguments, &read, step));
    }
    read
}

/// Arguments are JSON in a string; some servers send the JSON itself.
pub(super) fn call_text(raw: &RawValue) -> String {
    normalization::string(raw).unwrap_or_else(|| raw.get().to_owned())
}

/// Content is text or a list of parts with text.
pub(super) fn content_text(raw: &RawValue) -> Result<String, Unusable> {
    if let Some(text) = normalization::string(raw) {
        return Ok(text);
    }
    let parts: AtMost<Part, MAX_PARTS> = serde_json::from_str(raw.get()).map_err(|error| {
        Unusable::Malformed(format!("the content is neither text nor parts: {error}"))
    })?;
    Ok(parts.into_iter().filter_map(|part| part.text.or(part.refusal)).collect())
}

/// The usage that an answer reports, even if the rest of it is unusable.
pub(super) fn usage_of(body: &[u8]) -> Option<Usage> {
    normalization::member_usage(body).and_then(usage)
}

/// `None` if the usage is malformed or says nothing: the answer is still good.
pub(super) fn usage(raw: &RawValue) -> Option<Usage> {
    let said: WireUsage = serde_json::from_str(raw.get()).ok()?;
    said.prompt_tokens.or(said.completion_tokens)?;
    let input_tokens = said.prompt_tokens.unwrap_or_default();
    let output_tokens = said.completion_tokens.unwrap_or_default();
    let prompt = said.prompt_tokens_details.unwrap_or_default();
    let completion = said.completion_tokens_details.unwrap_or_default();
    Some(Usage {
        input_tokens,
        output_tokens,
        cached_input_tokens: prompt.cached_tokens.unwrap_or_default().min(input_tokens),
        cache_write_tokens: prompt.cache_write_tokens.unwrap_or_default().min(input_tokens),
        reasoning_tokens: completion.reasoning_tokens.unwrap_or_default().min(output_tokens),
        ..Usage::default()
    })
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
