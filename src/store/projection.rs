//! From what runs write to the rows that change: pure, the same for both databases.
//!
//! Events become journal rows as they are; beside them stand the rows that are listed, filtered and
//! counted. Payloads are not copied: a tool call's row holds the numbers of the events that have
//! its arguments and its result ([`attach_payloads`] joins them again). Rows that one batch inserts
//! and changes are merged, so that a whole iteration is one insert per row. Nothing here knows SQL,
//! and nothing here decides what a run does next.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

use chrono::{DateTime, TimeDelta, Utc};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

use super::observations::observation;
use super::outbox::deliveries;
use super::sql::{Labels, json};
use super::tables::{
    ApprovalRequest, AuditRow, CallProposal, CallState, IterationRecord, JournalRow, NewDelivery,
    Observation, OfRun, RunOpening, RunProgress, RunRecord, ToolCallRecord, UsageSum,
};
use super::{ApprovalStatus, FORMAT, NewRun, RunWrite, SessionPlace, StoreError};
use crate::bounds::json;
use crate::clock;
use crate::clock::beginning;
use crate::event::{
    AuditRecord, Awaited, CallFailure, Event, InputAsked, ModelResponded, Resolved, RunEvent,
    WaitKind,
};
use crate::message::{AssistantMessage, CallTarget, ToolCall, Usage};
use crate::run::{self, Caller, Delegation, Outcome, RunStatus, Totals};

/// Every row that a batch of writes inserts or changes.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// One per write, in the order of the batch.
    pub runs: Vec<RunChange>,
    /// The journal, one per write.
    pub journal: Vec<JournalRow>,
    /// One per model response.
    pub iterations: Vec<IterationRecord>,
    /// What models took, by run.
    pub usage: Vec<(Uuid, UsageSum)>,
    /// Calls of tools: inserted where the proposal is there, else changed.
    pub calls: Vec<CallChange>,
    /// The audit log.
    pub audit: Vec<AuditRow>,
    /// What later runs may recall.
    pub observations: Vec<Observation>,
    /// What is asked for.
    pub approvals: Vec<ApprovalRequest>,
    /// What the receivers of webhooks are told.
    pub deliveries: Vec<NewDelivery>,
    /// Runs that end while they may be waiting for something: their unanswered requests are void.
    pub voided: Vec<Uuid>,
}

/// A run's row as a write leaves it.
#[derive(Debug, PartialEq)]
pub struct RunChange {
    /// The fence: the stored `next_seq`.
    pub first_seq: i64,
    /// What this write says.
    pub progress: RunProgress,
    /// What never changes, where this is the run's first write.
    pub opening: Option<RunOpening>,
}

/// A call's row as a write leaves it.
#[derive(Debug, PartialEq)]
pub struct CallChange {
    /// Where it comes from, if it was proposed in the same write.
    pub proposal: Option<CallProposal>,
    /// Where it stands; what is absent stays as it is.
    pub state: CallState,
}

/// The rows that a batch changes. Writing a whole journal as one write gives the rows as rebuilt.
///
/// # Errors
/// [`StoreError::Failed`] for a write without events, and where a value cannot be written as JSON.
pub fn project(owner: &str, batch: &[RunWrite]) -> Result<Changes, StoreError> {
    let mut changes = Changes::default();
    for write in batch {
        changes.runs.push(run_change(owner, write)?);
        changes.journal.push(journal_row(write)?);
        let first = changes.calls.len();
        let mut calls = RunCalls { run_id: write.run_id, rows: &mut changes.calls, first };
        for event in &write.events {
            if let RunEvent::ModelResponded(response) = &event.what {
                changes.iterations.push(iteration(event, response));
            }
            calls.apply(event);
        }
        changes.usage.extend(taken(write));
        changes.audit.extend(write.audit.iter().map(|record| {
            let Caller { tenant, subject, .. } = write.caller.as_ref();
            let of_run = OfRun {
                agent: Some(write.origin.agent.clone()),
                session_id: write.origin.session_id.clone(),
                definition_hash: Some(write.origin.definition_hash.clone()),
            };
            AuditRow::of_call(tenant, subject, write.run_id, of_run, record)
        }));
        changes
            .observations
            .extend(write.events.iter().filter_map(|event| observation(write, event)));
        changes.deliveries.extend(deliveries(write));
        wait(write, &mut changes);
    }
    Ok(changes)
}

impl RunRecord {
    /// The row as the first and only write of a run leaves it.
    ///
    /// # Errors
    /// [`StoreError::Failed`] for a write without events or that is not a run's first.
    pub fn after(owner: &str, write: &RunWrite) -> Result<Self, StoreError> {
        let change = run_change(owner, write)?;
        let opening = change.opening.ok_or_else(|| StoreError::Failed("not the first".into()))?;
        let mut record = Self::from((opening, change.progress));
        record.take_ending(write.events.last());
        Ok(record)
    }

