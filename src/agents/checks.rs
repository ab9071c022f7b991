//! What is wrong with a definition that serde cannot see: ranges, names, globs, contradictions.
//!
//! Pure. Whether a provider or a tool exists is not asked here; it depends on the service, and a
//! definition must load the same way from a run's snapshot on any replica.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::path::{Component, Path};

use serde_json::Value;

use super::Definition;
use super::definition::{DenyRule, DriverKind, NetworkSection};
use super::yaml::DefinitionError;
use crate::bounds::Refused;
use crate::bounds::address::{HostPattern, Network};
use crate::bounds::glob::Glob;
use crate::bounds::name;
use crate::bounds::pattern::Author;
use crate::bounds::schema::Schema;
use crate::bounds::text::{has_blanks, quoted};
use crate::message::DECISION_FIELDS;
use crate::run::{Delegation, Sampling, ToolChoicePolicy, Usd, check_passed};

mod commands;
mod contract;
mod inputs;
mod tooling;

type Check = Result<(), DefinitionError>;

/// Models that may take over.
const MAX_FALLBACKS: usize = 8;
/// Names of credentials.
const MAX_CREDENTIALS: usize = 16;
/// Models and globs of models that requests may choose.
const MAX_MODELS: usize = 64;
/// Stop conditions of one agent.
const MAX_CONDITIONS: usize = 32;

/// Whether this may be an agent's name: `^[a-z][a-z0-9-]{1,63}$`.
pub fn is_agent_name(name: &str) -> bool {
    (2..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')
}

/// Why a tool choice could never end under a contract; `None` where it can.
pub fn tool_choice_conflict(choice: &ToolChoicePolicy, structured: bool) -> Option<&'static str> {
    match (choice, structured) {
        (ToolChoicePolicy::Required, false) => Some(
            "\"required\" needs `output` in the definition: a text answer, which alone could end the run, would be forbidden",
        ),
        (ToolChoicePolicy::None, true) => Some(
            "\"none\" needs a definition without `output`: the call of the output tool, which alone could end the run, would be forbidden",
        ),
        _ => None,
    }
}

/// Checks everything that needs no compiling.
pub(super) fn check(definition: &Definition) -> Check {
    let d = definition;
    if !is_agent_name(&d.name) {
        return Err(DefinitionError::at(
            "name",
            format!("{:?} does not match ^[a-z][a-z0-9-]{{1,63}}$", d.name),
        ));
    }
    if d.version.is_empty() || d.version.len() > 64 {
        return Err(DefinitionError::at("version", "must have 1 to 64 characters"));
    }
    check_model("model", &d.model)?;
    check_fallbacks(d)?;
    check_selectable_models(d)?;
    check_tools(d)?;
    inputs::check(d)?;
    contract::check(d)?;
    tooling::check(d)?;
    commands::check(d)?;
    check_conditions(d)?;
    check_ranges(d)?;
    check_options(d)?;
    check_workspace(&d.workspace)?;
    let paths = &d.governance.paths;
    for (key, globs) in [("read", &paths.read), ("write", &paths.write)] {
        for (i, glob) in globs.iter().enumerate() {
            check_path_glob(&format!("governance.paths.{key}[{i}]"), glob)?;
        }
    }
    for (i, rule) in paths.deny.iter().enumerate() {
        check_path_glob(&format!("governance.paths.deny[{i}]"), rule.pattern())?;
    }
    for (directory, globs) in &paths.deny_in {
        let key = format!("governance.paths.deny_in.{directory}");
        check_directory(&key, directory)?;
        for (i, rule) in globs.iter().enumerate() {
            check_path_glob(&format!("{key}[{i}]"), rule.pattern())?;
        }
    }
    for (directory, globs) in &paths.private_in {
        let key = format!("governance.paths.private_in.{directory}");
        check_directory(&key, directory)?;
        for (i, glob) in globs.iter().enumerate() {
            check_path_glob(&format!("{key}[{i}]"), glob)?;
        }
    }
    check_network(&d.governance.network)?;
    for pattern in d.governance.tool_policies.keys() {
        let key = format!("governance.tool_policies.{pattern}");
        Glob::of_names(pattern).map_err(|e| DefinitionError::at(key, e.to_string()))?;
    }
    Ok(())
}

fn check_model(key: &str, name: &str) -> Check {
    // A text that is not the name of a model may be a secret in the wrong place.
    name::check_model(name).map_err(|refused| DefinitionError::at(key, refused.to_string()))
}

fn check_fallbacks(d: &Definition) -> Check {
    if d.fallback_models.len() > MAX_FALLBACKS {
        return Err(DefinitionError::at(
            "fallback_models",
            format!("has more than {MAX_FALLBACKS} entries"),
        ));
    }
    for (i, model) in d.fallback_models.iter().enumerate() {
        let key = format!("fallback_models[{i}]");
        check_model(&key, model)?;
        if *model == d.model || d.fallback_models.iter().take(i).any(|earlier| earlier == model) {
            return Err(DefinitionError::at(key, format!("{model:?} is asked before")));
        }
    }
    Ok(())
}

