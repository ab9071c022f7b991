//! Replicas on one database and one workspace, and what is the case of their runs.

use std::path::PathBuf;
use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection, PgConnection, SqliteConnection};
use tempfile::TempDir;
use uuid::Uuid;

use super::effects::{Effects, TOOLS};
use crate::service::{Db, Service, Setup, answer};

pub(super) const LEASE: Duration = Duration::from_secs(2);

/// A program that says that it was started, and the first time for a run it goes on for ever, before
/// or after its effect.
const PROGRAMS: &str = r#"
tools:
  - name: before
    description: Holds before its effect.
    command:
      - sh
      - -c
      - |
        cd "$TOOLLOOP_WORKSPACE"
        if [ ! -e "held/$TOOLLOOP_RUN_ID" ]; then : > "held/$TOOLLOOP_RUN_ID"; sleep 600; fi
        echo x >> "effects/$TOOLLOOP_RUN_ID"
  - name: after
    description: Holds after its effect.
    command:
      - sh
      - -c
      - |
        cd "$TOOLLOOP_WORKSPACE"
        echo x >> "effects/$TOOLLOOP_RUN_ID"
        if [ ! -e "held/$TOOLLOOP_RUN_ID" ]; then : > "held/$TOOLLOOP_RUN_ID"; exec sh -c 'sleep 600; :' "$TOOLLOOP_RUN_ID"; fi
"#;

pub(super) struct Site {
    pub(super) replicas: Vec<Service>,
    pub(super) effects: Effects,
    pub(super) workspace: TempDir,
}

/// An agent that makes these calls, and a scenario that has it do so; `steps` is YAML.
pub(super) fn agent(setup: Setup, name: &str, steps: &str) -> Setup {
    let definition = format!(
        "model: scripted/{name}\ntools: ['http:effects/*', 'script:programs/*']\n\
         enable_double_confirmation: false\nlimits: {{max_iterations: 200, max_iterations_per_attempt: 200}}\n\
         governance: {{autonomy: full, paths: {{write: ['./**']}}}}\n"
    );
    setup.agent(name, &definition).scenario(name, steps)
}

impl Site {
    pub(super) async fn start(
        db: Db,
        size: usize,
        lease: Duration,
        more: impl Fn(Setup, usize) -> Setup,
    ) -> Self {
        let (effects, workspace) = (Effects::start().await, TempDir::new().unwrap());
        for directory in ["held", "effects"] {
            std::fs::create_dir_all(workspace.path().join("default").join(directory)).unwrap();
        }
        let setup = |at: usize| {
            let config = format!(
                "[runtime]\nlease = \"{}s\"\n[tools.workspace]\ndir = \"{}\"",
                lease.as_secs(),
                workspace.path().display()
            );
            let tools = format!("base_url: {}\n{TOOLS}", effects.url);
            let setup = Setup::new().config(&config).tools("effects", &tools);
            more(setup.tools("programs", PROGRAMS), at)
        };
        let mut replicas = vec![setup(0).start(db).await];
        while replicas.len() < size {
            let database = replicas[0].database_url.clone();
            replicas.push(setup(replicas.len()).start_on(database).await);
        }
        Self { replicas, effects, workspace }
    }

    /// Starts a run that this replica drives; its path. The caller waits for it.
    pub(super) fn call(&self, at: usize, agent: &str, inputs: &Value) -> String {
        let id = Uuid::now_v7();
        let path = format!("/v1/agents/{agent}/invoke-iterative");
        let request = self.replicas[at].request(Method::POST, &path);
        let request = request.json(&json!({"run_id": id, "inputs": inputs}));
        tokio::spawn(request.send()); // where the replica dies there is no answer
        format!("/v1/runs/{id}")
    }

    /// Queues a run; its path.
    pub(super) async fn enqueue(&self, at: usize, agent: &str, inputs: &Value) -> String {
        let path = format!("/v1/agents/{agent}/invoke-iterative");
        let request = self.replicas[at].request(Method::POST, &path);
        let request = request.header("prefer", "respond-async").json(&json!({ "inputs": inputs }));
        let accepted = answer(request).await;
        assert_eq!(accepted.status, 202, "{:#}", accepted.body);
        format!("/v1/runs/{}", accepted.body["run_id"].as_str().unwrap())
    }

    /// Waits until the program of a run was started.
    pub(super) async fn until_program_is_held(&self, run: &str) {
        let mark = self.file("held", run);
        let held = async {
            while !mark.exists() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let held = tokio::time::timeout(Duration::from_mins(5), held).await;
        assert!(held.is_ok(), "the program of {run} was not started: {}", self.logs());
    }

    /// How often the program of a run took effect.
    pub(super) fn effects_of_program(&self, run: &str) -> usize {
        let effects = std::fs::read_to_string(self.file("effects", run)).unwrap_or_default();
        effects.lines().count()
    }

    fn file(&self, directory: &str, run: &str) -> PathBuf {
        self.workspace.path().join("default").join(directory).join(id_of(run))
    }

    pub(super) fn logs(&self) -> String {
        self.replicas.iter().map(Service::log).collect::<Vec<_>>().join("\n\n")
    }
}

pub(super) fn id_of(run: &str) -> &str {
    run.rsplit('/').next().unwrap()
}

pub(super) async fn events(service: &Service, run: &str) -> Vec<Value> {
    let mut events = Vec::new();
    loop {
        let page = format!("{run}/events?limit=200&after={}", events.len());
        let more = service.get(&page).await.body["data"].as_array().unwrap().clone();
        if more.is_empty() {
            return events;
        }
        events.extend(more);
    }
}

pub(super) fn count(events: &[Value], kind: &str) -> usize {
    events.iter().filter(|event| event["type"] == kind).count()
}

/// Waits for the end of a run, which is that it completes, once, and without a gap in its journal.
pub(super) async fn until_completed(service: &Service, run: &str) -> Value {
    let ended = service.until(run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "completed", "{ended:#}");
    let events = events(service, run).await;
    let numbers: Vec<u64> = events.iter().map(|event| event["seq"].as_u64().unwrap()).collect();
    assert_eq!(numbers, (1..=events.len() as u64).collect::<Vec<_>>(), "{run}");
    let ends = ["run.completed", "run.failed", "run.cancelled"];
    assert_eq!(ends.map(|end| count(&events, end)), [1, 0, 0], "{events:#?}");
    ended
}

/// What a statement counts in the database.
pub(super) async fn counted(database_url: &str, sql: &str) -> i64 {
    if database_url.starts_with("postgres") {
        let mut database = PgConnection::connect(database_url).await.unwrap();
        return sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut database).await.unwrap();
    }
    let mut database = SqliteConnection::connect(database_url).await.unwrap();
    sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&mut database).await.unwrap()
}

/// How many answers of the model the process has had.
pub(super) async fn answers(service: &Service) -> usize {
    let metrics = service.get("/metrics").await.body;
    let of_model = metrics.as_str().unwrap().lines().filter_map(|line| {
        let (name, count) = line.rsplit_once(' ')?;
        let is_answer = name.contains("model_calls_total{") && name.contains("succeeded");
        count.parse::<usize>().ok().filter(|_| is_answer)
    });
    of_model.sum()
}

pub(super) async fn until_answered(service: &Service, count: usize) {
    let all = async {
        while answers(service).await < count {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let all = tokio::time::timeout(Duration::from_mins(5), all).await;
    assert!(all.is_ok(), "the answers did not come\n{}", service.log());
}
