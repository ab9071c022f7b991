//! What a tool answers that is asked after a crash, and what becomes of its call then.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use async_trait::async_trait;
use serde_json::json;
use uuid::Uuid;

use super::super::*;
use super::*;
use crate::event::{Awaited, WaitKind};
use crate::governance::{ActionKind, Permit, Policy, ToolPolicy, ToolRule};
use crate::message::tool_schema::ToolSchema;
use crate::run::{Autonomy, Caller};
use crate::tools::interrupted_call::{RULE, RecordedCall};
use crate::tools::lease::Lease;
use crate::tools::requests::RequestsLeft;
use crate::tools::{Defaults, Listener, Standing, ToolContext, ToolError, Workspace};

/// Answers as its argument says, and counts what it does.
struct Probe {
    info: ToolInfo,
    executed: AtomicUsize,
    asked: AtomicUsize,
}

#[async_trait]
impl Tool for Probe {
    fn info(&self) -> &ToolInfo {
        &self.info
    }

    async fn actions(&self, _: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        Ok(vec![Action::new(ActionKind::Call { tool: "probe".into() }, Effect::Once)])
    }

    async fn execute(&self, _: Permit, _: Value, _: &ToolContext) -> Result<String, ToolError> {
        self.executed.fetch_add(1, Ordering::Relaxed);
        Ok("done".into())
    }

    fn can_reconcile(&self) -> bool {
        true
    }

    async fn reconcile_actions(
        &self,
        _: &Value,
        _: &ToolContext,
    ) -> Result<Vec<Action>, ToolError> {
        Ok(vec![Action::new(ActionKind::Call { tool: "probe".into() }, Effect::Read)])
    }

    async fn reconcile(
        &self,
        _: Permit,
        arguments: &Value,
        _: &ToolContext,
    ) -> Result<CallOutcome, ToolError> {
        self.asked.fetch_add(1, Ordering::Relaxed);
        match arguments["answer"].as_str().unwrap() {
            "happened" => Ok(CallOutcome::Happened(Ok("done before".into()))),
            "unreadable" => Ok(CallOutcome::Happened(Err("It is too large.".into()))),
            "did not" => Ok(CallOutcome::DidNotHappen),
            "unknown" => Ok(CallOutcome::Unknown("it was busy".into())),
            "fail" => Err(ToolError::ForModel("it cannot be asked".into())),
            "panic" => panic!("as it must"),
            _ => std::future::pending().await,
        }
    }
}

struct Bench {
    probe: Arc<Probe>,
    executor: Executor,
    scope: RunScope,
    _home: tempfile::TempDir,
}

fn bench(policy: &Policy) -> Bench {
    let home = tempfile::tempdir().unwrap();
    let info = ToolInfo {
        name: "probe".into(),
        description: "Does it once.".into(),
        input_schema: ToolSchema::from(json!({"type": "object"})),
        effect: Effect::Once,
        varies: false,
        concurrent: false,
        source: "builtin".into(),
        destructive: false,
        defaults: Defaults::default(),
    };
    let probe = Arc::new(Probe { info, executed: AtomicUsize::new(0), asked: AtomicUsize::new(0) });
    let lease = Arc::new(Lease::new(Duration::from_hours(1)));
    let scope = RunScope {
        agent: "reader".into(),
        run_id: Uuid::from_u128(7),
        caller: Arc::new(Caller {
            subject: "s".into(),
            tenant: "t".into(),
            scopes: vec!["tools:execute".into()],
        }),
        workspace: Workspace::open(home.path(), "t", ".").unwrap(),
        timeout: Duration::from_mins(1),
        delegation_timeout: Duration::from_hours(1),
        longest: None,
        tools: Arc::new(BTreeSet::from(["probe".to_owned()])),
        inputs: Arc::new(json!({})),
        labels: Labels::default(),
        trace: None,
        skills: Arc::default(),
        standing: Standing::new(lease, CancellationToken::new()),
        listener: Listener::default(),
        requests_left: RequestsLeft::default(),
        files_left: None,
    };
    let tools: Vec<Arc<dyn Tool>> = vec![probe.clone()];
    let gate = Gate::new(policy).unwrap();
    let executor = Executor::new(tools, gate, |_| CallOptions::default()).unwrap();
    Bench { probe, executor, scope, _home: home }
}

