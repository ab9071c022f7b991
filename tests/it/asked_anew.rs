//! Calls that are asked about anew: an answer is for what the person saw.
//!
//! | together with | test |
//! |---|---|
//! | journal, list of approvals, calls side by side, edited arguments | `a_decision_is_taken_only_for_the_question_that_was_shown` |
//! | children | `stale_decisions_on_a_childs_call_are_refused` |
//! | another replica | `another_replica_knows_the_current_question` |
//! | escalations | `approvals::a_stop_condition_asks_whether_to_go_on` |
//! | reviews | `reviews` |
//! | rounds of input | `mcp_input::a_tool_asks_and_is_answered` |
//! | command line | `commands::deciding` |
//! | console | `console_anew` |

use serde_json::{Value, json};

use crate::approvals::{ended, file, paths, text};
use crate::script_tools::events;
use crate::service::{Answer, Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_decision_is_taken_only_for_the_question_that_was_shown,
    stale_decisions_on_a_childs_call_are_refused,
}

pub const LAPSED: &str = "An earlier approval lapsed: the call would now do something else.";

const WRITER: &str = "
model: scripted/writer
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";
const WRITES: &str = "
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: new.txt, content: by the model}}
      - {tool: file_ops, arguments: {operation: write, path: next.txt, content: as well}}
  - text: done
";
const LEAD: &str = "
model: scripted/lead
tools: ['agent:writer']
enable_double_confirmation: false
";
const DELEGATES: &str = "
steps:
  - tool_calls: [{tool: 'agent:writer', arguments: {}}]
  - text: done
";

/// `writer` makes two files, each of which is asked about; `lead` delegates to it.
pub fn setup() -> Setup {
    Setup::new()
        .agent("writer", WRITER)
        .scenario("writer", WRITES)
        .agent("lead", LEAD)
        .scenario("lead", DELEGATES)
        .file("old.txt", "old")
}

pub async fn parked(service: &Service, agent: &str) -> Value {
    let parked = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &json!({})).await;
    assert_eq!(parked.body["status"], "awaiting_approval", "{:#}", parked.body);
    assert_eq!(parked.body["pending"].as_array().unwrap().len(), 2, "{:#}", parked.body);
    parked.body
}

/// Answers a pending call, as what an event of this number has asked.
async fn decide(service: &Service, asked: &Value, verb: &str, seq: &Value) -> Answer {
    let (run, call) = (text(asked, "run_id"), text(asked, "call_id"));
    service.post(&format!("/v1/runs/{run}/tool-calls/{call}/{verb}"), &json!({"seq": seq})).await
}

/// Approves both calls, but a person has made the first file by then: the run as it asks anew.
pub async fn lapsed(service: &Service, run: &Value) -> Value {
    service.write("workspace/default/new.txt", "by a person");
    for asked in run["pending"].as_array().unwrap() {
        let approved = decide(service, asked, "approve", &asked["seq"]).await;
        assert_eq!(approved.status, 200, "{:#}", approved.body);
    }
    asks_anew(service, run).await
}

pub async fn asks_anew(service: &Service, run: &Value) -> Value {
    let anew =
        |run: &Value| run["pending"][0]["reason"].as_str().is_some_and(|it| it.ends_with(LAPSED));
    service.until(&format!("/v1/runs/{}", text(run, "run_id")), anew).await
}

fn is_refused(answer: &Answer, why: &str) {
    assert_eq!(
        (answer.status.as_u16(), &answer.body["code"]),
        (409, &json!("NOT_AWAITING_APPROVAL")),
        "{:#}",
        answer.body
    );
    assert!(text(&answer.body, "detail").contains(why), "{why}: {:#}", answer.body);
}

