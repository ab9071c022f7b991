//! What a call has changed, as its tool tells it while it does so.
//!
//! It is known once the tool has come to its end: what a call that was given up in the middle still
//! did is unknown.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::event::FileChange;

/// Bytes of the diffs of one call; those beyond are left out.
const MAX_DIFFS: usize = 256 * 1024;

/// The changes of one call. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Changed(Arc<Mutex<Told>>);

#[derive(Debug, Default)]
struct Told {
    changes: Vec<FileChange>,
    diffs: usize,
    /// How many files may be changed whose change was not foreseen; none: any number.
    left: Option<u64>,
    is_complete: bool,
}

impl Changed {
    /// Bounds the files whose change was not foreseen when the call started.
    pub(super) fn within(&self, left: Option<u64>) {
        self.0.lock().left = left;
    }

    /// Whether one more such file may be changed.
    pub(super) fn may_add(&self, path: &str) -> bool {
        let told = self.0.lock();
        let changed = told.changes.iter().filter(|change| change.path != path).count() as u64;
        told.left.is_none_or(|left| changed < left)
    }

    /// Something is changed now.
    pub fn add(&self, mut change: FileChange) {
        let mut told = self.0.lock();
        told.diffs += change.diff.as_ref().map_or(0, String::len);
        if told.diffs > MAX_DIFFS && change.diff.is_some() {
            (change.diff, change.truncated) = (None, true);
        }
        told.changes.push(change);
    }

    /// Nothing will be changed any more.
    pub fn complete(&self) {
        self.0.lock().is_complete = true;
    }

    /// All changes, where they are known.
    pub(super) fn take(&self) -> Option<Vec<FileChange>> {
        let mut told = self.0.lock();
        let changes = std::mem::take(&mut told.changes);
        told.is_complete.then_some(changes)
    }
}
