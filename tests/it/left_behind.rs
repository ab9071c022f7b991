//! What programs leave in the workspace: changes that are told and counted, and what `paths.deny`
//! forbids, which is put aside. Through the HTTP API, on both stores.
//!
//! With other features. Gate: rules of the agent, of a parent, and rules that only observe (here). Budgets:
//! files that programs change end the run (here). Cancel, timeout: what is left is put aside before the
//! run ends (here). Crash of the service: the workspace is not looked through, as the docs say. Console, streaming: the events
//! carry the changes as those of `file_ops`. Other replica: the workspace is shared.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::script_tools::{events, python};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    denied_files_of_programs_are_taken_out,
    a_program_that_is_given_up_leaves_nothing_denied,
    a_parents_rules_hold_for_files_of_children,
    a_file_denied_by_an_observing_rule_stays_and_is_told,
    changes_of_programs_are_told_and_counted,
    changes_of_programs_end_a_run_over_its_budget,
    a_child_over_the_rest_of_its_parents_budget_shares_the_limit,
    many_changes_are_counted_and_not_listed,
    a_checkout_does_not_end_a_run_unless_a_bound_is_written,
    putting_aside_follows_no_link,
    files_known_from_the_last_call_hide_no_change,
}

pub const DENY: &str = "deny: ['**/.env', 'secret/**', '*.lock']";
const COMMANDS: &str = "commands: {allow: [{command: cp}, {command: mkdir}, {command: mv}, {command: touch}, {command: rm}, \
     {command: ln}, {command: sleep}, {command: chmod}, {command: ls, effect: read}, {command: cat, effect: read}]}";

