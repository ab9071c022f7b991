//! Checks a schema before it is compiled, and prepares it so that its validation can be counted.
//!
//! Schemas are walked as the library does: through the keywords that hold schemas. The target of a
//! reference counts as a schema, too.

use serde_json::{Map, Value, json};

use super::Author;
use crate::bounds::Refused;

/// Bytes of one schema of a caller, as JSON.
pub const MAX_CALLER_BYTES: usize = 32 * 1024;
/// Patterns of one schema of a caller.
pub const MAX_CALLER_PATTERNS: usize = 64;

/// Total number of schemas that schemas with `unevaluated…` apply to the same value, also through references. The
/// library compiles all of them again for each such schema.
const MAX_APPLIED: usize = 2_000;

/// The limits of a schema.
struct Limits {
    bytes: usize,
    patterns: usize,
    schemas: usize,
    references: usize,
    nesting: usize,
}

const OF_OPERATORS: Limits = Limits {
    bytes: 1024 * 1024,
    patterns: 1_000,
    schemas: 20_000,
    references: 1_000,
    nesting: 100,
};
const OF_CALLERS: Limits = Limits {
    bytes: MAX_CALLER_BYTES,
    patterns: MAX_CALLER_PATTERNS,
    schemas: 1_000,
    references: 100,
    nesting: 32,
};

/// Keywords that hold a schema.
const ONE: [&str; 13] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
];
/// Keywords that hold a list of schemas.
const LISTS: [&str; 5] = ["allOf", "anyOf", "oneOf", "prefixItems", "items"];
/// Keywords that hold schemas by name.
pub const TABLES: [&str; 6] =
    ["$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"];
/// Keywords that hold values, which are no schemas.
pub const VALUES: [&str; 5] = ["const", "default", "enum", "example", "examples"];
/// Keywords that a caller's schema may not have: they are dispensable, and costly to validate.
const NOT_OF_CALLERS: [&str; 7] = [
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "$vocabulary",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Keywords whose schema is applied by `unevaluated…`.
const APPLIED: [&str; 9] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "else",
    "if",
    "not",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
];

/// Checks the limits of a schema before it is passed to the library.
pub(super) fn check(schema: &Value, author: Author) -> Result<(), Refused> {
    let limits = match author {
        Author::Operator => OF_OPERATORS,
        Author::Caller => OF_CALLERS,
    };
    let refused = |what: String| Err(Refused(what));
    let nesting = nesting(schema);
    if nesting > limits.nesting {
        return refused(format!("is nested {nesting} levels deep, more than {}", limits.nesting));
    }
    let bytes = schema.to_string().len();
    if bytes > limits.bytes {
        return refused(format!("has {bytes} bytes, more than {}", limits.bytes));
    }
    let mut counts = Counts::default();
    counts.count(schema);
    for (what, count, limit) in [
        ("patterns", counts.patterns, limits.patterns),
        ("schemas in it", counts.schemas, limits.schemas),
        ("references", counts.references, limits.references),
    ] {
        if count > limit {
            return refused(format!("has {count} {what}, more than {limit}"));
        }
    }
    if counts.has_unevaluated && applied(schema, schema, &mut { MAX_APPLIED }).is_none() {
        return refused(format!(
            "applies more than {MAX_APPLIED} schemas where it has unevaluatedProperties or unevaluatedItems"
        ));
    }
    match counts.forbidden {
        Some(keyword) if author == Author::Caller => {
            refused(format!("has {keyword}, which the schema of a request may not have"))
        }
        _ => Ok(()),
    }
}

/// Patterns of a schema.
pub fn patterns(schema: &Value) -> usize {
    let mut counts = Counts::default();
    counts.count(schema);
    counts.patterns
}

fn nesting(value: &Value) -> usize {
    match value {
        Value::Array(items) => 1 + items.iter().map(nesting).max().unwrap_or(0),
        Value::Object(members) => 1 + members.values().map(nesting).max().unwrap_or(0),
        _ => 0,
    }
}

/// Counts over all parts of a document, because a reference can turn any part into a schema.
#[derive(Default)]
struct Counts {
    patterns: usize,
    schemas: usize,
    references: usize,
    forbidden: Option<&'static str>,
    has_unevaluated: bool,
}

