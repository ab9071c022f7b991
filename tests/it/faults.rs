//! Bad days: of the model, of the database, of the operator's files, of the process.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster::OwnServer;
use crate::service::{Db, Service, Setup, answer, command, on_both_stores};

on_both_stores! {
    a_real_wire_format_carries_the_whole_loop,
    a_provider_that_recovers_is_asked_again,
    a_provider_that_does_not_recover_is_named,
    cancel_closes_the_model_socket,
    a_broken_file_keeps_its_last_good_version,
}

const READER: &str = "
model: mock/any
instructions: Read the files.
inputs: {type: object, required: [task], properties: {task: {type: string}}}
tools: [file_ops]
limits: {error_threshold: 5}
enable_double_confirmation: false
";

async fn with_model(mock: &MockModel, db: Db) -> Service {
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"\nmax_retries = 2\ntimeout = \"1m\"",
        mock.base_url()
    );
    Setup::new()
        .agent("reader", &format!("{READER}models: ['mock/*']\n"))
        .file("notes.txt", "seventeen\n")
        .config(&models)
        .start(db)
        .await
}

fn reading() -> Reply {
    Reply::call("file_ops", &json!({"operation": "read", "path": "notes.txt"}))
}

async fn a_real_wire_format_carries_the_whole_loop(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock, db).await;
    mock.script([
        reading(),
        Reply::ToolCalls(vec![
            ("file_ops".into(), "{not json".into()),
            ("nobody".into(), "{}".into()),
            ("file_ops".into(), r#"{"operation": "read"}"#.into()),
        ]),
        reading(),
        Reply::text(r#"{"read": 17}"#),
    ]);
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"read": 17})),
        "{run:#}"
    );
    assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(4), &json!(5)));
    assert_eq!(mock.refusals(), Vec::<String>::new(), "every request was a valid one");
    let last = mock.requests().pop().unwrap();
    let roles: Vec<&str> = last.messages().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(
        roles,
        [
            "system",
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "tool",
            "tool",
            "assistant",
            "tool"
        ],
        "one result for each call, behind its call"
    );
    let said = |index: usize| last.messages()[index]["content"].as_str().unwrap().to_owned();
    assert!(said(3).contains("\nseventeen\n"), "{}", said(3));
    assert!(said(6).contains("Error: Unknown tool nobody"), "{}", said(6));
}

async fn a_provider_that_recovers_is_asked_again(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock, db).await;
    mock.script([Reply::error(503, "overloaded", Some(1)), Reply::Garbage, Reply::text("done")]);
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(1)), "{run:#}");
    let iterations =
        service.get(&format!("/v1/runs/{}/iterations", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(iterations["data"][0]["retries"], 2);
}

async fn a_provider_that_does_not_recover_is_named(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock, db).await;
    let key = std::env::var("PATH").unwrap();
    let table = [
        (Reply::error(401, "invalid_api_key", None), json!(401), 1),
        (Reply::error(429, "insufficient_quota", None), json!(429), 1),
        (Reply::error(500, "server_error", Some(1)), json!(500), 3),
        (Reply::NoChoices, json!(200), 3),
        (Reply::Reset, Value::Null, 3),
    ];
    for (reply, status, attempts) in table {
        let what = format!("{reply:?}");
        mock.always(reply);
        let model = format!("mock/any-{status}-{attempts}"); // each with a breaker of its own
        let run = service.run("reader", &json!({"inputs": {"task": "x"}, "model": model})).await;
        assert_eq!(
            (&run["status"], &run["error"]["code"]),
            (&json!("failed"), &json!("MODEL_ERROR")),
            "{what}: {run:#}"
        );
        let context = &run["error"]["context"];
        assert_eq!(
            (&context["provider"], &context["attempts"]),
            (&json!("mock"), &json!(attempts)),
            "{what}: {run:#}"
        );
        if what != "NoChoices" {
            assert_eq!(context["status"], status, "{what}: {run:#}");
        }
        assert!(!run.to_string().contains(&key), "the key is not told");
    }
}

