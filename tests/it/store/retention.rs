//! Expired runs are deleted with all that belongs to them; runs in progress and parked runs stay.

use std::sync::Mutex;

use chrono::TimeDelta;
use sqlx::{Connection, PgConnection, SqliteConnection};
use tokio::task::JoinSet;
use toolloop::store::{AuditFilter, Closed, Closing, RunFilter, StatsFilter};

use super::*;

on_both! {
    ended_runs_are_deleted_with_all_their_rows,
    runs_that_go_on_or_are_parked_stay,
    a_webhook_that_nothing_sends_keeps_its_run_for_a_while,
    a_batch_is_no_larger_than_asked_for,
    two_that_delete_at_once_share_the_work,
    which_definitions_a_session_still_uses_is_told,
    a_definition_goes_when_no_run_needs_it,
    the_usage_of_deleted_runs_is_still_counted,
    audit_records_have_a_retention_of_their_own,
}

/// A run that called a tool and ended.
async fn ended(db: &Db, mut script: Script) -> Uuid {
    let read = call("file_ops", "{}");
    db.commit("me", &script.start()).await;
    let asked = super::approvals::requested(&read);
    let called =
        vec![responded(1, &[&read]), asked, dispatched(&read, Effect::Read), answered(&read, None)];
    let mut called = script.write(called);
    called.audit = vec![audited(&read, "allowed")];
    db.commit("me", &called).await;
    db.commit("me", &script.write(vec![completed(json!(1))])).await;
    script.id
}

fn of_tenant(tenant: &str) -> Script {
    let mut script = Script::owned();
    script.caller = Arc::new(Caller { tenant: tenant.into(), ..Caller::clone(&script.caller) });
    script
}

/// How many rows there are, by table.
async fn rows(db: &Db) -> Vec<i64> {
    let tables = ["runs", "run_events", "iterations", "tool_calls", "approvals", "definitions"];
    let counts = tables.map(|table| format!("(SELECT count(*) FROM {table})")).join(", ' ', ");
    let counts = db.sql(&format!("SELECT concat({counts})")).await;
    counts.split(' ').map(|count| count.parse().unwrap()).collect()
}

impl Db {
    /// Runs a statement beside the store; the first column of the first row, if there is one.
    pub(super) async fn sql(&self, statement: &str) -> String {
        let statement = sqlx::AssertSqlSafe(statement.to_owned());
        let value = if self.store.kind() == "postgres" {
            let mut connection = PgConnection::connect(&self.url).await.unwrap();
            sqlx::query_scalar(statement).fetch_optional(&mut connection).await.unwrap()
        } else {
            let mut connection = SqliteConnection::connect(&self.url).await.unwrap();
            sqlx::query_scalar(statement).fetch_optional(&mut connection).await.unwrap()
        };
        value.unwrap_or_default()
    }

    /// As if no run had started with any definition for two hours and a minute before `at`.
    async fn age_definitions(&self, at: DateTime<Utc>) {
        let time = self.written(at - TimeDelta::minutes(121));
        self.sql(&format!("UPDATE definitions SET used_at = {time}")).await;
    }

    /// A time in SQL.
    fn written(&self, at: DateTime<Utc>) -> String {
        let micros = at.timestamp_micros();
        match self.store.kind() {
            "postgres" => format!("timestamptz 'epoch' + {micros} * interval '1 microsecond'"),
            _ => micros.to_string(),
        }
    }
}

