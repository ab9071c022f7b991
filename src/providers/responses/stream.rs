//! Reads a streamed Responses answer: sends deltas, and takes the answer from the final event.
//!
//! Pure. A stream without `response.completed` or `response.incomplete` is broken. Completed items
//! are kept for servers whose final event omits them. Unknown events are ignored.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::response;
use crate::message::Usage;
use crate::providers::normalization::{self, Unusable};
use crate::providers::{Completion, Delta, Deltas, failure};

#[derive(Deserialize)]
struct Event<'a> {
    #[serde(borrow)]
    r#type: Cow<'a, str>,
    output_index: Option<u64>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    item: Option<&'a RawValue>,
    #[serde(borrow)]
    response: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Item {
    r#type: String,
    name: Option<String>,
}

#[derive(Default)]
pub(super) struct Answer {
    /// Completed items.
    items: Vec<Box<RawValue>>,
    /// The output index of each call.
    calls: Vec<u64>,
    /// The usage that the final event reports.
    usage: Option<Usage>,
}

impl Answer {
    /// Takes the data of one event; the final event gives the completion.
    pub(super) fn take(
        &mut self,
        data: &[u8],
        deltas: Deltas<'_>,
        provider: &str,
        step: u32,
    ) -> Result<Option<Completion>, Unusable> {
        let event: Event = serde_json::from_slice(data).map_err(|error| {
            Unusable::Malformed(format!("an event of the stream is not one: {error}"))
        })?;
        let piece =
            || normalization::text(event.delta.and_then(normalization::string).unwrap_or_default());
        match event.r#type.as_ref() {
            "response.output_text.delta" | "response.refusal.delta" => {
                deltas.send(Delta::Text(piece()));
            }
            "response.reasoning_summary_text.delta" | "response.reasoning_text.delta" => {
                deltas.send(Delta::Thinking(piece()));
            }
            "response.output_item.added" => self.begin(event.output_index, event.item, deltas),
            "response.function_call_arguments.delta" => {
                if let Some(index) =
                    self.calls.iter().rposition(|place| Some(*place) == event.output_index)
                {
                    deltas.send(Delta::ToolCall { index, wire_name: None, arguments: piece() });
                }
            }
            "response.output_item.done" => self.items.extend(event.item.map(ToOwned::to_owned)),
            "response.completed" | "response.incomplete" | "response.failed" => {
                let Some(answer) = event.response else {
                    return Err(Unusable::Malformed("the stream ended without a response".into()));
                };
                self.usage = response::usage_of(answer.get().as_bytes());
                return response::parse_with(answer.get().as_bytes(), &self.items, provider, step)
                    .map(Some);
            }
            "error" => return Err(Unusable::Error(failure::read_embedded(data))),
            _ => {}
        }
        Ok(None)
    }

    /// The usage of the answer, as far as it was reported.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// Sends the name of a call, which comes with its item.
    fn begin(&mut self, place: Option<u64>, item: Option<&RawValue>, deltas: Deltas<'_>) {
        let Some(item) = item.and_then(|item| serde_json::from_str::<Item>(item.get()).ok()) else {
            return;
        };
        if item.r#type == "function_call" && self.calls.len() < normalization::MAX_CALLS {
            let index = self.calls.len();
            self.calls.push(place.unwrap_or_default());
            let wire_name = Some(normalization::text(item.name.unwrap_or_default()));
            deltas.send(Delta::ToolCall { index, wire_name, arguments: String::new() });
        }
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
