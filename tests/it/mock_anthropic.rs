//! What Anthropic's Messages API refuses, and how it answers.
//!
//! The rules are those of the documentation and of the 400s that its users report; each message
//! says what the real one would complain of. Thinking is signed with a digest of itself, so that a
//! block which was changed on its way is found out. It knows nothing of the code under test.

use std::collections::HashSet;

use axum::http::HeaderMap;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::mock_server::{Api, Reply, only, tokens};

pub(crate) const API: Api = Api {
    path: "/v1/messages",
    check: |headers, body| {
        check_headers(headers)?;
        check(body)
    },
    refusal: |message| json!({"type": "error", "error": {"type": "invalid_request_error", "message": message}}),
    answer,
};

/// What a block of thinking is signed with.
pub(crate) fn signature(thinking: &str) -> String {
    let digest = Sha256::digest(thinking);
    digest.iter().take(8).fold(String::from("sig"), |hex, byte| hex + &format!("{byte:02x}"))
}

fn check_headers(headers: &HeaderMap) -> Result<(), String> {
    let is = |name: &str, value: &str| headers.get(name).is_some_and(|given| given == value);
    if !is("anthropic-version", "2023-06-01") || !is("content-type", "application/json") {
        return Err("anthropic-version: header is required".into());
    }
    if headers.get("x-api-key").is_none_or(axum::http::HeaderValue::is_empty)
        || headers.contains_key("authorization")
    {
        return Err("x-api-key header is required".into());
    }
    Ok(())
}

/// The rules of the real API.
pub(crate) fn check(body: &Value) -> Result<(), String> {
    const FIELDS: [&str; 14] = [
        "model",
        "max_tokens",
        "messages",
        "system",
        "tools",
        "tool_choice",
        "thinking",
        "output_config",
        "temperature",
        "stream",
        "top_p",
        "top_k",
        "stop_sequences",
        "service_tier",
    ];
    only(body, &FIELDS, "request")?;
    body["model"].as_str().filter(|model| !model.is_empty()).ok_or("model: Field required")?;
    let max_tokens = body["max_tokens"]
        .as_u64()
        .filter(|max| *max >= 1)
        .ok_or("max_tokens: must be at least 1")?;
    let thinks = check_thinking(body, max_tokens)?;
    let offered = check_tools(body)?;
    check_choice(body, &offered, thinks)?;
    check_system(&body["system"])?;
    check_config(&body["output_config"])?;
    check_messages(body, !offered.is_empty(), thinks)?;
    if body.to_string().matches(r#""cache_control":"#).count() > 4 {
        return Err("A maximum of 4 blocks with cache_control may be provided".into());
    }
    Ok(())
}

/// Whether thinking is `enabled`.
fn check_thinking(body: &Value, max_tokens: u64) -> Result<bool, String> {
    let (thinking, temperature) = (&body["thinking"], &body["temperature"]);
    if !temperature.is_null() && !temperature.as_f64().is_some_and(|t| (0.0..=1.0).contains(&t)) {
        return Err("temperature: range: 0..1".into());
    }
    let top_p = &body["top_p"];
    if !top_p.is_null() && !temperature.is_null() {
        return Err("`temperature` and `top_p` cannot both be specified for this model.".into());
    }
    let least = if thinking.is_null() { 0.0 } else { 0.95 };
    if !top_p.is_null() && !top_p.as_f64().is_some_and(|p| (least..=1.0).contains(&p)) {
        return Err(format!("top_p: range: {least}..1"));
    }
    let stops = body.get("stop_sequences").map(|stops| stops.as_array());
    let is_stop = |stop: &Value| stop.as_str().is_some_and(|stop| !stop.trim().is_empty());
    if stops.is_some_and(|stops| !stops.is_some_and(|stops| stops.iter().all(is_stop))) {
        return Err("stop_sequences: each stop sequence must contain non-whitespace".into());
    }
    if !thinking.is_null() && !temperature.is_null() {
        return Err("`temperature` may only be set to 1 when thinking is enabled".into());
    }
    match thinking["type"].as_str() {
        None if thinking.is_null() => Ok(false),
        Some("adaptive") => only(thinking, &["type", "display"], "thinking").map(|()| false),
        Some("enabled") => {
            only(thinking, &["type", "budget_tokens", "display"], "thinking")?;
            match thinking["budget_tokens"].as_u64() {
                Some(budget) if budget < 1024 => {
                    Err("thinking.budget_tokens: must be at least 1024".into())
                }
                Some(budget) if budget < max_tokens => Ok(true),
                _ => Err("`max_tokens` must be greater than `thinking.budget_tokens`".into()),
            }
        }
        _ => Err(format!("thinking.type: {thinking}")),
    }
}

