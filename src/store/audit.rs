//! The audit log: rows are added, and deleted by nothing but its own retention.

use std::collections::BTreeMap;

use chrono::{DateTime, SubsecRound, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::audit_chain::{TENANTS, delete_stretches};
use super::backend::{Transaction, Work};
use super::projection::audit_id;
use super::sql::Query;
use super::tables::{AuditRow, insert};
use super::{Store, StoreError};
use crate::bounds::secrets::redacted;
use crate::clock;
use crate::event::{Act, AuditAction, AuditRecord, SERVICE};

impl AuditRow {
    /// What was decided on a call of a run, and done.
    pub(super) fn of_call(
        tenant: &str,
        subject: &str,
        run: Uuid,
        definition_hash: Option<String>,
        record: &AuditRecord,
    ) -> Self {
        let record = record.clone();
        Self {
            tenant: tenant.to_owned(),
            id: audit_id(&record),
            at: record.at,
            action: AuditAction::ToolCall,
            run_id: Some(run),
            call_id: Some(record.call_id),
            subject: subject.to_owned(),
            tool: Some(record.tool),
            rule: Some(record.rule),
            decision: record.decision,
            reason: record.reason.map(|reason| redacted(&reason).into_owned()),
            arguments: record.arguments,
            labels: record.labels.names(),
            outcome: record.outcome,
            duration_ms: record.duration_ms,
            definition_hash,
            pattern: record.pattern,
        }
    }

    pub(super) fn of_act(act: Act) -> Self {
        let is_refused = act.action == AuditAction::LoginRefused;
        let (decision, outcome) =
            if is_refused { ("blocked", "blocked") } else { ("allowed", "succeeded") };
        Self {
            tenant: act.tenant,
            id: Uuid::now_v7(),
            at: clock::now().trunc_subsecs(6),
            action: act.action,
            run_id: act.run_id,
            call_id: None,
            subject: act.subject,
            tool: None,
            rule: None,
            decision: decision.to_owned(),
            reason: act.reason,
            arguments: act.details.to_string(),
            labels: Vec::new(),
            outcome: outcome.to_owned(),
            duration_ms: None,
            definition_hash: None,
            pattern: None,
        }
    }
}

/// Adds an act to the audit log, as a part of this transaction.
pub(super) async fn note(tx: &mut dyn Transaction, act: Act) -> Result<(), StoreError> {
    tx.run(insert("audit_log", AuditRow::of_act(act))).await.map(drop)
}

/// An act of the service itself.
pub(super) fn by_service(tenant: String, action: AuditAction, details: Value) -> Act {
    Act { tenant, subject: SERVICE.to_owned(), action, run_id: None, reason: None, details }
}

impl Store {
    /// Adds an act to the audit log.
    pub async fn record_act(&self, act: Act) -> Result<(), StoreError> {
        let row = insert("audit_log", AuditRow::of_act(act));
        self.backend.write(Work::Data, row).await.map(drop)
    }

    /// Deletes about `limit` entries of all tenants that were written before that instant, and records
    /// that; how many. What is closed goes in whole stretches, the oldest first, so that the chain of
    /// those that are left can be followed.
    pub async fn delete_audit(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let turn = tx.run(Query::new("SELECT {try_audit} AS is_mine")).await?;
        if !turn.first().map_or(Ok(false), |row| row.read("is_mine"))? {
            tx.commit().await?;
            return Ok(0);
        }
        let mut deleted = 0;
        let mut counts = BTreeMap::<String, (u64, Option<i64>)>::new();
        for (tenant, records, through) in delete_stretches(&mut *tx, before, limit).await? {
            deleted += records;
            counts.insert(tenant, (records, Some(through)));
        }
        let left = limit.saturating_sub(u32::try_from(deleted).unwrap_or(u32::MAX));
        let delete = Query::new(TENANTS).push(
            "DELETE FROM audit_log WHERE (tenant, at, id) IN (SELECT a.tenant, a.at, a.id \
             FROM audit_log a WHERE a.tenant IN (SELECT tenant FROM tenants) AND a.at < :before \
             AND NOT EXISTS (SELECT 1 FROM audit_stretches s WHERE s.tenant = a.tenant \
             AND s.last_at >= a.at) LIMIT :limit) RETURNING tenant, action",
        );
        let open = tx.run(delete.bind("before", before).bind("limit", left)).await?;
        for row in &open {
            // Otherwise the record of a deletion would be followed by that of its own, for ever.
            let counted = row.read::<AuditAction>("action")? != AuditAction::AuditDeleted;
            counts.entry(row.read("tenant")?).or_default().0 += u64::from(counted);
        }
        for (tenant, (records, through)) in counts {
            if records == 0 && through.is_none() {
                continue;
            }
            let mut details = json!({"records": records, "before": before});
            if let Some(through) = through {
                details["through"] = through.into();
            }
            note(&mut *tx, by_service(tenant, AuditAction::AuditDeleted, details)).await?;
        }
        tx.commit().await?;
        Ok(deleted + open.len() as u64)
    }
}
