//! Policies as they are changed: what another definition would have decided on recorded calls, and
//! cases that a definition must decide as expected.
//!
//! With other features: children (judged by their parent's rules too), parked runs and denied calls (their
//! decision is that of the gate, once), client tools, skills (those that were active), crash and
//! another replica (the journal is the store's), tenants (only their own runs), dry run (records no
//! call), command line (`policy replay`, `policy test`), console (does not show it), generated
//! clients (an operation like others).

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{ended, paths, text};
use crate::service::{Answer, Db, Service, Setup, answer, command, on_both_stores};

on_both_stores! {
    an_unchanged_policy_changes_nothing,
    a_stricter_policy_is_told_with_its_runs,
    budgets_and_tools_are_judged_too,
    a_milder_policy_saves_waiting,
    a_replay_needs_scopes_and_covers_its_own_tenant,
    the_command_line_replays_and_tests,
    a_call_is_judged_without_being_made,
    calls_that_depend_on_changed_sections_are_unknown,
    a_replay_goes_on_behind_its_limit,
    cases_and_checks_need_no_secrets,
}

/// What it intercepts holds for its children, too.
const WRITER: &str = r#"
model: scripted/writer
instructions: Write.
tools: [file_ops, 'agent:helper']
skills: [careful]
enable_double_confirmation: false
limits: {error_threshold: 20, max_tool_calls_per_iteration: 20}
interceptors: {before: [{tool: file_ops, when: "args.path == 'never'", block: 'Never.'}]}
governance:
  autonomy: supervised
  paths: {write: ['out/**'], deny: ['secret/**']}
"#;

const HELPER: &str = "
model: scripted/helper
instructions: Help.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}}
";

const WRITES: &str = r#"
steps:
  - tool_calls:
      - {tool: use_skill, arguments: {name: careful}}
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: out/a.txt, content: "a\n"}}
      - {tool: file_ops, arguments: {operation: read, path: secret/key.txt}}
      - {tool: 'agent:helper', arguments: {}}
      - {tool: file_ops, arguments: {operation: write, path: out/old.txt, content: "new\n"}}
      - {tool: nothing, arguments: {}}
  - text: done
"#;

const HELPS: &str = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: delete, path: secret/key.txt}}
      - {tool: file_ops, arguments: {operation: write, path: out/b.txt, content: "b\n"}}
  - text: done
"#;

fn writer() -> Setup {
    Setup::new()
        .agent("writer", WRITER)
        .agent("helper", HELPER)
        .scenario("writer", WRITES)
        .scenario("helper", HELPS)
        .skill("careful", "disallowed_tools: [shell]\n", "Be careful.")
        .file("secret/key.txt", "key\n")
        .file("out/old.txt", "old\n")
}

async fn replay(service: &Service, agent: &str, body: &Value) -> Value {
    let answer = service.post(&format!("/v1/agents/{agent}/policy/replay"), body).await;
    assert_eq!(answer.status, 200, "{:#}", answer.body);
    answer.body
}

/// Runs the writer until it waits, and answers.
async fn run(service: &Service, verb: &str) -> Value {
    service.write("workspace/default/out/old.txt", "old\n"); // what an earlier run left
    let asked = service.post("/v1/agents/writer/invoke-iterative", &json!({})).await.body;
    assert_eq!(asked["status"], "awaiting_approval", "{asked:#}");
    let (run, calls) = paths(&asked);
    assert_eq!(calls.len(), 1, "{asked:#}");
    assert_eq!(service.post(&format!("{}/{verb}", calls[0]), &json!({})).await.status, 200);
    ended(service, &run).await
}

async fn an_unchanged_policy_changes_nothing(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    run(&service, "deny").await;
    for (agent, calls) in [("writer", 10), ("helper", 4)] {
        let replay = replay(&service, agent, &json!({})).await;
        assert_eq!(
            (&replay["runs"], &replay["calls"], &replay["unchanged"], &replay["examples"]),
            (&json!(2), &json!(calls), &json!(calls), &json!([])),
            "{agent}: {replay:#}"
        );
    }
}

