//! A replica is suspended for twice its lease: another one takes its runs over, and when it wakes up
//! nothing of what it still has in hand counts.

use serde_json::json;
use sqlx::{Connection, PgConnection};
use tokio::time::Instant;

use super::site::{LEASE, Site, agent, counted, id_of, until_completed};
use crate::crashes::{Spent, until_balanced};
use crate::fault_rounds::rounds;
use crate::service::{Db, Service, Setup, Signal};
use crate::shell_stories::until_alive;

/// Runs of each kind, in one round.
const RUNS: usize = 3;
/// Writes that a replica made after another one owned the run.
const STALE: &str = "SELECT count(*) FROM run_events late JOIN run_events earlier USING (run_id) \
    WHERE late.seq > earlier.seq AND late.epoch < earlier.epoch";
/// What a replica says of a run that it may not go on with.
const REFUSED: &str = "run stopped: another replica owns it";
const STOPPED: &str = "run stopped on this replica";

/// What is under way when the replica is suspended. The ends of what is held are not stored yet.
const KINDS: [(&str, &str); 4] = [
    ("once", "tool_calls: [{tool: 'http:effects/once', arguments: {hold: after, NAME}}]"),
    ("again", "tool_calls: [{tool: 'http:effects/again', arguments: {hold: after, NAME}}]"),
    ("program", "tool_calls: [{tool: 'script:programs/after', arguments: {}}]"),
    // The answer comes while it is suspended, and the call after that.
    (
        "answer",
        "delay_ms: 3000, tool_calls: [{tool: 'http:effects/once', arguments: {hold: never, NAME}}]",
    ),
];

fn agents(setup: Setup) -> Setup {
    KINDS.iter().fold(setup, |setup, (name, step)| {
        let step = step.replace("NAME", "name: '{{ inputs.name }}'");
        agent(setup, name, &format!("steps: [{{{step}}}, {{text: done}}]"))
    })
}

struct Suspended {
    kind: &'static str,
    name: String,
    run: String,
}

#[tokio::test]
async fn a_replica_that_was_suspended_beyond_its_lease_changes_nothing() {
    let site = Site::start(Db::Postgres, 2, LEASE, |setup, _| agents(setup)).await;
    let (mut met, mut refused) = (0, 0);
    for round in 0..rounds(1) {
        let (sleeper, other) = (&site.replicas[0], &site.replicas[1]);
        let (runs, journals) = under_way(&site, round).await;
        let refused_before = said(sleeper, &[REFUSED]);
        let stopped = said(sleeper, &[REFUSED, STOPPED]);
        sleeper.signal(Signal::STOP);
        let since = Instant::now();
        // What it has sent to be stored is given up by the database.
        tokio::time::sleep_until(since + LEASE + LEASE / 4).await;
        journals.close().await.unwrap();
        for it in &runs {
            let events = format!("{}/events", it.run);
            other.until(&events, |events| events.to_string().contains("run.resumed")).await;
        }
        tokio::time::sleep_until(since + 2 * LEASE).await;
        // Its heartbeat is answered late, so that it tries to store before it knows.
        let heartbeats = "BEGIN; LOCK TABLE replicas IN EXCLUSIVE MODE";
        let heartbeats = locked(&sleeper.database_url, heartbeats).await;
        sleeper.signal(Signal::CONT);
        until_said(sleeper, &[REFUSED], refused_before + RUNS).await;
        heartbeats.close().await.unwrap();
        until_said(sleeper, &[REFUSED, STOPPED], stopped + runs.len()).await;
        for it in runs.iter().filter(|it| it.kind == "program") {
            until_alive(id_of(&it.run), false).await;
        }
        refused += said(sleeper, &[REFUSED]) - refused_before;
        for it in &runs {
            ends_once(&site, other, it).await;
        }
        site.effects.hold(true);
        met += runs.len();
    }
    let stale = counted(&site.replicas[0].database_url, STALE).await;
    println!("{met} runs were suspended, {refused} late writes were refused, {stale} accepted");
    assert!(met >= RUNS * KINDS.len());
    assert_eq!(stale, 0);
    assert!(refused >= RUNS, "only {refused} late writes");
    until_balanced(&site.replicas[1], Spent::AtLeast).await;
}

/// How often a replica has said one of these.
fn said(service: &Service, lines: &[&str]) -> usize {
    let log = service.log();
    lines.iter().map(|line| log.matches(line).count()).sum()
}

async fn until_said(service: &Service, lines: &[&str], times: usize) {
    let since = Instant::now();
    while said(service, lines) < times {
        let said = said(service, lines);
        assert!(since.elapsed() < 30 * LEASE, "{said} of {times}\n{}", service.log());
        tokio::time::sleep(LEASE / 200).await;
    }
}

/// A connection that holds the locks of these statements.
async fn locked(database_url: &str, statements: &'static str) -> PgConnection {
    let mut database = PgConnection::connect(database_url).await.unwrap();
    sqlx::raw_sql(statements).execute(&mut database).await.unwrap();
    database
}

/// Runs of each kind, which the first replica drives; and the lock because of which it stores nothing
/// more of them.
async fn under_way(site: &Site, round: usize) -> (Vec<Suspended>, PgConnection) {
    let sleeper = &site.replicas[0];
    sleeper.until("/readyz", |ready| ready["status"] == "ready").await;
    let earlier = site.effects.held();
    let mut runs = Vec::new();
    for (kind, _) in KINDS {
        for number in 0..RUNS {
            let name = format!("{kind} {round} {number}");
            let run = site.call(0, kind, &json!({ "name": name }));
            let started = if kind == "answer" { "iteration.started" } else { "tool_call.started" };
            runs.push(Suspended { kind, name, run });
            let events = format!("{}/events", runs[runs.len() - 1].run);
            sleeper.until(&events, |events| events.to_string().contains(started)).await;
        }
        for it in runs.iter().filter(|it| kind == "program" && it.kind == kind) {
            site.until_program_is_held(&it.run).await;
            until_alive(id_of(&it.run), true).await;
        }
    }
    site.effects.until_held(earlier + 2 * RUNS).await;
    let lock = "BEGIN; LOCK TABLE run_events IN EXCLUSIVE MODE";
    let journals = locked(&sleeper.database_url, lock).await;
    site.effects.hold(false);
    let waiting = "SELECT count(*) FROM pg_stat_activity \
        WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let since = Instant::now();
    while counted(&sleeper.database_url, waiting).await == 0 {
        assert!(since.elapsed() < 30 * LEASE, "nothing is to be stored");
    }
    (runs, journals)
}

async fn ends_once(site: &Site, service: &Service, it: &Suspended) {
    let Suspended { kind, name, run } = it;
    if ["once", "program"].contains(kind) {
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        let call = parked["pending"][0]["call_id"].as_str().unwrap();
        let resolve = format!("{run}/tool-calls/{call}/resolve");
        let resolved = service.post(&resolve, &json!({"outcome": "happened"})).await;
        assert_eq!(resolved.status, 200, "{resolved:?}");
    }
    until_completed(service, run).await;
    let (requests, effects) = (site.effects.requests_of(name), site.effects.effects_of(name));
    match *kind {
        "program" => assert_eq!(site.effects_of_program(run), 1, "{name}"),
        "again" => assert!(requests.len() == 2 && requests[0] == requests[1], "{requests:?}"),
        _ => assert_eq!((requests.len(), effects), (1, 1), "{name}: {requests:?}"),
    }
}
