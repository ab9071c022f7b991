//! Authentication by API key, by a token of the identity provider or by the session of the console,
//! and authorization by scopes that handlers name as argument types.
//!
//! A handler gets its caller, and with it the tenant, only through [`Scoped`]; nothing else in a
//! request can name a tenant. What a caller's tools may do is decided by the gate, not here.

use std::borrow::Cow;
use std::marker::PhantomData;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::header::AUTHORIZATION;
use axum::http::request::Parts;
use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::console_cookie::{self, check_own_page};
use super::key_cache::{Auth, CachedKey};
use super::large_bodies::Sender;
use super::open_requests::Counted;
use super::problem::{Code, Problem};
use super::server::Peer;
use super::token_signer::{Action, ConsoleSession, Grant};
use super::tokens;
use crate::clock;
use crate::fairness::CpuAccount;
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::jwt::{self, IdentityProvider, JwtError, JwtRefusal};
use crate::runtime::{LoginRefusal, keys};
use crate::store::ApiKeyRecord;

/// How often the key of an event stream or of a waiting request is checked again.
const RECHECK_INTERVAL: Duration = Duration::from_secs(1);

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
    MemoryRead = "memory:read",
    MemoryWrite = "memory:write",
    ToolsRead = "tools:read",
    KeysAdmin = "keys:admin",
    AuditRead = "audit:read",
}

/// An authenticated caller that holds the scope `S`.
pub(crate) struct Scoped<S> {
    caller: Arc<Caller>,
    credential: Credential,
    scope: PhantomData<fn() -> S>,
}

/// What a request was authenticated with. It can end while the request is being answered.
#[derive(Clone, Default)]
pub(crate) struct Credential {
    /// None if `auth.mode` is `none`, or if it was a token of the identity provider.
    pub(crate) key: Option<Arc<ApiKeyRecord>>,
    /// When the token or the console's session expires, if it was one.
    expires_at: Option<DateTime<Utc>>,
    /// The console's session, if it was one.
    session: Option<Uuid>,
    /// What the token may do, if it was one of this service.
    actions: Option<Vec<Action>>,
}

impl Credential {
    pub(crate) fn expires_at(&self) -> Option<DateTime<Utc>> {
        self.expires_at
    }

    /// Whether it may read the run or session that it is for, as far as its caller may.
    pub(crate) fn may_read(&self) -> bool {
        self.actions.as_ref().is_none_or(|actions| actions.contains(&Action::Read))
    }
}

impl<S> Deref for Scoped<S> {
    type Target = Arc<Caller>;

    fn deref(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl<S> Scoped<S> {
    pub(crate) fn credential(&self) -> &Credential {
        &self.credential
    }

    /// The API key of the request, if it has one.
    pub(crate) fn key(&self) -> Option<&ApiKeyRecord> {
        self.credential.key.as_deref()
    }
}

impl<S: Scope> FromRequestParts<App> for Scoped<S> {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Identity { caller, credential } = Identity::with::<S>(parts, app).await?;
        Ok(Self { caller, credential, scope: PhantomData })
    }
}

/// The authenticated caller.
pub(crate) struct Identity {
    pub(crate) caller: Arc<Caller>,
    pub(crate) credential: Credential,
}

impl Identity {
    /// Authenticates the request and requires the scope `S`.
    pub(crate) async fn with<S: Scope>(parts: &Parts, app: &App) -> Result<Self, Problem> {
        let identity = match presented_credential(app, parts)? {
            PresentedCredential::Token(token) => Self::of_token(app, parts, &token).await?,
            presented => Self::without_token(app, parts, presented).await?,
        };
        if !identity.caller.has(S::NAME) {
            return Err(forbidden(S::NAME));
        }
        if let Some(sender) = parts.extensions.get::<Sender>() {
            sender.set(&identity.caller);
        }
        if let Some(payer) = parts.extensions.get::<CpuAccount>() {
            payer.set(&identity.caller.tenant);
            payer.move_to_pool().await;
        }
        Ok(identity)
    }

    /// The caller by its key, JWT or console session, or without any where none is required. No scope is
    /// required.
    pub(crate) async fn signed_in(parts: &Parts, app: &App) -> Result<Self, Problem> {
        Self::without_token(app, parts, presented_credential(app, parts)?).await
    }

    /// The caller by its key alone.
    pub(crate) async fn by_key(parts: &Parts, app: &App) -> Result<Self, Problem> {
        Self::of_key(app, parts, bearer(&parts.headers)?).await
    }

    async fn without_token(
        app: &App,
        parts: &Parts,
        by: PresentedCredential<'_>,
    ) -> Result<Self, Problem> {
        match by {
            PresentedCredential::Cookie(session) => Self::of_session(app, parts, session).await,
            PresentedCredential::Key(key) => Self::of_key(app, parts, key).await,
            PresentedCredential::Jwt(token, provider) => {
                Self::of_jwt(app, parts, token, provider).await
            }
            PresentedCredential::Token(_) => {
                Err(refused(app, parts, LoginRefusal::Malformed, None))
            }
        }
    }

