//! Runs as callers see them: the answer of an invocation, the history, one run, cancelling.
//!
//! Views are made from stored rows and add nothing to them. Parts of a run are
//! [`super::run_parts`]'s.

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::time::Instant;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn, ParameterStyle};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_cursor};
use crate::agents::Definition;
use crate::http::document::vocabulary::{PendingKind, RunInputs, RunMetadata};
use crate::http::edge::auth::{RunsCancel, RunsRead, Scoped};
use crate::http::edge::extract::{JsonObject, Params, RunId, fields};
use crate::http::edge::layer::Deadline;
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::http::state::Shared;
use crate::message::Usage;
use crate::message::visible::{escaped, escaped_json};
use crate::run::{
    Budget, Delegation, Overrides, RunError, RunKind, RunStatus, TerminationReason, Usd,
};
use crate::store::{
    ApprovalFilter, ApprovalRecord, ApprovalStatus, CancelOutcome, Page, RunFilter, RunRecord,
    SharedBudget,
};

/// Calls of a parked run that are looked through.
const MAX_PENDING: u32 = 10_000;

/// How a run went; the answer of an invocation.
#[derive(Debug, Serialize, ToSchema)]
#[expect(clippy::struct_field_names, reason = "the fields are named as in JSON")]
#[schema(example = json!({"status": "completed", "error": null, "output": {"summary": "A small web service."}}))]
pub(crate) struct Run {
    /// The run.
    run_id: Uuid,
    /// The agent.
    #[schema(example = "repo-guide")]
    agent: String,
    /// Where it stands; the last three are final.
    status: RunStatus,
    /// Why it ended.
    #[schema(value_type = Option<TerminationReason>)]
    termination_reason: Option<String>,
    /// The accepted output.
    output: Option<Value>,
    /// The model's last words as it wrote them.
    #[schema(example = "{\"summary\": \"A small web service.\"}")]
    raw_response: Option<String>,
    /// The model that answered last.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: Option<String>,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    tokens_used: u64,
    /// Tokens and cost.
    usage: UsageView,
    /// Attempts started; not in the answer of a single shot.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 1)]
    attempts: Option<u32>,
    /// Model responses; not in the answer of a single shot.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 4)]
    iterations: Option<u32>,
    /// Calls of tools, blocked and unknown ones included; not in the answer of a single shot.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = 3)]
    tool_calls_made: Option<u32>,
    /// The tools that executed; not in the answer of a single shot.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, example = json!(["file_ops"]))]
    tools_used: Option<Vec<String>>,
    /// Milliseconds from start to end.
    #[schema(example = 812)]
    latency_ms: Option<i64>,
    /// Whether a limit forced the output.
    partial: bool,
    /// Why there is no output.
    error: Option<RunError>,
    /// What the caller should know although it did not end the run.
    warnings: Vec<String>,
    /// Subscribers that failed.
    callback_errors: Vec<String>,
}

/// Tokens and cost. Cached and cache-write tokens are parts of the input, reasoning of the output.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Usage)]
pub(crate) struct UsageView {
    /// Read by the model; the whole input.
    #[schema(example = 1000)]
    input_tokens: u64,
    /// Written by the model; the whole output.
    #[schema(example = 234)]
    output_tokens: u64,
    /// Input that came from the provider's cache.
    cached_input_tokens: u64,
    /// Input that was written to the provider's cache.
    cache_write_tokens: u64,
    /// Output that was reasoning.
    reasoning_tokens: u64,
    /// Input plus output.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// US dollars; null where a model has no price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
}

