//! Runs as the API shows them: the answer of an invocation, a row of a list, one run in full.
//!
//! Views are made from stored rows; budgets and pending calls are looked up beside them, always by
//! [`RunViews`], so that every route says the same about a run. A row of a list carries no inputs,
//! output or overrides: those can be large, and are read one run at a time.

use std::collections::HashMap;

use axum::Json;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;
use uuid::Uuid;

use super::input_views::InputView;
use super::redacted;
use super::webhooks::CallbackError;
use crate::agents::Definition;
use crate::event::WaitKind;
use crate::http::document::vocabulary::{PendingKind, RunInputs, RunMetadata};
use crate::http::edge::problem::Problem;
use crate::http::state::Shared;
use crate::message::Usage;
use crate::message::visible::{escaped, escaped_json};
use crate::run::{
    Budget, Caller, Label, Limits, Overrides, RunError, RunKind, RunStatus, TerminationReason, Usd,
};
use crate::runtime::Outstanding;
use crate::store::{ApprovalRecord, RunRecord, SharedBudget, Store, StoreError};

/// The outcome of a run, as an invocation answers it.
#[derive(Debug, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "the fields are named as in JSON")]
#[schema(example = json!({"status": "completed", "error": null, "output": {"summary": "A small web service."}}))]
pub(crate) struct Run {
    /// The run's id.
    run_id: Uuid,
    /// The agent's name.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The current status; `completed`, `failed` and `cancelled` are final.
    status: RunStatus,
    /// Why the run ended; null while it has not ended.
    #[schema(value_type = Option<TerminationReason>)]
    termination_reason: Option<String>,
    /// The accepted output; null without one.
    output: Option<Value>,
    /// The text of the model's last response, verbatim.
    #[schema(example = "{\"summary\": \"A small web service.\"}")]
    raw_response: Option<String>,
    /// The model that gave the last response, as `provider/model`.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: Option<String>,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    tokens_used: u64,
    /// Tokens and cost of all model calls.
    usage: UsageView,
    /// The same of the run and all its descendants together; null if it delegated nothing.
    tree_usage: Option<UsageView>,
    /// Attempts started; absent for a single-shot invocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 1)]
    attempts: Option<u32>,
    /// Model responses; absent for a single-shot invocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 4)]
    iterations: Option<u32>,
    /// Tool calls, including blocked ones and calls of unknown tools; absent for a single-shot
    /// invocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 3)]
    tool_calls_made: Option<u32>,
    /// Names of the tools that were executed; absent for a single-shot invocation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = json!(["file_ops"]))]
    tools_used: Option<Vec<String>>,
    /// Milliseconds from the start of the run to its end.
    #[schema(example = 812)]
    latency_ms: Option<i64>,
    /// True if a limit ended the run before its output was complete.
    partial: bool,
    /// The error of a run that ended without an output.
    error: Option<RunError>,
    /// Problems that did not end the run.
    warnings: Vec<String>,
    /// Events that the receiver of the run's webhook could not be told, or not yet.
    callback_errors: Vec<CallbackError>,
}

/// Token counts and cost. Cached and cache-write tokens are part of the input tokens, reasoning
/// tokens are part of the output tokens.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Usage)]
pub(crate) struct UsageView {
    /// All input tokens.
    #[schema(example = 1000)]
    input_tokens: u64,
    /// All output tokens.
    #[schema(example = 234)]
    output_tokens: u64,
    /// Input tokens that were read from the provider's cache.
    cached_input_tokens: u64,
    /// Input tokens that were written to the provider's cache.
    cache_write_tokens: u64,
    /// Output tokens that were spent on reasoning.
    reasoning_tokens: u64,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
}

/// Bytes of a call's arguments that a list of runs shows.
const MAX_LISTED: usize = 4096;

impl RunSummary {
    /// As it stands in a list, without arguments that are large.
    pub(crate) fn listed(mut self) -> Self {
        for pending in &mut self.pending {
            if pending.display.len() > MAX_LISTED {
                pending.arguments = Value::Null;
                pending.display.clear();
            }
        }
        self
    }

    pub(crate) fn status(&self) -> RunStatus {
        self.status
    }
}

