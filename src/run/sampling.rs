//! Sampling parameters, and further options that are passed to a provider unchanged.
//!
//! The bounds of each parameter are those of the providers that support it; the capability table tells which
//! models do. Options that the service itself writes into a request cannot be passed.

use std::ops::RangeInclusive;

use schemars::JsonSchema;
use serde::de::Deserializer;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::bounds::json::is_nested_within;

/// Texts that end an answer, at most.
const MAX_STOPS: usize = 4;
/// Bytes of one such text.
const MAX_STOP: usize = 256;
/// Bytes of all passed options, as JSON.
const MAX_PASSED: usize = 16 * 1024;
/// Levels of nesting of passed options.
const MAX_LEVELS: usize = 8;
/// Bytes of the name of a passed option.
const MAX_NAME: usize = 64;

/// Sampling parameters.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentSampling)]
#[serde(default, deny_unknown_fields)]
pub struct Sampling {
    /// 0 to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 2.0))]
    pub temperature: Option<f64>,
    /// Tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub max_output_tokens: Option<u32>,
    /// The share of the likeliest words to choose from; 0 to 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0))]
    pub top_p: Option<f64>,
    /// Texts that end an answer and are not part of it; up to 4.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "one_or_several")]
    #[schemars(with = "Option<OneOrSeveral>", length(max = 4))]
    pub stop: Option<Vec<String>>,
    /// Seed for repeatable answers, as far as the provider supports it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<i64>,
    /// Penalty for words that occur already; -2 to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -2.0, max = 2.0))]
    pub presence_penalty: Option<f64>,
    /// Penalty for words by how often they occur; -2 to 2.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = -2.0, max = 2.0))]
    pub frequency_penalty: Option<f64>,
}

/// A text or a list of texts.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged, expecting = "a text or a list of texts is expected")]
enum OneOrSeveral {
    One(String),
    Several(Vec<String>),
}

fn one_or_several<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Vec<String>>, D::Error> {
    Ok(Option::<OneOrSeveral>::deserialize(deserializer)?.map(|stop| match stop {
        OneOrSeveral::One(text) => vec![text],
        OneOrSeveral::Several(texts) => texts,
    }))
}

impl Sampling {
    /// Checks the bounds of all parameters.
    ///
    /// # Errors
    /// The name of the first parameter out of bounds, and what is wrong with it.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        let table: [(&str, Option<f64>, RangeInclusive<f64>); 5] = [
            ("temperature", self.temperature, 0.0..=2.0),
            ("max_output_tokens", self.max_output_tokens.map(Into::into), 1.0..=10_000_000.0),
            ("top_p", self.top_p, 0.0..=1.0),
            ("presence_penalty", self.presence_penalty, -2.0..=2.0),
            ("frequency_penalty", self.frequency_penalty, -2.0..=2.0),
        ];
        for (name, value, range) in table {
            if let Some(value) = value.filter(|value| !range.contains(value)) {
                let (least, most) = (range.start(), range.end());
                return Err((name, format!("{value} is not between {least} and {most}")));
            }
        }
        let is_bounded = |text: &String| (1..=MAX_STOP).contains(&text.len());
        let stops = self.stops();
        if stops.len() > MAX_STOPS || !stops.iter().all(is_bounded) {
            let message = format!("must be up to {MAX_STOPS} texts of 1 to {MAX_STOP} bytes");
            return Err(("stop", message));
        }
        Ok(())
    }

    /// These parameters, overridden by those that `other` sets.
    #[must_use]
    pub fn overridden_by(&self, other: &Self) -> Self {
        Self {
            temperature: other.temperature.or(self.temperature),
            max_output_tokens: other.max_output_tokens.or(self.max_output_tokens),
            top_p: other.top_p.or(self.top_p),
            stop: other.stop.clone().or_else(|| self.stop.clone()),
            seed: other.seed.or(self.seed),
            presence_penalty: other.presence_penalty.or(self.presence_penalty),
            frequency_penalty: other.frequency_penalty.or(self.frequency_penalty),
        }
    }

    /// The texts that end an answer.
    pub fn stops(&self) -> &[String] {
        self.stop.as_deref().unwrap_or_default()
    }

    /// Names of the options that are set and that not every model has.
    pub fn set(&self) -> impl Iterator<Item = &'static str> {
        let table = [
            ("temperature", self.temperature.is_some()),
            ("top_p", self.top_p.is_some()),
            ("stop", !self.stops().is_empty()),
            ("seed", self.seed.is_some()),
            ("presence_penalty", self.presence_penalty.is_some()),
            ("frequency_penalty", self.frequency_penalty.is_some()),
        ];
        table.into_iter().filter_map(|(name, is_set)| is_set.then_some(name))
    }
}

/// Fields that the service writes into requests of some API, and that a definition must not pass: they have
/// settings of their own, or determine the form of answers.
const OWNED: [&str; 45] = [
    "model",
    "messages",
    "system",
    "instructions",
    "input",
    "prompt",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "functions",
    "function_call",
    "web_search_options",
    "mcp_servers",
    "stream",
    "stream_options",
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "max_tool_calls",
    "n",
    "temperature",
    "top_p",
    "stop",
    "stop_sequences",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "thinking",
    "think",
    "reasoning",
    "reasoning_effort",
    "include",
    "response_format",
    "format",
    "store",
    "background",
    "conversation",
    "previous_response_id",
    "context_management",
    "truncation",
    "truncate",
    "shift",
    "raw",
    "suffix",
    "template",
];

/// Objects of requests of which the service writes some fields, with the names of those fields.
const SHARED: [(&str, &[&str]); 3] = [
    (
        "options",
        &[
            "num_ctx",
            "num_predict",
            "temperature",
            "top_p",
            "stop",
            "seed",
            "presence_penalty",
            "frequency_penalty",
        ],
    ),
    ("text", &["format"]),
    ("output_config", &["format", "effort"]),
];

