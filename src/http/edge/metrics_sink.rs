//! The interface to the metrics recorder, which `app.rs` provides.

use std::time::Duration;

use axum::http::StatusCode;

use crate::runtime::Backlog;
use crate::store::ConnectionCounts;

/// Records a response, given the route template, the method, the status and the time to its head.
type OnResponse = Box<dyn Fn(&str, &'static str, StatusCode, Duration) + Send + Sync>;
/// Renders all metrics in the Prometheus text format.
type Scrape = Box<dyn Fn(Gauges) -> String + Send + Sync>;

pub struct MetricsSink {
    pub on_response: OnResponse,
    pub scrape: Scrape,
}

/// Gauges that are read when metrics are scraped.
#[derive(Debug, Clone, Copy)]
pub struct Gauges {
    /// Counts of queued work in the store; `None` if it does not answer.
    pub backlog: Option<Backlog>,
    pub connections: ConnectionCounts,
    /// Runs in progress on this replica.
    pub in_flight: usize,
}
