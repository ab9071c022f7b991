//! Where runs are kept: one store over two databases.
//!
//! The journal (`run_events`) is the source of truth; rows that are listed, filtered and counted
//! are written in the same transaction as the event they come from ([`projection`]). All SQL is in
//! this module, each statement once, beside the method of [`Store`] that needs it; what PostgreSQL
//! and SQLite do each in its own way is a [`Backend`]. Every read takes the tenant; a thing of
//! another tenant does not exist.

mod approvals;
mod audit;
mod audit_chain;
mod audit_check;
mod audit_retention;
mod backend;
mod batch;
mod budget;
mod commit;
mod conflict;
mod definitions;
mod ended_tokens;
#[cfg(debug_assertions)]
mod explain;
mod failure;
mod journal;
mod keys;
mod listing;
mod memory;
mod migrations;
mod observations;
mod outbox;
mod ownership;
mod postgres;
pub mod projection;
mod queue;
mod rate_limit;
mod recall;
mod replicas;
mod retention;
pub mod rows;
mod run_limits;
mod runs;
mod secrets;
mod sessions;
mod sql;
mod sqlite;
mod stats;
mod tables;
mod trees;
mod usage;
mod webhooks;
mod workspaces;
pub mod writer;

use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use tokio::sync::Mutex;
use uuid::Uuid;

use self::backend::{Backend, Work};
use self::definitions::Definitions;
use self::sql::Query;
use crate::clock;

pub use approvals::{Answer, ApprovalFilter, ApprovalStatus};
pub use audit_chain::{ChainHead, Closed, Closing, IsSigned, KnownHead};
pub use audit_check::{CheckedStretch, Signatures};
pub use batch::Cancelling;
pub use budget::{Ownership, Settled, SharedBudget};
pub use commit::Commit;
pub use journal::{JournalPiece, Piece};
pub use keys::{AdminKeys, KeyStored, Revocation, Revoked};
pub use memory::{MemoryFilter, ObservationId};
pub use observations::KINDS as OBSERVATION_KINDS;
pub use ownership::{CancelOutcome, Requeue};
pub use queue::Claimant;
pub use rate_limit::{RateLimit, Taken};
pub use replicas::{Swept, Watch};
pub use rows::*;
pub use run_limits::{LimitReached, RunCounts, RunLimits, RunReservation};
pub use tables::{
    ApiKeyRecord, ApprovalRecord, AuditRow, ClaimedRun, Delivery, IdempotentRun, IterationRecord,
    ListedSession, Observation, RunRecord, SearchCandidate, SessionRecord, SessionRunRecord,
    Stretch, ToolCallRecord, ToolStats, UsageStats,
};
pub use webhooks::{AttemptOutcome, DeliveryFilter, DeliveryStatus};
pub use workspaces::{
    FileWriter, FileWrites, KeptContent, KeptFile, KeptPath, ObjectClaim, PathWrite, PathsChanged,
    PathsWritten,
};

/// The format of definitions and journals that this version writes, and the newest that it reads.
/// Raised with each change that an earlier version could not read.
const FORMAT: u32 = 1;
/// How long the result of a write check is reused.
const WRITE_CHECK_VALID_FOR: Duration = Duration::from_millis(250);

/// What can go wrong with the store.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// The store cannot be reached, timed out, or is restarting; the same call may succeed later.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The database rolled the transaction back because of a concurrent one; the same call may succeed
    /// at once.
    #[error("the transaction was rolled back because of a conflict: {0}")]
    Conflict(String),
    /// Another process holds the embedded database.
    #[error("{0}")]
    Locked(String),
    /// A statement was refused or a row cannot be read; a retry does not help.
    #[error("the store failed: {0}")]
    Failed(String),
    /// An event of a journal is damaged, or was written by an unknown version.
    #[error("event {seq} of run {run} cannot be read: {why}")]
    UnreadableEvent {
        /// The run.
        run: Uuid,
        /// The number of the event.
        seq: i64,
        /// What is wrong with it.
        why: String,
    },
}

