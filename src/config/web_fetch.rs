//! `[tools.web_fetch]`: how pages are fetched.

use std::time::Duration;

use http::HeaderValue;
use schemars::JsonSchema;
use serde::de::Error;
use serde::{Deserialize, Deserializer};

use super::values::{self, duration, size};

/// `[tools.web_fetch]`
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WebFetch {
    /// Maximum size of a page, decompressed.
    #[serde(deserialize_with = "size::<1_024, 67_108_864, _>")]
    #[schemars(schema_with = "values::size_schema::<1_024, 67_108_864>")]
    pub max_body: usize,
    /// Maximum time of one fetch.
    #[serde(deserialize_with = "duration::<100, 3_600, _>")]
    #[schemars(schema_with = "values::duration_schema")]
    pub timeout: Duration,
    /// What it calls itself.
    #[serde(deserialize_with = "user_agent")]
    #[schemars(with = "String", length(min = 1, max = 256))]
    pub user_agent: HeaderValue,
    /// Whether robots.txt is asked first.
    pub robots: bool,
    /// Content types that may be read; `*` stands for anything.
    #[serde(deserialize_with = "content_types")]
    #[schemars(inner(regex(pattern = r"^[^\s/]+/[^\s/]+$")), length(max = 64))]
    pub content_types: Vec<String>,
}

fn user_agent<'de, D: Deserializer<'de>>(deserializer: D) -> Result<HeaderValue, D::Error> {
    let text = String::deserialize(deserializer)?;
    let fits = (1..=256).contains(&text.len());
    let value = HeaderValue::try_from(&text).ok().filter(|_| fits);
    value.ok_or_else(|| D::Error::custom(format!("{text:?} is not one line of 1 to 256 bytes")))
}

fn content_types<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let types = Vec::<String>::deserialize(deserializer)?;
    if types.len() > 64 {
        return Err(D::Error::custom("has more than 64 entries"));
    }
    let is_type = |text: &str| {
        let parts: Vec<&str> = text.split('/').collect();
        let is_part =
            |part: &&str| (1..=64).contains(&part.len()) && !part.contains(char::is_whitespace);
        parts.len() == 2 && parts.iter().all(is_part)
    };
    match types.iter().find(|text| !is_type(text)) {
        Some(wrong) => {
            Err(D::Error::custom(format!("{wrong:?} is not a content type, e.g. \"text/*\"")))
        }
        None => Ok(types.into_iter().map(|text| text.to_ascii_lowercase()).collect()),
    }
}