/// A run with all that is kept about it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(example = json!({"kind": "iterative", "inputs": {"task": "What is in here?"}, "overrides": {"max_iterations": 10}, "pending": []}))]
pub(crate) struct RunDetail {
    #[serde(flatten)]
    run: Run,
    /// Single shot or loop.
    kind: RunKind,
    /// What it was given.
    #[schema(value_type = RunInputs)]
    inputs: Value,
    /// What the request narrowed.
    #[schema(value_type = Overrides)]
    overrides: Value,
    /// The caller's labels.
    #[schema(value_type = RunMetadata)]
    metadata: Value,
    /// The session it belongs to.
    #[schema(example = json!(null))]
    session_id: Option<String>,
    /// The run that delegated to this one.
    #[schema(example = json!(null))]
    parent_run_id: Option<Uuid>,
    /// The definition's version.
    #[schema(example = "1.2.0")]
    agent_version: String,
    /// When it was accepted.
    created_at: DateTime<Utc>,
    /// When it began.
    started_at: Option<DateTime<Utc>>,
    /// When it ended.
    finished_at: Option<DateTime<Utc>>,
    /// Consumption and its caps.
    budget: BudgetView,
    /// What it waits for; listed for one run, empty in lists of runs.
    pending: Vec<Pending>,
}

/// What keeps a run from going on.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PendingCall, example = json!({"arguments": {"operation": "write", "path": "notes.md"}}))]
pub(crate) struct Pending {
    /// The call; of an escalation, an id of its own.
    call_id: Uuid,
    /// Whom it waits for.
    #[schema(value_type = PendingKind, example = "approval")]
    kind: &'static str,
    /// The tool; empty for an escalation.
    #[schema(example = "file_ops")]
    tool: String,
    /// What it is called with; a text where that is no JSON.
    arguments: Value,
    /// The arguments as JSON text to be shown to a person: characters that are not seen, or that
    /// change how others are seen, are escaped.
    #[schema(example = "{\n  \"path\": \"invoice\\u202efdp.exe\"\n}")]
    display: String,
    /// Why it waits.
    #[schema(
        example = "The autonomy rule asks for an approval: to write notes.md would lose what exists there."
    )]
    reason: String,
    /// When it stops waiting by itself.
    expires_at: Option<DateTime<Utc>>,
}

/// Consumption and its caps.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunBudget)]
pub(crate) struct BudgetView {
    /// What the run has consumed.
    used: BudgetUsed,
    /// What it must not exceed; null in lists where the definition has changed since the run
    /// started.
    limits: Option<Budget>,
    /// What it has consumed together with the runs that it started, and that those started; null
    /// where it started none.
    tree: Option<TreeUsed>,
}

/// What the runs of a tree have consumed, of what they share.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = RunTreeUsed)]
pub(crate) struct TreeUsed {
    /// Model responses.
    #[schema(example = 9)]
    iterations: u64,
    /// Calls of tools.
    #[schema(example = 5)]
    tool_calls: u64,
    /// Input plus output tokens.
    #[schema(example = 4321)]
    total_tokens: u64,
    /// Null where a model has no price.
    #[schema(example = 0.00123)]
    cost_usd: Option<f64>,
}

/// What a run has consumed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct BudgetUsed {
    /// Model responses.
    #[schema(example = 4)]
    iterations: u32,
    /// Seconds since the start, or from start to end.
    #[schema(example = 0.812)]
    duration_seconds: f64,
    /// Calls of tools.
    #[schema(example = 3)]
    tool_calls: u32,
    /// Input plus output tokens.
    #[schema(example = 1234)]
    total_tokens: u64,
    /// Null where a model has no price.
    #[schema(example = 0.00054)]
    cost_usd: Option<f64>,
    /// Files read, directories listed and searched.
    #[schema(example = 2)]
    files_read: u64,
    /// Writes of files and directories.
    #[schema(example = 1)]
    files_written: u64,
    /// Different files that were created, changed, moved or deleted.
    #[schema(example = 1)]
    files_modified: usize,
    /// Lines that were written or replaced.
    #[schema(example = 12)]
    lines_changed: u64,
    /// Commands.
    #[schema(example = 0)]
    commands: u64,
    /// Requests of tools to the network.
    #[schema(example = 0)]
    network_requests: u64,
}

