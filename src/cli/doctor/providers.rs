//! Checks the model providers: whether the key is set, the server responds and scenarios exist.
//!
//! No model is called: any HTTP response to a request for the list of models shows that the server
//! is reachable, at no cost.

use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use reqwest::redirect;
use secrecy::ExposeSecret as _;
use url::Url;

use super::Finding;
use crate::agents::{Agent, Catalogue, Definition};
use crate::bounds::address::is_loopback;
use crate::config::{Config, Model, ModelServer};
use crate::model::ProviderKind;

const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn examine(config: &Config, agents: &Catalogue) -> Vec<Finding> {
    let models = |agent: &Arc<Agent>| {
        let Definition { model, fallback_models, react, .. } = &agent.definition;
        let others = fallback_models.iter().chain(&react.final_model);
        std::iter::once(model).chain(others).cloned().collect::<Vec<String>>()
    };
    let used: Vec<String> = agents.agents().iter().flat_map(models).collect();
    let checks = config.models.iter().map(|(name, model)| {
        let is_used = used
            .iter()
            .any(|model| model.split_once('/').is_some_and(|(provider, _)| provider == name));
        async move {
            let check = format!("model {name}");
            match model {
                Model::Scripted { dir } if dir.is_dir() => {
                    Finding::ok(check, format!("scenarios in {}", dir.display()))
                }
                Model::Scripted { dir } => {
                    let detail = format!("the directory {} does not exist", dir.display());
                    broken(check, detail, format!("create it, or set [models.{name}] dir"), is_used)
                }
                Model::Server(model) => server(check, name, model, is_used).await,
            }
        }
    });
    join_all(checks).await
}

/// A failure if an agent uses the provider; otherwise nothing is wrong.
fn broken(check: String, detail: String, next: String, is_used: bool) -> Finding {
    if is_used {
        Finding::fail(check, detail, next)
    } else {
        Finding::ok(check, format!("{detail}; no agent uses it"))
    }
}

async fn server(check: String, name: &str, model: &ModelServer, is_used: bool) -> Finding {
    if let (None, Some(variable)) = (&model.api_key, &model.api_key_env) {
        if !is_used {
            let detail = format!("{}, {variable} is not set; no agent uses it", model.base_url);
            return Finding::ok(check, detail);
        }
        let detail = format!("{}, {variable} is not set: calls go without a key", model.base_url);
        return Finding::warn(
            check,
            detail,
            format!("export {variable}=…, if the server requires a key"),
        );
    }
    let place = &model.base_url;
    match status(model).await {
        Ok(401 | 403) => {
            let key = model.api_key_env.as_deref().unwrap_or("the key");
            broken(check, format!("{place} rejects the key"), format!("is {key} right?"), is_used)
        }
        Ok(300..=399) => {
            let next = format!("set [models.{name}] base_url to where it leads");
            let detail = format!("{place} answers with a redirect, and none is followed");
            broken(check, detail, next, is_used)
        }
        Ok(_) => Finding::ok(check, format!("{place} responds")),
        Err(reason) => {
            let next = format!("is it running, and is [models.{name}] base_url right?");
            broken(check, format!("{place} does not respond: {reason}"), next, is_used)
        }
    }
}

/// The HTTP status of a request for the list of models.
async fn status(model: &ModelServer) -> Result<u16, String> {
    let mut http = reqwest::Client::builder().timeout(TIMEOUT).redirect(redirect::Policy::none());
    if Url::parse(&model.base_url).is_ok_and(|url| is_loopback(&url)) {
        http = http.no_proxy();
    }
    let http = http.build().map_err(|e| e.to_string())?;
    let list = match model.kind {
        ProviderKind::Openai | ProviderKind::OpenaiResponses | ProviderKind::Scripted => "models",
        ProviderKind::Anthropic => "v1/models",
        ProviderKind::Ollama => "api/tags",
    };
    let mut request = http.get(format!("{}/{list}", model.base_url));
    for (name, value) in &model.headers {
        request = request.header(name, value.expose_secret());
    }
    if let Some(key) = &model.api_key {
        request = if model.kind == ProviderKind::Anthropic {
            request
                .header("x-api-key", key.expose_secret())
                .header("anthropic-version", "2023-06-01")
        } else {
            request.bearer_auth(key.expose_secret())
        };
    }
    match request.send().await {
        Ok(response) => Ok(response.status().as_u16()),
        Err(error) if error.is_timeout() => Err(format!("no response within {TIMEOUT:?}")),
        Err(error) => Err(super::super::client::root_cause(&error)),
    }
}
