//! Where a run ends and how its calls are executed, as callers see it: last answers, runs that make
//! no progress, flags, counted files and lines, calls together, caches, retries.

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_run_at_a_limit_gives_a_partial_answer,
    integral_numbers_are_integers,
    a_run_that_makes_no_progress_ends,
    the_first_failure_can_end_a_run,
    after_a_block_the_rest_can_be_left_out,
    files_and_lines_are_counted_and_bounded,
    reads_are_executed_together_and_answered_in_order,
    the_same_read_is_made_once,
    a_budget_of_tokens_pays_for_the_input_too,
    a_request_narrows_and_never_widens,
}

const WORKER: &str = "
model: scripted/worker
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";

fn worker(settings: &str, steps: &str) -> Setup {
    Setup::new()
        .agent("worker", &format!("{WORKER}\n{settings}"))
        .scenario("worker", &format!("steps:\n{steps}"))
        .file("notes.txt", "seventeen\n")
        .file("more.txt", "eighteen\n")
}

const READ: &str =
    "  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]\n";

async fn calls_of(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn events_of(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn a_run_at_a_limit_gives_a_partial_answer(db: Db) {
    let steps = format!("{READ}  - text: as far as I got\n");
    let strict = "
model: scripted/worker
tools: [file_ops]
on_limit: answer
output: {schema: {type: object}, rules: [{rule: 'size(output) > 0', message: Not empty.}]}
";
    let service = worker("on_limit: answer", &steps).agent("strict", strict).start(db).await;
    let run = service.run("worker", &json!({"max_iterations": 1})).await;
    assert_eq!(
        (&run["status"], &run["termination_reason"]),
        (&json!("completed"), &json!("max_iterations")),
        "{run:#}"
    );
    assert_eq!((&run["partial"], &run["error"]), (&json!(true), &Value::Null));
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "as far as I got"}), &json!(2))
    );

    assert_eq!(run["warnings"], json!([]), "a text is checked against nothing");

    let strict = service.run("strict", &json!({"max_iterations": 1})).await;
    assert_eq!((&strict["status"], &strict["partial"]), (&json!("completed"), &json!(true)));
    let warning =
        "A limit forced this output; it was not checked against the output schema, the rules.";
    assert_eq!(strict["warnings"], json!([warning]), "{strict:#}");

    let failed = service.run("worker", &json!({"max_iterations": 1, "on_limit": "fail"})).await;
    assert_eq!(
        (&failed["status"], &failed["error"]["code"]),
        (&json!("failed"), &json!("MAX_ITERATIONS"))
    );
    let calls = service.run("worker", &json!({"budget": {"max_tool_calls": 0}})).await;
    assert_eq!(
        (&calls["termination_reason"], &calls["partial"]),
        (&json!("budget_exceeded"), &json!(true))
    );
    let stored =
        service.get(&format!("/v1/runs/{}/messages", calls["run_id"].as_str().unwrap())).await.body;
    let said = stored["data"].to_string();
    assert!(said.contains("not executed, the budget for tool calls is used up"), "{said}");
}

async fn integral_numbers_are_integers(db: Db) {
    let steps = "
  - tool_calls:
      - {tool: file_ops, arguments: {operation: read, path: notes.txt, offset: 1.0, limit: 2.0}}
      - {tool: file_ops, arguments: {operation: read, path: notes.txt, limit: 1.0e30}}
  - text: '{{ results[0] }}'
";
    let service = worker("", steps).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let calls = calls_of(&service, &run).await;
    assert_eq!(
        (&calls[0]["state"], &calls[0]["decision"]),
        (&json!("succeeded"), &json!("allowed")),
        "{calls:#?}"
    );
    // What no whole number can be is a mistake in the arguments, and nothing that a policy blocks.
    assert_eq!(
        (&calls[1]["state"], &calls[1]["decision"]),
        (&json!("failed"), &Value::Null),
        "{calls:#?}"
    );
    let blocked = &service.get("/v1/stats/tools").await.body["data"][0]["blocked"];
    assert_eq!(*blocked, 0);
}

