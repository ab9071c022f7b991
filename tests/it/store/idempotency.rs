//! One run per idempotency key and tenant, however many ask at once; and the queue that the
//! accepted ones wait in.

use chrono::TimeDelta;
use tokio::task::JoinSet;
use toolloop::store::{IdempotentRun, Requeue};

use super::*;

on_both! {
    a_key_is_one_run_in_a_batch,
    a_key_is_one_run_in_batches_that_race,
    a_repeated_commit_of_a_keyed_run_is_harmless,
    a_key_belongs_to_a_tenant,
    an_old_key_can_be_used_anew,
    a_new_run_keeps_its_traceparent,
    a_queued_run_is_counted_claimed_released_and_cancelled,
}

fn keyed(key: &str) -> Script {
    Script::with(|new| {
        new.idempotency = Some(Idempotency { key: key.into(), request_hash: "ab".repeat(32) });
    })
}

fn committed(outcomes: &[WriteOutcome]) -> usize {
    assert!(outcomes.iter().all(|outcome| *outcome != WriteOutcome::Fenced), "{outcomes:?}");
    outcomes.iter().filter(|outcome| **outcome == WriteOutcome::Committed).count()
}

async fn listed(db: &Db) -> usize {
    db.store
        .runs(TENANT, &toolloop::store::RunFilter::default(), &page(200, None))
        .await
        .unwrap()
        .len()
}

async fn a_key_is_one_run_in_a_batch(db: Db) {
    let batch: Vec<RunWrite> = (0..100).map(|_| keyed("k").start()).collect();
    let outcomes = db.store.commit("me", &batch).await.unwrap().outcomes;
    assert_eq!((committed(&outcomes), listed(&db).await), (1, 1));
    let winner = outcomes.iter().position(|outcome| *outcome == WriteOutcome::Committed).unwrap();
    let found = db.store.idempotent_run(TENANT, "k").await.unwrap().unwrap();
    let created_at = batch[winner].new.as_ref().unwrap().created_at;
    assert_eq!(
        found,
        IdempotentRun {
            id: batch[winner].run_id,
            subject: batch[winner].caller.subject.clone(),
            request_hash: "ab".repeat(32),
            created_at
        }
    );
    for write in &batch {
        let journal = db.journal(write.run_id).await;
        assert_eq!(journal.is_empty(), write.run_id != found.id);
    }
}

/// Each batch holds the same keys, in an order of its own, and comes over a connection of its own.
async fn a_key_is_one_run_in_batches_that_race(db: Db) {
    let other = match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let mut commits = JoinSet::new();
    for number in 0..20 {
        let store = if number % 2 == 0 { db.store.clone() } else { other.clone() };
        let mut batch: Vec<RunWrite> =
            (0..5).map(|key| keyed(&format!("k{key}")).start()).collect();
        batch.rotate_left(number % 5);
        commits
            .spawn(async move { committed(&store.commit("me", &batch).await.unwrap().outcomes) });
    }
    assert_eq!(commits.join_all().await.into_iter().sum::<usize>(), 5);
    assert_eq!(listed(&db).await, 5);
}

async fn a_repeated_commit_of_a_keyed_run_is_harmless(db: Db) {
    let write = keyed("k").start();
    db.commit("me", &write).await;
    db.commit_again("me", &write).await;
    let of_another_driver = db.commit_one("me", &write).await;
    assert_eq!(of_another_driver, WriteOutcome::IdTaken, "though of the same microsecond");
    assert_eq!(db.commit_one("me", &keyed("k").start()).await, WriteOutcome::IdTaken);
    db.commit_again("me", &write).await;
    assert_eq!(db.journal(write.run_id).await.len(), 2);
}

async fn a_key_belongs_to_a_tenant(db: Db) {
    let (mut ours, mut theirs) = (keyed("k"), keyed("k"));
    theirs.caller = Arc::new(Caller { tenant: "other".into(), ..Caller::clone(&ours.caller) });
    db.commit("me", &ours.start()).await;
    db.commit("me", &theirs.start()).await;
    for (tenant, script) in [(TENANT, &ours), ("other", &theirs)] {
        assert_eq!(db.store.idempotent_run(tenant, "k").await.unwrap().unwrap().id, script.id);
    }
    assert_eq!(db.store.idempotent_run("third", "k").await.unwrap(), None);
    // Runs without a key never meet.
    db.commit("me", &Script::owned().start()).await;
    db.commit("me", &Script::owned().start()).await;
}

async fn an_old_key_can_be_used_anew(db: Db) {
    let mut first = keyed("k");
    db.commit("me", &first.start()).await;
    let created_at = db.store.idempotent_run(TENANT, "k").await.unwrap().unwrap().created_at;
    db.store.forget_idempotency_key("other", "k", created_at + TimeDelta::days(1)).await.unwrap();
    db.store.forget_idempotency_key(TENANT, "k", created_at).await.unwrap();
    assert_eq!(db.commit_one("me", &keyed("k").start()).await, WriteOutcome::IdTaken);
    db.store
        .forget_idempotency_key(TENANT, "k", created_at + TimeDelta::microseconds(1))
        .await
        .unwrap();
    assert_eq!(db.store.idempotent_run(TENANT, "k").await.unwrap(), None);
    let mut second = keyed("k");
    db.commit("me", &second.start()).await;
    assert_eq!(db.store.idempotent_run(TENANT, "k").await.unwrap().unwrap().id, second.id);
    assert_eq!(db.status(first.id).await, RunStatus::Running);
}

async fn a_new_run_keeps_its_traceparent(db: Db) {
    let traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    let mut script = Script::with(|new| new.traceparent = Some(traceparent.into()));
    db.commit("me", &script.start()).await;
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    assert_eq!(row.traceparent.as_deref(), Some(traceparent));
}

async fn a_queued_run_is_counted_claimed_released_and_cancelled(db: Db) {
    assert_eq!(db.store.queued().await.unwrap(), 0);
    let (mut first, mut second, mut running) =
        (Script::queued(), Script::queued(), Script::owned());
    for script in [&mut first, &mut second, &mut running] {
        db.commit("me", &script.start()).await;
    }
    assert_eq!(db.store.queued().await.unwrap(), 2);
    let claimed = db.store.claim("you", 1, "").await.unwrap().remove(0).run;
    assert_eq!((claimed.id, claimed.epoch, claimed.crash_count), (first.id, 1, 0));
    assert_eq!(db.store.queued().await.unwrap(), 1);
    assert!(db.store.give_back("you", first.id, 1, Requeue::AtOnce).await.unwrap());
    let row = db.store.run(TENANT, first.id).await.unwrap().unwrap();
    assert_eq!((row.status, row.owner, row.started_at), (RunStatus::Queued, None, None));
    db.cancel(first.id).await;
    let again = db.store.claim("you", 9, "").await.unwrap();
    assert_eq!(again.iter().map(|claimed| claimed.run.id).collect::<Vec<_>>(), [second.id]);
    assert_eq!(db.store.queued().await.unwrap(), 0);
}
