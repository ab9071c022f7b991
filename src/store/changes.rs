//! The rows that writes insert or change, in portable types, ready to be bound.
//!
//! [`project`](super::projection::project) makes them. PostgreSQL binds them column by column,
//! SQLite as JSON, which is why they serialise with times as microseconds. No SQL here.

use std::borrow::Cow;

use chrono::serde::{ts_microseconds, ts_microseconds_option};
use chrono::{DateTime, Utc};
use serde::Serialize;
use uuid::Uuid;

use crate::message::Usage;

/// Every row that a batch of writes inserts or changes.
#[derive(Debug, Default, PartialEq)]
pub struct Changes<'w> {
    /// One per write, in the order of the batch.
    pub runs: Vec<RunChange<'w>>,
    /// The journal.
    pub events: Vec<EventInsert>,
    /// One per model response.
    pub iterations: Vec<IterationInsert<'w>>,
    /// Calls of tools, inserted or changed.
    pub calls: Vec<CallChange<'w>>,
    /// The audit log.
    pub audit: Vec<AuditInsert<'w>>,
    /// What later runs may recall.
    pub observations: Vec<ObservationInsert<'w>>,
    /// What is asked for.
    pub approvals: Vec<ApprovalInsert<'w>>,
    /// Runs that end while they may be waiting for something.
    pub voided: Vec<VoidedRun>,
}

/// A run's row as a write leaves it, with the fence that the stored row must pass.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `runs`")]
pub struct RunChange<'w> {
    pub id: Uuid,
    pub epoch: i64,
    /// The fence: the stored `next_seq`.
    pub first_seq: i64,
    pub next_seq: i64,
    pub status: &'static str,
    #[serde(with = "ts_microseconds_option")]
    pub started_at: Option<DateTime<Utc>>,
    pub attempts: u32,
    pub iterations: u32,
    pub tool_calls_made: u32,
    pub usage: UsageColumns,
    pub model: Option<&'w str>,
    /// JSON, as the three below; absent where empty.
    pub tools_used: Option<String>,
    pub warnings: Option<String>,
    pub callback_errors: Option<String>,
    pub consumption: Option<String>,
    pub end: Option<EndColumns<'w>>,
    pub tenant: &'w str,
    pub subject: &'w str,
    /// The columns that never change, where this is the run's first write.
    pub new: Option<NewColumns<'w>>,
}

/// The terminal columns.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `runs`")]
pub struct EndColumns<'w> {
    pub output: Option<String>,
    pub raw_response: Cow<'w, str>,
    pub error: Option<String>,
    pub termination_reason: &'static str,
    pub partial: bool,
    pub latency_ms: i64,
    #[serde(with = "ts_microseconds")]
    pub finished_at: DateTime<Utc>,
}

/// The columns that never change.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `runs`")]
pub struct NewColumns<'w> {
    pub agent: &'w str,
    pub agent_version: &'w str,
    pub definition_hash: &'w str,
    pub kind: &'static str,
    pub scopes: String,
    pub inputs: String,
    pub overrides: String,
    pub session_id: Option<&'w str>,
    pub session_place: Option<&'static str>,
    pub session_turn: Option<i64>,
    pub parent_run_id: Option<Uuid>,
    pub metadata: String,
    #[serde(with = "ts_microseconds")]
    pub created_at: DateTime<Utc>,
    pub idempotency_key: Option<&'w str>,
    pub request_hash: Option<&'w str>,
    pub traceparent: Option<&'w str>,
}

/// [`Usage`] in the integers that databases have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `runs` and `iterations`")]
pub struct UsageColumns {
    pub input_tokens: i64,
    pub output_tokens: i64,
    pub cached_input_tokens: i64,
    pub cache_write_tokens: i64,
    pub reasoning_tokens: i64,
    pub cost_micro_usd: Option<i64>,
    pub estimated: bool,
}

/// A row of `run_events`.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `run_events`")]
pub struct EventInsert {
    pub run_id: Uuid,
    pub seq: i64,
    pub epoch: i64,
    #[serde(with = "ts_microseconds")]
    pub at: DateTime<Utc>,
    pub kind: &'static str,
    pub data: String,
}

