//! The API as its document promises it: who is let in, what is refused, what answers look like.
//! What runs do is told in `stories`.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    every_route_requires_its_scope_and_names_it,
    responses_match_the_document,
    documented_parameters_are_accepted_and_others_rejected,
    keys_are_shown_once_and_stop_working_when_revoked,
    a_caller_cannot_grant_scopes_that_it_does_not_have,
    agents_and_tools_are_listed_and_found_by_name,
    a_rejected_body_keeps_the_connection_open,
    responses_have_a_request_id_and_a_run_id,
    health_and_document_need_no_key,
    the_audit_log_is_filtered_and_paginated,
}

const READER: &str = "
model: scripted/reader
description: Reads a file.
instructions: Read the files.
inputs: {type: object, required: [task], properties: {task: {type: string}}}
tools: [file_ops]
enable_double_confirmation: false
";

const READING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: missing.txt}}]
  - text: "{{ results[0] }}"
"#;

fn reader() -> Setup {
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READING)
        .file("notes.txt", "seventeen\n")
}

fn document() -> Value {
    serde_json::from_str(include_str!("../../openapi/openapi.json")).unwrap()
}

struct Operation {
    method: Method,
    path: String,
    details: Value,
}

impl Operation {
    /// The path with its parameters filled in.
    fn path(&self, run: &str) -> String {
        let id = if self.path.starts_with("/keys") { "unknown" } else { run };
        let name = if self.path.starts_with("/tools") { "file_ops" } else { "reader" };
        let path = self.path.replace("{id}", id).replace("{name}", name);
        format!("/v1{}", path.replace("{call_id}", run))
    }

    fn scope(&self) -> Option<&str> {
        self.scopes().first().copied()
    }

    /// All that it requires.
    fn scopes(&self) -> Vec<&str> {
        let scopes = self.details["x-scopes"].as_array();
        scopes.into_iter().flatten().filter_map(Value::as_str).collect()
    }
}

fn operations() -> Vec<Operation> {
    let document = document();
    let mut operations = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, details) in item.as_object().unwrap() {
            let method = method.to_uppercase().parse().unwrap();
            operations.push(Operation { method, path: path.clone(), details: details.clone() });
        }
    }
    operations
}

fn problem(answer: &Answer) -> (u16, &str) {
    assert_eq!(answer.headers["content-type"], "application/problem+json", "{answer:?}");
    assert_eq!(answer.body["status"], answer.status.as_u16());
    (answer.status.as_u16(), answer.body["code"].as_str().unwrap())
}

async fn key(service: &Service, scopes: &[&str]) -> String {
    let made = service.post("/v1/keys", &json!({"name": "test", "scopes": scopes})).await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    made.body["key"].as_str().unwrap().to_owned()
}

#[test]
fn the_document_has_all_that_is_answered() {
    let document = document();
    for (path, item) in document["paths"].as_object().unwrap() {
        let is_file = path.ends_with("/files/{path}");
        assert_eq!(item.get("head").is_some(), is_file, "{path}");
        if is_file {
            let (head, get) = (&item["head"], &item["get"]);
            let id = get["operationId"].as_str().unwrap().replace("get_", "head_");
            assert_eq!(head["operationId"], *id);
            assert_eq!(head["x-scopes"], get["x-scopes"]);
            assert!(head["responses"]["200"].get("content").is_none(), "{path}");
            assert!(head["responses"].get("206").is_none(), "{path}");
            let parameters = head["parameters"].as_array().unwrap();
            assert!(parameters.iter().all(|it| it["name"] != "Range"), "{path}");
        }
        for (method, operation) in item.as_object().unwrap() {
            let forbidden = operation["responses"]["403"]["$ref"].as_str().unwrap_or_default();
            assert!(forbidden.contains("ForeignOrigin"), "{method} {path}: {forbidden}");
        }
    }
}

