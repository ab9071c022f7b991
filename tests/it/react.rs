//! Agents whose models have no function calling, as a caller sees them and as their models do.

use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    decisions_use_tools_and_answer,
    bad_decisions_are_shown_to_the_model,
    a_killed_service_goes_on_deciding,
    an_output_is_the_final_answer,
    a_reflected_output_is_given_by_calls,
    a_choice_is_kept_by_asking_and_checking,
    an_answer_can_be_written_by_a_call_of_its_own,
    the_model_sees_text_alone,
    decisions_have_fields_of_the_author,
    another_model_can_write_the_answer,
    a_call_at_a_limit_is_no_answer,
}

const READER: &str = "
model: scripted/reader
driver: react
instructions: Read the files.
tools: [file_ops]
enable_double_confirmation: false
";

const LOOK: &str = r#"{"thought": "look", "type": "call_tool", "tool": "file_ops", "args": {"operation": "read", "path": "notes.txt"}}"#;
const DONE: &str = r#"{"type": "final_answer", "answer": "seventeen"}"#;

/// An agent whose model says these texts.
fn saying(agent: &str, texts: &[&str]) -> Setup {
    let steps: Vec<Value> = texts.iter().map(|text| json!({ "text": text })).collect();
    let scenario = json!({ "steps": steps }).to_string();
    Setup::new()
        .agent("reader", agent)
        .scenario("reader", &scenario)
        .file("notes.txt", "seventeen\n")
}

async fn events(service: &Service, run: &Value) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

fn types(events: &[Value]) -> Vec<&str> {
    events.iter().map(|event| event["type"].as_str().unwrap()).collect()
}

async fn decisions_use_tools_and_answer(db: Db) {
    let fenced = format!("I shall look.\n```json\n{LOOK}\n```\nObservation: nineteen");
    let texts = [fenced.as_str(), DONE, r#"{"type": "final_answer", "answer": {"count": 17}}"#];
    let agent = READER.replace("enable_double_confirmation: false", "");
    let service = saying(&agent, &texts).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        run["output"],
        json!({"count": 17}),
        "the second answer, after the request to verify it: {run:#}"
    );
    assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(3), &json!(1)));
    assert_eq!(run["tools_used"], json!(["file_ops"]));

    let run_id = run["run_id"].as_str().unwrap();
    let calls = service.get(&format!("/v1/runs/{run_id}/tool-calls")).await.body;
    assert_eq!(calls["data"][0]["arguments"], json!({"operation": "read", "path": "notes.txt"}));
    assert_eq!(calls["data"][0]["result"].as_str().unwrap().trim(), "seventeen");
    let messages = service.get(&format!("/v1/runs/{run_id}/messages")).await.body;
    assert_eq!(
        messages["data"][2]["content"], "look",
        "the thought is what the model said: {messages:#}"
    );

    let single = service.post("/v1/agents/reader/invoke", &json!({})).await.body;
    assert!(
        single["output"]["result"].as_str().unwrap().starts_with("I shall look."),
        "one call, no decisions: {single:#}"
    );
}

async fn bad_decisions_are_shown_to_the_model(db: Db) {
    let wrong = LOOK.replace(r#""path": "notes.txt""#, r#""path": 17"#);
    let unknown = LOOK.replace("file_ops", "shell");
    let service =
        saying(READER, &["I think it is seventeen.", &wrong, LOOK, &unknown, DONE]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "seventeen"}), &json!(5)),
        "{run:#}"
    );
    assert_eq!((&run["attempts"], &run["tool_calls_made"]), (&json!(1), &json!(1)));
    let journal = events(&service, &run).await;
    let failed: Vec<&Value> =
        journal.iter().filter(|e| e["type"].as_str().unwrap().starts_with("decision.")).collect();
    let failures: Vec<(&str, u64)> = failed
        .iter()
        .map(|e| (e["type"].as_str().unwrap(), e["data"]["iteration"].as_u64().unwrap()))
        .collect();
    let [extraction, validation] = ["decision.extraction_failed", "decision.validation_failed"];
    assert_eq!(failures, [(extraction, 1), (validation, 2), (validation, 4)]);
    assert!(failed[1]["data"]["error"].as_str().unwrap().contains("/path"), "{:#}", failed[1]);
    assert!(failed[2]["data"]["error"].as_str().unwrap().contains("file_ops"), "{:#}", failed[2]);
    let messages =
        service.get(&format!("/v1/runs/{}/messages", run["run_id"].as_str().unwrap())).await.body;
    assert_eq!(messages["data"][3]["content"], failed[0]["data"]["feedback"]);

    let hopeless = READER.replace("driver: react", "driver: react\nreact: {max_retries: 1}");
    let service = saying(&hopeless, &["No."]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["termination_reason"], &run["error"]["code"]),
        (&json!("invalid_response"), &json!("INVALID_RESPONSE"))
    );
    assert_eq!((&run["iterations"], &run["raw_response"]), (&json!(2), &json!("No.")), "{run:#}");
}

