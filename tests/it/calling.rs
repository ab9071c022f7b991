//! How a request may start a run: queued, waited for up to a time, once for each idempotency key.

use reqwest::Method;
use serde_json::{Value, json};

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_queued_run_is_accepted_at_once_and_found_by_its_location,
    a_caller_waits_no_longer_than_it_wants,
    waiting_answers_when_the_run_has_ended,
    the_same_key_is_the_same_run,
    a_hundred_identical_requests_start_one_run,
    the_idempotency_key_of_a_refused_request_is_free,
    the_queue_is_bounded_and_drained_in_order,
    a_queued_run_can_be_cancelled,
    queued_runs_survive_a_crash,
}

const AGENT: &str = "
model: scripted/AGENT
instructions: Answer.
inputs: {type: object, properties: {n: {type: integer}}}
enable_double_confirmation: false
";

fn setup() -> Setup {
    Setup::new()
        .agent("quick", &AGENT.replace("AGENT", "quick"))
        .scenario("quick", "steps: [{text: \"{{ inputs.n }}\"}]")
        .agent("slow", &AGENT.replace("AGENT", "slow"))
        .scenario("slow", "steps: [{delay_ms: 600, text: slow}]")
        .agent("stuck", &AGENT.replace("AGENT", "stuck"))
        .scenario("stuck", "steps: [{delay_ms: 60000, text: late}]")
}

