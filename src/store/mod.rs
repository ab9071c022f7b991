//! Where runs are kept: one trait, two databases.
//!
//! The journal (`run_events`) is the source of truth; rows that are listed, filtered and counted
//! are written in the same transaction as the event they come from ([`projection`]). All SQL is in
//! this room. Every read takes the tenant; a thing of another tenant does not exist.

mod approvals;
mod budget;
pub mod changes;
mod decode;
mod definitions;
mod failure;
mod listing;
mod migrations;
mod observations;
pub mod postgres;
pub mod projection;
mod rate_limit;
pub mod rows;
pub mod sqlite;
pub mod writer;

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::run::{Amounts, Caps, Reserved};

pub use approvals::{Answer, ApprovalFilter, ApprovalRecord, ApprovalStatus};
pub use budget::SharedBudget;
pub use rate_limit::{RateLimit, Taken};
pub use rows::*;

/// What can go wrong with the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// It cannot be reached, timed out, or is restarting; the same call may succeed later.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// Another process holds the embedded database.
    #[error("{0}")]
    Locked(String),
    /// A statement was refused or a row cannot be read; trying again will not help.
    #[error("the store failed: {0}")]
    Failed(String),
}

impl StoreError {
    /// Whether the same call may succeed later.
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

/// What became of one [`RunWrite`] of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteOutcome {
    /// It is durable (now, or by an earlier try of the same write).
    Committed,
    /// The run is no longer ours: nothing of it was written.
    Fenced,
    /// A new run's id, its idempotency key or its session is taken: nothing of it was written.
    /// Which of them is not told; a caller asks [`Store::idempotent_run`] and [`Store::session`].
    IdTaken,
}

/// A hint that something changed; the receiver asks the store for what.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wakeup {
    /// A run was queued.
    Queue,
    /// A running run was asked to cancel.
    Cancel(Uuid),
    /// Hints may have been lost: ask for everything.
    Resync,
}

/// Why a run is cancelled whose parent has ended.
const PARENT_ENDED: &str = "the run that started it has ended";

/// What a cancel request met.
#[derive(Debug, Clone, PartialEq)]
pub enum CancelOutcome {
    /// It was over already; unchanged.
    AlreadyEnded(RunRecord),
    /// It is to be cancelled: by its owner where it is running, else by the replica that claims it.
    Requested(RunRecord),
}

/// What a sweep found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Replicas declared dead.
    pub replicas: u64,
    /// Runs that were taken from dead replicas and wait for a new owner.
    pub requeued: Vec<Uuid>,
}

/// What a database says about itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatabaseInfo {
    /// Product and version, e.g. `PostgreSQL 17.2`.
    pub version: String,
    /// Migrations that were carried out.
    pub applied: usize,
    /// Migrations that this version knows.
    pub known: usize,
    /// Its clock, where that is not this machine's.
    pub now: Option<DateTime<Utc>>,
}

/// A durable store of runs. Implementations: [`postgres::Postgres`], [`sqlite::Sqlite`].
#[async_trait]
pub trait Store: Send + Sync {
    /// `postgres` or `sqlite`.
    fn kind(&self) -> &'static str;
    /// Brings the schema up to date; runs at every start.
    async fn migrate(&self) -> Result<(), StoreError>;
    /// Whether the store answers, takes writes and has an up-to-date schema.
    async fn ping(&self) -> Result<(), StoreError> {
        let about = self.about().await?;
        if about.applied < about.known {
            return Err(StoreError::Failed("the schema is not up to date".to_owned()));
        }
        self.try_writing().await
    }
    /// Fails where the store can be read and not written, as on a full disk.
    async fn try_writing(&self) -> Result<(), StoreError> {
        Ok(())
    }
    /// What the database says about itself; changes nothing.
    async fn about(&self) -> Result<DatabaseInfo, StoreError>;
    /// Hints of what changed, from any replica.
    fn wakeups(&self) -> tokio::sync::broadcast::Receiver<Wakeup>;
    /// Closes all connections.
    async fn close(&self);

