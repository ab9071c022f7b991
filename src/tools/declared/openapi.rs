//! Operations of an API as tools, from its description in OpenAPI 3.0 or 3.1.
//!
//! An operation becomes an entry as an operator could have written it: parameters and the body of
//! JSON are its arguments, under one schema with everything in it that the description refers to. A
//! reference that leads into itself ends in a schema that allows all; one that leads out of the
//! document is refused. The method suggests the effect, where the operator says nothing else: `GET`
//! reads, `PUT` may be repeated, all others are `once`, and `DELETE` is destructive. What a tool cannot
//! send is left out where it is optional, and reported.

mod body;
mod list;
mod server;

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::file::Entry;
use super::mapping;
use crate::run::Effect;
pub use server::Server;

/// References within one another; what is below allows all.
const MAX_REFERENCES: usize = 6;
/// Schemas within one another.
const MAX_DEPTH: usize = 14;
/// Schemas of one operation.
const MAX_SCHEMAS: usize = 4000;
/// References that name another one.
const MAX_CHAIN: usize = 16;
/// Characters of a description.
const MAX_DESCRIPTION: usize = 1000;
const METHODS: [&str; 6] = ["get", "head", "post", "put", "patch", "delete"];
/// Keywords of JSON Schema that are kept as they are.
const KEPT: [&str; 19] = [
    "const",
    "default",
    "description",
    "enum",
    "format",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "required",
    "title",
    "type",
    "uniqueItems",
    "exclusiveMinimum",
];

/// A description of an API.
pub struct Document {
    root: Value,
}

/// An operation as a tool, and what the tool does without.
pub struct Imported {
    pub entry: Entry,
    /// Each part that is left out, and why, e.g. `its body: application/xml cannot be sent`.
    pub left_out: Vec<String>,
}

/// An operation, as a list has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Listed {
    /// Its `operationId`.
    pub id: String,
    pub method: String,
    pub path: String,
}

/// An operation and where it stands.
struct Found<'a> {
    path: &'a str,
    method: &'a str,
    operation: &'a Value,
    /// Of the whole path.
    shared: &'a Value,
}

/// Where one is in the schemas of an operation.
struct Walk<'a> {
    /// References that are being followed.
    above: Vec<&'a str>,
    depth: usize,
    /// Schemas that may still come.
    left: usize,
}

impl Document {
    /// # Errors
    /// It is neither OpenAPI 3.0 nor 3.1.
    pub fn of(root: Value) -> Result<Self, String> {
        let version = root.get("openapi").and_then(Value::as_str).unwrap_or_default();
        if !version.starts_with("3.0.") && !version.starts_with("3.1.") {
            return Err("is not a description in OpenAPI 3.0 or 3.1".to_owned());
        }
        if !root.get("paths").is_some_and(Value::is_object) {
            return Err("has no paths".to_owned());
        }
        Ok(Self { root })
    }

    /// The first server.
    pub fn server(&self) -> Server {
        Server::of(self.root.pointer("/servers/0/url").and_then(Value::as_str))
    }

    /// The ids of all operations, in the order of the document.
    pub fn operation_ids(&self) -> Vec<&str> {
        self.operations().filter_map(|found| found.operation.get("operationId")?.as_str()).collect()
    }