    /// Fills in what the last event has, where that is the end.
    pub(super) fn take_ending(&mut self, last: Option<&Event>) {
        let outcome = last.and_then(|event| event.what.ending()).map(|ending| &ending.outcome);
        self.output = outcome.and_then(Outcome::output).cloned();
        self.raw_response = outcome.map(|outcome| outcome.raw_response().to_owned());
    }

    /// The number of the newest event.
    pub fn last_seq(&self) -> i64 {
        self.next_seq - 1
    }

    /// Whether it has started others.
    pub fn has_delegated(&self) -> bool {
        self.tools_used.iter().any(|tool| Delegation::of_tool(tool).is_some())
    }

    /// How long it has been under way, without the time in which it waited.
    pub fn active(&self) -> TimeDelta {
        let until = self.waiting_since.or(self.finished_at).unwrap_or_else(clock::now);
        let waited = TimeDelta::milliseconds(self.waited_ms);
        let active = self.started_at.map(|start| until - start - waited);
        active.unwrap_or_default().max(TimeDelta::zero())
    }

    /// What the run has consumed, as far as its row says.
    pub fn totals(&self) -> Totals {
        Totals {
            attempts: self.attempts,
            iterations: self.iterations,
            responses: BTreeMap::new(), // no column
            tool_calls_made: self.tool_calls_made,
            tools_used: self.tools_used.iter().cloned().collect(),
            usage: self.usage,
            retries: 0, // no column
            warnings: self.warnings.clone(),
            model: self.model.clone(),
            mixed_usage: self.mixed_usage,
            consumption: self.consumption.clone(),
            labels: run::Labels::named(&self.labels),
            waited_ms: self.waited_ms,
            waiting_since: self.waiting_since,
        }
    }
}

fn run_change(owner: &str, write: &RunWrite) -> Result<RunChange, StoreError> {
    let totals = &write.totals;
    let (Some(first), Some(last)) = (write.events.first(), write.events.last()) else {
        return Err(StoreError::Failed(format!("a write of run {} has no events", write.run_id)));
    };
    let ending = last.what.ending();
    let outcome = ending.map(|ending| &ending.outcome);
    let status = match (outcome, write.park, &write.new) {
        (Some(outcome), ..) => outcome.status(),
        (None, Some(parked), _) => parked,
        (None, None, Some(new)) => new.status,
        (None, None, None) => RunStatus::Running,
    };
    let started =
        |event: &Event| matches!(event.what, RunEvent::RunStarted { .. }).then_some(event.at);
    let progress = RunProgress {
        id: write.run_id,
        epoch: write.epoch,
        next_seq: last.seq + 1,
        status,
        owner: (status == RunStatus::Running).then(|| owner.to_owned()),
        started_at: write.events.iter().find_map(started),
        attempts: totals.attempts,
        iterations: totals.iterations,
        tool_calls_made: totals.tool_calls_made,
        model: totals.model.clone(),
        mixed_usage: totals.mixed_usage,
        tools_used: totals.tools_used.iter().cloned().collect(),
        warnings: totals.warnings.clone(),
        labels: totals.labels.names(),
        consumption: totals.consumption.clone(),
        error: outcome.and_then(Outcome::error).cloned(),
        termination_reason: outcome.map(|outcome| outcome.reason().as_str().to_owned()),
        partial: matches!(outcome, Some(Outcome::Completed { partial: true, .. })),
        waited_ms: totals.waited_ms,
        waiting_since: totals.waiting_since,
        latency_ms: ending.map(|ending| i64::try_from(ending.latency_ms).unwrap_or(i64::MAX)),
        finished_at: ending.map(|_| last.at),
        usage: totals.usage,
    };
    let opening = write.new.as_deref().map(|new| opening(new, &write.caller));
    Ok(RunChange { first_seq: first.seq, progress, opening })
}

