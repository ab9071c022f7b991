//! Transactions that PostgreSQL gives up for the sake of others: no caller notices.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};
use sqlx::{Connection, PgConnection};

use super::site::{counted, execute};
use crate::approvals::text;
use crate::fault_rounds::rounds;
use crate::postgres_cluster;
use crate::service::{Service, Setup};

const READER: &str = "
model: scripted/reader
tools: [file_ops]
memory: {}
enable_double_confirmation: false
";
const READING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]
  - text: done
";
const ASKER: &str = "
model: scripted/asker
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";
const ASKING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]
  - text: done
";

/// Every thirteenth statement that writes is given up, in turn for a deadlock and as one that cannot be
/// serialised. No transaction has thirteen.
const CONFLICTS: &str = "
CREATE SEQUENCE written;
CREATE SEQUENCE given_up;
CREATE FUNCTION give_up() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('written') % 13 = 0 THEN
        IF nextval('given_up') % 2 = 0 THEN
            RAISE SQLSTATE '40P01' USING MESSAGE = 'deadlock detected';
        END IF;
        RAISE SQLSTATE '40001' USING MESSAGE = 'could not serialize access';
    END IF;
    RETURN NULL;
END $$;
";
const TABLES: [&str; 8] = [
    "runs",
    "approvals",
    "audit_log",
    "api_keys",
    "observations",
    "run_places",
    "replicas",
    "usage_added",
];

async fn start() -> Service {
    let url = postgres_cluster::fresh_database().await;
    let limits = "[runtime]\nlease = \"2s\"\nmax_concurrent_runs_per_tenant = 1000";
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READING)
        .agent("asker", ASKER)
        .scenario("asker", ASKING)
        .agent("slow", &READER.replace("scripted/reader", "scripted/slow"))
        .scenario("slow", "steps: [{delay_ms: 600000, text: late}]")
        .config(limits)
        .start_on(url)
        .await
}

async fn database(service: &Service) -> PgConnection {
    PgConnection::connect(&service.database_url).await.unwrap()
}

/// Everything that callers do which writes; six runs begin and end.
async fn act(service: &Service, session: &str) {
    let told = async |method: Method, path: &str, body: Value, status: u16| {
        let request = service.request(method, path);
        let request = if body.is_null() { request } else { request.json(&body) };
        let answer = crate::service::answer(request).await;
        assert_eq!(answer.status, status, "{path}: {:#}\n{}", answer.body, service.log());
        answer.body
    };
    let invoke = "/v1/agents/reader/invoke-iterative";
    for _ in 0..4 {
        let body = json!({"session_id": session});
        let run = told(Method::POST, invoke, body, 200).await;
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    told(Method::DELETE, "/v1/memory?agent=reader", Value::Null, 200).await;
    told(Method::DELETE, &format!("/v1/sessions/{session}"), Value::Null, 204).await;

    let slow = service.enqueue("slow").await;
    service.until(&slow, |run| run["status"] == "running").await;
    told(Method::POST, &format!("{slow}/cancel"), json!({"reason": "enough"}), 202).await;
    service.until(&slow, |run| run["status"] == "cancelled").await;

    let asked = service.enqueue("asker").await;
    let parked = service.until(&asked, |run| run["status"] == "awaiting_approval").await;
    let call = text(&parked["pending"][0], "call_id");
    told(Method::POST, &format!("{asked}/tool-calls/{call}/approve"), json!({}), 200).await;
    service.until(&asked, |run| run["status"] == "completed").await;

    let wanted = json!({"name": session, "scopes": ["runs:read"]});
    let key = told(Method::POST, "/v1/keys", wanted, 201).await;
    told(Method::DELETE, &format!("/v1/keys/{}", text(&key, "id")), Value::Null, 204).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn transactions_that_postgres_aborts_are_retried() {
    let service = start().await;
    let mut admin = database(&service).await;
    execute(&mut admin, CONFLICTS).await;
    for table in TABLES {
        let trigger = format!(
            "CREATE TRIGGER give_up BEFORE INSERT OR UPDATE OR DELETE ON {table} \
             FOR EACH STATEMENT EXECUTE FUNCTION give_up()"
        );
        execute(&mut admin, &trigger).await;
    }
    let mut acts = 0;
    for round in 0..rounds(2) {
        let names: Vec<String> = (0..4).map(|of| format!("session-{round}-{of}")).collect();
        futures::future::join_all(names.iter().map(|session| act(&service, session))).await;
        acts += names.len();
    }
    let given_up = "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM given_up";
    let injections = counted(&mut admin, given_up).await;
    println!("conflicts: {injections} injections, {} runs ended, no caller noticed", 6 * acts);
    assert!(injections >= 20, "only {injections} transactions were given up");
    assert!(!service.log().contains("writes wait for the store"), "{}", service.log());
    // What remains of it all: one entry for each request, and one effect of each approved call.
    let twice = "SELECT count(*) FROM (SELECT run_id FROM audit_log \
        WHERE action = 'run.cancel_requested' GROUP BY 1 HAVING count(*) > 1) twice";
    assert_eq!(counted(&mut admin, twice).await, 0);
    let file = service.dir.path().join("workspace/default/log.txt");
    assert_eq!(std::fs::read_to_string(file).unwrap().len(), acts);
}

/// An approval locks its run first and what waits second; the transaction beside it does the reverse.
#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_that_deadlocks_is_retried() {
    let service = start().await;
    let mut admin = database(&service).await;
    let (mut round, mut found) = (0, 0);
    while round < rounds(1) || found == 0 {
        round += 1;
        // On a busy machine one may have given up, after two seconds, before the other asked.
        assert!(round <= rounds(1) + 10, "there was no deadlock");
        let asked = service.enqueue("asker").await;
        let parked = service.until(&asked, |run| run["status"] == "awaiting_approval").await;
        let call = text(&parked["pending"][0], "call_id");
        let id = asked.rsplit_once('/').unwrap().1;
        let mut other = database(&service).await;
        let first = format!(
            "SET deadlock_timeout = '10s'; BEGIN; \
             SELECT FROM approvals WHERE run_id = '{id}' FOR UPDATE"
        );
        execute(&mut other, &first).await;
        let approve = format!("{asked}/tool-calls/{call}/approve");
        let approve = service.request(Method::POST, &approve).json(&json!({}));
        let approved = tokio::spawn(crate::service::answer(approve));
        let waits = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() \
            AND application_name = 'toolloop' AND wait_event_type = 'Lock'";
        while counted(&mut admin, waits).await == 0 {
            assert!(!approved.is_finished(), "it waits for nothing");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        execute(&mut other, &format!("SELECT FROM runs WHERE id = '{id}' FOR UPDATE")).await;
        execute(&mut other, "ROLLBACK").await;
        let approved = approved.await.unwrap();
        let before = found;
        found = deadlocks(&mut admin, before).await;
        if approved.status == 503 && found == before {
            continue;
        }
        assert_eq!(approved.status, 200, "{:#}\n{}", approved.body, service.log());
        service.until(&asked, |run| run["status"] == "completed").await;
    }
    println!("deadlocks: {found} in {round} rounds, each approval was taken");
}

/// How many deadlocks were counted, more than so many if there were; that is told a little later.
async fn deadlocks(admin: &mut PgConnection, known: i64) -> i64 {
    let deadlocks = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let mut found = known;
    for _ in 0..500 {
        found = counted(admin, deadlocks).await;
        if found > known {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    found
}
