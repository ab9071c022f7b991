//! Following one run: replay from the journal, then live, without a gap and without a repeat.
//!
//! A reader that is behind reads pages of the journal until it has caught up, subscribes, and reads
//! once more, because something may have happened in between. Live events that do not continue the
//! last one send it back to the journal. How events look on the wire is `http/`'s.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::bus::{Channel, Published, StreamItem};
use super::journals;
use crate::event::Event;
use crate::run::RunStatus;
use crate::store::{RunRecord, StoreError};

/// Journal entries read at once, and their bytes: all that a reader which does not go on keeps.
const PAGE: u32 = 100;
const PAGE_BYTES: u64 = 256 << 10;
/// How often a waiter looks whether the run was parked without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// A reader of one run's events.
pub struct Follower {
    runtime: Runtime,
    tenant: String,
    run: Uuid,
    /// The last event that was handed out.
    seen: i64,
    /// Read from the journal and not handed out yet.
    ready: VecDeque<Arc<Published>>,
    live: Option<Subscription>,
    /// Whether the journal held nothing new after subscribing.
    caught_up: bool,
    /// Whether an event was passed over that cannot be read: it may have been the last one.
    has_passed_over: bool,
    over: Option<Over>,
}

/// Why nothing more comes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    /// The last event was handed out.
    Ended,
    /// The run has ended, and its last event cannot be read.
    Unread,
    /// The run was deleted.
    Deleted,
    /// The service is stopping.
    Stopping,
}

/// A subscription; the channel lives as long as its last subscription.
struct Subscription {
    channel: Arc<Channel>,
    events: Receiver<Arc<Published>>,
    /// The last event that must be read from the journal, where that is known: reading more would
    /// hand out an answer before its pieces.
    journal_until: Option<i64>,
}

impl Runtime {
    /// Follows a run of this tenant from the event after `after` on, to its end.
    pub fn follow(&self, tenant: &str, run: Uuid, after: i64) -> Follower {
        Follower {
            runtime: self.clone(),
            tenant: tenant.to_owned(),
            run,
            seen: after,
            ready: VecDeque::new(),
            live: None,
            caught_up: false,
            has_passed_over: false,
            over: None,
        }
    }

    /// Follows a run from its beginning, of which all events up to `published` are published; those
    /// after it are buffered from now on.
    pub(super) fn follow_live(&self, tenant: &str, run: Uuid, published: i64) -> Follower {
        let mut follower = self.follow(tenant, run, 0);
        follower.subscribe();
        if let Some(live) = &mut follower.live {
            live.channel.mark_published(published);
            live.journal_until = Some(published);
        }
        follower
    }

    /// The run as soon as it has ended or is parked, or as it is at `until`. `None`: no such run.
    ///
    /// # Errors
    /// [`StoreError`] where the store cannot be read.
    pub async fn wait(
        &self,
        tenant: &str,
        run: Uuid,
        until: Instant,
    ) -> Result<Option<RunRecord>, StoreError> {
        let mut follower = None;
        loop {
            let Some(record) = self.inner.store.run(tenant, run).await? else { return Ok(None) };
            let status = self.status_of(&record).await?;
            let goes_on = matches!(status, RunStatus::Queued | RunStatus::Running);
            if !goes_on || Instant::now() >= until {
                return Ok(Some(record));
            }
            let follower =
                follower.get_or_insert_with(|| self.follow(tenant, run, record.last_seq()));
            if follower.over.is_some() {
                return Ok(Some(record)); // the service is stopping
            }
            let look = until.min(Instant::now() + POLL_INTERVAL);
            while let Ok(item) = tokio::time::timeout_at(look, follower.next()).await {
                let is_looked_at = match item {
                    Ok(Some(published)) => published.item.is_the_end() || published.item.may_park(),
                    Ok(None) | Err(StoreError::UnreadableEvent { .. }) => true,
                    Err(error) => return Err(error),
                };
                if is_looked_at {
                    break;
                }
            }
        }
    }
}

