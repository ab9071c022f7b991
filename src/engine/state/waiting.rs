//! Waiting: what a parked run waits for, and what the answers mean.
//!
//! A parked run is not driven. When it is resumed, the answers are recorded as events. The time between does
//! not count towards its duration.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::crashes::{unexecuted, without_input};
use super::{Answered, Approval, FoldError, PendingCall, Phase, State, Step};
use crate::event::{
    Awaited, CallFailure, Resolution, Resolved, RunEvent, ToolCallBlocked, ToolCallCompleted,
    WaitKind,
};
use crate::message::{CallTarget, ToolCall};
use crate::run::{Action, Outcome, RunError, RunStatus, TerminationReason};

/// The code of a run that a stop condition ended.
const STOP_CONDITION: &str = "STOP_CONDITION";

impl State {
    /// What the run waits for.
    pub fn waiting(&self) -> impl Iterator<Item = &Awaited> {
        self.waiting.values().map(|waiting| &waiting.awaited)
    }

    /// Whether the request in the event with this number is still unanswered.
    pub fn awaits(&self, seq: i64) -> bool {
        self.waiting.values().any(|waiting| waiting.seq == seq)
    }

    /// The status in which the run is parked, if it waits for something.
    pub(super) fn parked(&self) -> Option<RunStatus> {
        let waits_for = |kind| self.waiting().any(|awaited| awaited.kind == kind);
        Some(match () {
            () if self.waiting.is_empty() => return None,
            () if waits_for(WaitKind::Review) => RunStatus::NeedsReview,
            () if waits_for(WaitKind::Approval)
                || waits_for(WaitKind::Escalation)
                || waits_for(WaitKind::Child) =>
            {
                RunStatus::AwaitingApproval
            }
            () => RunStatus::AwaitingToolResults,
        })
    }

    /// The open calls from this index of the response on, as far as limits allow.
    pub fn open_calls(&self, first: u32) -> Vec<PendingCall> {
        let Phase::Acting(turn) = &self.phase else { return Vec::new() };
        let left =
            self.rules.budget.max_tool_calls.saturating_sub(self.totals.tool_calls_made.into());
        let open = turn.open_calls().filter(|(_, call)| call.target == CallTarget::Tool);
        let open = open.take(usize::try_from(left).unwrap_or(usize::MAX)).filter(|(index, _)| {
            *index >= first as usize && self.has_tool_calls_left(turn, *index)
        });
        open.map(|(index, call)| self.pending(index, call, None)).collect()
    }

    /// Whether something was requested for an open call, answered or not.
    pub fn was_asked_for(&self, call_id: Uuid) -> bool {
        let Phase::Acting(turn) = &self.phase else { return false };
        self.waiting.contains_key(&call_id) || turn.resolved.contains_key(&call_id)
    }

    /// Whether a call of the response was answered by a decision or by the caller.
    pub fn has_answers_from_outside(&self) -> bool {
        let Phase::Acting(turn) = &self.phase else { return false };
        turn.resolved.keys().any(|call| turn.answers.contains_key(call))
    }

    /// Whether this call is made again because the child run that it waited for has ended.
    fn child_has_ended(&self, call_id: Uuid) -> bool {
        matches!(&self.phase, Phase::Acting(turn) if turn.children_ended.contains_key(&call_id))
    }

    /// The step for a call whose child run has ended, while the run waits for something else. The child's
    /// outcome may end the run.
    pub(super) fn call_of_ended_child(&self) -> Option<Step> {
        let Phase::Acting(turn) = &self.phase else { return None };
        let mut open = turn.open_calls();
        open.find_map(|(index, call)| {
            let answer = turn.resolved.get(&call.id)?;
            let is_due = self.child_has_ended(call.id) && !self.waiting.contains_key(&call.id);
            is_due.then(|| self.resolved_call(index, call, answer))
        })
    }

    /// Milliseconds since a call that waited for its child run was first dispatched, without the time in
    /// which the run was parked; `None` for other calls.
    pub fn with_ended_child(&self, call_id: Uuid, now: DateTime<Utc>) -> Option<u64> {
        let Phase::Acting(turn) = &self.phase else { return None };
        let begun = turn.begun_after.get(&call_id).filter(|_| self.child_has_ended(call_id))?;
        u64::try_from(self.active_ms(now) - begun).ok()
    }