fn check_properties(tool: &str, schema: &Value) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    for (name, inner) in schema["properties"].as_object().into_iter().flatten() {
        if !(1..=64).contains(&name.len()) || !name.chars().all(is_allowed) {
            return Err(format!(
                "tools.{tool}.custom.input_schema.properties: Property keys should match pattern \
                 '^[a-zA-Z0-9_.-]{{1,64}}$'"
            ));
        }
        check_properties(tool, inner)?;
    }
    Ok(())
}

/// The names of the offered tools.
fn check_tools(body: &Value) -> Result<Vec<&str>, String> {
    let mut names = Vec::new();
    for tool in body["tools"].as_array().map_or(&[][..], Vec::as_slice) {
        only(tool, &["name", "description", "input_schema", "cache_control"], "tools")?;
        let name = tool["name"]
            .as_str()
            .filter(|name| is_name(name))
            .ok_or(format!("tools.name: {tool}"))?;
        if names.contains(&name) {
            return Err("tools: Tool names must be unique.".into());
        }
        if tool["input_schema"]["type"] != "object" || !tool["description"].is_string() {
            return Err(format!("tools.{name}.input_schema.type: Input should be 'object'"));
        }
        let is_composed = |schema: &Value| {
            ["oneOf", "allOf", "anyOf"].iter().any(|keyword| schema.get(*keyword).is_some())
        };
        if is_composed(&tool["input_schema"]) {
            return Err(format!(
                "tools.{name}.custom.input_schema: input_schema does not support oneOf, allOf, or \
                 anyOf at the top level"
            ));
        }
        check_properties(name, &tool["input_schema"])?;
        names.push(name);
    }
    if body.get("tools").is_some() && names.is_empty() {
        return Err("tools: must not be empty".into());
    }
    Ok(names)
}

fn is_name(name: &str) -> bool {
    (1..=64).contains(&name.len()) && is_id(name)
}

fn is_id(id: &str) -> bool {
    !id.is_empty() && id.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-')
}

fn check_choice(body: &Value, offered: &[&str], thinks: bool) -> Result<(), String> {
    let Some(choice) = body.get("tool_choice") else { return Ok(()) };
    if offered.is_empty() {
        return Err("tool_choice may only be specified while providing tools".into());
    }
    let forces =
        match choice["type"].as_str() {
            Some("auto") => only(choice, &["type", "disable_parallel_tool_use"], "tool_choice")
                .map(|()| false)?,
            Some("any") => only(choice, &["type", "disable_parallel_tool_use"], "tool_choice")
                .map(|()| true)?,
            Some("none") => only(choice, &["type"], "tool_choice").map(|()| false)?,
            Some("tool") => {
                only(choice, &["type", "name", "disable_parallel_tool_use"], "tool_choice")?;
                let name = choice["name"].as_str().unwrap_or_default();
                if !offered.contains(&name) {
                    return Err(format!("Tool '{name}' not found in provided tools"));
                }
                true
            }
            _ => return Err(format!("tool_choice.type: {choice}")),
        };
    let model = body["model"].as_str().unwrap_or_default();
    let never = ["claude-fable-", "claude-mythos-"].iter().any(|family| model.starts_with(family));
    if forces && (thinks || never) {
        return Err("Thinking may not be enabled when tool_choice forces tool use.".into());
    }
    Ok(())
}

