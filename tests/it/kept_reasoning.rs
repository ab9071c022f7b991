//! Reasoning that goes back to its model: it takes room in the context window and in a session's
//! history, and only the API that it came from is sent it.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::mock_anthropic;
use crate::mock_model::{MockModel, Reply};
use crate::mock_server::{self, MockServer};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_run_that_reasons_at_length_is_compacted,
    a_history_counts_reasoning,
    a_session_goes_on_after_a_context_overflow,
    a_long_last_answer_of_a_session_is_summarised,
    a_provider_of_another_kind_is_sent_no_blocks_of_the_first,
}

const AGENT: &str = "
model: mock/thinker
tools: [file_ops]
limits: {max_iterations: 60, max_iterations_per_attempt: 60}
enable_double_confirmation: false
governance: {autonomy: full, paths: {read: [\"./**\"], write: [\"./**\"]}}
";

/// Tokens of the context window.
const WINDOW: usize = 8000;

fn models(mock: &MockModel, kind: &str) -> String {
    format!(
        "[models.mock]\nkind = \"{kind}\"\nbase_url = \"{}\"\nmax_retries = 0\n",
        mock.base_url()
    )
}

fn size(request: &Value) -> usize {
    request["messages"].to_string().len() / 4
}

/// Chat Completions: an answer of this message, with its true usage.
fn says(request: &Value, message: &Value) -> Reply {
    let reason = if message["tool_calls"].is_array() { "tool_calls" } else { "stop" };
    let read = size(request);
    let usage =
        json!({"prompt_tokens": read, "completion_tokens": 800, "total_tokens": read + 800});
    let choice = json!({"index": 0, "message": message, "finish_reason": reason});
    Reply::Raw(json!({"choices": [choice], "usage": usage}).to_string())
}

/// A call with reasoning of so many bytes.
fn thinks(number: usize, bytes: usize) -> Value {
    let arguments = json!({"operation": "write", "path": format!("{number}.txt"), "content": "x"});
    let function = json!({"name": "file_ops", "arguments": arguments.to_string()});
    let call = json!({"id": format!("call_{number}"), "type": "function", "function": function});
    json!({"role": "assistant", "content": null, "reasoning_content": "r".repeat(bytes), "tool_calls": [call]})
}

fn text(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

fn too_long() -> Reply {
    Reply::error(400, "context_length_exceeded", None)
}

/// Only a model that writes a summary is offered no tools.
fn is_summary(request: &Value) -> bool {
    !request["tools"].is_array()
}

async fn events(service: &Service, run: &Value, kind: &str) -> Vec<Value> {
    let path = format!("/v1/runs/{}/events?limit=200", run["run_id"].as_str().unwrap());
    let page = service.get(&path).await.body;
    let events = page["data"].as_array().unwrap().iter();
    events.filter(|event| event["type"] == kind).map(|event| event["data"].clone()).collect()
}

async fn a_run_that_reasons_at_length_is_compacted(db: Db) {
    let mock = MockModel::start().await;
    let steps = AtomicUsize::new(0);
    mock.reply_by(move |request| {
        if size(request) > WINDOW {
            return too_long();
        }
        if is_summary(request) {
            return says(request, &text("what was done"));
        }
        match steps.fetch_add(1, Ordering::Relaxed) {
            15.. => says(request, &text("done")),
            step => says(request, &thinks(step, 3000)),
        }
    });
    let window = format!("[capabilities.\"mock/*\"]\ncontext_window = {WINDOW}\n");
    let config = models(&mock, "openai") + &window;
    let service = Setup::new().agent("thinker", AGENT).config(&config).start(db).await;
    let run = service.run("thinker", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(16)), "{run:#}");
    let compacted = events(&service, &run, "context.compacted").await;
    assert!(!compacted.is_empty());
    for compacted in &compacted {
        let number = |field: &str| compacted[field].as_u64().unwrap();
        assert!(number("tokens_after") <= number("tokens_before") * 3 / 4, "{compacted:#}");
        assert_eq!(compacted["cause"], "window_nearly_full");
    }
}

async fn a_history_counts_reasoning(db: Db) {
    let mock = MockModel::start().await;
    let steps = AtomicUsize::new(0);
    mock.reply_by(move |request| match steps.fetch_add(1, Ordering::Relaxed) {
        step if step % 2 == 0 => says(request, &thinks(step, 5400)),
        _ => says(request, &text("done")),
    });
    let agent = format!("{AGENT}history: {{max_runs: 20, max_tokens: 2000}}\n");
    let config = models(&mock, "openai");
    let service = Setup::new().agent("thinker", &agent).config(&config).start(db).await;
    for number in 0..4 {
        let run = service.run("thinker", &json!({"session_id": "s"})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
        let loaded = events(&service, &run, "session.loaded").await;
        let runs: Vec<u64> = loaded.iter().map(|loaded| loaded["runs"].as_u64().unwrap()).collect();
        assert_eq!(runs, if number == 0 { vec![] } else { vec![1] });
        let tokens = loaded.iter().map(|loaded| loaded["tokens"].as_u64().unwrap());
        assert!(tokens.into_iter().all(|tokens| (1300..=2000).contains(&tokens)), "{loaded:#?}");
    }
}

/// Runs of a session whose first answer has this many bytes, against a window of so many tokens
/// that is not known; their statuses.
async fn statuses(db: Db, bytes: usize, window: usize) -> Vec<String> {
    let mock = MockModel::start().await;
    let answers = AtomicUsize::new(0);
    mock.reply_by(move |request| {
        if size(request) > window {
            return too_long();
        }
        if is_summary(request) {
            return says(request, &text("what was said"));
        }
        let first = answers.fetch_add(1, Ordering::Relaxed) == 0;
        says(request, &if first { text(&"l".repeat(bytes)) } else { text("short") })
    });
    let config = models(&mock, "openai");
    let service = Setup::new().agent("thinker", AGENT).config(&config).start(db).await;
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let run = service.run("thinker", &json!({"session_id": "s"})).await;
        let code = run["error"]["code"].as_str().map(str::to_owned);
        statuses.push(code.unwrap_or_else(|| run["status"].as_str().unwrap().to_owned()));
    }
    statuses
}

async fn a_session_goes_on_after_a_context_overflow(db: Db) {
    let expected = ["completed", "CONTEXT_OVERFLOW", "completed", "completed"];
    assert_eq!(statuses(db, 60_000, 3000).await, expected);
}

async fn a_long_last_answer_of_a_session_is_summarised(db: Db) {
    assert_eq!(statuses(db, 60_000, 12_000).await, ["completed"; 4]);
}

async fn a_provider_of_another_kind_is_sent_no_blocks_of_the_first(db: Db) {
    let read = json!({"operation": "read", "path": "notes.txt"});
    let there =
        [mock_server::Reply::call("file_ops", read.clone()), mock_server::Reply::text("seventeen")];
    let anthropic =
        MockServer::start(mock_anthropic::API, there.clone().into_iter().chain(there)).await;
    let responses = MockModel::start().await;
    let answers = || [Reply::call("file_ops", &read), Reply::text("seventeen")];
    responses.script(answers().into_iter().chain(answers()));
    let of_anthropic = format!(
        "[models.mock]\nkind = \"anthropic\"\nbase_url = \"{}\"\nheaders = {{ x-api-key = \"k\" }}\n",
        anthropic.base_url
    );
    let capabilities = "[capabilities.\"mock/*\"]\nthinking = \"budget\"\n";
    let agent = format!("{AGENT}thinking: {{budget_tokens: 2000, effort: low}}\n")
        .replace("mock/thinker", "mock/claude-sonnet-4-5");
    let of_responses =
        models(&responses, "openai-responses") + &capabilities.replace("budget", "effort");
    let of_anthropic = of_anthropic + capabilities;
    let mut service = Setup::new()
        .agent("thinker", &agent)
        .file("notes.txt", "seventeen\n")
        .config(&of_anthropic)
        .start(db)
        .await;
    let path = service.dir.path().join("toolloop.toml");
    let config = std::fs::read_to_string(&path).unwrap();
    for of_kind in [&of_anthropic, &of_responses, &of_anthropic, &of_responses] {
        service.kill().await;
        std::fs::write(&path, config.replace(&of_anthropic, of_kind)).unwrap();
        service.restart().await;
        let run = service.run("thinker", &json!({"session_id": "s"})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    assert_eq!(responses.refusals(), Vec::<String>::new(), "every request was a valid one");
    let last = anthropic.requests().pop().unwrap().to_string();
    assert!(last.contains("signature"), "its own thinking goes back: {last}");
    let last = responses.requests().pop().unwrap().body.to_string();
    assert!(last.contains("gAAAA"), "its own reasoning goes back: {last}");
}
