//! Idempotency keys: a repeated request starts nothing, but finds the run that the first one started.

use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;
use uuid::Uuid;

use super::start::StartError;
use crate::bounds::key_locks::KeyLocks;
use crate::clock;
use crate::run::Caller;
use crate::store::{IDEMPOTENCY_KEYS_KEPT, Idempotency, Store};

/// The idempotency keys of requests.
pub(super) struct IdempotencyKeys {
    store: Arc<Store>,
    locks: KeyLocks<(String, String)>,
}

impl IdempotencyKeys {
    pub(super) fn new(store: Arc<Store>) -> Self {
        Self { store, locks: KeyLocks::default() }
    }

    /// Waits for the requests of this key that came before.
    pub(super) async fn lock(&self, tenant: &str, key: &str) -> OwnedMutexGuard<()> {
        self.locks.lock((tenant.to_owned(), key.to_owned())).await
    }

    /// The run of a key.
    pub(super) async fn run_of(
        &self,
        caller: &Caller,
        idempotency: &Idempotency,
    ) -> Result<Option<Uuid>, StartError> {
        let (store, tenant) = (&self.store, &caller.tenant);
        let Some(known) = store.idempotent_run(tenant, &idempotency.key).await? else {
            return Ok(None);
        };
        let expired = clock::now() - IDEMPOTENCY_KEYS_KEPT;
        if known.created_at < expired {
            store.forget_idempotency_key(tenant, &idempotency.key, expired).await?;
            return Ok(None);
        }
        // The answer shows the run, which only its caller may see without the scope for it.
        let may_see = known.subject == caller.subject || caller.has("runs:read");
        if !may_see {
            Err(StartError::IdempotencyKeyOfOther)
        } else if known.request_hash == idempotency.request_hash {
            Ok(Some(known.id))
        } else {
            Err(StartError::IdempotencyMismatch)
        }
    }
}
