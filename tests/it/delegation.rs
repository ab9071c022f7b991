//! Agents that leave work to others: what a child run is, what it may do, and that none is left
//! behind.

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::claims::change;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_subagent_works_on_a_task,
    errors_of_a_child_are_results,
    a_worker_goes_on_with_the_conversation,
    a_handoff_is_not_the_first_call_that_is_required,
    work_is_passed_on_three_times_and_never_in_a_circle,
    agents_that_are_named_must_be_there,
    permissions_only_narrow,
    rules_of_a_parent_hold_for_its_children,
    a_child_needs_no_place_of_its_own,
    children_that_only_would_be_read_only_work_one_after_the_other,
    cancelling_a_parent_cancels_its_children,
    a_call_that_is_given_up_leaves_no_child,
    after_a_crash_a_parent_finds_the_child_that_it_started,
    after_a_crash_a_handoff_has_begun_once,
    a_run_goes_on_whose_child_crashed_too_often,
}

const PARENT: &str = "
model: scripted/parent
instructions: Ask the researcher.
tools: ['agent:researcher']
enable_double_confirmation: false
";

const RESEARCHER: &str = "
model: scripted/researcher
description: Finds things out.
instructions: Find it out.
inputs: {type: object, required: [task], properties: {task: {type: string}}, additionalProperties: false}
enable_double_confirmation: false
";

/// Asks once, then says what it was told.
const ASKS: &str = r#"
steps:
  - tool_calls: [{tool: "agent:researcher", arguments: {task: "weigh {{ inputs.what | default('it') }}"}}]
  - text: "told: {{ results[0] }}"
"#;

fn id(run: &Value) -> &str {
    run["run_id"].as_str().unwrap()
}

async fn children(service: &Service, parent: &str) -> Vec<Value> {
    let listed = service.get(&format!("/v1/runs?parent_run_id={parent}")).await.body;
    listed["data"].as_array().unwrap().clone()
}

async fn events(service: &Service, run: &str) -> Vec<Value> {
    service.get(&format!("/v1/runs/{run}/events")).await.body["data"].as_array().unwrap().clone()
}

fn mock_models(mock: &MockModel) -> String {
    format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"\nmax_retries = 0",
        mock.base_url()
    )
}

async fn a_subagent_works_on_a_task(db: Db) {
    let service = Setup::new()
        .agent("parent", PARENT)
        .scenario("parent", ASKS)
        .agent("researcher", RESEARCHER)
        .scenario("researcher", "steps: [{text: 'done: {{ inputs.task }}'}]")
        .start(db)
        .await;
    let body = json!({"inputs": {"what": "x"}, "session_id": "s", "metadata": {"ticket": "42"}});
    let run = service.run("parent", &body).await;
    assert_eq!(run["output"], json!({"result": "told: done: weigh x"}), "{run:#}");
    assert_eq!(
        (&run["tool_calls_made"], &run["tools_used"]),
        (&json!(1), &json!(["agent:researcher"]))
    );

    let children = children(&service, id(&run)).await;
    assert_eq!(children.len(), 1, "{children:#?}");
    let child = service.get(&format!("/v1/runs/{}", id(&children[0]))).await.body;
    assert_eq!(
        (&child["agent"], &child["kind"]),
        (&json!("researcher"), &json!("iterative")),
        "{child:#}"
    );
    assert_eq!((&child["parent_run_id"], &child["session_id"]), (&run["run_id"], &Value::Null));
    assert_eq!(
        (&child["inputs"], &child["status"]),
        (&json!({"task": "weigh x"}), &json!("completed"))
    );
    assert!(
        child["budget"]["limits"]["max_duration_seconds"].as_u64().unwrap() <= 3600,
        "{child:#}"
    );

    let calls = service.get(&format!("/v1/runs/{}/tool-calls", id(&run))).await.body;
    assert_eq!(
        (&calls["data"][0]["effect"], &calls["data"][0]["result"]),
        (&json!("idempotent"), &json!("done: weigh x"))
    );
    assert_eq!(calls["data"][0]["child_run_id"], child["run_id"], "{calls:#}");
    let done = events(&service, id(&run)).await;
    let done = done.iter().find(|event| event["type"] == "tool_call.completed").unwrap();
    assert_eq!(done["data"]["child_run_id"], child["run_id"], "{done:#}");
    let told = child["warnings"].to_string();
    assert!(!told.contains("the agent allows"), "its bounds are no wish of a caller: {told}");
    let tree = service.get(&format!("/v1/runs?parent_run_id={}", id(&child))).await.body;
    assert_eq!(tree["data"], json!([]));
}

