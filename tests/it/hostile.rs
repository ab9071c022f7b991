//! Callers, models and model servers that mean harm through what they write: names, globs, patterns,
//! schemas, values, answers. Each is refused or answered, the process stays, and so does its memory.

use std::fmt::Write as _;
use std::time::Duration;

use reqwest::{Method, StatusCode};
use serde_json::{Map, Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, answer, on_both_stores, on_one_store};

on_both_stores! {
    a_body_holds_a_bounded_number_of_values,
    names_of_a_request_have_a_length_a_form_and_a_number,
    a_recursive_choice_of_an_operator_is_decided_or_given_up,
    a_call_that_a_quota_refuses_leaves_no_directory,
    refusals_repeat_little_of_what_was_sent,
    absurd_usage_is_counted_within_reason,
    a_run_that_looks_full_of_secrets_is_served,
    files_of_a_judged_call_are_bounded,
    definitions_and_filters_of_a_request_are_bounded,
}

on_one_store! {
    schemas_of_a_request_are_bounded_before_they_are_compiled,
    arguments_for_a_callers_schema_that_doubles_are_answered,
    globs_and_patterns_of_a_model_are_answered,
    replacing_everything_has_a_bounded_result_and_counts_every_line,
    every_directory_that_is_made_counts,
}

pub(crate) const GUIDE: &str = "
model: scripted/guide
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}, budget: {max_lines_changed: 1000, max_files_modified: 100}}
limits: {error_threshold: 100}
";

/// Memory that the process may have taken at its peak; a debug build idles at less than 100.
const MIB: u64 = 320;

pub(crate) fn guide(steps: &str) -> Setup {
    Setup::new().agent("guide", GUIDE).scenario("guide", &format!("steps:\n{steps}"))
}

pub(crate) fn call(arguments: &Value) -> String {
    format!("  - tool_calls: [{{tool: file_ops, arguments: {arguments}}}]\n")
}

pub(crate) fn is_unharmed(service: &mut Service) {
    assert!(!service.is_dead(), "{}", service.log());
    let peak = service.peak_memory_mib();
    assert!(peak < MIB, "{peak} MiB");
}

/// Refused with this pointer, in few words, as an invocation and as a rehearsal.
async fn refused(service: &mut Service, body: &Value, pointer: &str) {
    for dry_run in [true, false] {
        let mut body = body.clone();
        body["dry_run"] = dry_run.into();
        let answer = service.post("/v1/agents/guide/invoke-iterative", &body).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{pointer}: {}", answer.body);
        assert_eq!(answer.body["errors"][0]["pointer"], pointer, "{}", answer.body);
        let length = answer.body.to_string().len();
        assert!(length < 2_000, "{pointer}: {length} bytes");
    }
    is_unharmed(service);
}

async fn results_of(service: &Service, run: &Value) -> Vec<String> {
    let path = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
    let calls = service.get(&path).await.body["data"].as_array().unwrap().clone();
    calls.iter().map(|call| call["result"].as_str().unwrap_or_default().to_owned()).collect()
}

async fn a_body_holds_a_bounded_number_of_values(db: Db) {
    let service = guide("  - text: done\n").start(db).await;
    let path = "/v1/agents/guide/invoke-iterative";
    let body = |values| json!({"inputs": {"task": "x", "list": vec![json!({}); values]}});
    let refused = service.post(path, &body(200_000)).await;
    let detail = "The body is too complex: the JSON holds more than 200000 values, of which an object counts as 10.";
    assert_eq!((refused.status.as_u16(), refused.body["detail"].as_str()), (400, Some(detail)));
    assert_eq!(service.post(path, &body(18_000)).await.status, 200);
    // Lists have no payloads.
    let large = json!({"inputs": {"task": "x".repeat(900_000)}, "metadata": {"k": "v"}});
    assert_eq!(service.post(path, &large).await.status, 200);
    let list = service.get("/v1/runs?limit=200").await.body;
    assert_eq!(list["data"].as_array().unwrap().len(), 2);
    assert!(list.to_string().len() < 5_000, "{list:#}");
}

