//! One lock per tenant, for changes of files by callers and for deletions of workspaces: what is checked before
//! a change stays true until the change is made.
//!
//! On a shared volume it is a lock of the file system, so that it holds for all replicas. If the volume does
//! not support locks, it holds within this replica only.
//!
//! Runs do not take this lock. The short locks for the change of a single file, by runs and callers, are
//! [`crate::tools::file_locks`]; they are taken after this one.

use std::fs::{File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::{sleep, timeout};

use crate::bounds::key_locks::KeyLocks;
use crate::fairness::{WorkError, on_files};
use crate::tools::file_locks::{is_unsupported, lock_file};

/// How long to wait for the lock.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// The pause between two tries.
const PAUSE: Duration = Duration::from_millis(10);

/// The locks of all tenants.
#[derive(Debug, Default)]
pub(in crate::runtime) struct ChangeLocks {
    tenants: KeyLocks<String>,
    /// The directory of all workspaces, if it is on a shared volume.
    volume: Option<PathBuf>,
    has_no_locks: AtomicBool,
}

/// Held while files are changed.
#[derive(Debug)]
pub(in crate::runtime) struct ChangeLock {
    _volume: Option<File>,
    _here: OwnedMutexGuard<()>,
}

impl ChangeLocks {
    pub(super) fn on_volume(root: PathBuf) -> Self {
        Self { volume: Some(root), ..Self::default() }
    }

    /// Waits for the lock of a tenant.
    ///
    /// # Errors
    /// It takes too long, or the volume cannot be used.
    pub(in crate::runtime) async fn lock(&self, tenant: &str) -> io::Result<ChangeLock> {
        let locked = timeout(MAX_WAIT, self.locked(tenant)).await;
        locked.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into()))
    }

    async fn locked(&self, tenant: &str) -> io::Result<ChangeLock> {
        let here = self.tenants.lock(tenant.to_owned()).await;
        let Some(root) = &self.volume else {
            return Ok(ChangeLock { _volume: None, _here: here });
        };
        let stopped = |error: WorkError| io::Error::other(error.to_string());
        let (root, name) = (root.clone(), tenant.to_owned());
        // A blocked operation keeps the lock, so that no second one blocks a thread.
        let opened = on_files(move || (lock_file(&root, &name), here)).await;
        let (file, here) = opened.map_err(stopped)?;
        let mut held = (file?, here);
        loop {
            let tried = on_files(move || (held.0.try_lock(), held)).await;
            let (taken, back) = tried.map_err(stopped)?;
            held = back;
            match taken {
                Ok(()) => return Ok(ChangeLock { _volume: Some(held.0), _here: held.1 }),
                Err(TryLockError::WouldBlock) => sleep(PAUSE).await,
                Err(TryLockError::Error(error)) if is_unsupported(&error) => {
                    if !self.has_no_locks.swap(true, Ordering::Relaxed) {
                        tracing::warn!(
                            %error,
                            "the workspace volume has no file locks: conditional changes of files \
                             are not atomic between replicas"
                        );
                    }
                    return Ok(ChangeLock { _volume: None, _here: held.1 });
                }
                Err(TryLockError::Error(error)) => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_lock_of_a_tenant_excludes_other_replicas() {
        let root = tempfile::tempdir().unwrap();
        let replica = || ChangeLocks::on_volume(root.path().to_owned());
        let (one, other) = (replica(), replica());
        let waits = async |locks: &ChangeLocks, tenant: &str| {
            timeout(Duration::from_millis(200), locks.lock(tenant)).await.is_err()
        };
        let lock = one.lock("t").await.unwrap();
        assert!(waits(&one, "t").await);
        assert!(waits(&other, "t").await);
        drop(other.lock("u").await.unwrap());
        drop(lock);
        drop(other.lock("t").await.unwrap());
        let elsewhere = ChangeLocks::on_volume(root.path().join("missing"));
        assert!(elsewhere.lock("t").await.is_err());
        let own = ChangeLocks::default();
        let _lock = own.lock("t").await.unwrap();
        assert!(waits(&own, "t").await);
    }
}
