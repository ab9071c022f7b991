//! Memory: what agents keep of their runs for later ones. It is listed and deleted here; storing it
//! and recalling it is configured by agents (`memory:` in a definition).

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use super::page::{LISTS, ListParams, Listing, by_time_and, time_position};
use crate::bounds::secrets::redacted;
use crate::clock;
use crate::http::document::vocabulary::ObservationKind;
use crate::http::edge::auth::{MemoryRead, MemoryWrite, Scoped};
use crate::http::edge::extract::{Name, Params, invalid_parameter};
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::{MemoryFilter, Observation, ObservationId};

/// Something that later runs of the agent may recall.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Observation)]
pub(crate) struct ObservationView {
    /// Its id.
    #[schema(example = "01980b7c-6e7f-7d3a-9f60-2f2a6c1d4e5b-2")]
    id: String,
    /// The agent that recalls it.
    #[schema(example = "assistant")]
    agent: String,
    /// The session of the run; null without one.
    #[schema(example = json!(null))]
    session_id: Option<String>,
    /// The run that it belongs to.
    run_id: Uuid,
    /// When it happened.
    at: DateTime<Utc>,
    /// What it is.
    #[schema(value_type = ObservationKind, example = "input")]
    kind: String,
    /// What is recalled: at most 2048 bytes, without secrets.
    #[schema(example = "My name is Ines.")]
    content: String,
}

/// How much was forgotten.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Forgotten {
    /// Observations that were deleted.
    #[schema(example = 1)]
    deleted: u64,
}

impl From<Observation> for ObservationView {
    fn from(row: Observation) -> Self {
        Self {
            id: row.id().to_string(),
            agent: row.agent,
            session_id: row.session_id,
            run_id: row.run_id,
            at: row.at,
            kind: row.kind,
            content: redacted(&row.content).into_owned(),
        }
    }
}

/// List memory
///
/// What agents with a `memory:` section keep of their runs, newest first.
#[utoipa::path(
    get, path = "/memory", tag = "memory", security(("bearer" = ["memory:read"])),
    params(
        ("agent" = Option<String>, Query, description = "What this agent recalls."),
        ("session_id" = Option<String>, Query, description = "What was kept of this session's runs."),
        ("q" = Option<String>, Query, description = "With all these words, in any of their forms; common words are left out."),
        ListParams,
    ),
    responses((status = 200, description = "A page of observations.", body = Listing<ObservationView>)),
)]
pub(crate) async fn list_memory(
    State(app): State<App>,
    caller: Scoped<MemoryRead>,
    mut params: Params,
) -> Result<Json<Listing<ObservationView>>, Problem> {
    let filter = MemoryFilter {
        agent: params.text("agent"),
        session_id: params.text("session_id"),
        text: params.text("q").filter(|text| !text.trim().is_empty()),
    };
    let page =
        by_time_and(&mut params, &caller.tenant, LISTS, |id| ObservationId::parse(id).is_some())?;
    params.finish()?;
    let rows = app.store.memory(&caller.tenant, &filter, &page).await?;
    let cursor = |row: &Observation| time_position(row.at, &row.id().to_string());
    Ok(Json(Listing::of(rows, &page, cursor, ObservationView::from)))
}

/// Forget one observation
///
/// Later runs do not recall it. The journal of its run is unchanged.
#[utoipa::path(
    delete, path = "/memory/{id}", tag = "memory", security(("bearer" = ["memory:write"])),
    params(("id" = String, Path, description = "The observation's id.")),
    responses((status = 200, description = "The observation is deleted.", body = Forgotten)),
)]
pub(crate) async fn forget_observation(
    State(app): State<App>,
    caller: Scoped<MemoryWrite>,
    Name(id): Name,
    params: Params,
) -> Result<Json<Forgotten>, Problem> {
    params.finish()?;
    let id = ObservationId::parse(&id).ok_or_else(|| Problem::not_found("observation"))?;
    match app.store.forget(&caller, id).await? {
        0 => Err(Problem::not_found("observation")),
        deleted => Ok(Json(Forgotten { deleted })),
    }
}

/// Forget an agent's memory
///
/// Deletes all observations of the agent's runs so far, or those of one session.
#[utoipa::path(
    delete, path = "/memory", tag = "memory", security(("bearer" = ["memory:write"])),
    params(
        ("agent" = String, Query, description = "The agent whose memory is forgotten."),
        ("session_id" = Option<String>, Query, description = "Only observations of this session's runs."),
    ),
    responses((status = 200, description = "The observations are deleted.", body = Forgotten)),
)]
pub(crate) async fn forget_memory(
    State(app): State<App>,
    caller: Scoped<MemoryWrite>,
    mut params: Params,
) -> Result<Json<Forgotten>, Problem> {
    let (agent, session) = (params.text("agent"), params.text("session_id"));
    params.finish()?;
    let agent = agent.ok_or_else(|| invalid_parameter("agent", "is required"))?;
    let deleted = app.store.forget_agent(&caller, &agent, session.as_deref(), clock::now()).await?;
    Ok(Json(Forgotten { deleted }))
}
