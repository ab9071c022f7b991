//! Governance of tool calls: actions in, one decision out.
//!
//! The gate knows no tool. A tool turns its validated arguments into [`Action`]s; every rule judges
//! them; the strictest decision wins and a rule that cannot decide blocks. Rules are functions in
//! one ordered list, one file each. The gate does no I/O and executes nothing; a call that passes
//! gets a [`Permit`], which only the gate creates and every tool requires.

mod allowance;
mod autonomy;
mod command;
mod flow;
mod gate;
pub mod injection;
mod network;
mod path;
mod scope;
mod skill;
mod tool_policy;

use crate::event::SkillActivated;
use crate::run::{Autonomy, Effect, FlowRule};
use strum::IntoStaticStr;

pub use crate::run::{Action, ActionKind};
pub use allowance::Allowance;
pub use command::{CommandEffect, CommandRules};
pub use flow::{FLOW, mistake_of_rule};
pub use gate::{Call, Gate, LaterRuling, Objection, Permit, PolicyError, Verdict, is_rule};
pub use path::{WholePaths, path_relative_to};

/// Whether an active skill allows a tool.
pub fn skill_allows(skill: &SkillActivated, tool: &str) -> bool {
    skill::allows(skill, tool)
}

/// How a definition treats a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolPolicy {
    /// The other rules decide.
    Allow,
    Ask,
    Deny,
}

/// The operator's rules, from a definition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Globs on tool names; the strictest match wins.
    pub tool_policies: Vec<ToolRule>,
    pub autonomy: Autonomy,
    /// A second autonomy, whose decisions are only recorded.
    pub observed_autonomy: Option<Autonomy>,
    /// Whether calls that would be blocked or need an approval pass with a warning.
    pub observes: bool,
    /// Globs of paths that may be read.
    pub read: Vec<String>,
    /// Globs of paths that may be written.
    pub write: Vec<String>,
    /// Globs of paths that may be neither read nor written.
    pub deny: Vec<String>,
    /// Globs that only record a warning instead of denying.
    pub deny_observed: Vec<String>,
    /// Deny globs relative to other directories of the tenant.
    pub deny_in: Vec<(String, Vec<String>)>,
    /// The same for globs that only record a warning.
    pub deny_in_observed: Vec<(String, Vec<String>)>,
    /// Hosts that may be contacted, in addition to those of the operator.
    pub allow_hosts: Vec<String>,
    /// Hosts that may not be contacted.
    pub deny_hosts: Vec<String>,
    /// Hosts whose contact is only recorded with a warning.
    pub deny_hosts_observed: Vec<String>,
    /// Networks that may be connected to although they are not public.
    pub allow_private: Vec<String>,
    /// Names of the secrets that are added to requests of programs.
    pub credentials: Vec<String>,
    /// Globs of paths whose content is private.
    pub private: Vec<String>,
    /// Globs of private paths relative to other directories of the tenant.
    pub private_in: Vec<(String, Vec<String>)>,
    /// Rules over the labels of what the run has read.
    pub flow: Vec<FlowRule>,
    pub commands: Commands,
}

/// How tools are treated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolRule {
    /// Glob on tool names.
    pub tools: String,
    pub policy: ToolPolicy,
    /// Whether calls are executed all the same, with a warning.
    pub observes: bool,
}

/// Which programs may run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Commands {
    pub allow: Vec<CommandRule>,
    pub deny: Vec<CommandRule>,
    /// May run if a person approves.
    pub require_approval: Vec<CommandRule>,
}

/// A program, and the arguments that the rule is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CommandRule {
    /// Its name, or its absolute path.
    pub command: String,
    /// Regular expression that is looked for in the arguments; absent: any.
    pub args: Option<String>,
    pub effect: Effect,
    pub destructive: bool,
    /// Whether the rule only records a warning instead of its decision.
    pub observes: bool,
}

/// A decision of the gate, from the mildest to the strictest.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, IntoStaticStr, serde::Deserialize,
)]
#[strum(serialize_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum Decision {
    Allowed,
    /// The call is executed and the reason recorded.
    Warned,
    /// The call needs approval.
    Escalated,
    Blocked,
}

impl Decision {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

#[cfg(test)]
mod flow_tests;
#[cfg(test)]
mod gate_tests;
