//! The names of those who acted, for people who may not list API keys.
//!
//! A caller who has seen an id in a record may learn its name, and nothing else of the key.

use axum::Json;
use axum::extract::State;
use serde::Serialize;
use utoipa::ToSchema;

use super::page::Listing;
use super::redaction;
use crate::http::edge::auth::{RunsRead, Scoped};
use crate::http::edge::extract::{Params, invalid_parameter};
use crate::http::edge::problem::Problem;
use crate::http::state::App;

/// Ids of one request, at most.
const MAX_IDS: usize = 100;

/// The name of who acted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Subject {
    /// The id of the API key.
    #[schema(example = "5f2a9c01d3e47b68")]
    id: String,
    /// The name of the key; with its id behind it where several keys of the tenant have the name.
    #[schema(example = "ci")]
    name: String,
}

/// Name those who acted
///
/// The names of the tenant's API keys with the given ids, including revoked keys. A name that several
/// of its keys have is followed by the id. Ids of other subjects, such as JWT subjects, are omitted.
#[utoipa::path(
    get, path = "/subjects", tag = "keys", security(("bearer" = ["runs:read"])),
    params(("ids" = Option<String>, Query, description = "Ids, separated by commas; at most 100.")),
    responses((status = 200, description = "The names that are known.", body = Listing<Subject>)),
)]
pub(crate) async fn list_subjects(
    State(app): State<App>,
    caller: Scoped<RunsRead>,
    mut params: Params,
) -> Result<Json<Listing<Subject>>, Problem> {
    let ids = params.text("ids").unwrap_or_default();
    params.finish()?;
    let mut ids: Vec<String> =
        ids.split(',').map(str::trim).filter(|id| !id.is_empty()).map(str::to_owned).collect();
    if ids.len() > MAX_IDS {
        return Err(invalid_parameter("ids", &format!("must be at most {MAX_IDS} ids")));
    }
    ids.sort();
    ids.dedup();
    if ids.is_empty() {
        return Ok(Json(Listing::whole(Vec::new())));
    }
    let named = app.store.key_names(&caller.tenant, &ids).await?;
    let data = named.into_iter().map(|(id, name, is_shared)| {
        let name = redaction::text(name);
        let name = if is_shared { format!("{name} ({id})") } else { name };
        Subject { id, name }
    });
    Ok(Json(Listing::whole(data.collect())))
}
