//! Replicas that claim at the same instant.

use tokio::sync::Barrier;

use super::*;
use crate::fault_rounds::rounds;

on_both! {
    of_eight_who_claim_one_run_at_once_one_has_it,
}

const CLAIMERS: usize = 8;

/// On PostgreSQL each has connections of its own.
async fn of_eight_who_claim_one_run_at_once_one_has_it(db: Db) {
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
