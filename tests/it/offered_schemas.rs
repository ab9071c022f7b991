//! Schemas that are valid and that providers refuse: what is offered is what they take, and what is
//! called is checked against the whole schema, wherever the tool comes from.
//!
//! With other features: sessions, children, streaming and approvals see a tool by its name and are not
//! touched; a dry run and the list of tools show the whole schema (here).

use serde_json::{Value, json};
use tokio::sync::watch;

use crate::approvals::text;
use crate::mcp::server;
use crate::mock_model::{MockModel, Reply};
use crate::mock_server::{self, Api, MockServer};
use crate::service::{Db, Service, Setup, command, on_one_store};
use crate::{mock_anthropic, mock_ollama};

on_one_store! {
    every_provider_takes_what_is_offered,
    more_tools_than_a_provider_takes_are_refused,
}

const CHILD: &str = "
model: scripted/child
instructions: Work.
inputs: {type: [object, 'null'], properties: {task: {type: string}}, oneOf: [{required: [task]}, {required: [plan]}]}
enable_double_confirmation: false
";

const HTTP: &str = "base_url: http://127.0.0.1:9
tools:
  - name: find
    method: GET
    path: /x
    input_schema: {type: object, properties: {id: {type: string}}, allOf: [{required: [id]}]}
";

/// Of a server, by the tools that it has: none with a root that says that it is an object.
fn odd() -> String {
    let more = r##"more = {
        "echo": {"inputSchema": {}},
        "fail": {"description": "Fails with a reason. " * 100, "inputSchema": {"required": ["n"],
                 "properties": {"n": {"anyOf": [{"type": "null"}, {"type": "array"}]}}}},
        "slow": {"inputSchema": {"type": "string"}},
        "notes": {"inputSchema": {"type": "object", "anyOf": [{"required": ["n"]}, {"required": ["m"]}]}},
        "wait": {"inputSchema": {"$ref": "#/$defs/it", "$defs": {"it": {"properties": {"n": {}, "user name": {"type": "string"}}}}}}}"##;
    let written = r#"more = {"structured": {"outputSchema": kind}}"#;
    let config = server("odd", "[mcp.odd.effects]\nnotes = \"read\"");
    assert!(config.contains(written));
    config.replace(written, more)
}

fn client_tool() -> Value {
    json!({"name": "ask_user", "description": "Asks the user.", "effect": "read", "input_schema":
        {"type": "object", "properties": {"id": {"type": "string"}, "name": {"type": "string"}},
         "anyOf": [{"required": ["id"]}, {"required": ["name"]}]}})
}

async fn served(db: Db, kind: &str, model: &str, url: &str) -> Service {
    let agent = format!(
        "
model: mock/{model}
instructions: Work.
tools: ['mcp:odd/*', 'agent:child', 'http:own/*', file_ops]
output: {{schema: {{type: object, properties: {{a: {{type: string}}}}, anyOf: [{{required: [a]}}, {{required: [b]}}]}}}}
limits: {{error_threshold: 20}}
governance: {{autonomy: full}}
"
    );
    let models = format!(
        "[models.mock]\nkind = \"{kind}\"\nbase_url = \"{url}\"\nheaders = {{ x-api-key = \"k\" }}\n{}",
        odd()
    );
    let service = Setup::new()
        .agent("worker", &agent)
        .agent("child", CHILD)
        .scenario("child", "steps: [{text: done}]")
        .tools("own", HTTP)
        .config(&models)
        .start(db)
        .await;
    service.until("/readyz", |ready| ready["mcp_servers"] == json!([])).await;
    service
}

/// The name and the description of each tool, as they were sent.
fn offered(request: &Value) -> Vec<(&str, &str)> {
    let tools = request["tools"].as_array().unwrap().iter();
    tools
        .map(|tool| if tool["function"].is_object() { &tool["function"] } else { tool })
        .map(|tool| (text(tool, "name"), text(tool, "description")))
        .collect()
}

