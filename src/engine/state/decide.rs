//! Decisions: what to do next, and how a run ends.
//!
//! The checks are in the order of the loop's specification: cancelled, interrupted by a crash (`crashes.rs`),
//! waiting (unless another call has reached a limit, or a child run has ended), deadline, then the phase.
//! Limits are in `limits.rs`, answers to a parked run in `waiting.rs`. Whatever ends the run between the calls
//! of one response answers the rest of them, so that no call is left open.

use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};

use super::crashes::unexecuted;
use super::{Dispatched, OpenTurn, Phase, Proposal, RequiredCall, State, Step, same_call};
use crate::bounds::json::{self, Unreadable};
use crate::drivers::Undecided;
use crate::engine::{Contract, output, phrases};
use crate::event::{CallFailure, DecisionFailed, RunEvent, ValidationError};
use crate::message::{CallTarget, FinishReason, ToolCall};
use crate::providers::ToolChoice;
use crate::run::{Outcome, RunStatus, TerminationReason, ToolChoicePolicy};
use crate::tools::results::unknown_outcome;

/// How a run ends whose last attempt failed, by the kind of failure.
const NO_OUTPUT: (TerminationReason, &str) =
    (TerminationReason::InvalidResponse, "No attempt proposed an output.");
const BLANK: (TerminationReason, &str) =
    (TerminationReason::InvalidResponse, "The model's answers are empty.");
const NO_CALL: (TerminationReason, &str) = (
    TerminationReason::InvalidResponse,
    "The model did not call the tool that tool_choice demands.",
);

impl State {
    /// What to do next, at this time.
    pub fn next(&self, now: DateTime<Utc>) -> Step {
        match &self.phase {
            Phase::Ended { .. } => return Step::Done,
            _ if self.cancel.is_some() => return self.cancelled(now),
            _ => {}
        }
        if let Some(asked) = self.reviews() {
            return Step::Record(asked);
        }
        match self.next_unless_reviewed(now) {
            Step::Record(events) => Step::Record(self.or_reviews(events)),
            step => step,
        }
    }

    fn next_unless_reviewed(&self, now: DateTime<Utc>) -> Step {
        if let Some(status) = self.parked() {
            if status == RunStatus::NeedsReview {
                return Step::Suspend(status);
            }
            let due = self.struck(now).or_else(|| self.call_of_ended_child());
            return due.unwrap_or(Step::Suspend(status));
        }
        let out_of_budget = || self.out_of_requests(now).or_else(|| self.out_of_files(now));
        if let Some(end) = self.crashed_too_often(now).or_else(out_of_budget) {
            return end;
        }
        if let Some(condition) = self.not_continued {
            return self.end_mid_turn("the run ended", self.stopped_by(condition, "was met", now));
        }
        if self.is_out_of_time(now) {
            return self.out_of_time(now);
        }
        match &self.phase {
            Phase::Opening => Step::Open,
            Phase::Ended { .. } => Step::Done,
            Phase::BetweenAttempts => {
                Step::Record(vec![RunEvent::AttemptStarted { attempt: self.attempt + 1 }])
            }
            Phase::BetweenIterations => self.next_iteration(now),
            Phase::Calling { .. } => self.next_model_call(now),
            Phase::Acting(OpenTurn { answered: Some(finish_reason), .. }) => {
                let open = self.not_executed(match finish_reason {
                    FinishReason::Refusal => "the model refused to answer",
                    _ => "only an answer was wanted",
                });
                if open.is_empty() {
                    return self.text_answer(*finish_reason, now);
                }
                Step::Record(open)
            }
            Phase::Acting(turn) => self.next_call(turn, now),
            Phase::Answered { finish_reason, .. } => self.text_answer(*finish_reason, now),
        }
    }

    /// Whether and which tool the next model call must call.
    pub fn choice(&self) -> ToolChoice {
        if self.single_shot {
            return ToolChoice::Auto;
        }
        if self.limit.is_some() {
            return ToolChoice::None;
        }
        match &self.rules.tool_choice {
            ToolChoicePolicy::None => ToolChoice::None,
            // Every decision is a call or an output.
            ToolChoicePolicy::Required if self.rules.react.is_some() => ToolChoice::Auto,
            ToolChoicePolicy::Required => ToolChoice::Required,
            ToolChoicePolicy::FirstRequired if self.required_call != RequiredCall::Settled => {
                ToolChoice::Required
            }
            ToolChoicePolicy::Tool(name)
                if self.required_call != RequiredCall::Settled
                    && self.rules.offer(name, &self.skills) =>
            {
                ToolChoice::Tool(name.clone())
            }
            ToolChoicePolicy::Auto
            | ToolChoicePolicy::FirstRequired
            | ToolChoicePolicy::Tool(_) => ToolChoice::Auto,
        }
    }

