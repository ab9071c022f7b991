//! One tool, called in an agent's name: a run in which no model is asked.
//!
//! | | |
//! |---|---|
//! | children, handoffs | the call may be one that delegates; the child is a run like others |
//! | parked runs, kill, queue | the plan is made of the stored call again, on whatever replica |
//! | a death before and after the commit that gives the call | `a_call_outlives_a_death_around_the_commit_that_gives_it` |
//! | sessions | its workspace, and a turn of its conversation |
//! | cancel, budgets, streaming, idempotency, files | those of an invocation, by the same way |
//! | scopes, tenants, audit, approvals | the gate asks nothing else than of a model's call |
//! | dry run | `policy/judge`; the field is refused |
//! | console, command line | console_files.rs; here |
//! | generated clients | `call_tool` (clients.rs) |

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{paths, text};
use crate::commands::toolloop;
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_call_is_a_run_of_its_own_in_which_no_model_is_asked,
    a_call_that_may_not_be_is_refused_or_fails,
    a_call_waits_for_approval_and_outlives_its_replica,
    a_call_outlives_a_death_around_the_commit_that_gives_it,
    a_call_crosses_sessions_budgets_streams_and_children,
    a_call_is_a_turn_that_later_runs_of_its_session_read,
    subjects_are_named_without_the_list_of_keys,
}

const KEEPER: &str = "
model: scripted/never
tools: [file_ops]
inputs: {type: object, properties: {task: {type: string}}}
output: {schema: {type: object, required: [summary], properties: {summary: {type: string}}}}
on_limit: answer
governance: {autonomy: supervised, paths: {write: ['out/**'], deny: ['secret/**']}}
";

fn setup() -> Setup {
    let talks = "model: scripted/never\ntools: [file_ops]\nworkspace: 'talks/{session_id}'\n\
                 governance: {autonomy: full, paths: {write: ['**']}}\nenable_double_confirmation: false\n";
    Setup::new()
        .agent("keeper", KEEPER)
        .agent("talks", talks)
        .agent("boss", "model: scripted/never\ntools: ['agent:helper']\n")
        .agent("helper", "model: scripted/helps\nenable_double_confirmation: false\n")
        .scenario("never", "steps: [{error: {status: 401, message: nobody asks me}}]")
        .scenario("helps", "steps: [{text: helped}]")
        .file("notes.txt", "seventeen\n")
        .file("out/old.txt", "old\n")
        .file("secret/key.txt", "key\n")
}

fn writing(path: &str) -> Value {
    json!({"tool": "file_ops", "arguments": {"operation": "write", "path": path, "content": "made\n"}})
}

async fn call(service: &Service, agent: &str, body: &Value) -> Answer {
    service.post(&format!("/v1/agents/{agent}/call"), body).await
}

async fn events(service: &Service, run: &str) -> Vec<Value> {
    let page = service.get(&format!("/v1/runs/{run}/events?limit=1000")).await.body;
    page["data"].as_array().unwrap().clone()
}

