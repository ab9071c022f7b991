//! Streams of many servers, whole and cut, and what becomes of them.

use std::sync::Mutex;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::bounds::frames::{Framing, Splitter};
use crate::message::FinishReason;
use crate::providers::RawToolCall;
use crate::providers::failure::Reported;
use crate::providers::openai::{DONE, response};
use crate::providers::wire::MAX_FRAME;

macro_rules! cassette {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cassettes/openai/", $file))
    };
}

/// Streams as OpenAI and DeepSeek send them, each with the same answer in one piece.
const CASSETTES: [(&str, &str); 4] = [
    (cassette!("chat_text.sse"), cassette!("chat_text.json")),
    (cassette!("chat_tools.sse"), cassette!("chat_tools.json")),
    (cassette!("chat_refusal.sse"), cassette!("chat_refusal.json")),
    (cassette!("chat_reasoning.sse"), cassette!("chat_reasoning.json")),
];

const CALL: Call<'_> = Call { provider: "p", model: "m", step: 3, deltas: Deltas(None) };

/// What the adapter makes of these chunks of bytes; `None` where the end is missing.
fn read<'a>(
    chunks: impl IntoIterator<Item = &'a [u8]>,
    deltas: Deltas<'_>,
) -> Result<Option<Completion>, Unusable> {
    let (mut splitter, mut answer) = (Splitter::new(Framing::Sse, MAX_FRAME), Answer::default());
    for chunk in chunks {
        splitter.push(chunk).map_err(|error| Unusable::Malformed(error.to_string()))?;
        while let Some(frame) = splitter.next() {
            if frame.data == DONE {
                return answer.finish(CALL).map(Some);
            }
            answer.take(&frame.data, deltas)?;
        }
    }
    Ok(None)
}

fn chunk(delta: &Value, finish_reason: Option<&str>) -> String {
    let choice = json!({"index": 0, "delta": delta, "finish_reason": finish_reason});
    format!(
        "data: {}\n\n",
        json!({"id": "x", "object": "chat.completion.chunk", "choices": [choice]})
    )
}

/// A stream of these deltas, ended as it should be.
fn stream(deltas: &[Value], finish_reason: &str) -> String {
    let pieces: String = deltas.iter().map(|delta| chunk(delta, None)).collect();
    pieces + &chunk(&json!({}), Some(finish_reason)) + "data: [DONE]\n\n"
}

fn whole(text: &str) -> Completion {
    read([text.as_bytes()], Deltas::default()).unwrap().unwrap()
}

fn made(id: &str, wire_name: &str, arguments: &str) -> RawToolCall {
    RawToolCall { id: id.into(), wire_name: wire_name.into(), arguments: arguments.into() }
}

fn call(
    index: impl Into<Option<u64>>,
    id: Option<&str>,
    name: Option<&str>,
    arguments: &str,
) -> Value {
    let mut call =
        json!({"id": id, "type": "function", "function": {"name": name, "arguments": arguments}});
    if let Some(index) = index.into() {
        call["index"] = json!(index);
    }
    json!({ "tool_calls": [call] })
}

#[test]
fn what_a_server_needs_back_is_put_together() {
    let text = |text: &str| json!({"reasoning_details": [{"type": "reasoning.text", "index": 0, "text": text, "signature": null}]});
    let encrypted = |data: &str| json!({"type": "reasoning.encrypted", "index": 1, "data": data});
    let extra = json!({"google": {"thought_signature": "c2ln"}});
    let deltas = [
        json!({"reasoning_content": "Let me"}),
        json!({"reasoning_content": " look."}),
        text("Let me"),
        text(" look."),
        json!({"reasoning_details": [{"type": "reasoning.text", "index": 0, "signature": "s"}]}),
        json!({"reasoning_details": [encrypted("a"), encrypted("b")]}),
        json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "t", "arguments": ""}}]}),
        json!({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}, "extra_content": extra}]}),
    ];
    let completion = whole(&stream(&deltas, "tool_calls"));
    assert_eq!(completion.thinking.as_deref(), Some("Let me look."));
    let kept: Value = serde_json::from_str(&completion.opaque.unwrap().json).unwrap();
    let details = json!([
        {"type": "reasoning.text", "index": 0, "text": "Let me look.", "signature": "s"},
        encrypted("a"),
        encrypted("b"),
    ]);
    let expected = json!({"model": "m", "reasoning_content": "Let me look.",
        "reasoning_details": details, "calls": [extra]});
    assert_eq!(kept, expected);
}

