//! The format of `tools/<set>.yaml`, and the checks that serde cannot make.
//!
//! Unknown keys are errors. The keys of one kind of tool are interpreted by the file of that kind.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::Wrong;
use super::reconcile::ReconcileSection;
use crate::bounds::schema::Schema;
use crate::run::{Effect, Label, Labels, Yield};
use crate::tools::Defaults;

/// Bytes of a description.
const MAX_DESCRIPTION: usize = 4096;

/// One file: a set of tools.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ToolsFile {
    /// Of HTTP tools.
    #[serde(default)]
    pub(super) base_url: Option<String>,
    /// Of every request; templates over `env`.
    #[serde(default)]
    pub(super) headers: BTreeMap<String, String>,
    #[serde(default)]
    pub(super) tools: Vec<Entry>,
    #[serde(default)]
    pub(super) openapi: Option<OpenApiSection>,
}

/// Tools that are operations of an API.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OpenApiSection {
    /// Its description, relative to the directory.
    pub(super) file: String,
    /// `operationId`s.
    pub(super) operations: Vec<String>,
    /// By `operationId`; default: what the method suggests.
    #[serde(default)]
    pub(super) effects: BTreeMap<String, Effect>,
}

/// How a body is sent.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BodyFormat {
    #[default]
    Json,
    /// `application/x-www-form-urlencoded`: members that are scalars, or lists of them.
    Form,
}

/// One tool: an HTTP tool where it has a method, a program where it has a command.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Behind `http:<set>/` or `script:<set>/`.
    pub name: String,
    /// For the model.
    #[serde(default)]
    pub description: String,
    #[serde(default = "once")]
    pub effect: Effect,
    #[serde(default)]
    pub destructive: bool,
    /// JSON Schema of the arguments.
    #[serde(default = "any_object")]
    pub input_schema: Value,
    #[serde(default)]
    pub method: Option<String>,
    /// Template over `args`, behind the base URL.
    #[serde(default)]
    pub path: Option<String>,
    /// Templates over `args` and `env`; what is undefined is left out.
    #[serde(default)]
    pub query: BTreeMap<String, String>,
    /// Templates, too; in addition to those of the file.
    #[serde(default)]
    pub headers: BTreeMap<String, String>,
    /// JSON whose texts are templates over `args`, or one template.
    #[serde(default)]
    pub body: Option<Value>,
    #[serde(default)]
    pub body_format: BodyFormat,
    #[serde(default)]
    pub response: Option<ResponseSection>,
    /// How the tool is asked about a call that a crash interrupted.
    #[serde(default)]
    pub reconcile: Option<ReconcileSection>,
    /// The program and its arguments.
    #[serde(default)]
    pub command: Option<Vec<String>>,
    /// JSON Schema of what the program answers.
    #[serde(default)]
    pub output_schema: Option<Value>,
    /// How long a call of the program may take.
    #[serde(default)]
    pub timeout_seconds: Option<u64>,
    /// Variables of the service that the program sees.
    #[serde(default)]
    pub env: Vec<String>,
    /// The labels that results give to a run; default: those usual for tools of this kind.
    #[serde(default)]
    pub yields: Option<Vec<Yield>>,
    /// Labels that results do not give to a run, whatever was read to produce them.
    #[serde(default)]
    pub sanitizes: Vec<Label>,
}

/// What the model sees of an answer.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ResponseSection {
    /// JSON pointer of what is shown; default: all of it.
    pub pointer: Option<String>,
    /// Bytes that are shown.
    pub max_bytes: Option<usize>,
}

impl Entry {
    /// The options of calls that apply where a definition sets none.
    pub(super) fn defaults(&self, timeout: Option<Duration>) -> Defaults {
        let yields = self.yields.as_deref().map(Labels::yielded);
        Defaults { yields, sanitizes: self.sanitizes.clone().into(), timeout }
    }

    /// What a call does, as it is declared: secrets by the names of their variables.
    pub(super) fn does(&self) -> String {
        let mut does = json!({"method": self.method, "path": self.path, "query": self.query,
            "headers": self.headers, "body": self.body, "command": self.command, "env": self.env});
        if self.body_format != BodyFormat::Json {
            does["body_format"] = "form".into();
        }
        if let Some(reconcile) = &self.reconcile {
            does["reconcile"] = reconcile.does();
        }
        does.to_string()
    }

    /// Keys that mean nothing for this kind of tool.
    fn misplaced(&self) -> Option<&'static str> {
        let is_program = self.command.is_some();
        let keys = [
            ("method", true, self.method.is_some()),
            ("path", true, self.path.is_some()),
            ("query", true, !self.query.is_empty()),
            ("headers", true, !self.headers.is_empty()),
            ("body", true, self.body.is_some()),
            ("body_format", true, self.body_format != BodyFormat::Json),
            ("response", true, self.response.is_some()),
            ("output_schema", false, self.output_schema.is_some()),
            ("timeout_seconds", false, self.timeout_seconds.is_some()),
            ("env", false, !self.env.is_empty()),
        ];
        let odd =
            keys.into_iter().find(|(_, of_http, is_there)| *is_there && *of_http == is_program);
        odd.map(|(key, ..)| key)
    }

    /// Checks what all kinds have in common.
    pub(super) fn check(&self) -> Result<(), Wrong> {
        let is_name = (1..=64).contains(&self.name.len())
            && self.name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && self.name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c));
        if !is_name {
            let message =
                format!("{:?} does not match ^[A-Za-z0-9][A-Za-z0-9._-]{{0,63}}$", self.name);
            return Err(Wrong::at("name", message));
        }
        if self.description.len() > MAX_DESCRIPTION {
            let message = format!("is longer than {MAX_DESCRIPTION} bytes");
            return Err(Wrong::at("description", message));
        }
        if let Some(key) = self.misplaced() {
            let with = if self.command.is_some() { "with `command`" } else { "without `command`" };
            let instead = if key == "timeout_seconds" {
                "; the definition of an agent limits the time of an HTTP tool, in \
                 tool_options.<tool>.timeout_seconds"
            } else {
                ""
            };
            return Err(Wrong::at(key, format!("has no meaning {with}{instead}")));
        }
        if let Some(reconcile) = &self.reconcile {
            reconcile.check(self.effect, self.command.is_some())?;
        }
        if self.input_schema.get("type") != Some(&json!("object")) {
            return Err(Wrong::at("input_schema", "must have `type: object`"));
        }
        Schema::of_tool(&self.input_schema)
            .map(|_| ())
            .map_err(|refused| Wrong::at("input_schema", refused.0))
    }
}

fn once() -> Effect {
    Effect::Once
}

fn any_object() -> Value {
    Value::Object(Map::from_iter([("type".to_owned(), json!("object"))]))
}
