//! Commands that speak to the API, of a service elsewhere and of the one in their own process.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

use super::{ECHO, Output, directory, toolloop};
use crate::service::{Db, Service, Setup, Signal, command, on_both_stores};

fn echo_setup() -> Setup {
    Setup::new()
        .agent("echo", &ECHO.replace("name: echo\n", ""))
        .scenario("echo", "steps: [{text: '{{ inputs.word }}!'}]")
        .agent("slow", "model: scripted/slow\nenable_double_confirmation: false\ntools: [file_ops]\n")
        .scenario(
            "slow",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]}, {delay_ms: 600000, text: no}]",
        )
}

/// A command against a running service.
async fn remote(service: &Service, arguments: &[&str]) -> Output {
    let url = service.url("");
    toolloop(service.dir.path(), &[arguments, &["--server", &url, "--key", &service.key]].concat())
        .await
}

fn json_of(output: &Output) -> Value {
    serde_json::from_str(&output.out)
        .unwrap_or_else(|error| panic!("{error}: {}{}", output.out, output.err))
}

async fn commands_work_over_the_network(db: Db) {
    let service = echo_setup().start(db).await;
    let done = remote(&service, &["invoke", "echo", "--input", "word=tide"]).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    let answer = json_of(&done);
    assert_eq!(answer["output"], json!({"result": "tide!"}));
    assert!(
        done.err.contains("attempt 1, iteration 1") && done.err.contains("completed after"),
        "{}",
        done.err
    );
    let id = answer["run_id"].as_str().unwrap();
    let stored = service.get(&format!("/v1/runs/{id}")).await.body;
    for (key, value) in answer.as_object().unwrap() {
        assert_eq!(&stored[key], value, "{key}");
    }

    let single = json_of(
        &remote(&service, &["invoke", "echo", "--input", "word=x", "--single", "--json"]).await,
    );
    assert!(
        single["output"] == json!({"result": "x!"}) && single.get("iterations").is_none(),
        "{single:#}"
    );

    let listed = json_of(&remote(&service, &["runs", "list", "--json", "--limit", "1"]).await);
    assert_eq!(
        (listed["data"].as_array().unwrap().len(), &listed["data"][0]["run_id"]),
        (1, &single["run_id"])
    );
    let filter = [
        "runs",
        "list",
        "--agent",
        "echo",
        "--status",
        "completed",
        "--since",
        "1h",
        "--until",
        "2100-01-01T00:00:00Z",
    ];
    let table = remote(&service, &filter).await;
    assert_eq!((table.code, table.out.lines().count()), (Some(0), 3), "{}{}", table.out, table.err);
    assert!(table.out.starts_with("ID ") && table.out.contains(id), "{}", table.out);
    let none = remote(&service, &["runs", "list", "--agent", "other"]).await;
    assert_eq!((none.code, none.out.as_str()), (Some(0), ""));

    let shown = json_of(&remote(&service, &["runs", "show", id, "--json"]).await);
    assert_eq!(
        (&shown["run_id"], &shown["parts"]["iterations"][0]["model"]),
        (&answer["run_id"], &json!("echo"))
    );
    let shown = remote(&service, &["runs", "show", id]).await.out;
    assert!(
        shown.starts_with("Run ")
            && shown.contains("Status      completed")
            && shown.contains("tide!"),
        "{shown}"
    );

    let watched = remote(&service, &["runs", "watch", id]).await;
    assert_eq!(watched.code, Some(0), "{}", watched.err);
    assert!(
        watched.out.contains("run.started") && watched.out.contains("run.completed"),
        "{}",
        watched.out
    );
    let watched = remote(&service, &["runs", "watch", id, "--json"]).await.out;
    let events: Vec<Value> =
        watched.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(
        events.iter().map(|e| e["seq"].as_u64().unwrap()).collect::<Vec<_>>(),
        (1..=events.len() as u64).collect::<Vec<_>>()
    );
    assert_eq!(events.last().unwrap()["data"]["run"], answer);

    let over = remote(&service, &["runs", "cancel", id]).await;
    assert!(
        over.code == Some(0) && over.out.contains("had already ended: completed"),
        "{}{}",
        over.out,
        over.err
    );
}

