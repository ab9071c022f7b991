//! Whether this replica may still start something that cannot be taken back.
//!
//! Other replicas take over after the lease has run out on the database's clock. Here the time
//! since the last good heartbeat is measured on the monotonic clock, and after two thirds of the
//! lease nothing new is started: a process that was stopped for a while learns it before it acts.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How often a replica that may not act looks again.
const LOOK: Duration = Duration::from_millis(50);

/// The time of the last good heartbeat.
#[derive(Debug)]
pub struct Lease {
    since: Instant,
    renewed_ms: AtomicU64,
    good_for: Duration,
}

impl Lease {
    /// Good from now on for two thirds of `lease`.
    pub fn new(lease: Duration) -> Self {
        Self { since: Instant::now(), renewed_ms: AtomicU64::new(0), good_for: lease * 2 / 3 }
    }

    /// A heartbeat that was sent at `sent` has been accepted.
    pub fn renewed(&self, sent: Instant) {
        let ms = u64::try_from(sent.saturating_duration_since(self.since).as_millis())
            .unwrap_or(u64::MAX);
        self.renewed_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// Whether something new may be started.
    pub fn holds(&self) -> bool {
        let renewed = Duration::from_millis(self.renewed_ms.load(Ordering::Relaxed));
        self.since.elapsed().saturating_sub(renewed) < self.good_for
    }

    /// Resolves when something new may be started; at once in ordinary times.
    pub async fn held(&self) {
        while !self.holds() {
            tokio::time::sleep(LOOK).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_runs_out_and_is_renewed() {
        assert!(Lease::new(Duration::from_mins(1)).holds());
        let lease = Lease { good_for: Duration::ZERO, ..Lease::new(Duration::from_mins(1)) };
        assert!(!lease.holds(), "it ran out");
        lease.renewed(Instant::now() + Duration::from_mins(1));
        let lease = Lease { good_for: Duration::from_mins(1), ..lease };
        assert!(lease.holds(), "it was renewed");
    }
}
