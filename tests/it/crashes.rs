//! A run that uses everything, and a process that dies at every commit of it: whatever was cut off,
//! the run ends as if nothing had happened, nothing takes effect twice, and the budget adds up.
//!
//! Where the process dies is counted and never timed. What a call left open is found out as a
//! person would: by looking at what it should have changed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};
use uuid::Uuid;

use crate::service::{Db, Service, Setup};

const LEAD: &str = r#"
model: scripted/lead
tools: [file_ops, "agent:helper"]
skills: [care]
memory: {recall: {top_k: 3}}
inputs: {type: object, required: [file], properties: {file: {type: string}}}
output:
  schema: {type: object, required: [total], properties: {total: {type: integer}}}
  rules: [{rule: "output.total == 2", message: "Count again."}]
  reflection: {template: "You counted {{ output.total }}."}
governance:
  autonomy: full
  paths: {write: ['./**']}
  tool_policies: {"agent:helper": ask}
  budget: {max_total_tokens: 1000000, max_tool_calls: 20, max_files_modified: 3, max_lines_changed: 4}
"#;

const LEADING: &str = r#"
steps:
  - tool_calls: [{tool: use_skill, arguments: {name: care}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: "{{ inputs.file }}", content: "one\n"}}]
  - tool_calls: [{tool: "agent:helper", arguments: {file: "{{ inputs.file }}"}}, {tool: lookup, arguments: {}}]
  - tool_calls: [{tool: output, arguments: {total: 1}}, {tool: submit, arguments: {}}]
  - tool_calls: [{tool: output, arguments: {total: 2}}]
  - tool_calls: [{tool: submit, arguments: {}}]
"#;

const HELPER: &str = "
model: scripted/helper
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";

const HELPING: &str = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: append, path: "{{ inputs.file }}", content: "two\n"}}
      - {tool: file_ops, arguments: {operation: write, path: "{{ inputs.file }}.copy", content: "a\ncopy\n"}}
  - text: helped
"#;

#[tokio::test]
async fn a_process_may_die_after_every_commit() {
    die_at_every("after_commit", Db::Sqlite, 1).await;
}

#[tokio::test]
async fn a_process_may_die_before_any_commit() {
    die_at_every("before_commit", Db::Sqlite, 3).await;
}

#[tokio::test]
async fn a_replica_may_die_after_any_commit() {
    die_at_every("after_commit", Db::Postgres, 6).await;
}

async fn die_at_every(point: &str, db: Db, step: usize) {
    let mut service = Setup::new()
        .agent("lead", LEAD)
        .scenario("lead", LEADING)
        .agent("helper", HELPER)
        .scenario("helper", HELPING)
        .config("[runtime]\nlease = \"2s\"")
        .skill("care", "", "Count twice.")
        .start(db)
        .await;
    let mut deaths = 0;
    for nth in (1..500).step_by(step) {
        service.kill().await;
        service.restart_to_crash(&format!("{point}:{nth}")).await;
        let died = one_run(&mut service, nth).await;
        deaths += usize::from(died);
        if !died {
            break;
        }
    }
    assert!(deaths * step >= 10, "only {deaths} deaths");
    until_balanced(&service, Spent::Equal).await;
}

/// How what a tree has spent compares with the sums of its runs.
#[derive(Clone, Copy)]
pub(crate) enum Spent {
    Equal,
    /// An answer of a model is paid for although its process died before it was stored.
    AtLeast,
}

