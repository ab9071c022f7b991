//! What a caller experiences, told through HTTP on both stores with the real binary.

use std::time::Duration;

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    an_agent_uses_tools_and_answers,
    a_structured_output_is_validated_and_tried_again,
    every_fact_is_kept,
    a_first_text_answer_is_confirmed,
    single_shot_makes_one_model_call,
    limits_end_a_run_with_their_names,
    refusals_of_the_gate_are_told_to_the_model,
    a_request_can_only_narrow,
    cancel_reaches_a_hanging_model_call,
    a_taken_run_id_leaves_its_run_alone,
    more_runs_than_there_is_room_for_are_refused,
    cancel_is_the_same_twice_and_after_the_end,
    a_cancel_is_kept_or_the_end_is_told,
    a_killed_service_resumes_its_runs,
    a_terminated_service_hands_its_runs_on,
    tenants_see_nothing_of_one_another,
    history_filters_and_pages,
}

const READER: &str = "
model: scripted/reader
instructions: Read the files.
inputs: {type: object, required: [task], properties: {task: {type: string}}}
tools: [file_ops]
enable_double_confirmation: false
";

/// Lists, reads what it found, answers what it read.
const READING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - text: '{"task": "{{ inputs.task }}", "read": "{{ results[0] | trim }}"}'
"#;

fn reader() -> Setup {
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READING)
        .file("notes.txt", "seventeen\n")
}

async fn an_agent_uses_tools_and_answers(db: Db) {
    let service = reader().start(db).await;
    let answer = service
        .post("/v1/agents/reader/invoke-iterative", &json!({"inputs": {"task": "count"}}))
        .await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    let run = &answer.body;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert_eq!(run["termination_reason"], "completed");
    assert_eq!(run["output"], json!({"task": "count", "read": "seventeen"}));
    assert_eq!(
        (&run["attempts"], &run["iterations"], &run["tool_calls_made"]),
        (&json!(1), &json!(3), &json!(2))
    );
    assert_eq!(run["tools_used"], json!(["file_ops"]));
    assert_eq!(run["model"], "scripted/reader");
    assert_eq!(run["tokens_used"], run["usage"]["total_tokens"]);
    assert!(run["tokens_used"].as_u64().unwrap() > 0);
    assert_eq!(
        (&run["error"], &run["partial"], &run["warnings"]),
        (&Value::Null, &json!(false), &json!([]))
    );
    assert_eq!(answer.headers["x-run-id"], run["run_id"].as_str().unwrap());

    // What is stored is what was answered.
    let stored = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    for (field, value) in run.as_object().unwrap() {
        assert_eq!(&stored[field], value, "{field}");
    }
}

const EXTRACTOR: &str = "
model: scripted/extractor
instructions: Extract.
output:
  schema: {type: object, required: [total], properties: {total: {type: integer, minimum: 1}}, additionalProperties: false}
";

