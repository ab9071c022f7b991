//! Adjusts the derived schemas for client generators.
//!
//! A generator makes a type of every schema and a member of every property, so names and `required`
//! matter. The rules apply to all schemas: a page is named after its items; all properties of a
//! response are required if they are nullable, since it has null rather than nothing; in a request
//! (a schema that forbids unknown properties) a property without a default is optional. In a choice
//! between an enum and an object, the enum is inlined and the object is a named type: some
//! generators make code that does not compile if the enum is a reference there.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

/// Marks a property that is absent at times, although it can be null or anything.
pub(super) const OPTIONAL: &str = "x-optional";

pub(super) const PREFIX: &str = "#/components/schemas/";

/// Adjusts all schemas of a document.
pub(crate) fn adjust(api: &mut Value) {
    let Some(Value::Object(derived)) = api.pointer_mut("/components/schemas").map(Value::take)
    else {
        return;
    };
    let mut schemas: BTreeMap<String, Value> = BTreeMap::new();
    let mut renamed: BTreeMap<String, String> = BTreeMap::new();
    for (name, mut schema) in derived {
        let name = match name.strip_prefix("Page_") {
            Some(row) => {
                schema["description"] = format!("A page of {}.", words(row)).into();
                let page = format!("{}Page", noun(row));
                renamed.insert(format!("{PREFIX}{name}"), format!("{PREFIX}{page}"));
                page
            }
            None => name,
        };
        set_required(&mut schema);
        schemas.insert(name, schema);
    }
    name_mixed_choices(&mut schemas);
    inline_enum_choices(&mut schemas);
    api["components"]["schemas"] = Value::Object(schemas.into_iter().collect());
    rename(api, &renamed);
    drop_null_parameters(api);
}

/// `RunSummary` and `RunDetail` are both views of a `Run`.
fn noun(name: &str) -> &str {
    name.trim_end_matches("Detail").trim_end_matches("Summary")
}

/// The plural in lower case words: `runs` for `RunSummary`.
fn words(name: &str) -> String {
    let mut words = String::new();
    for letter in noun(name).chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
    }
    if words.ends_with('s') {
        return words;
    }
    if let Some(stem) = words.strip_suffix("ry") {
        return format!("{stem}ries");
    }
    let ending = if words.ends_with("ch") { "es" } else { "s" };
    words + ending
}

/// Sets `required`.
fn set_required(schema: &mut Value) {
    for part in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
        set_required(part);
    }
    let is_request = schema["additionalProperties"] == false;
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    let mut always = Vec::new();
    for (name, property) in properties {
        let Some(property) = property.as_object_mut() else { continue };
        if property.get("propertyNames") == Some(&json!({"type": "string"})) {
            property.shift_remove("propertyNames");
        }
        if is_request {
            widen_unsigned(property);
        }
        let is_optional = property.shift_remove(OPTIONAL).is_some();
        match property.shift_remove("default") {
            Some(default) if !default.is_null() => always.push(name.clone()),
            None if !is_request && !is_optional && may_be_null(property) => {
                always.push(name.clone());
            }
            _ => {}
        }
    }
    let required = schema["required"].as_array().cloned().unwrap_or_default();
    let in_order = schema["properties"].as_object().into_iter().flat_map(Map::keys);
    let required: Vec<&String> =
        in_order.filter(|name| always.contains(name) || required.contains(&json!(name))).collect();
    if !required.is_empty() {
        schema["required"] = json!(required);
    }
}

/// The derived format of an unsigned integer is signed; widens it to the accepted range.
fn widen_unsigned(property: &mut Map<String, Value>) {
    if property.get("minimum") != Some(&json!(0)) || property.contains_key("maximum") {
        return;
    }
    match property.get("format").and_then(Value::as_str) {
        Some("int32") => property
            .extend([("format".into(), json!("int64")), ("maximum".into(), json!(u32::MAX))]),
        Some("int64") => drop(property.shift_remove("format")),
        _ => {}
    }
}

