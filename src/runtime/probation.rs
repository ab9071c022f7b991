//! Drives runs that may cause crashes one at a time, so that the next crash shows which run causes it.
//!
//! The next suspect may begin as soon as the present one has an answer of a model.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use super::ownership::RunEpoch;
use crate::event::RunEvent;
use crate::store::RunWrite;

/// The permit of the one suspect that is driven here.
#[derive(Debug)]
pub(super) struct Probation {
    permit: Arc<Semaphore>,
    /// Identified by run and epoch: another task of the same run does not hold it.
    holder: Mutex<Option<(RunEpoch, OwnedSemaphorePermit)>>,
}

impl Default for Probation {
    fn default() -> Self {
        Self { permit: Arc::new(Semaphore::new(1)), holder: Mutex::new(None) }
    }
}

impl Probation {
    /// Waits until no other suspect is driven here. Cancel-safe.
    pub(super) async fn enter(&self, run: Uuid, epoch: i64) {
        #[cfg(test)]
        if super::simulation::has(super::simulation::Fault::SuspectsTogether) {
            return;
        }
        // The semaphore is never closed.
        if let Ok(permit) = Arc::clone(&self.permit).acquire_owned().await {
            *self.holder.lock() = Some(((run, epoch), permit));
        }
    }

    /// Lets the next suspect begin, if this run is the present one.
    pub(super) fn leave(&self, run: Uuid, epoch: i64) {
        self.holder.lock().take_if(|(holder, _)| *holder == (run, epoch));
    }

    /// Handles a durable write.
    pub(super) fn on_written(&self, write: &RunWrite) {
        let is_answer = |what: &RunEvent| matches!(what, RunEvent::ModelResponded(_));
        if self.permit.available_permits() == 0
            && write.events.iter().any(|event| is_answer(&event.what))
        {
            self.leave(write.run_id, write.epoch);
        }
    }
}
