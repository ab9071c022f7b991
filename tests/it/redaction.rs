//! Secrets are in no answer, event, stream, webhook or log, and those of the service are not in what
//! a model reads either; runs go on from the raw text all the same.
//!
//! With other features: a child's inputs and results are texts of runs like others; a parked run shows its
//! arguments without secrets and executes them with; what the caller is to execute stays whole;
//! sessions, streaming and crash read the journal, which is raw; webhooks are told redacted events
//! (`webhooks.rs`); tenants, budgets and skills do not touch texts; the console, the command line and
//! generated clients read the routes below. Pieces of an answer (`model.delta`) are searched where
//! they are still in order.

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text};
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    secrets_are_served_nowhere,
    secrets_behind_newlines_are_served_nowhere,
    definitions_are_served_without_secrets,
    ordinary_texts_are_served_as_they_are,
    names_and_reasons_are_served_without_secrets,
    a_secret_in_pieces_is_not_streamed,
    a_secret_of_the_service_reaches_no_model,
    an_approvers_reason_has_no_secret_of_the_service_for_the_model,
    an_edited_call_keeps_the_secrets_that_were_not_shown,
    arguments_of_client_tools_stay_whole,
}

/// Recognised by its shape.
const SHAPED: &str = "ghp_hunter2hunter2hunter2hunter2";
/// Known to the service by the name of a variable.
const KNOWN: &str = "0ld-Mc-Donald-had-a-farm";

const CLERK: &str = "
model: scripted/clerk
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, tool_policies: {}}
";

fn clerk(agent: &str, scenario: &str) -> Setup {
    Setup::new()
        .agent("clerk", agent)
        .scenario("clerk", scenario)
        .variable("PARTNER_API_KEY", KNOWN)
        .file("keys.txt", &format!("deploy with {SHAPED}\npartner {KNOWN}\n"))
}

/// Everything that is served of a run.
async fn served(service: &Service, run: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for path in ["", "/events", "/messages", "/tool-calls", "/iterations"] {
        let answer = service.get(&format!("{run}{path}")).await;
        assert_eq!(answer.status, 200, "{path}");
        all.push((path.to_owned(), answer.body.to_string()));
    }
    for path in ["/v1/runs", "/v1/audit", "/v1/approvals?status=approved", "/v1/sessions/desk"] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        all.push((path.to_owned(), answer.body.to_string()));
    }
    let stream = service.request(Method::GET, &format!("{run}/events"));
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    all.push(("stream".to_owned(), stream.text().await.unwrap()));
    all
}

async fn secrets_are_served_nowhere(db: Db) {
    let scenario = format!(
        "steps:
  - {{text: 'I use {SHAPED} now.', tool_calls: [{{tool: file_ops, arguments: {{operation: read, path: keys.txt}}}}]}}
  - tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: out.txt, content: 'password: hunter2'}}}}]
  - {{text: 'The key is {SHAPED}, the password: hunter2'}}"
    );
    let service = clerk(CLERK, &scenario).start(db).await;
    let body = json!({
        "inputs": {"task": format!("use {SHAPED}"), "api_key": "hunter2", "tokens": 7, KNOWN: 1, SHAPED: 2},
        "metadata": {"note": "password=hunter2", KNOWN: "x"}, "session_id": "desk",
    });
    let answer = service.run("clerk", &body).await;
    assert_eq!(answer["status"], "completed", "{answer:#}");
    let output = json!({"result": "The key is [redacted], the password: [redacted]"});
    assert_eq!(answer["output"], output);
    let run = format!("/v1/runs/{}", text(&answer, "run_id"));
    let mut all = served(&service, &run).await;
    all.push(("answer".into(), answer.to_string()));
    all.push(("log".into(), service.log()));
    for (place, served) in &all {
        for secret in ["hunter2", KNOWN] {
            assert!(!served.contains(secret), "{secret} in {place}: {served}");
        }
    }
    let run = service.get(&run).await.body;
    let inputs = json!({"task": "use [redacted]", "api_key": "[redacted]", "tokens": 7, "[redacted]": 1, "[redacted] 2": 2});
    assert_eq!(run["inputs"], inputs);
    assert_eq!(run["metadata"], json!({"note": "password=[redacted]", "[redacted]": "x"}));
    assert_eq!(run["usage"]["total_tokens"], run["tokens_used"], "counts are no secrets");
    assert_eq!(file(&service, "out.txt"), "password: hunter2", "what is done is done whole");
}

