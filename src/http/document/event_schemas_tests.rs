//! One event of each type, as the journal has it, against the document: with all that it can hold,
//! and with only what it must.

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::event::{Event, ModelDelta, Piece, RunEvent, stored};

fn validator(name: &str) -> jsonschema::Validator {
    let api = crate::http::openapi();
    let schema = json!({
        "$ref": format!("#/components/schemas/{name}"),
        "components": api["components"],
    });
    jsonschema::validator_for(&schema).unwrap()
}

fn faults(validator: &jsonschema::Validator, value: &Value) -> Vec<String> {
    validator.iter_errors(value).map(|e| format!("{} {e}", e.instance_path())).collect()
}

/// Type and data of an event of each type; several where it can look different.
#[expect(clippy::too_many_lines, reason = "one line for each event")]
fn all() -> Vec<(&'static str, Value)> {
    let call = "01970000-0000-7000-8000-00000000000c";
    let usage = json!({"input_tokens": 3, "output_tokens": 1, "cost_micro_usd": 540});
    let error = json!({"code": "MAX_ITERATIONS", "message": "Too many.", "context": {"n": 1}});
    let message = json!({"text": "x", "thinking": "y", "decision": "{}", "opaque": {"provider": "p", "json": "{}"},
        "tool_calls": [{"id": call, "provider_id": "c1", "name": "shell", "arguments": "{}", "target": "tool"}]});
    let result = json!({"call_id": call, "content": "r", "is_error": false, "origin": "suspicious", "note_bytes": 1});
    let actions = json!([
        {"kind": "write", "path": "a", "effect": "once", "destructive": true, "lines": 2, "makes": ["d"]},
        {"kind": "exec", "argv": ["/bin/ls"], "effect": "read"},
        {"kind": "fetch", "scheme": "https", "host": "h", "port": 443, "path": "/", "effect": "read", "egress": true},
        {"kind": "call", "tool": "t", "effect": "once"}, {"kind": "delegate", "agent": "a", "effect": "once"},
    ]);
    let circumstances = json!({"labels": ["untrusted"], "used": {"iterations": 1, "tool_calls": 2, "total_tokens": 3,
        "cost_usd": 0.5, "files_modified": 4, "lines_changed": 5, "network_requests": 6}, "rate": {"limit": 60, "remaining": 7}});
    let awaited = |kind: &str| {
        json!({"call_id": call, "kind": kind, "tool": "t", "arguments": {}, "reason": "why", "actions": actions,
            "expires_at": "2026-01-31T12:00:00Z", "condition": 0, "child_run_id": call, "decision": "allowed",
            "basis": {"tool_hash": "h", "actions_hash": "h", "labels": ["private"]}, "escalation_target": "oncall"})
    };
    let resolved = |resolution: Value| {
        let mut data =
            json!({"call_id": call, "kind": "approval", "decided_by": null, "reason": "ok"});
        data.as_object_mut().unwrap().extend(resolution.as_object().unwrap().clone());
        data
    };
    let failed = json!({"attempt": 1, "iteration": 1, "error": "e", "feedback": "f"});
    let completed = json!({"call_id": call, "tool": "t", "target": "tool", "content": "c", "failure": null,
        "duration_ms": 1, "cached": false});
    vec![
        ("run.queued", json!({})),
        (
            "run.started",
            json!({"system": "s", "turns": [{"user": "u"}, {"assistant": {"message": message, "results": [result]}}],
            "history": 2, "single_shot": false, "warnings": ["w"]}),
        ),
        ("session.loaded", json!({"session_id": "s", "runs": 1, "turns": 2, "tokens": 3})),
        (
            "skill.activated",
            json!({"skill": "s", "allowed_tools": ["a"], "disallowed_tools": ["b"], "autonomy": "full",
            "approval_required": ["c"], "inherited": true}),
        ),
        ("skill.activated", json!({"skill": "s"})),
        ("run.resumed", json!({"epoch": 2, "deaths": 1, "is_alone": true})),
        ("attempt.started", json!({"attempt": 1})),
        (
            "iteration.started",
            json!({"attempt": 1, "iteration": 2, "answer_only": true,
            "limit": {"reason": "max_iterations", "error": error}}),
        ),
        ("iteration.started", json!({"attempt": 1, "iteration": 1})),
        (
            "model.retried",
            json!({"attempt": 1, "iteration": 1, "provider": "p", "model": "m", "reason": "transient",
            "status": 503, "message": "busy", "wait_ms": 12, "fallback": "q/m", "usage": usage}),
        ),
        (
            "model.interrupted",
            json!({"attempt": 1, "iteration": 1, "provider": "p", "model": "m", "usage": usage}),
        ),
        (
            "model.responded",
            json!({"attempt": 1, "iteration": 1, "provider": "p", "model": "m", "message": message,
            "finish_reason": "tool_calls", "usage": usage, "latency_ms": 1, "retries": 0, "fallback": false,
            "repeated": true, "warnings": ["w"]}),
        ),
        ("call.given", json!({"attempt": 1, "iteration": 1, "message": message})),
        (
            "tool_call.started",
            json!({"call_id": call, "tool": "t", "effect": "once", "effect_key": "k", "decision": "allowed",
            "reason": null, "actions": actions, "consumes": {"files_read": 1, "files_modified": ["a"]},
            "on_unknown_outcome": "retry", "circumstances": circumstances, "reconcilable_by": "h"}),
        ),
        (
            "tool_call.started",
            json!({"call_id": call, "tool": "t", "effect": "read", "effect_key": "k", "decision": "warned", "reason": "r"}),
        ),
        ("tool_call.completed", completed.clone()),
        ("tool_call.completed", {
            let mut changed = completed.clone();
            changed["changes"] = json!([{"path": "a", "change": "moved", "from": "b", "added": 0, "removed": null,
                "diff": null, "truncated": false}]);
            changed["network"] = json!({"requests": 2, "refused": 1, "announced": 1, "over_budget": true,
                "shared": {"used": 3, "max": 3}});
            changed
        }),
        ("tool_call.completed", {
            let mut asked = completed.clone();
            asked["reconciled"] = "did_not_happen".into();
            asked
        }),
        (
            "tool_call.blocked",
            json!({"call_id": call, "tool": "t", "rule": "path", "decision": "blocked", "reason": "r", "content": "c",
                "actions": actions, "circumstances": circumstances}),
        ),
        ("tool_call.awaiting_client", awaited("client")),
        ("tool_call.awaiting_client", {
            let mut asked = awaited("client");
            asked["input"] = json!({"server": "s", "round": 2, "requests":
                {"a": {"message": "m", "requested_schema": {"type": "object", "properties": {}}}}});
            asked
        }),
        ("tool_call.awaiting_child", awaited("child")),
        (
            "approval.requested",
            json!({"call_id": call, "kind": "escalation", "arguments": null, "reason": "r"}),
        ),
        (
            "approval.resolved",
            resolved(
                json!({"resolution": "approved", "arguments": {"a": 1}, "clears": ["untrusted"]}),
            ),
        ),
        (
            "approval.resolved",
            resolved(json!({"resolution": "result", "content": "c", "is_error": true})),
        ),
        ("approval.resolved", resolved(json!({"resolution": "happened", "result": "r"}))),
        ("approval.resolved", resolved(json!({"resolution": "expired"}))),
        (
            "approval.resolved",
            resolved(json!({"resolution": "input", "responses":
                {"a": {"action": "accept", "content": {"n": 1}}, "b": {"action": "cancel"}}})),
        ),
        ("handoff.started", json!({"call_id": call, "agent": "a", "reason": null})),
        (
            "scan.warned",
            json!({"call_id": call, "tool": "t", "source": "result", "pointer": "/a", "withheld": true,
            "kinds": ["override"], "hidden_in": ["base64"]}),
        ),
        ("scan.warned", json!({"source": "input", "kinds": ["too_long"]})),
        (
            "labels.changed",
            json!({"labels": ["untrusted"], "cause": "result", "call_id": call, "tool": "t"}),
        ),
        ("budget.warned", json!({"condition": 0, "warning": "w"})),
        (
            "output.proposed",
            json!({"call_id": null, "attempt": 1, "output": {"a": 1}, "problem": "p"}),
        ),
        (
            "output.reflected",
            json!({"call_id": call, "attempt": 1, "content": "c", "is_error": false}),
        ),
        (
            "validation.failed",
            json!({"attempt": 1, "call_id": null, "errors": [{"pointer": "/a", "message": "m"}], "feedback": "f"}),
        ),
        ("confirmation.requested", json!({"prompt": "p"})),
        ("decision.extraction_failed", failed.clone()),
        ("decision.validation_failed", failed),
        ("tool_choice.unmet", json!({"attempt": 1, "prompt": null, "warning": "w"})),
        ("answer.blank", json!({"attempt": 1, "prompt": "p"})),
        (
            "context.compacted",
            json!({"attempt": 1, "iteration": 1, "cause": "provider_refused", "cleared": [call],
            "summary": {"turns": 2, "text": "t"}, "call": {"provider": "p", "model": "m", "usage": usage, "latency_ms": 1},
            "failed_tries": 0, "window": null, "tokens_before": 2, "tokens_after": 1, "bytes_before": 2, "bytes_after": 1}),
        ),
        ("run.cancel_requested", json!({"reason": null})),
        (
            "run.completed",
            json!({"status": "completed", "output": null, "raw_response": "", "reason": "completed", "partial": false, "latency_ms": 1}),
        ),
        (
            "run.failed",
            json!({"status": "failed", "reason": "max_iterations", "error": error, "raw_response": "", "latency_ms": 1}),
        ),
        (
            "run.cancelled",
            json!({"status": "cancelled", "error": error, "raw_response": "", "latency_ms": 1}),
        ),
    ]
}

