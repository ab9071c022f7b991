//! What becomes of a run that nobody drives: its replica died, or it is cancelled while it waits.
//!
//! Pure decisions over a locked row and the end of its journal; the databases lock first, read
//! second and only then ask here, so that a dispatch or a cancel request committed just before the
//! lock is seen. An ending written here answers every open call, as the loop would have.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::changes::ApprovalInsert;
use super::projection::{arguments, clean};
use super::{ApprovalStatus, RunRecord, RunWrite, Swept};
use crate::event::{
    CallFailure, Event, Resolution, Resolved, RunEvent, ToolCallCompleted, WaitKind,
};
use crate::message::ToolCall;
use crate::run::{Caller, Effect, OnUnknownOutcome, RunStatus, Totals};

/// The owner in whose name a run is ended that has none; never visible outside its transaction.
pub(super) const CARETAKER: &str = "caretaker";

/// Why a run is cancelled whose parent has ended.
pub(super) const STRAY: &str = "the run that started it has ended";

/// A run that is locked and can be decided on.
pub(super) struct Locked {
    pub(super) record: RunRecord,
    /// The journal from the last model response on; all of it where no model has responded.
    pub(super) tail: Vec<Event>,
}

/// What to do with a run whose replica died.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Carry out the cancel request.
    Cancel,
    /// Park: a call may have taken effect and must not be repeated unasked.
    Review,
    /// End: it crashed its replica too often.
    Fail,
    /// Let another replica go on.
    Requeue,
}

/// Runs that a sweep has decided on, with what must be written.
#[derive(Default)]
pub(super) struct Decided {
    /// Endings, to be written under the raised epoch.
    pub(super) endings: Vec<RunWrite>,
    pub(super) review: Vec<Uuid>,
    /// With the crash counted that brought them here.
    pub(super) requeue: Vec<(Uuid, u32)>,
}

/// Decides on the runs of dead replicas and counts them in `swept`. `record.crash_count` does not
/// count this crash yet; the run fails when it is the `max_crashes`-th.
pub(super) fn decide(
    runs: &[Locked],
    max_crashes: u32,
    now: DateTime<Utc>,
    swept: &mut Swept,
) -> Decided {
    let mut decided = Decided::default();
    for run in runs {
        match verdict(run, max_crashes) {
            Verdict::Cancel => {
                swept.cancelled += 1;
                decided.endings.push(cancelled(
                    run,
                    "iteration",
                    run.record.cancel_reason.as_deref(),
                    now,
                ));
            }
            Verdict::Review => {
                swept.needs_review += 1;
                decided.review.push(run.record.id);
            }
            Verdict::Fail => {
                swept.failed += 1;
                let crashes = run.record.crash_count + 1;
                let message =
                    format!("The service stopped {crashes} times while it executed this run.");
                decided.endings.push(ending(run, RunEvent::interrupted(message), now));
            }
            Verdict::Requeue => {
                swept.requeued += 1;
                decided.requeue.push((run.record.id, run.record.crash_count + 1));
            }
        }
    }
    decided
}

fn verdict(run: &Locked, max_crashes: u32) -> Verdict {
    if run.record.cancel_requested_at.is_some() {
        Verdict::Cancel
    } else if may_have_acted(run) {
        Verdict::Review
    } else if run.record.crash_count + 1 >= max_crashes {
        Verdict::Fail
    } else {
        Verdict::Requeue
    }
}

/// Whether a call was dispatched that must not be repeated unasked, and nobody knows what became of
/// it.
pub(super) fn may_have_acted(run: &Locked) -> bool {
    open_calls(&run.tail).any(|(_, start)| start.is_some_and(|start| start.has_acted()))
}

/// What somebody has to find out of a run that may have acted: what became of the call of each
/// start that is left open. The same start asks once, whoever meets it.
pub(super) fn reviews(run: &Locked, now: DateTime<Utc>) -> Vec<ApprovalInsert<'_>> {
    let open = open_calls(&run.tail);
    open.filter_map(|(call, start)| Some(review(run, call, start.filter(Start::has_acted)?, now)))
        .collect()
}

fn review<'r>(
    run: &'r Locked,
    call: &'r ToolCall,
    start: Start,
    now: DateTime<Utc>,
) -> ApprovalInsert<'r> {
    ApprovalInsert {
        run_id: run.record.id,
        seq: start.seq,
        call_id: call.id,
        tenant: &run.record.tenant,
        at: now,
        expires_at: None,
        kind: WaitKind::Review.as_str(),
        tool: clean(&call.name),
        reason: "The service stopped while this call was executed: it is unknown whether it took effect.".into(),
        arguments: edited(&run.tail, call).unwrap_or_else(|| arguments(call)).to_string(),
        status: ApprovalStatus::Pending.as_str(),
    }
}

/// The arguments that an approver put in the place of the model's.
fn edited(tail: &[Event], call: &ToolCall) -> Option<Value> {
    tail.iter().rev().find_map(|event| match &event.what {
        RunEvent::ApprovalResolved(Resolved {
            call_id,
            resolution: Resolution::Approved { arguments },
            ..
        }) if *call_id == call.id => arguments.clone(),
        _ => None,
    })
}

