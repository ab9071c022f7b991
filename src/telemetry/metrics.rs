//! Metrics for Prometheus: their names, labels and buckets, and what each event adds to them.
//!
//! A handle is created once per set of labels and kept. Labels whose values callers or models choose
//! (a model named in a request) are bounded: beyond [`MAX_LABEL_SETS`] they are counted as `other`.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::RwLock;

use super::{ModelTry, Observed, TelemetryError, began};
use crate::bounds::secrets::redacted;
use crate::event::{AuditRecord, CallFailure, Ending, Event, RunEvent, ToolCallCompleted};
use crate::message::{CallTarget, Usage};
use crate::run::RunOrigin;

const RUNS: &str = "toolloop_runs_total";
const RUNS_RECLAIMED: &str = "toolloop_runs_reclaimed_total";
const RUNS_IN_FLIGHT: &str = "toolloop_runs_in_flight";
const RUN_DURATION: &str = "toolloop_run_duration_seconds";
const ITERATIONS: &str = "toolloop_iterations_total";
const TOOL_CALLS: &str = "toolloop_tool_calls_total";
const TOOL_CALL_DURATION: &str = "toolloop_tool_call_duration_seconds";
const MODEL_CALLS: &str = "toolloop_model_calls_total";
const MODEL_CALL_DURATION: &str = "toolloop_model_call_duration_seconds";
const TOKENS: &str = "toolloop_tokens_total";
const COST: &str = "toolloop_cost_micro_usd_total";
const QUEUE_DEPTH: &str = "toolloop_queue_depth";
const GATE_DECISIONS: &str = "toolloop_gate_decisions_total";
const WEBHOOK_DELIVERIES: &str = "toolloop_webhook_deliveries_total";
const STORE_COMMIT: &str = "toolloop_store_commit_seconds";
const HTTP_REQUESTS: &str = "toolloop_http_requests_total";

/// Maximum number of label sets per metric.
const MAX_LABEL_SETS: usize = 1000;
/// The label value beyond [`MAX_LABEL_SETS`].
const OTHER: &str = "other";

/// Histogram buckets in seconds, for runs and model calls.
const LONG: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0, 60.0, 300.0, 1800.0];
/// Histogram buckets in seconds, for tool calls; the shortest read a small file.
const TOOL: [f64; 13] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 15.0, 60.0, 300.0];
/// Histogram buckets in seconds, for commits.
const COMMIT: [f64; 12] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];

/// Gauges that are read when metrics are scraped.
#[derive(Debug, Clone, Copy)]
pub struct Sampled {
    /// Queued runs of all replicas; `None` if the store is unavailable.
    pub queued: Option<u64>,
    /// Runs in progress on this replica.
    pub in_flight: usize,
}

pub(super) struct Metrics {
    exposition: PrometheusHandle,
    runs: Family<(&'static str, &'static str)>,
    runs_in_flight: Gauge,
    run_duration: Histogram,
    iterations: Counter,
    tool_calls: Family<&'static str>,
    tool_call_duration: Histogram,
    model_calls: Family<&'static str>,
    model_call_duration: Histogram,
    tokens: Tokens,
    cost: Counter,
    queue_depth: Gauge,
    gate_decisions: Family<&'static str>,
    http_requests: Family<(&'static str, u16)>,
}

/// Tokens by kind. As in [`Usage`], cached and cache-write tokens are parts of the input, reasoning
/// tokens of the output.
struct Tokens {
    input: Counter,
    output: Counter,
    cached_input: Counter,
    cache_write: Counter,
    reasoning: Counter,
}

/// A counter with one label whose values are known only at run time, and further labels `Rest`.
struct Family<Rest> {
    made: RwLock<HashMap<String, HashMap<Rest, Counter>>>,
    make: fn(&str, &Rest) -> Counter,
}

impl Metrics {
    /// Installs the process-wide recorder.
    pub(super) fn install() -> Result<Self, TelemetryError> {
        let exposition = recorder().map_err(|error| TelemetryError::Metrics(error.to_string()))?;
        describe();
        let tokens = |kind: &'static str| counter!(TOKENS, "kind" => kind);
        Ok(Self {
            exposition,
            runs: Family::new(|agent, (status, reason)| {
                counter!(
                    RUNS,
                    vec![named("agent", agent), fixed("status", status), fixed("reason", reason)]
                )
            }),
            runs_in_flight: gauge!(RUNS_IN_FLIGHT),
            run_duration: histogram!(RUN_DURATION),
            iterations: counter!(ITERATIONS),
            tool_calls: Family::new(|tool, outcome| {
                counter!(TOOL_CALLS, vec![named("tool", tool), fixed("outcome", outcome)])
            }),
            tool_call_duration: histogram!(TOOL_CALL_DURATION),
            model_calls: Family::new(|name, outcome| {
                let (provider, model) = name.split_once('/').unwrap_or((name, name));
                let labels = vec![
                    named("provider", provider),
                    named("model", model),
                    fixed("outcome", outcome),
                ];
                counter!(MODEL_CALLS, labels)
            }),
            model_call_duration: histogram!(MODEL_CALL_DURATION),
            tokens: Tokens {
                input: tokens("input"),
                output: tokens("output"),
                cached_input: tokens("cached_input"),
                cache_write: tokens("cache_write"),
                reasoning: tokens("reasoning"),
            },
            cost: counter!(COST),
            queue_depth: gauge!(QUEUE_DEPTH),
            gate_decisions: Family::new(|rule, decision| {
                counter!(GATE_DECISIONS, vec![named("rule", rule), fixed("decision", decision)])
            }),
            http_requests: Family::new(|route, (method, status)| {
                let labels = vec![
                    named("route", route),
                    fixed("method", method),
                    named("status", &status.to_string()),
                ];
                counter!(HTTP_REQUESTS, labels)
            }),
        })
    }

