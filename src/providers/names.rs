//! Tool names on the wire.
//!
//! Providers accept `[A-Za-z0-9_-]{1,64}`; ours also hold `:`, `/` and `.`. The mapping is a
//! function of the set of offered names alone, so it is the same on every replica and after every
//! restart.

use std::borrow::Cow;
use std::collections::BTreeMap;

use sha2::{Digest, Sha256};

const MAX: usize = 64;

/// A two-way mapping between our tool names and the names on the wire.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct WireNames {
    to_wire: BTreeMap<String, String>,
    to_ours: BTreeMap<String, String>,
    /// Prefixes of names whose rest is unknown.
    beginnings: Vec<String>,
}

impl WireNames {
    pub fn new<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut names: Vec<&str> = names.into_iter().collect();
        names.sort_unstable();
        names.dedup();
        let plain: Vec<String> = names.iter().map(|n| sanitise(n)).collect();
        let mut map = Self::default();
        for (name, wire) in names.iter().zip(&plain) {
            let collides = plain.iter().filter(|other| *other == wire).count() > 1;
            let wire =
                if wire.len() > MAX || collides { with_hash(name, wire) } else { wire.clone() };
            map.to_ours.insert(wire.clone(), (*name).to_owned());
            map.to_wire.insert((*name).to_owned(), wire);
        }
        map
    }

    /// The same, with prefixes of further names whose rest is unknown.
    #[must_use]
    pub fn beginning(self, beginnings: impl IntoIterator<Item = String>) -> Self {
        Self { beginnings: beginnings.into_iter().collect(), ..self }
    }

    /// The wire name. A name outside the definition (an unknown tool called earlier in the
    /// conversation) is sanitised the same way.
    pub fn to_wire(&self, name: &str) -> Cow<'_, str> {
        if let Some(wire) = self.to_wire.get(name) {
            return Cow::Borrowed(wire);
        }
        let wire = sanitise(name);
        Cow::Owned(if wire.len() > MAX || wire.is_empty() { with_hash(name, &wire) } else { wire })
    }

    /// Our name of a known tool, given by our name or by its wire name.
    pub fn known(&self, name: &str) -> Option<&str> {
        let (ours, of_wire) = (self.to_wire.get_key_value(name), self.to_ours.get(name));
        ours.map(|(ours, _)| ours).or(of_wire).map(String::as_str)
    }

    /// Our name. An unknown wire name is returned unchanged, except that a known prefix is translated.
    pub fn to_ours(&self, wire: &str) -> String {
        if let Some(ours) = self.to_ours.get(wire) {
            return ours.clone();
        }
        let begun = self.beginnings.iter().find_map(|beginning| {
            let rest = wire.strip_prefix(&sanitise(beginning))?;
            Some(format!("{beginning}{rest}"))
        });
        begun.unwrap_or_else(|| wire.to_owned())
    }
}

/// Whether providers accept a name as it is.
pub(super) fn is_valid(name: &str) -> bool {
    (1..=MAX).contains(&name.len()) && sanitise(name) == name
}

/// `:` and `/` become `__`, everything else that is not allowed `_`.
fn sanitise(name: &str) -> String {
    let mut wire = String::with_capacity(name.len());
    for c in name.chars() {
        match c {
            ':' | '/' => wire.push_str("__"),
            c if c.is_ascii_alphanumeric() || c == '_' || c == '-' => wire.push(c),
            _ => wire.push('_'),
        }
    }
    wire
}

/// Truncated, with `_` and six hex digits of the full name's SHA-256.
fn with_hash(name: &str, wire: &str) -> String {
    let short: String = wire.chars().take(MAX - 7).collect();
    let digest: Vec<u8> = Sha256::digest(name.as_bytes()).into_iter().take(3).collect();
    format!("{short}_{}", hex::encode(digest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_both_ways() {
        let long = "http:issues/".to_owned() + &"x".repeat(80);
        let names = WireNames::new(["file_ops", "mcp:time/now", "a.b", "a:b", "a/b", &long]);
        assert_eq!(names.to_wire("file_ops"), "file_ops");
        assert_eq!(names.to_wire("mcp:time/now"), "mcp__time__now");
        assert_eq!(names.to_wire("a.b"), "a_b");
        for name in ["a:b", "a/b", &long] {
            let wire = names.to_wire(name).into_owned();
            assert!(
                wire.len() <= MAX
                    && wire.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-'),
                "{wire}"
            );
            assert_eq!(names.to_ours(&wire), name);
        }
        assert_ne!(names.to_wire("a:b"), names.to_wire("a/b"));
        assert_eq!((names.known("a.b"), names.known("a_b")), (Some("a.b"), Some("a.b")));
        assert_eq!((names.known("nobody"), names.to_ours("nobody")), (None, "nobody".to_owned()));
        assert_eq!(names.to_ours("mcp__docs__find__all"), "mcp__docs__find__all");
        let names = names.beginning(["mcp:docs/".to_owned()]);
        assert_eq!(names.to_ours("mcp__docs__find__all"), "mcp:docs/find__all");
        assert_eq!(names.to_ours("mcp__time__now"), "mcp:time/now");
    }
}
