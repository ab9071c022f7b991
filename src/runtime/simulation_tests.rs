//! Several replicas, their network and their database, simulated in one thread: the real code of
//! this room on a clock that does not wait.
//!
//! Each replica has an executor of its own, whose paused clock goes from one of its timers to the
//! next. They run in turns of a few milliseconds, in an order that changes. One that crashes is
//! dropped with all its tasks; one that is suspended gets no turns, and then all the time that it
//! missed at once. When what happens, and what becomes of statements and hints, follows from a seed;
//! in which order a task looks at what is ready at the same time does not.

#[path = "simulation/drawn_tests.rs"]
mod drawn;
#[path = "simulation/plan_tests.rs"]
mod plan;
#[path = "simulation/process_tests.rs"]
mod process;
#[path = "simulation/schedule_tests.rs"]
mod schedule;
#[path = "simulation/work_tests.rs"]
mod work;

use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use self::schedule::Laboratory;
use crate::store::simulated::StoreFault;

/// What this service once got wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    Store(StoreFault),
    /// A heartbeat that is not answered is waited for.
    PatientHeartbeat,
    /// What waited for a thread does not ask whether it still may.
    NoLookBeforeAnEffect,
    /// A run is blamed for each death of a replica that owned it.
    DeathsBlamed,
    /// Runs that may be what crashes their replicas are driven at the same time.
    SuspectsTogether,
    /// A run is ended that this replica has no workspace for.
    WorkspaceBlamedOnRuns,
}

thread_local! {
    static PUT_BACK: Cell<Option<Fault>> = const { Cell::new(None) };
    static IS_RUNNING: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a simulation.
pub(super) fn is_running() -> bool {
    IS_RUNNING.get()
}

/// Whether this fault is put back.
pub(super) fn has(fault: Fault) -> bool {
    PUT_BACK.get() == Some(fault)
}

pub(super) fn patience_of_heartbeats(usual: Duration) -> Duration {
    if has(Fault::PatientHeartbeat) { Duration::from_hours(1) } else { usual }
}

/// Seeds of the ordinary test.
const SEEDS: u64 = 60;
/// Threads that simulate.
const THREADS: u64 = 2;

/// Tries seeds until a schedule violates what must hold, or there are no more; how many were tried,
/// and what was found.
fn search(
    laboratory: &Laboratory,
    seeds: impl Iterator<Item = u64>,
    fault: Option<Fault>,
) -> (u64, Option<String>) {
    let mut tried = 0;
    for seed in seeds {
        tried += 1;
        let violations = laboratory.schedule(seed, fault);
        if !violations.is_empty() {
            return (tried, Some(format!("seed {seed}: {}", violations.join("; "))));
        }
    }
    (tried, None)
}

/// `TOOLLOOP_SIMULATION_SEED` tries one seed and shows its log, `TOOLLOOP_SIMULATION_SECONDS` new ones for so long.
#[test]
fn nothing_is_lost_doubled_or_stuck() {
    let set = |name: &str| std::env::var(name).ok().map(|value| value.parse::<u64>().unwrap());
    if let Some(seed) = set("TOOLLOOP_SIMULATION_SEED") {
        let logs = tracing_subscriber::fmt().with_env_filter("toolloop=debug").finish();
        let _told = tracing::subscriber::set_default(logs);
        let found = search(&Laboratory::make(), std::iter::once(seed), None).1;
        assert_eq!(found, None);
        return;
    }
    let seconds = set("TOOLLOOP_SIMULATION_SECONDS").map(Duration::from_secs);
    let first = seconds.map_or(0, |_| u64::from(getrandom::u32().unwrap()) << 16);
    let begun = Instant::now();
    let tried = AtomicU64::new(0);
    let found = std::thread::scope(|scope| {
        let simulate = |thread: u64| {
            let laboratory = Laboratory::make();
            let seeds = (0..).map(|seed| first + THREADS * seed + thread);
            let seeds = seeds.take_while(|seed| match seconds {
                Some(seconds) => begun.elapsed() < seconds,
                None => *seed < SEEDS,
            });
            let (schedules, found) = search(&laboratory, seeds, None);
            tried.fetch_add(schedules, Ordering::Relaxed);
            found
        };
        let threads = (0..THREADS).map(|thread| scope.spawn(move || simulate(thread)));
        let threads = threads.collect::<Vec<_>>();
        threads.into_iter().filter_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    let tried = tried.into_inner();
    println!("{tried} schedules in {:.1?}, found: {found:#?}", begun.elapsed());
    assert!(found.is_empty(), "{found:#?}");
}

/// Each fault, and the seeds among which it has to be found.
#[test]
fn reintroduced_faults_are_found() {
    // What takes longest is begun first.
    let table = [
        (Fault::Store(StoreFault::RunsUnfenced), 250..600),
        (Fault::Store(StoreFault::NothingReconciled), 0..200),
        (Fault::Store(StoreFault::OneRowSpoilsAll), 0..200),
        (Fault::DeathsBlamed, 0..200),
        (Fault::SuspectsTogether, 0..200),
        (Fault::PatientHeartbeat, 0..200),
        (Fault::Store(StoreFault::ClockBelieved), 0..200),
        (Fault::Store(StoreFault::OwnLeaseForAll), 0..200),
        (Fault::Store(StoreFault::BudgetsUnfenced), 0..200),
        (Fault::NoLookBeforeAnEffect, 0..200),
        (Fault::WorkspaceBlamedOnRuns, 0..200),
        (Fault::Store(StoreFault::NewerClaimed), 0..200),
    ];
    let next = AtomicUsize::new(0);
    let missed = std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(|| missed(&table, &next)));
        threads.map(|thread| thread.join().unwrap()).concat()
    });
    assert!(missed.is_empty(), "{missed:?}");
}

/// Those of these faults that are not found, of those that no other thread has taken.
fn missed(table: &[(Fault, Range<u64>)], next: &AtomicUsize) -> Vec<Fault> {
    let laboratory = Laboratory::make();
    let mut missed = Vec::new();
    while let Some((fault, seeds)) = table.get(next.fetch_add(1, Ordering::Relaxed)) {
        let (fault, begun) = (*fault, Instant::now());
        let (tried, found) = search(&laboratory, seeds.clone(), Some(fault));
        println!("{fault:?}: {tried} schedules, {:.1?}, {found:?}", begun.elapsed());
        if found.is_none() {
            missed.push(fault);
        }
    }
    missed
}
