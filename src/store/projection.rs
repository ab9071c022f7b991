//! From what runs write to the rows that change: pure, the same for both databases.
//!
//! Events become journal rows as they are; beside them stand the rows that are listed, filtered and
//! counted. Payloads are not copied: a tool call's row holds the numbers of the events that have
//! its arguments and its result ([`attach_payloads`] joins them again). Rows that one batch inserts
//! and changes are merged, so that a whole iteration is one insert per row. Nothing here knows SQL,
//! and nothing here decides what a run does next.

use std::borrow::Cow;
use std::collections::HashMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Serialize;
use serde_json::Value;
use uuid::Uuid;

use super::changes::{
    ApprovalInsert, AuditInsert, CallChange, CallProposed, Changes, EndColumns, EventInsert,
    IterationInsert, NewColumns, RunChange, VoidedRun, int,
};
use super::observations::observation;
use super::{ApprovalStatus, NewRun, RunWrite, SessionPlace, StoreError, ToolCallRecord};
use crate::event::{
    AuditRecord, Awaited, CallFailure, Ending, Event, ModelResponded, RunEvent, WaitKind,
};
use crate::message::{CallTarget, ToolCall};
use crate::run::{Caller, Outcome, RunStatus};

/// The rows that a batch changes. Writing a whole journal as one write gives the rows as rebuilt.
///
/// # Errors
/// [`StoreError::Failed`] for a write without events, and where a value cannot be written as JSON.
pub fn project(batch: &[RunWrite]) -> Result<Changes<'_>, StoreError> {
    let mut changes = Changes::default();
    for write in batch {
        changes.runs.push(run_change(write)?);
        let first = changes.calls.len();
        let mut calls = RunCalls { run_id: write.run_id, rows: &mut changes.calls, first };
        for event in &write.events {
            changes.events.push(EventInsert {
                run_id: write.run_id,
                seq: event.seq,
                epoch: write.epoch,
                at: event.at,
                kind: event.what.type_name(),
                data: event_data(&event.what)?,
            });
            if let RunEvent::ModelResponded(response) = &event.what {
                changes.iterations.push(iteration(event, response));
            }
            calls.apply(event);
        }
        changes.audit.extend(write.audit.iter().map(|record| audit(write, record)));
        changes
            .observations
            .extend(write.events.iter().filter_map(|event| observation(write, event)));
        wait(write, &mut changes)?;
    }
    Ok(changes)
}

fn run_change(write: &RunWrite) -> Result<RunChange<'_>, StoreError> {
    let totals = &write.totals;
    let (Some(first), Some(last)) = (write.events.first(), write.events.last()) else {
        return Err(StoreError::Failed(format!("a write of run {} has no events", write.run_id)));
    };
    let ending = last.what.ending().map(|ending| (last.at, ending));
    let status = match (ending, write.park, &write.new) {
        (Some((_, ending)), ..) => ending.outcome.status(),
        (None, Some(parked), _) => parked,
        (None, None, Some(new)) => new.status,
        (None, None, None) => RunStatus::Running,
    };
    let started =
        |event: &Event| matches!(event.what, RunEvent::RunStarted { .. }).then_some(event.at);
    Ok(RunChange {
        id: write.run_id,
        epoch: write.epoch,
        first_seq: first.seq,
        next_seq: last.seq + 1,
        status: status.as_str(),
        started_at: write.events.iter().find_map(started),
        attempts: totals.attempts,
        iterations: totals.iterations,
        tool_calls_made: totals.tool_calls_made,
        usage: totals.usage.into(),
        model: totals.model.as_deref(),
        tools_used: list(totals.tools_used.len(), &totals.tools_used)?,
        warnings: list(totals.warnings.len(), &totals.warnings)?,
        callback_errors: list(totals.callback_errors.len(), &totals.callback_errors)?,
        consumption: (!totals.consumption.is_nothing())
            .then(|| json(&totals.consumption))
            .transpose()?,
        end: ending.map(|(at, ending)| end_columns(at, ending)).transpose()?,
        tenant: &write.caller.tenant,
        subject: &write.caller.subject,
        new: write.new.as_deref().map(|new| new_columns(new, &write.caller)).transpose()?,
    })
}

