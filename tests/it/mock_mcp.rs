//! An MCP server over HTTP that speaks one era of the protocol or both, and refuses what that does
//! not allow.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

const VERSION: &str = "2026-07-28";
const META: &str = "io.modelcontextprotocol/";
const SESSION: &str = "the-session";

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Speaks {
    New,
    Both,
    Old,
    OldWithoutSessions,
    /// Only this version, in the way of the new era.
    Version(&'static str),
    /// It takes requests, and answers none.
    Nothing,
}

struct ServerState {
    speaks: Speaks,
    /// Methods that are answered after it was asked in both eras.
    slow: &'static [&'static str],
    messages: Vec<(HeaderMap, Value)>,
    /// Why messages were refused that belong to no era that the server speaks.
    refused: Vec<String>,
    client_disconnected: bool,
}

type Log = Arc<Mutex<ServerState>>;

pub struct Mock {
    pub url: String,
    log: Log,
    server: JoinHandle<()>,
}

impl Drop for Mock {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Mock {
    pub async fn start(port: u16, speaks: Speaks) -> Self {
        Self::slow(port, speaks, &[]).await
    }

    /// One that takes its time for some methods.
    pub async fn slow(port: u16, speaks: Speaks, slow: &'static [&'static str]) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", port)).await.unwrap();
        let url = format!("http://{}/mcp", listener.local_addr().unwrap());
        let state = ServerState {
            speaks,
            slow,
            messages: Vec::new(),
            refused: Vec::new(),
            client_disconnected: false,
        };
        let log = Arc::new(Mutex::new(state));
        let app = Router::new().fallback(respond).with_state(Arc::clone(&log));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, log, server }
    }

    /// From now on.
    pub fn speak(&self, speaks: Speaks) {
        self.log.lock().unwrap().speaks = speaks;
    }

    /// Headers and body of each message with that method.
    pub fn messages(&self, method: &str) -> Vec<(HeaderMap, Value)> {
        let log = self.log.lock().unwrap();
        log.messages.iter().filter(|(_, body)| body["method"] == method).cloned().collect()
    }

    /// Why messages of the new era were refused.
    pub fn refused(&self) -> Vec<String> {
        self.log.lock().unwrap().refused.clone()
    }

    /// Whether a client disconnected during a call.
    pub fn client_disconnected(&self) -> bool {
        self.log.lock().unwrap().client_disconnected
    }
}

/// Records when the client stops reading the answer.
struct DisconnectGuard(Log);

impl Drop for DisconnectGuard {
    fn drop(&mut self) {
        self.0.lock().unwrap().client_disconnected = true;
    }
}

fn event(message: &Value) -> Bytes {
    format!("data: {message}\n\n").into()
}

fn streamed(events: Vec<Bytes>) -> Response {
    let events = stream::iter(events.into_iter().map(Ok::<_, std::io::Error>));
    ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
}

fn error(status: StatusCode, id: &Value, code: i64, message: &str, data: &Value) -> Response {
    let error = json!({"code": code, "message": message, "data": data});
    let body = json!({"jsonrpc": "2.0", "id": id, "error": error});
    (status, axum::Json(body)).into_response()
}

fn is_introduced(log: &Log) -> bool {
    log.lock().unwrap().messages.iter().any(|(_, asked)| asked["method"] == "initialize")
}

async fn respond(State(log): State<Log>, request: Request) -> Response {
    let (head, body) = request.into_parts();
    let body = axum::body::to_bytes(body, 1 << 20).await.unwrap();
    let asked: Value = serde_json::from_slice(&body).unwrap_or_default();
    let (speaks, is_slow) = {
        let mut log = log.lock().unwrap();
        log.messages.push((head.headers.clone(), asked.clone()));
        (log.speaks, log.slow.iter().any(|method| asked["method"] == *method))
    };
    while is_slow && asked["method"] == "server/discover" && !is_introduced(&log) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    if is_slow {
        // Both answers come in the order of the questions, unless the second is not slow.
        let pause = if asked["method"] == "server/discover" { 100 } else { 300 };
        tokio::time::sleep(Duration::from_millis(pause)).await;
    }
    let says_new = asked["params"]["_meta"][format!("{META}protocolVersion")].is_string();
    match speaks {
        Speaks::Nothing => std::future::pending().await,
        Speaks::New => answer_new_era(&log, &head.headers, &asked, &[VERSION]),
        Speaks::Version(only) => answer_new_era(&log, &head.headers, &asked, &[only]),
        Speaks::Both if says_new => {
            answer_new_era(&log, &head.headers, &asked, &[VERSION, "2025-11-25"])
        }
        Speaks::Old | Speaks::Both => answer_old_era(&head.headers, &asked, true),
        Speaks::OldWithoutSessions => answer_old_era(&head.headers, &asked, false),
    }
}

