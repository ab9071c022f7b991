//! The client of the API, over the network or in this process.
//!
//! Both give the same JSON and the same problems for the same paths, so that commands need not
//! distinguish them. Errors are worded by the server; advice on what to do about them is added here.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use axum::body::{Body, Bytes};
use clap::Args;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_DISPOSITION, CONTENT_TYPE, HOST, LOCATION};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use reqwest::redirect;
use secrecy::{ExposeSecret as _, SecretString};
use serde_json::Value;
use tower::ServiceExt as _;
use url::Url;

use super::UsageError;
use super::kinds::Kind;
use super::shell_words::{path_word, shell_word};
use crate::app::{self, AppError};
use crate::bounds::address::is_loopback;
use crate::bounds::text::bare_type;
use crate::config::{Config, Flags};
use crate::message::visible::escaped;
use crate::store::StoreError;

const KEY_VARIABLE: &str = "TOOLLOOP_KEY";
pub(super) const EVENT_STREAM: &str = "text/event-stream";

/// What a load balancer answers while no service is behind it.
const GATEWAY_ERRORS: [StatusCode; 3] =
    [StatusCode::BAD_GATEWAY, StatusCode::SERVICE_UNAVAILABLE, StatusCode::GATEWAY_TIMEOUT];

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Longer than the interval of keep-alive comments in event streams.
pub(super) const READ_TIMEOUT: Duration = Duration::from_mins(1);
/// Bytes a second of a file that is sent.
const MIN_UPLOAD_RATE: u64 = 1024;

/// Which service to use.
#[derive(Debug, Clone, Args)]
pub(super) struct TargetArgs {
    /// A running service, e.g. http://127.0.0.1:8080 [default: work in this process, on the
    /// configured database]
    #[arg(long, value_name = "URL", env = "TOOLLOOP_SERVER", hide_env_values = true)]
    server: Option<String>,
    /// The API key for --server
    #[arg(long, value_name = "KEY", env = KEY_VARIABLE, hide_env_values = true)]
    key: Option<SecretString>,
}

impl TargetArgs {
    /// As in all settings, an empty variable counts as unset.
    pub(super) fn server(&self) -> Option<&str> {
        self.server.as_deref().filter(|server| !server.is_empty())
    }

    fn key(&self) -> Option<SecretString> {
        self.key.clone().filter(|key| !key.expose_secret().is_empty())
    }

    /// The options with which another command reaches the same service or database, each after a
    /// blank. What may be secret is a placeholder.
    fn repeated(&self, flags: &Flags) -> String {
        let mut options = String::new();
        let mut add = |name: &str, value: &str| options.extend([" --", name, " ", value]);
        if let Some(server) = self.server() {
            let is_secret = Url::parse(server).is_ok_and(|url| url.password().is_some());
            add("server", &if is_secret { "URL".to_owned() } else { shell_word(server) });
            let key = self.key();
            let variable = std::env::var(KEY_VARIABLE).ok();
            match key.as_ref().map(SecretString::expose_secret) {
                None => {}
                Some(key) if Some(key) == variable.as_deref() => {
                    add("key", &format!("\"${KEY_VARIABLE}\""));
                }
                Some(_) => add("key", "KEY"),
            }
            return options;
        }
        if let Some(file) = &flags.config {
            add("config", &path_word(file));
        }
        if let Some(url) = &flags.database_url {
            let is_file = url.starts_with("sqlite:");
            add("database-url", &if is_file { shell_word(url) } else { "URL".to_owned() });
        }
        if let Some(dir) = &flags.agents_dir {
            add("agents-dir", &path_word(Path::new(dir)));
        }
        options
    }
}

/// Commands that only read or answer what is in a database do not create one.
#[derive(Debug, thiserror::Error)]
#[error(
    "there is no database at {}, so there are no runs\n  Choose another with --database-url or --config, or a running service with --server http://127.0.0.1:8080.",
    escaped(&.0.to_string_lossy())
)]
pub(super) struct NoDatabase(PathBuf);

#[derive(Debug, thiserror::Error)]
pub(super) enum ClientError {
    #[error(
        "{address} cannot be reached: {reason}\n  Is the service running there? `toolloop serve` starts one."
    )]
    Unreachable {
        address: String,
        reason: String,
        /// Whether the request may have arrived.
        sent: bool,
    },
    #[error("{}", error_text(.0))]
    Refused(Box<ApiError>),
    /// The response is not one of this service.
    #[error("unexpected response: {0}\n  Is there a toolloop service at that address?")]
    UnexpectedResponse(String),
}

