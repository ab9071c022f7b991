//! Ended runs are kept as long as the operator says, and then gone everywhere.

use std::time::{Duration, Instant};

use chrono::Utc;
use serde_json::{Value, json};
use toolloop::store::{self, Closed, Closing};

use crate::audit::{close, execute};
use crate::service::{Db, Service, Setup, Signal, on_both_stores};

on_both_stores! {
    ended_runs_are_deleted_and_others_are_not,
    audit_records_are_deleted_by_their_own_retention_only,
    small_stretches_are_deleted_in_one_round,
    the_usage_of_a_tree_is_kept_as_long_as_its_root,
    a_run_is_kept_for_as_long_as_its_key_is,
}

const READER: &str = "
model: scripted/reader
instructions: Read.
tools: [file_ops]
enable_double_confirmation: false
";

const READING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - text: "{{ results[0] }}"
"#;

fn setup() -> Setup {
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READING)
        .agent("sleeper", "model: scripted/sleeper\ninstructions: Sleep.\n")
        .scenario("sleeper", "steps: [{delay_ms: 120000, text: late}]")
        .file("notes.txt", "seventeen\n")
}

fn is_empty(list: &Value) -> bool {
    list["data"].as_array().is_some_and(Vec::is_empty)
}

async fn read_once(service: &Service) -> String {
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    format!("/v1/runs/{}", run["run_id"].as_str().unwrap())
}

async fn ended_runs_are_deleted_and_others_are_not(db: Db) {
    let service = setup().config("[runtime]\nretention = \"1s\"").start(db).await;
    let sleeping = service
        .request(reqwest::Method::POST, "/v1/agents/sleeper/invoke-iterative")
        .header("prefer", "respond-async")
        .json(&json!({}));
    let sleeping =
        crate::service::answer(sleeping).await.body["run_id"].as_str().unwrap().to_owned();
    for _ in 0..2 {
        let run = read_once(&service).await;
        service.until(&run, |answer| answer["code"] == "NOT_FOUND").await;
        for part in ["events", "tool-calls", "iterations", "messages"] {
            assert_eq!(service.get(&format!("{run}/{part}")).await.status, 404, "{part}");
        }
    }
    let audit = service.get("/v1/audit?action=tool_call").await.body;
    assert_eq!(audit["data"].as_array().unwrap().len(), 2, "{audit:#}");
    let deleted = service.get("/v1/audit?action=runs.deleted").await.body;
    assert_eq!(deleted["data"][0]["subject"], "service", "{deleted:#}");
    let usage = service.get("/v1/stats/usage?agent=reader").await.body;
    assert_eq!(usage["data"][0]["runs"], 2, "{usage:#}");

    let listed = service.get("/v1/runs").await.body;
    let listed: Vec<&Value> =
        listed["data"].as_array().unwrap().iter().map(|run| &run["run_id"]).collect();
    assert_eq!(listed, [&json!(sleeping)]);
    let sleeping = format!("/v1/runs/{sleeping}");
    assert_eq!(service.get(&sleeping).await.body["status"], "running");
    assert_eq!(service.post(&format!("{sleeping}/cancel"), &json!({})).await.status, 202);
    service.until("/v1/runs", is_empty).await;
}

/// Ends of runs that nothing keeps are waited for, so that the others would be gone too.
async fn until_others_are_gone(service: &Service) {
    let other = read_once(service).await;
    service.until(&other, |answer| answer["code"] == "NOT_FOUND").await;
}

