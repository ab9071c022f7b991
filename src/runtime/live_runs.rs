//! The runs that this replica drives now, by id.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::Mutex;
use uuid::Uuid;

use super::ownership::OwnedRun;
use crate::engine::RunControl;

/// The runs that this replica executes, and their control handles.
#[derive(Debug, Default)]
pub(super) struct LiveRuns {
    running: Mutex<HashMap<Uuid, Running>>,
    abandoned: Mutex<Vec<OwnedRun>>,
}

#[derive(Debug)]
struct Running {
    epoch: i64,
    control: Arc<RunControl>,
}

impl LiveRuns {
    /// Registers a run. If it has another task with an older epoch, that task is stopped.
    pub(super) fn insert(&self, id: Uuid, epoch: i64, control: Arc<RunControl>) {
        let mut running = self.running.lock();
        match running.get(&id) {
            Some(newer) if newer.epoch > epoch => control.lose(),
            earlier => {
                if let Some(earlier) = earlier {
                    earlier.control.lose();
                }
                running.insert(id, Running { epoch, control });
            }
        }
    }

    /// Forgets a run, unless it has been claimed again by then.
    pub(super) fn remove(&self, id: Uuid, control: &Arc<RunControl>) {
        let mut running = self.running.lock();
        if running.get(&id).is_some_and(|current| Arc::ptr_eq(&current.control, control)) {
            running.remove(&id);
        }
    }

    pub(super) fn get(&self, id: Uuid) -> Option<Arc<RunControl>> {
        self.running.lock().get(&id).map(|running| Arc::clone(&running.control))
    }

    pub(super) fn len(&self) -> usize {
        self.running.lock().len()
    }

    /// Stops all runs, because other replicas own them now.
    pub(super) fn lose_all(&self) {
        self.running.lock().drain().for_each(|(_, running)| running.control.lose());
    }

    /// Notes a run that this replica still owns in the store although no task drives it any more.
    pub(super) fn abandon(&self, ownership: OwnedRun) {
        self.abandoned.lock().push(ownership);
    }

    /// The runs to give back to the queue.
    pub(super) fn take_abandoned(&self) -> Vec<OwnedRun> {
        std::mem::take(&mut *self.abandoned.lock())
    }
}
