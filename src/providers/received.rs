//! What every adapter does with what it received before it hands it on: NUL characters, which no
//! store keeps, are taken out, and every tool call gets arguments and an id of its own.
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
    let arguments = without_escaped_nul(text(arguments));
    let arguments = if arguments.trim().is_empty() { "{}".into() } else { arguments };
    RawToolCall { id, wire_name: text(wire_name), arguments }
}

/// The value of a JSON string; nothing where it is something else.
pub(super) fn string(raw: &RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// Text without NUL.
pub(super) fn text(mut text: String) -> String {
    if text.contains('\0') {
        text.retain(|c| c != '\0');
    }
    text
}

/// Takes `\u0000` out of JSON text. Behind a broken `\u` escape the text is left alone: it is not
/// JSON, and taking something out could make it JSON that holds NUL.
fn without_escaped_nul(json: String) -> String {
    const NUL: &str = "\\u0000";
    if !json.contains(NUL) {
        return json;
    }
    let mut clean = String::with_capacity(json.len());
    let mut rest = json.as_str();
    while let Some(at) = rest.find('\\') {
        clean.push_str(&rest[..at]);
        rest = &rest[at..];
        if let Some(after) = rest.strip_prefix(NUL) {
            rest = after;
            continue;
        }
        let mut chars = rest.chars();
        let escape_len = 1 + chars.nth(1).map_or(0, char::len_utf8);
        let broken = rest.starts_with("\\u")
            && !rest.as_bytes().iter().skip(2).take(4).all(u8::is_ascii_hexdigit);
        if broken {
            break;
        }
        clean.push_str(&rest[..escape_len]);
        rest = &rest[escape_len..];
    }
    clean.push_str(rest);
    clean
}
