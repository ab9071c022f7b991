//! Tools of MCP servers that are programs, through the HTTP API, on both stores.
//!
//! With other features. Children, handoffs, tenants, policies, dry run, a cancel in the middle:
//! `mcp_crossings.rs`. Parked runs: an undeclared tool waits for its approval, and is asked for again where its
//! declaration has changed (here). Sessions: nothing of a call is kept but its result.
//! Crash of the service: no server outlives it (here); the call is left to its effect, as of every tool
//! (`crashes.rs`). Streaming, budgets, skills, console, command line, generated clients: as every tool.

use std::future::IntoFuture;
use std::os::unix::fs::PermissionsExt;

use serde_json::{Value, json};
use tokio_util::task::AbortOnDropHandle;

use crate::script_tools::{events, with};
use crate::service::{Db, Service, Setup, command, on_both_stores, on_one_store};
use crate::shell_stories::until_alive;

on_both_stores! {
    tools_are_listed_and_called,
    a_server_that_dies_is_noticed_and_started_again,
    a_tool_that_has_changed_is_approved_again,
    effects_come_from_the_operator,
    servers_end_with_the_service,
    a_server_may_be_down_and_come_back,
}

on_one_store! {
    a_server_reaches_only_its_files_variables_and_hosts,
    messages_of_servers_are_bounded,
    a_server_that_hangs_hangs_no_run,
    lists_are_followed,
    globs_of_a_server_that_is_down_say_so,
    tools_of_many_servers_have_a_bound_together,
    lists_that_are_none_or_endless_end_no_server,
}

const SERVER: &str = include_str!("mcp/server.py");
const FULL: &str = "{autonomy: full}";

/// `[mcp.<name>]` with the scripted server.
pub fn server(name: &str, more: &str) -> String {
    format!("[mcp.{name}]\ncommand = \"python3\"\nargs = [\"-c\", '''{SERVER}''']\n{more}\n")
}

pub async fn results(service: &Service, run: &Value) -> Vec<String> {
    let completed = events(service, run, "tool_call.completed").await;
    completed.iter().map(|event| event["content"].as_str().unwrap().to_owned()).collect()
}

fn read(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| panic!("{text}"))
}

/// Waits until all servers can be asked.
pub async fn until_up(service: &Service) {
    service.until("/readyz", |ready| ready["mcp_servers"] == json!([])).await;
}

pub fn directory(service: &Service, name: &str) -> std::path::PathBuf {
    service.dir.path().join("workspace/.mcp").join(name)
}

async fn tools_are_listed_and_called(db: Db) {
    let config = server("odd", "[mcp.odd.effects]\necho = \"read\"");
    let calls = [
        ("mcp:odd/echo", json!({"n": 5})),
        ("mcp:odd/fail", json!({})),
        ("mcp:odd/echo", json!({"n": "five"})),
        ("mcp:odd/ask", json!({})),
    ];
    let service = with(Setup::new().config(&config), "['mcp:odd/*']", FULL, &calls).start(db).await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let results = results(&service, &run).await;
    let echoed = read(&results[0]);
    assert_eq!(echoed["args"], json!({"n": 5}));
    assert!(echoed["meta"]["traceparent"].as_str().unwrap().starts_with("00-"), "{echoed}");
    let started = events(&service, &run, "tool_call.started").await;
    assert_eq!(echoed["meta"]["toolloop/effect-key"], started[0]["effect_key"]);
    assert_eq!(
        (&started[0]["effect"], &started[0]["sandbox"]),
        (&json!("read"), &json!("enforced"))
    );
    let action = &started[0]["actions"][0];
    assert_eq!(
        action,
        &json!({"kind": "call", "tool": "mcp:odd/echo", "effect": "read", "egress": true})
    );
    assert_eq!(results[1], "Error: no such tide");
    assert!(results[2].contains("do not match the tool's schema"), "{}", results[2]);
    assert_eq!(results[3], "toolloop does not offer this");
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    assert_eq!(service.get(&path).await.body["labels"], json!(["untrusted"]));

    let tool = service.get("/v1/tools/mcp%3Aodd%2Fecho").await.body;
    let expected = json!({
        "name": "mcp:odd/echo", "description": "Does echo.", "effect": "read", "destructive": false,
        "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}},
        "source": "mcp:odd", "sandbox": "enforced", "network": false, "unavailable": null, "allowed": true,
    });
    assert_eq!(tool, expected);
    let other = service.get("/v1/tools/mcp%3Aodd%2Ffail").await.body;
    assert_eq!((&other["effect"], &other["destructive"]), (&json!("once"), &json!(true)));
    let audit = service.get("/v1/audit?limit=50").await.body;
    let of_tools =
        audit["data"].as_array().unwrap().iter().filter(|it| it["tool"] == "mcp:odd/echo");
    assert_eq!(of_tools.count(), 1, "{audit:#}");
}