/// A run in a list. It has no inputs, output or overrides; those are in `GET /runs/{id}`.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"status": "completed", "error": null, "kind": "iterative", "pending": []}))]
pub(crate) struct RunSummary {
    /// The run's id.
    run_id: Uuid,
    /// The agent's name.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The version of the agent's definition.
    #[schema(example = "1.2.0")]
    agent_version: String,
    /// Whether the run is a single model call, a loop, or one tool call that its caller gave.
    kind: RunKind,
    /// The current status; `completed`, `failed` and `cancelled` are final.
    status: RunStatus,
    /// Why the run ended; null while it has not ended.
    #[schema(value_type = Option<TerminationReason>)]
    termination_reason: Option<String>,
    /// The model that gave the last response, as `provider/model`.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: Option<String>,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    tokens_used: u64,
    /// Tokens and cost of all model calls.
    usage: UsageView,
    /// The same of the run and all its descendants together; null if it delegated nothing.
    tree_usage: Option<UsageView>,
    /// Attempts started.
    #[schema(example = 1)]
    attempts: u32,
    /// Model responses.
    #[schema(example = 4)]
    iterations: u32,
    /// Tool calls, including blocked ones and calls of unknown tools.
    #[schema(example = 3)]
    tool_calls_made: u32,
    /// Names of the tools that were executed.
    #[schema(example = json!(["file_ops"]))]
    tools_used: Vec<String>,
    /// Milliseconds from the start of the run to its end.
    #[schema(example = 812)]
    latency_ms: Option<i64>,
    /// True if a limit ended the run before its output was complete.
    partial: bool,
    /// The error of a run that ended without an output.
    error: Option<RunError>,
    /// What the run has read that matters to what it may do.
    #[schema(value_type = Vec<Label>)]
    labels: Vec<String>,
    /// Problems that did not end the run.
    warnings: Vec<String>,
    /// Events that the receiver of the run's webhook could not be told, or not yet.
    callback_errors: Vec<CallbackError>,
    /// The labels given in the request.
    #[schema(value_type = RunMetadata)]
    metadata: Value,
    /// The session that the run belongs to.
    #[schema(example = json!(null))]
    session_id: Option<String>,
    /// The run that delegated to this one.
    #[schema(example = json!(null))]
    parent_run_id: Option<Uuid>,
    /// The priority given in the request.
    #[schema(minimum = -100, maximum = 100)]
    priority: i64,
    /// Since when a queued run can be taken, or from when on; null in any other status.
    available_at: Option<DateTime<Utc>>,
    /// When the run was accepted.
    created_at: DateTime<Utc>,
    /// When execution began.
    started_at: Option<DateTime<Utc>>,
    /// When the run ended.
    finished_at: Option<DateTime<Utc>>,
    /// Consumption and its limits.
    budget: BudgetView,
    /// The limits of the loop: those of the definition, narrowed by the request. Null if the
    /// definition is not known any more.
    limits: Option<Limits>,
    /// The calls that the run and the runs below it wait for. A run goes on beside those of its child
    /// runs as long as another child works.
    pending: Vec<Pending>,
}

/// A run with its inputs, output and overrides.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"inputs": {"task": "What is in here?"}, "output": {"summary": "A small web service."}, "overrides": {"max_iterations": 10}}))]
pub(crate) struct RunDetail {
    #[serde(flatten)]
    summary: RunSummary,
    /// The inputs given in the request.
    #[schema(value_type = RunInputs)]
    inputs: Value,
    /// The settings given in the request that narrow the agent's definition.
    #[schema(value_type = Overrides)]
    overrides: Value,
    /// The accepted output; null without one.
    output: Option<Value>,
    /// The text of the model's last response, verbatim.
    #[schema(example = "{\"summary\": \"A small web service.\"}")]
    raw_response: Option<String>,
}

/// A run as a command on it answers: without `runs:read`, a caller that did not start the run gets
/// only its status.
#[derive(Debug, Serialize, ToSchema)]
#[serde(untagged)]
pub(crate) enum RunAnswer {
    Run(Box<RunDetail>),
    State(RunState),
}

/// The status of a run, for a caller that may not read the run.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"status": "completed"}))]
#[serde(deny_unknown_fields)]
pub(crate) struct RunState {
    /// The run's id.
    run_id: Uuid,
    /// The current status; `completed`, `failed` and `cancelled` are final.
    status: RunStatus,
}

