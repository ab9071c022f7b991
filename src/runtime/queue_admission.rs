//! The limit of the queue, which holds for all replicas together although they insert concurrently.
//!
//! A replica counts the queue in the store, and may then add a small share of the free places. Before it counts
//! again, it waits until no more of its inserts are in progress than it may add. Near the limit it adds one run
//! at a time. So one replica alone never exceeds the limit, and several exceed it by at most one run each.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

/// Before it counts again, a replica may add 1/64 of the free places.
const SHARE: u64 = 64;
/// With so many free places, a count is used for longer.
const FAR_FROM_FULL: u64 = 10_000;
const LIFETIME_FAR_FROM_FULL: Duration = Duration::from_secs(1);
const COUNT_LIFETIME: Duration = Duration::from_millis(100);
/// How long the queue counts as full, unless this replica claims runs from it.
const FULL_LIFETIME: Duration = Duration::from_secs(1);
/// How long a run waits near the limit, where runs enter one at a time.
const MAX_WAIT: Duration = Duration::from_secs(3);

/// The limit of the queue, on one replica.
#[derive(Debug)]
pub(super) struct QueueAdmission {
    limit: u64,
    /// Held while the queue is counted.
    turn: tokio::sync::Mutex<()>,
    state: Mutex<State>,
    settled: Notify,
}

#[derive(Debug, Default)]
struct State {
    counted: Option<Counted>,
    /// Runs that are being inserted; a count may include them or not.
    on_their_way: u64,
    /// How often this replica has claimed runs from the queue.
    departures: u64,
    /// Whether a count is in progress in the store.
    is_counting: bool,
}

#[derive(Debug, Clone, Copy)]
struct Counted {
    /// When the count began.
    at: Instant,
    trusted_until: Instant,
    /// Runs that may still enter; zero if the queue is full.
    left: Option<u64>,
}

/// It is not known whether a run may enter.
#[derive(Debug)]
struct NotCounted;

/// Why a run may not enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum QueueRefusal {
    /// The queue is full, or almost full and other runs are first.
    Full,
    /// The store does not count the queue in time.
    NotCounted,
}

/// Permission for one run to enter; dropped when the run is inserted, or will not be.
#[derive(Debug)]
pub(super) struct Admitted(Arc<QueueAdmission>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.state.lock().on_their_way -= 1;
        self.0.settled.notify_one();
    }
}

impl QueueAdmission {
    pub(super) fn new(limit: u64) -> Self {
        let (turn, state, settled) = Default::default();
        Self { limit, turn, state, settled }
    }

    /// Lets a run enter, or says why not. `count` gives the length of the queue.
    ///
    /// # Errors
    /// That of the count.
    pub(super) async fn admit<E, Count: Future<Output = Result<u64, E>>>(
        self: &Arc<Self>,
        count: impl Fn() -> Count,
    ) -> Result<Result<Admitted, QueueRefusal>, E> {
        let since = Instant::now();
        if let Ok(known) = self.known(since) {
            return Ok(known.ok_or(QueueRefusal::Full));
        }
        match tokio::time::timeout(MAX_WAIT, self.counted(since, count)).await {
            Ok(counted) => Ok(counted?.ok_or(QueueRefusal::Full)),
            Err(_) if self.state.lock().is_counting => Ok(Err(QueueRefusal::NotCounted)),
            Err(_) => Ok(Err(QueueRefusal::Full)),
        }
    }