fn opening(new: &NewRun, caller: &Caller) -> RunOpening {
    RunOpening {
        created_at: new.created_at,
        parent_run_id: new.parent_run_id,
        tenant: caller.tenant.clone(),
        subject: caller.subject.clone(),
        scopes: caller.scopes.clone(),
        agent: new.agent.clone(),
        agent_version: new.agent_version.clone(),
        engine_version: env!("CARGO_PKG_VERSION").to_owned(),
        format: FORMAT,
        definition_hash: new.definition.hash.clone(),
        kind: new.kind,
        session_id: new.session_id.clone(),
        session_place: new.session_place.map(|place| place.as_str().to_owned()),
        session_turn: match new.session_place {
            Some(SessionPlace::Holds { turn }) => Some(turn),
            _ => None,
        },
        inputs: Value::clone(&new.inputs),
        overrides: new.overrides.clone(),
        metadata: Labels(new.metadata.clone()),
        idempotency_key: new.idempotency.as_ref().map(|idempotency| idempotency.key.clone()),
        request_hash: new.idempotency.as_ref().map(|idempotency| idempotency.request_hash.clone()),
        traceparent: new.traceparent.clone(),
        webhook: new.webhook.clone(),
        priority: new.queue.priority,
        delayed: new.queue.available_at.is_some() && new.session_id.is_none(),
        // At once is any time before its acceptance, from which the database makes that.
        available_at: (new.status == RunStatus::Queued)
            .then(|| new.queue.available_at.unwrap_or(DateTime::UNIX_EPOCH)),
    }
}

/// What a write asks for. A run that completes has nothing left to wait for; any other end makes
/// void what is open.
fn wait(write: &RunWrite, changes: &mut Changes) {
    let ending = write.events.last().and_then(|event| event.what.ending());
    let status = if ending.is_some() { ApprovalStatus::Void } else { ApprovalStatus::Pending };
    for event in &write.events {
        if let RunEvent::ApprovalRequested(awaited)
        | RunEvent::ToolCallAwaitingClient(awaited)
        | RunEvent::ToolCallAwaitingChild(awaited) = &event.what
        {
            changes.approvals.push(ApprovalRequest {
                run_id: write.run_id,
                seq: event.seq,
                call_id: awaited.call_id,
                tenant: write.caller.tenant.clone(),
                kind: awaited.kind,
                tool: awaited.tool.clone(),
                arguments: awaited.arguments.clone(),
                reason: awaited.reason.clone(),
                at: event.at,
                expires_at: awaited.expires_at,
                child_run_id: awaited.child_run_id,
                input: awaited.input.as_deref().map(InputAsked::shown),
                status,
            });
        }
    }
    if ending.is_some_and(|ending| ending.outcome.status() != RunStatus::Completed) {
        changes.voided.push(write.run_id);
    }
}

fn iteration(event: &Event, response: &ModelResponded) -> IterationRecord {
    let latency = i64::try_from(response.latency_ms).ok().and_then(TimeDelta::try_milliseconds);
    IterationRecord {
        run_id: event.run_id,
        attempt: response.attempt,
        number: response.iteration,
        seq: event.seq,
        started_at: latency.map_or(event.at, |latency| event.at - latency),
        latency_ms: response.latency_ms,
        retries: response.retries,
        fallback: response.fallback,
        repeated: response.repeated,
        provider: response.provider.clone(),
        model: response.model.clone(),
        finish_reason: response.finish_reason.as_str().to_owned(),
        usage: response.usage,
    }
}

/// What models took in a write. A run counts for a model with the first response.
fn taken(write: &RunWrite) -> impl Iterator<Item = (Uuid, UsageSum)> {
    let mut models = BTreeMap::<String, (u32, Usage)>::new();
    for event in &write.events {
        if let Some((model, usage)) = event.what.took() {
            let (responses, sum) = models.entry(model).or_default();
            *responses += u32::from(matches!(event.what, RunEvent::ModelResponded(_)));
            sum.add(usage);
        }
    }
    models.into_iter().map(|(model, (responses, mut usage))| {
        let is_first = responses > 0 && write.totals.responses.get(&model) == Some(&responses);
        if usage.total_tokens() == 0 {
            usage.cost_micro_usd.get_or_insert(0);
        }
        let sum = UsageSum {
            tenant: write.caller.tenant.clone(),
            hour: beginning(write.origin.created_at, TimeDelta::hours(1)),
            agent: write.origin.agent.clone(),
            model,
            runs: u64::from(is_first),
            usage,
        };
        (write.run_id, sum)
    })
}

/// The changed calls of one run, at the end of a batch's list.
struct RunCalls<'a> {
    run_id: Uuid,
    rows: &'a mut Vec<CallChange>,
    first: usize,
}

