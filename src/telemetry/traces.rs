//! Spans for an OpenTelemetry collector, with the names of the GenAI semantic conventions:
//! `invoke_agent {agent}` around `chat {model}` and `execute_tool {tool}`.
//!
//! Spans are created from committed events when they have ended, with explicit timestamps, so that a
//! run that crashes and resumes on another replica has one trace. They contain no arguments, results
//! or messages. A thread exports them over OTLP/HTTP from a bounded queue; what does not fit, or
//! cannot be delivered, is dropped.
//!
//! Names: open-telemetry/semantic-conventions-genai, gen-ai-spans and gen-ai-agent-spans.

use std::borrow::Cow;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use chrono::{DateTime, Utc};
use opentelemetry::trace::{SpanContext, SpanId, SpanKind, Status, TraceFlags, TraceState};
use opentelemetry::{Array, InstrumentationScope, KeyValue, Value};
use opentelemetry_otlp::{
    Protocol, SpanExporter as Otlp, WithExportConfig as _, WithHttpConfig as _,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{
    BatchConfigBuilder, BatchSpanProcessor, SpanData, SpanEvents, SpanExporter, SpanLinks,
    SpanProcessor as _,
};
use parking_lot::Mutex;
use reqwest::blocking;

use super::{ModelTry, Observed, TelemetryError, TraceSettings, before_by_ms, start_of_call};
use crate::bounds::address::is_loopback;
use crate::clock;
use crate::event::{CallFailure, Ending, Event, ModelResponded, RunEvent};
use crate::message::{CallTarget, Usage};
use crate::run::{RunOrigin, SpanPlace, Totals, TraceSpan};

/// Capacity of the queue, in spans of about a kilobyte.
const QUEUE_CAPACITY: usize = 16 * 1024;
/// Spans per export.
const BATCH: usize = 1024;
/// Maximum delay of an export.
const EXPORT_DELAY: Duration = Duration::from_secs(1);
/// Timeout of one export.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(5);
/// Minimum interval between warnings about lost spans.
const WARN_EVERY: Duration = Duration::from_mins(1);

pub(super) struct Traces {
    processor: BatchSpanProcessor,
    scope: InstrumentationScope,
}

/// The content of a span, without its ids.
struct SpanContent {
    name: Cow<'static, str>,
    kind: SpanKind,
    began: DateTime<Utc>,
    ended: DateTime<Utc>,
    attributes: Vec<KeyValue>,
    error: Option<Cow<'static, str>>,
}

impl Traces {
    /// Starts the export thread. The collector need not be reachable yet.
    pub(super) fn start(settings: &TraceSettings) -> Result<Self, TelemetryError> {
        let endpoint = format!("{}/v1/traces", settings.endpoint.as_str().trim_end_matches('/'));
        let mut otlp = Otlp::builder()
            .with_http()
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(endpoint)
            .with_timeout(EXPORT_TIMEOUT);
        if is_loopback(&settings.endpoint) {
            otlp = otlp.with_http_client(direct_client()?);
        }
        let otlp = otlp.build().map_err(|error| TelemetryError::Traces(error.to_string()))?;
        let batches = BatchConfigBuilder::default()
            .with_max_queue_size(QUEUE_CAPACITY)
            .with_max_export_batch_size(BATCH)
            .with_scheduled_delay(EXPORT_DELAY)
            .build();
        let exporter = Tolerant { otlp, lost: Mutex::default() };
        let mut processor =
            BatchSpanProcessor::builder(exporter).with_batch_config(batches).build();
        processor.set_resource(
            &Resource::builder().with_service_name(settings.service_name.clone()).build(),
        );
        let scope = InstrumentationScope::builder("toolloop")
            .with_version(env!("CARGO_PKG_VERSION"))
            .build();
        Ok(Self { processor, scope })
    }

    #[expect(clippy::too_many_lines, reason = "one line an event")]
    pub(super) fn observe(&self, Observed { origin, events, totals, .. }: Observed<'_>) {
        if !origin.trace.sampled {
            return;
        }
        for (at, event) in events.iter().enumerate() {
            match &event.what {
                RunEvent::ModelResponded(response) => {
                    let (attempt, iteration) = (response.attempt, response.iteration);
                    let place = SpanPlace::Chat { attempt, iteration };
                    let content = chat_response(origin, event.at, response);
                    self.child(origin.trace.span(place), content);
                }
                RunEvent::ContextCompacted(compacted) => {
                    let Some(call) = &compacted.call else { continue };
                    let (attempt, iteration) = (compacted.attempt, compacted.iteration);
                    let place = SpanPlace::Summary { attempt, iteration };
                    let content = chat(
                        origin,
                        event.at,
                        (&call.provider, &call.model),
                        &call.usage,
                        call.latency_ms,
                    );
                    self.child(origin.trace.span(place), content);
                }
                RunEvent::ToolCallCompleted(call) if call.target == CallTarget::Tool => {
                    let began = start_of_call(events, at, call.call_id, call.duration_ms);
                    let error = call.failure.map(error_type);
                    let tool = if call.failure == Some(CallFailure::UnknownTool) {
                        "unknown"
                    } else {
                        &call.tool
                    };
                    let span = origin.trace.span(SpanPlace::Tool(call.call_id));
                    self.child(
                        span,
                        execute_tool(origin, tool, call.call_id, (began, event.at), error),
                    );
                }
                RunEvent::ToolCallBlocked(call) => {
                    let span = origin.trace.span(SpanPlace::Tool(call.call_id));
                    let times = (event.at, event.at);
                    self.child(
                        span,
                        execute_tool(origin, &call.tool, call.call_id, times, Some("blocked")),
                    );
                }
                RunEvent::RunCompleted(ending)
                | RunEvent::RunFailed(ending)
                | RunEvent::RunCancelled(ending) => {
                    let parent = origin.trace.parent;
                    let content = invoke_agent(origin, event, ending, totals);
                    self.send(origin.trace.span(SpanPlace::Run), parent, parent.is_some(), content);
                }
                RunEvent::RunQueued {}
                | RunEvent::RunStarted { .. }
                | RunEvent::SessionLoaded { .. }
                | RunEvent::SkillActivated(_)
                | RunEvent::RunResumed { .. }
                | RunEvent::AttemptStarted { .. }
                | RunEvent::CallGiven(_)
                | RunEvent::IterationStarted { .. }
                | RunEvent::ToolCallStarted(_)
                | RunEvent::ToolCallCompleted(_)
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
                | RunEvent::ModelInterrupted(_)
                | RunEvent::RunCancelRequested { .. } => {}
            }
        }
    }

    /// A failed model call has no event, so its span is created here.
    pub(super) fn model_tried(&self, tried: ModelTry<'_>) {
        let (Some((span, took)), Some(failure)) = (tried.given_up, tried.failure) else { return };
        if !span.run.sampled {
            return;
        }
        let ended = clock::now();
        let mut attributes = about_model("chat", tried.provider, tried.model);
        attributes.push(KeyValue::new("toolloop.run_id", span.run.run_id.to_string()));
        let content = SpanContent {
            name: format!("chat {}", tried.model).into(),
            kind: SpanKind::Client,
            began: before_by_ms(ended, u64::try_from(took.as_millis()).unwrap_or(u64::MAX)),
            ended,
            attributes,
            error: Some(failure.into()),
        };
        self.child(span, content);
    }

    /// Exports the queued spans, blocking for at most `patience`.
    pub(super) fn finish(&self, patience: Duration) {
        if let Err(error) = self.processor.shutdown_with_timeout(patience) {
            tracing::warn!(%error, "the last traces could not be sent");
        }
    }

    fn child(&self, span: TraceSpan, content: SpanContent) {
        let run = span.run.span(SpanPlace::Run).span_id;
        self.send(span, Some(run), false, content);
    }

    fn send(
        &self,
        span: TraceSpan,
        parent: Option<u64>,
        parent_is_remote: bool,
        content: SpanContent,
    ) {
        let SpanContent { name, kind, began, ended, mut attributes, error } = content;
        let status = match error {
            Some(error) => {
                attributes.push(KeyValue::new("error.type", error));
                Status::error("")
            }
            None => Status::Unset,
        };
        self.processor.on_end(SpanData {
            span_context: SpanContext::new(
                span.run.trace_id.into(),
                span.span_id.into(),
                TraceFlags::SAMPLED,
                false,
                TraceState::NONE,
            ),
            parent_span_id: parent.map_or(SpanId::INVALID, SpanId::from),
            parent_span_is_remote: parent_is_remote,
            span_kind: kind,
            name,
            start_time: SystemTime::from(began),
            end_time: SystemTime::from(ended),
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status,
            instrumentation_scope: self.scope.clone(),
        });
    }
}

/// A client that uses no proxy.
fn direct_client() -> Result<blocking::Client, TelemetryError> {
    let client = || blocking::Client::builder().no_proxy().timeout(EXPORT_TIMEOUT).build();
    // It must not be made on a thread of the asynchronous runtime.
    match thread::spawn(client).join() {
        Ok(made) => made.map_err(|error| TelemetryError::Traces(error.to_string())),
        Err(_) => Err(TelemetryError::Traces("the HTTP client cannot be made".to_owned())),
    }
}

fn about_model(operation: &'static str, provider: &str, model: &str) -> Vec<KeyValue> {
    vec![
        KeyValue::new("gen_ai.operation.name", operation),
        KeyValue::new("gen_ai.provider.name", provider.to_owned()),
        KeyValue::new("gen_ai.request.model", model.to_owned()),
    ]
}

/// Attributes of every span of a run.
fn about_run(attributes: &mut Vec<KeyValue>, origin: &RunOrigin) {
    attributes.push(KeyValue::new("toolloop.run_id", origin.trace.run_id.to_string()));
    if let Some(session) = &origin.session_id {
        attributes.push(KeyValue::new("gen_ai.conversation.id", session.clone()));
    }
}

fn tokens(count: u64) -> Value {
    Value::I64(i64::try_from(count).unwrap_or(i64::MAX))
}

fn chat(
    origin: &RunOrigin,
    ended: DateTime<Utc>,
    (provider, model): (&str, &str),
    usage: &Usage,
    latency_ms: u64,
) -> SpanContent {
    let mut attributes = about_model("chat", provider, model);
    attributes.extend([
        KeyValue::new("gen_ai.response.model", model.to_owned()),
        KeyValue::new("gen_ai.usage.input_tokens", tokens(usage.input_tokens)),
        KeyValue::new("gen_ai.usage.output_tokens", tokens(usage.output_tokens)),
        KeyValue::new("gen_ai.usage.cache_read.input_tokens", tokens(usage.cached_input_tokens)),
        KeyValue::new("gen_ai.usage.cache_creation.input_tokens", tokens(usage.cache_write_tokens)),
    ]);
    about_run(&mut attributes, origin);
    SpanContent {
        name: format!("chat {model}").into(),
        kind: SpanKind::Client,
        began: before_by_ms(ended, latency_ms),
        ended,
        attributes,
        error: None,
    }
}

fn chat_response(
    origin: &RunOrigin,
    ended: DateTime<Utc>,
    response: &ModelResponded,
) -> SpanContent {
    let model = (response.provider.as_str(), response.model.as_str());
    let mut content = chat(origin, ended, model, &response.usage, response.latency_ms);
    let reasons = Value::Array(Array::String(vec![response.finish_reason.as_str().into()]));
    content.attributes.push(KeyValue::new("gen_ai.response.finish_reasons", reasons));
    content
}

fn execute_tool(
    origin: &RunOrigin,
    tool: &str,
    call: uuid::Uuid,
    (began, ended): (DateTime<Utc>, DateTime<Utc>),
    error: Option<&'static str>,
) -> SpanContent {
    let mut attributes = vec![
        KeyValue::new("gen_ai.operation.name", "execute_tool"),
        KeyValue::new("gen_ai.tool.name", tool.to_owned()),
        KeyValue::new("gen_ai.tool.call.id", call.to_string()),
    ];
    about_run(&mut attributes, origin);
    let name = format!("execute_tool {tool}").into();
    SpanContent {
        name,
        kind: SpanKind::Internal,
        began,
        ended,
        attributes,
        error: error.map(Cow::Borrowed),
    }
}

/// The token totals have attributes of their own: a sum over `gen_ai.usage.*` would count every call
/// twice.
fn invoke_agent(
    origin: &RunOrigin,
    event: &Event,
    ending: &Ending,
    totals: &Totals,
) -> SpanContent {
    let (provider, model) = model_of(origin, ending, totals);
    let mut attributes = vec![KeyValue::new("gen_ai.operation.name", "invoke_agent")];
    let names = [("gen_ai.provider.name", provider), ("gen_ai.request.model", model)];
    let known = names.into_iter().filter(|(_, name)| !name.is_empty());
    attributes.extend(known.map(|(key, name)| KeyValue::new(key, name.to_owned())));
    attributes.extend([
        KeyValue::new("gen_ai.agent.name", origin.agent.clone()),
        KeyValue::new("gen_ai.agent.version", origin.agent_version.clone()),
        KeyValue::new("gen_ai.aggregated_usage.input_tokens", tokens(totals.usage.input_tokens)),
        KeyValue::new("gen_ai.aggregated_usage.output_tokens", tokens(totals.usage.output_tokens)),
        KeyValue::new("toolloop.termination_reason", ending.outcome.reason().as_str()),
    ]);
    about_run(&mut attributes, origin);
    let began = run_span_start(origin.created_at, event.at, ending.latency_ms);
    SpanContent {
        name: format!("invoke_agent {}", origin.agent).into(),
        kind: SpanKind::Internal,
        began,
        ended: event.at,
        attributes,
        error: ending.outcome.error().map(|error| error.code.clone().into()),
    }
}

/// The provider and the model of a run: those that answered last, else the provider that failed, else
/// what was to be asked. Empty where they are not known.
fn model_of<'a>(
    origin: &'a RunOrigin,
    ending: &'a Ending,
    totals: &'a Totals,
) -> (&'a str, &'a str) {
    let split = |name: Option<&'a str>| name.and_then(|name| name.split_once('/'));
    if let Some(answered) = split(totals.model.as_deref()) {
        return answered;
    }
    let (provider, model) = split(origin.model.as_deref()).unwrap_or_default();
    let failed = ending.outcome.error().and_then(|error| error.context.get("provider"));
    match failed.and_then(serde_json::Value::as_str) {
        Some(failed) if failed != provider => (failed, ""),
        _ => (provider, model),
    }
}

