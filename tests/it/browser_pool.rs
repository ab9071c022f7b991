//! Runs that share the one browser: none has to wait for what another one waits for.

use rustix::process::Signal;
use serde_json::json;

use crate::approvals::paths;
use crate::browser::{PATIENT, Site, agent, scenario, signal_browsers};
use crate::chromium;
use crate::service::{Db, Setup};

#[tokio::test]
async fn a_page_that_does_not_open_holds_up_no_other_run() {
    chromium::program();
    let site = Site::start().await;
    let asks = "autonomy: full, tool_policies: {file_ops: ask}";
    let governance = site.governance().replace("autonomy: full", asks);
    let open = json!({"action": "open", "url": site.at("/")});
    let calls = [
        ("browser", open.clone()),
        ("file_ops", json!({"operation": "write", "path": "note", "content": "x"})),
        ("browser", json!({"action": "close"})),
    ];
    let turn = |(tool, arguments)| json!({"tool_calls": [{"tool": tool, "arguments": arguments}]});
    let turns: Vec<_> = calls.into_iter().map(turn).chain([json!({"text": "done"})]).collect();
    let parked = agent(&governance).replace("[browser]", "[browser, file_ops]");
    let service = Setup::new()
        .agent("has-a-page", &parked.replace("surfer", "has-a-page"))
        .scenario("has-a-page", &json!({"steps": turns}).to_string())
        .agent("surfer", &agent(&site.governance()))
        .scenario("surfer", &scenario(&[open]))
        .config(PATIENT)
        .start(Db::Sqlite)
        .await;
    let run = service.enqueue("has-a-page").await;
    let parked = service.until(&run, |run| run["status"] == "awaiting_approval").await;

    signal_browsers(&service, Signal::STOP);
    let others = [service.enqueue("surfer").await, service.enqueue("surfer").await];
    for other in &others {
        let started = |events: &serde_json::Value| events.to_string().contains("tool_call.started");
        service.until(&format!("{other}/events"), started).await;
    }
    let (_, calls) = paths(&parked);
    let approved = service.post(&format!("{}/approve", calls[0]), &json!({})).await;
    assert_eq!(approved.status, 200, "{:#}", approved.body);
    service.until(&run, |run| run["status"] == "completed").await;
    for other in &others {
        let events = service.get(&format!("{other}/events")).await.body.to_string();
        assert!(!events.contains("tool_call.completed"), "it waits for its page: {events}");
    }
    signal_browsers(&service, Signal::CONT);
    for other in &others {
        service.until(other, |run| run["status"] == "completed").await;
    }
}
