//! The previous build and this one side by side on one PostgreSQL, as while an upgrade is rolled out:
//! `TOOLLOOP_PREVIOUS_BINARY=/path/to/toolloop cargo test --test it two_builds -- --ignored`.

use std::path::PathBuf;

use futures::future::join_all;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use crate::fault_rounds::rounds;
use crate::service::{Db, Service, Setup};

const SLOW: &str = "steps: [{delay_ms: 3000, text: done}]";

fn setup() -> Setup {
    Setup::new()
        .agent("quick", "model: scripted/quick\nenable_double_confirmation: false\n")
        .scenario("quick", "steps: [{text: done}]")
        .agent("slow", "model: scripted/slow\nenable_double_confirmation: false\n")
        .scenario("slow", SLOW)
        .config("[runtime]\nlease = \"2s\"")
}

async fn database(service: &Service) -> PgConnection {
    PgConnection::connect(&service.database_url).await.unwrap()
}

async fn change(service: &Service, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut database(service).await).await.unwrap();
}

async fn steps(service: &Service) -> i64 {
    let count = sqlx::query_scalar("SELECT count(*) FROM _sqlx_migrations");
    count.fetch_one(&mut database(service).await).await.unwrap()
}

fn is(status: &str) -> impl Fn(&Value) -> bool {
    move |run| run["status"] == status
}

/// A run in the queue that is of a version which neither build knows.
async fn newer(service: &Service) -> String {
    let soon = chrono::Utc::now() + chrono::TimeDelta::hours(1);
    let queued = service
        .request(reqwest::Method::POST, "/v1/agents/quick/invoke-iterative")
        .header("prefer", "respond-async")
        .json(&json!({"available_at": soon}));
    let queued = crate::service::answer(queued).await;
    let run = queued.headers["location"].to_str().unwrap().to_owned();
    let id = run.rsplit_once('/').unwrap().1;
    let sql = "SET format = 99, available_at = clock_timestamp(), delayed = false";
    change(service, &format!("UPDATE runs {sql} WHERE id = '{id}'")).await;
    run
}

#[tokio::test]
#[ignore = "it needs the binary of the previous build; see above"]
async fn the_previous_build_and_this_one_fail_none_of_each_others_runs() {
    let previous: PathBuf = std::env::var_os("TOOLLOOP_PREVIOUS_BINARY")
        .expect("TOOLLOOP_PREVIOUS_BINARY names the binary of the previous build")
        .into();
    let mut old = setup().binary(&previous).start(Db::Postgres).await;
    let (old_schema, url) = (steps(&old).await, old.database_url.clone());
    let before = old.enqueue("slow").await;
    let mut new = setup().start_on(url).await;
    if steps(&new).await == old_schema {
        // What the next version may add.
        change(
            &new,
            "ALTER TABLE runs ADD COLUMN of_the_future text; \
             CREATE TABLE of_the_future (id text PRIMARY KEY); \
             INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
             SELECT version + 1, 'newer', success, checksum, 0 FROM _sqlx_migrations \
             ORDER BY version DESC LIMIT 1",
        )
        .await;
    }
    assert_eq!(old.until(&before, is("completed")).await["error"], Value::Null);

    // A step ahead of it, the previous one starts and serves.
    old.kill().await;
    old.restart().await;
    old.until("/readyz", is("ready")).await;
    for service in [&old, &new] {
        let run = service.run("quick", &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }

    // What neither can read stays in the queue, and others pass it by.
    let unknown = newer(&new).await;
    for service in [&old, &new, &old, &new] {
        let run = service.enqueue("quick").await;
        service.until(&run, is("completed")).await;
        assert_eq!(service.get(&unknown).await.body["status"], "queued");
    }
    change(&new, "UPDATE runs SET format = 1 WHERE format = 99").await;
    new.until(&unknown, is("completed")).await;

    // Each goes on with what the other one has begun.
    let mut interrupted = 0;
    for round in 0..rounds(2) {
        let (dying, staying) = if round % 2 == 0 { (&mut old, &new) } else { (&mut new, &old) };
        let runs = join_all((0..8).map(|_| begin(dying))).await;
        for run in &runs {
            staying.until(run, is("running")).await;
        }
        dying.kill().await;
        for run in &runs {
            let ended = staying.until(run, |run| run["finished_at"].is_string()).await;
            assert_eq!(ended["status"], "completed", "{ended:#}");
            let events = staying.get(&format!("{run}/events")).await.body;
            let mut events = events["data"].as_array().unwrap().iter();
            interrupted += usize::from(events.any(|event| event["type"] == "run.resumed"));
        }
        dying.restart().await;
    }
    println!("{interrupted} runs of one build were ended by the other");
}

/// A run that this replica drives; its path.
async fn begin(service: &Service) -> String {
    let started = service.request(reqwest::Method::POST, "/v1/agents/slow/invoke-iterative");
    let started = crate::service::answer(started.header("prefer", "wait=0").json(&json!({}))).await;
    format!("/v1/runs/{}", started.body["run_id"].as_str().unwrap())
}
