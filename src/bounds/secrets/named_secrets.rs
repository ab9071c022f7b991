//! Secrets under a name: `password = …`, `"api_key": "…"`, `--token …`.
//!
//! A text may be escaped within another text, as JSON in JSON, and so on. Each level turns `n`
//! backslashes before a quote into `2n + 1`. A value ends at a quote with as many backslashes as its
//! opening quote.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::LazyLock;

use regex_automata::util::captures::Captures;

use super::shapes::{BEFORE, looks_random};
use super::values::{Quoting, is_identifier, is_indexed, is_secret};
use super::{NAMES, REDACTED, compiled};
use crate::bounds::pattern::Pattern;

/// Bytes of a quoted value that spans several lines, at most.
const MAX_LINES: usize = 4 * 1024;
/// Bytes of a triple-quoted value that is examined, at most; a longer one is a secret.
const MAX_BLOCK: usize = 64 * 1024;
/// Bytes of a value without quotes that decide whether it is a secret.
const MAX_WORD: usize = 512;
/// Bytes of a type between a name and its value.
const MAX_TYPE: usize = 80;
/// White space, in a text that may be escaped or a diff.
const BLANK: &str = r"(?:\\+n[-+]?|\n[-+]?|\s|\\+[rt])";
/// Characters that end a value without quotes.
const SIGNS: [char; 16] =
    [' ', '\t', '"', '\'', '\\', ',', ';', '&', '<', '>', '[', ']', '{', '}', ')', '`'];
/// Schemes before the credentials of a request.
const SCHEMES: [&str; 4] = ["bearer", "basic", "token", "digest"];

fn name() -> String {
    let others = NAMES[1..].join("|");
    // Token counts are no secrets.
    let token = r"token(?:[0-9]*|[_-][A-Za-z0-9_-]*)";
    let short =
        "pwd|(?:db|user|mysql|pg|postgres|smtp|mail|ftp|ssh|admin|root|auth|proxy|redis)_pass";
    format!(r"[A-Za-z0-9_-]*(?:{token}|{short}|(?:{others})[A-Za-z0-9_-]*)")
}

static ASSIGNMENT: LazyLock<Pattern> = LazyLock::new(|| {
    let name = name();
    compiled(&format!(
        r#"(?i)({name})\\*["'`]?{BLANK}*(:=|=>|={{1,3}}|:){BLANK}*(?:[|>][-+]?{BLANK}+)?"#
    ))
});
static COMMAND_OPTION: LazyLock<Pattern> =
    LazyLock::new(|| compiled(&format!("(?i){BEFORE}-{{1,2}}({}){BLANK}+", name())));
