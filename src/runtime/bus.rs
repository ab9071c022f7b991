//! Who follows which run: durable events on their way to readers on this replica.
//!
//! A run has a channel while it has followers. The writer publishes what it has committed; for a
//! run that another replica drives, a poller reads the journal instead. The ring of a channel is
//! bounded and shared by all its readers, and never waits for one: a reader that falls behind, or meets
//! a gap, reads the journal ([`super::follow`]). Nothing is decided here about what readers see.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OnceCell, broadcast};
use uuid::Uuid;

use crate::event::{Event, ModelDelta, RunEvent};

/// Events that a reader may be behind before it is sent to the journal.
const RING: usize = 256;

/// Something that readers are told, and its form on the wire, which the first reader that needs it
/// makes for all.
#[derive(Debug)]
pub struct Published {
    /// What is told.
    pub item: StreamItem,
    /// The frame that readers are sent; empty until the first reader needs it.
    pub frame: OnceCell<Bytes>,
}

/// What readers are told.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "behind an Arc, and most item are events")]
pub enum StreamItem {
    /// A durable event.
    Event(Event),
    /// A piece of an answer, for those who follow live.
    Delta(DateTime<Utc>, ModelDelta),
}

impl StreamItem {
    /// Whether the run may be parked now.
    pub fn may_park(&self) -> bool {
        let Self::Event(event) = self else { return false };
        matches!(
            event.what,
            RunEvent::ApprovalRequested(_)
                | RunEvent::ToolCallAwaitingClient(_)
                | RunEvent::ToolCallAwaitingChild(_)
        )
    }

    /// Whether nothing can follow.
    pub fn is_the_end(&self) -> bool {
        matches!(self, Self::Event(event) if event.what.ending().is_some())
    }
}

impl Published {
    /// An item without its wire form.
    pub fn new(item: StreamItem) -> Self {
        Self { item, frame: OnceCell::new() }
    }
}

/// The channels of all followed runs.
#[derive(Debug, Default)]
pub(super) struct Bus {
    channels: Mutex<HashMap<Uuid, Weak<Channel>>>,
}

/// One followed run.
#[derive(Debug)]
pub(super) struct Channel {
    run: Uuid,
    bus: Weak<Bus>,
    sender: broadcast::Sender<Arc<Published>>,
    /// The newest event that was published.
    last: Mutex<i64>,
}

impl Bus {
    /// The run's channel, and whether it was made just now. `after` is the last event known to the
    /// one who asks.
    pub(super) fn channel(self: &Arc<Self>, run: Uuid, after: i64) -> (Arc<Channel>, bool) {
        let mut channels = lock(&self.channels);
        if let Some(channel) = channels.get(&run).and_then(Weak::upgrade) {
            return (channel, false);
        }
        let (sender, _) = broadcast::channel(RING);
        let channel =
            Arc::new(Channel { run, bus: Arc::downgrade(self), sender, last: Mutex::new(after) });
        channels.insert(run, Arc::downgrade(&channel));
        (channel, true)
    }

    /// Tells the run's readers, if it has any. The events are durable.
    pub(super) fn publish(&self, run: Uuid, events: &[Event]) {
        if let Some(channel) = self.followed(run) {
            channel.publish(events.iter().cloned());
        }
    }

    /// The run's channel, if it has followers.
    pub(super) fn followed(&self, run: Uuid) -> Option<Arc<Channel>> {
        lock(&self.channels).get(&run).and_then(Weak::upgrade)
    }
}

impl Channel {
    /// Passes on what is item.
    pub(super) fn publish(&self, events: impl Iterator<Item = Event>) {
        let mut last = lock(&self.last);
        for event in events.filter(|event| event.seq > *last).collect::<Vec<_>>() {
            *last = event.seq;
            self.tell(StreamItem::Event(event));
        }
    }

    /// Passes on pieces of an answer.
    pub(super) fn publish_deltas(&self, deltas: impl Iterator<Item = ModelDelta>) {
        deltas.for_each(|delta| self.tell(StreamItem::Delta(Utc::now(), delta)));
    }

    fn tell(&self, item: StreamItem) {
        let _ = self.sender.send(Arc::new(Published::new(item))); // there may be no reader at the moment
    }

    /// The newest event that was published.
    pub(super) fn last(&self) -> i64 {
        *lock(&self.last)
    }

    /// Everything published from now on.
    pub(super) fn subscribe(&self) -> broadcast::Receiver<Arc<Published>> {
        self.sender.subscribe()
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(bus) = self.bus.upgrade() {
            let mut channels = lock(&bus.channels);
            // A new channel may have taken the place.
            if channels.get(&self.run).is_some_and(|channel| channel.strong_count() == 0) {
                channels.remove(&self.run);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}