/// Checks the options that a definition passes to the provider.
///
/// # Errors
/// The key beneath `provider_options`, empty for all of it, and what is wrong with it.
pub fn check_passed(passed: &Map<String, Value>) -> Result<(), (String, String)> {
    for (name, value) in passed {
        check_name(name).map_err(|wrong| (name.clone(), wrong))?;
        if OWNED.contains(&name.as_str()) {
            return Err((name.clone(), is_owned(name)));
        }
        let Some((_, owned)) = SHARED.iter().find(|(shared, _)| shared == name) else { continue };
        let Some(inner) = value.as_object() else {
            return Err((name.clone(), "must be an object".to_owned()));
        };
        for name_inside in inner.keys() {
            let key = format!("{name}.{name_inside}");
            check_name(name_inside).map_err(|wrong| (key.clone(), wrong))?;
            if owned.contains(&name_inside.as_str()) {
                return Err((key.clone(), is_owned(&key)));
            }
        }
    }
    let json = serde_json::to_string(passed).map_err(|e| (String::new(), e.to_string()))?;
    if !is_nested_within(&json, MAX_LEVELS) {
        return Err((String::new(), format!("is nested more than {MAX_LEVELS} levels deep")));
    }
    if json.len() > MAX_PASSED {
        return Err((String::new(), format!("has more than {MAX_PASSED} bytes as JSON")));
    }
    Ok(())
}

/// The key of the first set option that a provider's error text names.
pub fn named_option(
    text: &str,
    sampling: &Sampling,
    passed: &Map<String, Value>,
) -> Option<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || "_-".contains(c);
    let words: Vec<&str> = text.split(|c| !is_part(c)).collect();
    let is_named = |name: &str| words.contains(&name);
    let own = |name: &str| is_named(name) || (name == "stop" && is_named("stop_sequences"));
    let inside = SHARED.iter().filter_map(|(shared, _)| Some((shared, passed.get(*shared)?)));
    let inside = inside.filter_map(|(shared, fields)| Some((shared, fields.as_object()?)));
    let inside = inside.flat_map(|(shared, fields)| fields.keys().map(move |name| (shared, name)));
    let inside = inside
        .filter(|(_, name)| is_named(name))
        .map(|(shared, name)| format!("provider_options.{shared}.{name}"));
    let outside = passed.keys().filter(|name| is_named(name));
    let outside = outside.map(|name| format!("provider_options.{name}"));
    let own = sampling.set().filter(|name| own(name)).map(|name| format!("sampling.{name}"));
    own.chain(inside).chain(outside).next()
}

fn check_name(name: &str) -> Result<(), String> {
    let is_name =
        |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b));
    if (1..=MAX_NAME).contains(&name.len()) && is_name(name) {
        return Ok(());
    }
    Err(format!("a name has 1 to {MAX_NAME} letters, digits and _-."))
}

fn is_owned(key: &str) -> String {
    format!("`{key}` is written by the service itself and cannot be passed on")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn provider_options_are_bounded_and_override_nothing() {
        let mut deep = json!(1);
        for _ in 0..MAX_LEVELS {
            deep = json!([deep]);
        }
        let table = [
            (json!({"user": "u", "logit_bias": {"50256": -100}, "service_tier": null}), None),
            (json!({"options": {"top_k": 5}, "text": {"verbosity": "low"}}), None),
            (json!({"messages": []}), Some("messages")),
            (json!({"max_completion_tokens": 1}), Some("max_completion_tokens")),
            (json!({"top_p": 0.1}), Some("top_p")),
            (json!({"options": {"num_ctx": 1}}), Some("options.num_ctx")),
            (json!({"text": 5}), Some("text")),
            (json!({"a b": 5}), Some("a b")),
            (json!({ "x": deep }), Some("")),
            (json!({"x": "y".repeat(MAX_PASSED)}), Some("")),
        ];
        for (passed, key) in table {
            let wrong = check_passed(passed.as_object().unwrap()).err();
            assert_eq!(wrong.as_ref().map(|(key, _)| key.as_str()), key, "{wrong:?}");
        }
    }

    #[test]
    fn a_refused_option_is_found_by_its_name() {
        let sampling =
            Sampling { seed: Some(1), stop: Some(vec!["x".into()]), ..Sampling::default() };
        let passed = json!({"user": "u", "options": {"top_k": 1}});
        let table = [
            ("Unsupported parameter: 'seed'.", Some("sampling.seed")),
            ("stop_sequences: must be shorter", Some("sampling.stop")),
            ("top_p is out of range", None),
            ("the user is unknown", Some("provider_options.user")),
            ("invalid option \"top_k\"", Some("provider_options.options.top_k")),
            ("superuser, seeds", None),
        ];
        for (text, key) in table {
            let found = named_option(text, &sampling, passed.as_object().unwrap());
            assert_eq!(found.as_deref(), key, "{text}");
        }
    }

    #[test]
    fn options_are_bounded() {
        let table = [
            (json!({"top_p": 1.0, "stop": "END", "seed": -1, "presence_penalty": -2}), None),
            (json!({"top_p": 1.1}), Some("top_p")),
            (json!({"presence_penalty": 2.1}), Some("presence_penalty")),
            (json!({"frequency_penalty": -2.1}), Some("frequency_penalty")),
            (json!({"stop": [""]}), Some("stop")),
            (json!({"stop": ["a", "b", "c", "d", "e"]}), Some("stop")),
        ];
        for (sampling, name) in table {
            let read: Sampling = serde_json::from_value(sampling).unwrap();
            assert_eq!(read.check().err().map(|(name, _)| name), name, "{read:?}");
        }
    }
}
