//! What may befall a PostgreSQL beside a restart: it is killed, it takes no writes, its connections
//! are held, its statements take too long or give way to others, its network loses answers. What was
//! acknowledged ends once, no living replica loses a run, and callers are told to retry.
//!
//! `TOOLLOOP_FAULT_ROUNDS=20 cargo test --test it database_faults -- --nocapture` injects each fault
//! so often, and says what was counted.

mod conflicts;
mod network;
mod site;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sqlx::PgConnection;

use crate::fault_rounds::rounds;
use crate::postgres_cluster::{self, OwnServer};
use site::{LEASE, PATIENCE, Site, Told, counted, execute, refused};

const RUNNING: &str = "SELECT count(*) FROM runs WHERE status = 'running'";
/// How long a caller waits for its refusal where there is no database, or no connection to it: two seconds
/// for a connection, two for a lock, or three for a start and two for its last connection.
const REFUSAL: Duration = Duration::from_secs(5);
/// The same where statements are not answered: three seconds for a start and six for its last statement.
const UNANSWERED: Duration = Duration::from_secs(9);
/// What a busy machine may add to that.
const BUSY: Duration = Duration::from_secs(6);
/// Runs that are under way when a fault begins.
const RUNS: usize = 20;

async fn own_server() -> OwnServer {
    tokio::task::spawn_blocking(OwnServer::start).await.unwrap()
}

/// Lets something be done that blocks.
async fn with_server(server: OwnServer, what: fn(&OwnServer)) -> OwnServer {
    let done = tokio::task::spawn_blocking(move || {
        what(&server);
        server
    });
    done.await.unwrap()
}

