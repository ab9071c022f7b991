//! Problems: their bodies, headers and the errors that they come from.

use axum::body::to_bytes;
use axum::http::HeaderMap;
use serde_json::{Value, json};
use utoipa::PartialSchema;

use super::*;

const ALL: [Code; 36] = [
    Code::MalformedJson,
    Code::InvalidParameter,
    Code::Unauthenticated,
    Code::Forbidden,
    Code::ForeignOrigin,
    Code::NotFound,
    Code::MethodNotAllowed,
    Code::NotAcceptable,
    Code::RequestTimeout,
    Code::RunIdTaken,
    Code::SessionBusy,
    Code::SessionOfOtherAgent,
    Code::IdempotencyMismatch,
    Code::NotAwaitingApproval,
    Code::ProtectedKey,
    Code::FileConflict,
    Code::PreconditionFailed,
    Code::RangeNotSatisfiable,
    Code::PayloadTooLarge,
    Code::UriTooLong,
    Code::UnsupportedMediaType,
    Code::InvalidInputs,
    Code::InvalidOverride,
    Code::PromptInjection,
    Code::WebhooksDisabled,
    Code::RateLimited,
    Code::TooManyRuns,
    Code::HeadersTooLarge,
    Code::Internal,
    Code::JournalUnreadable,
    Code::Overloaded,
    Code::Draining,
    Code::StoreUnavailable,
    Code::WorkspaceUnavailable,
    Code::IdentityProviderUnavailable,
    Code::Timeout,
];

async fn sent(problem: Problem) -> (StatusCode, HeaderMap, Value) {
    let mut bare = problem.into_response();
    let problem = bare.extensions_mut().remove::<Problem>().unwrap();
    let (parts, body) = problem.finish(bare, "req-1", "/v1/somewhere").into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap();
    assert_eq!(parts.headers[CONTENT_LENGTH], body.len().to_string());
    assert_eq!(parts.headers[CONTENT_TYPE], "application/problem+json");
    (parts.status, parts.headers, serde_json::from_slice(&body).unwrap())
}

