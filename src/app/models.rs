//! The model providers as they are configured, with prices and capabilities of their models.

use std::collections::BTreeMap;
use std::sync::Arc;

use secrecy::ExposeSecret;

use super::AppError;
use crate::config::tables::ModelPrice;
use crate::config::{Config, Model, ModelServer};
use crate::model::{CapabilityOverrides, ProviderKind};
use crate::providers::capabilities::{CapabilityTable, ModelPattern};
use crate::providers::prices::{Price, PriceTable};
use crate::providers::router::{ProviderEntry, Router};
use crate::providers::scripted::Scripted;
use crate::providers::wire::WireSettings;
use crate::providers::{Provider, anthropic, ollama, openai, responses};

/// The configured model providers, with the prices and capabilities of their models.
///
/// # Errors
/// A provider cannot be set up.
pub fn router(config: &Config) -> Result<Router, AppError> {
    let mut providers = BTreeMap::new();
    for (name, model) in &config.models {
        let entry = match model {
            Model::Scripted { dir } => {
                let scripted = Arc::new(Scripted::new(dir.clone()));
                ProviderEntry { kind: ProviderKind::Scripted, ..ProviderEntry::new(scripted) }
            }
            Model::Server(server) => ProviderEntry {
                provider: model_server(name, server)
                    .map_err(|message| AppError::Provider { name: name.clone(), message })?,
                kind: server.kind,
                max_retries: server.max_retries,
                rate_limit_patience: server.rate_limit_patience,
                timeout: server.timeout,
                max_concurrency: server.max_concurrency,
            },
        };
        providers.insert(name.clone(), entry);
    }
    let prices = config.prices.iter();
    let prices = prices.filter_map(|(key, row)| Some((ModelPattern::parse(key)?, price(row))));
    let mut prices = PriceTable::new(prices.collect());
    for (name, model) in &config.models {
        if let Model::Server(server) = model {
            prices = prices.with_listed(name, server.kind, &server.base_url);
        }
    }
    Ok(Router::new(providers).with_tables(capabilities(config), prices))
}

/// The shipped table with what the configuration corrects. The context window of a price, or the
/// one that a provider loads its models with, is a correction too; `[capabilities]` overrides it.
fn capabilities(config: &Config) -> CapabilityTable {
    let window = |key: &str, tokens: u64| {
        let row = CapabilityOverrides { context_window: Some(tokens), ..Default::default() };
        Some((ModelPattern::parse(key)?, row))
    };
    let loaded = config.models.iter().filter_map(|(name, model)| match model {
        Model::Server(server) => window(&format!("{name}/*"), server.num_ctx?.into()),
        Model::Scripted { .. } => None,
    });
    let priced = config.prices.iter().filter_map(|(key, price)| window(key, price.context_window?));
    let rows = config.capabilities.iter();
    let rows = rows.filter_map(|(key, row)| Some((ModelPattern::parse(key)?, *row)));
    CapabilityTable::new(loaded.chain(priced).chain(rows).collect())
}

fn price(row: &ModelPrice) -> Price {
    let ModelPrice { input, cached_input, cache_write, output, .. } = *row;
    let (cached_input, cache_write) = (cached_input.unwrap_or(input), cache_write.unwrap_or(input));
    Price::of_dollars(input, cached_input, cache_write, output)
}

fn model_server(name: &str, server: &ModelServer) -> Result<Arc<dyn Provider>, String> {
    let headers =
        server.headers.iter().map(|(key, value)| (key.clone(), value.expose_secret().to_owned()));
    let settings = WireSettings {
        name: name.to_owned(),
        base_url: server.base_url.parse().map_err(|e| format!("base_url: {e}"))?,
        api_key: server.api_key.clone(),
        missing_key: server.api_key_env.clone().filter(|_| server.api_key.is_none()),
        headers: headers.collect(),
        connect_timeout: server.connect_timeout,
        first_byte_timeout: server.first_byte_timeout,
        idle_timeout: server.idle_timeout,
    };
    let provider = match server.kind {
        ProviderKind::Openai => openai::provider(settings),
        ProviderKind::OpenaiResponses => responses::provider(settings),
        ProviderKind::Anthropic => anthropic::provider(settings),
        ProviderKind::Ollama => ollama::provider(settings),
        ProviderKind::Scripted => return Err("scenarios have no server".to_owned()),
    };
    Ok(Arc::new(provider.map_err(|e| e.to_string())?))
}
