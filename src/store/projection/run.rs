//! A run's row: how writes change it, and values that are derived from it.

use std::collections::BTreeMap;

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;

use crate::clock;
use crate::event::{Event, RunEvent};
use crate::run::{Caller, Delegation, Labels, Outcome, RunStatus, Totals};
use crate::store::sql;
use crate::store::tables::{RunOpening, RunProgress, RunRecord};
use crate::store::{FORMAT, NewRun, RunWrite, SessionPlace, StoreError};

/// The changes of a run's row by one write.
#[derive(Debug, PartialEq)]
pub struct RunChange {
    /// The fence: the stored `next_seq`.
    pub first_seq: i64,
    /// The columns that every write sets.
    pub progress: RunProgress,
    /// The columns that never change, if this is the run's first write.
    pub opening: Option<RunOpening>,
}

impl RunRecord {
    /// The row after the first write of a run.
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

    /// Fills in the output from the last event, if that ends the run.
    pub(in crate::store) fn take_ending(&mut self, last: Option<&Event>) {
        let outcome = last.and_then(|event| event.what.ending()).map(|ending| &ending.outcome);
        self.output = outcome.and_then(Outcome::output).cloned();
        self.raw_response = outcome.map(|outcome| outcome.raw_response().to_owned());
    }

    /// The number of the newest event.
    pub fn last_seq(&self) -> i64 {
        self.next_seq - 1
    }

    /// The time before which the run is not claimed; `None` once it has passed.
    pub fn not_before(&self) -> Option<DateTime<Utc>> {
        self.available_at.filter(|at| self.started_at.is_none() && *at > clock::now())
    }

    /// Whether it has started child runs.
    pub fn has_delegated(&self) -> bool {
        self.tools_used.iter().any(|tool| Delegation::of_tool(tool).is_some())
    }

    /// How long the run has been in progress, without the time in which it was parked.
    pub fn active(&self) -> TimeDelta {
        let until = self.waiting_since.or(self.finished_at).unwrap_or_else(clock::now);
        let waited = TimeDelta::milliseconds(self.waited_ms);
        let active = self.started_at.map(|start| until - start - waited);
        active.unwrap_or_default().max(TimeDelta::zero())
    }

    /// The totals of the run, as far as its row has them.
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
            labels: Labels::named(&self.labels),
            waited_ms: self.waited_ms,
            waiting_since: self.waiting_since,
        }
    }
}

pub(super) fn run_change(owner: &str, write: &RunWrite) -> Result<RunChange, StoreError> {
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
        metadata: sql::Labels(new.metadata.clone()),
        idempotency_key: new.idempotency.as_ref().map(|idempotency| idempotency.key.clone()),
        request_hash: new.idempotency.as_ref().map(|idempotency| idempotency.request_hash.clone()),
        traceparent: new.traceparent.clone(),
        webhook: new.webhook.clone(),
        priority: new.queue.priority,
        delayed: new.queue.available_at.is_some() && new.session_id.is_none(),
        // Without a delay, any past time will do: the database replaces it by the time of acceptance.
        available_at: (new.status == RunStatus::Queued)
            .then(|| new.queue.available_at.unwrap_or(DateTime::UNIX_EPOCH)),
    }
}
