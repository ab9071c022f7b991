//! A provider that refuses: what many runs of it ask together, and how they end.
//!
//! | together with | here |
//! |---|---|
//! | children | `a_fan_out_asks_a_refusing_provider_little`, `a_parent_elsewhere_starts_no_more_children` |
//! | runs at the same time | `a_burst_of_runs_outlives_refusals`, `a_provider_that_stays_away_ends_all` |
//! | cancel, deadline, budgets | `a_run_that_waits_for_a_provider_can_be_cancelled`: no iteration is counted |
//! | fallbacks, other providers and models | `others_are_not_held_up` |
//! | crash | what is known of a provider is forgotten with the process: a repeated call asks again |
//! | another replica | each knows for itself: a bound for each |
//! | streaming | `model.retried` tells followers of a wait, as in `retries` |
//! | sessions, tenants, parked, dry run, console, command line | no difference: a wait is part of a model call |

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::mock_model::{MockModel, Reply};
use crate::service::{Db, Service, Setup, on_both_stores};

on_both_stores! {
    a_fan_out_asks_a_refusing_provider_little,
    a_provider_that_recovers_serves_all,
    a_burst_of_runs_outlives_refusals,
    a_provider_that_stays_away_ends_all,
    a_parent_elsewhere_starts_no_more_children,
    others_are_not_held_up,
    a_run_that_waits_for_a_provider_can_be_cancelled,
}

const CHILDREN: usize = 64;
/// Runs that are started at once.
const RUNS: usize = 20;
/// In a second.
const PROBES: usize = 8;

const PARENT: &str = "
model: mock/one
instructions: Ask the helper.
tools: ['agent:helper']
limits: {max_tool_calls_per_iteration: 64, error_threshold: 100}
enable_double_confirmation: false
";

const HELPER: &str = "
model: mock/one
description: Helps.
inputs: {type: object, properties: {task: {type: integer}}}
enable_double_confirmation: false
";

/// The provider, under the name by which agents know it.
fn provider(name: &str, mock: &MockModel) -> String {
    format!(
        "[models.{name}]\nkind = \"openai\"\nbase_url = \"{}\"\nmax_retries = 2\n\
         rate_limit_patience = \"1s\"\n",
        mock.base_url()
    )
}

fn seconds(time: Duration) -> usize {
    usize::try_from(time.as_secs()).unwrap()
}

fn fan_out(children: usize) -> Reply {
    let call = |task| ("agent__helper".to_owned(), json!({ "task": task }).to_string());
    Reply::ToolCalls((0..children).map(call).collect())
}

async fn family(db: Db, provider: &str, at_once: bool) -> Service {
    Setup::new()
        .config(provider)
        .agent("parent", &format!("{PARENT}parallel_tool_calls: {at_once}\n"))
        .agent("helper", HELPER)
        .start(db)
        .await
}

async fn children(service: &Service, parent: &Value) -> Vec<Value> {
    let parent = parent["run_id"].as_str().unwrap();
    let listed = service.get(&format!("/v1/runs?parent_run_id={parent}&limit=100")).await.body;
    listed["data"].as_array().unwrap().clone()
}

async fn a_fan_out_asks_a_refusing_provider_little(db: Db) {
    let limited = |wait| Reply::error(429, "rate_limit_exceeded", wait);
    let spent = Reply::error(429, "insufficient_quota", None);
    // What is answered, whether the children go side by side, and the most requests: the parent's
    // first, those that are under way before the first refusal, and what the parent asks for itself;
    // then the probes of each second.
    let table = [
        ("rate_limit_exceeded", limited(None), true, 1 + 64 + 1, PROBES),
        ("rate_limit_exceeded", limited(Some(200)), true, 1 + 64 + 1, PROBES),
        ("insufficient_quota", spent.clone(), true, 1 + 64 + 1, 0),
        ("rate_limit_exceeded", limited(None), false, 1 + 1 + 1, PROBES),
        ("insufficient_quota", spent, false, 1 + 1 + 1, 0),
    ];
    for (code, reply, at_once, most, probes) in table {
        let mock = MockModel::start().await;
        mock.script([fan_out(if at_once { CHILDREN } else { 12 })]);
        mock.always(reply);
        let service = family(db, &provider("mock", &mock), at_once).await;
        let began = Instant::now();
        let run = service.run("parent", &json!({})).await;
        let said =
            (&run["status"], &run["error"]["code"], &run["error"]["context"]["provider_code"]);
        assert_eq!(said, (&json!("failed"), &json!("MODEL_ERROR"), &json!(code)), "{run:#}");
        // The patience is a second, and a slow machine takes longer for it.
        let most = most + probes * seconds(began.elapsed()).max(1);
        let asked = mock.requests().len();
        assert!(asked <= most, "{code} {at_once}: {asked} requests");
        let children = children(&service, &run).await;
        for child in &children {
            assert_eq!(child["status"], "failed", "{child:#}");
            assert_eq!(child["error"]["code"], "MODEL_ERROR", "{child:#}");
            assert_eq!(child["iterations"], 0, "{child:#}");
        }
        let started = if at_once { 1..=CHILDREN } else { 1..=1 };
        assert!(started.contains(&children.len()), "{code} {at_once}: {}", children.len());
        println!("{code}, at once {at_once}: {asked} requests, {} children", children.len());
    }
}

