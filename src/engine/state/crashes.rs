//! What a crash leaves: calls whose outcome is unknown, and runs that may have caused it.
//!
//! A crash is counted for the runs that a replica was driving when it died, but for those that only
//! waited for runs which they had started. An answer of a model sets the count back to zero. A run
//! that crashed so often that the next time may be the last is driven alone, and ended only by a
//! crash that found it alone. Where one crash is the limit, it ends every run that it is counted for.

use chrono::{DateTime, Utc};
use serde::{Deserialize, Serialize};
use serde_json::json;
use uuid::Uuid;

use super::{Dispatched, OpenTurn, Phase, State, Step};
use crate::event::{CallFailure, RunEvent, ToolCallCompleted, WaitKind};
use crate::message::{CallTarget, ToolCall, Usage};
use crate::run::{Amounts, Delegation, Effect, RunStatus, TerminationReason};
use crate::tools::results::{UNKNOWN_OUTCOME, review, unknown_outcome};

/// The crashes that a run is blamed for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Blame {
    /// Replicas that died while they owned it, as of the last time it was resumed.
    deaths: u32,
    /// Crashes while it was driven, since a model answered.
    crashes: u32,
    /// Whether it is driven alone.
    is_alone: bool,
    /// Whether it was driven alone when it crashed last.
    was_alone: bool,
}

impl Blame {
    /// Counts one crash, however many replicas died: at most one of them drove this run.
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

    /// Something came of the run, or a person has looked at it.
    pub(super) fn cleared(&mut self) {
        *self = Self { deaths: self.deaths, ..Self::default() };
    }
}

/// How a claimed run ends or parks without being driven.
#[derive(Debug, Clone, PartialEq)]
pub struct Disposal {
    /// What happens first.
    pub events: Vec<RunEvent>,
    /// The status in which it is parked; `None` where the events end it.
    pub park: Option<RunStatus>,
}

impl State {
    /// Whether the run has to be driven alone that is resumed after so many deaths of replicas.
    pub fn is_suspect(&self, deaths: u32) -> bool {
        let last = self.rules.max_crashes.saturating_sub(1).max(1);
        !self.only_delegates() && self.blame.after(deaths).crashes >= last
    }

    /// It is driven again after so many deaths of replicas.
    pub(super) fn resumed(&mut self, deaths: u32, is_alone: bool) {
        let blame = if self.only_delegates() {
            self.blame.spared(deaths)
        } else {
            self.blame.after(deaths)
        };
        self.blame = Blame { is_alone, ..blame };
    }

    /// It has waited for so many milliseconds to be driven alone, which are not of its duration.
    pub fn record_wait(&mut self, waited_ms: u64) {
        self.totals.waited_ms += i64::try_from(waited_ms).unwrap_or(0);
    }

    /// Whether nothing of the run is under way but other runs: what they do is not its doing.
    fn only_delegates(&self) -> bool {
        let Phase::Acting(turn) = &self.phase else { return false };
        let mut under_way =
            turn.open_calls().filter(|(_, call)| turn.dispatched.contains_key(&call.id)).peekable();
        under_way.peek().is_some()
            && under_way.all(|(_, call)| Delegation::of_tool(&call.name).is_some())
    }

    /// Whether a replica died while it drove the run, before it is resumed.
    pub fn has_crashed(&self, deaths: u32) -> bool {
        deaths > self.blame.deaths
    }

    /// Whether the model was asked before what it is to be asked now: its answer was lost.
    pub fn repeats_model_call(&self) -> bool {
        self.phase == Phase::Calling { is_repeated: true }
    }

    /// What an answer costs, with the one that a crash lost: its real cost is unknown, so it is counted
    /// as equal.
    pub fn charged(&self, usage: Usage) -> Usage {
        let mut charged = usage;
        if self.repeats_model_call() {
            charged.add(&Usage { estimated: true, ..usage });
        }
        charged
    }

    /// How the run is ended or parked, where that takes no work. Results that were delivered are
    /// checked, and tools asked what became of their calls, where the run is driven; where it is not,
    /// they cannot be used.
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

    /// Asks what became of calls that were dispatched, must not be repeated and have no result, unless
    /// their tools can be asked.
    pub(super) fn reviews(&self) -> Option<Vec<RunEvent>> {
        self.reviews_of(|call| call.is_reviewed() && call.reconcilable.is_none())
    }

    fn all_reviews(&self) -> Option<Vec<RunEvent>> {
        self.reviews_of(Dispatched::is_reviewed)
    }

    /// These events, unless they would end the run, or answer its calls, before it is known what became
    /// of a call: then a person is asked, since its tool will not be.
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

    /// What the run has taken of a budget that it shares. A call that was dispatched and has no result
    /// counts: its outcome may never be known.
    pub fn spent_of_shared(&self) -> Amounts {
        let spent = Amounts::of(&self.totals);
        let Phase::Acting(turn) = &self.phase else { return spent };
        let is_dispatched = |call: &Uuid| turn.dispatched.contains_key(call);
        let open = turn.open_calls().filter(|(_, call)| is_dispatched(&call.id)).count() as u64;
        Amounts { tool_calls: spent.tool_calls.saturating_add(open), ..spent }
    }

    /// Results for the calls that are still open: what is known of them.
    pub(super) fn not_executed(&self, why: &str) -> Vec<RunEvent> {
        let Phase::Acting(turn) = &self.phase else { return Vec::new() };
        let open = turn.open_calls().filter(|(_, call)| call.target == CallTarget::Tool);
        let results = open.flat_map(|(index, call)| {
            self.decided(turn, index, call).unwrap_or_else(|| vec![self.without(turn, call, why)])
        });
        results.collect()
    }

    /// The result of an open call, where what it waited for was one.
    fn decided(&self, turn: &OpenTurn, index: usize, call: &ToolCall) -> Option<Vec<RunEvent>> {
        match self.resolved_call(index, call, turn.resolved.get(&call.id)?) {
            Step::Record(events) => Some(events),
            _ => None,
        }
    }

    /// The result of an open call that is executed no more.
    fn without(&self, turn: &OpenTurn, call: &ToolCall, why: &str) -> RunEvent {
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

    /// Whether the call's tool has asked for input, and was not asked again.
    fn asks_for_input(&self, turn: &OpenTurn, call: Uuid) -> bool {
        let is_given = || turn.inputs.contains_key(&call) && !turn.dispatched.contains_key(&call);
        self.waiting.get(&call).map_or_else(is_given, |it| it.awaited.input.is_some())
    }

    /// The result of a call that was under way, or whose child run was, and is not waited for any more.
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

/// Whether the event is a result that came from outside the service.
fn is_delivered(event: &RunEvent) -> bool {
    matches!(event, RunEvent::ToolCallCompleted(call) if call.failure.is_none_or(CallFailure::is_of_tool))
}

/// The event without a result that cannot be checked.
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
/// call; what it did before it asked is not known.
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
