//! What an answer shows to whom, who may answer for whom, and which requests, connections, files and
//! lines of the log are a stranger's.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use reqwest::{Method, RequestBuilder};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};

use crate::approvals::{ended, file, paths, text};
use crate::service::{Answer, Db, Service, Setup, answer, command, on_both_stores};

on_both_stores! {
    without_runs_read_an_answer_is_the_status_alone,
    a_client_tools_result_comes_from_the_key_that_started_the_run,
    a_dry_run_shows_the_definition_with_the_scope_agents_read,
    a_run_without_the_scope_for_any_tool_is_refused,
    a_repeated_request_of_another_key_shows_it_no_run,
    edited_arguments_are_judged_before_the_approval_is_taken,
    editing_requires_the_scope_of_the_tool,
    approving_ones_own_run_is_recorded_and_can_be_forbidden,
    workspaces_of_runs_and_sessions_do_not_collide,
    a_childs_id_cannot_be_taken_beforehand,
    without_authentication_only_this_machine_is_served,
    probes_are_answered_while_all_connections_are_taken,
}

const EDITOR: &str = "
model: scripted/editor
instructions: Edit.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: supervised, paths: {write: ['**'], deny: ['secret/**']}, budget: {max_lines_changed: 3}}
";

const EDITING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: notes.txt, content: "new\n"}}]
  - text: '{{ results[0] | trim }}'
"#;

fn editor() -> Setup {
    Setup::new()
        .agent("editor", EDITOR)
        .scenario("editor", EDITING)
        .agent(
            "asker",
            "model: scripted/asker\ninstructions: Ask.\nenable_double_confirmation: false\n",
        )
        .scenario("asker", "steps: [{tool_calls: [{tool: ask, arguments: {}}]}, {text: done}]")
        .agent("talker", "model: scripted/talker\ninstructions: Talk.\n")
        .scenario("talker", "steps: [{text: the secret outcome}]")
        .file("notes.txt", "old\n")
        .file("secret/key.txt", "key\n")
}

async fn key(service: &Service, scopes: &[&str]) -> String {
    let made = service.post("/v1/keys", &json!({"name": "k", "scopes": scopes})).await;
    made.body["key"].as_str().unwrap_or_else(|| panic!("{made:?}")).to_owned()
}

fn by(service: &Service, key: &str, path: &str) -> RequestBuilder {
    service.http.post(service.url(path)).bearer_auth(key)
}

async fn post(service: &Service, key: &str, path: &str, body: Value) -> Answer {
    answer(by(service, key, path).json(&body)).await
}

fn refusal(answer: &Answer) -> (u16, &str) {
    (answer.status.as_u16(), answer.body["code"].as_str().unwrap_or_default())
}

async fn parked(service: &Service, key: &str, agent: &str, body: Value) -> Value {
    service.write("workspace/default/notes.txt", "old\n");
    let parked = post(service, key, &format!("/v1/agents/{agent}/invoke-iterative"), body).await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    parked.body
}

fn ask() -> Value {
    json!({"client_tools": [{"name": "ask", "input_schema": {"type": "object"}}]})
}

async fn without_runs_read_an_answer_is_the_status_alone(db: Db) {
    let service = editor().start(db).await;
    let (canceller, approver) =
        (key(&service, &["runs:cancel"]).await, key(&service, &["runs:approve"]).await);
    let reader = key(&service, &["runs:cancel", "runs:read"]).await;
    let run = service.run("talker", &json!({})).await;
    let id = text(&run, "run_id");
    let cancel = format!("/v1/runs/{id}/cancel");
    let seen = post(&service, &canceller, &cancel, json!({})).await;
    assert_eq!(
        (seen.status.as_u16(), &seen.body),
        (200, &json!({"run_id": id, "status": "completed"}))
    );
    let seen = post(&service, &reader, &cancel, json!({})).await;
    assert_eq!(seen.body["output"], json!({"result": "the secret outcome"}), "{:#}", seen.body);

    for verb in ["approve", "deny"] {
        let (run, calls) = paths(&parked(&service, &service.key, "editor", json!({})).await);
        let seen = post(&service, &approver, &format!("{}/{verb}", calls[0]), json!({})).await;
        assert_eq!(seen.status, 200, "{seen:?}");
        let fields: Vec<&String> = seen.body.as_object().unwrap().keys().collect();
        assert_eq!(fields, ["run_id", "status"], "{:#}", seen.body);
        ended(&service, &run).await;
    }

    // Who started a run knows what is in it.
    let own = key(&service, &["agents:invoke", "tools:execute", "runs:approve"]).await;
    let (_, calls) = paths(&parked(&service, &own, "editor", json!({})).await);
    let seen = post(&service, &own, &format!("{}/deny", calls[0]), json!({})).await;
    assert_eq!((seen.status.as_u16(), &seen.body["agent"]), (200, &json!("editor")));
}

