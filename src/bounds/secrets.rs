//! Redaction of secrets: those that the service was configured with, and text that looks like a
//! secret by the name before it or by its own shape.
//!
//! There is one recogniser for everything that is served, logged or sent: answers, events, memory,
//! the audit log, webhooks, errors, logs, labels of metrics. It is a filter and no guarantee: a
//! secret that looks like an ordinary word stays. The journal is not redacted, so that a run can be
//! resumed from it.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::pattern::{Author, Pattern};
use super::schema::VALUES;

mod credentials;
mod cuts;
mod known_secrets;
mod named_secrets;
mod pieces;
mod shapes;
mod values;

pub use cuts::{head, tail};
pub use known_secrets::{of_environment, remember, without_known_secrets};
pub use pieces::StreamRedactor;
use values::Quoting;

/// The text that replaces a secret.
pub const REDACTED: &str = "[redacted]";

/// Parts of names whose values are secrets.
const NAMES: [&str; 22] = [
    "token",
    "password",
    "passwd",
    "passphrase",
    "secret",
    "credential",
    "cookie",
    "api_key",
    "apikey",
    "api-key",
    "api key",
    "authorization",
    "private_key",
    "privatekey",
    "private-key",
    "access_key",
    "accesskey",
    "access-key",
    "signing_key",
    "account_key",
    "accountkey",
    "account-key",
];

#[expect(clippy::unwrap_used, reason = "constants that a test compiles")]
fn compiled(pattern: &str) -> Pattern {
    Pattern::compile(pattern, Author::Operator).unwrap()
}

/// Matches in every text that [`redacted`] changes. Most texts do not match, and need no further
/// search.
static CANDIDATE: LazyLock<Pattern> = LazyLock::new(|| {
    let names = NAMES[1..].join("|");
    compiled(&format!(
        "(?i:token(?:[^s]|\\z)|{names}|pwd|_pass)|{}|-----BEGIN|{}(?:{})",
        credentials::BEGINNINGS,
        shapes::BEFORE,
        shapes::BEGINNINGS,
    ))
});

/// Whether a text may hold a secret; where not, [`redacted`] leaves it as it is.
pub fn may_hold_secret(text: &str) -> bool {
    CANDIDATE.is_match(text) || known_secrets::occur_in(text)
}

/// A text without secrets.
pub fn redacted(text: &str) -> Cow<'_, str> {
    if !may_hold_secret(text) {
        return Cow::Borrowed(text);
    }
    let mut text = without_known_secrets(text);
    for without in [
        shapes::without_token_shapes,
        named_secrets::without_named_secrets,
        credentials::without_credentials,
    ] {
        if let Cow::Owned(changed) = without(&text) {
            text = Cow::Owned(changed);
        }
    }
    text
}

/// Redacts a document: values whose field names say that they are secret, and secrets within all its
/// texts and names.
pub fn redact(document: &mut Value) {
    redact_fields(document, Under::Value);
}

/// Redacts a document whose field `output` is the output of a run. In the output only texts are
/// searched: a field that is named like a secret, e.g. `token`, is what the caller asked for.
pub fn redact_beside_output(document: &mut Value) {
    let output = document.get_mut("output").map(Value::take);
    redact(document);
    if let Some(mut output) = output {
        redact_texts(&mut output);
        document["output"] = output;
    }
}

/// Redacts a document that describes other documents, e.g. a JSON Schema. Under the name of a secret
/// only values and examples of values are removed.
pub fn redact_described(document: &mut Value) {
    redact_fields(document, Under::Description);
}

/// How an object or a list under the name of a secret is treated.
#[derive(Clone, Copy, PartialEq)]
enum Under {
    /// The secret.
    Value,
    /// Its description.
    Description,
}