/// A problem document (RFC 9457).
#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
pub(super) struct ApiError {
    pub(super) status: u16,
    pub(super) code: String,
    detail: String,
    #[serde(default)]
    errors: Vec<Fault>,
    #[serde(default)]
    request_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, serde::Deserialize)]
struct Fault {
    pointer: String,
    message: String,
}

/// A name or a part of a path as a segment of an address. `.` and `..` name nothing, as the
/// service says in this process: over the network, they would make the address of something else.
pub(super) fn segment(text: &str, what: &str) -> Result<String, ClientError> {
    if matches!(text, "." | "..") {
        return Err(ClientError::Refused(Box::new(ApiError {
            status: 404,
            code: "NOT_FOUND".to_owned(),
            detail: format!("There is no such {what}."),
            errors: Vec::new(),
            request_id: None,
        })));
    }
    Ok(utf8_percent_encode(text, NON_ALPHANUMERIC).to_string())
}

/// The error, and what to do about it.
fn error_text(error: &ApiError) -> String {
    let mut lines = vec![escaped(error.detail.trim_end_matches('.')).into_owned()];
    if error.errors.len() > 1 {
        lines.extend(
            error
                .errors
                .iter()
                .map(|e| format!("  {} {}", escaped(&e.pointer), escaped(&e.message))),
        );
    }
    let advice = match error.code.as_str() {
        "UNAUTHENTICATED" => {
            "  Give a key with --key or in TOOLLOOP_KEY; `toolloop keys create` creates one."
                .to_owned()
        }
        "FORBIDDEN" if error.detail.contains("scope") => {
            "  Use a key with that scope: `toolloop keys create --name … --scope …`.".to_owned()
        }
        "RATE_LIMITED" | "OVERLOADED" | "DRAINING" | "STORE_UNAVAILABLE" => {
            "  Try again in a moment.".to_owned()
        }
        "INTERNAL" => match &error.request_id {
            Some(id) => {
                format!("  The service's log has the cause, under request id {}.", escaped(id))
            }
            None => "  The service's log has the cause.".to_owned(),
        },
        _ => return lines.join("\n"),
    };
    lines.push(advice);
    lines.join("\n")
}

pub(super) struct Client {
    service: Service,
    /// With which another command reaches the same service.
    options: String,
}

enum Service {
    Remote(Remote),
    Local(Box<app::Local>),
}

/// The body of a request.
enum Sent<'a> {
    Nothing,
    Json(&'a Value),
    File(Bytes),
}

impl<'a> From<Option<&'a Value>> for Sent<'a> {
    fn from(body: Option<&'a Value>) -> Self {
        body.map_or(Self::Nothing, Self::Json)
    }
}

/// A service over the network.
struct Remote {
    http: reqwest::Client,
    /// Whether it is on this machine.
    is_here: bool,
    base: String,
    /// The same without a password, for messages.
    shown: String,
    key: Option<SecretString>,
}

impl Client {
    /// In this process, the client is an administrator of `tenant`; over the network, the key
    /// determines the tenant.
    pub(super) async fn open(
        target: &TargetArgs,
        flags: &Flags,
        tenant: &str,
    ) -> anyhow::Result<Self> {
        let options = target.repeated(flags);
        if let Some(server) = target.server() {
            let service = Service::Remote(Remote::new(server, target.key())?);
            return Ok(Self { service, options });
        }
        Self::local(Config::read(flags)?, tenant, options).await
    }

    /// As [`open`](Self::open), for commands that need an existing database.
    ///
    /// # Errors
    /// [`NoDatabase`] where there is none, and any of `open`.
    pub(super) async fn open_existing(
        target: &TargetArgs,
        flags: &Flags,
        tenant: &str,
    ) -> anyhow::Result<Self> {
        if target.server().is_some() {
            return Self::open(target, flags, tenant).await;
        }
        let config = Config::read(flags)?;
        let is_missing = |file: &PathBuf| !file.try_exists().unwrap_or(true);
        match config.database.file().filter(is_missing) {
            Some(file) => Err(NoDatabase(file).into()),
            None => Self::local(config, tenant, target.repeated(flags)).await,
        }
    }