/// Something that a parked run waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PendingCall, example = json!({"arguments": {"operation": "write", "path": "notes.md"}}))]
pub(crate) struct Pending {
    /// The run that waits, where the answer is given: the parked run itself, or a run that it
    /// delegated to.
    run_id: Uuid,
    /// The tool call's id; for an escalation, the escalation's own id.
    call_id: Uuid,
    /// What kind of answer the run waits for.
    #[schema(value_type = PendingKind, example = "approval")]
    kind: &'static str,
    /// The tool; empty for an escalation.
    #[schema(example = "file_ops")]
    tool: String,
    /// The call's arguments; a string if they are not valid JSON. Null in lists where they are large:
    /// the run itself shows them.
    arguments: Value,
    /// The arguments as JSON text for display to a person: invisible characters, and those that
    /// change how others are displayed, are escaped.
    #[schema(example = "{\n  \"path\": \"invoice\\u202efdp.exe\"\n}")]
    display: String,
    /// Why the run waits.
    #[schema(
        example = "The autonomy rule asks for an approval: to write notes.md would lose what exists there."
    )]
    reason: String,
    /// When the run stops waiting without an answer; null if it waits indefinitely.
    expires_at: Option<DateTime<Utc>>,
    /// What the tool asks for, if it is no tool of the caller; null otherwise.
    #[schema(value_type = Option<InputView>, example = json!(null))]
    input: Option<Box<InputView>>,
}

/// Consumption of a run and its limits.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunBudget)]
pub(crate) struct BudgetView {
    /// What the run has consumed.
    used: BudgetUsed,
    /// What the run may consume.
    limits: Option<Budget>,
    /// What the run and all its descendants have consumed together; null if it delegated nothing
    /// or was itself delegated.
    tree: Option<TreeUsed>,
}

/// What a run and all its descendants have consumed together.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunTreeUsed)]
pub(crate) struct TreeUsed {
    /// Model responses.
    #[schema(example = 9)]
    iterations: u64,
    /// Tool calls.
    #[schema(example = 5)]
    tool_calls: u64,
    /// Input plus output tokens.
    #[schema(example = 4321)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00123)]
    cost_usd: Option<f64>,
    /// Files modified; a file that two of the runs modified counts for both.
    #[schema(example = 2)]
    files_modified: u64,
    /// Lines written or replaced.
    #[schema(example = 40)]
    lines_changed: u64,
    /// Requests to the network; absent where `governance.network.max_requests` is not set.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    network_requests: Option<u64>,
}

/// What a run has consumed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BudgetUsed {
    /// Model responses.
    #[schema(example = 4)]
    iterations: u32,
    /// Seconds since the start of the run, up to its end, without the time in which it waited for
    /// people, callers or children.
    #[schema(example = 0.812)]
    duration_seconds: f64,
    /// Tool calls.
    #[schema(example = 3)]
    tool_calls: u32,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// Cost in US dollars; null if a model has no configured price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
    /// Files read, directories listed and searched.
    #[schema(example = 2)]
    files_read: u64,
    /// Write operations on files and directories.
    #[schema(example = 1)]
    files_written: u64,
    /// Distinct files created, changed, moved or deleted.
    #[schema(example = 1)]
    files_modified: u64,
    /// Lines written or replaced.
    #[schema(example = 12)]
    lines_changed: u64,
    /// Commands executed.
    #[schema(example = 0)]
    commands: u64,
    /// Network requests made by tools.
    #[schema(example = 0)]
    network_requests: u64,
}

impl Run {
    /// The outcome of a stored run, with what its descendants took.
    pub(crate) async fn of(store: &Store, record: RunRecord) -> Result<Self, StoreError> {
        let tree_usage = tree_usage(store, &record).await?;
        let callback_errors = callback_errors(store, &record).await?;
        Ok(Self { tree_usage, callback_errors, ..Self::from(record) })
    }
}

impl From<RunRecord> for Run {
    /// A single shot has no attempts, iterations or tools to report.
    fn from(record: RunRecord) -> Self {
        let is_loop = record.kind != RunKind::Single;
        Self {
            run_id: record.id,
            agent: record.agent,
            status: record.status,
            termination_reason: record.termination_reason,
            output: record.output.map(redacted::output),
            raw_response: record.raw_response.map(redacted::text),
            model: record.model,
            tokens_used: record.usage.total_tokens(),
            usage: (&record.usage).into(),
            tree_usage: None,
            attempts: is_loop.then_some(record.attempts),
            iterations: is_loop.then_some(record.iterations),
            tool_calls_made: is_loop.then_some(record.tool_calls_made),
            tools_used: is_loop.then_some(record.tools_used),
            latency_ms: record.latency_ms,
            partial: record.partial,
            error: record.error.map(error),
            warnings: record.warnings.into_iter().map(redacted::text).collect(),
            callback_errors: Vec::new(),
        }
    }
}

