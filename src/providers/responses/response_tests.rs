//! Answers in one piece, good and bad.

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::providers::failure::Reported;

fn read(answer: &Value) -> Result<Completion, Unusable> {
    parse(answer.to_string().as_bytes(), "own", 3)
}

fn completed(items: &Value) -> Result<Completion, Unusable> {
    read(&json!({"id": "x", "status": "completed", "error": null, "output": items}))
}

fn call(id: &Value, arguments: &str) -> Value {
    json!({"type": "function_call", "id": "fc", "call_id": id, "name": "t", "arguments": arguments})
}

fn said(text: &str) -> Value {
    json!({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
}

#[test]
fn a_whole_answer_is_read_and_its_items_kept_as_they_came() {
    let items = r#"[{"type": "reasoning" , "id": "rs", "encrypted_content": "x\u002by", "summary": [{"text": "a"}, {"text": "b"}]},
        {"type": "message", "content": [{"type": "output_text", "text": "Let me"}, {"type": "output_text", "text": " look."}]},
        {"type": "function_call", "call_id": "a", "name": "t", "arguments": "{\"x\": 1}"}]"#;
    let usage = json!({"input_tokens": 100, "output_tokens": 20, "input_tokens_details": {"cached_tokens": 60},
        "output_tokens_details": {"reasoning_tokens": 500}});
    let answer =
        format!(r#"{{"status": "completed", "error": null, "output": {items}, "usage": {usage}}}"#);
    let completion = parse(answer.as_bytes(), "own", 3).unwrap();
    let kept = completion.opaque.as_ref().unwrap();
    let (first, second) =
        (items.split(",\n").next().unwrap(), items.split(",\n").nth(1).unwrap().trim());
    assert!(
        kept.provider == "own" && kept.json.starts_with(first) && kept.json.contains(second),
        "{}",
        kept.json
    );
    let expected = Completion {
        text: "Let me look.".into(),
        thinking: Some("a\n\nb".into()),
        tool_calls: vec![RawToolCall {
            id: "a".into(),
            wire_name: "t".into(),
            arguments: "{\"x\": 1}".into(),
        }],
        opaque: completion.opaque.clone(),
        finish_reason: FinishReason::ToolCalls,
        usage: Some(Usage {
            input_tokens: 100,
            output_tokens: 20,
            cached_input_tokens: 60,
            reasoning_tokens: 20,
            ..Usage::default()
        }),
    };
    assert_eq!(completion, expected);
}

#[test]
fn only_what_cannot_be_made_again_is_kept() {
    let reasoning = json!({"type": "reasoning", "summary": []});
    let phased = json!({"type": "message", "phase": "commentary", "content": [{"type": "output_text", "text": "a"}]});
    let a = call(&json!("a"), "{}");
    let table = [
        (json!([said("hi")]), false),
        (json!([said("hi"), a]), false),
        (json!([reasoning, a]), true),
        (json!([phased, a]), true),
        (json!([{"type": "compaction", "content": 7}, a]), true),
        (json!([reasoning, a, a]), false), // the second id is made up
    ];
    for (items, kept) in table {
        assert_eq!(completed(&items).unwrap().opaque.is_some(), kept, "{items}");
    }
}

#[test]
fn why_it_stopped() {
    let a = call(&json!("a"), "{");
    let refusal = json!({"type": "message", "content": [{"type": "refusal", "refusal": "No."}]});
    let table = [
        ("completed", json!(null), json!([said("hi")]), FinishReason::Stop),
        ("completed", json!(null), json!([said("hi"), a]), FinishReason::ToolCalls),
        ("completed", json!(null), json!([refusal]), FinishReason::Refusal),
        ("completed", json!(null), json!([refusal, a]), FinishReason::Refusal),
        ("incomplete", json!("max_output_tokens"), json!([a]), FinishReason::Length),
        ("incomplete", json!("max_output_tokens"), json!([]), FinishReason::Length),
        ("incomplete", json!("content_filter"), json!([]), FinishReason::Refusal),
        ("incomplete", json!("bored"), json!([said("hi")]), FinishReason::Other),
        ("incomplete", json!("bored"), json!([a]), FinishReason::Length),
    ];
    for (status, reason, output, expected) in table {
        let answer =
            json!({"status": status, "incomplete_details": {"reason": reason}, "output": output});
        assert_eq!(read(&answer).unwrap().finish_reason, expected, "{answer}");
    }
}

#[test]
fn ids_that_are_missing_or_repeated_are_made_up() {
    let ids = [json!("a"), json!("a"), json!(""), Value::Null];
    let calls: Vec<Value> = ids.iter().map(|id| call(id, "")).collect();
    let completion = completed(&json!(calls)).unwrap();
    let ids: Vec<&str> = completion.tool_calls.iter().map(|call| call.id.as_str()).collect();
    assert_eq!(ids, ["a", "call_3_1", "call_3_2", "call_3_3"]);
    assert!(completion.tool_calls.iter().all(|call| call.arguments == "{}"));
}

#[test]
fn items_whose_names_no_request_may_have_are_not_sent_back_verbatim() {
    let reasoning = json!({"type": "reasoning", "id": "rs_1", "summary": []});
    for (name, kept) in [("file_ops", true), ("a.b", false), ("", false), ("mcp:x/y", false)] {
        let call =
            json!({"type": "function_call", "call_id": "c", "name": name, "arguments": "{}"});
        let completion = completed(&json!([reasoning, call])).unwrap();
        assert_eq!(completion.opaque.is_some(), kept, "{name:?}");
    }
}

#[test]
fn answers_without_anything_in_them_are_malformed() {
    let deep = "[".repeat(10_000);
    let bodies = [
        String::new(),
        "<html>".into(),
        "{}".into(),
        r#"{"output": []}"#.into(),
        r#"{"status": "in_progress", "output": []}"#.into(),
        r#"{"status": "completed", "output": [{}]}"#.into(),
        r#"{"status": "completed", "output": [7]}"#.into(),
        r#"{"status": "completed", "output": [{"type": "message", "content": "hi"}]}"#.into(),
        format!(r#"{{"output": {deep}"#),
        format!(
            r#"{{"output": [{{"type": "message", "content": {deep}{}}}]}}"#,
            "]".repeat(10_000)
        ),
    ];
    for body in bodies {
        assert!(
            matches!(parse(body.as_bytes(), "own", 1), Err(Unusable::Malformed(_))),
            "{body:.80}"
        );
    }
    let many: Vec<Value> = (0..2000).map(|id| call(&json!(id.to_string()), "{}")).collect();
    let read = completed(&json!(many)).unwrap().tool_calls.len();
    assert_eq!(read, normalization::CALLS_READ, "one too many, to be noticed");
}

#[test]
fn errors_have_the_status_that_their_code_stands_for() {
    let table =
        [("rate_limit_exceeded", Some(429)), ("invalid_prompt", Some(400)), ("server_error", None)];
    for (code, status) in table {
        let answer =
            json!({"status": "failed", "error": {"code": code, "message": "m"}, "output": []});
        let told = Reported { code: Some(code.into()), status, message: "m".into() };
        assert_eq!(read(&answer), Err(Unusable::Error(told)));
    }
}

#[test]
fn an_answer_that_cannot_be_used_says_what_it_took() {
    let usage = usage_of(br#"{"status": "odd", "usage": {"input_tokens": 7, "output_tokens": 2}}"#)
        .unwrap();
    assert_eq!((usage.input_tokens, usage.output_tokens), (7, 2));
    for nothing in ["", "<html>", "{}", r#"{"usage": null}"#, r#"{"usage": 1}"#] {
        assert_eq!(usage_of(nothing.as_bytes()), None, "{nothing}");
    }
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse(&bytes, "own", 1);
    }
}
