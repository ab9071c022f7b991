//! The request headers of an invocation.
//!
//! `Accept`, `Prefer` (RFC 7240), `Idempotency-Key` (draft-ietf-httpapi-idempotency-key-header),
//! `X-Cancel-On-Disconnect` and `traceparent` (W3C Trace Context). The body is read by
//! [`super::invocation`].

use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use tokio::time::Instant;
use utoipa::IntoParams;
use utoipa::openapi::path::{Parameter, ParameterBuilder, ParameterIn};
use utoipa::openapi::schema::{ObjectBuilder, Type};

use crate::http::edge::accept::MediaType;
use crate::http::edge::layer::Deadline;
use crate::http::edge::problem::{Code, Problem};
use crate::http::state::App;
use crate::message::canonical_json;
use crate::run::is_traceparent;
use crate::runtime::Mode;
use crate::store::Idempotency;

const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");
const PREFER: HeaderName = HeaderName::from_static("prefer");
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
const X_CANCEL_ON_DISCONNECT: HeaderName = HeaderName::from_static("x-cancel-on-disconnect");

/// How the outcome of an invocation is delivered, and what a retry or a disconnect means.
#[derive(Debug)]
pub(crate) struct InvocationHeaders {
    media: MediaType,
    preference: Preference,
    pub(crate) cancel_on_disconnect: bool,
    /// The header's value; `None` if it is malformed.
    pub(crate) traceparent: Option<String>,
    idempotency_key: Option<String>,
    deadline: Instant,
}

/// The preferences in `Prefer`; unknown ones are ignored.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Preference {
    /// Respond immediately, or after `wait` at the latest.
    pub(crate) respond_async: bool,
    pub(crate) wait: Option<Duration>,
}

/// As [`InvocationHeaders`], for a route that answers events whatever `Accept` says.
pub(crate) struct Streaming(pub(crate) InvocationHeaders);

impl FromRequestParts<App> for Streaming {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        InvocationHeaders::read(parts, app, MediaType::EventStream).await.map(Self)
    }
}

impl FromRequestParts<App> for InvocationHeaders {
    type Rejection = Problem;

    async fn from_request_parts(parts: &mut Parts, app: &App) -> Result<Self, Problem> {
        let media = MediaType::from_request_parts(parts, app).await?;
        Self::read(parts, app, media).await
    }
}

impl InvocationHeaders {
    async fn read(parts: &mut Parts, app: &App, media: MediaType) -> Result<Self, Problem> {
        Ok(Self {
            media,
            preference: preference(&parts.headers),
            cancel_on_disconnect: cancel_on_disconnect(&parts.headers)?,
            traceparent: text(&parts.headers, &TRACEPARENT)
                .filter(|value| is_traceparent(value))
                .map(str::to_owned),
            idempotency_key: idempotency_key(&parts.headers)?,
            deadline: Deadline::from_request_parts(parts, app).await?.0,
        })
    }
}

impl InvocationHeaders {
    pub(crate) fn wants_events(&self) -> bool {
        self.media == MediaType::EventStream
    }

    /// Whether the client accepts a 202 before the run has ended.
    pub(crate) fn takes_accepted(&self) -> bool {
        self.preference != Preference::default()
    }

    pub(crate) fn mode(&self) -> Mode {
        match self.preference {
            Preference { respond_async: true, wait: None } => Mode::Queued,
            // A run that is acknowledged before its end must be stored first.
            _ if self.wants_events() => Mode::Followed,
            _ if self.takes_accepted() => Mode::Stored,
            Preference { .. } => Mode::Now,
        }
    }

    /// Until when to wait for the outcome.
    pub(crate) fn until(&self) -> Instant {
        match self.preference {
            Preference { wait: Some(wait), .. } => self.deadline.min(Instant::now() + wait),
            Preference { respond_async: true, .. } => Instant::now(),
            Preference { .. } => self.deadline,
        }
    }