#[test]
fn request_bodies_have_the_bounds_of_the_service() {
    let document = document();
    for (pointer, least, most) in [
        ("InvokeIterativeRequest/properties/temperature", "minimum 0", "maximum 2"),
        ("InvokeIterativeRequest/properties/max_iterations", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/max_iterations_per_attempt", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/max_attempts", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/max_tool_calls_per_iteration", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/tool_call_timeout_seconds", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/error_threshold", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/tools", "", "maxItems 64"),
        ("InvokeIterativeRequest/properties/client_tools", "", "maxItems 128"),
        ("BudgetOverrides/properties/max_iterations", "minimum 1", ""),
        ("BudgetOverrides/properties/max_duration_seconds", "minimum 1", ""),
        ("BudgetOverrides/properties/max_total_tokens", "minimum 1", ""),
        ("InvokeIterativeRequest/properties/model", "", "maxLength 256"),
        ("InvokeIterativeRequest/properties/session_id", "minLength 1", "maxLength 256"),
        ("InvokeRequest/properties/model", "", "maxLength 256"),
        ("RunMetadata", "", "maxProperties 64"),
        ("RunMetadata/propertyNames", "minLength 1", "maxLength 128"),
        ("RunMetadata/additionalProperties", "", "maxLength 1024"),
        ("ClientTool/properties/name", "minLength 1", "maxLength 64"),
        ("CancelRequest/properties/reason", "", "maxLength 1000"),
        ("ApproveRequest/properties/reason", "", "maxLength 1000"),
        ("KeyRequest/properties/name", "minLength 1", "maxLength 200"),
    ] {
        let schema = document.pointer(&format!("/components/schemas/{pointer}"));
        let schema = schema.unwrap_or_else(|| panic!("{pointer}"));
        for bound in [least, most] {
            let Some((keyword, number)) = bound.split_once(' ') else { continue };
            assert_eq!(schema[keyword].as_f64(), number.parse().ok(), "{pointer}: {bound}");
        }
    }
}

async fn every_route_requires_its_scope_and_names_it(db: Db) {
    let service = reader().start(db).await;
    let run = uuid::Uuid::from_u128(5).to_string();
    let poor = key(&service, &["tools:execute"]).await;
    let mut held = BTreeMap::new();
    for operation in operations() {
        let Some(scope) = operation.scope() else { continue };
        if operation.method == Method::HEAD {
            continue; // as GET, without a body
        }
        let url = service.url(&operation.path(&run));
        let ask = |key: Option<&str>| {
            let request = service.http.request(operation.method.clone(), &url);
            answer(if let Some(key) = key { request.bearer_auth(key) } else { request })
        };
        assert_eq!(problem(&ask(None).await), (401, "UNAUTHENTICATED"), "{url}");
        assert_eq!(
            problem(&ask(Some("tl_testadmin_not-the-secret-of-this-key")).await),
            (401, "UNAUTHENTICATED")
        );
        let refused = ask(Some(&poor)).await;
        assert_eq!(problem(&refused), (403, "FORBIDDEN"), "{url}");
        assert!(
            refused.body["detail"].as_str().unwrap().contains(scope),
            "{refused:?} does not name {scope}"
        );
        let scopes = operation.scopes();
        if let Entry::Vacant(unheld) = held.entry(scopes.join(" ")) {
            unheld.insert(key(&service, &scopes).await);
        }
        let let_in = ask(Some(&held[&scopes.join(" ")])).await;
        assert!(![401, 403, 500, 503].contains(&let_in.status.as_u16()), "{url}: {let_in:?}");
    }
    assert!(held.len() >= 7, "{held:?}");
}

