//! What a database does in its own way: everything else is written once, over this.

use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::broadcast;

use super::batch::{Batch, Passed};
use super::sql::{Dialect, Query, Row};
use super::{ConnectionCounts, DatabaseInfo, StoreError, Wakeup};
use crate::fairness::Hold;

/// Which work a statement belongs to; each has connections of its own where there are several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Work {
    /// Claims, heartbeats, cancelling: short, and never behind a slow list.
    Control,
    /// Budgets, retention, what has to be as it is now.
    Data,
    /// What a person or a program looks through, which may be a little old.
    Lists,
    /// Commits of runs.
    Commit,
}

/// For as long as work has a connection, or waits for one.
pub(super) async fn hold(work: Work) -> Hold {
    match work {
        Work::Data | Work::Lists => Hold::of_scarce().await,
        Work::Control | Work::Commit => Hold::new(),
    }
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
    /// Begins a transaction that writes; dropped, it is rolled back.
    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError>;
    /// Writes a batch in one transaction; the runs that passed the fence.
    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError>;

    fn wakeups(&self) -> broadcast::Receiver<Wakeup>;
    /// Hints to all replicas that something changed. A hint may be lost.
    async fn hint(&self, wakeup: Wakeup);

    /// The replicas that this process is, where no other process can have one.
    fn only_replicas(&self) -> Option<Vec<String>>;
    /// Takes note that this process is that replica.
    fn note_replica(&self, id: &str);
}

/// A transaction. What it locks stays locked until it ends.
#[async_trait]
pub(super) trait Transaction: Send {
    async fn run(&mut self, query: Query) -> Result<Vec<Row>, StoreError>;
    /// Takes the lock of a tenant until the transaction ends; where it is not free in time, nothing
    /// more can be done with this.
    async fn lock_tenant(&mut self, tenant: &str, patience: Duration) -> Result<bool, StoreError>;
    /// As [`Backend::commit`], as a part of this transaction.
    async fn write(&mut self, batch: Batch) -> Result<Passed, StoreError>;
    async fn commit(self: Box<Self>) -> Result<(), StoreError>;
}