async fn a_client_tools_result_comes_from_the_key_that_started_the_run(db: Db) {
    let service = editor().start(db).await;
    let own = key(&service, &["agents:invoke"]).await;
    let other = key(&service, &["agents:invoke", "runs:read"]).await;
    let helper = key(&service, &["agents:invoke", "runs:approve"]).await;
    for answers in [&own, &helper] {
        let (run, calls) = paths(&parked(&service, &own, "asker", ask()).await);
        let result = format!("{}/result", calls[0]);
        let refused = post(&service, &other, &result, json!({"content": "forged"})).await;
        assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "{:#}", refused.body);
        assert!(text(&refused.body, "detail").contains("runs:approve"), "{:#}", refused.body);
        let given =
            post(&service, answers, &result, json!({"content": "yes", "is_error": null})).await;
        assert_eq!(given.status, 200, "{given:?}");
        assert_eq!(given.body.get("agent").is_some(), answers == &own, "{:#}", given.body);
        assert_eq!(ended(&service, &run).await["status"], "completed");
    }
}

async fn a_dry_run_shows_the_definition_with_the_scope_agents_read(db: Db) {
    let service = editor().start(db).await;
    let poor = key(&service, &["agents:invoke", "tools:execute"]).await;
    let rich = key(&service, &["agents:invoke", "tools:execute", "agents:read"]).await;
    for (path, body) in [
        ("/v1/agents/editor/invoke-iterative", json!({"dry_run": true})),
        ("/v1/agents/editor/dry-run", json!({})),
    ] {
        for (key, reads) in [(&poor, false), (&rich, true)] {
            let shown = post(&service, key, path, body.clone()).await;
            assert_eq!((shown.status.as_u16(), &shown.body["dry_run"]), (200, &json!(true)));
            assert_eq!(shown.body["tools"][0]["name"], "file_ops");
            assert_eq!(shown.body.get("messages").is_some(), reads, "{:#}", shown.body);
            assert_eq!(shown.body["policy"].get("governance").is_some(), reads);
        }
    }
}

async fn a_run_without_the_scope_for_any_tool_is_refused(db: Db) {
    let service = editor()
        .agent("two", "model: scripted/two\ninstructions: x\ntools: [file_ops, 'agent:talker']\n")
        .scenario("two", "steps: [{text: fine}]")
        .start(db)
        .await;
    let invoke = async |scopes: &[&str], agent: &str, route: &str, body: Value| {
        let key = key(&service, &[&["agents:invoke"], scopes].concat()).await;
        post(&service, &key, &format!("/v1/agents/{agent}/{route}"), body).await
    };
    for (scopes, agent, missing) in [
        (&[][..], "editor", "tools:file_ops"),
        (&["tools:shell"], "editor", "tools:file_ops"),
        (&["tools:read"], "two", "tools:execute"),
    ] {
        let refused = invoke(scopes, agent, "invoke-iterative", json!({})).await;
        assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "{scopes:?} {agent}: {:#}", refused.body);
        assert!(text(&refused.body, "detail").contains(missing), "{:#}", refused.body);
    }
    let asking = json!({"prefer": "x"});
    assert_eq!(invoke(&[], "editor", "invoke-iterative", asking).await.status, 422);
    // One of them is enough; so is a tool of the caller's own, and no tool at all.
    for (scopes, agent, route, body) in [
        (&["tools:file_ops"][..], "two", "invoke-iterative", json!({})),
        (&["tools:agent:talker"], "two", "invoke-iterative", json!({})),
        (&[], "talker", "invoke-iterative", json!({})),
        (&[], "editor", "invoke", json!({})),
        (&[], "asker", "invoke-iterative", ask()),
        (&[], "editor", "invoke-iterative", json!({"tools": []})),
    ] {
        let started = invoke(scopes, agent, route, body.clone()).await;
        assert!(started.status.is_success(), "{scopes:?} {agent} {body}: {:#}", started.body);
    }
    let runs = service.get("/v1/runs?limit=200").await.body;
    assert_eq!(runs["data"].as_array().unwrap().len(), 6, "a refusal stores no run");
}