async fn a_server_reaches_only_its_files_variables_and_hosts(db: Db) {
    let setup = Setup::new()
        .config(&server("odd", "env = [\"GREETING\", \"NOT_THERE\"]"))
        .variable("GREETING", "good day")
        .variable("OTHER_SECRET", "hunter2hunter2");
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let site = tokio::net::TcpListener::bind("127.0.0.2:0").await.unwrap();
    let listed = site.local_addr().unwrap().to_string();
    let app = axum::Router::new().fallback(async || "fine");
    let site = AbortOnDropHandle::new(tokio::spawn(axum::serve(site, app).into_future()));
    let urls = json!([format!("http://{listed}/"), format!("http://127.0.0.1:{port}/")]);
    let calls = [
        ("mcp:odd/reach", json!({"port": port})),
        ("mcp:odd/fetch", json!({"urls": urls})),
        ("mcp:out/fetch", json!({"urls": urls})),
        ("mcp:out/reach", json!({"port": port})),
    ];
    let network = format!("network = [\"{listed}\"]\nallow_private = [\"127.0.0.2\"]");
    let setup = setup.config(&server("out", &network));
    let setup = with(setup, "['mcp:odd/*', 'mcp:out/*']", FULL, &calls).file("plain.txt", "plain");
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    let found = read(&results(&service, &run).await[0]);
    assert_eq!(
        (&found["named"], &found["own file"]),
        (&json!("good day"), &json!("done")),
        "{found:#}"
    );
    for place in ["shadow", "settings", "other tenant", "network", "outside"] {
        assert!(found[place].as_str().unwrap().ends_with("Error"), "{place}: {found:#}");
    }
    let known = ["GREETING", "HOME", "LANG", "LC_CTYPE", "PATH", "PWD", "TMPDIR"];
    let names = found["environment"].as_array().unwrap();
    assert!(names.iter().all(|name| known.contains(&name.as_str().unwrap())), "{names:?}");
    assert!(directory(&service, "odd").join("own.txt").exists());
    // The network is what the operator lists for the server, through the proxy.
    let told = results(&service, &run).await;
    let fetched = |told: &str| [0, 1].map(|i| read(told)[urls[i].as_str().unwrap()].clone());
    assert_eq!(fetched(&told[1]), ["URLError", "URLError"]);
    let [fine, refused] = fetched(&told[2]);
    assert_eq!(fine, "fine", "{}", service.log());
    assert!(refused.as_str().unwrap().contains("is not listed in mcp.out.network"), "{refused}");
    assert!(read(&told[3])["network"].as_str().unwrap().ends_with("Error"), "{}", told[3]);
    drop(site);
    assert!(listener.set_nonblocking(true).is_ok() && listener.accept().is_err(), "nothing came");
    service.until_logged("asked for a host that its settings do not list").await;
    // Its requests are in the audit log, in the name of the server and of no run.
    for (action, url) in [("mcp.requested", &urls[0]), ("mcp.refused", &urls[1])] {
        let path = format!("/v1/audit?action={action}");
        let found = service.until(&path, |found| found["data"] != json!([])).await;
        let url = reqwest::Url::parse(url.as_str().unwrap()).unwrap();
        let asked =
            json!({"server": "out", "host": url.host_str(), "port": url.port(), "count": 1});
        assert_eq!(found["data"].as_array().unwrap().len(), 1, "{found:#}");
        let record = &found["data"][0];
        assert_eq!((&record["arguments"], &record["run_id"]), (&asked, &Value::Null));
        let is_refused = action == "mcp.refused";
        let outcome = if is_refused { "blocked" } else { "succeeded" };
        assert_eq!((&record["outcome"], &record["subject"]), (&json!(outcome), &json!("service")));
        assert_eq!(record["reason"].is_string(), is_refused, "{record:#}");
    }
    let leads_out =
        async |tool: &str| service.get(&format!("/v1/tools/{tool}")).await.body["network"].clone();
    assert_eq!(leads_out("mcp%3Aout%2Ffetch").await, true);
    assert_eq!(leads_out("mcp%3Aodd%2Ffetch").await, false);
}

