//! Several replicas before one bucket, in made-up time.

use proptest::prelude::*;

use super::*;

fn limit(per_minute: u32, burst: u32) -> RateLimit {
    RateLimit { per_minute, burst }
}

#[test]
fn how_many_tokens_are_taken_at_once() {
    for (per_minute, burst, expected) in [
        (60, 10, 1),
        (1, 1, 1),
        (6000, 10, 1),
        (6000, 100, 10),
        (600, 1000, 1),
        (60_000, 100, 10),
        (1_000_000, 1_000_000, 1666),
        (1_000_000_000, 1_000_000_000, 1_666_666),
    ] {
        assert_eq!(lease(limit(per_minute, burst)), expected, "{per_minute} {burst}");
    }
}

#[test]
fn a_key_has_the_limits_that_it_does_not_say() {
    let default = limit(300, 60);
    for (own, burst, expected) in [
        (None, None, limit(300, 60)),
        (Some(2), None, limit(2, 2)),
        (Some(100), None, limit(100, 60)),
        (Some(2), Some(8), limit(2, 8)),
        (None, Some(8), limit(300, 8)),
        (None, Some(400), limit(300, 400)),
    ] {
        assert_eq!(default.of_key(own, burst), expected, "{own:?} {burst:?}");
    }
    assert_eq!(limit(3, 9).of_key(None, None), limit(3, 9), "what is set stays");
}

#[test]
fn a_refusal_says_which_limit_is_reached() {
    let said = |limit| refusal("of tools", limit, Duration::from_millis(1200));
    let (minute, burst) = (said(limit(5, 5)), said(limit(60, 3)));
    assert!(
        minute.starts_with("the limit of 5 calls of tools per minute is reached; retry in 2 s")
    );
    assert!(burst.starts_with("the limit of 60 calls of tools per minute (3 at once) is reached"));
}

#[test]
fn a_bucket_view_answers_until_it_expires() {
    let start = Instant::now();
    let after = |ms| start + Duration::from_millis(ms);
    let second = Duration::from_secs(1);
    let taken = Taken { granted: 2, remaining: 7, retry_after: Duration::ZERO, reset: 5 * second };
    let mut known = BucketView::from_store(taken, start);
    let first = known.spend(after(500)).unwrap();
    assert_eq!(
        first,
        RateLimitStatus { retry_after: None, remaining: 8, reset: Duration::from_millis(4500) }
    );
    assert!(known.spend(after(1000)).is_none(), "a token was kept too long");
    assert_eq!(known.spend(after(999)).unwrap().remaining, 7);
    assert!(known.spend(after(999)).is_none(), "there were two tokens");

    let mut known = BucketView::from_store(
        Taken { granted: 1, remaining: 0, retry_after: second, ..taken },
        start,
    );
    assert_eq!(known.spend(start).unwrap().retry_after, None);
    assert_eq!(known.spend(after(400)).unwrap().retry_after, Some(Duration::from_millis(600)));
    assert!(known.spend(after(1000)).is_none(), "there is a token again");
    assert!(BucketView::nothing(start).spend(start).is_none());
}

#[test]
fn requests_that_stop_waiting_do_not_count() {
    let waiting = AtomicU32::new(0);
    let (first, second, third) =
        (QueueTicket::take(&waiting), QueueTicket::take(&waiting), QueueTicket::take(&waiting));
    drop(second);
    assert_eq!(first.leave(), 1);
    assert_eq!(third.leave(), 0);
    assert_eq!(waiting.load(Ordering::Relaxed), 0);
}

#[test]
fn unused_buckets_are_forgotten() {
    let buckets = Buckets::default();
    let busy = buckets.named("busy");
    *busy.known.try_lock().unwrap() = BucketView::from_store(
        Taken { granted: 1, remaining: 0, retry_after: TOKEN_LIFETIME, reset: TOKEN_LIFETIME },
        Instant::now() + Duration::from_hours(1),
    );
    for number in 0..3 * TIDY_ABOVE {
        buckets.named(&number.to_string());
    }
    assert!(buckets.0.lock().len() <= TIDY_ABOVE + 1);
    assert!(Arc::ptr_eq(&buckets.named("busy"), &busy));
}

/// The bucket in the store, with nanoseconds from the start as its clock.
struct Shared {
    limit: RateLimit,
    tat: u64,
}

impl Shared {
    fn interval(&self) -> u64 {
        60_000_000_000_u64.div_ceil(self.limit.per_minute.into())
    }

    fn available(&self, now: u64) -> u64 {
        let window = self.interval() * u64::from(self.limit.burst);
        window.saturating_sub(self.tat.saturating_sub(now)) / self.interval()
    }

    fn take(&mut self, now: u64, tokens: u32) -> Taken {
        let granted = self.available(now).min(tokens.into());
        self.tat = self.tat.max(now) + granted * self.interval();
        let window = self.interval() * u64::from(self.limit.burst);
        Taken {
            granted: granted.try_into().unwrap(),
            remaining: self.available(now).try_into().unwrap(),
            retry_after: Duration::from_nanos(
                (self.tat - now + self.interval()).saturating_sub(window),
            ),
            reset: Duration::from_nanos(self.tat - now),
        }
    }
}

proptest! {
    /// From any admission to any later one no more pass than the limit gives in that time, but for
    /// tokens that were taken before and kept; and no request is refused while there is a token.
    #[test]
    fn replicas_together_keep_the_limit(
        per_minute in 1_u32..20_000,
        burst in 1_u32..200,
        steps in proptest::collection::vec((0_usize..4, 0_u64..400), 1..400),
    ) {
        let limit = limit(per_minute, burst);
        let mut shared = Shared { limit, tat: 0 };
        let start = Instant::now();
        let mut replicas = [BucketView::nothing(start); 4];
        let (mut now, mut admitted) = (0, Vec::new());
        for (replica, pause) in steps {
            now += pause * 1_000_000 / 4;
            let known = &mut replicas[replica];
            let instant = start + Duration::from_nanos(now);
            let status = known.spend(instant).unwrap_or_else(|| {
                *known = BucketView::from_store(shared.take(now, lease(limit)), instant);
                known.answer(instant)
            });
            match status.retry_after {
                None => admitted.push(now),
                Some(wait) => {
                    prop_assert_eq!(shared.available(now), 0);
                    prop_assert!(!wait.is_zero());
                }
            }
        }
        let kept = if lease(limit) == 1 { 0 } else { 1_000_000_000 };
        for (at, first) in admitted.iter().enumerate() {
            for (before, last) in admitted[at..].iter().enumerate() {
                let most = u64::from(burst) + (last - first + kept) / shared.interval() + u64::from(kept > 0);
                prop_assert!((before as u64) < most, "{before} and one more from {first} to {last}");
            }
        }
        if let Some(last) = admitted.last() {
            prop_assert!(admitted.len() as u64 <= u64::from(burst) + last / shared.interval());
        }
    }
}
