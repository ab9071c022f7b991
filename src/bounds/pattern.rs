//! Regular expressions of any author: bounded in length and in the size of what they compile to,
//! matched in time that is linear in the text.

use std::borrow::Cow;
use std::ops::Range;

use regex_automata::Input;
use regex_automata::meta::Regex;
use regex_automata::util::captures::Captures;
use regex_automata::util::syntax;

use super::Refused;

/// Bytes of a pattern.
pub const MAX_PATTERN: usize = 4096;
/// Groups in one another.
const MAX_NESTING: u32 = 50;
/// Bytes of the cache that matching builds.
const MAX_CACHE: usize = 256 * 1024;
/// The same for many patterns at once.
const MAX_SET_CACHE: usize = 2 * 1024 * 1024;
/// Bytes of text times bytes of compiled program that are searched between two checks of the stop
/// signal: at worst a tenth of a second.
const STRIDE: usize = 4 * 1024 * 1024 * 1024;
/// Bytes that are searched at once at least, and at most.
const PIECES: (usize, usize) = (4 * 1024, 4 * 1024 * 1024);
/// Bytes that two pieces of a text share: a match up to this length is found across their border.
const OVERLAP: usize = 1024;

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
pub struct Pattern {
    regex: Regex,
    /// Bytes that are searched at once.
    piece: usize,
}

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
        let limits = Regex::config()
            .nfa_size_limit(Some(limit))
            .onepass_size_limit(Some(MAX_CACHE))
            .hybrid_cache_capacity(MAX_CACHE);
        let syntax = syntax::Config::new().nest_limit(MAX_NESTING);
        let built = Regex::builder().configure(limits).syntax(syntax).build(written);
        let regex = built.map_err(|error| match error.syntax_error() {
            Some(error) => {
                Refused(format!("is not a regular expression: {}", reason(&error.to_string())))
            }
            None => {
                Refused(format!("is larger than {limit} bytes when compiled; repeat less in it"))
            }
        })?;
        let piece = (STRIDE / regex.memory_usage().max(1)).clamp(PIECES.0, PIECES.1);
        Ok(Self { regex, piece })
    }

    /// Whether it occurs in a text.
    pub fn is_match(&self, text: &str) -> bool {
        self.regex.is_match(text)
    }

    /// Whether it occurs in a text that may be long; `None` where the search was stopped. Where a
    /// text is searched in pieces, a match that is longer than 1 KiB may be missed.
    pub fn occurs_in(&self, text: &str, mut is_stopped: impl FnMut() -> bool) -> Option<bool> {
        let mut start = 0;
        loop {
            let end = text.floor_char_boundary(start + self.piece);
            if self.regex.is_match(Input::new(text).range(start..end)) {
                return Some(true);
            }
            if end == text.len() {
                return Some(false);
            }
            if is_stopped() {
                return None;
            }
            start = text.floor_char_boundary(end - OVERLAP);
        }
    }

    /// Where it occurs in a text.
    pub fn found_in<'t>(&'t self, text: &'t str) -> impl Iterator<Item = Range<usize>> + 't {
        self.regex.find_iter(text).map(|found| found.range())
    }

    /// The text with another in the place of each occurrence.
    pub fn replace_all<'t>(&self, text: &'t str, with: &str) -> Cow<'t, str> {
        let mut replaced = String::new();
        let mut kept = 0;
        for found in self.regex.find_iter(text) {
            replaced.push_str(&text[kept..found.start()]);
            replaced.push_str(with);
            kept = found.end();
        }
        if kept == 0 && replaced.is_empty() {
            return Cow::Borrowed(text);
        }
        replaced.push_str(&text[kept..]);
        Cow::Owned(replaced)
    }

    /// The text with another in the places that a function finds in or behind its occurrences.
    pub fn replace_where<'t>(
        &self,
        text: &'t str,
        with: &str,
        mut place: impl FnMut(&Captures) -> Option<Range<usize>>,
    ) -> Cow<'t, str> {
        let mut replaced = String::new();
        let (mut kept, mut from) = (0, 0);
        let mut found = self.regex.create_captures();
        loop {
            self.regex.captures(Input::new(text).range(from..), &mut found);
            let Some(whole) = found.get_match() else { break };
            from = whole.end();
            if let Some(place) = place(&found) {
                replaced.push_str(&text[kept..place.start]);
                replaced.push_str(with);
                kept = place.end;
                from = from.max(kept);
            }
            if whole.is_empty() {
                break; // no pattern that replaces anything
            }
        }
        if kept == 0 {
            return Cow::Borrowed(text);
        }
        replaced.push_str(&text[kept..]);
        Cow::Owned(replaced)
    }
}

/// Patterns that are looked for together, in one pass.
#[derive(Debug)]
pub struct Patterns(Regex);

impl Patterns {
    /// Compiles patterns of our own.
    ///
    /// # Errors
    /// What is wrong with one of them, or that they are too large together.
    pub fn compile<'p>(written: impl Iterator<Item = &'p str>) -> Result<Self, Refused> {
        let limits = Regex::config()
            .nfa_size_limit(Some(Author::Operator.max_program()))
            .hybrid_cache_capacity(MAX_SET_CACHE);
        let written: Vec<&str> = written.collect();
        let built = Regex::builder().configure(limits).build_many(&written);
        built.map(Self).map_err(|error| Refused(reason(&error.to_string())))
    }

    /// What is found, by its place in the list, with the byte where it begins; of what overlaps,
    /// the first.
    pub fn found_in<'t>(&'t self, text: &'t str) -> impl Iterator<Item = (usize, usize)> + 't {
        self.0.find_iter(text).map(|found| (found.pattern().as_usize(), found.start()))
    }
}

/// The reason in the library's message: its last line. The lines before it repeat the pattern.
fn reason(text: &str) -> String {
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
