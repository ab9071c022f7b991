//! The runs that this replica drives now, by id.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use super::ownership::OwnedRun;
use crate::engine::RunControl;

/// The runs that this replica executes, and their control handles.
#[derive(Debug, Default)]
pub(super) struct Live {
    running: Mutex<HashMap<Uuid, Running>>,
    abandoned: Mutex<Vec<OwnedRun>>,
}

#[derive(Debug)]
struct Running {
    epoch: i64,
    control: Arc<RunControl>,
}

impl Live {
    /// Of two tasks of one run, that of the older epoch winds down.
    pub(super) fn insert(&self, id: Uuid, epoch: i64, control: Arc<RunControl>) {
        let mut running = lock(&self.running);
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
        let mut running = lock(&self.running);
        if running.get(&id).is_some_and(|current| Arc::ptr_eq(&current.control, control)) {
            running.remove(&id);
        }
    }

    pub(super) fn get(&self, id: Uuid) -> Option<Arc<RunControl>> {
        lock(&self.running).get(&id).map(|running| Arc::clone(&running.control))
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.running).len()
    }

    /// Stops all of them; others own them now.
    pub(super) fn lose_all(&self) {
        lock(&self.running).drain().for_each(|(_, running)| running.control.lose());
    }

    /// Notes a run that is still ours in the store although no task drives it any more.
    pub(super) fn abandon(&self, ownership: OwnedRun) {
        lock(&self.abandoned).push(ownership);
    }

    /// The runs to give back to the queue.
    pub(super) fn take_abandoned(&self) -> Vec<OwnedRun> {
        std::mem::take(&mut *lock(&self.abandoned))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
