//! Lists and deletes the observations of earlier runs.
//!
//! [`super::recall`] searches the ones that match a run's inputs.

use chrono::{DateTime, Utc};
use serde_json::json;
use uuid::Uuid;

use super::audit::add_act;
use super::backend::Work;
use super::conflict::retry_conflicts;
use super::observations::words;
use super::recall::{Wanted, expression};
use super::sql::{Dialect, Query};
use super::tables::{Group, Observation, Record};
use super::{Page, RunCursor, Store, StoreError};
use crate::event::{Act, AuditAction};
use crate::run::Caller;

/// Rows that one transaction deletes, at most.
const BATCH: u32 = 1000;

/// Which observations to list or delete.
#[derive(Debug, Clone, Default)]
pub struct MemoryFilter {
    pub agent: Option<String>,
    pub session_id: Option<String>,
    /// Only observations with all words of this text.
    pub text: Option<String>,
}

/// The id of an observation: the run, and the number of the observed event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObservationId {
    pub run_id: Uuid,
    pub seq: i64,
}

impl ObservationId {
    /// The inverse of `Display`.
    pub fn parse(text: &str) -> Option<Self> {
        let (run_id, seq) = text.rsplit_once('-')?;
        let id = Self { run_id: Uuid::try_parse(run_id).ok()?, seq: seq.parse().ok()? };
        (id.to_string() == text).then_some(id)
    }
}

impl std::fmt::Display for ObservationId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}-{}", self.run_id, self.seq)
    }
}

impl Observation {
    pub fn id(&self) -> ObservationId {
        ObservationId { run_id: self.run_id, seq: self.seq }
    }
}

impl Store {
    /// The observations of this tenant's runs, newest first.
    pub async fn memory(
        &self,
        tenant: &str,
        filter: &MemoryFilter,
        page: &Page<RunCursor>,
    ) -> Result<Vec<Observation>, StoreError> {
        let columns = Observation::columns();
        let columns: Vec<_> = columns.iter().map(|column| format!("o.{}", column.name)).collect();
        let list = Query::new(format!(
            "SELECT {} FROM observations o WHERE o.tenant = :tenant",
            columns.join(", ")
        ));
        let list = list.bind("tenant", tenant);
        let mut list = list.and("o.agent = :agent", "agent", filter.agent.as_deref()).and(
            "o.session_id = :session",
            "session",
            filter.session_id.as_deref(),
        );
        if let Some(text) = &filter.text {
            let words = words(text);
            if words.is_empty() {
                return Ok(Vec::new());
            }
            let dialect = self.backend.dialect();
            let condition = match dialect {
                Dialect::Postgres => " AND o.words @@ to_tsquery('english', :words)",
                Dialect::Sqlite => {
                    " AND o.id IN (SELECT rowid FROM observation_words \
                     WHERE observation_words MATCH :words)"
                }
            };
            list = list.push(condition).bind("words", expression(&words, Wanted::All, dialect));
        }
        if let Some(after) = &page.after {
            let id = ObservationId::parse(&after.id);
            let id = id.unwrap_or(ObservationId { run_id: Uuid::nil(), seq: 0 });
            list = list
                .push(" AND (o.at, o.run_id, o.seq) < (:after, :after_run, :after_seq)")
                .bind("after", after.at)
                .bind("after_run", id.run_id)
                .bind("after_seq", id.seq);
        }
        let list = list.push(" ORDER BY o.at DESC, o.run_id DESC, o.seq DESC LIMIT :limit");
        let rows = self.backend.read(Work::Lists, list.bind("limit", page.limit)).await?;
        rows.iter().map(Record::read).collect()
    }

    /// Deletes one observation of this tenant, and records that; returns the number of deleted rows.
    pub async fn forget(&self, caller: &Caller, id: ObservationId) -> Result<u64, StoreError> {
        let delete = Query::new(
            "DELETE FROM observations WHERE run_id = :run AND seq = :seq AND tenant = :tenant \
             RETURNING seq",
        );
        let delete = delete.bind("run", id.run_id).bind("seq", id.seq);
        let details = json!({"id": id.to_string()});
        self.forget_rows(caller, delete.bind("tenant", &caller.tenant), details).await
    }

    /// Deletes the observations of this agent's runs until that instant, and records that; returns the number of
    /// deleted rows. `session` restricts this to one session.
    pub async fn forget_agent(
        &self,
        caller: &Caller,
        agent: &str,
        session: Option<&str>,
        until: DateTime<Utc>,
    ) -> Result<u64, StoreError> {
        let mut forgotten = 0;
        loop {
            let some = Query::new(
                "DELETE FROM observations WHERE (run_id, seq) IN (SELECT run_id, seq \
                 FROM observations WHERE tenant = :tenant AND agent = :agent AND at <= :until",
            );
            let some = some.bind("tenant", &caller.tenant).bind("agent", agent);
            let some = some.bind("until", until).and("session_id = :session", "session", session);
            let some = some.push(" LIMIT :limit) RETURNING seq").bind("limit", BATCH);
            let details = json!({"agent": agent, "session_id": session});
            let deleted = self.forget_rows(caller, some, details).await?;
            forgotten += deleted;
            if deleted < u64::from(BATCH) {
                return Ok(forgotten);
            }
        }
    }

    async fn forget_rows(
        &self,
        caller: &Caller,
        delete: Query,
        details: serde_json::Value,
    ) -> Result<u64, StoreError> {
        retry_conflicts(|| self.try_to_forget_rows(caller, delete.clone(), details.clone())).await
    }

    async fn try_to_forget_rows(
        &self,
        caller: &Caller,
        delete: Query,
        mut details: serde_json::Value,
    ) -> Result<u64, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        let deleted = tx.run(delete).await?.len() as u64;
        if deleted > 0 {
            details["deleted"] = deleted.into();
            let act = Act {
                tenant: caller.tenant.clone(),
                subject: caller.subject.clone(),
                action: AuditAction::MemoryDeleted,
                run_id: None,
                reason: None,
                details,
            };
            add_act(&mut *tx, act).await?;
        }
        tx.commit().await?;
        Ok(deleted)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_reads_back() {
        let id = ObservationId { run_id: Uuid::from_u128(7), seq: 12 };
        assert_eq!(ObservationId::parse(&id.to_string()), Some(id));
        let run = Uuid::from_u128(7);
        for text in ["", "-", "1", &run.to_string(), &format!("{run}-"), &format!("{run}-+1")] {
            assert_eq!(ObservationId::parse(text), None, "{text}");
        }
    }
}
