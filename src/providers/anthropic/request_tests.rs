//! What goes over the wire, whole bodies at a time.

use std::sync::Arc;

use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::message::{
    AssistantMessage, CallTarget, Conversation, OpaqueBlocks, ToolCall, ToolResult,
};
use crate::model::{ProviderKind, ThinkingStyle};
use crate::providers::capabilities::CapabilityTable;
use crate::providers::{Capabilities, Delta, Deltas, ToolOffer, WireNames};
use crate::run;

fn call(id: u128, provider_id: &str, name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: Uuid::from_u128(id),
        provider_id: provider_id.into(),
        name: name.into(),
        arguments: arguments.into(),
        target: CallTarget::Tool,
    }
}

fn result(id: u128, content: &str, is_error: bool) -> ToolResult {
    ToolResult::of_service(Uuid::from_u128(id), content, is_error)
}

fn kept(provider: &str, json: &str) -> OpaqueBlocks {
    OpaqueBlocks { provider: provider.into(), json: json.into() }
}

/// As the router would send it to the model of that name.
fn sent(request: &ModelRequest<'_>) -> Value {
    let capabilities =
        CapabilityTable::default().of(ProviderKind::Anthropic, "anthropic", request.model);
    let request = &ModelRequest { capabilities: &capabilities, ..request.clone() };
    serde_json::from_slice(&body(request, "anthropic").unwrap()).unwrap()
}

fn plain<'a>(conversation: &'a Conversation, names: &'a WireNames) -> ModelRequest<'a> {
    ModelRequest {
        model: "claude-sonnet-4-5",
        capabilities: &Capabilities::ANTHROPIC,
        conversation,
        tools: &[],
        names,
        tool_choice: ToolChoice::Auto,
        parallel_tool_calls: None,
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

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}

fn clock() -> [ToolOffer; 1] {
    let schema = Arc::new(json!({"type": "object"}));
    [ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: schema.into(),
    }]
}

#[test]
fn a_plain_question_holds_nothing_that_servers_could_refuse() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let request = ModelRequest {
        tool_choice: ToolChoice::Required,
        parallel_tool_calls: Some(false),
        ..plain(&conversation, &names)
    };
    let expected = json!({"model": "claude-sonnet-4-5", "max_tokens": 8192, "stream": false,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]});
    assert_eq!(sent(&request), expected);
    let follower = |_: Delta| {};
    assert_eq!(
        sent(&ModelRequest { deltas: Deltas(Some(&follower)), ..request })["stream"],
        json!(true)
    );
}

#[test]
fn results_come_first_and_in_one_message() {
    let mut conversation = conversation("be kind", "hello");
    let calls = vec![
        call(1, "toolu_1", "mcp:time/now", r#"{"tz" : "UTC"}"#),
        call(2, "toolu_1", "no such tool!", r#"{"broken"#),
        call(3, "functions.now:0", "mcp:time/now", ""),
    ];
    let asked = AssistantMessage {
        text: "Looking.".into(),
        tool_calls: calls,
        ..AssistantMessage::default()
    };
    let results = vec![
        result(1, "noon", false),
        result(2, "Error: Unknown tool", true),
        result(3, " ", true),
    ];
    conversation.push_turn(asked, results).unwrap();
    conversation.push_user("Go on.");
    conversation.push_user("  ");
    conversation
        .push_turn(AssistantMessage { text: " \n".into(), ..AssistantMessage::default() }, vec![])
        .unwrap();
    conversation.push_user("Really.");
    let (names, tools) = (WireNames::new(["mcp:time/now"]), clock());
    let body = sent(&ModelRequest { tools: &tools, ..plain(&conversation, &names) });
    let (second, third) =
        ("toolu_00000000000000000000000000000002", "toolu_00000000000000000000000000000003");
    let expected = json!([
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": [
            {"type": "text", "text": "Looking."},
            {"type": "tool_use", "id": "toolu_1", "name": "mcp__time__now", "input": {"tz": "UTC"}},
            {"type": "tool_use", "id": second, "name": "no_such_tool_", "input": {"malformed_json": "{\"broken"}},
            {"type": "tool_use", "id": third, "name": "mcp__time__now", "input": {}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "noon"},
            {"type": "tool_result", "tool_use_id": second, "content": "Error: Unknown tool", "is_error": true},
            {"type": "tool_result", "tool_use_id": third, "content": "(empty)", "is_error": true},
            {"type": "text", "text": "Go on."},
            {"type": "text", "text": "(empty)"},
            {"type": "text", "text": "Really."},
        ]},
    ]);
    assert_eq!(body["messages"], expected);
    assert_eq!(body["system"], json!("be kind"));
}

