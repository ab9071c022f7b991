//! What every request passes on its way in and every answer on its way out.
//!
//! Request id in and out, the deadline, panics turned into a 500 that keeps the connection, and
//! problems given their body. Nothing here knows a route; bodies are bounded where they are read
//! ([`super::extract`]), and who may do what is [`super::auth`]'s.

use std::panic::AssertUnwindSafe;
use std::time::Duration;

use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::FutureExt;
use tokio::time::Instant;
use uuid::Uuid;

use super::App;
use super::problem::{Code, Problem};
use super::rate_limit::Standing;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How much later than a handler's own deadline the edge gives up.
const GRACE: Duration = Duration::from_secs(1);

/// When a handler that waits must have answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(pub(crate) Instant);

impl FromRequestParts<App> for Deadline {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let set = parts.extensions.get::<Self>().copied();
        Ok(set.unwrap_or_else(|| Self(Instant::now() + app.settings.request_timeout)))
    }
}

/// The outermost layer.
pub(crate) async fn edge(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let request_id = request_id(&request);
    let uri = request.uri().clone();
    let deadline = Instant::now() + app.settings.request_timeout;
    request.extensions_mut().insert(Deadline(deadline));
    let standing = Standing::default();
    request.extensions_mut().insert(standing.clone());

    let answer = AssertUnwindSafe(next.run(request)).catch_unwind();
    let mut response = match tokio::time::timeout_at(deadline + GRACE, answer).await {
        Ok(Ok(response)) => response,
        Ok(Err(panic)) => Problem::internal(format!("panic: {}", panic_text(panic.as_ref()))).into_response(),
        Err(_) => Problem::new(Code::Timeout, "The answer took too long.").into_response(),
    };
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        response = problem.finish(response, request_id.to_str().unwrap_or_default(), uri.path());
    }
    standing.tell(response.headers_mut());
    response.headers_mut().insert(X_REQUEST_ID, request_id);
    response
}

/// The caller's id where it is short and plain, else a fresh one.
fn request_id(request: &Request) -> HeaderValue {
    let plain = |v: &&HeaderValue| {
        (1..=128).contains(&v.len()) && v.as_bytes().iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(b))
    };
    let given = request.headers().get(X_REQUEST_ID).filter(plain).cloned();
    given.unwrap_or_else(|| {
        let mut buffer = Uuid::encode_buffer();
        let id = Uuid::now_v7().simple().encode_lower(&mut buffer);
        HeaderValue::from_str(id).unwrap_or(HeaderValue::from_static("unknown"))
    })
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> &str {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (_, Some(text)) => text,
        _ => "no message",
    }
}