    /// The caller that signed in to the console.
    async fn of_session(app: &App, parts: &Parts, session: &str) -> Result<Self, Problem> {
        check_own_page(parts)?;
        let Some(session) = app.tokens.verify::<ConsoleSession>(session) else {
            return Err(refused(app, parts, LoginRefusal::ForgedToken, None));
        };
        let mut identity = Self::from(usable(app, parts, &session.key, None).await?);
        let is_over = session.expires_at <= clock::now();
        if is_over || app.ended.has(app.store.as_ref(), session.id).await? {
            let key = identity.credential.key.as_deref();
            return Err(refused(app, parts, LoginRefusal::ExpiredToken, key));
        }
        identity.credential.expires_at = Some(session.expires_at);
        identity.credential.session = Some(session.id);
        Ok(identity)
    }

    async fn of_key(app: &App, parts: &Parts, key: Option<&str>) -> Result<Self, Problem> {
        match Self::without_key(app) {
            Some(identity) => Ok(identity),
            None => Ok(authenticated(app, parts, key).await?.into()),
        }
    }

    /// The caller that made the token, if the token is for this request.
    async fn of_token(app: &App, parts: &Parts, token: &str) -> Result<Self, Problem> {
        let Some(grant) = app.tokens.verify::<Grant>(token) else {
            return Err(refused(app, parts, LoginRefusal::ForgedToken, None));
        };
        let mut identity = match (Self::without_key(app), &grant.caller) {
            (Some(identity), _) => identity,
            (None, Some(caller)) if matches!(app.auth, Auth::ApiKeysAndJwts(_)) => {
                Self::of_caller(app, parts, caller.clone())?
            }
            (None, _) => usable(app, parts, &grant.key, None).await?.into(),
        };
        if grant.is_over() {
            let key = identity.credential.key.as_deref();
            return Err(refused(app, parts, LoginRefusal::ExpiredToken, key));
        }
        tokens::check(&grant, app, &identity.caller.tenant, parts).await?;
        identity.credential.expires_at = Some(grant.expires_at);
        identity.credential.actions = Some(grant.actions);
        Ok(identity)
    }

    /// The caller of a token of the identity provider.
    async fn of_jwt(
        app: &App,
        parts: &Parts,
        token: &str,
        provider: &IdentityProvider,
    ) -> Result<Self, Problem> {
        match provider.caller_of(token).await {
            Ok(vouched) => {
                let mut identity = Self::of_caller(app, parts, vouched.caller)?;
                identity.credential.expires_at = Some(vouched.expires_at);
                Ok(identity)
            }
            Err(JwtError::Refused(why)) => {
                let problem = refused(app, parts, LoginRefusal::Jwt(why), None);
                // Only the holder of a token that the provider signed learns what is wrong with it.
                let is_signed = !matches!(why, JwtRefusal::Malformed | JwtRefusal::Forged);
                Err(if is_signed {
                    Problem::new(Code::Unauthenticated, why.to_string())
                } else {
                    problem
                })
            }
            Err(JwtError::KeySet(why)) => {
                tracing::warn!(error = %why, "a token of the identity provider cannot be verified");
                Err(Problem::new(
                    Code::IdentityProviderUnavailable,
                    "The identity provider's keys are temporarily unavailable.",
                ))
            }
        }
    }

    /// A caller without an API key.
    fn of_caller(app: &App, parts: &Parts, caller: Caller) -> Result<Self, Problem> {
        count(app, parts, &caller.subject)?;
        Ok(Self { caller: Arc::new(caller), credential: Credential::default() })
    }

    /// The caller of all requests, where they need no key.
    fn without_key(app: &App) -> Option<Self> {
        let caller = match &app.auth {
            Auth::None => app.keys.local(),
            Auth::Local(caller) => Arc::clone(caller),
            Auth::ApiKeys | Auth::ApiKeysAndJwts(_) => return None,
        };
        Some(Self { caller, credential: Credential::default() })
    }
}

impl From<CachedKey> for Identity {
    fn from(CachedKey { caller, key, .. }: CachedKey) -> Self {
        Self { caller, credential: Credential { key: Some(key), ..Credential::default() } }
    }
}

/// The credential that a request presents.
enum PresentedCredential<'p> {
    Key(Option<&'p str>),
    Token(Cow<'p, str>),
    Jwt(&'p str, &'p IdentityProvider),
    /// A session of the console, by the cookie alone.
    Cookie(&'p str),
}

fn presented_credential<'p>(
    app: &'p App,
    parts: &'p Parts,
) -> Result<PresentedCredential<'p>, Problem> {
    let bearer = bearer(&parts.headers)?;
    match (tokens::in_query(parts)?, bearer) {
        (Some(_), Some(_)) => Err(Problem::new(
            Code::Unauthenticated,
            "Send one credential only: there is one in the header `Authorization` and one in `access_token`.",
        )),
        (Some(token), None) => Ok(PresentedCredential::Token(token.into())),
        (None, Some(token)) if tokens::is_token(token) => Ok(match &app.auth {
            Auth::ApiKeysAndJwts(provider) if jwt::is_foreign(token) => {
                PresentedCredential::Jwt(token, provider)
            }
            _ => PresentedCredential::Token(token.into()),
        }),
        (None, key) => {
            Ok(session(app, parts)
                .map_or(PresentedCredential::Key(key), PresentedCredential::Cookie))
        }
    }
}

/// The console session in the cookie, if authentication is required and the request has no other
/// credential.
pub(crate) fn session<'p>(app: &App, parts: &'p Parts) -> Option<&'p str> {
    let is_alone = !parts.headers.contains_key(AUTHORIZATION);
    let session = console_cookie::in_cookie(parts, app.tokens.cookie());
    session.filter(|_| app.auth.is_required() && is_alone)
}

