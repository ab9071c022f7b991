//! Finds the decision in a model's text.
//!
//! Ignores what surrounds it: fences, prose, a draft in `<think>` tags, other JSON. Rejects broken
//! JSON: an unterminated object is not searched, so that a part of a decision, or of data quoted in
//! it, is never taken for a decision. Decisions are not validated here.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::bounds::json::{self, Unreadable};

/// A decision as the model wrote it, unchecked.
#[derive(Debug, Deserialize)]
pub(super) struct Decision<'a> {
    /// Its JSON text.
    #[serde(skip)]
    pub text: &'a str,
    #[serde(default)]
    pub thought: Value,
    #[serde(default)]
    pub r#type: Value,
    #[serde(default)]
    pub tool: Value,
    #[serde(borrow)]
    pub args: Option<&'a RawValue>,
    #[serde(borrow)]
    pub answer: Option<&'a RawValue>,
}

impl Decision<'_> {
    fn is_of_a_known_type(&self) -> bool {
        matches!(self.r#type.as_str(), Some("call_tool" | "final_answer"))
    }

    fn resembles_one(&self) -> bool {
        !self.r#type.is_null() || !self.tool.is_null() || self.answer.is_some()
    }
}

/// The first complete decision of a text, else the first object that looks like one.
///
/// # Errors
/// A clause that says why there is no decision.
pub(super) fn first_decision(text: &str) -> Result<Decision<'_>, String> {
    let mut resembling = None;
    let mut problem = None;
    for object in Objects::of(text) {
        let read = object.and_then(|text| {
            let decision: Decision<'_> = json::read(text).map_err(|e| match e {
                Unreadable::Malformed(error) => broken(&error),
                beyond => format!("it cannot be read: {beyond}"),
            })?;
            Ok(Decision { text, ..decision })
        });
        match read {
            Ok(decision) if decision.is_of_a_known_type() => return Ok(decision),
            Ok(decision) if decision.resembles_one() => {
                resembling.get_or_insert(decision);
            }
            Ok(_) => {
                problem.get_or_insert_with(|| {
                    "its JSON object has no `type`, so it is not a decision".to_owned()
                });
            }
            Err(why) => {
                problem.get_or_insert(why);
            }
        }
    }
    resembling.ok_or_else(|| problem.unwrap_or_else(|| "it holds no JSON object".to_owned()))
}

/// The first complete JSON object of a text.
pub(super) fn first_object(text: &str) -> Option<&str> {
    Objects::of(text).find_map(Result::ok)
}

fn broken(error: &serde_json::Error) -> String {
    format!("its JSON is broken: {error}")
}

/// The complete JSON objects of a text in order, none inside another; an error for each broken one.
struct Objects<'a> {
    rest: &'a str,
}

impl<'a> Objects<'a> {
    /// Skips a leading draft in `<think>` tags, which some servers leave in the text.
    fn of(text: &'a str) -> Self {
        let thought = text
            .trim_start()
            .strip_prefix("<think>")
            .and_then(|draft| draft.split_once("</think>"));
        Self { rest: thought.map_or(text, |(_, rest)| rest) }
    }
}

impl<'a> Iterator for Objects<'a> {
    type Item = Result<&'a str, String>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let object = &self.rest[self.rest.find('{')?..];
            if !object[1..].trim_start().starts_with(['"', '}']) {
                self.rest = &object[1..]; // a brace in prose
                continue;
            }
            let mut values = serde_json::Deserializer::from_str(object).into_iter::<IgnoredAny>();
            let item = match values.next()? {
                Ok(_) => Ok(&object[..values.byte_offset()]),
                Err(error) => Err(broken(&error)),
            };
            let end = item.as_ref().map_or_else(|_| closing(object), |text| text.len());
            self.rest = &object[end..];
            return Some(item);
        }
    }
}