fn full() -> Policy {
    Policy { autonomy: Autonomy::Full, ..Policy::default() }
}

const SLOT: Slot = Slot { attempt: 1, iteration: 1, index: 0 };

fn call(answer: &str) -> ToolCall {
    ToolCall {
        id: Uuid::from_u128(1),
        provider_id: "c".into(),
        name: "probe".into(),
        arguments: json!({ "answer": answer }).to_string(),
        target: CallTarget::Tool,
    }
}

impl Bench {
    /// The call as its start was recorded.
    async fn interrupted(&self, answer: &str, then: OnUnknownOutcome) -> InterruptedCall {
        let first = self.executor.prepare(&call(answer), SLOT, &self.scope, None).await.unwrap();
        let Prepared::Ready(ready) = first else { panic!("{first:?}") };
        let ToolCallStarted { reconcilable_by, effect_key, .. } = ready.started().clone();
        let tool_hash = reconcilable_by.unwrap();
        let made_with = RecordedCall::of(ready.started());
        InterruptedCall { tool_hash, effect_key, on_unknown_outcome: then, made_with }
    }

    async fn again(&self, answer: &str, interrupted: &InterruptedCall) -> Prepared {
        let decided = EarlierDecisions {
            was_started: true,
            interrupted: Some(interrupted),
            ..EarlierDecisions::default()
        };
        self.executor.prepare(&call(answer), SLOT, &self.scope, decided).await.unwrap()
    }

    async fn resumed(&self, answer: &str, then: OnUnknownOutcome) -> Finished {
        let interrupted = self.interrupted(answer, then).await;
        let Prepared::Ready(ready) = self.again(answer, &interrupted).await else { panic!() };
        let stop = CancellationToken::new();
        self.executor.execute(ready, &self.scope, &stop).await.unwrap()
    }

    fn counts(&self) -> (usize, usize) {
        let Probe { asked, executed, .. } = &*self.probe;
        (asked.load(Ordering::Relaxed), executed.load(Ordering::Relaxed))
    }
}

/// What became of a call: its result and what is known, or the reason of its review.
fn outcome_of(finished: &Finished) -> (String, Option<Reconciled>) {
    match &finished.event {
        RunEvent::ToolCallCompleted(call) => (call.content.clone(), call.reconciled),
        RunEvent::ApprovalRequested(Awaited { kind: WaitKind::Review, reason, .. }) => {
            (format!("review: {reason}"), None)
        }
        other => panic!("{other:?}"),
    }
}

/// Outcomes of the audit records, in order.
fn audited(finished: &Finished) -> Vec<(&str, &str)> {
    let records = finished.requests.iter().chain(&finished.audit);
    records.map(|record| (record.rule.as_str(), record.outcome.as_str())).collect()
}