fn check_system(system: &Value) -> Result<(), String> {
    match system {
        Value::Null => Ok(()),
        Value::String(text) if !text.trim().is_empty() => Ok(()),
        Value::Array(blocks) if !blocks.is_empty() => {
            blocks.iter().try_for_each(|block| check_text(block, "system"))
        }
        _ => Err("system: text content blocks must be non-empty".into()),
    }
}

fn check_config(config: &Value) -> Result<(), String> {
    if config.is_null() {
        return Ok(());
    }
    only(config, &["effort", "format"], "output_config")?;
    let effort = &config["effort"];
    if !effort.is_null()
        && !effort.as_str().is_some_and(|e| ["low", "medium", "high", "xhigh", "max"].contains(&e))
    {
        return Err(format!("output_config.effort: {effort}"));
    }
    match &config["format"] {
        Value::Null if effort.is_null() => Err("output_config: must not be empty".into()),
        Value::Null => Ok(()),
        format => {
            only(format, &["type", "schema"], "output_config.format")?;
            check_schema(&format["schema"])
        }
    }
}

/// Objects are closed, and nothing is bounded.
fn check_schema(schema: &Value) -> Result<(), String> {
    let Value::Object(keywords) = schema else {
        return Err("output_config.format.schema: must be an object".into());
    };
    let foreign = [
        "minimum",
        "maximum",
        "minLength",
        "maxLength",
        "maxItems",
        "oneOf",
        "not",
        "patternProperties",
    ];
    if let Some(foreign) = foreign.iter().find(|keyword| keywords.contains_key(**keyword)) {
        return Err(format!("output_config.format.schema: property '{foreign}' is not supported"));
    }
    if schema["type"] == "object" && schema["additionalProperties"] != false {
        return Err(
            "For 'object' type, 'additionalProperties' must be explicitly set to false".into()
        );
    }
    let properties =
        schema["properties"].as_object().into_iter().flat_map(|properties| properties.values());
    let options = schema["anyOf"].as_array().into_iter().flatten();
    properties.chain(options).chain(keywords.get("items")).try_for_each(check_schema)
}

fn check_cache_control(block: &Value, at: &str) -> Result<(), String> {
    match block.get("cache_control") {
        Some(mark) if *mark != json!({"type": "ephemeral"}) => {
            Err(format!("{at}.cache_control: {mark}"))
        }
        _ => Ok(()),
    }
}

fn check_text(block: &Value, at: &str) -> Result<(), String> {
    only(block, &["type", "text", "cache_control", "citations"], at)?;
    check_cache_control(block, at)?;
    match block["text"].as_str() {
        Some(text) if !text.trim().is_empty() => Ok(()),
        _ => Err(format!("{at}: text content blocks must contain non-whitespace text")),
    }
}

/// Roles take turns, calls are answered at once and once, and thinking comes back as it went out.
fn check_messages(body: &Value, has_tools: bool, thinks: bool) -> Result<(), String> {
    let messages = body["messages"].as_array().filter(|messages| !messages.is_empty());
    let messages = messages.ok_or("messages: at least one message is required")?;
    let mut open: Vec<&str> = Vec::new();
    let mut ids = HashSet::new();
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages.{index}");
        only(message, &["role", "content"], &at)?;
        let role = if index % 2 == 0 { "user" } else { "assistant" };
        if message["role"] != role {
            return Err(format!(
                "{at}: roles must alternate, and the first message must use the user role"
            ));
        }
        let blocks = message["content"].as_array().filter(|blocks| !blocks.is_empty());
        let blocks = blocks.ok_or(format!("{at}: all messages must have non-empty content"))?;
        if role == "user" {
            check_user(blocks, &std::mem::take(&mut open), &at)?;
        } else {
            open = check_assistant(blocks, &mut ids, &at)?;
        }
    }
    if !open.is_empty() {
        return Err(format!(
            "`tool_use` ids were found without `tool_result` blocks immediately after: {open:?}"
        ));
    }
    if !ids.is_empty() && !has_tools {
        return Err(
            "Requests which include `tool_use` or `tool_result` blocks must define tools".into()
        );
    }
    check_last(messages, thinks)
}

