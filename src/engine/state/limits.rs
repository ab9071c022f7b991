//! Limits that stop a run, and the last answer that a run may give at one.
//!
//! Each limit is checked in one place. A limit that is reached between the calls of a response answers the
//! rest of them first, so that no call is left open.

use std::collections::BTreeSet;
use std::sync::Arc;

use chrono::{DateTime, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::{FailedCall, Phase, State, Step};
use crate::engine::Contract;
use crate::engine::phrases;
use crate::event::{
    ApprovalBasis, Awaited, Circumstances, LimitReached, RunEvent, SharedRequests, WaitKind,
};
use crate::message::{ToolCall, Usage};
use crate::providers::estimate;
use crate::run::{
    Amounts, CapExceeded, Consumption, Descendants, OnLimit, Outcome, Period, RunError, StopAction,
    TerminationReason, Usd,
};

/// A model call is not worth making with fewer tokens than this left in a budget of tokens or
/// dollars.
pub(in crate::engine) const LEAST_TOKENS: u64 = 256;

/// Bytes of answers and results in one run. The whole journal is in memory when the run is resumed or read.
pub(super) const MAX_RECORDED: usize = 32 << 20;

/// The limit of requests to the network.
const MAX_REQUESTS: &str = "network.max_requests";

/// Tokens of the answer that a run may still give when a limit was reached.
const LAST_ANSWER_TOKENS: u64 = 1024;

/// After so many equal calls with equal results in a row, the model gets a note.
const STUCK_NOTE: u32 = 3;
/// After so many in a row, the run ends.
const STUCK_END: u32 = 5;

impl State {
    /// The end of a run after too many failures in a row, a failure that must not happen, or no progress;
    /// and why the open calls are not executed.
    pub(super) fn halted(&self, now: DateTime<Utc>) -> Option<(&'static str, RunEvent)> {
        let threshold = self.rules.limits.error_threshold;
        if self.rules.throw_on_tool_failure
            && let Some(failed) = self.failed_call.as_ref().filter(|failed| self.is_tool(failed))
        {
            let context =
                json!({"tool": failed.tool, "call_id": failed.call_id, "result": failed.content});
            let message = format!("A call of {} failed.", failed.tool);
            let end = self.failed(now, TerminationReason::ToolFailure, message, context);
            return Some(("an earlier call failed", end));
        }
        if self.failures_in_a_row >= threshold {
            let last = self
                .failed_call
                .as_ref()
                .map(|failed| json!({"tool": failed.tool, "result": failed.content}));
            let context = json!({"consecutive_failures": self.failures_in_a_row, "error_threshold": threshold,
                "last_failure": last});
            let message = format!("{threshold} tool calls failed in a row.");
            let end = self.failed(now, TerminationReason::Error, message, context);
            return Some(("the error threshold was reached", end));
        }
        if self.streak.times >= STUCK_END {
            let context = json!({"tool": self.streak.tool, "repetitions": self.streak.times});
            let message = format!(
                "The same call of {} returned the same result every time.",
                self.streak.tool
            );
            let end = self.failed(now, TerminationReason::Stuck, message, context);
            return Some(("the run makes no progress", end));
        }
        None
    }

    /// Whether the failed call was one of a tool, and not of the output or submit tool.
    fn is_tool(&self, failed: &FailedCall) -> bool {
        failed.tool != self.output_tool() && Some(failed.tool.as_str()) != self.submit_tool()
    }

    /// The end of a run that reached a limit while another of its calls waits.
    pub(super) fn struck(&self, now: DateTime<Utc>) -> Option<Step> {
        let out_of_budget = self.out_of_requests(now).or_else(|| self.out_of_files(now));
        let out_of_time = || self.is_out_of_time(now).then(|| self.out_of_time(now));
        let halted = || self.halted(now).map(|(why, end)| self.end_mid_turn(why, end));
        out_of_budget.or_else(out_of_time).or_else(halted)
    }

    /// Whether the wall-clock limit is reached. Time in which the run is parked does not count.
    pub(super) fn is_out_of_time(&self, now: DateTime<Utc>) -> bool {
        self.milliseconds_left(now).is_some_and(|left| left <= 0)
    }

    /// The note that is added to a repeated result.
    pub fn stuck_note(&self, call_id: Uuid, result: &str) -> Option<String> {
        if self.streak.times + 1 < STUCK_NOTE {
            return None; // the streak is too short, whatever the result
        }
        let times = self.streak.with(self.call(call_id)?, result).times;
        (times >= STUCK_NOTE).then(|| phrases::stuck(times))
    }

    /// The end of a run whose calls, tokens, dollars or iterations are used up, or its last model
    /// call.
    pub(super) fn next_limit(&self, now: DateTime<Utc>) -> Option<RunEvent> {
        let (limits, totals, budget) = (&self.rules.limits, &self.totals, &self.rules.budget);
        if let Some(spent) = self.spent() {
            return Some(self.limit_reached(spent, now));
        }
        let reached = if totals.iterations >= limits.max_iterations {
            self.too_many_iterations(totals.iterations, limits.max_iterations)
        } else if self.iteration >= limits.max_iterations_per_attempt {
            self.too_many_iterations(self.iteration, limits.max_iterations_per_attempt)
        } else if u64::from(totals.iterations) >= budget.max_iterations {
            over_budget("max_iterations", totals.iterations.into(), Some(budget.max_iterations))
        } else if self.recorded_bytes >= MAX_RECORDED {
            over_budget("recorded_bytes", self.recorded_bytes, Some(MAX_RECORDED))
        } else {
            return None;
        };
        Some(self.limit_reached(reached, now))
    }

    /// The event for a reached limit: the end, or one more model call without tools.
    pub(super) fn limit_reached(&self, limit: LimitReached, now: DateTime<Utc>) -> RunEvent {
        if self.rules.on_limit == OnLimit::Answer && self.limit.is_none() && !self.single_shot {
            let (attempt, iteration) = (self.attempt, self.iteration + 1);
            let answer_only = self.rules.react.is_some();
            return RunEvent::IterationStarted {
                attempt,
                iteration,
                answer_only,
                limit: Some(limit),
            };
        }
        self.ended_at(&limit, now)
    }

    /// The end of a run at a limit.
    pub(super) fn ended_at(&self, limit: &LimitReached, now: DateTime<Utc>) -> RunEvent {
        let (reason, error) = (limit.reason, limit.error.clone());
        self.ended(now, Outcome::Failed { reason, error, raw_response: self.raw_response.clone() })
    }

    /// The answer that a run gives at a limit.
    pub(super) fn partial(
        &self,
        output: Value,
        limit: &LimitReached,
        now: DateTime<Utc>,
    ) -> RunEvent {
        let raw_response = self.raw_response.clone();
        let unchecked = match &self.rules.contract {
            Contract::Text { .. } => Vec::new(),
            Contract::Structured { checks, .. } => checks.clone(),
        };
        let reason = limit.reason;
        let partial = true;
        self.ended(now, Outcome::Completed { output, raw_response, reason, partial, unchecked })
    }

    /// Counts what the runs below a child run have taken against its own budget of tokens and dollars.
    pub fn count_below(&mut self, below: Usage) {
        self.below = below;
    }

    /// What counts against the run's own budget of tokens and dollars.
    pub fn taken(&self) -> Usage {
        let mut taken = self.totals.usage;
        taken.add(&self.below);
        taken
    }

    /// The budget of tokens or dollars that is too small for another model call.
    pub(super) fn spent(&self) -> Option<LimitReached> {
        let (usage, budget) = (self.taken(), &self.rules.budget);
        let of_parent = &self.rules.caps_of_tree;
        if self.tokens_left().is_some_and(|left| left < LEAST_TOKENS) {
            let needs = self.next_input().saturating_add(LEAST_TOKENS);
            let (used, max) = (usage.total_tokens(), budget.max_total_tokens);
            let limit = too_little("max_total_tokens", used, max, Some(needs));
            return Some(if of_parent.tokens { of_tree(limit) } else { limit });
        }
        if self.affordable_output().is_some_and(|left| left < LEAST_TOKENS) {
            let spent = usage.cost_micro_usd.or_else(|| (usage.total_tokens() == 0).then_some(0));
            let price = self.rules.price.filter(|_| spent.is_some());
            let needs = price.map(|price| price.at_most(self.input_tokens(), LEAST_TOKENS));
            let (used, max) = (spent.unwrap_or(0), budget.max_cost_usd.map(Usd::dollars));
            let used = Usd::from_micro(used).dollars();
            let limit = too_little("max_cost_usd", used, max, needs.map(dollars));
            return Some(if of_parent.cost { of_tree(limit) } else { limit });
        }
        None
    }

    /// The end of a run whose failed tries of the current model call have used up the budget.
    pub fn spent_by_tries(&self, now: DateTime<Utc>) -> Option<RunEvent> {
        let spent = self.spent().filter(|_| self.limit.is_none())?;
        Some(self.limit_reached(spent, now))
    }

    /// Tokens that the next answer may have; `None` without a budget.
    pub fn answer_tokens(&self) -> Option<u64> {
        if self.limit.is_some() {
            return Some(LAST_ANSWER_TOKENS);
        }
        self.tokens_left().into_iter().chain(self.affordable_output()).min()
    }

    /// Tokens that the token budget leaves for the next answer, after its input; `None` without such a budget.
    pub(super) fn tokens_left(&self) -> Option<u64> {
        let max = self.rules.budget.max_total_tokens?;
        Some(max.saturating_sub(self.taken().total_tokens()).saturating_sub(self.next_input()))
    }

    /// Tokens of output that the budget in dollars allows for the next call; `None` without such a budget.
    /// Zero if the price or the cost so far is unknown: a budget that cannot be enforced counts as used up.
    pub(super) fn affordable_output(&self) -> Option<u64> {
        let max = self.rules.budget.max_cost_usd?.micro();
        let usage = self.taken();
        let spent = usage.cost_micro_usd.or_else(|| (usage.total_tokens() == 0).then_some(0));
        let input = self.input_tokens();
        let left = spent
            .zip(self.rules.price)
            .and_then(|(spent, price)| price.affordable_output(input, max - spent));
        Some(left.unwrap_or(0))
    }

    /// Tokens that the next model call reads at most, estimated: by size, and by what the last call took and what
    /// was added since.
    pub fn input_tokens(&self) -> u64 {
        let said = estimate::of_conversation(&self.conversation, self.readers())
            + self.rules.offered_tokens;
        said.max(self.next_input())
    }

    /// Whether the next model call is the last one, after a reached limit.
    pub fn is_last_answer(&self) -> bool {
        self.limit.is_some()
    }

    /// The events if the shared budget does not allow the next call, which needs at least `needs`.
    pub fn shared_budget_spent(
        &self,
        refusal: &CapExceeded,
        needs: Amounts,
        now: DateTime<Utc>,
    ) -> Vec<RunEvent> {
        let CapExceeded { limit, used, reserved, max, .. } = *refusal;
        let mut reached = of_tree(match limit {
            "max_cost_usd" => {
                too_little(limit, dollars(used), Some(dollars(max)), Some(dollars(needs.micro_usd)))
            }
            "max_total_tokens" => too_little(limit, used, Some(max), Some(needs.tokens)),
            _ => over_budget(limit, used, Some(max)),
        });
        if reserved > 0 && !refusal.may_be_less() {
            let by_others = format!(" Calls under way take {reserved} of it.");
            reached.error.message += &by_others;
        }
        let mut events = self.not_executed("the budget that the run shares with others is used up");
        events.push(match limit {
            "max_files_modified" | "max_lines_changed" | MAX_REQUESTS => {
                self.ended_at(&reached, now)
            }
            _ => self.limit_reached(reached, now),
        });
        events
    }

    /// How many files the call would modify that the run has not modified yet.
    pub fn new_files(&self, consumes: &Consumption) -> u64 {
        consumes.files_modified.difference(&self.totals.consumption.files_modified).count() as u64
    }

    /// What was counted for a call of the open turn that was dispatched before, e.g. before a crash.
    pub fn counted(&self, call: Uuid) -> Option<&Consumption> {
        let Phase::Acting(turn) = &self.phase else { return None };
        turn.counted.get(&call)
    }

    /// The events for a call that would exceed the budget of files, lines or requests; it is not executed.
    pub fn over_budget_with(
        &self,
        consumes: &Consumption,
        now: DateTime<Utc>,
    ) -> Option<Vec<RunEvent>> {
        let (used, budget) = (&self.totals.consumption, &self.rules.budget);
        let files = budget.counted_files(used).saturating_add(self.new_files(consumes));
        let lines = used.lines_changed.saturating_add(consumes.lines_changed);
        let limit = if files > budget.files() && !consumes.files_modified.is_empty() {
            self.over_files()
        } else if lines > budget.max_lines_changed && consumes.lines_changed > 0 {
            let max = Some(budget.max_lines_changed);
            let limit = over_budget("max_lines_changed", used.lines_changed, max);
            if self.rules.caps_of_tree.lines { of_tree(limit) } else { limit }
        } else if let Some(max) = self.rules.max_network_requests
            && consumes.network_requests > 0
            && used.network_requests.saturating_add(consumes.network_requests) > max
        {
            over_budget(MAX_REQUESTS, used.network_requests, Some(max))
        } else {
            return None;
        };
        Some(self.ended_mid_turn("the budget is used up", self.ended_at(&limit, now)))
    }

    /// How many further files the run may modify.
    pub fn files_left(&self) -> u64 {
        let budget = &self.rules.budget;
        budget.files().saturating_sub(budget.counted_files(&self.totals.consumption))
    }

    /// How many further network requests the run may send; `None` without a limit.
    pub fn requests_left(&self) -> Option<u64> {
        let max = self.rules.max_network_requests?;
        Some(max.saturating_sub(self.totals.consumption.network_requests))
    }

    /// The end of a run after a call tried to exceed the limit of network requests.
    pub(super) fn out_of_requests(&self, now: DateTime<Utc>) -> Option<Step> {
        let limit = if let Some(SharedRequests { used, max }) = self.over_requests?.shared {
            of_tree(over_budget(MAX_REQUESTS, used, Some(max)))
        } else {
            let used = self.totals.consumption.network_requests;
            over_budget(MAX_REQUESTS, used, self.rules.max_network_requests)
        };
        Some(self.end_mid_turn("the budget is used up", self.ended_at(&limit, now)))
    }

    /// The end of a run whose programs have changed more files than the definition allows, which is known only
    /// afterwards.
    pub(super) fn out_of_files(&self, now: DateTime<Utc>) -> Option<Step> {
        let budget = &self.rules.budget;
        let (used, max) = (budget.counted_files(&self.totals.consumption), budget.files());
        if used <= max || matches!(self.phase, Phase::Ended { .. }) {
            return None;
        }
        Some(self.end_mid_turn("the budget is used up", self.ended_at(&self.over_files(), now)))
    }

    fn over_files(&self) -> LimitReached {
        let budget = &self.rules.budget;
        let used = budget.counted_files(&self.totals.consumption);
        let limit = over_budget("max_files_modified", used, Some(budget.files()));
        if self.rules.caps_of_tree.files { of_tree(limit) } else { limit }
    }

    /// Answers the open calls and ends the run, when the budget for calls is used up.
    pub(super) fn out_of_calls(&self, now: DateTime<Utc>) -> Step {
        let (made, max) = (self.totals.tool_calls_made.into(), self.rules.budget.max_tool_calls);
        let limit = over_budget("max_tool_calls", made, Some(max));
        self.end_mid_turn("the budget for tool calls is used up", self.limit_reached(limit, now))
    }

    pub(super) fn out_of_time(&self, now: DateTime<Utc>) -> Step {
        let max = self.rules.budget.max_duration_seconds;
        let context = json!({"limit": "max_duration_seconds", "max_duration_seconds": max,
            "elapsed_seconds": self.elapsed_ms(now) / 1000});
        let message = format!("The run took longer than {max} seconds.");
        let end = self.failed(now, TerminationReason::DurationExceeded, message, context);
        self.end_mid_turn("the run's time is up", end)
    }

    fn too_many_iterations(&self, count: u32, max: u32) -> LimitReached {
        let context =
            json!({"attempt": self.attempt, "iteration_count": count, "max_iterations": max});
        limit(
            TerminationReason::MaxIterations,
            format!("The limit of {max} iterations was reached."),
            context,
        )
    }

    /// Whether there are stop conditions that were not met yet.
    pub(super) fn has_conditions(&self) -> bool {
        self.conditions_met.len() < self.rules.budget.stop_conditions.len()
    }

    /// The indices of the stop conditions that were met and handled.
    pub fn conditions_met(&self) -> &BTreeSet<usize> {
        &self.conditions_met
    }

    /// The variables of stop conditions: `usage` and `counters` of the run and its descendants, and `elapsed`.
    pub fn facts(&self, below: &Descendants, now: DateTime<Utc>) -> Value {
        let totals = &self.totals;
        let mut usage = totals.usage;
        usage.add(&below.usage);
        let mut used = below.consumption.clone();
        used.add(&totals.consumption);
        let cost = usage.cost_micro_usd.or_else(|| (usage.total_tokens() == 0).then_some(0));
        #[expect(clippy::cast_precision_loss, reason = "a run is not that long")]
        let elapsed = self.active_ms(now).max(0) as f64 / 1000.0;
        json!({
            "usage": {
                "input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens,
                "cached_input_tokens": usage.cached_input_tokens, "cache_write_tokens": usage.cache_write_tokens,
                "reasoning_tokens": usage.reasoning_tokens, "total_tokens": usage.total_tokens(),
                "cost_usd": cost.map(|cost| Usd::from_micro(cost).dollars()),
            },
            "counters": {
                "iterations": u64::from(totals.iterations) + below.iterations,
                "attempts": u64::from(totals.attempts) + below.attempts,
                "tool_calls": u64::from(totals.tool_calls_made) + below.tool_calls,
                "files_read": used.files_read, "files_written": used.files_written,
                "files_modified": used.files() + below.files_modified,
                "lines_changed": used.lines_changed,
                "commands": used.commands, "network_requests": used.network_requests,
            },
            "elapsed": elapsed,
        })
    }

    /// The events after the evaluation of stop conditions. `met` is the first condition that is met, or that
    /// failed to evaluate, with the error. `facts`, `id` and `patience` are for the request to a person.
    pub fn stop_conditions_evaluated(
        &self,
        met: Option<(usize, Option<String>)>,
        facts: Value,
        id: Uuid,
        patience: Period,
        now: DateTime<Utc>,
    ) -> Vec<RunEvent> {
        let Some((condition, undecided)) = met else { return vec![self.iteration_started()] };
        let why =
            undecided.map_or("is met".to_owned(), |error| format!("cannot be decided ({error})"));
        let Some(rule) = self.rules.budget.stop_conditions.get(condition) else {
            return Vec::new();
        };
        match rule.action {
            StopAction::Stop => vec![self.stopped_by(condition, &why, now)],
            StopAction::Warn => {
                let warning = format!("A stop condition {why}: {}", rule.when);
                vec![RunEvent::BudgetWarned { condition, warning }]
            }
            StopAction::Escalate => vec![RunEvent::ApprovalRequested(Awaited {
                basis: ApprovalBasis::default(),
                circumstances: Circumstances::default(),
                decision: None,
                escalation_target: None,
                actions: Arc::default(),
                call_id: id,
                kind: WaitKind::Escalation,
                tool: String::new(),
                arguments: facts,
                reason: format!("A stop condition {why}: {}", rule.when),
                expires_at: Some(now + patience.delta()),
                condition: Some(condition),
                child_run_id: None,
                input: None,
            })],
        }
    }

    /// The call of the open turn with that id.
    pub fn call(&self, id: Uuid) -> Option<&ToolCall> {
        let Phase::Acting(turn) = &self.phase else { return None };
        turn.message.tool_calls.iter().find(|call| call.id == id)
    }
}

/// The limit of a used-up budget.
pub(super) fn over_budget<T: Into<Value>>(name: &str, used: T, max: Option<T>) -> LimitReached {
    let context = json!({"limit": name, "used": used.into(), "max": max.map(Into::into)});
    limit(TerminationReason::BudgetExceeded, format!("The budget {name} is used up."), context)
}

/// The same limit, of a budget that the run shares.
fn of_tree(mut reached: LimitReached) -> LimitReached {
    reached.error.message.push_str(" The run shares it with others.");
    if let Value::Object(context) = &mut reached.error.context {
        context.insert("shared".into(), true.into());
    }
    reached
}

/// The limit of a budget that is too small for the next model call, which needs at least `needs`; that is `None` if a
/// price is unknown.
fn too_little<T>(name: &str, used: T, max: Option<T>, needs: Option<T>) -> LimitReached
where
    T: Into<Value> + Copy + std::fmt::Display,
{
    let mut reached = over_budget(name, used, max);
    let max = max.map(|max| format!(" of {max}")).unwrap_or_default();
    reached.error.message = match needs {
        Some(needs) => format!(
            "The budget {name} does not pay for the next model call, which needs at least {needs}: {used}{max} is used."
        ),
        None => format!("The budget {name} cannot be kept: the price of a model is not known."),
    };
    if let (Value::Object(context), Some(needs)) = (&mut reached.error.context, needs) {
        context.insert("needs".into(), needs.into());
    }
    reached
}

fn dollars(micro: u64) -> f64 {
    Usd::from_micro(i64::try_from(micro).unwrap_or(i64::MAX)).dollars()
}

fn limit(reason: TerminationReason, message: String, context: Value) -> LimitReached {
    let code = reason.code().unwrap_or_default().to_owned();
    LimitReached { reason, error: RunError { code, message, context } }
}
