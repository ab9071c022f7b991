//! Publishes durable events to the readers of runs on this replica.
//!
//! A run has a channel while it has followers. The writer publishes what it has committed; for runs that other
//! replicas drive, a poller reads the journal ([`super::journal_poller`]). The buffer of a channel is bounded,
//! shared by all its readers, and never waits for one: a reader that falls behind, or finds a gap, reads the
//! journal ([`super::follower`]). What readers may see is not decided here.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use chrono::{DateTime, Utc};
use parking_lot::Mutex;
use tokio::sync::{Notify, OnceCell, broadcast};
use tokio_util::sync::CancellationToken;
use uuid::Uuid;

use crate::clock;
use crate::event::{Event, ModelDelta, Piece, RunEvent, ToolProgress};

/// Events that a reader may be behind before it is sent to the journal.
const RING: usize = 256;
/// Events of more bytes than this, as JSON, are not kept in the buffer.
const MAX_KEPT_BYTES: usize = 32 << 10;
/// Progress messages that may wait for the event before them.
const MAX_EARLY_PROGRESS: usize = 16;

/// A published item with its wire format, which the first reader that needs it encodes for all readers.
#[derive(Debug)]
pub struct Published {
    /// What is published.
    pub item: StreamItem,
    /// The encoded frame; empty until the first reader needs it.
    pub frame: OnceCell<Bytes>,
}

/// What is published to readers.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "behind an Arc, and most items are events")]
pub enum StreamItem {
    /// A durable event.
    Event(Event),
    /// The number of a durable event that is not in the buffer, mostly because it is too large. Readers find it,
    /// and all events before it, in the journal.
    Large(i64),
    /// A piece of an answer, for live followers, with the number of the event before the answer.
    Delta(i64, DateTime<Utc>, ModelDelta),
    /// The progress of a call, for live followers.
    Progress(DateTime<Utc>, ToolProgress),
}

impl StreamItem {
    /// Whether the run may be parked after this item.
    pub fn may_park(&self) -> bool {
        let Self::Event(event) = self else { return false };
        matches!(
            event.what,
            RunEvent::ApprovalRequested(_)
                | RunEvent::ToolCallAwaitingClient(_)
                | RunEvent::ToolCallAwaitingChild(_)
        )
    }

    /// Whether this is a piece of an answer that a reader of all events up to number `seen` has as a whole. A
    /// piece that withdraws those before it is never late.
    pub(super) fn is_late(&self, seen: i64) -> bool {
        let Self::Delta(after, _, delta) = self else { return false };
        *after < seen && !matches!(delta.piece, Piece::Restarted(_))
    }

    /// Whether this is the last item of the run.
    pub fn is_the_end(&self) -> bool {
        matches!(self, Self::Event(event) if event.what.ending().is_some())
    }
}

impl Published {
    /// An item that is not encoded yet.
    pub fn new(item: StreamItem) -> Self {
        Self { item, frame: OnceCell::new() }
    }
}

/// The channels of all followed runs.
#[derive(Debug, Default)]
pub(super) struct Bus {
    channels: Mutex<Channels>,
    /// Notified when a channel is created.
    channel_added: Notify,
}

#[derive(Debug, Default)]
struct Channels {
    by_run: HashMap<Uuid, Weak<Channel>>,
    /// Whether the poller is running.
    are_polled: bool,
}

/// One followed run.
#[derive(Debug)]
pub(super) struct Channel {
    pub(super) tenant: String,
    pub(super) run: Uuid,
    bus: Weak<Bus>,
    sender: broadcast::Sender<Arc<Published>>,
    published: Mutex<Progress>,
    /// Cancelled when the run is deleted.
    is_gone: CancellationToken,
}

/// What a channel has published, and what waits to be published.
#[derive(Debug)]
struct Progress {
    /// The newest event that was published.
    last: i64,
    /// The pieces of a complete answer that come after an event which is not published yet.
    waiting: Option<(i64, Vec<ModelDelta>)>,
    /// Progress of calls whose start is not published yet.
    early_calls: Vec<(i64, ToolProgress)>,
}

impl Bus {
    /// The run's channel, and whether the caller has to start the poller. `after` is the last event that the
    /// reader has.
    pub(super) fn channel(
        self: &Arc<Self>,
        tenant: &str,
        run: Uuid,
        after: i64,
    ) -> (Arc<Channel>, bool) {
        let mut channels = self.channels.lock();
        if let Some(channel) = channels.by_run.get(&run).and_then(Weak::upgrade) {
            return (channel, false);
        }
        let (sender, _) = broadcast::channel(RING);
        let published =
            Mutex::new(Progress { last: after, waiting: None, early_calls: Vec::new() });
        let (tenant, bus) = (tenant.to_owned(), Arc::downgrade(self));
        let is_gone = CancellationToken::new();
        let channel = Arc::new(Channel { tenant, run, bus, sender, published, is_gone });
        channels.by_run.insert(run, Arc::downgrade(&channel));
        self.channel_added.notify_one();
        (channel, !std::mem::replace(&mut channels.are_polled, true))
    }

