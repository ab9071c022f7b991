//! Concurrency slots: how many runs this replica drives at once.
//!
//! Every driven run occupies one, whether it came by a request, from the queue or from a parent; a
//! parked run has none. A run that waits for a child lends it its slot, to one child at a time, so a
//! tree of runs needs no more slots than its root.

use std::sync::{Arc, OnceLock, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::reservations::Reservation;

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
    hold: Mutex<Option<SlotHold>>,
    /// One permit, for the child to which the slot is lent.
    lent: Arc<Semaphore>,
    /// The run's reservation within the limits of its tenant and key, until it is stored.
    reservation: OnceLock<Reservation>,
}

/// What a slot holds until it is released.
enum SlotHold {
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
    pub(super) fn free_worker_slots(&self) -> usize {
        self.workers.available_permits().min(self.runs.available_permits())
    }

    /// A free slot, for a run started by a request.
    pub(super) fn try_acquire(&self) -> Option<RunSlot> {
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(RunSlot::new(SlotHold::Own { _run: run, _worker: None }))
    }

    /// A free slot, for a run from the queue.
    pub(super) fn for_worker(&self) -> Option<RunSlot> {
        let worker = Arc::clone(&self.workers).try_acquire_owned().ok()?;
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(RunSlot::new(SlotHold::Own { _run: run, _worker: Some(worker) }))
    }

    /// The slot of the parent that waits for this run, or a free one.
    pub(super) fn of_parent_or_free(&self, parent_slot: Option<&ParentSlot>) -> Option<RunSlot> {
        parent_slot.and_then(ParentSlot::lend).or_else(|| self.try_acquire())
    }

    /// Waits for the slot of the parent or a free one; `None` if the parent has no slot any more. Cancel-safe.
    pub(super) async fn for_child(&self, parent_slot: &ParentSlot) -> Option<RunSlot> {
        let lent = Arc::clone(&parent_slot.0.upgrade()?.lent);
        tokio::select! {
            biased;
            permit = lent.acquire_owned() => parent_slot.lend_with(permit.ok()?),
            run = Arc::clone(&self.runs).acquire_owned() => {
                Some(RunSlot::new(SlotHold::Own { _run: run.ok()?, _worker: None }))
            }
        }
    }
}

impl RunSlot {
    fn new(hold: SlotHold) -> Self {
        let lent = Arc::new(Semaphore::new(1));
        Self(Arc::new(SlotState {
            hold: Mutex::new(Some(hold)),
            lent,
            reservation: OnceLock::new(),
        }))
    }

    fn hold(&self) -> MutexGuard<'_, Option<SlotHold>> {
        self.0.hold.lock()
    }

    /// Holds the run's reservation at most as long as the slot; only the first reservation is used.
    pub(super) fn with_reservation(self, reservation: Option<Reservation>) -> Self {
        if let Some(reservation) = reservation {
            let _ = self.0.reservation.set(reservation);
        }
        self
    }

    /// Whether the run's reservation was lost.
    pub(super) fn has_lost_its_reservation(&self) -> bool {
        self.0.reservation.get().is_some_and(Reservation::is_lost)
    }

    pub(super) fn parent_slot(&self) -> ParentSlot {
        ParentSlot(Arc::downgrade(&self.0))
    }

    /// Releases the slot while the run waits.
    pub(super) fn release(&self) {
        let released = self.hold().take();
        drop(released);
    }

    /// Takes over the slot that `other` holds.
    pub(super) fn take(&self, other: &Self) {
        let hold = other.hold().take();
        *self.hold() = hold;
    }
}

impl ParentSlot {
    fn lend(&self) -> Option<RunSlot> {
        let lent = Arc::clone(&self.0.upgrade()?.lent);
        self.lend_with(lent.try_acquire_owned().ok()?)
    }

    fn lend_with(&self, permit: OwnedSemaphorePermit) -> Option<RunSlot> {
        let parent_slot = RunSlot(self.0.upgrade()?);
        Some(RunSlot::new(SlotHold::Lent { _permit: permit, _lender: parent_slot }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_lent_to_one_child_at_a_time_and_freed_last() {
        let slots = RunSlots::new(1, 1);
        let parent = slots.for_worker().unwrap();
        assert_eq!(slots.free_worker_slots(), 0);
        let parent_slot = parent.parent_slot();
        let child = slots.of_parent_or_free(Some(&parent_slot)).unwrap();
        assert!(slots.of_parent_or_free(Some(&parent_slot)).is_none(), "it is lent");
        let grandchild = slots.of_parent_or_free(Some(&child.parent_slot())).unwrap();
        drop(child);
        drop(parent);
        assert_eq!(slots.free_worker_slots(), 0, "a run goes on in it");
        assert!(slots.of_parent_or_free(Some(&parent_slot)).is_none());
        drop(grandchild);
        assert_eq!(slots.free_worker_slots(), 1);
    }

    #[test]
    fn a_released_slot_is_free_for_other_runs() {
        let slots = RunSlots::new(1, 1);
        let suspect = slots.for_worker().unwrap();
        suspect.release();
        let other = slots.try_acquire().unwrap();
        assert!(slots.of_parent_or_free(None).is_none());
        drop(other);
        suspect.take(&slots.of_parent_or_free(None).unwrap());
        assert_eq!(slots.free_worker_slots(), 0);
    }
}
