//! Arguments that a definition declares to be paths (`tool_options.<name>.paths`), on both stores.
//!
//! | together with | what holds |
//! |---|---|
//! | children, handoffs | what a parent denies holds for the arguments of its children's tools (here) |
//! | parked runs | the actions are judged again when an approval comes (`approvals.rs`) |
//! | budgets | a path that a call may write counts as a modified file (here) |
//! | crash, other replica, policy replay | the actions stand in `tool_call.started` (here), as all |
//! | interceptors | `reads` and `writes` have the paths (`interception.rs`: they are the actions) |
//! | skills, sessions, tenants, streaming, dry run, console, command line, clients | nothing |
//! | client tools | have no options of the definition |

use serde_json::{Value, json};

use crate::script_tools::{events, python, with};
use crate::service::{Db, Setup, Signal, on_both_stores};

on_both_stores! {
    arguments_that_are_paths_are_judged_as_paths,
}

const SCHEMA: &str = ", input_schema: {type: object, properties: {file: {}}}";
const OPTIONS: &str = "tool_options: {'script:it/*': {paths: [/file]}}\n";

fn set() -> String {
    let reads = python("reads", "print('read')", &format!(", effect: read{SCHEMA}"));
    let writes = python("writes", "print('written')", &format!(", effect: idempotent{SCHEMA}"));
    format!("tools:\n{reads}{writes}")
}

async fn arguments_that_are_paths_are_judged_as_paths(db: Db) {
    let table = [
        ("reads", json!("a.txt"), None),
        ("reads", json!(["a.txt", "./b/../c.txt"]), None),
        ("reads", Value::Null, None),
        ("reads", json!("secret/x.txt"), Some(("path", "denied by secret/**"))),
        ("reads", json!(["a.txt", "secret"]), Some(("path", "denied by secret/**"))),
        ("reads", json!("link"), Some(("path", "denied by secret/**"))),
        ("reads", json!("../a.txt"), Some(("actions", "leaves the workspace"))),
        ("reads", json!("/etc/passwd"), Some(("actions", "is absolute"))),
        ("reads", json!(7), Some(("actions", "/file must be a path"))),
        ("reads", json!([["a.txt"]]), Some(("actions", "/file must be a path"))),
        ("reads", json!(vec!["a"; 1001]), Some(("actions", "1000 paths"))),
        ("writes", json!("out/new.txt"), None),
        ("writes", json!("a.txt"), Some(("path", "may not be written"))),
    ];
    let names = table.each_ref().map(|(tool, ..)| format!("script:it/{tool}"));
    let calls = names.iter().zip(&table);
    let calls: Vec<(&str, Value)> =
        calls.map(|(name, (_, file, _))| (name.as_str(), json!({"file": file}))).collect();
    let governance = "{autonomy: full, paths: {write: [out/**], deny: [secret/**]}}";
    let agent =
        "model: scripted/once\ntools: ['script:it/reads']\nenable_double_confirmation: false\n";
    let parent = "model: scripted/parent\ntools: ['agent:child']\nenable_double_confirmation: false\n\
                  governance: {autonomy: full, paths: {deny: ['a.*']}}\n";
    let mut service = with(Setup::new(), "['script:it/*']", governance, &calls)
        .agent("child", &format!("{agent}{OPTIONS}governance: {{autonomy: full}}\n"))
        .agent("parent", parent)
        .agent("typo", &format!("{agent}tool_options: {{'script:it/reads': {{paths: [/fiel]}}}}\n"))
        .agent("word", &format!("{agent}tool_options: {{'script:it/reads': {{paths: [file]}}}}\n"))
        .scenario("once", "steps: [{tool_calls: [{tool: 'script:it/reads', arguments: {file: a.txt}}]}, {text: done}]")
        .scenario("parent", "steps: [{tool_calls: [{tool: 'agent:child', arguments: {}}]}, {text: done}]")
        .tools("it", &set())
        .file("a.txt", "a")
        .file("secret/x.txt", "x")
        .start(db)
        .await;
    let worker = service.dir.path().join("agents/worker.yaml");
    let definition = std::fs::read_to_string(&worker).unwrap();
    std::fs::write(&worker, format!("{definition}{OPTIONS}")).unwrap();
    std::os::unix::fs::symlink("secret/x.txt", service.dir.path().join("workspace/default/link"))
        .unwrap();
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    service.restart().await;

    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let rows = service.get(&format!("{path}/tool-calls?limit=200")).await.body["data"].clone();
    assert_eq!(rows.as_array().map(Vec::len), Some(table.len()), "{rows:#}");
    let blocked = events(&service, &run, "tool_call.blocked").await;
    let mut blocked = blocked.iter();
    for (row, (tool, file, why)) in rows.as_array().unwrap().iter().zip(&table) {
        let Some((rule, reason)) = why else {
            assert_eq!(row["decision"], "allowed", "{tool} {file}: {row:#}");
            continue;
        };
        let event = blocked.next().unwrap();
        assert_eq!(event["rule"], *rule, "{tool} {file}: {event:#}");
        assert!(event["reason"].as_str().unwrap().contains(reason), "{tool} {file}: {event:#}");
    }
    assert!(blocked.next().is_none());
    let started = events(&service, &run, "tool_call.started").await;
    let paths = |event: &Value, kind: &str| {
        let actions = event["actions"].as_array().unwrap().iter();
        let those = actions.filter(|action| action["kind"] == kind);
        those.map(|action| action["path"].clone()).collect::<Vec<_>>()
    };
    assert_eq!(paths(&started[1], "read"), ["a.txt", "c.txt"], "{:#}", started[1]);
    assert_eq!(paths(started.last().unwrap(), "write"), ["out/new.txt"]);
    let budget = service.get(&path).await.body["budget"]["used"].clone();
    assert_eq!(budget["files_modified"], 1, "{budget:#}");

    let run = service.run("parent", &json!({})).await;
    let child = service.get("/v1/runs?agent=child").await.body["data"][0].clone();
    let blocked = events(&service, &child, "tool_call.blocked").await;
    assert_eq!(blocked[0]["rule"], "path", "{run:#} {blocked:#?}");
    let ready = service.get("/readyz").await.body["definitions"].to_string();
    assert!(ready.contains("tool_options.script:it/reads.paths[0]"), "{ready}");
    assert!(ready.contains("has no argument"), "{ready}");
    assert!(ready.contains("is not a JSON pointer"), "{ready}");
}
