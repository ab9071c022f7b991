//! How each event changes the state.
//!
//! Nothing is decided here. An event that does not fit the state is an error, never a panic: the journal
//! is damaged, or was written by another program.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{
    Dispatched, FailedCall, OpenTurn, Phase, Proposal, RequiredCall, State, Waiting, same_call,
};
use crate::agents::definition::ReactSection;
use crate::engine::output::is_blank;
use crate::engine::phrases;
use crate::event::{
    CallFailure, ContextCompacted, Event, LimitReached, ModelResponded, RunEvent,
    ToolCallCompleted, ToolCallStarted, WaitKind,
};
use crate::message::{
    AssistantMessage, CallTarget, Conversation, FinishReason, Origin, ToolCall, ToolResult, Turn,
};
use crate::run::{Delegation, Effect, ToolChoicePolicy};
use crate::tools::interrupted_call::{InterruptedCall, RecordedCall};

/// A journal that cannot be read.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FoldError {
    /// A number is missing or repeated.
    #[error("event {got} follows event {last}")]
    Gap {
        /// The last number applied.
        last: i64,
        /// The number of the event that followed.
        got: i64,
    },
    /// An event that cannot happen in this phase.
    #[error("event {seq} ({kind}) cannot follow what came before")]
    Misplaced {
        /// Its number.
        seq: i64,
        /// Its type.
        kind: &'static str,
    },
}

