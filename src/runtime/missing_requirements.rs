//! Defers runs to other replicas if this replica does not have what they need.
//!
//! While settings are changed replica by replica, a replica may claim a run without having its tools, the
//! provider or the price of its model, or the agents and skills that its definition names. It then gives the
//! run back and does not claim it for a while, so that another replica can. It tries again with growing
//! pauses, because agents and skills can be added at any time. After ten minutes, or if no other replica is
//! alive, it drives the run with what it has, or fails it.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::claimed_run::ResumeError;
use crate::engine::{Plan, requirements};
use crate::run::Delegation;
use crate::store::{Requeue, RunRecord};

/// How long a run is deferred.
const MAX_WAIT: Duration = Duration::from_mins(10);
/// The first pause in which this replica does not claim a run that it has deferred.
const FIRST_PAUSE: Duration = Duration::from_secs(3);
/// The longest of these pauses, each of which is twice as long as the one before.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A claim excludes at most this many runs by id; further ones wait in the queue, for all replicas.
const MAX_DEFERRED: usize = 1000;

/// The runs that this replica defers to other replicas.
#[derive(Debug, Default)]
pub(super) struct DeferredRuns(Mutex<DeferredRunsInner>);

#[derive(Debug, Default)]
struct DeferredRunsInner {
    runs: HashMap<Uuid, DeferredRun>,
    /// Missing requirements, and when each was logged.
    logged: HashMap<String, Instant>,
}

#[derive(Debug)]
struct DeferredRun {
    /// The last event of its journal. It changes when another replica drives the run; then the time starts anew.
    last_seq: i64,
    since: Instant,
    pause: Duration,
    /// Until when this replica does not claim it.
    until: Instant,
}

impl DeferredRuns {
    /// Defers a run to other replicas; returns how to give it back. `None` if it was deferred for long enough.
    fn defer(&self, run: Uuid, last_seq: i64, now: Instant) -> Option<Requeue> {
        let mut deferred = self.0.lock();
        let is_listed = deferred.listed(now).take(MAX_DEFERRED).count() < MAX_DEFERRED;
        let known = deferred.runs.get(&run).filter(|known| known.last_seq == last_seq);
        let (since, pause) = known.map_or((now, FIRST_PAUSE), |known| {
            (known.since, (known.pause * 2).min(LONGEST_PAUSE))
        });
        if now - since >= MAX_WAIT {
            deferred.runs.remove(&run);
            return None;
        }
        let until = if is_listed { now + pause } else { now };
        deferred.runs.insert(run, DeferredRun { last_seq, since, pause, until });
        Some(if is_listed { Requeue::AtOnce } else { Requeue::After(pause) })
    }

    /// Whether this missing requirement has to be logged, because it was not logged recently.
    fn must_be_logged(&self, lack: &str, now: Instant) -> bool {
        let logged = &mut self.0.lock().logged;
        logged.retain(|_, at| now - *at < MAX_WAIT);
        let must_be_logged = !logged.contains_key(lack);
        if must_be_logged {
            logged.insert(lack.to_owned(), now);
        }
        must_be_logged
    }

    /// The runs that must not be claimed now. Runs that other replicas have taken are forgotten after a while.
    pub(super) fn excluded_from_claims(&self) -> Vec<Uuid> {
        let (mut deferred, now) = (self.0.lock(), Instant::now());
        deferred.runs.retain(|_, run| now - run.since < 2 * MAX_WAIT);
        deferred.listed(now).collect()
    }

    /// Whether this run must not be claimed now.
    pub(super) fn is_excluded(&self, run: Uuid) -> bool {
        self.0.lock().runs.get(&run).is_some_and(|run| run.until > Instant::now())
    }
}

impl DeferredRunsInner {
    fn listed(&self, now: Instant) -> impl Iterator<Item = Uuid> {
        self.runs.iter().filter(move |(_, run)| run.until > now).map(|(run, _)| *run)
    }
}

