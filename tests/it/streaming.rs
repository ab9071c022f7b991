//! Event streams: what a reader sees, how it resumes, and that it harms no other.

use std::time::Duration;

use futures::StreamExt;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::fault_rounds::rounds;
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    an_invocation_streams_its_events_and_ends_with_the_answer,
    a_stream_resumes_after_any_event_without_loss_or_repetition,
    a_stream_continues_after_a_crash,
    resuming_after_the_last_event_is_answered_204,
    a_stream_from_beyond_the_last_event_ends_with_the_run,
    an_invalid_last_event_id_is_rejected,
    concurrent_streams_of_a_run_are_the_same,
    deltas_are_streamed_while_the_model_responds,
    a_queued_run_that_is_followed_a_moment_later_streams_its_first_answer,
    a_reader_that_comes_during_a_resumed_answer_gets_its_pieces,
    an_instant_answer_comes_in_pieces,
    a_disconnect_cancels_the_run_only_on_request,
}

/// One event as it came.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    pub id: i64,
    pub event: String,
    pub data: Value,
}

/// A stream that is read frame by frame.
pub struct Reader {
    response:
        std::pin::Pin<Box<dyn futures::Stream<Item = reqwest::Result<axum::body::Bytes>> + Send>>,
    text: String,
    /// Pieces of answers, which have no number.
    pub deltas: Vec<Value>,
    /// What calls said of their progress, with the number of the event before it.
    pub progress: Vec<(i64, Value)>,
    last: i64,
}

impl Reader {
    pub fn of(response: reqwest::Response) -> Self {
        assert_eq!(response.status(), 200, "{response:?}");
        assert_eq!(response.headers()["content-type"], "text/event-stream");
        Self {
            response: Box::pin(response.bytes_stream()),
            text: String::new(),
            deltas: Vec::new(),
            progress: Vec::new(),
            last: 0,
        }
    }

    /// The next block, a comment or a frame; `None` at the end of the stream.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let rest = self.text.split_off(end + 2);
                return Some(std::mem::replace(&mut self.text, rest));
            }
            let more = tokio::time::timeout(Duration::from_mins(1), self.response.next())
                .await
                .expect("a silent stream");
            match more {
                Some(Ok(bytes)) => self.text.push_str(std::str::from_utf8(&bytes).unwrap()),
                Some(Err(_)) | None => return None,
            }
        }
    }

    pub async fn next(&mut self) -> Option<Frame> {
        loop {
            let block = self.block().await?;
            let field = |name: &str| {
                block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned)
            };
            let data = field("data: ").map(|data| serde_json::from_str::<Value>(&data).unwrap());
            if data.is_some() && field("event: ").as_deref() == Some("model.delta") {
                assert_eq!(field("id: "), None);
                self.deltas.extend(data);
            } else if data.is_some() && field("event: ").as_deref() == Some("tool_call.progress") {
                assert_eq!(field("id: "), None);
                self.progress.extend(data.map(|data| (self.last, data)));
            } else if let Some(data) = data {
                let id = field("id: ").unwrap().parse().unwrap();
                self.last = id;
                return Some(Frame { id, event: field("event: ").unwrap(), data });
            }
        }
    }

    pub async fn rest(mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }
}

