//! Arguments that a model wrote for a tool: parsed, and checked against the tool's schema.
//!
//! What is wrong with them is worded for the model, without the values.

use std::fmt::Write as _;

use jsonschema::Validator;
use serde_json::Value;

/// Schema errors told to the model in one result.
pub(super) const MAX_SCHEMA_ERRORS: usize = 8;

/// Arguments that match a schema, or what is wrong with them, for the model.
///
/// # Errors
/// They are no JSON object, or miss the schema.
pub fn arguments_of(text: &str, schema: &Validator) -> Result<Value, String> {
    parse(text).and_then(|arguments| check(schema, &arguments).map(|()| arguments))
}

/// The arguments as an object. Some models write nothing where there is nothing to say.
pub(super) fn parse(arguments: &str) -> Result<Value, String> {
    let text = if arguments.trim().is_empty() { "{}" } else { arguments };
    match serde_json::from_str(text) {
        Ok(object @ Value::Object(_)) => Ok(object),
        Ok(_) => Err("The arguments must be a JSON object.".into()),
        Err(e) => Err(format!("The arguments are not valid JSON: {e}.")),
    }
}

pub(super) fn check(validator: &Validator, arguments: &Value) -> Result<(), String> {
    if validator.is_valid(arguments) {
        return Ok(());
    }
    let mut errors = validator.iter_errors(arguments).map(|error| {
        let pointer = error.instance_path().as_str().to_owned();
        let place = if pointer.is_empty() { "the arguments".to_owned() } else { pointer };
        format!("\n- at {place}: {}", error.masked())
    });
    let mut message = "The arguments do not match the tool's schema:".to_owned();
    message.extend(errors.by_ref().take(MAX_SCHEMA_ERRORS));
    let more = errors.count();
    if more > 0 {
        let _ = write!(message, "\n- and {more} more");
    }
    Err(message)
}
