//! Large answers of models and tools take turns: until one is durable, and its run has ended or goes on,
//! it takes many times its size. So do many calls that are executed together, whose answers may be large.

use std::sync::LazyLock;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::bounds::memory;

/// Bytes of an answer from which on it takes turns with others.
const LARGE: usize = 256 << 10;

static TURNS: Semaphore = Semaphore::const_new(2);

/// Calls that are executed together without a turn.
const FEW: usize = 16;
/// Bytes that a call may have in memory while it is executed.
const OF_CALL: u64 = 256 << 10;
/// How many calls may have a turn, where the memory limit allows it or is not known.
const MOST: u64 = 4096;

static CALLS: LazyLock<u32> = LazyLock::new(|| {
    let calls = memory::part().map_or(MOST, |part| part / OF_CALL);
    u32::try_from(calls.clamp(2 * FEW as u64, MOST)).unwrap_or(u32::MAX)
});
static CALL_TURNS: LazyLock<Semaphore> = LazyLock::new(|| Semaphore::new(*CALLS as usize));

/// The turn of one large answer, or of calls.
pub type Turn = SemaphorePermit<'static>;

/// Waits for the turn of an answer of so many bytes, and for memory; `None` for a small one.
pub async fn turn(bytes: usize) -> Option<Turn> {
    if bytes <= LARGE {
        return None;
    }
    let turn = TURNS.acquire().await.ok(); // never closed
    memory::enough().await;
    turn
}

/// Waits for the turn of so many calls that are executed together; `None` for a few.
pub async fn turn_of_calls(calls: usize) -> Option<Turn> {
    if calls <= FEW {
        return None;
    }
    let calls = u32::try_from(calls).unwrap_or(u32::MAX).min(*CALLS);
    CALL_TURNS.acquire_many(calls).await.ok() // never closed
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn two_large_answers_are_worked_on_at_the_same_time() {
        let (first, second) = (turn(LARGE + 1).await, turn(LARGE + 1).await);
        assert!(first.is_some() && second.is_some());
        assert!(turn(LARGE).await.is_none(), "small ones do not wait");
        let mut third = std::pin::pin!(turn(LARGE + 1));
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.await.is_some());
    }

    #[tokio::test]
    async fn many_calls_wait_for_others_and_a_few_do_not() {
        let all = turn_of_calls(usize::MAX).await;
        assert!(all.is_some() && turn_of_calls(FEW).await.is_none());
        let mut many = std::pin::pin!(turn_of_calls(FEW + 1));
        assert!(many.as_mut().now_or_never().is_none());
        drop(all);
        assert!(many.await.is_some());
    }
}
