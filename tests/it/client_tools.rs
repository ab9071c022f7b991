//! Tools that the caller executes: offered like others, called through the parked run, answered
//! over HTTP.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text, types};
use crate::mock_model::{MockModel, Reply};
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    the_caller_executes_its_tool,
    wrong_arguments_of_the_model_do_not_park_the_run,
    a_result_that_does_not_come_is_an_error,
    answers_and_approvals_may_come_in_any_order,
    large_arguments_are_not_in_lists,
    a_tool_that_cannot_be_offered_is_refused,
    providers_see_a_tool_like_any_other,
    delivered_results_stay_when_the_run_is_cancelled,
    delivered_results_stay_when_another_call_has_failed,
    the_definition_labels_results_and_judges_calls,
}

pub const ASKER: &str = "
model: scripted/asker
instructions: Ask.
enable_double_confirmation: false
";

fn ask_user() -> Value {
    json!({"name": "ask_user", "description": "Asks the user.", "effect": "read", "input_schema":
        {"type": "object", "required": ["question"], "properties": {"question": {"type": "string"}}}})
}

async fn invoke(service: &Service, agent: &str) -> Answer {
    let body = json!({"client_tools": [ask_user()]});
    service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &body).await
}

pub async fn parked(service: &Service, agent: &str) -> Value {
    let parked = invoke(service, agent).await;
    assert_eq!(parked.status, 202, "{:#}\n{}", parked.body, service.log());
    parked.body
}

async fn the_caller_executes_its_tool(db: Db) {
    let steps = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {question: why?}}]
  - tool_calls: [{tool: ask_user, arguments: {question: really?}}]
  - text: '{{ results[0] }}'
";
    let service = Setup::new().agent("asker", ASKER).scenario("asker", steps).start(db).await;
    let parked = parked(&service, "asker").await;
    assert_eq!(parked["status"], "awaiting_tool_results");
    let pending = &parked["pending"][0];
    assert_eq!((&pending["kind"], &pending["tool"]), (&json!("client"), &json!("ask_user")));
    assert_eq!(pending["arguments"], json!({"question": "why?"}));
    let (run, calls) = paths(&parked);
    assert_eq!(types(&service, &run).await.last().unwrap(), "tool_call.awaiting_client");
    assert_eq!(
        service.get(&format!("{run}/tool-calls")).await.body["data"][0]["state"],
        "awaiting_client"
    );
    assert_eq!(service.get("/v1/approvals").await.body["data"][0]["kind"], "client");

    let not_asked = service.post(&format!("{}/approve", calls[0]), &json!({})).await;
    assert_eq!(
        (not_asked.status.as_u16(), &not_asked.body["code"]),
        (409, &json!("NOT_AWAITING_APPROVAL"))
    );
    for bad in [json!({}), json!({"content": 1}), json!({"content": "a", "isError": true})] {
        assert_eq!(service.post(&format!("{}/result", calls[0]), &bad).await.status, 422, "{bad}");
    }
    tokio::time::sleep(Duration::from_millis(50)).await; // what executing it takes
    let given = service.post(&format!("{}/result", calls[0]), &json!({"content": "because"})).await;
    assert_eq!((given.status.as_u16(), &given.body["pending"]), (200, &json!([])), "{given:?}");
    let again =
        service.until(&run, |run| run["pending"][0]["arguments"]["question"] == "really?").await;
    let late = service.post(&format!("{}/result", calls[0]), &json!({"content": "because"})).await;
    assert_eq!((late.status.as_u16(), &late.body["code"]), (409, &json!("NOT_AWAITING_APPROVAL")));
    let (_, calls) = paths(&again);
    let failed = json!({"content": "nobody is there", "is_error": true});
    assert_eq!(service.post(&format!("{}/result", calls[0]), &failed).await.status, 200);
    let done = ended(&service, &run).await;
    assert_eq!(done["output"], json!({"result": "nobody is there"}), "{done:#}");
    assert_eq!((&done["tool_calls_made"], &done["iterations"]), (&json!(2), &json!(3)));
    assert_eq!(done["tools_used"], json!(["ask_user"]), "{done:#}");
    let made = service.get(&format!("{run}/tool-calls")).await.body;
    let states: Vec<_> =
        made["data"].as_array().unwrap().iter().map(|c| (&c["state"], &c["result"])).collect();
    let (good, bad) =
        ((json!("succeeded"), json!("because")), (json!("failed"), json!("nobody is there")));
    assert_eq!(states, [(&good.0, &good.1), (&bad.0, &bad.1)], "{made:#}");
    for call in made["data"].as_array().unwrap() {
        assert!(text(call, "started_at") < text(call, "finished_at"), "{call:#}");
    }
    assert!(made["data"][0]["duration_ms"].as_u64().unwrap() >= 50, "{made:#}");
    assert_eq!(
        service.get("/v1/approvals?status=answered").await.body["data"].as_array().unwrap().len(),
        2
    );
}

