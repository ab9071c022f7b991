//! A cancel ends a run wherever it is: in the queue, in a call of a model, in a program, in a wait.
//!
//! `TOOLLOOP_FAULT_ROUNDS=100 cargo test --test it cancels -- --nocapture` repeats it, and says how long
//! it took.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;
use sqlx::{Connection, PgConnection};

use crate::approvals::types;
use crate::claims::{ASKER, ASKING};
use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::script_tools::python;
use crate::service::{Db, Service, Setup, answer, on_both_stores};
use crate::shell_stories::until_alive;

on_both_stores! { a_cancel_ends_a_run_wherever_it_is }

const RUNNER: &str = "
model: scripted/runner
instructions: Run.
tools: ['script:slow/*']
enable_double_confirmation: false
governance: {autonomy: full}
";
const RUNNING: &str =
    "steps: [{tool_calls: [{tool: 'script:slow/job', arguments: {}}]}, {text: done}]";
const CALLER: &str = "model: mock/any\ninstructions: Wait.\nenable_double_confirmation: false\n";

#[tokio::test]
async fn a_cancel_while_a_run_is_being_stored_is_not_lost() {
    let mock = MockModel::start().await;
    mock.always(Reply::Hang);
    let service = Setup::new()
        .config(&format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url()))
        .agent("caller", CALLER)
        .start(Db::Postgres)
        .await;
    for leaves in [true, false] {
        let mut lock = PgConnection::connect(&service.database_url).await.unwrap();
        let taken = "BEGIN; LOCK TABLE run_events IN EXCLUSIVE MODE";
        sqlx::raw_sql(taken).execute(&mut lock).await.unwrap();
        let id = uuid::Uuid::now_v7();
        let request = service.request(Method::POST, "/v1/agents/caller/invoke-iterative");
        let request = request.header("accept", "text/event-stream");
        let request = request.header("x-cancel-on-disconnect", leaves.to_string());
        let client = tokio::spawn(request.json(&json!({"run_id": id})).send());
        let waits = "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted AND relation = 'run_events'::regclass)";
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut lock).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let run = format!("/v1/runs/{id}");
        assert_eq!(service.get(&run).await.status, 404, "it is not stored yet");
        let cancel = service.request(Method::POST, &format!("{run}/cancel")).json(&json!({}));
        let cancelling = (!leaves).then(|| tokio::spawn(answer(cancel)));
        if leaves {
            client.abort();
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
        sqlx::raw_sql("ROLLBACK").execute(&mut lock).await.unwrap();
        if let Some(cancelling) = cancelling {
            assert_eq!(cancelling.await.unwrap().status, 202);
        }
        let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
        assert_eq!(ended["status"], "cancelled", "{ended:#}");
    }
}

async fn queued(service: &Service) -> String {
    let later = chrono::Utc::now() + chrono::TimeDelta::hours(1);
    let request = service.request(Method::POST, "/v1/agents/caller/invoke-iterative");
    let body = json!({"available_at": later});
    let accepted = answer(request.header("prefer", "respond-async").json(&body)).await;
    assert_eq!(accepted.status, 202, "{:#}", accepted.body);
    format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap())
}

async fn a_cancel_ends_a_run_wherever_it_is(db: Db) {
    let seconds = if db == Db::Sqlite { "6671.5" } else { "6672.5" };
    let program = format!("import os\nos.execvp('sleep', ['sleep', '{seconds}'])");
    let mock = MockModel::start().await;
    mock.always(Reply::Hang);
    let service = Setup::new()
        .config(&format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url()))
        .tools("slow", &format!("tools:\n{}", python("job", &program, "")))
        .agent("runner", RUNNER)
        .scenario("runner", RUNNING)
        .agent("asker", ASKER)
        .scenario("asker", ASKING)
        .agent("caller", CALLER)
        .start(db)
        .await;
    let mut took: Vec<Duration> = Vec::new();
    for round in 1..=rounds(1) {
        let runs = [
            queued(&service).await,
            service.enqueue("caller").await,
            service.enqueue("runner").await,
            service.enqueue("asker").await,
        ];
        service.until(&runs[3], |run| run["status"] == "awaiting_approval").await;
        until_alive(seconds, true).await;
        mock.wait_for_requests(round).await;
        for run in &runs {
            let since = Instant::now();
            let cancelled = service.post(&format!("{run}/cancel"), &json!({})).await;
            assert!([200, 202].contains(&cancelled.status.as_u16()), "{cancelled:?}");
            let ended = service.until(run, |run| run["finished_at"].is_string()).await;
            took.push(since.elapsed());
            assert_eq!(ended["status"], "cancelled", "{ended:#}");
            assert_eq!(ended["pending"], json!([]), "{ended:#}");
            let types = types(&service, run).await;
            let ends = types.iter().filter(|it| *it == "run.cancelled").count();
            let last = types.last().map(String::as_str);
            assert_eq!((ends, last), (1, Some("run.cancelled")), "{types:?}");
        }
        until_alive(seconds, false).await;
        mock.wait_until(|counts| counts.aborted >= round).await;
    }
    assert!(!service.dir.path().join("workspace/default/log.txt").exists());
    assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    took.sort_unstable();
    let (median, longest) = (took[took.len() / 2], took[took.len() - 1]);
    println!("{db:?}: {} cancels, {median:?} (median), {longest:?} at most", took.len());
}
