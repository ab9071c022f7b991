//! Parses large answers on the blocking pool. Parsing takes several times their size in memory, so only a
//! few are parsed at the same time.

use tokio::sync::Semaphore;

use crate::fairness::{self, Hold};

/// Answers that are parsed at the same time, of all tools together.
static PLACES: Semaphore = Semaphore::const_new(4);

/// Runs a parser once a permit is free; `None` if it panics.
pub(super) async fn run<T: Send + 'static>(
    reading: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let hold = Hold::of_scarce().await; // else the permit would wait with the work of a busy tenant
    let place = PLACES.acquire().await.ok(); // never closed
    let reading = move || {
        let _held = (hold, place);
        reading()
    };
    fairness::blocking(reading).await.ok()
}