/// An agent that calls tools, one a turn.
pub fn with(setup: Setup, name: &str, governance: &str, calls: &[(&str, Value)]) -> Setup {
    let scripts = if calls.iter().any(|(tool, _)| tool.starts_with("script:")) {
        ", 'script:set/*'"
    } else {
        ""
    };
    let seconds = if name == "late" { 10 } else { 60 };
    let agent = format!(
        "model: scripted/{name}\ntools: [shell, file_ops{scripts}]\nenable_double_confirmation: false\nlimits: \
         {{tool_call_timeout_seconds: {seconds}, error_threshold: 50, max_iterations: 60, max_iterations_per_attempt: 60}}\ngovernance: {{autonomy: full, \
         {COMMANDS}, {governance}}}\n"
    );
    let call = |(tool, arguments): &(&str, Value)| {
        json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    setup
        .agent(name, &agent)
        .scenario(name, &format!("steps: [{}, {{text: done}}]", steps.join(", ")))
}

pub fn lines(commands: &[&'static str]) -> Vec<(&'static str, Value)> {
    commands.iter().map(|command| ("shell", json!({"command": command}))).collect()
}

pub fn place(service: &Service, path: &str) -> PathBuf {
    service.dir.path().join("workspace/default").join(path)
}

pub fn is_there(service: &Service, path: &str) -> bool {
    place(service, path).symlink_metadata().is_ok()
}

pub async fn completed(service: &Service, run: &Value) -> Vec<Value> {
    events(service, run, "tool_call.completed").await
}

pub fn content(call: &Value) -> &str {
    call["content"].as_str().unwrap()
}

/// Paths with what happened to them.
pub fn told(call: &Value) -> Value {
    let changes = call["changes"].as_array().unwrap();
    changes.iter().map(|change| json!([change["path"], change["change"]])).collect()
}

async fn used(service: &Service, run: &Value) -> Value {
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["budget"]["used"].clone()
}

/// The audit records of what programs have left.
pub async fn audited(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/audit?limit=200&run_id={}", run["run_id"].as_str().unwrap());
    let all = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let mut of_files: Vec<Value> =
        all.into_iter().filter(|record| record["arguments"].get("left").is_some()).collect();
    of_files.reverse();
    of_files
}

async fn denied_files_of_programs_are_taken_out(db: Db) {
    let calls = lines(&[
        "cp a.txt .env",
        "mkdir secret && cp a.txt secret/k",
        "mkdir -p sub/deep && cp a.txt sub/deep/.env && touch sub/fine",
        "mv b.txt cargo.lock",
        "touch there.lock",
        "touch fine.txt",
    ]);
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let service = with(Setup::new(), "worker", &governance, &calls)
        .file("a.txt", "a")
        .file("b.txt", "b")
        .file("there.lock", "locked")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let calls = completed(&service, &run).await;
    for (index, path, rule) in [
        (0, "\".env\"", "**/.env"),
        (1, "\"secret\"", "secret/**"),
        (2, "\"sub/deep/.env\"", "**/.env"),
        (3, "\"cargo.lock\" (it was \"b.txt\" before)", "*.lock"),
    ] {
        let call = &calls[index];
        assert_eq!(call["failure"], "tool_error", "{call:#}");
        let expected =
            format!("which were moved out of the workspace: {path}, which is denied by {rule}.");
        assert!(content(call).contains(&expected), "{expected}: {call:#}");
        assert!(content(call).contains("exit_code"), "what the programs answered: {call:#}");
    }
    assert_eq!(calls[5]["failure"], Value::Null, "{:#}", calls[5]);
    for path in [".env", "secret", "sub/deep/.env", "cargo.lock", "b.txt"] {
        assert!(!is_there(&service, path), "{path}");
    }
    for path in ["a.txt", "sub/deep", "sub/fine", "fine.txt"] {
        assert!(is_there(&service, path), "{path}");
    }
    // What was there before is hidden, and stays as it was.
    assert_eq!(std::fs::read_to_string(place(&service, "there.lock")).unwrap(), "locked");
    assert_eq!(told(&calls[0]), json!([]));
    assert_eq!(told(&calls[2]), json!([["sub/fine", "created"]]));
    assert_eq!(told(&calls[3]), json!([["b.txt", "deleted"]]));
    let audited = audited(&service, &run).await;
    let shown = |record: &Value| {
        let keys = ["rule", "pattern", "decision", "outcome"].map(|key| record[key].clone());
        json!([record["arguments"]["left"]["path"], keys])
    };
    let shown: Vec<Value> = audited.iter().map(shown).collect();
    let blocked =
        |path: &str, pattern: &str| json!([path, ["path", pattern, "blocked", "blocked"]]);
    assert_eq!(
        shown,
        [
            blocked(".env", "**/.env"),
            blocked("secret", "secret/**"),
            blocked("sub/deep/.env", "**/.env"),
            blocked("cargo.lock", "*.lock"),
        ],
        "{audited:#?}"
    );
}

async fn a_program_that_is_given_up_leaves_nothing_denied(db: Db) {
    let late = lines(&["cp a.txt .env && touch other && sleep 97"]);
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let setup = with(Setup::new(), "late", &governance, &late);
    let service = with(setup, "worker", &governance, &lines(&["cp a.txt sub/.env && sleep 98"]))
        .file("a.txt", "a")
        .file("sub/x", "x")
        .start(db)
        .await;
    // The executor gives the call up.
    let run = service.run("late", &json!({})).await;
    let calls = completed(&service, &run).await;
    assert_eq!(calls[0]["failure"], "timeout", "{:#}", calls[0]);
    assert!(content(&calls[0]).contains("\".env\", which is denied by **/.env"), "{:#}", calls[0]);
    assert_eq!(told(&calls[0]), json!([["other", "created"]]));
    assert!(!is_there(&service, ".env"));
    // The run is cancelled.
    let path = service.enqueue("worker").await;
    service.until(&path, |run| run["status"] == "running").await;
    let until = Instant::now() + Duration::from_mins(1);
    while !is_there(&service, "sub/.env") {
        assert!(Instant::now() < until, "the program does not start: {}", service.log());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    service.post(&format!("{path}/cancel"), &json!({})).await;
    let run = service.until(&path, |run| run["status"] == "cancelled").await;
    assert!(!is_there(&service, "sub/.env"), "before the run has ended");
    let calls = completed(&service, &run).await;
    assert!(content(&calls[0]).contains("sub/.env"), "{:#}", calls[0]);
    assert_eq!(audited(&service, &run).await.len(), 1);
}

async fn a_parents_rules_hold_for_files_of_children(db: Db) {
    let parent = "model: scripted/parent\ntools: ['agent:worker']\ngovernance: {autonomy: full, paths: {deny: \
                  ['**/*.key']}}\nenable_double_confirmation: false\n";
    let calls = lines(&["touch sub/a.key"]);
    let service = with(Setup::new(), "worker", "paths: {write: ['./**']}", &calls)
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: 'agent:worker', arguments: {}}]}, {text: done}]",
        )
        .file("sub/x", "x")
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let child = service.get("/v1/runs?agent=worker").await.body["data"][0].clone();
    let calls = completed(&service, &child).await;
    assert!(content(&calls[0]).contains("denied by **/*.key"), "{:#}", calls[0]);
    assert!(!is_there(&service, "sub/a.key"));
    // The child's own rules do not mind.
    let run = service.run("worker", &json!({})).await;
    assert_eq!(completed(&service, &run).await[0]["failure"], Value::Null);
    assert!(is_there(&service, "sub/a.key"));
}