async fn a_structured_output_is_validated_and_tried_again(db: Db) {
    let service = Setup::new()
        .agent("extractor", EXTRACTOR)
        .scenario(
            "extractor",
            r#"
steps:
  - tool_calls: [{tool: output, arguments: {total: 0, extra: 1}}]
  - text: "I think it is 3."
  - tool_calls: [{tool: output, arguments: {total: 3}}]
"#,
        )
        .agent("hopeless", &EXTRACTOR.replace("scripted/extractor", "scripted/hopeless"))
        .scenario("hopeless", "steps: [{tool_calls: [{tool: output, arguments: {total: none}}]}]")
        .start(db)
        .await;
    let run = service.run("extractor", &json!({})).await;
    assert_eq!(run["output"], json!({"total": 3}), "{run:#}");
    assert_eq!(
        (&run["attempts"], &run["iterations"], &run["tool_calls_made"]),
        (&json!(3), &json!(3), &json!(0))
    );
    let calls =
        service.get(&format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(calls["data"], json!([]), "output is not a tool call of the agent");

    let run = service.run("hopeless", &json!({"max_attempts": 2})).await;
    assert_eq!(
        (&run["status"], &run["termination_reason"]),
        (&json!("failed"), &json!("validation_failed"))
    );
    assert_eq!(run["error"]["code"], "VALIDATION_FAILED");
    assert_eq!(run["error"]["context"]["errors"][0]["pointer"], "/total", "{run:#}");
    assert_eq!(run["attempts"], 2);
}

async fn every_fact_is_kept(db: Db) {
    let service = reader().start(db).await;
    let run = service
        .run("reader", &json!({"inputs": {"task": "x"}, "metadata": {"ticket": "42"}}))
        .await;
    let id = run["run_id"].as_str().unwrap();

    let events = service.get(&format!("/v1/runs/{id}/events")).await.body;
    let types: Vec<&str> =
        events["data"].as_array().unwrap().iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(
        types,
        [
            "run.started",
            "attempt.started",
            "iteration.started",
            "model.responded",
            "tool_call.started",
            "tool_call.completed",
            "iteration.started",
            "model.responded",
            "tool_call.started",
            "tool_call.completed",
            "iteration.started",
            "model.responded",
            "run.completed",
        ]
    );
    for (index, event) in events["data"].as_array().unwrap().iter().enumerate() {
        assert_eq!((&event["seq"], &event["run_id"]), (&json!(index + 1), &json!(id)));
    }
    let later = service.get(&format!("/v1/runs/{id}/events?after=11")).await.body;
    assert_eq!(later["data"].as_array().unwrap().len(), 2);
    let beyond = service.get(&format!("/v1/runs/{id}/events?after={}", i64::MAX)).await;
    assert_eq!((beyond.status.as_u16(), &beyond.body["data"]), (200, &json!([])), "{beyond:?}");

    let calls = service.get(&format!("/v1/runs/{id}/tool-calls")).await.body;
    let second = &calls["data"][1];
    assert_eq!(second["arguments"], json!({"operation": "read", "path": "notes.txt"}));
    assert_eq!(
        (&second["state"], &second["decision"], &second["effect"]),
        (&json!("succeeded"), &json!("allowed"), &json!("read"))
    );
    assert_eq!(second["result"].as_str().unwrap().trim(), "seventeen");

    let iterations = service.get(&format!("/v1/runs/{id}/iterations")).await.body;
    assert_eq!(iterations["data"].as_array().unwrap().len(), 3);
    assert_eq!(
        (&iterations["data"][2]["number"], &iterations["data"][2]["provider"]),
        (&json!(3), &json!("scripted"))
    );
    let all = events["data"].as_array().unwrap();
    let began: Vec<&Value> =
        all.iter().filter(|e| e["type"] == "iteration.started").map(|e| &e["at"]).collect();
    let told: Vec<&Value> =
        iterations["data"].as_array().unwrap().iter().map(|i| &i["started_at"]).collect();
    assert_eq!(told, began);

    let messages = service.get(&format!("/v1/runs/{id}/messages")).await.body;
    let roles: Vec<&str> =
        messages["data"].as_array().unwrap().iter().map(|m| m["role"].as_str().unwrap()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]);
    assert_eq!(messages["data"][3]["tool_call_id"], calls["data"][0]["id"]);

    let audit = service.get(&format!("/v1/audit?run_id={id}")).await.body;
    assert_eq!(audit["data"].as_array().unwrap().len(), 2, "{audit:#}");
    assert_eq!(
        (&audit["data"][0]["tool"], &audit["data"][0]["outcome"]),
        (&json!("file_ops"), &json!("succeeded"))
    );

    let detail = service.get(&format!("/v1/runs/{id}")).await.body;
    assert_eq!(
        (&detail["inputs"], &detail["metadata"]),
        (&json!({"task": "x"}), &json!({"ticket": "42"}))
    );
    assert_eq!(detail["pending"], json!([]));
}

