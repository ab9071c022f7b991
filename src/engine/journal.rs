//! The journal of a run, as the loop sees it: append now, wait for durability later.
//!
//! It keeps the order of entries and knows which are not durable yet. The runtime stores them;
//! [`super::run`] decides when they must be durable.

use std::collections::VecDeque;

use futures::future::BoxFuture;

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
    in_flight: VecDeque<Ack>,
}

impl Journal {
    pub fn new(appender: impl Append + 'static) -> Self {
        Self { appender: Box::new(appender), in_flight: VecDeque::new() }
    }

    /// Appends an entry without waiting for durability.
    pub fn append(&mut self, entry: Entry) {
        self.in_flight.push_back(self.appender.append(entry));
    }

    /// Waits until all entries are durable.
    pub async fn settle(&mut self) -> Result<(), AppendFailed> {
        self.settle_all_but(0).await
    }

    /// Waits until all entries except the `newest` ones are durable.
    pub async fn settle_all_but(&mut self, newest: usize) -> Result<(), AppendFailed> {
        while self.in_flight.len() > newest {
            if let Some(ack) = self.in_flight.front_mut() {
                ack.await?;
            }
            self.in_flight.pop_front();
        }
        Ok(())
    }
}