async fn a_file_denied_by_an_observing_rule_stays_and_is_told(db: Db) {
    let governance = "paths: {write: ['./**'], deny: [{pattern: '**/.env', mode: observe}]}";
    let calls = lines(&["cp a.txt .env", "cat a.txt"]);
    let service =
        with(Setup::new(), "worker", governance, &calls).file("a.txt", "a").start(db).await;
    let run = service.run("worker", &json!({})).await;
    let calls = completed(&service, &run).await;
    assert_eq!(calls[0]["failure"], Value::Null, "{:#}", calls[0]);
    assert!(is_there(&service, ".env"));
    assert_eq!(told(&calls[0]), json!([[".env", "created"]]));
    let audited = audited(&service, &run).await;
    assert_eq!(audited.len(), 1, "{audited:#?}");
    for (key, value) in
        [("rule", "path"), ("pattern", "**/.env"), ("decision", "warned"), ("outcome", "succeeded")]
    {
        assert_eq!(audited[0][key], value, "{audited:#?}");
    }
}

const WRITES: &str = "import os\nw = os.environ['TOOLLOOP_WORKSPACE']\nopen(w + '/big', 'w').write('x\\n' * 5000)\n\
     s = os.stat(w + '/same')\nopen(w + '/same', 'w').write('2')\nos.utime(w + '/same', ns=(s.st_atime_ns, s.st_mtime_ns))\n\
     os.remove(w + '/old')\nos.mkdir(w + '/d')\nprint('written')";

async fn changes_of_programs_are_told_and_counted(db: Db) {
    let mut calls =
        lines(&["touch a b && rm x.txt", "ls", "mv a d.txt", "touch sub/new > out.txt"]);
    calls.push(("script:set/writes", json!({})));
    calls.push(("script:set/reads", json!({})));
    let set = format!(
        "tools:\n{}{}",
        python("writes", WRITES, ""),
        python("reads", "print('read')", ", effect: read")
    );
    let service = with(Setup::new(), "worker", "paths: {write: ['./**']}", &calls)
        .tools("set", &set)
        .file("x.txt", "x")
        .file("same", "1")
        .file("old", "o")
        .file("sub/x", "x")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let calls = completed(&service, &run).await;
    assert_eq!(told(&calls[0]), json!([["a", "created"], ["b", "created"], ["x.txt", "deleted"]]));
    assert_eq!(calls[1].get("changes"), None, "a program that only reads: {:#}", calls[1]);
    assert_eq!(told(&calls[2]), json!([["a", "deleted"], ["d.txt", "created"]]));
    assert_eq!(told(&calls[3]), json!([["out.txt", "created"], ["sub/new", "created"]]));
    let by_script = json!([["big", "created"], ["old", "deleted"], ["same", "modified"]]);
    assert_eq!(told(&calls[4]), by_script, "{:#}", calls[4]);
    assert!(calls.iter().all(|call| call["sandbox"] == "enforced"), "{calls:#?}");
    let change = &calls[4]["changes"][0];
    assert_eq!((&change["added"], &change["diff"]), (&Value::Null, &Value::Null), "{change:#}");
    let used = used(&service, &run).await;
    assert_eq!((&used["files_modified"], &used["lines_changed"]), (&json!(9), &json!(0)), "{used}");
    let id = run["run_id"].as_str().unwrap();
    let listed = service.get(&format!("/v1/runs/{id}/changes?limit=200")).await.body;
    assert_eq!(listed["data"].as_array().unwrap().len(), 10, "{listed:#}");
    let files = service.get(&format!("/v1/runs/{id}/files")).await.body;
    let big = files["data"].as_array().unwrap().iter().find(|file| file["path"] == "big").unwrap();
    assert_eq!(big["changed_by"], calls[4]["call_id"], "{files:#}");
}

async fn changes_of_programs_end_a_run_over_its_budget(db: Db) {
    let governance = "paths: {write: ['./**']}, budget: {max_files_modified: 2}";
    let calls = lines(&["touch a b", "touch a b", "touch a b c d e f", "touch g"]);
    let service = with(Setup::new(), "worker", governance, &calls).start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["termination_reason"], "budget_exceeded", "{run:#}");
    let context = &run["error"]["context"];
    assert_eq!((&context["limit"], &context["used"]), (&json!("max_files_modified"), &json!(6)));
    assert_eq!(completed(&service, &run).await.len(), 3, "the next call does not start");
    assert!(!is_there(&service, "g"));
    assert_eq!(used(&service, &run).await["files_modified"], 6);
}

