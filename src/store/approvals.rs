//! The requests of parked runs: their rows, and the answers to them.
//!
//! A request's row is written with the event that asks, and is answered once. A run whose last pending request
//! is answered goes back to the queue in the same transaction. A transaction locks the run's row first and reads
//! the pending requests in a later statement. So of two answers to the last two requests, one sees the other and
//! queues the run. An answer that arrives while the run is being parked is seen by one of the two transactions.

use serde_json::Value;
use strum::{EnumString, IntoStaticStr, VariantNames};
use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::conflict::retry_conflicts;
use super::listing::MAX_ARGUMENTS;
use super::runs::one_run;
use super::sql::Query;
use super::tables::{ApprovalRecord, AuditRow, AuditedRun, Record, ids, insert};
use super::{RunRecord, Store, StoreError, Wakeup};
use crate::event::{AuditRecord, Resolution, Resolved};
use crate::run::Caller;

/// The status of a request of a parked run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, IntoStaticStr, EnumString, VariantNames)]
#[strum(serialize_all = "snake_case")]
pub enum ApprovalStatus {
    /// Waiting for an answer.
    Pending,
    /// The call may be executed, or the run may continue.
    Approved,
    /// The call may not be executed, or the run may not continue.
    Denied,
    /// Not answered in time.
    Expired,
    /// The caller has executed its tool, or given the input that a tool asked for.
    Answered,
    /// A review or a child run has settled the outcome of the call.
    Resolved,
    /// The run ended first.
    Void,
}

impl ApprovalStatus {
    /// The name used in JSON and SQL.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// The status after an answer.
    pub fn after(resolution: &Resolution) -> Self {
        match resolution {
            Resolution::Approved { .. } => Self::Approved,
            Resolution::Denied => Self::Denied,
            Resolution::Expired => Self::Expired,
            Resolution::Result { .. } | Resolution::Input { .. } => Self::Answered,
            Resolution::Happened { .. } | Resolution::DidNotHappen | Resolution::ChildEnded => {
                Self::Resolved
            }
        }
    }
}

impl ApprovalRecord {
    /// Replaces the requested arguments by those of the approver; false if the approver gave none.
    pub fn take_edited(&mut self) -> bool {
        let Some(Resolution::Approved { arguments: Some(edited), .. }) = self.resolution.take()
        else {
            return false;
        };
        self.arguments = edited;
        true
    }

    pub(super) fn leave_out_large_edits(&mut self) {
        if let Some(Resolution::Approved { arguments: Some(edited), .. }) = &mut self.resolution
            && edited.to_string().len() > MAX_ARGUMENTS
        {
            *edited = Value::Null;
        }
    }

    /// The answer as an event; `None` without an answer.
    pub fn resolved(&self) -> Option<Resolved> {
        Some(Resolved {
            call_id: self.call_id,
            kind: self.kind,
            resolution: self.resolution.clone()?,
            decided_by: self.decided_by.clone(),
            reason: self.decision_reason.clone(),
            decided_at: self.decided_at,
            child_duration_ms: None,
        })
    }
}

/// Which rows to list; absent means any.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[expect(missing_docs, reason = "each field is the filter of that name")]
pub struct ApprovalFilter {
    pub status: Option<ApprovalStatus>,
    pub run_id: Option<Uuid>,
    pub call_id: Option<Uuid>,
    /// Excludes requests that the end of a child run answers.
    pub from_outside: bool,
}

/// An answer to a parked run.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    /// The number of the event with the request: a call can be requested several times.
    pub seq: i64,
    /// The answer itself.
    pub resolution: Resolution,
    /// The subject that gives the answer.
    pub decided_by: String,
    /// The reason that the subject gives.
    pub reason: Option<String>,
    /// The audit record that is written with the answer.
    pub audit: Option<AuditRecord>,
}

