//! Places among the runs that this replica drives at once.
//!
//! A run that is driven has one, whatever way it came; a parked run has none. A run lends its place
//! to those that it started and waits for, to one at a time: the run that goes on has a place, and a
//! tree of runs needs no more than its first run has.

use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All of them.
#[derive(Debug)]
pub(super) struct Places {
    runs: Arc<Semaphore>,
    /// How many of the runs may have come from the queue.
    workers: Arc<Semaphore>,
}

/// The place of one run.
#[derive(Debug, Clone)]
pub(super) struct Place(Arc<Shared>);

/// The place of a run, as those that it started know it.
#[derive(Debug, Clone)]
pub(super) struct Lender(Weak<Shared>);

#[derive(Debug)]
struct Shared {
    taken: Mutex<Option<Taken>>,
    /// One permit, for the run to which the place is lent.
    lent: Arc<Semaphore>,
}

#[derive(Debug)]
enum Taken {
    Own { _run: OwnedSemaphorePermit, _worker: Option<OwnedSemaphorePermit> },
    Lent { _permit: OwnedSemaphorePermit, _lender: Place },
}

impl Places {
    pub(super) fn new(runs: usize, workers: usize) -> Self {
        Self { runs: Arc::new(Semaphore::new(runs)), workers: Arc::new(Semaphore::new(workers)) }
    }

    /// How many runs there is room for that need no worker.
    pub(super) fn free_places(&self) -> usize {
        self.runs.available_permits()
    }

    /// How many runs from the queue there is room for.
    pub(super) fn room(&self) -> usize {
        self.workers.available_permits().min(self.runs.available_permits())
    }

    /// A free place, for a run that somebody waits for.
    pub(super) fn free(&self) -> Option<Place> {
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(Place::new(Taken::Own { _run: run, _worker: None }))
    }

    /// A free place, for a run from the queue.
    pub(super) fn for_worker(&self) -> Option<Place> {
        let worker = Arc::clone(&self.workers).try_acquire_owned().ok()?;
        let run = Arc::clone(&self.runs).try_acquire_owned().ok()?;
        Some(Place::new(Taken::Own { _run: run, _worker: Some(worker) }))
    }

    /// The place of the run that waits for this one, or a free one.
    pub(super) fn lent_or_free(&self, lender: Option<&Lender>) -> Option<Place> {
        lender.and_then(Lender::lend).or_else(|| self.free())
    }

    /// The same, as soon as there is one; `None` where the lender has no place any more. Cancel-safe.
    pub(super) async fn for_child(&self, lender: &Lender) -> Option<Place> {
        let lent = Arc::clone(&lender.0.upgrade()?.lent);
        tokio::select! {
            biased;
            permit = lent.acquire_owned() => lender.lent(permit.ok()?),
            run = Arc::clone(&self.runs).acquire_owned() => {
                Some(Place::new(Taken::Own { _run: run.ok()?, _worker: None }))
            }
        }
    }
}

impl Place {
    fn new(taken: Taken) -> Self {
        let lent = Arc::new(Semaphore::new(1));
        Self(Arc::new(Shared { taken: Mutex::new(Some(taken)), lent }))
    }

    fn taken(&self) -> MutexGuard<'_, Option<Taken>> {
        self.0.taken.lock()
    }

    pub(super) fn lender(&self) -> Lender {
        Lender(Arc::downgrade(&self.0))
    }

    /// Makes room for another run.
    pub(super) fn leave(&self) {
        let left = self.taken().take();
        drop(left);
    }

    /// Has the other one's place from now on.
    pub(super) fn take(&self, other: &Self) {
        let taken = other.taken().take();
        *self.taken() = taken;
    }
}

impl Lender {
    fn lend(&self) -> Option<Place> {
        let lent = Arc::clone(&self.0.upgrade()?.lent);
        self.lent(lent.try_acquire_owned().ok()?)
    }

    fn lent(&self, permit: OwnedSemaphorePermit) -> Option<Place> {
        let lender = Place(self.0.upgrade()?);
        Some(Place::new(Taken::Lent { _permit: permit, _lender: lender }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_lent_to_one_at_a_time_and_comes_back_last() {
        let places = Places::new(1, 1);
        let parent = places.for_worker().unwrap();
        assert_eq!(places.room(), 0);
        let lender = parent.lender();
        let child = places.lent_or_free(Some(&lender)).unwrap();
        assert!(places.lent_or_free(Some(&lender)).is_none(), "it is lent");
        let grandchild = places.lent_or_free(Some(&child.lender())).unwrap();
        drop(child);
        drop(parent);
        assert_eq!(places.room(), 0, "a run goes on in it");
        assert!(places.lent_or_free(Some(&lender)).is_none());
        drop(grandchild);
        assert_eq!(places.room(), 1);
    }

    #[test]
    fn a_run_that_waits_alone_leaves_its_place_to_others() {
        let places = Places::new(1, 1);
        let suspect = places.for_worker().unwrap();
        suspect.leave();
        let other = places.free().unwrap();
        assert!(places.lent_or_free(None).is_none());
        drop(other);
        suspect.take(&places.lent_or_free(None).unwrap());
        assert_eq!(places.room(), 0);
    }
}