impl Runtime {
    /// What a run needs and this replica does not have, although the plan could be made. Fallback models do not count.
    pub(super) fn missing_requirement_of(&self, plan: &Plan) -> Option<String> {
        let agents = &self.inner.agents;
        let asks_model = plan.rules.given.is_none();
        let of_model = || {
            let model = plan.models.first().filter(|_| asks_model)?;
            self.inner.router.resolve(model).err().map(|unknown| unknown.to_string())
        };
        let of_agents = || {
            let tools = plan.callable();
            let mut named = tools.iter().filter_map(|tool| Delegation::of_tool(tool));
            let missing = named.find(|delegation| agents.named(delegation.agent()).is_none())?;
            Some(format!("there is no agent named {:?}", missing.agent()))
        };
        let of_skills = || {
            let mut named = plan.agent.definition.skills.iter();
            let missing = named.find(|skill| agents.skills().skill(skill).is_none())?;
            Some(format!("there is no skill named {missing:?}"))
        };
        of_model().or_else(of_agents).or_else(of_skills)
    }

    /// The price of a model that the run's budget needs and this replica does not have.
    pub(super) fn missing_price_of(&self, plan: &Plan) -> Option<String> {
        let rules = &plan.rules;
        let weighs_cost =
            rules.given.is_none() && requirements::needs_price(&rules.budget).is_some();
        let priced = || plan.check_prices(&self.inner.router);
        weighs_cost.then(priced)?.err().map(|missing| missing.to_string())
    }

    /// Defers a claimed run to other replicas, unless none is alive or it was deferred for long enough. A run with a
    /// cancel request is not deferred, because it can be ended here.
    pub(super) async fn leave_to_others(
        &self,
        row: &RunRecord,
        lack: &str,
    ) -> Result<(), ResumeError> {
        let inner = &self.inner;
        if row.cancel_requested_at.is_some()
            || !inner.store.has_living_others(&inner.replica.id).await?
        {
            return Ok(());
        }
        let (deferred, now) = (&inner.queue.deferred, Instant::now());
        let Some(how) = deferred.defer(row.id, row.last_seq(), now) else { return Ok(()) };
        if deferred.must_be_logged(lack, now) {
            tracing::warn!(
                run_id = %row.id,
                %lack,
                "this replica lacks what a run needs; such runs are left to other replicas"
            );
        } else {
            tracing::debug!(run_id = %row.id, %lack, "run is left to other replicas");
        }
        Err(ResumeError::LeftToOthers(how))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: Uuid = Uuid::nil();

    #[test]
    fn a_run_is_deferred_for_ten_minutes_with_growing_pauses() {
        let (deferred, begun) = (DeferredRuns::default(), Instant::now());
        let mut looks = Vec::new();
        let mut at = Duration::ZERO;
        while deferred.defer(RUN, 7, begun + at) == Some(Requeue::AtOnce) {
            looks.push(at.as_secs());
            at = deferred.0.lock().runs[&RUN].until - begun;
        }
        assert_eq!(looks[..5], [0, 3, 9, 21, 45]);
        assert_eq!((looks.last(), at.as_secs()), (Some(&585), 615));
        assert!(deferred.0.lock().runs.is_empty());
    }

    #[test]
    fn a_run_that_another_replica_has_driven_is_deferred_anew() {
        let (deferred, begun) = (DeferredRuns::default(), Instant::now());
        assert!(deferred.defer(RUN, 7, begun).is_some());
        assert!(deferred.defer(RUN, 9, begun + MAX_WAIT).is_some());
        assert!(deferred.defer(RUN, 9, begun + 2 * MAX_WAIT).is_none());
    }

    #[test]
    fn a_missing_requirement_is_logged_once() {
        let (deferred, begun) = (DeferredRuns::default(), Instant::now());
        let look = |lack, after| deferred.must_be_logged(lack, begun + after);
        assert!(look("a tool", Duration::ZERO) && look("an agent", Duration::ZERO));
        assert!(!look("a tool", MAX_WAIT / 2));
        assert!(look("a tool", MAX_WAIT));
    }

    #[test]
    fn a_claim_excludes_a_bounded_number() {
        let (deferred, now) = (DeferredRuns::default(), Instant::now());
        for _ in 0..MAX_DEFERRED {
            assert_eq!(deferred.defer(Uuid::now_v7(), 1, now), Some(Requeue::AtOnce));
        }
        assert_eq!(deferred.defer(RUN, 1, now), Some(Requeue::After(FIRST_PAUSE)));
        assert_eq!(
            (deferred.excluded_from_claims().len(), deferred.is_excluded(RUN)),
            (MAX_DEFERRED, false)
        );
    }
}