impl Counts {
    fn count(&mut self, value: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| self.count(item)),
            Value::Object(members) => {
                self.schemas += 1;
                for (keyword, inner) in members {
                    self.keyword(keyword, inner);
                    self.count(inner);
                }
            }
            _ => {}
        }
    }

    fn keyword(&mut self, keyword: &str, inner: &Value) {
        match keyword {
            "pattern" if inner.is_string() => self.patterns += 1,
            "patternProperties" => self.patterns += inner.as_object().map_or(0, Map::len),
            "$ref" | "$dynamicRef" | "$recursiveRef" if inner.is_string() => self.references += 1,
            _ => {}
        }
        // A property may have such a name; then its value is a schema.
        let is_keyword = matches!(inner, Value::String(_))
            || (keyword.starts_with("unevaluated") && (inner.is_object() || inner.is_boolean()));
        if is_keyword && let Some(forbidden) = NOT_OF_CALLERS.iter().find(|it| **it == keyword) {
            self.forbidden = Some(forbidden);
            self.has_unevaluated |= keyword.starts_with("unevaluated");
        }
    }
}

/// Subtracts the schemas that every schema with `unevaluated…` applies from `left`; `None` if too
/// few are left.
fn applied(root: &Value, place: &Value, left: &mut usize) -> Option<()> {
    match place {
        Value::Array(items) => items.iter().try_for_each(|item| applied(root, item, left)),
        Value::Object(members) => {
            if members.keys().any(|keyword| keyword.starts_with("unevaluated")) {
                take_applied(root, place, &mut Vec::new(), left)?;
            }
            members.values().try_for_each(|inner| applied(root, inner, left))
        }
        _ => Some(()),
    }
}

fn take_applied<'v>(
    root: &'v Value,
    schema: &'v Value,
    around: &mut Vec<&'v Value>,
    left: &mut usize,
) -> Option<()> {
    *left = left.checked_sub(1)?;
    let Value::Object(members) = schema else { return Some(()) };
    if around.iter().any(|outer| std::ptr::eq(*outer, schema)) {
        return Some(());
    }
    around.push(schema);
    for (keyword, inner) in members {
        let mut next = |schema| take_applied(root, schema, around, left);
        match (keyword.as_str(), inner) {
            ("$ref" | "$dynamicRef" | "$recursiveRef", Value::String(reference)) => {
                target(root, reference).map_or(Some(()), next)?;
            }
            ("allOf" | "anyOf" | "oneOf" | "prefixItems", Value::Array(items)) => {
                items.iter().try_for_each(next)?;
            }
            ("dependentSchemas" | "patternProperties", Value::Object(named)) => {
                named.values().try_for_each(next)?;
            }
            (keyword, Value::Object(_)) if APPLIED.contains(&keyword) => next(inner)?,
            _ => {}
        }
    }
    around.pop();
    Some(())
}

/// The target of a reference within the document.
fn target<'v>(root: &'v Value, reference: &str) -> Option<&'v Value> {
    let (_, fragment) = reference.split_once('#')?;
    if fragment.is_empty() || fragment.starts_with('/') {
        return root.pointer(&unescaped(fragment));
    }
    let mut open = vec![root];
    while let Some(value) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(members) => {
                let has = |keyword| members.get(keyword).and_then(Value::as_str) == Some(fragment);
                if has("$anchor") || has("$dynamicAnchor") {
                    return Some(value);
                }
                open.extend(members.values());
            }
            _ => {}
        }
    }
    None
}

/// Changes a schema so that every subschema accesses the value at least once, and applying it is counted.
pub(super) fn counted(schema: &Value) -> Value {
    let mut counted = schema.clone();
    mark(&mut counted);
    for pointer in references(schema) {
        if let Some(target) = counted.pointer_mut(&pointer) {
            mark(target);
        }
    }
    counted
}

fn mark(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    for (keyword, inner) in members.iter_mut() {
        let keyword = keyword.as_str();
        if ONE.contains(&keyword) {
            mark(inner);
        }
        match inner {
            Value::Array(items) if LISTS.contains(&keyword) => items.iter_mut().for_each(mark),
            Value::Object(named) if TABLES.contains(&keyword) => {
                named.values_mut().for_each(mark);
            }
            _ => {}
        }
    }
    let any = || json!(["array", "boolean", "null", "number", "object", "string"]);
    members.entry("type").or_insert_with(any);
}

/// JSON pointers that references within the document hold.
fn references(schema: &Value) -> Vec<String> {
    let (mut found, mut open) = (Vec::new(), vec![schema]);
    while let Some(value) = open.pop() {
        match value {
            Value::Array(items) => open.extend(items),
            Value::Object(members) => {
                if let Some(Value::String(reference)) = members.get("$ref")
                    && let Some((_, pointer)) = reference.split_once('#')
                    && pointer.starts_with('/')
                {
                    found.push(unescaped(pointer));
                }
                open.extend(members.values());
            }
            _ => {}
        }
    }
    found
}

/// Decodes the percent-encoding of a URL fragment.
fn unescaped(fragment: &str) -> String {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let hex = after.get(..2).and_then(|two| std::str::from_utf8(two).ok());
        let byte = hex.filter(|_| *first == b'%');
        let byte = byte.and_then(|two| u8::from_str_radix(two, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
