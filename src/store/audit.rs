//! The audit log: rows are added, and deleted by nothing but its own retention.

use chrono::{DateTime, SubsecRound, Utc};
use serde_json::{Value, json};
use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::projection::audit_id;
use super::sql::Query;
use super::tables::{AuditRow, insert};
use super::{Store, StoreError};
use crate::clock;
use crate::event::{Act, AuditAction, AuditRecord, SERVICE};

/// All tenants that have entries, by one look-up each; the last row is NULL.
const TENANTS: &str = "WITH RECURSIVE tenants (tenant) AS (SELECT min(tenant) FROM audit_log \
    UNION ALL SELECT (SELECT min(tenant) FROM audit_log a WHERE a.tenant > t.tenant) \
    FROM tenants t WHERE t.tenant IS NOT NULL) ";

impl AuditRow {
    /// What was decided on a call of a run, and done.
    pub(super) fn of_call(tenant: &str, subject: &str, run: Uuid, record: &AuditRecord) -> Self {
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
            reason: record.reason,
            arguments: record.arguments,
            labels: record.labels.names(),
            outcome: record.outcome,
            duration_ms: record.duration_ms,
        }
    }

    pub(super) fn of_act(act: Act) -> Self {
        let is_refused = act.action == AuditAction::LoginRefused;
        let (decision, outcome) =
            if is_refused { ("blocked", "not_executed") } else { ("allowed", "succeeded") };
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

    /// Deletes up to `limit` entries of all tenants that were written before that instant, and
    /// records that; how many.
    pub async fn delete_audit(&self, before: DateTime<Utc>, limit: u32) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let delete = Query::new(TENANTS).push(
            "DELETE FROM audit_log WHERE (tenant, at, id) IN (SELECT tenant, at, id \
             FROM audit_log WHERE tenant IN (SELECT tenant FROM tenants) AND at < :before \
             LIMIT :limit{skip_locked}) RETURNING tenant, action",
        );
        let deleted = tx.run(delete.bind("before", before).bind("limit", limit)).await?;
        let mut counts = std::collections::BTreeMap::<String, u64>::new();
        for row in &deleted {
            // Otherwise the record of a deletion would be followed by that of its own, for ever.
            let counted = row.read::<AuditAction>("action")? != AuditAction::AuditDeleted;
            *counts.entry(row.read("tenant")?).or_default() += u64::from(counted);
        }
        for (tenant, records) in counts.into_iter().filter(|(_, records)| *records > 0) {
            let details = json!({"records": records, "before": before});
            note(&mut *tx, by_service(tenant, AuditAction::AuditDeleted, details)).await?;
        }
        tx.commit().await?;
        Ok(deleted.len() as u64)
    }
}
