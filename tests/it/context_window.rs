//! Conversations that outgrow their model's context window, as a caller sees them.

use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    old_results_are_cleared,
    old_turns_are_summarised,
    a_summary_counts_against_the_budget,
    a_summary_is_asked_for_again_only_if_the_budget_pays_for_it,
    a_refused_call_is_repeated_with_less,
    a_conversation_that_cannot_be_compacted_overflows,
    a_large_last_result_is_cleared_for_a_refused_call,
    a_summary_of_next_to_nothing_is_not_paid_for,
    a_fallback_may_have_a_larger_window,
    a_crash_after_a_compaction_changes_nothing,
}

const AGENT: &str = "
model: scripted/reader
tools: [file_ops]
enable_double_confirmation: false
";

const WINDOW: &str = "[capabilities.\"scripted/*\"]\ncontext_window = 10000";

/// A step that reads 2000 bytes, after which the model has taken so many tokens.
fn read(tokens: u32) -> String {
    let call = "{tool: file_ops, arguments: {operation: read, path: big.txt}}";
    format!("{{tool_calls: [{call}], usage: {{input_tokens: {tokens}, output_tokens: 10}}}}")
}

fn say(text: &str, tokens: u32) -> String {
    format!("{{text: {text}, usage: {{input_tokens: {tokens}, output_tokens: 10}}}}")
}

const TOO_LONG: &str = "{error: {status: 400, code: context_length_exceeded, message: too long}}";

fn setup(steps: &[String]) -> Setup {
    let scenario = format!("steps: [{}]", steps.join(", "));
    Setup::new()
        .agent("reader", AGENT)
        .scenario("reader", &scenario)
        .file("big.txt", &"seventeen\n".repeat(200))
}

async fn part(service: &Service, run: &Value, part: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/{part}?limit=100", run["run_id"].as_str().unwrap());
    service.get(&path).await.body["data"].as_array().unwrap().clone()
}

async fn compactions(service: &Service, run: &Value) -> Vec<Value> {
    let events = part(service, run, "events").await.into_iter();
    events
        .filter(|event| event["type"] == "context.compacted")
        .map(|event| event["data"].clone())
        .collect()
}

fn roles(messages: &[Value]) -> Vec<&str> {
    messages.iter().map(|message| message["role"].as_str().unwrap()).collect()
}

async fn old_results_are_cleared(db: Db) {
    let steps = [read(1000), read(2000), read(7900), say("done", 5000)];
    let service = setup(&steps).config(WINDOW).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(4)), "{run:#}");
    let compacted = compactions(&service, &run).await;
    assert_eq!(compacted.len(), 1, "{compacted:#?}");
    let compacted = &compacted[0];
    assert_eq!(
        (&compacted["cause"], &compacted["iteration"]),
        (&json!("window_nearly_full"), &json!(4))
    );
    assert_eq!((&compacted["summary"], &compacted["window"]), (&Value::Null, &json!(10_000)));
    let number = |field: &str| compacted[field].as_u64().unwrap();
    assert!(number("tokens_before") > 8000 && number("tokens_after") < 8000, "{compacted:#}");
    let messages = part(&service, &run, "messages").await;
    let expected = [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ];
    assert_eq!(roles(&messages), expected);
    let iterations = part(&service, &run, "iterations").await;
    let told = &iterations[3]["compactions"][0];
    assert_eq!(
        (&told["cause"], &told["cleared_results"], &told["usage"]),
        (&json!("window_nearly_full"), &json!(1), &Value::Null),
        "{iterations:#?}"
    );
    assert_eq!(iterations[2]["compactions"], json!([]));
    let is_marked = |message: &&Value| message["compacted"] == true;
    let marked: Vec<&Value> = messages.iter().filter(is_marked).collect();
    assert_eq!(marked, [&messages[3]], "only what was cleared");
    assert_eq!(messages[3]["tool_call_id"], messages[2]["tool_calls"][0]["id"]);
    assert_eq!(compacted["cleared"], json!([messages[3]["tool_call_id"]]));
    for kept in [&messages[3], &messages[5], &messages[7]] {
        assert!(kept["content"].as_str().unwrap().contains("seventeen"), "{kept}");
    }
    // What the calls brought is still on record.
    let calls = part(&service, &run, "tool-calls").await;
    assert_eq!(calls.len(), 3, "{calls:#?}");
    assert!(calls.iter().all(|call| call["result"].as_str().unwrap().contains("seventeen")));
}

fn summarised() -> Vec<String> {
    vec![read(1000), read(2000), read(12_000), say("it says seventeen", 3000), say("done", 100)]
}

