//! The gate together with handoffs, crashes, parked trees, a cancel, tools of the caller, and the replay
//! of a policy.

use serde_json::{Value, json};
use uuid::Uuid;

use crate::approvals::text;
use crate::script_tools::{events, python};
use crate::service::{Db, Service, Setup, on_both_stores};
use crate::web_fetch::Site;

on_both_stores! {
    declared_paths_hold_in_handoffs_and_after_crashes,
    a_document_of_the_web_is_read_by_a_child_that_waited,
    a_cancel_ends_the_fetch_of_a_document_in_a_child,
    a_policy_is_replayed_for_tools_of_the_caller_in_trees,
    rules_that_only_observe_warn_in_children,
    a_parent_that_only_observes_warns_in_children,
}

fn agent(model: &str, tools: &str, more: &str) -> String {
    format!(
        "model: scripted/{model}\ntools: {tools}\nenable_double_confirmation: false\n\
         limits: {{error_threshold: 50}}\n{more}\n"
    )
}

fn steps(calls: &[(&str, Value)]) -> String {
    let call = |(tool, arguments): &(&str, Value)| json!({"tool_calls": [{"tool": tool, "arguments": arguments}]});
    let answer = json!({"text": "{{ results[0] }}"});
    let steps: Vec<Value> = calls.iter().map(call).chain([answer]).collect();
    json!({ "steps": steps }).to_string()
}

async fn child_of(service: &Service, run: &str) -> Value {
    let children = service.get(&format!("/v1/runs?parent_run_id={run}")).await.body;
    assert_eq!(children["data"].as_array().unwrap().len(), 1, "{children:#}");
    children["data"][0].clone()
}

/// What was decided on the calls of a run, in order: decision and reason.
async fn decisions(service: &Service, run: &Value) -> Vec<(String, String)> {
    let path = format!("/v1/runs/{}/tool-calls?limit=200", text(run, "run_id"));
    let calls = service.get(&path).await.body["data"].as_array().unwrap().clone();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    calls.iter().map(|call| (text(&call["decision"]), text(&call["reason"]))).collect()
}

async fn declared_paths_hold_in_handoffs_and_after_crashes(db: Db) {
    let schema = ", effect: idempotent, input_schema: {type: object, properties: {file: {}}}";
    let options = "tool_options: {'script:it/*': {paths: [/file]}}\n";
    let tool = "script:it/notes";
    let works =
        steps(&["secret/x.txt", "out/b.txt", "a.txt"].map(|file| (tool, json!({"file": file}))));
    let mut service = Setup::new()
        .agent(
            "lead",
            &agent("lead", "[transfer_to_worker]", "governance: {paths: {deny: ['secret/**']}}"),
        )
        .scenario("lead", &steps(&[("transfer_to_worker", json!({}))]))
        .agent(
            "worker",
            &agent(
                "worker",
                "['script:it/notes']",
                &format!("{options}governance: {{autonomy: full, paths: {{write: ['out/**']}}}}"),
            ),
        )
        .scenario("worker", &works)
        .tools("it", &format!("tools:\n{}", python("notes", "print('noted')", schema)))
        .file("a.txt", "a")
        .file("secret/x.txt", "x")
        .config("[runtime]\nlease = \"2s\"\n")
        .start(db)
        .await;
    let mut deaths = 0;
    for nth in (2_u8..60).step_by(3) {
        service.kill().await;
        service.restart_to_crash(&format!("after_commit:{nth}")).await;
        let id = Uuid::from_u128(0x7000 << 64 | u128::from(nth)).to_string();
        let invoke = service.request(reqwest::Method::POST, "/v1/agents/lead/invoke-iterative");
        let invoke = invoke.header("Prefer", "respond-async").json(&json!({"run_id": id}));
        let _ = invoke.send().await;
        let mut died = false;
        let run = loop {
            if service.is_dead() {
                died = true;
                service.restart().await;
            }
            let asked = service.request(reqwest::Method::GET, &format!("/v1/runs/{id}")).send();
            let Ok(asked) = asked.await else { continue };
            if asked.status() == 404 {
                break Value::Null; // the process died before the run was accepted
            }
            let Ok(run) = asked.json::<Value>().await else { continue };
            if run["finished_at"].is_string() {
                break run;
            }
            tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        };
        deaths += usize::from(died);
        if !died {
            // It may be about to die of the commit that ended the run.
            service.kill_if_alive().await;
            service.restart().await;
        }
        if run.is_null() {
            continue;
        }
        assert_eq!(run["status"], "completed", "{run:#}\n{}", service.log());
        let worker = child_of(&service, &id).await;
        let decided = decisions(&service, &worker).await;
        let is = |at: usize, decision: &str, why: &str| {
            decided[at].0 == decision && decided[at].1.contains(why)
        };
        assert!(is(0, "blocked", "denied by secret/**"), "{nth}: {decided:?}");
        assert!(is(1, "allowed", ""), "{nth}: {decided:?}");
        assert!(is(2, "blocked", "may not be written"), "{nth}: {decided:?}");
        let started = events(&service, &worker, "tool_call.started").await;
        for event in &started {
            let kinds: Vec<&Value> = event["actions"].as_array().unwrap().iter().collect();
            let has = |kind: &str| {
                kinds.iter().any(|action| action["kind"] == kind && action["path"] == "out/b.txt")
            };
            assert!(has("read") && has("write"), "{nth}: {event:#}");
        }
        assert!(!started.is_empty());
        if !died {
            break;
        }
    }
    assert!(deaths > 2, "only {deaths} deaths");
}

