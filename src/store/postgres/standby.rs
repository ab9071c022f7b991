//! A copy of the database that follows it, for lists: what it shows is as old as it lags behind.
//!
//! Whatever goes wrong there, the database itself is asked, and the copy left alone for a while.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::ask;
use super::connections::Connections;
use crate::store::StoreError;
use crate::store::sql::{Rendered, Row};

/// How long a copy that failed is left alone.
const REST: Duration = Duration::from_secs(10);

/// The copy.
pub(super) struct Standby {
    connections: Connections,
    transaction_pooler: bool,
    rests_until: Mutex<Option<Instant>>,
}

impl Standby {
    pub(super) fn new(connections: Connections, transaction_pooler: bool) -> Self {
        Self { connections, transaction_pooler, rests_until: Mutex::default() }
    }

    pub(super) fn connections(&self) -> &Connections {
        &self.connections
    }

    /// What it has; `None` where it cannot be read.
    pub(super) async fn read(&self, statement: &Rendered) -> Option<Vec<Row>> {
        let rests = self.rests_until.lock().is_some_and(|until| Instant::now() < until);
        if rests {
            return None;
        }
        match self.ask(statement).await {
            Ok(rows) => Some(rows),
            Err(error) => {
                tracing::warn!(%error, "the standby (database.read_url) failed; reading lists from database.url");
                *self.rests_until.lock() = Some(Instant::now() + REST);
                None
            }
        }
    }

    async fn ask(&self, statement: &Rendered) -> Result<Vec<Row>, StoreError> {
        let mut line = self.connections.get().await?;
        let rows = ask(&mut line, statement, self.transaction_pooler).await;
        line.settle(rows)
    }
}