async fn errors_of_a_child_are_results(db: Db) {
    let parent = |tool: &str, arguments: &str| {
        format!(
            "steps:\n  - tool_calls: [{{tool: \"{tool}\", arguments: {arguments}}}]\n  - text: '{{{{ results[0] }}}}'\n"
        )
    };
    let agent = |model: &str, tool: &str| {
        PARENT
            .replace("scripted/parent", &format!("scripted/{model}"))
            .replace("agent:researcher", tool)
    };
    let service = Setup::new()
        .agent("researcher", RESEARCHER)
        .scenario("researcher", "steps: [{error: {status: 401, message: who are you}}]")
        .agent("fails", &agent("fails", "agent:researcher"))
        .scenario("fails", &parent("agent:researcher", "{task: x}"))
        .agent("misses", &agent("misses", "agent:researcher"))
        .scenario("misses", &parent("agent:researcher", "{task: 5, more: 1}"))
        .agent("hands-over", &agent("hands-over", "transfer_to_researcher"))
        .scenario("hands-over", &parent("transfer_to_researcher", "{}"))
        .start(db)
        .await;
    let told = async |agent: &str| {
        let run = service.run(agent, &json!({"inputs": {"what": "x"}})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        (
            run["output"]["result"].as_str().unwrap().to_owned(),
            children(&service, id(&run)).await.len(),
        )
    };
    let (text, children) = told("fails").await;
    assert!(
        text.starts_with("Error: ") && text.contains("MODEL_ERROR") && text.contains("who are you"),
        "{text}"
    );
    assert_eq!(children, 1);
    let (text, children) = told("misses").await;
    assert!(
        text.starts_with("Error: ") && text.contains("/task") && text.contains("more"),
        "{text}"
    );
    assert_eq!(children, 0, "nothing was started");
    let (text, children) = told("hands-over").await;
    assert!(
        text.starts_with("Error: ") && text.contains("task"),
        "the parent's inputs must fit the worker: {text}"
    );
    assert_eq!(children, 0);
}

const SUPERVISOR: &str = "
model: mock/any
instructions: Hand over what you cannot do.
tools: ['transfer_to_worker', file_ops]
enable_double_confirmation: false
";

const WORKER: &str = "
model: mock/any
instructions: You work.
tools: [file_ops]
enable_double_confirmation: false
";

async fn supervised(mock: &MockModel, supervisor: &str, worker: &str, db: Db) -> Service {
    let setup = Setup::new()
        .agent("supervisor", supervisor)
        .agent("worker", worker)
        .file("notes.txt", "seventeen\n");
    setup.config(&mock_models(mock)).start(db).await
}

async fn a_worker_goes_on_with_the_conversation(db: Db) {
    let mock = MockModel::start().await;
    let service = supervised(&mock, SUPERVISOR, WORKER, db).await;
    let reading = Reply::call("file_ops", &json!({"operation": "read", "path": "notes.txt"}));
    let hand_over = Reply::call("transfer_to_worker", &json!({"reason": "too hard"}));
    mock.script([
        reading.clone(),
        hand_over,
        reading,
        Reply::text("it is 17"),
        Reply::text("the worker says 17"),
    ]);
    let run = service.run("supervisor", &json!({"inputs": {"task": "count"}})).await;
    assert_eq!(run["output"], json!({"result": "the worker says 17"}), "{run:#}");
    assert_eq!(mock.refusals(), Vec::<String>::new(), "every request was a valid one");

    let requests = mock.requests();
    let roles = |n: usize| {
        requests[n]
            .messages()
            .iter()
            .map(|m| m["role"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        roles(2),
        ["system", "user", "assistant", "tool", "user"],
        "the supervisor's turns, then what is to be done"
    );
    let messages = requests[2].messages();
    assert!(messages[0]["content"].as_str().unwrap().contains("You work."), "{:#}", messages[0]);
    assert!(messages[1]["content"].as_str().unwrap().contains("count"), "{:#}", messages[1]);
    assert!(messages[3]["content"].as_str().unwrap().contains("\nseventeen\n"));
    let said = messages[4]["content"].as_str().unwrap();
    assert!(said.contains("supervisor") && said.contains("too hard"), "{said}");
    let told = requests[4].messages().last().unwrap()["content"].clone();
    assert!(told.as_str().unwrap().contains("\nit is 17\n"), "{told}");

    let children = children(&service, id(&run)).await;
    assert_eq!(children.len(), 1, "{children:#?}");
    let child = service.get(&format!("/v1/runs/{}", id(&children[0]))).await.body;
    assert_eq!(child["inputs"], json!({"task": "count"}), "{child:#}");
    let opened = events(&service, id(&children[0])).await;
    assert_eq!(
        (&opened[0]["type"], &opened[0]["data"]["history"]),
        (&json!("run.started"), &json!(2)),
        "{:#}",
        opened[0]
    );
    let handed = events(&service, id(&run)).await;
    let handed: Vec<&Value> =
        handed.iter().filter(|event| event["type"] == "handoff.started").collect();
    assert_eq!(handed.len(), 1);
    assert_eq!(
        (&handed[0]["data"]["agent"], &handed[0]["data"]["reason"]),
        (&json!("worker"), &json!("too hard"))
    );
    let trace = |n: usize| {
        requests[n]
            .headers
            .get("traceparent")
            .map(|header| header.to_str().unwrap()[3..35].to_owned())
    };
    assert!(trace(0).is_some(), "{:?}", requests[0].headers);
    assert_eq!(trace(0), trace(2), "a child continues its parent's trace");
}

async fn a_handoff_is_not_the_first_call_that_is_required(db: Db) {
    let mock = MockModel::start().await;
    let first = format!("{SUPERVISOR}tool_choice: first_required\n");
    let worker = format!("{WORKER}tool_choice: first_required\n");
    let service = supervised(&mock, &first, &worker, db).await;
    let reading = Reply::call("file_ops", &json!({"operation": "read", "path": "notes.txt"}));
    let hand_over = Reply::call("transfer_to_worker", &json!({}));
    mock.script([hand_over, reading.clone(), Reply::text("17"), reading, Reply::text("done")]);
    let run = service.run("supervisor", &json!({"inputs": {"task": "count"}})).await;
    assert_eq!(run["output"], json!({"result": "done"}), "{run:#}");
    let choices: Vec<Value> =
        mock.requests().iter().map(|request| request.body["tool_choice"].clone()).collect();
    let required = |n: usize| choices[n] == "required";
    assert!(required(0) && required(1) && !required(2), "{choices:?}");
    assert!(required(3) && !required(4), "a handoff does not settle it: {choices:?}");
}

async fn work_is_passed_on_three_times_and_never_in_a_circle(db: Db) {
    let link = |name: &str, next: &str| {
        let agent = format!(
            "model: scripted/{name}\ntools: ['agent:{next}']\nenable_double_confirmation: false\n"
        );
        let scenario = format!(
            "steps:\n  - tool_calls: [{{tool: \"agent:{next}\"}}]\n  - text: \"{name} < {{{{ results[0] }}}}\"\n"
        );
        (agent, scenario)
    };
    let mut setup = Setup::new();
    for (name, next) in
        [("a1", "b1"), ("b1", "c1"), ("c1", "d1"), ("d1", "e1"), ("ping", "pong"), ("pong", "ping")]
    {
        let (agent, scenario) = link(name, next);
        setup = setup.agent(name, &agent).scenario(name, &scenario);
    }
    let last = "model: scripted/e1\nenable_double_confirmation: false\n";
    let service =
        setup.agent("e1", last).scenario("e1", "steps: [{text: reached}]").start(db).await;
    let run = service.run("b1", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "b1 < c1 < d1 < reached"}), "{run:#}");
    let run = service.run("a1", &json!({})).await;
    let told = run["output"]["result"].as_str().unwrap();
    assert!(
        told.starts_with("a1 < b1 < c1 < d1 < Error: ") && told.contains("3 levels"),
        "{run:#}"
    );
    let run = service.run("ping", &json!({})).await;
    let told = run["output"]["result"].as_str().unwrap();
    assert!(told.starts_with("ping < pong < Error: ") && told.contains("ping → pong"), "{run:#}");
}

async fn agents_that_are_named_must_be_there(db: Db) {
    let setup = Setup::new().agent("parent", PARENT).scenario("parent", ASKS);
    let service =
        setup.agent("narcissus", &PARENT.replace("researcher", "narcissus")).start(db).await;
    let problems = service.get("/readyz").await.body["definitions"].as_array().unwrap().clone();
    let files: Vec<&str> =
        problems.iter().map(|problem| problem["file"].as_str().unwrap()).collect();
    assert_eq!(files, ["narcissus.yaml", "parent.yaml"], "{problems:#?}");
    assert!(problems[1]["error"].as_str().unwrap().contains("no agent named"), "{problems:#?}");
    service.until_logged("there is no agent named").await;
    assert_eq!(service.post("/v1/agents/parent/invoke-iterative", &json!({})).await.status, 404);

    service.write("scenarios/researcher.yaml", "steps: [{text: 'done: {{ inputs.task }}'}]");
    service.write("agents/researcher.yaml", &format!("name: researcher\n{RESEARCHER}"));
    let loaded =
        |ready: &Value| ready["definitions"].as_array().is_some_and(|files| files.len() == 1);
    service.until("/readyz", loaded).await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "told: done: weigh it"}), "{run:#}");

    // The parent is offered what the agent is now.
    service.write(
        "agents/researcher.yaml",
        &format!(
            "name: researcher\n{}",
            RESEARCHER.replace("task: {type: string}", "task: {enum: [y]}")
        ),
    );
    let changed = |agent: &Value| {
        agent["inputs"]["properties"]["task"] == json!({"enum": ["y"]})
            || agent["definition"]["inputs"]["properties"]["task"] == json!({"enum": ["y"]})
    };
    service.until("/v1/agents/researcher", changed).await;
    let run = service.run("parent", &json!({})).await;
    assert!(run["output"]["result"].as_str().unwrap().contains("/task"), "{run:#}");

    // A version that was good stays, and its calls say what is missing.
    std::fs::remove_file(service.dir.path().join("agents/researcher.yaml")).unwrap();
    service
        .until("/readyz", |ready| {
            ready["definitions"].as_array().is_some_and(|files| files.len() == 2)
        })
        .await;
    let run = service.run("parent", &json!({})).await;
    assert!(
        run["output"]["result"].as_str().unwrap().contains("there is no agent named"),
        "{run:#}"
    );
}

