//! Deletes ended runs, entries of the audit log, and quarantined files when their retention has expired.
//!
//! All replicas search for expired records; one at a time deletes them. Deletions are done in small batches with
//! pauses, so that no commit waits long for one. The batches become smaller while the store is slow. Runs in
//! progress and parked runs are never deleted.

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use tokio::time::Interval;

use super::Runtime;
use crate::clock;
use crate::store::{DeletedRun, StoreError};

/// Runs or entries that are deleted in one transaction, at most.
const BATCH: u32 = 500;
/// The pause between two batches.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest pause between two rounds; a tenth of the retention if that is shorter.
const POLL_INTERVAL: Duration = Duration::from_mins(1);

/// The kinds of records with a retention.
#[derive(Debug, Clone, Copy)]
pub(super) enum Retained {
    /// Ended runs.
    Runs,
    /// Entries of the audit log.
    Audit,
}

/// The interval of the rounds for this retention.
pub(super) fn interval(retention: Duration) -> Interval {
    clock::every((retention / 10).clamp(Duration::from_secs(1), POLL_INTERVAL))
}

impl Runtime {
    /// Deletes what is older than this, until the service stops.
    pub(super) async fn forget_after(self, retention: Duration, what: Retained) {
        let mut look = interval(retention);
        let mut batch = BATCH;
        loop {
            tokio::select! {
                () = self.inner.replica.stop.cancelled() => return,
                _ = look.tick() => {}
            }
            match self.forget(retention, what, &mut batch).await {
                Ok(0) => {}
                Ok(deleted) => tracing::info!(deleted, ?what, "deleted expired records"),
                Err(error) => {
                    tracing::warn!(%error, "expired records could not be deleted; retrying with a smaller batch");
                    batch = (batch / 2).max(1);
                }
            }
        }
    }

    async fn forget(
        &self,
        retention: Duration,
        what: Retained,
        batch: &mut u32,
    ) -> Result<u64, StoreError> {
        let retention = TimeDelta::from_std(retention).unwrap_or(TimeDelta::MAX);
        // The store's own time: a replica whose clock is ahead must not delete what has just ended.
        let now = self.inner.store.now().await?;
        let Some(before) = now.checked_sub_signed(retention) else { return Ok(0) };
        let workspaces = &self.inner.workspaces;
        let mut deleted = 0;
        while !self.inner.replica.stop.is_cancelled() {
            let asked = *batch;
            let gone = match what {
                // Otherwise their files would stay.
                Retained::Runs if !self.has_workspace() => 0,
                Retained::Runs => {
                    let trashed = Arc::default();
                    let move_to_trash =
                        |runs: &[DeletedRun]| workspaces.move_to_trash(runs, &trashed);
                    let gone = self.inner.store.delete_ended(before, asked, &move_to_trash).await;
                    workspaces.settle(trashed, gone.is_ok()).await;
                    gone?
                }
                Retained::Audit => self.audit_chain().delete(before, asked).await?,
            };
            deleted += gone;
            if gone > 0 && matches!(what, Retained::Runs) {
                workspaces.empty_bin().await;
            }
            let is_last = match what {
                Retained::Runs => gone < u64::from(asked),
                // A batch is also limited by its stretches, which may have few records.
                Retained::Audit => gone == 0,
            };
            if is_last {
                break;
            }
            *batch = (asked * 2).min(BATCH);
            tokio::time::sleep(PAUSE).await;
        }
        Ok(deleted)
    }
}