#[test]
fn codes_statuses_and_titles_are_a_contract() {
    let table: Vec<String> = ALL
        .iter()
        .map(|code| {
            let wait = code
                .retry_after()
                .map_or(String::new(), |s| format!(" retry {}", s.to_str().unwrap()));
            format!("{} {} {}{wait}", code.status().as_u16(), code.name(), code.title())
        })
        .collect();
    insta::assert_snapshot!(table.join("\n"), @r"
    400 MALFORMED_JSON Malformed JSON
    400 INVALID_PARAMETER Invalid parameter
    401 UNAUTHENTICATED Unauthenticated
    403 FORBIDDEN Forbidden
    403 FOREIGN_ORIGIN Foreign origin
    404 NOT_FOUND Not found
    405 METHOD_NOT_ALLOWED Method not allowed
    406 NOT_ACCEPTABLE Not acceptable
    408 REQUEST_TIMEOUT Request timeout
    409 RUN_ID_TAKEN Run id taken
    409 SESSION_BUSY Session busy
    409 SESSION_OF_OTHER_AGENT Session of another agent
    422 IDEMPOTENCY_MISMATCH Idempotency mismatch
    409 NOT_AWAITING_APPROVAL Not awaiting approval
    409 PROTECTED_KEY Protected key
    409 FILE_CONFLICT File conflict
    412 PRECONDITION_FAILED Precondition failed
    416 RANGE_NOT_SATISFIABLE Range not satisfiable
    413 PAYLOAD_TOO_LARGE Payload too large
    414 URI_TOO_LONG URI too long
    415 UNSUPPORTED_MEDIA_TYPE Unsupported media type
    422 INVALID_INPUTS Invalid inputs
    422 INVALID_OVERRIDE Invalid override
    422 PROMPT_INJECTION Prompt injection
    422 WEBHOOKS_DISABLED Webhooks disabled
    429 RATE_LIMITED Rate limited
    429 TOO_MANY_RUNS Too many runs retry 1
    431 HEADERS_TOO_LARGE Headers too large
    500 INTERNAL Internal error
    500 JOURNAL_UNREADABLE Journal unreadable
    503 OVERLOADED Overloaded retry 1
    503 DRAINING Shutting down retry 5
    503 STORE_UNAVAILABLE Store unavailable retry 2
    503 WORKSPACE_UNAVAILABLE Workspace unavailable retry 5
    503 IDENTITY_PROVIDER_UNAVAILABLE Identity provider unavailable retry 5
    504 TIMEOUT Timeout
    ");
}

#[test]
fn the_documented_codes_are_the_ones_that_are_sent() {
    let schema = serde_json::to_value(Code::schema()).unwrap();
    let sent: Vec<&str> = ALL.iter().map(|code| code.name()).collect();
    assert_eq!(schema["enum"], json!(sent));
}

#[tokio::test]
async fn a_validation_problem_lists_every_error() {
    let errors = vec![
        ValidationError { pointer: "/project".into(), message: "is missing".into() },
        ValidationError { pointer: "/n".into(), message: "is not a number".into() },
    ];
    let (status, _, body) = sent(StartError::InvalidInputs(errors).into()).await;
    assert_eq!(status, StatusCode::UNPROCESSABLE_ENTITY);
    assert_eq!(
        body,
        json!({
            "type": "urn:toolloop:problem:INVALID_INPUTS",
            "title": "Invalid inputs",
            "status": 422,
            "detail": "/inputs/project: is missing",
            "instance": "/v1/somewhere",
            "code": "INVALID_INPUTS",
            "errors": [
                {"pointer": "/inputs/project", "message": "is missing"},
                {"pointer": "/inputs/n", "message": "is not a number"},
            ],
            "request_id": "req-1",
        })
    );
}

#[tokio::test]
async fn a_run_that_continues_is_named_in_body_and_header() {
    let run = Uuid::now_v7();
    let (_, headers, body) = sent(Problem::new(Code::Draining, "It goes on.").of_run(run)).await;
    assert_eq!(body["run_id"], json!(run));
    assert_eq!(headers["x-run-id"], run.to_string());
    assert_eq!(headers[RETRY_AFTER], "5");
}

#[tokio::test]
async fn a_rate_limited_problem_has_retry_after() {
    let (status, headers, body) =
        sent(Problem::rate_limited(RateLimit { per_minute: 5, burst: 2 }, 7)).await;
    assert_eq!((status.as_u16(), headers[RETRY_AFTER].to_str().unwrap()), (429, "7"));
    let detail = body["detail"].as_str().unwrap();
    assert!(detail.contains("5 a minute, 2 at once") && detail.contains("7 s"), "{body}");
}

#[tokio::test]
async fn the_cause_of_an_internal_error_is_not_sent() {
    for error in
        [StoreError::Unavailable("10.0.0.7 refused".into()), StoreError::Failed("column x".into())]
    {
        let private = error.to_string();
        let (status, _, body) = sent(error.into()).await;
        assert!(status.is_server_error());
        assert!(!body.to_string().contains(private.rsplit(": ").next().unwrap()), "{body}");
    }
}

#[tokio::test]
async fn a_401_has_www_authenticate() {
    let (status, headers, _) = sent(Problem::new(Code::Unauthenticated, "Who?")).await;
    assert_eq!(status, StatusCode::UNAUTHORIZED);
    assert_eq!(headers[WWW_AUTHENTICATE], "Bearer");
}

#[test]
fn every_start_error_has_its_code() {
    let code = |error: StartError| Problem::from(error).code;
    assert_eq!(code(StartError::UnknownAgent("x".into())), Code::NotFound);
    assert_eq!(code(StartError::RunIdTaken(Uuid::nil())), Code::RunIdTaken);
    assert_eq!(code(StartError::SessionBusy(Uuid::nil())), Code::SessionBusy);
    assert_eq!(code(StartError::SessionOfOtherAgent("x".into())), Code::SessionOfOtherAgent);
    assert_eq!(code(StartError::Overloaded), Code::Overloaded);
    assert_eq!(code(StartError::Draining), Code::Draining);
    assert_eq!(
        code(StartError::Store(StoreError::Unavailable(String::new()))),
        Code::StoreUnavailable
    );
    assert_eq!(code(StartError::Store(StoreError::Failed(String::new()))), Code::Internal);
    let error = ValidationError { pointer: "/model".into(), message: "is unknown".into() };
    assert_eq!(code(StartError::InvalidOverride(error)), Code::InvalidOverride);
    for (error, detail) in [
        (StartError::IdempotencyMismatch, "The idempotency key was used for another request."),
        (
            StartError::IdempotencyKeyOfOther,
            "The idempotency key was used by another caller, whose run this one may not see without \
             the scope runs:read.",
        ),
        (StartError::Overloaded, "Too many runs are in progress or queued."),
    ] {
        assert_eq!(Problem::from(error).detail, detail);
    }
}
