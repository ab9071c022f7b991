//! Invoking an agent. The response is the outcome as JSON, an event stream, or 202.
//!
//! The run does not depend on the connection: it continues if the client disconnects, and is found by
//! its id. The request is read by [`super::invocation_headers`] (headers) and [`super::invocation`] (body).

use std::sync::Arc;

use axum::Json;
use axum::extract::{Request, State};
use axum::http::header::LOCATION;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::Value;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::dry_run::DryRun;
use super::invocation::{CallToolRequest, Invocation, InvokeIterativeRequest, InvokeRequest};
use super::invocation_headers::{InvocationHeaders, Streaming};
use super::redaction;
use super::run_views::{Run, detail};
use super::runs::existing;
use super::stream::{self, CancelOnDrop, Viewer};
use super::uploads::InvocationBody;
use crate::fairness::{CpuAccount, FairTask};
use crate::http::document::answers::{Answers, Streamed};
use crate::http::edge::auth::{
    AgentsRead, FilesRead, FilesWrite, Scope as _, credential_ended, credential_lost, forbidden,
};
use crate::http::edge::extract::{JsonObject, Name, Params};
use crate::http::edge::problem::{Code, Problem};
use crate::http::edge::rate_limit::AdmittedCaller;
use crate::http::edge::responses::{X_RUN_ID, run_id_header};
use crate::http::state::App;
use crate::run::{Caller, RunKind, RunStatus};
use crate::runtime::{Accepted, Mode, StartRequest, Started, Upload, Uploads, WaitError};
use crate::store::RunRecord;

const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");
const RESPOND_ASYNC: HeaderValue = HeaderValue::from_static("respond-async");

/// Invoke an agent once
///
/// Exactly one model call without tools. If the run was started, the response is 200, or 202 if it
/// has not ended yet; `status` and `error` say whether it succeeded. The body can also be
/// `multipart/form-data`: one part `request` with the JSON body, and up to 64 parts `files` whose
/// filenames are paths in the run's workspace; this needs the scope `files:write`, too. `files` in the
/// body copies files of other workspaces; this needs `files:read` and `files:write`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent's name."), InvocationHeaders),
    request_body = Option<InvokeRequest>,
    responses(Answers),
)]
pub(crate) async fn invoke_agent(
    State(app): State<App>,
    caller: AdmittedCaller,
    headers: InvocationHeaders,
    Name(agent): Name,
    params: Params,
    request: Request,
) -> Result<Response, Problem> {
    params.finish()?;
    let body = InvocationBody::read(&app, &caller, request).await?;
    invoke(&app, &caller, &headers, agent, RunKind::Single.as_str(), body).await
}

/// Invoke an agent
///
/// Runs the agent's loop of model calls and tool calls until an output is accepted or a limit is
/// reached. A request can only narrow what the agent's definition allows. If the run was started,
/// the response is 200, or 202 if it has not ended yet; `status` and `error` say whether it
/// succeeded. The body can also be `multipart/form-data`, as of `invoke_agent`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke-iterative", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent's name."), InvocationHeaders),
    request_body = Option<InvokeIterativeRequest>,
    responses(Answers),
)]
pub(crate) async fn invoke_agent_iterative(
    State(app): State<App>,
    caller: AdmittedCaller,
    headers: InvocationHeaders,
    Name(agent): Name,
    params: Params,
    request: Request,
) -> Result<Response, Problem> {
    params.finish()?;
    let body = InvocationBody::read(&app, &caller, request).await?;
    invoke(&app, &caller, &headers, agent, RunKind::Iterative.as_str(), body).await
}

