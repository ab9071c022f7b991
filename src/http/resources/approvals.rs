//! Approvals, client tool results and reviews: what parked runs wait for, and the answers to it.
//!
//! Only the first answer to a call is accepted; later ones are a conflict. The effect of an answer on
//! the run is decided when the run resumes.

use axum::Json;
use axum::extract::State;
use axum::response::Response;
use chrono::{DateTime, Utc};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::{PartialSchema, ToSchema};

use super::page::{LISTS, ListParams, Listing, MAX_PAGE, by_time, time_position};
use super::pending_views::Pending;
use super::redaction;
use super::run_views::{RunAnswer, answer_to};
use crate::bounds::json::escaped_key;
use crate::event::{InputResponse, InputResponses};
use crate::http::document::vocabulary::ApprovalStatus as StatusWord;
use crate::http::edge::auth::{AgentsInvoke, RunsApprove, Scoped, refuse_anonymous};
use crate::http::edge::extract::{CallId, JsonObject, Params, fields};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::{Label, Labels, null_as_default};
use crate::runtime::{CallRef, ReviewFinding, journals};
use crate::store::{ApprovalFilter, ApprovalRecord, ApprovalStatus};

/// A request of a run for an answer, and the answer if there is one.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Approval {
    #[serde(flatten)]
    asked: Pending,
    /// Whether an approver replaced the requested arguments; then `arguments` are the approver's.
    edited: bool,
    /// The agent's name.
    #[schema(example = "assistant")]
    agent: String,
    /// Whether it is pending, or how it was settled.
    #[schema(value_type = StatusWord, example = "pending")]
    status: &'static str,
    /// The id of the API key, or the subject of the token, that answered.
    #[schema(example = json!(null))]
    decided_by: Option<String>,
    /// When the answer was given.
    #[schema(example = json!(null))]
    decided_at: Option<DateTime<Utc>>,
    /// The reason given with the answer.
    #[schema(example = json!(null))]
    decision_reason: Option<String>,
}

impl From<ApprovalRecord> for Approval {
    fn from(mut row: ApprovalRecord) -> Self {
        let edited = row.take_edited();
        Self {
            edited,
            agent: row.agent.take().unwrap_or_default(),
            status: row.status.as_str(),
            decided_by: row.decided_by.take(),
            decided_at: row.decided_at,
            decision_reason: row.decision_reason.take().map(redaction::text),
            asked: row.into(),
        }
    }
}

/// List approvals
///
/// Everything that runs wait for: approvals, results of client tools, reviews and escalations.
/// Newest first; only pending ones unless `status` is given. A page has about 4 MiB at most, or one
/// approval, so it can have fewer than `limit`.
#[utoipa::path(
    get, path = "/approvals", tag = "approvals", security(("bearer" = ["runs:approve"])),
    params(
        ("status" = Option<StatusWord>, Query, description = "Approvals with this status; default `pending`."),
        ("run_id" = Option<Uuid>, Query, description = "Approvals of this run."),
        ListParams,
    ),
    responses((status = 200, description = "A page of approvals.", body = Listing<Approval>)),
)]
pub(crate) async fn list_approvals(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    mut params: Params,
) -> Result<Response, Problem> {
    let status = Some(params.one_of("status")?.unwrap_or(ApprovalStatus::Pending));
    let filter = ApprovalFilter {
        status,
        run_id: params.uuid("run_id")?,
        call_id: None,
        from_outside: true,
    };
    let page = by_time(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    let bytes = MAX_PAGE as u64;
    let piece = app.store.approval_piece(&caller.tenant, &filter, &page, bytes).await?;
    let permit = journals::permit(piece.bytes).await;
    let (shown, has_more) = page.fitted(piece);
    let rows = app.store.approvals(&caller.tenant, &filter, &shown).await?;
    let listing = move || {
        let _permit = permit;
        let last = rows.last().filter(|_| has_more);
        let last = last.map(|row| time_position(row.at, &row.call_id.to_string()));
        Ok(Listing::until(rows.into_iter().map(Approval::from).collect(), page.list, last))
    };
    redaction::respond(piece.bytes, listing).await
}

/// The approval of a tool call.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
#[schema(example = json!({"reason": "looks right"}))]
pub(crate) struct ApproveRequest {
    /// Recorded with the decision; at most 1000 characters.
    #[schema(max_length = 1000, example = "looks right")]
    reason: Option<String>,
    /// Arguments that replace the model's, which requires the scope for the tool, too. They are
    /// validated and checked against the policy in the same way, before the approval is accepted.
    #[schema(value_type = Option<Object>)]
    arguments: Option<Value>,
    /// Labels that the run no longer has, until it reads again what gives them.
    #[schema(value_type = Option<Vec<Label>>)]
    clears: Option<Labels>,
    /// The `seq` of the pending call, as it was seen. If the call was asked about again since, the
    /// answer is a conflict (409).
    #[schema(example = json!(null))]
    seq: Option<i64>,
}

/// The denial of a tool call.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct DenyRequest {
    /// Sent to the model as the result of the call; at most 1000 characters.
    #[schema(max_length = 1000, example = "not on a Friday")]
    reason: Option<String>,
    /// The `seq` of the pending call, as it was seen. If the call was asked about again since, the
    /// answer is a conflict (409).
    #[schema(example = json!(null))]
    seq: Option<i64>,
}

