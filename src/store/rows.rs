//! The rows that go into and come out of the store, in portable types.
//!
//! No SQL and no database type here. Times are UTC with microseconds, money is integer
//! micro-dollars.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::Value;
use strum::IntoStaticStr;
use uuid::Uuid;

use crate::event::{AuditRecord, Event};
use crate::message::Usage;
use crate::run::{Caller, Consumption, RunError, RunKind, RunOrigin, RunStatus, Totals};

/// A definition as it was when a run started; stored once per distinct text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionSnapshot {
    /// SHA-256 of `json`, hex.
    pub hash: String,
    /// The definition as JSON text.
    pub json: String,
}

/// The row of a run that starts now.
#[derive(Debug, Clone, PartialEq)]
pub struct NewRun {
    /// UUID v7, or the caller's choice.
    pub id: Uuid,
    /// The agent's name.
    pub agent: String,
    /// The agent's version.
    pub agent_version: String,
    /// What the run executes, whatever happens to the file later.
    pub definition: Arc<DefinitionSnapshot>,
    /// Single shot or loop.
    pub kind: RunKind,
    /// [`RunStatus::Running`] (owned by the committing replica, epoch 1) or [`RunStatus::Queued`]
    /// (epoch 0).
    pub status: RunStatus,
    /// The validated inputs.
    pub inputs: Arc<Value>,
    /// The request's overrides, as they were sent.
    pub overrides: Value,
    /// The session, where the caller named one.
    pub session_id: Option<String>,
    /// The run's place in it; none for a run that another one delegated to.
    pub session_place: Option<SessionPlace>,
    /// The run that delegated to this one.
    pub parent_run_id: Option<Uuid>,
    /// The caller's labels, an object of strings.
    pub metadata: Value,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
    /// The caller's key for safe retries.
    pub idempotency: Option<Idempotency>,
    /// The caller's W3C `traceparent`.
    pub traceparent: Option<String>,
}

/// A run's place in its session when it is accepted. One live run holds a session; others wait, and
/// cannot be claimed before it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum SessionPlace {
    /// It holds the session. Not stored where another run holds it or waits for it, or had this
    /// turn.
    Holds {
        /// 1 for the first run that holds the session, 2 for the next, as far as the starter knows.
        turn: i64,
    },
    /// It is the next to hold it, before those that wait.
    Next,
    /// It waits for its turn, in the order of acceptance.
    Waits,
}

impl SessionPlace {
    /// The name used in SQL. Those that wait are sorted by it.
    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A session as it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRecord {
    /// The agent that opened it.
    pub agent: String,
    /// When its first run was accepted.
    pub created_at: DateTime<Utc>,
    /// When its newest run was accepted.
    pub last_run_at: DateTime<Utc>,
    /// The run that holds it, then those that wait, in their order.
    pub live: Vec<Uuid>,
    /// The turn of the run that held it last; 0 where none did.
    pub turn: i64,
    /// Ended runs that held it and in which a model answered, in the order of their turns.
    pub ended: Vec<Uuid>,
}

/// What is remembered of an event of an earlier run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Observation {
    /// When it happened.
    pub at: DateTime<Utc>,
    /// `model_response tool_call decision error`.
    pub kind: String,
    /// In words, at most 2 KiB.
    pub content: String,
}

/// What became of a session that was to be deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionDeleted {
    /// It is gone, with its runs and all that belongs to them.
    Gone,
    /// A run of it is live: nothing was deleted.
    Busy,
    /// There is no such session.
    Unknown,
}

/// What makes a repeated request recognisable; unique per tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    /// The `Idempotency-Key` header's value.
    pub key: String,
    /// SHA-256 of the request, hex.
    pub request_hash: String,
}

/// The run that holds an idempotency key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotentRun {
    /// The run.
    pub run_id: Uuid,
    /// SHA-256 of the request that started it, hex.
    pub request_hash: String,
    /// When it was accepted.
    pub created_at: DateTime<Utc>,
}

