//! Metrics for Prometheus: their names, labels and buckets, and what each event adds to them.
//!
//! A handle is created once per set of labels and kept. Labels whose values callers or models choose
//! (a model named in a request) are bounded: beyond [`MAX_LABEL_SETS`] they are counted as `other`.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Label, counter, gauge, histogram};
use metrics_exporter_prometheus::{BuildError, Matcher, PrometheusBuilder, PrometheusHandle};
use parking_lot::{Mutex, RwLock};

use super::exposition::Exposition;
use super::{
    IsNamed, IsOwnTool, ModelTry, Observed, Sampled, TelemetryError, process, start_of_call,
};
use crate::bounds::secrets::redacted;
use crate::event::{
    AuditRecord, CallFailure, Ending, Event, ModelInterrupted, ModelRetried, NetworkUse, RunEvent,
    ToolCallCompleted,
};
use crate::message::{CallTarget, Usage};
use crate::run::RunOrigin;

const RUNS: &str = "toolloop_runs_total";
const RUNS_RECLAIMED: &str = "toolloop_runs_reclaimed_total";
const RUNS_IN_FLIGHT: &str = "toolloop_runs_in_flight";
const RUN_DURATION: &str = "toolloop_run_duration_seconds";
const ITERATIONS: &str = "toolloop_iterations_total";
const TOOL_CALLS: &str = "toolloop_tool_calls_total";
const PROGRAM_REQUESTS: &str = "toolloop_program_requests_total";
const TOOL_CALL_DURATION: &str = "toolloop_tool_call_duration_seconds";
const MODEL_CALLS: &str = "toolloop_model_calls_total";
const MODEL_CALL_DURATION: &str = "toolloop_model_call_duration_seconds";
const BREAKERS_OPEN: &str = "toolloop_breakers_open";
const TOKENS: &str = "toolloop_tokens_total";
const COST: &str = "toolloop_cost_usd_total";
const QUEUE_DEPTH: &str = "toolloop_queue_depth";
const QUEUE_OLDEST: &str = "toolloop_queue_oldest_seconds";
const APPROVALS_PENDING: &str = "toolloop_approvals_pending";
const STREAMS_OPEN: &str = "toolloop_streams_open";
const STORE_CONNECTIONS: &str = "toolloop_store_connections";
const BUILD_INFO: &str = "toolloop_build_info";
const GATE_DECISIONS: &str = "toolloop_gate_decisions_total";
const WEBHOOK_DELIVERIES: &str = "toolloop_webhook_deliveries_total";
const STORE_COMMIT: &str = "toolloop_store_commit_duration_seconds";
const HTTP_REQUESTS: &str = "toolloop_http_requests_total";
const HTTP_DURATION: &str = "toolloop_http_request_duration_seconds";

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

/// Histogram buckets in seconds, for HTTP responses; the longest wait for runs.
const HTTP: [f64; 12] = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 600.0];

/// The commit that was built; `unknown` if the build did not name it.
const REVISION: &str = match option_env!("TOOLLOOP_REVISION") {
    Some(revision) => revision,
    None => "unknown",
};

