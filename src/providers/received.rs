//! What every adapter does with what it received before it hands it on: NUL characters, which no
//! store keeps, are taken out of texts and escaped in calls, and every tool call gets arguments and
//! an id of its own.
//!
//! What is made up is made up deterministically. Whether arguments are JSON is not looked at here.

use serde_json::value::RawValue;

use super::failure::Reported;
use super::{Completion, RawToolCall};
use crate::bounds::json;

/// Why a 2xx answer is of no use.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It is not what the API answers, or it has no end.
    Malformed(String),
    /// It is an error that came with a success status.
    Error(Reported),
}

/// Most tool calls of one answer that are read.
pub(super) const MAX_CALLS: usize = 1024;
/// Largest arguments of one tool call that are read, in bytes.
pub(super) const MAX_ARGUMENTS: usize = 1 << 20;

/// Entries of any other list of an answer that are read, and what is read of tool calls: one too
/// many.
pub(super) const MAX_PARTS: usize = 4096;
pub(super) const CALLS_READ: usize = MAX_CALLS + 1;
/// Tokens that one answer can have taken; a server that reports more is mistaken.
const MAX_TOKENS: u64 = 1_000_000_000;

/// An answer within what can be counted and kept.
pub(super) fn bounded(mut completion: Completion) -> Result<Completion, Unusable> {
    if let Some(usage) = &mut completion.usage {
        for tokens in [
            &mut usage.input_tokens,
            &mut usage.output_tokens,
            &mut usage.cached_input_tokens,
            &mut usage.cache_write_tokens,
            &mut usage.reasoning_tokens,
        ] {
            *tokens = (*tokens).min(MAX_TOKENS);
        }
    }
    if completion.opaque.as_ref().is_some_and(|blocks| !json::is_shallow(&blocks.json)) {
        let message = format!("the answer is nested more than {} levels deep", json::MAX_NESTING);
        return Err(Unusable::Malformed(message));
    }
    Ok(completion)
}

impl Unusable {
    /// More calls than anybody asks for.
    pub(super) fn too_many_calls() -> Self {
        Self::Malformed(format!("the answer has more than {MAX_CALLS} tool calls"))
    }

    /// More arguments than anybody reads.
    pub(super) fn too_large_arguments() -> Self {
        Self::Malformed("the arguments of a tool call are larger than 1 MiB".into())
    }
}

/// A call with an id that none of the `earlier` ones has: the provider's own, or one made up of
/// `step` and place. Arguments that were left out are an empty object.
pub(super) fn tool_call(
    id: String,
    wire_name: String,
    arguments: String,
    earlier: &[RawToolCall],
    step: u32,
) -> RawToolCall {
    let taken = |id: &str| earlier.iter().any(|call| call.id == id);
    let mut id = text(id);
    if id.is_empty() || taken(&id) {
        id = format!("call_{step}_{}", earlier.len());
        while taken(&id) {
            id.push('_');
        }
    }
    let arguments =
        if arguments.trim().is_empty() { "{}".into() } else { marked(arguments, "\\u0000") };
    RawToolCall { id, wire_name: marked(wire_name, "\u{FFFD}"), arguments }
}

/// The value of a JSON string; nothing where it is something else.
pub(super) fn string(raw: &RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// Text in which something else stands for NUL: what a call says is not made into another call.
fn marked(text: String, mark: &str) -> String {
    if text.contains('\0') { text.replace('\0', mark) } else { text }
}

/// Text without NUL.
pub(super) fn text(mut text: String) -> String {
    if text.contains('\0') {
        text.retain(|c| c != '\0');
    }
    text
}
