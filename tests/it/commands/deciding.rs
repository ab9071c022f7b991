//! Deciding at the terminal what a run waits for, of a service elsewhere and of the database here.

use std::time::Duration;

use serde_json::{Value, json};

use super::{directory, toolloop};
use crate::approvals::{ended, file, text};
use crate::client_tools;
use crate::reviews;
use crate::service::{Db, Setup, command};

const EDITOR: &str = "
model: scripted/editor
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}}
";

const EDITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: notes.txt, content: new}}]
  - text: '{{ results[0] }}'
";

#[tokio::test]
async fn a_parked_run_is_approved_over_the_network() {
    let setup =
        Setup::new().agent("editor", EDITOR).scenario("editor", EDITING).file("notes.txt", "old");
    let service = setup.start(Db::Sqlite).await;
    let url = service.url("");
    let remote = async |arguments: &[&str]| {
        toolloop(
            service.dir.path(),
            &[arguments, &["--server", &url, "--key", &service.key]].concat(),
        )
        .await
    };
    let parked = remote(&["invoke", "editor"]).await;
    assert_eq!(parked.code, Some(3), "{}", parked.err);
    let run: Value = serde_json::from_str(&parked.out).unwrap();
    assert_eq!(run["status"], "awaiting_approval");
    let (id, call) = (text(&run, "run_id"), text(&run["pending"][0], "call_id"));
    assert!(parked.err.contains(&format!("toolloop runs approve {id} {call}")), "{}", parked.err);
    let seq = run["pending"][0]["seq"].to_string();
    assert!(parked.err.contains(&format!(" {call} --seq {seq} --server")), "{}", parked.err);
    let shown = remote(&["runs", "show", id]).await;
    assert!(
        shown.out.contains("approval of file_ops") && shown.out.contains(call),
        "{}",
        shown.out
    );

    let wrong = remote(&["runs", "approve", id, call, "--arguments", "[]"]).await;
    assert_eq!(wrong.code, Some(2), "{}", wrong.err);
    let edited = r#"{"operation": "write", "path": "notes.txt", "content": "better"}"#;
    let approve = ["runs", "approve", id, call, "--reason", "fine", "--arguments", edited, "--seq"];
    let of_another = remote(&[&approve[..], &["1"]].concat()).await;
    assert_eq!(of_another.code, Some(1), "{}", of_another.out);
    assert!(of_another.err.contains("Event 1 does not ask about this call"), "{}", of_another.err);
    let approved = remote(&[&approve[..], &[&*seq]].concat()).await;
    assert!(
        approved.code == Some(0) && approved.out.contains("continues"),
        "{}{}",
        approved.out,
        approved.err
    );
    assert_eq!(ended(&service, &format!("/v1/runs/{id}")).await["status"], "completed");
    assert_eq!(file(&service, "notes.txt"), "better");
    let late = remote(&["runs", "deny", id, call]).await;
    assert!(late.code == Some(1) && late.err.contains("already approved"), "{}", late.err);
}

#[tokio::test]
async fn a_parked_run_that_may_not_be_read_ends_the_command() {
    let setup =
        Setup::new().agent("editor", EDITOR).scenario("editor", EDITING).file("notes.txt", "old");
    let service = setup.start(Db::Sqlite).await;
    let body = json!({"name": "starts", "scopes": ["agents:invoke", "tools:execute"]});
    let key = service.post("/v1/keys", &body).await.body["key"].as_str().unwrap().to_owned();
    let url = service.url("");
    let arguments = ["invoke", "editor", "--server", &url, "--key", &key];
    let ends = toolloop(service.dir.path(), &arguments);
    let parked = tokio::time::timeout(Duration::from_mins(1), ends).await.unwrap();
    assert_eq!(parked.code, Some(3), "{}", parked.err);
    let run: Value = serde_json::from_str(&parked.out).unwrap();
    assert_eq!(run, json!({"run_id": run["run_id"], "status": "awaiting_approval"}));
    assert!(parked.err.contains("waits for an answer") && parked.err.contains("runs:read"));
}

