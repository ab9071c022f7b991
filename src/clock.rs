//! The time by which runs are judged: the database's, where replicas share one.
//!
//! The clocks of replicas differ, and one replica may end a run that another one began. So stored times, and times
//! that are compared with them, are those of this machine's clock, corrected by the last known difference to the
//! database's clock. Leases and timeouts are measured by the monotonic clock instead.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use chrono::{DateTime, SubsecRound as _, TimeDelta, Utc};
use tokio::time::{Instant, Interval, MissedTickBehavior};

/// Differences up to this are taken for network latency, not for a difference of clocks; in microseconds.
const TOLERANCE: i64 = 100_000;

/// How far the database's clock is ahead of this machine's, in microseconds.
static AHEAD: AtomicI64 = AtomicI64::new(0);

/// The time, in whole microseconds, as databases keep it.
pub fn now() -> DateTime<Utc> {
    #[cfg(test)]
    if let Some(now) = simulated::now() {
        return now.trunc_subsecs(6);
    }
    of_machine(machine()).trunc_subsecs(6)
}

/// A time of this machine's clock, such as that of a file, by the database's clock.
pub fn of_machine(at: DateTime<Utc>) -> DateTime<Utc> {
    let ahead = TimeDelta::microseconds(AHEAD.load(Ordering::Relaxed));
    at.checked_add_signed(ahead).unwrap_or(at)
}

/// Rounds a time down to the beginning of its unit, such as an hour or a day in UTC.
pub fn beginning(at: DateTime<Utc>, unit: TimeDelta) -> DateTime<Utc> {
    let seconds = unit.num_seconds().max(1);
    DateTime::from_timestamp(at.timestamp().div_euclid(seconds) * seconds, 0).unwrap_or(at)
}

/// Ticks at once, then once per period; a late tick delays all later ones.
pub fn every(pause: Duration) -> Interval {
    let mut ticks = tokio::time::interval(pause);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Adjusts the clock to the time that the database reported; it was asked at `asked`.
pub fn sync(database: DateTime<Utc>, asked: Instant) {
    #[cfg(test)]
    if simulated::now().is_some() {
        return; // it is the database's already
    }
    let latency = asked.elapsed() / 2;
    let there = database + TimeDelta::from_std(latency).unwrap_or_default();
    let ahead = (there - machine()).num_microseconds().unwrap_or_default();
    let uncertainty =
        i64::try_from(latency.as_micros()).unwrap_or(i64::MAX).saturating_add(TOLERANCE);
    if ahead.abs_diff(AHEAD.load(Ordering::Relaxed)) > uncertainty.unsigned_abs() {
        AHEAD.store(ahead, Ordering::Relaxed);
    }
}

/// The time of this machine. Tests can shift it by `CLOCK_WRONG_BY` seconds.
fn machine() -> DateTime<Utc> {
    use std::sync::LazyLock;
    static WRONG_BY: LazyLock<i64> = LazyLock::new(|| {
        std::env::var("CLOCK_WRONG_BY").ok().and_then(|by| by.parse().ok()).unwrap_or_default()
    });
    if cfg!(any(debug_assertions, feature = "failpoints")) {
        return Utc::now() + TimeDelta::seconds(*WRONG_BY);
    }
    Utc::now()
}

/// The time of a simulation, which runs in one thread.
#[cfg(test)]
pub(crate) mod simulated {
    use std::cell::Cell;

    use super::{DateTime, Instant, TimeDelta, Utc};

    thread_local! {
        static KNOWN: Cell<Option<(DateTime<Utc>, Instant)>> = const { Cell::new(None) };
        static ASKED: Cell<u16> = const { Cell::new(0) };
    }

    /// What the database's clock shows at that instant of the executor that is run next.
    pub(crate) fn set(known: Option<(DateTime<Utc>, Instant)>) {
        KNOWN.set(known);
    }

    pub(super) fn now() -> Option<DateTime<Utc>> {
        let (at, then) = KNOWN.get()?;
        // Between two questions some time passes.
        ASKED.set((ASKED.get() + 1) % 1000);
        let asked = TimeDelta::microseconds(ASKED.get().into());
        Some(at + TimeDelta::from_std(then.elapsed()).unwrap_or_default() + asked)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    /// One test: the difference is that of the process.
    #[test]
    fn the_clock_follows_the_database() {
        let off = |hours: i64| (now() - Utc::now() - TimeDelta::hours(hours)).abs();
        let close = TimeDelta::seconds(5);
        sync(Utc::now() + TimeDelta::hours(2), Instant::now());
        assert!(off(2) < close);
        let slow =
            Instant::now().checked_sub(Duration::from_hours(20)).unwrap_or_else(Instant::now);
        sync(Utc::now() - TimeDelta::hours(8), slow);
        assert!(off(2) < close, "an answer that took so long says nothing");
        sync(Utc::now(), Instant::now());
        assert!(off(0) < close);
    }
}