    /// The operations that have an id.
    pub fn listed(&self) -> Vec<Listed> {
        let listed = |Found { path, method, operation, .. }: Found<'_>| {
            let id = operation.get("operationId")?.as_str()?.to_owned();
            Some(Listed { id, method: method.to_ascii_uppercase(), path: path.to_owned() })
        };
        self.operations().filter_map(listed).collect()
    }

    fn operations(&self) -> impl Iterator<Item = Found<'_>> {
        let paths = self.root["paths"].as_object().into_iter().flatten();
        paths.flat_map(|(path, shared)| {
            METHODS.iter().filter_map(move |method| {
                let operation = shared.get(*method).filter(|operation| operation.is_object())?;
                Some(Found { path, method, operation, shared })
            })
        })
    }

    /// An operation as a tool.
    ///
    /// # Errors
    /// There is none of that id, or it needs what a tool cannot send.
    pub fn operation(&self, id: &str) -> Result<Imported, String> {
        let is_meant = |found: &Found<'_>| {
            found.operation.get("operationId").and_then(Value::as_str) == Some(id)
        };
        let found = self.operations().find(is_meant).ok_or_else(|| {
            let ids = self.operation_ids();
            let some = ids.iter().take(20).copied().collect::<Vec<_>>().join(", ");
            let more = if ids.len() > 20 { ", …" } else { "" };
            format!("there is no operation {id:?}; there are: {some}{more}")
        })?;
        self.imported(id, &found)
            .map_err(|why| format!("the operation {id:?} cannot be called: {why}"))
    }

    fn imported<'a>(&'a self, id: &str, found: &Found<'a>) -> Result<Imported, String> {
        let mut left_out = Vec::new();
        let mut arguments = Arguments::default();
        let mut walk = Walk { above: Vec::new(), depth: 0, left: MAX_SCHEMAS };
        let mut path = found.path.to_owned();
        for parameter in self.parameters(found)? {
            let at = |key: &str| parameter.get(key).and_then(Value::as_str).unwrap_or_default();
            let (name, place) = (at("name"), at("in"));
            let mut schema = self.parameter_schema(parameter, &mut walk)?;
            describe(&mut schema, at("description"));
            let required = parameter.get("required") == Some(&json!(true));
            if is_spread(parameter, &schema) {
                if required || place == "path" {
                    return Err(format!("the parameter {name:?} is an object"));
                }
                left_out.push(format!("the parameter {name:?}: it is an object"));
                continue;
            }
            let list = match style(parameter, &schema, (name, place)) {
                Ok(list) => list,
                Err(why) if required || place == "path" => {
                    return Err(format!("the parameter {name:?}: {why}"));
                }
                Err(why) => {
                    left_out.push(format!("the parameter {name:?}: {why}"));
                    continue;
                }
            };
            match place {
                "path" => {
                    let argument = arguments.add(name, schema, true)?;
                    path = path.replace(&format!("{{{name}}}"), &list.template(&argument));
                }
                "query" => {
                    let argument = arguments.add(name, schema, required)?;
                    arguments.query.insert(name.to_owned(), list.template(&argument));
                }
                "header" if is_own_header(name) => {}
                "header" => {
                    let argument = arguments.add(name, schema, required)?;
                    arguments.headers.insert(name.to_owned(), list.template(&argument));
                }
                "cookie" if !required => {
                    left_out.push(format!("the parameter {name:?}: cookies are not sent"));
                }
                _ => {
                    return Err(format!(
                        "the parameter {name:?} has a place that cannot be served"
                    ));
                }
            }
        }
        let opened = path.replace("{{", "").replace("}}", "");
        if opened.contains(['{', '}']) {
            return Err("its path has parts that no parameter describes".to_owned());
        }
        let (body, body_format) = self.body(found, &mut arguments, &mut walk, &mut left_out)?;
        let entry = Entry {
            name: tool_name(id),
            description: description(found),
            effect: suggested_effect(found.method),
            destructive: found.method == "delete",
            input_schema: arguments.schema(),
            method: Some(found.method.to_ascii_uppercase()),
            path: Some(path),
            query: arguments.query,
            headers: arguments.headers,
            body,
            body_format,
            response: None,
            reconcile: None,
            command: None,
            output_schema: None,
            timeout_seconds: None,
            env: Vec::new(),
            yields: None,
            sanitizes: Vec::new(),
        };
        Ok(Imported { entry, left_out })
    }

    /// Those of the operation, and those of its path that it does not replace.
    fn parameters<'a>(&'a self, found: &Found<'a>) -> Result<Vec<&'a Value>, String> {
        let own = found.operation.get("parameters").and_then(Value::as_array);
        let shared = found.shared.get("parameters").and_then(Value::as_array);
        let mut parameters: Vec<&Value> = Vec::new();
        for parameter in own.into_iter().chain(shared).flatten() {
            let parameter = self.resolved(parameter)?;
            let is_same = |other: &&Value| {
                other.get("name") == parameter.get("name") && other.get("in") == parameter.get("in")
            };
            if !parameters.iter().any(is_same) {
                parameters.push(parameter);
            }
        }
        Ok(parameters)
    }

    fn parameter_schema<'a>(
        &'a self,
        parameter: &'a Value,
        walk: &mut Walk<'a>,
    ) -> Result<Value, String> {
        let content = || parameter.get("content")?.as_object()?.values().next()?.get("schema");
        match parameter.get("schema").or_else(content) {
            Some(schema) => self.schema(schema, walk),
            None => Ok(json!({})),
        }
    }

    /// What a reference means; a value that is none means itself.
    fn resolved<'a>(&'a self, value: &'a Value) -> Result<&'a Value, String> {
        let mut value = value;
        for _ in 0..MAX_CHAIN {
            let Some(reference) = value.get("$ref").and_then(Value::as_str) else {
                return Ok(value);
            };
            value = self.target(reference)?;
        }
        Err("a reference leads to too many others".to_owned())
    }

    fn target(&self, reference: &str) -> Result<&Value, String> {
        let shown = crate::bounds::text::quoted(reference);
        let pointer = reference
            .strip_prefix('#')
            .ok_or_else(|| format!("{shown} leads out of the document"))?;
        self.root.pointer(&decoded(pointer)).ok_or_else(|| format!("{shown} leads nowhere"))
    }

    /// A schema with everything in it that it refers to, in the words of JSON Schema 2020-12.
    fn schema<'a>(&'a self, schema: &'a Value, walk: &mut Walk<'a>) -> Result<Value, String> {
        walk.left = walk
            .left
            .checked_sub(1)
            .ok_or_else(|| format!("its schemas are more than {MAX_SCHEMAS}"))?;
        let Some(members) = schema.as_object() else {
            return Ok(if schema.is_boolean() { schema.clone() } else { json!({}) });
        };
        if let Some(reference) = members.get("$ref").and_then(Value::as_str) {
            if walk.above.contains(&reference) || walk.above.len() >= MAX_REFERENCES {
                return Ok(json!({}));
            }
            walk.above.push(reference);
            let meant = self.schema(self.target(reference)?, walk);
            walk.above.pop();
            return meant;
        }
        if walk.depth >= MAX_DEPTH {
            return Ok(json!({}));
        }
        walk.depth += 1;
        let made = self.members(members, walk);
        walk.depth -= 1;
        made.map(Value::Object)
    }

    fn members<'a>(
        &'a self,
        members: &'a Map<String, Value>,
        walk: &mut Walk<'a>,
    ) -> Result<Map<String, Value>, String> {
        let mut made = Map::new();
        for (key, value) in members.iter().filter(|(key, _)| KEPT.contains(&key.as_str())) {
            made.insert(key.clone(), value.clone());
        }
        for key in ["items", "additionalProperties", "not"] {
            if let Some(inner) = members.get(key) {
                made.insert(key.to_owned(), self.schema(inner, walk)?);
            }
        }
        for key in ["allOf", "anyOf", "oneOf"] {
            if let Some(list) = members.get(key).and_then(Value::as_array) {
                let list = list.iter().map(|inner| self.schema(inner, walk));
                made.insert(key.to_owned(), Value::Array(list.collect::<Result<_, _>>()?));
            }
        }
        if let Some(properties) = members.get("properties").and_then(Value::as_object) {
            let mut own = Map::new();
            for (name, inner) in properties {
                if inner.get("readOnly") != Some(&json!(true)) {
                    own.insert(name.clone(), self.schema(inner, walk)?);
                }
            }
            if let Some(required) = made.get_mut("required").and_then(Value::as_array_mut) {
                required.retain(|name| {
                    name.as_str()
                        .is_none_or(|name| own.contains_key(name) || !properties.contains_key(name))
                });
            }
            made.insert("properties".to_owned(), Value::Object(own));
        }
        modernised(&mut made, members);
        Ok(made)
    }
}

