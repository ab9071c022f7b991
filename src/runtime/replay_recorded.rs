//! The decisions on calls that a journal holds.

use std::sync::Arc;

use uuid::Uuid;

use crate::event::{RunEvent, WaitKind};
use crate::governance::{self, Action, Decision};
use crate::run::{Consumption, Effect};

/// A decision as the journal keeps it.
pub(super) struct Recorded<'e> {
    pub(super) call_id: Uuid,
    pub(super) tool: &'e str,
    pub(super) effect: Effect,
    pub(super) actions: &'e Arc<[Action]>,
    /// What it took of the budget, where the call was dispatched.
    pub(super) consumes: Option<&'e Consumption>,
    /// None where it let the call pass, with a warning or without.
    pub(super) was: Option<&'e str>,
    /// Whether something else than the policy decided.
    pub(super) is_foreign: bool,
}

/// The decision that an event records, where it records one on a call of its own.
pub(super) fn recorded(event: &RunEvent) -> Option<Recorded<'_>> {
    let strongest =
        |actions: &[Action]| actions.iter().map(|a| a.effect).max().unwrap_or(Effect::Once);
    Some(match event {
        RunEvent::ToolCallStarted(call) => Recorded {
            call_id: call.call_id,
            tool: &call.tool,
            effect: call.effect,
            actions: &call.actions,
            consumes: Some(&call.consumes),
            was: Some(&call.decision),
            is_foreign: false,
        },
        RunEvent::ToolCallBlocked(call) => Recorded {
            call_id: call.call_id,
            tool: &call.tool,
            effect: strongest(&call.actions),
            actions: &call.actions,
            consumes: None,
            was: Some(&call.decision),
            is_foreign: !governance::is_rule(&call.rule),
        },
        RunEvent::ApprovalRequested(asked) if asked.kind == WaitKind::Approval => Recorded {
            call_id: asked.call_id,
            tool: &asked.tool,
            effect: strongest(&asked.actions),
            actions: &asked.actions,
            consumes: None,
            was: Some(Decision::Escalated.as_str()),
            is_foreign: false,
        },
        RunEvent::ToolCallAwaitingClient(asked) => Recorded {
            call_id: asked.call_id,
            tool: &asked.tool,
            effect: strongest(&asked.actions),
            actions: &asked.actions,
            consumes: None,
            was: None,
            is_foreign: false,
        },
        RunEvent::RunQueued {}
        | RunEvent::RunStarted { .. }
        | RunEvent::SessionLoaded { .. }
        | RunEvent::LabelsChanged(_)
        | RunEvent::SkillActivated(_)
        | RunEvent::RunResumed { .. }
        | RunEvent::AttemptStarted { .. }
        | RunEvent::IterationStarted { .. }
        | RunEvent::ModelResponded(_)
        | RunEvent::ToolCallCompleted(_)
        | RunEvent::ToolCallAwaitingChild(_)
        | RunEvent::ApprovalRequested(_)
        | RunEvent::ApprovalResolved(_)
        | RunEvent::HandoffStarted { .. }
        | RunEvent::ScanWarned(_)
        | RunEvent::BudgetWarned { .. }
        | RunEvent::OutputProposed { .. }
        | RunEvent::OutputReflected { .. }
        | RunEvent::ValidationFailed { .. }
        | RunEvent::ConfirmationRequested { .. }
        | RunEvent::DecisionExtractionFailed(_)
        | RunEvent::DecisionValidationFailed(_)
        | RunEvent::ToolChoiceUnmet { .. }
        | RunEvent::AnswerBlank { .. }
        | RunEvent::ModelRetried(_)
        | RunEvent::ModelInterrupted(_)
        | RunEvent::ContextCompacted(_)
        | RunEvent::RunCancelRequested { .. }
        | RunEvent::RunCompleted(_)
        | RunEvent::RunFailed(_)
        | RunEvent::RunCancelled(_) => return None,
    })
}
