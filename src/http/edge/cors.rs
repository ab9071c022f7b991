//! Cross-origin requests of browsers (WHATWG Fetch), from the origins that the operator lists.
//!
//! Preflight requests of those origins are answered here, before any route and without a key; other
//! responses to them name the origin and the headers that its scripts may read. Credentials of the
//! browser are never asked for: a key is sent as a bearer token by the script. An origin that is not
//! listed gets no such header, so that its browser keeps the answer from it.

use std::sync::Arc;

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN,
    VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::response::{IntoResponse, Response};

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST, PUT, DELETE");
/// The headers that a script may send.
const REQUEST_HEADERS: HeaderValue = HeaderValue::from_static(
    "authorization, content-type, accept, idempotency-key, prefer, last-event-id, if-match, if-none-match, \
     if-range, range, traceparent, x-cancel-on-disconnect, x-request-id",
);
/// The response headers that a script may read, beside those that it always may.
const EXPOSED_HEADERS: HeaderValue = HeaderValue::from_static(
    "x-run-id, x-request-id, location, etag, retry-after, ratelimit, ratelimit-policy, preference-applied, \
     idempotency-replayed, accept-ranges, content-range, content-disposition",
);
/// How long a browser remembers the answer to a preflight, in seconds.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// The origins whose pages may use the API.
#[derive(Debug, Clone, Default)]
pub struct CorsOrigins(Arc<[String]>);

impl CorsOrigins {
    /// Origins as browsers write them.
    pub fn new(origins: &[String]) -> Self {
        Self(origins.into())
    }

    /// Whether the request names exactly one origin, and that is listed.
    pub(super) fn allows<'h>(&self, headers: &'h HeaderMap) -> Option<&'h HeaderValue> {
        let mut named = headers.get_all(ORIGIN).iter();
        let (Some(origin), None) = (named.next(), named.next()) else { return None };
        let text = origin.to_str().ok()?;
        self.0.iter().any(|listed| listed == text).then_some(origin)
    }

    /// The answer to a preflight request of a listed origin.
    pub(super) fn preflight(&self, method: &Method, headers: &HeaderMap) -> Option<Response> {
        if method != Method::OPTIONS || !headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
            return None;
        }
        self.allows(headers)?;
        let answer = [
            (ACCESS_CONTROL_ALLOW_METHODS, METHODS),
            (ACCESS_CONTROL_ALLOW_HEADERS, REQUEST_HEADERS),
            (ACCESS_CONTROL_MAX_AGE, MAX_AGE),
        ];
        Some((StatusCode::NO_CONTENT, answer, Body::empty()).into_response())
    }

    /// Adds what lets a listed origin's script read the response.
    pub(super) fn share(&self, origin: Option<HeaderValue>, headers: &mut HeaderMap) {
        if self.0.is_empty() {
            return;
        }
        headers.append(VARY, HeaderValue::from_static("origin"));
        if let Some(origin) = origin {
            headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            headers.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED_HEADERS);
        }
    }
}
