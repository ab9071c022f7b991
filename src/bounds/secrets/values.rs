//! Whether a value under the name of a secret is a secret. It is not if it says that there is no
//! secret, what type it has or where it comes from, or if it begins a sentence or an expression of a
//! program. In doubt it counts as one: a password may be an ordinary word.

use std::ops::Range;

use super::names_secret;

/// How a value is quoted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Quoting {
    Quoted,
    /// Without quotes, up to a blank or a sign.
    Bare,
}

/// Digits of the shortest number that can be a secret.
const MIN_DIGITS: usize = 4;

/// Whole values that are no secrets.
const WORDS: &[&str] = &[
    "true",
    "false",
    "null",
    "none",
    "nil",
    "undefined",
    "void",
    "yes",
    "no",
    "on",
    "off",
    "y",
    "n",
    "required",
    "optional",
    "mandatory",
    "missing",
    "invalid",
    "expired",
    "unknown",
    "empty",
    "unset",
    "set",
    "hidden",
    "masked",
    "redacted",
    "removed",
    "inherit",
    "enabled",
    "disabled",
    "default",
    "auto",
    "always",
    "never",
    "prompt",
    "str",
    "string",
    "text",
    "varchar",
    "bytes",
    "bool",
    "boolean",
    "int",
    "integer",
    "number",
    "float",
    "object",
    "array",
    "list",
    "dict",
    "map",
    "any",
    "files",
    "compat",
    "systemd",
    "ldap",
    "sss",
    "bearer",
    "basic",
    "digest",
    "jwt",
    "oauth",
    "oauth2",
    "opaque",
    "plain",
    "hashed",
    "encrypted",
    "incorrect",
    "wrong",
    "failed",
    "failure",
    "denied",
    "accepted",
    "ok",
    "error",
    "rejected",
    "refused",
    "valid",
    "verified",
    "changed",
    "reset",
    "updated",
    "revoked",
    "forgotten",
    "lost",
    "stored",
    "n/a",
    "tbd",
    "todo",
    "u8",
    "u16",
    "u32",
    "u64",
    "i32",
    "i64",
    "usize",
    "char",
];

/// Words that begin a sentence behind a name and a colon or a blank.
const BEGINNINGS: &[&str] = &[
    "the",
    "a",
    "an",
    "is",
    "are",
    "was",
    "be",
    "must",
    "should",
    "may",
    "can",
    "cannot",
    "could",
    "will",
    "would",
    "has",
    "have",
    "had",
    "needs",
    "your",
    "my",
    "our",
    "their",
    "his",
    "its",
    "for",
    "of",
    "to",
    "in",
    "at",
    "by",
    "from",
    "with",
    "without",
    "and",
    "or",
    "not",
    "if",
    "when",
    "where",
    "this",
    "that",
    "these",
    "those",
    "it",
    "we",
    "you",
    "they",
    "as",
    "so",
    "then",
    "than",
    "but",
    "use",
    "used",
    "see",
    "enter",
    "please",
    "provide",
    "choose",
    "get",
    "keep",
    "make",
    "do",
    "does",
    "all",
    "each",
    "every",
    "which",
    "who",
    "what",
    "how",
    "why",
    "both",
    "only",
    "also",
    "just",
    "after",
    "before",
    "requires",
    "require",
    "option",
    "flag",
    "argument",
    "value",
    "parameter",
    "header",
    "field",
    "permission",
    "access",
    "authentication",
];

/// Endings of names whose values describe a secret and are not secret themselves.
const ABOUT: &[&str] = &[
    "_file", "_path", "_dir", "_env", "_name", "_type", "_length", "_policy", "_count", "_ttl",
    "_stdin",
];
/// Endings of names whose values are not secret if they are addresses without credentials.
const PLACES: &[&str] = &["url", "uri", "endpoint", "host"];
/// Names of objects in which programs keep their settings.
const ROOTS: &[&str] = &[
    "self", "this", "config", "cfg", "conf", "settings", "request", "req", "res", "response",
    "args", "opts", "options", "env", "os", "process", "params", "ctx", "context", "user", "data",
    "secrets", "props", "state", "var", "local", "module",
];
/// Beginnings of a reference to a value elsewhere.
const REFERENCES: &[&str] = &["${", "$(", "{{", "%(", "@{", "#{", "$env:", "env:"];

