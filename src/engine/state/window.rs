//! Decisions about the context window: when the conversation must get smaller before the next model
//! call.
//!
//! Once in an iteration because the window is nearly full by our estimate, once because a provider
//! said so. What is taken from the conversation then is decided in [`context`].

use std::slice;

use serde::{Deserialize, Serialize};

use super::State;
use crate::engine::context::{self, Compaction, Load};
use crate::event::{CompactionCause, ContextCompacted};
use crate::message::Turn;
use crate::providers::estimate;

/// Summaries in a row that gained nothing, after which no more is asked for.
const MOST_FRUITLESS: u32 = 2;
/// After one of them the conversation must grow by one part in so many of the window.
const GROWTH: u64 = 8;

/// Summaries in a row that a model was asked for and that gained nothing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Fruitless {
    summaries: u32,
    /// Bytes of the conversation after the last of them.
    bytes: u64,
}

impl Fruitless {
    pub(super) fn note(&mut self, compacted: &ContextCompacted) {
        // A call that was refused has failed tries of its own.
        let has_failed =
            compacted.cause == CompactionCause::WindowNearlyFull && compacted.failed_tries > 0;
        if compacted.summary.is_some() {
            *self = Self::default();
        } else if compacted.call.is_some() || has_failed {
            *self =
                Self { summaries: self.summaries.saturating_add(1), bytes: compacted.bytes_after };
        }
    }
}

impl State {
    /// What to do about a model call that a provider refused because it did not fit; nothing where
    /// that was tried in this iteration, or nothing can be taken away. `place` is that of the model
    /// among the plan's.
    pub fn recovery(&self, place: usize, failed_tries: u32) -> Option<Compaction> {
        let cause = CompactionCause::ProviderRefused;
        if self.compactions.contains(&cause) {
            return None;
        }
        let refused_by = self.rules.windows.get(place);
        let window = refused_by.and_then(|window| window.tokens);
        let readers = refused_by.map_or(&[][..], |window| slice::from_ref(&window.model));
        let load = self.load(readers);
        let may_summarise = self.fruitless.summaries < MOST_FRUITLESS;
        let mut compaction =
            context::plan(&self.conversation, load, readers, cause, window, may_summarise)?;
        compaction.failed_tries = failed_tries;
        Some(compaction)
    }

    /// The context window of a model of the run, if known.
    pub fn window_of(&self, provider: &str, model: &str) -> Option<u64> {
        let is_it = |name: &str| name.split_once('/') == Some((provider, model));
        self.rules.windows.iter().find(|window| is_it(&window.model))?.tokens
    }

    /// What to do about a window that is nearly full.
    pub(super) fn compaction(&self) -> Option<Compaction> {
        let windows = &self.rules.windows;
        let last = self.totals.model.as_ref();
        let current = last.and_then(|last| windows.iter().find(|window| window.model == *last));
        let tokens = current.or(windows.first())?.tokens?;
        if !self.compactions.is_empty() || self.next_input() <= context::full(tokens) {
            return None;
        }
        let load = self.load(self.readers());
        context::plan(
            &self.conversation,
            load,
            self.readers(),
            CompactionCause::WindowNearlyFull,
            Some(tokens),
            self.is_summary_due(load, tokens),
        )
    }

    /// Whether a summary may gain something, as far as earlier ones tell.
    fn is_summary_due(&self, load: Load, window: u64) -> bool {
        let Fruitless { summaries, bytes } = self.fruitless;
        let now = estimate::bytes(&self.conversation, self.readers());
        let grown = now.saturating_sub(usize::try_from(bytes).unwrap_or(usize::MAX));
        summaries == 0 || (summaries < MOST_FRUITLESS && grown >= load.bytes_of(window / GROWTH))
    }

    fn load(&self, readers: &[String]) -> Load {
        let offered =
            usize::try_from(self.rules.offered_tokens.saturating_mul(4)).unwrap_or(usize::MAX);
        let bytes = estimate::bytes(&self.conversation, readers).saturating_add(offered);
        Load { tokens: self.next_input(), bytes }
    }

    /// The model that reads the conversation next, as far as is known: the last one, else the first.
    pub(super) fn readers(&self) -> &[String] {
        let first = || self.rules.windows.first().map(|window| &window.model);
        self.totals.model.as_ref().or_else(first).map_or(&[][..], slice::from_ref)
    }

    /// Tokens that the next model call would read: what the last one took and what was added since,
    /// else all of it by its size.
    pub(super) fn next_input(&self) -> u64 {
        if self.last_tokens == 0 {
            let said = estimate::of_conversation(&self.conversation, self.readers());
            return said + self.rules.offered_tokens;
        }
        let added =
            self.conversation.turns().iter().skip(self.counted_turns).map(|turn| match turn {
                Turn::User(text) => text.len(),
                Turn::Assistant(turn) => {
                    turn.results().iter().map(|result| result.content.len()).sum()
                }
            });
        self.last_tokens.saturating_add(estimate::tokens(added.sum()))
    }
}
