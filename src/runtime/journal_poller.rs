//! Reads what other replicas write to the journals of runs that are followed here.
//!
//! One task asks for the last events of all these runs in one query, and reads the journals that have grown. It
//! asks often while there are new events, and less often the more runs there are, so that its cost is bounded.
//! A run that the store does not know any more was deleted, which its followers learn here. The task ends with
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

/// The pause between two queries: the first one, and the longest one without new events.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// The least pause per followed run.
const PAUSE_PER_RUN: Duration = Duration::from_micros(250);
/// Journals that are read at the same time.
const AT_ONCE: usize = 4;
/// Journal entries of one run that are read at once.
const PAGE: u32 = 100;

impl Runtime {
    /// Publishes what other replicas write, as long as there are followers.
    pub(super) async fn poll_journals(self) {
        let mut pause = FIRST_PAUSE;
        while let Some(followed) = self.inner.bus.to_poll() {
            let elsewhere: HashMap<Uuid, Arc<Channel>> = followed
                .into_iter()
                .filter(|channel| self.inner.driven.live.get(channel.run).is_none())
                .map(|channel| (channel.run, channel))
                .collect();
            let for_all = PAUSE_PER_RUN * u32::try_from(elsewhere.len()).unwrap_or(u32::MAX);
            pause = if self.publish_news(elsewhere).await {
                FIRST_PAUSE
            } else {
                LONGEST_PAUSE.min(pause * 2)
            };
            tokio::select! {
                () = self.inner.replica.drained.cancelled() => return,
                () = tokio::time::sleep(pause.max(for_all)) => {}
                () = self.inner.bus.channel_added(), if for_all < FIRST_PAUSE => pause = FIRST_PAUSE / 2,
            }
        }
    }

    /// Publishes new events; whether there were any. It drops the channels, so that they end with their followers.
    async fn publish_news(&self, channels: HashMap<Uuid, Arc<Channel>>) -> bool {
        let runs: Vec<Uuid> = channels.keys().copied().collect();
        // Followers meet an error of the store themselves when they need the journal.
        let Ok(newest) = self.inner.store.newest_events(&runs).await else { return false };
        let newest: HashMap<Uuid, i64> = newest.into_iter().collect();
        let is_here = |run| self.inner.driven.live.get(run).is_some();
        for channel in channels.values() {
            // A run that was started here in the meantime may not be stored yet.
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
