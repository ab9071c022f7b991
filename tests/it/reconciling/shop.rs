//! A service whose orders are to be made once, and which knows what became of them. The first request of an
//! order is held for as long as its process lives, before its effect or after it, as its name begins.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;

const PATIENCE: Duration = Duration::from_mins(1);

/// In the environment of every test, and long enough to be looked for.
pub(super) const SECRET: &str = "CARGO_MANIFEST_DIR";

/// The tools: an order is asked about by its key. The end of its name says what the shop answers then.
pub(super) fn tools(url: &str) -> String {
    format!(
        "base_url: {url}
tools:
  - name: order
    description: Orders.
    method: POST
    path: /orders
    body: {{name: '{{{{ args.name }}}}', count: '{{{{ args.count }}}}'}}
    input_schema: {{type: object, required: [name], properties: {{name: {{type: string}}, count: {{type: integer}}}}}}
    response: {{pointer: /order}}
    reconcile:
      path: '/orders/{{{{ call.key }}}}'
      query: {{name: '{{{{ args.name }}}}', count: '{{{{ args.count }}}}', id: '{{{{ call.id }}}}'}}
      headers: {{x-secret: '{{{{ env.{SECRET} }}}}'}}
  - {{name: plain, description: Orders., method: POST, path: /orders, body: {{name: '{{{{ args.name }}}}'}}}}
  - {{name: look, description: Looks., method: GET, path: /looks, query: {{name: '{{{{ args.name }}}}'}}, effect: read}}
"
    )
}

#[derive(Debug, Clone)]
pub(super) struct Order {
    pub(super) name: String,
    pub(super) count: Value,
    pub(super) key: String,
    pub(super) took_effect: bool,
}

/// A question about an order.
#[derive(Debug, Clone)]
pub(super) struct Asked {
    pub(super) name: String,
    pub(super) count: String,
    pub(super) key: String,
    pub(super) id: String,
}

#[derive(Default)]
struct Shared {
    orders: Mutex<Vec<Order>>,
    asked: Mutex<Vec<Asked>>,
    held: watch::Sender<usize>,
    /// Whether questions are held.
    is_busy: watch::Sender<bool>,
}

pub(super) struct Shop {
    pub(super) url: String,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

impl Shop {
    pub(super) async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared = Arc::<Shared>::default();
        let app = Router::new()
            .route("/orders", post(order))
            .route("/orders/{key}", get(outcome))
            .route("/looks", get(async || "seen"))
            .with_state(Arc::clone(&shared));
        let server = tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
        Self { url, shared, server }
    }

    pub(super) fn orders_of(&self, name: &str) -> Vec<Order> {
        let orders = self.shared.orders.lock();
        orders.iter().filter(|order| order.name == name).cloned().collect()
    }

    pub(super) fn effects_of(&self, name: &str) -> usize {
        self.orders_of(name).iter().filter(|order| order.took_effect).count()
    }

    pub(super) fn asked_of(&self, name: &str) -> Vec<Asked> {
        let asked = self.shared.asked.lock();
        asked.iter().filter(|asked| asked.name == name).cloned().collect()
    }

    /// Waits until so many orders, or questions, have been held.
    pub(super) async fn until_held(&self, count: usize) {
        let mut held = self.shared.held.subscribe();
        let all = tokio::time::timeout(PATIENCE, held.wait_for(|held| *held >= count)).await;
        assert!(all.is_ok(), "{} of {count} came", *self.shared.held.borrow());
    }

    /// Holds questions from now on, or answers them.
    pub(super) fn hold_questions(&self, is_busy: bool) {
        self.shared.is_busy.send_replace(is_busy);
    }
}

impl Drop for Shop {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn order(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Json(body): Json<Value>,
) -> Json<Value> {
    let name = body["name"].as_str().unwrap().to_owned();
    let key = headers.get("idempotency-key").map_or("", |key| key.to_str().unwrap()).to_owned();
    let is_held = {
        let mut orders = shared.orders.lock();
        let is_first = !orders.iter().any(|earlier| earlier.name == name);
        let is_held = is_first && !name.starts_with("never");
        let took_effect = !is_held || name.starts_with("after");
        orders.push(Order { name: name.clone(), count: body["count"].clone(), key, took_effect });
        is_held
    };
    if is_held {
        shared.held.send_modify(|held| *held += 1);
        std::future::pending::<()>().await;
    }
    Json(json!({"order": format!("order of {name}")}))
}

async fn outcome(
    State(shared): State<Arc<Shared>>,
    Path(key): Path<String>,
    Query(query): Query<Vec<(String, String)>>,
    headers: HeaderMap,
) -> Response {
    let of = |name: &str| {
        let value = query.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone());
        value.unwrap_or_default()
    };
    let name = of("name");
    let asked = Asked { name: name.clone(), count: of("count"), key: key.clone(), id: of("id") };
    shared.asked.lock().push(asked);
    if *shared.is_busy.borrow() {
        shared.held.send_modify(|held| *held += 1);
        let _ = shared.is_busy.subscribe().wait_for(|is_busy| !is_busy).await;
    }
    match name.rsplit(' ').next().unwrap() {
        "500" => (StatusCode::INTERNAL_SERVER_ERROR, "the password is hunter2").into_response(),
        "302" => (StatusCode::FOUND, [(header::LOCATION, "/looks")]).into_response(),
        "large" => Body::from(Bytes::from(vec![b'x'; 16 << 20])).into_response(),
        "secret" => {
            let secret = headers["x-secret"].to_str().unwrap();
            Json(json!({"order": format!("seen with {secret}")})).into_response()
        }
        "odd" => Json(json!({"other": 1})).into_response(),
        _ => {
            let orders = shared.orders.lock();
            let is_there = orders.iter().any(|order| order.key == key && order.took_effect);
            if !is_there {
                return StatusCode::NOT_FOUND.into_response();
            }
            Json(json!({"order": format!("order of {name}")})).into_response()
        }
    }
}