async fn a_call_is_a_run_of_its_own_in_which_no_model_is_asked(db: Db) {
    let service = setup().start(db).await;
    let mut body = writing("out/new.txt");
    body["dry_run"] = Value::Null; // null is as good as absent
    let called = call(&service, "keeper", &body).await;
    assert_eq!(called.status, 200, "{:#}", called.body);
    let run = called.body;
    assert_eq!(
        (&run["status"], &run["termination_reason"]),
        (&json!("completed"), &json!("completed"))
    );
    assert_eq!(run["output"]["result"], run["raw_response"], "{run:#}");
    assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(0), &json!(1)), "{run:#}");
    assert_eq!((&run["model"], &run["tokens_used"]), (&Value::Null, &json!(0)));
    assert_eq!((&run["tools_used"], &run["warnings"]), (&json!(["file_ops"]), &json!([])));
    let id = text(&run, "run_id");
    let kinds: Vec<Value> =
        events(&service, id).await.iter().map(|event| event["type"].clone()).collect();
    let expected = [
        "run.started",
        "attempt.started",
        "call.given",
        "tool_call.started",
        "tool_call.completed",
        "run.completed",
    ];
    assert_eq!(kinds, expected);

    let path = format!("/v1/runs/{id}");
    let detail = service.get(&path).await.body;
    assert_eq!(
        (&detail["kind"], &detail["overrides"]["call"]),
        (&json!("call"), &writing("out/new.txt"))
    );
    let row = service.get(&format!("{path}/tool-calls")).await.body["data"][0].clone();
    assert_eq!(
        (&row["state"], &row["arguments"]["path"]),
        (&json!("succeeded"), &json!("out/new.txt")),
        "{row:#}"
    );
    assert_eq!(service.get(&format!("{path}/iterations")).await.body["data"], json!([]));
    let messages = service.get(&format!("{path}/messages")).await.body["data"].clone();
    let roles: Vec<&Value> = messages.as_array().unwrap().iter().map(|it| &it["role"]).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool"], "{messages:#}");
    let changes = service.get(&format!("{path}/changes")).await.body;
    assert_eq!(changes["data"][0]["path"], "out/new.txt", "{changes:#}");
    let audit = service.get(&format!("/v1/audit?run_id={id}")).await.body["data"][0].clone();
    assert_eq!(
        (&audit["tool"], &audit["decision"]),
        (&json!("file_ops"), &json!("allowed")),
        "{audit:#}"
    );
    assert_eq!(service.get(&format!("{path}/files/out/new.txt")).await.body, "made\n");

    // The same of the command line.
    let address = service.url("");
    let arguments = [
        "tools",
        "call",
        "keeper",
        "file_ops",
        "--argument",
        "operation=read",
        "--argument",
        "path=notes.txt",
        "--server",
        &address,
        "--key",
        &service.key,
    ];
    let output = toolloop(service.dir.path(), &arguments).await;
    let printed: Value = serde_json::from_str(&output.out).unwrap();
    assert!(printed["output"]["result"].as_str().unwrap().contains("seventeen"), "{printed:#}");
    let told = output.err;
    assert!(output.code == Some(0) && told.contains("calls file_ops"), "{told}");
}