/// Invoke an agent and stream its events
///
/// As `invoke_agent_iterative`, always answered by the events of the run as Server-Sent Events,
/// whatever `Accept` says. After a disconnect, `GET /runs/{id}/events` continues behind the last
/// event received. A dry run has no events: `dry_run` is refused.
#[utoipa::path(
    post, path = "/agents/{name}/stream", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent's name."), InvocationHeaders),
    request_body = Option<InvokeIterativeRequest>,
    responses(Streamed),
)]
pub(crate) async fn stream_agent(
    State(app): State<App>,
    caller: AdmittedCaller,
    Streaming(headers): Streaming,
    Name(agent): Name,
    params: Params,
    request: Request,
) -> Result<Response, Problem> {
    params.finish()?;
    let body = InvocationBody::read(&app, &caller, request).await?;
    if body.body.get("dry_run") == Some(&Value::Bool(true)) {
        let why = "cannot be streamed; use POST /agents/{name}/dry-run";
        return Err(Problem::at(Code::InvalidOverride, "/dry_run", why));
    }
    invoke(&app, &caller, &headers, agent, STREAM, body).await
}

/// Call a tool as an agent
///
/// Executes one call of one of the agent's tools as a run of the kind `call`, in which no model is
/// asked. The call passes the same gate as one that a model makes: scopes (also `tools:execute`, or
/// `tools:` and the tool's name), policies, approvals, budgets, rates and the audit log. The run's output is
/// the tool's result; a call that fails, or is refused, ends the run with `TOOL_FAILURE`. Where the
/// gate asks for an approval the run is parked, and the answer is 202. The body can also be
/// `multipart/form-data`, as of `invoke_agent`. `judge_call` says beforehand what the gate would decide.
#[utoipa::path(
    post, path = "/agents/{name}/call", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent's name."), InvocationHeaders),
    request_body = CallToolRequest,
    responses(Answers),
)]
pub(crate) async fn call_tool(
    State(app): State<App>,
    caller: AdmittedCaller,
    headers: InvocationHeaders,
    Name(agent): Name,
    params: Params,
    request: Request,
) -> Result<Response, Problem> {
    params.finish()?;
    let body = InvocationBody::read(&app, &caller, request).await?;
    let is_given = |dry: &Value| !matches!(dry, Value::Null | Value::Bool(false));
    if body.body.get("dry_run").is_some_and(is_given) {
        let why = "is not supported for a single tool call; use POST /agents/{name}/policy/judge";
        return Err(Problem::at(Code::InvalidOverride, "/dry_run", why));
    }
    invoke(&app, &caller, &headers, agent, RunKind::Call.as_str(), body).await
}

