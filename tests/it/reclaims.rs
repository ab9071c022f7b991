//! Runs that a living replica owns and that no task of it drives: they are found, given back to the
//! queue, and end.

use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use tokio::sync::watch;

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_run_that_nothing_drives_goes_on,
    a_run_that_nothing_drives_is_cancelled,
    a_commit_that_is_gone_is_made_up_for,
    a_run_that_cannot_be_read_holds_up_no_other,
}

const AGENT: &str = "
model: scripted/AGENT
instructions: Answer.
tools: [file_ops]
enable_double_confirmation: false
";

/// One worker, and a run that keeps it busy; its path.
async fn busy(db: Db) -> (Service, String) {
    let mut service = Setup::new()
        .agent("quick", &AGENT.replace("AGENT", "quick"))
        .scenario("quick", "steps: [{text: done}]")
        .agent("stuck", &AGENT.replace("AGENT", "stuck"))
        .scenario("stuck", "steps: [{delay_ms: 600000, text: late}]")
        .config("[runtime]\nlease = \"2s\"\nqueue_workers = 1")
        .start(db)
        .await;
    service.expect_reclaims();
    let busy = service.enqueue("stuck").await;
    service.until(&busy, |run| run["status"] == "running").await;
    (service, busy)
}

/// Changes the database behind the service's back, and the first statement must change a row. `$RUN` stands
/// for the id of the run at that path.
async fn change(service: &Service, run: &str, statements: &[&str]) {
    let id = run.rsplit('/').next().unwrap();
    let statements = statements.iter().map(|sql| sql.replace("$RUN", &format!("'{id}'")));
    let mut changed = Vec::new();
    if service.database_url.starts_with("postgres") {
        let mut database = PgConnection::connect(&service.database_url).await.unwrap();
        for statement in statements {
            let done = sqlx::query(AssertSqlSafe(statement)).execute(&mut database).await.unwrap();
            changed.push(done.rows_affected());
        }
    } else {
        let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
        for statement in statements {
            let done = sqlx::query(AssertSqlSafe(statement)).execute(&mut database).await.unwrap();
            changed.push(done.rows_affected());
        }
    }
    assert_eq!(changed[0], 1, "{run}: {changed:?}");
}

/// As a claim leaves a run whose answer is lost.
const CLAIMED: &str = "UPDATE runs SET status = 'running', owner = (SELECT id FROM replicas WHERE NOT dead), \
     epoch = epoch + 1, available_at = NULL WHERE id = $RUN AND status = 'queued'";

async fn until_counted(service: &Service, reason: &str) {
    let counter = format!("toolloop_runs_reclaimed_total{{reason=\"{reason}\"}} ");
    let count = |line: &str| line.strip_prefix(&counter)?.parse::<u64>().ok();
    let is_counted = |text: &str| text.lines().filter_map(count).any(|count| count > 0);
    service.until("/metrics", |text| text.as_str().is_some_and(is_counted)).await;
}

async fn a_run_that_nothing_drives_goes_on(db: Db) {
    let (service, busy) = busy(db).await;
    let run = service.enqueue("quick").await;
    change(&service, &run, &[CLAIMED]).await;
    service.until(&run, |run| run["status"] == "queued").await;
    until_counted(&service, "undriven").await;
    service.until_logged("run reclaimed").await;
    assert_eq!(service.get(&busy).await.body["status"], "running", "what is driven is left alone");
    service.post(&format!("{busy}/cancel"), &json!({})).await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["output"], json!({"result": "done"}), "{ended:#}");
}

async fn a_run_that_nothing_drives_is_cancelled(db: Db) {
    let (service, busy) = busy(db).await;
    let run = service.enqueue("quick").await;
    change(&service, &run, &[CLAIMED]).await;
    assert_eq!(service.post(&format!("{run}/cancel"), &json!({})).await.status, 202);
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "cancelled", "{ended:#}");
    assert_eq!(service.get(&busy).await.body["status"], "running");
}

/// As a standby that was behind has a run after it took over: what was acknowledged last is gone.
async fn a_commit_that_is_gone_is_made_up_for(db: Db) {
    let mock = MockModel::start().await;
    let (free, held) = watch::channel(false);
    mock.reply_by(move |request| {
        let read = request["messages"].as_array().and_then(|said| said.last()).unwrap();
        if read["role"] != "tool" {
            let read = json!({"operation": "read", "path": "notes.txt"});
            return Reply::call("file_ops", &read);
        }
        let is_read = read["content"].to_string().contains("seventeen");
        let answer = if is_read { "seventeen" } else { "nothing was read" };
        Reply::Held(held.clone(), Box::new(Reply::text(answer)))
    });
    let provider = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let mut service = Setup::new()
        .agent("reader", &AGENT.replace("scripted/AGENT", "mock/reader"))
        .config(&provider)
        .file("notes.txt", "seventeen\n")
        .config("[runtime]\nlease = \"2s\"")
        .start(db)
        .await;
    service.expect_reclaims();
    let run = service.enqueue("reader").await;
    let in_second_call = |events: &Value| {
        let started = |event: &&Value| event["type"] == "iteration.started";
        events["data"].as_array().unwrap().iter().filter(started).count() == 2
    };
    service.until(&format!("{run}/events"), in_second_call).await;
    let lost = [
        "UPDATE runs SET next_seq = (SELECT max(first_seq) FROM run_events WHERE run_id = $RUN) WHERE id = $RUN",
        "DELETE FROM run_events WHERE run_id = $RUN AND seq >= (SELECT next_seq FROM runs WHERE id = $RUN)",
        "DELETE FROM iterations WHERE run_id = $RUN AND seq >= (SELECT next_seq FROM runs WHERE id = $RUN)",
        "DELETE FROM tool_calls WHERE run_id = $RUN AND proposed_seq >= (SELECT next_seq FROM runs WHERE id = $RUN)",
    ];
    change(&service, &run, &lost).await;
    free.send_replace(true);
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["output"], json!({"result": "seventeen"}), "{ended:#}\n{}", service.log());
    until_counted(&service, "lost_commit").await;
    let events = service.get(&format!("{run}/events")).await.body;
    let events = events["data"].as_array().unwrap();
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>());
}

async fn a_run_that_cannot_be_read_holds_up_no_other(db: Db) {
    let (service, busy) = busy(db).await;
    let damaged = service.enqueue("quick").await;
    change(&service, &damaged, &["UPDATE runs SET attempts = -1 WHERE id = $RUN"]).await;
    let runs = [service.enqueue("quick").await, service.enqueue("quick").await];
    service.post(&format!("{busy}/cancel"), &json!({})).await;
    for run in runs {
        let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
        assert_eq!(ended["status"], "completed", "{ended:#}");
    }
    // It waits for its row to be mended, and can be ended then.
    service.until_logged("were parked as needs_review").await;
    assert!(!service.log().contains("run reclaimed"), "{}", service.log());
    let mended = "UPDATE runs SET attempts = 0 WHERE id = $RUN AND status = 'needs_review'";
    change(&service, &damaged, &[mended]).await;
    assert_eq!(service.post(&format!("{damaged}/cancel"), &json!({})).await.status, 202);
    service.until(&damaged, |run| run["status"] == "cancelled").await;
}
