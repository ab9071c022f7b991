//! Tries of a model call that fail: each has its event, before the next is made.
//!
//! | together with | here |
//! |---|---|
//! | followers, streamed pieces | `a_reader_sees_every_try_as_it_happens` |
//! | cancel | the same |
//! | fallbacks | `a_model_that_takes_over_is_named` |
//! | a run without retries | the same: no event |
//! | crash, another replica | a run that only waited to ask again is charged once: `machine` |
//! | what broken answers took | `an_answer_that_breaks_off_is_paid_for`: retried, given up, failed, cancelled |
//! | budgets | the same: a limit of tokens counts them |
//! | statistics, deleted runs | the same |
//! | runs at the same time | `a_moment_without_the_provider_ends_no_run` |
//! | models that do not stream | what they took is not known: nothing is charged |
//! | sessions | the same: all its runs are of one |
//! | children | none |

use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::mock_model::{After, MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};
use crate::streaming::Reader;

on_both_stores! {
    a_reader_sees_every_try_as_it_happens,
    a_model_that_takes_over_is_named,
    a_moment_without_the_provider_ends_no_run,
    an_answer_that_breaks_off_is_paid_for,
    an_answer_that_cannot_be_used_is_paid_for,
    an_answer_with_zeros_for_its_usage_is_estimated,
    calls_beyond_the_limit_of_an_answer_are_told_to_the_model,
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

/// A streamed answer of 400 bytes of text that does not end.
fn unfinished(after: After) -> Reply {
    let piece = json!({"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "one",
        "choices": [{"index": 0, "delta": {"role": "assistant", "content": "word ".repeat(80)}, "finish_reason": null}]});
    Reply::bytes(format!("data: {piece}\n\n").as_bytes(), after)
}

/// Output tokens of an answer of [`unfinished`].
const UNFINISHED: u64 = 100;

/// Each run is refused once, so each has tries left: all failures together are none of a provider that
/// is down.
async fn a_moment_without_the_provider_ends_no_run(db: Db) {
    const RUNS: usize = 20;
    let mock = MockModel::start().await;
    let refused = Mutex::new(BTreeSet::new());
    mock.reply_by(move |request| {
        if refused.lock().unwrap().insert(request["messages"].to_string()) {
            return Reply::error(503, "overloaded", Some(20));
        }
        Reply::text("done")
    });
    let config = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url());
    let setup = Setup::new().config(&config).agent("asker", "model: mock/one\n");
    let service = setup.start(db).await;
    let bodies: Vec<Value> = (0..RUNS).map(|n| json!({"inputs": {"n": n}})).collect();
    let runs = bodies.iter().map(|body| service.run("asker", body));
    for run in futures::future::join_all(runs).await {
        assert_eq!(run["status"], "completed", "{run:#}");
        assert!(!retried(&service, run["run_id"].as_str().unwrap()).await.is_empty(), "{run:#}");
    }
}

