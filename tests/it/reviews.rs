//! Calls that must not be repeated and that a crash left open: a person finds out, or the operator
//! has said what to do.

use serde_json::{Value, json};
use sqlx::{Connection, PgConnection, SqliteConnection};

use crate::approvals::{ended, file, paths, text, types};
use crate::service::{ADMIN_KEY, Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_call_that_happened_is_reported_to_the_model,
    a_call_that_did_not_happen_is_executed_now,
    a_review_shows_what_interceptors_made_of_the_call,
    an_unknown_outcome_is_reported_or_repeated_where_the_operator_says_so,
}

const ADDER: &str = "
model: scripted/adder
instructions: Add.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}}
";

const ADDING: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]
  - text: '{{ results[0] }}'
";

/// A run as a crash in the middle of its call leaves it: the call has taken effect, and nothing
/// says so.
pub async fn crashed(db: Db, options: &str) -> (Service, String) {
    let setup = Setup::new().agent("adder", &format!("{ADDER}{options}")).scenario("adder", ADDING);
    let service = setup.config("[runtime]\nlease = \"2s\"").start(db).await;
    let run = service.run("adder", &json!({})).await;
    assert_eq!(file(&service, "log.txt"), "x", "{run:#}");
    // The start of its call.
    let last = if options.contains("x-yields") { 6 } else { 5 };
    let changes = [
        &*format!("DELETE FROM run_events WHERE seq > {last}"),
        "DELETE FROM iterations WHERE number > 1",
        "UPDATE tool_calls SET state = 'dispatched', result_seq = NULL, finished_at = NULL, duration_ms = NULL",
        &*format!(
            "UPDATE runs SET status = 'running', owner = 'gone', next_seq = {last} + 1, \
             finished_at = NULL, termination_reason = NULL, latency_ms = NULL"
        ),
    ];
    match db {
        Db::Sqlite => {
            let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
            for change in changes {
                sqlx::query(sqlx::AssertSqlSafe(change)).execute(&mut database).await.unwrap();
            }
        }
        Db::Postgres => {
            let mut database = PgConnection::connect(&service.database_url).await.unwrap();
            for change in changes {
                sqlx::query(sqlx::AssertSqlSafe(change)).execute(&mut database).await.unwrap();
            }
        }
    }
    (service, format!("/v1/runs/{}", text(&run, "run_id")))
}

async fn in_review(service: &Service, run: &str) -> String {
    let parked = service.until(run, |run| run["status"] == "needs_review").await;
    let pending = &parked["pending"][0];
    assert_eq!(
        (&pending["kind"], &pending["tool"], &pending["expires_at"]),
        (&json!("review"), &json!("file_ops"), &Value::Null)
    );
    assert_eq!(
        pending["arguments"],
        json!({"operation": "append", "path": "log.txt", "content": "x"})
    );
    assert_eq!(service.get("/v1/approvals").await.body["data"][0]["kind"], "review");
    paths(&parked).1.remove(0)
}

/// How many stored answers have [`ADMIN_KEY`] in them.
async fn answers_with_the_key(service: &Service, db: Db) -> i64 {
    let count = "SELECT count(*) FROM approvals WHERE resolution LIKE '%0123456789abcdefghjk%'";
    match db {
        Db::Sqlite => {
            let mut database = SqliteConnection::connect(&service.database_url).await.unwrap();
            sqlx::query_scalar(count).fetch_one(&mut database).await.unwrap()
        }
        Db::Postgres => {
            let mut database = PgConnection::connect(&service.database_url).await.unwrap();
            sqlx::query_scalar(count).fetch_one(&mut database).await.unwrap()
        }
    }
}

