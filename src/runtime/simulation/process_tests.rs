//! One process of a replica: an executor, the runtime on it, and its line to the database.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use parking_lot::Mutex;
use tokio::sync::{Notify, broadcast};
use tokio::time::Instant;

use super::Fault;
use super::drawn::Drawn;
use super::work::{Ledger, Model, Writing, info};
use crate::agents::Catalogue;
use crate::clock::simulated;
use crate::providers::router::{ProviderEntry, Router};
use crate::runtime::{
    Approver, ChildIds, HeartbeatStore, Runtime, Settings, Sharing, WorkspaceSettings,
};
use crate::store::simulated::{Answer, Fate, Network, SharedDatabase, is_claim};
use crate::store::{RateLimit, RunLimits, Wakeup};
use crate::tools::registry::Registry;

/// Notices of replicas to one another and to the schedule.
#[derive(Default)]
pub(super) struct Notices {
    /// Hints on their way.
    pub(super) hints: Mutex<Vec<Wakeup>>,
    /// Replicas that were declared dead and are not looked at yet.
    pub(super) dead: Mutex<Vec<String>>,
}

/// A line to the database.
pub(super) struct Line {
    notices: Arc<Notices>,
    drawn: Drawn,
    hints: broadcast::Sender<Wakeup>,
    is_heartbeat: bool,
    /// Statements are refused, and answers lost.
    pub(super) is_troubled: AtomicBool,
    /// The next statement is not answered for long.
    pub(super) is_silent: AtomicBool,
    /// Answers to claims are lost.
    pub(super) loses_claims: AtomicBool,
}

impl Line {
    fn new(notices: &Arc<Notices>, drawn: Drawn, is_heartbeat: bool) -> Arc<Self> {
        Arc::new(Self {
            notices: Arc::clone(notices),
            drawn,
            hints: broadcast::Sender::new(64),
            is_heartbeat,
            is_troubled: AtomicBool::default(),
            is_silent: AtomicBool::default(),
            loses_claims: AtomicBool::default(),
        })
    }

    pub(super) fn hear(&self, hint: Wakeup) {
        let _ = self.hints.send(hint); // there may be no listener yet
    }
}

impl Network for Line {
    fn fate(&self, statement: &str) -> Fate {
        let slow = |chance| {
            if self.drawn.percent(chance) { self.drawn.millis(1, 20) } else { Duration::ZERO }
        };
        let (before, after) = (slow(20), slow(10));
        let gives_up = Duration::from_secs(6);
        if self.is_silent.swap(false, Ordering::Relaxed) {
            return Fate { before: gives_up, after, answer: Answer::Refused };
        }
        let is_troubled = self.is_troubled.load(Ordering::Relaxed);
        let loses = (is_troubled && self.drawn.percent(15))
            || (is_claim(statement) && self.loses_claims.load(Ordering::Relaxed));
        if loses {
            return Fate { before, after: self.drawn.millis(10, 500), answer: Answer::Lost };
        }
        let is_refused = is_troubled && self.drawn.percent(10);
        Fate { before, after, answer: if is_refused { Answer::Refused } else { Answer::Given } }
    }

    fn hints(&self) -> broadcast::Receiver<Wakeup> {
        self.hints.subscribe()
    }

    fn hint(&self, wakeup: Wakeup) {
        self.notices.hints.lock().push(wakeup);
    }

    fn declares_dead(&self, replicas: Vec<String>) {
        debug_assert!(!self.is_heartbeat, "that is for the loop");
        self.notices.dead.lock().extend(replicas);
    }
}

/// What all processes of a schedule share.
pub(super) struct Shared<'s> {
    pub(super) database: &'s SharedDatabase,
    pub(super) catalogue: &'s Arc<Catalogue>,
    pub(super) ledger: &'s Arc<Ledger>,
    pub(super) notices: &'s Arc<Notices>,
    pub(super) fault: Option<Fault>,
}

/// A process, until it is dropped with all its tasks.
pub(super) struct Process {
    executor: tokio::runtime::Runtime,
    /// Notified when a run kills it.
    dies: Arc<Notify>,
    pub(super) runtime: Runtime,
    pub(super) line: Arc<Line>,
    pub(super) heartbeat: Arc<Line>,
    /// Whether it serves requests.
    pub(super) is_ready: Arc<AtomicBool>,
    /// When it was started, by the clock of the world and by its own.
    born: (Duration, Instant),
    /// The time up to which it has run.
    at: Duration,
}

