//! What goes into the store, and what is asked of it, in portable types.
//!
//! No SQL and no database type here. Times are UTC with microseconds, money is integer
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

/// When a queued run is taken, among those of its tenant.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QueuePlace {
    /// Higher ones first.
    pub priority: i64,
    /// Not before this time; absent: at once.
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
    /// The run's place in it; `None` for a run that another one delegated to.
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
    /// Where events of the run are sent; a child run has its parent's.
    pub webhook: Option<String>,
    /// When it is taken from the queue.
    pub queue: QueuePlace,
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

/// An ended run that is being deleted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeletedRun {
    pub id: Uuid,
    pub tenant: String,
    pub session_id: Option<String>,
    /// The definitions of the runs of its session that stay, as JSON.
    pub staying: Vec<Arc<str>>,
    /// The definition that it kept, as JSON; `None` if there was none.
    pub definition: Option<Arc<str>>,
}

/// For how long a repeated idempotency key finds its run.
pub const IDEMPOTENCY_KEYS_KEPT: Duration = Duration::from_hours(24);

/// Moves the files of deleted runs to the trash, in the transaction that deletes the runs and before
/// it is committed.
pub type MoveToTrash<'f> = &'f (dyn Fn(&[DeletedRun]) -> BoxFuture<'static, RemovedFiles> + Sync);

/// The files that deleted runs leave.
#[derive(Debug, Default)]
pub struct RemovedFiles {
    /// How many directories leave their places.
    pub directories: usize,
    /// Tenants and directories whose files are kept elsewhere.
    pub kept: Vec<(String, String)>,
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
    /// For sums, observations, and those who are notified of the write once it is durable.
    pub origin: Arc<RunOrigin>,
    /// What happened, consecutive numbers; never empty.
    pub events: Vec<Event>,
    /// Audit records of the calls in `events`.
    pub audit: Vec<AuditRecord>,
    /// The totals after the last event.
    pub totals: Totals,
    /// The status in which the run is parked with these events, where it is.
    pub park: Option<RunStatus>,
    /// Whether an earlier try may have stored it, because its answer was lost.
    pub is_repeated: bool,
}

impl RunWrite {
    /// Whether it ends its run.
    pub fn ends(&self) -> bool {
        self.events.last().is_some_and(|event| event.what.ending().is_some())
    }

    /// Whether it starts a run that a request asked for.
    pub fn is_request(&self) -> bool {
        self.new.as_ref().is_some_and(|new| new.parent_run_id.is_none())
    }

    /// The same without the end.
    #[must_use]
    pub fn without_end(mut self) -> Self {
        if self.ends() {
            self.events.pop();
        }
        self
    }
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
