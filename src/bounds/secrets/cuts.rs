//! Ends of a text that is too long. Some texts are cut before they are redacted: what is left of a
//! secret that is cut in two may not be recognised any more, so it is left out.

use std::iter;

use super::{may_hold_secret, redacted};
use crate::bounds::off_worker;

/// Bytes on each side of a cut in which a secret is looked for, and by which an end is shortened at most.
const AROUND: usize = 8 * 1024;
/// Bytes by which an end is shortened first, and how often more at each further try.
const FIRST_STEP: usize = 16;
const FACTOR: usize = 4;

/// The beginning of a text, of at most so many bytes, without a part of a secret at its end.
pub fn head(text: &str, most: usize) -> &str {
    let end = text.floor_char_boundary(most);
    let from = text.floor_char_boundary(end.saturating_sub(AROUND));
    let seen = &text[from..text.floor_char_boundary(end.saturating_add(AROUND))];
    if !may_hold_secret(seen) {
        return &text[..end];
    }
    off_worker(|| {
        let whole = redacted(seen);
        let is_shown_alike = |end: &usize| whole.starts_with(&*redacted(&text[from..*end]));
        let before = |step: usize| text.floor_char_boundary(end.saturating_sub(step)).max(from);
        &text[..steps().map(before).find(is_shown_alike).unwrap_or(from)]
    })
}

/// The end of a text, of at most so many bytes, without a part of a secret at its beginning.
pub fn tail(text: &str, most: usize) -> &str {
    let start = text.ceil_char_boundary(text.len().saturating_sub(most));
    let until = text.floor_char_boundary(start.saturating_add(AROUND));
    let seen = &text[text.floor_char_boundary(start.saturating_sub(AROUND))..until];
    if !may_hold_secret(seen) {
        return &text[start..];
    }
    off_worker(|| {
        let whole = redacted(seen);
        let is_shown_alike = |start: &usize| whole.ends_with(&*redacted(&text[*start..until]));
        let after = |step: usize| text.ceil_char_boundary(start + step).min(until);
        &text[steps().map(after).find(is_shown_alike).unwrap_or(until)..]
    })
}

fn steps() -> impl Iterator<Item = usize> {
    let further = iter::successors(Some(FIRST_STEP), |step| Some(step * FACTOR));
    iter::once(0).chain(further.take_while(|step| *step < AROUND))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRETS: [&str; 5] = [
        "ghp_hunter2hunter2hunter2hunter2",
        "password: hunter2hunter2",
        "{\"api_key\": \"hunter2 hunter2\"}",
        "Authorization: Bearer hunter2hunter2hunter2",
        "-----BEGIN PRIVATE KEY-----\nhunter2\nhunter2\n-----END PRIVATE KEY-----",
    ];

    #[test]
    fn no_part_of_a_secret_is_left_at_a_cut() {
        for secret in SECRETS {
            let text = format!("{}{secret}\n{}", "words\n".repeat(9000), "others\n".repeat(9000));
            let at = text.find(secret).unwrap();
            for cut in at..=at + secret.len() {
                let (head, tail) = (head(&text, cut), tail(&text, text.len() - cut));
                for end in [head, tail] {
                    let shown = redacted(end);
                    assert!(!shown.contains("unter") && !shown.contains("hun"), "{cut}: {secret}");
                }
                assert!(cut - head.len() < 300 && text.len() - cut - tail.len() < 300, "{cut}");
            }
        }
    }

    #[test]
    fn an_end_without_a_secret_is_as_long_as_it_may_be() {
        let text = "é words ".repeat(20_000);
        for most in [0, 1, 2, 3, 100, 100_001, text.len(), usize::MAX] {
            assert_eq!(head(&text, most), &text[..text.floor_char_boundary(most)]);
            let start = text.len().saturating_sub(most);
            assert_eq!(tail(&text, most), &text[text.ceil_char_boundary(start)..]);
        }
        assert_eq!((head("", 5), tail("", 5)), ("", ""));
    }

    proptest! {
        #[test]
        fn an_end_is_one_of_the_text(text in "(\\PC|ghp_|password=|\n){0,60}", most in 0usize..80) {
            prop_assert!(text.starts_with(head(&text, most)) && head(&text, most).len() <= most);
            prop_assert!(text.ends_with(tail(&text, most)) && tail(&text, most).len() <= most);
        }
    }
}
