//! Secrets in texts: those that the service was given, and what looks like one, by the name before
//! it or by its own shape.
//!
//! There is one recogniser for everything that is served, logged or sent: answers, events, memory,
//! the audit log, webhooks, errors, logs, labels of metrics. It is a filter and no guarantee: a
//! secret that looks like any other word stays. The journal keeps what was said, so that a run can
//! go on from it.

use std::borrow::Cow;
use std::sync::LazyLock;

use serde_json::Value;

use super::pattern::{Author, Pattern};

mod known;
mod pieces;

pub use known::{of_environment, remember, without_known};
pub use pieces::Pieces;

/// What stands in the place of a secret.
pub const REDACTED: &str = "[redacted]";

/// Parts of names whose values are secrets.
const NAMES: [&str; 19] = [
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
];

/// Known shapes of keys and tokens.
const SHAPES: [&str; 13] = [
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----(?s:.*?)(?:-----END [A-Z0-9 ]*-----|\z)",
    r"\b(?:sk|rk)[-_][A-Za-z0-9_-]{16,}",
    r"\bgh[pousr]_[A-Za-z0-9]{20,}",
    r"\bgithub_pat_[A-Za-z0-9_]{20,}",
    r"\bglpat-[A-Za-z0-9_-]{16,}",
    r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    r"\b(?:npm|hf|whsec)_[A-Za-z0-9+/=]{20,}",
    r"\bAIza[A-Za-z0-9_-]{30,}",
    r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"\btl_[A-Za-z0-9]+_[A-Za-z0-9]{32,}",
    r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"hooks\.slack\.com/services/[A-Za-z0-9/]+",
];

