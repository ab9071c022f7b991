//! Names that callers and models write, of tools and models; in those of tools, `*` stands for
//! anything. Matched without a library, in time that no pattern can make long.

use super::Refused;
use super::text::has_blanks;

/// Names of tools in one list.
pub const MAX_TOOLS: usize = 64;
/// Bytes of a name.
pub const MAX_NAME: usize = 256;

/// Whether this may be the name of a tool, or names with `*` in them.
pub fn is_tool(name: &str) -> bool {
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.:/*".contains(&b))
}

/// Checks what a request wants to call `provider/model`.
///
/// # Errors
/// It is longer than a name may be, has blanks or control characters, or no such form.
pub fn check_model(name: &str) -> Result<(), Refused> {
    if name.len() > MAX_NAME {
        return Err(Refused(format!("has more than {MAX_NAME} bytes")));
    }
    let is_provider = |provider: &str| {
        !provider.is_empty()
            && provider.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b))
    };
    match name.split_once('/') {
        Some((provider, model))
            if is_provider(provider) && !model.is_empty() && !has_blanks(model) =>
        {
            Ok(())
        }
        _ => Err(Refused(
            "does not have the form provider/model, e.g. openai/gpt-4.1-mini".to_owned(),
        )),
    }
}

/// Whether a name, in which `*` stands for anything, matches this name.
pub fn means(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // The place of the last `*`, and the end of the part of the name that it matches so far.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(byte) if *byte == name[n] => (p, n) = (p + 1, n + 1),
            _ => match &mut star {
                Some((at, taken)) => {
                    *taken += 1;
                    (p, n) = (*at + 1, *taken);
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_star_stands_for_anything() {
        for (pattern, name, meant) in [
            ("file_ops", "file_ops", true),
            ("file_ops", "file_op", false),
            ("*", "", true),
            ("*", "mcp:time/now", true),
            ("mcp:*/now", "mcp:time/now", true),
            ("mcp:*/now", "mcp:time/then", false),
            ("a*b*c", "a--b--b--c", true),
            ("a*b*c", "a--c--b", false),
            ("**a", "bba", true),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(means(pattern, name), meant, "{pattern} {name}");
        }
        let stars = "*a".repeat(128);
        assert!(!means(&stars, &"a".repeat(100)));
    }

    #[test]
    fn names_have_a_length_and_a_form() {
        assert!(is_tool("mcp:time/now") && is_tool("file_*") && is_tool(&"a".repeat(256)));
        for bad in ["", "a b", "a{b}", "ä", &"a".repeat(257)] {
            assert!(!is_tool(bad), "{bad}");
        }
        assert_eq!(check_model("openai/gpt-4.1-mini"), Ok(()));
        assert_eq!(check_model("a/b/c:d"), Ok(()));
        for bad in
            ["", "a", "/b", "a/", "a/b c", "a/b\u{1}", "a b/c", &format!("a/{}", "x".repeat(255))]
        {
            assert!(check_model(bad).is_err(), "{bad}");
        }
    }
}
