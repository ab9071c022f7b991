use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;

use chrono::DateTime;

use super::*;
use crate::event::{
    CallFailure, Circumstances, ToolCallBlocked, ToolCallCompleted, ToolCallStarted,
    ValidationError,
};
use crate::message::{AssistantMessage, CallTarget, FinishReason, ToolCall, Turn, Usage};
use crate::run::{Consumption, Effect, RunOrigin, Totals, TraceContext};

fn call(name: &str, target: CallTarget) -> ToolCall {
    ToolCall {
        id: Uuid::now_v7(),
        provider_id: "p".into(),
        name: name.into(),
        arguments: "{}".into(),
        target,
    }
}

fn response(tool_calls: Vec<ToolCall>) -> RunEvent {
    RunEvent::ModelResponded(ModelResponded {
        attempt: 1,
        iteration: 2,
        provider: "openai".into(),
        model: "gpt".into(),
        message: AssistantMessage { tool_calls, ..AssistantMessage::default() },
        finish_reason: FinishReason::ToolCalls,
        usage: Usage { input_tokens: u64::MAX, ..Usage::default() },
        latency_ms: 1500,
        retries: 0,
        fallback: false,
        window: None,
        repeated: false,
        warnings: vec![],
    })
}

fn started(call: &ToolCall) -> RunEvent {
    RunEvent::ToolCallStarted(ToolCallStarted {
        call_id: call.id,
        tool: call.name.clone(),
        effect: Effect::Read,
        effect_key: "k".into(),
        decision: "warned".into(),
        reason: Some("slow".into()),
        actions: Arc::default(),
        consumes: Consumption::default(),
        on_unknown_outcome: crate::run::OnUnknownOutcome::Review,
        sandbox: None,
        circumstances: Circumstances::default(),
        reconcilable_by: None,
        arguments: None,
    })
}

fn answered(call: &ToolCall, failure: Option<CallFailure>) -> RunEvent {
    RunEvent::ToolCallCompleted(ToolCallCompleted {
        call_id: call.id,
        tool: call.name.clone(),
        target: call.target,
        content: "done".into(),
        failure,
        duration_ms: 3,
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
    })
}

fn blocked(call: &ToolCall) -> RunEvent {
    RunEvent::ToolCallBlocked(ToolCallBlocked {
        actions: Arc::default(),
        circumstances: Circumstances::default(),
        call_id: call.id,
        tool: call.name.clone(),
        rule: "scope".into(),
        decision: "blocked".into(),
        reason: "no".into(),
        content: "Blocked: no".into(),
    })
}

fn write(events: Vec<RunEvent>) -> RunWrite {
    let run_id = Uuid::now_v7();
    let at = DateTime::from_timestamp_micros(1_750_000_000_123_456).unwrap();
    let caller = Caller { subject: "s".into(), tenant: "t".into(), scopes: Vec::new() };
    RunWrite {
        run_id,
        epoch: 1,
        caller: Arc::new(caller),
        new: None,
        origin: Arc::new(RunOrigin {
            tenant: "t".into(),
            subject: "s".into(),
            agent: "a".into(),
            agent_version: "1".into(),
            definition_hash: "d".into(),
            session_id: None,
            model: None,
            is_child: false,
            created_at: at,
            is_observed: false,
            webhook: None,
            trace: TraceContext::of_run(run_id, None, 0.0),
        }),
        events: (5..).zip(events).map(|(seq, what)| Event { seq, at, run_id, what }).collect(),
        audit: Vec::new(),
        totals: Totals::default(),
        park: None,
        is_repeated: false,
    }
}

