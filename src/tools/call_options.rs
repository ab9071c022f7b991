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
    /// The calls per minute of all runs of one caller.
    pub per_minute: Option<u32>,
    /// Whether the result of a call that only reads is used again.
    pub cache: bool,
    /// How a call is treated that must not be repeated, and whose outcome is unknown after a crash.
    pub on_unknown_outcome: OnUnknownOutcome,
    /// The labels that its results give to the run.
    pub yields: Labels,
    /// Whether `yields` is declared, and also applies to what programs read from the network.
    pub declares_yields: bool,
    /// JSON pointers of arguments that are paths of the workspace.
    pub paths: Vec<String>,
    /// Labels that its results do not give to the run, whatever was read to produce them.
    pub sanitizes: Labels,
}
