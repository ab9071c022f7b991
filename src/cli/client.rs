//! The one way from the command line to the API: over the network, or to the service in this
//! process.
//!
//! Both answer the same JSON and the same problems to the same paths, so commands do not know which
//! it is. What a refusal means is the server's to say; what to do about it is said here.

use std::time::Duration;

use anyhow::{Context as _, anyhow};
use axum::body::{Body, Bytes};
use clap::Args;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use tower::ServiceExt as _;
use url::Url;

use super::UsageError;
use super::output::harmless;
use crate::app::{self, AppError};
use crate::config::Flags;
use crate::store::StoreError;

/// The media type of event streams.
pub(super) const EVENT_STREAM: &str = "text/event-stream";

/// How long connecting to a service may take.
const CONNECTING: Duration = Duration::from_secs(10);
/// How long a service may be silent; event streams are kept alive more often.
const SILENCE: Duration = Duration::from_mins(1);

/// Which service is asked.
#[derive(Debug, Clone, Args)]
pub(super) struct TargetArgs {
    /// A running service, e.g. http://127.0.0.1:8080 [default: work in this process, on the
    /// configured database]
    #[arg(long, value_name = "URL", env = "TOOLLOOP_SERVER", hide_env_values = true)]
    server: Option<String>,
    /// The API key for --server
    #[arg(long, value_name = "KEY", env = "TOOLLOOP_KEY", hide_env_values = true)]
    key: Option<SecretString>,
}

impl TargetArgs {
    /// The service elsewhere; as in all settings, an empty variable counts as unset.
    pub(super) fn server(&self) -> Option<&str> {
        self.server.as_deref().filter(|server| !server.is_empty())
    }

    fn key(&self) -> Option<SecretString> {
        self.key.clone().filter(|key| !key.expose_secret().is_empty())
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    /// Nothing answers at that address, or the connection broke.
    #[error(
        "{address} cannot be reached: {reason}\n  Is the service running there? `toolloop serve` starts one."
    )]
    Unreachable {
        /// Where.
        address: String,
        /// Why.
        reason: String,
        /// Whether the request may have arrived.
        sent: bool,
    },
    /// The service refused, or failed.
    #[error("{}", refusal(.0))]
    Refused(Box<Refusal>),
    /// What came back is not what this service answers.
    #[error("the answer cannot be understood: {0}\n  Is there a toolloop service at that address?")]
    Strange(String),
}

