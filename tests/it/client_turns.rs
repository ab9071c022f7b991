//! When the caller is asked to execute a call of its tools: together with the calls before it if these are
//! of its tools, too, and their results cannot change the decision on it; else when its turn has come.
//!
//! | together with | what holds |
//! |---|---|
//! | approvals | calls that need one are asked for at once, before a skill is read; they are judged again when they are due |
//! | crash, other replica | what is asked for later is asked by who drives the run then |
//! | cancel, limits | a call whose turn does not come is not the caller's to execute |
//! | children, handoffs, MCP tools that ask | calls behind them wait as behind any other |

use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    calls_that_nothing_stands_between_are_asked_for_together,
    a_refused_call_delays_none,
    a_skill_that_is_read_first_holds_for_the_calls_behind_it,
    data_that_is_read_first_counts_for_later_calls,
    calls_whose_turn_comes_later_survive_a_crash,
}

const HOST: &str = "
model: scripted/host
tools: [file_ops]
skills: [narrow, asks]
enable_double_confirmation: false
tool_options: {secret: {yields: [private]}, limited: {rate_limit_per_minute: 1}}
governance:
  paths: {write: ['**'], private: [vault/**]}
  flow:
    - {when: \"labels.private && tool == 'send'\", do: deny}
    - {when: \"labels.untrusted && tool == 'publish'\", do: ask}
    - {when: \"labels.private && !labels.untrusted && tool == 'note'\", do: deny}
";

const NAMES: [&str; 7] = ["first", "second", "secret", "send", "publish", "note", "limited"];

fn call(tool: &str) -> Value {
    json!({"tool": tool, "arguments": {}})
}

fn skill(name: &str) -> Value {
    json!({"tool": "use_skill", "arguments": {"name": name}})
}

fn file_ops(operation: &str, path: &str) -> Value {
    let mut arguments = json!({"operation": operation, "path": path});
    if operation == "append" {
        arguments["content"] = json!("x");
    }
    json!({"tool": "file_ops", "arguments": arguments})
}

async fn host(db: Db) -> Service {
    Setup::new()
        .agent("host", HOST)
        .scenario("host", "steps: [{text: done}]")
        .skill("narrow", "disallowed_tools: [second]\n", "Be careful.")
        .skill("asks", "approval_required: [second, file_ops]\n", "Ask first.")
        .file("vault/key.txt", "key")
        .file("old.txt", "old")
        .start(db)
        .await
}

/// A run whose model makes these calls in one response.
async fn started(service: &Service, calls: &[Value]) -> Value {
    let steps = json!({"steps": [{"tool_calls": calls}, {"text": "done"}]});
    service.write("scenarios/host.yaml", &steps.to_string());
    let tool =
        |name: &&str| json!({"name": name, "effect": "read", "input_schema": {"type": "object"}});
    let body = json!({"client_tools": NAMES.iter().map(tool).collect::<Vec<_>>()});
    let run = service.post("/v1/agents/host/invoke-iterative", &body).await;
    assert_eq!(run.status, 202, "{:#}\n{}", run.body, service.log());
    run.body
}

/// What a run waits for: kinds and tools.
fn pending(run: &Value) -> Vec<(&str, &str)> {
    let pending = run["pending"].as_array().unwrap().iter();
    pending.map(|call| (text(call, "kind"), text(call, "tool"))).collect()
}

/// Answers everything that the run waits for; the run as it is when it waits or has ended again.
async fn answered(service: &Service, run: &Value) -> Value {
    let (path, calls) = paths(run);
    let known = calls.len();
    for (call, (kind, _)) in calls.iter().zip(pending(run)) {
        let (verb, body) = match kind {
            "client" => ("result", json!({"content": "given"})),
            _ => ("approve", json!({})),
        };
        let taken = service.post(&format!("{call}/{verb}"), &body).await;
        assert_eq!(taken.status, 200, "{taken:?}");
    }
    assert!(known > 0, "{run:#}");
    service.until(&path, |run| run["finished_at"].is_string() || !pending(run).is_empty()).await
}

/// Tools and decisions of all calls of a run that has ended.
async fn decided(service: &Service, run: &Value) -> Vec<(String, String)> {
    let done = ended(service, &paths(run).0).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    let calls = format!("{}/tool-calls", paths(run).0);
    let calls = service.get(&calls).await.body["data"].as_array().unwrap().clone();
    let of = |call: &Value| (text(call, "tool").to_owned(), text(call, "decision").to_owned());
    calls.iter().map(of).collect()
}

/// Answers what is asked for, as often as something is; it must be this.
async fn asks(service: &Service, calls: &[Value], rounds: &[&[(&str, &str)]]) -> Value {
    let mut run = started(service, calls).await;
    for round in rounds {
        assert_eq!(pending(&run), *round, "{calls:?}: {run:#}");
        run = answered(service, &run).await;
    }
    assert_eq!(run["status"], "completed", "{calls:?}: {run:#}");
    run
}

async fn calls_that_nothing_stands_between_are_asked_for_together(db: Db) {
    let service = host(db).await;
    let clients = [("client", "first"), ("client", "second"), ("client", "send")];
    asks(&service, &["first", "second", "send"].map(call), &[&clients]).await;
    // Behind a call that the service executes, in the order of the response.
    let calls = [call("first"), file_ops("append", "log.txt"), call("second"), call("send")];
    let mut run = started(&service, &calls).await;
    assert_eq!(pending(&run), clients[..1], "{run:#}");
    assert_eq!(file(&service, "log.txt"), "");
    run = answered(&service, &run).await;
    assert_eq!((pending(&run), file(&service, "log.txt").as_str()), (clients[1..].to_vec(), "x"));
    assert_eq!(answered(&service, &run).await["status"], "completed");
    // Approvals are asked for at once all the same.
    let calls = [call("first"), call("second"), file_ops("delete", "old.txt"), call("send")];
    let rounds: [&[_]; 2] = [&[clients[0], clients[1], ("approval", "file_ops")], &clients[2..]];
    asks(&service, &calls, &rounds).await;
}

async fn a_refused_call_delays_none(db: Db) {
    let service = host(db).await;
    let calls = [call("limited"), call("limited"), call("first")];
    let run = asks(&service, &calls, &[&[("client", "limited"), ("client", "first")]]).await;
    let calls = service.get(&format!("{}/tool-calls", paths(&run).0)).await.body;
    let refused: Vec<&Value> =
        calls["data"].as_array().unwrap().iter().map(|call| &call["is_error"]).collect();
    assert_eq!(refused, [false, true, false], "{calls:#}");
}

async fn a_skill_that_is_read_first_holds_for_the_calls_behind_it(db: Db) {
    let service = host(db).await;
    let first: &[_] = &[("client", "first")];
    let calls = [call("first"), skill("narrow"), call("second"), call("send")];
    let run = asks(&service, &calls, &[first, &[("client", "send")]]).await;
    assert_eq!(decided(&service, &run).await[2], ("second".into(), "blocked".into()));

    let calls = [call("first"), skill("asks"), call("second"), file_ops("delete", "old.txt")];
    let approvals: &[_] = &[("approval", "second"), ("approval", "file_ops")];
    let run = asks(&service, &calls, &[first, approvals, &[("client", "second")]]).await;
    let asked = [("second".into(), "escalated".into()), ("file_ops".into(), "escalated".into())];
    assert_eq!(decided(&service, &run).await[2..], asked);
}

async fn data_that_is_read_first_counts_for_later_calls(db: Db) {
    let service = host(db).await;
    let first: &[_] = &[("client", "first")];
    let blocked = |tool: &str| (tool.to_owned(), "blocked".to_owned());
    let calls = [call("first"), file_ops("read", "vault/key.txt"), call("send")];
    let run = asks(&service, &calls, &[first]).await;
    assert_eq!(decided(&service, &run).await[2], blocked("send"));
    // What a tool of the caller's own returns counts, too; calls that it does not matter to are
    // asked for with it.
    let calls = ["secret", "first", "send"].map(call);
    let run = asks(&service, &calls, &[&[("client", "secret"), ("client", "first")]]).await;
    assert_eq!(decided(&service, &run).await[2], blocked("send"));
    let rounds: [&[_]; 3] = [first, &[("approval", "publish")], &[("client", "publish")]];
    asks(&service, &["first", "publish"].map(call), &rounds).await;
    // A result may be missing, or be labelled for what it looks like.
    let rounds: [&[_]; 2] = [&[("client", "first"), ("client", "secret")], &[("client", "note")]];
    asks(&service, &["first", "secret", "note"].map(call), &rounds).await;
}

async fn calls_whose_turn_comes_later_survive_a_crash(db: Db) {
    let mut service = host(db).await;
    let calls = [call("first"), skill("asks"), call("second")];
    let mut run = started(&service, &calls).await;
    for expected in [("client", "first"), ("approval", "second"), ("client", "second")] {
        service.kill().await;
        service.restart().await;
        let path = paths(&run).0;
        run = service.get(&path).await.body;
        assert_eq!(pending(&run), [expected], "{run:#}");
        run = answered(&service, &run).await;
    }
    assert_eq!(run["status"], "completed", "{run:#}");
}
