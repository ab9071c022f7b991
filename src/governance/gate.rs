//! The gate: every rule judges a call, the strictest decision wins, and what passes gets a permit.
//!
//! The order of [`RULES`] only decides which reason is reported when two rules are equally strict.
//! A new rule is one file with a `judge` function and one line in the list. There is one gate per
//! agent definition, with every glob compiled, shared by all its runs.
//!
//! No I/O: the actions of a call describe what it would do.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::allowance::{self, Allowance};
use super::command::CommandRules;
use super::flow::FlowRules;
use super::network::NetworkRules;
use super::path::{PathRules, WholePaths};
use super::tool_policy::ToolPolicies;
use super::{
    Action, ActionKind, Decision, Policy, autonomy, command, flow, network, path, scope, skill,
    tool_policy,
};
use url::Url;

use crate::bounds::address::Network;
use crate::event::SkillActivated;
use crate::run::{Autonomy, Effect, Labels, Target};

/// The checks, in order.
const RULES: [(&str, Rule); 8] = [
    ("tool_policy", tool_policy::judge),
    ("autonomy", autonomy::judge),
    ("scope", scope::judge),
    ("skill", skill::judge),
    ("command", command::judge),
    ("path", path::judge),
    ("network", network::judge),
    ("flow", flow::judge),
];

/// The checks that judge a file which a permitted call would create.
const OF_FILES: [&str; 2] = ["path", "flow"];

/// Whether a check has this name.
pub fn is_rule(name: &str) -> bool {
    RULES.iter().any(|(rule, _)| *rule == name)
}

type Rule = fn(&Question<'_>) -> Ruling;

/// The input of a rule.
pub(super) struct Question<'a> {
    pub(super) policy: &'a CompiledPolicy,
    /// The scopes that the run was started with.
    pub(super) scopes: &'a [String],
    pub(super) call: &'a Call<'a>,
}

/// A rule's judgement of a call.
pub(super) enum Ruling {
    NoObjection,
    /// A decision with its reason. The reason is a clause that lets a person decide if the call is escalated, and a
    /// model react if it is blocked. The gate adds the decision and the name of the rule.
    Objection(Decision, String),
    /// A decision with its reason and the matching pattern of the definition.
    Matched(Decision, String, String),
    /// What a rule that only observes would have decided.
    Observed(Decision, String, Option<String>),
    /// The rule cannot decide, for this reason, because of a pattern of the definition if there is
    /// one; the call is blocked.
    Undecided(String, Option<String>),
}

/// The name of the deciding rule, its reason, and the matching pattern.
type RuleDecision = (&'static str, String, Option<String>);

/// A policy with its globs compiled.
pub(super) struct CompiledPolicy {
    pub(super) tools: ToolPolicies,
    pub(super) autonomy: Autonomy,
    pub(super) observed_autonomy: Option<Autonomy>,
    pub(super) observes: bool,
    pub(super) commands: Arc<CommandRules>,
    pub(super) paths: Arc<PathRules>,
    pub(super) network: Arc<NetworkRules>,
    pub(super) flow: FlowRules,
}

impl std::fmt::Debug for CompiledPolicy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompiledPolicy").field("autonomy", &self.autonomy).finish_non_exhaustive()
    }
}

impl CompiledPolicy {
    /// The enforced decision: a warning instead of an objection if the policy only observes. The
    /// caller's scopes are enforced all the same, and so is a command without any list of commands.
    fn enforced(&self, rule: &str, decision: Decision, reason: String) -> (Decision, String) {
        let would = match decision {
            Decision::Blocked => "block this call",
            Decision::Escalated => "ask for an approval",
            Decision::Allowed | Decision::Warned => return (decision, reason),
        };
        let runs_anything = rule == "command" && self.commands.are_none();
        if !self.observes || rule == "scope" || runs_anything {
            return (decision, reason);
        }
        (Decision::Warned, format!("The {rule} rule would {would}: {reason}."))
    }
}

/// An invalid pattern of a policy.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{setting}: the pattern {pattern:?} {message}")]
pub struct PolicyError {
    /// The setting that holds it, e.g. `paths.read`.
    pub setting: &'static str,
    pub pattern: String,
    pub message: String,
}

impl Objection {
    /// The same error with a further sentence in its message.
    #[must_use]
    pub fn with(mut self, more: Option<String>) -> Self {
        if let Some(more) = more {
            self.reason = format!("{} {more}", self.reason);
        }
        self
    }
}

