//! The replay of one run: its journal is folded again, and each recorded call is judged in the state of the run at
//! that time.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::calls::{RecordedDecision, recorded};
use super::differences::{Differences, Stopping, starts_runs};
use super::limits::ReplayLimits;
use super::{Change, Replay};
use crate::agents::Agent;
use crate::engine::plan::Rules;
use crate::engine::state::State;
use crate::event::{Event, RunEvent};
use crate::governance::{ActionKind, Call, Decision, Gate, Objection, Verdict};
use crate::run::{Budget, Overrides};
use crate::runtime::journals::by_run;
use crate::store::RunRecord;

/// An answer shows at most this many changes.
const MAX_EXAMPLES: usize = 100;

/// A definition as it judges a run.
pub(super) struct Judge {
    pub(super) gate: Gate,
    /// The agent, restricted by the parent if the run has one.
    pub(super) agent: Arc<Agent>,
}

/// A run with its judge.
pub(super) struct ReplayedRun {
    pub(super) run: RunRecord,
    pub(super) judge: Arc<Judge>,
    pub(super) differences: Differences,
    pub(super) limits: Arc<ReplayLimits>,
    pub(super) directory: Arc<str>,
    /// The number of its calls with a decision, if its journal cannot be read completely.
    pub(super) decided: Option<u64>,
}

/// Judges the calls of runs whose journals follow one another; `None` if the time limit is reached.
pub(super) fn judge_all(
    mut replay: Replay,
    runs: &[ReplayedRun],
    journals: &[Event],
    until: Instant,
) -> Option<Replay> {
    let journals = by_run(journals);
    for judged in runs {
        let journal = journals.get(&judged.run.id).copied().unwrap_or_default();
        replay.runs += 1;
        RunReplay::new(judged).judge(&mut replay, journal, until)?;
    }
    Some(replay)
}

/// A new decision, with the rule that decides and its reason.
type NewDecision = (Decision, &'static str, Option<String>);

/// The replay of one run.
struct RunReplay<'r> {
    judged: &'r ReplayedRun,
    client_tools: HashSet<String>,
    budget: Budget,
    state: State,
    /// The limit that would have ended the run by now.
    ended_by: Option<&'static str>,
    /// Calls that were counted.
    seen: HashSet<Uuid>,
    /// Calls that need an approval as before, and may be dispatched after it.
    asked: HashSet<Uuid>,
    /// Calls whose arguments an approver has replaced.
    edited: HashSet<Uuid>,
    /// Calls that would no longer need an approval, with the times of their requests.
    released: HashMap<Uuid, DateTime<Utc>>,
    /// Whether the model would have read something else by now, or may have.
    has_diverged: bool,
    /// New stop conditions that would have been met.
    conditions_met: BTreeSet<usize>,
    /// Whether it has started other runs.
    delegates: bool,
}

impl<'r> RunReplay<'r> {
    fn new(judged: &'r ReplayedRun) -> Self {
        let overrides: Overrides =
            serde_json::from_value(judged.run.overrides.clone()).unwrap_or_default();
        let budget = judged.limits.budget_of(&overrides);
        let names = overrides.client_tools.into_iter().flatten().map(|tool| tool.name);
        Self {
            judged,
            budget,
            client_tools: names.collect(),
            state: State::new(Rules::default()),
            ended_by: None,
            seen: HashSet::new(),
            asked: HashSet::new(),
            edited: HashSet::new(),
            released: HashMap::new(),
            has_diverged: false,
            conditions_met: BTreeSet::new(),
            delegates: false,
        }
    }

    fn judge(mut self, replay: &mut Replay, journal: &[Event], until: Instant) -> Option<()> {
        let before = replay.newly;
        for event in journal {
            if Instant::now() >= until {
                return None;
            }
            if let RunEvent::ApprovalResolved(resolved) = &event.what {
                if let Some(asked_at) = self.released.remove(&resolved.call_id) {
                    replay.waited += (event.at - asked_at).to_std().unwrap_or_default();
                }
                if resolved.resolution.edited().is_some() {
                    self.edited.insert(resolved.call_id);
                }
            }
            let begins = matches!(event.what, RunEvent::IterationStarted { limit: None, .. });
            if begins && self.ended_by.is_none() {
                self.ended_by = self.judged.limits.ended_by(&self.state, &self.budget);
                self.weigh(event.at);
            }
            if let Some(recorded) = recorded(&event.what) {
                self.delegates |= starts_runs(recorded.tool);
                if self.seen.insert(recorded.call_id) {
                    self.judge_one(replay, &recorded, event.at);
                } else if matches!(event.what, RunEvent::ApprovalRequested(_)) {
                    self.edited.remove(&recorded.call_id); // an approval has lapsed
                } else if self.asked.remove(&recorded.call_id) {
                    self.judge_dispatch(replay, &recorded);
                }
            }
            if let RunEvent::ToolCallStarted(call) = &event.what {
                let reads =
                    call.actions.iter().any(|it| matches!(it.what, ActionKind::Read { .. }));
                self.has_diverged |= self.judged.differences.change_result(&call.tool, reads);
            }
            if let RunEvent::ToolCallAwaitingClient(call) = &event.what
                && call.input.is_none()
            {
                self.has_diverged |= self.judged.differences.change_given_result(&call.tool);
            }
            if self.state.apply(event).is_err() {
                break; // written by another version: what follows is not understood
            }
        }
        let unread = self.judged.decided.unwrap_or(0).saturating_sub(self.seen.len() as u64);
        replay.calls += unread;
        replay.unknown += unread;
        if replay.newly != before {
            replay.changed_runs += 1;
            replay.micro_usd += self.judged.run.usage.cost_micro_usd.unwrap_or(0);
        }
        Some(())
    }

