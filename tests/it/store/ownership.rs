//! Who drives a run: claims, cancelling, leases, and what a sweep makes of dead replicas' runs.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use toolloop::store::{CancelOutcome, Requeue, RunCounts, SessionPlace, Swept, Wakeup, Watch};

use super::*;

on_both! {
    each_queued_run_is_claimed_once,
    tenants_take_turns,
    tenants_in_great_number_take_turns,
    the_last_of_many_tenants_does_not_get_all,
    tenants_with_nothing_to_take_hold_up_no_other,
    a_claim_gives_all_that_is_needed_and_fences_the_past,
    a_queued_run_is_claimed_to_be_cancelled,
    one_that_waits_for_its_session_is_claimed_to_be_cancelled,
    a_running_run_is_asked_to_cancel,
    an_ended_run_is_not_cancelled,
    cancelling_races_completing,
    cancelling_races_claiming,
    a_release_counts_no_crash,
    a_suspected_crash_is_counted_and_the_run_waits_the_longer,
    a_dead_replica_is_swept_and_a_living_one_is_not,
    a_sweep_queues_and_decides_nothing,
    a_parked_run_is_queued_to_be_cancelled,
    a_replica_declared_dead_may_come_back_without_its_runs,
    a_run_of_an_unknown_owner_is_taken_over,
    a_run_of_a_newer_format_is_left_to_newer_versions,
    wakeups_tell_of_queue_and_cancel,
    runs_that_wait_again_are_signalled_once_per_batch,
}

const FOREVER: Duration = Duration::from_hours(1);

async fn tenants_take_turns(db: Db) {
    for (tenant, runs) in [("a", 9), ("b", 1), ("c", 3)] {
        for _ in 0..runs {
            let mut script = Script::queued();
            script.caller =
                Arc::new(Caller { tenant: tenant.into(), ..Caller::clone(&script.caller) });
            db.commit("me", &script.start()).await;
        }
    }
    let claim = async |limit, last_served| -> String {
        let claimed = db.store.claim("you", limit, last_served).await.unwrap();
        claimed.iter().map(|claimed| claimed.run.tenant.as_str()).collect()
    };
    assert_eq!(claim(1, "").await, "a");
    assert_eq!(claim(1, "a").await, "b");
    assert_eq!(claim(1, "b").await, "c");
    assert_eq!(claim(1, "c").await, "a", "the first is next to the last");
    assert_eq!(claim(4, "a").await, "ccaa", "as many as there are");
    assert_eq!(claim(9, "zz").await, "aaaaa");
    assert_eq!(claim(9, "zz").await, "");
}

async fn the_last_of_many_tenants_does_not_get_all(db: Db) {
    for number in (0..100).chain([99; 4]) {
        let mut script = Script::queued();
        let tenant = format!("tenant-{number:03}");
        script.caller = Arc::new(Caller { tenant, ..Caller::clone(&script.caller) });
        db.commit("me", &script.start()).await;
    }
    let claimed = db.store.claim("you", 5, "tenant-098").await.unwrap();
    let tenants: Vec<&str> = claimed.iter().map(|it| it.run.tenant.as_str()).collect();
    assert_eq!(tenants, ["tenant-099", "tenant-000", "tenant-001", "tenant-002", "tenant-003"]);
}

async fn tenants_in_great_number_take_turns(db: Db) {
    for number in 0..100 {
        let mut script = Script::queued();
        let tenant = format!("tenant-{number:03}");
        script.caller = Arc::new(Caller { tenant, ..Caller::clone(&script.caller) });
        db.commit("me", &script.start()).await;
    }
    let mut last_served = "tenant-090".to_owned();
    let mut served = BTreeSet::new();
    for _ in 0..15 {
        for claimed in db.store.claim("you", 7, &last_served).await.unwrap() {
            last_served.clone_from(&claimed.run.tenant);
            assert!(served.insert(claimed.run.tenant));
        }
        assert!(served.contains("tenant-091"), "they begin behind the one that was served last");
    }
    assert_eq!(served.len(), 100);
}

async fn enqueue_for(db: &Db, tenant: &str) {
    let mut script = Script::queued();
    script.caller = Arc::new(Caller { tenant: tenant.into(), ..Caller::clone(&script.caller) });
    db.commit("me", &script.start()).await;
}