async fn a_repeated_request_of_another_key_shows_it_no_run(db: Db) {
    let service = editor().start(db).await;
    let (own, other) =
        (key(&service, &["agents:invoke"]).await, key(&service, &["agents:invoke"]).await);
    let reader = key(&service, &["agents:invoke", "runs:read"]).await;
    let send = async |key: &str| {
        let request =
            by(&service, key, "/v1/agents/talker/invoke").header("idempotency-key", "once");
        answer(request.json(&json!({}))).await
    };
    let first = send(&own).await;
    assert_eq!(first.status, 200, "{first:?}");
    let stranger = send(&other).await;
    assert_eq!(refusal(&stranger), (422, "IDEMPOTENCY_MISMATCH"), "{:#}", stranger.body);
    let why = stranger.body["detail"].as_str().unwrap();
    assert!(why.contains("by another caller") && why.contains("runs:read"), "{why}");
    for key in [&own, &reader] {
        let again = send(key).await;
        assert_eq!((again.status.as_u16(), &again.body["run_id"]), (200, &first.body["run_id"]));
    }
}

async fn edited_arguments_are_judged_before_the_approval_is_taken(db: Db) {
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, &service.key, "editor", json!({})).await);
    let approve = format!("{}/approve", calls[0]);
    let write =
        |path: &str, content: &str| json!({"operation": "write", "path": path, "content": content});
    for (arguments, why) in [
        (write("secret/key.txt", "mine\n"), "Blocked by the path rule"),
        (write("../up", "x\n"), "leaves"),
        (write("long.txt", "1\n2\n3\n4\n"), "budget"),
    ] {
        let refused = service.post(&approve, &json!({"arguments": arguments})).await;
        assert_eq!(refusal(&refused), (422, "INVALID_INPUTS"), "{arguments}: {:#}", refused.body);
        let error = &refused.body["errors"][0];
        assert_eq!(error["pointer"], "/arguments", "{error:#}");
        assert!(text(error, "message").contains(why), "{arguments}: {error:#}");
        assert_eq!(service.get(&run).await.body["status"], "awaiting_approval", "{arguments}");
    }
    // Nor is it taken for arguments that the tool itself would refuse.
    let nested = format!("{}{}", "{".repeat(20), "}".repeat(20));
    let finds = |pattern: &str, glob: &str| json!({"operation": "search", "pattern": pattern, "glob": glob});
    for (arguments, pointer) in [
        (json!({"operation": "glob", "pattern": nested}), "/arguments/pattern"),
        (json!({"operation": "glob", "pattern": "x".repeat(400_000)}), "/arguments/pattern"),
        (finds("(", "*.md"), "/arguments/pattern"),
        (finds("x", &nested), "/arguments/glob"),
        (json!({"operation": "patch", "patch": "no patch"}), "/arguments/patch"),
        (
            json!({"operation": "edit", "path": "notes.txt", "old": "a", "new": "a"}),
            "/arguments/new",
        ),
        (json!({"operation": "write", "path": "notes.txt"}), "/arguments"),
    ] {
        let refused = service.post(&approve, &json!({"arguments": arguments})).await;
        assert_eq!(refusal(&refused), (422, "INVALID_INPUTS"), "{:#}", refused.body);
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{:#}", refused.body);
        assert!(refused.body.to_string().len() < 2_000, "{:.300}", refused.body.to_string());
        assert_eq!(service.get(&run).await.body["status"], "awaiting_approval", "{pointer}");
    }
    assert_eq!(file(&service, "secret/key.txt"), "key\n");
    let edited = json!({"arguments": write("notes.txt", "edited\n")});
    assert_eq!(service.post(&approve, &edited).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "notes.txt"), "edited\n");
}

