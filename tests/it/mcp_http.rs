//! Tools of MCP servers that speak streamable HTTP, on both stores; what they have in common with
//! those that are programs is told in `mcp.rs`, their combination with other features included.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::{TcpListener, TcpSocket};
use tokio::task::JoinHandle;

use crate::mcp::until_up;
use crate::script_tools::{events, with};
use crate::service::{Db, Service, Setup, on_both_stores, on_one_store};

on_both_stores! {
    tools_are_called_over_http,
    a_server_that_forgets_or_goes_is_found_again,
}

on_one_store! {
    hostile_servers_end_in_results,
}

/// In the environment of every test, and long enough to be looked for.
const KEY: &str = "CARGO_MANIFEST_DIR";

#[derive(Default)]
struct Seen {
    /// Headers and body of each message.
    messages: Vec<(HeaderMap, Value)>,
    session: u32,
    /// Whether the answers to `initialize` are held back.
    holds_sessions: bool,
    listed: Vec<&'static str>,
}

type Log = Arc<Mutex<Seen>>;

struct Mock {
    url: String,
    log: Log,
    server: JoinHandle<()>,
}

const TOOLS: [&str; 10] =
    ["echo", "stream", "asks", "change", "hang", "huge", "flood", "outside", "forget", "broken"];

impl Mock {
    async fn start() -> Self {
        Self::on(TcpListener::bind("127.0.0.1:0").await.unwrap())
    }

    fn on(listener: TcpListener) -> Self {
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let log = Log::default();
        log.lock().unwrap().listed = TOOLS.to_vec();
        let app = Router::new().fallback(respond).with_state(Arc::clone(&log));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, log, server }
    }

    /// Ends it; nothing else can be at its address, and nothing answers there.
    async fn end(self) -> TcpSocket {
        let address = self.url["http://".len()..].trim_end_matches("/mcp").parse().unwrap();
        drop(self);
        for _ in 0..6000 {
            let socket = TcpSocket::new_v4().unwrap();
            socket.set_reuseaddr(true).unwrap();
            if socket.bind(address).is_ok() {
                return socket;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("it listens still");
    }

    fn messages(&self, method: &str) -> Vec<(HeaderMap, Value)> {
        let log = self.log.lock().unwrap();
        log.messages.iter().filter(|(_, body)| body["method"] == method).cloned().collect()
    }
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn event(message: &Value) -> Bytes {
    format!("event: message\ndata: {message}\n\n").into()
}

/// These events, and then nothing more.
fn open_stream(events: Vec<Bytes>) -> Response {
    let events = stream::iter(events.into_iter().map(Ok::<_, std::io::Error>));
    let body = Body::from_stream(events.chain(stream::pending()));
    ([("content-type", "text/event-stream")], body).into_response()
}

/// Notes that are together larger than one message may be, a question and an answer.
fn stream_of_notes(answer: Bytes) -> Response {
    let params = json!({"progress": 1, "message": "y".repeat(10_000)});
    let note =
        event(&json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}));
    let mut events = vec![note; 600];
    events.push(event(
        &json!({"jsonrpc": "2.0", "id": "q", "method": "sampling/createMessage", "params": {}}),
    ));
    events.push(answer);
    open_stream(events)
}

/// A question, and an answer as soon as that has its own.
fn asks(log: Log, answer: Bytes) -> Response {
    let ask = event(&json!({"jsonrpc": "2.0", "id": "alive", "method": "ping"}));
    let replied = stream::once(async move {
        while !log.lock().unwrap().messages.iter().any(|(_, said)| said["id"] == "alive") {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        answer
    });
    let events = stream::iter([ask]).chain(replied).map(Ok::<_, std::io::Error>);
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

/// Every other session is lost as servers made with the TypeScript SDK lose theirs.
fn lost_session(now: u32) -> Response {
    if now % 2 == 1 {
        return StatusCode::NOT_FOUND.into_response();
    }
    let why = "Bad Request: No valid session ID provided";
    let refusal = json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32000, "message": why}});
    (StatusCode::BAD_REQUEST, axum::Json(refusal)).into_response()
}