pub(super) struct Metrics {
    recorded: PrometheusHandle,
    is_named: IsNamed,
    is_own_tool: IsOwnTool,
    runs: Family<(&'static str, &'static str), Counter>,
    runs_in_flight: Gauge,
    run_duration: Family<(), Histogram>,
    iterations: Counter,
    tool_calls: Family<&'static str, Counter>,
    tool_call_duration: Histogram,
    program_requests: Family<&'static str, Counter>,
    model_calls: Family<&'static str, Counter>,
    model_call_duration: Family<(), Histogram>,
    tokens: Family<&'static str, Counter>,
    cost: Mutex<Cost>,
    gate_decisions: Family<&'static str, Counter>,
    http_requests: Family<(&'static str, u16), Counter>,
    http_duration: Family<&'static str, Histogram>,
}

/// Millionths of a US dollar, by agent and model.
type Cost = BTreeMap<(String, String), u64>;

/// A metric with one label whose values are known only at run time (or more, as `provider/model` or
/// `agent/provider/model`), and further labels `Rest`.
struct Family<Rest, Handle> {
    made: RwLock<HashMap<String, HashMap<Rest, Handle>>>,
    make: fn(&str, &Rest) -> Handle,
}

impl Metrics {
    /// Installs the process-wide recorder.
    pub(super) fn install(
        is_named: IsNamed,
        is_own_tool: IsOwnTool,
    ) -> Result<Self, TelemetryError> {
        let recorded = recorder().map_err(|error| TelemetryError::Metrics(error.to_string()))?;
        describe();
        gauge!(STREAMS_OPEN).set(0.0);
        // Counted elsewhere; from the first scrape on, so that an increase is seen.
        for reason in ["undriven", "lost_commit", "unended"] {
            counter!(RUNS_RECLAIMED, "reason" => reason).increment(0);
        }
        for outcome in ["delivered", "retried", "failed", "disabled"] {
            counter!(WEBHOOK_DELIVERIES, "outcome" => outcome).increment(0);
        }
        gauge!(BUILD_INFO, "version" => env!("CARGO_PKG_VERSION"), "revision" => REVISION).set(1.0);
        Ok(Self {
            recorded,
            is_named,
            is_own_tool,
            runs: Family::new(|agent, (status, reason)| {
                counter!(
                    RUNS,
                    vec![named("agent", agent), fixed("status", status), fixed("reason", reason)]
                )
            }),
            runs_in_flight: gauge!(RUNS_IN_FLIGHT),
            run_duration: Family::new(|agent, ()| {
                histogram!(RUN_DURATION, vec![named("agent", agent)])
            }),
            iterations: counter!(ITERATIONS),
            tool_calls: Family::new(|tool, outcome| {
                counter!(TOOL_CALLS, vec![named("tool", tool), fixed("outcome", outcome)])
            }),
            tool_call_duration: histogram!(TOOL_CALL_DURATION),
            program_requests: Family::new(|tool, outcome| {
                counter!(PROGRAM_REQUESTS, vec![named("tool", tool), fixed("outcome", outcome)])
            }),
            model_calls: Family::new(|name, outcome| {
                counter!(MODEL_CALLS, of_model(name, [fixed("outcome", outcome)]))
            }),
            model_call_duration: Family::new(|name, ()| {
                histogram!(MODEL_CALL_DURATION, of_model(name, []))
            }),
            tokens: Family::new(|name, kind| {
                let (agent, model) = name.split_once('/').unwrap_or((name, name));
                let more = [named("agent", agent), fixed("kind", kind)];
                counter!(TOKENS, of_model(model, more))
            }),
            cost: Mutex::default(),
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
            http_duration: Family::new(|route, method| {
                histogram!(HTTP_DURATION, vec![named("route", route), fixed("method", method)])
            }),
        })
    }

    pub(super) fn observe(&self, Observed { origin, events, audit, .. }: Observed<'_>) {
        for (at, event) in events.iter().enumerate() {
            match &event.what {
                RunEvent::ModelResponded(response) => {
                    self.iterations.increment(1);
                    let model = (response.provider.as_str(), response.model.as_str());
                    self.add_usage(origin, model, &response.usage);
                }
                RunEvent::ModelRetried(ModelRetried {
                    provider,
                    model,
                    usage: Some(usage),
                    ..
                })
                | RunEvent::ModelInterrupted(ModelInterrupted { provider, model, usage, .. }) => {
                    self.add_usage(origin, (provider, model), usage);
                }
                RunEvent::ContextCompacted(compacted) => {
                    if let Some(call) = &compacted.call {
                        self.add_usage(origin, (&call.provider, &call.model), &call.usage);
                    }
                }
                RunEvent::ToolCallCompleted(call) => self.tool_completed(events, at, call),
                RunEvent::ToolCallBlocked(call) => {
                    self.tool_calls.of(self.tool_label(&call.tool), "blocked").increment(1);
                }
                RunEvent::RunCompleted(ending)
                | RunEvent::RunFailed(ending)
                | RunEvent::RunCancelled(ending) => self.ended(origin, ending),
                RunEvent::RunQueued {}
                | RunEvent::RunStarted { .. }
                | RunEvent::SessionLoaded { .. }
                | RunEvent::SkillActivated(_)
                | RunEvent::RunResumed { .. }
                | RunEvent::AttemptStarted { .. }
                | RunEvent::CallGiven(_)
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
                | RunEvent::ModelRetried(_)
                | RunEvent::RunCancelRequested { .. } => {}
            }
        }
        for AuditRecord { rule, decision, outcome, .. } in audit {
            if decision == "escalated" && outcome != "not_executed" {
                continue; // was counted when the approval was requested
            }
            self.gate_decisions.of(rule, decision_label(decision)).increment(1);
        }
    }

