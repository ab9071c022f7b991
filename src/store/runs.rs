//! Reading one run: its row, its journal, and its parts.

use std::collections::{BTreeSet, HashMap};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::backend::Work;
use super::journal::{IS_OF_TENANT, JournalIndex, Piece, missing};
use super::listing::readable;
use super::projection::{attach_payloads, events_of};
use super::sql::Query;
use super::tables::Record;
use super::{
    IdempotentRun, IterationRecord, NewRun, Page, RunRecord, Store, StoreError, ToolCallRecord,
};

/// Runs that one statement reads, at most.
const RUNS_PER_STATEMENT: usize = 1000;

/// Bytes of a tool call without its arguments and its result, approximately.
const ROW: u64 = 1024;

impl Store {
    /// One run.
    pub async fn run(&self, tenant: &str, run: Uuid) -> Result<Option<RunRecord>, StoreError> {
        let look = Query::new(
            "SELECT runs.*, e.run_id, e.seq, e.first_seq, e.at, e.events FROM runs \
             LEFT JOIN run_events e ON e.run_id = runs.id AND e.seq = runs.next_seq - 1 \
             AND runs.finished_at IS NOT NULL WHERE runs.tenant = :tenant AND runs.id = :run",
        );
        let look = look.bind("tenant", tenant).bind("run", run);
        let rows = self.backend.read(Work::Data, look).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let mut run: RunRecord = Record::read(row)?;
        if run.finished_at.is_some() {
            if row.read::<Option<i64>>("seq")?.is_none() {
                return Err(missing(run.id, run.last_seq()));
            }
            run.take_ending(events_of(&Record::read(row)?)?.last());
        }
        Ok(Some(run))
    }

    /// A definition that runs were started with, as JSON text.
    pub async fn definition(&self, hash: &str) -> Result<Option<String>, StoreError> {
        let look = Query::new("SELECT body FROM definitions WHERE hash = :hash");
        let rows = self.backend.read(Work::Data, look.bind("hash", hash)).await?;
        rows.first().map(|row| row.read("body")).transpose()
    }

