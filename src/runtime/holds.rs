//! The runs that this replica answers for, from the moment it owns them until their task is over,
//! and the search for those that it owns and does not answer for.
//!
//! There are such runs where the answer to a claim was lost, a task failed, or a commit that was
//! acknowledged is gone. Nobody else would take them: this replica lives. They go back to the queue
//! as after a crash, so that one which cannot go on ends.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use super::Runtime;
use crate::store::{ClaimedRun, GivenBack, StoreError};

/// A run, and the epoch under which it is owned.
type Ownership = (Uuid, i64);

/// What is held.
#[derive(Debug, Default)]
pub(super) struct Holds(Mutex<Holding>);

#[derive(Debug, Default)]
struct Holding {
    held: HashMap<Ownership, usize>,
    /// Claims under way, by number.
    claims: BTreeSet<u64>,
    next_claim: u64,
    /// What was owned and not held when it was looked at last, with the number of the first claim
    /// that began after it was missed first.
    missed: HashMap<Ownership, u64>,
}

/// Says that this replica answers for a run, until it is dropped.
#[derive(Debug)]
pub(super) struct Hold {
    holds: Arc<Holds>,
    run: Uuid,
    epoch: i64,
}

/// A claim under way, which may yet bring runs that are owned already.
struct Claim {
    holds: Arc<Holds>,
    number: u64,
}

/// Why a run was given back as after a crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reclaimed {
    /// No task drove it.
    Undriven,
    /// The store does not know what it had acknowledged.
    LostCommit,
    /// Its end could not be written.
    Unended,
}

impl Reclaimed {
    fn as_str(self) -> &'static str {
        match self {
            Self::Undriven => "undriven",
            Self::LostCommit => "lost_commit",
            Self::Unended => "unended",
        }
    }
}

impl Holds {
    fn lock(&self) -> MutexGuard<'_, Holding> {
        self.0.lock()
    }

    pub(super) fn hold(self: &Arc<Self>, run: Uuid, epoch: i64) -> Hold {
        *self.lock().held.entry((run, epoch)).or_default() += 1;
        Hold { holds: Arc::clone(self), run, epoch }
    }

    fn claim(self: &Arc<Self>) -> Claim {
        let mut holding = self.lock();
        let number = holding.next_claim;
        holding.next_claim += 1;
        holding.claims.insert(number);
        Claim { holds: Arc::clone(self), number }
    }

    /// Of all that is owned: what is not held now and was not at the last look, and what no claim
    /// under way can still bring.
    fn unheld(&self, owned: Vec<Ownership>) -> Vec<Ownership> {
        let mut holding = self.lock();
        let holding = &mut *holding;
        let next = holding.next_claim;
        let oldest = holding.claims.first().copied().unwrap_or(next);
        let earlier = std::mem::take(&mut holding.missed);
        let mut unheld = Vec::new();
        for ownership in owned {
            if holding.held.contains_key(&ownership) {
                continue;
            }
            match earlier.get(&ownership).copied() {
                Some(after) if after <= oldest => unheld.push(ownership),
                after => _ = holding.missed.insert(ownership, after.unwrap_or(next)),
            }
        }
        unheld
    }
}

impl Hold {
    pub(super) fn run(&self) -> Uuid {
        self.run
    }

