//! The runs that this replica owns and drives, from the claim to the end of their task, and the
//! reconciliation with what the store says it owns.
//!
//! A run is owned but not driven if the answer to a claim was lost, a task failed, or an acknowledged commit is
//! gone. The sweep does not take such runs, because this replica is alive. They are requeued as after a crash,
//! so that a run that always fails ends.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::Mutex;
use uuid::Uuid;

use super::Runtime;
use crate::engine::RunControl;
use crate::store::{ClaimedRun, Requeue, StoreError};

/// A run, and the epoch under which it is owned.
pub(super) type RunEpoch = (Uuid, i64);

/// The epoch of a run on the replica that started it.
pub(super) const FIRST_EPOCH: i64 = 1;

/// The runs that this replica owns and drives.
#[derive(Debug, Default)]
pub(super) struct OwnedRuns(Mutex<OwnedRunsInner>);

#[derive(Debug, Default)]
struct OwnedRunsInner {
    held: HashMap<RunEpoch, usize>,
    /// The tenants of the runs in `held` that were started here; their first commit may be in progress.
    tenants: HashMap<RunEpoch, String>,
    /// Claims under way, by number.
    claims: BTreeSet<u64>,
    next_claim: u64,
    /// Runs that were owned but not driven at the last check, each with the number of the first claim that
    /// began after the first such check.
    missed: HashMap<RunEpoch, u64>,
    /// Cancel requests, with their reasons, for runs that are not registered by id yet: runs in `held`, and
    /// runs that a claim in progress may return.
    cancelled: HashMap<Uuid, Option<String>>,
}

impl OwnedRunsInner {
    fn is_held(&self, run: Uuid) -> bool {
        self.held.keys().any(|(held, _)| *held == run)
    }
}

/// Guard: the run counts as driven until it is dropped.
#[derive(Debug)]
pub(super) struct OwnedRun {
    owned: Arc<OwnedRuns>,
    run: Uuid,
    epoch: i64,
}

/// A claim in progress. The store may count its runs as owned before the claim returns them.
struct Claim {
    owned: Arc<OwnedRuns>,
    number: u64,
}

/// Why a run was requeued as after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ReclaimReason {
    /// No task drove it.
    Undriven,
    /// The store has lost an acknowledged commit.
    LostCommit,
    /// Its end could not be written.
    Unended,
}

impl ReclaimReason {
    fn as_str(self) -> &'static str {
        match self {
            Self::Undriven => "undriven",
            Self::LostCommit => "lost_commit",
            Self::Unended => "unended",
        }
    }
}

impl OwnedRuns {
    pub(super) fn own(self: &Arc<Self>, run: Uuid, epoch: i64) -> OwnedRun {
        *self.0.lock().held.entry((run, epoch)).or_default() += 1;
        OwnedRun { owned: Arc::clone(self), run, epoch }
    }

    /// Registers a run of this tenant that is started here.
    pub(super) fn own_new(self: &Arc<Self>, run: Uuid, epoch: i64, tenant: &str) -> OwnedRun {
        self.0.lock().tenants.insert((run, epoch), tenant.to_owned());
        self.own(run, epoch)
    }

    /// Whether a run of this tenant was started here and is still driven, stored or not.
    pub(super) fn has_started(&self, run: Uuid, tenant: &str) -> bool {
        self.0.lock().tenants.get(&(run, FIRST_EPOCH)).is_some_and(|of| of == tenant)
    }

    /// Whether no run is owned, and no claim is in progress.
    pub(super) fn is_empty(&self) -> bool {
        let holding = self.0.lock();
        holding.held.is_empty() && holding.claims.is_empty()
    }

    /// Notes a cancel request for a run that may be about to be driven.
    pub(super) fn cancel(&self, run: Uuid, reason: Option<&str>) {
        let mut holding = self.0.lock();
        if !holding.claims.is_empty() || holding.is_held(run) {
            holding.cancelled.insert(run, reason.map(str::to_owned));
        }
    }

    /// Cancels a run that is registered by id now, if a cancel request was noted before.
    pub(super) fn cancel_if_noted(&self, run: Uuid, control: &RunControl) {
        if let Some(reason) = self.0.lock().cancelled.remove(&run) {
            control.cancel(reason);
        }
    }

