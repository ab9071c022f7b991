//! The audit log through the API and the command line: its chain, its export, what each record names.
//!
//! | together with | test |
//! |---|---|
//! | API, command line, both stores, signatures | `the_chain_is_verified_where_it_is_asked_for` |
//! | tenants, scopes | the same |
//! | children, sessions, streams, dry runs | their calls are records like any other |
//! | crash, recovery, review | `crashes.rs`, `reviews.rs`: outcome `unknown` |
//! | a database that is changed under a service | `a_chain_that_is_replaced_under_a_service_is_not_signed` |
//! | replicas, retention, late records | `store/audit_chain.rs` |

use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use chrono::{DateTime, TimeDelta, Utc};
use serde_json::{Value, json};
use sqlx::{AssertSqlSafe, Connection};
use toolloop::runtime::AuditKey;
use toolloop::store::{self, Closed, Closing};

use crate::service::{Db, Service, Setup, Signal, command, on_both_stores};

on_both_stores! {
    audit_records_name_the_rule_and_its_entry,
    the_chain_is_verified_where_it_is_asked_for,
    a_key_wants_every_stretch_signed,
    a_changed_definition_is_recorded,
    a_changed_skill_is_recorded,
    a_chain_that_is_replaced_under_a_service_is_not_signed,
}

const READER: &str = "
model: scripted/reader
instructions: Read.
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {deny: ['secret/**']}}
";

const READS: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: "."}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: secret/token}}]
  - text: done
"#;

/// Closes what is there, as an hour later.
pub(crate) async fn close(service: &Service, key: Option<[u8; 32]>) {
    let store = store::open(&service.database_url, 12, false).await.unwrap();
    let now = Utc::now() + TimeDelta::seconds(1);
    let closing = Closing { records: 3, settled: now, aged: now };
    let key = AuditKey::new(key.as_ref().map(<[u8; 32]>::as_slice));
    let sign = |hash: &[u8]| key.as_ref().map(|key| key.sign(hash));
    while let Closed::Stretch(_) =
        store.close_stretch("default", closing, None, &sign).await.unwrap()
    {}
    store.close().await;
}

pub(crate) async fn execute(service: &Service, sql: &str) {
    let sql = sqlx::raw_sql(AssertSqlSafe(sql));
    let url = &service.database_url;
    if url.starts_with("sqlite") {
        sql.execute(&mut sqlx::SqliteConnection::connect(url).await.unwrap()).await.unwrap();
    } else {
        sql.execute(&mut sqlx::PgConnection::connect(url).await.unwrap()).await.unwrap();
    }
}

