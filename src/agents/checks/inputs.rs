//! What is wrong with the schema of the inputs that JSON Schema does not see: its own keyword.

use serde::Deserialize;
use serde_json::Value;

use super::Check;
use crate::agents::Definition;
use crate::agents::yaml::DefinitionError;
use crate::bounds::schema::{TABLES, VALUES};
use crate::run::Yield;

const KEYWORD: &str = "x-yields";
/// Its members have free names and are no schemas.
const REQUIRED_BESIDE: &str = "dependentRequired";

pub(super) fn check(d: &Definition) -> Check {
    d.inputs.as_ref().map_or(Ok(()), |schema| check_schema("inputs", schema))
}

fn check_schema(key: &str, schema: &Value) -> Check {
    match schema {
        Value::Array(schemas) => schemas
            .iter()
            .enumerate()
            .try_for_each(|(i, schema)| check_schema(&format!("{key}[{i}]"), schema)),
        Value::Object(keywords) => keywords.iter().try_for_each(|(keyword, value)| {
            let key = format!("{key}.{keyword}");
            match value {
                _ if keyword == KEYWORD => check_labels(&key, value),
                _ if keyword == REQUIRED_BESIDE || VALUES.contains(&keyword.as_str()) => Ok(()),
                Value::Object(schemas) if TABLES.contains(&keyword.as_str()) => schemas
                    .iter()
                    .try_for_each(|(name, schema)| check_schema(&format!("{key}.{name}"), schema)),
                schema => check_schema(&key, schema),
            }
        }),
        _ => Ok(()),
    }
}

fn check_labels(key: &str, labels: &Value) -> Check {
    let Some(labels) = labels.as_array() else {
        return Err(DefinitionError::at(key, "is not a list of `untrusted` and `private`"));
    };
    let wrong = labels.iter().enumerate().find(|(_, label)| Yield::deserialize(*label).is_err());
    match wrong {
        Some((i, label)) => {
            let message = format!("{label} is neither \"untrusted\" nor \"private\"");
            Err(DefinitionError::at(format!("{key}[{i}]"), message))
        }
        None => Ok(()),
    }
}
