//! A process on SQLite is killed at any moment while it writes: its file is sound, and what was
//! acknowledged is in it.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use sqlx::{Connection, SqliteConnection};
use tempfile::TempDir;

use super::site::until_completed;
use crate::crashes::{Spent, until_balanced};
use crate::fault_rounds::rounds;
use crate::mock_model::pseudo_random;
use crate::service::{ADMIN_KEY, Db, Service, Setup};

const CALLERS: usize = 4;

const READER: &str = "
model: scripted/reader
instructions: Read.
tools: [file_ops]
enable_double_confirmation: false
";

const READING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - text: done
";

/// Those who start runs, and the runs that they were told of.
#[derive(Clone, Default)]
struct Callers {
    address: Arc<Mutex<String>>,
    accepted: Arc<Mutex<BTreeSet<String>>>,
    is_over: Arc<AtomicBool>,
}

impl Callers {
    fn told(&self) -> BTreeSet<String> {
        self.accepted.lock().clone()
    }

    /// Waits until they were told of so many more.
    async fn until_told(&self, more: usize) {
        let all = self.accepted.lock().len() + more;
        let told = async {
            while self.accepted.lock().len() < all {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let told = tokio::time::timeout(Duration::from_mins(1), told).await;
        assert!(told.is_ok(), "no run was accepted");
    }

    async fn call(self) {
        let http = reqwest::Client::new();
        while !self.is_over.load(Ordering::Relaxed) {
            let url = format!("{}/v1/agents/reader/invoke-iterative", self.address.lock());
            let request = http.post(url).bearer_auth(ADMIN_KEY).header("prefer", "respond-async");
            if let Ok(answer) = request.json(&json!({})).send().await {
                assert_eq!(answer.status(), 202);
                // It may die before it has told which one.
                if let Ok(run) = answer.json::<Value>().await {
                    self.accepted.lock().insert(run["run_id"].as_str().unwrap().to_owned());
                }
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_whose_writer_is_killed_is_sound_and_complete() {
    let setup = Setup::new().agent("reader", READER).scenario("reader", READING);
    let setup = setup.file("notes.txt", "seventeen\n").config("[runtime]\nmax_crashes = 100");
    let mut service = setup.start(Db::Sqlite).await;
    let callers = Callers::default();
    *callers.address.lock() = service.url("");
    let calls: Vec<_> = (0..CALLERS).map(|_| tokio::spawn(callers.clone().call())).collect();
    let mut deaths = 0;
    for round in 0..rounds(8) {
        callers.until_told(CALLERS).await;
        let moment = pseudo_random(round as u64) % 50_000;
        tokio::time::sleep(Duration::from_micros(moment)).await;
        service.kill().await;
        let told = callers.told();
        is_sound_and_has(&service, &told).await;
        deaths += 1;
        service.restart().await;
        *callers.address.lock() = service.url("");
    }
    callers.is_over.store(true, Ordering::Relaxed);
    for call in calls {
        call.await.unwrap();
    }
    let told = callers.told();
    for run in &told {
        until_completed(&service, &format!("/v1/runs/{run}")).await;
    }
    println!("{deaths} deaths, {} runs were accepted, all ended", told.len());
    assert!(told.len() >= deaths * CALLERS);
    until_balanced(&service, Spent::AtLeast).await;
}

/// Looks at a copy: the file itself is left to the next process as it is.
async fn is_sound_and_has(service: &Service, runs: &BTreeSet<String>) {
    let copy = TempDir::new().unwrap();
    for file in ["toolloop.db", "toolloop.db-wal"] {
        let file_of_service = service.dir.path().join(file);
        if file_of_service.exists() {
            std::fs::copy(file_of_service, copy.path().join(file)).unwrap();
        }
    }
    let url = format!("sqlite://{}", copy.path().join("toolloop.db").display());
    let mut database = SqliteConnection::connect(&url).await.unwrap();
    let verdict: Vec<String> =
        sqlx::query_scalar("PRAGMA integrity_check").fetch_all(&mut database).await.unwrap();
    assert_eq!(verdict, ["ok"]);
    let stored: Vec<String> =
        sqlx::query_scalar("SELECT id FROM runs").fetch_all(&mut database).await.unwrap();
    let stored: BTreeSet<String> = stored.into_iter().collect();
    assert!(runs.is_subset(&stored), "lost: {:?}", runs.difference(&stored));
}
