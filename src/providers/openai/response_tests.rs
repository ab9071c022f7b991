//! Answers of many servers, good and bad, and what becomes of them.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::message::OpaqueBlocks;
use crate::providers::Deltas;
use crate::providers::failure::Reported;

const CALL: Call<'_> = Call { provider: "p", model: "m", step: 3, deltas: Deltas(None) };

fn read(answer: &Value) -> Result<Completion, Unusable> {
    parse(answer.to_string().as_bytes(), CALL)
}

fn message(message: &Value, finish_reason: &str) -> Result<Completion, Unusable> {
    read(
        &json!({"id": "x", "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}),
    )
}

fn call(id: &Value, arguments: &Value) -> Value {
    json!({"id": id, "type": "function", "function": {"name": "t", "arguments": arguments}})
}

#[test]
fn a_whole_answer_is_read() {
    let completion = read(&json!({
        "id": "x", "object": "chat.completion", "unknown": {"a": [1]},
        "choices": [{"message": {"role": "assistant", "content": "Let me look.", "reasoning_content": "hm",
            "reasoning": "hm", "tool_calls": [call(&json!("a"), &json!("{\"x\": 1}"))]}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120,
            "prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 10},
            "completion_tokens_details": {"reasoning_tokens": 500}},
    }));
    let tool_call =
        RawToolCall { id: "a".into(), wire_name: "t".into(), arguments: "{\"x\": 1}".into() };
    let usage = Usage {
        input_tokens: 100,
        output_tokens: 20,
        cached_input_tokens: 60,
        cache_write_tokens: 10,
        reasoning_tokens: 20,
        ..Usage::default()
    };
    let expected = Completion {
        text: "Let me look.".into(),
        thinking: Some("hm".into()),
        tool_calls: vec![tool_call],
        opaque: Some(OpaqueBlocks {
            provider: "p".into(),
            json: r#"{"model":"m","reasoning_content":"hm"}"#.into(),
        }),
        finish_reason: FinishReason::ToolCalls,
        usage: Some(usage),
    };
    assert_eq!(completion, Ok(expected));
}

#[test]
fn what_a_server_needs_back_is_kept_with_the_calls() {
    let kept = |with_calls: bool, message: &str| {
        let calls = r#"[{"id":"a","function":{"name":"t"}},{"id":"b","function":{"name":"t"},"extra_content":{"google": {"thought_signature":"c2ln\u003d"}}}]"#;
        let calls = if with_calls { calls } else { "[]" };
        let answer = format!(
            r#"{{"choices":[{{"message":{{{message}"tool_calls":{calls}}},"finish_reason":"stop"}}]}}"#
        );
        let completion = parse(answer.as_bytes(), CALL).unwrap();
        completion.opaque.map(|blocks| blocks.json)
    };
    let extra = r#","calls":[null,{"google": {"thought_signature":"c2ln\u003d"}}]}"#;
    let details = r#""reasoning_details":[{"type":"reasoning.text", "text":"h\u006d","signature":"s"},{"type":"x"}]"#;
    let said = format!(r#""reasoning":"hm",{details},"#);
    for (message, expected) in [
        ("", r#"{"model":"m""#.to_owned()),
        (said.as_str(), format!(r#"{{"model":"m",{details}"#)),
        (r#""reasoning":"hm","#, r#"{"model":"m","reasoning":"hm""#.to_owned()),
        (r#""reasoning_details":{},"#, r#"{"model":"m""#.to_owned()),
    ] {
        assert_eq!(kept(true, message), Some(format!("{expected}{extra}")), "{message}");
        assert_eq!(kept(false, message), None, "{message}");
    }
}

#[test]
fn the_presence_of_calls_decides_why_the_model_stopped() {
    let calls = json!({"content": null, "tool_calls": [call(&json!("a"), &json!("{}"))]});
    let text = json!({"content": "hi", "tool_calls": []});
    let refusal = json!({"content": null, "refusal": "I cannot."});
    let refused_calls =
        json!({"content": null, "refusal": "I cannot.", "tool_calls": calls["tool_calls"]});
    let no_refusal = json!({"content": null, "refusal": " ", "tool_calls": calls["tool_calls"]});
    let silent = json!({"content": null});
    let table = [
        (&refused_calls, "tool_calls", FinishReason::Refusal, "I cannot."),
        (&no_refusal, "tool_calls", FinishReason::ToolCalls, ""),
        (&calls, "stop", FinishReason::ToolCalls, ""),
        (&calls, "tool_calls", FinishReason::ToolCalls, ""),
        (&calls, "length", FinishReason::Length, ""),
        (&text, "stop", FinishReason::Stop, "hi"),
        (&text, "tool_calls", FinishReason::Stop, "hi"),
        (&text, "length", FinishReason::Length, "hi"),
        (&text, "content_filter", FinishReason::Refusal, "hi"),
        (&text, "bored", FinishReason::Other, "hi"),
        (&refusal, "stop", FinishReason::Refusal, "I cannot."),
        (&silent, "content_filter", FinishReason::Refusal, ""),
        (&silent, "length", FinishReason::Length, ""),
    ];
    for (body, said, finish_reason, text) in table {
        let completion = message(body, said).unwrap();
        assert_eq!(
            (completion.finish_reason, completion.text.as_str()),
            (finish_reason, text),
            "{body} {said}"
        );
    }
}

#[test]
fn ids_that_are_missing_or_repeated_are_made_up() {
    let ids = [json!("a"), json!("a"), json!(""), Value::Null, json!(7), json!("call_3_1")];
    let calls: Vec<Value> = ids.iter().map(|id| call(id, &json!("{}"))).collect();
    let completion = message(&json!({"tool_calls": calls}), "tool_calls").unwrap();
    let ids: Vec<&str> = completion.tool_calls.iter().map(|call| call.id.as_str()).collect();
    assert_eq!(ids, ["a", "call_3_1", "call_3_2", "call_3_3", "call_3_4", "call_3_5"]);
}

#[test]
fn arguments_keep_their_text() {
    let table = [
        (json!("{\"a\" : 1}"), "{\"a\" : 1}"),
        (json!("{\"a\": "), "{\"a\": "),
        (json!({"a": 1}), "{\"a\":1}"),
        (json!(""), "{}"),
        (Value::Null, "{}"),
        (json!("{\"a\":\"x\u{0}\\u0000y\"}"), "{\"a\":\"x\\u0000\\u0000y\"}"),
        (json!("{\"a\":\"\\\\u0000\"}"), "{\"a\":\"\\\\u0000\"}"),
        (json!("\\u00\\u000000"), "\\u00\\u000000"),
        (json!({"a": "x\u{0}"}), "{\"a\":\"x\\u0000\"}"),
    ];
    for (sent, expected) in table {
        let body = json!({"content": null, "tool_calls": [call(&json!("a"), &sent)]});
        let completion = message(&body, "tool_calls").unwrap();
        assert_eq!(completion.tool_calls[0].arguments, expected, "{sent}");
    }
}

#[test]
fn text_may_come_in_parts_and_loses_nul() {
    let parts = json!([{"type": "text", "text": "a\u{0}b"}, {"type": "image_url"}, {"type": "refusal", "refusal": "c"}]);
    assert_eq!(message(&json!({"content": parts}), "stop").unwrap().text, "abc");
    for blank in [json!({"content": ""}), json!({"content": null}), json!({"tool_calls": []})] {
        let answer = message(&blank, "stop").unwrap();
        assert_eq!((answer.text.as_str(), answer.finish_reason), ("", FinishReason::Stop));
    }
}

#[test]
fn unreadable_usage_does_not_spoil_the_answer() {
    for usage in [json!(null), json!("many"), json!({"prompt_tokens": -1})] {
        let answer = json!({"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}], "usage": usage});
        assert_eq!(read(&answer).unwrap().usage, None, "{answer}");
    }
}

#[test]
fn answers_without_anything_in_them_are_malformed() {
    let deep = "[".repeat(10_000);
    let bodies = [
        String::new(),
        "<html>".into(),
        "{}".into(),
        r#"{"choices": []}"#.into(),
        r#"{"choices": null}"#.into(),
        r#"{"choices": [{}]}"#.into(),
        r#"{"choices": [{"message": {}}]}"#.into(),
        r#"{"choices": [{"message": {"content": null, "tool_calls": []}}]}"#.into(),
        r#"{"choices": [{"message": {"content": {"a": 1}}}]}"#.into(),
        r#"{"choices": [{"message": {"content": "hi"}}"#.into(),
        format!(r#"{{"choices": {deep}"#),
        format!(r#"{{"choices": [{{"message": {{"content": {deep}{}}}}}]}}"#, "]".repeat(10_000)),
    ];
    for body in bodies {
        assert!(matches!(parse(body.as_bytes(), CALL), Err(Unusable::Malformed(_))), "{body:.80}");
    }
    assert!(matches!(parse(b"\xff\xfe", CALL), Err(Unusable::Malformed(_))));
    let reported = parse(br#"{"error": {"message": "upstream broke", "code": 502}}"#, CALL);
    let expected = Reported { code: None, status: Some(502), message: "upstream broke".into() };
    assert_eq!(reported, Err(Unusable::Error(expected)));
}

#[test]
fn an_answer_that_cannot_be_used_says_what_it_took() {
    let usage =
        usage_of(br#"{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}"#)
            .unwrap();
    assert_eq!((usage.input_tokens, usage.output_tokens), (7, 2));
    for nothing in ["", "<html>", "{}", r#"{"usage": null}"#, r#"{"usage": 1}"#] {
        assert_eq!(usage_of(nothing.as_bytes()), None, "{nothing}");
    }
}

proptest! {
    #[test]
    fn whatever_the_arguments_hold_their_text_has_no_nul(text in r#""([\\u0a]|\\u0000|\PC)*""#) {
        let body = json!({"content": null, "tool_calls": [call(&json!("a"), &json!(text))]});
        let arguments = message(&body, "tool_calls").unwrap().tool_calls.remove(0).arguments;
        prop_assert!(!arguments.contains('\0'));
    }

    #[test]
    fn clean_arguments_are_untouched(value in "[a-z0-9 \"\\\\]*") {
        let text = json!({ "a": value }).to_string();
        let body = json!({"content": null, "tool_calls": [call(&json!("a"), &json!(text))]});
        prop_assert_eq!(&message(&body, "tool_calls").unwrap().tool_calls[0].arguments, &text);
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes, CALL);
    }
}
