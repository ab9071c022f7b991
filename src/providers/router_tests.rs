//! The loop around providers whose answers are queued: repeats, fallbacks, turns, costs.

use std::collections::VecDeque;
use std::sync::Mutex;

use async_trait::async_trait;
use serde_json::Value;
use tokio::sync::Notify;

use super::*;
use crate::message::{Conversation, FinishReason};
use crate::model::{CapabilityOverrides, ForcedToolChoice};
use crate::providers::capabilities::{Capabilities, ModelPattern};
use crate::providers::prices::Price;
use crate::providers::{Deltas, ToolChoice, WireNames};

type Said = Result<Completion, ProviderError>;

/// Answers from a queue, and remembers the steps and models it was asked for.
#[derive(Default)]
struct Queue {
    answers: Mutex<VecDeque<Said>>,
    asked: Mutex<Vec<(String, u32)>>,
}

#[async_trait]
impl Provider for Queue {
    async fn complete(&self, request: &ModelRequest<'_>) -> Said {
        self.asked.lock().unwrap().push((request.model.to_owned(), request.step));
        let answer = self.answers.lock().unwrap().pop_front();
        match answer {
            Some(answer) => answer,
            None => std::future::pending().await,
        }
    }
}

/// Answers when told to, and counts who is waiting.
#[derive(Default)]
struct GatedProvider {
    open: Notify,
    inside: Mutex<usize>,
}

