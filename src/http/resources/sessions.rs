//! Sessions: runs that share a conversation. An invocation creates a session by naming it.
//!
//! A session is derived from its runs; its row, for lists, is kept by triggers. Which run of a session may execute,
//! and the history that it gets, is decided by the runtime.

use std::collections::HashMap;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time, time_position};
use super::run_parts::{Message, messages_of};
use crate::http::edge::auth::{Scoped, SessionsRead, SessionsWrite};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::http::state::Shared;
use crate::run::{RunStatus, TerminationReason};
use crate::runtime::{journals, own_turns};
use crate::store::{ListedSession, RunRecord, SessionDeleted};

/// How many of a session's newest runs are shown.
const SHOWN: u32 = 200;
/// How many journals are read in one query.
const CHUNK: usize = 20;
/// Bytes of the journals whose messages are shown.
const MAX_JOURNALS: u64 = 4 << 20;

/// A conversation that several runs share.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionView {
    /// The id given in the request.
    #[schema(example = "ticket-42")]
    session_id: String,
    /// The agent that the session belongs to.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The number of its runs.
    #[schema(example = 1)]
    run_count: i64,
    /// The newest 200 runs, oldest first.
    runs: Vec<SessionRun>,
    /// The conversation of these runs, without system prompts, as far back as it has 4 MiB in the
    /// journals. `GET /sessions/{id}/messages` lists all of it.
    messages: Vec<Message>,
    /// How many of these runs, the oldest ones, are left out here because all messages would be too large.
    #[schema(example = 0)]
    runs_without_messages: usize,
    /// When its first run was accepted.
    created_at: DateTime<Utc>,
    /// When its newest run was accepted.
    last_run_at: DateTime<Utc>,
}

/// A run of a session.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionRun {
    /// The run's id.
    run_id: Uuid,
    /// The current status; `completed`, `failed` and `cancelled` are final.
    status: RunStatus,
    /// Why the run ended; null while it has not ended.
    #[schema(value_type = Option<TerminationReason>)]
    termination_reason: Option<String>,
    /// The time before which the queued run is not taken; null once that time has passed.
    available_at: Option<DateTime<Utc>>,
    /// When the run was accepted.
    created_at: DateTime<Utc>,
    /// When the run ended.
    finished_at: Option<DateTime<Utc>>,
}

impl From<RunRecord> for SessionRun {
    fn from(run: RunRecord) -> Self {
        Self {
            run_id: run.id,
            status: run.status,
            available_at: run.not_before(),
            termination_reason: run.termination_reason,
            created_at: run.created_at,
            finished_at: run.finished_at,
        }
    }
}

/// A session in a list. It has no messages; those are in `GET /sessions/{id}/messages`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SessionSummary {
    /// The id given in the request.
    #[schema(example = "ticket-42")]
    session_id: String,
    /// The agent that the session belongs to.
    #[schema(example = "repo-guide")]
    agent: String,
    /// The number of its runs.
    #[schema(example = 1)]
    run_count: i64,
    /// The newest ten runs, oldest first.
    runs: Vec<SessionRun>,
    /// When its first run was accepted.
    created_at: DateTime<Utc>,
    /// When its newest run was accepted.
    last_run_at: DateTime<Utc>,
}

impl SessionSummary {
    /// Takes the runs of this session out of those of all sessions.
    fn of(session: ListedSession, runs: &mut HashMap<Uuid, RunRecord>) -> Self {
        let newest = session.newest_runs.iter().filter_map(|id| runs.remove(id));
        Self {
            runs: newest.map(SessionRun::from).collect(),
            session_id: session.session_id,
            agent: session.agent,
            run_count: session.run_count,
            created_at: session.created_at,
            last_run_at: session.last_run_at,
        }
    }
}

/// List sessions
///
/// Sessions with the newest runs first.
#[utoipa::path(
    get, path = "/sessions", tag = "sessions", security(("bearer" = ["sessions:read"])),
    params(("agent" = Option<String>, Query, description = "Only sessions of this agent."), ListParams),
    responses((status = 200, description = "A page of sessions.", body = Listing<SessionSummary>)),
)]
pub(crate) async fn list_sessions(
    State(app): State<App>,
    caller: Scoped<SessionsRead>,
    mut params: Params,
) -> Result<Json<Listing<SessionSummary>>, Problem> {
    let page = by_time(&mut params, &caller.tenant, LISTS)?;
    let agent = params.text("agent");
    params.finish()?;
    let rows = app.store.sessions(&caller.tenant, agent.as_deref(), &page).await?;
    let newest: Vec<Uuid> = rows.iter().flat_map(|session| &session.newest_runs).copied().collect();
    let runs = app.store.runs_of_ids(&caller.tenant, &newest).await?;
    let mut runs: HashMap<Uuid, RunRecord> = runs.into_iter().map(|run| (run.id, run)).collect();
    let cursor =
        |session: &ListedSession| time_position(session.last_run_at, &session.id.to_string());
    let view = |session| SessionSummary::of(session, &mut runs);
    Ok(Json(Listing::of(rows, &page, cursor, view)))
}

