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
pub(super) struct Gate {
    inside: Mutex<Inside>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Inside {
    changing: Vec<String>,
    bringing: Vec<String>,
}

/// While it is there, nothing else changes the directory.
pub(super) struct Alone<'g> {
    gate: &'g Gate,
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

impl Gate {
    /// Begins a change, once nothing is being brought.
    pub(super) async fn enter(&self, directory: &str) {
        loop {
            let changed = self.changed.notified();
            {
                let mut inside = self.inside.lock();
                if !overlaps(&inside.bringing, directory) {
                    inside.changing.push(directory.to_owned());
                    return;
                }
            }
            changed.await;
        }
    }

    /// A change has ended.
    pub(super) fn leave(&self, directory: &str) {
        take_out(&mut self.inside.lock().changing, directory);
        self.changed.notify_waiters();
    }

    /// Waits until no change is under way; `None` where that takes too long.
    pub(super) async fn alone(&self, directory: &str, patience: Duration) -> Option<Alone<'_>> {
        self.inside.lock().bringing.push(directory.to_owned());
        let alone = Alone { gate: self, directory: directory.to_owned() };
        let empty = async {
            loop {
                let changed = self.changed.notified();
                if !overlaps(&self.inside.lock().changing, directory) {
                    return;
                }
                changed.await;
            }
        };
        timeout(patience, empty).await.ok().map(|()| alone)
    }
}

impl Drop for Alone<'_> {
    fn drop(&mut self) {
        take_out(&mut self.gate.inside.lock().bringing, &self.directory);
        self.gate.changed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_hours(1);

    #[tokio::test(start_paused = true)]
    async fn who_brings_is_alone_in_directories_that_lie_in_one_another() {
        let gate = Gate::default();
        gate.enter("a/b").await;
        assert!(gate.alone("a", LONG).await.is_none());
        assert!(gate.alone(".", LONG).await.is_none());
        assert!(gate.alone("a/bc", LONG).await.is_some());
        gate.enter("a/b").await;
        gate.leave("a/b");
        assert!(gate.alone("a/b/c", LONG).await.is_none());
        gate.leave("a/b");
        let alone = gate.alone("a", LONG).await.unwrap();
        assert!(timeout(LONG, gate.enter("a/b")).await.is_err());
        gate.enter("b").await;
        drop(alone);
        gate.enter("a/b").await;
    }
}
