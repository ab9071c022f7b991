//! Reading a run's journal to its end, or as far as is needed.

use std::ops::ControlFlow;

use uuid::Uuid;

use crate::event::Event;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::runtime::journals;
use crate::store::RunRecord;

/// Events that are read in one query, and their bytes.
const CHUNK: u32 = 200;
const CHUNK_BYTES: u64 = 1 << 20;

/// A journal in memory, and its share of the memory for journals.
pub(super) struct LoadedJournal {
    pub(super) events: Vec<Event>,
    _permit: Option<journals::Permit>,
}

/// Reads a journal into memory.
pub(super) async fn load(app: &App, run: &RunRecord) -> Result<LoadedJournal, Problem> {
    let sizes = app.store.journal_sizes(&run.tenant, &[run.id]).await?;
    let permit = journals::permit(sizes.get(&run.id).copied().unwrap_or(0)).await;
    let mut events: Vec<Event> = Vec::new();
    loop {
        let seen = events.last().map_or(0, |event| event.seq);
        let chunk = app.store.events(&run.tenant, run.id, seen, CHUNK).await?;
        if chunk.is_empty() {
            return Ok(LoadedJournal { events, _permit: permit });
        }
        events.extend(chunk);
    }
}

/// Hands the events to `take` in order, until there are no more or it has enough. No more than a
/// piece of the journal is in memory.
pub(super) async fn read(
    app: &App,
    tenant: &str,
    run: Uuid,
    mut take: impl FnMut(Event) -> ControlFlow<()>,
) -> Result<(), Problem> {
    let mut seen = 0;
    while let Some(next) = app.store.journal_piece(tenant, run, seen, CHUNK, CHUNK_BYTES).await? {
        let _permit = journals::permit(next.bytes).await;
        for event in app.store.events_until(tenant, run, seen, next.until).await? {
            if take(event).is_break() {
                return Ok(());
            }
        }
        seen = next.until;
    }
    Ok(())
}
