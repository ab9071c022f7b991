//! What an agent is: the typed form of `agents/<name>.yaml`.
//!
//! Only the shape and its defaults. Reading files, checking what serde cannot check and keeping the
//! catalogue fresh is [`super::catalogue`]'s; what a run makes of a definition is `engine::plan`'s.
//! Unknown keys are errors. The same type, as JSON, is the snapshot that a run keeps.

use std::collections::BTreeMap;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::bounds::glob::means;
use crate::bounds::yaml;
use crate::run::{
    Autonomy, Budget, Delegation, FlowRule, GovernanceMode, Labels, Limits, OnInjection, OnLimit,
    OnSessionBusy, Period, Sampling, Thinking, ToolChoicePolicy,
};

mod access;
mod commands;
mod contract;
mod meta;
mod tooling;

pub use access::{DenyRule, NetworkSection, PathsSection, ToolPolicyRule, ToolPolicySetting};
pub use commands::{CommandRule, CommandsSection};
pub use contract::{OutputRule, Reflection, SubmitTool, ValidatorSection};
pub use tooling::{
    AfterInterceptor, BeforeInterceptor, Cache, InheritedInterceptors, Interceptors, ToolOptions,
};

/// One agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub struct Definition {
    /// `^[a-z][a-z0-9-]{1,63}$`, equal to the file's name.
    #[schemars(regex(pattern = "^[a-z][a-z0-9-]{1,63}$"))]
    pub name: String,
    /// For people; usually a semantic version.
    #[serde(default = "default_version")]
    #[schemars(length(min = 1, max = 64))]
    pub version: String,
    /// One line.
    #[serde(default, deserialize_with = "yaml::text")]
    pub description: String,
    /// `provider/model`.
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]+/[^\s\x00-\x1f\x7f]+$"))]
    pub model: String,
    /// Models that take over, in order, where `model` cannot answer.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(regex(pattern = r"^[A-Za-z0-9_-]+/[^\s\x00-\x1f\x7f]+$")), length(max = 8))]
    pub fallback_models: Vec<String>,
    /// Globs of the models that a request may choose in addition to `model`; absent: `fallback_models`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(length(min = 1, max = 256)), length(max = 64), extend("uniqueItems" = true))]
    pub models: Vec<String>,
    /// Template over `inputs`, `agent`, `skills` and `memory`.
    #[serde(default, deserialize_with = "yaml::text")]
    pub instructions: String,
    /// Template of the first user message; absent: the inputs as JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt: Option<String>,
    /// JSON Schema of the inputs; absent: any object.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "meta::any_schema")]
    pub inputs: Option<Value>,
    /// Absent: any text answer ends the run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub output: Option<OutputSection>,
    /// Names of offered tools.
    #[serde(default)]
    #[schemars(inner(length(max = 256), regex(pattern = "^[A-Za-z0-9_.:/*-]+$")), extend("uniqueItems" = true))]
    pub tools: Vec<String>,
    /// Options of tools, by name or glob; a name counts more than a glob.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub tool_options: BTreeMap<String, ToolOptions>,
    /// Interceptors that run before and after calls.
    #[serde(default, skip_serializing_if = "Interceptors::is_empty")]
    pub interceptors: Interceptors,
    /// Names of skills that runs may use; the system prompt has one line of each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(regex(pattern = "^[a-z][a-z0-9-]{1,63}$")), length(max = 64), extend("uniqueItems" = true))]
    pub skills: Vec<String>,
    /// Skills of `skills` that are active from the start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(inner(regex(pattern = "^[a-z][a-z0-9-]{1,63}$")), length(max = 64), extend("uniqueItems" = true))]
    pub active_skills: Vec<String>,
    /// How the model acts.
    #[serde(default)]
    pub driver: DriverKind,
    /// Sampling parameters.
    #[serde(default)]
    pub sampling: Sampling,
    /// Parameters unknown to this service that are passed to the provider with every model call, by name.
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    #[schema(value_type = Object)]
    pub provider_options: Map<String, Value>,
    /// Whether and how much the model thinks before it answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub thinking: Option<Thinking>,
    /// Whether providers that support it are asked to cache the stable part of the conversation.
    #[serde(default = "yes")]
    pub prompt_caching: bool,
    /// When the model must call a tool.
    #[serde(default)]
    pub tool_choice: ToolChoicePolicy,
    /// Whether a tool choice that a model cannot be held to is refused instead of asked for in
    /// words.
    #[serde(default)]
    pub strict_tool_choice: bool,
    /// Passed through to providers that have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parallel_tool_calls: Option<bool>,
    /// Settings of the driver `react`.
    #[serde(default)]
    pub react: ReactSection,
    /// Limits of the loop.
    #[serde(default)]
    pub limits: Limits,
    /// Whether the model is asked to verify its first text answer.
    #[serde(default = "yes")]
    pub enable_double_confirmation: bool,
    /// Whether the first failing call ends the run.
    #[serde(default)]
    pub throw_on_tool_failure: bool,
    /// Whether the calls after a blocked one are not executed.
    #[serde(default)]
    pub stop_on_tool_block: bool,
    /// What happens to a run at a limit of iterations, calls, tokens or dollars.
    #[serde(default)]
    pub on_limit: OnLimit,
    /// What happens to a run whose session has another unfinished run.
    #[serde(default)]
    pub on_session_busy: OnSessionBusy,
    /// How much of a session's earlier runs the model sees.
    #[serde(default)]
    pub history: HistorySection,
    /// What is remembered of runs and recalled. Absent: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<MemorySection>,
    /// How long a run waits for the result of a tool that its caller executes.
    #[serde(default = "default_client_tool_timeout")]
    pub client_tool_timeout: Period,
    /// Directory beneath the tenant's workspace; `{run_id}` and `{session_id}` are replaced.
    #[serde(default = "default_workspace")]
    #[schemars(regex(
        pattern = r"^([^/\\{}]|\{run_id\}|\{session_id\})([^\\{}]|\{run_id\}|\{session_id\})*$"
    ))]
    pub workspace: String,
    /// What tools may do.
    #[serde(default)]
    pub governance: GovernanceSection,
    /// The people responsible for the agent.
    #[serde(default)]
    pub owner: BTreeMap<String, String>,
}