async fn cancel_closes_the_model_socket(db: Db) {
    let mock = MockModel::start().await;
    let service = with_model(&mock, db).await;
    mock.script([reading(), Reply::Hang]);
    let id = uuid::Uuid::from_u128(77).to_string();
    let body = json!({"inputs": {"task": "x"}, "run_id": id});
    let request =
        service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative").json(&body);
    let call = tokio::spawn(async move { answer(request).await.body });
    mock.wait_for_requests(2).await;
    assert_eq!(service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await.status, 202);
    mock.wait_for_abort().await;
    let run = call.await.unwrap();
    assert_eq!(
        (&run["status"], &run["tool_calls_made"]),
        (&json!("cancelled"), &json!(1)),
        "{run:#}"
    );
    assert_eq!(run["error"]["context"]["phase"], "model_call");
    let messages = service.get(&format!("/v1/runs/{id}/messages")).await.body;
    let roles: Vec<&str> =
        messages["data"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool"]);
}

async fn a_broken_file_keeps_its_last_good_version(db: Db) {
    let scripted = READER.replace("mock/any", "scripted/reader");
    let service = Setup::new()
        .agent("reader", &scripted)
        .agent("broken", "model: nobody/x\n")
        .scenario("reader", "steps: [{text: fine}]")
        .start(db)
        .await;
    let ready = service.get("/readyz").await;
    assert_eq!(ready.status, 200, "one broken file stops no other: {:#}", ready.body);
    assert_eq!(ready.body["definitions"][0]["file"], "broken.yaml");
    assert_eq!(service.post("/v1/agents/broken/invoke", &json!({})).await.status, 404);

    let hash = service.get("/v1/agents").await.body["data"][0]["hash"].clone();
    service.write("agents/reader.yaml", "name: reader\nmodel: [\n");
    let broken =
        |ready: &Value| ready["definitions"].as_array().is_some_and(|files| files.len() == 2);
    service.until("/readyz", broken).await;
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(run["status"], "completed", "the last good version goes on");

    service.write("agents/reader.yaml", &format!("name: reader\nversion: 2.0.0\n{scripted}"));
    let agents = service.until("/v1/agents", |agents| agents["data"][0]["hash"] != hash).await;
    assert_eq!(agents["data"][0]["version"], "2.0.0");
}

#[tokio::test]
async fn a_second_process_on_the_same_file_refuses_to_start() {
    let service = Setup::new().start(Db::Sqlite).await;
    for _ in 0..rounds(1) {
        let second = command(service.dir.path())
            .args(["serve", "--listen", "127.0.0.1:0", "--database-url", &service.database_url])
            .output()
            .await
            .unwrap();
        assert_eq!(second.status.code(), Some(1));
        let error = String::from_utf8_lossy(&second.stderr).into_owned();
        assert!(error.contains("toolloop.db") && error.contains("another"), "{error}");
    }
    assert_eq!(service.get("/healthz").await.status, 200, "the first one is not disturbed");
}

/// Callers see 200 or 503 and nothing else; runs in flight pause and go on; what was told is
/// stored.
#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_restarts_under_load_loses_nothing_that_was_acknowledged() {
    let postgres = tokio::task::spawn_blocking(OwnServer::start).await.unwrap();
    let steps = "steps: [{delay_ms: 50, tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}, {text: done}]";
    let setup = Setup::new()
        .agent("reader", &READER.replace("mock/any", "scripted/reader"))
        .scenario("reader", steps);
    let service = Arc::new(setup.start_on(postgres.url()).await);
    let stop = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let callers: Vec<_> = (0..8)
        .map(|_| {
            let (service, stop) = (Arc::clone(&service), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut told = Vec::new();
                while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                    let path = "/v1/agents/reader/invoke-iterative";
                    let answer = service.post(path, &json!({"inputs": {"task": "x"}})).await;
                    match answer.status.as_u16() {
                        200 => told.push((
                            answer.body["run_id"].as_str().unwrap().to_owned(),
                            answer.body,
                        )),
                        503 => {
                            assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
                            tokio::time::sleep(Duration::from_millis(50)).await;
                        }
                        other => panic!("{other}: {:#}", answer.body),
                    }
                }
                told
            })
        })
        .collect();
    let count = |runs: &Value| runs["data"].as_array().map_or(0, Vec::len);
    service.until("/v1/runs", |runs| count(runs) >= 20).await;
    let postgres = tokio::task::spawn_blocking(move || {
        postgres.stop();
        postgres
    });
    let postgres = postgres.await.unwrap();
    let refused = service.get("/v1/runs").await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (503, &json!("STORE_UNAVAILABLE"))
    );
    let body = json!({"inputs": {"task": "x"}});
    let late = service.post("/v1/agents/reader/invoke-iterative", &body).await;
    assert_eq!((late.status.as_u16(), &late.body["code"]), (503, &json!("STORE_UNAVAILABLE")));
    assert!(!late.body["detail"].to_string().contains("continues"), "{:#}", late.body);
    assert_eq!(service.get("/healthz").await.status, 200);
    assert_eq!(service.get("/readyz").await.status, 503);
    let postgres = tokio::task::spawn_blocking(move || {
        postgres.start_again();
        postgres
    });
    let postgres = postgres.await.unwrap();
    service.until("/readyz", |ready| ready["status"] == "ready").await;
    let after = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(after["status"], "completed");
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    let mut told = 0;
    for caller in callers {
        for (id, run) in caller.await.unwrap() {
            let stored = service.get(&format!("/v1/runs/{id}")).await.body;
            assert_eq!((&stored["status"], &stored["output"]), (&run["status"], &run["output"]));
            told += 1;
        }
    }
    assert!(told >= 20, "only {told} runs were acknowledged");
    let errors = service.log().matches("\"request failed\"").count();
    assert!(errors <= 2, "{errors} lines for one outage\n{}", service.log());
    service.until("/v1/runs?status=running", |runs| count(runs) == 0).await;
    drop(service);
    drop(postgres);
}
