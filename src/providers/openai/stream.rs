//! Assembles a streamed Chat Completions answer and sends its deltas.
//!
//! Pure. An answer is complete only with a finish reason; the caller checks that `[DONE]` ended the
//! stream. Servers differ in how they cut tool calls: by index with the name in the first piece, as
//! OpenAI does; whole calls in one chunk; without an index, or with the same one for every call.
//! All of these give the same calls. [`response`](super::response) interprets the result.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::reasoning::Reasoning;
use super::response::{Function, Parts, call_text, content_text, usage};
use crate::bounds::json::{AtMost, UpTo};
use crate::message::Usage;
use crate::providers::adapter::Call;
use crate::providers::normalization::{self, CALLS_READ, MAX_PARTS, Unusable};
use crate::providers::{Completion, Delta, Deltas, failure};

#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(borrow)]
    choices: Option<AtMost<Choice<'a>, MAX_PARTS>>,
    #[serde(borrow)]
    usage: Option<&'a RawValue>,
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    index: Option<u32>,
    #[serde(borrow)]
    delta: Option<Piece<'a>>,
    finish_reason: Option<String>,
}

#[derive(Deserialize)]
struct Piece<'a> {
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
    tool_calls: Option<UpTo<CallPiece<'a>, CALLS_READ>>,
}

#[derive(Deserialize)]
struct CallPiece<'a> {
    index: Option<u64>,
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    #[serde(borrow)]
    function: Option<Function<'a>>,
    #[serde(borrow)]
    extra_content: Option<&'a RawValue>,
}

#[derive(Default)]
pub(super) struct Answer {
    text: String,
    /// Whether there was content, even if empty.
    has_content: bool,
    refusal: String,
    thinking: String,
    reasoning: Reasoning,
    calls: Vec<OpenCall>,
    finish_reason: Option<String>,
    usage: Option<Usage>,
}

#[derive(Default)]
struct OpenCall {
    /// The server's number for it.
    index: Option<u64>,
    id: String,
    name: String,
    arguments: ReceivedArguments,
    extra_content: Option<Box<RawValue>>,
}

/// The arguments of a call, as far as they have come.
#[derive(Default)]
struct ReceivedArguments {
    text: String,
    /// Objects and lists that are open at the end.
    depth: usize,
    in_string: bool,
    is_escaped: bool,
    /// Whether they hold more than white space.
    has_begun: bool,
    /// Whether they are JSON, if that is known. What is broken stays so, whatever follows.
    is_json: Option<bool>,
}

impl Answer {
    pub(super) fn take(&mut self, data: &[u8], deltas: Deltas<'_>) -> Result<(), Unusable> {
        let chunk: Chunk = serde_json::from_slice(data).map_err(|error| {
            Unusable::Malformed(format!("a chunk of the stream is not one: {error}"))
        })?;
        if chunk.error.is_some() {
            return Err(Unusable::Error(failure::read_embedded(data)));
        }
        self.usage = chunk.usage.and_then(usage).or(self.usage);
        let is_first = |choice: &Choice<'_>| choice.index.unwrap_or_default() == 0;
        for choice in chunk.choices.into_iter().flatten().filter(is_first) {
            if let Some(piece) = choice.delta {
                self.take_piece(piece, deltas)?;
            }
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        Ok(())
    }

    fn take_piece(&mut self, piece: Piece<'_>, deltas: Deltas<'_>) -> Result<(), Unusable> {
        let thinking = self.reasoning.add(piece.reasoning_content, piece.reasoning);
        let thinking = thinking.unwrap_or_default();
        self.reasoning.add_details(piece.reasoning_details);
        self.has_content |= piece.content.is_some();
        let text = piece.content.map(content_text).transpose()?.unwrap_or_default();
        let refusal = piece.refusal.unwrap_or_default();
        for (piece, whole, delta) in [
            (thinking, &mut self.thinking, Delta::Thinking as fn(String) -> Delta),
            (text, &mut self.text, Delta::Text),
            (refusal, &mut self.refusal, Delta::Text),
        ] {
            if !piece.is_empty() {
                let piece = normalization::text(piece);
                whole.push_str(&piece);
                deltas.send(delta(piece));
            }
        }
        for call in piece.tool_calls.into_iter().flatten() {
            self.take_call(call, deltas);
        }
        Ok(())
    }

    fn take_call(&mut self, piece: CallPiece<'_>, deltas: Deltas<'_>) {
        let id = piece.id.and_then(normalization::string).unwrap_or_default();
        let (name, arguments) =
            piece.function.map_or((None, None), |function| (function.name, function.arguments));
        let (name, arguments) =
            (name.unwrap_or_default(), arguments.map(call_text).unwrap_or_default());
        let open = match piece.index {
            Some(index) => self.calls.iter().rposition(|call| call.index == Some(index)),
            None if name.is_empty() => self.calls.len().checked_sub(1),
            None => None,
        };
        let continued =
            |at: &usize| self.calls.get_mut(*at).is_some_and(|call| call.continues(&id, &name));
        let at = match open.filter(continued) {
            Some(at) => at,
            None if self.calls.len() == CALLS_READ => return,
            None => {
                self.calls.push(OpenCall { index: piece.index, ..OpenCall::default() });
                self.calls.len() - 1
            }
        };
        let Some(call) = self.calls.get_mut(at) else { return };
        if call.id.is_empty() {
            call.id = id;
        }
        let is_named = call.name.is_empty() && !name.is_empty();
        if is_named {
            call.name.clone_from(&name);
        }
        call.arguments.push(&arguments);
        if let Some(extra) = piece.extra_content {
            call.extra_content = Some(extra.to_owned());
        }
        if is_named || !arguments.is_empty() {
            let wire_name = is_named.then(|| normalization::text(name));
            deltas.send(Delta::ToolCall {
                index: at,
                wire_name,
                arguments: normalization::text(arguments),
            });
        }
    }

    /// The usage of the answer, as far as it was reported.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.usage
    }