async fn a_call_that_may_not_be_is_refused_or_fails(db: Db) {
    let mut service = setup().start(db).await;
    let wrong = [
        (json!({}), "INVALID_INPUTS", "/tool"),
        (json!({"tool": "shell"}), "INVALID_OVERRIDE", "/tool"),
        (json!({"tool": "file_ops", "arguments": []}), "INVALID_INPUTS", "/arguments"),
        (json!({"tool": "file_ops", "inputs": {"task": 5}}), "INVALID_INPUTS", "/inputs/task"),
        (json!({"tool": "file_ops", "dry_run": true}), "INVALID_OVERRIDE", "/dry_run"),
        (json!({"tool": "file_ops", "model": "a/b"}), "INVALID_OVERRIDE", "/model"),
        (json!({"tool": "file_ops", "call": {}}), "INVALID_OVERRIDE", "/call"),
    ];
    for (body, code, pointer) in wrong {
        let refused = call(&service, "keeper", &body).await;
        assert_eq!((refused.status.as_u16(), text(&refused.body, "code")), (422, code), "{body}");
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{:#}", refused.body);
    }
    let smuggled = json!({"call": {"tool": "file_ops", "arguments": {}}});
    let refused = service.post("/v1/agents/keeper/invoke-iterative", &smuggled).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["errors"][0]["pointer"]),
        (422, &json!("/call"))
    );
    assert_eq!(call(&service, "nobody", &writing("out/a")).await.status, 404);
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]), "nothing was stored");

    for (arguments, said) in [
        (json!({"operation": "read", "path": "secret/key.txt"}), "secret"),
        (json!({"operation": "write", "path": "out/a"}), "content"),
        (json!({"operation": "read", "path": "nowhere.txt"}), "nowhere.txt"),
    ] {
        let failed =
            call(&service, "keeper", &json!({"tool": "file_ops", "arguments": arguments})).await;
        let run = failed.body;
        assert_eq!(
            (failed.status.as_u16(), &run["error"]["code"]),
            (200, &json!("TOOL_FAILURE")),
            "{run:#}"
        );
        assert!(text(&run["error"]["context"], "result").contains(said), "{run:#}");
    }

    let admin = service.key.clone();
    for (scopes, allowed) in [
        (json!(["agents:invoke", "tools:recall"]), 403),
        (json!(["agents:read", "tools:execute"]), 403),
        (json!(["agents:invoke", "tools:file_ops"]), 200),
    ] {
        let key = service.post("/v1/keys", &json!({"name": "k", "scopes": scopes})).await.body;
        service.key = text(&key, "key").to_owned();
        let told = call(&service, "keeper", &writing("out/more.txt")).await;
        assert_eq!(told.status, allowed, "{scopes} {:#}", told.body);
        service.key.clone_from(&admin);
    }
    let other = json!({"name": "k", "tenant": "other", "scopes": ["admin"]});
    let key = service.post("/v1/keys", &other).await.body;
    text(&key, "key").clone_into(&mut service.key);
    let reading =
        json!({"tool": "file_ops", "arguments": {"operation": "read", "path": "notes.txt"}});
    let run = call(&service, "keeper", &reading).await.body;
    assert_eq!(run["error"]["code"], "TOOL_FAILURE", "another tenant has other files: {run:#}");
}

async fn a_call_waits_for_approval_and_outlives_its_replica(db: Db) {
    let mut service = setup().start(db).await;
    let mut waiting = Vec::new();
    for _ in 0..3 {
        let parked = call(&service, "keeper", &writing("out/old.txt")).await;
        assert_eq!(
            (parked.status.as_u16(), text(&parked.body, "status")),
            (202, "awaiting_approval")
        );
        waiting.push(paths(&parked.body));
    }
    service.kill().await;
    service.restart().await;
    let [(approved, calls), (denied, others), (cancelled, _)] = &waiting[..] else { panic!() };
    assert_eq!(service.get("/v1/approvals").await.body["data"].as_array().unwrap().len(), 3);
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    let done = service.until(approved, |run| run["status"] == "completed").await;
    assert_eq!((&done["kind"], &done["tool_calls_made"]), (&json!("call"), &json!(1)), "{done:#}");
    assert_eq!(service.get(&format!("{approved}/files/out/old.txt")).await.body, "made\n");
    service.post(&format!("{}/deny", others[0]), &json!({"reason": "not today"})).await;
    let done = service.until(denied, |run| run["status"] == "failed").await;
    assert_eq!(done["error"]["code"], "TOOL_FAILURE", "{done:#}");
    assert!(done["error"].to_string().contains("not today"), "{done:#}");
    service.post(&format!("{cancelled}/cancel"), &json!({})).await;
    service.until(cancelled, |run| run["status"] == "cancelled").await;
}

