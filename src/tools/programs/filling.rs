//! Whether programs fill their workspace beyond its bounds, while they run.
//!
//! The service does not see what they write, so it measures the workspace: regularly, more rarely
//! where that takes long, and at once where the file system has lost a part of what the workspace may
//! hold. Asking the file system costs next to nothing, so a flood is seen soon even where the
//! workspace is large.

use std::time::{Duration, Instant};

use crate::tools::Workspace;
use crate::tools::quota::OverQuota;

/// Between two looks at the file system.
const TICK: Duration = Duration::from_millis(20);
/// Between two looks at a workspace, where the file system tells nothing.
const PAUSE: Duration = Duration::from_millis(500);
/// The part of the time that such looks may take.
const SHARE: u32 = 20;
/// The same of those that the file system suggests.
const SHARE_WHEN_FILLING: u32 = 2;
/// The part of the bounds that the file system may lose before the workspace is looked at.
const PART: u64 = 16;

/// Answers when a workspace holds more than it may and does not become smaller; sooner where it holds far
/// more and grows.
pub(super) async fn filled(workspace: &Workspace) -> OverQuota {
    let mut watched = Some(Watched::new(workspace.clone()));
    loop {
        tokio::time::sleep(TICK).await;
        // One that is lost with its thread begins anew.
        let mut looking = watched.take().unwrap_or_else(|| Watched::new(workspace.clone()));
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
    /// Bytes and files that the file system has room for; none where it does not say.
    room: Option<[u64; 2]>,
    due: Instant,
    /// Not before this, whatever the file system says.
    rests: Instant,
    /// How much too much the workspace held, and since when it has not held less.
    before: Option<(u64, Instant)>,
}

impl Watched {
    fn new(workspace: Workspace) -> Self {
        let (room, now) = (workspace.room(), Instant::now());
        Self { workspace, room, due: now + PAUSE, rests: now, before: None }
    }

    fn look(&mut self) -> Option<OverQuota> {
        let (since, room) = (Instant::now(), self.workspace.room());
        if since < self.due && !(since >= self.rests && self.has_lost(room)) {
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
        // Programs that make it smaller, or have not yet begun to, are let be.
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

    fn has_lost(&self, room: Option<[u64; 2]>) -> bool {
        let (Some(before), Some(now)) = (self.room, room) else { return false };
        let most = self.workspace.bounds();
        (0..2).any(|which| before[which].saturating_sub(now[which]) >= (most[which] / PART).max(1))
    }
}
