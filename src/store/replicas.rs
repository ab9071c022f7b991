//! Detects dead replicas and requeues their runs.
//!
//! A replica's row has its last heartbeat and its lease. A replica that judges others first checks by
//! the same clock that its own heartbeat is in time. So a clock jump or a suspended machine costs no
//! other replica its lease. It must also have seen a row unchanged for two thirds of the row's lease
//! before it trusts the clock: a heartbeat that fails once comes within half of the lease.
//!
//! A takeover locks first and requeues second, in two statements of one transaction, so that it waits
//! for what the owner of its runs is committing.

use std::collections::HashMap;
use std::time::Duration;

use chrono::{DateTime, Utc};
use tokio::time::Instant;
use uuid::Uuid;

use super::backend::Work;
use super::sql::{Query, Row};
use super::tables::ids;
use super::{Store, StoreError, Wakeup};
use crate::clock;

/// The reason for cancelling a child run whose parent has ended.
const PARENT_ENDED: &str = "the run that started it has ended";
/// Runs that are requeued in one transaction, at most.
const CHUNK: i64 = 64;
/// The unit of the column `lease`.
const MICROSECOND: Duration = Duration::from_micros(1);

/// Whether the last heartbeat is at most one lease away from now, in either direction.
const IN_TIME: &str =
    "heartbeat_at BETWEEN {now} - lease * :microsecond AND {now} + lease * :microsecond";

/// The result of a sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Replicas declared dead.
    pub replicas: u64,
    /// Runs of dead replicas, which are queued again.
    pub requeued: Vec<Uuid>,
}

/// The heartbeats of other replicas, as one replica has seen them.
#[derive(Debug, Default)]
pub struct Watch {
    seen: HashMap<String, LastHeartbeat>,
    last_observation: Option<Instant>,
}

/// The last heartbeat of a replica, and when it was first seen.
#[derive(Debug)]
struct LastHeartbeat {
    heartbeat_at: DateTime<Utc>,
    since: Instant,
}

/// A row of a replica that is not declared dead.
#[derive(Debug)]
struct ReplicaRow {
    id: String,
    heartbeat_at: DateTime<Utc>,
    lease: Duration,
    is_in_time: bool,
}

impl ReplicaRow {
    fn read(row: &Row) -> Result<Self, StoreError> {
        Ok(Self {
            id: row.read("id")?,
            heartbeat_at: row.read("heartbeat_at")?,
            lease: Duration::from_micros(row.read("lease")?),
            is_in_time: row.read("is_in_time")?,
        })
    }
}

impl Watch {
    /// Adds the current rows of the store, and returns the replicas whose lease has expired.
    fn observe(&mut self, own: &str, beats: Vec<ReplicaRow>, at: Instant) -> Vec<String> {
        let pause =
            self.last_observation.replace(at).map(|last| at.saturating_duration_since(last));
        if !beats.iter().any(|beat| beat.id == own && beat.is_in_time) {
            self.seen.clear();
            return Vec::new();
        }
        let mut earlier = std::mem::take(&mut self.seen);
        let mut silent = Vec::new();
        for beat in beats.into_iter().filter(|beat| beat.id != own) {
            let (half, long) = (beat.lease / 2, beat.lease * 2 / 3);
            let known =
                earlier.remove(&beat.id).filter(|seen| seen.heartbeat_at == beat.heartbeat_at);
            // After a long pause between two looks, the other replica may have been suspended too.
            let since = match &known {
                Some(seen) if pause.is_some_and(|pause| pause <= half) => seen.since,
                _ => at,
            };
            if !beat.is_in_time && known.is_some() && at.saturating_duration_since(since) >= long {
                silent.push(beat.id.clone());
            }
            self.seen.insert(beat.id, LastHeartbeat { heartbeat_at: beat.heartbeat_at, since });
        }
        silent
    }
}

impl Store {
    /// Registers a replica, also one that was declared dead and has lost its runs. Returns the store's time.
    pub async fn register_replica(
        &self,
        id: &str,
        lease: Duration,
    ) -> Result<DateTime<Utc>, StoreError> {
        let register = Query::new(
            "INSERT INTO replicas (id, lease, started_at, heartbeat_at) \
             VALUES (:id, :lease, {now}, {now}) \
             ON CONFLICT (id) DO UPDATE SET started_at = excluded.started_at, \
             lease = excluded.lease, heartbeat_at = excluded.heartbeat_at, dead = false \
             RETURNING heartbeat_at",
        );
        let lease = i64::try_from(lease.as_micros()).unwrap_or(i64::MAX);
        let register = register.bind("id", id).bind("lease", lease);
        let rows = self.backend.write(Work::Control, register).await?;
        self.backend.note_replica(id);
        rows.first().map_or_else(|| Ok(clock::now()), |row| row.read("heartbeat_at"))
    }

