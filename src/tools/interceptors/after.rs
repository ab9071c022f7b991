//! Interceptors of results: a part of the result is redacted, or all of it is replaced by the text that
//! a template renders.
//!
//! If a condition or a template cannot be evaluated, the result is withheld, because it may contain what
//! the model must not read.

use serde_json::Value;

use super::{InterceptorError, glob};
use crate::bounds::expression::Expression;
use crate::bounds::glob::Glob;
use crate::bounds::json;
use crate::bounds::pattern::{Author, Pattern};
use crate::bounds::template::{Templates, Undefined};
use crate::run::OF_RESULTS;

/// The default replacement of redacted text.
const REDACTED: &str = "[redacted]";
const TEMPLATE: &str = "replace";

/// An interceptor of results, as it is written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AfterRule {
    /// Name or glob of tools.
    pub tool: String,
    /// CEL over `result`, `args`, `inputs`, `is_error` and `tool`; absent: every result.
    pub when: Option<String>,
    /// What it does.
    pub what: Revision,
}

/// What an interceptor does to a result.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Revision {
    /// The matches of a regular expression are replaced.
    Redact { pattern: String, with: Option<String> },
    /// A template over the same variables.
    Replace(String),
}

/// What an interceptor of results looks at, in addition to the result.
pub struct Returned<'a> {
    pub tool: &'a str,
    pub arguments: &'a Value,
    pub inputs: &'a Value,
    pub is_error: bool,
}

/// An interceptor of results, compiled.
#[derive(Debug)]
pub(super) struct After {
    /// 1-based.
    place: usize,
    tool: Glob,
    when: Option<Expression>,
    what: Compiled,
}

#[derive(Debug)]
enum Compiled {
    Redact(Pattern, String),
    Replace(Box<Templates>),
}

impl After {
    pub(super) fn new(index: usize, rule: &AfterRule) -> Result<Self, InterceptorError> {
        let key = format!("after[{index}]");
        let wrong = |name: &str, message: String| {
            let key = format!("{key}.{name}");
            InterceptorError { key, message }
        };
        let when = rule.when.as_ref().map(|when| Expression::compile(when, &OF_RESULTS));
        let when = when.transpose().map_err(|e| wrong("when", e.to_string()))?;
        let what = match &rule.what {
            Revision::Redact { pattern, with } => {
                let pattern = Pattern::compile(pattern, Author::Operator);
                let pattern = pattern.map_err(|e| wrong("redact", e.to_string()))?;
                let with = with.clone().unwrap_or_else(|| REDACTED.to_owned());
                Compiled::Redact(pattern, with)
            }
            Revision::Replace(source) => {
                let mut templates = Templates::new(Undefined::Tested);
                let added = templates.add_over(TEMPLATE, source, &OF_RESULTS);
                added.map_err(|why| wrong("replace", why))?;
                Compiled::Replace(Box::new(templates))
            }
        };
        Ok(Self { place: index + 1, tool: glob(&key, &rule.tool)?, when, what })
    }

    pub(super) fn is_for(&self, tool: &str) -> bool {
        self.tool.is_match(tool)
    }

    /// Applies it to a result, and returns its place if it replaced it.
    pub(super) fn revise(
        &self,
        returned: &Returned<'_>,
        text: &mut String,
    ) -> Result<Option<usize>, String> {
        let place = self.place;
        let looks = self.when.is_some() || matches!(self.what, Compiled::Replace(_));
        let result = if looks { read(text) } else { Value::Null };
        let (tool, is_error) = (Value::from(returned.tool), Value::from(returned.is_error));
        let variables = [
            ("args", returned.arguments),
            ("inputs", returned.inputs),
            ("is_error", &is_error),
            ("result", &result),
            ("tool", &tool),
        ];
        match self.when.as_ref().map_or(Ok(true), |when| when.is_true(&variables)) {
            Ok(true) => {}
            Ok(false) => return Ok(None),
            Err(why) => return Err(format!("Interceptor {place} cannot decide on it: {why}.")),
        }
        match &self.what {
            Compiled::Redact(pattern, with) => {
                if pattern.is_match(text) {
                    *text = pattern.replace_all(text, with).into_owned();
                }
                Ok(None)
            }
            Compiled::Replace(templates) => {
                *text = templates.render(TEMPLATE, &variables).map_err(|why| {
                    format!("Interceptor {place} cannot render what replaces it: {why}.")
                })?;
                Ok(Some(place))
            }
        }
    }
}

/// A result as a value: what its JSON says where it is an object or a list, else its text.
fn read(text: &str) -> Value {
    let parsed = text.trim_start().starts_with(['{', '[']).then(|| json::read(text).ok());
    parsed.flatten().unwrap_or_else(|| Value::from(text))
}
