//! What a refusal repeats of what was sent: at most 200 characters, wherever it stood.
//!
//! With other features. Stores: nothing is stored. Streaming: a refused stream is answered with the same problem.
//! Console, command line, generated clients: they show the problem. Tenants, sessions, children: no
//! difference.

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Db, Setup, answer};

/// What no text of ours has.
const SENT: char = 'ÿ';

/// The texts in a document.
fn texts(document: &Value) -> Vec<&str> {
    match document {
        Value::String(text) => vec![text],
        Value::Array(items) => items.iter().flat_map(texts).collect(),
        Value::Object(fields) => fields.values().flat_map(texts).collect(),
        _ => Vec::new(),
    }
}

/// The most characters of what was sent that a text in a document repeats.
fn repeated(document: &Value) -> usize {
    let of = |text: &str| text.matches(SENT).count() + text.matches("%C3%BF").count() * 6;
    texts(document).into_iter().map(of).max().unwrap_or(0)
}

#[tokio::test]
async fn no_text_of_a_refusal_repeats_more_than_200_characters() {
    let long = SENT.to_string().repeat(5000);
    let encoded = "%C3%BF".repeat(2000);
    let inputs = "{type: object, required: [n], properties: {n: {type: integer}, k: {enum: [a]}}, additionalProperties: false}";
    let service = Setup::new()
        .agent("chat", &format!("model: scripted/x\ninputs: {inputs}\n"))
        .scenario("x", "steps: [{text: fine}]")
        .start(Db::Sqlite)
        .await;
    let invoke = "/v1/agents/chat/invoke-iterative";
    let deep = (0..60).fold(json!(1), |inner, _| json!({ (long[..100]): inner }));
    let bodies = [
        (invoke, json!({ (long.clone()): 1 })),
        (invoke, json!({"metadata": { (long.clone()): "v" }})),
        (invoke, json!({"metadata": { (long.clone()): 1 }})),
        (invoke, json!({"tool_choice": long})),
        (invoke, json!({"tool_choice": {"tool": long}})),
        (invoke, json!({"on_limit": long})),
        (invoke, json!({"model": format!("scripted/{long}")})),
        (invoke, json!({"tools": [long]})),
        (invoke, json!({"run_id": long})),
        (invoke, json!({"session_id": long})),
        (invoke, json!({"active_skills": [long]})),
        (invoke, json!({"webhook": {"url": format!("http://{long}")}})),
        (invoke, json!({"client_tools": [{"name": long, "input_schema": {"type": "object"}}]})),
        (invoke, json!({"inputs": {"n": long}})),
        (invoke, json!({"inputs": {"n": 1, "k": long}})),
        (invoke, json!({"inputs": {"n": 1, (long.clone()): 1}})),
        (invoke, json!({"inputs": {"n": 1, "k": deep}})),
        (invoke, json!({"budget": { (long.clone()): 1 }})),
        ("/v1/keys", json!({"name": "k", "scopes": [long]})),
        ("/v1/keys", json!({"name": "k", "tenant": long, "scopes": []})),
        ("/v1/keys", json!({"name": long, "scopes": []})),
        ("/v1/tokens", json!({"run_id": long, "actions": [long]})),
        ("/v1/agents/chat/policy/replay", json!({"definition": format!("{long}: 1")})),
        ("/v1/agents/chat/policy/replay", json!({"cursor": long})),
        ("/v1/agents/chat/policy/judge", json!({"tool": long, "arguments": {}})),
    ];
    let mut answers = Vec::new();
    for (path, body) in bodies {
        let told = body.to_string().chars().take(60).collect::<String>();
        answers.push((format!("{path} {told}"), service.post(path, &body).await));
    }
    for path in [
        format!("/v1/{encoded}"),
        format!("/v1/agents/{encoded}"),
        format!("/v1/runs/{encoded}"),
        format!("/v1/tools/{encoded}"),
        format!("/v1/sessions/{encoded}"),
        format!("/v1/runs?{encoded}=1"),
        format!("/v1/runs?status={encoded}"),
        format!("/v1/runs?limit={encoded}"),
        format!("/v1/runs?cursor={encoded}"),
        format!("/v1/runs?created_after={encoded}"),
        format!("/v1/runs?metadata.{encoded}=x&nosuch={encoded}"),
        format!("/v1/audit?run_id={encoded}"),
    ] {
        answers.push((path.chars().take(60).collect(), service.get(&path).await));
    }
    for (name, value) in [
        ("idempotency-key", long.clone()),
        ("prefer", format!("wait={long}")),
        ("accept", format!("application/{long}")),
        ("content-type", format!("application/{long}")),
        ("content-encoding", long.clone()),
        ("x-request-id", long.clone()),
    ] {
        let request = service.request(Method::POST, invoke).header(name, value.as_bytes());
        let request = match name {
            "content-type" => request.body("{}"),
            _ => request.json(&json!({"inputs": {"n": "no"}})),
        };
        answers.push((name.to_owned(), answer(request).await));
    }
    let mut most = 0;
    for (what, refused) in answers {
        assert!(refused.status.is_client_error(), "{what}: {}", refused.status);
        most = most.max(repeated(&refused.body));
        assert!(most <= 200, "{what}: {most} characters in {:#}", refused.body);
    }
    assert!(most > 0, "none repeats anything");
}
