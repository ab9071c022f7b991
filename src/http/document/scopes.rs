//! Moves the scopes that an operation requires to where viewers show them.
//!
//! They are derived as roles of the bearer scheme, which OpenAPI 3.1 allows, but viewers do not show
//! and linters take for undeclared scopes. So they stand in the description, for people, and in
//! `x-scopes`, for programs.

use serde_json::{Map, Value, json};

/// Moves the scopes of all operations.
pub(super) fn describe(api: &mut Value) {
    let items = api["paths"].as_object_mut().into_iter().flat_map(Map::values_mut);
    let operations = items.filter_map(Value::as_object_mut).flat_map(Map::values_mut);
    for operation in operations {
        let Some(scopes) = operation.pointer_mut("/security/0/bearer").map(Value::take) else {
            continue;
        };
        operation["security"][0]["bearer"] = json!([]);
        let names: Vec<String> = scopes
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(|scope| Some(format!("`{}`", scope.as_str()?)))
            .collect();
        let what = match &names[..] {
            [] => continue,
            [_] => "scope",
            _ => "scopes",
        };
        let description = operation["description"].as_str().unwrap_or_default();
        let needs = format!("Needs the {what} {}.", names.join(" and "));
        operation["description"] = format!("{}\n\n{needs}", description.trim_end()).into();
        operation["x-scopes"] = scopes;
    }
}
