//! This process as one of many: its lease, its share of the queue, what it does for dead replicas,
//! and how it leaves.
//!
//! One loop claims, applies cancel requests and sweeps; notifications wake it, a timer makes it right without
//! them. The heartbeat has a thread and a connection of its own, so that busy runs cannot cost the
//! lease.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::sync::broadcast::error::RecvError;
use uuid::Uuid;

use super::{Inner, Runtime};
use crate::store::{Store, StoreError, Swept, Wakeup};

/// How often the loop looks without being woken.
const POLL: Duration = Duration::from_secs(1);
/// How often it looks for runs that are owned and not driven, at most; a sixth of the lease where
/// that is shorter.
const RECONCILE: Duration = Duration::from_secs(2);

/// How often all parked parents are looked at, in case the end of a child was not noticed.
const PARENTS: Duration = Duration::from_secs(15);

/// Opens the store that the heartbeat thread uses, on that thread.
pub type HeartbeatStore =
    Box<dyn FnOnce() -> BoxFuture<'static, Result<Arc<Store>, StoreError>> + Send>;

impl Runtime {
    /// Makes this process a replica: registers it, takes over what dead replicas left, starts the
    /// heartbeat and the loop.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be reached.
    pub async fn join(&self, heartbeat: HeartbeatStore) -> Result<(), StoreError> {
        let inner = &self.inner;
        let sent = Instant::now();
        inner.store.register_replica(&inner.owner).await?;
        inner.lease.renewed(sent);
        let mut orphans = Vec::new();
        if inner.store.kind() == "sqlite" {
            orphans = self.sweep().await?; // the process that had the file before is gone
        }
        self.start_heartbeat(heartbeat);
        let runtime = self.clone();
        tokio::spawn(async move {
            runtime.decide(orphans).await;
            runtime.run_loop().await;
        });
        if let Some(retention) = inner.settings.retention {
            tokio::spawn(self.clone().forget_after(retention));
        }
        Ok(())
    }

    /// Refuses new runs from now on and waits up to `grace` for those of this replica; what takes
    /// longer is stopped here and goes on elsewhere, or at the next start.
    pub async fn drain(&self, grace: Duration) {
        let inner = &self.inner;
        inner.draining.store(true, Ordering::Relaxed);
        inner.tasks.close();
        if tokio::time::timeout(grace, inner.tasks.wait()).await.is_err() {
            tracing::warn!(
                runs = inner.live.len(),
                "runs are still in progress; they are given back to the queue"
            );
            inner.live.lose_all();
            inner.tasks.wait().await;
        }
        inner.drained.cancel();
    }

    /// Commits what is left and gives the leases back. Nothing runs here any more.
    pub async fn leave(&self) {
        let inner = &self.inner;
        inner.writer.shutdown().await;
        inner.stop.cancel();
        if let Err(error) = inner.store.release(&inner.owner).await {
            tracing::warn!(%error, "the leases could not be given back; they expire");
        }
    }

    async fn run_loop(&self) {
        let inner = &self.inner;
        let mut hints = inner.store.wakeups();
        let mut poll = tokio::time::interval(POLL);
        poll.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut reconcile = tokio::time::interval(RECONCILE.min(inner.settings.lease / 6));
        reconcile.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut parents = tokio::time::interval(PARENTS);
        parents.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut healthy_since = Instant::now();
        loop {
            let hint = tokio::select! {
                () = inner.stop.cancelled() => return,
                _ = reconcile.tick() => {
                    if let Err(error) = self.reconcile().await {
                        tracing::debug!(%error, "runs that nothing drives are looked for later");
                    }
                    continue;
                }
                _ = parents.tick() => {
                    if let Err(error) = inner.store.answer_parents(None).await {
                        tracing::debug!(%error, "parents are told of ended children later");
                    }
                    continue;
                }
                () = inner.queue.changed.notified() => Wakeup::Queue,
                hint = hints.recv() => match hint {
                    Ok(hint) => hint,
                    Err(RecvError::Lagged(_)) => Wakeup::Resync,
                    Err(RecvError::Closed) => return,
                },
                _ = poll.tick() => Wakeup::Resync,
            };
            if let Err(error) = self.handle_wakeup(hint, healthy_since).await {
                tracing::warn!(%error, "the queue cannot be reached");
                healthy_since = Instant::now();
            }
        }
    }

