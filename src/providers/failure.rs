//! Classifies failed model calls: the kind, whether to try again and a message that may be stored.
//!
//! One table for all providers that answer with HTTP statuses, and for scenarios that simulate
//! them. Messages are untrusted: they are capped, and secrets that a provider echoes are redacted.
//! The router decides whether and when to retry.

use http::HeaderMap;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::FailureKind;
use crate::bounds::json;

/// Largest error body that is parsed, in bytes.
const MAX_READ: usize = 64 * 1024;
/// Longest stored message, in bytes.
const MESSAGE_CAP: usize = 1024;

/// Phrases of servers without error codes for an input that is too long.
const CONTEXT_PHRASES: [&str; 13] = [
    "maximum context length",
    "exceeded max context length",
    "context length of only",
    "context window",
    "exceeds the available context size",
    "exceeds the context length",
    "exceed context length",
    "exceed context limit",
    "longer than the maximum model length",
    "prompt is too long",
    "maximum prompt length is",
    "exceeds the maximum number of tokens",
    "input is too long for requested model",
];

/// Phrases for a request that a content filter rejected.
const FILTER_PHRASES: [&str; 1] = ["content filtering policy"];

/// Phrases for an exhausted quota, which waiting does not restore.
const QUOTA_PHRASES: [&str; 4] =
    ["exceeded your current quota", "spend limit", "spending limit", "credit balance"];

/// The content of an error body.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Reported {
    /// The provider's code, or the type if it has no code.
    pub(super) code: Option<String>,
    /// A status in the body.
    pub(super) status: Option<u16>,
    /// Empty if there is none.
    pub(super) message: String,
}

#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    error: Option<&'a RawValue>,
}

/// Reads `{"error": {message, code, type}}`, `{"error": "…"}`, `{message, code, type}`, `{"detail":
/// …}`, or the first of a list of these; or else takes the text as the message.
pub(super) fn read_body(body: &[u8]) -> Reported {
    let short;
    let body = if body.len() <= MAX_READ {
        body
    } else {
        // The error may be embedded in a whole answer.
        let whole = serde_json::from_slice::<Envelope>(body).ok();
        let error = whole.and_then(|whole| whole.error).map(RawValue::get);
        short =
            error.filter(|error| error.len() <= MAX_READ).map(|it| format!("{{\"error\":{it}}}"));
        short.as_ref().map_or(&body[..MAX_READ], |short| short.as_bytes())
    };
    let Ok(value) = json::read::<Value>(body) else {
        return Reported {
            message: String::from_utf8_lossy(body).trim().to_owned(),
            ..Reported::default()
        };
    };
    let value = value.get(0).unwrap_or(&value);
    let error = value.get("error").filter(|e| !e.is_null()).unwrap_or(value);
    let code = error.get("code");
    let message = error.as_str().or_else(|| error.get("message")?.as_str());
    let message = message.map(|message| match error.get("param").and_then(Value::as_str) {
        Some(param) if !message.contains(param) => format!("{message} ({param})"),
        _ => message.to_owned(),
    });
    Reported {
        code: code
            .and_then(Value::as_str)
            .or_else(|| error.get("type")?.as_str())
            .map(str::to_owned),
        status: code
            .and_then(Value::as_u64)
            .and_then(|c| u16::try_from(c).ok())
            .filter(|c| (400..600).contains(c)),
        message: message.or_else(|| Some(value.get("detail")?.to_string())).unwrap_or_default(),
    }
}

/// Reads an error within an answer or a stream. If it has no status, that of its code.
pub(super) fn read_embedded(body: &[u8]) -> Reported {
    let reported = read_body(body);
    let of_code = match reported.code.as_deref() {
        Some("rate_limit_exceeded") => Some(429),
        Some("invalid_prompt" | "invalid_request_error") => Some(400),
        _ => None,
    };
    Reported { status: reported.status.or(of_code), ..reported }
}