async fn invoke(
    service: &Service,
    agent: &str,
    headers: &[(&'static str, &str)],
    body: Value,
) -> Answer {
    let mut request =
        service.request(Method::POST, &format!("/v1/agents/{agent}/invoke-iterative")).json(&body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    answer(request).await
}

fn run_of(answer: &Answer) -> String {
    let run = answer.headers["x-run-id"].to_str().unwrap().to_owned();
    assert_eq!(answer.body["run_id"], json!(run), "{answer:?}");
    run
}

async fn a_queued_run_is_accepted_at_once_and_found_by_its_location(db: Db) {
    let service = setup().start(db).await;
    let accepted =
        invoke(&service, "quick", &[("prefer", "respond-async")], json!({"inputs": {"n": 7}}))
            .await;
    assert_eq!(accepted.status, 202, "{accepted:?}");
    let run = run_of(&accepted);
    assert_eq!(accepted.headers["location"], format!("/v1/runs/{run}"));
    assert_eq!(accepted.headers["preference-applied"], "respond-async");
    assert!(
        ["queued", "running", "completed"].contains(&accepted.body["status"].as_str().unwrap())
    );
    let done = service
        .until(accepted.headers["location"].to_str().unwrap(), |run| run["status"] == "completed")
        .await;
    assert_eq!(done["output"], json!({"result": "7"}));
    let events = service.get(&format!("/v1/runs/{run}/events")).await.body;
    assert_eq!(
        (&events["data"][0]["type"], &events["data"][1]["type"]),
        (&json!("run.queued"), &json!("run.started"))
    );
}

async fn a_caller_waits_no_longer_than_it_wants(db: Db) {
    let service = setup().start(db).await;
    let accepted = invoke(&service, "stuck", &[("prefer", "wait=0")], json!({})).await;
    assert_eq!(
        (accepted.status.as_u16(), &accepted.body["status"]),
        (202, &json!("running")),
        "{accepted:?}"
    );
    assert_eq!(accepted.headers["preference-applied"], "respond-async");
    assert_eq!(accepted.headers["location"], format!("/v1/runs/{}", run_of(&accepted)));
    for prefer in ["wait=60", "respond-async, wait=60"] {
        let done = invoke(&service, "slow", &[("prefer", prefer)], json!({})).await;
        assert_eq!(
            (done.status.as_u16(), &done.body["status"]),
            (200, &json!("completed")),
            "{done:?}"
        );
    }
}

async fn waiting_answers_when_the_run_has_ended(db: Db) {
    let service = setup().start(db).await;
    let queue = [("prefer", "respond-async")];
    let stuck = run_of(&invoke(&service, "stuck", &queue, json!({})).await);
    let early = service.get(&format!("/v1/runs/{stuck}/wait?timeout=0")).await;
    assert!(["queued", "running"].contains(&early.body["status"].as_str().unwrap()), "{early:?}");
    let run = run_of(&invoke(&service, "slow", &queue, json!({})).await);
    let done = service.get(&format!("/v1/runs/{run}/wait")).await;
    assert_eq!((done.status.as_u16(), &done.body["status"]), (200, &json!("completed")));
    let again = service.get(&format!("/v1/runs/{run}/wait?timeout=3600")).await;
    assert_eq!(again.body, done.body);
    for bad in ["-1", "3601", "1.5", "soon"] {
        let refused = service.get(&format!("/v1/runs/{run}/wait?timeout={bad}")).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (400, &json!("INVALID_PARAMETER")),
            "{bad}"
        );
    }
    assert_eq!(service.get("/v1/runs/0197a000-0000-7000-8000-000000000000/wait").await.status, 404);
}

async fn the_same_key_is_the_same_run(db: Db) {
    let mut service = setup().start(db).await;
    let key = [("idempotency-key", "\"order-1\"")];
    let first = invoke(
        &service,
        "slow",
        &key,
        json!({"inputs": {"n": 1}, "metadata": {"a": "1", "b": "2"}}),
    )
    .await;
    assert_eq!((first.status.as_u16(), first.headers.get("idempotency-replayed")), (200, None));
    // Bare or quoted, keys in another order, now or after a crash.
    service.kill().await;
    service.restart().await;
    let same = json!({"metadata": {"b": "2", "a": "1"}, "inputs": {"n": 1}});
    let again = invoke(&service, "slow", &[("idempotency-key", "order-1")], same.clone()).await;
    assert_eq!((again.status.as_u16(), &again.body), (200, &first.body));
    assert_eq!(again.headers["idempotency-replayed"], "true");
    run_of(&again);
    // Null in a field of the request is its absence; in what the model reads it is not.
    let mut with_null = same.clone();
    with_null["temperature"] = Value::Null;
    let again = invoke(&service, "slow", &key, with_null.clone()).await;
    assert_eq!((again.status.as_u16(), &again.body), (200, &first.body));
    with_null["inputs"]["m"] = Value::Null;
    let refused = invoke(&service, "slow", &key, with_null).await;
    assert_eq!(refused.body["code"], "IDEMPOTENCY_MISMATCH");
    // An answer to an asynchronous repetition says that it is over.
    let ended =
        invoke(&service, "slow", &[key[0], ("prefer", "respond-async")], same.clone()).await;
    assert_eq!((ended.status.as_u16(), &ended.body["run_id"]), (200, &first.body["run_id"]));
    // As a stream.
    let request = service.request(Method::POST, "/v1/agents/slow/invoke-iterative").json(&same);
    let request =
        request.header("idempotency-key", "order-1").header("accept", "text/event-stream");
    let frames = crate::streaming::Reader::of(request.send().await.unwrap()).rest().await;
    assert_eq!(frames.last().unwrap().data["data"]["run"], first.body);

    for (agent, body) in [("slow", json!({"inputs": {"n": 2}})), ("quick", same.clone())] {
        let refused = invoke(&service, agent, &key, body).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (422, &json!("IDEMPOTENCY_MISMATCH"))
        );
    }
    let single = service
        .request(Method::POST, "/v1/agents/slow/invoke")
        .header("idempotency-key", "order-1");
    assert_eq!(answer(single.json(&same)).await.body["code"], "IDEMPOTENCY_MISMATCH");
    // Another tenant's keys are its own.
    let other = json!({"name": "x", "tenant": "other", "scopes": ["agents:invoke"]});
    let made = service.post("/v1/keys", &other).await.body;
    made["key"].as_str().unwrap().clone_into(&mut service.key);
    let theirs = invoke(&service, "slow", &key, same).await;
    assert_eq!(theirs.status, 200, "{theirs:?}");
    assert_ne!(theirs.body["run_id"], first.body["run_id"]);
    for bad in ["", "\"open", &"k".repeat(256)] {
        let refused = invoke(&service, "slow", &[("idempotency-key", bad)], json!({})).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (400, &json!("INVALID_PARAMETER")),
            "{bad:?}"
        );
    }
}

async fn a_hundred_identical_requests_start_one_run(db: Db) {
    let service = setup().start(db).await;
    for (prefer, statuses) in [("wait=60", &[200][..]), ("respond-async", &[202, 200])] {
        let key = format!("burst {prefer}");
        let headers = [("idempotency-key", key.as_str()), ("prefer", prefer)];
        let calls = (0..100)
            .map(|_| invoke(&service, "slow", &headers, json!({"metadata": {"burst": prefer}})));
        let answers = futures::future::join_all(calls).await;
        let run = run_of(&answers[0]);
        for answer in &answers {
            assert_eq!(run_of(answer), run);
            assert!(statuses.contains(&answer.status.as_u16()), "{answer:?}");
        }
        let replayed = answers
            .iter()
            .filter(|answer| answer.headers.contains_key("idempotency-replayed"))
            .count();
        assert_eq!(replayed, 99);
        let label = prefer.replace('=', "%3D");
        let runs = service.get(&format!("/v1/runs?metadata.burst={label}")).await.body;
        assert_eq!(runs["data"].as_array().unwrap().len(), 1);
    }
}