#[async_trait]
impl Provider for GatedProvider {
    async fn complete(&self, _: &ModelRequest<'_>) -> Said {
        *self.inside.lock().unwrap() += 1;
        self.open.notified().await;
        Ok(completion())
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

fn fault(kind: FailureKind, retry_after: Option<Duration>) -> Said {
    Err(ProviderError {
        provider: "p".into(),
        kind,
        status: None,
        code: None,
        message: "m".into(),
        retry_after,
        should_retry: None,
        usage: None,
    })
}

/// A passing fault with a wait that is not one.
fn brief() -> Said {
    fault(FailureKind::Transient, Some(Duration::from_millis(1)))
}

async fn ask(
    router: &Router,
    models: &[&str],
    first: usize,
    deadline: Option<Duration>,
) -> Result<Answer, ModelFailure> {
    ask_streaming(router, models, first, deadline, Deltas::default()).await
}

async fn ask_streaming(
    router: &Router,
    models: &[&str],
    first: usize,
    deadline: Option<Duration>,
    deltas: Deltas<'_>,
) -> Result<Answer, ModelFailure> {
    let mut conversation = Conversation::new("");
    conversation.push_user("hello");
    let names = WireNames::default();
    let request = ModelRequest {
        model: "",
        capabilities: &Capabilities::OPENAI,
        conversation: &conversation,
        tools: &[],
        names: &names,
        tool_choice: ToolChoice::Required,
        parallel_tool_calls: None,
        temperature: None,
        max_output_tokens: None,
        output_left: None,
        thinking: None,
        prompt_caching: false,
        deltas,
        output_schema: None,
        json_mode: false,
        options: crate::providers::Options::default(),
        inputs: &Value::Null,
        step: 5,
        trace: None,
    };
    let models: Vec<String> = models.iter().map(|model| (*model).to_owned()).collect();
    let deadline = deadline.map(|left| Instant::now() + left);
    router.complete(&models, ModelCall::beginning(first), &request, deadline).await
}

fn router(entries: Vec<(&str, ProviderEntry)>) -> Router {
    Router::new(entries.into_iter().map(|(name, entry)| (name.to_owned(), entry)).collect())
}

fn queue(answers: Vec<Said>) -> Arc<Queue> {
    Arc::new(Queue { answers: Mutex::new(answers.into()), ..Queue::default() })
}

/// One provider, one model, one call; the outcome, and the steps that were asked for.
async fn ask_one(
    answers: Vec<Said>,
    timeout: Duration,
) -> (Result<Answer, ModelFailure>, Vec<u32>) {
    let queue = queue(answers);
    let router =
        router(vec![("p", ProviderEntry { timeout, ..ProviderEntry::new(queue.clone()) })]);
    let outcome = ask(&router, &["p/some/model:4b"], 0, None).await;
    let asked = queue.asked.lock().unwrap().clone();
    assert!(asked.iter().all(|(model, _)| model == "some/model:4b"), "{asked:?}");
    (outcome, asked.into_iter().map(|(_, step)| step).collect())
}

const LONG: Duration = Duration::from_mins(10);

#[tokio::test]
async fn a_broken_call_is_repeated_with_the_next_step() {
    let (outcome, steps) = ask_one(vec![brief(), brief(), Ok(completion())], LONG).await;
    let answer = outcome.unwrap();
    assert_eq!((answer.retries, answer.fallback, steps), (2, false, vec![5, 6, 7]));
    assert_eq!((answer.provider.as_str(), answer.model.as_str()), ("p", "some/model:4b"));

    let (outcome, steps) = ask_one(vec![brief(), brief(), brief(), Ok(completion())], LONG).await;
    let failure = outcome.unwrap_err();
    assert_eq!((failure.attempts, failure.error.kind, steps.len()), (3, FailureKind::Transient, 3));
}

#[tokio::test]
async fn a_call_that_cannot_succeed_is_made_once() {
    let (outcome, steps) = ask_one(vec![fault(FailureKind::BadRequest, None)], LONG).await;
    assert_eq!((outcome.unwrap_err().attempts, steps), (1, vec![5]));
}

#[tokio::test]
async fn pieces_of_an_answer_that_did_not_fit_are_withdrawn() {
    for (kind, expected) in [(FailureKind::ContextLength, 1), (FailureKind::BadRequest, 0)] {
        let provider = queue(vec![fault(kind, None)]);
        let router = router(vec![("p", ProviderEntry::new(provider))]);
        let withdrawn = Mutex::new(0_usize);
        let follower = |delta: Delta| {
            *withdrawn.lock().unwrap() += usize::from(delta == Delta::Restarted);
        };
        let deltas = Deltas(Some(&follower));
        let outcome = ask_streaming(&router, &["p/a"], 0, None, deltas).await;
        assert_eq!(outcome.unwrap_err().error.kind, kind);
        assert_eq!(*withdrawn.lock().unwrap(), expected, "{kind:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_takes_too_long_is_repeated() {
    let (outcome, steps) = ask_one(Vec::new(), Duration::from_millis(5)).await;
    let failure = outcome.unwrap_err();
    assert_eq!((failure.attempts, failure.error.kind, steps.len()), (3, FailureKind::Transient, 3));
    assert_eq!(failure.error.message, "no complete answer within 0.005 s");
}

#[tokio::test]
async fn who_is_asked_next_depends_on_what_was_wrong() {
    use FailureKind::{
        BadRequest, ContentFilter, ContextLength, NotFound, QuotaExhausted, RateLimited, Transient,
        Unauthorized,
    };
    let minute = Some(Duration::from_mins(1));
    let table: Vec<(&str, Vec<Said>, Option<u32>)> = vec![
        ("retries run out", vec![brief(), brief(), brief()], Some(3)),
        (
            "a wait beyond the deadline",
            vec![fault(RateLimited, Some(Duration::from_mins(2)))],
            Some(1),
        ),
        ("a spent quota", vec![fault(QuotaExhausted, None)], Some(1)),
        ("no such model", vec![fault(NotFound, None)], Some(1)),
        ("a bad request", vec![fault(BadRequest, None)], None),
        ("a bad key", vec![fault(Unauthorized, None)], None),
        ("a long conversation", vec![fault(ContextLength, None)], None),
        ("a filtered one", vec![fault(ContentFilter, None)], None),
        (
            "a fault that passes",
            vec![fault(Transient, Some(Duration::from_millis(1))), Ok(completion())],
            None,
        ),
    ];
    for (what, answers, retries) in table {
        let (first, second) = (queue(answers), queue(vec![Ok(completion())]));
        let entries = vec![
            ("p", ProviderEntry::new(first.clone())),
            ("q", ProviderEntry::new(second.clone())),
        ];
        let outcome = ask(&router(entries), &["p/a", "q/b"], 0, minute).await;
        let asked = second.asked.lock().unwrap().clone();
        match retries {
            Some(retries) => {
                let answer = outcome.unwrap_or_else(|failure| panic!("{what}: {failure}"));
                let who = (
                    answer.provider.as_str(),
                    answer.model.as_str(),
                    answer.fallback,
                    answer.retries,
                );
                assert_eq!(who, ("q", "b", true, retries), "{what}");
                assert_eq!(asked, [("b".to_owned(), 5 + retries)], "{what}");
            }
            None => assert!(
                asked.is_empty()
                    && outcome.is_ok_and(|answer| !answer.fallback)
                        == (what == "a fault that passes"),
                "{what}"
            ),
        }
    }
}

#[tokio::test]
async fn a_run_that_fell_back_stays_there() {
    let (first, second) = (queue(Vec::new()), queue(vec![Ok(completion())]));
    let router =
        router(vec![("p", ProviderEntry::new(first.clone())), ("q", ProviderEntry::new(second))]);
    let answer = ask(&router, &["p/a", "q/b"], 1, None).await.unwrap();
    assert_eq!((answer.model.as_str(), answer.fallback), ("b", true));
    assert!(first.asked.lock().unwrap().is_empty());
    let failure = ask(&router, &["nobody/a", "nowhere/b"], 0, None).await.unwrap_err();
    assert_eq!((failure.provider.as_str(), failure.place, failure.attempts), ("nowhere", 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_dead_model_is_left_alone_and_its_fallback_asked_at_once() {
    let (dead, alive) = (queue(vec![brief(); 12]), queue(vec![Ok(completion()), Ok(completion())]));
    let router =
        router(vec![("p", ProviderEntry::new(dead.clone())), ("q", ProviderEntry::new(alive))]);
    let asked = || dead.asked.lock().unwrap().len();
    for _ in 0..2 {
        assert_eq!(ask(&router, &["p/a"], 0, None).await.unwrap_err().attempts, 3);
    }
    let refused = ask(&router, &["p/a"], 0, None).await.unwrap_err();
    assert_eq!((refused.attempts, asked()), (0, 6), "it is open: {refused}");
    let said = (refused.error.kind, refused.error.status, refused.error.message.as_str());
    let expected =
        (FailureKind::Transient, None, "no calls are made for another 30 s: its last calls failed");
    assert_eq!(said, expected, "what others were told is theirs");
    let answer = ask(&router, &["p/a", "q/b"], 0, None).await.unwrap();
    assert_eq!((answer.fallback, answer.retries, asked()), (true, 0, 6));

    tokio::time::advance(Duration::from_secs(31)).await;
    assert_eq!(
        ask(&router, &["p/a"], 0, None).await.unwrap_err().attempts,
        1,
        "one probe, then refused again"
    );
    assert_eq!(asked(), 7);
    tokio::time::advance(Duration::from_secs(31)).await;
    *dead.answers.lock().unwrap() = VecDeque::from([Ok(completion()), Ok(completion())]);
    assert!(
        ask(&router, &["p/a"], 0, None).await.is_ok()
            && ask(&router, &["p/a"], 0, None).await.is_ok()
    );
}

/// The same, after a moment: calls of one instant are under way together.
struct Slow(Arc<Queue>);

#[async_trait]
impl Provider for Slow {
    async fn complete(&self, request: &ModelRequest<'_>) -> Said {
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.0.complete(request).await
    }
}

/// So many refusals, then answers.
fn refused(times: usize, retry_after: Option<Duration>) -> Arc<Queue> {
    let mut answers = vec![fault(FailureKind::RateLimited, retry_after); times];
    answers.extend(vec![Ok(completion()); 200]);
    queue(answers)
}

async fn ask_at_once(router: &Router, calls: usize) -> Vec<Result<Answer, ModelFailure>> {
    futures::future::join_all((0..calls).map(|_| ask(router, &["p/a"], 0, None))).await
}

#[tokio::test(start_paused = true)]
async fn calls_that_a_provider_refuses_wait_together() {
    let (second, ten) = (Some(Duration::from_secs(1)), Some(Duration::from_secs(10)));
    // Refusals, with which wait, and what becomes of 64 calls at once: answers, requests, seconds. The
    // last one goes a second after the probe.
    let table = [
        (64, second, 64, 128, 2),
        (65, second, 64, 129, 3),
        (69, second, 64, 133, 7),
        (1000, second, 0, 64 + 17, 60),
        (64, ten, 64, 128, 11),
        (1, second, 64, 65, 1),
    ];
    for (refusals, wait, answered, requests, seconds) in table {
        let provider = refused(refusals, wait);
        let router = router(vec![("p", ProviderEntry::new(Arc::new(Slow(provider.clone()))))]);
        let began = Instant::now();
        let outcomes = ask_at_once(&router, 64).await;
        let answers = outcomes.iter().filter(|outcome| outcome.is_ok()).count();
        let took = began.elapsed().as_secs();
        let asked = provider.asked.lock().unwrap().len();
        assert_eq!((answers, asked, took), (answered, requests, seconds), "{refusals} {wait:?}");
    }
}

/// The same, with the time of each request.
struct Clocked(Arc<Queue>, Mutex<Vec<Instant>>);

#[async_trait]
impl Provider for Clocked {
    async fn complete(&self, request: &ModelRequest<'_>) -> Said {
        self.1.lock().unwrap().push(Instant::now());
        tokio::time::sleep(Duration::from_millis(1)).await;
        self.0.complete(request).await
    }
}

#[tokio::test(start_paused = true)]
async fn calls_follow_a_probe_in_growing_groups() {
    let second = Duration::from_secs(1);
    let provider = Arc::new(Clocked(refused(64, Some(second)), Mutex::default()));
    let router = router(vec![("p", ProviderEntry::new(provider.clone()))]);
    let began = Instant::now();
    assert!(ask_at_once(&router, 64).await.iter().all(Result::is_ok));
    let mut groups = [0; 6];
    for at in provider.1.lock().unwrap().split_off(64) {
        let after = at.duration_since(began).saturating_sub(second);
        groups[usize::try_from(after.as_millis() / 200).unwrap()] += 1;
    }
    assert_eq!(groups, [1 + 2, 4, 8, 16, 32, 1]);
}

#[tokio::test(start_paused = true)]
async fn refusals_that_do_not_say_when_to_come_again_count_as_retries() {
    let second = Some(Duration::from_secs(1));
    for (max_retries, wait, requests) in [(2, None, 3), (0, None, 1), (0, second, 1)] {
        let provider = refused(1000, wait);
        let entry = ProviderEntry {
            max_retries,
            rate_limit_patience: Duration::from_hours(1),
            ..ProviderEntry::new(provider.clone())
        };
        let router = router(vec![("p", entry)]);
        let failed = ask(&router, &["p/a"], 0, None).await.unwrap_err();
        assert_eq!(failed.error.kind, FailureKind::RateLimited);
        assert_eq!(provider.asked.lock().unwrap().len(), requests, "{max_retries} {wait:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_patience_that_is_at_an_end_is_at_an_end_for_all() {
    let second = Duration::from_secs(1);
    let models = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    // The patience, the wait that is asked for, how often it is refused, and for how long all fail.
    for (rate_limit_patience, wait, times, quiet) in
        [(2 * second, Some(second), 3, 1), (Duration::ZERO, None, 1, 10)]
    {
        let provider = refused(times, wait);
        let entry = ProviderEntry { rate_limit_patience, ..ProviderEntry::new(provider.clone()) };
        let router = router(vec![("p", entry)]);
        let asked = || provider.asked.lock().unwrap().len();
        let failed = ask(&router, &["p/a"], 0, None).await.unwrap_err();
        assert_eq!(failed.attempts as usize, times);
        let failed = ask(&router, &["p/a"], 0, None).await.unwrap_err();
        let said = (failed.attempts, failed.error.kind, asked());
        assert_eq!(said, (0, FailureKind::RateLimited, times));
        let expected =
            format!("no calls are made for another {quiet} s: it limits the rate of calls");
        assert_eq!(failed.error.message, expected, "what others were told is theirs");
        assert!(router.refusal(&models(&["p/a"])).await.is_some());
        assert!(router.refusal(&models(&["p/a", "p/b"])).await.is_none());
        assert!(ask(&router, &["p/b"], 0, None).await.is_ok(), "limits are of models");
        tokio::time::advance(second * quiet).await;
        assert!(router.refusal(&models(&["p/a"])).await.is_none());
        assert!(ask_at_once(&router, 9).await.iter().all(Result::is_ok));
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_renews_the_patience_and_a_fallback_is_not_kept_waiting() {
    let second = Duration::from_secs(1);
    let limited = || fault(FailureKind::RateLimited, Some(second));
    let entry = |provider: &Arc<Queue>| ProviderEntry {
        rate_limit_patience: 5 * second,
        ..ProviderEntry::new(provider.clone())
    };
    let mut answers = Vec::new();
    for _ in 0..4 {
        answers.extend([limited(), limited(), limited(), limited(), Ok(completion())]);
    }
    let provider = queue(answers);
    let router_of_one = router(vec![("p", entry(&provider))]);
    for _ in 0..4 {
        assert_eq!(ask(&router_of_one, &["p/a"], 0, None).await.unwrap().retries, 4);
    }

    let (first, other) = (queue(vec![limited(); 9]), queue(vec![Ok(completion())]));
    let router = router(vec![("p", entry(&first)), ("q", entry(&other))]);
    let began = Instant::now();
    let answer = ask(&router, &["p/a", "q/b"], 0, None).await.unwrap();
    assert_eq!((answer.fallback, answer.retries, began.elapsed().as_secs()), (true, 3, 2));
}

#[tokio::test(start_paused = true)]
async fn a_spent_quota_is_asked_for_once_in_ten_seconds() {
    let quota = |code: Option<&str>| {
        let Err(error) = fault(FailureKind::QuotaExhausted, None) else { unreachable!() };
        Err(ProviderError { code: code.map(str::to_owned), ..error })
    };
    // With the provider's code it is the account's, without one it may be the model's.
    for (code, other_asked) in [(Some("insufficient_quota"), 0), (None, 1)] {
        let provider = queue(vec![quota(code); 9]);
        let router = router(vec![("p", ProviderEntry::new(provider.clone()))]);
        for called in 0..20 {
            let failed = ask(&router, &["p/a"], 0, None).await.unwrap_err();
            assert_eq!(
                (failed.attempts, failed.error.code.as_deref()),
                (u32::from(called == 0), code.filter(|_| called == 0)),
                "what others were told is theirs"
            );
        }
        let failed = ask(&router, &["p/b"], 0, None).await.unwrap_err();
        assert_eq!(
            (failed.attempts, failed.error.kind),
            (other_asked, FailureKind::QuotaExhausted)
        );
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(ask_at_once(&router, 20).await.iter().filter(|it| it.is_err()).count(), 20);
        let asked = provider.asked.lock().unwrap().len();
        assert_eq!(asked, 2 + other_asked as usize, "{code:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_that_is_given_up_or_takes_long_holds_nobody_up() {
    let second = Duration::from_secs(1);
    let provider = queue(vec![fault(FailureKind::RateLimited, Some(second))]);
    let router =
        Arc::new(router(vec![("p", ProviderEntry::new(Arc::new(Slow(provider.clone()))))]));
    let calls: Vec<_> = (0..3)
        .map(|_| {
            let router = Arc::clone(&router);
            tokio::spawn(async move { ask(&router, &["p/a"], 0, None).await })
        })
        .collect();
    let asked = || provider.asked.lock().unwrap().len();
    // The queue is empty then: the two others and every probe are never answered.
    tokio::time::sleep(second / 2).await;
    assert_eq!(asked(), 3);
    let late = {
        let router = Arc::clone(&router);
        tokio::spawn(async move { ask(&router, &["p/a"], 0, None).await })
    };
    tokio::time::sleep(second).await;
    assert_eq!(asked(), 4, "one probe");
    for call in calls {
        call.abort();
    }
    tokio::time::sleep(second).await;
    late.abort();
    let _ = late.await;
    provider.answers.lock().unwrap().push_back(Ok(completion()));
    assert!(ask(&router, &["p/a"], 0, None).await.is_ok(), "a probe that was given up is repeated");

    provider.answers.lock().unwrap().push_back(fault(FailureKind::RateLimited, Some(second)));
    let began = Instant::now();
    let waits = async {
        tokio::time::sleep(second * 2).await;
        ask(&router, &["p/a"], 0, Some(Duration::from_secs(8))).await
    };
    let (probe, waited) = tokio::join!(
        tokio::time::timeout(second * 9, ask(&router, &["p/a"], 0, None)),
        tokio::time::timeout(second * 9, waits)
    );
    assert!(probe.is_err() && waited.is_err(), "no server answers");
    assert_eq!((asked(), began.elapsed().as_secs()), (9, 9));
}

#[tokio::test]
async fn no_more_tries_at_once_than_allowed() {
    let gate = Arc::new(GatedProvider::default());
    let entry = ProviderEntry { max_concurrency: Some(2), ..ProviderEntry::new(gate.clone()) };
    let router = Arc::new(router(vec![("p", entry)]));
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let router = Arc::clone(&router);
            tokio::spawn(async move { ask(&router, &["p/a"], 0, None).await })
        })
        .collect();
    let inside = || *gate.inside.lock().unwrap();
    while inside() < 2 {
        tokio::task::yield_now().await;
    }
    for served in 1..=5 {
        assert_eq!(inside(), (served + 1).min(5));
        gate.open.notify_one();
        while inside() < (served + 2).min(5) {
            tokio::task::yield_now().await;
        }
    }
    for call in calls {
        assert!(call.await.unwrap().is_ok());
    }
}

/// Fails after a while.
#[derive(Default)]
struct SlowFault(Mutex<usize>);

#[async_trait]
impl Provider for SlowFault {
    async fn complete(&self, _: &ModelRequest<'_>) -> Said {
        *self.0.lock().unwrap() += 1;
        sleep(Duration::from_mins(1)).await;
        fault(FailureKind::Transient, None)
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_wait_for_a_slot_do_not_keep_a_dead_server_in_use() {
    let dead = Arc::new(SlowFault::default());
    let entry = ProviderEntry { max_concurrency: Some(1), ..ProviderEntry::new(dead.clone()) };
    let router = router(vec![("p", entry)]);
    let calls = (0..20).map(|_| ask(&router, &["p/a"], 0, None));
    let outcomes = futures::future::join_all(calls).await;
    assert!(outcomes.iter().all(Result::is_err));
    assert_eq!(*dead.0.lock().unwrap(), 6);
}

#[tokio::test]
async fn an_answer_is_priced_and_what_was_not_reported_estimated() {
    let reported = Usage { input_tokens: 1000, output_tokens: 500, ..Usage::default() };
    let provider = queue(vec![
        Ok(Completion { usage: Some(reported), ..completion() }),
        Ok(completion()),
        Ok(completion()),
    ]);
    let price = Price { input: 2_000_000, output: 4_000_000, ..Price::default() };
    let priced = PriceTable::new(vec![(ModelPattern::parse("p/priced").unwrap(), price)]);
    let router = router(vec![("p", ProviderEntry::new(provider))])
        .with_tables(CapabilityTable::default(), priced);
    let usage = ask(&router, &["p/priced"], 0, None).await.unwrap().usage;
    assert_eq!(usage, Usage { cost_micro_usd: Some(4000), ..reported });
    let usage = ask(&router, &["p/priced"], 0, None).await.unwrap().usage;
    assert_eq!(
        (usage.input_tokens, usage.output_tokens, usage.estimated),
        (2, 1, true),
        "five and two bytes"
    );
    assert_eq!(usage.cost_micro_usd, Some(8));
    assert_eq!(ask(&router, &["p/other"], 0, None).await.unwrap().usage.cost_micro_usd, None);
}

#[tokio::test]
async fn a_choice_that_could_not_be_sent_is_told() {
    let provider = queue(vec![Ok(completion()), Ok(completion())]);
    let unforced = CapabilityOverrides {
        forced_tool_choice: Some(ForcedToolChoice::No),
        ..CapabilityOverrides::default()
    };
    let table = CapabilityTable::new(vec![(ModelPattern::parse("p/weak").unwrap(), unforced)]);
    let router =
        router(vec![("p", ProviderEntry::new(provider))]).with_tables(table, PriceTable::default());
    let warnings = ask(&router, &["p/weak"], 0, None).await.unwrap().warnings;
    assert_eq!(
        warnings,
        ["p/weak cannot be made to answer with a tool call: its answer is checked instead."]
    );
    assert!(ask(&router, &["p/strong"], 0, None).await.unwrap().warnings.is_empty());
}

#[test]
fn unknown_models_are_refused() {
    let router = router(vec![("p", ProviderEntry::new(Arc::new(Queue::default())))]);
    assert!(router.resolve("p/m").is_ok());
    for malformed in ["p", "p/", "/m", ""] {
        assert_eq!(
            router.resolve(malformed).err(),
            Some(UnknownModel::Malformed(malformed.into()))
        );
    }
    let unknown = router.resolve("q/m").err().map(|unknown| unknown.to_string());
    assert_eq!(unknown.as_deref(), Some(r#"there is no provider "q"; configured: p"#));
}
