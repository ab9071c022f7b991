//! What a structured output must satisfy beyond its schema, and how the model sees it before it is
//! judged.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A CEL expression that an output must make true.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentOutputRule)]
#[serde(deny_unknown_fields)]
pub struct OutputRule {
    /// Over `output` and `inputs`; true where the output is acceptable.
    #[schemars(length(min = 1, max = 4096))]
    pub rule: String,
    /// Message to the model if the rule is violated.
    #[schemars(length(min = 1, max = 4096))]
    pub message: String,
    /// Outputs that the rule must accept; checked when the definition is loaded.
    #[serde(default, rename = "match", skip_serializing_if = "Vec::is_empty")]
    pub matches: Vec<Value>,
    /// Outputs that it must not accept.
    #[serde(default, rename = "no_match", skip_serializing_if = "Vec::is_empty")]
    pub no_matches: Vec<Value>,
}

/// An HTTP endpoint that judges outputs: `{output, inputs, run_id}` in, `{valid, errors[]}` out.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentValidator)]
#[serde(deny_unknown_fields)]
pub struct ValidatorSection {
    /// `http://` or `https://`; redirects are not followed.
    #[schemars(regex(pattern = "^https?://"))]
    pub url: String,
    /// 1 to 600.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 600))]
    pub timeout_seconds: u64,
}

/// Shows the model what its output looks like: a template, or an HTTP endpoint, and never both.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentReflection)]
#[schemars(extend("oneOf" = [{"required": ["template"]}, {"required": ["url"]}]))]
#[serde(default, deny_unknown_fields)]
pub struct Reflection {
    /// Template over `output` and `inputs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub template: Option<String>,
    /// `http://` or `https://`: `{output, inputs, run_id}` in, text or `{content}` out; redirects
    /// are not followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = "^https?://"))]
    pub url: Option<String>,
    /// How long the endpoint may take; 1 to 600.
    #[serde(default = "default_timeout")]
    #[schemars(range(min = 1, max = 600))]
    pub timeout_seconds: u64,
    /// The tool by which the model ends the attempt.
    #[schema(required)]
    pub submit: SubmitTool,
}

/// Name and description of the submit tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentSubmitTool)]
#[serde(default, deny_unknown_fields)]
pub struct SubmitTool {
    /// Default `submit`.
    #[schemars(regex(pattern = "^[A-Za-z0-9_-]{1,64}$"))]
    pub name: String,
    /// For the model.
    pub description: String,
}

impl Default for SubmitTool {
    fn default() -> Self {
        Self {
            name: "submit".into(),
            description: "Submit your final output for validation. Call this when you are satisfied with your output."
                .into(),
        }
    }
}

fn default_timeout() -> u64 {
    10
}