fn check_last(messages: &[Value], thinks: bool) -> Result<(), String> {
    let ends_with_model = messages.len().is_multiple_of(2);
    let last = messages.iter().rev().find(|message| message["role"] == "assistant");
    let Some(blocks) = last.and_then(|last| last["content"].as_array()) else { return Ok(()) };
    let kind = |block: &Value| block["type"].as_str().unwrap_or_default().to_owned();
    let has_calls = blocks.iter().any(|block| kind(block) == "tool_use");
    let begins_with_thinking =
        matches!(kind(&blocks[0]).as_str(), "thinking" | "redacted_thinking");
    if thinks && (has_calls || ends_with_model) && !begins_with_thinking {
        return Err(format!(
            "Expected `thinking` or `redacted_thinking`, but found `{}`",
            kind(&blocks[0])
        ));
    }
    let text = blocks.last().and_then(|block| block["text"].as_str()).unwrap_or_default();
    if ends_with_model && text.ends_with(char::is_whitespace) {
        return Err("final assistant content cannot end with trailing whitespace".into());
    }
    Ok(())
}

/// Results of all open calls first, then whatever else is said.
fn check_user(blocks: &[Value], open: &[&str], at: &str) -> Result<(), String> {
    let mut unanswered: Vec<&str> = open.to_vec();
    let mut has_spoken = false;
    for block in blocks {
        if block["type"] != "tool_result" {
            check_text(block, at)?;
            has_spoken = true;
            continue;
        }
        only(block, &["type", "tool_use_id", "content", "is_error", "cache_control"], at)?;
        check_cache_control(block, at)?;
        let id = block["tool_use_id"].as_str().unwrap_or_default();
        let place = unanswered.iter().position(|waiting| *waiting == id);
        let place = place
            .ok_or(format!("{at}: unexpected `tool_use_id` found in `tool_result` blocks: {id}"))?;
        unanswered.remove(place);
        let content =
            block["content"].as_str().ok_or(format!("{at}: tool_result.content: {block}"))?;
        if has_spoken {
            return Err(format!("{at}: tool_result blocks must come before other content"));
        }
        if block["is_error"] == true && content.trim().is_empty() {
            return Err(format!("{at}: content cannot be empty if `is_error` is true"));
        }
    }
    if unanswered.is_empty() {
        return Ok(());
    }
    Err(format!(
        "{at}: `tool_use` ids were found without `tool_result` blocks immediately after: {unanswered:?}"
    ))
}

/// The ids of its calls.
fn check_assistant<'a>(
    blocks: &'a [Value],
    ids: &mut HashSet<&'a str>,
    at: &str,
) -> Result<Vec<&'a str>, String> {
    let mut calls = Vec::new();
    for block in blocks {
        match block["type"].as_str().unwrap_or_default() {
            "text" => check_text(block, at)?,
            "thinking" => {
                only(block, &["type", "thinking", "signature"], at)?;
                let thinking = block["thinking"].as_str().unwrap_or_default();
                if block["signature"] != signature(thinking) {
                    return Err(format!("{at}: Invalid `signature` in `thinking` block"));
                }
            }
            "redacted_thinking" => only(block, &["type", "data"], at)?,
            "tool_use" => {
                only(block, &["type", "id", "name", "input", "cache_control"], at)?;
                check_cache_control(block, at)?;
                let id = block["id"]
                    .as_str()
                    .filter(|id| is_id(id))
                    .ok_or(format!("{at}: tool_use.id: {block}"))?;
                if !block["name"].as_str().is_some_and(is_name) || !block["input"].is_object() {
                    return Err(format!(
                        "{at}: tool_use.input: Input should be a valid dictionary: {block}"
                    ));
                }
                if !ids.insert(id) {
                    return Err(format!("{at}: `tool_use` ids must be unique"));
                }
                calls.push(id);
            }
            "server_tool_use" => only(block, &["type", "id", "name", "input"], at)?,
            other => {
                return Err(format!("{at}: '{other}' does not match any of the expected tags"));
            }
        }
    }
    match blocks.last().and_then(|block| block["type"].as_str()) {
        Some("thinking" | "redacted_thinking") => {
            Err(format!("{at}: The final block in an assistant message cannot be `thinking`"))
        }
        _ => Ok(calls),
    }
}