async fn a_first_text_answer_is_confirmed(db: Db) {
    let agent = READER.replace("enable_double_confirmation: false", "");
    let service = Setup::new()
        .agent("reader", &agent)
        .scenario("reader", "steps: [{text: first}, {text: second}]")
        .start(db)
        .await;
    let body = json!({"inputs": {"task": "x"}});
    assert_eq!(service.run("reader", &body).await["output"], json!({"result": "second"}));
    let body = json!({"inputs": {"task": "x"}, "enable_double_confirmation": false});
    assert_eq!(service.run("reader", &body).await["output"], json!({"result": "first"}));
    let run = service.run("reader", &json!({"inputs": {"task": "x"}, "tools": []})).await;
    assert_eq!(
        run["output"],
        json!({"result": "first"}),
        "without tools there is nothing to confirm"
    );
    assert_eq!(run["warnings"].as_array().unwrap().len(), 1, "{run:#}");
}

async fn single_shot_makes_one_model_call(db: Db) {
    let service = Setup::new()
        .agent("reader", READER)
        .scenario("reader", r#"steps: [{text: "```json\n{\"a\": 1}\n```"}, {text: never}]"#)
        .start(db)
        .await;
    let answer = service.post("/v1/agents/reader/invoke", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    assert_eq!(answer.body["output"], json!({"a": 1}));
    for field in ["attempts", "iterations", "tool_calls_made", "tools_used"] {
        assert!(answer.body.get(field).is_none(), "{field} belongs to the loop");
    }
}

async fn limits_end_a_run_with_their_names(db: Db) {
    let looping =
        "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}]";
    let failing = "steps: [{tool_calls: [{tool: nothing, arguments: {}}]}]";
    let slow = "steps: [{delay_ms: 60000, text: late}]";
    let broken = "steps: [{error: {status: 400, message: no such thing}}]";
    let mut setup = Setup::new();
    for (name, steps) in
        [("looping", looping), ("failing", failing), ("slow", slow), ("broken", broken)]
    {
        setup = setup
            .agent(name, &READER.replace("scripted/reader", &format!("scripted/{name}")))
            .scenario(name, steps);
    }
    let service = setup.start(db).await;
    let table = [
        ("looping", json!({"max_iterations": 4}), "max_iterations", "MAX_ITERATIONS"),
        ("looping", json!({"max_iterations_per_attempt": 2}), "max_iterations", "MAX_ITERATIONS"),
        ("looping", json!({"budget": {"max_tool_calls": 2}}), "budget_exceeded", "BUDGET_EXCEEDED"),
        (
            "looping",
            json!({"budget": {"max_total_tokens": 1}}),
            "budget_exceeded",
            "BUDGET_EXCEEDED",
        ),
        ("failing", json!({"error_threshold": 2}), "error", "TOOL_ERRORS"),
        (
            "slow",
            json!({"budget": {"max_duration_seconds": 1}}),
            "duration_exceeded",
            "DURATION_EXCEEDED",
        ),
        ("broken", json!({}), "model_error", "MODEL_ERROR"),
    ];
    for (agent, mut body, reason, code) in table {
        body["inputs"] = json!({"task": "x"});
        let run = service.run(agent, &body).await;
        assert_eq!(
            (&run["status"], &run["termination_reason"]),
            (&json!("failed"), &json!(reason)),
            "{run:#}"
        );
        assert_eq!(run["error"]["code"], code);
        assert!(run["latency_ms"].is_u64() && run["usage"]["total_tokens"].is_u64(), "{run:#}");
    }
    let run = service.run("failing", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(
        run["error"]["context"]["last_failure"]["result"], "Error: Unknown tool nothing",
        "{run:#}"
    );
    let run = service.run("looping", &json!({"inputs": {"task": "x"}, "max_iterations": 4})).await;
    assert_eq!(
        run["error"]["context"],
        json!({"attempt": 1, "iteration_count": 4, "max_iterations": 4})
    );
}

async fn refusals_of_the_gate_are_told_to_the_model(db: Db) {
    let steps = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: out.txt, content: x}}
      - {tool: file_ops, arguments: {operation: read, path: ../../../etc/passwd}}
      - {tool: file_ops, arguments: {operation: read, path: secret/.env}}
      - {tool: nobody, arguments: {}}
      - {tool: file_ops, arguments: {operation: fly, path: x}}
      - {tool: file_ops, arguments: {operation: list, path: "."}}
  - text: "{{ results | join('\n') }}"
"#;
    let agent = format!(
        "{READER}limits: {{error_threshold: 10}}\ngovernance: {{paths: {{read: ['./**'], deny: ['**/.env']}}}}\n"
    );
    let service = Setup::new()
        .agent("reader", &agent)
        .scenario("reader", steps)
        .file("secret/.env", "TOKEN=1")
        .start(db)
        .await;
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    let calls =
        service.get(&format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap())).await.body;
    let calls = calls["data"].as_array().unwrap();
    let states: Vec<&str> = calls.iter().map(|c| c["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["denied", "denied", "denied", "failed", "failed", "failed"], "{calls:#?}");
    assert!(calls.iter().all(|c| c["is_error"] == json!(true)));
    assert_eq!(calls[3]["result"], "Error: Unknown tool nobody");
    assert_eq!(run["tool_calls_made"], 6);
    assert_eq!(run["tools_used"], json!([]), "the sixth call is one too many");
    assert!(!service.dir.path().join("workspace/default/out.txt").exists());

    // A key without the tools' scope starts no run whose calls would all be refused.
    let key = service
        .post("/v1/keys", &json!({"name": "n", "scopes": ["agents:invoke", "runs:read"]}))
        .await
        .body;
    let mut limited = service;
    limited.key = key["key"].as_str().unwrap().into();
    let body = json!({"inputs": {"task": "x"}});
    let refused = limited.post("/v1/agents/reader/invoke-iterative", &body).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (403, &json!("FORBIDDEN")));
    assert_eq!(limited.get("/v1/audit").await.status, 403);
}

async fn a_request_can_only_narrow(db: Db) {
    let service = reader().start(db).await;
    let run = service
        .run("reader", &json!({"inputs": {"task": "x"}, "max_iterations": 10_000, "tools": ["file_ops", "shell"]}))
        .await;
    assert_eq!(run["status"], "completed", "larger limits and other tools change nothing");
    let table = [
        (json!({"inputs": {}}), 422, "INVALID_INPUTS"),
        (json!({"inputs": {"task": 1}}), 422, "INVALID_INPUTS"),
        (json!({"inputs": []}), 422, "INVALID_INPUTS"),
        (json!({"inputs": {"task": "x"}, "max_iterations": 0}), 422, "INVALID_OVERRIDE"),
        (json!({"inputs": {"task": "x"}, "max_iterations": "many"}), 422, "INVALID_OVERRIDE"),
        (json!({"inputs": {"task": "x"}, "model": "nobody/x"}), 422, "INVALID_OVERRIDE"),
        (json!({"inputs": {"task": "x"}, "tool_choice": "required"}), 422, "INVALID_OVERRIDE"),
        (json!({"inputs": {"task": "x"}, "temperature": 3}), 422, "INVALID_OVERRIDE"),
        (json!({"inputs": {"task": "x"}, "made_up": 1}), 422, "INVALID_OVERRIDE"),
    ];
    for (body, status, code) in table {
        let answer = service.post("/v1/agents/reader/invoke-iterative", &body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (status, &json!(code)),
            "{body}: {:#}",
            answer.body
        );
        assert_eq!(answer.headers["content-type"], "application/problem+json");
        assert!(answer.body["errors"][0]["pointer"].is_string(), "{:#}", answer.body);
    }
    assert_eq!(service.post("/v1/agents/nobody/invoke-iterative", &json!({})).await.status, 404);
    assert_eq!(
        service.get("/v1/runs").await.body["data"].as_array().unwrap().len(),
        1,
        "refusals leave nothing"
    );
}

fn sleeper() -> Setup {
    Setup::new()
        .agent("sleeper", &READER.replace("scripted/reader", "scripted/sleeper"))
        .scenario("sleeper", "steps: [{delay_ms: 120000, text: late}]")
}

/// Starts a run that hangs in its model call, and answers its id.
async fn hanging(service: &Service, id: u128) -> (String, tokio::task::JoinHandle<Value>) {
    let id = uuid::Uuid::from_u128(id).to_string();
    let body = json!({"inputs": {"task": "x"}, "run_id": id});
    let request =
        service.request(reqwest::Method::POST, "/v1/agents/sleeper/invoke-iterative").json(&body);
    let call = tokio::spawn(async move { crate::service::answer(request).await.body });
    service.until(&format!("/v1/runs/{id}"), |run| run["status"] == "running").await;
    let is_asked = |events: &Value| {
        let mut events = events["data"].as_array().into_iter().flatten();
        events.any(|event| event["type"] == "iteration.started")
    };
    service.until(&format!("/v1/runs/{id}/events"), is_asked).await;
    (id, call)
}

async fn cancel_reaches_a_hanging_model_call(db: Db) {
    let service = sleeper().start(db).await;
    let (id, call) = hanging(&service, 7).await;
    let cancelled =
        service.post(&format!("/v1/runs/{id}/cancel"), &json!({"reason": "changed my mind"})).await;
    assert_eq!(cancelled.status, 202, "{:#}", cancelled.body);
    let run = call.await.unwrap();
    assert_eq!(
        (&run["status"], &run["termination_reason"]),
        (&json!("cancelled"), &json!("cancelled")),
        "{run:#}"
    );
    assert_eq!(run["error"]["code"], "EXECUTION_CANCELLED");
    assert_eq!(
        run["error"]["context"],
        json!({"phase": "model_call", "attempt": 1, "iteration": 1, "reason": "changed my mind"})
    );
}

async fn a_taken_run_id_leaves_its_run_alone(db: Db) {
    let service = sleeper().start(db).await;
    let (id, call) = hanging(&service, 10).await;
    let body = json!({"inputs": {"task": "x"}, "run_id": id});
    let second = service.post("/v1/agents/sleeper/invoke-iterative", &body).await;
    assert_eq!((second.status.as_u16(), &second.body["code"]), (409, &json!("RUN_ID_TAKEN")));
    assert_eq!(
        service.get(&format!("/v1/runs/{id}")).await.body["status"],
        "running",
        "the first one goes on"
    );
    assert_eq!(service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await.status, 202);
    assert_eq!(call.await.unwrap()["status"], "cancelled", "and still hears");
}

async fn more_runs_than_there_is_room_for_are_refused(db: Db) {
    let service = sleeper().config("[runtime]\nmax_concurrent_runs = 1").start(db).await;
    let (id, call) = hanging(&service, 11).await;
    let body = json!({"inputs": {"task": "x"}});
    let refused = service.post("/v1/agents/sleeper/invoke-iterative", &body).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (503, &json!("OVERLOADED")));
    assert!(refused.headers.contains_key("retry-after"));
    service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await;
    assert_eq!(call.await.unwrap()["status"], "cancelled");
}

async fn cancel_is_the_same_twice_and_after_the_end(db: Db) {
    let service = sleeper().start(db).await;
    let (id, call) = hanging(&service, 8).await;
    let path = format!("/v1/runs/{id}/cancel");
    let nothing = json!({});
    let twice = tokio::join!(service.post(&path, &nothing), service.post(&path, &nothing));
    assert!([twice.0.status, twice.1.status].iter().all(|s| *s == 202 || *s == 200), "{twice:?}");
    let ended = call.await.unwrap();
    let again = service.post(&path, &json!({})).await;
    assert_eq!((again.status.as_u16(), &again.body["status"]), (200, &json!("cancelled")));
    assert_eq!(again.body["latency_ms"], ended["latency_ms"], "unchanged");
    for unknown in [uuid::Uuid::from_u128(1).to_string(), "not-an-id".into()] {
        let answer = service.post(&format!("/v1/runs/{unknown}/cancel"), &json!({})).await;
        assert_eq!((answer.status.as_u16(), &answer.body["code"]), (404, &json!("NOT_FOUND")));
    }
}

/// Whenever the cancel comes, also while the end is being stored.
async fn a_cancel_is_kept_or_the_end_is_told(db: Db) {
    let service = Setup::new()
        .agent("brief", "model: scripted/brief\nenable_double_confirmation: false")
        .scenario("brief", "steps: [{delay_ms: 15, text: done}]")
        .start(db)
        .await;
    let race = async |after: u64| {
        let run = service.enqueue("brief").await;
        tokio::time::sleep(Duration::from_millis(after)).await;
        let answer = service.post(&format!("{run}/cancel"), &json!({})).await;
        let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
        let events = service.get(&format!("{run}/events?limit=200")).await.body;
        let noted = events["data"].as_array().unwrap().iter();
        let noted = noted.filter(|event| event["type"] == "run.cancel_requested").count();
        match answer.status.as_u16() {
            202 => assert_eq!((&ended["status"], noted), (&json!("cancelled"), 1), "{ended:#}"),
            200 => assert_eq!(answer.body["status"], ended["status"], "{:#}", answer.body),
            other => panic!("{other}: {:#}", answer.body),
        }
    };
    futures::future::join_all((0..60).map(|n| race(n / 2))).await;
}

const SLOW_READING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - delay_ms: 600000
    tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - text: '{"read": "{{ results[0] | trim }}"}'
"#;

async fn a_killed_service_resumes_its_runs(db: Db) {
    let setup = Setup::new()
        .agent("reader", READER)
        .scenario("reader", SLOW_READING)
        .file("notes.txt", "seventeen\n");
    let mut service = setup.config("[runtime]\nlease = \"2s\"").start(db).await;
    let id = uuid::Uuid::from_u128(9).to_string();
    let body = json!({"inputs": {"task": "x"}, "run_id": id});
    let request =
        service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative").json(&body);
    let call = tokio::spawn(request.send());
    service.until(&format!("/v1/runs/{id}"), |run| run["iterations"] == 1).await;
    service.kill().await;
    assert!(call.await.unwrap().is_err(), "the connection died with the process");
    service.write("scenarios/reader.yaml", &SLOW_READING.replace("600000", "0"));
    service.restart().await;
    let run = service.until(&format!("/v1/runs/{id}"), |run| run["finished_at"].is_string()).await;
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"read": "seventeen"})),
        "{run:#}"
    );
    assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(3), &json!(2)));
    let events = service.get(&format!("/v1/runs/{id}/events")).await.body;
    let types: Vec<&str> =
        events["data"].as_array().unwrap().iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(types.iter().filter(|t| **t == "run.resumed").count(), 1);
    assert_eq!(types.iter().filter(|t| **t == "run.completed").count(), 1);
}

