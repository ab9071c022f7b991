//! This process as a replica: its lease, its work on the queue, the takeover of dead replicas' runs, and its
//! shutdown.
//!
//! One loop claims runs, applies cancel requests and sweeps. Notifications wake it early; a timer makes it
//! correct without them.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use super::Runtime;
use super::driven_runs::DrivenRuns;
use super::heartbeat::HeartbeatStore;
use super::retention::Retained;
use crate::clock;
use crate::engine::Lease;
use crate::store::{Requeue, StoreError, Swept, Wakeup, Watch};

/// How often the loop runs without a notification.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often it looks for runs that are owned and not driven, at most; a sixth of the lease where
/// that is shorter.
const RECONCILE_INTERVAL: Duration = Duration::from_secs(2);
/// How often it looks at the heartbeats of the others, at most; a sixth of the lease where that is
/// shorter.
const WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// The pause before the loop restarts after a panic.
const RESTART_PAUSE: Duration = Duration::from_secs(1);
/// How often all parked parents are checked, in case the end of a child was missed, and the queue, in case the
/// clock was set back.
const PARENTS_INTERVAL: Duration = Duration::from_secs(15);
/// A log line names at most this many runs.
const MAX_NAMED: usize = 20;

/// This process as a replica.
pub(super) struct Replica {
    /// The owner id of the runs that it drives; new at each start.
    pub(super) id: Arc<str>,
    pub(super) lease: Arc<Lease>,
    draining: AtomicBool,
    /// Cancelled when runs in progress are given back.
    pub(super) gives_back: CancellationToken,
    /// Cancelled when the runs of this replica have ended or are given back.
    pub(super) drained: CancellationToken,
    /// Cancelled when nothing runs here any more.
    pub(super) stop: CancellationToken,
}

impl Replica {
    pub(super) fn new(lease: Duration) -> Self {
        Self {
            id: Uuid::now_v7().to_string().into(),
            lease: Arc::new(Lease::new(lease)),
            draining: AtomicBool::new(false),
            gives_back: CancellationToken::new(),
            drained: CancellationToken::new(),
            stop: CancellationToken::new(),
        }
    }

    /// Whether it starts no more runs.
    pub(super) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// Whether it may claim runs: it is not leaving, and its lease holds.
    pub(super) fn takes_runs(&self) -> bool {
        !self.is_draining() && self.lease.holds()
    }
}

/// The other replicas, as the loop has observed them.
struct Others {
    watch: Watch,
    /// Replicas with expired leases.
    silent: Vec<String>,
    /// Since when the store has answered.
    healthy_since: Instant,
}

impl Runtime {
    /// Makes this process a replica: registers it, takes over the runs of dead replicas, and starts the heartbeat
    /// and the loop.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be reached.
    pub async fn join(&self, heartbeat: HeartbeatStore) -> Result<(), StoreError> {
        let inner = &self.inner;
        self.register(&inner.store).await?;
        let mut orphans = Vec::new();
        if inner.store.kind() == "sqlite" {
            // The earlier process that used the SQLite file has ended.
            let gone =
                inner.store.silent_replicas(&inner.replica.id, &mut Watch::default()).await?;
            orphans = self.sweep(&gone).await?;
        }
        self.start_heartbeat(heartbeat);
        inner.workspaces.start(&inner.replica.stop).await;
        let runtime = self.clone();
        if !orphans.is_empty() {
            let runtime = self.clone();
            inner.driven.tasks.spawn(async move { runtime.decide(orphans).await });
        }
        tokio::spawn(async move {
            // Its heartbeat continues: without the loop, its runs would be neither driven nor taken over.
            while AssertUnwindSafe(runtime.run_loop()).catch_unwind().await.is_err() {
                tracing::error!("the loop of the replica panicked, and begins again");
                tokio::time::sleep(RESTART_PAUSE).await;
            }
        });
        if let Some(retention) = inner.settings.retention {
            tokio::spawn(self.clone().forget_after(retention, Retained::Runs));
        }
        if let Some(retention) = inner.settings.audit_retention {
            tokio::spawn(self.clone().forget_after(retention, Retained::Audit));
        }
        inner.housekeeping.start(&inner.replica.stop);
        Ok(())
    }

    /// Refuses new runs from now on and waits up to `grace` for the runs of this replica. Runs that take longer
    /// are stopped here, and continue on another replica or at the next start.
    pub async fn drain(&self, grace: Duration) {
        let inner = &self.inner;
        inner.replica.draining.store(true, Ordering::Relaxed);
        let DrivenRuns { live, tasks, .. } = &*inner.driven;
        tasks.close();
        if tokio::time::timeout(grace, tasks.wait()).await.is_err() {
            tracing::warn!(
                runs = live.len(),
                "runs are still in progress; they are given back to the queue"
            );
            inner.replica.gives_back.cancel(); // also stops runs that are not registered by id yet
            live.lose_all();
            tasks.wait().await;
        }
        inner.replica.drained.cancel();
    }

    /// Commits what is left and gives the leases back, after all runs have stopped.
    pub async fn leave(&self) {
        let inner = &self.inner;
        inner.writer.shutdown().await;
        inner.replica.stop.cancel();
        inner.housekeeping.finish().await;
        if let Err(error) = inner.store.release(&inner.replica.id).await {
            tracing::warn!(%error, "the leases could not be given back; they expire");
        }
        if let Err(error) = inner.capacity.reservations.release_all().await {
            tracing::warn!(%error, "reservations could not be released; they expire with the lease");
        }
    }

