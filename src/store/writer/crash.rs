//! Fail points for tests: when a point is reached for the n-th time, the process dies as in a crash, or all
//! threads of the runtime are busy for a while.
//!
//! `CRASH_POINT=after_commit:7` names the point and n. `BUSY_POINT=after_commit:7:5000` also has the duration in
//! milliseconds. Fail points exist only in debug builds and with the feature `failpoints`. They do not depend on
//! time, so tests are reproducible.

/// Ends the process or blocks all threads, if a fail point is set here.
pub fn point(name: &str) {
    if cfg!(any(debug_assertions, feature = "failpoints")) {
        armed::reached(name);
    }
}

mod armed {
    use std::sync::LazyLock;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::{Duration, Instant};

    use tokio::runtime::Handle;

    static DEATH: LazyLock<Option<Plan>> = LazyLock::new(|| Plan::of("CRASH_POINT"));
    static BUSY: LazyLock<Option<Plan>> = LazyLock::new(|| Plan::of("BUSY_POINT"));

    /// Tasks per thread: an idle thread steals tasks of other threads.
    const TASKS: usize = 8;

    /// Parses an environment variable.
    struct Plan {
        point: String,
        nth: u64,
        milliseconds: u64,
        reached: AtomicU64,
    }

    impl Plan {
        fn of(variable: &str) -> Option<Self> {
            let plan = std::env::var(variable).ok()?;
            let mut parts = plan.split(':');
            let (point, nth) = (parts.next()?.to_owned(), parts.next()?.parse().ok()?);
            let milliseconds = parts.next().unwrap_or_default().parse().unwrap_or_default();
            Some(Self { point, nth, milliseconds, reached: AtomicU64::new(0) })
        }

        fn is_due(&self, name: &str) -> bool {
            self.point == name && self.reached.fetch_add(1, Ordering::SeqCst) + 1 == self.nth
        }
    }

    pub(super) fn reached(name: &str) {
        if DEATH.as_ref().is_some_and(|plan| plan.is_due(name)) {
            std::process::abort();
        }
        if let Some(plan) = BUSY.as_ref().filter(|plan| plan.is_due(name)) {
            compute_everywhere(Instant::now() + Duration::from_millis(plan.milliseconds));
        }
    }

    fn compute_everywhere(until: Instant) {
        let compute = move || {
            while Instant::now() < until {
                std::hint::spin_loop();
            }
        };
        for _ in 0..TASKS * Handle::current().metrics().num_workers() {
            tokio::spawn(async move { compute() });
        }
        compute();
    }
}