    /// Renews the lease, and returns the store's time; `None`: declared dead by another replica.
    pub async fn heartbeat(&self, id: &str) -> Result<Option<DateTime<Utc>>, StoreError> {
        let beat = Query::new(
            "UPDATE replicas SET heartbeat_at = {now} WHERE id = :id AND NOT dead \
             RETURNING heartbeat_at",
        );
        let rows = self.backend.write(Work::Control, beat.bind("id", id)).await?;
        rows.first().map(|row| row.read("heartbeat_at")).transpose()
    }

    /// How many replicas have sent a heartbeat in time.
    pub async fn living_replicas(&self) -> Result<u64, StoreError> {
        let count = Query::new("SELECT count(*) AS living FROM replicas WHERE NOT dead AND ");
        let count = count.push(IN_TIME).bind("microsecond", MICROSECOND);
        let rows = self.backend.read(Work::Control, count).await?;
        rows.first().map_or(Ok(0), |row| row.read("living"))
    }

    /// Whether another replica has sent a heartbeat in time.
    pub async fn has_living_others(&self, own: &str) -> Result<bool, StoreError> {
        let other = Query::new("SELECT 1 FROM replicas WHERE NOT dead AND id <> :own AND ");
        let other = other.push(IN_TIME).push(" LIMIT 1");
        let other = other.bind("own", own).bind("microsecond", MICROSECOND);
        Ok(!self.backend.read(Work::Control, other).await?.is_empty())
    }

    /// Replicas whose lease has expired, as seen by the replica `own`, which must call this often. If the database
    /// allows only one process, replicas of earlier processes are included at once.
    pub async fn silent_replicas(
        &self,
        own: &str,
        watch: &mut Watch,
    ) -> Result<Vec<String>, StoreError> {
        let look = Query::new("SELECT id, heartbeat_at, lease, ")
            .push(IN_TIME)
            .push(" AS is_in_time FROM replicas WHERE NOT dead");
        let rows = self.backend.read(Work::Control, look.bind("microsecond", MICROSECOND)).await?;
        let beats = rows.iter().map(ReplicaRow::read).collect::<Result<Vec<_>, _>>()?;
        let Some(living) = self.backend.only_replicas() else {
            return Ok(watch.observe(own, beats, Instant::now()));
        };
        let (living, gone): (Vec<_>, Vec<_>) =
            beats.into_iter().partition(|beat| living.contains(&beat.id));
        let mut silent = watch.observe(own, living, Instant::now());
        silent.extend(gone.into_iter().map(|beat| beat.id));
        Ok(silent)
    }

    /// Declares these replicas dead, unless they have sent a heartbeat in the meantime. Requeues the runs of dead
    /// replicas and counts a crash of each. Requests the cancellation of child runs whose parent has ended. Settles
    /// leftover reservations of ended runs.
    pub async fn sweep(&self, silent: &[String]) -> Result<Swept, StoreError> {
        let replicas = self.declare_dead(silent).await?;
        let mut swept = Swept { replicas, ..Swept::default() };
        loop {
            let requeued = self.requeue_orphans().await?;
            if requeued.is_empty() {
                break;
            }
            swept.requeued.extend(requeued);
        }
        self.cancel_orphaned_children().await?;
        self.settle_leftover_holds().await?;
        if !swept.requeued.is_empty() {
            self.backend.hint(Wakeup::Queue).await;
        }
        Ok(swept)
    }

    /// Marks replicas as dead and fences them; returns their number.
    async fn declare_dead(&self, silent: &[String]) -> Result<u64, StoreError> {
        if silent.is_empty() {
            return Ok(0);
        }
        let mut tx = self.backend.begin(Work::Control).await?;
        let still =
            Query::new("SELECT id FROM replicas WHERE NOT dead AND id IN :silent AND (NOT ");
        let mut still = still.push(IN_TIME).bind("silent", silent).bind("microsecond", MICROSECOND);
        if let Some(living) = self.backend.only_replicas() {
            still = still.push(" OR NOT id IN :living").bind("living", &*living);
        }
        let rows = tx.run(still.push("){skip_locked}")).await?;
        let dead = rows.iter().map(|row| row.read("id")).collect::<Result<Vec<String>, _>>()?;
        if !dead.is_empty() {
            let mark = Query::new("UPDATE replicas SET dead = true WHERE id IN :dead");
            tx.run(mark.bind("dead", &*dead)).await?;
            // In the same transaction, so that a replica that registers again does not own its old runs.
            let disown = Query::new(
                "UPDATE runs SET owner = 'dead ' || owner \
                 WHERE status = 'running' AND owner IN :dead",
            );
            tx.run(disown.bind("dead", &*dead)).await?;
            let release = Query::new("DELETE FROM run_places WHERE owner IN :dead");
            tx.run(release.bind("dead", &*dead)).await?;
            let forget =
                Query::new("DELETE FROM replicas WHERE dead AND heartbeat_at < {now} - :day");
            tx.run(forget.bind("day", Duration::from_hours(24))).await?;
        }
        tx.commit().await?;
        Ok(dead.len() as u64)
    }

