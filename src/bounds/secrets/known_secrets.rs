//! Secrets that the service was given: keys of providers, of tools and of its own.
//!
//! They are registered when the service starts, and when tools are read from files. Unlike text that
//! only looks like a secret, they are also removed from what a model reads. Short values are not
//! searched for, because they would match in ordinary words.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{LazyLock, PoisonError, RwLock};

use aho_corasick::{AhoCorasick, MatchKind};
use serde_json::Value;
use url::form_urlencoded::byte_serialize;

use super::{REDACTED, names_secret};

/// Bytes of the shortest secret that is looked for.
const MIN_LENGTH: usize = 8;

/// The registered values, and a search automaton for them.
#[derive(Default)]
struct KnownSecrets {
    values: BTreeSet<String>,
    finder: Option<AhoCorasick>,
}

static KNOWN: LazyLock<RwLock<KnownSecrets>> = LazyLock::new(RwLock::default);

/// Remembers secrets for as long as the process lives.
pub fn remember(secrets: impl IntoIterator<Item = String>) {
    let mut known = KNOWN.write().unwrap_or_else(PoisonError::into_inner);
    let before = known.values.len();
    for secret in secrets.into_iter().filter(|secret| secret.len() >= MIN_LENGTH) {
        known.values.insert(byte_serialize(secret.as_bytes()).collect());
        let in_json = Value::from(secret.as_str()).to_string();
        known.values.insert(in_json[1..in_json.len() - 1].to_owned());
        known.values.insert(secret);
    }
    if known.values.len() > before {
        let mut finder = AhoCorasick::builder();
        finder.match_kind(MatchKind::LeftmostLongest);
        known.finder = finder.build(&known.values).ok();
    }
}

/// The values of environment variables that are named like secrets, except names of files.
pub fn of_environment(
    variables: impl IntoIterator<Item = (String, String)>,
) -> impl Iterator<Item = String> {
    let is_path = |name: &str| {
        let name = name.to_ascii_uppercase();
        ["_FILE", "_PATH", "_DIR"].iter().any(|end| name.ends_with(end))
    };
    let secrets = variables
        .into_iter()
        .filter(move |(name, value)| names_secret(name) && !is_path(name) && !value.contains('/'));
    secrets.map(|(_, value)| value)
}

/// Whether known secrets occur in a text.
pub(super) fn occur_in(text: &str) -> bool {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    known.finder.as_ref().is_some_and(|finder| finder.is_match(text))
}

/// A text without the secrets that the service was given.
pub fn without_known_secrets(text: &str) -> Cow<'_, str> {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    match &known.finder {
        Some(finder) if finder.is_match(text) => {
            let with = vec![REDACTED; finder.patterns_len()];
            Cow::Owned(finder.replace_all(text, &with))
        }
        _ => Cow::Borrowed(text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembered_secrets_are_removed_from_every_text() {
        let secrets = ["short", "aB3/known+secret", "aB3/known", r#"in\"quotes"#];
        remember(secrets.map(str::to_owned));
        for (text, without) in [
            ("it is aB3/known+secret.", "it is [redacted]."),
            ("?key=aB3%2Fknown%2Bsecret&x", "?key=[redacted]&x"),
            ("aB3/known", "[redacted]"),
            ("a short one stays", "a short one stays"),
            (r#"{"key":"in\\\"quotes"}"#, r#"{"key":"[redacted]"}"#),
        ] {
            assert_eq!(without_known_secrets(text), without);
        }
    }

    #[test]
    fn variables_are_secrets_by_their_name() {
        let pairs = [
            ("OPENAI_API_KEY", "sk-1234567"),
            ("DB_PASSWORD", "hunter2hunter2"),
            ("TOKEN_FILE", "token-file-name"),
            ("AWS_SECRET_LOCATION", "/run/secrets/aws"),
            ("MAX_TOKENS", "100000000"),
            ("HOME", "/root-of-all"),
        ];
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found: Vec<String> = of_environment(pairs).collect();
        assert_eq!(found, ["sk-1234567", "hunter2hunter2"]);
    }
}
