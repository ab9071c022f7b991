//! All mistakes in a YAML file that does not load, for `toolloop check`: a loader stops at the first
//! one.
//!
//! The part with the mistake is removed, and the rest is loaded again. So every mistake is found by
//! the checks that refuse the file. A mistake that another one hides is reported once that one is
//! corrected.

use std::collections::BTreeMap;
use std::fmt;

use serde_json::Value;

use super::yaml::{self, YamlError};

/// At most this many are reported.
const MOST: usize = 20;

/// A mistake in a file, and its position.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mistake {
    /// Line and column, 1-based, if known.
    pub place: Option<(u64, u64)>,
    /// The path of keys, e.g. `limits.max_attempts`; empty for the file as a whole.
    pub key: String,
    /// What is wrong.
    pub message: String,
}

impl Mistake {
    /// A mistake at a key.
    pub fn at(key: impl Into<String>, message: impl Into<String>) -> Self {
        Self { place: None, key: key.into(), message: message.into() }
    }

    /// Adds the position of the key, or of the nearest enclosing section.
    #[must_use]
    pub fn located_in(mut self, text: &str) -> Self {
        if self.place.is_none() {
            self.place = yaml::place_of(text, &self.key);
        }
        self
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.place {
            write!(f, "line {line}, column {column}: ")?;
        }
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

impl std::error::Error for Mistake {}

impl From<YamlError> for Mistake {
    fn from(YamlError { place, key, message, .. }: YamlError) -> Self {
        Self { place, key, message }
    }
}

/// All mistakes in a file, each with its position; empty if the file loads. `instead` returns a valid value for
/// required keys.
pub fn all(
    text: &str,
    instead: impl Fn(&str) -> Option<String>,
    load: impl Fn(&str) -> Result<(), Mistake>,
) -> Vec<Mistake> {
    let Err(first) = load(text) else { return Vec::new() };
    let first = first.located_in(text);
    let Ok(value) = yaml::read::<Value>(text) else { return vec![first] };
    let mut rest = Rest::of(value);
    let mut key = first.key.clone();
    let mut found = vec![first];
    while found.len() < MOST && rest.remove(&key, instead(&key).as_deref()) {
        let Err(error) = load(&rest.value.to_string()) else { break };
        key.clone_from(&error.key);
        if rest.is_caused_by_removal(&error) {
            continue;
        }
        let error = Mistake { place: None, key: rest.original(&key), ..error };
        if found.iter().any(|known| known.key == error.key) {
            break;
        }
        found.push(error.located_in(text));
    }
    found
}

/// The rest of a file, after parts with mistakes were removed.
pub struct Rest {
    pub value: Value,
    /// By the key of a list: the original indices of its remaining items.
    remaining: BTreeMap<String, Vec<usize>>,
    pub removed: Vec<String>,
}

impl Rest {
    pub fn of(value: Value) -> Self {
        Self { value, remaining: BTreeMap::new(), removed: Vec::new() }
    }

    /// Removes the value of a key, or its nearest existing parent; a required value is replaced by
    /// `instead`. Returns false if there is nothing to remove.
    pub fn remove(&mut self, key: &str, instead: Option<&str>) -> bool {
        let original = self.original(key);
        self.removed.push(original);
        if let (Some(instead), Some(fields)) = (instead, self.value.as_object_mut()) {
            let before = fields.insert(key.to_owned(), instead.into());
            return before.as_ref().and_then(Value::as_str) != Some(instead);
        }
        let mut way: Vec<&str> = segments(key).collect();
        while let Some(last) = way.pop() {
            let at = way.iter().try_fold(&mut self.value, |at, segment| inner(at, segment));
            match (at, last.parse::<usize>()) {
                (Some(Value::Object(fields)), _) if fields.contains_key(last) => {
                    fields.shift_remove(last);
                    return true;
                }
                (Some(Value::Array(items)), Ok(number)) if number < items.len() => {
                    let all = (0..items.len()).collect();
                    items.remove(number);
                    let list = key[..key.rfind('[').unwrap_or(key.len())].to_owned();
                    self.remaining.entry(list).or_insert(all).remove(number);
                    return true;
                }
                _ => {}
            }
        }
        false
    }

    /// Whether an error is only a consequence of an earlier removal.
    fn is_caused_by_removal(&self, error: &Mistake) -> bool {
        if error.key.is_empty() && !error.message.starts_with("missing field") {
            return true; // about the rest as a whole
        }
        let place = self.original(&error.key);
        let is_part = |removed: &String| {
            let beneath = removed.strip_prefix(&place).filter(|_| !place.is_empty());
            beneath.is_some_and(|beneath| beneath.starts_with(['.', '[']))
        };
        // The removed part may have been a misspelling of the missing key.
        let section = |key: &str| key.rsplit_once('.').map(|(section, _)| section.to_owned());
        let is_beside = |removed: &String| section(removed) == section(&place);
        let is_missing = error.message.starts_with("is missing");
        if self.removed.iter().any(|removed| is_part(removed) || is_missing && is_beside(removed)) {
            return true;
        }
        let missing = error.message.strip_prefix("missing field `");
        let missing = missing.and_then(|rest| rest.split('`').next());
        missing.is_some_and(|name| {
            let key = if place.is_empty() { name } else { &format!("{place}.{name}") };
            self.removed.iter().any(|removed| removed == key)
        })
    }

    /// The key in the original file, in which lists have all their items.
    fn original(&self, key: &str) -> String {
        let Some((list, end)) = key.split_once('[') else { return key.to_owned() };
        let Some((number, end)) = end.split_once(']') else { return key.to_owned() };
        let number = number.parse::<usize>().ok();
        let before = number.and_then(|number| self.remaining.get(list)?.get(number).copied());
        match before.or(number) {
            Some(number) => format!("{list}[{number}]{end}"),
            None => key.to_owned(),
        }
    }
}

fn segments(key: &str) -> impl Iterator<Item = &str> {
    key.split(['.', '[']).map(|part| part.trim_end_matches(']')).filter(|part| !part.is_empty())
}

fn inner<'a>(value: &'a mut Value, segment: &str) -> Option<&'a mut Value> {
    match value {
        Value::Object(fields) => fields.get_mut(segment),
        Value::Array(items) => items.get_mut(segment.parse::<usize>().ok()?),
        _ => None,
    }
}
