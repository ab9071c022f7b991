//! Token estimates: four bytes count as one token.
//!
//! Used before a call to reserve its budget, and after a call whose provider reported no usage.
//! Estimated usage is marked as such.

use super::{Completion, RawToolCall, ToolOffer};
use crate::message::{Conversation, Turn, Usage};

pub fn tokens(bytes: usize) -> u64 {
    u64::try_from(bytes.div_ceil(4)).unwrap_or(u64::MAX)
}

/// Tokens of a conversation, without offered tools.
pub fn of_conversation(conversation: &Conversation) -> u64 {
    tokens(bytes(conversation))
}

/// Bytes of a conversation: system prompt and turns.
pub fn bytes(conversation: &Conversation) -> usize {
    conversation.system().len() + conversation.turns().iter().map(turn_bytes).sum::<usize>()
}

pub fn of_tools(offers: &[ToolOffer]) -> u64 {
    let len = |offer: &ToolOffer| {
        offer.name.len() + offer.told().len() + offer.input_schema.sent().json_len()
    };
    tokens(offers.iter().map(len).sum())
}

pub(super) fn of_answer(text: &str, calls: &[RawToolCall]) -> u64 {
    tokens(
        text.len()
            + calls.iter().map(|call| call.wire_name.len() + call.arguments.len()).sum::<usize>(),
    )
}

/// The estimated usage of a call.
pub(super) fn usage(
    conversation: &Conversation,
    tools: &[ToolOffer],
    completion: &Completion,
) -> Usage {
    let output = of_answer(&completion.text, &completion.tool_calls)
        + tokens(completion.thinking.as_ref().map_or(0, String::len));
    with_output(conversation, tools, output)
}

/// The estimated usage of a call that wrote so many tokens.
pub(super) fn with_output(
    conversation: &Conversation,
    tools: &[ToolOffer],
    output_tokens: u64,
) -> Usage {
    Usage {
        input_tokens: of_conversation(conversation) + of_tools(tools),
        output_tokens,
        estimated: true,
        ..Usage::default()
    }
}

/// Bytes of a turn: text, calls and results, without opaque blocks.
pub fn turn_bytes(turn: &Turn) -> usize {
    match turn {
        Turn::User(text) => text.len(),
        Turn::Assistant(turn) => {
            let calls =
                turn.message().tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
            let results = turn.results().iter().map(|result| result.content.len());
            turn.message().text.len() + calls.sum::<usize>() + results.sum::<usize>()
        }
    }
}