    fn next_iteration(&self, now: DateTime<Utc>) -> Step {
        if let Some(given) = &self.rules.given {
            return self.with_given(given, now);
        }
        if let Some((_, end)) = self.halted(now) {
            return Step::Record(vec![end]);
        }
        if self
            .rules
            .react
            .as_ref()
            .is_some_and(|react| self.undecided.len() > react.max_retries as usize)
        {
            let context = json!({"attempt": self.attempt, "errors": self.undecided});
            let message = "The model made no decision that can be used.";
            return Step::Record(vec![self.failed(
                now,
                TerminationReason::InvalidResponse,
                message,
                context,
            )]);
        }
        match self.next_limit(now) {
            Some(limit) => Step::Record(vec![limit]),
            None if self.has_conditions() => Step::EvaluateStopConditions,
            None => Step::Record(vec![self.iteration_started()]),
        }
    }

    pub(super) fn iteration_started(&self) -> RunEvent {
        let (attempt, iteration) = (self.attempt, self.iteration + 1);
        let answer_only = match &self.phase {
            Phase::Answered { .. } => self.is_answer_due(),
            _ => self.answer_only && (self.unfinished.is_some() || self.blank_answers > 0),
        };
        RunEvent::IterationStarted { attempt, iteration, answer_only, limit: None }
    }

    /// Whether the step begins an iteration whose model call reads the conversation as it is now.
    pub fn begins_iteration(&self, step: &Step) -> bool {
        let begins = match step {
            Step::Record(events) => {
                events.iter().any(|event| matches!(event, RunEvent::IterationStarted { .. }))
            }
            Step::EvaluateStopConditions => true,
            _ => false,
        };
        begins && self.compaction().is_none()
    }

    /// A summary, or tries before a crash, may have used up the budget that the iteration began with.
    fn next_model_call(&self, now: DateTime<Utc>) -> Step {
        if self.limit.is_none()
            && let Some(spent) = self.spent()
        {
            return Step::Record(vec![self.limit_reached(spent, now)]);
        }
        self.compaction().map_or_else(|| Step::CallModel(self.choice()), Step::Compact)
    }

    fn next_call(&self, turn: &OpenTurn, now: DateTime<Utc>) -> Step {
        if let Some((why, end)) = self.halted(now) {
            return self.end_mid_turn(why, end);
        }
        if let Some(events) = self.wrong_calls(turn, now) {
            return Step::Record(events);
        }
        if self.choice() == ToolChoice::None {
            let open = self.not_executed("tool_choice is none");
            if !open.is_empty() {
                return Step::Record(open);
            }
        }
        if self.is_reflected()
            && let Some(proposal) = &turn.proposal
        {
            return Step::Reflect(proposal.clone());
        }
        let mut submitted = None;
        for (index, call) in turn.open_calls() {
            match call.target {
                _ if turn.cut_off => {
                    let content = phrases::CUT_OFF.to_owned();
                    return Step::Record(vec![unexecuted(call, CallFailure::Truncated, content)]);
                }
                _ if turn.is_blocked && self.rules.stop_on_tool_block => {
                    let content = phrases::AFTER_A_BLOCK.to_owned();
                    return Step::Record(vec![unexecuted(call, CallFailure::NotExecuted, content)]);
                }
                CallTarget::Submit if self.proposal.is_none() => {
                    return self.submitted_nothing(now);
                }
                CallTarget::Submit => submitted = submitted.or(Some(call.id)),
                CallTarget::Output => return Step::Record(vec![self.proposed_by(call)]),
                CallTarget::Tool => return self.next_tool_call(turn, index, call, now),
            }
        }
        let proposal = match submitted {
            Some(submit) => {
                self.proposal.clone().map(|proposal| Proposal { call_id: Some(submit), ..proposal })
            }
            None => turn.proposal.clone(),
        };
        proposal.map_or_else(|| self.next_iteration(now), Step::Check)
    }