impl Run {
    /// The answer of an invocation: a single shot has no attempts, iterations and tools.
    pub(crate) fn answer(record: RunRecord) -> Self {
        let looped = record.kind == RunKind::Iterative;
        let run = Self::from(record);
        if looped {
            return run;
        }
        Self { attempts: None, iterations: None, tool_calls_made: None, tools_used: None, ..run }
    }
}

impl From<RunRecord> for Run {
    fn from(record: RunRecord) -> Self {
        Self {
            run_id: record.id,
            agent: record.agent,
            status: record.status,
            termination_reason: record.termination_reason,
            output: record.output,
            raw_response: record.raw_response,
            model: record.model,
            tokens_used: record.usage.total_tokens(),
            usage: (&record.usage).into(),
            attempts: Some(record.attempts),
            iterations: Some(record.iterations),
            tool_calls_made: Some(record.tool_calls_made),
            tools_used: Some(record.tools_used),
            latency_ms: record.latency_ms,
            partial: record.partial,
            error: record.error,
            warnings: record.warnings,
            callback_errors: record.callback_errors,
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

impl RunDetail {
    /// Everything about a run; its caps come from the definition where that is still the run's.
    pub(crate) fn of(mut record: RunRecord, app: &Shared) -> Self {
        let until = record.finished_at.unwrap_or_else(Utc::now);
        let seconds =
            record.started_at.map_or(0.0, |start| (until - start).as_seconds_f64().max(0.0));
        let used = BudgetUsed {
            iterations: record.iterations,
            duration_seconds: (seconds * 1000.0).round() / 1000.0,
            tool_calls: record.tool_calls_made,
            total_tokens: record.usage.total_tokens(),
            cost_usd: record.usage.cost_micro_usd.map(dollars),
            files_read: record.consumption.files_read,
            files_written: record.consumption.files_written,
            files_modified: record.consumption.files_modified.len(),
            lines_changed: record.consumption.lines_changed,
            commands: record.consumption.commands,
            network_requests: record.consumption.network_requests,
        };
        let limits =
            app.catalogue.agent(&record.agent).filter(|agent| agent.hash == record.definition_hash);
        let asked = Overrides::deserialize(&record.overrides)
            .unwrap_or_default()
            .budget
            .unwrap_or_default();
        Self {
            kind: record.kind,
            budget: BudgetView {
                used,
                tree: None,
                limits: limits.map(|a| a.definition.governance.budget.clone().narrowed_by(&asked)),
            },
            pending: Vec::new(),
            inputs: record.inputs.take(),
            overrides: record.overrides.take(),
            metadata: record.metadata.take(),
            session_id: record.session_id.take(),
            parent_run_id: record.parent_run_id,
            agent_version: std::mem::take(&mut record.agent_version),
            created_at: record.created_at,
            started_at: record.started_at,
            finished_at: record.finished_at,
            run: record.into(),
        }
    }
}

/// A run of this tenant.
pub(crate) async fn existing(app: &Shared, tenant: &str, run: Uuid) -> Result<RunRecord, Problem> {
    app.store.run(tenant, run).await?.ok_or_else(|| Problem::not_found("run"))
}

/// The labels by which runs are filtered, for the API document.
struct MetadataParams;

impl IntoParams for MetadataParams {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let name = ObjectBuilder::new().schema_type(Type::String).pattern(Some(r"^metadata\..+"));
        let labels = ObjectBuilder::new()
            .property_names(Some(name))
            .additional_properties(Some(ObjectBuilder::new().schema_type(Type::String)));
        let about = "Runs with all of these labels: one parameter a label, called `metadata.<key>`, as in \
                     `metadata.ticket=42`.";
        let parameter = ParameterBuilder::new().name("metadata").parameter_in(ParameterIn::Query);
        let parameter = parameter.style(Some(ParameterStyle::Form)).explode(Some(true));
        vec![parameter.description(Some(about)).schema(Some(labels)).build()]
    }
}

/// List runs
///
/// Newest first. `metadata.<key>=<value>` filters by a label and may be given for several keys.
#[utoipa::path(
    get, path = "/runs", tag = "runs", security(("bearer" = ["runs:read"])),
    params(
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
        ("status" = Option<RunStatus>, Query, description = "Runs that stand there."),
        ("session_id" = Option<String>, Query, description = "Runs of this session."),
        ("parent_run_id" = Option<Uuid>, Query, description = "Runs that this run delegated to."),
        ("termination_reason" = Option<TerminationReason>, Query, description = "Runs that ended for this reason."),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "Runs created after this instant."),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "Runs created before this instant."),
        MetadataParams,
        ListParams,
    ),
    responses((status = 200, description = "A page of runs.", body = Listing<RunDetail>)),
)]
pub(crate) async fn list_runs(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<RunDetail>>, Problem> {
    let filter = run_filter(&mut params)?;
    let page = by_time(&mut params, LISTS)?;
    params.finish()?;
    let runs = app.store.runs(&caller.tenant, &filter, &page).await?;
    let cursor = |run: &RunRecord| time_cursor(run.created_at, &run.id.to_string());
    let parked: Vec<RunRecord> =
        runs.iter().filter(|run| run.status.is_parked()).cloned().collect();
    let mut listing = Listing::of(runs, &page, cursor, |run| RunDetail::of(run, &app));
    for run in parked {
        let detail = detail(&app, run).await?;
        if let Some(row) = listing.data.iter_mut().find(|row| row.run.run_id == detail.run.run_id) {
            *row = detail;
        }
    }
    Ok(Json(listing))
}

fn run_filter(params: &mut Params) -> Result<RunFilter, Problem> {
    Ok(RunFilter {
        agent: params.text("agent"),
        status: params.value("status", "the status of a run", RunStatus::parse)?,
        session_id: params.text("session_id"),
        parent_run_id: params.uuid("parent_run_id")?,
        termination_reason: params.value("termination_reason", "a termination reason", |name| {
            let known = TerminationReason::deserialize(Value::from(name)).ok()?;
            Some(known.as_str().to_owned())
        })?,
        created_after: params.time("created_after")?,
        created_before: params.time("created_before")?,
        metadata: params.prefixed("metadata."),
    })
}

/// Get a run
#[utoipa::path(
    get, path = "/runs/{id}", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run.")),
    responses((status = 200, description = "The run.", body = RunDetail)),
)]
pub(crate) async fn get_run(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    RunId(id): RunId,
    params: Params,
) -> Result<Json<RunDetail>, Problem> {
    params.finish()?;
    let run = existing(&app, &caller.tenant, id).await?;
    Ok(Json(detail(&app, run).await?))
}

