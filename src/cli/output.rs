//! What is written where: results on standard output, everything else on standard error.
//!
//! Whoever closes the reading end has read enough: that is no error. What came from a model or a
//! server is shown without control characters, so that it cannot play with the terminal.

use std::borrow::Cow;
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};

use serde_json::Value;

use crate::message::visible::{escaped, escaped_json};

/// Writes one result to standard output, and a line feed.
///
/// # Errors
/// The device failed. A closed pipe is no error.
pub(super) fn print(text: &str) -> io::Result<()> {
    match line(text) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// As [`print`], for one line of many: a closed pipe is an error, so that the writer stops.
pub(super) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Writes indented JSON to standard output.
pub(super) fn print_json(value: &Value) -> io::Result<()> {
    print(&escaped_json(&format!("{value:#}")))
}

/// Tells a person something on standard error. Nobody listening is nothing to worry about.
pub(super) fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Whether a person reads standard output.
pub(super) fn is_read_by_a_person() -> bool {
    io::stdout().is_terminal()
}

/// The text without control characters except line feeds and tabs, which are shown as escapes.
pub(super) fn harmless(text: &str) -> Cow<'_, str> {
    let harms = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(harms) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        if harms(c) { shown.extend(c.escape_default()) } else { shown.push(c) }
    }
    Cow::Owned(shown)
}

/// Text on one line of at most `width` characters, with nothing hidden in it.
pub(super) fn one_line(text: &str, width: usize) -> String {
    let flat = text.replace(['\n', '\t'], " ");
    let flat = escaped(&flat);
    if flat.chars().count() <= width {
        return flat.into_owned();
    }
    flat.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// Text as text, anything else as indented JSON.
pub(super) fn for_a_person(output: &Value) -> String {
    let text = output
        .as_object()
        .filter(|object| object.len() == 1)
        .and_then(|object| object.get("result")?.as_str());
    match text {
        Some(text) => harmless(text).into_owned(),
        None => harmless(&format!("{output:#}")).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_terminal_cannot_be_played_with() {
        assert_eq!(harmless("tide\n\ttables"), "tide\n\ttables");
        assert_eq!(harmless("\u{1b}[2J\r"), "\\u{1b}[2J\\r");
        assert_eq!(one_line("a\nb\u{7}", 20), "a b\\u{7}");
        assert_eq!(one_line("abcdef", 4), "abc…");
        assert_eq!(one_line("a\u{202e}b\u{e0041}", 40), "a\\u{202e}b\\u{e0041}");
    }
}
