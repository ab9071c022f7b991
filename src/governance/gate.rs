//! The gate: every rule judges a call, the strictest decision wins, and what passes gets a permit.
//!
//! The order of [`RULES`] decides whose reason is told where two rules are equally strict, and
//! nothing else. A new rule is one file with a `judge` function and one line in the list. A gate is
//! made once for an agent definition, with every glob compiled, and is shared by all runs of it.
//!
//! It does not look at the world: what a call would do is told by its actions.

use std::sync::Arc;

use super::path::PathRules;
use super::tool_policy::ToolPolicies;
use super::{Action, Decision, Policy, autonomy, path, scope, skill, tool_policy};
use crate::event::SkillActivated;
use crate::run::{Autonomy, Effect};

/// The checks, in order.
const RULES: [(&str, Rule); 5] = [
    ("tool_policy", tool_policy::judge),
    ("autonomy", autonomy::judge),
    ("scope", scope::judge),
    ("skill", skill::judge),
    ("path", path::judge),
];

type Rule = fn(&Question<'_>) -> Ruling;

/// What a rule is asked.
pub(super) struct Question<'a> {
    pub(super) policy: &'a CompiledPolicy,
    /// The scopes that the run was started with.
    pub(super) scopes: &'a [String],
    pub(super) call: &'a Call<'a>,
}

/// What a rule says to a call.
pub(super) enum Ruling {
    /// It has nothing against it.
    NoObjection,
    /// It has something against it: a clause that a person can decide on where it escalates, and
    /// that a model can act on where it blocks. The gate puts the decision and the rule's name
    /// before it.
    Objection(Decision, String),
    /// It cannot decide, for this reason. That denies.
    Undecided(String),
}

/// A policy with its globs compiled.
pub(super) struct CompiledPolicy {
    pub(super) tools: ToolPolicies,
    pub(super) autonomy: Autonomy,
    pub(super) paths: Arc<PathRules>,
}

/// A pattern of a policy that means nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: the pattern {pattern:?} {message}")]
pub struct PolicyError {
    /// Where it stands, e.g. `paths.read`.
    pub setting: &'static str,
    /// The pattern.
    pub pattern: String,
    /// What is wrong with it.
    pub message: String,
}

/// A tool call as the gate sees it.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    /// The tool's name.
    pub tool: &'a str,
    /// The strongest effect that a call of the tool can have; judged where it declares no action.
    pub effect: Effect,
    /// All that this call would do.
    pub actions: Vec<Action>,
    /// Who approved it, where a decision was asked for: nothing needs another approval then.
    pub approved_by: Option<&'a str>,
    /// The skills that are active in its run.
    pub skills: &'a [SkillActivated],
}

/// What the gate says to a call.
#[derive(Debug)]
pub enum Verdict {
    /// It may be executed.
    Pass {
        /// Without which no tool executes.
        permit: Permit,
        /// [`Decision::Allowed`] or [`Decision::Warned`]; [`Decision::Escalated`] where somebody
        /// approved.
        decision: Decision,
        /// The rule that warned or asked, else `none`.
        rule: &'static str,
        /// The warning, or what was asked for and who approved.
        reason: Option<String>,
    },
    /// It may not.
    Stop {
        /// [`Decision::Escalated`] or [`Decision::Blocked`].
        decision: Decision,
        /// The rule that objected.
        rule: &'static str,
        /// A sentence that names the rule, for the audit log, and for the person who decides or the
        /// model that was refused.
        reason: String,
    },
}

/// Proof that the gate let these actions pass. Only the gate makes one; `Tool::execute` consumes
/// it. A call that is repeated because it failed is the same call.
#[derive(Debug, Clone)]
pub struct Permit {
    actions: Vec<Action>,
    paths: Arc<PathRules>,
}

impl Permit {
    /// What was permitted, and nothing more.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Whether losing what exists was permitted.
    pub fn allows_destruction(&self) -> bool {
        self.actions.iter().any(|a| a.destructive)
    }

    /// Whether a file that the execution comes upon, e.g. while it searches a permitted directory,
    /// may be shown.
    pub fn may_read(&self, path: &str) -> bool {
        self.paths.may_read(path)
    }

    /// Whether a directory that the execution comes upon may be looked into.
    pub fn may_enter(&self, path: &str) -> bool {
        self.paths.denied_by(path).is_none()
    }
}

/// The one place where calls are let through.
pub struct Gate {
    policy: CompiledPolicy,
}

impl Gate {
    /// Compiles a policy.
    ///
    /// # Errors
    /// The first pattern that is no glob, or that can never match a path of a workspace.
    pub fn new(policy: &Policy) -> Result<Self, PolicyError> {
        let tools = ToolPolicies::new(&policy.tool_policies)?;
        let paths = Arc::new(PathRules::new(&policy.read, &policy.write, &policy.deny)?);
        Ok(Self { policy: CompiledPolicy { tools, autonomy: policy.autonomy, paths } })
    }

    /// Lets a call of a run with these scopes pass, or stops it.
    pub fn judge(&self, scopes: &[String], call: Call<'_>) -> Verdict {
        let question = Question { policy: &self.policy, scopes, call: &call };
        let mut strictest: Option<(Decision, &'static str, String)> = None;
        for (name, rule) in RULES {
            let (decision, reason) = match rule(&question) {
                Ruling::NoObjection => continue,
                Ruling::Objection(decision, reason) => (decision, reason),
                Ruling::Undecided(why) => (Decision::Blocked, format!("it cannot decide: {why}")),
            };
            if strictest.as_ref().is_none_or(|(so_far, ..)| *so_far < decision) {
                strictest = Some((decision, name, reason));
            }
        }
        let approved_by = call.approved_by;
        let permit = Permit { actions: call.actions, paths: Arc::clone(&self.policy.paths) };
        let Some((decision, rule, reason)) = strictest else {
            return Verdict::Pass {
                permit,
                decision: Decision::Allowed,
                rule: "none",
                reason: None,
            };
        };
        match decision {
            Decision::Allowed => Verdict::Pass { permit, decision, rule, reason: None },
            Decision::Warned => Verdict::Pass { permit, decision, rule, reason: Some(reason) },
            Decision::Escalated => {
                let asks = format!("The {rule} rule asks for an approval: {reason}.");
                match approved_by {
                    Some(by) => Verdict::Pass {
                        permit,
                        decision,
                        rule,
                        reason: Some(format!("{asks} Approved by {by}.")),
                    },
                    None => Verdict::Stop { decision, rule, reason: asks },
                }
            }
            Decision::Blocked => Verdict::Stop {
                decision,
                rule,
                reason: format!("Blocked by the {rule} rule: {reason}."),
            },
        }
    }
}