async fn every_provider_takes_what_is_offered(db: Db) {
    const APIS: [(&str, &str, Option<Api>); 4] = [
        ("openai", "gpt-4.1-mini", None),
        ("openai-responses", "gpt-5.2", None),
        ("anthropic", "claude-sonnet-4-5", Some(mock_anthropic::API)),
        ("ollama", "qwen3:4b", Some(mock_ollama::API)),
    ];
    let calls = [
        ("mcp__odd__notes", json!({})),
        ("agent__child", json!({})),
        ("http__own__find", json!({})),
        ("output", json!({})),
        ("output", json!({"b": 1})),
    ];
    for (kind, model, api) in APIS {
        let (own, other) = match api {
            None => {
                let mock = MockModel::start().await;
                mock.script(calls.iter().map(|(tool, given)| Reply::call(tool, given)));
                (Some(mock), None)
            }
            Some(api) => {
                let script =
                    calls.iter().map(|(tool, given)| mock_server::Reply::call(tool, given.clone()));
                (None, Some(MockServer::start(api, script).await))
            }
        };
        let url = own.as_ref().map(|mock| mock.base_url().to_owned());
        let url = url.or(other.as_ref().map(|mock| mock.base_url.clone())).unwrap();
        let service = served(db, kind, model, &url).await;
        let run = service.run("worker", &json!({"client_tools": [client_tool()]})).await;
        assert_eq!(run["output"], json!({"b": 1}), "{kind}: {run:#}");

        let requests = match (&own, &other) {
            (Some(mock), _) => {
                assert_eq!(mock.refusals(), Vec::<String>::new(), "{kind}");
                mock.requests().into_iter().map(|seen| seen.body).collect()
            }
            (_, Some(mock)) => mock.requests(),
            _ => unreachable!(),
        };
        assert!(
            requests.iter().all(|request| request["tools"] == requests[0]["tools"]),
            "{kind}: the same bytes in every request"
        );
        let offered = offered(&requests[0]);
        for (tool, words) in [
            ("mcp__odd__echo", "Does echo."),
            ("mcp__odd__notes", "At least one of these holds: has \"n\"; has \"m\"."),
            ("agent__child", "Exactly one of these holds: has \"task\"; has \"plan\"."),
            ("ask_user", "At least one of these holds: has \"id\"; has \"name\"."),
            ("output", "At least one of these holds: has \"a\"; has \"b\"."),
        ] {
            let found = offered.iter().find(|(name, _)| *name == tool);
            let (_, description) = found.unwrap_or_else(|| panic!("{kind} {tool}: {offered:#?}"));
            assert!(description.ends_with(words), "{kind} {tool}: {description}");
        }
        assert!(offered.iter().all(|(name, _)| *name != "mcp__odd__slow"), "{offered:#?}");
        assert_eq!(json!(offered).to_string().contains("user name"), kind == "anthropic", "{kind}");
        let (_, long) = offered.iter().find(|(name, _)| *name == "mcp__odd__fail").unwrap();
        if kind.starts_with("openai") {
            assert!(long.chars().count() <= 1024 && long.ends_with("a reason. …"), "{long}");
        } else {
            assert_eq!(long.trim_end().len(), 2099, "{kind}: {long}");
        }
        service.until_logged("the tool slow is left out: its input schema").await;

        let path = format!("/v1/runs/{}/tool-calls", text(&run, "run_id"));
        let rows = service.get(&path).await.body;
        for (row, tool) in ["mcp:odd/notes", "agent:child", "http:own/find"].iter().enumerate() {
            let row = &rows["data"][row];
            assert_eq!((&row["tool"], &row["is_error"]), (&json!(tool), &json!(true)), "{rows:#}");
            assert!(text(row, "result").contains("do not match the tool's schema"), "{row:#}");
        }
        let listed = service.get("/v1/tools/mcp%3Aodd%2Fnotes").await.body;
        assert!(listed["input_schema"]["anyOf"].is_array(), "the whole schema: {listed:#}");
    }
}

/// So many tools of the request's, each with a list.
fn client_tools(count: usize) -> Value {
    let schema = json!({"type": "object", "properties": {"a": {"type": "array"}}});
    let named = |number| json!({"name": format!("t{number}"), "input_schema": schema});
    (0..count).map(named).collect()
}