async fn a_child_over_the_rest_of_its_parents_budget_shares_the_limit(db: Db) {
    let lead = "model: scripted/lead\ntools: [file_ops, 'agent:worker']\nlimits: {error_threshold: 1}\n\
                enable_double_confirmation: false\n\
                governance: {autonomy: full, paths: {write: ['./**']}, budget: {max_files_modified: 3}}\n";
    let write = |path: &str| json!({"operation": "write", "path": path, "content": "x"});
    let steps = json!([
        {"tool_calls": [{"tool": "file_ops", "arguments": write("first")}]},
        {"tool_calls": [{"tool": "agent:worker", "arguments": {}}]},
        {"text": "{{ results[0] }}"},
    ]);
    let by_program = lines(&["touch a b c"]);
    let mut by_tool = lines(&["touch a b"]);
    by_tool.push(("file_ops", write("c")));
    // What the worker may change by its own definition, what it does, how much it has used, what holds.
    for (own, calls, used, max) in [
        ("", &by_program, 3, 2),
        ("", &by_tool, 2, 2),
        ("max_files_modified: 2", &by_program, 3, 2),
        ("max_files_modified: 1", &by_program, 3, 1),
    ] {
        let governance = format!("paths: {{write: ['./**']}}, budget: {{{own}}}");
        let setup = with(Setup::new(), "worker", &governance, calls);
        let scenario = json!({"steps": steps}).to_string();
        let service = setup.agent("lead", lead).scenario("lead", &scenario).start(db).await;
        let run = service.run("lead", &json!({})).await;
        let worker = service.get("/v1/runs?agent=worker").await.body["data"][0].clone();
        let error = &worker["error"];
        let mut expected = json!({"limit": "max_files_modified", "used": used, "max": max});
        let is_own = !own.is_empty();
        if !is_own {
            expected["shared"] = true.into();
        }
        assert_eq!(error["context"], expected, "{own}: {worker:#}");
        let told = error["message"].as_str().unwrap().contains("shares it with others");
        assert_eq!(told, !is_own, "{own}: {worker:#}");
        let lead_ends = if is_own { "failed" } else { "completed" };
        assert_eq!(run["status"], lead_ends, "{own}: {run:#}");
    }
}

async fn many_changes_are_counted_and_not_listed(db: Db) {
    let program = "import os\nw = os.environ['TOOLLOOP_WORKSPACE']\nfor i in range(1500): open(f'{w}/{i}', 'w')\nprint(1)";
    let set = format!("tools:\n{}", python("many", program, ""));
    let governance = "paths: {write: ['./**']}, budget: {max_files_modified: 10000}";
    let mut calls = vec![("script:set/many", json!({}))];
    calls.extend(lines(&["ls", "touch 1", "touch 1", "touch 1"]));
    let service =
        with(Setup::new(), "worker", governance, &calls).tools("set", &set).start(db).await;
    let since = Instant::now();
    let run = service.run("worker", &json!({})).await;
    let calls = completed(&service, &run).await;
    assert_eq!(calls[0]["changes"].as_array().unwrap().len(), 1000);
    assert_eq!(calls[0]["changes_omitted"], 500);
    assert_eq!(told(&calls[2]), json!([["1", "modified"]]));
    assert_eq!(used(&service, &run).await["files_modified"], 1500);
    let durations: Vec<&Value> = calls.iter().map(|call| &call["duration_ms"]).collect();
    println!("calls with 1,500 files took {durations:?} ms, the run {:?}", since.elapsed());
}

