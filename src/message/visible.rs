//! Text as a person can judge it: characters that are not seen, or that change how others are seen,
//! are shown as escapes.
//!
//! Those are control characters, bidirectional marks and overrides, zero-width characters, variation
//! selectors and tags. What is stored, and what a model or a tool reads, stays as it is.

use std::borrow::Cow;
use std::fmt::Write as _;

/// Whether a character is not seen, or changes how others are seen.
pub fn is_hidden(c: char) -> bool {
    let is_control = c.is_control() && !matches!(c, '\n' | '\t');
    is_control
        || matches!(c,
            '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}'
            | '\u{fff0}'..='\u{fffb}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Whether some programs end a line at this character, although it is not a line feed.
fn ends_line(c: char) -> bool {
    matches!(c, '\u{85}' | '\u{2028}' | '\u{2029}')
}

/// The text, with what is hidden in it as `\u{…}`.
pub fn escaped(text: &str) -> Cow<'_, str> {
    replaced(text, is_hidden, |shown, c| shown.extend(c.escape_default()))
}

/// JSON text, with what is hidden in it as JSON escapes: the same value.
pub fn escaped_json(json: &str) -> Cow<'_, str> {
    replaced(json, is_hidden, escape)
}

/// JSON text without characters at which a reader of lines may end one: the same value.
pub fn on_one_line(json: &str) -> Cow<'_, str> {
    replaced(json, ends_line, escape)
}

fn escape(shown: &mut String, c: char) {
    for unit in c.encode_utf16(&mut [0; 2]) {
        let _ = write!(shown, "\\u{unit:04x}");
    }
}

fn replaced(
    text: &str,
    is_replaced: fn(char) -> bool,
    replace: fn(&mut String, char),
) -> Cow<'_, str> {
    if !text.contains(is_replaced) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_replaced(c) { replace(&mut shown, c) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// An override, an isolate, zero-width, tags, a selector, controls of both kinds.
    const HIDDEN: &str = "\u{202e}\u{2066}\u{200b}\u{feff}\u{e0041}\u{fe0f}\u{1b}\u{9b}\u{ad}";

    #[test]
    fn nothing_hides() {
        assert_eq!(escaped("tide\n\ttables, größer, 日本"), "tide\n\ttables, größer, 日本");
        assert_eq!(escaped("a\u{202e}txt.exe"), "a\\u{202e}txt.exe");
        assert!(escaped(HIDDEN).is_ascii(), "{}", escaped(HIDDEN));
    }

    #[test]
    fn json_stays_the_same_value() {
        let value = json!({HIDDEN: [HIDDEN, "\u{2028}\u{2029}\u{85}", "plain ✓"]});
        let shown = escaped_json(&value.to_string()).into_owned();
        assert!(!shown.contains(is_hidden), "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), value);
        let line = on_one_line(&value.to_string()).into_owned();
        assert!(!line.contains(ends_line) && line.contains('\u{202e}'), "{line}");
        assert_eq!(serde_json::from_str::<Value>(&line).unwrap(), value);
    }
}
