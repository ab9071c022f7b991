//! What runs give to later ones, and how much of it is taken.

use chrono::Utc;
use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::event::{
    CompactionCause, ContextCompacted, ModelResponded, RunEvent, Summary, ToolCallCompleted,
};
use crate::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, OpaqueBlocks, ToolCall, Usage,
};
use crate::run::{Outcome, TerminationReason};
use crate::runtime::journals::by_run;

/// A journal under construction.
struct Story {
    run: Uuid,
    events: Vec<Event>,
}

impl Story {
    /// A run that took over these turns and was asked this.
    fn new(history: &[Turn], asked: &str) -> Self {
        let mut story = Self { run: Uuid::now_v7(), events: Vec::new() };
        let turns = history.iter().cloned().chain([Turn::User(asked.into())]).collect();
        let (system, history, warnings) = ("s".to_owned(), history.len(), Vec::new());
        story.tell(RunEvent::RunStarted { system, turns, history, single_shot: false, warnings });
        story.tell(RunEvent::AttemptStarted { attempt: 1 });
        story
    }

    fn tell(&mut self, what: RunEvent) -> &mut Self {
        let seq = i64::try_from(self.events.len()).unwrap() + 1;
        self.events.push(Event { seq, at: Utc::now(), run_id: self.run, what });
        self
    }

    fn answer(&mut self, message: AssistantMessage) -> &mut Self {
        self.tell(RunEvent::IterationStarted {
            attempt: 1,
            iteration: 1,
            answer_only: false,
            limit: None,
        });
        self.tell(RunEvent::ModelResponded(ModelResponded {
            attempt: 1,
            iteration: 1,
            provider: "p".into(),
            model: "m".into(),
            message,
            finish_reason: FinishReason::Stop,
            usage: Usage::default(),
            latency_ms: 1,
            retries: 0,
            fallback: false,
            window: None,
            repeated: false,
            warnings: Vec::new(),
        }))
    }

    fn say(&mut self, text: &str) -> &mut Self {
        self.answer(AssistantMessage { text: text.into(), ..AssistantMessage::default() })
    }

    fn call(&mut self, result: &str) -> &mut Self {
        let (id, target) = (Uuid::now_v7(), CallTarget::Tool);
        let call = ToolCall {
            id,
            provider_id: "c".into(),
            name: "t".into(),
            arguments: "{}".into(),
            target,
        };
        self.answer(AssistantMessage { tool_calls: vec![call], ..AssistantMessage::default() });
        self.tell(RunEvent::ToolCallCompleted(ToolCallCompleted {
            call_id: id,
            tool: "t".into(),
            target,
            content: result.into(),
            failure: None,
            duration_ms: 0,
            cached: false,
            note: None,
            changes: None,
            changes_omitted: 0,
            sandbox: None,
            network: None,
            replaced: None,
            child_run_id: None,
            reconciled: None,
            found_out: false,
        }))
    }

    fn compact(&mut self, turns: usize, text: &str) -> &mut Self {
        self.tell(RunEvent::ContextCompacted(ContextCompacted {
            attempt: 1,
            iteration: 1,
            cause: CompactionCause::WindowNearlyFull,
            cleared: Vec::new(),
            summary: Some(Summary { turns, text: text.into() }),
            call: None,
            failed_tries: 0,
            window: None,
            tokens_before: 9,
            tokens_after: 1,
            bytes_before: 9,
            bytes_after: 1,
        }))
    }

    fn overflow(&mut self) -> Vec<Event> {
        let reason = TerminationReason::ContextOverflow;
        let outcome = Outcome::failed(reason, "too long", json!(null), String::new());
        self.tell(RunEvent::ended(outcome, 1));
        self.events.clone()
    }

    fn end(&mut self) -> Vec<Event> {
        let reason = TerminationReason::Completed;
        let outcome = Outcome::Completed {
            output: json!({}),
            raw_response: String::new(),
            reason,
            partial: false,
            unchecked: vec![],
        };
        self.tell(RunEvent::ended(outcome, 1));
        self.events.clone()
    }
}

/// What turns say, one word each.
fn words(turns: &[Turn]) -> Vec<String> {
    let word = |turn: &Turn| match turn {
        Turn::User(text) => format!("u:{text}"),
        Turn::Assistant(turn) => {
            let said = ["a:", &turn.message().text].concat();
            turn.results().iter().fold(said, |said, result| said + ">" + &result.content)
        }
    };
    turns.iter().map(word).collect()
}

