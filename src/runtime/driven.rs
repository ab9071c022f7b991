//! The runs that this replica drives: which it owns, how each is reached, and the tasks that drive
//! them.

use std::collections::BTreeSet;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::live::LiveRuns;
use super::ownership::OwnedRuns;
use super::parents::Parents;
use super::probation::Probation;
use crate::engine::RunControl;
use crate::store::Cancelling;
use crate::store::writer::OnCancelling;

/// The runs that this replica drives.
#[derive(Default)]
pub(super) struct DrivenRuns {
    /// From the claim to the end of their task.
    pub(super) owned: Arc<OwnedRuns>,
    /// Those that are known by their ids.
    pub(super) live: LiveRuns,
    /// Those that may be what crashes their replicas.
    pub(super) probation: Probation,
    /// Those that can start others.
    pub(super) parents: Arc<Parents>,
    pub(super) tasks: TaskTracker,
    /// The roots of the trees that this process has begun, where it takes no others.
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

    /// Makes a run known by its id; it is cancelled where that was asked for before.
    pub(super) fn insert(&self, id: Uuid, epoch: i64, control: &Arc<RunControl>) {
        self.live.insert(id, epoch, Arc::clone(control));
        self.owned.cancel_if_noted(id, control);
    }

    /// Forgets a run whose task has ended; whether it is not driven here again by now.
    pub(super) fn remove(&self, id: Uuid, epoch: i64, control: &Arc<RunControl>) -> bool {
        self.live.remove(id, control);
        self.probation.leave(id, epoch);
        self.live.get(id).is_none()
    }

    /// Cancels a run where it is driven here, or about to be; whether one that is driven has heard of
    /// it before its end.
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