async fn a_stricter_policy_is_told_with_its_runs(db: Db) {
    let service = writer().start(db).await;
    let done = run(&service, "approve").await;
    let stricter = format!("name: writer\n{}", WRITER.replace("'out/**'", "'other/**'"));
    let replay = replay(&service, "writer", &json!({"definition": stricter})).await;
    let mut written = service.get("/v1/agents/writer").await.body;
    for field in ["hash", "loaded_at"] {
        written.as_object_mut().unwrap().remove(field);
    }
    written["governance"]["paths"]["write"] = json!(["other/**"]);
    let path = "/v1/agents/writer/policy/replay";
    let by_object = service.post(path, &json!({"definition": written})).await;
    assert_eq!(
        (by_object.status.as_u16(), &by_object.body),
        (200, &replay),
        "{:#}",
        by_object.body
    );
    for neither in [json!(5), json!(["name: writer"]), json!(true)] {
        let refused = service.post(path, &json!({"definition": neither})).await;
        assert_eq!(refused.status, 422, "{neither}");
        assert_eq!(refused.body["errors"][0]["pointer"], "/definition", "{:#}", refused.body);
    }
    assert_eq!(
        replay["newly"],
        json!({"blocked": 1, "escalated": 0, "warned": 0, "allowed": 0}),
        "{replay:#}"
    );
    // What the model would have done after that is not known.
    assert_eq!(
        (&replay["calls"], &replay["unchanged"], &replay["unknown"]),
        (&json!(5), &json!(1), &json!(3))
    );
    let change = &replay["examples"][0];
    assert_eq!(
        (&change["run_id"], &change["was"], &change["would_be"], &change["rule"]),
        (&done["run_id"], &json!("allowed"), &json!("blocked"), &json!("path"))
    );
    assert!(text(change, "reason").contains("out/a.txt"), "{change:#}");
    assert_eq!((&replay["changed_runs"], &replay["has_more"]), (&json!(1), &json!(false)));
    let later = done["created_at"].clone();
    let none = self::replay(&service, "writer", &json!({"since": later})).await;
    assert_eq!(none["runs"], 0, "{none:#}");

    // What an approver has edited is judged as it was made.
    service.write("workspace/default/out/old.txt", "old\n");
    let asked = service.post("/v1/agents/writer/invoke-iterative", &json!({})).await.body;
    let (path, calls) = paths(&asked);
    let edited = json!({"operation": "write", "path": "out/edited.txt", "content": "x"});
    let approve = format!("{}/approve", calls[0]);
    assert_eq!(service.post(&approve, &json!({"arguments": edited})).await.status, 200);
    let done = ended(&service, &path).await;
    let made = service.get(&format!("{path}/tool-calls")).await.body;
    let made = made["data"].as_array().unwrap().iter().find(|call| call["edited"] == true).unwrap();
    assert_eq!(
        (&made["decision"], text(made, "reason")),
        (&json!("allowed"), "Approved by testadmin, with arguments that need no approval.")
    );
    let deny = WRITER.replace("'secret/**'", "'secret/**', out/edited.txt");
    let body = json!({"definition": format!("name: writer\n{deny}")});
    let replay = self::replay(&service, "writer", &body).await;
    assert_eq!(replay["newly"]["blocked"], 1, "{replay:#}");
    let change = &replay["examples"][0];
    assert_eq!(
        (&change["run_id"], &change["was"], &change["would_be"], &change["rule"]),
        (&done["run_id"], &json!("escalated"), &json!("blocked"), &json!("path"))
    );
    assert!(text(change, "reason").contains("out/edited.txt"), "{change:#}");
}