/// What a write asks for. A run that completes has nothing left to wait for; any other end makes
/// void what is open.
fn wait<'w>(write: &'w RunWrite, changes: &mut Changes<'w>) -> Result<(), StoreError> {
    let ending = write.events.last().and_then(|event| event.what.ending());
    let status = if ending.is_some() { ApprovalStatus::Void } else { ApprovalStatus::Pending };
    for event in &write.events {
        if let RunEvent::ApprovalRequested(awaited) | RunEvent::ToolCallAwaitingClient(awaited) =
            &event.what
        {
            changes.approvals.push(ApprovalInsert {
                run_id: write.run_id,
                seq: event.seq,
                call_id: awaited.call_id,
                tenant: &write.caller.tenant,
                at: event.at,
                expires_at: awaited.expires_at,
                kind: awaited.kind.as_str(),
                tool: clean(&awaited.tool),
                reason: clean(&awaited.reason),
                arguments: json(&awaited.arguments)?,
                status: status.as_str(),
            });
        }
    }
    if ending.is_some_and(|ending| ending.outcome.status() != RunStatus::Completed) {
        changes.voided.push(VoidedRun { run_id: write.run_id });
    }
    Ok(())
}

fn end_columns(at: DateTime<Utc>, ending: &Ending) -> Result<EndColumns<'_>, StoreError> {
    let outcome = &ending.outcome;
    Ok(EndColumns {
        output: outcome.output().map(json).transpose()?,
        raw_response: clean(outcome.raw_response()),
        error: outcome.error().map(json).transpose()?,
        termination_reason: outcome.reason().as_str(),
        partial: matches!(outcome, Outcome::Completed { partial: true, .. }),
        latency_ms: int(ending.latency_ms),
        finished_at: at,
    })
}

fn new_columns<'w>(new: &'w NewRun, caller: &Caller) -> Result<NewColumns<'w>, StoreError> {
    Ok(NewColumns {
        agent: &new.agent,
        agent_version: &new.agent_version,
        definition_hash: &new.definition.hash,
        kind: new.kind.as_str(),
        scopes: json(&caller.scopes)?,
        inputs: json(&new.inputs)?,
        overrides: json(&new.overrides)?,
        session_id: new.session_id.as_deref(),
        session_place: new.session_place.map(SessionPlace::as_str),
        session_turn: match new.session_place {
            Some(SessionPlace::Holds { turn }) => Some(turn),
            _ => None,
        },
        parent_run_id: new.parent_run_id,
        metadata: json(&new.metadata)?,
        created_at: new.created_at,
        idempotency_key: new.idempotency.as_ref().map(|idempotency| idempotency.key.as_str()),
        request_hash: new.idempotency.as_ref().map(|idempotency| idempotency.request_hash.as_str()),
        traceparent: new.traceparent.as_deref(),
    })
}

fn iteration<'w>(event: &Event, response: &'w ModelResponded) -> IterationInsert<'w> {
    let latency_ms = int(response.latency_ms);
    IterationInsert {
        run_id: event.run_id,
        attempt: response.attempt,
        number: response.iteration,
        seq: event.seq,
        started_at: TimeDelta::try_milliseconds(latency_ms)
            .map_or(event.at, |latency| event.at - latency),
        latency_ms,
        retries: response.retries,
        usage: response.usage.into(),
        fallback: response.fallback,
        provider: clean(&response.provider),
        model: clean(&response.model),
        finish_reason: response.finish_reason.as_str(),
    }
}

/// The changed calls of one run, at the end of a batch's list.
struct RunCalls<'a, 'w> {
    run_id: Uuid,
    rows: &'a mut Vec<CallChange<'w>>,
    first: usize,
}