impl From<&Usage> for UsageView {
    fn from(usage: &Usage) -> Self {
        Self {
            input_tokens: usage.input_tokens,
            output_tokens: usage.output_tokens,
            cached_input_tokens: usage.cached_input_tokens,
            cache_write_tokens: usage.cache_write_tokens,
            reasoning_tokens: usage.reasoning_tokens,
            total_tokens: usage.total_tokens(),
            cost_usd: usage.cost_micro_usd.map(dollars),
        }
    }
}

fn dollars(micro: i64) -> f64 {
    Usd::from_micro(micro).dollars()
}

/// An error without secrets.
fn error(error: RunError) -> RunError {
    let RunError { code, message, context } = error;
    RunError { code, message: redacted::text(message), context: redacted::document(context) }
}

impl From<ApprovalRecord> for Pending {
    fn from(mut asked: ApprovalRecord) -> Self {
        if asked.kind != WaitKind::Client || asked.input.is_some() {
            asked.arguments = redacted::document(asked.arguments);
        }
        Self {
            run_id: asked.run_id,
            call_id: asked.call_id,
            kind: asked.kind.as_str(),
            tool: asked.tool,
            display: escaped_json(&format!("{:#}", asked.arguments)).into_owned(),
            arguments: asked.arguments,
            reason: redacted::text(escaped(&asked.reason).into_owned()),
            expires_at: asked.expires_at,
            input: asked.input.map(|asked| Box::new(asked.into())),
        }
    }
}

impl From<&RunRecord> for BudgetUsed {
    fn from(record: &RunRecord) -> Self {
        let seconds = record.active().as_seconds_f64();
        Self {
            iterations: record.iterations,
            duration_seconds: (seconds * 1000.0).round() / 1000.0,
            tool_calls: record.tool_calls_made,
            total_tokens: record.usage.total_tokens(),
            cost_usd: record.usage.cost_micro_usd.map(dollars),
            files_read: record.consumption.files_read,
            files_written: record.consumption.files_written,
            files_modified: record.consumption.files(),
            lines_changed: record.consumption.lines_changed,
            commands: record.consumption.commands,
            network_requests: record.consumption.network_requests,
        }
    }
}

/// What a run and its descendants took; `None` for one that delegated nothing.
async fn tree_usage(store: &Store, record: &RunRecord) -> Result<Option<UsageView>, StoreError> {
    if !record.has_delegated() {
        return Ok(None);
    }
    let Some(below) = store.usage_below(&record.tenant, record.id).await? else {
        return Ok(None);
    };
    let mut usage = record.usage;
    usage.add(&below);
    Ok(Some((&usage).into()))
}

/// What the receiver of the run's webhook could not be told.
async fn callback_errors(
    store: &Store,
    record: &RunRecord,
) -> Result<Vec<CallbackError>, StoreError> {
    if record.webhook.is_none() {
        return Ok(Vec::new());
    }
    let failed = store.failed_deliveries(&record.tenant, record.id).await?;
    Ok(failed.into_iter().map(CallbackError::from).collect())
}

/// One run in full.
pub(crate) async fn detail(app: &Shared, record: RunRecord) -> Result<RunDetail, Problem> {
    RunViews::new(app).detail(record).await
}

/// What this caller may see of a run after a command on it.
pub(crate) async fn answer_to(
    app: &Shared,
    caller: &Caller,
    record: RunRecord,
) -> Result<Json<RunAnswer>, Problem> {
    Ok(Json(if caller.has("runs:read") || caller.subject == record.subject {
        RunAnswer::Run(Box::new(detail(app, record).await?))
    } else {
        let status = app.runtime.status_of(&record).await?;
        RunAnswer::State(RunState { run_id: record.id, status })
    }))
}

/// Makes the views of stored runs, and reads each definition that they share only once.
pub(crate) struct RunViews<'a> {
    app: &'a Shared,
    /// The budgets of definitions that are no longer loaded, by their hash.
    replaced: HashMap<String, Option<(Limits, Budget)>>,
}