/// Waits until nothing is reserved and all sums add up. A run is settled right after its terminal
/// event, or by the sweep where the process died.
pub(crate) async fn until_balanced(service: &Service, spent: Spent) {
    let patience = Instant::now() + Duration::from_mins(2);
    loop {
        let wrong = unbalanced(service, spent).await;
        if wrong.is_empty() {
            return;
        }
        assert!(Instant::now() < patience, "holds or budgets that do not add up: {wrong:#?}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Whether the process died on the way.
async fn one_run(service: &mut Service, nth: usize) -> bool {
    let (id, file) =
        (Uuid::from_u128(0x7000 << 64 | nth as u128).to_string(), format!("ledger-{nth}.txt"));
    let body = json!({
        "run_id": id, "inputs": {"file": file}, "session_id": format!("s-{nth}"),
        "client_tools": [{"name": "lookup", "description": "Looks up.", "input_schema": {"type": "object"}}],
    });
    let mut died = false;
    let mut accepted = false;
    let run = loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        if service.is_dead() {
            died = true;
            service.restart().await;
        }
        if !accepted {
            let invoke = service
                .request(reqwest::Method::POST, "/v1/agents/lead/invoke-iterative")
                .json(&body);
            let sent = invoke
                .header("Prefer", "respond-async")
                .header("Idempotency-Key", &id)
                .send()
                .await;
            accepted = sent.is_ok_and(|answer| answer.status().is_success());
            continue;
        }
        let Some(run) = asked(service, &format!("/v1/runs/{id}")).await else { continue };
        if ["completed", "failed", "cancelled"]
            .contains(&run["status"].as_str().unwrap_or_default())
        {
            break run;
        }
        for pending in run["pending"].as_array().into_iter().flatten() {
            resolve(service, &id, pending, &file).await;
        }
        if let Some(children) = asked(service, &format!("/v1/runs?parent_run_id={id}")).await {
            for child in children["data"]
                .as_array()
                .into_iter()
                .flatten()
                .filter(|c| c["status"] == "needs_review")
            {
                let id = child["run_id"].as_str().unwrap();
                let Some(child) = asked(service, &format!("/v1/runs/{id}")).await else { continue };
                for pending in child["pending"].as_array().into_iter().flatten() {
                    resolve(service, id, pending, &file).await;
                }
            }
        }
    };
    check(service, &run, &file, nth).await;
    died
}

/// An answer, if there is one.
async fn asked(service: &Service, path: &str) -> Option<Value> {
    let answer = service.request(reqwest::Method::GET, path).send().await.ok()?;
    if answer.status().is_success() { answer.json().await.ok() } else { None }
}

/// Does what a person would do; where the process dies meanwhile, it is done again.
async fn resolve(service: &Service, run: &str, pending: &Value, file: &str) {
    let call = pending["call_id"].as_str().unwrap();
    let (what, body) = match pending["kind"].as_str().unwrap() {
        "approval" => ("approve", json!({"reason": "fine"})),
        "client" => ("result", json!({"content": "looked up"})),
        _ => {
            let line = pending["arguments"]["content"].as_str().unwrap();
            let outcome =
                if written(service, file).contains(line) { "happened" } else { "did_not_happen" };
            ("resolve", json!({ "outcome": outcome }))
        }
    };
    let path = format!("/v1/runs/{run}/tool-calls/{call}/{what}");
    let _ = service.request(reqwest::Method::POST, &path).json(&body).send().await;
}

fn written(service: &Service, file: &str) -> String {
    std::fs::read_to_string(service.dir.path().join("workspace/default").join(file))
        .unwrap_or_default()
}

async fn check(service: &Service, run: &Value, file: &str, nth: usize) {
    let id = run["run_id"].as_str().unwrap();
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"total": 2})),
        "{nth}: {run:#}"
    );
    assert_eq!(written(service, file), "one\ntwo\n", "{nth}: every effect once");
    assert_eq!(
        (&run["attempts"], &run["tool_calls_made"]),
        (&json!(2), &json!(4)),
        "{nth}: {run:#}"
    );

    let mut events: Vec<Value> = Vec::new();
    loop {
        let after = events.len();
        let page = service.get(&format!("/v1/runs/{id}/events?after={after}&limit=200")).await.body;
        let page = page["data"].as_array().unwrap().clone();
        if page.is_empty() {
            break;
        }
        events.extend(page);
    }
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(
        numbers,
        (1..=events.len() as u64).collect::<Vec<_>>(),
        "{nth}: no number is missing or repeated"
    );
    let ends = ["run.completed", "run.failed", "run.cancelled"];
    let terminal =
        events.iter().filter(|event| ends.contains(&event["type"].as_str().unwrap())).count();
    assert_eq!(terminal, 1, "{nth}: exactly one terminal event");

    let iterations = service.get(&format!("/v1/runs/{id}/iterations")).await.body;
    let tokens = |row: &Value| row["usage"]["total_tokens"].as_u64().unwrap();
    let sum: u64 = iterations["data"].as_array().unwrap().iter().map(tokens).sum();
    assert_eq!(run["tokens_used"], sum, "{nth}: the run's tokens are the sum of its iterations");
    let children = service.get(&format!("/v1/runs?parent_run_id={id}")).await.body;
    let children = children["data"].as_array().unwrap();
    assert_eq!(children.len(), 1, "{nth}: the child was started once");
    assert_eq!(children[0]["status"], "completed", "{nth}");
    let run = service.get(&format!("/v1/runs/{id}")).await.body;
    let tree = &run["budget"]["tree"];
    assert_eq!(
        (&tree["files_modified"], &tree["lines_changed"]),
        (&json!(3), &json!(4)),
        "{nth}: every change is counted once, so that the caps suffice: {run:#}"
    );
}

/// Holds and budgets that still reserve something, or whose sums differ from those of their runs.
async fn unbalanced(service: &Service, spent: Spent) -> Vec<String> {
    const HELD: &str = "SELECT concat_ws(' ', 'hold', h.ended, r.status, h.reserved_tokens, h.reserved_tool_calls) \
        FROM budget_holds h JOIN runs r ON r.id = h.run_id WHERE ended = 0 OR reserved_tokens <> 0 \
        OR reserved_tool_calls <> 0 OR reserved_files <> 0 OR reserved_lines <> 0";
    const SUMS: &str = "SELECT concat_ws(' ', 'budget', reserved_tokens, reserved_iterations, spent_tokens, tokens) \
        FROM (SELECT b.*, (SELECT sum(r.input_tokens + r.output_tokens) FROM runs r \
            WHERE r.id = b.root_run_id OR r.parent_run_id = b.root_run_id) AS tokens FROM budgets b) AS summed \
        WHERE reserved_tokens <> 0 OR reserved_iterations <> 0 OR reserved_files <> 0 OR reserved_lines <> 0 \
        OR spent_tokens < tokens OR ($1 AND spent_tokens > tokens)";
    let exactly = matches!(spent, Spent::Equal);
    if service.database_url.starts_with("postgres") {
        let mut database = PgConnection::connect(&service.database_url).await.unwrap();
        let mut wrong: Vec<String> =
            sqlx::query_scalar(HELD).fetch_all(&mut database).await.unwrap();
        let sums = sqlx::query_scalar(SUMS).bind(exactly).fetch_all(&mut database);
        wrong.extend(sums.await.unwrap());
        return wrong;
    }
    let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
    let mut wrong: Vec<String> = sqlx::query_scalar(HELD).fetch_all(&mut database).await.unwrap();
    let sums = sqlx::query_scalar(SUMS).bind(exactly).fetch_all(&mut database);
    wrong.extend(sums.await.unwrap());
    wrong
}