impl RunCalls<'_> {
    fn apply(&mut self, event: &Event) {
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
            RunEvent::ApprovalRequested(awaited) => self.ask(event.seq, awaited),
            RunEvent::ApprovalResolved(resolved) => self.decide(event.seq, resolved),
            RunEvent::ToolCallAwaitingClient(awaited) => self.hand_out(event.at, awaited),
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
                row.duration_ms = Some(call.duration_ms);
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

    fn ask(&mut self, seq: i64, awaited: &Awaited) {
        match awaited.kind {
            WaitKind::Approval => {
                let row = self.row(awaited.call_id);
                row.state = "awaiting_approval".into();
                row.decision = Some("escalated".into());
                row.reason = Some(awaited.reason.clone());
                row.approval_seq = Some(seq);
            }
            WaitKind::Review => self.row(awaited.call_id).state = "unknown".into(),
            WaitKind::Client | WaitKind::Escalation | WaitKind::Child => {} // no call, or an event of its own
        }
    }

    fn hand_out(&mut self, at: DateTime<Utc>, awaited: &Awaited) {
        let effect = awaited.actions.iter().map(|action| action.effect).max();
        let row = self.row(awaited.call_id);
        row.state = "awaiting_client".into();
        if awaited.input.is_some() {
            return; // it was started before
        }
        row.started_at = Some(at);
        row.effect = effect.map(|effect| effect.as_str().into());
        row.decision.clone_from(&awaited.decision);
    }

    fn decide(&mut self, seq: i64, resolved: &Resolved) {
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

/// A UUID v7 of the record's time and call: the same each time the same record is written.
pub(super) fn audit_id(record: &AuditRecord) -> Uuid {
    let micros = u64::try_from(record.at.timestamp_micros()).unwrap_or_default();
    let (_, call) = record.call_id.as_u64_pair();
    let mut random = [0; 10];
    random[..2].copy_from_slice(&u16::try_from(micros % 1000).unwrap_or_default().to_be_bytes());
    random[2..].copy_from_slice(&call.to_be_bytes());
    uuid::Builder::from_unix_timestamp_millis(micros / 1000, &random).into_uuid()
}

impl ToolCallRecord {
    /// The numbers of the events that have its payloads.
    pub(super) fn sources(&self) -> impl Iterator<Item = i64> + use<> {
        std::iter::once(self.proposed_seq).chain(self.approval_seq).chain(self.result_seq)
    }
}

/// Fills in the arguments and results of calls from the events that have them: the arguments that an
/// approver wrote, where one did.
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
            }
            Some(RunEvent::ToolCallBlocked(blocked)) => {
                call.result = Some(blocked.content.clone());
            }
            _ => {}
        }
    }
}

/// What a call was made with: a text where that is no JSON.
fn arguments(call: &ToolCall) -> Value {
    json::read(&call.arguments).unwrap_or_else(|_| Value::String(call.arguments.clone()))
}

/// The row of a write's events.
fn journal_row(write: &RunWrite) -> Result<JournalRow, StoreError> {
    let (Some(first), Some(last)) = (write.events.first(), write.events.last()) else {
        return Err(StoreError::Failed(format!("a write of run {} has no events", write.run_id)));
    };
    Ok(JournalRow {
        run_id: write.run_id,
        seq: last.seq,
        first_seq: first.seq,
        epoch: write.epoch,
        at: last.at,
        events: events_text(&write.events)?,
    })
}

/// Events as a JSON array of `{"at": microseconds, "type": …, "data": …}`.
fn events_text(events: &[Event]) -> Result<String, StoreError> {
    let mut text = String::from("[");
    for (index, event) in events.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let what = json(&event.what)?;
        let what = what.strip_prefix('{').unwrap_or(&what);
        let _ = write!(text, "{comma}{{\"at\":{},{what}", event.at.timestamp_micros());
    }
    text.push(']');
    Ok(text)
}

/// An event as it stands in the journal.
#[derive(Deserialize)]
struct StoredEvent<'t> {
    at: i64,
    r#type: Cow<'t, str>,
    #[serde(borrow)]
    data: &'t RawValue,
}

/// The events of a row of the journal.
///
/// # Errors
/// [`StoreError::Failed`] where an entry is not an event that this version knows.
pub(super) fn events_of(row: &JournalRow) -> Result<Vec<Event>, StoreError> {
    let damaged = |what: &str, error: serde_json::Error| {
        StoreError::Failed(format!("the journal of run {}: {what}: {error}", row.run_id))
    };
    let stored: Vec<StoredEvent<'_>> = serde_json::from_str(&row.events)
        .map_err(|error| damaged("a row cannot be read", error))?;
    let event = |(seq, StoredEvent { at, r#type: kind, data })| {
        let what = serde_json::from_str(&format!(r#"{{"type":"{kind}","data":{data}}}"#))
            .map_err(|error| damaged(&format!("an entry of type {kind:?}"), error))?;
        let at = DateTime::from_timestamp_micros(at).unwrap_or(row.at);
        Ok(Event { seq, at, run_id: row.run_id, what })
    };
    (row.first_seq..).zip(stored).map(event).collect()
}

#[cfg(test)]
#[path = "projection_tests.rs"]
mod tests;
