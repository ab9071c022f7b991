//! `dry_run`: the prompt, tools and limits that a run would have, without starting it.
//!
//! A dry run is rejected for the same reasons, and with the same errors, as a run.

use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::redaction;
use super::run_parts::{Message, messages};
use crate::agents::definition::GovernanceSection;
use crate::run::{Budget, Limits, OnLimit, ToolChoicePolicy};
use crate::runtime::DryRunOutcome;

/// The prompt, tools and limits that a run would have. No run was started and no model called.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRun, example = json!({
    "dry_run": true, "agent": "repo-guide", "agent_version": "1.2.0", "models": ["openai/gpt-4.1-mini"],
    "messages": [{"role": "system", "content": "You are repo-guide."}, {"role": "user", "content": "{}"}],
    "tools": [{"name": "file_ops", "description": "Reads and changes files.", "input_schema": {"type": "object"}}],
    "active_skills": [], "warnings": []
}))]
#[expect(clippy::struct_field_names, reason = "the names are those of the API")]
pub(crate) struct DryRun {
    /// Always true.
    dry_run: bool,
    /// The agent's name.
    agent: String,
    /// The version of the agent's definition.
    agent_version: String,
    /// The agent's model and then its fallbacks, as `provider/model`.
    models: Vec<String>,
    /// The messages of the first model call; only for keys with `agents:read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    messages: Option<Vec<Message>>,
    /// The tools that the model would be offered.
    tools: Vec<DryRunTool>,
    /// The skills that are active from the start.
    active_skills: Vec<String>,
    /// The settings and policies of the run.
    policy: DryRunPolicy,
    /// Limits of the loop.
    limits: Limits,
    /// Limits on consumption.
    budget: Budget,
    /// Problems that would not prevent the run.
    warnings: Vec<String>,
}

/// A tool that the model would be offered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRunTool)]
pub(crate) struct DryRunTool {
    /// The tool's name.
    #[schema(example = "file_ops")]
    name: String,
    /// The description that the model would get.
    description: String,
    /// The JSON Schema (2020-12) of the arguments.
    input_schema: Value,
}

/// The settings and policies of a run.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DryRunPolicy)]
#[expect(clippy::struct_excessive_bools, reason = "each is a setting of its own")]
pub(crate) struct DryRunPolicy {
    /// Whether the run would be a single model call.
    single_shot: bool,
    /// Whether, and when, the model must call a tool.
    tool_choice: ToolChoicePolicy,
    /// Whether a response that ignores `tool_choice` fails the attempt.
    strict_tool_choice: bool,
    /// How the run ends at a limit.
    on_limit: OnLimit,
    /// Whether the first failed tool call ends the run.
    throw_on_tool_failure: bool,
    /// Whether calls after a blocked one in the same response are skipped.
    stop_on_tool_block: bool,
    /// What the agent's tools may do; only for keys with `agents:read`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = GovernanceSection, nullable = false)]
    governance: Option<Value>,
}

impl DryRun {
    /// Without the parts that come from the agent's definition.
    pub(crate) fn without_definition(mut self) -> Self {
        (self.messages, self.policy.governance) = (None, None);
        self
    }
}

impl From<DryRunOutcome> for DryRun {
    fn from(dry_run: DryRunOutcome) -> Self {
        let DryRunOutcome { agent, models, conversation, tools, active_skills, policy, warnings } =
            dry_run;
        let definition = &agent.definition;
        let governance = GovernanceSection {
            budget: policy.budget.clone().shown(),
            flow: Some(definition.governance.flow_rules()),
            ..definition.governance.clone()
        };
        Self {
            dry_run: true,
            agent: definition.name.clone(),
            agent_version: definition.version.clone(),
            models,
            messages: Some(messages(&conversation)),
            tools: tools
                .into_iter()
                .map(|tool| DryRunTool {
                    name: tool.name,
                    description: redaction::text(tool.description),
                    input_schema: redaction::described(Value::clone(&tool.input_schema)),
                })
                .collect(),
            active_skills,
            policy: DryRunPolicy {
                single_shot: policy.single_shot,
                tool_choice: policy.tool_choice,
                strict_tool_choice: policy.strict_tool_choice,
                on_limit: policy.on_limit,
                throw_on_tool_failure: policy.throw_on_tool_failure,
                stop_on_tool_block: policy.stop_on_tool_block,
                governance: Some(redaction::output(json!(governance))),
            },
            limits: policy.limits,
            budget: policy.budget.shown(),
            warnings,
        }
    }
}
