//! Answers, whole, in lines, cut off anywhere and chopped anyhow.

use std::sync::Mutex;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::bounds::frames::{Framing, Splitter};
use crate::providers::failure::Reported;
use crate::providers::wire::MAX_FRAME;

const TEXT: &[u8] = include_bytes!("../../../tests/cassettes/ollama/text.ndjson");
const TOOLS: &[u8] = include_bytes!("../../../tests/cassettes/ollama/tools.ndjson");
const ERROR: &[u8] = include_bytes!("../../../tests/cassettes/ollama/error.ndjson");

fn read<'a>(
    chunks: impl IntoIterator<Item = &'a [u8]>,
    deltas: Deltas<'_>,
) -> Result<Completion, Unusable> {
    let (mut splitter, mut fold) = (Splitter::new(Framing::Lines, MAX_FRAME), Fold::default());
    for chunk in chunks {
        splitter.push(chunk).unwrap();
        while let Some(frame) = splitter.next() {
            if !fold.is_complete() {
                fold.line(&frame.data, 3, deltas)?;
            }
        }
    }
    fold.completion("ollama")
}

fn whole(answer: &Value) -> Result<Completion, Unusable> {
    let mut fold = Fold::default();
    fold.line(answer.to_string().as_bytes(), 3, Deltas::default())?;
    fold.completion("ollama")
}

#[test]
fn pieces_are_the_same_answer() {
    let recorded: [(&[u8], &[u8]); 2] = [
        (TEXT, include_bytes!("../../../tests/cassettes/ollama/text.json")),
        (TOOLS, include_bytes!("../../../tests/cassettes/ollama/tools.json")),
    ];
    for (lines, whole) in recorded {
        assert_eq!(read([lines], Deltas::default()), read([whole], Deltas::default()));
    }
    let completion = read([TOOLS], Deltas::default()).unwrap();
    let call = |id: &str, name: &str, arguments: &str| RawToolCall {
        id: id.into(),
        wire_name: name.into(),
        arguments: arguments.into(),
    };
    let expected = Completion {
        text: String::new(),
        thinking: Some("I should look.".into()),
        tool_calls: vec![
            call("call_x1y2z3w4", "file_ops", r#"{"operation":"list","path":"é"}"#),
            call("call_3_1", "mcp__time__now", "{}"),
        ],
        opaque: Some(OpaqueBlocks {
            provider: "ollama".into(),
            json: r#"{"thinking":"I should look."}"#.into(),
        }),
        finish_reason: FinishReason::ToolCalls,
        usage: Some(Usage { input_tokens: 900, output_tokens: 40, ..Usage::default() }),
    };
    assert_eq!(completion, expected);
    let text = read([TEXT], Deltas::default()).unwrap();
    assert_eq!(
        (text.text.as_str(), text.opaque),
        ("Two files: a.txt and b.txt.", None),
        "final thoughts stay"
    );
}

#[test]
fn a_stream_that_is_cut_anywhere_is_never_complete() {
    for lines in [TEXT, TOOLS, ERROR] {
        for cut in 0..lines.len() {
            assert!(read([&lines[..cut]], Deltas::default()).is_err(), "cut at {cut}");
        }
    }
}

#[test]
fn an_error_line_is_an_error() {
    let error = read([ERROR], Deltas::default()).unwrap_err();
    let Unusable::Error(Reported { message, status: None, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(message.starts_with("model runner has unexpectedly stopped"), "{message}");
}

#[test]
fn a_follower_sees_every_piece_as_it_comes() {
    let seen = Mutex::new(Vec::new());
    let follower = |delta| seen.lock().unwrap().push(delta);
    read([TOOLS], Deltas(Some(&follower))).unwrap();
    let call = |index, name: &str, arguments: &str| Delta::ToolCall {
        index,
        wire_name: Some(name.into()),
        arguments: arguments.into(),
    };
    let expected = [
        Delta::Thinking("I should".into()),
        Delta::Thinking(" look.".into()),
        call(0, "file_ops", r#"{"operation":"list","path":"é"}"#),
        call(1, "mcp__time__now", "{}"),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

#[test]
fn every_reason_has_its_meaning() {
    let calls =
        json!({"content": "", "tool_calls": [{"function": {"name": "t", "arguments": {}}}]});
    let text = json!({"content": "hi"});
    let table = [
        (&text, json!("stop"), FinishReason::Stop),
        (&text, json!(""), FinishReason::Stop),
        (&text, Value::Null, FinishReason::Stop),
        (&text, json!("length"), FinishReason::Length),
        (&text, json!("bored"), FinishReason::Other),
        (&calls, json!("stop"), FinishReason::ToolCalls),
        (&calls, json!("length"), FinishReason::Length),
    ];
    for (message, reason, expected) in table {
        let completion =
            whole(&json!({"message": message, "done": true, "done_reason": reason})).unwrap();
        assert_eq!(
            (completion.finish_reason, completion.usage),
            (expected, None),
            "{message} {reason}"
        );
    }
    for reason in ["load", "unload"] {
        let answer = json!({"message": {"content": ""}, "done": true, "done_reason": reason});
        assert!(matches!(whole(&answer), Err(Unusable::Malformed(_))), "{reason}");
    }
}

#[test]
fn arguments_come_as_objects_or_as_text() {
    let call = |id: Value, arguments: Value| json!({"id": id, "function": {"name": "t\u{0}", "arguments": arguments}});
    let calls = [
        call(json!("a"), json!({"x": "1\u{0}2"})),
        call(json!("a"), json!("{\"x\":1}")),
        call(Value::Null, Value::Null),
    ];
    let completion =
        whole(&json!({"message": {"content": null, "tool_calls": calls}, "done": true})).unwrap();
    let calls = completion
        .tool_calls
        .iter()
        .map(|c| (c.id.as_str(), c.wire_name.as_str(), c.arguments.as_str()));
    let expected = [
        ("a", "t\u{FFFD}", r#"{"x":"1\u00002"}"#),
        ("call_3_1", "t\u{FFFD}", r#"{"x":1}"#),
        ("call_3_2", "t\u{FFFD}", "{}"),
    ];
    assert_eq!(calls.collect::<Vec<_>>(), expected);
}

#[test]
fn answers_without_anything_in_them_are_malformed() {
    let deep = "[".repeat(10_000);
    let bodies = [
        String::new(),
        "<html>".into(),
        "{}".into(),
        r#"{"message": {"content": "hi"}}"#.into(),
        r#"{"message": {"content": "hi"}, "done": false}"#.into(),
        r#"{"message": {"content": 1}, "done": true}"#.into(),
        r#"{"message": {"tool_calls": [{"id": "a"}]}, "done": true}"#.into(),
        format!(r#"{{"message": {deep}"#),
    ];
    for body in bodies {
        let mut fold = Fold::default();
        let read = fold
            .line(body.as_bytes(), 1, Deltas::default())
            .and_then(|()| fold.completion("ollama"));
        assert!(matches!(read, Err(Unusable::Malformed(_))), "{body:.80}");
    }
}

proptest! {
    #[test]
    fn how_the_bytes_were_chopped_makes_no_difference(mut cuts in prop::collection::vec(0..TOOLS.len(), 0..40)) {
        cuts.extend([0, TOOLS.len()]);
        cuts.sort_unstable();
        let chunks = cuts.windows(2).map(|cut| &TOOLS[cut[0]..cut[1]]);
        prop_assert_eq!(read(chunks, Deltas::default()), read([TOOLS], Deltas::default()));
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = read([bytes.as_slice()], Deltas::default());
    }
}
