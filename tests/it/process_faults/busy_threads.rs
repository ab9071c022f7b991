//! All threads of a replica's runtime compute for longer than its lease: it keeps its runs.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::json;

use super::site::{Site, agent, count, events, until_completed};
use crate::fault_rounds::rounds;
use crate::service::{Db, Service};

/// Longer than a busy machine keeps a thread from its processor.
const LEASE: Duration = Duration::from_secs(4);
const RUNS: usize = 8;
const STEPS: usize = 8;

#[tokio::test]
async fn a_replica_without_a_thread_to_spare_keeps_its_lease() {
    let step = "{delay_ms: 100, tool_calls: [{tool: 'http:effects/once', arguments: {hold: never, \
                name: '{{ inputs.name }}', \
                step: '{{ step }}'}}]}";
    let steps = format!("steps: [{}{{text: done}}]", format!("{step}, ").repeat(STEPS));
    let busy = format!("after_commit:{}:{}", 2 * RUNS, (2 * LEASE + LEASE / 2).as_millis());
    let mut site = Site::start(Db::Postgres, 2, LEASE, |setup, at| {
        let setup = agent(setup, "steps", &steps);
        if at == 0 { setup.variable("BUSY_POINT", &busy) } else { setup }
    })
    .await;
    let (mut met, mut shortest) = (0, Duration::MAX);
    for round in 0..rounds(1) {
        let names: Vec<String> = (0..RUNS).map(|number| format!("{round} {number}")).collect();
        let runs: Vec<String> =
            names.iter().map(|name| site.call(0, "steps", &json!({ "name": name }))).collect();
        let (busy, other) = (&site.replicas[0], &site.replicas[1]);
        let since = until_silent(busy).await;
        let mut under_way = Vec::new();
        for (run, name) in runs.iter().zip(&names) {
            let status = other.get(run).await.body["status"].clone();
            if status == "running" {
                under_way.push((run, name));
            }
        }
        assert_eq!(busy.get("/healthz").await.status, 200);
        shortest = shortest.min(since.elapsed());
        for (run, name) in &under_way {
            until_completed(other, run).await;
            let events = events(other, run).await;
            assert_eq!(count(&events, "run.resumed"), 0, "{events:#?}\n{}", site.logs());
            assert_eq!(site.effects.effects_of(name), STEPS, "{name}");
        }
        assert!(!busy.log().contains("declared dead"), "{}", busy.log());
        assert!(!other.log().contains("took the runs"), "{}", other.log());
        met += under_way.len();
        site.replicas[0].kill().await;
        site.replicas[0].restart().await; // to be busy once more
    }
    println!("{met} runs went on after {shortest:?} at least without a thread");
    assert!(met >= RUNS / 2, "only {met} runs were under way");
    assert!(shortest >= 2 * LEASE, "{shortest:?}");
}

/// Waits until a replica answers nothing any more; since when.
async fn until_silent(service: &Service) -> Instant {
    let begun = Instant::now();
    loop {
        assert!(begun.elapsed() < Duration::from_mins(5), "it was never busy");
        let since = Instant::now();
        let probe = service.request(Method::GET, "/healthz").timeout(Duration::from_secs(5));
        match probe.send().await {
            Ok(_) => tokio::time::sleep(Duration::from_millis(2)).await,
            Err(error) if error.is_timeout() => return since,
            Err(error) => panic!("{error}"),
        }
    }
}
