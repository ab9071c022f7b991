//! The autonomy rule: what the agent may do without approval.
//!
//! `read-only` blocks every change, `supervised` requires approval of destructive actions, `full`
//! leaves it to the other rules. A tool that declares no action is judged by its strongest possible
//! effect. Delegation to another agent always passes: the same autonomy limits that agent.

use super::gate::{Call, Question, Ruling};
use super::{Action, ActionKind, Decision};
use crate::run::{Autonomy, Effect};

pub(super) fn judge(question: &Question<'_>) -> Ruling {
    let policy = question.policy;
    if let Some((decision, reason)) = objection(policy.autonomy, question.call) {
        return Ruling::Objection(decision, reason);
    }
    let observed = policy.observed_autonomy.and_then(|it| objection(it, question.call));
    observed.map_or(Ruling::NoObjection, |(would, reason)| {
        let why = format!("by the autonomy of a parent run, which only observes, {reason}");
        Ruling::Observed(would, why, None)
    })
}

pub(super) fn objection(autonomy: Autonomy, call: &Call<'_>) -> Option<(Decision, String)> {
    let changes = |action: &&Action| match action.what {
        ActionKind::Delegate { .. } => false,
        _ => action.effect != Effect::Read || action.destructive,
    };
    match autonomy {
        Autonomy::ReadOnly if call.actions.is_empty() && call.effect != Effect::Read => Some((
            Decision::Blocked,
            format!("this agent is read-only and {} changes things", call.tool),
        )),
        Autonomy::ReadOnly => call.actions.iter().find(changes).map(|action| {
            (
                Decision::Blocked,
                format!("this agent is read-only and may not {}", described(action)),
            )
        }),
        Autonomy::Supervised => call.actions.iter().find(|a| a.destructive).map(|action| {
            let why = if call.is_undeclared {
                let tool = call.tool;
                format!("it is not declared what {tool} does, so it counts as destructive")
            } else {
                format!("to {} would lose what exists there", described(action))
            };
            (Decision::Escalated, why)
        }),
        Autonomy::Full => None,
    }
}

fn described(action: &Action) -> String {
    match &action.what {
        ActionKind::Read { path } => format!("read {path:?}"),
        ActionKind::Write { path } => format!("write, move or delete {path:?}"),
        ActionKind::Exec { argv, .. } => format!("run {:?}", argv.join(" ")),
        ActionKind::Fetch(target) => format!("send a request to {}", target.host),
        ActionKind::Call { tool } => format!("call {tool}"),
        ActionKind::Delegate { agent } => format!("ask {agent}"),
    }
}
