//! Blank answers of models, calls that may not be executed, and what a run shows to readers and
//! approvers.

use reqwest::Method;
use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text, types};
use crate::mock_model::{MockModel, Reply};
use crate::mock_server::{self, Api, MockServer};
use crate::service::{Db, Service, Setup, answer, on_both_stores};
use crate::{mock_anthropic, mock_ollama};

on_both_stores! {
    a_blank_answer_is_asked_for_once_more_on_every_api,
    a_blank_answer_of_a_single_shot_is_none,
    calls_under_none_are_not_executed,
    calls_beside_a_refusal_and_in_a_last_answer_are_not_executed,
    a_nul_in_arguments_is_an_error,
    a_provider_says_whether_to_repeat,
    a_budget_says_how_much_the_next_call_needs,
    a_template_names_the_missing_variable,
    instructions_know_skills_and_memory,
    a_parked_run_shows_the_turn_that_waits,
    iterations_tell_their_children,
    events_stay_on_one_line,
    hidden_characters_are_shown_to_the_approver,
}

const AGENT: &str = "
model: mock/gpt-4.1-mini
instructions: Work.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}}
";

fn provider(kind: &str, url: &str) -> String {
    format!(
        "[models.mock]\nkind = \"{kind}\"\nbase_url = \"{url}\"\nheaders = {{ x-api-key = \"k\" }}"
    )
}

/// An agent with these lines besides, and the server that its model is on.
async fn on_mock(
    db: Db,
    more: &str,
    replies: impl IntoIterator<Item = Reply>,
) -> (Service, MockModel) {
    let mock = MockModel::start().await;
    mock.script(replies);
    let setup = Setup::new()
        .agent("worker", &format!("{AGENT}{more}"))
        .config(&provider("openai", mock.base_url()));
    (setup.start(db).await, mock)
}

fn path(run: &Value) -> String {
    format!("/v1/runs/{}", text(run, "run_id"))
}

async fn part(service: &Service, run: &Value, part: &str) -> Vec<Value> {
    let listed = service.get(&format!("{}/{part}?limit=100", path(run))).await.body;
    listed["data"].as_array().unwrap_or_else(|| panic!("{listed:#}")).clone()
}

fn write(path: &str) -> Reply {
    let arguments = json!({"operation": "write", "path": path, "content": "x"});
    Reply::call("file_ops", &arguments)
}

/// A message with whatever is in it.
fn message(message: &Value, finish_reason: &str) -> Reply {
    let choice = json!({"index": 0, "message": message, "finish_reason": finish_reason});
    let body = json!({"id": "x", "object": "chat.completion", "choices": [choice]});
    Reply::Raw(body.to_string())
}

async fn a_blank_answer_is_asked_for_once_more_on_every_api(db: Db) {
    const APIS: [(&str, &str, Option<Api>); 4] = [
        ("openai", "gpt-4.1-mini", None),
        ("openai-responses", "gpt-5.2", None),
        ("anthropic", "claude-sonnet-4-5", Some(mock_anthropic::API)),
        ("ollama", "qwen3:4b", Some(mock_ollama::API)),
    ];
    for (kind, model, api) in APIS {
        for blank in ["", " \n"] {
            let script = [blank, "done", blank, blank];
            let (own, other) = match api {
                None => {
                    let mock = MockModel::start().await;
                    mock.script(script.map(Reply::text));
                    mock.always(Reply::text(blank));
                    (Some(mock), None)
                }
                Some(api) => {
                    let script = script.into_iter().chain([blank; 8]);
                    let mock = MockServer::start(api, script.map(mock_server::Reply::text)).await;
                    (None, Some(mock))
                }
            };
            let url = own.as_ref().map(|mock| mock.base_url().to_owned());
            let url = url.or(other.as_ref().map(|mock| mock.base_url.clone())).unwrap();
            let agent = AGENT.replace("gpt-4.1-mini", model);
            let service =
                Setup::new().agent("worker", &agent).config(&provider(kind, &url)).start(db).await;
            let case = format!("{kind} {blank:?}");
            let run = service.run("worker", &json!({})).await;
            assert_eq!(run["output"], json!({"result": "done"}), "{case}: {run:#}");
            assert_eq!(run["iterations"], 2, "{case}: {run:#}");
            assert!(types(&service, &path(&run)).await.contains(&"answer.blank".into()), "{case}");
            let messages = part(&service, &run, "messages").await;
            let told = &messages[messages.len() - 2];
            assert_eq!(told["role"], "user", "{case}: {messages:#?}");
            assert!(text(told, "content").contains("empty"), "{case}: {told:#}");

            let failed = service.run("worker", &json!({})).await;
            assert_eq!(failed["error"]["code"], "INVALID_RESPONSE", "{case}: {failed:#}");
            assert_eq!(
                (&failed["attempts"], &failed["iterations"], &failed["output"]),
                (&json!(3), &json!(6), &Value::Null),
                "{case}: {failed:#}"
            );
        }
    }
}

