//! A JSON Schema in the subset that Anthropic's constrained decoding accepts.
//!
//! The API compiles closed objects, lists, enumerations and alternatives and rejects everything
//! else ("Structured outputs: JSON Schema limitations"). Unsupported bounds are left out: an answer
//! is validated against the whole schema in any case. A schema that would lose its structure is not
//! sent; it is in the prompt.

use serde_json::{Map, Value, json};

use super::property_names;
use crate::message::tool_schema;

/// The formats that the API enforces.
const FORMATS: [&str; 9] =
    ["date-time", "time", "date", "duration", "email", "hostname", "uri", "ipv4", "ipv6"];

/// The schema with every object closed and without bounds; `None` if it cannot be expressed.
pub(super) fn constrained(schema: &Value) -> Option<Value> {
    let sent = tool_schema::sent(schema);
    let is_free = sent.get("properties")?.as_object()?.is_empty()
        && sent.get("additionalProperties") != Some(&json!(false));
    (schema.get("type")? == "object" && !is_free).then(|| narrowed(&sent)).flatten()
}

fn narrowed(schema: &Value) -> Option<Value> {
    let keywords = schema.as_object()?;
    let mut kept = Map::new();
    for (keyword, value) in keywords {
        let value = match keyword.as_str() {
            "type" | "enum" | "const" | "description" | "title" | "required" => value.clone(),
            "format" if value.as_str().is_some_and(|format| FORMATS.contains(&format)) => {
                value.clone()
            }
            "minItems" if matches!(value.as_u64(), Some(0 | 1)) => value.clone(),
            "items" => narrowed(value)?,
            "anyOf" => value.as_array()?.iter().map(narrowed).collect::<Option<Vec<_>>>()?.into(),
            "properties" => {
                let properties = value.as_object()?.iter();
                let narrowed =
                    properties.map(|(name, schema)| Some((taken(name)?, narrowed(schema)?)));
                narrowed.collect::<Option<Map<_, _>>>()?.into()
            }
            "additionalProperties" if value.is_boolean() => continue,
            "format" | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum"
            | "multipleOf" | "minLength" | "maxLength" | "pattern" | "minItems" | "maxItems"
            | "uniqueItems" | "default" | "examples" | "deprecated" | "readOnly" | "writeOnly"
            | "$schema" | "$id" | "$comment" => continue,
            _ => return None,
        };
        kept.insert(keyword.clone(), value);
    }
    if describes_objects(keywords) {
        let is_free = !keywords.contains_key("properties")
            && keywords.get("additionalProperties") != Some(&json!(false));
        if is_free {
            return None;
        }
        kept.insert("additionalProperties".into(), false.into());
    }
    Some(kept.into())
}

fn taken(name: &str) -> Option<String> {
    property_names::is_taken(name).then(|| name.to_owned())
}

fn describes_objects(keywords: &Map<String, Value>) -> bool {
    keywords.contains_key("properties")
        || keywords.get("type").is_some_and(|types| {
            types == "object"
                || types.as_array().is_some_and(|types| types.iter().any(|each| each == "object"))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_left_out_and_objects_closed() {
        let schema = json!({"type": "object", "required": ["notes"], "properties": {
            "notes": {"type": "array", "minItems": 1, "maxItems": 9, "items": {"type": "string", "minLength": 2}},
            "when": {"type": "string", "format": "date"}, "id": {"type": "string", "format": "ulid"},
            "who": {"anyOf": [{"type": "null"}, {"type": "object", "properties": {"n": {"type": "integer"}}}]},
        }});
        let expected = json!({"type": "object", "required": ["notes"], "additionalProperties": false, "properties": {
            "notes": {"type": "array", "minItems": 1, "items": {"type": "string"}},
            "when": {"type": "string", "format": "date"}, "id": {"type": "string"},
            "who": {"anyOf": [{"type": "null"}, {"type": "object", "additionalProperties": false,
                "properties": {"n": {"type": "integer"}}}]},
        }});
        assert_eq!(constrained(&schema), Some(expected));
        let chosen =
            json!({"type": "object", "properties": {"a": {}}, "anyOf": [{"required": ["a"]}]});
        let expected =
            json!({"type": "object", "properties": {"a": {}}, "additionalProperties": false});
        assert_eq!(constrained(&chosen), Some(expected));
    }

    #[test]
    fn what_would_lose_its_shape_is_not_sent() {
        let of = |property: Value| json!({"type": "object", "properties": {"a": property}});
        let table = [
            json!(true),
            json!({"anyOf": [{"type": "object"}]}),
            json!({"type": "object"}),
            json!({"type": "array", "items": {}}),
            json!({"type": "object", "properties": {"user name": {"type": "string"}}}),
            of(json!(true)),
            of(json!({"type": "object"})),
            of(json!({"type": "object", "additionalProperties": {"type": "string"}})),
            of(json!({"$ref": "#"})),
            of(json!({"oneOf": [{"type": "string"}]})),
            of(json!({"type": "object", "properties": {}, "patternProperties": {"a": {}}})),
        ];
        for schema in table {
            assert_eq!(constrained(&schema), None, "{schema}");
        }
    }
}
