//! Two replicas on one PostgreSQL, callers that start runs at them whatever becomes of it, and what
//! is found in the database afterwards.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection};
use tempfile::TempDir;
use tokio::task::JoinHandle;

use crate::service::{Service, Setup, answer};

/// Longer than a busy machine keeps a process from its heartbeat.
pub(super) const LEASE: Duration = Duration::from_secs(8);
/// How long everything may take to end when nothing is wrong any more.
pub(super) const PATIENCE: Duration = Duration::from_mins(5);
/// What a run writes.
const LINES: &str = "1\n2\n3\n4\n";

const WORKER: &str = "
model: scripted/worker
instructions: Work.
tools: [file_ops]
inputs: {type: object, required: [name], properties: {name: {type: string}}}
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['./**']}}
";

/// Each step is a commit or more, and an effect that must not be repeated.
fn working() -> String {
    let step = |line: &str| {
        format!(
            "  - {{delay_ms: 150, tool_calls: [{{tool: file_ops, arguments: {{operation: append, \
             path: '{{{{ inputs.name }}}}', content: \"{line}\\n\"}}}}]}}\n"
        )
    };
    let steps: String = LINES.lines().map(step).collect();
    format!("steps:\n{steps}  - {{delay_ms: 150, text: done}}\n")
}

pub(super) struct Site {
    pub(super) services: [Service; 2],
    /// Of the database itself.
    pub(super) database_url: String,
    workspace: TempDir,
    started: AtomicUsize,
}

/// A run whose acceptance was told.
pub(super) struct Accepted {
    pub(super) name: String,
    pub(super) run_id: String,
}

/// What callers were told.
#[derive(Default)]
pub(super) struct Told {
    pub(super) accepted: Vec<Accepted>,
    /// How long each refusal took.
    pub(super) refused: Vec<Duration>,
}

impl Told {
    pub(super) fn add(&mut self, other: Self) {
        self.accepted.extend(other.accepted);
        self.refused.extend(other.refused);
    }

    /// The longest that a caller waited for a refusal.
    pub(super) fn slowest(&self) -> Duration {
        self.refused.iter().max().copied().unwrap_or_default()
    }
}

/// What is in the database at the end; all but `completed` is wrong.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) completed: usize,
    pub(super) lost: usize,
    pub(super) doubled: usize,
    pub(super) taken_over: usize,
    pub(super) torn: usize,
    pub(super) not_completed: usize,
}

impl Site {
    /// Two replicas, which reach the database at these addresses.
    pub(super) async fn start(database_url: &str, urls: [&str; 2]) -> Self {
        let workspace = TempDir::new().unwrap();
        let setup = || {
            let config = format!(
                "[runtime]\nlease = \"{}s\"\n[tools.workspace]\ndir = \"{}\"\n",
                LEASE.as_secs(),
                workspace.path().display()
            );
            Setup::new().agent("worker", WORKER).scenario("worker", &working()).config(&config)
        };
        let first = setup().start_on(urls[0].to_owned()).await;
        let second = setup().start_on(urls[1].to_owned()).await;
        Self {
            services: [first, second],
            database_url: database_url.to_owned(),
            workspace,
            started: AtomicUsize::new(0),
        }
    }

    /// The fault may take the answer of a claim away, so that a run is owned and not driven at first.
    pub(super) fn expect_reclaims(&mut self) {
        self.services.iter_mut().for_each(Service::expect_reclaims);
    }

