//! Following one run: replay from the journal, then live, without a gap and without a repeat.
//!
//! A reader that is behind reads pages of the journal until it has caught up, subscribes, and reads
//! once more, because something may have happened in between. Live events that do not continue the
//! last one send it back to the journal. How events look on the wire is `http/`'s.

use std::collections::VecDeque;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::bus::{Channel, Published, StreamItem};
use super::journals;
use crate::bounds::memory::{TenantMemory, TenantPermit};
use crate::event::Event;
use crate::run::RunStatus;
use crate::store::{RunRecord, StoreError};

/// Entries and bytes of one read of the journal. A stalled reader keeps no more in memory.
const PAGE: u32 = 100;
const PAGE_BYTES: u64 = 256 << 10;
/// Bytes of a page that needs no permit.
const SMALL_PAGE: u64 = 16 << 10;
/// How often a waiting request checks whether the run was parked without an event.
const POLL_INTERVAL: Duration = Duration::from_secs(2);

/// The memory of pages that were read from journals for clients, until they have received them.
static PAGES: LazyLock<TenantMemory> = LazyLock::new(TenantMemory::of_share);

/// The memory of a page; to be kept with what is made of its events.
pub type PagePermit = Arc<TenantPermit<'static>>;

/// A reader of one run's events.
pub struct Follower {
    runtime: Runtime,
    tenant: String,
    run: Uuid,
    /// The number of the last event that was returned.
    seen: i64,
    /// Events that were read from the journal and not returned yet.
    ready: VecDeque<Arc<Published>>,
    /// The memory of the page that they are of, and the event that was returned last.
    page: Option<PagePermit>,
    /// Whether a client reads, which decides for how long a page is in memory.
    is_for_client: bool,
    live: Option<Subscription>,
    /// Whether the journal held nothing new after subscribing.
    caught_up: bool,
    /// Whether an unreadable event was skipped, which may have been the last one.
    has_skipped: bool,
    end: Option<FollowEnd>,
}

/// Why a follower returns no more events.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowEnd {
    /// The last event was returned.
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
    /// The last event to read from the journal, if known: reading further would return an answer before its
    /// pieces.
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
            page: None,
            is_for_client: false,
            live: None,
            caught_up: false,
            has_skipped: false,
            end: None,
        }
    }

    /// Follows a run from its beginning. Events up to `published` are published already; later ones are
    /// buffered from now on.
    pub(super) fn follow_live(&self, tenant: &str, run: Uuid, published: i64) -> Follower {
        let mut follower = self.follow(tenant, run, 0);
        follower.subscribe();
        if let Some(live) = &mut follower.live {
            live.channel.mark_published(published);
            live.journal_until = Some(published);
        }
        follower
    }

    /// Waits until the run has ended or is parked, or until `until`; returns the run. `None`: no such run.
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
            if follower.end.is_some() {
                return Ok(Some(record)); // the service is stopping
            }
            let next_check = until.min(Instant::now() + POLL_INTERVAL);
            while let Ok(item) = tokio::time::timeout_at(next_check, follower.next()).await {
                let must_check = match item {
                    Ok(Some(published)) => published.item.is_the_end() || published.item.may_park(),
                    Ok(None) | Err(StoreError::UnreadableEvent { .. }) => true,
                    Err(error) => return Err(error),
                };
                if must_check {
                    break;
                }
            }
        }
    }
}

