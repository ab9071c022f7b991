//! Runs whose journals are damaged: each ends visibly, nothing else ends with it, and a reader of such a
//! journal is told which event cannot be read.

use serde_json::{Value, json};

use crate::approvals::text;
use crate::claims::{ASKER, ASKING, change};
use crate::service::{Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_run_whose_journal_does_not_fit_its_row_ends,
    a_run_whose_request_is_missing_or_cannot_be_read_ends,
    a_call_under_way_of_a_run_that_cannot_go_on_is_recorded,
    a_run_whose_child_or_itself_has_lost_its_last_events_ends,
    a_cancel_reaches_the_child_of_a_run_whose_row_cannot_be_read,
    missing_events_are_named_to_every_reader,
    an_impossible_order_of_events_is_named_to_every_reader,
    a_session_goes_on_without_a_run_that_cannot_be_read,
    a_replay_goes_on_behind_a_run_that_cannot_be_read,
}

const BOSS: &str =
    "model: scripted/boss\ntools: ['agent:asker']\nenable_double_confirmation: false\n";
const DELEGATING: &str = "
steps:
  - tool_calls: [{tool: 'agent:asker', arguments: {}}]
  - text: 'told: {{ results[0] }}'
";

async fn service(db: Db) -> Service {
    Setup::new()
        .agent("asker", ASKER)
        .scenario("asker", ASKING)
        .agent("boss", BOSS)
        .scenario("boss", DELEGATING)
        .start(db)
        .await
}

fn path(id: &str) -> String {
    format!("/v1/runs/{id}")
}

/// A run of this agent that waits for an approval: its id, and the run and the call that it waits for.
async fn parked(service: &Service, agent: &str) -> [String; 3] {
    parked_in(service, agent, &json!({})).await
}

async fn parked_in(service: &Service, agent: &str, body: &Value) -> [String; 3] {
    let run = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), body).await.body;
    assert_eq!(run["status"], "awaiting_approval", "{run:#}");
    let pending = &run["pending"][0];
    let asking = pending["run_id"].as_str().unwrap_or_else(|| text(&run, "run_id"));
    [text(&run, "run_id"), asking, text(pending, "call_id")].map(str::to_owned)
}

async fn approve(service: &Service, run: &str, call: &str) {
    let told = service.post(&format!("/v1/runs/{run}/tool-calls/{call}/approve"), &json!({})).await;
    assert_eq!(told.status, 200, "{:#}", told.body);
}

/// Changes the last row of a run's journal.
async fn change_last(service: &Service, run: &str, change_it: &str) {
    let last = format!("(SELECT max(seq) FROM run_events WHERE run_id = '{run}')");
    let sql = format!("{change_it} WHERE run_id = '{run}' AND seq = {last}");
    change(service, &sql).await;
}

const LOST: &str = "DELETE FROM run_events";
const EMPTIED: &str = "UPDATE run_events SET events = '[]'";

async fn is_interrupted(service: &Service, run: &str) -> String {
    let ended = service.until(&path(run), |run| run["finished_at"].is_string()).await;
    assert_eq!(
        (&ended["status"], &ended["error"]["code"]),
        (&json!("failed"), &json!("INTERRUPTED"))
    );
    text(&ended["error"], "message").to_owned()
}

async fn a_run_whose_journal_does_not_fit_its_row_ends(db: Db) {
    let service = service(db).await;
    let [beside, _, call] = parked(&service, "asker").await;
    let behind = "UPDATE runs SET next_seq = next_seq - 1";
    for (number, damage) in [LOST, EMPTIED, behind].into_iter().enumerate() {
        for is_cancelled in [false, true] {
            let [run, _, call] = parked(&service, "asker").await;
            let events = service.get(&format!("{}/events?limit=1000", path(&run))).await.body;
            let last = events["data"].as_array().unwrap().len();
            if damage == behind {
                change(&service, &format!("{behind} WHERE id = '{run}'")).await;
            } else {
                change_last(&service, &run, damage).await;
            }
            if is_cancelled {
                let cancel = service.post(&format!("{}/cancel", path(&run)), &json!({})).await;
                assert_eq!(cancel.status, 202, "{:#}", cancel.body);
            } else {
                approve(&service, &run, &call).await;
            }
            let message = is_interrupted(&service, &run).await;
            let says = message.contains("its journal cannot be read: event ");
            assert!(says && !message.contains("expected"), "{number}: {message}");
            let of_end = format!("{}/events?after={last}", path(&run));
            let end = service.get(&of_end).await.body;
            assert_eq!(end["data"][0]["type"], "run.failed", "{number}: {end:#}");
        }
    }
    let metrics = service.get("/metrics").await.body;
    let none = "toolloop_runs_reclaimed_total{reason=\"lost_commit\"} 0\n";
    assert!(metrics.as_str().unwrap().contains(none), "{metrics}");
    approve(&service, &beside, &call).await;
    service.until(&path(&beside), |run| run["status"] == "completed").await;
}

