//! Replicas on one database, what befalls them, and their callers meanwhile.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};
use tokio::sync::RwLock;
use tokio::task::JoinHandle;

use super::ledger::Ledger;
use crate::mock_model::pseudo_random;
use crate::service::{ADMIN_KEY, Db, Service, Setup, Signal};
use crate::streaming::Reader;

const CALLERS: usize = 4;
/// How long a run may take, from the request to its end, with all that befalls it.
const PATIENCE: Duration = Duration::from_mins(5);

/// Numbers without a pattern, the same for the same seed.
pub(super) struct Fortune(pub(super) u64);

impl Fortune {
    fn below(&mut self, end: u64) -> u64 {
        self.0 = self.0.wrapping_add(1);
        pseudo_random(self.0) % end
    }
}

pub(super) struct Fleet {
    replicas: Vec<Service>,
    /// Those that will die at a commit of theirs.
    doomed: Vec<bool>,
    db: Db,
    callers: Callers,
    faults: BTreeMap<&'static str, u32>,
}

/// A run whose acceptance was told.
#[derive(Debug)]
pub(super) struct Accepted {
    pub(super) name: String,
    pub(super) run_id: String,
    pub(super) streamed: Option<Vec<u64>>,
    pub(super) was_cancelled: bool,
}

impl Fleet {
    pub(super) async fn start(setup: impl Fn() -> Setup, db: Db, size: usize) -> Self {
        let mut replicas = vec![setup().start(db).await];
        while replicas.len() < size {
            replicas.push(setup().start_on(replicas[0].database_url.clone()).await);
        }
        // A commit whose answer is lost can leave a run that is owned and not driven.
        replicas.iter_mut().for_each(Service::expect_reclaims);
        let addresses = replicas.iter().map(|replica| replica.url("")).collect();
        Self {
            doomed: vec![false; size],
            replicas,
            db,
            callers: Callers {
                http: reqwest::Client::new(),
                addresses: Arc::new(Mutex::new(addresses)),
                turn: Arc::default(),
                suspension: Arc::default(),
            },
            faults: BTreeMap::new(),
        }
    }

    /// Begins to call, to approve and to review.
    pub(super) fn work(&self, ledger: &Arc<Ledger>, workspace: &Path) -> Work {
        let is_over = Arc::<AtomicBool>::default();
        let callers = (0..CALLERS)
            .map(|caller| tokio::spawn(self.callers.clone().call(caller, Arc::clone(&is_over))));
        let reviewer = self.callers.clone().review(Arc::clone(ledger), workspace.join("default"));
        Work { callers: callers.collect(), reviewer: tokio::spawn(reviewer), is_over }
    }