/// How long a run waits before another replica may take it: not at all after its first crash.
pub(super) fn requeue_delay(crash_count: u32) -> Duration {
    if crash_count <= 1 {
        Duration::ZERO
    } else {
        Duration::from_secs(2_u64.saturating_pow(crash_count - 1).min(60))
    }
}

/// The write that cancels a run in the given phase.
pub(super) fn cancelled(
    run: &Locked,
    phase: &str,
    reason: Option<&str>,
    now: DateTime<Utc>,
) -> RunWrite {
    let said = run.tail.iter().rev().find_map(|event| match &event.what {
        RunEvent::ModelResponded(response) => Some(response.message.text.clone()),
        _ => None,
    });
    let since = run.record.started_at.map_or(0, |start| (now - start).num_milliseconds());
    let latency_ms = u64::try_from(since).unwrap_or_default();
    ending(run, RunEvent::cancelled(phase, reason, said.unwrap_or_default(), latency_ms), now)
}

/// The phase of a cancel request that finds nobody driving the run.
pub(super) fn waiting_phase(status: RunStatus) -> &'static str {
    if status == RunStatus::Queued { "queued" } else { "approval" }
}

/// Answers the open calls, then ends the run.
fn ending(run: &Locked, last: RunEvent, now: DateTime<Utc>) -> RunWrite {
    let record = &run.record;
    let mut totals = totals_of(record);
    let answers =
        open_calls(&run.tail).map(|(call, start)| answer(call, start.map(|start| start.effect)));
    let events: Vec<Event> = (run.record.last_seq + 1..)
        .zip(answers.chain([last]))
        .map(|(seq, what)| Event { seq, at: now, run_id: record.id, what })
        .inspect(|event| totals.apply(&event.what))
        .collect();
    let caller = Caller {
        subject: record.subject.clone(),
        tenant: record.tenant.clone(),
        scopes: Vec::new(),
    };
    RunWrite {
        run_id: record.id,
        epoch: record.epoch + 1,
        caller: Arc::new(caller),
        new: None,
        origin: None,
        events,
        audit: Vec::new(),
        totals,
        park: None,
        is_repeated: false,
    }
}

/// The last start of a call.
#[derive(Debug, Clone, Copy)]
struct Start {
    /// The number of its event.
    seq: i64,
    effect: Effect,
    on_unknown_outcome: OnUnknownOutcome,
}

impl Start {
    /// Whether somebody has to find out what became of the call before the run goes on.
    fn has_acted(&self) -> bool {
        self.effect == Effect::Once && self.on_unknown_outcome == OnUnknownOutcome::Review
    }
}

/// Calls without a result, with their start where they were dispatched.
fn open_calls(tail: &[Event]) -> impl Iterator<Item = (&ToolCall, Option<Start>)> {
    let asked = tail.iter().rev().find_map(|event| match &event.what {
        RunEvent::ModelResponded(response) => Some(response.message.tool_calls.as_slice()),
        _ => None,
    });
    asked.unwrap_or_default().iter().filter_map(|call| {
        let answered = tail.iter().any(|event| match &event.what {
            RunEvent::ToolCallCompleted(done) => done.call_id == call.id,
            RunEvent::ToolCallBlocked(blocked) => blocked.call_id == call.id,
            RunEvent::ValidationFailed { call_id, .. }
            | RunEvent::OutputProposed { call_id, .. } => *call_id == Some(call.id),
            _ => false,
        });
        let start = tail.iter().rev().find_map(|event| match &event.what {
            RunEvent::ToolCallStarted(started) if started.call_id == call.id => {
                let on_unknown_outcome = started.on_unknown_outcome;
                Some(Start { seq: event.seq, effect: started.effect, on_unknown_outcome })
            }
            _ => None,
        });
        (!answered).then_some((call, start))
    })
}

fn answer(call: &ToolCall, effect: Option<Effect>) -> RunEvent {
    let (failure, content) = match effect {
        Some(Effect::Once) => (
            CallFailure::UnknownOutcome,
            "The service stopped while this call was executed: it is unknown whether it took effect.",
        ),
        Some(_) => (CallFailure::Cancelled, "The run ended before this call did."),
        None => (CallFailure::Cancelled, "Not executed: the run ended first."),
    };
    RunEvent::ToolCallCompleted(ToolCallCompleted {
        call_id: call.id,
        tool: call.name.clone(),
        target: call.target,
        content: content.to_owned(),
        failure: Some(failure),
        duration_ms: 0,
        cached: false,
        note: None,
    })
}

fn totals_of(record: &RunRecord) -> Totals {
    Totals {
        attempts: record.attempts,
        iterations: record.iterations,
        tool_calls_made: record.tool_calls_made,
        tools_used: record.tools_used.iter().cloned().collect(),
        usage: record.usage,
        retries: 0,
        warnings: record.warnings.clone(),
        callback_errors: record.callback_errors.clone(),
        model: record.model.clone(),
        consumption: record.consumption.clone(),
    }
}

#[cfg(test)]
#[path = "takeover_tests.rs"]
mod tests;