async fn a_run_whose_request_is_missing_or_cannot_be_read_ends(db: Db) {
    let service = service(db).await;
    let unreadable = "UPDATE approvals SET status = 'approved', resolution = '{}'";
    for damage in [unreadable, "DELETE FROM approvals"] {
        let [run, ..] = parked(&service, "asker").await;
        change(&service, &format!("{damage} WHERE run_id = '{run}'")).await;
        let queued = "UPDATE runs SET status = 'queued', available_at = created_at";
        change(&service, &format!("{queued} WHERE id = '{run}'")).await;
        let message = is_interrupted(&service, &run).await;
        assert!(message.contains("a request that the run waits for"), "{message}");
    }
}

async fn a_call_under_way_of_a_run_that_cannot_go_on_is_recorded(db: Db) {
    let service = service(db).await;
    for state in ["dispatched", "unknown"] {
        let [run, _, call] = parked(&service, "asker").await;
        let begun = format!(
            "UPDATE tool_calls SET state = '{state}', effect = 'once' WHERE run_id = '{run}'"
        );
        change(&service, &begun).await;
        let behind = format!("UPDATE runs SET next_seq = next_seq - 1 WHERE id = '{run}'");
        change(&service, &behind).await;
        approve(&service, &run, &call).await;
        is_interrupted(&service, &run).await;
        let audit = service.get(&format!("/v1/audit?run_id={run}")).await.body;
        let records = audit["data"].as_array().unwrap();
        let lost: Vec<&Value> =
            records.iter().filter(|record| record["rule"] == "recovery").collect();
        assert_eq!(lost.len(), 1, "{audit:#}");
        assert_eq!(
            (&lost[0]["outcome"], &lost[0]["arguments"]["path"]),
            (&json!("unknown"), &json!("log.txt")),
            "{audit:#}"
        );
    }
    // One that cannot be read keeps no run from ending.
    let [run, _, call] = parked(&service, "asker").await;
    let unreadable = "UPDATE tool_calls SET state = 'dispatched', effect = 'once', attempt = -1";
    for damage in [
        format!("{unreadable} WHERE run_id = '{run}'"),
        format!("UPDATE runs SET next_seq = next_seq - 1 WHERE id = '{run}'"),
    ] {
        change(&service, &damage).await;
    }
    approve(&service, &run, &call).await;
    is_interrupted(&service, &run).await;
}

async fn a_run_whose_child_or_itself_has_lost_its_last_events_ends(db: Db) {
    let service = service(db).await;
    for damage in [LOST, EMPTIED] {
        let [boss, child, call] = parked(&service, "boss").await;
        change_last(&service, &child, damage).await;
        approve(&service, &child, &call).await;
        is_interrupted(&service, &child).await;
        let ended = service.until(&path(&boss), |run| run["finished_at"].is_string()).await;
        assert_eq!(ended["status"], "completed", "it was told: {ended:#}");

        let [boss, child, call] = parked(&service, "boss").await;
        change_last(&service, &boss, damage).await;
        approve(&service, &child, &call).await;
        service.until(&path(&child), |run| run["finished_at"].is_string()).await;
        is_interrupted(&service, &boss).await;
    }
}

async fn a_cancel_reaches_the_child_of_a_run_whose_row_cannot_be_read(db: Db) {
    let service = service(db).await;
    let [boss, child, _] = parked(&service, "boss").await;
    change(&service, &format!("UPDATE runs SET kind = 'odd' WHERE id = '{boss}'")).await;
    let cancel = format!("{}/cancel", path(&boss));
    let told = service.post(&cancel, &json!({})).await;
    assert_eq!((told.status.as_u16(), text(&told.body, "code")), (500, "INTERNAL"));
    assert!(text(&told.body, "detail").contains("row in the database"), "{:#}", told.body);
    let ended = service.until(&path(&child), |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "cancelled", "{ended:#}");
    change(&service, &format!("UPDATE runs SET kind = 'iterative' WHERE id = '{boss}'")).await;
    let told = service.post(&cancel, &json!({})).await;
    assert!(told.status.is_success(), "{:#}", told.body);
    service.until(&path(&boss), |run| run["status"] == "cancelled").await;
}