async fn wrong_arguments_of_the_model_do_not_park_the_run(db: Db) {
    let steps = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {query: why?}}]
  - text: '{{ results[0] }}'
";
    let service = Setup::new().agent("asker", ASKER).scenario("asker", steps).start(db).await;
    let run = invoke(&service, "asker").await;
    assert_eq!(run.status, 200, "{run:?}");
    let result = text(&run.body["output"], "result");
    assert!(
        result.contains("do not match the tool's schema") && result.contains("question"),
        "{result}"
    );
}

async fn a_result_that_does_not_come_is_an_error(db: Db) {
    let steps = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {question: why?}}]
  - text: '{{ results[0] }}'
";
    let hasty = format!("{ASKER}client_tool_timeout: 1s\n");
    let service = Setup::new().agent("asker", &hasty).scenario("asker", steps).start(db).await;
    let request = service.request(Method::POST, "/v1/agents/asker/invoke-iterative");
    let request = request.header("prefer", "respond-async");
    let queued = answer(request.json(&json!({"client_tools": [ask_user()]}))).await.body;
    let run = format!("/v1/runs/{}", text(&queued, "run_id"));
    let done = ended(&service, &run).await;
    assert_eq!(
        done["output"],
        json!({"result": "Error: no result of this call came in time."}),
        "{done:#}"
    );
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    let result = format!("{run}/tool-calls/{}/result", text(&calls["data"][0], "id"));
    assert_eq!(service.post(&result, &json!({"content": "late"})).await.status, 409);
    let audit = service.get("/v1/audit?action=tool_call").await.body;
    let told = audit["data"].as_array().unwrap().iter().map(|it| (&it["rule"], &it["outcome"]));
    let told: Vec<_> = told.map(|(rule, outcome)| (rule.as_str().unwrap(), outcome)).collect();
    assert!(told.contains(&("client", &json!("timed_out"))), "{audit:#}");
}

async fn large_arguments_are_not_in_lists(db: Db) {
    let question = "why? ".repeat(16_000);
    let steps = format!(
        "steps:\n  - tool_calls: [{{tool: ask_user, arguments: {{question: {question:?}}}}}]\n"
    );
    let service = Setup::new().agent("asker", ASKER).scenario("asker", &steps).start(db).await;
    let parked = parked(&service, "asker").await;
    assert_eq!(parked["pending"][0]["arguments"]["question"], question);
    let (run, _) = paths(&parked);
    let shown = service.get(&run).await.body;
    assert_eq!(shown["pending"][0]["arguments"]["question"], question);
    for list in ["/v1/runs", "/v1/approvals", "/v1/runs?status=awaiting_tool_results"] {
        let listed = service.get(list).await.body;
        assert!(listed.to_string().len() < 10_000, "{list}: {listed:#}");
        assert_eq!(listed["data"].as_array().unwrap().len(), 1, "{list}");
    }
}

async fn answers_and_approvals_may_come_in_any_order(db: Db) {
    let both = "
model: scripted/both
instructions: Do both.
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}}
";
    let steps = "
steps:
  - tool_calls:
      - {tool: ask_user, arguments: {question: why?}}
      - {tool: file_ops, arguments: {operation: write, path: notes.txt, content: new}}
  - text: '{{ results[0] }}'
";
    let setup = Setup::new().agent("both", both).scenario("both", steps).file("notes.txt", "old");
    let service = setup.start(db).await;
    for first in ["result", "approve"] {
        service.write("workspace/default/notes.txt", "old");
        let parked = parked(&service, "both").await;
        assert_eq!(parked["status"], "awaiting_approval");
        let kinds: Vec<&str> =
            parked["pending"].as_array().unwrap().iter().map(|p| text(p, "kind")).collect();
        assert_eq!(kinds, ["client", "approval"]);
        let (run, calls) = paths(&parked);
        let result = (format!("{}/result", calls[0]), json!({"content": "because"}));
        let approve = (format!("{}/approve", calls[1]), json!({}));
        let in_order = if first == "result" { [result, approve] } else { [approve, result] };
        let waits = if first == "result" { "awaiting_approval" } else { "awaiting_tool_results" };
        for ((path, body), left) in in_order.into_iter().zip([Some(waits), None]) {
            let taken = service.post(&path, &body).await;
            assert_eq!(taken.status, 200, "{taken:?}");
            if let Some(left) = left {
                assert_eq!(
                    taken.body["status"], left,
                    "what is left to wait for says in which status it waits"
                );
                let listed = service.get(&format!("/v1/runs?status={left}")).await.body;
                assert_eq!(
                    listed["data"][0]["pending"].as_array().map(Vec::len),
                    Some(1),
                    "{listed:#}"
                );
            }
        }
        let done = ended(&service, &run).await;
        assert_eq!(
            (&done["output"], file(&service, "notes.txt").as_str()),
            (&json!({"result": "because"}), "new"),
            "that the result makes the run untrusted changes nothing about the approval"
        );
        assert_eq!(done["labels"], json!(["untrusted"]), "{done:#}");
    }
}

