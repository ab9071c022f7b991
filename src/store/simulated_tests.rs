//! A database for simulations of several replicas in one thread: the embedded one, behind a network
//! that delays statements, refuses them and loses answers. A statement, or a whole transaction, takes
//! no time in the database itself.
//!
//! Each fault that a store once had can be put back: a statement is changed on its way.

use std::collections::HashMap;
use std::path::Path;
use std::pin::pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Duration;

use async_trait::async_trait;
use parking_lot::Mutex;
use tokio::sync::broadcast;
use uuid::Uuid;

use super::backend::{Backend, Transaction, Work};
use super::batch::{Batch, Passed, Statement};
use super::sql::{Dialect, Query, Row};
use super::sqlite::Sqlite;
use super::tables::Record;
use super::{ClaimedRun, ConnectionCounts, DatabaseInfo, Store, StoreError, Wakeup};

/// What a store once got wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StoreFault {
    /// Runs that are owned and not driven are not looked for.
    NothingReconciled,
    /// One row that cannot be read fails the claim of all, and the takeover.
    OneRowSpoilsAll,
    /// The database's clock is believed, whatever one's own row says, at the first look.
    ClockBelieved,
    /// Another replica's lease is taken to be one's own.
    OwnLeaseForAll,
    /// Budgets take what any owner says.
    BudgetsUnfenced,
    /// So do runs.
    RunsUnfenced,
    /// Runs of a newer version are claimed.
    NewerClaimed,
}

/// What becomes of a statement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Answer {
    Given,
    /// It is carried out, and its answer is lost.
    Lost,
    Refused,
}

/// The way of a statement to the database and back.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Fate {
    pub(crate) before: Duration,
    pub(crate) after: Duration,
    pub(crate) answer: Answer,
}

/// What lies between a replica and the database.
pub(crate) trait Network: Send + Sync {
    fn fate(&self, statement: &str) -> Fate;
    fn hints(&self) -> broadcast::Receiver<Wakeup>;
    fn hint(&self, wakeup: Wakeup);
    /// This replica declares those dead.
    fn declares_dead(&self, replicas: Vec<String>);
}

/// A run as its row has it.
#[derive(Debug)]
pub(crate) struct KeptRun {
    pub(crate) id: Uuid,
    pub(crate) agent: String,
    pub(crate) status: String,
    pub(crate) error: String,
    /// Calls that it is to make.
    pub(crate) steps: i64,
}

/// A call whose outcome is to be found out.
#[derive(Debug)]
pub(crate) struct Doubt {
    pub(crate) run: Uuid,
    pub(crate) call: Uuid,
    pub(crate) step: i64,
}

/// Written down by the database itself when something is written that must not be.
const WATCHERS: &str = "
CREATE TABLE noted (what TEXT NOT NULL);
CREATE TRIGGER stale_event BEFORE INSERT ON run_events
WHEN NEW.epoch <> (SELECT epoch FROM runs WHERE id = NEW.run_id)
BEGIN INSERT INTO noted VALUES ('a stale write was accepted of ' || NEW.run_id); END;
CREATE TRIGGER event_of_nobody BEFORE UPDATE OF next_seq ON runs
WHEN NEW.next_seq <> OLD.next_seq AND OLD.status <> 'running'
BEGIN INSERT INTO noted VALUES ('a write was accepted of ' || OLD.status || ' ' || OLD.id); END;
CREATE TRIGGER budget_shrank BEFORE UPDATE ON budgets
WHEN NEW.spent_tokens < OLD.spent_tokens OR NEW.spent_iterations < OLD.spent_iterations
OR NEW.spent_tool_calls < OLD.spent_tool_calls
BEGIN INSERT INTO noted VALUES ('a budget shrank: ' || OLD.root_run_id); END;
CREATE TRIGGER hold_shrank BEFORE UPDATE ON budget_holds
WHEN NEW.spent_tokens < OLD.spent_tokens OR NEW.spent_iterations < OLD.spent_iterations
OR NEW.spent_tool_calls < OLD.spent_tool_calls OR NEW.ended < OLD.ended
BEGIN INSERT INTO noted VALUES ('what was spent shrank: ' || OLD.run_id); END;";

const EMPTIED: &str = "DELETE FROM replicas; DELETE FROM runs; DELETE FROM run_events; \
    DELETE FROM iterations; DELETE FROM tool_calls; DELETE FROM audit_log; DELETE FROM approvals; \
    DELETE FROM budgets; DELETE FROM budget_holds; DELETE FROM observations; \
    DELETE FROM definitions; DELETE FROM noted";