async fn a_call_outlives_a_death_around_the_commit_that_gives_it(db: Db) {
    let mut service = setup().config("[runtime]\nlease = \"2s\"").start(db).await;
    // The second commit takes all from the start to the call that is about to be executed.
    let stored = ["run.started", "attempt.started", "call.given", "tool_call.started"];
    let ended = ["tool_call.completed", "run.completed"];
    let lost = [&["run.queued", "run.resumed"][..], &stored, &ended].concat();
    let kept =
        [&["run.queued"][..], &stored, &["run.resumed", "tool_call.started"], &ended].concat();
    for (point, expected) in [("before_commit:2", lost), ("after_commit:2", kept)] {
        service.kill_if_alive().await;
        service.restart_to_crash(point).await;
        let body = writing(&format!("out/{point}.txt"));
        let request = |service: &Service| {
            let request = service.request(Method::POST, "/v1/agents/keeper/call").json(&body);
            request.header("idempotency-key", point).header("prefer", "respond-async")
        };
        let _ = request(&service).send().await; // the process may die before it has answered
        service.exit_code().await;
        service.restart().await;
        let known = answer(request(&service)).await;
        let path = format!("/v1/runs/{}", text(&known.body, "run_id"));
        let done = service.until(&path, |run| run["finished_at"] != json!(null)).await;
        assert_eq!(
            (&done["status"], &done["tool_calls_made"]),
            (&json!("completed"), &json!(1)),
            "{point}: {done:#}"
        );
        let events = events(&service, text(&done, "run_id")).await;
        let kinds: Vec<&str> = events.iter().map(|event| text(event, "type")).collect();
        assert_eq!(kinds, expected, "{point}");
        let made = service.get(&format!("{path}/files/out/{point}.txt")).await.body;
        assert_eq!(made, "made\n", "{point}");
    }
}

async fn a_call_crosses_sessions_budgets_streams_and_children(db: Db) {
    let service = setup().start(db).await;
    let mut body = writing("a.txt");
    body["session_id"] = "s".into();
    let route = "/v1/agents/talks/call";
    for replayed in [false, true] {
        let request =
            service.request(Method::POST, route).json(&body).header("idempotency-key", "k");
        let told = answer(request).await;
        assert_eq!((told.status.as_u16(), text(&told.body, "status")), (200, "completed"));
        assert_eq!(told.headers.contains_key("idempotency-replayed"), replayed);
    }
    assert_eq!(service.get("/v1/sessions/s/files/a.txt").await.body, "made\n");
    let session = service.get("/v1/sessions/s").await.body;
    assert_eq!(session["runs"].as_array().unwrap().len(), 1, "{session:#}");

    // From the queue, where only what is stored is known.
    let request =
        service.request(Method::POST, route).json(&body).header("prefer", "respond-async");
    let queued = answer(request).await;
    assert_eq!(queued.status, 202, "{:#}", queued.body);
    let path = queued.headers["location"].to_str().unwrap().to_owned();
    let done = service.until(&path, |run| run["finished_at"] != json!(null)).await;
    assert_eq!(done["status"], "completed", "{done:#}");

    body["budget"] = json!({"max_tool_calls": 0});
    let run = call(&service, "talks", &body).await.body;
    assert_eq!(run["error"]["code"], "BUDGET_EXCEEDED", "{run:#}");
    // No model is asked for a last answer, whatever the agent says of limits.
    let mut limited = writing("out/b.txt");
    limited["budget"] = json!({"max_tool_calls": 0});
    let run = call(&service, "keeper", &limited).await.body;
    assert_eq!(run["error"]["code"], "BUDGET_EXCEEDED", "{run:#}");

    let stream = service.request(Method::POST, route).header("accept", "text/event-stream");
    let body = json!({"tool": "file_ops", "arguments": {"operation": "read", "path": "a.txt"}, "session_id": "s"});
    let streamed = stream.json(&body).send().await.unwrap().text().await.unwrap();
    assert!(
        streamed.contains("event: call.given") && streamed.contains("event: run.completed"),
        "{streamed}"
    );

    let run = call(&service, "boss", &json!({"tool": "agent:helper", "arguments": {}})).await.body;
    assert_eq!(run["output"]["result"], "helped", "{run:#}");
    let path = format!("/v1/runs?parent_run_id={}", text(&run, "run_id"));
    let children = service.get(&path).await.body["data"].clone();
    assert_eq!(
        (&children[0]["agent"], &children[0]["kind"]),
        (&json!("helper"), &json!("iterative"))
    );
}

