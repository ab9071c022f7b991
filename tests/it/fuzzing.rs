//! schemathesis over real HTTP: what it makes of the document must be answered as the document
//! says, and never with a 5xx. `tests/clients/python/schemathesis.toml` says what is checked.
//!
//! `TOOLLOOP_FUZZ_SECONDS=600 cargo test --test it fuzzing -- --include-ignored` takes longer, on
//! both stores.

use std::fs;
use std::time::Duration;

use serde_json::Value;
use uuid::Uuid;

use crate::installing::Workshop;
use crate::service::{ADMIN_KEY, Db, Service, Setup};

/// Runs end by themselves and at once, so that nothing that is asked for them blocks.
async fn service(db: Db) -> Service {
    let reader = "
model: scripted/reader
instructions: Read.
tools: [file_ops]
output: {schema: {type: object, properties: {text: {type: string}}, required: [text]}}
";
    let reads = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: note.txt}}]
  - tool_calls: [{tool: output, arguments: {text: read}}]
";
    Setup::new()
        .agent("reader", reader)
        .scenario("reader", reads)
        .file("note.txt", "hello")
        .agent(
            "quick",
            "model: scripted/quick\ninstructions: Answer.\nenable_double_confirmation: false",
        )
        .scenario("quick", "steps: [{text: done}]")
        .config("[governance]\nrate_limit_per_minute = 1000000000\nrate_limit_burst = 1000000000")
        .start(db)
        .await
}

async fn everything_is_answered_as_documented(db: Db) {
    // A short run is always the same, so that what it finds is new; a long one goes where none has
    // been.
    let (mut seconds, seed) = match std::env::var("TOOLLOOP_FUZZ_SECONDS") {
        Ok(seconds) => (seconds.parse().unwrap(), Uuid::new_v4().as_u128() >> 96),
        Err(_) => (30, 1),
    };
    let workshop = Workshop::python().await;
    let service = service(db).await;
    let (report, said) = loop {
        let (report, said) = fuzzed(&workshop, &service, seconds, seed).await;
        let is_whole = report["operations"]["tested"] == report["operations"]["total"];
        let is_enough = report["test_cases"]["generated"].as_u64().unwrap() > 200;
        // A slow machine does not come to all operations in half a minute.
        if (is_whole && is_enough) || seconds > 300 {
            break (report, said);
        }
        seconds *= 4;
    };
    assert_eq!(report["operations"]["tested"], report["operations"]["total"], "{said}");
    assert!(report["test_cases"]["generated"].as_u64().unwrap() > 200, "{said}");
    println!("{db:?}, seed {seed}: {}", report["test_cases"]);
}

/// Asks for so many seconds; the report of that, and what was printed.
async fn fuzzed(
    workshop: &Workshop,
    service: &Service,
    seconds: u64,
    seed: u128,
) -> (Value, String) {
    let (url, time, seed) = (service.url(""), u64::to_string(&seconds), seed.to_string());
    let document = format!("{url}/openapi.json");
    let _ = fs::remove_file(workshop.dir.join("report.json"));
    let arguments =
        ["--config-file", "schemathesis.toml", "--no-color", "run", &document, "--origin", &url];
    let budget = [
        "--max-time",
        &time,
        "--max-examples",
        "1000",
        "--seed",
        &seed,
        "--report-json-path",
        "report.json",
    ];
    let patience = Duration::from_secs(2 * seconds + 600);
    let arguments = [&arguments[..], &budget].concat();
    let environment = [("TOOLLOOP_KEY", ADMIN_KEY)];
    let (passed, said) =
        workshop.outcome(patience, "venv/bin/schemathesis", &arguments, &environment).await;
    assert!(passed, "{said}\n{}", service.log());
    let report = fs::read(workshop.dir.join("report.json")).unwrap();
    (serde_json::from_slice(&report).unwrap(), said)
}

#[tokio::test]
async fn everything_is_answered_as_documented_on_sqlite() {
    everything_is_answered_as_documented(Db::Sqlite).await;
}

#[tokio::test]
#[ignore = "half a minute that says little more than the one on SQLite; see above"]
async fn everything_is_answered_as_documented_on_postgres() {
    everything_is_answered_as_documented(Db::Postgres).await;
}
