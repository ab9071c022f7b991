//! Agents: definitions, the catalogue that keeps them fresh, and the prompts made from them.
//!
//! This room reads YAML and renders templates. It does not know models, tools or runs.

pub mod catalogue;
pub mod definition;
pub mod prompt;

pub use catalogue::{Agent, Catalogue, DefinitionProblem};
pub use definition::Definition;