/// A problem document.
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
pub(super) struct Refusal {
    /// The HTTP status.
    pub(super) status: u16,
    /// The stable code.
    pub(super) code: String,
    /// What went wrong.
    detail: String,
    /// What is wrong where.
    #[serde(default)]
    errors: Vec<Fault>,
    /// Finds the cause in the service's log.
    #[serde(default)]
    request_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
struct Fault {
    pointer: String,
    message: String,
}

/// What was refused and what to do about it.
fn refusal(refusal: &Refusal) -> String {
    let mut lines = vec![harmless(refusal.detail.trim_end_matches('.')).into_owned()];
    if refusal.errors.len() > 1 {
        lines.extend(
            refusal
                .errors
                .iter()
                .map(|e| format!("  {} {}", harmless(&e.pointer), harmless(&e.message))),
        );
    }
    let advice = match refusal.code.as_str() {
        "UNAUTHENTICATED" => {
            "  Give a key with --key or in TOOLLOOP_KEY; `toolloop keys create` makes one."
                .to_owned()
        }
        "FORBIDDEN" => {
            "  Use a key that has it: `toolloop keys create --name … --scope …`.".to_owned()
        }
        "RATE_LIMITED" | "OVERLOADED" | "DRAINING" | "STORE_UNAVAILABLE" => {
            "  Try again in a moment.".to_owned()
        }
        "INTERNAL" => match &refusal.request_id {
            Some(id) => format!("  The service's log says why, under request id {}.", harmless(id)),
            None => "  The service's log says why.".to_owned(),
        },
        _ => return lines.join("\n"),
    };
    lines.push(advice);
    lines.join("\n")
}

/// Speaks to the API.
pub(super) enum Client {
    /// A service elsewhere.
    Remote(Remote),
    /// The service in this process.
    Local(Box<app::Local>),
}

/// A service elsewhere.
pub(super) struct Remote {
    http: reqwest::Client,
    base: String,
    key: Option<SecretString>,
}

impl Client {
    /// Opens what the arguments name. `tenant` is whose administrator asks in this process;
    /// elsewhere the key decides.
    pub(super) async fn open(
        target: &TargetArgs,
        flags: &Flags,
        tenant: &str,
    ) -> anyhow::Result<Self> {
        if let Some(server) = target.server() {
            return Ok(Self::Remote(Remote::new(server, target.key())?));
        }
        let config = super::read_config(flags)?;
        let listen = config.server.listen;
        match app::local(config, tenant).await {
            Ok(local) => Ok(Self::Local(Box::new(local))),
            Err(AppError::Store(StoreError::Locked(error))) => {
                Err(anyhow!("{error}\n  Or ask that service: --server http://{listen} --key …"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Makes this process able to drive runs, if runs are driven in this process.
    pub(super) async fn join(&self) -> anyhow::Result<()> {
        match self {
            Self::Remote(_) => Ok(()),
            Self::Local(local) => Ok(local.join().await?),
        }
    }

    /// Lets go of everything.
    pub(super) async fn close(self) {
        if let Self::Local(local) = self {
            local.close().await;
        }
    }

    /// The JSON at a path beneath `/v1`, query included.
    pub(super) async fn get(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::GET, path, None).await
    }

    /// Sends JSON to a path; the JSON that comes back, null where there is none.
    pub(super) async fn post(&self, path: &str, body: &Value) -> Result<Value, ClientError> {
        self.ask(Method::POST, path, Some(body)).await
    }

    /// Deletes what is at a path.
    pub(super) async fn delete(&self, path: &str) -> Result<Value, ClientError> {
        self.ask(Method::DELETE, path, None).await
    }

    /// Up to `limit` rows of a list, and the cursor behind them. `path` has a query already.
    pub(super) async fn list(
        &self,
        path: &str,
        limit: usize,
    ) -> Result<(Vec<Value>, Value), ClientError> {
        const PAGE: usize = 200;
        let (mut rows, mut cursor) = (Vec::new(), Value::Null);
        while rows.len() < limit {
            let size = PAGE.min(limit - rows.len());
            let after =
                cursor.as_str().map(|cursor| format!("&cursor={cursor}")).unwrap_or_default();
            let mut page = self.get(&format!("{path}&limit={size}{after}")).await?;
            let Some(Value::Array(data)) = page.get_mut("data").map(Value::take) else {
                return Err(ClientError::Strange("a list without data".to_owned()));
            };
            rows.extend(data);
            cursor = page.get_mut("next_cursor").map(Value::take).unwrap_or_default();
            if cursor.is_null() {
                break;
            }
        }
        Ok((rows, cursor))
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<Value, ClientError> {
        let bytes = self.send(method, path, body, &[]).await?.into_body().collect().await;
        let bytes = bytes.map_err(|e| self.broken(&e))?.to_bytes();
        if bytes.is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_slice(&bytes).map_err(|e| ClientError::Strange(e.to_string()))
    }

    /// Asks for an event stream.
    pub(super) async fn stream(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        last_event: Option<i64>,
    ) -> Result<Body, ClientError> {
        let mut headers = vec![(ACCEPT, EVENT_STREAM.to_owned())];
        headers.extend(
            last_event.map(|seq| (http::HeaderName::from_static("last-event-id"), seq.to_string())),
        );
        let response = self.send(method, path, body, &headers).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Err(ClientError::Strange("there are no events behind the last one".to_owned()));
        }
        Ok(response.into_body())
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        headers: &[(http::HeaderName, String)],
    ) -> Result<Response<Body>, ClientError> {
        let base = if let Self::Remote(remote) = self { remote.base.as_str() } else { "" };
        let mut request = Request::builder().method(method).uri(format!("{base}/v1{path}"));
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let bytes = Bytes::from(body.map(Value::to_string).unwrap_or_default());
        let request = request.body(bytes).map_err(|e| ClientError::Strange(e.to_string()))?;
        let response = match self {
            Self::Remote(remote) => remote.send(request).await?,
            Self::Local(local) => match local.router().oneshot(request.map(Body::from)).await {
                Ok(response) => response,
                Err(never) => match never {},
            },
        };
        if response.status().is_success() {
            Ok(response)
        } else {
            Err(self.refused(response).await)
        }
    }

    async fn refused(&self, response: Response<Body>) -> ClientError {
        let status = response.status();
        let bytes = match response.into_body().collect().await {
            Ok(bytes) => bytes.to_bytes(),
            Err(error) => return self.broken(&error),
        };
        match serde_json::from_slice(&bytes) {
            Ok(refusal) => ClientError::Refused(Box::new(refusal)),
            Err(_) => ClientError::Strange(format!("status {status}")),
        }
    }

    /// A connection that broke in the middle of an answer.
    pub(super) fn broken(&self, error: &dyn std::error::Error) -> ClientError {
        let address = match self {
            Self::Remote(remote) => remote.base.clone(),
            Self::Local(_) => "the service in this process".to_owned(),
        };
        ClientError::Unreachable { address, reason: root_cause(error), sent: true }
    }
}

impl ClientError {
    /// Whether the same request may succeed in a moment.
    pub(super) fn may_pass(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused(refusal) => {
                refusal.status >= 500 || refusal.status == StatusCode::TOO_MANY_REQUESTS
            }
            Self::Strange(_) => false,
        }
    }

    /// The problem's code, if the service refused.
    pub(super) fn code(&self) -> Option<&str> {
        if let Self::Refused(refusal) = self { Some(&refusal.code) } else { None }
    }
}

impl Remote {
    fn new(server: &str, key: Option<SecretString>) -> anyhow::Result<Self> {
        let wrong = |why: &str| {
            UsageError(format!("--server: {server:?} {why}; write e.g. http://127.0.0.1:8080"))
        };
        let url = Url::parse(server).map_err(|e| wrong(&format!("is not a URL ({e})")))?;
        if !matches!(url.scheme(), "http" | "https")
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(wrong("is not an http or https URL of a service").into());
        }
        if key.as_ref().is_some_and(|key| HeaderValue::from_str(key.expose_secret()).is_err()) {
            return Err(UsageError("--key: holds characters that no key has".to_owned()).into());
        }
        let base = url.as_str().trim_end_matches('/');
        let base = base.strip_suffix("/v1").unwrap_or(base).to_owned();
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECTING)
            .read_timeout(SILENCE)
            .user_agent(concat!("toolloop/", env!("CARGO_PKG_VERSION")));
        Ok(Self { http: http.build().context("no HTTP client")?, base, key })
    }

    async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, ClientError> {
        if let Some(key) = &self.key
            && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {}", key.expose_secret()))
        {
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let unreachable = |error: reqwest::Error| ClientError::Unreachable {
            address: self.base.clone(),
            reason: root_cause(&error),
            sent: !error.is_connect() && !error.is_builder(),
        };
        let request = reqwest::Request::try_from(request).map_err(unreachable)?;
        let response = self.http.execute(request).await.map_err(unreachable)?;
        Ok(Response::<reqwest::Body>::from(response).map(Body::new))
    }
}

/// The innermost reason, which is the one that says something.
pub(super) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}
