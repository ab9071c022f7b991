//! Runs that wait for a decision: what is asked, which callers may answer, and what becomes of the run,
//! also after a crash in between.

use std::time::Duration;

use reqwest::Method;
use serde_json::{Value, json};

use crate::fault_rounds::rounds;
use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    an_escalated_call_waits_until_it_is_approved,
    waiting_is_no_part_of_a_runs_duration,
    a_denied_call_is_told_to_the_model,
    an_approval_that_is_not_given_in_time_expires,
    arguments_are_edited_and_judged_again,
    edited_arguments_are_blocked_and_not_rewritten,
    a_result_that_is_used_again_is_that_of_the_same_arguments,
    calls_of_one_batch_are_decided_one_by_one,
    of_concurrent_decisions_one_is_taken,
    cancelling_races_approving,
    an_approved_call_takes_effect_once_in_spite_of_crashes,
    a_stream_goes_on_over_a_park,
    a_parked_run_is_told_on_every_way,
    deciding_requires_the_tenant_and_the_scope,
    a_stop_condition_asks_whether_to_go_on,
    an_approval_lapses_where_the_run_reads_more,
    an_approval_lapses_where_a_rule_asks_behind_another_one,
    an_approval_lapses_where_the_tool_changes,
    an_approval_lapses_where_the_call_does_more,
}

/// Overwriting needs an approval, adding does not.
const EDITOR: &str = "
model: scripted/editor
instructions: Edit.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: supervised, paths: {write: ['**'], deny: ['secret/**']}}
";

const EDITING: &str = r#"
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: write, path: notes.txt, content: "new\n"}}]
  - text: '{{ results[0] | trim }}'
"#;

fn editor() -> Setup {
    Setup::new()
        .agent("editor", EDITOR)
        .scenario("editor", EDITING)
        .file("notes.txt", "old\n")
        .file("other.txt", "other\n")
        .file("secret/key.txt", "key\n")
}

/// Invokes an agent that parks.
async fn parked(service: &Service, agent: &str) -> Answer {
    let parked = service.post(&format!("/v1/agents/{agent}/invoke-iterative"), &json!({})).await;
    assert_eq!(parked.status, 202, "{:#}\n{}", parked.body, service.log());
    assert_eq!(parked.body["status"], "awaiting_approval", "{:#}", parked.body);
    parked
}

pub fn text<'v>(value: &'v Value, field: &str) -> &'v str {
    value[field].as_str().unwrap_or_else(|| panic!("{field} of {value:#}"))
}

/// The paths of a parked run and of its calls that wait.
pub fn paths(run: &Value) -> (String, Vec<String>) {
    let id = text(run, "run_id");
    let calls = run["pending"].as_array().unwrap().iter();
    (
        format!("/v1/runs/{id}"),
        calls.map(|call| format!("/v1/runs/{id}/tool-calls/{}", text(call, "call_id"))).collect(),
    )
}

pub fn file(service: &Service, path: &str) -> String {
    std::fs::read_to_string(service.dir.path().join("workspace/default").join(path))
        .unwrap_or_default()
}

pub async fn ended(service: &Service, run: &str) -> Value {
    service
        .until(run, |run| ["completed", "failed", "cancelled"].contains(&text(run, "status")))
        .await
}

pub async fn types(service: &Service, run: &str) -> Vec<String> {
    let events = service.get(&format!("{run}/events")).await.body;
    events["data"].as_array().unwrap().iter().map(|event| text(event, "type").to_owned()).collect()
}

