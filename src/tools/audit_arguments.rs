//! What the audit log keeps of a call's arguments: without what looks like a secret by its name,
//! and capped.

use serde_json::Value;

use crate::event::SECRET_NAMES;

/// Bytes of arguments in the audit log.
const MAX_AUDITED: usize = 4096;
/// The arguments as the audit log keeps them: without what looks like a secret by its name, and
/// capped.
pub(super) fn shown(arguments: &Value, canonical: String) -> String {
    let mut text = if names_secret(arguments) {
        let mut redacted = arguments.clone();
        redact(&mut redacted);
        redacted.to_string()
    } else {
        canonical
    };
    if text.len() > MAX_AUDITED {
        text.truncate(text.floor_char_boundary(MAX_AUDITED - '…'.len_utf8()));
        text.push('…');
    }
    text
}

fn is_secret(key: &str) -> bool {
    let key = key.to_ascii_lowercase();
    SECRET_NAMES.iter().any(|secret| key.contains(secret))
}

fn names_secret(value: &Value) -> bool {
    match value {
        Value::Object(map) => map.iter().any(|(key, value)| is_secret(key) || names_secret(value)),
        Value::Array(items) => items.iter().any(names_secret),
        _ => false,
    }
}

fn redact(value: &mut Value) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                if is_secret(key) {
                    *value = "[redacted]".into();
                } else {
                    redact(value);
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        _ => {}
    }
}
