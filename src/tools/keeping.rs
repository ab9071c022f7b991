//! The interface to the durable store of a workspace's files, if that is not its directory: a change
//! takes effect only once the keeper has stored it.
//!
//! Without a keeper, the directory itself is the durable store. How a keeper stores files is not known
//! here.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use uuid::Uuid;

/// Changed paths that are to be stored.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Relative to the workspace. A directory stands for all that is in it.
    pub paths: BTreeSet<String>,
    /// Whether these are all changes.
    pub is_all: bool,
    /// Whether the changes are atomic: none is stored if one of them cannot be.
    pub is_whole: bool,
}

/// Why a change was not stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotKept {
    /// The object store or the database was unavailable for as long as a run waits.
    #[error("the workspace files cannot be synchronised at the moment")]
    Unavailable,
    /// Another replica owns the run.
    #[error("another replica owns the run")]
    Fenced,
    /// The run of which the files are was deleted.
    #[error("the run or session of the files was deleted")]
    Orphaned,
}

/// The durable store of one workspace's files.
#[async_trait]
pub trait Keeper: Debug + Send + Sync {
    /// The same for a run that this replica owns under an epoch.
    fn of_run(&self, run: Uuid, epoch: i64) -> Arc<dyn Keeper>;

    /// The same for a caller, while this run is there.
    fn while_there(&self, run: Uuid) -> Arc<dyn Keeper>;

    /// Copies changes of other replicas into the directory.
    async fn refresh(&self) -> Result<(), NotKept>;

    /// Must be called before files are changed; waits for a running [`Keeper::refresh`]. Ends with
    /// [`Keeper::ended`].
    async fn begun(&self);

    /// Must be called after the change; `is_kept` says whether it was certainly stored.
    fn ended(&self, is_kept: bool);

    /// Stores the changes. Returns the paths that another replica has changed in the meantime: its
    /// changes stay.
    async fn keep(&self, touched: Touched) -> Result<Vec<String>, NotKept>;
}

/// A change in progress. If it is dropped before [`Keeping::keep`], the change is not stored.
#[derive(Debug)]
pub struct Keeping {
    keeper: Arc<dyn Keeper>,
    is_kept: bool,
}

impl Keeping {
    pub(super) async fn by(keeper: &Arc<dyn Keeper>) -> Self {
        keeper.begun().await;
        Self { keeper: Arc::clone(keeper), is_kept: false }
    }

    /// Stores the changes; returns the paths that another replica has changed in the meantime.
    ///
    /// # Errors
    /// [`NotKept`].
    pub async fn keep(mut self, touched: Touched) -> Result<Vec<String>, NotKept> {
        let is_all = touched.is_all;
        let refused = self.keeper.keep(touched).await?;
        self.is_kept = is_all && refused.is_empty();
        Ok(refused)
    }

    /// Ends the change if nothing was changed.
    pub fn unchanged(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.keeper.ended(self.is_kept);
    }
}
