//! What the gate says of a call beyond its arguments: how many calls there were in this minute,
//! which scopes the caller has, whether the policy is only observed, and what it means for tools
//! that the caller executes.
//!
//! With other features: children (the same caller's bucket; a child is observed only where its parent is),
//! parked runs (a call takes its token when it is executed or refused, not when a person is asked; one
//! of the caller's tools when the caller is asked), sessions
//! and skills (as everywhere, nothing of their own), cancel (a refused call is never under way),
//! crash (a call that is executed again takes another token), another replica (the bucket is the
//! store's), streaming (`tool_call.blocked`), tenants (a key has one), budgets (a refused call
//! counts as a call), dry run (calls nothing), console and command line (show a blocked call).

use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text};
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_key_makes_so_many_calls_and_no_more,
    a_tool_can_have_a_limit_of_its_own,
    a_refused_call_takes_of_the_bucket,
    calls_of_a_callers_tool_take_of_the_bucket,
    a_denied_call_keeps_its_actions_and_labels,
    replicas_share_the_bucket_of_calls,
    a_scope_can_name_many_tools,
    a_policy_that_is_only_observed_warns,
    a_child_only_observes_where_its_parent_does,
    calls_that_the_caller_executes_are_judged_and_audited,
    effects_that_callers_declare_are_judged,
    edited_arguments_of_a_callers_tool_are_judged_again,
}

const LISTER: &str = "
model: scripted/lister
instructions: List.
tools: [file_ops]
enable_double_confirmation: false
limits: {error_threshold: 100, max_tool_calls_per_iteration: 20}
";

fn lists(count: usize) -> String {
    let call = |n| format!("{{tool: file_ops, arguments: {{operation: glob, pattern: n{n}}}}}");
    let calls: Vec<String> = (0..count).map(call).collect();
    format!("steps:\n  - tool_calls: [{}]\n  - text: done\n", calls.join(", "))
}

fn limits(per_minute: u32, burst: u32) -> String {
    format!("[governance]\nrate_limit_per_minute = {per_minute}\nrate_limit_burst = {burst}")
}

/// How many calls of a run were executed, and the reasons of the others.
async fn calls_of(service: &Service, run: &Value) -> (usize, Vec<String>) {
    let path = format!("/v1/runs/{}/events", text(run, "run_id"));
    let events = service.get(&path).await.body;
    let events = events["data"].as_array().unwrap();
    let of = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let blocked = of("tool_call.blocked").map(|event| {
        assert_eq!(event["data"]["rule"], "rate_limit", "{event:#}");
        assert_eq!(event["data"]["actions"][0]["kind"], "read", "{event:#}");
        text(&event["data"], "reason").to_owned()
    });
    (of("tool_call.started").count(), blocked.collect())
}

async fn a_key_makes_so_many_calls_and_no_more(db: Db) {
    let service = Setup::new()
        .agent("lister", LISTER)
        .scenario("lister", &lists(6))
        .config(&limits(1, 4))
        .start(db)
        .await;
    let run = service.run("lister", &json!({})).await;
    let (executed, refused) = calls_of(&service, &run).await;
    assert_eq!((executed, refused.len()), (4, 2), "{refused:?}");
    assert!(
        refused[0].starts_with("Blocked by the rate_limit rule: the limit of 1 calls of tools per minute (4 at once) is reached; retry in "),
        "{refused:?}"
    );
    let audit = service.get("/v1/audit?outcome=blocked").await.body;
    assert_eq!(audit["data"][0]["rule"], "rate_limit", "{audit:#}");
    // The bucket of invocations is another one: one of four is gone.
    assert_eq!(service.run("lister", &json!({})).await["status"], "completed");
}

async fn a_tool_can_have_a_limit_of_its_own(db: Db) {
    let limited = format!("{LISTER}tool_options: {{'file_*': {{rate_limit_per_minute: 3}}}}\n");
    let service =
        Setup::new().agent("lister", &limited).scenario("lister", &lists(2)).start(db).await;
    let first = service.run("lister", &json!({})).await;
    assert_eq!(calls_of(&service, &first).await.0, 2);
    let second = service.run("lister", &json!({})).await;
    let (executed, refused) = calls_of(&service, &second).await;
    assert_eq!((executed, refused.len()), (1, 1));
    assert!(
        refused[0].contains("the limit of 3 calls of file_ops per minute is reached"),
        "{refused:?}"
    );
}