async fn budgets_and_tools_are_judged_too(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    let budget = |budget: &str| {
        let governance = format!("governance:\n  budget: {{{budget}}}\n");
        format!("name: writer\n{}", WRITER.replace("governance:\n", &governance))
    };
    let without = |tool: &str| format!("name: writer\n{}", WRITER.replace(tool, ""));
    let table = [
        (budget("max_tool_calls: 1"), "file_ops", "allowed", "budget", "max_tool_calls"),
        (budget("max_files_modified: 0"), "file_ops", "allowed", "budget", "max_files_modified"),
        (budget("max_files_modified: 1"), "file_ops", "escalated", "budget", "max_files_modified"),
        (budget("max_lines_changed: 0"), "file_ops", "allowed", "budget", "max_lines_changed"),
        (budget("max_iterations: 1"), "file_ops", "allowed", "budget", "max_iterations"),
        (budget("max_total_tokens: 1"), "file_ops", "allowed", "budget", "max_total_tokens"),
        (without(", 'agent:helper'"), "agent:helper", "allowed", "tools", "does not have"),
        (without("skills: [careful]\n"), "use_skill", "allowed", "tools", "does not have"),
    ];
    for (definition, tool, was, rule, why) in table {
        let replay = replay(&service, "writer", &json!({"definition": definition})).await;
        let blocked = json!({"blocked": 1, "escalated": 0, "warned": 0, "allowed": 0});
        assert_eq!(replay["newly"], blocked, "{definition}: {replay:#}");
        let change = &replay["examples"][0];
        assert_eq!(
            (&change["tool"], &change["was"], &change["rule"]),
            (&json!(tool), &json!(was), &json!(rule)),
            "{definition}: {change:#}"
        );
        assert!(text(change, "reason").contains(why), "{change:#}");
        let sum = replay["unchanged"].as_u64().unwrap() + replay["unknown"].as_u64().unwrap() + 1;
        assert_eq!(replay["calls"], sum, "{replay:#}");
    }
    let enough = budget(
        "max_files_modified: 2, max_tool_calls: 20, max_iterations: 3, max_total_tokens: 100000",
    );
    let same = replay(&service, "writer", &json!({"definition": enough})).await;
    assert_eq!(same["calls"], same["unchanged"], "{same:#}");
    let unknown = format!("name: writer\n{}", WRITER.replace("[file_ops,", "[file_opps,"));
    let path = "/v1/agents/writer/policy/replay";
    let refused = service.post(path, &json!({"definition": unknown})).await;
    assert_eq!(refused.status, 422, "{:#}", refused.body);
    assert_eq!(refused.body["errors"][0]["pointer"], "/definition", "{:#}", refused.body);
}

async fn a_milder_policy_saves_waiting(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    run(&service, "approve").await;
    let milder = format!("name: writer\n{}", WRITER.replace("supervised", "full"));
    let replay = replay(&service, "writer", &json!({"definition": milder, "limit": 1})).await;
    assert_eq!(
        replay["newly"],
        json!({"blocked": 0, "escalated": 0, "warned": 0, "allowed": 1}),
        "{replay:#}"
    );
    assert!(replay["waiting_hours"].as_f64().unwrap() > 0.0, "{replay:#}");
    assert_eq!((&replay["runs"], &replay["has_more"]), (&json!(1), &json!(true)));
}

async fn asked_with(service: &Service, scopes: &[&str], tenant: &str) -> Answer {
    let about = json!({"name": "n", "scopes": scopes, "tenant": tenant});
    let key = service.post("/v1/keys", &about).await.body["key"].as_str().unwrap().to_owned();
    let request =
        service.http.request(Method::POST, service.url("/v1/agents/writer/policy/replay"));
    answer(request.bearer_auth(key).json(&json!({}))).await
}

async fn a_replay_needs_scopes_and_covers_its_own_tenant(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    for (scopes, tenant, status, runs) in [
        (vec!["agents:read", "runs:read"], "default", 200, json!(1)),
        (vec!["agents:read", "runs:read"], "other", 200, json!(0)),
        (vec!["agents:read"], "default", 403, Value::Null),
        (vec!["runs:read"], "default", 403, Value::Null),
    ] {
        let answer = asked_with(&service, &scopes, tenant).await;
        let told = (answer.status.as_u16(), answer.body["runs"].clone());
        assert_eq!(told, (status, runs), "{scopes:?} {tenant}");
    }
    let path = "/v1/agents/writer/policy/replay";
    for (body, pointer) in [
        (json!({"definition": "name: writer\nmodel: 1"}), "/definition"),
        (json!({"definition": "name: other\nmodel: scripted/a"}), "/definition"),
        (json!({"limit": 0}), "/limit"),
        (json!({"since": "yesterday"}), "/since"),
        (json!({"unknown": 1}), "/unknown"),
    ] {
        let refused = service.post(path, &body).await;
        let told = (refused.status.as_u16(), &refused.body["errors"][0]["pointer"]);
        assert_eq!(told, (422, &json!(pointer)), "{body} {:#}", refused.body);
    }
    let unknown = service.post("/v1/agents/nobody/policy/replay", &json!({})).await;
    assert_eq!(unknown.status, 404);
}