    fn next_tool_call(
        &self,
        turn: &OpenTurn,
        index: usize,
        call: &ToolCall,
        now: DateTime<Utc>,
    ) -> Step {
        let is_lost = |call: &Dispatched| call.is_final() && call.reconcilable.is_none();
        if turn.dispatched.get(&call.id).is_some_and(is_lost) {
            return Step::Record(vec![unknown_outcome(call.id, call.name.clone())]);
        }
        let left =
            self.rules.budget.max_tool_calls.saturating_sub(self.totals.tool_calls_made.into());
        if let Some(resolved) = turn.resolved.get(&call.id) {
            return match self.resolved_call(index, call, resolved) {
                Step::CallTools(_) if left == 0 => self.out_of_calls(now),
                step => step,
            };
        }
        if !self.has_tool_calls_left(turn, index) {
            let content = phrases::too_many_calls(self.rules.limits.max_tool_calls_per_iteration);
            return Step::Record(vec![unexecuted(call, CallFailure::Excess, content)]);
        }
        if left == 0 {
            return self.out_of_calls(now);
        }
        let mut calls = vec![self.pending(index, call, None)];
        if self.rules.concurrent.contains(&call.name) {
            let next = turn.message.tool_calls.iter().enumerate().skip(index + 1);
            let fit = next.take_while(|(index, call)| {
                self.rules.concurrent.contains(&call.name)
                    && call.target == CallTarget::Tool
                    && !turn.is_answered(call)
                    && !turn.resolved.contains_key(&call.id)
                    && self.has_tool_calls_left(turn, *index)
                    && !self.is_repeated(turn, *index, call)
            });
            let left = usize::try_from(left - 1).unwrap_or(usize::MAX);
            calls.extend(fit.take(left).map(|(index, call)| self.pending(index, call, None)));
        }
        Step::CallTools(calls)
    }

    /// Whether the call repeats an earlier one of the response, whose result will be reused.
    fn is_repeated(&self, turn: &OpenTurn, index: usize, call: &ToolCall) -> bool {
        let earlier = turn.message.tool_calls.iter().take(index);
        self.rules.cached.contains(&call.name)
            && earlier.map(same_call).any(|earlier| earlier == same_call(call))
    }

    /// The end of a run whose model submits before it has proposed an output.
    fn submitted_nothing(&self, now: DateTime<Utc>) -> Step {
        let context = json!({"attempt": self.attempt});
        let message = "The model submitted before it proposed an output.";
        let end = self.failed(now, TerminationReason::SubmitBeforeOutput, message, context);
        self.end_mid_turn("the run ended", end)
    }

    pub(super) fn is_reflected(&self) -> bool {
        matches!(&self.rules.contract, Contract::Structured { submit: Some(_), .. })
    }

    /// The events for calls of other tools than a strictly required one: none is executed.
    fn wrong_calls(&self, turn: &OpenTurn, now: DateTime<Utc>) -> Option<Vec<RunEvent>> {
        let ToolChoicePolicy::Tool(name) = &self.rules.tool_choice else { return None };
        let is_demanded = self.rules.strict_tool_choice
            && self.iteration == 1
            && !turn.cut_off
            && self.rules.offer(name, &self.skills);
        if !is_demanded || turn.message.tool_calls.iter().any(|call| call.name == *name) {
            return None;
        }
        let mut events = self.not_executed("tool_choice demands another tool");
        events.extend(self.choice_ignored(Some(name), now));
        Some(events)
    }

    /// The events for a text answer without a required call; `None` once that requirement is settled.
    fn missing_call(&self, now: DateTime<Utc>) -> Option<Vec<RunEvent>> {
        let tool = match self.choice() {
            _ if self.required_call == RequiredCall::Settled => return None,
            ToolChoice::Auto | ToolChoice::None => return None,
            ToolChoice::Required => None,
            ToolChoice::Tool(name) => Some(name),
        };
        let tool = tool.as_deref();
        if self.rules.strict_tool_choice {
            return Some(self.choice_ignored(tool, now));
        }
        let (prompt, warning) = match self.required_call {
            RequiredCall::Open => (Some(phrases::call_a_tool(tool)), None),
            _ => (None, Some(self.not_called(tool))),
        };
        Some(vec![RunEvent::ToolChoiceUnmet { attempt: self.attempt, prompt, warning }])
    }

