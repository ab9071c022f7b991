//! Runs that may be what crashes their replicas are driven one at a time.
//!
//! So the next crash shows which run causes it. A run makes room for the next
//! one as soon as a model has answered it.

use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use uuid::Uuid;

use super::ownership::RunEpoch;
use crate::event::RunEvent;
use crate::store::RunWrite;

/// The place of the one suspect that is driven here.
#[derive(Debug)]
pub(super) struct Probation {
    place: Arc<Semaphore>,
    /// Identified by run and epoch: another task of the same run does not hold it.
    holder: Mutex<Option<(RunEpoch, OwnedSemaphorePermit)>>,
}

impl Default for Probation {
    fn default() -> Self {
        Self { place: Arc::new(Semaphore::new(1)), holder: Mutex::new(None) }
    }
}

impl Probation {
    /// Resolves when no other suspect is driven here. Cancel-safe.
    pub(super) async fn enter(&self, run: Uuid, epoch: i64) {
        #[cfg(test)]
        if super::simulation::has(super::simulation::Fault::SuspectsTogether) {
            return;
        }
        // The semaphore is never closed.
        if let Ok(permit) = Arc::clone(&self.place).acquire_owned().await {
            *self.holder.lock() = Some(((run, epoch), permit));
        }
    }

    /// Makes room for the next suspect, if this run has the place.
    pub(super) fn leave(&self, run: Uuid, epoch: i64) {
        self.holder.lock().take_if(|(holder, _)| *holder == (run, epoch));
    }

    /// A write is durable.
    pub(super) fn on_written(&self, write: &RunWrite) {
        let is_answer = |what: &RunEvent| matches!(what, RunEvent::ModelResponded(_));
        if self.place.available_permits() == 0
            && write.events.iter().any(|event| is_answer(&event.what))
        {
            self.leave(write.run_id, write.epoch);
        }
    }
}
