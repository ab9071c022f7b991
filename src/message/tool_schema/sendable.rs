//! A schema in the form that every provider takes.
//!
//! The APIs demand a root with `type: object` and `properties`, and refuse combinators and references
//! there. The properties that those name are merged into the root, and constraints that the root
//! cannot express are described in words. Every list gets `items`, if only an empty schema, because
//! OpenAI demands it at any depth. Calls are checked against the original schema.

use serde_json::{Map, Value, json};

/// Keywords that a root may not have when it is sent.
const NOT_SENT: [&str; 6] = ["$ref", "allOf", "anyOf", "oneOf", "not", "enum"];
/// Keywords of a branch that the root takes over, or that demand nothing.
const MERGED: [&str; 6] = ["$ref", "type", "properties", "required", "title", "description"];
/// Branches that are looked at.
const MAX_BRANCHES: usize = 64;
/// Branches within one another.
const MAX_DEPTH: usize = 4;
/// Bytes of a condition that has no words of its own.
const MAX_CONDITION: usize = 200;
/// Bytes of the whole description in words.
const MAX_WORDS: usize = 400;

/// Schemas within one another that are looked through.
const MAX_LEVELS: usize = 64;
/// Keywords whose value is a schema, or a list of them.
const SCHEMAS: [&str; 15] = [
    "items",
    "prefixItems",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
];
/// Keywords whose value has a schema for each name.
const NAMED_SCHEMAS: [&str; 5] =
    ["properties", "patternProperties", "$defs", "definitions", "dependentSchemas"];

/// The schema to send, and a description in words of what it leaves out; `None` if the schema is sent
/// unchanged.
pub(super) fn sendable(schema: &Value) -> Option<(Value, String)> {
    let plain = with_plain_root(schema);
    let has_plain_root = plain.is_none();
    let (mut sent, words) = plain.unwrap_or_else(|| (schema.clone(), String::new()));
    let is_changed = add_items(&mut sent, MAX_LEVELS);
    (is_changed || !has_plain_root).then_some((sent, words))
}

/// Whether a schema allows lists without describing their items.
fn is_bare_list(schema: &Map<String, Value>) -> bool {
    let is_list = match schema.get("type") {
        Some(Value::String(kind)) => kind == "array",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "array"),
        _ => false,
    };
    is_list && !schema.contains_key("items")
}

/// Adds an empty `items` to lists without one, which means the same. Returns whether it added any.
fn add_items(schema: &mut Value, levels: usize) -> bool {
    let (Value::Object(keywords), Some(below)) = (schema, levels.checked_sub(1)) else {
        return false;
    };
    let mut is_changed = is_bare_list(keywords);
    if is_changed {
        keywords.insert("items".to_owned(), json!({}));
    }
    for (keyword, value) in keywords {
        let inner: Vec<&mut Value> = match value {
            Value::Object(each) if NAMED_SCHEMAS.contains(&keyword.as_str()) => {
                each.values_mut().collect()
            }
            Value::Array(each) if SCHEMAS.contains(&keyword.as_str()) => each.iter_mut().collect(),
            one if SCHEMAS.contains(&keyword.as_str()) => vec![one],
            _ => continue,
        };
        for schema in inner {
            is_changed |= add_items(schema, below);
        }
    }
    is_changed
}

