//! The decisions on calls in a journal.

use std::sync::Arc;

use uuid::Uuid;

use crate::event::{RunEvent, WaitKind};
use crate::governance::{self, Action, Decision};
use crate::run::{Consumption, Effect};

/// A decision as the journal keeps it.
pub(super) struct RecordedDecision<'e> {
    pub(super) call_id: Uuid,
    pub(super) tool: &'e str,
    pub(super) effect: Effect,
    pub(super) actions: &'e Arc<[Action]>,
    /// Its consumption, if the call was dispatched.
    pub(super) consumes: Option<&'e Consumption>,
    /// `None` if the call was allowed, with or without a warning.
    pub(super) was: Option<&'e str>,
    /// What decided, if it was not the policy.
    pub(super) foreign: Option<&'e str>,
}

/// The decision that an event records, if any.
pub(super) fn recorded(event: &RunEvent) -> Option<RecordedDecision<'_>> {
    let strongest =
        |actions: &[Action]| actions.iter().map(|a| a.effect).max().unwrap_or(Effect::Once);
    Some(match event {
        RunEvent::ToolCallStarted(call) => RecordedDecision {
            call_id: call.call_id,
            tool: &call.tool,
            effect: call.effect,
            actions: &call.actions,
            consumes: Some(&call.consumes),
            was: Some(&call.decision),
            foreign: None,
        },
        RunEvent::ToolCallBlocked(call) => RecordedDecision {
            call_id: call.call_id,
            tool: &call.tool,
            effect: strongest(&call.actions),
            actions: &call.actions,
            consumes: None,
            was: Some(&call.decision),
            foreign: Some(call.rule.as_str()).filter(|rule| !governance::is_rule(rule)),
        },
        RunEvent::ApprovalRequested(asked) if asked.kind == WaitKind::Approval => {
            RecordedDecision {
                call_id: asked.call_id,
                tool: &asked.tool,
                effect: strongest(&asked.actions),
                actions: &asked.actions,
                consumes: None,
                was: Some(Decision::Escalated.as_str()),
                foreign: None,
            }
        }
        RunEvent::ToolCallAwaitingClient(asked) if asked.input.is_none() => RecordedDecision {
            call_id: asked.call_id,
            tool: &asked.tool,
            effect: strongest(&asked.actions),
            actions: &asked.actions,
            consumes: None,
            was: None,
            foreign: None,
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
        | RunEvent::CallGiven(_)
        | RunEvent::ToolCallCompleted(_)
        | RunEvent::ToolCallAwaitingClient(_)
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
