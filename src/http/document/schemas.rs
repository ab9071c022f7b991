//! How the document's schemas read: what their derivation cannot say.
//!
//! Generators make a type of every schema and a member of every property, so names and presence
//! matter. By rule, so that no type can forget it: a page is called after its rows; an answer has
//! all its properties, a null rather than an absence, unless a property is never null; a type that
//! is read (it refuses unknown properties) says by its defaults what may be left out; a choice
//! among words is one type. Examples and errors are [`super::openapi`]'s.

use std::collections::BTreeMap;

use serde_json::{Map, Value, json};

const PREFIX: &str = "#/components/schemas/";

/// Makes the schemas of a document fit for generators.
pub(crate) fn settle(api: &mut Value) {
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
                let page = format!("{}Page", row.trim_end_matches("Detail"));
                renamed.insert(format!("{PREFIX}{name}"), format!("{PREFIX}{page}"));
                page
            }
            None => name,
        };
        settle_presence(&mut schema);
        schemas.insert(name, schema);
    }
    name_words(&mut schemas);
    api["components"]["schemas"] = Value::Object(schemas.into_iter().collect());
    rename(api, &renamed);
    settle_parameters(api);
}

/// `RunDetail` in words, as many: `runs`.
fn words(name: &str) -> String {
    let mut words = String::new();
    for letter in name.trim_end_matches("Detail").chars() {
        if letter.is_uppercase() && !words.is_empty() {
            words.push(' ');
        }
        words.push(letter.to_ascii_lowercase());
    }
    words + "s"
}

/// Which properties are always there.
fn settle_presence(schema: &mut Value) {
    for part in schema.get_mut("allOf").and_then(Value::as_array_mut).into_iter().flatten() {
        settle_presence(part);
    }
    let is_read = schema["additionalProperties"] == false;
    let Some(properties) = schema.get_mut("properties").and_then(Value::as_object_mut) else {
        return;
    };
    let mut always = Vec::new();
    for (name, property) in properties {
        let Some(property) = property.as_object_mut() else { continue };
        if property.get("propertyNames") == Some(&json!({"type": "string"})) {
            property.shift_remove("propertyNames");
        }
        if is_read {
            settle_range(property);
        }
        match property.shift_remove("default") {
            Some(default) if !default.is_null() => always.push(name.clone()),
            None if !is_read && may_be_null(property) => always.push(name.clone()),
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

/// What is read into an unsigned number takes more than the signed format that is derived for it
/// says.
fn settle_range(property: &mut Map<String, Value>) {
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

/// A choice among words and objects, derived with one nameless schema a choice, becomes a choice of
/// two named types.
fn name_words(schemas: &mut BTreeMap<String, Value>) {
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
            "type": "string",
            "description": format!("{}\n\n{}", text(&schema["description"]), meanings.join("\n")),
            "enum": values,
        });
        let (mode_name, object_name) = (format!("{name}Mode"), format!("{name}Object"));
        named.push((mode_name.clone(), mode));
        named.push((object_name.clone(), (*object).clone()));
        let choices =
            [mode_name, object_name].map(|name| json!({"$ref": format!("{PREFIX}{name}")}));
        schema["oneOf"] = json!(choices);
    }
    schemas.extend(named);
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn rename(value: &mut Value, renamed: &BTreeMap<String, String>) {
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

/// A parameter is left out and never null.
fn settle_parameters(api: &mut Value) {
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

    fn settled(schema: &Value) -> Value {
        let mut api = json!({"components": {"schemas": {"It": schema}}, "paths": {}});
        settle(&mut api);
        api["components"]["schemas"].take()
    }

    #[test]
    fn an_answer_has_all_that_may_be_null() {
        let answer = json!({"required": ["id"], "properties": {
            "id": {"type": "string"},
            "end": {"type": ["string", "null"]},
            "kind": {"oneOf": [{"$ref": "#/components/schemas/Kind"}, {"type": "null"}]},
            "output": {"description": "Anything."},
            "attempts": {"type": "integer"},
        }});
        assert_eq!(settled(&answer)["It"]["required"], json!(["id", "end", "kind", "output"]));
        let parts = settled(&json!({"allOf": [{"$ref": "#/components/schemas/Run"}, answer]}));
        assert_eq!(parts["It"]["allOf"][1]["required"], json!(["id", "end", "kind", "output"]));
    }

    #[test]
    fn what_is_read_says_by_its_defaults_what_may_be_left_out() {
        let read = json!({"additionalProperties": false, "properties": {
            "limit": {"type": "integer", "default": 3},
            "cap": {"type": ["integer", "null"], "default": null},
            "model": {"type": ["string", "null"]},
        }});
        let schema = &settled(&read)["It"];
        assert_eq!(schema["required"], json!(["limit"]));
        assert!(!schema.to_string().contains("default"), "{schema}");
    }

    #[test]
    fn an_unsigned_number_may_be_as_large_as_it_is_read() {
        let mut properties = json!({
            "count": {"type": "integer", "format": "int32", "minimum": 0},
            "sum": {"type": "integer", "format": "int64", "minimum": 0},
            "rate": {"type": "integer", "format": "int32", "minimum": 1, "maximum": 9},
        });
        let told = json!({"properties": properties});
        assert_eq!(
            settled(&told)["It"]["properties"],
            properties,
            "what is told is as it was derived"
        );
        let read = json!({"additionalProperties": false, "properties": properties});
        properties["count"] =
            json!({"type": "integer", "format": "int64", "minimum": 0, "maximum": u32::MAX});
        properties["sum"] = json!({"type": "integer", "minimum": 0});
        assert_eq!(settled(&read)["It"]["properties"], properties);
    }

    #[test]
    fn a_page_is_called_after_its_rows() {
        let mut api = json!({
            "components": {"schemas": {"Page_ToolCallDetail": {"description": "One page of a list."}}},
            "paths": {"/x": {"get": {"responses": {"200": {"$ref": "#/components/schemas/Page_ToolCallDetail"}}}}},
        });
        settle(&mut api);
        let page = &api["components"]["schemas"]["ToolCallPage"];
        assert_eq!(page["description"], "A page of tool calls.");
        assert_eq!(
            api["paths"]["/x"]["get"]["responses"]["200"]["$ref"],
            "#/components/schemas/ToolCallPage"
        );
    }

    #[test]
    fn words_and_objects_are_two_types() {
        let schemas = settled(&json!({"description": "When.", "oneOf": [
            {"type": "string", "enum": ["auto"], "description": "It decides."},
            {"type": "string", "enum": ["none"], "description": "Never."},
            {"type": "object", "properties": {"tool": {"type": "string"}}},
        ]}));
        assert_eq!(schemas["ItMode"]["enum"], json!(["auto", "none"]));
        assert_eq!(
            schemas["ItMode"]["description"],
            "When.\n\n- `auto`: It decides.\n- `none`: Never."
        );
        assert_eq!(schemas["ItObject"]["properties"]["tool"]["type"], "string");
        assert_eq!(schemas["It"]["oneOf"][1]["$ref"], "#/components/schemas/ItObject");
    }

    #[test]
    fn a_parameter_is_never_null() {
        let mut api = json!({
            "components": {"schemas": {}},
            "paths": {"/x": {"get": {"parameters": [{"schema": {"type": ["integer", "null"]}}]}}},
        });
        settle(&mut api);
        assert_eq!(api["paths"]["/x"]["get"]["parameters"][0]["schema"]["type"], "integer");
    }
}
