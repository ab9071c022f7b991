//! The records of the audit log. They are only added; only their own retention deletes them. Texts of callers, e.g.
//! the name of a key or a reason, are recorded without apparent secrets.

use chrono::{DateTime, TimeDelta, Utc};
use serde_json::Value;
use uuid::Uuid;

use super::backend::{Transaction, Work};
use super::sql::{Query, Row};
use super::tables::{AuditRow, AuditedRun, Record, insert};
use super::{Store, StoreError};
use crate::bounds::secrets::{redact_texts, redacted};
use crate::clock;
use crate::event::{Act, AuditAction, AuditRecord, SERVICE};

/// How long after the decision a record still counts as written in time: much shorter than the time after which the
/// log is closed ([`super::audit_chain`]).
const IN_TIME: TimeDelta = TimeDelta::minutes(2);

/// Gives records that are written late the time at which they are written. Otherwise they would come into a period
/// that is closed, like records that a person has added. They stay before the next record of their run.
pub(super) fn date_late(records: &mut [AuditRow], now: DateTime<Utc>) {
    let mut next: Option<(Option<Uuid>, DateTime<Utc>)> = None;
    for record in records.iter_mut().rev() {
        if now - record.at > IN_TIME {
            let of_run = next.filter(|(run, _)| *run == record.run_id);
            record.decided_at = Some(record.at);
            record.at = of_run.map_or(now, |(_, at)| at);
        }
        next = Some((record.run_id, record.at));
    }
}

impl AuditRow {
    /// The record of the decision on a call and of its outcome.
    pub(super) fn of_call(
        tenant: &str,
        subject: &str,
        run: Uuid,
        audited_run: AuditedRun,
        record: &AuditRecord,
    ) -> Self {
        let record = record.clone();
        let AuditedRun { agent, session_id, definition_hash } = audited_run;
        Self {
            tenant: tenant.to_owned(),
            id: audit_id(&record),
            at: record.at,
            decided_at: None,
            action: AuditAction::ToolCall,
            run_id: Some(run),
            call_id: Some(record.call_id),
            subject: subject.to_owned(),
            tool: Some(redacted(&record.tool).into_owned()),
            rule: Some(record.rule),
            decision: record.decision,
            reason: record.reason.map(|reason| redacted(&reason).into_owned()),
            arguments: record.arguments,
            labels: record.labels.names(),
            outcome: record.outcome,
            duration_ms: record.duration_ms,
            result_bytes: record.result_bytes,
            definition_hash,
            pattern: record.pattern,
            agent,
            session_id,
        }
    }

    /// The record of an act. Agent and session are those that the act names, otherwise those of its run.
    fn of_act(mut act: Act, audited_run: AuditedRun) -> Self {
        redact_texts(&mut act.details);
        let named = |name: &str| act.details.get(name).and_then(Value::as_str).map(str::to_owned);
        let agent = named("agent").or(audited_run.agent);
        let session_id = named("session_id").or(audited_run.session_id);
        let (decision, outcome) = match act.action {
            AuditAction::LoginRefused | AuditAction::McpRefused => ("blocked", "blocked"),
            AuditAction::McpRequested if act.reason.is_some() => ("allowed", "failed"),
            _ => ("allowed", "succeeded"),
        };
        Self {
            tenant: act.tenant,
            id: Uuid::now_v7(),
            at: clock::now(),
            decided_at: None,
            action: act.action,
            run_id: act.run_id,
            call_id: None,
            subject: act.subject,
            tool: None,
            rule: None,
            decision: decision.to_owned(),
            reason: act.reason.map(|reason| redacted(&reason).into_owned()),
            arguments: act.details.to_string(),
            labels: Vec::new(),
            outcome: outcome.to_owned(),
            duration_ms: None,
            result_bytes: None,
            definition_hash: None,
            pattern: None,
            agent,
            session_id,
        }
    }
}

/// Adds an act to the audit log, as a part of this transaction.
pub(super) async fn add_act(tx: &mut dyn Transaction, act: Act) -> Result<(), StoreError> {
    let run = match query_run_of(&act) {
        None => Vec::new(),
        Some(look) => tx.run(look).await?,
    };
    tx.run(insertion(act, &run)?).await.map(drop)
}