async fn a_call_is_a_turn_that_later_runs_of_its_session_read(db: Db) {
    let listens = "model: scripted/listens\ntools: [file_ops, 'agent:helper']\n\
                   governance: {autonomy: supervised, paths: {write: ['out/**']}}\nenable_double_confirmation: false\n";
    let service = setup()
        .agent("listens", listens)
        .scenario("listens", "steps: [{text: heard}]")
        .start(db)
        .await;
    let listing = json!({"tool": "file_ops", "arguments": {"operation": "list", "path": "."}});
    let calls = [
        ("plain", listing.clone()),
        ("child", json!({"tool": "agent:helper", "arguments": {}})),
        ("approved", writing("out/old.txt")),
        ("edited", writing("out/old.txt")),
        ("denied", writing("out/old.txt")),
    ];
    for (session, mut body) in calls {
        body["session_id"] = session.into();
        let called = call(&service, "listens", &body).await;
        let path = format!("/v1/runs/{}", text(&called.body, "run_id"));
        if called.status == 202 {
            let (_, calls) = paths(&called.body);
            let (how, answer) = match session {
                "edited" => ("approve", json!({"arguments": listing["arguments"]})),
                "denied" => ("deny", json!({})),
                _ => ("approve", json!({})),
            };
            let told = service.post(&format!("{}/{how}", calls[0]), &answer).await;
            assert_eq!(told.status, 200, "{session}: {:#}", told.body);
        }
        service.until(&path, |run| run["finished_at"].is_string()).await;
        let next = service.run("listens", &json!({"session_id": session})).await;
        let messages = format!("/v1/runs/{}/messages", text(&next, "run_id"));
        let messages = service.get(&messages).await.body;
        let roles: Vec<&Value> =
            messages["data"].as_array().unwrap().iter().map(|it| &it["role"]).collect();
        let expected = ["system", "user", "assistant", "tool", "user", "assistant"];
        assert_eq!(roles, expected, "{session}: {messages:#}");
    }
    // One that was refused before it was a call is none.
    let mut refused = listing;
    refused["session_id"] = "none".into();
    refused["budget"] = json!({"max_tool_calls": 0});
    call(&service, "listens", &refused).await;
    let next = service.run("listens", &json!({"session_id": "none"})).await;
    assert_eq!(next["status"], "completed", "{next:#}");
}

async fn subjects_are_named_without_the_list_of_keys(db: Db) {
    let mut service = setup().start(db).await;
    let made = async |tenant: &str, name: &str| {
        let wanted = json!({"name": name, "tenant": tenant, "scopes": ["runs:read"]});
        let key = service.post("/v1/keys", &wanted).await.body;
        (text(&key, "id").to_owned(), text(&key, "key").to_owned())
    };
    let (ines, key) = made("default", "Ines").await;
    let (other, _) = made("other", "Ines").await;
    service.delete(&format!("/v1/keys/{ines}")).await;
    let (reader, reading) = made("default", "reader").await;
    let (twin, _) = made("default", "reader").await;
    drop(key);
    service.key = reading;
    assert_eq!(service.get("/v1/keys").await.status, 403);
    let ids = format!("{ines},{other},{reader},{twin},nobody,{ines}");
    let named = service.get(&format!("/v1/subjects?ids={ids}")).await;
    // Two keys of the tenant have the same name.
    let mut expected = [
        json!({"id": ines, "name": "Ines"}),
        json!({"id": reader, "name": format!("reader ({reader})")}),
        json!({"id": twin, "name": format!("reader ({twin})")}),
    ];
    expected.sort_by_key(|it| it["id"].to_string());
    assert_eq!(named.body, json!({"data": expected, "next_cursor": null}));
    let many: Vec<String> = (0..101).map(|n| format!("x{n}")).collect();
    assert_eq!(service.get(&format!("/v1/subjects?ids={}", many.join(","))).await.status, 400);
    assert_eq!(service.get("/v1/subjects").await.body["data"], json!([]));
}
