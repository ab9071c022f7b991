//! OpenAI's Chat Completions API, spoken by OpenAI, llama-server, vLLM, Ollama's `/v1` and many more.
//!
//! One call, one HTTP request, one JSON answer. The body is [`request`]'s, its meaning [`response`]'s;
//! here are the connection, the limits on what is read, and what a failure is reported as. How long a
//! call may take as a whole, and whether it is repeated, is the router's.

mod request;
mod response;

use std::fmt;
use std::time::Duration;

use async_trait::async_trait;
use chrono::Utc;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use reqwest::{Client, Response, redirect, retry};
use secrecy::{ExposeSecret, SecretString};
use url::{Host, Url};

use self::response::Unusable;
use super::failure::{self, Reported};
use super::{Completion, FailureKind, ModelRequest, Provider, ProviderError};

/// Largest answer that is read, in bytes.
const MAX_ANSWER: usize = 16 << 20;
/// Largest error body that is read, in bytes; the rest is not looked at.
const MAX_ERROR: usize = 64 << 10;

/// W3C Trace Context.
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Where the server is and how to be let in.
pub struct OpenAiSettings {
    /// The provider's name in our configuration.
    pub name: String,
    /// Up to and including the version, e.g. `https://api.openai.com/v1`.
    pub base_url: Url,
    /// Sent as a bearer token; local servers need none.
    pub api_key: Option<SecretString>,
    /// Sent with every request; their values are treated as secrets.
    pub headers: Vec<(String, String)>,
    /// For TCP and TLS together.
    pub connect_timeout: Duration,
}

/// Settings that no request can be sent with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum OpenAiSettingsError {
    /// Not an HTTP URL.
    #[error("base_url is not an http or https URL")]
    BaseUrl,
    /// The key holds characters that no header can.
    #[error("the API key holds characters that cannot be sent")]
    ApiKey,
    /// A header that HTTP does not allow.
    #[error("the header {0:?} cannot be sent")]
    Header(String),
    /// The HTTP client could not be built.
    #[error("no HTTP client: {0}")]
    Client(String),
}

/// A server that speaks Chat Completions.
pub struct OpenAi {
    name: String,
    endpoint: Url,
    client: Client,
    secrets: Vec<SecretString>,
}

impl OpenAi {
    /// Prepares the connection pool; nothing is sent yet.
    ///
    /// # Errors
    /// [`OpenAiSettingsError`] where the settings cannot be sent.
    pub fn new(settings: OpenAiSettings) -> Result<Self, OpenAiSettingsError> {
        let endpoint = endpoint(settings.base_url)?;
        let mut headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static("application/json"))]);
        let mut secrets = Vec::new();
        if let Some(key) = settings.api_key.filter(|key| !key.expose_secret().is_empty()) {
            let bearer = format!("Bearer {}", key.expose_secret());
            headers.insert(AUTHORIZATION, sensitive(&bearer).ok_or(OpenAiSettingsError::ApiKey)?);
            secrets.push(key);
        }
        for (name, value) in settings.headers {
            let header = HeaderName::try_from(&name).ok().zip(sensitive(&value));
            let (header, sendable) = header.ok_or(OpenAiSettingsError::Header(name))?;
            headers.insert(header, sendable);
            secrets.push(value.into());
        }
        let mut client = Client::builder()
            .default_headers(headers)
            .connect_timeout(settings.connect_timeout)
            .pool_max_idle_per_host(2048)
            .tcp_nodelay(true)
            .redirect(redirect::Policy::none())
            .retry(retry::never());
        if is_loopback(&endpoint) {
            client = client.no_proxy();
        }
        let client = client.build().map_err(|error| OpenAiSettingsError::Client(error.to_string()))?;
        Ok(Self { name: settings.name, endpoint, client, secrets })
    }

    fn error(&self, kind: FailureKind, message: &str) -> ProviderError {
        ProviderError {
            provider: self.name.clone(),
            kind,
            status: None,
            code: None,
            message: failure::presentable(message, &self.secrets),
            retry_after: None,
        }
    }

    fn reported(&self, status: u16, reported: &Reported, retry_after: Option<Duration>) -> ProviderError {
        let kind = failure::classify(reported.status.unwrap_or(status), reported.code.as_deref(), &reported.message);
        let message = if reported.message.is_empty() { format!("HTTP {status}") } else { reported.message.clone() };
        ProviderError {
            status: Some(status),
            code: reported.code.as_deref().map(|code| failure::presentable(code, &self.secrets)),
            retry_after,
            ..self.error(kind, &message)
        }
    }

    /// A connection that failed before or during the answer.
    fn broken(&self, error: reqwest::Error) -> ProviderError {
        let error = error.without_url();
        let mut message = error.to_string();
        let mut cause = std::error::Error::source(&error);
        while let Some(inner) = cause {
            message = format!("{message}: {inner}");
            cause = inner.source();
        }
        self.error(FailureKind::Transient, &message)
    }

    async fn refused(&self, mut response: Response) -> ProviderError {
        let status = response.status().as_u16();
        let retry_after = failure::retry_after(response.headers(), Utc::now());
        let mut body = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            body.extend_from_slice(&chunk);
            if body.len() >= MAX_ERROR {
                break;
            }
        }
        let reported = Reported { status: None, ..failure::read_body(&body) };
        self.reported(status, &reported, retry_after)
    }
}

#[async_trait]
impl Provider for OpenAi {
    async fn complete(&self, request: &ModelRequest<'_>) -> Result<Completion, ProviderError> {
        let body = request::body(request).map_err(|e| self.error(FailureKind::BadRequest, &e.to_string()))?;
        let mut post = self.client.post(self.endpoint.clone()).body(body);
        if let Some(span) = request.trace {
            post = post.header(TRACEPARENT, span.to_string());
        }
        let mut response = post.send().await.map_err(|error| self.broken(error))?;
        let status = response.status();
        if !status.is_success() {
            return Err(self.refused(response).await);
        }
        let mut answer = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.broken(error))? {
            if answer.len() + chunk.len() > MAX_ANSWER {
                return Err(self.error(FailureKind::Transient, "the answer is larger than 16 MiB"));
            }
            answer.extend_from_slice(&chunk);
        }
        response::parse(&answer, request.step).map_err(|unusable| match unusable {
            Unusable::Malformed(message) => {
                ProviderError { status: Some(status.as_u16()), ..self.error(FailureKind::Transient, &message) }
            }
            Unusable::Error(reported) => self.reported(reported.status.unwrap_or(502), &reported, None),
        })
    }
}

impl fmt::Debug for OpenAi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenAi").field("name", &self.name).finish_non_exhaustive()
    }
}

/// `{base_url}/chat/completions`; a query, as Azure wants one, stays.
fn endpoint(mut base_url: Url) -> Result<Url, OpenAiSettingsError> {
    if !matches!(base_url.scheme(), "http" | "https") {
        return Err(OpenAiSettingsError::BaseUrl);
    }
    let mut path = base_url.path_segments_mut().map_err(|()| OpenAiSettingsError::BaseUrl)?;
    path.pop_if_empty().extend(["chat", "completions"]);
    drop(path);
    Ok(base_url)
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Ipv4(address)) => address.is_loopback(),
        Some(Host::Ipv6(address)) => address.is_loopback(),
        Some(Host::Domain(name)) => name == "localhost",
        None => false,
    }
}

fn sensitive(value: &str) -> Option<HeaderValue> {
    let mut value = HeaderValue::try_from(value).ok()?;
    value.set_sensitive(true);
    Some(value)
}