async fn a_terminated_service_hands_its_runs_on(db: Db) {
    let mock = MockModel::start().await;
    let (free, held) = watch::channel(false);
    let read = Reply::call("file_ops", &json!({"operation": "read", "path": "notes.txt"}));
    mock.script([
        read.clone(),
        Reply::Held(held, Box::new(read)),
        Reply::text(r#"{"read": "seventeen"}"#),
    ]);
    let setup = Setup::new()
        .agent("reader", &READER.replace("scripted/reader", "mock/reader"))
        .config(&format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url()))
        .file("notes.txt", "seventeen\n");
    let mut service = setup.start(db).await;
    let body = json!({"inputs": {"task": "x"}});
    let request =
        service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative").json(&body);
    let call = tokio::spawn(async move { crate::service::answer(request).await });
    service.until("/v1/runs", |runs| runs["data"][0]["iterations"] == 1).await;
    mock.wait_for_requests(2).await;
    service.signal(crate::service::Signal::TERM);
    let draining = service.until("/readyz", |ready| ready["status"] != "ready").await;
    assert_eq!(draining["status"], "draining", "{draining:#}");
    let refused = service.post("/v1/agents/reader/invoke-iterative", &body).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (503, &json!("DRAINING")));
    free.send_replace(true);
    assert_eq!(service.exit_code().await, Some(0), "{}", service.log());
    let answer = call.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), &answer.body["status"]),
        (200, &json!("completed")),
        "in-flight requests are answered"
    );
}