pub async fn follow(service: &Service, run: &str, after: Option<i64>) -> Reader {
    let request = service
        .request(Method::GET, &format!("/v1/runs/{run}/events"))
        .header("accept", "text/event-stream");
    let request = match after {
        Some(after) => request.header("last-event-id", after),
        None => request,
    };
    loop {
        let response = request.try_clone().unwrap().send().await.unwrap();
        // What a client does where the machine has more to do than it can.
        if response.status() != 503 {
            return Reader::of(response);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

const WORKER: &str = "
model: scripted/worker
instructions: Work.
tools: [file_ops]
enable_double_confirmation: false
";

/// Three turns; the middle one takes as long as the inputs say.
const WORKING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - {delay_ms: 700, tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]}
  - text: done
"#;

fn worker() -> Setup {
    Setup::new().agent("worker", WORKER).scenario("worker", WORKING).agent("sleeper", &WORKER.replace("worker", "sleeper")).scenario(
        "sleeper",
        "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: \".\"}}]}, {delay_ms: 600000, text: late}]",
    )
}

async fn queued(service: &Service, agent: &str) -> String {
    let request = service.request(Method::POST, &format!("/v1/agents/{agent}/invoke-iterative"));
    let response = request.header("prefer", "respond-async").json(&json!({})).send().await.unwrap();
    assert_eq!(response.status(), 202);
    response.headers()["x-run-id"].to_str().unwrap().to_owned()
}

async fn an_invocation_streams_its_events_and_ends_with_the_answer(db: Db) {
    let service = worker().start(db).await;
    for (path, queued) in
        [("invoke-iterative", false), ("invoke-iterative", true), ("invoke", false)]
    {
        let request = service.request(Method::POST, &format!("/v1/agents/worker/{path}"));
        let request = request.header("accept", if queued { "text/*" } else { "text/event-stream" });
        let request = if queued { request.header("prefer", "respond-async") } else { request };
        let response = request.json(&json!({"metadata": {"a": "b"}})).send().await.unwrap();
        let applied = response.headers().get("preference-applied").map(|it| it.to_str().unwrap());
        assert_eq!(applied, queued.then_some("respond-async"));
        let run = response.headers()["x-run-id"].to_str().unwrap().to_owned();
        let mut frames = Reader::of(response).rest().await;

        let last = frames.last_mut().unwrap();
        assert!(last.event.starts_with("run."), "{last:?}");
        let answer = last.data["data"].as_object_mut().unwrap().remove("run").unwrap();
        assert_eq!(
            (&answer["run_id"], answer.get("attempts").is_some()),
            (&json!(run), path != "invoke")
        );
        let stored = service.get(&format!("/v1/runs/{run}")).await.body;
        for (field, value) in answer.as_object().unwrap() {
            assert_eq!(&stored[field], value, "{field}");
        }
        // The stream is the journal.
        let journal = service.get(&format!("/v1/runs/{run}/events")).await.body;
        let streamed: Vec<&Value> = frames.iter().map(|frame| &frame.data).collect();
        assert_eq!(json!(streamed), journal["data"]);
        for (frame, seq) in frames.iter().zip(1..) {
            assert_eq!(
                (frame.id, &frame.data["seq"], &frame.data["type"]),
                (seq, &json!(seq), &json!(frame.event))
            );
        }
        assert_eq!(frames[0].event, if queued { "run.queued" } else { "run.started" });
    }
}

async fn a_stream_resumes_after_any_event_without_loss_or_repetition(db: Db) {
    let service = worker().start(db).await;
    let run = queued(&service, "worker").await;
    // Disconnect after every single event while the run goes on.
    let mut frames: Vec<Frame> = Vec::new();
    while frames.last().is_none_or(|frame| frame.event != "run.completed") {
        let mut reader = follow(&service, &run, frames.last().map(|frame| frame.id)).await;
        frames.push(reader.next().await.unwrap());
    }
    let whole = follow(&service, &run, None).await.rest().await;
    assert_eq!(frames, whole);
    for after in 0..i64::try_from(whole.len()).unwrap() {
        let rest = follow(&service, &run, Some(after)).await.rest().await;
        assert_eq!(rest, whole[usize::try_from(after).unwrap()..], "after {after}");
        let path = format!("/v1/runs/{run}/events?after={after}");
        let request = service.request(Method::GET, &path).header("accept", "text/event-stream");
        assert_eq!(Reader::of(request.send().await.unwrap()).rest().await, rest);
    }
}

async fn a_stream_continues_after_a_crash(db: Db) {
    let late = WORKING.replace("delay_ms: 700", "delay_ms: 600000");
    let mut service =
        worker().scenario("worker", &late).config("[runtime]\nlease = \"2s\"").start(db).await;
    let run = queued(&service, "worker").await;
    let mut reader = follow(&service, &run, None).await;
    let mut seen = Vec::new();
    while seen.last().is_none_or(|frame: &Frame| frame.event != "tool_call.completed") {
        seen.push(reader.next().await.unwrap());
    }
    service.kill().await;
    while let Some(frame) = reader.next().await {
        seen.push(frame);
    }
    service.write("scenarios/worker.yaml", WORKING);
    service.restart().await;
    seen.extend(follow(&service, &run, seen.last().map(|frame| frame.id)).await.rest().await);
    assert_eq!(seen, follow(&service, &run, None).await.rest().await);
    let ids: Vec<i64> = seen.iter().map(|frame| frame.id).collect();
    assert_eq!(ids, (1..).take(ids.len()).collect::<Vec<_>>());
    assert!(seen.iter().any(|frame| frame.event == "run.resumed"));
    assert_eq!(seen.last().unwrap().data["data"]["run"]["output"]["result"], "done", "{seen:#?}");
}

async fn resuming_after_the_last_event_is_answered_204(db: Db) {
    let service = worker().start(db).await;
    let run = service.run("worker", &json!({})).await["run_id"].as_str().unwrap().to_owned();
    let last = follow(&service, &run, None).await.rest().await.last().unwrap().id;
    for after in [last, last + 1, i64::MAX] {
        let request = service.request(Method::GET, &format!("/v1/runs/{run}/events"));
        let response = request
            .header("accept", "text/event-stream")
            .header("last-event-id", after)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 204, "{after}");
    }
}

async fn a_stream_from_beyond_the_last_event_ends_with_the_run(db: Db) {
    let mock = MockModel::start().await;
    let service = Setup::new()
        .agent("slow", "model: mock/slow\nenable_double_confirmation: false\n")
        .config(&format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"", mock.base_url()))
        .start(db)
        .await;
    for after in [9_999, i64::MAX] {
        let (free, held) = watch::channel(false);
        mock.script([Reply::Held(held, Box::new(Reply::text("done")))]);
        let run = queued(&service, "slow").await;
        let reader = follow(&service, &run, Some(after)).await;
        free.send_replace(true);
        let seen = reader.rest().await;
        assert_eq!(seen.last().unwrap().event, "run.completed", "{seen:#?}");
    }
}