async fn an_answer_that_breaks_off_is_paid_for(db: Db) {
    let mock = MockModel::start().await;
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 1\n\
         [prices.\"mock/one\"]\ninput = 1.0\noutput = 10.0\n",
        mock.base_url()
    );
    let service = Setup::new().config(&config).agent("asker", "model: mock/one\n").start(db).await;
    let followed = async |replies: Vec<Reply>, mut body: Value| {
        body["session_id"] = json!("s");
        mock.script(replies);
        let request = service.request(Method::POST, "/v1/agents/asker/invoke-iterative");
        let request = request.header("accept", "text/event-stream").json(&body);
        let mut reader = Reader::of(request.send().await.unwrap());
        let mut frames: Vec<Value> = Vec::new();
        let mut cancels = body["metadata"]["cancel"] == "yes";
        loop {
            match tokio::time::timeout(Duration::from_millis(20), reader.next()).await {
                Ok(Some(frame)) => frames.push(frame.data),
                Ok(None) => break,
                Err(_) if cancels && !reader.deltas.is_empty() => {
                    cancels = false;
                    let path = format!("/v1/runs/{}/cancel", frames[0]["run_id"].as_str().unwrap());
                    assert_eq!(service.post(&path, &json!({})).await.status, 202);
                }
                Err(_) => {}
            }
        }
        let first = &frames[0]["run_id"];
        let run = service.get(&format!("/v1/runs/{}", first.as_str().unwrap())).await.body;
        (frames, run)
    };
    let usage_of = |frames: &[Value], kind: &str| -> Value {
        let event = frames.iter().find(|event| event["type"] == kind);
        event.unwrap_or_else(|| panic!("no {kind}: {frames:#?}"))["data"]["usage"].clone()
    };

    let (frames, run) =
        followed(vec![unfinished(After::End), Reply::text("fine")], json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let (broken, answered) =
        (usage_of(&frames, "model.retried"), usage_of(&frames, "model.responded"));
    assert_eq!(broken["output_tokens"], UNFINISHED);
    assert!(broken["input_tokens"].as_u64().unwrap() > 0 && broken["estimated"] == true);
    assert!(broken["cost_usd"].as_f64().unwrap() > 0.001, "{broken}");
    let sum = |field: &str| broken[field].as_u64().unwrap() + answered[field].as_u64().unwrap();
    for field in ["input_tokens", "output_tokens", "total_tokens"] {
        assert_eq!(run["usage"][field], sum(field), "{run:#}");
    }

    // The last try fails as well; then one is cancelled while it answers.
    let (frames, failed) =
        followed(vec![unfinished(After::End), unfinished(After::End)], json!({})).await;
    assert_eq!(failed["error"]["code"], "MODEL_ERROR", "{failed:#}");
    assert_eq!(usage_of(&frames, "model.interrupted"), usage_of(&frames, "model.retried"));
    assert_eq!(failed["usage"]["output_tokens"], 2 * UNFINISHED, "{failed:#}");
    let (frames, cancelled) =
        followed(vec![unfinished(After::Silence)], json!({"metadata": {"cancel": "yes"}})).await;
    assert_eq!(cancelled["status"], "cancelled", "{cancelled:#}");
    assert_eq!(usage_of(&frames, "model.interrupted")["output_tokens"], UNFINISHED);
    assert_eq!(cancelled["usage"]["output_tokens"], UNFINISHED, "{cancelled:#}");

    let body = json!({"budget": {"max_total_tokens": 400}});
    // What is left does not pay for another try.
    let (_, limited) = followed(vec![unfinished(After::End)], body).await;
    assert_eq!(limited["usage"]["output_tokens"], UNFINISHED, "{limited:#}");
    assert_eq!(limited["error"]["context"]["limit"], "max_total_tokens", "{limited:#}");

    let counted = service.get("/v1/stats/usage").await.body;
    let all = [&run, &failed, &cancelled, &limited];
    let total: u64 = all.iter().map(|run| run["usage"]["total_tokens"].as_u64().unwrap()).sum();
    assert_eq!(counted["data"][0]["total_tokens"], total, "{counted:#}");
    assert_eq!(counted["data"][0]["runs"], 1, "only one was answered: {counted:#}");
    assert_eq!(service.delete("/v1/sessions/s").await.status, 204);
    assert_eq!(service.get("/v1/stats/usage").await.body["data"][0]["total_tokens"], total);
}

/// An answer without choices that says what it took.
fn without_choices() -> Reply {
    Reply::Raw(
        json!({"id": "x", "object": "chat.completion", "choices": [],
            "usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}})
        .to_string(),
    )
}

async fn an_answer_that_cannot_be_used_is_paid_for(db: Db) {
    let mock = MockModel::start().await;
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 1\n\
         [prices.\"mock/*\"]\ninput = 1.0\noutput = 1.0\n",
        mock.base_url()
    );
    let service = Setup::new()
        .config(&config)
        .agent("asker", "model: mock/one\nenable_double_confirmation: false\n")
        .start(db)
        .await;
    mock.script([without_choices(), Reply::text("fine")]);
    let run = service.run("asker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let broken = &retried(&service, run["run_id"].as_str().unwrap()).await[0]["usage"];
    assert_eq!((&broken["total_tokens"], &broken["cost_usd"]), (&json!(110), &json!(0.00011)));
    assert_eq!(broken["estimated"], false, "the provider said so: {broken}");
    let rows = format!("/v1/runs/{}/iterations", run["run_id"].as_str().unwrap());
    let answered = service.get(&rows).await.body["data"][0]["usage"]["total_tokens"].clone();
    assert_eq!(run["tokens_used"], 110 + answered.as_u64().unwrap(), "{run:#}");

    // The last try, and those of a single shot and of a stream.
    for (route, accept) in [
        ("invoke-iterative", "application/json"),
        ("invoke", "application/json"),
        ("invoke-iterative", "text/event-stream"),
    ] {
        mock.script([without_choices(), without_choices()]);
        let id = uuid::Uuid::now_v7().to_string();
        let request = service.request(Method::POST, &format!("/v1/agents/asker/{route}"));
        let request = request.header("accept", accept).json(&json!({"run_id": id}));
        request.send().await.unwrap().bytes().await.unwrap();
        let run = service.get(&format!("/v1/runs/{id}")).await.body;
        assert_eq!(run["error"]["code"], "MODEL_ERROR", "{run:#}");
        assert_eq!(run["tokens_used"], 220, "{route} {accept}: {run:#}");
        assert_eq!(run["usage"]["cost_usd"], 0.00022, "{run:#}");
    }
}

async fn an_answer_with_zeros_for_its_usage_is_estimated(db: Db) {
    let mock = MockModel::start().await;
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n\
         [prices.\"mock/*\"]\ninput = 1.0\noutput = 1.0\n",
        mock.base_url()
    );
    let service = Setup::new()
        .config(&config)
        .agent("asker", "model: mock/one\nenable_double_confirmation: false\n")
        .start(db)
        .await;
    let answer = json!({"id": "x", "object": "chat.completion",
        "choices": [{"message": {"content": "fine words"}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}});
    mock.script([Reply::Raw(answer.to_string())]);
    let run = service.run("asker", &json!({})).await;
    assert_eq!((&run["status"], &run["usage"]["output_tokens"]), (&json!("completed"), &json!(3)));
    assert!(run["usage"]["input_tokens"].as_u64().unwrap() > 0, "{run:#}");
    assert!(run["usage"]["cost_usd"].as_f64().unwrap() > 0.0, "{run:#}");
    let events = service.get(&format!("/v1/runs/{}/events", run["run_id"].as_str().unwrap())).await;
    let mut events = events.body["data"].as_array().unwrap().iter();
    let responded = events.find(|event| event["type"] == "model.responded").unwrap();
    assert_eq!(responded["data"]["usage"]["estimated"], true, "{responded:#}");
}

async fn calls_beyond_the_limit_of_an_answer_are_told_to_the_model(db: Db) {
    let mock = MockModel::start().await;
    let config = format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url());
    let agent = "model: mock/one\nenable_double_confirmation: false\ntools: [file_ops]\n";
    let service = Setup::new().config(&config).agent("asker", agent).start(db).await;
    let glob = |n| json!({"operation": "glob", "pattern": format!("*{n}")}).to_string();
    mock.script([
        Reply::ToolCalls((0..1500).map(|n| ("file_ops".to_owned(), glob(n))).collect()),
        Reply::text("fewer, then"),
    ]);
    let run = service.run("asker", &json!({})).await;
    assert_eq!(run["output"], json!({"result": "fewer, then"}), "{run:#}");
    assert_eq!((&run["iterations"], mock.requests().len()), (&json!(2), 2), "paid once");
    assert_eq!(mock.refusals(), Vec::<String>::new());
    let warning = "An answer of the model has more than 1024 tool calls: the rest was left out.";
    assert_eq!(run["warnings"], json!([warning]));
    let told = mock.requests()[1].body["messages"].as_array().unwrap().clone();
    let answers = told.iter().filter(|message| message["role"] == "tool").count();
    assert_eq!(answers, 1024, "each has its result, most of them that they are too many");
}
