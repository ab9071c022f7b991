//! Garbage collection: contents without a path, tombstones of deleted paths, and copies that have not been used
//! for a while.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::TimeDelta;
use parking_lot::MutexGuard;
use tokio_util::sync::CancellationToken;

use super::{KeptFiles, Tenant, contains, known_beneath};
use crate::store::StoreError;
use crate::tools::Workspace;

/// The pause before the first collection; short, so that a service that is often restarted collects, too.
const FIRST_LOOK: Duration = Duration::from_secs(5);
/// The pause between two collections.
const POLL_INTERVAL: Duration = Duration::from_mins(1);
/// Contents that are deleted at a time.
const BATCH: u32 = 100;
/// How long a content without a path is kept: longer than an upload in progress can take.
const GRACE: TimeDelta = TimeDelta::hours(2);
/// How long unused copies are kept.
const IDLE: Duration = Duration::from_mins(10);

impl KeptFiles {
    /// Deletes what is not needed any more, until the service stops.
    pub(in crate::runtime) async fn collect(self: Arc<Self>, stop: CancellationToken) {
        let mut pause = FIRST_LOOK;
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => {}
            }
            pause = POLL_INTERVAL;
            if !self.is_ready() {
                continue;
            }
            let kept = Arc::clone(&self);
            let _ = tokio::task::spawn_blocking(move || kept.forget_idle()).await;
            if let Err(error) = self.delete_unused(&stop).await {
                tracing::warn!(%error, "unneeded objects could not be deleted; retrying");
            }
            let root = self.root.clone();
            let _ = tokio::task::spawn_blocking(move || Workspace::empty_bin(&root)).await;
        }
    }

    async fn delete_unused(&self, stop: &CancellationToken) -> Result<(), StoreError> {
        let Some(before) = self.store.now().await?.checked_sub_signed(GRACE) else { return Ok(()) };
        while !stop.is_cancelled() {
            let unused = self.store.unused_objects(before, BATCH).await?;
            let mut gone = Vec::new();
            if let Err(error) = self.is_mounted().await {
                tracing::warn!(%error, "objects could not be deleted; retrying");
                break;
            }
            for object in &unused {
                match self.objects.delete(object).await {
                    Ok(()) => gone.push(object.clone()),
                    Err(error) => {
                        tracing::warn!(%error, object, "an object is not deleted yet");
                        break;
                    }
                }
            }
            if self.is_mounted().await.is_err() {
                break; // what was not there may come back
            }
            self.store.forget_objects(&gone).await?;
            if gone.len() < BATCH as usize {
                break;
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        self.store.purge_deleted_files(before).await
    }

    /// Removes copies that have not been used for a while.
    fn forget_idle(&self) {
        let tenants: Vec<Arc<Tenant>> = self.tenants.lock().values().cloned().collect();
        for tenant in tenants {
            // Opening a directory must not wait for files that are being placed.
            let Some(placement_lock) = tenant.placement_lock.try_lock() else { continue };
            let mut scopes = tenant.scopes.lock();
            let idle: Vec<String> = scopes
                .iter()
                .filter(|(directory, scope)| {
                    // The tenant's own directory is not deleted.
                    *directory != "."
                        && scope.used.lock().elapsed() > IDLE
                        && scopes.values().all(|other| {
                            !other.overlaps(directory) || Arc::strong_count(other) == 1
                        })
                })
                .map(|(directory, _)| directory.clone())
                .collect();
            for directory in idle {
                scopes.retain(|other, _| !contains(&directory, other));
                self.drop_copies(&tenant, &directory, &placement_lock);
                scopes.values().filter(|it| it.overlaps(&directory)).for_each(|it| {
                    it.is_stale.store(true, Ordering::SeqCst);
                });
            }
        }
    }

    /// Removes the copies of a directory that is being deleted; whether there were any.
    pub(in crate::runtime) fn drop_directory(&self, name: &str, directory: &str) -> bool {
        let tenant = self.tenants.lock().get(name).cloned();
        let Some(tenant) = tenant else { return false };
        let placement_lock = tenant.placement_lock.lock();
        let scopes = tenant.scopes.lock();
        let is_dropped = self.drop_copies(&tenant, directory, &placement_lock);
        // If the deletion is not committed, they are downloaded again.
        scopes.values().filter(|scope| scope.overlaps(directory)).for_each(|scope| {
            scope.is_stale.store(true, Ordering::SeqCst);
        });
        is_dropped
    }

    fn drop_copies(&self, tenant: &Tenant, directory: &str, _: &MutexGuard<'_, ()>) -> bool {
        let mut known = tenant.known.lock();
        for path in known_beneath(&known, directory) {
            known.remove(&path);
        }
        Workspace::move_to_trash(&self.root, &tenant.name, directory).unwrap_or_else(|error| {
            tracing::warn!(%error, "unneeded copies of files could not be removed");
            false
        })
    }
}
