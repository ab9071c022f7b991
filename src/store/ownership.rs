//! Who drives a run: claims, cancel requests, giving runs back, and taking them from dead replicas.
//!
//! An orphaned run is requeued, and nothing is decided here: the replica that claims it asks the
//! run's state machine. A takeover locks first and requeues second, in two statements of one
//! transaction, so that it waits for what the owner of its runs is committing.

use std::time::Duration;

use uuid::Uuid;

use super::backend::Work;
use super::listing::readable;
use super::sql::Query;
use super::tables::{Record, ids};
use super::{ClaimedRun, RunRecord, Store, StoreError, Wakeup};

/// Why a run is cancelled whose parent has ended.
const PARENT_ENDED: &str = "the run that started it has ended";
/// Runs that are taken over in one transaction.
const CHUNK: i64 = 64;

/// Runs that wait for a replica and for nothing else, as their index has it.
macro_rules! in_line {
    () => {
        "status = 'queued' AND (session_place IS NULL OR session_place = 'holds')"
    };
}

/// Runs that wait for their session, as their index has it.
macro_rules! waits {
    ($table:literal) => {
        concat!($table, "status = 'queued' AND ", $table, "session_place <> 'holds'")
    };
}

/// What a claim gives of a run.
macro_rules! claimed {
    () => {
        " RETURNING *, (SELECT body FROM definitions WHERE hash = definition_hash) AS definition"
    };
}

/// What a cancel request met.
#[derive(Debug, Clone, PartialEq)]
pub enum CancelOutcome {
    /// It was over already; unchanged.
    AlreadyEnded(RunRecord),
    /// It is to be cancelled: by its owner where it is running, else by the replica that claims it.
    Requested(RunRecord),
}

/// What a sweep found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Replicas declared dead.
    pub replicas: u64,
    /// Runs that were taken from dead replicas and wait for a new owner.
    pub requeued: Vec<Uuid>,
}

impl Store {
    /// How many runs of all tenants are queued.
    pub async fn queued(&self) -> Result<u64, StoreError> {
        let count = Query::new(concat!(
            "SELECT (SELECT count(*) FROM runs WHERE ",
            in_line!(),
            ") + (SELECT count(*) FROM runs WHERE ",
            waits!(""),
            ") AS queued"
        ));
        let rows = self.backend.read(Work::Control, count).await?;
        rows.first().map_or(Ok(0), |row| row.read("queued"))
    }

    /// Takes up to `limit` queued runs: status running, owner set, epoch raised. A run that waits
    /// for its session is taken when no run holds that and no other run waits before it; it holds
    /// it then. One whose row cannot be read is taken and left out.
    pub async fn claim(&self, owner: &str, limit: u32) -> Result<Vec<ClaimedRun>, StoreError> {
        // First in each line for a session: those whose turn it is if no run holds it.
        // Materialised, so that the limits hold.
        let claim = Query::new(concat!(
            "WITH RECURSIVE heads (id) AS (SELECT * FROM (SELECT id FROM runs WHERE ",
            waits!(""),
            " ORDER BY tenant, session_id, session_place, available_at, id LIMIT 1) AS first \
             UNION ALL SELECT (SELECT r.id FROM runs r WHERE ",
            waits!("r."),
            " AND (r.tenant, r.session_id) > (h.tenant, h.session_id) \
             ORDER BY r.tenant, r.session_id, r.session_place, r.available_at, r.id LIMIT 1) \
             FROM heads JOIN runs h ON h.id = heads.id), \
             turned AS MATERIALIZED (SELECT id, available_at FROM runs w \
             WHERE id IN (SELECT id FROM heads) AND ",
            waits!("w."),
            " AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.tenant = w.tenant \
             AND r.session_id = w.session_id AND r.session_place = 'holds' \
             AND r.finished_at IS NULL) LIMIT :limit{skip_locked}), \
             due AS MATERIALIZED (SELECT id, available_at FROM runs WHERE ",
            in_line!(),
            " AND available_at <= {now} ORDER BY available_at, id LIMIT :limit{skip_locked}), \
             next AS MATERIALIZED (SELECT id AS next_id FROM (SELECT * FROM turned \
             UNION ALL SELECT * FROM due) AS both_lines ORDER BY available_at, id LIMIT :limit) \
             UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, \
             available_at = NULL, \
             session_place = CASE WHEN session_place IS NOT NULL THEN 'holds' END, \
             session_turn = CASE WHEN session_place <> 'holds' THEN \
             (SELECT COALESCE(max(r.session_turn), 0) + 1 FROM runs r \
             WHERE r.tenant = runs.tenant AND r.session_id = runs.session_id \
             AND r.session_turn IS NOT NULL) ELSE session_turn END \
             FROM next WHERE id = next_id",
            claimed!(),
        ));
        self.claimed(claim.bind("owner", owner).bind("limit", limit)).await
    }