#[tokio::test]
async fn commands_that_are_told_work_as_they_are_told() {
    let setup =
        Setup::new().agent("editor", EDITOR).scenario("editor", EDITING).file("notes.txt", "old");
    let service = setup.start(Db::Sqlite).await;
    let elsewhere = directory(&[]);
    let url = service.url("");
    let parked = command(elsewhere.path())
        .args(["invoke", "editor", "--server", &url])
        .env("TOOLLOOP_KEY", &service.key)
        .output()
        .await
        .unwrap();
    let said = String::from_utf8(parked.stderr).unwrap();
    assert_eq!(parked.status.code(), Some(3), "{said}");
    assert!(!said.contains(&service.key), "{said}");
    let told = said.lines().find_map(|line| line.trim().strip_prefix("toolloop ")).unwrap();
    let program = command(elsewhere.path()).as_std().get_program().to_owned();
    let approved = tokio::process::Command::new("sh")
        .args(["-c", &format!("{} {told}", program.to_str().unwrap())])
        .current_dir(elsewhere.path())
        .env("TOOLLOOP_KEY", &service.key)
        .output()
        .await
        .unwrap();
    let (out, said) =
        (String::from_utf8(approved.stdout).unwrap(), String::from_utf8(approved.stderr).unwrap());
    assert_eq!(approved.status.code(), Some(0), "{told}: {said}");
    let watch = format!("--server {url} --key \"$TOOLLOOP_KEY\"`");
    assert!(out.contains("toolloop runs watch") && out.contains(&watch), "{out}");
    let run = text(&serde_json::from_slice(&parked.stdout).unwrap(), "run_id").to_owned();
    assert_eq!(ended(&service, &format!("/v1/runs/{run}")).await["status"], "completed");

    // A key of the command line is not told.
    std::fs::write(service.dir.path().join("workspace/default/notes.txt"), "old").unwrap();
    let key = ["invoke", "editor", "--server", &url, "--key", &service.key];
    let parked = toolloop(elsewhere.path(), &key).await;
    assert_eq!(parked.code, Some(3), "{}", parked.err);
    assert!(parked.err.contains(&format!(" --server {url} --key KEY\n")), "{}", parked.err);
}

#[tokio::test]
async fn commands_that_only_read_or_decide_create_no_database() {
    let dir = directory(&[]);
    let id = "01970000-0000-7000-8000-000000000000";
    for arguments in [
        &["runs", "show", id][..],
        &["runs", "watch", id],
        &["runs", "cancel", id],
        &["runs", "approve", id, id],
        &["files", "ls", id],
        &["policy", "replay", "--agent", "a"],
        &["audit", "verify"],
        &["audit", "export"],
    ] {
        let done = toolloop(dir.path(), arguments).await;
        assert_eq!(done.code, Some(1), "{arguments:?}: {}{}", done.out, done.err);
        assert!(
            done.err.contains("there is no database at toolloop.db")
                && done.err.contains("--server"),
            "{arguments:?}: {}",
            done.err
        );
    }
    let listed = toolloop(dir.path(), &["runs", "list", "--json"]).await;
    assert_eq!(listed.code, Some(0), "{}", listed.err);
    assert!(listed.err.contains("there is no database"), "{}", listed.err);
    let listed: Value = serde_json::from_str(&listed.out).unwrap();
    assert_eq!(listed, json!({"data": [], "next_cursor": null}));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test]
async fn a_run_approved_without_a_server_continues_when_the_service_starts() {
    let agent = format!("name: editor\n{EDITOR}");
    let files = [("agents/editor.yaml", agent.as_str()), ("scenarios/editor.yaml", EDITING)];
    let dir = directory(&[&files[..], &[("workspace/default/notes.txt", "old")]].concat());
    let parked = toolloop(dir.path(), &["invoke", "editor"]).await;
    assert_eq!(parked.code, Some(3), "{}", parked.err);
    let run: Value = serde_json::from_str(&parked.out).unwrap();
    let (id, call) = (text(&run, "run_id"), text(&run["pending"][0], "call_id"));
    let denied =
        toolloop(dir.path(), &["runs", "deny", id, call, "--reason", "no", "--json"]).await;
    let denied: Value = serde_json::from_str(&denied.out).unwrap();
    assert_eq!(
        (&denied["status"], &denied["pending"]),
        (&json!("queued"), &json!([])),
        "{denied:#}"
    );
    let service = Setup::new().start_in(dir, Db::Sqlite).await;
    let done = ended(&service, &format!("/v1/runs/{id}")).await;
    assert_eq!(done["status"], "completed", "{done:#}");
}

