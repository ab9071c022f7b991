//! The rows of tool calls, computed from a run's events, and the payloads that remain in the events.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use serde_json::Value;
use uuid::Uuid;

use crate::bounds::json;
use crate::event::{Awaited, CallFailure, Event, Resolved, RunEvent, WaitKind};
use crate::message::{AssistantMessage, CallTarget, ToolCall};
use crate::store::tables::{CallProposal, CallState, ToolCallRecord};

/// The changes of a call's row by one write.
#[derive(Debug, PartialEq)]
pub struct CallChange {
    /// The proposal, if the call was proposed in this write.
    pub proposal: Option<CallProposal>,
    /// The new state; absent columns keep their values.
    pub state: CallState,
}

/// The changed calls of one run, at the end of a batch's list.
pub(super) struct RunCalls<'a> {
    run_id: Uuid,
    rows: &'a mut Vec<CallChange>,
    first: usize,
}

impl<'a> RunCalls<'a> {
    pub(super) fn new(run_id: Uuid, rows: &'a mut Vec<CallChange>) -> Self {
        let first = rows.len();
        Self { run_id, rows, first }
    }

    pub(super) fn apply(&mut self, event: &Event) {
        match &event.what {
            RunEvent::ModelResponded(_) | RunEvent::CallGiven(_) => {
                if let Some((message, attempt, iteration)) = event.what.proposed() {
                    self.propose(event.seq, message, attempt, iteration);
                }
            }
            RunEvent::ToolCallStarted(call) => {
                let row = self.row(call.call_id);
                row.state = "dispatched".into();
                row.effect = Some(call.effect.as_str().into());
                row.decision = Some(call.decision.clone());
                row.reason.clone_from(&call.reason);
                row.started_at.get_or_insert(event.at);
            }
            RunEvent::ApprovalRequested(awaited) => self.request_approval(event.seq, awaited),
            RunEvent::ApprovalResolved(resolved) => self.resolve_approval(event.seq, resolved),
            RunEvent::ToolCallAwaitingClient(awaited) => self.await_client(event.at, awaited),
            RunEvent::ToolCallCompleted(call) => {
                if call.target != CallTarget::Tool {
                    return;
                }
                let row = self.row(call.call_id);
                let state = match call.failure {
                    None => "succeeded",
                    Some(CallFailure::Cancelled | CallFailure::NotExecuted) => "cancelled",
                    Some(CallFailure::UnknownOutcome) => "unknown",
                    Some(_) => "failed",
                };
                row.state = state.into();
                row.is_error = call.failure.is_some();
                row.cached = call.cached;
                row.finished_at = Some(event.at);
                row.duration_ms = call.known_duration_ms();
                row.result_seq = Some(event.seq);
            }
            RunEvent::ToolCallBlocked(call) => {
                let row = self.row(call.call_id);
                row.state = "denied".into();
                row.decision = Some(call.decision.clone());
                row.reason = Some(call.reason.clone());
                row.is_error = true;
                row.finished_at = Some(event.at);
                row.result_seq = Some(event.seq);
            }
            RunEvent::RunQueued {}
            | RunEvent::RunStarted { .. }
            | RunEvent::SessionLoaded { .. }
            | RunEvent::SkillActivated(_)
            | RunEvent::RunResumed { .. }
            | RunEvent::AttemptStarted { .. }
            | RunEvent::IterationStarted { .. }
            | RunEvent::ToolCallAwaitingChild(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::ScanWarned(_)
            | RunEvent::LabelsChanged(_)
            | RunEvent::BudgetWarned { .. }
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::ToolChoiceUnmet { .. }
            | RunEvent::AnswerBlank { .. }
            | RunEvent::ModelRetried(_)
            | RunEvent::ModelInterrupted(_)
            | RunEvent::ContextCompacted(_)
            | RunEvent::RunCancelRequested { .. }
            | RunEvent::RunCompleted(_)
            | RunEvent::RunFailed(_)
            | RunEvent::RunCancelled(_) => {}
        }
    }

    fn request_approval(&mut self, seq: i64, awaited: &Awaited) {
        match awaited.kind {
            WaitKind::Approval => {
                let row = self.row(awaited.call_id);
                row.state = "awaiting_approval".into();
                let effect = awaited.actions.iter().map(|action| action.effect).max();
                row.effect = effect.map(|effect| effect.as_str().into());
                row.decision = Some("escalated".into());
                row.reason = Some(awaited.reason.clone());
                row.approval_seq = Some(seq);
            }
            WaitKind::Review => self.row(awaited.call_id).state = "unknown".into(),
            WaitKind::Client | WaitKind::Escalation | WaitKind::Child => {} // no call, or an event of its own
        }
    }

    fn await_client(&mut self, at: DateTime<Utc>, awaited: &Awaited) {
        let effect = awaited.actions.iter().map(|action| action.effect).max();
        let row = self.row(awaited.call_id);
        row.state = "awaiting_client".into();
        if awaited.input.is_some() {
            return; // it was started before
        }
        row.started_at = Some(at);
        row.effect = effect.map(|effect| effect.as_str().into());
        row.decision.clone_from(&awaited.decision);
        row.reason = Some(awaited.reason.clone());
    }

    fn resolve_approval(&mut self, seq: i64, resolved: &Resolved) {
        if resolved.kind == WaitKind::Approval {
            self.row(resolved.call_id).approval_seq = Some(seq);
        }
    }

    fn propose(&mut self, seq: i64, message: &AssistantMessage, attempt: u32, iteration: u32) {
        for (ordinal, call) in (1..).zip(&message.tool_calls) {
            if call.target == CallTarget::Tool {
                self.change(call.id).proposal = Some(CallProposal {
                    attempt,
                    iteration,
                    ordinal,
                    tool: call.name.clone(),
                    proposed_seq: seq,
                });
            }
        }
    }

    fn row(&mut self, call_id: Uuid) -> &mut CallState {
        &mut self.change(call_id).state
    }

    fn change(&mut self, call_id: Uuid) -> &mut CallChange {
        let known = self.rows[self.first..].iter().position(|row| row.state.call_id == call_id);
        let index = known.map_or(self.rows.len(), |position| self.first + position);
        if known.is_none() {
            let state = CallState {
                run_id: self.run_id,
                call_id,
                state: "proposed".into(),
                effect: None,
                decision: None,
                reason: None,
                is_error: false,
                cached: false,
                started_at: None,
                finished_at: None,
                duration_ms: None,
                approval_seq: None,
                result_seq: None,
            };
            self.rows.push(CallChange { proposal: None, state });
        }
        &mut self.rows[index]
    }
}

impl ToolCallRecord {
    /// The numbers of the events that have its payloads.
    pub(in crate::store) fn sources(&self) -> impl Iterator<Item = i64> + use<> {
        std::iter::once(self.proposed_seq).chain(self.approval_seq).chain(self.result_seq)
    }
}

/// Fills in the arguments and results of calls from their events. Arguments that an approver has edited replace the
/// proposed ones.
pub fn attach_payloads(calls: &mut [ToolCallRecord], events: Vec<Event>) {
    let events: HashMap<i64, RunEvent> =
        events.into_iter().map(|event| (event.seq, event.what)).collect();
    for call in calls {
        let proposed = events.get(&call.proposed_seq).and_then(RunEvent::proposed);
        if let Some((message, ..)) = proposed {
            let position = usize::try_from(call.ordinal).unwrap_or_default().saturating_sub(1);
            call.arguments = message.tool_calls.get(position).map(arguments).unwrap_or_default();
        }
        if let Some(RunEvent::ApprovalResolved(resolved)) =
            call.approval_seq.and_then(|seq| events.get(&seq))
            && let Some(edited) = resolved.resolution.edited()
        {
            (call.arguments, call.edited) = (edited.clone(), true);
        }
        match call.result_seq.and_then(|seq| events.get(&seq)) {
            Some(RunEvent::ToolCallCompleted(done)) => {
                call.result = Some(done.model_text().into_owned());
                call.child_run_id = done.child_run_id;
                call.reconciled = done.reconciled;
            }
            Some(RunEvent::ToolCallBlocked(blocked)) => {
                call.result = Some(blocked.content.clone());
            }
            _ => {}
        }
    }
}

/// The arguments of a call; a string if they are not JSON.
fn arguments(call: &ToolCall) -> Value {
    json::read(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()))
}
