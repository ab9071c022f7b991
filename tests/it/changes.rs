//! What runs change in their workspace: patches, and the record of every change, on both stores.
//!
//! With other features. Gate: every path of a patch is judged, deleting asks under `supervised` (here). Budgets:
//! lines and files of a patch are counted before it is applied (here). Crash at any commit: no change
//! goes unmentioned (here). Parked runs: an approved patch is applied once (here). Tenants and scopes:
//! 404 and 403 (here). Retries, cancel, timeout: a call that was given up is listed with unknown
//! counts. Children: their changes are listed at their own run. Other replica: the journal is shared.
//! Streaming: the events carry the changes. Sessions, skills, dry run: nothing of their own. Console:
//! `console_work.rs`; command line: nothing; generated clients have the route from the document.

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    every_change_is_listed_with_its_diff,
    a_patch_is_applied_whole_or_not_at_all,
    the_gate_and_the_budget_judge_all_of_a_patch,
    pages_tenants_and_secrets,
    no_change_is_lost_in_a_crash,
}

const FULL: &str = "{autonomy: full, paths: {write: ['./**'], deny: ['**/.env']}}";

fn with(setup: Setup, governance: &str, calls: &[Value]) -> Setup {
    let agent = format!(
        "model: scripted/worker\ntools: [file_ops]\nenable_double_confirmation: false\nlimits: {{error_threshold: \
         50, max_iterations: 60, max_iterations_per_attempt: 60}}\ngovernance: {governance}\n"
    );
    let call = |arguments: &Value| {
        json!({"tool_calls": [{"tool": "file_ops", "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    setup
        .agent("worker", &agent)
        .scenario("worker", &format!("steps: [{}, {{text: done}}]", steps.join(", ")))
}

async fn changes(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/changes?limit=200", run["run_id"].as_str().unwrap());
    let page = service.get(&path).await;
    assert_eq!(page.status, 200, "{:#}", page.body);
    assert_eq!(page.body["next_cursor"], Value::Null);
    page.body["data"].as_array().unwrap().clone()
}

async fn calls(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

fn workspace(service: &Service, path: &str) -> PathBuf {
    service.dir.path().join("workspace/default").join(path)
}

fn text(service: &Service, path: &str) -> Option<String> {
    std::fs::read_to_string(workspace(service, path)).ok()
}

async fn every_change_is_listed_with_its_diff(db: Db) {
    let long = format!("{}\n", "0123456789".repeat(20)).repeat(500);
    let steps = [
        json!({"operation": "write", "path": "a.txt", "content": "one\ntwo\n"}),
        json!({"operation": "write", "path": "a.txt", "content": "one\n2\n"}),
        json!({"operation": "write", "path": "a.txt", "content": "one\n2\n"}),
        json!({"operation": "append", "path": "a.txt", "content": "three"}),
        json!({"operation": "edit", "path": "a.txt", "old": "one", "new": "1"}),
        json!({"operation": "mkdir", "path": "d"}),
        json!({"operation": "move", "path": "a.txt", "to": "d/b.txt"}),
        json!({"operation": "write", "path": "bytes", "content": "text"}),
        json!({"operation": "write", "path": "long.txt", "content": long}),
        json!({"operation": "delete", "path": "d/b.txt"}),
        json!({"operation": "delete", "path": "nothing"}),
        json!({"operation": "read", "path": "bytes"}),
        json!({"operation": "append", "path": "huge.txt", "content": "end\n"}),
        json!({"operation": "move", "path": "bytes", "to": "long.txt"}),
    ];
    let service = with(Setup::new(), FULL, &steps)
        .file("bytes", "\0\u{1}")
        .file("huge.txt", &"line\n".repeat(400_000))
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let all = changes(&service, &run).await;
    let shown: Vec<Value> = all
        .iter()
        .map(|c| json!([c["path"], c["change"], c["added"], c["removed"], c["truncated"]]))
        .collect();
    let expected = json!([
        ["a.txt", "created", 2, 0, false],
        ["a.txt", "modified", 1, 1, false],
        ["a.txt", "modified", 1, 0, false],
        ["a.txt", "modified", 1, 1, false],
        ["d", "created", 0, 0, false],
        ["d/b.txt", "moved", 0, 0, false],
        ["bytes", "modified", null, null, false],
        ["long.txt", "created", 500, 0, true],
        ["d/b.txt", "deleted", 0, 3, false],
        ["huge.txt", "modified", 1, 0, true],
        ["long.txt", "deleted", 0, 500, true],
        ["long.txt", "moved", 0, 0, false],
    ]);
    assert_eq!(json!(shown), expected);
    assert_eq!(all[1]["diff"], "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,2 @@\n one\n-two\n+2\n");
    assert_eq!(
        all[2]["diff"],
        "--- a/a.txt\n+++ b/a.txt\n@@ -1,2 +1,3 @@\n one\n 2\n+three\n\\ No newline at end of file\n"
    );
    assert_eq!(all[5]["from"], "a.txt");
    for index in [4, 5, 6, 9] {
        assert_eq!(all[index]["diff"], Value::Null, "{:#}", all[index]);
    }
    let diff = all[7]["diff"].as_str().unwrap();
    assert!(diff.len() <= 64 * 1024 && diff.ends_with("0123456789\n"), "{}", diff.len());
    assert!(all.iter().all(|c| c.get("from").is_none() || c["change"] == "moved"));
    let calls = calls(&service, &run).await;
    assert_eq!(all[0]["call_id"], calls[0]["id"]);
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let journal = service.get(&path).await.body;
    let of = |seq: &Value| {
        journal["data"].as_array().unwrap().iter().find(|event| event["seq"] == *seq).unwrap()
    };
    let event = of(&all[0]["seq"]);
    assert_eq!(event["type"], "tool_call.completed");
    assert_eq!(event["data"]["changes"][0]["diff"], all[0]["diff"]);
}

const PATCH: &str = "--- a/one.txt\n+++ b/one.txt\n@@ -1,3 +1,3 @@\n a\n-b\n+B\n c\n--- /dev/null\n+++ b/new/two.txt\n@@ -0,0 +1,2 \
                     @@\n+x\n+y\n--- a/old.txt\n+++ /dev/null\n@@ -1 +0,0 @@\n-gone\n";

async fn a_patch_is_applied_whole_or_not_at_all(db: Db) {
    let misfit = PATCH.replace("-b\n", "-bb\n");
    let exists = PATCH.replace("new/two.txt", "there.txt");
    let leaves = "--- a/../x\n+++ b/../x\n@@ -1 +1 @@\n-a\n+b\n";
    let binary = "--- a/bytes\n+++ b/bytes\n@@ -1 +1 @@\n-a\n+b\n";
    let of = |patch: &str| json!({"operation": "patch", "patch": patch});
    let steps = [
        of(&misfit),
        of(&exists),
        of(&PATCH.replace("-gone", "-gone\n-more").replace("@@ -1 +0", "@@ -1,2 +0")),
        of(leaves),
        of(binary),
        of("no patch"),
        of("--- a/missing\n+++ b/missing\n@@ -1 +1 @@\n-a\n+b\n"),
        of(PATCH),
        of(PATCH),
    ];
    let service = with(Setup::new(), FULL, &steps)
        .file("one.txt", "a\nb\nc\n")
        .file("old.txt", "gone\n")
        .file("there.txt", "here\n")
        .file("bytes", "\0")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let calls = calls(&service, &run).await;
    let reasons = [
        "hunk 1 of \"one.txt\" does not fit: at line 2 the file has \"b\", the hunk \"bb\"",
        "\"there.txt\" exists already",
        "hunk 1 of \"old.txt\" does not fit: the file ends with line 1",
        "leaves the workspace",
        "is a binary file",
        "line 1 of the patch is \"no patch\"",
        "\"missing\" does not exist",
    ];
    for (call, reason) in calls.iter().zip(reasons) {
        let result = call["result"].as_str().unwrap();
        assert!(result.contains(reason), "{reason}: {result}");
        assert_eq!(call["is_error"], true);
    }
    let done = "Changed one.txt.\nDeleted old.txt.\nCreated new/two.txt.";
    assert_eq!(calls[7]["result"], done, "{:#}", calls[7]);
    assert_eq!(calls[8]["is_error"], true, "it does not fit twice: {:#}", calls[8]);
    assert_eq!(text(&service, "one.txt").as_deref(), Some("a\nB\nc\n"));
    assert_eq!(text(&service, "new/two.txt").as_deref(), Some("x\ny\n"));
    assert_eq!(text(&service, "old.txt"), None);
    assert_eq!(text(&service, "there.txt").as_deref(), Some("here\n"));
    let shown: Vec<Value> = changes(&service, &run)
        .await
        .iter()
        .map(|c| json!([c["path"], c["change"], c["added"], c["removed"]]))
        .collect();
    assert_eq!(
        json!(shown),
        json!([
            ["one.txt", "modified", 1, 1],
            ["old.txt", "deleted", 0, 1],
            ["new/two.txt", "created", 2, 0]
        ])
    );
    let files = std::fs::read_dir(workspace(&service, "")).unwrap();
    let names: Vec<String> =
        files.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(names.iter().all(|name| !name.starts_with(".toolloop-")), "{names:?}");
}

async fn the_gate_and_the_budget_judge_all_of_a_patch(db: Db) {
    let add = |path: &str, lines: usize| {
        format!("--- /dev/null\n+++ b/{path}\n@@ -0,0 +1,{lines} @@\n{}", "+x\n".repeat(lines))
    };
    let of = |patch: &str| json!({"operation": "patch", "patch": patch});
    let denied = format!("{}{}", add("fine.txt", 1), add("sub/.env", 1));
    let narrow = "{autonomy: full, paths: {write: ['./**'], deny: ['**/.env']}, budget: {max_files_modified: 2, max_lines_changed: 10}}";
    let service = with(
        Setup::new(),
        narrow,
        &[
            of(&denied),
            of(&format!("{}{}", add("a.txt", 4), add("b.txt", 5))),
            of(&add("a2.txt", 1)),
        ],
    )
    .agent(
        "careful",
        "model: scripted/careful\ntools: [file_ops]\nenable_double_confirmation: false\ngovernance: {paths: {write: ['./**']}}\n",
    )
    .scenario(
        "careful",
        &format!(
            "steps: [{}, {{text: done}}]",
            json!({"tool_calls": [{"tool": "file_ops", "arguments": of(PATCH)}]})
        ),
    )
    .file("one.txt", "a\nb\nc\n")
    .file("old.txt", "gone\n")
    .start(db)
    .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["termination_reason"], "budget_exceeded", "{run:#}");
    let calls = calls(&service, &run).await;
    let reason = calls[0]["reason"].as_str().unwrap();
    assert!(reason.contains("sub/.env") && reason.contains("**/.env"), "{reason}");
    assert_eq!(text(&service, "fine.txt"), None);
    assert_eq!(text(&service, "a.txt").map(|t| t.len()), Some(8));
    assert_eq!(text(&service, "a2.txt"), None);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let used = service.get(&path).await.body["budget"]["used"].clone();
    assert_eq!((&used["files_modified"], &used["lines_changed"]), (&json!(2), &json!(9)), "{used}");

    let path = service.enqueue("careful").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    assert_eq!(text(&service, "old.txt").as_deref(), Some("gone\n"));
    let call = parked["pending"][0]["call_id"].as_str().unwrap();
    service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    assert_eq!(changes(&service, &run).await.len(), 3);
    assert_eq!(text(&service, "old.txt"), None);
}

async fn pages_tenants_and_secrets(db: Db) {
    let steps: Vec<Value> = (0..5)
        .map(|n| json!({"operation": "write", "path": format!("f{n}"), "content": format!("password=hunter2{n}\n")}))
        .collect();
    let service = with(Setup::new(), FULL, &steps).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let id = run["run_id"].as_str().unwrap();
    let mut seen = Vec::new();
    let mut cursor = String::new();
    loop {
        let page = service.get(&format!("/v1/runs/{id}/changes?limit=2{cursor}")).await.body;
        let data = page["data"].as_array().unwrap();
        assert!((1..=2).contains(&data.len()), "{page:#}");
        seen.extend(data.iter().map(|change| change["path"].as_str().unwrap().to_owned()));
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    assert_eq!(seen, ["f0", "f1", "f2", "f3", "f4"]);
    let all = changes(&service, &run).await;
    assert!(all[0]["diff"].as_str().unwrap().contains("+password=[redacted]"), "{:#}", all[0]);
    assert_eq!(text(&service, "f0").as_deref(), Some("password=hunter20\n"));

    let path = format!("/v1/runs/{id}/changes");
    for (key, status) in [
        (json!({"name": "x", "tenant": "other", "scopes": ["runs:read"]}), 404),
        (json!({"name": "x", "scopes": ["agents:read"]}), 403),
    ] {
        let key = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
        let asked = answer(service.http.get(service.url(&path)).bearer_auth(&key)).await;
        assert_eq!(asked.status, status, "{:#}", asked.body);
    }
    for (path, status) in [
        ("/v1/runs/00000000-0000-7000-8000-000000000000/changes".to_owned(), 404),
        (format!("{path}?limit=0"), 400),
        (format!("{path}?cursor=x"), 400),
        (format!("{path}?colour=red"), 400),
    ] {
        assert_eq!(service.get(&path).await.status, status, "{path}");
    }
}

/// Wherever the service dies: what is in the workspace is in the list, known or unknown.
async fn no_change_is_lost_in_a_crash(db: Db) {
    let agent = "model: scripted/worker\ntools: [file_ops]\nenable_double_confirmation: false\ngovernance: {autonomy: \
                 full, paths: {write: ['./**']}}\ninputs: {type: object, properties: {n: {type: string}}}\n";
    let steps = r#"steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: "w{{ inputs.n }}", content: "written\n"}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: "a{{ inputs.n }}", content: "appended\n"}}]
  - text: done
"#;
    let mut service = Setup::new()
        .agent("worker", agent)
        .scenario("worker", steps)
        .config("[runtime]\nlease = \"2s\"")
        .start(db)
        .await;
    let (mut deaths, mut unseen) = (0, 0);
    let mut place = 0;
    // What is committed together differs from time to time, and with it what a death can hide.
    for nth in 1..120 {
        place += 1;
        service.kill().await;
        service.restart_to_crash(&format!("before_commit:{place}")).await;
        let id = uuid::Uuid::from_u128((0x7000 << 64) | nth).to_string();
        let body = json!({"run_id": id, "inputs": {"n": nth.to_string()}});
        let mut accepted = false;
        let mut died = false;
        let run = loop {
            if service.is_dead() {
                died = true;
                service.restart().await;
            }
            if !accepted {
                let path = "/v1/agents/worker/invoke-iterative";
                let request = service.request(reqwest::Method::POST, path).json(&body);
                let request = request.header("Prefer", "respond-async");
                let sent = request.header("Idempotency-Key", &id).send().await;
                accepted = sent.is_ok_and(|answer| answer.status().is_success());
                continue;
            }
            let path = format!("/v1/runs/{id}");
            let Ok(sent) = service.request(reqwest::Method::GET, &path).send().await else {
                continue;
            };
            let run: Value = sent.json().await.unwrap_or_default();
            for pending in run["pending"].as_array().into_iter().flatten() {
                let call = pending["call_id"].as_str().unwrap();
                let is_there = text(&service, &format!("a{nth}")).is_some();
                let outcome = if is_there { "happened" } else { "did_not_happen" };
                let path = format!("{path}/tool-calls/{call}/resolve");
                let request = service.request(reqwest::Method::POST, &path);
                let _ = request.json(&json!({ "outcome": outcome })).send().await;
            }
            if run["status"] == "completed" {
                break run;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        };
        let all = changes(&service, &run).await;
        for path in [format!("w{nth}"), format!("a{nth}")] {
            assert!(text(&service, &path).is_some(), "{nth}: {path}");
            let listed: Vec<&Value> = all.iter().filter(|c| c["path"] == *path).collect();
            assert!(!listed.is_empty(), "{nth}: {path} is not listed: {all:#?}");
            unseen += listed.iter().filter(|c| c["added"].is_null()).count();
        }
        deaths += usize::from(died);
        match (died, unseen) {
            (true, _) => {}
            (false, 0 | 1) => place = 0,
            (false, _) => break,
        }
    }
    assert!(deaths >= 3 && unseen >= 2, "{deaths} deaths, {unseen} changes that were not seen");
}
