//! What a definition's `tool_options` say of the calls of one tool.
//!
//! Limits of a run and defaults of a tool are applied where these are made and used.

use std::time::Duration;

use crate::run::{Labels, OnUnknownOutcome};

/// How the calls of one tool are executed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallOptions {
    /// How often a call that may be repeated is repeated after it failed.
    pub retries: u32,
    /// How long one try may take, instead of what the run says.
    pub timeout: Option<Duration>,
    /// How many calls all runs of one caller may make in a minute.
    pub per_minute: Option<u32>,
    /// Whether the result of a call that only reads is used again.
    pub cache: bool,
    /// What becomes of a call that must not be repeated and whose outcome a crash leaves unknown.
    pub on_unknown_outcome: OnUnknownOutcome,
    /// What its results label the run.
    pub yields: Labels,
    /// Whether that is declared, and holds for what programs read of the network too.
    pub declares_yields: bool,
    /// JSON pointers of arguments that are paths of the workspace.
    pub paths: Vec<String>,
    /// What they do not, whatever was read to make them.
    pub sanitizes: Labels,
}
