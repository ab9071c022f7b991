//! Retries statements and transactions that the database rolled back because of a conflict.
//!
//! This file decides how often and after which pauses; [`super::failure`] decides which failures are conflicts.

use std::time::Duration;

use super::StoreError;
use crate::jitter;

/// Attempts, at most.
const TRIES: u32 = 6;
/// The pause after the first attempt, with jitter; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
/// The random part of a pause, so that attempts that failed together are not repeated together.
pub(super) const JITTER: f64 = 0.5;

/// Repeats an operation while it fails because of a conflict with others. An attempt that fails must
/// change nothing.
///
/// # Errors
/// The error of the last attempt.
pub(super) async fn retry_conflicts<T, F>(attempt: impl Fn() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<T, StoreError>>,
{
    let mut pause = FIRST_PAUSE;
    for _ in 1..TRIES {
        match attempt().await {
            Err(StoreError::Conflict(_)) => {}
            done => return done,
        }
        tokio::time::sleep(jitter::shortened(pause, JITTER)).await;
        pause *= 2;
    }
    attempt().await
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_conflict_is_tried_again_a_few_times_and_nothing_else_is() {
        let conflict = || StoreError::Conflict("deadlock".to_owned());
        let away = || StoreError::Unavailable("away".to_owned());
        for (failures, error, is_done, tried) in [
            (0, conflict as fn() -> StoreError, true, 1),
            (5, conflict, true, 6),
            (6, conflict, false, 6),
            (1, away, false, 1),
        ] {
            let tries = Cell::new(0);
            let attempt = || {
                tries.set(tries.get() + 1);
                let fails = tries.get() <= failures;
                async move { if fails { Err(error()) } else { Ok(()) } }
            };
            assert_eq!((retry_conflicts(attempt).await.is_ok(), tries.get()), (is_done, tried));
        }
    }
}
