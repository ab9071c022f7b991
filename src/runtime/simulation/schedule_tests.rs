//! One schedule from its seed to what it violated.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use chrono::{DateTime, TimeDelta, Utc};
use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use uuid::Uuid;

use super::drawn::Drawn;
use super::plan::{Happening, Plan, QUIET, REPLICAS};
use super::process::{Notices, Process, Shared};
use super::work::{AGENTS, Ledger, POISON};
use super::{Fault, IS_RUNNING, PUT_BACK};
use crate::agents::Catalogue;
use crate::run::{Caller, Overrides, RunKind};
use crate::runtime::{Accepted, CallRef, Mode, ReviewFinding, StartRequest};
use crate::store::QueuePlace;
use crate::store::simulated::{KeptRun, SharedDatabase};

/// A schedule that has not ended by then is stuck.
const END: Duration = Duration::from_mins(1);
/// How often what is in doubt is found out, and whether all have ended.
const POLL_INTERVAL: Duration = Duration::from_millis(700);

/// What schedules need, one after the other.
pub(super) struct Laboratory {
    dir: TempDir,
    database: SharedDatabase,
    catalogue: Arc<Catalogue>,
    ledger: Arc<Ledger>,
}

/// A replica: which process it is at the moment, if any.
struct Replica {
    process: Option<Process>,
    lease: Duration,
    workspace: PathBuf,
    /// Until when its workspace is not there.
    without_workspace: Duration,
    /// When it is started, or goes on.
    absent_until: Duration,
    /// Up to when it may be taken for dead.
    excused_until: Duration,
}

/// What was acknowledged.
#[derive(Default)]
struct Acknowledged {
    runs: Vec<Uuid>,
    /// To be made unreadable, or one of a newer version.
    to_be_unreadable: Vec<Uuid>,
    to_be_newer: Vec<Uuid>,
    unreadable: Vec<Uuid>,
    newer: Vec<Uuid>,
}

struct Schedule<'l> {
    shared: Shared<'l>,
    drawn: Drawn,
    replicas: Vec<Replica>,
    now: Duration,
    /// How far the database's clock has been put forward.
    ahead: Duration,
    processes: usize,
    /// When the trouble of a replica's line is over, and whether it is of claims only.
    troubles: BTreeMap<usize, (Duration, bool)>,
    acknowledged: Arc<Mutex<Acknowledged>>,
    violations: Vec<String>,
}

impl Laboratory {
    pub(super) fn make() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let agents = dir.path().join("agents");
        std::fs::create_dir_all(&agents).unwrap();
        for (name, tools) in AGENTS {
            let text = format!(
                "name: {name}\nmodel: scripted/{name}\n{tools}\nworkspace: all\n\
                 enable_double_confirmation: false\ngovernance: {{autonomy: full}}\n"
            );
            std::fs::write(agents.join(format!("{name}.yaml")), text).unwrap();
        }
        let catalogue = Catalogue::load(&agents, Arc::default(), Box::new(|_| Ok(())));
        assert!(catalogue.agent("lead").is_some(), "{:?}", catalogue.problems());
        let database = SharedDatabase::make(dir.path());
        Self { dir, database, catalogue: Arc::new(catalogue), ledger: Arc::default() }
    }

    /// What a schedule violates of what must hold.
    pub(super) fn schedule(&self, seed: u64, fault: Option<Fault>) -> Vec<String> {
        IS_RUNNING.set(true);
        PUT_BACK.set(fault);
        self.database.empty();
        self.ledger.clear();
        let notices = Arc::<Notices>::default();
        let drawn = Drawn::from(seed.wrapping_mul(0x1234_5678_9ABC_DEF1));
        let plan = Plan::of(&drawn.fork());
        let replica = |(number, lease): (usize, Duration)| Replica {
            process: None,
            lease,
            workspace: self.dir.path().join(format!("workspace-{number}")),
            without_workspace: Duration::ZERO,
            absent_until: Duration::ZERO,
            excused_until: Duration::ZERO,
        };
        let schedule = Schedule {
            shared: Shared {
                database: &self.database,
                catalogue: &self.catalogue,
                ledger: &self.ledger,
                notices: &notices,
                fault,
            },
            drawn,
            replicas: plan.leases.into_iter().enumerate().map(replica).collect(),
            now: Duration::ZERO,
            ahead: Duration::ZERO,
            processes: 0,
            troubles: BTreeMap::new(),
            acknowledged: Arc::default(),
            violations: Vec::new(),
        };
        let mut violations = schedule.run(&plan);
        IS_RUNNING.set(false);
        PUT_BACK.set(None);
        if !violations.is_empty() {
            violations.push(format!("{plan:?}"));
        }
        violations
    }
}

