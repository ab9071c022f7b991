//! What earlier runs of a session said, as a later one takes it over.
//!
//! A run gives its own turns as they were: not those that it took over itself, which earlier runs
//! give. Where a summary stands for both, its turns stand for all runs before it. Which runs there
//! are is the store's to say.

use std::collections::HashMap;

use uuid::Uuid;

use crate::agents::definition::HistorySection;
use crate::engine::{FoldError, Rules, State};
use crate::event::Event;
use crate::message::Turn;
use crate::providers::estimate;

/// What one run gives to later ones.
#[derive(Debug, Default, PartialEq)]
pub struct RunTurns {
    /// In order; none where no model answered.
    pub turns: Vec<Turn>,
    /// Whether they stand for all runs before it as well.
    pub stand_for_earlier: bool,
}

/// What the earlier runs of a session give to the next one.
#[derive(Debug, Default, PartialEq)]
pub(super) struct History {
    /// The oldest first.
    pub(super) turns: Vec<Turn>,
    /// How many runs gave them.
    pub(super) runs: usize,
    /// Their tokens, estimated.
    pub(super) tokens: u64,
}

/// What a run said and was told, from its journal.
///
/// # Errors
/// [`FoldError`] where the journal is damaged.
pub fn own_turns(journal: &[Event]) -> Result<RunTurns, FoldError> {
    let mut state = State::new(Rules::default());
    journal.iter().try_for_each(|event| state.apply(event))?;
    let conversation = state.conversation();
    let turns = conversation.turns().get(conversation.history()..).unwrap_or_default();
    if !turns.iter().any(|turn| matches!(turn, Turn::Assistant(_))) {
        return Ok(RunTurns::default());
    }
    let stand_for_earlier = conversation.history() == 0 && state.taken_over() > 0;
    Ok(RunTurns { turns: turns.to_vec(), stand_for_earlier })
}

/// The newest runs that have room, whole ones; `earlier` are their ids, the oldest first.
/// `journals` holds each journal in one piece.
pub(super) fn history(journals: &[Event], earlier: &[Uuid], bounds: HistorySection) -> History {
    let mut by_run: HashMap<Uuid, &[Event]> = journals
        .chunk_by(|a, b| a.run_id == b.run_id)
        .map(|journal| (journal[0].run_id, journal))
        .collect();
    let mut given: Vec<Vec<Turn>> = Vec::new();
    let mut tokens = 0;
    let max_runs = usize::try_from(bounds.max_runs).unwrap_or(usize::MAX);
    for journal in earlier.iter().rev().filter_map(|run| by_run.remove(run)) {
        let own = own_turns(journal).unwrap_or_else(|error| {
            tracing::warn!(run_id = %journal[0].run_id, %error, "an earlier run of the session cannot be read");
            RunTurns::default()
        });
        if own.turns.is_empty() {
            continue;
        }
        let more = estimate::tokens(own.turns.iter().map(estimate::turn_bytes).sum());
        if given.len() >= max_runs || tokens + more > bounds.max_tokens {
            break;
        }
        tokens += more;
        given.push(own.turns);
        if own.stand_for_earlier {
            break;
        }
    }
    let runs = given.len();
    History { turns: given.into_iter().rev().flatten().collect(), runs, tokens }
}

#[cfg(test)]
#[path = "history_tests.rs"]
mod tests;
