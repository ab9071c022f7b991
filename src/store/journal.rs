//! Reads journals in pieces of bounded size: one row can be large, and a run can have many.

use std::collections::HashMap;

use uuid::Uuid;

use super::backend::Work;
use super::projection::{entries_of, events_of};
use super::sql::{Query, Row};
use super::tables::{JournalRow, Record};
use super::{Store, StoreError, ToolCallRecord};
use crate::event::Event;

/// The condition that the run belongs to the tenant.
pub(super) const IS_OF_TENANT: &str =
    "EXISTS (SELECT 1 FROM runs WHERE id = :run AND tenant = :tenant)";

/// Bytes of a journal that are read by one query, at most.
const MAX_BYTES_AT_ONCE: u64 = 4 << 20;

/// The first rows of a list, within a bound on their total size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Piece {
    /// The number of rows.
    pub rows: u32,
    /// The size of these rows in bytes.
    pub bytes: u64,
    /// Whether there are more rows.
    pub has_more: bool,
}

impl Piece {
    /// The first rows, given their sizes, with at most `most_bytes` in total; at least one row.
    pub(super) fn of(sizes: impl Iterator<Item = u64>, most_bytes: u64) -> Self {
        let mut piece = Self::default();
        for size in sizes {
            if piece.rows > 0 && piece.bytes + size > most_bytes {
                return Self { has_more: true, ..piece };
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
    /// The number of the last event.
    pub until: i64,
    /// The size in bytes.
    pub bytes: u64,
}

/// Which row of a run's journal has which events, and the sizes of the rows.
#[derive(Debug)]
pub(super) struct JournalIndex {
    run: Uuid,
    rows: Vec<IndexedRow>,
}

#[derive(Debug)]
pub(super) struct IndexedRow {
    first_seq: i64,
    seq: i64,
    bytes: u64,
}

impl JournalIndex {
    pub(super) fn of(run: Uuid, rows: Vec<IndexedRow>) -> Self {
        Self { run, rows }
    }

    /// The rows that have the arguments and the result of a call.
    pub(super) fn rows_of(&self, call: &ToolCallRecord) -> Result<Vec<i64>, StoreError> {
        let row = |seq: i64| {
            let row = self.rows.get(self.rows.partition_point(|row| row.seq < seq));
            let row = row.filter(|row| row.first_seq <= seq);
            row.map(|row| row.seq).ok_or_else(|| missing(self.run, seq))
        };
        call.sources().map(row).collect()
    }

    pub(super) fn bytes_of(&self, row: i64) -> u64 {
        let index = self.rows.binary_search_by_key(&row, |row| row.seq);
        index.map_or(0, |index| self.rows[index].bytes)
    }
}

impl Store {
    /// Journal entries with `seq > after`, in order: at most `limit`, fewer if they are large. Empty after the last
    /// entry, and if the run does not exist.
    pub async fn events(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        limit: u32,
    ) -> Result<Vec<Event>, StoreError> {
        let Some(next) = self.journal_piece(tenant, run, after, limit, MAX_BYTES_AT_ONCE).await?
        else {
            return Ok(Vec::new());
        };
        let mut events = self.events_until(tenant, run, after, next.until).await?;
        events.truncate(limit as usize);
        Ok(events)
    }

    /// The piece of a journal after the event `after`, with at most `most_rows` and `most_bytes`; at least one row,
    /// however large it is. `None` after the last event, and if the run does not exist. It is an error if the
    /// run's row counts more events than the journal has.
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
        let sizes = sizes.push(IS_OF_TENANT).push(" ORDER BY seq LIMIT :limit");
        let sizes = sizes.bind("tenant", tenant).bind("run", run);
        let sizes = sizes.bind("after", after).bind("limit", most_rows);
        let rows = self.backend.read(Work::Data, sizes).await?;
        if rows.is_empty() {
            let is_truncated = self.is_truncated(tenant, run, after).await?;
            return if is_truncated { Err(missing(run, after + 1)) } else { Ok(None) };
        }
        let bytes = rows.iter().map(|row| row.read("bytes")).collect::<Result<Vec<u64>, _>>()?;
        let piece = Piece::of(bytes.into_iter(), most_bytes);
        let last = (piece.rows as usize).checked_sub(1).and_then(|last| rows.get(last));
        last.map(|row| Ok(JournalPiece { until: row.read("seq")?, bytes: piece.bytes })).transpose()
    }

    /// Whether a journal ends with this event although the run's row counts more events.
    async fn is_truncated(&self, tenant: &str, run: Uuid, after: i64) -> Result<bool, StoreError> {
        let look = Query::new(
            "SELECT 1 FROM runs WHERE id = :run AND tenant = :tenant AND next_seq - 1 > :after \
             AND NOT EXISTS (SELECT 1 FROM run_events WHERE run_id = :run AND seq > :after)",
        );
        let look = look.bind("tenant", tenant).bind("run", run).bind("after", after);
        Ok(!self.backend.read(Work::Data, look).await?.is_empty())
    }

    /// Journal entries with `seq > after` up to the row that ends with `until`, in order.
    pub async fn events_until(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        until: i64,
    ) -> Result<Vec<Event>, StoreError> {
        let rows = self.rows_until(tenant, run, after, until).await?;
        let mut journal = ReadJournal { last: after, ..ReadJournal::of(run) };
        rows.iter().try_for_each(|row| journal.add(row))?;
        journal.whole()
    }

    /// Like [`Self::events_until`], but only up to the first unreadable event; an error if that is the first event.
    pub async fn readable_until(
        &self,
        tenant: &str,
        run: Uuid,
        after: i64,
        until: i64,
    ) -> Result<Vec<Event>, StoreError> {
        let rows = self.rows_until(tenant, run, after, until).await?;
        let mut journal = ReadJournal { last: after, ..ReadJournal::of(run) };
        rows.iter().try_for_each(|row| journal.add(row))?;
        if journal.events.is_empty() { journal.whole() } else { Ok(journal.events) }
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
        let rows = rows.push(IS_OF_TENANT).push(" ORDER BY seq");
        let rows = rows.bind("tenant", tenant).bind("run", run);
        let rows = rows.bind("after", after).bind("until", until);
        self.backend.read(Work::Data, rows).await
    }

    /// The journals of these runs, one after the other.
    pub async fn journals(&self, tenant: &str, runs: &[Uuid]) -> Result<Vec<Event>, StoreError> {
        let mut events = Vec::new();
        for journal in self.read_journals(tenant, runs).await? {
            events.extend(journal.whole()?);
        }
        Ok(events)
    }

    /// Like [`Self::journals`], but each journal only up to its first unreadable event. Also returns the runs with
    /// an unreadable event.
    pub async fn readable_journals(
        &self,
        tenant: &str,
        runs: &[Uuid],
    ) -> Result<(Vec<Event>, Vec<Uuid>), StoreError> {
        let (mut events, mut damaged) = (Vec::new(), Vec::new());
        for journal in self.read_journals(tenant, runs).await? {
            damaged.extend(journal.damage.is_some().then_some(journal.run));
            events.extend(journal.events);
        }
        Ok((events, damaged))
    }

    async fn read_journals(
        &self,
        tenant: &str,
        runs: &[Uuid],
    ) -> Result<Vec<ReadJournal>, StoreError> {
        let all = Query::new(
            "SELECT r.id, r.next_seq, e.run_id, e.seq, e.first_seq, e.epoch, e.at, e.events \
             FROM runs r LEFT JOIN run_events e ON e.run_id = r.id \
             WHERE r.id IN :runs AND r.tenant = :tenant ORDER BY r.id, e.seq",
        );
        let all = all.bind("tenant", tenant).bind("runs", runs);
        let mut journals: Vec<(ReadJournal, i64)> = Vec::new();
        for row in self.backend.read(Work::Data, all).await? {
            let run = row.read("id")?;
            if journals.last().is_none_or(|(journal, _)| journal.run != run) {
                journals.push((ReadJournal::of(run), row.read("next_seq")?));
            }
            if let Some((journal, _)) = journals.last_mut()
                && row.read::<Option<i64>>("seq")?.is_some()
            {
                journal.add(&row)?;
            }
        }
        Ok(journals.into_iter().map(|(journal, next_seq)| journal.until(next_seq - 1)).collect())
    }

    /// Corrects the event count in a run's row if the journal has more events, and if this owner still owns the run
    /// under this epoch.
    pub async fn count_events(&self, owner: &str, run: Uuid, epoch: i64) -> Result<(), StoreError> {
        let last = "(SELECT max(seq) FROM run_events WHERE run_id = :run)";
        let count = Query::new(format!(
            "UPDATE runs SET next_seq = {last} + 1 WHERE id = :run AND owner = :owner \
             AND epoch = :epoch AND status = 'running' AND next_seq <= {last}"
        ));
        let count = count.bind("run", run).bind("owner", owner).bind("epoch", epoch);
        self.backend.write(Work::Data, count).await?;
        Ok(())
    }

    /// The sizes of the journals of these runs in bytes.
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
        let rows = rows.iter().map(row).collect::<Result<_, StoreError>>()?;
        Ok(JournalIndex::of(run, rows))
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
        let mut events = Vec::new();
        for row in self.backend.read(Work::Data, these).await? {
            events.extend(events_of(&JournalRow::read(&row)?)?);
        }
        Ok(events)
    }
}

/// A journal, or a part of it, up to the first missing or unreadable event.
#[derive(Debug)]
struct ReadJournal {
    run: Uuid,
    events: Vec<Event>,
    /// The number of the last event that was read; at first, of the event before the part.
    last: i64,
    /// Why the journal cannot be read to its end.
    damage: Option<StoreError>,
}

impl ReadJournal {
    fn of(run: Uuid) -> Self {
        Self { run, events: Vec::new(), last: 0, damage: None }
    }

