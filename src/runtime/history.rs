//! The turns of earlier runs of a session, for a later run.
//!
//! Each run contributes its own turns, not those that it took over from earlier runs. If a summary replaces
//! both, the turns of that run replace those of all earlier runs.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::journals;
use crate::agents::definition::HistorySection;
use crate::engine::{Rules, State};
use crate::event::{ContextCompacted, Event, RunEvent, ToolCallBlocked, ToolCallCompleted};
use crate::message::Turn;
use crate::providers::estimate;
use crate::run::TerminationReason;
use crate::store::StoreError;

/// The turns that one run contributes to later ones.
#[derive(Debug, Default, PartialEq)]
pub struct RunTurns {
    /// In order; none where no model answered.
    pub turns: Vec<Turn>,
    /// Whether they replace the turns of all earlier runs as well, as a summary of both does.
    pub replaces_earlier: bool,
}

/// The turns of earlier runs for the next one: as many of the newest runs as fit, each as a whole.
#[derive(Debug)]
pub(super) struct History {
    bounds: HistorySection,
    /// The models that read them, each as `provider/model`.
    readers: Vec<String>,
    newest_first: Vec<Vec<Turn>>,
    tokens: u64,
    /// Whether no older run is added.
    is_complete: bool,
}

/// The conversation of a run, from its journal.
///
/// # Errors
/// [`StoreError::UnreadableEvent`] where the journal is damaged.
pub fn own_turns(journal: &[Event]) -> Result<RunTurns, StoreError> {
    let mut state = State::new(Rules::default());
    journal.iter().try_for_each(|event| journals::apply(&mut state, event))?;
    let conversation = state.conversation();
    let turns = conversation.turns().get(conversation.history()..).unwrap_or_default();
    if !turns.iter().any(|turn| matches!(turn, Turn::Assistant(_))) {
        return Ok(RunTurns::default());
    }
    let replaces_earlier = conversation.history() == 0 && state.taken_over() > 0;
    Ok(RunTurns { turns: turns.to_vec(), replaces_earlier })
}

/// The events from which a turn was made.
#[derive(Debug, Clone, PartialEq)]
pub struct TurnSource {
    /// The event of the message itself: number and time.
    pub said: (i64, DateTime<Utc>),
    /// The events of its calls' results.
    pub results: HashMap<Uuid, (i64, DateTime<Utc>)>,
}

/// The source of each turn of a run's conversation, including turns that a summary has replaced.
///
/// # Errors
/// [`StoreError::UnreadableEvent`] where the journal is damaged.
pub fn turn_sources(journal: &[Event]) -> Result<Vec<TurnSource>, StoreError> {
    let mut state = State::new(Rules::default());
    let mut sources: Vec<TurnSource> = Vec::new();
    let mut answer = None;
    let mut result_sources = HashMap::new();
    for event in journal {
        let here = (event.seq, event.at);
        if event.what.proposed().is_some() {
            answer = Some(here);
        }
        if let RunEvent::ToolCallCompleted(ToolCallCompleted { call_id, .. })
        | RunEvent::ToolCallBlocked(ToolCallBlocked { call_id, .. }) = &event.what
        {
            result_sources.insert(*call_id, here);
        }
        if let RunEvent::ContextCompacted(ContextCompacted { summary: Some(summary), .. }) =
            &event.what
        {
            sources = summarised(sources, state.conversation().history(), summary.turns, here);
        }
        journals::apply(&mut state, event)?;
        let turns = state.conversation().turns();
        for turn in turns.iter().skip(sources.len()) {
            let said = match turn {
                Turn::Assistant(_) => answer.unwrap_or(here),
                Turn::User(_) => here,
            };
            let results_of_turn = match turn {
                Turn::Assistant(turn) => turn.results(),
                Turn::User(_) => &[],
            };
            let results = results_of_turn.iter().map(|result| {
                (result.call_id, result_sources.remove(&result.call_id).unwrap_or(here))
            });
            let results = results.collect();
            sources.push(TurnSource { said, results });
        }
    }
    Ok(sources)
}

/// Replaces the sources of the oldest turns, which a summary replaces, by one source. The run's first message,
/// which comes after the `history` turns of earlier runs, keeps its own. If the summary also replaces turns
/// after that message, it comes after it.
fn summarised(
    sources: Vec<TurnSource>,
    history: usize,
    turns: usize,
    here: (i64, DateTime<Utc>),
) -> Vec<TurnSource> {
    let taken: Vec<usize> = (0..sources.len()).filter(|at| *at != history).take(turns).collect();
    let Some(last) = taken.last().copied() else { return sources };
    let behind = if taken.len() > history { last.max(history) } else { last };
    let mut kept = Vec::new();
    for (at, source) in sources.into_iter().enumerate() {
        if !taken.contains(&at) {
            kept.push(source);
        }
        if at == behind {
            kept.push(TurnSource { said: here, results: HashMap::new() });
        }
    }
    kept
}

impl History {
    /// Without any run yet.
    pub(super) fn within(bounds: HistorySection, readers: &[String]) -> Self {
        let readers = readers.to_vec();
        Self { bounds, readers, newest_first: Vec::new(), tokens: 0, is_complete: false }
    }

    /// Adds the next older run as a whole, unless it or a newer one did not fit. If the run ended because the
    /// context window was too small for its history, the limit for it and all older runs is halved. So a
    /// session can continue with any context window.
    ///
    /// # Errors
    /// [`StoreError::UnreadableEvent`] where the journal is damaged, whether there is room or not.
    pub(super) fn add(&mut self, journal: &[Event]) -> Result<(), StoreError> {
        let own = own_turns(journal)?;
        if self.is_complete {
            return Ok(());
        }
        if overflowed(journal) {
            self.bounds.max_tokens /= 2;
        }
        if own.turns.is_empty() {
            return Ok(());
        }
        let more = own.turns.iter().map(|turn| estimate::turn_bytes(turn, &self.readers));
        let more = estimate::tokens(more.sum());
        let max_runs = usize::try_from(self.bounds.max_runs).unwrap_or(usize::MAX);
        if self.runs() >= max_runs || self.tokens + more > self.bounds.max_tokens {
            self.is_complete = true;
            return Ok(());
        }
        self.tokens += more;
        self.newest_first.push(own.turns);
        self.is_complete = own.replaces_earlier;
        Ok(())
    }

    /// How many runs contributed turns.
    pub(super) fn runs(&self) -> usize {
        self.newest_first.len()
    }

    /// Their tokens, estimated.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// The turns, the oldest first.
    pub(super) fn into_turns(self) -> Vec<Turn> {
        self.newest_first.into_iter().rev().flatten().collect()
    }
}

/// Whether a run took over turns and ended because the context window was too small.
fn overflowed(journal: &[Event]) -> bool {
    let took_over = journal
        .iter()
        .any(|event| matches!(event.what, RunEvent::RunStarted { history, .. } if history > 0));
    let ending = journal.last().and_then(|event| event.what.ending());
    let reason = ending.map(|ending| ending.outcome.reason());
    took_over && reason == Some(TerminationReason::ContextOverflow)
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
