//! Which runs begin: how many a tenant and a key may have under way, and in which order those of the
//! queue go.
//!
//! | together with | here |
//! |---|---|
//! | children, parked runs | `children_and_parked_runs_need_no_place_of_their_own` |
//! | tenants, keys | `a_limit_holds_for_its_tenant_or_key_alone` |
//! | another replica | `a_limit_holds_for_all_replicas` |
//! | crash | a run that was begun goes on whatever the limits say: `claims`, with `claim_begun` |
//! | sessions | `a_run_that_is_to_begin_later_holds_up_no_other_of_its_session` |
//! | cancel, idempotency, dry run | `a_run_begins_when_it_may` |
//! | streaming | a stream is a synchronous request like any other |
//! | budgets | the time of a run counts from its start: `a_run_begins_when_it_may` |
//! | console, command line | fields of the form; the command line waits for its runs and has no queue |

use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use reqwest::Method;
use serde_json::{Value, json};

use crate::concurrent_runs::agent;
use crate::postgres_cluster;
use crate::service::{ADMIN_KEY, Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_limit_holds_for_its_tenant_or_key_alone,
    children_and_parked_runs_need_no_place_of_their_own,
    higher_priorities_go_first,
    a_run_begins_when_it_may,
    a_run_that_is_to_begin_later_holds_up_no_other_of_its_session,
}

fn setup(config: &str) -> Setup {
    Setup::new()
        .agent("slow", &agent("slow"))
        .scenario("slow", "steps: [{delay_ms: 600000, text: late}]")
        .agent("quick", &agent("quick"))
        .scenario("quick", "steps: [{text: done}]")
        .config(&format!("[runtime]\n{config}\n"))
}

async fn invoke(service: &Service, agent: &str) -> Answer {
    service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &json!({})).await
}

async fn enqueue(service: &Service, agent: &str, body: &Value) -> Answer {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    answer(service.request(Method::POST, &path).header("prefer", "respond-async").json(body)).await
}

fn path_of(run: &Answer) -> String {
    assert_eq!(run.status, 202, "{:#}", run.body);
    format!("/v1/runs/{}", run.body["run_id"].as_str().unwrap())
}

fn time(value: &Value) -> DateTime<Utc> {
    value.as_str().unwrap().parse().unwrap()
}

async fn key(service: &Service, tenant: &str) -> String {
    let key = json!({"name": "other", "tenant": tenant, "scopes": ["admin"]});
    service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned()
}

fn is_refused(answer: &Answer) {
    let said = (answer.status.as_u16(), &answer.body["code"]);
    assert_eq!(said, (429, &json!("TOO_MANY_RUNS")), "{:#}", answer.body);
    assert_eq!(answer.headers["retry-after"], "1");
}

async fn cancel(service: &Service, run: &str) {
    service.post(&format!("{run}/cancel"), &json!({})).await;
    service.until(run, |run| run["status"] == "cancelled").await;
}

/// As soon as a place is free again.
async fn completes(service: &Service, agent: &str) {
    let mut answered = invoke(service, agent).await;
    while answered.status == 429 {
        answered = invoke(service, agent).await; // the run before it may still wind down
    }
    assert_eq!((answered.status.as_u16(), &answered.body["status"]), (200, &json!("completed")));
}

async fn a_limit_holds_for_its_tenant_or_key_alone(db: Db) {
    for (limit, other_tenant) in [
        ("max_concurrent_runs_per_tenant = 2", "other"),
        ("max_concurrent_runs_per_key = 2", "default"),
    ] {
        let mut service = setup(limit).start(db).await;
        let mut slow = Vec::new();
        for _ in 0..4 {
            slow.push(service.enqueue("slow").await);
        }
        for run in &slow[..2] {
            service.until(run, |run| run["status"] == "running").await;
        }
        is_refused(&invoke(&service, "quick").await);
        let stream = service.post("/v1/agents/quick/stream", &json!({})).await;
        is_refused(&stream);
        let dry = service.post("/v1/agents/quick/dry-run", &json!({})).await;
        assert_eq!(dry.status, 200, "{:#}", dry.body);

        service.key = key(&service, other_tenant).await;
        completes(&service, "quick").await;
        let passes = service.enqueue("quick").await;
        service.until(&passes, |run| run["status"] == "completed").await;
        ADMIN_KEY.clone_into(&mut service.key);
        for run in &slow[2..] {
            assert_eq!(service.get(run).await.body["status"], "queued", "{limit}");
        }
        cancel(&service, &slow[0]).await;
        service.until(&slow[2], |run| run["status"] == "running").await;
        assert_eq!(service.get(&slow[3]).await.body["status"], "queued", "{limit}");
        for run in [&slow[1], &slow[3], &slow[2]] {
            cancel(&service, run).await;
        }
        completes(&service, "quick").await;
    }
}