async fn permissions_only_narrow(db: Db) {
    let writer = "
model: scripted/researcher
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";
    let read_only = format!("{PARENT}governance: {{autonomy: read-only}}\n");
    let service = Setup::new()
        .agent("parent", PARENT)
        .agent("careful", &read_only)
        .scenario("parent", ASKS)
        .agent("researcher", writer)
        .scenario(
            "researcher",
            "steps:\n  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}]\n  \
             - text: '{{ results[0] }}'\n",
        )
        .start(db)
        .await;
    let run = service.run("careful", &json!({})).await;
    let told = run["output"]["result"].as_str().unwrap();
    assert!(told.contains("read-only"), "a child may do no more unasked than its parent: {run:#}");
    assert!(!service.dir.path().join("workspace/default/a.txt").exists());
    let run = service.run("parent", &json!({})).await;
    assert!(service.dir.path().join("workspace/default/a.txt").exists(), "{run:#}");
}

async fn a_child_needs_no_place_of_its_own(db: Db) {
    let service = Setup::new()
        .config("[runtime]\nmax_concurrent_runs = 1\nqueue_workers = 1")
        .agent("parent", PARENT)
        .scenario("parent", ASKS)
        .agent("researcher", RESEARCHER)
        .scenario("researcher", "steps: [{text: fine}]")
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "told: fine"}), "{run:#}");
}

