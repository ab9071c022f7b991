use serde_json::json;

use super::*;

fn event(kind: &str, data: &Value) -> Value {
    json!({"seq": 1, "type": kind, "at": "2026-01-02T03:04:05Z", "run_id": uuid::Uuid::nil(), "data": data})
}

fn responded(input: u64, cost: Option<i64>) -> Value {
    let usage = json!({"input_tokens": input, "output_tokens": 1, "cached_input_tokens": 0, "cache_write_tokens": 0,
        "reasoning_tokens": 0, "cost_micro_usd": cost});
    event(
        "model.responded",
        &json!({"attempt": 1, "iteration": 1, "provider": "p", "model": "m", "message": {"text": "", "tool_calls": []},
            "finish_reason": "stop", "usage": usage, "latency_ms": 5, "retries": 0, "fallback": false}),
    )
}

fn completed(failure: Option<&str>) -> Value {
    let call = json!({"call_id": uuid::Uuid::nil(), "tool": "file_ops\u{1b}[2J", "target": "tool",
        "content": "secret content", "failure": failure, "duration_ms": 12, "cached": false});
    event("tool_call.completed", &call)
}

#[test]
fn events_are_described_in_one_line() {
    let line = |event: &Value| describe(&parse_event(event).unwrap_or_else(|| panic!("{event}")));
    assert_eq!(
        line(&completed(Some("timeout"))).as_deref(),
        Some("  file_ops\\u{1b}[2J: failed, 12 ms")
    );
    let mut ended = completed(Some("cancelled"));
    assert_eq!(line(&ended).as_deref(), Some("  file_ops\\u{1b}[2J: cancelled, 12 ms"));
    ended["data"]["duration_ms"] = 0.into();
    assert_eq!(line(&ended).as_deref(), Some("  file_ops\\u{1b}[2J: not executed"));
    assert_eq!(line(&completed(None)).as_deref(), Some("  file_ops\\u{1b}[2J: ok, 12 ms"));
    assert_eq!(line(&responded(3, None)).as_deref(), Some("  p/m: 4 tokens, 5 ms, 0 tool call(s)"));
    assert_eq!(line(&event("run.queued", &json!({}))), None);
    let end = json!({"status": "cancelled", "error": {"code": "EXECUTION_CANCELLED", "message": "Over.", "context": {}},
        "raw_response": "", "latency_ms": 7, "run": {"run_id": "x", "status": "cancelled"}});
    assert_eq!(line(&event("run.cancelled", &end)).as_deref(), Some("cancelled after 7 ms: Over."));
    assert!(
        parse_event(&event("run.teleported", &json!({}))).is_none(),
        "a newer service's event is passed over"
    );
}

#[test]
fn what_waits_and_what_was_answered_name_the_call() {
    let line = |event: &Value| describe(&parse_event(event).unwrap_or_else(|| panic!("{event}")));
    let call = "00000000-0000-0000-0000-000000000000";
    let reason = "r".repeat(400);
    let requests = json!({"seat": {"message": "Which seat?", "requested_schema": {}}});
    let mut asked = json!({"call_id": call, "kind": "client", "tool": "mcp:a/b", "arguments": {}, "reason": reason,
        "expires_at": "2026-01-02T04:04:05Z", "input": {"server": "a", "round": 1, "requests": requests}});
    let expected = format!(
        "  mcp:a/b ({call}): waits for client until 2026-01-02T04:04:05Z, {reason}\n    asks: Which seat?"
    );
    assert_eq!(line(&event("tool_call.awaiting_client", &asked)), Some(expected));
    asked["kind"] = "approval".into();
    assert!(line(&event("approval.requested", &asked)).unwrap().contains("waits for approval"));
    let resolved = |resolution: &str, by: Option<&str>| {
        let data = json!({"call_id": call, "kind": "approval", "resolution": resolution, "decided_by": by, "reason": "go"});
        line(&event("approval.resolved", &data)).unwrap()
    };
    assert_eq!(
        resolved("approved", Some("k")),
        format!("  approval of {call}: approved, by k: go")
    );
    assert_eq!(resolved("denied", Some("k")), format!("  approval of {call}: denied, by k: go"));
    assert_eq!(
        resolved("expired", None),
        format!("  approval of {call}: not answered in time: go")
    );
}

#[test]
fn the_status_line_shows_iteration_tool_tokens_and_cost() {
    let mut status = StatusLine::default();
    let mut see = |event: &Value| {
        status.apply(&parse_event(event).unwrap().what);
        status.line()
    };
    assert_eq!(see(&event("attempt.started", &json!({"attempt": 2}))), "starting");
    see(&event("iteration.started", &json!({"attempt": 2, "iteration": 3})));
    assert_eq!(see(&responded(10, None)), "attempt 2, iteration 3 · model · 11 tokens");
    let call = json!({"call_id": uuid::Uuid::nil(), "tool": "file_ops", "effect": "read", "effect_key": "k",
        "decision": "allowed", "reason": null});
    assert_eq!(
        see(&event("tool_call.started", &call)),
        "attempt 2, iteration 3 · file_ops · 11 tokens"
    );
    see(&completed(None));
    assert_eq!(
        see(&responded(20, Some(1_500_042))),
        "attempt 2, iteration 3 · model · 32 tokens · $1.500042"
    );
}
