//! `[models.<name>]`: model providers.
//!
//! [`ModelSettings`] is validated and resolved to [`Model`]; settings that do not belong to the
//! provider's kind are errors.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::time::Duration;

use http::{HeaderName, HeaderValue};
use schemars::JsonSchema;
use secrecy::{ExposeSecret, SecretString};
use serde::Deserialize;
use url::Url;

use super::sources::{ConfigError, Origin, Sources};
use super::values::{some_count, some_duration};
use crate::model::ProviderKind;

/// `[models.<name>]`
#[derive(Debug, Clone)]
pub enum Model {
    Server(ModelServer),
    Scripted {
        /// `scripted/<name>` plays `<dir>/<name>.yaml`.
        dir: PathBuf,
    },
}

#[derive(Debug, Clone)]
pub struct ModelServer {
    /// Never `scripted`.
    pub kind: ProviderKind,
    /// Of `ollama`: context window with which models are loaded, in tokens.
    pub num_ctx: Option<u32>,
    /// Without a trailing slash; the API's path is appended.
    pub base_url: String,
    /// The environment variable with the key.
    pub api_key_env: Option<String>,
    /// `None` if none is configured or the variable is unset.
    pub api_key: Option<SecretString>,
    /// Timeout of one call, from connecting to the last byte.
    pub timeout: Duration,
    pub connect_timeout: Duration,
    /// Timeout from the request to the first byte of a streamed response.
    pub first_byte_timeout: Duration,
    /// Timeout between two chunks of a response.
    pub idle_timeout: Duration,
    /// Retries after the first try.
    pub max_retries: u32,
    /// How long calls wait together for a provider that answers 429 with `Retry-After` and nothing else.
    pub rate_limit_patience: Duration,
    /// Concurrent calls; `None`: no limit.
    pub max_concurrency: Option<usize>,
    /// Headers of every call; names and values are valid.
    pub headers: BTreeMap<String, SecretString>,
}

#[derive(Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(super) struct ModelSettings {
    /// The API that the provider implements.
    kind: ProviderKind,
    /// Base URL of the server: http or https.
    #[schemars(with = "Option<String>", regex(pattern = "^https?://"))]
    base_url: Option<Url>,
    /// The environment variable with the API key.
    api_key_env: Option<String>,
    /// Timeout of one call, from connecting to the last byte, 100ms to 1h.
    #[serde(default, deserialize_with = "some_duration::<100, 3_600, _>")]
    #[schemars(schema_with = "super::values::duration_schema")]
    timeout: Option<Duration>,
    /// Timeout of connecting, 10ms to 10m.
    #[serde(default, deserialize_with = "some_duration::<10, 600, _>")]
    #[schemars(schema_with = "super::values::duration_schema")]
    connect_timeout: Option<Duration>,
    /// Timeout from the request to the first byte of a streamed response, 10ms to 1h.
    #[serde(default, deserialize_with = "some_duration::<10, 3_600, _>")]
    #[schemars(schema_with = "super::values::duration_schema")]
    first_byte_timeout: Option<Duration>,
    /// Timeout between two chunks of a response, 10ms to 1h.
    #[serde(default, deserialize_with = "some_duration::<10, 3_600, _>")]
    #[schemars(schema_with = "super::values::duration_schema")]
    idle_timeout: Option<Duration>,
    /// Retries after the first try.
    #[serde(default, deserialize_with = "some_count::<0, 20, _, _>")]
    #[schemars(schema_with = "super::values::count_schema::<0, 20>")]
    max_retries: Option<u32>,
    /// How long calls wait together for a provider that answers 429 with `Retry-After` and nothing else, 0s to 1h.
    #[serde(default, deserialize_with = "some_duration::<0, 3_600, _>")]
    #[schemars(schema_with = "super::values::duration_schema")]
    rate_limit_patience: Option<Duration>,
    /// Maximum number of concurrent calls; further calls wait.
    #[serde(default, deserialize_with = "some_count::<1, 100_000, _, _>")]
    #[schemars(schema_with = "super::values::count_schema::<1, 100_000>")]
    max_concurrency: Option<usize>,
    /// Headers that are sent with every call.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    headers: BTreeMap<String, SecretString>,
    /// For `ollama`: the context window with which models are loaded, in tokens.
    #[serde(default, deserialize_with = "some_count::<512, 10_000_000, _, _>")]
    #[schemars(schema_with = "super::values::count_schema::<512, 10_000_000>")]
    num_ctx: Option<u32>,
    /// For `scripted`: the directory of `<name>.yaml` scenarios.
    dir: Option<PathBuf>,
}

