//! Adds the usage that commits have recorded to the sums of usage.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::store::Store;

/// The pause between two rounds. Until usage is added to the sums, each reader adds it up itself.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Rows that are added in one transaction, at most.
const BATCH: u32 = 1000;

/// Adds it up, until the service stops. All replicas share this work.
pub(super) async fn add_up(store: Arc<Store>, stop: CancellationToken) {
    let mut look = clock::every(POLL_INTERVAL);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = look.tick() => {}
        }
        while !stop.is_cancelled() {
            match store.add_up_usage(BATCH).await {
                Ok(BATCH) => {}
                Ok(_) => break,
                Err(error) => {
                    error.log_retry("usage sums could not be updated; retrying");
                    break;
                }
            }
        }
    }
}