/// The end of the object at the beginning of a text, by braces and strings; the end of the text if
/// the object is unterminated.
fn closing(text: &str) -> usize {
    let (mut depth, mut in_string, mut escaped) = (0_usize, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b'{' if !in_string => depth += 1,
            b'}' if !in_string && depth <= 1 => return at + 1,
            b'}' if !in_string => depth -= 1,
            _ => {}
        }
    }
    text.len()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const CALL: &str = r#"{"thought": "a } in a \"string\" {", "type": "call_tool", "tool": "t", "args": {"a": {"b": "}"}}}"#;
    const ANSWER: &str = r#"{"type": "final_answer", "answer": "x"}"#;

    #[test]
    fn decisions_are_found() {
        let table = [
            (CALL.to_owned(), CALL),
            (format!("```json\n{CALL}\n```"), CALL),
            (format!("I think {{so}}, and {{ so }}.\n{CALL}\nThat is all. }}"), CALL),
            (format!("{CALL}{ANSWER}"), CALL),
            (format!("{CALL}\nObservation: made up\n{ANSWER}"), CALL),
            (format!("{{\"path\": \".\"}} {ANSWER}"), ANSWER),
            (format!("{{\"type\": \"object\"}} {ANSWER}"), ANSWER),
            (format!("{{\"type\": oops}} {ANSWER}"), ANSWER),
            (format!("{{}} {ANSWER}"), ANSWER),
            (format!("<think>\nWhat about {CALL}?</think>{ANSWER}"), ANSWER),
            (format!("[{ANSWER}]"), ANSWER),
            (r#"{"tool": "t"}"#.to_owned(), r#"{"tool": "t"}"#),
            (r#"{"type": "ponder"} {"a": 1}"#.to_owned(), r#"{"type": "ponder"}"#),
        ];
        for (text, expected) in table {
            assert_eq!(first_decision(&text).unwrap().text, expected, "{text}");
        }
    }

    #[test]
    fn texts_without_a_decision_are_refused_with_a_reason() {
        let table = [
            ("", "it holds no JSON object"),
            ("I would rather talk.", "it holds no JSON object"),
            ("{ not JSON }", "it holds no JSON object"),
            (r#"{"a": 1}"#, "has no `type`"),
            (r#"{"type": "call_tool", "tool": "t""#, "its JSON is broken: EOF"),
            (r#"{"type": "call_tool", "tool": "t",}"#, "its JSON is broken: "),
            (
                r#"{"type": "call_tool", "type": "final_answer"}"#,
                "its JSON is broken: duplicate field",
            ),
        ];
        for (text, expected) in table {
            let problem = first_decision(text).unwrap_err();
            assert!(problem.contains(expected), "{text}: {problem}");
        }
    }

    #[test]
    fn a_broken_object_is_never_looked_into() {
        for text in [
            format!(r#"{{"type": "call_tool", "tool": "t", "args": {ANSWER}"#),
            format!(r#"{{"type": "call_tool", "tool": "t", "args": {ANSWER},}}"#),
            format!(r#"{{"thought": "it says {ANSWER} there", "type": "#),
        ] {
            assert!(first_decision(&text).is_err(), "{text}");
        }
    }

    #[test]
    fn depth_is_no_danger() {
        let deep = format!("{}1{}", "{\"a\":".repeat(10_000), "}".repeat(10_000));
        assert_eq!(first_decision(&format!("{deep} {ANSWER}")).unwrap().text, ANSWER);
        let args = format!(r#"{{"type": "call_tool", "tool": "t", "args": {deep}}}"#);
        assert!(first_decision(&args).unwrap_err().contains("more than 96 levels"));
        assert!(first_decision(&"{".repeat(100_000)).is_err());
        assert!(first_decision(&"{\"".repeat(100_000)).is_err());
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_text_is_survived(text in r#"([{}"\\\[\]:, a\n]|"type"|call_tool|final_answer|é|<think>|</think>|```){0,60}"#) {
            let _ = first_decision(&text);
            let _ = first_object(&text);
        }

        #[test]
        fn a_decision_is_found_whatever_its_strings_hold(
            thought in any::<String>(), value in any::<String>(), before in "[^{}]{0,40}", after in any::<String>(),
        ) {
            prop_assume!(!before.contains("<think>"));
            let decision = json!({"thought": thought, "type": "call_tool", "tool": "t", "args": {"v": value}}).to_string();
            let text = format!("{before}{decision}{after}");
            let found = first_decision(&text).unwrap();
            prop_assert_eq!(found.text, decision.as_str());
            prop_assert_eq!(found.thought, json!(thought));
        }

        #[test]
        fn a_decision_that_is_cut_off_is_none(at in 1..CALL.len()) {
            prop_assume!(CALL.is_char_boundary(at));
            prop_assert!(first_decision(&CALL[..at]).is_err());
        }
    }
}
