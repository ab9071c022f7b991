//! One start at a time for an idempotency key, and the like: requests that come in the meantime wait,
//! and then find what became of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Mutex as KeyLock, OwnedMutexGuard};

/// Unused locks are removed once the table has more than this many.
const PRUNE_ABOVE: usize = 64;

/// Locks by tenant and idempotency key. A lock exists while a request holds it or waits for it.
#[derive(Debug, Default)]
pub(super) struct KeyLocks(Mutex<Table>);

#[derive(Debug, Default)]
struct Table {
    by_key: HashMap<(String, String), Weak<KeyLock<()>>>,
    /// The size at which unused locks are removed.
    full: usize,
}

impl KeyLocks {
    /// Waits for the requests of this key that came before.
    pub(super) async fn lock(&self, tenant: &str, key: &str) -> OwnedMutexGuard<()> {
        let lock = self.0.lock().get_or_insert((tenant.to_owned(), key.to_owned()));
        lock.lock_owned().await
    }
}

impl Table {
    fn get_or_insert(&mut self, key: (String, String)) -> Arc<KeyLock<()>> {
        if self.by_key.len() >= self.full {
            self.by_key.retain(|_, lock| lock.strong_count() > 0);
            self.full = PRUNE_ABOVE.max(2 * self.by_key.len());
        }
        let known = self.by_key.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let lock = Arc::<KeyLock<()>>::default();
            self.by_key.insert(key, Arc::downgrade(&lock));
            lock
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_key_is_held_once_and_forgotten_when_nothing_holds_it() {
        let locks = KeyLocks::default();
        let first = locks.lock("a", "k").await;
        let (other_tenant, other_key) = (locks.lock("b", "k").await, locks.lock("a", "l").await);
        assert!(futures::FutureExt::now_or_never(locks.lock("a", "k")).is_none());
        drop(first);
        assert!(futures::FutureExt::now_or_never(locks.lock("a", "k")).is_some());
        for number in 0..10 * PRUNE_ABOVE {
            drop(locks.lock("a", &number.to_string()).await);
        }
        assert!(locks.0.lock().by_key.len() <= PRUNE_ABOVE);
        drop((other_tenant, other_key));
    }
}