    async fn local(config: Config, tenant: &str, options: String) -> anyhow::Result<Self> {
        let listen = config.server.listen;
        match app::local(config, tenant).await {
            Ok(local) => Ok(Self { service: Service::Local(Box::new(local)), options }),
            Err(AppError::Store(StoreError::Locked(error))) => {
                Err(anyhow!("{error}\n  Or use that service: --server http://{listen} --key …"))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The options with which another command reaches the same service, each after a blank.
    pub(super) fn options(&self) -> &str {
        &self.options
    }

    /// Starts what runs are made of, if they are checked in this process.
    pub(super) async fn prepare(&self) {
        if let Service::Local(local) = &self.service {
            local.prepare().await;
        }
    }

    /// Registers this process as a replica, if runs execute in it.
    pub(super) async fn join(&self) -> anyhow::Result<()> {
        match &self.service {
            Service::Remote(_) => Ok(()),
            Service::Local(local) => Ok(local.join().await?),
        }
    }

    pub(super) async fn close(self) {
        if let Service::Local(local) = self.service {
            local.close().await;
        }
    }

    /// Whether no service can have the database while this command has it.
    pub(super) fn is_alone(&self) -> bool {
        matches!(&self.service, Service::Local(local) if local.is_alone())
    }

    pub(super) fn is_remote(&self) -> bool {
        matches!(self.service, Service::Remote(_))
    }

    /// `path` is below `/v1` and includes the query.
    pub(super) async fn get(&self, path: &str, kind: &Kind) -> Result<Value, ClientError> {
        self.ask(Method::GET, path, None, kind).await
    }

    pub(super) async fn post(
        &self,
        path: &str,
        body: &Value,
        kind: &Kind,
    ) -> Result<Value, ClientError> {
        self.ask(Method::POST, path, Some(body), kind).await
    }

    pub(super) async fn delete(&self, path: &str) -> Result<(), ClientError> {
        let response = self.send(Method::DELETE, path, Sent::Nothing, &[]).await?;
        match response.status() {
            StatusCode::NO_CONTENT => Ok(()),
            other => Err(unexpected_status(other)),
        }
    }

    /// The content of a file, which has the file's name.
    pub(super) async fn content(&self, path: &str) -> Result<Body, ClientError> {
        let response = self.send(Method::GET, path, Sent::Nothing, &[]).await?;
        if !response.headers().contains_key(CONTENT_DISPOSITION) {
            let what = "a file without its name".to_owned();
            return Err(ClientError::UnexpectedResponse(what));
        }
        Ok(response.into_body())
    }

    /// Sends a file; whether it is new.
    pub(super) async fn put(&self, path: &str, content: Bytes) -> Result<bool, ClientError> {
        let response = self.send(Method::PUT, path, Sent::File(content), &[]).await?;
        match response.status() {
            StatusCode::CREATED => Ok(true),
            StatusCode::NO_CONTENT => Ok(false),
            other => Err(unexpected_status(other)),
        }
    }

    async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
        kind: &Kind,
    ) -> Result<Value, ClientError> {
        let bytes = self.send(method, path, body.into(), &[]).await?.into_body().collect().await;
        let bytes = bytes.map_err(|e| self.broken(&e))?.to_bytes();
        let answer = if bytes.is_empty() {
            Value::Null
        } else {
            serde_json::from_slice(&bytes)
                .map_err(|e| ClientError::UnexpectedResponse(e.to_string()))?
        };
        kind.of(answer).map_err(ClientError::UnexpectedResponse)
    }

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
        let response = self.send(method, path, body.into(), &headers).await?;
        if response.status() == StatusCode::NO_CONTENT {
            return Err(ClientError::UnexpectedResponse(
                "204 without the run's last event".to_owned(),
            ));
        }
        let given = response.headers().get(CONTENT_TYPE).and_then(|given| given.to_str().ok());
        let given = bare_type(given.unwrap_or("nothing"));
        if given != EVENT_STREAM {
            let what = format!("{} instead of {EVENT_STREAM}", escaped(&given));
            return Err(ClientError::UnexpectedResponse(what));
        }
        Ok(response.into_body())
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Sent<'_>,
        headers: &[(http::HeaderName, String)],
    ) -> Result<Response<Body>, ClientError> {
        let base =
            if let Service::Remote(remote) = &self.service { remote.base.as_str() } else { "" };
        let mut request = Request::builder().method(method).uri(format!("{base}/v1{path}"));
        let (media_type, bytes) = match body {
            Sent::Nothing => (None, Bytes::new()),
            Sent::Json(body) => (Some("application/json"), Bytes::from(body.to_string())),
            Sent::File(content) => (Some("application/octet-stream"), content),
        };
        if let Some(media_type) = media_type {
            request = request.header(CONTENT_TYPE, media_type);
        }
        if !self.is_remote() {
            request = request.header(HOST, "localhost"); // a client of the network does so itself
        }
        for (name, value) in headers {
            request = request.header(name, value);
        }
        let request =
            request.body(bytes).map_err(|e| ClientError::UnexpectedResponse(e.to_string()))?;
        let response = match &self.service {
            Service::Remote(remote) => remote.send(request).await?,
            Service::Local(local) => match local.router().oneshot(request.map(Body::from)).await {
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
        let elsewhere = response.headers().get(LOCATION).and_then(|to| to.to_str().ok());
        let elsewhere = elsewhere.map(|to| escaped(to).into_owned());
        let bytes = match response.into_body().collect().await {
            Ok(bytes) => bytes.to_bytes(),
            Err(error) => return self.broken(&error),
        };
        match serde_json::from_slice(&bytes) {
            Ok(refusal) => ClientError::Refused(Box::new(refusal)),
            Err(_) if GATEWAY_ERRORS.contains(&status) => {
                self.unreachable_error(format!("it answers {status}"))
            }
            Err(_) => match elsewhere {
                Some(to) => {
                    let what = format!("status {status}, which leads to {to}");
                    ClientError::UnexpectedResponse(what)
                }
                None => unexpected_status(status),
            },
        }
    }

    /// The connection failed during the response.
    pub(super) fn broken(&self, error: &dyn std::error::Error) -> ClientError {
        self.unreachable_error(root_cause(error))
    }

    /// The request may have arrived.
    fn unreachable_error(&self, reason: String) -> ClientError {
        let address = match &self.service {
            Service::Remote(remote) => remote.shown.clone(),
            Service::Local(_) => "the service in this process".to_owned(),
        };
        ClientError::Unreachable { address, reason, sent: true }
    }
}

impl ClientError {
    /// Whether a retry may succeed.
    pub(super) fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable { .. } => true,
            Self::Refused(refusal) => {
                let is_outage = refusal.status >= 500 && refusal.code != "JOURNAL_UNREADABLE";
                is_outage || refusal.status == StatusCode::TOO_MANY_REQUESTS
            }
            Self::UnexpectedResponse(_) => false,
        }
    }

    /// Whether there is no such thing, or not yet.
    pub(super) fn is_not_found(&self) -> bool {
        matches!(self, Self::Refused(refusal) if refusal.status == StatusCode::NOT_FOUND)
    }

    /// The problem's code, if the response was a problem.
    pub(super) fn code(&self) -> Option<&str> {
        if let Self::Refused(refusal) = self { Some(&refusal.code) } else { None }
    }
}

impl Remote {
    fn new(server: &str, key: Option<SecretString>) -> anyhow::Result<Self> {
        let wrong = |why: &str| {
            // It may have a password.
            let given = if server.contains('@') { "it".to_owned() } else { format!("{server:?}") };
            UsageError(format!("--server: {given} {why}; write e.g. http://127.0.0.1:8080"))
        };
        let url = Url::parse(server).map_err(|e| wrong(&format!("is not a URL ({e})")))?;
        if !matches!(url.scheme(), "http" | "https")
            || url.query().is_some()
            || url.fragment().is_some()
        {
            return Err(wrong("is not an http or https URL of a service").into());
        }
        if key.as_ref().is_some_and(|key| HeaderValue::from_str(key.expose_secret()).is_err()) {
            return Err(UsageError("--key: contains invalid characters".to_owned()).into());
        }
        let base_of = |url: &Url| {
            let base = url.as_str().trim_end_matches('/');
            base.strip_suffix("/v1").unwrap_or(base).to_owned()
        };
        let mut shown = url.clone();
        let _ = shown.set_password(None); // fails where there can be none
        let (base, shown) = (base_of(&url), base_of(&shown));
        let is_here = is_loopback(&url);
        let http = http_client(is_here, READ_TIMEOUT).context("cannot create an HTTP client")?;
        Ok(Self { http, is_here, base, shown, key })
    }

