//! Revoking keys, and with them the runs that they have started.
//!
//! Which keys may be revoked is decided by the store, in the transaction that revokes them.

use std::time::Duration;

use super::Runtime;
use crate::store::{Revocation, Revoked, StoreError};

/// After this time, no replica accepts a revoked key any more.
const PROPAGATION_TIME: Duration = Duration::from_secs(2);

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
            self.cancel_runs_of(&keys, &by).await?;
            let runtime = self.clone();
            self.inner.driven.tasks.spawn(async move {
                tokio::time::sleep(PROPAGATION_TIME).await;
                if let Err(error) = runtime.cancel_runs_of(&keys, &by).await {
                    tracing::warn!(%error, "runs of revoked keys may still be in progress");
                }
            });
        }
        Ok(revoked)
    }

    async fn cancel_runs_of(&self, keys: &[String], subject: &str) -> Result<(), StoreError> {
        let reason = Some("The API key that started it was revoked.");
        for (tenant, run) in self.inner.store.live_runs_of(keys).await? {
            self.inner.store.request_cancel(&tenant, run, subject, reason).await?;
            if let Some(control) = self.inner.driven.live.get(run) {
                control.cancel(reason.map(str::to_owned));
            }
        }
        self.end_cancelled().await
    }
}
