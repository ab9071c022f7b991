//! The schemas of events: one for each type, and the unions of them, which are distinguished by `type`.
//!
//! They are made of the Rust types that are stored, in the form that [`crate::event::Event::served`]
//! gives them. Generators cope badly with a choice within an object, so what serde flattens into an
//! object is one object here too: a field of only some of the choices is optional. A type that is
//! not known yet matches `UnknownEvent`, so that a client of today reads a service of tomorrow.

use serde_json::{Map, Value, json};
use utoipa::{PartialSchema, ToSchema};

use super::schemas::{OPTIONAL, PREFIX, rename};
use crate::event::{ModelDelta, RunEvent, ToolProgress};

/// Events that are streamed and not stored: type and derived schema.
const UNSTORED: [(&str, &str); 2] =
    [(ModelDelta::TYPE_NAME, "ModelDelta"), (ToolProgress::TYPE_NAME, "ToolProgress")];

/// Adds `Event`, `StreamEvent` and what they are made of.
pub(super) fn add(schemas: &mut Map<String, Value>) {
    let mut derived = Derived::default();
    derived.take::<ModelDelta>("ModelDelta");
    derived.take::<ToolProgress>("ToolProgress");
    derived.take::<RunEvent>("RunEvent");
    let variants = derived.0.shift_remove("RunEvent").unwrap_or_default();
    let mut made = Map::new();
    let mut types = Vec::new();
    for variant in variants["oneOf"].as_array().into_iter().flatten() {
        let kind = text(&variant["properties"]["type"]["enum"][0]);
        let name = pascal(kind);
        let data = &variant["properties"]["data"];
        let mut data = derived.flat(data, kind.strip_prefix("run."));
        if data["description"].is_null() || variant["properties"]["data"]["$ref"].is_null() {
            data["description"] = variant["description"].clone();
        }
        name_termination(&mut data, kind);
        made.insert(format!("{name}Data"), data);
        made.insert(format!("{name}Event"), event(kind, &name, &variant["description"], true));
        types.push((kind.to_owned(), format!("{name}Event")));
    }
    for (kind, schema) in UNSTORED {
        let data = derived.flat(&json!({"$ref": format!("{PREFIX}{schema}")}), None);
        let (name, about) = (pascal(kind), data["description"].clone());
        made.insert(format!("{name}Data"), data);
        made.insert(format!("{name}Event"), event(kind, &name, &about, false));
    }
    derived.add_referenced(&mut made);
    drop_defaults(&mut made);
    name_tags(&mut made);
    let passing = UNSTORED.map(|(kind, _)| kind);
    let known: Vec<&str> = types.iter().map(|(kind, _)| kind.as_str()).chain(passing).collect();
    made.insert("UnknownEvent".to_owned(), unknown(&known));
    made.insert("Event".to_owned(), union("An event of a run, as its journal has it.", &types));
    types.extend(passing.map(|kind| (kind.to_owned(), format!("{}Event", pascal(kind)))));
    let about = "What a stream of events consists of: the events of a run; and what has no number and is not kept, \
                 the pieces of an answer that a model is still writing and what tools say of calls under way.";
    made.insert("StreamEvent".to_owned(), union(about, &types));
    schemas.remove("Event");
    for (name, schema) in made {
        schemas.entry(name).or_insert(schema);
    }
    schemas.sort_keys();
}

/// The schemas as they are derived, by name.
#[derive(Default)]
struct Derived(Map<String, Value>);

impl Derived {
    fn take<T: ToSchema + PartialSchema>(&mut self, name: &str) {
        let mut all = Vec::new();
        T::schemas(&mut all);
        all.push((name.to_owned(), T::schema()));
        for (name, schema) in all {
            self.0.insert(name, serde_json::to_value(schema).unwrap_or_default());
        }
        if let Some(usage) = self.0.get_mut("Usage").filter(|usage| usage["title"].is_null()) {
            let mut usage = usage.take();
            name_cost(&mut usage);
            self.0.insert("ModelCallUsage".to_owned(), usage);
            self.0.shift_remove("Usage");
        }
        let renamed = [(format!("{PREFIX}Usage"), format!("{PREFIX}ModelCallUsage"))];
        self.0.values_mut().for_each(|schema| rename(schema, &renamed.clone().into()));
        if let Some(limit) = self.0.get_mut("LimitReached") {
            name_reason(limit);
        }
    }