/// Everything about a run, and what it waits for.
pub(crate) async fn detail(app: &Shared, run: RunRecord) -> Result<RunDetail, Problem> {
    let mut pending = Vec::new();
    if run.status.is_parked() {
        let filter = ApprovalFilter {
            run_id: Some(run.id),
            status: Some(ApprovalStatus::Pending),
            call_id: None,
        };
        pending = app
            .store
            .approvals(&run.tenant, &filter, &Page { limit: MAX_PENDING, after: None })
            .await?;
        pending.sort_by_key(|asked| asked.seq);
    }
    let (tree, hash) = (tree(app, &run).await?, run.definition_hash.clone());
    let mut detail = RunDetail {
        pending: pending.into_iter().map(Pending::from).collect(),
        ..RunDetail::of(run, app)
    };
    detail.budget.tree = tree;
    if detail.budget.limits.is_none() {
        let snapshot = app.store.definition(&hash).await?;
        let definition = snapshot.and_then(|json| serde_json::from_str::<Definition>(&json).ok());
        let asked = Overrides::deserialize(&detail.overrides)
            .unwrap_or_default()
            .budget
            .unwrap_or_default();
        detail.budget.limits =
            definition.map(|definition| definition.governance.budget.narrowed_by(&asked));
    }
    Ok(detail)
}

