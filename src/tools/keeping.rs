//! Who keeps the files of a workspace beside its directory, as tools and callers see it: before a
//! change counts, it is kept.
//!
//! A workspace without a keeper is kept by its directory. What a keeper does, and where, is not
//! known here.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;

use async_trait::async_trait;
use uuid::Uuid;

/// Paths whose change is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Touched {
    /// Relative to the workspace. A directory stands for all that is in it.
    pub paths: BTreeSet<String>,
    /// Whether nothing else was changed.
    pub is_all: bool,
    /// Whether nothing of it is kept where a part cannot be.
    pub is_whole: bool,
}

/// Why a change is not kept.
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

/// Who keeps the files of one workspace.
#[async_trait]
pub trait Keeper: Debug + Send + Sync {
    /// The same for a run that this replica owns under an epoch.
    fn of_run(&self, run: Uuid, epoch: i64) -> Arc<dyn Keeper>;

    /// The same for a caller, while this run is there.
    fn while_there(&self, run: Uuid) -> Arc<dyn Keeper>;

    /// Brings into the directory what others have changed.
    async fn refresh(&self) -> Result<(), NotKept>;

    /// A change of files is about to begin; waits while any are being brought. Ends with [`Keeper::ended`].
    async fn begun(&self);

    /// Nothing is changed any more; what was changed was kept, or may not have been.
    fn ended(&self, is_kept: bool);

    /// Keeps what was changed. Answers the paths that others have changed in the meantime, elsewhere: their
    /// change stays.
    async fn keep(&self, touched: Touched) -> Result<Vec<String>, NotKept>;
}

/// A change that is under way. Dropped before it is kept, it does not count.
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

    /// Keeps what was changed; the paths that others have changed in the meantime.
    ///
    /// # Errors
    /// [`NotKept`].
    pub async fn keep(mut self, touched: Touched) -> Result<Vec<String>, NotKept> {
        let is_all = touched.is_all;
        let refused = self.keeper.keep(touched).await?;
        self.is_kept = is_all && refused.is_empty();
        Ok(refused)
    }

    /// Ends it where nothing was changed.
    pub fn unchanged(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Keeping {
    fn drop(&mut self) {
        self.keeper.ended(self.is_kept);
    }
}