fn answer(request: &Value, number: usize, reply: &Reply) -> (&'static str, String) {
    let mut blocks = Vec::new();
    if !request["thinking"].is_null() {
        let thinking = format!("Thinking for the {number}. time: \"é\"\n");
        blocks.push(
            json!({"type": "thinking", "thinking": thinking, "signature": signature(&thinking)}),
        );
        blocks.push(json!({"type": "redacted_thinking", "data": format!("redacted{number}")}));
    }
    let stop_reason = match reply {
        Reply::Text(text) => {
            blocks.push(json!({"type": "text", "text": text}));
            "end_turn"
        }
        Reply::Calls(calls) => {
            let calls = calls.iter().enumerate().map(|(index, (name, input))| {
                json!({"type": "tool_use", "id": format!("toolu_{number}_{index}"), "name": name, "input": input})
            });
            blocks.extend(calls);
            "tool_use"
        }
        Reply::Raw(..) => unreachable!("answered by the server"),
    };
    let usage = json!({"input_tokens": tokens(request), "output_tokens": tokens(&json!(blocks)),
        "cache_read_input_tokens": 10, "cache_creation_input_tokens": 5});
    let message = json!({"id": format!("msg_{number}"), "type": "message", "role": "assistant",
        "model": request["model"], "content": blocks, "stop_reason": stop_reason, "stop_sequence": null,
        "usage": usage});
    if request["stream"] == true {
        ("text/event-stream; charset=utf-8", streamed(message))
    } else {
        ("application/json", message.to_string())
    }
}

fn streamed(mut message: Value) -> String {
    let (blocks, stop_reason) = (message["content"].take(), message["stop_reason"].take());
    let usage = json!({"output_tokens": message["usage"]["output_tokens"]});
    message["content"] = json!([]);
    let mut events =
        vec![json!({"type": "message_start", "message": message}), json!({"type": "ping"})];
    for (index, block) in blocks.as_array().into_iter().flatten().enumerate() {
        let mut begin = block.clone();
        let pieces = match block["type"].as_str().unwrap_or_default() {
            "text" => {
                halves(&begin["text"].take(), |text| json!({"type": "text_delta", "text": text}))
            }
            "tool_use" => {
                let json = Value::String(begin["input"].take().to_string());
                begin["input"] = json!({});
                halves(&json, |json| json!({"type": "input_json_delta", "partial_json": json}))
            }
            "thinking" => {
                let signature =
                    json!({"type": "signature_delta", "signature": begin["signature"].take()});
                let thinking = begin["thinking"].take();
                let mut pieces =
                    halves(&thinking, |text| json!({"type": "thinking_delta", "thinking": text}));
                pieces.push(signature);
                pieces
            }
            _ => Vec::new(),
        };
        for field in ["text", "thinking", "signature"] {
            if begin.get(field).is_some_and(Value::is_null) {
                begin[field] = json!("");
            }
        }
        events.push(json!({"type": "content_block_start", "index": index, "content_block": begin}));
        let piece = |delta| json!({"type": "content_block_delta", "index": index, "delta": delta});
        events.extend(pieces.into_iter().map(piece));
        events.push(json!({"type": "content_block_stop", "index": index}));
    }
    let delta = json!({"stop_reason": stop_reason, "stop_sequence": null});
    events.push(json!({"type": "message_delta", "delta": delta, "usage": usage}));
    events.push(json!({"type": "message_stop"}));
    let frame = |text: String, event: &Value| {
        text + &format!("event: {}\ndata: {event}\n\n", event["type"].as_str().unwrap())
    };
    events.iter().fold(String::new(), frame)
}

