//! Replay of a policy: recorded tool calls, judged again under a definition, with the scopes, skills,
//! labels and budgets of that moment.
//!
//! After a different decision, the model would have continued differently. So after the first decision that the
//! model would have noticed, the rest of the run counts as unknown. Unknown are also calls without recorded
//! actions, calls after an unreadable event, and calls whose decision depends on another difference of the
//! definitions than their policies (`differences`). A recorded decision by something other than the policy (a
//! rate limit, an interceptor) is kept if both definitions agree on it. Nothing is executed or written.

mod calls;
mod differences;
mod limits;
mod run;

use std::collections::HashMap;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use self::differences::Differences;
use self::limits::ReplayLimits;
use self::run::{Judge, ReplayedRun, judge_all};
use super::definition_compiler::policy;
use super::journals;
use super::loaded_agents::LoadedAgents;
use crate::agents::{Agent, Definition};
use crate::bounds::memory::TenantPermit;
use crate::fairness;
use crate::governance::{Decision, Gate, PolicyError};
use crate::store::{Page, RunCursor, RunFilter, RunRecord, Store, StoreError};

/// Runs that are read in one query.
const BATCH: u32 = 16;
/// The size of the caches of parents' rules and of definitions.
const MAX_REMEMBERED: usize = 256;

/// After this time, a replay ends with the runs that it has judged.
const MAX_REPLAY: Duration = Duration::from_secs(20);
/// The time limit of judging the runs of one query, which is checked between two calls.
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
    /// Only runs after this one, the last run of the previous page.
    pub after: Option<RunCursor>,
}

/// What a definition would have decided.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Replay {
    /// Runs that were replayed.
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
    /// The cost of those runs, in millionths of a dollar.
    pub micro_usd: i64,
    /// How long calls waited for an approval that they would not need.
    pub waited: Duration,
    /// The first changes.
    pub examples: Vec<Change>,
    /// The last run that was replayed, if there are more.
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
    /// The recorded decision.
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
    /// The definition cannot run here, e.g. because it names an unknown tool.
    #[error("{0}")]
    Definition(String),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The progress and the caches of a replay.
struct Progress {
    /// The judge of runs without a parent.
    judge: Arc<Judge>,
    limits: Arc<ReplayLimits>,
    /// Judges of child runs, by the parent's definition and workspace.
    of_children: HashMap<(String, String), Arc<Judge>>,
    /// Definitions by hash; `None` if one cannot be read.
    definitions: HashMap<String, Option<Arc<Definition>>>,
    replay: Replay,
}

/// Judges recorded calls again.
#[derive(Clone)]
pub struct PolicyReplay {
    pub(super) store: Arc<Store>,
    pub(super) loaded: Arc<LoadedAgents>,
    /// Among the replays of all tenants.
    pub(super) turn: Arc<TenantPermit<'static>>,
}

impl PolicyReplay {
    /// Judges the recorded calls of an agent's runs again.
    ///
    /// # Errors
    /// [`ReplayError`].
    pub async fn judge(&self, tenant: &str, query: &ReplayQuery) -> Result<Replay, ReplayError> {
        let (replay, agent) = (self.clone(), Arc::clone(&query.agent));
        let (judge, limits) = in_turn(&self.turn, move || replay.judges_of(&agent)).await??;
        let filter = RunFilter {
            agent: Some(query.agent.definition.name.clone()),
            created_after: query.since,
            created_before: query.until,
            ..RunFilter::default()
        };
        let mut progress = Progress {
            judge,
            limits,
            of_children: HashMap::new(),
            definitions: HashMap::new(),
            replay: Replay::default(),
        };
        let (begun, mut after) = (Instant::now(), query.after.clone());
        loop {
            let left = u64::from(query.max_runs).saturating_sub(progress.replay.runs);
            let limit = BATCH.min(u32::try_from(left).unwrap_or(BATCH)).max(1);
            let page = Page { limit, after: after.clone() };
            let runs = self.store.runs(tenant, &filter, &page).await?;
            let Some(last) = runs.last() else { break };
            if is_enough(&progress.replay, query.max_runs, begun.elapsed()) {
                progress.replay.more_after = after;
                break;
            }
            after = Some(RunCursor { at: last.created_at, id: last.id.to_string() });
            self.judge_runs(tenant, query, runs, &mut progress).await?;
        }
        Ok(progress.replay)
    }

    /// Judges the calls of these runs, in batches that fit into memory.
    async fn judge_runs(
        &self,
        tenant: &str,
        query: &ReplayQuery,
        runs: Vec<RunRecord>,
        progress: &mut Progress,
    ) -> Result<(), ReplayError> {
        let ids: Vec<Uuid> = runs.iter().map(|run| run.id).collect();
        let sizes = self.store.journal_sizes(tenant, &ids).await?;
        let (mut runs, mut left) = (runs.into_iter(), ids.as_slice());
        let mut left_to_judge = MAX_JUDGING;
        while !left.is_empty() {
            let (count, bytes) = journals::piece(left, &sizes);
            let (read, rest) = left.split_at(count);
            left = rest;
            let mut judged = Vec::with_capacity(count);
            for run in runs.by_ref().take(count) {
                judged.push(self.judged(tenant, query, run, progress).await?);
            }
            let permit = journals::permit(bytes).await;
            let (journals, damaged) = self.store.readable_journals(tenant, read).await?;
            let decided = self.store.decided_calls(&damaged).await?;
            for judged in &mut judged {
                judged.decided = decided.get(&judged.run.id).copied();
            }
            let so_far = mem::take(&mut progress.replay);
            let judging = move || {
                let _permit = permit;
                let begun = Instant::now();
                let replay = judge_all(so_far, &judged, &journals, begun + left_to_judge);
                replay.map(|replay| (replay, left_to_judge.saturating_sub(begun.elapsed())))
            };
            let judged = in_turn(&self.turn, judging).await?;
            (progress.replay, left_to_judge) = judged.ok_or_else(too_long)?;
        }
        Ok(())
    }

