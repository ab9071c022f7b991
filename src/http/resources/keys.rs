//! API keys: creating, listing and revoking them.
//!
//! A key is shown only when it is created. A caller cannot grant more than it has: neither scopes,
//! nor time, nor requests per minute. Only `admin` creates, lists and revokes keys of other tenants
//! and revokes keys with `admin`. The format of keys is defined in `runtime::keys`.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, SecondsFormat, SubsecRound, Utc};
use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
use utoipa::{PartialSchema, ToSchema};

use super::page::{LISTS, ListParams, Listing, by_time_and, time_position};
use super::redaction;
use crate::clock;
use crate::event::ValidationError;
use crate::http::edge::auth::{KeysAdmin, Scoped, forbidden, refused_key};
use crate::http::edge::extract::{JsonObject, Name, Params, fields, optional_time};
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::{Caller, may_execute};
use crate::runtime::keys;
use crate::store::{ApiKeyRecord, KeyStored, RateLimit, Revocation, Revoked};

/// A scope, for the API document.
struct Scope;

impl ToSchema for Scope {}

impl PartialSchema for Scope {
    fn schema() -> RefOr<Schema> {
        let about =
            "A permission. `admin` includes all others; `tools:<name>` allows executing one tool.";
        let scope = ObjectBuilder::new().schema_type(Type::String).description(Some(about));
        let pattern = format!("^({}|tools:.+)$", keys::SCOPES.join("|"));
        scope
            .max_length(Some(keys::MAX_SCOPE))
            .pattern(Some(pattern))
            .examples(["runs:read"])
            .into()
    }
}

/// Maximum rate limit and burst; the same as in the configuration.
const MAX_RATE: u32 = 1_000_000_000;

/// A request for a new API key.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KeyRequest {
    /// A display name; 1 to 200 characters.
    #[serde(default)]
    #[schema(required, min_length = 1, max_length = 200, example = "ci")]
    name: String,
    /// The key's tenant; default: the caller's tenant.
    #[schema(pattern = "^[a-z0-9][a-z0-9_-]{0,63}$", example = "default")]
    tenant: Option<String>,
    /// The key's permissions.
    #[serde(default)]
    #[schema(required, value_type = Vec<Scope>, min_items = 1, max_items = 64, example = json!(["agents:invoke", "runs:read", "tools:execute"]))]
    scopes: Vec<String>,
    /// When the key expires; default: never, or when the key that creates it expires. A key that is
    /// created with a JWT outlives the JWT.
    #[serde(default, deserialize_with = "optional_time")]
    #[schema(example = json!(null))]
    expires_at: Option<DateTime<Utc>>,
    /// Invocations per minute, and likewise tool calls per minute; default: that of the key that
    /// creates it, or the service's limit.
    #[schema(minimum = 1, maximum = 1_000_000_000, example = 60)]
    rate_limit_per_minute: Option<u32>,
    /// Invocations or tool calls that can be made at once; default: as for the rate limit, but no
    /// more than a rate limit that the key itself has.
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
    /// A display name.
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
    /// The id of the key, or the subject of the token, that created it; `local` for the command line,
    /// null for the operator's own key.
    #[schema(example = "bootstrapadmin")]
    created_by: Option<String>,
    /// When the key was last used, to the minute; null if it never was.
    #[schema(example = json!(null))]
    last_used_at: Option<DateTime<Utc>>,
    /// When the key expires; null if never.
    #[schema(example = json!(null))]
    expires_at: Option<DateTime<Utc>>,
    /// When the key was revoked; null if it was not.
    #[schema(example = json!(null))]
    revoked_at: Option<DateTime<Utc>>,
    /// Invocations per minute, and likewise tool calls per minute; null for the service's default.
    #[schema(example = 60)]
    rate_limit_per_minute: Option<u32>,
    /// Invocations or tool calls that can be made at once; null for the service's default, but no
    /// more than a rate limit that the key itself has.
    #[schema(example = 10)]
    rate_limit_burst: Option<u32>,
}

/// A new API key, with its secret.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct CreatedKey {
    #[serde(flatten)]
    about: KeyView,
    /// The complete key. It is shown only in this response.
    #[schema(example = "tl_5f2a9c01d3e47b68_…")]
    key: String,
    /// Scopes that permit no tool of this service: perhaps misspelt, perhaps for tools of callers.
    #[schema(example = json!([]))]
    warnings: Vec<String>,
}

impl From<ApiKeyRecord> for KeyView {
    fn from(key: ApiKeyRecord) -> Self {
        Self {
            id: key.id,
            name: redaction::text(key.name),
            tenant: key.tenant,
            scopes: key.scopes,
            created_at: key.created_at,
            created_by: key.created_by,
            last_used_at: key.last_used_at,
            expires_at: key.expires_at,
            revoked_at: key.revoked_at,
            rate_limit_per_minute: key.rate_limit_per_minute,
            rate_limit_burst: key.rate_limit_burst,
        }
    }
}

