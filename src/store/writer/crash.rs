//! Points at which a test lets the process die, as a crash would: the n-th time that one is
//! reached.
//!
//! `CRASH_POINT=after_commit:7` names the point and n. Only debug builds, and those with the feature
//! `failpoints`, know of it; there is no timing in it, so what a test has seen once it sees again.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

/// Ends the process here, if it is to end here.
pub fn point(name: &str) {
    if cfg!(any(debug_assertions, feature = "failpoints")) {
        reached(name);
    }
}

fn reached(name: &str) {
    static PLAN: OnceLock<Option<(String, u64)>> = OnceLock::new();
    static REACHED: AtomicU64 = AtomicU64::new(0);
    let plan = PLAN.get_or_init(|| {
        let plan = std::env::var("CRASH_POINT").ok()?;
        let (point, nth) = plan.split_once(':')?;
        Some((point.to_owned(), nth.parse().ok()?))
    });
    if let Some((point, nth)) = plan
        && point == name
        && REACHED.fetch_add(1, Ordering::SeqCst) + 1 == *nth
    {
        std::process::abort();
    }
}
