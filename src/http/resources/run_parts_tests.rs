//! The conversation as a list of messages.

use serde_json::json;

use super::*;
use crate::message::{AssistantMessage, CallTarget, OpaqueBlocks, ToolCall, ToolResult};

#[test]
fn messages_have_our_call_ids_only() {
    let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
    let call = |id, arguments: &str| ToolCall {
        id,
        provider_id: "call_secret".into(),
        name: "file_ops".into(),
        arguments: arguments.into(),
        target: CallTarget::Tool,
    };
    let result = |call_id, content: &str| ToolResult::of_service(call_id, content, false);
    let mut conversation = Conversation::new("You help.");
    conversation.push_user("{\"task\":\"t\"}");
    let message = AssistantMessage {
        text: "Let me look.".into(),
        tool_calls: vec![call(first, "{\"path\":\".\"}"), call(second, "{oops")],
        opaque: Some(OpaqueBlocks { provider: "x".into(), json: "[]".into() }),
        ..AssistantMessage::default()
    };
    conversation
        .push_turn(message, vec![result(first, "README.md"), result(second, "no JSON")])
        .unwrap();
    let done = AssistantMessage { text: "Done.".into(), ..AssistantMessage::default() };
    conversation.push_turn(done, Vec::new()).unwrap();

    assert_eq!(
        serde_json::to_value(messages(&conversation)).unwrap(),
        json!([
            {"role": "system", "content": "You help."},
            {"role": "user", "content": "{\"task\":\"t\"}"},
            {"role": "assistant", "content": "Let me look.", "tool_calls": [
                {"id": first, "name": "file_ops", "arguments": {"path": "."}},
                {"id": second, "name": "file_ops", "arguments": "{oops"},
            ]},
            {"role": "tool", "content": "README.md", "tool_call_id": first, "name": "file_ops"},
            {"role": "tool", "content": "no JSON", "tool_call_id": second, "name": "file_ops"},
            {"role": "assistant", "content": "Done."},
        ])
    );
}

#[test]
fn a_run_that_has_not_started_has_no_messages() {
    assert_eq!(messages(&Conversation::new("")), []);
}
