//! The queue, as seen by this replica: which runs may enter it, and which runs are claimed from it.
//!
//! Runs started by requests go first; queued runs get the remaining slots. The store counts the queue at most
//! once a second; in between, this replica adds what it has queued and claimed itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::missing_requirements::DeferredRuns;
use super::ownership::OwnedRun;
use super::queue_admission::QueueAdmission;
use super::slots::{RunSlot, RunSlots};
use crate::bounds::shared_answer::SharedAnswer;
use crate::clock;
use crate::store::{Claimant, ClaimedRun, RunWrite, StoreError};

/// Delayed runs that become due at a time, at most.
const MAX_DUE: u32 = 1000;
/// How long a count of the queue is used.
const COUNT_LIFETIME: Duration = Duration::from_secs(1);

/// The state of the queue, as known here.
#[derive(Debug)]
pub(super) struct Queue {
    /// Limits the runs that enter it.
    pub(super) admission: Arc<QueueAdmission>,
    /// Runs that this replica leaves to others.
    pub(super) deferred: DeferredRuns,
    /// Wakes the loop that claims runs.
    pub(super) changed: Arc<Notify>,
    /// The tenant after which the next claim begins.
    last_served: Mutex<String>,
    /// Whether the last claim may have left runs in the queue.
    has_more: AtomicBool,
    /// When it was counted, and the count with later changes.
    backlog: Mutex<Option<(Instant, Backlog)>>,
    /// The count of those who ask at the same time.
    count: SharedAnswer<Result<Backlog, StoreError>>,
    /// Child runs that have ended, or may have, and whose parents are not queued yet.
    ended_children: Mutex<Vec<Uuid>>,
}

/// The waiting runs of all replicas and tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// Queued runs.
    pub queued: u64,
    /// For how long the oldest of them has been due; zero without one.
    pub oldest: Duration,
    /// Pending requests of parked runs.
    pub approvals: u64,
}

impl Queue {
    /// `limit`: runs that may wait, of all replicas together.
    pub(super) fn new(limit: u64) -> Self {
        Self {
            admission: Arc::new(QueueAdmission::new(limit)),
            deferred: DeferredRuns::default(),
            changed: Arc::default(),
            last_served: Mutex::default(),
            has_more: AtomicBool::default(),
            backlog: Mutex::default(),
            count: SharedAnswer::default(),
            ended_children: Mutex::default(),
        }
    }

    /// Notes that a run was queued.
    pub(super) fn note_queued(&self) {
        if let Some((_, backlog)) = self.backlog.lock().as_mut() {
            backlog.queued += 1;
        }
        self.changed.notify_one();
    }

    fn known_backlog(&self) -> Option<Backlog> {
        let known = *self.backlog.lock();
        known.filter(|(at, _)| at.elapsed() < COUNT_LIFETIME).map(|(_, backlog)| backlog)
    }

    /// The backlog as it is known, or as it is counted. Metrics need no key: those who ask at the same time share
    /// one count, or its failure.
    async fn backlog(
        &self,
        count: impl Future<Output = Result<Backlog, StoreError>>,
    ) -> Result<Backlog, StoreError> {
        if let Some(known) = self.known_backlog() {
            return Ok(known);
        }
        let counted = self.count.ask(async {
            let at = Instant::now();
            let backlog = count.await?;
            *self.backlog.lock() = Some((at, backlog));
            Ok(backlog)
        });
        let counted = counted.await?;
        Ok(self.known_backlog().unwrap_or(counted)) // with later changes
    }

    fn note_claimed(&self, by: u64) {
        if let Some((_, backlog)) = self.backlog.lock().as_mut() {
            backlog.queued = backlog.queued.saturating_sub(by);
        }
    }

    /// Notes child runs that have ended, or may have.
    pub(super) fn children_ended(&self, children: impl IntoIterator<Item = Uuid>) {
        let mut ended = self.ended_children.lock();
        ended.extend(children);
        if !ended.is_empty() {
            self.changed.notify_one();
        }
    }

    /// Handles a durable write of a run. The end of a run may allow queued runs to begin.
    pub(super) fn on_written(&self, write: &RunWrite) {
        if write.events.last().is_none_or(|event| event.what.ending().is_none()) {
            return;
        }
        if write.origin.is_child {
            self.children_ended([write.run_id]);
        }
        if write.origin.session_id.is_some() {
            self.changed.notify_one(); // the next run of the session may be queued
        }
    }

    /// Notes that a worker is free again.
    pub(super) fn worker_freed(&self) {
        if self.has_more.load(Ordering::Relaxed) {
            self.changed.notify_one();
        }
    }
}

impl Runtime {
    /// Claims runs that were begun before, on any replica. The limits for beginning queued runs do not apply
    /// to them.
    async fn claim_begun(&self) -> Result<(), StoreError> {
        let (inner, capacity) = (&self.inner, &self.inner.capacity);
        if !self.serves_the_queue() {
            return self.resume_own().await;
        }
        loop {
            let room = capacity.claimable(capacity.slots.free_slots(), inner.driven.live.len());
            if room == 0 || !inner.replica.takes_runs() {
                return Ok(());
            }
            let limit = u32::try_from(room).unwrap_or(u32::MAX);
            let excluded = inner.queue.deferred.excluded_from_claims();
            let claimant = Claimant { owner: &inner.replica.id, excluded: &excluded };
            let claimed = self.claimed(inner.store.claim_begun(claimant, limit)).await?;
            let has_more = claimed.len() == room;
            self.resume_all(claimed, RunSlots::try_acquire);
            if !has_more {
                return Ok(());
            }
        }
    }

