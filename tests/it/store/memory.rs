//! What observed runs leave, and who recalls it.

use toolloop::run::{RunError, RunOrigin};
use toolloop::store::MemoryFilter;

use super::*;

on_both! {
    observations_of_a_run_are_found_by_their_words,
    other_agents_and_tenants_do_not_recall_it,
    the_most_relevant_comes_first,
    no_text_is_ever_syntax,
    both_databases_leave_out_the_same_common_words,
    it_goes_with_its_run,
}

fn observed(write: RunWrite, agent: &str) -> RunWrite {
    let origin =
        RunOrigin { agent: agent.into(), is_observed: true, ..RunOrigin::clone(&write.origin) };
    RunWrite { origin: Arc::new(origin), ..write }
}

/// The model says this and calls tools.
fn said(text: &str, calls: &[&ToolCall]) -> RunEvent {
    let RunEvent::ModelResponded(mut response) = responded(1, calls) else { unreachable!() };
    response.message.text = text.into();
    RunEvent::ModelResponded(response)
}

fn answered_with(text: &str) -> Vec<RunEvent> {
    vec![said(text, &[]), completed(json!({"result": text}))]
}

/// An observed run of `reader` that answered this and ended.
async fn remember(db: &Db, text: &str) -> Uuid {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    db.commit("me", &observed(script.write(answered_with(text)), "reader")).await;
    script.id
}

async fn recalled(db: &Db, text: &str) -> Vec<String> {
    let found = db.store.recall(TENANT, "reader", Uuid::nil(), text, 10).await.unwrap();
    found.into_iter().map(|observation| observation.content).collect()
}

async fn observations_of_a_run_are_found_by_their_words(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let (read, shell) = (call("file_ops", r#"{"path":"src/engine.rs"}"#), call("shell", "{}"));
    let mut called = script.write(vec![
        said("Let me look for pelicans.\0", &[&read, &shell]),
        dispatched(&read, Effect::Read),
        answered(&read, None),
        blocked(&shell),
    ]);
    called.audit = vec![audited(&read, "allowed")];
    db.commit("me", &observed(called, "reader")).await;
    let error = RunError {
        code: "STUCK".into(),
        message: "It ran in circles.".into(),
        context: Value::Null,
    };
    let end =
        Outcome::Failed { reason: TerminationReason::Stuck, error, raw_response: String::new() };
    db.commit("me", &observed(script.write(vec![RunEvent::ended(end, 1)]), "reader")).await;
    for (text, kind, content) in [
        ("pelican?", "model_response", "Let me look for pelicans."),
        (
            "ENGINE",
            "tool_call",
            r#"file_ops {"path":"src/engine.rs"} returned: result of file_ops"#,
        ),
        ("refused", "decision", "shell was refused: read only"),
        ("circles", "error", "It ran in circles."),
    ] {
        let found = db.store.recall(TENANT, "reader", Uuid::nil(), text, 10).await.unwrap();
        let found: Vec<_> =
            found.iter().map(|found| (found.kind.as_str(), found.content.as_str())).collect();
        assert_eq!(found, [(kind, content)], "{text}");
    }
}

async fn other_agents_and_tenants_do_not_recall_it(db: Db) {
    let run = remember(&db, "pelicans nest here").await;
    let mut unobserved = Script::owned();
    db.commit("me", &unobserved.start()).await;
    db.commit("me", &unobserved.write(answered_with("pelicans nest there"))).await;
    for (tenant, agent, except, found) in [
        (TENANT, "reader", Uuid::nil(), 1),
        (TENANT, "reader", run, 0),
        (TENANT, "writer", Uuid::nil(), 0),
        ("other", "reader", Uuid::nil(), 0),
    ] {
        let recalled = db.store.recall(tenant, agent, except, "pelicans", 10).await.unwrap();
        assert_eq!(recalled.len(), found, "{tenant} {agent} {except}");
    }
}

async fn the_most_relevant_comes_first(db: Db) {
    for text in ["red and green things of many kinds", "green frogs croak", "yellow ducks"] {
        remember(&db, text).await;
    }
    assert_eq!(recalled(&db, "do green frogs croak?").await[0], "green frogs croak");
    let found = db.store.recall(TENANT, "reader", Uuid::nil(), "green frogs", 1).await.unwrap();
    assert_eq!(found.len(), 1);
    assert!(recalled(&db, "elephants").await.is_empty());
}

async fn no_text_is_ever_syntax(db: Db) {
    remember(&db, "the pelican's nest").await;
    let long = "pelican ' \" ".repeat(1000);
    let hostile = [
        "pelican' | 'x",
        "pelican\"",
        "\"pelican",
        "pelican*",
        "pelican:*",
        "(pelican",
        "NEAR(pelican)",
        "content:pelican",
        "pelican & !nest",
        "-pelican",
        "pelican <-> zebra",
        "pelican\0nest",
        "pelican\\",
        "^pelican",
        "{pelican}",
        &long,
        "pelican'; DROP TABLE runs; --",
        "pelican OR AND NOT",
    ];
    for text in hostile {
        assert_eq!(recalled(&db, text).await, ["the pelican's nest"], "{text:.40}");
    }
    for text in ["", "'", "\"\"", "***", "' | '", "\0", "AND", "the", &"x".repeat(10_000)] {
        let found = db.store.recall(TENANT, "reader", Uuid::nil(), text, 10).await.unwrap();
        assert!(found.len() <= 1, "{text:.40}");
    }
    for text in hostile {
        let filter = MemoryFilter { text: Some(text.into()), ..MemoryFilter::default() };
        let found = db.store.memory(TENANT, &filter, &page(10, None)).await.unwrap();
        assert!(found.len() <= 1, "{text:.40}");
    }
}

async fn both_databases_leave_out_the_same_common_words(db: Db) {
    remember(&db, "pelicans nest here").await;
    for (text, expected) in [("about pelicans before those", 1), ("here", 0), ("about herons", 0)] {
        let filter = MemoryFilter { text: Some(text.into()), ..MemoryFilter::default() };
        let found = db.store.memory(TENANT, &filter, &page(10, None)).await.unwrap();
        assert_eq!(found.len(), expected, "{text}");
    }
}

async fn it_goes_with_its_run(db: Db) {
    remember(&db, "pelicans").await;
    assert_eq!(recalled(&db, "pelicans").await.len(), 1);
    db.store.delete_ended(now() + chrono::TimeDelta::hours(1), 10, &no_files).await.unwrap();
    assert_eq!(recalled(&db, "pelicans").await.len(), 0);
    let mut run = Script::with(|new| new.session_id = Some("s".into()));
    db.commit("me", &run.start()).await;
    db.commit("me", &observed(run.write(answered_with("herons")), "reader")).await;
    assert_eq!(recalled(&db, "herons").await.len(), 1);
    db.store.delete_session(TENANT, "s", "key", &no_files).await.unwrap();
    assert_eq!(recalled(&db, "herons").await.len(), 0);
    remember(&db, "pelicans again").await;
    assert_eq!(recalled(&db, "pelicans").await, ["pelicans again"]);
}
