//! A hostile tenant beside an ordinary one: requests, definitions, answers of a model and arguments
//! of tools that a generator makes of hostile pieces. The process stays, answers its probes, never
//! says 5xx for what it was sent, and has its memory back afterwards.
//!
//! CI runs a round of half a minute. The long form measures what the ordinary tenant notices; it is
//! for a release build:
//!
//! `TOOLLOOP_SIEGE_SECONDS=3600 cargo test --release --test it siege -- --ignored --nocapture`
//!
//! `TOOLLOOP_SIEGE_SEED=7` repeats a round.

mod pieces;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::runtime::{Builder, Runtime};
use tokio::task::JoinHandle;
use uuid::Uuid;

use self::pieces::{HELD, Pieces};
use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup};

/// An attack, cut, the status of its answer, and how long it took.
type Told = (String, u16, Duration);

/// What an attack may take of memory at most, in a debug build.
const MAX_MEMORY_MIB: u64 = 512;
/// The longest that a probe may wait. What is not optimised takes several times as long.
const MAX_PROBE: Duration = Duration::from_secs(if cfg!(debug_assertions) { 20 } else { 1 });
/// Attacks that are made at least, and how much longer that may take.
const LEAST_ATTACKS: usize = 100;
const LONGER: Duration = Duration::from_mins(5);

const VICTIM: &str = "
model: mock/m
instructions: Help.
tools: [file_ops]
enable_double_confirmation: false
inputs: {type: object, properties: {tree: {$ref: '#/$defs/node'}}, $defs: {node: {oneOf: [
  {type: object, required: [items], properties: {items: {type: array, items: {$ref: '#/$defs/node'}}}},
  {type: object, required: [items], properties: {items: {type: array, items: {$ref: '#/$defs/node'}}, x: true}},
  {type: string}]}}}
governance: {autonomy: full, paths: {write: ['./**']}}
limits: {error_threshold: 100, max_iterations: 8}
";
const CLERK: &str = "
model: scripted/clerk
instructions: Read.
tools: [file_ops]
enable_double_confirmation: false
";
const READS: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: note.txt}}]
  - text: read
";

struct Siege {
    service: Service,
    _mock: MockModel,
    /// Attackers and their model have a thread of their own: those who measure do not wait for them.
    apart: Apart,
    hostile: String,
    ordinary: String,
}

struct Apart(Option<Runtime>);

impl Apart {
    fn new() -> Self {
        Self(Builder::new_multi_thread().worker_threads(1).enable_all().build().ok())
    }

    fn spawn<T: Send + 'static>(
        &self,
        task: impl Future<Output = T> + Send + 'static,
    ) -> JoinHandle<T> {
        self.0.as_ref().unwrap().spawn(task)
    }

    /// Gives its only thread the lowest priority: attackers and models run on other machines, so what
    /// it takes to make up an attack must not slow down the service and those who measure it.
    async fn lower_priority(&self) {
        let lowered = self.spawn(async { rustix::process::setpriority_process(None, 19) });
        lowered.await.unwrap().unwrap();
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        self.0.take().unwrap().shutdown_background();
    }
}

impl Siege {
    async fn start(db: Db, seed: u64) -> Self {
        let apart = Apart::new();
        let mock = apart.spawn(MockModel::start()).await.unwrap();
        let answers = AtomicU64::new(0);
        mock.reply_by(move |request| {
            let number = answers.fetch_add(1, Ordering::Relaxed);
            answer(&mut Pieces::new(seed ^ (number << 20)), request)
        });
        let models = format!(
            "[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 0\n\
             [server]\nexpose = [\"metrics\"]\n",
            mock.base_url()
        );
        let service = Setup::new()
            .config(&models)
            .agent("victim", VICTIM)
            .agent("clerk", CLERK)
            .scenario("clerk", READS)
            .start(db)
            .await;
        for tenant in ["hostile", "ordinary"] {
            let dir = service.dir.path().join("workspace").join(tenant);
            std::fs::create_dir_all(&dir).unwrap();
            std::fs::write(dir.join("note.txt"), "hello").unwrap();
        }
        let hostile = key(&service, "hostile").await;
        let ordinary = key(&service, "ordinary").await;
        let url = service.url("/v1/agents/victim/invoke-iterative");
        let held = service.http.post(url).bearer_auth(&hostile);
        let held = held.json(&json!({"run_id": HELD, "inputs": {"tree": "x"}})).send().await;
        assert!(held.unwrap().status().is_success());
        Self { service, _mock: mock, apart, hostile, ordinary }
    }

