//! Recorded streams, whole, cut off anywhere and chopped anyhow.

use std::sync::Mutex;

use proptest::prelude::*;

use super::*;
use crate::bounds::frames::{Framing, Splitter};
use crate::message::FinishReason;
use crate::providers::normalization::Unusable;
use crate::providers::wire::MAX_FRAME;

const TEXT: &[u8] = include_bytes!("../../../tests/cassettes/anthropic/text.sse");
const TOOLS: &[u8] = include_bytes!("../../../tests/cassettes/anthropic/thinking_tools.sse");
const CUT_OFF: &[u8] = include_bytes!("../../../tests/cassettes/anthropic/max_tokens.sse");
const OVERLOADED: &[u8] = include_bytes!("../../../tests/cassettes/anthropic/overloaded.sse");

fn read<'a>(
    chunks: impl IntoIterator<Item = &'a [u8]>,
    deltas: Deltas<'_>,
) -> Result<Completion, Unusable> {
    let (mut splitter, mut fold) = (Splitter::new(Framing::Sse, MAX_FRAME), Fold::default());
    for chunk in chunks {
        splitter.push(chunk).unwrap();
        while let Some(frame) = splitter.next() {
            if !fold.is_complete() {
                fold.event(&frame.data, deltas)?;
            }
        }
    }
    fold.completion("anthropic", 1)
}

fn events(events: &[&str]) -> Result<Completion, Unusable> {
    let mut fold = Fold::default();
    for event in events {
        fold.event(event.as_bytes(), Deltas::default())?;
    }
    fold.completion("anthropic", 1)
}

#[test]
fn pieces_are_the_same_answer() {
    let whole: &[(&[u8], &[u8])] = &[
        (TEXT, include_bytes!("../../../tests/cassettes/anthropic/text.json")),
        (TOOLS, include_bytes!("../../../tests/cassettes/anthropic/thinking_tools.json")),
    ];
    for (stream, whole) in whole {
        let whole = response::parse(whole, "anthropic", 1);
        assert_eq!(read([*stream], Deltas::default()), whole);
        assert!(whole.is_ok());
    }
}

#[test]
fn a_stream_that_is_cut_anywhere_is_never_complete() {
    for stream in [TEXT, TOOLS, CUT_OFF, OVERLOADED] {
        let end = stream.len() - usize::from(stream.ends_with(b"\n\n"));
        for cut in 0..end {
            assert!(read([&stream[..cut]], Deltas::default()).is_err(), "cut at {cut}");
        }
    }
}

#[test]
fn a_call_that_was_cut_off_says_so() {
    let completion = read([CUT_OFF], Deltas::default()).unwrap();
    assert_eq!(completion.finish_reason, FinishReason::Length);
    assert_eq!(completion.tool_calls[0].arguments, r#"{"operation":"write","content":"Once upon"#);
}

#[test]
fn an_error_within_the_stream_is_an_error() {
    let error = read([OVERLOADED], Deltas::default()).unwrap_err();
    let Unusable::Error(reported) = error else { panic!("{error:?}") };
    assert_eq!((reported.code.as_deref(), reported.status), (Some("overloaded_error"), Some(529)));
}

#[test]
fn a_follower_sees_every_piece_as_it_comes() {
    let seen = Mutex::new(Vec::new());
    let follower = |delta| seen.lock().unwrap().push(delta);
    read([TOOLS], Deltas(Some(&follower))).unwrap();
    let (text, thinking) = (|t: &str| Delta::Text(t.into()), |t: &str| Delta::Thinking(t.into()));
    let begun = |index, name: &str| Delta::ToolCall {
        index,
        wire_name: Some(name.into()),
        arguments: String::new(),
    };
    let more =
        |index, piece: &str| Delta::ToolCall { index, wire_name: None, arguments: piece.into() };
    let expected = [
        thinking("I should look at the files"),
        thinking(" \"first\": é, 日本."),
        text("Let me "),
        text("look."),
        begun(0, "file_ops"),
        more(0, "{\"operation\":"),
        more(0, "\"list\",\"pa"),
        more(0, "th\":\".\"}"),
        begun(1, "mcp__time__now"),
    ];
    assert_eq!(*seen.lock().unwrap(), expected);
}

const STOP: [&str; 2] = [
    r#"{"type":"message_delta","delta":{"stop_reason":"end_turn"}}"#,
    r#"{"type":"message_stop"}"#,
];

#[test]
fn what_we_do_not_know_is_passed_over_and_what_is_whole_is_kept() {
    let begun = [
        r#"{"type":"fanfare"}"#,
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"server_tool_use","id":"s","name":"w","input":{}}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"{\"q\":"}}"#,
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"input_json_delta","partial_json":"1}"}}"#,
        r#"{"type":"content_block_stop","index":0}"#,
        r#"{"type":"content_block_start","index":1,"content_block":{"type":"hologram","depth":3}}"#,
        r#"{"type":"content_block_delta","index":1,"delta":{"type":"hologram_delta","x":1}}"#,
        r#"{"type":"content_block_stop","index":1}"#,
        r#"{"type":"content_block_start","index":2,"content_block":{"type":"text","text":"h"}}"#,
        r#"{"type":"content_block_delta","index":2,"delta":{"type":"citations_delta","citation":{}}}"#,
        r#"{"type":"content_block_delta","index":2,"delta":{"type":"text_delta","text":"i"}}"#,
        r#"{"type":"content_block_stop","index":2}"#,
    ];
    let completion = events(&[begun.as_slice(), STOP.as_slice()].concat()).unwrap();
    assert_eq!((completion.text.as_str(), completion.usage), ("hi", None));
    let kept = r#"[{"type":"server_tool_use","id":"s","name":"w","input":{"q":1}},{"type":"text","text":"hi"}]"#;
    assert_eq!(completion.opaque.unwrap().json, kept);
}

#[test]
fn a_call_may_come_with_its_whole_input() {
    let begun = [
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"tool_use","id":"a","name":"t","input":{"x":1}}}"#,
        r#"{"type":"content_block_stop","index":0}"#,
    ];
    let completion = events(&[begun.as_slice(), STOP.as_slice()].concat()).unwrap();
    assert_eq!(completion.tool_calls[0].arguments, r#"{"x":1}"#);
}

#[test]
fn streams_out_of_order_are_malformed() {
    let begin =
        r#"{"type":"content_block_start","index":0,"content_block":{"type":"text","text":""}}"#;
    let piece =
        r#"{"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":"x"}}"#;
    let end = r#"{"type":"content_block_stop","index":0}"#;
    let table: &[&[&str]] = &[
        &[piece],
        &[end],
        &[begin, begin],
        &[begin, end, piece],
        &[begin, end, end],
        &[begin, STOP[0], STOP[1]],
        &[begin, end, STOP[0]],
        &[begin, end, STOP[1]],
        &[r#"{"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}"#],
        &[r#"{"type":"content_block_start","index":0}"#],
        &["{"],
        &["[DONE]"],
    ];
    for events_of in table {
        assert!(matches!(events(events_of), Err(Unusable::Malformed(_))), "{events_of:?}");
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
    fn no_events_make_it_panic(frames in prop::collection::vec(r#"\{"type":"(content_block_(start|delta|stop)|message_(start|delta|stop)|error)","index":[0-2],"(delta|content_block|message)":\{"type":"(text|tool_use|thinking|new|text_delta|input_json_delta)"(,"name":"t")?\}\}"#, 0..12)) {
        let _ = events(&frames.iter().map(String::as_str).collect::<Vec<_>>());
    }
}
