//! Reading journals, in pieces of so many bytes: one row can be large, and a run has many.

use std::collections::HashMap;

use uuid::Uuid;

use super::backend::Work;
use super::projection::{entries_of, events_of};
use super::sql::{Query, Row};
use super::tables::{JournalRow, Record};
use super::{Store, StoreError, ToolCallRecord};
use crate::event::Event;

/// That the run is the tenant's.
pub(super) const IS_OURS: &str = "EXISTS (SELECT 1 FROM runs WHERE id = :run AND tenant = :tenant)";

/// Bytes of a journal that are read at once.
const AT_ONCE: u64 = 4 << 20;

/// The first rows of a list that have so many bytes together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// How many rows.
    pub rows: u32,
    /// Their bytes.
    pub bytes: u64,
    /// Whether there are more rows.
    pub goes_on: bool,
}

impl Piece {
    /// The first of rows of these sizes that have at most so many bytes: one at least.
    pub(super) fn of(sizes: impl Iterator<Item = u64>, most_bytes: u64) -> Self {
        let mut piece = Self::default();
        for size in sizes {
            if piece.rows > 0 && piece.bytes + size > most_bytes {
                return Self { goes_on: true, ..piece };
            }
            piece.rows += 1;
            piece.bytes += size;
        }
        piece
    }
}

/// A piece of a journal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JournalPiece {
    /// The number of its last event.
    pub until: i64,
    /// Its bytes.
    pub bytes: u64,
}

/// Where events stand in a journal, and how large its rows are.
#[derive(Debug, Default)]
pub(super) struct JournalIndex(Vec<IndexedRow>);

#[derive(Debug)]
struct IndexedRow {
    first_seq: i64,
    seq: i64,
    bytes: u64,
}

impl JournalIndex {
    /// The rows that have the arguments and the result of a call.
    pub(super) fn rows_of(&self, call: &ToolCallRecord) -> Vec<i64> {
        let row = |seq: i64| {
            let row = self.0.get(self.0.partition_point(|row| row.seq < seq))?;
            (row.first_seq <= seq).then_some(row.seq)
        };
        call.sources().filter_map(row).collect()
    }

    pub(super) fn bytes_of(&self, row: i64) -> u64 {
        let place = self.0.binary_search_by_key(&row, |row| row.seq);
        place.map_or(0, |place| self.0[place].bytes)
    }
}