async fn messages_of_servers_are_bounded(db: Db) {
    let calls = [
        ("mcp:odd/huge", json!({"n": 3_000_000})),
        ("mcp:odd/huge", json!({"n": 9_000_000})),
        ("mcp:odd/stderr", json!({"n": 3000})),
        ("mcp:odd/junk", json!({})),
        ("mcp:odd/notes", json!({"n": 1500})),
        ("mcp:odd/internal", json!({})),
        ("mcp:odd/echo", json!({})),
    ];
    let setup = with(Setup::new().config(&server("odd", "")), "['mcp:odd/*']", FULL, &calls)
        .config(&server("loud", ""))
        .agent("loud", "model: scripted/loud\ntools: ['mcp:loud/*']\nenable_double_confirmation: false\ngovernance: {autonomy: full}\n")
        .scenario("loud", "steps: [{tool_calls: [{tool: 'mcp:loud/notes', arguments: {n: 1000000}}]}, {text: done}]")
        .agent("endless", "model: scripted/endless\ntools: ['mcp:loud/*']\nenable_double_confirmation: false\ngovernance: {autonomy: full}\n")
        .scenario("endless", "steps: [{tool_calls: [{tool: 'mcp:loud/boom', arguments: {}}]}, {text: done}]");
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    let results = results(&service, &run).await;
    assert_eq!(results.len(), calls.len(), "{run:#}");
    assert!(results[0].contains("bytes left out") && results[0].len() <= 66_000);
    assert!(results[1].contains("it has more than 4 MiB"), "{:.300}", results[1]);
    assert!(results[1].contains("unknown whether the call took effect"), "{:.300}", results[1]);
    assert_eq!(results[2..5], ["wrote", "junk", "noted"]);
    assert!(results[5].contains("did not complete the call"), "{}", results[5]);
    assert!(results[5].contains("unknown whether the call took effect"), "{}", results[5]);
    assert!(results[6].contains("\"args\""), "the server is still there: {}", results[6]);
    for (agent, why) in [("loud", "too much that was not asked for"), ("endless", "without an end")]
    {
        until_up(&service).await;
        let run = service.run(agent, &json!({})).await;
        let told = events(&service, &run, "tool_call.completed").await[0]["content"].to_string();
        assert!(told.contains("unknown whether the call took effect"), "{told}");
        service.until_logged(why).await;
    }
    let said = service.log().matches("standard error of an MCP server").count();
    assert!((1..1000).contains(&said), "{said} lines of 3,000");
    assert!(service.peak_memory_mib() < 300, "{} MiB", service.peak_memory_mib());
}

