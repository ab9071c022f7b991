//! Claimed runs that need no slot: they are cancelled, reviewed or failed while all workers are busy.
//! A journal that cannot be read fails its own run and nothing else.

use std::time::Duration;

use chrono::{DateTime, Utc};
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};
use tokio::sync::watch;

use crate::approvals::text;
use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_cancel_ends_queued_and_parked_runs_while_all_workers_are_busy,
    an_orphan_is_decided_on_while_all_workers_are_busy,
    a_journal_that_cannot_be_read_fails_its_run_and_no_other,
    a_run_that_crashes_its_replica_takes_no_other_with_it,
    tenants_take_turns_in_the_queue,
    a_cancel_is_kept_whose_request_comes_before_the_end_is_stored,
    requests_that_come_at_once_do_not_pass_the_limit_of_the_queue,
}

const BUSY: &str = "[runtime]\nlease = \"2s\"\nqueue_workers = 1";

const SLOW: &str = "model: scripted/slow\ninstructions: Wait.\ntools: [file_ops]\nenable_double_confirmation: false\n";
const WAITING: &str = "steps: [{delay_ms: 600000, text: late}]";

pub(crate) const ASKER: &str = "
model: scripted/asker
instructions: Ask.
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";
pub(crate) const ASKING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]
  - text: done
";

fn setup() -> Setup {
    Setup::new()
        .agent("slow", SLOW)
        .scenario("slow", WAITING)
        .agent("asker", ASKER)
        .scenario("asker", ASKING)
}

async fn is(service: &Service, run: &str, status: &str) -> Value {
    service.until(run, |run| run["status"] == status).await
}

pub(crate) async fn change(service: &Service, sql: &str) {
    if service.database_url.starts_with("postgres") {
        let mut database = PgConnection::connect(&service.database_url).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut database).await.unwrap();
    } else {
        let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql)).execute(&mut database).await.unwrap();
    }
}

/// As another replica asks for it: the one that drives the run hears of it with the end that it stores.
async fn a_cancel_is_kept_whose_request_comes_before_the_end_is_stored(db: Db) {
    let mock = MockModel::start().await;
    let (answers, held) = watch::channel(false);
    mock.script([Reply::Held(held, Box::new(Reply::text("late")))]);
    let provider = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let agent = SLOW.replace("scripted/slow", "mock/slow");
    let service = Setup::new().agent("slow", &agent).config(&provider).start(db).await;
    let run = service.enqueue("slow").await;
    mock.wait_for_requests(1).await;
    let begun = |page: &Value| page.to_string().contains("iteration.started");
    service.until(&format!("{run}/events"), begun).await;
    let id = run.rsplit_once('/').unwrap().1;
    let request = format!(
        "UPDATE runs SET cancel_requested_at = created_at, cancel_reason = 'enough' WHERE id = '{id}'"
    );
    // Then the model answers, and the end is to be stored.
    if service.database_url.starts_with("postgres") {
        let mut database = PgConnection::connect(&service.database_url).await.unwrap();
        let mut watcher = PgConnection::connect(&service.database_url).await.unwrap();
        let mut request_made = database.begin().await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(request)).execute(&mut *request_made).await.unwrap();
        answers.send(true).unwrap();
        let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity \
            WHERE datname = current_database() AND wait_event_type = 'Lock')";
        while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut watcher).await.unwrap() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        request_made.commit().await.unwrap();
    } else {
        let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
        let mut request_made = database.begin_with("BEGIN IMMEDIATE").await.unwrap();
        sqlx::raw_sql(sqlx::AssertSqlSafe(request)).execute(&mut *request_made).await.unwrap();
        answers.send(true).unwrap();
        mock.wait_until(|counts| counts.open == 0).await;
        tokio::time::sleep(Duration::from_millis(1200)).await;
        request_made.commit().await.unwrap();
    }
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "cancelled", "{ended:#}");
    assert_eq!(ended["error"]["context"]["reason"], "enough", "{ended:#}");
    assert_eq!((&ended["iterations"], &ended["raw_response"]), (&json!(1), &json!("late")));
    let messages = service.get(&format!("{run}/messages")).await.body;
    assert_eq!(messages["data"][2]["content"], "late", "the answer is kept: {messages:#}");
}

