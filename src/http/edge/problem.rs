//! Errors as RFC 9457 problem documents; the only place where our errors become HTTP.
//!
//! Every error has a public part (code, detail, pointers) and, if the service is at fault, a private
//! cause. A [`Problem`] travels as an extension of an empty response; the middleware
//! ([`super::layer`]) adds request id and instance, logs the cause once and writes the body. Modules
//! below do not know HTTP, and no handler writes an error body of its own.

use std::borrow::Cow;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use parking_lot::Mutex;
use serde::Serialize;
use utoipa::ToSchema;
use uuid::Uuid;

use crate::bounds::secrets::redacted;
use crate::bounds::text::{MAX_REPEATED, shortened};
use crate::event::ValidationError;
use crate::runtime::{AnswerError, FilesError, StartError, UploadError};
use crate::store::{RateLimit, StoreError};
use crate::tools::file_store::NotStored;
use crate::tools::staged_bytes::TooManyStaged;
use crate::tools::stored_files::{ChangeError, ListError};

/// Stable error codes. Clients can rely on them; messages may change.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(as = ProblemCode, rename_all = "SCREAMING_SNAKE_CASE")]
pub(crate) enum Code {
    MalformedJson,
    InvalidParameter,
    Unauthenticated,
    Forbidden,
    ForeignOrigin,
    NotFound,
    MethodNotAllowed,
    NotAcceptable,
    RequestTimeout,
    RunIdTaken,
    SessionBusy,
    SessionOfOtherAgent,
    IdempotencyMismatch,
    NotAwaitingApproval,
    ProtectedKey,
    FileConflict,
    PreconditionFailed,
    RangeNotSatisfiable,
    PayloadTooLarge,
    UriTooLong,
    UnsupportedMediaType,
    InvalidInputs,
    InvalidOverride,
    PromptInjection,
    WebhooksDisabled,
    RateLimited,
    TooManyRuns,
    HeadersTooLarge,
    Internal,
    JournalUnreadable,
    Overloaded,
    Draining,
    StoreUnavailable,
    WorkspaceUnavailable,
    IdentityProviderUnavailable,
    Timeout,
}

