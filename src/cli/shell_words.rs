//! Texts as words of a shell's command line, for commands that are printed to be pasted.

use std::path::Path;

use crate::message::visible::escaped;

/// A text as one word.
pub(super) fn shell_word(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "/.:_-+@%,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", escaped(text).replace('\'', r"'\''"))
}

/// A path as one word, which is not an option.
pub(super) fn path_word(path: &Path) -> String {
    let text = path.to_string_lossy();
    if text.starts_with('-') { shell_word(&format!("./{text}")) } else { shell_word(&text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shell_reads_each_path_as_one_argument() {
        for (path, word) in [
            ("demo", "demo"),
            ("/srv/a.b/c_d", "/srv/a.b/c_d"),
            ("a b", "'a b'"),
            ("x;y", "'x;y'"),
            ("$(x)", "'$(x)'"),
            ("it's", r"'it'\''s'"),
            ("~", "'~'"),
            ("größe", "'größe'"),
            ("-dash", "./-dash"),
            ("-", "./-"),
            ("- x", "'./- x'"),
            ("", "''"),
            ("a\u{202e}b", r"'a\u{202e}b'"),
        ] {
            assert_eq!(path_word(Path::new(path)), word, "{path:?}");
        }
    }
}
