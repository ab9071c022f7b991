//! Runs whose child runs wait for a person: the parent is parked as well, shows what its children
//! wait for, and goes on when they have ended.
//!
//! | together with | test |
//! |---|---|
//! | depth, pending, approvals list | `a_tree_parks_and_goes_on_from_its_leaf` |
//! | workers, queue | `parked_trees_leave_the_workers_to_others` |
//! | time limits | `the_wait_of_a_child_costs_no_run_its_time`, `the_work_of_a_child_after_its_wait_is_its_parents_time` |
//! | a changed agent, schema, description | `a_changed_agent_does_not_undo_a_call` |
//! | limits of calls, rates | `a_call_that_is_made_again_is_counted_once` |
//! | a limit or a failure beside a parked child | `a_run_that_ends_ends_its_parked_children` |
//! | a child that works beside a parked one | `pending_calls_of_a_child_are_seen_while_another_works` |
//! | a child that fails beside a parked one | `a_child_that_fails_ends_a_run_beside_another_that_waits` |
//! | results of children beside one that waits for long | `results_of_children_outlast_the_wait_of_another` |
//! | large results beside a parked child | `large_results_are_kept_when_a_run_parks` |
//! | a child whose journal is damaged | `a_run_goes_on_behind_a_child_that_cannot_be_read` |
//! | cancel, void approvals | `cancelling_a_parked_tree_ends_all_of_it` |
//! | damaged rows | `a_tree_whose_parents_are_a_circle_is_shown` |
//! | crash, restart | `a_parked_tree_survives_crashes` |
//! | child cancelled, denied | `an_end_without_output_is_told_to_the_parent` |
//! | handoff | `a_conversation_that_was_handed_over_waits_as_well` |
//! | calls side by side | `calls_beside_a_parked_child_keep_their_results` |
//! | a child that ends while its parent parks | `many_trees_miss_no_end` |
//! | status, `/wait` | `a_parent_runs_while_its_child_does` |
//! | lists and searches by status, a child in review | `a_tree_is_listed_by_the_status_that_it_shows` |
//! | sessions, streams | `a_session_and_its_stream_wait_for_the_tree` |

use reqwest::Method;
use serde_json::{Value, json};
use tokio::sync::watch;

use crate::claims::change;
use crate::mock_model::{MockModel, Reply};
use crate::script_tools::python;
use crate::service::{Answer, Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_tree_parks_and_goes_on_from_its_leaf,
    parked_trees_leave_the_workers_to_others,
    the_wait_of_a_child_costs_no_run_its_time,
    the_work_of_a_child_after_its_wait_is_its_parents_time,
    a_changed_agent_does_not_undo_a_call,
    a_call_that_is_made_again_is_counted_once,
    a_run_that_ends_ends_its_parked_children,
    pending_calls_of_a_child_are_seen_while_another_works,
    a_child_that_fails_ends_a_run_beside_another_that_waits,
    results_of_children_outlast_the_wait_of_another,
    large_results_are_kept_when_a_run_parks,
    a_run_goes_on_behind_a_child_that_cannot_be_read,
    cancelling_a_parked_tree_ends_all_of_it,
    a_tree_whose_parents_are_a_circle_is_shown,
    a_parked_tree_survives_crashes,
    an_end_without_output_is_told_to_the_parent,
    a_conversation_that_was_handed_over_waits_as_well,
    calls_beside_a_parked_child_keep_their_results,
    many_trees_miss_no_end,
    a_session_and_its_stream_wait_for_the_tree,
    a_parent_runs_while_its_child_does,
    a_tree_is_listed_by_the_status_that_it_shows,
}

const WRITER: &str = "
model: scripted/writer
instructions: Write.
tools: [file_ops]
enable_double_confirmation: false
governance: {paths: {write: ['**']}, tool_policies: {file_ops: ask}}
";

const WRITES: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: append, path: log.txt, content: x}}]
  - text: 'written: {{ results[0][:5] }}'
";

/// One that only reads, and asks for that.
const ASKER: &str = "
model: scripted/asker
instructions: Read.
tools: [file_ops]
enable_double_confirmation: false
governance: {autonomy: read-only, paths: {read: ['**']}, tool_policies: {file_ops: ask}}
";

const ASKS: &str = "
steps:
  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]
  - text: listed
";

fn delegating(model: &str, tool: &str) -> String {
    format!(
        "model: scripted/{model}\ninstructions: Delegate.\ntools: ['{tool}']\n\
         enable_double_confirmation: false\n"
    )
}

fn delegates(tool: &str) -> String {
    format!(
        "steps:\n  - tool_calls: [{{tool: \"{tool}\", arguments: {{}}}}]\n  - text: 'told: {{{{ results[0] }}}}'\n"
    )
}