/// What a definition says of a tool: under its name, then under globs that mean it.
pub fn options_of<'a>(
    tool_options: &'a BTreeMap<String, ToolOptions>,
    tool: &str,
) -> Vec<&'a ToolOptions> {
    let is_meant = |(glob, _): &(&String, _)| means(glob, tool) == Some(true);
    let globs = tool_options.iter().filter(is_meant).map(|(_, options)| options);
    tool_options.get(tool).into_iter().chain(globs).collect()
}

impl Definition {
    /// The agents that this one can leave work to.
    pub fn delegates(&self) -> impl Iterator<Item = &str> {
        self.tools.iter().filter_map(|tool| Delegation::of_tool(tool)).map(Delegation::agent)
    }

    /// How many calls of a tool all runs of a caller may make in a minute, where that is limited.
    pub fn calls_per_minute(&self, tool: &str) -> Option<u32> {
        let options = options_of(&self.tool_options, tool);
        options.iter().find_map(|options| options.rate_limit_per_minute)
    }

    /// What the results of a tool that the caller executes label the run.
    pub fn client_tool_yields(&self, tool: &str) -> Labels {
        let options = options_of(&self.tool_options, tool);
        let declared = options.iter().find_map(|options| options.yields.as_deref());
        let sanitized = options.iter().flat_map(|options| options.sanitizes.iter().copied());
        let yields = declared.map_or(Labels::UNTRUSTED, Labels::yielded);
        yields.without(sanitized.collect::<Vec<_>>().into())
    }