    /// Asks a replica for a run until it is accepted.
    async fn insist(&self, service: &Service, told: &mut Told) {
        let name = format!("run-{}", self.started.fetch_add(1, Ordering::Relaxed));
        let begun = Instant::now();
        loop {
            let request = service
                .request(Method::POST, "/v1/agents/worker/invoke-iterative")
                .header("prefer", "respond-async")
                .header("idempotency-key", &name)
                .json(&json!({"inputs": {"name": name}}));
            let since = Instant::now();
            let answer = answer(request).await;
            if answer.status.is_success() {
                let run_id = answer.body["run_id"].as_str().unwrap().to_owned();
                told.accepted.push(Accepted { name, run_id });
                return;
            }
            let code = (answer.status.as_u16(), &answer.body["code"]);
            assert_eq!(code, (503, &json!("STORE_UNAVAILABLE")), "{:#}", answer.body);
            assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
            told.refused.push(since.elapsed());
            assert!(begun.elapsed() < PATIENCE, "{name} is not accepted");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Starts so many runs at once, in turn at each replica.
    pub(super) async fn begin(&self, count: usize) -> Told {
        let starts = (0..count).map(|number| async move {
            let mut told = Told::default();
            self.insist(&self.services[number % 2], &mut told).await;
            told
        });
        let mut told = Told::default();
        for one in futures::future::join_all(starts).await {
            told.add(one);
        }
        told
    }

    /// Callers that start one run after the other.
    pub(super) fn call(self: &Arc<Self>, callers: usize) -> Callers {
        let is_over = Arc::<AtomicBool>::default();
        let tasks = (0..callers).map(|caller| {
            let (site, is_over) = (Arc::clone(self), Arc::clone(&is_over));
            tokio::spawn(async move {
                let mut told = Told::default();
                while !is_over.load(Ordering::Relaxed) {
                    site.insist(&site.services[caller % 2], &mut told).await;
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
                told
            })
        });
        Callers { tasks: tasks.collect(), is_over }
    }

    /// A connection to the database itself.
    pub(super) async fn database(&self) -> PgConnection {
        PgConnection::connect(&self.database_url).await.unwrap()
    }

    /// Waits until a counting statement returns at least this many; returns the count.
    pub(super) async fn until_counted(&self, sql: &str, least: i64) -> i64 {
        let begun = Instant::now();
        let mut database = self.database().await;
        loop {
            let count = counted(&mut database, sql).await;
            if count >= least {
                return count;
            }
            assert!(begun.elapsed() < PATIENCE, "{count} of {least}: {sql}\n{}", self.logs());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until these runs have ended.
    pub(super) async fn ended(&self, told: &Told) {
        let runs: Vec<String> =
            told.accepted.iter().map(|run| format!("'{}'", run.run_id)).collect();
        let ended = format!(
            "SELECT (NOT EXISTS (SELECT FROM runs WHERE finished_at IS NULL AND id IN ({})))::int::bigint",
            runs.join(", ")
        );
        self.until_counted(&ended, 1).await;
    }

    /// Compares what callers were told with what is stored, when all runs have ended.
    pub(super) async fn found(&self, told: &Told) -> Found {
        let mut found = Found::default();
        let mut database = self.database().await;
        let rows: Vec<(String, String, i64, i64, i64, i64, i64)> =
            sqlx::query_as(AssertSqlSafe(journals())).fetch_all(&mut database).await.unwrap();
        let stored: BTreeMap<&str, _> = rows.iter().map(|row| (row.0.as_str(), row)).collect();
        assert_eq!(stored.len(), rows.len(), "a run has one row");
        for run in &told.accepted {
            let file = self.workspace.path().join("default").join(&run.name);
            let lines = std::fs::read_to_string(file).unwrap_or_default();
            match stored.get(run.run_id.as_str()) {
                None => found.lost += 1,
                Some(row) if row.1 != "completed" => found.not_completed += 1,
                Some(_) if lines.len() > LINES.len() => found.doubled += 1,
                Some(_) if lines != LINES => found.lost += 1,
                Some(_) => found.completed += 1,
            }
        }
        for (run, _, gaps, ends, attempts, resumptions, crashes) in &rows {
            let wrong = [
                (*gaps != 0, &mut found.torn),
                (*ends != 1 || *attempts != 1, &mut found.doubled),
                (*resumptions != 0 || *crashes != 0, &mut found.taken_over),
            ];
            for (is_wrong, count) in wrong {
                if is_wrong {
                    *count += 1;
                    println!(
                        "{run}: {gaps} gaps, {ends} ends, {attempts} attempts, {resumptions} resumptions, {crashes} crashes"
                    );
                }
            }
        }
        let dead = counted(&mut database, "SELECT count(*) FROM replicas WHERE dead").await;
        found.taken_over += usize::try_from(dead).unwrap();
        found
    }

    pub(super) fn logs(&self) -> String {
        self.services.iter().map(Service::log).collect::<Vec<_>>().join("\n\n")
    }

    /// Asserts that nothing is wrong, and says in one line what was measured.
    pub(super) async fn conclude(&self, fault: &str, injections: usize, told: &Told) {
        self.ended(told).await;
        let found = self.found(told).await;
        println!(
            "{fault}: {injections} injections, {} accepted, {} refused (slowest {:?}), {found:?}",
            told.accepted.len(),
            told.refused.len(),
            told.slowest()
        );
        let expected = Found { completed: told.accepted.len(), ..Found::default() };
        assert_eq!(found, expected, "{fault}\n{}", self.logs());
        assert!(!self.logs().contains("declared dead"), "{}", self.logs());
        assert!(!self.logs().contains("a commit was refused"), "{}", self.logs());
    }
}

/// Of each run: its id and status, gaps in its journal, how often it ended, began and was resumed,
/// and how many crashes are counted.
fn journals() -> String {
    let times = |event: &str| {
        format!("array_length(string_to_array(j.events, '\"{event}\"'), 1)::bigint - 1")
    };
    let ends = ["run.completed", "run.failed", "run.cancelled"].map(times).join(" + ");
    let (attempts, resumptions) = (times("attempt.started"), times("run.resumed"));
    format!(
        "SELECT r.id::text, r.status, j.gaps + (j.last <> r.next_seq - 1)::int::bigint, \
         {ends}, {attempts}, {resumptions}, r.crash_count \
         FROM runs r CROSS JOIN LATERAL ( \
             SELECT count(*) FILTER (WHERE e.first_seq <> e.expected) AS gaps, \
                 max(e.seq) AS last, string_agg(e.events, '') AS events \
             FROM (SELECT seq, first_seq, events, \
                 coalesce(lag(seq) OVER (ORDER BY seq), 0) + 1 AS expected \
                 FROM run_events WHERE run_id = r.id) e) j"
    )
}

pub(super) async fn counted(database: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(database).await.unwrap()
}

pub(super) async fn execute(database: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(database).await.unwrap();
}

/// Those who start runs in the background.
pub(super) struct Callers {
    tasks: Vec<JoinHandle<Told>>,
    is_over: Arc<AtomicBool>,
}

impl Callers {
    /// Ends them; what they were told.
    pub(super) async fn told(self) -> Told {
        self.is_over.store(true, Ordering::Relaxed);
        let mut told = Told::default();
        for caller in self.tasks {
            told.add(caller.await.unwrap());
        }
        told
    }
}

/// The answer to a question that must be refused for want of the database; how long it took.
pub(super) async fn refused(service: &Service, path: &str) -> Option<Duration> {
    let since = Instant::now();
    let answer = service.get(path).await;
    if answer.status == 200 {
        return None;
    }
    let code: (u16, &Value) = (answer.status.as_u16(), &answer.body["code"]);
    assert_eq!(code, (503, &json!("STORE_UNAVAILABLE")), "{:#}", answer.body);
    assert!(answer.headers.contains_key("retry-after"), "{answer:?}");
    Some(since.elapsed())
}
