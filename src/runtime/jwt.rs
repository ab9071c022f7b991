//! JSON Web Tokens of an identity provider (RFC 7519), which identify callers if `auth.mode` is `jwt`.
//!
//! Accepted are RS256, ES256 and EdDSA with the provider's keys, its issuer and this service's
//! audience. The claims `sub`, `tenant`, `scope` (as in RFC 8693: separated by spaces) and `exp` say
//! who calls; scopes that are not this service's are ignored. The subject of such a caller is `jwt:`
//! and the claim `sub`, so that it cannot be taken for an API key.

mod jwks;

use std::sync::Arc;
use std::time::Duration;

use chrono::{DateTime, Utc};
use jsonwebtoken::{Algorithm, Validation};
use serde::Deserialize;
use serde_json::Value;

use self::jwks::{Jwks, JwksError, VerifyingKey};
use super::keys::{MAX_SCOPES, is_scope, is_tenant};
use crate::clock;
use crate::config::Jwt;
use crate::run::Caller;

/// Longer tokens are refused without parsing.
const MAX_BYTES: usize = 8192;
const MAX_SUBJECT: usize = 256;
/// How far the provider's clock may be ahead in `nbf`.
const CLOCK_SKEW: Duration = Duration::from_mins(1);

/// Why a token does not identify a caller.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum JwtError {
    #[error(transparent)]
    Refused(#[from] JwtRefusal),
    #[error(transparent)]
    KeySet(#[from] JwksError),
}

/// Why a token is not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum JwtRefusal {
    #[error("The JWT cannot be read, or was not signed with RS256, ES256 or EdDSA.")]
    Malformed,
    #[error("The JWT was not signed with a key of the identity provider.")]
    Forged,
    /// From here on: refusals of tokens that the provider did sign.
    #[error("The JWT's header has `crit`, and no critical extension is supported.")]
    Critical,
    #[error("The JWT is not valid yet.")]
    Early,
    #[error("The JWT has expired.")]
    Expired,
    #[error("The JWT's claim `{claim}` {problem}.")]
    Claim { claim: &'static str, problem: &'static str },
}

/// A caller that the identity provider has authenticated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JwtCaller {
    pub caller: Caller,
    pub expires_at: DateTime<Utc>,
}

/// Accepts the tokens of one identity provider.
#[derive(Debug)]
pub struct IdentityProvider {
    issuer: String,
    audience: String,
    keys: Jwks,
}

/// Whether a bearer token may be one of an identity provider: a JWT that is not signed with a shared secret,
/// unlike the tokens of this service.
pub fn is_foreign(token: &str) -> bool {
    token.len() > MAX_BYTES
        || jsonwebtoken::decode_header(token).is_ok_and(|header| {
            !matches!(header.alg, Algorithm::HS256 | Algorithm::HS384 | Algorithm::HS512)
        })
}

#[derive(Deserialize)]
struct Claims {
    iss: Option<Value>,
    aud: Option<Value>,
    sub: Option<Value>,
    tenant: Option<Value>,
    scope: Option<Value>,
    exp: Option<Value>,
    nbf: Option<Value>,
}

impl IdentityProvider {
    pub fn new(settings: &Jwt) -> Self {
        Self {
            issuer: settings.issuer.clone(),
            audience: settings.audience.clone(),
            keys: Jwks::new(settings.key_set.clone()),
        }
    }

    /// The provider's public keys.
    pub fn keys(&self) -> &Jwks {
        &self.keys
    }

    /// The caller of a token.
    ///
    /// # Errors
    /// It is not accepted, or the provider's keys are not known.
    pub async fn caller_of(&self, token: &str) -> Result<JwtCaller, JwtError> {
        if token.len() > MAX_BYTES {
            return Err(JwtRefusal::Malformed.into());
        }
        let header = jsonwebtoken::decode_header(token).map_err(|_| JwtRefusal::Malformed)?;
        if !matches!(header.alg, Algorithm::RS256 | Algorithm::ES256 | Algorithm::EdDSA) {
            return Err(JwtRefusal::Malformed.into());
        }
        let (id, algorithm) = (header.kid.as_deref(), header.alg);
        let mut claims = verified(token, &self.keys.candidates(id, algorithm).await?);
        if claims.is_none() {
            claims = verified(token, &self.keys.reread(id, algorithm).await?);
        }
        let claims = claims.ok_or(JwtRefusal::Forged)?;
        // RFC 7515, section 4.1.11.
        if header.crit.is_some() {
            return Err(JwtRefusal::Critical.into());
        }
        Ok(self.accepted(claims, clock::now())?)
    }