impl State {
    /// Applies one event.
    ///
    /// # Errors
    /// [`FoldError`]. A gap leaves the state unchanged; other errors may leave it partly changed.
    #[expect(clippy::too_many_lines, reason = "one arm an event")]
    pub fn apply(&mut self, event: &Event) -> Result<(), FoldError> {
        if event.seq != self.last_seq + 1 {
            return Err(FoldError::Gap { last: self.last_seq, got: event.seq });
        }
        self.last_seq = event.seq;
        self.totals.apply(&event.what);
        let misplaced = FoldError::Misplaced { seq: event.seq, kind: event.what.type_name() };
        match &event.what {
            RunEvent::RunStarted { system, turns, history, single_shot, .. } => {
                (self.started_at, self.taken_over) = (Some(event.at), *history);
                self.single_shot = *single_shot;
                // With known prices the cost starts at zero; without, it is unknown.
                self.totals.usage.cost_micro_usd = self.rules.price.map(|_| 0);
                self.conversation = opening(system, turns, *history).ok_or(misplaced)?;
                self.phase = Phase::BetweenAttempts;
            }
            RunEvent::AttemptStarted { attempt } => {
                (self.attempt, self.iteration) = (*attempt, 0);
                self.required_call = RequiredCall::Open;
                (self.answer_only, self.blank_answers) = (false, 0);
                self.proposal = None;
                self.cache.clear();
                self.phase = Phase::BetweenIterations;
            }
            RunEvent::IterationStarted { iteration, answer_only, limit, .. } => {
                (self.iteration, self.answer_only) = (*iteration, *answer_only);
                self.begin_iteration(limit.as_ref());
            }
            RunEvent::ContextCompacted(compacted) => {
                if let Some(call) = &compacted.call {
                    self.answered_last = Some(format!("{}/{}", call.provider, call.model));
                }
                self.compacted(compacted, misplaced)?;
            }
            RunEvent::ModelResponded(response) => self.responded(response),
            RunEvent::CallGiven(given) => {
                self.iteration = given.iteration;
                self.phase = Phase::Acting(OpenTurn::of(given.message.clone()));
            }
            RunEvent::ToolCallStarted(call) => self.dispatched(call, event.at, misplaced)?,
            RunEvent::ToolCallCompleted(call) => {
                self.count(call.call_id, &call.content, call.failure);
                self.keep(call);
                let over = call.network.filter(|asked| asked.over_budget);
                self.over_requests = over.or(self.over_requests);
                let origin = self.origin_of(call);
                let content = call.model_text().into_owned();
                self.recorded_bytes = self.recorded_bytes.saturating_add(content.len());
                let note_bytes = content.len() - call.content.len();
                let is_error = call.failure.is_some();
                let call_id = call.call_id;
                let result = ToolResult { call_id, content, is_error, origin, note_bytes };
                self.answer(result, misplaced)?;
            }
            RunEvent::ToolCallBlocked(call) => {
                // Too many calls in a minute are no failure of the work.
                if !call.is_one_too_many() {
                    self.count(call.call_id, &call.reason, Some(CallFailure::ToolError));
                }
                self.turn(misplaced.clone())?.is_blocked = true;
                let result = ToolResult::of_service(call.call_id, call.content.as_str(), true);
                self.answer(result, misplaced)?;
            }
            RunEvent::OutputProposed { call_id, output, problem, .. } => {
                let proposal = Proposal {
                    call_id: *call_id,
                    output: Arc::clone(output),
                    malformed: problem.clone(),
                };
                self.proposed(proposal, misplaced)?;
            }
            RunEvent::OutputReflected { call_id, content, is_error, .. } => {
                self.turn(misplaced.clone())?.proposal = None;
                let result = ToolResult::of_service(*call_id, content.as_str(), *is_error);
                self.answer(result, misplaced)?;
            }
            RunEvent::ValidationFailed { call_id, errors, feedback, .. } => {
                self.close_turn(*call_id, &phrases::errors(errors), true, phrases::LEFT_OPEN);
                self.conversation.push_user(feedback.as_str());
                self.phase = Phase::BetweenAttempts;
            }
            RunEvent::ConfirmationRequested { prompt } => {
                self.confirmed = true;
                self.reply(prompt);
            }
            RunEvent::DecisionExtractionFailed(failed)
            | RunEvent::DecisionValidationFailed(failed) => {
                if !matches!(self.phase, Phase::Answered { .. }) {
                    return Err(misplaced);
                }
                self.undecided.push(failed.error.clone());
                self.reply(&failed.feedback);
            }
            RunEvent::ToolChoiceUnmet { prompt: Some(prompt), .. } => {
                self.required_call = RequiredCall::Repeated;
                self.reply(prompt);
            }
            RunEvent::ToolChoiceUnmet { prompt: None, .. } => {
                self.required_call = RequiredCall::Settled;
            }
            RunEvent::AnswerBlank { prompt, .. } => {
                self.blank_answers += 1;
                self.reply(prompt);
            }
            RunEvent::RunCancelRequested { reason } => {
                let phase = self.current_phase().to_owned();
                self.cancel = Some(super::CancelRequest { reason: reason.clone(), phase });
            }
            RunEvent::RunCompleted(ending)
            | RunEvent::RunFailed(ending)
            | RunEvent::RunCancelled(ending) => {
                self.close_last_turn(matches!(event.what, RunEvent::RunCompleted(_)));
                self.phase = Phase::Ended { ending: ending.clone(), at: event.at };
            }
            RunEvent::ToolCallAwaitingClient(awaited)
            | RunEvent::ToolCallAwaitingChild(awaited)
            | RunEvent::ApprovalRequested(awaited) => {
                if awaited.kind == WaitKind::Approval
                    && let Phase::Acting(turn) = &mut self.phase
                {
                    turn.resolved.remove(&awaited.call_id); // an approval that has lapsed
                }
                self.totals.waiting_since.get_or_insert(event.at);
                let (seq, since, awaited) = (event.seq, event.at, awaited.clone());
                self.waiting.insert(awaited.call_id, Waiting { seq, since, awaited });
            }
            RunEvent::ApprovalResolved(resolved) => self.resolved(resolved, event.at, misplaced)?,
            RunEvent::ScanWarned(warned) => {
                self.suspicious = warned.call_id.or(self.suspicious);
            }
            RunEvent::SkillActivated(skill) => self.skills.push(skill.clone()),
            RunEvent::BudgetWarned { condition, .. } => {
                self.conditions_met.insert(*condition);
            }
            RunEvent::RunResumed { deaths, is_alone, waited_ms, .. } => {
                self.resumed(*deaths, *is_alone);
                self.record_wait(*waited_ms);
                self.calls_again(event.at);
            }
            RunEvent::ModelRetried(retried) => {
                self.asks_again_at = retried.next_try(event.at);
            }
            RunEvent::RunQueued {}
            | RunEvent::ModelInterrupted(_)
            | RunEvent::LabelsChanged(_)
            | RunEvent::SessionLoaded { .. }
            | RunEvent::HandoffStarted { .. } => {}
        }
        Ok(())
    }