    /// One object of a schema and the parts that serde flattens into it. `status` is the choice of
    /// an outcome that an event can have.
    fn flat(&self, schema: &Value, status: Option<&str>) -> Value {
        if let Some(name) = schema["$ref"].as_str().and_then(|path| path.strip_prefix(PREFIX)) {
            return self.flat(self.0.get(name).unwrap_or(&Value::Null), status);
        }
        let mut whole = match (schema["allOf"].as_array(), schema["oneOf"].as_array()) {
            (Some(parts), _) => merged_parts(parts.iter().map(|part| self.flat(part, status))),
            (None, Some(choices)) => {
                let choices = choices.iter().map(|choice| self.flat(choice, status));
                let fits = |choice: &Value| {
                    let tag = choice["properties"]["status"]["enum"][0].as_str();
                    tag.is_none() || status.is_none() || tag == status
                };
                merged_choices(&choices.filter(fits).collect::<Vec<_>>())
            }
            (None, None) => return schema.clone(),
        };
        whole["description"] = schema["description"].clone();
        whole
    }

    /// Adds the schemas that others refer to, each as one object where it is made of some.
    fn add_referenced(&self, made: &mut Map<String, Value>) {
        let mut open: Vec<Value> = made.values().cloned().collect();
        while let Some(value) = open.pop() {
            if let Some(name) = value["$ref"].as_str().and_then(|path| path.strip_prefix(PREFIX))
                && !made.contains_key(name)
                && let Some(schema) = self.0.get(name)
            {
                let schema = self.flat(schema, None);
                made.insert(name.to_owned(), schema.clone());
                open.push(schema);
            }
            match value {
                Value::Object(fields) => open.extend(fields.into_iter().map(|(_, value)| value)),
                Value::Array(items) => open.extend(items),
                _ => {}
            }
        }
    }
}

/// An object with the properties of all parts.
fn merged_parts(parts: impl Iterator<Item = Value>) -> Value {
    let mut whole = json!({"type": "object", "properties": {}, "required": []});
    for mut part in parts {
        if let Value::Object(properties) = part["properties"].take() {
            object(&mut whole["properties"]).extend(properties);
        }
        if let Value::Array(required) = part["required"].take() {
            list(&mut whole["required"]).extend(required);
        }
    }
    whole
}

/// An object with the properties of all choices; those that all require are required.
fn merged_choices(choices: &[Value]) -> Value {
    let mut whole = json!({"type": "object", "properties": {}, "required": []});
    let is_everywhere = |name: &str| {
        choices.iter().all(|choice| {
            let required = choice["required"].as_array();
            required.is_some_and(|required| required.iter().any(|other| other == name))
        })
    };
    for choice in choices {
        for (name, property) in choice["properties"].as_object().into_iter().flatten() {
            let known = object(&mut whole["properties"]);
            if let Some(earlier) = known.get_mut(name) {
                let more = property["enum"].as_array().cloned().unwrap_or_default();
                if let Some(words) = earlier.get_mut("enum").and_then(Value::as_array_mut) {
                    words.extend(more);
                }
                continue;
            }
            let mut property = property.clone();
            if is_everywhere(name) {
                list(&mut whole["required"]).push(json!(name));
            } else if property["$ref"].is_null() {
                property[OPTIONAL] = true.into();
            }
            object(&mut whole["properties"]).insert(name.clone(), property);
        }
    }
    whole
}

/// A value that is absent is not the default of a request: what can be absent is not required.
fn drop_defaults(schemas: &mut Map<String, Value>) {
    let schemas = schemas.values_mut().filter_map(|schema| schema.get_mut("properties"));
    for property in schemas.filter_map(Value::as_object_mut).flat_map(Map::values_mut) {
        if let Some(property) = property.as_object_mut() {
            property.shift_remove("default");
        }
    }
}

/// Gives the words that distinguish flattened choices, and objects within, a type of their own.
fn name_tags(schemas: &mut Map<String, Value>) {
    let mut named = Map::new();
    for (owner, schema) in schemas.iter_mut() {
        let owner = owner.trim_end_matches("Data").to_owned();
        for (name, property) in
            schema.get_mut("properties").and_then(Value::as_object_mut).into_iter().flatten()
        {
            if property["properties"].is_object() {
                let inner = format!("{owner}{}", pascal(name));
                object(property).shift_remove(OPTIONAL);
                named.insert(inner.clone(), property.take());
                *property = json!({"$ref": format!("{PREFIX}{inner}")});
                continue;
            }
            let Some(words) = property["enum"].as_array().cloned() else { continue };
            if let [word] = &words[..] {
                *property = json!({"type": "string", "const": word, "description": "Always this."});
                continue;
            }
            let about = format!("Which of the choices of `{name}` it is.");
            let tag = format!("{owner}{}", pascal(name));
            named.insert(
                tag.clone(),
                json!({"type": "string", "description": about, "enum": words}),
            );
            *property = json!({"$ref": format!("{PREFIX}{tag}")});
        }
    }
    schemas.extend(named);
}

