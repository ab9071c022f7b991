//! Reading a run's journal to its end, or as far as is needed.

use std::ops::ControlFlow;

use uuid::Uuid;

use crate::event::Event;
use crate::http::edge::problem::Problem;
use crate::http::state::App;
use crate::runtime::journals;
use crate::store::RunRecord;

/// How many events are read in one query.
const CHUNK: u32 = 200;
/// A journal in memory, and the turn that it takes.
pub(super) struct Whole {
    pub(super) events: Vec<Event>,
    _turn: Option<journals::Turn>,
}

/// Reads a journal into memory.
pub(super) async fn whole(app: &App, run: &RunRecord) -> Result<Whole, Problem> {
    let sizes = app.store.journal_sizes(&run.tenant, &[run.id]).await?;
    let turn = journals::turn(sizes.get(&run.id).copied().unwrap_or(0)).await;
    let mut events = Vec::new();
    read(app, &run.tenant, run.id, |event| {
        events.push(event);
        ControlFlow::Continue(())
    })
    .await?;
    Ok(Whole { events, _turn: turn })
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
