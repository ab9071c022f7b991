//! Points at which a test lets the process die, as a crash would, or have no thread to spare: the n-th
//! time that one is reached.
//!
//! `CRASH_POINT=after_commit:7` names the point and n. `BUSY_POINT=after_commit:7:5000` has all threads of the
//! runtime compute from there on, for so many milliseconds. Only debug builds, and those with the feature
//! `failpoints`, know of them; there is no timing in it, so what a test has seen once it sees again.

/// Ends the process here, or leaves it no thread, if that is to happen here.
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

    /// Tasks for each thread: one that is idle takes some of those that another one has.
    const TASKS: usize = 8;

    /// What a variable of the environment says.
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