async fn a_checkout_does_not_end_a_run_unless_a_bound_is_written(db: Db) {
    let program = "import os\nw = os.environ['TOOLLOOP_WORKSPACE']\nfor i in range(60): open(f'{w}/{i}', 'w')\nprint(1)";
    let set = format!("tools:\n{}", python("checkout", program, ""));
    let write =
        |path: String| ("file_ops", json!({"operation": "write", "path": path, "content": "x"}));
    let mut calls = vec![("script:set/checkout", json!({}))];
    calls.extend((0..51).map(|n| write(format!("own{n}"))));
    let setup = with(Setup::new(), "worker", "paths: {write: ['./**']}", &calls);
    let delegates = "model: scripted/lead\ntools: ['agent:worker']\ngovernance: {autonomy: full}\nenable_double_confirmation: false\n";
    let service = with(setup, "few", "paths: {write: ['./**']}", &calls[..2])
        .tools("set", &set)
        .agent("lead", delegates)
        .scenario(
            "lead",
            "steps: [{tool_calls: [{tool: 'agent:worker', arguments: {}}]}, {text: done}]",
        )
        .start(db)
        .await;
    let run = service.run("few", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert_eq!(used(&service, &run).await["files_modified"], 61);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    assert_eq!(service.get(&path).await.body["budget"]["limits"]["max_files_modified"], 50);
    // A request can write a bound.
    let run = service.run("few", &json!({"budget": {"max_files_modified": 55}})).await;
    let context = &run["error"]["context"];
    assert_eq!((&context["used"], &context["max"]), (&json!(60), &json!(50)), "{run:#}");
    // The tools that say what they change keep theirs, in a tree of runs, too.
    for agent in ["worker", "lead"] {
        let run = service.run(agent, &json!({})).await;
        let worker = service.get("/v1/runs?agent=worker").await.body["data"][0].clone();
        let worker = service.get(&format!("/v1/runs/{}", worker["run_id"].as_str().unwrap())).await;
        let context = &worker.body["error"]["context"];
        assert_eq!(
            (&context["limit"], &context["used"]),
            (&json!("max_files_modified"), &json!(50)),
            "{run:#}"
        );
        assert_eq!(worker.body["budget"]["used"]["files_modified"], 110);
    }
}

const LINKS: &str = r#"
import os
w = os.environ["TOOLLOOP_WORKSPACE"]
os.symlink("keep", w + "/secret")
os.symlink("../keep/k", w + "/sub/.env")
os.mkdir(w + "/sub/x.lock")
os.symlink(w + "/keep", w + "/sub/x.lock/to-keep")
os.mkdir(w + "/shut")
open(w + "/shut/.env", "w")
os.chmod(w + "/shut", 0o555)
d = w + "/deep.lock"
os.mkdir(d)
os.chdir(d)
for i in range(3000):
    os.mkdir("d")
    os.chdir("d")
    open("f", "w")
print("made")
"#;

async fn putting_aside_follows_no_link(db: Db) {
    let set = format!("tools:\n{}", python("links", LINKS, ""));
    let governance = "paths: {write: ['./**'], deny: ['**/.env', 'secret/**', '**/*.lock']}";
    let calls = [("script:set/links", json!({})), ("shell", json!({"command": "ls"}))];
    let service = with(Setup::new(), "worker", governance, &calls)
        .tools("set", &set)
        .file("keep/k", "kept")
        .file("sub/y", "y")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let calls = completed(&service, &run).await;
    for path in ["secret", "sub/.env", "sub/x.lock", "shut/.env", "deep.lock"] {
        assert!(!is_there(&service, path), "{path}: {:#}", calls[0]);
        assert!(content(&calls[0]).contains(path), "{path}: {:#}", calls[0]);
    }
    assert_eq!(std::fs::read_to_string(place(&service, "keep/k")).unwrap(), "kept");
    assert_eq!(calls[1]["failure"], Value::Null, "{:#}", calls[1]);
}

/// Each in a call of its own, so that it is told by what was known when the call before had ended.
const WAYS: &str = r#"
import ctypes, json, mmap, os, sys
way = json.load(sys.stdin)["way"]
os.chdir(os.environ["TOOLLOOP_WORKSPACE"])
put = lambda path, text: open(path, "w").write(text)
if way == "mapped":
    with open("a", "r+") as f:
        with mmap.mmap(f.fileno(), 0) as m:
            m[0:1] = b"m"
elif way == "other name":
    os.link("a", "sub/other"); put("sub/other", "o"); os.remove("sub/other")
elif way == "other name in a new directory":
    os.mkdir("new"); os.link("a", "new/x"); put("new/x", "n"); os.remove("new/x"); os.rmdir("new")
elif way == "other name that changes places":
    os.link("a", "t"); put("t", "t")
    ctypes.CDLL(None).renameat2(-100, b"t", -100, b"b", 2)
    os.remove("b"); os.rename("t", "b")
elif way == "same time":
    s = os.stat("sub/c"); put("sub/c", "z"); os.utime("sub/c", ns=(s.st_atime_ns, s.st_mtime_ns))
elif way == "replaced":
    put("tmp", "r"); os.rename("tmp", "b")
elif way == "moved directory":
    os.rename("sub", "moved"); os.rename("moved", "sub"); put("sub/c", "y")
elif way == "made and gone":
    put("gone", "g"); os.remove("gone"); put("b", "after")
elif way == "denied":
    put("b", "w"); os.rename("b", "x.lock")
elif way == "many":
    for i in range(6000): put("b", str(i)); put("a", "a")
print("done")
"#;

async fn files_known_from_the_last_call_hide_no_change(db: Db) {
    let table = [
        ("nothing", json!([])),
        ("mapped", json!([["a", "modified"]])),
        ("nothing", json!([])),
        ("same time", json!([["sub/c", "modified"]])),
        ("replaced", json!([["b", "modified"]])),
        ("other name", json!([["a", "modified"]])),
        ("nothing", json!([])),
        ("other name in a new directory", json!([["a", "modified"]])),
        ("other name that changes places", json!([["a", "modified"], ["b", "modified"]])),
        ("moved directory", json!([["sub/c", "modified"]])),
        ("made and gone", json!([["b", "modified"]])),
        ("many", json!([["a", "modified"], ["b", "modified"]])),
        ("denied", json!([["b", "deleted"]])),
        ("nothing", json!([])),
    ];
    let schema = ", input_schema: {type: object, properties: {way: {type: string}}}";
    let set = format!("tools:\n{}", python("ways", WAYS, schema));
    let calls: Vec<_> =
        table.iter().map(|(way, _)| ("script:set/ways", json!({"way": way}))).collect();
    let governance = format!("paths: {{write: ['./**'], {DENY}}}");
    let other = [("file_ops", json!({"operation": "write", "path": "own", "content": "x"}))];
    let setup = with(Setup::new().tools("set", &set), "worker", &governance, &calls);
    let setup = with(setup, "later", &governance, &calls[..1]);
    let service = with(setup, "other", &governance, &other)
        .file("a", "a")
        .file("b", "b")
        .file("sub/c", "c")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    let calls = completed(&service, &run).await;
    for ((way, changes), call) in table.iter().zip(&calls) {
        assert_eq!(told(call), *changes, "{way}: {call:#}");
    }
    assert!(content(&calls[12]).contains("x.lock") && !is_there(&service, "x.lock"));
    // What others did between the calls is not told as the program's.
    service.write("workspace/default/a", "by an operator");
    std::fs::create_dir(place(&service, "new")).unwrap();
    service.write("workspace/default/new/d", "by an operator");
    service.run("other", &json!({})).await;
    service.write("workspace/default/b", "back");
    let run = service.run("later", &json!({})).await;
    assert_eq!(told(&completed(&service, &run).await[0]), json!([]));
}

/// What a call costs beside its programs, by the size of the workspace: `cargo test --test it
/// left_behind::costs -- --ignored --nocapture`. Milliseconds.
#[tokio::test]
#[ignore = "a measurement"]
async fn costs() {
    let median = |mut all: Vec<u64>| {
        all.sort_unstable();
        all[all.len() / 2]
    };
    for files in [10, 1_000, 10_000] {
        let mut setup = Setup::new();
        let denies = format!("paths: {{write: ['./**'], {DENY}}}");
        let agents = [("denies", denies.as_str()), ("free", "paths: {write: ['./**']}")];
        let kinds = [("writes", "touch a.txt"), ("reads", "cat a.txt")];
        for (agent, governance) in agents {
            for (kind, command) in kinds {
                setup = with(setup, &format!("{agent}-{kind}"), governance, &lines(&[command; 40]));
            }
        }
        let service = setup.file("a.txt", "a").start(Db::Sqlite).await;
        for file in 0..files {
            let directory = place(&service, &format!("d{}", file / 100));
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::write(directory.join(format!("{file}.txt")), "x").unwrap();
        }
        for (agent, _) in agents {
            for (kind, _) in kinds {
                let run = service.run(&format!("{agent}-{kind}"), &json!({})).await;
                let calls = completed(&service, &run).await;
                let whole = |call: &Value| call["duration_ms"].as_u64().unwrap();
                let sandbox = |call: &Value| {
                    let told: Value = serde_json::from_str(content(call)).unwrap();
                    told["duration_ms"].as_u64().unwrap()
                };
                println!(
                    "{files} files, {agent}, {kind}: {} ms, of which the programs {} ms",
                    median(calls.iter().map(whole).collect()),
                    median(calls.iter().map(sandbox).collect())
                );
            }
        }
    }
}
