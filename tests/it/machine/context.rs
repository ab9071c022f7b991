//! The context window: what is taken from a conversation, and that what is left is one.

use proptest::prelude::*;
use toolloop::engine::context::{self, Compaction, Load, WrittenSummary};
use toolloop::engine::{Rules, Window};
use toolloop::event::CompactionCause::{self, ProviderRefused, WindowNearlyFull};
use toolloop::event::{ContextCompacted, RunEvent, SummaryCall};
use toolloop::message::{AssistantMessage, Conversation, OpaqueBlocks, ToolResult, Turn};
use toolloop::providers::estimate;

use super::Say::{Calls, Text, TooLong};
use super::{Bench, USAGE, assert_valid, call, text};

/// One turn: something said to the model, or calls with results of these lengths.
#[derive(Debug, Clone)]
enum Part {
    Said(usize),
    Called(Vec<usize>),
}
use Part::{Called, Said};

fn conversation(parts: &[Part]) -> Conversation {
    let mut conversation = Conversation::new("system");
    conversation.push_user("the task");
    for (at, part) in parts.iter().enumerate() {
        let lengths = match part {
            Said(length) => {
                conversation.push_user("s".repeat(*length));
                continue;
            }
            Called(lengths) => lengths,
        };
        let calls: Vec<_> = (0..lengths.len()).map(|index| call(at + 1, index, "a")).collect();
        let results = calls.iter().zip(lengths).map(|(call, length)| {
            ToolResult::of_service(call.id, "é".repeat(*length), length % 2 == 1)
        });
        let results = results.collect();
        let opaque = Some(OpaqueBlocks { provider: "p".into(), json: format!("[{at}]") });
        let message = AssistantMessage { tool_calls: calls, opaque, ..AssistantMessage::default() };
        conversation.push_turn(message, results).unwrap();
    }
    conversation
}

fn load(conversation: &Conversation, tokens: u64) -> Load {
    Load { tokens, bytes: bytes(conversation) }
}

/// A model of a provider that gets no opaque blocks back.
fn readers() -> [String; 1] {
    ["other/model".to_owned()]
}

fn bytes(conversation: &Conversation) -> usize {
    estimate::bytes(conversation, &readers())
}

fn plan(
    conversation: &Conversation,
    tokens: u64,
    cause: CompactionCause,
    window: Option<u64>,
) -> Option<Compaction> {
    context::plan(conversation, load(conversation, tokens), &readers(), cause, window, true)
}

fn settled(compaction: Compaction, conversation: &Conversation, text: &str) -> ContextCompacted {
    let call = SummaryCall { provider: "p".into(), model: "m".into(), usage: USAGE, latency_ms: 1 };
    let written = (compaction.summarised > 0).then(|| WrittenSummary { text: text.into(), call });
    compaction.into_event(conversation, (1, 1), written)
}

#[test]
fn results_are_cleared_before_turns_are_summarised() {
    let long = || Called(vec![500]);
    let short = || Called(vec![25; 8]); // each is too small to be cleared
    // What there is | tokens of it | window | why | results cleared, turns summarised.
    let table = [
        ("nothing but the task", vec![], 900, Some(1000), WindowNearlyFull, None),
        ("the last two turns stay", vec![long(), long()], 2000, Some(1000), WindowNearlyFull, None),
        (
            "one result is enough",
            vec![long(), long(), long(), long()],
            801,
            Some(1000),
            WindowNearlyFull,
            Some((2, 0)),
        ),
        ("the oldest first", vec![long(); 6], 801, Some(1200), WindowNearlyFull, Some((2, 0))),
        (
            "not enough: a summary too",
            vec![long(); 6],
            3000,
            Some(1000),
            WindowNearlyFull,
            Some((4, 4)),
        ),
        (
            "nothing to clear: a summary",
            vec![short(); 6],
            2000,
            Some(1000),
            WindowNearlyFull,
            Some((0, 4)),
        ),
        ("refused: halved", vec![long(); 10], 1000, None, ProviderRefused, Some((6, 0))),
        (
            "refused far below the window",
            vec![long(); 10],
            1000,
            Some(100_000),
            ProviderRefused,
            Some((6, 0)),
        ),
        (
            "refused, with too little to clear",
            vec![long(); 4],
            1000,
            None,
            ProviderRefused,
            Some((2, 2)),
        ),
        (
            "an answer stays with the reply to it",
            { vec![short(), short(), Said(9), short(), short()] },
            2000,
            Some(1000),
            WindowNearlyFull,
            Some((0, 3)),
        ),
        (
            "a reply at the edge",
            vec![short(), short(), Said(9), short()],
            2000,
            Some(1000),
            WindowNearlyFull,
            Some((0, 1)),
        ),
    ];
    for row in table {
        check_taken(row);
    }
}