pub(super) fn resolve(
    name: &str,
    model: ModelSettings,
    sources: &Sources,
    env: &HashMap<String, String>,
) -> Result<Model, ConfigError> {
    let key = |setting: &str| format!("models.{name}.{setting}");
    let written = |setting: &str| *sources.origin(&key(setting)) != Origin::BuiltIn;
    let kind = model.kind;
    let refuse_foreign =
        |settings: &[(&str, bool)]| match settings
            .iter()
            .find(|(setting, is_set)| *is_set && written(setting))
        {
            Some((setting, _)) => Err(sources
                .error(&key(setting), format!("is not a setting of kind {:?}", kind.as_str()))),
            None => Ok(()),
        };
    let mut characters = name.chars();
    if !characters.next().is_some_and(|c| c.is_ascii_alphanumeric())
        || !characters.all(|c| c.is_ascii_alphanumeric() || c == '-' || c == '_')
    {
        return Err(sources.error(
            &format!("models.{name}"),
            "a provider's name consists of letters, digits, - and _",
        ));
    }
    if kind == ProviderKind::Scripted {
        let foreign = [
            ("base_url", model.base_url.is_some()),
            ("api_key_env", model.api_key_env.is_some()),
            ("timeout", model.timeout.is_some()),
            ("connect_timeout", model.connect_timeout.is_some()),
            ("first_byte_timeout", model.first_byte_timeout.is_some()),
            ("idle_timeout", model.idle_timeout.is_some()),
            ("max_retries", model.max_retries.is_some()),
            ("rate_limit_patience", model.rate_limit_patience.is_some()),
            ("max_concurrency", model.max_concurrency.is_some()),
            ("headers", !model.headers.is_empty()),
            ("num_ctx", model.num_ctx.is_some()),
        ];
        refuse_foreign(&foreign)?;
        let dir = model.dir.ok_or_else(|| sources.error(&key("dir"), "is missing"))?;
        return Ok(Model::Scripted { dir: sources.resolve(&key("dir"), &dir) });
    }
    let foreign = [
        ("dir", model.dir.is_some()),
        ("num_ctx", model.num_ctx.is_some() && kind != ProviderKind::Ollama),
    ];
    refuse_foreign(&foreign)?;
    let base_url = model.base_url.ok_or_else(|| sources.error(&key("base_url"), "is missing"))?;
    if !matches!(base_url.scheme(), "http" | "https") || base_url.query().is_some() {
        return Err(sources.error(&key("base_url"), "must be an http or https URL without a query"));
    }
    if !base_url.username().is_empty() || base_url.password().is_some() {
        return Err(sources
            .error(&key("base_url"), "must not contain credentials; use api_key_env or headers"));
    }
    for (header, value) in &model.headers {
        let name_ok = HeaderName::from_bytes(header.as_bytes()).is_ok();
        if !name_ok || HeaderValue::from_str(value.expose_secret()).is_err() {
            return Err(sources.error(&key("headers"), "one of them is not a valid header"));
        }
    }
    let api_key = model.api_key_env.as_ref().and_then(|variable| env.get(variable));
    let num_ctx = (kind == ProviderKind::Ollama).then_some(model.num_ctx.unwrap_or(16_384));
    Ok(Model::Server(ModelServer {
        kind,
        num_ctx,
        base_url: base_url.as_str().trim_end_matches('/').to_owned(),
        api_key: api_key.map(|value| value.as_str().into()),
        api_key_env: model.api_key_env,
        timeout: model.timeout.unwrap_or(Duration::from_mins(2)),
        connect_timeout: model.connect_timeout.unwrap_or(Duration::from_secs(10)),
        first_byte_timeout: model.first_byte_timeout.unwrap_or(Duration::from_mins(1)),
        idle_timeout: model.idle_timeout.unwrap_or(Duration::from_mins(1)),
        max_retries: model.max_retries.unwrap_or(5),
        rate_limit_patience: model.rate_limit_patience.unwrap_or(Duration::from_secs(30)),
        max_concurrency: model.max_concurrency,
        headers: model.headers,
    }))
}
