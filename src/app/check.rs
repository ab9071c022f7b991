//! Finds mistakes in a configuration, and settings without effect: `toolloop check`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use secrecy::{ExposeSecret, SecretString};
use serde::{Deserialize, Serialize};

use super::restart::SINCE_START;
use super::tools::Tools;
use super::{AppError, router, tools};
use crate::agents::{Agent, Catalogue, DefinitionError, DefinitionProblem};
use crate::bounds::glob::Glob;
use crate::config::{Config, Jwt, KeySetSource, Model, UnsetVariables, unknown_variable_message};
use crate::governance::mistake_of_rule;
use crate::providers::scripted::Scripted;
use crate::run::Delegation;
use crate::runtime::jwt::IdentityProvider;
use crate::runtime::keys;
use crate::tools::registry::Registry;

/// How long the service may take to answer whether a restart is due.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// The providers whose models are scenarios, by name. Each parses a file only when it has changed.
pub type Scenarios = BTreeMap<String, Scripted>;

/// The scenarios of a configuration.
pub fn scenarios(config: &Config) -> Scenarios {
    let scripted = |(name, model): (&String, &Model)| match model {
        Model::Scripted { dir } => Some((name.clone(), Scripted::new(dir.clone()))),
        Model::Server(_) => None,
    };
    config.models.iter().filter_map(scripted).collect()
}

/// The findings, one line each.
#[derive(Debug, Default, Serialize)]
pub struct Findings {
    /// Mistakes that prevent an agent or a model from working.
    pub problems: Vec<String>,
    /// Settings without effect, which are probably mistakes.
    pub warnings: Vec<String>,
    /// Valid agents that a service started here would not load, because variables are missing.
    pub not_loaded: Vec<String>,
}

/// Checks the format of the first admin key.
///
/// # Errors
/// The key is not valid.
pub fn check_admin_key(config: &Config) -> Result<(), AppError> {
    let malformed = |key: &&SecretString| keys::parse(key.expose_secret()).is_none();
    match config.admin_key.as_ref().filter(malformed) {
        Some(_) => Err(keys::KeyError::MalformedAdminKey.into()),
        None => Ok(()),
    }
}

/// Whether the file with the keys of the identity provider is a key set. An address is not asked.
///
/// # Errors
/// It is not valid; the message names the setting.
pub async fn check_key_set(config: &Config) -> Result<(), String> {
    let Some(jwt @ Jwt { key_set: KeySetSource::File(file), .. }) = &config.jwt else {
        return Ok(());
    };
    let read = IdentityProvider::new(jwt).keys().read().await;
    read.map_err(|error| format!("auth.jwt.jwks_file: {}: {error}", file.display()))
}

/// Checks the configured agents and models. Reports the variables in `unset`, and those that tools need.
pub fn check(config: &Config, mut unset: UnsetVariables) -> Findings {
    let mut findings = Findings::default();
    match router(config) {
        Ok(router) => {
            let router = Arc::new(router);
            let tools = tools::without_secrets(config, &mut unset);
            let agents = tools::load_agents(config, &router, &tools);
            let dir = config.agents_dir.file_name().unwrap_or_default().to_string_lossy();
            let line = |DefinitionProblem { file, error }: DefinitionProblem| {
                // Those of tools and skills have theirs.
                if file.contains('/') {
                    format!("{file}: {error}")
                } else {
                    format!("{dir}/{file}: {error}")
                }
            };
            for problem in agents.problems() {
                findings.problems.extend(every_mistake(&agents, problem).into_iter().map(line));
            }
            findings.problems.extend(tools.also_wrong.iter().cloned().map(line));
            let scenarios = scenarios(config);
            let missing = missing_scenarios(&scenarios, &agents).into_iter().map(line);
            findings.problems.extend(missing);
            for broken in broken_scenarios(&scenarios) {
                if !findings.problems.iter().any(|problem| problem.ends_with(&broken)) {
                    findings.problems.push(broken);
                }
            }
            findings.warnings.extend(idle_policies(&agents, &tools.registry).into_iter().map(line));
            findings.warnings.extend(broken_flow_rules(&agents).into_iter().map(line));
            findings.warnings.extend(idle_skills(&agents, &tools.registry));
            findings.warnings.extend(tools.left_out.iter().cloned().map(line));
            findings.warnings.extend(unknown_variables(config, &tools));
            let loaded_anew = tools::load_agents(config, &router, &tools::loaded_anew(config));
            for problem in lost_agents(&agents, &loaded_anew, &mut findings.not_loaded) {
                findings.warnings.push(line(problem));
            }
        }
        Err(error) => findings.problems.push(error.to_string()),
    }
    findings.warnings.extend(unset_messages(&unset));
    findings
}