/// Show what a run would be
///
/// The prompt, tools and limits that `invoke_agent_iterative` would give the run with the same
/// body. It is rejected for the same reasons; nothing is stored and no model is called. Messages and
/// governance, which the agent's definition says, are for keys with `agents:read`.
#[utoipa::path(
    post, path = "/agents/{name}/dry-run", tag = "agents",
    security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent's name.")),
    request_body = Option<InvokeIterativeRequest>,
    responses((status = 200, description = "What the run would be.", body = DryRun)),
)]
pub(crate) async fn dry_run_agent(
    State(app): State<App>,
    caller: AdmittedCaller,
    Name(agent): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Response, Problem> {
    params.finish()?;
    let invocation = Invocation::read(RunKind::Iterative, body)?;
    let request = request(&caller, agent, RunKind::Iterative, invocation, Vec::new())?;
    dry_run(&app, &caller, request).await
}

async fn dry_run(app: &App, caller: &Caller, request: StartRequest) -> Result<Response, Problem> {
    let outcome = app.runtime.dry_run(request).await?;
    let (bytes, may_read) = (outcome.bytes(), caller.has(AgentsRead::NAME));
    let answer = move || {
        let dry_run = DryRun::from(outcome);
        if may_read { dry_run } else { dry_run.without_definition() }
    };
    redaction::respond_in_turn(bytes, answer).await
}

/// The request to the runtime for an immediate answer.
fn request(
    caller: &AdmittedCaller,
    agent: String,
    kind: RunKind,
    invocation: Invocation,
    received: Vec<Upload>,
) -> Result<StartRequest, Problem> {
    let Invocation {
        inputs,
        run_id,
        session_id,
        dry_run: _,
        metadata,
        overrides,
        webhook,
        queue,
        files,
    } = invocation;
    let needed = [FilesRead::NAME, FilesWrite::NAME];
    if let Some(missing) = needed.into_iter().find(|scope| !files.is_empty() && !caller.has(scope))
    {
        return Err(forbidden(missing));
    }
    let has_files = !files.is_empty() || !received.is_empty();
    Ok(StartRequest {
        caller: Arc::clone(caller),
        agent,
        kind,
        mode: Mode::Now,
        idempotency: None,
        traceparent: None,
        run_id,
        inputs,
        metadata,
        session_id,
        overrides,
        webhook,
        uploads: has_files.then(|| Arc::new(Uploads::new(received, files))),
        queue,
        until: None,
    })
}

/// The route [`stream_agent`], as idempotency keys know it.
const STREAM: &str = "stream";

async fn invoke(
    app: &App,
    caller: &AdmittedCaller,
    headers: &InvocationHeaders,
    agent: String,
    route: &str,
    InvocationBody { body, uploads, listed }: InvocationBody,
) -> Result<Response, Problem> {
    let idempotency = headers.idempotency(route, &agent, &body, &listed);
    let kind = RunKind::parse(route).unwrap_or(RunKind::Iterative);
    let invocation = Invocation::read(kind, body)?;
    let is_dry = invocation.dry_run;
    let until = headers.until();
    let request = StartRequest {
        mode: headers.mode(),
        idempotency,
        traceparent: headers.traceparent.clone(),
        until: headers.takes_accepted().then_some(until),
        ..request(caller, agent, kind, invocation, uploads)?
    };
    if is_dry {
        return dry_run(app, caller, request).await;
    }
    let (mut accepted, cancel) = start(app, caller, request, headers.cancel_on_disconnect).await?;
    let (run_id, is_replayed, follower) = match &mut accepted {
        Accepted::Started(started) => (started.run_id, false, started.follower.take()),
        Accepted::Queued(run_id) => (*run_id, false, None),
        Accepted::Known(run_id) => (*run_id, true, None),
    };
    let is_queued = matches!(accepted, Accepted::Queued(_)) && headers.mode() == Mode::Queued;
    let mut response = if headers.wants_events() {
        let follower = follower.unwrap_or_else(|| app.runtime.follow(&caller.tenant, run_id, 0));
        let viewer = Viewer { tenant: &caller.tenant, credential: &caller.credential };
        let mut response = stream::response(app, viewer, run_id, 0, follower, cancel);
        if is_queued {
            response.headers_mut().insert(PREFERENCE_APPLIED, RESPOND_ASYNC);
        }
        response
    } else {
        let answer = tokio::select! {
            answer = outcome(app, caller, headers, until, accepted) => answer,
            () = credential_lost(app, &caller.credential) => Err(credential_ended().of_run(run_id)),
        };
        CancelOnDrop::disarm(cancel);
        answer?
    };
    response.headers_mut().insert(X_RUN_ID, run_id_header(run_id));
    if is_replayed {
        response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// Starts the run. If `cancels`, the run is cancelled when its client disconnects, even during the start.
async fn start(
    app: &App,
    caller: &Arc<Caller>,
    request: StartRequest,
    cancels: bool,
) -> Result<(Accepted, Option<CancelOnDrop>), Problem> {
    if !cancels {
        return Ok((Box::pin(app.runtime.start(request)).await?, None));
    }
    let (runtime, caller) = (app.runtime.clone(), Arc::clone(caller));
    let payer = CpuAccount::tenant(&caller.tenant);
    let (sender, receiver) = oneshot::channel();
    let start = async move {
        let started = Box::pin(runtime.start(request)).await.map(|accepted| {
            let begun = match &accepted {
                Accepted::Started(Started { run_id, .. }) | Accepted::Queued(run_id) => {
                    Some(*run_id)
                }
                Accepted::Known(_) => None,
            };
            let cancel = begun.map(|run| CancelOnDrop::new(runtime.clone(), &caller, run));
            (accepted, cancel)
        });
        let _ = sender.send(started); // if the client has left, this drops and so cancels the run
    };
    tokio::spawn(FairTask::new(payer, start));
    let started = receiver.await.map_err(|_| Problem::internal("the start of a run panicked"))?;
    started.map_err(Problem::from)
}

/// The outcome of the run, or 202 if it has not ended when the client stops waiting.
async fn outcome(
    app: &App,
    caller: &Caller,
    headers: &InvocationHeaders,
    until: Instant,
    accepted: Accepted,
) -> Result<Response, Problem> {
    let is_queued = matches!(accepted, Accepted::Queued(_)) && headers.mode() == Mode::Queued;
    let (Accepted::Queued(run_id)
    | Accepted::Known(run_id)
    | Accepted::Started(Started { run_id, .. })) = accepted;
    let waited = async || app.runtime.wait(&caller.tenant, run_id, until).await;
    let there = async || match waited().await {
        Ok(None) => Err(deleted()),
        found => found.map_err(Problem::from),
    };
    let run = match accepted {
        Accepted::Queued(_) | Accepted::Known(_) => there().await,
        Accepted::Started(started) => {
            match tokio::time::timeout_at(until, started.finished()).await {
                Ok(Ok(run)) => Ok(Some(run)),
                Ok(Err(WaitError::Detached(_))) if app.runtime.is_draining() => Ok(None),
                // The run was given back, or its start could not be stored.
                Ok(Err(WaitError::Detached(_))) => match waited().await {
                    Ok(None) => {
                        let detail =
                            "The run was not started: the store is temporarily unavailable.";
                        return Err(Problem::new(Code::StoreUnavailable, detail));
                    }
                    found => found.map_err(Problem::from),
                },
                Ok(Err(WaitError::Parked(_))) => there().await,
                Err(_) if headers.takes_accepted() => {
                    existing(app, &caller.tenant, run_id).await.map(Some)
                }
                Err(_) => Ok(None),
            }
        }
    };
    let answered = match run {
        Ok(run) => Box::pin(answer_with(app, headers, run, is_queued)).await,
        Err(problem) => Err(problem),
    };
    answered.map_err(|problem| problem.of_run(run_id))
}

/// The run was deleted, with its session or by retention, while its client waited.
fn deleted() -> Problem {
    Problem::new(Code::NotFound, "The run was deleted while its outcome was waited for.")
}

/// The run if it has ended or the client accepts it unfinished, else why there is no answer.
async fn answer_with(
    app: &App,
    headers: &InvocationHeaders,
    run: Option<RunRecord>,
    is_queued: bool,
) -> Result<Response, Problem> {
    match run {
        Some(run) if run.status.is_terminal() && !is_queued => {
            Ok(Json(Run::of(&app.store, run).await?).into_response())
        }
        Some(run)
            if headers.takes_accepted()
                || !matches!(run.status, RunStatus::Queued | RunStatus::Running) =>
        {
            let location = HeaderValue::try_from(format!("/v1/runs/{}", run.id)).ok();
            let mut response =
                (StatusCode::ACCEPTED, Json(detail(app, run).await?)).into_response();
            response.headers_mut().extend(location.map(|location| (LOCATION, location)));
            if headers.takes_accepted() {
                response.headers_mut().insert(PREFERENCE_APPLIED, RESPOND_ASYNC);
            }
            Ok(response)
        }
        _ if app.runtime.is_draining() => Err(Problem::new(
            Code::Draining,
            "The run continues in the background; read it with GET /v1/runs/{run_id}.",
        )),
        _ => Err(Problem::new(
            Code::Timeout,
            "The run has not ended within the request timeout; read it with GET /v1/runs/{run_id}.",
        )),
    }
}
