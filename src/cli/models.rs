//! `toolloop models`: the model providers that are configured, and the models that agents use.
//!
//! Tells whether a key is set, never the key. Whether a provider answers is `doctor`'s to find out.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::output::{print, print_json};
use super::table::table;
use crate::app;
use crate::config::{Config, Model, ModelServer};

pub(super) fn models(config: &Config, as_json: bool) -> anyhow::Result<()> {
    let mut users: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for agent in app::agents(config)?.agents() {
        users.entry(agent.definition.model.clone()).or_default().push(agent.definition.name.clone());
    }
    if as_json {
        let providers: Vec<Value> = config.models.iter().map(|(name, model)| provider_json(name, model)).collect();
        let models: Vec<Value> =
            users.iter().map(|(model, agents)| json!({"model": model, "agents": agents})).collect();
        print_json(&json!({"providers": providers, "models": models}))?;
        return Ok(());
    }
    let providers: Vec<Vec<String>> = config.models.iter().map(|(name, model)| provider_row(name, model)).collect();
    print(&table(&["PROVIDER", "KIND", "KEY", "TIMEOUT", "RETRIES", "AT"], &providers))?;
    if !users.is_empty() {
        let models: Vec<Vec<String>> = users.into_iter().map(|(model, agents)| vec![model, agents.join(" ")]).collect();
        print(&format!("\n{}", table(&["MODEL", "AGENTS"], &models)))?;
    }
    Ok(())
}

/// Whether calls carry a key: `set`, `not set` or `none` where none is configured.
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
            "kind": model.api.as_str(),
            "base_url": model.base_url,
            "key": key_state(model),
            "api_key_env": model.api_key_env,
            "timeout_seconds": model.timeout.as_secs_f64(),
            "connect_timeout_seconds": model.connect_timeout.as_secs_f64(),
            "first_byte_timeout_seconds": model.first_byte_timeout.as_secs_f64(),
            "idle_timeout_seconds": model.idle_timeout.as_secs_f64(),
            "max_retries": model.max_retries,
        }),
    }
}

fn provider_row(name: &str, model: &Model) -> Vec<String> {
    match model {
        Model::Scripted { dir } => {
            let place = dir.display().to_string();
            vec![name.to_owned(), "scripted".into(), "none".into(), String::new(), String::new(), place]
        }
        Model::Server(model) => {
            let key = match (key_state(model), &model.api_key_env) {
                ("not set", Some(variable)) => format!("not set: {variable}"),
                (state, _) => state.to_owned(),
            };
            let (timeout, retries) = (format!("{:?}", model.timeout), model.max_retries.to_string());
            vec![name.to_owned(), model.api.as_str().into(), key, timeout, retries, model.base_url.clone()]
        }
    }
}