/// Parses an answer and checks the length of its reason.
fn parse_answer<T: DeserializeOwned + PartialSchema>(
    body: Map<String, Value>,
) -> Result<T, Problem> {
    if body
        .get("reason")
        .and_then(Value::as_str)
        .is_some_and(|reason| reason.chars().count() > 1000)
    {
        return Err(Problem::at(Code::InvalidInputs, "/reason", "must be at most 1000 characters"));
    }
    fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))
}

/// A reason that is not blank.
fn given(reason: Option<String>) -> Option<String> {
    reason.filter(|reason| !reason.trim().is_empty())
}

/// Approve a tool call
///
/// The call is executed once all pending calls of the run are answered. With the id of an
/// escalation, the run continues.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/approve", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("call_id" = Uuid, Path, description = "The id of the call or escalation."),
    ),
    request_body = Option<ApproveRequest>,
    responses((status = 200, description = "The answer was accepted; the current state of the run.", body = RunAnswer)),
)]
pub(crate) async fn approve_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(call_ref): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunAnswer>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    let ApproveRequest { reason, arguments, clears, seq } = parse_answer(body)?;
    let call_ref = CallRef { seq, ..call_ref };
    let clears = clears.unwrap_or_default();
    let run = app.runtime.approve(&caller, call_ref, given(reason), arguments, clears).await?;
    answer_to(&app, &caller, run).await
}

/// Deny a tool call
///
/// The model gets the denial as the result of the call. With the id of an escalation, the run ends.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/deny", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("call_id" = Uuid, Path, description = "The id of the call or escalation."),
    ),
    request_body = Option<DenyRequest>,
    responses((status = 200, description = "The answer was accepted; the current state of the run.", body = RunAnswer)),
)]
pub(crate) async fn deny_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(call_ref): CallId,
    params: Params,
    JsonObject(mut body): JsonObject,
) -> Result<Json<RunAnswer>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    // What an approval may have besides.
    body.retain(|field, value| !(["arguments", "clears"].contains(&&**field) && value.is_null()));
    let DenyRequest { reason, seq } = parse_answer(body)?;
    let call_ref = CallRef { seq, ..call_ref };
    let run = app.runtime.deny(&caller, call_ref, given(reason)).await?;
    answer_to(&app, &caller, run).await
}