    /// An open call, as it will be judged when its answer arrives.
    pub fn open_call(&self, call: Uuid) -> Option<PendingCall> {
        let Phase::Acting(turn) = &self.phase else { return None };
        let (index, call) = turn.open_calls().find(|(_, open)| open.id == call)?;
        Some(self.pending(index, call, None))
    }

    /// The arguments that were shown with the request for an open call, once it is answered.
    pub fn arguments_shown(&self, call: Uuid) -> Option<&Value> {
        let Phase::Acting(turn) = &self.phase else { return None };
        turn.resolved.get(&call).map(|answer| &answer.arguments)
    }

    /// Applies the answer to a request.
    pub(super) fn resolved(
        &mut self,
        resolved: &Resolved,
        at: DateTime<Utc>,
        misplaced: FoldError,
    ) -> Result<(), FoldError> {
        let awaited = self.waiting.remove(&resolved.call_id);
        if self.waiting.is_empty()
            && let Some(since) = self.totals.waiting_since.take()
        {
            self.totals.waited_ms += (at - since).num_milliseconds().max(0);
        }
        if resolved.kind == WaitKind::Escalation {
            let condition = awaited.and_then(|it| it.awaited.condition).ok_or(misplaced)?;
            self.conditions_met.insert(condition);
            if !matches!(resolved.resolution, Resolution::Approved { .. }) {
                self.not_continued = Some(condition);
            }
            return Ok(());
        }
        if resolved.kind == WaitKind::Review {
            self.blame.cleared();
        }
        if let Resolution::Approved { clears, .. } = resolved.resolution
            && !clears.are_none()
        {
            self.cache.clear(); // a reread must label the run again
        }
        if let Some(duration) = resolved.child_duration_ms {
            self.child_was_under_way(resolved.call_id, duration, at);
        }
        let turn = self.turn(misplaced.clone())?;
        turn.dispatched.remove(&resolved.call_id);
        if resolved.resolution == Resolution::ChildEnded {
            let child = awaited.as_ref().and_then(|it| it.awaited.child_run_id);
            turn.children_ended.insert(resolved.call_id, child);
        }
        if let Resolution::Input { responses } = &resolved.resolution {
            let asked = awaited.as_ref().and_then(|it| it.awaited.input.as_ref());
            let given = asked.ok_or(misplaced)?.answered(responses.clone());
            turn.inputs.insert(resolved.call_id, given);
        }
        let earlier = turn.resolved.get(&resolved.call_id).map(|it| &it.resolved.resolution);
        let is_repeated = matches!(earlier, Some(Resolution::Approved { .. }));
        if !(is_repeated && resolved.resolution.repeats()) {
            let took = awaited.as_ref().map(|it| resolved.decided_at.unwrap_or(at) - it.since);
            let took_ms = took.map_or(0, |took| took.num_milliseconds().try_into().unwrap_or(0));
            let for_input = awaited.as_ref().is_some_and(|it| it.awaited.input.is_some());
            let shown = awaited.map(|it| {
                let Awaited { basis, actions, arguments, .. } = it.awaited;
                (basis, actions, arguments)
            });
            let (basis, actions, arguments) = shown.unwrap_or_default();
            let answer = Answered {
                resolved: resolved.clone(),
                basis,
                actions,
                arguments,
                took_ms,
                for_input,
            };
            turn.resolved.insert(resolved.call_id, answer); // otherwise its approval stays valid
        }
        Ok(())
    }

    /// Counts the time in which a child worked while this run was parked as time in progress, not as waiting.
    fn child_was_under_way(&mut self, call_id: Uuid, duration_ms: u64, now: DateTime<Utc>) {
        let Phase::Acting(turn) = &self.phase else { return };
        let Some(begun) = turn.begun_after.get(&call_id) else { return };
        let counted = self.active_ms(now) - begun;
        let duration = i64::try_from(duration_ms).unwrap_or(i64::MAX);
        self.totals.waited_ms -= duration.saturating_sub(counted).max(0);
    }