/// `boss` delegates to `lead`, and that to `writer`, whose call needs an approval.
fn tree() -> Setup {
    Setup::new()
        .agent("boss", &delegating("boss", "agent:lead"))
        .scenario("boss", &delegates("agent:lead"))
        .agent("lead", &delegating("lead", "agent:writer"))
        .scenario("lead", &delegates("agent:writer"))
        .agent("writer", WRITER)
        .scenario("writer", WRITES)
}

fn provider(mock: &MockModel) -> String {
    format!("[models.mock]\nkind = \"openai\"\nbase_url = \"{}\"\n", mock.base_url())
}

/// The same, whose writer goes on behind its call when it is told to.
async fn held_tree() -> (Setup, MockModel, watch::Sender<bool>) {
    let mock = MockModel::start().await;
    let (free, held) = watch::channel(false);
    let write = json!({"operation": "append", "path": "log.txt", "content": "x"});
    mock.script([
        Reply::call("file_ops", &write),
        Reply::Held(held, Box::new(Reply::text("written"))),
    ]);
    let writer = WRITER.replace("scripted/writer", "mock/writer");
    (tree().config(&provider(&mock)).agent("writer", &writer), mock, free)
}

async fn parked(service: &Service, run: &str) -> Value {
    service.until(run, |run| run["status"] == "awaiting_approval").await
}

async fn ended(service: &Service, run: &str) -> Value {
    service.until(run, |run| run["finished_at"].is_string()).await
}

/// Answers the first thing that a parked run waits for.
async fn settle(service: &Service, run: &Value, verb: &str) -> Answer {
    let pending = &run["pending"][0];
    let (run, call) = (pending["run_id"].as_str().unwrap(), pending["call_id"].as_str().unwrap());
    service.post(&format!("/v1/runs/{run}/tool-calls/{call}/{verb}"), &json!({})).await
}

async fn event_types(service: &Service, run: &str) -> Vec<String> {
    let events = service.get(&format!("{run}/events")).await.body;
    let types = events["data"].as_array().unwrap().iter();
    types.map(|event| event["type"].as_str().unwrap().to_owned()).collect()
}

/// When the first event of a type happened.
async fn event_at(service: &Service, run: &str, kind: &str) -> String {
    let events = service.get(&format!("{run}/events")).await.body;
    let mut events = events["data"].as_array().unwrap().iter();
    let event = events.find(|event| event["type"] == kind).unwrap();
    event["at"].as_str().unwrap().to_owned()
}

async fn a_tree_parks_and_goes_on_from_its_leaf(db: Db) {
    let service = tree().start(db).await;
    let answered = service.post("/v1/agents/boss/invoke-iterative", &json!({})).await;
    assert_eq!(answered.status, 202, "the caller does not wait: {:#}", answered.body);
    let boss = &answered.body;
    assert_eq!(boss["status"], "awaiting_approval", "{boss:#}");
    let pending = boss["pending"].as_array().unwrap();
    assert_eq!(pending.len(), 1, "{boss:#}");
    assert_eq!(
        (&pending[0]["kind"], &pending[0]["tool"]),
        (&json!("approval"), &json!("file_ops"))
    );
    let leaf = format!("/v1/runs/{}", pending[0]["run_id"].as_str().unwrap());
    let run = format!("/v1/runs/{}", boss["run_id"].as_str().unwrap());
    assert_eq!(service.get(&leaf).await.body["agent"], "writer");
    assert_eq!(service.get(&run).await.body["pending"], boss["pending"]);
    let listed = service.get("/v1/approvals").await.body;
    assert_eq!(listed["data"].as_array().unwrap().len(), 1, "people answer the leaf: {listed:#}");

    let events = service.get(&format!("{run}/events")).await.body;
    let waits = events["data"].as_array().unwrap().last().unwrap();
    assert_eq!(waits["type"], "tool_call.awaiting_child", "{events:#}");
    let child = waits["data"]["child_run_id"].as_str().unwrap();
    assert_eq!(service.get(&format!("/v1/runs/{child}")).await.body["agent"], "lead");
    let own = format!("{run}/tool-calls/{}/approve", waits["data"]["call_id"].as_str().unwrap());
    assert_eq!(service.post(&own, &json!({})).await.status, 409, "only the leaf can be approved");

    assert_eq!(settle(&service, boss, "approve").await.status, 200);
    let boss = ended(&service, &run).await;
    assert_eq!(boss["output"]["result"], "told: told: written: Appen", "{boss:#}");
    assert_eq!((&boss["tool_calls_made"], &boss["pending"]), (&json!(1), &json!([])));
    assert_eq!(boss["budget"]["tree"]["tool_calls"], 3, "each call once: {boss:#}");
    let types = event_types(&service, &run).await;
    let count = |kind: &str| types.iter().filter(|found| *found == kind).count();
    assert_eq!((count("tool_call.awaiting_child"), count("tool_call.completed")), (1, 1));
}