async fn a_run_that_makes_no_progress_ends(db: Db) {
    let service = worker("", READ).start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(
        (&run["status"], &run["error"]["code"]),
        (&json!("failed"), &json!("STUCK")),
        "{run:#}"
    );
    assert_eq!(run["error"]["context"], json!({"tool": "file_ops", "repetitions": 5}));
    let results: Vec<Value> =
        calls_of(&service, &run).await.into_iter().map(|call| call["result"].clone()).collect();
    let noted: Vec<bool> =
        results.iter().map(|result| result.as_str().unwrap().contains("same result")).collect();
    assert_eq!(noted, [false, false, true, true, true], "{results:#?}");
}

async fn the_first_failure_can_end_a_run(db: Db) {
    let steps = "  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: missing.txt}}, {tool: file_ops, arguments: {operation: read, path: notes.txt}}]\n  - text: done\n";
    let service = worker("", steps).start(db).await;
    assert_eq!(service.run("worker", &json!({})).await["status"], "completed");
    let run = service.run("worker", &json!({"throw_on_tool_failure": true})).await;
    assert_eq!(
        (&run["termination_reason"], &run["error"]["code"]),
        (&json!("tool_failure"), &json!("TOOL_FAILURE"))
    );
    assert_eq!(
        (&run["error"]["context"]["tool"], &run["tool_calls_made"]),
        (&json!("file_ops"), &json!(1)),
        "{run:#}"
    );
}

async fn after_a_block_the_rest_can_be_left_out(db: Db) {
    let steps = "  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}, {tool: file_ops, arguments: {operation: read, path: notes.txt}}]\n  - text: done\n";
    let service =
        worker("", steps).agent("careful", &WORKER.replace("full", "read-only")).start(db).await;
    for together in [false, true] {
        let body = json!({"stop_on_tool_block": true, "parallel_tool_calls": together});
        let run = service.run("careful", &body).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        let calls = calls_of(&service, &run).await;
        assert_eq!(
            (&calls[0]["state"], &calls[1]["state"]),
            (&json!("denied"), &json!("cancelled")),
            "{together}: {calls:#?}"
        );
        assert!(calls[1]["result"].as_str().unwrap().contains("not executed"), "{calls:#?}");
    }
    let run = service.run("careful", &json!({})).await;
    assert_eq!(calls_of(&service, &run).await[1]["state"], "succeeded");
}

async fn files_and_lines_are_counted_and_bounded(db: Db) {
    let steps = r#"
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: "1\n2\n3\n"}}, {tool: file_ops, arguments: {operation: read, path: a.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: a.txt, content: "4\n"}}, {tool: file_ops, arguments: {operation: write, path: b.txt, content: "1\n"}}]
  - text: done
"#;
    let service = worker("", steps).start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let budget =
        &service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body["budget"];
    let used = &budget["used"];
    assert_eq!(
        (&used["files_modified"], &used["lines_changed"]),
        (&json!(2), &json!(5)),
        "{budget:#}"
    );
    assert_eq!((&used["files_written"], &used["files_read"]), (&json!(3), &json!(1)), "{budget:#}");
    assert_eq!(
        (&budget["limits"]["max_files_modified"], &budget["limits"]["max_lines_changed"]),
        (&json!(50), &json!(5000))
    );

    for (limit, value, calls) in
        [("max_files_modified", 1, 3), ("max_lines_changed", 4, 3), ("max_files_modified", 0, 0)]
    {
        let run = service.run("worker", &json!({"budget": {limit: value}})).await;
        assert_eq!(
            (&run["error"]["code"], &run["error"]["context"]["limit"]),
            (&json!("BUDGET_EXCEEDED"), &json!(limit))
        );
        assert_eq!(run["tool_calls_made"], calls, "{limit} {value}: {run:#}");
    }
}