async fn an_invalid_last_event_id_is_rejected(db: Db) {
    let service = worker().start(db).await;
    let run = service.run("worker", &json!({})).await["run_id"].as_str().unwrap().to_owned();
    for bad in ["-1", "x", "", "1.5", "99999999999999999999"] {
        let request = service
            .request(Method::GET, &format!("/v1/runs/{run}/events"))
            .header("last-event-id", bad);
        let answer = crate::service::answer(request.header("accept", "text/event-stream")).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.body["code"]),
            (400, &json!("INVALID_PARAMETER")),
            "{bad:?}"
        );
    }
    let unknown =
        service.request(Method::GET, &format!("/v1/runs/{}/events", uuid::Uuid::from_u128(9)));
    let answer = crate::service::answer(unknown.header("accept", "text/event-stream")).await;
    assert_eq!((answer.status.as_u16(), &answer.body["code"]), (404, &json!("NOT_FOUND")));
}

/// Every replica streams a run, whichever drives it.
#[tokio::test]
async fn a_stream_from_another_replica_is_the_same() {
    let here = worker().start(Db::Postgres).await;
    let there = worker().start_on(here.database_url.clone()).await;
    let response = here
        .request(Method::POST, "/v1/agents/worker/invoke-iterative")
        .header("accept", "text/event-stream");
    let response = response.json(&json!({})).send().await.unwrap();
    let run = response.headers()["x-run-id"].to_str().unwrap().to_owned();
    let elsewhere = follow(&there, &run, None).await.rest();
    let (one, other) = tokio::join!(Reader::of(response).rest(), elsewhere);
    assert_eq!(one, other);
    assert_eq!(one.last().unwrap().event, "run.completed");
}

/// What each replica drives, and what both take from the queue, is followed on one of them.
#[tokio::test]
async fn many_runs_are_streamed_by_a_replica_that_drives_half_of_them() {
    let here = worker().start(Db::Postgres).await;
    let there = worker().start_on(here.database_url.clone()).await;
    let runs = futures::future::join_all((0..40).map(|_| queued(&here, "worker"))).await;
    let followed = runs.iter().map(async |run| follow(&there, run, None).await.rest().await);
    for frames in futures::future::join_all(followed).await {
        assert!(frames.iter().zip(1..).all(|(frame, number)| frame.id == number));
        assert_eq!(frames.last().unwrap().event, "run.completed");
    }
}

async fn concurrent_streams_of_a_run_are_the_same(db: Db) {
    let service = worker().start(db).await;
    let run = queued(&service, "worker").await;
    // One that never reads does not hold up the others, or the run.
    let _stalled = follow(&service, &run, None).await;
    let readers = futures::future::join_all(
        (0..rounds(200)).map(async |_| follow(&service, &run, None).await.rest().await),
    )
    .await;
    assert!(readers[0].last().unwrap().event == "run.completed");
    assert!(readers.iter().all(|frames| *frames == readers[0]));
    println!("{} readers: {} MiB at most", readers.len(), service.peak_memory_mib());
}