    /// A model call is due. The model's last answer moves into the conversation, with the reply to it.
    fn begin_iteration(&mut self, limit: Option<&LimitReached>) {
        self.compactions.clear();
        if let Some(limit) = limit {
            self.limit = Some(limit.clone());
            self.unfinished = None;
            self.reply(phrases::ANSWER_NOW);
        } else if matches!(self.phase, Phase::Answered { .. }) {
            self.reply(phrases::WRITE_ANSWER);
        }
        self.phase = Phase::Calling { is_repeated: false };
    }

    fn dispatched(
        &mut self,
        call: &ToolCallStarted,
        at: DateTime<Utc>,
        misplaced: FoldError,
    ) -> Result<(), FoldError> {
        let active = self.active_ms(at);
        if call.effect != Effect::Read {
            self.cache.clear();
        }
        let (effect, on_unknown_outcome) = (call.effect, call.on_unknown_outcome);
        let made_with = RecordedCall::of(call);
        let reconcilable = call.reconcilable_by.clone().map(|tool_hash| InterruptedCall {
            tool_hash,
            effect_key: call.effect_key.clone(),
            on_unknown_outcome,
            made_with: made_with.clone(),
        });
        let turn = self.turn(misplaced)?;
        let is_repeated = turn.dispatched.contains_key(&call.call_id);
        let dispatched =
            Dispatched { effect, on_unknown_outcome, reconcilable, is_repeated, made_with };
        turn.dispatched.insert(call.call_id, dispatched);
        turn.counted.entry(call.call_id).or_default().add(&call.consumes);
        turn.begun_after.entry(call.call_id).or_insert(active);
        Ok(())
    }

    pub(super) fn turn(&mut self, misplaced: FoldError) -> Result<&mut OpenTurn, FoldError> {
        match &mut self.phase {
            Phase::Acting(turn) => Ok(turn),
            _ => Err(misplaced),
        }
    }

    /// Counts consecutive failures and repeated results.
    fn count(&mut self, call_id: Uuid, content: &str, failure: Option<CallFailure>) {
        if failure.is_some_and(|failure| !self.counts_as_failing(failure)) {
            return;
        }
        // Calls of the output tool are judged elsewhere, unless they were truncated.
        let counts = |call: &&ToolCall| {
            call.target == CallTarget::Tool || failure == Some(CallFailure::Truncated)
        };
        let Some(call) = self.call(call_id).filter(counts).cloned() else { return };
        self.streak = self.streak.with(&call, content);
        self.failures_in_a_row = if failure.is_some() { self.failures_in_a_row + 1 } else { 0 };
        if failure.is_some() {
            self.failed_call =
                Some(FailedCall { tool: call.name, call_id, content: content.to_owned() });
        }
    }

    /// Whether such a failure counts towards `error_threshold`. Calls that are not executed do not count,
    /// except those that a model makes although it may make none.
    fn counts_as_failing(&self, failure: CallFailure) -> bool {
        let may_call = self.rules.tool_choice != ToolChoicePolicy::None;
        failure.counts_as_failing() || (failure == CallFailure::NotExecuted && !may_call)
    }

    /// The origin of a result's text: a tool, or the service itself.
    fn origin_of(&self, done: &ToolCallCompleted) -> Origin {
        let says_service = done.target != CallTarget::Tool
            || done.failure.is_some_and(|failure| !failure.is_of_tool());
        match self.suspicious {
            _ if says_service => Origin::Service,
            Some(call_id) if call_id == done.call_id => Origin::Suspicious,
            _ => Origin::Tool,
        }
    }

    /// Caches the result of a read-only call, if its tool allows that.
    fn keep(&mut self, done: &ToolCallCompleted) {
        let Phase::Acting(turn) = &self.phase else { return };
        let read = turn.dispatched.get(&done.call_id).filter(|call| call.effect == Effect::Read);
        if let Some(read) = read
            && self.rules.cached.contains(&done.tool)
            && done.failure.is_none()
            && let Some(call) = self.call(done.call_id)
        {
            let made = same_call(&read.made_with.made(call));
            self.cache.insert(made, done.content.clone());
        }
    }

    fn compacted(
        &mut self,
        compacted: &ContextCompacted,
        misplaced: FoldError,
    ) -> Result<(), FoldError> {
        self.conversation.clear_results(&compacted.cleared);
        if let Some(summary) = &compacted.summary {
            self.conversation
                .summarise(summary.turns, summary.text.as_str())
                .map_err(|_| misplaced)?;
        }
        self.last_tokens = compacted.tokens_after;
        self.counted_turns = self.conversation.turns().len();
        self.compactions.push(compacted.cause);
        self.summaries += u32::from(compacted.call.is_some());
        self.fruitless.note(compacted);
        Ok(())
    }