async fn secrets_behind_newlines_are_served_nowhere(db: Db) {
    let tokens = [
        SHAPED,
        "sk-hunter2hunter2hunter2hunter2",
        "sk_live_hunter2hunter2hunter2",
        "xoxb-1234-hunter2hunter2",
        "eyJhbGciOiJIUzI1NiJ9.hunter2hunter2.hunter2",
        "hf_hunter2hunter2hunter2hunter2",
        "glpat-hunter2hunter2hunter2",
        "AIzahunter2hunter2hunter2hunter2hunter2",
        "pypi-AgEIcHlwaS5vcmchunter2hunter2",
        "password:\n  hunter2",
    ];
    let steps = tokens.map(|token| {
        let content = json!(format!("line\n{token}\nmore\t{token}\n"));
        format!(
            "  - {{text: {content}, tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: out.txt, content: {content}}}}}, {{tool: file_ops, arguments: {{operation: read, path: out.txt}}}}]}}\n"
        )
    });
    let answer = json!(format!("The tokens:\n{}", tokens.join("\n")));
    let scenario = format!("steps:\n{}  - {{text: {answer}}}", steps.concat());
    let agent = format!("{CLERK}memory: {{recall: {{top_k: 5}}}}\n");
    let service = clerk(&agent, &scenario).start(db).await;
    let body = json!({"inputs": {"task": tokens.join("\n")}, "session_id": "desk"});
    let answer = service.run("clerk", &body).await;
    assert_eq!(answer["status"], "completed", "{answer:#}");
    let run = format!("/v1/runs/{}", text(&answer, "run_id"));
    let mut all = served(&service, &run).await;
    for path in [&format!("{run}/changes"), "/v1/memory?agent=clerk&limit=200"] {
        let listed = |list: &Value| list["data"].as_array().is_some_and(|data| !data.is_empty());
        all.push((path.to_owned(), service.until(path, listed).await.to_string()));
    }
    all.push(("answer".into(), answer.to_string()));
    all.push(("log".into(), service.log()));
    for (place, served) in &all {
        let at = served.find("hunter2");
        let near = at.map(|at| &served[served.floor_char_boundary(at.saturating_sub(60))..at + 7]);
        assert_eq!(near, None, "{place}");
    }
}

async fn definitions_are_served_without_secrets(db: Db) {
    let agent = format!(
        "{CLERK}
description: 'Knows {KNOWN}.'
instructions: 'Use token={SHAPED} and {KNOWN}.'
provider_options: {{scripted: {{api_key: {{value: hunter2}}}}}}
inputs:
  type: object
  properties:
    task: {{type: string, default: '{KNOWN}'}}
    password: {{type: string, default: hunter2, maxLength: 40}}
output:
  schema: {{type: object, description: 'Not {SHAPED}.', properties: {{result: {{type: string}}}}}}
  reflection: {{url: 'http://127.0.0.1:9/?api_key=hunter2'}}
"
    )
    .replace("tools: [file_ops]", "tools: [file_ops, 'http:api/a']")
    .replace("paths:", "network: {credentials: [partner], allow: ['*']}, paths:");
    let tools = format!(
        "base_url: http://127.0.0.1:9\ntools: [{{name: a, description: 'Not {KNOWN}.', method: GET, path: /, \
         input_schema: {{type: object, properties: {{token: {{type: string, description: '{SHAPED}'}}}}}}}}]"
    );
    let credential = "[tools.credentials.partner]\nurl = \"https://a.example/\"\ntoken_env = \"PARTNER_API_KEY\"";
    let service = clerk(&agent, "steps: [{text: done}]").tools("api", &tools).config(credential);
    let service = service.start(db).await;
    let dry_run = service.post("/v1/agents/clerk/dry-run", &json!({})).await;
    for path in ["/v1/agents", "/v1/agents/clerk", "/v1/tools", "/v1/tools/http%3Aapi%2Fa"] {
        let served = service.get(path).await;
        assert_eq!(served.status, 200, "{path}: {:#}", served.body);
        for secret in ["hunter2", KNOWN] {
            assert!(!served.body.to_string().contains(secret), "{secret} in {path}: {served:#?}");
        }
    }
    for secret in ["hunter2", KNOWN] {
        assert!(!dry_run.body.to_string().contains(secret), "{secret}: {:#}", dry_run.body);
    }
    let shown = service.get("/v1/agents/clerk").await.body;
    let password = json!({"type": "string", "default": "[redacted]", "maxLength": 40});
    assert_eq!(shown["inputs"]["properties"]["password"], password);
    assert_eq!(shown["governance"]["network"]["credentials"], json!(["partner"]));
    let tool = service.get("/v1/tools/http%3Aapi%2Fa").await.body;
    assert_eq!(tool["description"], "Not [redacted].");
    let token = json!({"type": "string", "description": "[redacted]"});
    assert_eq!(tool["input_schema"]["properties"]["token"], token);
}

