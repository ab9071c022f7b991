//! The service whose state the tools of the runs change. It holds calls at the moments at which a
//! process is to die.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode};
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

/// How long the calls may take to come.
const PATIENCE: Duration = Duration::from_mins(5);

/// `hold` says when the first request of a name is held: before its effect, after it, or never.
pub(super) const TOOLS: &str = "
tools:
  - {name: once, description: Once., method: POST, path: '/{{ args.hold }}', body: {name: '{{ args.name }}'}}
  - {name: asked, description: Once; knows., method: POST, path: '/{{ args.hold }}', body: {name: '{{ args.name }}'}, reconcile: {path: '/outcomes/{{ call.key }}'}}
  - {name: again, description: As often as you like., effect: idempotent, method: POST, path: '/{{ args.hold }}', body: {name: '{{ args.name }}'}}
  - {name: look, description: Looks., effect: read, method: POST, path: '/{{ args.hold }}', body: {name: '{{ args.name }}'}}
";

struct Request {
    name: String,
    key: String,
    took_effect: bool,
}

#[derive(Default)]
struct Shared {
    requests: Mutex<Vec<Request>>,
    /// How many requests have been held.
    held: watch::Sender<usize>,
    /// Whether what is held is answered.
    is_released: watch::Sender<bool>,
}

pub(super) struct Effects {
    pub(super) url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl Effects {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::<Shared>::default();
        let app = Router::new()
            .route("/{hold}", post(record))
            .route("/outcomes/{key}", get(outcome))
            .with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, shared, server }
    }

    /// How many requests have been held so far.
    pub(super) fn held(&self) -> usize {
        *self.shared.held.borrow()
    }

    pub(super) async fn until_held(&self, count: usize) {
        let mut held = self.shared.held.subscribe();
        let all = tokio::time::timeout(PATIENCE, held.wait_for(|held| *held >= count)).await;
        assert!(all.is_ok(), "{} of {count} calls came", self.held());
    }

    /// Holds requests, or answers those that are held.
    pub(super) fn hold(&self, is_held: bool) {
        self.shared.is_released.send_replace(!is_held);
    }

    /// The keys of all requests of a name.
    pub(super) fn requests_of(&self, name: &str) -> Vec<String> {
        let requests = self.shared.requests.lock();
        requests.iter().filter(|it| it.name == name).map(|it| it.key.clone()).collect()
    }

    /// How many requests of a name took effect.
    pub(super) fn effects_of(&self, name: &str) -> usize {
        let requests = self.shared.requests.lock();
        requests.iter().filter(|it| it.name == name && it.took_effect).count()
    }
}

impl Drop for Effects {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn record(
    State(shared): State<Arc<Shared>>,
    Path(hold): Path<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Json<Value> {
    let name = body["name"].as_str().unwrap().to_owned();
    let key = headers.get("idempotency-key").map_or("", |key| key.to_str().unwrap()).to_owned();
    let is_held = {
        let mut requests = shared.requests.lock();
        let is_held = hold != "never" && !requests.iter().any(|earlier| earlier.name == name);
        requests.push(Request { name, key, took_effect: !is_held || hold == "after" });
        is_held
    };
    if is_held {
        shared.held.send_modify(|held| *held += 1);
        shared.is_released.subscribe().wait_for(|is_released| *is_released).await.unwrap();
    }
    Json(json!({"ok": true}))
}

/// What became of a call, by its key.
async fn outcome(
    State(shared): State<Arc<Shared>>,
    Path(key): Path<String>,
) -> Result<Json<Value>, StatusCode> {
    let requests = shared.requests.lock();
    let took_effect = requests.iter().any(|request| request.key == key && request.took_effect);
    if took_effect { Ok(Json(json!({"ok": "then"}))) } else { Err(StatusCode::NOT_FOUND) }
}
