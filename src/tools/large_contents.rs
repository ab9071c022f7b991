//! Calls that hold large contents in memory, of files or of what programs wrote, take turns: all of them
//! together hold no more than a part of what the process may have.

use std::sync::LazyLock;

use tokio::sync::SemaphorePermit;

use crate::bounds::memory::{self, Places};

/// Bytes that need no turn.
const SMALL: u64 = 64 << 10;

static TURNS: LazyLock<Places> = LazyLock::new(Places::of_part);

/// The turn of one call.
pub(super) type Turn = SemaphorePermit<'static>;

/// Waits until so many bytes may be in memory; `None` where they are few.
pub(super) async fn turn(bytes: u64) -> Option<Turn> {
    if bytes <= SMALL {
        return None;
    }
    let turn = TURNS.take(bytes).await;
    memory::enough().await;
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