/// A run in a session, of whose journal one row is missing, or the last: its id, and the first event
/// that is missing.
async fn damaged_in(service: &Service, session: &str, is_end: bool) -> (String, i64) {
    let [run, _, call] = parked_in(service, "asker", &json!({"session_id": session})).await;
    approve(service, &run, &call).await;
    service.until(&path(&run), |run| run["status"] == "completed").await;
    let rows = format!("FROM run_events WHERE run_id = '{run}'");
    let events = service.get(&format!("{}/events?limit=1000", path(&run))).await.body;
    let events = events["data"].as_array().unwrap();
    let wanted = if is_end { "run.completed" } else { "approval.requested" };
    let place = events.iter().position(|event| event["type"] == wanted).unwrap();
    let seq = events[place]["seq"].as_i64().unwrap();
    change(service, &format!("DELETE {rows} AND seq >= {seq} AND first_seq <= {seq}")).await;
    let mut first = 0;
    for after in 0..seq {
        let page = service.get(&format!("{}/events?after={after}&limit=1", path(&run))).await;
        if page.status != 200 {
            first = after + 1;
            break;
        }
    }
    assert!(first > 0, "the missing event {seq} is left out silently");
    (run, first)
}

async fn missing_events_are_named_to_every_reader(db: Db) {
    let service = service(db).await;
    for (session, is_end) in [("middle", false), ("end", true)] {
        let (run, first) = damaged_in(&service, session, is_end).await;
        let events = format!("{}/events?after={}", path(&run), first - 1);
        // Of a run that has lost its end, the row itself cannot be shown.
        let first = if is_end { String::new() } else { format!("{first} ") };
        let (of_event, of_run) =
            (format!("Event {first}"), format!("of the run {run} cannot be read"));
        let mut readers = vec![
            events,
            format!("{}/messages", path(&run)),
            format!("/v1/sessions/{session}/messages"),
        ];
        if is_end {
            readers.push(path(&run));
        } else {
            readers.push(format!("/v1/sessions/{session}"));
        }
        for reader in readers {
            let answer = service.get(&reader).await;
            let named = (answer.status.as_u16(), &answer.body["code"]);
            assert_eq!(named, (500, &json!("JOURNAL_UNREADABLE")), "{reader}: {:#}", answer.body);
            let detail = text(&answer.body, "detail");
            assert!(
                detail.starts_with(&of_event) && detail.contains(&of_run),
                "{reader}: {detail}"
            );
        }
        // A search leaves out what cannot be served.
        let found = service.get(&format!("/v1/runs?q={run}")).await;
        assert_eq!(found.status, 200, "{:#}", found.body);
        let count = found.body["data"].as_array().unwrap().len();
        assert_eq!(count, usize::from(!is_end), "{:#}", found.body);
        if is_end {
            continue;
        }
        let files = service.get(&format!("{}/files", path(&run))).await;
        assert_eq!(files.status, 200, "{:#}", files.body);
        assert_eq!(files.body["data"][0]["path"], "log.txt", "{:#}", files.body);
        let stream = service.request(reqwest::Method::GET, &format!("{}/events", path(&run)));
        let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
        let stream = stream.text().await.unwrap();
        assert!(stream.contains(&format!(": event {first}cannot be read\n")), "{stream}");
        assert!(stream.contains("event: run.completed\n"), "{stream}");
    }
}

async fn completed_in(service: &Service, session: &str) -> String {
    let [run, _, call] = parked_in(service, "asker", &json!({"session_id": session})).await;
    approve(service, &run, &call).await;
    service.until(&path(&run), |run| run["status"] == "completed").await;
    run
}

const MISORDERED: &str =
    "UPDATE run_events SET events = replace(events, 'model.responded', 'attempt.started')";

async fn an_impossible_order_of_events_is_named_to_every_reader(db: Db) {
    let service = service(db).await;
    let run = completed_in(&service, "s").await;
    change(&service, &format!("{MISORDERED} WHERE run_id = '{run}'")).await;
    let readers = [
        format!("{}/messages", path(&run)),
        "/v1/sessions/s".into(),
        "/v1/sessions/s/messages".into(),
    ];
    for reader in readers {
        let answer = service.get(&reader).await;
        let named = (answer.status.as_u16(), &answer.body["code"]);
        assert_eq!(named, (500, &json!("JOURNAL_UNREADABLE")), "{reader}: {:#}", answer.body);
        let detail = text(&answer.body, "detail");
        let of_run = format!("of the run {run} cannot be read");
        assert!(detail.starts_with("Event ") && detail.contains(&of_run), "{reader}: {detail}");
    }
}