#[expect(clippy::too_many_lines, reason = "one story or table")]
async fn an_escalated_call_waits_until_it_is_approved(db: Db) {
    let service = editor().start(db).await;
    let parked = parked(&service, "editor").await;
    let (run, calls) = paths(&parked.body);
    assert_eq!(parked.headers["location"], run.as_str());
    assert!(!parked.headers.contains_key("preference-applied"), "no preference was sent");
    let pending = &parked.body["pending"][0];
    assert_eq!((&pending["kind"], &pending["tool"]), (&json!("approval"), &json!("file_ops")));
    assert_eq!(
        pending["arguments"],
        json!({"operation": "write", "path": "notes.txt", "content": "new\n"})
    );
    assert!(text(pending, "reason").contains("notes.txt"), "{pending:#}");
    assert!(text(pending, "expires_at") > text(&parked.body, "created_at"));
    assert_eq!(service.get(&run).await.body["pending"], parked.body["pending"]);
    assert_eq!(
        service.get(&format!("{run}/wait?timeout=60")).await.body["status"],
        "awaiting_approval"
    );
    let call = &service.get(&format!("{run}/tool-calls")).await.body["data"][0];
    assert_eq!(
        (&call["state"], &call["decision"]),
        (&json!("awaiting_approval"), &json!("escalated"))
    );
    assert_eq!(file(&service, "notes.txt"), "old\n");

    let waiting = service.request(Method::GET, "/v1/approvals").send().await.unwrap();
    let waiting = waiting.text().await.unwrap();
    assert_eq!(waiting.matches("\"run_id\":").count(), 1, "no field is there twice: {waiting}");
    let waiting: Value = serde_json::from_str(&waiting).unwrap();
    let row = &waiting["data"][0];
    assert_eq!(waiting["data"].as_array().unwrap().len(), 1, "{waiting:#}");
    for field in ["call_id", "kind", "tool", "arguments", "reason", "expires_at"] {
        assert_eq!(row[field], pending[field], "{field}");
    }
    assert_eq!((&row["run_id"], &row["agent"]), (&parked.body["run_id"], &json!("editor")));
    assert_eq!((&row["status"], &row["decided_by"]), (&json!("pending"), &Value::Null));

    let approved =
        service.post(&format!("{}/approve", calls[0]), &json!({"reason": "go on"})).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
    assert_eq!(approved.body["pending"], json!([]), "{:#}", approved.body);
    let done = ended(&service, &run).await;
    assert_eq!(
        (&done["status"], &done["tool_calls_made"]),
        (&json!("completed"), &json!(1)),
        "{done:#}"
    );
    assert_eq!(file(&service, "notes.txt"), "new\n");
    assert_eq!(
        types(&service, &run).await[3..],
        [
            "model.responded",
            "approval.requested",
            "run.resumed",
            "approval.resolved",
            "tool_call.started",
            "tool_call.completed",
            "iteration.started",
            "model.responded",
            "run.completed"
        ]
    );
    let call = &service.get(&format!("{run}/tool-calls")).await.body["data"][0];
    assert_eq!(
        (&call["state"], &call["decision"]),
        (&json!("succeeded"), &json!("escalated")),
        "{call:#}"
    );
    assert!(text(call, "reason").ends_with("Approved by testadmin."), "{call:#}");
    assert_eq!(call["edited"], false, "{call:#}");
    assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    let row = &service.get("/v1/approvals?status=approved").await.body["data"][0];
    assert_eq!(
        (&row["decided_by"], &row["decision_reason"]),
        (&json!("testadmin"), &json!("go on"))
    );
    assert!(row["decided_at"].is_string());
    let audit = service.get("/v1/audit?action=tool_call").await.body;
    let said: Vec<_> =
        audit["data"].as_array().unwrap().iter().map(|r| (&r["decision"], &r["outcome"])).collect();
    let (asked, allowed, done) = (json!("escalated"), json!("allowed"), json!("succeeded"));
    let waits = json!("not_executed");
    assert_eq!(said, [(&asked, &done), (&allowed, &waits), (&asked, &waits)], "{audit:#}");
    assert_eq!(audit["data"][1]["reason"], "Approved by testadmin, who started the run: go on");
    let again = service.post(&format!("{}/approve", calls[0]), &json!({})).await;
    assert_eq!(
        (again.status.as_u16(), &again.body["code"]),
        (409, &json!("NOT_AWAITING_APPROVAL"))
    );
    let decided = "This call was already approved by testadmin at ";
    assert!(text(&again.body, "detail").starts_with(decided), "{:#}", again.body);
}

async fn waiting_is_no_part_of_a_runs_duration(db: Db) {
    let service = editor().start(db).await;
    let (approved, cancelled) =
        (parked(&service, "editor").await, parked(&service, "editor").await);
    let used = |run: &Value| run["budget"]["used"]["duration_seconds"].as_f64().unwrap();
    let ((run, calls), (other, _)) = (paths(&approved.body), paths(&cancelled.body));
    let (now, later) = (service.get(&run).await.body, service.get(&run).await.body);
    assert_eq!((used(&now), used(&later)), (used(&approved.body), used(&approved.body)));
    service.post(&format!("{}/approve", calls[0]), &json!({})).await;
    service.post(&format!("{other}/cancel"), &json!({})).await;
    for (run, parked) in [(&run, &approved.body), (&other, &cancelled.body)] {
        let run = ended(&service, run).await;
        #[expect(clippy::cast_precision_loss, reason = "a run is not that long")]
        let whole = run["latency_ms"].as_i64().unwrap() as f64 / 1000.0;
        assert!(used(parked) <= used(&run) && used(&run) < whole, "{run:#}");
        let listed = service.get("/v1/runs").await.body["data"].clone();
        let listed = listed.as_array().unwrap().iter().find(|it| it["run_id"] == run["run_id"]);
        assert_eq!(listed.unwrap()["budget"], run["budget"]);
    }
}

async fn a_denied_call_is_told_to_the_model(db: Db) {
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    let edited = service.post(&format!("{}/deny", calls[0]), &json!({"arguments": {}})).await;
    assert_eq!(edited.status, 422, "only who approves edits: {edited:?}");
    assert_eq!(
        service.post(&format!("{}/deny", calls[0]), &json!({"reason": "not today"})).await.status,
        200
    );
    let done = ended(&service, &run).await;
    assert_eq!(
        done["output"],
        json!({"result": "Error: testadmin denied this call: not today. Do not make it again; continue without it."}),
        "{done:#}"
    );
    assert_eq!(file(&service, "notes.txt"), "old\n");
    let call = &service.get(&format!("{run}/tool-calls")).await.body["data"][0];
    assert_eq!((&call["state"], &call["is_error"]), (&json!("denied"), &json!(true)));
    assert_eq!(
        service.get("/v1/approvals?status=denied").await.body["data"].as_array().unwrap().len(),
        1
    );
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    let nothing = json!({"reason": " ", "arguments": null});
    let denied = service.post(&format!("{}/deny", calls[0]), &nothing).await;
    assert_eq!(denied.status, 200, "{:#}", denied.body);
    let done = ended(&service, &run).await.to_string();
    assert!(done.contains("testadmin denied this call. Do not"), "{done}");
}

