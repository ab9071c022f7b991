//! The journal of a run, as the loop sees it: append now, wait for durability later.
//!
//! It keeps the order of entries and knows which are not durable yet. The runtime stores them;
//! [`super::run`] decides when they must be durable.

use std::collections::VecDeque;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::Instant;

use crate::event::{AuditRecord, Event};
use crate::run::{RunStatus, Totals};

/// Events that are appended and become durable together.
#[derive(Debug)]
pub struct Entry {
    /// Consecutive events, at least one.
    pub events: Vec<Event>,
    /// Audit records of calls in them.
    pub audit: Vec<AuditRecord>,
    /// The totals after the last event.
    pub totals: Totals,
    /// The status in which the run is parked and given back with these events, if it is.
    pub park: Option<RunStatus>,
}

/// Why an entry is not durable. The run must not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendFailed {
    /// Another replica owns the run.
    #[error("another replica owns the run")]
    Fenced,
    /// The run was asked to cancel before it ended: its end was not stored, all before it was.
    #[error("the run was asked to cancel before it ended")]
    Cancelling,
    /// A new run's id is taken.
    #[error("the run id is taken")]
    IdTaken,
    /// The store refused the entry, and would refuse it again.
    #[error("the store refused the entry")]
    Refused,
    /// The store did not come back in time.
    #[error("the store is unavailable")]
    Unavailable,
}

/// Resolves when an entry is durable.
pub type Ack = BoxFuture<'static, Result<(), AppendFailed>>;

/// Stores the entries of one run.
pub trait Append: Send {
    /// Appends an entry; does not block.
    fn append(&mut self, entry: Entry) -> Ack;
}

/// The journal of one run.
pub struct Journal {
    appender: Box<dyn Append>,
    /// Entries that may not be durable yet, and when they were appended.
    in_flight: VecDeque<(Instant, Ack)>,
}

impl Journal {
    pub fn new(appender: impl Append + 'static) -> Self {
        Self { appender: Box::new(appender), in_flight: VecDeque::new() }
    }

    /// Appends an entry without waiting for durability.
    pub fn append(&mut self, entry: Entry) {
        self.in_flight.push_back((Instant::now(), self.appender.append(entry)));
    }

    /// Waits until all entries are durable.
    pub async fn settle(&mut self) -> Result<(), AppendFailed> {
        self.settle_older_than(Duration::ZERO).await
    }

    /// Waits until all entries that were appended at least `age` ago are durable.
    pub async fn settle_older_than(&mut self, age: Duration) -> Result<(), AppendFailed> {
        while let Some((since, ack)) = self.in_flight.front_mut()
            && since.elapsed() >= age
        {
            let stored = ack.await;
            self.in_flight.pop_front();
            stored?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;
    use tokio::sync::oneshot;

    use super::*;

    /// Entries become durable when the test says so.
    #[derive(Default)]
    struct Slow(VecDeque<oneshot::Receiver<()>>);

    impl Append for Slow {
        fn append(&mut self, _: Entry) -> Ack {
            let durable = self.0.pop_front().unwrap();
            Box::pin(async { durable.await.map_err(|_| AppendFailed::Unavailable) })
        }
    }

    fn entry() -> Entry {
        Entry { events: Vec::new(), audit: Vec::new(), totals: Totals::default(), park: None }
    }

    #[tokio::test(start_paused = true)]
    async fn only_entries_of_some_age_are_waited_for() {
        let age = Duration::from_millis(100);
        let (stored, slow): (Vec<_>, VecDeque<_>) = (0..2).map(|_| oneshot::channel()).unzip();
        let mut journal = Journal::new(Slow(slow));
        journal.append(entry());
        tokio::time::advance(age / 2).await;
        journal.append(entry());
        assert_eq!(journal.settle_older_than(age).now_or_never(), Some(Ok(())));
        tokio::time::advance(age / 2).await;
        assert_eq!(journal.settle_older_than(age).now_or_never(), None, "the first is not durable");
        let mut stored = stored.into_iter();
        stored.next().unwrap().send(()).unwrap();
        assert_eq!(journal.settle_older_than(age).now_or_never(), Some(Ok(())));
        assert_eq!(journal.settle().now_or_never(), None, "the second is not durable");
        drop(stored);
        assert_eq!(journal.settle().now_or_never(), Some(Err(AppendFailed::Unavailable)));
    }
}