impl StoreError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_) | Self::Conflict(_))
    }

    /// Logs a failure that is retried: as a warning, unless the store is unavailable, which is logged
    /// where runs wait for it.
    pub fn log_retry(&self, what: &str) {
        if self.is_transient() {
            tracing::debug!(error = %self, "{what}");
        } else {
            tracing::warn!(error = %self, "{what}");
        }
    }
}

/// The outcome of one [`RunWrite`] of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It is durable (now, or by an earlier try of the same write).
    Committed,
    /// This replica no longer owns the run: nothing of it was written.
    Fenced,
    /// It would end a run with a cancel request in another way: nothing of it was written.
    Cancelling,
    /// A new run's id, its idempotency key or its session is taken: nothing of it was written. To find out which
    /// of them, use [`Store::idempotent_run`] and [`Store::session`].
    IdTaken,
}

/// A hint that something changed; the receiver reads the changes from the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wakeup {
    /// A run was queued.
    Queue,
    /// The cancellation of a running run was requested.
    Cancel(Uuid),
    /// A key was revoked.
    Keys,
    /// Hints may have been lost: read everything.
    Resync,
}

/// Information about a database.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseInfo {
    /// Product and version, e.g. `PostgreSQL 17.2`.
    pub version: String,
    /// Migrations that were carried out.
    pub applied: usize,
    /// Migrations that this version knows.
    pub known: usize,
    /// The time of its clock; `None` if it uses the clock of this machine.
    pub now: Option<DateTime<Utc>>,
}

impl DatabaseInfo {
    /// Whether the schema is more than one version ahead: a version can only work with the schema of the next one.
    pub fn is_too_far_ahead(&self) -> bool {
        self.applied > self.known + 1
    }
}

/// Connections to the database.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ConnectionCounts {
    /// Connections in use.
    pub used: usize,
    /// Open connections that are not in use.
    pub idle: usize,
}

impl std::iter::Sum for ConnectionCounts {
    fn sum<I: Iterator<Item = Self>>(counts: I) -> Self {
        counts.fold(Self::default(), |sum, counts| Self {
            used: sum.used + counts.used,
            idle: sum.idle + counts.idle,
        })
    }
}

/// A durable store of runs.
pub struct Store {
    backend: Box<dyn Backend>,
    definitions: Definitions,
    /// The last counts of tool calls; locked while a request counts them.
    counting: Mutex<Option<stats::Counted>>,
    /// The time and the result of the last check whether the database accepts writes.
    write_check: Mutex<Option<(Instant, Result<(), String>)>>,
}

impl Store {
    fn over(backend: impl Backend + 'static) -> Self {
        Self::on(Box::new(backend), Definitions::default())
    }

    fn on(backend: Box<dyn Backend>, definitions: Definitions) -> Self {
        Self { backend, definitions, counting: Mutex::default(), write_check: Mutex::default() }
    }

    /// The same store, and the query plans of all later reads.
    #[cfg(debug_assertions)]
    #[must_use]
    pub fn explaining(self) -> (Self, Arc<parking_lot::Mutex<Vec<String>>>) {
        let plans = explain::Plans::default();
        let backend = explain::Explaining { backend: self.backend, plans: Arc::clone(&plans) };
        (Self::on(Box::new(backend), self.definitions), plans)
    }

