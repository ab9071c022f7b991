//! Admission of invocations: the scope, then a token from the caller's token bucket.
//!
//! The token is taken before the body is read, so that a request that is rejected for another reason
//! has consumed it. Every response to a rate-limited request has the two headers of
//! draft-ietf-httpapi-ratelimit-headers-10. How replicas share a bucket is decided by the runtime.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};

use super::auth::{AgentsInvoke, Credential, Identity};
use super::problem::Problem;
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::Allowance;
use crate::store::{ApiKeyRecord, RateLimit};

/// `"default";q=<burst>;w=<seconds to refill the bucket>`.
pub(crate) const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// `"default";r=<remaining tokens>;t=<seconds until the bucket is full>`.
pub(crate) const REMAINING: HeaderName = HeaderName::from_static("ratelimit");

/// A caller with the scope `agents:invoke` that has taken a token from its bucket.
pub(crate) struct Admitted {
    caller: Arc<Caller>,
    pub(crate) credential: Credential,
}

impl Deref for Admitted {
    type Target = Arc<Caller>;

    fn deref(&self) -> &Arc<Caller> {
        &self.caller
    }
}

impl FromRequestParts<App> for Admitted {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Identity { caller, credential } = Identity::with::<AgentsInvoke>(parts, app).await?;
        // auth.mode = none is loopback only and has no rate limit.
        if !app.auth.is_required() {
            return Ok(Self { caller, credential });
        }
        let default = app.settings.rate_limit;
        let limit = credential.key.as_ref().map_or(default, |key| limit_of(key, default));
        let allowance = app.runtime.rate_limits().admit_invocation(&caller.subject, limit).await?;
        if let Some(headers) = parts.extensions.get::<RateLimitHeaders>() {
            headers.set(limit, &allowance);
        }
        match allowance.retry_after {
            None => Ok(Self { caller, credential }),
            Some(wait) => Err(Problem::rate_limited(limit, seconds(wait).max(1))),
        }
    }
}

/// The key's own limits, with the service's defaults for those that are unset.
fn limit_of(key: &ApiKeyRecord, default: RateLimit) -> RateLimit {
    default.of_key(key.rate_limit_per_minute, key.rate_limit_burst)
}

/// The rate limit headers of a request's response. The extractor sets them; the middleware adds
/// them to the response.
#[derive(Debug, Clone, Default)]
pub(crate) struct RateLimitHeaders(Arc<OnceLock<[(HeaderName, HeaderValue); 2]>>);

impl RateLimitHeaders {
    fn set(&self, limit: RateLimit, allowance: &Allowance) {
        let value =
            |text: String| HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""));
        let policy = format!("\"default\";q={};w={}", limit.burst, seconds(limit.refill()).max(1));
        let remaining =
            format!("\"default\";r={};t={}", allowance.remaining, seconds(allowance.reset));
        // A request takes one token, so that this is set at most once.
        let _ = self.0.set([(POLICY, value(policy)), (REMAINING, value(remaining))]);
    }

    /// Adds the headers, if the request was rate-limited.
    pub(crate) fn apply_to(&self, response: &mut HeaderMap) {
        response.extend(self.0.get().cloned().into_iter().flatten());
    }
}

/// Rounds up to whole seconds.
fn seconds(wait: Duration) -> u64 {
    wait.as_secs() + u64::from(wait.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(limit: RateLimit, allowance: Allowance) -> (String, String) {
        let set = RateLimitHeaders::default();
        set.set(limit, &allowance);
        let mut headers = HeaderMap::new();
        set.apply_to(&mut headers);
        let text = |name: HeaderName| headers[name].to_str().unwrap().to_owned();
        (text(POLICY), text(REMAINING))
    }

    #[test]
    fn headers_are_structured_fields_in_whole_seconds() {
        let millis = Duration::from_millis;
        for (per_minute, burst, remaining, reset, policy, left) in [
            (60, 10, 9, millis(1000), r#""default";q=10;w=10"#, r#""default";r=9;t=1"#),
            (60, 10, 0, millis(9001), r#""default";q=10;w=10"#, r#""default";r=0;t=10"#),
            (7, 2, 1, millis(0), r#""default";q=2;w=18"#, r#""default";r=1;t=0"#),
            (6000, 1, 0, millis(3), r#""default";q=1;w=1"#, r#""default";r=0;t=1"#),
        ] {
            let allowance = Allowance { retry_after: None, remaining, reset };
            let headers = headers(RateLimit { per_minute, burst }, allowance);
            assert_eq!((headers.0.as_str(), headers.1.as_str()), (policy, left));
        }
    }

    #[test]
    fn a_request_without_a_limit_gets_no_headers() {
        let mut headers = HeaderMap::new();
        RateLimitHeaders::default().apply_to(&mut headers);
        assert!(headers.is_empty());
    }
}
