//! Rule 3: how much the agent may do unasked.
//!
//! `read-only` blocks whatever changes something, `supervised` wants an approval before something that
//! exists is lost, `full` leaves it to the other rules. A tool that declares no action is judged by the
//! strongest effect it can have.

use super::gate::{Objection, Question, Undecided};
use super::{Action, ActionKind, Decision};
use crate::run::{Autonomy, Effect};

pub(super) fn judge(question: &Question<'_>) -> Result<Option<Objection>, Undecided> {
    let call = question.call;
    Ok(match question.policy.autonomy {
        Autonomy::ReadOnly if call.actions.is_empty() && call.effect != Effect::Read => Some(Objection {
            decision: Decision::Blocked,
            reason: format!("this agent is read-only and {} changes things", call.tool),
        }),
        Autonomy::ReadOnly => call.actions.iter().find(|a| a.effect != Effect::Read || a.destructive).map(|action| {
            let reason = format!("this agent is read-only and may not {}", described(action));
            Objection { decision: Decision::Blocked, reason }
        }),
        Autonomy::Supervised => call.actions.iter().find(|a| a.destructive).map(|action| {
            let reason = format!("to {} would lose what exists there", described(action));
            Objection { decision: Decision::Escalated, reason }
        }),
        Autonomy::Full => None,
    })
}

fn described(action: &Action) -> String {
    match &action.what {
        ActionKind::Read(path) => format!("read {path:?}"),
        ActionKind::Write(path) => format!("write, move or delete {path:?}"),
        ActionKind::Call(name) => format!("call {name}"),
    }
}
