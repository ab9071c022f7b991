//! Whether the store answers, as probes ask.
//!
//! Probes need no key, and with SQLite the question is a write. So one question is asked at a time, and its
//! answer is that of all probes that came before it was answered.

use std::time::Duration;

use tokio::time::timeout;

use crate::bounds::shared_answer::SharedAnswer;

/// How long a probe waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// The question that probes share.
#[derive(Debug, Default)]
pub(crate) struct StoreCheck(SharedAnswer<bool>);

impl StoreCheck {
    /// The answer to `question`, or to that of another probe if it was answered since this one came; false if
    /// there is none in time.
    pub(crate) async fn answer(&self, question: impl Future<Output = bool>) -> bool {
        timeout(PATIENCE, self.0.ask(question)).await.unwrap_or(false)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures::future::join_all;
    use tokio::sync::watch;

    use super::*;

    #[tokio::test]
    async fn probes_that_wait_share_one_question() {
        let (check, asked) = (StoreCheck::default(), AtomicUsize::new(0));
        let (open, gate) = watch::channel(false);
        let question = || async {
            asked.fetch_add(1, Ordering::Relaxed);
            gate.clone().wait_for(|open| *open).await.is_ok()
        };
        let mut first = Box::pin(check.answer(question()));
        assert!(futures::poll!(&mut first).is_pending());
        let mut others = Box::pin(join_all((0..1000).map(|_| check.answer(question()))));
        assert!(futures::poll!(&mut others).is_pending());
        open.send_replace(true);
        assert!(first.await);
        assert_eq!(others.await, vec![true; 1000]);
        assert_eq!(asked.load(Ordering::Relaxed), 1);
        assert!(!check.answer(async { false }).await, "a later probe asks again");
    }

    #[tokio::test(start_paused = true)]
    async fn a_probe_does_not_wait_for_two_answers_of_a_slow_store() {
        let check = StoreCheck::default();
        let slow = || async {
            tokio::time::sleep(PATIENCE * 3 / 4).await;
            true
        };
        let later = async {
            tokio::time::sleep(PATIENCE / 4).await;
            check.answer(slow()).await
        };
        assert_eq!(futures::join!(check.answer(slow()), later), (true, true));
    }

    #[tokio::test(start_paused = true)]
    async fn a_store_that_hangs_does_not_answer() {
        let check = StoreCheck::default();
        let hang = || check.answer(std::future::pending());
        let (first, second) = futures::join!(hang(), hang());
        assert!(!first && !second);
        assert!(check.answer(async { true }).await, "nothing is left locked");
    }
}