    /// The idempotency key, and the hash of the request that it must be used with.
    pub(crate) fn idempotency(
        &self,
        route: &str,
        agent: &str,
        body: &Map<String, Value>,
        files: &Value,
    ) -> Option<Idempotency> {
        let key = self.idempotency_key.clone()?;
        // Null in a field of the request is its absence.
        let given = body.iter().filter(|(_, value)| !value.is_null());
        let given = given.map(|(field, value)| (field.clone(), value.clone())).collect();
        let mut request = format!("{route}\0{agent}\0{}", canonical_json(Value::Object(given)));
        if !files.is_null() {
            request = format!("{request}\0{files}");
        }
        Some(Idempotency { key, request_hash: hex::encode(Sha256::digest(request)) })
    }
}

impl IntoParams for InvocationHeaders {
    fn into_params(_: impl Fn() -> Option<ParameterIn>) -> Vec<Parameter> {
        let text = || ObjectBuilder::new().schema_type(Type::String);
        let key = text().min_length(Some(1)).max_length(Some(255));
        let header = |name, description, schema: ObjectBuilder| {
            let header = ParameterBuilder::new().name(name).parameter_in(ParameterIn::Header);
            header.description(Some(description)).schema(Some(schema)).build()
        };
        vec![
            header(
                "Prefer",
                "`respond-async` queues the run and responds 202 at once; `wait=N` responds 202 if the run has \
                 not ended after N seconds.",
                text(),
            ),
            header(
                "Idempotency-Key",
                "Makes the request idempotent: for 24 hours, a retry with the same key returns the same run.",
                key,
            ),
            header(
                "X-Cancel-On-Disconnect",
                "Cancels the run if the client disconnects before the response is complete.",
                ObjectBuilder::new().schema_type(Type::Boolean),
            ),
            header(
                "traceparent",
                "W3C Trace Context; the run's spans become part of this trace.",
                text(),
            ),
        ]
    }
}

fn text<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Option<&'h str> {
    headers.get(name)?.to_str().ok()
}

fn preference(headers: &HeaderMap) -> Preference {
    let mut preference = Preference::default();
    let values = headers.get_all(PREFER).iter().filter_map(|value| value.to_str().ok());
    for stated in values.flat_map(|value| value.split(',')) {
        let stated = stated.split(';').next().unwrap_or_default();
        let (name, value) = stated.split_once('=').unwrap_or((stated, ""));
        let value = value.trim().trim_matches('"');
        match name.trim().to_ascii_lowercase().as_str() {
            "respond-async" => preference.respond_async = true,
            "wait" => {
                let seconds = value.parse().ok();
                preference.wait = preference
                    .wait
                    .or(seconds.map(|seconds: u32| Duration::from_secs(seconds.into())));
            }
            _ => {}
        }
    }
    preference
}

/// Any other value, and a second one, is rejected: ignoring it would leave a run behind that the client believes
/// to be cancelled.
fn cancel_on_disconnect(headers: &HeaderMap) -> Result<bool, Problem> {
    let mut given = headers.get_all(X_CANCEL_ON_DISCONNECT).iter();
    let Some(value) = given.next() else { return Ok(false) };
    let value = value.to_str().unwrap_or_default().trim().to_ascii_lowercase();
    match (value.as_str(), given.next()) {
        ("true", None) => Ok(true),
        ("false", None) => Ok(false),
        _ => Err(Problem::new(
            Code::InvalidParameter,
            "The header X-Cancel-On-Disconnect must be `true` or `false`, and given once.",
        )),
    }
}