async fn a_provider_that_recovers_serves_all(db: Db) {
    let mock = MockModel::start().await;
    mock.script([fan_out(CHILDREN)]);
    let began = OnceLock::new();
    mock.reply_by(move |_| {
        if began.get_or_init(Instant::now).elapsed() < Duration::from_millis(600) {
            Reply::error(429, "rate_limit_exceeded", Some(400))
        } else {
            Reply::text("done")
        }
    });
    // A slow machine needs more than a second for its next try.
    let patient = provider("mock", &mock).replace("\"1s\"", "\"30s\"");
    let service = family(db, &patient, true).await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!((&run["status"], &run["iterations"]), (&json!("completed"), &json!(2)), "{run:#}");
    let children = children(&service, &run).await;
    assert_eq!(children.len(), CHILDREN);
    assert!(children.iter().all(|child| child["status"] == "completed"), "{children:#?}");
    let asked = mock.requests().len();
    assert!(asked <= 1 + CHILDREN + 1 + CHILDREN + 1, "{asked}");
    println!("{asked} requests");
}

/// Runs that are started at once; what becomes of them, and how long that takes.
async fn burst(service: &Service) -> (Vec<Value>, Duration) {
    let (began, nothing) = (Instant::now(), json!({}));
    let runs = (0..RUNS).map(|_| service.run("asker", &nothing));
    let runs = futures::future::join_all(runs).await;
    (runs, began.elapsed())
}

async fn a_burst_of_runs_outlives_refusals(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::text("done"));
    // What `max_retries` allows is for faults and for refusals that do not say how long to wait.
    let config = provider("mock", &mock).replace("\"1s\"", "\"30s\"");
    let setup = Setup::new().config(&config.replace("max_retries = 2", "max_retries = 1"));
    let service = setup.agent("asker", "model: mock/one\n").start(db).await;
    let (_, unrefused) = burst(&service).await;
    let before = mock.requests().len();
    let began = OnceLock::new();
    mock.reply_by(move |_| {
        if began.get_or_init(Instant::now).elapsed() < Duration::from_secs(5) {
            Reply::error(429, "rate_limit_exceeded", Some(1000))
        } else {
            Reply::text("done")
        }
    });
    let (runs, took) = burst(&service).await;
    for run in &runs {
        assert_eq!(run["status"], "completed", "{run:#}");
    }
    let asked = mock.requests().len() - before;
    assert!(took < Duration::from_secs(20) + 3 * unrefused, "{took:?}, and {unrefused:?} without");
    assert!(asked <= RUNS + 6 + RUNS, "{asked} requests");
    println!("{asked} requests, {took:?}");
}

async fn a_provider_that_stays_away_ends_all(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::text("done"));
    let config = provider("mock", &mock).replace("\"1s\"", "\"3s\"");
    let setup = Setup::new().config(&config).agent("asker", "model: mock/one\n");
    let service = setup.start(db).await;
    let (_, unrefused) = burst(&service).await;
    let before = mock.requests().len();
    mock.always(Reply::error(429, "rate_limit_exceeded", Some(1000)));
    let (runs, took) = burst(&service).await;
    for run in &runs {
        let context = &run["error"]["context"];
        assert_eq!(run["error"]["code"], "MODEL_ERROR", "{run:#}");
        let code =
            if context["attempts"] == 0 { Value::Null } else { json!("rate_limit_exceeded") };
        assert_eq!(context["provider_code"], code, "{run:#}");
        assert_eq!((&run["status"], &run["iterations"]), (&json!("failed"), &json!(0)), "{run:#}");
    }
    let asked = mock.requests().len() - before;
    let most = Duration::from_secs(20) + 3 * unrefused;
    assert!(took >= Duration::from_secs(3) && took < most, "{took:?}, and {unrefused:?} without");
    assert!(asked <= RUNS + seconds(took) + 1, "{asked} requests in {took:?}");
    println!("{asked} requests, {took:?}");
}

