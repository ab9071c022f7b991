//! Normalises what every adapter receives: NUL characters, which PostgreSQL does not store, are
//! removed from texts and escaped in calls, and every tool call gets arguments and a unique id.
//!
//! Generated values are deterministic. Arguments are not parsed here.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::failure::Reported;
use super::{Completion, RawToolCall};
use crate::bounds::json;
use crate::message::Usage;

/// Why a 2xx answer cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unusable {
    /// It does not follow the API, or is incomplete.
    Malformed(String),
    /// It holds an error in spite of the success status.
    Error(Reported),
}

/// Most tool calls of one answer; the rest is left out.
pub(super) const MAX_CALLS: usize = 1024;
/// Longest name of a called tool, in bytes; no tool has one as long, and the rest is dropped.
const MAX_NAME: usize = 256;

/// Most entries of any other list of an answer.
pub(super) const MAX_PARTS: usize = 4096;
/// Tool calls that are read: one too many, to notice that there are more.
pub(super) const CALLS_READ: usize = MAX_CALLS + 1;
/// Most tokens of one answer; larger numbers are capped.
const MAX_TOKENS: u64 = 1_000_000_000;

/// Caps the usage of an answer and rejects opaque blocks that are nested too deeply to be stored.
pub(super) fn bounded(mut completion: Completion) -> Result<Completion, Unusable> {
    completion.usage = completion.usage.map(capped);
    if completion.opaque.as_ref().is_some_and(|blocks| !json::is_shallow(&blocks.json)) {
        let message = format!("the answer is nested more than {} levels deep", json::MAX_NESTING);
        return Err(Unusable::Malformed(message));
    }
    Ok(completion)
}

/// The member `usage` of an answer, even if the rest of it is unusable.
pub(super) fn member_usage(body: &[u8]) -> Option<&RawValue> {
    #[derive(Deserialize)]
    struct Answer<'a> {
        #[serde(borrow)]
        usage: Option<&'a RawValue>,
    }
    serde_json::from_slice::<Answer<'_>>(body).ok()?.usage
}

/// Whether a usage may be true. Some servers report zeros where they have not counted.
pub(super) fn is_believable(usage: &Usage) -> bool {
    usage.input_tokens > 0 || usage.output_tokens > 0
}

/// Believable numbers of tokens.
pub(super) fn capped(mut usage: Usage) -> Usage {
    for tokens in [
        &mut usage.input_tokens,
        &mut usage.output_tokens,
        &mut usage.cached_input_tokens,
        &mut usage.cache_write_tokens,
        &mut usage.reasoning_tokens,
    ] {
        *tokens = (*tokens).min(MAX_TOKENS);
    }
    usage
}

/// Removes the calls beyond [`MAX_CALLS`]; returns a note about it if there were any.
pub(super) fn leave_out_calls(completion: &mut Completion) -> Option<String> {
    let has_more = completion.tool_calls.len() > MAX_CALLS;
    completion.tool_calls.truncate(MAX_CALLS);
    has_more.then(|| {
        format!(
            "An answer of the model has more than {MAX_CALLS} tool calls: the rest was left out."
        )
    })
}

/// A call with an id that none of the `earlier` ones has: the provider's own, or one generated from
/// `step` and place. Missing arguments become an empty object.
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
        if arguments.trim().is_empty() { "{}".into() } else { replace_nul(arguments, "\\u0000") };
    let mut wire_name = replace_nul(wire_name, "\u{FFFD}");
    wire_name.truncate(wire_name.floor_char_boundary(MAX_NAME));
    RawToolCall { id, wire_name, arguments }
}

/// The value of a JSON string; `None` for other JSON.
pub(super) fn string(raw: &RawValue) -> Option<String> {
    serde_json::from_str(raw.get()).ok()
}

/// Replaces NUL, so that a call does not silently become a different call.
fn replace_nul(text: String, mark: &str) -> String {
    if text.contains('\0') { text.replace('\0', mark) } else { text }
}

/// Text without NUL.
pub(super) fn text(mut text: String) -> String {
    if text.contains('\0') {
        text.retain(|c| c != '\0');
    }
    text
}