fn may_be_null(property: &Map<String, Value>) -> bool {
    let names_null =
        |kind: &Value| kind.as_array().is_some_and(|kinds| kinds.contains(&json!("null")));
    let offers_null = |choice: &Value| {
        choice.as_array().is_some_and(|all| all.contains(&json!({"type": "null"})))
    };
    let says_nothing =
        ["type", "$ref", "oneOf", "allOf"].iter().all(|key| !property.contains_key(*key));
    says_nothing
        || property.get("type").is_some_and(names_null)
        || property.get("oneOf").is_some_and(offers_null)
}

/// Turns a choice between enum values and an object, which is derived with anonymous schemas, into
/// a choice of one type of words and a named object.
fn name_mixed_choices(schemas: &mut BTreeMap<String, Value>) {
    let mut named = Vec::new();
    for (name, schema) in schemas.iter_mut() {
        let Some(choices) = schema["oneOf"].as_array() else { continue };
        let (plain, objects): (Vec<&Value>, Vec<&Value>) =
            choices.iter().partition(|choice| choice["enum"].is_array());
        let ([_, _, ..], [object]) = (&plain[..], &objects[..]) else { continue };
        let meanings: Vec<String> = plain
            .iter()
            .map(|word| {
                format!(
                    "- `{}`: {}",
                    word["enum"][0].as_str().unwrap_or_default(),
                    text(&word["description"])
                )
            })
            .collect();
        let values: Vec<&Value> = plain.iter().map(|word| &word["enum"][0]).collect();
        let mode = json!({
            "title": format!("{name}Mode"),
            "type": "string",
            "description": format!("{}\n\n{}", text(&schema["description"]), meanings.join("\n")),
            "enum": values,
        });
        let object_name = format!("{name}Object");
        named.push((object_name.clone(), (*object).clone()));
        schema["oneOf"] = json!([mode, {"$ref": format!("{PREFIX}{object_name}")}]);
    }
    schemas.extend(named);
}

