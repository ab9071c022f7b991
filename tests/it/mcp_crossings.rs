//! Tools of MCP servers together with children and handoffs, other tenants, limits and labels by tool,
//! policy cases and replay of policies, and a cancel in the middle of a call. Through the HTTP API; on both stores
//! where one is touched in a way of its own.

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::paths;
use crate::mcp::{directory, results, server, until_up};
use crate::postgres_cluster;
use crate::script_tools::events;
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    mcp_tools_hold_for_children_tenants_and_rules,
}

const EFFECTS: &str = "[mcp.odd.effects]\necho = \"once\"\nwait = \"once\"\nstructured = \"read\"";

fn agent(tools: &str, more: &str) -> String {
    format!(
        "tools: {tools}\nenable_double_confirmation: false\nlimits: {{error_threshold: 50}}\n{more}\n"
    )
}

/// An agent that makes these calls, one a turn.
fn with(setup: Setup, name: &str, definition: &str, calls: &[(&str, Value)]) -> Setup {
    let call = |(tool, arguments): &(&str, Value)| {
        json!({"tool_calls": [{"tool": tool, "arguments": arguments}]}).to_string()
    };
    let steps: Vec<String> = calls.iter().map(call).collect();
    setup
        .agent(name, &format!("model: scripted/{name}\n{definition}"))
        .scenario(name, &format!("steps: [{}, {{text: done}}]", steps.join(", ")))
}

async fn labels(service: &Service, run: &Value) -> Value {
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["labels"].clone()
}

fn pid(result: &str) -> Value {
    serde_json::from_str::<Value>(result).unwrap_or_else(|_| panic!("{result}"))["pid"].clone()
}

