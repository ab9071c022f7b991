//! HTTP for all model servers: a JSON body goes out, an answer comes back in one piece or as a
//! stream of frames.
//!
//! Responsible for keys and headers, size limits (2 MiB an answer, 16 MiB a stream), timeouts while
//! an answer streams, and transport errors. A dialect interprets bodies and frames; the router has
//! the timeout of the whole call and retries. Error messages never hold a key or a configured
//! header's value.

use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use chrono::Utc;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use reqwest::{Client, Response, redirect, retry};
use secrecy::{ExposeSecret, SecretString};
use serde::de::IgnoredAny;
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::failure::{self, Reported};
use super::normalization::Unusable;
use super::{FailureKind, ProviderError};
use crate::bounds::address::is_loopback;
use crate::bounds::frames::{Frame, Framing, Splitter};
use crate::bounds::json;
use crate::bounds::memory::MemoryPatience;
use crate::bounds::retry_after::retry_after;
use crate::run::TraceSpan;
use crate::tls;

/// W3C Trace Context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// Largest streamed answer that is read, in bytes, framing included.
const MAX_STREAM: usize = 16 << 20;
/// Largest answer in one piece that is read, in bytes.
pub(super) const MAX_ANSWER: usize = 2 << 20;
/// Largest frame of a streamed answer, in bytes: some servers send a whole answer in one.
pub(super) const MAX_FRAME: usize = MAX_ANSWER;
/// Largest error body that is read, in bytes; the rest is ignored.
const MAX_ERROR: usize = 64 << 10;

/// Bytes of an answer that are read however scarce memory is.
const SMALL: usize = 256 << 10;

/// The address, credentials and timeouts of a model server.
pub struct WireSettings {
    /// The provider's name in our configuration.
    pub name: String,
    /// The API's paths are appended to it, e.g. `https://api.openai.com/v1`; a query is kept.
    pub base_url: Url,
    /// Absent if the server needs none.
    pub api_key: Option<SecretString>,
    /// The environment variable that should hold the key, if it is not set.
    pub missing_key: Option<String>,
    /// Sent with every request; their values are treated as secrets.
    pub headers: Vec<(String, String)>,
    /// For TCP and TLS together.
    pub connect_timeout: Duration,
    /// From the request to the first byte of a streamed answer. Only the timeout of the whole call
    /// limits an answer in one piece.
    pub first_byte_timeout: Duration,
    /// Between two chunks of an answer.
    pub idle_timeout: Duration,
}

/// Invalid settings of a model server.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WireSettingsError {
    #[error("base_url is not an http or https URL")]
    BaseUrl,
    #[error("the API key holds characters that cannot be sent")]
    ApiKey,
    #[error("the header {0:?} cannot be sent")]
    Header(String),
    #[error("no HTTP client: {0}")]
    Client(String),
}

/// The constants of one API.
pub(super) struct Api {
    /// Segments below the base URL.
    pub(super) path: &'static [&'static str],
    pub(super) key: KeyHeader,
    /// Sent with every request, unless the settings have a header of the same name.
    pub(super) headers: &'static [(&'static str, &'static str)],
    pub(super) framing: Framing,
}

/// The header that carries the key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyHeader {
    /// `Authorization: Bearer …`
    Bearer,
    /// `x-api-key: …`
    XApiKey,
}

/// One API of one server, with its connection pool.
pub(super) struct Wire {
    name: String,
    endpoint: Url,
    client: Client,
    framing: Framing,
    first_byte_timeout: Duration,
    idle_timeout: Duration,
    secrets: Vec<SecretString>,
    missing_key: Option<String>,
}

/// A successful answer to a request for a stream.
#[expect(clippy::large_enum_variant, reason = "made once a call, and taken apart at once")]
pub(super) enum Streamed<'a> {
    Frames(Frames<'a>),
    /// A JSON object: the server does not stream.
    Whole(Bytes),
}