    /// Whether another task has the same run under the same epoch, as rivals for an id do.
    fn is_shared(&self) -> bool {
        self.holds.lock().held.get(&(self.run, self.epoch)).is_some_and(|holders| *holders > 1)
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut holding = self.holds.lock();
        if let Some(holders) = holding.held.get_mut(&(self.run, self.epoch)) {
            *holders -= 1;
            if *holders == 0 {
                holding.held.remove(&(self.run, self.epoch));
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.holds.lock().claims.remove(&self.number);
    }
}

impl Runtime {
    /// What a claim brings, held from the first moment.
    pub(super) async fn claimed<Runs>(
        &self,
        claim: impl Future<Output = Result<Runs, StoreError>>,
    ) -> Result<Vec<(ClaimedRun, Hold)>, StoreError>
    where
        Runs: IntoIterator<Item = ClaimedRun>,
    {
        let holds = &self.inner.holds;
        let _claim = holds.claim();
        let hold = |claimed: ClaimedRun| {
            let hold = holds.hold(claimed.run.id, claimed.run.epoch);
            (claimed, hold)
        };
        Ok(claim.await?.into_iter().map(hold).collect())
    }

    /// Gives a run back to the queue that did nothing wrong, now or as soon as the store is there.
    pub(super) async fn give_back(&self, hold: Hold, how: GivenBack) {
        if let Err((hold, error)) = self.try_to_give_back(hold, how).await {
            tracing::warn!(run_id = %hold.run(), %error, "run could not be given back yet");
            self.inner.live.abandon(hold);
        }
    }

    /// The same; where the store does not take it, the hold comes back.
    pub(super) async fn try_to_give_back(
        &self,
        hold: Hold,
        how: GivenBack,
    ) -> Result<(), (Hold, StoreError)> {
        if hold.is_shared() {
            return Ok(()); // the other one's
        }
        let Hold { run, epoch, .. } = hold;
        match self.inner.store.give_back(&self.inner.owner, run, epoch, how).await {
            Ok(_) => Ok(()),
            Err(error) => Err((hold, error)),
        }
    }

    /// A write was refused because the run belongs to another replica: believed where the store
    /// still says so. Else what the store had acknowledged is gone, and the run begins anew from
    /// what is left.
    pub(super) async fn fenced(&self, hold: Hold) {
        if !self.reclaim(&hold, Reclaimed::LostCommit).await {
            tracing::warn!(run_id = %hold.run(), "run stopped: another replica owns it");
        }
    }

    /// Gives a run back as after a crash, if it is still this replica's; whether it was.
    pub(super) async fn reclaim(&self, hold: &Hold, reason: Reclaimed) -> bool {
        if hold.is_shared() {
            return false;
        }
        match self.requeue((hold.run, hold.epoch), reason).await {
            Ok(was_ours) => was_ours,
            Err(error) => {
                // Found again when it has not been held for a while.
                tracing::debug!(run_id = %hold.run, %error, "run is reclaimed later");
                true
            }
        }
    }

    /// Looks for runs that this replica owns and does not answer for.
    pub(super) async fn reconcile(&self) -> Result<(), StoreError> {
        if self.is_draining() || !self.inner.lease.holds() {
            return Ok(());
        }
        let owned = self.inner.store.owned_runs(&self.inner.owner).await?;
        for ownership in self.inner.holds.unheld(owned) {
            self.requeue(ownership, Reclaimed::Undriven).await?;
        }
        Ok(())
    }

    async fn requeue(
        &self,
        (run, epoch): Ownership,
        reason: Reclaimed,
    ) -> Result<bool, StoreError> {
        let crashed = GivenBack::Crashed;
        let was_ours = self.inner.store.give_back(&self.inner.owner, run, epoch, crashed).await?;
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

    const RUN: Ownership = (Uuid::nil(), 1);

    fn look(holds: &Arc<Holds>) -> Vec<Ownership> {
        holds.unheld(vec![RUN])
    }

    #[test]
    fn a_run_is_missed_at_two_looks() {
        let holds = Arc::<Holds>::default();
        let held = holds.hold(RUN.0, RUN.1);
        assert_eq!((look(&holds), look(&holds)), (vec![], vec![]), "it is held");
        drop(held);
        assert_eq!(look(&holds), [], "it may just have ended");
        let held = holds.hold(RUN.0, RUN.1);
        assert_eq!(look(&holds), [], "it is held again");
        let rival = holds.hold(RUN.0, RUN.1);
        assert!(held.is_shared());
        drop(held);
        assert!(!rival.is_shared());
        assert_eq!(look(&holds), [], "one of two still holds it");
        drop(rival);
        assert_eq!((look(&holds), look(&holds)), (vec![], vec![RUN]));
        let newer = holds.hold(RUN.0, 2);
        assert_eq!((look(&holds), look(&holds)), (vec![], vec![RUN]), "an epoch is no other");
        drop(newer);
    }

    #[test]
    fn a_claim_under_way_may_bring_it() {
        let holds = Arc::<Holds>::default();
        let slow = holds.claim();
        assert_eq!((look(&holds), look(&holds), look(&holds)), (vec![], vec![], vec![]));
        let later = holds.claim();
        drop(slow);
        assert_eq!(look(&holds), [RUN], "a claim that began after it was missed brings others");
        drop(later);
    }

    #[test]
    fn a_task_that_panics_lets_go() {
        let holds = Arc::<Holds>::default();
        let held = holds.hold(RUN.0, RUN.1);
        let task = std::thread::spawn(move || {
            let _held = held;
            panic!("a fault of the task");
        });
        assert!(task.join().is_err());
        assert_eq!((look(&holds), look(&holds)), (vec![], vec![RUN]));
    }
}
