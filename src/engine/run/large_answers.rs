//! Bounds the memory of large answers by semaphores. Until a large answer is durable, and its run has
//! ended or goes on, it takes many times its size. Many calls that are executed together may have large
//! answers, too.

use std::sync::LazyLock;

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::bounds::memory;

/// Answers of more bytes than this need a permit.
const LARGE_BYTES: usize = 256 << 10;

/// How many large answers are worked on at the same time.
const ANSWERS_AT_ONCE: u32 = 2;

static LARGE_ANSWERS: Semaphore = Semaphore::const_new(ANSWERS_AT_ONCE as usize);

/// So many calls are executed together without a permit.
const CALLS_WITHOUT_PERMIT: usize = 16;
/// Bytes that a call may have in memory while it is executed.
const BYTES_OF_CALL: u64 = 256 << 10;
/// How many calls may have permits, where the memory limit allows it or is not known.
const MAX_CALLS: u64 = 4096;

static CALLS_AT_ONCE: LazyLock<u32> = LazyLock::new(|| {
    let calls = memory::share_of_limit().map_or(MAX_CALLS, |part| part / BYTES_OF_CALL);
    u32::try_from(calls.clamp(2 * CALLS_WITHOUT_PERMIT as u64, MAX_CALLS)).unwrap_or(u32::MAX)
});
static CALL_PERMITS: LazyLock<Semaphore> =
    LazyLock::new(|| Semaphore::new(*CALLS_AT_ONCE as usize));

/// Allows one large answer, or the calls that are executed together, to be in memory.
pub type MemoryPermit = SemaphorePermit<'static>;

/// The wait for a permit was given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitGivenUp;

/// Waits for the permit of a large answer; `None` for a small one.
pub async fn permit(bytes: usize) -> Option<MemoryPermit> {
    permit_where(memory::is_scarce, bytes).await
}

/// The same. While memory is scarce, one large answer is worked on at a time, in the order of their arrival.
async fn permit_where(is_scarce: fn() -> bool, bytes: usize) -> Option<MemoryPermit> {
    if bytes <= LARGE_BYTES {
        return None;
    }
    let permit = LARGE_ANSWERS.acquire().await.ok(); // never closed
    if !is_scarce() {
        return permit;
    }
    drop(permit); // otherwise two could wait for each other's
    LARGE_ANSWERS.acquire_many(ANSWERS_AT_ONCE).await.ok()
}

/// Waits for the permit of a large answer, unless `stop` resolves first.
///
/// # Errors
/// [`WaitGivenUp`] if `stop` resolves first.
pub async fn permit_unless(
    bytes: usize,
    stop: impl Future<Output = ()>,
) -> Result<Option<MemoryPermit>, WaitGivenUp> {
    tokio::select! {
        biased;
        permit = permit(bytes) => Ok(permit),
        () = stop => Err(WaitGivenUp),
    }
}

/// Waits for the permits of many calls that are executed together; `None` for a few.
pub async fn permit_for_calls(calls: usize) -> Option<MemoryPermit> {
    if calls <= CALLS_WITHOUT_PERMIT {
        return None;
    }
    let calls = u32::try_from(calls).unwrap_or(u32::MAX).min(*CALLS_AT_ONCE);
    CALL_PERMITS.acquire_many(calls).await.ok() // never closed
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn two_large_answers_are_worked_on_at_the_same_time_and_one_while_memory_is_scarce() {
        let permit = |bytes| permit_where(|| false, bytes);
        let (first, second) = (permit(LARGE_BYTES + 1).await, permit(LARGE_BYTES + 1).await);
        assert!(first.is_some() && second.is_some());
        assert!(permit(LARGE_BYTES).await.is_none(), "small ones do not wait");
        let mut third = std::pin::pin!(permit(LARGE_BYTES + 1));
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.await.is_some());
        drop(second);
        let alone = permit_where(|| true, LARGE_BYTES + 1).await;
        let mut next = std::pin::pin!(permit_where(|| true, LARGE_BYTES + 1));
        assert!(alone.is_some() && next.as_mut().now_or_never().is_none(), "memory is scarce");
        let given_up = permit_unless(LARGE_BYTES + 1, std::future::ready(())).await;
        assert!(given_up.is_err(), "its run is cancelled");
        let small = permit_unless(LARGE_BYTES, std::future::ready(())).await;
        assert!(matches!(small, Ok(None)), "small ones do not wait");
        drop(alone);
        assert!(next.await.is_some());
    }

    #[tokio::test]
    async fn many_calls_wait_for_others_and_a_few_do_not() {
        let all = permit_for_calls(usize::MAX).await;
        assert!(all.is_some() && permit_for_calls(CALLS_WITHOUT_PERMIT).await.is_none());
        let mut many = std::pin::pin!(permit_for_calls(CALLS_WITHOUT_PERMIT + 1));
        assert!(many.as_mut().now_or_never().is_none());
        drop(all);
        assert!(many.await.is_some());
    }
}
