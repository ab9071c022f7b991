//! What is logged of definitions and settings where runs are executed: files that did not load, and
//! what has no effect.

use super::check::{missing_keys, missing_scenarios, scenarios, unknown_variables};
use super::tools::Tools;
use crate::agents::{Catalogue, DefinitionProblem};
use crate::config::Config;

/// What only the loading of the tools knows.
pub(super) struct Warnings {
    unknown_variables: Vec<String>,
    /// What imported operations do without.
    left_out: Vec<DefinitionProblem>,
}

impl Warnings {
    pub(super) fn of(config: &Config, tools: Tools) -> Self {
        let unknown_variables = unknown_variables(config, &tools).collect();
        Self { unknown_variables, left_out: tools.left_out }
    }

    pub(super) fn log(&self, config: &Config, catalogue: &Catalogue) {
        for DefinitionProblem { file, error } in catalogue.problems() {
            tracing::error!(file, error, "definition not loaded");
        }
        for unknown in &self.unknown_variables {
            tracing::warn!("{unknown}");
        }
        for DefinitionProblem { file, error: part } in &self.left_out {
            tracing::warn!(file, part, "a tool lacks a part of its operation");
        }
        for (variable, agents) in missing_keys(config, catalogue) {
            let agents = agents.join(" ");
            tracing::warn!(variable, agents, "not set: calls of models go without a key");
        }
        for DefinitionProblem { file, error } in missing_scenarios(&scenarios(config), catalogue) {
            tracing::warn!(file, error, "scenario missing");
        }
    }
}
