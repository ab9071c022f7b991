//! A standby of the database, for lists: its rows are as old as its replication lag.
//!
//! When a read fails, the database itself is asked, and the standby is not used for a while.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::connections::Connections;
use super::run_rendered;
use crate::store::StoreError;
use crate::store::sql::{Rendered, Row};

/// How long a standby is not used after a failure.
const RETRY_AFTER: Duration = Duration::from_secs(10);

/// The standby.
pub(super) struct Standby {
    connections: Connections,
    transaction_pooler: bool,
    skipped_until: Mutex<Option<Instant>>,
}

impl Standby {
    pub(super) fn new(connections: Connections, transaction_pooler: bool) -> Self {
        Self { connections, transaction_pooler, skipped_until: Mutex::default() }
    }

    pub(super) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// The rows of a statement; `None` if the standby cannot be read.
    pub(super) async fn read(&self, statement: &Rendered) -> Option<Vec<Row>> {
        let is_skipped = self.skipped_until.lock().is_some_and(|until| Instant::now() < until);
        if is_skipped {
            return None;
        }
        match self.try_to_read(statement).await {
            Ok(rows) => Some(rows),
            Err(error) => {
                tracing::warn!(%error, "the standby (database.read_url) failed; reading lists from database.url");
                *self.skipped_until.lock() = Some(Instant::now() + RETRY_AFTER);
                None
            }
        }
    }

    async fn try_to_read(&self, statement: &Rendered) -> Result<Vec<Row>, StoreError> {
        let mut connection = self.connections.get().await?;
        let rows = run_rendered(&mut connection, statement, self.transaction_pooler).await;
        connection.settle(rows)
    }
}