    /// One fault, after a moment without any.
    pub(super) async fn disturb(&mut self, fortune: &mut Fortune) {
        tokio::time::sleep(Duration::from_millis(200 + fortune.below(500))).await;
        for at in 0..self.replicas.len() {
            if self.replicas[at].is_dead() {
                self.restart(at, "never").await;
            }
        }
        let at = usize::try_from(fortune.below(self.replicas.len() as u64)).unwrap();
        let fault = match fortune.below(5) {
            0 => {
                self.replicas[at].kill().await;
                self.restart(at, "never").await;
                "killed"
            }
            1 => {
                let point = ["before_commit", "after_commit"][usize::from(fortune.below(2) == 1)];
                self.replicas[at].kill().await;
                self.restart(at, &format!("{point}:{}", 5 + fortune.below(60))).await;
                "killed, and again at a commit"
            }
            2 => {
                let _suspended = self.callers.suspension.write().await;
                self.replicas[at].signal(Signal::STOP);
                tokio::time::sleep(Duration::from_millis(300 + fortune.below(4000))).await;
                self.replicas[at].signal(Signal::CONT);
                let awake = self.replicas[at].url("/healthz");
                while self.callers.http.get(&awake).send().await.is_err()
                    && !self.replicas[at].is_dead()
                {
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                tokio::time::sleep(Duration::from_millis(500)).await; // what was under way takes effect
                "suspended"
            }
            3 if self.db == Db::Postgres => {
                self.cut_off().await;
                "cut off from the database"
            }
            _ => {
                self.replicas[at].signal(Signal::TERM);
                self.replicas[at].exit_code().await;
                self.restart(at, "never").await;
                "drained"
            }
        };
        *self.faults.entry(fault).or_default() += 1;
    }

    async fn restart(&mut self, at: usize, point: &str) {
        self.replicas[at].restart_to_crash(point).await;
        self.doomed[at] = point != "never";
        self.callers.addresses.lock()[at] = self.replicas[at].url("");
    }

    async fn cut_off(&self) {
        const CUT: &str = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
            WHERE datname = current_database() AND pid <> pg_backend_pid()";
        let mut database = PgConnection::connect(&self.replicas[0].database_url).await.unwrap();
        sqlx::raw_sql(CUT).execute(&mut database).await.unwrap();
    }

    /// From here on nothing befalls them.
    pub(super) async fn recover(&mut self) {
        for at in 0..self.replicas.len() {
            if self.doomed[at] && !self.replicas[at].is_dead() {
                self.replicas[at].kill().await;
            }
            if self.replicas[at].is_dead() {
                self.restart(at, "never").await;
            }
        }
    }

    pub(super) fn any(&self) -> &Service {
        &self.replicas[0]
    }

    pub(super) fn faults(&self) -> &BTreeMap<&'static str, u32> {
        &self.faults
    }

    pub(super) fn logs(&self) -> String {
        self.replicas.iter().map(Service::log).collect::<Vec<_>>().join("\n\n")
    }
}

pub(super) struct Work {
    callers: Vec<JoinHandle<Vec<Accepted>>>,
    reviewer: JoinHandle<()>,
    is_over: Arc<AtomicBool>,
}

impl Work {
    /// Begins no further runs; those that were accepted, when they have ended.
    pub(super) async fn finished(self) -> Vec<Accepted> {
        self.is_over.store(true, Ordering::Relaxed);
        let mut accepted = Vec::new();
        for caller in self.callers {
            accepted.extend(caller.await.unwrap());
        }
        self.reviewer.abort();
        accepted
    }
}

/// Those who call the replicas, as if through a load balancer that knows nothing of their health.
#[derive(Clone)]
struct Callers {
    http: reqwest::Client,
    addresses: Arc<Mutex<Vec<String>>>,
    turn: Arc<AtomicUsize>,
    /// Held while a replica is suspended: who looks then what a call did looks too early.
    suspension: Arc<RwLock<()>>,
}

impl Callers {
    fn request(&self, method: Method, path: &str) -> reqwest::RequestBuilder {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let address = {
            let addresses = self.addresses.lock();
            addresses[turn % addresses.len()].clone()
        };
        self.http.request(method, format!("{address}{path}")).bearer_auth(ADMIN_KEY)
    }

    /// A successful answer; none where there was no answer, or a 503.
    async fn answer(&self, request: reqwest::RequestBuilder) -> Option<Value> {
        let response = request.timeout(Duration::from_secs(8)).send().await.ok()?;
        let status = response.status();
        let body: Value = response.json().await.ok()?;
        let is_expected = status.is_success() || [409, 503].contains(&status.as_u16());
        assert!(is_expected, "{status}: {body:#}");
        status.is_success().then_some(body)
    }

    async fn get(&self, path: &str) -> Option<Value> {
        self.answer(self.request(Method::GET, path)).await
    }

