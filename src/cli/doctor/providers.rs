//! Can the models be asked? A key where one is needed, an answer from the base URL, scenarios.
//!
//! No model is called: any HTTP answer to a look at the list of models shows that the server is
//! there, and costs nothing.

use std::time::Duration;

use futures::future::join_all;
use secrecy::ExposeSecret as _;

use super::Finding;
use crate::agents::Catalogue;
use crate::config::{Config, Model, ModelServer};
use crate::model::ProviderKind;

/// How long a provider may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) async fn examine(config: &Config, agents: &Catalogue) -> Vec<Finding> {
    let used: Vec<String> =
        agents.agents().iter().map(|agent| agent.definition.model.clone()).collect();
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
                    let detail = format!("there is no directory {}", dir.display());
                    broken(check, detail, format!("make it, or set [models.{name}] dir"), is_used)
                }
                Model::Server(model) => server(check, name, model, is_used).await,
            }
        }
    });
    join_all(checks).await
}

/// What does not work fails only if an agent needs it.
fn broken(check: String, detail: String, next: String, is_used: bool) -> Finding {
    if is_used {
        Finding::fail(check, detail, next)
    } else {
        Finding::warn(check, format!("{detail}; no agent uses it"), next)
    }
}

async fn server(check: String, name: &str, model: &ModelServer, is_used: bool) -> Finding {
    if let (None, Some(variable)) = (&model.api_key, &model.api_key_env) {
        let detail = format!("{}, {variable} is not set: calls go without a key", model.base_url);
        return Finding::warn(
            check,
            detail,
            format!("export {variable}=…, where the server wants a key"),
        );
    }
    let place = &model.base_url;
    match status(model).await {
        Ok(401 | 403) => {
            let key = model.api_key_env.as_deref().unwrap_or("the key");
            broken(check, format!("{place} refuses the key"), format!("is {key} right?"), is_used)
        }
        Ok(_) => Finding::ok(check, format!("{place} answers")),
        Err(reason) => {
            let next = format!("is it running, and is [models.{name}] base_url right?");
            broken(check, format!("{place} does not answer: {reason}"), next, is_used)
        }
    }
}

/// The status of a look at the list of models.
async fn status(model: &ModelServer) -> Result<u16, String> {
    let http = reqwest::Client::builder().timeout(PATIENCE).build().map_err(|e| e.to_string())?;
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
        Err(error) if error.is_timeout() => Err(format!("no answer within {PATIENCE:?}")),
        Err(error) => Err(super::super::client::root_cause(&error)),
    }
}