#[tokio::test(start_paused = true)]
async fn an_answer_decides_and_nothing_else_executes() {
    use OnUnknownOutcome::{Report, Retry, Review};
    const VAIN: &str = "review: The service stopped while this call was executed, and its tool, asked \
                        whether it took effect, gave no answer: ";
    const UNKNOWN: &str = "Error: the service restarted while this call was running";
    let unreadable =
        "Error: After a crash it was found that this call took effect. It is too large.";
    let vain = |why: &str| format!("{VAIN}{why}.");
    let asked = |outcome| vec![("reconcile", outcome)];
    let and_executed = |outcome| vec![("reconcile", outcome), ("none", "succeeded")];
    #[rustfmt::skip]
    let table = [
        ("happened", Review, "done before".to_owned(), Some(Reconciled::Happened), 0, asked("succeeded")),
        ("happened", Retry, "done before".to_owned(), Some(Reconciled::Happened), 0, asked("succeeded")),
        ("unreadable", Review, unreadable.to_owned(), Some(Reconciled::Happened), 0, asked("failed")),
        ("did not", Review, "done".to_owned(), Some(Reconciled::DidNotHappen), 1, and_executed("not_executed")),
        ("did not", Report, "done".to_owned(), Some(Reconciled::DidNotHappen), 1, and_executed("not_executed")),
        ("unknown", Review, vain("it was busy"), None, 0, asked("unknown")),
        ("unknown", Report, UNKNOWN.to_owned(), None, 0, asked("unknown")),
        ("unknown", Retry, "done".to_owned(), None, 1, and_executed("unknown")),
        ("fail", Review, vain("it cannot be asked"), None, 0, asked("unknown")),
        ("panic", Review, vain("the tool crashed"), None, 0, asked("unknown")),
        ("hang", Review, vain("no answer came within 60 seconds"), None, 0, asked("unknown")),
    ];
    for (answer, then, result, reconciled, executed, records) in table {
        let bench = bench(&full());
        let finished = bench.resumed(answer, then).await;
        let (said, known) = outcome_of(&finished);
        assert!(said.starts_with(&result), "{answer} {then:?}: {said}");
        assert_eq!(known, reconciled, "{answer} {then:?}");
        assert_eq!(bench.counts(), (1, executed), "{answer} {then:?}");
        let kept: Vec<_> = audited(&finished)
            .into_iter()
            .map(|(rule, outcome)| (if rule == RULE { rule } else { "none" }, outcome))
            .collect();
        assert_eq!(kept, records, "{answer} {then:?}");
    }
}

#[tokio::test]
async fn what_is_another_call_now_is_not_asked_about() {
    let bench = bench(&full());
    let known = bench.interrupted("did not", OnUnknownOutcome::Review).await;
    let other_tool = InterruptedCall { tool_hash: "0".repeat(64), ..known.clone() };
    let other_call = InterruptedCall { effect_key: "0".repeat(64), ..known.clone() };
    for (interrupted, why) in [(&other_tool, CHANGED_TOOL), (&other_call, CHANGED_CALL)] {
        let Prepared::Answered(finished) = bench.again("did not", interrupted).await else {
            panic!("{why}")
        };
        let (said, _) = outcome_of(&finished);
        assert!(said.ends_with(&format!("its tool cannot be asked: {why}.")), "{said}");
        let report =
            InterruptedCall { on_unknown_outcome: OnUnknownOutcome::Report, ..interrupted.clone() };
        let Prepared::Answered(finished) = bench.again("did not", &report).await else { panic!() };
        assert!(outcome_of(&finished).0.contains("whether it took effect is unknown"));
        let retry =
            InterruptedCall { on_unknown_outcome: OnUnknownOutcome::Retry, ..interrupted.clone() };
        assert!(matches!(bench.again("did not", &retry).await, Prepared::Ready(_)));
    }
    assert_eq!(bench.counts(), (0, 0));

    let denied = ToolRule { tools: "probe".into(), policy: ToolPolicy::Deny, observes: false };
    let strict = self::bench(&Policy { tool_policies: vec![denied], ..full() });
    let Prepared::Answered(finished) = strict.again("did not", &known).await else { panic!() };
    let (said, _) = outcome_of(&finished);
    assert!(said.starts_with("review: ") && said.contains("tool_policy rule"), "{said}");
}

#[tokio::test]
async fn a_cancelled_run_neither_guesses_nor_executes() {
    let bench = bench(&full());
    let interrupted = bench.interrupted("hang", OnUnknownOutcome::Review).await;
    for is_late in [false, true] {
        let Prepared::Ready(ready) = bench.again("hang", &interrupted).await else { panic!() };
        let stop = CancellationToken::new();
        let execution = bench.executor.execute(ready, &bench.scope, &stop);
        let cancelling = async {
            if is_late {
                tokio::task::yield_now().await;
            }
            stop.cancel();
        };
        if !is_late {
            stop.cancel();
        }
        let (finished, ()) = tokio::join!(execution, cancelling);
        let (said, known) = outcome_of(&finished.unwrap());
        assert!(said.ends_with("before it was found out whether it took effect."), "{said}");
        assert_eq!(known, None);
    }
    assert_eq!(bench.counts(), (1, 0));
}
