//! Authentication modes, and a short-lived cache of API keys.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::TryRecvError;

use super::problem::Problem;
use crate::clock;
use crate::run::Caller;
use crate::runtime::jwt::IdentityProvider;
use crate::runtime::{LoginRefusal, Runtime, keys};
use crate::store::{ApiKeyRecord, Store, Wakeup};

/// How requests are authenticated.
pub enum Auth {
    /// Not at all: every caller is the administrator of the tenant `default`. Loopback only.
    None,
    /// Not at all: every request comes from this caller, in the same process.
    Local(Arc<Caller>),
    ApiKeys,
    /// By API keys, and by tokens of an identity provider.
    ApiKeysAndJwts(Arc<IdentityProvider>),
}

impl Auth {
    /// Whether requests identify their caller.
    pub(crate) fn is_required(&self) -> bool {
        matches!(self, Self::ApiKeys | Self::ApiKeysAndJwts(_))
    }
}

/// Caches API keys, so that not every request queries the store. A revocation takes effect at once
/// on this replica, and on others as soon as they get its hint; if the hint is lost, within
/// [`KeyCache::TTL`]. Unknown keys are not cached, so that unauthenticated requests cannot fill the
/// cache.
pub(crate) struct KeyCache {
    entries: Mutex<Entries>,
    local: Arc<Caller>,
}

struct Entries {
    keys: HashMap<String, CachedKey>,
    /// Incremented by every revocation, so that a concurrent read of the old row is not cached.
    revocations: u64,
    /// Hints of all replicas, which are applied when the entries are used.
    hints: broadcast::Receiver<Wakeup>,
}

impl Entries {
    fn apply_hints(&mut self) {
        loop {
            match self.hints.try_recv() {
                Ok(Wakeup::Queue | Wakeup::Cancel(_)) => {}
                Ok(Wakeup::Keys | Wakeup::Resync) | Err(TryRecvError::Lagged(_)) => {
                    self.revocations += 1;
                    self.keys.clear();
                }
                Err(TryRecvError::Empty | TryRecvError::Closed) => return,
            }
        }
    }
}

#[derive(Clone)]
pub(super) struct CachedKey {
    pub(super) key: Arc<ApiKeyRecord>,
    pub(super) caller: Arc<Caller>,
    read_at: Instant,
    /// Whether its use was recorded since it was read.
    is_noted: Arc<AtomicBool>,
}

impl CachedKey {
    /// Why it cannot be used with this secret.
    pub(super) fn refusal(&self, secret: &str) -> Option<LoginRefusal> {
        if keys::verify(secret, &self.key.secret_hash) {
            self.revoked_or_expired()
        } else {
            Some(LoginRefusal::WrongSecret)
        }
    }

    /// Why it cannot be used any more.
    pub(super) fn revoked_or_expired(&self) -> Option<LoginRefusal> {
        if self.key.revoked_at.is_some() {
            Some(LoginRefusal::Revoked)
        } else {
            self.key
                .expires_at
                .is_some_and(|expiry| expiry <= clock::now())
                .then_some(LoginRefusal::Expired)
        }
    }

    pub(super) fn note_use(&self, runtime: &Runtime) {
        if !self.is_noted.swap(true, Ordering::Relaxed) {
            runtime.logins().note_key_use(&self.key.id);
        }
    }
}

impl KeyCache {
    /// How long a revocation on another replica may go unnoticed where its hint is lost.
    const TTL: Duration = Duration::from_secs(1);
    /// Above this size, expired entries are removed.
    const EVICT_ABOVE: usize = 1024;

    pub(crate) fn new(hints: broadcast::Receiver<Wakeup>) -> Self {
        let entries = Entries { keys: HashMap::new(), revocations: 0, hints };
        Self { entries: Mutex::new(entries), local: Arc::new(Caller::local()) }
    }

    /// The caller of unauthenticated requests.
    pub(super) fn local(&self) -> Arc<Caller> {
        Arc::clone(&self.local)
    }

    pub(crate) fn invalidate(&self, id: &str) {
        let mut entries = self.lock();
        entries.revocations += 1;
        entries.keys.remove(id);
    }

    pub(super) async fn find(&self, store: &Store, id: &str) -> Result<Option<CachedKey>, Problem> {
        let revocations = {
            let entries = self.lock();
            match entries.keys.get(id) {
                Some(cached) if cached.read_at.elapsed() < Self::TTL => {
                    return Ok(Some(cached.clone()));
                }
                _ => entries.revocations,
            }
        };
        let read_at = Instant::now();
        let Some(key) = store.key(id).await? else { return Ok(None) };
        let caller = Caller {
            subject: key.id.clone(),
            tenant: key.tenant.clone(),
            scopes: key.scopes.clone(),
        };
        let cached = CachedKey {
            key: Arc::new(key),
            caller: Arc::new(caller),
            read_at,
            is_noted: Arc::default(),
        };
        let mut entries = self.lock();
        if entries.revocations == revocations {
            if entries.keys.len() >= Self::EVICT_ABOVE {
                entries.keys.retain(|_, cached| cached.read_at.elapsed() < Self::TTL);
            }
            entries.keys.insert(id.to_owned(), cached.clone());
        }
        Ok(Some(cached))
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        let mut entries = self.entries.lock();
        entries.apply_hints();
        entries
    }
}
