//! Connections beyond `max_connections`, which are reserved for probes.
//!
//! If all of them are taken, the one that has waited longest for its client makes room for the next
//! client, so a silent client does not block others. The bytes that a client has sent are read
//! before its connection is closed, so that a probe is answered however many others come.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use super::timing::ConnectionTiming;

/// Connections that are open beyond the limit.
const RESERVE: usize = 64;
/// How long a connection that was asked to make room may take before another one is asked, too.
const MAX_WAIT: Duration = Duration::from_millis(10);

/// The connections of the reserve.
#[derive(Debug)]
pub(super) struct Reserve {
    places: Arc<Semaphore>,
    /// The oldest first.
    open: Mutex<VecDeque<Arc<Eviction>>>,
}

/// How a connection learns that it has to make room.
#[derive(Debug)]
pub(super) struct Eviction {
    pub(super) timing: Arc<ConnectionTiming>,
    /// It ends as soon as none of its requests is open.
    pub(super) when_idle: CancellationToken,
    /// It ends at once.
    pub(super) now: CancellationToken,
}

/// A place in the reserve.
#[derive(Debug)]
pub(super) struct ReservedPlace {
    pub(super) eviction: Arc<Eviction>,
    reserve: Arc<Reserve>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for ReservedPlace {
    fn drop(&mut self) {
        self.reserve.open.lock().retain(|other| !Arc::ptr_eq(other, &self.eviction));
    }
}

impl Reserve {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            places: Arc::new(Semaphore::new(RESERVE)),
            open: Mutex::new(VecDeque::with_capacity(RESERVE)),
        })
    }

    /// Takes a place; if all are taken, another connection is closed for it.
    pub(super) async fn place(self: &Arc<Self>) -> ReservedPlace {
        let permit = loop {
            if let Ok(permit) = Arc::clone(&self.places).try_acquire_owned() {
                break permit;
            }
            self.evict();
            let freed = Arc::clone(&self.places).acquire_owned();
            if let Ok(Ok(permit)) = tokio::time::timeout(MAX_WAIT, freed).await {
                break permit;
            }
        };
        let eviction = Arc::new(Eviction {
            timing: Arc::new(ConnectionTiming::new()),
            when_idle: CancellationToken::new(),
            now: CancellationToken::new(),
        });
        self.open.lock().push_back(Arc::clone(&eviction));
        ReservedPlace { eviction, reserve: Arc::clone(self), _permit: permit }
    }

    /// Asks the oldest connection without a request in progress to make room, else the oldest one.
    fn evict(&self) {
        let open = self.open.lock();
        let idle = open
            .iter()
            .find(|eviction| !eviction.when_idle.is_cancelled() && !eviction.timing.is_answering());
        match (idle, open.front()) {
            (Some(idle), _) => idle.when_idle.cancel(),
            (None, Some(oldest)) => oldest.now.cancel(),
            (None, None) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::edge::server::timing::OpenRequest;

    #[tokio::test(start_paused = true)]
    async fn the_connection_that_has_waited_longest_makes_room_first() {
        let reserve = Reserve::new();
        let mut places = Vec::new();
        for _ in 0..RESERVE {
            places.push(reserve.place().await);
        }
        let answered = OpenRequest::new(&places[0].eviction.timing);
        let (evicted, next) = (Arc::clone(&places[1].eviction), Arc::clone(&reserve));
        let next = tokio::spawn(async move { next.place().await });
        evicted.when_idle.cancelled().await;
        drop(places.remove(1));
        places.push(next.await.unwrap());
        assert!(!places[0].eviction.when_idle.is_cancelled());

        let all: Vec<_> =
            places.iter().map(|place| OpenRequest::new(&place.eviction.timing)).collect();
        let (oldest, next) = (Arc::clone(&places[0].eviction), Arc::clone(&reserve));
        let next = tokio::spawn(async move { next.place().await });
        oldest.now.cancelled().await;
        drop((answered, all, places.remove(0)));
        next.await.unwrap();
        assert!(places.iter().all(|place| !place.eviction.when_idle.is_cancelled()));
    }
}