/// As where their sessions are held, or their runs were given back for a while.
async fn tenants_with_nothing_to_take_hold_up_no_other(db: Db) {
    for number in 0..300 {
        enqueue_for(&db, &format!("tenant-{number:03}")).await;
    }
    let later = if db.store.kind() == "postgres" { "'2099-01-01'" } else { "4070908800000000" };
    db.execute(&format!("UPDATE runs SET available_at = {later}")).await;
    let mut last_served = "tenant-099".to_owned();
    let mut claimed = Vec::new();
    for _ in 0..3 {
        enqueue_for(&db, "zz").await;
        let mut running = RunCounts::default();
        let taken = db.store.claim_within("you", 9, &mut last_served, &mut running).await.unwrap();
        claimed.push((taken.len(), last_served.clone()));
    }
    let expected = [(1_usize, "zz"), (0, "tenant-255"), (2, "zz")];
    assert_eq!(claimed, expected.map(|(runs, last)| (runs, last.to_owned())));
}

/// A database sorts texts as its operator's language does.
#[tokio::test]
async fn tenants_take_turns_in_the_order_of_any_language() {
    let db = Db::postgres().await;
    db.execute("ALTER TABLE runs ALTER COLUMN tenant TYPE text COLLATE \"en-x-icu\"").await;
    for tenant in ["a", "B", "c", "a", "B", "c"] {
        enqueue_for(&db, tenant).await;
    }
    let mut last_served = String::new();
    let mut served = BTreeSet::new();
    for _ in 0..3 {
        for claimed in db.store.claim("you", 1, &last_served).await.unwrap() {
            last_served.clone_from(&claimed.run.tenant);
            served.insert(claimed.run.tenant);
        }
    }
    assert_eq!(served.len(), 3, "{served:?}");
}

async fn each_queued_run_is_claimed_once(db: Db) {
    let mut expected = Vec::new();
    for _ in 0..40 {
        let mut script = Script::queued();
        db.commit("me", &script.start()).await;
        expected.push(script.id);
    }
    let mut claimers = JoinSet::new();
    for number in 0..8 {
        let store = db.store.clone();
        claimers.spawn(async move {
            let owner = format!("replica-{number}");
            let mut mine = Vec::new();
            loop {
                let claimed = store.claim(&owner, 3, "").await.unwrap();
                assert!(claimed.len() <= 3);
                if claimed.is_empty() {
                    return mine;
                }
                mine.extend(claimed.into_iter().map(|claimed| claimed.run.id));
            }
        });
    }
    let mut claimed: Vec<Uuid> = claimers.join_all().await.into_iter().flatten().collect();
    // A locked row is skipped, not waited for: what no claim took is still there.
    claimed.extend(
        db.store.claim("last", 100, "").await.unwrap().into_iter().map(|claimed| claimed.run.id),
    );
    claimed.sort_unstable();
    expected.sort_unstable();
    assert_eq!(claimed, expected);
}

async fn a_claim_gives_all_that_is_needed_and_fences_the_past(db: Db) {
    let mut script = Script::queued();
    let new = script.new.clone().unwrap();
    db.commit("me", &script.start()).await;
    let claimed = db.store.claim("you", 10, "").await.unwrap().remove(0);
    assert_eq!(
        (claimed.run.id, claimed.run.status, claimed.run.epoch),
        (script.id, RunStatus::Running, 1)
    );
    assert_eq!(claimed.run.owner.as_deref(), Some("you"));
    assert_eq!(
        (&claimed.definition, &claimed.run.scopes),
        (&new.definition.json, &script.caller.scopes)
    );
    assert_eq!(claimed.run.inputs, *new.inputs);
    assert_eq!(claimed.run.engine_version, env!("CARGO_PKG_VERSION"));
    assert_eq!(db.commit_one("me", &script.write(vec![started()])).await, WriteOutcome::Fenced);
    script.next_seq -= 1;
    script.epoch = claimed.run.epoch;
    db.commit("you", &script.write(vec![started()])).await;
}

