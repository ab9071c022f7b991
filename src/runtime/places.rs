//! Reservations of places for the runs that this replica starts, within the limits of tenants and keys.
//!
//! A requested run reserves a place in the store before it is stored itself, so that the limits hold for all
//! replicas together. The place is given back if the run is not stored after all. Once a run is stored as
//! running, its row counts instead. A parked run has no place. A child run uses its parent's place. A run that
//! was begun before continues whatever the limits are.

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

/// How long a run waits while other runs of its tenant reserve places.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// After this time, a reservation is in the store, or never will be.
const SETTLED: Duration = Duration::from_secs(10);

/// The places that this replica has reserved, each until its run is stored.
pub(super) struct Places {
    limits: RunLimits,
    store: Arc<Store>,
    /// This replica.
    owner: Arc<str>,
    /// One request per tenant at a time asks the store, so that a flood takes no connections from others.
    turns: KeyLocks,
    /// By the ids of runs and places.
    held: Mutex<BTreeSet<(Uuid, Uuid)>>,
    /// Places that have to be given back.
    left: Mutex<Vec<Uuid>>,
    /// How often all places were lost.
    losses: AtomicU64,
    /// Wakes the loop that gives places back.
    wakes: Arc<Notify>,
}

/// The place of one run, given back when it is dropped unless the run is stored by then.
pub(super) struct Place {
    places: Arc<Places>,
    of: (Uuid, Uuid),
    /// The value of `losses` when it was reserved.
    losses: u64,
}

/// Why a run has no place.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoPlace {
    /// The limit of its tenant or key is reached.
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

    /// Releases the reservations of runs that are stored now.
    pub(super) fn on_written(&self, write: &RunWrite) {
        if write.new.is_some() && !self.limits.is_unlimited() {
            self.held.lock().retain(|(run, _)| *run != write.run_id);
        }
    }

    /// Forgets all places: the store has released them, because this replica was declared dead.
    pub(super) fn lose_all(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
        self.held.lock().clear();
    }

    /// Reserves a place for a requested run, if there are limits.
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

    /// Gives back the places of runs that were not stored.
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

    /// Gives back the places that only the store knows, because the answer to their reservation was lost.
    pub(super) async fn reconcile(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        let held: Vec<Uuid> = self.held.lock().iter().map(|(_, place)| *place).collect();
        self.store.give_other_places_back(&self.owner, &held, SETTLED).await
    }

    /// Gives back all places when this replica stops.
    pub(super) async fn give_all_back(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        self.store.give_other_places_back(&self.owner, &[], Duration::ZERO).await
    }
}

impl Place {
    /// Whether it was lost, so that another run may have it.
    pub(super) fn is_lost(&self) -> bool {
        self.places.losses.load(Ordering::SeqCst) != self.losses
    }

    /// Forgets the place without giving it back, because it was not reserved.
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