async fn an_approval_that_is_not_given_in_time_expires(db: Db) {
    let hasty = EDITOR.replace("autonomy:", "approval_timeout: 1s, autonomy:");
    let service = editor().agent("hasty", &hasty).start(db).await;
    let run = service.enqueue("hasty").await;
    let done = ended(&service, &run).await;
    assert_eq!(
        done["output"],
        json!({"result": "Error: This call was not approved in time. Go on without it, and say what could not be done."}),
        "{done:#}"
    );
    assert_eq!(file(&service, "notes.txt"), "old\n");
    let row = &service.get("/v1/approvals?status=expired").await.body["data"][0];
    assert_eq!(
        (&row["decided_by"], row["decided_at"].is_string()),
        (&Value::Null, true),
        "{row:#}"
    );
    let approve = format!("{run}/tool-calls/{}/approve", text(row, "call_id"));
    let late = service.post(&approve, &json!({})).await;
    assert_eq!((late.status.as_u16(), &late.body["code"]), (409, &json!("NOT_AWAITING_APPROVAL")));
    assert!(text(&late.body, "detail").contains("no answer in time"), "{:#}", late.body);
    let audit = service.get("/v1/audit?decision=blocked").await.body;
    assert_eq!(audit["data"][0]["reason"], "No decision was made in time.", "{audit:#}");
}

async fn arguments_are_edited_and_judged_again(db: Db) {
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    let approve = format!("{}/approve", calls[0]);
    for (arguments, pointer) in
        [(json!({"operation": "fly"}), "/arguments/operation"), (json!([]), "/arguments")]
    {
        let refused = service.post(&approve, &json!({"arguments": arguments})).await;
        assert_eq!(
            (refused.status.as_u16(), &refused.body["code"]),
            (422, &json!("INVALID_INPUTS")),
            "{refused:?}"
        );
        let pointers: Vec<&str> =
            refused.body["errors"].as_array().unwrap().iter().map(|e| text(e, "pointer")).collect();
        assert!(pointers.contains(&pointer), "{pointers:?}");
    }
    let edited = json!({"operation": "write", "path": "other.txt", "content": "edited\n"});
    assert_eq!(service.post(&approve, &json!({"arguments": edited})).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(
        (file(&service, "notes.txt"), file(&service, "other.txt")),
        ("old\n".into(), "edited\n".into())
    );
    // Rows show what was executed; what the model asked for is in its message and in the request.
    let call = &service.get(&format!("{run}/tool-calls")).await.body["data"][0];
    assert_eq!((&call["arguments"], &call["edited"]), (&edited, &json!(true)), "{call:#}");
    let row = &service.get("/v1/approvals?status=approved").await.body["data"][0];
    assert_eq!((&row["arguments"], &row["edited"]), (&edited, &json!(true)), "{row:#}");
    assert!(text(row, "display").contains("other.txt"), "{row:#}");
    let messages = service.get(&format!("{run}/messages")).await.body.to_string();
    assert!(messages.contains("notes.txt"), "{messages}");

    // What is forbidden cannot be approved; the approval is not taken.
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    let secret = json!({"operation": "write", "path": "secret/key.txt", "content": "mine\n"});
    let refused =
        service.post(&format!("{}/approve", calls[0]), &json!({"arguments": secret})).await;
    assert_eq!(refused.status, 422);
    assert!(text(&refused.body, "detail").contains("Blocked by the path rule"), "{refused:?}");
    assert_eq!(service.get(&run).await.body["status"], "awaiting_approval");
    assert_eq!(service.post(&format!("{}/deny", calls[0]), &json!({})).await.status, 200);
    ended(&service, &run).await;
    assert_eq!(file(&service, "secret/key.txt"), "key\n");
}

async fn edited_arguments_are_blocked_and_not_rewritten(db: Db) {
    let interceptors = r#"
interceptors:
  before:
    - {tool: '*', rewrite: {/path: "'out/' + args.path"}}
    - {tool: '*', when: "args.path == 'out/no.txt'", block: Not that.}
"#;
    let both = EDITOR.replace("supervised,", "supervised, tool_policies: {mine: ask},");
    let setup = editor().agent("editor", &format!("{both}{interceptors}"));
    let service = setup.file("out/notes.txt", "old\n").start(db).await;
    let (run, calls) = {
        let parked = parked(&service, "editor").await.body;
        assert_eq!(parked["pending"][0]["arguments"]["path"], "out/notes.txt", "{parked:#}");
        paths(&parked)
    };
    let approve = format!("{}/approve", calls[0]);
    let edited = |path: &str| {
        let arguments = json!({"operation": "write", "path": path, "content": "edited\n"});
        json!({ "arguments": arguments })
    };
    let refused = service.post(&approve, &edited("out/no.txt")).await;
    assert_eq!(refused.status, 422, "{refused:?}");
    assert!(text(&refused.body, "detail").contains("Not that."), "{refused:?}");
    assert_eq!(service.post(&approve, &edited("out/notes.txt")).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "out/notes.txt"), "edited\n");
    assert_eq!(file(&service, "out/out/notes.txt"), "");

    // The same for a tool of the caller.
    let steps = "steps: [{tool_calls: [{tool: mine, arguments: {path: a}}]}, {text: done}]";
    service.write("scenarios/editor.yaml", steps);
    let mine = json!({"name": "mine", "description": "x", "input_schema": {"type": "object"}});
    let body = json!({"client_tools": [mine]});
    let asked = service.post("/v1/agents/editor/invoke-iterative", &body).await.body;
    assert_eq!(asked["pending"][0]["arguments"], json!({"path": "out/a"}), "{asked:#}");
    let (run, calls) = paths(&asked);
    let edited = json!({"arguments": {"path": "out/b"}});
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &edited).await.status, 200);
    let waits = service.until(&run, |run| run["status"] == "awaiting_tool_results").await;
    assert_eq!(waits["pending"][0]["arguments"], json!({"path": "out/b"}), "{waits:#}");
}