/// The start of a run's span. Latencies are rounded down to milliseconds, so one is added, lest a
/// child span begin before its parent. Without a known latency it is when the run was accepted.
fn run_span_start(accepted: DateTime<Utc>, ended: DateTime<Utc>, latency_ms: u64) -> DateTime<Utc> {
    let began =
        if latency_ms == 0 { accepted } else { before_by_ms(ended, latency_ms + 1).max(accepted) };
    began.min(ended)
}

fn error_type(failure: CallFailure) -> &'static str {
    match failure {
        CallFailure::UnknownTool => "unknown_tool",
        CallFailure::InvalidArguments => "invalid_arguments",
        CallFailure::ToolError => "tool_error",
        CallFailure::Panicked => "panicked",
        CallFailure::Timeout => "timeout",
        CallFailure::Excess => "excess",
        CallFailure::Truncated => "truncated",
        CallFailure::Cancelled => "cancelled",
        CallFailure::NotExecuted => "not_executed",
        CallFailure::OverBudget => "over_budget",
        CallFailure::UnknownOutcome => "unknown_outcome",
        CallFailure::Withheld => "withheld",
    }
}

/// Exports batches, and warns at intervals about lost spans.
#[derive(Debug)]
struct Tolerant {
    otlp: Otlp,
    /// The time of the last warning, and the spans lost since.
    lost: Mutex<(Option<Instant>, usize)>,
}

