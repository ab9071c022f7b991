use serde_json::json;

use super::*;

fn run() -> Value {
    json!({
        "run_id": "0197f000-0000-7000-8000-000000000001", "agent": "repo-guide", "status": "failed",
        "termination_reason": "max_iterations", "output": null, "raw_response": "…", "model": "openai/gpt-4.1-mini",
        "tokens_used": 1234,
        "usage": {"input_tokens": 1000, "output_tokens": 234, "total_tokens": 1234, "cost_usd": 0.00054},
        "attempts": 1, "iterations": 4, "tool_calls_made": 3, "latency_ms": 61_812, "partial": false,
        "error": {"code": "MAX_ITERATIONS", "message": "4 iterations\u{1b}[31m", "context": {}},
        "warnings": ["The model ignored a choice."], "callback_errors": [], "kind": "iterative",
        "inputs": {"path": "."}, "overrides": {}, "metadata": {"ticket": "42"}, "session_id": "s-1",
        "parent_run_id": null, "agent_version": "1.2.0", "created_at": "2026-01-02T03:04:05.678901Z",
        "started_at": "2026-01-02T03:04:05.679Z", "finished_at": null, "pending": [
            {"run_id": "0197f000-0000-7000-8000-000000000001", "call_id": "c", "kind": "review", "tool": "file_ops",
                "arguments": {"operation": "delete"}, "reason": "…"}
        ]
    })
}

#[test]
fn runs_are_shown_as_a_table() {
    let short = json!({"run_id": "0197f000-0000-7000-8000-000000000002", "agent": "a2", "status": "running",
        "termination_reason": null, "iterations": 0, "tokens_used": 0, "created_at": "2026-01-02T03:04:06Z"});
    insta::assert_snapshot!(run_table(&[run(), short]));
}

#[test]
fn a_run_is_shown_with_its_parts() {
    let iterations = [
        json!({"attempt": 1, "number": 1, "provider": "openai", "model": "gpt-4.1-mini",
        "finish_reason": "tool_calls", "usage": {"total_tokens": 620}, "latency_ms": 320, "retries": 1}),
    ];
    let calls = [
        json!({"attempt": 1, "iteration": 1, "tool": "file_ops", "arguments": {"operation": "list", "path": "."},
            "decision": "allowed", "reason": null, "state": "succeeded", "result": "README.md\ndocs/", "duration_ms": 2}),
        json!({"attempt": 1, "iteration": 1, "tool": "file_ops", "arguments": "{not json", "decision": "blocked",
            "reason": "autonomy is read-only", "state": "denied", "result": null, "duration_ms": null}),
    ];
    insta::assert_snapshot!(run_text(&run(), &iterations, &calls, ""));
    let done = json!({"run_id": "x", "agent": "a", "status": "completed", "termination_reason": "completed",
        "output": {"result": "The tide\nturns."}, "usage": {}});
    assert!(run_text(&done, &[], &[], "").ends_with("\n\nOutput\nThe tide\nturns."));
}

#[test]
fn a_call_of_a_child_is_shown_with_the_child() {
    let call = |run: &str| json!({"run_id": run, "call_id": "c", "kind": "approval", "tool": "t", "arguments": {}});
    let run = json!({"run_id": "parent", "pending": [call("parent"), call("child")]});
    let shown = run_text(&run, &[], &[], " --server URL");
    for line in [
        "Waits for   approval of t (c)",
        "Answer      toolloop runs approve parent c --server URL",
        "Waits for   approval of t (c of run child)",
        "Answer      toolloop runs approve child c --server URL",
    ] {
        assert!(shown.lines().any(|shown| shown == line), "{line}: {shown}");
    }
}

#[test]
fn a_command_is_safe_to_paste_whatever_the_ids_are() {
    let call = json!({"run_id": "r; x", "call_id": "$(y)\n\u{1b}", "kind": "client", "tool": "t",
        "arguments": {}, "input": {"round": "`z`", "requests": {}}});
    let run = json!({"run_id": "r; x", "pending": [call]});
    let command = r#"toolloop runs result 'r; x' '$(y) \u{1b}' --round '"`z`"' --responses JSON"#;
    for shown in [pending_text(&run, ""), run_text(&run, &[], &[], "")] {
        assert!(shown.lines().any(|line| line.ends_with(command)), "{shown}");
    }
}

#[test]
fn an_event_is_shown_on_one_line() {
    let event = json!({"seq": 12, "type": "iteration.started", "at": "2026-01-02T03:04:05.678901Z",
        "run_id": Uuid::nil(), "data": {"attempt": 1, "iteration": 2}});
    assert_eq!(
        event_line(&event),
        "  12  03:04:05.678  iteration.started       attempt 1, iteration 2"
    );
    let new = json!({"seq": 13, "type": "scan.warned", "at": "2026-01-02T03:04:06Z", "run_id": Uuid::nil(), "data": {}});
    assert_eq!(event_line(&new), "  13  03:04:06.000  scan.warned");
}

#[test]
fn what_a_run_waits_for_is_shown_with_the_command_that_answers_it() {
    let call = |kind: &str| json!({"run_id": "r", "call_id": "c", "seq": 7, "kind": kind, "tool": "t", "arguments": {}, "reason": ""});
    let mut form = call("client");
    form["input"] = json!({"round": 2, "requests": {"seat": {"message": "Which\nseat?"}}});
    form["expires_at"] = json!("2026-01-02T03:04:05.678901Z");
    let waits = ["approval", "escalation", "review", "client", "child"].map(call);
    let pending = [&waits[..], &[form]].concat();
    let run = json!({"run_id": "r", "pending": pending});
    insta::assert_snapshot!(pending_text(&run, " --server URL --key KEY"));
}