async fn a_blank_answer_of_a_single_shot_is_none(db: Db) {
    let silent = json!({"role": "assistant", "content": null});
    let replies = [Reply::text(" "), message(&silent, "stop"), write("out.txt")];
    let (service, mock) = on_mock(db, "", replies).await;
    for case in 0..3 {
        let run = service.post("/v1/agents/worker/invoke", &json!({})).await.body;
        assert_eq!(run["error"]["code"], "INVALID_RESPONSE", "{case}: {run:#}");
        assert_eq!(run["termination_reason"], "invalid_response", "{case}: {run:#}");
        let calls = part(&service, &run, "tool-calls").await;
        assert!(calls.iter().all(|call| call["state"] == "cancelled"), "{case}: {calls:#?}");
    }
    assert_eq!(mock.requests().len(), 3, "one call each");
    assert_eq!(file(&service, "out.txt"), "");
}

/// Every call of a run has exactly one result, which says that it was not executed.
async fn none_was_executed(service: &Service, run: &Value, calls: usize) {
    assert_eq!(file(service, "out.txt"), "", "{run:#}");
    assert_eq!(run["tools_used"], json!([]), "{run:#}");
    let rows = part(service, run, "tool-calls").await;
    assert_eq!(rows.len(), calls, "{rows:#?}");
    for row in &rows {
        assert_eq!((&row["state"], &row["is_error"]), (&json!("cancelled"), &json!(true)), "{row}");
        assert!(text(row, "result").contains("not executed"), "{row:#}");
    }
    let results = types(service, &path(run)).await;
    assert_eq!(results.iter().filter(|kind| *kind == "tool_call.completed").count(), calls);
    let messages = part(service, run, "messages").await;
    let told = messages.iter().filter(|message| message["role"] == "tool").count();
    assert_eq!(told, calls, "{messages:#?}");
}

async fn calls_under_none_are_not_executed(db: Db) {
    for followed in [false, true] {
        let replies = [write("out.txt"), Reply::text("done")];
        let (service, _mock) = on_mock(db, "tool_choice: none\n", replies).await;
        let request = service
            .request(Method::POST, "/v1/agents/worker/invoke-iterative")
            .header("accept", if followed { "text/event-stream" } else { "application/json" });
        answer(request.json(&json!({}))).await;
        let run = &service.get("/v1/runs").await.body["data"][0];
        let run = ended(&service, &path(run)).await;
        assert_eq!(run["output"], json!({"result": "done"}), "{run:#}");
        none_was_executed(&service, &run, 1).await;
    }
}

