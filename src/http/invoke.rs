//! Invoking an agent and waiting for the end of its run.
//!
//! Only JSON answers so far: a caller that wants an event stream is refused. The run itself does not
//! depend on the connection; whoever goes away finds it by its id.

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderName, HeaderValue};
use std::sync::Arc;
use uuid::Uuid;

use super::App;
use super::edge::Deadline;
use super::extract::{AcceptsJson, JsonObject, Name, Params};
use super::invocation::{Invocation, InvokeIterativeRequest, InvokeRequest};
use super::problem::{Code, Problem};
use super::rate_limit::Admitted;
use super::runs::Run;
use crate::run::{Caller, RunKind};
use crate::runtime::{StartRequest, WaitError};

/// The header that names the run on every answer of an invocation.
pub(crate) const X_RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

/// The value of [`X_RUN_ID`].
pub(crate) fn run_id_header(run_id: Uuid) -> HeaderValue {
    let mut buffer = Uuid::encode_buffer();
    let text: &str = run_id.hyphenated().encode_lower(&mut buffer);
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// An answer of an invocation: the header and the run.
type Answer = ([(HeaderName, HeaderValue); 1], Json<Run>);

/// Invoke an agent once
///
/// Exactly one model call, no tools. A run that started always answers 200; how it went is in
/// `status` and `error`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent.")),
    request_body = Option<InvokeRequest>,
    responses(
        (status = 200, description = "The run has ended.", body = Run, headers(("x-run-id" = Uuid, description = "The run."))),
    ),
)]
pub(crate) async fn invoke_agent(
    State(app): State<App>,
    caller: Admitted,
    _: AcceptsJson,
    deadline: Deadline,
    Name(agent): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Answer, Problem> {
    params.finish()?;
    let invocation = Invocation::read(RunKind::Single, body)?;
    run_to_end(&app, &caller, deadline, agent, RunKind::Single, invocation).await
}

/// Invoke an agent
///
/// Runs the agent's loop of model calls and tool calls until an output is accepted or a limit
/// strikes. A request can only narrow what the definition allows. A run that started always answers
/// 200; how it went is in `status` and `error`.
#[utoipa::path(
    post, path = "/agents/{name}/invoke-iterative", tag = "agents", security(("bearer" = ["agents:invoke"])),
    params(("name" = String, Path, description = "The agent.")),
    request_body = Option<InvokeIterativeRequest>,
    responses(
        (status = 200, description = "The run has ended.", body = Run, headers(("x-run-id" = Uuid, description = "The run."))),
    ),
)]
pub(crate) async fn invoke_agent_iterative(
    State(app): State<App>,
    caller: Admitted,
    _: AcceptsJson,
    deadline: Deadline,
    Name(agent): Name,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<Answer, Problem> {
    params.finish()?;
    let invocation = Invocation::read(RunKind::Iterative, body)?;
    run_to_end(&app, &caller, deadline, agent, RunKind::Iterative, invocation).await
}

async fn run_to_end(
    app: &App,
    caller: &Arc<Caller>,
    deadline: Deadline,
    agent: String,
    kind: RunKind,
    Invocation { inputs, run_id, session_id, metadata, overrides }: Invocation,
) -> Result<Answer, Problem> {
    let caller = Arc::clone(caller);
    let request = StartRequest { caller, agent, kind, run_id, inputs, metadata, session_id, overrides };
    let started = app.runtime.start(request).await?;
    let run_id = started.run_id;
    let header = [(X_RUN_ID, run_id_header(run_id))];
    match tokio::time::timeout_at(deadline.0, started.finished()).await {
        Ok(Ok(record)) => Ok((header, Json(Run::answer(record)))),
        Ok(Err(WaitError::Detached(_))) => {
            let code = if app.runtime.is_draining() { Code::Draining } else { Code::StoreUnavailable };
            Err(Problem::new(code, "The run goes on without this connection; ask for it by its id.").of_run(run_id))
        }
        Err(_) => Err(Problem::new(Code::Timeout, "The run is still going on; ask for it by its id.").of_run(run_id)),
    }
}