    async fn run_loop(&self) {
        let inner = &self.inner;
        let mut hints = inner.store.wakeups();
        let in_lease = |pause: Duration| clock::every(pause.min(inner.settings.lease / 6));
        let (mut reconcile, mut watch) = (in_lease(RECONCILE_INTERVAL), in_lease(WATCH_INTERVAL));
        let (mut poll, mut parents) = (clock::every(POLL_INTERVAL), clock::every(PARENTS_INTERVAL));
        let mut others =
            Others { watch: Watch::default(), silent: Vec::new(), healthy_since: Instant::now() };
        loop {
            let hint = tokio::select! {
                () = inner.replica.stop.cancelled() => return,
                _ = reconcile.tick() => {
                    if let Err(error) = self.reconcile().await {
                        error.log_retry("runs that nothing drives are looked for later");
                    }
                    continue;
                }
                _ = parents.tick() => {
                    if let Err(error) = inner.store.answer_parents(None).await {
                        error.log_retry("parents could not be notified of ended children; retrying");
                    }
                    if let Err(error) = inner.store.undo_clock_step().await {
                        error.log_retry("a clock that was set back is looked for later");
                    }
                    continue;
                }
                _ = watch.tick() => {
                    if !self.watch(&mut others).await {
                        continue;
                    }
                    Wakeup::Resync
                }
                () = inner.queue.changed.notified() => Wakeup::Queue,
                hint = hints.recv() => match hint {
                    Ok(Wakeup::Keys) => continue, // it concerns no run
                    Ok(hint) => hint,
                    Err(RecvError::Lagged(_)) => Wakeup::Resync,
                    Err(RecvError::Closed) => return,
                },
                _ = poll.tick() => Wakeup::Resync,
            };
            if let Err(error) = self.handle_wakeup(hint, &mut others).await {
                if inner.replica.stop.is_cancelled() {
                    return; // the store is being closed
                }
                tracing::warn!(%error, "queue maintenance failed; retrying");
                others.healthy_since = Instant::now();
            }
        }
    }

    /// Checks the heartbeats of the other replicas; whether there are runs to take over.
    async fn watch(&self, others: &mut Others) -> bool {
        let inner = &self.inner;
        match inner.store.silent_replicas(&inner.replica.id, &mut others.watch).await {
            Ok(silent) => others.silent = silent,
            Err(error) => {
                error.log_retry("heartbeats could not be read");
                *others = Others {
                    watch: Watch::default(),
                    silent: Vec::new(),
                    healthy_since: Instant::now(),
                };
            }
        }
        !others.silent.is_empty() && others.healthy_since.elapsed() >= inner.settings.lease
    }

    /// Runs every step even if one fails; returns the first error.
    async fn handle_wakeup(&self, hint: Wakeup, others: &mut Others) -> Result<(), StoreError> {
        let mut done = Ok(());
        let mut orphans = Vec::new();
        if hint != Wakeup::Queue {
            done = done.and(self.apply_cancel_requests().await);
        }
        if hint == Wakeup::Resync {
            done = done.and(self.requeue_abandoned().await);
            done = done.and(self.inner.store.expire_approvals().await.map(drop));
            if others.healthy_since.elapsed() >= self.inner.settings.lease {
                match self.sweep(&std::mem::take(&mut others.silent)).await {
                    Ok(requeued) => orphans = requeued,
                    Err(error) => done = done.and(Err(error)),
                }
            }
        }
        done = done.and(self.inner.capacity.reservations.release_unused().await);
        done = done.and(self.answer_parents().await);
        if hint != Wakeup::Queue {
            done = done.and(self.end_cancelled().await);
        }
        done = done.and(self.claim().await);
        if !orphans.is_empty() {
            let runtime = self.clone();
            self.inner.driven.tasks.spawn(async move { runtime.decide(orphans).await });
        }
        done
    }

    async fn apply_cancel_requests(&self) -> Result<(), StoreError> {
        if self.inner.driven.owned.is_empty() {
            return Ok(());
        }
        for (id, reason) in self.inner.store.cancel_requests(&self.inner.replica.id).await? {
            self.inner.driven.cancel(id, reason.as_deref());
        }
        Ok(())
    }

    async fn requeue_abandoned(&self) -> Result<(), StoreError> {
        let mut abandoned = self.inner.driven.live.take_abandoned();
        while let Some(ownership) = abandoned.pop() {
            if let Err((ownership, error)) = self.try_to_requeue(ownership, Requeue::AtOnce).await {
                abandoned.push(ownership);
                for ownership in abandoned {
                    self.inner.driven.live.abandon(ownership);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Queues the runs of dead replicas, including the silent ones given.
    async fn sweep(&self, silent: &[String]) -> Result<Vec<Uuid>, StoreError> {
        let Swept { replicas, requeued } = self.inner.store.sweep(silent).await?;
        if !requeued.is_empty() {
            let named: Vec<String> = requeued.iter().take(MAX_NAMED).map(Uuid::to_string).collect();
            let (runs, run_ids) = (requeued.len(), named.join(" "));
            tracing::warn!(replicas, runs, run_ids, "took the runs of replicas that died");
        }
        Ok(requeued)
    }
}