    /// Asks again until there is an answer.
    async fn insist(&self, request: impl Fn() -> reqwest::RequestBuilder) -> Value {
        loop {
            match self.answer(request()).await {
                Some(answer) => return answer,
                None => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn call(self, caller: usize, is_over: Arc<AtomicBool>) -> Vec<Accepted> {
        let mut accepted = Vec::new();
        for number in 0.. {
            if is_over.load(Ordering::Relaxed) {
                break;
            }
            let name = format!("{caller}-{number}");
            let run = tokio::time::timeout(PATIENCE, self.one(&name, number));
            accepted.push(run.await.unwrap_or_else(|_| panic!("{name} has not ended")));
        }
        accepted
    }

    /// Every third run is streamed, every fourth is cancelled.
    async fn one(&self, name: &str, number: usize) -> Accepted {
        let start = || {
            self.request(Method::POST, "/v1/agents/lead/invoke-iterative")
                .header("prefer", "respond-async")
                .header("idempotency-key", name)
                .json(&json!({"inputs": {"name": name}}))
        };
        let run = self.insist(start).await["run_id"].as_str().unwrap().to_owned();
        assert_eq!(self.insist(start).await["run_id"], *run, "one run for one key");
        let path = format!("/v1/runs/{run}");
        let was_cancelled = number % 4 == 3;
        if was_cancelled {
            tokio::time::sleep(Duration::from_millis(number as u64 * 37 % 400)).await;
            self.insist(|| self.request(Method::POST, &format!("{path}/cancel"))).await;
        }
        let streamed = if number.is_multiple_of(3) { Some(self.stream(&path).await) } else { None };
        while !self.get(&path).await.is_some_and(|run| run["finished_at"].is_string()) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        Accepted { name: name.to_owned(), run_id: run, streamed, was_cancelled }
    }

    /// The numbers of a run's events, read from whichever replica is there until the last one.
    async fn stream(&self, path: &str) -> Vec<u64> {
        let mut numbers: Vec<u64> = Vec::new();
        loop {
            let mut request = self
                .request(Method::GET, &format!("{path}/events"))
                .header("accept", "text/event-stream");
            if let Some(last) = numbers.last() {
                request = request.header("last-event-id", *last);
            }
            match request.send().await {
                Ok(response) if response.status() == 204 => return numbers,
                Ok(response) if response.status() == 200 => {
                    let mut reader = Reader::of(response);
                    while let Some(frame) = reader.next().await {
                        numbers.push(u64::try_from(frame.id).unwrap());
                    }
                }
                _ => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    /// Approves what waits, and tells what became of calls whose end was not seen.
    async fn review(self, ledger: Arc<Ledger>, workspace: PathBuf) {
        loop {
            tokio::time::sleep(Duration::from_millis(50)).await;
            let waiting = self.get("/v1/approvals").await.unwrap_or_default();
            for call in waiting["data"].as_array().into_iter().flatten() {
                self.settle(call, "approve", &json!({"reason": "fine"})).await;
            }
            let _none_suspended = self.suspension.read().await;
            let runs = self.get("/v1/runs?status=needs_review").await.unwrap_or_default();
            for run in runs["data"].as_array().into_iter().flatten() {
                for call in run["pending"].as_array().into_iter().flatten() {
                    let name = call["arguments"]["name"].as_str();
                    let has_happened = match (call["tool"].as_str().unwrap(), name) {
                        ("file_ops", _) => {
                            let path = call["arguments"]["path"].as_str().unwrap();
                            let line = call["arguments"]["content"].as_str().unwrap();
                            std::fs::read_to_string(workspace.join(path))
                                .is_ok_and(|text| text.contains(line))
                        }
                        (tool, name) => {
                            let step = tool.rsplit('/').next().unwrap();
                            ledger.effects_of(name.unwrap()).iter().any(|(of, _)| of == step)
                        }
                    };
                    let outcome = if has_happened { "happened" } else { "did_not_happen" };
                    let mut call = call.clone();
                    if call["run_id"].is_null() {
                        call["run_id"] = run["run_id"].clone();
                    }
                    self.settle(&call, "resolve", &json!({ "outcome": outcome })).await;
                }
            }
        }
    }

    async fn settle(&self, call: &Value, how: &str, body: &Value) {
        let (run, id) = (call["run_id"].as_str().unwrap(), call["call_id"].as_str().unwrap());
        let path = format!("/v1/runs/{run}/tool-calls/{id}/{how}");
        self.answer(self.request(Method::POST, &path).json(body)).await;
    }
}