async fn tenants_see_nothing_of_one_another(db: Db) {
    let mut service = reader().start(db).await;
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    let id = run["run_id"].as_str().unwrap().to_owned();
    let made = service
        .post("/v1/keys", &json!({"name": "other", "tenant": "other", "scopes": ["admin"]}))
        .await;
    assert_eq!(made.status, 201, "{:#}", made.body);
    service.key = made.body["key"].as_str().unwrap().into();
    for part in ["", "/iterations", "/tool-calls", "/messages", "/events"] {
        let answer = service.get(&format!("/v1/runs/{id}{part}")).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (404, &json!("NOT_FOUND")),
            "{part}"
        );
    }
    assert_eq!(service.post(&format!("/v1/runs/{id}/cancel"), &json!({})).await.status, 404);
    for list in ["/v1/runs", "/v1/audit?action=tool_call"] {
        assert_eq!(service.get(list).await.body["data"], json!([]), "{list}");
    }
    let keys = service.get("/v1/keys").await.body;
    assert_eq!(keys["data"].as_array().unwrap().len(), 1, "{keys:#}");
    let taken = service
        .post("/v1/agents/reader/invoke-iterative", &json!({"inputs": {"task": "x"}, "run_id": id}))
        .await;
    assert_eq!((taken.status.as_u16(), &taken.body["code"]), (409, &json!("RUN_ID_TAKEN")));
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_ne!(
        run["output"]["read"], "seventeen",
        "the other tenant's files are not ours: {run:#}"
    );

    let key_id = made.body["id"].as_str().unwrap();
    assert!(service.delete(&format!("/v1/keys/{key_id}")).await.status.is_success());
    let refused = service.get("/v1/runs").await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (401, &json!("UNAUTHENTICATED")));
    assert_eq!(refused.headers["www-authenticate"], "Bearer");
}

