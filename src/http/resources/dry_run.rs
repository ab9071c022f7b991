//! `dry_run`: what a run would be told, offered and held to, without a run.
//!
//! Everything that refuses a run refuses a dry run, with the same answer.

use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use super::run_parts::{Message, messages};
use crate::agents::definition::GovernanceSection;
use crate::run::{Budget, Limits, OnLimit, ToolChoicePolicy};
use crate::runtime::Rehearsal;

/// What an invocation would do; no run was started and no model asked.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRun, example = json!({
    "dry_run": true, "agent": "repo-guide", "agent_version": "1.2.0", "models": ["openai/gpt-4.1-mini"],
    "messages": [{"role": "system", "content": "You are repo-guide."}, {"role": "user", "content": "{}"}],
    "tools": [{"name": "file_ops", "description": "Reads and changes files.", "input_schema": {"type": "object"}}],
    "active_skills": [], "policy": {}, "limits": {}, "budget": {}, "warnings": []
}))]
#[expect(clippy::struct_field_names, reason = "the names are those of the API")]
pub(crate) struct DryRun {
    /// Always true.
    dry_run: bool,
    /// The agent.
    agent: String,
    /// Its version.
    agent_version: String,
    /// The models that are asked, in this order, as `provider/model`.
    models: Vec<String>,
    /// What the first model call would say.
    messages: Vec<Message>,
    /// What the model would be offered.
    tools: Vec<DryRunTool>,
    /// Skills that are active from the start.
    active_skills: Vec<String>,
    /// What would hold.
    policy: DryRunPolicy,
    /// Limits of the loop.
    limits: Limits,
    /// Consumption caps.
    budget: Budget,
    /// What the caller should know.
    warnings: Vec<String>,
}

/// A tool that the model would be offered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRunTool)]
pub(crate) struct DryRunTool {
    /// Its name.
    #[schema(example = "file_ops")]
    name: String,
    /// What the model reads of it.
    description: String,
    /// JSON Schema 2020-12 of the arguments.
    input_schema: Value,
}

/// What would hold for the run.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRunPolicy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub(crate) struct DryRunPolicy {
    /// Whether there would be exactly one model call.
    single_shot: bool,
    /// When the model must call a tool.
    tool_choice: ToolChoicePolicy,
    /// Whether an answer that does not keep to it fails the attempt.
    strict_tool_choice: bool,
    /// What becomes of the run at a limit.
    on_limit: OnLimit,
    /// Whether the first failing call ends the run.
    throw_on_tool_failure: bool,
    /// Whether the calls after a blocked one are not executed.
    stop_on_tool_block: bool,
    /// What tools may do.
    governance: GovernanceSection,
}

impl From<Rehearsal> for DryRun {
    fn from(rehearsal: Rehearsal) -> Self {
        let Rehearsal { agent, models, conversation, tools, active_skills, policy, warnings } =
            rehearsal;
        let definition = &agent.definition;
        let tool = |(name, description, schema): (String, String, std::sync::Arc<Value>)| {
            DryRunTool { name, description, input_schema: Value::clone(&schema) }
        };
        let governance =
            GovernanceSection { budget: policy.budget.clone(), ..definition.governance.clone() };
        Self {
            dry_run: true,
            agent: definition.name.clone(),
            agent_version: definition.version.clone(),
            models,
            messages: messages(&conversation),
            tools: tools.into_iter().map(tool).collect(),
            active_skills,
            policy: DryRunPolicy {
                single_shot: policy.single_shot,
                tool_choice: policy.tool_choice,
                strict_tool_choice: policy.strict_tool_choice,
                on_limit: policy.on_limit,
                throw_on_tool_failure: policy.throw_on_tool_failure,
                stop_on_tool_block: policy.stop_on_tool_block,
                governance,
            },
            limits: policy.limits,
            budget: policy.budget,
            warnings,
        }
    }
}