    /// A run with its judge.
    async fn judged(
        &self,
        tenant: &str,
        query: &ReplayQuery,
        run: RunRecord,
        progress: &mut Progress,
    ) -> Result<ReplayedRun, ReplayError> {
        let judge = match run.parent_run_id {
            None => Arc::clone(&progress.judge),
            Some(parent) => {
                let known = &mut progress.of_children;
                self.judge_of_child(tenant, parent, query, &progress.judge, known).await?
            }
        };
        let recorded = self.recorded_definition(&run, &mut progress.definitions).await?;
        let differences = Differences::between(recorded, &judge.agent);
        let directory = query.agent.workspace_of(run.id, run.session_id.as_deref()).into();
        let limits = Arc::clone(&progress.limits);
        Ok(ReplayedRun { run, judge, differences, limits, directory, decided: None })
    }

    /// The judges of an agent's runs.
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

    /// The definition of a run; `None` if it cannot be read.
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
        if known.len() >= MAX_REMEMBERED {
            known.clear();
        }
        known.insert(run.definition_hash.clone(), definition.clone());
        Ok(definition)
    }

    /// The judge of a child run: the definition, with its parent's rules if they are known.
    async fn judge_of_child(
        &self,
        tenant: &str,
        parent: Uuid,
        query: &ReplayQuery,
        unnarrowed: &Arc<Judge>,
        known: &mut HashMap<(String, String), Arc<Judge>>,
    ) -> Result<Arc<Judge>, ReplayError> {
        let unnarrowed = || Ok(Arc::clone(unnarrowed));
        let parent = match self.store.run(tenant, parent).await {
            Err(error) if !error.is_transient() => {
                tracing::warn!(run_id = %parent, %error, "the rules of a parent are not known");
                None
            }
            parent => parent?,
        };
        let Some(parent) = parent else { return unnarrowed() };
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
        let narrowed = super::parents::narrowed(&query.agent, autonomy, definition, &key.1);
        let Ok(agent) = narrowed else { return unnarrowed() };
        let gate = Gate::new(&policy(&agent.definition.governance))?;
        let judge = Arc::new(Judge { gate, agent });
        if known.len() >= MAX_REMEMBERED {
            known.clear();
        }
        known.insert(key, Arc::clone(&judge));
        Ok(judge)
    }
}

/// Work on a blocking thread. It keeps the turn of its replay, even if the client has disconnected.
async fn in_turn<T: Send + 'static>(
    turn: &Arc<TenantPermit<'static>>,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, StoreError> {
    let turn = Arc::clone(turn);
    let working = fairness::blocking(move || {
        let _turn = turn;
        work()
    });
    working.await.map_err(|error| StoreError::Failed(error.to_string()))
}

fn too_long() -> ReplayError {
    let seconds = MAX_JUDGING.as_secs();
    ReplayError::Definition(format!(
        "its rules take more than {seconds} s to judge these calls: replay fewer runs (`limit`)"
    ))
}

/// Whether no further runs are judged.
fn is_enough(replay: &Replay, max_runs: u32, took: Duration) -> bool {
    replay.runs >= u64::from(max_runs) || (replay.runs > 0 && took >= MAX_REPLAY)
}

#[cfg(test)]
mod tests {
    use std::sync::{LazyLock, mpsc};

    use futures::FutureExt as _;
    use tokio::sync::oneshot;

    use super::*;
    use crate::bounds::memory::TenantSemaphore;

    #[tokio::test]
    async fn a_turn_ends_with_its_work_and_not_with_its_client() {
        static TURNS: LazyLock<TenantSemaphore> =
            LazyLock::new(|| TenantSemaphore::with_share(1, 1));
        let turn = Arc::new(TURNS.acquire("t").await.unwrap());
        let (begun, begins) = oneshot::channel();
        let (end, ends) = mpsc::channel::<()>();
        let work = move || {
            let _ = begun.send(());
            let _ = ends.recv();
        };
        let client = tokio::spawn(async move { in_turn(&turn, work).await.is_ok() });
        begins.await.unwrap();
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled());
        assert!(TURNS.acquire("t").now_or_never().is_none(), "the work has not ended");
        drop(end);
        assert!(TURNS.acquire("t").await.is_some());
    }

    #[test]
    fn a_replay_ends_in_time_but_not_before_it_has_judged_runs() {
        let enough = |runs, took| is_enough(&Replay { runs, ..Replay::default() }, 100, took);
        assert!(!enough(0, MAX_REPLAY) && !enough(99, Duration::ZERO));
        assert!(enough(1, MAX_REPLAY) && enough(100, Duration::ZERO));
    }
}
