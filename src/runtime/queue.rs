//! This replica's share of the queue: what may enter it, and what is taken from it.
//!
//! Runs started by a request go first: the queue gets what they leave of the room for runs. How
//! long the queue is, is counted by the store once a second and in between by what is seen here.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::lacking::LeftRuns;
use super::ownership::OwnedRun;
use super::queue_admission::QueueAdmission;
use super::slots::{RunSlot, RunSlots};
use crate::clock;
use crate::store::{Claimant, ClaimedRun, RunWrite, StoreError};

/// Runs whose time has come that are put into the line at once, at most.
const MAX_DUE: u32 = 1000;
/// How long a count is trusted.
const FRESH: Duration = Duration::from_secs(1);

/// What is known of the queue.
#[derive(Debug)]
pub(super) struct Queue {
    /// What may enter it.
    pub(super) admission: Arc<QueueAdmission>,
    /// What is left in it for others.
    pub(super) left: LeftRuns,
    /// Wakes the loop that takes runs.
    pub(super) changed: Arc<Notify>,
    /// The tenant behind whom the next claim begins.
    last_served: Mutex<String>,
    /// Whether the last look left runs behind.
    has_more: AtomicBool,
    /// When it was counted, and what is known since.
    backlog: Mutex<Option<(Instant, Backlog)>>,
    /// Child runs that have ended, or may have, and whose parents are not notified yet.
    ended_children: Mutex<Vec<Uuid>>,
}

/// What waits in the store, of all replicas and tenants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backlog {
    /// Queued runs.
    pub queued: u64,
    /// For how long the oldest of them could have been taken; zero without one.
    pub oldest: Duration,
    /// What runs wait for from outside.
    pub approvals: u64,
}

impl Queue {
    /// `limit`: runs that may wait, of all replicas together.
    pub(super) fn new(limit: u64) -> Self {
        Self {
            admission: Arc::new(QueueAdmission::new(limit)),
            left: LeftRuns::default(),
            changed: Arc::default(),
            last_served: Mutex::default(),
            has_more: AtomicBool::default(),
            backlog: Mutex::default(),
            ended_children: Mutex::default(),
        }
    }

    /// A run was put in.
    pub(super) fn grew(&self) {
        if let Some((_, backlog)) = self.backlog.lock().as_mut() {
            backlog.queued += 1;
        }
        self.changed.notify_one();
    }

    fn shrank(&self, by: u64) {
        if let Some((_, backlog)) = self.backlog.lock().as_mut() {
            backlog.queued = backlog.queued.saturating_sub(by);
        }
    }

    /// Child runs have ended, or may have.
    pub(super) fn children_ended(&self, children: impl IntoIterator<Item = Uuid>) {
        let mut ended = self.ended_children.lock();
        ended.extend(children);
        if !ended.is_empty() {
            self.changed.notify_one();
        }
    }

    /// What a run wrote is durable; its end may be what others in the queue wait for.
    pub(super) fn on_written(&self, write: &RunWrite) {
        if write.events.last().is_none_or(|event| event.what.ending().is_none()) {
            return;
        }
        if write.origin.is_child {
            self.children_ended([write.run_id]);
        }
        if write.origin.session_id.is_some() {
            self.changed.notify_one(); // whose turn it is now may wait in the queue
        }
    }

    /// A worker is free again.
    pub(super) fn worker_freed(&self) {
        if self.has_more.load(Ordering::Relaxed) {
            self.changed.notify_one();
        }
    }
}

