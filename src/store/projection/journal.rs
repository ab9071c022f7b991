//! Events as they stand in the rows of the journal.

use std::borrow::Cow;
use std::fmt::Write;

use chrono::DateTime;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::event::Event;
use crate::store::sql::json;
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
    let mut text = String::from("[");
    for (index, event) in events.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        let what = json(&event.what)?;
        let what = what.strip_prefix('{').unwrap_or(&what);
        let _ = write!(text, "{comma}{{\"at\":{},{what}", event.at.timestamp_micros());
    }
    text.push(']');
    Ok(text)
}

/// An event as it stands in the journal.
#[derive(Deserialize)]
struct StoredEvent<'t> {
    at: i64,
    r#type: Cow<'t, str>,
    #[serde(borrow)]
    data: &'t RawValue,
}

/// The events of a row of the journal.
///
/// # Errors
/// [`StoreError::Failed`] where an entry is not an event that this version knows.
pub(in crate::store) fn events_of(row: &JournalRow) -> Result<Vec<Event>, StoreError> {
    let damaged = |what: &str, error: serde_json::Error| {
        StoreError::Failed(format!("the journal of run {}: {what}: {error}", row.run_id))
    };
    let stored: Vec<StoredEvent<'_>> = serde_json::from_str(&row.events)
        .map_err(|error| damaged("a row cannot be read", error))?;
    let event = |(seq, StoredEvent { at, r#type: kind, data })| {
        let what = serde_json::from_str(&format!(r#"{{"type":"{kind}","data":{data}}}"#))
            .map_err(|error| damaged(&format!("an entry of type {kind:?}"), error))?;
        let at = DateTime::from_timestamp_micros(at).unwrap_or(row.at);
        Ok(Event { seq, at, run_id: row.run_id, what })
    };
    (row.first_seq..).zip(stored).map(event).collect()
}