async fn editing_requires_the_scope_of_the_tool(db: Db) {
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, &service.key, "editor", json!({})).await);
    let approve = format!("{}/approve", calls[0]);
    let edited = json!({"arguments": {"operation": "write", "path": "mine.txt", "content": "x\n"}});
    for scopes in [&["runs:approve"][..], &["runs:approve", "tools:shell"]] {
        let poor = key(&service, scopes).await;
        let refused = post(&service, &poor, &approve, edited.clone()).await;
        assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "{:#}", refused.body);
        assert!(text(&refused.body, "detail").contains("tools:file_ops"), "{:#}", refused.body);
    }
    let rich = key(&service, &["runs:approve", "tools:file_ops"]).await;
    assert_eq!(post(&service, &rich, &approve, edited).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "mine.txt"), "x\n");
}

async fn approving_ones_own_run_is_recorded_and_can_be_forbidden(db: Db) {
    let reasons = async |service: &Service| {
        let audit = service.get("/v1/audit?action=tool_call").await.body;
        let records = audit["data"].as_array().unwrap().clone();
        let reasons: Vec<String> = records
            .iter()
            .filter_map(|record| record["reason"].as_str().map(str::to_owned))
            .collect();
        reasons
    };
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, &service.key, "editor", json!({})).await);
    let approve = format!("{}/approve", calls[0]);
    assert_eq!(service.post(&approve, &json!({"reason": "fine"})).await.status, 200);
    ended(&service, &run).await;
    let said = "Approved by testadmin, who started the run: fine";
    assert!(reasons(&service).await.iter().any(|reason| reason == said));

    let limits = "rate_limit_per_minute = 1000000\nrate_limit_burst = 1000000";
    let config = format!("[governance]\napprover = \"not_the_caller\"\n{limits}");
    let service = editor().config(&config).start(db).await;
    let made_by = async |creator: &str, scopes: &[&str]| {
        let made = post(&service, creator, "/v1/keys", json!({"name": "k", "scopes": scopes}));
        made.await.body["key"].as_str().unwrap().to_owned()
    };
    let scopes = ["agents:invoke", "tools:execute", "runs:approve", "runs:read", "keys:admin"];
    let caller = made_by(&service.key, &scopes).await;
    let (run, calls) = paths(&parked(&service, &caller, "editor", json!({})).await);
    let child = made_by(&caller, &["runs:approve", "keys:admin"]).await;
    let grandchild = made_by(&child, &["runs:approve"]).await;
    for own in [&caller, &child, &grandchild] {
        let refused = post(&service, own, &format!("{}/approve", calls[0]), json!({})).await;
        assert_eq!(refusal(&refused), (403, "FORBIDDEN"), "{:#}", refused.body);
        let why = "may not approve its calls, nor say what became of them; they may deny them (governance.approver)";
        assert!(text(&refused.body, "detail").contains(why), "{refused:#?}");
    }
    assert_eq!(service.get(&run).await.body["status"], "awaiting_approval");
    let other = made_by(&service.key, &["runs:approve"]).await;
    assert_eq!(
        post(&service, &other, &format!("{}/approve", calls[0]), json!({})).await.status,
        200
    );
    assert_eq!(ended(&service, &run).await["status"], "completed");
    // To refuse one's own call takes nothing from the others.
    let (run, calls) = paths(&parked(&service, &service.key, "editor", json!({})).await);
    let odd = service.post(&format!("{}/approve", calls[0]), &json!([])).await;
    assert_eq!(refusal(&odd), (422, "INVALID_INPUTS"), "{:#}", odd.body);
    assert_eq!(odd.body["errors"][0]["pointer"], "", "{:#}", odd.body);
    assert_eq!(service.post(&format!("{}/deny", calls[0]), &json!({})).await.status, 200);
    ended(&service, &run).await;
}

