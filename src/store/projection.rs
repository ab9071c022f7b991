//! Computes the rows that change from the writes of runs: pure functions, the same for both databases.
//!
//! Events are stored unchanged as journal rows. Other rows are for listing, filtering and counting. Payloads are
//! not copied: a tool call's row holds the numbers of the events with its arguments and its result
//! ([`attach_payloads`] joins them again). Inserts and changes of the same row in one batch are merged. There is
//! no SQL here, and no decision about what a run does next.

mod calls;
mod journal;
mod run;

use std::collections::BTreeMap;

use chrono::TimeDelta;
use uuid::Uuid;

use self::calls::RunCalls;
pub use self::calls::{CallChange, attach_payloads};
use self::journal::journal_row;
pub(super) use self::journal::{entries_of, events_of};
pub use self::run::RunChange;
use self::run::run_change;
use super::observations::observation;
use super::outbox::deliveries;
use super::tables::{
    ApprovalRequest, AuditRow, AuditedRun, IterationRecord, JournalRow, NewDelivery, Observation,
    UsageSum,
};
use super::{ApprovalStatus, RunWrite, StoreError};
use crate::clock::beginning;
use crate::event::{Event, InputRequired, ModelResponded, RunEvent};
use crate::message::Usage;
use crate::run::{Caller, RunStatus};

/// Every row that a batch of writes inserts or changes.
#[derive(Debug, Default, PartialEq)]
pub struct Changes {
    /// One per write, in the order of the batch.
    pub runs: Vec<RunChange>,
    /// The journal, one per write.
    pub journal: Vec<JournalRow>,
    /// One per model response.
    pub iterations: Vec<IterationRecord>,
    /// The usage of models, by run.
    pub usage: Vec<(Uuid, UsageSum)>,
    /// Tool calls: inserted if they have a proposal, otherwise changed.
    pub calls: Vec<CallChange>,
    /// The audit log.
    pub audit: Vec<AuditRow>,
    /// Observations that later runs may recall.
    pub observations: Vec<Observation>,
    /// Requests to callers, approvers and child runs.
    pub approvals: Vec<ApprovalRequest>,
    /// The webhook events.
    pub deliveries: Vec<NewDelivery>,
    /// Runs that have ended and may have pending requests, which become void.
    pub voided: Vec<Uuid>,
}

/// The rows that a batch changes. One write with a whole journal gives the same rows as many small writes.
///
/// # Errors
/// [`StoreError::Failed`] for a write without events, and if a value cannot be encoded as JSON.
pub fn project(owner: &str, batch: &[RunWrite]) -> Result<Changes, StoreError> {
    let mut changes = Changes::default();
    for write in batch {
        changes.runs.push(run_change(owner, write)?);
        changes.journal.push(journal_row(write)?);
        let mut calls = RunCalls::new(write.run_id, &mut changes.calls);
        for event in &write.events {
            if let RunEvent::ModelResponded(response) = &event.what {
                changes.iterations.push(iteration(event, response));
            }
            calls.apply(event);
        }
        changes.usage.extend(usage_sums(write));
        changes.audit.extend(write.audit.iter().map(|record| {
            let Caller { tenant, subject, .. } = write.caller.as_ref();
            let audited_run = AuditedRun {
                agent: Some(write.origin.agent.clone()),
                session_id: write.origin.session_id.clone(),
                definition_hash: Some(write.origin.definition_hash.clone()),
            };
            AuditRow::of_call(tenant, subject, write.run_id, audited_run, record)
        }));
        changes
            .observations
            .extend(write.events.iter().filter_map(|event| observation(write, event)));
        changes.deliveries.extend(deliveries(write));
        add_approvals(write, &mut changes);
    }
    Ok(changes)
}

/// Adds the requests of a write. Any end but completion voids pending requests; a completed run has none.
fn add_approvals(write: &RunWrite, changes: &mut Changes) {
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
                input: awaited.input.as_deref().map(InputRequired::shown),
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

/// The usage of models in a write. A run counts for a model once, with the model's first response.
fn usage_sums(write: &RunWrite) -> impl Iterator<Item = (Uuid, UsageSum)> {
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

#[cfg(test)]
#[path = "projection_tests.rs"]
mod tests;
