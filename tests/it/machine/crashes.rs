//! What a claimed run decides by itself: cancelled, reviewed, failed, or to go on.

use std::sync::Arc;

use super::*;

/// A run whose model is asked, and will ask for these calls.
fn asking(rules: Rules, calls: Vec<&'static str>) -> Bench {
    let mut bench = Bench::new(rules, vec![Calls(calls), Calls(vec!["a"])]);
    bench.record(RunEvent::RunStarted {
        system: "s".into(),
        turns: vec![Turn::User("x".into())],
        single_shot: false,
        history: 0,
        warnings: vec![],
    });
    bench.record(RunEvent::AttemptStarted { attempt: 1 });
    bench.record(RunEvent::IterationStarted {
        attempt: 1,
        iteration: 1,
        answer_only: false,
        limit: None,
    });
    bench
}

/// A run whose model has asked for these calls.
fn asked(rules: Rules, calls: Vec<&'static str>) -> Bench {
    let mut bench = asking(rules, calls);
    bench.model();
    bench
}

fn may_crash(max_crashes: u32) -> Rules {
    Rules { max_crashes, ..text() }
}

fn open_call(bench: &Bench, name: &str) -> ToolCall {
    let open = bench.state.open_calls(0);
    open.into_iter().find(|pending| pending.call.name == name).unwrap().call
}

fn dispatch(bench: &mut Bench, call: &ToolCall, effect: Effect, unknown: OnUnknownOutcome) {
    dispatch_with(bench, call, effect, unknown, None);
}

/// The same, of a tool that can be asked about it where it has a hash.
fn dispatch_with(
    bench: &mut Bench,
    call: &ToolCall,
    effect: Effect,
    unknown: OnUnknownOutcome,
    reconcilable_by: Option<&str>,
) {
    bench.record(RunEvent::ToolCallStarted(ToolCallStarted {
        actions: Arc::default(),
        call_id: call.id,
        tool: call.name.clone(),
        effect,
        effect_key: "k".into(),
        decision: "allowed".into(),
        reason: None,
        consumes: Consumption::default(),
        on_unknown_outcome: unknown,
        sandbox: None,
        circumstances: Circumstances::default(),
        reconcilable_by: reconcilable_by.map(str::to_owned),
        arguments: None,
    }));
}

fn resume(bench: &mut Bench, deaths: u32) {
    let is_alone = bench.state.is_suspect(deaths);
    bench.record(RunEvent::RunResumed {
        epoch: i64::from(deaths) + 2,
        deaths,
        is_alone,
        waited_ms: 0,
    });
}

