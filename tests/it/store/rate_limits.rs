//! Token buckets: exact from the first token on, whichever replica asks, and never more than the limit gives.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use toolloop::store::{RateLimit, Taken};

use super::*;

on_both! {
    a_bucket_gives_its_burst_and_then_says_when,
    remaining_tokens_are_given_where_more_is_asked_for,
    tokens_come_back_with_time_and_no_faster,
    buckets_do_not_share,
    a_race_never_gives_more_than_there_is,
    a_changed_limit_does_not_wait_for_the_old_one,
    limits_at_the_edge_of_their_range_work,
    buckets_that_have_been_full_for_long_are_deleted,
}

/// Nothing comes back while a test lasts.
const SLOW: RateLimit = RateLimit { per_minute: 1, burst: 5 };

async fn take(db: &Db, limit: RateLimit, tokens: u32) -> Taken {
    db.store.take_tokens("k", limit, tokens).await.unwrap()
}

async fn buckets_that_have_been_full_for_long_are_deleted(db: Db) {
    for bucket in ["old", "older", "in use"] {
        db.store.take_tokens(bucket, SLOW, 1).await.unwrap();
    }
    db.sql("UPDATE rate_limits SET tat = 1 WHERE key <> 'in use'").await;
    let deleted = || async { db.store.delete_full_buckets(1).await.unwrap() };
    assert_eq!([deleted().await, deleted().await, deleted().await], [1, 1, 0]);
    assert_eq!(db.store.take_tokens("in use", SLOW, 5).await.unwrap().granted, 4);
    assert_eq!(db.store.take_tokens("old", SLOW, 5).await.unwrap().granted, 5);
}

async fn a_bucket_gives_its_burst_and_then_says_when(db: Db) {
    for left in (0..5).rev() {
        let taken = take(&db, SLOW, 1).await;
        assert_eq!((taken.granted, taken.remaining), (1, left));
        assert_eq!(taken.retry_after.is_zero(), left > 0);
    }
    for _ in 0..3 {
        let taken = take(&db, SLOW, 1).await;
        assert_eq!((taken.granted, taken.remaining), (0, 0));
        // Refusals do not move the bucket.
        let seconds = |wait: Duration| wait.as_secs_f64();
        assert!((30.0..=60.0).contains(&seconds(taken.retry_after)), "{taken:?}");
        assert!((270.0..=300.0).contains(&seconds(taken.reset)), "{taken:?}");
    }
}

async fn remaining_tokens_are_given_where_more_is_asked_for(db: Db) {
    let granted = [take(&db, SLOW, 3).await, take(&db, SLOW, 3).await, take(&db, SLOW, 3).await]
        .map(|t| t.granted);
    assert_eq!(granted, [3, 2, 0]);
    assert_eq!(db.store.take_tokens("fresh", SLOW, 9).await.unwrap().granted, 5);
}

async fn tokens_come_back_with_time_and_no_faster(db: Db) {
    let limit = RateLimit { per_minute: 6000, burst: 3 };
    let begun = Instant::now();
    let mut granted = 0;
    while granted < 20 {
        let taken = take(&db, limit, 2).await;
        granted += taken.granted;
        let most = 3 + begun.elapsed().as_micros() / 10_000;
        assert!(u128::from(granted) <= most, "{granted} of at most {most}");
        tokio::time::sleep(taken.retry_after).await;
    }
}

async fn buckets_do_not_share(db: Db) {
    assert_eq!(take(&db, SLOW, 5).await.granted, 5);
    assert_eq!(db.store.take_tokens("other", SLOW, 5).await.unwrap().granted, 5);
    assert_eq!(take(&db, SLOW, 1).await.granted, 0);
}

async fn a_race_never_gives_more_than_there_is(db: Db) {
    let other = match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let limit = RateLimit { per_minute: 1, burst: 60 };
    let mut takers = JoinSet::new();
    for number in 0..16 {
        let store = if number % 2 == 0 { db.store.clone() } else { other.clone() };
        takers.spawn(async move {
            let mut granted = 0;
            for _ in 0..5 {
                granted += store.take_tokens("k", limit, 1 + number % 3).await.unwrap().granted;
            }
            granted
        });
    }
    assert_eq!(takers.join_all().await.into_iter().sum::<u32>(), 60);
}

async fn a_changed_limit_does_not_wait_for_the_old_one(db: Db) {
    assert_eq!(take(&db, RateLimit { per_minute: 1, burst: 1000 }, 1000).await.granted, 1000);
    let taken = take(&db, RateLimit { per_minute: 60_000, burst: 10 }, 1).await;
    assert_eq!(taken.granted, 0);
    assert!(taken.retry_after < Duration::from_secs(12), "{taken:?}");
}

async fn limits_at_the_edge_of_their_range_work(db: Db) {
    for (per_minute, burst) in
        [(1, 1), (1_000_000_000, 1_000_000_000), (1, 1_000_000_000), (1_000_000_000, 1)]
    {
        let (bucket, limit) = (format!("{per_minute} {burst}"), RateLimit { per_minute, burst });
        for _ in 0..2 {
            let taken = db.store.take_tokens(&bucket, limit, u32::MAX).await.unwrap();
            assert!(taken.granted <= burst && taken.remaining <= burst, "{limit:?} {taken:?}");
        }
        let first = db.store.take_tokens(&format!("{bucket} fresh"), limit, 1).await.unwrap();
        assert_eq!(first.granted, 1, "{limit:?}");
    }
}
