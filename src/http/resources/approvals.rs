//! What runs wait for: the list of it, and answers to it.
//!
//! An answer is taken once; who comes later hears that nothing is waited for any more. What an
//! answer means for the run is decided where the run goes on.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_cursor};
use super::runs::{Pending, RunDetail, detail};
use crate::http::document::vocabulary::ApprovalStatus as StatusWord;
use crate::http::edge::auth::{AgentsInvoke, RunsApprove, Scoped, refuse_anonymous};
use crate::http::edge::extract::{CallId, JsonObject, Params, fields};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::runtime::Found;
use crate::store::{ApprovalFilter, ApprovalRecord, ApprovalStatus};

/// Something that a run waits for, or waited for.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Approval {
    #[serde(flatten)]
    asked: Pending,
    /// The run.
    run_id: Uuid,
    /// Its agent.
    #[schema(example = "assistant")]
    agent: String,
    /// Where it stands.
    #[schema(value_type = StatusWord, example = "pending")]
    status: &'static str,
    /// Who answered: key id or token subject.
    #[schema(example = json!(null))]
    decided_by: Option<String>,
    /// When it was answered.
    #[schema(example = json!(null))]
    decided_at: Option<DateTime<Utc>>,
    /// Why, in their words.
    #[schema(example = json!(null))]
    decision_reason: Option<String>,
}

impl From<ApprovalRecord> for Approval {
    fn from(mut row: ApprovalRecord) -> Self {
        Self {
            run_id: row.run_id,
            agent: row.agent.take().unwrap_or_default(),
            status: row.status.as_str(),
            decided_by: row.decided_by.take(),
            decided_at: row.decided_at,
            decision_reason: row.decision_reason.take(),
            asked: row.into(),
        }
    }
}

/// List what runs wait for
///
/// Newest first; what is pending, unless another status is asked for.
#[utoipa::path(
    get, path = "/approvals", tag = "approvals", security(("bearer" = ["runs:approve"])),
    params(
        ("status" = Option<StatusWord>, Query, description = "What stands there; default `pending`."),
        ("run_id" = Option<Uuid>, Query, description = "What this run asked for."),
        ListParams,
    ),
    responses((status = 200, description = "A page of what runs wait for.", body = Listing<Approval>)),
)]
pub(crate) async fn list_approvals(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    mut params: Params,
) -> Result<Json<Listing<Approval>>, Problem> {
    let status = params.value("status", "the status of an approval", ApprovalStatus::parse)?;
    let status = Some(status.unwrap_or(ApprovalStatus::Pending));
    let filter = ApprovalFilter { status, run_id: params.uuid("run_id")?, call_id: None };
    let page = by_time(&mut params, LISTS)?;
    params.finish()?;
    let rows = app.store.approvals(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &ApprovalRecord| time_cursor(row.at, &row.call_id.to_string());
    Ok(Json(Listing::of(rows, &page, cursor, Approval::from)))
}

/// Lets a call be executed.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(example = json!({"reason": "looks right"}))]
pub(crate) struct ApproveRequest {
    /// Kept with the decision; at most 1000 characters.
    #[schema(max_length = 1000, example = "looks right")]
    reason: Option<String>,
    /// Arguments to execute the call with instead of the model's; they are checked and judged like
    /// those.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Value>,
}

/// Refuses a call.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DenyRequest {
    /// Told to the model; at most 1000 characters.
    #[schema(max_length = 1000, example = "not on a Friday")]
    reason: Option<String>,
}

/// The fields of an answer, whose reason has a bound.
fn answer<T: for<'de> Deserialize<'de>>(body: Map<String, Value>) -> Result<T, Problem> {
    if body
        .get("reason")
        .and_then(Value::as_str)
        .is_some_and(|reason| reason.chars().count() > 1000)
    {
        return Err(Problem::at(Code::InvalidInputs, "/reason", "must be at most 1000 characters"));
    }
    fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))
}

/// Approve a tool call
///
/// The call is executed when everything that the run waits for is answered. With the id of an
/// escalation: the run goes on.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/approve", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run."),
        ("call_id" = Uuid, Path, description = "The call, or the escalation."),
    ),
    request_body = Option<ApproveRequest>,
    responses((status = 200, description = "Taken; the run as it is now.", body = RunDetail)),
)]
pub(crate) async fn approve_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(place): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunDetail>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    let ApproveRequest { reason, arguments } = answer(body)?;
    let run = app.runtime.approve(&caller, place, reason, arguments).await?;
    Ok(Json(detail(&app, run).await?))
}

/// Deny a tool call
///
/// The model is told so. With the id of an escalation: the run ends.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/deny", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run."),
        ("call_id" = Uuid, Path, description = "The call, or the escalation."),
    ),
    request_body = Option<DenyRequest>,
    responses((status = 200, description = "Taken; the run as it is now.", body = RunDetail)),
)]
pub(crate) async fn deny_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(place): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunDetail>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    let DenyRequest { reason } = answer(body)?;
    let run = app.runtime.deny(&caller, place, reason).await?;
    Ok(Json(detail(&app, run).await?))
}

/// What became of a call whose outcome a crash left unknown.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"outcome": "happened", "result": "deployed as version 7"}))]
pub(crate) struct ResolveRequest {
    /// Whether it took effect; if not, it is executed now.
    outcome: ReviewOutcome,
    /// What it brought, where that is known; told to the model.
    #[schema(example = "deployed as version 7")]
    result: Option<String>,
}

/// Whether a call took effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReviewOutcome {
    Happened,
    DidNotHappen,
}

/// Resolve a tool call
///
/// For a run that needs a review: says what became of a call that must not be repeated and that the
/// service did not see the end of.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/resolve", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run."),
        ("call_id" = Uuid, Path, description = "The call."),
    ),
    request_body = ResolveRequest,
    responses((status = 200, description = "Taken; the run as it is now.", body = RunDetail)),
)]
pub(crate) async fn resolve_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(place): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunDetail>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    let found = match answer(body)? {
        ResolveRequest { outcome: ReviewOutcome::Happened, result } => Found::Happened { result },
        ResolveRequest { outcome: ReviewOutcome::DidNotHappen, result: None } => {
            Found::DidNotHappen
        }
        ResolveRequest { .. } => {
            return Err(Problem::at(
                Code::InvalidInputs,
                "/result",
                "what did not happen has no result",
            ));
        }
    };
    let run = app.runtime.review(&caller, place, found).await?;
    Ok(Json(detail(&app, run).await?))
}

/// The result of a tool that the caller executes.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolResultRequest {
    /// What the model reads; of more than 64 KiB, head and tail are kept.
    #[schema(example = "The user said yes.")]
    content: String,
    /// Whether the call failed.
    #[serde(default)]
    #[schema(required = false)]
    is_error: bool,
}

/// Give the result of a client tool
///
/// For a call of one of the request's `client_tools`. The run goes on when everything that it waits
/// for is answered.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/result", tag = "approvals",
    security(("bearer" = ["agents:invoke"])),
    params(
        ("id" = Uuid, Path, description = "The run."),
        ("call_id" = Uuid, Path, description = "The call."),
    ),
    request_body = ToolResultRequest,
    responses((status = 200, description = "Taken; the run as it is now.", body = RunDetail)),
)]
pub(crate) async fn give_tool_result(
    State(app): State<App>,
    caller: Scoped<AgentsInvoke>,
    CallId(place): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunDetail>, Problem> {
    params.finish()?;
    let ToolResultRequest { content, is_error } = answer(body)?;
    let run = app.runtime.give_result(&caller, place, content, is_error).await?;
    Ok(Json(detail(&app, run).await?))
}
