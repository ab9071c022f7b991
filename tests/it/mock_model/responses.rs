//! The Responses side of the server: what it refuses, and how an answer looks there. It reasons,
//! and wants its reasoning back.

use std::collections::HashSet;

use axum::body::Bytes;
use serde_json::{Value, json};

use super::{check_count, check_description, check_json_mode, check_parameters, check_strict};

/// The rules of the real API; the message is what it would complain about.
pub(crate) fn check(body: &Value) -> Result<(), String> {
    const FIELDS: [&str; 16] = [
        "model",
        "instructions",
        "input",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "temperature",
        "max_output_tokens",
        "reasoning",
        "include",
        "text",
        "store",
        "stream",
        "top_p",
        "user",
        "service_tier",
    ];
    let fields = body.as_object().ok_or("the body must be an object")?;
    if let Some(unknown) = fields.keys().find(|field| !FIELDS.contains(&field.as_str())) {
        return Err(format!("Unknown parameter: '{unknown}'"));
    }
    if body["store"] != json!(false) {
        return Err("this server stores nothing".into());
    }
    if body.get("reasoning").is_some() && body.get("temperature").is_some() {
        return Err("'temperature' is not supported with reasoning".into());
    }
    check_json_mode(&body["text"]["format"], &json!([body["input"], body["instructions"]]))?;
    let tools = body["tools"].as_array().map_or(&[][..], Vec::as_slice);
    check_count(tools)?;
    let mut offered = Vec::new();
    for (number, tool) in tools.iter().enumerate() {
        let name = name_of(tool)?;
        check_description(&format!("tools[{number}]"), tool)?;
        check_parameters(name, &tool["parameters"])?;
        match tool["strict"].as_bool() {
            Some(true) => check_strict(&tool["parameters"])?,
            Some(false) => {}
            None => return Err(format!("{name}: 'strict' left out counts as true")),
        }
        offered.push(name);
    }
    match body.get("tool_choice") {
        None => {}
        Some(_) if offered.is_empty() => return Err("'tool_choice' needs 'tools'".into()),
        Some(Value::String(mode)) if matches!(mode.as_str(), "none" | "auto" | "required") => {}
        Some(choice)
            if choice["type"] == "function"
                && offered.contains(&choice["name"].as_str().unwrap_or("")) => {}
        Some(choice) => return Err(format!("'tool_choice' names no offered tool: {choice}")),
    }
    let reasons = !body["model"].as_str().is_some_and(|model| model.starts_with("gpt-4"));
    match body["input"].as_array() {
        Some(items) if !reasons && items.iter().any(|item| item["type"] == "reasoning") => {
            Err("Reasoning input items can only be provided to a reasoning model.".into())
        }
        Some(items) if !items.is_empty() => check_items(items),
        _ => Err("'input' must be a list of at least one item".into()),
    }
}

fn name_of(function: &Value) -> Result<&str, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    let name = function["name"]
        .as_str()
        .filter(|name| (1..=64).contains(&name.len()) && name.chars().all(allowed));
    name.ok_or(format!("not a function with a name like ^[a-zA-Z0-9_-]{{1,64}}$: {function}"))
}

/// Every call has one output, behind it; reasoning is encrypted and followed by what it led to.
fn check_items(items: &[Value]) -> Result<(), String> {
    let mut open: Vec<&str> = Vec::new();
    let mut ids = HashSet::new();
    let mut led_to_something = true;
    for item in items {
        let kind = item["type"].as_str().unwrap_or("message");
        let role = item["role"].as_str().unwrap_or_default();
        let may_follow = matches!(kind, "function_call" | "reasoning") || role == "assistant";
        if !(led_to_something || may_follow) {
            return Err(format!(
                "an item of type 'reasoning' was provided without its required following item: {item}"
            ));
        }
        led_to_something = kind != "reasoning";
        match kind {
            "message" if matches!(role, "user" | "assistant" | "system" | "developer") => {
                if !item["content"].is_string() && !item["content"].is_array() {
                    return Err(format!("a message without content: {item}"));
                }
            }
            "reasoning" if item["encrypted_content"].is_string() => {}
            "reasoning" => return Err("items are not persisted when 'store' is false".into()),
            "function_call" => {
                name_of(item)?;
                let id = item["call_id"].as_str().filter(|id| !id.is_empty() && ids.insert(*id));
                open.push(id.ok_or(format!("a call without an id of its own: {item}"))?);
                if !item["arguments"].is_string() {
                    return Err(format!("arguments must be a string: {item}"));
                }
            }
            "function_call_output" => {
                let id = item["call_id"].as_str().unwrap_or_default();
                let at = open.iter().position(|waiting| *waiting == id);
                open.remove(at.ok_or(format!(
                    "No tool call found for function call output with call_id {id}."
                ))?);
                if !item["output"].is_string() {
                    return Err(format!("an output must be text: {item}"));
                }
            }
            other => return Err(format!("Invalid value: '{other}'")),
        }
    }
    if open.is_empty() && led_to_something {
        Ok(())
    } else {
        Err(format!("No tool output found for {open:?}."))
    }
}