async fn parked_trees_leave_the_workers_to_others(db: Db) {
    let service = tree()
        .agent("quick", "model: scripted/quick\ninstructions: Answer.\n")
        .scenario("quick", "steps: [{text: done}]")
        .config("[runtime]\nqueue_workers = 2\nmax_concurrent_runs = 2")
        .start(db)
        .await;
    let mut trees = Vec::new();
    for _ in 0..4 {
        trees.push(service.enqueue("boss").await);
    }
    for run in &trees {
        parked(&service, run).await;
    }
    let quick = service.enqueue("quick").await;
    assert_eq!(ended(&service, &quick).await["status"], "completed");
    for run in &trees {
        let waiting = service.get(run).await.body;
        assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    }
    for run in &trees {
        assert_eq!(ended(&service, run).await["status"], "completed");
    }
}

async fn the_wait_of_a_child_costs_no_run_its_time(db: Db) {
    let boss = delegating("boss", "agent:lead")
        + "limits: {tool_call_timeout_seconds: 20}\ngovernance: {budget: {max_duration_seconds: 20}}\n";
    let service = tree().agent("boss", &boss).start(db).await;
    let run = service.enqueue("boss").await;
    let waiting = parked(&service, &run).await;
    tokio::time::sleep(std::time::Duration::from_millis(20_500)).await; // longer than all its limits
    assert_eq!(service.get(&run).await.body["status"], "awaiting_approval");
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let boss = ended(&service, &run).await;
    assert_eq!(boss["status"], "completed", "{boss:#}");
}

async fn the_work_of_a_child_after_its_wait_is_its_parents_time(db: Db) {
    let works = WRITES.replace("text: 'written", "delay_ms: 700\n    text: 'written");
    let service = tree().scenario("writer", &works).start(db).await;
    let run = service.enqueue("boss").await;
    let waiting = parked(&service, &run).await;
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let boss = ended(&service, &run).await;
    let seconds = boss["budget"]["used"]["duration_seconds"].as_f64().unwrap();
    assert!(seconds >= 0.7, "{boss:#}");
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    let call = &calls["data"][0];
    assert!(call["duration_ms"].as_u64().unwrap() >= 700, "{call:#}");
    let began = call["started_at"].as_str().unwrap();
    let resumed = event_at(&service, &run, "run.resumed").await;
    assert!(began < resumed.as_str(), "its first start: {call:#}");
}

async fn a_changed_agent_does_not_undo_a_call(db: Db) {
    let told = WRITER.replace("instructions", "description: Writes otherwise.\ninstructions");
    let needs = format!("{WRITER}inputs: {{required: [title]}}\n");
    for changed in [None, Some(needs), Some(told)] {
        let boss = delegating("boss", "agent:writer")
            + "governance: {tool_policies: {'agent:writer': ask}}\n";
        let setup = tree().agent("boss", &boss).scenario("boss", &delegates("agent:writer"));
        let mut service = setup.start(db).await;
        let run = service.enqueue("boss").await;
        let waiting = parked(&service, &run).await; // for the call of the writer
        assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
        let of_child = |run: &Value| run["pending"][0]["tool"] == "file_ops";
        let waiting = service.until(&run, of_child).await;
        service.kill().await;
        let file = service.dir.path().join("agents/writer.yaml");
        match &changed {
            None => std::fs::remove_file(&file).unwrap(),
            Some(text) => std::fs::write(&file, format!("name: writer\n{text}")).unwrap(),
        }
        service.restart().await;
        assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
        let boss = ended(&service, &run).await;
        assert_eq!(boss["output"]["result"], "told: written: Appen", "{changed:?}: {boss:#}");
        let calls = service.get(&format!("{run}/tool-calls")).await.body;
        assert!(calls["data"][0]["child_run_id"].is_string(), "{calls:#}");
    }
}

async fn a_call_that_is_made_again_is_counted_once(db: Db) {
    for (limits, crashes) in [
        ("governance: {budget: {max_tool_calls: 2}}", false),
        ("governance: {budget: {max_tool_calls: 2}}", true),
        ("tool_options: {'agent:writer': {rate_limit_per_minute: 1}}", false),
        ("tool_options: {'agent:writer': {rate_limit_per_minute: 1}}", true),
    ] {
        let boss = format!("{}{limits}\n", delegating("boss", "agent:writer"));
        let works = WRITES.replace("text: 'written", "delay_ms: 600000\n    text: 'written");
        let setup = tree().agent("boss", &boss).scenario("boss", &delegates("agent:writer"));
        let setup = if crashes { setup.scenario("writer", &works) } else { setup };
        let mut service = setup.config("[runtime]\nlease = \"2s\"").start(db).await;
        let run = service.enqueue("boss").await;
        let waiting = parked(&service, &run).await;
        assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
        if crashes {
            let leaf = waiting["pending"][0]["run_id"].as_str().unwrap();
            let calls = format!("/v1/runs/{leaf}/tool-calls");
            service.until(&calls, |calls| calls["data"][0]["state"] == "succeeded").await;
            service.kill().await;
            service.write("scenarios/writer.yaml", WRITES);
            service.restart().await;
        }
        let boss = ended(&service, &run).await;
        let told = &boss["output"]["result"];
        assert_eq!(told, "told: written: Appen", "{limits} {crashes}: {boss:#}");
        assert_eq!(boss["budget"]["tree"]["tool_calls"], 2, "{boss:#}");
    }
}