async fn more_tools_than_a_provider_takes_are_refused(db: Db) {
    let (gpt, claude) = (
        MockModel::start().await,
        MockServer::start(mock_anthropic::API, [mock_server::Reply::text("done")]).await,
    );
    gpt.always(Reply::text("done"));
    let models = format!(
        "[models.gpt]\nkind = \"openai\"\nbase_url = \"{}\"\n\
         [models.claude]\nkind = \"anthropic\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\n\
         [capabilities.\"gpt/large\"]\nmax_tools = 1000\n[runtime]\nqueue_workers = 1\n{}",
        gpt.base_url(),
        claude.base_url,
        server("odd", "[mcp.odd.effects]\nchange = \"read\"")
    );
    let agent = |model: &str, tools: &str| {
        format!(
            "\nmodel: {model}\ninstructions: Work.\ntools: [{tools}]\n\
             enable_double_confirmation: false\ngovernance: {{autonomy: full}}\n"
        )
    };
    let service = Setup::new()
        .agent("gpt", &agent("gpt/gpt-4.1-mini", "file_ops"))
        .agent("large", &agent("gpt/large", "file_ops"))
        .agent("claude", &agent("claude/claude-sonnet-4-5", "file_ops"))
        .agent("mcp", &agent("gpt/gpt-4.1-mini", "'mcp:odd/*', file_ops"))
        .config(&models)
        .start(db)
        .await;
    service.until("/readyz", |ready| ready["mcp_servers"] == json!([])).await;
    let run = service.run("gpt", &json!({"client_tools": client_tools(127)})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let seen = gpt.requests().len();
    let path = "/v1/agents/gpt/invoke-iterative";
    let refused = service.post(path, &json!({"client_tools": client_tools(128)})).await;
    assert_eq!((refused.status.as_u16(), &refused.body["code"]), (422, &json!("INVALID_OVERRIDE")));
    let error = &refused.body["errors"][0];
    assert_eq!(error["pointer"], "/client_tools", "{:#}", refused.body);
    let why = "129 tools are offered, those of the agent and of the request together, and \
               gpt/gpt-4.1-mini takes at most 128";
    assert_eq!(error["message"], why);
    assert_eq!(gpt.requests().len(), seen, "no model is asked");
    for agent in ["claude", "large"] {
        let many = json!({"client_tools": client_tools(if agent == "large" { 100 } else { 128 })});
        let run = service.run(agent, &many).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }

    // What a server has is known when the run begins: it waits in the queue behind another one.
    let (go_on, held) = watch::channel(false);
    gpt.script([Reply::Held(held, Box::new(Reply::text("done")))]);
    let seen = gpt.requests().len();
    service.enqueue("gpt").await;
    gpt.wait_for_requests(seen + 1).await;
    let request = service.request(reqwest::Method::POST, "/v1/agents/mcp/invoke-iterative");
    let request = request.header("prefer", "respond-async").json(&json!({}));
    let queued = crate::service::answer(request).await;
    assert_eq!(queued.status, 202, "{:#}", queued.body);
    let tools: Vec<Value> = (0..128)
        .map(|number| json!({"name": format!("t{number}"), "description": "Does it.", "inputSchema": {"type": "object"}}))
        .collect();
    let call = json!({"tool": "mcp:odd/change", "arguments": {"tools": tools}});
    let changed = service.post("/v1/agents/mcp/call", &call).await;
    assert_eq!(changed.body["status"], "completed", "{:#}", changed.body);
    let is_there = |listed: &Value| {
        listed["data"].as_array().unwrap().iter().any(|tool| tool["name"] == "mcp:odd/t127")
    };
    service.until("/v1/tools?limit=1000", is_there).await;
    go_on.send_replace(true);
    let run = format!("/v1/runs/{}", text(&queued.body, "run_id"));
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "failed", "{ended:#}");
    let message = ended["error"]["message"].as_str().unwrap();
    let why = "129 tools are offered, and gpt-4.1-mini takes at most 128";
    assert!(message.contains(why), "{message}");
    assert_eq!(gpt.refusals(), Vec::<String>::new());
}

#[tokio::test]
async fn inputs_that_can_never_be_objects_do_not_load() {
    let dir = tempfile::TempDir::new().unwrap();
    std::fs::create_dir(dir.path().join("agents")).unwrap();
    let never = CHILD.replace("[object, 'null']", "array");
    std::fs::write(dir.path().join("agents/child.yaml"), format!("name: child{never}")).unwrap();
    let checked = command(dir.path()).arg("check").output().await.unwrap();
    let said = [checked.stdout, checked.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(!checked.status.success(), "{said}");
    assert!(said.contains("inputs") && said.contains("must allow `type: object`"), "{said}");
}
