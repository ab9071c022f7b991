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

use super::consumption_views::{BudgetView, TreeUsed, UsageView};
use super::pending_views::{MAX_LISTED, Pending};
use super::redaction;
use super::webhooks::CallbackError;
use crate::agents::Definition;
use crate::http::document::vocabulary::{RunInputs, RunMetadata};
use crate::http::edge::auth::Scoped;
use crate::http::edge::problem::Problem;
use crate::http::state::Shared;
use crate::run::{
    Budget, Label, Limits, Overrides, RunError, RunKind, RunStatus, TerminationReason,
};
use crate::runtime::{KnownRequests, OutstandingRequests, journals};
use crate::store::{ApprovalFilter, ApprovalStatus, Page, RunRecord, Store, StoreError};

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
    /// Webhook events that are not delivered: failed, or pending after a failed attempt.
    callback_errors: Vec<CallbackError>,
}

impl RunSummary {
    /// The form for a list, without large arguments.
    pub(crate) fn listed(mut self) -> Self {
        self.pending.iter_mut().for_each(Pending::shorten);
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
    /// Webhook events that are not delivered: failed, or pending after a failed attempt.
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
    /// The time before which the queued run is not taken, from the request; null once that time has passed.
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
/// only its status. So does a short-lived token without the action `read`.
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

impl Run {
    /// The outcome of a stored run, with the consumption of its descendants.
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
            output: record.output.map(redaction::output),
            raw_response: record.raw_response.map(redaction::text),
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
            warnings: record.warnings.into_iter().map(redaction::text).collect(),
            callback_errors: Vec::new(),
        }
    }
}

/// An error without secrets.
fn error(error: RunError) -> RunError {
    let RunError { code, message, context } = error;
    RunError { code, message: redaction::text(message), context: redaction::document(context) }
}

/// The consumption of a run and its descendants; `None` if it delegated nothing.
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

/// The run's webhook events that are not delivered.
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
    let _permit = permit_of(app, &record).await?;
    RunViews::new(app).detail(record).await
}

/// The memory permit for the arguments of a run's pending requests.
async fn permit_of(app: &Shared, record: &RunRecord) -> Result<Option<journals::Permit>, Problem> {
    if !record.status.is_parked() {
        return Ok(None);
    }
    let filter = ApprovalFilter {
        run_id: Some(record.id),
        status: Some(ApprovalStatus::Pending),
        ..ApprovalFilter::default()
    };
    let all = Page { limit: MAX_CALLS, after: None };
    let piece = app.store.approval_piece(&record.tenant, &filter, &all, u64::MAX).await?;
    Ok(journals::permit(piece.bytes).await)
}

/// The view of a run that this caller gets after a command on it.
pub(crate) async fn answer_to<S>(
    app: &Shared,
    caller: &Scoped<S>,
    record: RunRecord,
) -> Result<Json<RunAnswer>, Problem> {
    let is_reader = caller.has("runs:read") || caller.subject == record.subject;
    Ok(Json(if is_reader && caller.credential().may_read() {
        RunAnswer::Run(Box::new(detail(app, record).await?))
    } else {
        let status = app.runtime.status_of(&record).await?;
        RunAnswer::State(RunState { run_id: record.id, status })
    }))
}

/// Calls that a run can wait for: those of one answer.
const MAX_CALLS: u32 = 1024;

/// Makes the views of stored runs, and reads each definition that they share only once.
pub(crate) struct RunViews<'a> {
    app: &'a Shared,
    /// The budgets of definitions that are no longer loaded, by their hash.
    replaced: HashMap<String, Option<(Limits, Budget)>>,
    /// What the runs of a list wait for.
    asked: Option<KnownRequests>,
}

impl<'a> RunViews<'a> {
    pub(crate) fn new(app: &'a Shared) -> Self {
        Self { app, replaced: HashMap::new(), asked: None }
    }

    /// Reads at once what these runs of a list wait for.
    pub(crate) async fn read_ahead(
        &mut self,
        tenant: &str,
        runs: &[RunRecord],
    ) -> Result<(), Problem> {
        self.asked = Some(self.app.runtime.pending_requests_of(tenant, runs, MAX_LISTED).await?);
        Ok(())
    }

    pub(crate) async fn detail(&mut self, mut record: RunRecord) -> Result<RunDetail, Problem> {
        let output = record.output.take().map(redaction::output);
        let raw_response = record.raw_response.take().map(redaction::text);
        let inputs = redaction::document(record.inputs.take());
        let overrides = redaction::document(record.overrides.clone());
        let summary = self.summary(record).await?;
        Ok(RunDetail { summary, inputs, overrides, output, raw_response })
    }

    pub(crate) async fn summary(&mut self, record: RunRecord) -> Result<RunSummary, Problem> {
        let available_at = record.not_before();
        let (limits, of_budget) = self.limits(&record).await?.unzip();
        let budget = BudgetView {
            used: (&record).into(),
            limits: of_budget,
            tree: self.tree(&record).await?,
        };
        let callback_errors = callback_errors(&self.app.store, &record).await?;
        let runtime = &self.app.runtime;
        let OutstandingRequests { status, pending } = match &mut self.asked {
            Some(asked) => runtime.outstanding_with(&record, asked).await?,
            None => runtime.outstanding(&record).await?,
        };
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
            warnings: record.warnings.into_iter().map(redaction::text).collect(),
            callback_errors,
            metadata: redaction::document(record.metadata.0),
            session_id: record.session_id,
            parent_run_id: record.parent_run_id,
            priority: record.priority,
            available_at,
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
        let budget = self.app.store.shared_budget(record.id).await?;
        Ok(budget.map(|budget| TreeUsed::of(record, &budget)))
    }
}

#[cfg(test)]
#[path = "run_views_tests.rs"]
mod tests;
