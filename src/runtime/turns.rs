//! Turns of requests that mean the same run: while one of them is being started, the others wait, and
//! then find what became of it.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Mutex as Turn, OwnedMutexGuard};

/// Turns that are looked through for those that are over, at least.
const FEW: usize = 64;

/// Who has a turn, by tenant and idempotency key.
#[derive(Default)]
pub(super) struct Turns(Mutex<Taken>);

#[derive(Default)]
struct Taken {
    by_key: HashMap<(String, String), Weak<Turn<()>>>,
    /// How many there may be before those that are over are taken out.
    most: usize,
}

impl Turns {
    /// Waits for those that came before.
    pub(super) async fn of(&self, tenant: &str, key: &str) -> OwnedMutexGuard<()> {
        let turn = self.0.lock().turn((tenant.to_owned(), key.to_owned()));
        turn.lock_owned().await
    }
}

impl Taken {
    fn turn(&mut self, key: (String, String)) -> Arc<Turn<()>> {
        if self.by_key.len() >= self.most {
            self.by_key.retain(|_, turn| turn.strong_count() > 0);
            self.most = FEW.max(2 * self.by_key.len());
        }
        let known = self.by_key.get(&key).and_then(Weak::upgrade);
        known.unwrap_or_else(|| {
            let turn = Arc::<Turn<()>>::default();
            self.by_key.insert(key, Arc::downgrade(&turn));
            turn
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn one_has_the_turn_and_those_that_are_over_are_forgotten() {
        let turns = Turns::default();
        let first = turns.of("a", "k").await;
        let (other_tenant, other_key) = (turns.of("b", "k").await, turns.of("a", "l").await);
        assert!(futures::FutureExt::now_or_never(turns.of("a", "k")).is_none());
        drop(first);
        assert!(futures::FutureExt::now_or_never(turns.of("a", "k")).is_some());
        for number in 0..10 * FEW {
            drop(turns.of("a", &number.to_string()).await);
        }
        assert!(turns.0.lock().by_key.len() <= FEW);
        drop((other_tenant, other_key));
    }
}
