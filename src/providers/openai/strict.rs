//! Which JSON Schemas OpenAI can enforce while a model writes (`strict: true`).
//!
//! The API rejects a request with a strict schema outside the supported subset, so a schema counts
//! as outside unless it is known to be inside. Schemas are never rewritten.
//!
//! The subset: <https://platform.openai.com/docs/guides/structured-outputs#supported-schemas>.

use serde_json::{Map, Value};

/// Levels of subschemas.
const MAX_DEPTH: usize = 10;
const MAX_ENUM: usize = 500;
const FORMATS: [&str; 9] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"];

/// Whether an object's schema is inside the subset: known keywords only, every object closed,
/// every property required.
pub(in crate::providers) fn qualifies(schema: &Value) -> bool {
    schema.get("type").is_some_and(|kind| kind == "object") && fits(schema, MAX_DEPTH)
}

fn fits(schema: &Value, levels: usize) -> bool {
    let (Value::Object(keywords), Some(below)) = (schema, levels.checked_sub(1)) else {
        return false;
    };
    if let Some(target) = keywords.get("$ref") {
        return keywords.len() == 1
            && target.as_str().is_some_and(|target| target.starts_with('#'));
    }
    let all = |schemas: &Value| {
        schemas.as_object().is_some_and(|each| each.values().all(|s| fits(s, below)))
    };
    keywords.iter().all(|(keyword, value)| match keyword.as_str() {
        "type"
        | "const"
        | "description"
        | "title"
        | "minimum"
        | "maximum"
        | "exclusiveMinimum"
        | "exclusiveMaximum"
        | "multipleOf"
        | "minItems"
        | "maxItems"
        | "required"
        | "additionalProperties" => true,
        "enum" => value.as_array().is_some_and(|values| values.len() <= MAX_ENUM),
        "format" => value.as_str().is_some_and(|format| FORMATS.contains(&format)),
        "pattern" => value.as_str().is_some_and(|pattern| !pattern.contains("(?")),
        "items" => fits(value, below),
        "anyOf" => {
            value.as_array().is_some_and(|options| options.iter().all(|option| fits(option, below)))
        }
        "properties" | "$defs" => all(value),
        _ => false,
    }) && (keywords.contains_key("type") || keywords.contains_key("anyOf"))
        && (!has_type(keywords, "array") || keywords.contains_key("items"))
        && (!(has_type(keywords, "object") || keywords.contains_key("properties"))
            || is_closed(keywords))
}

fn has_type(keywords: &Map<String, Value>, wanted: &str) -> bool {
    match keywords.get("type") {
        Some(Value::Array(types)) => types.iter().any(|each| each == wanted),
        Some(one) => one == wanted,
        None => false,
    }
}

/// Allows no other properties and requires all of them.
fn is_closed(keywords: &Map<String, Value>) -> bool {
    let (Some(Value::Object(properties)), Some(Value::Array(required))) =
        (keywords.get("properties"), keywords.get("required"))
    else {
        return false;
    };
    keywords.get("additionalProperties") == Some(&Value::Bool(false))
        && required.len() == properties.len()
        && properties.keys().all(|key| required.iter().any(|name| name == key))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_schemas_of_the_subset_qualify() {
        let object = |property: Value| json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {"a": property}});
        let closed = object(json!({"type": ["string", "null"], "description": "x"}));
        let mut nested = closed.clone();
        for _ in 0..10 {
            nested = object(nested);
        }
        let mut with_defs = object(json!({"$ref": "#/$defs/b"}));
        with_defs["$defs"] = json!({"b": {"type": "integer", "enum": [1, 2]}});
        let table = [
            (closed.clone(), true),
            (object(closed.clone()), true),
            (object(json!({"type": "array", "items": closed, "minItems": 1})), true),
            (
                object(json!({"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]})),
                true,
            ),
            (
                json!({"type": "object", "required": [], "additionalProperties": false, "properties": {}}),
                true,
            ),
            (with_defs, true),
            (nested, false),
            (object(json!({"type": "object"})), false),
            (object(json!({"type": "array"})), false),
            (object(json!({"description": "anything"})), false),
            (object(json!({"type": "string", "minLength": 2})), false),
            (object(json!({"type": "string", "format": "uri"})), false),
            (object(json!({"type": "string", "pattern": "^(?!x)"})), false),
            (object(json!({"type": "string", "default": "x"})), false),
            (object(json!({"$ref": "#/$defs/b", "description": "x"})), false),
            (object(json!({"$ref": "https://example.com/b"})), false),
            (object(json!(true)), false),
            (
                json!({"type": "object", "additionalProperties": false, "properties": {"a": {"type": "string"}}}),
                false,
            ),
            (
                json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "string"}}}),
                false,
            ),
            (
                json!({"type": "object", "required": ["a"], "additionalProperties": false, "properties": {}}),
                false,
            ),
            (json!({"type": "object"}), false),
            (json!({"anyOf": [closed]}), false),
            (json!(true), false),
        ];
        for (schema, expected) in table {
            assert_eq!(qualifies(&schema), expected, "{schema}");
        }
    }
}