    fn ended(&self, origin: &RunOrigin, ending: &Ending) {
        let outcome = &ending.outcome;
        let labels = (outcome.status().as_str(), outcome.reason().as_str());
        self.runs.of(&origin.agent, labels).increment(1);
        let took = Duration::from_millis(ending.latency_ms);
        self.run_duration.of(&origin.agent, ()).record(took);
    }

    /// Tokens by kind. As in [`Usage`], cached and cache-write tokens are parts of the input, reasoning
    /// tokens of the output.
    fn add_usage(&self, origin: &RunOrigin, (provider, model): (&str, &str), usage: &Usage) {
        let name = self.label(provider, model);
        let of_agent = format!("{}/{name}", origin.agent);
        for (kind, tokens) in [
            ("input", usage.input_tokens),
            ("output", usage.output_tokens),
            ("cached_input", usage.cached_input_tokens),
            ("cache_write", usage.cache_write_tokens),
            ("reasoning", usage.reasoning_tokens),
        ] {
            self.tokens.of(&of_agent, kind).increment(tokens);
        }
        let Some(spent) = usage.cost_micro_usd else { return };
        let mut cost = self.cost.lock();
        let mut key = (origin.agent.clone(), name);
        if cost.len() >= MAX_LABEL_SETS && !cost.contains_key(&key) {
            key = (OTHER.to_owned(), OTHER.to_owned());
        }
        *cost.entry(key).or_default() += spent.unsigned_abs();
    }

    /// `provider/model`, where the configuration or a definition names it; callers choose others.
    fn label(&self, provider: &str, model: &str) -> String {
        let model = if (self.is_named)(provider, model) { model } else { OTHER };
        format!("{provider}/{model}")
    }

    /// The name of one of the service's tools; callers and models choose others.
    fn tool_label<'t>(&self, tool: &'t str) -> &'t str {
        if (self.is_own_tool)(tool) { tool } else { OTHER }
    }

    /// A call that a limit prevented is not counted.
    fn tool_completed(&self, events: &[Event], at: usize, call: &ToolCallCompleted) {
        let own = self.tool_label(&call.tool);
        let (tool, outcome) = match call.failure {
            _ if call.target != CallTarget::Tool => return,
            None => (own, "succeeded"),
            Some(CallFailure::NotExecuted) => return,
            Some(CallFailure::Cancelled) => (own, "cancelled"),
            Some(CallFailure::UnknownTool) => (OTHER, "failed"), // the name is the model's invention
            Some(_) => (own, "failed"),
        };
        self.tool_calls.of(tool, outcome).increment(1);
        if let Some(NetworkUse { requests, refused, announced: 0, .. }) = call.network {
            self.program_requests.of(tool, "sent").increment(requests);
            self.program_requests.of(tool, "refused").increment(refused);
        }
        let Some(duration_ms) = call.known_duration_ms() else { return };
        let began = start_of_call(events, at, call.call_id, duration_ms);
        let ended = events.get(at).map_or(began, |event| event.at);
        self.tool_call_duration.record((ended - began).to_std().unwrap_or_default());
    }

    pub(super) fn model_tried(&self, tried: ModelTry<'_>) {
        let name = self.label(tried.provider, tried.model);
        self.model_calls.of(&name, tried.failure.unwrap_or("succeeded")).increment(1);
        self.model_call_duration.of(&name, ()).record(tried.took);
    }

    pub(super) fn http_answered(
        &self,
        route: &str,
        method: &'static str,
        status: u16,
        took: Duration,
    ) {
        self.http_requests.of(route, (method, status)).increment(1);
        self.http_duration.of(route, method).record(took);
    }

    pub(super) fn scrape(&self, sampled: Sampled<'_>) -> String {
        #[expect(clippy::cast_precision_loss, reason = "there are not that many runs")]
        self.runs_in_flight.set(sampled.in_flight as f64);
        let mut exposition = Exposition::default();
        self.write_cost(&mut exposition);
        write_samples(&mut exposition, sampled);
        process::write(&mut exposition);
        exposition.after(self.recorded.render())
    }

    fn write_cost(&self, exposition: &mut Exposition) {
        let help = "Cost of model calls in US dollars, as far as their prices are known.";
        exposition.family(COST, "counter", help);
        for ((agent, model), micro) in &*self.cost.lock() {
            #[expect(clippy::cast_precision_loss, reason = "exact up to nine billion dollars")]
            let dollars = *micro as f64 / 1e6;
            exposition.sample(COST, &[("agent", agent), ("model", model)], dollars);
        }
    }

    /// Aggregates histogram samples into buckets, which frees their memory.
    pub(super) fn upkeep(&self) {
        self.recorded.run_upkeep();
    }
}

