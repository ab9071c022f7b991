//! One question for all who ask at the same time: for questions that cost much, or that callers without a key cause.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Mutex;

/// The last answer to a question.
#[derive(Debug)]
pub struct SharedAnswer<T> {
    /// How many answers there have been.
    answers: AtomicU64,
    last: Mutex<Option<T>>,
}

impl<T> Default for SharedAnswer<T> {
    fn default() -> Self {
        Self { answers: AtomicU64::default(), last: Mutex::default() }
    }
}

impl<T: Clone> SharedAnswer<T> {
    /// The answer to `question`, or to that of another caller if it came while this one waited. One question is
    /// asked at a time.
    pub async fn ask(&self, question: impl Future<Output = T>) -> T {
        let before = self.answers.load(Ordering::Relaxed);
        let mut last = self.last.lock().await;
        if let Some(answer) = &*last
            && self.answers.load(Ordering::Relaxed) > before
        {
            return answer.clone();
        }
        let answer = question.await;
        *last = Some(answer.clone());
        self.answers.fetch_add(1, Ordering::Relaxed);
        answer
    }
}
