//! API keys.

use super::backend::Work;
use super::sql::Query;
use super::tables::Record;
use super::{ApiKeyRecord, Store, StoreError};

impl Store {
    /// Stores a key. `false`: that id exists already and is unchanged.
    pub async fn insert_key(&self, key: &ApiKeyRecord) -> Result<bool, StoreError> {
        let insert = Query::insert("api_keys", key.clone());
        let insert = insert.push(" ON CONFLICT DO NOTHING RETURNING id");
        Ok(!self.backend.write(Work::Data, insert).await?.is_empty())
    }

    /// Whether any key exists, of any tenant, revoked or not.
    pub async fn has_keys(&self) -> Result<bool, StoreError> {
        let look = Query::new("SELECT 1 FROM api_keys LIMIT 1");
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// A key by id, of any tenant, for authentication.
    pub async fn key(&self, id: &str) -> Result<Option<ApiKeyRecord>, StoreError> {
        let key = Query::new("SELECT * FROM api_keys WHERE id = :id").bind("id", id);
        let rows = self.backend.read(Work::Data, key).await?;
        rows.first().map(Record::read).transpose()
    }

    /// Revokes a key of the tenant; `false`: no such key. Revoking twice is harmless.
    pub async fn revoke_key(&self, tenant: &str, id: &str) -> Result<bool, StoreError> {
        let revoke = Query::new(
            "UPDATE api_keys SET revoked_at = COALESCE(revoked_at, {now}) \
             WHERE tenant = :tenant AND id = :id RETURNING id",
        );
        let revoke = revoke.bind("tenant", tenant).bind("id", id);
        Ok(!self.backend.write(Work::Data, revoke).await?.is_empty())
    }
}