    /// Whether a stored run has the id or the idempotency key of a new run.
    pub async fn is_taken(&self, tenant: &str, new: &NewRun) -> Result<bool, StoreError> {
        let look = Query::new(
            "SELECT 1 FROM runs WHERE id = :run UNION ALL \
             SELECT 1 FROM runs WHERE tenant = :tenant AND idempotency_key = :key",
        );
        let key = new.idempotency.as_ref().map(|idempotency| &*idempotency.key);
        let look = look.bind("run", new.id).bind("tenant", tenant).bind("key", key);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// The run that holds an idempotency key, however old it is.
    pub async fn idempotent_run(
        &self,
        tenant: &str,
        key: &str,
    ) -> Result<Option<IdempotentRun>, StoreError> {
        let look = Query::new(
            "SELECT id, subject, request_hash, created_at FROM runs \
             WHERE tenant = :tenant AND idempotency_key = :key",
        );
        let look = look.bind("tenant", tenant).bind("key", key);
        let rows = self.backend.read(Work::Data, look).await?;
        rows.first().map(Record::read).transpose()
    }

    /// Removes the key from a run that was created before that instant, so that it can be used again.
    pub async fn forget_idempotency_key(
        &self,
        tenant: &str,
        key: &str,
        before: DateTime<Utc>,
    ) -> Result<(), StoreError> {
        let forget = Query::new(
            "UPDATE runs SET idempotency_key = NULL, request_hash = NULL \
             WHERE tenant = :tenant AND idempotency_key = :key AND created_at < :before",
        );
        let forget = forget.bind("tenant", tenant).bind("key", key).bind("before", before);
        self.backend.write(Work::Data, forget).await?;
        Ok(())
    }

    /// The numbers of the newest events of these runs; those that do not exist have none.
    pub async fn newest_events(&self, runs: &[Uuid]) -> Result<Vec<(Uuid, i64)>, StoreError> {
        let mut newest = Vec::with_capacity(runs.len());
        for some in runs.chunks(RUNS_PER_STATEMENT) {
            let query = Query::new("SELECT id, next_seq FROM runs WHERE id IN :runs");
            for row in self.backend.read(Work::Data, query.bind("runs", some)).await? {
                newest.push((row.read("id")?, row.read::<i64>("next_seq")? - 1));
            }
        }
        Ok(newest)
    }

    /// Iterations in order; the cursor is the offset.
    pub async fn iterations(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<IterationRecord>, StoreError> {
        let list = Query::new("SELECT * FROM iterations WHERE run_id = :run AND ");
        let list = list.push(IS_OF_TENANT).push(" ORDER BY attempt, number");
        self.part(list, tenant, run, page).await
    }

    /// Tool calls in order, with arguments and results; the cursor is the offset.
    pub async fn tool_calls(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let mut calls = self.call_rows(tenant, run, page).await?;
        self.read_payloads(run, &mut calls).await?;
        Ok(calls)
    }

    /// The calls of a run that may have changed something and whose end is not stored. They have no arguments if the
    /// journal cannot be read.
    pub async fn calls_under_way(
        &self,
        tenant: &str,
        run: Uuid,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let list = Query::new(
            "SELECT * FROM tool_calls WHERE run_id = :run AND state IN ('dispatched', 'unknown') \
             AND effect <> 'read' AND finished_at IS NULL AND ",
        );
        let list = list.push(IS_OF_TENANT).push(" ORDER BY proposed_seq, ordinal");
        let list = list.bind("tenant", tenant).bind("run", run);
        let rows = self.backend.read(Work::Data, list).await?;
        let mut calls: Vec<ToolCallRecord> = readable(&rows).collect();
        match self.read_payloads(run, &mut calls).await {
            Err(error) if error.is_transient() => Err(error),
            _ => Ok(calls),
        }
    }

    /// How many tool calls of a page have arguments and results of at most `most_bytes` in the journal; at least one,
    /// however large it is.
    pub async fn tool_call_piece(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
        most_bytes: u64,
    ) -> Result<Piece, StoreError> {
        let calls = self.call_rows(tenant, run, page).await?;
        let index = self.index_of(run, &calls).await?;
        let mut counted = BTreeSet::new();
        let mut sizes = Vec::with_capacity(calls.len());
        for call in &calls {
            let new = index.rows_of(call)?.into_iter().filter(|row| counted.insert(*row));
            sizes.push(ROW + new.map(|row| index.bytes_of(row)).sum::<u64>());
        }
        Ok(Piece::of(sizes.into_iter(), most_bytes))
    }

    /// Whether a run has such a tool call.
    pub async fn has_tool_call(
        &self,
        tenant: &str,
        run: Uuid,
        call: Uuid,
    ) -> Result<bool, StoreError> {
        let look =
            Query::new("SELECT 1 FROM tool_calls WHERE run_id = :run AND call_id = :call AND ");
        let look =
            look.push(IS_OF_TENANT).bind("tenant", tenant).bind("run", run).bind("call", call);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// How many tool calls of these runs were decided on.
    pub async fn decided_calls(&self, runs: &[Uuid]) -> Result<HashMap<Uuid, u64>, StoreError> {
        let count = Query::new(
            "SELECT run_id, count(*) AS calls FROM tool_calls WHERE run_id IN :runs \
             AND (decision IS NOT NULL OR effect IS NOT NULL) GROUP BY run_id",
        );
        let rows = self.backend.read(Work::Data, count.bind("runs", runs)).await?;
        rows.iter().map(|row| Ok((row.read("run_id")?, row.read("calls")?))).collect()
    }

    /// Fills in the payloads of these calls from the journal.
    async fn read_payloads(
        &self,
        run: Uuid,
        calls: &mut [ToolCallRecord],
    ) -> Result<(), StoreError> {
        let index = self.index_of(run, calls).await?;
        let mut rows = BTreeSet::new();
        for call in &*calls {
            rows.extend(index.rows_of(call)?);
        }
        if !rows.is_empty() {
            let rows: Vec<i64> = rows.into_iter().collect();
            attach_payloads(calls, self.events_in_rows(run, &rows).await?);
        }
        Ok(())
    }

    /// Tool calls without payloads.
    async fn call_rows(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let list = Query::new("SELECT * FROM tool_calls WHERE run_id = :run AND ");
        let list = list.push(IS_OF_TENANT).push(" ORDER BY proposed_seq, ordinal");
        self.part(list, tenant, run, page).await
    }

    /// The rows of the journal that can have the payloads of these calls.
    async fn index_of(
        &self,
        run: Uuid,
        calls: &[ToolCallRecord],
    ) -> Result<JournalIndex, StoreError> {
        let sources = || calls.iter().flat_map(ToolCallRecord::sources);
        let (Some(first), Some(last)) = (sources().min(), sources().max()) else {
            return Ok(JournalIndex::of(run, Vec::new()));
        };
        self.journal_index(run, first, last).await
    }

    async fn part<T: Record>(
        &self,
        list: Query,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<T>, StoreError> {
        let list = list.push(" LIMIT :limit OFFSET :offset").bind("tenant", tenant);
        let list = list.bind("run", run).bind("limit", page.limit);
        let list = list.bind("offset", page.after.unwrap_or_default());
        self.backend.read(Work::Data, list).await?.iter().map(Record::read).collect()
    }
}

/// One run's row.
pub(super) fn one_run(tenant: &str, run: Uuid) -> Query {
    let query = Query::new("SELECT * FROM runs WHERE tenant = :tenant AND id = :run");
    query.bind("tenant", tenant).bind("run", run)
}