/// Whether a value under a name is a secret.
pub(super) fn is_secret(name: &str, value: &str, quoting: Quoting) -> bool {
    let value = value.trim();
    let lower = value.to_ascii_lowercase();
    let name = lowercase_name(name);
    let says_nothing = !value.contains(char::is_alphanumeric)
        || lower.bytes().all(|byte| byte == b'x')
        || lower.starts_with("[redacted]")
        || (value.len() < MIN_DIGITS && value.bytes().all(|byte| byte.is_ascii_digit()))
        || WORDS.contains(&lower.as_str());
    let is_about = ABOUT.iter().any(|end| name.ends_with(end))
        || (PLACES.iter().any(|end| name.ends_with(end)) && is_plain_address(&lower))
        || (name.ends_with("pwd") && value.starts_with(['/', '~', '.']));
    let is_expression =
        quoting == Quoting::Bare && (is_sentence(&lower) || is_code(&name, value) || is_key(value));
    !(says_nothing || is_about || is_expression || is_reference(value, quoting))
}

/// `clientSecret` and `client-secret` as `client_secret`.
fn lowercase_name(name: &str) -> String {
    let mut lower = String::with_capacity(name.len() + 4);
    let mut was_small = false;
    for letter in name.chars() {
        if was_small && letter.is_ascii_uppercase() {
            lower.push('_');
        }
        was_small = letter.is_ascii_lowercase();
        lower.push(if letter == '-' { '_' } else { letter.to_ascii_lowercase() });
    }
    lower
}

/// `${NAME}`, `$NAME`, `%NAME%`, `<name>`.
fn is_reference(value: &str, quoting: Quoting) -> bool {
    let is_name = |name: &str| {
        !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
    };
    let is_variable = |name: &str| is_name(name) || (names_secret(name) && is_identifier(name));
    let is_ended = quoting == Quoting::Bare || value.ends_with(['}', ')']);
    (is_ended && REFERENCES.iter().any(|beginning| value.starts_with(beginning)))
        || value.strip_prefix('$').is_some_and(is_variable)
        || value.strip_prefix('%').and_then(|v| v.strip_suffix('%')).is_some_and(is_variable)
        || (value.starts_with('<') && value.ends_with('>') && !value.contains(char::is_numeric))
}

fn is_plain_address(value: &str) -> bool {
    let behind = value.strip_prefix("https://").or_else(|| value.strip_prefix("http://"));
    behind.is_some_and(|rest| !rest.contains(['@', '?', '=']))
}

fn is_sentence(value: &str) -> bool {
    BEGINNINGS.contains(&value.trim_end_matches(['.', ',', '!', '?', ':']))
}

/// The key of a nested document.
fn is_key(value: &str) -> bool {
    value.strip_suffix(':').is_some_and(|key| is_identifier(&key.replace('-', "_")))
}

/// A name in a program: letters and underscores.
pub(super) fn is_identifier(word: &str) -> bool {
    !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_alphabetic() || byte == b'_')
}

/// A call, a field of something, or the same name once more.
fn is_code(name: &str, value: &str) -> bool {
    let (path, is_call) = match value.split_once('(') {
        Some((path, _)) => (path, true),
        None => (value, false),
    };
    let path = path.replace("::", ".").replace("->", ".").replace("?.", ".").replace('!', "");
    let mut parts = path.trim_end_matches(['?', '.']).split('.');
    if !parts.clone().all(is_identifier) {
        return false;
    }
    let (first, last) = (parts.next().unwrap_or_default(), parts.next_back());
    let is_again = |part: &str| lowercase_name(part) == name;
    let is_variable = first.contains('_') && names_secret(first);
    is_call
        || is_again(first)
        || is_variable
        || last.is_some_and(|last| names_secret(last) || ROOTS.contains(&first))
}

/// Whether a value is followed by what makes it an expression: `[` or `<` behind a name.
pub(super) fn is_indexed(text: &str, value: &Range<usize>) -> bool {
    let next = text.as_bytes().get(value.end);
    let word = text.get(value.clone()).unwrap_or_default();
    next.is_some_and(|next| matches!(next, b'[' | b'<')) && word.split('.').all(is_identifier)
}
