//! A call's way through the executor, with tools that misbehave in every way there is.
//!
//! Time is paused where time matters. What `file_ops` does is tested beside it, and here only once,
//! to see that the whole way holds.

#[path = "executor/execution_tests.rs"]
mod execution;

use std::collections::BTreeSet;

use async_trait::async_trait;
use serde_json::json;
use uuid::Uuid;

use super::super::approval::{EarlierDecisions, GrantedApproval};
use super::*;
use crate::event::{ApprovalBasis, AuditRecord, Circumstances, RunEvent, ToolCallBlocked};
use crate::governance::{Action, ActionKind, Permit, Policy, ToolPolicy, ToolRule};
use crate::message::tool_schema::ToolSchema;
use crate::run::{Autonomy, Caller, FlowDecision, FlowRule, GovernanceMode, Labels};
use crate::tools::lease::Lease;
use crate::tools::registry::Registry;
use crate::tools::requests::RequestsLeft;
use crate::tools::{Listener, Standing, ToolContext, ToolError, Workspace};

/// What a probe does, by its argument `do`.
struct Probe(ToolInfo);

impl Probe {
    fn named(name: &str) -> Arc<dyn Tool> {
        let schema = json!({
            "type": "object",
            "properties": {"do": {"type": "string"}, "n": {"type": "integer", "minimum": 1}},
            "required": ["do"],
            "additionalProperties": false
        });
        Arc::new(Self(ToolInfo {
            name: name.into(),
            description: "Does what it is told.".into(),
            input_schema: ToolSchema::from(schema),
            effect: Effect::Once,
            varies: true,
            concurrent: false,
            source: "builtin".into(),
            destructive: false,
            defaults: crate::tools::Defaults::default(),
        }))
    }
}

#[async_trait]
impl Tool for Probe {
    fn info(&self) -> &ToolInfo {
        &self.0
    }

    fn unavailable(&self) -> Option<String> {
        (self.0.name == "gone").then(|| "It is gone.".to_owned())
    }

    async fn actions(&self, arguments: &Value, _: &ToolContext) -> Result<Vec<Action>, ToolError> {
        let action = |effect, destructive| Action {
            destructive,
            ..Action::new(ActionKind::Call { tool: self.0.name.clone() }, effect)
        };
        match arguments["do"].as_str().unwrap_or_default() {
            "destroy" => Ok(vec![action(Effect::Once, true)]),
            "look" => Ok(vec![action(Effect::Read, false)]),
            "mix" => Ok(vec![action(Effect::Read, false), action(Effect::Idempotent, false)]),
            "undeclared" => Ok(vec![]),
            "fail early" => Err(ToolError::ForModel("no such thing".into())),
            "panic early" => panic!("as it must"),
            "hang early" => std::future::pending().await,
            "fatal early" => Err(ToolError::Fatal("disk on fire".into())),
            _ => Ok(vec![action(Effect::Once, false)]),
        }
    }

    async fn execute(
        &self,
        _: Permit,
        arguments: Value,
        context: &ToolContext,
    ) -> Result<String, ToolError> {
        match arguments["do"].as_str().unwrap_or_default() {
            "fail" => Err(ToolError::ForModel("it did not work".into())),
            "fatal" => Err(ToolError::Fatal("disk on fire".into())),
            "panic" => panic!("as it must"),
            "hang" => std::future::pending().await,
            "nul" => Ok("a\0b".into()),
            "flood" => Ok((0..40_000).map(|n| format!("{n:05}\n")).collect::<Vec<_>>().concat()),
            "key" => Ok(context.effect_key.clone()),
            other => Ok(format!("did {other}")),
        }
    }
}

struct Bench {
    executor: Executor,
    scope: RunScope,
    home: tempfile::TempDir,
}

fn bench(policy: &Policy) -> Bench {
    let home = tempfile::tempdir().unwrap();
    let tools = vec![Probe::named("probe"), Probe::named("other")];
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
        standing: Standing::new(
            Arc::new(Lease::new(Duration::from_hours(1))),
            CancellationToken::new(),
        ),
        listener: Listener::default(),
        requests_left: RequestsLeft::default(),
        files_left: None,
    };
    Bench {
        executor: Executor::new(tools, Gate::new(policy).unwrap(), |_| CallOptions::default())
            .unwrap(),
        scope,
        home,
    }
}

fn full() -> Policy {
    Policy { autonomy: Autonomy::Full, ..Policy::default() }
}