    /// Resolves when a further run is followed.
    pub(super) async fn channel_added(&self) {
        self.channel_added.notified().await;
    }

    /// The channels of all followed runs, for the poller. `None` if there are none: the poller ends, and the next
    /// channel starts another one.
    pub(super) fn to_poll(&self) -> Option<Vec<Arc<Channel>>> {
        let mut channels = self.channels.lock();
        let followed: Vec<_> = channels.by_run.values().filter_map(Weak::upgrade).collect();
        channels.are_polled = !followed.is_empty();
        channels.are_polled.then_some(followed)
    }

    /// Publishes durable events to the run's readers, if it has any.
    pub(super) fn publish(&self, run: Uuid, events: &[Event]) {
        if let Some(channel) = self.followed(run) {
            channel.publish(events.iter().cloned());
        }
    }

    /// The run's channel, if it has followers.
    pub(super) fn followed(&self, run: Uuid) -> Option<Arc<Channel>> {
        self.channels.lock().by_run.get(&run).and_then(Weak::upgrade)
    }
}

impl Channel {
    /// Publishes new events, and the pieces that wait for them.
    pub(super) fn publish(&self, events: impl Iterator<Item = Event>) {
        let mut published = self.published.lock();
        for event in events {
            if event.seq > published.last {
                published.last = event.seq;
                let is_large = is_large(&event);
                let item =
                    if is_large { StreamItem::Large(event.seq) } else { StreamItem::Event(event) };
                self.send(item);
            }
            self.pass_on_waiting(&mut published);
        }
    }

    /// Publishes what waits for the last published event. Pieces of an earlier answer are dropped, because the
    /// event with the whole answer may be published already.
    fn pass_on_waiting(&self, published: &mut Progress) {
        let last = published.last;
        if let Some((after, pieces)) = published.waiting.take_if(|(after, _)| *after <= last)
            && after == last
        {
            self.publish_deltas(after, pieces.into_iter());
        }
        for (_, progress) in published.early_calls.extract_if(.., |(after, _)| *after <= last) {
            self.send(StreamItem::Progress(clock::now(), progress));
        }
    }

    /// The run was deleted.
    pub(super) fn run_is_gone(&self) {
        self.is_gone.cancel();
    }

    /// Resolves when the run was deleted.
    pub(super) async fn gone(&self) {
        self.is_gone.cancelled().await;
    }

    /// Marks all events up to number `last` as published without sending them: readers that lack them read the
    /// journal. Publishes what waits for the last one.
    pub(super) fn mark_published(&self, last: i64) {
        let mut published = self.published.lock();
        if last > published.last {
            published.last = last;
            self.send(StreamItem::Large(last));
            self.pass_on_waiting(&mut published);
        }
    }

    /// Publishes the rest of an answer, as soon as event number `after` is published.
    pub(super) fn publish_answer(&self, after: i64, rest: Vec<ModelDelta>) {
        let mut published = self.published.lock();
        if published.last >= after {
            self.publish_deltas(after, rest.into_iter());
        } else {
            published.waiting = Some((after, rest));
        }
    }

    /// Publishes pieces of the answer that follows event number `after`.
    pub(super) fn publish_deltas(&self, after: i64, deltas: impl Iterator<Item = ModelDelta>) {
        deltas.for_each(|delta| self.send(StreamItem::Delta(after, clock::now(), delta)));
    }

    /// Publishes the progress of a call, once event number `after` is published. Only the first few messages may
    /// wait for that.
    pub(super) fn publish_progress(&self, after: i64, progress: ToolProgress) {
        let mut published = self.published.lock();
        if published.last >= after {
            self.send(StreamItem::Progress(clock::now(), progress));
        } else if published.early_calls.len() < MAX_EARLY_PROGRESS {
            published.early_calls.push((after, progress));
        }
    }

    fn send(&self, item: StreamItem) {
        let _ = self.sender.send(Arc::new(Published::new(item))); // there may be no reader at the moment
    }

    /// The newest event that was published.
    pub(super) fn last(&self) -> i64 {
        self.published.lock().last
    }

    /// Everything published from now on.
    pub(super) fn subscribe(&self) -> broadcast::Receiver<Arc<Published>> {
        self.sender.subscribe()
    }
}

/// Whether an event has more than [`MAX_KEPT_BYTES`] bytes as JSON.
fn is_large(event: &Event) -> bool {
    serde_json::to_writer(LimitedWriter(MAX_KEPT_BYTES), event).is_err()
}

/// A writer that fails after this number of bytes.
struct LimitedWriter(usize);

