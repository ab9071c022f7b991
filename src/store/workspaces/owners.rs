//! Whether the run or the session whose files are changed exists.

use uuid::Uuid;

use super::super::backend::Work;
use super::super::sql::Query;
use super::super::{Store, StoreError};

impl Store {
    /// Whether a run exists.
    pub async fn has_run(&self, run: Uuid) -> Result<bool, StoreError> {
        Ok(!self.backend.read(Work::Data, query_run(run)).await?.is_empty())
    }

    /// The newest run of a session. While no other run begins, it exists for as long as the session.
    pub async fn newest_run_of(
        &self,
        tenant: &str,
        session: &str,
    ) -> Result<Option<Uuid>, StoreError> {
        let look = Query::new(
            "SELECT id FROM runs WHERE tenant = :tenant AND session_id = :session \
             AND parent_run_id IS NULL ORDER BY created_at DESC, id DESC LIMIT 1",
        );
        let look = look.bind("tenant", tenant).bind("session", session);
        let rows = self.backend.read(Work::Data, look).await?;
        rows.first().map(|row| row.read("id")).transpose()
    }
}

pub(super) fn query_run(run: Uuid) -> Query {
    Query::new("SELECT 1 FROM runs WHERE id = :run").bind("run", run)
}
