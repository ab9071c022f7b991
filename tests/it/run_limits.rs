//! Limits of runs hold for all replicas together, however many runs begin in the same moment.
//!
//! | together with | here |
//! |---|---|
//! | requests, queued runs, tenants, keys | `many_starts_at_once_pass_no_limit`, `queued_runs_and_requests_share_a_limit` |
//! | another tenant | `queued_runs_and_requests_share_a_limit` |
//! | idempotency | `repeats_of_a_request_need_no_place` |
//! | a start that fails, sessions | `a_start_that_fails_gives_its_place_back` |
//! | crash before a run is stored | `a_dead_replica_keeps_no_place` |
//! | crash of a run that was claimed | `a_run_that_never_began_waits_for_a_place_again` |
//! | PgBouncer | `many_starts_at_once_pass_no_limit`, as behind a pooler |

use std::collections::BTreeSet;
use std::time::Duration;

use chrono::{TimeDelta, Utc};
use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster;
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_start_that_fails_gives_its_place_back,
}

const LIMIT: usize = 4;

fn setup(mock: &MockModel, limits: &str) -> Setup {
    let provider = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\n",
        mock.base_url()
    );
    Setup::new()
        .agent("worker", "model: mock/gpt-4.1-mini\ninstructions: Work.\n")
        .config(&format!("{provider}[runtime]\nlease = \"8s\"\n{limits}\n"))
}

/// A model that takes its time.
async fn model() -> MockModel {
    let mock = MockModel::start().await;
    mock.always(Reply::Delayed(Duration::from_millis(200), Box::new(Reply::text("done"))));
    mock
}

/// The same, whose answers are held until it is told.
async fn held_model() -> (MockModel, watch::Sender<bool>) {
    let mock = MockModel::start().await;
    let (free, held) = watch::channel(false);
    let late = Reply::Delayed(Duration::from_millis(200), Box::new(Reply::text("done")));
    mock.always(Reply::Held(held, Box::new(late)));
    (mock, free)
}

/// Lets the answers go when so many are waited for at once.
async fn free_at(mock: &MockModel, free: &watch::Sender<bool>, open: usize) {
    mock.wait_until(|counts| counts.open >= open).await;
    free.send_replace(true);
}

async fn replicas(setup: impl Fn() -> Setup) -> Vec<Service> {
    let url = postgres_cluster::fresh_database().await;
    join_all((0..3).map(|_| setup().start_on(url.clone()))).await
}

async fn invoke(service: &Service, key: &str, body: &Value) -> Answer {
    let request = service.http.post(service.url("/v1/agents/worker/invoke")).bearer_auth(key);
    answer(request.json(body)).await
}

