//! Group commit: one task takes the writes of all runs and commits them together.
//!
//! Batching is adaptive: an idle writer commits at once, and while a commit is in flight, the next batch
//! grows. It is committed beside the first one only if that takes long or the batch is full, since a large commit
//! costs little more than a small one. Writes of one [`Appender`] in the same batch are merged. Writes of different
//! appenders are never merged, even if they are for the same run, so that a refused write does not affect others. A
//! run never has two commits in flight, so its writes stay in order. The writer does not decide what is written, and
//! it retries only transient failures.

pub mod crash;

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};
use tokio::task::{JoinError, JoinSet};
use tokio::time::{Instant, MissedTickBehavior};
use uuid::Uuid;

use super::conflict::JITTER;
use super::{Cancelling, Commit, RunWrite, Store, StoreError, WriteOutcome};
use crate::jitter;

/// Writes in one commit, at most.
const MAX_BATCH: usize = 128;
/// Commits at the same time, at most.
const MAX_IN_FLIGHT: usize = 2;
/// After this time, a commit in flight no longer keeps the next batch waiting.
const MAY_HOLD_UP: Duration = Duration::from_millis(10);
/// The pause before the first retry; it doubles up to [`LAST_PAUSE`], both with jitter.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// How long the first write of a requested run is retried.
const START_PATIENCE: Duration = Duration::from_secs(3);
/// How often the queue is searched for first writes that have waited for too long behind slow commits.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Why a write is not durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// The run belongs to another replica now; write nothing more.
    #[error("the run is no longer owned by this replica")]
    Fenced,
    /// A new run's id or idempotency key is taken.
    #[error("the run id or the idempotency key is taken")]
    IdTaken,
    /// The run has a cancel request, so another end is refused; the events before the end are durable.
    #[error("the run was asked to cancel before it ended")]
    Cancelling,
    /// The store refused the write for a permanent reason.
    #[error("the store refused the write")]
    Refused,
    /// The store did not come back within its patience, or the service is stopping.
    #[error("the store is unavailable")]
    Unavailable,
}

/// The handle to the writer task; cheap to clone.
#[derive(Clone)]
pub struct Writer {
    requests: mpsc::UnboundedSender<Request>,
    available: Arc<AtomicBool>,
    /// How many appenders there have been.
    appenders: Arc<AtomicU64>,
}

/// The writes of one driver of one run.
pub struct Appender {
    writer: Writer,
    id: u64,
}

/// Called for every write as soon as it is durable; the writes of one run in their order. Must not block.
pub type OnDurable = Arc<dyn Fn(&RunWrite) + Send + Sync>;

/// Called for every written run that has a cancel request, before its driver is notified that the write is
/// durable. Must not block.
pub type OnCancelling = Arc<dyn Fn(Uuid, &Cancelling) + Send + Sync>;

type Answer = oneshot::Sender<Result<(), AppendError>>;

enum Request {
    Append(Pending),
    Shutdown(oneshot::Sender<()>),
}

/// The writes of one appender that are committed together, and the channels for their outcome.
struct Pending {
    appender: u64,
    write: Box<RunWrite>,
    waiting: Waiting,
}

/// The channels for the outcome of a write, and when the write was appended.
struct Waiting {
    since: Instant,
    answers: Vec<Answer>,
    /// The outcome to send when the write is durable.
    outcome: Result<(), AppendError>,
}

impl Writer {
    /// Starts the task. `patience`: how long a transient failure is retried before it is reported.
    pub fn spawn(
        store: Arc<Store>,
        owner: Arc<str>,
        patience: Duration,
        on_durable: OnDurable,
        on_cancelling: OnCancelling,
    ) -> Self {
        let (requests, inbox) = mpsc::unbounded_channel();
        let available = Arc::new(AtomicBool::new(true));
        let seconds = metrics::histogram!("toolloop_store_commit_duration_seconds");
        let committer = Arc::new(Committer {
            store,
            owner,
            patience,
            available: available.clone(),
            on_durable,
            on_cancelling,
            seconds,
        });
        let task = Task {
            inbox,
            committer,
            queue: VecDeque::new(),
            in_flight: HashSet::new(),
            commits: JoinSet::new(),
            last_commit: Instant::now(),
        };
        tokio::spawn(task.run());
        Self { requests, available, appenders: Arc::default() }
    }

