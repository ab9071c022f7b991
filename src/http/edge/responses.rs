//! Security headers and gzip compression of responses.
//!
//! What is the same for all clients, and needs no key, is compressed once ([`StaticText`]).
//! Handlers that serve pages set their own Content-Security-Policy and Cache-Control; all other
//! responses are data that a browser must not render, frame or store. Streams are not compressed,
//! because an encoder would hold events back.

use std::convert::Infallible;
use std::future::ready;
use std::io::{self, Write as _};
use std::sync::OnceLock;

use axum::body::{Body, Bytes, HttpBody};
use axum::http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_SECURITY_POLICY, CONTENT_TYPE,
    REFERRER_POLICY, VARY, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Request};
use axum::response::{IntoResponse as _, Response};
use flate2::write::GzEncoder;
use tower::ServiceExt;
use tower_http::CompressionLevel;
use tower_http::compression::Compression;
use uuid::Uuid;

/// Set on every response to an invocation.
pub(crate) const X_RUN_ID: HeaderName = HeaderName::from_static("x-run-id");

pub(crate) fn run_id_header(run_id: Uuid) -> HeaderValue {
    let mut buffer = Uuid::encode_buffer();
    let text: &str = run_id.hyphenated().encode_lower(&mut buffer);
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static(""))
}

/// Smaller responses are not compressed, in bytes.
const WORTH_COMPRESSING: u64 = 1024;

static PROTECTION: [(HeaderName, HeaderValue); 6] = [
    (X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
    (CACHE_CONTROL, HeaderValue::from_static("no-store")),
    (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    (X_FRAME_OPTIONS, HeaderValue::from_static("DENY")),
    (
        CONTENT_SECURITY_POLICY,
        HeaderValue::from_static("default-src 'none'; frame-ancestors 'none'"),
    ),
    (
        HeaderName::from_static("cross-origin-resource-policy"),
        HeaderValue::from_static("same-origin"),
    ),
];

/// Adds the security headers that the handler has not set itself.
pub(crate) fn protect(headers: &mut HeaderMap) {
    headers.reserve(PROTECTION.len());
    for (name, value) in &PROTECTION {
        headers.entry(name).or_insert_with(|| value.clone());
    }
}

/// A text, and its compressed form if that is shorter, which is made when it is first asked for.
pub(crate) struct StaticText {
    plain: Bytes,
    gzip: OnceLock<Option<Bytes>>,
}

impl StaticText {
    pub(crate) fn new(plain: Bytes) -> Self {
        Self { plain, gzip: OnceLock::new() }
    }

    /// The form that a client with these headers accepts, without its media type.
    pub(crate) fn answer(&self, asked: &HeaderMap) -> Response {
        match accepts_gzip(asked).then(|| self.gzip()).flatten() {
            Some(gzip) => {
                let headers = [(CONTENT_ENCODING, "gzip"), (VARY, "accept-encoding")];
                (headers, gzip).into_response()
            }
            None => self.plain.clone().into_response(),
        }
    }

    fn gzip(&self) -> Option<Bytes> {
        let shorter = || gzipped(&self.plain).ok().filter(|gzip| gzip.len() < self.plain.len());
        self.gzip.get_or_init(|| shorter().map(Bytes::from)).clone()
    }
}

fn gzipped(plain: &[u8]) -> io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(plain)?;
    encoder.finish()
}

/// Evaluates `Accept-Encoding` (RFC 9110, section 12.5.3).
pub(crate) fn accepts_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(ACCEPT_ENCODING).iter().filter_map(|value| value.to_str().ok());
    let mut any = false;
    for coding in values.flat_map(|value| value.split(',')) {
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let wanted = !parts
            .any(|p| p.strip_prefix("q=").is_some_and(|q| q.parse().is_ok_and(|q: f32| q <= 0.0)));
        if name.eq_ignore_ascii_case("gzip") {
            return wanted;
        }
        any |= name == "*" && wanted;
    }
    any
}

