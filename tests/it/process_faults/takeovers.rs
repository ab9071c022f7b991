//! A replica dies while its runs are between two iterations: another one goes on with them, soon.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use super::site::{Site, agent, count, events, id_of, until_completed};
use crate::fault_rounds::rounds;
use crate::mock_model::pseudo_random;
use crate::service::Db;

const RUNS: usize = 8;
const STEPS: usize = 30;
/// Longer than a busy machine keeps a heartbeat back.
const LEASE: Duration = Duration::from_secs(4);
/// A lease to find out, as long again at most to look, and what a busy machine takes.
const PATIENCE: Duration = LEASE.saturating_mul(3).saturating_add(Duration::from_secs(48));

#[tokio::test]
async fn another_replica_goes_on_from_the_last_iteration() {
    let step = "{delay_ms: 100, tool_calls: [{tool: 'http:effects/look', arguments: {hold: never, \
                name: '{{ inputs.name }} {{ step }}'}}]}";
    let steps = format!("steps: [{}{{text: done}}]", format!("{step}, ").repeat(STEPS));
    let mut site =
        Site::start(Db::Postgres, 3, LEASE, |setup, _| agent(setup, "steps", &steps)).await;
    let mut waits = Vec::new();
    for round in 0..rounds(1) {
        waits.extend(one_death(&mut site, round).await);
    }
    waits.sort();
    assert!(waits.len() >= RUNS / 2, "only {} runs were taken over", waits.len());
    let (median, p99) = (waits[waits.len() / 2], waits[waits.len() * 99 / 100]);
    println!("{} runs went on elsewhere after {median:?} (median), {p99:?} (p99)", waits.len());
}

/// Kills the replica that drives some runs; how long each waited for another one.
async fn one_death(site: &mut Site, round: usize) -> Vec<Duration> {
    let (dies, other) = (round % 3, (round + 1) % 3);
    let runs: Vec<(String, String)> = (0..RUNS)
        .map(|number| format!("{round} {number}"))
        .map(|name| (site.call(dies, "steps", &json!({ "name": name })), name))
        .collect();
    for (run, _) in &runs {
        let goes = |run: &Value| run["iterations"].as_u64().is_some_and(|done| done >= 2);
        site.replicas[other].until(run, goes).await;
    }
    // At any moment of an iteration.
    tokio::time::sleep(Duration::from_millis(pseudo_random(round as u64) % 100)).await;
    site.replicas[dies].kill().await;
    let death = Instant::now();
    let mut database = PgConnection::connect(&site.replicas[other].database_url).await.unwrap();
    let mut interrupted = Vec::new();
    for (run, name) in &runs {
        let (owner, done) = state_of(&mut database, run).await;
        if owner != "completed" {
            interrupted.push((run, name, owner, done));
        }
    }
    let mut waits = Vec::new();
    for (run, _, owner, _) in &interrupted {
        loop {
            let (another, _) = state_of(&mut database, run).await;
            if another != "queued" && !another.ends_with(owner) {
                break;
            }
            assert!(death.elapsed() < PATIENCE, "none drives {run}\n{}", site.logs());
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        waits.push(death.elapsed());
    }
    for (run, name, _, done) in &interrupted {
        let service = &site.replicas[other];
        let ended = until_completed(service, run).await;
        assert_eq!(ended["iterations"], json!(STEPS + 1), "{ended:#}");
        assert_eq!(count(&events(service, run).await, "run.resumed"), 1, "one replica died");
        let iterations = service.get(&format!("{run}/iterations?limit=200")).await.body;
        let numbers: Vec<u64> = iterations["data"].as_array().unwrap().iter().map(number).collect();
        assert_eq!(numbers, (1..=STEPS as u64 + 1).collect::<Vec<_>>());
        // What was stored is not done again.
        for step in 1..u64::try_from(*done).unwrap() {
            let requests = site.effects.requests_of(&format!("{name} {step}"));
            assert_eq!(requests.len(), 1, "iteration {step} of {done} of {run}");
        }
    }
    site.replicas[dies].restart().await;
    waits
}

fn number(iteration: &Value) -> u64 {
    iteration["number"].as_u64().unwrap()
}

/// Who drives a run, or what its status is, and how many iterations of it are stored.
async fn state_of(database: &mut PgConnection, run: &str) -> (String, i64) {
    let id: Uuid = id_of(run).parse().unwrap();
    let row = "SELECT coalesce(owner, status), iterations FROM runs WHERE id = $1";
    sqlx::query_as(row).bind(id).fetch_one(database).await.unwrap()
}
