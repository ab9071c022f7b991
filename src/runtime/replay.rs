//! Replay of a policy: recorded tool calls, judged again under a definition, with the scopes, skills,
//! labels and budgets of that moment.
//!
//! A model that had heard another decision would have gone on differently: after the first one that
//! it would have noticed, the rest of its run is not judged but counted as unknown. So is a call
//! whose actions the journal does not hold, and one whose decision hangs on what other than the
//! policy differs (`differences`). What other than the policy decided then (a rate limit, an
//! interceptor) stays as it was where both definitions have the same of it. Nothing is executed or
//! written.

mod calls;
mod differences;
mod limits;

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use self::calls::{Recorded, recorded};
use self::differences::{Differences, Stopping, starts_runs};
use self::limits::ReplayLimits;
use super::loaded::{LoadedAgents, policy};
use crate::agents::{Agent, Definition};
use crate::engine::plan::Rules;
use crate::engine::state::State;
use crate::event::{Event, RunEvent};
use crate::fairness;
use crate::governance::{ActionKind, Call, Decision, Gate, Objection, PolicyError, Verdict};
use crate::run::{Budget, Overrides};
use crate::store::{Page, RunCursor, RunFilter, RunRecord, Store, StoreError};

/// Runs whose journals are in memory at once.
const BATCH: u32 = 16;
/// Examples that an answer shows.
const MAX_EXAMPLES: usize = 100;
/// Parents whose rules are remembered for their children, and definitions of runs.
const KEPT: usize = 256;

/// Time that judging may take; one call more may be under way.
const MAX_JUDGING: Duration = Duration::from_secs(20);

/// Which calls are judged again, and by what.
#[derive(Debug, Clone)]
pub struct ReplayQuery {
    /// The definition that judges.
    pub agent: Arc<Agent>,
    /// Runs created after this instant.
    pub since: Option<DateTime<Utc>>,
    /// Runs created before this instant.
    pub until: Option<DateTime<Utc>>,
    /// Runs at most, the newest.
    pub max_runs: u32,
    /// Only runs behind this one, which an earlier answer ended with.
    pub after: Option<RunCursor>,
}

/// What a definition would have decided.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Replay {
    /// Runs that were looked at.
    pub runs: u64,
    /// Calls that were decided on in them.
    pub calls: u64,
    /// Calls on which nothing changes.
    pub unchanged: u64,
    /// Calls that cannot be judged.
    pub unknown: u64,
    /// Calls that would be decided on differently, by the new decision.
    pub newly: NewDecisions,
    /// Runs in which a decision changes.
    pub changed_runs: u64,
    /// What those cost, in millionths of a dollar.
    pub micro_usd: i64,
    /// How long calls waited for an approval that they would not need.
    pub waited: Duration,
    /// The first changes.
    pub examples: Vec<Change>,
    /// The last run that was looked at, where there are more.
    pub more_after: Option<RunCursor>,
}

/// Calls by their new decision.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NewDecisions {
    pub blocked: u64,
    pub escalated: u64,
    pub warned: u64,
    pub allowed: u64,
}

impl NewDecisions {
    fn count(&mut self, decision: Decision) {
        *match decision {
            Decision::Blocked => &mut self.blocked,
            Decision::Escalated => &mut self.escalated,
            Decision::Warned => &mut self.warned,
            Decision::Allowed => &mut self.allowed,
        } += 1;
    }
}

/// A call that would be decided on differently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Where it was made.
    pub run_id: Uuid,
    /// The call.
    pub call_id: Uuid,
    /// Its tool.
    pub tool: String,
    /// The decision then.
    pub was: String,
    /// The decision now.
    pub would_be: &'static str,
    /// The rule that decides now; `none` where none objects.
    pub rule: &'static str,
    /// Its reason.
    pub reason: Option<String>,
}