/// A row of `iterations`.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `iterations`")]
pub struct IterationInsert<'w> {
    pub run_id: Uuid,
    pub attempt: u32,
    pub number: u32,
    pub seq: i64,
    #[serde(with = "ts_microseconds")]
    pub started_at: DateTime<Utc>,
    pub latency_ms: i64,
    pub retries: u32,
    pub usage: UsageColumns,
    pub fallback: bool,
    pub provider: Cow<'w, str>,
    pub model: Cow<'w, str>,
    pub finish_reason: &'static str,
}

/// A row of `tool_calls`: inserted where `proposed` is there, else changed.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `tool_calls`")]
pub struct CallChange<'w> {
    pub run_id: Uuid,
    pub call_id: Uuid,
    pub proposed: Option<CallProposed<'w>>,
    pub state: &'static str,
    pub effect: Option<&'static str>,
    pub decision: Option<&'w str>,
    pub reason: Option<Cow<'w, str>>,
    pub is_error: bool,
    pub cached: bool,
    #[serde(with = "ts_microseconds_option")]
    pub started_at: Option<DateTime<Utc>>,
    #[serde(with = "ts_microseconds_option")]
    pub finished_at: Option<DateTime<Utc>>,
    pub duration_ms: Option<i64>,
    pub result_seq: Option<i64>,
}

/// The columns of a call that come from the response that asked for it.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `tool_calls`")]
pub struct CallProposed<'w> {
    pub attempt: u32,
    pub iteration: u32,
    /// 1-based position among the calls of the response.
    pub ordinal: i64,
    pub tool: Cow<'w, str>,
    pub seq: i64,
}

/// A row of `audit_log`.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `audit_log`")]
pub struct AuditInsert<'w> {
    pub tenant: &'w str,
    #[serde(with = "ts_microseconds")]
    pub at: DateTime<Utc>,
    pub id: Uuid,
    pub run_id: Uuid,
    pub call_id: Uuid,
    pub duration_ms: Option<i64>,
    pub subject: &'w str,
    pub tool: Cow<'w, str>,
    pub rule: &'w str,
    pub decision: &'w str,
    pub reason: Option<Cow<'w, str>>,
    pub outcome: &'w str,
    pub arguments: Cow<'w, str>,
}

/// A row of `observations`.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `observations`")]
pub struct ObservationInsert<'w> {
    pub run_id: Uuid,
    pub seq: i64,
    pub tenant: &'w str,
    pub agent: &'w str,
    pub session_id: Option<&'w str>,
    #[serde(with = "ts_microseconds")]
    pub at: DateTime<Utc>,
    pub kind: &'static str,
    pub content: String,
}

/// A row of `approvals`.
#[derive(Debug, PartialEq, Serialize)]
#[expect(missing_docs, reason = "fields mirror the columns of `approvals`")]
pub struct ApprovalInsert<'w> {
    pub run_id: Uuid,
    pub seq: i64,
    pub call_id: Uuid,
    pub tenant: &'w str,
    #[serde(with = "ts_microseconds")]
    pub at: DateTime<Utc>,
    #[serde(with = "ts_microseconds_option")]
    pub expires_at: Option<DateTime<Utc>>,
    pub kind: &'static str,
    pub tool: Cow<'w, str>,
    pub reason: Cow<'w, str>,
    pub arguments: String,
    /// `pending`, or `void` where the same write ends the run.
    pub status: &'static str,
}

/// A run whose unanswered rows of `approvals` are void.
#[derive(Debug, PartialEq, Serialize)]
pub struct VoidedRun {
    /// The run.
    pub run_id: Uuid,
}

impl From<Usage> for UsageColumns {
    fn from(usage: Usage) -> Self {
        Self {
            input_tokens: int(usage.input_tokens),
            output_tokens: int(usage.output_tokens),
            cached_input_tokens: int(usage.cached_input_tokens),
            cache_write_tokens: int(usage.cache_write_tokens),
            reasoning_tokens: int(usage.reasoning_tokens),
            cost_micro_usd: usage.cost_micro_usd,
            estimated: usage.estimated,
        }
    }
}

impl CallChange<'_> {
    /// A call of which nothing is known yet.
    pub(super) fn of(run_id: Uuid, call_id: Uuid) -> Self {
        Self {
            run_id,
            call_id,
            proposed: None,
            state: "proposed",
            effect: None,
            decision: None,
            reason: None,
            is_error: false,
            cached: false,
            started_at: None,
            finished_at: None,
            duration_ms: None,
            result_seq: None,
        }
    }
}

/// What databases can hold of a count.
pub(super) fn int(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