async fn a_queued_run_is_claimed_to_be_cancelled(db: Db) {
    let mut script = Script::queued();
    let mut other = Script::queued();
    db.commit("me", &script.start()).await;
    db.commit("me", &other.start()).await;
    assert!(db.store.claim_cancelled("you", 10).await.unwrap().is_empty());
    let outcome = db.store.request_cancel(TENANT, script.id, "key", Some("enough")).await.unwrap();
    let Some(CancelOutcome::Requested(row)) = outcome else { panic!("{outcome:?}") };
    assert_eq!((row.status, row.owner.as_deref()), (RunStatus::Queued, None));
    let claimed = db.store.claim_cancelled("you", 10).await.unwrap().remove(0);
    assert_eq!((claimed.run.id, claimed.run.epoch), (script.id, 1));
    assert_eq!(
        (claimed.run.owner.as_deref(), claimed.run.cancel_reason.as_deref()),
        (Some("you"), Some("enough"))
    );
    assert_eq!(claimed.definition, r#"{"name":"reader"}"#);
    assert!(db.store.claim_cancelled("you", 10).await.unwrap().is_empty());
    assert_eq!(db.store.claim("you", 10, "").await.unwrap()[0].run.id, other.id);
}

async fn one_that_waits_for_its_session_is_claimed_to_be_cancelled(db: Db) {
    let place = |place| {
        move |new: &mut NewRun| {
            new.session_id = Some("s".into());
            new.session_place = Some(place);
        }
    };
    let mut holder = Script::with(place(SessionPlace::Holds { turn: 1 }));
    let mut waits = Script::with(|new| {
        place(SessionPlace::Waits)(new);
        new.status = RunStatus::Queued;
    });
    waits.epoch = 0;
    db.commit("me", &holder.start()).await;
    db.commit("me", &waits.start()).await;
    assert!(db.store.claim("you", 10, "").await.unwrap().is_empty());
    db.cancel(waits.id).await;
    assert_eq!(db.status(waits.id).await, RunStatus::Cancelled);
    assert_eq!(db.status(holder.id).await, RunStatus::Running);
}

async fn a_running_run_is_asked_to_cancel(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    assert!(db.store.cancel_requests("me").await.unwrap().is_empty());
    for reason in ["first", "second"] {
        let outcome =
            db.store.request_cancel(TENANT, script.id, "key", Some(reason)).await.unwrap();
        let Some(CancelOutcome::Requested(row)) = outcome else { panic!("{outcome:?}") };
        assert_eq!((row.status, row.cancel_reason.as_deref()), (RunStatus::Running, Some("first")));
        assert!(row.cancel_requested_at.is_some());
    }
    assert_eq!(db.store.cancel_requests("me").await.unwrap(), [(script.id, Some("first".into()))]);
    assert!(db.store.cancel_requests("you").await.unwrap().is_empty());
    db.commit(
        "me",
        &script.write(vec![RunEvent::cancelled("model_call", (1, 1), None, String::new(), 5)]),
    )
    .await;
    assert!(db.store.cancel_requests("me").await.unwrap().is_empty());
}

async fn an_ended_run_is_not_cancelled(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    db.commit("me", &script.write(vec![completed(json!(1))])).await;
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    let outcome = db.store.request_cancel(TENANT, script.id, "key", None).await.unwrap();
    assert_eq!(outcome, Some(CancelOutcome::AlreadyEnded(row)));
    assert_eq!(db.store.request_cancel(TENANT, Uuid::now_v7(), "key", None).await.unwrap(), None);
}

/// Whichever comes first, there is one end, and the answer to the request fits it.
async fn cancelling_races_completing(db: Db) {
    let mut met = BTreeMap::new();
    for _ in 0..40 {
        let mut script = Script::owned();
        db.commit("me", &script.start()).await;
        let last = script.write(vec![completed(json!(1))]);
        let (outcome, committed) = tokio::join!(
            db.store.request_cancel(TENANT, script.id, "key", None),
            db.commit_one("me", &last)
        );
        let kind = match outcome.unwrap().unwrap() {
            CancelOutcome::AlreadyEnded(row) => {
                assert_eq!((row.status, row.cancel_requested_at), (RunStatus::Completed, None));
                assert_eq!(committed, WriteOutcome::Committed);
                "ended"
            }
            CancelOutcome::Requested(row) => {
                assert_eq!(row.status, RunStatus::Running);
                assert_eq!(committed, WriteOutcome::Cancelling);
                assert_eq!(db.status(script.id).await, RunStatus::Running);
                assert_eq!(db.commit_one("you", &last).await, WriteOutcome::Fenced);
                "requested"
            }
            CancelOutcome::Unreadable => unreachable!("its row is whole"),
        };
        *met.entry(kind).or_insert(0) += 1;
    }
    assert_eq!(met.values().sum::<i32>(), 40, "{met:?}");
}

async fn cancelling_races_claiming(db: Db) {
    for _ in 0..40 {
        let mut script = Script::queued();
        db.commit("me", &script.start()).await;
        let (outcome, claimed) = tokio::join!(
            db.store.request_cancel(TENANT, script.id, "key", None),
            db.store.claim("you", 10, "")
        );
        assert!(matches!(outcome, Ok(Some(CancelOutcome::Requested(_)))), "{outcome:?}");
        let asked = db.store.cancel_requests("you").await.unwrap().len();
        let flagged = claimed.unwrap().iter().filter(|c| c.run.id == script.id).count();
        let waiting = db.store.claim_cancelled("you", 10).await.unwrap().len();
        assert_eq!((asked, flagged + waiting), (flagged, 1), "its owner is told, or becomes it");
        db.store.release("you").await.unwrap();
        db.cancel(script.id).await;
    }
}

async fn a_release_counts_no_crash(db: Db) {
    let mut scripts = [Script::owned(), Script::owned(), Script::owned()];
    for (script, owner) in scripts.iter_mut().zip(["me", "me", "you"]) {
        db.commit(owner, &script.start()).await;
    }
    assert!(
        !db.store.give_back("me", scripts[2].id, 1, Requeue::AtOnce).await.unwrap(),
        "another owner's"
    );
    assert!(
        !db.store.give_back("me", scripts[0].id, 2, Requeue::AtOnce).await.unwrap(),
        "another epoch"
    );
    let mut owned = db.store.owned_runs("me").await.unwrap();
    owned.sort_unstable();
    let mut mine = [(scripts[0].id, 1), (scripts[1].id, 1)];
    mine.sort_unstable();
    assert_eq!(owned, mine);
    assert!(db.store.give_back("me", scripts[0].id, 1, Requeue::AtOnce).await.unwrap());
    assert!(
        !db.store.give_back("me", scripts[0].id, 1, Requeue::AtOnce).await.unwrap(),
        "it is queued"
    );
    assert_eq!(db.status(scripts[1].id).await, RunStatus::Running);
    assert_eq!(db.store.release("me").await.unwrap(), 1);
    let claimed = db.store.claim("she", 10, "").await.unwrap();
    assert_eq!(claimed.len(), 2);
    assert!(claimed.iter().all(|claimed| claimed.run.crash_count == 0 && claimed.run.epoch == 2));
    assert_eq!(db.status(scripts[2].id).await, RunStatus::Running);
}

async fn a_suspected_crash_is_counted_and_the_run_waits_the_longer(db: Db) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    assert!(db.store.give_back("me", script.id, 1, Requeue::Crashed).await.unwrap());
    let claimed = db.store.claim_run("me", script.id).await.unwrap().unwrap().run;
    assert_eq!((claimed.crash_count, claimed.epoch), (1, 2), "the first time it is due at once");
    assert!(db.store.give_back("me", script.id, 2, Requeue::Crashed).await.unwrap());
    assert_eq!(db.store.claim_run("me", script.id).await.unwrap(), None);
    let due = async {
        loop {
            if let Some(claimed) = db.store.claim_run("me", script.id).await.unwrap() {
                return claimed.run.crash_count;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    assert_eq!(due.await, 2);
}

async fn a_dead_replica_is_swept_and_a_living_one_is_not(db: Db) {
    let lease = Duration::from_secs(2);
    for replica in ["dead", "alive"] {
        db.store.register_replica(replica, lease).await.unwrap();
    }
    let (mut lost, mut kept) = (Script::owned(), Script::owned());
    db.commit("dead", &lost.start()).await;
    db.commit("alive", &kept.start()).await;
    assert_eq!(db.store.sweep(&[]).await.unwrap(), Swept::default());
    let alive = ["alive".to_owned()];
    assert_eq!(db.store.sweep(&alive).await.unwrap(), Swept::default(), "it was heard of");
    assert_eq!(db.status(lost.id).await, RunStatus::Running);

    let beats = async {
        loop {
            assert!(db.store.heartbeat("alive").await.unwrap().is_some());
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    };
    let looks = async {
        let mut watch = Watch::default();
        loop {
            let silent = db.store.silent_replicas("alive", &mut watch).await.unwrap();
            if !silent.is_empty() {
                return silent;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let silent = tokio::select! { silent = looks => silent, () = beats => unreachable!() };
    assert_eq!(silent, ["dead"]);
    let swept = db.store.sweep(&silent).await.unwrap();
    assert_eq!(swept, Swept { replicas: 1, requeued: vec![lost.id] });
    assert_eq!(db.store.heartbeat("dead").await.unwrap(), None);
    assert!(db.store.heartbeat("alive").await.unwrap().is_some());
    assert_eq!(
        (db.status(lost.id).await, db.status(kept.id).await),
        (RunStatus::Queued, RunStatus::Running)
    );
    assert_eq!(
        db.commit_one("dead", &lost.write(vec![completed(json!(1))])).await,
        WriteOutcome::Fenced
    );
    let claimed = db.store.claim("alive", 10, "").await.unwrap().remove(0);
    assert_eq!((claimed.run.id, claimed.run.crash_count), (lost.id, 1));
    assert!(claimed.run.epoch > 1);
}

/// Declares the replica dead that registered without a lease.
async fn sweep_all(db: &Db) -> Vec<Uuid> {
    loop {
        let swept = db.store.sweep(&["me".to_owned()]).await.unwrap();
        if swept.replicas > 0 {
            return swept.requeued;
        }
    }
}

async fn a_sweep_queues_and_decides_nothing(db: Db) {
    db.store.register_replica("me", Duration::ZERO).await.unwrap();
    let once = call("once", "{}");
    let (mut acting, mut cancelled) = (Script::owned(), Script::owned());
    for script in [&mut acting, &mut cancelled] {
        db.commit("me", &script.start()).await;
        let story = vec![responded(1, &[&once]), dispatched(&once, Effect::Once)];
        db.commit("me", &script.write(story)).await;
    }
    db.store.request_cancel(TENANT, cancelled.id, "key", Some("stop")).await.unwrap();
    let mut requeued = sweep_all(&db).await;
    requeued.sort_unstable();
    assert_eq!(requeued, [acting.id, cancelled.id], "made in this order");
    for script in [&acting, &cancelled] {
        let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
        assert_eq!((row.status, row.crash_count, row.last_seq()), (RunStatus::Queued, 1, 4));
    }
    let ended = db.store.claim_cancelled("you", 10).await.unwrap();
    assert_eq!(ended.iter().map(|c| c.run.id).collect::<Vec<_>>(), [cancelled.id]);
    let claimed = db.store.claim_run("you", acting.id).await.unwrap().unwrap();
    assert_eq!(claimed.run.crash_count, 1);
}

async fn a_parked_run_is_queued_to_be_cancelled(db: Db) {
    let shell = call("shell", "{}");
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let asks = vec![responded(1, &[&shell]), dispatched(&shell, Effect::Once), review(&shell)];
    let park = RunWrite { park: Some(RunStatus::NeedsReview), ..script.write(asks) };
    db.commit("me", &park).await;
    assert_eq!(db.status(script.id).await, RunStatus::NeedsReview);
    let outcome = db.store.request_cancel(TENANT, script.id, "key", None).await.unwrap();
    let Some(CancelOutcome::Requested(row)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(row.status, RunStatus::Queued);
    db.cancel(script.id).await;
    assert_eq!(db.status(script.id).await, RunStatus::Cancelled);
}

async fn a_replica_declared_dead_may_come_back_without_its_runs(db: Db) {
    db.store.register_replica("me", Duration::ZERO).await.unwrap();
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    sweep_all(&db).await;
    assert_eq!(db.store.heartbeat("me").await.unwrap(), None);
    db.store.register_replica("me", FOREVER).await.unwrap();
    assert!(db.store.heartbeat("me").await.unwrap().is_some());
    assert_eq!(
        db.commit_one("me", &script.write(vec![completed(json!(1))])).await,
        WriteOutcome::Fenced
    );
    assert_eq!(db.store.claim("me", 1, "").await.unwrap()[0].run.id, script.id);
}

async fn a_run_of_an_unknown_owner_is_taken_over(db: Db) {
    let mut script = Script::owned();
    db.commit("never registered", &script.start()).await;
    let swept = db.store.sweep(&[]).await.unwrap();
    assert_eq!(swept, Swept { replicas: 0, requeued: vec![script.id] });
}

async fn a_run_of_a_newer_format_is_left_to_newer_versions(db: Db) {
    let mut script = Script::queued();
    let mut begun = Script::owned();
    let mut cancelled = Script::queued();
    let mut plain = Script::queued();
    for script in [&mut script, &mut begun, &mut cancelled, &mut plain] {
        db.commit("me", &script.start()).await;
    }
    assert!(db.store.give_back("me", begun.id, 1, Requeue::AtOnce).await.unwrap());
    db.store.request_cancel(TENANT, cancelled.id, "key", None).await.unwrap();
    db.execute(&format!("UPDATE runs SET format = 2 WHERE id <> '{}'", plain.id)).await;
    let claimed = db.store.claim("you", 10, "").await.unwrap();
    assert_eq!(claimed.iter().map(|c| c.run.id).collect::<Vec<_>>(), [plain.id]);
    assert_eq!(claimed[0].run.format, 1);
    assert_eq!(db.store.claim_begun("you", 10).await.unwrap(), []);
    assert_eq!(db.store.claim_cancelled("you", 10).await.unwrap(), []);
    assert_eq!(db.store.claim_run("you", script.id).await.unwrap(), None);
    // As the newer version leaves them.
    db.execute("UPDATE runs SET format = 0").await;
    let begun_before = db.store.claim_begun("you", 10).await.unwrap();
    assert_eq!(begun_before.iter().map(|c| c.run.id).collect::<Vec<_>>(), [begun.id]);
    assert_eq!(begun_before[0].run.format, 1, "this version writes its own format from now on");
}

async fn wakeups_tell_of_queue_and_cancel(db: Db) {
    let mut hints = db.store.wakeups();
    if db.store.kind() == "postgres" {
        // Whatever came before listening began is made up for.
        assert_eq!(hints.recv().await.unwrap(), Wakeup::Resync);
    }
    let (mut queued, mut running) = (Script::queued(), Script::owned());
    db.commit("me", &running.start()).await;
    db.commit("me", &queued.start()).await;
    db.store.request_cancel(TENANT, running.id, "key", None).await.unwrap();
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Queue);
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Cancel(running.id));
}

async fn runs_that_wait_again_are_signalled_once_per_batch(db: Db) {
    let mut hints = db.store.wakeups();
    if db.store.kind() == "postgres" {
        assert_eq!(hints.recv().await.unwrap(), Wakeup::Resync);
    }
    let batch: Vec<RunWrite> = (0..10).map(|_| Script::queued().start()).collect();
    db.store.commit("me", &batch).await.unwrap();
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Queue);
    let run = db.store.claim("you", 1, "").await.unwrap().remove(0).run;
    assert!(db.store.give_back("you", run.id, run.epoch, Requeue::AtOnce).await.unwrap());
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Queue);
    db.store.claim("never registered", 10, "").await.unwrap();
    assert_eq!(db.store.sweep(&[]).await.unwrap().requeued.len(), 10);
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Queue);
    // Nothing was left over from any of them.
    let mut last = Script::owned();
    db.commit("me", &last.start()).await;
    db.store.request_cancel(TENANT, last.id, "key", None).await.unwrap();
    assert_eq!(hints.recv().await.unwrap(), Wakeup::Cancel(last.id));
}

/// After a restart of the only process its old replica is gone, whatever its lease says.
#[tokio::test]
async fn sqlite_takes_over_runs_of_an_earlier_process_at_once() {
    let db = Db::sqlite().await;
    db.store.register_replica("before", FOREVER).await.unwrap();
    let mut script = Script::owned();
    db.commit("before", &script.start()).await;
    let db = db.reopen().await;
    db.store.register_replica("after", FOREVER).await.unwrap();
    let gone = db.store.silent_replicas("after", &mut Watch::default()).await.unwrap();
    assert_eq!(gone, ["before"]);
    let swept = db.store.sweep(&gone).await.unwrap();
    assert_eq!(swept, Swept { replicas: 1, requeued: vec![script.id] });
    assert_eq!(db.store.claim("after", 1, "").await.unwrap()[0].run.id, script.id);
}

/// Waits until a statement in this database waits for a lock.
pub(super) async fn until_blocked(observer: &mut PgConnection) {
    let waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'";
    while sqlx::query_scalar::<_, i64>(waiting).fetch_one(&mut *observer).await.unwrap() == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// An event is committed while the sweep already waits for its run: the replica that claims the run sees it,
/// and the one whose replica is dead cannot add another.
#[tokio::test]
async fn postgres_sweep_waits_for_commits_under_way() {
    let db = Db::postgres().await;
    db.store.register_replica("me", Duration::ZERO).await.unwrap();
    let shell = call("shell", "{}");
    let (mut acting, mut cancelled) = (Script::owned(), Script::owned());
    for script in [&mut acting, &mut cancelled] {
        db.commit("me", &script.start()).await;
        db.commit("me", &script.write(vec![responded(1, &[&shell])])).await;
    }
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let mut other = connection.begin().await.unwrap();
    let mut dispatch = serde_json::to_value(dispatched(&shell, Effect::Once)).unwrap();
    dispatch["at"] = now().timestamp_micros().into();
    sqlx::query("UPDATE runs SET next_seq = next_seq + 1 WHERE id = $1")
        .bind(acting.id)
        .execute(&mut *other)
        .await
        .unwrap();
    sqlx::query("INSERT INTO run_events (run_id, seq, first_seq, epoch, at, events) VALUES ($1, 4, 4, 1, now(), $2)")
        .bind(acting.id)
        .bind(Value::from(vec![dispatch]).to_string())
        .execute(&mut *other)
        .await
        .unwrap();
    sqlx::query("UPDATE runs SET cancel_requested_at = now() WHERE id = $1")
        .bind(cancelled.id)
        .execute(&mut *other)
        .await
        .unwrap();

    let store = db.store.clone();
    let sweep = tokio::spawn(async move { store.sweep(&["me".to_owned()]).await.unwrap() });
    until_blocked(&mut observer).await;
    other.commit().await.unwrap();
    let mut swept = sweep.await.unwrap();
    swept.requeued.sort_unstable();
    assert_eq!(swept, Swept { replicas: 1, requeued: vec![acting.id, cancelled.id] });
    acting.next_seq += 1;
    let late = db.commit_one("me", &acting.write(vec![completed(json!(1))])).await;
    assert_eq!(late, WriteOutcome::Fenced);
    let ended = db.store.claim_cancelled("you", 10).await.unwrap();
    assert_eq!(ended.iter().map(|c| c.run.id).collect::<Vec<_>>(), [cancelled.id]);
    let claimed = db.store.claim_run("you", acting.id).await.unwrap().unwrap();
    assert_eq!(claimed.run.last_seq(), 4);
    assert_eq!(db.journal(acting.id).await.len(), 4);
}

/// A heartbeat that is on its way while the sweep looks keeps the lease.
#[tokio::test]
async fn postgres_sweep_leaves_a_replica_whose_heartbeat_is_being_committed() {
    let db = Db::postgres().await;
    db.store.register_replica("me", Duration::ZERO).await.unwrap();
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let mut beat = connection.begin().await.unwrap();
    sqlx::query("UPDATE replicas SET heartbeat_at = now()").execute(&mut *beat).await.unwrap();
    let me = ["me".to_owned()];
    assert_eq!(db.store.sweep(&me).await.unwrap(), Swept::default());
    beat.commit().await.unwrap();
    assert!(db.store.heartbeat("me").await.unwrap().is_some());
    assert_eq!(db.status(script.id).await, RunStatus::Running);
}