async fn reads_are_executed_together_and_answered_in_order(db: Db) {
    let steps = r#"
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}, {tool: file_ops, arguments: {operation: read, path: missing.txt}}, {tool: file_ops, arguments: {operation: read, path: more.txt}}, {tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}, {tool: file_ops, arguments: {operation: read, path: a.txt}}]
  - text: "{{ results | join('|') }}"
"#;
    let service = worker("parallel_tool_calls: true", steps).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let output = run["output"]["result"].as_str().unwrap();
    let places: Vec<usize> =
        ["seventeen", "does not exist", "eighteen"].map(|text| output.find(text).unwrap()).into();
    assert!(places.is_sorted(), "{output}");
    let order = |events: &[Value]| {
        let kinds = events
            .iter()
            .map(|event| event["type"].as_str().unwrap())
            .filter(|kind| kind.starts_with("tool_call"));
        kinds.map(|kind| if kind == "tool_call.started" { 's' } else { 'c' }).collect::<String>()
    };
    assert_eq!(
        order(&events_of(&service, &run).await),
        "sssccc".to_owned() + "scsc",
        "a write goes alone"
    );
    let one_by_one = service.run("worker", &json!({"parallel_tool_calls": false})).await;
    assert_eq!(order(&events_of(&service, &one_by_one).await), "scscscscsc");
}

async fn the_same_read_is_made_once(db: Db) {
    let steps = format!(
        "{READ}{READ}  - tool_calls: [{{tool: file_ops, arguments: {{operation: append, path: notes.txt, content: more}}}}]\n{READ}  - text: done\n"
    );
    let service = worker("tool_options: {file_ops: {cache: attempt}}", &steps).start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let calls = calls_of(&service, &run).await;
    let cached: Vec<bool> = calls.iter().map(|call| call["cached"].as_bool().unwrap()).collect();
    assert_eq!(cached, [false, true, false, false], "{calls:#?}");
    assert!(
        calls[3]["result"].as_str().unwrap().contains("more"),
        "what was changed is read again"
    );
    let used = &service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body["budget"]
        ["used"];
    assert_eq!((&used["files_read"], &used["tool_calls"]), (&json!(2), &json!(4)));
}

async fn a_budget_of_tokens_pays_for_the_input_too(db: Db) {
    let service = worker("", "  - text: done\n").start(db).await;
    let long = "word ".repeat(8000);
    let run = service
        .run("worker", &json!({"inputs": {"task": long}, "budget": {"max_total_tokens": 5000}}))
        .await;
    assert_eq!(
        (&run["error"]["code"], &run["tokens_used"]),
        (&json!("BUDGET_EXCEEDED"), &json!(0)),
        "{run:#}"
    );
    let enough = service
        .run("worker", &json!({"inputs": {"task": "x"}, "budget": {"max_total_tokens": 5000}}))
        .await;
    assert_eq!(enough["status"], "completed", "{enough:#}");
}

async fn a_request_narrows_and_never_widens(db: Db) {
    let settings = "throw_on_tool_failure: true\nlimits: {max_iterations: 2}";
    let steps = "  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: missing.txt}}]\n  - text: done\n";
    let service = worker(settings, steps).start(db).await;
    let run =
        service.run("worker", &json!({"throw_on_tool_failure": false, "max_iterations": 20})).await;
    assert_eq!(run["error"]["code"], "TOOL_FAILURE", "{run:#}");
    for (field, value) in [
        ("on_limit", json!("never")),
        ("on_session_busy", json!("wait")),
        ("budget", json!({"max_files_modified": -1})),
        ("throw_on_tool_failure", json!("yes")),
    ] {
        let refused =
            service.post("/v1/agents/worker/invoke-iterative", &json!({field: value})).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (422, &json!("INVALID_OVERRIDE")),
            "{field}"
        );
        let pointer = refused.body["errors"][0]["pointer"].as_str().unwrap();
        assert!(pointer.starts_with(&format!("/{field}")), "{:#}", refused.body);
    }
}