async fn ordinary_texts_are_served_as_they_are(db: Db) {
    let ordinary = "cat: /etc/passwd: Permission denied\nsecret: true\n\"password\": null\n\
                    token = parser.next_token()\npassword: ${DB_PASSWORD}";
    let content = json!(ordinary);
    let scenario = format!(
        "steps:
  - tool_calls: [{{tool: file_ops, arguments: {{operation: write, path: out.txt, content: {content}}}}}]
  - tool_calls: [{{tool: file_ops, arguments: {{operation: read, path: out.txt}}}}]
  - {{text: {content}}}"
    );
    let service = clerk(CLERK, &scenario).start(db).await;
    let answer = service.run("clerk", &json!({})).await;
    assert_eq!(answer["output"]["result"], ordinary, "{answer:#}");
    let calls = service.get(&format!("/v1/runs/{}/tool-calls", text(&answer, "run_id"))).await.body;
    assert!(!calls.to_string().contains("[redacted]"), "{calls:#}");
    assert_eq!(calls["data"][0]["arguments"]["content"], ordinary, "{calls:#}");
}

async fn names_and_reasons_are_served_without_secrets(db: Db) {
    let asks = CLERK.replace("tool_policies: {}", "tool_policies: {file_ops: ask}");
    let scenario = format!(
        "steps:
  - tool_calls: [{{tool: 'get_{SHAPED}', arguments: {{}}}}, {{tool: file_ops, arguments: {{operation: list, path: '.'}}}}]
  - {{text: done}}"
    );
    let service = clerk(&asks, &scenario).start(db).await;
    let parked = service.post("/v1/agents/clerk/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let (run, calls) = paths(&parked.body);
    let reason = json!({"reason": format!("because\n{SHAPED}")});
    let denied = service.post(&format!("{}/deny", calls[0]), &reason).await;
    assert_eq!(denied.status, 200, "{:#}", denied.body);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    let parked = service.post("/v1/agents/clerk/invoke-iterative", &json!({})).await;
    let (other, _) = paths(&parked.body);
    let cancelled = service.post(&format!("{other}/cancel"), &reason).await;
    assert!(cancelled.status.is_success(), "{:#}", cancelled.body);
    let key = json!({"name": format!("n {SHAPED}"), "scopes": ["runs:read"]});
    let key = service.post("/v1/keys", &key).await;
    assert_eq!(key.status, 201, "{:#}", key.body);
    let who = service.http.get(service.url("/console/session"));
    let who = answer(who.bearer_auth(text(&key.body, "key"))).await;
    assert_eq!(who.body["caller"]["key"]["name"], "n [redacted]", "{:#}", who.body);
    let mut all = vec![("denied".to_owned(), denied.body.to_string())];
    let calls = format!("{run}/tool-calls");
    for path in [
        "/v1/approvals?status=denied",
        "/v1/audit?limit=200",
        "/v1/stats/tools",
        "/v1/keys",
        &calls,
        &format!("{run}/events"),
        &format!("{run}/messages"),
        &other,
        &format!("{other}/events"),
    ] {
        let answer = service.get(path).await;
        assert_eq!(answer.status, 200, "{path}");
        all.push((path.to_owned(), answer.body.to_string()));
    }
    let missing = service.get(&format!("/v1/agents/{SHAPED}")).await;
    assert_eq!(missing.status, 404);
    all.push(("missing".to_owned(), missing.body.to_string()));
    let mut unknown = json!({"inputs": {}});
    unknown[format!("unknown_{SHAPED}")] = json!(1);
    let refused = service.post("/v1/agents/clerk/invoke-iterative", &unknown).await;
    assert_eq!(refused.status, 422, "{:#}", refused.body);
    all.push(("refused".to_owned(), refused.body.to_string()));
    all.push(("metrics".to_owned(), service.get("/metrics").await.body.to_string()));
    for (place, served) in &all {
        let at = served.find("hunter2");
        let near = at.map(|at| &served[served.floor_char_boundary(at.saturating_sub(60))..at + 7]);
        assert_eq!(near, None, "{place}");
    }
}

async fn a_secret_in_pieces_is_not_streamed(db: Db) {
    let scenario = format!(
        "steps:
  - {{delay_ms: 300, text: 'I use {SHAPED} now, with password: hunter2 and no more.'}}"
    );
    let service = clerk(CLERK, &scenario).start(db).await;
    let request = service
        .request(Method::POST, "/v1/agents/clerk/invoke-iterative")
        .header("accept", "text/event-stream");
    let stream = request.json(&json!({})).send().await.unwrap().text().await.unwrap();
    assert!(stream.contains("event: model.delta"), "{stream}");
    assert!(!stream.contains("hunter2"), "{stream}");
    let pieces = stream.lines().filter_map(|line| line.strip_prefix("data: "));
    let pieces = pieces.filter_map(|data| serde_json::from_str::<Value>(data).ok());
    let written: String =
        pieces.filter_map(|piece| piece["data"]["text"].as_str().map(str::to_owned)).collect();
    assert_eq!(written, "I use [redacted] now, with password: [redacted] and no more.");
}

async fn a_secret_of_the_service_reaches_no_model(db: Db) {
    let scenario = "steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: keys.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: out.txt, content: '{{ inputs.task }} {{ results[0] }}'}}]
  - {text: done}";
    let service = clerk(CLERK, scenario).start(db).await;
    let body = json!({"inputs": {"task": format!("send {KNOWN}")}});
    assert_eq!(service.run("clerk", &body).await["status"], "completed");
    // The model repeated what it had read.
    let read = file(&service, "out.txt");
    assert!(read.starts_with("send [redacted] ") && read.contains("partner [redacted]"), "{read}");
    assert!(read.contains(SHAPED), "what only looks like a secret is the model's to use: {read}");
}

async fn an_approvers_reason_has_no_secret_of_the_service_for_the_model(db: Db) {
    let supervised = CLERK.replace("autonomy: full", "autonomy: supervised");
    let scenario = "steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: delete, path: keys.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: out.txt, content: '{{ results[0] }}'}}]
  - {text: done}";
    let service = clerk(&supervised, scenario).start(db).await;
    let parked = service.post("/v1/agents/clerk/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let (run, calls) = paths(&parked.body);
    let reason = json!({"reason": format!("It still needs {KNOWN}.")});
    let denied = service.post(&format!("{}/deny", calls[0]), &reason).await;
    assert_eq!(denied.status, 200, "{:#}", denied.body);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    let read = file(&service, "out.txt");
    assert!(read.contains("It still needs [redacted]."), "{read}");
}

async fn an_edited_call_keeps_the_secrets_that_were_not_shown(db: Db) {
    let asks = CLERK.replace("tool_policies: {}", "tool_policies: {file_ops: ask}");
    let scenario = "steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: 'password: hunter2'}}]
  - {text: done}";
    let service = clerk(&asks, scenario).start(db).await;
    let parked = service.post("/v1/agents/clerk/invoke-iterative", &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let (run, calls) = paths(&parked.body);
    let mut arguments = parked.body["pending"][0]["arguments"].clone();
    assert_eq!(arguments["content"], "password: [redacted]", "{arguments:#}");
    assert!(!parked.body.to_string().contains("hunter2"), "{:#}", parked.body);
    arguments["path"] = json!("b.txt");
    let approve = format!("{}/approve", calls[0]);
    let approved = service.post(&approve, &json!({ "arguments": arguments })).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "b.txt"), "password: hunter2");
    for (place, served) in served_without_session(&service, &run).await {
        assert!(!served.contains("hunter2"), "{place}: {served}");
    }
}

async fn served_without_session(service: &Service, run: &str) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for path in [&format!("{run}/events"), "/v1/approvals?status=approved", "/v1/audit"] {
        all.push((path.to_owned(), service.get(path).await.body.to_string()));
    }
    all
}