/// What becomes of the run where nothing drives it.
fn fate(bench: &Bench) -> &'static str {
    let Some(disposal) = bench.state.disposal(true, bench.now) else { return "goes on" };
    match (disposal.park, disposal.events.last().and_then(|event| event.ending())) {
        (Some(RunStatus::NeedsReview), None) => "review",
        (Some(_), None) => "parked",
        (None, Some(ending)) => match ending.outcome.reason() {
            TerminationReason::Cancelled => "cancelled",
            TerminationReason::Interrupted => "failed",
            other => panic!("{other:?}"),
        },
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_cancel_request_comes_before_a_review_and_that_before_the_last_crash() {
    use Effect::{Idempotent, Once, Read};
    use OnUnknownOutcome::{Report, Retry, Review};
    let table = [
        (None, 0, "goes on"),
        (None, 2, "goes on"),
        (None, 3, "failed"),
        (Some((Read, Review)), 1, "goes on"),
        (Some((Idempotent, Review)), 3, "failed"),
        (Some((Once, Review)), 1, "review"),
        (Some((Once, Review)), 3, "review"),
        (Some((Once, Report)), 1, "goes on"),
        (Some((Once, Retry)), 1, "goes on"),
    ];
    for (started, deaths, expected) in table {
        let mut bench = asked(may_crash(3), vec!["a"]);
        if let Some((effect, unknown)) = started {
            let call = open_call(&bench, "a");
            dispatch(&mut bench, &call, effect, unknown);
        }
        (1..=deaths).for_each(|death| resume(&mut bench, death));
        assert_eq!(fate(&bench), expected, "{started:?} after {deaths} crashes");
        bench.record(RunEvent::RunCancelRequested { reason: None });
        assert_eq!(fate(&bench), "cancelled", "{started:?} after {deaths} crashes");
    }
}

#[test]
fn there_is_room_before_a_model_call_counts_as_begun() {
    let mut bench = Bench::new(text(), vec![Calls(vec!["a"])]);
    bench.record(RunEvent::RunStarted {
        system: "s".into(),
        turns: vec![Turn::User("x".into())],
        single_shot: false,
        history: 0,
        warnings: vec![],
    });
    let begins = |bench: &Bench| bench.state.begins_iteration(&bench.state.next(bench.now));
    assert!(!begins(&bench), "an attempt is due");
    bench.record(RunEvent::AttemptStarted { attempt: 1 });
    assert!(begins(&bench));
    bench.record(RunEvent::IterationStarted {
        attempt: 1,
        iteration: 1,
        answer_only: false,
        limit: None,
    });
    assert!(!begins(&bench), "it has begun");
}

#[test]
fn a_run_that_waits_for_another_is_not_blamed_for_its_crashes() {
    for (call, deaths, expected) in [("transfer_to_writer", 5, "goes on"), ("a", 3, "failed")] {
        let mut bench = asked(may_crash(3), vec![call]);
        let open = open_call(&bench, call);
        dispatch(&mut bench, &open, Effect::Idempotent, OnUnknownOutcome::Retry);
        (1..=deaths).for_each(|death| resume(&mut bench, death));
        assert_eq!(fate(&bench), expected, "{call}");
        assert_eq!(bench.state.is_suspect(deaths), call == "a", "{call}");
    }
}

#[test]
fn a_call_that_may_have_taken_effect_is_reviewed_with_what_was_executed() {
    let mut bench = asked(text(), vec!["a", "b"]);
    let (first, second) = (open_call(&bench, "a"), open_call(&bench, "b"));
    dispatch(&mut bench, &first, Effect::Once, OnUnknownOutcome::Review);
    bench.record(RunEvent::ApprovalRequested(Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: None,
        escalation_target: None,
        actions: Arc::default(),
        call_id: second.id,
        kind: WaitKind::Approval,
        tool: "b".into(),
        arguments: json!({}),
        reason: "so".into(),
        expires_at: None,
        condition: None,
        child_run_id: None,
        input: None,
    }));
    let approved = Resolution::Approved {
        arguments: Some(json!({"path": "b"})),
        clears: toolloop::run::Labels::default(),
        actions: [].into(),
    };
    let answer = |call_id, kind, resolution| {
        RunEvent::ApprovalResolved(Resolved {
            child_duration_ms: None,
            decided_at: None,
            call_id,
            kind,
            resolution,
            decided_by: None,
            reason: None,
        })
    };
    bench.record(answer(second.id, WaitKind::Approval, approved));
    dispatch(&mut bench, &second, Effect::Once, OnUnknownOutcome::Review);
    resume(&mut bench, 1);
    let asked = bench.state.disposal(true, bench.now).unwrap();
    assert_eq!(asked.park, Some(RunStatus::NeedsReview));
    let shown = asked.events.iter().map(|event| match event {
        RunEvent::ApprovalRequested(asked) => (asked.call_id, asked.arguments.clone()),
        other => panic!("{other:?}"),
    });
    let shown: Vec<_> = shown.collect();
    let of_model = serde_json::from_str(&first.arguments).unwrap();
    assert_eq!(shown, [(first.id, of_model), (second.id, json!({"path": "b"}))]);
    for event in asked.events {
        bench.record(event);
    }
    assert_eq!(bench.state.next(bench.now), Step::Suspend(RunStatus::NeedsReview), "asked once");
    resume(&mut bench, 1);
    assert_eq!(bench.state.next(bench.now), Step::Suspend(RunStatus::NeedsReview), "asked once");

    bench.record(answer(first.id, WaitKind::Review, Resolution::DidNotHappen));
    bench.record(answer(second.id, WaitKind::Review, Resolution::DidNotHappen));
    let Step::CallTools(again) = bench.state.next(bench.now) else { panic!() };
    assert_eq!(again[0].call.id, first.id);
    dispatch(&mut bench, &first, Effect::Once, OnUnknownOutcome::Review);
    resume(&mut bench, 2);
    assert_eq!(fate(&bench), "review", "its outcome is unknown again");
}