async fn a_result_that_is_used_again_is_that_of_the_same_arguments(db: Db) {
    let agent = EDITOR.replace("supervised,", "supervised, tool_policies: {file_ops: ask},");
    let read =
        "  - tool_calls: [{tool: file_ops, arguments: {operation: read, path: notes.txt}}]\n";
    let steps = format!("steps:\n{}  - text: done\n", read.repeat(3));
    let cached = "tool_options: {file_ops: {cache: attempt}}\n";
    let setup = editor().agent("editor", &format!("{agent}{cached}")).scenario("editor", &steps);
    let service = setup.start(db).await;
    let edited = json!({"arguments": {"operation": "read", "path": "other.txt"}});
    let mut waits = parked(&service, "editor").await.body;
    let (run, _) = paths(&waits);
    for decision in [&edited, &json!({}), &edited] {
        let (_, calls) = paths(&waits);
        assert_eq!(service.post(&format!("{}/approve", calls[0]), decision).await.status, 200);
        let decided = waits["pending"][0]["call_id"].clone();
        let goes_on = |run: &Value| {
            let next = run["pending"][0]["call_id"].as_str();
            run["status"] == "completed" || next.is_some_and(|next| next != decided)
        };
        waits = service.until(&run, goes_on).await;
    }
    let rows = service.get(&format!("{run}/tool-calls")).await.body;
    for (row, content, is_cached) in [(0, "other", false), (1, "old", false), (2, "other", true)] {
        let row = &rows["data"][row];
        assert!(text(row, "result").contains(content), "{rows:#}");
        assert_eq!(row["cached"], is_cached, "{rows:#}");
    }
}

async fn calls_of_one_batch_are_decided_one_by_one(db: Db) {
    let steps = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: read, path: notes.txt}}
      - {tool: file_ops, arguments: {operation: write, path: notes.txt, content: "one\n"}}
      - {tool: file_ops, arguments: {operation: append, path: log.txt, content: "between\n"}}
      - {tool: file_ops, arguments: {operation: delete, path: other.txt}}
  - text: '{{ results | length }} {{ results[0] | trim }}'
"#;
    let service = editor().scenario("editor", steps).start(db).await;
    let parked = parked(&service, "editor").await.body;
    let (run, calls) = paths(&parked);
    assert_eq!(calls.len(), 2, "both at once: {parked:#}");
    assert_eq!(parked["tool_calls_made"], 1, "what comes before is done");
    let first = service.post(&format!("{}/deny", calls[1]), &json!({})).await.body;
    assert_eq!(
        (&first["status"], first["pending"].as_array().unwrap().len()),
        (&json!("awaiting_approval"), 1)
    );
    assert_eq!(file(&service, "log.txt"), "", "the others of the batch wait");
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    let done = ended(&service, &run).await;
    assert_eq!(done["output"], json!({"result": "4 old"}), "{done:#}");
    assert_eq!(file(&service, "notes.txt"), "one\n");
    assert_eq!(
        (file(&service, "log.txt"), file(&service, "other.txt")),
        ("between\n".into(), "other\n".into())
    );
    let resumed = types(&service, &run).await.iter().filter(|kind| *kind == "run.resumed").count();
    assert_eq!(resumed, 1, "the batch goes on once");
}

async fn of_concurrent_decisions_one_is_taken(db: Db) {
    let service = editor().start(db).await;
    for _ in 0..rounds(5) {
        service.write("workspace/default/notes.txt", "old\n"); // writing what stands there loses nothing
        let (run, calls) = paths(&parked(&service, "editor").await.body);
        let decide = (0..16).map(|n| {
            let verb = if n % 2 == 0 { "approve" } else { "deny" };
            let (service, path) = (&service, format!("{}/{verb}", calls[0]));
            async move { (verb, service.post(&path, &json!({})).await) }
        });
        let answers = futures::future::join_all(decide).await;
        let taken: Vec<_> = answers.iter().filter(|(_, answer)| answer.status == 200).collect();
        let late = answers
            .iter()
            .filter(|(_, answer)| answer.body["code"] == "NOT_AWAITING_APPROVAL")
            .count();
        assert_eq!((taken.len(), late), (1, 15), "{answers:?}");
        ended(&service, &run).await;
        let call = &service.get(&format!("{run}/tool-calls")).await.body["data"][0];
        let is_approved = taken[0].0 == "approve";
        assert_eq!(call["state"], if is_approved { "succeeded" } else { "denied" });
        assert_eq!(file(&service, "notes.txt"), if is_approved { "new\n" } else { "old\n" });
    }
}

