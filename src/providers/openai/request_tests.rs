//! What goes over the wire, whole bodies at a time.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::message::{AssistantMessage, CallTarget, Conversation, OpaqueBlocks, ToolResult};
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
    serde_json::from_slice(&body(request, "p", Arguments::AsWritten).unwrap()).unwrap()
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
fn a_plain_question_holds_nothing_that_servers_could_refuse() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let expected = json!({"model": "m", "messages": [{"role": "user", "content": "hello"}]});
    assert_eq!(sent(&plain(&conversation, &names)), expected);
}

#[test]
fn a_history_with_calls_keeps_its_pairs_and_its_order() {
    let mut conversation = conversation("be kind", "hello");
    let calls =
        vec![call(1, "mcp:time/now", r#"{"tz": "UTC"}"#), call(2, "no such tool!", r#"{"broken"#)];
    let asked = AssistantMessage { tool_calls: calls, ..AssistantMessage::default() };
    conversation
        .push_turn(asked, vec![result(1, "noon"), result(2, "Error: Unknown tool")])
        .unwrap();
    conversation
        .push_turn(AssistantMessage { text: "Noon.".into(), ..AssistantMessage::default() }, vec![])
        .unwrap();
    conversation.push_turn(AssistantMessage::default(), vec![]).unwrap();
    conversation.push_user("thanks");
    let names = WireNames::new(["mcp:time/now"]);
    let expected = json!([
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": null, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "mcp__time__now", "arguments": "{\"tz\": \"UTC\"}"}},
            {"id": "call_2", "type": "function", "function": {"name": "no_such_tool_", "arguments": "{\"broken"}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
        {"role": "tool", "tool_call_id": "call_2", "content": "Error: Unknown tool"},
        {"role": "assistant", "content": "Noon."},
        {"role": "assistant", "content": "(empty)"},
        {"role": "user", "content": "thanks"},
    ]);
    let request = plain(&conversation, &names);
    assert_eq!(sent(&request)["messages"], expected);

    let readable = body(&request, "p", Arguments::Readable).unwrap();
    let readable: Value = serde_json::from_slice(&readable).unwrap();
    let calls = &readable["messages"][2]["tool_calls"];
    let arguments = [0, 1].map(|at| calls[at]["function"]["arguments"].as_str().unwrap());
    assert_eq!(arguments, [r#"{"tz": "UTC"}"#, r#"{"malformed_json":"{\"broken"}"#]);
    for (server, expected) in [
        ("https://api.openai.com/v1", Arguments::AsWritten),
        ("https://eu.api.openai.com/v1", Arguments::AsWritten),
        ("https://notopenai.com/v1", Arguments::Readable),
        ("http://127.0.0.1:8000/v1", Arguments::Readable),
    ] {
        assert_eq!(Arguments::of(&server.parse().unwrap()), expected, "{server}");
    }
}

#[test]
fn a_model_gets_back_what_it_needs_of_its_own_answers() {
    const KEPT: &str = r#"{"model":"m","reasoning_content":"hm","reasoning_details":[{"type":"reasoning.encrypted",  "data":"\u0041"}],"calls":[null,{"google":{"thought_signature":"c2ln\u003d"}}]}"#;
    let names = WireNames::new(["t"]);
    let said = |provider: &str, model: &str, kept: &str| {
        let mut conversation = conversation("", "hello");
        let opaque = Some(OpaqueBlocks { provider: provider.into(), json: kept.into() });
        let tool_calls = vec![call(1, "t", "{}"), call(2, "t", "{}"), call(3, "t", "{}")];
        let asked = AssistantMessage { tool_calls, opaque, ..AssistantMessage::default() };
        let results = [1, 2, 3].map(|id| result(id, "ok"));
        conversation.push_turn(asked, results.into()).unwrap();
        let request = ModelRequest { model, ..plain(&conversation, &names) };
        String::from_utf8(body(&request, "p", Arguments::AsWritten).unwrap()).unwrap()
    };
    let own = said("p", "m", KEPT);
    for part in [
        r#""reasoning_content":"hm""#,
        r#""reasoning_details":[{"type":"reasoning.encrypted",  "data":"\u0041"}]"#,
        r#"{"id":"call_2","type":"function","function":{"name":"t","arguments":"{}"},"extra_content":{"google":{"thought_signature":"c2ln\u003d"}}}"#,
    ] {
        assert!(own.contains(part), "{part}\n{own}");
    }
    assert_eq!(own.matches("extra_content").count(), 1, "{own}");
    let elsewhere = [said("q", "m", KEPT), said("p", "n", KEPT), said("p", "m", "[]")];
    for other in elsewhere {
        assert!(!other.contains("reasoning") && !other.contains("extra_content"), "{other}");
    }
}

#[test]
fn tools_choice_and_sampling_are_passed_on() {
    let (conversation, names) = (conversation("", "hello"), WireNames::new(["mcp:time/now"]));
    let schema = Arc::new(json!({"type": "object"}));
    let tools = [ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: schema.into(),
    }];
    let mut request = ModelRequest {
        tools: &tools,
        temperature: Some(0.5),
        max_output_tokens: Some(300),
        ..plain(&conversation, &names)
    };
    let body = sent(&request);
    let function = json!({"name": "mcp__time__now", "description": "Now.", "parameters": {"type": "object", "properties": {}}});
    assert_eq!(body["tools"], json!([{"type": "function", "function": function}]));
    assert_eq!(body["temperature"], json!(0.5));
    assert_eq!(body["max_completion_tokens"], json!(300));
    assert_eq!(body["parallel_tool_calls"], json!(false));
    let forced = json!({"type": "function", "function": {"name": "mcp__time__now"}});
    let table = [
        (ToolChoice::Auto, json!("auto")),
        (ToolChoice::None, json!("none")),
        (ToolChoice::Required, json!("required")),
        (ToolChoice::Tool("mcp:time/now".into()), forced),
    ];
    for (choice, expected) in table {
        request.tool_choice = choice;
        assert_eq!(sent(&request)["tool_choice"], expected);
    }
}

#[test]
fn strict_is_asked_for_only_where_the_schema_qualifies() {
    let closed =
        Arc::new(json!({"type": "object", "required": ["a"], "additionalProperties": false,
        "properties": {"a": {"type": "string"}}}));
    let open = Arc::new(json!({"type": "object", "properties": {"a": {"type": "string"}}}));
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    for (schema, qualifies) in [(closed, true), (open, false)] {
        let tools = [ToolOffer {
            name: "t".into(),
            description: "T.".into(),
            input_schema: Arc::clone(&schema).into(),
        }];
        let request = ModelRequest {
            output_schema: Some(&schema),
            tools: &tools,
            ..plain(&conversation, &names)
        };
        for strict_schemas in [true, false] {
            let capabilities = Capabilities { strict_schemas, ..Capabilities::OPENAI };
            let body = sent(&ModelRequest { capabilities: &capabilities, ..request.clone() });
            let strict = qualifies && strict_schemas;
            let output = json!({"name": "output", "schema": schema, "strict": strict});
            assert_eq!(
                body["response_format"],
                json!({"type": "json_schema", "json_schema": output})
            );
            let offered = body["tools"][0]["function"].get("strict");
            assert_eq!(offered, strict.then_some(&json!(true)), "left out where it would be false");
        }
    }
}

#[test]
fn thinking_is_asked_for_by_effort_and_silences_temperature() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let table = [
        (None, None, None),
        (None, Some(Effort::Low), Some("low")),
        (Some(50_000), Some(Effort::Medium), Some("medium")),
        (None, Some(Effort::High), Some("high")),
        (None, Some(Effort::Max), Some("max")),
        (Some(1_024), None, Some("low")),
        (Some(4_096), None, Some("medium")),
        (Some(16_384), None, Some("high")),
    ];
    for (budget_tokens, effort, expected) in table {
        let thinking = Some(Thinking { budget_tokens, effort });
        let request =
            ModelRequest { thinking, temperature: Some(0.2), ..plain(&conversation, &names) };
        let body = sent(&request);
        assert_eq!(body.get("reasoning_effort"), expected.map(|word| json!(word)).as_ref());
        assert_eq!(body.get("temperature"), None);
    }
}

#[test]
fn a_stream_is_asked_for_where_somebody_follows() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let follower = |_| {};
    let request = ModelRequest { deltas: Deltas(Some(&follower)), ..plain(&conversation, &names) };
    let body = sent(&request);
    assert_eq!(
        (&body["stream"], &body["stream_options"]),
        (&json!(true), &json!({"include_usage": true}))
    );
}

#[test]
fn servers_that_stayed_with_it_get_the_older_name_of_the_cap() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let capabilities = Capabilities { output_cap: OutputCap::MaxTokens, ..Capabilities::OPENAI };
    let body = sent(&ModelRequest {
        capabilities: &capabilities,
        max_output_tokens: Some(300),
        ..plain(&conversation, &names)
    });
    assert_eq!((&body["max_tokens"], body.get("max_completion_tokens")), (&json!(300), None));
}

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}