async fn a_tool_that_cannot_be_offered_is_refused(db: Db) {
    let agent = format!("{ASKER}tools: [file_ops]\noutput: {{schema: {{type: object}}}}\n");
    let service =
        Setup::new().agent("asker", &agent).scenario("asker", "steps: [{text: x}]").start(db).await;
    let object = json!({"type": "object"});
    for (tools, pointer) in [
        (json!([{"name": "a b", "input_schema": object}]), "/client_tools/0/name"),
        (json!([{"name": "file_ops", "input_schema": object}]), "/client_tools/0/name"),
        (json!([{"name": "output", "input_schema": object}]), "/client_tools/0/name"),
        (json!([ask_user(), ask_user()]), "/client_tools/1/name"),
        (
            json!([{"name": "a", "input_schema": {"type": "object", "properties": 1}}]),
            "/client_tools/0/input_schema",
        ),
        (json!([{"name": "a", "input_schema": {"type": "text"}}]), "/client_tools/0/input_schema"),
        (json!([{"name": "a"}]), "/client_tools/0/input_schema"),
        (json!([{"name": "a", "input_schema": object, "url": "x"}]), "/client_tools/0/url"),
        (json!({"name": "a"}), "/client_tools"),
    ] {
        let refused = service
            .post("/v1/agents/asker/invoke-iterative", &json!({"client_tools": tools}))
            .await;
        let said = (
            refused.status.as_u16(),
            &refused.body["code"],
            text(&refused.body["errors"][0], "pointer"),
        );
        assert_eq!(said, (422, &json!("INVALID_OVERRIDE"), pointer), "{tools}: {refused:?}");
    }
    let single = service.post("/v1/agents/asker/invoke", &json!({"client_tools": []})).await;
    assert_eq!((single.status.as_u16(), &single.body["code"]), (422, &json!("INVALID_OVERRIDE")));
    assert_eq!(service.get("/v1/runs").await.body["data"], json!([]));
}

async fn providers_see_a_tool_like_any_other(db: Db) {
    let mock = MockModel::start().await;
    let models = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\napi_key_env = \"PATH\"\nmax_retries = 0",
        mock.base_url()
    );
    let agent = ASKER.replace("scripted/asker", "mock/any") + "tools: [file_ops]\n";
    let service = Setup::new().agent("asker", &agent).config(&models).start(db).await;
    mock.script([Reply::call("ask_user", &json!({"question": "why?"})), Reply::text("so")]);
    let (run, calls) = paths(&parked(&service, "asker").await);
    let request = service.request(Method::POST, &format!("{}/result", calls[0]));
    let given = answer(request.json(&json!({"content": "x".repeat(100_000)}))).await;
    assert_eq!(given.status, 200, "{given:?}");
    assert_eq!(ended(&service, &run).await["output"], json!({"result": "so"}));
    assert_eq!(mock.refusals(), Vec::<String>::new(), "every request was a valid one");
    let last = mock.requests().pop().unwrap();
    let offered: Vec<&str> = last.body["tools"]
        .as_array()
        .unwrap()
        .iter()
        .map(|tool| text(&tool["function"], "name"))
        .collect();
    assert_eq!(offered, ["file_ops", "ask_user"]);
    let result = last.messages().last().unwrap()["content"].as_str().unwrap();
    assert!(
        result.len() <= 64 * 1024 && result.contains("are left out here"),
        "{} bytes",
        result.len()
    );
}

const TWICE: &str = "
steps:
  - tool_calls:
      - {tool: ask_user, arguments: {question: who?}}
      - {tool: ask_user, arguments: {question: why?}}
  - text: '{{ results[0] }}'
";

async fn calls_of(service: &Service, run: &str) -> Vec<(Value, Value)> {
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    let calls = calls["data"].as_array().unwrap().iter();
    calls.map(|call| (call["state"].clone(), call["result"].clone())).collect()
}

