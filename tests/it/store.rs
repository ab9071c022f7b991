//! One conformance suite for the store, run against SQLite and PostgreSQL.
//!
//! A test takes a [`Db`] and says what every store promises; [`on_both`] runs it on each. What only
//! one database has, such as its lock file or its backends, is tested beside, in the same files.

mod approvals;
mod audit_chain;
mod budgets;
mod claimers;
mod families;
mod group_commit;
mod idempotency;
mod journal;
mod lists;
mod memory;
mod ownership;
// A release build of the service does not ask for plans.
#[cfg(debug_assertions)]
mod plans;
mod rate_limits;
mod retention;
mod run_limits;
mod sessions;
mod stats;
mod usage;
mod workspaces;

use std::sync::Arc;

use chrono::{DateTime, Utc};
use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use sqlx::Connection;
use tempfile::TempDir;
use toolloop::event::{
    ApprovalBasis, AuditAction, AuditRecord, Awaited, CallFailure, Circumstances, Event,
    ModelResponded, RunEvent, ToolCallBlocked, ToolCallCompleted, ToolCallStarted, WaitKind,
};
use toolloop::message::{AssistantMessage, CallTarget, FinishReason, ToolCall, Turn, Usage};
use toolloop::run::{
    Caller, Consumption, Effect, Labels, Outcome, RunKind, RunOrigin, RunStatus, TerminationReason,
    Totals, TraceContext,
};
use toolloop::store::{
    self, AuditRow, DefinitionSnapshot, DeletedRun, Idempotency, NewRun, Page, QueuePlace,
    RemovedFiles, RunWrite, Store, StoreError, WriteOutcome,
};
use uuid::Uuid;

use crate::postgres_cluster;

/// Deleted runs that leave no files.
fn no_files(_: &[DeletedRun]) -> BoxFuture<'static, RemovedFiles> {
    std::future::ready(RemovedFiles::default()).boxed()
}

/// A migrated store of its own.
pub(crate) struct Db {
    pub(crate) store: Arc<Store>,
    pub(crate) url: String,
    /// The files, for as long as the test lives.
    dir: Option<TempDir>,
}

/// A directory and the URL of a database in it that does not exist yet.
pub(crate) fn fresh_sqlite() -> (TempDir, String) {
    let dir = TempDir::new().unwrap();
    let url = format!("sqlite://{}", dir.path().join("data/toolloop.db").display());
    (dir, url)
}

impl Db {
    pub(crate) async fn sqlite() -> Self {
        let (dir, url) = fresh_sqlite();
        Self::open(url, Some(dir)).await
    }

    pub(crate) async fn postgres() -> Self {
        Self::open(postgres_cluster::fresh_database().await, None).await
    }

    async fn open(url: String, dir: Option<TempDir>) -> Self {
        let store = store::open(&url, 12, false).await.unwrap();
        store.migrate().await.unwrap();
        Self { store, url, dir }
    }

    /// Closes the store and opens it again, as a restart does.
    async fn reopen(self) -> Self {
        self.store.close().await;
        Self::open(self.url, self.dir).await
    }

    async fn commit_one(&self, owner: &str, write: &RunWrite) -> WriteOutcome {
        self.store.commit(owner, std::slice::from_ref(write)).await.unwrap().outcomes[0]
    }

    /// Commits again what must be accepted: the answer to an earlier try was lost.
    async fn commit_again(&self, owner: &str, write: &RunWrite) {
        self.commit(owner, &RunWrite { is_repeated: true, ..write.clone() }).await;
    }

    /// Commits what must be accepted.
    async fn commit(&self, owner: &str, write: &RunWrite) {
        assert_eq!(self.commit_one(owner, write).await, WriteOutcome::Committed);
    }

    /// Asks for the run's end, and ends it as the replica does that claims it.
    async fn cancel(&self, run: Uuid) {
        self.store.request_cancel(TENANT, run, "key", None).await.unwrap();
        let claimed = self.store.claim_cancelled("ender", 10).await.unwrap().remove(0).run;
        assert_eq!(claimed.id, run);
        let mut script = Script::with(|new| new.id = run);
        (script.epoch, script.next_seq, script.new) = (claimed.epoch, claimed.next_seq, None);
        let end = RunEvent::cancelled("queued", (0, 0), None, String::new(), 0);
        self.commit("ender", &script.write(vec![end])).await;
    }