async fn a_parent_elsewhere_starts_no_more_children(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::error(429, "insufficient_quota", None));
    let calls: Vec<String> = (1..=6)
        .map(|task| format!("{{tool: 'agent:helper', arguments: {{task: {task}}}}}"))
        .collect();
    let service = Setup::new()
        .config(&provider("mock", &mock))
        .agent("parent", &PARENT.replace("mock/one", "scripted/parent"))
        .scenario(
            "parent",
            &format!(
                "steps: [{{tool_calls: [{}]}}, {{text: \"{{{{ results | join('|') }}}}\"}}]",
                calls.join(", ")
            ),
        )
        .agent("helper", HELPER)
        .start(db)
        .await;
    let run = service.run("parent", &json!({})).await;
    assert_eq!(run["status"], "completed", "{run:#}");
    let told: Vec<&str> = run["output"]["result"].as_str().unwrap().split('|').collect();
    assert!(told[0].contains("failed (MODEL_ERROR)"), "{told:#?}");
    for result in &told[1..] {
        assert!(result.contains("The agent helper was not started"), "{result}");
        assert!(result.contains("(quota_exhausted)"), "{result}");
    }
    assert_eq!((told.len(), children(&service, &run).await.len()), (6, 1));
    assert_eq!(mock.requests().len(), 1);
}

async fn others_are_not_held_up(db: Db) {
    let (mock, other) = (MockModel::start().await, MockModel::start().await);
    mock.reply_by(|request| match request["model"].as_str() {
        Some("slow") => Reply::error(429, "rate_limit_exceeded", Some(60_000)),
        Some("spent") => Reply::error(429, "insufficient_quota", None),
        _ => Reply::text("same provider"),
    });
    other.always(Reply::text("other provider"));
    let agent = |model: &str, more: &str| {
        format!("model: {model}\nenable_double_confirmation: false\n{more}")
    };
    let service = Setup::new()
        .config(&format!("{}{}", provider("mock", &mock), provider("other", &other)))
        .agent("waits", &agent("mock/slow", ""))
        .agent("same", &agent("mock/quick", ""))
        .agent("other", &agent("other/any", ""))
        .agent("moves", &agent("mock/spent", "fallback_models: [other/any]"))
        .start(db)
        .await;
    let waiting = service.enqueue("waits").await;
    mock.wait_for_requests(1).await;
    for (agent, output) in [("same", "same provider"), ("other", "other provider")] {
        let run = service.run(agent, &json!({})).await;
        assert_eq!(run["output"], json!({ "result": output }), "{run:#}");
    }
    let before = mock.requests().len();
    for _ in 0..3 {
        let run = service.run("moves", &json!({})).await;
        assert_eq!(
            (&run["status"], &run["model"]),
            (&json!("completed"), &json!("other/any")),
            "{run:#}"
        );
    }
    assert_eq!(mock.requests().len(), before + 1, "a spent quota is asked for once");
    assert_eq!(service.get(&waiting).await.body["status"], "running");
    service.post(&format!("{waiting}/cancel"), &json!({})).await;
    service.until(&waiting, |run| run["status"] == "cancelled").await;
}

async fn a_run_that_waits_for_a_provider_can_be_cancelled(db: Db) {
    let mock = MockModel::start().await;
    mock.always(Reply::error(429, "rate_limit_exceeded", Some(60_000)));
    let service = Setup::new()
        .config(&provider("mock", &mock))
        .agent("asker", "model: mock/one\n")
        .start(db)
        .await;
    let refused = service.enqueue("asker").await;
    let has_waited = |events: &Value| {
        events["data"].as_array().unwrap().iter().any(|event| event["type"] == "model.retried")
    };
    service.until(&format!("{refused}/events"), has_waited).await;
    let waiting = service.enqueue("asker").await;
    service.until(&format!("{waiting}/events"), has_waited).await;
    let short = service.run("asker", &json!({"budget": {"max_duration_seconds": 15}})).await;
    assert_eq!(
        (&short["status"], &short["error"]["code"]),
        (&json!("failed"), &json!("MODEL_ERROR")),
        "{short:#}"
    );
    assert_eq!(short["error"]["context"]["attempts"], 0, "{short:#}");
    for run in [&refused, &waiting] {
        service.post(&format!("{run}/cancel"), &json!({})).await;
        let ended = service.until(run, |run| run["finished_at"].is_string()).await;
        assert_eq!(
            (&ended["status"], &ended["iterations"]),
            (&json!("cancelled"), &json!(0)),
            "{ended:#}"
        );
    }
    assert_eq!(mock.requests().len(), 1, "the second and the third did not ask");
}
