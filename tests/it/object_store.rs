//! Files that are kept in an object store: every replica has them, after any crash.
//!
//! | | |
//! |---|---|
//! | crash, other replica | a file that the journal says was written is there where the run goes on |
//! | sessions | the next run has the files of the last one, wherever it runs |
//! | children | one workspace; what one keeps the other is brought before its next call |
//! | parked runs | go on elsewhere with their files |
//! | cancel | what a call did before is kept |
//! | files of callers, uploads, copies | kept before they are answered; refused at once while they cannot be |
//! | dry run | judges what is kept |
//! | budgets, quotas | as with a directory: counted before the change |
//! | deletion, retention | take the paths in their transaction; contents follow |
//! | streaming, console, generated clients | see the interface only |
//! | tenants | contents are shared within a tenant only |
//! | command line | `doctor` tells what is wrong |

use std::os::unix::fs::PermissionsExt as _;

use std::path::{Path, PathBuf};

use reqwest::Method;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use sqlx::{Connection as _, Executor as _};
use tempfile::TempDir;
use tokio::sync::watch;
use uuid::Uuid;

use crate::claims::change;
use crate::file_stores::doctor;
use crate::files::{an_emptied_directory_is_gone, nothing_comes_late_into_a_session};
use crate::installing::Workshop;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Answer, Db, Service, Setup, Signal, answer, command, on_both_stores};

on_both_stores! {
    a_crash_at_any_commit_loses_no_file,
    a_call_waits_for_the_object_store,
    a_caller_does_not_wait_for_the_object_store,
    a_run_is_given_back_where_the_object_store_stays_away,
    writes_while_the_directory_is_away_are_not_acknowledged,
    contents_of_deleted_runs_are_deleted,
    files_of_callers_are_kept_before_they_are_answered,
    an_upload_is_recorded_before_a_crash,
    puts_and_deletes_of_callers_are_recorded_before_a_crash,
    deleted_files_are_kept_no_more,
    quotas_count_files_in_the_object_store,
    a_refused_change_of_a_file_undoes_nothing,
}

const GOVERNANCE: &str = "enable_double_confirmation: false\n\
    governance: {autonomy: full, paths: {read: ['**'], write: ['**'], deny: ['secret/**']}}\n";

const WRITING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: deep/made.txt, content: \"one\\n\"}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: deep/made.txt, content: \"two\\n\"}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: deep/made.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: deep/made.txt, content: \"three\\n\"}}]
  - {text: done}
";

/// Each run of a session adds a line and reads all.
const TALKING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: talk.txt, content: '{{ inputs.line }}'}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: talk.txt}}]
  - {text: done}
";

/// Hands the work to a helper that has to be approved, and reads what both have written.
const LEADING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: team.txt, content: \"lead\\n\"}}]
  - tool_calls: [{tool: 'agent:helper', arguments: {line: \"helper\\n\"}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: team.txt}}]
  - {text: done}
";

const ADDING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: team.txt, content: '{{ inputs.line | default(\"helper\\n\") }}'}}]
  - {text: done}
";

const MOVING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: move, path: 'in/{{ inputs.job }}', to: '{{ inputs.to }}/{{ inputs.job }}'}}]
  - {text: done}
";

