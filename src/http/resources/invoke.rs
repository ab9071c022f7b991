//! Invoking an agent, on the caller's terms: the end as JSON, the events as they happen, or a 202.
//!
//! The run does not depend on the connection: whoever goes away, or waits no longer, finds it by
//! its id. What the caller may ask for is read in [`super::terms`] and [`super::invocation`].

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::header::LOCATION;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value};

use super::dry_run::DryRun;
use super::invocation::{Invocation, InvokeIterativeRequest, InvokeRequest};
use super::runs::{Run, detail, existing};
use super::stream::{self, Leash};
use super::terms::Terms;
use crate::http::document::answers::Answers;
use crate::http::edge::extract::{JsonObject, Name, Params};
use crate::http::edge::outgoing::{X_RUN_ID, run_id_header};
use crate::http::edge::problem::{Code, Problem};
use crate::http::edge::rate_limit::Admitted;
use crate::http::state::App;
use crate::run::{Caller, RunKind, RunStatus};
use crate::runtime::{Accepted, Mode, StartRequest, WaitError};

const IDEMPOTENCY_REPLAYED: HeaderName = HeaderName::from_static("idempotency-replayed");
const PREFERENCE_APPLIED: HeaderName = HeaderName::from_static("preference-applied");

/// Invoke an agent once
///
/// Exactly one model call, no tools. A run that started always answers 200, or 202 where the caller
/// does not want to wait; how it went is in `status` and `error`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent."), Terms),
    request_body = Option<InvokeRequest>,
    responses(Answers),
)]
pub(crate) async fn invoke_agent(
    State(app): State<App>,
    caller: Admitted,
    terms: Terms,
    Name(agent): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Response, Problem> {
    params.finish()?;
    invoke(&app, &caller, &terms, agent, RunKind::Single, body).await
}

/// Invoke an agent
///
/// Runs the agent's loop of model calls and tool calls until an output is accepted or a limit
/// strikes. A request can only narrow what the definition allows. A run that started always answers
/// 200, or 202 where the caller does not want to wait; how it went is in `status` and `error`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke-iterative", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent."), Terms),
    request_body = Option<InvokeIterativeRequest>,
    responses(Answers),
)]
pub(crate) async fn invoke_agent_iterative(
    State(app): State<App>,
    caller: Admitted,
    terms: Terms,
    Name(agent): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Response, Problem> {
    params.finish()?;
    invoke(&app, &caller, &terms, agent, RunKind::Iterative, body).await
}

async fn invoke(
    app: &App,
    caller: &Arc<Caller>,
    terms: &Terms,
    agent: String,
    kind: RunKind,
    body: Map<String, Value>,
) -> Result<Response, Problem> {
    let idempotency = terms.idempotency(kind, &agent, &body);
    let Invocation { inputs, run_id, session_id, dry_run, metadata, overrides } =
        Invocation::read(kind, body)?;
    let request = StartRequest {
        caller: Arc::clone(caller),
        agent,
        kind,
        mode: terms.mode(),
        idempotency,
        traceparent: terms.traceparent.clone(),
        run_id,
        inputs,
        metadata,
        session_id,
        overrides,
    };
    if dry_run {
        return Ok(Json(DryRun::from(app.runtime.rehearse(request).await?)).into_response());
    }
    let mut accepted = app.runtime.start(request).await?;
    let (run_id, is_replayed, follower) = match &mut accepted {
        Accepted::Started(started) => (started.run_id, false, started.follower.take()),
        Accepted::Queued(run_id) => (*run_id, false, None),
        Accepted::Known(run_id) => (*run_id, true, None),
    };
    let is_tied = terms.cancel_on_disconnect && !is_replayed;
    let leash = is_tied.then(|| Leash::new(app.runtime.clone(), &caller.tenant, run_id));
    let mut response = if terms.wants_events() {
        let follower = follower.unwrap_or_else(|| app.runtime.follow(&caller.tenant, run_id, 0));
        stream::response(app, &caller.tenant, run_id, 0, follower, leash)
    } else {
        let answer = end_of(app, caller, terms, accepted).await;
        Leash::release(leash);
        answer.map_err(|problem| problem.of_run(run_id))?
    };
    response.headers_mut().insert(X_RUN_ID, run_id_header(run_id));
    if is_replayed {
        response.headers_mut().insert(IDEMPOTENCY_REPLAYED, HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// How the run ended, as long as the caller waits for it; else where to find it.
async fn end_of(
    app: &App,
    caller: &Caller,
    terms: &Terms,
    accepted: Accepted,
) -> Result<Response, Problem> {
    let until = terms.until();
    let is_queued = matches!(accepted, Accepted::Queued(_)) && terms.mode() == Mode::Queued; // nobody waits at all
    let run = match accepted {
        Accepted::Queued(id) | Accepted::Known(id) => {
            app.runtime.wait(&caller.tenant, id, until).await?
        }
        Accepted::Started(started) => {
            let run_id = started.run_id;
            match tokio::time::timeout_at(until, started.finished()).await {
                Ok(Ok(run)) => Some(run),
                Ok(Err(WaitError::Detached(_))) => {
                    let code = if app.runtime.is_draining() {
                        Code::Draining
                    } else {
                        Code::StoreUnavailable
                    };
                    return Err(Problem::new(
                        code,
                        "The run goes on without this connection; ask for it by its id.",
                    ));
                }
                Ok(Err(WaitError::Parked(_))) => {
                    app.runtime.wait(&caller.tenant, run_id, until).await?
                }
                Err(_) if terms.takes_accepted() => {
                    Some(existing(app, &caller.tenant, run_id).await?)
                }
                Err(_) => None,
            }
        }
    };
    match run {
        Some(run) if run.status.is_terminal() && !is_queued => {
            Ok(Json(Run::answer(run)).into_response())
        }
        Some(run)
            if terms.takes_accepted()
                || !matches!(run.status, RunStatus::Queued | RunStatus::Running) =>
        {
            let location = HeaderValue::try_from(format!("/v1/runs/{}", run.id)).ok();
            let mut response =
                (StatusCode::ACCEPTED, Json(detail(app, run).await?)).into_response();
            response.headers_mut().extend(location.map(|location| (LOCATION, location)));
            if terms.takes_accepted() {
                response
                    .headers_mut()
                    .insert(PREFERENCE_APPLIED, HeaderValue::from_static("respond-async"));
            }
            Ok(response)
        }
        _ => Err(Problem::new(Code::Timeout, "The run is still going on; ask for it by its id.")),
    }
}
