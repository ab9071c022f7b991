//! What Ollama's `/api/chat` refuses, and how it answers.
//!
//! It is stricter than the real server, which drops what it does not know and lets models muddle
//! through histories without order: what reaches it here must be what it documents. It knows
//! nothing of the code under test.

use std::collections::HashSet;

use serde_json::{Value, json};

use crate::mock_server::{Api, Reply, only, tokens};

pub(crate) const API: Api = Api {
    path: "/api/chat",
    check: |_, body| check(body),
    refusal: |message| json!({ "error": message }),
    answer,
};

/// The rules of the real API, and of its documentation.
pub(crate) fn check(body: &Value) -> Result<(), String> {
    const FIELDS: [&str; 11] = [
        "model",
        "messages",
        "tools",
        "format",
        "think",
        "options",
        "stream",
        "truncate",
        "shift",
        "keep_alive",
        "logprobs",
    ];
    only(body, &FIELDS, "request")?;
    body["model"].as_str().filter(|model| !model.is_empty()).ok_or("model is required")?;
    if body["truncate"] != false || body["shift"] != false || !body["stream"].is_boolean() {
        return Err("the server may drop the beginning of the conversation".into());
    }
    let options = &body["options"];
    check_options(options)?;
    if options["num_ctx"].as_u64().is_none_or(|tokens| tokens < 512) {
        return Err("options.num_ctx is left to the server".into());
    }
    let is_level = |level: &str| ["low", "medium", "high", "max"].contains(&level);
    match &body["think"] {
        Value::Null | Value::Bool(_) => {}
        Value::String(level) if is_level(level) => {}
        other => return Err(format!("invalid think value: {other}")),
    }
    if !matches!(&body["format"], Value::Null | Value::Object(_)) && body["format"] != "json" {
        return Err("invalid format".into());
    }
    for tool in body["tools"].as_array().into_iter().flatten() {
        only(tool, &["type", "function"], "tools")?;
        only(&tool["function"], &["name", "description", "parameters"], "tools.function")?;
        if !is_name(&tool["function"]["name"]) || !tool["function"]["parameters"].is_object() {
            return Err(format!("not a tool: {tool}"));
        }
    }
    check_messages(
        body["messages"]
            .as_array()
            .filter(|messages| !messages.is_empty())
            .ok_or("messages is required")?,
    )
}

/// They stand in `options`, and nowhere else.
fn check_options(options: &Value) -> Result<(), String> {
    const FIELDS: [&str; 10] = [
        "num_ctx",
        "num_predict",
        "temperature",
        "top_p",
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "top_k",
        "min_p",
    ];
    only(options, &FIELDS, "options")?;
    let all = options.as_object().into_iter().flatten();
    let mut wrong = all.filter(|(name, value)| match name.as_str() {
        "stop" => !value.as_array().is_some_and(|texts| texts.iter().all(Value::is_string)),
        "seed" | "top_k" | "num_ctx" | "num_predict" => !value.is_i64(),
        _ => !value.is_number(),
    });
    match wrong.next() {
        Some((name, value)) => Err(format!("option {name:?} must not be {value}")),
        None => Ok(()),
    }
}

fn is_name(name: &Value) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    name.as_str().is_some_and(|name| (1..=64).contains(&name.len()) && name.chars().all(allowed))
}

/// Every call is answered, in order, before anything else is said.
fn check_messages(messages: &[Value]) -> Result<(), String> {
    let mut open: Vec<(&Value, &Value)> = Vec::new();
    let mut ids = HashSet::new();
    for (index, message) in messages.iter().enumerate() {
        let at = format!("messages[{index}]");
        let content = message["content"].as_str().ok_or(format!("{at}: content must be text"))?;
        let role = message["role"].as_str().unwrap_or_default();
        if role != "tool" && !open.is_empty() {
            return Err(format!("{at}: calls without a result: {open:?}"));
        }
        match role {
            "system" if index > 0 || content.is_empty() => {
                return Err(format!("{at}: a system message comes first"));
            }
            "system" | "user" => only(message, &["role", "content"], &at)?,
            "assistant" => {
                only(message, &["role", "content", "thinking", "tool_calls"], &at)?;
                let thinking = &message["thinking"];
                if !thinking.is_null() && !thinking.is_string() {
                    return Err(format!("{at}: thinking must be text"));
                }
                for call in message["tool_calls"].as_array().into_iter().flatten() {
                    only(call, &["id", "type", "function"], &at)?;
                    let function = &call["function"];
                    only(function, &["index", "name", "arguments"], &at)?;
                    if !is_name(&function["name"])
                        || !function["arguments"].is_object()
                        || !call["id"].is_string()
                    {
                        return Err(format!(
                            "{at}: json: cannot unmarshal into ToolCallFunctionArguments: {call}"
                        ));
                    }
                    if !ids.insert(call["id"].as_str()) {
                        return Err(format!("{at}: an earlier call has this id: {call}"));
                    }
                    open.push((&call["id"], &function["name"]));
                }
            }
            "tool" => {
                only(message, &["role", "content", "tool_name", "tool_call_id"], &at)?;
                if open.first() != Some(&(&message["tool_call_id"], &message["tool_name"])) {
                    return Err(format!("{at}: the result of no call: {message}"));
                }
                open.remove(0);
            }
            other => return Err(format!("{at}: invalid role: {other}")),
        }
    }
    if open.is_empty() { Ok(()) } else { Err(format!("calls without a result: {open:?}")) }
}