impl Code {
    /// Name, status and title.
    fn meaning(self) -> (&'static str, StatusCode, &'static str) {
        const UNPROCESSABLE: StatusCode = StatusCode::UNPROCESSABLE_ENTITY;
        const UNAVAILABLE: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
        match self {
            Self::MalformedJson => ("MALFORMED_JSON", StatusCode::BAD_REQUEST, "Malformed JSON"),
            Self::InvalidParameter => {
                ("INVALID_PARAMETER", StatusCode::BAD_REQUEST, "Invalid parameter")
            }
            Self::Unauthenticated => {
                ("UNAUTHENTICATED", StatusCode::UNAUTHORIZED, "Unauthenticated")
            }
            Self::Forbidden => ("FORBIDDEN", StatusCode::FORBIDDEN, "Forbidden"),
            Self::ForeignOrigin => ("FOREIGN_ORIGIN", StatusCode::FORBIDDEN, "Foreign origin"),
            Self::NotFound => ("NOT_FOUND", StatusCode::NOT_FOUND, "Not found"),
            Self::MethodNotAllowed => {
                ("METHOD_NOT_ALLOWED", StatusCode::METHOD_NOT_ALLOWED, "Method not allowed")
            }
            Self::NotAcceptable => ("NOT_ACCEPTABLE", StatusCode::NOT_ACCEPTABLE, "Not acceptable"),
            Self::RequestTimeout => {
                ("REQUEST_TIMEOUT", StatusCode::REQUEST_TIMEOUT, "Request timeout")
            }
            Self::RunIdTaken => ("RUN_ID_TAKEN", StatusCode::CONFLICT, "Run id taken"),
            Self::NotAwaitingApproval => {
                ("NOT_AWAITING_APPROVAL", StatusCode::CONFLICT, "Not awaiting approval")
            }
            Self::ProtectedKey => ("PROTECTED_KEY", StatusCode::CONFLICT, "Protected key"),
            Self::FileConflict => ("FILE_CONFLICT", StatusCode::CONFLICT, "File conflict"),
            Self::PreconditionFailed => {
                ("PRECONDITION_FAILED", StatusCode::PRECONDITION_FAILED, "Precondition failed")
            }
            Self::RangeNotSatisfiable => (
                "RANGE_NOT_SATISFIABLE",
                StatusCode::RANGE_NOT_SATISFIABLE,
                "Range not satisfiable",
            ),
            Self::SessionBusy => ("SESSION_BUSY", StatusCode::CONFLICT, "Session busy"),
            Self::SessionOfOtherAgent => {
                ("SESSION_OF_OTHER_AGENT", StatusCode::CONFLICT, "Session of another agent")
            }
            Self::PayloadTooLarge => {
                ("PAYLOAD_TOO_LARGE", StatusCode::PAYLOAD_TOO_LARGE, "Payload too large")
            }
            Self::UriTooLong => ("URI_TOO_LONG", StatusCode::URI_TOO_LONG, "URI too long"),
            Self::UnsupportedMediaType => (
                "UNSUPPORTED_MEDIA_TYPE",
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "Unsupported media type",
            ),
            Self::InvalidInputs => ("INVALID_INPUTS", UNPROCESSABLE, "Invalid inputs"),
            Self::InvalidOverride => ("INVALID_OVERRIDE", UNPROCESSABLE, "Invalid override"),
            Self::PromptInjection => ("PROMPT_INJECTION", UNPROCESSABLE, "Prompt injection"),
            Self::WebhooksDisabled => ("WEBHOOKS_DISABLED", UNPROCESSABLE, "Webhooks disabled"),
            Self::IdempotencyMismatch => {
                ("IDEMPOTENCY_MISMATCH", UNPROCESSABLE, "Idempotency mismatch")
            }
            Self::RateLimited => ("RATE_LIMITED", StatusCode::TOO_MANY_REQUESTS, "Rate limited"),
            Self::TooManyRuns => ("TOO_MANY_RUNS", StatusCode::TOO_MANY_REQUESTS, "Too many runs"),
            Self::HeadersTooLarge => (
                "HEADERS_TOO_LARGE",
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "Headers too large",
            ),
            Self::Internal => ("INTERNAL", StatusCode::INTERNAL_SERVER_ERROR, "Internal error"),
            Self::JournalUnreadable => {
                ("JOURNAL_UNREADABLE", StatusCode::INTERNAL_SERVER_ERROR, "Journal unreadable")
            }
            Self::Overloaded => ("OVERLOADED", UNAVAILABLE, "Overloaded"),
            Self::Draining => ("DRAINING", UNAVAILABLE, "Shutting down"),
            Self::StoreUnavailable => ("STORE_UNAVAILABLE", UNAVAILABLE, "Store unavailable"),
            Self::WorkspaceUnavailable => {
                ("WORKSPACE_UNAVAILABLE", UNAVAILABLE, "Workspace unavailable")
            }
            Self::IdentityProviderUnavailable => {
                ("IDENTITY_PROVIDER_UNAVAILABLE", UNAVAILABLE, "Identity provider unavailable")
            }
            Self::Timeout => ("TIMEOUT", StatusCode::GATEWAY_TIMEOUT, "Timeout"),
        }
    }

    pub(crate) fn name(self) -> &'static str {
        self.meaning().0
    }

    pub(crate) fn status(self) -> StatusCode {
        self.meaning().1
    }

    pub(crate) fn title(self) -> &'static str {
        self.meaning().2
    }

    /// Seconds until a retry may succeed.
    fn retry_after(self) -> Option<HeaderValue> {
        match self {
            Self::Overloaded | Self::TooManyRuns => Some(HeaderValue::from_static("1")),
            Self::StoreUnavailable => Some(HeaderValue::from_static("2")),
            Self::Draining | Self::WorkspaceUnavailable | Self::IdentityProviderUnavailable => {
                Some(HeaderValue::from_static("5"))
            }
            _ => None,
        }
    }
}