/// How many runs are under way, some at least.
async fn under_way(site: &Site) -> usize {
    let half = i64::try_from(RUNS / 2).unwrap();
    usize::try_from(site.until_counted(RUNNING, half).await).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_is_killed_for_longer_than_a_lease_takes_no_run_away() {
    a_database_that_is_away_takes_no_run_away("killed", OwnServer::kill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_restarts_takes_no_run_away() {
    a_database_that_is_away_takes_no_run_away("restarted", OwnServer::stop).await;
}

async fn a_database_that_is_away_takes_no_run_away(fault: &str, end: fn(&OwnServer)) {
    let mut server = own_server().await;
    let url = server.url();
    let mut site = Site::start(&url, [&url, &url]).await;
    site.expect_reclaims(); // a claim may be stored whose answer never came
    let site = Arc::new(site);
    let callers = site.call(4);
    let (mut told, mut injections) = (Told::default(), 0);
    for _ in 0..rounds(1) {
        told.add(site.begin(RUNS).await);
        injections += under_way(&site).await;
        server = with_server(server, end).await;
        let since = Instant::now();
        while since.elapsed() < LEASE * 3 / 2 {
            let waited = refused(&site.services[0], "/v1/runs").await;
            assert!(waited.unwrap() < REFUSAL + BUSY, "{waited:?}");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        server = with_server(server, OwnServer::start_again).await;
        site.ended(&told).await;
    }
    told.add(callers.told().await);
    assert!(told.slowest() < REFUSAL + BUSY, "{:?}", told.slowest());
    site.conclude(fault, injections, &told).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_database_that_takes_no_writes_is_waited_for() {
    let server = own_server().await;
    let url = server.url();
    let site = Arc::new(Site::start(&url, [&url, &url]).await);
    let mut admin = site.database().await;
    execute(&mut admin, "SET default_transaction_read_only = off").await;
    let callers = site.call(4);
    let (mut told, mut injections, mut slowest_return) = (Told::default(), 0, Duration::ZERO);
    for _ in 0..rounds(1) {
        told.add(site.begin(RUNS).await);
        under_way(&site).await;
        let connections = pids(&mut admin).await;
        take_writes(&mut admin, false).await;
        // Until all connections have heard of it: each run has to write within its next step.
        let mut begun = counted(&mut admin, RUNNING).await;
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            let now = counted(&mut admin, RUNNING).await;
            if std::mem::replace(&mut begun, now) == now {
                break;
            }
        }
        // For longer than a start is tried, which is 3 s: each caller is refused at least once.
        tokio::time::sleep(LEASE * 3 / 2).await;
        assert_eq!(counted(&mut admin, RUNNING).await, begun, "no run begins or ends meanwhile");
        injections += usize::try_from(begun).unwrap();
        take_writes(&mut admin, true).await;
        let since = Instant::now();
        site.until_counted("SELECT (NOT EXISTS (SELECT FROM replicas WHERE heartbeat_at < now() - interval '4 s'))::int::bigint", 1).await;
        site.ended(&told).await;
        slowest_return = slowest_return.max(since.elapsed());
        let left = pids(&mut admin).await;
        assert!(connections.iter().any(|pid| !left.contains(pid)), "no connection was given up");
    }
    told.add(callers.told().await);
    assert!(!told.refused.is_empty(), "no caller met the fault");
    assert!(told.slowest() < REFUSAL + BUSY, "{:?}", told.slowest());
    println!("all runs had ended {slowest_return:?} after the database took writes again");
    site.conclude("read-only", injections, &told).await;
}

/// The connections of replicas that have statements of their own.
async fn pids(admin: &mut PgConnection) -> Vec<i32> {
    let pids = "SELECT pid FROM pg_stat_activity WHERE application_name = 'toolloop'";
    sqlx::query_scalar(pids).fetch_all(admin).await.unwrap()
}

/// For all sessions but that of the administrator, open ones included.
async fn take_writes(admin: &mut PgConnection, takes: bool) {
    let read_only = if takes { "off" } else { "on" };
    execute(admin, &format!("ALTER SYSTEM SET default_transaction_read_only = {read_only}")).await;
    execute(admin, "SELECT pg_reload_conf()").await;
}

/// Lists of memories wait for a lock, on all connections that requests have.
#[tokio::test(flavor = "multi_thread")]
async fn slow_statements_on_all_connections_cost_no_lease() {
    let url = postgres_cluster::fresh_database().await;
    let site = Arc::new(Site::start(&url, [&url, &url]).await);
    let mut admin = site.database().await;
    let callers = site.call(4);
    let (mut told, mut refusals) = (Told::default(), Vec::new());
    for _ in 0..rounds(1) {
        told.add(site.begin(RUNS).await);
        under_way(&site).await;
        let completed = "SELECT count(*) FROM runs WHERE status = 'completed'";
        let before = counted(&mut admin, completed).await;
        execute(&mut admin, "BEGIN; LOCK TABLE observations IN ACCESS EXCLUSIVE MODE").await;
        let is_over = Arc::<AtomicBool>::default();
        let lists = (0..30).map(|number| {
            let (site, is_over) = (Arc::clone(&site), Arc::clone(&is_over));
            async move {
                let mut refusals = Vec::new();
                while !is_over.load(Ordering::Relaxed) {
                    refusals.extend(refused(&site.services[number % 2], "/v1/memory").await);
                }
                refusals
            }
        });
        let watched = async {
            let mut oldest = 0.0_f64;
            let mut database = site.database().await;
            let age = "SELECT max(extract(epoch FROM clock_timestamp() - heartbeat_at))::float8 FROM replicas";
            let since = Instant::now();
            while since.elapsed() < LEASE * 3 / 2
                || counted(&mut database, completed).await <= before
            {
                assert!(since.elapsed() < PATIENCE, "no run is driven to its end meanwhile");
                let found: f64 = sqlx::query_scalar(age).fetch_one(&mut database).await.unwrap();
                oldest = oldest.max(found);
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            is_over.store(true, Ordering::Relaxed);
            oldest
        };
        let (lists, oldest) = tokio::join!(futures::future::join_all(lists), watched);
        refusals.extend(lists.into_iter().flatten());
        assert!(oldest < LEASE.as_secs_f64(), "a heartbeat was {oldest} s old");
        execute(&mut admin, "ROLLBACK").await;
        site.ended(&told).await;
    }
    told.add(callers.told().await);
    refusals.sort_unstable();
    let p99 = refusals[refusals.len() * 99 / 100];
    println!("slow: {} lists refused, p99 {p99:?}, {:?} at most", refusals.len(), refusals.last());
    assert!(refusals.len() >= 20, "only {} were refused", refusals.len());
    assert!(p99 < REFUSAL + BUSY, "{p99:?}");
    assert!(told.slowest() < REFUSAL + BUSY, "new runs: {:?}", told.slowest());
    site.conclude("slow statements", refusals.len(), &told).await;
}

/// Events of three runs or more are written, and then the statement takes longer than it may.
const SLOW_COMMITS: &str = "
CREATE TABLE slow (yes int);
CREATE SEQUENCE timed_out;
CREATE FUNCTION be_slow() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM slow) AND (SELECT count(DISTINCT run_id) FROM written) >= 3 THEN
        PERFORM nextval('timed_out') FROM (SELECT DISTINCT run_id FROM written) runs;
        PERFORM pg_sleep(20);
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER slow_commits AFTER INSERT ON run_events REFERENCING NEW TABLE AS written
    FOR EACH STATEMENT EXECUTE FUNCTION be_slow();
";

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_takes_too_long_is_made_again_and_leaves_no_half() {
    let url = postgres_cluster::fresh_database().await;
    let site = Arc::new(Site::start(&url, [&url, &url]).await);
    let mut admin = site.database().await;
    execute(&mut admin, SLOW_COMMITS).await;
    let callers = site.call(4);
    let mut told = Told::default();
    let timed_out = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM timed_out";
    for _ in 0..rounds(1) {
        told.add(site.begin(RUNS).await);
        under_way(&site).await;
        let least = counted(&mut admin, timed_out).await + i64::try_from(RUNS / 4).unwrap();
        execute(&mut admin, "INSERT INTO slow VALUES (1)").await;
        let since = Instant::now();
        while counted(&mut admin, timed_out).await < least {
            assert!(since.elapsed() < PATIENCE, "too few commits are slow: {}", site.logs());
            // What comes while commits wait is in one batch after that.
            execute(&mut admin, "BEGIN; LOCK TABLE run_events IN EXCLUSIVE MODE").await;
            tokio::time::sleep(Duration::from_millis(400)).await;
            execute(&mut admin, "COMMIT").await;
            tokio::time::sleep(Duration::from_secs(1)).await; // until they have begun
        }
        execute(&mut admin, "DELETE FROM slow").await;
        site.ended(&told).await;
    }
    told.add(callers.told().await);
    let injections = usize::try_from(counted(&mut admin, timed_out).await).unwrap();
    assert!(told.slowest() < UNANSWERED + BUSY, "{:?}", told.slowest());
    assert!(site.logs().contains("writes wait for the store"), "{}", site.logs());
    site.conclude("statement timeout", injections, &told).await;
}
