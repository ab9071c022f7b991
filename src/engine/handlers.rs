//! HTTP endpoints of the operator: validators and reflections of outputs.
//!
//! They get `{output, inputs, run_id}`. Their answers are trusted, but bounded in time and size. Redirects
//! are not followed, and proxy settings of the environment are ignored. A validator that failed temporarily
//! is asked again. Addresses and causes of errors are logged, and not shown to clients or models. Nor are
//! secrets that the service was given, where an answer repeats them.

use std::sync::OnceLock;
use std::time::Duration;

use reqwest::header::CONTENT_TYPE;
use reqwest::{Client, Response, redirect, retry};
use serde::Deserialize;
use serde_json::{Value, json};
use uuid::Uuid;

use crate::agents::definition::ValidatorSection;
use crate::bounds::json::{self, Unreadable};
use crate::bounds::secrets::{self, without_known_secrets};
use crate::event::ValidationError;
use crate::tls;

/// How long a connection may take to be established.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of an answer, decompressed.
const MAX_ANSWER: usize = 1024 * 1024;
/// How often a validator is asked about one output, and the first pause between, which doubles.
const TRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(250);
/// Errors kept of one validation.
const MAX_ERRORS: usize = 20;
/// Bytes of one error's pointer and message.
const MAX_MESSAGE: usize = 400;

/// The HTTP client of all endpoints; connections are pooled.
#[derive(Debug, Default)]
pub struct Handlers {
    /// Made at the first use, because reading the machine's certificates takes a while. `None` inside if it
    /// could not be set up; then every call fails.
    client: OnceLock<Option<Client>>,
}

/// Why an endpoint gave no usable answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum HandlerError {
    #[error("could not be reached")]
    Unreachable,
    #[error("did not answer within {0} seconds")]
    Late(u64),
    #[error("answered with the status {0}")]
    Status(u16),
    #[error("sent an answer of more than {MAX_ANSWER} bytes")]
    TooLarge,
    #[error("sent an answer that broke off")]
    Broken,
    #[error("sent an answer that is not the JSON that is expected")]
    NotUnderstood,
}

impl HandlerError {
    /// Whether a retry may succeed.
    fn is_transient(&self) -> bool {
        match self {
            Self::Unreachable | Self::Late(_) | Self::Broken => true,
            Self::Status(status) => *status >= 500 || [408, 425, 429].contains(status),
            Self::TooLarge | Self::NotUnderstood => false,
        }
    }
}

/// The answer of a validator.
#[derive(Debug, Deserialize)]
struct Judgement {
    valid: bool,
    #[serde(default)]
    errors: Option<Vec<Complaint>>,
}

/// One error that a validator reports.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Complaint {
    Text(String),
    Placed {
        #[serde(default)]
        pointer: Option<String>,
        message: String,
    },
}

/// The answer of a reflection in JSON.
#[derive(Debug, Deserialize)]
struct Shown {
    content: String,
}

fn client() -> Result<Client, Box<dyn std::error::Error>> {
    let client = tls::http_client()?
        .no_proxy()
        .redirect(redirect::Policy::none())
        .retry(retry::never())
        .referer(false)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .gzip(true);
    Ok(client.build()?)
}

impl Handlers {
    fn client(&self) -> Option<&Client> {
        let failed = |error| tracing::error!(%error, "the HTTP client of validators and reflections could not be set up");
        self.client.get_or_init(|| client().map_err(failed).ok()).as_ref()
    }

    /// The errors that a validator reports for an output.
    ///
    /// # Errors
    /// It gave no usable answer in several tries; why, in words.
    pub(super) async fn judged(
        &self,
        validator: &ValidatorSection,
        output: &Value,
        inputs: &Value,
        run_id: Uuid,
    ) -> Result<Vec<ValidationError>, String> {
        let body = json!({"output": output, "inputs": inputs, "run_id": run_id});
        let (mut tries, mut pause) = (1, PAUSE);
        loop {
            match self.judged_once(validator, &body, run_id).await {
                Err(error) if error.is_transient() && tries < TRIES => {
                    tokio::time::sleep(pause).await;
                    (tries, pause) = (tries + 1, 2 * pause);
                }
                answer => return answer.map_err(|error| error.to_string()),
            }
        }
    }

    async fn judged_once(
        &self,
        validator: &ValidatorSection,
        body: &Value,
        run_id: Uuid,
    ) -> Result<Vec<ValidationError>, HandlerError> {
        let answer = self.ask(&validator.url, validator.timeout_seconds, body, run_id).await;
        let judgement = answer.and_then(|(_, text)| {
            json::read::<Judgement>(&text).map_err(|error| {
                tracing::warn!(%run_id, url = validator.url, %error, "the validator's answer is not understood");
                HandlerError::NotUnderstood
            })
        });
        judgement.map(|judgement| match judgement {
            Judgement { valid: true, .. } => Vec::new(),
            Judgement { errors, .. } => complaints(errors.unwrap_or_default()),
        })
    }