/// Everything that one run writes in one transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct RunWrite {
    /// The run.
    pub run_id: Uuid,
    /// The ownership number under which this is written; the fence.
    pub epoch: i64,
    /// Who started the run: tenant and subject of every row.
    pub caller: Arc<Caller>,
    /// The run's row, if this is its first write.
    pub new: Option<Arc<NewRun>>,
    /// For observations, and for those who are told of the write once it is durable.
    pub origin: Option<Arc<RunOrigin>>,
    /// What happened, consecutive numbers; never empty.
    pub events: Vec<Event>,
    /// Audit records of the calls in `events`.
    pub audit: Vec<AuditRecord>,
    /// The totals after the last event.
    pub totals: Totals,
    /// The status in which the run is given back with these events, where it waits for somebody.
    pub park: Option<RunStatus>,
    /// Whether an earlier try may have stored it, because its answer was lost.
    pub is_repeated: bool,
}

/// A run as it is stored.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "fields mirror the documented columns of `runs`")]
pub struct RunRecord {
    pub id: Uuid,
    pub tenant: String,
    pub agent: String,
    pub agent_version: String,
    pub definition_hash: String,
    pub kind: RunKind,
    pub status: RunStatus,
    pub subject: String,
    pub inputs: Value,
    pub overrides: Value,
    pub session_id: Option<String>,
    pub parent_run_id: Option<Uuid>,
    pub metadata: Value,
    pub output: Option<Value>,
    pub raw_response: Option<String>,
    pub error: Option<RunError>,
    pub termination_reason: Option<String>,
    pub partial: bool,
    pub latency_ms: Option<i64>,
    pub model: Option<String>,
    pub attempts: u32,
    pub iterations: u32,
    pub tool_calls_made: u32,
    pub tools_used: Vec<String>,
    pub usage: Usage,
    pub warnings: Vec<String>,
    pub callback_errors: Vec<String>,
    pub consumption: Consumption,
    pub created_at: DateTime<Utc>,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
    pub owner: Option<String>,
    pub epoch: i64,
    /// The number of the newest event.
    pub last_seq: i64,
    /// Replicas that died while they owned it.
    pub crash_count: u32,
    pub cancel_requested_at: Option<DateTime<Utc>>,
    pub cancel_reason: Option<String>,
    pub traceparent: Option<String>,
}

impl RunRecord {
    /// What the run has consumed, as far as its row says.
    pub fn totals(&self) -> Totals {
        Totals {
            attempts: self.attempts,
            iterations: self.iterations,
            tool_calls_made: self.tool_calls_made,
            tools_used: self.tools_used.iter().cloned().collect(),
            usage: self.usage,
            retries: 0, // not a column
            warnings: self.warnings.clone(),
            callback_errors: self.callback_errors.clone(),
            model: self.model.clone(),
            consumption: self.consumption.clone(),
        }
    }
}

/// A run that this replica has just taken from the queue, with all it needs to go on.
#[derive(Debug, Clone, PartialEq)]
pub struct ClaimedRun {
    /// The row, with the new epoch.
    pub run: RunRecord,
    /// The scopes it was started with.
    pub scopes: Vec<String>,
    /// Its definition, as JSON text.
    pub definition: String,
}

/// One model response as listed.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "fields mirror the documented columns of `iterations`")]
pub struct IterationRecord {
    pub run_id: Uuid,
    pub attempt: u32,
    pub number: u32,
    pub provider: String,
    pub model: String,
    pub finish_reason: String,
    pub usage: Usage,
    pub latency_ms: u64,
    pub retries: u32,
    pub fallback: bool,
    pub started_at: DateTime<Utc>,
}

/// One tool call as listed; arguments and result come from the journal.
#[derive(Debug, Clone, PartialEq)]
#[expect(missing_docs, reason = "fields mirror the documented columns of `tool_calls`")]
pub struct ToolCallRecord {
    pub id: Uuid,
    pub run_id: Uuid,
    pub attempt: u32,
    pub iteration: u32,
    pub ordinal: u32,
    pub tool: String,
    /// Parsed where they are JSON, else the raw text as a string.
    pub arguments: Value,
    pub effect: Option<String>,
    pub decision: Option<String>,
    pub reason: Option<String>,
    /// `proposed denied awaiting_approval awaiting_client dispatched succeeded failed unknown
    /// cancelled`.
    pub state: String,
    pub result: Option<String>,
    pub is_error: bool,
    pub cached: bool,
    pub started_at: Option<DateTime<Utc>>,
    pub finished_at: Option<DateTime<Utc>>,
    pub duration_ms: Option<u64>,
}

