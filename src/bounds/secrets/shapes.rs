//! Secrets that are known by their own shape: keys and tokens with a prefix of their issuer.
//!
//! A shape begins at the beginning of a word. In an escaped text, e.g. JSON in JSON, the separator
//! before a word may itself end with a letter, as `\n` does; so may percent encodings and colour
//! sequences of terminals. All of these count as separators.

use std::borrow::Cow;
use std::sync::LazyLock;

use super::{REDACTED, compiled};
use crate::bounds::pattern::Pattern;

/// What may stand before a word.
pub(super) const BEFORE: &str = r"(?:\A|[^A-Za-z0-9]|\\[abefnrtv0]|\\[uU][0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|%[0-9A-Fa-f]{2}|\[[0-9;]{0,9}m)";

/// Shapes, behind [`BEFORE`].
const SHAPES: [&str; 13] = [
    r"(?:sk|rk)[-_][A-Za-z0-9_-]{16,}",
    r"gh[pousr]_[A-Za-z0-9]{20,}",
    r"github_pat_[A-Za-z0-9_]{20,}",
    r"glpat-[A-Za-z0-9_-]{16,}",
    r"xox[abeprs]-[A-Za-z0-9-]{10,}",
    r"(?:npm|hf|whsec)_[A-Za-z0-9+/=]{20,}",
    r"pypi-AgE[A-Za-z0-9_-]{16,}",
    r"AIza[A-Za-z0-9_-]{30,}",
    r"SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}",
    r"tl_[A-Za-z0-9]+_[A-Za-z0-9_-]{32,}",
    r"(?:AKIA|ASIA)[A-Z0-9]{16}",
    r"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*",
    r"hooks\.slack\.com/services/[A-Za-z0-9/]+",
];

/// What a private key begins and ends with.
const KEY_BEGINS: &str = "-----BEGIN [A-Z0-9 ]*PRIVATE KEY(?: BLOCK)?-----";
const KEY_ENDS: &str = "-----END [A-Z0-9 ]*-----";

/// Matches, behind [`BEFORE`], in every text that contains one of the shapes.
pub(super) const BEGINNINGS: &str = r"[sr]k[-_][A-Za-z0-9_-]{16}|gh[pousr]_|github_pat_|glpat-|xox[abeprs]-|npm_|hf_|whsec_|pypi-AgE|AIza|SG\.|tl_|AKIA|ASIA|eyJ|hooks\.slack";

static SHAPED: LazyLock<Pattern> =
    LazyLock::new(|| compiled(&format!("{BEFORE}({})|({KEY_BEGINS})", SHAPES.join("|"))));
static KEY_END: LazyLock<Pattern> = LazyLock::new(|| compiled(KEY_ENDS));

/// A text without keys and tokens of these shapes.
pub(super) fn without_token_shapes(text: &str) -> Cow<'_, str> {
    let mut ends = KEY_END.found_in(text).peekable();
    SHAPED.replace_where(text, REDACTED, |found| {
        if let Some(begins) = found.get_group(2) {
            // Up to the end of the key, of the text, or of the string that quotes the key.
            while ends.next_if(|end| end.start < begins.end).is_some() {}
            let end = ends.peek().map_or_else(
                || {
                    let inside = text[begins.end..].split('"').next().unwrap_or_default();
                    begins.end + inside.trim_end_matches('\\').len()
                },
                |end| end.end,
            );
            return Some(begins.start..end);
        }
        let group = found.get_group(1)?;
        let shaped = text.get(group.start..group.end)?;
        // Names of identifiers and packages may begin in the same way: `sk_buff_release_head_state`.
        let names = ["sk_", "rk_", "sk-learn"];
        let may_be_name = names.iter().any(|name| shaped.starts_with(name));
        let continues = text.as_bytes().get(group.end).is_some_and(u8::is_ascii_alphanumeric);
        let is_part = continues && shaped.starts_with('A') && shaped.len() == 20;
        (!is_part && (!may_be_name || looks_random(shaped))).then_some(group.start..group.end)
    })
}

/// Whether a word has digits, or several capital letters after small ones.
pub(super) fn looks_random(word: &str) -> bool {
    let rises = word.as_bytes().windows(2).filter(|pair| {
        pair.first().is_some_and(u8::is_ascii_lowercase)
            && pair.last().is_some_and(u8::is_ascii_uppercase)
    });
    word.bytes().any(|byte| byte.is_ascii_digit()) || rises.count() > 1
}
