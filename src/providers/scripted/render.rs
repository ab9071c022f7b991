//! Templates of scenarios: strings over `inputs`, `results` and `step`.
//!
//! `results` holds the results of the last turn's tool calls, each as the text that a model would
//! read; `results[0] | fromjson` parses one. A string of arguments that is a single `{{ … }}` keeps
//! the type of its value. An undefined value is an error; the number of instructions is limited.

use std::sync::LazyLock;

use serde_json::{Value, json};

use crate::bounds::template::{TemplateError, Templates, Undefined, is_template};
use crate::message::Turn;
use crate::providers::ModelRequest;

static TEMPLATES: LazyLock<Templates> =
    LazyLock::new(|| Templates::new(Undefined::Tested).with_fromjson());

/// Renders one step's strings.
pub(super) struct Renderer<'a> {
    inputs: &'a Value,
    results: Value,
    step: Value,
}

impl<'a> Renderer<'a> {
    pub(super) fn new(request: &ModelRequest<'a>) -> Self {
        let last = request.conversation.turns().iter().rev().find_map(|turn| match turn {
            Turn::Assistant(turn) => Some(turn.results()),
            Turn::User(_) => None,
        });
        let results: Vec<&str> =
            last.unwrap_or_default().iter().map(|result| result.content.as_str()).collect();
        Self { inputs: request.inputs, results: json!(results), step: request.step.into() }
    }

    fn variables(&self) -> [(&str, &Value); 3] {
        [("inputs", self.inputs), ("results", &self.results), ("step", &self.step)]
    }

    /// A template as text.
    pub(super) fn text(&self, template: &str) -> Result<String, String> {
        if !is_template(template) {
            return Ok(template.to_owned());
        }
        TEMPLATES.render_source(template, &self.variables()).map_err(describe)
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
        TEMPLATES
            .value(expression, &self.variables())
            .map_err(describe)?
            .ok_or_else(|| format!("{expression} is undefined"))
    }
}

/// Checks that a template compiles.
pub(super) fn check(template: &str) -> Result<(), String> {
    TEMPLATES.check(template).map_err(describe)
}

/// The expression of a text that is a single `{{ … }}`.
fn sole_expression(template: &str) -> Option<&str> {
    let inside = template.trim().strip_prefix("{{")?.strip_suffix("}}")?;
    let inside = inside.trim_start_matches('-').trim_end_matches('-').trim();
    TEMPLATES.is_expression(inside).then_some(inside)
}

/// The problem and its line; neither the template's text nor the variables.
fn describe(error: TemplateError) -> String {
    let TemplateError { line, kind, detail } = error;
    let what = detail.unwrap_or(kind);
    match line {
        Some(line) => format!("{what} (line {line} of the template)"),
        None => what,
    }
}
