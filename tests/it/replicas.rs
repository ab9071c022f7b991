//! Several replicas on one database, and faults in which none of them is dead: half-open connections,
//! clock jumps, suspended machines, a workspace that cannot be written.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tokio::sync::watch;

use crate::claims::change;
use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster;
use crate::postgres_proxy::Proxy;
use crate::service::{Answer, Db, Service, Setup, Signal, answer, command, on_both_stores};
use crate::streaming::follow;

on_both_stores! {
    a_replica_without_a_workspace_leaves_runs_alone,
    runs_that_were_begun_wait_for_no_worker,
    a_model_call_that_is_repeated_is_marked_and_charged,
    a_replay_on_a_replica_that_shuts_down_is_told_to_come_again,
    a_cancel_that_was_not_heard_of_is_found_by_the_next_commit,
}

const AGENT: &str = "
model: scripted/AGENT
instructions: Answer.
tools: [file_ops]
enable_double_confirmation: false
";

fn setup() -> Setup {
    Setup::new()
        .agent("slow", &AGENT.replace("AGENT", "slow"))
        .scenario("slow", "steps: [{delay_ms: 600000, text: late}]")
        .agent("quick", &AGENT.replace("AGENT", "quick"))
        .scenario("quick", "steps: [{text: done}]")
}

fn lease(lease: &str) -> Setup {
    setup().config(&format!("[runtime]\nlease = \"{lease}\""))
}

async fn invoke(service: &Service, agent: &str, body: &Value) -> Answer {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let request = service.request(Method::POST, &path).header("prefer", "respond-async");
    answer(request.json(body)).await
}

fn path_of(run: &Value) -> String {
    format!("/v1/runs/{}", run["run_id"].as_str().unwrap())
}

/// As another replica stores the request; its hint is not heard.
async fn a_cancel_that_was_not_heard_of_is_found_by_the_next_commit(db: Db) {
    let mock = MockModel::start().await;
    let write = json!({"operation": "append", "path": "log.txt", "content": "x"});
    let agent =
        AGENT.replace("scripted/AGENT", "mock/writer") + "governance: {paths: {write: ['**']}}\n";
    let provider = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let service = Setup::new().agent("writer", &agent).config(&provider).start(db).await;
    for round in 1..=rounds(6) {
        let (free, held) = watch::channel(false);
        mock.script([Reply::Held(held, Box::new(Reply::call("file_ops", &write)))]);
        let run = service.enqueue("writer").await;
        mock.wait_for_requests(round).await;
        service.until(&run, |run| run["iterations"] == 0 && run["status"] == "running").await;
        let request = "UPDATE runs SET cancel_requested_at = created_at, cancel_reason = 'enough' \
                       WHERE status = 'running'";
        change(&service, request).await;
        free.send_replace(true);
        let run = service.until(&run, |run| run["finished_at"].is_string()).await;
        assert_eq!(run["status"], "cancelled", "{run:#}");
        assert_eq!(run["error"]["context"]["reason"], "enough", "{run:#}");
        let calls = service.get(&format!("{}/tool-calls", path_of(&run))).await.body;
        let call = &calls["data"][0];
        assert!(call.is_null() || call["state"] == "cancelled", "{call:#}");
    }
    assert!(
        !service.dir.path().join("workspace/default/log.txt").exists(),
        "a call began after the request"
    );
}

/// Runs in the middle of a model call.
async fn running(service: &Service, count: usize) -> Vec<String> {
    let mut runs = Vec::new();
    for _ in 0..count {
        runs.push(service.enqueue("slow").await);
    }
    for run in &runs {
        service.until(run, |run| run["iterations"] == 0 && run["status"] == "running").await;
        service.until(&format!("{run}/events"), |events| has(events, "iteration.started")).await;
    }
    runs
}

fn has(events: &Value, kind: &str) -> bool {
    events["data"].as_array().unwrap().iter().any(|event| event["type"] == kind)
}

/// None of the runs was taken away from its replica.
async fn are_undisturbed(service: &Service, runs: &[String]) {
    for run in runs {
        assert_eq!(service.get(run).await.body["status"], "running");
        let events = service.get(&format!("{run}/events")).await.body;
        assert!(!has(&events, "run.resumed"), "{events:#}");
    }
}

