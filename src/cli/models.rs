//! `toolloop models`: configured model providers; the models that agents use, with their prices and
//! capabilities.
//!
//! Shows whether a key is set, never the key. Whether a provider responds is checked by `doctor`.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

use super::output::{print, print_json};
use super::table::table;
use crate::app;
use crate::config::{Config, Model, ModelServer};
use crate::providers::capabilities;
use crate::providers::prices::Price;
use crate::providers::router::Router;
use crate::run::Usd;

pub(super) fn models(config: &Config, as_json: bool) -> anyhow::Result<()> {
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for agent in app::agents(config)?.agents() {
        let definition = &agent.definition;
        let selectable = definition.models.iter().filter(|it| !it.contains(['*', '?', '[', '{']));
        let others = definition.fallback_models.iter().chain(selectable);
        let others = others.chain(&definition.react.final_model);
        let named: BTreeSet<&String> = std::iter::once(&definition.model).chain(others).collect();
        for model in named {
            users.entry(model.clone()).or_default().push(definition.name.clone());
        }
    }
    let router = app::router(config)?;
    let rows =
        || capabilities::shipped().map(|(kind, pattern, row)| (json!(kind), pattern, json!(row)));
    if as_json {
        let providers: Vec<Value> =
            config.models.iter().map(|(name, model)| provider_json(name, model)).collect();
        let models: Vec<Value> =
            users.iter().map(|(model, agents)| model_json(&router, model, agents)).collect();
        let shipped: Vec<Value> =
            rows().map(|(kind, pattern, row)| json!({"kind": kind, "pattern": pattern, "capabilities": row})).collect();
        return Ok(print_json(
            &json!({"providers": providers, "models": models, "shipped": shipped}),
        )?);
    }
    let providers: Vec<Vec<String>> =
        config.models.iter().map(|(name, model)| provider_row(name, model)).collect();
    print(&table(&["PROVIDER", "KIND", "KEY", "TIMEOUT", "RETRIES", "AT"], &providers))?;
    if !users.is_empty() {
        let models: Vec<Vec<String>> =
            users.iter().map(|(model, agents)| model_row(&router, model, agents)).collect();
        print(&format!("\n{}", table(&["MODEL", "INPUT $/M", "OUTPUT $/M", "AGENTS"], &models)))?;
    }
    let used = users.keys().filter_map(|model| {
        let route = router.resolve(model).ok()?;
        Some(capability_row(model.clone(), &json!(route.capabilities)))
    });
    let shipped = rows()
        .map(|(kind, pattern, row)| capability_row(format!("{}: {pattern}", text(&kind)), &row));
    print(&format!("\n{}", table(&CAPABILITIES, &used.chain(shipped).collect::<Vec<_>>())))?;
    Ok(())
}

/// The columns of the capability table, in the order of the JSON fields.
const CAPABILITIES: [&str; 17] = [
    "MODEL",
    "FORCED",
    "NAMED",
    "PARALLEL",
    "STRICT",
    "CACHE",
    "SCHEMA",
    "WINDOW",
    "TOOLS",
    "OUTPUT CAP",
    "TEMPERATURE",
    "TOP P",
    "STOP",
    "SEED",
    "PENALTIES",
    "JSON",
    "THINKING",
];

fn capability_row(name: String, capabilities: &Value) -> Vec<String> {
    let cells = capabilities.as_object().into_iter().flat_map(|row| row.values().map(text));
    std::iter::once(name).chain(cells).collect()
}

fn text(value: &Value) -> String {
    match value {
        Value::Null => "-".into(),
        Value::Bool(true) => "yes".into(),
        Value::Bool(false) => "no".into(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    }
}

/// US dollars per million tokens.
fn dollars(micro: u64) -> f64 {
    Usd::from_micro(i64::try_from(micro).unwrap_or(i64::MAX)).dollars()
}

fn model_json(router: &Router, model: &str, agents: &[String]) -> Value {
    let route = router.resolve(model).ok();
    let price = route.and_then(|route| route.price).map(|price| {
        json!({"input": dollars(price.input), "cached_input": dollars(price.cached_input),
            "cache_write": dollars(price.cache_write), "output": dollars(price.output)})
    });
    json!({"model": model, "agents": agents, "capabilities": route.map(|route| route.capabilities), "price": price})
}

fn model_row(router: &Router, model: &str, agents: &[String]) -> Vec<String> {
    let price = router.resolve(model).ok().and_then(|route| route.price);
    let cell = |part: fn(Price) -> u64| {
        price.map_or_else(|| "-".to_owned(), |price| dollars(part(price)).to_string())
    };
    vec![model.to_owned(), cell(|price| price.input), cell(|price| price.output), agents.join(" ")]
}

/// `set`, `not set`, or `none` if no key is configured.
pub(super) fn key_state(model: &ModelServer) -> &'static str {
    match (&model.api_key, &model.api_key_env) {
        (Some(_), _) => "set",
        (None, Some(_)) => "not set",
        (None, None) => "none",
    }
}

fn provider_json(name: &str, model: &Model) -> Value {
    match model {
        Model::Scripted { dir } => json!({"provider": name, "kind": "scripted", "dir": dir}),
        Model::Server(model) => json!({
            "provider": name,
            "kind": model.kind.as_str(),
            "base_url": model.base_url,
            "key": key_state(model),
            "api_key_env": model.api_key_env,
            "timeout_seconds": model.timeout.as_secs_f64(),
            "connect_timeout_seconds": model.connect_timeout.as_secs_f64(),
            "first_byte_timeout_seconds": model.first_byte_timeout.as_secs_f64(),
            "idle_timeout_seconds": model.idle_timeout.as_secs_f64(),
            "max_retries": model.max_retries,
            "rate_limit_patience_seconds": model.rate_limit_patience.as_secs_f64(),
            "max_concurrency": model.max_concurrency,
        }),
    }
}

fn provider_row(name: &str, model: &Model) -> Vec<String> {
    match model {
        Model::Scripted { dir } => {
            let place = dir.display().to_string();
            vec![
                name.to_owned(),
                "scripted".into(),
                "none".into(),
                String::new(),
                String::new(),
                place,
            ]
        }
        Model::Server(model) => {
            let key = match (key_state(model), &model.api_key_env) {
                ("not set", Some(variable)) => format!("not set: {variable}"),
                (state, _) => state.to_owned(),
            };
            let (timeout, retries) =
                (format!("{:?}", model.timeout), model.max_retries.to_string());
            vec![
                name.to_owned(),
                model.kind.as_str().into(),
                key,
                timeout,
                retries,
                model.base_url.clone(),
            ]
        }
    }
}