async fn cancelling_races_approving(db: Db) {
    let service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    assert_eq!(service.post(&format!("{run}/cancel"), &json!({})).await.status, 202);
    let cancelled = ended(&service, &run).await;
    assert_eq!(cancelled["error"]["context"]["phase"], "approval", "{cancelled:#}");
    assert_eq!(cancelled["pending"], json!([]));
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 409);
    assert_eq!(
        service.get("/v1/approvals").await.body["data"],
        json!([]),
        "what an ended run asked for is void"
    );
    assert_eq!(
        service.get("/v1/approvals?status=void").await.body["data"].as_array().unwrap().len(),
        1
    );

    for _ in 0..rounds(10) {
        service.write("workspace/default/notes.txt", "old\n");
        let (run, calls) = paths(&parked(&service, "editor").await.body);
        let (cancel, approve) = (format!("{run}/cancel"), format!("{}/approve", calls[0]));
        let nothing = json!({});
        let (cancelled, approved) =
            tokio::join!(service.post(&cancel, &nothing), service.post(&approve, &nothing));
        assert!([200, 202].contains(&cancelled.status.as_u16()), "{cancelled:?}");
        assert!([200, 409].contains(&approved.status.as_u16()), "{approved:?}");
        let done = ended(&service, &run).await;
        if approved.status == 409 {
            assert_eq!(done["status"], "cancelled");
            assert_eq!(
                file(&service, "notes.txt"),
                "old\n",
                "nothing is executed without an approval"
            );
        }
        assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    }
}

async fn an_approved_call_takes_effect_once_in_spite_of_crashes(db: Db) {
    let asking = "
model: scripted/adder
instructions: Add.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";
    let steps = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: '{{ inputs.file }}', content: x}}]
  - text: done
";
    let setup = Setup::new().agent("adder", asking).scenario("adder", steps);
    let mut service = setup.config("[runtime]\nlease = \"2s\"").start(db).await;
    let mut completed = 0;
    for round in 0..5 {
        let file_name = format!("added-{round}.txt");
        let path = "/v1/agents/adder/invoke-iterative";
        let parked = service.post(path, &json!({"inputs": {"file": file_name}})).await;
        assert_eq!(parked.status, 202, "{parked:?}");
        let (run, calls) = paths(&parked.body);
        // While it waits no replica drives it, so a crash changes nothing.
        service.kill().await;
        service.restart().await;
        assert_eq!(service.get(&run).await.body["pending"], parked.body["pending"]);
        assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
        if round < 4 {
            // So that it dies in different places.
            tokio::time::sleep(Duration::from_millis(3 * round)).await;
        } else {
            service.until(&run, |run| run["status"] == "completed").await;
        }
        service.kill().await;
        service.restart().await;
        let over = |run: &Value| ["completed", "needs_review"].contains(&text(run, "status"));
        let done = service.until(&run, over).await;
        if done["status"] == "completed" {
            assert_eq!(file(&service, &file_name), "x");
            completed += 1;
        } else {
            assert!(file(&service, &file_name).len() <= 1, "never twice");
            assert_eq!(done["pending"][0]["kind"], "review");
        }
    }
    assert!(completed >= 1);
}

async fn a_stream_goes_on_over_a_park(db: Db) {
    let service = editor().start(db).await;
    let request =
        service.request(Method::POST, "/v1/agents/editor/invoke-iterative").json(&json!({}));
    let response = request.header("accept", "text/event-stream").send().await.unwrap();
    let run = format!("/v1/runs/{}", response.headers()["x-run-id"].to_str().unwrap());
    let mut reader = crate::streaming::Reader::of(response);
    let asked = loop {
        let frame = reader.next().await.unwrap();
        if frame.event == "approval.requested" {
            break frame;
        }
    };
    let call = text(&asked.data["data"], "call_id");
    let other =
        crate::streaming::follow(&service, run.rsplit('/').next().unwrap(), Some(asked.id)).await;
    let parked = service.until(&run, |run| run["status"] == "awaiting_approval").await;
    assert_eq!(parked["pending"][0]["call_id"], call);
    assert_eq!(
        service.post(&format!("{run}/tool-calls/{call}/approve"), &json!({})).await.status,
        200
    );
    let rest = reader.rest().await;
    assert_eq!(other.rest().await, rest);
    assert_eq!(rest.first().unwrap().event, "run.resumed");
    assert_eq!(rest.last().unwrap().data["data"]["run"]["status"], "completed");
    let numbers: Vec<i64> = rest.iter().map(|frame| frame.id).collect();
    assert!(
        numbers.iter().zip(asked.id + 1..).all(|(number, expected)| *number == expected),
        "{numbers:?}"
    );
}

async fn a_parked_run_is_told_on_every_way(db: Db) {
    let service = editor().start(db).await;
    let path = "/v1/agents/editor/invoke-iterative";
    for prefer in ["wait=60", "respond-async, wait=60"] {
        let request = service.request(Method::POST, path).json(&json!({})).header("prefer", prefer);
        let parked = answer(request.header("idempotency-key", prefer)).await;
        assert_eq!(
            (parked.status.as_u16(), &parked.body["status"]),
            (202, &json!("awaiting_approval")),
            "{prefer}"
        );
        assert_eq!(parked.body["pending"].as_array().unwrap().len(), 1, "{prefer}");
        let request =
            service.request(Method::POST, path).json(&json!({})).header("idempotency-key", prefer);
        let replayed = answer(request).await;
        assert_eq!(
            (replayed.status.as_u16(), &replayed.body["run_id"]),
            (202, &parked.body["run_id"]),
            "{prefer}"
        );
        assert_eq!(replayed.headers["location"], parked.headers["location"]);
    }
    let request =
        service.request(Method::POST, path).json(&json!({})).header("prefer", "respond-async");
    let queued = answer(request).await;
    let run = queued.headers["location"].to_str().unwrap();
    let waited = service.get(&format!("{run}/wait?timeout=60")).await.body;
    assert_eq!(waited["status"], "awaiting_approval");
    assert_eq!(
        service.get("/v1/runs?status=awaiting_approval").await.body["data"]
            .as_array()
            .unwrap()
            .len(),
        3
    );
    // A caller that waits is answered after the decision.
    let (_, calls) = paths(&waited);
    assert_eq!(service.post(&format!("{}/deny", calls[0]), &json!({})).await.status, 200);
    assert_eq!(service.get(&format!("{run}/wait?timeout=60")).await.body["status"], "completed");
}

