//! Webhooks with large bodies: those of a receiver that hangs wait for one another, and for nothing else.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::deliveries::{Does, Receiver, enqueue, local, run_of};
use crate::service::{Db, Setup, on_both_stores};

on_both_stores! {
    large_bodies_for_a_host_that_hangs_are_not_all_in_memory,
}

const TALKER: &str = "
model: scripted/talker
instructions: Talk.
enable_double_confirmation: false
";

/// With so much memory, more than half of what the bodies for one host may take.
fn setup() -> Setup {
    let says = "steps: [{text: \"{{ 'x' * 900000 }}\"}]";
    let setup = local().agent("talker", TALKER).scenario("talker", says);
    setup.config("[runtime]\nmax_memory = \"320MiB\"")
}

async fn large_bodies_for_a_host_that_hangs_are_not_all_in_memory(db: Db) {
    let service = setup().start(db).await;
    let hanging = Receiver::start([Does::Hangs]).await;
    let prompt = Receiver::start([Does::Answers(200)]).await;
    let is_end = |told: &crate::deliveries::Told| told.event()["type"] == "run.completed";
    let ended = |told: &[crate::deliveries::Told]| told.iter().filter(|it| is_end(it)).count();
    let since = Instant::now();
    let mut runs = Vec::new();
    for _ in 0..3 {
        runs.push(enqueue(&service, "talker", &hanging.url).await);
    }
    for run in &runs {
        service.until(&format!("/v1/runs/{run}"), |run: &Value| run["status"] == "completed").await;
    }
    hanging.until(|told| ended(told) > 0).await;
    let mut of_prompt = Vec::new();
    for _ in 0..3 {
        of_prompt.push(enqueue(&service, "talker", &prompt.url).await);
    }
    prompt.until(|told| ended(told) >= 3).await;
    // After 15 seconds it is given up, and another one is sent.
    let (sent, is_late) = (ended(&hanging.told()), since.elapsed() >= Duration::from_secs(15));
    assert!(sent == 1 || is_late, "{sent} large bodies are on their way to a host that hangs");

    hanging.now_does([Does::Answers(200)]);
    let all = |told: &[crate::deliveries::Told]| {
        runs.iter().all(|run| told.iter().any(|told| is_end(told) && run_of(told) == *run))
    };
    hanging.until(all).await;
}
