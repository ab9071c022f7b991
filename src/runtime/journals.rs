//! Journals in memory: of so many bytes at the same time, for all readers together.

use std::collections::HashMap;

use tokio::sync::SemaphorePermit;
use uuid::Uuid;

use crate::bounds::memory::{self, Places};
use crate::engine::State;
use crate::event::Event;
use crate::store::StoreError;

/// KiB of all journals that are in memory at the same time; a larger one is there alone. As events and
/// turns they take several times as many.
const AT_ONCE: u32 = 16 << 10;
/// Bytes that need no turn.
const SMALL: u64 = 64 << 10;
/// Bytes of journals that are read in one query, where they are several.
const PIECE: u64 = 4 << 20;

static TURNS: Places = Places::of_kib(AT_ONCE);

/// The turn of what is in memory.
pub type Turn = SemaphorePermit<'static>;

/// Waits until journals of so many bytes may be in memory, and there is enough; `None` where they are
/// small.
pub async fn turn(bytes: u64) -> Option<Turn> {
    let turn = turn_of_bounded(bytes).await?;
    memory::enough().await;
    Some(turn)
}

/// The same for what is bounded in other ways, too: it does not wait for memory.
pub(super) async fn turn_of_bounded(bytes: u64) -> Option<Turn> {
    if bytes <= SMALL {
        return None;
    }
    TURNS.take(bytes).await
}

/// How many of these runs are read in one query, and how many bytes their journals have: one run at
/// least, however large it is.
pub(crate) fn piece(runs: &[Uuid], sizes: &HashMap<Uuid, u64>) -> (usize, u64) {
    let mut bytes = 0;
    for (read, run) in runs.iter().enumerate() {
        let more = sizes.get(run).copied().unwrap_or(0);
        if read > 0 && bytes + more > PIECE {
            return (read, bytes);
        }
        bytes += more;
    }
    (runs.len(), bytes)
}

/// Each run's own of these events, where those of a run stand in one piece.
pub(crate) fn by_run(events: &[Event]) -> HashMap<Uuid, &[Event]> {
    let journals = events.chunk_by(|a, b| a.run_id == b.run_id);
    journals.map(|journal| (journal[0].run_id, journal)).collect()
}

/// Adds the next event of a journal. One that cannot follow what came before cannot be read.
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
    async fn large_journals_take_turns() {
        let (half, small) = (turn(8 << 20).await, turn(SMALL).await);
        assert!(half.is_some() && small.is_none());
        let mut huge = std::pin::pin!(turn(1 << 40));
        assert!(huge.as_mut().now_or_never().is_none());
        drop(half);
        assert!(huge.await.is_some());
    }

    #[test]
    fn pieces_have_one_run_at_least() {
        let runs: Vec<Uuid> = (0..4).map(Uuid::from_u128).collect();
        let sizes = [(runs[0], PIECE + 1), (runs[1], PIECE - 1), (runs[2], 1)].into();
        assert_eq!(piece(&runs, &sizes), (1, PIECE + 1));
        assert_eq!(piece(&runs[1..], &sizes), (3, PIECE));
        assert_eq!(piece(&[], &sizes), (0, 0));
    }
}