impl<'a> RunViews<'a> {
    pub(crate) fn new(app: &'a Shared) -> Self {
        Self { app, replaced: HashMap::new() }
    }

    pub(crate) async fn detail(&mut self, mut record: RunRecord) -> Result<RunDetail, Problem> {
        let output = record.output.take().map(redacted::output);
        let raw_response = record.raw_response.take().map(redacted::text);
        let inputs = redacted::document(record.inputs.take());
        let overrides = redacted::document(record.overrides.clone());
        let summary = self.summary(record).await?;
        Ok(RunDetail { summary, inputs, overrides, output, raw_response })
    }

    pub(crate) async fn summary(&mut self, record: RunRecord) -> Result<RunSummary, Problem> {
        let (limits, of_budget) = self.limits(&record).await?.unzip();
        let budget = BudgetView {
            used: (&record).into(),
            limits: of_budget,
            tree: self.tree(&record).await?,
        };
        let callback_errors = callback_errors(&self.app.store, &record).await?;
        let Outstanding { status, pending } = self.app.runtime.outstanding(&record).await?;
        Ok(RunSummary {
            budget,
            limits,
            tree_usage: tree_usage(&self.app.store, &record).await?,
            pending: pending.into_iter().map(Pending::from).collect(),
            run_id: record.id,
            agent: record.agent,
            agent_version: record.agent_version,
            kind: record.kind,
            status,
            termination_reason: record.termination_reason,
            model: record.model,
            tokens_used: record.usage.total_tokens(),
            usage: (&record.usage).into(),
            attempts: record.attempts,
            iterations: record.iterations,
            tool_calls_made: record.tool_calls_made,
            tools_used: record.tools_used,
            latency_ms: record.latency_ms,
            partial: record.partial,
            error: record.error.map(error),
            labels: record.labels,
            warnings: record.warnings.into_iter().map(redacted::text).collect(),
            callback_errors,
            metadata: redacted::document(record.metadata.0),
            session_id: record.session_id,
            parent_run_id: record.parent_run_id,
            priority: record.priority,
            available_at: record.available_at,
            created_at: record.created_at,
            started_at: record.started_at,
            finished_at: record.finished_at,
        })
    }

    /// Limits and budget of the definition that the run was started with, narrowed by its request.
    async fn limits(&mut self, record: &RunRecord) -> Result<Option<(Limits, Budget)>, Problem> {
        let of =
            |definition: &Definition| (definition.limits, definition.governance.budget.clone());
        let hash = &record.definition_hash;
        let loaded = self.app.catalogue.agent(&record.agent).filter(|agent| agent.hash == *hash);
        let defined = match (loaded, self.replaced.get(hash)) {
            (Some(agent), _) => Some(of(&agent.definition)),
            (None, Some(known)) => known.clone(),
            (None, None) => {
                let json = self.app.store.definition(hash).await?;
                let definition =
                    json.and_then(|json| serde_json::from_str::<Definition>(&json).ok());
                let defined = definition.as_ref().map(of);
                self.replaced.insert(hash.clone(), defined.clone());
                defined
            }
        };
        let overrides = Overrides::deserialize(&record.overrides).unwrap_or_default();
        let requested = overrides.budget.clone().unwrap_or_default();
        Ok(defined.map(|(limits, budget)| {
            (
                limits.narrowed_by(&overrides).shown(overrides.tool_call_timeout_seconds),
                budget.narrowed_by(&requested).shown(),
            )
        }))
    }

    /// The shared budget of a root run that has delegated.
    async fn tree(&self, record: &RunRecord) -> Result<Option<TreeUsed>, Problem> {
        if record.parent_run_id.is_some() || !record.has_delegated() {
            return Ok(None);
        }
        let used = |budget: SharedBudget| TreeUsed {
            iterations: budget.spent.iterations,
            tool_calls: budget.spent.tool_calls,
            total_tokens: budget.spent.tokens,
            cost_usd: record
                .usage
                .cost_micro_usd
                .map(|_| dollars(i64::try_from(budget.spent.micro_usd).unwrap_or(i64::MAX))),
            files_modified: budget.spent.files,
            lines_changed: budget.spent.lines,
            network_requests: budget.caps.requests.map(|_| budget.spent.requests),
        };
        Ok(self.app.store.shared_budget(record.id).await?.map(used))
    }
}