/// A tool call as the gate sees it.
#[derive(Debug, Clone)]
pub struct Call<'a> {
    pub tool: &'a str,
    /// The strongest effect that the tool can have; judged if the call declares no action.
    pub effect: Effect,
    /// Nothing is declared of what the tool does, and the worst is assumed.
    pub is_undeclared: bool,
    pub actions: Arc<[Action]>,
    /// Who approved an escalated call: it needs no further approval.
    pub approved_by: Option<&'a str>,
    /// What the run has read.
    pub labels: Labels,
    /// The active skills of the run.
    pub skills: &'a [SkillActivated],
    /// The run's workspace, relative to its tenant's directory.
    pub directory: Arc<str>,
}

#[derive(Debug)]
pub enum Verdict {
    Pass {
        permit: Permit,
        /// [`Decision::Allowed`] or [`Decision::Warned`]; [`Decision::Escalated`] if it was
        /// approved.
        decision: Decision,
        /// The rule that warned or escalated, else `none`.
        rule: &'static str,
        /// The pattern of that rule which decided, if it was one.
        pattern: Option<String>,
        /// The warning, or the reason of the escalation and who approved.
        reason: Option<String>,
        /// The entry that allows the call, if no rule objected and a list names it.
        allowance: Option<Allowance>,
    },
    Stop(Objection),
}

/// Why a call does not pass, at least not now.
#[derive(Debug, Clone)]
pub struct Objection {
    /// [`Decision::Escalated`] or [`Decision::Blocked`].
    pub decision: Decision,
    /// The rule that objected.
    pub rule: &'static str,
    /// The pattern of that rule which decided, if it was one.
    pub pattern: Option<String>,
    /// A sentence that names the rule, for the audit log, and for the person who decides or the
    /// model that was refused.
    pub reason: String,
}

/// Proof that the gate permitted these actions. Only the gate creates one; `Tool::execute` consumes
/// it. A retry of a failed call uses the same permit.
#[derive(Debug, Clone)]
pub struct Permit {
    actions: Arc<[Action]>,
    paths: Arc<PathRules>,
    network: Arc<NetworkRules>,
    directory: Arc<str>,
    /// Whether the tool was shown a private file that it found.
    has_shown_private: Arc<AtomicBool>,
    policy: Arc<CompiledPolicy>,
    tool: Arc<str>,
    labels: Labels,
}

/// The decision on something that follows from a permitted call: a request or a file.
#[derive(Debug)]
pub struct LaterRuling {
    pub decision: Decision,
    /// The rule that decided.
    pub rule: &'static str,
    pub pattern: Option<String>,
    pub reason: Option<String>,
}

impl Permit {
    /// The permitted actions.
    pub fn actions(&self) -> &[Action] {
        &self.actions
    }

    /// Whether a destructive action was permitted.
    pub fn allows_destruction(&self) -> bool {
        self.actions.iter().any(|a| a.destructive)
    }

    /// Whether the tool may show a file that it finds, e.g. while it searches a permitted
    /// directory.
    pub fn may_read(&self, path: &str) -> bool {
        let may = self.paths.may_read(&self.directory, path);
        if may && self.paths.is_private(&self.directory, path) {
            self.has_shown_private.store(true, Ordering::Relaxed);
        }
        may
    }

    /// Whether the call reads private files: a path that it names, or one that it found.
    pub fn reads_private(&self) -> bool {
        let is_private = |action: &Action| match &action.what {
            ActionKind::Read { path } | ActionKind::Write { path } => {
                self.paths.is_private(&self.directory, path)
            }
            _ => false,
        };
        self.has_shown_private.load(Ordering::Relaxed) || self.actions.iter().any(is_private)
    }

    /// Whether the tool may write a file that it finds.
    pub fn may_write(&self, path: &str) -> bool {
        self.paths.may_write(&self.directory, path)
    }

    /// Directories and files that may be read as a whole. There may be private files in them.
    pub fn readable(&self) -> WholePaths {
        if self.paths.has_private() {
            self.has_shown_private.store(true, Ordering::Relaxed);
        }
        self.paths.readable()
    }

    /// Directories and files that may be written as a whole.
    pub fn writable(&self) -> WholePaths {
        self.paths.writable()
    }

    /// Directories and files that may be neither read nor written.
    pub fn denied(&self) -> WholePaths {
        self.paths.denied()
    }

    /// The deny rules as text: two permits with equal texts deny the same paths of one directory.
    pub fn denied_as_written(&self) -> String {
        self.paths.denied_as_written(&self.directory)
    }

    /// Whether the tool may enter a directory that it finds.
    pub fn may_enter(&self, path: &str) -> bool {
        self.paths.denied_by(&self.directory, path).is_none()
    }

