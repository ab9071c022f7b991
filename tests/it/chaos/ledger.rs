//! The service whose state the tools of the runs change: it remembers every request.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::routing::post;
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A request that took effect: whose, which step, and the key that makes a repetition harmless.
type Effect = (String, String, String);

pub(super) struct Ledger {
    pub(super) url: String,
    effects: Arc<Mutex<Vec<Effect>>>,
    server: JoinHandle<()>,
}

impl Ledger {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let effects = Arc::<Mutex<Vec<Effect>>>::default();
        let app = Router::new().route("/{step}", post(record)).with_state(Arc::clone(&effects));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, effects, server }
    }

    /// Steps and keys of one name.
    pub(super) fn effects_of(&self, name: &str) -> Vec<(String, String)> {
        let effects = self.effects.lock();
        let of_name = effects.iter().filter(|(of, ..)| of == name);
        of_name.map(|(_, step, key)| (step.clone(), key.clone())).collect()
    }
}

impl Drop for Ledger {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn record(
    State(effects): State<Arc<Mutex<Vec<Effect>>>>,
    Path(step): Path<String>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Json<Value> {
    let key = headers.get("idempotency-key").map_or("", |key| key.to_str().unwrap());
    let effect = (body["name"].as_str().unwrap().to_owned(), step, key.to_owned());
    effects.lock().push(effect);
    tokio::time::sleep(Duration::from_millis(20)).await;
    Json(json!({"ok": true}))
}