async fn deciding_requires_the_tenant_and_the_scope(db: Db) {
    let mut service = editor().start(db).await;
    let (run, calls) = paths(&parked(&service, "editor").await.body);
    let approve = format!("{}/approve", calls[0]);
    let no_call = format!("{run}/tool-calls/{}/approve", uuid::Uuid::from_u128(5));
    let no_run = approve.replace(&run, &format!("/v1/runs/{}", uuid::Uuid::from_u128(6)));
    let no_uuid = format!("{run}/tool-calls/first/approve");
    for path in [no_call, no_run, no_uuid] {
        let unknown = service.post(&path, &json!({})).await;
        assert_eq!(
            (unknown.status.as_u16(), &unknown.body["code"]),
            (404, &json!("NOT_FOUND")),
            "{path}"
        );
    }
    let long = service.post(&approve, &json!({"reason": "x".repeat(1001)})).await;
    assert_eq!(
        (long.status.as_u16(), &long.body["errors"][0]["pointer"]),
        (422, &json!("/reason"))
    );
    let others = [
        (json!({"name": "x", "tenant": "other", "scopes": ["runs:approve"]}), 404),
        (
            json!({"name": "x", "tenant": "default", "scopes": ["runs:read", "runs:cancel", "agents:invoke"]}),
            403,
        ),
    ];
    let admin = service.key.clone();
    for (key, status) in others {
        service.key.clone_from(&admin);
        let made = service.post("/v1/keys", &key).await.body;
        text(&made, "key").clone_into(&mut service.key);
        let refused = service.post(&approve, &json!({})).await;
        assert_eq!(refused.status.as_u16(), status, "{refused:?}");
        let list = service.get("/v1/approvals").await;
        match status {
            404 => assert_eq!(list.body["data"], json!([]), "{list:?}"),
            _ => assert_eq!(list.status, 403, "{list:?}"),
        }
    }
    service.key = admin;
    assert_eq!(service.get("/v1/approvals?status=sure").await.status, 400);
    let approver = json!({"name": "x", "tenant": "default", "scopes": ["runs:approve"]});
    let made = service.post("/v1/keys", &approver).await.body;
    text(&made, "key").clone_into(&mut service.key);
    assert_eq!(service.post(&approve, &json!({})).await.status, 200);
}

async fn a_stop_condition_asks_whether_to_go_on(db: Db) {
    let watched = "
model: scripted/watched
instructions: Look.
tools: [file_ops]
enable_double_confirmation: false
governance: {budget: {stop_conditions: [{when: 'counters.tool_calls >= 1', action: escalate}]}}
";
    let steps = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]
  - text: done
";
    let service = Setup::new().agent("watched", watched).scenario("watched", steps).start(db).await;
    for verb in ["approve", "deny"] {
        let parked = parked(&service, "watched").await.body;
        let pending = &parked["pending"][0];
        assert_eq!(
            (&pending["kind"], &pending["tool"]),
            (&json!("escalation"), &json!("")),
            "{pending:#}"
        );
        assert!(text(pending, "reason").contains("counters.tool_calls >= 1"), "{pending:#}");
        assert_eq!(
            service.get("/v1/approvals").await.body["data"][0]["call_id"],
            pending["call_id"]
        );
        let (run, calls) = paths(&parked);
        let edited =
            service.post(&format!("{}/approve", calls[0]), &json!({"arguments": {}})).await;
        assert_eq!((edited.status.as_u16(), &edited.body["code"]), (422, &json!("INVALID_INPUTS")));
        let seen = json!({"seq": pending["seq"]});
        assert_eq!(service.post(&format!("{}/{verb}", calls[0]), &seen).await.status, 200);
        let done = ended(&service, &run).await;
        if verb == "approve" {
            assert_eq!(
                (&done["status"], &done["tool_calls_made"]),
                (&json!("completed"), &json!(2)),
                "{done:#}"
            );
            assert_eq!(
                types(&service, &run).await.iter().filter(|t| *t == "approval.requested").count(),
                1,
                "once"
            );
        } else {
            assert_eq!(
                (&done["status"], &done["error"]["code"]),
                (&json!("failed"), &json!("STOP_CONDITION")),
                "{done:#}"
            );
            assert_eq!(done["termination_reason"], "budget_exceeded");
        }
        assert_eq!(service.post(&format!("{}/{verb}", calls[0]), &json!({})).await.status, 409);
    }
}