/// A parent under way whose child waits for a model that never answers: the request, and both ids.
async fn with_a_hanging_child(mock: &MockModel, setup: Setup, db: Db) -> (Service, String, String) {
    mock.always(Reply::Hang);
    let service = setup
        .config(&mock_models(mock))
        .scenario("parent", ASKS)
        .agent("researcher", &RESEARCHER.replace("scripted/researcher", "mock/any"))
        .start(db)
        .await;
    let parent = uuid::Uuid::now_v7().to_string();
    let body = json!({"inputs": {}, "run_id": parent});
    let request = service.request(Method::POST, "/v1/agents/parent/invoke-iterative").json(&body);
    tokio::spawn(async move { request.send().await });
    mock.wait_for_requests(1).await;
    let listed = service
        .until(&format!("/v1/runs?parent_run_id={parent}"), |runs| {
            runs["data"][0]["run_id"].is_string()
        })
        .await;
    let child = listed["data"][0]["run_id"].as_str().unwrap().to_owned();
    (service, parent, child)
}

async fn until_ended(service: &Service, run: &str) -> Value {
    service.until(&format!("/v1/runs/{run}"), |run| run["finished_at"].is_string()).await
}

async fn cancelling_a_parent_cancels_its_children(db: Db) {
    let mock = MockModel::start().await;
    let (service, parent, child) =
        with_a_hanging_child(&mock, Setup::new().agent("parent", PARENT), db).await;
    assert_eq!(
        service
            .post(&format!("/v1/runs/{parent}/cancel"), &json!({"reason": "enough"}))
            .await
            .status,
        202
    );
    mock.wait_for_abort().await;
    assert_eq!(until_ended(&service, &parent).await["status"], "cancelled");
    let child = until_ended(&service, &child).await;
    assert_eq!(
        (&child["status"], &child["termination_reason"]),
        (&json!("cancelled"), &json!("cancelled")),
        "{child:#}"
    );
}

