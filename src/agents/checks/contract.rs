//! What is wrong with an output section that serde cannot see.
//!
//! Schemas, templates and expressions are compiled elsewhere, which finds what is wrong inside
//! them.

use serde_json::Value;
use url::Url;

use super::{Check, within};
use crate::agents::Definition;
use crate::agents::definition::{OutputSection, Reflection};
use crate::agents::yaml::DefinitionError;

/// Rules of one output.
const MAX_RULES: usize = 64;
/// Characters of a rule's message.
const MAX_MESSAGE: usize = 4096;

pub(super) fn check(d: &Definition) -> Check {
    let Some(output) = &d.output else { return Ok(()) };
    check_name(d, "output.tool.name", &output.tool.name)?;
    if output.schema.get("type").and_then(Value::as_str) != Some("object") {
        return Err(DefinitionError::at("output.schema", "must have `type: object`"));
    }
    check_rules(output)?;
    if let Some(validator) = &output.validator {
        check_url("output.validator.url", &validator.url)?;
        within("output.validator.timeout_seconds", validator.timeout_seconds, 1..=600)?;
    }
    output.reflection.as_ref().map_or(Ok(()), |reflection| check_reflection(d, output, reflection))
}

/// A tool that the loop itself offers beside the agent's.
fn check_name(d: &Definition, key: &str, name: &str) -> Check {
    let sendable = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == '-');
    if name.is_empty() || name.len() > 64 || !sendable {
        return Err(DefinitionError::at(
            key,
            format!("{name:?} does not match ^[A-Za-z0-9_-]{{1,64}}$"),
        ));
    }
    if d.tools.iter().any(|tool| tool == name) {
        return Err(DefinitionError::at(
            key,
            format!("{name:?} is also one of this agent's tools"),
        ));
    }
    if !d.skills.is_empty() && name == "use_skill" {
        return Err(DefinitionError::at(
            key,
            "agents with skills have a tool of the name \"use_skill\"",
        ));
    }
    Ok(())
}

fn check_rules(output: &OutputSection) -> Check {
    if output.rules.len() > MAX_RULES {
        return Err(DefinitionError::at(
            "output.rules",
            format!("has more than {MAX_RULES} entries"),
        ));
    }
    for (i, rule) in output.rules.iter().enumerate() {
        if !(1..=MAX_MESSAGE).contains(&rule.message.chars().count()) {
            let message = format!("must have 1 to {MAX_MESSAGE} characters");
            return Err(DefinitionError::at(format!("output.rules[{i}].message"), message));
        }
    }
    Ok(())
}

fn check_reflection(d: &Definition, output: &OutputSection, reflection: &Reflection) -> Check {
    match (&reflection.template, &reflection.url) {
        (Some(_), None) => {}
        (None, Some(url)) => check_url("output.reflection.url", url)?,
        _ => {
            let message = "must have either `template` or `url`, and not both";
            return Err(DefinitionError::at("output.reflection", message));
        }
    }
    within("output.reflection.timeout_seconds", reflection.timeout_seconds, 1..=600)?;
    let submit = &reflection.submit.name;
    check_name(d, "output.reflection.submit.name", submit)?;
    if *submit == output.tool.name {
        let message = format!("{submit:?} is also the name of the output tool");
        return Err(DefinitionError::at("output.reflection.submit.name", message));
    }
    Ok(())
}

fn check_url(key: &str, text: &str) -> Check {
    let wrong = |why: &str| Err(DefinitionError::at(key, why));
    let Ok(url) = Url::parse(text) else { return wrong("is not a URL") };
    if !matches!(url.scheme(), "http" | "https") || url.host_str().is_none() {
        return wrong("does not begin with http:// or https:// and a host");
    }
    if !url.username().is_empty() || url.password().is_some() {
        // Not repeated: it holds a secret.
        return Err(DefinitionError::at(key, "must not hold a user name or password"));
    }
    Ok(())
}