fn validation_errors(request: &KeyRequest, now: DateTime<Utc>) -> Vec<ValidationError> {
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
    let most = keys::MAX_SCOPES;
    expect(!request.scopes.is_empty(), "/scopes", "must name at least one scope");
    let many = request.scopes.len() > most;
    expect(!many, "/scopes", &format!("must name at most {most} scopes"));
    for (at, scope) in request.scopes.iter().enumerate().take(most) {
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
    let held = |scope: &str| {
        let tools = scope.strip_prefix("tools:").filter(|_| is_tool(scope));
        caller.has(scope) || tools.is_some_and(|tools| caller.may_execute(tools))
    };
    scopes.iter().find(|scope| !held(scope)).map_or(Ok(()), |missing| Err(forbidden(missing)))
}

/// Rejects a request for more time or more requests per minute than the caller has. What the request
/// leaves open is what the caller has. A key with `admin` and without a limit of its own is not
/// bound by the service's.
fn narrow(
    request: &mut KeyRequest,
    maker: &Caller,
    key: Option<&ApiKeyRecord>,
    default: RateLimit,
) -> Result<(), Problem> {
    let longer = |bound: DateTime<Utc>| {
        let bound = bound.to_rfc3339_opts(SecondsFormat::AutoSi, true);
        format!("A key cannot create one that lives longer; this key expires at {bound}.")
    };
    narrow_one(&mut request.expires_at, key.and_then(|key| key.expires_at), None, longer)?;
    let burst_is_inherited = request.rate_limit_burst.is_none();
    let service_default = |limit: u32| (!maker.has("admin")).then_some(limit);
    let per_minute = key.and_then(|key| key.rate_limit_per_minute);
    let burst = per_minute.map(|_| default.of_key(per_minute, None).burst);
    for (asked, own, default, what) in [
        (
            &mut request.rate_limit_per_minute,
            per_minute,
            service_default(default.per_minute),
            "may do more per minute",
        ),
        (
            &mut request.rate_limit_burst,
            key.and_then(|key| key.rate_limit_burst),
            burst.or_else(|| service_default(default.burst)),
            "may do more at once",
        ),
    ] {
        let more = |bound: u32| {
            format!("A key cannot create one that {what}; the limit of this key is {bound}.")
        };
        narrow_one(asked, own, default, more)?;
    }
    if let (true, Some(per_minute)) = (burst_is_inherited, request.rate_limit_per_minute) {
        request.rate_limit_burst = request.rate_limit_burst.map(|burst| burst.min(per_minute));
    }
    Ok(())
}

fn narrow_one<T: PartialOrd + Copy>(
    asked: &mut Option<T>,
    own: Option<T>,
    default: Option<T>,
    refusal: impl FnOnce(T) -> String,
) -> Result<(), Problem> {
    match (*asked, own.or(default)) {
        (Some(asked), Some(bound)) if asked > bound => {
            Err(Problem::new(Code::Forbidden, refusal(bound)))
        }
        (Some(_), _) => Ok(()),
        (None, _) => {
            *asked = own;
            Ok(())
        }
    }
}

/// Whether a scope is `tools:<name>`.
fn is_tool(scope: &str) -> bool {
    scope.starts_with("tools:") && !keys::SCOPES.contains(&scope)
}

/// The warning about scopes that permit no tool of the service.
fn idle_scopes(app: &App, scopes: &[String]) -> Vec<String> {
    let agents = app.catalogue.agents();
    let delegations = agents.iter().flat_map(|agent| &agent.definition.tools);
    let tools = (app.tools)();
    let names: Vec<&String> = tools.iter().map(|tool| &tool.info.name).chain(delegations).collect();
    let permits_any =
        |scope: &String| names.iter().any(|tool| may_execute(std::slice::from_ref(scope), tool));
    // What a configured MCP server offers changes while it runs.
    let servers = (app.servers)();
    let comes_and_goes = |scope: &String| {
        let tool = scope.strip_prefix("tools:mcp:").and_then(|tool| tool.split_once('/'));
        tool.is_some_and(|(server, _)| servers.iter().any(|status| status.name == server))
    };
    let idle = scopes
        .iter()
        .filter(|scope| is_tool(scope) && !comes_and_goes(scope) && !permits_any(scope));
    idle.map(|scope| format!("{scope:?} permits no tool of this service")).collect()
}

/// Create an API key
///
/// The response is the only place where the complete key is shown. A key cannot grant more than it
/// has: neither scopes, nor time, nor requests per minute. A key that is created with a
/// JWT of an identity provider does not end with the JWT: it ends at its own `expires_at`, or when it is
/// revoked.
#[utoipa::path(
    post, path = "/keys", tag = "keys", security(("bearer" = ["keys:admin"])),
    request_body = KeyRequest,
    responses((status = 201, description = "The key was created.", body = CreatedKey)),
)]
pub(crate) async fn create_key(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<(StatusCode, Json<CreatedKey>), Problem> {
    params.finish()?;
    let mut request: KeyRequest =
        fields(body).map_err(|e| Problem::invalid(Code::InvalidInputs, vec![e]))?;
    let now = clock::now();
    let errors = validation_errors(&request, now);
    if !errors.is_empty() {
        return Err(Problem::invalid(Code::InvalidInputs, errors));
    }
    let tenant = request.tenant.clone().unwrap_or_else(|| caller.tenant.clone());
    authorise(&caller, &tenant, &request.scopes)?;
    narrow(&mut request, &caller, caller.key(), app.settings.rate_limit)?;
    let new = keys::generate().map_err(|e| Problem::internal(e.to_string()))?;
    let mut scopes = request.scopes;
    scopes.sort_unstable();
    scopes.dedup();
    let record = ApiKeyRecord {
        id: new.id,
        name: request.name,
        tenant,
        scopes,
        secret_hash: new.secret_hash,
        created_at: now,
        created_by: Some(caller.subject.clone()),
        expires_at: request.expires_at.map(|expiry| expiry.trunc_subsecs(6)),
        revoked_at: None,
        last_used_at: None,
        rate_limit_per_minute: request.rate_limit_per_minute,
        rate_limit_burst: request.rate_limit_burst,
    };
    match app.store.insert_key(&record).await? {
        KeyStored::Stored => {
            let warnings = idle_scopes(&app, &record.scopes);
            let created = CreatedKey { about: record.into(), key: new.token, warnings };
            Ok((StatusCode::CREATED, Json(created)))
        }
        KeyStored::CreatorRevoked => Err(refused_key()),
        KeyStored::IdTaken => Err(Problem::internal("a fresh key id is taken")),
    }
}

/// List API keys
///
/// The keys of a tenant, newest first, including revoked ones.
#[utoipa::path(
    get, path = "/keys", tag = "keys", security(("bearer" = ["keys:admin"])),
    params(
        ("tenant" = Option<String>, Query, description = "The tenant; another one than the caller's requires `admin`."),
        ListParams,
    ),
    responses((status = 200, description = "A page of keys.", body = Listing<KeyView>)),
)]
pub(crate) async fn list_keys(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    mut params: Params,
) -> Result<Json<Listing<KeyView>>, Problem> {
    let tenant = params.value("tenant", "the name of a tenant", |name| {
        keys::is_tenant(name).then(|| name.to_owned())
    })?;
    let page = by_time_and(&mut params, &caller.tenant, LISTS, keys::is_id)?;
    params.finish()?;
    let tenant = tenant.unwrap_or_else(|| caller.tenant.clone());
    authorise(&caller, &tenant, &[])?;
    let keys = app.store.keys(&tenant, &page).await?;
    Ok(Json(Listing::of(keys, &page, |key| time_position(key.created_at, &key.id), KeyView::from)))
}

