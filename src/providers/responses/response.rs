//! A Responses answer as a completion: output items in order, and why they end.
//!
//! If the provider needs any item back (reasoning, unknown kinds, messages with a phase), all items
//! of the answer are kept verbatim, because their order counts. [`request`](super::request) sends
//! them back.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::bounds::json::AtMost;
use crate::message::{FinishReason, OpaqueBlocks, Usage};
use crate::providers::normalization::{self, MAX_PARTS, Unusable};
use crate::providers::{Completion, RawToolCall, failure, names};

#[derive(Deserialize)]
struct Answer<'a> {
    status: Option<String>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
    incomplete_details: Option<Incomplete>,
    #[serde(borrow)]
    output: Option<AtMost<&'a RawValue, MAX_PARTS>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Incomplete {
    reason: Option<String>,
}

#[derive(Deserialize)]
struct Kind<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Message<'a> {
    content: Option<AtMost<Part, MAX_PARTS>>,
    #[serde(borrow)]
    phase: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Reasoning {
    summary: Option<AtMost<Part, MAX_PARTS>>,
    content: Option<AtMost<Part, MAX_PARTS>>,
}

#[derive(Deserialize)]
struct Part {
    text: Option<String>,
    refusal: Option<String>,
}

#[derive(Deserialize)]
struct Call {
    #[serde(rename = "call_id")]
    id: Option<String>,
    name: Option<String>,
    arguments: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct WireUsage {
    input_tokens: Option<u64>,
    output_tokens: Option<u64>,
    input_tokens_details: Option<InputDetails>,
    output_tokens_details: Option<OutputDetails>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct InputDetails {
    cached_tokens: Option<u64>,
    cache_write_tokens: Option<u64>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct OutputDetails {
    reasoning_tokens: Option<u64>,
}

#[derive(Default)]
struct Output {
    text: String,
    refusal: String,
    thinking: String,
    tool_calls: Vec<RawToolCall>,
    /// An item cannot be rebuilt from the completion.
    wants_back: bool,
    /// A call's id was generated, or its name is none that a request may have: the items cannot be sent back
    /// verbatim.
    has_changed: bool,
}

/// Reads a whole answer. `provider` marks its opaque blocks; `step` is part of the ids generated
/// for calls without one.
pub(super) fn parse(body: &[u8], provider: &str, step: u32) -> Result<Completion, Unusable> {
    parse_with(body, &[], provider, step)
}

/// As [`parse`], with items that came earlier: servers may omit them from the final event.
pub(super) fn parse_with(
    body: &[u8],
    earlier: &[Box<RawValue>],
    provider: &str,
    step: u32,
) -> Result<Completion, Unusable> {
    let answer: Answer = serde_json::from_slice(body)
        .map_err(|error| Unusable::Malformed(format!("the answer is not a response: {error}")))?;
    if answer.error.is_some() || answer.status.as_deref() == Some("failed") {
        return Err(Unusable::Error(failure::read_embedded(body)));
    }
    let reason = answer.incomplete_details.and_then(|details| details.reason);
    let cut = match answer.status.as_deref() {
        Some("completed") | None => None,
        Some("incomplete") => Some(reason.unwrap_or_default()),
        Some(other) => return Err(Unusable::Malformed(format!("the response is {other}"))),
    };
    let items = match answer.output {
        Some(AtMost(output)) if !output.is_empty() => output,
        _ => earlier.iter().map(AsRef::as_ref).collect(),
    };
    if items.is_empty() && answer.status.is_none() {
        return Err(Unusable::Malformed("the response has neither output nor a status".into()));
    }
    let mut output = Output::default();
    items.iter().try_for_each(|item| output.take(item, step))?;
    let is_whole = output.tool_calls.len() <= normalization::MAX_CALLS && !output.has_changed;
    let keeps = output.wants_back && is_whole;
    let opaque = keeps.then(|| OpaqueBlocks { provider: provider.to_owned(), json: list(&items) });
    Ok(output.complete(cut.as_deref(), opaque, answer.usage.and_then(usage)))
}

impl Output {
    fn take(&mut self, item: &RawValue, step: u32) -> Result<(), Unusable> {
        let unreadable =
            |error| Unusable::Malformed(format!("an output item cannot be read: {error}"));
        let json = item.get();
        match serde_json::from_str::<Kind>(json).map_err(unreadable)?.r#type.as_ref() {
            "message" => {
                let message: Message = serde_json::from_str(json).map_err(unreadable)?;
                self.wants_back |= message.phase.is_some();
                for part in message.content.into_iter().flatten() {
                    self.text.push_str(&part.text.unwrap_or_default());
                    self.refusal.push_str(&part.refusal.unwrap_or_default());
                }
            }
            "function_call" => {
                if self.tool_calls.len() == normalization::CALLS_READ {
                    return Ok(());
                }
                let call: Call = serde_json::from_str(json).map_err(unreadable)?;
                let id = call.id.unwrap_or_default();
                let (name, arguments) =
                    (call.name.unwrap_or_default(), call.arguments.unwrap_or_default());
                self.has_changed |= !names::is_valid(&name);
                let read =
                    normalization::tool_call(id.clone(), name, arguments, &self.tool_calls, step);
                self.has_changed |= read.id != id;
                self.tool_calls.push(read);
            }
            "reasoning" => {
                self.wants_back = true;
                let reasoning: Reasoning = serde_json::from_str(json).map_err(unreadable)?;
                for part in reasoning.summary.into_iter().chain(reasoning.content).flatten() {
                    if !self.thinking.is_empty() {
                        self.thinking.push_str("\n\n");
                    }
                    self.thinking.push_str(&part.text.unwrap_or_default());
                }
            }
            _ => self.wants_back = true,
        }
        Ok(())
    }

    /// `cut` says why an incomplete answer is incomplete.
    fn complete(
        self,
        cut: Option<&str>,
        opaque: Option<OpaqueBlocks>,
        usage: Option<Usage>,
    ) -> Completion {
        let finish_reason = match cut {
            Some("content_filter") => FinishReason::Refusal,
            Some("max_output_tokens") => FinishReason::Length,
            // for an unknown reason: its calls may be truncated
            Some(_) if !self.tool_calls.is_empty() => FinishReason::Length,
            Some(_) => FinishReason::Other,
            None if !self.refusal.trim().is_empty() => FinishReason::Refusal,
            None if !self.tool_calls.is_empty() => FinishReason::ToolCalls,
            None => FinishReason::Stop,
        };
        let text = if self.text.is_empty() { self.refusal } else { self.text };
        Completion {
            text: normalization::text(text),
            thinking: Some(self.thinking).filter(|text| !text.is_empty()).map(normalization::text),
            tool_calls: self.tool_calls,
            opaque,
            finish_reason,
            usage,
        }
    }
}

/// Whether an item of an answer is reasoning.
pub(super) fn is_reasoning(item: &RawValue) -> bool {
    serde_json::from_str::<Kind>(item.get()).is_ok_and(|kind| kind.r#type == "reasoning")
}

/// The items as one JSON array, verbatim.
fn list(items: &[&RawValue]) -> String {
    let items: Vec<&str> = items.iter().map(|item| item.get()).collect();
    format!("[{}]", items.join(","))
}

/// The usage that an answer reports, even if the rest of it is unusable.
pub(super) fn usage_of(body: &[u8]) -> Option<Usage> {
    normalization::member_usage(body).and_then(usage)
}

/// `None` if the usage is malformed or says nothing: the answer is still good.
fn usage(raw: &RawValue) -> Option<Usage> {
    let said: WireUsage = serde_json::from_str(raw.get()).ok()?;
    said.input_tokens.or(said.output_tokens)?;
    let input_tokens = said.input_tokens.unwrap_or_default();
    let output_tokens = said.output_tokens.unwrap_or_default();
    let input = said.input_tokens_details.unwrap_or_default();
    let output = said.output_tokens_details.unwrap_or_default();
    Some(Usage {
        input_tokens,
        output_tokens,
        cached_input_tokens: input.cached_tokens.unwrap_or_default().min(input_tokens),
        cache_write_tokens: input.cache_write_tokens.unwrap_or_default().min(input_tokens),
        reasoning_tokens: output.reasoning_tokens.unwrap_or_default().min(output_tokens),
        ..Usage::default()
    })
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
