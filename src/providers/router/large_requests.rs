//! Places of large requests: while a model is asked, the body of its request is in memory beside what
//! it was made of.

use std::sync::LazyLock;

use tokio::sync::SemaphorePermit;

use crate::bounds::memory::Places;
use crate::providers::ModelRequest;

/// Bytes of a request that needs no place.
const SMALL: usize = 256 << 10;

static PLACES: LazyLock<Places> = LazyLock::new(Places::of_part);

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
    PLACES.take(bytes as u64).await
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