    /// Takes this run, if it is queued and its turn has come.
    pub async fn claim_run(
        &self,
        owner: &str,
        run: Uuid,
    ) -> Result<Option<ClaimedRun>, StoreError> {
        let claim = Query::new(concat!(
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, \
             available_at = NULL WHERE id = :run AND status = 'queued' AND available_at <= {now}",
            claimed!(),
        ));
        let claim = claim.bind("owner", owner).bind("run", run);
        let rows = self.backend.write(Work::Control, claim).await?;
        rows.first().map(Record::read).transpose()
    }

    /// Takes up to `limit` queued runs that were asked to cancel, also those that wait for their
    /// session.
    pub async fn claim_cancelled(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let any = Query::new(
            "SELECT 1 FROM runs WHERE status = 'queued' AND cancel_requested_at IS NOT NULL LIMIT 1",
        );
        if self.backend.read(Work::Control, any).await?.is_empty() {
            return Ok(Vec::new()); // and nothing is written
        }
        let claim = Query::new(concat!(
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, \
             available_at = NULL WHERE id IN (SELECT id FROM runs WHERE status = 'queued' \
             AND cancel_requested_at IS NOT NULL ORDER BY cancel_requested_at \
             LIMIT :limit{skip_locked})",
            claimed!(),
        ));
        self.claimed(claim.bind("owner", owner).bind("limit", limit)).await
    }

    async fn claimed(&self, claim: Query) -> Result<Vec<ClaimedRun>, StoreError> {
        let rows = self.backend.write(Work::Control, claim).await?;
        Ok(readable(&rows).collect())
    }