async fn a_run_that_ends_ends_its_parked_children(db: Db) {
    for (rules, reason) in [
        ("governance: {budget: {max_duration_seconds: 8}}", "duration_exceeded"),
        ("throw_on_tool_failure: true", "tool_failure"),
        ("limits: {error_threshold: 1}", "error"),
    ] {
        // Fails when it is told to.
        let work = "import os, time\n\
                    while not os.path.exists(os.environ['TOOLLOOP_WORKSPACE'] + '/go'): time.sleep(0.01)\n\
                    raise SystemExit('broken')";
        let work = python("work", work, ", effect: read");
        let boss = format!(
            "model: scripted/boss\ninstructions: Delegate.\ntools: ['agent:asker', 'script:it/work']\n\
             parallel_tool_calls: true\nenable_double_confirmation: false\n{rules}\n"
        );
        let service = Setup::new()
            .agent("boss", &boss)
            .scenario(
                "boss",
                "steps:\n  - tool_calls: [{tool: \"agent:asker\", arguments: {}}, \
                 {tool: \"script:it/work\", arguments: {}}]\n  - text: done\n",
            )
            .agent("asker", ASKER)
            .scenario("asker", ASKS)
            .tools("it", &format!("tools:\n{work}"))
            .file("a.txt", "a")
            .start(db)
            .await;
        let run = service.enqueue("boss").await;
        service.until(&run, |run| run["pending"][0]["tool"] == "file_ops").await;
        if reason != "duration_exceeded" {
            service.write("workspace/default/go", "");
        }
        let boss = ended(&service, &run).await;
        assert_eq!(boss["termination_reason"], reason, "{rules}: {boss:#}");
        let calls = service.get(&format!("{run}/tool-calls")).await.body;
        let asked = &calls["data"][0];
        assert_eq!((&asked["tool"], &asked["state"]), (&json!("agent:asker"), &json!("cancelled")));
        assert!(!asked["result"].as_str().unwrap().contains("not executed"), "{asked:#}");
        let child = format!("/v1/runs/{}", asked["child_run_id"].as_str().unwrap());
        let child = ended(&service, &child).await;
        assert_eq!(child["status"], "cancelled", "{child:#}");
        assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    }
}

/// `both` has two agents work at once that only read, the first of which is `asker`.
fn side_by_side(second: &str, rules: &str) -> Setup {
    let both = format!(
        "model: scripted/both\ninstructions: Delegate.\ntools: ['agent:asker', 'agent:{second}']\n\
         parallel_tool_calls: true\nenable_double_confirmation: false\n{rules}\n"
    );
    let calls = format!(
        "steps:\n  - tool_calls: [{{tool: \"agent:asker\", arguments: {{}}}}, \
         {{tool: \"agent:{second}\", arguments: {{}}}}]\n  - text: '{{{{ results | join(\" / \") }}}}'\n"
    );
    Setup::new()
        .agent("both", &both)
        .scenario("both", &calls)
        .agent("asker", ASKER)
        .scenario("asker", ASKS)
}

async fn pending_calls_of_a_child_are_seen_while_another_works(db: Db) {
    let reader = "model: mock/reader\ninstructions: Read.\nenable_double_confirmation: false\n\
                  governance: {autonomy: read-only}\n";
    let mock = MockModel::start().await;
    let (free, held) = watch::channel(false);
    mock.script([Reply::Held(held, Box::new(Reply::text("read")))]);
    let service = side_by_side("reader", "")
        .config(&provider(&mock))
        .agent("reader", reader)
        .agent("boss", &delegating("boss", "agent:both"))
        .scenario("boss", &delegates("agent:both"))
        .start(db)
        .await;
    let boss = service.enqueue("boss").await;
    let waiting = service.until(&boss, |run| run["pending"][0]["tool"] == "file_ops").await;
    assert_eq!(waiting["status"], "running", "the other one works: {waiting:#}");
    let listed = service.get("/v1/runs?agent=both").await.body["data"][0].clone();
    assert_eq!(listed["pending"], waiting["pending"], "{listed:#}");
    assert_eq!(listed["status"], "running", "{listed:#}");
    let leaf = format!("/v1/runs/{}", waiting["pending"][0]["run_id"].as_str().unwrap());
    assert_eq!(service.get(&leaf).await.body["agent"], "asker");
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let answered = service.until(&boss, |run| run["pending"] == json!([])).await;
    assert_eq!(answered["status"], "running", "{answered:#}");
    free.send_replace(true);
    let boss = ended(&service, &boss).await;
    assert_eq!(boss["output"]["result"], "told: listed / read", "{boss:#}");
}

