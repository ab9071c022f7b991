//! Printing: results to standard output, everything else to standard error.
//!
//! A closed pipe is not an error. Invisible characters in text from models and servers are escaped, so
//! that it cannot send escape sequences to the terminal or be read as another text.

use std::io::{self, ErrorKind, IsTerminal as _, Write as _};

use serde_json::Value;

use crate::message::visible::{escaped, escaped_json};
use crate::run::text_of;

/// Writes a result and a line feed to standard output. A closed pipe is not an error.
pub(super) fn print(text: &str) -> io::Result<()> {
    match line(text) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// As [`print`], for one line of many: a closed pipe is an error, so that the caller stops.
pub(super) fn line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

pub(super) fn print_json(value: &Value) -> io::Result<()> {
    print(&escaped_json(&format!("{value:#}")))
}

/// As [`line`], for JSON. A terminal gets what is hidden in it as escapes, which are the same value.
pub(super) fn json_line(value: &Value) -> io::Result<()> {
    let text = value.to_string();
    if stdout_is_terminal() { line(&escaped_json(&text)) } else { line(&text) }
}

/// Writes a line to standard error, ignoring failures.
pub(super) fn print_notice(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

pub(super) fn stdout_is_terminal() -> bool {
    io::stdout().is_terminal()
}

/// Asks a question on a terminal. Without one the answer is no.
pub(super) fn confirmed(question: &str) -> io::Result<bool> {
    if !io::stdin().is_terminal() {
        return Ok(false);
    }
    let mut error = io::stderr().lock();
    write!(error, "{question} [y/N] ")?;
    error.flush()?;
    let mut answer = String::new();
    io::stdin().read_line(&mut answer)?;
    Ok(["y", "yes"].contains(&answer.trim().to_ascii_lowercase().as_str()))
}

/// Text on one line of at most `width` characters, with invisible characters escaped.
pub(super) fn one_line(text: &str, width: usize) -> String {
    let flat = text.replace(['\n', '\t'], " ");
    let flat = escaped(&flat);
    if flat.chars().count() <= width {
        return flat.into_owned();
    }
    flat.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

/// The text of a text output; any other output as indented JSON. Invisible characters are escaped.
pub(super) fn human_readable(output: &Value) -> String {
    match text_of(output) {
        Some(text) => escaped(text).into_owned(),
        None => escaped_json(&format!("{output:#}")).into_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nothing_in_an_output_hides() {
        let text = |text: &str| human_readable(&json!({ "result": text }));
        assert_eq!(text("tide\n\ttables, größer"), "tide\n\ttables, größer");
        assert_eq!(text("\u{1b}[2J\r"), "\\u{1b}[2J\\r");
        assert_eq!(text("a\u{202e}b\u{200b}"), "a\\u{202e}b\\u{200b}");
        let output = json!({"\u{202e}": "\u{200b}\u{9b}", "n": 1});
        let shown = human_readable(&output);
        assert!(shown.is_ascii() && shown.contains("\\u202e"), "{shown}");
        assert_eq!(serde_json::from_str::<Value>(&shown).unwrap(), output);
    }

    #[test]
    fn one_line_is_one_line() {
        assert_eq!(one_line("a\nb\u{7}", 20), "a b\\u{7}");
        assert_eq!(one_line("abcdef", 4), "abc…");
        assert_eq!(one_line("a\u{202e}b\u{e0041}", 40), "a\\u{202e}b\\u{e0041}");
    }
}
