//! Runs: the history, one run, waiting for its end, cancelling it.
//!
//! How a run is shown is in [`super::run_views`], its parts are in [`super::run_parts`].

use std::time::Duration;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn, ParameterStyle};
use utoipa::openapi::schema::{ObjectBuilder, Type};
use utoipa::{IntoParams, ToSchema};
use uuid::Uuid;

use super::page::{LISTS, ListPage, ListParams, by_time, time_position};
use super::run_views::{RunAnswer, RunDetail, RunSummary, RunViews, answer_to, detail};
use super::search::search;
use crate::http::edge::auth::{RunsCancel, RunsRead, Scoped, credential_lost, refused_key};
use crate::http::edge::extract::{JsonObject, Params, RunId, fields, invalid_parameter};
use crate::http::edge::layer::Deadline;
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::{App, Shared};
use crate::run::{RunStatus, TerminationReason};
use crate::store::{CancelOutcome, RunCursor, RunFilter, RunRecord};

/// A run of this tenant, or 404.
pub(crate) async fn existing(app: &Shared, tenant: &str, run: Uuid) -> Result<RunRecord, Problem> {
    app.store.run(tenant, run).await?.ok_or_else(|| Problem::not_found("run"))
}

/// A page of runs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RunPage {
    /// The runs of this page.
    data: Vec<RunSummary>,
    /// The `cursor` of the next page; null on the last page.
    #[schema(example = json!(null))]
    next_cursor: Option<String>,
    /// With `q`: how many runs were looked at for this page. The next page goes on where it ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    searched: Option<u32>,
}

/// The `metadata.<key>` filters, for the API document.
struct MetadataParams;

impl IntoParams for MetadataParams {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let name = ObjectBuilder::new().schema_type(Type::String).pattern(Some(r"^metadata\..+"));
        let labels = ObjectBuilder::new()
            .property_names(Some(name))
            .additional_properties(Some(ObjectBuilder::new().schema_type(Type::String)));
        let about = "Runs with all of these labels. Each label is a query parameter of its own named \
                     `metadata.<key>`, e.g. `metadata.ticket=42`.";
        let parameter = ParameterBuilder::new().name("metadata").parameter_in(ParameterIn::Query);
        let parameter = parameter.style(Some(ParameterStyle::Form)).explode(Some(true));
        vec![parameter.description(Some(about)).schema(Some(labels)).build()]
    }
}

/// List runs
///
/// Newest first, without inputs, outputs and overrides: those are in `GET /runs/{id}`.
/// `metadata.<key>=<value>` filters by a label and can be given for 16 keys.
///
/// `q` searches for at most 64 words, ignoring the case of A to Z, in agents' names, ids, values of metadata, inputs
/// and outputs, as they are served. One page searches at most 10,000 runs (`searched`), and can have
/// fewer runs than `limit`, or none, although older ones match: `next_cursor` continues the search.
#[utoipa::path(
    get, path = "/runs", tag = "runs", security(("bearer" = ["runs:read"])),
    params(
        ("agent" = Option<String>, Query, description = "Runs of this agent."),
        ("status" = Option<RunStatus>, Query, description = "Runs that show this status. A run that waits for child runs has theirs."),
        ("session_id" = Option<String>, Query, description = "Runs of this session."),
        ("parent_run_id" = Option<Uuid>, Query, description = "Child runs of this run."),
        ("termination_reason" = Option<TerminationReason>, Query, description = "Runs that ended for this reason."),
        ("created_after" = Option<DateTime<Utc>>, Query, description = "Runs created after this time."),
        ("created_before" = Option<DateTime<Utc>>, Query, description = "Runs created before this time."),
        ("q" = Option<String>, Query, description = "Runs that have all of these words.", example = "invoice 4711"),
        MetadataParams,
        ListParams,
    ),
    responses((status = 200, description = "A page of runs.", body = RunPage)),
)]
pub(crate) async fn list_runs(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<RunPage>, Problem> {
    let filter = run_filter(&mut params)?;
    let text = params.text("q").filter(|text| !text.trim().is_empty());
    let page = by_time(&mut params, &caller.tenant, LISTS)?;
    params.finish()?;
    let Some(text) = text else {
        let (data, next_cursor) = listed(&app, &caller.tenant, &filter, page).await?;
        return Ok(Json(RunPage { data, next_cursor, searched: None }));
    };
    let found = search(&app, &caller.tenant, &filter, above(filter.status), &text, page).await?;
    let (mut views, mut data) = (RunViews::new(&app), Vec::with_capacity(found.runs.len()));
    views.read_ahead(&caller.tenant, &found.runs).await?;
    for run in found.runs {
        let shown = views.summary(run).await?.listed();
        if filter.status.is_none_or(|status| shown.status() == status) {
            data.push(shown);
        }
    }
    Ok(Json(RunPage { data, next_cursor: found.next_cursor, searched: Some(found.searched) }))
}

/// Runs that one request for a list looks at, at most.
const MAX_LOOKED_AT: usize = 2_000;

/// The statuses of child runs for which a run that waits for them may show this status.
fn above(status: Option<RunStatus>) -> &'static [RunStatus] {
    match status {
        Some(RunStatus::Running) => &[RunStatus::Running, RunStatus::Queued],
        Some(RunStatus::NeedsReview) => &[RunStatus::NeedsReview],
        Some(RunStatus::AwaitingToolResults) => &[RunStatus::AwaitingToolResults],
        _ => &[],
    }
}

