//! Revoking keys, and with them the runs that they have started.
//!
//! Which keys may be revoked is decided by the store, in the transaction that revokes them.

use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use tokio::sync::oneshot;
use uuid::Uuid;

use super::Runtime;
use crate::store::{Revocation, Revoked, StoreError};

/// After this time, no replica accepts a revoked key any more.
const PROPAGATION_TIME: Duration = Duration::from_secs(2);
/// Runs that are asked to cancel at the same time.
const AT_ONCE: usize = 4;

impl Runtime {
    /// Revokes keys, and where `cancels_runs` says so cancels what they have started.
    pub async fn revoke_keys(
        &self,
        what: Revocation<'_>,
        cancels_runs: bool,
    ) -> Result<Revoked, StoreError> {
        let revoked = self.inner.store.revoke_keys(what).await?;
        if let (true, Revoked::Done(keys)) = (cancels_runs, &revoked) {
            let keys: Vec<String> = keys.iter().map(|key| key.id.clone()).collect();
            let by = what.subject.to_owned();
            let (sender, asked) = oneshot::channel();
            let runtime = self.clone();
            // A task, because there may be many runs, and their client may disconnect meanwhile.
            self.inner.driven.tasks.spawn(async move {
                let _ = sender.send(runtime.cancel_runs_of(&keys, &by).await);
                tokio::time::sleep(PROPAGATION_TIME).await;
                if let Err(error) = runtime.cancel_runs_of(&keys, &by).await {
                    tracing::warn!(%error, "runs of revoked keys may still be in progress");
                }
            });
            let panicked = |_| Err(StoreError::Failed("cancelling runs panicked".to_owned()));
            asked.await.unwrap_or_else(panicked)?;
        }
        Ok(revoked)
    }

    /// Cancels the runs of these keys. The first failure is returned when the others are cancelled, or the store is
    /// unavailable.
    async fn cancel_runs_of(&self, keys: &[String], subject: &str) -> Result<(), StoreError> {
        let live = self.inner.store.live_runs_of(keys).await?;
        let asked = stream::iter(live)
            .map(|(tenant, run)| async move { self.cancel_for_key(&tenant, run, subject).await });
        let mut asked = std::pin::pin!(asked.buffer_unordered(AT_ONCE));
        let mut outcome = Ok(());
        while let Some(next) = asked.next().await {
            let is_over = matches!(next, Err(StoreError::Unavailable(_)));
            outcome = outcome.and(next);
            if is_over {
                break;
            }
        }
        self.end_cancelled().await?;
        outcome
    }

    async fn cancel_for_key(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
    ) -> Result<(), StoreError> {
        let reason = Some("The API key that started it was revoked.");
        self.inner.store.request_cancel(tenant, run, subject, reason).await?;
        if let Some(control) = self.inner.driven.live.get(run) {
            control.cancel(reason.map(str::to_owned));
        }
        Ok(())
    }
}