/// The body of every error response (`application/problem+json`, RFC 9457).
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Problem)]
pub(crate) struct ProblemBody<'a> {
    /// A URI that identifies the problem type; one per code.
    #[serde(rename = "type")]
    #[schema(example = "urn:toolloop:problem:NOT_FOUND")]
    kind: String,
    /// A short summary of the problem type.
    #[schema(example = "Not found")]
    title: &'static str,
    /// The HTTP status code.
    #[schema(example = 404)]
    status: u16,
    /// What is wrong with this request.
    #[schema(example = "There is no such run.")]
    detail: &'a str,
    /// The path of the request.
    #[schema(example = "/v1/runs/01970000-0000-7000-8000-000000000000")]
    instance: &'a str,
    /// The stable error code.
    #[schema(value_type = Code, example = "NOT_FOUND")]
    code: &'static str,
    /// The validation errors, with JSON pointers into the request body.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    #[schema(value_type = Vec<ValidationError>, required = false)]
    errors: &'a [ValidationError],
    /// The run that was started and continues although this request failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    run_id: Option<Uuid>,
    /// The value of the `x-request-id` header, by which the operator finds the request in the log.
    #[schema(example = "0197000000007000800000000000000a")]
    request_id: &'a str,
}

/// Refusals with no longer pause between them belong to one outage.
const SAME_OUTAGE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub(crate) struct Problem {
    code: Code,
    detail: Cow<'static, str>,
    errors: Vec<ValidationError>,
    run_id: Option<Uuid>,
    /// Seconds; overrides the default of the code.
    retry_after: Option<u64>,
    cause: Option<String>,
}

impl Problem {
    /// A detail that is not a literal of the source may repeat a part of the request.
    pub(crate) fn new(code: Code, detail: impl Into<Cow<'static, str>>) -> Self {
        let detail = match detail.into() {
            Cow::Owned(made) => Cow::Owned(repeatable(&made)),
            written @ Cow::Borrowed(_) => written,
        };
        Self { code, detail, errors: Vec::new(), run_id: None, retry_after: None, cause: None }
    }

    pub(crate) fn code(&self) -> Code {
        self.code
    }

    /// A fault of the service; the cause is logged and not sent.
    pub(crate) fn internal(cause: impl Into<String>) -> Self {
        let detail =
            "An internal error occurred; the service's log has its cause under this request id.";
        Self { cause: Some(cause.into()), ..Self::new(Code::Internal, detail) }
    }

    /// The caller may not do this, for this reason.
    fn refused(why: &dyn std::error::Error) -> Self {
        Self::new(Code::Forbidden, sentence(&why.to_string()))
    }

    /// The refusal for something that does not exist, or belongs to another tenant.
    pub(crate) fn not_found(what: &str) -> Self {
        Self::new(Code::NotFound, format!("There is no such {what}."))
    }

    /// Validation errors; the first one becomes the detail, without its pointer where that is long.
    pub(crate) fn invalid(code: Code, mut errors: Vec<ValidationError>) -> Self {
        for error in &mut errors {
            error.pointer = repeatable(&error.pointer);
            error.message = repeatable(&error.message);
        }
        let is_long = |pointer: &str| pointer.chars().count() > MAX_REPEATED / 2;
        let detail = match errors.first() {
            Some(first) if first.pointer.is_empty() || is_long(&first.pointer) => {
                first.message.clone()
            }
            Some(first) => format!("{}: {}", first.pointer, first.message),
            None => String::new(),
        };
        Self { errors, ..Self::new(code, detail) }
    }

    pub(crate) fn at(code: Code, pointer: impl Into<String>, message: impl Into<String>) -> Self {
        Self::invalid(
            code,
            vec![ValidationError { pointer: pointer.into(), message: message.into() }],
        )
    }

    /// The connection broke while the request arrived.
    pub(crate) fn body_incomplete(error: &dyn std::fmt::Display) -> Self {
        Self::new(Code::MalformedJson, format!("The body is incomplete: {error}."))
    }

    /// The request did not arrive in time.
    pub(crate) fn body_timeout() -> Self {
        Self::new(Code::RequestTimeout, "The body arrived too slowly (server.body_timeout).")
    }

    /// `seconds` is the time until the next request may succeed.
    pub(crate) fn rate_limited(limit: RateLimit, seconds: u64) -> Self {
        let RateLimit { per_minute, burst } = limit;
        let detail = format!(
            "The rate limit of this key is exceeded ({per_minute} a minute, {burst} at once); retry in \
             {seconds} s."
        );
        Self { retry_after: Some(seconds), ..Self::new(Code::RateLimited, detail) }
    }

