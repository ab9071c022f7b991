//! All processes are killed while calls are under way: before or after their effect, with their end
//! stored or not.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::site::{Site, agent, count, events, id_of, until_completed};
use crate::crashes::{Spent, until_balanced};
use crate::fault_rounds::rounds;
use crate::service::{Db, Service, Setup, Signal, on_both_stores};

on_both_stores! {
    a_call_that_a_death_interrupts_takes_effect_as_often_as_it_may,
}

#[tokio::test]
async fn replicas_that_die_together_lose_no_run() {
    survive(Db::Postgres, 3).await;
}

async fn a_call_that_a_death_interrupts_takes_effect_as_often_as_it_may(db: Db) {
    survive(db, 1).await;
}

/// Runs of each kind, in one round.
const RUNS: usize = 2;
/// Long enough that no run stops for want of a processor.
const LEASE: Duration = Duration::from_secs(3);
/// How long a run may take from the start of the next process to its end.
const PATIENCE: Duration = Duration::from_mins(5);

/// What becomes of a call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Then {
    /// A person is asked, and tells that it took effect, or that it did not.
    Review { took_effect: bool },
    /// It is made again, with its key.
    Again,
    /// Its tool is asked: it is made again where it did not take effect.
    Asked { took_effect: bool },
    /// Its end is stored.
    Kept,
}

/// An agent, its call, and what becomes of that.
type Kind = (&'static str, &'static str, Then);

const KINDS: [Kind; 9] = [
    ("once-before", "{tool: 'http:effects/once', arguments: {hold: before, NAME}}", REVIEW_BEFORE),
    ("once-after", "{tool: 'http:effects/once', arguments: {hold: after, NAME}}", REVIEW_AFTER),
    (
        "asked-before",
        "{tool: 'http:effects/asked', arguments: {hold: before, NAME}}",
        Then::Asked { took_effect: false },
    ),
    (
        "asked-after",
        "{tool: 'http:effects/asked', arguments: {hold: after, NAME}}",
        Then::Asked { took_effect: true },
    ),
    ("again-before", "{tool: 'http:effects/again', arguments: {hold: before, NAME}}", Then::Again),
    ("again-after", "{tool: 'http:effects/again', arguments: {hold: after, NAME}}", Then::Again),
    (
        "kept",
        "{tool: 'http:effects/once', arguments: {hold: never, NAME}}, {tool: 'http:effects/look', arguments: \
         {hold: before, name: 'look {{ inputs.name }}'}}",
        Then::Kept,
    ),
    ("program-before", "{tool: 'script:programs/before', arguments: {}}", REVIEW_BEFORE),
    ("program-after", "{tool: 'script:programs/after', arguments: {}}", REVIEW_AFTER),
];
const REVIEW_BEFORE: Then = Then::Review { took_effect: false };
const REVIEW_AFTER: Then = Then::Review { took_effect: true };

fn agents(setup: Setup) -> Setup {
    KINDS.iter().fold(setup, |setup, (name, calls, _)| {
        let calls = calls.replace("NAME", "name: '{{ inputs.name }}'");
        agent(setup, name, &format!("steps: [{{tool_calls: [{calls}]}}, {{text: done}}]"))
    })
}

/// A run whose call is under way.
struct Interrupted {
    kind: Kind,
    name: String,
    run: String,
}

impl Interrupted {
    fn is_program(&self) -> bool {
        self.kind.0.starts_with("program")
    }

    fn effects(&self, site: &Site) -> usize {
        if self.is_program() {
            return site.effects_of_program(&self.run);
        }
        site.effects.effects_of(&self.name)
    }
}