/// Any replica takes a decision, and any goes on with the run.
#[tokio::test]
async fn another_replica_takes_the_answer_and_the_run() {
    let url = crate::postgres_cluster::fresh_database().await;
    let mut here = editor().start_on(url.clone()).await;
    let there = editor().start_on(url).await;
    let (run, calls) = paths(&parked(&here, "editor").await.body);
    let reader = crate::streaming::follow(&there, run.rsplit('/').next().unwrap(), None).await;
    here.kill().await;
    assert_eq!(there.get("/v1/approvals").await.body["data"].as_array().unwrap().len(), 1);
    assert_eq!(there.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    assert_eq!(ended(&there, &run).await["status"], "completed");
    assert_eq!(
        (file(&here, "notes.txt"), file(&there, "notes.txt")),
        ("old\n".into(), "new\n".into())
    );
    assert_eq!(reader.rest().await.last().unwrap().event, "run.completed");
}

#[tokio::test]
async fn without_authentication_no_call_is_approved() {
    let service = editor().config("[auth]\nmode = \"none\"").start(Db::Sqlite).await;
    let (_, calls) = paths(&parked(&service, "editor").await.body);
    let refused = service.post(&format!("{}/approve", calls[0]), &json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), &refused.body["code"]),
        (403, &json!("FORBIDDEN")),
        "{refused:?}"
    );
    assert_eq!(service.get("/v1/approvals").await.body["data"].as_array().unwrap().len(), 1);
}

