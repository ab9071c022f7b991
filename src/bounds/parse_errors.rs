//! Messages of parsers without the document's values: a value in the wrong place may be a secret.

/// What serde puts before a value that it quotes.
const KINDS: [&str; 5] = ["boolean", "integer", "floating point", "character", "string"];

/// A message of serde without the value that it quotes. What was expected instead stays.
pub fn without_value(message: &str) -> String {
    let mut shown = message.to_owned();
    for start in ["invalid type: ", "invalid value: "] {
        for kind in KINDS {
            let Some(at) = shown.find(&format!("{start}{kind} ")) else { continue };
            let value = at + start.len() + kind.len();
            let length = quoted_length(shown[value..].trim_start());
            shown.replace_range(value..value + 1 + length, "");
        }
    }
    let unknown = "unknown variant ";
    if let Some(at) = shown.find(unknown) {
        let value = at + unknown.len();
        let length = quoted_length(&shown[value..]);
        if length > 0 {
            shown.replace_range(value - 1..value + length, "");
        }
    }
    shown
}

/// Length in bytes of the quoted part at the start of a text.
fn quoted_length(text: &str) -> usize {
    let Some(quote) = text.chars().next().filter(|c| ['"', '`'].contains(c)) else { return 0 };
    // Only what stands in double quotes is escaped; the value itself may have a backtick.
    if quote == '`' {
        let end = text.find("`, expected").or_else(|| text.rfind('`')).unwrap_or(0);
        return end + 1;
    }
    let mut escaped = false;
    for (at, c) in text.char_indices().skip(1) {
        if c == '"' && !escaped {
            return at + 1;
        }
        escaped = c == '\\' && !escaped;
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use super::without_value;

    #[test]
    fn values_are_not_told_and_what_was_expected_is() {
        for (message, shown) in [
            (
                "invalid type: string \"sk-1\", expected a map",
                "invalid type: string, expected a map",
            ),
            (
                "a: invalid type: string \"s\\\"k, expected\", expected u64 at line 1",
                "a: invalid type: string, expected u64 at line 1",
            ),
            (
                "invalid type: integer `5`, expected a string",
                "invalid type: integer, expected a string",
            ),
            (
                "invalid value: floating point `1.5`, expected u8",
                "invalid value: floating point, expected u8",
            ),
            ("invalid type: sequence, expected a map", "invalid type: sequence, expected a map"),
            (
                "unknown variant `s`k`, expected one of `a`, `b`",
                "unknown variant, expected one of `a`, `b`",
            ),
            (
                "unknown variant `sk`, there are no variants",
                "unknown variant, there are no variants",
            ),
            ("unknown variant (did you mean `a`?)", "unknown variant (did you mean `a`?)"),
            ("unknown key `a`, expected `b`", "unknown key `a`, expected `b`"),
            ("missing field `a`", "missing field `a`"),
            ("invalid type: string \"never closed", "invalid type: string"),
            ("", ""),
        ] {
            assert_eq!(without_value(message), shown);
        }
    }
}
