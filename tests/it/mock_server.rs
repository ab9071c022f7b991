//! A model server with the API of a provider: a queue of answers, a record of what was asked.
//!
//! What an API refuses and how it answers is its [`Api`]'s. Every request is checked before an
//! answer is taken from the script, and a refused one is answered with 400, as the real server
//! would.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// What the server does with one valid request.
#[derive(Debug, Clone)]
pub(crate) enum Reply {
    /// A text answer.
    Text(String),
    /// Thinking, where it was asked for, and tool calls: wire name and arguments.
    Calls(Vec<(String, Value)>),
    /// A body with this status, as it is.
    Raw(u16, String),
}

impl Reply {
    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(crate) fn call(tool: &str, arguments: Value) -> Self {
        Self::Calls(vec![(tool.to_owned(), arguments)])
    }
}

/// One API.
#[derive(Clone, Copy)]
pub(crate) struct Api {
    pub(crate) path: &'static str,
    /// Refuses what the real API refuses.
    pub(crate) check: fn(&HeaderMap, &Value) -> Result<(), String>,
    /// The error body that says so.
    pub(crate) refusal: fn(&str) -> Value,
    /// Content type and body of an answer to this request, streamed if it asks for that. The number
    /// makes ids distinct.
    pub(crate) answer: fn(&Value, usize, &Reply) -> (&'static str, String),
}

/// A request as it was received.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedRequest {
    pub(crate) body: Value,
    /// Why it was refused, if it was.
    pub(crate) refusal: Option<String>,
}

struct Shared {
    api: Api,
    script: Mutex<VecDeque<Reply>>,
    seen: Mutex<Vec<ReceivedRequest>>,
}

/// A running server; it stops when dropped.
pub(crate) struct MockServer {
    pub(crate) base_url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl MockServer {
    pub(crate) async fn start(api: Api, script: impl IntoIterator<Item = Reply>) -> Self {
        let script = Mutex::new(script.into_iter().collect());
        let shared = Arc::new(Shared { api, script, seen: Mutex::default() });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base_url = format!("http://{}", listener.local_addr().unwrap());
        let app =
            Router::new().route(api.path, axum::routing::post(respond)).with_state(shared.clone());
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { base_url, shared, server }
    }

    /// All requests so far; none of them may have been refused.
    pub(crate) fn requests(&self) -> Vec<Value> {
        let seen = self.shared.seen.lock().unwrap().clone();
        let refusals: Vec<&String> = seen.iter().filter_map(|seen| seen.refusal.as_ref()).collect();
        assert!(refusals.is_empty(), "the server refused: {refusals:#?}");
        seen.into_iter().map(|seen| seen.body).collect()
    }
}

impl Drop for MockServer {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn respond(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Bytes) -> Response {
    let parsed: Result<Value, _> = serde_json::from_slice(&body);
    let refusal = match &parsed {
        Ok(body) => (shared.api.check)(&headers, body).err(),
        Err(error) => Some(format!("the body is not JSON: {error}")),
    };
    let body = parsed.unwrap_or_default();
    let number = {
        let mut seen = shared.seen.lock().unwrap();
        seen.push(ReceivedRequest { body: body.clone(), refusal: refusal.clone() });
        seen.len()
    };
    let reply = match refusal {
        Some(refusal) => Err(refusal),
        None => shared
            .script
            .lock()
            .unwrap()
            .pop_front()
            .ok_or("the test scripted no answer".to_owned()),
    };
    match reply {
        Ok(Reply::Raw(status, text)) => {
            (StatusCode::from_u16(status).unwrap(), text).into_response()
        }
        Ok(reply) => {
            let (content_type, text) = (shared.api.answer)(&body, number, &reply);
            ([("content-type", content_type)], text).into_response()
        }
        Err(refusal) => {
            (StatusCode::BAD_REQUEST, (shared.api.refusal)(&refusal).to_string()).into_response()
        }
    }
}

/// The fields of an object are among these.
pub(crate) fn only(object: &Value, fields: &[&str], what: &str) -> Result<(), String> {
    let object =
        object.as_object().ok_or(format!("{what}: an object is expected, not {object}"))?;
    match object.keys().find(|field| !fields.contains(&field.as_str())) {
        Some(unknown) => Err(format!("{what}.{unknown}: Extra inputs are not permitted")),
        None => Ok(()),
    }
}

/// Usage that grows with what was sent.
pub(crate) fn tokens(value: &Value) -> Value {
    json!(value.to_string().len() / 4 + 1)
}