async fn ended_runs_are_deleted_with_all_their_rows(db: Db) {
    let old = [ended(&db, Script::owned()).await, ended(&db, of_tenant("other")).await];
    let before = now();
    let new = ended(&db, Script::owned()).await;
    assert_eq!(db.store.delete_ended(old_enough(), 10, &no_files).await.unwrap(), 0);
    assert_eq!(db.store.delete_ended(before, 10, &no_files).await.unwrap(), 2);
    assert_eq!(rows(&db).await, [1, 3, 1, 1, 1, 1]);
    for (tenant, run) in [(TENANT, old[0]), ("other", old[1])] {
        assert_eq!(db.store.run(tenant, run).await.unwrap(), None);
    }
    assert_eq!(db.journal(new).await.len(), 7);
    let audit = db.store.audit(TENANT, &AuditFilter::default(), &page(9, None)).await.unwrap();
    let kept: Vec<_> = audit.iter().map(|row| (row.action, row.run_id)).collect();
    let (deleted, call) = (AuditAction::RunsDeleted, AuditAction::ToolCall);
    assert_eq!(kept, [(deleted, None), (call, Some(new)), (call, Some(old[0]))]);
    assert_eq!(
        db.store.audit("other", &AuditFilter::default(), &page(9, None)).await.unwrap().len(),
        2
    );
    assert_eq!(db.store.delete_ended(before, 10, &no_files).await.unwrap(), 0);
}

/// Before everything that a test does.
fn old_enough() -> DateTime<Utc> {
    now() - TimeDelta::hours(1)
}

/// After everything that a test has done.
fn later() -> DateTime<Utc> {
    now() + TimeDelta::hours(1)
}

async fn runs_that_go_on_or_are_parked_stay(db: Db) {
    let (mut running, mut queued, mut parked) =
        (Script::owned(), Script::queued(), Script::owned());
    let shell = call("shell", "{}");
    db.commit("me", &running.start()).await;
    db.commit("me", &queued.start()).await;
    db.commit("gone", &parked.start()).await;
    let asks = vec![responded(1, &[&shell]), dispatched(&shell, Effect::Once), review(&shell)];
    let park = RunWrite { park: Some(RunStatus::NeedsReview), ..parked.write(asks) };
    db.commit("gone", &park).await;
    let before = rows(&db).await;
    ended(&db, Script::owned()).await;
    assert_eq!(db.store.delete_ended(later(), 10, &no_files).await.unwrap(), 1);
    assert_eq!(rows(&db).await, before);
    for (script, status) in [
        (&running, RunStatus::Running),
        (&queued, RunStatus::Queued),
        (&parked, RunStatus::NeedsReview),
    ] {
        assert_eq!(db.status(script.id).await, status);
    }
    // A cancelled one ends now, however old it is.
    db.cancel(queued.id).await;
    assert_eq!(db.store.delete_ended(later(), 10, &no_files).await.unwrap(), 1);
    assert_eq!(db.store.run(TENANT, queued.id).await.unwrap(), None);
}

async fn a_webhook_that_nothing_sends_keeps_its_run_for_a_while(db: Db) {
    let told = Script::with(|new| new.webhook = Some("https://example.com".into()));
    let told = ended(&db, told).await;
    for (days, deleted) in [(6, 0), (8, 1)] {
        let time = db.written(now() - TimeDelta::days(days));
        db.sql(&format!("UPDATE webhook_outbox SET retry_until = {time}")).await;
        let found = db.store.delete_ended(later(), 10, &no_files).await.unwrap();
        assert_eq!(found, deleted, "after {days} days");
    }
    assert_eq!(db.store.run(TENANT, told).await.unwrap(), None);
}

async fn a_batch_is_no_larger_than_asked_for(db: Db) {
    for number in 0..7 {
        ended(&db, of_tenant(["a", "b", "c"][number % 3])).await;
    }
    let mut deleted = Vec::new();
    for _ in 0..4 {
        deleted.push(db.store.delete_ended(later(), 3, &no_files).await.unwrap());
    }
    assert_eq!(deleted, [3, 3, 1, 0]);
}

async fn two_that_delete_at_once_share_the_work(db: Db) {
    for _ in 0..30 {
        ended(&db, Script::owned()).await;
    }
    let other = match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let mut workers = JoinSet::new();
    for store in [db.store.clone(), other] {
        workers.spawn(async move {
            let mut deleted = 0;
            let all = RunFilter::default();
            while !store.runs(TENANT, &all, &page(1, None)).await.unwrap().is_empty() {
                deleted += store.delete_ended(later(), 2, &no_files).await.unwrap();
            }
            deleted
        });
    }
    assert_eq!(workers.join_all().await.into_iter().sum::<u64>(), 30);
    assert_eq!(rows(&db).await[..5], [0; 5]);
}