async fn deltas_are_streamed_while_the_model_responds(db: Db) {
    let scenario = r#"
steps:
  - {delay_ms: 200, text: "I will look.", tool_calls: [{tool: file_ops, arguments: {operation: list, path: "./."}}]}
  - {error: {status: 503, message: busy, retry_after: 0}}
  - {delay_ms: 200, text: "There is nothing here, as far as I can see."}
"#;
    let service = Setup::new()
        .agent("writer", &WORKER.replace("worker", "writer"))
        .scenario("writer", scenario);
    let service = service.start(db).await;
    let request = service.request(Method::POST, "/v1/agents/writer/invoke-iterative");
    let response =
        request.header("accept", "text/event-stream").json(&json!({})).send().await.unwrap();
    let mut reader = Reader::of(response);
    let mut answers = Vec::new();
    while let Some(frame) = reader.next().await {
        if frame.event == "model.responded" {
            // All pieces came before the whole.
            answers
                .push((frame.data["data"]["message"].clone(), std::mem::take(&mut reader.deltas)));
        }
    }
    assert_eq!(reader.deltas, Vec::<Value>::new());
    assert_eq!(answers.len(), 2);
    for (iteration, (message, deltas)) in answers.iter().enumerate() {
        assert!(deltas.len() > 2, "{deltas:?}");
        let mut text = String::new();
        let mut arguments = String::new();
        for delta in deltas {
            assert_eq!(
                (&delta["type"], &delta["data"]["attempt"]),
                (&json!("model.delta"), &json!(1))
            );
            assert_eq!(delta["data"]["iteration"], iteration + 1);
            if delta["data"]["restarted"] == true {
                text.clear();
            }
            text += delta["data"]["text"].as_str().unwrap_or_default();
            arguments += delta["data"]["tool_call"]["arguments"].as_str().unwrap_or_default();
        }
        assert_eq!(text, message["text"].as_str().unwrap());
        assert_eq!(arguments, message["tool_calls"][0]["arguments"].as_str().unwrap_or_default());
    }
    let names: Vec<&Value> =
        answers[0].1.iter().filter_map(|delta| delta["data"]["tool_call"].get("name")).collect();
    assert_eq!(names, ["file_ops"]);
    assert!(answers[1].1.iter().any(|delta| delta["data"]["restarted"] == true));
}

async fn a_queued_run_that_is_followed_a_moment_later_streams_its_first_answer(db: Db) {
    let text = "Slowly, word by word, with a good deal still to say.";
    let scenario = format!("steps: [{{delay_ms: 8000, text: '{text}'}}]");
    let setup = Setup::new().agent("writer", &WORKER.replace("worker", "writer"));
    let service = setup.scenario("writer", &scenario).start(db).await;
    let run = queued(&service, "writer").await;
    let writes_already = |events: &Value| {
        let mut events = events["data"].as_array().unwrap().iter();
        events.any(|event| event["type"] == "iteration.started")
    };
    service.until(&format!("/v1/runs/{run}/events"), writes_already).await;
    let mut reader = follow(&service, &run, None).await;
    while reader.next().await.unwrap().event != "model.responded" {}
    assert!(reader.deltas.len() > 2, "{:?}", reader.deltas);
    let pieces = reader.deltas.iter().map(|delta| delta["data"]["text"].as_str().unwrap());
    assert_eq!(pieces.collect::<String>(), text, "from its beginning");
}

