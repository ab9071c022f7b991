//! Authentication by bearer key, and authorization by scopes that handlers name as argument types.
//!
//! A handler gets its caller, and with it the tenant, only through [`Scoped`]; nothing else in a
//! request can name a tenant. What a caller's tools may do is decided by the gate, not here.

use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;

use super::key_cache::{Auth, CachedKey};
use super::open_requests::Counted;
use super::problem::{Code, Problem};
use super::server::Peer;
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::{Refusal, keys};
use crate::store::ApiKeyRecord;

/// How often the key of an event stream or a waiting request is looked at.
const WATCH: Duration = Duration::from_secs(1);

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
    FilesRead = "files:read",
    FilesWrite = "files:write",
    ToolsRead = "tools:read",
    KeysAdmin = "keys:admin",
    AuditRead = "audit:read",
}

/// An authenticated caller that holds the scope `S`.
pub(crate) struct Scoped<S> {
    caller: Arc<Caller>,
    key: Option<Arc<ApiKeyRecord>>,
    scope: PhantomData<fn() -> S>,
}

impl<S> Deref for Scoped<S> {
    type Target = Arc<Caller>;

    fn deref(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl<S> Scoped<S> {
    /// The key of the request; none if `auth.mode` is `none`.
    pub(crate) fn key(&self) -> Option<&Arc<ApiKeyRecord>> {
        self.key.as_ref()
    }
}

impl<S: Scope> FromRequestParts<App> for Scoped<S> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Identity { caller, key } = Identity::with::<S>(parts, app).await?;
        Ok(Self { caller, key, scope: PhantomData })
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
                let CachedKey { caller, key, .. } = authenticated(app, parts).await?;
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

/// A key that is not accepted, or no longer.
pub(crate) fn refused_key() -> Problem {
    Problem::new(Code::Unauthenticated, "The API key is unknown, expired or revoked.")
}

async fn authenticated(app: &App, parts: &Parts) -> Result<CachedKey, Problem> {
    let Some(token) = bearer(&parts.headers) else {
        let detail = "This requires an `Authorization: Bearer` header with an API key.";
        return Err(Problem::new(Code::Unauthenticated, detail));
    };
    let refuse = |why, key| {
        let source = parts.extensions.get::<Peer>().map(|peer| peer.0);
        app.runtime.note_refused_login(why, key, source);
        Err(refused_key())
    };
    let Some((id, secret)) = keys::parse(token) else { return refuse(Refusal::Malformed, None) };
    let Some(cached) = app.keys.find(app.store.as_ref(), id).await? else {
        return refuse(Refusal::UnknownKey, None);
    };
    if let Some(why) = cached.refusal(secret) {
        return refuse(why, Some(&cached.key));
    }
    cached.note_use(&app.runtime);
    count(app, parts, &cached.key.id)?;
    Ok(cached)
}

/// Counts the request for its key until the response is sent.
fn count(app: &App, parts: &Parts, key: &str) -> Result<(), Problem> {
    let Some(counted) = parts.extensions.get::<Counted>().filter(|counted| !counted.is_set())
    else {
        return Ok(());
    };
    let most = app.settings.requests_per_key;
    counted.set(app.open.open(key, most).ok_or_else(|| Problem::too_many_requests(most))?);
    Ok(())
}

/// Resolves when this key has been revoked or has expired; without a key never.
pub(crate) async fn key_lost(app: &App, key: Option<&ApiKeyRecord>) {
    let Some(key) = key else { return std::future::pending().await };
    loop {
        tokio::time::sleep(WATCH).await;
        // What cannot be decided now is decided a moment later.
        let Ok(found) = app.keys.find(app.store.as_ref(), &key.id).await else { continue };
        if found.is_none_or(|cached| cached.is_over().is_some()) {
            return;
        }
    }
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
}