fn event(kind: &str, name: &str, about: &Value, is_kept: bool) -> Value {
    let mut properties = Map::new();
    if is_kept {
        properties.insert("seq".into(), seq());
    }
    properties.extend(envelope());
    properties.insert(
        "type".into(),
        json!({"type": "string", "const": kind, "description": "The type of the event."}),
    );
    properties.insert("data".into(), json!({"$ref": format!("{PREFIX}{name}Data")}));
    let required: Vec<&String> = properties.keys().collect();
    json!({"type": "object", "description": about, "required": required, "properties": properties})
}

fn unknown(known: &[&str]) -> Value {
    let mut properties = Map::from_iter([("seq".to_owned(), seq())]);
    properties.extend(envelope());
    properties.insert(
        "type".into(),
        json!({"type": "string", "not": {"enum": known}, "description": "The type of the event."}),
    );
    properties.insert("data".into(), json!({"$ref": format!("{PREFIX}EventData")}));
    json!({
        "type": "object",
        "description": "An event of a type that this document does not define yet; clients ignore it.",
        "required": ["at", "run_id", "type", "data"],
        "properties": properties,
    })
}

fn seq() -> Value {
    json!({
        "type": "integer", "format": "int64", "minimum": 1,
        "description": "Sequence number within the run, starting at 1, without gaps.",
    })
}

fn envelope() -> Map<String, Value> {
    Map::from_iter([
        (
            "at".to_owned(),
            json!({"type": "string", "format": "date-time", "description": "When the event happened."}),
        ),
        (
            "run_id".to_owned(),
            json!({"type": "string", "format": "uuid", "description": "The run's id."}),
        ),
    ])
}

fn union(about: &str, types: &[(String, String)]) -> Value {
    let path = |name: &str| format!("{PREFIX}{name}");
    let members = types.iter().map(|(_, name)| name.as_str()).chain(["UnknownEvent"]);
    let members: Vec<Value> = members.map(|name| json!({"$ref": path(name)})).collect();
    let mapping: Map<String, Value> =
        types.iter().map(|(kind, name)| (kind.clone(), path(name).into())).collect();
    json!({
        "description": about,
        "oneOf": members,
        "discriminator": {"propertyName": "type", "mapping": mapping},
    })
}

/// As [`crate::event::Event::served`] names it, for terminal events; their last one in a stream has
/// the run.
fn name_termination(data: &mut Value, kind: &str) {
    if !matches!(kind, "run.completed" | "run.failed" | "run.cancelled") {
        return;
    }
    name_reason(data);
    let properties = object(&mut data["properties"]);
    let reason = format!("{PREFIX}TerminationReason");
    properties.entry("termination_reason").or_insert(json!({"$ref": reason}));
    let run = json!({"$ref": format!("{PREFIX}Run"), "description": "The outcome of the run; only in streams."});
    properties.insert("run".into(), run);
    let required = list(&mut data["required"]);
    if !required.contains(&json!("termination_reason")) {
        required.push(json!("termination_reason"));
    }
}

fn name_reason(schema: &mut Value) {
    let properties = object(&mut schema["properties"]);
    if let Some(reason) = properties.shift_remove("reason") {
        properties.insert("termination_reason".into(), reason);
    }
    for name in list(&mut schema["required"]) {
        if *name == "reason" {
            *name = json!("termination_reason");
        }
    }
}

fn name_cost(usage: &mut Value) {
    usage["description"] = "Tokens and cost of a model call.".into();
    let properties = object(&mut usage["properties"]);
    properties.shift_remove("cost_micro_usd");
    properties.insert(
        "total_tokens".into(),
        json!({"type": "integer", "format": "int64", "minimum": 0, "description": "Input plus output tokens."}),
    );
    properties.insert(
        "cost_usd".into(),
        json!({"type": ["number", "null"], "description": "Cost in US dollars; null if the model has no price."}),
    );
    let names: Vec<Value> = properties.keys().map(|name| json!(name)).collect();
    usage["required"] = names.into();
}

fn object(value: &mut Value) -> &mut Map<String, Value> {
    if !value.is_object() {
        *value = Value::Object(Map::new());
    }
    match value {
        Value::Object(fields) => fields,
        _ => unreachable!("it was made an object"),
    }
}

fn list(value: &mut Value) -> &mut Vec<Value> {
    if !value.is_array() {
        *value = Value::Array(Vec::new());
    }
    match value {
        Value::Array(items) => items,
        _ => unreachable!("it was made a list"),
    }
}

/// `ToolCallStarted` for `tool_call.started`.
fn pascal(name: &str) -> String {
    let capital = |word: &str| {
        let mut letters = word.chars();
        letters.next().map(|first| first.to_uppercase().chain(letters).collect::<String>())
    };
    name.split(['.', '_']).filter_map(capital).collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
#[path = "event_schemas_tests.rs"]
mod tests;
