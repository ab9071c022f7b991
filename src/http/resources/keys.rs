//! API keys: creating, listing and revoking them.
//!
//! A key is shown only when it is created. A caller cannot grant scopes that it does not have, and
//! only `admin` creates keys of other tenants. The format of keys is defined in `runtime::keys`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, SubsecRound, Utc};
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::page::{LISTS, ListParams, Listing, by_time_and, time_cursor};
use crate::clock;
use crate::event::ValidationError;
use crate::http::edge::auth::{KeysAdmin, Scoped, forbidden};
use crate::http::edge::extract::{JsonObject, Name, Params, fields};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::keys;
use crate::store::ApiKeyRecord;

/// A scope, for the API document.
struct Scope;

impl ToSchema for Scope {}

impl PartialSchema for Scope {
    fn schema() -> RefOr<Schema> {
        let about =
            "A permission. `admin` includes all others; `tools:<name>` allows executing one tool.";
        let scope = ObjectBuilder::new().schema_type(Type::String).description(Some(about));
        let pattern = format!("^({}|tools:.+)$", keys::SCOPES.join("|"));
        scope.pattern(Some(pattern)).examples(["runs:read"]).into()
    }
}

/// Maximum rate limit and burst; the same as in the configuration.
const MAX_RATE: u32 = 1_000_000_000;

/// A request for a new API key.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewKeyRequest {
    /// A name for people; 1 to 200 characters.
    #[serde(default)]
    #[schema(required, min_length = 1, max_length = 200, example = "ci")]
    name: String,
    /// The key's tenant; default: the caller's tenant.
    #[schema(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$", example = "default")]
    tenant: Option<String>,
    /// The key's permissions.
    #[serde(default)]
    #[schema(required, value_type = Vec<Scope>, min_items = 1, example = json!(["agents:invoke", "runs:read", "tools:execute"]))]
    scopes: Vec<String>,
    /// When the key expires; default: never.
    #[schema(example = json!(null))]
    expires_at: Option<DateTime<Utc>>,
    /// Invocations per minute, and likewise tool calls per minute; default: the service's limit.
    #[schema(minimum = 1, maximum = 1_000_000_000, example = 60)]
    rate_limit_per_minute: Option<u32>,
    /// Invocations or tool calls that can be made at once; default: the service's limit.
    #[schema(minimum = 1, maximum = 1_000_000_000, example = 10)]
    rate_limit_burst: Option<u32>,
}

/// An API key without its secret.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Key)]
pub(crate) struct KeyView {
    /// The public part of the key, between `tl_` and the secret.
    #[schema(example = "5f2a9c01d3e47b68")]
    id: String,
    /// A name for people.
    #[schema(example = "ci")]
    name: String,
    /// The key's tenant.
    #[schema(example = "default")]
    tenant: String,
    /// The key's permissions.
    #[schema(value_type = Vec<Scope>, example = json!(["agents:invoke", "runs:read", "tools:execute"]))]
    scopes: Vec<String>,
    /// When the key was created.
    created_at: DateTime<Utc>,
    /// When the key expires; null if never.
    #[schema(example = json!(null))]
    expires_at: Option<DateTime<Utc>>,
    /// When the key was revoked; null if it was not.
    #[schema(example = json!(null))]
    revoked_at: Option<DateTime<Utc>>,
    /// Invocations per minute, and likewise tool calls per minute; null for the service's default.
    #[schema(example = 60)]
    rate_limit_per_minute: Option<u32>,
    /// Invocations or tool calls that can be made at once; null for the service's default.
    #[schema(example = 10)]
    rate_limit_burst: Option<u32>,
}

/// A new API key, with its secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct NewKey {
    #[serde(flatten)]
    about: KeyView,
    /// The complete key. It is shown only in this response.
    #[schema(example = "tl_5f2a9c01d3e47b68_…")]
    key: String,
}

impl From<ApiKeyRecord> for KeyView {
    fn from(key: ApiKeyRecord) -> Self {
        Self {
            id: key.id,
            name: key.name,
            tenant: key.tenant,
            scopes: key.scopes,
            created_at: key.created_at,
            expires_at: key.expires_at,
            revoked_at: key.revoked_at,
            rate_limit_per_minute: key.rate_limit_per_minute,
            rate_limit_burst: key.rate_limit_burst,
        }
    }
}