    fn responded(&mut self, response: &ModelResponded) {
        let message = response.message.clone();
        self.recorded_bytes = self.recorded_bytes.saturating_add(message.bytes());
        self.blame.cleared();
        let has_own_writer = |react: &ReactSection| react.final_model.is_some();
        if !(self.writes_answer() && self.rules.react.as_ref().is_some_and(has_own_writer)) {
            self.answered_last = Some(format!("{}/{}", response.provider, response.model));
        }
        let asked = if response.repeated { 2 } else { 1 };
        self.last_tokens = response.usage.total_tokens() / asked;
        self.counted_turns = self.conversation.turns().len();
        if message.decision.is_some() {
            self.undecided.clear();
        }
        let is_answer = self.single_shot
            || self.limit.is_some()
            || response.finish_reason == FinishReason::Refusal;
        if message.tool_calls.is_empty() || is_answer {
            self.answered(message, response.finish_reason);
            return;
        }
        self.blank_answers = 0;
        self.unfinished = None;
        if !self.only_hands_over(&message) {
            self.required_call = RequiredCall::Settled;
        }
        if !message.text.is_empty() {
            self.raw_response.clone_from(&message.text);
        }
        let cut_off = response.finish_reason == FinishReason::Length;
        self.phase = Phase::Acting(OpenTurn { cut_off, ..OpenTurn::of(message) });
    }

    /// Whether the message calls only handoffs. Under a tool choice that any tool satisfies, they do not
    /// count as the required call.
    fn only_hands_over(&self, message: &AssistantMessage) -> bool {
        let is_handoff =
            |name: &str| matches!(Delegation::of_tool(name), Some(Delegation::Handoff(_)));
        self.rules.tool_choice == ToolChoicePolicy::FirstRequired
            && self.rules.has_tools_of_its_own
            && message.tool_calls.iter().all(|call| is_handoff(&call.name))
    }

    /// A response that counts as an answer. The first truncated one, and a pause, are sent back at once.
    /// It has calls only if none of them may be executed.
    fn answered(&mut self, mut message: AssistantMessage, finish_reason: FinishReason) {
        let says_nothing = message.tool_calls.is_empty() && is_blank(&message.text);
        if says_nothing && finish_reason != FinishReason::Pause {
            message.opaque = None; // thinking without an answer is not sent back
        }
        let beginning = self.unfinished.take();
        let cut_off_again = beginning.is_some() || self.single_shot || self.limit.is_some();
        self.raw_response = match beginning {
            Some(beginning) if message.decision.is_none() => beginning + &message.text,
            _ => message.text.clone(), // a decision was read from all of it
        };
        if self.limit.is_some()
            && is_blank(&self.raw_response)
            && let Some(written) = output_of(&message)
        {
            self.raw_response.clone_from(&written.arguments);
        }
        if !is_blank(&self.raw_response) {
            self.blank_answers = 0;
        }
        match finish_reason {
            FinishReason::Length if !cut_off_again => {
                self.unfinished = Some(self.raw_response.clone());
                self.required_call = RequiredCall::Settled;
                self.push_turn(message, Vec::new());
                self.conversation.push_user(phrases::CONTINUE);
                self.phase = Phase::BetweenIterations;
            }
            FinishReason::Pause if !self.single_shot && self.limit.is_none() => {
                self.push_turn(message, Vec::new());
                self.phase = Phase::BetweenIterations;
            }
            _ if message.tool_calls.is_empty() => {
                self.phase = Phase::Answered { message, finish_reason };
            }
            _ => {
                let answered = Some(finish_reason);
                self.phase = Phase::Acting(OpenTurn { answered, ..OpenTurn::of(message) });
            }
        }
    }

    /// Adds a call's result. The last one closes the turn, unless a proposal waits for its verdict.
    fn answer(&mut self, result: ToolResult, misplaced: FoldError) -> Result<(), FoldError> {
        let call_id = result.call_id;
        let turn = self.turn(misplaced.clone())?;
        if !turn.message.tool_calls.iter().any(|call| call.id == call_id) {
            return Err(misplaced);
        }
        turn.answers.insert(call_id, result);
        let is_over = turn.open_calls().next().is_none() && turn.answered.is_none();
        if is_over && turn.proposal.is_none() {
            self.close_turn(None, "", false, phrases::LEFT_OPEN);
            self.phase = Phase::BetweenIterations;
        }
        Ok(())
    }

