//! A replica is told to end while it drives runs: callers that wait for them are answered, and runs that
//! outlive its grace go on elsewhere, which counts as no crash.

use futures::future::join_all;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::site::{LEASE, Site, agent, counted, id_of, until_completed};
use crate::fault_rounds::rounds;
use crate::service::{Answer, Db, Service, Setup, Signal, answer};

/// Callers that wait for a run, which ends within the grace.
const SHORT: usize = 40;
/// Runs that outlive it.
const LONG: usize = 12;

#[tokio::test(flavor = "multi_thread")]
async fn a_replica_that_ends_drops_no_run_and_no_request() {
    let look = |hold: &str| {
        let call = "tool_calls: [{tool: 'http:effects/look', arguments: {hold: HOLD, \
                    name: '{{ inputs.name }} {{ step }}'}}]";
        call.replace("HOLD", hold)
    };
    let setup = |setup: Setup, at: usize| {
        let (look, held) = (look("never"), look("before"));
        // The replica that ends would take ten minutes for the third answer.
        let delay = if at == 0 { 600_000 } else { 0 };
        let long = format!(
            "steps: [{{{look}}}, {{{look}}}, {{delay_ms: {delay}, {look}}}, {{text: done}}]"
        );
        let short = format!("steps: [{{{held}}}, {{text: done}}]");
        let setup = agent(agent(setup, "short", &short), "long", &long);
        setup.config("[server]\nshutdown_grace = \"30s\"\n")
    };
    let mut site = Site::start(Db::Postgres, 2, LEASE * 10, setup).await;
    let (at, other) = (0, 1);
    let (mut driven, mut given_back) = (0, 0);
    for round in 0..rounds(1) {
        let inputs = json!({"name": round.to_string()});
        let (long, long_calls): (Vec<String>, Vec<_>) = (0..LONG)
            .map(|_| {
                let id = Uuid::now_v7();
                let body = json!({"run_id": id, "inputs": inputs});
                (format!("/v1/runs/{id}"), call(&site.replicas[at], "long", &body))
            })
            .unzip();
        site.effects.hold(true);
        let held = site.effects.held();
        let body = |number: usize| json!({"inputs": {"name": format!("{round} {number}")}});
        let calls: Vec<_> =
            (0..SHORT).map(|number| call(&site.replicas[at], "short", &body(number))).collect();
        site.effects.until_held(held + SHORT).await;
        let goes = |run: &Value| run["iterations"].as_u64().is_some_and(|done| done >= 2);
        join_all(long.iter().map(|run| site.replicas[other].until(run, goes))).await;
        driven += count(&site, "status = 'running'").await;
        site.replicas[at].signal(Signal::TERM);
        site.replicas[at].until("/readyz", |ready| ready["status"] == "draining").await;
        let late = call(&site.replicas[at], "short", &body(SHORT)).await.unwrap();
        assert_eq!((late.status.as_u16(), &late.body["code"]), (503, &json!("DRAINING")));
        site.effects.hold(false);
        for call in calls {
            let told = call.await.unwrap();
            let told = (told.status.as_u16(), told.body["status"].clone());
            assert_eq!(told, (200, json!("completed")));
        }
        for (run, call) in long.iter().zip(long_calls) {
            let told = call.await.unwrap();
            assert_eq!((told.status.as_u16(), &told.body["code"]), (503, &json!("DRAINING")));
            assert_eq!(told.body["run_id"], id_of(run), "it goes on and is found by its id");
        }
        assert_eq!(site.replicas[at].exit_code().await, Some(0), "{}", site.logs());
        site.replicas[at].until_logged("run is given back").await;
        given_back += site.replicas[at].log().matches("run is given back").count();
        for run in &long {
            let ended = until_completed(&site.replicas[other], run).await;
            assert_eq!(ended["iterations"], 4, "{ended:#}");
        }
        site.replicas[at].restart().await;
    }
    assert!(given_back > 0, "no run outlived the grace");
    assert_eq!(count(&site, "crash_count > 0").await, 0);
    println!(
        "{driven} runs were driven by replicas that ended, {given_back} of them went on elsewhere"
    );
}

async fn count(site: &Site, condition: &str) -> i64 {
    let sql = format!("SELECT count(*) FROM runs WHERE {condition}");
    counted(&site.replicas[0].database_url, &sql).await
}

fn call(service: &Service, agent: &str, body: &Value) -> JoinHandle<Answer> {
    let path = format!("/v1/agents/{agent}/invoke-iterative");
    tokio::spawn(answer(service.request(Method::POST, &path).json(body)))
}
