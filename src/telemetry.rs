//! Telemetry: logs on standard error, metrics for Prometheus, traces for an OpenTelemetry collector.
//!
//! The sources are the committed events of runs ([`Observed`]), model calls and HTTP responses.
//! Telemetry never blocks a run: what cannot be delivered in time is dropped. It contains neither
//! the contents of conversations nor secrets.

mod exposition;
mod logs;
mod metrics;
mod process;
mod traces;

use std::time::Duration;

use chrono::{DateTime, Utc};
use url::Url;

use crate::event::{AuditRecord, Event, RunEvent, WaitKind};
use crate::run::{RunOrigin, Totals, TraceSpan};

pub use logs::{LogFormat, Logs};
use metrics::Metrics;
use traces::Traces;

#[derive(Debug, Clone)]
pub struct TraceSettings {
    /// The collector's base URL, without `/v1/traces`.
    pub endpoint: Url,
    /// `service.name`.
    pub service_name: String,
}

/// Whether the configuration or a definition names a model, given its provider and its name there.
/// Others, which callers choose, share one label.
pub type IsNamed = Box<dyn Fn(&str, &str) -> bool + Send + Sync>;
/// Whether a tool is one of the service's. Others, which callers bring along, share one label.
pub type IsOwnTool = Box<dyn Fn(&str) -> bool + Send + Sync>;

/// Gauges that are read when metrics are scraped; `None` where the store does not say.
#[derive(Debug, Clone)]
pub struct Sampled<'a> {
    /// Queued runs of all replicas.
    pub queued: Option<u64>,
    /// For how long the oldest of them could have been taken.
    pub oldest: Option<Duration>,
    /// What runs of all replicas wait for from outside.
    pub approvals: Option<u64>,
    /// Connections to the database that are in use.
    pub used: usize,
    /// Those that are not.
    pub idle: usize,
    /// Runs in progress on this replica.
    pub in_flight: usize,
    /// Models that are left alone because their calls failed, by provider.
    pub open_breakers: Vec<(&'a str, usize)>,
}

/// A committed write of a run.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    pub origin: &'a RunOrigin,
    pub events: &'a [Event],
    /// The decisions on the tool calls in `events`.
    pub audit: &'a [AuditRecord],
    /// The run's totals after the last event.
    pub totals: &'a Totals,
}

/// The outcome of one try of a model call.
#[derive(Debug, Clone, Copy)]
pub struct ModelTry<'a> {
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    pub took: Duration,
    /// The kind of failure; `None` on success.
    pub failure: Option<&'static str>,
    /// Set on the last try of a failed call: the call's span, and the duration of all tries.
    pub given_up: Option<(TraceSpan, Duration)>,
}

/// Records metrics, traces and a log line for every ended run.
pub struct Telemetry {
    metrics: Metrics,
    traces: Option<Traces>,
}

#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    #[error("metrics cannot be collected: {0}")]
    Metrics(String),
    #[error("traces cannot be sent: {0}")]
    Traces(String),
}

impl Telemetry {
    /// Installs the process-wide metrics recorder, and exports traces if `traces` is set. Metric handles
    /// created earlier record nothing.
    ///
    /// # Errors
    /// The recorder or exporter cannot be set up; an unreachable collector is not an error.
    pub fn start(
        traces: Option<&TraceSettings>,
        is_named: IsNamed,
        is_own_tool: IsOwnTool,
    ) -> Result<Self, TelemetryError> {
        let metrics = Metrics::install(is_named, is_own_tool)?;
        Ok(Self { metrics, traces: traces.map(Traces::start).transpose()? })
    }

    pub fn observe(&self, seen: Observed<'_>) {
        self.metrics.observe(seen);
        if let Some(traces) = &self.traces {
            traces.observe(seen);
        }
        log_reviews(seen);
        log_end(seen);
    }

    pub fn model_tried(&self, tried: ModelTry<'_>) {
        self.metrics.model_tried(tried);
        if let Some(traces) = &self.traces {
            traces.model_tried(tried);
        }
    }

    /// `route` is the route template.
    pub fn http_answered(&self, route: &str, method: &'static str, status: u16, took: Duration) {
        self.metrics.http_answered(route, method, status, took);
    }

    /// All metrics in the Prometheus text format.
    pub fn scrape(&self, sampled: Sampled<'_>) -> String {
        self.metrics.scrape(sampled)
    }

    /// Must be called every few seconds.
    pub fn upkeep(&self) {
        self.metrics.upkeep();
    }

    /// Exports the remaining spans. Blocks for at most `patience`.
    pub fn finish(&self, patience: Duration) {
        if let Some(traces) = &self.traces {
            traces.finish(patience);
        }
    }
}

/// The start of the call that ended with `events[at]`: from its start event if that is in the same
/// write, else its end minus its duration.
fn start_of_call(events: &[Event], at: usize, call: uuid::Uuid, duration_ms: u64) -> DateTime<Utc> {
    let (before, end) = events.split_at(at);
    let journalled = before.iter().rev().find_map(|event| {
        let RunEvent::ToolCallStarted(started) = &event.what else { return None };
        (started.call_id == call).then_some(event.at)
    });
    journalled.unwrap_or_else(|| {
        let end = end.first().map_or_else(Utc::now, |event| event.at);
        before_by_ms(end, duration_ms)
    })
}

fn before_by_ms(end: DateTime<Utc>, ms: u64) -> DateTime<Utc> {
    let before = i64::try_from(ms).ok().and_then(chrono::TimeDelta::try_milliseconds);
    before.and_then(|before| end.checked_sub_signed(before)).unwrap_or(end)
}

/// A run that waits for a review does not go on by itself, and no approver is asked.
fn log_reviews(Observed { origin, events, .. }: Observed<'_>) {
    for event in events {
        let RunEvent::ApprovalRequested(asked) = &event.what else { continue };
        if asked.kind == WaitKind::Review {
            tracing::warn!(
                run_id = %origin.trace.run_id,
                call_id = %asked.call_id,
                tenant = origin.tenant,
                agent = origin.agent,
                tool = asked.tool,
                "run needs a review: it is unknown whether the call took effect"
            );
        }
    }
}

fn log_end(Observed { origin, events, totals, .. }: Observed<'_>) {
    let Some(ending) = events.last().and_then(|event| event.what.ending()) else { return };
    tracing::info!(
        run_id = %origin.trace.run_id,
        trace_id = format_args!("{:032x}", origin.trace.trace_id),
        tenant = origin.tenant,
        subject = origin.subject,
        agent = origin.agent,
        status = ending.outcome.status().as_str(),
        reason = ending.outcome.reason().as_str(),
        code = ending.outcome.error().map(|error| error.code.as_str()),
        iterations = totals.iterations,
        tool_calls = totals.tool_calls_made,
        tokens = totals.usage.total_tokens(),
        latency_ms = ending.latency_ms,
        "run ended"
    );
}