impl Wire {
    /// Prepares the connection pool; nothing is sent yet.
    pub(super) fn new(settings: WireSettings, api: &Api) -> Result<Self, WireSettingsError> {
        let endpoint = endpoint(settings.base_url, api.path)?;
        let mut headers =
            HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        for (name, value) in api.headers {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let mut secrets = Vec::new();
        if let Some(key) = settings.api_key.filter(|key| !key.expose_secret().is_empty()) {
            let (header, value) = match api.key {
                KeyHeader::Bearer => (AUTHORIZATION, format!("Bearer {}", key.expose_secret())),
                KeyHeader::XApiKey => {
                    (HeaderName::from_static("x-api-key"), key.expose_secret().to_owned())
                }
            };
            headers.insert(header, sensitive(&value).ok_or(WireSettingsError::ApiKey)?);
            secrets.push(key);
        }
        for (name, value) in settings.headers {
            let header = HeaderName::try_from(&name).ok().zip(sensitive(&value));
            let (header, sendable) = header.ok_or(WireSettingsError::Header(name))?;
            headers.insert(header, sendable);
            secrets.push(value.into());
        }
        let unusable = |error: &dyn std::fmt::Display| WireSettingsError::Client(error.to_string());
        let mut client = tls::http_client()
            .map_err(|error| unusable(&error))?
            .default_headers(headers)
            .connect_timeout(settings.connect_timeout)
            .pool_max_idle_per_host(2048)
            .tcp_nodelay(true)
            .redirect(redirect::Policy::none())
            .retry(retry::never());
        if is_loopback(&endpoint) {
            client = client.no_proxy();
        }
        let client = client.build().map_err(|error| unusable(&error))?;
        Ok(Self {
            name: settings.name,
            endpoint,
            client,
            framing: api.framing,
            first_byte_timeout: settings.first_byte_timeout,
            idle_timeout: settings.idle_timeout,
            secrets,
            missing_key: settings.missing_key,
        })
    }

    /// The provider's name in our configuration.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Sends a body and reads the whole answer.
    pub(super) async fn json(
        &self,
        body: Vec<u8>,
        trace: Option<TraceSpan>,
    ) -> Result<Bytes, ProviderError> {
        let response = self.send(body, trace).await?;
        self.reader(response).rest(Vec::new()).await
    }

    /// Sends a body and starts to read the streamed answer.
    pub(super) async fn stream(
        &self,
        body: Vec<u8>,
        trace: Option<TraceSpan>,
    ) -> Result<Streamed<'_>, ProviderError> {
        let deadline = Instant::now() + self.first_byte_timeout;
        let silent = |_| self.timed_out(self.first_byte_timeout);
        let response = timeout_at(deadline, self.send(body, trace)).await.map_err(silent)??;
        let mut reader = self.reader(response);
        let first =
            timeout_at(deadline, reader.chunk()).await.map_err(silent)??.unwrap_or_default();
        if self.framing == Framing::Sse && first.trim_ascii_start().starts_with(b"{") {
            return Ok(Streamed::Whole(reader.rest(first.into()).await?));
        }
        let mut splitter = Splitter::new(self.framing, MAX_FRAME);
        splitter.push(&first).map_err(|error| self.malformed(&error.to_string()))?;
        Ok(Streamed::Frames(Frames { reader, splitter }))
    }

    fn reader(&self, response: Response) -> Reader<'_> {
        Reader { wire: self, response, received: 0, patience: MemoryPatience::default() }
    }

    async fn send(
        &self,
        body: Vec<u8>,
        trace: Option<TraceSpan>,
    ) -> Result<Response, ProviderError> {
        let mut post = self.client.post(self.endpoint.clone()).body(body);
        if let Some(span) = trace {
            post = post.header(TRACEPARENT, span.to_string());
        }
        let response = post.send().await.map_err(|error| self.broken(error))?;
        match response.status() {
            status @ (StatusCode::NO_CONTENT | StatusCode::RESET_CONTENT) => {
                let error = self.error(FailureKind::Transient, "the answer has no content");
                Err(ProviderError { status: Some(status.as_u16()), ..error })
            }
            status if status.is_success() => Ok(response),
            _ => Err(self.refused(response).await),
        }
    }

    async fn refused(&self, mut response: Response) -> ProviderError {
        let status = response.status().as_u16();
        let retry_after = retry_after(response.headers(), Utc::now());
        let should_retry = failure::should_retry(response.headers());
        let mut body = Vec::new();
        let deadline = Instant::now() + self.idle_timeout;
        while let Ok(Ok(Some(chunk))) = timeout_at(deadline, response.chunk()).await {
            body.extend_from_slice(&chunk);
            if body.len() >= MAX_ERROR {
                break;
            }
        }
        let reported = Reported { status: None, ..failure::read_body(&body) };
        ProviderError { retry_after, should_retry, ..self.reported(status, &reported) }
    }

    /// An error that the server reported, with its own status if the body has one.
    pub(super) fn reported(&self, status: u16, reported: &Reported) -> ProviderError {
        let status = reported.status.unwrap_or(status);
        let kind = failure::classify(status, reported.code.as_deref(), &reported.message);
        let mut message = if reported.message.is_empty() {
            format!("HTTP {status}")
        } else {
            reported.message.clone()
        };
        if let (FailureKind::Unauthorized, Some(variable)) = (kind, &self.missing_key) {
            message = format!("{variable} is not set, so no key was sent: {message}");
        }
        ProviderError {
            status: Some(status),
            code: reported.code.as_deref().map(|code| failure::sanitised(code, &self.secrets)),
            ..self.error(kind, &message)
        }
    }

    /// The error for an unusable answer with a success status.
    pub(super) fn unusable(&self, unusable: Unusable) -> ProviderError {
        match unusable {
            Unusable::Malformed(message) => self.malformed(&message),
            Unusable::Error(reported) => self.reported(502, &reported),
        }
    }

    /// The error for an answer that does not follow the API or is incomplete; may be retried.
    pub(super) fn malformed(&self, message: &str) -> ProviderError {
        ProviderError { status: Some(200), ..self.error(FailureKind::Transient, message) }
    }

    /// The error for an answer in which the model wrote too much.
    pub(super) fn too_large(&self) -> ProviderError {
        self.larger_than("2 MiB")
    }

    fn larger_than(&self, limit: &str) -> ProviderError {
        let message = format!("the answer is larger than {limit}");
        ProviderError { status: Some(200), ..self.error(FailureKind::TooLarge, &message) }
    }

    /// An error that the server did not report.
    pub(super) fn error(&self, kind: FailureKind, message: &str) -> ProviderError {
        ProviderError {
            provider: self.name.clone(),
            kind,
            status: None,
            code: None,
            message: failure::sanitised(message, &self.secrets),
            retry_after: None,
            should_retry: None,
            usage: None,
        }
    }

    /// The error for a connection that failed before or during the answer.
    fn broken(&self, error: reqwest::Error) -> ProviderError {
        let error = error.without_url();
        let mut message = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            message = format!("{message}: {inner}");
            cause = inner.source();
        }
        if error.is_connect() {
            message = format!("the server of {} cannot be reached: {message}", self.name);
        }
        self.error(FailureKind::Transient, &message)
    }

    fn timed_out(&self, limit: Duration) -> ProviderError {
        self.error(
            FailureKind::Transient,
            &format!("the server was silent for {} s", limit.as_secs_f64()),
        )
    }
}

