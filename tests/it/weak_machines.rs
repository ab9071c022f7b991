//! What programs may do on machines that cannot hold them as they should be held: without Landlock, and
//! without namespaces. A filter in front of the service answers its calls as such a kernel would.
//!
//! With other features: what is told and refused depends on the machine alone; the store is not touched in a way
//! of its own, so one is tried.

use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::script_tools::{events, with};
use crate::service::{BINARY, Db, Service, Setup};

/// Starts the binary behind a filter: these calls are unknown to the kernel.
const LAUNCHER: &str = r#"#!/usr/bin/env python3
import ctypes, os, struct, sys
op = lambda *of: struct.pack("HBBI", *of)
code = op(0x20, 0, 0, 0) + op(0x35, 0, 2, FIRST) + op(0x25, 1, 0, LAST) + op(6, 0, 0, 0x50026) + op(6, 0, 0, 0x7FFF0000)
code = ctypes.create_string_buffer(code)
filter = struct.pack("HP", 5, ctypes.addressof(code))
prctl = ctypes.CDLL(None).prctl
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, ctypes.c_char_p(filter)) == 0
os.execv("BINARY", ["BINARY", *sys.argv[1:]])
"#;

const LANDLOCK: RangeInclusive<i64> =
    libc::SYS_landlock_create_ruleset..=libc::SYS_landlock_restrict_self;
const UNSHARE: RangeInclusive<i64> = libc::SYS_unshare..=libc::SYS_unshare;

fn launcher(place: &TempDir, unknown: &RangeInclusive<i64>) -> PathBuf {
    let program = LAUNCHER
        .replace("FIRST", &unknown.start().to_string())
        .replace("LAST", &unknown.end().to_string())
        .replace("BINARY", BINARY);
    let launcher = place.path().join("toolloop");
    std::fs::write(&launcher, program).unwrap();
    std::fs::set_permissions(&launcher, std::fs::Permissions::from_mode(0o755)).unwrap();
    launcher
}

/// A service on such a machine, and its run of two commands.
async fn tried(unknown: &RangeInclusive<i64>, config: &str) -> (Service, Value, Vec<Value>) {
    const GOVERNANCE: &str = "{autonomy: full, paths: {read: ['**'], write: ['**'], deny: ['*.key']}, \
                              commands: {allow: [{command: cat}, {command: echo}]}}";
    let calls = ["cat open.txt hidden.key", "echo new > work/new.txt"];
    let calls = calls.map(|line| ("shell", json!({"command": line})));
    let place = TempDir::new().unwrap();
    let service = with(Setup::new().config(config), "[shell]", GOVERNANCE, &calls)
        .file("open.txt", "open")
        .file("hidden.key", "canary")
        .file("work/old.txt", "old")
        .binary(&launcher(&place, unknown))
        .start(Db::Sqlite)
        .await;
    let run = service.run("worker", &json!({})).await;
    let results = events(&service, &run, "tool_call.completed").await;
    assert_eq!(results.len(), 2, "{run:#}\n{}", service.log());
    let started = events(&service, &run, "tool_call.started").await;
    let tool = service.get("/v1/tools/shell").await.body;
    for event in started.iter().chain(&results) {
        assert_eq!(event["sandbox"], tool["sandbox"], "{event:#}");
    }
    (service, tool, results)
}

fn answer(completed: &Value) -> Value {
    let content = completed["content"].as_str().unwrap();
    serde_json::from_str(content).unwrap_or_else(|_| panic!("{content}"))
}

fn hides_denied_files(completed: &Value) {
    let read = answer(completed);
    assert_eq!((&read["exit_code"], &read["stdout"]), (&json!(1), &json!("open")), "{read:#}");
}

#[tokio::test]
async fn without_landlock_nothing_runs_unless_the_operator_says_so() {
    let (service, tool, results) = tried(&LANDLOCK, "").await;
    assert_eq!(tool["sandbox"], "partial", "{tool:#}");
    let why = tool["unavailable"].as_str().unwrap_or_else(|| panic!("{tool:#}"));
    assert!(why.contains("the operator requires an enforced one"), "{why}");
    for refused in &results {
        let told = refused["content"].as_str().unwrap();
        assert!(told.contains("the operator requires an enforced one"), "{told}");
    }
    let workspace = service.dir.path().join("workspace/default");
    assert!(!workspace.join("work/new.txt").exists());

    let config = "[tools.shell]\nrequire_sandbox = false\n";
    let (service, tool, results) = tried(&LANDLOCK, config).await;
    assert_eq!((&tool["sandbox"], &tool["unavailable"]), (&json!("partial"), &Value::Null));
    hides_denied_files(&results[0]);
    assert_eq!(answer(&results[1])["sandbox"], "partial");
    assert!(service.dir.path().join("workspace/default/work/new.txt").exists());
}

#[tokio::test]
async fn without_namespaces_programs_are_held_and_have_no_network() {
    let (service, tool, results) = tried(&UNSHARE, "").await;
    let told = (&tool["sandbox"], &tool["network"], &tool["unavailable"]);
    assert_eq!(told, (&json!("enforced"), &json!(false), &Value::Null), "{tool:#}");
    hides_denied_files(&results[0]);
    assert_eq!(answer(&results[1])["exit_code"], 0, "{}", results[1]);
    assert!(service.dir.path().join("workspace/default/work/new.txt").exists());
}

#[tokio::test]
async fn without_namespaces_no_second_name_hides_a_change() {
    const GOVERNANCE: &str = "{autonomy: full, paths: {read: ['**'], write: ['**']}, \
                              commands: {allow: [{command: python3, args: links.py}]}}";
    const LINKS: &str = "import os\nother = os.environ['TMPDIR'] + '/other'\nos.link('old.txt', other)\n\
                         open(other, 'a').write('new')\nos.unlink(other)\n";
    let calls = [("shell", json!({"command": "python3 links.py"}))];
    let place = TempDir::new().unwrap();
    let service = with(Setup::new(), "[shell]", GOVERNANCE, &calls)
        .file("old.txt", "old")
        .file("links.py", LINKS)
        .binary(&launcher(&place, &UNSHARE))
        .start(Db::Sqlite)
        .await;
    let run = service.run("worker", &json!({})).await;
    let results = events(&service, &run, "tool_call.completed").await;
    assert_eq!(answer(&results[0])["exit_code"], 0, "{}", results[0]);
    assert_eq!(results[0]["changes"][0]["path"], "old.txt", "{}", results[0]);
}
