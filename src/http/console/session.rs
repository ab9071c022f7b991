//! Signing in to the console: an API key is given once, for a cookie that scripts cannot read.
//!
//! The cookie is a session that ends with its key, when it expires or by signing out, on every
//! replica. Which requests it is accepted in is decided in [`crate::http::edge::console_cookie`].

use axum::Json;
use axum::extract::State;
use axum::http::header::{AUTHORIZATION, SET_COOKIE};
use axum::http::request::Parts;
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SubsecRound, Utc};
use serde::Serialize;
use serde_json::json;
use uuid::Uuid;

use crate::bounds::secrets::redacted;
use crate::clock;
use crate::event::{Act, AuditAction};
use crate::http::edge::auth::{Identity, session};
use crate::http::edge::console_cookie::{check_own_page, set_cookie};
use crate::http::edge::problem::{Code, Problem};
use crate::http::edge::token_signer::ConsoleSession;
use crate::http::state::App;
use crate::run::Caller;

/// The authentication of the console, and its user.
#[derive(Serialize)]
pub(super) struct SessionStatus {
    /// `api_key`, or `none` where no sign-in is needed.
    authentication: &'static str,
    /// Null where no user is signed in.
    caller: Option<SignedIn>,
}

#[derive(Serialize)]
struct SignedIn {
    /// Null without authentication.
    key: Option<NamedKey>,
    tenant: String,
    scopes: Vec<String>,
    /// When the session ends by itself.
    expires_at: Option<DateTime<Utc>>,
}

#[derive(Serialize)]
struct NamedKey {
    id: String,
    name: String,
}

impl SessionStatus {
    fn of(app: &App, identity: Option<&Identity>) -> Json<Self> {
        let authentication = if app.auth.is_required() { "api_key" } else { "none" };
        let signed_in = |Identity { caller, credential }: &Identity| SignedIn {
            key: credential
                .key
                .as_ref()
                .map(|key| NamedKey { id: key.id.clone(), name: redacted(&key.name).into_owned() }),
            tenant: caller.tenant.clone(),
            scopes: caller.scopes.clone(),
            expires_at: credential.expires_at(),
        };
        Json(Self { authentication, caller: identity.map(signed_in) })
    }
}

/// Returns who is signed in. The cookie of an ended session is removed.
pub(super) async fn status(State(app): State<App>, parts: Parts) -> Result<Response, Problem> {
    let is_anonymous =
        !parts.headers.contains_key(AUTHORIZATION) && session(&app, &parts).is_none();
    if is_anonymous && app.auth.is_required() {
        return Ok(SessionStatus::of(&app, None).into_response());
    }
    match Identity::signed_in(&parts, &app).await {
        Ok(identity) => Ok(SessionStatus::of(&app, Some(&identity)).into_response()),
        Err(problem) if problem.code() == Code::Unauthenticated => {
            Ok((remove_cookie(&app, &parts)?, SessionStatus::of(&app, None)).into_response())
        }
        Err(problem) => Err(problem),
    }
}

/// Makes a session for the API key in the header `Authorization`.
pub(super) async fn sign_in(State(app): State<App>, parts: Parts) -> Result<Response, Problem> {
    check_own_page(&parts)?;
    let identity = Identity::by_key(&parts, &app).await?;
    let Some(key) = identity.credential.key.as_ref() else {
        return Ok(SessionStatus::of(&app, Some(&identity)).into_response());
    };
    let end = clock::now().trunc_subsecs(0) + app.settings.console_session;
    let expires_at = key.expires_at.map_or(end, |of_key| of_key.min(end));
    let session = ConsoleSession { key: key.id.clone(), id: Uuid::new_v4(), expires_at };
    app.store.record_act(act(&identity.caller, AuditAction::ConsoleSignedIn, &session)).await?;
    let token = app.tokens.sign(session)?;
    let cookie = set_cookie(&parts.headers, app.tokens.cookie(), Some((&token, expires_at)))?;
    Ok(([(SET_COOKIE, cookie)], SessionStatus::of(&app, Some(&identity))).into_response())
}

/// Ends the session in the cookie; without one, nothing is to be done.
pub(super) async fn sign_out(State(app): State<App>, parts: Parts) -> Result<Response, Problem> {
    check_own_page(&parts)?;
    if let Some(session) = session(&app, &parts)
        && let Some(session) = app.tokens.verify::<ConsoleSession>(session)
        && let Some(key) = app.store.key(&session.key).await?
    {
        let caller = Caller { subject: key.id, tenant: key.tenant, scopes: Vec::new() };
        let act = act(&caller, AuditAction::ConsoleSignedOut, &session);
        app.ended.end(&app.store, (session.id, session.expires_at), act).await?;
    }
    Ok((StatusCode::NO_CONTENT, remove_cookie(&app, &parts)?).into_response())
}

/// The header that makes the browser remove the cookie.
fn remove_cookie(app: &App, parts: &Parts) -> Result<[(HeaderName, HeaderValue); 1], Problem> {
    Ok([(SET_COOKIE, set_cookie(&parts.headers, app.tokens.cookie(), None)?)])
}

fn act(caller: &Caller, action: AuditAction, session: &ConsoleSession) -> Act {
    Act {
        tenant: caller.tenant.clone(),
        subject: caller.subject.clone(),
        action,
        run_id: None,
        reason: None,
        details: json!({"session": session.id, "expires_at": session.expires_at}),
    }
}
