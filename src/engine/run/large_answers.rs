//! Large answers of models take turns: until one is durable, and its run has ended or goes on, it takes
//! many times its size.

use tokio::sync::{Semaphore, SemaphorePermit};

use crate::bounds::memory;

/// Bytes of an answer from which on it takes turns with others.
const LARGE: usize = 256 << 10;

static TURNS: Semaphore = Semaphore::const_new(2);

/// The turn of one large answer.
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
}