/// Revoke an API key
///
/// Takes effect immediately; event streams and waiting requests of the key end within seconds.
/// Idempotent. The operator's own key and the last key with `admin` are only revoked with `force`.
#[utoipa::path(
    delete, path = "/keys/{id}", tag = "keys", security(("bearer" = ["keys:admin"])),
    params(
        ("id" = String, Path, description = "The key's id."),
        ("descendants" = Option<bool>, Query, description = "Also revokes the keys that it created, the keys that those created, and so on; default false."),
        ("cancel_runs" = Option<bool>, Query, description = "Also cancels the runs that the keys started; default false."),
        ("force" = Option<bool>, Query, description = "Also revokes the operator's own key and the last key with `admin`; default false."),
    ),
    responses((status = 204, description = "The key is revoked.")),
)]
pub(crate) async fn revoke_key(
    State(app): State<App>,
    caller: Scoped<KeysAdmin>,
    Name(id): Name,
    mut params: Params,
) -> Result<StatusCode, Problem> {
    let what = Revocation {
        subject: &caller.subject,
        within: (!caller.has("admin")).then_some(&caller.tenant),
        id: &id,
        with_descendants: params.flag("descendants")?,
        is_forced: params.flag("force")?,
    };
    let cancels_runs = params.flag("cancel_runs")?;
    params.finish()?;
    if !keys::is_id(&id) {
        return Err(Problem::not_found("key"));
    }
    let revoked = app.runtime.revoke_keys(what, cancels_runs).await?;
    revoked_keys(revoked)?.iter().for_each(|key| app.keys.invalidate(&key.id));
    Ok(StatusCode::NO_CONTENT)
}

fn revoked_keys(revoked: Revoked) -> Result<Vec<ApiKeyRecord>, Problem> {
    let protected = |what: &str| {
        let detail = format!("This would revoke {what}; use `force=true` to do it anyway.");
        Err(Problem::new(Code::ProtectedKey, detail))
    };
    match revoked {
        Revoked::Done(keys) => Ok(keys),
        Revoked::Unknown => Err(Problem::not_found("key")),
        Revoked::RequiresAdmin => Err(forbidden("admin")),
        Revoked::OfOperator => protected("the operator's own key"),
        Revoked::LastAdmin => protected("the last key with the scope `admin`"),
    }
}

#[cfg(test)]
#[path = "keys_tests.rs"]
mod tests;
