//! Streamed answers over a real connection: whole, in drops, silent, broken, cut at every byte.

use std::sync::Mutex;
use std::time::Duration;
use toolloop::message::tool_schema::ToolSchema;

use axum::body::Bytes;
use futures::{StreamExt as _, stream};
use secrecy::SecretString;
use serde_json::{Value, json};
use toolloop::message::{Conversation, FinishReason};
use toolloop::providers::adapter::HttpProvider;
use toolloop::providers::openai;
use toolloop::providers::wire::WireSettings;
use toolloop::providers::{
    Capabilities, Completion, Delta, Deltas, FailureKind, ModelRequest, Options, Provider,
    ProviderError, ToolChoice, ToolOffer, WireNames,
};

use crate::mock_model::{After, MockModel, Reply};

pub(crate) const KEY: &str = "sk-do-not-tell-anybody";
const CHAT_TEXT: &[u8] = include_bytes!("../cassettes/openai/chat_text.sse");
const CHAT_TOOLS: &[u8] = include_bytes!("../cassettes/openai/chat_tools.sse");

/// For a server that is given up after this long without a byte.
pub(crate) fn settings(base_url: &str, patience: Duration) -> WireSettings {
    WireSettings {
        name: "mock".into(),
        base_url: base_url.parse().unwrap(),
        api_key: Some(SecretString::from(KEY)),
        missing_key: None,
        headers: Vec::new(),
        connect_timeout: Duration::from_secs(30),
        first_byte_timeout: patience,
        idle_timeout: patience,
    }
}

fn impatient(base_url: &str, patience: Duration) -> HttpProvider {
    openai::provider(settings(base_url, patience)).unwrap()
}

fn patient(mock: &MockModel) -> HttpProvider {
    impatient(mock.base_url(), Duration::from_mins(2))
}

/// Asks and follows.
pub(crate) async fn follow(
    provider: &dyn Provider,
) -> (Result<Completion, ProviderError>, Vec<Delta>) {
    let mut conversation = Conversation::new("be brief");
    conversation.push_user("hello");
    let schema = json!({"type": "object", "required": ["tz"], "additionalProperties": false,
        "properties": {"tz": {"type": "string"}}});
    let offer = ToolOffer {
        name: "mcp:time/now".into(),
        description: "Now.".into(),
        input_schema: ToolSchema::from(schema),
    };
    let heard = Mutex::new(Vec::new());
    let follower = |delta| heard.lock().unwrap().push(delta);
    let request = ModelRequest {
        model: "gpt",
        capabilities: &Capabilities { strict_schemas: true, ..Capabilities::OPENAI },
        conversation: &conversation,
        tools: &[offer],
        names: &WireNames::new(["mcp:time/now"]),
        tool_choice: ToolChoice::Auto,
        parallel_tool_calls: Some(false),
        temperature: Some(0.0),
        max_output_tokens: Some(100),
        output_left: None,
        thinking: None,
        prompt_caching: false,
        deltas: Deltas(Some(&follower)),
        output_schema: None,
        json_mode: false,
        options: Options::default(),
        inputs: &Value::Null,
        step: 1,
        trace: None,
    };
    let answer = provider.complete(&request).await;
    (answer, heard.into_inner().unwrap())
}

/// What the pieces add up to: text, and the calls' names and arguments.
pub(crate) fn put_together(deltas: &[Delta]) -> (String, Vec<(String, String)>) {
    let mut text = String::new();
    let mut calls: Vec<(String, String)> = Vec::new();
    for delta in deltas {
        match delta {
            Delta::Text(piece) => text.push_str(piece),
            Delta::Thinking(_) | Delta::Restarted => {}
            Delta::ToolCall { index, wire_name, arguments } => {
                calls.resize(calls.len().max(index + 1), Default::default());
                calls[*index].0.push_str(wire_name.as_deref().unwrap_or_default());
                calls[*index].1.push_str(arguments);
            }
        }
    }
    (text, calls)
}