fn check_selectable_models(d: &Definition) -> Check {
    if d.models.len() > MAX_MODELS {
        return Err(DefinitionError::at("models", format!("has more than {MAX_MODELS} entries")));
    }
    for (i, glob) in d.models.iter().enumerate() {
        let key = format!("models[{i}]");
        if !glob.contains(['*', '?', '[', '{']) {
            check_model(&key, glob)?;
        }
        if glob.len() > name::MAX_NAME || has_blanks(glob) {
            let message = format!(
                "is not a glob of models: at most {} bytes without blanks, e.g. openai/gpt-4.1*",
                name::MAX_NAME
            );
            return Err(DefinitionError::at(key, message));
        }
        if d.models.iter().take(i).any(|earlier| earlier == glob) {
            return Err(DefinitionError::at(key, format!("{glob:?} is listed twice")));
        }
        Glob::of_names(glob).map_err(|e| DefinitionError::at(key, e.to_string()))?;
    }
    Ok(())
}

fn check_tools(d: &Definition) -> Check {
    for (i, tool) in d.tools.iter().enumerate() {
        let key = format!("tools[{i}]");
        if !name::is_tool(tool) {
            return Err(DefinitionError::at(key, format!("{tool:?} is not the name of a tool")));
        }
        if d.tools.iter().take(i).any(|earlier| earlier == tool) {
            return Err(DefinitionError::at(key, format!("{tool:?} is listed twice")));
        }
        if tool == "recall" && d.memory.is_none() {
            return Err(DefinitionError::at(
                key,
                "needs a memory: nothing is kept of this agent's runs",
            ));
        }
        if tool == "use_skill" && d.skills.is_empty() {
            return Err(DefinitionError::at(key, "needs `skills`: this agent has none to read"));
        }
        if let Some(agent) = Delegation::of_tool(tool).map(Delegation::agent) {
            if !is_agent_name(agent) {
                return Err(DefinitionError::at(
                    key,
                    format!("{agent:?} is not the name of an agent"),
                ));
            }
            if agent == d.name {
                return Err(DefinitionError::at(key, "an agent cannot leave work to itself"));
            }
        }
    }
    if let ToolChoicePolicy::Tool(name) = &d.tool_choice {
        let is_output = d.output.as_ref().is_some_and(|o| o.tool.name == *name);
        if !is_output && !d.tools.contains(name) {
            return Err(DefinitionError::at(
                "tool_choice.tool",
                format!("{name:?} is not one of this agent's tools"),
            ));
        }
    }
    match tool_choice_conflict(&d.tool_choice, d.output.is_some()) {
        Some(reason) => Err(DefinitionError::at("tool_choice", reason)),
        None => Ok(()),
    }
}

fn within<T: PartialOrd + Copy + Display>(key: &str, value: T, range: RangeInclusive<T>) -> Check {
    if range.contains(&value) {
        return Ok(());
    }
    let message = format!("{value} is not between {} and {}", range.start(), range.end());
    Err(DefinitionError::at(key, message))
}

fn check_ranges(d: &Definition) -> Check {
    let (limits, budget) = (&d.limits, &d.governance.budget);
    within("limits.max_attempts", limits.max_attempts, 1..=100)?;
    within("limits.max_iterations", limits.max_iterations, 1..=10_000)?;
    within("limits.max_iterations_per_attempt", limits.max_iterations_per_attempt, 1..=10_000)?;
    within("limits.max_tool_calls_per_iteration", limits.max_tool_calls_per_iteration, 1..=128)?;
    within("limits.tool_call_timeout_seconds", limits.call_seconds(), 1..=86_400)?;
    within("limits.error_threshold", limits.error_threshold, 1..=1_000)?;
    within("react.max_retries", d.react.max_retries, 0..=20)?;
    within("governance.budget.max_iterations", budget.max_iterations, 1..=1_000_000)?;
    within("governance.budget.max_duration_seconds", budget.max_duration_seconds, 1..=31_536_000)?;
    within("governance.budget.max_tool_calls", budget.max_tool_calls, 0..=1_000_000)?;
    within(
        "governance.budget.max_total_tokens",
        budget.max_total_tokens.unwrap_or(1),
        1..=1_000_000_000_000,
    )?;
    let (least, million) = (Usd::from_micro(1), Usd::from_micro(1_000_000_000_000));
    within(
        "governance.budget.max_cost_usd",
        budget.max_cost_usd.unwrap_or(million),
        least..=million,
    )?;
    within("governance.budget.max_files_modified", budget.files(), 0..=1_000_000)?;
    within("governance.budget.max_lines_changed", budget.max_lines_changed, 0..=1_000_000_000)?;
    within("history.max_runs", d.history.max_runs, 0..=1_000)?;
    within("history.max_tokens", d.history.max_tokens, 0..=10_000_000)?;
    let recalled = d.memory.and_then(|memory| memory.recall).map_or(1, |recall| recall.top_k);
    within("memory.recall.top_k", recalled, 1..=50)
}

