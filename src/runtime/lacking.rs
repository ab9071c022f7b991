//! Leaves runs to other replicas if this replica's settings lack what they need.
//!
//! While settings are changed replica by replica, a replica may claim a run without having its tools, the
//! provider of its model, or the agents and skills that its definition names. It then gives the run back and
//! does not claim it for a while, so that another replica can. It tries again with growing pauses, because
//! agents and skills can be added at any time. After ten minutes, or if no other replica is alive, it drives
//! the run with what it has, or fails it.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use super::Runtime;
use super::claimed::ResumeError;
use crate::engine::Plan;
use crate::run::Delegation;
use crate::store::{GivenBack, RunRecord};

/// How long a run is left to other replicas.
const MAX_WAIT: Duration = Duration::from_mins(10);
/// The first pause in which this replica does not claim a run that it has left to others.
const FIRST_PAUSE: Duration = Duration::from_secs(3);
/// The longest of these pauses, each of which is twice as long as the one before.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A claim excludes at most this many runs by id; further ones wait in the queue, for all replicas.
const MAX_LEFT: usize = 1000;

/// The runs that this replica leaves to others.
#[derive(Debug, Default)]
pub(super) struct LeftRuns(Mutex<LeftRunsInner>);

#[derive(Debug, Default)]
struct LeftRunsInner {
    runs: HashMap<Uuid, LeftRun>,
    /// What was lacking, and when it was logged.
    logged: HashMap<String, Instant>,
}

#[derive(Debug)]
struct LeftRun {
    /// The last event of its journal. It changes when another replica drives the run; then the time starts anew.
    last_seq: i64,
    since: Instant,
    pause: Duration,
    /// Until when this replica does not claim it.
    until: Instant,
}

impl LeftRuns {
    /// Leaves a run to others; how to give it back. `None` if it was left to others for long enough.
    fn leave(&self, run: Uuid, last_seq: i64, now: Instant) -> Option<GivenBack> {
        let mut left = self.0.lock();
        let is_listed = left.listed(now).take(MAX_LEFT).count() < MAX_LEFT;
        let known = left.runs.get(&run).filter(|known| known.last_seq == last_seq);
        let (since, pause) = known.map_or((now, FIRST_PAUSE), |known| {
            (known.since, (known.pause * 2).min(LONGEST_PAUSE))
        });
        if now - since >= MAX_WAIT {
            left.runs.remove(&run);
            return None;
        }
        let until = if is_listed { now + pause } else { now };
        left.runs.insert(run, LeftRun { last_seq, since, pause, until });
        Some(if is_listed { GivenBack::AtOnce } else { GivenBack::After(pause) })
    }

    /// Whether this lack has to be logged, because it was not logged lately.
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
        let (mut left, now) = (self.0.lock(), Instant::now());
        left.runs.retain(|_, run| now - run.since < 2 * MAX_WAIT);
        left.listed(now).collect()
    }

    /// Whether this run must not be claimed now.
    pub(super) fn is_excluded(&self, run: Uuid) -> bool {
        self.0.lock().runs.get(&run).is_some_and(|left| left.until > Instant::now())
    }
}

impl LeftRunsInner {
    fn listed(&self, now: Instant) -> impl Iterator<Item = Uuid> {
        self.runs.iter().filter(move |(_, left)| left.until > now).map(|(run, _)| *run)
    }
}

impl Runtime {
    /// What a run needs and this replica lacks, although its plan could be made. Fallback models do not count.
    pub(super) fn lack_of(&self, plan: &Plan) -> Option<String> {
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

    /// Leaves a claimed run to other replicas, unless none is alive or it was left to them for long enough. A
    /// run with a cancel request is not left, because it needs nothing.
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
        let (left, now) = (&inner.queue.left, Instant::now());
        let Some(how) = left.leave(row.id, row.last_seq(), now) else { return Ok(()) };
        if left.must_be_logged(lack, now) {
            tracing::warn!(
                run_id = %row.id,
                %lack,
                "this replica lacks what a run needs; such runs are left to other replicas"
            );
        } else {
            tracing::debug!(run_id = %row.id, %lack, "run is left to other replicas");
        }
        Err(ResumeError::Left(how))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: Uuid = Uuid::nil();

    #[test]
    fn a_run_is_left_for_ten_minutes_with_longer_and_longer_pauses() {
        let (left, begun) = (LeftRuns::default(), Instant::now());
        let mut looks = Vec::new();
        let mut at = Duration::ZERO;
        while left.leave(RUN, 7, begun + at) == Some(GivenBack::AtOnce) {
            looks.push(at.as_secs());
            at = left.0.lock().runs[&RUN].until - begun;
        }
        assert_eq!(looks[..5], [0, 3, 9, 21, 45]);
        assert_eq!((looks.last(), at.as_secs()), (Some(&585), 615));
        assert!(left.0.lock().runs.is_empty());
    }

    #[test]
    fn a_run_that_another_replica_has_driven_is_left_anew() {
        let (left, begun) = (LeftRuns::default(), Instant::now());
        assert!(left.leave(RUN, 7, begun).is_some());
        assert!(left.leave(RUN, 9, begun + MAX_WAIT).is_some());
        assert!(left.leave(RUN, 9, begun + 2 * MAX_WAIT).is_none());
    }

    #[test]
    fn a_lack_is_logged_once() {
        let (left, begun) = (LeftRuns::default(), Instant::now());
        let look = |lack, after| left.must_be_logged(lack, begun + after);
        assert!(look("a tool", Duration::ZERO) && look("an agent", Duration::ZERO));
        assert!(!look("a tool", MAX_WAIT / 2));
        assert!(look("a tool", MAX_WAIT));
    }

    #[test]
    fn a_claim_leaves_out_a_bounded_number() {
        let (left, now) = (LeftRuns::default(), Instant::now());
        for _ in 0..MAX_LEFT {
            assert_eq!(left.leave(Uuid::now_v7(), 1, now), Some(GivenBack::AtOnce));
        }
        assert_eq!(left.leave(RUN, 1, now), Some(GivenBack::After(FIRST_PAUSE)));
        assert_eq!((left.excluded_from_claims().len(), left.is_excluded(RUN)), (MAX_LEFT, false));
    }
}
