//! The Prometheus endpoint, and the labels of HTTP metrics.
//!
//! Served without authentication if `server.expose` lists it, otherwise 404. Labels name agents,
//! tools and models, but no tenant, caller or run. The metrics themselves are defined by the
//! [`MetricsSink`](super::metrics_sink::MetricsSink).

use std::time::Duration;

use axum::extract::{MatchedPath, State};
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderName, HeaderValue, Method};
use tokio::time::timeout;

use super::metrics_sink::Gauges;
use super::problem::Problem;
use crate::http::state::App;

const TEXT_FORMAT: HeaderValue =
    HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
/// How long the store may take to answer.
const STORE_PATIENCE: Duration = Duration::from_secs(1);

/// Get metrics
///
/// In the Prometheus text format.
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
    let backlog = timeout(STORE_PATIENCE, app.runtime.backlog()).await.ok().and_then(Result::ok);
    let connections = app.store.connection_counts();
    let gauges = Gauges { backlog, connections, in_flight: app.runtime.in_flight() };
    Ok(([(CONTENT_TYPE, TEXT_FORMAT)], (app.metrics.scrape)(gauges)))
}

/// The route template as a label; never the path itself, which is unbounded.
pub(crate) fn route_label(matched: Option<&MatchedPath>) -> &str {
    matched.map_or("unmatched", MatchedPath::as_str)
}

/// The method as a label; unknown methods share one, since clients can invent them.
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