    /// Whether this process claims runs of other processes; one without workers does not.
    pub(super) fn serves_the_queue(&self) -> bool {
        self.inner.settings.queue_workers > 0
    }

    /// Resumes runs of the trees that this process has begun.
    async fn resume_own(&self) -> Result<(), StoreError> {
        let (inner, capacity) = (&self.inner, &self.inner.capacity);
        let room = capacity.claimable(capacity.slots.free_slots(), inner.driven.live.len());
        let roots = inner.driven.own_roots();
        if room == 0 || roots.is_empty() || !inner.replica.takes_runs() {
            return Ok(());
        }
        for run in inner.store.begun_in_trees(&roots).await?.into_iter().take(room) {
            let Some(slot) = capacity.slots.try_acquire() else { break };
            let runtime = self.clone();
            inner.driven.tasks.spawn(async move { runtime.take_over(run, Some(slot)).await });
        }
        Ok(())
    }

    /// Resumes runs from the queue, each in its own task and slot.
    fn resume_all(
        &self,
        claimed: Vec<(ClaimedRun, OwnedRun)>,
        slot: fn(&RunSlots) -> Option<RunSlot>,
    ) {
        let inner = &self.inner;
        inner.queue.note_claimed(claimed.len() as u64);
        for (claimed, ownership) in claimed {
            tracing::debug!(run_id = %claimed.run.id, epoch = claimed.run.epoch, "run claimed");
            let slot = slot(&inner.capacity.slots);
            let runtime = self.clone();
            inner.driven.tasks.spawn(async move { runtime.resume(claimed, ownership, slot).await });
        }
    }

    /// The waiting runs, at most a second old.
    ///
    /// # Errors
    /// [`StoreError`] if the store is needed and does not answer.
    pub async fn backlog(&self) -> Result<Backlog, StoreError> {
        let store = &self.inner.store;
        let count = async {
            let queued = store.queued().await?;
            let since = store.oldest_queued().await?;
            let oldest = since.and_then(|since| (clock::now() - since).to_std().ok());
            let approvals = store.pending_approvals().await?;
            Ok::<_, StoreError>(Backlog { queued, oldest: oldest.unwrap_or_default(), approvals })
        };
        self.inner.queue.backlog(count).await
    }

    /// Queues the parked parents of child runs that have ended.
    pub(super) async fn answer_parents(&self) -> Result<(), StoreError> {
        let queue = &self.inner.queue;
        let ended = std::mem::take(&mut *queue.ended_children.lock());
        if ended.is_empty() {
            return Ok(());
        }
        match self.inner.store.answer_parents(Some(&ended)).await {
            Ok(_) => Ok(()),
            Err(error) => {
                queue.ended_children.lock().extend(ended); // tried again at the next wakeup
                Err(error)
            }
        }
    }

    /// Claims as many queued runs as there are free slots.
    pub(super) async fn claim(&self) -> Result<(), StoreError> {
        if !self.has_workspace() {
            return Ok(());
        }
        self.claim_begun().await?;
        let (inner, capacity) = (&self.inner, &self.inner.capacity);
        inner.store.end_delays(MAX_DUE).await?;
        loop {
            let room =
                capacity.claimable(capacity.slots.free_worker_slots(), inner.driven.live.len());
            if room == 0 {
                inner.queue.has_more.store(true, Ordering::Relaxed); // there may be
            }
            if room == 0 || !inner.replica.takes_runs() {
                return Ok(());
            }
            let mut last_served = inner.queue.last_served.lock().clone();
            let limit = u32::try_from(room).unwrap_or(u32::MAX);
            let mut running = inner.store.running(inner.settings.run_limits).await?;
            let excluded = inner.queue.deferred.excluded_from_claims();
            let claimant = Claimant { owner: &inner.replica.id, excluded: &excluded };
            let claim = inner.store.claim_within(claimant, limit, &mut last_served, &mut running);
            let claimed = self.claimed(claim).await;
            *inner.queue.last_served.lock() = last_served;
            let claimed = claimed?;
            let has_more = claimed.len() == room;
            inner.queue.has_more.store(has_more || running.has_held_back(), Ordering::Relaxed);
            self.resume_all(claimed, RunSlots::for_worker);
            if !has_more {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use futures::future::join_all;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn those_who_ask_at_the_same_time_share_one_count() {
        let (queue, counted) = (Queue::new(1), AtomicUsize::new(0));
        let backlog = Backlog { queued: 7, oldest: Duration::ZERO, approvals: 2 };
        let count = || async {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::task::yield_now().await;
            Ok(backlog)
        };
        for counts in 1..=2 {
            let all = join_all((0..100).map(|_| queue.backlog(count()))).await;
            assert!(all.into_iter().all(|known| known.is_ok_and(|known| known == backlog)));
            assert_eq!(counted.load(Ordering::Relaxed), counts);
            tokio::time::advance(COUNT_LIFETIME).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn those_who_wait_for_a_count_share_its_failure() {
        let (queue, counted) = (Queue::new(1), AtomicUsize::new(0));
        let count = || async {
            counted.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_secs(5)).await;
            Err(StoreError::Unavailable("away".to_owned()))
        };
        for counts in 1..=2 {
            let all = join_all((0..100).map(|_| queue.backlog(count()))).await;
            assert!(all.iter().all(|asked| matches!(asked, Err(StoreError::Unavailable(_)))));
            assert_eq!(counted.load(Ordering::Relaxed), counts);
        }
    }
}