static STATEMENT: LazyLock<Pattern> =
    LazyLock::new(|| compiled(&format!(r#"(?i)({}){BLANK}+(?:is|was):?{BLANK}+["'`]?"#, name())));
static XML_ELEMENT: LazyLock<Pattern> =
    LazyLock::new(|| compiled(&format!(r"(?i)<({})>([^<]+)<\\*/", name())));

/// A text without the values under names of secrets.
pub(super) fn without_named_secrets(text: &str) -> Cow<'_, str> {
    let mut text = Cow::Borrowed(text);
    let finders: [(&Pattern, Finder); 4] = [
        (&ASSIGNMENT, assigned_value),
        (&COMMAND_OPTION, option_value),
        (&STATEMENT, stated_value),
        (&XML_ELEMENT, element_value),
    ];
    for (pattern, find) in finders {
        let changed = pattern.replace_where(&text, REDACTED, |found| find(&text, found));
        if let Cow::Owned(changed) = changed {
            text = Cow::Owned(changed);
        }
    }
    text
}

/// Where the value of an occurrence is, if it is a secret.
type Finder = fn(&str, &Captures) -> Option<Range<usize>>;

fn assigned_value(text: &str, found: &Captures) -> Option<Range<usize>> {
    let name = found.get_group(1)?;
    let start = found.get_match()?.end();
    let written = text.get(name.start..name.end)?;
    let before = text.get(..name.start)?;
    let sign = found.get_group(2).and_then(|sign| text.get(sign.start..sign.end))?;
    let (is_colon, is_comparison) = (sign == ":", sign.starts_with("=="));
    if written.eq_ignore_ascii_case("passwd") && before.ends_with(['/', '\\']) {
        return None; // the file
    }
    if let Some((value, is_whole)) = quoted(text, start) {
        let credentials = value.start + scheme(text.get(value.clone())?);
        let inner = text.get(credentials..value.end)?;
        let is_secret = !is_whole || is_secret(written, inner, Quoting::Quoted);
        return (is_secret && !value.is_empty()).then_some(value);
    }
    if is_colon && written.to_ascii_lowercase().ends_with("cookie") {
        return cookies(text, start);
    }
    if let Some(value) = behind_type(text, start) {
        return Some(value);
    }
    let mut value = unquoted(text, start);
    let credentials = value.start + scheme(text.get(value.start..)?);
    if credentials > value.start {
        value = unquoted(text, credentials);
    }
    if value.is_empty() {
        return None;
    }
    let rest = text.get(value.start..)?;
    let is_reported = ["Permission denied", "No such file", "Is a directory", "Not a directory"]
        .iter()
        .any(|report| rest.starts_with(report));
    let word = text.get(value.clone())?;
    let is_expression = is_indexed(text, &value) || (is_comparison && is_identifier(word));
    let is_secret = !is_reported && !is_expression && is_secret(written, word, Quoting::Bare);
    is_secret.then(|| start..end_of_unquoted(text, &value))
}

/// The value in quotes behind a type: `secret: &str = "…"`.
fn behind_type(text: &str, at: usize) -> Option<Range<usize>> {
    let rest = text.get(at..)?;
    let is_type = |letter: char| letter.is_ascii_alphabetic() || "&'<>:. _|".contains(letter);
    let behind = beginning(rest, MAX_TYPE).find(|letter| !is_type(letter)).filter(|at| *at > 0)?;
    let value = rest.get(behind..)?.strip_prefix('=')?.trim_start_matches(' ');
    let (value, _) = quoted(text, text.len() - value.len())?;
    (!value.is_empty()).then_some(value)
}

fn option_value(text: &str, found: &Captures) -> Option<Range<usize>> {
    let name = found.get_group(1)?;
    let start = found.get_match()?.end();
    let written = text.get(name.start..name.end)?;
    let (value, kind) = match quoted(text, start) {
        Some((value, _)) => (value, Quoting::Quoted),
        None if text.get(start..)?.starts_with('-') => return None,
        None => (unquoted(text, start), Quoting::Bare),
    };
    let is_secret = !value.is_empty() && is_secret(written, text.get(value.clone())?, kind);
    is_secret.then(|| match kind {
        Quoting::Quoted => value,
        Quoting::Bare => value.start..end_of_unquoted(text, &value),
    })
}

fn stated_value(text: &str, found: &Captures) -> Option<Range<usize>> {
    let name = found.get_group(1)?;
    let value = unquoted(text, found.get_match()?.end());
    let word = text.get(value.clone())?;
    let word = word.trim_end_matches(['.', '!', '?', ':']);
    let is_secret =
        looks_random(word) && is_secret(text.get(name.start..name.end)?, word, Quoting::Bare);
    let ends_here = word.len() < value.len();
    let end = if ends_here { value.start + word.len() } else { end_of_unquoted(text, &value) };
    is_secret.then_some(value.start..end)
}

fn element_value(text: &str, found: &Captures) -> Option<Range<usize>> {
    let (name, value) = (found.get_group(1)?, found.get_group(2)?);
    let value = value.start..value.end;
    let name = text.get(name.start..name.end)?;
    is_secret(name, text.get(value.clone())?, Quoting::Quoted).then_some(value)
}

/// The text inside quotes that begin here, and whether they are closed. Three quotes may span several lines.
fn quoted(text: &str, at: usize) -> Option<(Range<usize>, bool)> {
    let rest = text.get(at..)?;
    let slashes = rest.bytes().take_while(|byte| *byte == b'\\').count();
    let quote = *rest.as_bytes().get(slashes)?;
    if !matches!(quote, b'"' | b'\'' | b'`') {
        return None;
    }
    let opening = rest.get(..=slashes)?;
    let three = opening.repeat(3);
    if rest.starts_with(&three) {
        let inside = rest.get(three.len()..)?;
        let end = inside.find(&three);
        let start = at + three.len();
        let is_whole = end.is_some_and(|end| end <= MAX_BLOCK);
        return Some((start..start + end.unwrap_or(inside.len()), is_whole));
    }
    let start = at + slashes + 1;
    let inside = text.get(start..)?;
    let inside = beginning(inside, MAX_LINES);
    let line = inside.find('\n').unwrap_or(inside.len());
    let mut run = 0;
    for (index, byte) in inside.bytes().enumerate() {
        if byte == b'\n' && quote != b'"' {
            break;
        }
        if byte == quote && (run < slashes || (run - slashes) % (2 * slashes + 2) == 0) {
            return Some((start..start + index - run.min(slashes), true));
        }
        run = if byte == b'\\' { run + 1 } else { 0 };
    }
    // An unclosed apostrophe is not a quotation mark.
    (quote == b'"').then_some((start..start + line, false))
}

/// At most so many bytes of a text.
fn beginning(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

fn ends_word(letter: char) -> bool {
    letter.is_whitespace() || SIGNS.contains(&letter)
}

/// The range of a value without quotes, up to [`MAX_WORD`] bytes, which decide whether it is a secret.
fn unquoted(text: &str, at: usize) -> Range<usize> {
    let word = beginning(text.get(at..).unwrap_or_default(), MAX_WORD);
    at..at + word.find(ends_word).unwrap_or(word.len())
}

/// The end of a value without quotes. It is searched only before the value is removed, so that no part of a text is
/// searched twice.
fn end_of_unquoted(text: &str, value: &Range<usize>) -> usize {
    let rest = text.get(value.end..).unwrap_or_default();
    value.end + rest.find(ends_word).unwrap_or(rest.len())
}

/// All cookies of a line, if there are any.
fn cookies(text: &str, at: usize) -> Option<Range<usize>> {
    let rest = text.get(at..)?;
    let ends_line = |letter: char| matches!(letter, '\n' | '\r' | '"' | '\'' | '\\');
    let ends_first = |letter: char| letter.is_whitespace() || ends_line(letter);
    let first = beginning(rest, MAX_WORD).split(ends_first).next().unwrap_or_default();
    if !first.contains('=') && !looks_random(first) {
        return None;
    }
    let line = &rest[..rest.find(ends_line).unwrap_or(rest.len())];
    Some(at..at + line.trim_end().len())
}

/// Bytes of the scheme and the blanks after it, if credentials follow; otherwise 0.
fn scheme(value: &str) -> usize {
    let longest = SCHEMES.iter().map(|scheme| scheme.len()).max().unwrap_or_default();
    let Some(end) = beginning(value, longest + 1).find(' ') else { return 0 };
    let (first, rest) = value.split_at(end);
    let credentials = rest.trim_start_matches(' ');
    let is_scheme = SCHEMES.iter().any(|scheme| first.eq_ignore_ascii_case(scheme));
    let follows = credentials.starts_with(|letter: char| letter.is_alphanumeric() || letter == '[');
    if is_scheme && follows { value.len() - credentials.len() } else { 0 }
}
