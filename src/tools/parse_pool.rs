//! Parses large answers on the blocking pool. Parsing takes several times their size in memory, so only a
//! few are parsed at the same time.

use std::sync::LazyLock;

use crate::bounds::memory::TenantSemaphore;
use crate::fairness::{self, Hold};

/// Answers that are parsed at the same time, of all tools together, half of them for one tenant.
const MAX_PARSED: usize = 4;
static PLACES: LazyLock<TenantSemaphore> = LazyLock::new(|| TenantSemaphore::new(MAX_PARSED));

/// Runs a parser for this tenant once a permit is free; `None` if it panics.
pub(super) async fn run<T: Send + 'static>(
    tenant: &str,
    reading: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let hold = Hold::of_scarce().await; // else the permit would wait with the work of a busy tenant
    let place = PLACES.acquire(tenant).await; // never closed
    let reading = move || {
        let _held = (hold, place);
        reading()
    };
    fairness::blocking(reading).await.ok()
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn no_tenant_has_all_places() {
        let half = [PLACES.acquire("one").await, PLACES.acquire("one").await];
        assert!(half.iter().all(Option::is_some));
        assert!(PLACES.acquire("one").now_or_never().is_none());
    }
}