async fn mcp_tools_hold_for_children_tenants_and_rules(db: Db) {
    const FULL: &str = "governance: {autonomy: full}";
    let echo = ("mcp:odd/echo", json!({"n": 1}));
    let setup = Setup::new().config(&server("odd", EFFECTS));
    let setup = with(setup, "child", &agent("['mcp:odd/echo']", FULL), std::slice::from_ref(&echo));
    let parent = agent("['agent:child']", FULL);
    let setup = with(setup, "parent", &parent, &[("agent:child", json!({}))]);
    let first = agent("[transfer_to_child]", FULL);
    let setup = with(setup, "first", &first, &[("transfer_to_child", json!({}))]);
    let limited = "tool_options: {'mcp:odd/echo': {rate_limit_per_minute: 1, yields: [none]}}";
    let limited = agent("['mcp:odd/echo']", &format!("{limited}\n{FULL}"));
    let setup = with(setup, "limited", &limited, &[echo.clone(), echo.clone()]);
    let setup =
        with(setup, "waits", &agent("['mcp:odd/wait']", FULL), &[("mcp:odd/wait", json!({}))]);
    let answers = [json!({"value": {"n": 1}}), json!({"value": {"n": "x"}}), json!({})];
    let answers = answers.map(|arguments| ("mcp:odd/structured", arguments));
    let setup = with(setup, "checked", &agent("['mcp:odd/structured']", FULL), &answers);
    let setup = with(setup, "asks", &agent("['mcp:odd/*']", ""), &[]);
    let service = setup.start(db).await;
    until_up(&service).await;

    // Children and handoffs.
    let run = service.run("child", &json!({})).await;
    let server_is = pid(&results(&service, &run).await[0]);
    for caller in ["parent", "first"] {
        let run = service.run(caller, &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        assert_eq!(labels(&service, &run).await, json!(["untrusted"]), "{caller}");
        let child = service.get("/v1/runs?agent=child").await.body["data"][0].clone();
        assert_eq!(pid(&results(&service, &child).await[0]), server_is, "{caller}: one server");
        assert_eq!(events(&service, &child, "tool_call.started").await[0]["sandbox"], "enforced");
    }
    // Options by the tool's name.
    let run = service.run("limited", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert_eq!((blocked.len(), &blocked[0]["rule"]), (1, &json!("rate_limit")), "{blocked:#?}");
    assert_eq!(results(&service, &run).await.len(), 1);
    assert_eq!(labels(&service, &run).await, json!([]), "yields");
    // What a server says of its answers.
    let run = service.run("checked", &json!({})).await;
    let told = results(&service, &run).await;
    assert_eq!(told[0], "here");
    for (told, why) in
        [(&told[1], "/n: \"x\" is not of type \"integer\""), (&told[2], "no structuredContent")]
    {
        assert!(
            told.starts_with("Error: The MCP server odd answered, but not as the output schema"),
            "{told}"
        );
        assert!(told.contains(why), "{told}");
    }
    // Beforehand and afterwards.
    let judged = json!({"tool": "mcp:odd/fail", "arguments": {}});
    let judged = service.post("/v1/agents/asks/policy/judge", &judged).await.body;
    assert_eq!(
        (&judged["decision"], &judged["rule"]),
        (&json!("escalated"), &json!("autonomy")),
        "{judged:#}"
    );
    let stricter =
        agent("['mcp:odd/echo']", "governance: {autonomy: full, tool_policies: {'mcp:*': deny}}");
    let stricter = json!({"definition": format!("name: child\nmodel: scripted/child\n{stricter}")});
    let replay = service.post("/v1/agents/child/policy/replay", &stricter).await.body;
    assert_eq!(
        (&replay["calls"], &replay["newly"]["blocked"]),
        (&json!(3), &json!(3)),
        "{replay:#}"
    );
    let same = service.post("/v1/agents/child/policy/replay", &json!({})).await.body;
    assert_eq!(same["unchanged"], 3, "{same:#}");
    let dry = service.post("/v1/agents/child/dry-run", &json!({})).await.body;
    assert_eq!(dry["tools"][0]["name"], "mcp:odd/echo", "{dry:#}");
    // Another tenant has the same server, and nothing of these runs.
    let scopes = ["agents:invoke", "runs:read", "tools:execute", "tools:read", "audit:read"];
    let key = json!({"name": "n", "scopes": scopes, "tenant": "other"});
    let key = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
    let asked = async |method: Method, path: &str| {
        let request = service.http.request(method, service.url(path)).bearer_auth(&key);
        answer(request.json(&json!({}))).await.body
    };
    let run = asked(Method::POST, "/v1/agents/child/invoke-iterative").await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let audit = asked(Method::GET, "/v1/audit?limit=100").await;
    let of_tool = |record: &&Value| record["tool"] == "mcp:odd/echo";
    let own: Vec<_> = audit["data"].as_array().unwrap().iter().filter(of_tool).collect();
    assert!(own.len() == 1 && own[0]["run_id"] == run["run_id"], "{audit:#}");
    assert_eq!(asked(Method::GET, "/v1/tools/mcp%3Aodd%2Fecho").await["allowed"], true);
    // A cancel in the middle ends the call and not the server.
    let path = service.enqueue("waits").await;
    let place = service.dir.path().join("workspace/.mcp/odd");
    let waits = until_there(&place.join("waiting.txt")).await;
    service.post(&format!("{path}/cancel"), &json!({})).await;
    service.until(&path, |run| run["status"] == "cancelled").await;
    let heard = until_there(&place.join("cancelled.txt")).await;
    let heard: Value = serde_json::from_str(&heard).unwrap();
    assert_eq!(heard["params"]["requestId"].to_string(), waits, "{heard:#}");
    let run = service.run("child", &json!({})).await;
    assert_eq!(
        pid(&results(&service, &run).await[0]),
        server_is,
        "its late answer is not taken for this one"
    );
}

/// The content of a file, once it has one.
async fn until_there(path: &std::path::Path) -> String {
    for _ in 0..6000 {
        match std::fs::read_to_string(path) {
            Ok(text) if text.ends_with('\n') => return text.trim().to_owned(),
            _ => tokio::time::sleep(std::time::Duration::from_millis(10)).await,
        }
    }
    panic!("{} is not there", path.display());
}

#[tokio::test]
async fn a_call_is_made_on_the_replica_that_approves_it() {
    let setup = || {
        let calls = [("mcp:odd/echo", json!({"n": 7}))];
        with(Setup::new().config(&server("odd", "")), "asks", &agent("['mcp:odd/*']", ""), &calls)
    };
    let url = postgres_cluster::fresh_database().await;
    let mut first = setup().start_on(url.clone()).await;
    until_up(&first).await;
    let run = first.enqueue("asks").await;
    let parked = first.until(&run, |run| run["status"] == "awaiting_approval").await;
    let second = setup().start_on(url).await;
    until_up(&second).await;
    first.kill().await;
    let (_, calls) = paths(&parked);
    let approved = second.post(&format!("{}/approve", calls[0]), &json!({})).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
    let run = second.until(&run, |run| run["status"] == "completed").await;
    assert!(results(&second, &run).await[0].contains(r#""args": {"n": 7}"#), "{run:#}");
    let made =
        |service: &Service| std::fs::read_to_string(directory(service, "odd").join("calls.txt"));
    assert_eq!(made(&second).unwrap(), "echo\n", "once");
    assert!(made(&first).is_err(), "the replica that asked has not called it");
    assert_eq!(run["tool_calls_made"], 1);
}

#[tokio::test]
async fn a_failed_call_may_have_done_what_its_server_declares_by_now() {
    const FULL: &str = "governance: {autonomy: full}";
    let servers = [server("odd", "[mcp.odd.effects]\ninternal = \"read\""), server("gate", "")];
    let tool = |name: &str| {
        json!({"name": name, "description": "New.", "inputSchema": {"type": "object"},
            "annotations": {"destructiveHint": true}})
    };
    let tools = json!({"tools": [tool("internal"), tool("change")]});
    let calls = [("mcp:gate/wait", json!({})), ("mcp:odd/internal", json!({}))];
    let setup = Setup::new().config(&servers.concat());
    let setup = with(setup, "waits", &agent("['mcp:*/*']", FULL), &calls);
    let changes = [("mcp:odd/change", tools)];
    let setup = with(setup, "changes", &agent("['mcp:odd/*']", FULL), &changes);
    let releases = [("mcp:gate/echo", json!({}))];
    let setup = with(setup, "releases", &agent("['mcp:gate/*']", FULL), &releases);
    let service = setup.start(Db::Sqlite).await;
    until_up(&service).await;
    let path = service.enqueue("waits").await;
    until_there(&directory(&service, "gate").join("waiting.txt")).await;
    service.run("changes", &json!({})).await;
    service.until("/v1/tools/mcp%3Aodd%2Finternal", |tool| tool["description"] == "New.").await;
    service.enqueue("releases").await;
    let run = service.until(&path, |run| run["status"] == "completed").await;
    let told = results(&service, &run).await.remove(1);
    assert!(told.contains("did not complete the call"), "{told}");
    assert!(told.contains("It is unknown whether the call took effect."), "{told}");
}
