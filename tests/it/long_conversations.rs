//! Models and tools that say a great deal: a run is bounded in what it records, and runs that say much
//! give way where their conversations take the memory of others.
//!
//! With other features: crash and other replicas (a run is given back as one that a replica cannot drive:
//! `file_stores.rs`, `crashes.rs`); sessions (below); budget of its own and on_limit (as any budget:
//! `tokens.rs`); reading what was said (`hostile.rs`, bounds of pages).

use std::time::Duration;

use futures::future::join_all;
use serde_json::json;

use crate::hostile::{GUIDE, call};
use crate::service::{Db, Setup, on_both_stores};

on_both_stores! {
    the_recorded_bytes_of_a_run_are_bounded,
    long_conversations_give_way_to_one_another,
}

/// A call of a tool after so many characters of text.
fn says(characters: usize, name: usize) -> String {
    let call = call(&json!({"operation": "glob", "pattern": format!("*{name}")}));
    format!("{call}    text: \"{{{{ 'y' * {characters} }}}}\"\n")
}

fn agent(name: &str, steps: usize, characters: usize) -> Setup {
    let steps: String = (0..steps).map(|step| says(characters, step)).collect();
    let limits = "{max_iterations: 100, max_iterations_per_attempt: 100}";
    let agent = GUIDE
        .replace("limits: {error_threshold: 100}", &format!("limits: {limits}"))
        .replace("scripted/guide", &format!("scripted/{name}"));
    Setup::new().agent(name, &agent).scenario(name, &format!("steps:\n{steps}  - text: done\n"))
}

async fn the_recorded_bytes_of_a_run_are_bounded(db: Db) {
    let service = agent("loud", 30, 1_900_000).start(db).await;
    let body = json!({"session_id": "s"});
    let run = service.run("loud", &body).await;
    let error = &run["error"];
    assert_eq!(run["termination_reason"], "budget_exceeded", "{error:#}");
    assert_eq!(
        (&error["context"]["limit"], run["iterations"].as_u64()),
        (&json!("recorded_bytes"), Some(18))
    );
    assert_eq!(error["context"]["max"], 32 << 20);
    // The session goes on with what has room.
    let again = service.run("loud", &body).await;
    assert_eq!(again["termination_reason"], "budget_exceeded", "{:#}", again["error"]);
    let peak = service.peak_memory_mib();
    assert!(peak < 512, "{peak} MiB");
}

async fn long_conversations_give_way_to_one_another(db: Db) {
    let mut service = agent("loud", 16, 240_000)
        .agent("guide", GUIDE)
        .scenario("guide", "steps:\n  - text: done\n")
        .config("[runtime]\nmax_memory = \"320MiB\"\n")
        .start(db)
        .await;
    let body = json!({});
    let loud = join_all((0..24).map(|_| service.run("loud", &body)));
    let quiet = async {
        // A slow machine takes its time until conversations are large.
        let text = "there is not enough memory for a conversation of this size";
        let logged = async {
            while !service.log().contains(text) {
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(10), logged).await.expect(text);
        service.run("guide", &body).await
    };
    let (loud, quiet) = tokio::join!(loud, quiet);
    assert_eq!(quiet["status"], "completed", "{quiet:#}");
    for run in loud {
        let said = (run["iterations"].as_u64(), run["tool_calls_made"].as_u64());
        assert_eq!(
            (run["status"].as_str(), said),
            (Some("completed"), (Some(17), Some(16))),
            "{run:#}"
        );
    }
    assert!(!service.is_dead(), "{}", service.log());
    let peak = service.peak_memory_mib();
    assert!(peak < 420, "{peak} MiB");
}
