//! Who drives a run: claims, cancel requests, giving runs back.
//!
//! An orphaned run is requeued, and nothing is decided here: the replica that claims it asks the
//! run's state machine. A run is claimed only by a version of the service that can read what has been
//! written of it: its row has the newest format of those that have owned it.

use std::time::Duration;

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::audit::note;
use super::backend::Work;
use super::listing::readable;
use super::sql::Query;
use super::tables::{Record, ids};
use super::{ClaimedRun, FORMAT, RunRecord, Store, StoreError, Wakeup};
use crate::event::{Act, AuditAction};

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

/// How a run goes back to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GivenBack {
    /// It can be claimed at once.
    AtOnce,
    /// It can be claimed after a pause: this replica is at fault.
    After(Duration),
    /// A crash is counted; it waits a second for each that was counted before, a minute at most.
    Crashed,
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

    /// Since when the oldest queued run of all tenants could have been taken, if there is one.
    pub async fn oldest_queued(&self) -> Result<Option<DateTime<Utc>>, StoreError> {
        let oldest = Query::new(concat!(
            "SELECT (SELECT min(available_at) FROM runs WHERE ",
            in_line!(),
            ") AS in_line, (SELECT min(available_at) FROM runs WHERE ",
            waits!(""),
            ") AS waiting"
        ));
        let rows = self.backend.read(Work::Control, oldest).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let oldest: [Option<DateTime<Utc>>; 2] = [row.read("in_line")?, row.read("waiting")?];
        Ok(oldest.into_iter().flatten().min())
    }

    /// What runs of all tenants wait for from outside.
    pub async fn pending_approvals(&self) -> Result<u64, StoreError> {
        let count = Query::new(
            "SELECT count(*) AS pending FROM approvals WHERE status = 'pending' AND kind <> 'child'",
        );
        let rows = self.backend.read(Work::Control, count).await?;
        rows.first().map_or(Ok(0), |row| row.read("pending"))
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
             AND r.finished_at IS NULL) AND w.format <= :format LIMIT :limit{skip_locked}), \
             due AS MATERIALIZED (SELECT id, available_at FROM runs WHERE ",
            in_line!(),
            " AND available_at <= {now} AND format <= :format \
             ORDER BY available_at, id LIMIT :limit{skip_locked}), \
             next AS MATERIALIZED (SELECT id AS next_id FROM (SELECT * FROM turned \
             UNION ALL SELECT * FROM due) AS both_lines ORDER BY available_at, id LIMIT :limit) \
             UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
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

    /// Takes up to `limit` queued runs that were begun before: they had a place then.
    pub async fn claim_begun(
        &self,
        owner: &str,
        limit: u32,
    ) -> Result<Vec<ClaimedRun>, StoreError> {
        let due = "FROM runs WHERE status = 'queued' AND started_at IS NOT NULL \
             AND available_at <= {now} AND format <= :format \
             ORDER BY available_at, id LIMIT :limit";
        let any = Query::new(format!("SELECT 1 {due}")).bind("limit", 1_u32).bind("format", FORMAT);
        if self.backend.read(Work::Control, any).await?.is_empty() {
            return Ok(Vec::new()); // and nothing is written
        }
        let claim = Query::new(format!(
            "WITH next AS MATERIALIZED (SELECT id AS next_id {due}{{skip_locked}}) \
             UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL FROM next WHERE id = next_id{}",
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
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL WHERE id = :run AND status = 'queued' AND available_at <= {now} \
             AND format <= :format",
            claimed!(),
        ));
        let claim = claim.bind("owner", owner).bind("run", run).bind("format", FORMAT);
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
            "UPDATE runs SET status = 'running', owner = :owner, epoch = epoch + 1, format = :format, \
             available_at = NULL WHERE id IN (SELECT id FROM runs WHERE status = 'queued' \
             AND cancel_requested_at IS NOT NULL AND format <= :format \
             ORDER BY cancel_requested_at \
             LIMIT :limit{skip_locked})",
            claimed!(),
        ));
        self.claimed(claim.bind("owner", owner).bind("limit", limit)).await
    }

    async fn claimed(&self, claim: Query) -> Result<Vec<ClaimedRun>, StoreError> {
        let rows = self.backend.write(Work::Control, claim.bind("format", FORMAT)).await?;
        Ok(readable(&rows).collect())
    }

    /// Asks a run to cancel, and every run that it started, and that those started. A run without
    /// an owner is queued for [`Store::claim_cancelled`]. `None`: no such run.
    pub async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let outcome = match self.cancel_audited(tenant, run, subject, reason).await? {
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

    /// As [`Self::cancel_one`]; the first request is recorded in the audit log.
    async fn cancel_audited(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
        reason: Option<&str>,
    ) -> Result<Option<RunRecord>, StoreError> {
        let mut tx = self.backend.begin(Work::Control).await?;
        let look = Query::new(
            "SELECT cancel_requested_at IS NULL AS is_first FROM runs \
             WHERE tenant = :tenant AND id = :run AND finished_at IS NULL{for_update}",
        );
        let rows = tx.run(look.bind("tenant", tenant).bind("run", run)).await?;
        let Some(row) = rows.first() else {
            tx.commit().await?;
            return Ok(None);
        };
        if row.read("is_first")? {
            let act = Act {
                tenant: tenant.to_owned(),
                subject: subject.to_owned(),
                action: AuditAction::RunCancelRequested,
                run_id: Some(run),
                reason: reason.map(str::to_owned),
                details: json!({}),
            };
            note(&mut *tx, act).await?;
        }
        let rows = tx.run(cancel(tenant, run, reason)).await?;
        tx.commit().await?;
        self.backend.hint(Wakeup::Cancel(run)).await;
        rows.first().map(Record::read).transpose()
    }

    /// `None`: it has ended, or there is no such run.
    pub(super) async fn cancel_one(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<Option<RunRecord>, StoreError> {
        let rows = self.backend.write(Work::Control, cancel(tenant, run, reason)).await?;
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
    /// it had.
    pub async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        how: GivenBack,
    ) -> Result<bool, StoreError> {
        let (crashes, pause) = match how {
            GivenBack::AtOnce => (0_i64, Duration::ZERO),
            GivenBack::After(pause) => (0, pause),
            GivenBack::Crashed => (1, Duration::from_secs(1)),
        };
        let give_back = Query::new(
            "UPDATE runs SET status = 'queued', owner = NULL, \
             crash_count = crash_count + :crashes, available_at = {now} + :pause * \
             CASE WHEN :crashes = 0 THEN 1 WHEN crash_count < 60 THEN crash_count ELSE 60 END \
             WHERE status = 'running' \
             AND owner = :owner AND id = :run AND epoch = :epoch RETURNING id",
        );
        let give_back = give_back.bind("crashes", crashes).bind("pause", pause);
        let give_back = give_back.bind("owner", owner).bind("run", run).bind("epoch", epoch);
        let rows = self.backend.write(Work::Control, give_back).await?;
        self.backend.hint(Wakeup::Queue).await;
        Ok(!rows.is_empty())
    }
}

fn cancel(tenant: &str, run: Uuid, reason: Option<&str>) -> Query {
    let request = Query::new(
        "UPDATE runs SET cancel_requested_at = COALESCE(cancel_requested_at, {now}), \
         cancel_reason = COALESCE(cancel_reason, :reason), \
         status = CASE WHEN status = 'running' THEN status ELSE 'queued' END, \
         available_at = CASE WHEN status <> 'running' THEN {now} END \
         WHERE tenant = :tenant AND id = :run AND finished_at IS NULL RETURNING *",
    );
    request.bind("tenant", tenant).bind("run", run).bind("reason", reason)
}
