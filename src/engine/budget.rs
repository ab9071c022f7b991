//! A run's way to the budget that it shares with the run that started it, and with those that it
//! starts.
//!
//! What a call may take is reserved before the call is made, and settled afterwards by stating the
//! run's totals. How much that is, and what a refusal means, is decided in [`super::run`] and
//! [`super::state`]; where budgets are kept is the runtime's business. A run that starts no other
//! and was started by none has none of this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures::future::BoxFuture;

use super::journal::AppendFailed;
use crate::run::{Amounts, Descendants, Reserved};
use crate::tools::requests::SharedReserve;

/// Resolves when so much is reserved, or refused.
pub type Reserving = BoxFuture<'static, Result<Reserved, AppendFailed>>;
/// Resolves when totals are stated.
pub type Settling = BoxFuture<'static, Result<(), AppendFailed>>;

/// Resolves to what the runs below have taken.
pub type Counting = BoxFuture<'static, Result<Descendants, AppendFailed>>;

/// The budget that a run shares with others, as soon as there are others.
pub struct SharedBudget {
    is_open: Arc<AtomicBool>,
    reserve: Arc<dyn Fn(Amounts) -> Reserving + Send + Sync>,
    settle: Box<dyn Fn(Amounts, bool) -> Settling + Send + Sync>,
    descendants: Box<dyn Fn() -> Counting + Send + Sync>,
}

impl SharedBudget {
    /// `settle` is told what the run has spent in all, and whether it spends no more.
    pub fn new(
        is_open: Arc<AtomicBool>,
        reserve: impl Fn(Amounts) -> Reserving + Send + Sync + 'static,
        settle: impl Fn(Amounts, bool) -> Settling + Send + Sync + 'static,
        descendants: impl Fn() -> Counting + Send + Sync + 'static,
    ) -> Self {
        Self {
            is_open,
            reserve: Arc::new(reserve),
            settle: Box::new(settle),
            descendants: Box::new(descendants),
        }
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
        (self.reserve)(wanted).await
    }

    /// A way to reserve one request to the network, for what is under way.
    pub(super) fn requests(&self) -> SharedReserve {
        let (is_open, reserve) = (Arc::clone(&self.is_open), Arc::clone(&self.reserve));
        Arc::new(move || {
            if !is_open.load(Ordering::Acquire) {
                return Box::pin(std::future::ready(Some(Reserved::Granted)));
            }
            let reserving = reserve(Amounts { requests: 1, ..Amounts::default() });
            Box::pin(async move { reserving.await.ok() })
        })
    }

    /// What the runs have taken that the run started, and those that they started.
    pub(super) async fn descendants(&self) -> Result<Descendants, AppendFailed> {
        (self.descendants)().await
    }

    /// States what the run has spent in all, which gives back what it has reserved.
    pub(super) async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed> {
        (self.settle)(spent, ended).await
    }
}