async fn respond(State(log): State<Log>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (session, listed) = {
        let mut log = log.lock().unwrap();
        log.messages.push((head.headers.clone(), asked.clone()));
        (log.session, log.listed.clone())
    };
    let (method, id) = (asked["method"].as_str().unwrap_or_default(), &asked["id"]);
    let answer = |result: Value| json!({"jsonrpc": "2.0", "id": id, "result": result});
    let text = |text: String| json!({"content": [{"type": "text", "text": text}]});
    if method == "initialize" {
        while log.lock().unwrap().holds_sessions {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let introduced = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "m", "version": "1"}});
        let name = format!("session-{session}");
        return ([("mcp-session-id", name)], axum::Json(answer(introduced))).into_response();
    }
    let named = head.headers.get("mcp-session-id").and_then(|it| it.to_str().ok());
    if named != Some(&format!("session-{session}")) {
        return lost_session(session);
    }
    if id.is_null() {
        return StatusCode::ACCEPTED.into_response();
    }
    if method == "ping" {
        return axum::Json(answer(json!({}))).into_response();
    }
    if method == "tools/list" {
        let tool = |name: &&str| json!({"name": name, "description": format!("Does {name}."), "inputSchema": {"type": "object"}});
        // Two pages.
        let is_first = asked["params"]["cursor"].is_null();
        let half = listed.len() / 2;
        let part = if is_first { &listed[..half] } else { &listed[half..] };
        let tools: Vec<Value> = part.iter().map(tool).collect();
        let mut page = json!({"tools": tools});
        if is_first {
            page["nextCursor"] = "more".into();
        }
        return axum::Json(answer(page)).into_response();
    }
    match asked["params"]["name"].as_str().unwrap_or_default() {
        "echo" => {
            let key = head.headers.get("authorization").unwrap().to_str().unwrap();
            let told = json!({"params": asked["params"], "key": key}).to_string();
            axum::Json(answer(text(told))).into_response()
        }
        "stream" => stream_of_notes(event(&answer(text("streamed".into())))),
        "asks" => asks(log, event(&answer(text("you live".into())))),
        "change" => {
            log.lock().unwrap().listed = vec!["echo", "new"];
            open_stream(vec![
                event(&json!({"jsonrpc": "2.0", "method": "notifications/tools/list_changed"})),
                event(&answer(text("changed".into()))),
            ])
        }
        "hang" => std::future::pending().await,
        "huge" => axum::Json(answer(text("x".repeat(6 << 20)))).into_response(),
        "flood" => {
            let note =
                event(&json!({"jsonrpc": "2.0", "method": "n", "params": "y".repeat(10_000)}));
            let notes = stream::repeat_with(move || Ok::<_, std::io::Error>(note.clone()));
            ([("content-type", "text/event-stream")], Body::from_stream(notes)).into_response()
        }
        "outside" => {
            (StatusCode::TEMPORARY_REDIRECT, [("location", "http://127.0.0.2:1/")]).into_response()
        }
        "forget" => {
            log.lock().unwrap().session += 1;
            axum::Json(answer(text("forgotten".into()))).into_response()
        }
        _ => "no message".into_response(),
    }
}

fn config(url: &str) -> String {
    format!(
        "[mcp.far]\nurl = \"{url}\"\napi_key_env = \"{KEY}\"\n[mcp.far.effects]\necho = \"read\"\n"
    )
}

async fn results(service: &Service, run: &Value) -> Vec<String> {
    let completed = events(service, run, "tool_call.completed").await;
    completed.iter().map(|event| event["content"].as_str().unwrap().to_owned()).collect()
}

