//! Shortening and quoting of untrusted texts for error messages and log lines; content types.

/// Characters of a sent text that an error message repeats.
pub const MAX_REPEATED: usize = 200;

/// A text cut to the length that an error message repeats.
pub fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_REPEATED) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A text in quotes, escaped, and cut to the length that an error message repeats.
pub fn quoted(text: &str) -> String {
    match text.char_indices().nth(MAX_REPEATED) {
        Some((end, _)) => format!("{:?}…", &text[..end]),
        None => format!("{text:?}"),
    }
}

/// Whether a text has blanks or control characters.
pub fn has_blanks(text: &str) -> bool {
    text.chars().any(|c| c.is_whitespace() || c.is_control())
}

/// A content type in lower case, without its parameters.
pub fn bare_type(kind: &str) -> String {
    kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_type_is_told_whatever_is_written_beside_it() {
        for written in ["text/html", " Text/HTML ; charset=utf-8", "text/html;a;b"] {
            assert_eq!(bare_type(written), "text/html", "{written}");
        }
        assert_eq!(bare_type(""), "");
    }

    #[test]
    fn at_most_200_characters_are_repeated() {
        assert_eq!(shortened("short"), "short");
        assert_eq!(shortened(&"ä".repeat(200)), "ä".repeat(200));
        assert_eq!(shortened(&"ä".repeat(201)), format!("{}…", "ä".repeat(200)));
        assert_eq!(quoted("a\n"), r#""a\n""#);
        assert_eq!(quoted(&"x".repeat(900_000)), format!("\"{}\"…", "x".repeat(200)));
    }
}