impl Answer {
    /// An answer to the request of event `seq`, without a reason.
    pub fn to(seq: i64, resolution: Resolution, by: &Caller, audit: AuditRecord) -> Self {
        let decided_by = by.subject.clone();
        Self { seq, resolution, decided_by, reason: None, audit: Some(audit) }
    }
}

/// Runs that are settled in one transaction, at most.
const CHUNK: i64 = 256;

impl Store {
    /// Stores the answer to a pending request, and queues the run if no other request is pending. Returns the
    /// updated run; `None` if the request is not pending, or not pending yet.
    pub async fn answer(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
        answer: &Answer,
    ) -> Result<Option<RunRecord>, StoreError> {
        retry_conflicts(|| self.try_to_answer(tenant, run, call, answer)).await
    }

    async fn try_to_answer(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
        answer: &Answer,
    ) -> Result<Option<RunRecord>, StoreError> {
        let mut tx = self.backend.begin(Work::Control).await?;
        let locked = tx.run(one_run(tenant, run).push("{for_update}")).await?;
        let Some(audited_run) = locked.first() else {
            tx.commit().await?;
            return Ok(None);
        };
        let audited_run = AuditedRun::read(audited_run)?;
        let kinds = answer.resolution.answers().iter().map(|kind| kind.as_str().to_owned());
        let kinds: Vec<String> = kinds.collect();
        let take = Query::new(
            "UPDATE approvals SET status = :status, decided_at = {now}, decided_by = :by, \
             decision_reason = :reason, resolution = :resolution \
             WHERE run_id = :run AND call_id = :call AND seq = :seq AND kind IN :kinds \
             AND status = 'pending' \
             AND (expires_at IS NULL OR expires_at > {now}) RETURNING run_id",
        );
        let take = take
            .bind("status", ApprovalStatus::after(&answer.resolution))
            .bind("by", &answer.decided_by)
            .bind("reason", answer.reason.as_ref())
            .bind("resolution", answer.resolution.clone())
            .bind("run", run)
            .bind("call", call)
            .bind("seq", answer.seq)
            .bind("kinds", &*kinds);
        if tx.run(take).await?.is_empty() {
            tx.commit().await?;
            return Ok(None);
        }
        if let Some(record) = &answer.audit {
            let row = AuditRow::of_call(tenant, &answer.decided_by, run, audited_run, record);
            tx.run(insert("audit_log", row)).await?;
        }
        requeue_answered(&mut *tx, &[run]).await?;
        let rows = tx.run(one_run(tenant, run)).await?;
        tx.commit().await?;
        self.backend.hint(Wakeup::Queue).await;
        rows.first().map(Record::read).transpose()
    }

    /// Expires overdue requests of all tenants, and queues the runs without other pending requests. Returns how
    /// many requests expired.
    pub async fn expire_approvals(&self) -> Result<u64, StoreError> {
        let due = Query::new(
            // The time is evaluated once in a subquery; otherwise PostgreSQL evaluates it for every pending row.
            "SELECT run_id AS id FROM approvals WHERE status = 'pending' \
             AND expires_at <= (SELECT {now}) ORDER BY expires_at LIMIT :limit",
        );
        let expire = Query::new(
            "UPDATE approvals SET status = 'expired', decided_at = {now}, \
             resolution = :resolution WHERE run_id IN :runs AND status = 'pending' \
             AND expires_at <= {now} RETURNING run_id AS id, false AS may_end",
        );
        self.settle_due(due, expire.bind("resolution", Resolution::Expired)).await
    }