/// Its first child has lost its end when the second one is answered.
async fn a_run_goes_on_behind_a_child_that_cannot_be_read(db: Db) {
    let service = side_by_side("second", "")
        .agent("second", &ASKER.replace("scripted/asker", "scripted/second"))
        .scenario("second", ASKS)
        .start(db)
        .await;
    let run = service.enqueue("both").await;
    let wait = |run: &Value, calls| run["pending"].as_array().is_some_and(|it| it.len() == calls);
    service.until(&run, |run| wait(run, 2)).await;
    let waiting = parked(&service, &run).await;
    let first = waiting["pending"][0]["run_id"].as_str().unwrap();
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    ended(&service, &format!("/v1/runs/{first}")).await;
    let last = format!("(SELECT max(seq) FROM run_events WHERE run_id = '{first}')");
    let deletion = format!("DELETE FROM run_events WHERE run_id = '{first}' AND seq = {last}");
    change(&service, &deletion).await;
    let waiting = service.until(&run, |run| wait(run, 1)).await;
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let run = ended(&service, &run).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let told = run["output"]["result"].as_str().unwrap();
    assert!(told.contains("cannot be read") && told.contains("listed"), "{run:#}");
}

async fn a_child_that_fails_ends_a_run_beside_another_that_waits(db: Db) {
    let broken = "steps:\n  - tool_calls: [{tool: file_ops, arguments: {operation: list, path: .}}]\n  \
                  - error: {status: 400, message: broken}\n";
    for (rules, reason) in [
        ("throw_on_tool_failure: true", Some("tool_failure")),
        ("limits: {error_threshold: 1}", Some("error")),
        ("", None),
    ] {
        let service = side_by_side("broken", rules)
            .agent("broken", &ASKER.replace("scripted/asker", "scripted/broken"))
            .scenario("broken", broken)
            .start(db)
            .await;
        let run = service.enqueue("both").await;
        let both_wait = |run: &Value| run["pending"].as_array().unwrap().len() == 2;
        let waiting = service.until(&run, both_wait).await;
        service.until(&run, |run| run["status"] == "awaiting_approval").await;
        let of = async |agent: &str| {
            for pending in waiting["pending"].as_array().unwrap() {
                let child = format!("/v1/runs/{}", pending["run_id"].as_str().unwrap());
                if service.get(&child).await.body["agent"] == agent {
                    return json!({"pending": [pending]});
                }
            }
            panic!("{agent} does not wait: {waiting:#}")
        };
        let (first, other) = (of("broken").await, of("asker").await);
        assert_eq!(settle(&service, &first, "approve").await.status, 200);
        let Some(reason) = reason else {
            let calls = format!("{run}/tool-calls");
            service.until(&calls, |calls| calls["data"][1]["state"] == "failed").await;
            parked(&service, &run).await;
            assert_eq!(settle(&service, &other, "approve").await.status, 200);
            let run = ended(&service, &run).await;
            let told = run["output"]["result"].as_str().unwrap();
            assert!(told.starts_with("listed / ") && told.contains("MODEL_ERROR"), "{run:#}");
            assert_eq!(run["tool_calls_made"], 2, "{run:#}");
            continue;
        };
        let run = ended(&service, &run).await;
        assert_eq!(run["termination_reason"], reason, "{rules}: {run:#}");
        let asker = format!("/v1/runs/{}", other["pending"][0]["run_id"].as_str().unwrap());
        assert_eq!(ended(&service, &asker).await["status"], "cancelled");
        assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    }
}