    /// A model and those that take over, each once.
    pub fn models_from(&self, first: &str) -> Vec<String> {
        let others = self.fallback_models.iter().filter(|model| *model != first);
        std::iter::once(first.to_owned()).chain(others.cloned()).collect()
    }

    /// Names and globs of the models that a request may choose.
    pub fn selectable_models(&self) -> impl Iterator<Item = &str> {
        let others = if self.models.is_empty() { &self.fallback_models } else { &self.models };
        let others = others.iter().filter(|other| **other != self.model);
        std::iter::once(&self.model).chain(others).map(String::as_str)
    }

    /// Whether a request may choose this model.
    pub fn may_use(&self, model: &str) -> bool {
        let mut selectable = self.selectable_models();
        if self.models.is_empty() {
            return selectable.any(|name| name == model);
        }
        model == self.model || self.models.iter().any(|glob| means(glob, model) == Some(true))
    }
}

/// A structured output contract.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentOutput)]
#[serde(deny_unknown_fields)]
pub struct OutputSection {
    /// The tool by which the model proposes an output.
    #[serde(default)]
    #[schema(required)]
    pub tool: OutputTool,
    /// JSON Schema 2020-12 of the output; `type: object`.
    #[schema(value_type = Value)]
    #[schemars(schema_with = "meta::object_schema")]
    pub schema: Arc<Value>,
    /// Rules that a schema cannot express.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub rules: Vec<OutputRule>,
    /// Who judges an output that schema and rules accept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub validator: Option<ValidatorSection>,
    /// Who shows the model what its output looks like; the model then submits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reflection: Option<Reflection>,
}

impl OutputSection {
    /// What an output is checked against, in words.
    pub fn checks(&self) -> Vec<String> {
        let mut checks = vec!["the output schema".to_owned()];
        checks.extend((!self.rules.is_empty()).then(|| "the rules".to_owned()));
        checks.extend(self.validator.as_ref().map(|_| "the validator".to_owned()));
        checks
    }
}

/// Name and description of the output tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentOutputTool)]
#[serde(default, deny_unknown_fields)]
pub struct OutputTool {
    /// Default `output`.
    #[schemars(regex(pattern = "^[A-Za-z0-9_-]{1,64}$"))]
    pub name: String,
    /// For the model.
    pub description: String,
}

impl Default for OutputTool {
    fn default() -> Self {
        Self {
            name: "output".into(),
            description: "Give your final output. Call this once, when the task is complete."
                .into(),
        }
    }
}

/// How a model acts.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// By the function calling of its provider.
    #[default]
    Native,
    /// By decisions that it writes as JSON, for models without function calling.
    React,
}

/// Settings of the driver `react`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct ReactSection {
    /// How often a decision that cannot be used is asked for again.
    #[schemars(range(min = 0, max = 20))]
    pub max_retries: u32,
    /// Whether the final answer is written in a model call of its own, without the form of a
    /// decision.
    pub final_via_inference: bool,
    /// The model that writes this answer, as `provider/model`; the agent's own models take over. Absent:
    /// the one that made the decisions.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = r"^[A-Za-z0-9_-]+/[^\s\x00-\x1f\x7f]+$"))]
    pub final_model: Option<String>,
    /// What differs from `sampling` where this answer is written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub final_sampling: Option<Sampling>,
    /// A JSON Schema 2020-12 of the fields that each decision has in addition to `thought`,
    /// `type`, `tool`, `args` and `answer`. They are described to the model, checked, and recorded with the decision.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decision_schema: Option<Value>,
}

impl Default for ReactSection {
    fn default() -> Self {
        Self {
            max_retries: 2,
            final_via_inference: false,
            final_model: None,
            final_sampling: None,
            decision_schema: None,
        }
    }
}