async fn workspaces_of_runs_and_sessions_do_not_collide(db: Db) {
    let agent = |workspace: &str| {
        format!(
            "model: scripted/writer\ninstructions: W.\ntools: [file_ops]\nworkspace: '{workspace}'\n\
                 enable_double_confirmation: false\ngovernance: {{autonomy: full, paths: {{write: ['**']}}}}\n"
        )
    };
    let steps = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: \"<{{ inputs.who }}>\"}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: log.txt}}]
  - text: '{{ results[0] }}'
";
    let service = Setup::new()
        .agent("by-run", &agent("{run_id}"))
        .agent("by-session", &agent("{session_id}"))
        .scenario("writer", steps)
        .start(db)
        .await;
    let id = uuid::Uuid::from_u128(0x1234).to_string();
    let hash = "a".repeat(64);
    let run = |who: &str, run: &str| json!({"inputs": {"who": who}, "run_id": run});
    let session = |who: &str, session: &str| json!({"inputs": {"who": who}, "session_id": session});
    for (agent, body) in [
        ("by-run", run("a", &id)),
        ("by-session", session("b", &id)),
        ("by-session", session("c", &format!("r-{id}"))),
        ("by-session", session("d", &hash)),
        ("by-session", json!({"inputs": {"who": "e"}})),
    ] {
        let told = service.run(agent, &body).await["output"].to_string();
        let who = text(&body["inputs"], "who");
        assert!(told.contains(&format!("<{who}>")), "{told}");
        for other in ["a", "b", "c", "d", "e"].iter().filter(|other| **other != who) {
            assert!(
                !told.contains(&format!("<{other}>")),
                "{body} sees the file of {other}: {told}"
            );
        }
    }
    let again = service.run("by-session", &session("f", &id)).await["output"].to_string();
    assert!(again.contains("<b><f>"), "a session keeps its files: {again}");
}

async fn a_childs_id_cannot_be_taken_beforehand(db: Db) {
    use sha2::{Digest as _, Sha256};
    let service = editor()
        .agent("boss", "model: scripted/boss\ninstructions: B.\ntools: ['agent:talker']\nenable_double_confirmation: false\n")
        .scenario("boss", "steps: [{tool_calls: [{tool: 'agent:talker', arguments: {}}]}, {text: '{{ results[0] }}'}]")
        .start(db)
        .await;
    let parent = uuid::Uuid::from_u128(0x77);
    // Everything in it can be known or guessed by others, except for the store's secret.
    let effect_key =
        hex::encode(Sha256::digest(format!("{parent}\x001\x001\x000\0agent:talker\0{{}}")));
    let guess = Sha256::new().chain_update("child\0").chain_update(&effect_key).finalize();
    let guess = uuid::Builder::from_custom_bytes(guess[..16].try_into().unwrap()).into_uuid();
    let taken = json!({"run_id": guess});
    assert_eq!(service.post("/v1/agents/talker/invoke", &taken).await.status, 200);
    let run = service.run("boss", &json!({"run_id": parent})).await;
    assert_eq!(run["output"], json!({"result": "the secret outcome"}), "{run:#}");
    let child = service.get(&format!("/v1/runs?parent_run_id={parent}")).await.body;
    assert_eq!(child["data"].as_array().unwrap().len(), 1, "{child:#}");
    let child = text(&child["data"][0], "run_id").to_owned();
    assert_ne!(child, guess.to_string());
    // Readers of the parent find it by the same function.
    let iterations = service.get(&format!("/v1/runs/{parent}/iterations")).await.body;
    assert_eq!(iterations["data"][0]["children"], json!([child]), "{iterations:#}");
}