    fn accepted(&self, claims: Claims, now: DateTime<Utc>) -> Result<JwtCaller, JwtRefusal> {
        let wrong = |claim, problem| JwtRefusal::Claim { claim, problem };
        if claims.iss.as_ref().and_then(Value::as_str) != Some(&self.issuer) {
            return Err(wrong("iss", "is not the configured issuer"));
        }
        let is_audience = |value: &Value| value.as_str() == Some(&self.audience);
        if !claims.aud.is_some_and(|aud| match &aud {
            Value::Array(several) => several.iter().any(is_audience),
            one => is_audience(one),
        }) {
            return Err(wrong("aud", "does not name this service"));
        }
        let expires_at = time(claims.exp).ok_or(wrong("exp", "is missing or not a time"))?;
        if expires_at <= now {
            return Err(JwtRefusal::Expired);
        }
        if let Some(from) = claims.nbf {
            let from = time(Some(from)).ok_or(wrong("nbf", "is not a time"))?;
            if from > now + CLOCK_SKEW {
                return Err(JwtRefusal::Early);
            }
        }
        let subject = claims.sub.as_ref().and_then(Value::as_str).unwrap_or_default();
        let is_printable = subject.chars().all(|c| !c.is_control());
        if subject.is_empty() || subject.len() > MAX_SUBJECT || !is_printable {
            return Err(wrong("sub", "is not a text of 1 to 256 bytes"));
        }
        let tenant = claims.tenant.as_ref().and_then(Value::as_str).unwrap_or_default();
        if !is_tenant(tenant) {
            return Err(wrong("tenant", "is not the name of a tenant"));
        }
        let scopes = scopes(claims.scope)
            .ok_or(wrong("scope", "is not a text with at most 64 scopes separated by spaces"))?;
        let caller =
            Caller { subject: format!("jwt:{subject}"), tenant: tenant.to_owned(), scopes };
        Ok(JwtCaller { caller, expires_at })
    }
}

/// The claims of a token that one of these keys has signed.
fn verified(token: &str, keys: &[Arc<VerifyingKey>]) -> Option<Claims> {
    keys.iter().find_map(|key| {
        let mut validation = Validation::new(key.algorithm);
        // The claims are checked later, so that each mistake has its own error.
        validation.validate_exp = false;
        validation.validate_aud = false;
        validation.required_spec_claims.clear();
        let read = jsonwebtoken::decode::<Claims>(token, &key.key, &validation);
        read.ok().map(|read| read.claims)
    })
}

/// A `NumericDate`: seconds since 1970, perhaps with a fraction.
fn time(value: Option<Value>) -> Option<DateTime<Utc>> {
    let seconds = value?.as_f64().filter(|seconds| (0.0..=253_402_300_799.0).contains(seconds))?;
    #[expect(clippy::cast_possible_truncation, reason = "a fraction of a second does not count")]
    DateTime::from_timestamp(seconds as i64, 0)
}

/// The scopes of this service among those of the claim; some providers write them as a list.
fn scopes(claim: Option<Value>) -> Option<Vec<String>> {
    let written: Vec<String> = match claim {
        None => Vec::new(),
        Some(Value::String(text)) => text.split_ascii_whitespace().map(str::to_owned).collect(),
        Some(Value::Array(several)) => several
            .into_iter()
            .map(|scope| scope.as_str().map(str::to_owned))
            .collect::<Option<_>>()?,
        Some(_) => return None,
    };
    let mut known: Vec<String> = written.into_iter().filter(|scope| is_scope(scope)).collect();
    known.sort_unstable();
    known.dedup();
    (known.len() <= MAX_SCOPES).then_some(known)
}
