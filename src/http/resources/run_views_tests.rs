//! Runs as JSON.

use std::sync::Arc;

use serde_json::json;

use super::*;
use crate::event::{Event, RunEvent};
use crate::message::Usage;
use crate::run::{BudgetOverrides, Caller, Outcome, RunOrigin, Totals, TraceContext};
use crate::store::{DefinitionSnapshot, NewRun, RunWrite};

fn record(kind: RunKind) -> RunRecord {
    let at = DateTime::from_timestamp(1_769_860_800, 0).unwrap();
    let usage =
        Usage { input_tokens: 7, output_tokens: 3, cost_micro_usd: Some(540), ..Usage::default() };
    let totals = Totals {
        attempts: 1,
        iterations: 2,
        tool_calls_made: 1,
        tools_used: ["file_ops".to_owned()].into(),
        usage,
        model: Some("scripted/a".into()),
        ..Totals::default()
    };
    let new = NewRun {
        id: Uuid::nil(),
        agent: "a".into(),
        agent_version: "1.0.0".into(),
        definition: Arc::new(DefinitionSnapshot { hash: "h".into(), json: String::new() }),
        kind,
        status: RunStatus::Running,
        inputs: Arc::new(json!({"task": "t"})),
        overrides: json!({}),
        session_id: None,
        session_place: None,
        parent_run_id: None,
        metadata: json!({}),
        created_at: at,
        idempotency: None,
        traceparent: None,
        webhook: None,
        queue: crate::store::QueuePlace::default(),
    };
    let output = Outcome::Completed {
        output: json!({"n": 1}),
        raw_response: "{\"n\": 1}".into(),
        reason: TerminationReason::Completed,
        partial: false,
        unchecked: vec![],
    };
    let end = Event { seq: 9, at, run_id: new.id, what: RunEvent::ended(output, 12) };
    let caller = Caller { subject: "key".into(), tenant: "default".into(), scopes: Vec::new() };
    let write = RunWrite {
        run_id: new.id,
        epoch: 1,
        caller: Arc::new(caller),
        new: Some(Arc::new(new)),
        origin: Arc::new(RunOrigin {
            tenant: "t".into(),
            subject: "s".into(),
            agent: "a".into(),
            agent_version: "1".into(),
            definition_hash: "d".into(),
            session_id: None,
            model: None,
            is_child: false,
            created_at: at,
            is_observed: false,
            webhook: None,
            trace: TraceContext::of_run(Uuid::nil(), None, 0.0),
        }),
        events: vec![end],
        audit: Vec::new(),
        totals,
        park: None,
        is_repeated: false,
    };
    RunRecord { started_at: Some(at), ..RunRecord::after("me", &write).unwrap() }
}

#[test]
fn the_answer_of_a_loop_has_its_documented_shape() {
    let answer = serde_json::to_value(Run::from(record(RunKind::Iterative))).unwrap();
    assert_eq!(
        answer,
        json!({
            "run_id": "00000000-0000-0000-0000-000000000000", "agent": "a", "status": "completed",
            "termination_reason": "completed", "output": {"n": 1}, "raw_response": "{\"n\": 1}",
            "model": "scripted/a", "tokens_used": 10,
            "usage": {
                "input_tokens": 7, "output_tokens": 3, "cached_input_tokens": 0, "cache_write_tokens": 0,
                "reasoning_tokens": 0, "total_tokens": 10, "cost_usd": 0.00054,
            },
            "tree_usage": null,
            "attempts": 1, "iterations": 2, "tool_calls_made": 1, "tools_used": ["file_ops"], "latency_ms": 12,
            "partial": false, "error": null, "warnings": [], "callback_errors": [],
        })
    );
}

#[test]
fn the_answer_of_a_single_shot_has_no_counts_of_a_loop() {
    let answer = serde_json::to_value(Run::from(record(RunKind::Single))).unwrap();
    for field in ["attempts", "iterations", "tool_calls_made", "tools_used"] {
        assert_eq!(answer.get(field), None, "{field}");
    }
}

#[test]
fn without_a_price_the_cost_is_null_and_not_zero() {
    let usage = Usage { cost_micro_usd: None, ..Usage::default() };
    assert_eq!(serde_json::to_value(UsageView::from(&usage)).unwrap()["cost_usd"], Value::Null);
}

#[test]
fn a_request_only_narrows_budget_limits() {
    let asked = BudgetOverrides {
        max_tool_calls: Some(7),
        max_iterations: Some(5000),
        ..BudgetOverrides::default()
    };
    let shown = Budget::default().narrowed_by(&asked);
    assert_eq!(shown, Budget { max_tool_calls: 7, ..Budget::default() });
    let capped = Budget { max_total_tokens: Some(50), ..Budget::default() };
    let asked = BudgetOverrides { max_total_tokens: Some(60), ..BudgetOverrides::default() };
    assert_eq!(capped.narrowed_by(&asked).max_total_tokens, Some(50));
    assert_eq!(Budget::default().narrowed_by(&asked).max_total_tokens, Some(60));
}