/// Two earlier runs: four turns.
fn before() -> Vec<Turn> {
    let mut conversation = Conversation::new("");
    for (asked, said) in [("q1", "a1"), ("q2", "a2")] {
        conversation.push_user(asked);
        conversation
            .push_turn(AssistantMessage { text: said.into(), ..Default::default() }, Vec::new())
            .unwrap();
    }
    conversation.turns().to_vec()
}

#[test]
fn a_run_gives_its_own_turns_as_they_were() {
    let journal = Story::new(&before(), "q3").call("17").say("a3").end();
    let own = own_turns(&journal).unwrap();
    assert_eq!((words(&own.turns), own.replaces_earlier), (words_of("u:q3 a:>17 a:a3"), false));
    let cancelled_at_once = Story::new(&before(), "q3").end();
    assert_eq!(own_turns(&cancelled_at_once).unwrap(), RunTurns::default());
    assert_eq!(own_turns(&[]).unwrap(), RunTurns::default());
}

fn words_of(text: &str) -> Vec<String> {
    text.split(' ').map(str::to_owned).collect()
}

#[test]
fn a_summary_within_the_history_leaves_the_own_turns_alone() {
    for summarised in 1..=4 {
        let journal = Story::new(&before(), "q3")
            .call("17")
            .call("18")
            .compact(summarised, "S")
            .say("a3")
            .end();
        let own = own_turns(&journal).unwrap();
        assert_eq!(
            (words(&own.turns), own.replaces_earlier),
            (words_of("u:q3 a:>17 a:>18 a:a3"), false)
        );
    }
}

#[test]
fn a_summary_beyond_the_history_stands_for_the_runs_before() {
    let journal = Story::new(&before(), "q3")
        .call("17")
        .call("18")
        .call("19")
        .compact(5, "S")
        .say("a3")
        .end();
    let own = own_turns(&journal).unwrap();
    assert_eq!(
        (words(&own.turns), own.replaces_earlier),
        (words_of("u:q3 u:S a:>18 a:>19 a:a3"), true)
    );
    // Without history there is nothing before that it could stand for.
    let journal =
        Story::new(&[], "q3").call("17").call("18").call("19").compact(1, "S").say("a3").end();
    let own = own_turns(&journal).unwrap();
    assert_eq!(
        (words(&own.turns), own.replaces_earlier),
        (words_of("u:q3 u:S a:>18 a:>19 a:a3"), false)
    );
}

/// The journals in the order of ids, as the store gives them, and the ids in the order of time.
fn journals_and_ids(stories: Vec<Vec<Event>>) -> (Vec<Event>, Vec<Uuid>) {
    let ids = stories.iter().map(|journal| journal[0].run_id).collect();
    let mut stories = stories;
    stories.sort_by_key(|journal| journal[0].run_id.as_u128().reverse_bits());
    (stories.concat(), ids)
}

/// What these runs give, the oldest first, within these bounds.
fn history(journals: &[Event], ids: &[Uuid], bounds: HistorySection) -> History {
    let (mut history, by_run) = (History::within(bounds, &[]), by_run(journals));
    ids.iter().rev().for_each(|id| history.add(by_run[id]).unwrap());
    history
}

#[test]
fn whole_runs_are_dropped_from_the_oldest() {
    let long = |name: &str| Story::new(&[], name).say(&"x".repeat(398)).end(); // 100 tokens
    let (journals, ids) =
        journals_and_ids(vec![long("q1"), Story::new(&[], "q2").end(), long("q3"), long("q4")]);
    for (max_runs, max_tokens, expected) in [
        (9, 1000, vec!["q1", "q3", "q4"]),
        (9, 299, vec!["q3", "q4"]),
        (2, 1000, vec!["q3", "q4"]),
        (1, 1000, vec!["q4"]),
        (9, 99, vec![]),
        (0, 1000, vec![]),
    ] {
        let taken = history(&journals, &ids, HistorySection { max_runs, max_tokens });
        let sums = (taken.runs(), taken.tokens());
        let asked = words(&taken.into_turns())
            .into_iter()
            .filter_map(|word| Some(word.strip_prefix("u:")?.to_owned()));
        assert_eq!(asked.collect::<Vec<_>>(), expected, "{max_runs} runs, {max_tokens} tokens");
        assert_eq!(sums, (expected.len(), expected.len() as u64 * 100));
    }
}