async fn old_turns_are_summarised(db: Db) {
    let refused =
        summarised().join(", ").replace("seventeen,", "seventeen, finish_reason: refusal,");
    let service = setup(&summarised())
        .agent("refused", &AGENT.replace("scripted/reader", "scripted/refused"))
        .scenario("refused", &format!("steps: [{refused}]"))
        .config(WINDOW)
        .start(db)
        .await;
    let run = service.run("refused", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "done"}), "{run:#}");
    let compacted = compactions(&service, &run).await;
    let (summary, call) = (&compacted[0]["summary"], &compacted[0]["call"]["model"]);
    assert_eq!((summary, call), (&Value::Null, &json!("refused")), "a refusal is no summary");

    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(4)), "{run:#}");
    assert_eq!(run["output"], json!({"result": "done"}));
    assert_eq!(run["usage"]["total_tokens"], 1000 + 2000 + 12_000 + 3000 + 100 + 50);
    let compacted = compactions(&service, &run).await;
    assert_eq!(compacted.len(), 1, "{compacted:#?}");
    assert_eq!(compacted[0]["summary"]["turns"], 1);
    assert_eq!(
        (&compacted[0]["call"]["model"], &compacted[0]["cleared"]),
        (&json!("reader"), &json!([]))
    );
    let messages = part(&service, &run, "messages").await;
    assert_eq!(
        roles(&messages),
        [
            "system",
            "user",
            "assistant",
            "tool",
            "user",
            "assistant",
            "tool",
            "assistant",
            "tool",
            "assistant"
        ]
    );
    let marked: Vec<bool> = messages.iter().map(|message| message["compacted"] == true).collect();
    let expected = [false, false, true, true, false, false, false, false, false, false];
    assert_eq!(marked, expected, "what the summary stands for: {messages:#?}");
    assert!(messages[3]["content"].as_str().unwrap().contains("seventeen"), "as it was");
    let iterations = part(&service, &run, "iterations").await;
    let told = &iterations.last().unwrap()["compactions"][0];
    assert_eq!(
        (&told["summarised_turns"], &told["usage"]["total_tokens"]),
        (&json!(1), &json!(3010)),
        "{iterations:#?}"
    );
    let summary = messages[4]["content"].as_str().unwrap();
    assert!(summary.starts_with("[Summary") && summary.ends_with("it says seventeen"), "{summary}");
}

async fn a_summary_counts_against_the_budget(db: Db) {
    let long =
        [read(1000), read(2000), read(12_000), say("it says seventeen", 18_000), say("done", 100)];
    let service = setup(&long).config(WINDOW).start(db).await;
    let run = service.run("reader", &json!({"budget": {"max_total_tokens": 32_000}})).await;
    assert_eq!(
        (&run["termination_reason"], &run["iterations"]),
        (&json!("budget_exceeded"), &json!(3)),
        "{run:#}"
    );
    assert_eq!(run["error"]["context"]["used"], 33_040);
}

async fn a_summary_is_asked_for_again_only_if_the_budget_pays_for_it(db: Db) {
    let mock = MockModel::start().await;
    let answer = |choices: Value, tokens: u32| {
        let usage = json!({"prompt_tokens": tokens, "completion_tokens": 10});
        let answer = json!({"object": "chat.completion", "choices": choices, "usage": usage});
        Reply::Raw(answer.to_string())
    };
    let read = |tokens: u32| {
        let arguments = json!({"operation": "read", "path": "big.txt"}).to_string();
        let function = json!({"name": "file_ops", "arguments": arguments});
        let call = json!({"id": format!("c{tokens}"), "type": "function", "function": function});
        let message = json!({"content": null, "tool_calls": [call]});
        answer(json!([{"message": message, "finish_reason": "tool_calls"}]), tokens)
    };
    mock.script([read(1000), read(2000), read(12_000), answer(json!([]), 15_000)]);
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n{}",
        mock.base_url(),
        WINDOW.replace("scripted", "mock")
    );
    let setup = setup(&summarised()).config(&config);
    let agent = AGENT.replace("scripted/reader", "mock/reader");
    let service = setup.agent("asker", &agent).start(db).await;
    let run = service.run("asker", &json!({"budget": {"max_total_tokens": 40_000}})).await;
    assert_eq!(run["termination_reason"], "budget_exceeded", "{run:#}");
    assert_eq!((mock.requests().len(), &run["tokens_used"]), (4, &json!(30_040)), "{run:#}");
}

fn refused_once() -> Vec<String> {
    let first = [read(1000), read(2000), read(3000), TOO_LONG.to_owned()];
    [&first[..], &[say("it says seventeen", 500), say("done", 100)]].concat()
}

async fn a_refused_call_is_repeated_with_less(db: Db) {
    let service = setup(&refused_once()).start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(4)), "{run:#}");
    assert_eq!(run["output"], json!({"result": "done"}));
    let compacted = compactions(&service, &run).await;
    assert_eq!(compacted.len(), 1, "{compacted:#?}");
    let compacted = &compacted[0];
    assert_eq!(
        (&compacted["cause"], &compacted["failed_tries"]),
        (&json!("provider_refused"), &json!(1))
    );
    assert_eq!((&compacted["window"], &compacted["summary"]["turns"]), (&Value::Null, &json!(1)));
}