#[tokio::test]
async fn a_followed_answer_comes_in_pieces_that_add_up() {
    let mock = MockModel::start().await;
    let calls = vec![("mcp__time__now".to_owned(), r#"{"tz": "Europe/Zürich"}"#.to_owned()); 2];
    mock.script([Reply::text("It is noon. Or later."), Reply::ToolCalls(calls.clone())]);
    let provider = patient(&mock);
    let (answer, deltas) = follow(&provider).await;
    let answer = answer.unwrap();
    assert_eq!(answer.text, "It is noon. Or later.");
    assert_eq!(put_together(&deltas), (answer.text, Vec::new()));
    assert!(deltas.len() > 3 && answer.usage.is_some_and(|usage| usage.output_tokens > 0));
    let (answer, deltas) = follow(&provider).await;
    let answer = answer.unwrap();
    assert_eq!(answer.finish_reason, FinishReason::ToolCalls);
    assert_eq!(put_together(&deltas), (String::new(), calls));
    assert_eq!(answer.tool_calls[1].id, "call_mock_2_1");
    let seen = mock.requests().remove(0).body;
    assert_eq!(
        (&seen["stream"], &seen["tools"][0]["function"]["strict"]),
        (&json!(true), &json!(true))
    );
    assert_eq!(mock.refusals(), Vec::<String>::new());
}

#[tokio::test]
async fn a_stream_cut_at_any_byte_is_a_passing_fault() {
    let mock = MockModel::start().await;
    let provider = patient(&mock);
    for (cassette, after) in [(CHAT_TEXT, After::Reset), (CHAT_TOOLS, After::End)] {
        mock.script((0..cassette.len()).map(|end| Reply::bytes(&cassette[..end], after)));
        let cut = |_| async {
            let error = follow(&provider).await.0.expect_err("a cut stream was taken for complete");
            assert_eq!(error.kind, FailureKind::Transient, "{error}");
        };
        stream::iter(0..cassette.len()).map(cut).buffer_unordered(16).collect::<Vec<()>>().await;
    }
    mock.script([Reply::bytes(CHAT_TOOLS, After::End)]);
    assert_eq!(follow(&provider).await.0.unwrap().tool_calls.len(), 2, "and whole it is complete");
}

#[tokio::test]
async fn a_stream_in_drops_is_the_same_answer() {
    let mock = MockModel::start().await;
    mock.script([Reply::bytes(CHAT_TOOLS, After::End), Reply::byte_by_byte(CHAT_TOOLS)]);
    let provider = patient(&mock);
    let at_once = follow(&provider).await;
    assert_eq!(follow(&provider).await, at_once);
    assert!(at_once.0.is_ok());
}

#[tokio::test]
async fn silence_before_and_within_a_stream_is_given_up() {
    let mock = MockModel::start().await;
    let half = &CHAT_TEXT[..CHAT_TEXT.len() / 2];
    mock.script([Reply::Hang, Reply::bytes(half, After::Silence)]);
    let provider = impatient(mock.base_url(), Duration::from_millis(1500));
    for aborted in 1..=2 {
        let error = follow(&provider).await.0.unwrap_err();
        let expected = (FailureKind::Transient, "the server was silent for 1.5 s");
        assert_eq!((error.kind, error.message.as_str()), expected);
        mock.wait_until(|counts| counts.aborted == aborted).await;
    }
}

#[tokio::test]
async fn a_stream_that_breaks_after_its_usage_is_charged_as_reported() {
    let mock = MockModel::start().await;
    let choice = json!({"index": 0, "delta": {"content": "noon"}, "finish_reason": "stop"});
    let usage = json!({"prompt_tokens": 100, "completion_tokens": 10});
    let begun = format!(
        "data: {}\n\ndata: {}\n\n",
        json!({"choices": [choice]}),
        json!({"choices": [], "usage": usage})
    );
    mock.script([Reply::bytes(begun.as_bytes(), After::Silence)]);
    let provider = impatient(mock.base_url(), Duration::from_secs(6));
    let error = follow(&provider).await.0.unwrap_err();
    let charged = error.usage.map(|usage| (usage.input_tokens, usage.output_tokens));
    assert_eq!(charged, Some((100, 10)));
}

#[tokio::test]
async fn an_error_within_a_stream_is_reported_without_secrets() {
    let mock = MockModel::start().await;
    let begun = &CHAT_TEXT[..CHAT_TEXT.iter().position(|byte| *byte == b'\n').unwrap() + 2];
    let with = |error: Value| {
        [begun, format!("data: {}\n\n", json!({ "error": error })).as_bytes()].concat()
    };
    let table = [
        (
            json!({"message": "The server had an error", "type": "server_error"}),
            FailureKind::Transient,
        ),
        (json!({"message": KEY, "code": "insufficient_quota"}), FailureKind::QuotaExhausted),
        (
            json!({"message": "too long", "code": "context_length_exceeded"}),
            FailureKind::ContextLength,
        ),
        (json!({"message": "slow down", "code": 429}), FailureKind::RateLimited),
    ];
    for (error, kind) in table {
        mock.script([Reply::bytes(&with(error), After::End)]);
        let error = follow(&patient(&mock)).await.0.unwrap_err();
        assert!(error.kind == kind && !error.message.contains(KEY), "{error:?}");
    }
}

#[tokio::test]
async fn a_server_that_does_not_stream_is_understood() {
    let mock = MockModel::start().await;
    let whole = include_str!("../cassettes/openai/chat_text.json");
    mock.script([
        Reply::Raw(whole.into()),
        Reply::Raw(format!("\n {whole}")),
        Reply::Raw(whole[..90].into()),
    ]);
    let provider = patient(&mock);
    for _ in 0..2 {
        assert_eq!(follow(&provider).await.0.unwrap().text, "It is noon in Zürich ☀️.");
    }
    assert_eq!(
        follow(&provider).await.0.unwrap_err().kind,
        FailureKind::Transient,
        "half of it is not"
    );
}

#[tokio::test]
async fn endless_streams_are_cut_off() {
    use FailureKind::{TooLarge, Transient};
    let mock = MockModel::start().await;
    let mebibyte = Bytes::from(vec![b'x'; 1 << 20]);
    let comments = Bytes::from([b": ", vec![b'x'; 1 << 19].as_slice(), b"\n\n"].concat());
    let table = [
        (vec![mebibyte; 100], TooLarge, "the answer is larger than 2 MiB"),
        (vec![comments; 200], TooLarge, "the answer is larger than 16 MiB"),
        (
            vec![Bytes::from_static(b"data: [[[[[[[[[[[[[[[[\n\n")],
            Transient,
            "a chunk of the stream is not one",
        ),
    ];
    for (pieces, kind, message) in table {
        mock.script([Reply::Pieces(pieces, After::Silence)]);
        let error = follow(&patient(&mock)).await.0.unwrap_err();
        assert!(error.kind == kind && error.message.starts_with(message), "{error}");
        let is_estimated = error.usage.as_ref().is_some_and(|usage| usage.estimated);
        assert_eq!(is_estimated, kind == TooLarge, "{error}");
    }
}

#[tokio::test]
async fn an_answer_in_one_frame_may_be_large() {
    let mock = MockModel::start().await;
    let text = "x".repeat(3 << 19);
    let choice = json!({"index": 0, "delta": {"content": text}, "finish_reason": "stop"});
    let frame = format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [choice]}));
    mock.script([Reply::Pieces(vec![frame.into()], After::Silence)]);
    assert_eq!(follow(&patient(&mock)).await.0.unwrap().text.len(), text.len());
}

#[tokio::test]
async fn a_model_that_writes_too_much_is_refused() {
    let mock = MockModel::start().await;
    mock.script([Reply::text(&(format!("{} ", "x".repeat(999))).repeat(2_200))]);
    let error = follow(&patient(&mock)).await.0.unwrap_err();
    assert_eq!(error.message, "the answer is larger than 2 MiB");
}