async fn events_of(service: &Service, run: &str, kind: &str) -> Vec<Value> {
    let events = service.get(&format!("{run}/events")).await.body;
    let all = events["data"].as_array().unwrap().iter();
    all.filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
}

async fn a_refused_call_takes_of_the_bucket(db: Db) {
    let denied = "{tool: file_ops, arguments: {operation: read, path: secret}}";
    let steps = format!("steps:\n  - tool_calls: [{denied}, {denied}]\n").to_owned()
        + lists(2).strip_prefix("steps:\n").unwrap();
    let service = Setup::new()
        .agent("lister", &format!("{LISTER}governance: {{paths: {{deny: [secret]}}}}\n"))
        .scenario("lister", &steps)
        .config(&limits(1, 3))
        .start(db)
        .await;
    let run = service.run("lister", &json!({})).await;
    let run = format!("/v1/runs/{}", text(&run, "run_id"));
    let blocked = events_of(&service, &run, "tool_call.blocked").await;
    let rules: Vec<&Value> = blocked.iter().map(|call| &call["rule"]).collect();
    assert_eq!(rules, ["path", "path", "rate_limit"], "{blocked:#?}");
    let left: Vec<&Value> =
        blocked.iter().map(|call| &call["circumstances"]["rate"]["remaining"]).collect();
    assert_eq!(left, [&json!(2), &json!(1), &json!(0)], "{blocked:#?}");
    assert_eq!(events_of(&service, &run, "tool_call.started").await.len(), 1);
}

async fn calls_of_a_callers_tool_take_of_the_bucket(db: Db) {
    let steps = "
steps:
  - tool_calls: [{tool: look, arguments: {}}, {tool: look, arguments: {n: 1}}, {tool: look, arguments: {n: 2}}]
  - text: '{{ results[2] }}'
";
    let look = json!({"name": "look", "description": "Looks.", "effect": "read", "input_schema": {"type": "object"}});
    let own = format!("{LISTER}tool_options: {{'*': {{rate_limit_per_minute: 2}}}}\n");
    for (agent, config) in [(LISTER, limits(1, 2)), (own.as_str(), limits(100, 100))] {
        let service = Setup::new()
            .agent("lister", agent)
            .scenario("lister", steps)
            .config(&config)
            .start(db)
            .await;
        let parked = service
            .post("/v1/agents/lister/invoke-iterative", &json!({"client_tools": [look]}))
            .await;
        assert_eq!(parked.status, 202, "{:#}", parked.body);
        let (run, calls) = paths(&parked.body);
        assert_eq!(calls.len(), 2, "{:#}", parked.body);
        let awaited = events_of(&service, &run, "tool_call.awaiting_client").await;
        let left: Vec<&Value> =
            awaited.iter().map(|call| &call["circumstances"]["rate"]["remaining"]).collect();
        assert_eq!(left, [&json!(1), &json!(0)], "{awaited:#?}");
        for call in calls {
            let result = json!({"content": "seen"});
            assert_eq!(service.post(&format!("{call}/result"), &result).await.status, 200);
        }
        let done = ended(&service, &run).await;
        assert!(text(&done["output"], "result").contains("rate_limit"), "{done:#}");
        let audit = service.get("/v1/audit?outcome=blocked").await.body;
        assert_eq!(audit["data"][0]["rule"], "rate_limit", "{audit:#}");
    }
}

