//! Who may change the files of a directory: any number of calls, or one task that brings what others have changed.
//!
//! A call that changes files is counted from before its first change until what it changed is kept, so
//! that no change is written over unnoticed in between. Who brings waits for those that are
//! under way and holds back new ones. Directories that lie in one another are one.

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
    bringing: Vec<String>,
}

/// While it is there, nothing else changes the directory.
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
    /// Begins a change, once nothing is being brought.
    pub(super) async fn lock_shared(&self, directory: &str) {
        loop {
            let changed = self.changed.notified();
            {
                let mut held = self.held.lock();
                if !overlaps(&held.bringing, directory) {
                    held.changing.push(directory.to_owned());
                    return;
                }
            }
            changed.await;
        }
    }

    /// A change has ended.
    pub(super) fn unlock_shared(&self, directory: &str) {
        take_out(&mut self.held.lock().changing, directory);
        self.changed.notify_waiters();
    }

    /// Waits until no change is under way; `None` where that takes too long.
    pub(super) async fn lock_exclusively(
        &self,
        directory: &str,
        patience: Duration,
    ) -> Option<ExclusiveLock<'_>> {
        self.held.lock().bringing.push(directory.to_owned());
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
        take_out(&mut self.locks.held.lock().bringing, &self.directory);
        self.locks.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_hours(1);

    #[tokio::test(start_paused = true)]
    async fn who_brings_is_alone_in_directories_that_lie_in_one_another() {
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
