//! A run's way to the budget that it shares with the run that started it, and with those that it
//! starts.
//!
//! What a call may take is reserved before the call is made, and settled afterwards by stating the
//! run's totals. How much that is, and what a refusal means, is decided in [`super::run`] and
//! [`super::state`]; where budgets are kept is the runtime's business. A run that starts no other
//! and was started by none has none of this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use async_trait::async_trait;

use super::journal::AppendFailed;
use crate::run::{Amounts, Descendants, Reserved};
use crate::tools::requests::SharedReserve;

/// The budget of a tree of runs, as one of them sees it.
#[async_trait]
pub trait TreeBudget: Send + Sync {
    /// Reserves so much.
    async fn reserve(&self, wanted: Amounts) -> Result<Reserved, AppendFailed>;

    /// States what the run has spent in all, which gives back what it has reserved, and whether it
    /// spends no more.
    async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed>;

    /// What the runs have taken that the run started, and those that they started.
    async fn descendants(&self) -> Result<Descendants, AppendFailed>;
}

/// The budget that a run shares with others, as soon as there are others.
pub struct SharedBudget {
    is_open: Arc<AtomicBool>,
    tree: Arc<dyn TreeBudget>,
}

impl SharedBudget {
    pub fn new(is_open: Arc<AtomicBool>, tree: impl TreeBudget + 'static) -> Self {
        Self { is_open, tree: Arc::new(tree) }
    }

    /// Whether the run shares it with another one by now.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Notes that the run shares it with another one from now on.
    pub fn open(&self) {
        self.is_open.store(true, Ordering::Release);
    }

    /// Reserves so much.
    pub(super) async fn reserve(&self, wanted: Amounts) -> Result<Reserved, AppendFailed> {
        self.tree.reserve(wanted).await
    }

    /// A way to reserve one request to the network, for what is under way.
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

    /// What the runs have taken that the run started, and those that they started.
    pub(super) async fn descendants(&self) -> Result<Descendants, AppendFailed> {
        self.tree.descendants().await
    }

    /// States what the run has spent in all, which gives back what it has reserved.
    pub(super) async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed> {
        self.tree.settle(spent, ended).await
    }
}
