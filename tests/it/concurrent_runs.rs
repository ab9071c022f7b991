//! How many runs a replica drives at once: each has a slot, however it was started.

use std::collections::BTreeSet;

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    runs_from_the_queue_take_places,
    a_parked_run_has_no_place,
    children_take_turns_in_the_place_of_their_parent,
    a_chain_of_runs_needs_one_place,
    one_request_sent_many_times_at_once_is_one_run,
    an_edit_that_succeeds_is_in_the_file,
}

const AGENT: &str = "
model: scripted/AGENT
instructions: Answer.
enable_double_confirmation: false
";

/// An agent that plays the scenario of its name.
pub(crate) fn agent(name: &str) -> String {
    AGENT.replace("AGENT", name)
}

async fn invoke(service: &Service, agent: &str) -> Answer {
    service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &json!({})).await
}

fn count(runs: &Value) -> usize {
    runs["data"].as_array().map_or(0, Vec::len)
}

async fn runs_from_the_queue_take_places(db: Db) {
    let service = Setup::new()
        .agent("stuck", &agent("stuck"))
        .scenario("stuck", "steps: [{delay_ms: 60000, text: late}]")
        .agent("quick", &agent("quick"))
        .scenario("quick", "steps: [{text: done}]")
        .config("[runtime]\nmax_concurrent_runs = 2")
        .start(db)
        .await;
    let mut runs = Vec::new();
    for _ in 0..8 {
        runs.push(service.enqueue("stuck").await);
    }
    service.until("/v1/runs?status=running", |runs| count(runs) >= 2).await;
    let refused = invoke(&service, "quick").await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (503, &json!("OVERLOADED")),
        "{:#}",
        refused.body
    );
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(count(&service.get("/v1/runs?status=running").await.body), 2);
    assert_eq!(count(&service.get("/v1/runs?status=queued").await.body), 6);
    for run in runs {
        service.post(&format!("{run}/cancel"), &json!({})).await;
    }
    service.until("/v1/runs?status=cancelled", |runs| count(runs) == 8).await;
    let mut answered = invoke(&service, "quick").await;
    while answered.status == 503 {
        answered = invoke(&service, "quick").await; // the last of them may still wind down
    }
    assert_eq!(answered.status, 200, "{:#}", answered.body);
}

async fn a_parked_run_has_no_place(db: Db) {
    let writer = "tools: [file_ops]\ngovernance: {autonomy: full, tool_policies: {file_ops: ask}, paths: {write: ['./**']}}\n";
    let service = Setup::new()
        .agent("writer", &format!("{}{writer}", agent("writer")))
        .scenario(
            "writer",
            "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: write, path: a.txt, content: x}}]}, {text: written}]",
        )
        .agent("quick", &agent("quick"))
        .scenario("quick", "steps: [{text: done}]")
        .config("[runtime]\nmax_concurrent_runs = 1")
        .start(db)
        .await;
    let parked = invoke(&service, "writer").await;
    assert_eq!(parked.status, 202, "{:#}", parked.body);
    let mut answered = invoke(&service, "quick").await;
    while answered.status == 503 {
        answered = invoke(&service, "quick").await; // the parked run may still wind down
    }
    assert_eq!(answered.status, 200, "{:#}", answered.body);
    let run = format!("/v1/runs/{}", parked.body["run_id"].as_str().unwrap());
    let call = parked.body["pending"][0]["call_id"].as_str().unwrap();
    let approved = service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await;
    assert!(approved.status.is_success(), "{:#}", approved.body);
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
}

async fn children_take_turns_in_the_place_of_their_parent(db: Db) {
    let asks = r#"
steps:
  - tool_calls:
      - {tool: "agent:helper", arguments: {task: a}}
      - {tool: "agent:helper", arguments: {task: b}}
      - {tool: "agent:helper", arguments: {task: c}}
  - text: "{{ results | join(',') }}"
"#;
    let parent = "tools: ['agent:helper']\nparallel_tool_calls: true\n";
    let helper =
        "description: Helps.\ninputs: {type: object, properties: {task: {type: string}}}\n";
    let service = Setup::new()
        .agent("parent", &format!("{}{parent}", agent("parent")))
        .scenario("parent", asks)
        .agent("helper", &format!("{}{helper}", agent("helper")))
        .scenario("helper", "steps: [{delay_ms: 200, text: '{{ inputs.task }}'}]")
        .config("[runtime]\nmax_concurrent_runs = 1")
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "a,b,c"}), "{run:#}");
    let parent = run["run_id"].as_str().unwrap();
    let children = service.get(&format!("/v1/runs?parent_run_id={parent}")).await.body;
    let mut spans: Vec<(&str, &str)> = children["data"]
        .as_array()
        .unwrap()
        .iter()
        .map(|child| {
            (child["started_at"].as_str().unwrap(), child["finished_at"].as_str().unwrap())
        })
        .collect();
    spans.sort_unstable();
    assert_eq!(spans.len(), 3);
    assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0), "one after the other: {spans:?}");
}