/// A response that says what a chat message says, with the reasoning that led to it if that was
/// asked for.
pub(super) fn answer(number: usize, request: &Value, message: &Value) -> Value {
    let mut output = Vec::new();
    if request["include"] == json!(["reasoning.encrypted_content"]) {
        output.push(json!({"id": format!("rs_{number}"), "type": "reasoning",
            "encrypted_content": format!("gAAAA\\u002b{number}"),
            "summary": [{"type": "summary_text", "text": "Thinking."}]}));
    }
    if let Some(text) = message["content"].as_str() {
        let part = json!({"type": "output_text", "text": text, "annotations": []});
        output.push(json!({"id": format!("msg_{number}"), "type": "message", "role": "assistant",
            "status": "completed", "content": [part]}));
    }
    for (index, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
        output.push(json!({"id": format!("fc_{number}_{index}"), "type": "function_call", "status": "completed",
            "call_id": call["id"], "name": call["function"]["name"], "arguments": call["function"]["arguments"]}));
    }
    let (read, written) = (request.to_string().len() / 4, message.to_string().len() / 4);
    json!({"id": format!("resp_{number}"), "object": "response", "status": "completed", "error": null,
        "incomplete_details": null, "model": request["model"], "output": output, "store": false,
        "usage": {"input_tokens": read, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": read + written}})
}

/// The events of a response, one a piece.
pub(super) fn events(answer: &Value) -> Vec<Bytes> {
    let mut events = Vec::new();
    let mut say = |kind: &str, more: Value| {
        let mut event = json!({"type": kind, "sequence_number": events.len()});
        event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        events.push(Bytes::from(format!("event: {kind}\ndata: {event}\n\n")));
    };
    let mut begun = answer.clone();
    begun["status"] = json!("in_progress");
    begun["output"] = json!([]);
    say("response.created", json!({ "response": begun }));
    for (place, item) in answer["output"].as_array().into_iter().flatten().enumerate() {
        let mut added = item.clone();
        added["arguments"] = json!("");
        say("response.output_item.added", json!({"output_index": place, "item": added}));
        let (kind, text) = match item["type"].as_str() {
            Some("message") => ("response.output_text.delta", &item["content"][0]["text"]),
            Some("function_call") => ("response.function_call_arguments.delta", &item["arguments"]),
            _ => ("response.reasoning_summary_text.delta", &item["summary"][0]["text"]),
        };
        let text: Vec<char> = text.as_str().unwrap_or_default().chars().collect();
        for piece in text.chunks(5) {
            say(
                kind,
                json!({"output_index": place, "item_id": item["id"], "delta": piece.iter().collect::<String>()}),
            );
        }
        say("response.output_item.done", json!({"output_index": place, "item": item}));
    }
    say("response.completed", json!({ "response": answer }));
    events
}

#[test]
fn the_server_refuses_what_the_real_one_refuses() {
    let user = json!({"role": "user", "content": "hi"});
    let reasoning =
        json!({"type": "reasoning", "id": "rs", "encrypted_content": "x", "summary": []});
    let call =
        |id: &str| json!({"type": "function_call", "call_id": id, "name": "t", "arguments": "{}"});
    let output = |id: &str| json!({"type": "function_call_output", "call_id": id, "output": "ok"});
    let said = |items: Value| json!({"model": "m", "store": false, "input": items});
    let offering = |tool: Value, choice: Value| json!({"model": "m", "store": false, "input": [user], "tools": [tool], "tool_choice": choice});
    let tool = |strict: Value| {
        json!({"type": "function", "name": "t", "strict": strict,
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}})
    };
    let good = [
        said(json!([user, reasoning, call("a"), call("b"), output("a"), output("b"), user])),
        offering(tool(json!(false)), json!({"type": "function", "name": "t"})),
    ];
    for body in good {
        assert_eq!(check(&body), Ok(()), "{body}");
    }
    let bad = [
        (json!({"model": "m", "input": [user]}), "stores nothing"),
        (json!({"model": "m", "store": false, "messages": [user]}), "Unknown parameter"),
        (said(json!([])), "at least one"),
        (said(json!([user, call("a")])), "No tool output found"),
        (said(json!([user, output("a")])), "No tool call found"),
        (said(json!([user, call("a"), call("a"), output("a"), output("a")])), "of its own"),
        (said(json!([user, reasoning, user])), "required following item"),
        (
            said(json!([user, {"type": "reasoning", "id": "rs"}, call("a"), output("a")])),
            "not persisted",
        ),
        (offering(tool(Value::Null), json!("auto")), "left out"),
        (
            offering(
                json!({"type": "function", "name": "t", "strict": false, "parameters": {}}),
                json!("auto"),
            ),
            "must have type 'object'",
        ),
        (offering(tool(json!(true)), json!("auto")), "must be false"),
        (offering(tool(json!(false)), json!({"type": "function", "name": "u"})), "no offered tool"),
    ];
    for (body, complaint) in bad {
        let refusal = check(&body).unwrap_err();
        assert!(refusal.contains(complaint), "{body}\n{refusal}");
    }
}
