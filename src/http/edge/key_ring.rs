//! How callers prove who they are, and the API keys that were read a moment ago.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::problem::Problem;
use crate::run::Caller;
use crate::store::{ApiKeyRecord, Store};

/// How callers prove who they are.
pub enum Auth {
    /// Not at all: everybody is the administrator of the tenant `default`. For loopback only.
    None,
    /// Not at all: everybody is this caller, who holds the service in its own process.
    Local(Arc<Caller>),
    /// By an API key.
    ApiKeys,
}

/// Keys that were read from the store a moment ago, so that a busy caller does not cost a query a
/// request. A revocation counts at once on this replica and within [`KeyRing::FRESH`] on others.
/// Only keys that exist are kept: strangers cannot fill it.
pub(crate) struct KeyRing {
    read: Mutex<RecentlyRead>,
    local: Arc<Caller>,
}

#[derive(Default)]
struct RecentlyRead {
    keys: HashMap<String, CachedKey>,
    /// Rises with every revocation, so that a read which began before one is not kept.
    revocations: u64,
}

#[derive(Clone)]
pub(super) struct CachedKey {
    pub(super) key: Arc<ApiKeyRecord>,
    pub(super) caller: Arc<Caller>,
    read_at: Instant,
}

impl KeyRing {
    /// How long another replica's revocation may go unnoticed.
    const FRESH: Duration = Duration::from_secs(1);
    /// Above this many, those that are not fresh are dropped.
    const TIDY_ABOVE: usize = 1024;

    /// An empty ring.
    pub(crate) fn new() -> Self {
        Self { read: Mutex::default(), local: Arc::new(Caller::local()) }
    }

    /// The caller where nobody is asked for a key.
    pub(super) fn local(&self) -> Arc<Caller> {
        Arc::clone(&self.local)
    }

    /// Forgets a key that was just revoked.
    pub(crate) fn forget(&self, id: &str) {
        let mut read = self.lock();
        read.revocations += 1;
        read.keys.remove(id);
    }

    pub(super) async fn find(&self, store: &Store, id: &str) -> Result<Option<CachedKey>, Problem> {
        let revocations = {
            let read = self.lock();
            match read.keys.get(id) {
                Some(known) if known.read_at.elapsed() < Self::FRESH => {
                    return Ok(Some(known.clone()));
                }
                _ => read.revocations,
            }
        };
        let read_at = Instant::now();
        let Some(key) = store.key(id).await? else { return Ok(None) };
        let caller = Caller {
            subject: key.id.clone(),
            tenant: key.tenant.clone(),
            scopes: key.scopes.clone(),
        };
        let known = CachedKey { key: Arc::new(key), caller: Arc::new(caller), read_at };
        let mut read = self.lock();
        if read.revocations == revocations {
            if read.keys.len() >= Self::TIDY_ABOVE {
                read.keys.retain(|_, known| known.read_at.elapsed() < Self::FRESH);
            }
            read.keys.insert(id.to_owned(), known.clone());
        }
        Ok(Some(known))
    }

    fn lock(&self) -> MutexGuard<'_, RecentlyRead> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
