//! Templates of scenarios: strings over `inputs`, `results` and `step`.
//!
//! `results` holds the results of the last turn's tool calls, each as the text that a model would
//! read; `results[0] | fromjson` parses one. A string of arguments that is a single `{{ … }}` keeps
//! the type of its value. An undefined value is an error; the number of instructions is limited.

use std::sync::LazyLock;

use minijinja::value::Serde;
use minijinja::{Environment, Error, ErrorKind, UndefinedBehavior, context};
use serde_json::Value;

use crate::message::Turn;
use crate::providers::ModelRequest;

/// Instructions that one template may execute.
const FUEL: u64 = 100_000;

static TEMPLATES: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut environment = Environment::new();
    environment.set_fuel(Some(FUEL));
    environment.set_undefined_behavior(UndefinedBehavior::SemiStrict);
    environment.add_filter("fromjson", |text: &str| match serde_json::from_str::<Value>(text) {
        Ok(value) => Ok(minijinja::Value::from(Serde(value))),
        Err(error) => Err(Error::new(ErrorKind::InvalidOperation, format!("fromjson: {error}"))),
    });
    environment
});

/// Renders one step's strings.
pub(super) struct Renderer {
    variables: minijinja::Value,
}

impl Renderer {
    pub(super) fn new(request: &ModelRequest<'_>) -> Self {
        let last = request.conversation.turns().iter().rev().find_map(|turn| match turn {
            Turn::Assistant(turn) => Some(turn.results()),
            Turn::User(_) => None,
        });
        let results: Vec<&str> =
            last.unwrap_or_default().iter().map(|result| result.content.as_str()).collect();
        Self {
            variables: context! { inputs => Serde(request.inputs), results => Serde(results), step => request.step },
        }
    }

    /// A template as text.
    pub(super) fn text(&self, template: &str) -> Result<String, String> {
        if is_plain(template) {
            return Ok(template.to_owned());
        }
        TEMPLATES.render_str(template, &self.variables).map_err(|error| describe(&error))
    }

    /// A call's arguments as JSON text. A string is used as it is, so that a scenario can also
    /// produce invalid JSON.
    pub(super) fn arguments(&self, arguments: &Value) -> Result<String, String> {
        match arguments {
            Value::Null => Ok("{}".to_owned()),
            Value::String(template) => match self.value(template)? {
                Value::String(text) => Ok(text),
                value => Ok(value.to_string()),
            },
            arguments => Ok(self.members(arguments)?.to_string()),
        }
    }

    fn members(&self, value: &Value) -> Result<Value, String> {
        match value {
            Value::String(template) => self.value(template),
            Value::Array(items) => items.iter().map(|item| self.members(item)).collect(),
            Value::Object(members) => members
                .iter()
                .map(|(name, member)| Ok((name.clone(), self.members(member)?)))
                .collect(),
            other => Ok(other.clone()),
        }
    }

    fn value(&self, template: &str) -> Result<Value, String> {
        let Some(expression) = sole_expression(template) else {
            return self.text(template).map(Value::String);
        };
        let value = TEMPLATES
            .compile_expression(expression)
            .and_then(|compiled| compiled.eval(&self.variables))
            .map_err(|error| describe(&error))?;
        if value.is_undefined() {
            return Err(format!("{expression} is undefined"));
        }
        serde_json::to_value(&value)
            .map_err(|error| format!("{expression} is not a JSON value: {error}"))
    }
}

/// Checks that a template compiles.
pub(super) fn check(template: &str) -> Result<(), String> {
    TEMPLATES.template_from_str(template).map(drop).map_err(|error| describe(&error))
}

fn is_plain(text: &str) -> bool {
    !["{{", "{%", "{#"].iter().any(|mark| text.contains(mark))
}

/// The expression of a text that is a single `{{ … }}`.
fn sole_expression(template: &str) -> Option<&str> {
    let inside = template.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    let inside = inside.trim_start_matches('-').trim_end_matches('-').trim();
    TEMPLATES.compile_expression(inside).is_ok().then_some(inside)
}

/// The problem and its line; neither the template's text nor the variables.
fn describe(error: &Error) -> String {
    let what = error.detail().map_or_else(|| error.kind().to_string(), str::to_owned);
    match error.line() {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}
