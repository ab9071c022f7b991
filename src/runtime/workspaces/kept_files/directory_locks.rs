//! Locks of directories: shared by any number of calls that change files, exclusive for one download.
//!
//! A call holds its lock from before its first change until its changes are stored, so that no download
//! overwrites a change unnoticed. A download waits for the calls in progress and holds back new ones. A
//! lock of a directory is also one of all directories in it.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::contains;

#[derive(Debug, Default)]
pub(super) struct DirectoryLocks {
    held: Mutex<Held>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Held {
    changing: Vec<String>,
    downloading: Vec<String>,
}

/// Guard: as long as it lives, nothing else changes the directory.
pub(super) struct ExclusiveLock<'l> {
    locks: &'l DirectoryLocks,
    directory: String,
}

fn overlaps(entries: &[String], directory: &str) -> bool {
    entries.iter().any(|other| contains(other, directory) || contains(directory, other))
}

fn take_out(entries: &mut Vec<String>, directory: &str) {
    if let Some(place) = entries.iter().position(|entry| entry == directory) {
        entries.swap_remove(place);
    }
}

impl DirectoryLocks {
    /// Begins a change, once no download is in progress.
    pub(super) async fn lock_shared(&self, directory: &str) {
        loop {
            let changed = self.changed.notified();
            {
                let mut held = self.held.lock();
                if !overlaps(&held.downloading, directory) {
                    held.changing.push(directory.to_owned());
                    return;
                }
            }
            changed.await;
        }
    }

    /// Ends a change.
    pub(super) fn unlock_shared(&self, directory: &str) {
        take_out(&mut self.held.lock().changing, directory);
        self.changed.notify_waiters();
    }

    /// Waits until no change is in progress; `None` if that takes too long.
    pub(super) async fn lock_exclusively(
        &self,
        directory: &str,
        patience: Duration,
    ) -> Option<ExclusiveLock<'_>> {
        self.held.lock().downloading.push(directory.to_owned());
        let lock = ExclusiveLock { locks: self, directory: directory.to_owned() };
        let empty = async {
            loop {
                let changed = self.changed.notified();
                if !overlaps(&self.held.lock().changing, directory) {
                    return;
                }
                changed.await;
            }
        };
        timeout(patience, empty).await.ok().map(|()| lock)
    }
}

impl Drop for ExclusiveLock<'_> {
    fn drop(&mut self) {
        take_out(&mut self.locks.held.lock().downloading, &self.directory);
        self.locks.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_hours(1);

    #[tokio::test(start_paused = true)]
    async fn a_download_excludes_changes_in_nested_directories() {
        let locks = DirectoryLocks::default();
        locks.lock_shared("a/b").await;
        assert!(locks.lock_exclusively("a", LONG).await.is_none());
        assert!(locks.lock_exclusively(".", LONG).await.is_none());
        assert!(locks.lock_exclusively("a/bc", LONG).await.is_some());
        locks.lock_shared("a/b").await;
        locks.unlock_shared("a/b");
        assert!(locks.lock_exclusively("a/b/c", LONG).await.is_none());
        locks.unlock_shared("a/b");
        let lock = locks.lock_exclusively("a", LONG).await.unwrap();
        assert!(timeout(LONG, locks.lock_shared("a/b")).await.is_err());
        locks.lock_shared("b").await;
        drop(lock);
        locks.lock_shared("a/b").await;
    }
}
