//! The ownership of runs: cancel requests, and returning runs to the queue.
//!
//! An orphaned run is only requeued here. The replica that claims it asks the run's state machine what to do.

use std::time::Duration;

use serde_json::json;
use uuid::Uuid;

use super::audit::add_act;
use super::backend::Work;
use super::conflict::retry_conflicts;
use super::sql::{Query, Row};
use super::tables::{Record, ids};
use super::{Ownership, RunRecord, Store, StoreError, Wakeup};
use crate::event::{Act, AuditAction};

/// The outcome of a cancel request.
#[derive(Debug, Clone, PartialEq)]
pub enum CancelOutcome {
    /// The run had ended already and is unchanged.
    AlreadyEnded(RunRecord),
    /// The run will be cancelled: by its owner if it is running, otherwise by the replica that claims it.
    Requested(RunRecord),
    /// The same, but its row cannot be read. Unless a replica drives it, it ends when it is cancelled again after its
    /// row was repaired.
    Unreadable,
}

/// How a run goes back to the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Requeue {
    /// It can be claimed at once.
    AtOnce,
    /// It can be claimed after a pause, because this replica cannot drive it now.
    After(Duration),
    /// A crash is counted. The run waits one second per earlier crash, one minute at most.
    Crashed,
}

impl Store {
    /// How many requests of parked runs of all tenants are pending, without those that a child run answers.
    pub async fn pending_approvals(&self) -> Result<u64, StoreError> {
        let count = Query::new(
            "SELECT count(*) AS pending FROM approvals WHERE status = 'pending' AND kind <> 'child'",
        );
        let rows = self.backend.read(Work::Control, count).await?;
        rows.first().map_or(Ok(0), |row| row.read("pending"))
    }

    /// Requests the cancellation of a run and of all its descendants. A run without an owner is queued for
    /// [`Store::claim_cancelled`]. `None`: no such run.
    pub async fn request_cancel(
        &self,
        tenant: &str,
        run: Uuid,
        subject: &str,
        reason: Option<&str>,
    ) -> Result<Option<CancelOutcome>, StoreError> {
        let asked = retry_conflicts(|| self.cancel_audited(tenant, run, subject, reason)).await?;
        let outcome = match &asked {
            Some(row) => requested(run, row),
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
    ) -> Result<Option<Row>, StoreError> {
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
            add_act(&mut *tx, act).await?;
        }
        let rows = tx.run(cancel(tenant, run, reason)).await?;
        tx.commit().await?;
        self.backend.hint(Wakeup::Cancel(run)).await;
        Ok(rows.into_iter().next())
    }

    /// Asks one run to cancel, unless it has ended.
    pub(super) async fn cancel_one(
        &self,
        tenant: &str,
        run: Uuid,
        reason: Option<&str>,
    ) -> Result<(), StoreError> {
        let rows = self.backend.write(Work::Control, cancel(tenant, run, reason)).await?;
        if !rows.is_empty() {
            self.backend.hint(Wakeup::Cancel(run)).await;
        }
        Ok(())
    }

    /// Whether this owner was the last one to drive the run, under this epoch, and the run is not queued: then no other
    /// task drives it.
    pub async fn is_last_owner(&self, run: Uuid, by: Ownership<'_>) -> Result<bool, StoreError> {
        let look = Query::new(
            "SELECT 1 FROM runs WHERE id = :run AND epoch = :epoch AND status <> 'queued' \
             AND (status <> 'running' OR owner = :owner)",
        );
        let look = look.bind("run", run).bind("epoch", by.epoch).bind("owner", by.owner);
        Ok(!self.backend.read(Work::Control, look).await?.is_empty())
    }

    /// Running runs of this owner with a cancel request, with its reason.
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

    /// Puts this owner's running runs back into the queue without counting a crash; returns their number.
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

    /// Puts a running run back into the queue, if this owner still has it under this epoch; returns whether it
    /// had.
    pub async fn give_back(
        &self,
        owner: &str,
        run: Uuid,
        epoch: i64,
        how: Requeue,
    ) -> Result<bool, StoreError> {
        let (crashes, pause) = match how {
            Requeue::AtOnce => (0_i64, Duration::ZERO),
            Requeue::After(pause) => (0, pause),
            Requeue::Crashed => (1, Duration::from_secs(1)),
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

fn requested(run: Uuid, row: &Row) -> CancelOutcome {
    match RunRecord::read(row) {
        Ok(run) => CancelOutcome::Requested(run),
        Err(error) => {
            tracing::error!(run_id = %run, %error, "the row of a cancelled run cannot be read");
            CancelOutcome::Unreadable
        }
    }
}

fn cancel(tenant: &str, run: Uuid, reason: Option<&str>) -> Query {
    let request = Query::new(
        "UPDATE runs SET cancel_requested_at = COALESCE(cancel_requested_at, {now}), \
         cancel_reason = COALESCE(cancel_reason, :reason), \
         status = CASE WHEN status = 'running' THEN status ELSE 'queued' END, \
         available_at = CASE WHEN status = 'running' THEN NULL \
         WHEN status = 'queued' AND available_at <= {now} THEN available_at ELSE {now} END \
         WHERE tenant = :tenant AND id = :run AND finished_at IS NULL RETURNING *",
    );
    request.bind("tenant", tenant).bind("run", run).bind("reason", reason)
}
