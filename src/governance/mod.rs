//! What a tool call may do: actions in, one decision out.
//!
//! The gate knows no tool. A tool turns its validated arguments into [`Action`]s; every rule judges
//! them; the strictest decision wins and a rule that cannot decide blocks. Rules are functions in
//! one ordered list, one file each. The gate does no I/O and executes nothing; what it lets pass
//! gets a [`Permit`], which nothing else can make and without which no tool executes.

mod autonomy;
mod gate;
mod path;
mod scope;
mod skill;
mod tool_policy;

use crate::event::SkillActivated;
use crate::run::{Autonomy, Consumption, Effect};

pub use gate::{Call, Gate, Permit, PolicyError, Verdict};

/// Whether a skill leaves a tool to be called.
pub fn skill_allows(skill: &SkillActivated, tool: &str) -> bool {
    skill::allows(skill, tool)
}

/// One thing that a tool call would do, with paths relative to the run's workspace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Action {
    /// What.
    pub what: ActionKind,
    /// What it does to the world.
    pub effect: Effect,
    /// Whether something that exists would be lost.
    pub destructive: bool,
    /// Lines that it would write or replace.
    pub lines: u64,
    /// Directories that come about besides, on the way to its path.
    pub makes: Vec<String>,
}

/// The kinds of actions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ActionKind {
    /// Reads a file or lists a directory, at the normalised path beneath the workspace.
    Read(String),
    /// Writes, creates, moves or deletes at the normalised path beneath the workspace.
    Write(String),
    /// Calls something that only has a name.
    Call(String),
    /// Has another agent do something; whatever that does is judged in its own run.
    Delegate(String),
}

/// What actions take of a run's budget.
pub fn consumption(actions: &[Action]) -> Consumption {
    let mut consumed = Consumption::default();
    for Action { what, lines, makes, .. } in actions {
        match what {
            ActionKind::Read(_) => consumed.files_read += 1,
            ActionKind::Write(path) => {
                consumed.files_written += 1 + makes.len() as u64;
                consumed.files_modified.extend(makes.iter().cloned());
                consumed.lines_changed += lines;
                consumed.files_modified.insert(path.clone());
            }
            ActionKind::Call(_) | ActionKind::Delegate(_) => {}
        }
    }
    consumed
}

/// How a definition treats a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolPolicy {
    /// Other rules decide.
    Allow,
    /// Needs approval.
    Ask,
    /// Never.
    Deny,
}

/// The operator's rules, from a definition.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Policy {
    /// Globs on tool names; the strictest match wins.
    pub tool_policies: Vec<(String, ToolPolicy)>,
    /// How much may be done unasked.
    pub autonomy: Autonomy,
    /// Globs of paths that may be read.
    pub read: Vec<String>,
    /// Globs of paths that may be written.
    pub write: Vec<String>,
    /// Globs of paths that may be neither.
    pub deny: Vec<String>,
}

/// A decision, from the mildest to the strictest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Decision {
    /// Go on.
    Allowed,
    /// Go on; the reason is recorded.
    Warned,
    /// Somebody must approve.
    Escalated,
    /// No.
    Blocked,
}

impl Decision {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Warned => "warned",
            Self::Escalated => "escalated",
            Self::Blocked => "blocked",
        }
    }
}

#[cfg(test)]
mod gate_tests;