async fn a_cancel_ends_queued_and_parked_runs_while_all_workers_are_busy(db: Db) {
    let service = setup().config(BUSY).start(db).await;
    let parked = service.enqueue("asker").await;
    is(&service, &parked, "awaiting_approval").await;
    let busy = service.enqueue("slow").await;
    is(&service, &busy, "running").await;
    let waiting = service.enqueue("slow").await;
    for (run, phase, place) in [(&parked, "approval", 1), (&waiting, "queued", 0)] {
        let cancel = service.post(&format!("{run}/cancel"), &json!({"reason": "enough"})).await;
        assert_eq!((cancel.status.as_u16(), &cancel.body["status"]), (202, &json!("cancelled")));
        let context = &cancel.body["error"]["context"];
        let expected =
            json!({"phase": phase, "attempt": place, "iteration": place, "reason": "enough"});
        assert_eq!(*context, expected, "{:#}", cancel.body);
    }
    let calls = service.get(&format!("{parked}/tool-calls")).await.body;
    assert_eq!(calls["data"][0]["state"], "cancelled", "{calls:#}");
    assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    assert_eq!(service.get(&busy).await.body["status"], "running");
}

async fn an_orphan_is_decided_on_while_all_workers_are_busy(db: Db) {
    let service = setup().config(BUSY).start(db).await;
    let acted = service.enqueue("asker").await;
    let parked = is(&service, &acted, "awaiting_approval").await;
    let call = text(&parked["pending"][0], "call_id");
    let approve = format!("{acted}/tool-calls/{call}/approve");
    assert_eq!(service.post(&approve, &json!({})).await.status, 200);
    is(&service, &acted, "completed").await;
    let busy = service.enqueue("slow").await;
    is(&service, &busy, "running").await;
    let id = acted.rsplit_once('/').unwrap().1;
    // As a crash in the middle of the call leaves it.
    let journal = format!("FROM run_events WHERE run_id = '{id}'");
    let sql = format!(
        "DELETE {journal} AND seq > (SELECT min(seq) {journal} AND events LIKE '%tool_call.started%'); \
         DELETE FROM iterations WHERE run_id = '{id}' AND number > 1; \
         UPDATE tool_calls SET state = 'dispatched', result_seq = NULL WHERE run_id = '{id}'; \
         UPDATE runs SET status = 'running', owner = 'gone', finished_at = NULL, \
         termination_reason = NULL, next_seq = (SELECT max(seq) + 1 {journal}) WHERE id = '{id}'"
    );
    change(&service, &sql).await;
    let reviewed = is(&service, &acted, "needs_review").await;
    assert_eq!(reviewed["pending"][0]["kind"], "review", "{reviewed:#}");
    assert_eq!(service.get(&busy).await.body["status"], "running");
}

async fn a_journal_that_cannot_be_read_fails_its_run_and_no_other(db: Db) {
    let mut service = setup().config("[runtime]\nlease = \"2s\"").start(db).await;
    let mut runs = Vec::new();
    for _ in 0..3 {
        let run = service.enqueue("slow").await;
        is(&service, &run, "running").await;
        runs.push(run);
    }
    let parked = service.enqueue("asker").await;
    is(&service, &parked, "awaiting_approval").await;
    service.kill().await;
    for run in [&runs[0], &parked] {
        let id = run.rsplit_once('/').unwrap().1;
        let sql = format!(
            "UPDATE run_events SET events = replace(events, 'attempt.started', 'from.the_future') \
             WHERE run_id = '{id}'"
        );
        change(&service, &sql).await;
    }
    service.restart().await;
    let failed = is(&service, &runs[0], "failed").await;
    assert_eq!(failed["error"]["code"], "INTERRUPTED", "{failed:#}");
    let message = text(&failed["error"], "message");
    assert!(message.contains("journal cannot be read") && message.contains("from.the_future"));
    readable_events_are_shown(&service, &runs[0]).await;
    for run in &runs[1..] {
        let resumed = format!("{run}/events?limit=200");
        let is_resumed = |page: &Value| page.to_string().contains("run.resumed");
        service.until(&resumed, is_resumed).await;
        service.post(&format!("{run}/cancel"), &json!({})).await;
        is(&service, run, "cancelled").await;
    }
    let cancel = service.post(&format!("{parked}/cancel"), &json!({})).await;
    assert_eq!(cancel.status, 202, "{:#}", cancel.body);
    let failed = is(&service, &parked, "failed").await;
    assert_eq!(failed["error"]["code"], "INTERRUPTED", "{failed:#}");
}

