//! Who may invoke now: the scope, then a token from the bucket of the caller's key.
//!
//! The token is taken before the body is read, so a call that is refused for another reason has
//! used it up. How the bucket stands is told on every answer of the request, whatever the answer
//! is, in the two headers of draft-ietf-httpapi-ratelimit-headers-10. How tokens are shared between
//! replicas is the runtime's business.

use std::ops::Deref;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};

use super::auth::{AgentsInvoke, Identity};
use super::problem::Problem;
use crate::http::state::App;
use crate::run::Caller;
use crate::runtime::Allowance;
use crate::store::{ApiKeyRecord, RateLimit};

/// What the limit is: `"default";q=<burst>;w=<seconds in which it comes back>`.
pub(crate) const POLICY: HeaderName = HeaderName::from_static("ratelimit-policy");
/// How much of it is left: `"default";r=<tokens>;t=<seconds until all are back>`.
pub(crate) const LEFT: HeaderName = HeaderName::from_static("ratelimit");

/// A caller that may invoke an agent now: scope `agents:invoke`, and a token of the key's bucket.
pub(crate) struct Admitted(Arc<Caller>);

impl Deref for Admitted {
    type Target = Arc<Caller>;

    fn deref(&self) -> &Arc<Caller> {
        &self.0
    }
}

impl FromRequestParts<App> for Admitted {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let Identity { caller, key } = Identity::with::<AgentsInvoke>(parts, app).await?;
        // Without authentication everybody is at home on this machine, where nobody is limited.
        let Some(key) = key else { return Ok(Self(caller)) };
        let limit = limit_of(&key, app.settings.rate_limit);
        let allowance = app.runtime.admit_invocation(&key.id, limit).await?;
        if let Some(standing) = parts.extensions.get::<Standing>() {
            standing.set(limit, &allowance);
        }
        match allowance.retry_after {
            None => Ok(Self(caller)),
            Some(wait) => Err(Problem::rate_limited(seconds(wait).max(1))),
        }
    }
}

/// The key's own limits; for what it does not say, the service's.
fn limit_of(key: &ApiKeyRecord, default: RateLimit) -> RateLimit {
    RateLimit {
        per_minute: key.rate_limit_per_minute.unwrap_or(default.per_minute),
        burst: key.rate_limit_burst.unwrap_or(default.burst),
    }
}

/// How the bucket of a request stands; the edge puts it on the answer.
#[derive(Debug, Clone, Default)]
pub(crate) struct Standing(Arc<OnceLock<[(HeaderName, HeaderValue); 2]>>);

impl Standing {
    fn set(&self, limit: RateLimit, allowance: &Allowance) {
        let value =
            |text: String| HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""));
        let policy = format!("\"default\";q={};w={}", limit.burst, seconds(limit.refill()).max(1));
        let left = format!("\"default\";r={};t={}", allowance.remaining, seconds(allowance.reset));
        // A request takes one token, so this is set once.
        let _ = self.0.set([(POLICY, value(policy)), (LEFT, value(left))]);
    }

    /// Adds the headers, if a bucket was asked.
    pub(crate) fn tell(&self, answer: &mut HeaderMap) {
        answer.extend(self.0.get().cloned().into_iter().flatten());
    }
}

/// Whole seconds after which a wait is certainly over.
fn seconds(wait: Duration) -> u64 {
    wait.as_secs() + u64::from(wait.subsec_nanos() > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(limit: RateLimit, allowance: Allowance) -> (String, String) {
        let standing = Standing::default();
        standing.set(limit, &allowance);
        let mut headers = HeaderMap::new();
        standing.tell(&mut headers);
        let text = |name: HeaderName| headers[name].to_str().unwrap().to_owned();
        (text(POLICY), text(LEFT))
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
            let told = told(RateLimit { per_minute, burst }, allowance);
            assert_eq!((told.0.as_str(), told.1.as_str()), (policy, left));
        }
    }

    #[test]
    fn nothing_is_told_where_no_bucket_was_asked() {
        let mut headers = HeaderMap::new();
        Standing::default().tell(&mut headers);
        assert!(headers.is_empty());
    }
}
