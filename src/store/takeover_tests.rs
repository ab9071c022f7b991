use serde_json::json;

use super::*;
use crate::event::{ModelResponded, ToolCallBlocked, ToolCallStarted};
use crate::message::{AssistantMessage, CallTarget, FinishReason, Usage};
use crate::run::{Consumption, RunKind};

fn call(name: &str) -> ToolCall {
    let target = CallTarget::Tool;
    ToolCall {
        id: Uuid::now_v7(),
        provider_id: "p".into(),
        name: name.into(),
        arguments: "{}".into(),
        target,
    }
}

fn asked(calls: &[&ToolCall]) -> RunEvent {
    let tool_calls = calls.iter().copied().cloned().collect();
    RunEvent::ModelResponded(ModelResponded {
        attempt: 1,
        iteration: 1,
        provider: "openai".into(),
        model: "gpt".into(),
        message: AssistantMessage {
            text: "said".into(),
            tool_calls,
            ..AssistantMessage::default()
        },
        finish_reason: FinishReason::ToolCalls,
        usage: Usage::default(),
        latency_ms: 1,
        retries: 0,
        fallback: false,
        warnings: vec![],
    })
}

fn dispatched(call: &ToolCall, effect: Effect) -> RunEvent {
    RunEvent::ToolCallStarted(ToolCallStarted {
        call_id: call.id,
        tool: call.name.clone(),
        effect,
        effect_key: "k".into(),
        decision: "allowed".into(),
        reason: None,
        consumes: Consumption::default(),
        on_unknown_outcome: crate::run::OnUnknownOutcome::Review,
    })
}

fn locked(tail: Vec<RunEvent>) -> Locked {
    let id = Uuid::now_v7();
    let record = RunRecord {
        id,
        tenant: "t".into(),
        agent: "a".into(),
        agent_version: "1".into(),
        definition_hash: "h".into(),
        kind: RunKind::Iterative,
        status: RunStatus::Running,
        subject: "s".into(),
        inputs: Value::Null,
        overrides: Value::Null,
        session_id: None,
        parent_run_id: None,
        metadata: Value::Null,
        output: None,
        raw_response: None,
        error: None,
        termination_reason: None,
        partial: false,
        latency_ms: None,
        model: None,
        attempts: 1,
        iterations: 1,
        tool_calls_made: 0,
        tools_used: vec!["once".into()],
        usage: Usage::default(),
        warnings: Vec::new(),
        callback_errors: Vec::new(),
        consumption: Consumption::default(),
        created_at: DateTime::UNIX_EPOCH,
        started_at: Some(DateTime::UNIX_EPOCH),
        finished_at: None,
        owner: Some("dead".into()),
        epoch: 4,
        last_seq: 2 + i64::try_from(tail.len()).unwrap(),
        crash_count: 0,
        cancel_requested_at: None,
        cancel_reason: None,
        traceparent: None,
    };
    let tail: Vec<Event> = (3..)
        .zip(tail)
        .map(|(seq, what)| Event { seq, at: DateTime::UNIX_EPOCH, run_id: id, what })
        .collect();
    Locked { record, tail }
}

#[test]
fn what_may_have_acted_is_reviewed_and_the_last_crash_fails() {
    let tool = call("once");
    let blocked = RunEvent::ToolCallBlocked(ToolCallBlocked {
        call_id: tool.id,
        tool: "once".into(),
        rule: "r".into(),
        decision: "blocked".into(),
        reason: "no".into(),
        content: "no".into(),
    });
    let once = dispatched(&tool, Effect::Once);
    let done = answer(&tool, Some(Effect::Once));
    let cases = [
        (vec![], 0, Verdict::Requeue),
        (vec![asked(&[&tool])], 1, Verdict::Requeue),
        (vec![asked(&[&tool])], 2, Verdict::Fail),
        (vec![asked(&[&tool]), blocked], 0, Verdict::Requeue),
        (vec![asked(&[&tool]), dispatched(&tool, Effect::Read)], 0, Verdict::Requeue),
        (vec![asked(&[&tool]), dispatched(&tool, Effect::Idempotent)], 2, Verdict::Fail),
        (vec![asked(&[&tool]), once.clone()], 0, Verdict::Review),
        (vec![asked(&[&tool]), once.clone()], 2, Verdict::Review),
        (vec![asked(&[&tool]), once.clone(), done], 0, Verdict::Requeue),
    ];
    for (tail, crash_count, expected) in cases {
        let mut run = locked(tail);
        run.record.crash_count = crash_count;
        assert_eq!(verdict(&run, 3), expected, "{:?}", run.tail);
        run.record.cancel_requested_at = Some(DateTime::UNIX_EPOCH);
        assert_eq!(verdict(&run, 3), Verdict::Cancel, "a cancel request comes first");
    }
}

