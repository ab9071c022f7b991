//! The budget of a tree of runs as the store keeps it, under the ownership of one of them.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use uuid::Uuid;

use super::store_retries::retry_while_unavailable;
use crate::engine::AppendFailed;
use crate::engine::budget::TreeBudget;
use crate::run::{Amounts, Descendants, Reserved};
use crate::store::{Ownership, Settled, Store};

pub(super) struct StoredBudget {
    pub(super) store: Arc<Store>,
    pub(super) patience: Duration,
    pub(super) tenant: String,
    /// The runs whose budgets bind it, if they have any.
    pub(super) budgets: Vec<Uuid>,
    pub(super) run: Uuid,
    pub(super) owner: Arc<str>,
    pub(super) epoch: i64,
}

impl StoredBudget {
    fn ownership(&self) -> Ownership<'_> {
        Ownership { owner: &self.owner, epoch: self.epoch }
    }
}

#[async_trait]
impl TreeBudget for StoredBudget {
    async fn reserve(&self, wanted: Amounts) -> Result<Reserved, AppendFailed> {
        let ids = (&*self.budgets, self.run);
        let reserved = retry_while_unavailable(self.patience, || {
            self.store.reserve(ids, self.ownership(), wanted)
        });
        reserved.await?.ok_or(AppendFailed::Fenced)
    }

    async fn reserve_beyond(&self, wanted: Amounts) -> Result<(), AppendFailed> {
        let ids = (&*self.budgets, self.run);
        let reserved = retry_while_unavailable(self.patience, || {
            self.store.reserve_beyond(ids, self.ownership(), wanted)
        });
        if reserved.await? { Ok(()) } else { Err(AppendFailed::Fenced) }
    }

    async fn settle(&self, spent: Amounts, ended: bool) -> Result<(), AppendFailed> {
        let ids = (&*self.budgets, self.run);
        let settled = retry_while_unavailable(self.patience, || {
            self.store.settle(ids, self.ownership(), spent, ended)
        });
        match settled.await? {
            Settled::Done => Ok(()),
            Settled::Fenced => Err(AppendFailed::Fenced),
        }
    }

    async fn descendants(&self) -> Result<Descendants, AppendFailed> {
        retry_while_unavailable(self.patience, || self.store.descendants(&self.tenant, self.run))
            .await
    }
}