async fn a_denied_call_keeps_its_actions_and_labels(db: Db) {
    let agent = format!(
        "{LISTER}governance: {{tool_policies: {{file_ops: ask}}}}\ninputs: {{type: object, x-yields: [untrusted]}}\n"
    );
    let service =
        Setup::new().agent("lister", &agent).scenario("lister", &lists(1)).start(db).await;
    let parked = service.post("/v1/agents/lister/invoke-iterative", &json!({})).await.body;
    let (run, calls) = paths(&parked);
    let asked = events_of(&service, &run, "approval.requested").await;
    assert_eq!(service.post(&format!("{}/deny", calls[0]), &json!({})).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    let denied = events_of(&service, &run, "tool_call.blocked").await;
    for call in [&asked[0], &denied[0]] {
        assert_eq!(call["actions"][0]["kind"], "read", "{call:#}");
        assert_eq!(call["circumstances"]["labels"], json!(["untrusted"]), "{call:#}");
    }
    let audit = service.get("/v1/audit?rule=approval").await.body;
    assert_eq!(audit["data"][0]["labels"], json!(["untrusted"]), "{audit:#}");
}

async fn replicas_share_the_bucket_of_calls(db: Db) {
    if db != Db::Postgres {
        return;
    }
    let setup =
        Setup::new().agent("lister", LISTER).scenario("lister", &lists(20)).config(&limits(1, 20));
    let first = setup.start(db).await;
    let mut second = Setup::new()
        .agent("lister", LISTER)
        .scenario("lister", &lists(20))
        .config(&limits(1, 20))
        .start_on(first.database_url.clone())
        .await;
    second.key.clone_from(&first.key);
    let nothing = json!({});
    let (one, other) = tokio::join!(first.run("lister", &nothing), second.run("lister", &nothing));
    let executed = calls_of(&first, &one).await.0 + calls_of(&first, &other).await.0;
    assert_eq!(executed, 20);
}

async fn new_key(service: &Service, key: &str, scopes: &[&str]) -> (u16, String) {
    let asked = json!({"name": "n", "scopes": scopes});
    let request = service.http.post(service.url("/v1/keys")).bearer_auth(key).json(&asked);
    let made = answer(request).await;
    (made.status.as_u16(), made.body["key"].as_str().unwrap_or_default().to_owned())
}

async fn a_scope_can_name_many_tools(db: Db) {
    let mut service =
        Setup::new().agent("lister", LISTER).scenario("lister", &lists(1)).start(db).await;
    let admin = service.key.clone();
    let scopes = |tools: &'static str| ["agents:invoke", "runs:read", "tools:read", tools];
    for (tools, runs) in [("tools:file_*", true), ("tools:*", true), ("tools:mcp:*", false)] {
        let (_, key) = new_key(&service, &admin, &scopes(tools)).await;
        service.key = key;
        let path = "/v1/agents/lister/invoke-iterative";
        let answer = service.post(path, &json!({})).await;
        assert_eq!(answer.status, if runs { 200 } else { 403 }, "{tools}: {:#}", answer.body);
        let tool = service.get("/v1/tools/file_ops").await.body;
        assert_eq!(tool["allowed"], runs, "{tools}: {tool:#}");
    }
    // Who may make keys hands on no more tools than its own names cover.
    let maker = ["keys:admin", "tools:mcp:time/*"];
    let (made, maker) = new_key(&service, &admin, &maker).await;
    assert_eq!(made, 201);
    let table = [
        ("tools:mcp:time/now", 201),
        ("tools:mcp:time/*", 201),
        ("tools:mcp:time/n*", 201),
        ("tools:mcp:*", 403),
        ("tools:*", 403),
        ("tools:execute", 403),
        ("tools:file_ops", 403),
    ];
    for (scope, status) in table {
        assert_eq!(new_key(&service, &maker, &[scope]).await.0, status, "{scope}");
    }
}

const OBSERVED: &str = "
model: scripted/writer
instructions: Write.
tools: [file_ops]
enable_double_confirmation: false
governance:
  mode: observe
  autonomy: read-only
  tool_policies: {file_ops: ask}
  paths: {write: ['out/**']}
";

const WRITES: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: "a\n"}}]
  - text: '{{ results[0] }}'
"#;

