//! Places of large requests: while a model is asked, the body of its request is in memory beside what
//! it was made of.

use std::sync::LazyLock;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::bounds::memory;
use crate::providers::ModelRequest;

/// Bytes of a request that needs no place.
const SMALL: usize = 256 << 10;
/// What large requests may take together, in KiB.
static KIB: LazyLock<u32> = LazyLock::new(|| {
    let kib = memory::part().map_or(u64::MAX, |part| part / 1024);
    u32::try_from(kib.clamp(16 << 10, 1 << 20)).unwrap_or(1 << 20)
});
static PLACES: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(*KIB as usize));

/// The place of a large request.
pub(super) type Place = SemaphorePermit<'static>;

/// Waits until a request has a place among the large ones; `None` for a small one.
pub(super) async fn place(request: &ModelRequest<'_>) -> Option<Place> {
    let tools = request.tools.iter();
    let tools = tools.map(|tool| tool.description.len() + tool.input_schema.json_len());
    place_of(request.conversation.bytes() + tools.sum::<usize>()).await
}

async fn place_of(bytes: usize) -> Option<Place> {
    if bytes <= SMALL {
        return None;
    }
    let kib = u32::try_from(bytes / 1024).unwrap_or(u32::MAX).min(*KIB);
    PLACES.acquire_many(kib).await.ok() // never closed
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_large_request_waits_for_others_and_a_small_one_does_not() {
        let all = place_of(usize::MAX).await;
        assert!(all.is_some() && place_of(SMALL).await.is_none());
        let mut large = std::pin::pin!(place_of(SMALL + 1));
        assert!(large.as_mut().now_or_never().is_none());
        drop(all);
        assert!(large.await.is_some());
    }
}