    /// Answers the calls of parked runs whose child runs have ended. Queues the runs without other pending requests,
    /// and those whose child has no output, because that may end them. Returns how many calls were answered. If
    /// `children` is given, only calls that wait for these are answered.
    pub async fn answer_parents(&self, children: Option<&[Uuid]>) -> Result<u64, StoreError> {
        const WAITS: &str = " status = 'pending' AND child_run_id IS NOT NULL AND NOT EXISTS \
             (SELECT 1 FROM runs c WHERE c.id = child_run_id AND c.finished_at IS NULL)";
        let mut answered = 0;
        loop {
            let due = Query::new("SELECT DISTINCT run_id AS id FROM approvals WHERE").push(WAITS);
            let due = due.and("child_run_id IN :children", "children", children);
            let answer = Query::new(
                "UPDATE approvals SET status = 'resolved', decided_at = {now}, \
                 resolution = :resolution WHERE run_id IN :runs AND",
            );
            let answer = answer.push(WAITS).push(
                " RETURNING run_id AS id, COALESCE((SELECT c.status FROM runs c \
                 WHERE c.id = child_run_id), '') <> 'completed' AS may_end",
            );
            let answer = answer.bind("resolution", Resolution::ChildEnded);
            match self.settle_due(due.push(" LIMIT :limit"), answer).await? {
                0 => return Ok(answered),
                more => answered += more,
            }
        }
    }

    /// Runs `settle` for the runs that `due` returns. `settle` returns the run of each row that it settles,
    /// and whether this may end the run. Returns how many rows were settled.
    async fn settle_due(&self, due: Query, settle: Query) -> Result<u64, StoreError> {
        let due = ids(&self.backend.read(Work::Control, due.bind("limit", CHUNK)).await?)?;
        if due.is_empty() {
            return Ok(0); // without a write transaction
        }
        let mut tx = self.backend.begin(Work::Control).await?;
        let lock = Query::new("SELECT id FROM runs WHERE id IN :runs ORDER BY id{skip_locked}");
        let runs = ids(&tx.run(lock.bind("runs", &*due)).await?)?;
        let settled = tx.run(settle.bind("runs", &*runs)).await?;
        requeue_answered(&mut *tx, &runs).await?;
        let may_end = settled.iter().filter_map(|row| match row.read("may_end") {
            Ok(false) => None,
            Ok(true) => Some(row.read("id")),
            Err(error) => Some(Err(error)),
        });
        let may_end = may_end.collect::<Result<Vec<Uuid>, StoreError>>()?;
        if !may_end.is_empty() {
            tx.run(queue_parked().bind("runs", &*may_end)).await?;
        }
        tx.commit().await?;
        self.backend.hint(Wakeup::Queue).await;
        Ok(settled.len() as u64)
    }
}

/// Queues those of these parked runs that have no pending request or have a cancel request; their rows are
/// locked. The others get the status of their most important pending request: a review, then a decision, then a
/// result.
pub(super) async fn requeue_answered(
    tx: &mut dyn Transaction,
    runs: &[Uuid],
) -> Result<(), StoreError> {
    let waiting = Query::new(
        "UPDATE runs SET status = (SELECT CASE min(\
         CASE a.kind WHEN 'review' THEN 0 WHEN 'client' THEN 2 ELSE 1 END) \
         WHEN 0 THEN 'needs_review' WHEN 1 THEN 'awaiting_approval' \
         ELSE 'awaiting_tool_results' END \
         FROM approvals a WHERE a.run_id = runs.id AND a.status = 'pending') \
         WHERE id IN :runs \
         AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review') \
         AND EXISTS (SELECT 1 FROM approvals w WHERE w.run_id = runs.id AND w.status = 'pending')",
    );
    tx.run(waiting.bind("runs", runs)).await?;
    let queue = queue_parked().push(
        " AND (cancel_requested_at IS NOT NULL OR NOT EXISTS \
         (SELECT 1 FROM approvals a WHERE a.run_id = runs.id AND a.status = 'pending'))",
    );
    tx.run(queue.bind("runs", runs)).await?;
    Ok(())
}

/// Queues those of `:runs` that are parked.
fn queue_parked() -> Query {
    Query::new(
        "UPDATE runs SET status = 'queued', available_at = {now} WHERE id IN :runs \
         AND status IN ('awaiting_approval', 'awaiting_tool_results', 'needs_review')",
    )
}