impl Replica {
    /// The directory goes away; what is in its place is none.
    fn lose_workspace(&self) {
        if self.workspace.is_dir() {
            std::fs::rename(&self.workspace, self.workspace.with_extension("away")).unwrap();
        }
        std::fs::write(&self.workspace, "").unwrap();
    }

    fn find_workspace(&mut self) {
        self.without_workspace = Duration::ZERO;
        if self.workspace.is_file() {
            std::fs::remove_file(&self.workspace).unwrap();
            let _ = std::fs::rename(self.workspace.with_extension("away"), &self.workspace); // there may be none yet
        }
    }
}

impl Schedule<'_> {
    fn run(mut self, plan: &Plan) -> Vec<String> {
        let mut happenings = plan.happenings.iter().peekable();
        let (mut looked, mut is_quiet) = (Duration::ZERO, false);
        while self.now < END && self.violations.is_empty() {
            self.turn();
            while let Some((_, happening)) = happenings.next_if(|(at, _)| *at <= self.now) {
                self.happen(*happening);
            }
            if !is_quiet && self.now >= QUIET {
                is_quiet = true;
                self.replicas.iter_mut().for_each(|replica| replica.absent_until = Duration::ZERO);
                self.troubles.clear();
                self.replicas.iter_mut().for_each(Replica::find_workspace);
            }
            if self.now >= looked + POLL_INTERVAL {
                looked = self.now;
                self.review();
                if is_quiet && self.has_ended() {
                    break;
                }
            }
        }
        self.judge();
        let Self { replicas, violations, .. } = self;
        drop(replicas);
        violations
    }

    /// Lets every replica run for a moment, in some order.
    fn turn(&mut self) {
        let turn = self.drawn.millis(5, 60);
        self.now += turn;
        let hints = std::mem::take(&mut *self.shared.notices.hints.lock());
        let first = self.drawn.index(REPLICAS);
        for place in 0..REPLICAS {
            let index = (first + place) % REPLICAS;
            let trouble = self.troubles.get(&index).filter(|(until, _)| self.now < *until);
            let trouble = trouble.map(|(_, of_claims)| *of_claims);
            if self.replicas[index].absent_until > self.now {
                continue;
            }
            if self.replicas[index].without_workspace <= self.now {
                self.replicas[index].find_workspace();
            }
            if self.replicas[index].process.is_none() {
                self.processes += 1;
                let replica = &self.replicas[index];
                let started = Process::start(
                    &self.shared,
                    &replica.workspace,
                    replica.lease,
                    self.now.saturating_sub(turn),
                    self.processes,
                    &self.drawn,
                );
                self.replicas[index].process = Some(started);
            }
            let database = self.database_time();
            let Some(process) = &mut self.replicas[index].process else { continue };
            for hint in &hints {
                if self.drawn.percent(80) {
                    process.line.hear(*hint);
                }
            }
            process.line.is_troubled.store(trouble == Some(false), Ordering::Relaxed);
            process.line.loses_claims.store(trouble == Some(true), Ordering::Relaxed);
            if process.run(self.now, turn, database) {
                self.crash(index, self.drawn.millis(100, 1500));
            }
            self.change_odd();
        }
        self.look_at_the_dead();
    }

    fn database_time(&self) -> DateTime<Utc> {
        let begin = DateTime::from_timestamp(1_900_000_000, 0).unwrap();
        begin + TimeDelta::from_std(self.now + self.ahead).unwrap()
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Start { agent, steps, is_queued } => {
                let mode = if is_queued { Mode::Queued } else { Mode::Stored };
                self.start(agent, steps, mode, None, |acknowledged| &mut acknowledged.runs);
            }
            Happening::Unreadable => {
                self.start_odd(|acknowledged| &mut acknowledged.to_be_unreadable);
            }
            Happening::Newer => self.start_odd(|acknowledged| &mut acknowledged.to_be_newer),
            Happening::Crash { replica, down } => self.crash(replica, down),
            Happening::Freeze { replica, asleep } => {
                self.absent(replica, asleep);
                let replica = &mut self.replicas[replica];
                if asleep >= replica.lease / 2 {
                    replica.excused_until = replica.absent_until + replica.lease;
                }
            }
            Happening::FreezeAll { asleep } => {
                (0..REPLICAS).for_each(|replica| self.absent(replica, asleep));
            }
            Happening::Jump { by } => self.ahead += by,
            Happening::SilentHeartbeat { replica } => {
                if let Some(process) = &self.replicas[replica].process {
                    process.heartbeat.is_silent.store(true, Ordering::Relaxed);
                }
            }
            Happening::NoWorkspace { replica, lasting } => {
                let replica = &mut self.replicas[replica];
                replica.without_workspace = replica.without_workspace.max(self.now + lasting);
                replica.lose_workspace();
            }
            Happening::Trouble { replica, lasting, of_claims } => {
                self.troubles.insert(replica, (self.now + lasting, of_claims));
            }
        }
    }

    fn crash(&mut self, replica: usize, down: Duration) {
        self.replicas[replica].process = None;
        self.absent(replica, down);
    }

    fn absent(&mut self, replica: usize, time: Duration) {
        let replica = &mut self.replicas[replica];
        replica.absent_until = replica.absent_until.max(self.now + time);
    }

    /// A replica that serves requests, if there is one.
    fn serving(&self) -> Option<&Process> {
        let first = self.drawn.index(REPLICAS);
        let replicas = (0..REPLICAS).map(|place| &self.replicas[(first + place) % REPLICAS]);
        let here = replicas.filter(|replica| replica.absent_until <= self.now);
        here.filter_map(|replica| replica.process.as_ref()).find(|process| process.is_ready())
    }

    /// Puts a run into the queue that waits there until it is changed.
    fn start_odd(&self, list: fn(&mut Acknowledged) -> &mut Vec<Uuid>) {
        let later = self.database_time() + TimeDelta::seconds(1);
        self.start("writer", 1, Mode::Queued, Some(later), list);
    }

    /// Changes rows of runs in the queue.
    fn change_odd(&self) {
        let mut acknowledged = self.acknowledged.lock();
        for run in std::mem::take(&mut acknowledged.to_be_unreadable) {
            let changed = self.shared.database.spoil(run);
            let list = &mut *acknowledged;
            if changed { list.unreadable.push(run) } else { list.runs.push(run) }
        }
        for run in std::mem::take(&mut acknowledged.to_be_newer) {
            let changed = self.shared.database.renew(run);
            let list = &mut *acknowledged;
            if changed { list.newer.push(run) } else { list.runs.push(run) }
        }
    }

    fn start(
        &self,
        agent: &str,
        steps: u64,
        mode: Mode,
        available_at: Option<DateTime<Utc>>,
        list: fn(&mut Acknowledged) -> &mut Vec<Uuid>,
    ) {
        let Some(process) = self.serving() else { return };
        let request = StartRequest {
            caller: Arc::new(Caller::local()),
            agent: agent.to_owned(),
            kind: RunKind::Iterative,
            mode,
            idempotency: None,
            traceparent: None,
            run_id: None,
            inputs: json!({"steps": steps}),
            metadata: BTreeMap::new(),
            session_id: None,
            overrides: Overrides::default(),
            webhook: None,
            uploads: None,
            queue: QueuePlace { available_at, ..QueuePlace::default() },
            until: None,
        };
        let (runtime, acknowledged) = (process.runtime.clone(), Arc::clone(&self.acknowledged));
        process.spawn(async move {
            let run = match Box::pin(runtime.start(request)).await {
                Ok(Accepted::Started(started)) => started.run_id,
                Ok(Accepted::Queued(run) | Accepted::Known(run)) => run,
                Err(_) => return,
            };
            list(&mut acknowledged.lock()).push(run);
        });
    }

    /// Who looks after runs finds out what became of calls.
    fn review(&self) {
        for doubt in self.shared.database.doubts() {
            let Some(process) = self.serving() else { return };
            let has_happened = self.shared.ledger.has(doubt.run, doubt.step);
            let found = if has_happened {
                ReviewFinding::Happened { result: None }
            } else {
                ReviewFinding::DidNotHappen
            };
            let runtime = process.runtime.clone();
            let place = CallRef { run: doubt.run, call: doubt.call, seq: None };
            process.spawn(async move {
                let _ = runtime.review(&Caller::local(), place, found).await; // else at the next look
            });
        }
    }

    /// Replicas that were declared dead are, or may be taken for it.
    fn look_at_the_dead(&mut self) {
        for dead in std::mem::take(&mut *self.shared.notices.dead.lock()) {
            let living = self.replicas.iter().find(|replica| {
                replica.process.as_ref().is_some_and(|process| process.id() == dead)
            });
            if living.is_some_and(|replica| replica.excused_until < self.now) {
                self.violations
                    .push(format!("a living replica was declared dead at {:?}", self.now));
            }
        }
    }

    fn left_alone(&self) -> HashSet<Uuid> {
        let acknowledged = self.acknowledged.lock();
        acknowledged.unreadable.iter().chain(&acknowledged.newer).copied().collect()
    }

    fn has_ended(&self) -> bool {
        let left_alone = self.left_alone();
        let mut runs = self.shared.database.runs().into_iter();
        runs.all(|run| left_alone.contains(&run.id) || !is_under_way(&run.status))
    }

    fn judge(&mut self) {
        let mut found = self.shared.database.violations();
        let left_alone = self.left_alone();
        let runs = self.shared.database.runs();
        let known = runs.iter().map(|run| run.id).collect::<HashSet<_>>();
        let acknowledged = self.acknowledged.lock();
        for run in acknowledged.runs.iter().filter(|run| !known.contains(run)) {
            found.push(format!("{run} was acknowledged and is not there"));
        }
        for run in &runs {
            if acknowledged.newer.contains(&run.id) && run.status != "queued" {
                found.push(format!("{} is of a newer version and {}", run.id, run.status));
            }
            let is_as_expected = match &*run.agent {
                POISON => run.status == "failed" && run.error.contains("INTERRUPTED"),
                _ => run.status == "completed",
            };
            if !left_alone.contains(&run.id) && !is_as_expected {
                let journal = self.shared.database.journal(run.id);
                let KeptRun { id, agent, status, error, .. } = run;
                found.push(format!("{id} of {agent} is {status} {error}: {journal}"));
            }
            for step in 1..=run.steps {
                let done = self.shared.ledger.done(run.id, step);
                if done.len() > 1 {
                    found.push(format!("{} has done step {step} {} times", run.id, done.len()));
                }
                if done.is_empty() && run.status == "completed" {
                    found.push(format!("{} has not done step {step}", run.id));
                }
            }
        }
        drop(acknowledged);
        self.violations.extend(found);
    }
}

fn is_under_way(status: &str) -> bool {
    !matches!(status, "completed" | "failed" | "cancelled")
}
