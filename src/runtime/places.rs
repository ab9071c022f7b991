//! The places of runs that this replica begins, within the limits of tenants and keys.
//!
//! A run of a request takes a place before it is stored, in the store, where all replicas count
//! together; it is given back where the run is not stored after all. A run that is stored as running has
//! its place by that, whatever way it came: a parked run has none, one that another run started is in
//! the place of that, and one that was begun before goes on whatever the limits say.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use super::key_locks::KeyLocks;
use crate::run::Caller;
use crate::store::{LimitReached, NewRun, RunLimits, RunPlace, RunWrite, Store, StoreError};

/// How long a run waits for places of its tenant that are being taken.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// After so long a place is in the store, or never will be.
const SETTLED: Duration = Duration::from_secs(10);

/// The places that this replica has, each until its run is stored.
pub(super) struct Places {
    limits: RunLimits,
    store: Arc<Store>,
    /// This replica.
    owner: Arc<str>,
    /// One of a tenant at a time asks the store, so that a flood takes no connections from others.
    turns: KeyLocks,
    /// By the ids of runs and places.
    held: Mutex<BTreeSet<(Uuid, Uuid)>>,
    /// What is to be given back.
    left: Mutex<Vec<Uuid>>,
    /// How often all of them were lost.
    losses: AtomicU64,
    /// Wakes the loop that gives back what is left.
    wakes: Arc<Notify>,
}

/// The place of one run, given back when it is dropped unless the run is stored by then.
pub(super) struct Place {
    places: Arc<Places>,
    of: (Uuid, Uuid),
    /// The losses before it was taken.
    losses: u64,
}

/// Why a run has no place.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoPlace {
    /// Its tenant or key has as many as it may.
    #[error(transparent)]
    Limit(LimitReached),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Places {
    pub(super) fn new(
        limits: RunLimits,
        store: Arc<Store>,
        owner: Arc<str>,
        wakes: Arc<Notify>,
    ) -> Self {
        let (turns, held, left) = (KeyLocks::default(), Mutex::default(), Mutex::default());
        Self { limits, store, owner, turns, held, left, losses: AtomicU64::default(), wakes }
    }

    /// A run that is stored needs nothing else.
    pub(super) fn on_written(&self, write: &RunWrite) {
        if write.new.is_some() && !self.limits.is_unlimited() {
            self.held.lock().retain(|(run, _)| *run != write.run_id);
        }
    }

    /// Forgets all places: they are free for others since this replica was declared dead.
    pub(super) fn lose_all(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
        self.held.lock().clear();
    }

    /// A place for a run of a request, where there are limits.
    pub(super) async fn take(
        self: &Arc<Self>,
        new: &NewRun,
        caller: &Caller,
    ) -> Result<Option<Place>, NoPlace> {
        if self.limits.is_unlimited() {
            return Ok(None);
        }
        let turn = timeout(MAX_WAIT, self.turns.lock(&caller.tenant, "")).await;
        let _turn = turn.map_err(|_| {
            StoreError::Unavailable("too many runs of this tenant are starting at once".to_owned())
        })?;
        let place = self.hold(new.id);
        let wanted = RunPlace {
            id: place.of.1,
            owner: &self.owner,
            run: new.id,
            tenant: &caller.tenant,
            subject: &caller.subject,
            idempotency_key: new.idempotency.as_ref().map(|idempotency| &*idempotency.key),
        };
        match self.store.take_place(wanted, self.limits).await? {
            Ok(()) => Ok(Some(place)),
            Err(reached) => {
                place.forget();
                Err(NoPlace::Limit(reached))
            }
        }
    }

    fn hold(self: &Arc<Self>, run: Uuid) -> Place {
        let losses = self.losses.load(Ordering::SeqCst);
        let of = (run, Uuid::now_v7());
        self.held.lock().insert(of);
        Place { places: Arc::clone(self), of, losses }
    }

    /// Gives places back of runs that were not stored.
    pub(super) async fn give_back(&self) -> Result<(), StoreError> {
        let left = std::mem::take(&mut *self.left.lock());
        if left.is_empty() {
            return Ok(());
        }
        let given_back = self.store.give_places_back(&left).await;
        if given_back.is_err() {
            self.left.lock().extend(left); // tried again at the next wakeup
        }
        given_back
    }

    /// Gives places back that this replica has in the store alone: the answer to its asking was lost.
    pub(super) async fn reconcile(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        let held: Vec<Uuid> = self.held.lock().iter().map(|(_, place)| *place).collect();
        self.store.give_other_places_back(&self.owner, &held, SETTLED).await
    }

    /// Nothing begins here any more.
    pub(super) async fn give_all_back(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        self.store.give_other_places_back(&self.owner, &[], Duration::ZERO).await
    }
}

impl Place {
    /// Whether another run may have it by now.
    pub(super) fn is_lost(&self) -> bool {
        self.places.losses.load(Ordering::SeqCst) != self.losses
    }

    /// It was not taken.
    fn forget(self) {
        self.places.held.lock().remove(&self.of);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.places.held.lock().remove(&self.of) {
            self.places.left.lock().push(self.of.1);
            self.places.wakes.notify_one();
        }
    }
}
