//! The body of an operation: as JSON, else as a form, and what of it cannot be sent.

use serde_json::{Map, Value, json};

use super::{Arguments, Document, Found, Walk, describe};
use crate::bounds::text::bare_type;
use crate::tools::declared::file::BodyFormat;
use crate::tools::declared::form;

/// Depth of `allOf` in the schema of a form.
const MAX_PARTS: usize = 8;

impl Document {
    /// The template of the body, whose only argument is added, and how it is sent.
    pub(super) fn body<'a>(
        &'a self,
        found: &Found<'a>,
        arguments: &mut Arguments,
        walk: &mut Walk<'a>,
        left_out: &mut Vec<String>,
    ) -> Result<(Option<Value>, BodyFormat), String> {
        let none = (None, BodyFormat::Json);
        let Some(body) = found.operation.get("requestBody") else { return Ok(none) };
        let body = self.resolved(body)?;
        let required = body.get("required") == Some(&json!(true));
        let contents = body.get("content").and_then(Value::as_object);
        let is_bodyless = matches!(found.method, "get" | "head");
        let chosen = contents.filter(|_| !is_bodyless).and_then(chosen);
        let Some((kind, content, format)) = chosen else {
            let kinds: Vec<&str> =
                contents.into_iter().flat_map(Map::keys).map(String::as_str).collect();
            let why = match kinds.join(", ") {
                _ if is_bodyless => {
                    format!("{} is sent without one", found.method.to_ascii_uppercase())
                }
                kinds if kinds.is_empty() => "it has no media type".to_owned(),
                kinds => format!("{kinds} cannot be sent"),
            };
            if required {
                return Err(format!("its body is needed, but {why}"));
            }
            left_out.push(format!("its body: {why}"));
            return Ok(none);
        };
        let mut schema = match content.get("schema") {
            Some(schema) => self.schema(schema, walk)?,
            None => json!({}),
        };
        if format == BodyFormat::Form {
            schema = flat(schema, content.get("encoding"), left_out)?;
        }
        describe(&mut schema, body.get("description").and_then(Value::as_str).unwrap_or_default());
        let argument = arguments.add("body", schema, required)?;
        if format == BodyFormat::Json && kind != "application/json" && kind != "*/*" {
            arguments.headers.insert("content-type".to_owned(), kind.to_owned());
        }
        Ok((Some(Value::String(format!("{{{{ {argument} }}}}"))), format))
    }
}

/// The media type in which a body is sent, and what is said of it: JSON before a form.
fn chosen(contents: &Map<String, Value>) -> Option<(&str, &Value, BodyFormat)> {
    let of = |format, is_meant: fn(&str) -> bool| {
        let found = contents.iter().find(|(kind, _)| is_meant(&bare_type(kind)));
        found.map(|(kind, content)| (kind.as_str(), content, format))
    };
    of(BodyFormat::Json, |kind| kind == "application/json" || kind.ends_with("+json"))
        .or_else(|| of(BodyFormat::Form, |kind| kind == form::TYPE))
        .or_else(|| of(BodyFormat::Json, |kind| kind == "*/*"))
}

/// The schema of a form without the members that it cannot hold.
fn flat(
    schema: Value,
    encoding: Option<&Value>,
    left_out: &mut Vec<String>,
) -> Result<Value, String> {
    let Value::Object(mut form) = schema else { return Ok(json!({"type": "object"})) };
    if form.get("type").is_some_and(|kind| kind != "object" && *kind != json!(["object", "null"])) {
        return Err("its body is a form, but no object".to_owned());
    }
    form.insert("type".to_owned(), "object".into());
    merge_parts(&mut form, MAX_PARTS);
    let required = form.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
    let Some(Value::Object(members)) = form.get_mut("properties") else {
        return Ok(form.into());
    };
    let mut needed = None;
    members.retain(|name, member| {
        let why = if is_nested(member) {
            "it is an object or a list of objects, which a form cannot hold"
        } else if is_joined(encoding.and_then(|encoding| encoding.get(name)), member) {
            "it is a list in one value, which is not supported"
        } else {
            return true;
        };
        if required.contains(&Value::from(name.as_str())) {
            needed = Some(format!("the member {name:?} of its form is needed, but {why}"));
        }
        left_out.push(format!("the member {name:?} of its form: {why}"));
        false
    });
    needed.map_or_else(|| Ok(form.into()), Err)
}

/// Takes the members of all parts of an `allOf` into the object itself.
fn merge_parts(form: &mut Map<String, Value>, depth: usize) {
    let Some(Value::Array(parts)) = form.remove("allOf") else { return };
    for part in parts {
        let Value::Object(mut part) = part else { continue };
        if depth > 0 {
            merge_parts(&mut part, depth - 1);
        }
        if let Some(Value::Object(members)) = part.remove("properties") {
            let own = form.entry("properties").or_insert_with(|| json!({}));
            if let Some(own) = own.as_object_mut() {
                own.extend(members);
            }
        }
        if let Some(Value::Array(names)) = part.remove("required") {
            let own = form.entry("required").or_insert_with(|| json!([]));
            if let Some(own) = own.as_array_mut() {
                for name in names {
                    if !own.contains(&name) {
                        own.push(name);
                    }
                }
            }
        }
    }
}

fn is_kind(schema: &Value, kind: &str) -> bool {
    match schema.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|it| it == kind),
        one => one.is_some_and(|it| it == kind),
    }
}

/// Whether only an object, or a list of more than scalars, matches a schema.
fn is_nested(schema: &Value) -> bool {
    let any = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
    let all_nested = |key: &str| any(key).count() > 0 && any(key).all(is_nested);
    let of_lists = |items: &Value| is_kind(items, "array") || is_nested(items);
    is_kind(schema, "object")
        || schema.get("properties").is_some()
        || schema.get("items").is_some_and(of_lists)
        || any("allOf").any(is_nested)
        || all_nested("anyOf")
        || all_nested("oneOf")
}

/// Whether a list is sent otherwise than as a member for each of its items.
fn is_joined(encoding: Option<&Value>, member: &Value) -> bool {
    let Some(encoding) = encoding.filter(|_| is_kind(member, "array")) else { return false };
    let style = encoding.get("style").and_then(Value::as_str).unwrap_or("form");
    style != "form" || encoding.get("explode") == Some(&json!(false))
}
