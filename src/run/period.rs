//! Durations in definitions: whole seconds, written as `90s`, `15m`, `24h`, `7d` or a
//! number of seconds.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use chrono::TimeDelta;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Deserializer, Error as _};
use serde::{Deserialize, Serialize, Serializer};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{ObjectBuilder, Schema as OpenApiSchema, Type};
use utoipa::{PartialSchema, ToSchema};

/// Ten years.
const MAX_SECONDS: u32 = 10 * 365 * 86_400;

/// 1 second to ten years.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Period(u32);

/// A text that is not a period.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a period such as 90s, 15m, 24h or 7d, from 1s to 3650d")]
pub struct NoPeriod(String);

impl Period {
    /// Clamps to the range.
    pub fn seconds(seconds: u32) -> Self {
        Self(seconds.clamp(1, MAX_SECONDS))
    }

    pub fn delta(self) -> TimeDelta {
        TimeDelta::seconds(i64::from(self.0))
    }
}

impl FromStr for Period {
    type Err = NoPeriod;

    fn from_str(text: &str) -> Result<Self, NoPeriod> {
        let number = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
        let unit = match &text[number.len()..] {
            "" | "s" => 1,
            "m" => 60,
            "h" => 3600,
            "d" => 86_400,
            _ => return Err(NoPeriod(text.to_owned())),
        };
        let seconds = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
        seconds
            .filter(|s| (1..=MAX_SECONDS).contains(s))
            .map(Self)
            .ok_or_else(|| NoPeriod(text.to_owned()))
    }
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            s if s % 86_400 == 0 => write!(f, "{}d", s / 86_400),
            s if s % 3600 == 0 => write!(f, "{}h", s / 3600),
            s if s % 60 == 0 => write!(f, "{}m", s / 60),
            s => write!(f, "{s}s"),
        }
    }
}

impl Serialize for Period {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Period {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Written {
            Seconds(u64),
            Text(String),
        }
        let text = match Written::deserialize(deserializer)? {
            Written::Seconds(seconds) => seconds.to_string(),
            Written::Text(text) => text,
        };
        text.parse().map_err(D::Error::custom)
    }
}

impl JsonSchema for Period {
    fn schema_name() -> Cow<'static, str> {
        "Period".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A length of time, e.g. 90s, 15m, 24h or 7d; a number is seconds.",
            "anyOf": [
                {"type": "string", "pattern": "^[1-9][0-9]*[smhd]?$"},
                {"type": "integer", "minimum": 1, "maximum": MAX_SECONDS}
            ]
        })
    }
}

impl ToSchema for Period {}

impl PartialSchema for Period {
    fn schema() -> RefOr<OpenApiSchema> {
        let description = "A length of time, e.g. 90s, 15m, 24h or 7d.";
        let pattern = Some("^[1-9][0-9]*[smhd]$");
        let text = ObjectBuilder::new()
            .schema_type(Type::String)
            .description(Some(description))
            .pattern(pattern);
        text.examples([serde_json::json!("15m")]).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn periods_are_read_and_written() {
        let table = [
            ("24h", Some("1d")),
            ("90s", Some("90s")),
            ("120", Some("2m")),
            ("15m", Some("15m")),
            ("3650d", Some("3650d")),
            ("3651d", None),
            ("0s", None),
            ("-1s", None),
            ("1w", None),
            ("1.5h", None),
            ("h", None),
            ("", None),
        ];
        for (text, expected) in table {
            let read = text.parse::<Period>().ok().map(|period| period.to_string());
            assert_eq!(read.as_deref(), expected, "{text:?}");
        }
        assert_eq!(serde_json::from_str::<Period>("90").unwrap(), Period::seconds(90));
    }
}
