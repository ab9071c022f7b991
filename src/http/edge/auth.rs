//! Authentication by bearer key, and authorization by scopes that handlers name as argument types.
//!
//! A handler gets its caller, and with it the tenant, only through [`Scoped`]; nothing else in a
//! request can name a tenant. What a caller's tools may do is decided by the gate, not here.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;

use super::key_cache::{Auth, CachedKey};
use super::problem::{Code, Problem};
use crate::clock;
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::keys;
use crate::store::ApiKeyRecord;

/// A scope as a type, so that a handler's signature states what it requires.
pub(crate) trait Scope {
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

/// The authenticated caller and its key. There is no key if `auth.mode` is `none`.
pub(crate) struct Identity {
    pub(crate) caller: Arc<Caller>,
    pub(crate) key: Option<Arc<ApiKeyRecord>>,
}

impl Identity {
    /// Authenticates the request and requires the scope `S`.
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

/// Rejects anonymous callers (`auth.mode = "none"`): a decision is recorded with who made it.
pub(crate) fn refuse_anonymous(auth: &Auth) -> Result<(), Problem> {
    match auth {
        Auth::None => Err(Problem::new(
            Code::Forbidden,
            "Decisions require an authenticated caller: set auth.mode = \"api_key\" and use an API key.",
        )),
        Auth::Local(_) | Auth::ApiKeys => Ok(()),
    }
}

pub(crate) fn forbidden(scope: &str) -> Problem {
    Problem::new(Code::Forbidden, format!("This requires the scope `{scope}`."))
}

async fn authenticated(app: &App, headers: &HeaderMap) -> Result<CachedKey, Problem> {
    let refused = |why| Err(Problem::new(Code::Unauthenticated, why));
    let Some(token) = bearer(headers) else {
        return refused("This requires an `Authorization: Bearer` header with an API key.");
    };
    if let Some((id, secret)) = keys::parse(token)
        && let Some(cached) = app.keys.find(app.store.as_ref(), id).await?
        && keys::verify(secret, &cached.key.secret_hash)
        && cached.key.revoked_at.is_none()
        && cached.key.expires_at.is_none_or(|expiry| clock::now() < expiry)
    {
        return Ok(cached);
    }
    refused("The API key is unknown, expired or revoked.")
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
