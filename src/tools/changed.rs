//! What a call has changed, as its tool reports it.
//!
//! It is known once the tool has come to its end: what a call that was cancelled in the middle still
//! did is unknown. Programs are looked after even then: the result of their call waits for what is
//! found, and becomes an error where that may not be.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::guarded::Failure;
use super::keeping::Touched;
use crate::event::{CallFailure, FileChange};

/// Bytes of the diffs of one call; those beyond are left out.
const MAX_DIFFS: usize = 256 * 1024;
/// Changes of one call that are listed; those beyond are counted.
const MAX_CHANGES: usize = 1_000;
/// How long the result of a call waits for what its programs have left.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The changes of one call. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct Changed(Arc<Mutex<ChangeLog>>);

#[derive(Debug, Default)]
struct ChangeLog {
    changes: Vec<FileChange>,
    /// How many changes there are beside the listed ones.
    omitted: u64,
    diffs: usize,
    /// How many files may be changed whose change was not foreseen; none: any number.
    left: Option<u64>,
    is_complete: bool,
    is_whole: bool,
    is_read_only: bool,
    /// Closed when what programs have left is looked through.
    looking: Option<watch::Receiver<()>>,
    /// What speaks against what they have left.
    objections: Vec<String>,
    /// All paths whose change was reported.
    touched: BTreeSet<String>,
}

/// What a call has changed.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// None where it is not known.
    pub(super) listed: Option<Vec<FileChange>>,
    pub(super) omitted: u64,
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
        told.touched.extend([change.path.clone()].into_iter().chain(change.from.clone()));
        if told.changes.len() >= MAX_CHANGES {
            told.omitted += 1;
            return;
        }
        told.diffs += change.diff.as_ref().map_or(0, String::len);
        if told.diffs > MAX_DIFFS && change.diff.is_some() {
            (change.diff, change.truncated) = (None, true);
        }
        told.changes.push(change);
    }

    /// What is changed is one change: where a part of it is refused, all of it is.
    pub(super) fn is_one(&self) {
        self.0.lock().is_whole = true;
    }

    /// Nothing will be changed any more.
    pub fn complete(&self) {
        self.0.lock().is_complete = true;
    }

    /// Nothing can be changed; no look at the files is needed to know that.
    pub(super) fn is_read_only(&self) {
        self.0.lock().is_read_only = true;
    }

    /// What programs have left is being looked through, until this is closed.
    pub(super) fn looked_through(&self, until: watch::Receiver<()>) {
        self.0.lock().looking = Some(until);
    }

    /// Something that programs have left speaks against the call.
    pub(super) fn object(&self, objection: String) {
        self.0.lock().objections.push(objection);
    }

    /// Waits until what programs have left is looked through.
    pub(super) async fn settled(&self) {
        let looking = self.0.lock().looking.clone();
        let Some(mut looking) = looking else { return };
        let until_closed = async { while looking.changed().await.is_ok() {} };
        let in_time = tokio::time::timeout(MAX_WAIT, until_closed).await;
        let mut told = self.0.lock();
        if in_time.is_err() && told.looking.take().is_some() {
            let message = "The programs did not end in time, so it is not known what they have left in the workspace.";
            told.objections.push(message.to_owned());
        }
    }

    /// The result of the call when what its programs have left is known.
    pub(super) async fn weighed(&self, result: Result<String, Failure>) -> Result<String, Failure> {
        self.settled().await;
        let objections = std::mem::take(&mut self.0.lock().objections).join("\n");
        if objections.is_empty() {
            return result;
        }
        Err(match result {
            Ok(text) => Failure::Told(
                CallFailure::ToolError,
                format!("{objections}\nThe answer of the call was: {text}"),
            ),
            Err(Failure::Told(failure, message)) => {
                Failure::Told(failure, format!("{message}\n{objections}"))
            }
            Err(other) => other,
        })
    }

    /// What the call has changed, to be kept.
    pub fn touched(&self) -> Touched {
        let told = self.0.lock();
        let is_all = told.is_complete || told.is_read_only;
        let is_whole = told.is_complete && told.is_whole;
        Touched { paths: told.touched.clone(), is_all, is_whole }
    }

    /// All changes, where they are known.
    pub(super) fn take(&self) -> Changes {
        let mut told = self.0.lock();
        let changes = std::mem::take(&mut told.changes);
        let (listed, omitted) = (told.is_complete.then_some(changes), told.omitted);
        Changes { omitted: if listed.is_some() { omitted } else { 0 }, listed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_only_read_leave_nothing_to_be_kept() {
        let changed = Changed::default();
        assert!(!changed.touched().is_all, "anything may have changed");
        changed.is_read_only();
        assert!(changed.touched().is_all && changed.touched().paths.is_empty());
        assert!(changed.take().listed.is_none());
    }
}
