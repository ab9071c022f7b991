//! Tool arguments for APIs that take nothing but a JSON object.
//!
//! The arguments are sent back byte for byte as the model wrote them. If they are not an object,
//! their text is wrapped in one, so that the model sees its mistake next to the error result.

use crate::bounds::json;
use serde::Serialize;
use serde_json::value::RawValue;
use serde_json::{Map, Value};

#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum ArgumentsObject<'a> {
    Object(&'a RawValue),
    /// Anything else.
    Malformed {
        malformed_json: &'a str,
    },
}

impl<'a> ArgumentsObject<'a> {
    /// Empty text counts as `{}`.
    pub(super) fn new(arguments: &'a str) -> Self {
        let text = if arguments.trim().is_empty() { "{}" } else { arguments };
        let is_object = !text.contains("\\u0000") // which not every server reads
            && json::read::<Map<String, Value>>(text).is_ok();
        match serde_json::from_str(text) {
            Ok(object) if is_object => Self::Object(object),
            _ => Self::Malformed { malformed_json: arguments },
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_are_an_object_whatever_the_model_wrote() {
        let table = [
            (r#"{"a" : 1.50}"#, json!({"a": 1.5})),
            (" {} ", json!({})),
            ("", json!({})),
            ("  ", json!({})),
            (r#"{"a": "#, json!({"malformed_json": "{\"a\": "})),
            ("[1]", json!({"malformed_json": "[1]"})),
            ("\"text\"", json!({"malformed_json": "\"text\""})),
            ("null", json!({"malformed_json": "null"})),
            ("{} {}", json!({"malformed_json": "{} {}"})),
            (r#"{"a": "\u0000"}"#, json!({"malformed_json": r#"{"a": "\u0000"}"#})),
        ];
        for (arguments, expected) in table {
            let sent = serde_json::to_string(&ArgumentsObject::new(arguments)).unwrap();
            assert_eq!(serde_json::from_str::<Value>(&sent).unwrap(), expected, "{arguments}");
        }
        let deep = format!("{{\"a\": {}{}}}", "[".repeat(10_000), "]".repeat(10_000));
        assert!(
            matches!(ArgumentsObject::new(&deep), ArgumentsObject::Malformed { .. }),
            "deeper than anybody reads"
        );
    }

    #[test]
    fn an_object_keeps_its_bytes() {
        let written = r#"{"b" : 1.50, "a":"\u00e9"}"#;
        assert_eq!(serde_json::to_string(&ArgumentsObject::new(written)).unwrap(), written);
    }
}
