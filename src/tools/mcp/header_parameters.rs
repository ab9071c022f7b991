//! Arguments that a server also wants in headers of the request, for intermediaries that do not read
//! bodies.
//!
//! Pure. A parameter is marked by `x-mcp-header` in its schema; a mark that cannot be followed makes
//! the tool useless over HTTP.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value};

use crate::bounds::text::quoted;

const MARK: &str = "x-mcp-header";
const PREFIX: &str = "mcp-param-";
/// Keywords whose values are data.
const DATA: [&str; 4] = ["default", "const", "enum", "examples"];
/// Keywords whose values have schemas by names of any kind.
const NAMED: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// A parameter, and the header that repeats it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeaderParameter {
    header: HeaderName,
    /// Names of properties, from the root.
    path: Vec<String>,
}

/// The marked parameters of a schema.
///
/// # Errors
/// What is wrong with a mark: a phrase.
pub(super) fn of_schema(schema: &Value) -> Result<Vec<HeaderParameter>, String> {
    let mut found = Vec::new();
    look(schema, &mut Vec::new(), &mut found)?;
    Ok(found)
}

fn look(
    schema: &Value,
    path: &mut Vec<String>,
    found: &mut Vec<HeaderParameter>,
) -> Result<(), String> {
    let Value::Object(keywords) = schema else { return Ok(()) };
    if let Some(name) = keywords.get(MARK) {
        let parameter = marked(keywords, name, path, found)?;
        found.push(parameter);
    }
    for (keyword, value) in keywords {
        match (keyword.as_str(), value) {
            ("properties", Value::Object(properties)) => {
                for (name, property) in properties {
                    path.push(name.clone());
                    look(property, path, found)?;
                    path.pop();
                }
            }
            (keyword, value) if has_mark(keyword, value) => {
                return Err(format!("has {MARK} beneath {}", quoted(keyword)));
            }
            _ => {}
        }
    }
    Ok(())
}

fn marked(
    keywords: &Map<String, Value>,
    name: &Value,
    path: &[String],
    found: &[HeaderParameter],
) -> Result<HeaderParameter, String> {
    let wrong = |why: &str| format!("has the {MARK} {}, {why}", quoted(&name.to_string()));
    let written = name.as_str().filter(|name| !name.is_empty());
    let header = written.map(|name| HeaderName::try_from(format!("{PREFIX}{name}")));
    let Some(Ok(header)) = header else { return Err(wrong("which is not a header name")) };
    if path.is_empty() || !is_primitive(keywords) {
        return Err(wrong("of something that is not a string, integer or boolean"));
    }
    if found.iter().any(|other| other.header == header) {
        return Err(wrong("which appears twice"));
    }
    Ok(HeaderParameter { header, path: path.to_vec() })
}

/// Whether its values are strings, integers, booleans or null, and not null alone.
fn is_primitive(keywords: &Map<String, Value>) -> bool {
    let is_null = |kind: &Value| kind == "null";
    let is_allowed = |kind: &Value| {
        kind.as_str().is_some_and(|kind| matches!(kind, "string" | "integer" | "boolean"))
    };
    match keywords.get("type") {
        Some(Value::Array(kinds)) => {
            kinds.iter().any(is_allowed) && kinds.iter().all(|it| is_allowed(it) || is_null(it))
        }
        Some(kind) => is_allowed(kind),
        None => {
            let either = keywords.get("anyOf").or_else(|| keywords.get("oneOf"));
            let Some(Value::Array(either)) = either else { return false };
            let of_null = |it: &Value| it.get("type").is_some_and(is_null);
            let is_one = |it: &Value| it.as_object().is_some_and(is_primitive);
            either.iter().any(is_one) && either.iter().all(|it| of_null(it) || is_one(it))
        }
    }
}

/// Whether a schema in the value of a keyword is marked.
fn has_mark(keyword: &str, value: &Value) -> bool {
    if DATA.contains(&keyword) {
        return false;
    }
    match value {
        Value::Array(items) => items.iter().any(|item| has_mark("", item)),
        Value::Object(fields) if NAMED.contains(&keyword) => {
            fields.values().any(|schema| has_mark("", schema))
        }
        Value::Object(fields) => {
            fields.contains_key(MARK) || fields.iter().any(|(name, value)| has_mark(name, value))
        }
        _ => false,
    }
}

