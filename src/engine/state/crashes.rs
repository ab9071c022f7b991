//! After a crash: calls with an unknown outcome, and runs that may have caused the crash.
//!
//! A crash counts against every run that the replica was driving, except runs that only waited for their
//! child runs. A model's answer resets the count. A run that is one crash below the limit is driven alone, and
//! is ended only by a crash while it was alone. If the limit is one crash, it ends every run that it counts
//! against.

use chrono::{DateTime, TimeDelta, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use super::{Dispatched, OpenTurn, Phase, State, Step};
use crate::event::{CallFailure, RunEvent, ToolCallCompleted, WaitKind};
use crate::message::{CallTarget, ToolCall, Usage};
use crate::run::{Amounts, Delegation, Effect, RunStatus, TerminationReason};
use crate::tools::results::{UNKNOWN_OUTCOME, review, unknown_outcome};

/// The greatest difference between the clocks of two replicas.
const CLOCKS_APART: TimeDelta = TimeDelta::seconds(1);

/// The crashes that count against a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blame {
    /// Replicas that died while they owned the run, at the time of its last resumption.
    deaths: u32,
    /// Crashes while it was driven, since a model answered.
    crashes: u32,
    /// Whether it is driven alone.
    is_alone: bool,
    /// Whether it was driven alone when it crashed last.
    was_alone: bool,
}

impl Blame {
    /// Counts one crash. However many replicas died, at most one of them was driving this run.
    fn after(self, deaths: u32) -> Self {
        if deaths <= self.deaths {
            return self;
        }
        Self { deaths, crashes: self.crashes + 1, was_alone: self.is_alone, ..self }
    }

    /// Notes deaths of replicas without blaming this run.
    fn spared(self, deaths: u32) -> Self {
        Self { deaths: deaths.max(self.deaths), ..self }
    }

    /// Resets the count after a model's answer or a review by a person.
    pub(super) fn cleared(&mut self) {
        *self = Self { deaths: self.deaths, ..Self::default() };
    }
}

/// How a claimed run ends or parks without being driven.
#[derive(Debug, Clone, PartialEq)]
pub struct Disposal {
    /// The events to record.
    pub events: Vec<RunEvent>,
    /// The status in which it is parked; `None` if the events end it.
    pub park: Option<RunStatus>,
}

impl State {
    /// Whether the run must be driven alone, if it is resumed after this number of deaths of replicas.
    pub fn is_suspect(&self, deaths: u32) -> bool {
        let last = self.rules.max_crashes.saturating_sub(1).max(1);
        !self.only_delegates() && self.blame.after(deaths).crashes >= last
    }

    /// Applies a resumption after this number of deaths of replicas.
    pub(super) fn resumed(&mut self, deaths: u32, is_alone: bool) {
        let blame = if self.only_delegates() {
            self.blame.spared(deaths)
        } else {
            self.blame.after(deaths)
        };
        self.blame = Blame { is_alone, ..blame };
    }

    /// Excludes the time for which the run waited to be driven alone from its duration.
    pub fn record_wait(&mut self, waited_ms: u64) {
        self.totals.waited_ms += i64::try_from(waited_ms).unwrap_or(0);
    }

    /// The interrupted model call will be repeated. Nothing is counted if the run only waited to retry it.
    pub(super) fn calls_again(&mut self, now: DateTime<Utc>) {
        let waits = self.asks_again_at.take().is_some_and(|at| at - now > CLOCKS_APART);
        if let Phase::Calling { is_repeated } = &mut self.phase {
            *is_repeated |= !waits;
        }
    }

    /// Whether the run only waits for its child runs, so that it did not cause the crash itself.
    fn only_delegates(&self) -> bool {
        let Phase::Acting(turn) = &self.phase else { return false };
        let mut under_way =
            turn.open_calls().filter(|(_, call)| turn.dispatched.contains_key(&call.id)).peekable();
        under_way.peek().is_some()
            && under_way.all(|(_, call)| Delegation::of_tool(&call.name).is_some())
    }

    /// Whether a replica died since the last resumption, while it owned the run.
    pub fn has_crashed(&self, deaths: u32) -> bool {
        deaths > self.blame.deaths
    }

    /// Whether the next model call repeats one whose answer was lost in a crash.
    pub fn repeats_model_call(&self) -> bool {
        self.phase == Phase::Calling { is_repeated: true }
    }