    async fn send(&self, mut request: Request<Bytes>) -> Result<Response<Body>, ClientError> {
        if let Some(key) = &self.key
            && let Ok(mut value) = HeaderValue::try_from(format!("Bearer {}", key.expose_secret()))
        {
            value.set_sensitive(true);
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        let unreachable = |error: reqwest::Error| ClientError::Unreachable {
            address: self.shown.clone(),
            reason: root_cause(&error),
            sent: !error.is_connect() && !error.is_builder(),
        };
        let http = if request.method() == Method::PUT {
            http_client(self.is_here, time_for(request.body().len())).map_err(unreachable)?
        } else {
            self.http.clone()
        };
        let request = reqwest::Request::try_from(request).map_err(unreachable)?;
        let response = http.execute(request).await.map_err(unreachable)?;
        Ok(Response::<reqwest::Body>::from(response).map(Body::new))
    }
}

/// For services that begin to answer in time and go on doing so. `patience` includes the sending of a
/// request.
fn http_client(is_here: bool, patience: Duration) -> reqwest::Result<reqwest::Client> {
    let http = reqwest::Client::builder()
        .connect_timeout(CONNECT_TIMEOUT)
        .read_timeout(patience)
        .redirect(redirect::Policy::none()) // it would lose the key, or the body
        .user_agent(concat!("toolloop/", env!("CARGO_PKG_VERSION")));
    if is_here { http.no_proxy().build() } else { http.build() }
}

/// How long a file of this size may take, at the slowest rate that the service accepts.
fn time_for(bytes: usize) -> Duration {
    READ_TIMEOUT + Duration::from_secs(bytes as u64 / MIN_UPLOAD_RATE)
}

fn unexpected_status(status: StatusCode) -> ClientError {
    ClientError::UnexpectedResponse(format!("status {status}"))
}

pub(super) fn root_cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn another_command_reaches_the_same_service() {
        let target = |server: Option<&str>, key: Option<&str>| TargetArgs {
            server: server.map(str::to_owned),
            key: key.map(SecretString::from),
        };
        let given = Flags {
            config: Some("it's/c.toml".into()),
            listen: None,
            database_url: Some("sqlite://my runs.db".to_owned()),
            agents_dir: Some("a".to_owned()),
        };
        let postgres =
            Flags { database_url: Some("postgres://u:hunter2@h/d".to_owned()), ..Flags::default() };
        for (target, flags, expected) in [
            (target(None, None), Flags::default(), ""),
            (target(None, Some("tl_x")), Flags::default(), ""),
            (target(Some("http://h:1"), None), given.clone(), " --server http://h:1"),
            (
                target(Some("http://[::1]:1"), Some("tl_x_hunter2")),
                Flags::default(),
                " --server 'http://[::1]:1' --key KEY",
            ),
            (target(Some("http://u:hunter2@h"), None), Flags::default(), " --server URL"),
            (
                target(None, None),
                given,
                r" --config 'it'\''s/c.toml' --database-url 'sqlite://my runs.db' --agents-dir a",
            ),
            (target(None, None), postgres, " --database-url URL"),
        ] {
            assert_eq!(target.repeated(&flags), expected);
        }
    }