fn halves(text: &Value, piece: impl Fn(&str) -> Value) -> Vec<Value> {
    let text = text.as_str().unwrap_or_default();
    let (first, second) = text.split_at(text.floor_char_boundary(text.len() / 2));
    vec![piece(first), piece(second)]
}

#[test]
fn it_refuses_what_the_real_one_refuses() {
    let base = |messages: Value| {
        json!({"model": "m", "max_tokens": 9, "tools": [{"name": "t", "description": "",
        "input_schema": {"type": "object"}}], "messages": messages})
    };
    let user = |content: Value| json!({"role": "user", "content": content});
    let model = |content: Value| json!({"role": "assistant", "content": content});
    let (text, call) = (
        json!({"type": "text", "text": "x"}),
        json!({"type": "tool_use", "id": "a", "name": "t", "input": {}}),
    );
    let result = json!({"type": "tool_result", "tool_use_id": "a", "content": "r"});
    let hello = user(json!([text]));
    let fine = base(json!([hello, model(json!([call])), user(json!([result, text]))]));
    assert_eq!(check(&fine), Ok(()));
    let table = [
        (json!([model(json!([text]))]), "must alternate"),
        (json!([hello, hello]), "must alternate"),
        (json!([user(json!([]))]), "non-empty content"),
        (json!([user(json!([{"type": "text", "text": " "}]))]), "non-whitespace"),
        (json!([hello, model(json!([call]))]), "without `tool_result`"),
        (json!([hello, model(json!([call])), hello]), "without `tool_result`"),
        (json!([hello, model(json!([call])), user(json!([text, result]))]), "before other content"),
        (
            json!([hello, model(json!([call])), user(json!([result, result]))]),
            "unexpected `tool_use_id`",
        ),
        (json!([hello, model(json!([text])), user(json!([result]))]), "unexpected `tool_use_id`"),
        (
            json!([hello, model(json!([call, call])), user(json!([result, result]))]),
            "must be unique",
        ),
        (
            json!([
                hello,
                model(json!([{"type": "thinking", "thinking": "x", "signature": "y"}, text]))
            ]),
            "signature",
        ),
        (
            json!([hello, model(json!([{"type": "redacted_thinking", "data": "x"}]))]),
            "cannot be `thinking`",
        ),
        (json!([hello, model(json!([{"type": "text", "text": "x "}]))]), "trailing whitespace"),
    ];
    for (messages, complaint) in table {
        let refusal = check(&base(messages.clone())).unwrap_err();
        assert!(refusal.contains(complaint), "{messages}: {refusal}");
    }
    let with = |field: &str, value: Value| {
        let mut body = fine.clone();
        body[field] = value;
        check(&body).unwrap_err()
    };
    assert!(
        with("thinking", json!({"type": "enabled", "budget_tokens": 1024}))
            .contains("greater than")
    );
    assert!(with("max_tokens", json!(0)).contains("max_tokens"));
    assert!(with("tool_choice", json!({"type": "tool", "name": "u"})).contains("not found"));
    assert!(with("temperature", json!(1.5)).contains("range"));
    assert!(with("made_up", json!(1)).contains("Extra inputs"));
    let composed = json!([{"name": "t", "description": "",
        "input_schema": {"type": "object", "anyOf": [{"required": ["a"]}]}}]);
    assert!(with("tools", composed).contains("at the top level"));
    let mut thinks = fine.clone();
    (thinks["thinking"], thinks["max_tokens"]) =
        (json!({"type": "enabled", "budget_tokens": 1024}), json!(2000));
    assert!(check(&thinks).unwrap_err().contains("Expected `thinking`"));
    thinks["tool_choice"] = json!({"type": "any"});
    assert!(check(&thinks).unwrap_err().contains("forces tool use"));
}