    /// Whether the tool may see an entry of a directory that it may enter.
    pub fn may_visit(&self, path: &str) -> bool {
        // A directory above the workspace may be the one that is denied.
        let is_first = !path.contains('/');
        if is_first {
            self.may_enter(path)
        } else {
            !self.paths.denies_itself(&self.directory, path)
        }
    }

    /// Why a request that follows from a permitted one, e.g. by a redirect, is refused.
    pub fn objection_to(&self, target: &Target) -> Option<String> {
        if self.network.observes { None } else { self.network.objection(target) }
    }

    /// The decision on a request of a program that the call has started.
    pub fn ruling_on(&self, target: &Target) -> LaterRuling {
        let (decision, reason, pattern) = match self.network.objection_with_entry(target) {
            None => match self.network.observed_objection(target) {
                None => (Decision::Allowed, None, self.network.allowed_by(target)),
                Some((why, entry)) => (Decision::Warned, Some(why), Some(entry)),
            },
            Some((why, entry)) if self.network.observes => (Decision::Warned, Some(why), entry),
            Some((why, entry)) => (Decision::Blocked, Some(why), entry),
        };
        LaterRuling { decision, rule: "network", pattern, reason }
    }

    /// The decision on a file that the call would create, and that was unknown when the call was judged.
    /// There is no waiting for an approval.
    pub fn ruling_on_new_file(&self, path: &str) -> LaterRuling {
        self.ruling_on_file(path, &OF_FILES)
    }

    /// The decision of the path rules on a file that programs have created or changed.
    pub fn ruling_on_program_file(&self, path: &str) -> LaterRuling {
        self.ruling_on_file(path, &["path"])
    }

    fn ruling_on_file(&self, path: &str, rules: &[&str]) -> LaterRuling {
        let action = Action::new(ActionKind::Write { path: path.to_owned() }, Effect::Once);
        let call = Call {
            tool: &self.tool,
            effect: Effect::Once,
            is_undeclared: false,
            actions: [action].into(),
            approved_by: None,
            labels: self.labels,
            skills: &[],
            directory: Arc::clone(&self.directory),
        };
        let question = Question { policy: &self.policy, scopes: &[], call: &call };
        let judged = strictest(&question, RULES.iter().filter(|(name, _)| rules.contains(name)));
        match judged {
            None => LaterRuling {
                decision: Decision::Allowed,
                rule: "path",
                pattern: self.paths.written_by(path),
                reason: None,
            },
            Some((decision, (rule, reason, pattern))) => {
                let decision =
                    if decision > Decision::Warned { Decision::Blocked } else { decision };
                LaterRuling { decision, rule, pattern, reason: Some(reason) }
            }
        }
    }

    /// Networks that the tool may connect to although they are not public.
    pub fn private_networks(&self) -> &[Network] {
        &self.network.private
    }

    /// Names of the secrets that are added to requests of programs.
    pub fn credentials(&self) -> &[String] {
        &self.network.credentials
    }
}

/// The strictest decision of some rules on a call; `None` if none objects.
fn strictest<'r>(
    question: &Question<'_>,
    rules: impl Iterator<Item = &'r (&'static str, Rule)>,
) -> Option<(Decision, RuleDecision)> {
    // Ordered by the enforced decision, and then by the decision that the rule itself states, because
    // several rules may only observe.
    let mut strictest: Option<((Decision, Decision), RuleDecision)> = None;
    for (name, rule) in rules {
        let (said, reason, pattern) = match rule(question) {
            Ruling::NoObjection => continue,
            Ruling::Observed(would, reason, pattern) => {
                let rank = (Decision::Warned, would);
                if strictest.as_ref().is_none_or(|(so_far, _)| *so_far < rank) {
                    strictest = Some((rank, (name, reason, pattern)));
                }
                continue;
            }
            Ruling::Objection(decision, reason) => (decision, reason, None),
            Ruling::Matched(decision, reason, pattern) => (decision, reason, Some(pattern)),
            Ruling::Undecided(why, pattern) => {
                (Decision::Blocked, format!("it cannot decide: {why}"), pattern)
            }
        };
        let (decision, reason) = question.policy.enforced(name, said, reason);
        if strictest.as_ref().is_none_or(|(so_far, _)| *so_far < (decision, said)) {
            strictest = Some(((decision, said), (name, reason, pattern)));
        }
    }
    strictest.map(|((decision, _), decided)| (decision, decided))
}

/// Judges the calls of one agent definition.
pub struct Gate {
    policy: Arc<CompiledPolicy>,
}

