//! Whether this replica may still start something that cannot be undone.
//!
//! Other replicas take over after the lease has run out on the database's clock. Here the time
//! since the last good heartbeat is measured on the monotonic clock, and after two thirds of the
//! lease nothing new is started: a process that was suspended for a while notices before it acts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// The interval at which a replica that may not act checks again.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// The time of the last good heartbeat.
#[derive(Debug)]
pub struct Lease {
    since: Instant,
    renewed_ms: AtomicU64,
    good_for: Duration,
}

impl Lease {
    /// A lease that is valid from now on for two thirds of `lease`.
    pub fn new(lease: Duration) -> Self {
        Self { since: Instant::now(), renewed_ms: AtomicU64::new(0), good_for: lease * 2 / 3 }
    }

    /// A heartbeat that was sent at `sent` has been accepted.
    pub fn renew(&self, sent: Instant) {
        let ms = u64::try_from(sent.saturating_duration_since(self.since).as_millis())
            .unwrap_or(u64::MAX);
        self.renewed_ms.fetch_max(ms, Ordering::Relaxed);
    }

    /// Whether something new may be started.
    pub fn holds(&self) -> bool {
        !self.remaining().is_zero()
    }

    /// The remaining time for which it is valid unless it is renewed.
    fn remaining(&self) -> Duration {
        let renewed = Duration::from_millis(self.renewed_ms.load(Ordering::Relaxed));
        self.good_for.saturating_sub(self.since.elapsed().saturating_sub(renewed))
    }

    /// Resolves when it is no longer valid.
    pub async fn over(&self) {
        while self.holds() {
            tokio::time::sleep(self.remaining()).await;
        }
    }

    /// Resolves when something new may be started; normally at once.
    pub async fn until_valid(&self) {
        while !self.holds() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Whether a run may change something outside of it: this replica's lease is valid, and the run was not
/// lost to another one.
#[derive(Debug, Clone)]
pub struct Standing {
    lease: Arc<Lease>,
    lost: CancellationToken,
}

impl Standing {
    /// `lost` is cancelled when another replica owns the run.
    pub fn new(lease: Arc<Lease>, lost: CancellationToken) -> Self {
        Self { lease, lost }
    }

    /// Whether it may now.
    pub fn holds(&self) -> bool {
        self.lease.holds() && !self.lost.is_cancelled()
    }

    /// Resolves when it may; never for a run that was lost.
    pub async fn until_valid(&self) {
        self.lease.until_valid().await;
        if self.lost.is_cancelled() {
            std::future::pending::<()>().await;
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
        lease.renew(Instant::now() + Duration::from_mins(1));
        let lease = Lease { good_for: Duration::from_mins(1), ..lease };
        assert!(lease.holds(), "it was renewed");
    }

    #[tokio::test(start_paused = true)]
    async fn a_lost_run_may_nothing_more() {
        let lost = CancellationToken::new();
        let standing = Standing::new(Arc::new(Lease::new(Duration::from_mins(1))), lost.clone());
        assert!(standing.holds());
        standing.until_valid().await;
        lost.cancel();
        assert!(!standing.holds());
        let waited = tokio::time::timeout(Duration::from_hours(1), standing.until_valid()).await;
        assert!(waited.is_err());
    }
}