const SLOT: Slot = Slot { attempt: 1, iteration: 2, index: 0 };

fn call(name: &str, arguments: &str) -> ToolCall {
    ToolCall {
        id: Uuid::from_u128(1),
        provider_id: "call_1".into(),
        name: name.into(),
        arguments: arguments.into(),
        target: CallTarget::Tool,
    }
}

impl Bench {
    async fn prepare(&self, name: &str, arguments: &str) -> Prepared {
        self.executor.prepare(&call(name, arguments), SLOT, &self.scope, None).await.unwrap()
    }

    async fn ready(&self, what: &str) -> ReadyCall {
        match self.prepare("probe", &json!({"do": what}).to_string()).await {
            Prepared::Ready(ready) => ready,
            other => panic!("{what}: {other:?}"),
        }
    }

    /// Content, failure and audit of an answered call.
    async fn answered(
        &self,
        name: &str,
        arguments: &str,
    ) -> (String, Option<CallFailure>, Option<AuditRecord>) {
        match self.prepare(name, arguments).await {
            Prepared::Answered(finished) => outcome(finished),
            other => panic!("{arguments}: {other:?}"),
        }
    }

    async fn executed(&self, what: &str) -> (String, Option<CallFailure>, Option<AuditRecord>) {
        let ready = self.ready(what).await;
        outcome(self.executor.execute(ready, &self.scope, &CancellationToken::new()).await.unwrap())
    }
}

