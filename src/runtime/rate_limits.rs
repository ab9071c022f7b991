//! Rate limits of keys: for invocations, and for tool calls of their runs. The token buckets are in the store;
//! this file caches them, so that a busy key does not cost one query per request or call.
//!
//! A replica takes several tokens at once from a bucket in the store and spends them here; tokens that are not
//! spent within a second are dropped. Every token comes from the shared bucket, so all replicas together never
//! exceed the limit. From small buckets, tokens are taken one by one, so that they stay exact. The store is not
//! asked about an empty bucket until it has a token again.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio_util::sync::CancellationToken;

use super::store_retries::retry_while_unavailable;
use crate::clock;
use crate::engine::AppendFailed;
use crate::engine::run::{Admission, CallAdmission};
use crate::event::CallRate;
use crate::run::Caller;
use crate::store::{RateLimit, Store, StoreError, Taken};

/// How long taken tokens may be spent here.
const TOKEN_LIFETIME: Duration = Duration::from_secs(1);
/// The pause between two deletions of unused buckets in the store.
const POLL_INTERVAL: Duration = Duration::from_hours(1);
/// Buckets that are deleted by one statement, at most.
const BATCH: u32 = 1000;
/// Above this number, buckets with expired data are removed from memory.
const TIDY_ABOVE: usize = 1024;

/// How long the limit of a key is cached.
const LIMIT_LIFETIME: Duration = Duration::from_secs(10);

/// The answer of a rate limit, and the state of its bucket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RateLimitStatus {
    /// `None` if admitted; otherwise the time until the next try.
    pub retry_after: Option<Duration>,
    /// Tokens left, at least.
    pub remaining: u32,
    /// How long until the bucket is full again.
    pub reset: Duration,
}

/// The calls of tools that a caller's runs may make: one bucket for all of them, and one for each tool
/// whose options have a limit of their own, and for each such limit.
pub(super) struct CallLimits {
    pub(super) rates: Arc<RateLimits>,
    pub(super) patience: Duration,
    pub(super) caller: Arc<Caller>,
}

#[async_trait]
impl Admission for CallLimits {
    async fn admit(
        &self,
        tool: &str,
        per_minute: Option<u32>,
    ) -> Result<CallAdmission, AppendFailed> {
        let subject = &self.caller.subject;
        retry_while_unavailable(self.patience, || {
            self.rates.admitted_call(subject, tool, per_minute)
        })
        .await
    }
}

/// How often keys may invoke, and how many calls of tools their runs may make.
pub struct RateLimits {
    store: Arc<Store>,
    /// The limit of keys without a limit of their own.
    default: RateLimit,
    buckets: Buckets,
    limits: Mutex<HashMap<String, LimitOfKey>>,
}

impl RateLimits {
    pub(super) fn new(store: Arc<Store>, default: RateLimit) -> Self {
        Self { store, default, buckets: Buckets::default(), limits: Mutex::default() }
    }

    /// Takes a token from the bucket of a key's invocations.
    ///
    /// # Errors
    /// The store had to be asked and failed.
    pub async fn admit_invocation(
        &self,
        key: &str,
        limit: RateLimit,
    ) -> Result<RateLimitStatus, StoreError> {
        self.take_token(&format!("invocations {key}"), limit).await
    }

    /// Whether a call may be made now.
    async fn admitted_call(
        &self,
        subject: &str,
        tool: &str,
        own: Option<u32>,
    ) -> Result<CallAdmission, StoreError> {
        let mut admitted = CallAdmission::default();
        if let Some(limit) = self.call_limit(subject).await? {
            let status = self.take_token(&format!("calls {subject}"), limit).await?;
            admitted.rate = Some(tighter(admitted.rate, limit, status));
            if let Some(wait) = status.retry_after {
                let refused = Some(refusal("of tools", limit, wait));
                return Ok(CallAdmission { refused, ..admitted });
            }
        }
        if let Some(per_minute) = own {
            let limit = RateLimit { per_minute, burst: per_minute };
            // Agents with other limits count the calls of their own runs.
            let bucket = format!("calls {subject} {tool} {per_minute}");
            let status = self.take_token(&bucket, limit).await?;
            admitted.rate = Some(tighter(admitted.rate, limit, status));
            if let Some(wait) = status.retry_after {
                let refused = Some(refusal(&format!("of {tool}"), limit, wait));
                return Ok(CallAdmission { refused, ..admitted });
            }
        }
        Ok(admitted)
    }

