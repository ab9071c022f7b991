//! Decides when the conversation must get smaller before the next model call.
//!
//! This happens at most twice in an iteration: once because the window is nearly full by our estimate, once
//! because a provider refused the call. [`context`] decides what is removed.

use std::slice;

use serde::{Deserialize, Serialize};

use super::State;
use crate::engine::context::{self, Compaction, Load};
use crate::event::{CompactionCause, ContextCompacted};
use crate::message::Turn;
use crate::providers::estimate;

/// After so many summaries in a row that gained nothing, no more are requested.
const MOST_FRUITLESS: u32 = 2;
/// After a summary that gained nothing, the conversation must grow by 1/8 of the window before the next.
const GROWTH: u64 = 8;

/// Consecutive requested summaries that gained nothing.
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
    /// The compaction after a provider refused a model call that did not fit; `None` if there was one in this
    /// iteration, or nothing can be removed. `model` is the one that refused it, as `provider/model`.
    pub fn recovery(&self, model: &str, failed_tries: u32) -> Option<Compaction> {
        let cause = CompactionCause::ProviderRefused;
        if self.compactions.contains(&cause) {
            return None;
        }
        let refused_by = self.rules.windows.iter().find(|window| window.model == model);
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

    /// The compaction of a window that is nearly full.
    pub(super) fn compaction(&self) -> Option<Compaction> {
        let windows = &self.rules.windows;
        let last = self.answered_last.as_ref();
        let current = last.and_then(|last| windows.iter().find(|window| window.model == *last));
        let tokens = current.or(windows.first())?.tokens?;
        if !self.compactions.is_empty() || self.next_input() <= context::nearly_full(tokens) {
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

    /// Whether a summary may gain something, judging by earlier ones.
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

    /// The model that probably reads the conversation next: the last one, else the first.
    pub(super) fn readers(&self) -> &[String] {
        let first = || self.rules.windows.first().map(|window| &window.model);
        self.totals.model.as_ref().or_else(first).map_or(&[][..], slice::from_ref)
    }

    /// Tokens that the next model call would read: those of the last call and what was added since, or an
    /// estimate by size.
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
