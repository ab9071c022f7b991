//! Calls that hold large contents of files in memory take turns: all of them together hold no more than
//! a part of what the process may have.

use std::sync::LazyLock;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::bounds::memory;

/// Bytes that need no turn.
const SMALL: u64 = 64 << 10;
/// The least and the most that they may take, in KiB.
const LEAST: u64 = 16 << 10;
const MOST: u64 = 1 << 20;

static KIB: LazyLock<u32> = LazyLock::new(|| {
    let part = memory::part().map_or(MOST, |part| part >> 10);
    u32::try_from(part.clamp(LEAST, MOST)).unwrap_or(u32::MAX)
});
static TURNS: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(*KIB as usize));

/// The turn of one call.
pub(super) type Turn = SemaphorePermit<'static>;

/// Waits until so many bytes may be in memory; `None` where they are few. A call that needs more than all
/// may have is alone.
pub(super) async fn turn(bytes: u64) -> Option<Turn> {
    if bytes <= SMALL {
        return None;
    }
    let kib = u32::try_from(bytes >> 10).unwrap_or(u32::MAX).min(*KIB);
    let turn = TURNS.acquire_many(kib).await.ok(); // never closed
    memory::enough().await;
    turn
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn large_contents_take_turns() {
        let all = u64::from(*KIB) << 10;
        let (most, small) = (turn(all - SMALL).await, turn(SMALL).await);
        assert!(most.is_some() && small.is_none());
        let mut larger_than_all = std::pin::pin!(turn(u64::MAX));
        assert!(larger_than_all.as_mut().now_or_never().is_none());
        drop(most);
        assert!(larger_than_all.await.is_some());
    }
}