async fn a_call_that_is_given_up_leaves_no_child(db: Db) {
    let mock = MockModel::start().await;
    let parent = format!("{PARENT}limits: {{tool_call_timeout_seconds: 10}}\n");
    let (service, parent, child) =
        with_a_hanging_child(&mock, Setup::new().agent("parent", &parent), db).await;
    mock.wait_for_abort().await;
    assert_eq!(until_ended(&service, &child).await["status"], "cancelled");
    let parent = until_ended(&service, &parent).await;
    assert_eq!(parent["status"], "completed", "{parent:#}");
    assert!(
        parent["output"]["result"].as_str().unwrap().contains("did not finish within 10 seconds"),
        "{parent:#}"
    );
}

const QUICK_LEASE: &str = "[runtime]\nlease = \"2s\"\nqueue_workers = 1\nmax_concurrent_runs = 1";

async fn after_a_crash_a_parent_finds_the_child_that_it_started(db: Db) {
    let writer = "
model: scripted/researcher
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";
    let mut service = Setup::new()
        .config(QUICK_LEASE)
        .agent("parent", PARENT)
        .scenario("parent", ASKS)
        .agent("researcher", writer)
        .scenario(
            "researcher",
            "steps:\n  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: \"once\\n\"}}]\n  \
             - {delay_ms: 600000, text: written}\n",
        )
        .start(db)
        .await;
    let parent = uuid::Uuid::now_v7().to_string();
    let request = service.request(Method::POST, "/v1/agents/parent/invoke-iterative");
    let request = request.json(&json!({"inputs": {}, "run_id": parent}));
    tokio::spawn(async move { request.send().await });
    let path = format!("/v1/runs?parent_run_id={parent}");
    let listed = service.until(&path, |runs| runs["data"][0]["tool_calls_made"] == 1).await;
    let child = listed["data"][0]["run_id"].as_str().unwrap().to_owned();
    service.kill().await;
    let scenario = std::fs::read_to_string(service.dir.path().join("scenarios/researcher.yaml"));
    let at_once = scenario.unwrap().replace("delay_ms: 600000, ", "");
    service.write("scenarios/researcher.yaml", &at_once);
    service.restart().await;
    let run = until_ended(&service, &parent).await;
    assert_eq!(run["output"], json!({"result": "told: written"}), "{run:#}");
    let children = children(&service, &parent).await;
    assert_eq!(
        (children.len(), id(&children[0])),
        (1, child.as_str()),
        "the parent found its child again"
    );
    let log =
        std::fs::read_to_string(service.dir.path().join("workspace/default/log.txt")).unwrap();
    assert_eq!(log, "once\n");
    let resumed = events(&service, &child)
        .await
        .iter()
        .filter(|event| event["type"] == "run.resumed")
        .count();
    assert_eq!(resumed, 1, "the child went on too");
}