impl Gate {
    /// # Errors
    /// The first pattern that is not a glob, or that cannot match a path of a workspace.
    pub fn new(policy: &Policy) -> Result<Self, PolicyError> {
        let tools = ToolPolicies::new(&policy.tool_policies)?;
        let commands = Arc::new(CommandRules::new(policy)?);
        let paths = Arc::new(PathRules::new(policy)?);
        let network = Arc::new(NetworkRules::new(policy)?);
        let flow = FlowRules::new(&policy.flow)?;
        Ok(Self {
            policy: Arc::new(CompiledPolicy {
                tools,
                autonomy: policy.autonomy,
                observed_autonomy: policy.observed_autonomy,
                observes: policy.observes,
                commands,
                paths,
                network,
                flow,
            }),
        })
    }

    /// Which programs may run.
    pub fn commands(&self) -> Arc<CommandRules> {
        Arc::clone(&self.policy.commands)
    }

    /// Whether programs may ask the network at all.
    pub fn has_network(&self) -> bool {
        self.policy.network.permits_any()
    }

    /// Why requests of programs to the host of an address are refused.
    pub fn objection_to(&self, url: &Url) -> Option<String> {
        self.policy.network.objection(&Target::of(url, false))
    }

    /// Whether any call could read or write a path of the workspace in that directory of the tenant.
    pub fn reaches(&self, directory: &str, path: &str) -> bool {
        let paths = &self.policy.paths;
        paths.may_read(directory, path) || paths.may_write(directory, path)
    }

    /// Whether a rule would decide differently on a call if the run had these labels, even if a stricter
    /// rule hides the difference.
    pub fn decides_differently(&self, scopes: &[String], call: &Call<'_>, labels: Labels) -> bool {
        let labelled = |labels| Call { labels: self.labels_at(call, labels), ..call.clone() };
        let (now, before) = (labelled(call.labels), labelled(labels));
        let now = Question { policy: &self.policy, scopes, call: &now };
        let before = Question { call: &before, ..now };
        let said = |question: &Question<'_>| strictest(question, RULES.iter());
        said(&now) != said(&before) || flow::objects_newly(&now, &before)
    }

    /// The labels that a run with these labels has when the call sends something: the call itself may
    /// have read something before.
    fn labels_at(&self, call: &Call<'_>, labels: Labels) -> Labels {
        let paths = &self.policy.paths;
        let may_read_private = |action: &Action| match &action.what {
            ActionKind::Exec { .. } => paths.has_private(),
            ActionKind::Read { path } => paths.is_private(&call.directory, path),
            _ => false,
        };
        let sends = call.actions.iter().any(|action| action.egress);
        if sends && call.actions.iter().any(may_read_private) {
            labels.and(Labels::PRIVATE)
        } else {
            labels
        }
    }

    /// Judges a call of a run that was started with these scopes.
    pub fn judge(&self, scopes: &[String], call: Call<'_>) -> Verdict {
        let call = Call { labels: self.labels_at(&call, call.labels), ..call };
        let question = Question { policy: &self.policy, scopes, call: &call };
        let strictest = strictest(&question, RULES.iter());
        let approved_by = call.approved_by;
        let allowance = if strictest.is_none() { allowance::of(&question) } else { None };
        let permit = Permit {
            actions: call.actions,
            paths: Arc::clone(&self.policy.paths),
            network: Arc::clone(&self.policy.network),
            directory: call.directory,
            has_shown_private: Arc::default(),
            policy: Arc::clone(&self.policy),
            tool: call.tool.into(),
            labels: call.labels,
        };
        let Some((decision, (rule, reason, pattern))) = strictest else {
            return Verdict::Pass {
                permit,
                decision: Decision::Allowed,
                rule: "none",
                pattern: None,
                reason: None,
                allowance,
            };
        };
        match decision {
            Decision::Allowed => {
                Verdict::Pass { permit, decision, rule, pattern, reason: None, allowance }
            }
            Decision::Warned => {
                let reason = Some(reason);
                Verdict::Pass { permit, decision, rule, pattern, reason, allowance }
            }
            Decision::Escalated => {
                let asks = format!("The {rule} rule asks for an approval: {reason}.");
                match approved_by {
                    Some(by) => Verdict::Pass {
                        permit,
                        decision,
                        rule,
                        pattern,
                        reason: Some(format!("{asks} Approved by {by}.")),
                        allowance,
                    },
                    None => Verdict::Stop(Objection { decision, rule, pattern, reason: asks }),
                }
            }
            Decision::Blocked => {
                let reason = format!("Blocked by the {rule} rule: {reason}.");
                Verdict::Stop(Objection { decision, rule, pattern, reason })
            }
        }
    }
}
