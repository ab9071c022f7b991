//! The ids of child runs. They are a function of the call, so that a parent that repeats the call after a crash
//! finds its child; and of a secret in the store, so that no caller can choose the id of a future child for its
//! own run.

use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::keys::{self, KeyError};
use crate::run::Delegation;
use crate::store::Store;

/// The name of the secret in the store.
const SECRET: &str = "child_ids";

/// Makes the ids of child runs.
#[derive(Clone)]
pub struct ChildIds(Vec<u8>);

impl ChildIds {
    /// The ids of this store, the same on all replicas and after every restart.
    ///
    /// # Errors
    /// The store failed, or there are no random numbers.
    pub async fn of(store: &Store) -> Result<Self, KeyError> {
        Ok(Self(store.secret(SECRET, keys::random::<32>()?.to_vec()).await?))
    }

    #[cfg(test)]
    pub fn known() -> Self {
        Self(vec![7; 32])
    }

    /// The id of the child run of a call.
    pub(super) fn of_call(&self, effect_key: &str) -> Uuid {
        let secret = Sha256::new().chain_update(&self.0).chain_update("child\0").finalize();
        let hash = Sha256::new().chain_update(secret).chain_update(effect_key).finalize();
        let mut bytes = [0; 16];
        bytes.iter_mut().zip(&hash[..]).for_each(|(byte, hashed)| *byte = *hashed);
        uuid::Builder::from_custom_bytes(bytes).into_uuid()
    }

    /// The id of the child run of a dispatched call, if it delegates to another agent.
    pub(super) fn of_tool(&self, tool: &str, effect_key: &str) -> Option<Uuid> {
        Delegation::of_tool(tool).map(|_| self.of_call(effect_key))
    }
}
