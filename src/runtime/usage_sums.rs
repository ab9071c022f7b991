//! Moving what commits have added to the sums of usage.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::clock;
use crate::store::Store;

/// The pause between two looks. Until it is moved, each reader adds it up.
const POLL_INTERVAL: Duration = Duration::from_secs(5);
/// Rows that are moved in one transaction, at most.
const PORTION: u32 = 1000;

/// Moves it, until the service stops. All replicas do, each taking what the others leave.
pub(super) async fn add_up(store: Arc<Store>, stop: CancellationToken) {
    let mut look = clock::every(POLL_INTERVAL);
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            _ = look.tick() => {}
        }
        while !stop.is_cancelled() {
            match store.add_up_usage(PORTION).await {
                Ok(PORTION) => {}
                Ok(_) => break,
                Err(error) => {
                    error.log_retry("usage sums could not be updated; retrying");
                    break;
                }
            }
        }
    }
}