/// A first answer was for something else; nothing is done before what is asked now is answered.
async fn stale_decisions_are_refused(service: &Service, was: &Value, run: &Value) {
    let asked = &run["pending"][0];
    assert_eq!((&was["call_id"], &was["run_id"]), (&asked["call_id"], &asked["run_id"]));
    assert!(asked["seq"].as_i64() > was["seq"].as_i64(), "{was:#}{asked:#}");
    for verb in ["approve", "deny"] {
        let stale = decide(service, was, verb, &was["seq"]).await;
        is_refused(&stale, &format!("asked about anew, by event {}", asked["seq"]));
        is_refused(&stale, LAPSED);
        is_refused(&decide(service, was, verb, &json!(1)).await, "Event 1 does not ask about");
    }
    assert_eq!(file(service, "new.txt"), "by a person");
}

async fn a_decision_is_taken_only_for_the_question_that_was_shown(db: Db) {
    let service = setup().start(db).await;
    let run = parked(&service, "writer").await;
    let (path, calls) = paths(&run);
    let list = service.get("/v1/approvals").await.body;
    let listed = list["data"].as_array().unwrap();
    for asked in run["pending"].as_array().unwrap() {
        let events = service.get(&format!("{path}/events?limit=200")).await.body;
        let events = events["data"].as_array().unwrap();
        let event = events.iter().find(|event| event["seq"] == asked["seq"]).unwrap();
        assert_eq!(event["type"], "approval.requested");
        assert_eq!(event["data"]["call_id"], asked["call_id"]);
        let row = listed.iter().find(|row| row["call_id"] == asked["call_id"]).unwrap();
        assert_eq!(row["seq"], asked["seq"]);
        for (seq, pointer) in [(json!("7"), "/seq"), (json!(0.5), "/seq")] {
            let refused = decide(&service, asked, "approve", &seq).await;
            assert_eq!(refused.body["errors"][0]["pointer"], pointer, "{:#}", refused.body);
        }
    }
    // One call is not the other.
    let [first, second] = [&run["pending"][0], &run["pending"][1]];
    is_refused(&decide(&service, first, "approve", &second["seq"]).await, "does not ask about");

    let anew = lapsed(&service, &run).await;
    stale_decisions_are_refused(&service, first, &anew).await;
    let edited = json!({"operation": "write", "path": "new.txt", "content": "edited"});
    let edited = json!({"arguments": edited, "seq": first["seq"]});
    is_refused(&service.post(&format!("{}/approve", calls[0]), &edited).await, "anew");

    let seq = &anew["pending"][0]["seq"];
    assert_eq!(decide(&service, first, "approve", seq).await.status, 200);
    assert_eq!(ended(&service, &path).await["status"], "completed");
    assert_eq!(file(&service, "new.txt"), "by the model");
    is_refused(&decide(&service, first, "approve", seq).await, "already approved");
    let resolved = events(&service, &run, "approval.resolved").await;
    assert_eq!(resolved.len(), 3, "{resolved:#?}");
}

async fn stale_decisions_on_a_childs_call_are_refused(db: Db) {
    let service = setup().start(db).await;
    let run = parked(&service, "lead").await;
    let first = &run["pending"][0];
    assert_ne!(first["run_id"], run["run_id"], "{run:#}");
    let anew = lapsed(&service, &run).await;
    stale_decisions_are_refused(&service, first, &anew).await;
    let denied = decide(&service, first, "deny", &anew["pending"][0]["seq"]).await;
    assert_eq!(denied.status, 200, "{:#}", denied.body);
    assert_eq!(ended(&service, &paths(&run).0).await["status"], "completed");
    assert_eq!(file(&service, "new.txt"), "by a person");
}

#[tokio::test]
async fn another_replica_knows_the_current_question() {
    let url = crate::postgres_cluster::fresh_database().await;
    let here = setup().start_on(url.clone()).await;
    let there = setup().start_on(url).await;
    let run = parked(&here, "writer").await;
    for replica in [&here, &there] {
        replica.write("workspace/default/new.txt", "by a person"); // whichever goes on with the run
    }
    lapsed(&here, &run).await;
    let anew = asks_anew(&there, &run).await;
    stale_decisions_are_refused(&there, &run["pending"][0], &anew).await;
    let asked = &anew["pending"][0];
    assert_eq!(decide(&there, asked, "approve", &asked["seq"]).await.status, 200);
    assert_eq!(ended(&here, &paths(&run).0).await["status"], "completed");
}