/// A damaged run gives later ones nothing, and they are taken to have read everything that it may have
/// read.
async fn a_session_goes_on_without_a_run_that_cannot_be_read(db: Db) {
    let service = service(db).await;
    let emptied = "UPDATE run_events SET events = '[{'";
    for (number, damage) in [LOST, EMPTIED, emptied, MISORDERED].into_iter().enumerate() {
        let session = format!("s{number}");
        let body = json!({"session_id": session});
        let good = completed_in(&service, &session).await;
        let damaged = completed_in(&service, &session).await;
        if damage == MISORDERED {
            change(&service, &format!("{damage} WHERE run_id = '{damaged}'")).await;
        } else {
            change_last(&service, &damaged, damage).await;
        }
        let invoke = "/v1/agents/asker/invoke-iterative";
        let dry = json!({"session_id": session, "dry_run": true});
        let dry = service.post(invoke, &dry).await;
        assert_eq!(dry.status, 200, "{number}: {:#}", dry.body);
        assert!(dry.body["warnings"].to_string().contains(&damaged), "{number}: {:#}", dry.body);

        let goes_on = async |run: String| {
            let run = service.until(&path(&run), |run| run["status"] == "awaiting_approval").await;
            assert!(run["warnings"].to_string().contains(&damaged), "{number}: {run:#}");
            assert!(!run["warnings"].to_string().contains(&good), "{number}: {run:#}");
            assert_eq!(run["labels"], json!(["untrusted", "private"]), "{number}: {run:#}");
            let id = text(&run, "run_id").to_owned();
            let events = service.get(&format!("{}/events?limit=1000", path(&id))).await.body;
            let loaded = &events["data"].as_array().unwrap().iter().find_map(|event| {
                (event["type"] == "session.loaded").then(|| event["data"]["runs"].clone())
            });
            assert!(loaded.is_some(), "{number}: {events:#}");
            text(&run["pending"][0], "call_id").to_owned()
        };
        let [direct, ..] = parked_in(&service, "asker", &body).await;
        let call = goes_on(direct.clone()).await;
        approve(&service, &direct, &call).await;
        service.until(&path(&direct), |run| run["status"] == "completed").await;

        let request = service.request(reqwest::Method::POST, invoke).json(&body);
        let queued = answer(request.header("prefer", "respond-async")).await;
        assert_eq!(queued.status, 202, "{number}: {:#}", queued.body);
        goes_on(text(&queued.body, "run_id").to_owned()).await;
    }
}

async fn a_replay_goes_on_behind_a_run_that_cannot_be_read(db: Db) {
    let service = service(db).await;
    let replayed = async || {
        let answer = service.post("/v1/agents/asker/policy/replay", &json!({})).await;
        assert_eq!(answer.status, 200, "{:#}", answer.body);
        ["runs", "calls", "unchanged", "unknown"].map(|count| answer.body[count].clone())
    };
    for _ in 0..2 {
        let [run, _, call] = parked(&service, "asker").await;
        approve(&service, &run, &call).await;
        service.until(&path(&run), |run| run["status"] == "completed").await;
    }
    assert_eq!(replayed().await, [2, 2, 2, 0].map(Value::from));
    let rewritten =
        "UPDATE run_events SET events = replace(events, 'model.responded', 'from.the_future')";
    for damage in [rewritten, "DELETE FROM run_events"] {
        let [run, ..] = parked(&service, "asker").await;
        let of_answer = "events LIKE '%approval.requested%'";
        change(&service, &format!("{damage} WHERE run_id = '{run}' AND {of_answer}")).await;
    }
    assert_eq!(replayed().await, [4, 4, 2, 2].map(Value::from));
    // So does one of a child run whose parent cannot be read.
    let [boss, child, call] = parked(&service, "boss").await;
    approve(&service, &child, &call).await;
    service.until(&path(&boss), |run| run["status"] == "completed").await;
    change_last(&service, &boss, LOST).await;
    assert_eq!(replayed().await, [5, 5, 3, 2].map(Value::from));
}
