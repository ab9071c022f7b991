//! Pages of large items: no page has more than its bytes, and together they have everything once.

use serde_json::{Value, json};

use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    pages_of_large_items_are_bounded_and_together_have_all,
}

/// Bytes of a page, and what may be around its items.
const PAGE: usize = (4 << 20) + (64 << 10);
/// Large calls of the run.
const CALLS: usize = 6;

const WRITER: &str = "
model: scripted/writer
tools: [file_ops]
enable_double_confirmation: false
limits: {max_iterations: 20}
governance: {autonomy: full, paths: {write: ['./**']}, injection: {inputs: 'off', results: 'off'}}
";

/// The pages of a list: their sizes, and all items.
async fn pages(service: &Service, path: &str) -> (Vec<(usize, usize)>, Vec<Value>) {
    let (mut sizes, mut all, mut cursor) = (Vec::new(), Vec::new(), String::new());
    loop {
        let url = service.url(&format!("{path}limit=200{cursor}"));
        let sent = service.http.get(url).bearer_auth(&service.key).send().await.unwrap();
        assert_eq!(sent.status(), 200, "{path}");
        let text = sent.text().await.unwrap();
        let page: Value = serde_json::from_str(&text).unwrap();
        let items = page["data"].as_array().unwrap();
        assert!(
            text.len() <= PAGE || items.len() == 1,
            "{path}: {} of {}",
            text.len(),
            items.len()
        );
        sizes.push((items.len(), text.len()));
        all.extend(items.iter().cloned());
        let Some(next) = page["next_cursor"].as_str() else { return (sizes, all) };
        cursor = format!("&cursor={next}");
    }
}

fn write(path: &str) -> String {
    format!(
        "{{tool: file_ops, arguments: {{operation: write, path: {path}, content: \"{{{{ 'y' * 900000 }}}}\"}}}}"
    )
}

async fn pages_of_large_items_are_bounded_and_together_have_all(db: Db) {
    let steps: Vec<String> = (0..CALLS)
        .map(|n| format!("  - tool_calls: [{}]\n", write(&format!("f{n}.txt"))))
        .collect();
    let steps = steps.concat();
    let asks = format!("steps:\n  - tool_calls: [{}, {}]\n", write("a.txt"), write("b.txt"));
    let asking = WRITER.replace("writer", "asker");
    let asking = asking.replace("injection:", "tool_policies: {file_ops: ask}, injection:");
    let service = Setup::new()
        .agent("writer", WRITER)
        .scenario("writer", &format!("steps:\n{steps}  - text: done\n"))
        .agent("asker", &asking)
        .scenario("asker", &asks)
        .start(db)
        .await;
    let run = service.run("writer", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let run = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());

    let (sizes, events) = pages(&service, &format!("{run}/events?")).await;
    assert!(sizes.len() > 1, "{sizes:?}");
    let numbers: Vec<i64> = events.iter().filter_map(|event| event["seq"].as_i64()).collect();
    assert_eq!(numbers, (1..=i64::try_from(events.len()).unwrap()).collect::<Vec<_>>());
    assert_eq!(events.last().unwrap()["type"], "run.completed");
    let stream = service.http.get(service.url(&format!("{run}/events"))).bearer_auth(&service.key);
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    let stream = stream.text().await.unwrap();
    let ids = stream.lines().filter_map(|line| line.strip_prefix("id: ")?.parse().ok());
    assert_eq!(ids.collect::<Vec<i64>>(), numbers, "the stream has the same");

    let (sizes, calls) = pages(&service, &format!("{run}/tool-calls?")).await;
    assert_eq!((sizes.len(), calls.len()), (2, CALLS), "{sizes:?}");
    for (number, call) in calls.iter().enumerate() {
        assert_eq!(call["arguments"]["path"], format!("f{number}.txt"));
        assert_eq!(call["arguments"]["content"].as_str().unwrap().len(), 900_000);
        assert!(call["result"].is_string(), "{:.300}", call.to_string());
    }
    let (_, some) = pages(&service, &format!("{run}/messages?")).await;
    assert_eq!(some.len(), 3 + 2 * CALLS, "prompt, inputs, calls and results, answer");
    assert_eq!(pages(&service, &format!("{run}/iterations?")).await.1.len(), CALLS + 1);
    assert_eq!(pages(&service, &format!("{run}/changes?")).await.1.len(), CALLS);
    large_journals_are_replayed_one_after_the_other(&service).await;
    waiting_calls_are_bounded(&service).await;
}

/// A policy is replayed over runs that are not in memory together.
async fn large_journals_are_replayed_one_after_the_other(service: &Service) {
    let cut = service.run("writer", &json!({"max_iterations": 1})).await;
    assert_eq!(cut["tool_calls_made"], 1, "{cut:#}");
    let replay = service.post("/v1/agents/writer/policy/replay", &json!({})).await;
    assert_eq!(replay.status, 200, "{:#}", replay.body);
    let (calls, body) = (CALLS + 1, &replay.body);
    assert_eq!(
        (&body["runs"], &body["calls"], &body["unchanged"], &body["has_more"]),
        (&json!(2), &json!(calls), &json!(calls), &json!(false)),
        "{body:#}"
    );
}

/// Of calls that wait, lists have the beginning, and the run all.
async fn waiting_calls_are_bounded(service: &Service) {
    let mut runs = Vec::new();
    for _ in 0..3 {
        let url = service.url("/v1/agents/asker/invoke-iterative");
        let parked =
            answer(service.http.post(url).bearer_auth(&service.key).json(&json!({}))).await;
        assert_eq!(parked.status, 202, "{:.300}", parked.body.to_string());
        runs.push(parked.body["run_id"].as_str().unwrap().to_owned());
    }
    let (sizes, listed) = pages(service, "/v1/runs?status=awaiting_approval&").await;
    assert_eq!((sizes.len(), listed.len()), (1, 3));
    assert!(sizes[0].1 < 32 << 10, "{sizes:?}");
    for pending in listed.iter().flat_map(|run| run["pending"].as_array().unwrap()) {
        assert_eq!((&pending["arguments"], &pending["display"]), (&Value::Null, &json!("")));
    }
    let (sizes, asked) = pages(service, "/v1/approvals?").await;
    assert_eq!((sizes.len(), asked.len()), (1, 6), "{sizes:?}");
    assert!(asked.iter().all(|asked| asked["arguments"].is_null()));
    let (sizes, asked) = pages(service, &format!("/v1/approvals?run_id={}&", runs[0])).await;
    assert_eq!((sizes.len(), asked.len()), (2, 2), "{sizes:?}");
    let whole = service.get(&format!("/v1/runs/{}", runs[0])).await.body;
    for pending in asked.iter().chain(whole["pending"].as_array().unwrap()) {
        assert_eq!(pending["arguments"]["content"].as_str().unwrap().len(), 900_000);
    }
}