#[test]
fn an_end_after_a_crash_guesses_nothing_of_open_calls() {
    let mut bench = asked(text(), vec!["a", "b", "bad", "same"]);
    let call = open_call(&bench, "a");
    dispatch(&mut bench, &call, Effect::Once, OnUnknownOutcome::Review);
    let call = open_call(&bench, "b");
    dispatch(&mut bench, &call, Effect::Idempotent, OnUnknownOutcome::Review);
    let call = open_call(&bench, "bad");
    dispatch(&mut bench, &call, Effect::Read, OnUnknownOutcome::Review);
    resume(&mut bench, 1);
    bench.record(RunEvent::RunCancelRequested { reason: Some("enough".into()) });
    let Step::Record(events) = bench.state.next(bench.now) else { panic!() };
    let failures: Vec<_> = events
        .iter()
        .filter_map(|event| match event {
            RunEvent::ToolCallCompleted(call) => Some(call.failure.unwrap()),
            _ => None,
        })
        .collect();
    let expected = [
        CallFailure::UnknownOutcome,
        CallFailure::Cancelled,
        CallFailure::NotExecuted,
        CallFailure::NotExecuted,
    ];
    assert_eq!(failures, expected);
    let context = &events.last().unwrap().ending().unwrap().outcome.error().unwrap().context;
    assert_eq!(
        *context,
        json!({"phase": "tool_call", "attempt": 1, "iteration": 1, "reason": "enough"})
    );
    for event in events {
        bench.record(event);
    }
    assert!(bench.state.ending().is_some());
}

#[test]
fn a_call_that_the_operator_wants_reported_is_not_repeated() {
    let mut bench = asked(text(), vec!["a"]);
    let call = open_call(&bench, "a");
    dispatch(&mut bench, &call, Effect::Once, OnUnknownOutcome::Report);
    resume(&mut bench, 1);
    let Step::Record(events) = bench.state.next(bench.now) else { panic!("called again") };
    let [RunEvent::ToolCallCompleted(call)] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!(call.failure, Some(CallFailure::UnknownOutcome));
}

#[test]
fn a_tool_that_can_be_asked_is_asked_unless_the_run_is_over() {
    use OnUnknownOutcome::{Report, Retry, Review};
    for (unknown, then) in [(Review, "review"), (Report, "failed"), (Retry, "failed")] {
        let mut bench = asked(may_crash(3), vec!["a"]);
        let call = open_call(&bench, "a");
        let dispatch = |bench: &mut Bench| {
            dispatch_with(bench, &call, Effect::Once, unknown, Some("hash"));
        };
        dispatch(&mut bench);
        resume(&mut bench, 1);
        let Step::CallTools(calls) = bench.state.next(bench.now) else { panic!("{unknown:?}") };
        let interrupted = calls[0].interrupted.as_ref().unwrap();
        assert_eq!(
            (interrupted.tool_hash.as_str(), interrupted.effect_key.as_str()),
            ("hash", "k")
        );
        assert_eq!((interrupted.on_unknown_outcome, calls[0].was_started), (unknown, true));
        assert_eq!(fate(&bench), "goes on");
        // It dies while the tool is asked: it is asked again, until that is the last crash.
        dispatch(&mut bench);
        resume(&mut bench, 2);
        assert!(matches!(bench.state.next(bench.now), Step::CallTools(_)), "{unknown:?}");
        // Where nothing can ask it, a person is.
        let undriven = bench.state.disposal(false, bench.now).and_then(|it| it.park);
        assert_eq!(undriven.is_some(), unknown == Review, "{unknown:?}");
        dispatch(&mut bench);
        resume(&mut bench, 3);
        assert_eq!(fate(&bench), then, "{unknown:?}");
        bench.record(RunEvent::RunCancelRequested { reason: None });
        assert_eq!(fate(&bench), "cancelled", "{unknown:?}");
    }
}

#[test]
fn a_call_is_reviewed_before_time_ends_its_run() {
    let mut bench = asked(text(), vec!["a", "b"]);
    let call = open_call(&bench, "a");
    dispatch_with(&mut bench, &call, Effect::Once, OnUnknownOutcome::Review, Some("hash"));
    resume(&mut bench, 1);
    bench.now += TimeDelta::days(30);
    let Step::Record(events) = bench.state.next(bench.now) else { panic!() };
    let [RunEvent::ApprovalRequested(asked)] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((asked.call_id, asked.kind), (call.id, WaitKind::Review));
    for event in events {
        bench.record(event);
    }
    assert_eq!(bench.state.next(bench.now), Step::Suspend(RunStatus::NeedsReview), "asked once");
}

#[test]
fn an_answer_of_a_model_sets_the_crashes_back() {
    let mut bench = asked(may_crash(3), vec!["a"]);
    resume(&mut bench, 1);
    resume(&mut bench, 2);
    assert!(bench.state.is_suspect(2));
    let Step::CallTools(calls) = bench.state.next(bench.now) else { panic!() };
    bench.tool(&calls[0]);
    while !matches!(bench.state.next(bench.now), Step::CallModel(_)) {
        let Step::Record(events) = bench.state.next(bench.now) else { panic!() };
        for event in events {
            bench.record(event);
        }
    }
    bench.model();
    assert!(!bench.state.is_suspect(3), "that is the first since");
    resume(&mut bench, 3);
    assert_eq!(fate(&bench), "goes on");
}