/// Asks until there is a place; how often there was none.
async fn completes(service: &Service, key: &str) -> usize {
    let mut refused = 0;
    loop {
        let answered = invoke(service, key, &json!({})).await;
        match answered.status.as_u16() {
            200 => return refused,
            429 => assert_eq!(answered.body["code"], "TOO_MANY_RUNS", "{:#}", answered.body),
            _ => panic!("{:#}", answered.body),
        }
        refused += 1;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn key(service: &Service, tenant: &str) -> String {
    let key = json!({"name": "other", "tenant": tenant, "scopes": ["admin"]});
    service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned()
}

async fn enqueue(service: &Service) -> String {
    let request = service.request(Method::POST, "/v1/agents/worker/invoke");
    let accepted = answer(request.header("prefer", "respond-async").json(&json!({}))).await;
    assert_eq!(accepted.status, 202, "{:#}", accepted.body);
    format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap())
}

#[tokio::test]
async fn many_starts_at_once_pass_no_limit() {
    for (limits, pooler) in [
        ("max_concurrent_runs_per_tenant = 4", false),
        ("max_concurrent_runs_per_key = 4", false),
        ("max_concurrent_runs_per_tenant = 4\nmax_concurrent_runs_per_key = 9", true),
    ] {
        let (mock, free) = held_model().await;
        let pooler = format!("\n[database]\ntransaction_pooler = {pooler}");
        let services = replicas(|| setup(&mock, &format!("{limits}{pooler}"))).await;
        let calls = (0..60).map(|n| completes(&services[n % 3], &services[0].key));
        let (refused, ()) = tokio::join!(join_all(calls), free_at(&mock, &free, LIMIT));
        assert!(refused.into_iter().sum::<usize>() > 0, "{limits}");
        assert_eq!((mock.counts().most, mock.counts().started), (LIMIT, 60), "{limits}");
    }
}

#[tokio::test]
async fn queued_runs_and_requests_share_a_limit() {
    for limits in ["max_concurrent_runs_per_tenant = 4", "max_concurrent_runs_per_key = 4"] {
        let (mock, free) = held_model().await;
        let services = replicas(|| setup(&mock, limits)).await;
        let queued = join_all((0..40).map(|n| enqueue(&services[n % 3]))).await;
        let calls = (0..12).map(|n| completes(&services[n % 3], &services[0].key));
        tokio::join!(join_all(calls), free_at(&mock, &free, LIMIT));
        for run in &queued {
            services[0].until(run, |run| run["status"] == "completed").await;
        }
        assert_eq!((mock.counts().most, mock.counts().started), (LIMIT, 52), "{limits}");
    }
    // Where one tenant has no place left, another one has all of its own.
    let (mock, free) = held_model().await;
    let services = replicas(|| setup(&mock, "max_concurrent_runs_per_tenant = 4")).await;
    let other = key(&services[0], "other").await;
    let queued = join_all((0..12).map(|n| enqueue(&services[n % 3]))).await;
    mock.wait_for_requests(LIMIT).await;
    let calls = join_all((0..LIMIT).map(|n| completes(&services[n % 3], &other)));
    let (refused, ()) = tokio::join!(calls, free_at(&mock, &free, 2 * LIMIT));
    assert_eq!(refused, [0; LIMIT]);
    for run in &queued {
        services[0].until(run, |run| run["status"] == "completed").await;
    }
    assert_eq!(mock.counts().most, 2 * LIMIT);
}

#[tokio::test]
async fn repeats_of_a_request_need_no_place() {
    let mock = model().await;
    let services = replicas(|| setup(&mock, "max_concurrent_runs_per_tenant = 1")).await;
    for round in 0..8 {
        let repeats = (0..9).map(|n| {
            let request = services[n % 3].request(Method::POST, "/v1/agents/worker/invoke");
            answer(request.header("idempotency-key", format!("k{round}")).json(&json!({})))
        });
        let answers = join_all(repeats).await;
        let runs: BTreeSet<&str> = answers
            .iter()
            .map(|answer| {
                assert_eq!(answer.status, 200, "{:#}", answer.body);
                answer.body["run_id"].as_str().unwrap()
            })
            .collect();
        assert_eq!(runs.len(), 1, "{runs:?}");
    }
    assert_eq!((mock.counts().most, mock.counts().started), (1, 8));
}

async fn a_start_that_fails_gives_its_place_back(db: Db) {
    let mock = model().await;
    let service = setup(&mock, "max_concurrent_runs_per_tenant = 1").start(db).await;
    let first = invoke(&service, &service.key, &json!({"session_id": "s"})).await;
    assert_eq!(first.status, 200, "{:#}", first.body);
    for _ in 0..5 {
        let taken = json!({"run_id": first.body["run_id"]});
        assert_eq!(invoke(&service, &service.key, &taken).await.status, 409);
    }
    completes(&service, &service.key).await;
    let turn = || completes_in_session(&service);
    join_all((0..4).map(|_| turn())).await;
    completes(&service, &service.key).await;
    assert_eq!((mock.counts().most, mock.counts().started), (1, 7));
}

/// One of the session's runs at a time begins at once; the others wait for it in the queue.
async fn completes_in_session(service: &Service) {
    let body = json!({"session_id": "s", "on_session_busy": "enqueue"});
    loop {
        let answered = invoke(service, &service.key, &body).await;
        if answered.status == 429 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            continue;
        }
        let run = format!("/v1/runs/{}", answered.body["run_id"].as_str().unwrap());
        service.until(&run, |run| run["status"] == "completed").await;
        return;
    }
}

#[tokio::test]
async fn a_dead_replica_keeps_no_place() {
    let mock = model().await;
    let url = postgres_cluster::fresh_database().await;
    let limits = "max_concurrent_runs_per_tenant = 1";
    let mut dies = setup(&mock, limits).start_on(url.clone()).await;
    let lives = setup(&mock, limits).start_on(url.clone()).await;
    dies.restart_to_crash("before_commit:1").await;
    let body = json!({});
    let request = dies.request(Method::POST, "/v1/agents/worker/invoke").json(&body);
    assert!(request.send().await.is_err(), "it dies before the run is stored");
    let refused = completes(&lives, &lives.key).await;
    assert!(refused > 0, "the place is held until the replica is known to be dead");
    completes(&lives, &lives.key).await;
    assert_eq!(mock.counts().most, 1);
}

#[tokio::test]
async fn a_run_that_never_began_waits_for_a_place_again() {
    let mock = model().await;
    let url = postgres_cluster::fresh_database().await;
    let limits = "max_concurrent_runs_per_tenant = 1";
    let mut dies = setup(&mock, limits).start_on(url.clone()).await;
    let at = Utc::now() + TimeDelta::seconds(10);
    let mut runs = Vec::new();
    for later in 0..3 {
        let body = json!({"available_at": at + TimeDelta::milliseconds(later)});
        let request = dies.request(Method::POST, "/v1/agents/worker/invoke").json(&body);
        let accepted = answer(request.header("prefer", "respond-async")).await;
        runs.push(format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap()));
    }
    dies.kill().await;
    dies.restart_to_crash("before_commit:1").await;
    dies.exit_code().await; // it has claimed the first of them
    let lives = setup(&mock, limits).start_on(url.clone()).await;
    for run in &runs {
        lives.until(run, |run| run["status"] == "completed").await;
    }
    assert_eq!(mock.counts().most, 1);
}
