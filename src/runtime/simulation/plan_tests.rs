//! What happens in a schedule, and when.

use std::time::Duration;

use super::drawn::Drawn;
use super::work::POISON;

/// Replicas.
pub(super) const REPLICAS: usize = 3;
/// After this nothing happens any more.
pub(super) const QUIET: Duration = Duration::from_secs(7);

/// Something that happens.
#[derive(Debug, Clone, Copy)]
pub(super) enum Happening {
    /// A caller starts a run, here or by the queue.
    Start { agent: &'static str, steps: u64, is_queued: bool },
    /// A row is damaged in the queue.
    Unreadable,
    /// A newer version puts a run into the queue.
    Newer,
    /// A process dies, and is started again.
    Crash { replica: usize, down: Duration },
    /// A process gets no time.
    Freeze { replica: usize, asleep: Duration },
    /// No process does.
    FreezeAll { asleep: Duration },
    /// The database's clock is put forward.
    Jump { by: Duration },
    /// The connection of the heartbeat is dead without an error.
    SilentHeartbeat { replica: usize },
    /// Its workspace is not there.
    NoWorkspace { replica: usize, lasting: Duration },
    /// Statements are refused, and answers lost; or answers to claims only.
    Trouble { replica: usize, lasting: Duration, of_claims: bool },
}

fn start(drawn: &Drawn, agent: &'static str, end: u64) -> (Duration, Happening) {
    let (steps, is_queued) = (1 + drawn.below(3), drawn.percent(60));
    (drawn.millis(500, end), Happening::Start { agent, steps, is_queued })
}

/// What a seed means.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) leases: [Duration; REPLICAS],
    /// In their order.
    pub(super) happenings: Vec<(Duration, Happening)>,
}

impl Plan {
    pub(super) fn of(drawn: &Drawn) -> Self {
        let short = Duration::from_secs(2);
        let mut leases = [short; REPLICAS];
        if drawn.percent(20) {
            leases[drawn.index(REPLICAS)] = Duration::from_secs(9);
        }
        let mut happenings = Vec::new();
        for _ in 0..4 + drawn.below(6) {
            let agent = if drawn.percent(40) { "lead" } else { "writer" };
            happenings.push(start(drawn, agent, 5000));
        }
        if drawn.percent(35) {
            happenings.push((drawn.millis(500, 4000), Happening::Unreadable));
        }
        if drawn.percent(20) {
            happenings.push((drawn.millis(500, 4000), Happening::Newer));
        }
        if drawn.percent(20) {
            // What dies beside it must be nothing but what it kills.
            let agent = if drawn.percent(50) { POISON } else { "victim" };
            happenings.push(start(drawn, agent, 2500));
            happenings.sort_by_key(|(at, _)| *at);
            return Self { leases, happenings };
        }
        for _ in 0..=drawn.below(3) {
            let replica = drawn.index(REPLICAS);
            let fault = match drawn.below(11) {
                0 | 1 => Happening::Crash { replica, down: drawn.millis(100, 4000) },
                2..=4 => Happening::Freeze { replica, asleep: drawn.millis(500, 6000) },
                5 => Happening::FreezeAll { asleep: drawn.millis(1000, 8000) },
                6 => Happening::Jump { by: drawn.millis(1000, 90_000) },
                7 => Happening::SilentHeartbeat { replica },
                8 | 9 => Happening::NoWorkspace { replica, lasting: drawn.millis(500, 5000) },
                _ => Happening::Trouble {
                    replica,
                    lasting: drawn.millis(300, 2500),
                    of_claims: drawn.percent(50),
                },
            };
            happenings.push((drawn.millis(800, 6000), fault));
        }
        happenings.sort_by_key(|(at, _)| *at);
        Self { leases, happenings }
    }
}
