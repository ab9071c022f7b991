//! Whether the store answers, as probes ask.
//!
//! Probes need no key, and with SQLite the question is a write. So one question is asked at a time, and its
//! answer is that of all probes that came before it was asked.

use std::time::Duration;

use tokio::sync::Mutex;
use tokio::time::{Instant, timeout};

/// How long a probe waits.
const PATIENCE: Duration = Duration::from_secs(2);

/// The last answer, and when its question was asked.
#[derive(Debug, Default)]
pub(crate) struct StoreCheck(Mutex<Option<(Instant, bool)>>);

impl StoreCheck {
    /// The answer to `question`, or to that of another probe which was asked since this one came; false if there
    /// is none in time.
    pub(crate) async fn answer(&self, question: impl Future<Output = bool>) -> bool {
        timeout(PATIENCE, self.answer_in_turn(question)).await.unwrap_or(false)
    }

    async fn answer_in_turn(&self, question: impl Future<Output = bool>) -> bool {
        let came = Instant::now();
        let mut last = self.0.lock().await;
        if let Some((asked, answer)) = *last
            && asked >= came
        {
            return answer;
        }
        let asked = Instant::now();
        let answer = question.await;
        *last = Some((asked, answer));
        answer
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
        let asked = asked.load(Ordering::Relaxed);
        assert!(asked <= 2, "{asked} questions instead of the first and one for all later probes");
        assert!(!check.answer(async { false }).await, "a later probe asks again");
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
