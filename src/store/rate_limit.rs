//! The arithmetic of token buckets (GCRA), and the statement that takes tokens.
//!
//! A bucket is stored as one number: the instant at which it will be full again. Taking a token moves this instant
//! by the refill time of one token. A token is refused if that would move the instant further than the fill time
//! of an empty bucket from now. Instants are nanoseconds since 1970 by the database's clock. The buckets and the
//! form of refusals are decided elsewhere.

use std::time::Duration;

use super::backend::Work;
use super::sql::Query;
use super::{Store, StoreError};

/// The longest time in which a bucket fills: a hundred years.
const LONGEST: i64 = 100 * 365 * 86_400 * 1_000_000_000;

/// Nanoseconds in a day.
const DAY: i64 = 86_400 * 1_000_000_000;

/// The rate and the size of a token bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimit {
    /// Tokens that are refilled per minute; at least 1.
    pub per_minute: u32,
    /// Tokens in a full bucket; at least 1.
    pub burst: u32,
}

impl RateLimit {
    /// The limit of a key, with this limit as the default. If a key sets only its limit per minute, its burst is at
    /// most that limit.
    #[must_use]
    pub fn of_key(self, per_minute: Option<u32>, burst: Option<u32>) -> Self {
        let usual = per_minute.map_or(self.burst, |own| own.min(self.burst));
        Self { per_minute: per_minute.unwrap_or(self.per_minute), burst: burst.unwrap_or(usual) }
    }
}

/// The tokens taken from a bucket, and its state afterwards.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Taken {
    /// Tokens that were taken: all requested ones, or as many as the bucket had.
    pub granted: u32,
    /// Tokens that remain in the shared bucket.
    pub remaining: u32,
    /// The time until a token is available; zero if some remain.
    pub retry_after: Duration,
    /// The time until the bucket is full again.
    pub reset: Duration,
}

impl RateLimit {
    /// The refill time of one token in nanoseconds; rounded up, so that no minute has more tokens than allowed.
    pub(super) fn interval(self) -> i64 {
        60_000_000_000_u64.div_ceil(u64::from(self.per_minute.max(1))).cast_signed()
    }

    /// The fill time of an empty bucket in nanoseconds.
    pub(super) fn window(self) -> i64 {
        self.interval().saturating_mul(i64::from(self.burst.max(1))).min(LONGEST)
    }

    /// The fill time of an empty bucket.
    pub fn refill(self) -> Duration {
        Duration::from_nanos(self.window().unsigned_abs())
    }
}

impl Taken {
    /// Reads the updated row: `at` is now, `tat` is when the bucket will be full.
    pub(super) fn read(limit: RateLimit, at: i64, tat: i64, granted: i64) -> Self {
        let (interval, window) = (limit.interval(), limit.window());
        let missing = tat.saturating_sub(at).max(0);
        let count = |tokens: i64| u32::try_from(tokens.max(0)).unwrap_or(u32::MAX);
        let wait = missing.saturating_add(interval).saturating_sub(window);
        Self {
            granted: count(granted),
            remaining: count(window.saturating_sub(missing) / interval),
            retry_after: Duration::from_nanos(wait.max(0).unsigned_abs()),
            reset: Duration::from_nanos(missing.unsigned_abs()),
        }
    }
}

/// When a bucket will be full if nothing is taken now. An instant that is too far in the future, because the limit
/// was changed or a clock was set back, is limited.
macro_rules! full {
    () => {
        "{greatest}({least}(l.tat, excluded.at + :window + 10000000000), excluded.at)"
    };
}

/// The number of requested tokens that the bucket has.
macro_rules! given {
    () => {
        concat!(
            "{least}(:tokens, {greatest}(0, (:window - (",
            full!(),
            " - excluded.at)) / :interval))"
        )
    };
}

impl Store {
    /// Takes up to that many tokens from a bucket that all replicas share. An unused bucket is full.
    pub async fn take_tokens(
        &self,
        bucket: &str,
        limit: RateLimit,
        tokens: u32,
    ) -> Result<Taken, StoreError> {
        let take = Query::new(concat!(
            "INSERT INTO rate_limits AS l (key, at, granted, tat) \
             SELECT :bucket, clock.at, {least}(:tokens, :window / :interval), \
             clock.at + {least}(:tokens, :window / :interval) * :interval \
             FROM (SELECT {nanos} AS at) AS clock WHERE true \
             ON CONFLICT (key) DO UPDATE SET at = excluded.at, granted = ",
            given!(),
            ", tat = ",
            full!(),
            " + :interval * ",
            given!(),
            " RETURNING at, tat, granted"
        ));
        let take = take.bind("bucket", bucket).bind("tokens", tokens);
        let take = take.bind("interval", limit.interval()).bind("window", limit.window());
        let rows = self.backend.write(Work::Data, take).await?;
        let row = rows
            .first()
            .ok_or_else(|| StoreError::Failed("the rate limit query returned no row".to_owned()))?;
        Ok(Taken::read(limit, row.read("at")?, row.read("tat")?, row.read("granted")?))
    }

    /// Deletes up to `limit` buckets that have been full for a day, because an unused bucket is full, too; returns
    /// their number.
    pub async fn delete_full_buckets(&self, limit: u32) -> Result<u64, StoreError> {
        let delete = Query::new(
            "DELETE FROM rate_limits WHERE tat < {nanos} - :day AND key IN \
             (SELECT key FROM rate_limits WHERE tat < {nanos} - :day LIMIT :limit) RETURNING 1",
        );
        let delete = delete.bind("day", DAY).bind("limit", limit);
        Ok(self.backend.write(Work::Data, delete).await?.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;

    #[test]
    fn intervals_and_windows() {
        for (per_minute, burst, interval, window) in [
            (60, 10, SECOND, 10 * SECOND),
            (1, 1, 60 * SECOND, 60 * SECOND),
            (7, 1, 8_571_428_572, 8_571_428_572),
            (1_000_000_000, 1_000_000_000, 60, 60 * SECOND),
            (u32::MAX, 1, 14, 14),
            (1, u32::MAX, 60 * SECOND, LONGEST),
            (0, 0, 60 * SECOND, 60 * SECOND),
        ] {
            let limit = RateLimit { per_minute, burst };
            assert_eq!((limit.interval(), limit.window()), (interval, window), "{limit:?}");
        }
    }

    #[test]
    fn how_a_bucket_stands() {
        let limit = RateLimit { per_minute: 60, burst: 10 };
        for (missing, remaining, retry_after, reset) in [
            (-SECOND, 10, 0, 0),
            (0, 10, 0, 0),
            (SECOND, 9, 0, SECOND),
            (SECOND + 1, 8, 0, SECOND + 1),
            (9 * SECOND, 1, 0, 9 * SECOND),
            (9 * SECOND + 1, 0, 1, 9 * SECOND + 1),
            (10 * SECOND, 0, SECOND, 10 * SECOND),
            (12 * SECOND, 0, 3 * SECOND, 12 * SECOND),
        ] {
            let at = 1_800_000_000 * SECOND;
            let taken = Taken::read(limit, at, at + missing, 1);
            let nanos = |n: i64| Duration::from_nanos(n.unsigned_abs());
            let expected = Taken {
                granted: 1,
                remaining,
                retry_after: nanos(retry_after),
                reset: nanos(reset),
            };
            assert_eq!(taken, expected, "{missing}");
        }
    }
}
