//! Arguments that a model wrote for a tool: parsed, and checked against the tool's schema.
//!
//! What is wrong with them is worded for the model, without the values.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::{Number, Value};

use crate::bounds::json::{self, Unreadable};
use crate::bounds::schema::{Fault, Rejected, Schema};
use crate::bounds::text::shortened;
use crate::event::ValidationError;

/// Bytes of the arguments of one call.
const MAX_ARGUMENTS: usize = 1 << 20;
/// Schema errors in one result for the model.
pub(super) const MAX_SCHEMA_ERRORS: usize = 8;

/// Arguments that match a schema, or what is wrong with them, for the model.
///
/// # Errors
/// They are not a JSON object, or do not match the schema.
pub fn arguments_of(text: &str, schema: &Schema) -> Result<Value, String> {
    parse(text).and_then(|arguments| check(schema, &arguments).map(|()| arguments))
}

/// The arguments as an object. Some models write an empty text instead of `{}`.
pub(super) fn parse(arguments: &str) -> Result<Value, String> {
    if arguments.len() > MAX_ARGUMENTS {
        let bytes = arguments.len();
        return Err(format!("The arguments have {bytes} bytes, more than {MAX_ARGUMENTS}."));
    }
    let text = if arguments.trim().is_empty() { "{}" } else { arguments };
    match json::read_exactly(text) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(_) => Err("The arguments must be a JSON object.".into()),
        Err(Unreadable::Malformed(e)) => Err(format!("The arguments are not valid JSON: {e}.")),
        Err(e @ Unreadable::Inexact(_)) => {
            Err(format!("The arguments cannot be passed on as they are: {e}."))
        }
        Err(beyond) => Err(format!("The arguments are too complex: {beyond}.")),
    }
}

/// A non-negative integer, also if it is written as a float: JSON Schema and some models accept `2.0`.
pub(super) fn whole_number(value: &Value) -> Option<u64> {
    /// Up to this number, a float represents integers exactly.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "it is whole and within"
    )]
    let of_float = |float: f64| {
        ((0.0..=EXACT).contains(&float) && float.fract() == 0.0).then_some(float as u64)
    };
    value.as_u64().or_else(|| value.as_f64().and_then(of_float))
}

/// The same for a member that may be absent or null, of arguments that are deserialised.
pub(super) fn whole_number_of<'de, D: Deserializer<'de>>(from: D) -> Result<Option<u64>, D::Error> {
    let Some(number) = Option::<Number>::deserialize(from)? else { return Ok(None) };
    let written = number.to_string();
    let number = whole_number(&Value::Number(number));
    number
        .map(Some)
        .ok_or_else(|| D::Error::custom(format!("{written} is not a whole number in range")))
}

/// What is wrong with arguments, with JSON pointers into them.
pub fn errors(schema: &Schema, arguments: &Value) -> Vec<ValidationError> {
    let Err(rejected) = schema.check(arguments, MAX_SCHEMA_ERRORS) else { return Vec::new() };
    let error = |Fault { pointer, masked, .. }| ValidationError { pointer, message: masked };
    rejected.faults().into_iter().map(error).collect()
}

pub(super) fn check(schema: &Schema, arguments: &Value) -> Result<(), String> {
    if let Some(place) = nul_in(arguments) {
        let place = shortened(&place);
        return Err(format!("The arguments hold a NUL character at {place}; no tool takes one."));
    }
    schema.check(arguments, MAX_SCHEMA_ERRORS).map_err(|rejected| {
        let has_more = matches!(rejected, Rejected::Faults(_, true));
        let mut message = "The arguments do not match the tool's schema:".to_owned();
        message.extend(rejected.faults().into_iter().map(|Fault { pointer, masked, .. }| {
            let place = if pointer.is_empty() { "the arguments".to_owned() } else { pointer };
            format!("\n- at {place}: {masked}")
        }));
        if has_more {
            message.push_str("\n- and more");
        }
        message
    })
}

/// The JSON pointer of the first text or name that holds a NUL character.
fn nul_in(value: &Value) -> Option<String> {
    let below = |step: String, value: &Value| nul_in(value).map(|rest| format!("/{step}{rest}"));
    match value {
        Value::String(text) => text.contains('\0').then(String::new),
        Value::Array(items) => {
            items.iter().enumerate().find_map(|(index, item)| below(index.to_string(), item))
        }
        Value::Object(members) => members.iter().find_map(|(name, member)| {
            if name.contains('\0') {
                return Some(format!("/{}", name.replace('\0', "\\u0000")));
            }
            below(name.clone(), member)
        }),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_of_a_mebibyte_are_read_and_no_larger_ones() {
        let of = |bytes: usize| format!("{{\"a\":\"{}\"}}", "x".repeat(bytes - 8));
        assert!(parse(&of(MAX_ARGUMENTS)).is_ok());
        let refused = parse(&of(MAX_ARGUMENTS + 1)).unwrap_err();
        assert_eq!(refused, "The arguments have 1048577 bytes, more than 1048576.");
    }

    #[test]
    fn whole_numbers() {
        let table = [
            (json!(2), Some(2)),
            (json!(2.0), Some(2)),
            (json!(u64::MAX), Some(u64::MAX)),
            (json!(9_007_199_254_740_992.0), Some(1 << 53)),
            (json!(9_007_199_254_740_994.0), None),
            (json!(1e30), None),
            (json!(2.5), None),
            (json!(-1.0), None),
            (json!("2"), None),
        ];
        for (number, expected) in table {
            assert_eq!(whole_number(&number), expected, "{number}");
        }
    }

    #[test]
    fn a_nul_is_found_wherever_it_is() {
        let table = [
            (json!({"path": "out/\0x"}), Some("/path")),
            (json!({"a": [1, {"b": ["x", "\0"]}]}), Some("/a/1/b/1")),
            (json!({"a\0": 1}), Some("/a\\u0000")),
            (json!({"a": "\\u0000"}), None),
            (json!({"a": [null, 1.5, true]}), None),
        ];
        for (arguments, place) in table {
            assert_eq!(nul_in(&arguments).as_deref(), place, "{arguments}");
        }
        let schema = Schema::of_tool(&json!({"type": "object"})).unwrap();
        let long = Value::from_iter([(format!("{}\0", "x".repeat(10_000)), 1)]);
        assert!(check(&schema, &long).unwrap_err().len() < 300, "little of a name is repeated");
    }
}