fn query_run_of(act: &Act) -> Option<Query> {
    let look = "SELECT agent, session_id, definition_hash FROM runs \
        WHERE tenant = :tenant AND id = :run";
    Some(Query::new(look).bind("tenant", &act.tenant).bind("run", act.run_id?))
}

/// `run` is the row of the act's run, if there is one.
fn insertion(act: Act, run: &[Row]) -> Result<Query, StoreError> {
    let audited_run = run.first().map(AuditedRun::read).transpose()?.unwrap_or_default();
    Ok(insert("audit_log", AuditRow::of_act(act, audited_run)))
}

/// An act of the service itself.
pub(super) fn act_of_service(tenant: String, action: AuditAction, details: Value) -> Act {
    Act { tenant, subject: SERVICE.to_owned(), action, run_id: None, reason: None, details }
}

/// A UUID v7 of the record's time and call: the same each time the same record is written.
fn audit_id(record: &AuditRecord) -> Uuid {
    let micros = u64::try_from(record.at.timestamp_micros()).unwrap_or_default();
    let (_, call) = record.call_id.as_u64_pair();
    let mut random = [0; 10];
    random[..2].copy_from_slice(&u16::try_from(micros % 1000).unwrap_or_default().to_be_bytes());
    random[2..].copy_from_slice(&call.to_be_bytes());
    uuid::Builder::from_unix_timestamp_millis(micros / 1000, &random).into_uuid()
}

impl Store {
    /// Adds an act to the audit log.
    pub async fn record_act(&self, act: Act) -> Result<(), StoreError> {
        let run = match query_run_of(&act) {
            None => Vec::new(),
            Some(look) => self.backend.read(Work::Data, look).await?,
        };
        self.backend.write(Work::Data, insertion(act, &run)?).await.map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Labels;

    fn record(call_id: Uuid, at: DateTime<Utc>) -> AuditRecord {
        AuditRecord {
            labels: Labels::default(),
            at,
            call_id,
            tool: "t".into(),
            rule: "none".into(),
            pattern: None,
            decision: "allowed".into(),
            reason: None,
            arguments: "{}".into(),
            outcome: "succeeded".into(),
            duration_ms: None,
            result_bytes: None,
        }
    }

    fn time() -> DateTime<Utc> {
        DateTime::from_timestamp_micros(1_750_000_000_123_456).unwrap()
    }

    #[test]
    fn an_audit_record_has_the_same_id_each_time_it_is_written() {
        let record = |call_id| record(call_id, time());
        let (first, second) = (Uuid::now_v7(), Uuid::now_v7());
        assert_eq!(audit_id(&record(first)), audit_id(&record(first)));
        assert_ne!(audit_id(&record(first)), audit_id(&record(second)));
        assert_eq!(audit_id(&record(first)).get_version_num(), 7);
    }

    #[test]
    fn a_record_that_is_written_late_has_the_time_of_its_writing() {
        let now = time();
        let [one, other] = [Uuid::now_v7(), Uuid::now_v7()];
        let row = |run, minutes| {
            let record = record(run, now - TimeDelta::minutes(minutes));
            AuditRow::of_call("acme", "key", run, AuditedRun::default(), &record)
        };
        // Requests of a long call, and the call; a run that waited for the store; a record in time.
        let mut rows = [row(one, 90), row(one, 60), row(one, 1), row(other, 3), row(one, 0)];
        let ids = rows.clone().map(|row| row.id);
        date_late(&mut rows, now);
        let ago = |at: DateTime<Utc>| (now - at).num_minutes();
        let dated = rows.clone().map(|row| (ago(row.at), row.decided_at.map(ago)));
        assert_eq!(
            dated,
            [(1, Some(90)), (1, Some(60)), (1, None), (0, Some(3)), (0, None)],
            "late records stay before the call's"
        );
        assert_eq!(rows.clone().map(|row| row.id), ids, "the same each time it is written");
        assert!(rows[..3].is_sorted_by_key(|row| (row.at, row.id)));
    }
}