#[tokio::test]
async fn after_a_decision_the_command_says_when_the_run_continues() {
    let setup =
        Setup::new().agent("editor", EDITOR).scenario("editor", EDITING).file("notes.txt", "old");
    let service = setup.start(Db::Postgres).await;
    let parked = service.post("/v1/agents/editor/invoke-iterative", &json!({})).await.body;
    let (id, call) = (text(&parked, "run_id"), text(&parked["pending"][0], "call_id"));
    let here = ["runs", "approve", id, call, "--database-url", &service.database_url];
    let approved = toolloop(service.dir.path(), &here).await;
    assert_eq!(approved.code, Some(0), "{}", approved.err);
    assert!(approved.out.contains("as soon as a service has this database"), "{}", approved.out);
    assert_eq!(ended(&service, &format!("/v1/runs/{id}")).await["status"], "completed");

    let agent = format!("name: editor\n{EDITOR}");
    let files = [("agents/editor.yaml", agent.as_str()), ("scenarios/editor.yaml", EDITING)];
    let dir = directory(&[&files[..], &[("workspace/default/notes.txt", "old")]].concat());
    let parked = toolloop(dir.path(), &["invoke", "editor"]).await;
    let run: Value = serde_json::from_str(&parked.out).unwrap();
    let (id, call) = (text(&run, "run_id"), text(&run["pending"][0], "call_id"));
    // Nothing else can have this database while the command has it.
    let waits = toolloop(dir.path(), &["runs", "watch", id]).await;
    assert_eq!(waits.code, Some(3), "{}", waits.err);
    assert!(waits.out.contains("approval.requested"), "{}", waits.out);
    assert!(waits.err.contains("waits for an answer"), "{}", waits.err);
    let approved = toolloop(dir.path(), &["runs", "approve", id, call]).await;
    assert!(approved.out.contains("continues when the service is started"), "{}", approved.out);
    let queued = toolloop(dir.path(), &["runs", "watch", id]).await;
    assert_eq!(queued.code, Some(1), "{}", queued.err);
    assert!(
        queued.err.contains("queued") && queued.err.contains("`toolloop serve`"),
        "{}",
        queued.err
    );
}

#[tokio::test]
async fn the_result_of_a_client_tool_is_submitted() {
    let steps = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {question: why?}}]
  - text: '{{ results[0] }}'
";
    let setup = Setup::new().agent("asker", client_tools::ASKER).scenario("asker", steps);
    let service = setup.start(Db::Sqlite).await;
    let parked = client_tools::parked(&service, "asker").await;
    let (id, call) = (text(&parked, "run_id"), text(&parked["pending"][0], "call_id"));
    let here = ["--server", &service.url(""), "--key", &service.key];
    let result = async |options: &[&str]| {
        let arguments = [&["runs", "result", id, call], options, &here[..]].concat();
        toolloop(service.dir.path(), &arguments).await
    };
    for wrong in [
        &[][..],
        &["--is-error"],
        &["--responses", "{}"],
        &["--content", "a", "--responses", "{}", "--round", "1"],
    ] {
        assert_eq!(result(wrong).await.code, Some(2), "{wrong:?}");
    }
    let given = result(&["--content", "Because.", "--json"]).await;
    assert_eq!(given.code, Some(0), "{}", given.err);
    let done = ended(&service, &format!("/v1/runs/{id}")).await;
    assert_eq!(done["output"]["result"], "Because.", "{done:#}");
}

#[tokio::test]
async fn the_outcome_of_an_interrupted_call_is_reported() {
    let (service, run) = reviews::crashed(Db::Sqlite, "").await;
    let parked = service.until(&run, |run| run["status"] == "needs_review").await;
    let (id, call) = (text(&parked, "run_id"), text(&parked["pending"][0], "call_id"));
    let here = ["--server", &service.url(""), "--key", &service.key];
    let resolve = async |options: &[&str]| {
        let arguments = [&["runs", "resolve", id, call], options, &here[..]].concat();
        toolloop(service.dir.path(), &arguments).await
    };
    assert_eq!(resolve(&[]).await.code, Some(2));
    assert_eq!(resolve(&["--outcome", "maybe"]).await.code, Some(2));
    let answered = resolve(&["--outcome", "happened", "--result", "a line"]).await;
    assert_eq!(answered.code, Some(0), "{}", answered.err);
    let done = ended(&service, &run).await;
    assert!(text(&done["output"], "result").contains("It returned: a line"), "{done:#}");
    assert_eq!(file(&service, "log.txt"), "x");
}
