//! Signed tokens that were revoked before their expiry, so that no replica accepts them any more.
//!
//! Only revoked tokens are stored. Signing tokens and their rights are decided elsewhere.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::audit::add_act;
use super::backend::Work;
use super::conflict::retry_conflicts;
use super::sql::Query;
use super::{Store, StoreError};
use crate::event::Act;

impl Store {
    /// Revokes a token, and records who did that. Deletes expired entries.
    pub async fn end_token(
        &self,
        id: Uuid,
        expires_at: DateTime<Utc>,
        act: Act,
    ) -> Result<(), StoreError> {
        retry_conflicts(|| self.try_to_end_token(id, expires_at, act.clone())).await
    }

    async fn try_to_end_token(
        &self,
        id: Uuid,
        expires_at: DateTime<Utc>,
        act: Act,
    ) -> Result<(), StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        tx.run(Query::new("DELETE FROM ended_tokens WHERE expires_at < {now}")).await?;
        let end = Query::new(
            "INSERT INTO ended_tokens (id, expires_at) VALUES (:id, :expires_at) \
             ON CONFLICT DO NOTHING RETURNING id",
        );
        if !tx.run(end.bind("id", id).bind("expires_at", expires_at)).await?.is_empty() {
            add_act(&mut *tx, act).await?;
        }
        tx.commit().await
    }

    /// Whether a token was revoked.
    pub async fn is_token_ended(&self, id: Uuid) -> Result<bool, StoreError> {
        let look = Query::new("SELECT 1 FROM ended_tokens WHERE id = :id").bind("id", id);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }
}