/// The patterns, each with what stands in the place of what follows its first group.
static BEHIND: LazyLock<Vec<(Pattern, &str)>> = LazyLock::new(|| {
    // Numbers of tokens are none.
    let token = r"token(?:[0-9]*|[_-][A-Za-z0-9_-]*)";
    let others = NAMES[1..].join("|");
    let name = format!(r"[A-Za-z0-9_-]*(?:{token}|(?:{others})[A-Za-z0-9_-]*)");
    let is = r#"\\?["']?\s*(?::|=>?)\s*"#;
    let scheme = r"(?:(?:bearer|basic|token)\s+)?";
    [
        // In quotes, which stay.
        (format!(r#"(?i)({name}{is}\\?"){scheme}[^"\\]+"#), REDACTED),
        (format!(r"(?i)({name}{is}'){scheme}[^'\\]+"), REDACTED),
        (format!(r#"(?i)({name}{is}){scheme}[^\s"'\\,;&<>\[{{}}\])]+"#), REDACTED),
        (format!(r"(?i)(<{name}>)[^<]+"), REDACTED),
        (format!(r#"(?i)(--?{name}\s+["']?)[^\s"'-][^\s"']*"#), REDACTED),
        (format!(r#"(?i)({name}\s+(?:is|was)\s+["'`]?)[^\s"'`]*[0-9][^\s"'`]*"#), REDACTED),
        (r"(?i)(\bbearer\s+)[A-Za-z0-9+/=._~-]{12,}".to_owned(), REDACTED),
        (r"(?i)(\bbasic\s+)[A-Za-z0-9+/]{20,}={0,2}".to_owned(), REDACTED),
        (r"([A-Za-z][A-Za-z0-9+.-]*://[^\s/:@]*:)[^\s/@]+@".to_owned(), "[redacted]@"),
    ]
    .into_iter()
    .map(|(pattern, with)| (compiled(&pattern), with))
    .collect()
});

static SHAPED: LazyLock<Pattern> = LazyLock::new(|| compiled(&SHAPES.join("|")));

#[expect(clippy::unwrap_used, reason = "constants that a test compiles")]
fn compiled(pattern: &str) -> Pattern {
    Pattern::compile(pattern, Author::Operator).unwrap()
}

/// What every text that [`BEHIND`] or [`SHAPED`] changes has in it. Most texts have none of it, and
/// are done with after one search.
static CANDIDATE: LazyLock<Pattern> = LazyLock::new(|| {
    let names = NAMES[1..].join("|");
    compiled(&format!(
        r"(?i:token(?:[^s]|\z)|{names}|bearer|basic\s|://[^/\s]*@|-----BEGIN|hooks\.slack)|\b[sr]k[-_]|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|npm_|hf_|whsec_|AIza|SG\.|tl_|AKIA|ASIA|eyJ"
    ))
});

/// Whether a text may hold a secret; where not, [`redacted`] leaves it as it is.
pub fn may_hold_secret(text: &str) -> bool {
    CANDIDATE.is_match(text) || known::is_in(text)
}

/// A text without secrets.
pub fn redacted(text: &str) -> Cow<'_, str> {
    if !may_hold_secret(text) {
        return Cow::Borrowed(text);
    }
    let mut text = without_known(text);
    if let Cow::Owned(shaped) = SHAPED.replace_all(&text, REDACTED) {
        text = Cow::Owned(shaped);
    }
    for (pattern, with) in BEHIND.iter() {
        if let Cow::Owned(replaced) = pattern.replace_behind_group(&text, with) {
            text = Cow::Owned(replaced);
        }
    }
    text
}

/// Removes secrets from a document: what stands under the name of one, and in all its texts.
pub fn redact(document: &mut Value) {
    match document {
        Value::String(text) => {
            if let Cow::Owned(replaced) = redacted(text) {
                *text = replaced;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(redact),
        Value::Object(fields) => {
            for (name, value) in fields {
                if names_secret(name) && !value.is_null() {
                    *value = REDACTED.into();
                } else {
                    redact(value);
                }
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// A document that was changed by someone who saw it without its secrets: with the secrets wherever
/// it was left as it was shown.
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
            let field =
                |(name, value): (String, Value)| match (shown.get(&name), original.get(&name)) {
                    (Some(shown), Some(original)) => {
                        let value = merged(value, shown, original);
                        (name, value)
                    }
                    _ => (name, value),
                };
            Value::Object(fields.into_iter().map(field).collect())
        }
        (Value::Array(items), Value::Array(shown), Value::Array(original))
            if items.len() == original.len() =>
        {
            let places = items.into_iter().zip(shown.iter().zip(original));
            places.map(|(item, (shown, original))| merged(item, shown, original)).collect()
        }
        (changed, ..) => changed,
    }
}

/// Removes secrets from the texts of a document, whatever their names.
pub fn redact_texts(document: &mut Value) {
    on_texts(document, &redacted);
}

/// Removes the secrets that the service was given from the texts of a document.
pub fn remove_known(document: &mut Value) {
    on_texts(document, &without_known);
}

fn on_texts(document: &mut Value, change: &dyn Fn(&str) -> Cow<'_, str>) {
    match document {
        Value::String(text) => {
            if let Cow::Owned(changed) = change(text) {
                *text = changed;
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| on_texts(item, change)),
        Value::Object(fields) => fields.values_mut().for_each(|value| on_texts(value, change)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Whether a value of this name is a secret. A name of numbers of tokens is not.
fn names_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase().replace("tokens", "");
    NAMES.iter().any(|secret| name.contains(secret))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Ways to write a secret; `hunter2…` is never left.
    pub(crate) const WAYS: [&str; 34] = [
        "password=hunter2",
        "password: hunter2",
        "PASSWORD = \"hunter2 with blanks\"",
        "password => 'hunter2'",
        "{\"password\": \"hunter2\"}",
        "{\"arguments\": \"{\\\"api_key\\\": \\\"hunter2\\\"}\"}",
        "{'client_secret': 'hunter2'}",
        "export AWS_SECRET_ACCESS_KEY=hunter2",
        "DB_PASSWD=hunter2;",
        "api key: hunter2",
        "apiKey=hunter2&next=1",
        "https://example.com/?access_token=hunter2&x=1",
        "https://user:hunter2@example.com/",
        "postgres://app:hunter2@db/app",
        "Authorization: Bearer hunter2hunter2",
        "authorization: basic aHVudGVyMg==hunter2",
        "curl -H 'Authorization: Bearer hunter2hunter2'",
        "send Bearer hunter2hunter2hunter2 with it",
        "<password>hunter2</password>",
        "mysql --password hunter2 app",
        "tool --api-key \"hunter2\"",
        "the password is hunter2",
        "Set-Cookie: session=hunter2",
        "private_key: hunter2",
        "credentials=hunter2",
        "passphrase: hunter2",
        "-----BEGIN RSA PRIVATE KEY-----\nhunter2\n-----END RSA PRIVATE KEY-----",
        "-----BEGIN OPENSSH PRIVATE KEY-----\nhunter2",
        "sk-proj-hunter2hunter2hunter2",
        "ghp_hunter2hunter2hunter2hunter2",
        "xoxb-hunter2-hunter2",
        "eyJhbGciOiJIUzI1NiJ9.hunter2hunter2.hunter2",
        "tl_admin_hunter2hunter2hunter2hunter2hunter2",
        "https://hooks.slack.com/services/hunter2/hunter2",
    ];

    #[test]
    fn every_way_to_write_a_secret_is_seen() {
        for way in WAYS {
            let text = format!("before {way} after");
            let kept = redacted(&text);
            assert!(!kept.contains("hunter2") && kept.contains("[redacted]"), "{way}: {kept}");
            assert!(kept.starts_with("before "), "{way}: {kept}");
            let mut document = json!({"text": text, "list": [text]});
            redact(&mut document);
            assert!(!document.to_string().contains("hunter2"), "{document}");
            assert_eq!(redacted(&kept), kept, "once is enough");
        }
    }

    #[test]
    fn no_secret_escapes_the_first_search() {
        for name in NAMES {
            for text in [format!("{name}=hunter2"), format!("<{name}>x</{name}>")] {
                assert!(may_hold_secret(&text) && redacted(&text).contains(REDACTED), "{text}");
            }
        }
        for way in WAYS {
            assert!(may_hold_secret(way), "{way}");
            assert!(may_hold_secret(&way.to_uppercase()) || !has_secret(&way.to_uppercase()));
        }
    }

    /// Whether anything is changed, without the first search.
    fn has_secret(text: &str) -> bool {
        let behind = |(pattern, with): &(Pattern, &str)| {
            matches!(pattern.replace_behind_group(text, with), Cow::Owned(_))
        };
        SHAPED.is_match(text) || BEHIND.iter().any(behind)
    }

    #[test]
    fn ordinary_texts_stay() {
        for text in [
            "my secret garden",
            "the token bucket has a basic understanding of tokens",
            "see https://example.com/a:b@c and user@example.com",
            "the password is required",
            "{\"path\": \"notes.txt\", \"n\": 17}",
            "skip sk-short and eyJ",
            "an author, not an authorization",
        ] {
            assert_eq!(redacted(text), text);
        }
        let mut document =
            json!({"usage": {"input_tokens": 7}, "token": 7, "api_key": ["a"], "secret": null});
        redact(&mut document);
        let expected = json!({"usage": {"input_tokens": 7}, "token": "[redacted]",
            "api_key": "[redacted]", "secret": null});
        assert_eq!(document, expected);
    }

    #[test]
    fn what_was_left_as_it_was_shown_keeps_its_secret() {
        let original =
            json!({"password": "hunter2", "to": ["a", "key: tl_x", 1], "n": {"token": "t"}});
        let changed =
            json!({"password": "[redacted]", "to": ["b", "key: tl_x", 1], "n": {"token": "mine"}});
        let expected =
            json!({"password": "hunter2", "to": ["b", "key: tl_x", 1], "n": {"token": "mine"}});
        assert_eq!(restored(changed, &original), expected);
        assert_eq!(restored(json!("x"), &original), json!("x"));
    }

    #[test]
    fn a_document_as_text_stays_one() {
        let text =
            redacted(r#"{"api_key": "hunter2", "n": [1, {"password": "a b"}]}"#).into_owned();
        let document: Value = serde_json::from_str(&text).unwrap();
        let expected = json!({"api_key": "[redacted]", "n": [1, {"password": "[redacted]"}]});
        assert_eq!(document, expected);
    }
}