    /// Changes the database behind the store's back.
    async fn execute(&self, sql: &str) {
        let sql = sqlx::raw_sql(sqlx::AssertSqlSafe(sql));
        if self.store.kind() == "postgres" {
            sql.execute(&mut sqlx::PgConnection::connect(&self.url).await.unwrap()).await.unwrap();
        } else {
            let mut database = sqlx::SqliteConnection::connect(&self.url).await.unwrap();
            sql.execute(&mut database).await.unwrap();
        }
    }

    async fn journal(&self, run: Uuid) -> Vec<Event> {
        self.store.events(TENANT, run, 0, 1000).await.unwrap()
    }

    async fn status(&self, run: Uuid) -> RunStatus {
        self.store.run(TENANT, run).await.unwrap().unwrap().status
    }
}

/// Runs each test on both databases, as `sqlite::<name>` and `postgres::<name>`.
macro_rules! on_both {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(crate::store::Db::sqlite().await).await })+
        }
        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() { super::$name(crate::store::Db::postgres().await).await })+
        }
    };
}
use on_both;

const TENANT: &str = "acme";

fn now() -> DateTime<Utc> {
    DateTime::from_timestamp_micros(Utc::now().timestamp_micros()).unwrap()
}

fn page<C>(limit: u32, after: Option<C>) -> Page<C> {
    Page { limit, after }
}

/// A run under construction: numbers events, keeps totals, and makes the writes of its owner.
struct Script {
    id: Uuid,
    epoch: i64,
    next_seq: i64,
    totals: Totals,
    caller: Arc<Caller>,
    origin: Arc<RunOrigin>,
    new: Option<Arc<NewRun>>,
}

impl Script {
    /// A run that starts owned.
    fn owned() -> Self {
        Self::with(|_| {})
    }

    /// A run that starts in the queue.
    fn queued() -> Self {
        let mut script = Self::with(|new| new.status = RunStatus::Queued);
        script.epoch = 0;
        script
    }

