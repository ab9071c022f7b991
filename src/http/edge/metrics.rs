//! Metrics as Prometheus reads them, and the counting of answers.
//!
//! What is measured, and its format, is decided elsewhere: the operator's
//! [`Meters`](super::meters::Meters) come with the state. Open to everybody where the service exposes it, and to nobody else: it names agents,
//! tools and models, but no tenant, caller or run.

use std::time::Duration;

use axum::extract::{MatchedPath, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, Method};
use tokio::time::timeout;

use super::problem::Problem;
use crate::http::state::App;

/// The version of the text format that Prometheus asks for.
const TEXT_FORMAT: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
/// How long the store may take to answer.
const STORE_PATIENCE: Duration = Duration::from_secs(1);

/// Get metrics
///
/// For Prometheus, in its text format.
#[utoipa::path(
    get, path = "/metrics", operation_id = "get_metrics", tag = "health",
    responses(
        (status = 200, description = "The metrics.", body = String, content_type = "text/plain",
            example = "# TYPE toolloop_runs_in_flight gauge\ntoolloop_runs_in_flight 0\n"),
    ),
)]
pub(crate) async fn metrics(
    State(app): State<App>,
) -> Result<([(HeaderName, HeaderValue); 1], String), Problem> {
    if !app.settings.expose.metrics {
        return Err(Problem::not_found("path"));
    }
    let queued =
        timeout(STORE_PATIENCE, app.runtime.queue_length()).await.ok().and_then(Result::ok);
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], (app.meters.scrape)(queued, app.runtime.in_flight())))
}

/// The label of a request's route: never the path itself, of which there are too many.
pub(crate) fn route_label(matched: Option<&MatchedPath>) -> &str {
    matched.map_or("unmatched", MatchedPath::as_str)
}

/// The label of a method; callers may make up methods.
pub(crate) fn method_label(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::DELETE => "DELETE",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}