async fn names_of_a_request_have_a_length_a_form_and_a_number(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let nested = |n: usize| format!("*{}{}", "{".repeat(n), "}".repeat(n));
    let many: Vec<String> = (0..60_000).map(|n| format!("tool{n}")).collect();
    let globs: Vec<String> = (0..20_000).map(|n| format!("*{n}*")).collect();
    for (tools, pointer) in [
        (json!([nested(10_000)]), "/tools/0"),
        (json!([nested(5_000)]), "/tools/0"),
        (json!(["file_ops", "x".repeat(900_000)]), "/tools/1"),
        (json!(["*".repeat(900_000)]), "/tools/0"),
        (json!(["a b"]), "/tools/0"),
        (json!([""]), "/tools/0"),
        (json!(many), "/tools"),
        (json!(globs), "/tools"),
    ] {
        refused(&mut service, &json!({"tools": tools}), pointer).await;
    }
    for model in [format!("scripted/{}", "x".repeat(900_000)), "scripted/a b".into(), "x".into()] {
        refused(&mut service, &json!({"model": model}), "/model").await;
    }
    let fine = json!({"tools": ["file_*"], "dry_run": true});
    assert_eq!(service.post("/v1/agents/guide/invoke-iterative", &fine).await.status, 200);
}

fn schema(more: &Value) -> Value {
    let mut schema = json!({"type": "object"});
    schema.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    schema
}

/// Definitions in which each names the next twice.
fn doubling(levels: usize, keyword: &str) -> Value {
    let mut defs = Map::new();
    for level in 0..levels {
        let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
        defs.insert(format!("a{level}"), json!({keyword: [next, next]}));
    }
    defs.insert(format!("a{levels}"), json!({"required": ["z"]}));
    schema(&json!({"$ref": "#/$defs/a0", "$defs": defs}))
}

/// The same, where two members of an object ask for the next.
fn doubling_by_members(levels: usize) -> Value {
    let mut doubled = doubling(levels, "anyOf");
    for level in 0..levels {
        let next = json!({"$ref": format!("#/$defs/a{}", level + 1)});
        doubled["$defs"][format!("a{level}")] = json!({"dependentSchemas": {"x": next, "y": next}});
    }
    doubled
}

/// The same with references to anchors.
fn doubling_by_anchors(levels: usize) -> Value {
    let mut doubled = doubling(levels, "anyOf").to_string().replace("#/$defs/", "#");
    for level in 0..levels {
        let (of, with) = (format!("\"a{level}\":{{"), format!("\"$anchor\":\"a{level}\","));
        doubled = doubled.replace(&of, &format!("{of}{with}"));
    }
    let last = format!("\"a{levels}\":{{");
    doubled = doubled.replace(&last, &format!("{last}\"$anchor\":\"a{levels}\","));
    serde_json::from_str(&doubled).unwrap()
}