    /// For a driver that writes more than once.
    pub fn appender(&self) -> Appender {
        Appender { writer: self.clone(), id: self.appenders.fetch_add(1, Ordering::Relaxed) }
    }

    /// One write by itself; as [`Appender::append`].
    pub fn append(
        &self,
        write: RunWrite,
    ) -> impl Future<Output = Result<(), AppendError>> + Send + 'static + use<> {
        self.appender().append(write)
    }

    /// Whether the last commit succeeded. While it is `false`, new runs should be refused at once
    /// instead of waiting for the store's patience to run out.
    pub fn is_available(&self) -> bool {
        self.available.load(Ordering::Relaxed)
    }

    /// Commits all queued writes, then stops.
    pub async fn shutdown(&self) {
        let (done, stopped) = oneshot::channel();
        if self.requests.send(Request::Shutdown(done)).is_ok() {
            let _ = stopped.await;
        }
    }
}

impl Appender {
    /// Hands over a write at once; the future resolves when it is durable. Writes of one run are
    /// committed in the order of these calls. Dropping the future does not undo the write.
    pub fn append(
        &self,
        write: RunWrite,
    ) -> impl Future<Output = Result<(), AppendError>> + Send + 'static + use<> {
        let (answer, outcome) = oneshot::channel();
        let waiting = Waiting { since: Instant::now(), answers: vec![answer], outcome: Ok(()) };
        let pending = Pending { appender: self.id, write: Box::new(write), waiting };
        // If the task has ended, the channel is dropped with the request.
        let _ = self.writer.requests.send(Request::Append(pending));
        async move { outcome.await.unwrap_or(Err(AppendError::Unavailable)) }
    }
}

struct Task {
    inbox: mpsc::UnboundedReceiver<Request>,
    committer: Arc<Committer>,
    /// Writes that are not in a commit yet, in the order of arrival.
    queue: VecDeque<Pending>,
    /// Runs with a commit in flight.
    in_flight: HashSet<Uuid>,
    commits: JoinSet<Vec<Uuid>>,
    /// When the newest of them began.
    last_commit: Instant,
}

impl Task {
    async fn run(mut self) {
        let mut stopped: Vec<oneshot::Sender<()>> = Vec::new();
        let mut requests = Vec::new();
        let mut open = true;
        let mut poll = tokio::time::interval(POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let mut now = Instant::now();
            while self.may_commit(now) {
                let batch = self.next_batch();
                if batch.is_empty() {
                    break;
                }
                now = Instant::now();
                self.last_commit = now;
                self.commits.spawn(self.committer.clone().commit(batch));
            }
            if !open && self.commits.is_empty() {
                break;
            }
            tokio::select! {
                Some(finished) = self.commits.join_next() => self.finish(finished).await,
                () = tokio::time::sleep_until(self.last_commit + MAY_HOLD_UP), if self.is_held_up(now) => {}
                _ = poll.tick(), if !self.queue.is_empty() => self.refuse_late_starts(),
                received = self.inbox.recv_many(&mut requests, MAX_BATCH), if open => open = received > 0,
            }
            for request in requests.drain(..) {
                match request {
                    Request::Append(pending) => self.queue.push_back(pending),
                    Request::Shutdown(done) => {
                        self.inbox.close();
                        stopped.push(done);
                    }
                }
            }
        }
        for done in stopped {
            let _ = done.send(());
        }
    }

    fn may_commit(&self, now: Instant) -> bool {
        match self.commits.len() {
            0 => true,
            MAX_IN_FLIGHT.. => false,
            _ => !self.is_held_up(now),
        }
    }

    /// Whether a commit in flight still keeps the writes of the queue waiting.
    fn is_held_up(&self, now: Instant) -> bool {
        !self.commits.is_empty()
            && (1..MAX_BATCH).contains(&self.queue.len())
            && now < self.last_commit + MAY_HOLD_UP
    }