/// What a run has consumed together with those that it started, where it started any.
async fn tree(app: &Shared, run: &RunRecord) -> Result<Option<TreeUsed>, Problem> {
    let delegated = run.tools_used.iter().any(|tool| Delegation::of_tool(tool).is_some());
    if run.parent_run_id.is_some() || !delegated {
        return Ok(None);
    }
    let used = |budget: SharedBudget| TreeUsed {
        iterations: budget.spent.iterations,
        tool_calls: budget.spent.tool_calls,
        total_tokens: budget.spent.tokens,
        cost_usd: run
            .usage
            .cost_micro_usd
            .map(|_| dollars(i64::try_from(budget.spent.micro_usd).unwrap_or(i64::MAX))),
    };
    Ok(app.store.shared_budget(run.id).await?.map(used))
}

impl From<ApprovalRecord> for Pending {
    fn from(asked: ApprovalRecord) -> Self {
        Self {
            call_id: asked.call_id,
            kind: asked.kind.as_str(),
            tool: asked.tool,
            display: escaped_json(&format!("{:#}", asked.arguments)).into_owned(),
            arguments: asked.arguments,
            reason: escaped(&asked.reason).into_owned(),
            expires_at: asked.expires_at,
        }
    }
}

/// Wait for a run
///
/// Answers the run when it has ended or waits for somebody, or as it is at the timeout.
#[utoipa::path(
    get, path = "/runs/{id}/wait", tag = "runs", security(("bearer" = ["runs:read"])),
    params(
        ("id" = Uuid, Path, description = "The run."),
        ("timeout" = Option<u32>, Query, description = "Seconds.", minimum = 0, maximum = 3600, example = 30),
    ),
    responses((status = 200, description = "The run.", body = RunDetail)),
)]
pub(crate) async fn wait_for_run(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    deadline: Deadline,
    RunId(id): RunId,
    mut params: Params,
) -> Result<Json<RunDetail>, Problem> {
    let seconds = params.value("timeout", "a number of seconds from 0 to 3600", |text| {
        text.parse().ok().filter(|seconds| *seconds <= 3600_u64)
    })?;
    params.finish()?;
    let until = deadline.0.min(Instant::now() + Duration::from_secs(seconds.unwrap_or(30)));
    let run = app
        .runtime
        .wait(&caller.tenant, id, until)
        .await?
        .ok_or_else(|| Problem::not_found("run"))?;
    Ok(Json(detail(&app, run).await?))
}

/// Why a run is cancelled.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CancelRequest {
    /// Told to whoever asks how the run ended; at most 1000 characters.
    #[schema(max_length = 1000, example = "no longer needed")]
    reason: Option<String>,
}

/// Cancel a run
///
/// Works wherever the run stands. The end itself is awaited by asking for the run.
#[utoipa::path(
    post, path = "/runs/{id}/cancel", tag = "runs", security(("bearer" = ["runs:cancel"])),
    params(("id" = Uuid, Path, description = "The run.")),
    request_body = Option<CancelRequest>,
    responses(
        (status = 200, description = "It had ended already and is unchanged.", body = RunDetail),
        (status = 202, description = "It is cancelled now or will be in a moment.", body = RunDetail),
    ),
)]
pub(crate) async fn cancel_run(
    State(app): State<App>,
    caller: Scoped<RunsCancel>,
    RunId(id): RunId,
    JsonObject(body): JsonObject,
) -> Result<(StatusCode, Json<RunDetail>), Problem> {
    let request: CancelRequest =
        fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    if request.reason.as_ref().is_some_and(|reason| reason.chars().count() > 1000) {
        return Err(Problem::at(Code::InvalidInputs, "/reason", "must be at most 1000 characters"));
    }
    let (status, run) =
        match app.runtime.cancel(&caller.tenant, id, request.reason.as_deref()).await? {
            None => return Err(Problem::not_found("run")),
            Some(CancelOutcome::AlreadyEnded(run)) => (StatusCode::OK, run),
            Some(CancelOutcome::Requested(run)) => (StatusCode::ACCEPTED, run),
        };
    Ok((status, Json(RunDetail::of(run, &app))))
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
