//! The budget that a run shares with its parent and its child runs.
//!
//! What a call may take is reserved before the call, and settled afterwards by stating the run's totals.
//! [`super::run`] and [`super::state`] decide how much that is, and what a refusal means; the runtime stores
//! budgets. A run without a parent and without children has no shared budget.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use super::journal::AppendFailed;
use crate::run::{Amounts, Descendants, Reserved};
use crate::tools::requests::SharedReserve;

/// The budget of a tree of runs, for one run of the tree.
#[async_trait]
pub trait TreeBudget: Send + Sync {
    /// Reserves these amounts, if they are left.
    async fn reserve(&self, wanted: Amounts) -> Result<Reserved, AppendFailed>;

    /// Reserves these amounts, even those that are not left.
    async fn reserve_beyond(&self, wanted: Amounts) -> Result<(), AppendFailed>;

    /// States what the run has spent in total, which releases its reservations, and whether it has ended.
    async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed>;

    /// What all descendants of the run have consumed.
    async fn descendants(&self) -> Result<Descendants, AppendFailed>;
}

/// The budget that a run shares with other runs. It is closed until there is another run.
pub struct SharedBudget {
    is_open: Arc<AtomicBool>,
    tree: Arc<dyn TreeBudget>,
}

impl SharedBudget {
    pub fn new(is_open: Arc<AtomicBool>, tree: impl TreeBudget + 'static) -> Self {
        Self { is_open, tree: Arc::new(tree) }
    }

    /// Whether the run shares it with another run by now.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Notes that the run shares it with another run from now on.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Reserves these amounts, if they are left.
    pub(super) async fn reserve(&self, wanted: Amounts) -> Result<Reserved, AppendFailed> {
        self.tree.reserve(wanted).await
    }

    /// Reserves these amounts, even those that are not left.
    pub(super) async fn reserve_beyond(&self, wanted: Amounts) -> Result<(), AppendFailed> {
        self.tree.reserve_beyond(wanted).await
    }

    /// Reserves network requests one by one, for a call in progress.
    pub(super) fn requests(&self) -> SharedReserve {
        let (is_open, tree) = (Arc::clone(&self.is_open), Arc::clone(&self.tree));
        Arc::new(move || {
            if !is_open.load(Ordering::Acquire) {
                return Box::pin(std::future::ready(Some(Reserved::Granted)));
            }
            let tree = Arc::clone(&tree);
            let one = Amounts { requests: 1, ..Amounts::default() };
            Box::pin(async move { tree.reserve(one).await.ok() })
        })
    }

    /// What all descendants of the run have consumed.
    pub(super) async fn descendants(&self) -> Result<Descendants, AppendFailed> {
        self.tree.descendants().await
    }

    /// States what the run has spent in total, which releases its reservations.
    pub(super) async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed> {
        self.tree.settle(spent, ended).await
    }
}
