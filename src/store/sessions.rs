//! Sessions of runs; one run at a time holds a session.

use serde_json::json;
use uuid::Uuid;

use super::audit::add_act;
use super::backend::Work;
use super::conflict::retry_conflicts;
use super::retention::{delete_kept_files, delete_runs, runs_to_delete};
use super::sql::Query;
use super::tables::{Record, ids};
use super::{
    ListedSession, MoveToTrash, Page, RunCursor, SessionDeleted, SessionRecord, SessionRunRecord,
    Store, StoreError,
};
use crate::event::{Act, AuditAction};

impl Store {
    /// A session, with the last `ended` runs that held it and that had an answer of a model, had a given call instead
    /// of an answer, or ended because the context window was too small. `None`: no such session.
    pub async fn session(
        &self,
        tenant: &str,
        session: &str,
        ended: u32,
    ) -> Result<Option<SessionRecord>, StoreError> {
        let look = Query::new(
            "SELECT f.agent, f.created_at, l.created_at AS last_run_at, \
             (SELECT CAST({json_array}(id ORDER BY session_place, available_at, id) AS text) FROM (\
             SELECT id, session_place, available_at FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND session_place = 'holds' AND finished_at IS NULL \
             UNION ALL SELECT id, session_place, available_at FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND status = 'queued' AND session_place <> 'holds' \
             AND available_at <= {now}) alive) \
             AS live, \
             (SELECT COALESCE(max(session_turn), 0) FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND session_turn IS NOT NULL) AS turn, \
             (SELECT CAST({json_array}(id ORDER BY session_turn) AS text) FROM (\
             SELECT id, session_turn FROM runs WHERE tenant = :tenant AND session_id = :session \
             AND session_turn IS NOT NULL AND finished_at IS NOT NULL \
             AND (iterations > 0 OR (kind = 'call' AND attempts > 0) \
             OR termination_reason = 'context_overflow') \
             ORDER BY session_turn DESC LIMIT :ended) past) AS ended \
             FROM (SELECT agent, created_at FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND parent_run_id IS NULL ORDER BY created_at, id LIMIT 1) f \
             CROSS JOIN (SELECT created_at FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND parent_run_id IS NULL \
             ORDER BY created_at DESC, id DESC LIMIT 1) l",
        );
        let look = look.bind("tenant", tenant).bind("session", session).bind("ended", ended);
        let rows = self.backend.read(Work::Data, look).await?;
        rows.first().map(Record::read).transpose()
    }

    /// Sessions, sorted by their newest run, newest first; the cursor is that of the newest run.
    pub async fn sessions(
        &self,
        tenant: &str,
        agent: Option<&str>,
        page: &Page<RunCursor>,
    ) -> Result<Vec<ListedSession>, StoreError> {
        let mut list = listed(tenant).and("s.agent = :agent", "agent", agent);
        if let Some(after) = &page.after {
            let id = Uuid::parse_str(&after.id).unwrap_or_default();
            list = list.push(" AND (s.last_run_at, s.last_run_id) < (:after, :after_id)");
            list = list.bind("after", after.at).bind("after_id", id);
        }
        let list = list.push(" ORDER BY s.last_run_at DESC, s.last_run_id DESC LIMIT :limit");
        let rows = self.backend.read(Work::Lists, list.bind("limit", page.limit)).await?;
        rows.iter().map(Record::read).collect()
    }

