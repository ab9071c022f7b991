//! From a definition and inputs to a system prompt and a first user message.
//!
//! The order of the parts is fixed, the most stable first, so that providers can cache the prefix.

use serde_json::Value;

use super::Definition;

/// A template that cannot be rendered with these inputs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the {part} template cannot be rendered: {message}")]
pub struct PromptError {
    /// `instructions` or `prompt`.
    pub part: &'static str,
    /// Line and reason.
    pub message: String,
}

/// The opening of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Opening {
    /// The system prompt.
    pub system: String,
    /// The first user message.
    pub user: String,
}

/// Renders the opening. `tools` are the names of the tools that are offered.
pub fn opening(definition: &Definition, inputs: &Value, tools: &[&str]) -> Result<Opening, PromptError> {
    let _ = (definition, inputs, tools);
    Err(PromptError { part: "prompt", message: String::new() })
}
