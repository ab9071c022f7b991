//! Answers, good and bad, and what becomes of them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn read(answer: &Value) -> Result<Completion, Unusable> {
    parse(answer.to_string().as_bytes(), "anthropic", 3)
}

fn said(content: &Value, stop_reason: &str) -> Result<Completion, Unusable> {
    read(
        &json!({"type": "message", "role": "assistant", "content": content, "stop_reason": stop_reason}),
    )
}

#[test]
fn a_whole_answer_is_read() {
    let recorded = include_bytes!("../../../tests/cassettes/anthropic/thinking_tools.json");
    let completion = parse(recorded, "anthropic", 1).unwrap();
    assert_eq!(completion.text, "Let me look.");
    assert_eq!(
        completion.thinking.as_deref(),
        Some("I should look at the files \"first\": é, 日本.")
    );
    let call = |id: &str, name: &str, arguments: &str| RawToolCall {
        id: id.into(),
        wire_name: name.into(),
        arguments: arguments.into(),
    };
    let listing =
        call("toolu_01A09q90qw90lq917835lq9", "file_ops", r#"{"operation":"list","path":"."}"#);
    assert_eq!(completion.tool_calls, [listing, call("toolu_01Empty", "mcp__time__now", "{}")]);
    assert_eq!(completion.finish_reason, FinishReason::ToolCalls);
    let usage =
        Usage { input_tokens: 1500, output_tokens: 220, reasoning_tokens: 120, ..Usage::default() };
    assert_eq!(completion.usage, Some(usage));
    let recorded = std::str::from_utf8(recorded).unwrap();
    let opaque = completion.opaque.unwrap();
    let blocks: Vec<&RawValue> = serde_json::from_str(&opaque.json).unwrap();
    assert_eq!((blocks.len(), opaque.provider.as_str()), (5, "anthropic"));
    assert!(
        recorded.contains(blocks[0].get()) && recorded.contains(blocks[1].get()),
        "byte for byte"
    );
    assert_eq!((blocks[3].get(), blocks[4].get()), (CALL_MARK, CALL_MARK));
}

#[test]
fn cached_input_is_part_of_the_input() {
    let recorded = include_bytes!("../../../tests/cassettes/anthropic/text.json");
    let completion = parse(recorded, "anthropic", 1).unwrap();
    let usage = Usage {
        input_tokens: 412 + 100 + 2048,
        output_tokens: 18,
        cached_input_tokens: 2048,
        cache_write_tokens: 100,
        ..Usage::default()
    };
    assert_eq!(completion.usage, Some(usage));
    assert_eq!((completion.opaque, completion.finish_reason), (None, FinishReason::Stop));
}

#[test]
fn every_stop_reason_has_its_meaning() {
    let text = json!([{"type": "text", "text": "hi"}]);
    let calls = json!([{"type": "tool_use", "id": "a", "name": "t", "input": {}}]);
    let nothing = json!([]);
    let table = [
        (&text, "end_turn", FinishReason::Stop),
        (&text, "stop_sequence", FinishReason::Stop),
        (&text, "tool_use", FinishReason::Stop),
        (&text, "max_tokens", FinishReason::Length),
        (&text, "refusal", FinishReason::Refusal),
        (&text, "pause_turn", FinishReason::Pause),
        (&text, "bored", FinishReason::Other),
        (&calls, "tool_use", FinishReason::ToolCalls),
        (&calls, "end_turn", FinishReason::ToolCalls),
        (&calls, "pause_turn", FinishReason::ToolCalls),
        (&calls, "bored", FinishReason::ToolCalls),
        (&calls, "max_tokens", FinishReason::Length),
        (&calls, "refusal", FinishReason::Refusal),
        (&nothing, "end_turn", FinishReason::Stop),
    ];
    for (content, stop_reason, expected) in table {
        assert_eq!(
            said(content, stop_reason).unwrap().finish_reason,
            expected,
            "{content} {stop_reason}"
        );
    }
    let full = said(&text, "model_context_window_exceeded").unwrap_err();
    let Unusable::Error(reported) = full else { panic!("{full:?}") };
    assert_eq!(reported.code.as_deref(), Some("model_context_window_exceeded"));
}

#[test]
fn a_refusal_says_why() {
    let recorded = include_bytes!("../../../tests/cassettes/anthropic/refusal.json");
    let completion = parse(recorded, "anthropic", 1).unwrap();
    assert_eq!(
        (completion.finish_reason, completion.text.as_str()),
        (FinishReason::Refusal, "This request was declined.")
    );
}

#[test]
fn a_pause_keeps_what_must_go_back() {
    let recorded = include_str!("../../../tests/cassettes/anthropic/pause.json");
    let completion = parse(recorded.as_bytes(), "anthropic", 1).unwrap();
    assert_eq!(
        (completion.finish_reason, completion.text.as_str()),
        (FinishReason::Pause, "Searching.")
    );
    let kept = completion.opaque.unwrap().json;
    assert!(recorded.contains(&kept), "{kept}");
}

#[test]
fn thinking_without_a_signature_does_not_go_back() {
    let content = json!([{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]);
    let completion = said(&content, "max_tokens").unwrap();
    assert_eq!((completion.thinking.as_deref(), completion.opaque), (Some("hm"), None));
}

#[test]
fn missing_ids_and_inputs_are_generated_and_nul_is_replaced() {
    let content = json!([
        {"type": "tool_use", "id": "a", "name": "t", "input": {"x": "1\u{0}2"}},
        {"type": "tool_use", "id": "a", "name": "t"},
        {"type": "tool_use", "name": "t\u{0}", "input": null},
        {"type": "text", "text": "a\u{0}b"},
    ]);
    let completion = said(&content, "tool_use").unwrap();
    let calls: Vec<_> = completion
        .tool_calls
        .iter()
        .map(|c| (c.id.as_str(), c.wire_name.as_str(), c.arguments.as_str()))
        .collect();
    assert_eq!(
        calls,
        [
            ("a", "t", r#"{"x":"1\u00002"}"#),
            ("call_3_1", "t", "{}"),
            ("call_3_2", "t\u{FFFD}", "{}")
        ]
    );
    assert_eq!(completion.text, "ab");
}

#[test]
fn errors_carry_the_status_of_their_type() {
    let table = [
        ("invalid_request_error", 400),
        ("authentication_error", 401),
        ("billing_error", 402),
        ("permission_error", 403),
        ("not_found_error", 404),
        ("request_too_large", 413),
        ("rate_limit_error", 429),
        ("api_error", 500),
        ("timeout_error", 504),
        ("overloaded_error", 529),
    ];
    for (code, status) in table {
        let error = read(
            &json!({"type": "error", "error": {"type": code, "message": "m"}, "request_id": "r"}),
        );
        let expected =
            Reported { code: Some(code.into()), status: Some(status), message: "m".into() };
        assert_eq!(error, Err(Unusable::Error(expected)));
    }
}

#[test]
fn answers_without_anything_in_them_are_malformed() {
    let deep = "[".repeat(10_000);
    let bodies = [
        String::new(),
        "<html>".into(),
        "{}".into(),
        r#"{"content": null, "stop_reason": "end_turn"}"#.into(),
        r#"{"content": [{"type": "text", "text": "hi"}]}"#.into(),
        r#"{"content": [{"text": "hi"}], "stop_reason": "end_turn"}"#.into(),
        r#"{"content": [{"type": "tool_use", "id": "a"}], "stop_reason": "tool_use"}"#.into(),
        r#"{"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn""#.into(),
        format!(r#"{{"content": {deep}"#),
    ];
    for body in bodies {
        assert!(
            matches!(parse(body.as_bytes(), "a", 1), Err(Unusable::Malformed(_))),
            "{body:.80}"
        );
    }
}

#[test]
fn an_answer_that_cannot_be_used_says_what_it_took() {
    let usage = usage_of(br#"{"content": null, "usage": {"input_tokens": 7, "output_tokens": 2}}"#)
        .unwrap();
    assert_eq!((usage.input_tokens, usage.output_tokens), (7, 2));
    for nothing in ["", "<html>", "{}", r#"{"usage": null}"#, r#"{"usage": 1}"#] {
        assert_eq!(usage_of(nothing.as_bytes()), None, "{nothing}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes, "a", 1);
    }
}