/// A structured-field string or a bare value: 1 to 255 visible ASCII characters.
fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, Problem> {
    let refused = |why: &str| {
        Err(Problem::new(Code::InvalidParameter, format!("The header Idempotency-Key {why}.")))
    };
    let mut given = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(value) = given.next() else { return Ok(None) };
    if given.next().is_some() {
        return refused("is given more than once");
    }
    let text = value.to_str().unwrap_or_default().trim();
    let key = match text.strip_prefix('"') {
        Some(rest) => {
            rest.strip_suffix('"').map(|inner| inner.replace("\\\"", "\"").replace("\\\\", "\\"))
        }
        None => Some(text.to_owned()),
    };
    match key.filter(|key| {
        (1..=255).contains(&key.len()) && key.bytes().all(|b| matches!(b, b' '..=b'~'))
    }) {
        Some(key) => Ok(Some(key)),
        None => refused("must be 1 to 255 visible ASCII characters, quoted or bare"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(name: &'static str, values: &[&str]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for value in values {
            headers.append(name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn prefer_headers_are_parsed_and_unknown_preferences_ignored() {
        let wait = |seconds| Some(Duration::from_secs(seconds));
        for (values, respond_async, waits) in [
            (&["respond-async"][..], true, None),
            (&["Respond-Async, wait=10"], true, wait(10)),
            (&["wait=10"], false, wait(10)),
            (&["wait=\"7\""], false, wait(7)),
            (&["return=minimal", "WAIT = 3; foo"], false, wait(3)),
            (&["wait=1, wait=9"], false, wait(1)),
            (&["wait=soon"], false, None),
            (&["wait=-1", "respond-asynchronously"], false, None),
        ] {
            let expected = Preference { respond_async, wait: waits };
            assert_eq!(preference(&headers("prefer", values)), expected, "{values:?}");
        }
    }

    #[test]
    fn cancel_on_disconnect_is_true_or_false() {
        let read =
            |value| cancel_on_disconnect(&headers("x-cancel-on-disconnect", value)).map_err(|_| ());
        for (value, expected) in [
            (&[][..], Ok(false)),
            (&["true"], Ok(true)),
            (&[" TRUE "], Ok(true)),
            (&["false"], Ok(false)),
            (&["1"], Err(())),
            (&["yes"], Err(())),
            (&[""], Err(())),
            (&["false", "true"], Err(())),
        ] {
            assert_eq!(read(value), expected, "{value:?}");
        }
    }

    #[test]
    fn idempotency_keys_are_quoted_or_bare() {
        let read =
            |values: &[&str]| idempotency_key(&headers("idempotency-key", values)).map_err(|_| ());
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&["abc-1"]), Ok(Some("abc-1".into())));
        assert_eq!(read(&["\"abc-1\""]), Ok(Some("abc-1".into())));
        assert_eq!(read(&[r#""a \"b\" \\""#]), Ok(Some(r#"a "b" \"#.into())));
        assert_eq!(read(&[&"k".repeat(255)]), Ok(Some("k".repeat(255))));
        for refused in [&[""][..], &["\"\""], &["\"open"], &["a", "b"], &[&"k".repeat(256)]] {
            assert_eq!(read(refused), Err(()), "{refused:?}");
        }
        let mut raw = HeaderMap::new();
        raw.insert(IDEMPOTENCY_KEY, axum::http::HeaderValue::from_bytes(b"\xff\xfe").unwrap());
        assert!(idempotency_key(&raw).is_err());
    }

    #[test]
    fn canonical_json_ignores_only_the_order_of_keys() {
        let canonical = |json: &str| canonical_json(serde_json::from_str(json).unwrap());
        assert_eq!(
            canonical(r#"{"a":{"x":1,"y":[{"p":1,"q":2}]},"b":2}"#),
            canonical(r#"{"b":2,"a":{"y":[{"q":2,"p":1}],"x":1}}"#)
        );
        let texts = [
            r#"{"a":[1,2]}"#,
            r#"{"a":[2,1]}"#,
            r#"{"a":[[1],2]}"#,
            r#"{"a":"1"}"#,
            r#"{"a":1}"#,
            r#"{"a":1.0}"#,
            "{}",
        ];
        let distinct: std::collections::BTreeSet<String> =
            texts.iter().map(|text| canonical(text)).collect();
        assert_eq!(distinct.len(), texts.len());
    }
}
