//! Regular expressions of any author: bounded in length and in the size of what they compile to,
//! matched in time that is linear in the text.

use std::borrow::Cow;

use regex::{NoExpand, Regex, RegexBuilder};

use super::Refused;

/// Bytes of a pattern.
pub const MAX_PATTERN: usize = 4096;
/// Groups in one another.
const MAX_NESTING: u32 = 50;
/// Bytes of what matching builds on the way.
const MAX_CACHE: usize = 256 * 1024;

/// Who wrote a pattern, and so how large it may be when compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Author {
    /// A file of the operator.
    Operator,
    /// A caller or a model.
    Caller,
}

impl Author {
    /// Bytes of a compiled pattern. One `\w` of Unicode takes 50 KiB.
    fn max_program(self) -> usize {
        match self {
            Self::Operator => 1024 * 1024,
            Self::Caller => 256 * 1024,
        }
    }
}

/// A compiled pattern.
#[derive(Debug, Clone)]
pub struct Pattern(Regex);

impl Pattern {
    /// Compiles a pattern.
    ///
    /// # Errors
    /// What is wrong with it, without the pattern.
    pub fn compile(written: &str, author: Author) -> Result<Self, Refused> {
        if !(1..=MAX_PATTERN).contains(&written.len()) {
            return Err(Refused(format!("must have 1 to {MAX_PATTERN} bytes")));
        }
        let limit = author.max_program();
        let regex = RegexBuilder::new(written)
            .nest_limit(MAX_NESTING)
            .size_limit(limit)
            .dfa_size_limit(MAX_CACHE)
            .build();
        regex.map(Self).map_err(|error| match error {
            regex::Error::CompiledTooBig(_) => {
                Refused(format!("is larger than {limit} bytes when compiled; repeat less in it"))
            }
            error => Refused(format!("is not a regular expression: {}", reason(&error))),
        })
    }

    /// Whether it occurs in a text.
    pub fn is_match(&self, text: &str) -> bool {
        self.0.is_match(text)
    }

    /// The text with another in the place of each occurrence.
    pub fn replace_all<'t>(&self, text: &'t str, with: &str) -> Cow<'t, str> {
        self.0.replace_all(text, NoExpand(with))
    }
}

/// The library's last line is the reason; those before it repeat the pattern.
fn reason(error: &regex::Error) -> String {
    let text = error.to_string();
    let last = text.lines().last().unwrap_or_default().trim();
    super::text::shortened(last.strip_prefix("error: ").unwrap_or(last))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_bounded_before_they_are_built() {
        assert!(
            Pattern::compile(r"\bword\b|[a-z]{2,5}", Author::Caller).unwrap().is_match("a word")
        );
        for bad in
            ["", "(", &"a".repeat(4097), r"(\pL{10}){20}", "[01]*1[01]{10000}x", &"(".repeat(60)]
        {
            let refused = Pattern::compile(bad, Author::Caller).unwrap_err();
            assert!(refused.0.len() < 300, "{refused}");
        }
        assert!(Pattern::compile(r"\pL{2,20}", Author::Operator).is_ok());
    }
}