/// Every successful read, checked against the schema that the document gives for it.
async fn responses_match_the_document(db: Db) {
    let service = reader().start(db).await;
    let id = uuid::Uuid::from_u128(4).to_string();
    let body =
        json!({"inputs": {"task": "x"}, "metadata": {"a": "b"}, "run_id": id, "session_id": id});
    let invoked = service.run("reader", &body).await;
    let run = invoked["run_id"].as_str().unwrap();
    let document = document();
    let mut checked = 0;
    for operation in operations() {
        let (status, body) = match (operation.method.as_str(), operation.path.as_str()) {
            ("GET", "/metrics") => continue, // text, see the tests of telemetry
            ("GET" | "HEAD", path) if path.ends_with("/files/{path}") => continue, // see the tests of files
            ("GET", "/sessions/{id}/files") => continue, // this agent keeps none for a session
            ("GET", _) => ("200", service.get(&operation.path(run)).await),
            (
                "POST",
                "/agents/{name}/invoke"
                | "/agents/{name}/invoke-iterative"
                | "/agents/{name}/dry-run",
            ) => {
                ("200", service.post(&operation.path(run), &json!({"inputs": {"task": "x"}})).await)
            }
            ("POST", "/runs/{id}/cancel") => {
                ("200", service.post(&operation.path(run), &json!({})).await)
            }
            ("POST", "/keys") => {
                ("201", service.post("/keys", &json!({"name": "n", "scopes": ["runs:read"]})).await)
            }
            ("POST", "/tokens") => {
                let request = json!({"run_id": run, "actions": ["read"]});
                ("201", service.post("/tokens", &request).await)
            }
            ("POST", "/agents/{name}/policy/judge" | "/agents/{name}/call") => {
                let call =
                    json!({"tool": "file_ops", "arguments": {"operation": "list", "path": "."}});
                let mut call = call;
                if operation.path.ends_with("/call") {
                    call["inputs"] = json!({"task": "x"});
                }
                ("200", service.post(&operation.path(run), &call).await)
            }
            _ => continue,
        };
        assert_eq!(body.status.as_str(), status, "{} {body:?}", operation.path);
        let content = &operation.details["responses"][status]["content"]["application/json"];
        let example = content.get("example").map(|example| ("example", example));
        for (what, value) in [("answer", &body.body)].into_iter().chain(example) {
            let mut schema = content["schema"].clone();
            schema["components"] = document["components"].clone();
            let validator = jsonschema::validator_for(&schema).unwrap();
            let errors: Vec<String> = validator
                .iter_errors(value)
                .map(|e| format!("{} {e}", e.instance_path()))
                .collect();
            assert!(errors.is_empty(), "{what} of {}: {errors:#?}", operation.path);
        }
        checked += 1;
    }
    assert_eq!(checked, 37);
}

async fn documented_parameters_are_accepted_and_others_rejected(db: Db) {
    let service = reader().start(db).await;
    let run = uuid::Uuid::from_u128(4).to_string();
    service
        .run("reader", &json!({"inputs": {"task": "x"}, "run_id": run, "session_id": run}))
        .await;
    for operation in operations().iter().filter(|o| o.scope().is_some()) {
        let path = operation.path(&run);
        if operation.method != Method::GET {
            let request = service.request(operation.method.clone(), &format!("{path}?colour=red"));
            let refused = answer(request.json(&json!({}))).await;
            let expected = if operation.method == Method::HEAD {
                refused.status == 400 // without a body
            } else {
                problem(&refused) == (400, "INVALID_PARAMETER")
                    && refused.body["detail"].to_string().contains("colour")
            };
            assert!(expected, "{} {path}: {refused:?}", operation.method);
            continue;
        }
        if operation.path == "/sessions/{id}/files" {
            continue; // this agent keeps none for a session
        }
        let refused = service.get(&format!("{path}?colour=red")).await;
        assert_eq!(problem(&refused), (400, "INVALID_PARAMETER"), "{path}");
        assert!(refused.body["detail"].as_str().unwrap().contains("colour"));
        for parameter in operation.details["parameters"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|p| p["in"] == "query")
        {
            let name = match parameter["name"].as_str().unwrap() {
                // One parameter a label: it stands for all that begin with its name.
                "metadata" => "metadata.ticket",
                name => name,
            };
            let value = match name {
                "limit" | "after" | "timeout" | "unsigned_until" => "7",
                "status" if path.ends_with("/approvals") => "approved",
                "status" if path.ends_with("/deliveries") => "pending",
                "status" | "termination_reason" => "completed",
                "action" => "tool_call",
                "decision" => "allowed",
                "outcome" => "failed",
                "run_id" | "parent_run_id" => &run,
                "created_after" | "created_before" | "since" | "until" => {
                    "2026-01-31T12:00:00%2B01:00"
                }
                "cursor" | "access_token" => continue, // a credential: see the tests of tokens
                _ => "anything",
            };
            let taken = service.get(&format!("{path}?{name}={value}")).await;
            assert_eq!(taken.status, 200, "{path}?{name}={value} {taken:?}");
            for wrong in [
                format!("{name}={value}&{name}={value}"),
                format!("{name}=%00"),
                format!("{name}=%ff"),
            ] {
                let refused = service.get(&format!("{path}?{wrong}")).await;
                assert_eq!(problem(&refused), (400, "INVALID_PARAMETER"), "{path}?{wrong}");
            }
        }
    }
}