fn redact_fields(document: &mut Value, under: Under) {
    match document {
        Value::String(text) => {
            if let Cow::Owned(replaced) = redacted(text) {
                *text = replaced;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| redact_fields(item, under)),
        Value::Object(fields) => {
            rename_fields(fields, &redacted);
            for (name, value) in fields {
                let is_description =
                    under == Under::Description && (value.is_object() || value.is_array());
                if is_description {
                    if names_secret(name) {
                        redact_examples(name, value);
                    }
                    redact_fields(value, under);
                } else if is_secret_field(name, value) {
                    *value = REDACTED.into();
                } else {
                    redact_fields(value, under);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Changes the names of fields and keeps their order. A changed name that exists already gets a
/// number.
fn rename_fields(fields: &mut Map<String, Value>, change: &dyn Fn(&str) -> Cow<'_, str>) {
    if fields.keys().all(|name| matches!(change(name), Cow::Borrowed(_))) {
        return;
    }
    let unchanged = |name: &String| matches!(change(name), Cow::Borrowed(_));
    let mut taken: BTreeSet<String> =
        fields.keys().filter(|name| unchanged(name)).cloned().collect();
    let mut alike: BTreeMap<String, usize> = BTreeMap::new();
    let renamed = std::mem::take(fields).into_iter().map(|(name, value)| {
        let Cow::Owned(new) = change(&name) else { return (name, value) };
        let number = alike.entry(new.clone()).or_default();
        loop {
            *number += 1;
            let name = if *number == 1 { new.clone() } else { format!("{new} {number}") };
            if taken.insert(name.clone()) {
                return (name, value);
            }
        }
    });
    *fields = renamed.collect();
}

/// Removes the values that the schema of a secret gives for it.
fn redact_examples(name: &str, schema: &mut Value) {
    for keyword in VALUES {
        match schema.get_mut(keyword) {
            Some(Value::Array(values)) => {
                values.iter_mut().filter(|value| is_secret_field(name, value)).for_each(hide);
            }
            Some(value) if is_secret_field(name, value) => hide(value),
            _ => {}
        }
    }
}

fn hide(value: &mut Value) {
    *value = REDACTED.into();
}

/// Whether a field of this name is a secret by what it has.
fn is_secret_field(name: &str, value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(_) => false,
        Value::String(text) => {
            (names_secret(name) && values::is_secret(name, text, Quoting::Quoted))
                || (name.eq_ignore_ascii_case("auth") && credentials::is_pair(text))
        }
        Value::Number(number) => {
            names_secret(name) && values::is_secret(name, &number.to_string(), Quoting::Quoted)
        }
        Value::Array(_) | Value::Object(_) => names_secret(name),
    }
}

/// Puts the secrets back into a document that was edited after redaction: wherever the edited
/// document equals the redacted one, the original value is used.
pub fn restored(changed: Value, original: &Value) -> Value {
    let mut shown = original.clone();
    redact(&mut shown);
    merged(changed, &shown, original)
}

fn merged(changed: Value, shown: &Value, original: &Value) -> Value {
    if changed == *shown {
        return original.clone();
    }
    match (changed, shown, original) {
        (Value::Object(fields), Value::Object(shown), Value::Object(original)) => {
            // Both have the same fields in the same order; names with secrets are shown as others.
            let pairs: BTreeMap<&String, _> = shown
                .iter()
                .zip(original)
                .map(|((name, shown), kept)| (name, (shown, kept)))
                .collect();
            let field = |(name, value): (String, Value)| match pairs.get(&name) {
                Some((shown, (name, original))) => {
                    ((*name).clone(), merged(value, shown, original))
                }
                None => (name, value),
            };
            Value::Object(fields.into_iter().map(field).collect())
        }
        (Value::Array(items), Value::Array(shown), Value::Array(original))
            if items.len() == original.len() =>
        {
            let pairs = items.into_iter().zip(shown.iter().zip(original));
            pairs.map(|(item, (shown, original))| merged(item, shown, original)).collect()
        }
        (changed, ..) => changed,
    }
}

/// Redacts the texts and names of a document. Values are not judged by the names of their fields.
pub fn redact_texts(document: &mut Value) {
    change_texts(document, &redacted);
}

/// Removes the secrets that the service was given from the texts and names of a document.
pub fn remove_known(document: &mut Value) {
    change_texts(document, &without_known_secrets);
}

fn change_texts(document: &mut Value, change: &dyn Fn(&str) -> Cow<'_, str>) {
    match document {
        Value::String(text) => {
            if let Cow::Owned(changed) = change(text) {
                *text = changed;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| change_texts(item, change)),
        Value::Object(fields) => {
            rename_fields(fields, change);
            fields.values_mut().for_each(|value| change_texts(value, change));
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Whether a field of this name holds a secret. Names of token counts do not count.
fn names_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace("tokens", "");
    NAMES.iter().any(|secret| name.contains(secret)) || name.ends_with("pwd")
}

#[cfg(test)]
#[path = "secrets_tests.rs"]
mod tests;
