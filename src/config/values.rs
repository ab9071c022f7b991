//! Parsing of durations, sizes and bounded counts, and their JSON Schemas.
//!
//! Errors do not name the key; [`super::sources`] adds it.

use std::fmt::Display;
use std::time::Duration;

use schemars::{Schema, SchemaGenerator, json_schema};
use serde::de::{Deserialize, Deserializer, Error as _, IntoDeserializer as _};
use serde_json::Value;
use url::Url;

/// Parses `500ms`, `15s`, `10m`, `24h`, `7d`.
///
/// # Errors
/// A message for the user.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let (number, unit) = split_unit(text);
    let unit_ms: u64 = match unit {
        "ms" => 1,
        "s" => 1000,
        "m" => 60_000,
        "h" => 3_600_000,
        "d" => 86_400_000,
        _ => {
            return Err(format!(
                "{text:?} is not a duration; write e.g. \"500ms\", \"15s\", \"10m\" or \"24h\""
            ));
        }
    };
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} does not start with a whole number"))?;
    number
        .checked_mul(unit_ms)
        .map(Duration::from_millis)
        .ok_or_else(|| format!("{text:?} is too long"))
}

/// Parses `64KiB`, `1MiB`, `1GiB`, `1TiB`, `512B` or a plain number of bytes.
pub(super) fn parse_size(text: &str) -> Result<u64, String> {
    let (number, unit) = split_unit(text);
    let unit_bytes: u64 = match unit {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        "TiB" => 1 << 40,
        _ => {
            return Err(format!(
                "{text:?} is not a size; write e.g. \"64KiB\", \"1MiB\" or a number of bytes"
            ));
        }
    };
    let number: u64 =
        number.parse().map_err(|_| format!("{text:?} does not start with a whole number"))?;
    number.checked_mul(unit_bytes).ok_or_else(|| format!("{text:?} is too large"))
}

/// A duration as [`parse_duration`] reads it, in the largest unit of which it is a multiple.
/// One day is written as 24h.
fn written_duration(ms: u64) -> String {
    const UNITS: [(u64, &str); 5] =
        [(86_400_000, "d"), (3_600_000, "h"), (60_000, "m"), (1000, "s"), (1, "ms")];
    match ms {
        0 => "0s".to_owned(),
        86_400_000 => "24h".to_owned(),
        _ => written(ms, &UNITS),
    }
}

/// A size as [`parse_size`] reads it, in the largest unit of which it is a multiple.
fn written_size(bytes: u64) -> String {
    const UNITS: [(u64, &str); 5] =
        [(1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"), (1, "B")];
    written(bytes, &UNITS)
}

fn written(value: u64, units: &[(u64, &str)]) -> String {
    let unit = units.iter().find(|(unit, _)| value.is_multiple_of(*unit));
    unit.map_or_else(|| value.to_string(), |(unit, name)| format!("{}{name}", value / unit))
}

/// Origins as browsers send them: scheme, host and port, and nothing else.
pub(super) fn origins<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let origins = Vec::<String>::deserialize(deserializer)?;
    if origins.len() > 64 {
        return Err(D::Error::custom("has more than 64 origins"));
    }
    let is_origin = |text: &String| {
        Url::parse(text).is_ok_and(|url| {
            matches!(url.scheme(), "http" | "https")
                && !text.contains('*')
                && url.origin().ascii_serialization() == *text
        })
    };
    match origins.iter().find(|origin| !is_origin(origin)) {
        None => Ok(origins),
        Some(odd) => Err(D::Error::custom(format!(
            "{odd:?} is not an origin; write scheme, host and port, e.g. \"https://app.example.com\""
        ))),
    }
}

fn split_unit(text: &str) -> (&str, &str) {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    (number, unit.trim_start())
}

/// A duration between `MIN_MS` and `MAX_S`.
pub(super) fn duration<'de, const MIN_MS: u64, const MAX_S: u64, D>(
    deserializer: D,
) -> Result<Duration, D::Error>
where
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    let value = parse_duration(&text).map_err(D::Error::custom)?;
    let (min, max) = (Duration::from_millis(MIN_MS), Duration::from_secs(MAX_S));
    if value < min || value > max {
        let (min, max) = (written_duration(MIN_MS), written_duration(MAX_S * 1000));
        return Err(D::Error::custom(format!("{text:?} is not between {min} and {max}")));
    }
    Ok(value)
}

/// As [`duration`], for optional settings.
pub(super) fn some_duration<'de, const MIN_MS: u64, const MAX_S: u64, D>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error>
where
    D: Deserializer<'de>,
{
    duration::<MIN_MS, MAX_S, D>(deserializer).map(Some)
}

