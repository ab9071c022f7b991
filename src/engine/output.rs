//! Converts a model's text to an output object.

use serde_json::{Map, Value};

use crate::bounds::json::{self, Unreadable};

/// The output of a text answer: one Markdown code fence is stripped, a JSON object is the output,
/// everything else becomes `{"result": "<text>"}`.
pub fn from_text(text: &str) -> Value {
    let body = strip_fence(text);
    match json::read_exactly::<Value>(body) {
        Ok(Value::Object(object)) => Value::Object(object),
        _ => Value::Object(Map::from_iter([("result".to_owned(), Value::String(body.to_owned()))])),
    }
}

/// Parses a text as a JSON object, after stripping one code fence.
///
/// # Errors
/// A sentence: the text is not an object, or the object cannot be stored exactly.
pub fn object_from_text(text: &str) -> Result<Value, String> {
    match json::read_exactly(strip_fence(text)) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Err(inexact @ Unreadable::Inexact(_)) => {
            Err(format!("The model's answer cannot be kept as it is: {inexact}."))
        }
        _ => Err("The model's answer is not a JSON object.".to_owned()),
    }
}

/// Whether a text is blank: only white space and zero-width characters, in a code fence or not.
pub fn is_blank(text: &str) -> bool {
    let shows_nothing = |c: char| {
        c.is_whitespace() || matches!(c, '\u{200b}'..='\u{200d}' | '\u{2060}' | '\u{feff}')
    };
    strip_fence(text).chars().all(shows_nothing)
}

/// The text without one surrounding Markdown code fence, and without surrounding white space.
pub fn strip_fence(text: &str) -> &str {
    let trimmed = text.trim();
    let Some(opened) = trimmed.strip_prefix("```") else { return trimmed };
    let Some(inner) = opened.strip_suffix("```") else { return trimmed };
    match inner.split_once('\n') {
        Some((info, body)) if !info.contains('`') => body.trim(),
        _ => trimmed,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_blank_text_shows_nothing() {
        for blank in
            ["", " \n", "```\n\n```", "```json\n \n```", "\u{200b}\u{feff}", "\u{a0}\u{3000}"]
        {
            assert!(is_blank(blank), "{blank:?}");
        }
        for text in ["0", "```\nx\n```", "```", "`", "{}"] {
            assert!(!is_blank(text), "{text:?}");
        }
    }

    #[test]
    fn text_becomes_an_object() {
        let table = [
            ("plain words", json!({"result": "plain words"})),
            ("  padded \n", json!({"result": "padded"})),
            (r#"{"a": 1}"#, json!({"a": 1})),
            (r#"{"a": 18446744073709551615}"#, json!({"a": u64::MAX})),
            (r#"{"a": 18446744073709551616}"#, json!({"result": r#"{"a": 18446744073709551616}"#})),
            ("```json\n{\"a\": 1}\n```", json!({"a": 1})),
            ("```\n{\"a\": 1}\n```\n", json!({"a": 1})),
            ("```\nnot json\n```", json!({"result": "not json"})),
            ("[1, 2]", json!({"result": "[1, 2]"})),
            ("42", json!({"result": "42"})),
            ("", json!({"result": ""})),
            ("```", json!({"result": "```"})),
            ("see ```x``` here", json!({"result": "see ```x``` here"})),
            ("```json\n{\"a\": 1}", json!({"result": "```json\n{\"a\": 1}"})),
        ];
        for (text, expected) in table {
            assert_eq!(from_text(text), expected, "{text:?}");
        }
    }
}