/// The database that the replicas of a simulation share.
pub(crate) struct SharedDatabase(Arc<Remembered>);

impl SharedDatabase {
    pub(crate) fn make(dir: &Path) -> Self {
        let path = dir.join("simulated.db").display().to_string();
        let executor = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let database = executor.block_on(async {
            let database = Sqlite::open(&path).await.unwrap();
            database.migrate().await.unwrap();
            database
        });
        let database = Self(Arc::new(Remembered {
            database,
            changes: AtomicU64::default(),
            empty: Mutex::default(),
        }));
        // Nothing of it need outlive the process.
        for setting in ["locking_mode = EXCLUSIVE", "journal_mode = MEMORY", "synchronous = OFF"] {
            database.ask(Query::new(format!("PRAGMA {setting}")));
        }
        database.ask(Query::new(WATCHERS));
        database
    }

    pub(crate) fn empty(&self) {
        self.ask(Query::new(EMPTIED));
    }

    /// The store of one replica.
    pub(crate) fn behind(
        &self,
        network: Arc<dyn Network>,
        fault: Option<StoreFault>,
    ) -> Arc<Store> {
        let database = Arc::clone(&self.0);
        let own = Mutex::default();
        Arc::new(Store::over(Simulated { database, network, faulty: Faulty { fault, own } }))
    }

    /// Makes the row of a run in the queue unreadable; whether it was there.
    pub(crate) fn spoil(&self, run: Uuid) -> bool {
        self.change(run, "overrides = '{'")
    }

    /// Makes a run in the queue one of a newer version; whether it was there.
    pub(crate) fn renew(&self, run: Uuid) -> bool {
        self.change(run, "format = 99")
    }

    fn change(&self, run: Uuid, set: &str) -> bool {
        let text = "WHERE id = :run AND status = 'queued' RETURNING id";
        let change = Query::new(format!("UPDATE runs SET {set} {text}"));
        !self.ask(change.bind("run", run)).is_empty()
    }

    pub(crate) fn runs(&self) -> Vec<KeptRun> {
        let rows = self.ask(Query::new(
            "SELECT id, agent, status, COALESCE(error, '') AS error, \
             COALESCE(json_extract(inputs, '$.steps'), 0) AS steps FROM runs ORDER BY id",
        ));
        let run = |row: &Row| KeptRun {
            id: row.read("id").unwrap(),
            agent: row.read("agent").unwrap(),
            status: row.read("status").unwrap(),
            error: row.read("error").unwrap(),
            steps: row.read("steps").unwrap(),
        };
        rows.iter().map(run).collect()
    }

    /// The events of a run, each with its epoch.
    pub(crate) fn journal(&self, run: Uuid) -> String {
        let events = Query::new(
            "SELECT json_group_array(epoch || ': ' || events ORDER BY seq) AS journal \
             FROM run_events WHERE run_id = :run",
        );
        self.ask(events.bind("run", run))[0].read("journal").unwrap()
    }

    pub(crate) fn doubts(&self) -> Vec<Doubt> {
        let rows = self.ask(Query::new(
            "SELECT run_id, call_id, json_extract(arguments, '$.step') AS step FROM approvals \
             WHERE status = 'pending' AND kind = 'review'",
        ));
        let doubt = |row: &Row| Doubt {
            run: row.read("run_id").unwrap(),
            call: row.read("call_id").unwrap(),
            step: row.read("step").unwrap(),
        };
        rows.iter().map(doubt).collect()
    }

    /// What was written that must not be, and journals with gaps.
    pub(crate) fn violations(&self) -> Vec<String> {
        let rows = self.ask(Query::new(
            "SELECT what FROM noted UNION SELECT 'the journal has a gap: ' || r.id FROM runs r \
             WHERE r.next_seq - 1 <> COALESCE((SELECT sum(e.seq - e.first_seq + 1) \
             FROM run_events e WHERE e.run_id = r.id), 0)",
        ));
        rows.iter().map(|row| row.read("what").unwrap()).collect()
    }

    fn ask(&self, query: Query) -> Vec<Row> {
        self.0.ask(Work::Data, query).unwrap()
    }
}

/// The database, and which questions had no answer since it was changed last: nearly all that
/// replicas ask again and again.
struct Remembered {
    database: Sqlite,
    changes: AtomicU64,
    empty: Mutex<HashMap<String, u64>>,
}

