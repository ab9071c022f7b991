//! The runs that this replica drives now, by id.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use crate::engine::RunControl;

/// Who runs here and how to reach them.
#[derive(Debug, Default)]
pub(super) struct Live {
    running: Mutex<HashMap<Uuid, Arc<RunControl>>>,
    abandoned: Mutex<Vec<Uuid>>,
}

impl Live {
    pub(super) fn insert(&self, id: Uuid, control: Arc<RunControl>) {
        // An earlier task of the same run still winds down under an older epoch.
        if let Some(earlier) = lock(&self.running).insert(id, control) {
            earlier.lose();
        }
    }

    /// Forgets a run, unless it has been claimed again by then.
    pub(super) fn remove(&self, id: Uuid, control: &Arc<RunControl>) {
        let mut running = lock(&self.running);
        if running.get(&id).is_some_and(|current| Arc::ptr_eq(current, control)) {
            running.remove(&id);
        }
    }

    pub(super) fn get(&self, id: Uuid) -> Option<Arc<RunControl>> {
        lock(&self.running).get(&id).cloned()
    }

    pub(super) fn len(&self) -> usize {
        lock(&self.running).len()
    }

    /// Stops all of them; others own them now.
    pub(super) fn lose_all(&self) {
        lock(&self.running).drain().for_each(|(_, control)| control.lose());
    }

    /// Notes a run that is still ours in the store although nobody drives it.
    pub(super) fn abandon(&self, id: Uuid) {
        lock(&self.abandoned).push(id);
    }

    /// The runs to give back to the queue.
    pub(super) fn take_abandoned(&self) -> Vec<Uuid> {
        std::mem::take(&mut *lock(&self.abandoned))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