    /// Commits a batch in one transaction; one outcome per write, in order. At most one write per
    /// run in a batch. Repeating a batch after a lost answer is harmless.
    async fn commit(
        &self,
        owner: &str,
        batch: &[RunWrite],
    ) -> Result<Vec<WriteOutcome>, StoreError>;
    /// How many runs of all tenants are queued.
    async fn queued(&self) -> Result<u64, StoreError>;
    /// Takes up to `limit` queued runs: status running, owner set, epoch raised. A run that waits
    /// for its session is taken when nobody holds that and no other run waits before it; it holds
    /// it then. One whose row cannot be read is taken and left out.
    async fn claim(&self, owner: &str, limit: u32) -> Result<Vec<ClaimedRun>, StoreError>;
    /// Takes this run, if it is queued and its turn has come.
    async fn claim_run(&self, owner: &str, run: Uuid) -> Result<Option<ClaimedRun>, StoreError>;
    /// Takes up to `limit` queued runs that were asked to cancel, also those that wait for their
    /// session.
    async fn claim_cancelled(&self, owner: &str, limit: u32)
    -> Result<Vec<ClaimedRun>, StoreError>;
    /// Asks a run to cancel, and every run that it started, and that those started. A run without
    /// an owner is queued for [`Store::claim_cancelled`]. `None`: no such run.
    async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError>;
    /// Running runs of this owner that were asked to cancel, with the reason.
    async fn cancel_requests(&self, owner: &str)
    -> Result<Vec<(Uuid, Option<String>)>, StoreError>;
    /// Deletes up to `limit` runs of all tenants that ended before that instant, with their
    /// journals and audit records; how many. When no such run is left, definitions that no run
    /// refers to and that were not used for some hours go as well.
    async fn delete_ended(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError>;
    /// Puts this owner's running runs back into the queue; no crash is counted. How many.
    async fn release(&self, owner: &str) -> Result<u64, StoreError>;
    /// This owner's running runs, each with its epoch.
    async fn owned_runs(&self, owner: &str) -> Result<Vec<(Uuid, i64)>, StoreError>;
    /// Puts a running run back into the queue, if this owner still has it under this epoch; whether
    /// it had. A crash is counted where one is suspected; the run waits a second for each that was
    /// counted before, a minute at most.
    async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        has_crashed: bool,
    ) -> Result<bool, StoreError>;

