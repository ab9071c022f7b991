//! Reading a run's journal to its end, or as far as is needed.

use std::ops::ControlFlow;

use tokio::sync::{Semaphore, SemaphorePermit};
use uuid::Uuid;

use crate::bounds::memory;
use crate::event::Event;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::store::RunRecord;

/// How many events are read in one query.
const CHUNK: u32 = 200;
/// Bytes of journals beyond which they are large: in memory they take several times as many.
pub(super) const LARGE: u64 = 4 << 20;

/// Large ones are in memory one at a time.
static TURNS: Semaphore = Semaphore::const_new(1);

/// A journal in memory, and the turn that it takes where it is large.
pub(super) struct Whole {
    pub(super) events: Vec<Event>,
    _turn: Option<SemaphorePermit<'static>>,
}

/// Reads a journal into memory.
pub(super) async fn whole(app: &App, run: &RunRecord) -> Result<Whole, Problem> {
    let sizes = app.store.journal_sizes(&run.tenant, &[run.id]).await?;
    let turn = turn(sizes.get(&run.id).copied().unwrap_or(0)).await;
    let mut events = Vec::new();
    read(app, &run.tenant, run.id, |event| {
        events.push(event);
        ControlFlow::Continue(())
    })
    .await?;
    Ok(Whole { events, _turn: turn })
}

/// Waits until journals of so many bytes may be in memory.
pub(super) async fn turn(bytes: u64) -> Option<SemaphorePermit<'static>> {
    if bytes <= LARGE {
        return None;
    }
    let turn = TURNS.acquire().await.ok(); // never closed
    memory::enough().await;
    turn
}

/// Hands the events to `take` in order, until there are no more or it has enough.
pub(super) async fn read(
    app: &App,
    tenant: &str,
    run: Uuid,
    mut take: impl FnMut(Event) -> ControlFlow<()>,
) -> Result<(), Problem> {
    let mut seen = 0;
    loop {
        let chunk = app.store.events(tenant, run, seen, CHUNK).await?;
        let is_last = chunk.len() < CHUNK as usize;
        for event in chunk {
            seen = event.seq;
            if take(event).is_break() {
                return Ok(());
            }
        }
        if is_last {
            return Ok(());
        }
    }
}
