//! Pieces of an answer that a model is still writing.
//!
//! They are not events of the journal: followers receive them between events, without a number. The event with
//! the whole answer contains all of them.

use serde::Serialize;
use utoipa::ToSchema;

/// A piece of an answer that a model is still writing, for followers of the run; not numbered and
/// not stored. The whole answer follows in `model.responded`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
pub struct ModelDelta {
    /// The attempt, 1-based.
    pub attempt: u32,
    /// The iteration within the attempt, 1-based.
    pub iteration: u32,
    #[serde(flatten)]
    pub piece: Piece,
}

/// What a [`ModelDelta`] adds.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Piece {
    /// More text.
    Text(String),
    /// More of the thinking that the provider shows.
    Thinking(String),
    /// More of a tool call.
    ToolCall {
        /// 0-based index among the calls of the answer.
        index: usize,
        /// The tool's name for agents, only with the first piece.
        #[serde(skip_serializing_if = "Option::is_none")]
        #[schema(nullable = false)]
        name: Option<String>,
        /// The next piece of the arguments' JSON text.
        arguments: String,
    },
    /// The answer is given up or begun again: discard the pieces so far.
    Restarted(bool),
}

impl ModelDelta {
    /// The name in SSE.
    pub const TYPE_NAME: &'static str = "model.delta";

    /// The same without its text, and without the tool's name, which only the first piece has: equal for all
    /// pieces of one text.
    #[must_use]
    pub fn emptied(&self) -> Self {
        let piece = match &self.piece {
            Piece::Text(_) => Piece::Text(String::new()),
            Piece::Thinking(_) => Piece::Thinking(String::new()),
            Piece::ToolCall { index, .. } => {
                Piece::ToolCall { index: *index, name: None, arguments: String::new() }
            }
            Piece::Restarted(restarted) => Piece::Restarted(*restarted),
        };
        Self { piece, ..*self }
    }

    /// Its text.
    pub fn text_mut(&mut self) -> Option<&mut String> {
        match &mut self.piece {
            Piece::Text(text) | Piece::Thinking(text) => Some(text),
            Piece::ToolCall { arguments, .. } => Some(arguments),
            Piece::Restarted(_) => None,
        }
    }

    /// Whether it is empty.
    pub fn is_empty(&self) -> bool {
        match &self.piece {
            Piece::Text(text) | Piece::Thinking(text) => text.is_empty(),
            Piece::ToolCall { name, arguments, .. } => name.is_none() && arguments.is_empty(),
            Piece::Restarted(_) => false,
        }
    }

    /// Appends a later piece of the same kind; returns any other piece.
    pub fn extend(&mut self, later: Self) -> Result<(), Self> {
        if (self.attempt, self.iteration) != (later.attempt, later.iteration) {
            return Err(later);
        }
        match (&mut self.piece, &later.piece) {
            (Piece::Text(text), Piece::Text(more))
            | (Piece::Thinking(text), Piece::Thinking(more)) => {
                text.push_str(more);
            }
            (
                Piece::ToolCall { index, arguments, .. },
                Piece::ToolCall { index: same, name: None, arguments: more },
            ) if index == same => arguments.push_str(more),
            _ => return Err(later),
        }
        Ok(())
    }
}
