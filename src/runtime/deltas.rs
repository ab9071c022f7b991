//! Sends pieces of answers to followers: the first at once, the rest in batches. Progress of tool calls is sent
//! at once.
//!
//! A fast model writes hundreds of pieces a second; readers get a batch every [`BATCH`]. The pieces wait until
//! the event before the answer is durable. If the whole answer is complete before that, the channel publishes
//! the pieces after that event. If followers are expected during the answer, its pieces are kept, so that they
//! get it from its beginning. Secrets are redacted here, where the pieces are still in order: each text of the
//! answer by itself, because pieces of others may come between its own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use uuid::Uuid;

use super::bus::{Bus, Channel};
use crate::bounds::secrets;
use crate::engine::{Audience, Pieces};
use crate::event::{ModelDelta, Piece};
use crate::tools::Listener;

/// How long pieces are collected into a batch.
const BATCH: Duration = Duration::from_millis(20);

/// The first pause between two checks whether the event before the answer is durable. The longest is [`BATCH`].
const FIRST_LOOK: Duration = Duration::from_millis(1);

/// Bytes of an answer that are kept for expected followers.
const MOST_KEPT: usize = 64 * 1024;

/// The followers during an answer.
enum Readers {
    There(Arc<Channel>),
    /// None yet, but some are expected.
    Expected(Arc<Bus>, Uuid),
}

impl Readers {
    fn channel(&self) -> Option<Arc<Channel>> {
        match self {
            Self::There(channel) => Some(Arc::clone(channel)),
            Self::Expected(bus, run) => bus.followed(*run),
        }
    }
}

/// The pieces of one answer.
struct Batch {
    readers: Readers,
    /// Whether followers are still expected after this answer.
    are_expected: Arc<AtomicBool>,
    /// The number of the event that comes before them.
    after: i64,
    gathered: Mutex<Gathered>,
}

#[derive(Default)]
struct Gathered {
    deltas: Vec<ModelDelta>,
    /// For each text of the answer, which an empty piece of it identifies: what holds back its end.
    redactors: BTreeMap<ModelDelta, secrets::StreamRedactor>,
    /// Bytes of the answer so far.
    bytes: usize,
    /// The answer became too large to be kept before a follower came. Later followers get it at its end.
    is_given_up: bool,
    /// Whether the newest piece belongs to an answer. One that withdraws those before it does not: that try has
    /// failed.
    is_answer: bool,
    /// Whether a task is running that will send them.
    is_timed: bool,
}

impl Gathered {
    fn add(&mut self, mut delta: ModelDelta) {
        if matches!(delta.piece, Piece::Restarted(_)) {
            self.redactors.clear(); // what they hold back is void
        }
        let empty = delta.emptied();
        if let Some(text) = delta.text_mut() {
            self.bytes += text.len();
            *text = self.redactors.entry(empty).or_default().push(text);
        }
        self.push(delta);
    }

    /// Adds the held-back texts at the end of the answer.
    fn finish(&mut self) {
        for (mut last, mut redactor) in std::mem::take(&mut self.redactors) {
            if let Some(text) = last.text_mut() {
                *text = redactor.finish();
            }
            self.push(last);
        }
    }

    fn push(&mut self, delta: ModelDelta) {
        if delta.is_empty() {
            return;
        }
        let rest = match self.deltas.last_mut() {
            Some(last) => last.extend(delta).err(),
            None => Some(delta),
        };
        self.deltas.extend(rest);
    }
}

/// The followers of a run on this replica.
pub(super) struct Followers {
    bus: Arc<Bus>,
    run: Uuid,
    /// Whether followers are expected during the next answer. Failed tries do not count.
    are_expected: Arc<AtomicBool>,
}

impl Followers {
    pub(super) fn new(bus: Arc<Bus>, run: Uuid, are_expected: bool) -> Self {
        Self { bus, run, are_expected: Arc::new(AtomicBool::new(are_expected)) }
    }
}

impl Audience for Followers {
    fn pieces(&self, after: i64) -> Option<Pieces> {
        let are_expected = Arc::clone(&self.are_expected);
        let readers = match self.bus.followed(self.run) {
            Some(channel) => Readers::There(channel),
            None if are_expected.load(Ordering::Relaxed) => {
                Readers::Expected(Arc::clone(&self.bus), self.run)
            }
            None => return None,
        };
        let gathered = Mutex::default();
        let batch = Flushed(Arc::new(Batch { readers, are_expected, after, gathered }));
        Some(Box::new(move |delta| batch.0.take(delta)))
    }

    fn listener(&self, after: i64) -> Listener {
        let (bus, run) = (Arc::clone(&self.bus), self.run);
        Listener::new(move |progress| {
            if let Some(channel) = bus.followed(run) {
                channel.publish_progress(after, progress);
            }
        })
    }
}

impl Batch {
    fn take(self: &Arc<Self>, delta: ModelDelta) {
        let mut gathered = self.gathered.lock();
        gathered.is_answer = !matches!(delta.piece, Piece::Restarted(_));
        if gathered.is_given_up {
            return;
        }
        gathered.add(delta);
        if gathered.is_timed || gathered.deltas.is_empty() {
            return;
        }
        match self.readers.channel() {
            Some(channel) => {
                gathered.is_timed = true;
                self.pass_on(&channel, &mut gathered);
                tokio::spawn(Arc::clone(self).send_batches());
            }
            None if gathered.bytes > MOST_KEPT => {
                let is_answer = gathered.is_answer;
                *gathered = Gathered { is_given_up: true, is_answer, ..Gathered::default() };
            }
            None => {}
        }
    }

