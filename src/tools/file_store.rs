//! The interface to the durable store of a workspace's files, if that is not its directory: a change
//! takes effect only once this store has it.
//!
//! Without one, the directory itself is the durable store. How a store works is not known
//! here.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use uuid::Uuid;

/// Changed paths that are to be stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ChangedPaths {
    /// Relative to the workspace. A directory stands for all that is in it.
    pub paths: BTreeSet<String>,
    /// Whether these are all changes.
    pub is_all: bool,
    /// Whether the changes are atomic: none is stored if one of them cannot be.
    pub is_whole: bool,
}

/// Why a change was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotStored {
    /// The object store or the database was unavailable for as long as a run waits.
    #[error("the workspace files cannot be synchronised at the moment")]
    Unavailable,
    /// Another replica owns the run.
    #[error("another replica owns the run")]
    Fenced,
    /// The run that the files belong to was deleted.
    #[error("the run or session of the files was deleted")]
    Orphaned,
}

/// The durable store of one workspace's files.
#[async_trait]
pub trait FileStore: Debug + Send + Sync {
    /// The same for a run that this replica owns under an epoch.
    fn of_run(&self, run: Uuid, epoch: i64) -> Arc<dyn FileStore>;

    /// The same for a caller. Changes are refused once this run is deleted.
    fn while_run_exists(&self, run: Uuid) -> Arc<dyn FileStore>;

    /// Copies changes of other replicas into the directory.
    async fn refresh(&self) -> Result<(), NotStored>;

    /// Must be called before files are changed; waits for a running [`FileStore::refresh`]. Ends with
    /// [`FileStore::end`].
    async fn begin(&self);

    /// Must be called after the change; `is_stored` says whether it was certainly stored.
    fn end(&self, is_stored: bool);

    /// Stores the changes. Returns the paths that another replica has changed in the meantime; its
    /// changes stay.
    async fn save(&self, changes: ChangedPaths) -> Result<Vec<String>, NotStored>;
}

/// A change in progress. If it is dropped before [`ChangeInProgress::save`], the change is not stored.
#[derive(Debug)]
pub struct ChangeInProgress {
    store: Arc<dyn FileStore>,
    is_stored: bool,
}

impl ChangeInProgress {
    pub(super) async fn begin(store: &Arc<dyn FileStore>) -> Self {
        store.begin().await;
        Self { store: Arc::clone(store), is_stored: false }
    }

    /// Stores the changes; returns the paths that another replica has changed in the meantime.
    ///
    /// # Errors
    /// [`NotStored`].
    pub async fn save(mut self, changes: ChangedPaths) -> Result<Vec<String>, NotStored> {
        let is_all = changes.is_all;
        let refused = self.store.save(changes).await?;
        self.is_stored = is_all && refused.is_empty();
        Ok(refused)
    }

    /// Ends the change if nothing was changed.
    pub fn unchanged(mut self) {
        self.is_stored = true;
    }
}

impl Drop for ChangeInProgress {
    fn drop(&mut self) {
        self.store.end(self.is_stored);
    }
}