/// The schema with a root that every provider takes, and what that leaves out in words.
fn with_plain_root(schema: &Value) -> Option<(Value, String)> {
    let none = Map::new();
    let written = schema.as_object().unwrap_or(&none);
    let own = written.get("properties").and_then(Value::as_object);
    let is_plain = written.get("type").is_some_and(|kind| kind == "object")
        && own.is_some()
        && !NOT_SENT.iter().any(|keyword| written.contains_key(*keyword));
    if is_plain {
        return None;
    }
    let mut found =
        Found { root: schema, left: MAX_BRANCHES, properties: Vec::new(), required: Vec::new() };
    found.branches_of(schema, true, MAX_DEPTH);
    let mut properties = own.cloned().unwrap_or_default();
    if written.get("additionalProperties") != Some(&json!(false)) {
        for (name, mut kinds) in found.properties {
            if !properties.contains_key(name) {
                let kind = if kinds.len() == 1 { kinds.remove(0) } else { json!({"anyOf": kinds}) };
                properties.insert(name.to_owned(), kind);
            }
        }
    }
    let mut required: Vec<Value> =
        written.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
    for name in found.required {
        if !required.contains(name) {
            required.push(name.clone());
        }
    }
    let kept = written.iter().filter(|(keyword, _)| !NOT_SENT.contains(&keyword.as_str()));
    let mut sent: Map<String, Value> =
        kept.map(|(keyword, value)| (keyword.clone(), value.clone())).collect();
    sent.insert("type".to_owned(), "object".into());
    sent.insert("properties".to_owned(), properties.into());
    if !required.is_empty() {
        sent.insert("required".to_owned(), required.into());
    }
    Some((sent.into(), words(schema)))
}

/// What the branches of a root demand.
struct Found<'a> {
    root: &'a Value,
    left: usize,
    /// By name, each kind once.
    properties: Vec<(&'a str, Vec<Value>)>,
    /// Of the branches that hold in any case.
    required: Vec<&'a Value>,
}

impl<'a> Found<'a> {
    fn branches_of(&mut self, schema: &'a Value, always: bool, depth: usize) {
        let list =
            |keyword: &str| schema.get(keyword).and_then(Value::as_array).into_iter().flatten();
        let meant = schema.get("$ref").and_then(|_| resolved(self.root, schema));
        for branch in meant.into_iter().chain(list("allOf")) {
            self.branch(branch, always, depth);
        }
        for branch in list("anyOf").chain(list("oneOf")) {
            self.branch(branch, false, depth);
        }
    }

    fn branch(&mut self, branch: &'a Value, always: bool, depth: usize) {
        if self.left == 0 || depth == 0 {
            return;
        }
        self.left -= 1;
        for (name, kind) in
            branch.get("properties").and_then(Value::as_object).into_iter().flatten()
        {
            let kind = match kind {
                Value::Bool(false) => continue,
                Value::Object(_) => kind.clone(),
                _ => json!({}),
            };
            match self.properties.iter_mut().find(|(known, _)| known == name) {
                Some((_, kinds)) if kinds.contains(&kind) => {}
                Some((_, kinds)) => kinds.push(kind),
                None => self.properties.push((name, vec![kind])),
            }
        }
        if always {
            self.required
                .extend(branch.get("required").and_then(Value::as_array).into_iter().flatten());
        }
        self.branches_of(branch, always, depth - 1);
    }
}

/// What a reference within the document means; a schema without one means itself.
fn resolved<'a>(root: &'a Value, schema: &'a Value) -> Option<&'a Value> {
    match schema.get("$ref").and_then(Value::as_str) {
        Some(reference) => root.pointer(reference.strip_prefix('#')?),
        None => Some(schema),
    }
}

/// The constraints of the root that it cannot express when it is sent, in words.
fn words(schema: &Value) -> String {
    let conditions = |keyword: &str| -> Vec<String> {
        let branches = schema.get(keyword).and_then(Value::as_array).into_iter().flatten();
        let branches = branches.filter(|branch| keyword != "allOf" || !is_merged(schema, branch));
        branches.map(|branch| condition(schema, branch)).collect()
    };
    let mut said = Vec::new();
    for (keyword, beginning) in [
        ("allOf", "All of these hold"),
        ("anyOf", "At least one of these holds"),
        ("oneOf", "Exactly one of these holds"),
    ] {
        let conditions = conditions(keyword);
        if !conditions.is_empty() {
            said.push(format!("{beginning}: {}.", conditions.join("; ")));
        }
    }
    if let Some(not) = schema.get("not") {
        said.push(format!("This does not hold: {}.", condition(schema, not)));
    }
    if let Some(values) = schema.get("enum") {
        said.push(format!("The arguments are one of these: {}.", shortened(values)));
    }
    cut(said.join(" "), MAX_WORDS)
}