impl Follower {
    /// The next event, or a piece of an answer that is being written. `None` after the last one, even if
    /// it cannot be read, where the run was deleted, or where the service is stopping; another replica, or this one later, goes
    /// on from the last event that was handed out. May be dropped and called again at any time.
    ///
    /// # Errors
    /// [`StoreError`] where the journal is needed and cannot be read; asking again is possible, and goes
    /// on behind an event that cannot be read.
    pub async fn next(&mut self) -> Result<Option<Arc<Published>>, StoreError> {
        loop {
            if self.over.is_some() {
                return Ok(None);
            }
            if let Some(published) = self.ready.pop_front() {
                return Ok(Some(self.handed_out(published)));
            }
            let Some(live) = self.live.as_mut().filter(|_| self.caught_up) else {
                self.read_journal().await?;
                continue;
            };
            tokio::select! {
                biased;
                received = live.events.recv() => match received {
                    Ok(published) => match &published.item {
                        StreamItem::Delta(..) | StreamItem::Progress(..) => return Ok(Some(published)),
                        StreamItem::Event(event) if event.seq == self.seen + 1 => {
                            return Ok(Some(self.handed_out(published)));
                        }
                        StreamItem::Large(seq) if *seq == self.seen + 1 => {
                            (live.journal_until, self.caught_up) = (Some(*seq), false);
                        }
                        StreamItem::Event(Event { seq, .. }) | StreamItem::Large(seq)
                            if *seq <= self.seen => {}
                        StreamItem::Event(_) | StreamItem::Large(_) => self.fell_behind(),
                    },
                    Err(RecvError::Lagged(_) | RecvError::Closed) => self.fell_behind(),
                },
                () = live.channel.gone() => self.over = Some(Over::Deleted),
                () = self.runtime.inner.replica.drained.cancelled() => self.over = Some(Over::Stopping),
            }
        }
    }

    /// Why nothing more comes; `None` while more may.
    pub fn over(&self) -> Option<Over> {
        self.over
    }

    fn handed_out(&mut self, published: Arc<Published>) -> Arc<Published> {
        if let StreamItem::Event(event) = &published.item {
            self.seen = event.seq;
        }
        self.over = published.item.is_the_end().then_some(Over::Ended);
        published
    }

    fn fell_behind(&mut self) {
        self.caught_up = false;
        if let Some(live) = &mut self.live {
            live.journal_until = None;
        }
    }

    async fn read_journal(&mut self) -> Result<(), StoreError> {
        let until = self.live.as_ref().and_then(|live| live.journal_until);
        if until.is_some_and(|until| self.seen >= until) {
            self.catches_up();
            return Ok(());
        }
        let store = Arc::clone(&self.runtime.inner.store);
        let next = store.journal_piece(&self.tenant, self.run, self.seen, PAGE, PAGE_BYTES).await;
        let Some(next) = self.pass_over(next)? else {
            if self.live.is_none() {
                // Something may have happened between reading and subscribing: read once more.
                self.subscribe();
            } else if self.has_passed_over && self.has_ended().await? {
                self.over = Some(Over::Unread);
            } else {
                self.catches_up();
            }
            return Ok(());
        };
        let _turn = journals::turn(next.bytes).await;
        let page = store.readable_until(&self.tenant, self.run, self.seen, next.until).await;
        let page = self.pass_over(page)?;
        let page = page.into_iter().filter(|event| until.is_none_or(|until| event.seq <= until));
        self.ready.extend(page.map(|event| Arc::new(Published::new(StreamItem::Event(event)))));
        Ok(())
    }

    /// What was read up to now needs no publishing any more, though it may have come between reading and
    /// subscribing; pieces of an answer may wait for it.
    fn catches_up(&mut self) {
        self.caught_up = true;
        if let Some(live) = &self.live {
            live.channel.mark_published(self.seen);
        }
    }

    /// Whether the run has ended, with no event behind the last one that was seen.
    async fn has_ended(&self) -> Result<bool, StoreError> {
        match self.runtime.inner.store.run(&self.tenant, self.run).await {
            Ok(record) => Ok(record.is_some_and(|record| {
                record.status.is_terminal() && record.last_seq() <= self.seen
            })),
            // Of a run that has ended, its last event is read too.
            Err(StoreError::UnreadableEvent { seq, .. }) => Ok(seq <= self.seen),
            Err(error) => Err(error),
        }
    }

    /// What was read; an event that cannot be read counts as seen, and is reported once.
    fn pass_over<T>(&mut self, read: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(StoreError::UnreadableEvent { seq, .. }) = &read {
            self.seen = *seq;
            self.has_passed_over = true;
            self.fell_behind(); // everything behind it is read
        }
        read
    }

    fn subscribe(&mut self) {
        let (channel, needs_poller) =
            self.runtime.inner.bus.channel(&self.tenant, self.run, self.seen);
        if needs_poller {
            tokio::spawn(self.runtime.clone().poll_journals());
        }
        let events = channel.subscribe();
        self.live = Some(Subscription { channel, events, journal_until: None });
    }
}
