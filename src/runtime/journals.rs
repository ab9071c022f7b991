//! Limits the memory of journals, for all readers together.

use std::collections::HashMap;

use tokio::sync::SemaphorePermit;
use uuid::Uuid;

use crate::bounds::memory::{self, MemorySemaphore};
use crate::engine::State;
use crate::event::Event;
use crate::store::StoreError;

/// KiB of stored journals that are in memory at the same time; a larger journal is in memory alone. Parsed
/// events and turns take several times as much.
const MAX_KIB: u32 = 16 << 10;
/// Journals up to this number of bytes are not limited.
const SMALL: u64 = 64 << 10;
/// Bytes of several journals that are read in one query.
const QUERY_BYTES: u64 = 4 << 20;

static PERMITS: MemorySemaphore = MemorySemaphore::of_kib(MAX_KIB);

/// The permit for journals in memory.
pub type Permit = SemaphorePermit<'static>;

/// Waits until journals of this size may be in memory, and memory is not scarce; `None` if they are small.
pub async fn permit(bytes: u64) -> Option<Permit> {
    let permit = permit_for_bounded_use(bytes).await?;
    memory::wait_while_scarce().await;
    Some(permit)
}

/// The same for uses that are limited elsewhere, too; does not wait while memory is scarce.
pub(super) async fn permit_for_bounded_use(bytes: u64) -> Option<Permit> {
    if bytes <= SMALL {
        return None;
    }
    PERMITS.acquire(bytes).await
}

/// How many of these runs are read in one query, and the size of their journals in bytes. It is at least one
/// run, however large.
pub(crate) fn piece(runs: &[Uuid], sizes: &HashMap<Uuid, u64>) -> (usize, u64) {
    let mut bytes = 0;
    for (read, run) in runs.iter().enumerate() {
        let more = sizes.get(run).copied().unwrap_or(0);
        if read > 0 && bytes + more > QUERY_BYTES {
            return (read, bytes);
        }
        bytes += more;
    }
    (runs.len(), bytes)
}

/// Splits events by run. The events of each run must be contiguous.
pub(crate) fn by_run(events: &[Event]) -> HashMap<Uuid, &[Event]> {
    let journals = events.chunk_by(|a, b| a.run_id == b.run_id);
    journals.map(|journal| (journal[0].run_id, journal)).collect()
}

/// Applies the next event of a journal. An event that does not fit the state counts as unreadable.
pub(super) fn apply(state: &mut State, event: &Event) -> Result<(), StoreError> {
    state.apply(event).map_err(|error| StoreError::UnreadableEvent {
        run: event.run_id,
        seq: event.seq,
        why: error.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn large_journals_wait_for_permits() {
        let (half, small) = (permit(8 << 20).await, permit(SMALL).await);
        assert!(half.is_some() && small.is_none());
        let mut huge = std::pin::pin!(permit(1 << 40));
        assert!(huge.as_mut().now_or_never().is_none());
        drop(half);
        assert!(huge.await.is_some());
    }

    #[test]
    fn pieces_have_one_run_at_least() {
        let runs: Vec<Uuid> = (0..4).map(Uuid::from_u128).collect();
        let sizes = [(runs[0], QUERY_BYTES + 1), (runs[1], QUERY_BYTES - 1), (runs[2], 1)].into();
        assert_eq!(piece(&runs, &sizes), (1, QUERY_BYTES + 1));
        assert_eq!(piece(&runs[1..], &sizes), (3, QUERY_BYTES));
        assert_eq!(piece(&[], &sizes), (0, 0));
    }
}