/// The kind of a failure from its status, the provider's code and, for servers without codes, its
/// message.
pub(super) fn classify(status: u16, code: Option<&str>, message: &str) -> FailureKind {
    match code {
        Some(
            "context_length_exceeded"
            | "exceed_context_size_error"
            | "model_context_window_exceeded",
        ) => {
            return FailureKind::ContextLength;
        }
        Some("content_filter" | "content_policy_violation" | "ResponsibleAIPolicyViolation") => {
            return FailureKind::ContentFilter;
        }
        Some(
            "insufficient_quota"
            | "billing_hard_limit_reached"
            | "billing_not_active"
            | "billing_error"
            | "quota_exceeded",
        ) => return FailureKind::QuotaExhausted,
        Some("model_not_found") => return FailureKind::NotFound,
        _ => {}
    }
    let says = |phrases: &[&str]| {
        let message = message.to_ascii_lowercase();
        phrases.iter().any(|phrase| message.contains(phrase))
    };
    match status {
        400 | 413 | 422 | 500 | 502 if says(&CONTEXT_PHRASES) => FailureKind::ContextLength,
        400 if says(&FILTER_PHRASES) => FailureKind::ContentFilter,
        400 | 403 | 429 if says(&QUOTA_PHRASES) => FailureKind::QuotaExhausted,
        429 => FailureKind::RateLimited,
        402 => FailureKind::QuotaExhausted,
        401 | 403 => FailureKind::Unauthorized,
        404 => FailureKind::NotFound,
        408 | 409 | 425 | 500.. => FailureKind::Transient,
        _ => FailureKind::BadRequest,
    }
}

/// The `x-should-retry` header, if it is `true` or `false`.
pub(super) fn should_retry(headers: &HeaderMap) -> Option<bool> {
    match headers.get("x-should-retry")?.to_str().ok()?.trim() {
        said if said.eq_ignore_ascii_case("true") => Some(true),
        said if said.eq_ignore_ascii_case("false") => Some(false),
        _ => None,
    }
}

