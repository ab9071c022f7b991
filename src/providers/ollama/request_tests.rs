//! What goes over the wire, whole bodies at a time.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::message::{CallTarget, Conversation, OpaqueBlocks, ToolResult};
use crate::providers::{Capabilities, Delta, Deltas};

fn call(id: u128, name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: Uuid::from_u128(id),
        provider_id: format!("call_{id}"),
        name: name.into(),
        arguments: arguments.into(),
        target: CallTarget::Tool,
    }
}

fn result(id: u128, content: &str) -> ToolResult {
    ToolResult::of_service(Uuid::from_u128(id), content, false)
}

fn sent(request: &ModelRequest<'_>) -> Value {
    serde_json::from_slice(&body(request, "ollama").unwrap()).unwrap()
}

fn plain<'a>(conversation: &'a Conversation, names: &'a WireNames) -> ModelRequest<'a> {
    ModelRequest {
        model: "qwen3:4b",
        capabilities: &Capabilities::OLLAMA,
        conversation,
        tools: &[],
        names,
        tool_choice: ToolChoice::Required,
        parallel_tool_calls: Some(false),
        temperature: None,
        max_output_tokens: None,
        output_left: None,
        thinking: None,
        prompt_caching: true,
        deltas: Deltas::default(),
        output_schema: None,
        json_mode: false,
        options: crate::providers::Options::default(),
        inputs: &Value::Null,
        step: 1,
        trace: None,
    }
}

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}

#[test]
fn a_plain_question_never_lets_the_server_forget() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let expected = json!({"model": "qwen3:4b", "messages": [{"role": "user", "content": "hello"}],
        "options": {"num_ctx": 16_384}, "stream": false, "truncate": false, "shift": false});
    assert_eq!(sent(&plain(&conversation, &names)), expected);
}

#[test]
fn a_history_with_calls_keeps_its_pairs_and_its_thinking() {
    let mut conversation = conversation("be kind", "hello");
    let calls =
        vec![call(1, "mcp:time/now", r#"{"tz": "UTC"}"#), call(2, "no such tool!", r#"{"broken"#)];
    let kept = |provider: &str| {
        Some(OpaqueBlocks { provider: provider.into(), json: r#"{"thinking":"hm"}"#.into() })
    };
    let asked = |opaque| AssistantMessage {
        tool_calls: calls.clone(),
        opaque,
        ..AssistantMessage::default()
    };
    conversation
        .push_turn(asked(kept("ollama")), vec![result(1, "noon"), result(2, "Error: Unknown tool")])
        .unwrap();
    conversation.push_turn(asked(kept("other")), vec![result(1, ""), result(2, "x")]).unwrap();
    conversation
        .push_turn(AssistantMessage { text: "Noon.".into(), ..AssistantMessage::default() }, vec![])
        .unwrap();
    conversation.push_user("thanks");
    let names = WireNames::new(["mcp:time/now"]);
    let calls = |one: &str, two: &str| {
        json!([
            {"id": one, "type": "function",
                "function": {"index": 0, "name": "mcp__time__now", "arguments": {"tz": "UTC"}}},
            {"id": two, "type": "function",
                "function": {"index": 1, "name": "no_such_tool_", "arguments": {"malformed_json": "{\"broken"}}},
        ])
    };
    let result = |id: &str, name: &str, content: &str| json!({"role": "tool", "tool_name": name, "tool_call_id": id, "content": content});
    let (one, two) = (format!("call_{:032x}", 1), format!("call_{:032x}", 2));
    let expected = json!([
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls("call_1", "call_2")},
        result("call_1", "mcp__time__now", "noon"),
        result("call_2", "no_such_tool_", "Error: Unknown tool"),
        {"role": "assistant", "content": "", "tool_calls": calls(&one, &two)},
        result(&one, "mcp__time__now", ""),
        result(&two, "no_such_tool_", "x"),
        {"role": "assistant", "content": "Noon."},
        {"role": "user", "content": "thanks"},
    ]);
    assert_eq!(sent(&plain(&conversation, &names))["messages"], expected);
}

#[test]
fn tools_options_and_thinking_are_passed_on() {
    let (conversation, names) = (conversation("", "hello"), WireNames::new(["mcp:time/now"]));
    let schema = Arc::new(json!({"type": "object"}));
    let tools = [ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: schema.into(),
    }];
    let format = json!({"type": "object", "required": ["a"]});
    let follower = |_: Delta| {};
    let mut request = ModelRequest {
        tools: &tools,
        temperature: Some(0.5),
        max_output_tokens: Some(300),
        deltas: Deltas(Some(&follower)),
        output_schema: Some(&format),
        ..plain(&conversation, &names)
    };
    let body = sent(&request);
    let function = json!({"name": "mcp__time__now", "description": "Now.", "parameters": {"type": "object", "properties": {}}});
    assert_eq!(body["tools"], json!([{"type": "function", "function": function}]));
    assert_eq!(body["options"], json!({"num_ctx": 16_384, "num_predict": 300, "temperature": 0.5}));
    assert_eq!((&body["format"], &body["stream"]), (&format, &json!(true)));
    assert!(body.get("tool_choice").is_none() && body.get("think").is_none());
    let table = [
        (Thinking::default(), json!(true)),
        (Thinking { budget_tokens: Some(4000), effort: None }, json!(true)),
        (Thinking { budget_tokens: None, effort: Some(Effort::Max) }, json!("max")),
    ];
    for (thinking, expected) in table {
        request.thinking = Some(thinking);
        let body = sent(&request);
        assert_eq!((&body["think"], body["options"].get("temperature")), (&expected, None));
    }
    request.tool_choice = ToolChoice::None;
    assert!(sent(&request).get("tools").is_none(), "what may not be called is not offered");
}
