//! The operations that differ between the databases; everything else uses them.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::batch::{Batch, Passed};
use super::sql::{Dialect, Query, Row};
use super::{ConnectionCounts, DatabaseInfo, StoreError, Wakeup};
use crate::fairness::Hold;

/// The kind of work of a statement. With PostgreSQL, each kind has connections of its own, except that data and
/// lists share theirs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Claims, heartbeats, cancellation: short statements that must not wait for slow lists.
    Control,
    /// Budgets, retention, and reads that need the current state.
    Data,
    /// Lists for people and programs, which may be slightly out of date.
    Lists,
    /// Commits of runs.
    Commit,
}

impl Work {
    /// Whether requests of all tenants compete for its connections.
    pub(super) fn is_scarce(self) -> bool {
        matches!(self, Self::Data | Self::Lists)
    }
}

/// Marks the task as holding a connection; held while it waits for one, too.
pub(super) async fn hold(work: Work) -> Hold {
    if work.is_scarce() { Hold::of_scarce().await } else { Hold::new() }
}

/// A database.
#[async_trait]
pub(super) trait Backend: Send + Sync {
    fn dialect(&self) -> Dialect;
    async fn migrate(&self) -> Result<(), StoreError>;
    async fn about(&self) -> Result<DatabaseInfo, StoreError>;
    async fn close(&self);
    fn connection_counts(&self) -> ConnectionCounts;

    /// Runs one statement that reads.
    async fn read(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError>;
    /// Runs one statement that writes, in a transaction of its own.
    async fn write(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError>;
    /// Begins a transaction that writes; it is rolled back if it is dropped.
    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError>;
    /// Writes a batch in one transaction; returns the runs that passed the fence.
    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError>;

    fn wakeups(&self) -> broadcast::Receiver<Wakeup>;
    /// Hints to all replicas that something changed. A hint may be lost.
    async fn hint(&self, wakeup: Wakeup);

    /// The replicas of this process; `None` if other processes can have replicas, too.
    fn only_replicas(&self) -> Option<Vec<String>>;
    /// Notes a replica of this process.
    fn note_replica(&self, id: &str);
}

/// A transaction. What it locks stays locked until it ends.
#[async_trait]
pub(super) trait Transaction: Send {
    async fn run(&mut self, query: Query) -> Result<Vec<Row>, StoreError>;
    /// Takes the lock of a tenant until the transaction ends. Returns false if the lock is not free in time; then the
    /// transaction must not be used any more.
    async fn lock_tenant(&mut self, tenant: &str, patience: Duration) -> Result<bool, StoreError>;
    /// Like [`Backend::commit`], but within this transaction.
    async fn write(&mut self, batch: Batch) -> Result<Passed, StoreError>;
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;
}