async fn tools_are_called_over_http(db: Db) {
    let mock = Mock::start().await;
    let calls = [
        ("mcp:far/echo", json!({"n": 5})),
        ("mcp:far/stream", json!({})),
        ("mcp:far/asks", json!({})),
        ("mcp:far/change", json!({})),
    ];
    let setup =
        with(Setup::new().config(&config(&mock.url)), "['mcp:far/*']", "{autonomy: full}", &calls);
    let denied = "model: scripted/worker\ntools: ['mcp:far/*']\nenable_double_confirmation: false\ngovernance: {autonomy: full, network: {deny: [127.0.0.1]}}\n";
    let service = setup.agent("denied", denied).start(db).await;
    until_up(&service).await;
    let run = service.run("denied", &json!({})).await;
    let blocked = events(&service, &run, "tool_call.blocked").await;
    assert!(blocked.len() >= 3 && blocked.iter().all(|it| it["rule"] == "network"), "{blocked:#?}");

    let run = service.run("worker", &json!({})).await;
    let told = results(&service, &run).await;
    let echoed: Value = serde_json::from_str(&told[0]).unwrap();
    assert_eq!(echoed["params"]["arguments"], json!({"n": 5}));
    let started = events(&service, &run, "tool_call.started").await;
    assert_eq!(echoed["params"]["_meta"]["toolloop/effect-key"], started[0]["effect_key"]);
    assert!(!told[0].contains(env!("CARGO_MANIFEST_DIR")), "{}", told[0]);
    assert_eq!(told[1..], ["streamed", "you live", "changed"]);
    assert_eq!(started[0]["actions"][1]["kind"], "fetch", "{:#}", started[0]);
    let path = format!("/v1/runs/{}", run["run_id"].as_str().unwrap());
    let stored = service.get(&path).await.body;
    assert_eq!(stored["labels"], json!(["untrusted"]));
    assert_eq!(stored["budget"]["used"]["network_requests"], 4, "{:#}", stored["budget"]);

    let (headers, _) = &mock.messages("tools/call")[0];
    assert_eq!(headers["mcp-session-id"], "session-0");
    assert_eq!(headers["mcp-protocol-version"], "2025-06-18");
    assert_eq!(headers["authorization"], format!("Bearer {}", env!("CARGO_MANIFEST_DIR")));
    assert_eq!(headers["accept"], "application/json, text/event-stream");
    service.until("/v1/tools/mcp%3Afar%2Fnew", |tool| tool["name"] == "mcp:far/new").await;
    let refused = || {
        let log = mock.log.lock().unwrap();
        log.messages.iter().any(|(_, it)| it["id"] == "q" && it["error"]["code"] == -32601)
    };
    for _ in 0..6000 {
        if refused() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(refused(), "a question of the server is refused");
    let tool = service.get("/v1/tools/mcp%3Afar%2Fecho").await.body;
    assert_eq!((&tool["effect"], &tool["sandbox"]), (&json!("read"), &Value::Null));
}

async fn hostile_servers_end_in_results(db: Db) {
    let mock = Mock::start().await;
    let names = ["huge", "flood", "outside", "broken", "hang", "echo"];
    let calls = names.map(|name| format!("mcp:far/{name}"));
    let calls: Vec<(&str, Value)> = calls.iter().map(|name| (name.as_str(), json!({}))).collect();
    let setup =
        with(Setup::new().config(&config(&mock.url)), "['mcp:far/*']", "{autonomy: full}", &calls)
            .agent(
                "patient",
                "model: scripted/worker\ntools: ['mcp:far/*']\nenable_double_confirmation: false\n\
             limits: {error_threshold: 50, max_iterations: 20, max_iterations_per_attempt: 20}\n\
             tool_options: {'mcp:far/hang': {timeout_seconds: 1}}\ngovernance: {autonomy: full}\n",
            );
    let service = setup.start(db).await;
    until_up(&service).await;
    let run = service.run("patient", &json!({})).await;
    let told = results(&service, &run).await;
    assert_eq!(told.len(), 6, "{run:#} {told:#?}");
    assert!(told[0].contains("it is too large"), "{:.300}", told[0]);
    assert!(
        told[1].contains("cannot be read") && told[1].contains("unknown whether"),
        "{:.300}",
        told[1]
    );
    assert!(told[2].contains("to another host"), "{}", told[2]);
    assert!(told[3].contains("cannot be read"), "{}", told[3]);
    assert!(told[4].contains("did not finish within 1 seconds"), "{}", told[4]);
    assert!(told[5].contains("arguments"), "{}", told[5]);
    for _ in 0..6000 {
        if !mock.messages("notifications/cancelled").is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (_, hung) = mock.messages("tools/call")[4].clone();
    let (_, cancelled) = mock.messages("notifications/cancelled")[0].clone();
    assert_eq!(cancelled["params"]["requestId"], hung["id"]);
    assert!(service.peak_memory_mib() < 300, "{} MiB", service.peak_memory_mib());
}

async fn until(what: impl Fn() -> bool) {
    for _ in 0..6000 {
        if what() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it does not come about");
}

/// A call that comes while another one begins a session in the place of the lost one.
async fn calls_share_a_session_that_is_begun_anew(service: &Service, mock: &Mock) {
    let count = |method: &str| mock.messages(method).len();
    let (sessions, calls, inputs) = (count("initialize"), count("tools/call"), json!({}));
    mock.log.lock().unwrap().holds_sessions = true;
    service.run("worker", &inputs).await;
    let second = async {
        until(|| count("initialize") > sessions).await;
        let released = async {
            until(|| count("tools/call") >= calls + 3).await;
            mock.log.lock().unwrap().holds_sessions = false;
        };
        tokio::join!(service.run("echo", &inputs), released).0
    };
    let (first, second) = tokio::join!(service.run("echo", &inputs), second);
    for run in [first, second] {
        let told = &results(service, &run).await[0];
        assert!(told.contains("arguments"), "{told}");
    }
    assert_eq!(count("initialize"), sessions + 1);
}

async fn a_server_that_forgets_or_goes_is_found_again(db: Db) {
    let mock = Mock::start().await;
    let calls = [("mcp:far/forget", json!({}))];
    let setup = with(Setup::new().config(&config(&mock.url)), "['mcp:far/*']", "{autonomy: full}", &calls)
        .agent("echo", "model: scripted/echo\ntools: ['mcp:far/echo']\nenable_double_confirmation: false\ngovernance: {autonomy: full}\n")
        .scenario("echo", "steps: [{tool_calls: [{tool: 'mcp:far/echo', arguments: {}}]}, {text: done}]");
    let service = setup.start(db).await;
    until_up(&service).await;
    for sessions in [2, 3] {
        let run = service.run("worker", &json!({})).await;
        assert_eq!(results(&service, &run).await, ["forgotten"]);
        let run = service.run("echo", &json!({})).await;
        let told = &results(&service, &run).await[0];
        assert!(told.contains("arguments"), "in a new session: {told}");
        assert_eq!(mock.messages("initialize").len(), sessions);
    }
    calls_share_a_session_that_is_begun_anew(&service, &mock).await;
    let ready = service.get("/readyz").await.body;
    assert_eq!(ready["mcp_servers"], json!([]));

    let address = mock.end().await;
    let run = service.run("echo", &json!({})).await;
    let told = results(&service, &run).await[0].clone();
    assert!(told.starts_with("Error: The MCP server far did not "), "{told}");
    service.until("/readyz", |ready| ready["mcp_servers"][0]["server"] == "far").await;
    service.until_logged("cannot be reached").await;
    let _again = Mock::on(address.listen(1024).unwrap());
    service.until("/readyz", |ready| ready["mcp_servers"] == json!([])).await;
    let run = service.run("echo", &json!({})).await;
    assert!(results(&service, &run).await[0].contains("arguments"));
}