async fn a_call_that_happened_is_reported_to_the_model(db: Db) {
    let (service, run) = crashed(db, "inputs: {type: object, x-yields: [untrusted]}").await;
    let call = in_review(&service, &run).await;
    let refused = service.post(&format!("{call}/approve"), &json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (409, &json!("NOT_AWAITING_APPROVAL"))
    );
    assert!(refused.body["detail"].as_str().unwrap().contains("`/resolve`"), "{:#}", refused.body);
    service.until_logged("run needs a review").await;
    let id = run.rsplit('/').next().unwrap();
    let log = service.log();
    let taken = log.lines().find(|line| line.contains("took the runs")).unwrap_or_default();
    assert!(taken.contains(id), "{id}\n{log}");
    for bad in [
        json!({}),
        json!({"outcome": "maybe"}),
        json!({"outcome": "did_not_happen", "result": "x"}),
    ] {
        assert_eq!(service.post(&format!("{call}/resolve"), &bad).await.status, 422, "{bad}");
    }
    let resolve = format!("{call}/resolve");
    let of_another = json!({"outcome": "happened", "seq": 1});
    let of_another = service.post(&resolve, &of_another).await;
    assert_eq!(of_another.body["code"], "NOT_AWAITING_APPROVAL", "{:#}", of_another.body);
    let seq = &service.get(&run).await.body["pending"][0]["seq"];
    let result = format!("one line more, {ADMIN_KEY}");
    let found = json!({"outcome": "happened", "result": result, "seq": seq});
    let (first, second) =
        tokio::join!(service.post(&resolve, &found), service.post(&resolve, &found));
    let mut statuses = [first.status.as_u16(), second.status.as_u16()];
    statuses.sort_unstable();
    assert_eq!(statuses, [200, 409], "{first:?}\n{second:?}");
    let done = ended(&service, &run).await;
    let told = text(&done["output"], "result");
    assert!(told.contains("took effect") && told.contains("one line more"), "{told}");
    assert_eq!(answers_with_the_key(&service, db).await, 0, "it keeps no secret of the service");
    assert_eq!(file(&service, "log.txt"), "x", "never twice");
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    let tools = service.get("/v1/stats/tools").await.body;
    assert_eq!(
        (&calls["data"][0]["duration_ms"], &tools["data"][0]["calls"], &tools["data"][0]["p50_ms"]),
        (&Value::Null, &json!(1), &Value::Null),
        "nothing is known of it"
    );
    let audit = service.get("/v1/audit?action=tool_call").await.body;
    let records = audit["data"].as_array().unwrap();
    let of =
        |rule: &str| records.iter().filter(|record| record["rule"] == rule).collect::<Vec<_>>();
    let (reviews, lost) = (of("review"), of("recovery"));
    assert_eq!((reviews.len(), &reviews[0]["subject"]), (1, &json!("testadmin")), "{audit:#}");
    assert_eq!(
        (&reviews[0]["decision"], &reviews[0]["outcome"]),
        (&json!("allowed"), &json!("succeeded"))
    );
    assert_eq!((lost.len(), &lost[0]["outcome"]), (1, &json!("unknown")), "{audit:#}");
    assert_eq!(lost[0]["arguments"]["path"], "log.txt", "{audit:#}");
    for record in [reviews[0], lost[0]] {
        assert_eq!(record["labels"], json!(["untrusted"]), "{audit:#}");
    }
}

async fn a_call_that_did_not_happen_is_executed_now(db: Db) {
    let (service, run) = crashed(db, "").await;
    let call = in_review(&service, &run).await;
    assert_eq!(
        service
            .post(&format!("{call}/resolve"), &json!({"outcome": "did_not_happen"}))
            .await
            .status,
        200
    );
    let done = ended(&service, &run).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(file(&service, "log.txt"), "xx", "a person said that it had not happened");
    let happened = types(&service, &run).await;
    assert_eq!(
        happened[4..9],
        [
            "tool_call.started",
            "run.resumed",
            "approval.requested",
            "run.resumed",
            "approval.resolved"
        ]
    );
}

async fn a_review_shows_what_interceptors_made_of_the_call(db: Db) {
    let rewrite =
        r#"interceptors: {before: [{tool: file_ops, rewrite: {/path: "'./' + args.path"}}]}"#;
    let (service, run) = crashed(db, rewrite).await;
    let parked = service.until(&run, |run| run["status"] == "needs_review").await;
    let executed = json!({"operation": "append", "path": "./log.txt", "content": "x"});
    assert_eq!(parked["pending"][0]["arguments"], executed, "{parked:#}");
    let events = service.get(&format!("{run}/events")).await.body;
    let of = |kind: &str| {
        let mut events = events["data"].as_array().unwrap().iter();
        events.find(|event| event["type"] == kind).unwrap()["data"].clone()
    };
    let (started, asked) = (of("tool_call.started"), of("approval.requested"));
    assert_eq!((&started["arguments"], &asked["arguments"]), (&executed, &executed));
    assert_eq!(asked["actions"], started["actions"], "{events:#}");
    assert!(!asked["actions"].as_array().unwrap().is_empty(), "{events:#}");
    let resolve = format!("{}/resolve", paths(&parked).1[0]);
    let found = service.post(&resolve, &json!({"outcome": "did_not_happen"})).await;
    assert_eq!(found.status, 200, "{found:?}");
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "log.txt"), "xx");
}

async fn an_unknown_outcome_is_reported_or_repeated_where_the_operator_says_so(db: Db) {
    let (service, run) =
        crashed(db, "tool_options: {file_ops: {on_unknown_outcome: report}}").await;
    let done = ended(&service, &run).await;
    let told = text(&done["output"], "result");
    assert!(told.contains("unknown"), "{told}");
    assert_eq!(file(&service, "log.txt"), "x");

    let (service, run) = crashed(db, "tool_options: {'file_*': {on_unknown_outcome: retry}}").await;
    let done = ended(&service, &run).await;
    assert_eq!(
        (&done["status"], file(&service, "log.txt").as_str()),
        (&json!("completed"), "xx"),
        "{done:#}"
    );
    assert_eq!(service.get("/v1/approvals?status=resolved").await.body["data"], json!([]));
}