impl Process {
    pub(super) fn start(
        shared: &Shared<'_>,
        workspace: &Path,
        lease: Duration,
        at: Duration,
        number: usize,
        drawn: &Drawn,
    ) -> Self {
        let executor = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        let inside = executor.enter();
        let line = Line::new(shared.notices, drawn.fork(), false);
        let heartbeat = Line::new(shared.notices, drawn.fork(), true);
        let fault = match shared.fault {
            Some(Fault::Store(fault)) => Some(fault),
            _ => None,
        };
        let store = shared.database.behind(Arc::<Line>::clone(&line), fault);
        let beating = shared.database.behind(Arc::<Line>::clone(&heartbeat), fault);
        let mut registry = Registry::builtin();
        registry.add(Arc::new(Writing {
            info: info(),
            ledger: Arc::clone(shared.ledger),
            drawn: drawn.fork(),
            process: number,
            looks: shared.fault != Some(Fault::NoLookBeforeAnEffect),
        }));
        let dies = Arc::<Notify>::default();
        let model = Model { drawn: drawn.fork(), dies: Arc::clone(&dies) };
        let model = ProviderEntry::new(Arc::new(model));
        let runtime = Runtime::new(
            store,
            Arc::clone(shared.catalogue),
            Arc::new(Router::new([("scripted".to_owned(), model)].into())),
            Arc::new(registry),
            ChildIds::known(),
            settings(lease, workspace),
            Arc::new(|_| ()),
        );
        let is_ready = Arc::<AtomicBool>::default();
        let (joining, joined) = (runtime.clone(), Arc::clone(&is_ready));
        executor.spawn(async move {
            let open = || -> HeartbeatStore {
                let beating = Arc::clone(&beating);
                Box::new(move || {
                    let beating = Arc::clone(&beating);
                    Box::pin(async move { Ok(beating) })
                })
            };
            while joining.join(open()).await.is_err() {
                tokio::time::sleep(Duration::from_millis(200)).await;
            }
            joined.store(true, Ordering::Relaxed);
        });
        let born = (at, Instant::now());
        drop(inside);
        Self { executor, dies, runtime, line, heartbeat, is_ready, born, at }
    }

    pub(super) fn id(&self) -> &str {
        &self.runtime.inner.replica.id
    }

    pub(super) fn is_ready(&self) -> bool {
        self.is_ready.load(Ordering::Relaxed)
    }

    pub(super) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        self.executor.spawn(task);
    }

    /// Lets it run up to a time, or until a run kills it, which it tells. What it has missed passes at once.
    pub(super) fn run(&mut self, until: Duration, turn: Duration, database: DateTime<Utc>) -> bool {
        let (born, begun) = self.born;
        let missed = until.saturating_sub(turn).saturating_sub(self.at);
        self.at = until;
        // What the database's clock would show when this process was born.
        let ago = TimeDelta::from_std(until.saturating_sub(born)).unwrap();
        simulated::set(Some((database - ago, begun)));
        let is_killed = self.executor.block_on(async {
            if !missed.is_zero() {
                tokio::time::advance(missed).await;
            }
            tokio::select! {
                biased;
                () = self.dies.notified() => true,
                () = tokio::time::sleep_until(begun + until.saturating_sub(born)) => false,
            }
        });
        simulated::set(None);
        is_killed
    }
}

fn settings(lease: Duration, workspace: &Path) -> Settings {
    Settings {
        max_concurrent_runs: 100,
        run_limits: RunLimits::default(),
        max_queued_runs: 1000,
        queue_workers: 100,
        lease,
        store_patience: Duration::from_secs(3),
        max_crashes: 3,
        retention: None,
        audit_retention: None,
        audit_key: None,
        approver: Approver::Any,
        rate_limit: RateLimit { per_minute: 100_000, burst: 100_000 },
        webhooks: None,
        workspaces: WorkspaceSettings {
            root: workspace.to_owned(),
            sharing: Sharing::None,
            quota: Arc::default(),
            quarantine_retention: None,
        },
        sample_ratio: 0.0,
    }
}