    pub(crate) fn too_many_requests(most: usize) -> Self {
        let detail = format!("This key has {most} requests open, which is the limit.");
        Self { retry_after: Some(1), ..Self::new(Code::RateLimited, detail) }
    }

    /// Names the run that continues although this request failed.
    pub(crate) fn of_run(self, run_id: Uuid) -> Self {
        Self { run_id: Some(run_id), ..self }
    }

    /// Logs the cause and writes the body of the response that carried the problem.
    pub(crate) fn finish(self, bare: Response, request_id: &str, path: &str) -> Response {
        let path = redacted(path);
        let path = &path[..path.floor_char_boundary(MAX_REPEATED)];
        let (code, status, title) = self.code.meaning();
        if let Some(cause) = &self.cause
            && (self.code != Code::StoreUnavailable || is_first_of_outage())
        {
            tracing::error!(request_id, path, status = status.as_u16(), cause, "request failed");
        }
        let body = ProblemBody {
            kind: format!("urn:toolloop:problem:{code}"),
            title,
            status: status.as_u16(),
            detail: &self.detail,
            instance: path,
            code,
            errors: &self.errors,
            run_id: self.run_id,
            request_id,
        };
        let json = serde_json::to_vec(&body).unwrap_or_default();
        let (mut parts, _) = bare.into_parts();
        parts.headers.insert(CONTENT_LENGTH, json.len().into());
        parts.headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        Response::from_parts(parts, Body::from(json))
    }
}

/// Whether no request was recently refused because the store is unavailable: one line in the log is
/// enough for an outage.
fn is_first_of_outage() -> bool {
    static LAST: Mutex<Option<Instant>> = Mutex::new(None);
    let last = LAST.lock().replace(Instant::now());
    last.is_none_or(|last| last.elapsed() > SAME_OUTAGE)
}

/// A clause as a sentence.
fn sentence(clause: &str) -> String {
    let first = clause.chars().next().map(|first| first.to_ascii_uppercase());
    first.into_iter().chain(clause.chars().skip(1)).chain(['.']).collect()
}

/// A text that may repeat a part of the request, as a refusal shows it: without secrets, and no longer than
/// a refusal may be.
fn repeatable(text: &str) -> String {
    shortened(&redacted(text))
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let mut response = self.code.status().into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after.map(HeaderValue::from).or(self.code.retry_after()) {
            headers.insert(RETRY_AFTER, seconds);
        }
        if self.code == Code::Unauthenticated {
            headers.insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(run_id) = self.run_id {
            headers.insert(super::responses::X_RUN_ID, super::responses::run_id_header(run_id));
        }
        response.extensions_mut().insert(self);
        response
    }
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::Unavailable(_) | StoreError::Conflict(_) | StoreError::Locked(_) => {
                let detail = "The store is temporarily unavailable.";
                Self { cause: Some(error.to_string()), ..Self::new(Code::StoreUnavailable, detail) }
            }
            StoreError::UnreadableEvent { run, seq, .. } => {
                let detail = format!(
                    "Event {seq} of the run {run} cannot be read; GET \
                     /runs/{run}/events?after={seq} continues with the events after it."
                );
                Self {
                    cause: Some(error.to_string()),
                    ..Self::new(Code::JournalUnreadable, detail)
                }
            }
            StoreError::Failed(_) => Self::internal(error.to_string()),
        }
    }
}

impl From<AnswerError> for Problem {
    fn from(error: AnswerError) -> Self {
        match error {
            AnswerError::UnknownRun => Self::not_found("run"),
            AnswerError::UnknownCall => Self::not_found("tool call"),
            AnswerError::NotPending(why) => Self::new(Code::NotAwaitingApproval, why),
            AnswerError::InvalidArguments(errors) => Self::invalid(Code::InvalidInputs, errors),
            AnswerError::MissingScope(_) | AnswerError::OwnApproval => Self::refused(&error),
            AnswerError::NoWorkspace(why) => std::io::Error::other(why).into(),
            AnswerError::Broken(_) | AnswerError::Unchecked => Self::internal(error.to_string()),
            AnswerError::Store(error) => error.into(),
        }
    }
}

