//! Detects programs that fill their workspace beyond its quota while they run.
//!
//! The service does not see what they write, so it measures the workspace: at regular intervals, less
//! often if that takes long, and at once if the free space of the file system has shrunk by a part of the
//! quota. Reading the free space costs almost nothing, so that a flood is noticed soon even in a large
//! workspace.

use std::time::{Duration, Instant};

use crate::tools::Workspace;
use crate::tools::quota::OverQuota;
use crate::tools::sandbox::tree_cache::Size;

/// Between two looks at the file system: the first while much is written, and at the beginning.
const SOON: Duration = Duration::from_millis(2);
const LATER: Duration = Duration::from_millis(20);
/// Between two looks at a workspace, where the file system reports nothing.
const PAUSE: Duration = Duration::from_millis(500);
/// The part of the time that such looks may take.
const SHARE: u32 = 20;
/// The same of those that the file system suggests.
const SHARE_WHEN_FILLING: u32 = 2;
/// The part of the bounds that the file system may lose before the workspace is looked at.
const PART: u64 = 16;
/// The part that it loses between two looks where much is written.
const PART_OF_MUCH: u64 = 256;

/// Resolves when a workspace exceeds its quota and does not become smaller, or as soon as it exceeds it
/// by far and has grown since `begun`.
pub(super) async fn exceeded(workspace: &Workspace, begun: Option<Size>) -> OverQuota {
    let mut watched = Some(Watched::new(workspace.clone(), begun));
    loop {
        tokio::time::sleep(watched.as_ref().map_or(LATER, |watched| watched.pause)).await;
        // A measurement that is lost with its thread begins again.
        let mut looking = watched.take().unwrap_or_else(|| Watched::new(workspace.clone(), begun));
        let looked = tokio::task::spawn_blocking(move || (looking.look(), looking)).await;
        if let Ok((over, looked)) = looked {
            if let Some(over) = over {
                return over;
            }
            watched = Some(looked);
        }
    }
}

struct Watched {
    workspace: Workspace,
    /// What was in there before the programs.
    begun: Option<Size>,
    /// Until the next look.
    pause: Duration,
    /// Bytes and files that the file system has room for; `None` where it does not say.
    seen: Option<[u64; 2]>,
    /// The same when the workspace was looked at.
    room: Option<[u64; 2]>,
    due: Instant,
    /// Not before this, whatever the file system says.
    rests: Instant,
    /// By how much the workspace exceeded its quota, and since when it has not become smaller.
    before: Option<(u64, Instant)>,
}

impl Watched {
    fn new(workspace: Workspace, begun: Option<Size>) -> Self {
        let (room, now) = (workspace.room(), Instant::now());
        let (pause, seen, due) = (SOON, room, now + PAUSE);
        Self { workspace, begun, pause, seen, room, due, rests: now, before: None }
    }

    fn look(&mut self) -> Option<OverQuota> {
        let (since, room) = (Instant::now(), self.workspace.room());
        let is_much = self.has_lost(self.seen, room, PART_OF_MUCH);
        self.pause = if is_much { SOON } else { LATER.min(self.pause * 2) };
        self.seen = room;
        if since < self.due && !(since >= self.rests && self.has_lost(self.room, room, PART)) {
            return None;
        }
        let excess = self.workspace.excess();
        let took = since.elapsed();
        self.room = room;
        self.due = Instant::now() + PAUSE.max(took * SHARE);
        self.rests = Instant::now() + took * SHARE_WHEN_FILLING;
        let Some(over) = excess else {
            self.before = None;
            return None;
        };
        if over.is_far() {
            self.due = self.rests;
        }
        let amount = over.amount();
        let begun = self.begun.map(|size| over.amount_of(size.bytes, size.files));
        if over.is_far() && begun.is_some_and(|begun| amount > begun) {
            return Some(over);
        }
        // Programs that make it smaller, or have not begun to write, may continue.
        let Some((before, at)) = self.before else {
            self.before = Some((amount, since));
            return None;
        };
        let is_late = since.saturating_duration_since(at) >= PAUSE;
        if (over.is_far() && amount > before) || (is_late && amount >= before) {
            return Some(over);
        }
        if is_late || amount < before {
            self.before = Some((amount, since));
        }
        None
    }

    /// Whether the file system has less room than it had, by that part of the bounds.
    fn has_lost(&self, before: Option<[u64; 2]>, now: Option<[u64; 2]>, part: u64) -> bool {
        let (Some(before), Some(now)) = (before, now) else { return false };
        let most = self.workspace.bounds();
        (0..2).any(|which| before[which].saturating_sub(now[which]) >= (most[which] / part).max(1))
    }
}