    /// Requeues some runs without a living owner; empty if there are none.
    async fn requeue_orphans(&self) -> Result<Vec<Uuid>, StoreError> {
        let mut tx = self.backend.begin(Work::Control).await?;
        let lock = Query::new(
            "SELECT id FROM runs WHERE status = 'running' \
             AND owner NOT IN (SELECT id FROM replicas WHERE NOT dead) LIMIT :limit{skip_locked}",
        );
        let runs = ids(&tx.run(lock.bind("limit", CHUNK)).await?)?;
        if !runs.is_empty() {
            let requeue = Query::new(
                "UPDATE runs SET status = 'queued', owner = NULL, available_at = {now}, \
                 crash_count = crash_count + 1 WHERE id IN :runs",
            );
            tx.run(requeue.bind("runs", &*runs)).await?;
        }
        tx.commit().await?;
        Ok(runs)
    }

    /// Requests the cancellation of child runs whose parent has ended.
    async fn cancel_orphaned_children(&self) -> Result<(), StoreError> {
        let orphans = Query::new(
            "SELECT child.tenant, child.id FROM runs child WHERE child.parent_run_id IS NOT NULL \
             AND child.finished_at IS NULL AND child.cancel_requested_at IS NULL AND EXISTS \
             (SELECT 1 FROM runs parent WHERE parent.id = child.parent_run_id \
             AND parent.finished_at IS NOT NULL) LIMIT :limit",
        );
        for row in self.backend.read(Work::Control, orphans.bind("limit", CHUNK)).await? {
            let (tenant, run): (String, Uuid) = (row.read("tenant")?, row.read("id")?);
            self.cancel_one(&tenant, run, Some(PARENT_ENDED)).await?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(6);

    /// Two replicas, seen by the first; times are in seconds.
    struct Cluster {
        watch: Watch,
        begun: Instant,
    }

    impl Cluster {
        fn new() -> Self {
            Self { watch: Watch::default(), begun: Instant::now() }
        }

        /// Looks at that time, when each replica was heard of then, on a database whose clock is
        /// `ahead`.
        fn look(&mut self, at: u64, beats: [i64; 2], ahead: i64) -> Vec<String> {
            let now = i64::try_from(at).unwrap() + ahead;
            let beat = |(id, heard): (&str, i64)| ReplicaRow {
                id: id.to_owned(),
                heartbeat_at: DateTime::from_timestamp(1_000_000 + heard, 0).unwrap(),
                lease: LEASE,
                is_in_time: (now - heard).unsigned_abs() <= LEASE.as_secs(),
            };
            let beats = ["own", "other"].into_iter().zip(beats).map(beat).collect();
            self.watch.observe("own", beats, self.begun + Duration::from_secs(at))
        }
    }

    #[test]
    fn a_silent_replica_is_found_when_its_lease_is_over() {
        let mut cluster = Cluster::new();
        for at in 0..=6_u8 {
            assert!(cluster.look(at.into(), [at.into(), 0], 0).is_empty(), "{at}");
        }
        assert_eq!(cluster.look(7, [7, 0], 0), ["other"]);
    }

    #[test]
    fn a_row_that_is_stale_at_first_sight_is_looked_at_for_two_thirds_of_its_lease() {
        let mut cluster = Cluster::new();
        for at in 100..104 {
            assert!(cluster.look(at, [100, 0], 0).is_empty(), "{at}");
        }
        assert_eq!(cluster.look(104, [104, 0], 0), ["other"]);
    }

    #[test]
    fn a_clock_jump_declares_no_replica_dead() {
        for jump in [60, -60] {
            let mut cluster = Cluster::new();
            for at in 0..5_u8 {
                assert!(cluster.look(at.into(), [at.into(), at.into()], 0).is_empty());
            }
            assert!(cluster.look(5, [4, 4], jump).is_empty(), "its own row is stale too");
            assert!(
                cluster.look(6, [6 + jump, 4], jump).is_empty(),
                "the other one was not heard of yet"
            );
            assert!(cluster.look(7, [6 + jump, 4], jump).is_empty());
            assert!(cluster.look(8, [8 + jump, 8 + jump], jump).is_empty());
            assert!(cluster.look(11, [10 + jump, 8 + jump], jump).is_empty());
        }
    }

    #[test]
    fn a_suspended_machine_declares_no_replica_dead() {
        let mut cluster = Cluster::new();
        for at in 0..3_u8 {
            assert!(cluster.look(at.into(), [at.into(), 0], 0).is_empty());
        }
        // Its own heartbeat comes before the look, the other's after it.
        assert!(cluster.look(22, [22, 0], 0).is_empty());
        assert!(cluster.look(23, [22, 0], 0).is_empty());
        assert!(cluster.look(24, [24, 24], 0).is_empty());
        for at in 25..30_u8 {
            assert!(cluster.look(at.into(), [at.into(), 24], 0).is_empty());
        }
    }

    #[test]
    fn a_replica_without_a_heartbeat_of_its_own_judges_no_other() {
        let mut cluster = Cluster::new();
        for at in 0..30 {
            assert!(cluster.look(at, [-20, -40], 0).is_empty(), "{at}");
        }
    }
}