async fn without_authentication_only_this_machine_is_served(db: Db) {
    let service = editor().config("[auth]\nmode = \"none\"").start(db).await;
    let ask = |headers: &[(&'static str, &str)]| {
        let mut request = service.http.post(service.url("/v1/keys"));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        answer(request.json(&json!({"name": "x", "scopes": ["admin"]})))
    };
    let url = service.url("");
    let host = url.strip_prefix("http://").unwrap();
    let port = host.rsplit(':').next().unwrap();
    let (named, six) = (format!("localhost:{port}"), format!("[::1]:{port}"));
    for headers in [
        &[][..],
        &[("host", named.as_str())],
        &[("host", &six)],
        &[("origin", url.as_str()), ("sec-fetch-site", "same-origin")],
        &[("sec-fetch-site", "none")],
    ] {
        assert_eq!(ask(headers).await.status, 201, "{headers:?}");
    }
    for headers in [
        &[("host", "evil.example")][..],
        &[("host", "evil.example:80"), ("origin", "http://evil.example:80")],
        &[("host", "127.0.0.1.evil.example")],
        &[("origin", "http://evil.example")],
        &[("origin", "http://localhost:1")],
        &[("origin", "null")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
        &[("sec-fetch-site", "same-origin"), ("origin", "http://evil.example")],
    ] {
        let refused = ask(headers).await;
        assert_eq!(refusal(&refused), (403, "FOREIGN_ORIGIN"), "{headers:?}: {:#}", refused.body);
        assert!(text(&refused.body, "detail").contains("auth.mode"), "{:#}", refused.body);
    }
    // A cross-site form needs no preflight, and reads nothing of the answer.
    let form = service
        .http
        .post(service.url("/v1/agents/talker/invoke"))
        .header("sec-fetch-site", "cross-site");
    assert_eq!(answer(form).await.status, 403);
    let page = service.http.get(service.url("/console")).header("host", "evil.example");
    assert_eq!(answer(page).await.status, 403, "pages too");
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]));
    // With keys, neither matters.
    let service = editor().start(db).await;
    let foreign = service.request(Method::GET, "/v1/runs").header("host", "toolloop.example");
    assert_eq!(answer(foreign.header("origin", "https://app.example")).await.status, 200);
}

async fn raw(service: &Service, request: &str) -> TcpStream {
    let url = service.url("");
    let mut stream = TcpStream::connect(url.strip_prefix("http://").unwrap()).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    stream
}

/// Everything until the connection is closed.
async fn all_of(mut stream: TcpStream) -> String {
    let mut text = Vec::new();
    let reading = tokio::time::timeout(Duration::from_mins(1), stream.read_to_end(&mut text));
    reading.await.expect("the connection stays open").unwrap();
    String::from_utf8_lossy(&text).into_owned()
}