#[test]
fn a_run_fails_by_a_crash_that_found_it_alone() {
    let mut bench = asked(may_crash(3), vec!["a"]);
    resume(&mut bench, 1);
    assert!(bench.state.is_suspect(2), "the next crash may be the last");
    // It waited while others crashed the replica, and was not driven.
    resume(&mut bench, 40);
    assert_eq!(fate(&bench), "goes on", "one crash of all those is its own");
    resume(&mut bench, 40);
    assert_eq!(fate(&bench), "goes on", "given back without a crash");
    resume(&mut bench, 41);
    assert_eq!(fate(&bench), "failed");

    let mut bench = asked(may_crash(1), vec!["a"]);
    resume(&mut bench, 1);
    assert_eq!(fate(&bench), "failed", "one is too many");
}

#[test]
fn a_result_that_was_delivered_is_checked_or_withheld() {
    let mut bench = asked(may_crash(3), vec!["client", "client"]);
    let pending = bench.state.open_calls(0).remove(0);
    bench.wait_for(&pending);
    bench.record(RunEvent::ApprovalResolved(Resolved {
        child_duration_ms: None,
        decided_at: None,
        call_id: pending.call.id,
        kind: WaitKind::Client,
        resolution: Resolution::Result { content: "from the caller".into(), is_error: false },
        decided_by: None,
        reason: None,
    }));
    bench.record(RunEvent::RunCancelRequested { reason: None });
    assert_eq!(fate(&bench), "goes on", "to where results are checked");
    let unplanned = bench.state.disposal(false, bench.now).unwrap().events;
    let failures = unplanned.iter().filter_map(|event| match event {
        RunEvent::ToolCallCompleted(done) => Some((done.failure, done.content.as_str())),
        _ => None,
    });
    let failures: Vec<_> = failures.collect();
    let [(Some(CallFailure::Withheld), told), (Some(CallFailure::NotExecuted), _)] = failures[..]
    else {
        panic!("{failures:?}")
    };
    assert!(!told.contains("from the caller"), "{told}");
}

#[test]
fn a_model_call_counts_twice_unless_the_run_only_waited_to_ask_again() {
    let table = [
        (None, 1, true),
        (Some(60_000), 20, false),
        (Some(60_000), 60, true), // by another clock, the wait may be over
        (Some(60_000), 90, true),
        (Some(0), 0, true),
    ];
    for (wait_ms, resumed_after, repeats) in table {
        let mut bench = asking(text(), vec!["a"]);
        if let Some(wait_ms) = wait_ms {
            bench.record(RunEvent::ModelRetried(toolloop::event::ModelRetried {
                attempt: 1,
                iteration: 1,
                provider: "mock".into(),
                model: "m".into(),
                reason: "rate_limited".into(),
                status: Some(429),
                message: "later".into(),
                wait_ms,
                fallback: None,
                usage: None,
            }));
        }
        bench.now += TimeDelta::seconds(resumed_after);
        resume(&mut bench, 1);
        assert_eq!(bench.state.repeats_model_call(), repeats, "{wait_ms:?} {resumed_after}");
        resume(&mut bench, 2);
        assert!(bench.state.repeats_model_call(), "it may have been asked since");
    }
}

#[test]
fn what_tries_took_before_a_crash_counts_before_the_model_is_asked_again() {
    let mut bench =
        asking(limited(text(), |_, budget| budget.max_total_tokens = Some(10_000)), vec!["a"]);
    assert!(matches!(bench.state.next(bench.now), Step::CallModel(_)));
    bench.record(RunEvent::ModelRetried(toolloop::event::ModelRetried {
        attempt: 1,
        iteration: 1,
        provider: "mock".into(),
        model: "m".into(),
        reason: "transient".into(),
        status: None,
        message: "it broke off".into(),
        wait_ms: 0,
        fallback: None,
        usage: Some(Usage { input_tokens: 9_000, output_tokens: 900, ..USAGE }),
    }));
    resume(&mut bench, 1);
    let Step::Record(events) = bench.state.next(bench.now) else { panic!("asked again") };
    let ending = events.last().and_then(|event| event.ending()).unwrap();
    assert_eq!(ending.outcome.reason(), TerminationReason::BudgetExceeded);
}