async fn calls_beside_a_refusal_and_in_a_last_answer_are_not_executed(db: Db) {
    let function = json!({"name": "file_ops", "arguments": "{\"operation\": \"write\", \"path\": \"out.txt\", \"content\": \"x\"}"});
    let call = |id: &str| json!({"id": id, "type": "function", "function": function});
    let calls = [call("a"), call("b")];
    let refusing = json!({"role": "assistant", "content": "I will not.", "tool_calls": calls});
    let (service, _mock) = on_mock(db, "", [message(&refusing, "content_filter")]).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["error"]["code"], "MODEL_REFUSED", "{run:#}");
    none_was_executed(&service, &run, 2).await;

    let list = json!({"operation": "list", "path": "."});
    let with_text = json!({"role": "assistant", "content": "So far.", "tool_calls": [call("a")]});
    let replies = [Reply::call("file_ops", &list), message(&with_text, "tool_calls")];
    let limit = "limits: {max_iterations: 1}\non_limit: answer\n";
    let (service, _mock) = on_mock(db, limit, replies).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "So far."}), "{run:#}");
    let calls = part(&service, &run, "tool-calls").await;
    let states: Vec<&str> = calls.iter().map(|call| text(call, "state")).collect();
    assert_eq!(states, ["succeeded", "cancelled"], "{calls:#?}");
    assert_eq!(file(&service, "out.txt"), "");
}

async fn a_nul_in_arguments_is_an_error(db: Db) {
    let escaped = r#"{"operation": "write", "path": "out/\u0000x", "content": "x"}"#;
    let raw = "{\"operation\": \"write\", \"path\": \"out/\0y\", \"content\": \"x\"}";
    let call = |arguments: &str| Reply::ToolCalls(vec![("file_ops".into(), arguments.into())]);
    let replies = [call(escaped), call(raw), Reply::text("done")];
    let (service, _mock) = on_mock(db, "", replies).await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let rows = part(&service, &run, "tool-calls").await;
    assert_eq!(rows.len(), 2, "{rows:#?}");
    for row in rows {
        assert_eq!(row["state"], "failed", "{row:#}");
        assert!(text(&row, "result").contains("NUL character at /path"), "{row:#}");
    }
    assert!(!service.dir.path().join("workspace/default/out").exists(), "nothing was written");
}

async fn a_provider_says_whether_to_repeat(db: Db) {
    let refused = |status: u16, says: &str| Reply::Status {
        status,
        headers: vec![("x-should-retry", says.to_owned())],
        body: json!({"error": {"message": "no", "type": "t", "code": null}}),
    };
    let replies = [refused(429, "false"), refused(400, "true"), Reply::text("done")];
    let (service, mock) = on_mock(db, "", replies).await;
    let failed = service.run("worker", &json!({})).await;
    assert_eq!(failed["error"]["code"], "MODEL_ERROR", "{failed:#}");
    assert_eq!(failed["error"]["context"]["attempts"], 1, "{failed:#}");
    assert_eq!(mock.requests().len(), 1, "not repeated");
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "done"}), "repeated: {run:#}");
}

async fn a_budget_says_how_much_the_next_call_needs(db: Db) {
    let agent = |budget: &str| {
        format!(
            "model: scripted/worker\ninstructions: Work.\ngovernance: {{budget: {{{budget}}}}}\n"
        )
    };
    let service = Setup::new()
        .agent("tokens", &agent("max_total_tokens: 100"))
        .agent("dollars", &agent("max_cost_usd: 0.001"))
        .scenario("worker", "steps: [{text: done}]")
        .config("[prices.\"scripted/*\"]\ninput = 10.0\noutput = 10.0")
        .start(db)
        .await;
    for name in ["tokens", "dollars"] {
        let run = service.run(name, &json!({})).await;
        let error = &run["error"];
        assert_eq!(error["code"], "BUDGET_EXCEEDED", "{run:#}");
        let needs = error["context"]["needs"].as_f64().unwrap_or_else(|| panic!("{run:#}"));
        assert!(needs > error["context"]["max"].as_f64().unwrap(), "{error:#}");
        assert_eq!(error["context"]["used"].as_f64(), Some(0.0), "{error:#}");
        let told = text(error, "message");
        assert!(told.contains("needs at least") && !told.contains("used up"), "{told}");
    }
}