    fn claim(self: &Arc<Self>) -> Claim {
        let mut holding = self.0.lock();
        let number = holding.next_claim;
        holding.next_claim += 1;
        holding.claims.insert(number);
        Claim { owned: Arc::clone(self), number }
    }

    /// The owned runs that are not driven now, were not at the last check, and cannot be returned by a claim
    /// in progress.
    fn undriven(&self, owned: Vec<RunEpoch>) -> Vec<RunEpoch> {
        let mut holding = self.0.lock();
        let holding = &mut *holding;
        let next = holding.next_claim;
        let oldest = holding.claims.first().copied().unwrap_or(next);
        let earlier = std::mem::take(&mut holding.missed);
        let mut undriven = Vec::new();
        for ownership in owned {
            if holding.held.contains_key(&ownership) {
                continue;
            }
            match earlier.get(&ownership).copied() {
                Some(after) if after <= oldest => undriven.push(ownership),
                after => _ = holding.missed.insert(ownership, after.unwrap_or(next)),
            }
        }
        undriven
    }
}

impl OwnedRun {
    pub(super) fn run(&self) -> Uuid {
        self.run
    }

    pub(super) fn epoch(&self) -> i64 {
        self.epoch
    }

    /// Whether another task has the same run under the same epoch: both try to start a run with this id.
    fn is_shared(&self) -> bool {
        self.owned.0.lock().held.get(&(self.run, self.epoch)).is_some_and(|holders| *holders > 1)
    }
}

impl Drop for OwnedRun {
    fn drop(&mut self) {
        let mut holding = self.owned.0.lock();
        if let Some(holders) = holding.held.get_mut(&(self.run, self.epoch)) {
            *holders -= 1;
            if *holders == 0 {
                holding.held.remove(&(self.run, self.epoch));
                holding.tenants.remove(&(self.run, self.epoch));
            }
        }
        if !holding.cancelled.is_empty() && !holding.is_held(self.run) {
            holding.cancelled.remove(&self.run);
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut holding = self.owned.0.lock();
        holding.claims.remove(&self.number);
        if holding.claims.is_empty() && !holding.cancelled.is_empty() {
            let mut cancelled = std::mem::take(&mut holding.cancelled);
            cancelled.retain(|run, _| holding.is_held(*run));
            holding.cancelled = cancelled;
        }
    }
}

impl Runtime {
    /// The runs of a claim, each with its guard.
    pub(super) async fn claimed<Runs>(
        &self,
        claim: impl Future<Output = Result<Runs, StoreError>>,
    ) -> Result<Vec<(ClaimedRun, OwnedRun)>, StoreError>
    where
        Runs: IntoIterator<Item = ClaimedRun>,
    {
        let owned = &self.inner.driven.owned;
        let _claim = owned.claim();
        let ownership = |claimed: ClaimedRun| {
            let ownership = owned.own(claimed.run.id, claimed.run.epoch);
            (claimed, ownership)
        };
        let claimed: Vec<_> = claim.await?.into_iter().map(ownership).collect();
        if !claimed.is_empty() {
            self.inner.queue.admission.on_departure();
        }
        Ok(claimed)
    }

    /// Requeues a run without counting a crash, now or as soon as the store is available.
    pub(super) async fn requeue_uncounted(&self, ownership: OwnedRun, how: Requeue) {
        if let Err((ownership, error)) = self.try_to_requeue(ownership, how).await {
            tracing::warn!(run_id = %ownership.run(), %error, "run could not be given back yet");
            self.inner.driven.live.abandon(ownership);
        }
    }

    /// The same; if the store is unavailable, the guard is returned.
    pub(super) async fn try_to_requeue(
        &self,
        ownership: OwnedRun,
        how: Requeue,
    ) -> Result<(), (OwnedRun, StoreError)> {
        if ownership.is_shared() {
            return Ok(()); // the other task owns it
        }
        let OwnedRun { run, epoch, .. } = ownership;
        match self.inner.store.give_back(&self.inner.replica.id, run, epoch, how).await {
            Ok(_) => Ok(()),
            Err(error) => Err((ownership, error)),
        }
    }