    /// Attacks on so many connections, for longer where few are answered; what became of them, by status.
    async fn attack(&self, seed: u64, connections: u64, time: Duration) -> Vec<Told> {
        let until = Instant::now() + time;
        let answered = Arc::<AtomicUsize>::default();
        let http = reqwest::Client::new();
        let attackers: Vec<_> = (0..connections)
            .map(|number| {
                let (http, base) = (http.clone(), self.service.url(""));
                let (key, answered) = (self.hostile.clone(), Arc::clone(&answered));
                self.apart.spawn(async move {
                    let goes_on = || {
                        let now = Instant::now();
                        let are_few = answered.load(Ordering::Relaxed) < LEAST_ATTACKS;
                        now < until || are_few && now < until + LONGER
                    };
                    let mut pieces = Pieces::new(seed.wrapping_add(number));
                    let mut told = Vec::new();
                    while goes_on() {
                        let attack = pieces.attack();
                        let url = format!("{base}{}", attack.path);
                        let request = http.request(attack.method.clone(), url).bearer_auth(&key);
                        let request = match (&attack.body, attack.is_text) {
                            (Some(Value::String(text)), true) => request.body(text.clone()),
                            (Some(body), _) => request.json(body),
                            (None, _) => request,
                        };
                        let (patience, begun) = (Duration::from_secs(30), Instant::now());
                        if let Ok(Ok(response)) =
                            tokio::time::timeout(patience, request.send()).await
                        {
                            let status = response.status().as_u16();
                            let _ = tokio::time::timeout(patience, response.bytes()).await;
                            told.push((attack.to_string(), status, begun.elapsed()));
                            answered.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                    told
                })
            })
            .collect();
        let mut told = Vec::new();
        for attacker in attackers {
            told.extend(attacker.await.unwrap());
        }
        told
    }

    /// Asks for the process's health all the time, until told to stop: the longest wait, less what
    /// this process itself was late, and how late that was at most.
    fn probe(&self, stop: &Arc<AtomicBool>) -> JoinHandle<(Duration, Duration)> {
        let (http, url) = (self.service.http.clone(), self.service.url("/healthz"));
        let stop = Arc::clone(stop);
        tokio::spawn(async move {
            let (mut longest, mut latest) = (Duration::ZERO, Duration::ZERO);
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                tokio::time::sleep(Duration::from_millis(25)).await;
                let late = begun.elapsed().saturating_sub(Duration::from_millis(25));
                let begun = Instant::now();
                let answered = http.get(&url).send().await;
                assert_eq!(answered.unwrap().status(), 200);
                longest = longest.max(begun.elapsed().saturating_sub(late));
                latest = latest.max(late);
            }
            (longest, latest)
        })
    }

    /// Runs of the ordinary tenant, by so many callers: how long each took, and how many failed.
    async fn work(&self, callers: usize, time: Duration) -> (Vec<Duration>, usize) {
        let until = Instant::now() + time;
        let callers: Vec<_> = (0..callers)
            .map(|_| {
                let http = self.service.http.clone();
                let url = self.service.url("/v1/agents/clerk/invoke-iterative");
                let key = self.ordinary.clone();
                tokio::spawn(async move {
                    let (mut took, mut failed) = (Vec::new(), 0);
                    while Instant::now() < until {
                        let begun = Instant::now();
                        let sent = http.post(&url).bearer_auth(&key).json(&json!({})).send().await;
                        let run = sent.unwrap().json::<Value>().await.unwrap();
                        failed += usize::from(run["status"] != "completed");
                        took.push(begun.elapsed());
                        tokio::time::sleep(Duration::from_millis(50)).await;
                    }
                    (took, failed)
                })
            })
            .collect();
        let (mut took, mut failed) = (Vec::new(), 0);
        for caller in callers {
            let (its, failures) = caller.await.unwrap();
            took.extend(its);
            failed += failures;
        }
        took.sort_unstable();
        (took, failed)
    }

    /// What the process has of memory now, in MiB, when it has had time to give back.
    async fn settled_memory(&self, at_most: u64) -> u64 {
        let mut memory = self.service.memory_mib();
        for _ in 0..480 {
            if memory <= at_most {
                break;
            }
            tokio::time::sleep(Duration::from_millis(250)).await;
            memory = self.service.memory_mib();
        }
        memory
    }
}

async fn key(service: &Service, tenant: &str) -> String {
    let scopes = [
        "agents:read",
        "agents:invoke",
        "runs:read",
        "runs:cancel",
        "runs:approve",
        "sessions:read",
        "sessions:write",
        "files:read",
        "files:write",
        "memory:read",
        "tools:read",
        "tools:execute",
        "audit:read",
        "keys:admin",
    ];
    let body = json!({"name": tenant, "tenant": tenant, "scopes": scopes});
    service.post("/v1/keys", &body).await.body["key"].as_str().unwrap().to_owned()
}

/// What a hostile model answers.
fn answer(pieces: &mut Pieces, request: &Value) -> Reply {
    let tool = |pieces: &mut Pieces| match request["tools"].as_array() {
        Some(tools) if !tools.is_empty() => {
            let tool = &tools[pieces.below(tools.len())];
            tool["function"]["name"].as_str().unwrap_or("file_ops").to_owned()
        }
        _ => "file_ops".to_owned(),
    };
    match pieces.below(8) {
        0 => Reply::Text(pieces.text()),
        1 => Reply::Raw(pieces.document().to_string()),
        2 => Reply::Raw(pieces.text()),
        3 => {
            let message = json!({"role": "assistant", "content": pieces.value(2)});
            let choice = json!({"message": message, "finish_reason": pieces.value(0)});
            Reply::Raw(json!({"choices": [choice], "usage": pieces.value(2)}).to_string())
        }
        4 => Reply::ToolCalls(vec![(tool(pieces), pieces.text())]),
        _ => {
            let calls = 1 + pieces.below(3);
            let call = |pieces: &mut Pieces| (tool(pieces), pieces.arguments().to_string());
            Reply::ToolCalls((0..calls).map(|_| call(pieces)).collect())
        }
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().unwrap())
}

/// Statuses that say that the service failed. It may be busy.
fn failures(told: &[Told]) -> Vec<String> {
    let failed = told.iter().filter(|(_, status, _)| *status >= 500 && *status != 503);
    failed.map(|(attack, status, _)| format!("{status}: {attack}")).collect()
}

/// The attacks that took longest.
fn slowest(told: &[Told]) -> String {
    let mut told: Vec<_> = told.iter().collect();
    told.sort_by_key(|(_, _, took)| std::cmp::Reverse(*took));
    let lines =
        told.iter().take(12).map(|(attack, status, took)| format!("{took:?} {status} {attack}\n"));
    lines.collect()
}

async fn a_hostile_tenant_takes_nothing(db: Db) {
    let seed = number("TOOLLOOP_SIEGE_SEED").unwrap_or(1);
    let siege = Siege::start(db, seed).await;
    // What is made once and kept: compiled patterns, pools, caches.
    siege.attack(seed ^ 1, 4, Duration::from_secs(12)).await;
    tokio::time::sleep(Duration::from_secs(5)).await;
    let before = siege.service.memory_mib();
    let stop = Arc::new(AtomicBool::new(false));
    let probe = siege.probe(&stop);
    let time = Duration::from_secs(15);
    let (told, (took, failed)) = tokio::join!(siege.attack(seed, 4, time), siege.work(2, time));
    stop.store(true, Ordering::Relaxed);
    let (longest, latest) = probe.await.unwrap();
    assert_eq!(failures(&told), Vec::<String>::new(), "seed {seed}");
    assert_eq!(failed, 0, "seed {seed}: of {} runs of the other tenant", took.len());
    let log = siege.service.log();
    assert!(!log.contains("panicked"), "seed {seed}: {log}");
    let peak = siege.service.peak_memory_mib();
    let allowed = if cfg!(debug_assertions) { before * 2 } else { before * 6 / 5 };
    let after = siege.settled_memory(allowed).await;
    println!("{}", slowest(&told));
    println!(
        "{db:?}: {} attacks, probe {longest:?}, memory {before}, {peak}, {after} MiB",
        told.len()
    );
    assert!(told.len() > 50, "{} attacks", told.len());
    // A machine that lets this process wait lets the other one wait, too, and more than once a request.
    let most = MAX_PROBE + 5 * latest;
    assert!(longest < most, "seed {seed}: a probe waited {longest:?}, this process {latest:?}");
    assert!(peak < MAX_MEMORY_MIB, "seed {seed}: {peak} MiB");
    assert!(after <= allowed, "seed {seed}: {before} MiB became {after}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_tenant_takes_nothing_on_sqlite() {
    a_hostile_tenant_takes_nothing(Db::Sqlite).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_tenant_takes_nothing_on_postgres() {
    a_hostile_tenant_takes_nothing(Db::Postgres).await;
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "an hour; measures, so it is for a release build on a quiet machine"]
async fn an_ordinary_tenant_notices_little() {
    let seconds = number("TOOLLOOP_SIEGE_SECONDS").unwrap_or(3600);
    let seed = number("TOOLLOOP_SIEGE_SEED").unwrap_or_else(|| Uuid::new_v4().as_u64_pair().0);
    let siege = Siege::start(Db::Sqlite, seed).await;
    siege.apart.lower_priority().await;
    let (quiet, failed) = siege.work(16, Duration::from_secs((seconds / 10).max(10))).await;
    assert_eq!(failed, 0);
    let stop = Arc::new(AtomicBool::new(false));
    let probe = siege.probe(&stop);
    let time = Duration::from_secs(seconds);
    let ((took, failed), told) = tokio::join!(siege.work(16, time), siege.attack(seed, 8, time));
    stop.store(true, Ordering::Relaxed);
    let (longest, _) = probe.await.unwrap();
    let p99 = |took: &[Duration]| took[took.len() * 99 / 100];
    let (quiet, besieged, peak) = (p99(&quiet), p99(&took), siege.service.peak_memory_mib());
    println!(
        "seed {seed}: {} attacks, {} runs; p99 {quiet:?} alone, {besieged:?} beside; \
         probe {longest:?}; {peak} MiB at most",
        told.len(),
        took.len()
    );
    assert_eq!(failures(&told), Vec::<String>::new());
    assert_eq!(failed, 0, "runs of the ordinary tenant failed");
    assert!(longest < MAX_PROBE, "a probe waited {longest:?}");
    assert!(peak < 256, "{peak} MiB");
    assert!(besieged <= quiet * 2, "p99 went from {quiet:?} to {besieged:?}");
}