/// Compresses a response that is complete, large enough and not yet compressed, if the client
/// accepts gzip.
pub(crate) async fn compress(mut response: Response, accepted: bool) -> Response {
    let streamed = response.body().size_hint().exact().is_none_or(|size| size < WORTH_COMPRESSING);
    if streamed || response.headers().contains_key(CONTENT_ENCODING) || !is_text(response.headers())
    {
        return response;
    }
    if !accepted {
        response.headers_mut().append(VARY, HeaderValue::from_static("accept-encoding"));
        return response;
    }
    let answered = tower::service_fn(move |_: Request<()>| {
        ready(Ok::<_, Infallible>(std::mem::take(&mut response)))
    });
    let mut asked = Request::new(());
    asked.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("gzip"));
    match Compression::new(answered).quality(CompressionLevel::Fastest).oneshot(asked).await {
        Ok(compressed) => compressed.map(Body::new),
        Err(never) => match never {},
    }
}

/// Whether the media type is compressible.
fn is_text(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.starts_with("application/") || kind.starts_with("text/") || kind.starts_with("image/svg")
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;

    use super::*;

    #[test]
    fn gzip_depends_on_accept_encoding() {
        for (given, expected) in [
            ("gzip", true),
            ("GZIP", true),
            ("br, gzip;q=0.5", true),
            ("*", true),
            ("gzip;q=0, *", false),
            ("gzip; q=0.000", false),
            ("identity;q=0", false),
            ("*;q=0", false),
            ("br", false),
            ("gzipped", false),
            ("", false),
        ] {
            let headers =
                HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static(given))]);
            assert_eq!(accepts_gzip(&headers), expected, "{given:?}");
        }
        assert!(!accepts_gzip(&HeaderMap::new()));
    }

    fn response(kind: &'static str, body: Body) -> Response {
        let mut response = Response::new(body);
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
        response
    }

    #[tokio::test]
    async fn only_large_complete_text_is_compressed() {
        let large = || Body::from("a".repeat(2000));
        let endless = Body::from_stream(futures::stream::pending::<Result<String, Infallible>>());
        for (kind, body, worth) in [
            ("application/json", large(), true),
            ("text/html; charset=utf-8", large(), true),
            ("application/json", Body::from("a".repeat(1000)), false),
            ("text/event-stream", endless, false),
            ("image/png", large(), false),
        ] {
            let answer = compress(response(kind, body), true).await;
            assert_eq!(
                answer.headers().get(CONTENT_ENCODING).is_some_and(|e| e == "gzip"),
                worth,
                "{kind}"
            );
            assert_eq!(
                answer.headers().get(VARY).is_some_and(|v| v == "accept-encoding"),
                worth,
                "{kind}"
            );
        }
        let plain = compress(response("application/json", large()), false).await;
        assert_eq!(plain.headers()[VARY], "accept-encoding");
        assert!(!plain.headers().contains_key(CONTENT_ENCODING));
        assert_eq!(to_bytes(plain.into_body(), 4000).await.unwrap().len(), 2000);
    }

    #[tokio::test]
    async fn a_static_text_is_compressed_for_those_who_accept_that() {
        let gzip = HeaderMap::from_iter([(ACCEPT_ENCODING, HeaderValue::from_static("gzip"))]);
        let (long, short) = ("a".repeat(2000), "a".to_owned());
        for (text, asked, is_packed) in
            [(&long, &gzip, true), (&long, &HeaderMap::new(), false), (&short, &gzip, false)]
        {
            let answer = StaticText::new(text.clone().into()).answer(asked);
            assert_eq!(answer.headers().contains_key(CONTENT_ENCODING), is_packed);
            assert_eq!(answer.headers().contains_key(VARY), is_packed, "else added by `compress`");
            let bytes = to_bytes(answer.into_body(), 4000).await.unwrap();
            assert_eq!(bytes == text.as_bytes(), !is_packed);
        }
    }

    #[test]
    fn a_handler_has_the_last_word_on_its_headers() {
        let mut headers =
            HeaderMap::from_iter([(CACHE_CONTROL, HeaderValue::from_static("max-age=60"))]);
        protect(&mut headers);
        assert_eq!(headers[CACHE_CONTROL], "max-age=60");
        assert_eq!(headers[X_CONTENT_TYPE_OPTIONS], "nosniff");
        assert_eq!(headers.len(), PROTECTION.len());
    }
}