const CASES: &str = "
agent: writer
cases:
  - {tool: file_ops, arguments: {operation: read, path: a.txt}, expect: allowed}
  - {tool: file_ops, arguments: {operation: write, path: out/a.txt, content: x}, files: [out/a.txt], expect: escalated, rule: autonomy}
  - {tool: file_ops, arguments: {operation: read, path: secret/a}, expect: blocked, rule: path}
  - {name: by actions, tool: file_ops, actions: [{kind: write, path: x, effect: once}], expect: blocked, rule: path}
  - {tool: file_ops, actions: [{kind: write, path: out/x, effect: once, destructive: true}], labels: [untrusted], expect: escalated}
  - {tool: file_ops, arguments: {operation: list, path: .}, scopes: [], expect: blocked, rule: scope}
";

async fn the_command_line_replays_and_tests(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    let server = service.url("");
    let told = command(service.dir.path())
        .args(["policy", "replay", "--agent", "writer", "--since", "1h", "--json"])
        .args(["--server", &server, "--key", &service.key])
        .output()
        .await
        .unwrap();
    assert!(told.status.success(), "{told:?}");
    let replay: Value = serde_json::from_slice(&told.stdout).unwrap();
    assert_eq!((&replay["calls"], &replay["unchanged"]), (&json!(5), &json!(5)), "{replay:#}");

    let of_another = command(service.dir.path())
        .args(["policy", "replay", "--agent", "writer", "--tenant", "acme"])
        .args(["--server", &server, "--key", &service.key])
        .output()
        .await
        .unwrap();
    assert_eq!(of_another.status.code(), Some(2), "{of_another:?}");
    let said = String::from_utf8_lossy(&of_another.stderr);
    assert!(said.contains("--tenant: the key determines the tenant"), "{said}");

    service.write("cases.yaml", CASES);
    let test = || {
        let mut test = command(service.dir.path());
        test.args(["policy", "test", "cases.yaml", "--junit", "out.xml"]);
        test
    };
    let passed = test().output().await.unwrap();
    let told = String::from_utf8_lossy(&passed.stdout).into_owned();
    assert_eq!(
        (passed.status.code(), told.as_str()),
        (Some(0), "6 cases, 0 failed.\n"),
        "{passed:?}"
    );
    let wrong = CASES.replace("expect: allowed}", "expect: blocked, rule: '<path>'}");
    service.write("cases.yaml", &wrong);
    let failed = test().output().await.unwrap();
    let told = String::from_utf8_lossy(&failed.stdout).into_owned();
    assert_eq!(failed.status.code(), Some(1), "{failed:?}");
    assert!(
        told.contains("FAILED file_ops 1: expected blocked by <path>, is allowed by none"),
        "{told}"
    );
    let xml = std::fs::read_to_string(service.dir.path().join("out.xml")).unwrap();
    assert!(xml.contains("tests=\"6\" failures=\"1\""), "{xml}");
    assert!(xml.contains("expected blocked by &lt;path&gt;"), "{xml}");
    service.write("cases.yaml", "agent: writer\ncases: [{tool: a, expects: b}]");
    let unreadable = test().output().await.unwrap();
    assert_eq!(unreadable.status.code(), Some(2), "{unreadable:?}");
    let bogus = "agent: writer\ncases:\n  - {tool: file_ops, expect: allowed}\n  - {tool: file_ops, expect: bogus}\n";
    service.write("cases.yaml", bogus);
    let unreadable = test().output().await.unwrap();
    let told = String::from_utf8_lossy(&unreadable.stderr).into_owned();
    assert_eq!(unreadable.status.code(), Some(2), "{unreadable:?}");
    assert!(told.contains("cases.yaml") && told.contains("line 4"), "{told}");
    service
        .write("cases.yaml", "agent: writer\ncases: [{tool: nope, expect: blocked, rule: tools}]");
    let passed = test().output().await.unwrap();
    assert_eq!(passed.status.code(), Some(0), "{passed:?}");
}