/// The command line on the service's database; exit code and standard output.
async fn toolloop(service: &Service, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = command(service.dir.path());
    command.args(arguments).args(["--database-url", &service.database_url]);
    command.env("AUDIT_KEY", BASE64_STANDARD.encode([7; 32]));
    let output = command.output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

/// The same through the API of the running service.
async fn asked(service: &Service, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = command(service.dir.path());
    command.args(arguments).args(["--server", &service.url(""), "--key", &service.key]);
    let output = command.output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    (output.status.code(), text)
}

async fn stop(service: &mut Service) {
    service.signal(Signal::TERM);
    assert_eq!(service.exit_code().await, Some(0));
}

/// A service that signs the stretches of its audit log.
async fn signing(db: Db) -> Service {
    Setup::new()
        .agent("reader", READER)
        .scenario("reader", READS)
        .file("notes.txt", "seventeen\n")
        .variable("AUDIT_KEY", &BASE64_STANDARD.encode([7; 32]))
        .config("[audit]\nkey_env = \"AUDIT_KEY\"")
        .start(db)
        .await
}

async fn the_chain_is_verified_where_it_is_asked_for(db: Db) {
    let mut service = signing(db).await;
    for _ in 0..4 {
        service.run("reader", &json!({})).await;
    }
    let key = json!({"name": "other", "tenant": "other", "scopes": ["audit:read"]});
    let foreign = service.post("/v1/keys", &key).await.body["key"].as_str().unwrap().to_owned();
    let blocked = service.get("/v1/audit?decision=blocked").await.body;
    let record = &blocked["data"][0];
    assert_eq!((&record["rule"], &record["pattern"]), (&json!("path"), &json!("secret/**")));
    assert_eq!(
        service.get("/v1/audit?rule=path&decision=blocked").await.body["data"],
        blocked["data"]
    );
    let hash = record["definition_hash"].as_str().unwrap();
    assert_eq!(hash, service.get("/v1/agents/reader").await.body["hash"].as_str().unwrap());
    assert!(record["result_bytes"].is_null(), "{record:#}");
    let done = service.get("/v1/audit?outcome=succeeded&tool=file_ops&limit=1").await.body;
    let run = done["data"][0]["run_id"].as_str().unwrap();
    let calls = service.get(&format!("/v1/runs/{run}/tool-calls")).await.body;
    let result = calls["data"][0]["result"].as_str().unwrap();
    assert_eq!(done["data"][0]["result_bytes"], result.len(), "{done:#}\n{calls:#}");
    stop(&mut service).await;
    close(&service, Some([7; 32])).await;
    let (code, said) = toolloop(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("as they were written; the newest is number"), "{said}");
    let (_, lines) = toolloop(&service, &["audit", "export"]).await;
    let records: Vec<Value> =
        lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert!(records.len() >= 9, "{lines}");
    let at = |record: &Value| record["at"].as_str().unwrap().parse::<DateTime<Utc>>().unwrap();
    assert!(records.is_sorted_by_key(|record| std::cmp::Reverse(at(record))));
    let (_, lines) = toolloop(&service, &["audit", "export", "--agent", "reader"]).await;
    let of_reader = records.iter().filter(|record| record["agent"] == "reader").count();
    assert_eq!((lines.lines().count(), of_reader > 0), (of_reader, true), "{lines}");
    let (_, lines) = toolloop(&service, &["audit", "export", "--ocsf"]).await;
    let event: Value = serde_json::from_str(lines.lines().last().unwrap()).unwrap();
    assert_eq!((&event["class_uid"], &event["type_uid"]), (&json!(6003), &json!(600_399)));
    assert!(event["time"].is_i64() && event["metadata"]["uid"].is_string(), "{event:#}");
    assert!(event["unmapped"]["labels"].is_array(), "{event:#}");

    let oldest = "(SELECT id FROM audit_log WHERE tenant = 'default' ORDER BY at, id LIMIT 1)";
    let tamper = format!("UPDATE audit_log SET reason = 'nothing' WHERE id = {oldest}");
    execute(&service, &tamper).await;
    let (code, said) = toolloop(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("stretch 1: a record was changed"), "{said}");
    service.restart().await;
    let listed = service.get("/v1/audit/stretches?limit=2").await.body;
    let found = &listed["data"];
    assert_eq!(found[0]["faults"].as_array().unwrap().len(), 1, "{listed:#}");
    assert_eq!((&found[1]["faults"], &found[1]["number"]), (&json!([]), &json!(2)));
    assert_eq!(found[1]["previous"], found[0]["hash"]);
    assert!(listed["next_cursor"].is_string(), "{listed:#}");
    service.key = foreign;
    assert_eq!(service.get("/v1/audit/stretches").await.body["data"], json!([]));
    assert_eq!(service.get("/v1/runs").await.status, 403);
}

async fn a_key_wants_every_stretch_signed(db: Db) {
    let mut service = signing(db).await;
    for _ in 0..2 {
        service.run("reader", &json!({})).await;
    }
    stop(&mut service).await;
    close(&service, None).await;
    let (code, said) = toolloop(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("stretch 1: it is unsigned"), "{said}");
    let (code, said) = toolloop(&service, &["audit", "verify", "--unsigned-until", "1"]).await;
    assert!(code == Some(1) && !said.contains("stretch 1:"), "{said}");
    assert!(said.contains("stretch 2: it is unsigned"), "{said}");
    let (code, said) = toolloop(&service, &["audit", "verify", "--unsigned-until", "99"]).await;
    assert_eq!(code, Some(0), "{said}");
    // Signing begins, and the key is replaced.
    service.restart().await;
    service.run("reader", &json!({})).await;
    stop(&mut service).await;
    close(&service, Some([7; 32])).await;
    let (code, said) = toolloop(&service, &["audit", "verify", "--unsigned-until", "99"]).await;
    assert_eq!(code, Some(0), "{said}");
    let keys = [BASE64_STANDARD.encode([8; 32]), BASE64_STANDARD.encode([7; 32])];
    for (keys, expected) in [(keys[0].clone(), 1), (keys.join(" "), 0)] {
        let mut command = command(service.dir.path());
        command.args(["audit", "verify", "--unsigned-until", "99"]);
        command.args(["--database-url", &service.database_url]).env("AUDIT_KEY", keys);
        let output = command.output().await.unwrap();
        assert_eq!(
            output.status.code(),
            Some(expected),
            "{}",
            String::from_utf8_lossy(&output.stdout)
        );
    }
    service.restart().await;
    let path = "/v1/audit?action=audit.signing_changed";
    let began = service.get(path).await.body;
    assert_eq!(began["data"][0]["arguments"]["signed"], true, "{began:#}");
    let wrong = service.get("/v1/audit/stretches?unsigned_until=-1").await;
    assert_eq!(wrong.status, 400, "{:#}", wrong.body);
}

async fn a_changed_definition_is_recorded(db: Db) {
    let service = Setup::new().agent("reader", READER).scenario("reader", READS).start(db).await;
    let records = || async {
        let audit = service.get("/v1/audit?action=definition.changed").await.body;
        audit["data"].as_array().unwrap().clone()
    };
    assert_eq!(records().await, Vec::<Value>::new(), "what is there at the start is no change");
    let told = READER.replace("model:", "description: Reads.\nmodel:");
    for (yaml, changes_policy) in [
        (told.clone(), false),
        (format!("{told}interceptors: {{after: [{{tool: '*', redact: x}}]}}\n"), true),
    ] {
        let before = records().await.len();
        service.write("agents/reader.yaml", &format!("name: reader\n{yaml}"));
        let path = "/v1/audit?action=definition.changed";
        let audit =
            service.until(path, |audit| audit["data"].as_array().unwrap().len() > before).await;
        let record = &audit["data"][0];
        assert_eq!(record["arguments"]["changes_policy"], changes_policy, "{record:#}");
        assert_eq!(
            (&record["subject"], &record["arguments"]["agent"]),
            (&json!("service"), &json!("reader"))
        );
        let shown = service.get("/v1/agents/reader").await.body;
        assert_eq!(record["arguments"]["definition_hash"], shown["hash"], "{record:#}");
    }
}

async fn a_changed_skill_is_recorded(db: Db) {
    let strict = "disallowed_tools: [file_ops]\n";
    let service = Setup::new()
        .agent("reader", READER)
        .scenario("reader", READS)
        .skill("careful", strict, "Look.")
        .start(db)
        .await;
    let told = async |before: usize| {
        let path = "/v1/audit?action=definition.changed";
        let audit =
            service.until(path, |audit| audit["data"].as_array().unwrap().len() > before).await;
        audit["data"][0]["arguments"].clone()
    };
    for (place, (front, changes_policy)) in [(strict, false), ("", true)].into_iter().enumerate() {
        let text = format!("---\nname: careful\ndescription: New.\n{front}---\nLook {place}.\n");
        service.write("skills/careful/SKILL.md", &text);
        let expected =
            json!({"skill": "careful", "changes_policy": changes_policy, "removed": false});
        assert_eq!(told(place).await, expected);
    }
    std::fs::remove_dir_all(service.dir.path().join("skills/careful")).unwrap();
    let expected = json!({"skill": "careful", "changes_policy": true, "removed": true});
    assert_eq!(told(2).await, expected);
}

/// An attacker who can write to the database changes a record and deletes the chain, so that the service
/// makes it anew.
async fn a_chain_that_is_replaced_under_a_service_is_not_signed(db: Db) {
    let mut service = signing(db).await;
    service.run("reader", &json!({})).await;
    stop(&mut service).await;
    let earlier = if service.database_url.starts_with("sqlite") {
        "at - 10800000000"
    } else {
        "at - interval '3 hours'"
    };
    execute(&service, &format!("UPDATE audit_log SET at = {earlier}")).await;
    service.restart().await; // which closes what is that old, and is not yet suspicious
    let closed = "/v1/audit/stretches";
    service.until(closed, |page| !page["data"].as_array().unwrap().is_empty()).await;
    let (code, said) = asked(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(0), "{said}");
    let note = "closed more than two hours after their newest records were written";
    assert!(said.contains("note: 1 stretches, from 1 to 1, were") && said.contains(note), "{said}");
    let (_, said) = asked(&service, &["audit", "verify", "--json"]).await;
    let told: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((&told["closed_late"][0]["number"], &told["faults"]), (&json!(1), &json!([])));

    let tamper = "UPDATE audit_log SET reason = 'nothing' WHERE decision = 'blocked'";
    execute(&service, &format!("{tamper}; DELETE FROM audit_stretches WHERE tenant = 'default'"))
        .await;
    tokio::time::sleep(Duration::from_secs(10)).await; // the service looks twice a minute
    let path = "/v1/audit?action=audit.chain_replaced";
    let found = service.until(path, |page| !page["data"].as_array().unwrap().is_empty()).await;
    let details = &found["data"][0]["arguments"];
    assert_eq!((&details["number"], &details["stored_number"]), (&json!(1), &Value::Null));
    service.until_logged("a closed stretch is missing or differs").await;
    assert_eq!(service.get(closed).await.body["data"], json!([]), "nothing is signed of it");
    let (code, said) = asked(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("stretch 1: a service that had it closed found it gone"), "{said}");
    // Another process, which knew nothing, closes it again: that is told, too.
    stop(&mut service).await;
    close(&service, Some([7; 32])).await;
    let (code, said) = toolloop(&service, &["audit", "verify"]).await;
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("stretch 1: 2 audit records say that signing changed"), "{said}");
}

