//! Environment variables that begin like settings and are not, which are probably mistakes.

use std::collections::BTreeSet;

use serde_json::Value;

use super::PREFIX;
use crate::bounds::nearest::nearest;

/// Names behind the prefix that mean something and are no keys of a section: those that are read, and
/// those that this service gives to its programs, or its build to the binary.
const KNOWN: [&str; 11] = [
    "ADMIN_KEY",
    "AGENTS_DIR",
    "EFFECT_KEY",
    "KEY",
    "LOG",
    "REVISION",
    "RUN_ID",
    "SERVER",
    "SKILLS_DIR",
    "TOOLS_DIR",
    "WORKSPACE",
];

/// The variables that are neither known nor named by a setting. A key of a section has `__` in its variable's
/// name, and is an error of its own where there is none such.
pub(super) fn unknown<'e>(
    names: impl Iterator<Item = &'e String>,
    settings: &Value,
) -> BTreeSet<String> {
    let is_unknown = |name: &&String| {
        name.strip_prefix(PREFIX).is_some_and(|rest| {
            !rest.contains("__")
                && !KNOWN.contains(&rest)
                && !is_of_kubernetes(rest)
                && !has(settings, name)
        })
    };
    names.filter(is_unknown).cloned().collect()
}

/// The message about an unknown variable.
pub fn unknown_variable_message(name: &str) -> String {
    let rest = name.strip_prefix(PREFIX).unwrap_or(name);
    let meant = nearest(rest, KNOWN);
    let meant =
        meant.map_or_else(String::new, |known| format!(" (did you mean `{PREFIX}{known}`?)"));
    format!("the environment variable {name} is not a setting{meant}")
}

/// What Kubernetes sets in every container for a service whose name begins with `toolloop`.
fn is_of_kubernetes(rest: &str) -> bool {
    let rest = format!("_{rest}_");
    ["_SERVICE_HOST_", "_SERVICE_PORT_", "_PORT_"].iter().any(|part| rest.contains(part))
}

/// Whether a text of the settings is this name.
fn has(settings: &Value, name: &str) -> bool {
    match settings {
        Value::String(text) => text.split_whitespace().any(|word| word == name),
        Value::Array(items) => items.iter().any(|item| has(item, name)),
        Value::Object(fields) => fields.values().any(|value| has(value, name)),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_variables_are_reported() {
        let settings = json!({"models": {"own": {"api_key_env": "TOOLLOOP_OWN"}},
            "mcp": {"a": {"env": ["TOOLLOOP_A"]}}});
        let names = [
            "OWN",
            "A",
            "LOG",
            "SERVER__LISTN",
            "SERVICE_HOST",
            "PORT",
            "PORT_80_TCP",
            "DB_SERVICE_PORT_SQL",
            "LOGS",
            "FOO",
            "EXPORT",
        ];
        let names: Vec<String> = names.iter().map(|name| format!("{PREFIX}{name}")).collect();
        let unknown: Vec<String> = unknown(names.iter(), &settings).into_iter().collect();
        assert_eq!(unknown, ["TOOLLOOP_EXPORT", "TOOLLOOP_FOO", "TOOLLOOP_LOGS"]);
        let message = unknown_variable_message("TOOLLOOP_AGENT_DIR");
        assert!(
            message.ends_with("is not a setting (did you mean `TOOLLOOP_AGENTS_DIR`?)"),
            "{message}"
        );
        assert!(
            unknown_variable_message("TOOLLOOP_FOO").ends_with("TOOLLOOP_FOO is not a setting")
        );
    }
}