impl<'w> RunCalls<'_, 'w> {
    fn apply(&mut self, event: &'w Event) {
        match &event.what {
            RunEvent::ModelResponded(response) => self.propose(event.seq, response),
            RunEvent::ToolCallStarted(call) => {
                let row = self.row(call.call_id);
                row.state = "dispatched";
                row.effect = Some(call.effect.as_str());
                row.decision = Some(&call.decision);
                row.reason = call.reason.as_deref().map(clean);
                row.started_at = Some(event.at);
            }
            RunEvent::ApprovalRequested(awaited) => self.ask(awaited),
            RunEvent::ToolCallAwaitingClient(awaited) => {
                self.row(awaited.call_id).state = "awaiting_client";
            }
            RunEvent::ToolCallCompleted(call) => {
                if call.target != CallTarget::Tool {
                    return;
                }
                let row = self.row(call.call_id);
                row.state = match call.failure {
                    None => "succeeded",
                    Some(CallFailure::Cancelled | CallFailure::NotExecuted) => "cancelled",
                    Some(CallFailure::UnknownOutcome) => "unknown",
                    Some(_) => "failed",
                };
                row.is_error = call.failure.is_some();
                row.cached = call.cached;
                row.finished_at = Some(event.at);
                row.duration_ms = Some(int(call.duration_ms));
                row.result_seq = Some(event.seq);
            }
            RunEvent::ToolCallBlocked(call) => {
                let row = self.row(call.call_id);
                row.state = "denied";
                row.decision = Some(&call.decision);
                row.reason = Some(clean(&call.reason));
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
            | RunEvent::ApprovalResolved(_)
            | RunEvent::HandoffStarted { .. }
            | RunEvent::BudgetWarned { .. }
            | RunEvent::OutputProposed { .. }
            | RunEvent::OutputReflected { .. }
            | RunEvent::ValidationFailed { .. }
            | RunEvent::ConfirmationRequested { .. }
            | RunEvent::DecisionExtractionFailed(_)
            | RunEvent::DecisionValidationFailed(_)
            | RunEvent::ToolChoiceUnmet { .. }
            | RunEvent::AnswerBlank { .. }
            | RunEvent::ContextCompacted(_)
            | RunEvent::RunCancelRequested { .. }
            | RunEvent::RunCompleted(_)
            | RunEvent::RunFailed(_)
            | RunEvent::RunCancelled(_) => {}
        }
    }

    fn ask(&mut self, awaited: &'w Awaited) {
        match awaited.kind {
            WaitKind::Approval => {
                let row = self.row(awaited.call_id);
                row.state = "awaiting_approval";
                row.decision = Some("escalated");
                row.reason = Some(clean(&awaited.reason));
            }
            WaitKind::Review => self.row(awaited.call_id).state = "unknown",
            WaitKind::Client | WaitKind::Escalation => {} // no call, or an event of its own
        }
    }

    fn propose(&mut self, seq: i64, response: &'w ModelResponded) {
        for (ordinal, call) in (1..).zip(&response.message.tool_calls) {
            if call.target == CallTarget::Tool {
                let (attempt, iteration, tool) =
                    (response.attempt, response.iteration, clean(&call.name));
                self.row(call.id).proposed =
                    Some(CallProposed { attempt, iteration, ordinal, tool, seq });
            }
        }
    }

    fn row(&mut self, call_id: Uuid) -> &mut CallChange<'w> {
        let known = self.rows[self.first..].iter().position(|row| row.call_id == call_id);
        let index = known.map_or(self.rows.len(), |position| self.first + position);
        if known.is_none() {
            self.rows.push(CallChange::of(self.run_id, call_id));
        }
        &mut self.rows[index]
    }
}

fn audit<'w>(write: &'w RunWrite, record: &'w AuditRecord) -> AuditInsert<'w> {
    audit_of(&write.caller.tenant, &write.caller.subject, write.run_id, record)
}

/// An audit record as a row: of this tenant, on behalf of this subject.
pub(super) fn audit_of<'w>(
    tenant: &'w str,
    subject: &'w str,
    run_id: Uuid,
    record: &'w AuditRecord,
) -> AuditInsert<'w> {
    AuditInsert {
        tenant,
        at: record.at,
        id: audit_id(record),
        run_id,
        call_id: record.call_id,
        duration_ms: record.duration_ms.map(int),
        subject,
        tool: clean(&record.tool),
        rule: &record.rule,
        decision: &record.decision,
        reason: record.reason.as_deref().map(clean),
        outcome: &record.outcome,
        arguments: clean(&record.arguments),
    }
}