impl fmt::Debug for Wire {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wire").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A streamed answer. Dropping it closes the connection.
pub(super) struct Frames<'a> {
    reader: Reader<'a>,
    splitter: Splitter,
}

impl Frames<'_> {
    /// The next frame; `None` at the end of the bytes, which does not make an answer complete.
    pub(super) async fn next(&mut self) -> Result<Option<Frame>, ProviderError> {
        let wire = self.reader.wire;
        loop {
            if let Some(frame) = self.splitter.next() {
                return Ok(Some(frame));
            }
            let Some(chunk) = self.reader.next_chunk().await? else {
                // Where one JSON text is one line, it is complete without the line's end.
                let last = self.splitter.last_line();
                return Ok(last.filter(|last| json::read::<IgnoredAny>(&last.data).is_ok()));
            };
            self.splitter.push(&chunk).map_err(|_too_large| wire.too_large())?;
        }
    }
}

/// Reads the body of a successful answer up to the size limit.
struct Reader<'a> {
    wire: &'a Wire,
    response: Response,
    received: usize,
    /// For memory, of the whole answer.
    patience: MemoryPatience,
}

impl Reader<'_> {
    async fn chunk(&mut self) -> Result<Option<Bytes>, ProviderError> {
        let chunk = self.response.chunk().await.map_err(|error| self.wire.broken(error))?;
        self.received += chunk.as_ref().map_or(0, Bytes::len);
        if self.received > MAX_STREAM {
            return Err(self.wire.larger_than("16 MiB"));
        }
        Ok(chunk)
    }

    async fn next_chunk(&mut self) -> Result<Option<Bytes>, ProviderError> {
        if self.received > SMALL {
            self.patience.wait().await; // in the meantime the server waits
        }
        let limit = self.wire.idle_timeout;
        let timed_out = |_| self.wire.timed_out(limit);
        timeout_at(Instant::now() + limit, self.chunk())
            .await
            .unwrap_or_else(|elapsed| Err(timed_out(elapsed)))
    }

    /// Reads the rest and appends it to `body`.
    async fn rest(mut self, mut body: Vec<u8>) -> Result<Bytes, ProviderError> {
        let mut chunk =
            if body.is_empty() { self.chunk().await? } else { self.next_chunk().await? };
        while let Some(bytes) = chunk {
            body.extend_from_slice(&bytes);
            if body.len() > MAX_ANSWER {
                return Err(self.wire.too_large());
            }
            chunk = self.next_chunk().await?;
        }
        Ok(body.into())
    }
}

/// The API's path below the base URL; a query, which Azure needs, is kept.
fn endpoint(mut base_url: Url, path: &[&str]) -> Result<Url, WireSettingsError> {
    if !matches!(base_url.scheme(), "http" | "https") {
        return Err(WireSettingsError::BaseUrl);
    }
    base_url
        .path_segments_mut()
        .map_err(|()| WireSettingsError::BaseUrl)?
        .pop_if_empty()
        .extend(path);
    Ok(base_url)
}

fn sensitive(value: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}