type Taken = (&'static str, Vec<Part>, u64, Option<u64>, CompactionCause, Option<(usize, usize)>);

fn check_taken((what, parts, tokens, window, cause, expected): Taken) {
    let conversation = conversation(&parts);
    let compaction = plan(&conversation, tokens, cause, window);
    assert_eq!(compaction.map(|c| (c.cleared.len(), c.summarised)), expected, "{what}");
}

#[test]
fn a_refused_request_clears_large_results_of_the_last_turns() {
    let short = || Called(vec![5]);
    let table = [
        (
            "refused, with nothing but the last turns: their large results",
            vec![Called(vec![5000, 10]), short()],
            1000,
            None,
            ProviderRefused,
            Some((1, 0)),
        ),
        (
            "the largest first",
            vec![Called(vec![600]), Called(vec![700, 5000])],
            1000,
            None,
            ProviderRefused,
            Some((1, 0)),
        ),
        (
            "refused, with next to nothing else",
            vec![short(), short(), short(), Called(vec![5000])],
            1000,
            None,
            ProviderRefused,
            Some((1, 0)),
        ),
        (
            "refused, with something else",
            vec![Called(vec![1000]), short(), Called(vec![5000])],
            1000,
            None,
            ProviderRefused,
            Some((1, 1)),
        ),
        ("refused, with tiny results", vec![short(); 4], 1000, None, ProviderRefused, None),
        (
            "last results of a window that is nearly full stay",
            vec![Called(vec![25; 8]), short(), Called(vec![5000])],
            1000,
            Some(1000),
            WindowNearlyFull,
            Some((0, 1)),
        ),
        (
            "a summary of next to nothing is not asked for",
            vec![short(); 4],
            2000,
            Some(1000),
            WindowNearlyFull,
            None,
        ),
    ];
    for row in table {
        check_taken(row);
    }
}

#[test]
fn a_summary_must_be_worth_it() {
    let conversation = conversation(&[
        Called(vec![20; 3]),
        Called(vec![20; 3]),
        Said(40),
        Called(vec![20]),
        Called(vec![20]),
    ]);
    let planned = || plan(&conversation, 2000, WindowNearlyFull, Some(1000)).unwrap();
    let good = settled(planned(), &conversation, " x ");
    assert!(good.shrank() && good.tokens_after < good.tokens_before);
    assert!(good.summary.unwrap().text.ends_with("\n\nx"));
    for useless in ["", " \n", &"x".repeat(5000)] {
        let compacted = settled(planned(), &conversation, useless);
        assert!(
            compacted.summary.is_none() && compacted.call.is_some() && !compacted.shrank(),
            "{useless:?}"
        );
        assert_eq!(compacted.tokens_before, compacted.tokens_after);
    }
}

#[test]
fn reasoning_that_goes_back_counts_for_its_provider_alone() {
    let mut conversation = Conversation::new("system");
    conversation.push_user("the task");
    for at in 1..=6 {
        let calls = vec![call(at, 0, "a")];
        let results = vec![ToolResult::of_service(calls[0].id, "ok", false)];
        let json = format!(r#"{{"model":"m","reasoning":"{}"}}"#, "r".repeat(3000));
        let opaque = Some(OpaqueBlocks { provider: "p".into(), json });
        let message = AssistantMessage { tool_calls: calls, opaque, ..AssistantMessage::default() };
        conversation.push_turn(message, results).unwrap();
    }
    for (reader, shrinks) in [("p/m", true), ("p/other", false), ("q/m", false)] {
        for cause in [WindowNearlyFull, ProviderRefused] {
            let readers = [reader.to_owned()];
            let load = Load { tokens: 5000, bytes: estimate::bytes(&conversation, &readers) };
            let compaction = context::plan(&conversation, load, &readers, cause, Some(5000), true);
            let summary = "s".repeat(1000);
            let shrank = compaction
                .map(|compaction| settled(compaction, &conversation, &summary))
                .is_some_and(|compacted| compacted.shrank());
            assert_eq!(shrank, shrinks, "{reader} {cause:?}");
        }
    }
}

#[test]
fn the_record_for_a_summary_is_short_and_shows_every_call() {
    let conversation = conversation(&[
        Called(vec![9000, 1]),
        Said(9000),
        Called(vec![7]),
        Called(vec![7]),
        Called(vec![7]),
    ]);
    let compaction = plan(&conversation, 9000, WindowNearlyFull, Some(1000)).unwrap();
    let request = compaction.request(&conversation);
    let [Turn::User(text)] = request.turns() else { panic!("{request:?}") };
    assert!(text.len() < 5000, "{}", text.len());
    for part in [
        "the task",
        "Call of a: {}\nResult: éé",
        "Failed: é\n",
        "To the agent: sss",
        "bytes left out]",
    ] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
}

fn windowed(tokens: u64) -> Rules {
    Rules { windows: vec![Window { model: "mock/m".into(), tokens: Some(tokens) }], ..text() }
}

fn compactions(bench: &Bench) -> Vec<(CompactionCause, usize, usize)> {
    let events = bench.journal.iter().filter_map(|event| match &event.what {
        RunEvent::ContextCompacted(c) => {
            Some((c.cause, c.cleared.len(), c.summary.as_ref().map_or(0, |s| s.turns)))
        }
        _ => None,
    });
    events.collect()
}

pub fn at_most_two_compactions_an_iteration(bench: &Bench) {
    let mut since = 0;
    for event in &bench.journal {
        match &event.what {
            RunEvent::IterationStarted { .. } => since = 0,
            RunEvent::ContextCompacted(_) => since += 1,
            _ => {}
        }
        assert!(since <= 2, "{event:#?}");
    }
}

#[test]
fn runs_and_their_windows() {
    let (long, much) = (|| Calls(vec!["long"]), || Calls(vec!["long"; 5]));
    let (full, refused) = (WindowNearlyFull, ProviderRefused);
    // What happens | window | script | reason, iterations | what was taken.
    let table = [
        (
            "a window with room",
            1000,
            vec![long(), long(), long(), Text("x")],
            "completed",
            4,
            vec![],
        ),
        (
            "a result is cleared",
            130,
            vec![long(), long(), long(), Text("x")],
            "completed",
            4,
            vec![(full, 1, 0)],
        ),
        (
            "turns are summarised",
            90,
            vec![long(), long(), long(), Text("x")],
            "completed",
            4,
            vec![(full, 0, 1)],
        ),
        (
            "a refused call is repeated",
            9000,
            vec![long(), long(), long(), TooLong, Text("x")],
            "completed",
            4,
            vec![(refused, 0, 1)],
        ),
        (
            "one that is refused again is not",
            9000,
            vec![long(), long(), long(), TooLong],
            "context_overflow",
            3,
            vec![(refused, 0, 1)],
        ),
        ("nothing can be taken away", 9000, vec![long(), TooLong], "context_overflow", 1, vec![]),
        (
            "both in one iteration",
            600,
            vec![much(), much(), much(), TooLong, Text("x")],
            "completed",
            4,
            vec![(full, 5, 0), (refused, 0, 1)],
        ),
    ];
    for (what, window, script, reason, iterations, taken) in table {
        let mut bench = Bench::new(windowed(window), script);
        bench.run(false);
        assert_eq!(
            (bench.reason(), bench.state.totals().iterations),
            (reason, iterations),
            "{what}"
        );
        assert_eq!(compactions(&bench), taken, "{what}");
        super::check_journal(&bench, what);
    }
}

#[test]
fn a_refused_call_that_cannot_be_made_smaller_overflows() {
    let some = || Calls(vec!["a"; 12]);
    let mut rules = windowed(9000);
    rules.limits.max_tool_calls_per_iteration = 12;
    let mut bench = Bench::new(rules, vec![some(), some(), some(), TooLong, Text("x")]);
    bench.summary = "far longer than what it is to stand for, and so of no use to anybody at all, \
                     though it says the same in more words than the whole conversation has so far";
    bench.run(false);
    assert_eq!(
        (bench.reason(), compactions(&bench)),
        ("context_overflow", vec![(ProviderRefused, 0, 0)])
    );
}

#[test]
fn a_summary_that_frees_nothing_is_not_asked_for() {
    let tiny = || Calls(vec!["a"]);
    let script = vec![tiny(), tiny(), tiny(), tiny(), TooLong];
    let mut bench = Bench::new(windowed(9000), script);
    bench.run(false);
    assert_eq!((bench.reason(), compactions(&bench)), ("context_overflow", vec![]));
    assert_eq!(bench.state.totals().usage.total_tokens(), 4 * 15);
}

#[test]
fn a_summary_that_gains_nothing_is_not_asked_for_again_and_again() {
    let long = || Calls(vec!["long"]);
    for summary in ["", "all fine"] {
        let script = [vec![long(); 7], vec![Text("x")]].concat();
        let mut bench = Bench::new(windowed(90), script);
        bench.summary = summary;
        bench.run(false);
        assert_eq!((bench.reason(), bench.state.totals().iterations), ("completed", 8));
        let asked = bench.journal.iter().filter(|event| match &event.what {
            RunEvent::ContextCompacted(compacted) => compacted.call.is_some(),
            _ => false,
        });
        let most = if summary.is_empty() { 1..=2 } else { 1..=8 };
        assert!(most.contains(&asked.count()), "{summary:?}");
    }
}

#[test]
fn a_summary_counts_against_the_budget_and_not_as_an_iteration() {
    let long = || Calls(vec!["long"]);
    let mut rules = windowed(90);
    rules.budget.max_total_tokens = Some(10_000);
    let mut bench = Bench::new(rules, vec![long(), long(), long(), Text("x")]);
    bench.run(false);
    assert_eq!((bench.reason(), bench.state.totals().iterations), ("completed", 4));
    assert_eq!(bench.state.totals().usage.total_tokens(), 75);
    assert_eq!(bench.state.model_step(), 6);
}

#[test]
fn the_window_is_that_of_the_model_that_answered_last() {
    let long = || Calls(vec!["long"]);
    let window = |model: &str, tokens| Window { model: model.into(), tokens };
    for (windows, taken) in [([Some(130), None], 0), ([None, Some(130)], 1)] {
        let windows = vec![window("other/m", windows[0]), window("mock/m", windows[1])];
        let mut bench =
            Bench::new(Rules { windows, ..text() }, vec![long(), long(), long(), Text("x")]);
        bench.run(false);
        assert_eq!(compactions(&bench).len(), taken);
    }
}

#[test]
fn a_refused_call_is_made_smaller_for_the_window_of_the_model_that_refused_it() {
    let long = || Calls(vec!["long"]);
    let window = |model: &str, tokens| Window { model: model.into(), tokens };
    let windows = vec![window("other/m", None), window("mock/m", Some(9000))];
    let script = vec![long(), long(), long(), TooLong, Text("x")];
    let mut bench = Bench::new(Rules { windows, ..text() }, script);
    bench.run(false);
    let known = bench.journal.iter().find_map(|event| match &event.what {
        RunEvent::ContextCompacted(compacted) => Some(compacted.window),
        _ => None,
    });
    assert_eq!(known, Some(Some(9000)));
}

fn part() -> impl Strategy<Value = Part> {
    let lengths = prop::collection::vec(prop_oneof![0..80usize, 80..2000usize], 0..4);
    prop_oneof![3 => lengths.prop_map(Called), 1 => (0..500usize).prop_map(Said)]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_compacted_conversation_is_valid_and_smaller(
        parts in prop::collection::vec(part(), 0..12),
        tokens in 1..10_000u64,
        window in prop::option::of(256..10_000u64),
        refused in any::<bool>(),
        summary in "\\PC{0,200}",
    ) {
        let before = conversation(&parts);
        let cause = if refused { ProviderRefused } else { WindowNearlyFull };
        let Some(compaction) = plan(&before, tokens, cause, window) else { return Ok(()) };
        let needs_model = compaction.summarised > 0;
        let clears = !compaction.cleared.is_empty();
        let compacted = settled(compaction, &before, &summary);

        let mut after = before.clone();
        after.clear_results(&compacted.cleared);
        if let Some(summary) = &compacted.summary {
            after.summarise(summary.turns, summary.text.as_str()).unwrap();
        }
        assert_valid(&after, "property");
        prop_assert_eq!(compacted.shrank(), clears || compacted.summary.is_some());
        prop_assert_eq!(compacted.call.is_some(), needs_model);
        prop_assert_eq!(bytes(&before) as u64, compacted.bytes_before);
        prop_assert_eq!(bytes(&after) as u64, compacted.bytes_after);
        prop_assert!(compacted.bytes_after <= compacted.bytes_before && compacted.tokens_after <= compacted.tokens_before);

        prop_assert_eq!(after.system(), before.system());
        let (old, new) = (before.turns(), after.turns());
        prop_assert_eq!(&old[0], &new[0]);
        if !refused {
            prop_assert_eq!(&old[old.len() - 2..], &new[new.len() - 2..]);
        }
        let shift = old.len() - new.len();
        for (at, turn) in new.iter().enumerate().skip(2) {
            match (&old[at + shift], turn) {
                (Turn::Assistant(old), Turn::Assistant(new)) => prop_assert_eq!(old.message(), new.message()),
                (old, new) => prop_assert_eq!(old, new),
            }
        }

        let planned_again = plan(&after, compacted.tokens_after, cause, window);
        let again = planned_again.map(|compaction| compaction.cleared).unwrap_or_default();
        prop_assert!(again.iter().all(|call| !compacted.cleared.contains(call)), "a note is not cleared again");
    }
}
