//! Rows of the whole loop: reflection, last answers at a limit, runs that make no progress, flags,
//! calls together, waiting, stop conditions.

use super::*;

fn reflected() -> Rules {
    let contract = Contract::Structured {
        tool: "output".into(),
        submit: Some("submit".into()),
        checks: vec![],
    };
    Rules { contract, ..Rules::default() }
}

fn answering(rules: Rules) -> Rules {
    Rules { on_limit: OnLimit::Answer, ..rules }
}

fn throwing(rules: Rules) -> Rules {
    Rules { throw_on_tool_failure: true, ..rules }
}

fn stopping(rules: Rules) -> Rules {
    Rules { stop_on_tool_block: true, ..rules }
}

fn on_condition(when: &str, action: StopAction) -> Rules {
    limited(text(), |_, budget| {
        budget.stop_conditions = vec![StopCondition { when: when.into(), action }];
    })
}

fn tolerant(rules: Rules) -> Rules {
    limited(rules, |limits, _| limits.error_threshold = 100)
}

pub(super) fn rows() -> Vec<Row> {
    [reflection(), last_answers(), no_progress(), flags(), files(), waiting(), conditions()]
        .concat()
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn reflection() -> Vec<Row> {
    vec![
        (
            "an output is reflected, then submitted",
            reflected(),
            vec![Calls(vec![OK]), Calls(vec!["submit"])],
            "completed",
            (1, 2, 0),
        ),
        (
            "both in one response",
            reflected(),
            vec![Calls(vec![OK, "submit"])],
            "completed",
            (1, 1, 0),
        ),
        (
            "helper, output, helper, submit in one response",
            reflected(),
            vec![Calls(vec!["a", OK, "b", "submit"])],
            "completed",
            (1, 1, 2),
        ),
        (
            "an output after the submit of the same response counts",
            reflected(),
            vec![Calls(vec![BAD, "submit", OK])],
            "completed",
            (1, 1, 0),
        ),
        (
            "the last proposal wins",
            reflected(),
            vec![Calls(vec![BAD]), Calls(vec![OK]), Calls(vec!["submit"])],
            "completed",
            (1, 3, 0),
        ),
        (
            "also where it is the worse one",
            limited(reflected(), |limits, _| limits.max_attempts = 1),
            vec![Calls(vec![OK]), Calls(vec![BAD]), Calls(vec!["submit"])],
            "validation_failed",
            (1, 3, 0),
        ),
        (
            "helpers between the proposals",
            reflected(),
            vec![
                Calls(vec!["a"]),
                Calls(vec![BAD]),
                Calls(vec!["b", OK]),
                Calls(vec!["a", "submit"]),
            ],
            "completed",
            (1, 4, 3),
        ),
        (
            "nothing was proposed",
            reflected(),
            vec![Calls(vec!["submit"])],
            "submit_before_output",
            (1, 1, 0),
        ),
        (
            "nothing was proposed yet",
            reflected(),
            vec![Calls(vec!["submit", OK])],
            "submit_before_output",
            (1, 1, 0),
        ),
        (
            "calls that come first are executed all the same",
            reflected(),
            vec![Calls(vec!["a", "submit", "b"])],
            "submit_before_output",
            (1, 1, 1),
        ),
        (
            "another attempt needs another proposal",
            reflected(),
            vec![Calls(vec![BAD, "submit"]), Calls(vec!["submit"])],
            "submit_before_output",
            (2, 2, 0),
        ),
        (
            "a submitted output that is not valid is tried again",
            reflected(),
            vec![Calls(vec![BAD, "submit"]), Calls(vec![OK, "submit"])],
            "completed",
            (2, 2, 0),
        ),
        (
            "submitted twice in one response",
            reflected(),
            vec![Calls(vec![OK, "submit", "submit"])],
            "completed",
            (1, 1, 0),
        ),
        (
            "attempts run out",
            reflected(),
            vec![Calls(vec![BAD, "submit"])],
            "validation_failed",
            (3, 3, 0),
        ),
        (
            "arguments that are no JSON are an error result",
            reflected(),
            vec![Calls(vec!["output:{nope"]), Calls(vec![OK]), Calls(vec!["submit"])],
            "completed",
            (1, 3, 0),
        ),
        (
            "and not valid when they are submitted",
            limited(reflected(), |limits, _| limits.max_attempts = 1),
            vec![Calls(vec!["output:{nope", "submit"])],
            "validation_failed",
            (1, 1, 0),
        ),
        (
            "a text is a failed attempt",
            reflected(),
            vec![Calls(vec![OK]), Text("done"), Calls(vec![OK, "submit"])],
            "completed",
            (2, 3, 0),
        ),
        ("only text", reflected(), vec![Text("done")], "invalid_response", (3, 3, 0)),
        (
            "a model that never submits",
            limited(reflected(), |limits, _| limits.max_iterations = 4),
            vec![Calls(vec![OK])],
            "max_iterations",
            (1, 4, 0),
        ),
        (
            "a cut-off submit is not one",
            reflected(),
            vec![Calls(vec![OK]), CutCalls(vec!["submit"]), Calls(vec!["submit"])],
            "completed",
            (1, 3, 0),
        ),
        (
            "output and submit count against no limit",
            limited(reflected(), |limits, budget| {
                (limits.max_tool_calls_per_iteration, budget.max_tool_calls) = (1, 1);
            }),
            vec![Calls(vec![BAD, OK, "a", "submit"])],
            "completed",
            (1, 1, 1),
        ),
        (
            "decisions reflect too",
            deciding(reflected()),
            vec![Calls(vec![OK]), Calls(vec!["submit"])],
            "completed",
            (1, 2, 0),
        ),
        (
            "a failing helper in the submitting response",
            limited(reflected(), |limits, _| limits.error_threshold = 1),
            vec![Calls(vec![OK, "bad", "submit"])],
            "error",
            (1, 1, 1),
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "a table")]
fn last_answers() -> Vec<Row> {
    let iterations = |rules, n| answering(limited(rules, |limits, _| limits.max_iterations = n));
    let per_attempt = answering(limited(text(), |limits, _| limits.max_iterations_per_attempt = 2));
    let budget = |change: fn(&mut Budget)| answering(limited(text(), |_, budget| change(budget)));
    vec![
        (
            "the run's iterations leave one more answer",
            iterations(text(), 2),
            vec![Calls(vec!["a"]), Calls(vec!["a"]), Text("as far as I got")],
            "max_iterations",
            (1, 3, 2),
        ),
        (
            "the attempt's too",
            per_attempt,
            vec![Calls(vec!["a"]), Calls(vec!["a"]), Text("x")],
            "max_iterations",
            (1, 3, 2),
        ),
        (
            "the budget's iterations too",
            budget(|budget| budget.max_iterations = 1),
            vec![Calls(vec!["a"]), Text("x")],
            "budget_exceeded",
            (1, 2, 1),
        ),
        (
            "tokens too",
            budget(|budget| budget.max_total_tokens = Some(270)),
            vec![Calls(vec!["a"]), Text("x")],
            "budget_exceeded",
            (1, 2, 1),
        ),
        ("dollars too", answering(in_dollars(None)), vec![Text("x")], "budget_exceeded", (1, 1, 0)),
        (
            "calls too: the rest of the response is answered",
            budget(|budget| budget.max_tool_calls = 1),
            vec![Calls(vec!["a", "b"]), Text("x")],
            "budget_exceeded",
            (1, 2, 1),
        ),
        (
            "a structured contract takes the text as well",
            iterations(structured(), 1),
            vec![Calls(vec!["a"]), Text(r#"{"ok": 1}"#)],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "a proposal in the response that hits the limit waits in vain",
            answering(limited(structured(), |_, budget| budget.max_tool_calls = 0)),
            vec![Calls(vec![OK, "a"]), Text("x")],
            "budget_exceeded",
            (1, 2, 0),
        ),
        (
            "no text is no answer",
            iterations(text(), 1),
            vec![Calls(vec!["a"]), Text(" ")],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "calls in the last answer are not executed",
            iterations(text(), 1),
            vec![Calls(vec!["a"])],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "a refusal is no answer",
            iterations(text(), 1),
            vec![Calls(vec!["a"]), Refuse],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "a model that fails is none either",
            iterations(text(), 1),
            vec![Calls(vec!["a"]), Fail],
            "max_iterations",
            (1, 1, 1),
        ),
        (
            "a cut-off answer is what there is",
            iterations(text(), 1),
            vec![Calls(vec!["a"]), CutText("as far")],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "decisions: the answer is written without one",
            iterations(deciding(text()), 1),
            vec![Calls(vec!["a"]), Text("plain")],
            "max_iterations",
            (1, 2, 1),
        ),
        (
            "a confirmation that cannot be answered any more",
            iterations(confirming(), 1),
            vec![Text("first"), Text("again")],
            "max_iterations",
            (1, 2, 0),
        ),
        ("time leaves no answer", answering(text()), vec![Text("x")], "completed", (1, 1, 0)),
        (
            "failures in a row leave none",
            answering(text()),
            vec![Calls(vec!["bad"])],
            "error",
            (1, 3, 3),
        ),
        (
            "files leave none",
            answering(limited(text(), |_, budget| budget.max_files_modified = Some(0))),
            vec![Calls(vec!["change"])],
            "budget_exceeded",
            (1, 1, 0),
        ),
    ]
}

fn no_progress() -> Vec<Row> {
    vec![
        ("the same five times", text(), vec![Calls(vec!["same"])], "stuck", (1, 5, 5)),
        (
            "also within one response",
            text(),
            vec![Calls(vec!["same", "same", "same", "same", "same"])],
            "stuck",
            (1, 1, 5),
        ),
        (
            "four times is not enough",
            text(),
            vec![
                Calls(vec!["same"]),
                Calls(vec!["same"]),
                Calls(vec!["same"]),
                Calls(vec!["same"]),
                Text("x"),
            ],
            "completed",
            (1, 5, 4),
        ),
        (
            "another call in between begins anew",
            text(),
            vec![
                Calls(vec!["same", "same", "same", "same"]),
                Calls(vec!["a"]),
                Calls(vec!["same", "same", "same", "same"]),
                Text("x"),
            ],
            "completed",
            (1, 4, 9),
        ),
        (
            "other results are progress",
            text(),
            vec![Calls(vec!["a"])],
            "max_iterations",
            (1, 15, 15),
        ),
        (
            "the error threshold is judged first",
            text(),
            vec![Calls(vec!["bad"])],
            "error",
            (1, 3, 3),
        ),
        (
            "failures are no progress either",
            tolerant(text()),
            vec![Calls(vec!["bad"])],
            "stuck",
            (1, 5, 5),
        ),
        ("nor is a block", tolerant(text()), vec![Calls(vec!["blocked"])], "stuck", (1, 5, 5)),
        (
            "calls beyond the cap count as nothing",
            limited(text(), |limits, _| limits.max_tool_calls_per_iteration = 1),
            vec![Calls(vec!["a", "same", "same", "same", "same", "same"]), Text("x")],
            "completed",
            (1, 2, 6),
        ),
        (
            "an output in the response that is stuck is not judged",
            structured(),
            vec![Calls(vec!["same", "same", "same", "same", "same", OK])],
            "stuck",
            (1, 1, 5),
        ),
    ]
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
fn flags() -> Vec<Row> {
    vec![
        (
            "the first failure ends the run",
            throwing(text()),
            vec![Calls(vec!["a", "bad", "b"])],
            "tool_failure",
            (1, 1, 2),
        ),
        (
            "a block is one",
            throwing(text()),
            vec![Calls(vec!["blocked"])],
            "tool_failure",
            (1, 1, 1),
        ),
        (
            "an unknown tool is one",
            throwing(text()),
            vec![Calls(vec!["bad", "a"])],
            "tool_failure",
            (1, 1, 1),
        ),
        (
            "a call over the cap is none",
            throwing(limited(text(), |limits, _| limits.max_tool_calls_per_iteration = 1)),
            vec![Calls(vec!["a", "a"]), Text("x")],
            "completed",
            (1, 2, 2),
        ),
        (
            "without failures nothing changes",
            throwing(text()),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "a proposal beside the failure is not judged",
            throwing(structured()),
            vec![Calls(vec![OK, "bad"])],
            "tool_failure",
            (1, 1, 1),
        ),
        (
            "after a block the rest is not executed",
            stopping(text()),
            vec![Calls(vec!["a", "blocked", "b", "b"]), Text("x")],
            "completed",
            (1, 2, 2),
        ),
        (
            "without the flag it is",
            text(),
            vec![Calls(vec!["a", "blocked", "b"]), Text("x")],
            "completed",
            (1, 2, 3),
        ),
        (
            "an output after the block neither",
            stopping(structured()),
            vec![Calls(vec!["blocked", OK]), Calls(vec![OK])],
            "completed",
            (1, 2, 1),
        ),
        (
            "an output before the block is judged",
            stopping(structured()),
            vec![Calls(vec![OK, "blocked", "a"])],
            "completed",
            (1, 1, 1),
        ),
        (
            "the loop goes on",
            stopping(text()),
            vec![Calls(vec!["blocked", "a"]), Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 3, 2),
        ),
        (
            "not executed calls are no failures",
            stopping(limited(text(), |limits, _| limits.error_threshold = 2)),
            vec![Calls(vec!["blocked", "a", "a", "a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
    ]
}

fn files() -> Vec<Row> {
    let files = |n| limited(text(), |_, budget| budget.max_files_modified = Some(n));
    let lines = |n| limited(text(), |_, budget| budget.max_lines_changed = n);
    vec![
        (
            "files within the budget",
            files(2),
            vec![Calls(vec!["change", "change"]), Text("x")],
            "completed",
            (1, 2, 2),
        ),
        (
            "one file more",
            files(2),
            vec![Calls(vec!["change", "change", "change"])],
            "budget_exceeded",
            (1, 1, 2),
        ),
        (
            "the rest of the response is answered",
            files(0),
            vec![Calls(vec!["change", "a"])],
            "budget_exceeded",
            (1, 1, 0),
        ),
        (
            "lines within the budget",
            lines(20),
            vec![Calls(vec!["change", "change"]), Text("x")],
            "completed",
            (1, 2, 2),
        ),
        (
            "one line more",
            lines(19),
            vec![Calls(vec!["change", "change"])],
            "budget_exceeded",
            (1, 1, 1),
        ),
        (
            "reading takes neither",
            files(0),
            vec![Calls(vec!["a"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
    ]
}

fn waiting() -> Vec<Row> {
    let impatient = limited(text(), |_, budget| budget.max_duration_seconds = 1);
    vec![
        (
            "an approved call is executed",
            text(),
            vec![Calls(vec!["ask"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "other calls of the response wait, and are executed",
            text(),
            vec![Calls(vec!["a", "ask", "b", "ask"]), Text("x")],
            "completed",
            (1, 2, 4),
        ),
        (
            "the caller's tools are waited for",
            text(),
            vec![Calls(vec!["client"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "together with approvals",
            text(),
            vec![Calls(vec!["client", "a", "ask"]), Text("x")],
            "completed",
            (1, 2, 3),
        ),
        (
            "waiting takes no time",
            impatient,
            vec![Calls(vec!["ask"]), Text("x")],
            "completed",
            (1, 2, 1),
        ),
        (
            "a proposal waits too",
            structured(),
            vec![Calls(vec![OK, "ask"])],
            "completed",
            (1, 1, 1),
        ),
        (
            "once in every response",
            text(),
            vec![Calls(vec!["ask"]), Calls(vec!["ask"]), Text("x")],
            "completed",
            (1, 3, 2),
        ),
    ]
}

fn conditions() -> Vec<Row> {
    use StopAction::{Escalate, Stop, Warn};
    let calls = || vec![Calls(vec!["a"]), Calls(vec!["a"]), Calls(vec!["a"]), Text("x")];
    vec![
        ("a condition that is not met", on_condition("9", Stop), calls(), "completed", (1, 4, 3)),
        ("one that stops", on_condition("2", Stop), calls(), "budget_exceeded", (1, 2, 2)),
        ("at once", on_condition("0", Stop), calls(), "budget_exceeded", (1, 0, 0)),
        ("one that warns", on_condition("2", Warn), calls(), "completed", (1, 4, 3)),
        (
            "one that asks, and is approved",
            on_condition("2", Escalate),
            calls(),
            "completed",
            (1, 4, 3),
        ),
        (
            "one that cannot be decided is met",
            on_condition("?", Stop),
            calls(),
            "budget_exceeded",
            (1, 0, 0),
        ),
        (
            "limits are judged first",
            limited(on_condition("2", Stop), |limits, _| limits.max_iterations = 2),
            calls(),
            "max_iterations",
            (1, 2, 2),
        ),
        (
            "a stop leaves no last answer",
            answering(on_condition("1", Stop)),
            calls(),
            "budget_exceeded",
            (1, 1, 1),
        ),
    ]
}

#[test]
fn a_second_submit_reads_that_the_response_was_answered_without_it() {
    let script = vec![Calls(vec![BAD, "submit", "submit"]), Calls(vec![OK, "submit"])];
    let mut bench = Bench::new(reflected(), script);
    bench.run(false);
    assert_eq!(bench.reason(), "completed");
    let first = bench.state.conversation().turns().iter().find_map(|turn| match turn {
        Turn::Assistant(turn) => Some(turn),
        Turn::User(_) => None,
    });
    let results = first.unwrap().results();
    assert!(results[1].is_error, "{results:?}");
    assert_eq!(&*results[2].content, "Not validated: the response was answered without this call.");
}

#[test]
fn a_last_answer_is_a_partial_output() {
    let rules = answering(limited(text(), |limits, _| limits.max_iterations = 1));
    let mut bench = Bench::new(rules, vec![Calls(vec!["a"]), Text("as far as I got")]);
    bench.run(false);
    let outcome = &bench.state.ending().unwrap().0.outcome;
    assert!(outcome.is_partial());
    assert_eq!(outcome.status(), RunStatus::Completed);
    assert_eq!(outcome.output(), Some(&json!({"result": "as far as I got"})));
    assert_eq!(bench.choices, [ToolChoice::Auto, ToolChoice::None]);
    let turns = bench.state.conversation().turns();
    assert!(
        matches!(&turns[2], Turn::User(asked) if asked.contains("no more tools")),
        "{turns:#?}"
    );
}

#[test]
fn a_limit_without_an_answer_fails_with_its_own_code() {
    let rules = answering(limited(text(), |limits, _| limits.max_iterations = 1));
    let mut bench = Bench::new(rules, vec![Calls(vec!["a"]), Text("")]);
    bench.run(false);
    let error = bench.state.ending().unwrap().0.outcome.error().unwrap();
    assert_eq!(error.code, "MAX_ITERATIONS");
    assert_eq!(error.context, json!({"attempt": 1, "iteration_count": 1, "max_iterations": 1}));
}

#[test]
fn the_model_is_told_that_it_repeats_itself() {
    let same = || Calls(vec!["same"]);
    let mut bench = Bench::new(text(), vec![same(), same(), same(), same(), Text("x")]);
    bench.run(false);
    let results: Vec<bool> = bench
        .state
        .conversation()
        .turns()
        .iter()
        .filter_map(|turn| match turn {
            Turn::Assistant(turn) => Some(turn.results().first()?.content.contains("same result")),
            Turn::User(_) => None,
        })
        .collect();
    assert_eq!(results, [false, false, true, true], "from the third time on");
}

#[test]
fn the_proposal_and_what_it_looks_like_are_in_the_conversation() {
    let mut bench = Bench::new(
        reflected(),
        vec![Calls(vec![BAD]), Calls(vec!["submit"]), Calls(vec![OK, "submit"])],
    );
    bench.run(false);
    let turns = bench.state.conversation().turns();
    let results = |turn: &Turn| match turn {
        Turn::Assistant(turn) => {
            turn.results().iter().map(|r| (r.content.clone(), r.is_error)).collect()
        }
        Turn::User(_) => vec![],
    };
    assert_eq!(results(&turns[1]), [(r#"It looks like {"no":true}"#.to_owned(), false)]);
    let [(errors, true)] = &results(&turns[2])[..] else { panic!("{turns:#?}") };
    assert!(errors.contains("/ok: is missing"), "{errors}");
    let Turn::User(feedback) = &turns[3] else { panic!("{turns:#?}") };
    assert!(feedback.contains("`output`") && feedback.contains("`submit`"), "{feedback}");
    let last = results(&turns[4]);
    assert_eq!(last[0].0, r#"It looks like {"ok":true}"#);
    assert!(last[1].0.contains("accepted") && !last[1].1);
}

#[test]
fn reads_go_together_up_to_the_first_other_call() {
    let concurrent = ["a", "b"].map(str::to_owned).into();
    let rules = Rules { concurrent, ..text() };
    let table = [
        (vec!["a", "b", "a"], 3, 5),
        (vec!["a", "change", "b", "a"], 2, 5),
        (vec!["change", "change"], 1, 5),
        (vec!["a", "a", "a", "a"], 2, 2),
    ];
    for (calls, together, per_iteration) in table {
        let rules =
            limited(rules.clone(), |limits, _| limits.max_tool_calls_per_iteration = per_iteration);
        let mut bench = Bench::new(rules, vec![Calls(calls.clone()), Text("x")]);
        bench.run(false);
        assert_eq!(bench.together, together, "{calls:?}");
        check_journal(&bench, "together");
    }
}

#[test]
fn the_same_read_is_answered_from_the_cache_until_something_changes() {
    let rules = Rules { cached: ["a".to_owned()].into(), ..text() };
    let cached = |script: Vec<Say>| {
        let mut bench = Bench::new(rules.clone(), script);
        bench.run(false);
        check_journal(&bench, "cache");
        let of = |event: &Event| match &event.what {
            RunEvent::ToolCallCompleted(call) => Some(call.cached),
            _ => None,
        };
        bench.journal.iter().filter_map(of).collect::<Vec<_>>()
    };
    assert_eq!(
        cached(vec![Calls(vec!["a", "a"]), Calls(vec!["a"]), Text("x")]),
        [false, true, true]
    );
    assert_eq!(cached(vec![Calls(vec!["a", "change", "a"]), Text("x")]), [false, false, false]);
    assert_eq!(cached(vec![Calls(vec!["b", "b"]), Text("x")]), [false, false]);
    let rules = Rules { cached: ["a".to_owned()].into(), ..structured() };
    let mut bench = Bench::new(rules, vec![Calls(vec!["a", BAD]), Calls(vec!["a", OK])]);
    bench.run(false);
    let hits = bench
        .journal
        .iter()
        .filter(|e| matches!(&e.what, RunEvent::ToolCallCompleted(c) if c.cached))
        .count();
    assert_eq!(hits, 0, "another attempt reads again");
}

#[test]
fn a_waiting_call_ends_by_its_resolution() {
    let outcomes = |answer: Resolution| {
        let mut bench =
            Bench::new(tolerant(text()), vec![Calls(vec!["ask", "client", "a"]), Text("x")]);
        bench.answers = vec![answer];
        bench.run(false);
        check_journal(&bench, "waiting");
        let Turn::Assistant(turn) = &bench.state.conversation().turns()[1] else { panic!() };
        let result = |index: usize| turn.results()[index].clone();
        assert!(!result(2).is_error, "the other call is executed");
        (result(0).is_error, result(1).is_error, result(0).content)
    };
    assert!(
        !outcomes(Resolution::Approved {
            arguments: None,
            clears: toolloop::run::Labels::default(),
            actions: [].into(),
        })
        .0
    );
    let (denied, client, told) = outcomes(Resolution::Denied);
    assert!(denied && !client && told.contains("tester denied"), "{told}");
    let (expired, client, told) = outcomes(Resolution::Expired);
    assert!(expired && client && told.contains("in time"), "{told}");
}

#[test]
fn a_run_that_is_not_approved_ends_at_its_stop_condition() {
    for answer in [Resolution::Denied, Resolution::Expired] {
        let mut bench =
            Bench::new(on_condition("1", StopAction::Escalate), vec![Calls(vec!["a"]), Text("x")]);
        bench.answers = vec![answer];
        bench.run(false);
        let outcome = &bench.state.ending().unwrap().0.outcome;
        assert_eq!(
            (outcome.reason(), outcome.error().unwrap().code.as_str()),
            (TerminationReason::BudgetExceeded, "STOP_CONDITION")
        );
    }
    let mut warned =
        Bench::new(on_condition("1", StopAction::Warn), vec![Calls(vec!["a"]), Text("x")]);
    warned.run(false);
    assert_eq!(warned.state.totals().warnings.len(), 1, "once");
}

#[test]
fn cancelling_a_run_that_waits_ends_it() {
    let mut bench = Bench::new(text(), vec![Calls(vec!["ask", "a"]), Text("x")]);
    bench.cancel_after = Some(5);
    bench.run(false);
    assert_eq!(bench.reason(), "cancelled");
    check_journal(&bench, "cancelled while it waits");
}

#[test]
fn a_cancelled_run_tells_what_it_was_doing_when_it_was_asked_to_end() {
    for answered in [false, true] {
        let mut bench = Bench::new(text(), vec![Calls(vec!["a"]), Text("x")]);
        let turns = vec![Turn::User("x".into())];
        let (system, warnings) = ("s".into(), vec![]);
        bench.record(RunEvent::RunStarted {
            system,
            turns,
            single_shot: false,
            history: 0,
            warnings,
        });
        bench.record(RunEvent::AttemptStarted { attempt: 1 });
        bench.record(RunEvent::IterationStarted {
            attempt: 1,
            iteration: 1,
            answer_only: false,
            limit: None,
        });
        bench.model();
        let Step::CallTools(pending) = bench.state.next(bench.now) else { panic!() };
        bench.record(RunEvent::RunCancelRequested { reason: None });
        if answered {
            bench.tool(&pending[0]);
        }
        bench.run(false);
        let error = bench.state.ending().unwrap().0.outcome.error().unwrap();
        assert_eq!(error.context["phase"], "tool_call", "answered: {answered}");
        check_journal(&bench, "cancelled during a call");
    }
}
