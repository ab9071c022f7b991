//! Reservations for the runs that this replica starts, within the limits of tenants and keys.
//!
//! A requested run gets a reservation in the store before it is stored itself, so that the limits hold for all
//! replicas together. The reservation is released if the run is not stored after all. Once a run is stored as
//! running, its row counts instead. A parked run has no reservation. A child run uses its parent's. A resumed
//! run continues whatever the limits are.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;
use uuid::Uuid;

use crate::bounds::key_locks::KeyLocks;
use crate::run::Caller;
use crate::store::{LimitReached, NewRun, RunLimits, RunReservation, RunWrite, Store, StoreError};

/// How long a run waits while other runs of its tenant are reserved.
const MAX_WAIT: Duration = Duration::from_secs(5);
/// After this time, a reservation is in the store, or never will be.
const SETTLED: Duration = Duration::from_secs(10);

/// The reservations of this replica, each held until its run is stored.
pub(super) struct Reservations {
    limits: RunLimits,
    store: Arc<Store>,
    /// This replica.
    owner: Arc<str>,
    /// One request per tenant at a time asks the store, so that a flood takes no connections from others.
    tenant_locks: KeyLocks<String>,
    /// Pairs of run id and reservation id.
    held: Mutex<BTreeSet<(Uuid, Uuid)>>,
    /// Ids of reservations that have to be released.
    unused: Mutex<Vec<Uuid>>,
    /// How often all reservations were lost.
    losses: AtomicU64,
    /// Wakes the loop that releases reservations.
    wakes: Arc<Notify>,
}

/// The reservation of one run. Dropping it releases the reservation, unless the run is stored by then.
pub(super) struct Reservation {
    reservations: Arc<Reservations>,
    /// Run id and reservation id.
    ids: (Uuid, Uuid),
    /// The value of `losses` when it was reserved.
    losses: u64,
}

/// Why a run has no reservation.
#[derive(Debug, thiserror::Error)]
pub(super) enum NoReservation {
    /// The limit of its tenant or key is reached.
    #[error(transparent)]
    Limit(LimitReached),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Reservations {
    pub(super) fn new(
        limits: RunLimits,
        store: Arc<Store>,
        owner: Arc<str>,
        wakes: Arc<Notify>,
    ) -> Self {
        let (tenant_locks, held, unused) =
            (KeyLocks::default(), Mutex::default(), Mutex::default());
        Self {
            limits,
            store,
            owner,
            tenant_locks,
            held,
            unused,
            losses: AtomicU64::default(),
            wakes,
        }
    }

    /// Forgets the reservation of a run that is stored now: its row counts instead.
    pub(super) fn on_written(&self, write: &RunWrite) {
        if write.new.is_some() && !self.limits.is_unlimited() {
            self.held.lock().retain(|(run, _)| *run != write.run_id);
        }
    }

    /// Forgets all reservations: the store has released them, because this replica was declared dead.
    pub(super) fn lose_all(&self) {
        self.losses.fetch_add(1, Ordering::SeqCst);
        self.held.lock().clear();
    }

    /// Makes a reservation for a requested run; `None` if there are no limits.
    pub(super) async fn reserve(
        self: &Arc<Self>,
        new: &NewRun,
        caller: &Caller,
    ) -> Result<Option<Reservation>, NoReservation> {
        if self.limits.is_unlimited() {
            return Ok(None);
        }
        let lock = timeout(MAX_WAIT, self.tenant_locks.lock(caller.tenant.clone())).await;
        let _lock = lock.map_err(|_| {
            StoreError::Unavailable("too many runs of this tenant are starting at once".to_owned())
        })?;
        let reservation = self.track(new.id);
        let wanted = RunReservation {
            id: reservation.ids.1,
            owner: &self.owner,
            run: new.id,
            tenant: &caller.tenant,
            subject: &caller.subject,
            idempotency_key: new.idempotency.as_ref().map(|idempotency| &*idempotency.key),
        };
        match self.store.reserve_run(wanted, self.limits).await? {
            Ok(()) => Ok(Some(reservation)),
            Err(reached) => {
                reservation.forget();
                Err(NoReservation::Limit(reached))
            }
        }
    }

    fn track(self: &Arc<Self>, run: Uuid) -> Reservation {
        let losses = self.losses.load(Ordering::SeqCst);
        let ids = (run, Uuid::now_v7());
        self.held.lock().insert(ids);
        Reservation { reservations: Arc::clone(self), ids, losses }
    }

    /// Releases the reservations of runs that were not stored.
    pub(super) async fn release_unused(&self) -> Result<(), StoreError> {
        let unused = std::mem::take(&mut *self.unused.lock());
        if unused.is_empty() {
            return Ok(());
        }
        let released = self.store.release_reservations(&unused).await;
        if released.is_err() {
            self.unused.lock().extend(unused); // tried again at the next wakeup
        }
        released
    }

    /// Releases reservations that only the store knows, because the answer to their request was lost.
    pub(super) async fn reconcile(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        let held: Vec<Uuid> =
            self.held.lock().iter().map(|(_, reservation)| *reservation).collect();
        self.store.release_other_reservations(&self.owner, &held, SETTLED).await
    }

    /// Releases all reservations when this replica stops.
    pub(super) async fn release_all(&self) -> Result<(), StoreError> {
        if self.limits.is_unlimited() {
            return Ok(());
        }
        self.store.release_other_reservations(&self.owner, &[], Duration::ZERO).await
    }
}

impl Reservation {
    /// Whether it was lost, so that another run may have it.
    pub(super) fn is_lost(&self) -> bool {
        self.reservations.losses.load(Ordering::SeqCst) != self.losses
    }

    /// Forgets a reservation that the store has refused.
    fn forget(self) {
        self.reservations.held.lock().remove(&self.ids);
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if self.reservations.held.lock().remove(&self.ids) {
            self.reservations.unused.lock().push(self.ids.1);
            self.reservations.wakes.notify_one();
        }
    }
}