    /// Takes an answer to something that is still waited for, once; where it was the last, the run
    /// is queued. The run as it is then; `None` where nothing of these kinds is waited for, not any
    /// more or not yet.
    async fn answer(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
        answer: &Answer,
    ) -> Result<Option<RunRecord>, StoreError>;
    /// Gives up on what has been waited for long enough, of all tenants, and queues the runs that
    /// waited for nothing else; how many things were given up on.
    async fn expire_approvals(&self) -> Result<u64, StoreError>;
    /// What runs of a tenant wait for or waited for, newest first.
    async fn approvals(
        &self,
        tenant: &str,
        filter: &ApprovalFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApprovalRecord>, StoreError>;
    /// A definition that runs were started with, as JSON text.
    async fn definition(&self, hash: &str) -> Result<Option<String>, StoreError>;

    /// Registers a replica, again if it was declared dead: its runs are other replicas' by then.
    async fn register_replica(&self, id: &str) -> Result<(), StoreError>;
    /// Renews the lease; `false`: declared dead by another replica.
    async fn heartbeat(&self, id: &str) -> Result<bool, StoreError>;
    /// Declares replicas dead whose last heartbeat is older than `lease`, puts their runs back into
    /// the queue and counts a crash of each. Asks children to cancel whose parent has ended without
    /// them. Settles what ended runs left reserved. The sweeper itself is never declared dead.
    async fn sweep(&self, sweeper: &str, lease: Duration) -> Result<Swept, StoreError>;

    /// One run.
    async fn run(&self, tenant: &str, run: Uuid) -> Result<Option<RunRecord>, StoreError>;
    /// The run that holds an idempotency key, however old it is.
    async fn idempotent_run(
        &self,
        tenant: &str,
        key: &str,
    ) -> Result<Option<IdempotentRun>, StoreError>;
    /// Takes the key from a run that was created before that instant, so that it can be used anew.
    async fn forget_idempotency_key(
        &self,
        tenant: &str,
        key: &str,
        before: DateTime<Utc>,
    ) -> Result<(), StoreError>;
    /// Runs, newest first.
    async fn runs(
        &self,
        tenant: &str,
        filter: &RunFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<RunRecord>, StoreError>;
    /// Journal entries with `seq > after`, in order. Empty also where the run does not exist.
    async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<crate::event::Event>, StoreError>;
    /// The journals of these runs, one after the other.
    async fn journals(
        &self,
        tenant: &str,
        runs: &[Uuid],
    ) -> Result<Vec<crate::event::Event>, StoreError>;
    /// A session, with the last `ended` runs that held it and in which a model answered. `None`: no
    /// such session.
    async fn session(
        &self,
        tenant: &str,
        session: &str,
        ended: u32,
    ) -> Result<Option<SessionRecord>, StoreError>;
    /// Deletes a session's runs and those that they delegated to, with their journals and audit
    /// records.
    async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<SessionDeleted, StoreError>;
    /// What other runs of this tenant's agent left that has most in common with a text: at most
    /// `limit`, the most relevant first.
    async fn recall(
        &self,
        tenant: &str,
        agent: &str,
        except: Uuid,
        text: &str,
        limit: u32,
    ) -> Result<Vec<Observation>, StoreError>;
    /// Iterations in order; the cursor is the offset.
    async fn iterations(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<IterationRecord>, StoreError>;
    /// Tool calls in order, with arguments and results; the cursor is the offset.
    async fn tool_calls(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError>;
    /// How calls went, by tool.
    async fn tool_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<ToolStats>, StoreError>;
    /// What models took, the newest day first, then by agent and model.
    async fn usage_stats(
        &self,
        tenant: &str,
        filter: &StatsFilter,
    ) -> Result<Vec<UsageStats>, StoreError>;
    /// Audit records, newest first.
    async fn audit(
        &self,
        tenant: &str,
        filter: &AuditFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<AuditRow>, StoreError>;

    /// Stores a key. `false`: that id exists already and is unchanged.
    async fn insert_key(&self, key: &ApiKeyRecord) -> Result<bool, StoreError>;
    /// Whether any key exists, of any tenant, revoked or not.
    async fn has_keys(&self) -> Result<bool, StoreError>;
    /// A key by id, of any tenant, for authentication.
    async fn key(&self, id: &str) -> Result<Option<ApiKeyRecord>, StoreError>;
    /// A tenant's keys, newest first.
    async fn keys(
        &self,
        tenant: &str,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ApiKeyRecord>, StoreError>;
    /// Revokes a key of the tenant; `false`: no such key. Revoking twice is harmless.
    async fn revoke_key(&self, tenant: &str, id: &str) -> Result<bool, StoreError>;

    /// Opens the budget that a run shares with those that it starts, unless it is open: its caps,
    /// and what the run itself has spent.
    async fn open_budget(&self, root: Uuid, caps: Caps, spent: Amounts) -> Result<(), StoreError>;
    /// Reserves so much of the root's budget for a run. Where there is no such budget, everything
    /// is granted.
    async fn reserve(&self, root: Uuid, run: Uuid, wanted: Amounts)
    -> Result<Reserved, StoreError>;
    /// States all that a run has spent so far, and gives back what it has reserved; `ended` where
    /// it spends no more.
    async fn settle(
        &self,
        root: Uuid,
        run: Uuid,
        spent: Amounts,
        ended: bool,
    ) -> Result<(), StoreError>;
    /// The budget of a root.
    async fn shared_budget(&self, root: Uuid) -> Result<Option<SharedBudget>, StoreError>;

    /// Takes up to that many tokens from a bucket that all replicas share. A bucket that was never
    /// taken from is full.
    async fn take_tokens(
        &self,
        bucket: &str,
        limit: RateLimit,
        tokens: u32,
    ) -> Result<Taken, StoreError>;
}

/// Opens the store of a URL: `sqlite://path`, or `postgres://…`. `max_connections` is PostgreSQL's.
///
/// # Errors
/// As [`postgres::Postgres::connect`] and [`sqlite::Sqlite::open`]; [`StoreError::Failed`] for
/// another scheme. No message repeats the URL, which may hold a password.
pub async fn open(url: &str, max_connections: u32) -> Result<Arc<dyn Store>, StoreError> {
    match url.split_once(':').map(|(scheme, _)| scheme) {
        Some("sqlite") => Ok(Arc::new(sqlite::Sqlite::open(url).await?)),
        Some("postgres" | "postgresql") => {
            Ok(Arc::new(postgres::Postgres::connect(url, max_connections).await?))
        }
        _ => Err(StoreError::Failed(
            "the database URL must begin with sqlite:// or postgres://".to_owned(),
        )),
    }
}