async fn a_template_names_the_missing_variable(db: Db) {
    let service = Setup::new()
        .agent("asker", "model: scripted/asker\ninstructions: 'Look at {{ inputs.topic }}.'\n")
        .agent("deep", "model: scripted/asker\nprompt: 'Ask {{ inputs.user.name }}.'\n")
        .scenario("asker", "steps: [{text: done}]")
        .start(db)
        .await;
    for (agent, inputs, name) in [
        ("asker", json!({}), "inputs.topic"),
        ("deep", json!({"user": {}}), "inputs.user.name"),
        ("deep", json!({}), "inputs.user"),
    ] {
        let body = json!({ "inputs": inputs });
        let refused = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &body).await;
        assert_eq!(refused.status, 422, "{:#}", refused.body);
        assert!(refused.body.to_string().contains(name), "{name}: {:#}", refused.body);
    }
}

async fn instructions_know_skills_and_memory(db: Db) {
    let agent = "
model: scripted/knower
skills: [reviewing, writing]
active_skills: [writing]
memory: {recall: {top_k: 3}}
tools: [file_ops]
enable_double_confirmation: false
instructions: |
  {% for skill in skills %}[{{ skill.name }}: {{ skill.description }} {{ skill.active }}]{% endfor %}
  {% if memory %}Remembered {{ memory | length }}.{% else %}Nothing remembered.{% endif %}
";
    let service = Setup::new()
        .agent("knower", agent)
        .skill("reviewing", "", "Review.")
        .skill("writing", "", "Write.")
        .scenario("knower", "steps: [{text: pelicans nest in reeds}]")
        .start(db)
        .await;
    let system = async |inputs: &str| {
        let body = json!({"inputs": {"task": inputs}});
        let run = service.run("knower", &body).await;
        text(&part(&service, &run, "messages").await[0], "content").to_owned()
    };
    let first = system("pelicans").await;
    assert!(first.contains("[reviewing: When to use reviewing. False]"), "{first}");
    assert!(first.contains("[writing: When to use writing. True]"), "{first}");
    assert!(first.contains("Nothing remembered."), "{first}");
    let second = system("where do pelicans nest").await;
    assert!(second.contains("Remembered 2.") && !second.contains("Nothing"), "{second}");
}

const ASKING: &str = "
model: scripted/asking
instructions: Work.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";