    /// How many calls of tools the runs of a key may make; none where there are no keys.
    async fn call_limit(&self, subject: &str) -> Result<Option<RateLimit>, StoreError> {
        if let Some(known) = self.limit_of(subject) {
            return Ok(known.limit);
        }
        let default = self.default;
        let limit = match self.store.key(subject).await? {
            Some(key) => Some(key.rate_limit(default)),
            None => (subject != Caller::local().subject).then_some(default),
        };
        self.remember(subject, limit);
        Ok(limit)
    }

    async fn take_token(
        &self,
        name: &str,
        limit: RateLimit,
    ) -> Result<RateLimitStatus, StoreError> {
        let bucket = self.buckets.named(name);
        let (came, place) = (Instant::now(), QueueTicket::take(&bucket.waiting));
        let mut known = bucket.known.lock().await;
        let behind = place.leave();
        if let Some(status) = known.spend(Instant::now()) {
            return Ok(status);
        }
        if known.failed_at.is_some_and(|failed_at| came < failed_at) {
            return Err(StoreError::Unavailable(
                "the rate limiter could not reach the database".to_owned(),
            ));
        }
        let tokens = lease(limit).max(behind.saturating_add(1));
        let asked = self.store.take_tokens(name, limit, tokens).await;
        let now = Instant::now();
        known.failed_at = asked.is_err().then_some(now);
        *known = BucketView::from_store(asked?, now);
        Ok(known.answer(now))
    }

    fn limit_of(&self, key: &str) -> Option<LimitOfKey> {
        self.limits.lock().get(key).filter(|known| known.is_fresh()).copied()
    }

    fn remember(&self, key: &str, limit: Option<RateLimit>) {
        let mut limits = self.limits.lock();
        if limits.len() >= TIDY_ABOVE {
            limits.retain(|_, known| known.is_fresh());
        }
        limits.insert(key.to_owned(), LimitOfKey { limit, since: Instant::now() });
    }
}

/// Why a call is not made now.
fn refusal(what: &str, limit: RateLimit, wait: Duration) -> String {
    let RateLimit { per_minute, burst } = limit;
    let at_once = if burst == per_minute { String::new() } else { format!(" ({burst} at once)") };
    let seconds = wait.as_millis().div_ceil(1000).max(1);
    format!(
        "the limit of {per_minute} calls {what} per minute{at_once} is reached; retry in {seconds} s, \
         or continue without this call"
    )
}

/// The one of two limits that leaves fewer calls.
fn tighter(known: Option<CallRate>, limit: RateLimit, status: RateLimitStatus) -> CallRate {
    let rate = CallRate { limit: limit.per_minute, remaining: status.remaining };
    known.filter(|known| known.remaining < rate.remaining).unwrap_or(rate)
}

/// Tokens to take at once: those of a tenth of a second, at most a tenth of the burst.
fn lease(limit: RateLimit) -> u32 {
    (limit.per_minute / 600).min(limit.burst / 10).max(1)
}

/// How many calls of tools the runs of a key may make.
#[derive(Debug, Clone, Copy)]
struct LimitOfKey {
    /// None where there are no keys.
    limit: Option<RateLimit>,
    since: Instant,
}

impl LimitOfKey {
    fn is_fresh(&self) -> bool {
        self.since.elapsed() < LIMIT_LIFETIME
    }
}