async fn tools_of_many_servers_have_a_bound_together(db: Db) {
    let large = SERVER
        .replace("\"inputSchema\": kind", "\"inputSchema\": {**kind, \"title\": \"x\" * 28000}");
    let config = (0..5)
        .map(|n| format!("[mcp.m{n}]\ncommand = \"python3\"\nargs = [\"-c\", '''{large}''']\n"));
    let setup = Setup::new().config(&config.collect::<String>());
    let setup = with(setup, "['mcp:*/*', file_ops]", FULL, &[("file_ops", json!({}))]);
    let service = setup.start(db).await;
    until_up(&service).await;
    let dry = service.post("/v1/agents/worker/dry-run", &json!({})).await.body;
    let names: Vec<&str> =
        dry["tools"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap()).collect();
    assert!(names.contains(&"file_ops") && names.contains(&"mcp:m0/echo"), "{names:?}");
    let left_out = 5 * 18 + 1 - names.len();
    assert!((1..30).contains(&left_out), "{names:?}");
    let said = format!(
        "The tools of this agent take more than 2048 KiB together: {left_out} tools of MCP servers are left out, from mcp:m4/"
    );
    assert!(dry["warnings"][0].as_str().unwrap().starts_with(&said), "{}", dry["warnings"]);
    let run = service.run("worker", &json!({})).await;
    assert_eq!((&run["status"], &run["warnings"][0]), (&json!("completed"), &dry["warnings"][0]));
}

async fn lists_that_are_none_or_endless_end_no_server(db: Db) {
    let odd = "result = {\"tools\": tools()} if os.path.exists(\"asked\") else open(\"asked\", \"w\").close() or []";
    let script = SERVER.replace("result = {\"tools\": tools()}", odd);
    let endless = "n = int(params.get(\"cursor\", 0)); result = {\"tools\": [{\"name\": f\"t{n}\", \
        \"description\": \"x\" * 1000000, \"inputSchema\": {\"type\": \"object\"}}], \"nextCursor\": str(n + 1)}";
    let long = SERVER.replace("result = {\"tools\": tools()}", endless);
    let config = [("odd", script), ("long", long)].map(|(name, script)| {
        format!("[mcp.{name}]\ncommand = \"python3\"\nargs = [\"-c\", '''{script}''']\n")
    });
    let calls = [("mcp:odd/echo", json!({"n": 1}))];
    let setup = with(Setup::new().config(&config.concat()), "['mcp:odd/*']", FULL, &calls);
    let service = setup.start(db).await;
    service.until_logged("has no valid `tools` array").await;
    service.until_logged("it lists more than the 3 tools that are looked at").await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    let told = results(&service, &run).await;
    assert!(told[0].contains("\"args\": {\"n\": 1}"), "{told:?}");
}

async fn a_server_that_dies_is_noticed_and_started_again(db: Db) {
    let calls = [("mcp:odd/die", json!({})), ("mcp:odd/echo", json!({}))];
    let setup = with(Setup::new().config(&server("odd", "")), "['mcp:odd/*']", FULL, &calls);
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    let first = results(&service, &run).await;
    assert!(first[0].contains("it ended with exit code 3"), "{}", first[0]);
    assert!(first[0].contains("It is unknown whether the call took effect."), "{}", first[0]);
    assert!(!first[0].contains("did not finish within"), "a death is no timeout: {}", first[0]);
    assert_eq!(run["status"], "completed");
    for _ in 0..2 {
        until_up(&service).await;
        let run = service.run("worker", &json!({})).await;
        assert!(results(&service, &run).await[0].contains("exit code 3"), "it was there again");
    }
}