async fn schemas_of_a_request_are_bounded_before_they_are_compiled(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let bomb = |n: usize| format!(r"(\pL{{10}}){{20}}{n}");
    let patterns: Map<String, Value> =
        (0..400).map(|n| (format!("p{n}"), json!({"pattern": bomb(n)}))).collect();
    let chain: Map<String, Value> = (0..8_000)
        .map(|n| (format!("a{n}"), json!({"allOf": [{"$ref": format!("#/$defs/a{}", n + 1)}]})))
        .collect();
    let schemas = [
        json!({"properties": patterns}),
        json!({"properties": {"a": {"pattern": bomb(0)}}}),
        json!({"patternProperties": {bomb(0): true}}),
        json!({"propertyNames": {"pattern": bomb(0)}}),
        json!({"$defs": chain, "$ref": "#/$defs/a0"}),
        json!({"definitions": chain, "allOf": [{"$ref": "#/definitions/a0"}]}),
        json!({"unevaluatedProperties": {"$ref": "#"}}),
        json!({"$dynamicAnchor": "a", "properties": {"x": {"$dynamicRef": "#a"}}}),
        json!({"not": (0..60).fold(json!({}), |inner, _| json!({"not": inner}))}),
        json!({"description": "x".repeat(40_000)}),
    ];
    for more in schemas {
        let tool = json!({"name": "ct", "input_schema": schema(&more)});
        let body = json!({"client_tools": [tool]});
        let answer = service.post("/v1/agents/guide/invoke-iterative", &body).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{}", answer.body);
        let pointer = answer.body["errors"][0]["pointer"].as_str().unwrap();
        assert!(pointer.starts_with("/client_tools"), "{}", answer.body);
    }
    let large = |n: usize| json!({"name": format!("t{n}"), "input_schema": schema(&json!({"description": "x".repeat(20_000)}))});
    refused(
        &mut service,
        &json!({"client_tools": (0..4).map(large).collect::<Vec<_>>()}),
        "/client_tools",
    )
    .await;
    refused(&mut service, &json!({"client_tools": [{"name": "n".repeat(900_000), "input_schema": {"type": "object"}}]}), "/client_tools/0/name").await;
}

async fn arguments_for_a_callers_schema_that_doubles_are_answered(db: Db) {
    let steps = "  - tool_calls: [{tool: ct, arguments: {x: 1, y: 1}}]\n  - text: done\n";
    let mut service = guide(steps).start(db).await;
    let renamed = doubling(40, "anyOf").to_string().replace("$defs", "definitions");
    let renamed: Value = serde_json::from_str(&renamed).unwrap();
    let mut schemas: Vec<Value> =
        ["anyOf", "allOf", "oneOf"].iter().map(|keyword| doubling(40, keyword)).collect();
    schemas.extend([renamed, doubling_by_anchors(40), doubling_by_members(40)]);
    for schema in schemas {
        let tool = json!({"name": "ct", "input_schema": schema});
        let run = service.run("guide", &json!({"client_tools": [tool]})).await;
        assert_eq!(run["status"], "completed", "{schema}: {run:#}");
        is_unharmed(&mut service);
    }
}

async fn a_recursive_choice_of_an_operator_is_decided_or_given_up(db: Db) {
    let node = json!({"oneOf": [
        {"type": "object", "required": ["items"], "additionalProperties": false,
            "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/node"}}}},
        {"type": "object", "required": ["items"],
            "properties": {"items": {"type": "array", "items": {"$ref": "#/$defs/node"}}, "x": true}},
        {"type": "string"},
    ]});
    let tree = json!({"type": "object", "$defs": {"node": node},
        "properties": {"tree": {"$ref": "#/$defs/node"}}});
    let agent = GUIDE.replace("limits: {error_threshold: 100}", "limits: {max_attempts: 1}");
    let agent = format!("{agent}\ninputs: {tree}\noutput: {{schema: {tree}}}");
    let nested = |levels: usize| (0..levels).fold(json!(5), |inner, _| json!({"items": [inner]}));
    let output = json!({"tree": nested(30)});
    let steps = format!("steps:\n  - tool_calls: [{{tool: output, arguments: {output}}}]\n");
    let mut service = Setup::new().agent("guide", &agent).scenario("guide", &steps).start(db).await;
    for levels in [15, 16, 17, 30, 45] {
        let body = json!({"inputs": {"tree": nested(levels)}});
        let answer = service.post("/v1/agents/guide/invoke-iterative", &body).await;
        assert_eq!(answer.status, StatusCode::UNPROCESSABLE_ENTITY, "{}", answer.body);
        assert!(answer.body.to_string().len() < 20_000);
        is_unharmed(&mut service);
    }
    let run = service.run("guide", &json!({"inputs": {"tree": "leaf"}})).await;
    assert_eq!(run["status"], "failed", "{run:#}");
    is_unharmed(&mut service);
}

