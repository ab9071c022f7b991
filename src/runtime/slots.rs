//! Concurrency slots: how many runs this replica drives at once.
//!
//! Every driven run occupies one, whether it came by a request, from the queue or from a parent; a
//! parked run has none. A run that waits for a child lends it its slot, to one child at a time, so a
//! tree of runs needs no more slots than its root.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::places::Place;

/// The slots of this replica.
pub(super) struct RunSlots {
    runs: Arc<Semaphore>,
    /// How many of the runs may have come from the queue.
    workers: Arc<Semaphore>,
}

/// The slot of one run.
#[derive(Clone)]
pub(super) struct RunSlot(Arc<SlotState>);

/// The slot of a run, as its children see it.
#[derive(Clone)]
pub(super) struct ParentSlot(Weak<SlotState>);

struct SlotState {
    taken: Mutex<Option<Taken>>,
    /// One permit, for the child to which the slot is lent.
    lent: Arc<Semaphore>,
    /// The run's place within the limits of its tenant and key, until it is stored.
    place: OnceLock<Place>,
}

enum Taken {
    Own { _run: OwnedSemaphorePermit, _worker: Option<OwnedSemaphorePermit> },
    Lent { _permit: OwnedSemaphorePermit, _lender: RunSlot },
}

impl RunSlots {
    pub(super) fn new(runs: usize, workers: usize) -> Self {
        Self { runs: Arc::new(Semaphore::new(runs)), workers: Arc::new(Semaphore::new(workers)) }
    }

    /// How many further runs without a worker may be driven.
    pub(super) fn free_slots(&self) -> usize {
        self.runs.available_permits()
    }

    /// How many further runs from the queue may be driven.
    pub(super) fn room(&self) -> usize {
        self.workers.available_permits().min(self.runs.available_permits())
    }

    /// A free slot, for a run started by a request.
    pub(super) fn free(&self) -> Option<RunSlot> {
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(RunSlot::new(Taken::Own { _run: run, _worker: None }))
    }

    /// A free slot, for a run from the queue.
    pub(super) fn for_worker(&self) -> Option<RunSlot> {
        let worker = Arc::clone(&self.workers).try_acquire_owned().ok()?;
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(RunSlot::new(Taken::Own { _run: run, _worker: Some(worker) }))
    }

    /// The slot of the parent that waits for this run, or a free one.
    pub(super) fn of_parent_or_free(&self, parent_slot: Option<&ParentSlot>) -> Option<RunSlot> {
        parent_slot.and_then(ParentSlot::lend).or_else(|| self.free())
    }

    /// Waits for such a slot; `None` if the parent has no slot any more. Cancel-safe.
    pub(super) async fn for_child(&self, parent_slot: &ParentSlot) -> Option<RunSlot> {
        let lent = Arc::clone(&parent_slot.0.upgrade()?.lent);
        tokio::select! {
            biased;
            permit = lent.acquire_owned() => parent_slot.lent(permit.ok()?),
            run = Arc::clone(&self.runs).acquire_owned() => {
                Some(RunSlot::new(Taken::Own { _run: run.ok()?, _worker: None }))
            }
        }
    }
}

impl RunSlot {
    fn new(taken: Taken) -> Self {
        let lent = Arc::new(Semaphore::new(1));
        Self(Arc::new(SlotState { taken: Mutex::new(Some(taken)), lent, place: OnceLock::new() }))
    }

    fn taken(&self) -> MutexGuard<'_, Option<Taken>> {
        self.0.taken.lock()
    }

    /// Holds the run's place at most as long as the slot; only the first place is used.
    pub(super) fn with_place(self, place: Option<Place>) -> Self {
        if let Some(place) = place {
            let _ = self.0.place.set(place);
        }
        self
    }

    /// Whether the run's place was lost.
    pub(super) fn has_lost_its_place(&self) -> bool {
        self.0.place.get().is_some_and(Place::is_lost)
    }

    pub(super) fn parent_slot(&self) -> ParentSlot {
        ParentSlot(Arc::downgrade(&self.0))
    }

    /// Gives the slot back while the run waits.
    pub(super) fn leave(&self) {
        let left = self.taken().take();
        drop(left);
    }

    /// Takes over the other's slot.
    pub(super) fn take(&self, other: &Self) {
        let taken = other.taken().take();
        *self.taken() = taken;
    }
}

impl ParentSlot {
    fn lend(&self) -> Option<RunSlot> {
        let lent = Arc::clone(&self.0.upgrade()?.lent);
        self.lent(lent.try_acquire_owned().ok()?)
    }

    fn lent(&self, permit: OwnedSemaphorePermit) -> Option<RunSlot> {
        let parent_slot = RunSlot(self.0.upgrade()?);
        Some(RunSlot::new(Taken::Lent { _permit: permit, _lender: parent_slot }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_lent_to_one_child_at_a_time_and_freed_last() {
        let slots = RunSlots::new(1, 1);
        let parent = slots.for_worker().unwrap();
        assert_eq!(slots.room(), 0);
        let parent_slot = parent.parent_slot();
        let child = slots.of_parent_or_free(Some(&parent_slot)).unwrap();
        assert!(slots.of_parent_or_free(Some(&parent_slot)).is_none(), "it is lent");
        let grandchild = slots.of_parent_or_free(Some(&child.parent_slot())).unwrap();
        drop(child);
        drop(parent);
        assert_eq!(slots.room(), 0, "a run goes on in it");
        assert!(slots.of_parent_or_free(Some(&parent_slot)).is_none());
        drop(grandchild);
        assert_eq!(slots.room(), 1);
    }

    #[test]
    fn a_released_slot_is_free_for_other_runs() {
        let slots = RunSlots::new(1, 1);
        let suspect = slots.for_worker().unwrap();
        suspect.leave();
        let other = slots.free().unwrap();
        assert!(slots.of_parent_or_free(None).is_none());
        drop(other);
        suspect.take(&slots.of_parent_or_free(None).unwrap());
        assert_eq!(slots.room(), 0);
    }
}
