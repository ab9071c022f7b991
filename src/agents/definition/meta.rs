//! The JSON Schema of a JSON Schema (2020-12), for editors. It stands in the schema of a definition
//! itself, so that an editor without a network completes and checks `inputs` and `output.schema`.
//!
//! Keywords that it does not name are allowed, as the standard says; `toolloop check` compiles the
//! schemas and finds the rest.

use schemars::{Schema, SchemaGenerator, json_schema};
use serde_json::{Value, json};

/// Its name among the definitions; it refers to itself by it.
const NAME: &str = "JsonSchema";
const TEXT: &str = include_str!("json_schema.json");

/// Any schema, or none.
pub(super) fn any_schema(generator: &mut SchemaGenerator) -> Schema {
    let schema = reference(generator);
    json_schema!({"anyOf": [schema, {"type": "null"}]})
}

/// A schema of objects.
pub(super) fn object_schema(generator: &mut SchemaGenerator) -> Schema {
    let schema = reference(generator);
    json_schema!({
        "allOf": [schema],
        "type": "object",
        "required": ["type"],
        "properties": {"type": {"const": "object"}}
    })
}

fn reference(generator: &mut SchemaGenerator) -> Value {
    let schema = || serde_json::from_str(TEXT).unwrap_or_default();
    generator.definitions_mut().entry(NAME.to_owned()).or_insert_with(schema);
    json!({"$ref": format!("#/$defs/{NAME}")})
}