    #[test]
    fn a_password_in_an_address_is_not_shown() {
        for wrong in ["http://u:hunter2@h:99999", "ftp://u:hunter2@h", "http://u:hunter2@h?q"] {
            let message = Remote::new(wrong, None).err().unwrap().to_string();
            assert!(message.starts_with("--server: it is not"), "{message}");
        }
        let remote = Remote::new("http://u:hunter2@h/v1/", None).unwrap();
        assert_eq!((&*remote.base, &*remote.shown), ("http://u:hunter2@h", "http://u@h"));
    }

    #[test]
    fn what_cannot_be_read_is_not_asked_for_again() {
        let refused = |status, code: &str| {
            ClientError::Refused(Box::new(ApiError {
                status,
                code: code.to_owned(),
                detail: String::new(),
                errors: Vec::new(),
                request_id: None,
            }))
        };
        assert!(refused(503, "STORE_UNAVAILABLE").is_transient());
        assert!(!refused(500, "JOURNAL_UNREADABLE").is_transient());
    }

    #[tokio::test]
    async fn a_redirect_is_told_and_not_followed() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = format!("http://{}", listener.local_addr().unwrap());
        let moved = || async { (StatusCode::MOVED_PERMANENTLY, [(LOCATION, "/elsewhere")]) };
        let service = axum::Router::new().fallback(moved);
        tokio::spawn(async move { axum::serve(listener, service).await });
        let service = Service::Remote(Remote::new(&server, None).unwrap());
        let client = Client { service, options: String::new() };
        let told = client.get("/runs", &crate::cli::kinds::LIST).await.unwrap_err().to_string();
        assert!(told.contains("301 Moved Permanently, which leads to /elsewhere"), "{told}");
    }

    #[test]
    fn a_file_may_be_sent_slowly() {
        assert_eq!(time_for(0), READ_TIMEOUT);
        assert!(time_for(16 << 20) > Duration::from_hours(4));
    }
}