/// The headers of a call with these arguments.
pub(super) fn headers(parameters: &[HeaderParameter], arguments: &Value) -> HeaderMap {
    let header = |it: &HeaderParameter| {
        let value = it.path.iter().try_fold(arguments, |value, name| value.get(name))?;
        let text = match value {
            Value::String(text) => text.clone(),
            Value::Bool(truth) => truth.to_string(),
            Value::Number(number) if number.is_f64() => format!("{:.0}", number.as_f64()?),
            Value::Number(number) => number.to_string(),
            Value::Null | Value::Array(_) | Value::Object(_) => return None,
        };
        Some((it.header.clone(), header_value(&text)?))
    };
    parameters.iter().filter_map(header).collect()
}

/// A value as it stands in a header: as it is, or as Base64 where it could be misread.
pub(super) fn header_value(text: &str) -> Option<HeaderValue> {
    let is_plain = text.bytes().all(|byte| matches!(byte, b' '..=b'~' | b'\t'))
        && text.trim_matches([' ', '\t']) == text
        && !(text.starts_with("=?base64?") && text.ends_with("?="));
    let value =
        if is_plain { text.to_owned() } else { format!("=?base64?{}?=", STANDARD.encode(text)) };
    HeaderValue::try_from(value).ok()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn marked_arguments_go_into_headers() {
        let schema = json!({"type": "object", "properties": {
            "region": {"type": "string", "x-mcp-header": "Region"},
            "x-mcp-header": {"type": "string"},
            "n": {"type": ["integer", "null"], "x-mcp-header": "N", "default": {"x-mcp-header": 1}},
            "in": {"type": "object", "properties": {"dry": {"type": "boolean", "x-mcp-header": "Dry"}}},
        }});
        let parameters = of_schema(&schema).unwrap();
        let all =
            json!({"region": "us-west1", "n": 42.0, "in": {"dry": false}, "x-mcp-header": "a"});
        let sent = headers(&parameters, &all);
        assert_eq!(sent.len(), 3);
        assert_eq!(sent["mcp-param-region"], "us-west1");
        assert_eq!(
            (&sent["mcp-param-n"], &sent["mcp-param-dry"]),
            (&"42".parse().unwrap(), &"false".parse().unwrap())
        );
        assert!(headers(&parameters, &json!({"n": null, "in": 7})).is_empty());
        for (text, expected) in [
            ("us-west1", "us-west1"),
            ("", ""),
            ("Hello, 世界", "=?base64?SGVsbG8sIOS4lueVjA==?="),
            (" padded ", "=?base64?IHBhZGRlZCA=?="),
            ("line1\nline2", "=?base64?bGluZTEKbGluZTI=?="),
            ("=?base64?literal?=", "=?base64?PT9iYXNlNjQ/bGl0ZXJhbD89?="),
        ] {
            assert_eq!(header_value(text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn marks_that_cannot_be_followed_are_refused() {
        let of = |property: Value| json!({"type": "object", "properties": {"a": property}});
        let mark = json!({"type": "string", "x-mcp-header": "A"});
        for schema in [
            of(json!({"type": "string", "x-mcp-header": ""})),
            of(json!({"type": "string", "x-mcp-header": 7})),
            of(json!({"type": "string", "x-mcp-header": "a b"})),
            of(json!({"type": "string", "x-mcp-header": "a\r\nb"})),
            of(json!({"type": "number", "x-mcp-header": "A"})),
            of(json!({"x-mcp-header": "A"})),
            of(json!({"type": "array", "items": mark})),
            of(json!({"anyOf": [mark]})),
            json!({"type": "object", "x-mcp-header": "A"}),
            json!({"type": "object", "$defs": {"a": mark}}),
            json!({"type": "object", "properties": {"a": mark, "b": {"type": "string", "x-mcp-header": "a"}}}),
        ] {
            assert!(of_schema(&schema).is_err(), "{schema}");
        }
        assert!(
            of_schema(&of(
                json!({"anyOf": [{"type": "string"}, {"type": "null"}], "x-mcp-header": "A"})
            ))
            .is_ok()
        );
    }
}