#[test]
fn an_ending_answers_the_open_calls_without_guessing() {
    let (done, once, read, idle) = (call("done"), call("once"), call("read"), call("idle"));
    let run = locked(vec![
        asked(&[&done, &once, &read, &idle]),
        answer(&done, None),
        dispatched(&once, Effect::Once),
        dispatched(&read, Effect::Read),
    ]);
    let now = DateTime::from_timestamp_millis(2500).unwrap();
    let write = cancelled(&run, "iteration", Some("enough"), now);
    assert_eq!((write.epoch, write.totals.tool_calls_made), (5, 3), "under the raised epoch");
    let seqs: Vec<i64> = write.events.iter().map(|event| event.seq).collect();
    assert_eq!(seqs, [7, 8, 9, 10]);
    let answers: Vec<_> = write.events[..3]
        .iter()
        .map(|event| match &event.what {
            RunEvent::ToolCallCompleted(call) => (call.tool.as_str(), call.failure),
            other => panic!("{other:?}"),
        })
        .collect();
    let expected = [
        ("once", Some(CallFailure::UnknownOutcome)),
        ("read", Some(CallFailure::Cancelled)),
        ("idle", Some(CallFailure::Cancelled)),
    ];
    assert_eq!(answers, expected);
    let ending = write.events[3].what.ending().unwrap();
    assert_eq!((ending.latency_ms, ending.outcome.raw_response()), (2500, "said"));
    assert_eq!(
        ending.outcome.error().unwrap().context,
        json!({"phase": "iteration", "reason": "enough"})
    );
}

#[test]
fn only_repeated_crashes_delay_a_run() {
    let delays: Vec<u64> =
        [0, 1, 2, 3, 6, 7, 40].map(|crashes| requeue_delay(crashes).as_secs()).to_vec();
    assert_eq!(delays, [0, 0, 2, 4, 32, 60, 60]);
}

/// What the reviewer is shown is what was executed.
#[test]
fn a_review_shows_what_was_started_last() {
    let (edited, plain, retried) = (call("edited"), call("plain"), call("retried"));
    let approved = RunEvent::ApprovalResolved(Resolved {
        call_id: edited.id,
        kind: WaitKind::Approval,
        resolution: Resolution::Approved { arguments: Some(json!({"path": "b"})) },
        decided_by: Some("ann".into()),
        reason: None,
    });
    let again = match dispatched(&retried, Effect::Once) {
        RunEvent::ToolCallStarted(started) => RunEvent::ToolCallStarted(ToolCallStarted {
            on_unknown_outcome: OnUnknownOutcome::Retry,
            ..started
        }),
        other => other,
    };
    let starts = [dispatched(&plain, Effect::Once), dispatched(&edited, Effect::Once), again];
    let tail = [asked(&[&edited, &plain, &retried]), dispatched(&edited, Effect::Once), approved]
        .into_iter();
    let run = locked(tail.chain(starts).collect());
    let first = run.tail[0].seq;
    let shown: Vec<_> = reviews(&run, Utc::now())
        .into_iter()
        .map(|row| (row.seq - first, row.tool, row.arguments))
        .collect();
    assert_eq!(
        shown,
        [(4, "edited".into(), r#"{"path":"b"}"#.to_owned()), (3, "plain".into(), "{}".to_owned())]
    );
    assert!(may_have_acted(&run));
    assert!(
        !may_have_acted(&locked(vec![asked(&[&retried]), run.tail[5].what.clone()])),
        "it is told what to do"
    );
}
