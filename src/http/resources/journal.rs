//! Reading a run's journal to its end, or as far as is needed.

use std::ops::ControlFlow;

use uuid::Uuid;

use crate::event::Event;
use crate::http::edge::problem::Problem;
use crate::http::state::App;

/// How many events are read in one query.
const CHUNK: u32 = 1000;

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