async fn probes_are_answered_while_all_connections_are_taken(db: Db) {
    let service = editor()
        .agent("sleeper", "model: scripted/sleeper\ninstructions: S.\n")
        .scenario("sleeper", "steps: [{delay_ms: 120000, text: late}]")
        .config(
            "[server]\nmax_connections = 10\nmax_requests_per_key = 1000000\n\
             header_timeout = \"10m\"\nidle_timeout = \"10m\"",
        )
        .start(db)
        .await;
    let run = answer(
        service
            .request(Method::POST, "/v1/agents/sleeper/invoke")
            .header("prefer", "respond-async"),
    )
    .await;
    let run = text(&run.body, "run_id").to_owned();
    let greedy = key(&service, &["runs:read"]).await;
    let events = format!(
        "GET /v1/runs/{run}/events HTTP/1.1\r\nHost: x\r\nAccept: text/event-stream\r\nAuthorization: Bearer {greedy}\r\n\r\n"
    );
    // One key cannot take more than four fifths of them.
    let mut streams = Vec::new();
    for number in 0..9 {
        let mut stream = raw(&service, &events).await;
        let mut head = [0; 12];
        stream.read_exact(&mut head).await.unwrap();
        let expected = if number < 8 { "HTTP/1.1 200" } else { "HTTP/1.1 429" };
        assert_eq!(String::from_utf8_lossy(&head), expected, "{number}");
        streams.push(stream);
    }
    let others = raw(&service, &events.replace(&greedy, &service.key)).await;
    streams.push(others);
    let mut idle = Vec::new();
    for _ in 0..12 {
        idle.push(raw(&service, "GET /healthz HT").await);
    }
    for path in ["/healthz", "/readyz", "/v1/healthz"] {
        let answered =
            all_of(raw(&service, &format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")).await).await;
        assert!(answered.starts_with("HTTP/1.1 200"), "{path}: {answered}");
        assert!(answered.to_ascii_lowercase().contains("connection: close"), "{answered}");
    }
    let refused = format!(
        "GET /v1/runs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n",
        service.key
    );
    let refused = all_of(raw(&service, &refused).await).await;
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("OVERLOADED"), "{refused}");
    // Half-open ones lose their place, so that probes always find one.
    for stream in idle {
        all_of(stream).await;
    }
    drop(streams);
    for _ in 0..3000 {
        let again = raw(&service, &format!("GET /v1/runs HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {}\r\n\r\n", service.key)).await;
        if all_of(again).await.starts_with("HTTP/1.1 200") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("connections that were closed are not given to others");
}

fn mode(path: &Path) -> u32 {
    std::fs::metadata(path)
        .unwrap_or_else(|e| panic!("{}: {e}", path.display()))
        .permissions()
        .mode()
        & 0o777
}

#[tokio::test]
async fn files_are_their_users_alone() {
    let writer = "model: scripted/writer\ninstructions: W.\ntools: [file_ops]\nworkspace: made\nenable_double_confirmation: false\n\
                  governance: {autonomy: full, paths: {write: ['**']}}\n";
    let steps = "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: dir/a.txt, content: x}}]}, {text: ok}]";
    let service =
        Setup::new().agent("writer", writer).scenario("writer", steps).start(Db::Sqlite).await;
    service.run("writer", &json!({})).await;
    let at = |path: &str| service.dir.path().join(path);
    for file in ["toolloop.db", "toolloop.db-wal", "toolloop.db-shm", "toolloop.db.lock"] {
        assert_eq!(mode(&at(file)), 0o600, "{file}");
    }
    for dir in
        ["workspace", "workspace/default", "workspace/default/made", "workspace/default/made/dir"]
    {
        assert_eq!(mode(&at(dir)), 0o700, "{dir}");
    }
    assert_eq!(mode(&at("workspace/default/made/dir/a.txt")), 0o600);
}

/// A server that answers each request with a redirect, and tells the heads that it was sent.
async fn redirecting(to: String) -> (String, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (tell, told) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = vec![0; 8192];
            let read = stream.read(&mut head).await.unwrap_or(0);
            let _ = tell.send(String::from_utf8_lossy(&head[..read]).into_owned());
            let answer = format!(
                "HTTP/1.1 302 Found\r\nLocation: {to}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            );
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    (address, told)
}

#[tokio::test]
async fn the_doctor_takes_no_secret_to_another_server() {
    let (elsewhere, mut stolen) = redirecting("http://127.0.0.1:1/".into()).await;
    let (provider, mut asked) = redirecting(format!("{elsewhere}/models")).await;
    let dir = tempfile::TempDir::new().unwrap();
    let config = format!(
        "[models.moved]\nkind = \"anthropic\"\nbase_url = \"{provider}\"\napi_key_env = \"MOVED_KEY\"\nheaders = {{ x-secret = \"hush\" }}\n"
    );
    std::fs::write(dir.path().join("toolloop.toml"), config).unwrap();
    let doctor = command(dir.path())
        .args(["doctor", "--json", "--listen", "127.0.0.1:0"])
        .env("MOVED_KEY", "sk-moved")
        .output()
        .await
        .unwrap();
    let said = String::from_utf8(doctor.stdout).unwrap();
    let head = asked.try_recv().unwrap();
    assert!(head.contains("sk-moved") && head.contains("hush"), "{head}");
    assert!(stolen.try_recv().is_err(), "the redirect was followed");
    assert!(said.contains("answers with a redirect") && !said.contains("hush"), "{said}");
}

#[tokio::test]
async fn errors_do_not_print_configured_values() {
    let dir = tempfile::TempDir::new().unwrap();
    for (variable, value) in [
        ("TOOLLOOP_MODELS__OPENAI__HEADERS", "authorization: Bearer sk-hush"),
        ("TOOLLOOP_MODELS__OPENAI__HEADERS", "{ authorization = \"Bearer sk-hush\""),
        ("TOOLLOOP_DATABASE__URL", "sk-hush"),
        ("TOOLLOOP_SERVER__LISTEN", "sk-hush"),
        ("TOOLLOOP_AUTH__MODE", "sk-hush"),
        ("TOOLLOOP_RUNTIME__LEASE", "sk-hush"),
        ("TOOLLOOP_MODELS__X__KIND", "sk-hush"),
        ("TOOLLOOP_MODELS__OPENAI__BASE_URL", "sk-hush"),
        ("TOOLLOOP_MODELS__OPENAI__HEADERS", "{ authorization = { bearer = \"sk-hush\" } }"),
        ("TOOLLOOP_WEBHOOKS__ALLOW", "[\"sk-hush/*\"]"),
        ("TOOLLOOP_SERVER__CORS_ORIGINS", "[\"sk-hush\"]"),
        ("TOOLLOOP_SERVER__EXPOSE", "[\"sk-hush\"]"),
        ("TOOLLOOP_TOOLS__SHELL__ENV", "[\"sk-hush\"]"),
        ("TOOLLOOP_RUNTIME__QUEUE_WORKERS", "[\"sk-hush\"]"),
    ] {
        let output = command(dir.path()).arg("check").env(variable, value).output().await.unwrap();
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).unwrap();
        assert!(!said.contains("sk-hush"), "{variable}: {said}");
        assert!(!output.status.success() && said.contains(variable), "{variable}: {said}");
    }
    let agent = "model: scripted/hello\nenable_double_confirmation: false\n";
    let broken = [
        "model: hush-1234\ninstructions: x\n".to_owned(),
        "model: [hush-1234]\n".to_owned(),
        format!("{agent}provider_options: hush-1234\n"),
        format!("{agent}limits: {{max_attempts: hush-1234}}\n"),
        format!("{agent}governance: {{autonomy: hush-1234}}\n"),
        format!("{agent}governance: hush-1234\n"),
        format!("{agent}tool_choice: hush-1234\n"),
        format!("{agent}output: {{validator: {{url: 'hush-1234'}}}}\n"),
        format!("{agent}output: {{validator: {{url: 'ftp://me:hush-1234@x'}}}}\n"),
        format!("{agent}output: {{validator: {{url: 'http://me:hush-1234@x'}}}}\n"),
    ];
    let agents = broken.iter().enumerate();
    let setup =
        agents.fold(Setup::new(), |setup, (n, yaml)| setup.agent(&format!("bad-{n}"), yaml));
    let dir =
        setup.scenario("hello", "steps: [{text: hi, delay_ms: 'hush-1234'}]").write_directory();
    let tools = "base_url: http://127.0.0.1:1\nheaders: hush-1234\ntools: []\n";
    std::fs::create_dir_all(dir.path().join("tools")).unwrap();
    std::fs::write(dir.path().join("tools/web.yaml"), tools).unwrap();
    let output = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(!said.contains("hush-1234"), "{said}");
    for file in ["bad-0.yaml", "bad-9.yaml", "web.yaml", "hello.yaml"] {
        assert!(said.contains(file), "{file}: {said}");
    }
    std::fs::remove_file(dir.path().join("tools/web.yaml")).unwrap(); // no service starts with it
    let service = Setup::new().start_in(dir, Db::Sqlite).await;
    let ready = answer(service.http.get(service.url("/readyz"))).await.body;
    assert!(ready["definitions"].as_array().unwrap().len() >= broken.len(), "{ready:#}");
    for text in [ready.to_string(), service.log()] {
        assert!(!text.contains("hush-1234") && text.contains("bad-9"), "{text}");
    }
}

#[tokio::test]
async fn a_providers_text_forges_no_line_of_the_log() {
    let forged = "nothing\\n2026-01-01T00:00:00Z  INFO toolloop: listening address=6.6.6.6 \\u001b[2J\\u202e";
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut vec![0; 65536]).await;
            let body = format!("{{\"error\": {{\"message\": \"{forged}\", \"type\": \"x\"}}}}");
            let answer = format!(
                "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
                body.len()
            );
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    let dir = Setup::new()
        .agent("bad", "model: bad/m\ninstructions: x\n")
        .config(&format!("[models.bad]\nkind = \"openai\"\nbase_url = \"http://{address}\""))
        .write_directory();
    let output = command(dir.path())
        .args(["invoke", "bad"])
        .env("TOOLLOOP_LOG", "debug")
        .output()
        .await
        .unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    assert!(log.contains("6.6.6.6"), "the provider's message is not logged: {log}");
    assert!(!log.contains('\u{1b}') && !log.contains('\u{202e}'), "{log:?}");
    assert!(!log.lines().any(|line| line.starts_with("2026-01-01T00:00:00Z")), "{log}");
}
