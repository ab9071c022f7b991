//! Turns the answer of a server's tool into the text that a model reads.
//!
//! Text is passed on; other content is only mentioned. Structured content is passed on if there is no
//! text. The answer may also be a question that must be answered first.

use serde_json::Value;

use crate::bounds::secrets;
use crate::bounds::text::{quoted, shortened};
use crate::tools::results::MAX_RESULT;

/// Parts of one answer that are looked at.
const MAX_PARTS: usize = 256;
/// Bytes of either end of an answer that is too long.
const MAX_END: usize = MAX_RESULT / 2 - 512;

/// What a result is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Complete,
    InputRequired,
}

/// The type that a result states.
///
/// # Errors
/// The stated type, if it is unknown.
pub(super) fn kind(result: &Value) -> Result<Kind, String> {
    match &result["resultType"] {
        Value::Null => Ok(Kind::Complete), // as in the old era
        Value::String(kind) if kind == "complete" => Ok(Kind::Complete),
        Value::String(kind) if kind == "input_required" => Ok(Kind::InputRequired),
        kind => Err(quoted(kind.as_str().unwrap_or_default())),
    }
}

/// The answer, or the error, as the model reads it.
pub(super) fn of(result: &Value) -> Result<String, String> {
    let parts = result["content"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut text: Vec<String> = parts.iter().take(MAX_PARTS).map(part).collect();
    if parts.len() > MAX_PARTS {
        text.push(format!("[{} further parts are left out]", parts.len() - MAX_PARTS));
    }
    let structured = &result["structuredContent"];
    if !parts.iter().take(MAX_PARTS).any(says_something) && !structured.is_null() {
        text.retain(|part| !part.trim().is_empty());
        text.push(structured.to_string());
    }
    let text = ends_of(text.join("\n"));
    match (result["isError"].as_bool(), text.is_empty()) {
        (Some(true), true) => Err("The tool failed and does not say why.".to_owned()),
        (Some(true), false) => Err(text),
        (_, true) if result.is_object() => Ok("The tool answered nothing.".to_owned()),
        (_, true) => Err("The server's answer does not follow the protocol.".to_owned()),
        (_, false) => Ok(text),
    }
}

/// Whether it is text, and not blank.
fn says_something(part: &Value) -> bool {
    part["type"] == "text" && part["text"].as_str().is_some_and(|text| !text.trim().is_empty())
}

fn part(part: &Value) -> String {
    let word = |key: &str| shortened(part[key].as_str().unwrap_or("unknown type"));
    match part["type"].as_str() {
        Some("text") => part["text"].as_str().unwrap_or_default().to_owned(),
        Some("resource") => {
            let resource = &part["resource"];
            let uri = shortened(resource["uri"].as_str().unwrap_or_default());
            match resource["text"].as_str() {
                Some(text) => format!("[{uri}]\n{text}"),
                None => format!("[{uri} is not text and is omitted]"),
            }
        }
        Some("resource_link") => format!("[see {}]", word("uri")),
        Some(kind @ ("image" | "audio")) => {
            let size =
                part["data"].as_str().map_or(0, |data| data.trim_end_matches('=').len() * 3 / 4);
            format!("[{kind} of {}, {size} bytes, left out]", word("mimeType"))
        }
        _ => "[content of an unknown type, left out]".to_owned(),
    }
}

/// A text without its middle if it is too long, and without characters that no store accepts. Known
/// secrets are removed first, so that none is cut in two.
fn ends_of(mut text: String) -> String {
    text.retain(|c| c != '\0');
    if text.len() > 2 * MAX_END {
        text = secrets::without_known_secrets(&text).into_owned();
    }
    if text.len() <= 2 * MAX_END {
        return text;
    }
    let (head, tail) = (secrets::head(&text, MAX_END), secrets::tail(&text, MAX_END));
    let omitted = text.len() - head.len() - tail.len();
    format!("{head}\n[… {omitted} bytes left out; ask for less at a time …]\n{tail}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn answers_become_text() {
        let text = |text: &str| json!({"type": "text", "text": text});
        let image = json!({"type": "image", "mimeType": "image/png", "data": "AAAA"});
        for (result, expected) in [
            (json!({"content": [text("a"), text("b")]}), Ok("a\nb")),
            (json!({"content": [text("no")], "isError": true}), Err("no")),
            (json!({"content": [], "isError": true}), Err("The tool failed and does not say why.")),
            (json!({"content": [], "structuredContent": {"n": 1}}), Ok(r#"{"n":1}"#)),
            (json!({"content": [text("two")], "structuredContent": {"n": 2}}), Ok("two")),
            (
                json!({"content": [text(" "), image], "structuredContent": {"n": 1}}),
                Ok("[image of image/png, 3 bytes, left out]\n{\"n\":1}"),
            ),
            (
                json!({"content": [text("two"), image], "structuredContent": {"n": 2}}),
                Ok("two\n[image of image/png, 3 bytes, left out]"),
            ),
            (
                json!({"content": [{"type": "resource_link", "uri": "u"}], "structuredContent": [1]}),
                Ok("[see u]\n[1]"),
            ),
            (
                json!({"content": [image], "structuredContent": {"n": 1}, "isError": true}),
                Err("[image of image/png, 3 bytes, left out]\n{\"n\":1}"),
            ),
            (json!({}), Ok("The tool answered nothing.")),
            (json!({"content": [image]}), Ok("[image of image/png, 3 bytes, left out]")),
            (
                json!({"content": [{"type": "image", "mimeType": "image/png", "data": "aGk="}]}),
                Ok("[image of image/png, 2 bytes, left out]"),
            ),
            (
                json!({"content": [{"type": "resource", "resource": {"uri": "u", "text": "t"}}]}),
                Ok("[u]\nt"),
            ),
            (json!({"content": [7]}), Ok("[content of an unknown type, left out]")),
            (Value::Null, Err("The server's answer does not follow the protocol.")),
        ] {
            let expected = expected.map(str::to_owned).map_err(str::to_owned);
            assert_eq!(of(&result), expected, "{result}");
        }
        let kind = |kind: Value| super::kind(&json!({"resultType": kind}));
        assert_eq!(super::kind(&json!({})), Ok(Kind::Complete));
        assert_eq!(kind(json!("complete")), Ok(Kind::Complete));
        assert_eq!(kind(json!("input_required")), Ok(Kind::InputRequired));
        assert_eq!(kind(json!("task")), Err("\"task\"".to_owned()));
        assert!(kind(json!(7)).is_err());
        let long = of(&json!({"content": [text(&"ä".repeat(100_000))]})).unwrap();
        assert!(long.len() < MAX_RESULT && long.contains("bytes left out"));
        let many = json!({"content": vec![text("x"); 1000]});
        assert!(of(&many).unwrap().ends_with("[744 further parts are left out]"));
        secrets::remember(["a-secret-of-the-service".to_owned()]);
        let (head, tail) = ("x".repeat(MAX_END - 5), "y".repeat(MAX_RESULT));
        let cut = text(&format!("{head}a-secret-of-the-service{tail}"));
        assert!(!of(&json!({"content": [cut]})).unwrap().contains("a-sec"));
    }
}