impl Remembered {
    fn ask(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let text = query.template();
        if may_change(text) {
            let (is_beat, tells) =
                (text.starts_with("UPDATE replicas"), text.contains("RETURNING"));
            let rows = at_once(self.database.write(work, query));
            let changed_nothing = tells && rows.as_ref().is_ok_and(Vec::is_empty);
            if !is_beat && !changed_nothing {
                self.changed();
            }
            return rows;
        }
        if text.contains("{now}") || text.contains("replicas") {
            return at_once(self.database.write(work, query));
        }
        let (asked, changes) = (format!("{query:?}"), self.changes.load(Ordering::Relaxed));
        if self.empty.lock().get(&asked) == Some(&changes) {
            return Ok(Vec::new());
        }
        let rows = at_once(self.database.write(work, query))?;
        if rows.is_empty() {
            self.empty.lock().insert(asked, changes);
        }
        Ok(rows)
    }

    fn changed(&self) {
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

fn may_change(text: &str) -> bool {
    ["INSERT ", "UPDATE ", "DELETE ", "PRAGMA ", "CREATE "].iter().any(|word| text.contains(word))
}

/// What is put back, for one replica.
struct Faulty {
    fault: Option<StoreFault>,
    /// Its id and its lease.
    own: Mutex<(String, Duration)>,
}

impl Faulty {
    fn changed(&self, query: Query) -> Query {
        const LOOK: &str = "SELECT id, heartbeat_at, lease, ";
        let Some(fault) = self.fault else { return query };
        let (id, lease) = self.own.lock().clone();
        let text = query.template();
        match fault {
            StoreFault::NothingReconciled if text.starts_with("SELECT id, epoch FROM runs") => {
                query.push(" AND false")
            }
            StoreFault::ClockBelieved if text.starts_with(LOOK) => query
                .replaced(LOOK, "SELECT id, 0 AS heartbeat_at, lease, ")
                .replaced(" AS is_in_time", &format!(" OR id = '{id}' AS is_in_time")),
            StoreFault::OwnLeaseForAll if text.contains("heartbeat_at BETWEEN") => {
                let own = lease.as_micros();
                query
                    .replaced(LOOK, &format!("SELECT id, heartbeat_at, {own} AS lease, "))
                    .replaced("lease * :microsecond", &format!("{own}"))
            }
            StoreFault::BudgetsUnfenced => {
                let mut query = query
                    .replaced(super::budget::IS_OWNED, "true")
                    .replaced("+ {greatest}(:", "+ coalesce(:");
                for amount in ["tokens", "iterations", "tool_calls"] {
                    let largest = format!("{{greatest}}(spent_{amount}, :{amount})");
                    query = query.replaced(&largest, &format!(":{amount}"));
                }
                query
            }
            StoreFault::NewerClaimed => query.replaced("format <= :format", "format >= 0"),
            _ => query,
        }
    }

    fn changed_batch(&self, mut batch: Batch) -> Batch {
        if self.fault == Some(StoreFault::RunsUnfenced) {
            static UNFENCED: OnceLock<Statement> = OnceLock::new();
            for step in batch.fence.iter_mut().filter(|step| step.statement.name == "known") {
                step.statement = UNFENCED.get_or_init(|| {
                    let condition = "runs.id = w.id AND runs.finished_at IS NULL";
                    Statement { condition, ..step.statement.clone() }
                });
            }
        }
        batch
    }

    fn answer(&self, rows: Vec<Row>, is_claim: bool) -> Result<Vec<Row>, StoreError> {
        if self.fault == Some(StoreFault::OneRowSpoilsAll) && is_claim {
            rows.iter().map(ClaimedRun::read).collect::<Result<Vec<_>, _>>()?;
        }
        Ok(rows)
    }
}

/// Whether a statement claims runs.
pub(crate) fn is_claim(statement: &str) -> bool {
    statement.contains("SET status = 'running'")
}

/// The database as one replica has it.
struct Simulated {
    database: Arc<Remembered>,
    network: Arc<dyn Network>,
    faulty: Faulty,
}

impl Simulated {
    async fn go(&self, statement: &str) -> Result<Fate, StoreError> {
        let fate = self.network.fate(statement);
        pass(fate.before).await;
        if fate.answer == Answer::Refused { Err(away()) } else { Ok(fate) }
    }
}

impl Fate {
    async fn come(self) -> Result<(), StoreError> {
        pass(self.after).await;
        if self.answer == Answer::Lost { Err(away()) } else { Ok(()) }
    }
}

async fn pass(time: Duration) {
    if !time.is_zero() {
        tokio::time::sleep(time).await;
    }
}

fn away() -> StoreError {
    StoreError::Unavailable("the network is simulated".to_owned())
}

#[async_trait]
impl Backend for Simulated {
    fn dialect(&self) -> Dialect {
        Dialect::Sqlite
    }

    async fn migrate(&self) -> Result<(), StoreError> {
        Ok(())
    }

    async fn about(&self) -> Result<DatabaseInfo, StoreError> {
        Ok(DatabaseInfo { version: "simulated".to_owned(), applied: 1, known: 1, now: None })
    }

    async fn close(&self) {}

    fn connection_counts(&self) -> ConnectionCounts {
        ConnectionCounts::default()
    }

    async fn read(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        self.write(work, query).await
    }

    async fn write(&self, work: Work, query: Query) -> Result<Vec<Row>, StoreError> {
        let query = self.faulty.changed(query);
        let is_claim = is_claim(query.template());
        let fate = self.go(query.template()).await?;
        let rows = self.database.ask(work, query)?;
        fate.come().await?;
        self.faulty.answer(rows, is_claim)
    }

    async fn begin(&self, work: Work) -> Result<Box<dyn Transaction + '_>, StoreError> {
        let fate = self.go("BEGIN").await?;
        let transaction = at_once(self.database.database.begin(work))?;
        Ok(Box::new(SimulatedTransaction { transaction, fate, simulated: self }))
    }

    async fn commit(&self, batch: Batch) -> Result<Passed, StoreError> {
        let fate = self.go("COMMIT").await?;
        let batch = self.faulty.changed_batch(batch);
        let passed = at_once(self.database.database.commit(batch))?;
        self.database.changed();
        fate.come().await?;
        Ok(passed)
    }

    fn wakeups(&self) -> broadcast::Receiver<Wakeup> {
        self.network.hints()
    }

    async fn hint(&self, wakeup: Wakeup) {
        self.network.hint(wakeup);
    }

    fn only_replicas(&self) -> Option<Vec<String>> {
        None
    }

    fn note_replica(&self, id: &str) {
        let lease = Query::new("SELECT lease FROM replicas WHERE id = :id").bind("id", id);
        let rows = self.database.ask(Work::Control, lease).unwrap();
        let lease = rows.first().map_or(0, |row| row.read("lease").unwrap());
        *self.faulty.own.lock() = (id.to_owned(), Duration::from_micros(lease));
    }
}

struct SimulatedTransaction<'s> {
    transaction: Box<dyn Transaction + 's>,
    fate: Fate,
    simulated: &'s Simulated,
}

