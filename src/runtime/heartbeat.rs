//! The heartbeat: a thread and a connection of its own, so that busy runs cannot cost the lease.
//!
//! A heartbeat that fails, or is not answered within a sixth of the lease, is repeated at once on a
//! new connection, so that a half-open connection does not cost the lease. A replica that was
//! declared dead stops all its runs and registers again.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::{Instant, timeout};

use super::Runtime;
use crate::store::{Store, StoreError};
use crate::{clock, jitter};

/// The random part of a pause, so that replicas that were started together do not beat together.
const JITTER: f64 = 0.1;
/// The least timeout of a heartbeat: a new connection needs some time, however short the lease.
const LEAST_PATIENCE: Duration = Duration::from_millis(500);

/// Opens the heartbeat's own store, on the heartbeat thread.
pub type HeartbeatStore =
    Box<dyn Fn() -> BoxFuture<'static, Result<Arc<Store>, StoreError>> + Send>;

impl Runtime {
    /// Registers this process as a replica.
    pub(super) async fn register(&self, store: &Store) -> Result<(), StoreError> {
        let inner = &self.inner;
        let sent = Instant::now();
        clock::sync(store.register_replica(&inner.replica.id, inner.settings.lease).await?, sent);
        inner.replica.lease.renew(sent);
        Ok(())
    }

    pub(super) fn start_heartbeat(&self, open: HeartbeatStore) {
        let runtime = self.clone();
        let beat = async move {
            tokio::select! {
                () = runtime.inner.replica.stop.cancelled() => {}
                () = runtime.beat(open) => {}
            }
        };
        #[cfg(test)]
        if super::simulation::is_running() {
            tokio::spawn(beat);
            return;
        }
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

    async fn beat(&self, open: HeartbeatStore) {
        let lease = self.inner.settings.lease;
        let patience = LEAST_PATIENCE.max(lease / 6);
        #[cfg(test)]
        let patience = super::simulation::patience_of_heartbeats(patience);
        let mut own = None;
        let mut failures = 0_u32;
        loop {
            tokio::time::sleep(match failures {
                0 => jitter::shortened(lease / 3, JITTER),
                1 => Duration::ZERO,
                _ => jitter::shortened(lease / 12, JITTER),
            })
            .await;
            if own.is_none() {
                own = timeout(patience, open()).await.ok().and_then(Result::ok);
            }
            let store = own.as_ref().unwrap_or(&self.inner.store);
            let beaten = timeout(patience, self.beat_once(store)).await;
            match beaten
                .unwrap_or_else(|_| Err(StoreError::Unavailable("no answer in time".into())))
            {
                Ok(()) => failures = 0,
                Err(error) => {
                    failures = failures.saturating_add(1);
                    tracing::warn!(%error, failures, "heartbeat failed");
                }
            }
        }
    }

    async fn beat_once(&self, store: &Store) -> Result<(), StoreError> {
        let inner = &self.inner;
        let sent = Instant::now();
        if let Some(now) = store.heartbeat(&inner.replica.id).await? {
            clock::sync(now, sent);
            inner.replica.lease.renew(sent);
            return Ok(());
        }
        tracing::error!("this replica was declared dead; its runs were taken over");
        inner.capacity.reservations.lose_all();
        inner.driven.live.lose_all();
        // First give back what was claimed since then: no task drives it any more.
        store.release(&inner.replica.id).await?;
        self.register(store).await
    }
}