/// Replaces a reference to an enum in a choice by the enum itself, under the same name. A reference has
/// nothing beside it.
fn inline_enum_choices(schemas: &mut BTreeMap<String, Value>) {
    let words: BTreeMap<String, Value> = schemas
        .iter()
        .filter(|(_, schema)| schema["type"] == "string" && schema["enum"].is_array())
        .map(|(name, schema)| {
            let mut words = schema.clone();
            words["title"] = name.as_str().into();
            (format!("{PREFIX}{name}"), words)
        })
        .collect();
    for schema in schemas.values_mut() {
        for choice in schema.get_mut("oneOf").and_then(Value::as_array_mut).into_iter().flatten() {
            let Some(target) = choice["$ref"].as_str() else { continue };
            *choice = words.get(target).cloned().unwrap_or_else(|| json!({"$ref": target}));
        }
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

pub(super) fn rename(value: &mut Value, renamed: &BTreeMap<String, String>) {
    match value {
        Value::Object(object) => {
            if let Some(Value::String(path)) = object.get_mut("$ref")
                && let Some(new) = renamed.get(path)
            {
                path.clone_from(new);
            }
            object.values_mut().for_each(|value| rename(value, renamed));
        }
        Value::Array(items) => items.iter_mut().for_each(|value| rename(value, renamed)),
        _ => {}
    }
}

/// A parameter can be absent but not null.
fn drop_null_parameters(api: &mut Value) {
    let items = api["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    let operations = items.filter_map(Value::as_object_mut).flat_map(Map::values_mut);
    let parameters = operations
        .filter_map(|operation| operation.get_mut("parameters")?.as_array_mut())
        .flatten();
    for kind in parameters.filter_map(|parameter| parameter.pointer_mut("/schema/type")) {
        let only =
            kind.as_array().and_then(|kinds| kinds.iter().find(|kind| *kind != "null")).cloned();
        if let Some(only) = only {
            *kind = only;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn adjusted(schema: &Value) -> Value {
        let mut api = json!({"components": {"schemas": {"It": schema}}, "paths": {}});
        adjust(&mut api);
        api["components"]["schemas"].take()
    }

    #[test]
    fn nullable_properties_of_a_response_are_required() {
        let answer = json!({"required": ["id"], "properties": {
            "id": {"type": "string"},
            "end": {"type": ["string", "null"]},
            "kind": {"oneOf": [{"$ref": "#/components/schemas/Kind"}, {"type": "null"}]},
            "output": {"description": "Anything."},
            "attempts": {"type": "integer"},
        }});
        assert_eq!(adjusted(&answer)["It"]["required"], json!(["id", "end", "kind", "output"]));
        let parts = adjusted(&json!({"allOf": [{"$ref": "#/components/schemas/Run"}, answer]}));
        assert_eq!(parts["It"]["allOf"][1]["required"], json!(["id", "end", "kind", "output"]));
    }

    #[test]
    fn properties_of_a_request_are_required_by_their_defaults() {
        let read = json!({"additionalProperties": false, "properties": {
            "limit": {"type": "integer", "default": 3},
            "cap": {"type": ["integer", "null"], "default": null},
            "model": {"type": ["string", "null"]},
        }});
        let schema = &adjusted(&read)["It"];
        assert_eq!(schema["required"], json!(["limit"]));
        assert!(!schema.to_string().contains("default"), "{schema}");
    }

    #[test]
    fn unsigned_integers_of_a_request_have_their_full_range() {
        let mut properties = json!({
            "count": {"type": "integer", "format": "int32", "minimum": 0},
            "sum": {"type": "integer", "format": "int64", "minimum": 0},
            "rate": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9},
        });
        let response = json!({"properties": properties});
        assert_eq!(
            adjusted(&response)["It"]["properties"],
            properties,
            "a response keeps the derived range"
        );
        let read = json!({"additionalProperties": false, "properties": properties});
        properties["count"] =
            json!({"type": "integer", "format": "int64", "minimum": 0, "maximum": u32::MAX});
        properties["sum"] = json!({"type": "integer", "minimum": 0});
        assert_eq!(adjusted(&read)["It"]["properties"], properties);
    }

    #[test]
    fn a_page_is_named_after_its_items() {
        let mut api = json!({
            "components": {"schemas": {"Page_ToolCallDetail": {"description": "One page of a list."}}},
            "paths": {"/x": {"get": {"responses": {"200": {"$ref": "#/components/schemas/Page_ToolCallDetail"}}}}},
        });
        adjust(&mut api);
        let page = &api["components"]["schemas"]["ToolCallPage"];
        assert_eq!(page["description"], "A page of tool calls.");
        assert_eq!(
            api["paths"]["/x"]["get"]["responses"]["200"]["$ref"],
            "#/components/schemas/ToolCallPage"
        );
    }

    #[test]
    fn a_choice_has_words_in_place_and_a_named_object() {
        let schemas = adjusted(&json!({"description": "When.", "oneOf": [
            {"type": "string", "enum": ["auto"], "description": "It decides."},
            {"type": "string", "enum": ["none"], "description": "Never."},
            {"type": "object", "properties": {"tool": {"type": "string"}}},
        ]}));
        assert_eq!(schemas["ItObject"]["properties"]["tool"]["type"], "string");
        assert_eq!(
            schemas["It"]["oneOf"],
            json!([
                {
                    "title": "ItMode", "type": "string", "enum": ["auto", "none"],
                    "description": "When.\n\n- `auto`: It decides.\n- `none`: Never.",
                },
                {"$ref": "#/components/schemas/ItObject"},
            ])
        );
    }

    #[test]
    fn a_choice_refers_to_objects_only() {
        let to = |name: &str| json!({"$ref": format!("{PREFIX}{name}"), "description": "Here."});
        let mut api = json!({"components": {"schemas": {
            "Rule": {"oneOf": [to("Word"), to("Thing")]},
            "Word": {"type": "string", "enum": ["deny"]},
            "Thing": {"type": "object"},
        }}, "paths": {}});
        adjust(&mut api);
        let schemas = &api["components"]["schemas"];
        assert_eq!(
            schemas["Rule"]["oneOf"],
            json!([
                {"title": "Word", "type": "string", "enum": ["deny"]},
                {"$ref": format!("{PREFIX}Thing")},
            ])
        );
        assert_eq!(schemas["Word"], json!({"type": "string", "enum": ["deny"]}));
    }

    #[test]
    fn a_parameter_is_never_null() {
        let mut api = json!({
            "components": {"schemas": {}},
            "paths": {"/x": {"get": {"parameters": [{"schema": {"type": ["integer", "null"]}}]}}},
        });
        adjust(&mut api);
        assert_eq!(api["paths"]["/x"]["get"]["parameters"][0]["schema"]["type"], "integer");
    }
}
