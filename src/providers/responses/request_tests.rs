//! What goes over the wire, whole bodies at a time.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::message::{
    AssistantMessage, CallTarget, Conversation, OpaqueBlocks, ToolCall, ToolResult,
};
use crate::providers::{Capabilities, Deltas};
use crate::run::{Effort, Thinking};

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
    serde_json::from_slice(&body(request, "own").unwrap()).unwrap()
}

fn plain<'a>(conversation: &'a Conversation, names: &'a WireNames) -> ModelRequest<'a> {
    ModelRequest {
        model: "m",
        capabilities: &Capabilities::OPENAI,
        conversation,
        tools: &[],
        names,
        tool_choice: ToolChoice::Required,
        parallel_tool_calls: Some(false),
        temperature: None,
        max_output_tokens: None,
        output_left: None,
        thinking: None,
        prompt_caching: false,
        deltas: Deltas::default(),
        output_schema: None,
        json_mode: false,
        options: crate::providers::Options::default(),
        inputs: &Value::Null,
        step: 1,
        trace: None,
    }
}

#[test]
fn a_plain_question_stores_nothing_and_keeps_reasoning_possible() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let expected = json!({"model": "m", "input": [{"role": "user", "content": "hello"}],
        "include": ["reasoning.encrypted_content"], "store": false});
    assert_eq!(sent(&plain(&conversation, &names)), expected);
    let capabilities = Capabilities { thinking: ThinkingStyle::None, ..Capabilities::OPENAI };
    let request = ModelRequest { capabilities: &capabilities, ..plain(&conversation, &names) };
    assert_eq!(sent(&request).get("include"), None, "models that do not reason refuse it");
}

#[test]
fn own_items_go_back_as_they_came_and_others_are_made_again() {
    let mut conversation = conversation("be kind", "hello");
    let items = r#"[{"type":"reasoning", "encrypted_content":"x\u002b"},{"type":"function_call","call_id":"call_1"}]"#;
    for provider in ["own", "other"] {
        let opaque = Some(OpaqueBlocks { provider: provider.into(), json: items.into() });
        let tool_calls = vec![call(1, "mcp:time/now", "{"), call(2, "t", "{}")];
        let asked = AssistantMessage {
            text: "Look:".into(),
            tool_calls,
            opaque,
            ..AssistantMessage::default()
        };
        conversation.push_turn(asked, vec![result(1, "noon"), result(2, "ok")]).unwrap();
    }
    conversation.push_turn(AssistantMessage::default(), vec![]).unwrap();
    conversation.push_user("thanks");
    let names = WireNames::new(["mcp:time/now", "t"]);
    let output = |id: &str, output: &str| json!({"type": "function_call_output", "call_id": id, "output": output});
    let (one, two) = (format!("call_{:032x}", 1), format!("call_{:032x}", 2));
    let expected = json!([
        {"role": "user", "content": "hello"},
        {"type": "reasoning", "encrypted_content": "x+"},
        {"type": "function_call", "call_id": "call_1"},
        output("call_1", "noon"),
        output("call_2", "ok"),
        {"role": "assistant", "content": "Look:"},
        {"type": "function_call", "call_id": one, "name": "mcp__time__now", "arguments": "{"},
        {"type": "function_call", "call_id": two, "name": "t", "arguments": "{}"},
        output(&one, "noon"),
        output(&two, "ok"),
        {"role": "user", "content": "thanks"},
    ]);
    let request = plain(&conversation, &names);
    let body = sent(&request);
    assert_eq!((&body["instructions"], &body["input"]), (&json!("be kind"), &expected));
    let text = String::from_utf8(super::body(&request, "own").unwrap()).unwrap();
    assert!(text.contains(&items[1..items.len() - 1]), "byte for byte: {text}");

    // A model that cannot reason is sent no reasoning, and no ids that belong to it.
    let capabilities = Capabilities { thinking: ThinkingStyle::None, ..Capabilities::OPENAI };
    let body = sent(&ModelRequest { capabilities: &capabilities, ..request });
    let expected = json!([
        {"role": "assistant", "content": "Look:"},
        {"type": "function_call", "call_id": "call_1", "name": "mcp__time__now", "arguments": "{"},
        {"type": "function_call", "call_id": "call_2", "name": "t", "arguments": "{}"},
        output("call_1", "noon"),
        output("call_2", "ok"),
    ]);
    assert_eq!(body["input"].as_array().unwrap()[1..6], expected.as_array().unwrap()[..]);
}

#[test]
fn reasoning_that_led_to_nothing_is_not_sent_back() {
    let mut conversation = conversation("", "hello");
    let items =
        r#"[{"type":"message","phase":"commentary"},{"type":"reasoning","encrypted_content":"x"}]"#;
    let opaque = Some(OpaqueBlocks { provider: "own".into(), json: items.into() });
    let cut_off = AssistantMessage { text: "Look:".into(), opaque, ..AssistantMessage::default() };
    conversation.push_turn(cut_off, vec![]).unwrap();
    conversation.push_user("go on");
    let names = WireNames::default();
    let expected = json!([
        {"role": "user", "content": "hello"},
        {"type": "message", "phase": "commentary"},
        {"role": "user", "content": "go on"},
    ]);
    assert_eq!(sent(&plain(&conversation, &names))["input"], expected);
}

#[test]
fn tools_choice_thinking_and_schema_are_passed_on() {
    let (conversation, names) = (conversation("", "hello"), WireNames::new(["mcp:time/now"]));
    let closed = Arc::new(
        json!({"type": "object", "required": [], "additionalProperties": false, "properties": {}}),
    );
    let open = Arc::new(json!({"type": "object", "properties": {"a": {}}}));
    let offer = |schema: &Arc<Value>| ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: Arc::clone(schema).into(),
    };
    let tools = [offer(&closed), offer(&open)];
    let follower = |_| {};
    let capabilities = Capabilities { strict_schemas: true, ..Capabilities::OPENAI };
    let mut request = ModelRequest {
        capabilities: &capabilities,
        tools: &tools,
        temperature: Some(0.5),
        max_output_tokens: Some(300),
        thinking: Some(Thinking { budget_tokens: None, effort: Some(Effort::Low) }),
        output_schema: Some(&closed),
        deltas: Deltas(Some(&follower)),
        ..plain(&conversation, &names)
    };
    let body = sent(&request);
    let tool = |parameters: &Value, strict: bool| {
        json!({"type": "function", "name": "mcp__time__now",
        "description": "Now.", "parameters": parameters, "strict": strict})
    };
    assert_eq!(body["tools"], json!([tool(&closed, true), tool(&open, false)]));
    assert_eq!(body["reasoning"], json!({"effort": "low", "summary": "auto"}));
    let format = json!({"type": "json_schema", "name": "output", "schema": closed, "strict": true});
    assert_eq!(body["text"], json!({ "format": format }));
    assert_eq!((&body["max_output_tokens"], body.get("temperature")), (&json!(300), None));
    assert_eq!((&body["parallel_tool_calls"], &body["stream"]), (&json!(false), &json!(true)));
    request.max_output_tokens = Some(3);
    assert_eq!(sent(&request)["max_output_tokens"], json!(16), "the API takes no less");
    let table = [
        (ToolChoice::Auto, json!("auto")),
        (ToolChoice::None, json!("none")),
        (ToolChoice::Required, json!("required")),
        (
            ToolChoice::Tool("mcp:time/now".into()),
            json!({"type": "function", "name": "mcp__time__now"}),
        ),
    ];
    for (choice, expected) in table {
        request.tool_choice = choice;
        assert_eq!(sent(&request)["tool_choice"], expected);
    }
}

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}
