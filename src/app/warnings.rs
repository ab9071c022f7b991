//! Warnings about definitions and settings that are logged where runs are executed: files that cannot be loaded, and
//! settings without effect.

use super::check::{missing_keys, missing_scenarios, scenarios, unknown_variables};
use super::tools::Tools;
use crate::agents::{Catalogue, DefinitionProblem};
use crate::config::Config;

/// Warnings that arise when the tools are loaded.
pub(super) struct Warnings {
    unknown_variables: Vec<String>,
    /// Features that imported operations do not support.
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