/// The message without our secrets and NUL, capped.
pub(super) fn sanitised(message: &str, secrets: &[SecretString]) -> String {
    let mut message = message.replace('\0', "");
    for secret in secrets.iter().map(ExposeSecret::expose_secret).filter(|s| !s.is_empty()) {
        if message.contains(secret) {
            message = message.replace(secret, "[redacted]");
        }
    }
    message.truncate(message.floor_char_boundary(MESSAGE_CAP));
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use FailureKind::{
        BadRequest, ContentFilter, ContextLength, NotFound, QuotaExhausted, RateLimited, Transient,
        Unauthorized,
    };

    #[test]
    fn every_refusal_has_its_kind() {
        let table: &[(u16, Option<&str>, &str, FailureKind)] = &[
            (400, None, "bad", BadRequest),
            (302, None, "moved", BadRequest),
            (422, Some("invalid_request_error"), "bad", BadRequest),
            (413, None, "body too large", BadRequest),
            (401, Some("invalid_api_key"), "", Unauthorized),
            (403, None, "", Unauthorized),
            (402, None, "", QuotaExhausted),
            (404, None, "", NotFound),
            (400, Some("model_not_found"), "", NotFound),
            (408, None, "", Transient),
            (409, None, "", Transient),
            (425, None, "", Transient),
            (500, None, "", Transient),
            (503, Some("overloaded"), "", Transient),
            (529, None, "", Transient),
            (429, Some("rate_limit_exceeded"), "Rate limit reached", RateLimited),
            (429, None, "", RateLimited),
            (429, Some("insufficient_quota"), "", QuotaExhausted),
            (429, None, "You exceeded your current quota, please check your plan", QuotaExhausted),
            (400, Some("context_length_exceeded"), "", ContextLength),
            (400, Some("exceed_context_size_error"), "", ContextLength),
            (
                400,
                None,
                "the request exceeds the available context size, try increasing it",
                ContextLength,
            ),
            (400, None, "This model's maximum context length is 4096 tokens.", ContextLength),
            (413, None, "prompt is too long: 210000 tokens", ContextLength),
            (400, None, "prompt too long; exceeded max context length by 12 tokens", ContextLength),
            (502, None, "input length exceeds the context length", ContextLength),
            (
                400,
                None,
                "This model's maximum prompt length is 131072 but the request contains 140000 tokens.",
                ContextLength,
            ),
            (
                400,
                None,
                "The input token count (1200000) exceeds the maximum number of tokens allowed (1048576).",
                ContextLength,
            ),
            (
                400,
                None,
                "Trying to keep the first 5000 tokens when context the overflows. However, the model is \
                 loaded with context length of only 4096 tokens",
                ContextLength,
            ),
            (400, None, "Input is too long for requested model.", ContextLength),
            (400, Some("content_filter"), "", ContentFilter),
            (
                400,
                Some("invalid_request_error"),
                "Output blocked by content filtering policy",
                ContentFilter,
            ),
            (400, Some("invalid_request_error"), "Your credit balance is too low", QuotaExhausted),
            (
                400,
                None,
                "input length and `max_tokens` exceed context limit: 199000 + 8192 > 200000",
                ContextLength,
            ),
            (200, Some("model_context_window_exceeded"), "", ContextLength),
        ];
        for (status, code, message, kind) in table {
            assert_eq!(classify(*status, *code, message), *kind, "{status} {code:?} {message}");
        }
    }

    #[test]
    fn x_should_retry_is_true_false_or_ignored() {
        let table = [
            ("true", Some(true)),
            (" False ", Some(false)),
            ("", None),
            ("1", None),
            ("true, false", None),
        ];
        for (value, expected) in table {
            let header = ("x-should-retry".parse().unwrap(), value.parse().unwrap());
            assert_eq!(should_retry(&HeaderMap::from_iter([header])), expected, "{value}");
        }
        assert_eq!(should_retry(&HeaderMap::new()), None);
    }

    #[test]
    fn error_bodies_are_read_in_every_shape() {
        let table = [
            (r#"{"error":{"message":"m","code":"c","type":"t"}}"#, "m", Some("c"), None),
            (r#"{"error":{"message":"m","code":null,"type":"t"}}"#, "m", Some("t"), None),
            (r#"{"error":{"message":"m","param":"seed","type":"t"}}"#, "m (seed)", Some("t"), None),
            (r#"{"error":{"message":"'seed'!","param":"seed"}}"#, "'seed'!", None, None),
            (r#"{"error":{"message":"m","code":502}}"#, "m", None, Some(502)),
            (r#"{"error":"model 'x' not found"}"#, "model 'x' not found", None, None),
            (
                r#"{"object":"error","message":"m","type":"t","code":400}"#,
                "m",
                Some("t"),
                Some(400),
            ),
            (r#"[{"error":{"message":"m","code":429}}]"#, "m", None, Some(429)),
            ("[]", "", None, None),
            (r#"{"detail":"Not Found"}"#, "\"Not Found\"", None, None),
            ("<html>502</html>", "<html>502</html>", None, None),
            ("", "", None, None),
        ];
        for (body, message, code, status) in table {
            let expected =
                Reported { code: code.map(str::to_owned), status, message: message.to_owned() };
            assert_eq!(read_body(body.as_bytes()), expected, "{body}");
        }
    }

    #[test]
    fn messages_are_capped_and_tell_no_secret() {
        let secrets = [SecretString::from("sk-very-secret")];
        assert_eq!(sanitised("bad key sk-very-secret\0!", &secrets), "bad key [redacted]!");
        let long = "é".repeat(2000);
        assert_eq!(sanitised(&long, &[]).len(), 1024);
        let across_the_cap = "x".repeat(1020) + "sk-very-secret";
        assert!(!sanitised(&across_the_cap, &secrets).contains("sk-"));
    }
}
