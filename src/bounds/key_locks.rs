//! One lock for each key, and other things by key that are forgotten when nothing uses them.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

use tokio::sync::{Mutex, OwnedMutexGuard};

/// Unused values are removed once the table has more than this many.
const PRUNE_ABOVE: usize = 64;

/// Values by key. A value exists while something outside of the table holds it.
#[derive(Debug)]
pub(super) struct ByKey<K, V>(parking_lot::Mutex<Table<K, V>>);

#[derive(Debug)]
struct Table<K, V> {
    values: HashMap<K, Weak<V>>,
    /// The size at which unused values are removed.
    full: usize,
}

impl<K, V> Default for ByKey<K, V> {
    fn default() -> Self {
        Self(parking_lot::Mutex::new(Table { values: HashMap::new(), full: PRUNE_ABOVE }))
    }
}

impl<K: Eq + Hash, V> ByKey<K, V> {
    pub(super) fn get_or_insert_with(&self, key: K, new: impl FnOnce() -> V) -> Arc<V> {
        let mut table = self.0.lock();
        if table.values.len() >= table.full {
            table.values.retain(|_, value| value.strong_count() > 0);
            table.full = PRUNE_ABOVE.max(2 * table.values.len());
        }
        if let Some(known) = table.values.get(&key).and_then(Weak::upgrade) {
            return known;
        }
        let value = Arc::new(new());
        table.values.insert(key, Arc::downgrade(&value));
        value
    }
}

/// A lock for each key. A lock exists while something holds it or waits for it.
#[derive(Debug)]
pub struct KeyLocks<K>(ByKey<K, Mutex<()>>);

impl<K> Default for KeyLocks<K> {
    fn default() -> Self {
        Self(ByKey::default())
    }
}

impl<K: Eq + Hash> KeyLocks<K> {
    /// Waits until all that came before with this key have released its lock.
    pub async fn lock(&self, key: K) -> OwnedMutexGuard<()> {
        let lock = self.0.get_or_insert_with(key, Mutex::default);
        lock.lock_owned().await
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_key_is_held_once_and_forgotten_when_nothing_holds_it() {
        let locks = KeyLocks::default();
        let key = |name: &str| ("a", name.to_owned());
        let (first, other) = (locks.lock(key("k")).await, locks.lock(key("l")).await);
        assert!(locks.lock(key("k")).now_or_never().is_none());
        drop(first);
        assert!(locks.lock(key("k")).now_or_never().is_some());
        for number in 0..10 * PRUNE_ABOVE {
            drop(locks.lock(key(&number.to_string())).await);
        }
        assert!(locks.0.0.lock().values.len() <= PRUNE_ABOVE);
        drop(other);
    }
}