async fn a_chain_of_runs_needs_one_place(db: Db) {
    let passes = |to: &str| {
        format!(
            "steps: [{{tool_calls: [{{tool: \"agent:{to}\", arguments: {{}}}}]}}, {{text: '{{{{ results[0] }}}}!'}}]"
        )
    };
    let tools = |to: &str| format!("description: Passes on.\ntools: ['agent:{to}']\n");
    let service = Setup::new()
        .agent("one", &format!("{}{}", agent("one"), tools("two")))
        .scenario("one", &passes("two"))
        .agent("two", &format!("{}{}", agent("two"), tools("three")))
        .scenario("two", &passes("three"))
        .agent("three", &format!("{}description: Ends.\n", agent("three")))
        .scenario("three", "steps: [{text: done}]")
        .config("[runtime]\nmax_concurrent_runs = 1\nqueue_workers = 1")
        .start(db)
        .await;
    let run = service.enqueue("one").await;
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["output"], json!({"result": "done!!"}), "{ended:#}");
}

async fn one_request_sent_many_times_at_once_is_one_run(db: Db) {
    let service = Setup::new()
        .agent("slow", &agent("slow"))
        .scenario("slow", "steps: [{delay_ms: 500, text: done}]")
        .config("[runtime]\nmax_concurrent_runs = 1")
        .start(db)
        .await;
    let url = service.url("/v1/agents/slow/invoke-iterative");
    let ask = || {
        let request = service.http.post(&url).bearer_auth(&service.key);
        answer(request.header("Idempotency-Key", "once").json(&json!({})))
    };
    let answers = futures::future::join_all((0..8).map(|_| ask())).await;
    let runs: BTreeSet<&str> = answers
        .iter()
        .map(|answer| {
            assert_eq!(answer.status, 200, "{:#}", answer.body);
            assert_eq!(answer.body["output"]["result"], "done", "{:#}", answer.body);
            answer.body["run_id"].as_str().unwrap()
        })
        .collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    assert_eq!(count(&service.get("/v1/runs").await.body), 1);
}

/// Runs that edit lines of their own in one file.
async fn an_edit_that_succeeds_is_in_the_file(db: Db) {
    const EDITS: usize = 12;
    let edit = |number: usize| {
        format!(
            "  - tool_calls: [{{tool: file_ops, arguments: {{operation: edit, path: doc.txt, \
             old: '<{{{{ inputs.of }}}}.{number}>', new: '({{{{ inputs.of }}}}.{number})'}}}}]\n"
        )
    };
    let steps: String = (0..EDITS).map(edit).collect();
    let editor = "tools: [file_ops]\nworkspace: team\n\
                  governance: {autonomy: full, paths: {read: ['**'], write: ['**']}}\n";
    let service = Setup::new()
        .agent("editor", &format!("{}{editor}", agent("editor")))
        .scenario("editor", &format!("steps:\n{steps}  - text: done\n"))
        .start(db)
        .await;
    let runs = ["a", "b", "c", "d", "e", "f"];
    let lines =
        |of: &&str| (0..EDITS).map(|n| format!("<{of}.{n}>\n")).collect::<Vec<_>>().concat();
    let file = "/v1/agents/editor/files/doc.txt";
    let put = service.request(Method::PUT, file).body(runs.iter().map(lines).collect::<String>());
    assert_eq!(answer(put).await.status, 201);
    let edited = runs.map(async |of| {
        let run = service.run("editor", &json!({"inputs": {"of": of}})).await;
        let calls = format!("/v1/runs/{}/tool-calls", run["run_id"].as_str().unwrap());
        service.get(&calls).await.body["data"].as_array().unwrap().clone()
    });
    let edited = futures::future::join_all(edited).await;
    let text = service.get(file).await.body.as_str().unwrap().to_owned();
    assert!(text.contains('('), "none of the edits succeeded: {text}");
    for (of, calls) in runs.iter().zip(edited) {
        assert!(!calls.is_empty(), "a run ends early where too many are refused in a row");
        for (number, call) in calls.iter().enumerate() {
            let is_done = call["is_error"] == false;
            assert_eq!(text.contains(&format!("({of}.{number})")), is_done, "{call:#}\n{text}");
        }
    }
}
