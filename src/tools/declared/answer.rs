//! The result that a model reads of an HTTP tool.
//!
//! A refusal of the service is reported with its reason, so that the model can correct the call. The
//! result may be a part of a JSON answer. A long result is cut, with a note.

use encoding_rs::{Encoding, UTF_8};
use http::StatusCode;
use http::header::LOCATION;
use serde_json::Value;

use super::Wrong;
use super::file::ResponseSection;
use crate::bounds::json;
use crate::bounds::secrets;
use crate::bounds::text::bare_type;
use crate::outbound::Response;
use crate::run::Effect;
use crate::tools::characters::{content_type, declared_encoding, decoded, may_be_text, usual};
use crate::tools::guarded_work::MAY_HAVE_EFFECT;
use crate::tools::results::MAX_RESULT;

/// Bytes of an answer, and of its text.
pub(super) const MAX_ANSWER: usize = 8 * 1024 * 1024;
/// Bytes that are shown where the file says nothing.
const USUAL: usize = 48 * 1024;
/// Bytes that are shown at most of what is cut, so that there is room for the note.
const MAX_CUT: usize = MAX_RESULT - 256;
/// Bytes of a refusal.
const MAX_REFUSAL: usize = 2000;

/// What is shown.
#[derive(Clone)]
pub(super) struct Shown {
    pointer: Option<String>,
    max_bytes: usize,
}

impl Shown {
    pub(super) fn new(section: &ResponseSection) -> Result<Self, Wrong> {
        let is_pointer = |text: &String| text.is_empty() || text.starts_with('/');
        if let Some(pointer) = section.pointer.as_ref().filter(|pointer| !is_pointer(pointer)) {
            let message = format!("{pointer:?} is not a JSON pointer, e.g. /items");
            return Err(Wrong::at("response.pointer", message));
        }
        let max_bytes = section.max_bytes.unwrap_or(USUAL);
        if !(1..=MAX_RESULT).contains(&max_bytes) {
            let message = format!("{max_bytes} is not between 1 and {MAX_RESULT}");
            return Err(Wrong::at("response.max_bytes", message));
        }
        Ok(Self { pointer: section.pointer.clone(), max_bytes })
    }

    /// The answer as the model reads it, or the error.
    pub(super) fn of(&self, response: &Response, effect: Effect) -> Result<String, String> {
        let status = response.status;
        if !status.is_success() {
            return Err(refusal(response, effect));
        }
        self.shown(response).map_err(|why| match effect {
            Effect::Read => why,
            Effect::Idempotent | Effect::Once => {
                format!("The service answered {status}: it has done what it was asked for. {why}")
            }
        })
    }

    fn shown(&self, response: &Response) -> Result<String, String> {
        let Response { status, body, is_whole, .. } = response;
        if !is_whole {
            return Err(too_large(body.len()));
        }
        if body.is_empty() && self.pointer.is_none() {
            return Ok(format!("The service answered {status} without a body."));
        }
        let kind = content_type(response);
        let text_in =
            |encoding| decoded(body, encoding, MAX_ANSWER).ok_or_else(|| too_large(MAX_ANSWER));
        let text = characters(body, kind).map(text_in).transpose()?;
        let may_be_json = is_json(kind) || self.pointer.is_some();
        let read = |text: &String| match self.pointer {
            Some(_) => json::read(text).ok(),
            None => json::read_exactly(text).ok(), // else it is shown as it came
        };
        let value: Option<Value> = text.as_ref().filter(|_| may_be_json).and_then(read);
        match (value, &self.pointer) {
            (Some(value), None) => Ok(self.cut(value.to_string())),
            (Some(value), Some(pointer)) => match value.pointer(pointer) {
                Some(Value::String(text)) => Ok(self.cut(text.clone())),
                Some(part) => Ok(self.cut(part.to_string())),
                None => Err(format!("The answer has nothing at {pointer}.")),
            },
            (None, Some(_)) => Err(format!(
                "The answer is not JSON, although JSON is expected; it is {}.",
                named(kind)
            )),
            (None, None) => match text.filter(|_| !is_medium(kind)) {
                Some(text) => Ok(self.cut(text)),
                None => Err(format!(
                    "The answer is not text but {} bytes of {}.",
                    body.len(),
                    named(kind)
                )),
            },
        }
    }

    fn cut(&self, mut text: String) -> String {
        if text.len() > self.max_bytes {
            text = secrets::without_known_secrets(&text).into_owned(); // none of them is cut in two
        }
        if text.len() <= self.max_bytes {
            return text;
        }
        let all = text.len();
        let shown = secrets::head(&text, self.max_bytes.min(MAX_CUT));
        let left_out = all - shown.len();
        format!("{shown}\n[… {left_out} bytes of {all} are left out; ask for less at a time …]")
    }
}

/// The reason that the service gives for a refusal.
fn refusal(response: &Response, effect: Effect) -> String {
    let Response { status, headers, body, .. } = response;
    let encoding = characters(body, content_type(response)).unwrap_or(UTF_8);
    let (said, _, _) = encoding.decode(body);
    let said: String = said.chars().filter(|c| !c.is_control() || *c == '\n').collect();
    let said = secrets::without_known_secrets(said.trim()); // before one of them is cut in two
    let said = secrets::head(&said, MAX_REFUSAL);
    let hint = match *status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => {
            " The service refused its credentials; other arguments may not help."
        }
        StatusCode::TOO_MANY_REQUESTS => " It wants fewer requests; try again later.",
        _ if status.is_server_error() && effect == Effect::Read => {
            " It is at fault itself; try again later."
        }
        _ if status.is_server_error() => &format!(" It is at fault itself. {MAY_HAVE_EFFECT}"),
        _ if status.is_redirection() && headers.contains_key(LOCATION) => {
            " It redirects elsewhere."
        }
        _ => "",
    };
    let reason = if said.is_empty() { String::new() } else { format!(" It says: {said}") };
    format!("The service answered {status}.{hint}{reason}")
}

/// The characters of a body; nothing where it is not text.
fn characters(body: &[u8], kind: &str) -> Option<&'static Encoding> {
    if !may_be_text(body, kind) {
        return None;
    }
    let bare = bare_type(kind);
    let is_text =
        || bare.starts_with("text/") || bare.contains("json") || std::str::from_utf8(body).is_ok();
    declared_encoding(body, kind, false).or_else(|| is_text().then(|| usual(body, kind)))
}

fn too_large(most: usize) -> String {
    format!("The answer has more than {most} bytes, which is too large; request less.")
}

fn is_json(kind: &str) -> bool {
    let kind = bare_type(kind);
    kind == "application/json" || kind.ends_with("+json") || kind.is_empty()
}

fn is_medium(kind: &str) -> bool {
    let kind = bare_type(kind);
    kind.starts_with("image/") || kind.starts_with("audio/")
}

fn named(kind: &str) -> &str {
    if kind.is_empty() { "unknown type" } else { kind }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