async fn a_killed_service_goes_on_deciding(db: Db) {
    let steps = |delay_ms: u32| {
        let last = json!({"text": DONE, "delay_ms": delay_ms});
        json!({"steps": [{"text": "Hm."}, {"text": LOOK}, {"text": "Hm."}, last]}).to_string()
    };
    let mut service = Setup::new()
        .agent("reader", READER)
        .scenario("reader", &steps(600_000))
        .file("notes.txt", "seventeen\n")
        .start(db)
        .await;
    let id = "0197aaaa-0000-7000-8000-00000000000d";
    let start = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative");
    let start = start.header("Prefer", "respond-async").json(&json!({"run_id": id}));
    assert_eq!(start.send().await.unwrap().status(), 202);
    let is_last = |events: &Value| {
        let events = events["data"].as_array().unwrap();
        events.iter().filter(|e| e["type"] == "decision.extraction_failed").count() == 2
    };
    service.until(&format!("/v1/runs/{id}/events"), is_last).await;
    service.kill().await;
    service.write("scenarios/reader.yaml", &steps(0));
    service.restart().await;
    let run = service.until(&format!("/v1/runs/{id}"), |run| run["status"] == "completed").await;
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "seventeen"}), &json!(4)),
        "{run:#}"
    );
    let journal = events(&service, &json!({"run_id": id})).await;
    let kinds = types(&journal);
    assert!(kinds.contains(&"run.resumed"), "{kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| **kind == "tool_call.completed").count(), 1, "{kinds:?}");
}

const EXTRACTOR: &str = "
output:
  schema: {type: object, required: [total], properties: {total: {type: integer, minimum: 1}}, additionalProperties: false}
";

async fn an_output_is_the_final_answer(db: Db) {
    let answer = |answer: &str| format!(r#"{{"type": "final_answer", "answer": {answer}}}"#);
    let (wrong, right) = (answer(r#"{"total": 0}"#), answer(r#""{\"total\": 17}""#));
    let service = saying(&format!("{READER}{EXTRACTOR}"), &[LOOK, &wrong, &right]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["output"], &run["attempts"]), (&json!({"total": 17}), &json!(2)), "{run:#}");
    let journal = events(&service, &run).await;
    let failed = journal.iter().find(|event| event["type"] == "validation.failed").unwrap();
    let feedback = failed["data"]["feedback"].as_str().unwrap();
    assert!(feedback.contains("/total") && feedback.contains("final_answer"), "{feedback}");
    assert!(
        journal[0]["data"]["system"].as_str().unwrap().contains("`final_answer`"),
        "{:#}",
        journal[0]
    );
}

async fn a_reflected_output_is_given_by_calls(db: Db) {
    let call = |tool: &str, args: &str| {
        format!(r#"{{"type": "call_tool", "tool": "{tool}", "args": {args}}}"#)
    };
    let (output, submit) = (call("output", r#"{"total": 17}"#), call("submit", "{}"));
    let reflection = "  reflection: {template: 'It is {{ output.total }}.'}\n";
    let agent = format!("{READER}{EXTRACTOR}{reflection}");
    let service = saying(&agent, &[DONE, &output, &submit]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["output"], &run["attempts"]), (&json!({"total": 17}), &json!(2)), "{run:#}");
    let journal = events(&service, &run).await;
    let data = |kind: &str| {
        journal.iter().find(|event| event["type"] == kind).map(|event| event["data"].clone())
    };
    let feedback = data("validation.failed").unwrap()["feedback"].clone();
    let feedback = feedback.as_str().unwrap();
    for part in ["`final_answer` is not accepted", "`output`", "`submit`"] {
        assert!(feedback.contains(part), "{part} in {feedback}");
    }
    assert_eq!(data("output.reflected").unwrap()["content"], "It is 17.");
    let system = data("run.started").unwrap()["system"].clone();
    let system = system.as_str().unwrap();
    assert!(system.contains("`submit`") && !system.contains("final_answer"), "{system}");
}

async fn a_choice_is_kept_by_asking_and_checking(db: Db) {
    let agent = format!("{READER}tool_choice: first_required\nstrict_tool_choice: true\n");
    let service = saying(&agent, &[DONE, "no", LOOK, DONE]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "seventeen"}), &json!(4)),
        "{run:#}"
    );
    let journal = events(&service, &run).await;
    assert!(types(&journal).contains(&"validation.failed"), "{:?}", types(&journal));
    let lenient = saying(&format!("{READER}tool_choice: first_required\n"), &[DONE, DONE]);
    let lenient = lenient.start(db).await;
    let run = lenient.run("reader", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(2)), "{run:#}");
    assert!(run["warnings"][0].as_str().unwrap().contains("the answer was accepted"), "{run:#}");
    let run = service.run("reader", &json!({"tool_choice": "none"})).await;
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "seventeen"}), &json!(1)),
        "{run:#}"
    );
}