    /// The whole answer to a call, after `[DONE]`.
    pub(super) fn finish(self, call: Call<'_>) -> Result<Completion, Unusable> {
        if self.finish_reason.is_none() {
            return Err(Unusable::Malformed("the stream ended without a finish reason".into()));
        }
        let mut tool_calls = Vec::with_capacity(self.calls.len());
        let mut extra_content = Vec::with_capacity(self.calls.len());
        for OpenCall { id, name, arguments, extra_content: extra, .. } in self.calls {
            let arguments = arguments.text;
            tool_calls.push(normalization::tool_call(id, name, arguments, &tool_calls, call.step));
            extra_content.push(extra);
        }
        let given = |text: String| Some(text).filter(|text| !text.is_empty());
        Parts {
            content: self.has_content.then_some(self.text),
            refusal: given(self.refusal),
            thinking: given(self.thinking),
            reasoning: self.reasoning,
            tool_calls,
            extra_content,
            finish_reason: self.finish_reason,
            usage: self.usage,
        }
        .complete(call)
    }
}

impl OpenCall {
    /// Whether a piece with the same index belongs to this call. It begins another one if it has
    /// another id or, without an id, a name although this call's arguments are complete.
    fn continues(&mut self, id: &str, name: &str) -> bool {
        if name.is_empty() || self.name.is_empty() {
            return true;
        }
        if !id.is_empty() && !self.id.is_empty() {
            return id == self.id;
        }
        name == self.name && !self.arguments.are_complete()
    }
}

impl ReceivedArguments {
    fn push(&mut self, piece: &str) {
        for byte in piece.bytes() {
            match byte {
                _ if self.is_escaped => self.is_escaped = false,
                b'\\' if self.in_string => self.is_escaped = true,
                b'"' => self.in_string = !self.in_string,
                _ if self.in_string => {}
                b'[' | b'{' => self.depth += 1,
                b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            self.has_begun |= !byte.is_ascii_whitespace();
        }
        self.text.push_str(piece);
        self.is_json = self.is_json.filter(|is_json| !is_json);
    }

    /// Whether they are JSON. They are parsed only if they may be, and not once more for each piece.
    fn are_complete(&mut self) -> bool {
        let may_be = self.has_begun && self.depth == 0 && !self.in_string;
        if self.is_json.is_none() && may_be {
            let parsed = serde_json::from_str::<IgnoredAny>(&self.text);
            self.is_json = match parsed {
                Ok(_) => Some(true),
                Err(error) => (!error.is_eof()).then_some(false),
            };
        }
        self.is_json == Some(true)
    }
}

#[cfg(test)]
#[path = "stream_tests.rs"]
mod tests;
