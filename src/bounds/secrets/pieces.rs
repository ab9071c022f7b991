//! Secrets in a text that comes in pieces, e.g. an answer that a model is still writing.
//!
//! A piece is passed on up to its last blank, because the last word may continue. A line that may
//! contain a secret is held back until it ends. What is a secret may depend on the words before it,
//! which are remembered. A private key is never passed on. The text that is held back or remembered is
//! bounded, so a part of a secret of more than 1 KiB, or of more than 256 bytes in several lines, may be
//! shown.

use super::{may_hold_secret, redacted};

/// Bytes of a line that wait for its end.
const MAX_LINE: usize = 2 * 1024;
/// Bytes of the text before that are remembered.
const MAX_BEFORE: usize = 256;
/// Blanks, and signs of any kind, at which a longer line may be cut.
const MOST_CUTS: usize = 3;
/// The beginning and the end of a key or certificate, and the label of a private key.
const KEY_BEGINS: &str = "-----BEGIN";
const KEY_ENDS: &str = "-----END";
const PRIVATE: &str = "PRIVATE KEY";
/// What ends the line of the end, and the bytes between them at most.
const DASHES: &str = "-----";
const MAX_LABEL: usize = 64;
/// Endings of a line whose value may be in the next line.
const NAMES_NEXT: [&str; 6] = [":", "=", "=>", "|", "\"\"\"", "'''"];

/// Removes secrets from a text that comes in pieces.
#[derive(Debug, Default)]
pub struct StreamRedactor {
    /// Text that is not passed on yet.
    waiting: String,
    /// The end of the text that is passed on, with its secrets.
    before: String,
    /// Whether the text is inside a private key, whose beginning was passed on as redacted.
    in_key: bool,
}

impl StreamRedactor {
    /// Adds a piece, and returns the text that can be passed on.
    pub fn push(&mut self, piece: &str) -> String {
        let mut text = std::mem::take(&mut self.waiting);
        text.push_str(piece);
        let (mut ready, mut rest) = (String::new(), text.as_str());
        loop {
            if self.in_key {
                (rest, self.in_key) = behind_key(rest);
            }
            let end = if self.in_key { None } else { ready_until(&self.before, rest) };
            let Some(end) = end else { break };
            let (part, left) = rest.split_at(end);
            self.in_key = ends_in_key(part);
            ready.push_str(&self.passed_on(part));
            rest = left;
        }
        rest.clone_into(&mut self.waiting);
        ready
    }

    /// Returns the rest after the last piece.
    pub fn finish(&mut self) -> String {
        let Self { waiting, before, in_key } = std::mem::take(self);
        if in_key { String::new() } else { behind(&before, &format!("{before}{waiting}")) }
    }

    /// A part without secrets, which is remembered.
    fn passed_on(&mut self, part: &str) -> String {
        let known = self.before.len();
        self.before.push_str(part);
        let shown = behind(&self.before[..known], &self.before);
        if self.in_key {
            self.before.clear(); // all up to the end of the key would be a secret
        }
        let over = self.before.len().saturating_sub(MAX_BEFORE);
        self.before.drain(..self.before.ceil_char_boundary(over));
        shown
    }
}

/// The text behind its known beginning, without the secrets of both.
fn behind(known: &str, text: &str) -> String {
    if !may_hold_secret(text) {
        return text.split_at(known.len()).1.to_owned();
    }
    let (known, mut text) = (redacted(known), redacted(text).into_owned());
    let same = text.chars().zip(known.chars()).take_while(|(one, other)| one == other);
    let same = same.map(|(letter, _)| letter.len_utf8()).sum();
    text.split_off(same)
}

/// Whether the end of a text is inside a private key.
fn ends_in_key(text: &str) -> bool {
    let Some((_, begun)) = text.rsplit_once(KEY_BEGINS) else { return false };
    let label = &begun[..label_end(begun)];
    let may_be_private = label.contains(PRIVATE) || label.len() == begun.len();
    may_be_private && !begun.contains(KEY_ENDS)
}

/// The end of the label that a text begins with.
fn label_end(text: &str) -> usize {
    let is_other = |c: char| !(c.is_ascii_uppercase() || c.is_ascii_digit() || c == ' ');
    text.find(is_other).unwrap_or(text.len())
}

/// The text after a private key, and whether the key continues in the next piece.
fn behind_key(text: &str) -> (&str, bool) {
    for (at, _) in text.match_indices(KEY_ENDS) {
        let label = &text[at + KEY_ENDS.len()..];
        let end = label_end(label);
        if let Some(behind) = label[end..].strip_prefix(DASHES) {
            return (behind, false);
        }
        if end <= MAX_LABEL && DASHES.starts_with(&label[end..]) {
            return (&text[at..], true);
        }
    }
    let kept = text.len().saturating_sub(KEY_ENDS.len());
    (&text[text.floor_char_boundary(kept)..], true)
}

/// How much of a text can be passed on: whole lines, then words that cannot become part of a secret.
fn ready_until(before: &str, text: &str) -> Option<usize> {
    let begun_line = before.rsplit('\n').next().unwrap_or_default();
    let end = match lines_end(text) {
        Some(end) => end,
        None if text.len() > MAX_LINE => cut(text),
        None if may_hold_secret(&format!("{begun_line}{text}")) => return None,
        None => text.rfind(char::is_whitespace).map(|at| text.ceil_char_boundary(at + 1))?,
    };
    (end > 0).then_some(end)
}

