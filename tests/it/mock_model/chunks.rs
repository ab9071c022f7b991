//! An answer as a stream of `chat.completion.chunk` events, cut as the real server cuts it: ids and
//! names in the first piece of a call, usage in a chunk of its own if asked for, `[DONE]` at the
//! end.

use axum::body::Bytes;
use serde_json::{Value, json};

/// Events, one a piece.
pub(super) fn of(
    id: &str,
    request: &Value,
    message: &Value,
    finish_reason: &str,
    usage: &Value,
) -> Vec<Bytes> {
    let chunk = |choices: Value, usage: &Value| {
        let chunk = json!({"id": id, "object": "chat.completion.chunk", "created": 0, "model": request["model"],
            "choices": choices, "usage": usage, "obfuscation": "Zk3"});
        Bytes::from(format!("data: {chunk}\n\n"))
    };
    let said = |delta: &Value, reason: Option<&str>| {
        let choice = json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason});
        chunk(json!([choice]), &Value::Null)
    };
    let content = message["content"].as_str();
    let opening = json!({"role": "assistant", "content": content.map(|_| ""), "refusal": null});
    let mut events = vec![said(&opening, None)];
    for word in content.unwrap_or_default().split_inclusive(' ') {
        events.push(said(&json!({ "content": word }), None));
    }
    for (index, call) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
        let function = &call["function"];
        let first = json!({"index": index, "id": call["id"], "type": "function",
            "function": {"name": function["name"], "arguments": ""}});
        events.push(said(&json!({ "tool_calls": [first] }), None));
        let arguments: Vec<char> =
            function["arguments"].as_str().unwrap_or_default().chars().collect();
        for piece in arguments.chunks(7) {
            let piece: String = piece.iter().collect();
            let next = json!({"index": index, "function": {"arguments": piece}});
            events.push(said(&json!({ "tool_calls": [next] }), None));
        }
    }
    events.push(said(&json!({}), Some(finish_reason)));
    if request["stream_options"]["include_usage"] == json!(true) {
        events.push(chunk(json!([]), usage));
    }
    events.push(Bytes::from_static(b"data: [DONE]\n\n"));
    events
}
