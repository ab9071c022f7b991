//! The turns of tenants that take more than their share.
//!
//! Their writes can be large, and where there is one connection that writes, all others wait behind
//! them. So one commit of theirs is under way at a time, after it they rest for as long as it took, and
//! who else waits goes first after each.

use std::future::pending;
use std::time::Duration;

use tokio::time::{Instant, sleep_until};

/// How long they rest at most, also after an outage.
const MAX_REST: Duration = Duration::from_millis(250);

/// Where they are.
#[derive(Debug, Default)]
pub(super) struct Behind {
    /// Since when a commit of theirs is under way.
    since: Option<Instant>,
    rests_until: Option<Instant>,
    /// Whether others were served since.
    are_next: bool,
}

impl Behind {
    /// Whether one of their commits may begin.
    pub(super) fn may_go(&self, now: Instant) -> bool {
        self.since.is_none() && self.rests_until.is_none_or(|until| until <= now)
    }

    /// Whether it is their turn before that of others.
    pub(super) fn are_next(&self) -> bool {
        self.are_next
    }

    /// A commit begins, theirs or of others.
    pub(super) fn note(&mut self, is_theirs: bool, now: Instant) {
        self.are_next = !is_theirs;
        if is_theirs {
            self.since = Some(now);
        }
    }

    /// Their commit is over.
    pub(super) fn ends(&mut self, now: Instant) {
        let took = self.since.take().map(|since| now - since);
        self.rests_until = took.map(|took| now + took.min(MAX_REST));
    }

    /// Resolves when their rest is over; never where they do not rest.
    pub(super) async fn rested(&self) {
        match self.rests_until {
            Some(until) => sleep_until(until).await,
            None => pending().await,
        }
    }

    /// Their rest is over.
    pub(super) fn go_on(&mut self) {
        self.rests_until = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_go_one_at_a_time_and_rest_as_long_as_it_took() {
        let (now, ms) = (Instant::now(), Duration::from_millis);
        let mut behind = Behind::default();
        assert!(behind.may_go(now) && !behind.are_next());
        behind.note(true, now);
        assert!(!behind.may_go(now), "one is under way");
        behind.ends(now + ms(20));
        assert!(!behind.may_go(now + ms(39)));
        assert!(behind.may_go(now + ms(40)));
        behind.go_on();
        assert!(behind.may_go(now));
        assert!(!behind.are_next(), "others go first");
        behind.note(false, now + ms(40));
        assert!(behind.are_next());
    }
}