/// How a parameter is sent.
///
/// # Errors
/// Why it cannot be sent.
fn style(
    parameter: &Value,
    schema: &Value,
    (name, place): (&str, &str),
) -> Result<list::Style, String> {
    if place == "header" && !is_own_header(name) {
        mapping::check_header_name(name).map_err(|why| format!("it {why}"))?;
    }
    list::style(parameter, schema, place)
}

/// What OpenAPI 3.0 says in words of its own.
fn modernised(made: &mut Map<String, Value>, written: &Map<String, Value>) {
    if written.get("nullable") == Some(&json!(true)) {
        if let Some(kind) = made.get("type").filter(|kind| kind.is_string()).cloned() {
            made.insert("type".to_owned(), json!([kind, "null"]));
        }
        if let Some(Value::Array(values)) = made.get_mut("enum")
            && !values.contains(&Value::Null)
        {
            values.push(Value::Null);
        }
    }
    for (exclusive, bound) in [("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")] {
        match written.get(exclusive) {
            Some(Value::Bool(true)) => {
                if let Some(value) = made.remove(bound) {
                    made.insert(exclusive.to_owned(), value);
                }
            }
            Some(number @ Value::Number(_)) => {
                made.insert(exclusive.to_owned(), number.clone());
            }
            _ => {
                made.remove(exclusive);
            }
        }
    }
}