#[tokio::test]
async fn a_limit_holds_for_all_replicas() {
    let database = postgres_cluster::fresh_database().await;
    let limit = "max_concurrent_runs_per_tenant = 1\nqueue_workers = 1";
    let one = setup(limit).start_on(database.clone()).await;
    let other = setup(limit).start_on(database).await;
    let runs = [one.enqueue("slow").await, other.enqueue("slow").await];
    let listed = one.until("/v1/runs?status=running", |runs| runs["data"] != json!([])).await;
    let holder = format!("/v1/runs/{}", listed["data"][0]["run_id"].as_str().unwrap());
    for service in [&one, &other] {
        is_refused(&invoke(service, "quick").await);
    }
    tokio::time::sleep(Duration::from_secs(2)).await; // both have looked at the queue
    let listed = one.get("/v1/runs?status=running").await.body;
    assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{listed:#}");
    let waits = runs.iter().find(|run| **run != holder).unwrap();
    cancel(&other, &holder).await;
    one.until(waits, |run| run["status"] == "running").await;
    cancel(&one, waits).await;
    completes(&other, "quick").await;
}

async fn children_and_parked_runs_need_no_place_of_their_own(db: Db) {
    let asks = r#"
steps:
  - tool_calls:
      - {tool: "agent:helper", arguments: {task: a}}
      - {tool: "agent:helper", arguments: {task: b}}
  - text: "{{ results | join(',') }}"
"#;
    let helper =
        "description: Helps.\ninputs: {type: object, properties: {task: {type: string}}}\n";
    let writer = "tools: [file_ops]\ngovernance: {autonomy: full, tool_policies: {file_ops: ask}, paths: {write: ['./**']}}\n";
    let service = setup("max_concurrent_runs_per_tenant = 1\nmax_concurrent_runs_per_key = 1")
        .agent("parent", &format!("{}tools: ['agent:helper']\nparallel_tool_calls: true\n", agent("parent")))
        .scenario("parent", asks)
        .agent("helper", &format!("{}{helper}", agent("helper")))
        .scenario("helper", "steps: [{delay_ms: 100, text: '{{ inputs.task }}'}]")
        .agent("writer", &format!("{}{writer}", agent("writer")))
        .scenario(
            "writer",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}]}, {text: written}]",
        )
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "a,b"}), "{run:#}");
    let mut parked = invoke(&service, "writer").await;
    while parked.status == 429 {
        parked = invoke(&service, "writer").await; // the run before it may still wind down
    }
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    completes(&service, "quick").await;
    let queued = service.enqueue("parent").await;
    service.until(&queued, |run| run["status"] == "completed").await;
    let slow = service.enqueue("slow").await;
    service.until(&slow, |run| run["status"] == "running").await;
    let run = format!("/v1/runs/{}", parked.body["run_id"].as_str().unwrap());
    let call = parked.body["pending"][0]["call_id"].as_str().unwrap();
    service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "what was begun goes on: {ended:#}");
    cancel(&service, &slow).await;
}

async fn higher_priorities_go_first(db: Db) {
    let service = setup("queue_workers = 1").start(db).await;
    let slow = service.enqueue("slow").await;
    service.until(&slow, |run| run["status"] == "running").await;
    let mut runs = Vec::new();
    for priority in [0, -100, 100, 0, 7] {
        let run = path_of(&enqueue(&service, "quick", &json!({"priority": priority})).await);
        let queued = service.get(&run).await.body;
        assert_eq!(queued["priority"], priority);
        assert_eq!(queued["available_at"], Value::Null, "its caller asked for none: {queued:#}");
        runs.push((run, priority));
    }
    cancel(&service, &slow).await;
    let mut begun = Vec::new();
    for (at, (run, priority)) in runs.iter().enumerate() {
        let run = service.until(run, |run| run["status"] == "completed").await;
        assert_eq!(run["available_at"], Value::Null, "{run:#}");
        begun.push((time(&run["started_at"]), at, *priority));
    }
    begun.sort();
    let order: Vec<(usize, i32)> =
        begun.into_iter().map(|(_, at, priority)| (at, priority)).collect();
    assert_eq!(order, [(2, 100), (4, 7), (0, 0), (3, 0), (1, -100)]);
}