    pub(super) fn observe(&self, Observed { origin, events, audit, .. }: Observed<'_>) {
        for (at, event) in events.iter().enumerate() {
            match &event.what {
                RunEvent::ModelResponded(response) => {
                    self.iterations.increment(1);
                    self.add_usage(&response.usage);
                }
                RunEvent::ContextCompacted(compacted) => {
                    compacted.call.iter().for_each(|call| self.add_usage(&call.usage));
                }
                RunEvent::ToolCallCompleted(call) => self.tool_completed(events, at, call),
                RunEvent::ToolCallBlocked(call) => self.tool_calls.add(&call.tool, "blocked"),
                RunEvent::RunCompleted(ending)
                | RunEvent::RunFailed(ending)
                | RunEvent::RunCancelled(ending) => self.ended(origin, ending),
                RunEvent::RunQueued {}
                | RunEvent::RunStarted { .. }
                | RunEvent::SessionLoaded { .. }
                | RunEvent::SkillActivated(_)
                | RunEvent::RunResumed { .. }
                | RunEvent::AttemptStarted { .. }
                | RunEvent::IterationStarted { .. }
                | RunEvent::ToolCallStarted(_)
                | RunEvent::ToolCallAwaitingClient(_)
                | RunEvent::ToolCallAwaitingChild(_)
                | RunEvent::ApprovalRequested(_)
                | RunEvent::ApprovalResolved(_)
                | RunEvent::HandoffStarted { .. }
                | RunEvent::ScanWarned(_)
                | RunEvent::LabelsChanged(_)
                | RunEvent::BudgetWarned { .. }
                | RunEvent::OutputProposed { .. }
                | RunEvent::OutputReflected { .. }
                | RunEvent::ValidationFailed { .. }
                | RunEvent::ConfirmationRequested { .. }
                | RunEvent::DecisionExtractionFailed(_)
                | RunEvent::DecisionValidationFailed(_)
                | RunEvent::ToolChoiceUnmet { .. }
                | RunEvent::AnswerBlank { .. }
                | RunEvent::RunCancelRequested { .. } => {}
            }
        }
        for AuditRecord { rule, decision, outcome, .. } in audit {
            if decision == "escalated" && outcome != "not_executed" {
                continue; // was counted when the approval was requested
            }
            self.gate_decisions.add(rule, decision_label(decision));
        }
    }

    fn ended(&self, origin: &RunOrigin, ending: &Ending) {
        let outcome = &ending.outcome;
        let labels = (outcome.status().as_str(), outcome.reason().as_str());
        self.runs.add(&origin.agent, labels);
        self.run_duration.record(Duration::from_millis(ending.latency_ms));
    }

    fn add_usage(&self, usage: &Usage) {
        self.tokens.add(usage);
        self.cost.increment(usage.cost_micro_usd.unwrap_or(0).unsigned_abs());
    }

    /// A call that a limit prevented is not counted.
    fn tool_completed(&self, events: &[Event], at: usize, call: &ToolCallCompleted) {
        let (tool, outcome) = match call.failure {
            _ if call.target != CallTarget::Tool => return,
            None => (call.tool.as_str(), "succeeded"),
            Some(CallFailure::NotExecuted) => return,
            Some(CallFailure::Cancelled) => (call.tool.as_str(), "cancelled"),
            Some(CallFailure::UnknownTool) => (OTHER, "failed"), // the name is the model's invention
            Some(_) => (call.tool.as_str(), "failed"),
        };
        self.tool_calls.add(tool, outcome);
        let began = began(events, at, call.call_id, call.duration_ms);
        let ended = events.get(at).map_or(began, |event| event.at);
        self.tool_call_duration.record((ended - began).to_std().unwrap_or_default());
    }