    /// The usage of an answer, doubled if it repeats an answer that a crash lost: the real usage of the lost
    /// one is unknown and assumed to be equal.
    pub fn charged(&self, usage: Usage) -> Usage {
        let mut charged = usage;
        if self.repeats_model_call() {
            charged.add(&Usage { estimated: true, ..usage });
        }
        charged
    }

    /// How the run is ended or parked, if it does not have to be driven for that. Only a driven run can check
    /// delivered results and ask tools for the outcome of calls; otherwise, these are not used.
    pub fn disposal(&self, is_driven: bool, now: DateTime<Utc>) -> Option<Disposal> {
        let can_ask = is_driven || self.cancel.is_some() || self.ending().is_some();
        let asked = if can_ask { None } else { self.all_reviews() };
        match asked.map_or_else(|| self.next(now), Step::Record) {
            Step::Suspend(status) => Some(Disposal { events: Vec::new(), park: Some(status) }),
            Step::Record(events) => match events.last()? {
                _ if is_driven && events.iter().any(is_delivered) => None,
                last if last.ending().is_some() => {
                    let events = events.into_iter().map(unchecked).collect();
                    Some(Disposal { events, park: None })
                }
                RunEvent::ApprovalRequested(asked) if asked.kind == WaitKind::Review => {
                    Some(Disposal { events, park: Some(RunStatus::NeedsReview) })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Requests reviews of dispatched calls that must not be repeated and have no result, unless their tools
    /// can be asked for the outcome.
    pub(super) fn reviews(&self) -> Option<Vec<RunEvent>> {
        self.reviews_of(|call| call.is_reviewed() && call.reconcilable.is_none())
    }

    fn all_reviews(&self) -> Option<Vec<RunEvent>> {
        self.reviews_of(Dispatched::is_reviewed)
    }

    /// These events, unless they would end the run or answer its calls while the outcome of a call is
    /// unknown: then a person is asked to review that call, because its tool will not be asked.
    pub fn or_reviews(&self, events: Vec<RunEvent>) -> Vec<RunEvent> {
        self.all_reviews().unwrap_or(events)
    }

    fn reviews_of(&self, is_reviewed: impl Fn(&Dispatched) -> bool) -> Option<Vec<RunEvent>> {
        let Phase::Acting(turn) = &self.phase else { return None };
        let open = turn.open_calls().filter(|(_, call)| {
            let is_reviewed = turn.dispatched.get(&call.id).is_some_and(&is_reviewed);
            is_reviewed && !self.waiting.contains_key(&call.id)
        });
        let asked: Vec<RunEvent> = open.map(|(_, call)| review_of(turn, call)).collect();
        (!asked.is_empty()).then_some(asked)
    }

    /// The end of a run that crashed its replicas too often.
    pub(super) fn crashed_too_often(&self, now: DateTime<Utc>) -> Option<Step> {
        let Blame { crashes, was_alone, .. } = self.blame;
        let max = self.rules.max_crashes;
        if crashes < max || !(was_alone || max == 1) {
            return None;
        }
        let message = format!("The service stopped {crashes} times while it executed this run.");
        let context = json!({"crashes": crashes});
        let end = self.failed(now, TerminationReason::Interrupted, message, context);
        Some(self.end_mid_turn("the run ended", end))
    }

    /// What the run has consumed of a shared budget. Dispatched calls without a result count, because their
    /// outcome may never be known.
    pub fn spent_of_shared(&self) -> Amounts {
        let spent = Amounts::of(&self.totals);
        let Phase::Acting(turn) = &self.phase else { return spent };
        let is_dispatched = |call: &Uuid| turn.dispatched.contains_key(call);
        let open = turn.open_calls().filter(|(_, call)| is_dispatched(&call.id)).count() as u64;
        Amounts { tool_calls: spent.tool_calls.saturating_add(open), ..spent }
    }

    /// Results for all open calls.
    pub(super) fn not_executed(&self, why: &str) -> Vec<RunEvent> {
        let Phase::Acting(turn) = &self.phase else { return Vec::new() };
        let open = turn.open_calls().filter(|(_, call)| call.target == CallTarget::Tool);
        let results = open.flat_map(|(index, call)| {
            self.result_of_answer(turn, index, call)
                .unwrap_or_else(|| vec![self.result_without_execution(turn, call, why)])
        });
        results.collect()
    }

    /// The result of an open call, if it was answered by a decision or by the caller.
    fn result_of_answer(
        &self,
        turn: &OpenTurn,
        index: usize,
        call: &ToolCall,
    ) -> Option<Vec<RunEvent>> {
        match self.resolved_call(index, call, turn.resolved.get(&call.id)?) {
            Step::Record(events) => Some(events),
            _ => None,
        }
    }

    /// The result of an open call that will not be executed.
    fn result_without_execution(&self, turn: &OpenTurn, call: &ToolCall, why: &str) -> RunEvent {
        match turn.dispatched.get(&call.id).map(|call| call.effect) {
            effect if self.asks_for_input(turn, call.id) => {
                without_input(call, CallFailure::Cancelled, why, effect)
            }
            Some(Effect::Once) => unknown_outcome(call.id, call.name.clone()),
            Some(Effect::Idempotent) => self.without_result(turn, call, why),
            _ if turn.children_ended.contains_key(&call.id) => self.without_result(turn, call, why),
            Some(Effect::Read) | None => {
                let content = format!("Error: not executed, {why}.");
                unexecuted(call, CallFailure::NotExecuted, content)
            }
        }
    }

    /// Whether the call's tool has asked for input, and was not called again since.
    fn asks_for_input(&self, turn: &OpenTurn, call: Uuid) -> bool {
        let is_given = || turn.inputs.contains_key(&call) && !turn.dispatched.contains_key(&call);
        self.waiting.get(&call).map_or_else(is_given, |it| it.awaited.input.is_some())
    }

    /// The result of a call in progress, or with a child run in progress, that the run no longer waits for.
    fn without_result(&self, turn: &OpenTurn, call: &ToolCall, why: &str) -> RunEvent {
        let waiting = self.waiting.get(&call.id).and_then(|it| it.awaited.child_run_id);
        let child_run_id = waiting.or_else(|| turn.children_ended.get(&call.id).copied().flatten());
        let content = format!("Error: no result came of this call, {why}.");
        RunEvent::ToolCallCompleted(ToolCallCompleted {
            child_run_id,
            ..unexecuted_call(call, CallFailure::Cancelled, content)
        })
    }
}

/// Whether the event is a result that a client delivered.
fn is_delivered(event: &RunEvent) -> bool {
    matches!(event, RunEvent::ToolCallCompleted(call) if call.failure.is_none_or(CallFailure::is_of_tool))
}

/// The event, with its unchecked result withheld.
fn unchecked(event: RunEvent) -> RunEvent {
    match event {
        RunEvent::ToolCallCompleted(call) if call.failure.is_none_or(CallFailure::is_of_tool) => {
            let content =
                "Error: the result is withheld, because the run's agent is not there to check it."
                    .to_owned();
            let failure = Some(CallFailure::Withheld);
            RunEvent::ToolCallCompleted(ToolCallCompleted { content, failure, ..call })
        }
        event => event,
    }
}

fn review_of(turn: &OpenTurn, call: &ToolCall) -> RunEvent {
    let answer = turn.resolved.get(&call.id);
    let edited = answer.and_then(|answer| answer.resolved.resolution.edited());
    let made_with = turn.dispatched.get(&call.id).map(|call| call.made_with.clone());
    let shown = made_with.unwrap_or_default().shown(call, edited);
    review(call.id, call.name.clone(), shown, &format!("{UNKNOWN_OUTCOME}."))
}

/// The result of a call whose tool asked for input and does not get it. The tool has not completed the
/// call; what it did before it asked is unknown.
pub(super) fn without_input(
    call: &ToolCall,
    failure: CallFailure,
    why: &str,
    effect: Option<Effect>,
) -> RunEvent {
    let known = match effect {
        Some(Effect::Read) => "",
        Some(Effect::Idempotent | Effect::Once) | None => {
            ", and it is unknown whether it took effect in part"
        }
    };
    let content =
        format!("Error: the tool asked for input, and {why}. It did not complete the call{known}.");
    unexecuted(call, failure, content)
}

/// The result of a call that was never executed.
pub(super) fn unexecuted(call: &ToolCall, failure: CallFailure, content: String) -> RunEvent {
    RunEvent::ToolCallCompleted(unexecuted_call(call, failure, content))
}

fn unexecuted_call(call: &ToolCall, failure: CallFailure, content: String) -> ToolCallCompleted {
    ToolCallCompleted::new(call.id, call.name.clone(), call.target, content, Some(failure))
}