    /// The warning that a required call was not made. Without an output schema, the text is accepted.
    fn not_called(&self, tool: Option<&str>) -> String {
        let no_call = phrases::no_call(tool);
        match self.rules.contract {
            Contract::Text { .. } => format!("The model {no_call}; the answer was accepted."),
            Contract::Structured { .. } => {
                format!("The model {no_call}, though it was asked twice.")
            }
        }
    }

    fn choice_ignored(&self, tool: Option<&str>, now: DateTime<Utc>) -> Vec<RunEvent> {
        let errors =
            vec![ValidationError { pointer: String::new(), message: phrases::no_call(tool) }];
        self.attempt_failed(None, errors, phrases::call_a_tool(tool), NO_CALL, now)
    }

    fn proposed_by(&self, call: &ToolCall) -> RunEvent {
        let arguments = if call.arguments.trim().is_empty() { "{}" } else { &call.arguments };
        let (output, problem) = match json::read_exactly::<Value>(arguments) {
            Ok(output) => (output, None),
            Err(error) => {
                let problem = match &error {
                    Unreadable::Malformed(_) => format!("not valid JSON: {error}"),
                    beyond => beyond.to_string(),
                };
                (Value::String(call.arguments.clone()), Some(problem))
            }
        };
        let output = Arc::new(output);
        RunEvent::OutputProposed { call_id: Some(call.id), attempt: self.attempt, output, problem }
    }

    fn text_answer(&self, finish_reason: FinishReason, now: DateTime<Utc>) -> Step {
        let text = self.raw_response.as_str();
        if let Some(limit) = &self.limit {
            let is_answer = finish_reason != FinishReason::Refusal && !output::is_blank(text);
            let partial = is_answer.then(|| self.partial(output::from_text(text), limit, now));
            return Step::Record(vec![partial.unwrap_or_else(|| self.ended_at(limit, now))]);
        }
        let end = match (finish_reason, &self.rules.contract) {
            (FinishReason::Refusal, _) => {
                let context = json!({"provider_message": text});
                self.failed(
                    now,
                    TerminationReason::ModelRefused,
                    "The model refused to answer.",
                    context,
                )
            }
            (FinishReason::Length, _) => {
                self.invalid_response(now, "The model's answer was cut off by the output limit.")
            }
            _ if self.is_answer_due() => return self.next_iteration(now),
            _ if output::is_blank(text) => return self.blank_answer(now),
            _ if let Some(events) = self.missing_call(now) => return Step::Record(events),
            (_, Contract::Text { confirm: true }) if !self.confirmed && !self.single_shot => {
                RunEvent::ConfirmationRequested { prompt: phrases::CONFIRM.to_owned() }
            }
            (_, Contract::Text { .. }) => self.ended(now, self.completed(output::from_text(text))),
            (_, Contract::Structured { .. }) if self.single_shot => {
                match output::object_from_text(text) {
                    Ok(output) => {
                        let output = Arc::new(output);
                        return Step::Check(Proposal { call_id: None, output, malformed: None });
                    }
                    Err(why) => self.invalid_response(now, &why),
                }
            }
            (_, Contract::Structured { submit: None, .. }) if self.rules.react.is_some() => {
                let errors = vec![ValidationError {
                    pointer: String::new(),
                    message: phrases::NO_OBJECT.to_owned(),
                }];
                let feedback = phrases::another_final_answer(&errors);
                return Step::Record(self.attempt_failed(None, errors, feedback, NO_OUTPUT, now));
            }
            (_, Contract::Structured { tool, submit, .. }) => {
                let message =
                    "answered in plain text instead of calling the output tool".to_owned();
                let errors = vec![ValidationError { pointer: String::new(), message }];
                let is_decision = self.rules.react.is_some();
                let feedback = phrases::use_output_tool(is_decision, tool, submit.as_deref());
                return Step::Record(self.attempt_failed(None, errors, feedback, NO_OUTPUT, now));
            }
        };
        Step::Record(vec![end])
    }

