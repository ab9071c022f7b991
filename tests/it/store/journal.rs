//! The journal and its projections: what is appended is what is read, by its owner only, once.

use std::collections::HashSet;

use proptest::strategy::{Strategy, ValueTree};
use serde_json::{Value, json};
use toolloop::message::{AssistantMessage, OpaqueBlocks};
use toolloop::store::ToolCallRecord;
use toolloop::store::projection::{Changes, project};

use super::*;

on_both! {
    appended_events_are_replayed,
    a_repeated_batch_changes_nothing,
    only_the_owner_writes,
    a_gap_is_refused,
    a_taken_id_is_refused,
    one_batch_may_hold_accepted_and_refused_writes,
    batches_of_any_size_are_written_whole,
    rows_match_the_journal,
    rows_do_not_depend_on_how_events_are_batched,
    payloads_are_joined_from_the_journal,
    nul_characters_are_stored,
    another_tenant_sees_nothing,
    a_restart_keeps_everything,
}

/// One of everything that can happen to calls; in writes as the engine makes them.
fn full_story(script: &mut Script) -> Vec<RunWrite> {
    let (read, write, denied, unknown) = (
        call("file_ops", r#"{"path":"a"}"#),
        call("shell", "{broken"),
        call("file_ops", "{}"),
        call("nope", "{}"),
    );
    let output = ToolCall { target: CallTarget::Output, ..call("output", "{\"n\":17}") };
    let mut writes = vec![script.start()];
    let first = responded(1, &[&read, &write, &denied, &unknown]);
    writes.push(script.write(vec![
        RunEvent::IterationStarted { attempt: 1, iteration: 1, answer_only: false, limit: None },
        first,
    ]));
    writes.push(script.write(vec![dispatched(&read, Effect::Read), answered(&read, None)]));
    writes.push(script.write(vec![dispatched(&write, Effect::Once)]));
    let mut results = script.write(vec![
        answered(&write, Some(CallFailure::ToolError)),
        blocked(&denied),
        answered(&unknown, Some(CallFailure::UnknownTool)),
    ]);
    results.audit =
        vec![audited(&read, "allowed"), audited(&write, "warned"), audited(&denied, "blocked")];
    writes.push(results);
    writes.push(script.write(vec![responded(2, &[&output]), answered(&output, None)]));
    writes.push(script.write(vec![completed(json!({"n": 17}))]));
    writes
}

async fn appended_events_are_replayed(db: Db) {
    let mut script = Script::owned();
    let mut appended = Vec::new();
    for write in full_story(&mut script) {
        db.commit("me", &write).await;
        appended.extend(write.events);
    }
    assert_eq!(db.journal(script.id).await, appended);
    let tail = db.store.events(TENANT, script.id, 3, 2).await.unwrap();
    assert_eq!(tail, appended[3..5]);
    let newest = db.store.newest_events(&[Uuid::nil(), script.id]).await.unwrap();
    assert_eq!(newest, [(script.id, appended.last().unwrap().seq)]);
}

async fn a_repeated_batch_changes_nothing(db: Db) {
    let mut script = Script::owned();
    let mut seen = 0;
    for write in full_story(&mut script) {
        db.commit("me", &write).await;
        let row = db.store.run(TENANT, script.id).await.unwrap();
        db.commit_again("me", &write).await;
        seen += write.events.len();
        assert_eq!(db.journal(script.id).await.len(), seen);
        assert_eq!(db.store.run(TENANT, script.id).await.unwrap(), row);
    }
    let audit =
        db.store.audit(TENANT, &store::AuditFilter::default(), &page(10, None)).await.unwrap();
    assert_eq!(audit.len(), 3);
}

async fn only_the_owner_writes(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let next = script.write(vec![responded(1, &[])]);
    let older = RunWrite { epoch: 0, ..next.clone() };
    assert_eq!(db.commit_one("me", &older).await, WriteOutcome::Fenced);
    assert_eq!(db.commit_one("you", &next).await, WriteOutcome::Fenced);
    assert_eq!(db.journal(script.id).await.len(), 2);
    assert!(db.store.iterations(TENANT, script.id, &page(10, None)).await.unwrap().is_empty());
    // The same write under the right name passes: it was the fence that held, nothing else.
    db.commit("me", &next).await;

    db.store.release("me").await.unwrap();
    assert_eq!(
        db.commit_one("me", &script.write(vec![completed(json!(1))])).await,
        WriteOutcome::Fenced
    );
    assert_eq!(db.status(script.id).await, RunStatus::Queued);
}

async fn a_gap_is_refused(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let _lost = script.write(vec![responded(1, &[])]);
    let after = script.write(vec![completed(json!(1))]);
    assert_eq!(db.commit_one("me", &after).await, WriteOutcome::Fenced);
    assert_eq!(db.status(script.id).await, RunStatus::Running);
}

async fn a_taken_id_is_refused(db: Db) {
    let mut first = Script::owned();
    db.commit("me", &first.start()).await;
    let row = db.store.run(TENANT, first.id).await.unwrap();
    for (owner, tenant) in [("me", TENANT), ("you", "rival")] {
        let mut second = Script::with(|new| new.id = first.id);
        second.caller = Arc::new(Caller { tenant: tenant.into(), ..Caller::clone(&second.caller) });
        assert_eq!(db.commit_one(owner, &second.start()).await, WriteOutcome::IdTaken);
    }
    assert_eq!(db.store.run(TENANT, first.id).await.unwrap(), row);
    assert_eq!(db.store.run("rival", first.id).await.unwrap(), None);
}

async fn one_batch_may_hold_accepted_and_refused_writes(db: Db) {
    let (mut mine, mut gone, mut new) = (Script::owned(), Script::owned(), Script::owned());
    db.commit("me", &mine.start()).await;
    db.commit("you", &gone.start()).await;
    let mut taken = Script::with(|new| new.id = mine.id);
    let batch =
        [gone.write(vec![responded(1, &[])]), mine.write(vec![responded(1, &[])]), new.start()];
    let outcomes = db.store.commit("me", &batch).await.unwrap().outcomes;
    assert_eq!(outcomes, [WriteOutcome::Fenced, WriteOutcome::Committed, WriteOutcome::Committed]);
    assert_eq!(db.commit_one("me", &taken.start()).await, WriteOutcome::IdTaken);
    assert_eq!(db.journal(gone.id).await.len(), 2);
    assert_eq!(db.journal(mine.id).await.len(), 3);
}

/// Statements are made for some numbers of rows.
async fn batches_of_any_size_are_written_whole(db: Db) {
    for runs in [1, 3, 5, 8, 13, 16, 17, 33, 300] {
        let mut scripts: Vec<Script> = (0..runs).map(|_| Script::owned()).collect();
        let mut stories: Vec<_> =
            scripts.iter_mut().map(|script| full_story(script).into_iter()).collect();
        let mut expected: Vec<Vec<Event>> = vec![Vec::new(); runs];
        while let Some(batch) = stories.iter_mut().map(Iterator::next).collect::<Option<Vec<_>>>() {
            let outcomes = db.store.commit("me", &batch).await.unwrap().outcomes;
            assert_eq!(outcomes, vec![WriteOutcome::Committed; runs]);
            for (journal, write) in expected.iter_mut().zip(batch) {
                journal.extend(write.events);
            }
        }
        for (script, expected) in scripts.iter().zip(expected).take(20) {
            assert_eq!(db.journal(script.id).await, expected, "of {runs}");
            assert_rows_match_the_journal(&db, script).await;
        }
    }
}

/// The rows as the journal says, rebuilt by folding it in one go.
async fn assert_rows_match_the_journal(db: &Db, script: &Script) {
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    let mut rebuilt = Script {
        next_seq: 1,
        totals: Totals::default(),
        new: None,
        caller: script.caller.clone(),
        origin: script.origin.clone(),
        ..*script
    };
    let journal = db.journal(script.id).await;
    let mut whole = rebuilt.write(journal.iter().map(|event| event.what.clone()).collect());
    whole.events = journal;
    let batch = [whole];
    let Changes { runs, iterations, calls, .. } = project("me", &batch).unwrap();
    let run = &runs[0].progress;
    assert_eq!(
        (row.status, row.started_at, row.finished_at, &row.model),
        (run.status, run.started_at, run.finished_at, &run.model)
    );
    assert_eq!(
        (row.attempts, row.iterations, row.tool_calls_made, row.usage, &row.warnings),
        (run.attempts, run.iterations, run.tool_calls_made, run.usage, &run.warnings)
    );
    assert_eq!((&row.tools_used, row.latency_ms), (&run.tools_used, run.latency_ms));
    assert_eq!((&row.error, &row.termination_reason), (&run.error, &run.termination_reason));
    let outcome = batch[0].events.last().and_then(|end| end.what.ending()).map(|end| &end.outcome);
    assert_eq!(
        (row.output.as_ref(), row.raw_response.as_deref()),
        (outcome.and_then(Outcome::output), outcome.map(Outcome::raw_response))
    );
    let stored = db.store.iterations(TENANT, script.id, &page(100, None)).await.unwrap();
    assert_eq!(stored, iterations);
    let stored = db.store.tool_calls(TENANT, script.id, &page(100, None)).await.unwrap();
    let mut rebuilt: Vec<ToolCallRecord> =
        calls.into_iter().map(|call| (call.proposal.unwrap(), call.state).into()).collect();
    for (call, stored) in rebuilt.iter_mut().zip(&stored) {
        // From the journal.
        call.arguments.clone_from(&stored.arguments);
        call.result.clone_from(&stored.result);
    }
    assert_eq!(stored, rebuilt);
}

async fn rows_match_the_journal(db: Db) {
    let mut script = Script::owned();
    for write in full_story(&mut script) {
        db.commit("me", &write).await;
        assert_rows_match_the_journal(&db, &script).await;
    }
    let calls = db.store.tool_calls(TENANT, script.id, &page(10, None)).await.unwrap();
    let states: Vec<_> = calls.iter().map(|call| call.state.as_str()).collect();
    assert_eq!(states, ["succeeded", "failed", "denied", "failed"]);
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    assert_eq!((row.status, row.owner, row.tool_calls_made), (RunStatus::Completed, None, 4));
}

/// The same journal in every way of cutting it into writes gives the same rows.
async fn rows_do_not_depend_on_how_events_are_batched(db: Db) {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let cuts = proptest::collection::hash_set(1_usize..13, 0..12);
    for _ in 0..12 {
        let cuts: HashSet<usize> = cuts.new_tree(&mut runner).unwrap().current();
        let mut script = Script::owned();
        let new = script.new.clone();
        let story = full_story(&mut script);
        let events: Vec<Event> = story.into_iter().flat_map(|write| write.events).collect();
        let mut again = Script {
            next_seq: 1,
            totals: Totals::default(),
            new,
            caller: script.caller.clone(),
            origin: script.origin.clone(),
            ..script
        };
        let mut chunk = Vec::new();
        for (index, event) in events.iter().enumerate() {
            chunk.push(event.what.clone());
            if cuts.contains(&index) || index + 1 == events.len() {
                let write = again.write(std::mem::take(&mut chunk));
                db.commit("me", &write).await;
            }
        }
        assert_rows_match_the_journal(&db, &script).await;
    }
}

async fn payloads_are_joined_from_the_journal(db: Db) {
    let mut script = Script::owned();
    for write in full_story(&mut script) {
        db.commit("me", &write).await;
    }
    let calls = db.store.tool_calls(TENANT, script.id, &page(2, Some(1))).await.unwrap();
    let got: Vec<_> = calls
        .iter()
        .map(|call| (call.tool.as_str(), call.arguments.clone(), call.result.as_deref()))
        .collect();
    let expected = [
        ("shell", Value::String("{broken".into()), Some("result of shell")),
        ("file_ops", json!({}), Some("Blocked: read only")),
    ];
    assert_eq!(got, expected);
}

async fn nul_characters_are_stored(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let nul = call("sh\0ell", "{\"a\":\"\\u0000\"}");
    let RunEvent::ModelResponded(mut response) = responded(1, &[&nul]) else { unreachable!() };
    let blocks =
        OpaqueBlocks { provider: "openai".into(), json: "[{\"z\":1, \"a\":\"\\u0000\"}]".into() };
    response.message =
        AssistantMessage { text: "a\0b".into(), opaque: Some(blocks), ..response.message };
    let output = json!({"text": "x\0y"});
    let reason = TerminationReason::Completed;
    let outcome = Outcome::Completed {
        output: output.clone(),
        raw_response: "x\0y".into(),
        reason,
        partial: false,
        unchecked: vec![],
    };
    let mut write = script.write(vec![
        RunEvent::ModelResponded(response),
        answered(&nul, Some(CallFailure::UnknownTool)),
        RunEvent::ended(outcome, 1),
    ]);
    write.audit = vec![audited(&nul, "allowed")];
    db.commit("me", &write).await;
    assert_eq!(db.journal(script.id).await[2..], write.events);
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    assert_eq!((row.output, row.raw_response.as_deref()), (Some(output), Some("x\0y")));
    let calls = db.store.tool_calls(TENANT, script.id, &page(10, None)).await.unwrap();
    assert_eq!(
        (calls[0].tool.as_str(), &calls[0].arguments),
        ("sh\u{FFFD}ell", &json!({"a": "\0"}))
    );
}

async fn another_tenant_sees_nothing(db: Db) {
    let mut script = Script::owned();
    for write in full_story(&mut script) {
        db.commit("me", &write).await;
    }
    let (id, other) = (script.id, "rival");
    assert_eq!(db.store.run(other, id).await.unwrap(), None);
    assert!(db.store.events(other, id, 0, 10).await.unwrap().is_empty());
    assert!(db.store.iterations(other, id, &page(10, None)).await.unwrap().is_empty());
    assert!(db.store.tool_calls(other, id, &page(10, None)).await.unwrap().is_empty());
    assert!(
        db.store
            .runs(other, &store::RunFilter::default(), &page(10, None))
            .await
            .unwrap()
            .is_empty()
    );
    assert!(
        db.store
            .audit(other, &store::AuditFilter::default(), &page(10, None))
            .await
            .unwrap()
            .is_empty()
    );
    assert_eq!(db.store.request_cancel(other, id, "key", None).await.unwrap(), None);
}

async fn a_restart_keeps_everything(db: Db) {
    let mut script = Script::owned();
    let mut story = full_story(&mut script);
    let last = story.pop().unwrap();
    for write in &story {
        db.commit("me", write).await;
    }
    let (row, journal) =
        (db.store.run(TENANT, script.id).await.unwrap(), db.journal(script.id).await);
    let calls = db.store.tool_calls(TENANT, script.id, &page(10, None)).await.unwrap();
    let db = db.reopen().await;
    assert_eq!(db.store.run(TENANT, script.id).await.unwrap(), row);
    assert_eq!(db.journal(script.id).await, journal);
    assert_eq!(db.store.tool_calls(TENANT, script.id, &page(10, None)).await.unwrap(), calls);
    db.commit("me", &last).await;
}
