//! A change of settings that is rolled out replica by replica: runs that need what one replica does not
//! have yet, or no longer, wait for one that has it.
//!
//! With other features: children are left with what their own definition needs, and parents for the agents that
//! they name; a parked run is left after its answer like one that never began; a cancel ends a run that
//! is left; a session's next run waits behind it as behind any queued run; budgets, streams and dry runs
//! see a queued run.

use reqwest::Method;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::approvals::text;
use crate::claims::{ASKER, ASKING};
use crate::postgres_cluster;
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_run_ends_whose_tool_the_only_replica_has_no_longer,
}

const LACKING: &str = "such runs are left to other replicas";
const NO_TOOL: &str = "The run cannot be resumed: tools[0]: there is no tool named";

fn before() -> Setup {
    let agent = "model: scripted/MODEL\nenable_double_confirmation: false\n";
    Setup::new()
        .agent("slow", &agent.replace("MODEL", "slow"))
        .scenario("slow", "steps: [{delay_ms: 600000, text: late}]")
        .scenario("quick", "steps: [{text: done}]")
        .scenario("asker", ASKING)
        .scenario("parent", "steps: [{tool_calls: [{tool: 'agent:leaf', arguments: {}}]}, {text: \"told: {{ results[0] }}\"}]")
        .config("[runtime]\nlease = \"5s\"")
}

/// With one place for runs.
fn after() -> Setup {
    let agent = "enable_double_confirmation: false\n";
    let fresh = "base_url: http://127.0.0.1:9/\ntools: [{name: once, description: x, method: GET, path: /}]";
    before()
        .config(
            "max_concurrent_runs = 1\n[models.second]\nkind = \"scripted\"\ndir = \"scenarios\"\n\
             [prices.\"scripted/quick\"]\ninput = 1.0\noutput = 1.0",
        )
        .tools("fresh", fresh)
        .agent("tooled", &format!("{agent}model: scripted/quick\ntools: ['http:fresh/once']\n"))
        .agent("asker", &ASKER.replace("[file_ops]", "['http:fresh/once', file_ops]"))
        .agent(
            "provided",
            &format!("{agent}model: second/quick\nfallback_models: [scripted/quick]\n"),
        )
        .agent("other", &format!("{agent}model: scripted/quick\nfallback_models: [second/quick]\n"))
        .agent(
            "priced",
            &format!("{agent}model: scripted/quick\ngovernance: {{budget: {{max_cost_usd: 1}}}}\n"),
        )
        .agent("parent", &format!("{agent}model: scripted/parent\ntools: ['agent:leaf']\n"))
        .agent("leaf", &format!("{agent}model: scripted/quick\ndescription: Answers.\n"))
}

async fn is(service: &Service, run: &str, status: &str) -> Value {
    service.until(run, |run| run["status"] == status).await
}

/// Until what this gives is cancelled, the only place of the replica is taken.
async fn busy(service: &Service) -> String {
    let run = Uuid::now_v7().to_string();
    let request = service.request(Method::POST, "/v1/agents/slow/invoke-iterative");
    tokio::spawn(request.json(&json!({"run_id": run})).send());
    let run = format!("/v1/runs/{run}");
    is(service, &run, "running").await;
    run
}

async fn cancel(service: &Service, run: &str) {
    assert_eq!(service.post(&format!("{run}/cancel"), &json!({})).await.status, 202);
    is(service, run, "cancelled").await;
}

async fn approve(service: &Service, run: &str) {
    let parked = service.get(run).await.body;
    let call = text(&parked["pending"][0], "call_id");
    let approved = service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await;
    assert_eq!(approved.status, 200, "{approved:?}");
}

#[tokio::test]
async fn a_run_waits_for_a_replica_that_has_what_it_needs() {
    let url = postgres_cluster::fresh_database().await;
    let new = after().start_on(url.clone()).await;
    let parked = new.enqueue("asker").await;
    is(&new, &parked, "awaiting_approval").await;
    let busy = busy(&new).await;
    let old = before().start_on(url).await;

    approve(&old, &parked).await;
    let mut left = vec![parked];
    for agent in ["tooled", "provided", "parent", "priced"].into_iter().cycle().take(8) {
        left.push(new.enqueue(agent).await);
    }
    for lack in [
        "no tool named \\\"http:fresh",
        "no provider \\\"second",
        "no agent named \\\"leaf",
        "quick has no price",
    ] {
        old.until_logged(lack).await;
    }
    let to_cancel = new.enqueue("tooled").await;
    cancel(&old, &to_cancel).await;
    for run in &left {
        let run = is(&new, run, "queued").await;
        assert_eq!(run["error"], Value::Null, "{run:#}");
    }
    // What lacks only a model that may take over, the other replica drives.
    let other = new.enqueue("other").await;
    is(&new, &other, "completed").await;

    cancel(&new, &busy).await;
    for run in &left {
        let ended = new.until(run, |run| run["finished_at"].is_string()).await;
        assert_eq!((&ended["status"], &ended["error"]), (&json!("completed"), &Value::Null));
        if ended["agent"] == "parent" {
            assert_eq!(ended["output"], json!({"result": "told: done"}), "{ended:#}");
        }
        if ended["agent"] == "provided" {
            assert_eq!(ended["model"], "second/quick", "{ended:#}");
        }
    }
    let log = old.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains(LACKING)).collect();
    assert_eq!(warnings.len(), 4, "each lack is logged once: {warnings:#?}");
}

#[tokio::test]
async fn a_run_that_no_living_replica_can_drive_ends() {
    let url = postgres_cluster::fresh_database().await;
    let mut new = after().start_on(url.clone()).await;
    busy(&new).await;
    let old = before().start_on(url).await;
    let tooled = new.enqueue("tooled").await;
    old.until_logged(LACKING).await;
    new.kill().await;
    let ended = old.until(&tooled, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["error"]["code"], "INTERRUPTED", "{ended:#}");
    assert!(text(&ended["error"], "message").starts_with(NO_TOOL), "{ended:#}");
}

async fn a_run_ends_whose_tool_the_only_replica_has_no_longer(db: Db) {
    let mut service = after().start(db).await;
    let run = service.enqueue("asker").await;
    is(&service, &run, "awaiting_approval").await;
    service.kill().await;
    std::fs::remove_file(service.dir.path().join("tools/fresh.yaml")).unwrap();
    service.restart().await;
    approve(&service, &run).await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["error"]["code"], "INTERRUPTED", "{ended:#}");
    assert!(text(&ended["error"], "message").starts_with(NO_TOOL), "{ended:#}");
}