impl io::Write for LimitedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 = self.0.checked_sub(bytes.len()).ok_or(io::ErrorKind::StorageFull)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        if let Some(bus) = self.bus.upgrade() {
            let mut channels = bus.channels.lock();
            // A new channel may have taken the place.
            if channels.by_run.get(&self.run).is_some_and(|channel| channel.strong_count() == 0) {
                channels.by_run.remove(&self.run);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(seq: i64) -> Event {
        let what = RunEvent::AttemptStarted { attempt: 1 };
        Event { seq, at: Utc::now(), run_id: Uuid::nil(), what }
    }

    fn piece(text: &str) -> ModelDelta {
        ModelDelta { attempt: 1, iteration: 1, piece: Piece::Text(text.into()) }
    }

    /// What a reader has received so far, as short texts.
    fn received(reader: &mut broadcast::Receiver<Arc<Published>>) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(published) = reader.try_recv() {
            all.push(match &published.item {
                StreamItem::Event(event) => event.seq.to_string(),
                StreamItem::Large(seq) => format!("large {seq}"),
                StreamItem::Delta(_, _, delta) => format!("{:?}", delta.piece),
                StreamItem::Progress(_, progress) => progress.progress.to_string(),
            });
        }
        all
    }

    #[test]
    fn a_whole_answer_waits_for_the_event_before_it_and_comes_before_the_one_after_it() {
        let bus = Arc::new(Bus::default());
        let (channel, _) = bus.channel("t", Uuid::nil(), 3);
        let mut reader = channel.subscribe();
        channel.publish_answer(4, vec![piece("late")]);
        channel.publish([event(3), event(4), event(5)].into_iter());
        channel.publish_answer(5, vec![piece("at once")]);
        assert_eq!(received(&mut reader), ["4", "Text(\"late\")", "5", "Text(\"at once\")"]);
    }

    #[test]
    fn a_waiting_answer_is_published_when_its_event_was_read_from_the_journal() {
        let bus = Arc::new(Bus::default());
        let (channel, _) = bus.channel("t", Uuid::nil(), 3);
        let mut reader = channel.subscribe();
        channel.publish_answer(4, vec![piece("in time")]);
        channel.mark_published(4);
        channel.publish([event(4), event(5)].into_iter());
        channel.publish_answer(6, vec![piece("too late")]);
        channel.mark_published(7);
        assert_eq!(received(&mut reader), ["large 4", "Text(\"in time\")", "5", "large 7"]);
    }

    #[test]
    fn pieces_are_late_for_a_reader_of_the_whole_answer() {
        let bus = Arc::new(Bus::default());
        let (channel, _) = bus.channel("t", Uuid::nil(), 3);
        let mut reader = channel.subscribe();
        channel.publish_answer(3, vec![piece("a")]);
        channel.publish([event(4)].into_iter());
        let [delta, answer] = [(); 2].map(|()| reader.try_recv().unwrap());
        assert!(!delta.item.is_late(3) && delta.item.is_late(4));
        assert!(!answer.item.is_late(4));
    }

    #[test]
    fn only_the_number_of_a_large_event_is_published() {
        let bus = Arc::new(Bus::default());
        let (channel, _) = bus.channel("t", Uuid::nil(), 3);
        let mut reader = channel.subscribe();
        let large =
            |seq, bytes| Event { what: RunEvent::interrupted("x".repeat(bytes)), ..event(seq) };
        channel.publish(
            [large(4, MAX_KEPT_BYTES / 2), large(5, MAX_KEPT_BYTES), event(6)].into_iter(),
        );
        let mut received_events = Vec::new();
        while let Ok(published) = reader.try_recv() {
            received_events.push(match &published.item {
                StreamItem::Event(event) => (event.seq, false),
                StreamItem::Large(seq) => (*seq, true),
                StreamItem::Delta(..) | StreamItem::Progress(..) => {
                    panic!("there are events alone")
                }
            });
        }
        assert_eq!(received_events, [(4, false), (5, true), (6, false)]);
    }

    #[test]
    fn progress_of_a_call_comes_after_its_start() {
        let bus = Arc::new(Bus::default());
        let (channel, _) = bus.channel("t", Uuid::nil(), 3);
        let mut reader = channel.subscribe();
        let said =
            |n: usize| ToolProgress { call_id: Uuid::nil(), tool: "t".into(), progress: n.into() };
        (0..MAX_EARLY_PROGRESS + 3).for_each(|n| channel.publish_progress(5, said(n)));
        channel.publish([event(4), event(5)].into_iter());
        channel.publish_progress(5, said(99));
        let mut received_events = Vec::new();
        while let Ok(published) = reader.try_recv() {
            received_events.push(match &published.item {
                StreamItem::Event(event) => event.seq,
                StreamItem::Large(_) | StreamItem::Delta(..) => panic!("there is no answer"),
                StreamItem::Progress(_, said) => 100 + said.progress.as_i64().unwrap(),
            });
        }
        let expected: Vec<i64> = [4, 5].into_iter().chain(100..116).chain([199]).collect();
        assert_eq!(received_events, expected);
    }
}
