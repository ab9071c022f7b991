//! Tools that are programs of the operator's, through the HTTP API, on both stores.
//!
//! With other features. Children: a program that a parent denies does not run in them, and they have the
//! tools of their own definition (here). Parked runs: a destructive script waits for its approval
//! (here). Sessions: nothing of a call is kept but its result. Cancel, crash of the service: the
//! program ends with the run, and with the service (here); a crash leaves the call to its effect, as
//! of every tool (`crashes.rs`). Other replica: it has the same files; progress is told where the
//! run is driven. Streaming: `tool_call.progress` (here). Tenants: the workspace is the tenant's
//! (here). Budgets: a call counts as a command (here). Skills, dry run, console, command line,
//! generated clients: as every tool; unknown types of events are passed over.

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, answer, command, on_both_stores, on_one_store};
use crate::shell_stories::{is_alive, until_alive};
use crate::streaming::Reader;
use crate::web_fetch::Site;

on_both_stores! {
    shipped_examples_work,
    progress_is_streamed_and_not_kept,
    the_gate_judges_scripts_like_other_tools,
    scripts_end_with_their_run_and_with_the_service,
}

on_one_store! {
    a_script_reaches_only_its_workspace_and_environment,
    output_of_scripts_has_bounds,
    programs_that_fill_the_workspace_are_ended,
    no_flood_goes_far_beyond_the_bounds,
    labels_and_timeouts_come_from_the_file,
}

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// An agent that calls scripts, one a turn.
fn calling(tools: &str, governance: &str, calls: &[(&str, Value)]) -> (String, String) {
    let agent = format!(
        "model: scripted/worker\ntools: {tools}\nenable_double_confirmation: false\nlimits: {{error_threshold: \
         50, max_iterations: 60, max_iterations_per_attempt: 60}}\ngovernance: {governance}\n"
    );
    let call = |(tool, arguments): &(&str, Value)| {
        json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    (agent, format!("steps: [{}, {{text: done}}]", steps.join(", ")))
}

/// A tool that is a Python program.
pub fn python(name: &str, program: &str, more: &str) -> String {
    let command = json!(["python3", "-c", program]);
    format!("  - {{name: {name}, command: {command}{more}}}\n")
}

pub fn with(setup: Setup, tools: &str, governance: &str, calls: &[(&str, Value)]) -> Setup {
    let (agent, scenario) = calling(tools, governance, calls);
    setup.agent("worker", &agent).scenario("worker", &scenario)
}

pub async fn events(service: &Service, run: &Value, kind: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let all = service.get(&path).await.body["data"].as_array().unwrap().clone();
    all.into_iter().filter(|e| e["type"] == kind).map(|e| e["data"].clone()).collect()
}

async fn results(service: &Service, run: &Value) -> Vec<String> {
    let completed = events(service, run, "tool_call.completed").await;
    completed.iter().map(|event| event["content"].as_str().unwrap().to_owned()).collect()
}

fn shipped(setup: Setup) -> Setup {
    let mut setup = setup;
    for entry in std::fs::read_dir(format!("{ROOT}/tools")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        setup = setup.script(&name, &std::fs::read_to_string(&path).unwrap());
    }
    setup
}

async fn shipped_examples_work(db: Db) {
    let calls = [
        ("script:text/word-count", json!({"text": "the tide and the wind", "top": 1})),
        ("script:dates/days-between", json!({"from": "2026-11-20", "to": "2026-11-30"})),
        ("script:dates/days-between", json!({"from": "2026-02-30", "to": "2026-11-30"})),
        ("script:files/largest", json!({})),
        ("script:text/word-count", json!({"text": 7})),
    ];
    let tools = "['script:text/*', 'script:dates/*', 'script:files/*']";
    let service = with(shipped(Setup::new()), tools, "{paths: {deny: [secret.txt]}}", &calls)
        .file("docs/long.txt", &"x".repeat(1000))
        .file("secret.txt", &"x".repeat(5000))
        .file("short.txt", "x")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results = results(&service, &run).await;
    let read = |text: &str| serde_json::from_str::<Value>(text).unwrap_or_else(|_| json!(text));
    assert_eq!(
        read(&results[0]),
        json!({"words": 5, "lines": 1, "characters": 21, "frequent": [{"word": "the", "times": 2}]}),
        "{}",
        service.log()
    );
    assert_eq!(read(&results[1]), json!({"days": 10, "working_days": 6}));
    assert!(results[2].contains("exit code 1") && results[2].contains("2026-02-30 is not a date"));
    // The name of a denied file may be seen, and nothing of what is in it.
    assert!(results[3].starts_with("1000 docs/long.txt\n1 short.txt"), "{}", results[3]);
    assert!(!results[3].contains("5000"), "{}", results[3]);
    assert!(results[4].contains("do not match the tool's schema"), "{}", results[4]);

    let started = events(&service, &run, "tool_call.started").await;
    let action = &started[0]["actions"][0];
    assert_eq!((&action["kind"], &action["declared"]), (&json!("exec"), &json!(true)), "{action}");
    let argv = action["argv"].as_array().unwrap();
    assert!(argv[0].as_str().unwrap().ends_with("/python3") && argv[1] == "word_count.py");
    assert_eq!(started[0]["effect"], "read");
    let tool = service.get("/v1/tools/script%3Atext%2Fword-count").await.body;
    for (key, value) in
        [("effect", json!("read")), ("destructive", json!(false)), ("sandbox", json!("enforced"))]
    {
        assert_eq!(tool[key], value, "{tool:#}");
    }
    assert_eq!(tool["source"], "script:text");
    let budget = service.get(&format!("/v1/runs/{}", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(budget["budget"]["used"]["commands"], 4, "{:#}", budget["budget"]);
}

/// Says what it gets, and tries what it must not do.
const LOOKS: &str = r#"
import json, os, socket, sys
a = json.load(sys.stdin)
def tried(what):
    try:
        return what() or "done"
    except OSError as e:
        return type(e).__name__
w = os.environ["TOOLLOOP_WORKSPACE"]
print(json.dumps({
    "arguments": a,
    "environment": sorted(os.environ),
    "run": os.environ["TOOLLOOP_RUN_ID"],
    "key": os.environ["TOOLLOOP_EFFECT_KEY"],
    "named": os.environ.get("GREETING"),
    "secret": os.environ.get("SERVICE_TOKEN"),
    "here": sorted(os.listdir(".")),
    "own file": tried(lambda: open("notes.txt").read()),
    "change own file": tried(lambda: open("notes.txt", "w")),
    "new file here": tried(lambda: open("new.txt", "w")),
    "allowed": tried(lambda: open(w + "/out/made.txt", "w").write("made") and "done"),
    "not allowed": tried(lambda: open(w + "/made.txt", "w")),
    "read": tried(lambda: open(w + "/plain.txt").read()),
    "denied": tried(lambda: open(w + "/.env").read()),
    "outside": tried(lambda: open(w + "/../../toolloop.toml").read()),
    "other tenant": tried(lambda: os.listdir(w + "/..")),
    "network": tried(lambda: socket.create_connection(("127.0.0.1", a["port"]), 1) and "done"),
    "temporary": tried(lambda: open(os.environ["TMPDIR"] + "/t", "w").write("x") and "done"),
}))
"#;

async fn a_script_reaches_only_its_workspace_and_environment(db: Db) {
    let more = ", env: [GREETING, SERVICE_TOKEN, NOT_THERE]";
    let set = format!(
        "tools:\n{}{}",
        python("changes", LOOKS, more),
        python("reads", LOOKS, &format!("{more}, effect: read"))
    );
    let governance = "{autonomy: full, paths: {write: ['out/**'], deny: ['**/.env']}}";
    let setup = Setup::new()
        .tools("look", &set)
        .script("notes.txt", "notes")
        .variable("GREETING", "good day")
        .variable("SERVICE_TOKEN", "hunter2hunter2")
        .file("plain.txt", "plain")
        .file(".env", "canary");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let given = json!({"n": 1, "port": listener.local_addr().unwrap().port()});
    let calls = [("script:look/changes", given.clone()), ("script:look/reads", given.clone())];
    let service = with(setup, "['script:look/*']", governance, &calls).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    for (index, text) in results.iter().enumerate() {
        let found: Value =
            serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}\n{}", service.log()));
        let changes = index == 0;
        let expected = json!({
            "arguments": given,
            "named": "good day",
            "secret": "[redacted]",
            "own file": "notes",
            "allowed": if changes { "done" } else { "PermissionError" },
            "read": "plain",
            "temporary": "done",
        });
        for (key, value) in expected.as_object().unwrap() {
            // Without its mount a file that may not be written is on a file system that is read-only.
            let same = found[key] == *value
                || value == "PermissionError" && found[key] == "OSError"
                || !changes && key == "allowed" && found[key] == "FileNotFoundError";
            assert!(same, "{key}: {found:#}");
        }
        for key in [
            "change own file",
            "new file here",
            "not allowed",
            "denied",
            "outside",
            "other tenant",
            "network",
        ] {
            let said = found[key].as_str().unwrap();
            assert!(said.ends_with("Error"), "{key}: {found:#}");
        }
        assert_eq!(found["here"], json!(["look.yaml", "notes.txt"]));
        assert_eq!(found["run"], run["run_id"]);
        let started = &events(&service, &run, "tool_call.started").await[index];
        assert_eq!(found["key"], started["effect_key"]);
        let names: Vec<&str> =
            found["environment"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
        let known = [
            "GREETING",
            "HOME",
            "LANG",
            "LC_CTYPE",
            "PATH",
            "PWD",
            "SERVICE_TOKEN",
            "TMPDIR",
            "TOOLLOOP_EFFECT_KEY",
            "TOOLLOOP_RUN_ID",
            "TOOLLOOP_WORKSPACE",
        ];
        assert!(names.iter().all(|name| known.contains(name)), "{names:?}");
    }
    assert_eq!(results.len(), 2);
    let made = service.dir.path().join("workspace/default/out/made.txt");
    assert_eq!(std::fs::read_to_string(made).unwrap(), "made");
    assert_eq!(
        std::fs::read_to_string(service.dir.path().join("tools/notes.txt")).unwrap(),
        "notes"
    );
}

async fn output_of_scripts_has_bounds(db: Db) {
    let own = if db == Db::Sqlite { "881" } else { "882" };
    let own = &format!("{own}.{}", std::process::id());
    let outlives = format!(
        "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        \
         os.execvp('sleep', ['sleep', '{own}'])\n    time.sleep(99)\nprint('gone')"
    );
    let schema = ", output_schema: {type: object, required: [n], properties: {n: {type: integer}}}";
    let table: Vec<(&str, String, &str, &str)> = vec![
        ("flood", "import sys\nfor i in range(3000): sys.stdout.write('y' * 99999 + chr(10))".into(), "", "bytes left out"),
        ("line", "import sys\nfor i in range(10000): sys.stdout.write('z' * 100000)".into(), "", "bytes left out"),
        ("errors", "import sys\nfor i in range(2000): sys.stderr.write('e' * 99999 + chr(10))\nsys.exit(5)".into(), "", "exit code 5"),
        ("deaf", "print('heard nothing')".into(), "", "heard nothing"),
        ("silent", "pass".into(), "", "wrote nothing"),
        ("deep", "print('[' * 20000 + ']' * 20000)".into(), schema, "nested more than 96 levels deep"),
        ("deep-text", "print('[' * 20000)".into(), "", "[[[["),
        ("no-json", "print('n = 1')".into(), schema, "not JSON"),
        ("odd-json", "print('{\"n\": \"one\"}')".into(), schema, "at /n"),
        ("good-json", "print('{\"n\": 1}')".into(), schema, "{\"n\": 1}"),
        ("bytes", "import sys\nsys.stdout.buffer.write(b'a\\xff\\xfe\\x00b')".into(), "", "a\u{fffd}\u{fffd}b"),
        ("forks", outlives, "", "gone"),
        ("late", "import time\nprint('early', flush=True)\ntime.sleep(60)".into(), ", timeout_seconds: 1", "within 1 seconds"),
        ("bomb", "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass".into(), ", timeout_seconds: 2", "Error: The "),
        ("fails", "import sys\nsys.stderr.write('first\\nno such tide\\n')\nsys.exit(3)".into(), "", "exit code 3.\nIts standard error ends with:\nfirst\nno such tide"),
        ("killed", "import os\nos.kill(os.getpid(), 9)".into(), "", "exit code 137"),
        ("nothing", "import os\nos.execv('/nowhere', ['x'])".into(), "", "FileNotFoundError"),
    ];
    let mut set = "tools:\n".to_owned();
    for (name, program, more, _) in &table {
        set.push_str(&python(name, program, &format!(", effect: read{more}")));
    }
    let names: Vec<String> = table.iter().map(|(name, ..)| format!("script:odd/{name}")).collect();
    let call = |name: &String| {
        let long = if name.ends_with("/deaf") { 300_000 } else { 10 };
        json!({"long": "x".repeat(long)})
    };
    let calls: Vec<(&str, Value)> = names.iter().map(|name| (name.as_str(), call(name))).collect();
    let setup = Setup::new().tools("odd", &set);
    let service = with(setup, "['script:odd/*']", "{}", &calls).start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results = results(&service, &run).await;
    assert_eq!(results.len(), table.len());
    for ((name, _, _, expected), result) in table.iter().zip(&results) {
        let shown: String = result.chars().take(500).collect();
        assert!(result.contains(expected), "{name}: {shown}");
        assert!(result.len() <= 66_000, "{name}: {}", result.len());
    }
    assert!(!is_alive(own), "a program outlived its call");
    assert!(service.peak_memory_mib() < 300, "{} MiB", service.peak_memory_mib());
    service.until_logged("no such tide").await;
}

async fn progress_is_streamed_and_not_kept(db: Db) {
    let program = "import json, sys, time\n\
        def say(it): print(it if isinstance(it, str) else json.dumps(it), file=sys.stderr, flush=True)\n\
        say({'progress': {'done': 1, 'of': 2, 'password': 'hunter2'}})\n\
        say({'progress': 'x' * 5000})\n\
        say('{\"progress\": ' + '[' * 3000)\n\
        for i in range(2000): say({'progress': i})\n\
        time.sleep(1)\n\
        say('plain words')\n\
        say({'progress': 'nearly'})\n\
        time.sleep(1)\n\
        print('done')";
    let setup = Setup::new().tools("slow", &format!("tools:\n{}", python("job", program, "")));
    let calls = [("script:slow/job", json!({}))];
    let service = with(setup, "['script:slow/*']", "{autonomy: full}", &calls).start(db).await;
    let request = service.request(Method::POST, "/v1/agents/worker/invoke-iterative");
    let request = request.header("accept", "text/event-stream").json(&json!({}));
    let mut reader = Reader::of(request.send().await.unwrap());
    let mut frames = Vec::new();
    while let Some(frame) = reader.next().await {
        frames.push(frame);
    }
    let place = |kind: &str| frames.iter().find(|f| f.event == kind).unwrap().id;
    let (started, completed) = (place("tool_call.started"), place("tool_call.completed"));
    let told = &reader.progress;
    assert!((3..60).contains(&told.len()), "{} pieces", told.len());
    for (before, piece) in told {
        assert!((started..completed).contains(before), "after event {before}: {piece:#}");
        assert_eq!(piece["type"], "tool_call.progress");
        assert_eq!(piece["run_id"], frames[0].data["run_id"]);
        assert_eq!(piece["data"]["tool"], "script:slow/job");
        assert!(piece.get("seq").is_none() && piece["at"].is_string(), "{piece:#}");
        let call = frames.iter().find(|f| f.event == "tool_call.started").unwrap();
        assert_eq!(piece["data"]["call_id"], call.data["data"]["call_id"]);
    }
    let first = json!({"done": 1, "of": 2, "password": "[redacted]"});
    assert_eq!(told[0].1["data"]["progress"], first);
    assert_eq!(told.last().unwrap().1["data"]["progress"], "nearly");
    let run = json!({"run_id": frames[0].data["run_id"]});
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let journal = service.get(&path).await.body;
    assert!(!journal.to_string().contains("tool_call.progress"));
    service.until_logged("plain words").await;
}

async fn the_gate_judges_scripts_like_other_tools(db: Db) {
    let set = format!(
        "tools:\n{}{}{}",
        python("reads", "print('read')", ", effect: read"),
        python("changes", "print('changed')", ""),
        python("loses", "print('lost')", ", destructive: true")
    );
    let all = [
        ("script:it/reads", json!({})),
        ("script:it/changes", json!({})),
        ("script:it/loses", json!({})),
    ];
    let (agent, scenario) = calling("['script:it/*']", "{}", &all);
    let named =
        |governance: &str| agent.replace("governance: {}", &format!("governance: {governance}"));
    let mut setup = Setup::new().tools("it", &set).scenario("worker", &scenario);
    for (name, governance) in [
        ("supervised", "{}"),
        ("read-only", "{autonomy: read-only}"),
        ("full", "{autonomy: full}"),
        ("denying", "{autonomy: full, commands: {deny: [{command: python3, args: changed}]}}"),
        ("polite", "{autonomy: full, tool_policies: {'script:it/loses': deny}}"),
    ] {
        setup = setup.agent(name, &named(governance));
    }
    let parent = "model: scripted/parent\ntools: ['agent:full']\ngovernance: {autonomy: full, commands: {deny: \
                  [{command: python3, args: lost}]}}\nenable_double_confirmation: false\n";
    let service = setup
        .agent("parent", parent)
        .scenario(
            "parent",
            "steps: [{tool_calls: [{tool: 'agent:full', arguments: {}}]}, {text: done}]",
        )
        .start(db)
        .await;
    for (name, ran, rule) in [
        ("full", 3, ""),
        ("read-only", 1, "autonomy"),
        ("denying", 2, "command"),
        ("polite", 2, "tool_policy"),
    ] {
        let run = service.run(name, &json!({})).await;
        let blocked = events(&service, &run, "tool_call.blocked").await;
        assert_eq!(results(&service, &run).await.len(), ran, "{name}: {run:#}");
        assert!(blocked.iter().all(|event| event["rule"] == rule), "{name}: {blocked:#?}");
        assert_eq!(blocked.len(), 3 - ran, "{name}: {blocked:#?}");
    }
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let child = service.get("/v1/runs?agent=full").await.body["data"][0].clone();
    let blocked = events(&service, &child, "tool_call.blocked").await;
    assert_eq!(blocked.len(), 1, "what the parent denies is denied: {blocked:#?}");

    let path = service.enqueue("supervised").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let call = parked["pending"][0]["call_id"].as_str().unwrap();
    assert_eq!(parked["pending"][0]["tool"], "script:it/loses");
    service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    assert_eq!(results(&service, &run).await[2], "lost");

    let scopes =
        json!({"name": "k", "scopes": ["agents:invoke", "runs:read", "tools:script:it/reads"]});
    let key = service.post("/v1/keys", &scopes).await.body["key"].as_str().unwrap().to_owned();
    let request = service.http.post(service.url("/v1/agents/full/invoke-iterative"));
    let run = answer(request.bearer_auth(&key).json(&json!({}))).await.body;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!(blocked.len(), 2, "{blocked:#?}");
    assert!(blocked.iter().all(|event| event["rule"] == "scope"), "{blocked:#?}");
}

async fn scripts_end_with_their_run_and_with_the_service(db: Db) {
    let seconds = if db == Db::Sqlite { "6661" } else { "6662" };
    let seconds = &format!("{seconds}.{}", std::process::id());
    let program = format!(
        "import os\nif os.fork() == 0: os.setsid()\nos.execvp('sleep', ['sleep', '{seconds}'])"
    );
    let setup = Setup::new().tools("slow", &format!("tools:\n{}", python("job", &program, "")));
    let calls = [("script:slow/job", json!({}))];
    let mut service = with(setup, "['script:slow/*']", "{autonomy: full}", &calls).start(db).await;
    let path = service.enqueue("worker").await;
    until_alive(seconds, true).await;
    service.post(&format!("{path}/cancel"), &json!({})).await;
    until_alive(seconds, false).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
    service.enqueue("worker").await;
    until_alive(seconds, true).await;
    service.kill().await;
    until_alive(seconds, false).await;
}

async fn labels_and_timeouts_come_from_the_file(db: Db) {
    let slow = "import time\ntime.sleep(30)";
    let site = Site::start("127.0.0.1").await;
    let set = format!(
        "base_url: http://127.0.0.1:{}\ntools:\n{}{}{}{}  - {{name: ask, method: GET, path: /x, effect: read, yields: \
         [none]}}\n  - {{name: tell, method: GET, path: /x, effect: read}}\n  - {{name: wipe, method: GET, path: /x, \
         effect: read, sanitizes: [untrusted]}}\n",
        site.port,
        python("mail", "print('mail')", ", effect: read, yields: [untrusted]"),
        python(
            "washed",
            "print('washed')",
            ", effect: read, yields: [untrusted, private], sanitizes: [untrusted]",
        ),
        python("plain", "print('plain')", ", effect: read"),
        python("slow", slow, ", effect: read, timeout_seconds: 1"),
    );
    let mut setup = Setup::new().tools("it", &set);
    let table = [
        ("script:it/mail", "", json!(["untrusted"])),
        ("script:it/mail", "tool_options: {'script:*': {yields: [private]}}\n", json!(["private"])),
        ("script:it/washed", "", json!(["private"])),
        ("script:it/washed", "tool_options: {'script:*': {sanitizes: [private]}}\n", json!([])),
        ("script:it/plain", "", json!([])),
        ("script:it/slow", "", json!([])),
        ("http:it/ask", "", json!([])),
        ("http:it/tell", "", json!(["untrusted"])),
        ("http:it/wipe", "", json!([])),
    ];
    for (index, (tool, options, _)) in table.iter().enumerate() {
        let (agent, scenario) = calling(&format!("['{tool}']"), "{}", &[(tool, json!({}))]);
        let (name, old) = (format!("agent-{index}"), "scripted/worker");
        let agent = agent.replace(old, &format!("scripted/{name}"));
        setup = setup.agent(&name, &format!("{options}{agent}")).scenario(&name, &scenario);
    }
    let service = setup.start(db).await;
    for (index, (tool, _, labels)) in table.iter().enumerate() {
        let run = service.run(&format!("agent-{index}"), &json!({})).await;
        let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
        assert_eq!(service.get(&path).await.body["labels"], *labels, "{tool}");
        if *tool == "script:it/slow" {
            let result = &results(&service, &run).await[0];
            assert!(result.contains("did not finish within 1 seconds"), "{result}");
        }
    }
}

#[tokio::test]
async fn check_tells_file_and_line_of_a_bad_entry() {
    let table = [
        (
            "{name: a, command: [no-such-program]}",
            "tools/odd.yaml: line 3, column 15: tools[0].command: there is no program \"no-such-program\" in ",
        ),
        ("{name: a, command: [python3, gone.py]}", "there is no file \"gone.py\""),
        ("{name: a, command: [./gone]}", "is not an executable file"),
        ("{name: a, command: []}", "is a list of a program and its arguments"),
        ("{name: a, command: [sh], method: GET}", "tools[0].method: has no meaning with `command`"),
        (
            "{name: a, method: GET, path: /, env: [A]}",
            "tools[0].env: has no meaning without `command`",
        ),
        (
            "{name: a, command: [sh], env: [TOOLLOOP_ADMIN_KEY]}",
            "tools[0].env[0]: TOOLLOOP_ADMIN_KEY is the service's own",
        ),
        (
            "{name: a, command: [sh], timeout_seconds: 0}",
            "tools[0].timeout_seconds: 0 is not between 1 and 86400",
        ),
        ("{name: a, command: [sh], output_schema: {type: nonsense}}", "tools[0].output_schema: "),
        ("{name: a, command: [sh], yields: [secret]}", "tools[0].yields"),
        ("{name: a}", "a tool has a `method` (HTTP) or a `command` (a program)"),
    ];
    for (entry, expected) in table {
        let setup = Setup::new()
            .tools("odd", &format!("base_url: http://a.example\ntools:\n  - {entry}\n"));
        let dir = setup.write_directory();
        let checked = command(dir.path()).arg("check").output().await.unwrap();
        let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
        assert!(!checked.status.success(), "{entry}: {said}");
        assert!(said.contains(expected), "{entry}: {said}");
    }
}

#[tokio::test]
async fn a_directory_of_scripts_in_the_workspace_is_refused() {
    let program = python("job", "print('ran')", "");
    let (agent, scenario) =
        calling("['script:it/*']", "{autonomy: full}", &[("script:it/job", json!({}))]);
    for (tools_dir, workspace) in [("workspace/default", "workspace"), (".", "workspace")] {
        let setup = Setup::new()
            .config(&format!("tools_dir = \"{tools_dir}\"\n[tools]\nworkspace = \"{workspace}\""))
            .agent("worker", &agent)
            .scenario("worker", &scenario);
        let setup = if tools_dir == "." {
            setup.script("../it.yaml", &format!("tools:\n{program}"))
        } else {
            setup.file("it.yaml", &format!("tools:\n{program}"))
        };
        let service = setup.start(Db::Sqlite).await;
        let run = service.run("worker", &json!({})).await;
        let result = &results(&service, &run).await[0];
        assert!(result.contains("lie in one another"), "{tools_dir}: {result}");
    }
}

async fn programs_that_fill_the_workspace_are_ended(db: Db) {
    let fills = "import os, time\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nn = 0\nwhile True:\n  \
                 open(f'fill{n}', 'wb').write(b'x' * 65536); n += 1; time.sleep(0.01)";
    let empties = "import os, glob\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nfor f in glob.glob('fill*'): \
                   os.remove(f)\nprint(len(os.listdir('.')))";
    let tools = format!("tools:\n{}{}", python("fills", fills, ""), python("empties", empties, ""));
    let paths = "{autonomy: full, paths: {write: ['./**']}, budget: {max_files_modified: 100000}}";
    let calls = [("script:fill/fills", json!({})), ("script:fill/empties", json!({}))];
    let setup =
        Setup::new().config("[tools.file_ops]\nworkspace_quota = \"1MiB\"\n").tools("fill", &tools);
    let service = with(setup, "['script:fill/*']", paths, &calls).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let results = events(&service, &run, "tool_call.completed").await;
    let told = results[0]["content"].as_str().unwrap();
    assert!(told.contains("The programs were ended: the workspace would hold"), "{results:#?}");
    assert_eq!(results[1]["content"].as_str().unwrap().trim(), "0", "{results:#?}");
}

async fn no_flood_goes_far_beyond_the_bounds(db: Db) {
    let small = "import os\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nn = 0\nwhile True:\n  open(f'small{n}', 'w').close(); n += 1";
    let large = "import os\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nf = open('large', 'wb')\n\
                 while True: f.write(b'x' * (1 << 20)); f.flush()";
    let several = "import os\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nn = 0\nwhile True:\n  \
                   open(f'several{n}', 'wb').write(b'x' * (1 << 20)); n += 1";
    let emptied = "import os, glob\nos.chdir(os.environ['TOOLLOOP_WORKSPACE'])\nfound = glob.glob('*')\n\
                   print(len(found), sum(os.stat(f).st_size for f in found))\nfor f in found: os.remove(f)";
    let programs = [("small", small), ("large", large), ("several", several), ("emptied", emptied)];
    let tools: String = programs.iter().map(|(name, program)| python(name, program, "")).collect();
    let calls = ["small", "emptied", "large", "emptied", "several", "emptied"]
        .map(|name| format!("script:flood/{name}"));
    let calls: Vec<(&str, Value)> = calls.iter().map(|name| (name.as_str(), json!({}))).collect();
    let paths = "{autonomy: full, paths: {write: ['./**']}}";
    let setup = Setup::new()
        .config("[tools.file_ops]\nworkspace_quota = \"8MiB\"\nworkspace_files = 1000\n")
        .tools("flood", &format!("tools:\n{tools}"));
    let service = with(setup, "['script:flood/*']", paths, &calls).start(db).await;
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    assert_eq!(results.len(), 6, "{run:#}: {results:#?}");
    let files = "The programs were ended: the workspace would hold";
    assert!(results[0].contains(files) && results[0].contains("files"), "{results:#?}");
    assert!(results[2].contains("File too large"), "{results:#?}");
    assert!(results[4].contains(files) && results[4].contains("bytes"), "{results:#?}");
    let found = |index: usize| -> Vec<u64> {
        results[index].split_whitespace().map(|figure| figure.parse().unwrap()).collect()
    };
    println!("left by floods: {:?}, {:?}, {:?}", found(1), found(3), found(5));
    assert!(found(1)[0] > 1000, "{results:#?}");
    assert_eq!(found(3), [1, 8 << 20], "one file is held by the kernel");
    assert!(found(5)[1] > 8 << 20, "{results:#?}");
}