/// The recently used buckets, by name.
#[derive(Debug, Default)]
struct Buckets(Mutex<HashMap<String, Arc<Bucket>>>);

impl Buckets {
    fn named(&self, key: &str) -> Arc<Bucket> {
        let mut buckets = self.0.lock();
        if let Some(bucket) = buckets.get(key) {
            return Arc::clone(bucket);
        }
        let now = Instant::now();
        if buckets.len() >= TIDY_ABOVE {
            buckets.retain(|_, bucket| {
                bucket.known.try_lock().map_or(true, |known| known.is_current(now))
            });
        }
        let bucket = Arc::new(Bucket {
            known: AsyncMutex::new(BucketView::nothing(now)),
            waiting: AtomicU32::new(0),
        });
        buckets.insert(key.to_owned(), Arc::clone(&bucket));
        bucket
    }
}

#[derive(Debug)]
struct Bucket {
    /// Held while the store is asked: one query at a time, for all waiting requests.
    known: AsyncMutex<BucketView>,
    waiting: AtomicU32,
}

/// Counts a request as waiting for a bucket, until it is dropped.
struct QueueTicket<'b>(&'b AtomicU32);

impl<'b> QueueTicket<'b> {
    fn take(waiting: &'b AtomicU32) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }

    /// Stops waiting; returns how many other requests wait.
    fn leave(self) -> u32 {
        self.0.load(Ordering::Relaxed).saturating_sub(1)
    }
}

impl Drop for QueueTicket<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The cached state of a bucket.
#[derive(Debug, Clone, Copy)]
struct BucketView {
    /// Tokens that this replica has taken.
    tokens: u32,
    /// When the entry expires.
    kept_until: Instant,
    /// Tokens that were left in the store.
    remaining: u32,
    /// The bucket in the store is empty until this instant.
    empty_until: Instant,
    full_at: Instant,
    /// When the last query failed.
    failed_at: Option<Instant>,
}

impl BucketView {
    fn nothing(now: Instant) -> Self {
        Self {
            tokens: 0,
            kept_until: now,
            remaining: 0,
            empty_until: now,
            full_at: now,
            failed_at: None,
        }
    }

    fn from_store(taken: Taken, now: Instant) -> Self {
        Self {
            tokens: taken.granted,
            kept_until: now + TOKEN_LIFETIME,
            remaining: taken.remaining,
            empty_until: now + taken.retry_after,
            full_at: now + taken.reset,
            failed_at: None,
        }
    }

    fn is_current(&self, now: Instant) -> bool {
        if self.tokens > 0 { now < self.kept_until } else { now < self.empty_until }
    }

    /// The answer, if it needs no query.
    fn spend(&mut self, now: Instant) -> Option<RateLimitStatus> {
        self.is_current(now).then(|| self.answer(now))
    }

    fn answer(&mut self, now: Instant) -> RateLimitStatus {
        let is_admitted = self.tokens > 0;
        self.tokens -= u32::from(is_admitted);
        RateLimitStatus {
            retry_after: (!is_admitted).then(|| self.empty_until.saturating_duration_since(now)),
            remaining: self.remaining.saturating_add(self.tokens),
            reset: self.full_at.saturating_duration_since(now),
        }
    }
}

/// Deletes buckets of keys and subjects that make no more requests, until the service stops.
pub(super) async fn delete_full(store: Arc<Store>, stop: CancellationToken) {
    let mut look = clock::every(POLL_INTERVAL);
    while stop.run_until_cancelled(look.tick()).await.is_some() {
        loop {
            match store.delete_full_buckets(BATCH).await {
                Ok(deleted) if deleted < u64::from(BATCH) => break,
                Ok(_) => tokio::task::yield_now().await,
                Err(error) => {
                    error.log_retry("buckets of rate limits are deleted later");
                    break;
                }
            }
        }
    }
}

#[cfg(test)]
#[path = "rate_limits_tests.rs"]
mod tests;