    /// One session, as in a list.
    pub async fn listed_session(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<Option<ListedSession>, StoreError> {
        let one = listed(tenant).and("s.session_id = :session", "session", Some(session));
        let rows = self.backend.read(Work::Data, one).await?;
        rows.first().map(Record::read).transpose()
    }

    /// The runs that have held a session, beginning with one turn, in the order of their turns.
    pub async fn session_runs(
        &self,
        tenant: &str,
        session: &str,
        from: i64,
        limit: u32,
    ) -> Result<Vec<SessionRunRecord>, StoreError> {
        let list = Query::new(
            "SELECT id, created_at, session_turn AS turn FROM runs WHERE tenant = :tenant \
             AND session_id = :session AND session_turn >= :from \
             ORDER BY session_turn LIMIT :limit",
        );
        let list = list.bind("tenant", tenant).bind("session", session);
        let list = list.bind("from", from).bind("limit", limit);
        let rows = self.backend.read(Work::Data, list).await?;
        rows.iter().map(Record::read).collect()
    }

    /// Some runs that other runs interrupt in their sessions and that have no cancel request yet: the tenant, the run,
    /// the interrupting run, and the subject that started it.
    pub async fn displaced_runs(
        &self,
        limit: u32,
    ) -> Result<Vec<(String, Uuid, Uuid, String)>, StoreError> {
        let displaced = |before: &str| {
            format!(
                "SELECT n.tenant, b.id, n.id AS by_run, n.subject FROM runs n JOIN runs b \
                 ON b.tenant = n.tenant AND b.session_id = n.session_id \
                 AND b.cancel_requested_at IS NULL AND {before} \
                 WHERE n.status = 'queued' AND n.session_place <> 'holds' \
                 AND n.session_place = 'next' AND n.cancel_requested_at IS NULL"
            )
        };
        let holders = displaced("b.session_place = 'holds' AND b.finished_at IS NULL");
        let queued = displaced(
            "b.status = 'queued' AND b.session_place <> 'holds' AND b.session_place = 'next' \
             AND (b.available_at, b.id) < (n.available_at, n.id)",
        );
        let all = Query::new(format!("{holders} UNION ALL {queued} LIMIT :limit"));
        let rows = self.backend.read(Work::Control, all.bind("limit", limit)).await?;
        let displaced = rows.iter().map(|row| {
            Ok((row.read("tenant")?, row.read("id")?, row.read("by_run")?, row.read("subject")?))
        });
        displaced.collect()
    }

    /// Deletes a session's runs and those that they delegated to, with their journals, and records
    /// who did that.
    pub async fn delete_session(
        &self,
        tenant: &str,
        session: &str,
        subject: &str,
        move_to_trash: MoveToTrash<'_>,
    ) -> Result<SessionDeleted, StoreError> {
        retry_conflicts(|| self.try_to_delete_session(tenant, session, subject, move_to_trash))
            .await
    }

    async fn try_to_delete_session(
        &self,
        tenant: &str,
        session: &str,
        subject: &str,
        move_to_trash: MoveToTrash<'_>,
    ) -> Result<SessionDeleted, StoreError> {
        let mut tx = self.backend.begin(Work::Data).await?;
        // Locked, so that none of them begins, and no other run after one of them, in the meantime.
        let runs = |lock: &str| {
            let all = "SELECT id, finished_at IS NULL AS live FROM runs \
                 WHERE tenant = :tenant AND session_id = :session ORDER BY id";
            let all = Query::new(format!("{all}{lock}"));
            all.bind("tenant", tenant).bind("session", session)
        };
        let locked = ids(&tx.run(runs("{for_update}")).await?)?;
        // Only a separate statement sees runs that began before all were locked.
        let rows = tx.run(runs("")).await?;
        if rows.is_empty() {
            tx.commit().await?;
            return Ok(SessionDeleted::Unknown);
        }
        for row in &rows {
            if row.read("live")? {
                tx.commit().await?;
                return Ok(SessionDeleted::Busy);
            }
        }
        let runs = ids(&rows)?;
        if runs != locked {
            return Err(StoreError::Conflict("runs of the session have begun".to_owned()));
        }
        let family = Query::new(
            "WITH RECURSIVE family (id) AS (SELECT id FROM runs WHERE id IN :runs \
             UNION SELECT r.id FROM family f JOIN runs r \
             ON r.tenant = :tenant AND r.parent_run_id = f.id) SELECT r.id, r.finished_at IS NULL AS live \
             FROM family JOIN runs r ON r.id = family.id",
        );
        let rows = tx.run(family.bind("tenant", tenant).bind("runs", &*runs)).await?;
        // A child run goes on for a moment when its parent has been cancelled.
        for row in &rows {
            if row.read("live")? {
                tx.commit().await?;
                return Ok(SessionDeleted::Busy);
            }
        }
        let family = ids(&rows)?;
        let deleted = runs_to_delete(&mut *tx, &family).await?;
        let workspaces = delete_kept_files(&mut *tx, move_to_trash(&deleted).await).await?;
        let act = Act {
            tenant: tenant.to_owned(),
            subject: subject.to_owned(),
            action: AuditAction::SessionDeleted,
            run_id: None,
            reason: None,
            details: json!({"session_id": session, "runs": rows.len(), "workspaces": workspaces}),
        };
        add_act(&mut *tx, act).await?;
        // Last, since new runs of the session wait for it.
        delete_runs(&mut *tx, &family).await?;
        tx.commit().await?;
        Ok(SessionDeleted::Gone)
    }
}

/// Runs of a session that a list shows.
const LISTED_RUNS: u32 = 10;

/// Sessions with the ids of their newest runs.
fn listed(tenant: &str) -> Query {
    let all = "SELECT s.last_run_id AS id, s.session_id, s.agent, s.last_run_at, s.created_at, \
         s.run_count, (SELECT CAST({json_array}(id ORDER BY created_at, id) AS text) FROM (\
         SELECT r.id, r.created_at FROM runs r WHERE r.tenant = :tenant \
         AND r.session_id = s.session_id AND r.parent_run_id IS NULL \
         ORDER BY r.created_at DESC, r.id DESC LIMIT :listed_runs) newest) AS newest_runs \
         FROM sessions s WHERE s.tenant = :tenant";
    Query::new(all).bind("tenant", tenant).bind("listed_runs", LISTED_RUNS)
}