    /// `postgres` or `sqlite`.
    pub fn kind(&self) -> &'static str {
        match self.backend.dialect() {
            sql::Dialect::Postgres => "postgres",
            sql::Dialect::Sqlite => "sqlite",
        }
    }

    /// The connections of this process.
    pub fn connection_counts(&self) -> ConnectionCounts {
        self.backend.connection_counts()
    }

    /// Brings the schema up to date; runs at every start.
    pub async fn migrate(&self) -> Result<(), StoreError> {
        self.backend.migrate().await?;
        migrations::refuse_too_far_ahead(&self.about().await?)
    }

    /// Checks that the store answers, accepts writes and has an up-to-date schema.
    pub async fn ping(&self) -> Result<(), StoreError> {
        let about = self.about().await?;
        if about.applied < about.known {
            return Err(StoreError::Failed("the schema is not up to date".to_owned()));
        }
        if let Some(replicas) = self.backend.only_replicas() {
            // A file that can be read may be on a full disk. One heartbeat more changes nothing.
            let beat = Query::new(
                "UPDATE replicas SET heartbeat_at = {now} WHERE NOT dead AND id IN :replicas",
            );
            self.backend.write(Work::Control, beat.bind("replicas", &*replicas)).await?;
        }
        Ok(())
    }

    /// Checks that the database accepts writes and has disk space for them; used after failed commits. One check
    /// runs at a time, and its result is reused for [`WRITE_CHECK_VALID_FOR`].
    ///
    /// # Errors
    /// [`StoreError::Unavailable`] if it does not.
    pub async fn check_writable(&self) -> Result<(), StoreError> {
        let mut last = self.write_check.lock().await;
        if let Some((at, outcome)) = &*last
            && at.elapsed() < WRITE_CHECK_VALID_FOR
        {
            return outcome.clone().map_err(StoreError::Unavailable);
        }
        let outcome = self.try_to_write().await;
        *last = match &outcome {
            Ok(()) => Some((Instant::now(), Ok(()))),
            Err(StoreError::Unavailable(why)) => Some((Instant::now(), Err(why.clone()))),
            Err(_) => None,
        };
        outcome
    }

    async fn try_to_write(&self) -> Result<(), StoreError> {
        self.ping().await?;
        if self.backend.only_replicas().is_none() {
            let mut tx = self.backend.begin(Work::Control).await?;
            // Larger than a page and hardly compressible; the insert is rolled back.
            let write = Query::new(
                "INSERT INTO run_events (run_id, seq, first_seq, epoch, at, events) \
                 SELECT :run, 1, 1, 0, {now}, string_agg(md5(random()::text), '') \
                 FROM generate_series(1, 4000)",
            );
            tx.run(write.bind("run", Uuid::nil())).await?;
        }
        Ok(())
    }

    /// The store's time.
    pub async fn now(&self) -> Result<DateTime<Utc>, StoreError> {
        let rows = self.backend.read(Work::Data, Query::new("SELECT {now} AS now")).await?;
        rows.first().map_or_else(|| Ok(clock::now()), |row| row.read("now"))
    }

    /// Information about the database; changes nothing.
    pub async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        self.backend.about().await
    }

    /// Hints of what changed, from any replica.
    pub fn wakeups(&self) -> tokio::sync::broadcast::Receiver<Wakeup> {
        self.backend.wakeups()
    }

    /// Closes all connections.
    pub async fn close(&self) {
        self.backend.close().await;
    }
}

/// Opens the store of a URL: `sqlite://path` or `postgres://…`. The other parameters are for PostgreSQL only:
/// `max_connections`, and whether the URL is that of a pooler in transaction mode.
///
/// # Errors
/// [`StoreError::Locked`] if another process has the SQLite file open, [`StoreError::Unavailable`] if no server
/// answers, [`StoreError::Failed`] for a file that cannot be created or is not a database, a refused login, and
/// an invalid URL. No message repeats the URL, because it may contain a password.
pub async fn open(
    url: &str,
    max_connections: u32,
    transaction_pooler: bool,
) -> Result<Arc<Store>, StoreError> {
    open_with_lists(url, max_connections, transaction_pooler, None).await
}

/// Like [`open`], but reads lists of a PostgreSQL database from the standby at `read_url`, if given.
///
/// # Errors
/// Those of [`open`]. The standby may be unavailable.
pub async fn open_with_lists(
    url: &str,
    max_connections: u32,
    transaction_pooler: bool,
    read_url: Option<&str>,
) -> Result<Arc<Store>, StoreError> {
    Ok(Arc::new(match url.split_once(':').map(|(scheme, _)| scheme) {
        Some("sqlite") => Store::over(sqlite::Sqlite::open(url).await?),
        Some("postgres" | "postgresql") => Store::over(
            postgres::Postgres::connect(url, max_connections, transaction_pooler, read_url).await?,
        ),
        _ => {
            return Err(StoreError::Failed(
                "the database URL must begin with sqlite:// or postgres://".to_owned(),
            ));
        }
    }))
}

#[cfg(test)]
#[path = "simulated_tests.rs"]
pub(crate) mod simulated;
