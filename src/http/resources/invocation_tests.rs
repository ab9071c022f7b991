//! Parsing the bodies of invocations.

use serde_json::json;

use super::*;

fn read(kind: RunKind, body: &Value) -> Result<Invocation, Problem> {
    Invocation::read(kind, body.as_object().unwrap().clone())
}

/// Code and pointer of the refusal.
fn refusal(kind: RunKind, body: &Value) -> String {
    format!("{:?}", read(kind, body).unwrap_err())
}

#[test]
fn an_empty_body_means_empty_inputs() {
    let invocation = read(RunKind::Iterative, &json!({})).unwrap();
    assert_eq!(invocation.inputs, json!({}));
    assert_eq!(invocation.overrides, Overrides::default());
    assert_eq!((invocation.run_id, invocation.session_id), (None, None));
}

#[test]
fn every_field_of_a_loop_is_parsed() {
    let id = Uuid::now_v7();
    let body = json!({
        "inputs": {"task": "t", "n": [1, {"x": null}]}, "run_id": id, "session_id": "s", "metadata": {"ticket": "42"},
        "model": "scripted/x", "temperature": 0.3, "max_iterations": 2, "max_iterations_per_attempt": 2,
        "max_attempts": 1, "max_tool_calls_per_iteration": 1, "tool_call_timeout_seconds": 5, "error_threshold": 1,
        "enable_double_confirmation": false, "tool_choice": {"tool": "file_ops"}, "parallel_tool_calls": false,
        "tools": ["file_ops"], "budget": {"max_total_tokens": 10},
    });
    let invocation = read(RunKind::Iterative, &body).unwrap();
    assert_eq!(invocation.inputs, body["inputs"]);
    assert_eq!(invocation.run_id, Some(id));
    assert_eq!(invocation.metadata["ticket"], "42");
    assert_eq!(invocation.overrides.budget.as_ref().unwrap().max_total_tokens, Some(10));
    let mut overrides = body.as_object().unwrap().clone();
    overrides
        .retain(|name, _| !["inputs", "run_id", "session_id", "metadata"].contains(&name.as_str()));
    assert_eq!(serde_json::to_value(invocation.overrides).unwrap(), Value::Object(overrides));
}

#[test]
fn null_means_absent() {
    let body = json!({"inputs": null, "run_id": null, "session_id": null, "metadata": null, "model": null, "budget": null});
    assert_eq!(
        read(RunKind::Iterative, &body).unwrap(),
        read(RunKind::Iterative, &json!({})).unwrap()
    );
}

#[test]
fn a_whole_number_may_be_written_with_a_fraction_of_zero() {
    let body = json!({"max_iterations": 5.0, "priority": -2.0, "temperature": 1.0,
        "budget": {"max_tool_calls": 1e2, "max_cost_usd": 2.0}});
    let Invocation { overrides, queue, .. } = read(RunKind::Iterative, &body).unwrap();
    let budget = overrides.budget.unwrap();
    assert_eq!((overrides.max_iterations, queue.priority), (Some(5), -2));
    assert_eq!((overrides.temperature, budget.max_tool_calls), (Some(1.0), Some(100)));
}

#[test]
fn a_wrong_number_is_told_its_range() {
    for (body, message) in [
        (json!({"max_iterations": "2"}), "must be a whole number of at least 1"),
        (json!({"max_iterations": 1e12}), "must be a whole number of at most 4294967295"),
        (json!({"budget": {"max_total_tokens": -1}}), "must be a whole number of at least 1"),
        (json!({"budget": {"max_tool_calls": 0.5}}), "must be a whole number of at least 0"),
        (json!({"priority": "high"}), "must be a whole number from -100 to 100"),
    ] {
        let refusal = refusal(RunKind::Iterative, &body);
        assert!(refusal.contains(&format!("message: \"{message}\"")), "{body}: {refusal}");
    }
}