/// A page of runs. A run that waits for child runs shows their status and is listed by it, although its
/// row has another one.
async fn listed(
    app: &Shared,
    tenant: &str,
    filter: &RunFilter,
    page: ListPage<RunCursor>,
) -> Result<(Vec<RunSummary>, Option<String>), Problem> {
    let above = above(filter.status);
    let ListPage { mut page, list } = page;
    let parents = RunFilter { status: None, ..filter.clone() };
    let cursor = |last: &RunCursor| time_position(last.at, &last.id).in_list(list);
    let (mut views, mut data, mut looked_at) = (RunViews::new(app), Vec::new(), 0);
    loop {
        let mut runs = app.store.runs(tenant, filter, &page).await?;
        if !above.is_empty() {
            runs.extend(app.store.runs_above(tenant, above, &parents, &page).await?);
            runs.sort_by_key(|run| std::cmp::Reverse((run.created_at, run.id)));
            runs.dedup_by_key(|run| run.id);
            runs.truncate(page.limit as usize);
        }
        let is_last = runs.len() < page.limit as usize;
        looked_at += runs.len();
        views.read_ahead(tenant, &runs).await?;
        for run in runs {
            if data.len() + 1 == page.limit as usize {
                return Ok((data, page.after.as_ref().map(cursor)));
            }
            page.after = Some(RunCursor { at: run.created_at, id: run.id.to_string() });
            let shown = views.summary(run).await?.listed();
            if filter.status.is_none_or(|status| shown.status() == status) {
                data.push(shown);
            }
        }
        if is_last {
            return Ok((data, None));
        }
        if looked_at > MAX_LOOKED_AT {
            return Ok((data, page.after.as_ref().map(cursor)));
        }
    }
}

/// Labels that a filter may have: each is a condition of the query.
const MAX_LABELS: usize = 16;

fn run_filter(params: &mut Params) -> Result<RunFilter, Problem> {
    let metadata = params.prefixed("metadata.");
    if let Some((key, _)) = metadata.get(MAX_LABELS) {
        let name = format!("metadata.{key}");
        return Err(invalid_parameter(&name, &format!("is one of more than {MAX_LABELS} labels")));
    }
    Ok(RunFilter {
        agent: params.text("agent"),
        status: params.one_of("status")?,
        session_id: params.text("session_id"),
        parent_run_id: params.uuid("parent_run_id")?,
        termination_reason: params
            .one_of::<TerminationReason>("termination_reason")?
            .map(|reason| reason.as_str().to_owned()),
        created_after: params.time("created_after")?,
        created_before: params.bound("created_before")?,
        metadata,
    })
}

/// Get a run
#[utoipa::path(
    get, path = "/runs/{id}", tag = "runs", security(("bearer" = ["runs:read"])),
    params(("id" = Uuid, Path, description = "The run's id.")),
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

/// Wait for a run
///
/// Responds when the run has ended or is parked, or with its current state at the timeout.
#[utoipa::path(
    get, path = "/runs/{id}/wait", tag = "runs", security(("bearer" = ["runs:read"])),
    params(
        ("id" = Uuid, Path, description = "The run's id."),
        ("timeout" = Option<u32>, Query, description = "Maximum time to wait, in seconds; default 30.", minimum = 0, maximum = 3600, example = 30),
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
    let run = tokio::select! {
        run = app.runtime.wait(&caller.tenant, id, until) => run?,
        () = credential_lost(&app, caller.credential()) => return Err(refused_key()),
    };
    let run = run.ok_or_else(|| Problem::not_found("run"))?;
    Ok(Json(detail(&app, run).await?))
}

/// A request to cancel a run.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct CancelRequest {
    /// Recorded in the run's error; at most 1000 characters.
    #[schema(max_length = 1000, example = "no longer needed")]
    reason: Option<String>,
}

/// Cancel a run
///
/// A run can be cancelled in every status and on every replica. The response does not wait for the run to end.
#[utoipa::path(
    post, path = "/runs/{id}/cancel", tag = "runs", security(("bearer" = ["runs:cancel"])),
    params(("id" = Uuid, Path, description = "The run's id.")),
    request_body = Option<CancelRequest>,
    responses(
        (status = 200, description = "The run had already ended and is unchanged.", body = RunAnswer),
        (status = 202, description = "The run is cancelled or is being cancelled.", body = RunAnswer),
    ),
)]
pub(crate) async fn cancel_run(
    State(app): State<App>,
    caller: Scoped<RunsCancel>,
    RunId(id): RunId,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<(StatusCode, Json<RunAnswer>), Problem> {
    params.finish()?;
    let request: CancelRequest =
        fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    if request.reason.as_ref().is_some_and(|reason| reason.chars().count() > 1000) {
        return Err(Problem::at(Code::InvalidInputs, "/reason", "must be at most 1000 characters"));
    }
    let (status, run) = match app
        .runtime
        .cancel(&caller.tenant, id, &caller.subject, request.reason.as_deref())
        .await?
    {
        None => return Err(Problem::not_found("run")),
        Some(CancelOutcome::AlreadyEnded(run)) => (StatusCode::OK, run),
        Some(CancelOutcome::Requested(run)) => (StatusCode::ACCEPTED, run),
        Some(CancelOutcome::Unreadable) => return Err(unreadable_row()),
    };
    Ok((status, answer_to(&app, &caller, run).await?))
}

fn unreadable_row() -> Problem {
    let detail = "The run and those below it are cancelled, but the run's row in the database cannot be \
                  read. Cancel it again when the row is repaired.";
    Problem::new(Code::Internal, detail)
}

#[cfg(test)]
#[path = "runs_tests.rs"]
mod tests;
