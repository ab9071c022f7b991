//! A process dies when it has the answer of a model and has not stored it, or has not asked for it yet.

use std::time::Duration;

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};
use tokio::sync::watch;

use super::site::{answers, counted, id_of, until_answered, until_completed};
use crate::crashes::{Spent, until_balanced};
use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    an_answer_that_a_death_loses_is_asked_for_once_more_and_charged,
    an_answer_that_was_not_asked_for_is_not_charged,
}

const RUNS: usize = 8;

const ASKER: &str = "
model: mock/any
models: ['mock/*']
instructions: Answer.
enable_double_confirmation: false
";

/// Nothing of a journal can be stored in the meantime.
enum Lock {
    Sqlite(SqliteConnection),
    Postgres(PgConnection),
}

impl Lock {
    async fn take(database_url: &str) -> Self {
        if database_url.starts_with("postgres") {
            let mut database = PgConnection::connect(database_url).await.unwrap();
            let lock = "BEGIN; LOCK TABLE run_events IN EXCLUSIVE MODE";
            sqlx::raw_sql(lock).execute(&mut database).await.unwrap();
            return Self::Postgres(database);
        }
        let mut database = SqliteConnection::connect(database_url).await.unwrap();
        sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut database).await.unwrap();
        Self::Sqlite(database)
    }

    /// When the process is dead: what it sent, and what waits for the lock, is not stored.
    async fn release(self, database_url: &str) {
        const END: &str = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
            WHERE datname = current_database() AND wait_event_type = 'Lock'";
        match self {
            Self::Sqlite(mut database) => {
                sqlx::raw_sql("ROLLBACK").execute(&mut database).await.unwrap();
            }
            Self::Postgres(mut database) => {
                while counted(database_url, END).await > 0 {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                sqlx::raw_sql("ROLLBACK").execute(&mut database).await.unwrap();
            }
        }
    }
}

async fn an_answer_that_a_death_loses_is_asked_for_once_more_and_charged(db: Db) {
    let mock = MockModel::start().await;
    let models = format!(
        "[runtime]\nlease = \"2s\"\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"",
        mock.base_url()
    );
    let mut service = Setup::new().agent("asker", ASKER).config(&models).start(db).await;
    mock.always(Reply::text("done"));
    // From the queue, so that its answer is streamed, as those of resumed runs are.
    let plain = service.enqueue("asker").await;
    let plain = until_completed(&service, &plain).await;
    let mut lost = 0;
    for _ in 0..rounds(1) {
        let asked = mock.counts().started;
        let runs = lose_answers(&mut service, &mock).await;
        for run in &runs {
            let ended = until_completed(&service, run).await;
            let rows = service.get(&format!("{run}/iterations")).await.body["data"].clone();
            let rows = rows.as_array().unwrap();
            assert_eq!((rows.len(), &rows[0]["repeated"]), (1, &json!(true)), "{rows:#?}");
            let plain = plain["tokens_used"].as_u64().unwrap();
            assert_eq!(ended["tokens_used"], json!(2 * plain), "{ended:#}");
            lost += 1;
        }
        assert_eq!(mock.counts().started, asked + 2 * runs.len(), "one more call for each");
    }
    println!("{db:?}: {lost} answers were lost, each asked for once more");
    assert!(lost >= RUNS);
    until_balanced(&service, Spent::AtLeast).await;
}

async fn an_answer_that_was_not_asked_for_is_not_charged(db: Db) {
    let mock = MockModel::start().await;
    let models = format!(
        "[runtime]\nlease = \"2s\"\n[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n\
         api_key_env = \"PATH\"\nmax_concurrency = 1",
        mock.base_url()
    );
    let mut service = Setup::new().agent("asker", ASKER).config(&models).start(db).await;
    let (_held, told) = watch::channel(false);
    mock.reply_by(move |_| Reply::Held(told.clone(), Box::new(Reply::text("done"))));
    let asked = service.enqueue("asker").await;
    let has = |what: &'static str| move |events: &Value| events.to_string().contains(what);
    service.until(&format!("{asked}/events"), has("iteration.started")).await;
    mock.wait_for_requests(1).await;
    let waiting = service.enqueue("asker").await; // for the place of the other
    service.until(&format!("{waiting}/events"), has("attempt.started")).await;
    service.kill().await;
    mock.always(Reply::text("done"));
    service.restart().await;
    for (run, repeated) in [(asked, true), (waiting, false)] {
        until_completed(&service, &run).await;
        let rows = service.get(&format!("{run}/iterations")).await.body["data"].clone();
        assert_eq!(rows[0]["repeated"], json!(repeated), "{rows:#}");
    }
}

/// Kills the process while it has answers that it cannot store, and starts it again; the runs.
async fn lose_answers(service: &mut Service, mock: &MockModel) -> Vec<String> {
    let (tell, told) = watch::channel(false);
    mock.reply_by(move |_| Reply::Held(told.clone(), Box::new(Reply::text("done"))));
    let (asked, tried) = (mock.counts().started, answers(service).await);
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        runs.push(service.enqueue("asker").await);
    }
    mock.wait_for_requests(asked + RUNS).await;
    for run in &runs {
        let begun = |events: &Value| events.to_string().contains("iteration.started");
        service.until(&format!("{run}/events"), begun).await;
    }
    let lock = Lock::take(&service.database_url).await;
    tell.send(true).unwrap();
    until_answered(service, tried + RUNS).await;
    service.kill().await;
    lock.release(&service.database_url).await;
    let ids: Vec<String> = runs.iter().map(|run| format!("'{}'", id_of(run))).collect();
    let stored = format!(
        "SELECT count(*) FROM run_events WHERE events LIKE '%model.responded%' AND run_id IN ({})",
        ids.join(", ")
    );
    assert_eq!(counted(&service.database_url, &stored).await, 0, "none of the answers was stored");
    service.restart().await;
    runs
}