impl From<UploadError> for Problem {
    fn from(error: UploadError) -> Self {
        let why = error.to_string();
        match error {
            UploadError::Path { pointer, .. }
            | UploadError::Twice { pointer, .. }
            | UploadError::InTheWay { pointer, .. }
            | UploadError::Source { pointer, .. } => Self::at(Code::InvalidInputs, pointer, why),
            UploadError::Change(error) => error.into(),
            UploadError::TooMany(error) => error.into(),
            UploadError::Files(error) => error.into(),
        }
    }
}

impl From<ChangeError> for Problem {
    fn from(error: ChangeError) -> Self {
        let code = match error {
            ChangeError::NotFound => return Self::not_found("file"),
            ChangeError::Condition => Code::PreconditionFailed,
            ChangeError::Quota(_) => Code::PayloadTooLarge,
            ChangeError::InTheWay(..) => Code::FileConflict,
            ChangeError::NotStored(NotStored::Orphaned) => return Self::not_found("workspace"),
            ChangeError::NotStored(error) => return std::io::Error::other(error).into(),
            ChangeError::Io(error) => return error.into(),
        };
        Self::new(code, sentence(&error.to_string()))
    }
}

impl From<TooManyStaged> for Problem {
    fn from(error: TooManyStaged) -> Self {
        Self::new(Code::Overloaded, sentence(&error.to_string()))
    }
}

impl From<ListError> for Problem {
    fn from(error: ListError) -> Self {
        match error {
            ListError::TooMany => Self::new(Code::InvalidParameter, sentence(&error.to_string())),
            ListError::Io(error) => error.into(),
        }
    }
}

impl From<FilesError> for Problem {
    fn from(error: FilesError) -> Self {
        match error {
            FilesError::Missing(what) => Self::not_found(what),
            FilesError::Store(error) => error.into(),
            FilesError::Unavailable(error) => error.into(),
        }
    }
}

/// The refusal if a file of a workspace cannot be used.
impl From<std::io::Error> for Problem {
    fn from(error: std::io::Error) -> Self {
        let detail = "The workspace is temporarily unavailable.";
        Self { cause: Some(error.to_string()), ..Self::new(Code::WorkspaceUnavailable, detail) }
    }
}

impl From<StartError> for Problem {
    fn from(error: StartError) -> Self {
        let code = match error {
            StartError::UnknownAgent(_) => Code::NotFound,
            StartError::RunIdTaken(_) => Code::RunIdTaken,
            StartError::SessionBusy(_) => Code::SessionBusy,
            StartError::SessionOfOtherAgent(_) => Code::SessionOfOtherAgent,
            StartError::IdempotencyMismatch | StartError::IdempotencyKeyOfOther => {
                Code::IdempotencyMismatch
            }
            StartError::WebhooksDisabled => Code::WebhooksDisabled,
            StartError::Overloaded | StartError::SessionContended => Code::Overloaded,
            StartError::TooManyRuns(_) => Code::TooManyRuns,
            StartError::Draining => Code::Draining,
            StartError::NoWorkspace => Code::WorkspaceUnavailable,
            StartError::InvalidInputs(errors) => {
                let in_body = errors.into_iter().map(|error| ValidationError {
                    pointer: format!("/inputs{}", error.pointer),
                    ..error
                });
                return Self::invalid(Code::InvalidInputs, in_body.collect());
            }
            StartError::PromptInjection(error) => {
                return Self::invalid(Code::PromptInjection, vec![error]);
            }
            StartError::InvalidOverride(error) => {
                return Self::invalid(Code::InvalidOverride, vec![error]);
            }
            StartError::Store(error) => return error.into(),
            StartError::Upload(error) => return error.into(),
            StartError::MissingScope(_) => return Self::refused(&error),
            StartError::BrokenAgent { .. } => return Self::internal(error.to_string()),
        };
        Self::new(code, sentence(&error.to_string()))
    }
}

#[cfg(test)]
#[path = "problem_tests.rs"]
mod tests;