fn validation_errors(request: &NewKeyRequest, now: DateTime<Utc>) -> Vec<ValidationError> {
    let mut errors = Vec::new();
    let mut expect = |holds: bool, pointer: &str, message: &str| {
        if !holds {
            errors.push(ValidationError { pointer: pointer.into(), message: message.into() });
        }
    };
    expect(
        (1..=200).contains(&request.name.chars().count()),
        "/name",
        "must have 1 to 200 characters",
    );
    let tenant = "must be 1 to 64 of a-z, 0-9, _ and -, and begin with a letter or digit";
    expect(request.tenant.as_deref().is_none_or(keys::is_tenant), "/tenant", tenant);
    expect(!request.scopes.is_empty(), "/scopes", "must name at least one scope");
    for (at, scope) in request.scopes.iter().enumerate() {
        expect(keys::is_scope(scope), &format!("/scopes/{at}"), "is not a scope");
    }
    expect(
        request.expires_at.is_none_or(|expiry| expiry > now),
        "/expires_at",
        "must be in the future",
    );
    let is_rate = |rate: Option<u32>| rate.is_none_or(|rate| (1..=MAX_RATE).contains(&rate));
    expect(
        is_rate(request.rate_limit_per_minute),
        "/rate_limit_per_minute",
        "must be from 1 to 1000000000",
    );
    expect(is_rate(request.rate_limit_burst), "/rate_limit_burst", "must be from 1 to 1000000000");
    errors
}

/// Rejects a request for scopes or a tenant that the caller must not grant.
fn authorise(caller: &Caller, tenant: &str, scopes: &[String]) -> Result<(), Problem> {
    if tenant != caller.tenant && !caller.has("admin") {
        return Err(forbidden("admin"));
    }
    let held = |scope: &str| caller.has(scope) || (is_tool(scope) && caller.has("tools:execute"));
    scopes.iter().find(|scope| !held(scope)).map_or(Ok(()), |missing| Err(forbidden(missing)))
}

/// Whether a scope is `tools:<name>`.
fn is_tool(scope: &str) -> bool {
    scope.starts_with("tools:") && !keys::SCOPES.contains(&scope)
}

/// Create an API key
///
/// The response is the only place where the complete key is shown.
#[utoipa::path(
    post, path = "/keys", tag = "keys", security(("bearer" = ["keys:admin"])),
    request_body = NewKeyRequest,
    responses((status = 201, description = "The key was created.", body = NewKey)),
)]
pub(crate) async fn create_key(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    JsonObject(body): JsonObject,
) -> Result<(StatusCode, Json<NewKey>), Problem> {
    let request: NewKeyRequest =
        fields(body).map_err(|e| Problem::invalid(Code::InvalidInputs, vec![e]))?;
    let now = clock::now().trunc_subsecs(6);
    let errors = validation_errors(&request, now);
    if !errors.is_empty() {
        return Err(Problem::invalid(Code::InvalidInputs, errors));
    }
    let tenant = request.tenant.clone().unwrap_or_else(|| caller.tenant.clone());
    authorise(&caller, &tenant, &request.scopes)?;
    let new = keys::generate().map_err(|e| Problem::internal(e.to_string()))?;
    let record = record(request, tenant, new.id, new.secret_hash, now);
    if !app.store.insert_key(&record).await? {
        return Err(Problem::internal("a fresh key id is taken"));
    }
    Ok((StatusCode::CREATED, Json(NewKey { about: record.into(), key: new.token })))
}

fn record(
    request: NewKeyRequest,
    tenant: String,
    id: String,
    secret_hash: Vec<u8>,
    created_at: DateTime<Utc>,
) -> ApiKeyRecord {
    let mut scopes = request.scopes;
    scopes.sort_unstable();
    scopes.dedup();
    ApiKeyRecord {
        id,
        name: request.name,
        tenant,
        scopes,
        secret_hash,
        created_at,
        expires_at: request.expires_at.map(|expiry| expiry.trunc_subsecs(6)),
        revoked_at: None,
        rate_limit_per_minute: request.rate_limit_per_minute,
        rate_limit_burst: request.rate_limit_burst,
    }
}

/// List API keys
///
/// The keys of the caller's tenant, newest first, including revoked ones.
#[utoipa::path(
    get, path = "/keys", tag = "keys", security(("bearer" = ["keys:admin"])),
    params(ListParams),
    responses((status = 200, description = "A page of keys.", body = Listing<KeyView>)),
)]
pub(crate) async fn list_keys(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    mut params: Params,
) -> Result<Json<Listing<KeyView>>, Problem> {
    let page = by_time_and(&mut params, LISTS, keys::is_id)?;
    params.finish()?;
    let keys = app.store.keys(&caller.tenant, &page).await?;
    Ok(Json(Listing::of(keys, &page, |key| time_cursor(key.created_at, &key.id), KeyView::from)))
}

/// Revoke an API key
///
/// Takes effect immediately. Idempotent.
#[utoipa::path(
    delete, path = "/keys/{id}", tag = "keys", security(("bearer" = ["keys:admin"])),
    params(("id" = String, Path, description = "The key's id.")),
    responses((status = 204, description = "The key is revoked.")),
)]
pub(crate) async fn revoke_key(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    Name(id): Name,
    params: Params,
) -> Result<StatusCode, Problem> {
    params.finish()?;
    if !keys::is_id(&id) || !app.store.revoke_key(&caller.tenant, &id).await? {
        return Err(Problem::not_found("key"));
    }
    app.keys.invalidate(&id);
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
