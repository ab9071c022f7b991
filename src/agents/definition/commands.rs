//! Which programs an agent's tool `shell` may run.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::run::{Effect, GovernanceMode};

/// Rules about programs; without one in `allow` or `require_approval` nothing runs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentCommands)]
#[serde(default, deny_unknown_fields)]
pub struct CommandsSection {
    /// Commands that may run.
    #[schemars(length(max = 200))]
    pub allow: Vec<CommandRule>,
    /// Commands that may never run; takes precedence.
    #[schemars(length(max = 200))]
    pub deny: Vec<CommandRule>,
    /// Commands that may run after approval.
    #[schemars(length(max = 200))]
    pub require_approval: Vec<CommandRule>,
}

/// One program, with the arguments that the rule is about.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema, JsonSchema)]
#[schema(as = AgentCommandRule)]
#[serde(deny_unknown_fields)]
pub struct CommandRule {
    /// The program's name, or its absolute path.
    #[schemars(regex(pattern = r"^[^\s/][^\s/]*$|^/\S+$"), length(max = 256))]
    pub command: String,
    /// Regular expression that is looked for in the arguments, joined by spaces, those with spaces
    /// in quotes; absent: any arguments. A program that runs others needs it, and so does an option
    /// that makes a program write or run something, which it has to name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 4096))]
    pub args: Option<String>,
    /// What running it does; default `once`. A command that only reads can change no file.
    #[serde(default = "once", skip_serializing_if = "is_once")]
    pub effect: Effect,
    /// Whether it may destroy data.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub destructive: bool,
    /// With `observe`, in `deny` and `require_approval`: the command is executed as `warned`, and the decision that would
    /// have been enforced is recorded.
    #[serde(default, skip_serializing_if = "GovernanceMode::is_enforce")]
    pub mode: GovernanceMode,
    /// Command lines that the rule is about; checked when the definition is loaded.
    #[serde(default, rename = "match", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub matches: Vec<String>,
    /// Command lines that the rule does not match; checked when the definition is loaded.
    #[serde(default, rename = "no_match", skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 100))]
    pub no_matches: Vec<String>,
}

fn once() -> Effect {
    Effect::Once
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_once(effect: &Effect) -> bool {
    *effect == Effect::Once
}
