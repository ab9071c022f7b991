//! `[prices]` and `[capabilities]`.
//!
//! A key is `provider/model`, where the model can be a glob. Only the shape, the ranges and the
//! existence of the provider are checked here; precedence of overlapping keys is defined in
//! `providers/`.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer};

use super::sources::Sources;
use super::values::{self, some_count};
use super::{ConfigError, Model};
use crate::bounds::glob::Glob;
use crate::bounds::nearest::meant;

/// `[prices."provider/model"]`: US dollars per million tokens, 0 to 1000000.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ModelPrice {
    /// Price of uncached input.
    #[serde(deserialize_with = "dollars")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub input: f64,
    /// Price of input read from the provider's cache; default: `input`.
    #[serde(default, deserialize_with = "some_dollars")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub cached_input: Option<f64>,
    /// Price of input written to the provider's cache; default: `input`.
    #[serde(default, deserialize_with = "some_dollars")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub cache_write: Option<f64>,
    /// Price of output.
    #[serde(deserialize_with = "dollars")]
    #[schemars(range(min = 0.0, max = 1_000_000.0))]
    pub output: f64,
    /// Maximum of input and output tokens together.
    #[serde(default, deserialize_with = "some_count::<256, 1_000_000_000, _, _>")]
    #[schemars(schema_with = "values::count_schema::<256, 1_000_000_000>")]
    pub context_window: Option<u64>,
}

/// Checks that every key is an existing provider and a model name or glob.
pub(super) fn check_keys<'a>(
    table: &str,
    keys: impl Iterator<Item = &'a String>,
    models: &BTreeMap<String, Model>,
    sources: &Sources,
) -> Result<(), ConfigError> {
    for key in keys {
        let wrong = match key.split_once('/') {
            Some((provider, _)) if !models.contains_key(provider) => {
                format!(
                    "there is no provider {provider:?}{}",
                    meant(provider, models.keys().map(String::as_str))
                )
            }
            Some((_, model)) if !model.is_empty() && Glob::of_names(model).is_ok() => continue,
            _ => "is not of the form provider/model, where the model can be a glob".to_owned(),
        };
        return Err(sources.error(&format!("{table}.{key}"), wrong));
    }
    Ok(())
}

fn dollars<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    let dollars = f64::deserialize(deserializer)?;
    if (0.0..=1_000_000.0).contains(&dollars) {
        return Ok(dollars);
    }
    Err(serde::de::Error::custom(format!("{dollars} is not between 0 and 1000000")))
}

fn some_dollars<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    dollars(deserializer).map(Some)
}
