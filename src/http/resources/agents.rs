//! The agents, read only: definitions change by editing their files.
//!
//! They are shown without secrets: a definition names the sources of those that the service uses,
//! but its texts may have others in them. The hash is that of the whole definition.

use axum::Json;
use axum::extract::State;
use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use super::page::{Listing, PARTS, PartParams, by_number};
use super::redaction;
use crate::agents::definition::GovernanceSection;
use crate::agents::{Agent, Definition};
use crate::http::document::openapi::{one_object, properties};
use crate::http::edge::auth::{AgentsRead, Scoped};
use crate::http::edge::extract::{Name, Params};
use crate::http::edge::problem::Problem;
use crate::http::state::App;

/// An agent in a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Agent)]
pub(crate) struct AgentSummary {
    /// The name by which the agent is invoked.
    #[schema(example = "repo-guide")]
    name: String,
    /// The version of the definition.
    #[schema(example = "1.2.0")]
    version: String,
    /// A description for people.
    #[schema(example = "Explains what is in a repository.")]
    description: String,
    /// The model, as `provider/model`.
    #[schema(example = "openai/gpt-4.1-mini")]
    model: String,
    /// The tools that the agent can use.
    #[schema(example = json!(["file_ops"]))]
    tools: Vec<String>,
    /// The SHA-256 hash of the definition.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    hash: String,
    /// When this version of the definition was loaded.
    loaded_at: DateTime<Utc>,
}

/// An agent's definition with all defaults filled in, and the version that is loaded.
#[derive(Debug, Serialize)]
pub(crate) struct AgentDetail {
    #[serde(flatten)]
    definition: Definition,
    #[serde(flatten)]
    version: LoadedVersion,
}

/// The loaded version of a definition.
#[derive(Debug, Serialize, ToSchema)]
struct LoadedVersion {
    /// The SHA-256 hash of the definition.
    #[schema(example = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08")]
    hash: String,
    /// When this version of the definition was loaded.
    loaded_at: DateTime<Utc>,
}

impl ToSchema for AgentDetail {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        Definition::schemas(schemas);
    }
}

impl PartialSchema for AgentDetail {
    fn schema() -> RefOr<Schema> {
        let about =
            "An agent's definition with all defaults filled in, and the version that is loaded.";
        let mut object =
            one_object(about, properties::<Definition>().chain(properties::<LoadedVersion>()));
        object.required = always_present();
        object.example = Some(json!({
            "name": "repo-guide",
            "version": "1.2.0",
            "description": "Explains what is in a repository.",
            "model": "openai/gpt-4.1-mini",
            "instructions": "Explain what is in the repository, from its files alone.",
            "prompt": "{{ inputs.task }}",
            "inputs": {"type": "object", "required": ["task"], "properties": {"task": {"type": "string"}}},
            "output": null,
            "tools": ["file_ops"],
            "workspace": "repo-guide",
        }));
        object.into()
    }
}

/// With the default bounds filled in.
fn shown(definition: Definition) -> Definition {
    let limits = definition.limits.shown(None);
    let budget = definition.governance.budget.clone().shown();
    let governance = GovernanceSection { budget, ..definition.governance };
    Definition { limits, governance, ..definition }
}

/// Without secrets. A value of `provider_options` under the name of a secret is one, whatever its form;
/// in `governance`, such names are those of tools and sources.
fn without_secrets(agent: AgentDetail) -> Result<Value, Problem> {
    let mut shown =
        serde_json::to_value(agent).map_err(|error| Problem::internal(error.to_string()))?;
    let mut kept = |field: &str| shown.get_mut(field).map(Value::take);
    let (options, governance) = (kept("provider_options"), kept("governance"));
    let mut shown = redaction::described(shown);
    if let Some(options) = options {
        shown["provider_options"] = redaction::document(options);
    }
    if let Some(governance) = governance {
        shown["governance"] = redaction::output(governance);
    }
    Ok(shown)
}

/// The fields that are present even for a minimal definition.
fn always_present() -> Vec<String> {
    let shortest = Definition::deserialize(json!({"name": "", "model": ""}));
    let version = LoadedVersion { hash: String::new(), loaded_at: DateTime::default() };
    let shortest = shortest.map(|definition| AgentDetail { definition, version });
    match shortest.and_then(serde_json::to_value) {
        Ok(Value::Object(fields)) => fields.into_iter().map(|(name, _)| name).collect(),
        _ => Vec::new(),
    }
}

impl From<&Agent> for AgentSummary {
    fn from(agent: &Agent) -> Self {
        let definition = &agent.definition;
        Self {
            name: definition.name.clone(),
            version: redaction::text(definition.version.clone()),
            description: redaction::text(definition.description.clone()),
            model: definition.model.clone(),
            tools: definition.tools.clone(),
            hash: agent.hash.clone(),
            loaded_at: agent.loaded_at,
        }
    }
}

/// List agents
#[utoipa::path(
    get, path = "/agents", tag = "agents", security(("bearer" = ["agents:read"])),
    params(PartParams),
    responses((status = 200, description = "A page of agents, sorted by name.", body = Listing<AgentSummary>)),
)]
pub(crate) async fn list_agents(
    State(app): State<App>,
    caller: Scoped<AgentsRead>,
    mut params: Params,
) -> Result<Json<Listing<AgentSummary>>, Problem> {
    let page = by_number(&mut params, &caller.tenant, PARTS)?;
    params.finish()?;
    let agents =
        app.catalogue.agents().iter().map(|agent| AgentSummary::from(agent.as_ref())).collect();
    Ok(Json(Listing::of_all(agents, &page)))
}

/// Get an agent
#[utoipa::path(
    get, path = "/agents/{name}", tag = "agents", security(("bearer" = ["agents:read"])),
    params(("name" = String, Path, description = "The agent's name.")),
    responses((status = 200, description = "The agent's definition.", body = AgentDetail)),
)]
pub(crate) async fn get_agent(
    State(app): State<App>,
    _: Scoped<AgentsRead>,
    Name(name): Name,
    params: Params,
) -> Result<Json<Value>, Problem> {
    params.finish()?;
    let agent = app.catalogue.agent(&name).ok_or_else(|| Problem::not_found("agent"))?;
    let version = LoadedVersion { hash: agent.hash.clone(), loaded_at: agent.loaded_at };
    let agent = AgentDetail { definition: shown(agent.definition.clone()), version };
    Ok(Json(without_secrets(agent)?))
}