async fn history_filters_and_pages(db: Db) {
    let service =
        reader().agent("second", &READER.replace("Read the files.", "Read them.")).start(db).await;
    for number in 0..5 {
        let agent = if number % 2 == 0 { "reader" } else { "second" };
        let metadata = json!({"number": number.to_string(), "odd": (number % 2 == 1).to_string()});
        service
            .run(
                agent,
                &json!({"inputs": {"task": "x"}, "metadata": metadata, "session_id": format!("{agent}-{}", number / 3)}),
            )
            .await;
    }
    let count = async |query: &str| {
        service.get(&format!("/v1/runs?{query}")).await.body["data"].as_array().unwrap().len()
    };
    assert_eq!(count("").await, 5);
    assert_eq!(count("agent=second").await, 2);
    assert_eq!(count("status=completed&agent=reader").await, 3);
    assert_eq!(count("status=failed").await, 0);
    assert_eq!(count("metadata.odd=true").await, 2);
    assert_eq!(count("metadata.odd=true&metadata.number=3").await, 1);
    assert_eq!(count("session_id=reader-0").await, 2);
    assert_eq!(count("termination_reason=completed").await, 5);
    assert_eq!(count("created_after=2100-01-01T00:00:00Z").await, 0);
    assert_eq!(count("created_before=2100-01-01T00:00:00Z").await, 5);

    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = service.get(&format!("/v1/runs?limit=2{cursor}")).await.body;
        seen.extend(
            page["data"]
                .as_array()
                .unwrap()
                .iter()
                .map(|r| r["metadata"]["number"].as_str().unwrap().to_owned()),
        );
        match page["next_cursor"].as_str() {
            Some(next) => cursor = format!("&cursor={next}"),
            None => break,
        }
    }
    assert_eq!(seen, ["4", "3", "2", "1", "0"], "newest first, each once");
    for wrong in [
        "limit=0",
        "limit=201",
        "limit=x",
        "status=odd",
        "cursor=zzz",
        "created_after=yesterday",
        "made_up=1",
    ] {
        let answer = service.get(&format!("/v1/runs?{wrong}")).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (400, &json!("INVALID_PARAMETER")),
            "{wrong}"
        );
    }
}