fn outcome(finished: Finished) -> (String, Option<CallFailure>, Option<AuditRecord>) {
    match finished.event {
        RunEvent::ToolCallCompleted(c) => (c.content, c.failure, finished.audit),
        RunEvent::ToolCallBlocked(b) => (b.content, None, finished.audit),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn what_the_model_got_wrong_is_answered_before_anything_is_decided() {
    use CallFailure::{InvalidArguments, UnknownTool};
    let bench = bench(&full());
    let deep = "[".repeat(500);
    let (long, cut) = ("x".repeat(256), format!("Error: Unknown tool {}…", "x".repeat(200)));
    #[rustfmt::skip]
    let table = [
        (long.as_str(), "{}",                  UnknownTool,      cut.as_str()),
        ("nope",  "{}",                        UnknownTool,      "Error: Unknown tool nope"),
        ("other", r#"{"do": "look"}"#,         UnknownTool,      "Error: Unknown tool other"),
        ("pro\0", "{}",                        UnknownTool,      "Error: Unknown tool pro"),
        ("probe", r#"{"do": }"#,               InvalidArguments, "Error: The arguments are not valid JSON: expected value at line 1 column 8."),
        ("probe", "{\n\"do\": \"a",            InvalidArguments, "Error: The arguments are not valid JSON: EOF while parsing a string at line 2 column 8."),
        ("probe", r#"{"do": "look"} x"#,       InvalidArguments, "Error: The arguments are not valid JSON: trailing characters at line 1 column 16."),
        ("probe", &deep,                       InvalidArguments, "Error: The arguments are too complex: the JSON is nested more than 96 levels deep."),
        ("probe", r#"{"do": 36893488147419103232}"#, InvalidArguments, "Error: The arguments cannot be passed on as they are: the JSON holds an integer of more than 64 bits, 36893488147419103232; write it as a string."),
        ("probe", "[]",                        InvalidArguments, "Error: The arguments must be a JSON object."),
        ("probe", "\"do\"",                    InvalidArguments, "Error: The arguments must be a JSON object."),
        ("probe", "",                          InvalidArguments, "Error: The arguments do not match the tool's schema:\n- at the arguments: \"do\" is a required property"),
        ("probe", r#"{"do": 1, "n": 0}"#,      InvalidArguments, "Error: The arguments do not match the tool's schema:\n- at /do: value is not of type \"string\"\n- at /n: value is less than the minimum of 1"),
        ("probe", r#"{"do": "x", "z": 1}"#,    InvalidArguments, "Error: The arguments do not match the tool's schema:\n- at the arguments: Additional properties are not allowed ('z' was unexpected)"),
    ];
    for (name, arguments, failure, content) in table {
        let answer = bench.answered(name, arguments).await;
        assert_eq!(answer, (content.to_owned(), Some(failure), None), "{name} {arguments}");
    }
}

#[tokio::test]
async fn what_cannot_be_judged_is_blocked_and_audited() {
    let bench = bench(&full());
    let (content, failure, audit) = bench.answered("probe", r#"{"do": "fail early"}"#).await;
    let audit = audit.unwrap();
    assert_eq!((content.as_str(), failure), ("Error: no such thing", None));
    assert_eq!((audit.rule.as_str(), audit.decision.as_str()), ("actions", "blocked"));
    assert_eq!(audit.reason.as_deref(), Some("no such thing"));
}

fn denied(tools: &str) -> ToolRule {
    ToolRule { tools: tools.to_owned(), policy: ToolPolicy::Deny, observes: false }
}

#[tokio::test]
async fn what_the_gate_stops_is_answered_with_the_reason_and_audited() {
    let policy = Policy { tool_policies: vec![denied("probe")], ..full() };
    let reason = "Blocked by the tool_policy rule: the policy for probe denies every call of probe; continue without it.";
    let Prepared::Answered(finished) = bench(&policy).prepare("probe", r#"{"do": "look"}"#).await
    else {
        panic!("it passed")
    };
    let expected = ToolCallBlocked {
        actions: [Action::new(ActionKind::Call { tool: "probe".into() }, Effect::Read)].into(),
        circumstances: Circumstances::default(),
        call_id: Uuid::from_u128(1),
        tool: "probe".into(),
        rule: "tool_policy".into(),
        decision: "blocked".into(),
        reason: reason.into(),
        content: format!("Error: {reason}"),
    };
    assert_eq!(finished.event, RunEvent::ToolCallBlocked(expected));
    let audit = finished.audit.unwrap();
    assert_eq!(
        (audit.rule.as_str(), audit.decision.as_str(), audit.reason.as_deref()),
        ("tool_policy", "blocked", Some(reason))
    );
    assert_eq!((audit.outcome.as_str(), audit.duration_ms), ("blocked", None));
    assert_eq!(audit.arguments, r#"{"do":"look"}"#);
}

#[tokio::test]
async fn an_approval_answers_the_question_and_nothing_else() {
    let bench = bench(&Policy { tool_policies: vec![denied("other")], ..Policy::default() });
    let destroy = call("probe", r#"{"do": "destroy"}"#);
    let asks =
        "The autonomy rule asks for an approval: to call probe would lose what exists there.";
    let Prepared::Escalated(escalated) = bench.prepare("probe", &destroy.arguments).await else {
        panic!("it passed")
    };
    assert_eq!(
        (&escalated.arguments, escalated.reason.as_str()),
        (&json!({"do": "destroy"}), asks)
    );
    let audit = escalated.audit;
    assert_eq!((audit.rule.as_str(), audit.decision.as_str()), ("autonomy", "escalated"));
    assert_eq!(
        (audit.outcome.as_str(), audit.arguments.as_str()),
        ("not_executed", r#"{"do":"destroy"}"#)
    );

    let tool_hash = escalated.tool_hash;
    let basis = ApprovalBasis { tool_hash, ..ApprovalBasis::default() };
    let shown = escalated.actions;
    let granted = |arguments| {
        let actions: &[Action] = if Option::is_none(&arguments) { &shown } else { &[] };
        Some(GrantedApproval { by: "ann", arguments, basis: &basis, actions })
    };
    let approved =
        bench.executor.prepare(&destroy, SLOT, &bench.scope, granted(None)).await.unwrap();
    let Prepared::Ready(ready) = approved else { panic!("{approved:?}") };
    let started = ready.started();
    assert_eq!((started.decision.as_str(), started.effect), ("escalated", Effect::Once));
    assert_eq!(started.reason, Some(format!("{asks} Approved by ann.")));
    let key = started.effect_key.clone();

    // Other arguments are judged like the model's, and are another effect.
    let look = json!({"do": "look"});
    let edited =
        bench.executor.prepare(&destroy, SLOT, &bench.scope, granted(Some(&look))).await.unwrap();
    let Prepared::Ready(ready) = edited else { panic!("{edited:?}") };
    assert_eq!((ready.started().decision.as_str(), ready.effect()), ("allowed", Effect::Read));
    assert_ne!(ready.started().effect_key, key);
    let wrong = json!({"do": 1});
    let missed =
        bench.executor.prepare(&destroy, SLOT, &bench.scope, granted(Some(&wrong))).await.unwrap();
    let Prepared::Answered(finished) = missed else { panic!("{missed:?}") };
    assert_eq!(outcome(finished).1, Some(CallFailure::InvalidArguments));

    // An approval holds for the tool as it was shown, and for what the call would have done.
    let other_tool = ApprovalBasis { tool_hash: Some("other".into()), ..basis.clone() };
    let other = [Action::new(ActionKind::Call { tool: "other".into() }, Effect::Once)];
    let hashed = |actions: &[Action]| ApprovalBasis {
        actions_hash: Some(Action::hash_of(actions)),
        ..basis.clone()
    };
    let (unrecorded, other_unrecorded) = (hashed(&shown), hashed(&other));
    for arguments in [None, Some(&look)] {
        let granted = GrantedApproval { by: "ann", arguments, basis: &unrecorded, actions: &[] };
        let held = bench.executor.prepare(&destroy, SLOT, &bench.scope, Some(granted)).await;
        assert!(matches!(held, Ok(Prepared::Ready(_))), "{held:?}");
    }
    let changed = "An earlier approval lapsed: the tool's declaration has changed.";
    let does_more = "An earlier approval lapsed: the call would now do something else.";
    for (arguments, basis, actions, why) in [
        (Some(&look), &other_tool, &[][..], changed),
        (None, &basis, other.as_slice(), does_more),
        (None, &other_unrecorded, &[][..], does_more),
        (Some(&look), &basis, other.as_slice(), does_more),
    ] {
        let granted = GrantedApproval { by: "ann", arguments, basis, actions };
        let again = bench.executor.prepare(&destroy, SLOT, &bench.scope, Some(granted)).await;
        let Prepared::Escalated(escalated) = again.unwrap() else { panic!("{why}") };
        assert!(escalated.reason.ends_with(why), "{}", escalated.reason);
        assert_eq!(escalated.arguments, json!({"do": "destroy"}), "the edit lapsed, too");
    }

    // What is blocked stays blocked.
    let scope =
        RunScope { tools: Arc::new(BTreeSet::from(["other".to_owned()])), ..bench.scope.clone() };
    let other = call("other", r#"{"do": "destroy"}"#);
    let blocked = bench.executor.prepare(&other, SLOT, &scope, granted(None)).await.unwrap();
    assert!(
        matches!(blocked, Prepared::Answered(Finished { event: RunEvent::ToolCallBlocked(_), .. })),
        "{blocked:?}"
    );
}

/// What the run has read since counts where the rules say something else for it.
#[tokio::test]
async fn an_approval_outlives_labels_that_change_nothing() {
    use FlowDecision::{Ask, Deny};
    let basis = ApprovalBasis::default();
    let rules = |rules: &[(&str, FlowDecision)]| -> Vec<FlowRule> {
        let rule = |(when, decision): &(&str, FlowDecision)| FlowRule {
            when: (*when).to_owned(),
            r#do: *decision,
            mode: GovernanceMode::Enforce,
        };
        rules.iter().map(rule).collect()
    };
    let (destructive, tainted) = ("action.destructive", "labels.untrusted");
    let lapsed = "An earlier approval lapsed: the run has since read untrusted data.";
    let look = json!({"do": "look"});
    let asked = vec![ToolRule { policy: ToolPolicy::Ask, ..denied("*") }];
    for (policy, flow, edited, expected) in [
        (Policy::default(), rules(&[]), None, "ready"),
        // What `supervised` asks about hides no rule that asks for what was read.
        (Policy::default(), rules(&[(tainted, Ask)]), None, lapsed),
        (Policy::default(), rules(&[(destructive, Ask), (tainted, Ask)]), None, lapsed),
        (Policy::default(), rules(&[(destructive, Ask)]), None, "ready"),
        // Its own rule asks for nothing else; without it, the same rule does.
        (Policy::default(), FlowRule::defaults(), None, "ready"),
        (Policy { tool_policies: asked, ..full() }, FlowRule::defaults(), None, lapsed),
        (full(), rules(&[(tainted, Ask), (destructive, Ask)]), None, lapsed),
        (Policy::default(), rules(&[(tainted, Deny)]), None, "blocked"),
        (Policy::default(), rules(&[]), Some(&look), "ready"),
        (Policy::default(), rules(&[(tainted, Ask)]), Some(&look), lapsed),
    ] {
        let bench = bench(&Policy { flow: flow.clone(), ..policy });
        let destroy = call("probe", r#"{"do": "destroy"}"#);
        let granted = GrantedApproval { by: "ann", arguments: edited, basis: &basis, actions: &[] };
        let scope = RunScope { labels: Labels::UNTRUSTED, ..bench.scope.clone() };
        let found = match bench.executor.prepare(&destroy, SLOT, &scope, Some(granted)).await {
            Ok(Prepared::Ready(_)) => "ready".to_owned(),
            Ok(Prepared::Answered(_)) => "blocked".to_owned(),
            Ok(Prepared::Escalated(escalated)) => {
                assert_eq!(escalated.arguments, json!({"do": "destroy"}));
                escalated.reason
            }
            Err(fault) => fault.to_string(),
        };
        assert!(found.ends_with(expected), "{flow:?}, {edited:?}: {found}");
    }
}

#[tokio::test]
async fn a_call_that_was_started_is_not_decided_on_anew() {
    let bench = bench(&Policy { tool_policies: vec![denied("other")], ..Policy::default() });
    let started = EarlierDecisions { was_started: true, ..EarlierDecisions::default() };
    // It would be asked for, and does not match the schema.
    for arguments in [r#"{"do": "destroy"}"#, r#"{"do": 1}"#] {
        let call = call("probe", arguments);
        let again = bench.executor.prepare(&call, SLOT, &bench.scope, started).await.unwrap();
        assert!(matches!(again, Prepared::Ready(_)), "{arguments}: {again:?}");
    }
    let gone = call("nope", "{}");
    let gone = bench.executor.prepare(&gone, SLOT, &bench.scope, started).await.unwrap();
    let Prepared::Answered(finished) = gone else { panic!("{gone:?}") };
    let (said, failure, _) = outcome(finished);
    assert_eq!(failure, Some(CallFailure::UnknownTool));
    assert!(said.ends_with("it is unknown whether it took effect"), "{said}");
    // So is one whose tool is there and cannot work.
    let tools = vec![Probe::named("gone")];
    let gate = Gate::new(&full()).unwrap();
    let executor = Executor::new(tools, gate, |_| CallOptions::default()).unwrap();
    let scope =
        RunScope { tools: Arc::new(BTreeSet::from(["gone".to_owned()])), ..bench.scope.clone() };
    let failing = call("gone", r#"{"do": "fail"}"#);
    let again = executor.prepare(&failing, SLOT, &scope, started).await.unwrap();
    let Prepared::Ready(ready) = again else { panic!("{again:?}") };
    let finished = executor.execute(ready, &scope, &CancellationToken::new()).await.unwrap();
    assert_eq!(outcome(finished).0, format!("Error: it did not work{GONE_MEANWHILE}"));
    // What is blocked stays blocked.
    let scope =
        RunScope { tools: Arc::new(BTreeSet::from(["other".to_owned()])), ..bench.scope.clone() };
    let other = call("other", r#"{"do": "destroy"}"#);
    let blocked = bench.executor.prepare(&other, SLOT, &scope, started).await.unwrap();
    assert!(matches!(blocked, Prepared::Answered(_)), "{blocked:?}");
}

#[tokio::test]
async fn effect_keys_are_equal_for_equal_calls_only() {
    let bench = bench(&full());
    let key = async |slot: Slot, name: &str, arguments: &str, run: u128| {
        let scope = RunScope {
            agent: "reader".into(),
            run_id: Uuid::from_u128(run),
            tools: Arc::new(BTreeSet::from(["probe".to_owned(), "other".to_owned()])),
            inputs: Arc::new(json!({})),
            skills: Arc::default(),
            ..bench.scope.clone()
        };
        match bench.executor.prepare(&call(name, arguments), slot, &scope, None).await.unwrap() {
            Prepared::Ready(ready) => ready.started().effect_key.clone(),
            other => panic!("{other:?}"),
        }
    };
    let base = key(SLOT, "probe", r#"{"do":"x","n":2}"#, 7).await;
    assert_eq!(base.len(), 64);
    assert_eq!(
        base,
        key(SLOT, "probe", " {\"n\": 2,\n \"do\": \"x\"}", 7).await,
        "order and white space say nothing"
    );
    let others = [
        key(Slot { attempt: 2, ..SLOT }, "probe", r#"{"do":"x","n":2}"#, 7).await,
        key(Slot { iteration: 3, ..SLOT }, "probe", r#"{"do":"x","n":2}"#, 7).await,
        key(Slot { index: 1, ..SLOT }, "probe", r#"{"do":"x","n":2}"#, 7).await,
        key(SLOT, "other", r#"{"do":"x","n":2}"#, 7).await,
        key(SLOT, "probe", r#"{"do":"x","n":3}"#, 7).await,
        key(SLOT, "probe", r#"{"do":"x","n":2}"#, 8).await,
    ];
    let mut all = BTreeSet::from(others);
    all.insert(base);
    assert_eq!(all.len(), 7);
    let ready = bench.ready("key").await;
    let announced = ready.started().effect_key.clone();
    let told = outcome(
        bench.executor.execute(ready, &bench.scope, &CancellationToken::new()).await.unwrap(),
    )
    .0;
    assert_eq!(told, announced, "the tool is told the key that is stored");
}

#[test]
fn the_audit_log_keeps_no_secret_and_no_novel() {
    let shown = |arguments: Value| {
        let canonical = crate::message::canonical_json(arguments.clone());
        super::shown(&arguments, canonical)
    };
    for (arguments, kept) in [
        (json!({"path": "a", "n": 1}), r#"{"n":1,"path":"a"}"#),
        (json!({"API_KEY": "k", "n": 1}), r#"{"API_KEY":"[redacted]","n":1}"#),
        (json!({"a": [{"userPassword": {"x": 1}}]}), r#"{"a":[{"userPassword":"[redacted]"}]}"#),
        (
            json!({"access_token": ["t"], "client-secret": "s"}),
            r#"{"access_token":"[redacted]","client-secret":"[redacted]"}"#,
        ),
        (
            json!({"headers": {"Authorization": "Bearer x"}}),
            r#"{"headers":{"Authorization":"[redacted]"}}"#,
        ),
    ] {
        assert_eq!(shown(arguments), kept);
    }
    let long = shown(json!({"content": "ä".repeat(5000)}));
    assert!(long.len() <= 4096 && long.ends_with("ä…"));
}

#[tokio::test]
async fn file_ops_goes_the_whole_way() {
    let mut bench = bench(&Policy { read: vec!["./**".into()], ..full() });
    let tools = Registry::builtin().resolve(&["file_*".into(), "file_ops".into()]).unwrap();
    assert_eq!(tools.len(), 1);
    bench.executor = Executor::new(tools, bench.executor.gate, |_| CallOptions::default()).unwrap();
    bench.scope.tools = Arc::new(BTreeSet::from(["file_ops".to_owned()]));
    std::fs::write(bench.home.path().join("t/sum.txt"), "42").unwrap();
    let Prepared::Ready(ready) =
        bench.prepare("file_ops", r#"{"operation":"read","path":"sum.txt"}"#).await
    else {
        panic!("a read was not let through")
    };
    assert_eq!(ready.effect(), Effect::Read);
    let finished =
        bench.executor.execute(ready, &bench.scope, &CancellationToken::new()).await.unwrap();
    assert_eq!(outcome(finished).0, "42");
    let write = r#"{"operation":"write","path":"sum.txt","content":"43"}"#;
    assert!(
        bench
            .answered("file_ops", write)
            .await
            .0
            .starts_with("Error: Blocked by the path rule: \"sum.txt\" may not be written")
    );
    let bad = r#"{"operation":"fly","path":1}"#;
    assert_eq!(bench.answered("file_ops", bad).await.1, Some(CallFailure::InvalidArguments));
}

#[test]
fn names_and_schemas_that_mean_nothing_are_errors() {
    let registry = Registry::builtin();
    for name in ["shell", "mcp:*", "file_", "a[", ""] {
        let error = registry.resolve(&["file_ops".into(), name.into()]).err().unwrap();
        assert_eq!(error.0, name);
    }
    assert_eq!(
        registry.tools().iter().map(|tool| tool.info().name.clone()).collect::<Vec<_>>(),
        ["file_ops", "recall"]
    );

    for schema in [
        json!({"type": "nonsense"}),
        json!({"$ref": "https://example.com/schema.json"}),
        json!({"$ref": "file:///etc/passwd"}),
    ] {
        let probe = Probe(ToolInfo {
            input_schema: ToolSchema::from(schema.clone()),
            ..Probe::named("probe").info().clone()
        });
        let error = Executor::new(vec![Arc::new(probe)], Gate::new(&full()).unwrap(), |_| {
            CallOptions::default()
        })
        .err();
        assert_eq!(error.map(|e| e.tool).as_deref(), Some("probe"), "{schema}");
    }
}