/// Why a policy cannot be replayed.
#[derive(Debug, thiserror::Error)]
pub enum ReplayError {
    /// The definition that judges is unusable.
    #[error(transparent)]
    Policy(#[from] PolicyError),
    /// The definition cannot run here, e.g. because it names a tool that there is not.
    #[error("{0}")]
    Definition(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A definition as it judges a run.
struct Judge {
    gate: Gate,
    /// The agent, narrowed where another one started the run.
    agent: Arc<Agent>,
}

/// A run with what judges it.
struct Judged {
    run: RunRecord,
    judge: Arc<Judge>,
    differences: Differences,
    limits: Arc<ReplayLimits>,
    directory: Arc<str>,
}

/// Judges recorded calls again.
#[derive(Clone)]
pub struct PolicyReplay {
    pub(super) store: Arc<Store>,
    pub(super) loaded: Arc<LoadedAgents>,
}

impl PolicyReplay {
    /// Judges the recorded calls of an agent's runs again.
    ///
    /// # Errors
    /// [`ReplayError`].
    pub async fn judge(&self, tenant: &str, query: &ReplayQuery) -> Result<Replay, ReplayError> {
        let (replay, agent) = (self.clone(), Arc::clone(&query.agent));
        let made = fairness::blocking(move || replay.judges_of(&agent)).await;
        let (judge, limits) = made.map_err(|error| StoreError::Failed(error.to_string()))??;
        let filter = RunFilter {
            agent: Some(query.agent.definition.name.clone()),
            created_after: query.since,
            created_before: query.until,
            ..RunFilter::default()
        };
        let (mut of_children, mut definitions) = (HashMap::new(), HashMap::new());
        let mut left_to_judge = MAX_JUDGING;
        let (mut replay, mut after) = (Replay::default(), query.after.clone());
        loop {
            let left = u64::from(query.max_runs).saturating_sub(replay.runs);
            let limit = BATCH.min(u32::try_from(left).unwrap_or(BATCH)).max(1);
            let page = Page { limit, after: after.clone() };
            let runs = self.store.runs(tenant, &filter, &page).await?;
            let Some(last) = runs.last() else { break };
            if left == 0 {
                replay.more_after = after;
                break;
            }
            after = Some(RunCursor { at: last.created_at, id: last.id.to_string() });
            let ids: Vec<Uuid> = runs.iter().map(|run| run.id).collect();
            let journals = self.store.journals(tenant, &ids).await?;
            let mut judged = Vec::with_capacity(runs.len());
            for run in runs {
                let judge = match run.parent_run_id {
                    None => Arc::clone(&judge),
                    Some(parent) => {
                        self.judge_of_child(tenant, parent, query, &judge, &mut of_children).await?
                    }
                };
                let recorded = self.recorded_definition(&run, &mut definitions).await?;
                let differences = Differences::between(recorded, &judge.agent);
                let directory = query.agent.workspace_of(run.id, run.session_id.as_deref()).into();
                let limits = Arc::clone(&limits);
                judged.push(Judged { run, judge, differences, limits, directory });
            }
            let so_far = replay;
            let judging = move || {
                let begun = Instant::now();
                let replay = judge_all(so_far, &judged, &journals, begun + left_to_judge);
                replay.map(|replay| (replay, left_to_judge.saturating_sub(begun.elapsed())))
            };
            let judged = fairness::blocking(judging).await;
            let judged = judged.map_err(|error| StoreError::Failed(error.to_string()))?;
            (replay, left_to_judge) = judged.ok_or_else(too_long)?;
        }
        Ok(replay)
    }

    /// What judges the calls of an agent's runs.
    fn judges_of(
        &self,
        agent: &Arc<Agent>,
    ) -> Result<(Arc<Judge>, Arc<ReplayLimits>), ReplayError> {
        let gate = Gate::new(&policy(&agent.definition.governance))?;
        let judge = Arc::new(Judge { gate, agent: Arc::clone(agent) });
        let loaded = self.loaded.made(agent);
        let loaded = loaded.map_err(|error| ReplayError::Definition(error.to_string()))?;
        let tools = loaded.executor.infos().map(|tool| tool.name.as_str());
        Ok((judge, Arc::new(ReplayLimits::new(&agent.definition, tools))))
    }

    /// The definition that a run had; none where it cannot be read.
    async fn recorded_definition(
        &self,
        run: &RunRecord,
        known: &mut HashMap<String, Option<Arc<Definition>>>,
    ) -> Result<Option<Arc<Definition>>, ReplayError> {
        if let Some(definition) = known.get(&run.definition_hash) {
            return Ok(definition.clone());
        }
        let json = self.store.definition(&run.definition_hash).await?;
        let definition = json.and_then(|json| serde_json::from_str(&json).ok()).map(Arc::new);
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert(run.definition_hash.clone(), definition.clone());
        Ok(definition)
    }

    /// What judges the calls of a run that another one started: the definition, with its parent's
    /// rules where they are known.
    async fn judge_of_child(
        &self,
        tenant: &str,
        parent: Uuid,
        query: &ReplayQuery,
        unnarrowed: &Arc<Judge>,
        known: &mut HashMap<(String, String), Arc<Judge>>,
    ) -> Result<Arc<Judge>, ReplayError> {
        let unnarrowed = || Ok(Arc::clone(unnarrowed));
        let Some(parent) = self.store.run(tenant, parent).await? else {
            return unnarrowed();
        };
        let Some(json) = self.store.definition(&parent.definition_hash).await? else {
            return unnarrowed();
        };
        let Ok(of_parent) = Agent::from_json(&json) else { return unnarrowed() };
        let directory = of_parent.workspace_of(parent.id, parent.session_id.as_deref());
        let key = (parent.definition_hash, directory);
        if let Some(judge) = known.get(&key) {
            return Ok(Arc::clone(judge));
        }
        let definition = &of_parent.definition;
        let autonomy = definition.governance.autonomy;
        let narrowed = super::delegation::narrowed(&query.agent, autonomy, definition, &key.1);
        let Ok(agent) = narrowed else { return unnarrowed() };
        let gate = Gate::new(&policy(&agent.definition.governance))?;
        let judge = Arc::new(Judge { gate, agent });
        if known.len() >= KEPT {
            known.clear();
        }
        known.insert(key, Arc::clone(&judge));
        Ok(judge)
    }
}

fn too_long() -> ReplayError {
    let seconds = MAX_JUDGING.as_secs();
    ReplayError::Definition(format!(
        "its rules take more than {seconds} s to judge these calls: replay fewer runs (`limit`)"
    ))
}

/// Judges the calls of runs whose journals lie one after the other; none where it takes longer.
fn judge_all(
    mut replay: Replay,
    runs: &[Judged],
    journals: &[Event],
    until: Instant,
) -> Option<Replay> {
    let mut by_run: HashMap<Uuid, &[Event]> = HashMap::new();
    for journal in journals.chunk_by(|one, next| one.run_id == next.run_id) {
        by_run.extend(journal.first().map(|first| (first.run_id, journal)));
    }
    for judged in runs {
        let journal = by_run.get(&judged.run.id).copied().unwrap_or_default();
        replay.runs += 1;
        RunReplay::new(judged).judge(&mut replay, journal, until)?;
    }
    Some(replay)
}

/// A decision by the definition: with the rule that decides, and its reason.
type NewDecision = (Decision, &'static str, Option<String>);

/// One run on its way through the replay.
struct RunReplay<'r> {
    judged: &'r Judged,
    client_tools: HashSet<String>,
    budget: Budget,
    state: State,
    /// The limit that would have ended the run by now.
    ended_by: Option<&'static str>,
    /// Calls that were counted.
    seen: HashSet<Uuid>,
    /// Calls that are asked about as before, and may be dispatched then.
    asked: HashSet<Uuid>,
    /// Calls that would not be asked about any more, and since when they were.
    released: HashMap<Uuid, DateTime<Utc>>,
    /// Whether the model would have heard something else by now, or it cannot be told.
    has_diverged: bool,
    /// Stop conditions that the run did not have and that would have been met.
    conditions_met: BTreeSet<usize>,
    /// Whether it has started other runs.
    delegates: bool,
}

impl<'r> RunReplay<'r> {
    fn new(judged: &'r Judged) -> Self {
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
            if let RunEvent::ApprovalResolved(resolved) = &event.what
                && let Some(asked_at) = self.released.remove(&resolved.call_id)
            {
                replay.waited += (event.at - asked_at).to_std().unwrap_or_default();
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
                } else if self.asked.remove(&recorded.call_id) {
                    self.judge_dispatch(replay, &recorded);
                }
            }
            if let RunEvent::ToolCallStarted(call) = &event.what {
                let reads =
                    call.actions.iter().any(|it| matches!(it.what, ActionKind::Read { .. }));
                self.has_diverged |= self.judged.differences.change_result(&call.tool, reads);
            }
            if self.state.apply(event).is_err() {
                break; // written by another version: what follows is not understood
            }
        }
        if replay.newly != before {
            replay.changed_runs += 1;
            replay.micro_usd += self.judged.run.usage.cost_micro_usd.unwrap_or(0);
        }
        Some(())
    }

    /// Looks at the stop conditions that the run did not have, before an iteration.
    fn weigh(&mut self, at: DateTime<Utc>) {
        let Self { judged, conditions_met, state, delegates, .. } = self;
        match judged.differences.stopping(conditions_met, state, *delegates, at) {
            Stopping::GoesOn => {}
            Stopping::Ends => self.ended_by = self.ended_by.or(Some("stop_conditions")),
            Stopping::Unclear => self.has_diverged = true,
        }
    }

    fn judge_one(&mut self, replay: &mut Replay, recorded: &Recorded<'_>, at: DateTime<Utc>) {
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

    /// A call that is asked about as before: whether the budget lets it be made after that.
    fn judge_dispatch(&mut self, replay: &mut Replay, recorded: &Recorded<'_>) {
        let Some(over) = self.over_budget(recorded).filter(|_| !self.has_diverged) else { return };
        replay.unchanged -= 1;
        self.has_diverged = true;
        self.change(replay, recorded, Decision::Escalated.as_str(), over);
    }

    fn change(
        &self,
        replay: &mut Replay,
        recorded: &Recorded<'_>,
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

    /// What it means that the call would exceed a budget.
    fn over_budget(&self, recorded: &Recorded<'_>) -> Option<NewDecision> {
        let limits = &self.judged.limits;
        let exceeded = || limits.exceeded_by(recorded.consumes, &self.state, &self.budget);
        let limit = self.ended_by.or_else(exceeded)?;
        Some((Decision::Blocked, "budget", Some(format!("The budget {limit} is used up."))))
    }

    fn decision(&self, recorded: &Recorded<'_>) -> NewDecision {
        let is_of_caller = self.client_tools.contains(recorded.tool);
        if !is_of_caller && !self.judged.limits.have(recorded.tool) {
            let why = "The definition does not have this tool.".to_owned();
            return (Decision::Blocked, "tools", Some(why));
        }
        let call = Call {
            tool: recorded.tool,
            effect: recorded.effect,
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