async fn the_idempotency_key_of_a_refused_request_is_free(db: Db) {
    let service = setup().start(db).await;
    let key = [("idempotency-key", "k")];
    let refused = invoke(&service, "quick", &key, json!({"inputs": {"n": "one"}})).await;
    assert_eq!(refused.status, 422);
    let taken = invoke(&service, "quick", &key, json!({"inputs": {"n": 1}})).await;
    assert_eq!((taken.status.as_u16(), &taken.body["output"]), (200, &json!({"result": "1"})));
}

async fn the_queue_is_bounded_and_drained_in_order(db: Db) {
    let service =
        setup().config("[runtime]\nqueue_workers = 1\nmax_queued_runs = 3").start(db).await;
    let queue = [("prefer", "respond-async")];
    let blocking = run_of(&invoke(&service, "stuck", &queue, json!({})).await);
    service.until(&format!("/v1/runs/{blocking}"), |run| run["status"] == "running").await;
    let mut waiting = Vec::new();
    for n in 0..3 {
        waiting.push(run_of(&invoke(&service, "quick", &queue, json!({"inputs": {"n": n}})).await));
    }
    let refused = invoke(&service, "quick", &queue, json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (503, &json!("OVERLOADED")),
        "{refused:?}"
    );
    assert!(refused.headers.contains_key("retry-after"));
    // Who waits for an answer does not stand in that queue.
    assert_eq!(invoke(&service, "quick", &[], json!({"inputs": {"n": 9}})).await.status, 200);

    service.post(&format!("/v1/runs/{blocking}/cancel"), &json!({})).await;
    let mut ended = Vec::new();
    for run in &waiting {
        ended.push(
            service.get(&format!("/v1/runs/{run}/wait")).await.body["finished_at"]
                .as_str()
                .unwrap()
                .to_owned(),
        );
    }
    assert!(ended.is_sorted(), "{ended:?}");
    assert_eq!(invoke(&service, "quick", &queue, json!({})).await.status, 202);
}

async fn a_queued_run_can_be_cancelled(db: Db) {
    let service = setup().config("[runtime]\nqueue_workers = 1").start(db).await;
    let queue = [("prefer", "respond-async")];
    let blocking = run_of(&invoke(&service, "stuck", &queue, json!({})).await);
    service.until(&format!("/v1/runs/{blocking}"), |run| run["status"] == "running").await;
    let run = run_of(&invoke(&service, "quick", &queue, json!({})).await);
    let path = format!("/v1/runs/{run}/wait?timeout=30");
    let waiting = service.get(&path);
    let stream = async { crate::streaming::follow(&service, &run, None).await.rest().await };
    let cancel = async {
        service.until(&format!("/v1/runs/{run}"), |run| run["status"] == "queued").await;
        service.post(&format!("/v1/runs/{run}/cancel"), &json!({})).await
    };
    let (waited, frames, cancelled) = tokio::join!(waiting, stream, cancel);
    assert_eq!(cancelled.status, 202);
    assert_eq!(
        (&waited.body["status"], &waited.body["attempts"]),
        (&json!("cancelled"), &json!(0))
    );
    assert_eq!(frames.last().unwrap().event, "run.cancelled");
}

async fn queued_runs_survive_a_crash(db: Db) {
    let mut service =
        setup().config("[runtime]\nqueue_workers = 1\nlease = \"2s\"").start(db).await;
    let queue = [("prefer", "respond-async")];
    let blocking = run_of(&invoke(&service, "stuck", &queue, json!({})).await);
    let mut waiting = Vec::new();
    for n in 0..5 {
        waiting.push(run_of(&invoke(&service, "quick", &queue, json!({"inputs": {"n": n}})).await));
    }
    service.kill().await;
    service.restart().await;
    service.post(&format!("/v1/runs/{blocking}/cancel"), &json!({})).await;
    for (n, run) in waiting.iter().enumerate() {
        let run =
            service.until(&format!("/v1/runs/{run}"), |run| run["status"] == "completed").await;
        assert_eq!(run["output"], json!({"result": n.to_string()}));
    }
}
