//! The flow rule: what a run may do after it has read untrusted or private data.
//!
//! Rules of the definition over the run's labels and each action of the call. The strictest rule whose
//! condition is true decides; a rule that cannot be evaluated denies. The labels of a run come from
//! its journal. Which labels a tool's results give to a run is declared with the tool.

use std::collections::BTreeSet;
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::gate::{PolicyError, Question, Ruling};
use super::{Action, ActionKind, Decision};
use crate::bounds::expression::{Expression, ExpressionError};
use crate::run::{Autonomy, Effect, FlowDecision, FlowRule, GovernanceMode, Target};

/// The setting with the rules.
pub const FLOW: &str = "governance.flow";
/// Rules of one agent, with those of the runs that started its run.
const MAX_RULES: usize = 256;
/// Time that all rules may take over one call.
const MAX_TIME: Duration = Duration::from_secs(4);
/// What the expressions may use.
const VARIABLES: [&str; 3] = ["action", "labels", "tool"];

/// The compiled rules.
pub(super) struct FlowRules(Vec<Rule>);

struct Rule {
    when: Expression,
    decision: Decision,
    observes: bool,
    /// Whether it is a default rule of the autonomy `supervised`.
    is_default: bool,
}

impl FlowRules {
    pub(super) fn new(rules: &[FlowRule]) -> Result<Self, PolicyError> {
        let defaults = FlowRule::defaults();
        let compile = |rule: &FlowRule| match Expression::compile(&rule.when, &VARIABLES) {
            Ok(when) => Ok(Rule {
                when,
                decision: decision(rule.r#do),
                observes: rule.mode == GovernanceMode::Observe,
                is_default: defaults.contains(rule),
            }),
            Err(error) => Err(PolicyError {
                setting: FLOW,
                pattern: rule.when.clone(),
                message: error.to_string(),
            }),
        };
        if let Some(beyond) = rules.get(MAX_RULES) {
            let (pattern, message) =
                (beyond.when.clone(), format!("is beyond the {MAX_RULES} rules that there may be"));
            return Err(PolicyError { setting: FLOW, pattern, message });
        }
        rules.iter().map(compile).collect::<Result<_, _>>().map(Self)
    }
}

/// Why a rule cannot be evaluated for some action, so that it would deny calls that it is not about: it
/// uses a key that actions do not have, its value is not a boolean, or its evaluation exceeds the limits.
pub fn mistake_of_rule(when: &str) -> Option<ExpressionError> {
    let rule = Expression::compile(when, &VARIABLES).ok()?;
    let tool = Value::from("tool");
    one_of_each_kind().into_iter().flat_map(|kind| [(kind.clone(), false), (kind, true)]).find_map(
        |(kind, is_so)| {
            let labels = json!({"untrusted": is_so, "private": is_so});
            let action = Action::new(kind, Effect::Once);
            let action = Action { destructive: is_so, egress: is_so, ..action };
            let action = described(&action, "tool");
            let variables = [("labels", &labels), ("action", &action), ("tool", &tool)];
            rule.is_true(&variables).err().filter(|error| {
                !matches!(error, ExpressionError::Failed(_) | ExpressionError::Invalid(_))
            })
        },
    )
}

fn one_of_each_kind() -> [ActionKind; 6] {
    let path = || "path".to_owned();
    let target = Target {
        scheme: "https".into(),
        host: "example.com".into(),
        port: 443,
        path: "/".into(),
        declared: false,
    };
    [
        ActionKind::Read { path: path() },
        ActionKind::Write { path: path() },
        ActionKind::Exec { argv: vec!["program".into(), "argument".into()], declared: false },
        ActionKind::Fetch(target),
        ActionKind::Call { tool: "tool".into() },
        ActionKind::Delegate { agent: "agent".into() },
    ]
}

fn decision(decision: FlowDecision) -> Decision {
    match decision {
        FlowDecision::Ask => Decision::Escalated,
        FlowDecision::Deny => Decision::Blocked,
        FlowDecision::Warn => Decision::Warned,
    }
}

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let mut strictest: Option<(Rank, &Rule, Option<String>)> = None;
    let evaluated = evaluate(question, |rule, is_true| {
        let outcome = if rule.observes { Decision::Warned } else { rule.decision };
        let rank = (outcome, rule.decision);
        match is_true {
            Ok(true) if is_first(strictest.as_ref(), rank) => strictest = Some((rank, rule, None)),
            Ok(_) => {}
            Err(error) if rule.observes => {
                let rank = (Decision::Warned, Decision::Blocked);
                if is_first(strictest.as_ref(), rank) {
                    strictest = Some((rank, rule, Some(undecided(rule, &error))));
                }
            }
            Err(error) => {
                let pattern = rule.when.source().to_owned();
                let why = undecided(rule, &error);
                return ControlFlow::Break(Ruling::Undecided(why, Some(pattern)));
            }
        }
        ControlFlow::Continue(())
    });
    if let ControlFlow::Break(undecided) = evaluated {
        return undecided;
    }
    let call = question.call;
    strictest.map_or(Ruling::NoObjection, |((decision, would), rule, undecided)| {
        let (when, observed) = (rule.when.source(), observed(rule));
        if let Some(why) = undecided {
            let why = format!("{why}; the rule only observes, it would have blocked it");
            return Ruling::Observed(would, why, Some(when.to_owned()));
        }
        let labels = call.labels.names().join(" and ");
        let read = if labels.is_empty() {
            "nothing that is labelled".to_owned()
        } else {
            format!("what is {labels}")
        };
        let why = format!("this run has read {read}, and {when} is true of the call{observed}");
        if rule.observes {
            return Ruling::Observed(would, why, Some(when.to_owned()));
        }
        Ruling::Matched(decision, why, when.to_owned())
    })
}

