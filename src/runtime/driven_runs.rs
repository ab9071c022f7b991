//! The runs that this replica drives: their ownership, control handles and tasks.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::live_runs::LiveRuns;
use super::ownership::OwnedRuns;
use super::parents::Parents;
use super::probation::Probation;
use crate::engine::RunControl;
use crate::store::Cancelling;
use crate::store::writer::OnCancelling;

/// The runs that this replica drives.
#[derive(Default)]
pub(super) struct DrivenRuns {
    /// Owned runs, from the claim to the end of their task.
    pub(super) owned: Arc<OwnedRuns>,
    /// Runs that are registered by id.
    pub(super) live: LiveRuns,
    /// Runs that may cause crashes.
    pub(super) probation: Probation,
    /// Runs that can start child runs.
    pub(super) parents: Arc<Parents>,
    pub(super) tasks: TaskTracker,
    /// The roots of the trees that this process has begun, if it drives no others.
    own_roots: Mutex<BTreeSet<Uuid>>,
}

impl DrivenRuns {
    /// Notes the root of a tree that this process has begun.
    pub(super) fn note_own(&self, root: Uuid) {
        self.own_roots.lock().insert(root);
    }

    /// The roots that were noted.
    pub(super) fn own_roots(&self) -> Vec<Uuid> {
        self.own_roots.lock().iter().copied().collect()
    }

    /// Registers a run by its id, and cancels it if a cancel request was noted before.
    pub(super) fn insert(&self, id: Uuid, epoch: i64, control: &Arc<RunControl>) {
        self.live.insert(id, epoch, Arc::clone(control));
        self.owned.cancel_if_noted(id, control);
    }

    /// Forgets a run whose task has ended; false if it is already driven here again.
    pub(super) fn remove(&self, id: Uuid, epoch: i64, control: &Arc<RunControl>) -> bool {
        self.live.remove(id, control);
        self.probation.leave(id, epoch);
        self.live.get(id).is_none()
    }

    /// Cancels a run that is driven here, or about to be. `None` if it is not registered; otherwise, whether the
    /// request came before its end.
    pub(super) fn cancel(&self, run: Uuid, reason: Option<&str>) -> Option<bool> {
        self.owned.cancel(run, reason);
        self.live.get(run).map(|control| control.cancel(reason.map(str::to_owned)))
    }

    /// Cancels runs whose commits returned a cancel request before their replica was notified of it.
    pub(super) fn on_cancelling(self: &Arc<Self>) -> OnCancelling {
        let driven = Arc::clone(self);
        Arc::new(move |run: Uuid, Cancelling { reason }: &Cancelling| {
            driven.cancel(run, reason.as_deref());
        })
    }
}