async fn results_of_children_outlast_the_wait_of_another(db: Db) {
    let agents = ["asker", "lister", "broken"];
    let tools = agents.map(|agent| format!("'agent:{agent}'")).join(", ");
    let calls = agents.map(|agent| format!("{{tool: \"agent:{agent}\", arguments: {{}}}}"));
    let all = format!(
        "model: scripted/all\ninstructions: Delegate.\ntools: [{tools}]\n\
         parallel_tool_calls: true\nenable_double_confirmation: false\n\
         governance: {{budget: {{max_duration_seconds: 20}}}}\n"
    );
    let steps = format!(
        "steps:\n  - tool_calls: [{}]\n  - text: '{{{{ results | join(\" / \") }}}}'\n",
        calls.join(", ")
    );
    let broken = ASKS.replace("- text: listed", "- error: {status: 400, message: broken}");
    let service = Setup::new()
        .agent("all", &all)
        .scenario("all", &steps)
        .agent("asker", ASKER)
        .scenario("asker", ASKS)
        .agent("lister", ASKER)
        .agent("broken", &ASKER.replace("scripted/asker", "scripted/broken"))
        .scenario("broken", &broken)
        .start(db)
        .await;
    let run = service.enqueue("all").await;
    let all_wait = |run: &Value| run["pending"].as_array().unwrap().len() == 3;
    let waiting = service.until(&run, all_wait).await;
    parked(&service, &run).await;
    tokio::time::sleep(std::time::Duration::from_millis(20_500)).await; // longer than it may work
    let approve = async |agent: &str| {
        for pending in waiting["pending"].as_array().unwrap() {
            let child = format!("/v1/runs/{}", pending["run_id"].as_str().unwrap());
            if service.get(&child).await.body["agent"] == agent {
                let answered = settle(&service, &json!({"pending": [pending]}), "approve").await;
                assert_eq!(answered.status, 200, "{:#}", answered.body);
                return child;
            }
        }
        panic!("{agent} does not wait: {waiting:#}")
    };
    let lister = approve("lister").await;
    assert_eq!(ended(&service, &lister).await["status"], "completed");
    approve("broken").await;
    let calls = format!("{run}/tool-calls");
    let calls = service.until(&calls, |calls| calls["data"][2]["result"].is_string()).await;
    let calls = calls["data"].as_array().unwrap();
    let states: Vec<&str> = calls.iter().map(|call| call["state"].as_str().unwrap()).collect();
    assert_eq!(states[1..], ["succeeded", "failed"], "{calls:#?}");
    approve("asker").await;
    let run = ended(&service, &run).await;
    let told = run["output"]["result"].as_str().unwrap();
    assert!(told.starts_with("listed / listed / ") && told.contains("MODEL_ERROR"), "{run:#}");
}

async fn large_results_are_kept_when_a_run_parks(db: Db) {
    let files: Vec<String> = (0..5).map(|n| format!("f{n}.txt")).collect();
    let read = |path| format!("{{tool: file_ops, arguments: {{operation: read, path: {path}}}}}");
    let reads: Vec<String> = files.iter().map(read).collect();
    let both = "model: scripted/both\ninstructions: Delegate.\ntools: ['agent:asker', file_ops]\n\
                parallel_tool_calls: true\nenable_double_confirmation: false\n\
                limits: {max_tool_calls_per_iteration: 8}\n";
    let steps = format!(
        "steps:\n  - tool_calls: [{}, {{tool: \"agent:asker\", arguments: {{}}}}]\n  - text: '{{{{ results[5] }}}}'\n",
        reads.join(", ")
    );
    let setup = Setup::new()
        .agent("both", both)
        .scenario("both", &steps)
        .agent("asker", ASKER)
        .scenario("asker", ASKS);
    let content = "a line of a large file\n".repeat(4000);
    let setup = files.iter().fold(setup, |setup, path| setup.file(path, &content));
    let service = setup.start(db).await;
    let run = service.enqueue("both").await;
    let waiting = parked(&service, &run).await;
    let calls = service.get(&format!("{run}/tool-calls")).await.body;
    let calls = calls["data"].as_array().unwrap();
    let bytes: usize = calls.iter().filter_map(|call| Some(call["result"].as_str()?.len())).sum();
    assert!(bytes > 256 << 10, "{bytes} bytes are not large");
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let ended = ended(&service, &run).await;
    assert_eq!(ended["output"]["result"], "listed", "{ended:#}");
    let types = event_types(&service, &run).await;
    assert_eq!(types.iter().filter(|kind| *kind == "run.resumed").count(), 1, "{types:?}");
}

async fn cancelling_a_parked_tree_ends_all_of_it(db: Db) {
    let service = tree().start(db).await;
    let run = service.enqueue("boss").await;
    let waiting = parked(&service, &run).await;
    let leaf = format!("/v1/runs/{}", waiting["pending"][0]["run_id"].as_str().unwrap());
    let cancelled = service.post(&format!("{run}/cancel"), &json!({})).await;
    assert!(cancelled.status.is_success(), "{:#}", cancelled.body);
    for run in [&run, &leaf] {
        assert_eq!(ended(&service, run).await["status"], "cancelled");
    }
    assert_eq!(service.get("/v1/approvals").await.body["data"], json!([]));
    assert_eq!(settle(&service, &waiting, "approve").await.status, 409);
}

async fn a_tree_whose_parents_are_a_circle_is_shown(db: Db) {
    let service = tree().start(db).await;
    let run = service.enqueue("boss").await;
    let waiting = parked(&service, &run).await;
    let leaf = waiting["pending"][0]["run_id"].as_str().unwrap();
    let circle = format!("UPDATE runs SET parent_run_id = '{leaf}' WHERE parent_run_id IS NULL");
    change(&service, &format!("DELETE FROM approvals; {circle}")).await;
    let shown = service.get(&run).await;
    assert_eq!((shown.status.as_u16(), &shown.body["pending"]), (200, &json!([])));
}

