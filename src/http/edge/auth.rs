//! Who asks, and whether they may: bearer keys, and the scopes that handlers name as argument
//! types.
//!
//! A handler gets its caller, and with it the tenant, only through [`Scoped`]; nothing else in a
//! request can name a tenant. What a caller's tools may do is the gate's business, not this file's.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use chrono::Utc;

use super::key_ring::{Auth, CachedKey};
use super::problem::{Code, Problem};
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::keys;
use crate::store::ApiKeyRecord;

/// A scope as a type.
pub(crate) trait Scope {
    /// Its name in keys.
    const NAME: &'static str;
}

macro_rules! scopes {
    ($($scope:ident = $name:literal,)*) => {
        $(
            #[doc = concat!("`", $name, "`")]
            pub(crate) struct $scope;

            impl Scope for $scope {
                const NAME: &'static str = $name;
            }
        )*
    };
}

scopes! {
    AgentsRead = "agents:read",
    AgentsInvoke = "agents:invoke",
    RunsRead = "runs:read",
    RunsCancel = "runs:cancel",
    RunsApprove = "runs:approve",
    SessionsRead = "sessions:read",
    SessionsWrite = "sessions:write",
    ToolsRead = "tools:read",
    KeysAdmin = "keys:admin",
    AuditRead = "audit:read",
}

/// An authenticated caller that holds the scope `S`.
pub(crate) struct Scoped<S> {
    caller: Arc<Caller>,
    scope: PhantomData<fn() -> S>,
}

impl<S> Deref for Scoped<S> {
    type Target = Arc<Caller>;

    fn deref(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl<S: Scope> FromRequestParts<App> for Scoped<S> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Identity { caller, .. } = Identity::with::<S>(parts, app).await?;
        Ok(Self { caller, scope: PhantomData })
    }
}

/// Who asks, and with which key; without authentication there is none.
pub(crate) struct Identity {
    pub(crate) caller: Arc<Caller>,
    pub(crate) key: Option<Arc<ApiKeyRecord>>,
}

impl Identity {
    /// Authenticates, and refuses whoever does not hold the scope.
    pub(crate) async fn with<S: Scope>(parts: &Parts, app: &App) -> Result<Self, Problem> {
        let identity = match &app.auth {
            Auth::None => Self { caller: app.keys.local(), key: None },
            Auth::Local(caller) => Self { caller: Arc::clone(caller), key: None },
            Auth::ApiKeys => {
                let CachedKey { caller, key, .. } = authenticated(app, &parts.headers).await?;
                Self { caller, key: Some(key) }
            }
        };
        if identity.caller.has(S::NAME) { Ok(identity) } else { Err(forbidden(S::NAME)) }
    }
}

/// Refuses a caller of whom nobody knows who it is: where keys are not asked for, everybody is the
/// same.
pub(crate) fn refuse_anonymous(auth: &Auth) -> Result<(), Problem> {
    match auth {
        Auth::None => Err(Problem::new(
            Code::Forbidden,
            "A decision needs somebody who made it: use an API key.",
        )),
        Auth::Local(_) | Auth::ApiKeys => Ok(()),
    }
}

/// The refusal that names the missing scope.
pub(crate) fn forbidden(scope: &str) -> Problem {
    Problem::new(Code::Forbidden, format!("This needs the scope `{scope}`."))
}

async fn authenticated(app: &App, headers: &HeaderMap) -> Result<CachedKey, Problem> {
    let refused = |why| Err(Problem::new(Code::Unauthenticated, why));
    let Some(token) = bearer(headers) else {
        return refused("This needs an `Authorization: Bearer` header with an API key.");
    };
    if let Some((id, secret)) = keys::parse(token)
        && let Some(known) = app.keys.find(app.store.as_ref(), id).await?
        && keys::verify(secret, &known.key.secret_hash)
        && known.key.revoked_at.is_none()
        && known.key.expires_at.is_none_or(|expiry| Utc::now() < expiry)
    {
        return Ok(known);
    }
    refused("The API key is unknown, expired or revoked.")
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
