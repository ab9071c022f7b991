//! Sessions: runs that share a conversation. They are made by naming them in an invocation.
//!
//! There is no row of a session: it is what its runs say it is. Which of them goes on, and what it
//! knows of the others, is the runtime's.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::run_parts::{Message, messages_of};
use crate::http::edge::auth::{Scoped, SessionsRead, SessionsWrite};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::http::state::Shared;
use crate::run::{RunStatus, TerminationReason};
use crate::runtime::own_turns;
use crate::store::{Page, RunFilter, RunRecord, SessionDeleted};

/// Runs of a session that are shown, the newest.
const SHOWN: u32 = 200;
/// Journals that are read at once.
const CHUNK: usize = 20;

/// A session.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionView {
    /// As callers name it.
    #[schema(example = "ticket-42")]
    session_id: String,
    /// The agent that it belongs to.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The last 200 runs, the newest last.
    runs: Vec<SessionRun>,
    /// The conversation of those runs, without their system prompts.
    messages: Vec<Message>,
    /// When its first run was accepted.
    created_at: DateTime<Utc>,
    /// When its newest run was accepted.
    last_run_at: DateTime<Utc>,
}

/// A run of a session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionRun {
    /// The run.
    run_id: Uuid,
    /// Where it stands; the last three are final.
    status: RunStatus,
    /// Why it ended.
    #[schema(value_type = Option<TerminationReason>)]
    termination_reason: Option<String>,
    /// When it was accepted.
    created_at: DateTime<Utc>,
    /// When it ended.
    finished_at: Option<DateTime<Utc>>,
}

impl From<RunRecord> for SessionRun {
    fn from(run: RunRecord) -> Self {
        Self {
            run_id: run.id,
            status: run.status,
            termination_reason: run.termination_reason,
            created_at: run.created_at,
            finished_at: run.finished_at,
        }
    }
}

/// Get a session
///
/// Its runs and what was said in them.
#[utoipa::path(
    get, path = "/sessions/{id}", tag = "sessions", security(("bearer" = ["sessions:read"])),
    params(("id" = String, Path, description = "The session, as callers name it.")),
    responses((status = 200, description = "The session.", body = SessionView)),
)]
pub(crate) async fn get_session(
    State(app): State<App>,
    caller: Scoped<SessionsRead>,
    Name(id): Name,
    params: Params,
) -> Result<Json<SessionView>, Problem> {
    params.finish()?;
    let session = app
        .store
        .session(&caller.tenant, &id, 0)
        .await?
        .ok_or_else(|| Problem::not_found("session"))?;
    let filter = RunFilter { session_id: Some(id.clone()), ..RunFilter::default() };
    let mut runs =
        app.store.runs(&caller.tenant, &filter, &Page { limit: SHOWN, after: None }).await?;
    runs.retain(|run| run.parent_run_id.is_none());
    runs.reverse();
    Ok(Json(SessionView {
        session_id: id,
        agent: session.agent,
        messages: said_in(&app, &caller.tenant, &runs).await?,
        runs: runs.into_iter().map(SessionRun::from).collect(),
        created_at: session.created_at,
        last_run_at: session.last_run_at,
    }))
}

/// What was said in these runs, so far.
async fn said_in(app: &Shared, tenant: &str, runs: &[RunRecord]) -> Result<Vec<Message>, Problem> {
    let mut messages = Vec::new();
    for chunk in runs.chunks(CHUNK) {
        let ids: Vec<Uuid> = chunk.iter().map(|run| run.id).collect();
        let events = app.store.journals(tenant, &ids).await?;
        let journals: Vec<_> = events.chunk_by(|a, b| a.run_id == b.run_id).collect();
        for id in ids {
            let Some(journal) = journals.iter().find(|journal| journal[0].run_id == id) else {
                continue;
            };
            let own = own_turns(journal).map_err(|error| Problem::internal(error.to_string()))?;
            messages.extend(messages_of(&own.turns));
        }
    }
    Ok(messages)
}

/// Delete a session
///
/// Deletes its runs with all that is kept of them. While a run of it has not ended, nothing is
/// deleted.
#[utoipa::path(
    delete, path = "/sessions/{id}", tag = "sessions", security(("bearer" = ["sessions:write"])),
    params(("id" = String, Path, description = "The session, as callers name it.")),
    responses((status = 204, description = "It is gone.")),
)]
pub(crate) async fn delete_session(
    State(app): State<App>,
    caller: Scoped<SessionsWrite>,
    Name(id): Name,
    params: Params,
) -> Result<StatusCode, Problem> {
    params.finish()?;
    match app.store.delete_session(&caller.tenant, &id).await? {
        SessionDeleted::Gone => Ok(StatusCode::NO_CONTENT),
        SessionDeleted::Unknown => Err(Problem::not_found("session")),
        SessionDeleted::Busy => {
            Err(Problem::new(Code::SessionBusy, "A run of this session has not ended."))
        }
    }
}