async fn a_parked_tree_survives_crashes(db: Db) {
    let mut service = tree().config("[runtime]\nlease = \"2s\"").start(db).await;
    let run = service.enqueue("boss").await;
    let waiting = parked(&service, &run).await;
    service.kill().await;
    service.restart().await;
    assert_eq!(parked(&service, &run).await["pending"], waiting["pending"]);
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    service.kill().await;
    service.restart().await;
    let boss = ended(&service, &run).await;
    assert_eq!(boss["status"], "completed", "{boss:#}");
    assert_eq!(boss["tool_calls_made"], 1);
}

async fn an_end_without_output_is_told_to_the_parent(db: Db) {
    let service = tree().start(db).await;
    let denied = service.enqueue("lead").await;
    let waiting = parked(&service, &denied).await;
    assert_eq!(settle(&service, &waiting, "deny").await.status, 200);
    let run = ended(&service, &denied).await;
    assert_eq!(run["output"]["result"], "told: written: Error", "{run:#}");

    let parent = service.enqueue("lead").await;
    let waiting = parked(&service, &parent).await;
    let leaf = format!("/v1/runs/{}", waiting["pending"][0]["run_id"].as_str().unwrap());
    service.post(&format!("{leaf}/cancel"), &json!({})).await;
    let run = ended(&service, &parent).await;
    let told = run["output"]["result"].as_str().unwrap();
    assert!(told.contains("The agent writer was cancelled"), "{told}");
}

async fn a_conversation_that_was_handed_over_waits_as_well(db: Db) {
    let service = tree()
        .agent("front", &delegating("front", "transfer_to_writer"))
        .scenario("front", &delegates("transfer_to_writer"))
        .start(db)
        .await;
    let run = service.enqueue("front").await;
    let waiting = parked(&service, &run).await;
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    let types = event_types(&service, &run).await;
    assert_eq!(types.iter().filter(|kind| *kind == "handoff.started").count(), 1, "{types:?}");
}

async fn calls_beside_a_parked_child_keep_their_results(db: Db) {
    let both = "model: scripted/both\ninstructions: Delegate.\n\
                tools: ['agent:writer', 'agent:reader']\nenable_double_confirmation: false\n";
    let service = tree()
        .agent("both", both)
        .scenario(
            "both",
            "steps:\n  - tool_calls: [{tool: \"agent:reader\", arguments: {n: 1}}, \
             {tool: \"agent:writer\", arguments: {}}, {tool: \"agent:reader\", arguments: {n: 2}}]\n  \
             - text: '{{ results | join(\" / \") }}'\n",
        )
        .agent("reader", "model: scripted/reader\ninstructions: Read.\n")
        .scenario("reader", "steps: [{text: 'read {{ inputs.n }}'}]")
        .start(db)
        .await;
    let run = service.enqueue("both").await;
    let waiting = parked(&service, &run).await;
    assert_eq!(settle(&service, &waiting, "approve").await.status, 200);
    let run = ended(&service, &run).await;
    assert_eq!(run["output"]["result"], "read 1 / written: Appen / read 2", "{run:#}");
    assert_eq!(run["tool_calls_made"], 3);
}

/// Approvals come at once, so children end while their parents are being parked.
async fn many_trees_miss_no_end(db: Db) {
    let service = tree().start(db).await;
    let mut trees = Vec::new();
    for _ in 0..12 {
        trees.push(service.enqueue("lead").await);
    }
    let mut approved = std::collections::BTreeSet::new();
    while approved.len() < trees.len() {
        let asked = service.until("/v1/approvals", |asked| asked["data"] != json!([])).await;
        for asked in asked["data"].as_array().unwrap() {
            let (run, call) =
                (asked["run_id"].as_str().unwrap(), asked["call_id"].as_str().unwrap());
            let path = format!("/v1/runs/{run}/tool-calls/{call}/approve");
            if service.post(&path, &json!({})).await.status == 200 {
                approved.insert(run.to_owned());
            }
        }
    }
    for run in &trees {
        assert_eq!(ended(&service, run).await["status"], "completed");
    }
}

async fn a_session_and_its_stream_wait_for_the_tree(db: Db) {
    let service = tree().start(db).await;
    let path = "/v1/agents/lead/invoke-iterative";
    let first = service.post(path, &json!({"session_id": "s"})).await;
    assert_eq!(first.status, 202, "{:#}", first.body);
    let busy = service.post(path, &json!({"session_id": "s"})).await;
    assert_eq!(busy.status, 409, "the parked run holds its session: {:#}", busy.body);
    let run = format!("/v1/runs/{}", first.body["run_id"].as_str().unwrap());
    let stream = service.request(Method::GET, &format!("{run}/events"));
    let stream = stream.header("accept", "text/event-stream").send().await.unwrap();
    assert_eq!(settle(&service, &first.body, "approve").await.status, 200);
    let told = stream.text().await.unwrap();
    let position = |kind: &str| {
        told.find(&format!("event: {kind}\n")).unwrap_or_else(|| panic!("{kind}: {told}"))
    };
    assert!(position("tool_call.awaiting_child") < position("approval.resolved"));
    assert!(position("approval.resolved") < position("run.completed"));
}