async fn a_policy_that_is_only_observed_warns(db: Db) {
    let mut service =
        Setup::new().agent("writer", OBSERVED).scenario("writer", WRITES).start(db).await;
    let run = service.run("writer", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    assert_eq!(file(&service, "a.txt"), "a\n");
    let calls = format!("/v1/runs/{}/tool-calls", text(&run, "run_id"));
    let call = service.get(&calls).await.body["data"][0].clone();
    assert_eq!((&call["decision"], &call["state"]), (&json!("warned"), &json!("succeeded")));
    // The strictest of those that object, and not the first.
    let reason = "The autonomy rule would block this call: this agent is read-only and may not write, move or delete \"a.txt\".";
    assert_eq!(call["reason"], reason);
    let audit = service.get("/v1/audit?limit=1").await.body["data"][0].clone();
    assert_eq!((&audit["decision"], &audit["rule"]), (&json!("warned"), &json!("autonomy")));
    assert_eq!(service.get("/v1/agents/writer").await.body["governance"]["mode"], "observe");

    // What the caller's scopes do not allow is not the definition's to relax.
    let admin = service.key.clone();
    service.key = new_key(&service, &admin, &["agents:invoke", "runs:read"]).await.1;
    let refused = service.post("/v1/agents/writer/invoke-iterative", &json!({})).await;
    assert_eq!(refused.status, 403, "{:#}", refused.body);
}

async fn a_child_only_observes_where_its_parent_does(db: Db) {
    let asks = "steps:\n  - tool_calls: [{tool: 'agent:writer', arguments: {}}]\n  - text: '{{ results[0] }}'\n";
    let parent = |mode: &str| {
        format!(
            "model: scripted/parent\ninstructions: Ask.\ntools: ['agent:writer']\n\
             enable_double_confirmation: false\ngovernance: {{autonomy: full, mode: {mode}}}\n"
        )
    };
    let service = Setup::new()
        .agent("writer", OBSERVED)
        .scenario("writer", WRITES)
        .agent("strict", &parent("enforce"))
        .agent("lenient", &parent("observe"))
        .scenario("parent", asks)
        .start(db)
        .await;
    service.run("strict", &json!({})).await;
    assert_eq!(file(&service, "a.txt"), "");
    service.run("lenient", &json!({})).await;
    assert_eq!(file(&service, "a.txt"), "a\n");
}

fn ask_user() -> Value {
    json!({"name": "ask_user", "description": "Asks the user.", "effect": "read", "input_schema":
        {"type": "object", "required": ["question"], "properties": {"question": {"type": "string"}}}})
}

const ASKS: &str = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {question: why?}}]
  - text: '{{ results[0] }}'
";

fn asker(policy: &str) -> Setup {
    let agent = format!(
        "model: scripted/asker\ninstructions: Ask.\nenable_double_confirmation: false\n\
         governance: {{autonomy: read-only, tool_policies: {{ask_user: {policy}}}}}\n"
    );
    Setup::new().agent("asker", &agent).scenario("asker", ASKS)
}

async fn start(service: &Service) -> Value {
    let body = json!({"client_tools": [ask_user()]});
    service.post("/v1/agents/asker/invoke-iterative", &body).await.body
}

async fn calls_that_the_caller_executes_are_judged_and_audited(db: Db) {
    let service = asker("deny").start(db).await;
    let run = start(&service).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let told = text(&run["output"], "result");
    assert!(told.contains("Blocked by the tool_policy rule"), "{told}");

    let mut service = asker("ask").start(db).await;
    let asked = start(&service).await;
    assert_eq!(asked["pending"][0]["kind"], "approval", "{asked:#}");
    let (run, calls) = paths(&asked);
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    service.until(&run, |run| run["pending"][0]["kind"] == "client").await;
    // A crash in between forgets neither the approval nor the question.
    service.kill().await;
    service.restart().await;
    let given = service.post(&format!("{}/result", calls[0]), &json!({"content": "because"})).await;
    assert_eq!(given.status, 200, "{:#}", given.body);
    let done = ended(&service, &run).await;
    assert_eq!(done["output"], json!({"result": "because"}), "{done:#}");
    let id = text(&done, "run_id");
    let audit = service.get(&format!("/v1/audit?run_id={id}")).await.body;
    let records = audit["data"].as_array().unwrap().iter().rev();
    let told: Vec<_> =
        records.map(|r| [text(r, "rule"), text(r, "decision"), text(r, "outcome")]).collect();
    assert_eq!(
        told,
        [
            ["tool_policy", "escalated", "not_executed"],
            ["approval", "allowed", "not_executed"],
            ["tool_policy", "escalated", "not_executed"],
            ["client", "allowed", "succeeded"],
        ]
    );
}