    /// The text that an endpoint makes of an output: `content` of a JSON object, or a plain answer.
    pub(super) async fn reflected(
        &self,
        url: &str,
        timeout: u64,
        output: &Value,
        inputs: &Value,
        run_id: Uuid,
    ) -> Result<String, String> {
        let body = json!({"output": output, "inputs": inputs, "run_id": run_id});
        let answer = self.ask(url, timeout, &body, run_id).await;
        let text = answer.and_then(|(is_json, answer)| {
            shown(is_json, &answer).map_err(|error| {
                tracing::warn!(%run_id, url, %error, "the reflection's answer is not understood");
                HandlerError::NotUnderstood
            })
        });
        text.map_err(|error| format!("The output could not be shown: the reflection {error}."))
    }

    /// The answer to a request, and whether it says that it is JSON.
    async fn ask(
        &self,
        url: &str,
        timeout: u64,
        body: &Value,
        run_id: Uuid,
    ) -> Result<(bool, Vec<u8>), HandlerError> {
        let request = self.client().ok_or(HandlerError::Unreachable)?.post(url).json(body);
        let exchange = async {
            let response = request.send().await.map_err(|error| {
                tracing::warn!(%run_id, url, %error, cause = ?std::error::Error::source(&error), "the endpoint cannot be reached");
                HandlerError::Unreachable
            })?;
            if !response.status().is_success() {
                let status = response.status().as_u16();
                tracing::warn!(%run_id, url, status, "the endpoint refused");
                return Err(HandlerError::Status(status));
            }
            let content_type =
                response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
            let is_json =
                content_type.is_some_and(|value| value.to_ascii_lowercase().contains("json"));
            Ok((is_json, read(response, url, run_id).await?))
        };
        tokio::time::timeout(Duration::from_secs(timeout), exchange).await.unwrap_or_else(
            |_elapsed| {
                tracing::warn!(%run_id, url, timeout, "the endpoint did not answer in time");
                Err(HandlerError::Late(timeout))
            },
        )
    }
}

/// The body, up to the size limit.
async fn read(mut response: Response, url: &str, run_id: Uuid) -> Result<Vec<u8>, HandlerError> {
    let mut body = Vec::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if body.len() + chunk.len() > MAX_ANSWER => {
                tracing::warn!(%run_id, url, "the endpoint's answer is too large");
                return Err(HandlerError::TooLarge);
            }
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) => return Ok(body),
            Err(error) => {
                tracing::warn!(%run_id, url, %error, "the endpoint's answer broke off");
                return Err(HandlerError::Broken);
            }
        }
    }
}

/// The text that the model reads of a reflection's answer.
fn shown(is_json: bool, answer: &[u8]) -> Result<String, Unreadable> {
    let text = if is_json {
        json::read::<Shown>(answer)?.content
    } else {
        String::from_utf8_lossy(answer).into_owned()
    };
    Ok(without_known_secrets(&text).into_owned())
}

fn complaints(said: Vec<Complaint>) -> Vec<ValidationError> {
    let error = |complaint| {
        let (pointer, message) = match complaint {
            Complaint::Text(message) => (String::new(), message),
            Complaint::Placed { pointer, message } => (pointer.unwrap_or_default(), message),
        };
        ValidationError { pointer: shortened(pointer), message: shortened(message) }
    };
    let errors: Vec<_> = said.into_iter().take(MAX_ERRORS).map(error).collect();
    if errors.is_empty() {
        let message = "The validator did not accept the output and gave no reason.".to_owned();
        return vec![ValidationError { pointer: String::new(), message }];
    }
    errors
}

/// Without NUL characters, which no store takes, without secrets that the service was given, and without a part
/// of another one at its end.
fn shortened(mut text: String) -> String {
    text.retain(|c| c != '\0');
    let mut text = without_known_secrets(&text).into_owned();
    if text.len() > MAX_MESSAGE {
        text.truncate(secrets::head(&text, MAX_MESSAGE).len());
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_that_the_service_was_given_are_not_shown() {
        secrets::remember(["endpoints-own-secret".to_owned()]);
        let text = "it got endpoints-own-secret";
        let expected = "it got [redacted]";
        let json = json!({"content": text}).to_string();
        for (is_json, answer) in [(true, json.as_str()), (false, text)] {
            assert_eq!(shown(is_json, answer.as_bytes()).unwrap(), expected);
        }
        let placed = Complaint::Placed { pointer: Some(text.into()), message: text.into() };
        for error in complaints(vec![Complaint::Text(text.into()), placed]) {
            assert_eq!(error.message, expected);
            assert!(error.pointer.is_empty() || error.pointer == expected);
        }
        let cut = format!("{}endpoints-own-secret", "x".repeat(MAX_MESSAGE - 10));
        assert!(!shortened(cut).contains("endpoints"));
    }
}