/// `lead` asks `reader`, which fetches this page of the site; a person decides on the fetch where
/// the policy asks.
fn fetching(site: &Site, page: &str, policy: &str) -> Setup {
    let url = format!("http://127.0.0.2:{}{page}", site.port);
    let network = format!("{{allow: ['127.0.0.2:{}'], allow_private: [127.0.0.2]}}", site.port);
    let governance =
        format!("governance: {{network: {network}, tool_policies: {{web_fetch: {policy}}}}}");
    Setup::new()
        .agent("lead", &agent("lead", "['agent:reader']", ""))
        .scenario("lead", &steps(&[("agent:reader", json!({}))]))
        .agent("reader", &agent("reader", "[web_fetch]", &governance))
        .scenario("reader", &steps(&[("web_fetch", json!({"url": url}))]))
}

async fn a_document_of_the_web_is_read_by_a_child_that_waited(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let mut service = fetching(&site, "/tables", "ask").start(db).await;
    let asked = service.post("/v1/agents/lead/invoke-iterative", &json!({})).await;
    assert_eq!(asked.status, 202, "{:#}", asked.body);
    assert_eq!(site.requests(), 0, "nothing is fetched before it is approved");
    let pending = asked.body["pending"][0].clone();
    assert_eq!(pending["tool"], "web_fetch", "{:#}", asked.body);
    service.kill().await;
    service.restart().await;
    let (child, call) = (text(&pending, "run_id"), text(&pending, "call_id"));
    let approve = format!("/v1/runs/{child}/tool-calls/{call}/approve");
    assert_eq!(service.post(&approve, &json!({})).await.status, 200);
    let run = format!("/v1/runs/{}", text(&asked.body, "run_id"));
    let run = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let told = run["output"].to_string();
    assert!(told.contains("Low at six") && told.contains("High at twelve"), "{told}");
    assert_eq!(run["labels"], json!(["untrusted"]), "what a child read is its parent's, too");
    assert_eq!(site.requests(), 1);
    let record = service.get(&format!("/v1/audit?run_id={child}&outcome=succeeded")).await.body;
    let reasons = record["data"].to_string();
    assert!(reasons.contains("Approved by testadmin"), "{record:#}");
    assert_eq!(
        service.get(&format!("/v1/runs/{child}")).await.body["labels"],
        json!(["untrusted"])
    );
}