/// One audit record as listed.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRow {
    /// UUID v7.
    pub id: Uuid,
    /// Key id or token subject of the run.
    pub subject: String,
    /// The run.
    pub run_id: Uuid,
    /// What was decided and done.
    pub record: AuditRecord,
}

/// An API key without its secret.
#[derive(Debug, Clone, PartialEq)]
pub struct ApiKeyRecord {
    /// The part between `tl_` and the secret.
    pub id: String,
    /// For people.
    pub name: String,
    /// The tenant that it acts for.
    pub tenant: String,
    /// What it may do.
    pub scopes: Vec<String>,
    /// SHA-256 of the secret.
    pub secret_hash: Vec<u8>,
    /// When it was made.
    pub created_at: DateTime<Utc>,
    /// When it stops working.
    pub expires_at: Option<DateTime<Utc>>,
    /// When it was revoked.
    pub revoked_at: Option<DateTime<Utc>>,
    /// Invocations and tool calls per minute; the service's default where absent.
    pub rate_limit_per_minute: Option<u32>,
    /// Burst; the service's default where absent.
    pub rate_limit_burst: Option<u32>,
}

/// Which runs are counted: those that were accepted in a span of time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsFilter {
    /// Inclusive.
    pub since: DateTime<Utc>,
    /// Exclusive.
    pub until: DateTime<Utc>,
    /// Only this agent's.
    pub agent: Option<String>,
}

/// How a tool's calls went.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolStats {
    /// Its name, or the unknown one that was called.
    pub tool: String,
    /// Calls, refused and unknown ones included.
    pub calls: u64,
    /// Calls that failed.
    pub errors: u64,
    /// Calls that were refused.
    pub blocked: u64,
    /// Milliseconds within which half of the executed calls ended; none where none was executed.
    pub p50_ms: Option<u64>,
    /// The same for 95 of a hundred.
    pub p95_ms: Option<u64>,
    /// The same for 99 of a hundred.
    pub p99_ms: Option<u64>,
}

/// What one model took for one agent on one day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageStats {
    /// When the runs were accepted: `YYYY-MM-DD`, UTC.
    pub day: String,
    /// The agent.
    pub agent: String,
    /// As `provider/model`.
    pub model: String,
    /// Runs in which it answered.
    pub runs: u64,
    /// Tokens and cost of its answers.
    pub usage: Usage,
}

/// One page of a keyset.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<C> {
    /// At most this many rows.
    pub limit: u32,
    /// Rows that come after this one.
    pub after: Option<C>,
}

/// A place in a list that is sorted by time, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCursor {
    /// Time of the last row seen.
    pub at: DateTime<Utc>,
    /// Its id, as text.
    pub id: String,
}

/// Which runs to list; absent means any.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "each field is the filter of that name")]
pub struct RunFilter {
    pub agent: Option<String>,
    pub status: Option<RunStatus>,
    pub session_id: Option<String>,
    pub parent_run_id: Option<Uuid>,
    pub termination_reason: Option<String>,
    /// Exclusive.
    pub created_after: Option<DateTime<Utc>>,
    /// Exclusive.
    pub created_before: Option<DateTime<Utc>>,
    /// All must match: key and string value.
    pub metadata: Vec<(String, String)>,
}

/// Which audit records to list; absent means any.
#[derive(Debug, Clone, Default, PartialEq)]
#[expect(missing_docs, reason = "each field is the filter of that name")]
pub struct AuditFilter {
    pub run_id: Option<Uuid>,
    pub tool: Option<String>,
    pub decision: Option<String>,
    pub subject: Option<String>,
    pub outcome: Option<String>,
    /// Exclusive.
    pub created_after: Option<DateTime<Utc>>,
    /// Exclusive.
    pub created_before: Option<DateTime<Utc>>,
}