/// The outcome of a call that a crash left unknown.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"outcome": "happened", "result": "deployed as version 7"}))]
pub(crate) struct ResolveRequest {
    /// Whether the call took effect; if it did not, it is executed now.
    outcome: ReviewOutcome,
    /// The result of the call, if it is known; sent to the model.
    #[schema(example = "deployed as version 7")]
    result: Option<String>,
    /// The `seq` of the pending call, as it was seen. If the call was asked about again since, the
    /// answer is a conflict (409).
    #[schema(example = json!(null))]
    seq: Option<i64>,
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
/// For a run with status `needs_review`: states whether a call took effect that must not be repeated
/// and whose outcome is unknown after a crash.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/resolve", tag = "approvals",
    security(("bearer" = ["runs:approve"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("call_id" = Uuid, Path, description = "The call's id."),
    ),
    request_body = ResolveRequest,
    responses((status = 200, description = "The answer was accepted; the current state of the run.", body = RunAnswer)),
)]
pub(crate) async fn resolve_tool_call(
    State(app): State<App>,
    caller: Scoped<RunsApprove>,
    CallId(call_ref): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunAnswer>, Problem> {
    params.finish()?;
    refuse_anonymous(&app.auth)?;
    let ResolveRequest { outcome, result, seq } = parse_answer(body)?;
    let call_ref = CallRef { seq, ..call_ref };
    let found = match (outcome, result) {
        (ReviewOutcome::Happened, result) => ReviewFinding::Happened { result },
        (ReviewOutcome::DidNotHappen, None) => ReviewFinding::DidNotHappen,
        (ReviewOutcome::DidNotHappen, Some(_)) => {
            return Err(Problem::at(
                Code::InvalidInputs,
                "/result",
                "must be absent for a call that did not happen",
            ));
        }
    };
    let run = app.runtime.review(&caller, call_ref, found).await?;
    answer_to(&app, &caller, run).await
}

/// The result of a client tool, or the input that another tool asks for.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"content": "The user said yes."}))]
pub(crate) struct ToolResultRequest {
    /// The content that the model gets; if it is over 64 KiB, only head and tail are kept. Required for
    /// a client tool.
    #[schema(example = "The user said yes.")]
    content: Option<String>,
    /// Whether the call failed.
    #[serde(default, deserialize_with = "null_as_default")]
    #[schema(required = false)]
    is_error: bool,
    /// The answers to the `requests` of the pending call's `input`, under the same names. Required
    /// where there is such an `input`, and nothing else then.
    #[schema(value_type = Option<BTreeMap<String, InputResponse>>, example = json!(null))]
    responses: Option<InputResponses>,
    /// The `round` of that `input`, so that an answer that is sent again does not answer what the tool
    /// has asked since. Required with `responses`.
    #[schema(example = json!(null))]
    round: Option<u32>,
}

/// Submit the result of a client tool
///
/// For a call of one of the request's `client_tools`, and for one whose tool asks for input (`input` of
/// the pending call). The run continues once all its pending calls are answered. Only the key that
/// started the run can do this, and keys with `runs:approve`.
#[utoipa::path(
    post, path = "/runs/{id}/tool-calls/{call_id}/result", tag = "approvals",
    security(("bearer" = ["agents:invoke"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("call_id" = Uuid, Path, description = "The call's id."),
    ),
    request_body = ToolResultRequest,
    responses((status = 200, description = "The answer was accepted; the current state of the run.", body = RunAnswer)),
)]
pub(crate) async fn give_tool_result(
    State(app): State<App>,
    caller: Scoped<AgentsInvoke>,
    CallId(call_ref): CallId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Json<RunAnswer>, Problem> {
    params.finish()?;
    let wrong = |at: &str, message: &str| Problem::at(Code::InvalidInputs, at, message);
    if let Some(at) = listed_response(&body) {
        return Err(wrong(&at, "must be an object"));
    }
    let run = match parse_answer(body)? {
        ToolResultRequest { content: Some(content), is_error, responses: None, .. } => {
            app.runtime.give_result(&caller, call_ref, content, is_error).await?
        }
        ToolResultRequest {
            content: None,
            is_error: false,
            responses: Some(responses),
            round: Some(round),
        } => app.runtime.give_input(&caller, call_ref, round, responses).await?,
        ToolResultRequest { content: None, responses: None, .. } => {
            return Err(wrong(
                "/content",
                "is required, or `responses` for a tool that asks for input",
            ));
        }
        ToolResultRequest { content: Some(_), .. } => {
            return Err(wrong("/content", "must be absent if `responses` is given"));
        }
        ToolResultRequest { is_error: false, round: None, .. } => {
            return Err(wrong("/round", "is required with `responses`"));
        }
        ToolResultRequest { .. } => {
            return Err(wrong("/is_error", "must be false or absent if `responses` is given"));
        }
    };
    answer_to(&app, &caller, run).await
}

/// The first answer to a request for input that is a list: serde would read it as the object's fields in order.
fn listed_response(body: &Map<String, Value>) -> Option<String> {
    let responses = body.get("responses")?.as_object()?;
    let (name, _) = responses.iter().find(|(_, response)| response.is_array())?;
    Some(format!("/responses/{}", escaped_key(name)))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_answer_to_a_request_for_input_is_no_list() {
        let listed = |responses: Value| {
            listed_response(&Map::from_iter([("responses".to_owned(), responses)]))
        };
        let whole = json!({"action": "accept", "content": {"n": [1]}});
        assert_eq!(listed(json!({"a": whole})), None);
        let in_order = json!({"a": whole, "b/c": ["accept", {"n": 1}]});
        assert_eq!(listed(in_order).as_deref(), Some("/responses/b~1c"));
        assert_eq!(listed(Value::Null), None);
    }
}