impl Runtime {
    /// Takes back runs that were begun before, wherever that was: what bounds the beginning of runs
    /// from the queue does not make them wait.
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
            let leaves = inner.queue.left.excluded_from_claims();
            let claimant = Claimant { owner: &inner.replica.id, leaves: &leaves };
            let claimed = self.claimed(inner.store.claim_begun(claimant, limit)).await?;
            let has_more = claimed.len() == room;
            self.resume_all(claimed, RunSlots::free);
            if !has_more {
                return Ok(());
            }
        }
    }

    /// Whether this process takes runs that others have started: one without workers does not.
    pub(super) fn serves_the_queue(&self) -> bool {
        self.inner.settings.queue_workers > 0
    }

    /// Goes on with runs that were begun before, of the trees that this process has begun.
    async fn resume_own(&self) -> Result<(), StoreError> {
        let (inner, capacity) = (&self.inner, &self.inner.capacity);
        let room = capacity.claimable(capacity.slots.free_slots(), inner.driven.live.len());
        let roots = inner.driven.own_roots();
        if room == 0 || roots.is_empty() || !inner.replica.takes_runs() {
            return Ok(());
        }
        for run in inner.store.begun_in_trees(&roots).await?.into_iter().take(room) {
            let Some(slot) = capacity.slots.free() else { break };
            let runtime = self.clone();
            inner.driven.tasks.spawn(async move { runtime.take_over(run, Some(slot)).await });
        }
        Ok(())
    }

    /// Goes on with runs from the queue, each in a task and a slot of its own.
    fn resume_all(
        &self,
        claimed: Vec<(ClaimedRun, OwnedRun)>,
        slot: fn(&RunSlots) -> Option<RunSlot>,
    ) {
        let inner = &self.inner;
        inner.queue.shrank(claimed.len() as u64);
        for (claimed, ownership) in claimed {
            tracing::debug!(run_id = %claimed.run.id, epoch = claimed.run.epoch, "run claimed");
            let slot = slot(&inner.capacity.slots);
            let runtime = self.clone();
            inner.driven.tasks.spawn(async move { runtime.resume(claimed, ownership, slot).await });
        }
    }

    /// What waits, as of a second ago.
    ///
    /// # Errors
    /// [`StoreError`] where the store has to be asked and does not answer.
    pub async fn backlog(&self) -> Result<Backlog, StoreError> {
        let known = *self.inner.queue.backlog.lock();
        if let Some((_, backlog)) = known.filter(|(at, _)| at.elapsed() < FRESH) {
            return Ok(backlog);
        }
        let at = Instant::now();
        let queued = self.inner.store.queued().await?;
        let since = self.inner.store.oldest_queued().await?;
        let oldest = since.and_then(|since| (clock::now() - since).to_std().ok());
        let approvals = self.inner.store.pending_approvals().await?;
        let backlog = Backlog { queued, oldest: oldest.unwrap_or_default(), approvals };
        *self.inner.queue.backlog.lock() = Some((at, backlog));
        Ok(backlog)
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

    /// Takes from the queue what there is room for.
    pub(super) async fn claim(&self) -> Result<(), StoreError> {
        if !self.has_workspace() {
            return Ok(());
        }
        self.claim_begun().await?;
        let (inner, capacity) = (&self.inner, &self.inner.capacity);
        inner.store.end_delays(MAX_DUE).await?;
        loop {
            let room = capacity.claimable(capacity.slots.room(), inner.driven.live.len());
            if room == 0 {
                inner.queue.has_more.store(true, Ordering::Relaxed); // there may be
            }
            if room == 0 || !inner.replica.takes_runs() {
                return Ok(());
            }
            let mut last_served = inner.queue.last_served.lock().clone();
            let limit = u32::try_from(room).unwrap_or(u32::MAX);
            let mut running = inner.store.running(inner.settings.run_limits).await?;
            let leaves = inner.queue.left.excluded_from_claims();
            let claimant = Claimant { owner: &inner.replica.id, leaves: &leaves };
            let claim = inner.store.claim_within(claimant, limit, &mut last_served, &mut running);
            let claimed = self.claimed(claim).await?;
            let has_more = claimed.len() == room;
            *inner.queue.last_served.lock() = last_served;
            inner.queue.has_more.store(has_more || running.has_held_back(), Ordering::Relaxed);
            self.resume_all(claimed, RunSlots::for_worker);
            if !has_more {
                return Ok(());
            }
        }
    }
}