/// The arguments of a tool that is being made.
#[derive(Default)]
struct Arguments {
    properties: Map<String, Value>,
    required: Vec<String>,
    query: BTreeMap<String, String>,
    headers: BTreeMap<String, String>,
}

impl Arguments {
    /// An argument, and the expression that means it. Of two of one name, the second one gets
    /// another.
    fn add(&mut self, name: &str, schema: Value, required: bool) -> Result<String, String> {
        if name.is_empty() || name.len() > 128 || name.contains(['"', '\\', '\n']) {
            return Err(format!("a parameter is named {}", crate::bounds::text::quoted(name)));
        }
        let mut own = name.to_owned();
        while self.properties.contains_key(&own) {
            own.push('_');
        }
        self.properties.insert(own.clone(), schema);
        if required {
            self.required.push(own.clone());
        }
        let is_word = own.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
            && !own.starts_with(|c: char| c.is_ascii_digit());
        Ok(if is_word { format!("args.{own}") } else { format!("args[\"{own}\"]") })
    }

    fn schema(&self) -> Value {
        json!({
            "type": "object",
            "properties": self.properties,
            "required": self.required,
            "additionalProperties": false
        })
    }
}

/// Whether the members of an object would be parameters themselves, whose names are not known.
fn is_spread(parameter: &Value, schema: &Value) -> bool {
    let is_object = match schema.get("type") {
        Some(Value::Array(types)) => types.contains(&json!("object")),
        one => one == Some(&json!("object")),
    };
    is_object && parameter.get("schema").is_some()
}

/// A pointer without its encoding as part of a URL.
fn decoded(pointer: &str) -> String {
    let mut bytes = Vec::with_capacity(pointer.len());
    let mut rest = pointer.as_bytes();
    while let [first, tail @ ..] = rest {
        let code = tail.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) if *first == b'%' => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            _ => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A parameter's own words on a schema that has none.
fn describe(schema: &mut Value, words: &str) {
    if let Some(members) = schema.as_object_mut()
        && !words.is_empty()
    {
        members.insert("description".to_owned(), cut(words).into());
    }
}

/// What the document says of an operation; else its method and path.
fn description(found: &Found<'_>) -> String {
    let said =
        |key: &str| found.operation.get(key).and_then(Value::as_str).unwrap_or_default().trim();
    let (summary, long) = (said("summary"), said("description"));
    let mut text = summary.to_owned();
    if !long.is_empty() && long != summary {
        let _ = write!(text, "{}{long}", if text.is_empty() { "" } else { "\n" });
    }
    if text.is_empty() {
        text = format!("{} {}", found.method.to_ascii_uppercase(), found.path);
    }
    cut(&text)
}

fn cut(text: &str) -> String {
    match text.char_indices().nth(MAX_DESCRIPTION) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

fn suggested_effect(method: &str) -> Effect {
    match method {
        "get" | "head" => Effect::Read,
        "put" => Effect::Idempotent,
        _ => Effect::Once,
    }
}

/// An id as the name of a tool.
fn tool_name(id: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let name: String = id.chars().map(|c| if is_allowed(c) { c } else { '_' }).take(64).collect();
    let starts_well = name.starts_with(|c: char| c.is_ascii_alphanumeric());
    if starts_well { name } else { format!("op{}", &name[..name.len().min(62)]) }
}

/// Headers that OpenAPI says are none of the parameters' business, and those that are the client's.
fn is_own_header(name: &str) -> bool {
    ["accept", "content-type", "authorization", "idempotency-key"]
        .contains(&name.to_ascii_lowercase().as_str())
}