/// Its events but the one that cannot be read.
async fn readable_events_are_shown(service: &Service, run: &str) {
    let (mut seen, mut refused, mut after) = (Vec::new(), 0, 0);
    loop {
        let page = service.get(&format!("{run}/events?after={after}")).await;
        if page.status == 500 {
            assert_eq!(page.body["code"], "JOURNAL_UNREADABLE", "{:#}", page.body);
            let told = format!("Event {} of the run", after + 1);
            assert!(text(&page.body, "detail").starts_with(&told), "{:#}", page.body);
            (refused, after) = (refused + 1, after + 1);
            continue;
        }
        let events = page.body["data"].as_array().unwrap();
        seen.extend(events.iter().map(|event| text(event, "type").to_owned()));
        after += i64::try_from(events.len()).unwrap();
        if page.body["next_cursor"].is_null() {
            break;
        }
    }
    assert_eq!((refused, &*seen[seen.len() - 1]), (1, "run.failed"), "{seen:?}");
    let stream = service.request(Method::GET, &format!("{run}/events"));
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    let stream = stream.text().await.unwrap();
    for kind in seen {
        assert!(stream.contains(&format!("event: {kind}\n")), "{kind}: {stream}");
    }
    assert!(stream.contains("cannot be read\n"), "{stream}");
}

/// One run kills its process each time it goes on; beside it, others wait for their model.
async fn a_run_that_crashes_its_replica_takes_no_other_with_it(db: Db) {
    let setup = Setup::new().config("[runtime]\nlease = \"2s\"\nmax_crashes = 3");
    let slowly = "steps: [{delay_ms: 300, text: done}]";
    let poison = SLOW.replace("scripted/slow", "scripted/poison");
    let setup = setup.agent("poison", &poison).scenario("poison", WAITING);
    let mut service = setup.agent("slow", SLOW).scenario("slow", slowly).start(db).await;
    for _ in 0..rounds(1) {
        one_run_crashes_its_replica(&mut service).await;
    }
}

async fn one_run_crashes_its_replica(service: &mut Service) {
    let guilty = service.enqueue("poison").await;
    is(service, &guilty, "running").await;
    let mut innocent = Vec::new();
    for _ in 0..8 {
        innocent.push(service.enqueue("slow").await);
    }
    // It kills whenever it is driven, and only then.
    let mut resumed = 0;
    while resumed < 6 {
        let run = service.get(&guilty).await.body;
        if run["status"] == "failed" {
            break;
        }
        service.kill().await;
        service.restart().await;
        resumed += 1;
        let driven = format!("{guilty}/events?limit=200");
        let is_driven = |page: &Value| {
            let events = page["data"].as_array().unwrap();
            let resumptions = events.iter().filter(|event| event["type"] == "run.resumed").count();
            resumptions >= resumed || page.to_string().contains("run.failed")
        };
        service.until(&driven, is_driven).await;
    }
    let failed = is(service, &guilty, "failed").await;
    assert_eq!((failed["error"]["code"].as_str(), resumed), (Some("INTERRUPTED"), 3), "{failed:#}");
    for run in &innocent {
        let done = service.until(run, |run| run["finished_at"].is_string()).await;
        assert_eq!(done["status"], "completed", "{done:#}");
    }
}