impl Store {
    /// Journal entries with `seq > after`, in order: at most `limit`, and fewer where they are large.
    /// Empty behind the last one, and where the run does not exist.
    pub async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let Some(next) = self.journal_piece(tenant, run, after, limit, AT_ONCE).await? else {
            return Ok(Vec::new());
        };
        let mut events = self.events_until(tenant, run, after, next.until).await?;
        events.truncate(limit as usize);
        Ok(events)
    }

    /// The piece of a journal behind `after` with at most so many rows and bytes: one row at least,
    /// however large it is. `None` behind the last event, and where the run does not exist.
    pub async fn journal_piece(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        most_rows: u32,
        most_bytes: u64,
    ) -> Result<Option<JournalPiece>, StoreError> {
        let sizes = Query::new(
            "SELECT seq, CAST(octet_length(events) AS bigint) AS bytes FROM run_events \
             WHERE run_id = :run AND seq > :after AND ",
        );
        let sizes = sizes.push(IS_OURS).push(" ORDER BY seq LIMIT :limit");
        let sizes = sizes.bind("tenant", tenant).bind("run", run);
        let sizes = sizes.bind("after", after).bind("limit", most_rows);
        let rows = self.backend.read(Work::Data, sizes).await?;
        let bytes = rows.iter().map(|row| row.read("bytes")).collect::<Result<Vec<u64>, _>>()?;
        let piece = Piece::of(bytes.into_iter(), most_bytes);
        let last = (piece.rows as usize).checked_sub(1).and_then(|last| rows.get(last));
        last.map(|row| Ok(JournalPiece { until: row.read("seq")?, bytes: piece.bytes })).transpose()
    }

    /// Journal entries with `seq > after` up to the row that ends with `until`, in order.
    pub async fn events_until(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        until: i64,
    ) -> Result<Vec<Event>, StoreError> {
        let mut events = journal(&self.rows_until(tenant, run, after, until).await?)?;
        events.retain(|event| event.seq > after);
        Ok(events)
    }

    /// As [`Self::events_until`], up to the first one that cannot be read; an error where it is the first.
    pub async fn readable_until(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        until: i64,
    ) -> Result<Vec<Event>, StoreError> {
        let mut events = Vec::new();
        for row in self.rows_until(tenant, run, after, until).await? {
            for (_, event) in
                entries_of(&JournalRow::read(&row)?).into_iter().filter(|(seq, _)| *seq > after)
            {
                match event {
                    Ok(event) => events.push(event),
                    Err(error) if events.is_empty() => return Err(error),
                    Err(_) => return Ok(events),
                }
            }
        }
        Ok(events)
    }

    async fn rows_until(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        until: i64,
    ) -> Result<Vec<Row>, StoreError> {
        let rows = Query::new(
            "SELECT * FROM run_events WHERE run_id = :run AND seq > :after AND seq <= :until AND ",
        );
        let rows = rows.push(IS_OURS).push(" ORDER BY seq");
        let rows = rows.bind("tenant", tenant).bind("run", run);
        let rows = rows.bind("after", after).bind("until", until);
        self.backend.read(Work::Data, rows).await
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

    /// The rows of a journal that have events from `first` to `last`.
    pub(super) async fn journal_index(
        &self,
        run: Uuid,
        first: i64,
        last: i64,
    ) -> Result<JournalIndex, StoreError> {
        let rows = Query::new(
            "SELECT first_seq, seq, CAST(octet_length(events) AS bigint) AS bytes FROM run_events \
             WHERE run_id = :run AND seq >= :first AND first_seq <= :last ORDER BY seq",
        );
        let rows = rows.bind("run", run).bind("first", first).bind("last", last);
        let rows = self.backend.read(Work::Data, rows).await?;
        let row = |row: &Row| {
            let (first_seq, seq) = (row.read("first_seq")?, row.read("seq")?);
            Ok(IndexedRow { first_seq, seq, bytes: row.read("bytes")? })
        };
        rows.iter().map(row).collect::<Result<_, StoreError>>().map(JournalIndex)
    }

    /// The events of these rows of a journal.
    pub(super) async fn events_in_rows(
        &self,
        run: Uuid,
        rows: &[i64],
    ) -> Result<Vec<Event>, StoreError> {
        let these = Query::new(
            "SELECT * FROM run_events WHERE run_id = :run AND seq IN :rows ORDER BY seq",
        );
        let these = these.bind("run", run).bind("rows", rows);
        journal(&self.backend.read(Work::Data, these).await?)
    }
}

fn journal(rows: &[Row]) -> Result<Vec<Event>, StoreError> {
    let mut events = Vec::new();
    for row in rows {
        events.extend(events_of(&JournalRow::read(row)?)?);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_one_row_at_least_and_else_no_more_bytes_than_are_given() {
        let piece = |sizes: &[u64]| {
            let Piece { rows, bytes, goes_on } = Piece::of(sizes.iter().copied(), 10);
            (rows, bytes, goes_on)
        };
        assert_eq!(piece(&[]), (0, 0, false));
        assert_eq!(piece(&[11]), (1, 11, false));
        assert_eq!(piece(&[11, 1]), (1, 11, true));
        assert_eq!(piece(&[4, 6]), (2, 10, false));
        assert_eq!(piece(&[4, 6, 1]), (2, 10, true));
        assert_eq!(piece(&[4, 7]), (1, 4, true));
    }
}