    /// The step for a call whose request was answered.
    pub(super) fn resolved_call(&self, index: usize, call: &ToolCall, answer: &Answered) -> Step {
        let Answered { resolved, basis, actions, took_ms, for_input, .. } = answer;
        let by = resolved.decided_by.as_deref();
        let why =
            resolved.reason.as_deref().map(|reason| format!(": {reason}")).unwrap_or_default();
        let answered = |content: String, failure: Option<CallFailure>| {
            ToolCallCompleted::new(call.id, call.name.clone(), call.target, content, failure)
        };
        match &resolved.resolution {
            Resolution::Approved { arguments, actions: edited, .. } => {
                let approval = Approval {
                    arguments: arguments.clone(),
                    by: resolved.decided_by.clone(),
                    basis: basis.clone(),
                    actions: Arc::clone(if arguments.is_some() { edited } else { actions }),
                };
                Step::CallTools(vec![self.pending(index, call, Some(approval))])
            }
            // The repeated call finds its child run ended, or passes the input on.
            Resolution::DidNotHappen | Resolution::ChildEnded | Resolution::Input { .. } => {
                Step::CallTools(vec![self.pending(index, call, None)])
            }
            Resolution::Denied => {
                let by = by.unwrap_or("An approver");
                let advice = "Do not make it again; continue without it.";
                self.refused(call, actions, format!("{by} denied this call{why}."), advice)
            }
            Resolution::Expired if *for_input => {
                let effect = actions.iter().map(|action| action.effect).max();
                let why = "no answer came in time";
                Step::Record(vec![without_input(call, CallFailure::Timeout, why, effect)])
            }
            Resolution::Expired if resolved.kind == WaitKind::Client => {
                let content = "Error: no result of this call came in time.".to_owned();
                Step::Record(vec![unexecuted(call, CallFailure::Timeout, content)])
            }
            Resolution::Expired => {
                let why = "This call was not approved in time.".to_owned();
                let advice = "Go on without it, and say what could not be done.";
                self.refused(call, actions, why, advice)
            }
            Resolution::Result { content, is_error } => {
                let failure = is_error.then_some(CallFailure::ToolError);
                Step::Record(vec![RunEvent::ToolCallCompleted(ToolCallCompleted {
                    duration_ms: *took_ms,
                    ..answered(content.clone(), failure)
                })])
            }
            Resolution::Happened { result } => {
                let known = result
                    .as_deref()
                    .map(|result| format!(" It returned: {result}"))
                    .unwrap_or_default();
                let content = format!(
                    "The service restarted during this call; it was found out that it took effect.{known}"
                );
                Step::Record(vec![RunEvent::ToolCallCompleted(ToolCallCompleted {
                    found_out: true,
                    ..answered(content, None)
                })])
            }
        }
    }

    /// The end of a run that a stop condition ends.
    pub(super) fn stopped_by(&self, condition: usize, why: &str, now: DateTime<Utc>) -> RunEvent {
        let when = self
            .rules
            .budget
            .stop_conditions
            .get(condition)
            .map_or("", |condition| condition.when.as_str());
        let context = json!({"limit": "stop_conditions", "condition": condition, "when": when});
        let message = format!("A stop condition {why}: {when}");
        let error = RunError { code: STOP_CONDITION.to_owned(), message, context };
        let raw_response = self.raw_response.clone();
        self.ended(
            now,
            Outcome::Failed { reason: TerminationReason::BudgetExceeded, error, raw_response },
        )
    }

    /// The step for a call that was denied, or not decided on in time; `advice` is added for the model.
    fn refused(
        &self,
        call: &ToolCall,
        actions: &Arc<[Action]>,
        reason: String,
        advice: &str,
    ) -> Step {
        Step::Record(vec![RunEvent::ToolCallBlocked(ToolCallBlocked {
            call_id: call.id,
            tool: call.name.clone(),
            rule: "approval".to_owned(),
            decision: "blocked".to_owned(),
            content: format!("Error: {reason} {advice}"),
            reason,
            actions: Arc::clone(actions),
            circumstances: self.circumstances(),
        })])
    }
}