#[test]
fn an_answer_in_pieces_means_what_it_means_in_one_piece() {
    for (stream, json) in CASSETTES {
        assert_eq!(whole(stream), response::parse(json.as_bytes(), CALL).unwrap());
    }
}

#[test]
fn a_stream_cut_anywhere_is_never_complete() {
    for (stream, _) in CASSETTES {
        for end in 0..stream.len() {
            let cut = read([&stream.as_bytes()[..end]], Deltas::default());
            assert_eq!(cut, Ok(None), "complete after {end} of {} bytes", stream.len());
        }
    }
}

#[test]
fn deltas_come_with_the_pieces_and_add_up() {
    let heard = Mutex::new(Vec::new());
    let follower = |delta| heard.lock().unwrap().push(delta);
    let reasoning = [
        json!({"role": "assistant", "content": ""}),
        json!({"reasoning": "hm"}),
        json!({"content": "Let me look.", "refusal": ""}),
    ];
    let tools = [
        call(0, Some("a"), Some("t"), ""),
        call(0, None, None, "{\"x\""),
        call(0, None, None, ": 1}"),
    ];
    let text = stream(&[&reasoning[..], &tools].concat(), "tool_calls");
    read([text.as_bytes()], Deltas(Some(&follower))).unwrap().unwrap();
    let tool = |wire_name: Option<&str>, arguments: &str| Delta::ToolCall {
        index: 0,
        wire_name: wire_name.map(str::to_owned),
        arguments: arguments.into(),
    };
    let expected = [
        Delta::Thinking("hm".into()),
        Delta::Text("Let me look.".into()),
        tool(Some("t"), ""),
        tool(None, "{\"x\""),
        tool(None, ": 1}"),
    ];
    assert_eq!(heard.into_inner().unwrap(), expected);
}