async fn the_usage_of_a_tree_is_kept_as_long_as_its_root(db: Db) {
    let parent = "model: scripted/parent\ninstructions: Delegate.\ntools: ['agent:middle', file_ops]\n\
         enable_double_confirmation: false\ngovernance: {tool_policies: {file_ops: ask}}\n";
    let middle = "model: scripted/middle\ninstructions: Delegate.\ntools: ['agent:leaf']\n\
         enable_double_confirmation: false\n";
    let delegates = |agent: &str, then: &str| {
        format!(
            "steps:\n  - tool_calls: [{{tool: 'agent:{agent}', arguments: {{}}}}]\n{then}  - {{text: done}}\n"
        )
    };
    let lists = "  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]\n";
    let service = setup()
        .agent("parent", parent)
        .scenario("parent", &delegates("middle", lists))
        .agent("middle", middle)
        .scenario("middle", &delegates("leaf", ""))
        .agent("leaf", "model: scripted/leaf\ninstructions: Answer.\n")
        .scenario("leaf", "steps: [{text: answered}]")
        .config("[runtime]\nretention = \"1s\"")
        .start(db)
        .await;
    let path = service.enqueue("parent").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    until_others_are_gone(&service).await;
    let waiting = service.get(&path).await.body;
    assert_eq!(waiting["tree_usage"], parked["tree_usage"], "{waiting:#}");
    assert!(
        waiting["tree_usage"]["total_tokens"].as_i64() > waiting["usage"]["total_tokens"].as_i64()
    );
    let approve = async |path: &str, waiting: &Value| {
        let call = waiting["pending"][0]["call_id"].as_str().unwrap();
        service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    };
    approve(&path, &waiting).await;
    service.until("/v1/runs", is_empty).await;

    let kept = service
        .request(reqwest::Method::POST, "/v1/agents/parent/invoke-iterative")
        .header("idempotency-key", "k")
        .json(&json!({}));
    let parked = crate::service::answer(kept).await.body;
    let path = format!("/v1/runs/{}", parked["run_id"].as_str().unwrap());
    until_others_are_gone(&service).await;
    approve(&path, &parked).await;
    let done = service.until(&path, |run| run["status"] == "completed").await;
    until_others_are_gone(&service).await;
    let later = service.get(&path).await.body;
    assert_eq!(later["tree_usage"], done["tree_usage"], "{later:#}");
    assert_eq!(later["tree_usage"]["total_tokens"], later["budget"]["tree"]["total_tokens"]);
}

async fn a_run_is_kept_for_as_long_as_its_key_is(db: Db) {
    let service = setup().config("[runtime]\nretention = \"1s\"").start(db).await;
    let ask = || async {
        let request = service
            .request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative")
            .header("idempotency-key", "k")
            .json(&json!({}));
        crate::service::answer(request).await.body["run_id"].clone()
    };
    let first = ask().await;
    until_others_are_gone(&service).await;
    assert_eq!(ask().await, first);
}

async fn audit_records_are_deleted_by_their_own_retention_only(db: Db) {
    let mut service = setup().config("[audit]\nretention = \"1s\"").start(db).await;
    let run = read_once(&service).await;
    let audit = service.get("/v1/audit?action=tool_call").await.body;
    assert!(!is_empty(&audit), "what is not closed stays: {audit:#}");
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    close(&service, None).await;
    service.restart().await;
    service.until("/v1/audit?action=tool_call", is_empty).await;
    let left = service.until("/v1/audit", |left| !is_empty(left)).await;
    let actions: Vec<&Value> =
        left["data"].as_array().unwrap().iter().map(|record| &record["action"]).collect();
    assert!(actions.iter().all(|action| *action == "audit.deleted"), "{left:#}");
    assert_eq!(service.get(&run).await.body["status"], "completed");
}

/// The stretches of a tenant with few calls have few records.
async fn small_stretches_are_deleted_in_one_round(db: Db) {
    let mut service = setup().config("[audit]\nretention = \"2h\"").start(db).await;
    for _ in 0..30 {
        read_once(&service).await;
    }
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    let is_sqlite = service.database_url.starts_with("sqlite");
    let three_hours = if is_sqlite { "10800000000" } else { "interval '3 hours'" };
    execute(&service, &format!("UPDATE audit_log SET at = at - {three_hours}")).await;
    let store = store::open(&service.database_url, 12, false).await.unwrap();
    let closing = Closing { records: 1, settled: Utc::now(), aged: Utc::now() };
    while let Closed::Stretch(_) =
        store.close_stretch("default", closing, None, &|_| None).await.unwrap()
    {}
    store.close().await;
    service.restart().await;
    // There is a round a minute, which ends while stretches are being closed. With one batch a round, it would take five.
    let end = Instant::now() + Duration::from_mins(4);
    while !is_empty(&service.get("/v1/audit?action=tool_call").await.body) {
        assert!(Instant::now() < end, "{}", service.log());
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
