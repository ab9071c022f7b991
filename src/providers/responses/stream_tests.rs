//! Streams of Responses, whole and cut.

use std::sync::Mutex;

use serde_json::json;

use super::*;
use crate::bounds::frames::{Framing, Splitter};
use crate::message::FinishReason;
use crate::providers::failure::Reported;
use crate::providers::wire::MAX_FRAME;

macro_rules! cassette {
    ($file:literal) => {
        include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cassettes/openai/", $file))
    };
}

/// Streams as OpenAI sends them, each with the same answer in one piece.
const CASSETTES: [(&str, &str); 4] = [
    (cassette!("responses_tools.sse"), cassette!("responses_tools.json")),
    (cassette!("responses_text.sse"), cassette!("responses_text.json")),
    (cassette!("responses_cut.sse"), cassette!("responses_cut.json")),
    (cassette!("responses_refusal.sse"), cassette!("responses_refusal.json")),
];

fn read(stream: &str, end: usize, deltas: Deltas<'_>) -> Result<Option<Completion>, Unusable> {
    let (mut splitter, mut answer) = (Splitter::new(Framing::Sse, MAX_FRAME), Answer::default());
    splitter.push(&stream.as_bytes()[..end]).unwrap();
    while let Some(frame) = splitter.next() {
        if let Some(completion) = answer.take(&frame.data, deltas, "own", 3)? {
            return Ok(Some(completion));
        }
    }
    Ok(None)
}

fn whole(stream: &str) -> Result<Option<Completion>, Unusable> {
    read(stream, stream.len(), Deltas::default())
}

/// An answer whose kept items are compared by value: white space differs between the two forms.
fn by_value(completion: Completion) -> (Completion, serde_json::Value) {
    let kept = completion
        .opaque
        .as_ref()
        .map_or(json!(null), |blocks| serde_json::from_str(&blocks.json).unwrap());
    (Completion { opaque: None, ..completion }, kept)
}

#[test]
fn an_answer_in_pieces_means_what_it_means_in_one_piece() {
    for (stream, json) in CASSETTES {
        let in_one_piece = response::parse(json.as_bytes(), "own", 3).unwrap();
        assert_eq!(by_value(whole(stream).unwrap().unwrap()), by_value(in_one_piece));
    }
}

#[test]
fn a_stream_cut_anywhere_is_never_complete() {
    for (stream, _) in CASSETTES {
        for end in 0..stream.len() {
            assert_eq!(
                read(stream, end, Deltas::default()),
                Ok(None),
                "complete after {end} of {} bytes",
                stream.len()
            );
        }
    }
}

#[test]
fn deltas_come_with_the_pieces_and_add_up() {
    for (stream, _) in CASSETTES {
        let heard = Mutex::new((String::new(), String::new(), Vec::<(String, String)>::new()));
        let follower = |delta| {
            let mut heard = heard.lock().unwrap();
            match delta {
                Delta::Text(piece) => heard.0.push_str(&piece),
                Delta::Thinking(piece) => heard.1.push_str(&piece),
                Delta::ToolCall { wire_name: Some(name), .. } => {
                    heard.2.push((name, String::new()));
                }
                Delta::ToolCall { index, arguments, .. } => heard.2[index].1.push_str(&arguments),
                Delta::Restarted => unreachable!("an adapter makes one try"),
            }
        };
        let completion = read(stream, stream.len(), Deltas(Some(&follower))).unwrap().unwrap();
        let calls = completion
            .tool_calls
            .into_iter()
            .map(|call| (call.wire_name, call.arguments))
            .collect();
        let expected = (completion.text, completion.thinking.unwrap_or_default(), calls);
        assert_eq!(heard.into_inner().unwrap(), expected);
    }
}

#[test]
fn items_that_the_last_event_leaves_out_are_not_lost() {
    let done = json!({"type": "response.output_item.done", "output_index": 0,
        "item": {"type": "function_call", "call_id": "a", "name": "t", "arguments": "{}"}});
    let last =
        json!({"type": "response.completed", "response": {"status": "completed", "output": []}});
    let completion = whole(&format!("data: {done}\n\ndata: {last}\n\n")).unwrap().unwrap();
    assert_eq!(
        (completion.finish_reason, completion.tool_calls.len()),
        (FinishReason::ToolCalls, 1)
    );
}

#[test]
fn errors_and_nonsense_end_a_stream() {
    let flat =
        json!({"type": "error", "code": "server_error", "message": "broke", "sequence_number": 3});
    let nested = json!({"type": "error", "error": {"type": "server_error", "message": "broke"}});
    let error = json!({"code": "server_error", "message": "broke"});
    let failed =
        json!({"type": "response.failed", "response": {"status": "failed", "error": error}});
    for event in [flat, nested, failed] {
        let told =
            Reported { code: Some("server_error".into()), status: None, message: "broke".into() };
        assert_eq!(whole(&format!("data: {event}\n\n")), Err(Unusable::Error(told)), "{event}");
    }
    let deep = format!(
        "data: {{\"type\": \"response.completed\", \"response\": {}\n\n",
        "[".repeat(10_000)
    );
    for nonsense in ["data: [DONE]\n\n", "data: {\"type\": \"response.completed\"}\n\n", &deep] {
        assert!(matches!(whole(nonsense), Err(Unusable::Malformed(_))), "{nonsense:.80}");
    }
}