async fn a_run_begins_when_it_may(db: Db) {
    let service = setup("").start(db).await;
    let at = Utc::now() + TimeDelta::seconds(9);
    let body = json!({"available_at": at, "priority": 9, "budget": {"max_duration_seconds": 8}});
    let accepted = enqueue(&service, "quick", &body).await;
    let run = path_of(&accepted);
    assert_eq!(accepted.body["status"], "queued");
    assert_eq!((time(&accepted.body["available_at"]) - at).num_milliseconds(), 0);
    let never = enqueue(&service, "quick", &json!({"available_at": at + TimeDelta::days(9)})).await;
    let never = path_of(&never);
    let at_once = json!({"available_at": at - TimeDelta::days(9)});
    let at_once = path_of(&enqueue(&service, "quick", &at_once).await);
    service.until(&at_once, |run| run["status"] == "completed").await;
    completes(&service, "quick").await;
    let still = service.get(&run).await.body;
    assert!(still["status"] == "queued" || Utc::now() >= at, "{still:#}");
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "its time counts from its start: {ended:#}");
    assert!(time(&ended["started_at"]) >= at, "{ended:#}");
    cancel(&service, &never).await;

    let key = |body: Value| {
        let path = "/v1/agents/quick/invoke-iterative";
        let request = service.request(Method::POST, path).header("prefer", "respond-async");
        answer(request.header("idempotency-key", "k").json(&body))
    };
    let later = at + TimeDelta::hours(1);
    let first = key(json!({"available_at": later})).await;
    let again = key(json!({"available_at": later})).await;
    assert_eq!((again.status.as_u16(), &again.body["run_id"]), (202, &first.body["run_id"]));
    assert_eq!(key(json!({"available_at": later, "priority": 1})).await.status, 422);

    let far = json!({"available_at": Utc::now() + TimeDelta::days(31)});
    for (field, body) in [
        ("available_at", far),
        ("available_at", json!({"available_at": "soon"})),
        ("priority", json!({"priority": 101})),
        ("priority", json!({"priority": "high"})),
    ] {
        let refused = enqueue(&service, "quick", &body).await;
        let said =
            (refused.status.as_u16(), &refused.body["code"], &refused.body["errors"][0]["pointer"]);
        let expected = (422, &json!("INVALID_OVERRIDE"), &json!(format!("/{field}")));
        assert_eq!(said, expected, "{:#}", refused.body);
        if body["available_at"] == "soon" {
            let why = &refused.body["errors"][0]["message"];
            assert_eq!(why, "must be a time like 2026-01-31T12:00:00Z");
        }
    }
    let waits = service.post("/v1/agents/quick/invoke", &json!({"available_at": later})).await;
    assert_eq!(waits.status, 422, "{:#}", waits.body);
    assert_eq!(waits.body["errors"][0]["pointer"], "/available_at");
    let dry = json!({"available_at": later, "priority": 1});
    assert_eq!(service.post("/v1/agents/quick/dry-run", &dry).await.status, 200);
}

async fn a_run_that_is_to_begin_later_holds_up_no_other_of_its_session(db: Db) {
    let service = setup("").start(db).await;
    let at = Utc::now() + TimeDelta::seconds(10);
    let said = json!({"session_id": "s", "available_at": at});
    let later = path_of(&enqueue(&service, "quick", &said).await);
    let now = service.run("quick", &json!({"session_id": "s"})).await;
    assert_eq!(now["status"], "completed", "{now:#}");
    let queued = path_of(&enqueue(&service, "quick", &json!({"session_id": "s"})).await);
    service.until(&queued, |run| run["status"] == "completed").await;
    assert_eq!(service.delete("/v1/sessions/s").await.status, 409, "it is still to come");
    let ended = service.until(&later, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    assert!(time(&ended["started_at"]) >= at, "{ended:#}");
    assert_eq!(service.delete("/v1/sessions/s").await.status, 204);
}
