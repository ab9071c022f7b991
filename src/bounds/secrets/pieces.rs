//! Secrets in a text that comes in pieces, e.g. an answer that a model is still writing.
//!
//! A piece is passed on up to its last blank, because the last word may continue. A line that may
//! contain a secret is held back until it ends. A private key is never passed on. The text that is
//! held back is bounded, so a part of a secret of more than 1 KiB may be shown.

use super::{may_hold_secret, redacted};

/// Bytes of a line that wait for its end.
const MAX_LINE: usize = 2 * 1024;
/// Blanks, and signs of any kind, at which a longer line may be cut.
const MOST_CUTS: usize = 3;
/// The beginning and the end of a private key.
const KEY_BEGINS: &str = "-----BEGIN";
const KEY_ENDS: &str = "-----END";
/// Endings of a line whose value may be in the next line.
const NAMES_NEXT: [&str; 6] = [":", "=", "=>", "|", "\"\"\"", "'''"];

/// Removes secrets from a text that comes in pieces.
#[derive(Debug, Default)]
pub struct StreamRedactor {
    /// Text that is not passed on yet.
    waiting: String,
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
            let end = if self.in_key { None } else { ready_until(rest) };
            let Some(end) = end else { break };
            let (part, left) = rest.split_at(end);
            let begins = part.rfind(KEY_BEGINS);
            self.in_key = begins.is_some_and(|at| !part[at..].contains(KEY_ENDS));
            ready.push_str(&redacted(part));
            rest = left;
        }
        rest.clone_into(&mut self.waiting);
        ready
    }

    /// Returns the rest after the last piece.
    pub fn finish(&mut self) -> String {
        let rest = std::mem::take(&mut self.waiting);
        if std::mem::take(&mut self.in_key) { String::new() } else { redacted(&rest).into_owned() }
    }
}

/// The text after a private key, and whether the key continues in the next piece.
fn behind_key(text: &str) -> (&str, bool) {
    let Some(end) = text.find(KEY_ENDS) else {
        let kept = text.len().saturating_sub(KEY_ENDS.len());
        return (&text[text.floor_char_boundary(kept)..], true);
    };
    match text[end..].find('\n') {
        Some(line) => (&text[end + line..], false),
        None => (&text[end..], true),
    }
}

/// How much of a text can be passed on: whole lines, then words that cannot become part of a secret.
fn ready_until(text: &str) -> Option<usize> {
    let end = match line_end(text) {
        Some(end) => end,
        None if text.len() > MAX_LINE => cut(text),
        None if may_hold_secret(text) => return None,
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
    fn words_are_handed_on_as_they_come() {
        let mut pieces = StreamRedactor::default();
        let shown: Vec<String> =
            ["Let me", " look ", "at", " it.\nDo", "ne."].map(|p| pieces.push(p)).into();
        assert_eq!(shown, ["Let ", "me look ", "", "at it.\n", ""]);
        assert_eq!(pieces.finish(), "Done.");
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