    async fn finish(&mut self, finished: Result<Vec<Uuid>, JoinError>) {
        match finished {
            Ok(runs) => {
                for run in runs {
                    self.in_flight.remove(&run);
                }
            }
            // Its runs are unknown and their waiters gone, so nothing in flight can be attributed.
            Err(panic) => {
                tracing::error!(%panic, "a commit panicked");
                self.commits.shutdown().await;
                self.in_flight.clear();
            }
        }
    }

    /// Refuses first writes of requested runs that have waited for too long: they are not stored.
    fn refuse_late_starts(&mut self) {
        let is_late = |pending: &Pending| {
            pending.write.is_request() && pending.waiting.since.elapsed() >= START_PATIENCE
        };
        let late: VecDeque<Pending>;
        (late, self.queue) = std::mem::take(&mut self.queue).into_iter().partition(is_late);
        for start in late {
            start.waiting.answer(Err(AppendError::Unavailable));
        }
    }

    /// Takes the writes from the queue that can be committed now. A write that cannot be committed keeps its
    /// position, and so do all later writes of its run.
    fn next_batch(&mut self) -> Vec<Pending> {
        let mut batch: Vec<Pending> = Vec::new();
        let mut positions: HashMap<Uuid, usize> = HashMap::new();
        let mut held: HashSet<Uuid> = HashSet::new();
        for _ in 0..self.queue.len() {
            let Some(pending) = self.queue.pop_front() else { break };
            let run = pending.write.run_id;
            let refused = if self.in_flight.contains(&run) || held.contains(&run) {
                Some(pending)
            } else if let Some(&position) = positions.get(&run) {
                batch[position].merge(pending)
            } else if batch.len() < MAX_BATCH {
                positions.insert(run, batch.len());
                batch.push(pending);
                None
            } else {
                Some(pending)
            };
            if let Some(pending) = refused {
                held.insert(run);
                self.queue.push_back(pending);
            }
        }
        self.in_flight.extend(positions.into_keys());
        batch
    }
}

impl Pending {
    /// Appends a later write of the same run; returns it if it does not continue this one.
    fn merge(&mut self, mut later: Pending) -> Option<Pending> {
        let next = self.write.events.last().map(|event| event.seq + 1);
        let continues = later.appender == self.appender
            && next.is_some()
            && later.write.events.first().map(|event| event.seq) == next;
        if !continues || later.write.new.is_some() || later.write.epoch != self.write.epoch {
            return Some(later);
        }
        self.write.events.append(&mut later.write.events);
        self.write.audit.append(&mut later.write.audit);
        self.write.totals = later.write.totals;
        self.write.park = later.write.park;
        self.waiting.answers.append(&mut later.waiting.answers);
        None
    }
}

impl Waiting {
    fn answer(self, result: Result<(), AppendError>) {
        for answer in self.answers {
            // The receiver may have stopped waiting.
            let _ = answer.send(result);
        }
    }
}

/// What every commit needs.
struct Committer {
    store: Arc<Store>,
    owner: Arc<str>,
    patience: Duration,
    available: Arc<AtomicBool>,
    on_durable: OnDurable,
    on_cancelling: OnCancelling,
    /// How long successful commits take.
    seconds: metrics::Histogram,
}

impl Committer {
    /// How long this write is retried. It is shorter for requested runs, so that their callers are not kept
    /// waiting.
    fn patience_of(&self, write: &RunWrite) -> Duration {
        if write.is_request() { self.patience.min(START_PATIENCE) } else { self.patience }
    }

