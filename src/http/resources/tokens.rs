//! Short-lived tokens: a page of a browser reads, follows, cancels or answers one run or session
//! with one, and never sees an API key.
//!
//! What a token is, and where it is accepted, is in [`crate::http::edge::tokens`].

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use chrono::{DateTime, SubsecRound, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;
use utoipa::ToSchema;
use uuid::Uuid;

use super::runs::existing;
use crate::clock;
use crate::event::{Act, AuditAction, ValidationError};
use crate::http::edge::auth::{AgentsInvoke, Scoped, forbidden};
use crate::http::edge::extract::{JsonObject, Params, fields};
use crate::http::edge::problem::{Code, Problem};
use crate::http::edge::token_signer::{Action, Grant, Target};
use crate::http::state::{App, Shared};
use crate::run::Caller;

const DEFAULT_TTL_SECONDS: i64 = 300;
const MAX_TTL_SECONDS: i64 = 3600;

/// A request for a short-lived token: for a run or for a session.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(example = json!({"run_id": "01980b7c-6e7f-7d3a-9f60-2f2a6c1d4e5b", "actions": ["read", "stream"], "ttl_seconds": 300}))]
pub(crate) struct TokenRequest {
    /// The run, and with it the runs to which it delegates.
    run_id: Option<Uuid>,
    /// The session, and with it its runs. Either this or `run_id` is given.
    #[schema(example = json!(null))]
    session_id: Option<String>,
    /// What the token may do; one to four.
    #[serde(default)]
    #[schema(required, min_items = 1, max_items = 4)]
    actions: Vec<Action>,
    /// How long the token is valid; 300 seconds by default.
    #[schema(minimum = 1, maximum = 3600, required = false)]
    ttl_seconds: Option<i64>,
}

/// A new short-lived token.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Token)]
pub(crate) struct CreatedToken {
    /// The token: in the header `Authorization: Bearer`, or in the parameter `access_token` of an
    /// event stream.
    #[schema(example = "eyJ0eXAiOiJKV1QiLCJhbGciOiJIUzI1NiJ9.…")]
    token: String,
    /// When it expires.
    expires_at: DateTime<Utc>,
}

/// Create a short-lived token
///
/// For a page in a browser: with it the page can read, follow, cancel or answer this one run or
/// session, until the token or the API key that created it expires or the key is revoked. Each
/// action requires its scope: `runs:read` for `read` and `stream` (and `sessions:read` to read a
/// session), `runs:cancel` for `cancel`; approvals by `respond` require `runs:approve`. Without
/// `read`, a cancellation and an answer are answered with the run's status alone.
#[utoipa::path(
    post, path = "/tokens", tag = "tokens", security(("bearer" = ["agents:invoke"])),
    request_body = TokenRequest,
    responses(
        (status = 201, description = "The token was created.", body = CreatedToken),
    ),
)]
pub(crate) async fn create_token(
    State(app): State<App>,
    caller: Scoped<AgentsInvoke>,
    params: Params,
    JsonObject(body): JsonObject,
) -> Result<(StatusCode, Json<CreatedToken>), Problem> {
    params.finish()?;
    let request: TokenRequest =
        fields(body).map_err(|error| Problem::invalid(Code::InvalidInputs, vec![error]))?;
    let (target, ttl) = checked(&request)?;
    authorise(&caller, &target, &request.actions)?;
    require_target(&app, &caller, &target).await?;
    let end = clock::now().trunc_subsecs(0) + ttl;
    let key = caller.key();
    let without_key = app.auth.is_required() && key.is_none();
    let end_of_credential = caller.credential().expires_at().or(key.and_then(|key| key.expires_at));
    let grant = Grant {
        key: key.map(|key| key.id.clone()).unwrap_or_default(),
        caller: without_key.then(|| Caller::clone(&caller)),
        expires_at: end_of_credential.map_or(end, |it| it.min(end)),
        target,
        actions: request.actions,
    };
    let expires_at = grant.expires_at;
    app.store.record_act(act(&caller, &grant)).await?;
    let token = app.tokens.sign(grant)?;
    Ok((StatusCode::CREATED, Json(CreatedToken { token, expires_at })))
}

/// All actions.
const MAX_ACTIONS: usize = 4;

fn checked(request: &TokenRequest) -> Result<(Target, TimeDelta), Problem> {
    let mut errors = Vec::new();
    let mut refuse = |pointer: &str, message: &str| {
        errors.push(ValidationError { pointer: pointer.into(), message: message.into() });
    };
    let target = match (request.run_id, &request.session_id) {
        (Some(run), None) => Some(Target::Run(run)),
        (None, Some(session)) => Some(Target::Session(session.clone())),
        _ => None,
    };
    if target.is_none() {
        refuse("", "needs either `run_id` or `session_id`");
    }
    if request.actions.is_empty() {
        refuse("/actions", "needs at least one action");
    }
    if request.actions.len() > MAX_ACTIONS {
        refuse("/actions", "names an action twice: there are four");
    }
    let ttl = request.ttl_seconds.unwrap_or(DEFAULT_TTL_SECONDS);
    if !(1..=MAX_TTL_SECONDS).contains(&ttl) {
        refuse("/ttl_seconds", "must be from 1 to 3600");
    }
    match target.filter(|_| errors.is_empty()) {
        Some(target) => Ok((target, TimeDelta::seconds(ttl))),
        None => Err(Problem::invalid(Code::InvalidInputs, errors)),
    }
}

/// A token can do nothing that its maker cannot.
fn authorise(caller: &Caller, target: &Target, actions: &[Action]) -> Result<(), Problem> {
    for action in actions {
        let needed: &[&str] = match (action, target) {
            (Action::Read, Target::Session(_)) => &["sessions:read", "runs:read"],
            (Action::Read | Action::Stream, _) => &["runs:read"],
            (Action::Cancel, _) => &["runs:cancel"],
            (Action::Respond, _) => &["agents:invoke"],
        };
        if let Some(missing) = needed.iter().find(|scope| !caller.has(scope)) {
            return Err(forbidden(missing));
        }
    }
    Ok(())
}

async fn require_target(app: &Shared, caller: &Caller, target: &Target) -> Result<(), Problem> {
    match target {
        Target::Run(run) => existing(app, &caller.tenant, *run).await.map(drop),
        Target::Session(session) => {
            let found = app.store.session(&caller.tenant, session, 0).await?;
            found.map(drop).ok_or_else(|| Problem::not_found("session"))
        }
    }
}

fn act(caller: &Caller, grant: &Grant) -> Act {
    let mut details = json!({"actions": grant.actions, "expires_at": grant.expires_at});
    let run_id = match &grant.target {
        Target::Run(run) => Some(*run),
        Target::Session(session) => {
            details["session_id"] = session.as_str().into();
            None
        }
    };
    Act {
        tenant: caller.tenant.clone(),
        subject: caller.subject.clone(),
        action: AuditAction::TokenCreated,
        run_id,
        reason: None,
        details,
    }
}