async fn an_answer_can_be_written_by_a_call_of_its_own(db: Db) {
    let agent = format!("{READER}react: {{final_via_inference: true}}\n");
    let service = saying(&agent, &[LOOK, DONE, "It holds the number {seventeen}."]).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "It holds the number {seventeen}."}), "{run:#}");
    let journal = events(&service, &run).await;
    let asked: Vec<&Value> =
        journal.iter().filter(|event| event["type"] == "iteration.started").collect();
    assert_eq!((asked.len(), &asked[2]["data"]["answer_only"]), (3, &json!(true)));
    assert!(asked[1]["data"].get("answer_only").is_none());

    let service = saying(&format!("{agent}{EXTRACTOR}"), &[DONE, "```json\n{\"total\": 17}\n```"])
        .start(db)
        .await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["output"], &run["iterations"]), (&json!({"total": 17}), &json!(2)), "{run:#}");
}

async fn decisions_have_fields_of_the_author(db: Db) {
    let look = |fields: &str| {
        let look = LOOK.strip_prefix('{').unwrap();
        format!("{{{fields}{look}")
    };
    let agent = format!(
        "{READER}react:\n  decision_schema: {{type: object, required: [confidence], \
         additionalProperties: false, properties: {{confidence: {{type: number, maximum: 1}}}}}}\n"
    );
    let says = [
        LOOK.to_owned(),
        look(r#""confidence": 20, "why": 3, "#),
        look(r#""confidence": 0.2, "#),
        r#"{"type": "final_answer", "answer": "seventeen", "confidence": 1}"#.to_owned(),
    ];
    let service = saying(&agent, &says.each_ref().map(String::as_str)).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["output"], &run["iterations"]),
        (&json!({"result": "seventeen"}), &json!(4)),
        "{run:#}"
    );
    let journal = events(&service, &run).await;
    let data = |kind: &str| -> Vec<&Value> {
        journal.iter().filter(|event| event["type"] == kind).map(|event| &event["data"]).collect()
    };
    let told = data("decision.validation_failed");
    let told: Vec<&str> = told.iter().map(|data| data["feedback"].as_str().unwrap()).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert!(told[0].contains("\"confidence\" is a required property"), "{told:?}");
    assert!(told[1].contains("at /confidence: ") && told[1].contains("'why'"), "{told:?}");
    let kept = data("model.responded");
    assert_eq!(kept[2]["message"]["decision"], look(r#""confidence": 0.2, "#).as_str());
    let called = data("tool_call.started");
    assert_eq!(called.len(), 1, "only what was decided as asked is executed: {called:?}");
}

async fn another_model_can_write_the_answer(db: Db) {
    let mock = MockModel::start().await;
    let gone = Reply::error(404, "model_not_found", None);
    let [done, wrong, right, own] =
        [DONE, r#"{"total": 0}"#, r#"{"total": 17}"#, "Own."].map(Reply::text);
    mock.script([done.clone(), wrong, done.clone(), right, done, gone, own]);
    let agent = READER.replace("scripted/reader", "mock/small");
    let agent = format!(
        "{agent}sampling: {{temperature: 0.1, seed: 7}}\nreact: {{final_via_inference: true, \
         final_model: mock/writer, final_sampling: {{temperature: 0.9, max_output_tokens: 300}}}}\n"
    );
    let models = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let service = Setup::new()
        .agent("extractor", &format!("{agent}{EXTRACTOR}"))
        .agent("plain", &agent)
        .config(&models)
        .start(db)
        .await;
    let run = service.run("extractor", &json!({})).await;
    assert_eq!((&run["output"], &run["model"]), (&json!({"total": 17}), &json!("mock/writer")));
    let run = service.run("plain", &json!({})).await;
    assert_eq!((&run["output"], &run["model"]), (&json!({"result": "Own."}), &json!("mock/small")));
    assert_eq!(mock.refusals(), Vec::<String>::new());
    let requests = mock.requests();
    let asked: Vec<(&str, f64)> = requests
        .iter()
        .map(|seen| {
            (seen.body["model"].as_str().unwrap(), seen.body["temperature"].as_f64().unwrap())
        })
        .collect();
    let (small, writer) = (("small", 0.1), ("writer", 0.9));
    // The second attempt is the first model's again; where the writer is gone, it takes over.
    assert_eq!(asked, [small, writer, small, writer, small, writer, ("small", 0.9)]);
    assert!(requests.iter().all(|seen| seen.body["seed"] == 7), "what is not set differently");
    assert_eq!(requests[1].body["max_completion_tokens"], 300);
}

async fn the_model_sees_text_alone(db: Db) {
    let mock = MockModel::start().await;
    mock.script([LOOK, "Well.", DONE].map(Reply::text));
    let agent = READER.replace("scripted/reader", "mock/small");
    let agent = format!("{agent}tool_choice: first_required\nparallel_tool_calls: true\n");
    let models = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url());
    let setup =
        Setup::new().agent("reader", &agent).config(&models).file("notes.txt", "seventeen\n");
    let service = setup.start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["output"], &run["warnings"]),
        (&json!({"result": "seventeen"}), &json!([])),
        "{run:#}"
    );
    assert_eq!(mock.refusals(), Vec::<String>::new());
    let requests = mock.requests();
    assert_eq!(requests.len(), 3);
    for request in &requests {
        for field in ["tools", "tool_choice", "parallel_tool_calls"] {
            assert!(request.body.get(field).is_none(), "{field} in {:#}", request.body);
        }
        let system = request.messages()[0]["content"].as_str().unwrap();
        for part in [
            "- file_ops: ",
            "\"operation\"",
            "\"type\": \"call_tool\"",
            "\"type\": \"final_answer\"",
        ] {
            assert!(system.contains(part), "{part} in {system}");
        }
    }
    let said = |request: usize| -> Vec<(&str, &str)> {
        let messages = requests[request].messages()[1..].iter();
        messages.map(|m| (m["role"].as_str().unwrap(), m["content"].as_str().unwrap())).collect()
    };
    assert_eq!(said(0), [("user", "{}\n\nYour next decision must be a `call_tool`.")]);
    let [("user", "{}"), ("assistant", LOOK), ("user", observed)] = said(1)[..] else {
        panic!("{:?}", said(1))
    };
    assert!(observed.starts_with("Observation: ") && observed.contains("seventeen"), "{observed}");
    let [_, _, _, ("assistant", "Well."), ("user", told)] = said(2)[..] else {
        panic!("{:?}", said(2))
    };
    assert!(told.contains("it holds no JSON object"), "{told}");
}

async fn a_call_at_a_limit_is_no_answer(db: Db) {
    let service = saying(&format!("{READER}on_limit: answer\n"), &[LOOK]).start(db).await;
    let run = service.run("reader", &json!({"max_iterations": 2})).await;
    assert_eq!(
        (&run["status"], &run["error"]["code"], &run["output"]),
        (&json!("failed"), &json!("MAX_ITERATIONS"), &Value::Null),
        "{run:#}"
    );
    assert_eq!((&run["iterations"], &run["tool_calls_made"]), (&json!(3), &json!(2)), "{run:#}");
    let journal = events(&service, &run).await;
    let kept: Vec<&Value> =
        journal.iter().filter(|event| event["type"] == "model.responded").collect();
    assert_eq!(kept[2]["data"]["message"]["decision"], LOOK, "{kept:#?}");
}
