//! What other replicas write of the runs that are followed here.
//!
//! One task asks for all of these runs at once how far they are, and reads the journals of those that
//! went on. It asks often while something happens, and the less often the more runs there are, so that
//! its cost has a bound. A run of which it hears nothing was deleted: its followers are told. It ends with
//! the last follower.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream;
use uuid::Uuid;

use super::Runtime;
use super::bus::Channel;
use crate::store::StoreError;

/// Between two questions: at first, and when quiet.
const BRISK: Duration = Duration::from_millis(50);
const CALM: Duration = Duration::from_millis(500);
/// How much longer for each run that is asked about.
const FOR_EACH: Duration = Duration::from_micros(250);
/// Journals that are read at the same time.
const AT_ONCE: usize = 4;
/// Journal entries of one run that are read at once.
const PAGE: u32 = 100;

impl Runtime {
    /// Publishes what other replicas write, as long as there are followers.
    pub(super) async fn poll_journals(self) {
        let mut pause = BRISK;
        while let Some(followed) = self.inner.bus.to_poll() {
            let elsewhere: HashMap<Uuid, Arc<Channel>> = followed
                .into_iter()
                .filter(|channel| self.inner.driven.live.get(channel.run).is_none())
                .map(|channel| (channel.run, channel))
                .collect();
            let for_all = FOR_EACH * u32::try_from(elsewhere.len()).unwrap_or(u32::MAX);
            pause = if self.publish_news(elsewhere).await { BRISK } else { CALM.min(pause * 2) };
            tokio::select! {
                () = self.inner.replica.drained.cancelled() => return,
                () = tokio::time::sleep(pause.max(for_all)) => {}
                () = self.inner.bus.joined(), if for_all < BRISK => pause = BRISK / 2,
            }
        }
    }

    /// Whether there was something new. The channels are not held any longer: they end with their
    /// followers.
    async fn publish_news(&self, channels: HashMap<Uuid, Arc<Channel>>) -> bool {
        let runs: Vec<Uuid> = channels.keys().copied().collect();
        // Followers meet an error of the store themselves when they need the journal.
        let Ok(newest) = self.inner.store.newest_events(&runs).await else { return false };
        let newest: HashMap<Uuid, i64> = newest.into_iter().collect();
        let is_here = |run| self.inner.driven.live.get(run).is_some();
        for channel in channels.values() {
            // One that has begun here in the meantime may not be stored yet.
            if !newest.contains_key(&channel.run) && !is_here(channel.run) {
                channel.run_is_gone();
            }
        }
        let has_new = |channel: &&Arc<Channel>| {
            newest.get(&channel.run).is_some_and(|seq| channel.last() < *seq)
        };
        let news: Vec<&Arc<Channel>> = channels.values().filter(has_new).collect();
        let has_news = !news.is_empty();
        stream::iter(news)
            .for_each_concurrent(AT_ONCE, async |channel| {
                let (store, after) = (&self.inner.store, channel.last());
                match store.events(&channel.tenant, channel.run, after, PAGE).await {
                    Ok(events) => channel.publish(events.into_iter()),
                    // Followers read the journal, up to that event and behind it.
                    Err(StoreError::UnreadableEvent { .. }) => {
                        let seq = newest.get(&channel.run).copied();
                        channel.mark_published(seq.unwrap_or_default());
                    }
                    Err(_) => {} // asked again
                }
            })
            .await;
        has_news
    }
}
