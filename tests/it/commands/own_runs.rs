//! Commands that execute a run in their own process: that run, what it starts, and no other.

use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection, SqliteConnection};
use tokio::sync::watch;

use super::{ECHO, directory, toolloop};
use crate::approvals::text;
use crate::mock_model::{MockModel, Reply};
use crate::postgres_cluster;
use crate::service::{Db, Setup, Signal, command, on_both_stores};

on_both_stores!(a_command_executes_no_run_of_others);

const SLOW: &str = "model: scripted/slow\nenable_double_confirmation: false\n";

/// A run that was begun is in the queue while there is no service.
async fn a_command_executes_no_run_of_others(db: Db) {
    let mut service = Setup::new()
        .agent("slow", SLOW)
        .scenario("slow", "steps: [{delay_ms: 600000, text: late}]")
        .agent("brief", &SLOW.replace("slow", "brief"))
        .scenario("brief", "steps: [{delay_ms: 2500, text: done}]")
        .config("[server]\nshutdown_grace = \"0s\"")
        .start(db)
        .await;
    let run = service.enqueue("slow").await;
    let events = format!("{run}/events?limit=200");
    service.until(&events, |events| events.to_string().contains("iteration.started")).await;
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0), "{}", service.log());
    let here = ["invoke", "brief", "--database-url", &service.database_url];
    let done = toolloop(service.dir.path(), &here).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    service.write("scenarios/slow.yaml", "steps: [{text: late}]");
    service.restart().await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    let events = service.get(&events).await.body;
    let resumed = events["data"].as_array().unwrap().iter();
    let resumed = resumed.filter(|event| event["type"] == "run.resumed").count();
    assert_eq!(resumed, 1, "by the service alone: {events:#}");
}

const ASKER: &str = "
name: asker
model: scripted/asker
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: read-only, paths: {read: ['**']}, tool_policies: {file_ops: ask}}
";
const ASKS: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]
  - text: listed
";
const READER: &str = "
name: reader
model: mock/reader
enable_double_confirmation: false
governance: {autonomy: read-only}
";
const BOTH: &str = "
name: both
model: scripted/both
tools: ['agent:asker', 'agent:reader']
parallel_tool_calls: true
enable_double_confirmation: false
";
const DELEGATES: &str = "
steps:
  - tool_calls: [{tool: 'agent:asker', arguments: {}}, {tool: 'agent:reader', arguments: {}}]
  - text: '{{ results | join(\" / \") }}'
";

/// The parent goes on with the other child meanwhile.
#[tokio::test]
async fn a_child_that_is_approved_elsewhere_goes_on_in_the_process_of_its_parent() {
    let mock = MockModel::start().await;
    let (answers, held) = watch::channel(false);
    mock.script([Reply::Held(held, Box::new(Reply::text("read")))]);
    let provider =
        format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url());
    let dir = directory(&[
        ("toolloop.toml", provider.as_str()),
        ("agents/asker.yaml", ASKER),
        ("scenarios/asker.yaml", ASKS),
        ("agents/reader.yaml", READER),
        ("agents/both.yaml", BOTH),
        ("scenarios/both.yaml", DELEGATES),
    ]);
    let url = postgres_cluster::fresh_database().await;
    let invoke = command(dir.path()).args(["invoke", "both", "--database-url", &url]).spawn();
    let invoked = tokio::spawn(invoke.unwrap().wait_with_output());
    let here = async |arguments: &[&str]| {
        toolloop(dir.path(), &[arguments, &["--database-url", &url]].concat()).await
    };
    let asker = async |is_so: fn(&Value) -> bool| {
        for _ in 0..600 {
            let listed = here(&["runs", "list", "--agent", "asker", "--json"]).await;
            let listed: Value = serde_json::from_str(&listed.out).unwrap();
            if is_so(&listed["data"][0]) {
                return listed["data"][0].clone();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        panic!("the child never came so far");
    };
    let waiting = asker(|run| run["pending"][0]["call_id"].is_string()).await;
    let (run, call) = (text(&waiting, "run_id"), text(&waiting["pending"][0], "call_id"));
    let approved = here(&["runs", "approve", run, call]).await;
    assert_eq!(approved.code, Some(0), "{}", approved.err);
    asker(|run| run["status"] == "completed").await;
    answers.send(true).unwrap();
    let done = invoked.await.unwrap().unwrap();
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(done.status.code(), Some(0), "{said}");
    let done: Value = serde_json::from_slice(&done.stdout).unwrap();
    assert_eq!(done["output"]["result"], "listed / read", "{done:#}");
}

#[tokio::test]
async fn a_dry_run_registers_no_replica() {
    let dir =
        directory(&[("agents/echo.yaml", ECHO), ("scenarios/echo.yaml", "steps: [{text: hi}]")]);
    let dry = ["invoke", "echo", "--input", "word=x", "--dry-run"];
    let dry = toolloop(dir.path(), &dry).await;
    assert_eq!(dry.code, Some(0), "{}", dry.err);
    let url = format!("sqlite://{}", dir.path().join("toolloop.db").display());
    let mut database = SqliteConnection::connect(&url).await.unwrap();
    let replicas: i64 =
        sqlx::query_scalar("SELECT count(*) FROM replicas").fetch_one(&mut database).await.unwrap();
    assert_eq!(replicas, 0);
}
