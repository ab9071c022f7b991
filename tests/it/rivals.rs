//! Requests that come at the same instant with one `run_id`: one of them starts the run, and the
//! others take nothing away from it.

use std::collections::BTreeMap;

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;
use uuid::Uuid;

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    one_of_eight_starts_the_run,
    eight_with_one_key_get_the_same_run,
    refused_requests_hide_no_parent_run,
}

const ROUNDS: usize = 40;

/// How a request wants its answer.
const WANTS: [(&str, &str); 3] =
    [("accept", "application/json"), ("prefer", "respond-async"), ("accept", "text/event-stream")];

fn reader() -> Setup {
    Setup::new()
        .agent(
            "reader",
            "
model: scripted/reader
instructions: Read the file.
tools: [file_ops]
enable_double_confirmation: false
",
        )
        .scenario(
            "reader",
            r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - text: "{{ results[0] | trim }}"
"#,
        )
        .file("notes.txt", "seventeen\n")
}

/// Sends eight requests at the same time; the n-th with the n-th header, over and over.
async fn eight(
    service: &Service,
    agent: &str,
    id: Uuid,
    key: Option<&str>,
    wants: &[(&'static str, &'static str)],
) -> Vec<Answer> {
    let body = json!({"inputs": {}, "run_id": id});
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    let mut requests = JoinSet::new();
    for (name, value) in wants.iter().cycle().take(8) {
        let mut request = service.request(Method::POST, &path).json(&body).header(*name, *value);
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        requests.spawn(answer(request));
    }
    requests.join_all().await
}

/// The run once it has ended; it must have done so once, with every event.
async fn ended(service: &Service, id: Uuid) -> Value {
    let run = service.until(&format!("/v1/runs/{id}"), |run| run["finished_at"].is_string()).await;
    assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
    let events = service.get(&format!("/v1/runs/{id}/events")).await.body;
    let events = events["data"].as_array().unwrap();
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>());
    let count = |kind: &str| events.iter().filter(|event| event["type"] == kind).count();
    assert_eq!((count("run.started"), count("run.completed"), count("run.resumed")), (1, 1, 0));
    run
}

fn statuses(answers: &[Answer]) -> BTreeMap<u16, usize> {
    let mut statuses = BTreeMap::new();
    for answer in answers {
        *statuses.entry(answer.status.as_u16()).or_default() += 1;
    }
    statuses
}

async fn one_of_eight_starts_the_run(db: Db) {
    let service = reader().start(db).await;
    for round in 0..ROUNDS {
        let id = Uuid::now_v7();
        // Each form by itself, and all of them mixed.
        let wants = WANTS.get(round % 4..=round % 4).unwrap_or(&WANTS);
        let answers = eight(&service, "reader", id, None, wants).await;
        let (refused, accepted): (Vec<_>, Vec<_>) =
            answers.iter().partition(|answer| answer.status == 409);
        assert_eq!((refused.len(), accepted.len()), (7, 1), "{:?}", statuses(&answers));
        for answer in refused {
            assert_eq!(answer.body["code"], "RUN_ID_TAKEN", "{:#}", answer.body);
        }
        let accepted = accepted[0];
        assert!(matches!(accepted.status.as_u16(), 200 | 202), "{:#}", accepted.body);
        assert_eq!(accepted.headers["x-run-id"], id.to_string());
        assert_eq!(ended(&service, id).await["output"]["result"], "seventeen");
    }
}

async fn eight_with_one_key_get_the_same_run(db: Db) {
    let service = reader().start(db).await;
    for round in 0..ROUNDS {
        let id = Uuid::now_v7();
        let wants = WANTS.get(round % 4..=round % 4).unwrap_or(&WANTS);
        let answers = eight(&service, "reader", id, Some(&format!("key-{round}")), wants).await;
        let replayed = |answer: &&Answer| answer.headers.contains_key("idempotency-replayed");
        assert_eq!(answers.iter().filter(replayed).count(), 7, "{:?}", statuses(&answers));
        for answer in &answers {
            assert!(matches!(answer.status.as_u16(), 200 | 202), "{:#}", answer.body);
            assert_eq!(answer.headers["x-run-id"], id.to_string());
        }
        ended(&service, id).await;
    }
}

async fn refused_requests_hide_no_parent_run(db: Db) {
    let service = reader()
        .agent(
            "parent",
            "
model: scripted/parent
instructions: Ask the reader.
tools: ['agent:reader']
enable_double_confirmation: false
",
        )
        .scenario(
            "parent",
            r#"
steps:
  - tool_calls: [{tool: "agent:reader", arguments: {task: read}}]
  - text: "told: {{ results[0] }}"
"#,
        )
        .start(db)
        .await;
    for _ in 0..ROUNDS / 4 {
        let id = Uuid::now_v7();
        let answers = eight(&service, "parent", id, None, &WANTS[..1]).await;
        assert_eq!(statuses(&answers), BTreeMap::from([(200, 1), (409, 7)]));
        assert_eq!(ended(&service, id).await["output"]["result"], "told: seventeen");
    }
}