fn check_options(d: &Definition) -> Check {
    let sampling = |(name, wrong)| DefinitionError::at(format!("sampling.{name}"), wrong);
    d.sampling.check().map_err(sampling)?;
    let react = &d.react;
    if let Some(model) = &react.final_model {
        check_model("react.final_model", model)?;
    }
    let of_answer =
        |(name, wrong)| DefinitionError::at(format!("react.final_sampling.{name}"), wrong);
    react.final_sampling.as_ref().map_or(Ok(()), Sampling::check).map_err(of_answer)?;
    let written = [
        ("final_model", react.final_model.is_some()),
        ("final_sampling", react.final_sampling.is_some()),
    ];
    let idle = written.iter().find(|(_, is_set)| *is_set && !react.final_via_inference);
    if let Some((name, _)) = idle {
        let message = "needs final_via_inference: otherwise no model is asked for the answer alone";
        return Err(DefinitionError::at(format!("react.{name}"), message));
    }
    if let Some(schema) = &react.decision_schema {
        let at = |below: &str, message: &str| {
            Err(DefinitionError::at(format!("react.decision_schema{below}"), message))
        };
        if d.driver != DriverKind::React {
            return at("", "needs driver: react: other models write no decisions");
        }
        let fields = schema.get("properties").and_then(Value::as_object);
        for name in DECISION_FIELDS {
            if fields.is_some_and(|fields| fields.contains_key(name)) {
                return at(&format!(".properties.{name}"), "is a field of every decision already");
            }
        }
    }
    check_passed(&d.provider_options).map_err(|(name, wrong)| {
        let key = format!("provider_options.{name}");
        DefinitionError::at(key.trim_end_matches('.'), wrong)
    })
}

fn check_conditions(d: &Definition) -> Check {
    if d.governance.budget.stop_conditions.len() > MAX_CONDITIONS {
        let message = format!("has more than {MAX_CONDITIONS} entries");
        return Err(DefinitionError::at("governance.budget.stop_conditions", message));
    }
    Ok(())
}

/// A relative directory; `{run_id}` and `{session_id}` are the only braces.
fn check_workspace(workspace: &str) -> Check {
    let plain = workspace.replace("{run_id}", "x").replace("{session_id}", "x");
    let inside = Path::new(&plain)
        .components()
        .all(|c| matches!(c, Component::Normal(_) | Component::CurDir));
    if plain.is_empty() || !inside || plain.contains(['{', '}', '\\', '\0']) {
        let message = format!(
            "{workspace:?} is not a relative directory without `..`; the placeholders are {{run_id}} and {{session_id}}"
        );
        return Err(DefinitionError::at("workspace", message));
    }
    Ok(())
}

/// A directory of the tenant, in its shortest form.
fn check_directory(key: &str, directory: &str) -> Check {
    let is_part = |part: &str| !matches!(part, "" | "." | "..");
    if directory == "." || directory.split('/').all(is_part) {
        return Ok(());
    }
    let message = format!(
        "{directory:?} is not a directory of the tenant: `.`, or a relative path without `.`, `..` and a `/` at its end"
    );
    Err(DefinitionError::at(key, message))
}

fn check_path_glob(key: &str, glob: &str) -> Check {
    if glob.is_empty() || glob.starts_with('/') || glob.split('/').any(|part| part == "..") {
        return Err(DefinitionError::at(
            key,
            format!("{glob:?} must be relative to the workspace, without `..`"),
        ));
    }
    Glob::of_paths(glob).map(|_| ()).map_err(|e| DefinitionError::at(key, e.to_string()))
}

fn check_network(network: &NetworkSection) -> Check {
    let wrong = |list: &str, i: usize, entry: &str, refused: &Refused| {
        let key = format!("governance.network.{list}[{i}]");
        Err(DefinitionError::at(key, format!("{} {refused}", quoted(entry))))
    };
    let allowed = network.allow.iter().map(String::as_str).enumerate();
    let denied = network.deny.iter().map(DenyRule::pattern).enumerate();
    let listed = allowed.map(|entry| ("allow", entry)).chain(denied.map(|entry| ("deny", entry)));
    for (list, (i, entry)) in listed {
        if let Err(refused) = entry.parse::<HostPattern>() {
            return wrong(list, i, entry, &refused);
        }
    }
    for (i, entry) in network.allow_private.iter().enumerate() {
        if let Err(refused) = entry.parse::<Network>() {
            return wrong("allow_private", i, entry, &refused);
        }
    }
    if network.credentials.len() > MAX_CREDENTIALS {
        let message = format!("has more than {MAX_CREDENTIALS} names");
        return Err(DefinitionError::at("governance.network.credentials", message));
    }
    within("governance.network.max_requests", network.max_requests.unwrap_or(0), 0..=1_000_000)
}

/// Compiles a JSON Schema 2020-12 of an operator.
///
/// # Errors
/// The mistakes in it; `key` is the place of the schema.
pub fn compile_schema(key: &str, schema: &Value) -> Result<Schema, DefinitionError> {
    Schema::compile(schema, Author::Operator).map_err(|refused| DefinitionError::at(key, refused.0))
}
