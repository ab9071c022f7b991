//! Credentials that are recognised by their context: the scheme of a request, an address, the files
//! of programs (`.netrc`, `.pgpass`, `config.json` of containers). The credentials are removed where
//! they look random or have the form that such a context requires; the context itself stays.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use regex_automata::util::captures::Captures;

use super::shapes::looks_random;
use super::values::{Quoting, is_secret};
use super::{REDACTED, compiled};
use crate::bounds::pattern::Pattern;

/// Matches in every text with such credentials, other than those behind a scheme.
pub(super) const BEGINNINGS: &str = r#"(?i:bearer|basic[ \t\r\n\\])|:/+[^/ \t\r\n]*@|(?i:auth)\\*["']|:(?:\*|5[0-9]{3}|6[0-9]{3}):"#;

/// The credentials are the first group.
static PATTERNS: LazyLock<[(Pattern, IsSecret); 6]> = LazyLock::new(|| {
    let blank = r"(?:\s|\\+[nrt])+";
    [
        (compiled(r"(?i)bearer\s+([A-Za-z0-9+/=._~-]{12,})"), looks_random as IsSecret),
        (compiled(r"(?i)basic\s+([A-Za-z0-9+/]{20,}={0,2})"), looks_random),
        (compiled(r#"[A-Za-z][A-Za-z0-9+.-]*:/+[^\s/:@"<>\\]*:([^\s/"<>\\]+)@"#), |value| {
            is_secret("password", value, Quoting::Quoted)
        }),
        (
            compiled(&format!(
                r#"(?i)(?:machine{blank}[^\s\\"]+|default){blank}(?:login{blank}[^\s\\"]+{blank})?password{blank}([^\s\\"]+)"#
            )),
            |value| is_secret("password", value, Quoting::Bare),
        ),
        (
            compiled(
                r#"[A-Za-z0-9.*_-]+:(?:\*|5[0-9]{3}|6[0-9]{3}):[A-Za-z0-9_*.-]+:[A-Za-z*][A-Za-z0-9_*.@-]*:([^\s:"'\\]{4,})"#,
            ),
            |_| true,
        ),
        (compiled(r#"(?i)["']auth\\*["']\s*:\s*\\*["']([A-Za-z0-9+/]{8,}={0,2})"#), is_pair),
    ]
});

type IsSecret = fn(&str) -> bool;

/// A text without such credentials.
pub(super) fn without_credentials(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    for (pattern, is_secret) in &*PATTERNS {
        let changed =
            pattern.replace_where(&text, REDACTED, |found| secret_range(&text, found, *is_secret));
        if let Cow::Owned(changed) = changed {
            text = Cow::Owned(changed);
        }
    }
    text
}

fn secret_range(text: &str, found: &Captures, is_secret: IsSecret) -> Option<Range<usize>> {
    let group = found.get_group(1)?;
    is_secret(text.get(group.start..group.end)?).then_some(group.start..group.end)
}

/// Whether it is the base64 of a name and a password.
pub(super) fn is_pair(text: &str) -> bool {
    let bytes = BASE64_STANDARD
        .decode(text)
        .or_else(|_| base64::prelude::BASE64_STANDARD_NO_PAD.decode(text.trim_end_matches('=')));
    bytes.is_ok_and(|bytes| bytes.contains(&b':') && bytes.is_ascii())
}