    /// Adds the next row.
    fn add(&mut self, row: &Row) -> Result<(), StoreError> {
        let row = JournalRow::read(row)?;
        if self.damage.is_none() && row.first_seq > self.last + 1 {
            self.damage = Some(missing(self.run, self.last + 1));
        }
        let after = self.last;
        for (_, entry) in entries_of(&row).into_iter().filter(|(seq, _)| *seq > after) {
            match entry {
                _ if self.damage.is_some() => break,
                Ok(event) => {
                    self.last = event.seq;
                    self.events.push(event);
                }
                Err(error) => self.damage = Some(error),
            }
        }
        Ok(())
    }

    /// Marks the journal as damaged if it ends before the event `last`.
    fn until(mut self, last: i64) -> Self {
        if self.damage.is_none() && self.last < last {
            self.damage = Some(missing(self.run, self.last + 1));
        }
        self
    }

    fn whole(self) -> Result<Vec<Event>, StoreError> {
        self.damage.map_or(Ok(self.events), Err)
    }
}

/// The error for an event that no row of the journal has.
pub(super) fn missing(run: Uuid, seq: i64) -> StoreError {
    StoreError::UnreadableEvent { run, seq, why: "it is missing".to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_has_one_row_at_least_and_else_no_more_bytes_than_are_given() {
        let piece = |sizes: &[u64]| {
            let Piece { rows, bytes, has_more } = Piece::of(sizes.iter().copied(), 10);
            (rows, bytes, has_more)
        };
        assert_eq!(piece(&[]), (0, 0, false));
        assert_eq!(piece(&[11]), (1, 11, false));
        assert_eq!(piece(&[11, 1]), (1, 11, true));
        assert_eq!(piece(&[4, 6]), (2, 10, false));
        assert_eq!(piece(&[4, 6, 1]), (2, 10, true));
        assert_eq!(piece(&[4, 7]), (1, 4, true));
    }
}