fn answer_old_era(headers: &HeaderMap, asked: &Value, has_sessions: bool) -> Response {
    let (method, id) = (asked["method"].as_str().unwrap_or_default(), &asked["id"]);
    let answer = |result: Value| axum::Json(json!({"jsonrpc": "2.0", "id": id, "result": result}));
    if method == "initialize" {
        let introduced = json!({"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "m", "version": "1"}});
        let session = has_sessions.then_some([("mcp-session-id", SESSION)]);
        return (session, answer(introduced)).into_response();
    }
    if has_sessions && headers.get("mcp-session-id").is_none_or(|name| name != SESSION) {
        return (StatusCode::BAD_REQUEST, "Bad Request: No valid session ID provided")
            .into_response();
    }
    match method {
        _ if id.is_null() => StatusCode::ACCEPTED.into_response(),
        "ping" => answer(json!({})).into_response(),
        "tools/list" => answer(json!({"tools": tools()})).into_response(),
        "tools/call" => {
            let content = json!({"new": false, "arguments": asked["params"]["arguments"]});
            answer(json!({"content": [{"type": "text", "text": content.to_string()}]}))
                .into_response()
        }
        _ => error(StatusCode::OK, id, -32601, "Method not found", &Value::Null),
    }
}

/// What is wrong with the headers of a message, or with what it says of itself.
fn header_error(headers: &HeaderMap, asked: &Value) -> Option<(i64, String)> {
    let header = |name: &str| {
        let value = headers.get(name)?.to_str().unwrap();
        let coded = value.strip_prefix("=?base64?").and_then(|it| it.strip_suffix("?="));
        Some(coded.map_or_else(
            || value.to_owned(),
            |coded| String::from_utf8(BASE64_STANDARD.decode(coded).unwrap()).unwrap(),
        ))
    };
    let params = &asked["params"];
    let meta = &params["_meta"];
    let version = meta[format!("{META}protocolVersion")].as_str();
    if version.is_none() || !meta[format!("{META}clientCapabilities")].is_object() {
        return Some((-32602, "no _meta".to_owned()));
    }
    let argument = |pointer: &str| match params["arguments"].pointer(pointer) {
        None | Some(Value::Null) => None,
        Some(Value::String(text)) => Some(text.clone()),
        Some(value) => Some(value.to_string()),
    };
    let mut expected = vec![
        ("mcp-protocol-version", version.map(str::to_owned)),
        ("mcp-method", asked["method"].as_str().map(str::to_owned)),
        ("mcp-name", params["name"].as_str().map(str::to_owned)),
        ("mcp-session-id", None),
        ("last-event-id", None),
    ];
    if params["name"] == "echo" {
        expected.push(("mcp-param-region", argument("/region")));
        expected.push(("mcp-param-note", argument("/note")));
        expected.push(("mcp-param-dry", argument("/in/dry")));
    }
    let odd = expected.into_iter().find(|(name, value)| header(name) != *value)?;
    Some((-32020, format!("Header mismatch: {} is {:?}", odd.0, header(odd.0))))
}

fn answer_new_era(log: &Log, headers: &HeaderMap, asked: &Value, versions: &[&str]) -> Response {
    let (method, id) = (asked["method"].as_str().unwrap_or_default(), &asked["id"]);
    let note = |why: &str| log.lock().unwrap().refused.push(format!("{method}: {why}"));
    if let Some((code, why)) = header_error(headers, asked) {
        note(&why);
        return error(StatusCode::BAD_REQUEST, id, code, &why, &Value::Null);
    }
    if !versions.iter().any(|version| headers["mcp-protocol-version"] == *version) {
        let data = json!({"supported": versions, "requested": VERSION});
        return error(StatusCode::BAD_REQUEST, id, -32022, "Unsupported protocol version", &data);
    }
    let complete = |mut result: Value| {
        result["resultType"] = "complete".into();
        axum::Json(json!({"jsonrpc": "2.0", "id": id, "result": result})).into_response()
    };
    match method {
        "server/discover" => {
            complete(json!({"supportedVersions": versions, "capabilities": {"tools": {}}}))
        }
        "tools/list" => {
            complete(json!({"tools": tools(), "ttlMs": 3_600_000, "cacheScope": "public"}))
        }
        "tools/call" => answer_call(log, asked, complete),
        _ => {
            note("unknown");
            error(StatusCode::NOT_FOUND, id, -32601, "Method not found", &Value::Null)
        }
    }
}

fn answer_call(log: &Log, asked: &Value, complete: impl Fn(Value) -> Response) -> Response {
    let (id, params) = (&asked["id"], &asked["params"]);
    let text = |text: &str| json!({"content": [{"type": "text", "text": text}]});
    match params["name"].as_str().unwrap_or_default() {
        "stream" => {
            let mut result = text("streamed");
            result["resultType"] = "complete".into();
            let progress =
                json!({"jsonrpc": "2.0", "method": "notifications/progress", "params": {}});
            let answer = json!({"jsonrpc": "2.0", "id": id, "result": result});
            streamed(vec![Bytes::from(":\n\n"), event(&progress), event(&answer)])
        }
        "breaks" => streamed(vec![Bytes::from(": alive\n\n")]),
        "fails" => error(StatusCode::BAD_REQUEST, id, -32021, "no", &Value::Null),
        "hangs" => {
            let guard = DisconnectGuard(Arc::clone(log));
            let alive = stream::unfold(guard, |guard| async {
                tokio::time::sleep(Duration::from_millis(50)).await;
                Some((Ok::<_, std::io::Error>(Bytes::from(":\n\n")), guard))
            });
            ([("content-type", "text/event-stream")], Body::from_stream(alive.boxed()))
                .into_response()
        }
        "asks" => {
            let form = json!({"type": "object", "required": ["city"], "properties": {"city": {"type": "string"}}});
            let ask = json!({"method": "elicitation/create", "params": {"message": "Where?", "requestedSchema": form}});
            match params["requestState"].as_str() {
                Some("kept as it is") => complete(text(&params["inputResponses"].to_string())),
                Some(other) => complete(text(&format!("it is {other}"))),
                None => axum::Json(json!({"jsonrpc": "2.0", "id": id, "result": {
                    "resultType": "input_required", "inputRequests": {"where": ask},
                    "requestState": "kept as it is",
                }}))
                .into_response(),
            }
        }
        _ => complete(text(&json!({"new": true, "arguments": params["arguments"]}).to_string())),
    }
}

fn tools() -> Vec<Value> {
    let tool = |name: &str, properties: Value| {
        let schema = json!({"type": "object", "properties": properties});
        json!({"name": name, "description": format!("Does {name}."), "inputSchema": schema})
    };
    let marked = |kind: &str, name: &str| json!({"type": kind, "x-mcp-header": name});
    let echo = json!({
        "region": {"type": ["string", "null"], "x-mcp-header": "Region"},
        "note": marked("string", "Note"),
        "in": {"type": "object", "properties": {"dry": marked("boolean", "Dry")}},
    });
    let mut tools = vec![
        tool("echo", echo),
        tool("misplaced", json!({"all": {"type": "array", "items": marked("string", "All")}})),
    ];
    let plain = ["stream", "breaks", "fails", "hangs", "asks"];
    tools.extend(plain.map(|name| tool(name, json!({}))));
    tools
}
