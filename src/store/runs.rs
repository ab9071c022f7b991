//! Reading one run: its row, its journal, and its parts.

use std::collections::HashMap;

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::backend::Work;
use super::projection::{attach_payloads, entries_of, events_of};
use super::sql::{Query, Row};
use super::tables::{JournalRow, Record};
use super::{IdempotentRun, IterationRecord, Page, RunRecord, Store, StoreError, ToolCallRecord};
use crate::event::Event;

/// Runs that one statement asks about.
const ASKED_AT_ONCE: usize = 1000;

/// That the run is the tenant's.
const IS_OURS: &str = "EXISTS (SELECT 1 FROM runs WHERE id = :run AND tenant = :tenant)";

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

    /// Takes the key from a run that was created before that instant, so that it can be used anew.
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

    /// Journal entries with `seq > after`, in order. Empty also where the run does not exist.
    pub async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let page = Query::new("SELECT * FROM run_events WHERE run_id = :run AND seq > :after AND ");
        let page = page.push(IS_OURS).push(" ORDER BY seq LIMIT :limit");
        let page = page.bind("tenant", tenant).bind("run", run);
        let page = page.bind("after", after).bind("limit", limit);
        let mut entries = Vec::new();
        for row in self.backend.read(Work::Data, page).await? {
            entries.extend(entries_of(&JournalRow::read(&row)?));
        }
        let asked = entries.into_iter().filter(|(seq, _)| *seq > after).take(limit as usize);
        asked.map(|(_, event)| event).collect()
    }

    /// As [`Self::events`], up to the first one that cannot be read; an error where it is the first.
    pub async fn readable_events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        match self.events(tenant, run, after, limit).await {
            Err(StoreError::UnreadableEvent { seq, .. }) if seq > after + 1 => {
                let readable = u32::try_from(seq - 1 - after).unwrap_or(limit);
                self.events(tenant, run, after, readable).await
            }
            read => read,
        }
    }

    /// The numbers of the newest events of these runs; those that do not exist have none.
    pub async fn newest_events(&self, runs: &[Uuid]) -> Result<Vec<(Uuid, i64)>, StoreError> {
        let mut newest = Vec::with_capacity(runs.len());
        for some in runs.chunks(ASKED_AT_ONCE) {
            let query = Query::new("SELECT id, next_seq FROM runs WHERE id IN :runs");
            for row in self.backend.read(Work::Data, query.bind("runs", some)).await? {
                newest.push((row.read("id")?, row.read::<i64>("next_seq")? - 1));
            }
        }
        Ok(newest)
    }

    /// The journals of these runs, one after the other.
    pub async fn journals(&self, tenant: &str, runs: &[Uuid]) -> Result<Vec<Event>, StoreError> {
        let all = Query::new(
            "SELECT * FROM run_events WHERE run_id IN :runs AND EXISTS (SELECT 1 FROM runs \
             WHERE runs.id = run_events.run_id AND runs.tenant = :tenant) ORDER BY run_id, seq",
        );
        let all = all.bind("tenant", tenant).bind("runs", runs);
        journal(&self.backend.read(Work::Data, all).await?)
    }

    /// How many bytes the journals of these runs have.
    pub async fn journal_sizes(
        &self,
        tenant: &str,
        runs: &[Uuid],
    ) -> Result<HashMap<Uuid, u64>, StoreError> {
        let sizes = Query::new(
            "SELECT run_id, CAST(sum(octet_length(events)) AS bigint) AS bytes FROM run_events \
             WHERE run_id IN :runs AND run_id IN \
             (SELECT id FROM runs WHERE id IN :runs AND tenant = :tenant) GROUP BY run_id",
        );
        let sizes = sizes.bind("tenant", tenant).bind("runs", runs);
        let rows = self.backend.read(Work::Data, sizes).await?;
        let size = |row: &Row| {
            let bytes = u64::try_from(row.read::<i64>("bytes")?).unwrap_or(u64::MAX);
            Ok((row.read("run_id")?, bytes))
        };
        rows.iter().map(size).collect()
    }

    /// Iterations in order; the cursor is the offset.
    pub async fn iterations(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<IterationRecord>, StoreError> {
        let list = Query::new("SELECT * FROM iterations WHERE run_id = :run AND ");
        let list = list.push(IS_OURS).push(" ORDER BY attempt, number");
        self.part(list, tenant, run, page).await
    }

    /// Tool calls in order, with arguments and results; the cursor is the offset.
    pub async fn tool_calls(
        &self,
        tenant: &str,
        run: Uuid,
        page: &Page<i64>,
    ) -> Result<Vec<ToolCallRecord>, StoreError> {
        let list = Query::new("SELECT * FROM tool_calls WHERE run_id = :run AND ");
        let list = list.push(IS_OURS).push(" ORDER BY proposed_seq, ordinal");
        let mut calls: Vec<ToolCallRecord> = self.part(list, tenant, run, page).await?;
        let sources = || calls.iter().flat_map(ToolCallRecord::sources);
        if let (Some(first), Some(last)) = (sources().min(), sources().max()) {
            let limit = u32::try_from(last + 1 - first).unwrap_or(u32::MAX);
            let events = self.events(tenant, run, first - 1, limit).await?;
            attach_payloads(&mut calls, events);
        }
        Ok(calls)
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

fn journal(rows: &[Row]) -> Result<Vec<Event>, StoreError> {
    let mut events = Vec::new();
    for row in rows {
        events.extend(events_of(&JournalRow::read(row)?)?);
    }
    Ok(events)
}
