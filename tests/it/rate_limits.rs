//! How often a key may invoke, as callers meet it: so many at once, then a refusal that says when.

use std::time::{Duration, Instant};

use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::service::{Answer, Db, Service, Setup, answer, on_both_stores};

on_both_stores! {
    a_key_is_limited_after_its_burst,
    a_request_after_retry_after_succeeds,
    a_key_can_have_limits_of_its_own,
    a_limit_without_a_burst_holds_from_the_first_request,
    a_rejected_request_has_consumed_its_token,
    auth_none_has_no_rate_limit,
    a_restart_does_not_refill_the_bucket,
    agents_with_other_limits_of_a_tool_do_not_share_them,
}

const TALKER: &str = "model: scripted/talker\ninstructions: Talk.\n";
const PATH: &str = "/v1/agents/talker/invoke-iterative";

fn talker(per_minute: u32, burst: u32) -> Setup {
    let limits =
        format!("[governance]\nrate_limit_per_minute = {per_minute}\nrate_limit_burst = {burst}");
    Setup::new()
        .agent("talker", TALKER)
        .scenario("talker", "steps: [{text: Hello.}]")
        .config(&limits)
}

fn header<'a>(answer: &'a Answer, name: &str) -> &'a str {
    answer.headers.get(name).map_or("", |value| value.to_str().unwrap())
}

/// The statuses of so many invocations at once.
async fn at_once(services: &[&Service], count: usize) -> Vec<u16> {
    let mut asked = JoinSet::new();
    for number in 0..count {
        let service = services[number % services.len()];
        let request = service.request(Method::POST, PATH).json(&json!({}));
        asked.spawn(async move { answer(request).await.status.as_u16() });
    }
    asked.join_all().await
}

async fn new_key(service: &Service, about: Value) -> String {
    service.post("/v1/keys", &about).await.body["key"].as_str().unwrap().to_owned()
}

