//! Tries of a model call that fail: each has its event, before the next is made.
//!
//! | crossing | here |
//! |---|---|
//! | followers, streamed pieces | `a_reader_sees_every_try_as_it_happens` |
//! | cancel | the same |
//! | fallbacks | `a_model_that_takes_over_is_named` |
//! | a run without retries | the same: no event |
//! | crash, another replica | the events say nothing that the fold needs: `machine` |
//! | children, sessions, budgets | none |

use reqwest::Method;
use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};
use crate::streaming::Reader;

on_both_stores! {
    a_reader_sees_every_try_as_it_happens,
    a_model_that_takes_over_is_named,
}

async fn service(db: Db, mock: &MockModel) -> Service {
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 3\n",
        mock.base_url()
    );
    Setup::new()
        .config(&config)
        .agent("asker", "model: mock/one\nfallback_models: [mock/two]\n")
        .start(db)
        .await
}

async fn retried(service: &Service, run_id: &str) -> Vec<Value> {
    let events = service.get(&format!("/v1/runs/{run_id}/events")).await.body;
    let all = events["data"].as_array().unwrap().iter();
    all.filter(|event| event["type"] == "model.retried")
        .map(|event| event["data"].clone())
        .collect()
}

async fn a_reader_sees_every_try_as_it_happens(db: Db) {
    let mock = MockModel::start().await;
    mock.script([
        Reply::error(503, "overloaded", Some(20)),
        Reply::error(429, "rate", Some(60_000)),
    ]);
    let service = service(db, &mock).await;
    let id = "0197aaaa-0000-7000-8000-0000000000e1";
    let request = service.request(Method::POST, "/v1/agents/asker/invoke-iterative");
    let request = request.header("accept", "text/event-stream").json(&json!({"run_id": id}));
    let mut reader = Reader::of(request.send().await.unwrap());
    let mut seen = Vec::new();
    while let Some(frame) = reader.next().await {
        if frame.data["type"] == "model.retried" {
            seen.push(frame.data["data"].clone());
        }
        if seen.len() == 2 {
            let path = format!("/v1/runs/{id}/cancel");
            assert_eq!(service.post(&path, &json!({})).await.status, 202);
            break;
        }
    }
    let run = service.until(&format!("/v1/runs/{id}"), |run| run["status"] == "cancelled").await;
    let context = &run["error"]["context"];
    assert_eq!(*context, json!({"phase": "model_call", "attempt": 1, "iteration": 1}), "{run:#}");
    let expected = |reason: &str, status: u16, wait: u64, message: &str| {
        json!({"attempt": 1, "iteration": 1, "provider": "mock", "model": "one", "reason": reason,
            "status": status, "wait_ms": wait, "message": message})
    };
    let expected = [
        expected("transient", 503, 20, "overloaded happened"),
        expected("rate_limited", 429, 60_000, "rate happened"),
    ];
    assert_eq!(seen, expected);
    assert_eq!(retried(&service, id).await, expected);
    assert_eq!(mock.requests().len(), 2);
}

async fn a_model_that_takes_over_is_named(db: Db) {
    let mock = MockModel::start().await;
    mock.script([
        Reply::error(404, "model_not_found", None),
        Reply::text("fine"),
        Reply::text("fine"),
    ]);
    let service = service(db, &mock).await;
    let run = service.run("asker", &json!({})).await;
    assert_eq!((&run["output"], &run["model"]), (&json!({"result": "fine"}), &json!("mock/two")));
    let told = retried(&service, run["run_id"].as_str().unwrap()).await;
    assert_eq!(told.len(), 1, "{told:#?}");
    assert_eq!(
        (&told[0]["reason"], &told[0]["fallback"]),
        (&json!("not_found"), &json!("mock/two"))
    );
    assert_eq!((&told[0]["wait_ms"], &told[0]["model"]), (&json!(0), &json!("one")));
    let plain = service.run("asker", &json!({"model": "mock/two"})).await;
    assert_eq!(plain["status"], "completed", "{plain:#}");
    assert!(retried(&service, plain["run_id"].as_str().unwrap()).await.is_empty());
}