/// A run of this session with this definition.
fn in_session(definition: &str) -> Script {
    let json = format!("{{\"name\":\"{definition}\"}}");
    let definition = DefinitionSnapshot { hash: definition.repeat(64), json };
    Script::with(|new| {
        new.session_id = Some("s".into());
        new.definition = Arc::new(definition);
    })
}

async fn which_definitions_a_session_still_uses_is_told(db: Db) {
    let staying = Arc::new(Mutex::new(Vec::new()));
    let told = |runs: &[DeletedRun]| {
        let definitions = runs.iter().flat_map(|run| run.staying.iter().map(ToString::to_string));
        staying.lock().unwrap().push(definitions.collect::<Vec<_>>());
        no_files(runs)
    };
    let mut goes_on = in_session("b");
    db.commit("me", &goes_on.start()).await;
    ended(&db, in_session("a")).await;
    assert_eq!(db.store.delete_ended(later(), 9, &told).await.unwrap(), 1);
    db.commit("me", &goes_on.write(vec![completed(json!(1))])).await;
    assert_eq!(db.store.delete_ended(later(), 9, &told).await.unwrap(), 1);
    assert_eq!(*staying.lock().unwrap(), [vec![r#"{"name":"b"}"#.to_owned()], vec![]]);
}

#[tokio::test]
async fn postgres_one_replica_at_a_time_deletes_runs() {
    let db = Db::postgres().await;
    let other = store::open(&db.url, 12, false).await.unwrap();
    for _ in 0..2 {
        ended(&db, in_session("a")).await;
    }
    let meanwhile = move |_: &[DeletedRun]| {
        let other = Arc::clone(&other);
        async move {
            assert_eq!(other.delete_ended(later(), 1, &no_files).await.unwrap(), 0);
            RemovedFiles::default()
        }
        .boxed()
    };
    for _ in 0..2 {
        assert_eq!(db.store.delete_ended(later(), 1, &meanwhile).await.unwrap(), 1);
    }
}

async fn a_definition_goes_when_no_run_needs_it(db: Db) {
    let before = later();
    let script = |hash: &str| {
        let definition =
            DefinitionSnapshot { hash: hash.repeat(64), json: format!("{{\"name\":\"{hash}\"}}") };
        Script::with(|new| new.definition = Arc::new(definition))
    };
    let mut parked = script("a");
    db.commit("me", &parked.start()).await;
    ended(&db, script("b")).await;
    assert_eq!(db.store.delete_ended(before, 10, &no_files).await.unwrap(), 1);
    assert_eq!(rows(&db).await[5], 2, "both were used a moment ago");

    db.age_definitions(before).await;
    ended(&db, script("a")).await;
    // Not while there may be more to delete.
    assert_eq!(db.store.delete_ended(before, 1, &no_files).await.unwrap(), 1);
    assert_eq!(rows(&db).await[5], 2);
    assert_eq!(db.store.delete_ended(before, 1, &no_files).await.unwrap(), 0);
    assert_eq!(db.sql("SELECT hash FROM definitions").await, "a".repeat(64));

    // Another process finds it gone and stores it again; a run that needs one always finds it.
    let db = db.reopen().await;
    ended(&db, script("b")).await;
    assert_eq!(rows(&db).await[5], 2);
    db.age_definitions(before).await;
    db.store.release("me").await.unwrap();
    db.store.delete_ended(before, 10, &no_files).await.unwrap();
    assert_eq!(db.store.claim("you", 1, "").await.unwrap()[0].definition, r#"{"name":"a"}"#);

    // A replica that starts runs says so now and then: a definition in use is young.
    let db = db.reopen().await;
    db.commit("me", &script("a").start()).await;
    let used = "SELECT count(*) || '' FROM definitions WHERE used_at > ";
    let recently = if db.store.kind() == "postgres" {
        "now() - interval '1 minute'"
    } else {
        "unixepoch('now', '-1 minute') * 1000000"
    };
    assert_eq!(db.sql(&format!("{used}{recently}")).await, "1");
}

async fn the_usage_of_deleted_runs_is_still_counted(db: Db) {
    let all =
        StatsFilter { since: old_enough() - TimeDelta::hours(1), until: later(), agent: None };
    for tenant in [TENANT, TENANT, "other"] {
        ended(&db, of_tenant(tenant)).await;
    }
    let mut unpriced = Script::with(|new| new.agent = "writer".into());
    db.commit("me", &unpriced.start()).await;
    let RunEvent::ModelResponded(mut response) = responded(1, &[]) else { unreachable!() };
    response.usage.cost_micro_usd = None;
    db.commit("me", &unpriced.write(vec![RunEvent::ModelResponded(response), completed(json!(1))]))
        .await;
    let mut before = Vec::new();
    for tenant in [TENANT, "other"] {
        before.push(db.store.usage_stats(tenant, &all, &page(9999, None)).await.unwrap());
    }
    assert_eq!((before[0].len(), before[0][0].runs, before[1][0].runs), (2, 2, 1));
    // One after the other, so that sums are added to sums.
    for left in [4, 3, 2, 1, 0] {
        assert_eq!(
            db.store.delete_ended(later(), 1, &no_files).await.unwrap(),
            u64::from(left > 0)
        );
        for (tenant, before) in [TENANT, "other"].iter().zip(&before) {
            assert_eq!(
                db.store.usage_stats(tenant, &all, &page(9999, None)).await.unwrap(),
                *before,
                "{left}"
            );
        }
    }
    ended(&db, Script::owned()).await;
    let after = db.store.usage_stats(TENANT, &all, &page(9999, None)).await.unwrap();
    assert_eq!(
        (after[0].runs, after[0].usage.cost_micro_usd),
        (3, before[0][0].usage.cost_micro_usd.map(|cost| cost / 2 * 3))
    );
    let one = StatsFilter { agent: Some("writer".into()), ..all.clone() };
    assert_eq!(
        db.store.usage_stats(TENANT, &one, &page(9999, None)).await.unwrap(),
        before[0][1..]
    );
    let none = StatsFilter { until: old_enough(), ..all };
    assert_eq!(db.store.usage_stats(TENANT, &none, &page(9999, None)).await.unwrap(), []);
}

async fn audit_records_have_a_retention_of_their_own(db: Db) {
    let run = ended(&db, Script::owned()).await;
    ended(&db, of_tenant("other")).await;
    let before = now();
    ended(&db, Script::owned()).await;
    let actions = async |tenant: &str| {
        let rows = db.store.audit(tenant, &AuditFilter::default(), &page(9, None)).await.unwrap();
        rows.iter().map(|row| row.action).collect::<Vec<_>>()
    };
    let (deleted, call) = (AuditAction::AuditDeleted, AuditAction::ToolCall);
    assert_eq!(
        db.store.delete_audit(later(), 10, &|_| None).await.unwrap(),
        0,
        "nothing is closed yet"
    );
    for tenant in [TENANT, "other"] {
        let closing = Closing { records: 1, settled: later(), aged: later() };
        while let Closed::Stretch(_) =
            db.store.close_stretch(tenant, closing, None, &|_| None).await.unwrap()
        {}
    }
    assert_eq!(db.store.delete_audit(old_enough(), 10, &|_| None).await.unwrap(), 0);
    assert_eq!(actions(TENANT).await, [call, call]);
    assert_eq!(
        db.store.delete_audit(before, 1, &|_| None).await.unwrap(),
        1,
        "no more than asked for"
    );
    assert_eq!(db.store.delete_audit(before, 10, &|_| None).await.unwrap(), 1);
    assert_eq!(
        (actions(TENANT).await, actions("other").await),
        (vec![deleted, call], vec![deleted])
    );
    assert!(db.store.run(TENANT, run).await.unwrap().is_some(), "runs have their own");
}
