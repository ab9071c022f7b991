//! Names of properties that Anthropic refuses in the schema of a tool.
//!
//! The API accepts `^[a-zA-Z0-9_.-]{1,64}$`, and rejects a request if a tool has other names. Such a
//! property is left out of the schema that is sent and described in the tool's description. The model
//! may still write it: calls are checked against the whole schema.

use std::fmt::Write as _;

use serde_json::{Map, Value};

const LONGEST: usize = 64;

/// Keywords whose value has a schema for each name.
const BY_NAME: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];
/// Keywords whose value is a schema or a list of them.
const INNER: [&str; 15] = [
    "items",
    "prefixItems",
    "contains",
    "additionalProperties",
    "unevaluatedProperties",
    "unevaluatedItems",
    "propertyNames",
    "anyOf",
    "oneOf",
    "allOf",
    "not",
    "if",
    "then",
    "else",
    "contentSchema",
];

/// Whether the API takes a property of this name.
pub(super) fn is_taken(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    (1..=LONGEST).contains(&name.len()) && name.chars().all(is_allowed)
}

/// The schema without the properties that the API refuses, and a description of these; `None` if there
/// are none.
pub(super) fn left_out(schema: &Value) -> Option<(Value, String)> {
    if are_taken(schema) {
        return None;
    }
    let (mut sent, mut words) = (schema.clone(), String::new());
    leave_out(&mut sent, "", &mut words);
    Some((sent, words))
}

/// The schemas within one, each with the name that it has, if it has one.
fn inner(keywords: &Map<String, Value>) -> impl Iterator<Item = (Option<&str>, &Value)> {
    keywords.iter().flat_map(|(keyword, value)| {
        let is_inner = INNER.contains(&keyword.as_str());
        let by_name = value.as_object().filter(|_| BY_NAME.contains(&keyword.as_str()));
        let named = by_name.into_iter().flatten();
        let named = named.map(move |(name, schema)| {
            ((keyword == "properties").then_some(name.as_str()), schema)
        });
        let list = value.as_array().filter(|_| is_inner).into_iter().flatten();
        let one = Some(value).filter(|value| is_inner && value.is_object());
        named.chain(list.chain(one).map(|schema| (None, schema)))
    })
}

fn are_taken(schema: &Value) -> bool {
    let Some(keywords) = schema.as_object() else { return true };
    inner(keywords).all(|(name, schema)| name.is_none_or(is_taken) && are_taken(schema))
}

fn leave_out(schema: &mut Value, at: &str, words: &mut String) {
    let Some(keywords) = schema.as_object_mut() else { return };
    let required: Vec<String> =
        keywords.get("required").and_then(Value::as_array).map_or_else(Vec::new, |names| {
            names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        });
    let mut is_left_out = false;
    if let Some(Value::Object(properties)) = keywords.get_mut("properties") {
        properties.retain(|name, schema| {
            let is_taken = is_taken(name);
            if !is_taken {
                is_left_out = true;
                let place = if at.is_empty() { String::new() } else { format!(" in {at}") };
                let must = if required.contains(name) { "must" } else { "may" };
                let sentence =
                    format!("There {must} also be {name:?}{place}, with the schema {schema}.");
                if !words.contains(&sentence) {
                    let separator = if words.is_empty() { "" } else { "\n" };
                    let _ = write!(words, "{separator}{sentence}");
                }
            }
            is_taken
        });
    }
    if is_left_out {
        if let Some(Value::Array(names)) = keywords.get_mut("required") {
            names.retain(|name| name.as_str().is_some_and(is_taken));
        }
        keywords.retain(|keyword, value| {
            keyword != "additionalProperties" || *value != Value::Bool(false)
        });
    }
    for (keyword, value) in keywords {
        match value {
            Value::Object(by_name) if BY_NAME.contains(&keyword.as_str()) => {
                for (name, schema) in by_name {
                    let is_property = keyword == "properties";
                    let inside = match at {
                        _ if !is_property => at.to_owned(),
                        "" => format!("{name:?}"),
                        at => format!("{name:?} of {at}"),
                    };
                    leave_out(schema, &inside, words);
                }
            }
            _ if !INNER.contains(&keyword.as_str()) => {}
            Value::Array(each) => each.iter_mut().for_each(|schema| leave_out(schema, at, words)),
            schema => leave_out(schema, at, words),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_that_the_api_refuses_are_told_instead() {
        let fine = json!({"type": "object", "properties": {"a.b-c_1": {}, "properties": {"enum": [{"properties": {"a b": 1}}]}}});
        assert_eq!(left_out(&fine), None);

        let long = "x".repeat(65);
        let schema = json!({"type": "object", "required": ["user name", "id"], "additionalProperties": false, "properties": {
            "user name": {"type": "string"}, "id": {}, "ü": true, "": {}, (long.as_str()): {},
            "list": {"items": {"properties": {"$top": {"type": "integer"}, "n": {}}}},
        }});
        let (sent, words) = left_out(&schema).unwrap();
        let expected = json!({"type": "object", "required": ["id"], "properties": {
            "id": {}, "list": {"items": {"properties": {"n": {}}}},
        }});
        assert_eq!(sent, expected);
        let expected = format!(
            "There must also be \"user name\", with the schema {{\"type\":\"string\"}}.\n\
             There may also be \"ü\", with the schema true.\n\
             There may also be \"\", with the schema {{}}.\n\
             There may also be \"{long}\", with the schema {{}}.\n\
             There may also be \"$top\" in \"list\", with the schema {{\"type\":\"integer\"}}."
        );
        assert_eq!(words, expected);
    }
}