/// A UUID v7 of the record's time and call: the same each time the same record is written.
fn audit_id(record: &AuditRecord) -> Uuid {
    let micros = u64::try_from(record.at.timestamp_micros()).unwrap_or_default();
    let (_, call) = record.call_id.as_u64_pair();
    let mut random = [0; 10];
    random[..2].copy_from_slice(&u16::try_from(micros % 1000).unwrap_or_default().to_be_bytes());
    random[2..].copy_from_slice(&call.to_be_bytes());
    uuid::Builder::from_unix_timestamp_millis(micros / 1000, &random).into_uuid()
}

/// A call's row before its payloads are attached.
#[derive(Debug)]
pub struct StoredCall {
    /// The row; `arguments` and `result` are still empty.
    pub record: ToolCallRecord,
    /// The event that has the arguments.
    pub proposed_seq: i64,
    /// The event that has the result.
    pub result_seq: Option<i64>,
}

impl StoredCall {
    /// The numbers of the events that have its payloads.
    pub fn sources(&self) -> impl Iterator<Item = i64> + use<> {
        std::iter::once(self.proposed_seq).chain(self.result_seq)
    }
}

/// Fills in the arguments and results of calls from the events that have them.
pub fn attach_payloads(calls: Vec<StoredCall>, events: Vec<Event>) -> Vec<ToolCallRecord> {
    let events: HashMap<i64, RunEvent> =
        events.into_iter().map(|event| (event.seq, event.what)).collect();
    let fill = |StoredCall { mut record, proposed_seq, result_seq }| {
        if let Some(RunEvent::ModelResponded(response)) = events.get(&proposed_seq) {
            let position = usize::try_from(record.ordinal).unwrap_or_default().saturating_sub(1);
            record.arguments =
                response.message.tool_calls.get(position).map(arguments).unwrap_or_default();
        }
        record.result = match result_seq.and_then(|seq| events.get(&seq)) {
            Some(RunEvent::ToolCallCompleted(call)) => Some(call.told().into_owned()),
            Some(RunEvent::ToolCallBlocked(call)) => Some(call.content.clone()),
            _ => None,
        };
        record
    };
    calls.into_iter().map(fill).collect()
}

/// What a call was made with: a text where that is no JSON.
fn arguments(call: &ToolCall) -> Value {
    serde_json::from_str(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()))
}

/// An event's `data` as JSON text.
fn event_data(event: &RunEvent) -> Result<String, StoreError> {
    let mut text = json(event)?;
    let head = r#"{"type":"","data":"#.len() + event.type_name().len();
    text.pop();
    text.drain(..head);
    Ok(text)
}

/// The event of a journal row; the opposite of [`event_data`].
///
/// # Errors
/// [`StoreError::Failed`] where the row is not an event that this version knows.
pub fn event_from(kind: &str, data: &str) -> Result<RunEvent, StoreError> {
    serde_json::from_str(&format!(r#"{{"type":"{kind}","data":{data}}}"#)).map_err(|error| {
        StoreError::Failed(format!("a journal entry of type {kind:?} cannot be read: {error}"))
    })
}

pub(super) fn json<T: Serialize + ?Sized>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Failed(format!("a value is not JSON: {error}")))
}

/// A list as JSON text; nothing where it is empty.
fn list<T: Serialize>(len: usize, items: &T) -> Result<Option<String>, StoreError> {
    (len > 0).then(|| json(items)).transpose()
}

/// Text columns cannot hold NUL, and a model may write one; the journal keeps what it wrote.
pub(super) fn clean(text: &str) -> Cow<'_, str> {
    if text.contains('\0') {
        Cow::Owned(text.replace('\0', "\u{FFFD}"))
    } else {
        Cow::Borrowed(text)
    }
}

#[cfg(test)]
#[path = "projection_tests.rs"]
mod tests;