    fn proposed(&mut self, proposal: Proposal, misplaced: FoldError) -> Result<(), FoldError> {
        if self.failed_call.as_ref().is_some_and(|failed| failed.tool == self.output_tool()) {
            self.failures_in_a_row = 0; // this one is whole
        }
        if let Some(text) = proposal.malformed.as_ref().and(proposal.output.as_str()) {
            text.clone_into(&mut self.raw_response);
        } else {
            self.raw_response = proposal.output.to_string();
        }
        match (&mut self.phase, proposal.call_id) {
            (Phase::Acting(turn), Some(call_id)) => {
                let superseded = ToolResult::of_service(call_id, phrases::OUTPUT_SUPERSEDED, false);
                turn.answers.insert(call_id, superseded);
                turn.proposal = Some(proposal.clone());
                self.proposal = Some(proposal);
                Ok(())
            }
            _ => Err(misplaced),
        }
    }

    /// Moves the model's last response, with a result for every call, into the conversation. `judged` is the
    /// call whose proposal was judged; its result is the verdict. `left` is the result of the other calls that
    /// have none.
    fn close_turn(
        &mut self,
        judged: Option<uuid::Uuid>,
        verdict: &str,
        is_error: bool,
        left: &str,
    ) {
        match std::mem::replace(&mut self.phase, Phase::BetweenIterations) {
            Phase::Acting(mut turn) => {
                let results = turn.message.tool_calls.iter().map(|call| {
                    if judged == Some(call.id) {
                        return ToolResult::of_service(call.id, verdict, is_error);
                    }
                    let is_tool = call.target == CallTarget::Tool;
                    let open = || ToolResult::of_service(call.id, left, is_tool);
                    turn.answers.remove(&call.id).unwrap_or_else(open)
                });
                let results = results.collect();
                self.push_turn(turn.message, results);
            }
            Phase::Answered { message, .. } => self.push_turn(message, Vec::new()),
            _ => {}
        }
    }

    fn close_last_turn(&mut self, is_accepted: bool) {
        let proposing = match &self.phase {
            Phase::Acting(turn) => {
                let submit =
                    || turn.open_calls().find(|(_, call)| call.target == CallTarget::Submit);
                let written = || turn.answered.and_then(|_| output_of(&turn.message));
                turn.proposal
                    .as_ref()
                    .and_then(|p| p.call_id)
                    .or_else(|| submit().map(|(_, call)| call.id))
                    .or_else(|| written().map(|call| call.id))
            }
            _ => None,
        };
        let verdict = if is_accepted { phrases::OUTPUT_ACCEPTED } else { phrases::RUN_ENDED };
        self.close_turn(proposing, verdict, !is_accepted, phrases::RUN_ENDED);
    }

    /// Replies to a text answer of the model.
    fn reply(&mut self, text: &str) {
        self.close_turn(None, "", false, phrases::LEFT_OPEN);
        self.conversation.push_user(text);
        self.phase = Phase::BetweenIterations;
    }

    fn push_turn(&mut self, message: AssistantMessage, results: Vec<ToolResult>) {
        let pushed = self.conversation.push_turn(message, results);
        debug_assert!(pushed.is_ok(), "results are made from the message's calls, in order");
    }
}

/// The call by which a message writes an output.
fn output_of(message: &AssistantMessage) -> Option<&ToolCall> {
    message.tool_calls.iter().find(|call| call.target == CallTarget::Output)
}

/// The conversation at the start of a run; `history` turns are of earlier runs. `None` if a stored turn is
/// invalid.
fn opening(system: &str, turns: &[Turn], history: usize) -> Option<Conversation> {
    let mut conversation = Conversation::new(system);
    for (place, turn) in turns.iter().enumerate() {
        if place == history {
            conversation.end_history();
        }
        match turn {
            Turn::User(text) => conversation.push_user(text.as_str()),
            Turn::Assistant(turn) => {
                conversation.push_turn(turn.message().clone(), turn.results().to_vec()).ok()?;
            }
        }
    }
    Some(conversation)
}
