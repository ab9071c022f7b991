//! The interface to the metrics recorder, which `app.rs` provides.

use axum::http::StatusCode;

/// Records a response, given the route template, the method and the status.
type OnResponse = Box<dyn Fn(&str, &'static str, StatusCode) + Send + Sync>;
/// Renders all metrics in the Prometheus text format, given the number of queued runs (if known) and
/// the number of runs in progress on this replica.
type Scrape = Box<dyn Fn(Option<u64>, usize) -> String + Send + Sync>;

pub struct MetricsSink {
    pub on_response: OnResponse,
    pub scrape: Scrape,
}