    fn with(change: impl FnOnce(&mut NewRun)) -> Self {
        let id = Uuid::now_v7();
        let definition =
            DefinitionSnapshot { hash: "d1".repeat(32), json: r#"{"name":"reader"}"#.into() };
        let mut new = NewRun {
            id,
            agent: "reader".into(),
            agent_version: "1".into(),
            definition: Arc::new(definition),
            kind: RunKind::Iterative,
            status: RunStatus::Running,
            inputs: Arc::new(json!({"task": "count"})),
            overrides: json!({}),
            session_id: None,
            session_place: None,
            parent_run_id: None,
            metadata: json!({}),
            created_at: now(),
            idempotency: None,
            traceparent: None,
            webhook: None,
            queue: QueuePlace::default(),
        };
        change(&mut new);
        let scopes = vec!["agents:invoke".into(), "tools:execute".into()];
        let caller = Arc::new(Caller { subject: "key-1".into(), tenant: TENANT.into(), scopes });
        let origin = RunOrigin {
            tenant: TENANT.into(),
            subject: "key-1".into(),
            agent: new.agent.clone(),
            agent_version: "1".into(),
            definition_hash: new.definition.hash.clone(),
            model: None,
            is_child: new.parent_run_id.is_some(),
            session_id: new.session_id.clone(),
            created_at: new.created_at,
            is_observed: false,
            webhook: new.webhook.clone(),
            trace: TraceContext::of_run(new.id, None, 0.0),
        };
        Self {
            id: new.id,
            epoch: 1,
            next_seq: 1,
            totals: Totals::default(),
            caller,
            origin: Arc::new(origin),
            new: Some(Arc::new(new)),
        }
    }

    fn write(&mut self, happened: Vec<RunEvent>) -> RunWrite {
        let mut events = Vec::new();
        for what in happened {
            self.totals.apply(&what);
            events.push(Event { seq: self.next_seq, at: now(), run_id: self.id, what });
            self.next_seq += 1;
        }
        RunWrite {
            run_id: self.id,
            epoch: self.epoch,
            caller: self.caller.clone(),
            new: self.new.take(),
            origin: self.origin.clone(),
            events,
            audit: Vec::new(),
            totals: self.totals.clone(),
            park: None,
            is_repeated: false,
        }
    }

    /// The write that begins it.
    fn start(&mut self) -> RunWrite {
        match &self.new {
            Some(new) if new.status == RunStatus::Queued => {
                self.write(vec![RunEvent::RunQueued {}])
            }
            _ => self.write(vec![started(), RunEvent::AttemptStarted { attempt: 1 }]),
        }
    }
}

fn started() -> RunEvent {
    let turns = vec![Turn::User("{\"task\":\"count\"}".into())];
    RunEvent::RunStarted {
        system: "Count.".into(),
        turns,
        single_shot: false,
        history: 0,
        warnings: vec!["careful".into()],
    }
}

fn call(tool: &str, arguments: &str) -> ToolCall {
    let target = CallTarget::Tool;
    ToolCall {
        id: Uuid::now_v7(),
        provider_id: "p1".into(),
        name: tool.into(),
        arguments: arguments.into(),
        target,
    }
}

fn responded(iteration: u32, tool_calls: &[&ToolCall]) -> RunEvent {
    let tool_calls: Vec<ToolCall> = tool_calls.iter().copied().cloned().collect();
    RunEvent::ModelResponded(ModelResponded {
        attempt: 1,
        iteration,
        provider: "openai".into(),
        model: "gpt".into(),
        finish_reason: if tool_calls.is_empty() {
            FinishReason::Stop
        } else {
            FinishReason::ToolCalls
        },
        message: AssistantMessage {
            text: "Let me see.".into(),
            tool_calls,
            ..AssistantMessage::default()
        },
        usage: Usage {
            input_tokens: 100,
            output_tokens: 20,
            cost_micro_usd: Some(7),
            ..Usage::default()
        },
        latency_ms: 12,
        retries: 1,
        fallback: false,
        window: None,
        repeated: false,
        warnings: vec![],
    })
}

fn review(call: &ToolCall) -> RunEvent {
    RunEvent::ApprovalRequested(Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: None,
        escalation_target: None,
        actions: Arc::default(),
        call_id: call.id,
        kind: WaitKind::Review,
        tool: call.name.clone(),
        arguments: serde_json::from_str(&call.arguments).unwrap(),
        reason: "it is unknown whether it took effect".into(),
        expires_at: None,
        condition: None,
        child_run_id: None,
        input: None,
    })
}

fn dispatched(call: &ToolCall, effect: Effect) -> RunEvent {
    RunEvent::ToolCallStarted(ToolCallStarted {
        actions: Arc::default(),
        call_id: call.id,
        tool: call.name.clone(),
        effect,
        effect_key: "k".into(),
        decision: "allowed".into(),
        reason: None,
        consumes: Consumption::default(),
        on_unknown_outcome: toolloop::run::OnUnknownOutcome::Review,
        sandbox: None,
        circumstances: Circumstances::default(),
        reconcilable_by: None,
        arguments: None,
    })
}

fn answered(call: &ToolCall, failure: Option<CallFailure>) -> RunEvent {
    RunEvent::ToolCallCompleted(ToolCallCompleted {
        call_id: call.id,
        tool: call.name.clone(),
        target: call.target,
        content: format!("result of {}", call.name),
        failure,
        duration_ms: 3,
        cached: false,
        note: None,
        changes: None,
        changes_omitted: 0,
        sandbox: None,
        network: None,
        replaced: None,
        child_run_id: None,
        reconciled: None,
        found_out: false,
    })
}

fn blocked(call: &ToolCall) -> RunEvent {
    RunEvent::ToolCallBlocked(ToolCallBlocked {
        actions: Arc::default(),
        circumstances: Circumstances::default(),
        call_id: call.id,
        tool: call.name.clone(),
        rule: "autonomy".into(),
        decision: "blocked".into(),
        reason: "read only".into(),
        content: "Blocked: read only".into(),
    })
}

