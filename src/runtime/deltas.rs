//! Pieces of answers on their way to those who follow: the first at once, the rest in batches. What
//! calls say of their progress goes the same way, at once.
//!
//! A fast model writes hundreds of pieces a second; readers get a batch every [`BATCH`]. An event
//! that comes before an answer may still be on its way to the disk: the pieces wait for it, and where
//! the whole answer is there first, the channel publishes them behind that event. Secrets are taken
//! out here, where the pieces are still in order.

use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use uuid::Uuid;

use super::bus::{Bus, Channel};
use crate::bounds::secrets;
use crate::engine::{Audience, Pieces};
use crate::event::ModelDelta;
use crate::tools::Listener;

/// How long pieces are gathered.
const BATCH: Duration = Duration::from_millis(20);

/// How soon it is looked again whether the event before the answer is durable.
const SOON: Duration = Duration::from_millis(1);

/// The pieces of one answer.
struct Batch {
    channel: Arc<Channel>,
    /// The number of the event that comes before them.
    after: i64,
    gathered: Mutex<Gathered>,
}

#[derive(Default)]
struct Gathered {
    deltas: Vec<ModelDelta>,
    /// The piece before, whose text may wait for more.
    last: Option<ModelDelta>,
    redactor: secrets::Pieces,
    /// Whether a task is under way that will pass them on.
    is_timed: bool,
}

impl Gathered {
    fn add(&mut self, mut delta: ModelDelta) {
        if self.last.as_ref().is_some_and(|last| !last.is_continued_by(&delta)) {
            self.finish();
        }
        if let Some(text) = delta.text_mut() {
            *text = self.redactor.push(text);
        }
        self.last = Some(delta.emptied());
        self.push(delta);
    }

    /// Adds what waits for more.
    fn finish(&mut self) {
        let rest = self.redactor.finish();
        if let Some(mut last) = self.last.take().filter(|_| !rest.is_empty())
            && let Some(text) = last.text_mut()
        {
            *text = rest;
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

/// Those who follow a run on this replica.
pub(super) struct Followers {
    pub(super) bus: Arc<Bus>,
    pub(super) run: Uuid,
}

impl Audience for Followers {
    fn pieces(&self, after: i64) -> Option<Pieces> {
        let channel = self.bus.followed(self.run)?;
        let batch = Flushed(Arc::new(Batch { channel, after, gathered: Mutex::default() }));
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
        let mut gathered = self.lock();
        gathered.add(delta);
        if !gathered.is_timed && !gathered.deltas.is_empty() {
            gathered.is_timed = true;
            self.pass_on(&mut gathered);
            tokio::spawn(Arc::clone(self).keep_time());
        }
    }

    async fn keep_time(self: Arc<Self>) {
        loop {
            tokio::time::sleep(if self.may_pass() { BATCH } else { SOON }).await;
            let mut gathered = self.lock();
            if gathered.deltas.is_empty() {
                gathered.is_timed = false;
                return;
            }
            self.pass_on(&mut gathered);
        }
    }

    /// Whether what comes before the pieces has been told.
    fn may_pass(&self) -> bool {
        self.channel.last() >= self.after
    }

    /// Under the lock, so that pieces stay in order.
    fn pass_on(&self, gathered: &mut Gathered) {
        if self.may_pass() {
            self.channel.publish_deltas(gathered.deltas.drain(..));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Gathered> {
        self.gathered.lock()
    }
}

/// Passes on what is left when the answer is complete, before the event that holds all of it.
struct Flushed(Arc<Batch>);

impl Drop for Flushed {
    fn drop(&mut self) {
        let mut gathered = self.0.lock();
        gathered.finish();
        let rest = std::mem::take(&mut gathered.deltas);
        if !rest.is_empty() {
            self.0.channel.publish_answer(self.0.after, rest);
        }
    }
}