async fn a_reader_that_comes_during_a_resumed_answer_gets_its_pieces(db: Db) {
    let mock = MockModel::start().await;
    let text = (0..600).map(|number| format!("word{number}")).collect::<Vec<_>>().join(" ");
    let (allowed, words) = watch::channel(3);
    mock.script([Reply::Hang]);
    mock.always(Reply::Words(words, json!({"role": "assistant", "content": text})));
    let config = format!(
        "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\ntimeout = \"1h\"\n\
         first_byte_timeout = \"1h\"\nidle_timeout = \"1h\"\n[runtime]\nlease = \"10s\"",
        mock.base_url()
    );
    let agent = WORKER.replace("scripted/worker", "mock/any");
    let mut service = Setup::new().agent("writer", &agent).config(&config).start(db).await;
    let run = queued(&service, "writer").await;
    mock.wait_for_requests(1).await;
    service.kill().await;
    service.restart().await;
    mock.wait_for_requests(2).await;
    let mut reader = follow(&service, &run, None).await;
    let mut is_resumed = false;
    // The answer goes on word by word until the reader has caught up.
    while reader.deltas.is_empty() {
        allowed.send_modify(|words| *words += 1);
        let frame = tokio::time::timeout(Duration::from_millis(100), reader.next()).await;
        if let Ok(frame) = frame.map(Option::unwrap) {
            is_resumed |= frame.event == "run.resumed";
            assert_ne!(frame.event, "model.responded", "no piece came before the whole");
        }
    }
    assert!(is_resumed, "it is not the first try");
    allowed.send_replace(usize::MAX);
    while reader.next().await.unwrap().event != "model.responded" {}
    let pieces = reader.deltas.iter().filter_map(|delta| delta["data"]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), text, "from its beginning");
}

/// On PostgreSQL, another process takes the run when the lease is over: its reader is there by then.
#[tokio::test]
async fn the_pieces_of_an_answer_that_a_crash_cut_off_are_withdrawn() {
    let text = "Slowly, word by word, with a good deal still to say.";
    let scenario = format!("steps: [{{delay_ms: 8000, text: '{text}'}}]");
    let setup = Setup::new().agent("writer", &WORKER.replace("worker", "writer"));
    let setup = setup.scenario("writer", &scenario).config("[runtime]\nlease = \"10s\"");
    let mut service = setup.start(Db::Postgres).await;
    let run = queued(&service, "writer").await;
    let mut reader = follow(&service, &run, None).await;
    let begun = loop {
        let frame = reader.next().await.unwrap();
        if frame.event == "iteration.started" {
            break frame.id;
        }
    };
    service.kill().await;
    service.restart().await;
    let mut reader = follow(&service, &run, Some(begun)).await;
    while reader.next().await.unwrap().event != "model.responded" {}
    let mut pieces = reader.deltas.iter().map(|delta| &delta["data"]);
    assert_eq!(pieces.next().unwrap()["restarted"], true, "{:?}", reader.deltas);
    assert_eq!(pieces.map(|piece| piece["text"].as_str().unwrap()).collect::<String>(), text);
}

/// However soon an answer is there: while the event before it is still being committed, too.
async fn an_instant_answer_comes_in_pieces(db: Db) {
    let service = worker().start(db).await;
    for round in 0..20 {
        let request = service.request(Method::POST, "/v1/agents/worker/invoke-iterative");
        let request = request.header("accept", "text/event-stream").json(&json!({}));
        let mut reader = Reader::of(request.send().await.unwrap());
        let mut answers = 0;
        while let Some(frame) = reader.next().await {
            if frame.event == "model.responded" {
                answers += 1;
                let pieces = std::mem::take(&mut reader.deltas);
                assert!(!pieces.is_empty(), "round {round}, answer {answers}");
            }
        }
        assert!(answers > 0);
    }
}

async fn a_disconnect_cancels_the_run_only_on_request(db: Db) {
    let service = worker().start(db).await;
    for (accept, header, cancelled) in [
        ("text/event-stream", Some("true"), true),
        ("application/json", Some("true"), true),
        ("text/event-stream", Some("false"), false),
        ("text/event-stream", None, false),
        ("application/json", None, false),
    ] {
        let run = uuid::Uuid::now_v7().to_string();
        let mut request = service
            .request(Method::POST, "/v1/agents/sleeper/invoke-iterative")
            .header("accept", accept);
        if let Some(value) = header {
            request = request.header("x-cancel-on-disconnect", value);
        }
        let request = request.json(&json!({"run_id": run}));
        let call =
            tokio::spawn(async move { Some(Reader::of(request.send().await.ok()?).rest().await) });
        service.until(&format!("/v1/runs/{run}"), |body| body["iterations"] == 1).await;
        call.abort();
        let path = format!("/v1/runs/{run}");
        if cancelled {
            let run = service.until(&path, |body| body["status"] == "cancelled").await;
            assert_eq!(run["error"]["context"]["reason"], "The client disconnected.", "{run:#}");
        } else {
            let still = service.get(&format!("{path}/wait?timeout=1")).await;
            assert_eq!(still.body["status"], "running", "{accept} {header:?}");
            service.post(&format!("{path}/cancel"), &json!({})).await;
        }
    }
}