async fn after_a_crash_a_handoff_has_begun_once(db: Db) {
    let mut service = Setup::new()
        .config(QUICK_LEASE)
        .agent("parent", &PARENT.replace("agent:researcher", "transfer_to_researcher"))
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: transfer_to_researcher, arguments: {}}]}, {text: done}]",
        )
        .agent("researcher", "model: scripted/researcher\nenable_double_confirmation: false\n")
        .scenario("researcher", "steps: [{delay_ms: 600000, text: found}]")
        .start(db)
        .await;
    let parent = service.enqueue("parent").await;
    let parent = parent.strip_prefix("/v1/runs/").unwrap();
    let begun =
        |events: &[Value]| events.iter().filter(|event| event["type"] == "handoff.started").count();
    let path = format!("/v1/runs/{parent}/events");
    service.until(&path, |page| begun(page["data"].as_array().unwrap()) == 1).await;
    let path = format!("/v1/runs?parent_run_id={parent}");
    service.until(&path, |runs| runs["data"][0]["status"] == "running").await;
    service.kill().await;
    service.write("scenarios/researcher.yaml", "steps: [{text: found}]");
    service.restart().await;
    assert_eq!(until_ended(&service, parent).await["status"], "completed");
    assert_eq!(begun(&events(&service, parent).await), 1);
    assert_eq!(children(&service, parent).await.len(), 1);
}

async fn a_run_goes_on_whose_child_crashed_too_often(db: Db) {
    let mock = MockModel::start().await;
    let config = "[runtime]\nlease = \"2s\"\nmax_crashes = 1";
    let setup = Setup::new().config(config).agent("parent", PARENT);
    let (mut service, parent, child) = with_a_hanging_child(&mock, setup, db).await;
    service.kill().await;
    service.restart().await;
    let child = until_ended(&service, &child).await;
    assert_eq!(
        (&child["status"], &child["error"]["code"]),
        (&json!("failed"), &json!("INTERRUPTED")),
        "{child:#}"
    );
    let ended = until_ended(&service, &parent).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    let told = service.get(&format!("/v1/runs/{parent}/messages")).await.body.to_string();
    assert!(told.contains("INTERRUPTED"), "{told}");
}

/// The same from outside: after a parent was cancelled no descendant is under way, on any
/// replica.
#[tokio::test]
async fn a_cancel_reaches_children_on_other_replicas() {
    let mock = MockModel::start().await;
    let (service, parent, child) =
        with_a_hanging_child(&mock, Setup::new().agent("parent", PARENT), Db::Postgres).await;
    let other = Setup::new().start_on(service.database_url.clone()).await;
    assert_eq!(
        answer(other.request(Method::POST, &format!("/v1/runs/{parent}/cancel")).json(&json!({})))
            .await
            .status,
        202
    );
    assert_eq!(until_ended(&other, &child).await["status"], "cancelled");
    assert_eq!(until_ended(&other, &parent).await["status"], "cancelled");
    mock.wait_for_abort().await;
}

/// The replica has not noticed yet that another one has taken both over.
#[tokio::test]
async fn a_call_that_is_given_up_leaves_the_child_to_another_replica_that_drives_the_run() {
    let mock = MockModel::start().await;
    let parent = format!("{PARENT}limits: {{tool_call_timeout_seconds: 30}}\n");
    let setup = Setup::new().agent("parent", &parent);
    let (service, parent, child) = with_a_hanging_child(&mock, setup, Db::Postgres).await;
    let other = "INSERT INTO replicas (id, lease, started_at, heartbeat_at) \
        VALUES ('other', 3600000000, clock_timestamp(), clock_timestamp())";
    let took = format!("id IN ('{parent}', '{child}')");
    let took = format!("UPDATE runs SET owner = 'other', epoch = epoch + 1 WHERE {took}");
    change(&service, &format!("{other}; {took}")).await;
    service.until_logged("another replica owns it").await; // the result of the call is refused
    tokio::time::sleep(std::time::Duration::from_secs(1)).await; // or the request is on its way
    let mut database = PgConnection::connect(&service.database_url).await.unwrap();
    let asked = "SELECT count(*) FROM runs WHERE cancel_requested_at IS NOT NULL";
    let asked = sqlx::query_scalar::<_, i64>(asked).fetch_one(&mut database).await.unwrap();
    assert_eq!(asked, 0, "it goes on there");
}