    pub(super) fn model_tried(&self, tried: ModelTry<'_>) {
        let model = if tried.is_named { tried.model } else { OTHER };
        let name = format!("{}/{model}", tried.provider);
        self.model_calls.add(&name, tried.failure.unwrap_or("succeeded"));
        self.model_call_duration.record(tried.took);
    }

    pub(super) fn http_answered(&self, route: &str, method: &'static str, status: u16) {
        self.http_requests.add(route, (method, status));
    }

    pub(super) fn scrape(&self, sampled: Sampled) -> String {
        #[expect(clippy::cast_precision_loss, reason = "there are not that many runs")]
        self.queue_depth.set(sampled.queued.map_or(f64::NAN, |queued| queued as f64));
        #[expect(clippy::cast_precision_loss, reason = "there are not that many runs")]
        self.runs_in_flight.set(sampled.in_flight as f64);
        self.exposition.render()
    }

    /// Aggregates histogram samples into buckets, which frees their memory.
    pub(super) fn upkeep(&self) {
        self.exposition.run_upkeep();
    }
}

impl Tokens {
    fn add(&self, usage: &Usage) {
        self.input.increment(usage.input_tokens);
        self.output.increment(usage.output_tokens);
        self.cached_input.increment(usage.cached_input_tokens);
        self.cache_write.increment(usage.cache_write_tokens);
        self.reasoning.increment(usage.reasoning_tokens);
    }
}

impl<Rest: Eq + Hash + Copy> Family<Rest> {
    fn new(make: fn(&str, &Rest) -> Counter) -> Self {
        Self { made: RwLock::default(), make }
    }

    fn add(&self, name: &str, rest: Rest) {
        let made = self.made.read();
        if let Some(counter) = made.get(name).and_then(|by_rest| by_rest.get(&rest)) {
            counter.increment(1);
            return;
        }
        let has_room = made.values().map(HashMap::len).sum::<usize>() < MAX_LABEL_SETS;
        drop(made);
        let name = if has_room { name } else { OTHER };
        let mut made = self.made.write();
        let by_rest = made.entry(name.to_owned()).or_default();
        by_rest.entry(rest).or_insert_with(|| (self.make)(name, &rest)).increment(1);
    }
}

fn named(key: &'static str, value: &str) -> Label {
    Label::new(key, redacted(value).into_owned())
}

fn fixed(key: &'static str, value: &'static str) -> Label {
    Label::from_static_parts(key, value)
}

fn decision_label(decision: &str) -> &'static str {
    ["allowed", "warned", "escalated", "blocked"]
        .into_iter()
        .find(|known| *known == decision)
        .unwrap_or(OTHER)
}

fn recorder() -> Result<PrometheusHandle, BuildError> {
    let mut builder = PrometheusBuilder::new();
    for (name, buckets) in [
        (RUN_DURATION, LONG.as_slice()),
        (MODEL_CALL_DURATION, &LONG),
        (TOOL_CALL_DURATION, &TOOL),
        (STORE_COMMIT, &COMMIT),
    ] {
        builder = builder.set_buckets_for_metric(Matcher::Full(name.into()), buckets)?;
    }
    builder.install_recorder()
}

fn describe() {
    for (name, text) in [
        (RUNS, "Runs that ended, by agent, status and termination reason."),
        (
            RUNS_RECLAIMED,
            "Runs that this replica owned and did not drive, given back to the queue, by reason: undriven, \
             lost_commit or unended.",
        ),
        (ITERATIONS, "Model responses used by runs."),
        (TOOL_CALLS, "Tool calls by tool and outcome: succeeded, failed, cancelled or blocked."),
        (MODEL_CALLS, "Tries of model calls by outcome: succeeded, or the kind of failure."),
        (
            TOKENS,
            "Tokens by kind. Cached and cache_write are parts of input, reasoning is part of output.",
        ),
        (
            COST,
            "Cost of model calls in millionths of a US dollar, as far as prices are configured.",
        ),
        (GATE_DECISIONS, "Decisions on tool calls, by the rule that decided."),
        (
            WEBHOOK_DELIVERIES,
            "Attempts to deliver an event to a webhook, by outcome: delivered, retried, failed or disabled.",
        ),
        (HTTP_REQUESTS, "HTTP responses by route template, method and status."),
    ] {
        metrics::describe_counter!(name, text);
    }
    for (name, text) in [
        (RUNS_IN_FLIGHT, "Runs in progress on this replica."),
        (QUEUE_DEPTH, "Queued runs of all replicas."),
    ] {
        metrics::describe_gauge!(name, text);
    }
    for (name, text) in [
        (RUN_DURATION, "Seconds from the start of a run to its end."),
        (TOOL_CALL_DURATION, "Seconds that a tool call took."),
        (MODEL_CALL_DURATION, "Seconds that a try of a model call took."),
        (STORE_COMMIT, "Seconds that a commit of the journal took."),
    ] {
        metrics::describe_histogram!(name, text);
    }
}