    async fn send_batches(self: Arc<Self>) {
        let mut pause = Duration::ZERO;
        loop {
            let may_pass = self.readers.channel().is_none_or(|channel| self.may_pass(&channel));
            pause = next_pause(pause, may_pass);
            tokio::time::sleep(pause).await;
            let mut gathered = self.gathered.lock();
            match self.readers.channel() {
                Some(channel) if !gathered.deltas.is_empty() => {
                    self.pass_on(&channel, &mut gathered);
                }
                _ => {
                    gathered.is_timed = false;
                    return;
                }
            }
        }
    }

    /// Whether the event before the pieces has been published.
    fn may_pass(&self, channel: &Channel) -> bool {
        channel.last() >= self.after
    }

    /// Under the lock, so that pieces stay in order.
    fn pass_on(&self, channel: &Channel, gathered: &mut Gathered) {
        if self.may_pass(channel) {
            channel.publish_deltas(self.after, gathered.deltas.drain(..));
        }
    }
}

/// The pause before the next batch, or before the next check whether pieces may pass.
fn next_pause(last: Duration, may_pass: bool) -> Duration {
    if may_pass { BATCH } else { (last * 2).clamp(FIRST_LOOK, BATCH) }
}

/// Sends the remaining pieces when the answer is complete, before the event with the whole answer.
struct Flushed(Arc<Batch>);

impl Drop for Flushed {
    fn drop(&mut self) {
        let mut gathered = self.0.gathered.lock();
        if gathered.is_answer {
            self.0.are_expected.store(false, Ordering::Relaxed);
        }
        gathered.finish();
        let rest = std::mem::take(&mut gathered.deltas);
        if !rest.is_empty()
            && let Some(channel) = self.0.readers.channel()
        {
            channel.publish_answer(self.0.after, rest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::runtime::StreamItem;

    fn text(text: &str) -> ModelDelta {
        ModelDelta { attempt: 1, iteration: 1, piece: Piece::Text(text.to_owned()) }
    }

    #[test]
    fn a_secret_is_not_shown_where_other_pieces_come_between_its_own() {
        let thinking =
            |more: &str| ModelDelta { piece: Piece::Thinking(more.to_owned()), ..text("") };
        let call = |name: Option<&str>, more: &str| {
            let (name, arguments) = (name.map(str::to_owned), more.to_owned());
            ModelDelta { piece: Piece::ToolCall { index: 0, name, arguments }, ..text("") }
        };
        let mut gathered = Gathered::default();
        for delta in [
            text("void ghp_hunter2"),
            ModelDelta { piece: Piece::Restarted(true), ..text("") },
            text("use ghp_hunter2hun"),
            thinking("its password: hun"),
            text("ter2hunter2hunter2 now"),
            call(Some("shell"), r#"{"api_key": "hun"#),
            thinking("ter2, then"),
            call(Some("shell"), r#"ter2"}"#),
        ] {
            gathered.add(delta);
        }
        gathered.finish();
        let [mut written, mut thought, mut given] = [const { String::new() }; 3];
        for delta in gathered.deltas {
            match delta.piece {
                Piece::Text(more) => written += &more,
                Piece::Thinking(more) => thought += &more,
                Piece::ToolCall { arguments, .. } => given += &arguments,
                Piece::Restarted(_) => written.clear(),
            }
        }
        let expected = [
            "use [redacted] now",
            "its password: [redacted], then",
            r#"{"api_key": "[redacted]"}"#,
        ];
        assert_eq!([written, thought, given], expected);
    }

    #[test]
    fn a_store_that_is_away_is_waited_for_at_the_pace_of_batches() {
        let pauses = std::iter::successors(Some(FIRST_LOOK), |last| Some(next_pause(*last, false)));
        assert!(pauses.take(60).sum::<Duration>() > Duration::from_secs(1));
        assert_eq!(next_pause(FIRST_LOOK, true), BATCH);
    }

    #[test]
    fn followers_are_still_expected_after_a_failed_try() {
        let followers = Followers::new(Arc::default(), Uuid::nil(), true);
        let failed = followers.pieces(3).unwrap();
        failed(text("a "));
        failed(ModelDelta { attempt: 1, iteration: 1, piece: Piece::Restarted(true) });
        drop(failed);
        drop(followers.pieces(3).unwrap()); // it failed before its first piece
        let answered = followers.pieces(4).unwrap();
        answered(text("b "));
        drop(answered);
        assert!(followers.pieces(5).is_none());
    }

    #[tokio::test]
    async fn late_followers_get_short_answers_from_the_beginning() {
        let bus = Arc::new(Bus::default());
        for (size, expected) in [(10, 12), (MOST_KEPT, 0)] {
            let run = Uuid::from_u128(u128::try_from(size).unwrap());
            let pieces = Followers::new(Arc::clone(&bus), run, true).pieces(3).unwrap();
            pieces(text(&"a ".repeat(size / 2)));
            pieces(text("b"));
            let (channel, _) = bus.channel("t", run, 3);
            let mut reader = channel.subscribe();
            pieces(text("c"));
            drop(pieces);
            let mut received = String::new();
            while let Ok(published) = reader.try_recv() {
                if let StreamItem::Delta(_, _, ModelDelta { piece: Piece::Text(text), .. }) =
                    &published.item
                {
                    received += text;
                }
            }
            assert_eq!(received.len(), expected);
        }
    }
}
