//! What is wrong with tool options, interceptors and lists of skills that serde cannot see.
//!
//! Whether the tools that they are for exist is not asked here.

use super::{Check, is_agent_name, within};
use crate::agents::Definition;
use crate::agents::definition::{AfterInterceptor, BeforeInterceptor};
use crate::agents::yaml::DefinitionError;
use crate::bounds::expression::Expression;
use crate::bounds::glob::Glob;
use crate::bounds::pattern::{Author, Pattern};
use crate::bounds::template::{Templates, Undefined};
use crate::run::{Delegation, OF_CALLS, OF_RESULTS};

/// Interceptors of one kind.
const MAX_INTERCEPTORS: usize = 64;
/// Arguments of one tool that are declared to be paths.
const MAX_DECLARED_PATHS: usize = 16;
/// Bytes of a JSON pointer to one.
const MAX_POINTER: usize = 256;
/// Skills of one agent.
const MAX_SKILLS: usize = 64;

pub(super) fn check(d: &Definition) -> Check {
    for (pattern, options) in &d.tool_options {
        let key = format!("tool_options.{pattern}");
        check_glob(&key, pattern)?;
        within(&format!("{key}.retries"), options.retries.unwrap_or(0), 0..=10)?;
        if Delegation::of_tool(pattern).is_some() && options.retries.is_some_and(|n| n > 0) {
            let why = "has no meaning for an agent: a repeated call finds the run that the first one started, as it ended";
            return Err(DefinitionError::at(
                format!("{key}.retries"),
                format!("{why}; give that agent more attempts (limits.max_attempts)"),
            ));
        }
        within(
            &format!("{key}.timeout_seconds"),
            options.timeout_seconds.unwrap_or(1),
            1..=86_400,
        )?;
        within(
            &format!("{key}.rate_limit_per_minute"),
            options.rate_limit_per_minute.unwrap_or(1),
            1..=1_000_000_000,
        )?;
        within(&format!("{key}.paths"), options.paths.len(), 0..=MAX_DECLARED_PATHS)?;
        for (i, pointer) in options.paths.iter().enumerate() {
            if !pointer.starts_with('/') || pointer.len() > MAX_POINTER {
                let message = format!(
                    "{pointer:?} is not a JSON pointer of at most {MAX_POINTER} bytes, e.g. /file"
                );
                return Err(DefinitionError::at(format!("{key}.paths[{i}]"), message));
            }
        }
    }
    let interceptors = &d.interceptors;
    for (kind, count) in
        [("before", interceptors.before.len()), ("after", interceptors.after.len())]
    {
        if count > MAX_INTERCEPTORS {
            let message = format!("has more than {MAX_INTERCEPTORS} entries");
            return Err(DefinitionError::at(format!("interceptors.{kind}"), message));
        }
    }
    for (i, interceptor) in interceptors.before.iter().enumerate() {
        check_before(&format!("interceptors.before[{i}]"), interceptor)?;
    }
    for (i, interceptor) in interceptors.after.iter().enumerate() {
        check_after(&format!("interceptors.after[{i}]"), interceptor)?;
    }
    for (i, of_parent) in interceptors.inherited.iter().enumerate() {
        let key = format!("interceptors.inherited[{i}]");
        for (j, interceptor) in of_parent.before.iter().enumerate() {
            check_before(&format!("{key}.before[{j}]"), interceptor)?;
        }
        for (j, interceptor) in of_parent.after.iter().enumerate() {
            check_after(&format!("{key}.after[{j}]"), interceptor)?;
        }
    }
    check_skills("skills", &d.skills)?;
    check_skills("active_skills", &d.active_skills)?;
    match d.active_skills.iter().position(|skill| !d.skills.contains(skill)) {
        Some(i) => {
            let message = format!("{:?} is not one of this agent's skills", d.active_skills[i]);
            Err(DefinitionError::at(format!("active_skills[{i}]"), message))
        }
        None => Ok(()),
    }
}

fn check_before(key: &str, interceptor: &BeforeInterceptor) -> Check {
    check_glob(&format!("{key}.tool"), &interceptor.tool)?;
    if interceptor.block.is_some() != interceptor.rewrite.is_empty() {
        return Err(DefinitionError::at(
            key,
            "must have either `block` or `rewrite`, and not both",
        ));
    }
    if let Some(when) = &interceptor.when {
        check_expression(&format!("{key}.when"), when)?;
    }
    for (pointer, value) in &interceptor.rewrite {
        let key = format!("{key}.rewrite.{pointer}");
        if !is_pointer(pointer) {
            return Err(DefinitionError::at(
                key,
                format!("{pointer:?} is not a JSON pointer, e.g. /path"),
            ));
        }
        check_expression(&key, value)?;
    }
    Ok(())
}

fn check_after(key: &str, interceptor: &AfterInterceptor) -> Check {
    check_glob(&format!("{key}.tool"), &interceptor.tool)?;
    if let Some(when) = &interceptor.when {
        let key = format!("{key}.when");
        Expression::compile(when, &OF_RESULTS)
            .map_err(|e| DefinitionError::at(key, e.to_string()))?;
    }
    match (&interceptor.redact, &interceptor.replace) {
        (Some(pattern), None) => Pattern::compile(pattern, Author::Operator)
            .map(|_| ())
            .map_err(|refused| DefinitionError::at(format!("{key}.redact"), refused.0)),
        (None, Some(template)) if interceptor.with.is_none() => {
            check_template(&format!("{key}.replace"), template)
        }
        _ => Err(DefinitionError::at(
            key,
            "must have either `redact` (and `with`) or `replace`, and not both",
        )),
    }
}

fn check_template(key: &str, source: &str) -> Check {
    Templates::new(Undefined::Tested)
        .add_over("replace", source, &OF_RESULTS)
        .map_err(|why| DefinitionError::at(key, why))
}

fn check_expression(key: &str, source: &str) -> Check {
    Expression::compile(source, &OF_CALLS)
        .map(|_| ())
        .map_err(|e| DefinitionError::at(key, e.to_string()))
}

fn check_glob(key: &str, glob: &str) -> Check {
    if glob.is_empty() {
        return Err(DefinitionError::at(key, "must name a tool, or a glob of tools"));
    }
    Glob::of_names(glob).map(|_| ()).map_err(|e| DefinitionError::at(key, e.to_string()))
}

/// RFC 6901, but not the whole: arguments are changed one by one.
fn is_pointer(text: &str) -> bool {
    let is_escape = |rest: &str| rest.starts_with('0') || rest.starts_with('1');
    text.starts_with('/') && text.split('~').skip(1).all(is_escape)
}

fn check_skills(key: &str, names: &[String]) -> Check {
    if names.len() > MAX_SKILLS {
        return Err(DefinitionError::at(key, format!("has more than {MAX_SKILLS} entries")));
    }
    for (i, name) in names.iter().enumerate() {
        let key = format!("{key}[{i}]");
        if !is_agent_name(name) {
            return Err(DefinitionError::at(
                key,
                format!("{name:?} does not match ^[a-z][a-z0-9-]{{1,63}}$"),
            ));
        }
        if names.iter().take(i).any(|earlier| earlier == name) {
            return Err(DefinitionError::at(key, format!("{name:?} is listed twice")));
        }
    }
    Ok(())
}