async fn delivered_results_stay_when_the_run_is_cancelled(db: Db) {
    let mock = MockModel::start().await;
    let models = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let agent = ASKER.replace("scripted/asker", "mock/any");
    let service = Setup::new().agent("asker", &agent).config(&models).start(db).await;
    let ask = |question: &str| ("ask_user".to_owned(), json!({"question": question}).to_string());
    mock.script([Reply::ToolCalls(vec![ask("who?"), ask("why?")]), Reply::text("so")]);
    let session = json!({"client_tools": [ask_user()], "session_id": "s"});
    let invoke = "/v1/agents/asker/invoke-iterative";
    let (run, calls) = paths(&service.post(invoke, &session).await.body);
    let delivered = json!({"content": "the gardener"});
    assert_eq!(service.post(&format!("{}/result", calls[0]), &delivered).await.status, 200);
    let cancelled = service.post(&format!("{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{cancelled:?}");
    let done = ended(&service, &run).await;
    assert_eq!((&done["status"], &done["tools_used"]), (&json!("cancelled"), &json!(["ask_user"])));
    let expected = [
        (json!("succeeded"), json!("the gardener")),
        (json!("cancelled"), json!("Error: not executed, the run was cancelled.")),
    ];
    assert_eq!(calls_of(&service, &run).await, expected);
    let next = service.post(invoke, &session).await.body;
    assert_eq!(next["status"], "completed", "{next:#}");
    let told = mock.requests().pop().unwrap().body["messages"].to_string();
    assert!(told.contains("the gardener"), "the next run of the session reads it: {told}");
}

async fn delivered_results_stay_when_another_call_has_failed(db: Db) {
    let agent = format!("{ASKER}throw_on_tool_failure: true\n");
    let service = Setup::new().agent("asker", &agent).scenario("asker", TWICE).start(db).await;
    let (run, calls) = paths(&parked(&service, "asker").await);
    for (call, body) in calls
        .iter()
        .zip([json!({"content": "nobody", "is_error": true}), json!({"content": "good"})])
    {
        assert_eq!(service.post(&format!("{call}/result"), &body).await.status, 200);
    }
    let done = ended(&service, &run).await;
    assert_eq!(done["error"]["code"], "TOOL_FAILURE", "{done:#}");
    let expected = [(json!("failed"), json!("nobody")), (json!("succeeded"), json!("good"))];
    assert_eq!(calls_of(&service, &run).await, expected);
}

async fn the_definition_labels_results_and_judges_calls(db: Db) {
    let steps = "
steps:
  - tool_calls: [{tool: ask_user, arguments: {question: why?}}]
  - text: done
";
    let asked = "ask_user: ask";
    let cases = [
        ("named", "{ask_user: {yields: [private]}}", asked, json!(["private"])),
        ("by-glob", "{'*': {yields: [none]}}", asked, json!([])),
        ("clean", "{'*': {sanitizes: [untrusted]}}", "x: ask", json!([])),
        ("usual", "{}", "ask_user: {do: deny, mode: observe}", json!(["untrusted"])),
    ];
    let mut setup = Setup::new();
    for (name, options, policy, _) in &cases {
        let agent = format!(
            "{}tools: [file_ops]\ntool_options: {options}\ngovernance: {{tool_policies: {{{policy}}}}}\n",
            ASKER.replace("scripted/asker", &format!("scripted/{name}"))
        );
        setup = setup.agent(name, &agent).scenario(name, steps);
    }
    let service = setup.start(db).await;
    for (name, _, policy, labels) in cases {
        let mut run = parked(&service, name).await;
        let (path, calls) = paths(&run);
        if policy == asked {
            assert_eq!(
                service.post(&format!("{}/approve", calls[0]), &json!({})).await.status,
                200
            );
            run = service.until(&path, |run| run["status"] == "awaiting_tool_results").await;
        }
        let expected = match policy {
            "x: ask" => "The caller executes this tool.",
            _ if policy == asked => "Approved by testadmin.",
            _ => "would deny every call of ask_user, but only observes",
        };
        let row = &service.get(&format!("{path}/tool-calls")).await.body["data"][0];
        for told in [&run["pending"][0], row] {
            assert!(text(told, "reason").contains(expected), "{name}: {told:#}");
        }
        let given = json!({"content": "because"});
        assert_eq!(service.post(&format!("{}/result", calls[0]), &given).await.status, 200);
        let done = ended(&service, &path).await;
        assert_eq!(done["labels"], labels, "{name}: {done:#}");
    }
}
