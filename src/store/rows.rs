//! Portable types for writes to the store and for filters of reads.
//!
//! There is no SQL and no database type here. Times are UTC with microseconds, money is integer
//! micro-dollars.

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use futures::future::BoxFuture;
use serde_json::Value;
use strum::IntoStaticStr;
use uuid::Uuid;

use crate::event::{AuditAction, AuditRecord, Event};
use crate::run::{Caller, RunKind, RunOrigin, RunStatus, Totals};

/// A definition as it was when a run started; stored once per distinct text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionSnapshot {
    /// SHA-256 of `json`, hex.
    pub hash: String,
    /// The definition as JSON text.
    pub json: String,
}

/// The position of a queued run among those of its tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueuePlace {
    /// Runs with a higher priority are claimed first.
    pub priority: i64,
    /// The run is not claimed before this time; `None`: no delay.
    pub available_at: Option<DateTime<Utc>>,
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
    /// The definition that the run executes, even if the file changes later.
    pub definition: Arc<DefinitionSnapshot>,
    /// The kind of run.
    pub kind: RunKind,
    /// [`RunStatus::Running`] (owned by the committing replica, epoch 1) or [`RunStatus::Queued`]
    /// (epoch 0).
    pub status: RunStatus,
    /// The validated inputs.
    pub inputs: Arc<Value>,
    /// The request's overrides, as they were sent.
    pub overrides: Value,
    /// The session, if the caller named one.
    pub session_id: Option<String>,
    /// The run's place in the session; `None` for a child run.
    pub session_place: Option<SessionPlace>,
    /// The run that delegated to this one.
    pub parent_run_id: Option<Uuid>,
    /// The caller's labels, an object of strings.
    pub metadata: Value,
    /// When the run was accepted.
    pub created_at: DateTime<Utc>,
    /// The caller's key for safe retries.
    pub idempotency: Option<Idempotency>,
    /// The caller's W3C `traceparent`.
    pub traceparent: Option<String>,
    /// The webhook address for events of the run; a child run has its parent's.
    pub webhook: Option<String>,
    /// The run's position in the queue.
    pub queue: QueuePlace,
}

/// A run's place in its session when it is accepted. One live run holds a session; others wait, and
/// cannot be claimed before it has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum SessionPlace {
    /// It holds the session. The run is not stored if another run holds the session, waits for it, or has had this
    /// turn.
    Holds {
        /// 1 for the first run that holds the session, 2 for the next one; as known when the run starts.
        turn: i64,
    },
    /// It is the next to hold the session, before all waiting runs.
    Next,
    /// It waits for the session, in the order of acceptance.
    Waits,
}

impl SessionPlace {
    /// The name used in SQL. Waiting runs are sorted by it.
    pub(super) fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An ended run that is being deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedRun {
    pub id: Uuid,
    pub tenant: String,
    pub session_id: Option<String>,
    /// The definitions of the runs of its session that are not deleted, as JSON.
    pub staying: Vec<Arc<str>>,
    /// The run's definition as JSON; `None` if it is not stored.
    pub definition: Option<Arc<str>>,
}

/// How long an idempotency key is remembered.
pub const IDEMPOTENCY_KEYS_KEPT: Duration = Duration::from_hours(24);

/// Moves the files of deleted runs to the trash, in the transaction that deletes the runs and before
/// it is committed.
pub type MoveToTrash<'f> = &'f (dyn Fn(&[DeletedRun]) -> BoxFuture<'static, RemovedFiles> + Sync);

/// The files of deleted runs.
#[derive(Debug, Default)]
pub struct RemovedFiles {
    /// How many directories were moved to the trash.
    pub directories: usize,
    /// Pairs of tenant and directory whose files are in the object store.
    pub kept: Vec<(String, String)>,
}

/// The outcome of deleting a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SessionDeleted {
    /// The session and its runs were deleted with all their data.
    Gone,
    /// A run of the session has not ended: nothing was deleted.
    Busy,
    /// There is no such session.
    Unknown,
}

/// Identifies a repeated request; unique per tenant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Idempotency {
    /// The `Idempotency-Key` header's value.
    pub key: String,
    /// SHA-256 of the request, hex.
    pub request_hash: String,
}

/// Everything that one run writes in one transaction.
#[derive(Debug, Clone, PartialEq)]
pub struct RunWrite {
    /// The run.
    pub run_id: Uuid,
    /// The epoch under which this replica owns the run; the write is fenced by it.
    pub epoch: i64,
    /// Who started the run: tenant and subject of every row.
    pub caller: Arc<Caller>,
    /// The run's row, if this is its first write.
    pub new: Option<Arc<NewRun>>,
    /// The run's origin, for sums, observations and observers of durable writes.
    pub origin: Arc<RunOrigin>,
    /// The events, with consecutive numbers; never empty.
    pub events: Vec<Event>,
    /// Audit records of the calls in `events`.
    pub audit: Vec<AuditRecord>,
    /// The totals after the last event.
    pub totals: Totals,
    /// The status in which these events park the run; `None` if they do not.
    pub park: Option<RunStatus>,
    /// Whether an earlier attempt may have stored this write, because its answer was lost.
    pub is_repeated: bool,
}

impl RunWrite {
    /// Whether this write ends the run.
    pub fn ends(&self) -> bool {
        self.events.last().is_some_and(|event| event.what.ending().is_some())
    }

    /// Whether this write starts a requested run, not a child run.
    pub fn is_request(&self) -> bool {
        self.new.as_ref().is_some_and(|new| new.parent_run_id.is_none())
    }

    /// This write without the event that ends the run.
    #[must_use]
    pub fn without_end(mut self) -> Self {
        if self.ends() {
            self.events.pop();
        }
        self
    }
}

/// Which runs are counted: those that were accepted in this period.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StatsFilter {
    /// Inclusive.
    pub since: DateTime<Utc>,
    /// Exclusive.
    pub until: DateTime<Utc>,
    /// Only this agent's.
    pub agent: Option<String>,
}

/// One page of a list with keyset pagination.
#[derive(Debug, Clone, PartialEq)]
pub struct Page<C> {
    /// At most this many rows.
    pub limit: u32,
    /// The page begins after this row.
    pub after: Option<C>,
}

/// A position in a list that is sorted by time, newest first.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunCursor {
    /// Time of the last row seen.
    pub at: DateTime<Utc>,
    /// Its id, as text.
    pub id: String,
}

/// A position in the sums of usage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsageCursor {
    /// The day of the last row seen, e.g. `2026-01-31`.
    pub day: String,
    /// Its agent.
    pub agent: String,
    /// Its model.
    pub model: String,
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
    pub action: Option<AuditAction>,
    pub run_id: Option<Uuid>,
    pub agent: Option<String>,
    pub session_id: Option<String>,
    pub tool: Option<String>,
    pub rule: Option<String>,
    pub decision: Option<String>,
    pub subject: Option<String>,
    pub outcome: Option<String>,
    /// Exclusive.
    pub created_after: Option<DateTime<Utc>>,
    /// Exclusive.
    pub created_before: Option<DateTime<Utc>>,
}