async fn a_parent_runs_while_its_child_does(db: Db) {
    let (setup, mock, free) = held_tree().await;
    let service = setup.start(db).await;
    let boss = service.post("/v1/agents/boss/invoke-iterative", &json!({})).await.body;
    let run = format!("/v1/runs/{}", boss["run_id"].as_str().unwrap());
    assert_eq!(settle(&service, &boss, "approve").await.status, 200);
    let working = service.until(&run, |run| run["pending"] == json!([])).await;
    assert_eq!(working["status"], "running", "no answer is outstanding: {working:#}");
    mock.wait_for_requests(2).await;
    free.send_replace(true);
    let waited = service.get(&format!("{run}/wait?timeout=60")).await.body;
    assert_eq!(waited["status"], "completed", "{waited:#}");
}

/// The agents of the runs that are listed by a status, one run a page.
async fn listed(service: &Service, status: &str) -> Vec<String> {
    let (mut agents, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = service.get(&format!("/v1/runs?status={status}&limit=1{cursor}")).await.body;
        for run in page["data"].as_array().unwrap() {
            assert_eq!(run["status"], status, "{run:#}");
            agents.push(run["agent"].as_str().unwrap().to_owned());
        }
        let Some(next) = page["next_cursor"].as_str() else { break };
        cursor = format!("&cursor={next}");
    }
    agents.sort_unstable();
    agents
}

/// The statuses of the runs that a search finds among those that are listed by a status.
async fn found(service: &Service, status: &str, word: &str) -> Vec<String> {
    let page = service.get(&format!("/v1/runs?status={status}&q={word}")).await.body;
    let runs = page["data"].as_array().unwrap().iter();
    runs.map(|run| run["status"].as_str().unwrap().to_owned()).collect()
}

async fn a_tree_is_listed_by_the_status_that_it_shows(db: Db) {
    let (setup, _mock, free) = held_tree().await;
    let slow = python("slow", "import time; time.sleep(600)", ", effect: once");
    let mut service = setup
        .agent("chief", &delegating("chief", "agent:worker"))
        .scenario("chief", &delegates("agent:worker"))
        .agent("worker", &delegating("worker", "script:it/slow"))
        .scenario("worker", &delegates("script:it/slow"))
        .tools("it", &format!("tools:\n{slow}"))
        .config("[runtime]\nlease = \"2s\"\n")
        .start(db)
        .await;
    let boss = service.post("/v1/agents/boss/invoke-iterative", &json!({})).await.body;
    let tree = ["boss", "lead", "writer"];
    assert_eq!(listed(&service, "awaiting_approval").await, tree);
    assert_eq!(found(&service, "awaiting_approval", "boss").await, ["awaiting_approval"]);
    assert_eq!(listed(&service, "running").await, [""; 0]);
    assert_eq!(settle(&service, &boss, "approve").await.status, 200);
    let run = format!("/v1/runs/{}", boss["run_id"].as_str().unwrap());
    let writer = format!("/v1/runs/{}", boss["pending"][0]["run_id"].as_str().unwrap());
    service.until(&writer, |run| run["status"] == "running").await;
    assert_eq!(listed(&service, "running").await, tree);
    assert_eq!(listed(&service, "awaiting_approval").await, [""; 0]);
    assert_eq!(found(&service, "running", "boss").await, ["running"]);
    assert_eq!(found(&service, "awaiting_approval", "boss").await, [""; 0]);
    free.send_replace(true);
    ended(&service, &run).await;
    assert_eq!(listed(&service, "completed").await, tree);

    let run = service.enqueue("chief").await;
    let calls = "/v1/runs?agent=worker";
    let calls = service.until(calls, |runs| runs["data"][0]["run_id"].is_string()).await;
    let worker = calls["data"][0]["run_id"].as_str().unwrap().to_owned();
    let calls = format!("/v1/runs/{worker}/tool-calls");
    service.until(&calls, |calls| calls["data"][0]["state"] == "dispatched").await;
    service.kill().await;
    service.restart().await;
    let chief = service.until(&run, |run| run["status"] == "needs_review").await;
    assert_eq!(listed(&service, "needs_review").await, ["chief", "worker"]);
    assert_eq!(found(&service, "needs_review", "chief").await, ["needs_review"]);
    assert_eq!(listed(&service, "awaiting_approval").await, [""; 0]);
    let call = chief["pending"][0]["call_id"].as_str().unwrap();
    let resolve = format!("/v1/runs/{worker}/tool-calls/{call}/resolve");
    let happened = json!({"outcome": "happened", "result": "it did"});
    assert_eq!(service.post(&resolve, &happened).await.status, 200);
    assert_eq!(ended(&service, &run).await["status"], "completed");
    assert_eq!(listed(&service, "needs_review").await, [""; 0]);
}