#[test]
fn reasoning_that_goes_back_takes_room() {
    let thinks = |name: &str| {
        let json = format!(r#"[{{"type":"thinking","thinking":"{}"}}]"#, "r".repeat(4000));
        let opaque = Some(OpaqueBlocks { provider: "p".into(), json });
        let message =
            AssistantMessage { text: "said".into(), opaque, ..AssistantMessage::default() };
        Story::new(&[], name).answer(message).end()
    };
    let (journals, ids) = journals_and_ids(vec![thinks("q1"), thinks("q2"), thinks("q3")]);
    let bounds = HistorySection { max_runs: 9, max_tokens: 2100 };
    for (readers, runs) in
        [(vec![], 2), (vec!["p/m"], 2), (vec!["q/m", "p/m"], 2), (vec!["q/m"], 3)]
    {
        let names: Vec<String> = readers.iter().map(ToString::to_string).collect();
        let (mut history, by_run) = (History::within(bounds, &names), by_run(&journals));
        ids.iter().rev().for_each(|id| history.add(by_run[id]).unwrap());
        assert_eq!(history.runs(), runs, "{readers:?}");
    }
}

#[test]
fn each_run_that_did_not_fit_halves_what_older_ones_may_take() {
    let long = |name: &str| Story::new(&[], name).say(&"x".repeat(398)).end(); // 100 tokens
    let overflown = || Story::new(&before(), "much").overflow();
    let alone = || Story::new(&[], "alone").overflow();
    for (newer, taken) in [
        (vec![], 4),
        (vec![overflown()], 2),
        (vec![alone()], 4),
        (vec![overflown(), overflown()], 1),
        (vec![overflown(), overflown(), overflown()], 0),
        (vec![overflown(), long("q5")], 2),
    ] {
        let older = ["q1", "q2", "q3", "q4"].map(long);
        let (journals, ids) = journals_and_ids(older.into_iter().chain(newer).collect());
        let bounds = HistorySection { max_runs: 20, max_tokens: 400 };
        assert_eq!(history(&journals, &ids, bounds).runs(), taken);
    }
}

#[test]
fn nothing_older_than_a_summary_of_everything_is_taken() {
    let first = Story::new(&[], "q1").say("a1").end();
    let history_of_second = own_turns(&first).unwrap().turns;
    let second = Story::new(&history_of_second, "q2")
        .call("17")
        .call("18")
        .call("19")
        .compact(3, "S")
        .say("a2")
        .end();
    let (journals, ids) = journals_and_ids(vec![first, second]);
    let taken = history(&journals, &ids, HistorySection { max_runs: 9, max_tokens: 1000 });
    assert_eq!(
        (taken.runs(), words(&taken.into_turns())),
        (1, words_of("u:q2 u:S a:>18 a:>19 a:a2"))
    );
}

#[test]
fn a_damaged_run_gives_nothing() {
    let mut damaged = Story::new(&[], "q1").say("a1").end();
    damaged.remove(1);
    let (journals, ids) = journals_and_ids(vec![damaged, Story::new(&[], "q2").say("a2").end()]);
    let (bounds, by_run) = (HistorySection { max_runs: 9, max_tokens: 1000 }, by_run(&journals));
    let mut taken = History::within(bounds, &[]);
    let added: Vec<bool> = ids.iter().rev().map(|id| taken.add(by_run[id]).is_ok()).collect();
    assert_eq!(added, [true, false]);
    assert_eq!(words(&taken.into_turns()), ["u:q2", "a:a2"]);
}

proptest! {
    /// However often runs of a session follow one another and are compacted, no question
    /// comes twice.
    #[test]
    fn each_run_is_taken_over_at_most_once(runs in prop::collection::vec((0..6_usize, 0..12_usize), 1..8)) {
        let mut stories: Vec<Vec<Event>> = Vec::new();
        for (number, (calls, summarised)) in runs.into_iter().enumerate() {
            let (journals, ids) = journals_and_ids(stories.clone());
            let before = history(&journals, &ids, HistorySection { max_runs: 50, max_tokens: 100_000 }).into_turns();
            let mut story = Story::new(&before, &format!("q{number}"));
            for call in 0..calls {
                story.call(&format!("{number}-{call}"));
            }
            let replaceable = (before.len() + 1 + calls).saturating_sub(2);
            if summarised > 0 && summarised < replaceable {
                story.compact(summarised, &format!("S{number}"));
            }
            stories.push(story.say("done").end());
        }
        let (journals, ids) = journals_and_ids(stories.clone());
        let taken = words(&history(&journals, &ids, HistorySection { max_runs: 50, max_tokens: 100_000 }).into_turns());
        let questions: Vec<&String> = taken.iter().filter(|word| word.starts_with("u:q")).collect();
        let mut once = questions.clone();
        once.dedup();
        prop_assert_eq!(&questions, &once);
        let newest = format!("u:q{}", stories.len() - 1);
        prop_assert_eq!(questions.last(), Some(&&newest));
        prop_assert_eq!(taken.last().map(String::as_str), Some("a:done"));
    }
}