#[test]
fn invalid_fields_are_rejected_with_a_pointer() {
    let cases = [
        (json!({"inputs": []}), "InvalidInputs", "\"/inputs\""),
        (json!({"inputs": "x"}), "InvalidInputs", "\"/inputs\""),
        (json!({"input": {}}), "InvalidOverride", "\"/input\""),
        (json!({"files": [5]}), "InvalidInputs", "\"/files/0\""),
        (json!({"files": [{"path": "a", "from": {}}]}), "InvalidInputs", "\"/files/0/from/path\""),
        (json!({"dry_run": "no"}), "InvalidOverride", "\"/dry_run\""),
        (json!({"webhook": {"url": 7}}), "InvalidOverride", "\"/webhook/url\""),
        (json!({"max_iterations": "2"}), "InvalidOverride", "\"/max_iterations\""),
        (json!({"max_iterations": 2.5}), "InvalidOverride", "\"/max_iterations\""),
        (json!({"max_iterations": -1}), "InvalidOverride", "\"/max_iterations\""),
        (json!({"budget": []}), "InvalidOverride", "\"/budget\""),
        (json!({"webhook": ["https://a.example"]}), "InvalidOverride", "\"/webhook\""),
        (json!({"client_tools": [["a", "", {}]]}), "InvalidOverride", "\"/client_tools/0\""),
        (json!({"files": [["a", {}]]}), "InvalidInputs", "\"/files/0\""),
        (
            json!({"files": [{"path": "a", "from": [null, null, "b", "c"]}]}),
            "InvalidInputs",
            "\"/files/0/from\"",
        ),
        (json!({"budget": {"max_files": 1}}), "InvalidOverride", "\"/budget/max_files\""),
        (json!({"tool_choice": "sometimes"}), "InvalidOverride", "\"/tool_choice\""),
        (json!({"tools": "file_ops"}), "InvalidOverride", "\"/tools\""),
        (json!({"run_id": "42"}), "InvalidOverride", "\"/run_id\""),
        (json!({"session_id": ""}), "InvalidOverride", "\"/session_id\""),
        (json!({"session_id": "s".repeat(257)}), "InvalidOverride", "\"/session_id\""),
        (json!({"metadata": {"a": 1}}), "InvalidOverride", "\"/metadata/a\""),
        (json!({"metadata": {"": "x"}}), "InvalidOverride", "\"/metadata/\""),
        (json!({"metadata": {"a/b": "x".repeat(1025)}}), "InvalidOverride", "\"/metadata/a~1b\""),
        (json!({"a/b": 1}), "InvalidOverride", "\"/a~1b\""),
    ];
    for (body, code, pointer) in cases {
        let refusal = refusal(RunKind::Iterative, &body);
        assert!(
            refusal.contains(code) && refusal.contains(&format!("pointer: {pointer}")),
            "{body}: {refusal}"
        );
    }
    let labels: BTreeMap<String, &str> = (0..65).map(|n| (n.to_string(), "")).collect();
    assert!(refusal(RunKind::Iterative, &json!({"metadata": labels})).contains("at most 64"));
}

#[test]
fn a_single_shot_rejects_settings_of_the_loop() {
    let invocation = read(RunKind::Single, &json!({"model": "a/b", "temperature": 1.0})).unwrap();
    assert_eq!(invocation.overrides.model.as_deref(), Some("a/b"));
    for field in ["max_iterations", "tools", "budget", "tool_choice", "webhook"] {
        let refusal = refusal(RunKind::Single, &json!({ field: null }));
        assert!(refusal.contains(&format!("pointer: \"/{field}\"")), "{refusal}");
    }
}

#[test]
fn the_document_lists_exactly_the_accepted_fields() {
    let names = |schema: RefOr<Schema>| {
        let schema = serde_json::to_value(schema).unwrap();
        assert_eq!(schema["additionalProperties"], false);
        schema["properties"].as_object().unwrap().keys().cloned().collect::<Vec<_>>()
    };
    let envelope =
        ["inputs", "run_id", "session_id", "metadata", "priority", "available_at", "files"];
    let single = ["model", "temperature", "on_session_busy", "active_skills", "private"];
    assert_eq!(names(InvokeRequest::schema()), [&envelope[..], &single].concat());
    for name in names(InvokeIterativeRequest::schema()) {
        let value = if name == "inputs" { json!({}) } else { Value::Null };
        assert!(read(RunKind::Iterative, &json!({ name.clone(): value })).is_ok(), "{name}");
    }
    assert_eq!(names(InvokeIterativeRequest::schema()).len(), 29);
}