/// Rejects anonymous callers (`auth.mode = "none"`): a decision is recorded with who made it.
pub(crate) fn refuse_anonymous(auth: &Auth) -> Result<(), Problem> {
    match auth {
        Auth::None => Err(Problem::new(
            Code::Forbidden,
            "Decisions require an authenticated caller: set auth.mode = \"api_key\" and use an API key.",
        )),
        Auth::Local(_) | Auth::ApiKeys | Auth::ApiKeysAndJwts(_) => Ok(()),
    }
}

pub(crate) fn forbidden(scope: &str) -> Problem {
    Problem::new(Code::Forbidden, format!("This requires the scope `{scope}`."))
}

/// The refusal of a credential that is not accepted, or no longer accepted.
pub(crate) fn refused_key() -> Problem {
    Problem::new(
        Code::Unauthenticated,
        "The API key, token or session is unknown, expired or revoked.",
    )
}

/// A credential that is no longer accepted, of a request that has begun a run.
pub(crate) fn credential_ended() -> Problem {
    Problem::new(
        Code::Unauthenticated,
        "The API key, token or session has expired or was revoked. The run continues; read it with GET /v1/runs/{run_id}.",
    )
}

fn refused(app: &App, parts: &Parts, why: LoginRefusal, key: Option<&ApiKeyRecord>) -> Problem {
    let source = parts.extensions.get::<Peer>().map(|peer| peer.0);
    app.runtime.logins().note_refused(why, key, source);
    refused_key()
}

async fn authenticated(app: &App, parts: &Parts, key: Option<&str>) -> Result<CachedKey, Problem> {
    let Some(key) = key else {
        let detail = "This requires an API key as bearer token in the header `Authorization`.";
        return Err(Problem::new(Code::Unauthenticated, detail));
    };
    let Some((id, secret)) = keys::parse(key) else {
        return Err(refused(app, parts, LoginRefusal::Malformed, None));
    };
    usable(app, parts, id, Some(secret)).await
}

/// The key with this id, if it can be used; with this secret, where one is presented.
async fn usable(
    app: &App,
    parts: &Parts,
    id: &str,
    secret: Option<&str>,
) -> Result<CachedKey, Problem> {
    let Some(cached) = app.keys.find(app.store.as_ref(), id).await? else {
        return Err(refused(app, parts, LoginRefusal::UnknownKey, None));
    };
    let refusal =
        secret.map_or_else(|| cached.revoked_or_expired(), |secret| cached.refusal(secret));
    if let Some(why) = refusal {
        return Err(refused(app, parts, why, Some(&cached.key)));
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

/// Resolves when the credential has expired or its key was revoked; without one never.
pub(crate) async fn credential_lost(app: &App, credential: &Credential) {
    let Credential { key, expires_at, session, actions: _ } = credential;
    if key.is_none() && expires_at.is_none() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(RECHECK_INTERVAL).await;
        if expires_at.is_some_and(|end| end <= clock::now()) {
            return;
        }
        if let Some(session) = session
            && app.ended.has(app.store.as_ref(), *session).await.unwrap_or(false)
        {
            return;
        }
        let Some(key) = key else { continue };
        // If it cannot be checked now, it is checked again after the interval.
        let Ok(found) = app.keys.find(app.store.as_ref(), &key.id).await else { continue };
        if found.is_none_or(|cached| cached.revoked_or_expired().is_some()) {
            return;
        }
    }
}

/// The token in the header. Two headers are refused: a proxy in front may use the other one.
fn bearer(headers: &HeaderMap) -> Result<Option<&str>, Problem> {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let header = given.next();
    if given.next().is_some() {
        let detail = "The header `Authorization` is given more than once.";
        return Err(Problem::new(Code::Unauthenticated, detail));
    }
    let credentials = header.and_then(|header| header.to_str().ok()?.split_once(' '));
    let is_bearer = |(scheme, _): &(&str, &str)| scheme.eq_ignore_ascii_case("bearer");
    Ok(credentials.filter(is_bearer).map(|(_, token)| token.trim()))
}
