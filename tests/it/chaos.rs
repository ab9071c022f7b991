//! Replicas that are killed, suspended, drained and cut off from their database at random, under
//! load: what was accepted ends, nothing takes effect twice, and no reader misses an event.
//!
//! `TOOLLOOP_CHAOS_SECONDS=600 cargo test --test it chaos -- --nocapture` goes on
//! for that long, from a seed that it prints (`TOOLLOOP_CHAOS_SEED` repeats its decisions; what
//! they meet depends on the machine).
//!
//! With other features: a run has effects of each kind, a child, an approval, a stream that changes replicas,
//! perhaps a cancel; SQLite has one process, PostgreSQL three. Budgets are shared by the tree.
//! Sessions, skills and client tools: `crashes`, which dies at every commit of a run that has them.

mod fleet;
mod ledger;
mod record;

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};

use crate::crashes::{Spent, until_balanced};
use crate::service::{Db, Setup};
use fleet::{Fleet, Fortune};
use ledger::Ledger;
use record::Record;

const LEAD: &str = r#"
model: scripted/lead
tools: ["http:effects/*", file_ops, "agent:helper"]
inputs: {type: object, required: [name], properties: {name: {type: string}}}
enable_double_confirmation: false
governance:
  autonomy: full
  paths: {write: ['./**']}
  budget: {max_total_tokens: 1000000, max_tool_calls: 20, max_files_modified: 2}
"#;

const LEADING: &str = r#"
steps:
  - {delay_ms: 30, tool_calls: [{tool: "http:effects/once", arguments: {name: "{{ inputs.name }}"}}]}
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: "{{ inputs.name }}", content: "one\n"}}]
  - {delay_ms: 30, tool_calls: [{tool: "agent:helper", arguments: {name: "{{ inputs.name }}"}}]}
  - tool_calls: [{tool: "http:effects/again", arguments: {name: "{{ inputs.name }}"}}]
  - {delay_ms: 30, text: done}
"#;

const HELPER: &str = r#"
model: scripted/helper
tools: [file_ops, "http:effects/asked"]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}, tool_policies: {"http:effects/asked": ask}}
"#;

const HELPING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: "{{ inputs.name }}", content: "two\n"}}]
  - {delay_ms: 30, tool_calls: [{tool: "http:effects/asked", arguments: {name: "{{ inputs.name }}"}}]}
  - text: helped
"#;

const TOOLS: &str = "
tools:
  - {name: once, description: Once., method: POST, path: /once, body: {name: '{{ args.name }}'}, input_schema: {type: object}}
  - {name: asked, description: Once after approval., method: POST, path: /asked, body: {name: '{{ args.name }}'}, input_schema: {type: object}}
  - {name: again, description: As often as you like., effect: idempotent, method: POST, path: /again, body: {name: '{{ args.name }}'}, input_schema: {type: object}}
";

fn setup(ledger: &Ledger, workspace: &str) -> Setup {
    let config = format!(
        "[runtime]\nlease = \"2s\"\nmax_crashes = 100\n[tools.workspace]\ndir = \"{workspace}\"\n"
    );
    Setup::new()
        .agent("lead", LEAD)
        .scenario("lead", LEADING)
        .agent("helper", HELPER)
        .scenario("helper", HELPING)
        .tools("effects", &format!("base_url: {}\n{TOOLS}", ledger.url))
        .config(&config)
}

#[tokio::test(flavor = "multi_thread")]
async fn three_replicas_survive_random_faults() {
    survive(Db::Postgres, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_process_survives_random_faults() {
    survive(Db::Sqlite, 1).await;
}

async fn survive(db: Db, replicas: usize) {
    let from_environment = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let seconds = from_environment("TOOLLOOP_CHAOS_SECONDS");
    let seed = from_environment("TOOLLOOP_CHAOS_SEED");
    // A short one always decides the same, so that what it finds is new.
    let seed =
        seed.unwrap_or(if seconds.is_some() { uuid::Uuid::now_v7().as_u64_pair().1 } else { 1 });
    println!("{db:?}: seed {seed}");
    let mut fortune = Fortune(seed);
    let ledger = Arc::new(Ledger::start().await);
    let workspace = tempfile::tempdir().unwrap();
    let dir = workspace.path().display().to_string();
    let mut fleet = Fleet::start(|| setup(&ledger, &dir), db, replicas).await;

    let work = fleet.work(&ledger, workspace.path());
    let stop = tokio::time::Instant::now() + Duration::from_secs(seconds.unwrap_or(12));
    while tokio::time::Instant::now() < stop || fleet.faults().values().sum::<u32>() < 2 {
        fleet.disturb(&mut fortune).await;
    }
    fleet.recover().await;
    let accepted = work.finished().await;
    println!("{db:?}: {} runs, {:?}", accepted.len(), fleet.faults());

    assert!(accepted.len() >= 4, "{} runs", accepted.len());
    let mut wrong = Vec::new();
    for run in &accepted {
        let record = Record::of(fleet.any(), run, &ledger, workspace.path()).await;
        wrong.extend(record.violations());
    }
    assert!(wrong.is_empty(), "seed {seed}: {wrong:#?}\n{}", fleet.logs());
    until_balanced(fleet.any(), Spent::AtLeast).await;
}

type Fault = fn(&mut Record);

/// What is checked would be seen if it happened.
#[test]
fn violations_are_seen() {
    let event = |seq: u64, kind: &str| json!({"seq": seq, "type": kind});
    let good = || Record {
        name: "a".into(),
        run: json!({"status": "completed", "finished_at": "now"}),
        events: vec![event(1, "run.started"), event(2, "run.completed")],
        streamed: Some(vec![1, 2]),
        effects: ["once", "asked", "again"].map(|step| (step.to_owned(), step.to_owned())).to_vec(),
        was_cancelled: false,
        file: "one\ntwo\n".into(),
        open_calls: 0,
        children: vec![json!({"status": "completed"})],
    };
    assert_eq!(good().violations(), Vec::<String>::new());
    let faults: [(&str, Fault); 12] = [
        ("never ended", |record| record.run = json!({"status": "running"})),
        ("failed", |record| record.run["status"] = json!("failed")),
        ("a doubled line", |record| record.file = "one\none\ntwo\n".into()),
        ("a lost line", |record| record.file = "one\n".into()),
        ("a doubled effect", |record| record.effects.push(("once".into(), "other".into()))),
        ("another key", |record| record.effects.push(("again".into(), "other".into()))),
        ("a lost event", |record| drop(record.events.remove(0))),
        ("two ends", |record| record.events.push(json!({"seq": 3, "type": "run.failed"}))),
        ("an event that was not streamed", |record| record.streamed = Some(vec![1])),
        ("two children", |record| record.children.push(Value::Null)),
        ("an unasked cancel", |record| {
            record.run["status"] = json!("cancelled");
            record.events[1]["type"] = json!("run.cancelled");
        }),
        ("a cancel that reached the child alone", |record| {
            record.was_cancelled = true;
            record.children = vec![json!({"status": "cancelled"})];
        }),
    ];
    for (what, fault) in faults {
        let mut record = good();
        fault(&mut record);
        assert!(!record.violations().is_empty(), "{what}");
    }
}
