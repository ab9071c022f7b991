//! Retries of a run in progress while the store is unavailable.

use std::time::Duration;

use tokio::time::Instant;

use crate::engine::AppendFailed;
use crate::store::StoreError;

/// The pause between two tries.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Repeats a request to the store while it is unavailable, as long as a run may wait for it.
pub(super) async fn retry_while_unavailable<T, F>(
    patience: Duration,
    ask: impl Fn() -> F,
) -> Result<T, AppendFailed>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let until = Instant::now() + patience;
    let mut has_logged = false;
    loop {
        match ask().await {
            Ok(answer) => return Ok(answer),
            Err(error) if error.is_transient() && Instant::now() < until => {
                if !std::mem::replace(&mut has_logged, true) {
                    tracing::warn!(%error, "a run's reads and writes wait for the store");
                }
                tokio::time::sleep(POLL_INTERVAL).await;
            }
            Err(error) if error.is_transient() => return Err(AppendFailed::Unavailable),
            Err(error) => {
                tracing::error!(%error, "the store refused a statement of a run");
                return Err(AppendFailed::Refused);
            }
        }
    }
}