/// As [`duration`]; `never` is `None`.
pub(super) fn retention<'de, const MIN_MS: u64, const MAX_S: u64, D>(
    deserializer: D,
) -> Result<Option<Duration>, D::Error>
where
    D: Deserializer<'de>,
{
    let text = String::deserialize(deserializer)?;
    if text == "never" {
        return Ok(None);
    }
    duration::<MIN_MS, MAX_S, _>(text.into_deserializer()).map(Some)
}

/// A size in bytes between `MIN` and `MAX`, as text or as a number.
pub(super) fn size<'de, const MIN: u64, const MAX: u64, D>(
    deserializer: D,
) -> Result<usize, D::Error>
where
    D: Deserializer<'de>,
{
    let bytes = match Value::deserialize(deserializer)? {
        Value::Number(n) => match n.as_u64() {
            Some(bytes) => bytes,
            None if n.is_i64() => return Err(outside(&n, &written_size(MIN), &written_size(MAX))),
            None => return Err(D::Error::custom(format!("{n} is not a size"))),
        },
        Value::String(text) => parse_size(&text).map_err(D::Error::custom)?,
        other => return Err(D::Error::custom(format!("{other} is not a size"))),
    };
    within(bytes, MIN, MAX, written_size)
}

/// As [`size`], where there may be none.
pub(super) fn some_size<'de, const MIN: u64, const MAX: u64, D>(
    deserializer: D,
) -> Result<Option<usize>, D::Error>
where
    D: Deserializer<'de>,
{
    size::<MIN, MAX, D>(deserializer).map(Some)
}

/// A count between `MIN` and `MAX`.
pub(super) fn count<'de, const MIN: u64, const MAX: u64, T, D>(
    deserializer: D,
) -> Result<T, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    let value = match Value::deserialize(deserializer)? {
        // serde's error for a negative number does not name the range.
        Value::Number(n) if n.as_i64().is_some_and(i64::is_negative) => {
            return Err(outside(&n, &MIN, &MAX));
        }
        other => u64::deserialize(other).map_err(D::Error::custom)?,
    };
    within(value, MIN, MAX, |bound| bound.to_string())
}

/// As [`count`], for optional settings.
pub(super) fn some_count<'de, const MIN: u64, const MAX: u64, T, D>(
    deserializer: D,
) -> Result<Option<T>, D::Error>
where
    T: TryFrom<u64>,
    D: Deserializer<'de>,
{
    count::<MIN, MAX, T, D>(deserializer).map(Some)
}

fn within<T: TryFrom<u64>, E: serde::de::Error>(
    value: u64,
    min: u64,
    max: u64,
    written: impl Fn(u64) -> String,
) -> Result<T, E> {
    T::try_from(value)
        .ok()
        .filter(|_| (min..=max).contains(&value))
        .ok_or_else(|| outside(&value, &written(min), &written(max)))
}

fn outside<E: serde::de::Error>(value: &dyn Display, min: &dyn Display, max: &dyn Display) -> E {
    E::custom(format!("{value} is not between {min} and {max}"))
}

/// The JSON Schema of a [`duration`], which cannot express its bounds.
pub(super) fn duration_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "pattern": "^[0-9]+ *(ms|s|m|h|d)$"})
}

/// The JSON Schema of a [`retention`].
pub(super) fn retention_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "string", "pattern": "^([0-9]+ *(ms|s|m|h|d)|never)$"})
}

/// The JSON Schema of a [`size`].
pub(super) fn size_schema<const MIN: u64, const MAX: u64>(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"anyOf": [
        {"type": "integer", "minimum": MIN, "maximum": MAX},
        {"type": "string", "pattern": "^[0-9]+ *(B|KiB|MiB|GiB|TiB)?$"}
    ]})
}

/// The JSON Schema of a [`count`].
pub(super) fn count_schema<const MIN: u64, const MAX: u64>(_: &mut SchemaGenerator) -> Schema {
    json_schema!({"type": "integer", "minimum": MIN, "maximum": MAX})
}

/// Makes every key of a schema optional, at any depth.
pub(super) fn require_nothing(schema: &mut Value) {
    if let Value::Object(object) = schema {
        object.remove("required");
        object.values_mut().for_each(require_nothing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_whole_numbers_with_a_unit() {
        for (text, ms) in [
            ("500ms", 500),
            ("15s", 15_000),
            ("10m", 600_000),
            ("24h", 86_400_000),
            ("7 d", 604_800_000),
        ] {
            assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in [
            "",
            "15",
            "s",
            "1.5s",
            "-1s",
            "15 seconds",
            "99999999999999999999s",
            "9999999999999999999h",
        ] {
            assert!(parse_duration(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_whole_numbers_with_an_optional_unit() {
        for (text, bytes) in [
            ("0", 0),
            ("512B", 512),
            ("64KiB", 65_536),
            ("1MiB", 1_048_576),
            ("2 GiB", 1 << 31),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text}");
        }
        for text in
            ["", "KiB", "1kb", "1MB", "-1", "1.5MiB", "99999999999GiB", "99999999TiB", "1PiB"]
        {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }
}