    /// Evaluates the new stop conditions before an iteration.
    fn weigh(&mut self, at: DateTime<Utc>) {
        let Self { judged, conditions_met, state, delegates, .. } = self;
        match judged.differences.stopping(conditions_met, state, *delegates, at) {
            Stopping::Continues => {}
            Stopping::Ends => self.ended_by = self.ended_by.or(Some("stop_conditions")),
            Stopping::Unclear => self.has_diverged = true,
        }
    }

    fn judge_one(
        &mut self,
        replay: &mut Replay,
        recorded: &RecordedDecision<'_>,
        at: DateTime<Utc>,
    ) {
        replay.calls += 1;
        let differences = &self.judged.differences;
        let is_hidden = match recorded.foreign {
            Some(by) => self.ended_by.is_some() || differences.hide_refusal(recorded.tool, by),
            None => recorded.actions.is_empty() || differences.hide_call(recorded.tool),
        };
        if self.has_diverged || is_hidden {
            replay.unknown += 1;
            return;
        }
        if recorded.foreign.is_some() {
            replay.unchanged += 1;
            return;
        }
        let (would_be, rule, reason) = self.decision(recorded);
        let passes = matches!(would_be, Decision::Allowed | Decision::Warned);
        let was = recorded.was.unwrap_or(if passes { would_be.as_str() } else { "allowed" });
        if was == would_be.as_str() {
            replay.unchanged += 1;
            if would_be == Decision::Escalated {
                self.asked.insert(recorded.call_id);
            }
            return;
        }
        if was == Decision::Escalated.as_str() && passes {
            self.released.insert(recorded.call_id, at);
        }
        self.has_diverged = !passes || !["allowed", "warned"].contains(&was);
        self.change(replay, recorded, was, (would_be, rule, reason));
    }

    /// Judges the dispatch of a call that needs an approval as before: by the budget, and by the rules if the
    /// approver has edited it.
    fn judge_dispatch(&mut self, replay: &mut Replay, recorded: &RecordedDecision<'_>) {
        let was_blocked = recorded.was == Some(Decision::Blocked.as_str());
        if self.has_diverged || was_blocked {
            return;
        }
        let refused = if self.edited.contains(&recorded.call_id) && !recorded.actions.is_empty() {
            Some(self.decision(recorded)).filter(|(decision, ..)| *decision == Decision::Blocked)
        } else {
            self.over_budget(recorded)
        };
        let Some(refused) = refused else { return };
        replay.unchanged -= 1;
        self.has_diverged = true;
        self.change(replay, recorded, Decision::Escalated.as_str(), refused);
    }

    fn change(
        &self,
        replay: &mut Replay,
        recorded: &RecordedDecision<'_>,
        was: &str,
        (would_be, rule, reason): NewDecision,
    ) {
        replay.newly.count(would_be);
        if replay.examples.len() < MAX_EXAMPLES {
            replay.examples.push(Change {
                run_id: self.judged.run.id,
                call_id: recorded.call_id,
                tool: recorded.tool.to_owned(),
                was: was.to_owned(),
                would_be: would_be.as_str(),
                rule,
                reason,
            });
        }
    }

    /// The decision on a call that would exceed a budget.
    fn over_budget(&self, recorded: &RecordedDecision<'_>) -> Option<NewDecision> {
        let limits = &self.judged.limits;
        let exceeded = || limits.exceeded_by(recorded.consumes, &self.state, &self.budget);
        let limit = self.ended_by.or_else(exceeded)?;
        Some((Decision::Blocked, "budget", Some(format!("The budget {limit} is used up."))))
    }

    fn decision(&self, recorded: &RecordedDecision<'_>) -> NewDecision {
        let is_of_caller = self.client_tools.contains(recorded.tool);
        if !is_of_caller && !self.judged.limits.have(recorded.tool) {
            let why = "The definition does not have this tool.".to_owned();
            return (Decision::Blocked, "tools", Some(why));
        }
        let call = Call {
            tool: recorded.tool,
            effect: recorded.effect,
            is_undeclared: false,
            actions: Arc::clone(recorded.actions),
            approved_by: None,
            labels: self.state.labels(),
            skills: self.state.skills(),
            directory: Arc::clone(&self.judged.directory),
        };
        let own_tools;
        let scopes: &[String] = if is_of_caller {
            own_tools = [format!("tools:{}", recorded.tool)];
            &own_tools
        } else {
            &self.judged.run.scopes
        };
        let judged = match self.judged.judge.gate.judge(scopes, call) {
            Verdict::Pass { decision, rule, reason, .. } => (decision, rule, reason),
            Verdict::Stop(Objection { decision, rule, reason, .. }) => {
                (decision, rule, Some(reason))
            }
        };
        let stops = judged.0 == Decision::Blocked;
        if stops { judged } else { self.over_budget(recorded).unwrap_or(judged) }
    }
}