    /// Commits a batch and sends all outcomes; returns the runs of the batch.
    async fn commit(self: Arc<Self>, batch: Vec<Pending>) -> Vec<Uuid> {
        let (writes, waiting): (Vec<RunWrite>, Vec<Waiting>) =
            batch.into_iter().map(|p| (*p.write, p.waiting)).unzip();
        let runs = writes.iter().map(|write| write.run_id).collect();
        let refused = self.commit_with_retries(writes, waiting).await;
        let alone = refused.len() == 1;
        for (write, waiting) in refused {
            // A write that the database refuses must not fail the others of the batch.
            let still_refused = if alone {
                vec![(write, waiting)]
            } else {
                self.commit_with_retries(vec![write], vec![waiting]).await
            };
            for (_, waiting) in still_refused {
                waiting.answer(Err(AppendError::Refused));
            }
        }
        runs
    }

    /// Sends the outcomes of the writes. Returns what still has to be written: the events before the end of runs
    /// with a cancel request.
    fn settle(
        &self,
        writes: Vec<RunWrite>,
        waiting: Vec<Waiting>,
        outcomes: Vec<WriteOutcome>,
    ) -> (Vec<RunWrite>, Vec<Waiting>) {
        let mut remaining = (Vec::new(), Vec::new());
        for ((write, waiting), outcome) in writes.into_iter().zip(waiting).zip(outcomes) {
            match outcome {
                WriteOutcome::Committed => {
                    (self.on_durable)(&write);
                    let outcome = waiting.outcome;
                    waiting.answer(outcome);
                }
                WriteOutcome::Fenced => waiting.answer(Err(AppendError::Fenced)),
                WriteOutcome::IdTaken => waiting.answer(Err(AppendError::IdTaken)),
                WriteOutcome::Cancelling => {
                    let write = write.without_end();
                    if write.events.is_empty() {
                        waiting.answer(Err(AppendError::Cancelling));
                    } else {
                        remaining.0.push(write);
                        remaining
                            .1
                            .push(Waiting { outcome: Err(AppendError::Cancelling), ..waiting });
                    }
                }
            }
        }
        remaining
    }

    /// Retries transient failures. Returns the writes that the store refuses for a permanent reason; their
    /// outcomes are not sent yet.
    async fn commit_with_retries(
        &self,
        mut writes: Vec<RunWrite>,
        mut waiting: Vec<Waiting>,
    ) -> Vec<(RunWrite, Waiting)> {
        let mut pause = FIRST_PAUSE;
        loop {
            let since = Instant::now();
            crash::point("before_commit");
            match self.store.commit(&self.owner, &writes).await {
                Ok(Commit { outcomes, cancelling }) => {
                    crash::point("after_commit");
                    self.seconds.record(since.elapsed());
                    self.available.store(true, Ordering::Relaxed);
                    for (run, request) in &cancelling {
                        (self.on_cancelling)(*run, request);
                    }
                    (writes, waiting) = self.settle(writes, waiting, outcomes);
                    if writes.is_empty() {
                        return Vec::new();
                    }
                }
                Err(error) if error.is_transient() => {
                    if let StoreError::Conflict(why) = &error {
                        tracing::debug!(why, "a commit gave way to another transaction");
                    } else if self.available.swap(false, Ordering::Relaxed) {
                        tracing::warn!(%error, "writes wait for the store");
                    }
                    let (patient, expired): (Vec<_>, Vec<_>) = writes
                        .into_iter()
                        .map(|write| RunWrite { is_repeated: true, ..write })
                        .zip(waiting)
                        .partition(|(write, w)| w.since.elapsed() < self.patience_of(write));
                    for (_, waiting) in expired {
                        waiting.answer(Err(AppendError::Unavailable));
                    }
                    (writes, waiting) = patient.into_iter().unzip();
                    if writes.is_empty() {
                        return Vec::new();
                    }
                    let left = writes.iter().zip(&waiting).map(|(write, w)| {
                        self.patience_of(write).saturating_sub(w.since.elapsed())
                    });
                    tokio::time::sleep(left.fold(jitter::shortened(pause, JITTER), Duration::min))
                        .await;
                    pause = LAST_PAUSE.min(pause * 2);
                }
                Err(error) => {
                    let runs: Vec<Uuid> = writes.iter().map(|write| write.run_id).collect();
                    tracing::error!(%error, ?runs, "a commit was refused");
                    return writes.into_iter().zip(waiting).collect();
                }
            }
        }
    }
}