/// The warning about variables that begin like settings, are not settings and are named by no file of tools.
pub(super) fn unknown_variables(config: &Config, tools: &Tools) -> impl Iterator<Item = String> {
    let unknown = config.unknown_variables.iter();
    unknown
        .filter(|name| !tools.variables.contains_key(*name))
        .map(|name| unknown_variable_message(name))
}

/// The messages of a running service at the configured address about files that need a restart.
pub async fn due_restarts(config: &Config) -> Vec<String> {
    #[derive(Deserialize)]
    struct Ready {
        definitions: Vec<Problem>,
    }
    #[derive(Deserialize)]
    struct Problem {
        file: String,
        error: String,
    }
    let address = config.server.listen;
    let asked = async {
        let client = reqwest::Client::builder().no_proxy().timeout(MAX_WAIT).build().ok()?;
        client.get(format!("http://{address}/readyz")).send().await.ok()?.json::<Ready>().await.ok()
    };
    let problems = asked.await.map(|ready| ready.definitions).unwrap_or_default();
    let due = problems.into_iter().filter(|problem| problem.error.contains(SINCE_START));
    due.map(|Problem { file, error }| format!("the service at {address}: {file} {error}")).collect()
}

/// A line for each variable that is not set.
pub fn unset_messages(unset: &UnsetVariables) -> impl Iterator<Item = String> {
    unset.iter().map(|(variable, named_by)| {
        format!("the environment variable {variable} is not set ({named_by})")
    })
}

/// Valid agents that a service started in this environment would not load, because a variable for one of their tools
/// is not set; their names are added to `names`.
fn lost_agents(
    valid: &Catalogue,
    loaded_anew: &Catalogue,
    names: &mut Vec<String>,
) -> Vec<DefinitionProblem> {
    let lost = valid.agents().into_iter().map(|agent| agent.definition.name.clone());
    names.extend(lost.filter(|name| loaded_anew.agent(name).is_none()));
    let is_of_lost = |problem: &DefinitionProblem| {
        let stem = problem.file.rsplit_once('.').map(|(stem, _)| stem);
        names.iter().any(|name| Some(name.as_str()) == stem)
    };
    let problems = loaded_anew.problems().into_iter().filter(is_of_lost);
    let message = |DefinitionProblem { file, error }| {
        let error = format!("not loaded while a variable of its tools is not set: {error}");
        DefinitionProblem { file, error }
    };
    problems.map(message).collect()
}

/// A problem, and all other mistakes in its file.
fn every_mistake(agents: &Catalogue, problem: DefinitionProblem) -> Vec<DefinitionProblem> {
    let others = agents.mistakes(&problem.file).into_iter().filter_map(|mistake| {
        let error = mistake.to_string();
        let place = error.strip_suffix(&mistake.message).filter(|place| !place.is_empty());
        let is_told =
            place.map_or(problem.error == error, |place| problem.error.starts_with(place));
        (!is_told).then(|| DefinitionProblem { file: problem.file.clone(), error })
    });
    let others: Vec<DefinitionProblem> = others.collect();
    std::iter::once(problem).chain(others).collect()
}

/// Tool policies that match none of the service's tools. Such an agent is loaded nevertheless: a policy may be for a
/// tool of a caller.
fn idle_policies(agents: &Catalogue, registry: &Registry) -> Vec<DefinitionProblem> {
    let means_any = |agent: &Agent, glob: &str| {
        if registry.may_have(glob) {
            return true;
        }
        let Ok(glob) = Glob::of_names(glob) else { return true };
        let own = agent.definition.tools.iter().filter(|tool| Delegation::of_tool(tool).is_some());
        let tools = registry.tools();
        let names = tools.iter().map(|tool| &tool.info().name).chain(own);
        names.into_iter().any(|name| glob.is_match(name))
    };
    let mut idle = Vec::new();
    for agent in agents.agents() {
        let policies = agent.definition.governance.tool_policies.keys();
        for name in policies.filter(|name| !means_any(&agent, name)) {
            let key = format!("governance.tool_policies.{name}");
            let error = DefinitionError::at(key, format!("{name:?} means no tool of this service"));
            let (file, error) = agents.located(&agent.definition.name, error);
            idle.push(DefinitionProblem { file, error: error.to_string() });
        }
    }
    idle
}