    async fn counted<E, Count: Future<Output = Result<u64, E>>>(
        self: &Arc<Self>,
        since: Instant,
        count: impl Fn() -> Count,
    ) -> Result<Option<Admitted>, E> {
        let _turn = self.turn.lock().await;
        loop {
            if let Ok(known) = self.known(since) {
                return Ok(known);
            }
            let at = Instant::now();
            let (on_their_way, departures) = {
                let mut state = self.state.lock();
                state.is_counting = true;
                (state.on_their_way, state.departures)
            };
            let room = self.limit.saturating_sub(count().await?);
            self.state.lock().is_counting = false;
            let most = (room / SHARE).max(1).min(room);
            if most == 0 || most > on_their_way {
                let for_how_long = match room {
                    0 => FULL_LIFETIME,
                    FAR_FROM_FULL.. => LIFETIME_FAR_FROM_FULL,
                    _ => COUNT_LIFETIME,
                };
                let trusted_until = Instant::now() + for_how_long;
                let left = (most > 0).then_some(most.saturating_sub(on_their_way));
                let mut state = self.state.lock();
                if left.is_some() || state.departures == departures {
                    state.counted = Some(Counted { at, trusted_until, left });
                }
            }
            if most == 0 {
                return Ok(None);
            }
            self.fewer_than(most).await;
        }
    }

    /// Notes that runs were claimed, so that the queue may no longer be full.
    pub(super) fn on_departure(&self) {
        let mut state = self.state.lock();
        state.departures += 1;
        state.counted = state.counted.filter(|counted| counted.left.is_some());
    }

    /// Decides without counting, if possible. A count begun after `since` that found the queue full
    /// still refuses.
    fn known(self: &Arc<Self>, since: Instant) -> Result<Option<Admitted>, NotCounted> {
        let mut state = self.state.lock();
        let counted = state.counted.as_mut().ok_or(NotCounted)?;
        let is_trusted = Instant::now() < counted.trusted_until;
        match &mut counted.left {
            None if is_trusted || counted.at >= since => Ok(None),
            Some(left) if is_trusted && *left > 0 => {
                *left -= 1;
                state.on_their_way += 1;
                Ok(Some(Admitted(Arc::clone(self))))
            }
            _ => Err(NotCounted),
        }
    }

    /// Waits until fewer than `most` inserts are in progress.
    async fn fewer_than(&self, most: u64) {
        while self.state.lock().on_their_way >= most {
            self.settled.notified().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    /// So many at once, each of which takes a while to get into the queue.
    async fn flooded(replicas: &[Arc<QueueAdmission>], runs: usize, queue: &Arc<AtomicU64>) {
        let tasks = replicas.iter().cycle().take(runs).map(|admission| {
            let (admission, queue) = (Arc::clone(admission), Arc::clone(queue));
            tokio::spawn(async move {
                let count = || async {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                    Ok::<_, ()>(queue.load(Ordering::SeqCst))
                };
                if let Ok(admitted) = admission.admit(count).await.unwrap() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    queue.fetch_add(1, Ordering::SeqCst);
                    drop(admitted);
                }
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_replica_fills_the_queue_to_its_limit() {
        for limit in [0, 1, 10, 1000] {
            let (admission, queue) = (Arc::new(QueueAdmission::new(limit)), Arc::default());
            flooded(&[admission], 1500, &queue).await;
            assert_eq!(queue.load(Ordering::SeqCst), limit);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn several_pass_it_by_one_each_at_most() {
        for limit in [1, 10, 1000] {
            let replicas: Vec<_> = (0..4).map(|_| Arc::new(QueueAdmission::new(limit))).collect();
            let queue = Arc::default();
            flooded(&replicas, 1500, &queue).await;
            let length = queue.load(Ordering::SeqCst);
            assert!((limit..=limit + 4).contains(&length), "{length} of {limit}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_full_queue_is_not_counted_for_each_of_a_flood() {
        let (admission, counts) = (Arc::new(QueueAdmission::new(5)), AtomicU64::default());
        let count = || async {
            counts.fetch_add(1, Ordering::SeqCst);
            Ok::<_, ()>(5)
        };
        for _ in 0..100 {
            assert_eq!(admission.admit(count).await.unwrap().err(), Some(QueueRefusal::Full));
        }
        assert_eq!(counts.load(Ordering::SeqCst), 1);
        admission.on_departure();
        assert!(admission.admit(|| async { Ok::<_, ()>(4) }).await.unwrap().is_ok());
    }
}
