//! What becomes of calls that are let through: how they end, how long they may take, how often they
//! are tried, and what is left of their results.

use std::sync::atomic::{AtomicU32, Ordering};

use super::*;
use crate::tools::results::{MAX_RESULT, capped};

#[tokio::test]
async fn a_call_that_passes_is_announced_executed_and_audited() {
    let bench = bench(&full());
    let ready = bench.ready("look").await;
    assert_eq!(ready.effect(), Effect::Read);
    let started = ready.started();
    assert_eq!(
        (started.tool.as_str(), started.decision.as_str(), &started.reason),
        ("probe", "allowed", &None)
    );
    let (content, failure, audit) = bench.executed("look").await;
    assert_eq!((content.as_str(), failure), ("did look", None));
    let audit = audit.unwrap();
    assert_eq!(
        (audit.rule.as_str(), audit.decision.as_str(), audit.outcome.as_str()),
        ("tools", "allowed", "succeeded")
    );
    assert!(audit.duration_ms.is_some());
    for (what, effect) in
        [("mix", Effect::Idempotent), ("undeclared", Effect::Once), ("destroy", Effect::Once)]
    {
        assert_eq!(bench.ready(what).await.effect(), effect, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn errors_panics_and_timeouts_are_results() {
    use CallFailure::{Panicked, Timeout, ToolError};
    let bench = bench(&full());
    let crashed = "Error: The tool crashed on this call; try other arguments or another tool.";
    let late = "Error: The tool did not finish within 60 seconds and was cancelled.";
    let doubt = "It is unknown whether the call took effect; check before you repeat it.";
    let (unknown, broken) = (format!("{late} {doubt}"), format!("{crashed} {doubt}"));
    for (what, failure, content) in [
        ("fail", ToolError, "Error: it did not work"),
        ("panic", Panicked, broken.as_str()),
        ("hang", Timeout, unknown.as_str()),
    ] {
        let (answer, because, audit) = bench.executed(what).await;
        assert_eq!((answer.as_str(), because), (content, Some(failure)), "{what}");
        let audit = audit.unwrap();
        assert_eq!(audit.outcome, if failure == Timeout { "timed_out" } else { "failed" });
        assert_eq!(audit.duration_ms, Some(if failure == Timeout { 60_000 } else { 0 }), "{what}");
    }
    for (what, failure, content) in
        [("panic early", Panicked, crashed), ("hang early", Timeout, late)]
    {
        let answer = bench.answered("probe", &json!({"do": what}).to_string()).await;
        assert_eq!(answer, (content.to_owned(), Some(failure), None), "{what}");
    }
}

/// Fails so often, and then works.
struct Flaky {
    info: ToolInfo,
    effect: Effect,
    failures: u32,
    calls: AtomicU32,
}

#[async_trait]
impl Tool for Flaky {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let what = ActionKind::Call { tool: "flaky".into() };
        Ok(vec![Action::new(what, self.effect)])
    }

    async fn execute(&self, _: Permit, _: Value, _: &ToolContext) -> Result<String, ToolError> {
        let calls = self.calls.fetch_add(1, Ordering::SeqCst);
        if calls < self.failures {
            Err(ToolError::ForModel("not yet".into()))
        } else {
            Ok("done".into())
        }
    }
}

#[tokio::test(start_paused = true)]
async fn calls_that_may_be_repeated_are_repeated() {
    let table = [
        (Effect::Read, 2, 2, 3, true),
        (Effect::Read, 3, 2, 3, false),
        (Effect::Idempotent, 1, 1, 2, true),
        (Effect::Idempotent, 1, 0, 1, false),
        (Effect::Once, 1, 2, 1, false),
    ];
    for (effect, failures, retries, calls, works) in table {
        let mut bench = bench(&full());
        let info = Probe::named("probe").info().clone();
        let flaky = Arc::new(Flaky { info, effect, failures, calls: AtomicU32::new(0) });
        let options = move |_: &str| CallOptions { retries, ..CallOptions::default() };
        let tools: Vec<Arc<dyn Tool>> = vec![Arc::<Flaky>::clone(&flaky)];
        bench.executor = Executor::new(tools, Gate::new(&full()).unwrap(), options).unwrap();
        let (_, failure, audit) = bench.executed("work").await;
        assert_eq!(
            (flaky.calls.load(Ordering::SeqCst), failure.is_none()),
            (calls, works),
            "{effect:?} {failures} {retries}"
        );
        let outcome = if works { "succeeded" } else { "failed" };
        assert_eq!(audit.unwrap().outcome, outcome, "one record, however often it was tried");
    }
}

#[tokio::test(start_paused = true)]
async fn how_long_a_call_may_take() {
    let second = Duration::from_secs(1);
    let table = [
        ("probe", None, None, 60_000),
        ("probe", Some(90 * second), None, 90_000),
        ("probe", Some(90 * second), Some(5 * second), 5_000),
        ("agent:probe", None, None, 3_600_000),
        ("agent:probe", None, Some(5 * second), 5_000),
        ("agent:probe", Some(7 * second), None, 7_000),
    ];
    for (name, timeout, longest, expected) in table {
        let mut bench = bench(&full());
        let options = move |_: &str| CallOptions { timeout, ..CallOptions::default() };
        bench.executor =
            Executor::new(vec![Probe::named(name)], Gate::new(&full()).unwrap(), options).unwrap();
        bench.scope.longest = longest;
        bench.scope.tools = Arc::new(BTreeSet::from([name.to_owned()]));
        let Prepared::Ready(ready) = bench.prepare(name, r#"{"do": "hang"}"#).await else {
            panic!("{name}")
        };
        let finished =
            bench.executor.execute(ready, &bench.scope, &CancellationToken::new()).await.unwrap();
        let (_, failure, audit) = outcome(finished);
        assert_eq!(
            (failure, audit.unwrap().duration_ms),
            (Some(CallFailure::Timeout), Some(expected)),
            "{name}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn cancelling_a_run_ends_its_call_at_once() {
    let bench = bench(&full());
    let cancel = CancellationToken::new();
    let ready = bench.ready("hang").await;
    let (finished, ()) =
        tokio::join!(bench.executor.execute(ready, &bench.scope, &cancel), async {
            tokio::time::advance(Duration::from_millis(30)).await;
            cancel.cancel();
        });
    let (content, failure, audit) = outcome(finished.unwrap());
    assert_eq!(failure, Some(CallFailure::Cancelled));
    assert_eq!(
        content,
        "Error: The run ended during this call; it is unknown whether it took effect."
    );
    let audit = audit.unwrap();
    assert_eq!((audit.outcome.as_str(), audit.duration_ms), ("cancelled", Some(30)));

    let ready = bench.ready("look").await;
    let (content, ..) =
        outcome(bench.executor.execute(ready, &bench.scope, &cancel).await.unwrap());
    let untouched = "Error: Not executed, the run ended before this call began.";
    assert_eq!(content, untouched, "a cancelled run executes nothing");
}

#[tokio::test]
async fn a_fault_of_the_service_ends_the_run_but_the_call_is_answered() {
    let bench = bench(&full());
    let ready = bench.ready("fatal").await;
    let late =
        bench.executor.execute(ready, &bench.scope, &CancellationToken::new()).await.unwrap_err();
    let early = bench
        .executor
        .prepare(&call("probe", r#"{"do":"fatal early"}"#), SLOT, &bench.scope, None)
        .await
        .unwrap_err();
    for error in [late, early] {
        assert_eq!(error.to_string(), "probe: disk on fire");
        let (content, failure, _) = outcome(*error.finished);
        assert_eq!(failure, Some(CallFailure::ToolError));
        assert!(!content.contains("fire"), "the cause is private");
    }
}

#[tokio::test]
async fn results_are_capped_with_head_and_tail_and_without_nul() {
    let bench = bench(&full());
    assert_eq!(bench.executed("nul").await.0, "ab");
    let (content, failure, _) = bench.executed("flood").await;
    assert_eq!(failure, None);
    assert!(content.len() <= MAX_RESULT && content.len() > MAX_RESULT - 512, "{}", content.len());
    assert!(content.starts_with("00000\n00001\n") && content.ends_with("39998\n39999\n"));
    let (before, note) = content.split_once("\n[… ").unwrap();
    let (note, after) = note.split_once(" …]\n").unwrap();
    let left_out = 240_000 - before.len() - after.len();
    let first = before.matches('\n').count() + 1;
    let last = 40_000 - after.matches('\n').count() + 1;
    assert_eq!(
        note,
        format!(
            "{left_out} bytes of this result are left out here, in its lines {first} to {last}; ask for less at a time"
        )
    );
    let key = "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----\n";
    let after = "b".repeat((MAX_RESULT - 256) / 2 - "hunter2\n-----END PRIVATE KEY-----\n".len());
    let cut_in_key = capped(format!("{}{key}{after}", "a\n".repeat(MAX_RESULT)));
    assert!(cut_in_key.ends_with("bbb") && !cut_in_key.contains("hunter2"));
    let wide = capped("ä".repeat(MAX_RESULT));
    assert!(wide.len() <= MAX_RESULT && wide.starts_with('ä') && wide.ends_with('ä'));
}