/// Whether the merged root expresses everything that a branch demands.
fn is_merged(root: &Value, branch: &Value) -> bool {
    resolved(root, branch)
        .and_then(Value::as_object)
        .is_some_and(|members| members.keys().all(|key| MERGED.contains(&key.as_str())))
}

/// What a branch demands, in words where they are few.
fn condition(root: &Value, branch: &Value) -> String {
    let meant = resolved(root, branch).unwrap_or(branch);
    in_words(meant).unwrap_or_else(|| format!("matches {}", shortened(meant)))
}

fn in_words(branch: &Value) -> Option<String> {
    let mut said = Vec::new();
    for (keyword, value) in branch.as_object()? {
        match keyword.as_str() {
            "type" | "title" | "description" | "additionalProperties" => {}
            "required" => said.push(format!("has {}", named(value)?)),
            "not" if value.as_object()?.len() == 1 => {
                said.push(format!("has not {}", named(value.get("required")?)?));
            }
            "properties" => {
                for (name, kind) in value.as_object()? {
                    if let Some(only) = kind.get("const") {
                        said.push(format!("{name:?} is {}", shortened(only)));
                    } else if let Some(values) = kind.get("enum") {
                        said.push(format!("{name:?} is one of {}", shortened(values)));
                    }
                }
            }
            _ => return None,
        }
    }
    (!said.is_empty()).then(|| said.join(", "))
}

fn named(names: &Value) -> Option<String> {
    let names = names.as_array().filter(|names| !names.is_empty())?;
    Some(names.iter().map(Value::to_string).collect::<Vec<_>>().join(" and "))
}

fn shortened(value: &Value) -> String {
    cut(value.to_string(), MAX_CONDITION)
}