async fn survive(db: Db, replicas: usize) {
    let mut site = Site::start(db, replicas, LEASE, |setup, _| agents(setup)).await;
    let mut met: BTreeMap<&str, usize> = BTreeMap::new();
    let mut longest = Duration::ZERO;
    for round in 0..rounds(1) {
        let runs = under_way(&site, round).await;
        for replica in &site.replicas {
            replica.signal(Signal::KILL);
        }
        for replica in &mut site.replicas {
            replica.exit_code().await;
            replica.restart().await;
        }
        let since = Instant::now();
        for (at, run) in runs.iter().enumerate() {
            let service = &site.replicas[at % replicas];
            goes_on(&site, service, run).await;
            *met.entry(run.kind.0).or_default() += 1;
            assert!(since.elapsed() < PATIENCE, "{}", run.run);
        }
        longest = longest.max(since.elapsed());
    }
    println!("{db:?}, {replicas}: all went on within {longest:?}, {met:?}");
    assert!(KINDS.iter().all(|(name, ..)| met[name] >= RUNS));
    until_balanced(&site.replicas[0], Spent::AtLeast).await;
}

/// Runs of each kind, whose calls are held.
async fn under_way(site: &Site, round: usize) -> Vec<Interrupted> {
    let earlier = site.effects.held();
    let mut runs = Vec::new();
    for number in 0..RUNS {
        for kind in KINDS {
            let name = format!("{} {round} {number}", kind.0);
            let at = runs.len() % site.replicas.len();
            let run = site.enqueue(at, kind.0, &json!({ "name": name })).await;
            runs.push(Interrupted { kind, name, run });
        }
    }
    let programs = runs.iter().filter(|run| run.is_program()).count();
    site.effects.until_held(earlier + runs.len() - programs).await;
    for run in &runs {
        if run.is_program() {
            site.until_program_is_held(&run.run).await;
        }
        let is_stored = |calls: &Value| {
            let (call, state) = (&calls["data"][0], &calls["data"][0]["state"]);
            let ended = if run.kind.2 == Then::Kept { "succeeded" } else { "dispatched" };
            call["started_at"].is_string() && *state == ended
        };
        site.replicas[0].until(&format!("{}/tool-calls", run.run), is_stored).await;
    }
    runs
}

/// Follows a run after the death, to its end.
async fn goes_on(site: &Site, service: &Service, it: &Interrupted) {
    let Interrupted { kind, name, run } = it;
    if let Then::Review { took_effect } = kind.2 {
        let parked = service.until(run, |run| run["status"] == "needs_review").await;
        let pending = &parked["pending"][0];
        assert_eq!(pending["kind"], "review", "{parked:#}");
        assert_eq!(it.effects(site), usize::from(took_effect), "{name}: before a person looked");
        let outcome = if took_effect { "happened" } else { "did_not_happen" };
        let call = pending["call_id"].as_str().unwrap();
        let resolve = format!("{run}/tool-calls/{call}/resolve");
        let resolved = service.post(&resolve, &json!({ "outcome": outcome })).await;
        assert_eq!(resolved.status, 200, "{resolved:?}");
    }
    let ended = until_completed(service, run).await;
    assert_eq!(ended["run_id"], id_of(run));
    let requests = site.effects.requests_of(name);
    match kind.2 {
        Then::Again => {
            assert_eq!(requests.len(), 2, "{name}: {requests:?}");
            assert!(!requests[0].is_empty() && requests[0] == requests[1], "{name}: {requests:?}");
        }
        Then::Kept => {
            assert_eq!(requests.len(), 1, "{name}: {requests:?}");
            assert_eq!(site.effects.requests_of(&format!("look {name}")).len(), 2, "{name}");
        }
        Then::Asked { took_effect } => {
            assert_eq!(requests.len(), if took_effect { 1 } else { 2 }, "{name}: {requests:?}");
            assert!(requests.iter().all(|key| *key == requests[0]), "{name}: {requests:?}");
            let reviews = count(&events(service, run).await, "approval.requested");
            assert_eq!(reviews, 0, "{name}");
        }
        Then::Review { .. } => {}
    }
    let repeats = usize::from(kind.0 == "again-after");
    assert_eq!(it.effects(site), 1 + repeats, "{name}: {requests:?}");
}
