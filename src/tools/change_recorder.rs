//! What a call has changed, as its tool reports it.
//!
//! The changes are known once the tool has finished; those of a cancelled call are unknown. The files
//! of programs are inspected in any case: the result of the call waits for the inspection, and becomes
//! an error if denied files were found.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use super::file_store::ChangedPaths;
use super::guarded_work::Failure;
use crate::event::{CallFailure, FileChange};

/// Bytes of the diffs of one call; those beyond are left out.
const MAX_DIFFS: usize = 256 * 1024;
/// Changes of one call that are listed; those beyond are counted.
const MAX_CHANGES: usize = 1_000;
/// How long the result of a call waits for the inspection of the files that its programs left.
const MAX_WAIT: Duration = Duration::from_secs(10);

/// The changes of one call. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct ChangeRecorder(Arc<Mutex<ChangeLog>>);

#[derive(Debug, Default)]
struct ChangeLog {
    changes: Vec<FileChange>,
    /// How many changes there are beside the listed ones.
    omitted: u64,
    diffs: usize,
    /// How many files may be changed that the start of the call did not announce; `None`: any number.
    left: Option<u64>,
    is_complete: bool,
    is_whole: bool,
    is_read_only: bool,
    /// Closes when the inspection of the files that programs left has ended.
    inspection: Option<watch::Receiver<()>>,
    /// Objections of that inspection.
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

impl ChangeRecorder {
    /// Bounds the changed files that the start of the call did not announce.
    pub(super) fn within(&self, left: Option<u64>) {
        self.0.lock().left = left;
    }

    /// Whether one more such file may be changed.
    pub(super) fn may_add(&self, path: &str) -> bool {
        let log = self.0.lock();
        let changed = log.changes.iter().filter(|change| change.path != path).count() as u64;
        log.left.is_none_or(|left| changed < left)
    }

    /// Records a change.
    pub fn add(&self, mut change: FileChange) {
        let mut log = self.0.lock();
        log.touched.extend([change.path.clone()].into_iter().chain(change.from.clone()));
        if log.changes.len() >= MAX_CHANGES {
            log.omitted += 1;
            return;
        }
        log.diffs += change.diff.as_ref().map_or(0, String::len);
        if log.diffs > MAX_DIFFS && change.diff.is_some() {
            (change.diff, change.truncated) = (None, true);
        }
        log.changes.push(change);
    }

    /// All changes of the call are one: if a part of them is refused, all of them are.
    pub(super) fn make_atomic(&self) {
        self.0.lock().is_whole = true;
    }

    /// The recorded changes are complete.
    pub fn complete(&self) {
        self.0.lock().is_complete = true;
    }

    /// The call cannot change anything, so that no inspection is needed.
    pub(super) fn is_read_only(&self) {
        self.0.lock().is_read_only = true;
    }

    /// The files that programs left are being inspected until this channel closes.
    pub(super) fn inspected_until(&self, until: watch::Receiver<()>) {
        self.0.lock().inspection = Some(until);
    }

    /// Records an objection to files that programs left.
    pub(super) fn object(&self, objection: String) {
        self.0.lock().objections.push(objection);
    }

    /// Waits until the files that programs left are inspected.
    pub(super) async fn settled(&self) {
        let inspection = self.0.lock().inspection.clone();
        let Some(mut inspection) = inspection else { return };
        let until_closed = async { while inspection.changed().await.is_ok() {} };
        let in_time = tokio::time::timeout(MAX_WAIT, until_closed).await;
        let mut log = self.0.lock();
        if in_time.is_err() && log.inspection.take().is_some() {
            let message = "The programs did not end in time, so it is not known what they have left in the workspace.";
            log.objections.push(message.to_owned());
        }
    }

    /// The result of the call after the inspection: an error if there are objections.
    pub(super) async fn with_objections(
        &self,
        result: Result<String, Failure>,
    ) -> Result<String, Failure> {
        self.settled().await;
        let objections = std::mem::take(&mut self.0.lock().objections).join("\n");
        if objections.is_empty() {
            return result;
        }
        Err(match result {
            Ok(text) => Failure::ForModel(
                CallFailure::ToolError,
                format!("{objections}\nThe answer of the call was: {text}"),
            ),
            Err(Failure::ForModel(failure, message)) => {
                Failure::ForModel(failure, format!("{message}\n{objections}"))
            }
            Err(other) => other,
        })
    }

    /// What the call has changed, to be stored.
    pub fn touched(&self) -> ChangedPaths {
        let log = self.0.lock();
        let is_all = log.is_complete || log.is_read_only;
        let is_whole = log.is_complete && log.is_whole;
        ChangedPaths { paths: log.touched.clone(), is_all, is_whole }
    }

    /// All changes, where they are known.
    pub(super) fn take(&self) -> Changes {
        let mut log = self.0.lock();
        let changes = std::mem::take(&mut log.changes);
        let (listed, omitted) = (log.is_complete.then_some(changes), log.omitted);
        Changes { omitted: if listed.is_some() { omitted } else { 0 }, listed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_that_only_read_leave_nothing_to_be_kept() {
        let changed = ChangeRecorder::default();
        assert!(!changed.touched().is_all, "anything may have changed");
        changed.is_read_only();
        assert!(changed.touched().is_all && changed.touched().paths.is_empty());
        assert!(changed.take().listed.is_none());
    }
}