    /// Handles a write that was refused because another replica owns the run. If the store still says that
    /// this replica owns it, an acknowledged commit is gone, and the run is requeued with what is left.
    pub(super) async fn fenced(&self, ownership: OwnedRun) {
        if !self.reclaim(&ownership, ReclaimReason::LostCommit).await {
            tracing::warn!(run_id = %ownership.run(), "run stopped: another replica owns it");
        }
    }

    /// Requeues a run as after a crash, if this replica still owns it; returns whether it did.
    pub(super) async fn reclaim(&self, ownership: &OwnedRun, reason: ReclaimReason) -> bool {
        if ownership.is_shared() {
            return false;
        }
        match self.requeue((ownership.run, ownership.epoch), reason).await {
            Ok(was_ours) => was_ours,
            Err(error) => {
                // The reconciliation finds it again.
                tracing::debug!(run_id = %ownership.run, %error, "run is reclaimed later");
                true
            }
        }
    }

    /// Requeues runs that this replica owns and does not drive.
    pub(super) async fn reconcile(&self) -> Result<(), StoreError> {
        if !self.inner.replica.takes_runs() {
            return Ok(());
        }
        let owned = self.inner.store.owned_runs(&self.inner.replica.id).await?;
        for ownership in self.inner.driven.owned.undriven(owned) {
            self.requeue(ownership, ReclaimReason::Undriven).await?;
        }
        self.inner.capacity.reservations.reconcile().await
    }

    async fn requeue(
        &self,
        (run, epoch): RunEpoch,
        reason: ReclaimReason,
    ) -> Result<bool, StoreError> {
        let crashed = Requeue::Crashed;
        let was_ours =
            self.inner.store.give_back(&self.inner.replica.id, run, epoch, crashed).await?;
        if was_ours {
            let reason = reason.as_str();
            metrics::counter!("toolloop_runs_reclaimed_total", "reason" => reason).increment(1);
            tracing::warn!(run_id = %run, epoch, reason, "run reclaimed");
        }
        Ok(was_ours)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: RunEpoch = (Uuid::nil(), 1);

    fn look(owned: &Arc<OwnedRuns>) -> Vec<RunEpoch> {
        owned.undriven(vec![RUN])
    }

    #[test]
    fn a_run_is_missed_at_two_looks() {
        let owned = Arc::<OwnedRuns>::default();
        let held = owned.own(RUN.0, RUN.1);
        assert_eq!((look(&owned), look(&owned)), (vec![], vec![]), "it is held");
        drop(held);
        assert_eq!(look(&owned), [], "it may just have ended");
        let held = owned.own(RUN.0, RUN.1);
        assert_eq!(look(&owned), [], "it is held again");
        let rival = owned.own(RUN.0, RUN.1);
        assert!(held.is_shared());
        drop(held);
        assert!(!rival.is_shared());
        assert_eq!(look(&owned), [], "one of two still holds it");
        drop(rival);
        assert_eq!((look(&owned), look(&owned)), (vec![], vec![RUN]));
        let newer = owned.own(RUN.0, 2);
        assert_eq!((look(&owned), look(&owned)), (vec![], vec![RUN]), "an epoch is no other");
        drop(newer);
    }

    #[test]
    fn runs_of_a_claim_in_progress_are_not_requeued() {
        let owned = Arc::<OwnedRuns>::default();
        let slow = owned.claim();
        assert_eq!((look(&owned), look(&owned), look(&owned)), (vec![], vec![], vec![]));
        let later = owned.claim();
        drop(slow);
        assert_eq!(look(&owned), [RUN], "a claim that began after it was missed brings others");
        drop(later);
    }

    #[test]
    fn a_run_that_is_started_is_known_to_its_tenant() {
        let owned = Arc::<OwnedRuns>::default();
        let held = owned.own_new(RUN.0, FIRST_EPOCH, "acme");
        assert!(owned.has_started(RUN.0, "acme") && !owned.has_started(RUN.0, "other"));
        drop(held);
        assert!(!owned.has_started(RUN.0, "acme"));
    }

    #[test]
    fn a_task_that_panics_lets_go() {
        let owned = Arc::<OwnedRuns>::default();
        let held = owned.own(RUN.0, RUN.1);
        let task = std::thread::spawn(move || {
            let _held = held;
            panic!("a fault of the task");
        });
        assert!(task.join().is_err());
        assert_eq!((look(&owned), look(&owned)), (vec![], vec![RUN]));
    }
}
