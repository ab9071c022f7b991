//! Assembles a streamed Messages answer and sends its deltas.
//!
//! Events are folded into the blocks of a whole answer. An answer is complete with `message_stop`,
//! a stop reason and the end of every block, not at the end of the bytes. Unknown events and pieces
//! are ignored, as the API asks; a block with an unknown piece is not kept.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::response::{self, Block, Stop, ThinkingBlock, WireUsage, malformed};
use crate::message::Usage;
use crate::providers::normalization::Unusable;
use crate::providers::{Completion, Delta, Deltas};

/// An incomplete answer.
#[derive(Debug, Default)]
pub(super) struct Fold {
    blocks: Vec<Piecewise>,
    calls: usize,
    stop: Stop,
    usage: WireUsage,
    is_complete: bool,
}

/// An incomplete block.
#[derive(Debug)]
struct Piecewise {
    kind: Kind,
    has_ended: bool,
}

#[derive(Debug)]
enum Kind {
    Text(String),
    Thinking(ThinkingBlock),
    /// `start` is the input that came with the block's beginning.
    ToolUse {
        index: usize,
        id: String,
        name: String,
        start: String,
        input: String,
    },
    /// `json` is the block's beginning; `is_lost` after an unknown piece.
    Other {
        json: String,
        input: String,
        is_lost: bool,
    },
}

#[derive(Deserialize)]
struct Event<'a> {
    r#type: String,
    index: Option<usize>,
    #[serde(borrow)]
    message: Option<&'a RawValue>,
    #[serde(borrow)]
    content_block: Option<&'a RawValue>,
    #[serde(borrow)]
    delta: Option<&'a RawValue>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct MessageStart<'a> {
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Piece {
    r#type: String,
    text: String,
    thinking: String,
    signature: String,
    partial_json: String,
}

impl Fold {
    /// Whether the answer is complete; further events are not read.
    pub(super) fn is_complete(&self) -> bool {
        self.is_complete
    }

    /// Adds the data of one event and sends its deltas.
    pub(super) fn event(&mut self, data: &[u8], deltas: Deltas<'_>) -> Result<(), Unusable> {
        let event: Event = serde_json::from_slice(data)
            .map_err(|error| malformed("an event is not JSON", &error))?;
        match event.r#type.as_str() {
            "message_start" => {
                let start: Option<MessageStart> =
                    event.message.and_then(|raw| serde_json::from_str(raw.get()).ok());
                self.update_usage(start.and_then(|start| start.usage));
            }
            "content_block_start" => {
                let raw = event
                    .content_block
                    .ok_or_else(|| Unusable::Malformed("a block begins with nothing".into()))?;
                if event.index != Some(self.blocks.len()) {
                    return Err(Unusable::Malformed(
                        "the blocks of the answer are out of order".into(),
                    ));
                }
                self.begin(raw, deltas)?;
            }
            "content_block_delta" => {
                let piece = event.delta.map(|raw| serde_json::from_str(raw.get())).transpose();
                let piece = piece
                    .map_err(|error| malformed("a piece of a block cannot be read", &error))?;
                self.open(event.index)?.kind.add(&piece.unwrap_or_default(), deltas);
            }
            "content_block_stop" => self.open(event.index)?.has_ended = true,
            "message_delta" => {
                let stop: Option<Stop> =
                    event.delta.and_then(|raw| serde_json::from_str(raw.get()).ok());
                self.stop = stop
                    .filter(|stop| stop.stop_reason.is_some())
                    .unwrap_or(std::mem::take(&mut self.stop));
                self.update_usage(event.usage);
            }
            "message_stop" => {
                if !self.blocks.iter().all(|block| block.has_ended) {
                    return Err(Unusable::Malformed("the answer ended within a block".into()));
                }
                self.is_complete = true;
            }
            "error" => return Err(Unusable::Error(response::reported(data))),
            _ => {}
        }
        Ok(())
    }

    /// The usage, once its final part was reported: the first event reports usage too, but hardly any
    /// output.
    pub(super) fn whole_usage(&self) -> Option<Usage> {
        self.stop.stop_reason.as_ref()?;
        self.usage.normalised()
    }

    /// `step` is part of the ids generated for calls without one.
    pub(super) fn completion(self, provider: &str, step: u32) -> Result<Completion, Unusable> {
        if !self.is_complete {
            return Err(Unusable::Malformed("the stream ended before the answer did".into()));
        }
        let blocks = self.blocks.into_iter().filter_map(|block| block.kind.whole()).collect();
        response::completion(blocks, self.stop, self.usage, provider, step)
    }

    /// Malformed usage is ignored: the answer is still good.
    fn update_usage(&mut self, usage: Option<&RawValue>) {
        if let Some(Ok(usage)) = usage.map(|raw| serde_json::from_str(raw.get())) {
            self.usage.update(usage);
        }
    }

    fn open(&mut self, index: Option<usize>) -> Result<&mut Piecewise, Unusable> {
        let block =
            index.and_then(|index| self.blocks.get_mut(index)).filter(|block| !block.has_ended);
        block.ok_or_else(|| Unusable::Malformed("a piece belongs to no block".into()))
    }

    fn begin(&mut self, raw: &RawValue, deltas: Deltas<'_>) -> Result<(), Unusable> {
        let kind = match response::block(raw)? {
            Block::Text(text) => {
                send(&text, Delta::Text, deltas);
                Kind::Text(text)
            }
            Block::Thinking { text, .. } => {
                send(&text, Delta::Thinking, deltas);
                Kind::Thinking(serde_json::from_str(raw.get()).unwrap_or_default())
            }
            Block::ToolUse { id, name, input: start } => {
                let index = self.calls;
                self.calls += 1;
                deltas.send(Delta::ToolCall {
                    index,
                    wire_name: Some(name.clone()),
                    arguments: String::new(),
                });
                Kind::ToolUse { index, id, name, start, input: String::new() }
            }
            Block::Other(json) => Kind::Other { json, input: String::new(), is_lost: false },
        };
        self.blocks.push(Piecewise { kind, has_ended: false });
        Ok(())
    }
}