async fn a_server_that_hangs_hangs_no_run(db: Db) {
    let seconds = if db == Db::Sqlite { "5551.5" } else { "5552.5" };
    let calls = [("mcp:odd/hang", json!({"seconds": seconds}))];
    let (slow, fast) = (server("odd", ""), server("other", ""));
    let setup = with(Setup::new().config(&slow).config(&fast), "['mcp:odd/*']", FULL, &calls)
        .agent(
            "patient",
            "model: scripted/worker\ntools: ['mcp:odd/*']\nenable_double_confirmation: false\n\
             tool_options: {'mcp:odd/*': {timeout_seconds: 1}}\ngovernance: {autonomy: full}\n",
        );
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("patient", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let told = &results(&service, &run).await[0];
    assert!(told.contains("did not finish within 1 seconds"), "{told}");
    service.until_logged("it hangs or no longer answers").await;
    until_alive(seconds, false).await;

    until_up(&service).await;
    let path = service.enqueue("worker").await;
    until_alive(seconds, true).await;
    service.post(&format!("{path}/cancel"), &json!({})).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
}

fn tool(name: &str, more: &Value) -> Value {
    let mut tool = json!({"name": name, "description": "New.", "inputSchema": {"type": "object"}});
    for (key, value) in more.as_object().unwrap() {
        tool[key] = value.clone();
    }
    tool
}

async fn lists_are_followed(db: Db) {
    let new = json!([
        tool("new", &json!({})),
        tool("new", &json!({"description": "A clash."})),
        tool("change", &json!({})),
        tool("bad name", &json!({})),
        tool("bad-schema", &json!({"inputSchema": {"type": "nonsense"}})),
    ]);
    let calls = [("mcp:odd/change", json!({"tools": new}))];
    let config = server("odd", "[mcp.odd.effects]\nnew = \"idempotent\"");
    let setup = with(Setup::new().config(&config), "['mcp:odd/*']", FULL, &calls);
    let service = setup
        .agent("later", "model: scripted/later\ntools: ['mcp:odd/new', 'mcp:odd/echo']\nenable_double_confirmation: false\ngovernance: {autonomy: full}\n")
        .scenario("later", "steps: [{tool_calls: [{tool: 'mcp:odd/echo', arguments: {}}]}, {tool_calls: [{tool: 'mcp:odd/new', arguments: {}}]}, {text: done}]")
        .start(db)
        .await;
    until_up(&service).await;
    let names = |listed: &Value| -> Vec<String> {
        let names =
            listed["data"].as_array().unwrap().iter().map(|it| it["name"].as_str().unwrap());
        names.filter(|name| name.starts_with("mcp:")).map(str::to_owned).collect()
    };
    assert_eq!(names(&service.get("/v1/tools?limit=100").await.body).len(), 18);
    service.run("worker", &json!({})).await;
    let listed = service
        .until("/v1/tools?limit=100", |listed| names(listed) == ["mcp:odd/change", "mcp:odd/new"])
        .await;
    let new =
        listed["data"].as_array().unwrap().iter().find(|it| it["name"] == "mcp:odd/new").unwrap();
    assert_eq!((&new["effect"], &new["description"]), (&json!("idempotent"), &json!("New.")));
    for warning in ["lists the tool new twice", "cannot have the name", "bad-schema is left out"] {
        service.until_logged(warning).await;
    }
    let dry = service.post("/v1/agents/worker/dry-run", &json!({})).await.body;
    assert_eq!(dry["tools"].as_array().unwrap().len(), 2, "{dry:#}");
    let run = service.run("later", &json!({})).await;
    let told = results(&service, &run).await;
    assert!(told[0].contains("The MCP server odd has no tool mcp:odd/echo"), "{told:?}");
    assert!(told[1].contains("Unknown tool (code -32602)"), "{told:?}");
}

async fn a_tool_that_has_changed_is_approved_again(db: Db) {
    let changed = json!([
        tool("echo", &json!({"inputSchema": {"type": "object", "properties": {"m": {}}}})),
        tool("change", &json!({})),
    ]);
    let config = server("odd", "[mcp.odd.effects]\nchange = \"once\"");
    let setup = with(
        Setup::new().config(&config),
        "['mcp:odd/*']",
        "{}",
        &[("mcp:odd/echo", json!({"n": 1}))],
    )
    .agent(
        "changer",
        "model: scripted/changer\ntools: ['mcp:odd/*']\nenable_double_confirmation: false\n",
    )
    .scenario(
        "changer",
        &format!(
            "steps: [{{tool_calls: [{{tool: 'mcp:odd/change', arguments: {}}}]}}, {{text: done}}]",
            json!({"tools": changed})
        ),
    );
    let service = setup.start(db).await;
    until_up(&service).await;
    let path = service.enqueue("worker").await;
    let parked = service.until(&path, |run| run["status"] == "awaiting_approval").await;
    let call = parked["pending"][0]["call_id"].as_str().unwrap().to_owned();
    service.run("changer", &json!({})).await;
    service.until("/v1/tools/mcp%3Aodd%2Fecho", |tool| tool["description"] == "New.").await;
    service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    let again = service
        .until(&path, |run| {
            run["status"] == "awaiting_approval"
                && run["pending"][0]["reason"].as_str().is_some_and(|it| it.contains("has changed"))
        })
        .await;
    let call = again["pending"][0]["call_id"].as_str().unwrap();
    service.post(&format!("{path}/tool-calls/{call}/approve"), &json!({})).await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    assert!(results(&service, &run).await[0].contains("\"n\": 1"), "{run:#}");
}

async fn effects_come_from_the_operator(db: Db) {
    let listed = json!([
        tool("reads", &json!({"annotations": {"readOnlyHint": true}})),
        tool(
            "says-it-reads",
            &json!({"annotations": {"readOnlyHint": true, "destructiveHint": false}})
        ),
        tool("says-it-destroys", &json!({"annotations": {"destructiveHint": true}})),
        tool("change", &json!({})),
    ]);
    let effects =
        "[mcp.odd.effects]\nreads = \"read\"\nsays-it-destroys = \"read\"\nchange = \"idempotent\"";
    let calls = ["reads", "says-it-reads", "says-it-destroys"].map(|it| format!("mcp:odd/{it}"));
    let calls: Vec<(&str, Value)> = calls.iter().map(|name| (name.as_str(), json!({}))).collect();
    let setup = with(
        Setup::new().config(&server("odd", effects)),
        "['mcp:odd/*']",
        "{autonomy: read-only}",
        &calls,
    )
    .agent("changer", "model: scripted/changer\ntools: ['mcp:odd/*']\nenable_double_confirmation: false\n")
    .scenario("changer", &format!(
        "steps: [{{tool_calls: [{{tool: 'mcp:odd/change', arguments: {}}}]}}, {{text: done}}]",
        json!({"tools": listed})
    ))
    .agent("denied", "model: scripted/worker\ntools: ['mcp:*']\nenable_double_confirmation: false\ngovernance: {autonomy: full, tool_policies: {'mcp:odd/*': deny}}\n")
    .agent("asked", "model: scripted/asked\ntools: ['mcp:odd/*']\nenable_double_confirmation: false\n")
    .scenario("asked", "steps: [{tool_calls: [{tool: 'mcp:odd/says-it-reads', arguments: {}}]}, {text: done}]");
    let service = setup.start(db).await;
    until_up(&service).await;
    service.run("changer", &json!({})).await;
    service.until("/v1/tools?limit=100", |all| all.to_string().contains("says-it-destroys")).await;
    let tools = service.get("/v1/tools?limit=100").await.body;
    let effect = |name: &str| {
        let all = tools["data"].as_array().unwrap();
        let tool = all.iter().find(|it| it["name"] == format!("mcp:odd/{name}")).unwrap();
        (tool["effect"].as_str().unwrap().to_owned(), tool["destructive"].as_bool().unwrap())
    };
    assert_eq!(effect("reads"), ("read".into(), false));
    assert_eq!(effect("says-it-reads"), ("once".into(), true));
    assert_eq!(effect("says-it-destroys"), ("once".into(), true));
    let run = service.run("worker", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!(blocked.len(), 2, "{blocked:#?}");
    assert!(blocked.iter().all(|event| event["rule"] == "autonomy"), "{blocked:#?}");
    let run = service.run("denied", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert!(
        blocked.len() == 3 && blocked.iter().all(|it| it["rule"] == "tool_policy"),
        "{blocked:#?}"
    );
    let parked = service.post("/v1/agents/asked/invoke-iterative", &json!({})).await.body;
    let why = parked["pending"][0]["reason"].as_str().unwrap_or_else(|| panic!("{parked:#}"));
    let undeclared =
        "it is not declared what mcp:odd/says-it-reads does, so it counts as destructive";
    assert!(why.contains(undeclared), "{why}");
    let calls = format!("/v1/runs/{}/tool-calls", parked["run_id"].as_str().unwrap());
    let call = service.get(&calls).await.body["data"][0].clone();
    assert_eq!((&call["state"], &call["effect"]), (&json!("awaiting_approval"), &json!("once")));
}

async fn servers_end_with_the_service(db: Db) {
    let seconds = if db == Db::Sqlite { "4441.5" } else { "4442.5" };
    let calls = [("mcp:odd/spawn", json!({"seconds": seconds}))];
    let setup = with(Setup::new().config(&server("odd", "")), "['mcp:odd/*']", FULL, &calls);
    let mut service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(results(&service, &run).await, ["spawned"]);
    until_alive(seconds, true).await;
    service.kill().await;
    until_alive(seconds, false).await;
    service.restart().await;
    until_up(&service).await;
    service.run("worker", &json!({})).await;
    until_alive(seconds, true).await;
    service.signal(crate::service::Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
    until_alive(seconds, false).await;
}

async fn a_server_may_be_down_and_come_back(db: Db) {
    let config = "[mcp.odd]\ncommand = \"./bin/server\"\n[mcp.odd.effects]\necho = \"read\"\n\
                  [mcp.keyless]\nurl = \"http://127.0.0.1:9/mcp\"\napi_key_env = \"NO_SUCH_KEY\"\n";
    let calls = [("mcp:odd/echo", json!({"n": 1})), ("mcp:odd/other", json!({}))];
    let setup = with(
        Setup::new().config(config),
        "['mcp:odd/echo', 'mcp:odd/other', 'mcp:keyless/*']",
        "{}",
        &calls,
    );
    let service = setup.start(db).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    for told in results(&service, &run).await {
        assert!(told.starts_with("Error: The MCP server odd is not available: "), "{told}");
        assert!(told.contains("not an executable file"), "{told}");
    }
    let ready = service.get("/readyz").await;
    assert_eq!((ready.status.as_u16(), &ready.body["status"]), (200, &json!("ready")));
    assert_eq!(ready.body["mcp_servers"].as_array().unwrap().len(), 2, "{:#}", ready.body);
    let tools = service.get("/v1/tools?limit=100").await.body;
    let of = |name: &str| {
        tools["data"].as_array().unwrap().iter().find(|it| it["name"] == name).unwrap().clone()
    };
    assert!(of("mcp:odd/echo")["unavailable"].as_str().unwrap().contains("odd is not available"));
    assert!(of("mcp:keyless/*")["unavailable"].as_str().unwrap().contains("NO_SUCH_KEY"));
    let doctor = command(service.dir.path())
        .args(["doctor", "--json", "--database-url", &service.database_url])
        .output()
        .await
        .unwrap();
    let doctor: Value = serde_json::from_slice(&doctor.stdout).unwrap();
    let checks = doctor["checks"].as_array().unwrap();
    let about = checks.iter().find(|check| check["check"] == "mcp odd").unwrap();
    assert_eq!(about["status"], "warn", "{about:#}");

    std::fs::create_dir(service.dir.path().join("bin")).unwrap();
    service.write("bin/new", &format!("#!/usr/bin/env python3\n{SERVER}"));
    let (new, place) = (service.dir.path().join("bin/new"), service.dir.path().join("bin/server"));
    std::fs::set_permissions(&new, std::fs::Permissions::from_mode(0o755)).unwrap();
    std::fs::rename(new, place).unwrap();
    service.until("/v1/tools/mcp%3Aodd%2Fecho", |tool| tool["unavailable"].is_null()).await;
    let run = service.run("worker", &json!({})).await;
    let told = results(&service, &run).await;
    assert!(told[0].contains("\"args\": {\"n\": 1}"), "{told:?}");
    assert!(told[1].contains("has no tool mcp:odd/other"), "{told:?}");
}

async fn globs_of_a_server_that_is_down_say_so(db: Db) {
    let config = "[mcp.odd]\ncommand = \"./bin/server\"\n";
    let calls = [("mcp:odd/echo", json!({"n": 1})), ("mcp:other/echo", json!({}))];
    let setup = with(Setup::new().config(config), "['mcp:odd/*', file_ops]", FULL, &calls)
        .agent("alone", "model: scripted/alone\ntools: ['mcp:odd/*']\n")
        .scenario("alone", "steps: [{text: done}]");
    let service = setup.start(db).await;
    let run = service.run("worker", &json!({})).await;
    let calls = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
    let calls = service.get(&calls).await.body;
    let first = &calls["data"][0];
    assert_eq!((&first["tool"], &first["is_error"]), (&json!("mcp:odd/echo"), &json!(true)));
    let result = first["result"].as_str().unwrap();
    assert!(result.starts_with("Error: The MCP server odd is not available: "), "{result}");
    let other = &calls["data"][1];
    assert_eq!(other["result"], "Error: Unknown tool mcp__other__echo");
    let alone = service.run("alone", &json!({})).await;
    let warning = alone["warnings"][0].as_str().unwrap();
    assert!(warning.contains("single model call"), "{warning}");
    assert!(warning.contains("The MCP server odd is not available: "), "{warning}");
}

#[tokio::test]
async fn check_reports_mistakes_of_mcp_sections() {
    let table = [
        ("[mcp.Odd]\ncommand = \"x\"", "mcp.Odd: a server's name does not match"),
        ("[mcp.a]\nargs = []", "mcp.a: needs command (a program) or url (an address)"),
        (
            "[mcp.a]\ncommand = \"x\"\nurl = \"http://a.example\"",
            "mcp.a.url: must not be set together with command",
        ),
        (
            "[mcp.a]\nurl = \"http://a.example\"\nenv = [\"A\"]",
            "mcp.a.env: must not be set together with url",
        ),
        (
            "[mcp.a]\nurl = \"http://a.example\"\nnetwork = [\"b\"]",
            "mcp.a.network: must not be set together with url",
        ),
        ("[mcp.a]\ncommand = \"x\"\nnetwork = [\"http://b\"]", "mcp.a.network: \"http://b\""),
        ("[mcp.a]\ncommand = \"x\"\nallow_private = [\"b\"]", "mcp.a.allow_private: \"b\""),
        ("[mcp.a]\nurl = \"ftp://a.example\"", "mcp.a.url: is neither http nor https"),
        ("[mcp.a]\ncommand = \"x\"\nenv = [\"TOOLLOOP_KEY\"]", "is the service's own"),
        ("[mcp.a]\ncommand = \"x\"\nenv = [\"A=b\"]", "is not the name of an environment variable"),
        ("[mcp.a]\ncommand = \"x\"\nreads = [\"/\"]", "mcp.a.reads: / is everything"),
        ("[mcp.a]\ncommand = \"x\"\n[mcp.a.effects]\nb = \"write\"", "mcp.a.effects.b"),
        ("[mcp.a]\ncommand = \"x\"\ntimeout = 1", "unknown key"),
    ];
    for (section, expected) in table {
        let dir = Setup::new().config(section).write_directory();
        let checked = command(dir.path()).arg("check").output().await.unwrap();
        let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
        assert!(!checked.status.success(), "{section}: {said}");
        assert!(said.contains(expected), "{section}: {said}");
    }
    let agent = "model: scripted/aa\ntools: ['mcp:tme/*']\n";
    let dir =
        Setup::new().config("[mcp.time]\ncommand = \"x\"").agent("aa", agent).write_directory();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    let said = String::from_utf8_lossy(&[checked.stdout, checked.stderr].concat()).into_owned();
    assert!(
        !checked.status.success() && said.contains("there is no tool named \"mcp:tme/*\""),
        "{said}"
    );
}