fn cut(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push('…');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_every_provider_takes_is_sent_as_it_is() {
        let nested = json!({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]});
        for schema in [
            json!({"type": "object", "properties": {}}),
            json!({"type": "object", "properties": {"a": nested}, "$defs": {"a": {}}}),
        ] {
            assert_eq!(sendable(&schema), None, "{schema}");
        }
    }

    #[test]
    fn lists_say_what_their_items_are() {
        let list = json!({"type": "array"});
        let whole = json!({"type": "array", "items": {}});
        let around = |list: &Value| {
            json!({"type": "object", "description": "array", "default": {"type": "array"},
            "properties": {
                "type": list, "plain": {"type": "string", "enum": [{"type": "array"}]},
                "said": {"type": "array", "items": {"type": "string"}},
                "deep": {"anyOf": [{"type": "null"}, {"type": "array", "items": list}]},
                "pair": {"type": "array", "prefixItems": [list], "items": false},
                "map": {"type": "object", "additionalProperties": list}},
            "$defs": {"a": {"not": list}}})
        };
        assert_eq!(sendable(&around(&list)), Some((around(&whole), String::new())));
        assert_eq!(sendable(&around(&whole)), None);
        let nullable = json!({"type": "object", "properties": {"a": {"type": ["array", "null"]}}});
        let (sent, _) = sendable(&nullable).unwrap();
        assert_eq!(sent["properties"]["a"], json!({"type": ["array", "null"], "items": {}}));
        let branch = json!({"type": "object", "anyOf": [{"properties": {"a": list}}]});
        let (sent, _) = sendable(&branch).unwrap();
        assert_eq!(sent["properties"]["a"], whole);
        let mut deep = json!({"type": "array"});
        for _ in 0..100 {
            deep = json!({"type": "object", "properties": {"a": deep}});
        }
        assert_eq!(sendable(&deep), None, "its innermost list is beyond what is looked at");
    }

    #[test]
    fn roots_become_objects_with_properties() {
        let object = json!({"type": "object", "properties": {}});
        for schema in [
            json!({}),
            json!(true),
            json!({"type": "object"}),
            json!({"type": ["object", "null"]}),
            json!({"type": ["null", "object"], "properties": {}}),
        ] {
            assert_eq!(sendable(&schema), Some((object.clone(), String::new())), "{schema}");
        }
    }

    #[test]
    fn conditions_are_said() {
        let of = |keyword: &str, branches: Value| json!({"type": "object", "properties": {"id": {}, "name": {}}, keyword: branches});
        let (has_id, has_name) = (json!({"required": ["id"]}), json!({"required": ["name"]}));
        let plain = json!({"type": "object", "properties": {"id": {}, "name": {}}});
        for (keyword, branches, words) in [
            (
                "anyOf",
                json!([has_id, has_name]),
                r#"At least one of these holds: has "id"; has "name"."#,
            ),
            (
                "oneOf",
                json!([{"properties": {"id": {"const": "a"}}, "required": ["id", "name"]}, {"not": has_id}]),
                r#"Exactly one of these holds: "id" is "a", has "id" and "name"; has not "id"."#,
            ),
            ("not", has_id.clone(), r#"This does not hold: has "id"."#),
            ("enum", json!([{"id": 1}]), r#"The arguments are one of these: [{"id":1}]."#),
            (
                "allOf",
                json!([{"if": {}, "then": {}}, true]),
                r#"All of these hold: matches {"if":{},"then":{}}; matches true."#,
            ),
        ] {
            let (sent, said) = sendable(&of(keyword, branches)).unwrap();
            assert_eq!((sent, said.as_str()), (plain.clone(), words));
        }
        let many: Vec<Value> = (0..1000).map(|n| json!({"required": [format!("é{n}")]})).collect();
        let (_, said) = sendable(&of("anyOf", many.into())).unwrap();
        assert!(said.len() <= MAX_WORDS + 3 && said.ends_with('…'), "{said}");
    }

    #[test]
    fn what_branches_name_is_in_the_root() {
        let union = json!({"oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}], "$defs": {
            "a": {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]},
            "b": {"type": "object", "properties": {"kind": {"const": "b"}, "n": {"type": "integer"}}, "required": ["kind"]}}});
        let (sent, words) = sendable(&union).unwrap();
        assert_eq!(
            sent["properties"],
            json!({"kind": {"anyOf": [{"const": "a"}, {"const": "b"}]}, "n": {"type": "integer"}})
        );
        assert_eq!((sent.get("required"), &sent["$defs"]), (None, &union["$defs"]));
        assert!(
            words.contains(r#""kind" is "a""#) && words.contains(r#""kind" is "b""#),
            "{words}"
        );

        let referred = json!({"$ref": "#/$defs/a", "$defs": {
            "a": {"properties": {"x": {}}, "required": ["x"], "allOf": [{"$ref": "#/$defs/a"}]}}});
        let (sent, words) = sendable(&referred).unwrap();
        assert_eq!((&sent["properties"], &sent["required"]), (&json!({"x": {}}), &json!(["x"])));
        assert_eq!((sent.get("$ref"), words.as_str()), (None, ""));

        let merged = json!({"type": "object", "required": ["a"], "allOf": [
            {"properties": {"a": {"type": "string"}, "b": false, "c": true}, "required": ["a", "c"]}]});
        let (sent, words) = sendable(&merged).unwrap();
        assert_eq!(
            sent,
            json!({"type": "object", "required": ["a", "c"], "properties": {"a": {"type": "string"}, "c": {}}})
        );
        assert_eq!(words, "");

        let closed = json!({"type": "object", "additionalProperties": false, "properties": {"a": {}},
            "anyOf": [{"properties": {"b": {}}}, {"required": ["a"]}]});
        let (sent, _) = sendable(&closed).unwrap();
        assert_eq!(sent["properties"], json!({"a": {}}), "no other is allowed");
    }
}