impl Kind {
    fn add(&mut self, piece: &Piece, deltas: Deltas<'_>) {
        match (self, piece.r#type.as_str()) {
            (Self::Text(text), "text_delta") => {
                text.push_str(&piece.text);
                send(&piece.text, Delta::Text, deltas);
            }
            (Self::Thinking(block), "thinking_delta") => {
                block.thinking.push_str(&piece.thinking);
                send(&piece.thinking, Delta::Thinking, deltas);
            }
            (Self::Thinking(block), "signature_delta") => {
                block.signature.push_str(&piece.signature);
            }
            (Self::ToolUse { index, input, .. }, "input_json_delta") => {
                input.push_str(&piece.partial_json);
                let call =
                    |arguments| Delta::ToolCall { index: *index, wire_name: None, arguments };
                send(&piece.partial_json, call, deltas);
            }
            (Self::Other { input, .. }, "input_json_delta") => input.push_str(&piece.partial_json),
            (Self::Other { is_lost, .. }, _) => *is_lost = true,
            _ => {}
        }
    }

    /// The block; `None` if it cannot be shown or sent back.
    fn whole(self) -> Option<Block> {
        Some(match self {
            Self::Text(text) => Block::Text(text),
            Self::Thinking(block) => block.whole(),
            Self::ToolUse { id, name, start, input, .. } => Block::ToolUse {
                id,
                name,
                input: if input.trim().is_empty() { start } else { input },
            },
            Self::Other { is_lost: true, .. } => return None,
            Self::Other { json, input, .. } if input.is_empty() => Block::Other(json),
            Self::Other { json, input, .. } => {
                let mut block: Map<String, Value> = serde_json::from_str(&json).ok()?;
                block.insert("input".into(), serde_json::from_str(&input).ok()?);
                Block::Other(Value::Object(block).to_string())
            }
        })
    }
}

fn send(piece: &str, delta: impl FnOnce(String) -> Delta, deltas: Deltas<'_>) {
    if !piece.is_empty() && deltas.are_wanted() {
        deltas.send(delta(piece.to_owned()));
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
