//! What is served of a run, without secrets (`bounds::secrets`). The journal and its rows keep what
//! was said, so that a run can go on from it; whatever a route shows of them passes here.
//!
//! In an accepted output only texts are searched: a field that is named like a secret, e.g. `token`,
//! is what the caller asked for. The arguments of a call that the caller is to execute stay as they
//! are.

use std::sync::LazyLock;

use axum::Json;
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde_json::Value;

use crate::bounds::memory::MemorySemaphore;
use crate::bounds::{json, secrets};
use crate::event::{Awaited, Event, RunEvent};
use crate::fairness;
use crate::http::edge::problem::Problem;
use crate::store::StoreError;

/// Bytes that are processed on the thread that serves the request; more are left to a blocking thread.
const MAX_INLINE: usize = 32 * 1024;

/// A text without secrets.
pub(crate) fn text(text: String) -> String {
    match secrets::redacted(&text) {
        std::borrow::Cow::Owned(redacted) => redacted,
        std::borrow::Cow::Borrowed(_) => text,
    }
}

/// A document without secrets, by name or in its texts.
pub(crate) fn document(mut document: Value) -> Value {
    secrets::redact(&mut document);
    document
}

/// An output without secrets in its texts.
pub(crate) fn output(mut output: Value) -> Value {
    secrets::redact_texts(&mut output);
    output
}

/// A schema, or another description of documents, without secrets in its texts and examples.
pub(crate) fn described(mut description: Value) -> Value {
    secrets::redact_described(&mut description);
    description
}

/// An event as JSON text.
pub(crate) fn event(event: &Event) -> Result<String, serde_json::Error> {
    event_without_secrets(event.served_text()?, is_for_client(event))
}

/// The same; a large event is processed on a blocking thread.
pub(crate) async fn event_text(event: &Event) -> Result<String, StoreError> {
    let unwritable = |error: serde_json::Error| StoreError::Failed(error.to_string());
    let (text, for_client) = (event.served_text().map_err(unwritable)?, is_for_client(event));
    let made = run_by_size(text.len(), move || event_without_secrets(text, for_client)).await;
    made.map_err(|_| StoreError::Failed("an event could not be redacted".into()))?
        .map_err(unwritable)
}

/// Whether the arguments in an event are for a caller who executes the tool.
fn is_for_client(event: &Event) -> bool {
    matches!(event.what, RunEvent::ToolCallAwaitingClient(Awaited { input: None, .. }))
}

/// The text of an event without secrets.
fn event_without_secrets(text: String, for_client: bool) -> Result<String, serde_json::Error> {
    if !secrets::may_hold_secret(&text) {
        return Ok(text);
    }
    let mut whole: Value = serde_json::from_str(&text)?;
    drop(text);
    if let Some(data) = whole.get_mut("data") {
        let kept = if for_client { data.get_mut("arguments").map(Value::take) } else { None };
        secrets::redact_beside_output(data);
        if let Some(arguments) = kept {
            data["arguments"] = arguments;
        }
    }
    Ok(whole.to_string())
}

/// The JSON response that `work` makes from about so many bytes.
///
/// # Errors
/// It could not be made.
pub(crate) async fn respond<T: Serialize>(
    bytes: u64,
    work: impl FnOnce() -> Result<T, Problem> + Send + 'static,
) -> Result<Response, Problem> {
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    run_by_size(bytes, move || work().map(|answer| Json(answer).into_response())).await?
}

/// As [`respond`], for an answer that is in memory as values: large ones wait for each other.
///
/// # Errors
/// It could not be made.
pub(crate) async fn respond_in_turn<T: Serialize>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<Response, Problem> {
    static PLACES: LazyLock<MemorySemaphore> = LazyLock::new(MemorySemaphore::of_share);
    let values = bytes.saturating_mul(json::IN_MEMORY) as u64;
    let place = if bytes > MAX_INLINE { PLACES.acquire(values).await } else { None };
    let work = move || {
        let _place = place;
        Ok(work())
    };
    respond(bytes as u64, work).await
}

/// Runs work over so many bytes: here if they are few, else on a blocking thread.
///
/// # Errors
/// The work panicked.
pub(crate) async fn run_by_size<T: Send + 'static>(
    bytes: usize,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Problem> {
    if bytes <= MAX_INLINE {
        return Ok(work());
    }
    fairness::blocking(work).await.map_err(|error| Problem::internal(error.to_string()))
}
