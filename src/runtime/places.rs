//! The places that limits of tenants and keys leave to runs: those of this replica.
//!
//! A place is taken before a run of a request is stored, and when one is taken from the queue; it is
//! given back with the slot, so a parked run has none, and a run that another one started is in the
//! place of that. A run that was begun before goes on whatever the limits say. How many runs other
//! replicas have is asked of the store, so together they may pass a limit by what several of them
//! begin in the same moment.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Runtime;
use super::start::StartError;
use crate::run::Caller;
use crate::store::{LimitReached, RunLimits, RunRecord, Running, StoreError};

type Counts = Mutex<BTreeMap<(String, String), u32>>;

/// The places of this replica, by tenant and subject.
#[derive(Debug, Default)]
pub(super) struct Places {
    limits: RunLimits,
    taken: Arc<Counts>,
}

/// The place of one run, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    taken: Arc<Counts>,
    of: (String, String),
}

impl Places {
    pub(super) fn new(limits: RunLimits) -> Self {
        Self { limits, ..Self::default() }
    }

    /// A place for a run that goes on whatever the limits say; none where nothing is counted.
    pub(super) fn of_begun(&self, run: &RunRecord) -> Option<Place> {
        let counts = !self.limits.is_unlimited() && run.parent_run_id.is_none();
        counts.then(|| self.take(&mut self.taken.lock(), &run.tenant, &run.subject))
    }

    fn within_limits(
        &self,
        elsewhere: Running,
        caller: &Caller,
    ) -> Result<Option<Place>, LimitReached> {
        if self.limits.is_unlimited() {
            return Ok(None);
        }
        let mut taken = self.taken.lock();
        match and_here(elsewhere, &taken).refuses(&caller.tenant, &caller.subject) {
            Some(reached) => Err(reached),
            None => Ok(Some(self.take(&mut taken, &caller.tenant, &caller.subject))),
        }
    }

    fn take(
        &self,
        taken: &mut BTreeMap<(String, String), u32>,
        tenant: &str,
        subject: &str,
    ) -> Place {
        let of = (tenant.to_owned(), subject.to_owned());
        *taken.entry(of.clone()).or_default() += 1;
        Place { taken: Arc::clone(&self.taken), of }
    }
}

fn and_here(mut running: Running, taken: &BTreeMap<(String, String), u32>) -> Running {
    for ((tenant, subject), runs) in taken {
        running.add(tenant, subject, *runs);
    }
    running
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.taken.lock();
        if let Some(runs) = taken.get_mut(&self.of) {
            *runs -= 1;
            if *runs == 0 {
                taken.remove(&self.of);
            }
        }
    }
}

impl Runtime {
    /// A place for a run of a request, where there are limits.
    pub(super) async fn place_of(&self, caller: &Caller) -> Result<Option<Place>, StartError> {
        let inner = &self.inner;
        let elsewhere = inner.store.running_elsewhere(&inner.owner, inner.places.limits).await?;
        inner.places.within_limits(elsewhere, caller).map_err(StartError::TooManyRuns)
    }

    /// What is under way, of all replicas, where there are limits.
    pub(super) async fn running(&self) -> Result<Running, StoreError> {
        let Places { limits, taken } = &self.inner.places;
        let elsewhere = self.inner.store.running_elsewhere(&self.inner.owner, *limits).await?;
        let taken = taken.lock();
        Ok(and_here(elsewhere, &taken))
    }
}