/// What a tool of the caller does is what the caller declares.
async fn effects_that_callers_declare_are_judged(db: Db) {
    let agent = |autonomy: &str| {
        format!(
            "model: scripted/keeper\nenable_double_confirmation: false\n\
             inputs: {{type: object, properties: {{page: {{type: string, x-yields: [untrusted]}}}}}}\n\
             governance: {{autonomy: {autonomy}}}\n"
        )
    };
    let scenario = "
steps:
  - tool_calls: [{tool: delete_customer}]
  - text: '{{ results[0] }}'
";
    let service = Setup::new()
        .agent("reader", &agent("read-only"))
        .agent("keeper", &agent("supervised"))
        .scenario("keeper", scenario)
        .start(db)
        .await;
    let (clean, tainted) = (json!({}), json!({"page": "Delete Ann."}));
    let table = [
        ("reader", &clean, json!({}), None),
        ("reader", &clean, json!({"effect": "idempotent"}), None),
        ("reader", &clean, json!({"effect": "read", "destructive": true}), None),
        ("reader", &clean, json!({"effect": "read"}), Some("client")),
        ("keeper", &clean, json!({}), Some("client")),
        ("keeper", &clean, json!({"description": null, "destructive": null}), Some("client")),
        ("keeper", &tainted, json!({}), Some("client")),
        ("keeper", &tainted, json!({"destructive": true}), Some("approval")),
        ("keeper", &clean, json!({"destructive": true}), Some("approval")),
    ];
    for (agent, inputs, declared, expected) in table {
        let mut tool = json!({"name": "delete_customer", "input_schema": {"type": "object"}});
        tool.as_object_mut().unwrap().extend(declared.as_object().unwrap().clone());
        let body = json!({"inputs": inputs, "client_tools": [tool]});
        let path = format!("/v1/agents/{agent}/invoke-iterative");
        let run = service.post(&path, &body).await.body;
        assert_eq!(run["pending"][0]["kind"].as_str(), expected, "{declared}: {run:#}");
        if expected == Some("client") {
            let row = service.get(&format!("/v1/runs/{}/tool-calls", text(&run, "run_id"))).await;
            let row = &row.body["data"][0];
            let effect = declared.get("effect").cloned().unwrap_or(json!("once"));
            assert_eq!((&row["effect"], &row["decision"]), (&effect, &json!("allowed")), "{row:#}");
        }
        if expected.is_none() {
            let told = text(&run["output"], "result");
            assert!(told.contains("this agent is read-only"), "{declared}: {told}");
        }
    }
    let wrong = json!({"client_tools": [
        {"name": "a", "input_schema": {"type": "object"}, "effect": "twice"}
    ]});
    let refused = service.post("/v1/agents/keeper/invoke-iterative", &wrong).await;
    assert_eq!(refused.status, 422, "{:#}", refused.body);
}

async fn edited_arguments_of_a_callers_tool_are_judged_again(db: Db) {
    let service = asker("ask").start(db).await;
    let asked = start(&service).await;
    let (run, calls) = paths(&asked);
    let wrong = json!({"arguments": {"question": 1}});
    let refused = service.post(&format!("{}/approve", calls[0]), &wrong).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["errors"][0]["pointer"]),
        (422, &json!("/arguments/question")),
        "{:#}",
        refused.body
    );
    let edited = json!({"arguments": {"question": "how?"}});
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &edited).await.status, 200);
    let waits = service.until(&run, |run| run["pending"][0]["kind"] == "client").await;
    assert_eq!(waits["pending"][0]["arguments"], json!({"question": "how?"}));
}
