//! The Responses API against a server that checks every request: a whole run, streamed answers, bad
//! days.

use std::time::Duration;

use futures::{StreamExt as _, stream};
use serde_json::{Value, json};
use toolloop::message::FinishReason;
use toolloop::providers::FailureKind;
use toolloop::providers::adapter::HttpProvider;
use toolloop::providers::responses;

use crate::mock_model::{After, MockModel, Reply};
use crate::openai_streams::{KEY, follow, put_together, settings};
use crate::service::{Db, Setup, on_both_stores};

on_both_stores! {
    a_run_gives_reasoning_back_byte_for_byte,
}

const TOOLS: &[u8] = include_bytes!("../cassettes/openai/responses_tools.sse");
const READER: &str = "
model: mock/gpt-5.2
instructions: Read the files.
inputs: {type: object, required: [task], properties: {task: {type: string}}}
tools: [file_ops]
thinking: {effort: low}
enable_double_confirmation: false
";

fn responses(mock: &MockModel) -> HttpProvider {
    responses::provider(settings(mock.base_url(), Duration::from_secs(30))).unwrap()
}

async fn a_run_gives_reasoning_back_byte_for_byte(db: Db) {
    let mock = MockModel::start().await;
    let server = |name: &str, kind: &str| {
        format!("[models.{name}]\nkind = \"{kind}\"\nbase_url = \"{}\"\n", mock.base_url())
    };
    let models = server("mock", "openai-responses") + &server("chat", "openai");
    let service = Setup::new()
        .agent("reader", READER)
        .agent("falls", &format!("{READER}fallback_models: [mock/gpt-4.1]\n"))
        .agent("chats", &READER.replace("mock/gpt-5.2", "chat/deepseek"))
        .file("notes.txt", "seventeen\n")
        .config(&models)
        .start(db)
        .await;
    let read = json!({"operation": "read", "path": "notes.txt"}).to_string();
    mock.script([
        Reply::ToolCalls(vec![("file_ops".into(), read), ("file_ops".into(), "{not json".into())]),
        Reply::text("{\"read\": 17}"),
    ]);
    let run = service.run("reader", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!(
        (&run["status"], &run["output"]),
        (&json!("completed"), &json!({"read": 17})),
        "{run:#}"
    );
    assert_eq!(mock.refusals(), Vec::<String>::new(), "every request was a valid one");
    let last = mock.requests().pop().unwrap().body;
    let kinds: Vec<&str> = last["input"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["type"].as_str().unwrap_or("user"))
        .collect();
    let expected = [
        "user",
        "reasoning",
        "function_call",
        "function_call",
        "function_call_output",
        "function_call_output",
    ];
    assert_eq!(kinds, expected);
    assert_eq!(last["input"][1]["encrypted_content"], "gAAAA\\u002b1");
    assert_eq!(last["reasoning"], json!({"effort": "low", "summary": "auto"}));
    let result = last["input"][4]["output"].as_str().unwrap();
    assert!(result.contains("\nseventeen\n"), "{result}");

    // Where a model that cannot reason takes over, it is sent none of it: the server refuses that.
    let read = json!({"operation": "read", "path": "notes.txt"});
    mock.script([
        Reply::call("file_ops", &read),
        Reply::error(404, "model_not_found", None),
        Reply::text("{\"read\": 17}"),
    ]);
    let run = service.run("falls", &json!({"inputs": {"task": "x"}})).await;
    let ended = (&run["status"], &run["model"], &run["output"]);
    let expected = (&json!("completed"), &json!("mock/gpt-4.1"), &json!({"read": 17}));
    assert_eq!(ended, expected, "{run:#}");

    // Servers that speak Chat Completions want theirs back, too.
    let (details, extra) = (
        json!([{"type": "reasoning.encrypted", "data": "x"}]),
        json!({"google": {"thought_signature": "s"}}),
    );
    let function = json!({"name": "file_ops", "arguments": read.to_string()});
    let call =
        json!({"id": "call_a", "type": "function", "function": function, "extra_content": extra});
    let thought = json!({"role": "assistant", "content": null, "reasoning_content": "Hm.",
        "reasoning_details": details, "tool_calls": [call]});
    let answer =
        json!({"choices": [{"index": 0, "message": thought, "finish_reason": "tool_calls"}]});
    mock.script([Reply::Raw(answer.to_string()), Reply::text("{\"read\": 17}")]);
    let run = service.run("chats", &json!({"inputs": {"task": "x"}})).await;
    assert_eq!((&run["status"], &run["output"]), (&json!("completed"), &json!({"read": 17})));
    assert_eq!(mock.requests().pop().unwrap().messages()[2], thought);
}

#[tokio::test]
async fn a_followed_answer_comes_in_pieces_that_add_up() {
    let mock = MockModel::start().await;
    let calls = vec![("mcp__time__now".to_owned(), r#"{"tz": "Europe/Zürich"}"#.to_owned()); 2];
    mock.script([Reply::text("It is noon."), Reply::ToolCalls(calls.clone())]);
    let provider = responses(&mock);
    let (answer, deltas) = follow(&provider).await;
    let answer = answer.unwrap();
    assert_eq!(
        (answer.text.as_str(), answer.thinking.as_deref()),
        ("It is noon.", Some("Thinking."))
    );
    assert_eq!(put_together(&deltas), (answer.text, Vec::new()));
    let (answer, deltas) = follow(&provider).await;
    assert_eq!(answer.unwrap().finish_reason, FinishReason::ToolCalls);
    assert_eq!(put_together(&deltas), (String::new(), calls));
    assert_eq!(mock.refusals(), Vec::<String>::new());
}

#[tokio::test]
async fn a_stream_cut_at_any_byte_is_a_passing_fault() {
    let mock = MockModel::start().await;
    let provider = responses(&mock);
    mock.script((0..TOOLS.len()).map(|end| Reply::bytes(&TOOLS[..end], After::End)));
    let cut = |_| async {
        let error = follow(&provider).await.0.expect_err("a cut stream was taken for complete");
        assert_eq!(error.kind, FailureKind::Transient, "{error}");
    };
    stream::iter(0..TOOLS.len()).map(cut).buffer_unordered(16).collect::<Vec<()>>().await;
    mock.script([Reply::byte_by_byte(TOOLS)]);
    assert_eq!(
        follow(&provider).await.0.unwrap().tool_calls.len(),
        2,
        "and whole, in drops, it is complete"
    );
}

#[tokio::test]
async fn failures_have_their_kind_and_tell_no_secret() {
    let mock = MockModel::start().await;
    let failed = |code: &str| {
        json!({"type": "response.failed", "response": {"id": "r", "status": "failed", "output": [],
            "error": {"code": code, "message": format!("failed for {KEY}")}}})
    };
    let table: [(Value, FailureKind); 4] = [
        (failed("server_error"), FailureKind::Transient),
        (failed("rate_limit_exceeded"), FailureKind::RateLimited),
        (failed("invalid_prompt"), FailureKind::BadRequest),
        (
            json!({"type": "error", "code": "insufficient_quota", "message": KEY}),
            FailureKind::QuotaExhausted,
        ),
    ];
    for (event, kind) in table {
        mock.script([Reply::bytes(format!("data: {event}\n\n").as_bytes(), After::End)]);
        let error = follow(&responses(&mock)).await.0.unwrap_err();
        assert!(error.kind == kind && !error.message.contains(KEY), "{error:?}");
    }
}
