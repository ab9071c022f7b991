//! Agents: definitions, the catalogue that keeps them fresh, and the prompts made from them.
//!
//! This module reads YAML and renders templates. It does not know models, tools or runs: whether a
//! provider or a tool exists is asked through the check that [`Catalogue::load`] is given.

pub mod definition;

pub mod agent;
pub mod checks;
pub mod directories;
mod mistakes;
mod rules;
pub mod yaml;

pub mod catalogue;
pub mod prompt;
pub mod skills;

pub use agent::Agent;
pub use catalogue::{Catalogue, Change, DefinitionProblem};
pub use checks::is_agent_name;
pub use definition::Definition;
pub use mistakes::without_failed_examples;
pub use skills::{Skill, Skills};
pub use yaml::DefinitionError;
