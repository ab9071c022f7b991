//! How single tools are treated: options by name, and interceptors around their calls.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::bounds::expression::Expression;
use crate::run::{Label, OF_CALLS, OF_RESULTS, OnUnknownOutcome, Yield};

/// Options of a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentToolOptions)]
#[serde(default, deny_unknown_fields)]
pub struct ToolOptions {
    /// Whether an identical call that only reads gets the first one's result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cache: Option<Cache>,
    /// How often a failing call is repeated, where repeating is harmless; 0 to 10.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 10))]
    pub retries: Option<u32>,
    /// Seconds that one call may take, instead of `limits.tool_call_timeout_seconds`; 1 to 86400.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400))]
    pub timeout_seconds: Option<u64>,
    /// Calls that all runs of one caller may make in a minute, all at once if need be; 1 to a
    /// billion.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000))]
    pub rate_limit_per_minute: Option<u32>,
    /// What happens to a call that must not be repeated and whose outcome is unknown after a crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_unknown_outcome: Option<OnUnknownOutcome>,
    /// What a result labels the run that reads it, instead of what is usual: `web_fetch`, `browser`, MCP
    /// and HTTP tools yield `untrusted`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 3))]
    pub yields: Option<Vec<Yield>>,
    /// Arguments that are paths of the workspace, or lists of them, as JSON pointers: the rules for
    /// paths judge them as read, and as written unless the call only reads.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16), inner(regex(pattern = "^/"), length(max = 256)))]
    pub paths: Vec<String>,
    /// Labels that its results do not give to the run, whatever it has read to make them.
    #[schemars(length(max = 2))]
    pub sanitizes: Vec<Label>,
}

/// For how long results are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentToolCache)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// Within the attempt, until a call changes something.
    Attempt,
}

/// What is done to calls before and after they are executed, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentInterceptors)]
#[serde(default, deny_unknown_fields)]
pub struct Interceptors {
    /// Before the gate judges a call.
    #[schemars(length(max = 64))]
    pub before: Vec<BeforeInterceptor>,
    /// Before the model reads a result.
    #[schemars(length(max = 64))]
    pub after: Vec<AfterInterceptor>,
    /// Those of the runs above, in the definition of a run that another one started. Not for files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schemars(skip)]
    #[schema(ignore)]
    pub inherited: Vec<InheritedInterceptors>,
}

/// What an agent's interceptors block and redact, which applies to the runs that its runs start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct InheritedInterceptors {
    /// The directory beneath the tenant's that `reads` and `writes` are relative to.
    pub directory: String,
    /// Those that block.
    pub before: Vec<BeforeInterceptor>,
    /// Those that redact.
    pub after: Vec<AfterInterceptor>,
}

impl Interceptors {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.before.is_empty() && self.after.is_empty() && self.inherited.is_empty()
    }

    /// These, and what those of a parent in that directory have to say to the calls of its children:
    /// what they block and redact, where that does not depend on the parent's inputs.
    #[must_use]
    pub fn narrowed_by(&self, parent: &Self, directory: &str) -> Self {
        let holds = |when: Option<&String>, variables: &[&str]| {
            let compiled = when.map(|when| Expression::compile(when, variables));
            compiled.is_none_or(|when| when.is_ok_and(|when| !when.uses("inputs")))
        };
        let (mut before, mut after) = (parent.before.clone(), parent.after.clone());
        before.retain(|it| it.block.is_some() && holds(it.when.as_ref(), &OF_CALLS));
        after.retain(|it| it.redact.is_some() && holds(it.when.as_ref(), &OF_RESULTS));
        let directory = directory.to_owned();
        let of_parent = InheritedInterceptors { directory, before, after };
        let is_empty = of_parent.before.is_empty() && of_parent.after.is_empty();
        let mut narrowed = self.clone();
        narrowed.inherited.extend((!is_empty).then_some(of_parent));
        narrowed.inherited.extend(parent.inherited.iter().cloned());
        narrowed
    }
}

/// Blocks calls, or changes their arguments.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentBeforeInterceptor)]
#[schemars(extend("oneOf" = [{"required": ["block"]}, {"required": ["rewrite"]}]))]
#[serde(deny_unknown_fields)]
pub struct BeforeInterceptor {
    /// Name or glob of the tools that it is for.
    pub tool: String,
    /// CEL over `args` (as written), `inputs`, `tool`, `reads` and `writes`; absent: every call.
    /// `reads` and `writes` are the paths that the call would read and write, resolved and relative
    /// to the workspace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
    /// Message to the model, instead of executing the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<String>,
    /// New values of arguments: by JSON pointer, CEL over the same variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("minProperties" = 1))]
    pub rewrite: BTreeMap<String, String>,
}

/// Redacts results or replaces them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentAfterInterceptor)]
#[schemars(extend("oneOf" = [{"required": ["redact"]}, {"required": ["replace"]}]))]
#[serde(deny_unknown_fields)]
pub struct AfterInterceptor {
    /// Name or glob of the tools that it is for.
    pub tool: String,
    /// CEL over `result` (a value where it is a JSON object or list, else text), `args`, `inputs`,
    /// `is_error` and `tool`; absent: every result.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<String>,
    /// Regular expression of the text to redact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub redact: Option<String>,
    /// Template over the same variables: the model reads what is rendered instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub replace: Option<String>,
    /// Replacement for redacted text; default `[redacted]`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub with: Option<String>,
}