/// All calls are approved; what the first one reads changes what the rules say to some others.
async fn an_approval_lapses_where_the_run_reads_more(db: Db) {
    let reader = r#"
model: scripted/reader
tools: [file_ops]
enable_double_confirmation: false
owner: {team: desk, escalation_target: oncall}
governance:
  paths: {write: ['**'], private: [secret/**]}
  flow:
    - {when: "labels.private && action.path == 'blocked.txt'", do: deny}
    - {when: "labels.private && action.path in ['notes.txt', 'other.txt']", do: ask}
    - {when: "action.kind in ['read', 'write']", do: ask}
"#;
    let scenario = r#"
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: read, path: secret/key.txt}}
      - {tool: file_ops, arguments: {operation: append, path: notes.txt, content: "more\n"}}
      - {tool: file_ops, arguments: {operation: write, path: same.txt, content: "as before\n"}}
      - {tool: file_ops, arguments: {operation: append, path: blocked.txt, content: "x"}}
      - {tool: file_ops, arguments: {operation: append, path: model.txt, content: "x"}}
  - text: done
"#;
    let setup = editor().agent("reader", reader).scenario("reader", scenario);
    let mut service = setup.file("same.txt", "old").file("edited.txt", "old").start(db).await;
    let asked = parked(&service, "reader").await;
    let (run, calls) = paths(&asked.body);
    assert_eq!(calls.len(), 5, "{:#}", asked.body);
    let edited = |operation: &str, path: &str| json!({"arguments": {"operation": operation, "path": path, "content": "x"}});
    let bodies = [
        json!({}),
        edited("append", "other.txt"),
        json!({"reason": null, "arguments": null, "clears": null}),
        json!({}),
        edited("write", "edited.txt"),
    ];
    for (call, body) in calls.iter().zip(&bodies) {
        let taken = service.post(&format!("{call}/approve"), body).await;
        assert_eq!(taken.status, 200, "{taken:?}");
    }
    let again = service
        .until(&run, |run| run["pending"].as_array().is_some_and(|pending| pending.len() == 1))
        .await;
    assert_eq!(again["status"], "awaiting_approval", "{again:#}");
    let pending = &again["pending"][0];
    assert!(
        text(pending, "reason")
            .ends_with("An earlier approval lapsed: the run has since read private data."),
        "{pending:#}"
    );
    assert_eq!(pending["arguments"]["path"], "notes.txt", "the edit lapsed, too");
    let events = service.get(&format!("{run}/events")).await.body;
    let mut asked = events["data"].as_array().unwrap().iter();
    let last = asked.rfind(|event| event["type"] == "approval.requested").unwrap();
    assert_eq!(last["data"]["escalation_target"], "oncall", "{last:#}");

    // The second question survives a crash like the first.
    service.kill().await;
    service.restart().await;
    let approve = format!("{}/approve", calls[1]);
    assert_eq!(service.post(&approve, &json!({})).await.status, 200);
    assert_eq!(service.post(&approve, &json!({})).await.status, 409);
    let done = ended(&service, &run).await;
    assert_eq!(done["status"], "completed", "{done:#}");
    assert_eq!(file(&service, "notes.txt"), "old\nmore\n", "once, as the model wrote it");
    assert_eq!(file(&service, "other.txt"), "other\n");
    // To the others the rules say what they said before, or that they are blocked now.
    let written = ["same.txt", "blocked.txt", "edited.txt", "model.txt"];
    assert_eq!(written.map(|name| file(&service, name)), ["as before\n", "", "x", ""]);
    let happened = types(&service, &run).await;
    let count = |kind: &str| happened.iter().filter(|known| *known == kind).count();
    assert_eq!((count("approval.requested"), count("tool_call.blocked")), (6, 1), "{happened:?}");
}

/// What is approved is asked about for what it destroys, which hides the rule that asks for what was
/// read.
async fn an_approval_lapses_where_a_rule_asks_behind_another_one(db: Db) {
    let keeper = "
model: scripted/keeper
tools: [file_ops]
enable_double_confirmation: false
governance:
  paths: {write: ['**'], private: [secret/**]}
  flow: [{when: labels.private && action.destructive, do: ask}]
";
    let scenario = "
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: notes.txt, content: new}}
      - {tool: file_ops, arguments: {operation: read, path: secret/key.txt}}
      - {tool: file_ops, arguments: {operation: delete, path: other.txt}}
  - text: done
";
    let service = editor().agent("keeper", keeper).scenario("keeper", scenario).start(db).await;
    let (run, calls) = paths(&parked(&service, "keeper").await.body);
    assert_eq!(calls.len(), 2);
    for call in &calls {
        assert_eq!(service.post(&format!("{call}/approve"), &json!({})).await.status, 200);
    }
    let again = service
        .until(&run, |run| run["pending"].as_array().is_some_and(|pending| pending.len() == 1))
        .await;
    let pending = &again["pending"][0];
    assert_eq!(pending["arguments"]["path"], "other.txt", "{again:#}");
    assert!(
        text(pending, "reason")
            .ends_with("An earlier approval lapsed: the run has since read private data."),
        "{pending:#}"
    );
    assert_eq!(
        (file(&service, "notes.txt"), file(&service, "other.txt")),
        ("new".into(), "other\n".into())
    );
    assert_eq!(service.post(&format!("{}/approve", calls[1]), &json!({})).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "other.txt"), "");
}

/// What was approved created a file; by now it would overwrite one.
async fn an_approval_lapses_where_the_call_does_more(db: Db) {
    let writer = "
model: scripted/writer
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: full, paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";
    let scenario = "
steps:
  - tool_calls:
      - {tool: file_ops, arguments: {operation: write, path: sub/new.txt, content: by the model}}
      - {tool: file_ops, arguments: {operation: write, path: sub/next.txt, content: as well}}
      - {tool: file_ops, arguments: {operation: write, path: sub/third.txt, content: by the model}}
  - text: done
";
    let service = editor().agent("writer", writer).scenario("writer", scenario).start(db).await;
    let (run, calls) = paths(&parked(&service, "writer").await.body);
    let edited = json!({"operation": "write", "path": "sub/edited.txt", "content": "by ann"});
    let edited = json!({"arguments": edited});
    assert_eq!(service.post(&format!("{}/approve", calls[2]), &edited).await.status, 200);
    std::fs::create_dir(service.dir.path().join("workspace/default/sub")).unwrap();
    for name in ["new.txt", "edited.txt"] {
        service.write(&format!("workspace/default/sub/{name}"), "by a person");
    }
    for call in &calls[..2] {
        assert_eq!(service.post(&format!("{call}/approve"), &json!({})).await.status, 200);
    }
    let lapsed = "An earlier approval lapsed: the call would now do something else.";
    let again = service
        .until(&run, |run| {
            run["pending"][0]["reason"].as_str().is_some_and(|reason| reason.ends_with(lapsed))
        })
        .await;
    assert_eq!(again["pending"].as_array().unwrap().len(), 1, "{again:#}");
    assert_eq!(file(&service, "sub/new.txt"), "by a person");
    assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
    let last =
        service.until(&run, |run| run["pending"][0]["arguments"]["path"] == "sub/third.txt").await;
    assert!(text(&last["pending"][0], "reason").ends_with(lapsed), "{last:#}");
    assert_eq!(file(&service, "sub/edited.txt"), "by a person");
    assert_eq!(service.post(&format!("{}/approve", calls[2]), &json!({})).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(file(&service, "sub/new.txt"), "by the model");
    assert_eq!(file(&service, "sub/next.txt"), "as well", "that a directory is there is no more");
}

/// The tool that was approved is not the one that would be executed.
async fn an_approval_lapses_where_the_tool_changes(db: Db) {
    let tool = "
base_url: http://127.0.0.1:9
tools:
  - {name: close, description: Closes an issue., method: POST, path: /close, effect: once,
     input_schema: {type: object}}
";
    let closer = "
model: scripted/closer
tools: ['http:issues/close']
enable_double_confirmation: false
governance: {autonomy: full, tool_policies: {'http:issues/close': ask}}
";
    let scenario = "
steps:
  - tool_calls: [{tool: 'http:issues/close', arguments: {}}]
  - text: done
";
    let setup = editor().tools("issues", tool).agent("closer", closer).scenario("closer", scenario);
    let mut service = setup.start(db).await;
    let (run, calls) = paths(&parked(&service, "closer").await.body);
    let lapsed = "An earlier approval lapsed: the tool's declaration has changed.";
    let changes = [
        ("Closes an", "Deletes every"),
        ("127.0.0.1:9", "127.0.0.1:19"),
        ("path: /close", "path: /delete"),
        ("method: POST", "method: DELETE"),
        ("effect: once", "effect: once, destructive: true"),
        ("effect: once", "effect: once, headers: {X-Close: all}"),
        ("effect: once", "effect: once, body: {all: true}"),
    ];
    let mut questions = 1;
    for (was, is) in changes {
        service.kill().await;
        service.write("tools/issues.yaml", &tool.replace(was, is));
        service.restart().await;
        assert_eq!(service.post(&format!("{}/approve", calls[0]), &json!({})).await.status, 200);
        questions += 1;
        let asked_again = |run: &Value| {
            run["pending"][0]["reason"].as_str().is_some_and(|reason| reason.ends_with(lapsed))
        };
        service.until(&run, asked_again).await;
        let asks = types(&service, &run).await;
        let asks = asks.iter().filter(|kind| *kind == "approval.requested").count();
        assert_eq!(asks, questions, "{is}");
    }
    let deny = format!("{}/deny", calls[0]);
    assert_eq!(service.post(&deny, &json!({"reason": "not that"})).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
}
