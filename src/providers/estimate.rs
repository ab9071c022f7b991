//! Token estimates: four bytes count as one token.
//!
//! Used before a call to reserve its budget, and after a call whose provider reported no usage.
//! Estimated usage is marked as such. What a conversation takes depends on who reads it: `readers`
//! are models, each as `provider/model`. Opaque blocks count where one of them may get them back,
//! and always where no reader is named.

use super::{Completion, RawToolCall, ToolOffer, opaque};
use crate::message::{AssistantMessage, Conversation, Turn, Usage};
use crate::model::ProviderKind;

pub fn tokens(bytes: usize) -> u64 {
    u64::try_from(bytes.div_ceil(4)).unwrap_or(u64::MAX)
}

/// Tokens of a conversation, without offered tools.
pub fn of_conversation(conversation: &Conversation, readers: &[String]) -> u64 {
    tokens(bytes(conversation, readers))
}

/// Bytes of a conversation: system prompt and turns.
pub fn bytes(conversation: &Conversation, readers: &[String]) -> usize {
    let turns = conversation.turns().iter().map(|turn| turn_bytes(turn, readers));
    conversation.system().len() + turns.sum::<usize>()
}

pub fn of_tools(offers: &[ToolOffer]) -> u64 {
    let len = |offer: &ToolOffer| {
        offer.name.len() + offer.full_description().len() + offer.input_schema.sent().json_len()
    };
    tokens(offers.iter().map(len).sum())
}

pub(super) fn of_answer(text: &str, calls: &[RawToolCall]) -> u64 {
    tokens(
        text.len()
            + calls.iter().map(|call| call.wire_name.len() + call.arguments.len()).sum::<usize>(),
    )
}

/// The estimated usage of a call of this model, as `provider/model`.
pub(super) fn usage(
    conversation: &Conversation,
    tools: &[ToolOffer],
    completion: &Completion,
    model: String,
) -> Usage {
    let output = of_answer(&completion.text, &completion.tool_calls)
        + tokens(completion.thinking.as_ref().map_or(0, String::len));
    with_output(conversation, tools, output, model)
}

/// The estimated usage of a call of this model that wrote so many tokens.
pub(super) fn with_output(
    conversation: &Conversation,
    tools: &[ToolOffer],
    output_tokens: u64,
    model: String,
) -> Usage {
    Usage {
        input_tokens: of_conversation(conversation, &[model]) + of_tools(tools),
        output_tokens,
        estimated: true,
        ..Usage::default()
    }
}

/// Bytes of a turn: what the model said, and results.
pub fn turn_bytes(turn: &Turn, readers: &[String]) -> usize {
    match turn {
        Turn::User(text) => text.len(),
        Turn::Assistant(turn) => {
            let results = turn.results().iter().map(|result| result.content.len());
            message_bytes(turn.message(), readers) + results.sum::<usize>()
        }
    }
}

fn message_bytes(message: &AssistantMessage, readers: &[String]) -> usize {
    let calls = message.tool_calls.iter().map(|call| call.name.len() + call.arguments.len());
    let calls = calls.sum::<usize>();
    let said = message.text.len() + calls;
    let kept = message.opaque.as_ref().and_then(|blocks| {
        opaque::may_be_sent(blocks, readers).map(|written_in| (written_in, blocks.json.len()))
    });
    match kept {
        None => said,
        // The whole answer.
        Some((ProviderKind::OpenaiResponses, kept)) => kept.max(said),
        // The whole answer, with marks in the places of calls.
        Some((ProviderKind::Anthropic, kept)) => kept + calls,
        // What goes beside text and calls.
        Some((_, kept)) => kept + said,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::{CallTarget, OpaqueBlocks, ToolCall};

    #[test]
    fn what_goes_back_counts_once_and_only_for_its_reader() {
        const ANTHROPIC: &str = r#"[{"type":"thinking"},{"type":"text","text":"said"}]"#;
        const RESPONSES: &str = r#"[{"type":"reasoning"},{"type":"message","content":"said"}]"#;
        const CHAT: &str = r#"{"model":"m","reasoning":"r"}"#;
        let call = ToolCall {
            id: uuid::Uuid::nil(),
            provider_id: "c".into(),
            name: "t".into(),
            arguments: "{}".into(),
            target: CallTarget::Tool,
        };
        for (json, own) in [
            (ANTHROPIC, ANTHROPIC.len() + 3),
            (RESPONSES, RESPONSES.len()),
            (CHAT, CHAT.len() + 7),
            (r#"{"thinking":"t"}"#, 16 + 7),
        ] {
            let message = AssistantMessage {
                text: "said".into(),
                tool_calls: vec![call.clone()],
                opaque: Some(OpaqueBlocks { provider: "p".into(), json: json.into() }),
                ..AssistantMessage::default()
            };
            let bytes = |reader: &str| message_bytes(&message, &[reader.to_owned()]);
            assert_eq!((bytes("p/m"), bytes("q/m")), (own, 7), "{json}");
            assert_eq!(message_bytes(&message, &[]), own, "{json}");
        }
    }
}