/// Whether a rule objects to the call of `now` (asks or denies) that does not object to that of
/// `before`.
pub(super) fn objects_newly(now: &Question<'_>, before: &Question<'_>) -> bool {
    let known = objecting(before);
    objecting(now).iter().any(|rule| !known.contains(rule))
}

/// The rules that ask about a call or deny it. The default rule about destructive actions is left out
/// where `supervised` asks about the call anyway.
fn objecting<'a>(question: &Question<'a>) -> BTreeSet<&'a str> {
    let policy = question.policy;
    let mut objecting = BTreeSet::new();
    if policy.observes {
        return objecting;
    }
    let is_supervised = policy.autonomy == Autonomy::Supervised;
    let _: ControlFlow<()> = evaluate(question, |rule, is_true| {
        let objects = !rule.observes && rule.decision > Decision::Warned;
        if objects && !(rule.is_default && is_supervised) && is_true.unwrap_or(true) {
            objecting.insert(rule.when.source());
        }
        ControlFlow::Continue(())
    });
    objecting
}

/// Evaluates every rule for each action of a call until the visitor stops it.
fn evaluate<'a, T>(
    question: &Question<'a>,
    mut found: impl FnMut(&'a Rule, Result<bool, ExpressionError>) -> ControlFlow<T>,
) -> ControlFlow<T> {
    let rules = &question.policy.flow.0;
    if rules.is_empty() {
        return ControlFlow::Continue(());
    }
    let call = question.call;
    let labels = json!({"untrusted": call.labels.untrusted, "private": call.labels.private});
    let tool = Value::from(call.tool);
    let undeclared = [Action::new(ActionKind::Call { tool: call.tool.to_owned() }, call.effect)];
    let actions = if call.actions.is_empty() { &undeclared[..] } else { &call.actions };
    let until = Instant::now() + MAX_TIME;
    for action in actions {
        let action = described(action, call.tool);
        let variables = [("labels", &labels), ("action", &action), ("tool", &tool)];
        for rule in rules {
            let is_late = Instant::now() >= until;
            let is_true =
                if is_late { Err(ExpressionError::TooLong) } else { rule.when.is_true(&variables) };
            found(rule, is_true)?;
        }
    }
    ControlFlow::Continue(())
}

/// Why a rule cannot decide.
fn undecided(rule: &Rule, error: &ExpressionError) -> String {
    format!("{} ({error})", rule.when.source())
}

/// The enforced decision, and the decision that the rule itself states.
type Rank = (Decision, Decision);

/// Whether no decision as strict was found before.
fn is_first<T>(strictest: Option<&(Rank, T, Option<String>)>, rank: Rank) -> bool {
    strictest.is_none_or(|(so_far, ..)| *so_far < rank)
}

/// What a rule that only observes would have done.
fn observed(rule: &Rule) -> &'static str {
    match (rule.observes, rule.decision) {
        (true, Decision::Blocked) => "; the rule only observes, it would have blocked it",
        (true, Decision::Escalated) => {
            "; the rule only observes, it would have asked for an approval"
        }
        _ => "",
    }
}

/// An action as expressions see it; every key is there.
fn described(action: &Action, tool: &str) -> Value {
    let (kind, path, url, argv) = match &action.what {
        ActionKind::Read { path } => ("read", path.as_str(), String::new(), &[][..]),
        ActionKind::Write { path } => ("write", path.as_str(), String::new(), &[][..]),
        ActionKind::Exec { argv, .. } => ("exec", "", String::new(), argv.as_slice()),
        ActionKind::Fetch(target) => {
            let url = format!("{}://{}:{}{}", target.scheme, target.host, target.port, target.path);
            ("fetch", "", url, &[][..])
        }
        ActionKind::Call { .. } => ("call", "", String::new(), &[][..]),
        ActionKind::Delegate { .. } => ("delegate", "", String::new(), &[][..]),
    };
    let effect = match action.effect {
        Effect::Read => "read",
        Effect::Idempotent => "idempotent",
        Effect::Once => "once",
    };
    json!({
        "kind": kind, "effect": effect, "destructive": action.destructive, "egress": action.egress,
        "path": path, "url": url, "argv": argv, "tool": tool,
    })
}
