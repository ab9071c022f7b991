//! What the process says about itself: logs on standard error, metrics for Prometheus, traces for
//! an OpenTelemetry collector.
//!
//! All of it is made from the durable events of runs, as [`Observed`], and from what model calls
//! and HTTP exchanges report. Nothing here decides anything, holds a run up or waits for a reader:
//! what cannot be delivered is dropped. No contents of conversations and no secrets leave by this
//! door.

mod logs;
mod metrics;
mod traces;

use std::time::Duration;

use chrono::{DateTime, Utc};
use url::Url;

use crate::event::{AuditRecord, Event, RunEvent};
use crate::run::{RunOrigin, Totals, TraceSpan};

pub use logs::{LogFormat, Logs};
use metrics::Metrics;
pub use metrics::Sampled;
use traces::Traces;

/// Where traces go.
#[derive(Debug, Clone)]
pub struct TraceSettings {
    /// The collector, without `/v1/traces`.
    pub endpoint: Url,
    /// `service.name`.
    pub service_name: String,
}

/// A durable write of a run.
#[derive(Debug, Clone, Copy)]
pub struct Observed<'a> {
    /// Who the run is.
    pub origin: &'a RunOrigin,
    /// What happened, in order.
    pub events: &'a [Event],
    /// What was decided on the calls in them.
    pub audit: &'a [AuditRecord],
    /// The run's totals after the last event.
    pub totals: &'a Totals,
}

/// One try of a model call, as it ended.
#[derive(Debug, Clone, Copy)]
pub struct ModelTry<'a> {
    /// The provider's name.
    pub provider: &'a str,
    /// The model, without the provider.
    pub model: &'a str,
    /// Whether the operator named it; of others metrics have no label of their own.
    pub is_named: bool,
    /// How long it took.
    pub took: Duration,
    /// The kind of failure, if it failed.
    pub failure: Option<&'static str>,
    /// Where the call failed for good: its span, and how long all tries took.
    pub given_up: Option<(TraceSpan, Duration)>,
}

/// Turns what happens into metrics, traces and the log line of every ended run.
pub struct Telemetry {
    metrics: Metrics,
    traces: Option<Traces>,
}

/// Telemetry that cannot be set up.
#[derive(Debug, thiserror::Error)]
pub enum TelemetryError {
    /// Metrics.
    #[error("metrics cannot be collected: {0}")]
    Metrics(String),
    /// Traces.
    #[error("traces cannot be sent: {0}")]
    Traces(String),
}

impl Telemetry {
    /// Collects metrics from now on, for the whole process, and sends traces where there is
    /// somebody to send them to. Handles of metrics that were made before collect nothing.
    ///
    /// # Errors
    /// [`TelemetryError`]; a collector that does not answer is none.
    pub fn start(traces: Option<&TraceSettings>) -> Result<Self, TelemetryError> {
        Ok(Self { metrics: Metrics::install()?, traces: traces.map(Traces::start).transpose()? })
    }

    /// Takes note of a durable write.
    pub fn observe(&self, seen: Observed<'_>) {
        self.metrics.observe(seen);
        if let Some(traces) = &self.traces {
            traces.observe(seen);
        }
        log_end(seen);
    }

    /// Takes note of a try of a model call.
    pub fn model_tried(&self, tried: ModelTry<'_>) {
        self.metrics.model_tried(tried);
        if let Some(traces) = &self.traces {
            traces.model_tried(tried);
        }
    }

    /// Takes note of an answered request. `route` is a template.
    pub fn http_answered(&self, route: &str, method: &'static str, status: u16) {
        self.metrics.http_answered(route, method, status);
    }

    /// All metrics in Prometheus' text format.
    pub fn scrape(&self, sampled: Sampled) -> String {
        self.metrics.scrape(sampled)
    }

    /// What has to be done every few seconds.
    pub fn upkeep(&self) {
        self.metrics.upkeep();
    }

    /// Sends what is left of the traces, for as long as `patience` lasts. Blocks.
    pub fn finish(&self, patience: Duration) {
        if let Some(traces) = &self.traces {
            traces.finish(patience);
        }
    }
}

/// When the call began that ended with `events[at]`: as journalled in the same write, else as long
/// before its end as it took.
fn began(events: &[Event], at: usize, call: uuid::Uuid, duration_ms: u64) -> DateTime<Utc> {
    let (before, end) = events.split_at(at);
    let journalled = before.iter().rev().find_map(|event| {
        let RunEvent::ToolCallStarted(started) = &event.what else { return None };
        (started.call_id == call).then_some(event.at)
    });
    journalled.unwrap_or_else(|| {
        let end = end.first().map_or_else(Utc::now, |event| event.at);
        earlier(end, duration_ms)
    })
}

fn earlier(end: DateTime<Utc>, ms: u64) -> DateTime<Utc> {
    let before = i64::try_from(ms).ok().and_then(chrono::TimeDelta::try_milliseconds);
    before.and_then(|before| end.checked_sub_signed(before)).unwrap_or(end)
}

/// One line for a run that ended.
fn log_end(Observed { origin, events, totals, .. }: Observed<'_>) {
    let Some(ending) = events.last().and_then(|event| event.what.ending()) else { return };
    tracing::info!(
        run_id = %origin.trace.run_id,
        agent = origin.agent,
        status = ending.outcome.status().as_str(),
        reason = ending.outcome.reason().as_str(),
        iterations = totals.iterations,
        tool_calls = totals.tool_calls_made,
        tokens = totals.usage.total_tokens(),
        latency_ms = ending.latency_ms,
        "run ended"
    );
}
