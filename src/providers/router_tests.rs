//! The retry table, and the loop around a provider whose answers are queued.

use std::collections::VecDeque;
use std::sync::Mutex;

use async_trait::async_trait;
use serde_json::Value;

use super::*;
use crate::message::{Conversation, FinishReason};
use crate::providers::{Capabilities, Deltas, ToolChoice, WireNames};

fn error(kind: FailureKind, retry_after: Option<Duration>) -> ProviderError {
    ProviderError { provider: "p".into(), kind, status: None, code: None, message: "m".into(), retry_after }
}

#[test]
fn waits_follow_the_table() {
    let seconds = Duration::from_secs;
    let (limited, broken) = (FailureKind::RateLimited, FailureKind::Transient);
    let table = [
        (limited, Some(seconds(2)), None, Some(seconds(2))),
        (broken, Some(seconds(90)), None, Some(seconds(90))),
        (limited, Some(seconds(120)), None, Some(seconds(120))),
        (limited, Some(seconds(121)), None, None),
        (limited, Some(seconds(2)), Some(seconds(3)), Some(seconds(2))),
        (limited, Some(seconds(4)), Some(seconds(3)), None),
        (broken, None, Some(Duration::ZERO), None),
        (FailureKind::QuotaExhausted, Some(seconds(1)), None, None),
        (FailureKind::Unauthorized, None, None, None),
        (FailureKind::NotFound, None, None, None),
        (FailureKind::BadRequest, None, None, None),
        (FailureKind::ContextLength, None, None, None),
        (FailureKind::ContentFilter, None, None, None),
    ];
    for (kind, wish, patience, expected) in table {
        assert_eq!(wait_before_retry(&error(kind, wish), 0, patience), expected, "{kind:?} {wish:?} {patience:?}");
    }
}

#[test]
fn own_waits_are_jittered_and_bounded() {
    let broken = error(FailureKind::Transient, None);
    for (retries, ceiling) in [(0, 0.5), (1, 1.0), (2, 2.0), (4, 8.0), (40, 8.0)] {
        let waits: Vec<Duration> = (0..64).filter_map(|_| wait_before_retry(&broken, retries, None)).collect();
        let longest = waits.iter().max().copied().unwrap_or_default();
        assert_eq!(waits.len(), 64);
        assert!(longest <= Duration::from_secs_f64(ceiling), "{retries}: {longest:?}");
        assert!(longest > Duration::from_secs_f64(ceiling / 2.0), "64 draws that stay in the lower half: {longest:?}");
        assert!(waits.iter().any(|wait| *wait != longest), "no jitter");
    }
}

/// Answers from a queue, and remembers the steps and models it was asked for.
#[derive(Default)]
struct Queue {
    answers: Mutex<VecDeque<Result<Completion, ProviderError>>>,
    asked: Mutex<Vec<(String, u32)>>,
}

#[async_trait]
impl Provider for Queue {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        self.asked.lock().unwrap().push((request.model.to_owned(), request.step));
        let answer = self.answers.lock().unwrap().pop_front();
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
}

fn completion() -> Completion {
    Completion {
        text: "hi".into(),
        thinking: None,
        tool_calls: Vec::new(),
        opaque: None,
        finish_reason: FinishReason::Stop,
        usage: None,
    }
}

async fn ask(
    answers: Vec<Result<Completion, ProviderError>>,
    timeout: Duration,
) -> (Result<Answer, ModelFailure>, Vec<u32>) {
    let queue = Arc::new(Queue { answers: Mutex::new(answers.into()), ..Queue::default() });
    let entry = ProviderEntry { timeout, ..ProviderEntry::new(queue.clone()) };
    let router = Router::new(BTreeMap::from([("p".to_owned(), entry)]));
    let (conversation, names) = (conversation("", "hello"), WireNames::default());
    let request = ModelRequest {
        model: "",
        capabilities: &Capabilities::OPENAI,
        conversation: &conversation,
        tools: &[],
        names: &names,
        tool_choice: ToolChoice::Auto,
        parallel_tool_calls: None,
        temperature: None,
        max_output_tokens: None,
        thinking: None,
        prompt_caching: false,
        deltas: Deltas::default(),
        output_schema: None,
        inputs: &Value::Null,
        step: 5,
    };
    let outcome = router.complete("p/some/model:4b", request, None).await;
    let asked = queue.asked.lock().unwrap().clone();
    assert!(asked.iter().all(|(model, _)| model == "some/model:4b"), "{asked:?}");
    (outcome, asked.into_iter().map(|(_, step)| step).collect())
}

#[tokio::test]
async fn a_broken_call_is_repeated_with_the_next_step() {
    let soon = Some(Duration::from_millis(1));
    let broken = || Err(error(FailureKind::Transient, soon));
    let (outcome, steps) = ask(vec![broken(), broken(), Ok(completion())], Duration::from_mins(10)).await;
    let answer = outcome.unwrap();
    assert_eq!((answer.retries, answer.fallback, steps), (2, false, vec![5, 6, 7]));
    assert_eq!((answer.provider.as_str(), answer.model.as_str()), ("p", "some/model:4b"));

    let (outcome, steps) = ask(vec![broken(), broken(), broken(), Ok(completion())], Duration::from_mins(10)).await;
    let failure = outcome.unwrap_err();
    assert_eq!((failure.attempts, failure.error.kind, steps.len()), (3, FailureKind::Transient, 3));
}

#[tokio::test]
async fn a_call_that_cannot_succeed_is_made_once() {
    let (outcome, steps) = ask(vec![Err(error(FailureKind::BadRequest, None))], Duration::from_mins(10)).await;
    assert_eq!((outcome.unwrap_err().attempts, steps), (1, vec![5]));
}

#[tokio::test]
async fn a_call_that_takes_too_long_is_repeated() {
    let (outcome, steps) = ask(Vec::new(), Duration::from_millis(5)).await;
    let failure = outcome.unwrap_err();
    assert_eq!((failure.attempts, failure.error.kind, steps.len()), (3, FailureKind::Transient, 3));
    assert_eq!(failure.error.message, "no complete answer within 0.005 s");
}

#[test]
fn unknown_models_are_refused() {
    let router = Router::new(BTreeMap::from([("p".to_owned(), ProviderEntry::new(Arc::new(Queue::default())))]));
    assert!(router.resolve("p/m").is_ok());
    for malformed in ["p", "p/", "/m", ""] {
        assert_eq!(router.resolve(malformed).err(), Some(UnknownModel::Malformed(malformed.into())));
    }
    let unknown = router.resolve("q/m").err().map(|unknown| unknown.to_string());
    assert_eq!(unknown.as_deref(), Some(r#"there is no provider "q"; configured: p"#));
}

fn conversation(system: &str, user: &str) -> Conversation {
    let mut conversation = Conversation::new(system);
    conversation.push_user(user);
    conversation
}