/// Where a line that is too long is cut: not within a secret, as far as the text behind the cut shows.
fn cut(text: &str) -> usize {
    let seen = &text[..text.floor_char_boundary(MAX_LINE)];
    let end = seen.floor_char_boundary(MAX_LINE / 2);
    let whole = redacted(seen);
    let is_between = |at: &usize| {
        let (part, left) = seen.split_at(*at);
        whole.strip_prefix(&*redacted(part)).is_some_and(|rest| rest == redacted(left))
    };
    let blanks = seen[..end].rmatch_indices(char::is_whitespace).take(MOST_CUTS);
    let signs = seen[..end].rmatch_indices(|c: char| !c.is_alphanumeric()).take(MOST_CUTS);
    let mut ends = blanks.chain(signs).map(|(at, sign)| at + sign.len());
    ends.find(is_between).unwrap_or(end)
}

/// The end of the whole lines, or of the first one with the beginning of a private key.
fn lines_end(text: &str) -> Option<usize> {
    let mut end = 0;
    while let Some(more) = line_end(&text[end..]) {
        let lines = &text[end..end + more];
        end += more;
        if lines.contains(KEY_BEGINS) {
            break;
        }
    }
    (end > 0).then_some(end)
}

/// The end of the first line, or of the second one if the first ends with the name of a value in the second.
fn line_end(text: &str) -> Option<usize> {
    let end = text.find('\n')? + 1;
    let line = text[..end].trim_end();
    let is_open = NAMES_NEXT.iter().any(|sign| line.ends_with(sign));
    if !is_open || !may_hold_secret(line) {
        return Some(end);
    }
    text[end..].find('\n').map(|next| end + next + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn in_pieces(text: &str, size: usize) -> String {
        let mut pieces = StreamRedactor::default();
        let letters: Vec<char> = text.chars().collect();
        let mut all: String =
            letters.chunks(size).map(|piece| pieces.push(&String::from_iter(piece))).collect();
        all.push_str(&pieces.finish());
        all
    }

    #[test]
    fn a_secret_in_pieces_is_not_shown() {
        let key =
            "-----BEGIN RSA PRIVATE KEY-----\nhunter2\nhunter2\n-----END RSA PRIVATE KEY-----";
        for text in [
            "use ghp_hunter2hunter2hunter2hunter2 now",
            "the password: hunter2, and more\nnext line",
            "{\"api_key\": \"hunter2\"}",
            "password:\n  hunter2\nand after",
            "Authorization: Bearer hunter2hunter2hunter2",
            "your api key: hunter2 and after",
            "machine example.com login bob password hunter2",
            "machine example.com\n  login bob\n  password hunter2",
            "secret = \"\"\"\nfirst hunter2\nhunter2\n\"\"\"\nafter",
            &format!("before\n{key}\nafter"),
            key,
        ] {
            for size in 1..40 {
                let shown = in_pieces(text, size);
                assert!(!shown.contains("hunter2"), "{size}: {shown}");
                assert!(shown.contains("[redacted]"), "{size}: {shown}");
                assert_eq!(shown.ends_with("after"), text.ends_with("after"), "{size}: {shown}");
            }
        }
    }

    #[test]
    fn a_long_line_is_not_cut_within_a_secret() {
        let (words, list) = ("word ".repeat(MAX_LINE / 5), "[1],".repeat(MAX_LINE / 4));
        for filler in [&words, &list] {
            for pad in 5..20 {
                let (pad, filler) = ("x".repeat(pad), &filler[40..]);
                let line = format!("password: hunter2, {pad} {filler}password: hunter2, {filler}");
                for size in [16, line.len()] {
                    let shown = in_pieces(&line, size);
                    assert!(!shown.contains("hunter2"), "{size}: {shown}");
                }
            }
        }
    }

    #[test]
    fn what_follows_a_long_key_in_its_line_is_shown() {
        let key = format!(
            r"-----BEGIN PRIVATE KEY-----\n{}-----END PRIVATE KEY-----",
            r"hunter2\n".repeat(300)
        );
        let text = format!(r#"{{"content": "{key}\n{}and after"#, "word ".repeat(100));
        for size in [1, 7, 40, text.len()] {
            let shown = in_pieces(&text, size);
            assert!(shown.starts_with(r#"{"content": "[redacted]"#), "{size}: {shown}");
            assert!(!shown.contains("hunter") && shown.ends_with("word and after"), "{size}");
        }
    }

    #[test]
    fn what_is_no_private_key_is_shown() {
        let text = "-----BEGIN CERTIFICATE-----\nTUlJ\nabcd\n-----END CERTIFICATE-----\n\
                    it begins with -----BEGIN or so\nafter";
        for size in [1, 7, 40, text.len()] {
            assert_eq!(in_pieces(text, size), text, "{size}");
        }
    }

    #[test]
    fn words_are_handed_on_as_they_come() {
        let mut pieces = StreamRedactor::default();
        let shown: Vec<String> =
            ["Let me", " look ", "at", " it.\nDo", "ne."].map(|p| pieces.push(p)).into();
        assert_eq!(shown, ["Let ", "me look ", "", "at it.\n", ""]);
        assert_eq!(pieces.finish(), "Done.");
        let named = "The token is in the header.\nNow ";
        assert_eq!(pieces.push(&format!("{named}read")), named);
        assert_eq!(pieces.push(" it"), "read ");
    }

    proptest! {
        #[test]
        fn ordinary_text_stays_whole(text in "[ a-s\n.é]{0,200}", size in 1usize..20) {
            prop_assume!(!may_hold_secret(&text));
            prop_assert_eq!(in_pieces(&text, size), text);
        }

        #[test]
        fn no_text_is_kept_or_panics(text in any::<String>(), size in 1usize..9) {
            in_pieces(&text, size);
        }
    }
}