/// The gauges that were read from the store; unknown ones are left out.
fn write_samples(exposition: &mut Exposition, sampled: Sampled<'_>) {
    exposition.single((QUEUE_DEPTH, "gauge", "Queued runs of all replicas."), sampled.queued);
    let help =
        "Seconds that the oldest queued run of all replicas could have been taken; 0 without one.";
    let oldest = sampled.oldest.map(|oldest| oldest.as_secs_f64());
    exposition.single((QUEUE_OLDEST, "gauge", help), oldest);
    let help = "Calls and decisions of all replicas that wait for an answer from outside.";
    exposition.single((APPROVALS_PENDING, "gauge", help), sampled.approvals);
    exposition.family(STORE_CONNECTIONS, "gauge", "Connections to the database, by state.");
    for (state, connections) in [("idle", sampled.idle), ("used", sampled.used)] {
        exposition.sample(STORE_CONNECTIONS, &[("state", state)], connections);
    }
    let help = "Models whose circuit breaker is open on this replica.";
    exposition.family(BREAKERS_OPEN, "gauge", help);
    for (provider, open) in sampled.open_breakers {
        exposition.sample(BREAKERS_OPEN, &[("provider", provider)], open);
    }
}

impl<Rest: Eq + Hash + Copy, Handle: Clone> Family<Rest, Handle> {
    fn new(make: fn(&str, &Rest) -> Handle) -> Self {
        Self { made: RwLock::default(), make }
    }

    fn of(&self, name: &str, rest: Rest) -> Handle {
        let made = self.made.read();
        if let Some(handle) = made.get(name).and_then(|by_rest| by_rest.get(&rest)) {
            return handle.clone();
        }
        let has_room = made.values().map(HashMap::len).sum::<usize>() < MAX_LABEL_SETS;
        drop(made);
        let name = if has_room { name } else { OTHER };
        let mut made = self.made.write();
        let by_rest = made.entry(name.to_owned()).or_default();
        by_rest.entry(rest).or_insert_with(|| (self.make)(name, &rest)).clone()
    }
}

/// The labels of `provider/model`, and others.
fn of_model<const N: usize>(name: &str, more: [Label; N]) -> Vec<Label> {
    let (provider, model) = name.split_once('/').unwrap_or((name, name));
    [named("provider", provider), named("model", model)].into_iter().chain(more).collect()
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
        (HTTP_DURATION, &HTTP),
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
        (
            PROGRAM_REQUESTS,
            "Requests to the network by programs, by tool and outcome: sent or refused.",
        ),
        (MODEL_CALLS, "Tries of model calls by outcome: succeeded, or the kind of failure."),
        (
            TOKENS,
            "Tokens by kind. Cached and cache_write are parts of input, reasoning is part of output.",
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
        (STREAMS_OPEN, "Event streams that clients read from this replica."),
        (BUILD_INFO, "Always 1; the labels say what was built."),
    ] {
        metrics::describe_gauge!(name, text);
    }
    for (name, text) in [
        (RUN_DURATION, "Seconds from the start of a run to its end."),
        (TOOL_CALL_DURATION, "Seconds that a tool call took."),
        (MODEL_CALL_DURATION, "Seconds that a try of a model call took."),
        (STORE_COMMIT, "Seconds that a commit of the journal took."),
        (HTTP_DURATION, "Seconds to the head of an HTTP response, by route template and method."),
    ] {
        metrics::describe_histogram!(name, text);
    }
}