    /// Asks a run to cancel, and every run that it started, and that those started. A run without
    /// an owner is queued for [`Store::claim_cancelled`]. `None`: no such run.
    pub async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let outcome = match self.cancel_one(tenant, run, reason).await? {
            Some(run) => CancelOutcome::Requested(run),
            None => match self.run(tenant, run).await? {
                Some(run) => CancelOutcome::AlreadyEnded(run),
                None => return Ok(None),
            },
        };
        let descendants = Query::new(
            "WITH RECURSIVE tree (id) AS (SELECT id FROM runs \
             WHERE parent_run_id = :run AND finished_at IS NULL UNION SELECT child.id FROM tree \
             JOIN runs child ON child.parent_run_id = tree.id AND child.finished_at IS NULL) \
             SELECT id FROM tree",
        );
        let rows = self.backend.read(Work::Control, descendants.bind("run", run)).await?;
        // One after the other: a commit of several of them locks their rows in no particular order.
        for descendant in ids(&rows)? {
            self.cancel_one(tenant, descendant, reason).await?;
        }
        Ok(Some(outcome))
    }

    /// `None`: it has ended, or there is no such run.
    async fn cancel_one(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<RunRecord>, StoreError> {
        let request = Query::new(
            "UPDATE runs SET cancel_requested_at = COALESCE(cancel_requested_at, {now}), \
             cancel_reason = COALESCE(cancel_reason, :reason), \
             status = CASE WHEN status = 'running' THEN status ELSE 'queued' END, \
             available_at = CASE WHEN status <> 'running' THEN {now} END \
             WHERE tenant = :tenant AND id = :run AND finished_at IS NULL RETURNING *",
        );
        let request = request.bind("tenant", tenant).bind("run", run).bind("reason", reason);
        let rows = self.backend.write(Work::Control, request).await?;
        if !rows.is_empty() {
            self.backend.hint(Wakeup::Cancel(run)).await;
        }
        rows.first().map(Record::read).transpose()
    }

    /// Running runs of this owner that were asked to cancel, with the reason.
    pub async fn cancel_requests(
        &self,
        owner: &str,
    ) -> Result<Vec<(Uuid, Option<String>)>, StoreError> {
        let requests = Query::new(
            "SELECT id, cancel_reason FROM runs WHERE status = 'running' AND owner = :owner \
             AND cancel_requested_at IS NOT NULL",
        );
        let rows = self.backend.read(Work::Control, requests.bind("owner", owner)).await?;
        rows.iter().map(|row| Ok((row.read("id")?, row.read("cancel_reason")?))).collect()
    }

    /// Puts this owner's running runs back into the queue; no crash is counted. How many.
    pub async fn release(&self, owner: &str) -> Result<u64, StoreError> {
        let release = Query::new(
            "UPDATE runs SET status = 'queued', owner = NULL, available_at = {now} \
             WHERE status = 'running' AND owner = :owner RETURNING id",
        );
        let rows = self.backend.write(Work::Control, release.bind("owner", owner)).await?;
        self.backend.hint(Wakeup::Queue).await;
        Ok(rows.len() as u64)
    }

    /// This owner's running runs, each with its epoch.
    pub async fn owned_runs(&self, owner: &str) -> Result<Vec<(Uuid, i64)>, StoreError> {
        let running =
            Query::new("SELECT id, epoch FROM runs WHERE status = 'running' AND owner = :owner");
        let rows = self.backend.read(Work::Control, running.bind("owner", owner)).await?;
        rows.iter().map(|row| Ok((row.read("id")?, row.read("epoch")?))).collect()
    }

    /// Puts a running run back into the queue, if this owner still has it under this epoch; whether
    /// it had. A crash is counted where one is suspected; the run waits a second for each that was
    /// counted before, a minute at most.
    pub async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        has_crashed: bool,
    ) -> Result<bool, StoreError> {
        let second = Duration::from_secs(u64::from(has_crashed));
        let give_back = Query::new(
            "UPDATE runs SET status = 'queued', owner = NULL, \
             crash_count = crash_count + :crashes, available_at = {now} + :second * \
             CASE WHEN crash_count < 60 THEN crash_count ELSE 60 END WHERE status = 'running' \
             AND owner = :owner AND id = :run AND epoch = :epoch RETURNING id",
        );
        let give_back = give_back.bind("crashes", i64::from(has_crashed)).bind("second", second);
        let give_back = give_back.bind("owner", owner).bind("run", run).bind("epoch", epoch);
        let rows = self.backend.write(Work::Control, give_back).await?;
        self.backend.hint(Wakeup::Queue).await;
        Ok(!rows.is_empty())
    }

    /// Registers a replica, again if it was declared dead: its runs are other replicas' by then.
    pub async fn register_replica(&self, id: &str) -> Result<(), StoreError> {
        let register = Query::new(
            "INSERT INTO replicas (id, started_at, heartbeat_at) VALUES (:id, {now}, {now}) \
             ON CONFLICT (id) DO UPDATE SET started_at = excluded.started_at, \
             heartbeat_at = excluded.heartbeat_at, dead = false",
        );
        self.backend.write(Work::Control, register.bind("id", id)).await?;
        self.backend.note_replica(id);
        Ok(())
    }

    /// Renews the lease; `false`: declared dead by another replica.
    pub async fn heartbeat(&self, id: &str) -> Result<bool, StoreError> {
        let beat = Query::new(
            "UPDATE replicas SET heartbeat_at = {now} WHERE id = :id AND NOT dead RETURNING id",
        );
        Ok(!self.backend.write(Work::Control, beat.bind("id", id)).await?.is_empty())
    }

    /// Declares replicas dead whose last heartbeat is older than `lease`, puts their runs back into
    /// the queue and counts a crash of each. Asks children to cancel whose parent has ended without
    /// them. Settles what ended runs left reserved. The sweeper itself is never declared dead.
    pub async fn sweep(&self, sweeper: &str, lease: Duration) -> Result<Swept, StoreError> {
        let replicas = self.declare_dead(sweeper, lease).await?;
        let mut swept = Swept { replicas, ..Swept::default() };
        loop {
            let requeued = self.requeue_orphans().await?;
            if requeued.is_empty() {
                break;
            }
            swept.requeued.extend(requeued);
        }
        self.cancel_strays().await?;
        self.settle_rest().await?;
        if !swept.requeued.is_empty() {
            self.backend.hint(Wakeup::Queue).await;
        }
        Ok(swept)
    }

    /// Marks replicas dead whose lease has run out, and fences them; how many.
    async fn declare_dead(&self, sweeper: &str, lease: Duration) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Control).await?;
        let stale = Query::new(
            "SELECT id FROM replicas WHERE NOT dead AND id <> :sweeper \
             AND (heartbeat_at < {now} - :lease",
        );
        let mut stale = stale.bind("sweeper", sweeper).bind("lease", lease);
        if let Some(living) = self.backend.only_replicas() {
            stale = stale.push(" OR NOT id IN :living").bind("living", &*living);
        }
        let rows = tx.run(stale.push("){skip_locked}")).await?;
        let stale = rows.iter().map(|row| row.read("id")).collect::<Result<Vec<String>, _>>()?;
        if !stale.is_empty() {
            let dead = Query::new("UPDATE replicas SET dead = true WHERE id IN :stale");
            tx.run(dead.bind("stale", &*stale)).await?;
            // At once, so that a replica which registers again does not own what it lost.
            let disown = Query::new(
                "UPDATE runs SET owner = 'dead ' || owner \
                 WHERE status = 'running' AND owner IN :stale",
            );
            tx.run(disown.bind("stale", &*stale)).await?;
            let forget =
                Query::new("DELETE FROM replicas WHERE dead AND heartbeat_at < {now} - :day");
            tx.run(forget.bind("day", Duration::from_hours(24))).await?;
        }
        tx.commit().await?;
        Ok(stale.len() as u64)
    }

    /// Queues some runs without a living owner; none where none is left.
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

    /// Asks children to cancel whose parent has ended without them.
    async fn cancel_strays(&self) -> Result<(), StoreError> {
        let strays = Query::new(
            "SELECT child.tenant, child.id FROM runs child WHERE child.parent_run_id IS NOT NULL \
             AND child.finished_at IS NULL AND child.cancel_requested_at IS NULL AND EXISTS \
             (SELECT 1 FROM runs parent WHERE parent.id = child.parent_run_id \
             AND parent.finished_at IS NOT NULL) LIMIT :limit",
        );
        for row in self.backend.read(Work::Control, strays.bind("limit", CHUNK)).await? {
            let (tenant, run): (String, Uuid) = (row.read("tenant")?, row.read("id")?);
            self.cancel_one(&tenant, run, Some(PARENT_ENDED)).await?;
        }
        Ok(())
    }
}