const PROGRAM: &str = "
steps:
  - tool_calls: [{tool: shell, arguments: {command: \"mkdir -p out && truncate -s 3 out/made && chmod 750 out/made && ln -s made out/link && truncate -s 9000000 out/large\"}}]
  - tool_calls: [{tool: shell, arguments: {command: 'rm out/link'}}]
  - {text: done}
";

const COMMANDS: &str = "commands: {allow: [{command: mkdir}, {command: truncate}, {command: chmod}, \
    {command: ln}, {command: rm}]}";

fn agent(scenario: &str, workspace: &str, tools: &str) -> String {
    format!("model: scripted/{scenario}\ntools: [{tools}]\nworkspace: '{workspace}'\n{GOVERNANCE}")
}

/// Hands the conversation over, and with it the files.
const HANDING_OVER: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: team.txt, content: \"lead\\n\"}}]
  - tool_calls: [{tool: transfer_to_helper, arguments: {}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: team.txt}}]
  - {text: done}
";

fn kept_in(url: &str) -> Setup {
    kept_with(url, "store_patience = \"20s\"")
}

/// `runtime`: lines of `[runtime]`.
fn kept_with(url: &str, runtime: &str) -> Setup {
    let ruled = |agent: String, rules: &str| {
        agent.replace("governance: {", &format!("governance: {{{rules}, "))
    };
    let lead = agent("leading", "team", "file_ops, 'agent:helper'");
    let lead = ruled(lead, "tool_policies: {'agent:helper': ask}");
    let chief = agent("handing-over", "team", "file_ops, transfer_to_helper");
    let chief = ruled(chief, "tool_policies: {transfer_to_helper: ask}");
    let program = ruled(agent("program", "own/{run_id}", "shell"), COMMANDS);
    Setup::new()
        .agent("writer", &agent("writing", "own/{run_id}", "file_ops"))
        .agent("talker", &agent("talking", "talks/{session_id}", "file_ops"))
        .agent("shared", &agent("talking", "shared", "file_ops"))
        .agent("lead", &lead)
        .agent("chief", &chief)
        .agent("helper", &agent("adding", "team", "file_ops"))
        .agent("mover", &agent("moving", "jobs", "file_ops"))
        .scenario("moving", MOVING)
        .agent("program", &program)
        .scenario("program", PROGRAM)
        .scenario("leading", LEADING)
        .scenario("handing-over", HANDING_OVER)
        .scenario("adding", ADDING)
        .scenario("writing", WRITING)
        .scenario("talking", TALKING)
        .config(&format!(
            "[runtime]\nlease = \"3s\"\n{runtime}\n[tools.workspace]\nstore = \"object\"\n\
             [tools.workspace.object]\nurl = \"{url}\""
        ))
}

/// A model of the writer: it does what `WRITING` says, and pauses after two calls until the test lets
/// it go on.
struct PausingModel {
    mock: MockModel,
    may_go_on: watch::Sender<bool>,
}

impl PausingModel {
    async fn start() -> Self {
        let mock = MockModel::start().await;
        let (may_go_on, told) = watch::channel(false);
        mock.reply_by(move |request| {
            let messages = request["messages"].as_array().unwrap().iter();
            let call = |operation: &str, content: Value| {
                let path = "deep/made.txt";
                let arguments = json!({"operation": operation, "path": path, "content": content});
                Reply::call("file_ops", &arguments)
            };
            match messages.filter(|message| message["role"] == "assistant").count() {
                0 => call("write", "one\n".into()),
                1 => call("append", "two\n".into()),
                2 => {
                    let read = json!({"operation": "read", "path": "deep/made.txt"});
                    Reply::Held(told.clone(), Box::new(Reply::call("file_ops", &read)))
                }
                3 => call("append", "three\n".into()),
                _ => Reply::text("done"),
            }
        });
        Self { mock, may_go_on }
    }

    fn of_writer(&self, setup: Setup) -> Setup {
        let writer = agent("writing", "own/{run_id}", "file_ops");
        let url = self.mock.base_url();
        setup
            .agent("writer", &writer.replace("scripted/writing", "mock/m"))
            .config(&format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{url}\""))
    }

    fn go_on(&self) {
        self.may_go_on.send_replace(true);
    }
}

fn place() -> TempDir {
    TempDir::new().unwrap()
}

fn kept(objects: &TempDir) -> Setup {
    kept_in(objects.path().to_str().unwrap())
}

fn is_ready(ready: &Value) -> bool {
    ready["status"] == "ready"
}

fn has_ended(run: &Value) -> bool {
    run["finished_at"].is_string()
}

/// What the calls of a run answered, in order.
async fn results(service: &Service, run: &str) -> Vec<String> {
    let events = service.get(&format!("{run}/events?limit=200")).await.body;
    let completed = events["data"].as_array().unwrap().iter();
    completed
        .filter(|event| event["type"] == "tool_call.completed")
        .map(|event| event["data"]["content"].as_str().unwrap_or_default().to_owned())
        .collect()
}

fn path_of(run: &Value) -> String {
    format!("/v1/runs/{}", run["run_id"].as_str().unwrap())
}

async fn listed(service: &Service, owner: &str) -> Vec<String> {
    let files = service.get(&format!("{owner}/files")).await;
    assert_eq!(files.status, 200, "{:#}\n{}", files.body, service.log());
    let files = files.body["data"].as_array().unwrap().clone();
    files.iter().map(|file| file["path"].as_str().unwrap().to_owned()).collect()
}

async fn content(service: &Service, owner: &str, path: &str) -> String {
    let file = service.get(&format!("{owner}/files/{path}")).await;
    assert_eq!(file.status, 200, "{:#}\n{}", file.body, service.log());
    file.body.as_str().unwrap().to_owned()
}

async fn put(service: &Service, owner: &str, path: &str, text: &str) -> Answer {
    let request = service.request(Method::PUT, &format!("{owner}/files/{path}"));
    answer(request.body(text.to_owned())).await
}

async fn until_called(service: &Service, run: &str, calls: usize) {
    let has_called = |events: &Value| {
        let events = events["data"].as_array().unwrap().iter();
        events.filter(|event| event["type"] == "tool_call.completed").count() >= calls
    };
    service.until(&format!("{run}/events?limit=200"), has_called).await;
}

/// Two replicas with directories of their own.
async fn two(objects: &TempDir) -> (Service, Service) {
    // None of those tests waits until a lease is over, and a slow machine must not lose one.
    two_of(|| kept(objects).variable("TOOLLOOP_RUNTIME__LEASE", "20s")).await
}

async fn two_of(setup: impl Fn() -> Setup) -> (Service, Service) {
    let first = setup().start(Db::Postgres).await;
    let second = setup().start_on(first.database_url.clone()).await;
    (first, second)
}

#[tokio::test]
async fn a_run_goes_on_elsewhere_with_its_files() {
    let objects = place();
    let model = PausingModel::start().await;
    let (mut first, second) = two_of(|| model.of_writer(kept(&objects))).await;
    let started = answer(
        first
            .request(Method::POST, "/v1/agents/writer/invoke-iterative")
            .header("prefer", "wait=0")
            .json(&json!({})),
    )
    .await;
    let run = path_of(&started.body);
    until_called(&first, &run, 2).await;
    // It is there before the run goes on elsewhere.
    assert_eq!(content(&second, &run, "deep/made.txt").await, "one\ntwo\n");
    first.kill().await;
    model.go_on();
    let ended = second.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}\n{}", second.log());
    let results = results(&second, &run).await;
    assert!(results[2].contains("one") && results[2].contains("two"), "{results:#?}");
    assert_eq!(content(&second, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
    // The first one comes back, to a directory with what it had.
    first.restart().await;
    assert_eq!(content(&first, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
}

async fn a_crash_at_any_commit_loses_no_file(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    let mut crashes = 0;
    // Files go another way than the journal: what differs between the databases is seen at half of the points.
    let step = if db == Db::Postgres { 2 } else { 1 };
    for point in ["before_files", "after_contents", "after_files", "before_commit", "after_commit"]
    {
        for nth in (1..=4).step_by(step) {
            service.kill_if_alive().await;
            service.restart_to_crash(&format!("{point}:{nth}")).await;
            let id = Uuid::now_v7();
            let run = format!("/v1/runs/{id}");
            let mut is_accepted = false;
            loop {
                tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                if service.is_dead() {
                    crashes += 1;
                    service.restart().await;
                }
                if !is_accepted {
                    let start = service.request(Method::POST, "/v1/agents/writer/invoke-iterative");
                    let start = start.header("prefer", "respond-async");
                    let sent = start.json(&json!({"run_id": id})).send().await;
                    is_accepted = sent.is_ok_and(|sent| sent.status().is_success())
                        || asked(&service, &run).await.is_some();
                    continue;
                }
                let Some(now) = asked(&service, &run).await else { continue };
                if has_ended(&now) {
                    assert_eq!(now["status"], "completed", "{now:#}");
                    break;
                }
                for pending in now["pending"].as_array().into_iter().flatten() {
                    review(&service, &run, pending).await;
                }
            }
            // It may die of the commit that ended the run.
            let text = loop {
                if service.is_dead() {
                    crashes += 1;
                    service.restart().await;
                }
                let file = service.request(Method::GET, &format!("{run}/files/deep/made.txt"));
                if let Ok(file) = file.send().await
                    && let Ok(text) = file.text().await
                {
                    break text;
                }
            };
            assert_eq!(text, "one\ntwo\nthree\n", "{point}:{nth}");
        }
    }
    assert!(crashes > 12 / step, "{crashes}");
}

/// Says what became of a call by looking at the file, as a person would.
async fn review(service: &Service, run: &str, pending: &Value) {
    let line = pending["arguments"]["content"].as_str().unwrap();
    let file = service.request(Method::GET, &format!("{run}/files/deep/made.txt")).send().await;
    let Ok(file) = file else { return };
    let text = file.text().await.unwrap_or_default();
    let outcome = if text.ends_with(line) { "happened" } else { "did_not_happen" };
    let path = format!("{run}/tool-calls/{}/resolve", pending["call_id"].as_str().unwrap());
    let _ = service.request(Method::POST, &path).json(&json!({ "outcome": outcome })).send().await;
}

/// An answer, if there is one.
async fn asked(service: &Service, path: &str) -> Option<Value> {
    let answer = service.request(Method::GET, path).send().await.ok()?;
    if answer.status().is_success() { answer.json().await.ok() } else { None }
}

#[tokio::test]
async fn a_session_goes_on_on_the_other_replica() {
    let objects = place();
    let (first, second) = two(&objects).await;
    let mut all = String::new();
    for (number, service) in [&first, &second, &first, &second].into_iter().enumerate() {
        let line = format!("line {number}\n");
        all.push_str(&line);
        let body = json!({"inputs": {"line": line}, "session_id": "s1"});
        let run = service.run("talker", &body).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        let results = results(service, &path_of(&run)).await;
        assert!(results[1].contains(&format!("line {number}")), "{results:#?}");
        assert_eq!(content(&first, "/v1/sessions/s1", "talk.txt").await, all);
        assert_eq!(content(&second, "/v1/sessions/s1", "talk.txt").await, all);
    }
}

#[tokio::test]
async fn runs_that_share_a_workspace_lose_no_line_of_each_other() {
    let objects = place();
    let (first, second) = two(&objects).await;
    let lines: Vec<String> = (0..24).map(|number| format!("<{number}>\n")).collect();
    let runs = lines.iter().enumerate().map(|(number, line)| {
        let service = if number % 2 == 0 { &first } else { &second };
        async move {
            let run = service.run("shared", &json!({"inputs": {"line": line}})).await;
            assert_eq!(run["status"], "completed", "{run:#}");
            results(service, &path_of(&run)).await
        }
    });
    let results = futures::future::join_all(runs).await;
    let text = content(&first, "/v1/agents/shared", "talk.txt").await;
    assert_eq!(text, content(&second, "/v1/agents/shared", "talk.txt").await);
    for (line, results) in lines.iter().zip(results) {
        // A call that was told to have been kept was kept, and no other.
        let is_kept = !results[0].starts_with("Error:");
        assert_eq!(text.matches(line).count(), usize::from(is_kept), "{line} {results:#?}\n{text}");
    }
}

/// Requests that change the same at the same time in the same way, on two replicas.
#[tokio::test]
async fn of_equal_changes_on_two_replicas_one_succeeds() {
    let objects = place();
    let (first, second) = two(&objects).await;
    let owner = "/v1/agents/mover";
    for round in 0..8 {
        let job = format!("job{round}");
        let path = format!("in/{job}");
        let new = async |service: &Service| {
            let request = service.request(Method::PUT, &format!("{owner}/files/{path}"));
            answer(request.header("if-none-match", "*").body("job")).await.status.as_u16()
        };
        let made = tokio::join!(new(&first), new(&second));
        assert!(matches!(made, (201, 409 | 412) | (409 | 412, 201)), "{made:?}");
        for service in [&first, &second] {
            assert_eq!(content(service, owner, &path).await, "job");
        }
        let move_to = async |service: &Service, to: &str| {
            let inputs = json!({"inputs": {"job": job, "to": to}});
            let run = service.run("mover", &inputs).await;
            results(service, &path_of(&run)).await[0].starts_with("Moved")
        };
        let moved = tokio::join!(move_to(&first, "one"), move_to(&second, "other"));
        assert!(moved.0 != moved.1, "{moved:?}");
        let at = format!("{}/{job}", if moved.0 { "one" } else { "other" });
        for service in [&first, &second] {
            let files = listed(service, owner).await;
            assert_eq!(files.iter().filter(|path| path.ends_with(&job)).collect::<Vec<_>>(), [&at]);
        }
        let tag = first.get(&format!("{owner}/files/{at}")).await.headers["etag"].clone();
        let delete = async |service: &Service| {
            let request = service.request(Method::DELETE, &format!("{owner}/files/{at}"));
            answer(request.header("if-match", tag.clone())).await.status.as_u16()
        };
        let deleted = tokio::join!(delete(&first), delete(&second));
        assert!(matches!(deleted, (204, 404 | 409 | 412) | (404 | 409 | 412, 204)), "{deleted:?}");
    }
}

#[tokio::test]
async fn a_tree_that_was_parked_goes_on_elsewhere_in_the_same_workspace() {
    let objects = place();
    let (mut first, second) = two_of(|| kept(&objects)).await;
    // A helper with a task of its own, and one that is handed the conversation.
    for agent in ["lead", "chief"] {
        let run = first.enqueue(agent).await;
        let parked = first.until(&run, |run| run["status"] == "awaiting_approval").await;
        assert_eq!(content(&second, &run, "team.txt").await, "lead\n");
        first.kill().await;
        let call = parked["pending"][0]["call_id"].as_str().unwrap();
        let approve = format!("{run}/tool-calls/{call}/approve");
        assert_eq!(second.post(&approve, &json!({})).await.status, 200);
        let ended = second.until(&run, has_ended).await;
        assert_eq!(ended["status"], "completed", "{ended:#}");
        let results = results(&second, &run).await;
        assert!(results[2].contains("lead") && results[2].contains("helper"), "{results:#?}");
        first.restart().await;
        for service in [&first, &second] {
            let text = content(service, &run, "team.txt").await;
            assert_eq!(text, "lead\nhelper\n");
        }
    }
}

#[tokio::test]
async fn a_cancelled_run_keeps_its_files() {
    let objects = place();
    let model = PausingModel::start().await;
    let (first, second) = two_of(|| model.of_writer(kept(&objects))).await;
    let run = first.enqueue("writer").await;
    until_called(&first, &run, 2).await;
    let cancelled = second.post(&format!("{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{:#}", cancelled.body);
    assert_eq!(second.until(&run, has_ended).await["status"], "cancelled");
    for service in [&first, &second] {
        assert_eq!(content(service, &run, "deep/made.txt").await, "one\ntwo\n");
    }
    // A dry run judges files that are not here yet.
    let body = json!({"dry_run": true, "session_id": "s9", "inputs": {"line": "x"}, "files": [
        {"path": "copied.txt", "from": {"run_id": &run[9..], "path": "deep/made.txt"}}
    ]});
    let judged = second.post("/v1/agents/talker/invoke-iterative", &body).await;
    assert_eq!(judged.status, 200, "{:#}", judged.body);
    assert_eq!(second.get("/v1/sessions/s9/files").await.status, 404);
}

#[tokio::test]
async fn files_of_programs_are_kept() {
    let objects = place();
    let (first, second) = two(&objects).await;
    let run = first.run("program", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let run = path_of(&run);
    assert_eq!(
        listed(&second, &run).await,
        ["out/large", "out/made"],
        "{:#?}",
        results(&first, &run).await
    );
    assert_eq!(content(&second, &run, "out/made").await, "\0\0\0");
    let directory = format!("workspace/default/own/r-{}/out", &run[9..]);
    let made = std::fs::metadata(second.dir.path().join(&directory).join("made")).unwrap();
    assert_eq!(made.permissions().mode() & 0o777, 0o750);
    let large = std::fs::metadata(second.dir.path().join(&directory).join("large")).unwrap();
    assert_eq!(large.len(), 9_000_000);
    let (one, other) = (
        first.get(&format!("{run}/files")).await.body,
        second.get(&format!("{run}/files")).await.body,
    );
    assert_eq!(one, other);
}

/// Programs change a file, and neither its size nor its time shows it.
const RETIMED: &str = r#"
steps:
  - tool_calls: [{tool: shell, arguments: {command: "python3 -c 'import os; open(\"f\", \"w\").write(\"one\"); os.utime(\"f\", (1, 1))'"}}]
  - tool_calls: [{tool: shell, arguments: {command: "python3 -c 'import os; open(\"f\", \"w\").write(\"two\"); os.utime(\"f\", (1, 1))'"}}]
  - {text: done}
"#;

#[tokio::test]
async fn a_change_by_a_program_that_sets_the_time_back_is_kept() {
    let objects = place();
    let allowed = "governance: {commands: {allow: [{command: python3, args: utime}]}, ";
    let retimed = agent("retimed", "own/{run_id}", "shell").replace("governance: {", allowed);
    let setup = || {
        let kept = kept(&objects).variable("TOOLLOOP_RUNTIME__LEASE", "20s");
        kept.agent("retimed", &retimed).scenario("retimed", RETIMED)
    };
    let (first, second) = two_of(setup).await;
    let run = first.run("retimed", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let run = path_of(&run);
    let results = results(&first, &run).await;
    assert_eq!(content(&second, &run, "f").await, "two", "{results:#?}");
}

#[tokio::test]
async fn a_workspace_may_have_more_files_than_the_process_may_have_open() {
    let objects = place();
    let names: Vec<String> = (0..600).map(|number| format!("f{number}")).collect();
    let making = format!(
        "steps:\n  - tool_calls: [{{tool: shell, arguments: {{command: 'truncate -s 1 {}'}}}}]\n  - {{text: done}}\n",
        names.join(" ")
    );
    let allowed = "governance: {commands: {allow: [{command: truncate}]}, ";
    let many = agent("many", "own/{run_id}", "shell").replace("governance: {", allowed);
    let setup = || {
        let kept = kept(&objects).variable("TOOLLOOP_RUNTIME__LEASE", "20s");
        kept.agent("many", &many).scenario("many", &making)
    };
    let (first, second) = two_of(setup).await;
    let run = first.run("many", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let open = std::fs::read_dir(format!("/proc/{}/fd", second.pid())).unwrap().count();
    let most = Some(open as u64 + 300);
    let limit = Rlimit { current: most, maximum: most };
    prlimit(Pid::from_raw(second.pid()), Resource::Nofile, limit).unwrap();
    let files = second.get(&format!("{}/files?limit=200", path_of(&run))).await;
    assert_eq!(files.status, 200, "{:#}\n{}", files.body, second.log());
    assert_eq!(files.body["data"].as_array().unwrap().len(), 200);
}

/// A server that speaks S3, with an empty bucket.
struct Moto {
    process: tokio::process::Child,
    address: String,
}

impl Moto {
    async fn start() -> Self {
        for _ in 0..5 {
            if let Some(moto) = Self::try_to_start().await {
                return moto;
            }
        }
        panic!("moto did not start");
    }

    /// Nothing where it ends by itself: another process may have taken the port meanwhile.
    async fn try_to_start() -> Option<Self> {
        let dir = Workshop::moto().await.dir.clone();
        let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let process = tokio::process::Command::new(dir.join("venv/bin/python"))
            .args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &free.port().to_string()])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut moto = Self { process, address: format!("http://{free}") };
        let http = reqwest::Client::new();
        for _ in 0..6000 {
            if moto.process.try_wait().unwrap().is_some() {
                return None;
            }
            if let Ok(made) = http.put(format!("{}/files", moto.address)).send().await {
                assert!(made.status().is_success());
                return Some(moto);
            }
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        None
    }

    fn setup(&self) -> Setup {
        kept_in(&format!(
            "s3://files/of/toolloop\"\nendpoint = \"{}\"\naccess_key_env = \"S3_ID\"\nsecret_key_env = \"S3_SECRET",
            self.address
        ))
        .variable("S3_ID", "an-id")
        .variable("S3_SECRET", "a-secret-of-the-bucket")
        .variable("http_proxy", "http://127.0.0.1:1") // no proxy reaches this machine
    }
}

#[tokio::test]
async fn a_bucket_keeps_files_too() {
    let moto = Moto::start().await;
    let model = PausingModel::start().await;
    let setup = || model.of_writer(moto.setup());
    let (mut first, second) = two_of(setup).await;
    let elsewhere = first.run("program", &json!({})).await;
    let elsewhere = path_of(&elsewhere);
    let run = first.enqueue("writer").await;
    until_called(&first, &run, 2).await;
    first.kill().await;
    model.go_on();
    let ended = second.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}\n{}", second.log());
    assert_eq!(content(&second, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
    assert_eq!(listed(&second, &elsewhere).await, ["out/large", "out/made"]);
    assert!(!second.log().contains("a-secret-of-the-bucket"));
    drop(moto);
    second.until("/readyz", |ready| ready["checks"]["workspace"] == "unavailable").await;
    let refused = put(&second, "/v1/agents/shared", "a", "a").await;
    assert_eq!(refused.status, 503, "{:#}", refused.body);
}

async fn a_call_waits_for_the_object_store(db: Db) {
    let objects = place();
    let model = PausingModel::start().await;
    let mut service = model.of_writer(kept(&objects)).start(db).await;
    let started = answer(
        service
            .request(Method::POST, "/v1/agents/writer/invoke-iterative")
            .header("prefer", "wait=0")
            .json(&json!({})),
    )
    .await;
    let run = path_of(&started.body);
    until_called(&service, &run, 2).await;
    // What was a store is gone; nothing can be made there.
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    std::fs::write(objects.path(), "in the way").unwrap();
    service.until("/readyz", |ready| ready["checks"]["workspace"] == "unavailable").await;
    let refused =
        service.post("/v1/agents/shared/invoke-iterative", &json!({"inputs": {"line": "x"}})).await;
    assert_eq!(refused.body["code"], "WORKSPACE_UNAVAILABLE", "{:#}", refused.body);
    model.go_on();
    until_started(&service, &run, 4).await;
    let events = service.get(&format!("{run}/events?limit=200")).await.body;
    assert_eq!(
        events["data"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|it| it["type"] == "tool_call.completed")
            .count(),
        3
    );
    std::fs::remove_file(objects.path()).unwrap();
    std::fs::rename(&aside, objects.path()).unwrap();
    service.until("/readyz", is_ready).await;
    let ended = service.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    assert_eq!(content(&service, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
    service.kill().await;
}

/// A run's call waits meanwhile.
async fn a_caller_does_not_wait_for_the_object_store(db: Db) {
    let objects = place();
    let model = PausingModel::start().await;
    let patient = kept_with(objects.path().to_str().unwrap(), "store_patience = \"10m\"");
    let mut service = model.of_writer(patient).start(db).await;
    assert_eq!(put(&service, "/v1/agents/shared", "before", "a").await.status, 201);
    let run = service.enqueue("writer").await;
    until_called(&service, &run, 2).await;
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    std::fs::write(objects.path(), "in the way").unwrap();
    let send = |method: Method, path: &str| {
        service.request(method, &format!("/v1/agents/shared/files/{path}"))
    };
    for request in [
        send(Method::PUT, "while").body("b"),
        send(Method::PUT, "before").body("b"),
        send(Method::DELETE, "before"),
    ] {
        let asked = std::time::Instant::now();
        let refused = answer(request).await;
        let told = (refused.status.as_u16(), &refused.body["code"]);
        assert_eq!(told, (503, &json!("WORKSPACE_UNAVAILABLE")), "{:#}", refused.body);
        assert_eq!(refused.headers["retry-after"], "5");
        assert!(asked.elapsed() < std::time::Duration::from_mins(1), "{:?}", asked.elapsed());
    }
    model.go_on();
    until_started(&service, &run, 4).await;
    assert_eq!(service.get(&run).await.body["status"], "running");
    std::fs::remove_file(objects.path()).unwrap();
    std::fs::rename(&aside, objects.path()).unwrap();
    service.until("/readyz", is_ready).await;
    assert_eq!(content(&service, "/v1/agents/shared", "before").await, "a");
    assert_eq!(put(&service, "/v1/agents/shared", "while", "b").await.status, 201);
    let ended = service.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    assert_eq!(content(&service, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
    service.kill().await;
}

/// Nothing is counted against it, and what it had changed meanwhile is undone.
async fn a_run_is_given_back_where_the_object_store_stays_away(db: Db) {
    let objects = place();
    let model = PausingModel::start().await;
    let setup = kept_with(objects.path().to_str().unwrap(), "store_patience = \"1s\"");
    let mut service = model.of_writer(setup).start(db).await;
    let run = service.enqueue("writer").await;
    until_called(&service, &run, 2).await;
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    std::fs::write(objects.path(), "in the way").unwrap();
    model.go_on();
    service.until_logged("run is given back").await;
    service.until(&run, |run| run["status"] == "queued").await;
    std::fs::remove_file(objects.path()).unwrap();
    std::fs::rename(&aside, objects.path()).unwrap();
    let parked = service.until(&run, |run| run["status"] == "needs_review").await;
    assert_eq!(content(&service, &run, "deep/made.txt").await, "one\ntwo\n");
    review(&service, &run, &parked["pending"][0]).await;
    let ended = service.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    assert_eq!(content(&service, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
    let events = service.get(&format!("{run}/events?limit=200")).await.body;
    let resumed: Vec<&Value> = events["data"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|event| event["type"] == "run.resumed")
        .map(|event| &event["data"]["deaths"])
        .collect();
    assert!(!resumed.is_empty() && resumed.iter().all(|deaths| deaths.is_null()), "{events:#}");
    service.kill().await;
}

/// It has claimed a run whose files it does not have.
#[tokio::test]
async fn a_replica_that_ends_does_not_wait_for_the_object_store() {
    let objects = place();
    let url = objects.path().to_str().unwrap();
    let model = PausingModel::start().await;
    let mut first = model.of_writer(kept(&objects)).start(Db::Postgres).await;
    let setup = kept_with(url, "store_patience = \"10m\"");
    let mut second = model
        .of_writer(setup)
        .config("[server]\nshutdown_grace = \"1s\"")
        .start_on(first.database_url.clone())
        .await;
    let started = first.request(Method::POST, "/v1/agents/writer/invoke-iterative");
    let started = answer(started.header("prefer", "wait=0").json(&json!({}))).await;
    let run = path_of(&started.body);
    until_called(&first, &run, 2).await;
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    std::fs::write(objects.path(), "in the way").unwrap();
    first.kill().await;
    second.until_logged("took the runs of replicas that died").await;
    second.until(&run, |run| run["status"] == "running").await;
    second.signal(Signal::TERM);
    let since = std::time::Instant::now();
    assert_eq!(second.exit_code().await, Some(0), "{}", second.log());
    assert!(since.elapsed() < std::time::Duration::from_mins(5), "{:?}", since.elapsed());
    std::fs::remove_file(objects.path()).unwrap();
    std::fs::rename(&aside, objects.path()).unwrap();
    first.restart().await;
    model.go_on();
    let ended = first.until(&run, has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    let events = first.get(&format!("{run}/events?limit=200")).await.body;
    let mut events = events["data"].as_array().unwrap().iter();
    let resumed = events.rfind(|event| event["type"] == "run.resumed").unwrap();
    assert_eq!(resumed["data"]["deaths"], 1, "the end of the second was no crash: {resumed:#}");
}

/// As an unmount leaves it: where the directory was, another one can be made.
async fn writes_while_the_directory_is_away_are_not_acknowledged(db: Db) {
    let objects = place();
    let model = PausingModel::start().await;
    let setup = kept_with(objects.path().to_str().unwrap(), "store_patience = \"1s\"");
    let service = model.of_writer(setup).start(db).await;
    assert_eq!(put(&service, "/v1/agents/shared", "before", "a").await.status, 201);
    let run = service.enqueue("writer").await;
    until_called(&service, &run, 2).await;
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    for path in ["before", "while"] {
        let refused = put(&service, "/v1/agents/shared", path, "b").await;
        assert_eq!(refused.status, 503, "{:#}", refused.body);
    }
    model.go_on();
    service.until_logged("run is given back").await;
    service.until("/readyz", |ready| ready["checks"]["workspace"] == "unavailable").await;
    assert!(!objects.path().exists(), "it was made anew");
    std::fs::rename(&aside, objects.path()).unwrap();
    service.until("/readyz", is_ready).await;
    assert_eq!(content(&service, "/v1/agents/shared", "before").await, "a");
    assert_eq!(put(&service, "/v1/agents/shared", "while", "b").await.status, 201);
    let parked = service.until(&run, |run| run["status"] == "needs_review").await;
    review(&service, &run, &parked["pending"][0]).await;
    assert_eq!(service.until(&run, has_ended).await["status"], "completed");
    assert_eq!(content(&service, &run, "deep/made.txt").await, "one\ntwo\nthree\n");
}

/// How many contents an object store has.
fn contents(dir: &std::path::Path) -> usize {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let is_own = |name: &std::ffi::OsStr| name.to_string_lossy().starts_with('.');
    let kept = entries.filter(|entry| !is_own(&entry.file_name()));
    kept.map(|it| if it.path().is_dir() { contents(&it.path()) } else { 1 }).sum()
}

/// They are kept for some hours, in case a call is about to use them.
async fn contents_of_deleted_runs_are_deleted(db: Db) {
    let objects = place();
    let mut service =
        kept_with(objects.path().to_str().unwrap(), "retention = \"1s\"").start(db).await;
    let owner = "/v1/agents/shared";
    assert_eq!(put(&service, owner, "stays.txt", "of callers").await.status, 201);
    let run =
        service.run("talker", &json!({"inputs": {"line": "of a run"}, "session_id": "s"})).await;
    let run = path_of(&run);
    assert_eq!(contents(objects.path()), 2);
    service.until(&run, |answer| answer["code"] == "NOT_FOUND").await;
    service.kill().await;
    assert_eq!(contents(objects.path()), 2, "a moment later they are still there");
    let earlier = match db {
        Db::Sqlite => "used_at - 3 * 3600000000",
        Db::Postgres => "used_at - interval '3 hours'",
    };
    change(&service, &format!("UPDATE workspace_objects SET used_at = {earlier}")).await;
    service.restart().await;
    for _ in 0..3000 {
        if contents(objects.path()) == 1 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(contents(objects.path()), 1, "{}", service.log());
    assert_eq!(content(&service, owner, "stays.txt").await, "of callers");
}

async fn until_started(service: &Service, run: &str, calls: usize) {
    let has_started = |events: &Value| {
        let events = events["data"].as_array().unwrap().iter();
        events.filter(|event| event["type"] == "tool_call.started").count() >= calls
    };
    service.until(&format!("{run}/events?limit=200"), has_started).await;
}

async fn files_of_callers_are_kept_before_they_are_answered(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    let owner = "/v1/agents/shared";
    assert_eq!(put(&service, owner, "in/a.txt", "a").await.status, 201);
    assert_eq!(put(&service, owner, "in/a.txt", "aa").await.status, 204);
    assert_eq!(put(&service, owner, "in/b.txt", "aa").await.status, 201);
    assert_eq!(put(&service, owner, "gone.txt", "x").await.status, 201);
    assert_eq!(service.delete(&format!("{owner}/files/gone.txt")).await.status, 204);
    let request = json!({"inputs": {"line": "sent\n"}, "files": [
        {"path": "copied.txt", "from": {"agent": "shared", "path": "in/a.txt"}}
    ]});
    let form = format!(
        "--b\r\nContent-Disposition: form-data; name=\"request\"\r\n\r\n{request}\r\n--b\r\n\
         Content-Disposition: form-data; name=\"files\"; filename=\"uploaded.txt\"\r\n\r\nup\r\n--b--\r\n"
    );
    let sent = service.request(Method::POST, "/v1/agents/talker/invoke-iterative");
    let sent = sent.header("content-type", "multipart/form-data; boundary=b");
    let run = answer(sent.body(form)).await;
    assert_eq!(run.status, 200, "{:#}", run.body);
    let run = path_of(&run.body);
    service.kill().await;
    std::fs::remove_dir_all(service.dir.path().join("workspace")).unwrap();
    service.restart().await;
    assert_eq!(listed(&service, owner).await, ["in/a.txt", "in/b.txt"]);
    assert_eq!(content(&service, owner, "in/a.txt").await, "aa");
    assert_eq!(listed(&service, &run).await, ["copied.txt", "talk.txt", "uploaded.txt"]);
    assert_eq!(content(&service, &run, "uploaded.txt").await, "up");
    assert_eq!(content(&service, &run, "copied.txt").await, "aa");

    // Nothing is answered that is not kept, and nothing stays of it.
    let aside = objects.path().with_extension("aside");
    std::fs::rename(objects.path(), &aside).unwrap();
    std::fs::write(objects.path(), "in the way").unwrap();
    service.until("/readyz", |ready| !is_ready(ready)).await;
    std::fs::remove_file(objects.path()).unwrap();
    std::fs::rename(&aside, objects.path()).unwrap();
    service.until("/readyz", is_ready).await;
    assert_eq!(listed(&service, owner).await, ["in/a.txt", "in/b.txt"]);
}

async fn an_upload_is_recorded_before_a_crash(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    service.kill().await;
    service.restart_to_crash("after_files:1").await;
    let form = "--b\r\nContent-Disposition: form-data; name=\"files\"; filename=\"up.txt\"\r\n\r\nup\r\n--b--\r\n";
    let sent = service.request(Method::POST, "/v1/agents/shared/invoke-iterative");
    let sent = sent.header("content-type", "multipart/form-data; boundary=b").body(form);
    assert!(sent.send().await.is_err(), "it dies when the file is kept");
    service.exit_code().await;
    service.restart().await;
    let owner = "/v1/agents/shared";
    assert_eq!(content(&service, owner, "up.txt").await, "up");
    let audit = service.get("/v1/audit?action=file.written").await.body;
    assert_eq!(audit["data"].as_array().unwrap().len(), 1, "{audit:#}");
    let listed = service.get(&format!("{owner}/files")).await.body;
    assert!(listed["data"][0]["changed_by_subject"].is_string(), "{listed:#}");
}

async fn puts_and_deletes_of_callers_are_recorded_before_a_crash(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    let owner = "/v1/agents/shared";
    for (method, action, left) in
        [(Method::PUT, "file.written", 1), (Method::DELETE, "file.deleted", 0)]
    {
        service.kill().await;
        service.restart_to_crash("after_files:1").await;
        let sent = service.request(method, &format!("{owner}/files/a.txt")).body("a");
        assert!(sent.send().await.is_err(), "it dies when the change is kept");
        service.exit_code().await;
        service.restart().await;
        assert_eq!(listed(&service, owner).await.len(), left, "{action}");
        let audit = service.get(&format!("/v1/audit?action={action}")).await.body;
        assert_eq!(audit["data"].as_array().unwrap().len(), 1, "{audit:#}");
    }
}

async fn deleted_files_are_kept_no_more(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    let body = json!({"inputs": {"line": "private\n"}, "session_id": "s1"});
    service.run("talker", &body).await;
    assert_eq!(listed(&service, "/v1/sessions/s1").await, ["talk.txt"]);
    assert_eq!(service.delete("/v1/sessions/s1").await.status, 204);
    service.kill().await;
    service.restart().await;
    // One of the same name has nothing of it.
    let body = json!({"inputs": {"line": "new\n"}, "session_id": "s1"});
    service.run("talker", &body).await;
    assert_eq!(content(&service, "/v1/sessions/s1", "talk.txt").await, "new\n");
    nothing_comes_late_into_a_session(&service, "talker", "s1", "late.txt").await;
}

async fn quotas_count_files_in_the_object_store(db: Db) {
    let objects = place();
    let mut service =
        kept(&objects).config("[tools.file_ops]\nworkspace_quota = \"4KiB\"").start(db).await;
    let owner = "/v1/agents/shared";
    let three = "x".repeat(3000);
    assert_eq!(put(&service, owner, "a", &three).await.status, 201);
    service.kill().await;
    std::fs::remove_dir_all(service.dir.path().join("workspace")).unwrap();
    service.restart().await;
    assert_eq!(put(&service, owner, "b", &three).await.status, 413);
    let run = service.run("shared", &json!({"inputs": {"line": three}})).await;
    let results = results(&service, &path_of(&run)).await;
    assert!(results[0].starts_with("Error:"), "{results:#?}");
    assert_eq!(listed(&service, owner).await, ["a"]);
}

/// A file of that content beneath a directory.
fn with_content(directory: &Path, content: &[u8]) -> Option<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).find_map(|path| {
        if path.is_dir() {
            return with_content(&path, content);
        }
        (std::fs::read(&path).unwrap() == content).then_some(path)
    })
}

/// An entry of that name beneath a directory.
fn find(directory: &Path, name: &str) -> Option<PathBuf> {
    std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).find_map(|path| {
        if path.file_name().is_some_and(|it| it == name) {
            return Some(path);
        }
        if path.is_dir() { find(&path, name) } else { None }
    })
}

#[tokio::test]
async fn files_of_callers_are_the_same_on_all_replicas() {
    let objects = place();
    let (first, second) = two(&objects).await;
    let owner = "/v1/agents/shared";
    assert_eq!(listed(&second, owner).await, Vec::<String>::new());
    assert_eq!(put(&first, owner, "a.txt", "first").await.status, 201);
    assert_eq!(content(&second, owner, "a.txt").await, "first");
    assert_eq!(put(&second, owner, "a.txt", "second").await.status, 204);
    let (one, other) =
        (first.get(&format!("{owner}/files")).await, second.get(&format!("{owner}/files")).await);
    assert_eq!(one.body, other.body);
    assert_eq!(put(&first, owner, "deep/down/b.txt", "b").await.status, 201);
    assert_eq!(content(&second, owner, "deep/down/b.txt").await, "b");
    assert_eq!(first.delete(&format!("{owner}/files/deep/down/b.txt")).await.status, 204);
    assert_eq!(listed(&second, owner).await, ["a.txt"]);
    let left = find(&second.dir.path().join("workspace/default"), "deep");
    assert!(left.is_none(), "{left:?}");
    assert_eq!(first.delete(&format!("{owner}/files/a.txt")).await.status, 204);
    assert_eq!(second.get(&format!("{owner}/files/a.txt")).await.status, 404);
    assert_eq!(listed(&second, owner).await, Vec::<String>::new());
    an_emptied_directory_is_gone(&first, &second, &format!("{owner}/files")).await;

    // A file, and one beneath it, at the same moment.
    for round in 0..6 {
        let (path, beneath) = (format!("k{round}"), format!("k{round}/l"));
        let sent = tokio::join!(
            put(&first, owner, &path, "file"),
            put(&second, owner, &beneath, "beneath")
        );
        let kept = match [sent.0.status.as_u16(), sent.1.status.as_u16()] {
            [201, 409] => path,
            [409, 201] => beneath,
            other => panic!("{other:?} {:#} {:#}", sent.0.body, sent.1.body),
        };
        for service in [&first, &second] {
            assert_eq!(listed(service, owner).await, [kept.as_str()]);
        }
        assert_eq!(first.delete(&format!("{owner}/files/{kept}")).await.status, 204);
    }
}

#[tokio::test]
async fn files_that_cannot_be_brought_keep_no_caller() {
    let objects = place();
    let mut first = kept(&objects).start(Db::Postgres).await;
    let owner = "/v1/agents/shared";
    for path in ["k", "j/l"] {
        assert_eq!(put(&first, owner, path, "x").await.status, 201);
    }
    let mut database = sqlx::PgConnection::connect(&first.database_url).await.unwrap();
    // As databases of earlier versions may hold it.
    let bury = "UPDATE workspace_files SET path = 'shared/k/l' WHERE path = 'shared/j/l'";
    database.execute(bury).await.unwrap();
    first.kill().await;
    first.restart().await;
    assert_eq!(listed(&first, owner).await, ["k"]);
    let patient = kept_with(objects.path().to_str().unwrap(), "store_patience = \"2m\"");
    let second = patient.start_on(first.database_url.clone()).await;
    assert_eq!(listed(&second, owner).await, ["k"]);
    first.until_logged("lay beneath another file").await;
    assert_eq!(first.delete(&format!("{owner}/files/k")).await.status, 204);
    assert_eq!(put(&second, owner, "k/l", "x").await.status, 201);
    assert_eq!(listed(&first, owner).await, ["k/l"]);

    // A caller waits for the files no longer than it says.
    assert_eq!(put(&first, owner, "new", "not here yet").await.status, 201);
    let there = with_content(objects.path(), b"not here yet").unwrap();
    let aside = objects.path().join("aside");
    std::fs::rename(&there, &aside).unwrap();
    let since = std::time::Instant::now();
    let start = second.request(Method::POST, "/v1/agents/shared/invoke-iterative");
    let start = start.header("prefer", "wait=1").json(&json!({"inputs": {"line": "x"}}));
    let started = answer(start).await;
    assert_eq!(started.status, 202, "{:#}", started.body);
    assert!(since.elapsed().as_secs() < 60, "{:?}", since.elapsed());
    std::fs::rename(&aside, &there).unwrap();
    let ended = second.until(&path_of(&started.body), has_ended).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
}

#[tokio::test]
async fn only_an_empty_directory_holds_copies_and_only_of_one_store() {
    let (objects, others) = (place(), place());
    let service = kept(&objects).start(Db::Postgres).await;
    let filled = kept(&objects).file("mine.txt", "x").start_on(service.database_url.clone()).await;
    filled.until_logged("no copies of what the object store keeps").await;
    assert_eq!(filled.get("/readyz").await.status, 503);
    assert!(filled.dir.path().join("workspace/default/mine.txt").exists());
    let elsewhere = kept(&others).start_on(service.database_url.clone()).await;
    elsewhere.until_logged("not the object store that the replicas share").await;
    assert_eq!(elsewhere.get("/readyz").await.status, 503);
    let told = doctor(elsewhere.dir.path(), &elsewhere.database_url).await;
    assert_eq!(told["status"], "fail", "{told:#}");
    assert_eq!(doctor(service.dir.path(), &service.database_url).await["status"], "ok");
}

/// The database is not blamed for it.
#[tokio::test]
async fn an_object_store_that_is_silent_is_told_as_such() {
    let objects = place();
    let service = kept(&objects).start(Db::Postgres).await;
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let dir = TempDir::new().unwrap();
    let settings = format!(
        "[tools.workspace]\nstore = \"object\"\n[tools.workspace.object]\nurl = \"s3://b/p\"\nendpoint = \"http://{}\"\n",
        silent.local_addr().unwrap()
    );
    std::fs::write(dir.path().join("toolloop.toml"), settings).unwrap();
    let doctor = command(dir.path())
        .args(["doctor", "--json", "--listen", "127.0.0.1:0"])
        .args(["--database-url", &service.database_url])
        .envs([("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")])
        .output()
        .await
        .unwrap();
    let report: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    for (check, status) in [("workspace", "fail"), ("database", "ok"), ("clock", "ok")] {
        let found = report["checks"].as_array().unwrap().iter().find(|it| it["check"] == check);
        assert_eq!(found.unwrap()["status"], status, "{report:#}");
    }
}

/// What was changed and is not kept is undone, and that waits for all calls in the workspace.
async fn a_refused_change_of_a_file_undoes_nothing(db: Db) {
    let objects = place();
    let mut service = kept(&objects).start(db).await;
    let team = "/v1/agents/helper";
    assert_eq!(put(&service, team, "a", "a").await.status, 201);
    let under_way = service.dir.path().join("workspace/default/team/under-way");
    std::fs::write(&under_way, "by a call").unwrap();
    let send =
        |method: Method, path: &str| service.request(method, &format!("{team}/files/{path}"));
    for (request, status) in [
        (send(Method::PUT, "a").header("if-none-match", "*").body("b"), 412),
        (send(Method::DELETE, "a").header("if-match", "\"b\""), 412),
        (send(Method::DELETE, "missing"), 404),
    ] {
        let refused = answer(request).await;
        assert_eq!(refused.status, status, "{:#}", refused.body);
        assert_eq!(content(&service, team, "a").await, "a");
        assert!(under_way.exists(), "after {status}");
    }
    service.kill().await;
}
