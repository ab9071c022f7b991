//! Random values that all replicas share.

use super::backend::Work;
use super::sql::Query;
use super::{Store, StoreError};

impl Store {
    /// The secret of this name; `fresh` becomes the secret if there is none yet.
    pub async fn secret(&self, name: &str, fresh: Vec<u8>) -> Result<Vec<u8>, StoreError> {
        let make = Query::new(
            "INSERT INTO secrets (name, value) VALUES (:name, :value) ON CONFLICT DO NOTHING",
        );
        self.backend.write(Work::Data, make.bind("name", name).bind("value", fresh)).await?;
        let known = self.known_secret(name).await?;
        known.ok_or_else(|| StoreError::Failed("a secret is gone".to_owned()))
    }

    /// The secret of this name, if there is one.
    pub async fn known_secret(&self, name: &str) -> Result<Option<Vec<u8>>, StoreError> {
        let look = Query::new("SELECT value FROM secrets WHERE name = :name").bind("name", name);
        let rows = self.backend.read(Work::Data, look).await?;
        rows.first().map(|row| row.read("value")).transpose()
    }
}