    /// What fails keeps nothing else from being done; the first failure is told.
    async fn handle_wakeup(&self, hint: Wakeup, healthy_since: Instant) -> Result<(), StoreError> {
        let mut done = Ok(());
        let mut orphans = Vec::new();
        if hint == Wakeup::Resync {
            done = done.and(self.requeue_abandoned().await);
            done = done.and(self.inner.store.expire_approvals().await.map(drop));
            if healthy_since.elapsed() >= self.inner.settings.lease {
                match self.sweep().await {
                    Ok(requeued) => orphans = requeued,
                    Err(error) => done = done.and(Err(error)),
                }
            }
        }
        done = done.and(self.answer_parents().await);
        if hint != Wakeup::Queue {
            done = done.and(self.apply_cancel_requests().await);
            done = done.and(self.end_cancelled().await);
        }
        done = done.and(self.claim().await);
        if !orphans.is_empty() {
            let runtime = self.clone();
            self.inner.tasks.spawn(async move { runtime.decide(orphans).await });
        }
        done
    }

    async fn apply_cancel_requests(&self) -> Result<(), StoreError> {
        if self.inner.live.len() == 0 {
            return Ok(());
        }
        for (id, reason) in self.inner.store.cancel_requests(&self.inner.owner).await? {
            if let Some(control) = self.inner.live.get(id) {
                control.cancel(reason);
            }
        }
        Ok(())
    }

    async fn requeue_abandoned(&self) -> Result<(), StoreError> {
        let mut abandoned = self.inner.live.take_abandoned();
        while let Some(ownership) = abandoned.pop() {
            if let Err((ownership, error)) = self.try_to_requeue(ownership).await {
                abandoned.push(ownership);
                for ownership in abandoned {
                    self.inner.live.abandon(ownership);
                }
                return Err(error);
            }
        }
        Ok(())
    }

    /// Takes the runs of dead replicas; they are queued.
    async fn sweep(&self) -> Result<Vec<Uuid>, StoreError> {
        let Swept { replicas, requeued } =
            self.inner.store.sweep(&self.inner.owner, self.inner.settings.lease).await?;
        if !requeued.is_empty() {
            tracing::warn!(replicas, runs = requeued.len(), "took the runs of replicas that died");
        }
        Ok(requeued)
    }

    fn start_heartbeat(&self, open: HeartbeatStore) {
        let inner = Arc::clone(&self.inner);
        let beat = async move {
            let Inner { store, owner, stop, settings, live, lease, .. } = inner.as_ref();
            let store = open().await.unwrap_or_else(|_| Arc::clone(store));
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = tokio::time::sleep(settings.lease / 3) => {}
                }
                let sent = Instant::now();
                match store.heartbeat(owner).await {
                    Ok(true) => lease.renewed(sent),
                    Ok(false) => {
                        tracing::error!("this replica was declared dead; its runs were taken over");
                        live.lose_all();
                        match return_to_life(store.as_ref(), owner).await {
                            Ok(()) => lease.renewed(sent),
                            Err(error) => {
                                tracing::warn!(%error, "this replica cannot register again yet");
                            }
                        }
                    }
                    Err(error) => tracing::warn!(%error, "heartbeat failed"),
                }
            }
        };
        let thread = std::thread::Builder::new().name("heartbeat".into()).spawn(move || {
            match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime.block_on(beat),
                Err(error) => tracing::error!(%error, "no heartbeat: the lease will be lost"),
            }
        });
        if let Err(error) = thread {
            tracing::error!(%error, "no heartbeat: the lease will be lost");
        }
    }
}

/// Registers again after others declared this replica dead. What it took since then goes back
/// first: no task drives it any more.
async fn return_to_life(store: &Store, owner: &str) -> Result<(), StoreError> {
    store.release(owner).await?;
    store.register_replica(owner).await
}