async fn a_cancel_ends_the_fetch_of_a_document_in_a_child(db: Db) {
    let site = Site::start("127.0.0.2").await;
    let patient = "[tools.web_fetch]\ntimeout = \"10m\"";
    let service = fetching(&site, "/endless", "allow").config(patient).start(db).await;
    let run = service.enqueue("lead").await;
    for _ in 0..6000 {
        if site.requests() > 0 {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    assert_eq!(site.requests(), 1);
    let begun = std::time::Instant::now();
    assert_eq!(service.post(&format!("{run}/cancel"), &json!({})).await.status, 202);
    let ended = service.until(&run, |run| run["finished_at"].is_string()).await;
    assert_eq!(ended["status"], "cancelled", "{ended:#}");
    assert!(begun.elapsed().as_secs() < 50, "the call itself would end after 60 seconds");
    let child = child_of(&service, text(&ended, "run_id")).await;
    let child = format!("/v1/runs/{}", text(&child, "run_id"));
    let child = service.until(&child, |run| run["finished_at"].is_string()).await;
    assert_eq!(child["status"], "cancelled", "{child:#}");
    let records = format!("/v1/audit?tool=web_fetch&run_id={}", text(&child, "run_id"));
    let audit = service.get(&records).await.body;
    assert_eq!(audit["data"][0]["outcome"], "cancelled", "{audit:#}");
}

async fn a_policy_is_replayed_for_tools_of_the_caller_in_trees(db: Db) {
    let lead = |policies: &str| {
        agent(
            "lead",
            "['agent:writer', file_ops]",
            &format!("governance: {{paths: {{write: ['**']}}, tool_policies: {{{policies}}}}}"),
        )
    };
    let writer =
        agent("writer", "[file_ops]", "governance: {autonomy: full, paths: {write: ['**']}}");
    let write =
        |path: &str| ("file_ops", json!({"operation": "append", "path": path, "content": "x"}));
    let service = Setup::new()
        .agent("lead", &lead(""))
        .agent("strict", &lead("").replace("write: ['**']", "write: ['**'], deny: ['b.txt']"))
        .scenario(
            "lead",
            &steps(&[write("a.txt"), ("agent:writer", json!({})), ("ask_user", json!({}))]),
        )
        .agent("writer", &writer)
        .scenario("writer", &steps(&[write("b.txt"), write("c.txt")]))
        .start(db)
        .await;
    let tool = json!({"name": "ask_user", "description": "Asks.", "effect": "read", "input_schema": {"type": "object"}});
    for name in ["lead", "strict"] {
        let path = format!("/v1/agents/{name}/invoke-iterative");
        let parked = service.post(&path, &json!({"client_tools": [tool]})).await.body;
        assert_eq!(parked["status"], "awaiting_tool_results", "{parked:#}");
        let pending = &parked["pending"][0];
        let path = format!(
            "/v1/runs/{}/tool-calls/{}/result",
            text(&parked, "run_id"),
            text(pending, "call_id")
        );
        assert_eq!(service.post(&path, &json!({"content": "yes"})).await.status, 200);
        let run = format!("/v1/runs/{}", text(&parked, "run_id"));
        service.until(&run, |run| run["status"] == "completed").await;
    }
    let replay = async |agent: &str, definition: Option<String>| {
        let body = definition.map_or(json!({}), |yaml| json!({"definition": yaml}));
        let replay = service.post(&format!("/v1/agents/{agent}/policy/replay"), &body).await;
        assert_eq!(replay.status, 200, "{:#}", replay.body);
        let replay = replay.body;
        let counts = ["calls", "unchanged", "unknown"].map(|key| replay[key].as_u64().unwrap());
        (counts, replay["newly"].clone(), replay["examples"].clone())
    };
    // Calls of the caller's tools and of children are judged like others.
    let (counts, _, examples) = replay("lead", None).await;
    assert_eq!((counts, &examples), ([3, 3, 0], &json!([])));
    let denied = lead("ask_user: deny").replace("model:", "name: lead\nmodel:");
    let (counts, newly, examples) = replay("lead", Some(denied)).await;
    assert_eq!((counts, &newly["blocked"]), ([3, 2, 0], &json!(1)), "{examples:#}");
    assert_eq!(
        (&examples[0]["tool"], &examples[0]["rule"]),
        (&json!("ask_user"), &json!("tool_policy"))
    );
    // The child of the strict parent was held to what that one denies, and is so again.
    let (counts, _, examples) = replay("writer", None).await;
    assert_eq!((counts, &examples), ([4, 4, 0], &json!([])));
    let denied = writer.replace("write: ['**']", "write: ['**'], deny: ['b.txt']");
    let denied = denied.replace("model:", "name: writer\nmodel:");
    let (counts, newly, examples) = replay("writer", Some(denied)).await;
    assert_eq!(
        (counts, &newly["blocked"]),
        ([4, 2, 1], &json!(1)),
        "one is blocked anew, and what followed it is unknown: {examples:#}"
    );
    // Without leave to call a child, what the run did afterwards is unknown.
    let denied = lead("'agent:*': deny").replace("model:", "name: lead\nmodel:");
    let (counts, newly, _) = replay("lead", Some(denied)).await;
    assert_eq!((counts, &newly["blocked"]), ([3, 1, 1], &json!(1)));
}

async fn rules_that_only_observe_warn_in_children(db: Db) {
    let rules = "governance: {autonomy: full, paths: {write: ['**'], deny: [{pattern: 'b.*', mode: observe}]}, \
                    tool_policies: {file_ops: {do: ask, mode: observe}}, \
                    flow: [{when: \"action.path == 'd.txt'\", do: deny, mode: observe}]}";
    are_observed_in_children(db, rules).await;
}

async fn a_parent_that_only_observes_warns_in_children(db: Db) {
    let rules = "governance: {mode: observe, autonomy: full, paths: {deny: ['b.*']}, tool_policies: {file_ops: ask}, \
                 flow: [{when: \"action.path == 'd.txt'\", do: deny}]}";
    are_observed_in_children(db, rules).await;
}

async fn are_observed_in_children(db: Db, rules: &str) {
    let child = |more: &str| {
        agent(
            "writer",
            "[file_ops]",
            &format!("governance: {{autonomy: full, paths: {{write: ['**']{more}}}}}"),
        )
    };
    let paths = ["a.txt", "b.txt", "c.txt", "d.txt"];
    let write =
        |path: &&str| ("file_ops", json!({"operation": "append", "path": path, "content": "x"}));
    let works = steps(&paths.iter().map(write).collect::<Vec<_>>());
    let asks = steps(&[("agent:writer", json!({})), ("agent:elsewhere", json!({}))]);
    let service = Setup::new()
        .agent("lead", &agent("lead", "['agent:writer', 'agent:elsewhere']", rules))
        .scenario("lead", &asks)
        .agent("writer", &child(", deny: ['c.*']"))
        .agent("elsewhere", &(child("") + "workspace: deep\n"))
        .scenario("writer", &works)
        .start(db)
        .await;
    let run = service.run("lead", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    for (name, c) in [("writer", "blocked"), ("elsewhere", "warned")] {
        let child = service.get(&format!("/v1/runs?agent={name}")).await.body["data"][0].clone();
        let decided = decisions(&service, &child).await;
        let said: Vec<&str> = decided.iter().map(|(decision, _)| decision.as_str()).collect();
        assert_eq!(said, ["warned", "warned", c, "warned"], "{name}: {decided:#?}");
        assert!(decided[0].1.contains("only observes"), "{decided:#?}");
        if name == "writer" {
            assert!(decided[1].1.contains("denied by b.*"), "the strictest is told: {decided:#?}");
        }
        assert!(decided[3].1.contains("it would have blocked it"), "{decided:#?}");
    }
    let files = |directory: &str| {
        let directory = service.dir.path().join("workspace/default").join(directory);
        paths.map(|path| directory.join(path).is_file())
    };
    assert_eq!((files("."), files("deep")), ([true, true, false, true], [true; 4]));
}