fn admitted(statuses: &[u16]) -> usize {
    assert!(statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    statuses.iter().filter(|status| **status == 200).count()
}

async fn a_key_is_limited_after_its_burst(db: Db) {
    let service = talker(1, 4).start(db).await;
    let first = service.post("/v1/agents/talker/invoke", &json!({})).await;
    assert_eq!(first.status, 200, "{first:?}");
    assert_eq!(header(&first, "ratelimit-policy"), r#""default";q=4;w=240"#);
    assert_eq!(header(&first, "ratelimit"), r#""default";r=3;t=60"#);

    assert_eq!(admitted(&at_once(&[&service], 12).await), 3);

    let refused = service.post(PATH, &json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), refused.body["code"].as_str()),
        (429, Some("RATE_LIMITED")),
        "{refused:?}"
    );
    let detail = refused.body["detail"].as_str().unwrap();
    assert!(detail.contains("(1 a minute, 4 at once)"), "{detail}");
    assert_eq!(header(&refused, "content-type"), "application/problem+json");
    assert_eq!(header(&refused, "ratelimit-policy"), r#""default";q=4;w=240"#);
    assert!(header(&refused, "ratelimit").starts_with(r#""default";r=0;t=2"#), "{refused:?}");
    let seconds: u64 = header(&refused, "retry-after").parse().unwrap();
    assert!((1..=60).contains(&seconds), "{seconds}");
    assert!(refused.headers.contains_key("x-request-id"));

    // Reading is not invoking, and what was refused was not started.
    let runs = service.get("/v1/runs").await;
    assert_eq!((runs.status.as_u16(), runs.body["data"].as_array().unwrap().len()), (200, 4));
    assert_eq!((header(&runs, "ratelimit"), header(&runs, "ratelimit-policy")), ("", ""));
}

async fn a_request_after_retry_after_succeeds(db: Db) {
    let service = talker(10, 1).start(db).await;
    service.run("talker", &json!({})).await;
    for _ in 0..2 {
        let refused = service.post(PATH, &json!({})).await;
        assert_eq!(refused.status, 429, "{refused:?}");
        let seconds: u64 = header(&refused, "retry-after").parse().unwrap();
        assert!((1..=6).contains(&seconds), "{seconds}");
        tokio::time::sleep(Duration::from_secs(seconds)).await;
        service.run("talker", &json!({})).await;
    }
}

async fn a_key_can_have_limits_of_its_own(db: Db) {
    let mut service = talker(60, 3).start(db).await;
    let slow = json!({"name": "slow", "scopes": ["agents:invoke"], "rate_limit_per_minute": 1, "rate_limit_burst": 2});
    let (slow, reader) =
        (new_key(&service, slow).await, json!({"name": "reader", "scopes": ["runs:read"]}));
    let reader = new_key(&service, reader).await;
    let admin = std::mem::replace(&mut service.key, slow);
    assert_eq!(admitted(&at_once(&[&service], 6).await), 2);
    let refused = service.post(PATH, &json!({})).await;
    assert_eq!(
        (refused.status.as_u16(), header(&refused, "ratelimit-policy")),
        (429, r#""default";q=2;w=120"#)
    );
    service.key = admin;
    let other = service.post(PATH, &json!({})).await;
    assert_eq!((other.status.as_u16(), header(&other, "ratelimit")), (200, r#""default";r=2;t=1"#));
    // A key without the scope, and one that is unknown, have no bucket.
    service.key = reader;
    let forbidden = service.post(PATH, &json!({})).await;
    assert_eq!((forbidden.status.as_u16(), header(&forbidden, "ratelimit")), (403, ""));
    service.key = "tl_nobody_0123456789abcdef".into();
    let unknown = service.post(PATH, &json!({})).await;
    assert_eq!((unknown.status.as_u16(), header(&unknown, "ratelimit")), (401, ""));
}

async fn a_limit_without_a_burst_holds_from_the_first_request(db: Db) {
    let mut service = Setup::new()
        .agent("talker", TALKER)
        .scenario("talker", "steps: [{text: Hello.}]")
        .config("[governance]\nrate_limit_per_minute = 3")
        .start(db)
        .await;
    let slow = json!({"name": "slow", "scopes": ["agents:invoke"], "rate_limit_per_minute": 2});
    let slow = new_key(&service, slow).await;
    assert_eq!(admitted(&at_once(&[&service], 8).await), 3);
    let refused = service.post(PATH, &json!({})).await;
    assert_eq!(header(&refused, "ratelimit-policy"), r#""default";q=3;w=60"#);
    service.key = slow;
    assert_eq!(admitted(&at_once(&[&service], 8).await), 2);
    let refused = service.post(PATH, &json!({})).await;
    assert_eq!(header(&refused, "ratelimit-policy"), r#""default";q=2;w=60"#);
}

async fn a_rejected_request_has_consumed_its_token(db: Db) {
    let service = talker(1, 3).start(db).await;
    let unknown = service.post("/v1/agents/nobody/invoke", &json!({})).await;
    assert_eq!(
        (unknown.status.as_u16(), header(&unknown, "ratelimit")),
        (404, r#""default";r=2;t=60"#)
    );
    let request =
        service.request(Method::POST, PATH).header("content-type", "application/json").body("{");
    let malformed = answer(request).await;
    assert_eq!(
        (malformed.status.as_u16(), &header(&malformed, "ratelimit")[..13]),
        (400, r#""default";r=1"#)
    );
    assert_eq!(admitted(&at_once(&[&service], 3).await), 1);
}

async fn auth_none_has_no_rate_limit(db: Db) {
    let service = talker(1, 1).config("[auth]\nmode = \"none\"").start(db).await;
    for _ in 0..3 {
        let answer = service.post(PATH, &json!({})).await;
        assert_eq!((answer.status.as_u16(), header(&answer, "ratelimit-policy")), (200, ""));
    }
}

async fn agents_with_other_limits_of_a_tool_do_not_share_them(db: Db) {
    let agent = |name: &str, per_minute: u32| {
        format!(
            "model: scripted/{name}\ntools: [file_ops]\nenable_double_confirmation: false\n\
             tool_options: {{file_ops: {{rate_limit_per_minute: {per_minute}}}}}\n"
        )
    };
    let steps = "steps: [{tool_calls: [{tool: file_ops, arguments: {operation: list, path: '.'}}]}, \
                 {text: '{{ results[0] }}'}]";
    let service = Setup::new()
        .agent("slow", &agent("slow", 1))
        .scenario("slow", steps)
        .agent("fast", &agent("fast", 2))
        .scenario("fast", steps)
        .start(db)
        .await;
    for (agent, is_refused) in [("slow", false), ("slow", true), ("fast", false)] {
        let run = service.run(agent, &json!({})).await;
        let is_told = run["output"]["result"].as_str().unwrap().contains("rate_limit");
        assert_eq!(is_told, is_refused, "{agent}: {run:#}");
    }
}

async fn a_restart_does_not_refill_the_bucket(db: Db) {
    let mut service = talker(1, 2).start(db).await;
    assert_eq!(admitted(&at_once(&[&service], 2).await), 2);
    service.kill().await;
    service.restart().await;
    assert_eq!(admitted(&at_once(&[&service], 2).await), 0);
}

#[tokio::test]
async fn replicas_share_a_limit() {
    let one = talker(1, 5).start(Db::Postgres).await;
    let two = talker(1, 5).start_on(one.database_url.clone()).await;
    assert_eq!(admitted(&at_once(&[&one, &two], 20).await), 5);
}

/// Enough for a replica to take ten tokens at a time.
#[tokio::test]
async fn replicas_keep_the_limit_under_concurrent_requests() {
    let one = talker(6000, 100).start(Db::Postgres).await;
    let two = talker(6000, 100).start_on(one.database_url.clone()).await;
    let begun = Instant::now();
    let mut passed = 0;
    for _ in 0..3 {
        passed += admitted(&at_once(&[&one, &two], 200).await);
    }
    let most = 100 + begun.elapsed().as_millis() / 10;
    assert!(passed >= 100 && passed as u128 <= most, "{passed} of at most {most}");
}
