//! Replicas that claim at the same instant, and what one leaves to others.

use std::collections::BTreeSet;

use tokio::sync::Barrier;
use toolloop::store::{Claimant, Requeue, RunLimits};

use super::*;
use crate::fault_rounds::rounds;

on_both! {
    of_eight_concurrent_claims_one_gets_the_run,
    runs_that_a_claimant_leaves_are_taken_by_another,
    a_tenant_whose_runs_cannot_be_claimed_stops_no_other,
    a_clock_that_is_set_back_delays_no_run_without_a_start_time,
}

const CLAIMERS: usize = 8;

/// On PostgreSQL each has connections of its own.
async fn of_eight_concurrent_claims_one_gets_the_run(db: Db) {
    let mut stores = vec![db.store.clone()];
    while stores.len() < CLAIMERS {
        stores.push(match db.store.kind() {
            "postgres" => store::open(&db.url, 9, false).await.unwrap(),
            _ => db.store.clone(),
        });
    }
    let rounds = rounds(25);
    let mut owners = std::collections::BTreeMap::<String, usize>::new();
    for _ in 0..rounds {
        let mut script = Script::queued();
        db.commit("starter", &script.start()).await;
        let barrier = Arc::new(Barrier::new(CLAIMERS));
        let mut claims = tokio::task::JoinSet::new();
        for (number, store) in stores.iter().cloned().enumerate() {
            let barrier = Arc::clone(&barrier);
            claims.spawn(async move {
                let owner = format!("replica-{number}");
                barrier.wait().await;
                let claimed = store.claim(&owner, 1, "").await.unwrap();
                claimed.into_iter().map(|it| (owner.clone(), it.run)).collect::<Vec<_>>()
            });
        }
        let claimed: Vec<_> = claims.join_all().await.into_iter().flatten().collect();
        let [(owner, run)] = &*claimed else { panic!("{claimed:?}") };
        let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
        assert_eq!((run.id, run.epoch, run.crash_count), (script.id, 1, 0));
        assert_eq!((row.owner.as_ref(), row.epoch), (Some(owner), 1));
        *owners.entry(owner.clone()).or_default() += 1;
    }
    println!("{}: {rounds} injections, each run had one owner: {owners:?}", db.store.kind());
    if db.store.kind() == "postgres" {
        assert!(owners.len() > 1, "there was no race: {owners:?}");
    }
}

async fn runs_that_a_claimant_leaves_are_taken_by_another(db: Db) {
    let (mut left, mut begun, mut taken) = (Script::queued(), Script::owned(), Script::queued());
    for script in [&mut left, &mut begun, &mut taken] {
        db.commit("me", &script.start()).await;
    }
    assert!(db.store.give_back("me", begun.id, 1, Requeue::AtOnce).await.unwrap());
    let excluded = [left.id, begun.id];
    let claimant = Claimant { owner: "you", excluded: &excluded };
    assert_eq!(db.store.claim_begun(claimant, 9).await.unwrap(), []);
    let of_key = RunLimits { of_key: Some(9), ..RunLimits::default() };
    for (limits, expected) in [(RunLimits::default(), vec![taken.id]), (of_key, vec![])] {
        let mut running = db.store.running(limits).await.unwrap();
        let mut last_served = String::new();
        let claimed = db.store.claim_within(claimant, 9, &mut last_served, &mut running);
        let claimed = claimed.await.unwrap();
        assert_eq!(claimed.iter().map(|it| it.run.id).collect::<Vec<_>>(), expected);
    }
    let claimed = db.store.claim("other", 9, "").await.unwrap();
    let claimed: BTreeSet<_> = claimed.iter().map(|it| it.run.id).collect();
    assert_eq!(claimed, BTreeSet::from(excluded));
}

async fn a_tenant_whose_runs_cannot_be_claimed_stops_no_other(db: Db) {
    for tenant in ["a", "b", "c"] {
        let mut script = Script::queued();
        script.caller = Arc::new(Caller { tenant: tenant.into(), ..Caller::clone(&script.caller) });
        db.commit("me", &script.start()).await;
    }
    // There is no next epoch.
    db.execute(&format!("UPDATE runs SET epoch = {} WHERE tenant = 'a'", i64::MAX)).await;
    let claimed = db.store.claim("me", 9, "").await.unwrap();
    assert_eq!(claimed.iter().map(|it| &*it.run.tenant).collect::<Vec<_>>(), ["b", "c"]);
    let mut last_served = String::new();
    let mut running = db.store.running(RunLimits::default()).await.unwrap();
    let claim = db.store.claim_within("me", 9, &mut last_served, &mut running);
    assert!(claim.await.is_err(), "nothing else is left");
    assert_eq!(last_served, "a", "the next claim begins behind it");
}

async fn a_clock_that_is_set_back_delays_no_run_without_a_start_time(db: Db) {
    let mut queued = Script::queued();
    let mut delayed = Script::with(|new| {
        new.status = RunStatus::Queued;
        new.queue.available_at = Some(now() + chrono::TimeDelta::hours(1));
    });
    delayed.epoch = 0;
    for script in [&mut queued, &mut delayed] {
        db.commit("me", &script.start()).await;
    }
    let hour = if db.store.kind() == "postgres" { "interval '1 hour'" } else { "3600000000" };
    db.execute(&format!("UPDATE runs SET available_at = available_at + {hour}")).await;
    assert_eq!(db.store.claim("you", 9, "").await.unwrap(), []);
    db.store.undo_clock_step().await.unwrap();
    let claimed = db.store.claim("you", 9, "").await.unwrap();
    assert_eq!(claimed.iter().map(|it| it.run.id).collect::<Vec<_>>(), [queued.id]);
}
