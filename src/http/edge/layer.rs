//! The outermost middleware.
//!
//! Assigns the request id, bounds the request head, sets the deadline, turns panics into a 500 and
//! writes the body of problems. It is the same for all routes. Bodies are bounded by
//! [`super::extract`], authorization is in [`super::auth`], response headers and compression are in
//! [`super::responses`].

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

use super::key_cache::Auth;
use super::large_answers;
use super::large_bodies::Sender;
use super::metrics::{method_label, route_label};
use super::open_requests::Counted;
use super::origin::{check_host, check_local};
use super::problem::{Code, Problem};
use super::rate_limit::RateLimitHeaders;
use super::responses;
use super::responses::X_RUN_ID;
use super::server::Reserved;
use crate::fairness::{CpuAccount, FairTask};
use crate::http::state::App;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// How long after the handler's own deadline the middleware times out.
const GRACE: Duration = Duration::from_secs(1);
const TOO_LONG: &str =
    "The request took longer than server.request_timeout allows; it may have taken effect.";

/// The paths that are served while all connections are taken.
const PROBES: [&str; 4] = ["/healthz", "/readyz", "/v1/healthz", "/v1/readyz"];
/// Maximum length of path and query, in bytes.
const TARGET_BYTES: usize = 16 << 10;
/// Maximum number of headers, and their maximum total size in bytes.
const HEADERS: usize = 100;
const HEADER_BYTES: usize = 64 << 10;

/// When a handler must have answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deadline(pub(crate) Instant);

impl FromRequestParts<App> for Deadline {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let set = parts.extensions.get::<Self>().copied();
        Ok(set.unwrap_or_else(|| Self(Instant::now() + app.settings.request_timeout)))
    }
}

pub(crate) async fn edge(State(app): State<App>, mut request: Request, next: Next) -> Response {
    let request_id = request_id(&request);
    let uri = request.uri().clone();
    let (route, method) = (request.extensions().get().cloned(), method_label(request.method()));
    let since = Instant::now();
    let takes_gzip = responses::accepts_gzip(request.headers());
    let deadline = Instant::now() + app.settings.request_timeout;
    request.extensions_mut().insert(Deadline(deadline));
    let rate_limit = RateLimitHeaders::default();
    request.extensions_mut().insert(rate_limit.clone());

    let counted = Counted::default();
    request.extensions_mut().insert(counted.clone());
    let payer = CpuAccount::default();
    request.extensions_mut().insert(payer.clone());
    request.extensions_mut().insert(Sender::default());

    let cors = &app.settings.cors;
    let origin = cors.allows(request.headers()).cloned();
    let preflight = cors.preflight(request.method(), request.headers());
    let mut response = match check_head(&app, &request).map(|()| preflight) {
        Ok(Some(answer)) => answer,
        Ok(None) => {
            let answer = AssertUnwindSafe(next.run(request)).catch_unwind();
            let answer = FairTask::new(payer, answer);
            match tokio::time::timeout_at(deadline + GRACE, answer).await {
                Ok(Ok(response)) => response,
                Ok(Err(panic)) => {
                    Problem::internal(format!("panic: {}", panic_text(panic.as_ref())))
                        .into_response()
                }
                Err(_) => Problem::new(Code::Timeout, TOO_LONG).into_response(),
            }
        }
        Err(problem) => problem.into_response(),
    };
    response = large_answers::with_place(response).await.unwrap_or_else(Problem::into_response);
    let mut code = None;
    if let Some(problem) = response.extensions_mut().remove::<Problem>() {
        code = Some(problem.code().name());
        let request_id = request_id.to_str().unwrap_or_default();
        response = problem.finish(response, request_id, uri.path());
    }
    let route = route_label(route.as_ref());
    (app.metrics.on_response)(route, method, response.status(), since.elapsed());
    tracing::debug!(
        method,
        route,
        status = response.status().as_u16(),
        code,
        subject = counted.subject(),
        latency_ms = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX),
        request_id = request_id.to_str().unwrap_or_default(),
        run_id = response.headers().get(X_RUN_ID).and_then(|id| id.to_str().ok()),
        "answered"
    );
    let headers = response.headers_mut();
    rate_limit.apply_to(headers);
    headers.insert(X_REQUEST_ID, request_id);
    cors.share(origin, headers);
    responses::protect(headers);
    counted.until_sent(responses::compress(response, takes_gzip).await)
}

/// Rejects request heads that are too large (the server's own limits are higher, so that the client
/// gets a problem document instead of a bare 431), requests on connections that are reserved for
/// probes, requests without a clear host, and requests of foreign pages where there is no
/// authentication.
fn check_head(app: &App, request: &Request) -> Result<(), Problem> {
    let is_reserved = request.extensions().get::<Reserved>().is_some();
    if is_reserved && !PROBES.contains(&request.uri().path()) {
        let detail = "All connections are in use (server.max_connections); retry later.";
        return Err(Problem::new(Code::Overloaded, detail));
    }
    check_host(request.version(), request.headers())?;
    if matches!(app.auth, Auth::None) {
        check_local(request.uri(), request.headers(), &app.settings.cors)?;
    }
    if request.uri().path_and_query().is_some_and(|target| target.as_str().len() > TARGET_BYTES) {
        let detail = format!("The path and query are longer than {TARGET_BYTES} bytes.");
        return Err(Problem::new(Code::UriTooLong, detail));
    }
    let bytes: usize =
        request.headers().iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if request.headers().len() > HEADERS || bytes > HEADER_BYTES {
        let detail = format!(
            "There are more than {HEADERS} headers, or they have more than {HEADER_BYTES} bytes."
        );
        return Err(Problem::new(Code::HeadersTooLarge, detail));
    }
    Ok(())
}

/// The client's request id if it is short and has only safe characters, else a new one.
fn request_id(request: &Request) -> HeaderValue {
    let plain = |v: &&HeaderValue| {
        (1..=128).contains(&v.len())
            && v.as_bytes().iter().all(|b| b.is_ascii_alphanumeric() || b"-_.:".contains(b))
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