async fn keys_that_are_needed_are_revoked_only_by_force(db: Db) {
    let mut service = Setup::new().start(db).await;
    let create = ["keys", "create", "--name", "x", "--json", "--scope"];
    let second = json_of(&remote(&service, &[&create[..], &["admin"]].concat()).await);
    let theirs = json_of(
        &remote(&service, &[&create[..], &["runs:read", "--tenant", "acme"]].concat()).await,
    );
    // Without a terminal nothing is asked.
    let refused = remote(&service, &["keys", "revoke", "testadmin"]).await;
    assert_eq!(refused.code, Some(1), "{}", refused.err);
    assert!(refused.err.contains("operator") && refused.err.contains("--force"), "{}", refused.err);
    assert!(!refused.err.contains("force=true"), "{}", refused.err);
    let id = theirs["id"].as_str().unwrap();
    let revoked = remote(&service, &["keys", "revoke", id, "--tenant", "acme", "--json"]).await;
    assert!(json_of(&revoked)["revoked_at"].is_string(), "{}{}", revoked.out, revoked.err);

    let own = json_of(&remote(&service, &[&create[..], &["keys:admin"]].concat()).await);
    let admin = std::mem::replace(&mut service.key, own["key"].as_str().unwrap().to_owned());
    let itself = ["keys", "revoke", own["id"].as_str().unwrap(), "--json"];
    let revoked = remote(&service, &itself).await;
    assert_eq!((revoked.code, &json_of(&revoked)["id"]), (Some(0), &own["id"]), "{}", revoked.err);
    service.key = admin;

    let forced =
        remote(&service, &["keys", "revoke", "testadmin", "--force", "--descendants"]).await;
    assert_eq!(
        (forced.code, forced.out.trim()),
        (Some(0), "Key testadmin is revoked."),
        "{}",
        forced.err
    );
    second["key"].as_str().unwrap().clone_into(&mut service.key);
    assert_eq!(service.get("/v1/keys").await.status, 401, "it went with the key that created it");
}

async fn keys_are_created_over_the_network(db: Db) {
    let service = echo_setup().start(db).await;
    let made = json_of(
        &remote(&service, &["keys", "create", "--name", "ci", "--scope", "runs:read", "--json"])
            .await,
    );
    let key = made["key"].as_str().unwrap();
    let url = service.url("");
    let with_key = |arguments: &'static [&'static str]| {
        let mut command = command(service.dir.path());
        command.args(arguments).env("TOOLLOOP_SERVER", &url).env("TOOLLOOP_KEY", key);
        async move { command.output().await.unwrap() }
    };
    assert_eq!(with_key(&["runs", "list"]).await.status.code(), Some(0));
    let refused = with_key(&["invoke", "echo"]).await;
    assert_eq!(refused.status.code(), Some(1));
    let said = String::from_utf8(refused.stderr).unwrap();
    assert!(said.contains("agents:invoke") && said.contains("toolloop keys create"), "{said}");

    let listed = remote(&service, &["keys", "list"]).await.out;
    assert!(listed.contains(made["id"].as_str().unwrap()) && !listed.contains(key), "{listed}");
    let revoked = json_of(
        &remote(&service, &["keys", "revoke", made["id"].as_str().unwrap(), "--json"]).await,
    );
    assert!(revoked["revoked_at"].is_string(), "{revoked}");
    let said = String::from_utf8(with_key(&["runs", "list"]).await.stderr).unwrap();
    assert!(said.contains("--key or in TOOLLOOP_KEY"), "{said}");
    let unknown = remote(&service, &["keys", "revoke", "nobody"]).await;
    assert!(
        unknown.code == Some(1) && unknown.err.contains("toolloop keys list"),
        "{}",
        unknown.err
    );
}

/// Interrupts the process that follows the slow run, as Ctrl-C would.
async fn interrupted(
    mut invoke: Command,
    service: Option<&Service>,
    signal: Signal,
) -> (Output, String) {
    let mut child = invoke.spawn().unwrap();
    let mut err = child.stderr.take().unwrap();
    let mut said = String::new();
    let mut buffer = [0; 1024];
    while !said.contains("iteration 2") {
        let read = tokio::time::timeout(Duration::from_mins(1), err.read(&mut buffer))
            .await
            .unwrap()
            .unwrap();
        assert!(read > 0, "{said}");
        said.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    if let Some(service) = service {
        service.until("/v1/runs?status=running", |runs| runs["data"][0]["agent"] == "slow").await;
    }
    crate::service::send_signal(&child, signal);
    err.read_to_string(&mut said).await.unwrap();
    let output = child.wait_with_output().await.unwrap();
    let out = String::from_utf8(output.stdout).unwrap();
    (Output { code: output.status.code(), out, err: said.clone() }, said)
}

async fn an_interrupt_cancels_the_run(db: Db) {
    let service = echo_setup().start(db).await;
    let mut invoke = command(service.dir.path());
    invoke.args(["invoke", "slow", "--server", &service.url(""), "--key", &service.key]);
    let (over, said) = interrupted(invoke, Some(&service), Signal::INT).await;
    assert_eq!(over.code, Some(130), "{said}");
    let answer = json_of(&over);
    assert_eq!(
        (&answer["status"], &answer["error"]["context"]["reason"]),
        (&json!("cancelled"), &json!("interrupted at the terminal"))
    );
    let stored =
        service.get(&format!("/v1/runs/{}", answer["run_id"].as_str().unwrap())).await.body;
    assert_eq!(stored["status"], "cancelled");
}

/// Whether this process ignores the signal, as after `nohup`; its children inherit that.
fn is_ignored(signal: Signal) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let mask = u64::from_str_radix(mask.trim(), 16).unwrap();
    mask >> (signal.as_raw() - 1) & 1 == 1
}

