//! What is kept of a text, and which of its words are looked for.

use proptest::prelude::*;

use super::*;

#[test]
fn private_text_is_left_out_and_secrets_are_removed() {
    for (text, kept) in [
        ("plain", "plain"),
        ("a <private>b</private> c", "a  c"),
        ("a <PRIVATE>b</Private> c <private>d</private>", "a  c"),
        ("a <private>b <private>c</private> d", "a"),
        ("a <private>b<private>c</private>d</private> e", "a  e"),
        ("a <private >b</private > c", "a  c"),
        ("a <private\n>b</private\n> c", "a  c"),
        ("a < private>b< / private> c", "a  c"),
        (r#"a <private reason="why">b</private> c"#, "a  c"),
        (r#"a <private reason=">">b</private> c"#, "a  c"),
        (r#"{"a": "<private\nof=\"x\">b</private> c"}"#, r#"{"a": " c"}"#),
        ("a <private/>b</private> c", "a  c"),
        ("a <private>b</private of=x> c", "a"),
        ("a <private b", "a"),
        ("a <private", "a"),
        ("a <private <private>b</private> c", "a"),
        ("a <private>b</privately> c", "a"),
        (
            "a <privateer>b</privateer> <private-key> <",
            "a <privateer>b</privateer> <private-key> <",
        ),
        ("é <é <private>é</private> é", "é <é  é"),
        ("a <private>never closed", "a"),
        ("<private>all</private>", ""),
        ("a </private> b", "a </private> b"),
        (r#"{"api_key": "k1", "n": 1}"#, r#"{"api_key": "[redacted]", "n": 1}"#),
        ("password=hunter2 and more", "password=[redacted] and more"),
        ("Authorization: Bearer abc.def", "Authorization: [redacted]"),
        ("my secret garden", "my secret garden"),
        ("a\0b", "ab"),
    ] {
        assert_eq!(presentable(text), kept, "{text}");
    }
    let long = presentable(&"é".repeat(5000));
    assert!(long.len() <= MAX_CONTENT && long.ends_with('…'), "{}", long.len());
}

#[test]
fn words_are_taken_one_by_one() {
    for (text, expected) in [
        ("", vec![]),
        ("What is in src/main.rs?", vec!["src", "main", "rs"]),
        ("to be or not to be: be green, be green", vec!["green"]),
        ("about the herons before those", vec!["herons"]),
        ("\"a b\" | 'x:*' & !(NEAR)", vec!["near"]),
        ("Ölstände 42 \0 日本", vec!["ölstände", "42", "日本"]),
    ] {
        assert_eq!(words(text), expected, "{text}");
    }
    assert_eq!(words(&"word ".repeat(5000)), ["word"]);
    let many: String = (0..5000).map(|n| format!("w{n} ")).collect::<Vec<_>>().concat();
    assert_eq!(words(&many).len(), MAX_WORDS);
    assert!(words(&"x".repeat(10_000)).is_empty());
}

proptest! {
    #[test]
    fn a_word_holds_nothing_but_letters_and_digits(text in any::<String>()) {
        for word in words(&text) {
            prop_assert!(word.chars().all(char::is_alphanumeric) && word.len() <= 3 * MAX_WORD, "{word:?}");
        }
    }

    #[test]
    fn whatever_is_nested_in_private_tags_is_not_kept(
        pieces in prop::collection::vec(
            prop_oneof![
                "<[ \\n]{0,2}private([ /\\n][a-z =\"<]{0,8})?>",
                "[ ]?[a-z <>/\"=é]{0,6}",
                "</private[ \\n]{0,2}>",
            ],
            0..8,
        ),
        closings in 0..4usize,
    ) {
        let inside = pieces.concat();
        let openings = pieces.iter().filter(|piece| piece.contains("private") && !piece.starts_with("</")).count();
        let balance = pieces.iter().fold((1, 1), |(depth, least): (i32, i32), piece| {
            let depth = match piece {
                piece if piece.starts_with("</private") => depth - 1,
                piece if piece.contains("private") => depth + 1,
                _ => depth,
            };
            (depth, least.min(depth))
        });
        prop_assume!(balance.1 > 0);
        let text = format!("before <private>{inside}0123456789{}", "</private>".repeat(closings.min(openings + 1)));
        let kept = presentable(&text);
        prop_assert!(!kept.contains("0123456789") && kept.starts_with("before"), "{text:?}: {kept:?}");
    }

    #[test]
    fn what_is_kept_is_short_and_has_nothing_private(before in "[a-z<> ]{0,20}", after in "[a-z<> ]{0,20}") {
        let kept = presentable(&format!("{before}<private>0123456789</private>{after}"));
        prop_assert!(!kept.contains("0123456789"), "{kept}");
    }
}
