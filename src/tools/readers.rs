//! What others answered is read on threads for such work. Large answers take several times their size in the meantime, so
//! few are read at the same time.

use tokio::sync::Semaphore;

use crate::fairness;

/// Those that are read at the same time, whatever tool asked for them.
static PLACES: Semaphore = Semaphore::const_new(4);

/// Reads something when there is a place for it; nothing where that panicked.
pub(super) async fn read<T: Send + 'static>(
    reading: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let place = PLACES.acquire().await.ok(); // never closed
    let reading = move || {
        let _place = place;
        reading()
    };
    fairness::blocking(reading).await.ok()
}