    /// The step after a blank answer: it is requested once more, then the attempt fails.
    fn blank_answer(&self, now: DateTime<Utc>) -> Step {
        if self.single_shot {
            return Step::Record(vec![self.invalid_response(now, "The model's answer is empty.")]);
        }
        let (attempt, prompt) = (self.attempt, phrases::BLANK.to_owned());
        if self.blank_answers == 0 {
            return Step::Record(vec![RunEvent::AnswerBlank { attempt, prompt }]);
        }
        let message = phrases::NO_ANSWER.to_owned();
        let errors = vec![ValidationError { pointer: String::new(), message }];
        Step::Record(self.attempt_failed(None, errors, prompt, BLANK, now))
    }

    /// Whether the final answer has to be written in a separate call, now that the model has decided on it
    /// and was asked to verify it.
    fn is_answer_due(&self) -> bool {
        let confirmed = self.confirmed || self.rules.contract != Contract::Text { confirm: true };
        self.rules.react.as_ref().is_some_and(|react| react.final_via_inference)
            && !self.answer_only
            && confirmed
    }

    /// The event for an answer without a valid decision, which is requested again as long as limits and
    /// retries allow.
    pub fn decision_failed(&self, why: &Undecided) -> RunEvent {
        let (Undecided::NotFound(error) | Undecided::NotValid(error)) = why;
        let failed = DecisionFailed {
            attempt: self.attempt,
            iteration: self.iteration,
            error: error.clone(),
            feedback: phrases::decide_again(error),
        };
        match why {
            Undecided::NotFound(_) => RunEvent::DecisionExtractionFailed(failed),
            Undecided::NotValid(_) => RunEvent::DecisionValidationFailed(failed),
        }
    }

    fn cancelled(&self, now: DateTime<Utc>) -> Step {
        let request = self.cancel.as_ref();
        let phase = request.map_or("iteration", |request| request.phase.as_str());
        let reason = request.and_then(|request| request.reason.as_deref());
        let raw = self.raw_response.clone();
        let place = (self.attempt, self.iteration);
        let end = RunEvent::cancelled(phase, place, reason, raw, self.elapsed_ms(now));
        self.end_mid_turn("the run was cancelled", end)
    }

    /// What the run is doing, in the words of a cancelled run's error.
    pub(super) fn current_phase(&self) -> &'static str {
        match &self.phase {
            Phase::Opening => "queued",
            _ if !self.waiting.is_empty() => "approval",
            Phase::Calling { .. } => "model_call",
            Phase::Acting(turn) if self.is_reflected() && turn.proposal.is_some() => "validation",
            Phase::Acting(turn)
                if turn.open_calls().any(|(_, call)| call.target == CallTarget::Tool) =>
            {
                "tool_call"
            }
            Phase::Acting(_) => "validation",
            Phase::Answered { .. }
                if self.single_shot
                    && matches!(self.rules.contract, Contract::Structured { .. }) =>
            {
                "validation"
            }
            _ => "iteration",
        }
    }

    /// Answers the calls that are still open, then ends the run.
    pub(super) fn end_mid_turn(&self, why: &str, end: RunEvent) -> Step {
        Step::Record(self.ended_mid_turn(why, end))
    }

    pub(super) fn ended_mid_turn(&self, why: &str, end: RunEvent) -> Vec<RunEvent> {
        let mut events = self.not_executed(why);
        events.push(end);
        events
    }

    fn invalid_response(&self, now: DateTime<Utc>, message: &str) -> RunEvent {
        self.failed(
            now,
            TerminationReason::InvalidResponse,
            message,
            json!({"attempt": self.attempt}),
        )
    }

    pub(super) fn completed(&self, output: Value) -> Outcome {
        // A blank answer may lie between a proposal and its confirmation.
        let raw_response = match &self.proposal {
            Some(proposal) if output::is_blank(&self.raw_response) => proposal.output.to_string(),
            _ => self.raw_response.clone(),
        };
        Outcome::Completed {
            output,
            raw_response,
            reason: TerminationReason::Completed,
            partial: false,
            unchecked: Vec::new(),
        }
    }

    pub(super) fn failed(
        &self,
        now: DateTime<Utc>,
        reason: TerminationReason,
        message: impl Into<String>,
        context: Value,
    ) -> RunEvent {
        self.ended(now, Outcome::failed(reason, message, context, self.raw_response.clone()))
    }

    pub(super) fn ended(&self, now: DateTime<Utc>, outcome: Outcome) -> RunEvent {
        RunEvent::ended(outcome, self.elapsed_ms(now))
    }
}