async fn arguments_of_client_tools_stay_whole(db: Db) {
    let scenario = "steps:
  - tool_calls: [{tool: login, arguments: {user: ann, password: hunter2}}]
  - {text: '{{ results[0] }}'}";
    let service = clerk(CLERK, scenario).start(db).await;
    let body = json!({"client_tools": [{
        "name": "login", "description": "Logs in.", "input_schema": {"type": "object"},
    }]});
    let parked = service.post("/v1/agents/clerk/invoke-iterative", &body).await;
    assert_eq!(parked.body["status"], "awaiting_tool_results", "{:#}", parked.body);
    let whole = json!({"user": "ann", "password": "hunter2"});
    assert_eq!(parked.body["pending"][0]["arguments"], whole);
    let (run, calls) = paths(&parked.body);
    let events = service.get(&format!("{run}/events")).await.body;
    let asked = events["data"].as_array().unwrap().iter();
    let asked: Vec<&Value> =
        asked.filter(|event| event["type"] == "tool_call.awaiting_client").collect();
    assert_eq!(asked[0]["data"]["arguments"], whole, "{events:#}");
    let result = json!({"content": format!("logged in with {KNOWN}")});
    assert_eq!(service.post(&format!("{}/result", calls[0]), &result).await.status, 200);
    let done = ended(&service, &run).await;
    assert!(text(&done["output"], "result").contains("logged in with [redacted]"), "{done:#}");
}