/// What the gate would say of a call, and what the call would do, before it is made.
async fn a_call_is_judged_without_being_made(db: Db) {
    let service = writer().start(db).await;
    let judge = async |body: Value| service.post("/v1/agents/writer/policy/judge", &body).await;
    let write = |path: &str| json!({"tool": "file_ops", "arguments": {"operation": "write", "path": path, "content": "x"}});
    let new = judge(write("out/a.txt")).await;
    assert_eq!(
        (new.status.as_u16(), &new.body["decision"]),
        (200, &json!("allowed")),
        "{:#}",
        new.body
    );
    let mut over = write("out/a.txt");
    over["files"] = json!(["out/a.txt"]);
    let judged = judge(over).await;
    assert_eq!(judged.status, 200, "{:#}", judged.body);
    assert_eq!(judged.body["decision"], "escalated", "{:#}", judged.body);
    assert!(judged.body["reason"].is_string(), "{:#}", judged.body);
    assert!(judged.body["actions"].to_string().contains("out/a.txt"), "{:#}", judged.body);
    let denied = judge(write("secret/key.txt")).await.body;
    assert_eq!(
        (&denied["decision"], &denied["rule"]),
        (&json!("blocked"), &json!("path")),
        "{denied:#}"
    );
    let read = judge(json!({"tool": "file_ops", "arguments": {"operation": "list", "path": "."}}))
        .await
        .body;
    assert_eq!((&read["decision"], &read["rule"]), (&json!("allowed"), &json!("none")), "{read:#}");
    // Nothing was done, and nothing is recorded.
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]));
    assert_eq!(service.get("/v1/audit?action=tool_call").await.body["data"], json!([]));
    assert!(!service.dir.path().join("workspace/default/out/a.txt").exists());
    // What does not come before the gate is told with the reason.
    for (body, pointer, part) in [
        (json!({"tool": "nothing", "arguments": {}}), "/tool", "nothing"),
        (
            json!({"tool": "file_ops", "arguments": {"operation": "fly"}}),
            "/arguments",
            "/operation",
        ),
        (json!({"tool": "file_ops", "arguments": []}), "/arguments", "object"),
        (json!({"tool": "agent:helper", "arguments": {}}), "/tool", "agent:helper"),
        (json!({"arguments": {}}), "/tool", "is required"),
        (json!({"tool": 7}), "/tool", "must be a string"),
        (json!({"tool": "file_ops", "files": ["a", ""]}), "/files/1", "the path of a file"),
        (json!({"tool": "file_ops", "files": ["/etc/x"]}), "/files/0", "the path of a file"),
        (
            json!({"tool": "file_ops", "files": ["a\u{1}", "../b"]}),
            "/files/1",
            "the path of a file",
        ),
        (json!({"tool": "file_ops", "files": ["a", "a/b"]}), "/files/1", "through another file"),
        (json!({"tool": "file_ops", "files": ["a/b", "a"]}), "/files/1", "a directory of another"),
    ] {
        let refused = judge(body.clone()).await;
        assert_eq!(refused.status, 422, "{body}: {:#}", refused.body);
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{body}: {:#}", refused.body);
        assert!(
            refused.body["detail"].as_str().unwrap().contains(part),
            "{body}: {:#}",
            refused.body
        );
    }
    for body in [
        json!({}),
        json!({"tool": "file_ops", "labels": ["x"]}),
        json!({"tool": "file_ops", "more": 1}),
    ] {
        assert_eq!(judge(body.clone()).await.status, 422, "{body}");
    }
    assert_eq!(service.post("/v1/agents/nobody/policy/judge", &write("a")).await.status, 404);
    // It is judged by what the caller's own runs could do.
    let key = json!({"name": "k", "tenant": "default", "scopes": ["agents:read"]});
    let key = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
    let request = service.http.post(service.url("/v1/agents/writer/policy/judge")).bearer_auth(key);
    let narrow = answer(request.json(&write("out/a.txt"))).await.body;
    assert_eq!(narrow["decision"], "blocked", "{narrow:#}");
}