async fn a_parked_run_shows_the_turn_that_waits(db: Db) {
    let steps = "steps:
  - text: Both at once.
    tool_calls:
      - {tool: file_ops, arguments: {operation: list, path: .}}
      - {tool: ask_user, arguments: {question: Why?}}
  - text: done";
    let agent = ASKING.replace("tool_policies: {file_ops: ask}", "tool_policies: {}");
    let service = Setup::new().agent("asking", &agent).scenario("asking", steps).start(db).await;
    let tools =
        json!([{"name": "ask_user", "description": "Asks.", "input_schema": {"type": "object"}}]);
    let parked = service
        .post("/v1/agents/asking/invoke-iterative", &json!({"client_tools": tools}))
        .await
        .body;
    assert_eq!(parked["status"], "awaiting_tool_results", "{parked:#}");
    let messages = part(&service, &parked, "messages").await;
    let roles: Vec<&str> = messages.iter().map(|message| text(message, "role")).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool"], "{messages:#?}");
    assert_eq!(messages[2]["content"], "Both at once.");
    assert_eq!(messages[2]["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(messages[3]["tool_call_id"], messages[2]["tool_calls"][0]["id"]);

    let call = paths(&parked).1.remove(0);
    service.post(&format!("{call}/result"), &json!({"content": "Because."})).await;
    let run = ended(&service, &path(&parked)).await;
    let messages = part(&service, &run, "messages").await;
    let roles: Vec<&str> = messages.iter().map(|message| text(message, "role")).collect();
    assert_eq!(roles, ["system", "user", "assistant", "tool", "tool", "assistant"]);
}

async fn iterations_tell_their_children(db: Db) {
    let parent = "
model: scripted/parent
instructions: Ask.
tools: ['agent:child']
enable_double_confirmation: false
";
    let service = Setup::new()
        .agent("parent", parent)
        .agent("child", "model: scripted/child\ninstructions: Answer.\n")
        .scenario(
            "parent",
            "steps:\n  - tool_calls: [{tool: 'agent:child', arguments: {}}, {tool: 'agent:child', arguments: {n: 2}}]\n  - text: done",
        )
        .scenario("child", "steps: [{text: seventeen}]")
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    let iterations = part(&service, &run, "iterations").await;
    let listed = service.get(&format!("/v1/runs?parent_run_id={}", text(&run, "run_id"))).await;
    let mut children: Vec<&Value> =
        listed.body["data"].as_array().unwrap().iter().map(|child| &child["run_id"]).collect();
    children.sort_by_key(ToString::to_string);
    let mut told: Vec<&Value> = iterations[0]["children"].as_array().unwrap().iter().collect();
    told.sort_by_key(ToString::to_string);
    assert_eq!((told.len(), &told), (2, &children), "{iterations:#?}");
    assert_eq!(iterations[1]["children"], json!([]));
    assert_eq!(iterations[1]["compactions"], json!([]));
}

async fn events_stay_on_one_line(db: Db) {
    let said = "one\u{2028}two\u{2029}three\u{85}four";
    let steps = json!({"steps": [{ "text": said }]}).to_string();
    let service = Setup::new()
        .agent("liner", "model: scripted/liner\ninstructions: Say.\n")
        .scenario("liner", &steps)
        .start(db)
        .await;
    let request = service
        .request(Method::POST, "/v1/agents/liner/invoke-iterative")
        .header("accept", "text/event-stream");
    let response = request.json(&json!({})).send().await.unwrap();
    let stream = response.text().await.unwrap();
    assert!(!stream.contains(['\u{2028}', '\u{2029}', '\u{85}']), "{stream}");
    let last = stream.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap();
    let last: Value = serde_json::from_str(last).unwrap();
    assert_eq!(last["data"]["run"]["output"], json!({ "result": said }));
}

async fn hidden_characters_are_shown_to_the_approver(db: Db) {
    let hidden = "pay\u{202e}txt.\u{200b}exe\u{e0041}";
    let call = json!({"tool": "file_ops", "arguments": {"operation": "write", "path": "a.txt", "content": hidden}});
    let steps =
        json!({"steps": [{"tool_calls": [call]}, {"text": "{{ results[0] }}"}]}).to_string();
    let service = Setup::new().agent("asking", ASKING).scenario("asking", &steps).start(db).await;
    let parked = service.post("/v1/agents/asking/invoke-iterative", &json!({})).await.body;
    let listed = &service.get("/v1/approvals").await.body["data"][0];
    for pending in [&parked["pending"][0], listed] {
        assert_eq!(pending["arguments"]["content"], hidden, "raw: {pending:#}");
        let display = text(pending, "display");
        assert!(display.is_ascii(), "{display}");
        assert_eq!(serde_json::from_str::<Value>(display).unwrap(), pending["arguments"]);
        let reason = text(pending, "reason");
        assert!(
            reason.contains("has a person decide") && !reason.contains("continue without"),
            "{reason}"
        );
    }
    let (run, calls) = paths(&parked);
    let denied = service.post(&format!("{}/deny", calls[0]), &json!({"reason": "no"})).await;
    assert_eq!(denied.status, 200, "{:#}", denied.body);
    let done = ended(&service, &run).await;
    let told = text(&done["output"], "result");
    assert!(
        told.contains("denied this call: no.") && told.contains("continue without it"),
        "{told}"
    );
}
