//! An `/api/chat` answer as a completion: one object, or one object per line with a piece each.
//!
//! The same fold reads both, since a whole answer is a stream of one line. An answer is complete
//! when a line has `done`, not at the end of the bytes. Calls come whole and with arguments as
//! objects; the presence of calls decides, since the server says `stop` either way.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::request::KeptThinking;
use crate::bounds::json::UpTo;
use crate::message::{FinishReason, OpaqueBlocks, Usage};
use crate::providers::normalization::{self, CALLS_READ, Unusable};
use crate::providers::{Completion, Delta, Deltas, RawToolCall, failure};

/// An incomplete answer.
#[derive(Debug, Default)]
pub(super) struct Fold {
    text: String,
    thinking: String,
    tool_calls: Vec<RawToolCall>,
    done: Option<Done>,
}

#[derive(Debug)]
struct Done {
    reason: String,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Line<'a> {
    #[serde(borrow)]
    message: Option<Message<'a>>,
    #[serde(default)]
    done: bool,
    done_reason: Option<String>,
    prompt_eval_count: Option<u64>,
    eval_count: Option<u64>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Message<'a> {
    content: Option<String>,
    thinking: Option<String>,
    #[serde(borrow)]
    tool_calls: Option<UpTo<Call<'a>, CALLS_READ>>,
}

#[derive(Deserialize)]
struct Call<'a> {
    id: Option<String>,
    #[serde(borrow)]
    function: Function<'a>,
}

#[derive(Deserialize)]
struct Function<'a> {
    #[serde(default)]
    name: String,
    #[serde(borrow)]
    arguments: Option<&'a RawValue>,
}

impl Fold {
    /// Whether the answer is complete; further lines are not read.
    pub(super) fn is_complete(&self) -> bool {
        self.done.is_some()
    }

    /// Adds one object and sends its deltas. `step` is part of the ids generated for calls without
    /// one.
    pub(super) fn line(
        &mut self,
        json: &[u8],
        step: u32,
        deltas: Deltas<'_>,
    ) -> Result<(), Unusable> {
        let line: Line = serde_json::from_slice(json).map_err(|error| {
            Unusable::Malformed(format!("the answer is not that of a chat: {error}"))
        })?;
        if line.error.is_some() {
            return Err(Unusable::Error(failure::read_body(json)));
        }
        if line.done {
            let usage = line.prompt_eval_count.or(line.eval_count).map(|_| Usage {
                input_tokens: line.prompt_eval_count.unwrap_or_default(),
                output_tokens: line.eval_count.unwrap_or_default(),
                ..Usage::default()
            });
            self.done = Some(Done { reason: line.done_reason.unwrap_or_default(), usage });
        }
        if let Some(message) = line.message {
            self.add(message, step, deltas);
        } else if !line.done {
            return Err(Unusable::Malformed("the answer has no message".into()));
        }
        Ok(())
    }

    fn add(&mut self, message: Message<'_>, step: u32, deltas: Deltas<'_>) {
        if let Some(thinking) = message.thinking.filter(|thinking| !thinking.is_empty()) {
            self.thinking.push_str(&thinking);
            deltas.send(Delta::Thinking(thinking));
        }
        if let Some(text) = message.content.filter(|text| !text.is_empty()) {
            self.text.push_str(&text);
            deltas.send(Delta::Text(text));
        }
        for call in message.tool_calls.unwrap_or_default() {
            let arguments = call.function.arguments.map(arguments_text).unwrap_or_default();
            if self.tool_calls.len() == CALLS_READ {
                break;
            }
            let id = call.id.unwrap_or_default();
            let call =
                normalization::tool_call(id, call.function.name, arguments, &self.tool_calls, step);
            deltas.send(Delta::ToolCall {
                index: self.tool_calls.len(),
                wire_name: Some(call.wire_name.clone()),
                arguments: call.arguments.clone(),
            });
            self.tool_calls.push(call);
        }
    }

    /// The usage of the answer, as far as it was reported.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.done.as_ref().and_then(|done| done.usage)
    }

    pub(super) fn completion(self, provider: &str) -> Result<Completion, Unusable> {
        let Some(done) = self.done else {
            return Err(Unusable::Malformed("the answer ended before it was done".into()));
        };
        let finish_reason = match done.reason.as_str() {
            "load" | "unload" => {
                return Err(Unusable::Malformed(format!(
                    "the server did nothing but {} the model",
                    done.reason
                )));
            }
            "length" => FinishReason::Length,
            _ if !self.tool_calls.is_empty() => FinishReason::ToolCalls,
            "stop" | "" => FinishReason::Stop,
            _ => FinishReason::Other,
        };
        let is_wanted_back = !self.thinking.is_empty() && !self.tool_calls.is_empty();
        let kept = is_wanted_back.then(|| {
            serde_json::to_string(&KeptThinking { thinking: self.thinking.as_str().into() })
        });
        Ok(Completion {
            text: normalization::text(self.text),
            opaque: kept
                .and_then(Result::ok)
                .map(|json| OpaqueBlocks { provider: provider.to_owned(), json }),
            thinking: Some(normalization::text(self.thinking))
                .filter(|thinking| !thinking.is_empty()),
            tool_calls: self.tool_calls,
            finish_reason,
            usage: done.usage,
        })
    }
}

/// Arguments are an object; some servers send it as a string.
fn arguments_text(raw: &RawValue) -> String {
    serde_json::from_str(raw.get()).unwrap_or_else(|_| raw.get().to_owned())
}

#[cfg(test)]
#[path = "response_tests.rs"]
mod tests;