async fn globs_and_patterns_of_a_model_are_answered(db: Db) {
    let nested = "{{ '{' * 20000 ~ '}' * 20000 }}";
    let mut steps = String::new();
    let hostile = [
        json!({"operation": "glob", "pattern": nested}),
        json!({"operation": "search", "pattern": "x", "glob": nested}),
        json!({"operation": "search", "pattern": "(\\pL{10}){200}"}),
        json!({"operation": "search", "pattern": "(".repeat(4_000)}),
        json!({"operation": "glob", "pattern": "*".repeat(900_000)}),
        json!({"operation": "glob", "pattern": "{{ '{' * 1000 }}"}),
    ];
    for arguments in &hostile {
        steps.push_str(&call(arguments));
    }
    // Forty at once, of patterns that are allowed.
    let at_once: Vec<Value> = (0..40)
        .map(|n| json!({"operation": "search", "pattern": format!("(a|b|ab)*c{n}"), "glob": "*".repeat(200)}))
        .map(|costly| json!({"tool": "file_ops", "arguments": costly}))
        .collect();
    let _ = writeln!(steps, "  - tool_calls: {}\n  - text: done", json!(at_once));
    let mut service = guide(&steps).file("long", &"ab".repeat(200_000)).start(db).await;
    let run = service.run("guide", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results = results_of(&service, &run).await;
    assert_eq!(results.len(), hostile.len() + at_once.len());
    for result in &results[..hostile.len()] {
        assert!(result.starts_with("Error: the pattern ") && result.len() < 1_000, "{result}");
    }
    is_unharmed(&mut service);
}

async fn replacing_everything_has_a_bounded_result_and_counts_every_line(db: Db) {
    let edit = |new: &str| {
        call(
            &json!({"operation": "edit", "path": "a", "old": "a", "new": new, "replace_all": true}),
        )
    };
    let steps = format!("{}{}  - text: done\n", edit(&"b".repeat(400_000)), edit("bb"));
    let budget = GUIDE.replace("max_lines_changed: 1000", "max_lines_changed: 1000000");
    let mut service = Setup::new()
        .agent("guide", &budget)
        .agent("narrow", &GUIDE.replace("scripted/guide", "scripted/narrow"))
        .scenario("guide", &format!("steps:\n{steps}"))
        .scenario("narrow", &format!("steps:\n{}  - text: done\n", edit("c")))
        .file("a", &"a".repeat(400_000))
        .start(db)
        .await;
    let narrow = service.run("narrow", &json!({})).await;
    assert_eq!(narrow["termination_reason"], "budget_exceeded", "{narrow:#}");
    let run = service.run("guide", &json!({})).await;
    let results = results_of(&service, &run).await;
    assert!(results[0].contains("160000000000 bytes after 400000 replacements"), "{results:?}");
    assert_eq!(results[1], "Replaced 400000 occurrences in a.");
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let used = service.get(&path).await.body["budget"]["used"].clone();
    assert_eq!(used["lines_changed"], 800_000, "{used:#}");
    is_unharmed(&mut service);
}

async fn every_directory_that_is_made_counts(db: Db) {
    let made = call(&json!({"operation": "mkdir", "path": "d/".repeat(1_000)}));
    let few = call(&json!({"operation": "mkdir", "path": "a/b/c"}));
    let service = guide(&format!("{few}{made}  - text: done\n")).start(db).await;
    let run = service.run("guide", &json!({})).await;
    assert_eq!(run["termination_reason"], "budget_exceeded", "{run:#}");
    let url = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let used = service.get(&url).await.body["budget"]["used"].clone();
    assert_eq!(used["files_modified"], 3, "{used:#}");

    // So do those that another operation makes on its way, and a refused one makes none.
    let deep = |name: &str| format!("{name}/{}x", "d/".repeat(1_000));
    let patch = format!("--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n", deep("p"));
    let there = json!({"operation": "write", "path": "f", "content": "x"});
    for (deep_call, few, counted) in [
        (
            json!({"operation": "write", "path": deep("w"), "content": "x"}),
            json!({"operation": "write", "path": "a/b/c", "content": "x"}),
            4,
        ),
        (
            json!({"operation": "append", "path": deep("n"), "content": "x"}),
            json!({"operation": "append", "path": "a/b/c", "content": "x"}),
            4,
        ),
        (
            json!({"operation": "move", "path": "f", "to": deep("m")}),
            json!({"operation": "mkdir", "path": "a/b/c"}),
            4,
        ),
        (
            json!({"operation": "patch", "patch": patch}),
            json!({"operation": "patch", "patch": "--- /dev/null\n+++ b/a/b/c\n@@ -0,0 +1 @@\n+x\n--- /dev/null\n+++ b/a/b/d\n@@ -0,0 +1 @@\n+x\n"}),
            5,
        ),
    ] {
        let steps = [&there, &few, &deep_call].map(call).concat();
        let service = guide(&format!("{steps}  - text: done\n")).start(db).await;
        let run = service.run("guide", &json!({})).await;
        assert_eq!(run["termination_reason"], "budget_exceeded", "{deep_call:.80}: {run:#}");
        let url = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
        let used = service.get(&url).await.body["budget"]["used"].clone();
        assert_eq!(used["files_modified"], counted, "{used:#}");
        assert_eq!(in_workspace(&service), ["a", "f"], "{deep_call:.80}");
    }
}

/// What lies in the workspace itself.
fn in_workspace(service: &Service) -> Vec<String> {
    let there = std::fs::read_dir(service.dir.path().join("workspace/default")).unwrap();
    let mut names: Vec<String> =
        there.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

async fn a_call_that_a_quota_refuses_leaves_no_directory(db: Db) {
    let deep = |name: &str| format!("{name}/{}x", "d/".repeat(12));
    let patch = format!("--- /dev/null\n+++ b/{}\n@@ -0,0 +1 @@\n+x\n", deep("p"));
    let calls = [
        json!({"operation": "write", "path": "f", "content": "x"}),
        json!({"operation": "mkdir", "path": deep("k")}),
        json!({"operation": "write", "path": deep("w"), "content": "x"}),
        json!({"operation": "append", "path": deep("n"), "content": "x"}),
        json!({"operation": "move", "path": "f", "to": deep("m")}),
        json!({"operation": "patch", "patch": patch}),
        json!({"operation": "write", "path": "a/b/large", "content": "x".repeat(2_000)}),
        json!({"operation": "mkdir", "path": "fits/in"}),
    ];
    let steps = calls.each_ref().map(call).concat();
    let config = "[tools.file_ops]\nworkspace_files = 10\nmax_file = \"1KiB\"";
    let service = guide(&format!("{steps}  - text: done\n")).config(config).start(db).await;
    let run = service.run("guide", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let results = results_of(&service, &run).await;
    for refused in &results[1..6] {
        assert!(refused.contains("files and directories; at most 10"), "{results:#?}");
    }
    assert!(results[6].contains("at most 1024"), "{results:#?}");
    assert_eq!(in_workspace(&service), ["f", "fits"], "{results:#?}");

    let files = format!("/v1/runs/{}/files/", run["run_id"].as_str().unwrap());
    let put = service.request(Method::PUT, &format!("{files}{}", deep("u")));
    let refused = answer(put.body("x")).await;
    assert_eq!(refused.status, StatusCode::PAYLOAD_TOO_LARGE, "{:#}", refused.body);
    assert_eq!(in_workspace(&service), ["f", "fits"]);
}

async fn refusals_repeat_little_of_what_was_sent(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let long = "x".repeat(900_000);
    for body in [
        json!({"active_skills": [long]}),
        json!({long.as_str(): 1}),
        json!({"tool_choice": {"tool": long}}),
        json!({"on_limit": long}),
        json!({"run_id": long}),
        json!({"inputs": long}),
        json!({"model": format!("{}/x", "p".repeat(250))}),
    ] {
        let answer = service.post("/v1/agents/guide/invoke-iterative", &body).await;
        assert!(answer.status.is_client_error(), "{}", answer.status);
        let text = answer.body.to_string();
        assert!(text.len() < 3_000, "{} bytes: {text:.300}", text.len());
    }
    is_unharmed(&mut service);
}

async fn absurd_usage_is_counted_within_reason(db: Db) {
    let absurd = i64::MAX;
    let steps =
        format!("  - text: done\n    usage: {{input_tokens: {absurd}, output_tokens: {absurd}}}\n");
    let service = guide(&steps).start(db).await;
    for _ in 0..3 {
        let run = service.run("guide", &json!({})).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    let usage = service.get("/v1/stats/usage").await;
    assert_eq!(usage.status, 200, "{}", usage.body);
    // Of one day, or of two at midnight.
    let days = usage.body["data"].as_array().unwrap().iter();
    let tokens: u64 = days.map(|day| day["input_tokens"].as_u64().unwrap()).sum();
    assert_eq!(tokens, 3_000_000_000, "{}", usage.body);
}

async fn a_run_that_looks_full_of_secrets_is_served(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    for part in ["password: ", "cookie: ", "password=", "-----BEGIN PRIVATE KEY-----\""] {
        let inputs = json!({"text": part.repeat(600_000 / part.len())});
        let run = service.run("guide", &json!({"inputs": inputs})).await;
        let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
        for path in [path.clone(), format!("{path}/messages"), format!("{path}/events")] {
            let served = tokio::time::timeout(Duration::from_mins(1), service.get(&path)).await;
            assert_eq!(served.expect(part).status, 200, "{part}");
        }
    }
    is_unharmed(&mut service);
}

async fn files_of_a_judged_call_are_bounded(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let call = |files: Vec<String>| {
        json!({"tool": "file_ops", "files": files,
        "arguments": {"operation": "read", "path": "x"}})
    };
    let path = "/v1/agents/guide/policy/judge";
    let deep = |names: usize| format!("{}x", "a/".repeat(names - 1));
    for (files, pointer) in [
        (vec![deep(16), deep(17)], "/files/1"),
        (vec![deep(2_000)], "/files/0"),
        (vec!["x".repeat(257)], "/files/0"),
        (vec![String::from("x"); 101], "/files"),
    ] {
        let refused = service.post(path, &call(files)).await;
        assert_eq!(refused.status, 422, "{}", refused.body);
        assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{}", refused.body);
    }
    let most = (0..100).map(|n| format!("{n}/{}", deep(15))).collect();
    assert_eq!(service.post(path, &call(most)).await.status, 200);
    is_unharmed(&mut service);
}

async fn definitions_and_filters_of_a_request_are_bounded(db: Db) {
    let mut service = guide("  - text: done\n").start(db).await;
    let definition = |bytes: usize| {
        let text = "name: guide\nmodel: scripted/guide\ninstructions: ";
        json!({"definition": format!("{text}{}", "x".repeat(bytes - text.len()))})
    };
    let path = "/v1/agents/guide/policy/replay";
    let refused = service.post(path, &definition(64 * 1024 + 1)).await;
    assert_eq!(refused.status, 422, "{}", refused.body);
    assert_eq!(refused.body["errors"][0]["pointer"], "/definition", "{}", refused.body);
    assert_eq!(service.post(path, &definition(60 * 1024)).await.status, 200);
    // Such definitions are not kept: each would take a hundred MiB.
    for number in 0..6 {
        let globs = "'**/a*',".repeat(7_000);
        let text = format!(
            "name: guide\nmodel: scripted/guide\nversion: {number}.0.0\n\
             governance: {{paths: {{read: [{globs}]}}}}"
        );
        let refused = service.post(path, &json!({"definition": text})).await;
        assert_eq!(refused.status, 422, "{}", refused.body);
    }
    is_unharmed(&mut service);
    let labels = |number: usize| {
        let labels: Vec<_> = (0..number).map(|n| format!("metadata.{n:x}=")).collect();
        format!("/v1/runs?{}", labels.join("&"))
    };
    let words = |number: usize| {
        let words: Vec<_> = (0..number).map(|n| format!("{n:x}")).collect();
        format!("/v1/runs?q={}", words.join("+"))
    };
    for (asked, status) in [
        (labels(16), 200),
        (labels(17), 400),
        (labels(1_000), 400),
        (words(64), 200),
        (words(65), 400),
    ] {
        let answer = service.get(&asked).await;
        assert_eq!(answer.status, status, "{asked:.100}: {}", answer.body);
        assert!(answer.body.to_string().len() < 1_000);
    }
    is_unharmed(&mut service);
}

#[tokio::test]
async fn an_answer_of_a_model_server_costs_little_more_than_its_bytes() {
    let mock = MockModel::start().await;
    let list = |entry: &str| vec![entry; (3 << 20) / (entry.len() + 1)].join(",");
    let wholes = [
        format!(r#"{{"choices":[{}]}}"#, list("{}")),
        format!(r#"{{"choices":[{{"message":{{"tool_calls":[{}]}}}}]}}"#, list("{}")),
        format!(r#"{{"choices":[{{"message":{{"content":[{}]}}}}]}}"#, list("{}")),
        format!(r#"{{"error":{{}},"choices":[],"more":[{}]}}"#, list("0")),
        format!(r#"{{"error":{{"message":[{}]}},"choices":[]}}"#, list("[]")),
        " ".repeat(12 << 20),
    ];
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 0\n",
        mock.base_url()
    );
    let agent = GUIDE.replace("scripted/guide", "mock/m");
    let mut service = Setup::new().agent("guide", &agent).config(&config).start(Db::Sqlite).await;
    for whole in wholes {
        mock.always(Reply::Raw(whole));
        let run = service.run("guide", &json!({})).await;
        assert_eq!(run["status"], "failed", "{run:#}");
        is_unharmed(&mut service);
    }
}

#[tokio::test]
async fn models_outside_all_definitions_are_other_in_metrics() {
    let steps = "steps:\n  - text: done\n";
    let agent = format!("{GUIDE}models: ['scripted/made-*', scripted/listed]\n");
    let setup = Setup::new().agent("guide", &agent).scenario("guide", steps);
    let setup = setup.scenario("made-up", steps).scenario("listed", steps);
    let service = setup.start(Db::Sqlite).await;
    service.run("guide", &json!({})).await;
    service.run("guide", &json!({"model": "scripted/made-up"})).await;
    service.run("guide", &json!({"model": "scripted/listed"})).await;
    let metrics = service.get("/metrics").await.body.as_str().unwrap().to_owned();
    let of = |model: &str| metrics.contains(&format!("model=\"{model}\""));
    assert!(of("guide") && of("listed") && of("other") && !of("made-up"), "{metrics}");
}

#[tokio::test]
async fn a_search_is_over_when_its_call_is() {
    let bits: String = (0..65_536_u64)
        .map(|n| if n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 63 == 1 { '1' } else { '0' })
        .collect();
    let steps = call(&json!({"operation": "search", "pattern": "[01]*1[01]{2000}x"}));
    let mut setup = guide(&format!("{steps}  - text: done\n"));
    for n in 0..64 {
        setup = setup.file(&format!("bits{n}"), &bits);
    }
    let mut service = setup.start(Db::Sqlite).await;
    let run = service.run("guide", &json!({"tool_call_timeout_seconds": 1})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let result = results_of(&service, &run).await.remove(0);
    assert!(result.starts_with("Error: The tool did not finish within 1 second"), "{result}");
    // What was given up takes no more processor time: the clock of the process stands still.
    let (mut before, mut quiet) = (service.processor_ticks(), 0);
    for _ in 0..600 {
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let now = service.processor_ticks();
        quiet = if now - before < 5 { quiet + 1 } else { 0 };
        if quiet == 5 {
            is_unharmed(&mut service);
            return;
        }
        before = now;
    }
    panic!("the search goes on");
}
