//! Globs on paths and names, of any author: bounded in length and nesting before they are parsed,
//! and in the size of what they compile to.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock};

use globset::GlobBuilder;
use parking_lot::RwLock;
use regex_automata::meta::Regex;
use regex_automata::util::syntax;

use super::Refused;

/// Bytes of a glob.
pub const MAX_GLOB: usize = 1024;
/// Braces in one another.
const MAX_NESTING: usize = 16;
/// Bytes of a compiled glob.
const MAX_PROGRAM: usize = 256 * 1024;
/// Bytes of the cache that matching builds.
const MAX_CACHE: usize = 256 * 1024;
/// Compiled globs that are cached.
const KEPT: usize = 256;

/// Characters that have a meaning in globs.
const SPECIAL: [char; 7] = ['*', '?', '[', ']', '{', '}', '\\'];

/// A compiled glob.
#[derive(Debug, Clone)]
pub struct Glob {
    written: Arc<str>,
    matcher: Matcher,
}

/// Most globs are too simple to need a regular expression.
#[derive(Debug, Clone)]
enum Matcher {
    /// The text is the glob.
    Whole,
    /// The text begins with this: the glob without the asterisk at its end.
    Prefix(Box<str>),
    Regex(Regex),
}

/// A set of globs on paths, matched in one pass.
#[derive(Debug, Clone)]
pub struct PathGlobs(Regex);

impl PathGlobs {
    /// `None` if they are too large together, or one of them is not a valid glob.
    pub fn new<'g>(written: impl Iterator<Item = &'g str>) -> Option<Self> {
        let parsed = written.map(|glob| Some(parsed(glob, true).ok()?.regex().to_owned()));
        let patterns = parsed.collect::<Option<Vec<String>>>()?;
        Some(Self(compiled(&patterns).ok()?))
    }

    /// Whether one of them matches this path.
    pub fn any_is_match(&self, path: &str) -> bool {
        self.0.is_match(path.as_bytes())
    }
}

static OF_NAMES: LazyLock<RwLock<HashMap<String, Option<Glob>>>> = LazyLock::new(RwLock::default);

impl Glob {
    /// A glob on names, which are no paths: `*` matches a `/` too.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_names(written: &str) -> Result<Self, Refused> {
        Self::compile(written, false)
    }

    /// A glob on paths: `*` stays within one name.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn of_paths(written: &str) -> Result<Self, Refused> {
        Self::compile(written, true)
    }

    fn compile(written: &str, literal_separator: bool) -> Result<Self, Refused> {
        if written.len() > MAX_GLOB {
            return Err(Refused(format!("is longer than {MAX_GLOB} bytes")));
        }
        let mut nesting = 0_usize;
        for c in written.chars() {
            match c {
                '{' => nesting += 1,
                '}' => nesting = nesting.saturating_sub(1),
                _ => {}
            }
            if nesting > MAX_NESTING {
                return Err(Refused(format!("has more than {MAX_NESTING} braces in one another")));
            }
        }
        let matcher = match written.strip_suffix('*') {
            Some(prefix) if !literal_separator && !prefix.contains(SPECIAL) => {
                Matcher::Prefix(prefix.into())
            }
            None if !written.contains(SPECIAL) => Matcher::Whole,
            _ => Matcher::Regex(compiled(&[parsed(written, literal_separator)?.regex()])?),
        };
        Ok(Self { written: written.into(), matcher })
    }

    /// As it was written.
    pub fn written(&self) -> &str {
        &self.written
    }

    /// Whether it matches this path or name.
    pub fn is_match(&self, text: &str) -> bool {
        match &self.matcher {
            Matcher::Whole => *self.written == *text,
            Matcher::Prefix(prefix) => text.starts_with(&**prefix),
            Matcher::Regex(regex) => regex.is_match(text.as_bytes()),
        }
    }
}

fn parsed(written: &str, literal_separator: bool) -> Result<globset::Glob, Refused> {
    let glob = GlobBuilder::new(written).literal_separator(literal_separator).build();
    glob.map_err(|e| Refused(format!("is not a glob: {}", e.kind())))
}

fn compiled(patterns: &[impl AsRef<str>]) -> Result<Regex, Refused> {
    let limits = Regex::config()
        .utf8_empty(false)
        .dfa(false) // many are compiled at a start, and what they match is short
        .nfa_size_limit(Some(MAX_PROGRAM))
        .onepass_size_limit(Some(MAX_CACHE))
        .hybrid_cache_capacity(MAX_CACHE);
    let syntax = syntax::Config::new().utf8(false).dot_matches_new_line(true);
    let regex = Regex::builder().configure(limits).syntax(syntax).build_many(patterns);
    regex.map_err(|_| Refused("is too large when compiled".to_owned()))
}

/// Whether a glob on names matches a name; `None` if it is not a valid glob.
pub fn means(written: &str, name: &str) -> Option<bool> {
    {
        let known = OF_NAMES.read();
        if let Some(glob) = known.get(written) {
            return glob.as_ref().map(|glob| glob.is_match(name));
        }
    }
    let glob = Glob::of_names(written).ok();
    let answer = glob.as_ref().map(|glob| glob.is_match(name));
    if written.len() <= MAX_GLOB {
        let mut known = OF_NAMES.write();
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert(written.to_owned(), glob);
    }
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn globs_mean_what_the_library_says() {
        for (glob, text, names, paths) in [
            ("*.md", "a.md", true, true),
            ("*.md", "a/b.md", true, false),
            ("**/*.md", "a/b.md", true, true),
            ("**/*.md", "b.md", true, true),
            ("a/**", "a/b/c", true, true),
            ("{a,b{c,d}}", "bd", true, true),
            ("[a-c]?", "bé", false, false),
            ("[a-c]?", "bx", true, true),
            ("", "", true, true),
            ("*", "a\nb", true, true),
            ("*", "", true, true),
            ("*", "a/b", true, false),
            ("a/*", "a/b/c", true, false),
            ("a/*", "a/", true, true),
            ("a*", "b", false, false),
            ("a**", "ab/c", true, false),
            ("a/b", "a/b", true, true),
            ("a/b", "a/bc", false, false),
            ("über.md", "über.md", true, true),
            ("a,b", "a,b", true, true),
            ("!a", "!a", true, true),
            ("a]", "a]", true, true),
        ] {
            assert_eq!(Glob::of_names(glob).unwrap().is_match(text), names, "{glob} {text}");
            assert_eq!(Glob::of_paths(glob).unwrap().is_match(text), paths, "{glob} {text}");
            assert_eq!(means(glob, text), Some(names));
            for (literal_separator, expected) in [(false, names), (true, paths)] {
                let mut library = GlobBuilder::new(glob);
                let library = library.literal_separator(literal_separator).build().unwrap();
                assert_eq!(library.compile_matcher().is_match(text), expected, "{glob} {text}");
            }
        }
    }

    #[test]
    fn what_would_exhaust_the_library_is_refused_first() {
        let nested = |n: usize| format!("*{}{}", "{".repeat(n), "}".repeat(n));
        assert!(Glob::of_paths(&nested(16)).is_ok());
        for glob in [nested(17), nested(20_000), "*".repeat(900_000), "{".repeat(1025)] {
            assert!(Glob::of_names(&glob).is_err());
            assert_eq!(means(&glob, "x"), None);
        }
        assert!(Glob::of_names("[").is_err());
    }
}