/// Get a session
///
/// The runs of a session and their conversation.
#[utoipa::path(
    get, path = "/sessions/{id}", tag = "sessions", security(("bearer" = ["sessions:read"])),
    params(("id" = String, Path, description = "The session's id.")),
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
        .listed_session(&caller.tenant, &id)
        .await?
        .ok_or_else(|| Problem::not_found("session"))?;
    let mut runs = app.store.newest_runs_of_session(&caller.tenant, &id, SHOWN).await?;
    runs.retain(|run| run.parent_run_id.is_none());
    // Runs that have not begun come last.
    runs.sort_by_key(|run| (run.session_turn.unwrap_or(i64::MAX), run.created_at, run.id));
    let (shown, bytes) = newest_within(&app, &caller.tenant, &runs).await?;
    let _permit = journals::permit(bytes).await;
    Ok(Json(SessionView {
        session_id: id,
        agent: session.agent,
        run_count: session.run_count,
        messages: messages_of_runs(&app, &caller.tenant, shown).await?,
        runs_without_messages: runs.len() - shown.len(),
        runs: runs.into_iter().map(SessionRun::from).collect(),
        created_at: session.created_at,
        last_run_at: session.last_run_at,
    }))
}

/// The newest of these runs, as many as have journals of [`MAX_JOURNALS`] together, and their bytes.
async fn newest_within<'r>(
    app: &Shared,
    tenant: &str,
    runs: &'r [RunRecord],
) -> Result<(&'r [RunRecord], u64), Problem> {
    let ids: Vec<Uuid> = runs.iter().map(|run| run.id).collect();
    let sizes = app.store.journal_sizes(tenant, &ids).await?;
    let mut left = MAX_JOURNALS;
    let fits = |id: &&Uuid| {
        let less = left.checked_sub(sizes.get(*id).copied().unwrap_or(0));
        left = less.unwrap_or(0);
        less.is_some()
    };
    let count = ids.iter().rev().take_while(fits).count();
    let shown = &runs[runs.len() - count..];
    let bytes = shown.iter().filter_map(|run| sizes.get(&run.id)).sum();
    Ok((shown, bytes))
}

/// The conversation of these runs up to now.
async fn messages_of_runs(
    app: &Shared,
    tenant: &str,
    runs: &[RunRecord],
) -> Result<Vec<Message>, Problem> {
    let mut messages = Vec::new();
    for chunk in runs.chunks(CHUNK) {
        let ids: Vec<Uuid> = chunk.iter().map(|run| run.id).collect();
        let events = app.store.journals(tenant, &ids).await?;
        let by_run = journals::by_run(&events);
        for journal in ids.iter().filter_map(|id| by_run.get(id)) {
            let own = own_turns(journal)?;
            messages.extend(messages_of(&own.turns));
        }
    }
    Ok(messages)
}

/// Delete a session
///
/// Deletes the session's runs with all their data and the files that are theirs alone, except for their audit records and their share of
/// the usage. Fails if a run of the session has not ended.
#[utoipa::path(
    delete, path = "/sessions/{id}", tag = "sessions", security(("bearer" = ["sessions:write"])),
    params(("id" = String, Path, description = "The session's id.")),
    responses((status = 204, description = "The session was deleted.")),
)]
pub(crate) async fn delete_session(
    State(app): State<App>,
    caller: Scoped<SessionsWrite>,
    Name(id): Name,
    params: Params,
) -> Result<StatusCode, Problem> {
    params.finish()?;
    match app.runtime.delete_session(&caller.tenant, &id, &caller.subject).await? {
        SessionDeleted::Gone => Ok(StatusCode::NO_CONTENT),
        SessionDeleted::Unknown => Err(Problem::not_found("session")),
        SessionDeleted::Busy => {
            Err(Problem::new(Code::SessionBusy, "A run of this session has not ended."))
        }
    }
}
