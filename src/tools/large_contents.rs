//! Memory permits for calls that hold large contents (of files, or outputs of programs): all of them
//! together hold no more than a fraction of the process's memory limit.

use std::sync::LazyLock;

use tokio::sync::SemaphorePermit;

use crate::bounds::memory::{self, MemorySemaphore};

/// Bytes that need no permit.
const SMALL: u64 = 64 << 10;

static TURNS: LazyLock<MemorySemaphore> = LazyLock::new(MemorySemaphore::of_share);

/// The permit of one call.
pub(super) type Turn = SemaphorePermit<'static>;

/// Waits for a permit for this many bytes; `None` if they are few.
pub(super) async fn turn(bytes: u64) -> Option<Turn> {
    if bytes <= SMALL {
        return None;
    }
    let turn = TURNS.acquire(bytes).await;
    memory::wait_while_scarce().await;
    turn
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn large_contents_take_turns() {
        let all = TURNS.bytes();
        let (most, small) = (turn(all - SMALL).await, turn(SMALL).await);
        assert!(most.is_some() && small.is_none());
        let mut larger_than_all = std::pin::pin!(turn(u64::MAX));
        assert!(larger_than_all.as_mut().now_or_never().is_none());
        drop(most);
        assert!(larger_than_all.await.is_some());
    }
}