#[test]
fn kept_blocks_go_back_byte_for_byte_and_only_home() {
    const THINKING: &str = r#"{"type":"thinking",  "thinking":"h\u006d", "signature":"c2ln"}"#;
    const REDACTED: &str = r#"{"data":"x","type":"redacted_thinking"}"#;
    const NEW: &str = r#"{"type":"hologram","depth":1.50}"#;
    let json = format!(
        r#"[{THINKING},{{"type":"text","text":"One."}},{REDACTED},{{"type":"tool_use"}},{NEW},{{"type":"tool_use"}}]"#
    );
    let calls = vec![call(1, "toolu_1", "a", r#"{"n":1e2}"#), call(2, "toolu_2", "b", "{}")];
    let said_by = |provider: &str, capabilities: &Capabilities| {
        let mut conversation = conversation("", "hello");
        let message = AssistantMessage {
            text: "One.".into(),
            thinking: Some("hm".into()),
            tool_calls: calls.clone(),
            opaque: Some(kept(provider, &json)),
            decision: None,
        };
        conversation
            .push_turn(message, vec![result(1, "x", false), result(2, "y", false)])
            .unwrap();
        let names = WireNames::default();
        let request = ModelRequest { capabilities, ..plain(&conversation, &names) };
        String::from_utf8(body(&request, "anthropic").unwrap()).unwrap()
    };
    let said = |provider: &str| said_by(provider, &Capabilities::ANTHROPIC);
    let first = r#"{"type":"tool_use","id":"toolu_1","name":"a","input":{"n":1e2}}"#;
    let second = r#"{"type":"tool_use","id":"toolu_2","name":"b","input":{}}"#;
    let text = r#"{"type":"text","text":"One."}"#;
    let whole = format!(
        r#"{{"role":"assistant","content":[{THINKING},{text},{REDACTED},{first},{NEW},{second}]}}"#
    );
    assert!(said("anthropic").contains(&whole), "{}", said("anthropic"));
    let bare = format!(r#"{{"role":"assistant","content":[{text},{first},{second}]}}"#);
    assert!(said("other").contains(&bare), "{}", said("other"));
    let plain = Capabilities { thinking: ThinkingStyle::None, ..Capabilities::ANTHROPIC };
    let said = said_by("anthropic", &plain);
    let without = format!(r#"{{"role":"assistant","content":[{text},{first},{NEW},{second}]}}"#);
    assert!(said.contains(&without), "a model that cannot think: {said}");
}

#[test]
fn kept_blocks_follow_the_message_they_belong_to() {
    let json = r#"[{"type":"thinking","thinking":"","signature":"s"},{"type":"text","text":"{}"},{"type":"tool_use"},
        {"type":"thinking","thinking":"","signature":"t"}]"#;
    let message = |text: &str, calls: Vec<ToolCall>| AssistantMessage {
        text: text.into(),
        tool_calls: calls,
        opaque: Some(kept("anthropic", json)),
        ..AssistantMessage::default()
    };
    let kinds = |message: AssistantMessage| {
        let mut conversation = conversation("", "hello");
        let results =
            message.tool_calls.iter().map(|call| result(call.id.as_u128(), "x", false)).collect();
        conversation.push_turn(message, results).unwrap();
        let body = sent(&plain(&conversation, &WireNames::default()));
        let content = body["messages"][1]["content"].as_array().cloned().unwrap_or_default();
        content.iter().map(|block| block["type"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let (one, two) = (call(1, "a", "t", "{}"), call(2, "b", "t", "{}"));
    assert_eq!(kinds(message("{}", vec![one.clone()])), ["thinking", "text", "tool_use"]);
    assert_eq!(
        kinds(message("", vec![one.clone()])),
        ["thinking", "tool_use"],
        "a text that was dropped"
    );
    assert_eq!(
        kinds(message("", vec![one, two])),
        ["thinking", "tool_use", "thinking", "tool_use"]
    );
    assert_eq!(kinds(message("", vec![])), Vec::<String>::new(), "thinking alone says nothing");
}

#[test]
fn a_pause_is_sent_back_as_it_is() {
    let mut conversation = conversation("", "hello");
    let json = r#"[{"type":"text","text":"Searching."},{"type":"server_tool_use","id":"srvtoolu_1","name":"web_search","input":{"q":"x"}}]"#;
    let pause = AssistantMessage {
        text: "Searching.".into(),
        opaque: Some(kept("anthropic", json)),
        ..Default::default()
    };
    conversation.push_turn(pause, vec![]).unwrap();
    let names = WireNames::default();
    let paused = sent(&plain(&conversation, &names))["messages"].take();
    assert_eq!(paused[1]["content"], serde_json::from_str::<Value>(json).unwrap());
    let more = AssistantMessage { text: "Found it. ".into(), ..AssistantMessage::default() };
    conversation.push_turn(more, vec![]).unwrap();
    let messages = sent(&plain(&conversation, &names))["messages"].take();
    assert_eq!(messages.as_array().unwrap().len(), 2, "roles take turns");
    assert_eq!(
        messages[1]["content"][2],
        json!({"type": "text", "text": "Found it."}),
        "no white space at the end"
    );
}

#[test]
fn a_choice_is_sent_as_the_api_takes_it() {
    let (conversation, names, offers) =
        (conversation("", "hello"), WireNames::new(["mcp:time/now"]), clock());
    let thinking = run::Thinking { budget_tokens: Some(2000), effort: None };
    let one = ToolChoice::Tool("mcp:time/now".into());
    let table = [
        (ToolChoice::Auto, None, None, json!({"type": "auto"})),
        (ToolChoice::Auto, Some(true), None, json!({"type": "auto"})),
        (
            ToolChoice::Auto,
            Some(false),
            None,
            json!({"type": "auto", "disable_parallel_tool_use": true}),
        ),
        (ToolChoice::None, Some(false), None, json!({"type": "none"})),
        (ToolChoice::Required, None, None, json!({"type": "any"})),
        (
            ToolChoice::Required,
            Some(false),
            None,
            json!({"type": "any", "disable_parallel_tool_use": true}),
        ),
        (one.clone(), None, None, json!({"type": "tool", "name": "mcp__time__now"})),
        (one, None, Some(thinking), json!({"type": "auto"})),
        (
            ToolChoice::Required,
            Some(false),
            Some(thinking),
            json!({"type": "auto", "disable_parallel_tool_use": true}),
        ),
    ];
    for (tool_choice, parallel_tool_calls, thinking, expected) in table {
        let plain = plain(&conversation, &names);
        let body = sent(&ModelRequest {
            tools: &offers,
            tool_choice,
            parallel_tool_calls,
            thinking,
            ..plain
        });
        assert_eq!(body["tool_choice"], expected);
        let tool = json!({"name": "mcp__time__now", "description": "Now.", "input_schema": {"type": "object", "properties": {}}});
        assert_eq!(body["tools"], json!([tool]));
    }
}

#[test]
fn tools_that_were_called_are_named_where_none_are_offered() {
    let mut conversation = conversation("", "hello");
    let calls = vec![call(1, "x", "mcp:time/now", "{}"), call(2, "y", "mcp:time/now", "{}")];
    let asked = AssistantMessage { tool_calls: calls, ..AssistantMessage::default() };
    conversation.push_turn(asked, vec![result(1, "1", false), result(2, "2", false)]).unwrap();
    let names = WireNames::default();
    let body = sent(&plain(&conversation, &names));
    let tool = json!({"name": "mcp__time__now", "description": "Not available.", "input_schema": {"type": "object"}});
    assert_eq!((&body["tools"], &body["tool_choice"]), (&json!([tool]), &json!({"type": "none"})));
}

#[test]
fn thinking_leaves_room_for_an_answer_and_no_temperature() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let ask = |model: &'static str, budget_tokens, effort, cap| {
        let thinking = Some(run::Thinking { budget_tokens, effort });
        let plain = plain(&conversation, &names);
        let body = sent(&ModelRequest {
            model,
            thinking,
            temperature: Some(0.5),
            max_output_tokens: cap,
            ..plain
        });
        assert_eq!(body.get("temperature"), None);
        (body["thinking"].clone(), body["max_tokens"].clone(), body["output_config"].clone())
    };
    let enabled = |budget: u32| json!({"type": "enabled", "budget_tokens": budget});
    let (old, new) = ("claude-sonnet-4-5", "claude-opus-4-7");
    assert_eq!(ask(old, Some(4000), None, None), (enabled(4000), json!(8192), Value::Null));
    assert_eq!(ask(old, Some(4000), None, Some(4000)), (enabled(4000), json!(8000), Value::Null));
    assert_eq!(ask(old, Some(10), None, Some(500)), (enabled(1024), json!(1524), Value::Null));
    let adaptive = json!({"type": "adaptive"});
    let high = json!({"effort": "high"});
    assert_eq!(ask(new, None, Some(Effort::High), Some(500)), (adaptive.clone(), json!(500), high));
    assert_eq!(ask(new, None, None, None), (adaptive, json!(8192), Value::Null));
}

#[test]
fn thinking_with_a_budget_is_left_out_where_its_beginning_is_missing() {
    let (names, tools) = (WireNames::new(["mcp:time/now"]), clock());
    let thinking = Some(run::Thinking { budget_tokens: Some(2000), effort: None });
    let asks = |opaque: Option<OpaqueBlocks>, model: &'static str| {
        let mut conversation = conversation("", "hello");
        let calls = vec![call(1, "x", "mcp:time/now", "{}")];
        let asked = AssistantMessage { tool_calls: calls, opaque, ..AssistantMessage::default() };
        conversation.push_turn(asked, vec![result(1, "noon", false)]).unwrap();
        sent(&ModelRequest { model, tools: &tools, thinking, ..plain(&conversation, &names) })["thinking"].take()
    };
    let signed = r#"[{"type":"thinking","thinking":"","signature":"s"},{"type":"tool_use"}]"#;
    assert_eq!(asks(Some(kept("anthropic", signed)), "claude-sonnet-4-5")["type"], "enabled");
    assert_eq!(asks(Some(kept("other", signed)), "claude-sonnet-4-5"), Value::Null);
    assert_eq!(asks(None, "claude-sonnet-4-5"), Value::Null);
    assert_eq!(asks(None, "claude-opus-4-7")["type"], "adaptive");
}

#[test]
fn temperature_is_sent_where_it_is_known_and_in_range() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let table = [
        ("claude-sonnet-4-5", 0.3, json!(0.3)),
        ("claude-sonnet-4-5", 1.7, json!(1.0)),
        ("claude-opus-4-7", 0.3, Value::Null),
    ];
    for (model, temperature, expected) in table {
        let request =
            ModelRequest { model, temperature: Some(temperature), ..plain(&conversation, &names) };
        assert_eq!(sent(&request)["temperature"], expected, "{model}");
    }
}

#[test]
fn the_stable_prefix_is_marked_for_the_cache() {
    let mut conversation = conversation("be kind", "hello");
    let (names, tools) = (WireNames::new(["mcp:time/now"]), clock());
    let mark = json!({"type": "ephemeral"});
    let body =
        sent(&ModelRequest { tools: &tools, prompt_caching: true, ..plain(&conversation, &names) });
    assert_eq!(body["tools"][0]["cache_control"], mark);
    assert_eq!(body["system"], json!([{"type": "text", "text": "be kind", "cache_control": mark}]));
    assert_eq!(body["messages"][0]["content"][0]["cache_control"], mark);
    let asked = AssistantMessage {
        tool_calls: vec![call(1, "x", "mcp:time/now", "{}")],
        ..Default::default()
    };
    conversation.push_turn(asked, vec![result(1, "noon", false)]).unwrap();
    let body =
        sent(&ModelRequest { tools: &tools, prompt_caching: true, ..plain(&conversation, &names) });
    assert_eq!(
        body.to_string().matches("cache_control").count(),
        3,
        "at most four: the last turn, not every turn"
    );
    assert_eq!(body["messages"][2]["content"][0]["cache_control"], mark);
}

#[test]
fn an_answer_is_held_to_a_schema_where_the_model_can_be() {
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}});
    let config = |model: &'static str, schema| {
        sent(&ModelRequest { model, output_schema: Some(schema), ..plain(&conversation, &names) })["output_config"]
            .clone()
    };
    let closed = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": false});
    assert_eq!(
        config("claude-sonnet-4-5", &schema),
        json!({"format": {"type": "json_schema", "schema": closed}})
    );
    assert_eq!(config("claude-sonnet-4-20250514", &schema), Value::Null);
    assert_eq!(config("claude-sonnet-4-5", &json!({"type": "object"})), Value::Null);
}
