//! Memory permits of large requests: during a model call the body of the request is in memory in
//! addition to the conversation.

use std::sync::LazyLock;

use tokio::sync::SemaphorePermit;

use crate::bounds::memory::MemorySemaphore;
use crate::providers::{ModelRequest, ToolOffer};

/// Bytes of a request that needs no permit.
const SMALL: usize = 256 << 10;

static PLACES: LazyLock<MemorySemaphore> = LazyLock::new(MemorySemaphore::of_share);

/// The permit of a large request.
pub(super) type Place = SemaphorePermit<'static>;

/// Waits for the permit of a large request; `None` for a small one.
pub(super) async fn place(request: &ModelRequest<'_>) -> Option<Place> {
    let tools = request.tools.iter().map(ToolOffer::bytes).sum::<usize>();
    place_of(request.conversation.bytes() + tools).await
}

async fn place_of(bytes: usize) -> Option<Place> {
    if bytes <= SMALL {
        return None;
    }
    PLACES.acquire(bytes as u64).await
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