#[async_trait]
impl Transaction for SimulatedTransaction<'_> {
    async fn run(&mut self, query: Query) -> Result<Vec<Row>, StoreError> {
        let query = self.simulated.faulty.changed(query);
        let declares = query.template().starts_with("SELECT id FROM replicas WHERE NOT dead");
        let may_change = may_change(query.template());
        let takes_over = query.template().contains("owner NOT IN (SELECT id FROM replicas");
        let rows = at_once(self.transaction.run(query))?;
        if may_change {
            self.simulated.database.changed();
        }
        if takes_over && self.simulated.faulty.fault == Some(StoreFault::OneRowSpoilsAll) {
            for row in &rows {
                let look = Query::new("SELECT 1 FROM runs WHERE id = :id AND overrides = '{'");
                let look = look.bind("id", row.read::<Uuid>("id")?);
                if !at_once(self.transaction.run(look))?.is_empty() {
                    return Err(StoreError::Failed("a row cannot be read".to_owned()));
                }
            }
        }
        if declares && !rows.is_empty() {
            let dead = rows.iter().map(|row| row.read("id")).collect::<Result<_, _>>()?;
            self.simulated.network.declares_dead(dead);
        }
        Ok(rows)
    }

    async fn lock_tenant(&mut self, tenant: &str, patience: Duration) -> Result<bool, StoreError> {
        at_once(self.transaction.lock_tenant(tenant, patience))
    }

    async fn write(&mut self, batch: Batch) -> Result<Passed, StoreError> {
        self.simulated.database.changed();
        at_once(self.transaction.write(self.simulated.faulty.changed_batch(batch)))
    }

    async fn commit(self: Box<Self>) -> Result<(), StoreError> {
        at_once(self.transaction.commit())?;
        self.fate.come().await
    }
}

/// Wakes a thread.
struct Waiting(Thread);

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Waits for the database in this very thread, so that no time passes in the meantime.
fn at_once<T>(asked: impl Future<Output = T>) -> T {
    let waker = Waker::from(Arc::new(Waiting(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut asked = pin!(tokio::task::unconstrained(asked));
    loop {
        match asked.as_mut().poll(&mut context) {
            Poll::Ready(answer) => return answer,
            Poll::Pending => std::thread::park(),
        }
    }
}
