//! The labels that a run gets from its inputs: the `x-yields` of their schema, at every depth.
//!
//! A value gets the labels of each subschema that could describe it, whether or not it matches that subschema.
//! If the walk would take too long, or a reference cannot be resolved, the run gets all labels.

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::run::{Labels, Yield};

const KEYWORD: &str = "x-yields";
/// The depth of nested levels and references.
const MAX_DEPTH: usize = 64;
/// The number of pairs of a subschema and a value that are visited.
const MAX_STEPS: usize = 100_000;
/// Keywords with a schema for the value itself, and keywords with a list of such schemas.
const VALUE_KEYWORDS: [&str; 3] = ["if", "then", "else"];
const VALUE_LIST_KEYWORDS: [&str; 3] = ["allOf", "anyOf", "oneOf"];

/// The labels of these inputs.
pub(super) fn labels_of_inputs(schema: Option<&Value>, inputs: &Value) -> Labels {
    let Some(root) = schema.filter(|schema| mentions(schema)) else { return Labels::default() };
    let mut walk = Walk { root, steps: 0, labels: Labels::default() };
    match walk.enter(root, inputs, 0) {
        Some(()) => walk.labels,
        None => everything(),
    }
}

fn everything() -> Labels {
    Labels::UNTRUSTED.and(Labels::PRIVATE)
}

fn mentions(schema: &Value) -> bool {
    match schema {
        Value::Object(fields) => fields.contains_key(KEYWORD) || fields.values().any(mentions),
        Value::Array(items) => items.iter().any(mentions),
        _ => false,
    }
}

struct Walk<'s> {
    root: &'s Value,
    steps: usize,
    labels: Labels,
}

impl<'s> Walk<'s> {
    /// Adds the labels of a subschema for a present value. `None` if they cannot be determined.
    fn enter(&mut self, schema: &'s Value, value: &Value, depth: usize) -> Option<()> {
        self.steps += 1;
        if self.steps > MAX_STEPS || depth > MAX_DEPTH {
            return None;
        }
        let Value::Object(schema) = schema else { return Some(()) };
        if let Some(yields) = schema.get(KEYWORD) {
            let yields = Vec::<Yield>::deserialize(yields);
            let labels = yields.map_or_else(|_| everything(), |yields| Labels::yielded(&yields));
            self.labels = self.labels.and(labels);
        }
        if self.labels == everything() {
            return Some(());
        }
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let target = self.root.pointer(reference.strip_prefix('#')?)?;
            self.enter(target, value, depth + 1)?;
        }
        for of_value in VALUE_KEYWORDS.iter().filter_map(|keyword| schema.get(*keyword)) {
            self.enter(of_value, value, depth + 1)?;
        }
        for of_value in
            VALUE_LIST_KEYWORDS.iter().filter_map(|keyword| schema.get(*keyword)?.as_array())
        {
            of_value.iter().try_for_each(|schema| self.enter(schema, value, depth + 1))?;
        }
        match value {
            Value::Object(fields) => self.enter_fields(schema, (value, fields), depth),
            Value::Array(items) => self.enter_items(schema, items, depth),
            _ => Some(()),
        }
    }

    fn enter_fields(
        &mut self,
        schema: &'s Map<String, Value>,
        (value, fields): (&Value, &Map<String, Value>),
        depth: usize,
    ) -> Option<()> {
        let named = schema.get("properties").and_then(Value::as_object);
        let patterns = schema.get("patternProperties").and_then(Value::as_object);
        let others = schema.get("additionalProperties").or(schema.get("unevaluatedProperties"));
        let dependent = schema.get("dependentSchemas").and_then(Value::as_object);
        for (name, field) in fields {
            let own = named.and_then(|named| named.get(name));
            let patterns = patterns.into_iter().flat_map(Map::values);
            let others = others.filter(|_| own.is_none());
            for of_value in own.into_iter().chain(patterns).chain(others) {
                self.enter(of_value, field, depth + 1)?;
            }
            if let Some(of_all) = dependent.and_then(|dependent| dependent.get(name)) {
                self.enter(of_all, value, depth + 1)?;
            }
        }
        Some(())
    }

    fn enter_items(
        &mut self,
        schema: &'s Map<String, Value>,
        items: &[Value],
        depth: usize,
    ) -> Option<()> {
        let first = schema.get("prefixItems").and_then(Value::as_array);
        let rest = ["items", "contains", "unevaluatedItems"];
        for (place, item) in items.iter().enumerate() {
            let own = first.and_then(|first| first.get(place));
            let rest = rest.iter().filter_map(|keyword| schema.get(*keyword));
            for of_item in own.into_iter().chain(rest) {
                self.enter(of_item, item, depth + 1)?;
            }
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_field_labels_the_run_wherever_it_stands() {
        let letter = json!({"type": "string", "x-yields": ["untrusted"]});
        let secret = json!({"x-yields": ["private"]});
        let (none, untrusted) = (Labels::default(), Labels::UNTRUSTED);
        let table = [
            (json!({"properties": {"a": letter}}), json!({"a": "x"}), untrusted),
            (json!({"properties": {"a": letter}}), json!({"b": "x"}), none),
            (
                json!({"properties": {"a": {"properties": {"b": letter}}}}),
                json!({"a": {"b": "x"}}),
                untrusted,
            ),
            (json!({"properties": {"a": {"items": letter}}}), json!({"a": ["x"]}), untrusted),
            (json!({"properties": {"a": {"items": letter}}}), json!({"a": []}), none),
            (
                json!({"properties": {"a": {"$ref": "#/$defs/l"}}, "$defs": {"l": letter}}),
                json!({"a": "x"}),
                untrusted,
            ),
            (
                json!({"$ref": "#/$defs/n", "$defs": {"n": {"properties": {
                    "next": {"$ref": "#/$defs/n"}, "text": letter}}}}),
                json!({"next": {"next": {"text": "x"}}}),
                untrusted,
            ),
            (json!({"anyOf": [{"properties": {"a": letter}}]}), json!({"a": 1}), untrusted),
            (json!({"additionalProperties": letter}), json!({"a": 1}), untrusted),
            (
                json!({"properties": {"a": {}}, "additionalProperties": letter}),
                json!({"a": 1}),
                none,
            ),
            (json!({"patternProperties": {"^a": letter}}), json!({"a": 1}), untrusted),
            (
                json!({"properties": {"a": letter, "b": {"properties": {"c": secret}}}}),
                json!({"a": 1, "b": {"c": 1}}),
                everything(),
            ),
            // What is unknown gives every label.
            (json!({"properties": {"a": {"x-yields": "x"}}}), json!({"a": 1}), everything()),
            (json!({"$ref": "#/$defs/none", "$defs": {"l": letter}}), json!({}), everything()),
            (
                json!({"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}, "l": letter}}),
                json!({}),
                everything(),
            ),
            (
                json!({"items": {"items": {"properties": {"a": letter}}}}),
                json!([vec![json!(1); MAX_STEPS]]),
                everything(),
            ),
        ];
        for (schema, inputs, expected) in table {
            assert_eq!(labels_of_inputs(Some(&schema), &inputs), expected, "{schema}");
        }
        assert_eq!(labels_of_inputs(None, &json!({})), none);
    }
}