#[tokio::test]
async fn an_interrupt_cancels_a_run_in_this_process() {
    let dir = directory(&[
        (
            "agents/slow.yaml",
            "name: slow\nmodel: scripted/slow\nenable_double_confirmation: false\ntools: [file_ops]\n",
        ),
        (
            "scenarios/slow.yaml",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]}, {delay_ms: 600000, text: no}]",
        ),
    ]);
    for (signal, reason) in [
        (Signal::INT, "interrupted at the terminal"),
        (Signal::TERM, "terminated by SIGTERM"),
        (Signal::HUP, "terminated by SIGHUP"),
    ] {
        // Only this handler is not installed where the signal is ignored.
        if signal == Signal::HUP && is_ignored(signal) {
            println!("left out: {signal:?} is ignored here, and so in the commands started here");
            continue;
        }
        let mut invoke = command(dir.path());
        invoke.args(["invoke", "slow"]);
        let (over, said) = interrupted(invoke, None, signal).await;
        assert_eq!(over.code, Some(130), "{signal:?}: {said}");
        let answer = json_of(&over);
        assert_eq!(answer["error"]["context"]["reason"], reason, "{answer:#}");
        let listed = json_of(&toolloop(dir.path(), &["runs", "list", "--json"]).await);
        assert_eq!(
            (&listed["data"][0]["status"], &listed["data"][0]["run_id"]),
            (&json!("cancelled"), &answer["run_id"])
        );
    }
}

/// Passes connections on to the service and cuts each of the first ones after so many bytes of
/// answer.
async fn relay(service: &Service, cuts: &'static [u64]) -> (String, Arc<AtomicUsize>) {
    let target = service.url("").replace("http://", "");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let accepted = Arc::<AtomicUsize>::default();
    let counter = Arc::clone(&accepted);
    tokio::spawn(async move {
        loop {
            let (caller, _) = listener.accept().await.unwrap();
            let cut = cuts.get(counter.fetch_add(1, Ordering::SeqCst)).copied().unwrap_or(u64::MAX);
            let (mut caller_in, mut caller_out) = caller.into_split();
            let (service_in, mut service_out) =
                TcpStream::connect(&target).await.unwrap().into_split();
            let asking =
                tokio::spawn(
                    async move { tokio::io::copy(&mut caller_in, &mut service_out).await },
                );
            tokio::spawn(async move {
                let _ = tokio::io::copy(&mut service_in.take(cut), &mut caller_out).await;
                let _ = caller_out.shutdown().await;
                asking.abort();
            });
        }
    });
    (format!("http://{address}"), accepted)
}

async fn a_broken_connection_is_resumed(db: Db) {
    let service = Setup::new()
        .agent("steps", "model: scripted/steps\nenable_double_confirmation: false\ntools: [file_ops]\n")
        .scenario(
            "steps",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]}, {delay_ms: 300, text: done}]",
        )
        .start(db)
        .await;
    let (url, accepted) = relay(&service, &[700, 400, 0]).await;
    let done =
        toolloop(service.dir.path(), &["invoke", "steps", "--server", &url, "--key", &service.key])
            .await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert_eq!(json_of(&done)["output"], json!({"result": "done"}));
    assert!(accepted.load(Ordering::SeqCst) > 2, "the connection was not cut");
    let seen: Vec<&str> = done
        .err
        .lines()
        .filter(|line| line.starts_with("attempt") || line.contains("file_ops:"))
        .collect();
    assert_eq!(seen.len(), 3, "each event once: {}", done.err);
}