impl SpanExporter for Tolerant {
    async fn export(&self, batch: Vec<SpanData>) -> OTelSdkResult {
        let spans = batch.len();
        let sent = self.otlp.export(batch).await;
        if let Err(error) = &sent {
            let mut lost = self.lost.lock();
            lost.1 += spans;
            if lost.0.is_none_or(|mentioned| mentioned.elapsed() >= WARN_EVERY) {
                tracing::warn!(%error, spans = lost.1, "traces are lost: the collector rejects them or is unreachable");
                *lost = (Some(Instant::now()), 0);
            }
        }
        sent
    }

    fn shutdown_with_timeout(&self, timeout: Duration) -> OTelSdkResult {
        self.otlp.shutdown_with_timeout(timeout)
    }

    fn force_flush(&self) -> OTelSdkResult {
        self.otlp.force_flush()
    }

    fn set_resource(&mut self, resource: &Resource) {
        self.otlp.set_resource(resource);
    }
}

#[cfg(test)]
mod tests {
    use chrono::TimeDelta;

    use super::*;

    #[test]
    fn a_run_starts_before_its_child_spans() {
        let accepted = DateTime::from_timestamp_micros(1_800_000_000_000_000).unwrap();
        let micros = |micros| accepted + TimeDelta::microseconds(micros);
        let table = [
            ("no latency is known", 9_000, 0, 0),
            ("started at 400 us, reported as 8 ms instead of 8.6", 9_000, 8, 0),
            ("waited in the queue for 50 ms", 60_000, 9, 50_000),
            ("the clock went back", -5, 0, -5),
        ];
        for (case, ended, latency, began) in table {
            assert_eq!(run_span_start(accepted, micros(ended), latency), micros(began), "{case}");
        }
    }
}
