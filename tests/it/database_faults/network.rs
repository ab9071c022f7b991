//! The network between a service and its database loses answers, or carries nothing any more.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::site::{PATIENCE, Site, Told, refused};
use super::{BUSY, RUNS, UNANSWERED, under_way};
use crate::fault_rounds::rounds;
use crate::postgres_cluster;
use crate::postgres_proxy::Proxy;

/// The least that a caller waits for a connection, or for a commit, before it is refused.
const WAIT: Duration = Duration::from_secs(2);

/// A commit is stored and its connection breaks before the answer: it is repeated, and changes
/// nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_commit_whose_answer_is_lost_is_stored_once() {
    let url = postgres_cluster::fresh_database().await;
    let proxy = Proxy::to(&url).await;
    let site = Arc::new(Site::start(&url, [&proxy.url, &proxy.url]).await);
    let (mut told, mut tries) = (Told::default(), 0);
    proxy.lose_answers(4);
    for round in 1..=rounds(2) {
        loop {
            let now = with_lost_answers(&site, &proxy).await;
            let (count, slowest) = (now.refused.len(), now.slowest());
            told.add(now);
            if count == 0 {
                break;
            }
            // A machine that is very busy may need longer than a caller is kept waiting, so there are some tries.
            assert!(slowest >= WAIT, "{count} callers notice, after {slowest:?} at most");
            tries += 1;
            assert!(tries < 10 * round, "callers notice, whenever answers are lost");
        }
    }
    proxy.lose_answers(0);
    site.conclude("lost answers", proxy.lost(), &told).await;
}

/// Runs that are started and driven while answers are lost, five at least; what their callers were told.
async fn with_lost_answers(site: &Arc<Site>, proxy: &Proxy) -> Told {
    let (since, before) = (Instant::now(), proxy.lost());
    let callers = site.call(4);
    let mut told = site.begin(RUNS).await;
    site.ended(&told).await;
    while proxy.lost() < before + 5 {
        assert!(since.elapsed() < PATIENCE, "only {} answers were lost", proxy.lost() - before);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    told.add(callers.told().await);
    told
}

/// All connections of one replica become half-open at once; another one could take its runs over.
#[tokio::test(flavor = "multi_thread")]
async fn connections_that_go_silent_are_given_up_in_time() {
    let url = postgres_cluster::fresh_database().await;
    let proxy = Proxy::to(&url).await;
    let mut site = Site::start(&url, [&proxy.url, &url]).await;
    site.expect_reclaims(); // a claim may be stored whose answer never came
    let site = Arc::new(site);
    let callers = site.call(4);
    let (mut told, mut injections) = (Told::default(), 0);
    let mut slowest = Duration::ZERO;
    for _ in 0..rounds(1) {
        told.add(site.begin(RUNS).await);
        under_way(&site).await;
        let silent = proxy.silence_all();
        assert!(silent >= 4, "only {silent} connections were open");
        injections += silent;
        let since = Instant::now();
        // Each question is answered in time, and before long with what was asked for.
        while let Some(waited) = refused(&site.services[0], "/v1/runs").await {
            slowest = slowest.max(waited);
            assert!(since.elapsed() < Duration::from_secs(45), "{}", site.logs());
        }
        site.ended(&told).await;
    }
    told.add(callers.told().await);
    println!("half-open: the slowest question was refused after {slowest:?}");
    assert!(slowest < UNANSWERED + BUSY, "one operation: {slowest:?}");
    assert!(told.slowest() < UNANSWERED + BUSY, "{:?}", told.slowest());
    site.conclude("half-open", injections, &told).await;
}