#[test]
fn calls_are_told_apart_however_they_are_cut() {
    let two = [made("a", "t", "{\"x\":1}"), made("b", "u", "{}")];
    let both = json!({"tool_calls": [
        {"index": 0, "id": "a", "function": {"name": "t", "arguments": "{\"x\":1}"}},
        {"index": 1, "id": "b", "function": {"name": "u", "arguments": "{}"}},
    ]});
    let as_object = json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "t", "arguments": {"x": 1}}}]});
    let (a, b, t, u) = (Some("a"), Some("b"), Some("t"), Some("u"));
    let table: &[(&str, Vec<Value>, &[RawToolCall])] = &[
        ("whole calls in one chunk", vec![both], &two),
        ("arguments as an object", vec![as_object], &two[..1]),
        (
            "no index",
            vec![call(None, a, t, "{\"x\""), call(None, None, None, ":1}"), call(None, b, u, "{}")],
            &two,
        ),
        ("one index for all", vec![call(0, a, t, "{\"x\":1}"), call(0, b, u, "{}")], &two),
        ("an index that starts late", vec![call(1, a, t, "{\"x\":1}"), call(2, b, u, "{}")], &two),
        (
            "pieces of two calls in turn",
            vec![
                call(0, a, t, "{\"x"),
                call(1, b, u, "{"),
                call(0, None, None, "\":1}"),
                call(1, None, None, "}"),
            ],
            &two,
        ),
        (
            "id and name in every piece",
            vec![
                call(0, a, t, "{\"x\""),
                call(0, a, t, ":1}"),
                call(1, b, u, ""),
                call(1, b, u, "{}"),
            ],
            &two,
        ),
        (
            "neither ids nor different indices",
            vec![call(0, None, t, "{}"), call(0, None, t, "{}")],
            &[made("call_3_0", "t", "{}"), made("call_3_1", "t", "{}")],
        ),
        (
            "no id, and the name in every piece",
            vec![
                call(0, None, t, ""),
                call(0, None, t, "{\"a\":\"}"),
                call(0, None, t, "\\\"\"}"),
                call(0, None, t, "{\"b\":[1"),
                call(0, None, t, "]}"),
            ],
            &[made("call_3_0", "t", r#"{"a":"}\""}"#), made("call_3_1", "t", r#"{"b":[1]}"#)],
        ),
        (
            "the same, of broken arguments",
            vec![call(0, None, t, "{x}"), call(0, None, t, "{}"), call(0, None, t, "{}")],
            &[made("call_3_0", "t", "{x}{}{}")],
        ),
        (
            "a repeated id",
            vec![call(0, a, t, "{}"), call(1, a, t, "")],
            &[made("a", "t", "{}"), made("call_3_1", "t", "{}")],
        ),
        (
            "a name that comes late",
            vec![call(0, a, None, ""), call(0, None, t, "{\"x\":1}")],
            &two[..1],
        ),
    ];
    for (what, deltas, expected) in table {
        assert_eq!(whole(&stream(deltas, "tool_calls")).tool_calls, *expected, "{what}");
    }
}

#[test]
fn arguments_may_come_in_many_pieces_with_the_name_in_each() {
    let piece = "x".repeat(100);
    let mut deltas = vec![call(0, None, Some("t"), "{\"a\":\"")];
    deltas.resize(10_000, call(0, None, Some("t"), &piece));
    deltas.push(call(0, None, Some("t"), "\"}"));
    let calls = whole(&stream(&deltas, "tool_calls")).tool_calls;
    assert_eq!((calls.len(), calls[0].arguments.len()), (1, 8 + 9_999 * 100));
}

#[test]
fn the_finish_reason_is_kept_and_needed() {
    let text = json!({"content": "hi"});
    let table = [
        ("stop", FinishReason::Stop),
        ("length", FinishReason::Length),
        ("content_filter", FinishReason::Refusal),
        ("tool_calls", FinishReason::Stop),
        ("bored", FinishReason::Other),
    ];
    for (said, expected) in table {
        assert_eq!(
            whole(&stream(std::slice::from_ref(&text), said)).finish_reason,
            expected,
            "{said}"
        );
    }
    let endless = chunk(&text, None) + "data: [DONE]\n\n";
    let without = read([endless.as_bytes()], Deltas::default());
    assert_eq!(
        without,
        Err(Unusable::Malformed("the stream ended without a finish reason".into()))
    );
    let called = call(0, Some("a"), Some("t"), "{}");
    let stopped = whole(&stream(std::slice::from_ref(&called), "stop"));
    assert_eq!(stopped.finish_reason, FinishReason::ToolCalls, "a forced call may end with stop");
}

#[test]
fn usage_comes_last_or_not_at_all() {
    let said = |usage: &str| {
        let text = chunk(&json!({"content": "hi"}), Some("stop"));
        whole(&format!("{text}data: {{\"choices\": [], \"usage\": {usage}}}\n\ndata: [DONE]\n\n"))
            .usage
    };
    let usage = Usage { input_tokens: 5, output_tokens: 7, ..Usage::default() };
    assert_eq!(said(r#"{"prompt_tokens": 5, "completion_tokens": 7}"#), Some(usage));
    let of_input = said(r#"{"prompt_tokens": 5, "completion_tokens": null}"#);
    assert_eq!(of_input, Some(Usage { output_tokens: 0, ..usage }));
    for nothing in ["null", "{}", r#"{"prompt_tokens": null}"#] {
        assert_eq!(said(nothing), None, "{nothing}");
    }
    assert_eq!(said("\"many\""), None);
}

#[test]
fn errors_and_nonsense_within_a_stream_end_it() {
    let begun = chunk(&json!({"content": "hi"}), None);
    let after = |text: &str| read([(begun.clone() + text).as_bytes()], Deltas::default());
    let error = after(
        "data: {\"error\": {\"message\": \"upstream broke\", \"type\": \"server_error\"}}\n\n",
    );
    let told = Reported {
        code: Some("server_error".into()),
        status: None,
        message: "upstream broke".into(),
    };
    assert_eq!(error, Err(Unusable::Error(told)));
    let limited = after(
        "data: {\"error\": {\"message\": \"too fast\", \"code\": \"rate_limit_exceeded\"}}\n\n",
    );
    let told = Reported {
        code: Some("rate_limit_exceeded".into()),
        status: Some(429),
        message: "too fast".into(),
    };
    assert_eq!(limited, Err(Unusable::Error(told)));
    let deep = format!("data: {{\"choices\": [{{\"delta\": {}\n\n", "[".repeat(10_000));
    let nested = stream(&[], "stop")
        .replace("\"delta\":{}", &format!("\"delta\":{}1{}", "[".repeat(9_999), "]".repeat(9_999)));
    for nonsense in ["data: <html>\n\n", "data: [1]\n\n", &deep, &nested] {
        assert!(matches!(after(nonsense), Err(Unusable::Malformed(_))), "{nonsense:.80}");
    }
    let many: Vec<Value> = (0..2000).map(|index| call(index, None, Some("t"), "{}")).collect();
    let too_many =
        read([stream(&many, "tool_calls").as_bytes()], Deltas::default()).unwrap().unwrap();
    assert_eq!(too_many.tool_calls.len(), normalization::CALLS_READ, "one too many, to be noticed");
    assert!(too_many.tool_calls.iter().all(|call| call.arguments == "{}"));
}

#[test]
fn without_a_number_it_is_the_first() {
    let begins = json!({"tool_calls": [{"index": null, "id": "a", "function": {"name": "t", "arguments": "{"}}]});
    let goes_on = json!({"tool_calls": [{"index": null, "id": null, "function": {"name": null, "arguments": "}"}}]});
    let text = stream(&[json!({"content": "hi"}), begins, goes_on], "tool_calls");
    let expected = whole(&text);
    assert_eq!(
        (expected.text.as_str(), &expected.tool_calls[..]),
        ("hi", &[made("a", "t", "{}")][..])
    );
    let member = "\"index\":0,";
    assert!(text.contains(member), "{text}");
    for none in ["\"index\":null,", ""] {
        assert_eq!(whole(&text.replace(member, none)), expected, "{none}");
    }
    let nulls =
        json!({"content": null, "refusal": null, "reasoning_content": null, "tool_calls": null});
    assert_eq!(whole(&stream(&[json!({"content": "hi"}), nulls], "stop")).text, "hi");
}

#[test]
fn what_is_not_ours_is_passed_over() {
    let pieces = [
        ": OPENROUTER PROCESSING\n\n".to_owned(),
        "data: {\"choices\": [{\"index\": 1, \"delta\": {\"content\": \"other\"}, \"finish_reason\": \"stop\"}]}\n\n"
            .into(),
        "data: {\"type\": \"ping\"}\n\n".into(),
        chunk(&json!({"content": "a\u{0}b"}), None),
        chunk(&json!({"content": [{"type": "text", "text": "c"}]}), Some("stop")),
        "data: [DONE]\n\n".into(),
    ];
    assert_eq!(whole(&pieces.concat()).text, "abc");
}

proptest! {
    #[test]
    fn any_chunking_gives_the_same_answer(cassette in 0..4_usize, cuts in prop::collection::vec(1..400_usize, 0..30)) {
        let (stream, _) = CASSETTES[cassette];
        let mut rest = stream.as_bytes();
        let mut chunks = Vec::new();
        for cut in cuts {
            let (chunk, after) = rest.split_at(cut.min(rest.len()));
            chunks.push(chunk);
            rest = after;
        }
        chunks.push(rest);
        prop_assert_eq!(read(chunks, Deltas::default()).unwrap().unwrap(), whole(stream));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read([bytes.as_slice()], Deltas::default());
        let _ = Answer::default().take(&bytes, Deltas::default());
    }
}