async fn database(url: &str) -> PgConnection {
    PgConnection::connect(url).await.unwrap()
}

async fn execute(url: &str, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut database(url).await).await.unwrap();
}

#[tokio::test]
async fn a_heartbeat_connection_that_goes_silent_costs_no_lease() {
    let url = postgres_cluster::fresh_database().await;
    let proxy = Proxy::to(&url).await;
    let service = lease("6s").start_on(proxy.url.clone()).await;
    let runs = running(&service, 3).await;
    let other = lease("6s").start_on(url).await;
    for _ in 0..3 {
        for _ in 0..3000 {
            if proxy.has_heartbeats() {
                break;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert!(proxy.silence_heartbeats() >= 1, "no heartbeat was sent");
        tokio::time::sleep(Duration::from_secs(7)).await;
        are_undisturbed(&other, &runs).await;
    }
    service.until_logged("heartbeat failed").await;
    assert!(!service.log().contains("declared dead"), "{}", service.log());
}

#[tokio::test]
async fn through_a_transaction_pooler_replicas_find_everything_by_asking() {
    let url = postgres_cluster::empty_database().await;
    let pooled = || setup().config("[database]\ntransaction_pooler = true");
    let dir = tempfile::tempdir().unwrap();
    let mut migrate = command(dir.path());
    migrate.args(["migrate"]).env("DATABASE_URL", &url);
    let refused = migrate.env("TOOLLOOP_DATABASE__TRANSACTION_POOLER", "true").output().await;
    let refused = String::from_utf8(refused.unwrap().stderr).unwrap();
    assert!(refused.contains("cannot be changed through a transaction pooler"), "{refused}");
    let migrated = migrate.env_remove("TOOLLOOP_DATABASE__TRANSACTION_POOLER").status().await;
    assert!(migrated.unwrap().success());
    let services = [pooled().start_on(url.clone()).await, pooled().start_on(url.clone()).await];
    for run in running(&services[0], 3).await {
        let cancelled = services[1].post(&format!("{run}/cancel"), &json!({})).await;
        assert_eq!(cancelled.status, 202, "{cancelled:?}");
        services[1].until(&run, |run| run["status"] == "cancelled").await;
    }
    for service in &services {
        let quick = invoke(service, "quick", &json!({})).await.body;
        services[0].until(&path_of(&quick), |run| run["status"] == "completed").await;
    }
    let of_a_connection: i64 = sqlx::query_scalar(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
         AND (query LIKE 'LISTEN%' OR query LIKE 'SET %' OR query LIKE '%advisory%') \
         AND pid <> pg_backend_pid()",
    )
    .fetch_one(&mut database(&url).await)
    .await
    .unwrap();
    assert_eq!(of_a_connection, 0);
}

/// As a clock that jumps ahead by a minute makes them look.
#[tokio::test]
async fn a_clock_that_jumps_takes_no_run_away() {
    let url = postgres_cluster::fresh_database().await;
    let services =
        [lease("6s").start_on(url.clone()).await, lease("6s").start_on(url.clone()).await];
    let runs = running(&services[0], 2).await.into_iter().chain(running(&services[1], 2).await);
    let runs: Vec<String> = runs.collect();
    tokio::time::sleep(Duration::from_secs(7)).await; // both may sweep by now
    for _ in 0..rounds(8) {
        let jump = "UPDATE replicas SET heartbeat_at = heartbeat_at - interval '60 s'";
        execute(&url, jump).await;
        tokio::time::sleep(Duration::from_millis(700)).await;
    }
    are_undisturbed(&services[0], &runs).await;
}

#[tokio::test]
async fn a_machine_that_sleeps_takes_no_run_away() {
    let url = postgres_cluster::fresh_database().await;
    let services =
        [lease("6s").start_on(url.clone()).await, lease("6s").start_on(url.clone()).await];
    let runs = running(&services[0], 2).await.into_iter().chain(running(&services[1], 2).await);
    let runs: Vec<String> = runs.collect();
    tokio::time::sleep(Duration::from_secs(7)).await;
    for _ in 0..3 {
        for service in &services {
            service.signal(Signal::STOP);
        }
        tokio::time::sleep(Duration::from_secs(7)).await;
        for service in &services {
            service.signal(Signal::CONT);
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
    }
    are_undisturbed(&services[0], &runs).await;
}

#[tokio::test]
async fn a_replica_with_a_longer_lease_is_given_that_long() {
    let url = postgres_cluster::fresh_database().await;
    let patient = lease("60s").start_on(url.clone()).await;
    let runs = running(&patient, 2).await;
    let hasty = lease("2s").start_on(url.clone()).await;
    tokio::time::sleep(Duration::from_secs(7)).await;
    are_undisturbed(&hasty, &runs).await;
    drop(patient);
    execute(&url, "UPDATE replicas SET heartbeat_at = heartbeat_at - interval '31 s', lease = lease / 20 WHERE lease > 10000000").await;
    for run in &runs {
        hasty.until(&format!("{run}/events"), |events| has(events, "run.resumed")).await;
    }
}

async fn a_replica_without_a_workspace_leaves_runs_alone(db: Db) {
    let service = setup().start(db).await;
    let (workspace, aside) =
        (service.dir.path().join("workspace"), service.dir.path().join("aside"));
    assert_eq!(service.run("quick", &json!({})).await["status"], "completed");
    std::fs::rename(&workspace, &aside).unwrap();
    std::fs::write(&workspace, "what is not mounted").unwrap();
    let unready = service.until("/readyz", |ready| ready["status"] != "ready").await;
    assert_eq!(
        (&unready["checks"]["workspace"], &unready["checks"]["store"]),
        (&json!("unavailable"), &json!("ok"))
    );
    service.until_logged("the workspace cannot be used").await;
    let refused = service.post("/v1/agents/quick/invoke-iterative", &json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (503, &json!("WORKSPACE_UNAVAILABLE"))
    );
    assert!(refused.headers.contains_key("retry-after"));
    let run = service.enqueue("quick").await;
    if service.database_url.starts_with("postgres") {
        let healthy = setup().start_on(service.database_url.clone()).await;
        let ended = healthy.until(&run, |run| run["finished_at"].is_string()).await;
        assert_eq!(ended["status"], "completed", "{ended:#}");
    }
    let run = service.enqueue("quick").await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(service.get(&run).await.body["status"], "queued");
    std::fs::remove_file(&workspace).unwrap();
    std::fs::rename(&aside, &workspace).unwrap();
    service.until("/readyz", |ready| ready["status"] == "ready").await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!((&ended["status"], &ended["error"]), (&json!("completed"), &Value::Null));
}

/// The first thing that the replica meets is a run that it claims.
#[tokio::test]
async fn a_run_that_is_claimed_by_a_broken_replica_is_given_back() {
    let url = postgres_cluster::fresh_database().await;
    let first = lease("2s").start_on(url.clone()).await;
    let runs = running(&first, 4).await;
    let broken =
        lease("2s").config("[tools]\nworkspace = \"toolloop.toml\"").start_on(url.clone()).await;
    drop(first);
    tokio::time::sleep(Duration::from_secs(8)).await;
    let healthy = lease("2s").start_on(url).await;
    for run in &runs {
        healthy.until(&format!("{run}/events"), |events| has(events, "run.resumed")).await;
        let run = healthy.get(run).await.body;
        assert_eq!((&run["status"], &run["error"]), (&json!("running"), &Value::Null), "{run:#}");
    }
    assert_eq!(broken.get("/readyz").await.status, 503);
}

async fn runs_that_were_begun_wait_for_no_worker(db: Db) {
    let mut service =
        setup().config("[runtime]\nlease = \"2s\"\nqueue_workers = 1").start(db).await;
    let body = json!({});
    let mut callers = Vec::new();
    for _ in 0..5 {
        let request = service.request(Method::POST, "/v1/agents/slow/invoke-iterative").json(&body);
        callers.push(tokio::spawn(request.send()));
    }
    let count = |runs: &Value| runs["data"].as_array().map_or(0, Vec::len);
    let runs = service.until("/v1/runs?status=running", |runs| count(runs) == 5).await;
    let queued = service.enqueue("slow").await;
    service.until(&format!("{queued}/events"), |events| has(events, "iteration.started")).await;
    service.kill().await;
    service.restart().await;
    for run in runs["data"].as_array().unwrap() {
        let events = format!("{}/events", path_of(run));
        service.until(&events, |events| has(events, "run.resumed")).await;
    }
    service.until("/v1/runs?status=running", |runs| count(runs) == 6).await;
    let late = [service.enqueue("slow").await, service.enqueue("slow").await];
    service.until("/v1/runs?status=running", |runs| count(runs) == 7).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let mut statuses = Vec::new();
    for run in &late {
        statuses.push(service.get(run).await.body["status"].as_str().unwrap().to_owned());
    }
    statuses.sort();
    assert_eq!(statuses, ["queued", "running"], "what begins needs a worker");
}

async fn a_model_call_that_is_repeated_is_marked_and_charged(db: Db) {
    let scenario = |delay_ms: u32| {
        format!(
            "steps: [{{tool_calls: [{{tool: file_ops, arguments: {{operation: list}}}}]}}, \
             {{delay_ms: {delay_ms}, text: done}}]"
        )
    };
    let mut service = setup()
        .config("[runtime]\nlease = \"2s\"")
        .agent("two", &AGENT.replace("AGENT", "two"))
        .scenario("two", &scenario(0))
        .start(db)
        .await;
    let plain = service.run("two", &json!({})).await;
    service.write("scenarios/two.yaml", &scenario(600_000));
    let run = service.enqueue("two").await;
    let in_second_call = |events: &Value| {
        let started = |event: &&Value| event["type"] == "iteration.started";
        events["data"].as_array().unwrap().iter().filter(started).count() == 2
    };
    service.until(&format!("{run}/events"), in_second_call).await;
    service.kill().await;
    service.write("scenarios/two.yaml", &scenario(0));
    service.restart().await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    let of = async |run: String| service.get(&format!("{run}/iterations")).await.body;
    let (plain_rows, rows) = (of(path_of(&plain)).await, of(run.clone()).await);
    let tokens =
        |rows: &Value, at: usize| rows["data"][at]["usage"]["total_tokens"].as_u64().unwrap();
    assert_eq!(rows["data"][0]["repeated"], false);
    assert_eq!(rows["data"][1]["repeated"], true, "{rows:#}");
    assert_eq!(tokens(&rows, 0), tokens(&plain_rows, 0));
    assert_eq!(tokens(&rows, 1), 2 * tokens(&plain_rows, 1));
    assert_eq!(ended["tokens_used"], json!(tokens(&rows, 0) + tokens(&rows, 1)));
    let events = service.get(&format!("{run}/events")).await.body;
    let events = events["data"].as_array().unwrap().iter();
    let answers = events.filter(|event| event["type"] == "model.responded");
    let marks: Vec<&Value> = answers.map(|event| &event["data"]["repeated"]).collect();
    assert_eq!(marks, [&Value::Null, &json!(true)]);
}

async fn a_replay_on_a_replica_that_shuts_down_is_told_to_come_again(db: Db) {
    let service = setup().config("[server]\nshutdown_grace = \"2s\"").start(db).await;
    let keyed = || {
        let path = "/v1/agents/slow/invoke-iterative";
        service.request(Method::POST, path).header("idempotency-key", "k").json(&json!({}))
    };
    let first = answer(keyed().header("prefer", "respond-async")).await;
    assert_eq!(first.status, 202, "{:#}", first.body);
    let run = path_of(&first.body);
    service.until(&format!("{run}/events"), |events| has(events, "iteration.started")).await;
    let replay = tokio::spawn(answer(keyed()));
    // Until the replay waits as well, it has been answered nothing and refused nothing.
    tokio::time::sleep(Duration::from_secs(6)).await;
    service.signal(Signal::TERM);
    let told = replay.await.unwrap();
    assert_eq!((told.status.as_u16(), &told.body["code"]), (503, &json!("DRAINING")), "{told:?}");
    assert!(told.headers.contains_key("retry-after"));
    service.until_logged("run is given back").await;
    assert!(!service.log().contains("another replica owns"), "none does: {}", service.log());
    assert_eq!(told.headers["x-run-id"], first.body["run_id"].as_str().unwrap());
}

/// A machine whose clock is minutes or weeks off, beside one whose clock is right.
#[tokio::test]
async fn the_time_is_that_of_the_database() {
    const DAY: i64 = 86_400;
    let asker = "tools: [file_ops]\ngovernance: {approval_timeout: 10m, paths: {write: ['**']}, tool_policies: {file_ops: ask}}\n";
    let timed = "model: scripted/slow\ninstructions: Wait.\ngovernance: {budget: {max_duration_seconds: 300}}\n";
    let setup = || {
        lease("2s")
            .agent("asker", &format!("model: scripted/asker\ninstructions: Ask.\n{asker}"))
            .scenario(
                "asker",
                "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]}]",
            )
            .agent("timed", timed)
    };
    let url = postgres_cluster::fresh_database().await;
    let right = setup().start_on(url.clone()).await;
    let ended = path_of(&right.run("quick", &json!({})).await);
    let keyed = |service: &Service| {
        let path = "/v1/agents/quick/invoke-iterative";
        let request = service.request(Method::POST, path).header("idempotency-key", "k");
        answer(request.json(&json!({})))
    };
    let first = keyed(&right).await;
    let run = path_of(&invoke(&right, "timed", &json!({})).await.body);
    right.until(&format!("{run}/events"), |events| has(events, "iteration.started")).await;

    // Behind: what it asks for is not overdue at once.
    let behind = setup().clock_ahead_by(-11 * 60).start_on(url.clone()).await;
    let parked = path_of(&behind.post("/v1/agents/asker/invoke-iterative", &json!({})).await.body);
    let expires_at = right.get(&parked).await.body["pending"][0]["expires_at"].clone();
    let expires_at: chrono::DateTime<chrono::Utc> = serde_json::from_value(expires_at).unwrap();
    let left = (expires_at - chrono::Utc::now()).num_seconds();
    assert!((540..=610).contains(&left), "{left}");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(right.get(&parked).await.body["status"], "awaiting_approval");
    drop(behind);

    // Ahead: nothing is over yet.
    let retention = "[runtime]\nlease = \"2s\"\nretention = \"30d\"";
    let weeks = Setup::new().config(retention).clock_ahead_by(31 * DAY).start_on(url.clone()).await;
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(right.get(&ended).await.body["status"], "completed");
    drop(weeks);
    let days = setup().clock_ahead_by(2 * DAY).start_on(url.clone()).await;
    let again = keyed(&days).await;
    assert_eq!((again.status.as_u16(), &again.body["run_id"]), (200, &first.body["run_id"]));
    assert_eq!(again.headers["idempotency-replayed"], "true");
    drop(right);
    days.until(&format!("{run}/events"), |events| has(events, "run.resumed")).await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(days.get(&run).await.body["status"], "running");
}

/// As with a session, or by retention.
#[tokio::test]
async fn streams_and_waits_end_when_another_replica_deletes_their_run() {
    let here = setup().start(Db::Postgres).await;
    let body = json!({"session_id": "s", "on_session_busy": "enqueue"});
    let run = invoke(&here, "slow", &body).await.body["run_id"].as_str().unwrap().to_owned();
    here.until(&format!("/v1/runs/{run}"), |run| run["status"] == "running").await;
    let there = setup().start_on(here.database_url.clone()).await;
    let events = follow(&there, &run, None).await.rest();
    let delete = async {
        there.until("/v1/runs?status=queued", |runs| runs["data"][0].is_object()).await;
        execute(&here.database_url, "DELETE FROM run_events; DELETE FROM runs").await;
    };
    let wait = there.post("/v1/agents/slow/invoke-iterative", &body);
    let (events, waited, ()) = tokio::join!(events, wait, delete);
    assert!(events.iter().all(|frame| frame.event != "run.completed"), "{events:#?}");
    assert_eq!(
        (waited.status.as_u16(), &waited.body["code"]),
        (404, &json!("NOT_FOUND")),
        "{:#}",
        waited.body
    );
    assert!(waited.body["run_id"].is_string());
}