fn answer(request: &Value, number: usize, reply: &Reply) -> (&'static str, String) {
    let thinking = request["think"].as_bool().unwrap_or(!request["think"].is_null());
    let thinking =
        if thinking { format!("Thinking for the {number}. time.") } else { String::new() };
    let line = |message: Value| json!({"model": request["model"], "created_at": "2026-11-21T12:00:00Z", "message": message, "done": false});
    let said = |content: &str, thinking: &str| json!({"role": "assistant", "content": content, "thinking": thinking});
    let mut lines = Vec::new();
    let mut whole = said("", &thinking);
    let (first, second) = thinking.split_at(thinking.len() / 2);
    lines.extend(
        [first, second]
            .into_iter()
            .filter(|half| !half.is_empty())
            .map(|half| line(said("", half))),
    );
    match reply {
        Reply::Text(text) => {
            let (first, second) = text.split_at(text.floor_char_boundary(text.len() / 2));
            lines.extend([first, second].map(|half| line(said(half, ""))));
            whole["content"] = json!(text);
        }
        Reply::Calls(calls) => {
            // Every other server is an old one that gives no ids.
            let call = |(index, (name, arguments)): (usize, &(String, Value))| {
                let mut call =
                    json!({"function": {"index": index, "name": name, "arguments": arguments}});
                if number.is_multiple_of(2) {
                    call["id"] = json!(format!("call_{number}_{index}"));
                }
                call
            };
            let calls: Vec<Value> = calls.iter().enumerate().map(call).collect();
            let called =
                |calls: &[Value]| json!({"role": "assistant", "content": "", "tool_calls": calls});
            lines.extend(calls.chunks(1).map(|call| line(called(call))));
            whole["tool_calls"] = json!(calls);
        }
        Reply::Raw(..) => unreachable!("answered by the server"),
    }
    let done = |message: Value| {
        let mut last = line(message);
        (last["done"], last["done_reason"]) = (json!(true), json!("stop"));
        (last["prompt_eval_count"], last["eval_count"]) = (tokens(request), tokens(&whole));
        last
    };
    if request["stream"] == true {
        lines.push(done(said("", "")));
        (
            "application/x-ndjson",
            lines.iter().fold(String::new(), |text, line| text + &format!("{line}\n")),
        )
    } else {
        ("application/json; charset=utf-8", done(whole.clone()).to_string())
    }
}

#[test]
fn it_refuses_what_the_real_one_cannot_read() {
    let base = |messages: Value| {
        json!({"model": "m", "stream": false, "truncate": false, "shift": false,
        "options": {"num_ctx": 4096}, "messages": messages})
    };
    let user = json!({"role": "user", "content": "x"});
    let call = |arguments: Value| {
        json!({"role": "assistant", "content": "",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "t", "arguments": arguments}}]})
    };
    let result = json!({"role": "tool", "tool_name": "t", "tool_call_id": "a", "content": ""});
    let fine = base(json!([user, call(json!({})), result]));
    assert_eq!(check(&fine), Ok(()));
    let table = [
        (json!([]), "is required"),
        (json!([user, call(json!("{}")), result]), "cannot unmarshal"),
        (json!([user, call(json!({}))]), "without a result"),
        (json!([user, call(json!({})), user]), "without a result"),
        (json!([user, result]), "the result of no call"),
        (json!([user, call(json!({})), result, result]), "the result of no call"),
        (json!([{"role": "user", "content": null}]), "must be text"),
    ];
    for (messages, complaint) in table {
        let refusal = check(&base(messages.clone())).unwrap_err();
        assert!(refusal.contains(complaint), "{messages}: {refusal}");
    }
    for (field, value) in [
        ("truncate", json!(true)),
        ("tool_choice", json!("auto")),
        ("think", json!(7)),
        ("seed", json!(7)),
        ("format", json!("json_object")),
        ("options", json!({"num_ctx": 4096, "stop": "END"})),
        ("options", json!({"num_ctx": 4096, "stop_sequences": ["END"]})),
    ] {
        let mut body = fine.clone();
        body[field] = value;
        assert!(check(&body).is_err(), "{field}");
    }
}