async fn a_conversation_that_cannot_be_compacted_overflows(db: Db) {
    let twice = [&refused_once()[..5], &[TOO_LONG.to_owned()]].concat();
    for (steps, tried) in [(vec![TOO_LONG.to_owned()], 0), (twice, 1)] {
        let service = setup(&steps).start(db).await;
        let run = service.run("reader", &json!({})).await;
        assert_eq!(
            (&run["status"], &run["termination_reason"]),
            (&json!("failed"), &json!("context_overflow"))
        );
        let error = &run["error"];
        assert_eq!(error["code"], "CONTEXT_OVERFLOW");
        assert_eq!(error["context"]["provider_code"], "context_length_exceeded", "{error:#}");
        assert_eq!(compactions(&service, &run).await.len(), tried);
    }
}

async fn a_large_last_result_is_cleared_for_a_refused_call(db: Db) {
    for reads in [1, 2] {
        let reads = vec![read(1000); reads];
        let steps = [reads, vec![TOO_LONG.to_owned(), say("done", 100)]].concat();
        let service = setup(&steps).file("big.txt", &"seventeen\n".repeat(1500)).start(db).await;
        let run = service.run("reader", &json!({})).await;
        assert_eq!(run["output"], json!({"result": "done"}), "{run:#}");
        let compacted = compactions(&service, &run).await;
        assert_eq!(compacted.len(), 1, "{compacted:#?}");
        let compacted = &compacted[0];
        assert_eq!(
            (&compacted["cause"], &compacted["call"]),
            (&json!("provider_refused"), &Value::Null)
        );
        let size = |field: &str| compacted[field].as_u64().unwrap();
        assert!(size("bytes_after") + 14_000 < size("bytes_before"), "{compacted:#}");
        let messages = part(&service, &run, "messages").await;
        let marked = messages.iter().filter(|message| message["compacted"] == true);
        assert_eq!(marked.count(), compacted["cleared"].as_array().unwrap().len());
    }
}

async fn a_summary_of_next_to_nothing_is_not_paid_for(db: Db) {
    let tiny = "{tool_calls: [{tool: file_ops, arguments: {operation: read, path: tiny.txt}}]}";
    let steps = [vec![tiny.to_owned(); 4], vec![TOO_LONG.to_owned(), say("done", 100)]].concat();
    let service = setup(&steps).file("tiny.txt", "17").start(db).await;
    let run = service.run("reader", &json!({})).await;
    assert_eq!(
        (&run["error"]["code"], &run["iterations"]),
        (&json!("CONTEXT_OVERFLOW"), &json!(4)),
        "{run:#}"
    );
    assert_eq!(compactions(&service, &run).await, Vec::<Value>::new());
}

async fn a_fallback_may_have_a_larger_window(db: Db) {
    let agent = format!("{AGENT}fallback_models: [scripted/larger]\n");
    let setup = setup(&[TOO_LONG.to_owned()]).agent("patient", &agent);
    let service = setup
        .scenario("larger", "steps: [{text: nobody asks}, {text: done}]")
        .config("[capabilities.\"scripted/larger\"]\ncontext_window = 20000")
        .start(db)
        .await;
    let run = service.run("patient", &json!({})).await;
    assert_eq!(
        (&run["status"], &run["model"]),
        (&json!("completed"), &json!("scripted/larger")),
        "{run:#}"
    );
    assert_eq!(run["output"], json!({"result": "done"}));
    let events = part(&service, &run, "events").await;
    let answer = events.iter().find(|event| event["type"] == "model.responded").unwrap();
    assert_eq!(answer["data"]["window"], 20_000, "that of the model that answered");
}

async fn a_crash_after_a_compaction_changes_nothing(db: Db) {
    let mut steps = summarised();
    "{text: done, delay_ms: 600000}".clone_into(&mut steps[4]);
    let mut service =
        setup(&steps).config(WINDOW).config("[runtime]\nlease = \"2s\"").start(db).await;
    let id = "0197bbbb-0000-7000-8000-000000000001";
    let start = service.request(reqwest::Method::POST, "/v1/agents/reader/invoke-iterative");
    let call = tokio::spawn(start.json(&json!({"run_id": id})).send());
    let is_compacted = |page: &Value| {
        page["data"]
            .as_array()
            .is_some_and(|events| events.iter().any(|event| event["type"] == "context.compacted"))
    };
    service.until(&format!("/v1/runs/{id}/events?limit=100"), is_compacted).await;
    let run = json!({"run_id": id});
    let before = part(&service, &run, "messages").await;
    service.kill().await;
    assert!(call.await.unwrap().is_err(), "the connection died with the process");
    service.write("scenarios/reader.yaml", &format!("steps: [{}]", summarised().join(", ")));
    service.restart().await;
    let run = service.until(&format!("/v1/runs/{id}"), |run| run["finished_at"].is_string()).await;
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"result": "done"})),
        "{run:#}"
    );
    assert_eq!(compactions(&service, &run).await.len(), 1);
    let after = part(&service, &run, "messages").await;
    assert_eq!(after[..before.len()], before, "the model goes on with the same conversation");
}