/// Two crashes in one model call: from then on each may be what crashes the process.
#[tokio::test]
async fn runs_that_wait_to_be_driven_alone_lose_no_time() {
    let bounded = format!("{SLOW}governance: {{budget: {{max_duration_seconds: 20}}}}\n");
    let setup = Setup::new().agent("slow", &bounded);
    let slowly = "steps: [{delay_ms: 3000, text: done}]";
    let mut service = setup.scenario("slow", slowly).start(Db::Sqlite).await;
    let mut runs = Vec::new();
    for _ in 0..8 {
        runs.push(service.enqueue("slow").await);
    }
    for run in &runs {
        is(&service, run, "running").await;
    }
    for resumptions in 1..=2 {
        service.kill().await;
        service.restart().await;
        let resumed = |page: &Value| page.to_string().matches("run.resumed").count();
        if resumptions == 1 {
            for run in &runs {
                service.until(&format!("{run}/events?limit=200"), |page| resumed(page) == 1).await;
            }
        }
    }
    for run in &runs {
        let done = service.get(&format!("{run}/wait?timeout=300")).await.body;
        assert_eq!(
            done["status"], "completed",
            "one after the other takes twenty-four seconds: {done:#}"
        );
    }
}

async fn tenants_take_turns_in_the_queue(db: Db) {
    let busy = SLOW.replace("scripted/slow", "scripted/busy");
    let brief = "steps: [{delay_ms: 50, text: done}]";
    let setup = setup().scenario("slow", brief).agent("busy", &busy).scenario("busy", WAITING);
    let mut service = setup.config(BUSY).start(db).await;
    let busy = service.enqueue("busy").await;
    is(&service, &busy, "running").await;
    let other = json!({"name": "other", "tenant": "other", "scopes": ["admin"]});
    let other = service.post("/v1/keys", &other).await.body["key"].as_str().unwrap().to_owned();
    for _ in 0..100 {
        service.enqueue("slow").await;
    }
    let first = std::mem::replace(&mut service.key, other);
    let only = service.enqueue("slow").await;
    let other = std::mem::replace(&mut service.key, first);
    service.post(&format!("{busy}/cancel"), &json!({})).await;
    let first = std::mem::replace(&mut service.key, other);
    let only = is(&service, &only, "completed").await;
    service.key = first;
    let ended = |run: &Value| text(run, "finished_at").parse::<DateTime<Utc>>().unwrap();
    let all = service.get("/v1/runs?status=completed&agent=slow&limit=200").await.body;
    let before = all["data"].as_array().unwrap().iter().filter(|run| ended(run) < ended(&only));
    let before = before.count();
    assert!(before < 50, "the one run of a tenant waited for {before} of another");
}

const BOUNDED: &str = "[runtime]\nlease = \"2s\"\nqueue_workers = 1\nmax_queued_runs = 10";

/// Starts so many runs at once, at these replicas in turn; how many are queued afterwards.
async fn flooded(replicas: &[&Service], runs: usize) -> usize {
    let requests = replicas.iter().cycle().take(runs).map(|service| {
        let request = service.request(Method::POST, "/v1/agents/slow/invoke-iterative");
        answer(request.header("prefer", "respond-async").json(&json!({})))
    });
    for answer in futures::future::join_all(requests).await {
        let is_told = answer.status == 202 || answer.body["code"] == "OVERLOADED";
        assert!(is_told, "{:#}", answer.body);
    }
    let queued = replicas[0].get("/v1/runs?status=queued&limit=200").await.body;
    queued["data"].as_array().unwrap().len()
}

async fn requests_that_come_at_once_do_not_pass_the_limit_of_the_queue(db: Db) {
    let service = setup().config(BOUNDED).start(db).await;
    let busy = service.enqueue("slow").await;
    is(&service, &busy, "running").await;
    assert_eq!(flooded(&[&service], 40).await, 10);
}

#[tokio::test]
async fn replicas_pass_the_limit_of_the_queue_by_one_each_at_most() {
    let first = setup().config(BOUNDED).start(Db::Postgres).await;
    let second = setup().config(BOUNDED).start_on(first.database_url.clone()).await;
    let replicas = [&first, &second];
    for _ in 0..2 {
        let busy = first.enqueue("slow").await;
        is(&first, &busy, "running").await;
    }
    for _ in 0..3 {
        let queued = flooded(&replicas, 40).await;
        assert!((10..=12).contains(&queued), "{queued}");
    }
}