impl Follower {
    /// The next event, or a piece of an answer that is being written. `None` after the last event, even if
    /// that cannot be read, after the run was deleted, or when the service is stopping. The client can continue
    /// on another replica, after the last event that it got. Cancel-safe.
    ///
    /// # Errors
    /// [`StoreError`] if the journal is needed and cannot be read. The next call tries again, and skips an
    /// event that cannot be read.
    pub async fn next(&mut self) -> Result<Option<Arc<Published>>, StoreError> {
        loop {
            if self.end.is_some() {
                return Ok(None);
            }
            if let Some(published) = self.ready.pop_front() {
                return Ok(Some(self.note_returned(published)));
            }
            let Some(live) = self.live.as_mut().filter(|_| self.caught_up) else {
                self.read_journal().await?;
                continue;
            };
            tokio::select! {
                biased;
                received = live.events.recv() => match received {
                    Ok(published) => match &published.item {
                        item if item.is_late(self.seen) => {}
                        StreamItem::Delta(..) | StreamItem::Progress(..) => return Ok(Some(published)),
                        StreamItem::Event(event) if event.seq == self.seen + 1 => {
                            return Ok(Some(self.note_returned(published)));
                        }
                        StreamItem::Large(seq) if *seq == self.seen + 1 => {
                            (live.journal_until, self.caught_up) = (Some(*seq), false);
                        }
                        StreamItem::Event(Event { seq, .. }) | StreamItem::Large(seq)
                            if *seq <= self.seen => {}
                        StreamItem::Event(_) | StreamItem::Large(_) => self.fall_back_to_journal(),
                    },
                    Err(RecvError::Lagged(_) | RecvError::Closed) => self.fall_back_to_journal(),
                },
                () = live.channel.gone() => self.end = Some(FollowEnd::Deleted),
                () = self.runtime.inner.replica.drained.cancelled() => self.end = Some(FollowEnd::Stopping),
            }
        }
    }

    /// For a client: its large pages wait until those of other clients leave memory for them.
    #[must_use]
    pub fn for_client(self) -> Self {
        Self { is_for_client: true, ..self }
    }

    /// The memory of the event that was returned last, if it was read for a client in a large page.
    pub fn page(&self) -> Option<PagePermit> {
        self.page.clone()
    }

    /// Why there are no more events; `None` while there may be more.
    pub fn end(&self) -> Option<FollowEnd> {
        self.end
    }

    fn note_returned(&mut self, published: Arc<Published>) -> Arc<Published> {
        if let StreamItem::Event(event) = &published.item {
            self.seen = event.seq;
        }
        self.end = published.item.is_the_end().then_some(FollowEnd::Ended);
        published
    }

    fn fall_back_to_journal(&mut self) {
        self.caught_up = false;
        if let Some(live) = &mut self.live {
            live.journal_until = None;
        }
    }

    async fn read_journal(&mut self) -> Result<(), StoreError> {
        self.page = None;
        let until = self.live.as_ref().and_then(|live| live.journal_until);
        if until.is_some_and(|until| self.seen >= until) {
            self.mark_caught_up();
            return Ok(());
        }
        let store = Arc::clone(&self.runtime.inner.store);
        let next = store.journal_piece(&self.tenant, self.run, self.seen, PAGE, PAGE_BYTES).await;
        let Some(next) = self.skip_unreadable(next)? else {
            if self.live.is_none() {
                // Something may have happened between reading and subscribing: read once more.
                self.subscribe();
            } else if self.has_skipped && self.has_ended().await? {
                self.end = Some(FollowEnd::Unread);
            } else {
                self.mark_caught_up();
            }
            return Ok(());
        };
        if self.is_for_client && next.bytes > SMALL_PAGE {
            self.page = PAGES.acquire(&self.tenant, next.bytes).await.map(Arc::new);
        }
        let _permit = journals::permit(next.bytes).await;
        let page = store.readable_until(&self.tenant, self.run, self.seen, next.until).await;
        let page = self.skip_unreadable(page)?;
        let page = page.into_iter().filter(|event| until.is_none_or(|until| event.seq <= until));
        self.ready.extend(page.map(|event| Arc::new(Published::new(StreamItem::Event(event)))));
        Ok(())
    }

    /// Marks the events that were read from the journal as published. Pieces of an answer may wait for them,
    /// if they became durable between reading and subscribing.
    fn mark_caught_up(&mut self) {
        self.caught_up = true;
        if let Some(live) = &self.live {
            live.channel.mark_published(self.seen);
        }
    }

    /// Whether the run has ended, without further events.
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

    /// Returns what was read. An unreadable event is reported once and then skipped.
    fn skip_unreadable<T>(&mut self, read: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(StoreError::UnreadableEvent { seq, .. }) = &read {
            self.seen = *seq;
            self.has_skipped = true;
            self.fall_back_to_journal(); // read the events after it from the journal
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