async fn errors_come_with_advice(db: Db) {
    let service = echo_setup().start(db).await;
    let url = service.url("");
    let unknown = remote(&service, &["invoke", "nobody"]).await;
    assert!(
        unknown.code == Some(1) && unknown.err.contains("known agents: echo, slow"),
        "{}",
        unknown.err
    );
    let narrow = json!({"name": "narrow", "scopes": ["agents:invoke"]});
    let narrow = service.post("/v1/keys", &narrow).await.body["key"].as_str().unwrap().to_owned();
    let unlisted = ["invoke", "nobody", "--server", &url, "--key", &narrow];
    let unlisted = toolloop(service.dir.path(), &unlisted).await;
    assert!(
        unlisted.code == Some(1) && !unlisted.err.contains("no agents are defined"),
        "{}",
        unlisted.err
    );
    let invalid = remote(&service, &["invoke", "echo", "--input", "word:=1"]).await;
    assert!(invalid.code == Some(1) && invalid.err.contains("/word"), "{}", invalid.err);
    let no_key = toolloop(service.dir.path(), &["runs", "list", "--server", &url]).await;
    assert!(no_key.code == Some(1) && no_key.err.contains("TOOLLOOP_KEY"), "{}", no_key.err);
    let missing =
        remote(&service, &["runs", "watch", "01970000-0000-7000-8000-000000000000"]).await;
    assert!(
        missing.code == Some(1) && missing.err.contains("There is no such run"),
        "{}",
        missing.err
    );
    let status = remote(&service, &["runs", "list", "--status", "asleep"]).await;
    assert!(status.code == Some(2) && status.err.contains("status"), "{}", status.err);
    let nonsense = toolloop(service.dir.path(), &["runs", "list", "--server", "ftp://x"]).await;
    assert!(
        nonsense.code == Some(2) && nonsense.err.contains("http://127.0.0.1:8080"),
        "{}",
        nonsense.err
    );
    let tenant = remote(&service, &["keys", "list", "--tenant", "other", "--json"]).await;
    assert_eq!(json_of(&tenant)["data"], json!([]), "{}", tenant.err);

    let here =
        toolloop(service.dir.path(), &["runs", "list", "--database-url", &service.database_url])
            .await;
    match db {
        Db::Postgres => assert_eq!(here.code, Some(0), "{}", here.err),
        Db::Sqlite => {
            assert!(here.code == Some(1) && here.err.contains("--server http://"), "{}", here.err);
        }
    }
}

#[tokio::test]
async fn an_unreachable_service_is_reported_with_its_address() {
    let dir = directory(&[]);
    let away = toolloop(dir.path(), &["runs", "list", "--server", "http://127.0.0.1:1"]).await;
    assert_eq!(away.code, Some(1));
    assert!(
        away.err.contains("http://127.0.0.1:1") && away.err.contains("toolloop serve"),
        "{}",
        away.err
    );
}

/// The service's runs are seen and cancelled from another process on the same database.
#[tokio::test]
async fn commands_share_a_postgres_database_with_the_service() {
    let service = echo_setup().start(Db::Postgres).await;
    let database = ["--database-url", &service.database_url];
    let here = async |arguments: &[&str]| {
        toolloop(service.dir.path(), &[arguments, &database].concat()).await
    };
    let run = service
        .request(reqwest::Method::POST, "/v1/agents/slow/invoke-iterative")
        .header("Prefer", "respond-async");
    let run = crate::service::answer(run.json(&json!({}))).await;
    assert_eq!(run.status, 202);
    let id = run.body["run_id"].as_str().unwrap();
    service.until(&format!("/v1/runs/{id}"), |run| run["iterations"] == 1).await;
    let (watch, cancel) = (["runs", "watch", id], ["runs", "cancel", id, "--reason", "enough"]);
    let (watched, cancelled) = tokio::join!(here(&watch), here(&cancel));
    assert_eq!(cancelled.code, Some(0), "{}", cancelled.err);
    assert_eq!(watched.code, Some(130), "{}", watched.err);
    assert!(watched.out.contains("run.cancelled"), "{}", watched.out);
    let ended = service.get(&format!("/v1/runs/{id}")).await.body;
    assert_eq!(ended["error"]["context"]["reason"], "enough");
    let done = here(&["invoke", "echo", "--input", "word=x"]).await;
    assert_eq!(done.code, Some(0), "{}", done.err);
    assert_eq!(
        service
            .get(&format!("/v1/runs/{}", json_of(&done)["run_id"].as_str().unwrap()))
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn a_closed_pipe_is_not_an_error() {
    let dir =
        directory(&[("agents/echo.yaml", ECHO), ("scenarios/echo.yaml", "steps: [{text: hi}]")]);
    assert_eq!(toolloop(dir.path(), &["invoke", "echo"]).await.code, Some(0));
    for arguments in [
        &["runs", "list"][..],
        &["openapi"],
        &["doctor", "--listen", "127.0.0.1:0"],
        &["invoke", "echo"],
    ] {
        let mut child = command(dir.path()).args(arguments).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().await.unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && !said.contains("toolloop:") && !said.contains("panicked"),
            "{arguments:?}: {said}"
        );
    }
}

on_both_stores!(
    commands_work_over_the_network,
    keys_are_created_over_the_network,
    keys_that_are_needed_are_revoked_only_by_force,
    an_interrupt_cancels_the_run,
    a_broken_connection_is_resumed,
    errors_come_with_advice,
);
