//! The encoding of events in rows of the journal.

use std::borrow::Cow;
use std::fmt::Display;
use std::io::Write;

use chrono::DateTime;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::event::Event;
use crate::store::tables::JournalRow;
use crate::store::{RunWrite, StoreError};

/// The row of a write's events.
pub(super) fn journal_row(write: &RunWrite) -> Result<JournalRow, StoreError> {
    let (Some(first), Some(last)) = (write.events.first(), write.events.last()) else {
        return Err(StoreError::Failed(format!("a write of run {} has no events", write.run_id)));
    };
    Ok(JournalRow {
        run_id: write.run_id,
        seq: last.seq,
        first_seq: first.seq,
        epoch: write.epoch,
        at: last.at,
        events: events_text(&write.events)?,
    })
}

/// Events as a JSON array of `{"at": microseconds, "type": …, "data": …}`.
fn events_text(events: &[Event]) -> Result<String, StoreError> {
    let unwritable = |why: &dyn Display| StoreError::Failed(format!("a value is not JSON: {why}"));
    let mut text = vec![b'['];
    for (index, event) in events.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let _ = write!(text, "{comma}{{\"at\":{}", event.at.timestamp_micros());
        let begun = text.len();
        serde_json::to_writer(&mut text, &event.what).map_err(|error| unwritable(&error))?;
        // The members of the event follow its time.
        if let Some(brace) = text.get_mut(begun) {
            *brace = b',';
        }
    }
    text.push(b']');
    String::from_utf8(text).map_err(|error| unwritable(&error))
}

/// An event as it is encoded in the journal.
#[derive(Deserialize)]
struct StoredEvent<'t> {
    at: i64,
    r#type: Cow<'t, str>,
    #[serde(borrow)]
    data: &'t RawValue,
}

/// The events of a row of the journal, with their numbers.
pub(in crate::store) fn entries_of(row: &JournalRow) -> Vec<(i64, Result<Event, StoreError>)> {
    let unreadable =
        |seq, why: String| (seq, Err(StoreError::UnreadableEvent { run: row.run_id, seq, why }));
    let stored = match serde_json::from_str::<Vec<StoredEvent<'_>>>(&row.events) {
        Ok(stored) => stored,
        Err(error) => {
            let why = |seq| unreadable(seq, format!("its row cannot be read: {error}"));
            return (row.first_seq..=row.seq).map(why).collect();
        }
    };
    let counted = row.seq - row.first_seq + 1;
    if i64::try_from(stored.len()) != Ok(counted) {
        let why = format!("its row has {} events, not {counted}", stored.len());
        return (row.first_seq..=row.seq).map(|seq| unreadable(seq, why.clone())).collect();
    }
    let entry = |(seq, StoredEvent { at, r#type: kind, data })| match serde_json::from_str(
        &format!(r#"{{"type":"{kind}","data":{data}}}"#),
    ) {
        Ok(what) => {
            let at = DateTime::from_timestamp_micros(at).unwrap_or(row.at);
            (seq, Ok(Event { seq, at, run_id: row.run_id, what }))
        }
        Err(error) => {
            let error = error.to_string();
            // Without the list of all known names.
            let error = error.split(", expected").next().unwrap_or_default();
            unreadable(seq, format!("an entry of type {kind:?}: {error}"))
        }
    };
    (row.first_seq..).zip(stored).map(entry).collect()
}

/// The events of a row of the journal.
///
/// # Errors
/// [`StoreError::UnreadableEvent`] where an entry is not an event that this version knows.
pub(in crate::store) fn events_of(row: &JournalRow) -> Result<Vec<Event>, StoreError> {
    entries_of(row).into_iter().map(|(_, event)| event).collect()
}