fn event((kind, data): (&str, Value)) -> Event {
    let whole = json!({"seq": 1, "type": kind, "at": "2026-01-31T12:00:00Z", "run_id": Uuid::nil(), "data": data});
    serde_json::from_value(whole).unwrap_or_else(|e| panic!("{kind}: {e}"))
}

#[test]
fn every_event_is_of_its_type_in_the_document() {
    let (union, streamed) = (validator("Event"), validator("StreamEvent"));
    let mut seen: Vec<&str> = Vec::new();
    for (kind, data) in all() {
        let event = event((kind, data));
        let served = event.served().unwrap();
        assert_eq!(faults(&union, &served), Vec::<String>::new(), "{served:#}");
        assert!(streamed.is_valid(&served), "{kind}");
        let known = event.served_text().unwrap();
        assert_eq!(serde_json::from_str::<Value>(&known).unwrap(), served);
        assert!(!known.contains("micro_usd"), "{known}");
        let back: Event = serde_json::from_value(stored(served)).unwrap();
        assert_eq!(back, event, "read back");
        seen.push(kind);
    }
    seen.dedup();
    assert_eq!(seen, <RunEvent as strum::VariantNames>::VARIANTS, "an event of each type");
}

#[test]
fn what_is_missing_or_of_another_type_is_noticed() {
    let union = validator("Event");
    for (kind, data) in all() {
        let mut served = event((kind, data)).served().unwrap();
        let required: Vec<String> = served["data"].as_object().unwrap().keys().cloned().collect();
        for name in ["attempt", "call_id", "termination_reason", "labels"] {
            if required.iter().any(|known| known == name) && kind != "scan.warned" {
                let taken = served["data"].as_object_mut().unwrap().shift_remove(name).unwrap();
                let is_optional = kind == "labels.changed" && name == "call_id";
                assert!(is_optional || !union.is_valid(&served), "{kind} without {name}");
                served["data"][name] = taken;
            }
        }
        served["type"] = "run.teleported".into();
        assert!(union.is_valid(&served), "an unknown type is passed over: {kind}");
    }
}

#[test]
fn a_piece_of_an_answer_has_no_number() {
    let (union, streamed) = (validator("Event"), validator("StreamEvent"));
    let pieces = [
        Piece::Text("a".into()),
        Piece::Thinking("b".into()),
        Piece::ToolCall { index: 0, name: Some("shell".into()), arguments: "{".into() },
        Piece::Restarted(true),
    ];
    for piece in pieces {
        let at: DateTime<Utc> = "2026-01-31T12:00:00Z".parse().unwrap();
        let delta = ModelDelta { attempt: 1, iteration: 2, piece };
        let mut told =
            json!({"type": "model.delta", "at": at, "run_id": Uuid::nil(), "data": delta});
        assert_eq!(faults(&streamed, &told), Vec::<String>::new(), "{told}");
        assert!(!union.is_valid(&told), "a journal holds no pieces");
        told["data"]["attempt"] = "one".into();
        assert!(!streamed.is_valid(&told));
    }
}