fn completed(output: Value) -> RunEvent {
    let reason = TerminationReason::Completed;
    RunEvent::ended(
        Outcome::Completed {
            output,
            raw_response: "17".into(),
            reason,
            partial: false,
            unchecked: vec![],
        },
        40,
    )
}

/// Whether a row has what was recorded of a call.
fn is_record_of(row: &AuditRow, record: &AuditRecord) -> bool {
    let AuditRow { at, action, call_id, tool, rule, decision, reason, arguments, outcome, .. } =
        row;
    *action == AuditAction::ToolCall
        && (*at, *call_id, tool, rule)
            == (
                record.at,
                Some(record.call_id),
                &Some(record.tool.clone()),
                &Some(record.rule.clone()),
            )
        && (decision, reason, arguments) == (&record.decision, &record.reason, &record.arguments)
        && (outcome, row.duration_ms) == (&record.outcome, record.duration_ms)
}

fn audited(call: &ToolCall, decision: &str) -> AuditRecord {
    AuditRecord {
        labels: Labels::default(),
        at: now(),
        call_id: call.id,
        tool: call.name.clone(),
        rule: "none".into(),
        pattern: None,
        decision: decision.into(),
        reason: None,
        arguments: call.arguments.clone(),
        outcome: "succeeded".into(),
        duration_ms: Some(3),
        result_bytes: Some(7),
    }
}

#[tokio::test]
async fn a_url_of_another_scheme_is_refused_without_repeating_it() {
    for url in ["mysql://root:hunter2@db/x", "nonsense hunter2", "postgres://u:hunter2@[broken"] {
        let error = store::open(url, 4, false).await.err().unwrap();
        assert!(matches!(error, StoreError::Failed(_)), "{error}");
        assert!(!error.to_string().contains("hunter2"), "{error}");
    }
}

#[tokio::test]
async fn a_second_process_on_the_same_file_is_refused() {
    let db = Db::sqlite().await;
    let links = TempDir::new().unwrap();
    let link = links.path().join("link.db");
    std::os::unix::fs::symlink(db.url.strip_prefix("sqlite://").unwrap(), &link).unwrap();
    for url in [db.url.clone(), format!("sqlite://{}", link.display())] {
        let error = store::open(&url, 4, false).await.err().unwrap();
        assert!(
            matches!(&error, StoreError::Locked(why) if why.contains("another toolloop process")),
            "{error}"
        );
    }
    db.reopen().await.store.ping().await.unwrap();
}

#[tokio::test]
async fn a_store_that_is_not_migrated_does_not_answer_pings() {
    for url in [fresh_sqlite(), (TempDir::new().unwrap(), postgres_cluster::empty_database().await)]
    {
        let store = store::open(&url.1, 10, false).await.unwrap();
        assert!(store.ping().await.is_err());
        store.migrate().await.unwrap();
        store.migrate().await.unwrap();
        store.ping().await.unwrap();
    }
}

on_both! {
    a_schema_one_step_ahead_is_used_and_one_further_ahead_is_refused,
}

async fn a_schema_one_step_ahead_is_used_and_one_further_ahead_is_refused(db: Db) {
    let newer = |version: u32| {
        format!(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
             SELECT {version}, 'newer', success, checksum, 0 FROM _sqlx_migrations WHERE version = 1"
        )
    };
    db.execute(&newer(2)).await;
    let db = db.reopen().await;
    db.store.ping().await.unwrap();
    let mut script = Script::queued();
    db.commit("me", &script.start()).await;
    db.execute(&newer(3)).await;
    let error = db.store.migrate().await.unwrap_err();
    assert!(error.to_string().contains("2 migrations ahead"), "{error}");
}

#[tokio::test]
async fn an_unreachable_postgres_is_a_failure_that_may_pass() {
    // The port is taken, so that no other test listens there.
    let silent = tokio::net::TcpSocket::new_v4().unwrap();
    silent.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = silent.local_addr().unwrap().port();
    let error = store::open(&format!("postgres://u:hunter2@127.0.0.1:{port}/x"), 10, false)
        .await
        .err()
        .unwrap();
    assert!(error.is_transient(), "{error}");
    assert!(!error.to_string().contains("hunter2"), "{error}");
}
