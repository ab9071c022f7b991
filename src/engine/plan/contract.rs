//! What an acceptable output is, and whether the model's choice of tools can ever lead to one.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{PlanError, refused};
use crate::agents::Definition;
use crate::bounds::text::quoted;
use crate::message::tool_schema::ToolSchema;
use crate::providers::ToolOffer;
use crate::run::{Overrides, RunKind, ToolChoicePolicy};

/// What an acceptable output is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Contract {
    /// Any text.
    Text {
        /// Whether the model is asked to verify its first text answer.
        confirm: bool,
    },
    /// What the output tool's schema accepts.
    Structured {
        /// Our name of the output tool.
        tool: String,
        /// Our name of the submit tool, where proposals are reflected before they are submitted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        submit: Option<String>,
        /// What an output is checked against, in words.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        checks: Vec<String>,
    },
}

impl Contract {
    /// Whether calls of this tool end an attempt.
    pub(super) fn is_met_by(&self, tool: &str) -> bool {
        match self {
            Self::Text { .. } => false,
            Self::Structured { tool: output, submit, .. } => {
                output == tool || submit.as_deref() == Some(tool)
            }
        }
    }
}

/// What an acceptable output is; its tools are offered behind the agent's.
pub(super) fn contract(
    definition: &Definition,
    overrides: &Overrides,
    kind: RunKind,
    offers: &mut Vec<ToolOffer>,
) -> Contract {
    let (single, has_tools) = (kind == RunKind::Single, !offers.is_empty());
    match definition.output.as_ref().filter(|_| kind != RunKind::Call) {
        None => Contract::Text {
            confirm: has_tools
                && kind != RunKind::Call
                && overrides
                    .enable_double_confirmation
                    .unwrap_or(definition.enable_double_confirmation),
        },
        Some(output) => {
            if !single {
                offers.push(ToolOffer {
                    name: output.tool.name.clone(),
                    description: output.tool.description.clone(),
                    input_schema: Arc::clone(&output.schema).into(),
                });
            }
            let submit =
                output.reflection.as_ref().filter(|_| !single).map(|reflection| &reflection.submit);
            if let Some(submit) = submit {
                offers.push(ToolOffer {
                    name: submit.name.clone(),
                    description: submit.description.clone(),
                    input_schema: ToolSchema::from(
                        json!({"type": "object", "properties": {}, "additionalProperties": false}),
                    ),
                });
            }
            Contract::Structured {
                tool: output.tool.name.clone(),
                submit: submit.map(|submit| submit.name.clone()),
                checks: output.checks(),
            }
        }
    }
}

/// When the model must call a tool; refused where no attempt could ever end.
pub(super) fn tool_choice(
    overrides: &Overrides,
    defined: &ToolChoicePolicy,
    contract: &Contract,
    offers: &[ToolOffer],
    kind: RunKind,
    single_shot: bool,
) -> Result<ToolChoicePolicy, PlanError> {
    if kind == RunKind::Call || (single_shot && overrides.tool_choice.is_none()) {
        return Ok(ToolChoicePolicy::Auto);
    }
    let choice = overrides.tool_choice.as_ref().unwrap_or(defined);
    let problem = match (choice, contract) {
        (ToolChoicePolicy::Required, Contract::Text { .. }) => {
            "tool_choice required needs an output section in the definition: the text answer, which alone \
             could end the run, would be forbidden; use first_required"
        }
        (ToolChoicePolicy::None, Contract::Structured { .. }) => {
            "tool_choice none needs a definition without an output section: the call of the output tool, \
             which alone could end the run, would be forbidden"
        }
        (ToolChoicePolicy::Tool(name), _) if !offers.iter().any(|offer| offer.name == *name) => {
            return Err(refused(
                "/tool_choice",
                format!("tool_choice names {}, which is not offered", quoted(name)),
            ));
        }
        _ if single_shot => return Ok(ToolChoicePolicy::Auto),
        _ => return Ok(choice.clone()),
    };
    Err(refused("/tool_choice", problem))
}