#[test]
fn every_event_survives_the_journal() {
    let call = call("shell", CallTarget::Tool);
    let error = ValidationError { pointer: "/a".into(), message: "no \"b\"".into() };
    let events = [
        RunEvent::RunQueued {},
        RunEvent::RunStarted {
            system: "s".into(),
            history: 0,
            turns: vec![Turn::User("\"}".into())],
            single_shot: true,
            warnings: Vec::new(),
        },
        RunEvent::RunResumed { epoch: 2, deaths: 1, is_alone: false, waited_ms: 0 },
        RunEvent::AttemptStarted { attempt: 1 },
        RunEvent::IterationStarted { attempt: 1, iteration: 1, answer_only: false, limit: None },
        response(vec![call.clone()]),
        started(&call),
        answered(&call, Some(CallFailure::Timeout)),
        blocked(&call),
        RunEvent::OutputProposed {
            call_id: None,
            attempt: 1,
            output: json!({"type": "x"}).into(),
            problem: None,
        },
        RunEvent::ValidationFailed {
            attempt: 1,
            call_id: Some(call.id),
            errors: vec![error],
            feedback: "f".into(),
        },
        RunEvent::ConfirmationRequested { prompt: "p".into() },
        RunEvent::RunCancelRequested { reason: None },
        RunEvent::interrupted("i"),
        RunEvent::cancelled("queued", (0, 0), Some("r"), String::new(), 0),
    ];
    let write = write(events.to_vec());
    let row = journal_row(&write).unwrap();
    assert_eq!((row.first_seq, row.seq), (5, 4 + i64::try_from(events.len()).unwrap()));
    assert_eq!(events_of(&row).unwrap(), write.events, "{}", row.events);
    let unknown = r#"[{"at":1,"type":"run.unheard_of","data":{}}]"#.to_owned();
    assert!(events_of(&JournalRow { events: unknown, ..row }).is_err());
}

proptest! {
    #[test]
    fn any_text_survives_the_journal(text in any::<String>()) {
        let write = write(vec![RunEvent::ConfirmationRequested { prompt: text }]);
        let row = journal_row(&write).unwrap();
        prop_assert_eq!(events_of(&row).unwrap(), write.events);
    }
}

#[test]
fn a_whole_iteration_is_one_insert_a_row() {
    let (done, denied, output) = (
        call("read", CallTarget::Tool),
        call("shell", CallTarget::Tool),
        call("output", CallTarget::Output),
    );
    let asked = response(vec![output.clone(), done.clone(), denied.clone()]);
    let batch = [write(vec![
        asked,
        started(&done),
        answered(&done, None),
        blocked(&denied),
        answered(&output, None),
    ])];
    let changes = project("me", &batch).unwrap();
    assert_eq!((changes.runs[0].first_seq, changes.runs[0].progress.next_seq), (5, 10));
    assert_eq!(changes.runs[0].progress.status, RunStatus::Running);
    assert_eq!((changes.journal.len(), changes.iterations.len(), changes.calls.len()), (1, 1, 2));

    let iteration = &changes.iterations[0];
    assert_eq!(iteration.started_at + TimeDelta::milliseconds(1500), changes.journal[0].at);

    let [read, shell] = &changes.calls[..] else { panic!("{:?}", changes.calls) };
    let place =
        |row: &CallChange| row.proposal.as_ref().map(|p| (p.iteration, p.ordinal, p.proposed_seq));
    assert_eq!((place(read), place(shell)), (Some((2, 2, 5)), Some((2, 3, 5))));
    let (read, shell) = (&read.state, &shell.state);
    assert_eq!(
        (&*read.state, read.decision.as_deref(), read.reason.as_deref()),
        ("succeeded", Some("warned"), Some("slow"))
    );
    assert_eq!((read.result_seq, read.effect.as_deref()), (Some(7), Some("read")));
    assert_eq!((&*shell.state, shell.is_error, shell.result_seq), ("denied", true, Some(8)));
}

#[test]
fn a_call_that_was_proposed_earlier_is_changed() {
    let shell = call("shell", CallTarget::Tool);
    let cases = [
        (started(&shell), "dispatched"),
        (answered(&shell, None), "succeeded"),
        (answered(&shell, Some(CallFailure::Panicked)), "failed"),
        (answered(&shell, Some(CallFailure::Cancelled)), "cancelled"),
        (answered(&shell, Some(CallFailure::NotExecuted)), "cancelled"),
        (answered(&shell, Some(CallFailure::UnknownOutcome)), "unknown"),
        (blocked(&shell), "denied"),
    ];
    for (event, state) in cases {
        let batch = [write(vec![event])];
        let changes = project("me", &batch).unwrap();
        assert_eq!((changes.calls.len(), &*changes.calls[0].state.state), (1, state));
        assert!(changes.calls[0].proposal.is_none());
    }
}

#[test]
fn a_write_without_events_is_refused() {
    assert!(project("me", &[write(Vec::new())]).is_err());
}