/// Its replica has died, and no other one has taken it over yet.
#[tokio::test]
async fn a_parent_that_is_cancelled_after_a_crash_names_its_child() {
    let mock = MockModel::start().await;
    let setup = || Setup::new().config("[runtime]\nlease = \"5s\"").agent("parent", PARENT);
    let (mut service, parent, child) = with_a_hanging_child(&mock, setup(), Db::Postgres).await;
    let other = setup()
        .config(&mock_models(&mock))
        .agent("researcher", &RESEARCHER.replace("scripted/researcher", "mock/any"))
        .start_on(service.database_url.clone())
        .await;
    service.kill().await;
    let cancel = other.request(Method::POST, &format!("/v1/runs/{parent}/cancel"));
    assert_eq!(answer(cancel.json(&json!({}))).await.status, 202);
    assert_eq!(until_ended(&other, &parent).await["status"], "cancelled");
    let calls = other.get(&format!("/v1/runs/{parent}/tool-calls")).await.body;
    assert_eq!(calls["data"][0]["child_run_id"], json!(child), "{calls:#}");
}

async fn rules_of_a_parent_hold_for_its_children(db: Db) {
    let writes = r#"steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: "{{ inputs.task }}", content: x}}]}, {text: "{{ results[0] }}"}]"#;
    let files = format!(
        "{RESEARCHER}tools: [file_ops]\ngovernance: {{autonomy: full, paths: {{write: ['./**']}}}}\n"
    );
    let parent = |rules: &str| format!("{PARENT}governance: {{autonomy: full, {rules}}}\n");
    let service = Setup::new()
        .agent("researcher", &files)
        .scenario("researcher", writes)
        .scenario("parent", &ASKS.replace("weigh {{ inputs.what | default('it') }}", "a.txt"))
        .agent("free", &parent("tool_policies: {'agent:*': allow}"))
        .agent("strict", &parent("tool_policies: {file_ops: deny}"))
        .agent("guarded", &parent("paths: {deny: ['a.*']}"))
        .start(db)
        .await;
    for (agent, told) in
        [("free", "Wrote 1 bytes"), ("strict", "tool_policy rule"), ("guarded", "path rule")]
    {
        let run = service.run(agent, &json!({})).await;
        let output = run["output"]["result"].as_str().unwrap();
        assert!(output.contains(told), "{agent}: {output}");
    }
}

/// With `mode: observe` a child of `autonomy: read-only` writes all the same.
async fn children_that_only_would_be_read_only_work_one_after_the_other(db: Db) {
    let governance = |autonomy: &str| {
        format!("governance: {{autonomy: {autonomy}, mode: observe, paths: {{write: ['**']}}}}\n")
    };
    let writer = format!(
        "model: scripted/writer\ntools: [file_ops]\nenable_double_confirmation: false\n{}",
        governance("read-only")
    );
    let boss = format!(
        "model: scripted/boss\ntools: ['agent:writer']\nparallel_tool_calls: true\nenable_double_confirmation: false\n{}",
        governance("full")
    );
    let calls: Vec<_> =
        (0..3).map(|n| json!({"tool": "agent:writer", "arguments": {"n": n}})).collect();
    let service = Setup::new()
        .agent("writer", &writer)
        .agent("boss", &boss)
        .scenario("writer", "steps: [{delay_ms: 150, tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]}, {text: done}]")
        .scenario("boss", &json!({"steps": [{"tool_calls": calls}, {"text": "done"}]}).to_string())
        .start(db)
        .await;
    let run = service.run("boss", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let mut children = children(&service, id(&run)).await;
    children.sort_by_key(|child| child["started_at"].as_str().unwrap().to_owned());
    assert_eq!(children.len(), 3);
    for pair in children.windows(2) {
        let time = |of: &Value, name: &str| {
            of[name].as_str().unwrap().parse::<chrono::DateTime<chrono::Utc>>().unwrap()
        };
        assert!(time(&pair[0], "finished_at") <= time(&pair[1], "started_at"), "{pair:#?}");
    }
}