/// A parked call that is approved keeps the rule that asked, and a call of a child is the child's.
async fn audit_records_name_the_rule_and_its_entry(db: Db) {
    let agent = "
model: scripted/worker
tools: ['file_*', 'recall', 'agent:reader']
memory: {}
enable_double_confirmation: false
governance:
  autonomy: full
  tool_policies: {'rec*': allow}
  paths: {read: [notes.txt, 'in/**'], write: ['out/**']}
";
    let scenario = r"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: out/a, content: x}}]
  - tool_calls: [{tool: recall, arguments: {query: x}}]
  - tool_calls: [{tool: 'agent:reader', arguments: {}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: other.txt}}]
  - text: done
";
    let service = Setup::new()
        .agent("worker", agent)
        .scenario("worker", scenario)
        .agent("reader", READER)
        .scenario("reader", READS)
        .file("notes.txt", "seventeen\n")
        .start(db)
        .await;
    let run = service.run("worker", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let path = format!("/v1/audit?run_id={}", run["run_id"].as_str().unwrap());
    let audit = service.get(&path).await.body;
    let told = |record: &Value| {
        json!([record["tool"], record["decision"], record["rule"], record["pattern"]])
    };
    let records: Vec<Value> = audit["data"].as_array().unwrap().iter().rev().map(told).collect();
    assert_eq!(
        json!(records),
        json!([
            ["file_ops", "allowed", "path", "notes.txt"],
            ["file_ops", "allowed", "path", "out/**"],
            ["recall", "allowed", "tool_policy", "rec*"],
            ["agent:reader", "allowed", "tools", "agent:reader"],
            ["file_ops", "blocked", "path", null],
        ]),
        "{audit:#}"
    );
    for (rule, count) in [("path", 3), ("tool_policy", 1), ("tools", 1), ("none", 0)] {
        let found = service.get(&format!("{path}&rule={rule}")).await.body;
        assert_eq!(found["data"].as_array().unwrap().len(), count, "{rule}: {found:#}");
    }
}