async fn keys_are_shown_once_and_stop_working_when_revoked(db: Db) {
    let service = reader().start(db).await;
    let body = json!({
        "name": "ci", "scopes": ["runs:read", "agents:invoke", "runs:read"], "expires_at": "2100-01-01T00:00:00Z",
        "rate_limit_per_minute": 5, "rate_limit_burst": 2,
    });
    let made = service.post("/v1/keys", &body).await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    let (id, token) = (made.body["id"].as_str().unwrap(), made.body["key"].as_str().unwrap());
    assert!(token.starts_with(&format!("tl_{id}_")) && token.len() > 50, "{token}");
    assert_eq!(made.body["scopes"], json!(["agents:invoke", "runs:read"]));
    assert_eq!(
        (&made.body["tenant"], &made.body["expires_at"]),
        (&json!("default"), &body["expires_at"])
    );

    let listed = service.get("/v1/keys").await.body;
    let mut shown = made.body.as_object().unwrap().clone();
    shown.remove("key");
    shown.remove("warnings");
    assert_eq!(listed["data"][0], Value::Object(shown), "newest first, without the secret");
    assert_eq!(listed["data"].as_array().unwrap().len(), 2);
    assert!(!listed.to_string().contains(token.splitn(3, '_').nth(2).unwrap()));

    let with_it = || answer(service.http.get(service.url("/v1/runs")).bearer_auth(token));
    assert_eq!(with_it().await.status, 200);
    assert_eq!(service.delete(&format!("/v1/keys/{id}")).await.status, 204);
    assert_eq!(problem(&with_it().await), (401, "UNAUTHENTICATED"), "at once");
    assert_eq!(service.delete(&format!("/v1/keys/{id}")).await.status, 204, "again is harmless");
    assert!(service.get("/v1/keys").await.body["data"][0]["revoked_at"].is_string());
    for unknown in ["nobody", "a%00b", "a%2Fb", "%C3%A9"] {
        assert_eq!(
            problem(&service.delete(&format!("/v1/keys/{unknown}")).await),
            (404, "NOT_FOUND"),
            "{unknown}"
        );
    }

    // With as much room as the machine needs to create it before it expires.
    let mut room = 500;
    let short = loop {
        let soon = chrono::Utc::now() + chrono::Duration::milliseconds(room);
        let short = json!({"name": "s", "scopes": ["runs:read"], "expires_at": soon});
        let short = service.post("/v1/keys", &short).await;
        if short.status == 201 {
            break short;
        }
        assert_eq!(short.body["errors"][0]["pointer"], "/expires_at", "{short:?}");
        room *= 2;
        assert!(room < 60_000, "{short:?}");
    };
    let token = short.body["key"].as_str().unwrap().to_owned();
    let mut last = 0;
    for _ in 0..6000 {
        last = answer(service.http.get(service.url("/v1/runs")).bearer_auth(&token))
            .await
            .status
            .as_u16();
        if last == 401 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    assert_eq!(last, 401, "an expired key is refused");
}

async fn a_caller_cannot_grant_scopes_that_it_does_not_have(db: Db) {
    let mut service = reader().start(db).await;
    let faulty = [
        (json!({"scopes": ["runs:read"]}), "/name"),
        (json!({"name": "x".repeat(201), "scopes": ["runs:read"]}), "/name"),
        (json!({"name": "x"}), "/scopes"),
        (json!({"name": "x", "scopes": ["runs:read", "everything"]}), "/scopes/1"),
        (json!({"name": "x", "scopes": "runs:read"}), "/scopes"),
        (json!({"name": "x", "scopes": ["runs:read"], "tenant": "Not A Tenant"}), "/tenant"),
        (
            json!({"name": "x", "scopes": ["runs:read"], "expires_at": "2020-01-01T00:00:00Z"}),
            "/expires_at",
        ),
        (json!({"name": "x", "scopes": ["runs:read"], "expires_at": "tomorrow"}), "/expires_at"),
        (
            json!({"name": "x", "scopes": ["runs:read"], "rate_limit_per_minute": 0}),
            "/rate_limit_per_minute",
        ),
        (json!({"name": "x", "scopes": ["runs:read"], "secret": "mine"}), "/secret"),
    ];
    for (body, pointer) in faulty {
        let refused = service.post("/v1/keys", &body).await;
        assert_eq!(problem(&refused), (422, "INVALID_INPUTS"), "{body}");
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{body}: {:#}", refused.body);
    }
    service.key = key(&service, &["keys:admin", "runs:read"]).await;
    for (tenant, scope, status) in [
        ("default", "runs:read", 201),
        ("default", "keys:admin", 201),
        ("default", "runs:cancel", 403),
        ("default", "admin", 403),
        ("other", "runs:read", 403),
    ] {
        let body = json!({"name": "x", "tenant": tenant, "scopes": [scope]});
        let made = service.post("/v1/keys", &body).await;
        assert_eq!(made.status.as_u16(), status, "{body}: {:#}", made.body);
    }
}

async fn agents_and_tools_are_listed_and_found_by_name(db: Db) {
    let mut service = reader().agent("another", READER).start(db).await;
    let list = service.get("/v1/agents").await.body;
    let names: Vec<&Value> = list["data"].as_array().unwrap().iter().map(|a| &a["name"]).collect();
    assert_eq!(names, ["another", "reader"]);
    let agent = service.get("/agents/reader").await.body;
    assert_eq!(
        (&agent["description"], &agent["hash"]),
        (&json!("Reads a file."), &list["data"][1]["hash"])
    );
    assert_eq!(
        (&agent["tools"], &agent["limits"]["max_attempts"]),
        (&json!(["file_ops"]), &json!(3))
    );
    assert_eq!(agent["inputs"]["required"], json!(["task"]));
    assert_eq!(problem(&service.get("/v1/agents/nobody").await), (404, "NOT_FOUND"));

    let first = service.get("/v1/agents?limit=1").await.body;
    let cursor = first["next_cursor"].as_str().unwrap();
    let second = service.get(&format!("/v1/agents?limit=1&cursor={cursor}")).await.body;
    assert_eq!(
        (&second["data"][0]["name"], &second["next_cursor"]),
        (&json!("reader"), &Value::Null)
    );

    let tool = service.get("/v1/tools/file_ops").await.body;
    assert_eq!((&tool["allowed"], &tool["source"]), (&json!(true), &json!("builtin")));
    assert_eq!(tool["input_schema"]["type"], "object");
    for (scopes, allowed) in
        [(vec!["tools:read"], false), (vec!["tools:read", "tools:file_ops"], true)]
    {
        let key = key(&service, &scopes).await;
        let seen = answer(service.http.get(service.url("/v1/tools")).bearer_auth(key)).await.body;
        let tools = seen["data"].as_array().unwrap();
        let tool = tools.iter().find(|tool| tool["name"] == "file_ops").unwrap();
        assert_eq!(tool["allowed"], allowed, "{scopes:?}");
    }
    service.key = key(&service, &["agents:read"]).await;
    assert_eq!(service.get("/v1/agents").await.status, 200);
}

#[tokio::test]
async fn a_definition_is_shown_with_its_defaults() {
    let service = reader().start(Db::Sqlite).await;
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    let run = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    let agent = service.get("/v1/agents/reader").await.body;
    for (section, of_run) in [
        (&agent["limits"], &run["limits"]),
        (&agent["governance"]["budget"], &run["budget"]["limits"]),
    ] {
        for (name, value) in of_run.as_object().unwrap() {
            assert!(value.is_null() || section[name] == *value, "{name}: {value} {section:#}");
        }
    }
    assert_eq!(agent["limits"]["tool_call_timeout_seconds"], 60, "{:#}", agent["limits"]);
    let budget = &agent["governance"]["budget"];
    assert_eq!(budget["max_files_modified"], 50, "{budget:#}");
}

async fn a_rejected_body_keeps_the_connection_open(db: Db) {
    let service = reader().config("[server]\nbody_limit = \"64KiB\"").start(db).await;
    let path = "/v1/agents/reader/invoke-iterative";
    let send = async |body: reqwest::Body, kind: &str| {
        answer(service.request(Method::POST, path).header("content-type", kind).body(body)).await
    };
    let deep =
        format!("{{\"inputs\": {{\"task\": {}1{}}}}}", "[".repeat(20_000), "]".repeat(20_000));
    for (body, expected) in [
        (String::from("{\"inputs\": "), (400, "MALFORMED_JSON")),
        ("nonsense".into(), (400, "MALFORMED_JSON")),
        ("[]".into(), (422, "INVALID_INPUTS")),
        (r#"{"inputs": {"task": "a\u0000b"}}"#.into(), (400, "MALFORMED_JSON")),
        (r#"{"inputs": {"task": "x", "\u0000": 1}}"#.into(), (400, "MALFORMED_JSON")),
        (r#"{"inputs": {"task": "\ud800"}}"#.into(), (400, "MALFORMED_JSON")),
        (r#"{"inputs": {"task": 1e999}}"#.into(), (400, "MALFORMED_JSON")),
        (r#"{"inputs": {"task": 18446744073709551616}}"#.into(), (400, "MALFORMED_JSON")),
        (deep, (400, "MALFORMED_JSON")),
        (
            format!(r#"{{"inputs": {{"task": "{}"}}}}"#, "x".repeat(70_000)),
            (413, "PAYLOAD_TOO_LARGE"),
        ),
        ("x".repeat(11_000_000), (413, "PAYLOAD_TOO_LARGE")),
    ] {
        let start: String = body.chars().take(40).collect();
        assert_eq!(problem(&send(body.into(), "application/json").await), expected, "{start}");
    }
    let chunks = futures::stream::iter((0..200).map(|_| Ok::<_, std::io::Error>("x".repeat(1000))));
    let chunked = send(reqwest::Body::wrap_stream(chunks), "application/json").await;
    assert_eq!(problem(&chunked), (413, "PAYLOAD_TOO_LARGE"));
    assert_eq!(problem(&send("{}".into(), "text/plain").await), (415, "UNSUPPORTED_MEDIA_TYPE"));
    assert_eq!(
        problem(&send("".into(), "text/plain").await),
        (422, "INVALID_INPUTS"),
        "no body is an empty object"
    );
    let literal =
        send(r#"{"inputs": {"task": "\\u0000"}}"#.into(), "application/json; charset=utf-8").await;
    assert_eq!(literal.status, 200, "a backslash and the text u0000 are no NUL: {literal:?}");
}

async fn responses_have_a_request_id_and_a_run_id(db: Db) {
    let service = reader().start(db).await;
    let body = json!({"inputs": {"task": "x"}});
    for (path, status) in
        [("/v1/agents/reader/invoke-iterative", 200), ("/v1/agents/nobody/invoke", 404)]
    {
        let request =
            service.request(Method::POST, path).header("x-request-id", "mine-1").json(&body);
        let answer = answer(request).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.headers["x-request-id"]),
            (status, &"mine-1".parse().unwrap())
        );
        if status == 200 {
            assert_eq!(answer.headers["x-run-id"], answer.body["run_id"].as_str().unwrap());
        } else {
            assert_eq!(answer.body["request_id"], "mine-1");
            assert_eq!(answer.body["instance"], path);
        }
    }
    for accept in ["text/html", "application/json;q=0"] {
        let request = service
            .request(Method::POST, "/agents/reader/invoke")
            .header("accept", accept)
            .json(&body);
        assert_eq!(problem(&answer(request).await), (406, "NOT_ACCEPTABLE"), "{accept}");
    }
    assert!(!service.get("/v1/nowhere").await.headers["x-request-id"].is_empty());
}

async fn health_and_document_need_no_key(db: Db) {
    let service = reader().agent("broken", "model: nowhere/at-all").start(db).await;
    let open = async |path: &str| answer(service.http.get(service.url(path))).await;
    assert_eq!(open("/healthz").await.body, json!({"status": "ok"}));
    let ready = open("/readyz").await;
    assert_eq!((ready.status.as_u16(), &ready.body["status"]), (200, &json!("ready")), "{ready:?}");
    assert_eq!(ready.body["definitions"][0]["file"], "broken.yaml", "{ready:?}");
    for path in ["/openapi.json", "/v1/openapi.json"] {
        assert_eq!(open(path).await.body, document());
    }
    let wrong = answer(service.request(Method::PUT, "/v1/runs")).await;
    assert_eq!(
        (problem(&wrong), &wrong.headers["allow"]),
        ((405, "METHOD_NOT_ALLOWED"), &"GET,HEAD".parse().unwrap())
    );
    assert_eq!(problem(&open("/v3/runs").await), (404, "NOT_FOUND"));
    assert_eq!(service.http.head(service.url("/healthz")).send().await.unwrap().status(), 200);
}

async fn the_audit_log_is_filtered_and_paginated(db: Db) {
    let service = reader().start(db).await;
    let request = json!({"inputs": {"task": "x"}, "session_id": "s"});
    let run = service.run("reader", &request).await["run_id"].as_str().unwrap().to_owned();
    service.run("reader", &json!({"inputs": {"task": "y"}})).await;
    let count = async |query: &str| {
        let path = format!("/v1/audit?action=tool_call&{query}");
        service.get(&path).await.body["data"].as_array().unwrap().len()
    };
    assert_eq!(count("").await, 4);
    assert_eq!(count(&format!("run_id={run}")).await, 2);
    assert_eq!(count("outcome=failed").await, 2, "reading what is not there");
    assert_eq!(
        count(&format!(
            "outcome=succeeded&run_id={run}&tool=file_ops&decision=allowed&subject=testadmin"
        ))
        .await,
        1
    );
    assert_eq!((count("agent=reader").await, count("agent=read").await), (4, 0));
    assert_eq!((count("session_id=s").await, count("session_id=t").await), (2, 0));
    assert_eq!(count("tool=shell").await, 0);
    assert_eq!((count("rule=none").await, count("rule=path").await), (0, 4));
    assert_eq!(count("decision=blocked").await, 0);
    assert_eq!(count("created_after=2100-01-01T00:00:00Z").await, 0);
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = service.get(&format!("/v1/audit?action=tool_call&limit=3{cursor}")).await.body;
        seen.extend(
            page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|row| row["id"].as_str().unwrap().to_owned()),
        );
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    let all: Vec<String> = service.get("/v1/audit?action=tool_call").await.body["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["id"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!((seen.len(), &seen), (4, &all));
    for (wrong, told) in [
        ("action=rain", "must be one of tool_call, key.created, "),
        ("decision=maybe", "must be one of allowed, warned, escalated, blocked."),
        ("outcome=fine", "must be one of succeeded, failed, "),
        ("run_id=7", "must be a UUID"),
    ] {
        let refused = service.get(&format!("/v1/audit?{wrong}")).await;
        assert_eq!(problem(&refused), (400, "INVALID_PARAMETER"), "{wrong}");
        assert!(refused.body["detail"].as_str().unwrap().contains(told), "{}", refused.body);
    }
}
