//! Query plans for tests; only in debug builds.
//!
//! The backend has the database explain every reading statement before it runs the statement, with the same text
//! and values.

use std::sync::Arc;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::backend::{Backend, Transaction, Work};
use super::batch::{Batch, Passed};
use super::sql::{Dialect, Query, Row};
use super::{ConnectionCounts, DatabaseInfo, StoreError, Wakeup};

/// The plans so far, as the database writes them.
pub(super) type Plans = Arc<Mutex<Vec<String>>>;

/// A backend that keeps plans.
pub(super) struct Explaining {
    pub(super) backend: Box<dyn Backend>,
    pub(super) plans: Plans,
}

#[async_trait]
impl Backend for Explaining {
    fn dialect(&self) -> Dialect {
        self.backend.dialect()
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        self.backend.migrate().await
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        self.backend.about().await
    }

    async fn close(&self) {
        self.backend.close().await;
    }

    fn connection_counts(&self) -> ConnectionCounts {
        self.backend.connection_counts()
    }

    async fn read(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let (explain, column) = match self.dialect() {
            Dialect::Postgres => ("EXPLAIN (ANALYZE, COSTS OFF, TIMING OFF) ", "QUERY PLAN"),
            Dialect::Sqlite => ("EXPLAIN QUERY PLAN ", "detail"),
        };
        let rows = self.backend.read(work, query.clone().prefixed_with(explain)).await?;
        let lines = rows.iter().map(|row| row.read(column)).collect::<Result<Vec<String>, _>>()?;
        self.plans.lock().push(lines.join("\n"));
        self.backend.read(work, query).await
    }

    async fn write(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        self.backend.write(work, query).await
    }

    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError> {
        self.backend.begin(work).await
    }

    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError> {
        self.backend.commit(batch).await
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.backend.wakeups()
    }

    async fn hint(&self, wakeup: Wakeup) {
        self.backend.hint(wakeup).await;
    }

    fn only_replicas(&self) -> Option<Vec<String>> {
        self.backend.only_replicas()
    }

    fn note_replica(&self, id: &str) {
        self.backend.note_replica(id);
    }
}
