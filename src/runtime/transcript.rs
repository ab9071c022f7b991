//! A run's complete conversation, from its journal: including the turns that a compaction has removed for the
//! model, and the response with open calls.
//!
//! The state keeps only what the model reads. Here every turn is kept, and marked when the model no longer reads
//! it.

use std::collections::HashSet;

use uuid::Uuid;

use super::journals;
use crate::engine::{Rules, State};
use crate::event::{ContextCompacted, Event, RunEvent};
use crate::message::{AssistantMessage, ToolResult, Turn};
use crate::store::StoreError;

/// A complete conversation.
#[derive(Debug, Default)]
pub struct Transcript {
    /// The system prompt.
    pub system: String,
    /// Every turn, in the order in which they are read.
    pub turns: Vec<KeptTurn>,
    /// The calls whose results were replaced by a note of their size.
    pub cleared: HashSet<Uuid>,
    /// The last response, while calls of it have no result, with the results so far.
    pub open: Option<(AssistantMessage, Vec<ToolResult>)>,
}

/// A turn as it was before any compaction.
#[derive(Debug)]
pub struct KeptTurn {
    /// With its results, including cleared ones.
    pub turn: Turn,
    /// Whether a summary has replaced it.
    pub is_summarised: bool,
}

/// The whole conversation of a run.
///
/// # Errors
/// [`StoreError::UnreadableEvent`] where the journal is damaged.
pub fn transcript(journal: &[Event]) -> Result<Transcript, StoreError> {
    let mut state = State::new(Rules::default());
    let mut kept = Transcript::default();
    // The indices of the turns that the model still reads.
    let mut read: Vec<usize> = Vec::new();
    for event in journal {
        if let RunEvent::ContextCompacted(compacted) = &event.what {
            kept.compact(&mut read, state.conversation().history(), compacted);
        }
        journals::apply(&mut state, event)?;
        let turns = state.conversation().turns();
        for (turn, index) in turns.iter().skip(read.len()).zip(kept.turns.len()..) {
            kept.turns.push(KeptTurn { turn: turn.clone(), is_summarised: false });
            read.push(index);
        }
    }
    state.conversation().system().clone_into(&mut kept.system);
    kept.open =
        state.open_turn().map(|(message, results)| (message.clone(), results.cloned().collect()));
    Ok(kept)
}

impl Transcript {
    /// Marks what a compaction removes, and inserts its summary after that.
    fn compact(&mut self, read: &mut Vec<usize>, history: usize, compacted: &ContextCompacted) {
        self.cleared.extend(&compacted.cleared);
        let Some(summary) = compacted.summary.as_ref().filter(|summary| summary.turns > 0) else {
            return;
        };
        let taken: Vec<usize> =
            (0..read.len()).filter(|index| *index != history).take(summary.turns).collect();
        let Some(last) = taken.iter().filter_map(|index| read.get(*index)).max().copied() else {
            return;
        };
        for kept in taken.iter().filter_map(|index| read.get(*index)) {
            if let Some(kept) = self.turns.get_mut(*kept) {
                kept.is_summarised = true;
            }
        }
        // A summary of more than the turns of earlier runs comes after the run's first message.
        let behind = if taken.len() > history {
            last.max(read.get(history).copied().unwrap_or(last))
        } else {
            last
        };
        let turn = Turn::User(summary.text.clone());
        self.turns.insert(behind + 1, KeptTurn { turn, is_summarised: false });
        *read = (0..self.turns.len())
            .filter(|index| self.turns.get(*index).is_some_and(|kept| !kept.is_summarised))
            .collect();
    }
}
