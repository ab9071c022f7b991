//! What the process says about itself: logs on standard error, as text or as JSON lines.
//!
//! `TOOLLOOP_LOG` filters them (`debug`, `toolloop=trace,sqlx=warn`, …). Nothing that a caller sent
//! and no secret is logged at `info` or above. Facts about runs are events, not logs.

use std::io::IsTerminal as _;

use tracing_subscriber::EnvFilter;

/// The variable that filters logs.
const FILTER_VARIABLE: &str = "TOOLLOOP_LOG";

/// How logs are written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for machines.
    Json,
}

/// Sends logs to standard error from now on. `default` is the filter where the variable is unset.
///
/// # Errors
/// The filter in the variable cannot be understood, or logging was started before.
pub fn start(format: LogFormat, default: &str) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let filter = match std::env::var(FILTER_VARIABLE) {
        Ok(filter) if !filter.is_empty() => {
            EnvFilter::try_new(&filter).map_err(|e| format!("environment variable {FILTER_VARIABLE}: {e}"))?
        }
        _ => EnvFilter::try_new(default)?,
    };
    let subscriber = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match format {
        LogFormat::Text => subscriber.with_ansi(std::io::stderr().is_terminal()).try_init(),
        LogFormat::Json => subscriber.json().flatten_event(true).with_current_span(false).try_init(),
    }
}