const GUARDED: &str = "
model: scripted/guarded
tools: [file_ops]
enable_double_confirmation: false
limits: {error_threshold: 20}
tool_options: {file_ops: {rate_limit_per_minute: 4}}
interceptors: {before: [{tool: file_ops, when: \"args.path == 'out/old.txt'\", block: 'Not that one.'}]}
governance:
  autonomy: full
  budget: {stop_conditions: [{when: 'counters.tool_calls > 100'}]}
";

/// The second call is blocked by the interceptor, the last one by the limit of calls.
const GUARDS: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: out/old.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - text: done
"#;

async fn calls_that_depend_on_changed_sections_are_unknown(db: Db) {
    let service = Setup::new()
        .agent("guarded", GUARDED)
        .scenario("guarded", GUARDS)
        .file("out/old.txt", "old\n")
        .start(db)
        .await;
    service.run("guarded", &json!({})).await;
    let with = |before: &str, after: &str| {
        assert!(GUARDED.contains(before), "{before}");
        format!("name: guarded\n{}", GUARDED.replace(before, after))
    };
    let end = "{when: 'counters.tool_calls > 100'}";
    let condition = |action: &str| {
        with(end, &format!("{end}, {{when: 'counters.tool_calls >= 2', action: {action}}}"))
    };
    let other = "{before: [{tool: 'agent:*', block: x}, ";
    // Unchanged, unknown, newly blocked.
    let table = [
        (with("scripted", "scripted"), 5, 0, 0),
        (with("{before: [", other), 5, 0, 0),
        (with("out/old.txt", "out/new.txt"), 0, 5, 0),
        (with("per_minute: 4", "per_minute: 9"), 4, 1, 0),
        (with("per_minute: 4", "per_minute: 2"), 1, 4, 0),
        (with("per_minute: 4", "per_minute: 4, paths: [/path]"), 0, 5, 0),
        (with("per_minute: 4", "per_minute: 4, yields: [untrusted]"), 5, 0, 0),
        (with("interceptors: {", "interceptors: {after: [{tool: '*', redact: x}], "), 1, 4, 0),
        (
            with("interceptors: {", "interceptors: {after: [{tool: 'agent:*', redact: x}], "),
            5,
            0,
            0,
        ),
        (condition("warn"), 5, 0, 0),
    ];
    for (definition, unchanged, unknown, blocked) in table {
        let replay = replay(&service, "guarded", &json!({"definition": definition})).await;
        assert_eq!(
            (
                &replay["calls"],
                &replay["unchanged"],
                &replay["unknown"],
                &replay["newly"]["blocked"]
            ),
            (&json!(5), &json!(unchanged), &json!(unknown), &json!(blocked)),
            "{definition}\n{replay:#}"
        );
    }
    let ended = replay(&service, "guarded", &json!({"definition": condition("stop")})).await;
    assert_eq!(
        (&ended["newly"]["blocked"], &ended["examples"][0]["rule"]),
        (&json!(1), &json!("budget"))
    );
    assert!(text(&ended["examples"][0], "reason").contains("stop_conditions"), "{ended:#}");
    assert!(ended["unknown"].as_u64().unwrap() > 0, "{ended:#}");
    let parked = replay(&service, "guarded", &json!({"definition": condition("escalate")})).await;
    assert_eq!(
        (&parked["newly"]["blocked"], &parked["unknown"]),
        (&json!(0), &ended["unknown"].as_u64().map(|it| it + 1).into()),
        "{parked:#}"
    );
    let flow =
        with("autonomy: full", "flow: [{when: labels.untrusted, do: deny}]\n  autonomy: full");
    let flow = flow.replace("per_minute: 4", "per_minute: 4, yields: [untrusted]");
    let labelled = replay(&service, "guarded", &json!({"definition": flow})).await;
    assert_eq!(
        (&labelled["unchanged"], &labelled["unknown"]),
        (&json!(1), &json!(4)),
        "{labelled:#}"
    );
}

async fn a_replay_goes_on_behind_its_limit(db: Db) {
    let service = writer().start(db).await;
    run(&service, "approve").await;
    run(&service, "deny").await;
    let first = replay(&service, "writer", &json!({"limit": 1})).await;
    assert_eq!((&first["runs"], &first["has_more"]), (&json!(1), &json!(true)), "{first:#}");
    let second = json!({"limit": 1, "cursor": first["next_cursor"]});
    let second = replay(&service, "writer", &second).await;
    assert_eq!(
        (&second["runs"], &second["has_more"], &second["next_cursor"]),
        (&json!(1), &json!(false), &Value::Null),
        "{second:#}"
    );
    let path = "/v1/agents/writer/policy/replay";
    let refused = service.post(path, &json!({"cursor": "x"})).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["errors"][0]["pointer"]),
        (422, &json!("/cursor"))
    );
    let server = service.url("");
    for (limit, calls, is_cut) in
        [(None, "10 calls in 2 runs", false), (Some("1"), "5 calls in 1 runs", true)]
    {
        let mut command = command(service.dir.path());
        command.args(["policy", "replay", "--agent", "writer", "--server", &server]);
        command.args(["--key", &service.key]);
        if let Some(limit) = limit {
            command.args(["--limit", limit]);
        }
        let told = command.output().await.unwrap();
        let told = String::from_utf8_lossy(&told.stdout).into_owned();
        assert!(told.contains(calls), "{told}");
        assert_eq!(told.contains("Only the newest 1 runs of the period"), is_cut, "{told}");
    }
}

/// What a pipeline has: the files, and none of the secrets that the service is given.
async fn cases_and_checks_need_no_secrets(db: Db) {
    let asker = "model: scripted/writer\ntools: ['http:iss/*', shell]\ngovernance:\n  autonomy: full\n  \
        network: {allow: [forge.example], credentials: [forge]}\n  commands:\n    deny:\n      \
        - {command: git, args: push, match: [git push]}\n    allow: [{command: git, args: '^log'}]\n";
    let set = "base_url: https://iss.example\nheaders: {Authorization: 'Bearer {{ env.GATE_TOKEN }}'}\n\
               tools: [{name: find, method: GET, path: /x, effect: read, query: {k: '{{ env.GATE_TOKEN }}'}}]\n";
    let key = "MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIzNDU2Nzg5MDE=";
    let service = writer()
        .agent("asker", asker)
        .tools("iss", set)
        .config("[audit]\nkey_env = \"GATE_AUDIT_KEY\"\n[tools.credentials.forge]\nurl = \"https://forge.example/\"\ntoken_env = \"GATE_FORGE\"")
        .variable("GATE_TOKEN", "a-token-of-the-service")
        .variable("GATE_AUDIT_KEY", key)
        .variable("GATE_FORGE", "another-token")
        .start(db)
        .await;
    let run = async |arguments: &[&str]| {
        let output = command(service.dir.path()).args(arguments).output().await.unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let warnings = [
        "warning: the environment variable GATE_AUDIT_KEY is not set (audit.key_env)",
        "warning: the environment variable GATE_FORGE is not set (tools.credentials.forge.token_env)",
        "warning: the environment variable GATE_TOKEN is not set (",
    ];
    let (code, said, errors) = run(&["check"]).await;
    assert_eq!(code, Some(0), "{said}{errors}");
    for warning in warnings {
        assert_eq!(said.matches(warning).count(), 1, "{warning}\n{said}");
    }
    let case = "{tool: 'http:iss/find', arguments: {}, expect: allowed}";
    service.write("cases.yaml", &format!("agent: asker\ncases: [{case}]\n"));
    let (code, said, errors) = run(&["policy", "test", "cases.yaml"]).await;
    assert_eq!((code, said.as_str()), (Some(0), "1 cases, 0 failed.\n"), "{errors}");
    assert!(warnings.iter().all(|it| errors.matches(it).count() == 1), "{errors}");
    // An example of a rule that fails is a case that fails.
    let wrong =
        asker.replace("match: [git push]", "match: [git pull, git push], no_match: [git push]");
    service.write("other.yaml", &format!("name: other\n{wrong}"));
    service.write("cases.yaml", &format!("definition: other.yaml\ncases: [{case}]\n"));
    let (code, said, errors) = run(&["policy", "test", "cases.yaml", "--junit", "out.xml"]).await;
    assert_eq!(code, Some(1), "{said}{errors}");
    assert!(said.contains("3 cases, 2 failed."), "{said}");
    let why = "FAILED governance.commands.deny[0].match[0]: other.yaml: line ";
    assert!(said.contains(why) && said.contains("the rule does not match \"git pull\""), "{said}");
    let xml = std::fs::read_to_string(service.dir.path().join("out.xml")).unwrap();
    assert!(xml.contains("tests=\"3\" failures=\"2\""), "{xml}");
    // What is wrong otherwise is told as before.
    service.write("other.yaml", &format!("name: other\nlimits: {{max_attempts: 0}}\n{wrong}"));
    let (code, _, errors) = run(&["policy", "test", "cases.yaml"]).await;
    assert!(code == Some(2) && errors.contains("max_attempts"), "{errors}");
}