/// Flow rules that cannot be evaluated, and therefore deny unrelated calls.
fn broken_flow_rules(agents: &Catalogue) -> Vec<DefinitionProblem> {
    let mut broken = Vec::new();
    for agent in agents.agents() {
        let rules = agent.definition.governance.flow.iter().flatten().enumerate();
        for (place, rule) in rules {
            let Some(mistake) = mistake_of_rule(&rule.when) else { continue };
            let key = format!("governance.flow[{place}].when");
            let error = DefinitionError::at(key, format!("{mistake}; it denies every such call"));
            let (file, error) = agents.located(&agent.definition.name, error);
            broken.push(DefinitionProblem { file, error: error.to_string() });
        }
    }
    broken
}

/// Tools of skills that are not tools of the service; they may be tools of a caller.
fn idle_skills(agents: &Catalogue, registry: &Registry) -> Vec<String> {
    let means_any = |name: &str| {
        let Ok(glob) = Glob::of_names(name) else { return true };
        Delegation::of_tool(name).is_some()
            || registry.may_have(name)
            || registry.tools().iter().any(|tool| glob.is_match(&tool.info().name))
    };
    let mut idle = Vec::new();
    for name in agents.skills().names() {
        let Some(skill) = agents.skills().skill(&name) else { continue };
        let bounds = &skill.bounds;
        let lists = [
            ("allowed_tools", bounds.allowed_tools.as_deref().unwrap_or_default()),
            ("disallowed_tools", &bounds.disallowed_tools),
            ("approval_required", &bounds.approval_required),
        ];
        for (list, tools) in lists {
            let none = tools.iter().filter(|tool| !means_any(tool));
            idle.extend(none.map(|tool| {
                format!("the skill {name}: {list}: {tool:?} means no tool of this service")
            }));
        }
    }
    idle
}

/// Files of scenarios that cannot be played, whether or not an agent names them.
fn broken_scenarios(scenarios: &Scenarios) -> Vec<String> {
    let broken = |scripted: &Scripted| {
        let names = scripted.names();
        names.iter().flat_map(|name| scripted.mistakes(name)).collect::<Vec<_>>()
    };
    scenarios.values().flat_map(broken).collect()
}

fn is_glob(model: &str) -> bool {
    model.contains(['*', '?', '[', '{'])
}

/// Models of agents that are scenarios and cannot be played. Such an agent is loaded nevertheless: its scenario may be
/// added later.
pub fn missing_scenarios(scenarios: &Scenarios, agents: &Catalogue) -> Vec<DefinitionProblem> {
    let mut problems = Vec::new();
    for agent in agents.agents() {
        let definition = &agent.definition;
        let own = std::iter::once(("model".to_owned(), &definition.model));
        let fallbacks = definition.fallback_models.iter().enumerate();
        let fallbacks = fallbacks.map(|(i, model)| (format!("fallback_models[{i}]"), model));
        let last = definition.react.final_model.iter();
        let last = last.map(|model| ("react.final_model".to_owned(), model));
        let choices = definition.models.iter().enumerate().filter(|(_, model)| !is_glob(model));
        let choices = choices.map(|(i, model)| (format!("models[{i}]"), model));
        for (key, model) in own.chain(fallbacks).chain(last).chain(choices) {
            let Some((provider, name)) = model.split_once('/') else { continue };
            let Some(Err(wrong)) = scenarios.get(provider).map(|it| it.check(name)) else {
                continue;
            };
            let (file, error) = agents.located(&definition.name, DefinitionError::at(key, wrong));
            problems.push(DefinitionProblem { file, error: error.to_string() });
        }
    }
    problems
}

/// Variables for the keys of model servers that are not set, each with the agents that call such a
/// server. It is no mistake: some servers need no key.
pub(super) fn missing_keys<'a>(
    config: &'a Config,
    agents: &Catalogue,
) -> BTreeMap<&'a str, Vec<String>> {
    let mut missing = BTreeMap::<&str, Vec<String>>::new();
    for agent in agents.agents() {
        let definition = &agent.definition;
        let models = std::iter::once(&definition.model).chain(&definition.fallback_models);
        let models = models.chain(&definition.react.final_model);
        for model in models.filter_map(|model| config.models.get(model.split_once('/')?.0)) {
            let Model::Server(server) = model else { continue };
            let (None, Some(variable)) = (&server.api_key, &server.api_key_env) else { continue };
            let callers = missing.entry(variable).or_default();
            if callers.last() != Some(&definition.name) {
                callers.push(definition.name.clone());
            }
        }
    }
    missing
}