/// What tools may do.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentGovernance)]
#[serde(default, deny_unknown_fields)]
pub struct GovernanceSection {
    /// How much the agent may do without approval.
    pub autonomy: Autonomy,
    /// Whether denials and required approvals are enforced or only recorded.
    pub mode: GovernanceMode,
    /// Path rules.
    pub paths: PathsSection,
    /// Network rules.
    pub network: NetworkSection,
    /// Programs that `shell` may run; default: none.
    pub commands: CommandsSection,
    /// By tool name or glob.
    pub tool_policies: BTreeMap<String, ToolPolicyRule>,
    /// What a run may do with what it has read; absent: two rules for `supervised`, else none.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 64))]
    pub flow: Option<Vec<FlowRule>>,
    /// How texts that look like prompt injections are treated.
    pub injection: InjectionSection,
    /// How long a run waits for an approval; after it the call is denied.
    pub approval_timeout: Period,
    /// Consumption caps.
    pub budget: Budget,
    /// The autonomy of the agents above that only observe, in the definition of a run that another
    /// one started. Not for files.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    #[schema(ignore)]
    pub observed_autonomy: Option<Autonomy>,
}

impl Default for GovernanceSection {
    fn default() -> Self {
        Self {
            autonomy: Autonomy::default(),
            mode: GovernanceMode::default(),
            paths: PathsSection::default(),
            network: NetworkSection::default(),
            commands: CommandsSection::default(),
            tool_policies: BTreeMap::new(),
            flow: None,
            injection: InjectionSection::default(),
            approval_timeout: Period::seconds(24 * 3600),
            budget: Budget::default(),
            observed_autonomy: None,
        }
    }
}

impl GovernanceSection {
    /// The flow rules that hold.
    pub fn flow_rules(&self) -> Vec<FlowRule> {
        match (&self.flow, self.autonomy) {
            (Some(rules), _) => rules.clone(),
            (None, Autonomy::Supervised) => FlowRule::defaults(),
            (None, Autonomy::ReadOnly | Autonomy::Full) => Vec::new(),
        }
    }
}

/// How texts that look like prompt injections are treated. The scan is a filter, not a boundary.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentInjection)]
#[serde(default, deny_unknown_fields)]
pub struct InjectionSection {
    /// Inputs of a run and results of client tools.
    pub inputs: OnInjection,
    /// Results of tools, and what is recalled of earlier runs.
    pub results: OnInjection,
}

impl Default for InjectionSection {
    fn default() -> Self {
        Self { inputs: OnInjection::Block, results: OnInjection::Warn }
    }
}

/// How much of a session's earlier runs the model sees; the newest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentHistory)]
#[serde(default, deny_unknown_fields)]
pub struct HistorySection {
    /// Runs; 0 to 1000.
    #[schemars(range(min = 0, max = 1_000))]
    pub max_runs: u32,
    /// Tokens of all of them, estimated; 0 to 10 million.
    #[schemars(range(min = 0, max = 10_000_000))]
    pub max_tokens: u64,
}

impl Default for HistorySection {
    fn default() -> Self {
        Self { max_runs: 20, max_tokens: 20_000 }
    }
}

/// What is kept of runs, and recalled.
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema,
)]
#[schema(as = AgentMemory)]
#[serde(default, deny_unknown_fields)]
pub struct MemorySection {
    /// Which memories are added to the system prompt; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub recall: Option<RecallSection>,
}

/// Which memories are added to the system prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentRecall)]
#[serde(default, deny_unknown_fields)]
pub struct RecallSection {
    /// The most relevant observations; 1 to 50.
    #[schemars(range(min = 1, max = 50))]
    pub top_k: u32,
}

impl Default for RecallSection {
    fn default() -> Self {
        Self { top_k: 5 }
    }
}

fn default_version() -> String {
    "0.0.0".into()
}

fn default_client_tool_timeout() -> Period {
    Period::seconds(15 * 60)
}

fn default_workspace() -> String {
    ".".into()
}

fn yes() -> bool {
    true
}
