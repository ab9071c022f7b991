//! Reservations within the limits of tenants and keys: several replicas together exceed no limit.

use std::collections::BTreeMap;
use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use tokio::time::Instant;
use toolloop::store::{LimitReached, RunCounts, RunLimits, RunReservation, Swept, Watch};

use super::*;

on_both! {
    concurrent_takers_get_as_many_places_as_there_are,
    a_stored_run_has_its_place_by_that,
    repeats_of_a_run_share_a_place,
    places_that_are_not_held_are_given_back,
    a_dead_replica_has_no_places,
    a_run_that_never_began_needs_a_place_again,
}

const LIMIT: u32 = 5;
const LEASE: Duration = Duration::from_hours(1);

fn of_tenant(limit: u32) -> RunLimits {
    RunLimits { of_tenant: Some(limit), of_key: None }
}

fn place<'p>(owner: &'p str, tenant: &'p str) -> RunReservation<'p> {
    let (id, run) = (Uuid::now_v7(), Uuid::now_v7());
    RunReservation { id, owner, run, tenant, subject: "key-1", idempotency_key: None }
}

async fn take(db: &Db, place: RunReservation<'_>, limit: u32) -> Result<(), LimitReached> {
    db.store.reserve_run(place, of_tenant(limit)).await.unwrap()
}

async fn claim(store: &Store, owner: &str, limits: RunLimits) -> Vec<Uuid> {
    let mut running = store.running(limits).await.unwrap();
    let mut last_served = String::new();
    let claimed = store.claim_within(owner, 9, &mut last_served, &mut running).await.unwrap();
    claimed.into_iter().map(|claimed| claimed.run.id).collect()
}

async fn enqueue(db: &Db, tenant: &str, subject: &str) -> Uuid {
    let mut script = Script::queued();
    script.caller = Arc::new(Caller {
        tenant: tenant.into(),
        subject: subject.into(),
        ..Caller::clone(&script.caller)
    });
    db.commit("replica-0", &script.start()).await;
    script.id
}

async fn concurrent_takers_get_as_many_places_as_there_are(db: Db) {
    for (number, limits) in [
        of_tenant(LIMIT),
        RunLimits { of_tenant: Some(2 * LIMIT), of_key: Some(LIMIT) },
        RunLimits { of_tenant: None, of_key: Some(LIMIT) },
    ]
    .into_iter()
    .enumerate()
    {
        let tenant = format!("tenant-{number}");
        for subject in 0..3 {
            for _ in 0..20 {
                enqueue(&db, &tenant, &format!("key-{subject}")).await;
            }
        }
        let mut tasks = JoinSet::new();
        for replica in 0..4 {
            let owner = format!("replica-{replica}");
            db.store.register_replica(&owner, LEASE).await.unwrap();
            for asked in 0..20 {
                let (store, tenant, owner) = (db.store.clone(), tenant.clone(), owner.clone());
                let subject = format!("key-{}", asked % 3);
                tasks.spawn(async move {
                    let wanted = RunReservation { subject: &subject, ..place(&owner, &tenant) };
                    _ = store.reserve_run(wanted, limits).await.unwrap();
                });
            }
            let store = db.store.clone();
            tasks.spawn(async move {
                for _ in 0..4 {
                    claim(&store, &owner, limits).await;
                }
            });
        }
        tasks.join_all().await;
        for _ in 0..3 {
            claim(&db.store, "replica-0", limits).await; // as replicas do that look again
        }
        let running = db.store.running(limits).await.unwrap();
        let of_key = |subject: &str| running.of_key(&tenant, subject);
        let by_key: BTreeMap<_, _> =
            ["key-0", "key-1", "key-2"].map(|subject| (subject, of_key(subject))).into();
        let all: u32 = by_key.values().sum();
        if limits.of_key.is_some() {
            assert!(by_key.values().all(|runs| *runs <= LIMIT), "{limits:?} {by_key:?}");
        }
        assert_eq!(all, limits.of_tenant.unwrap_or(3 * LIMIT), "{limits:?} {by_key:?}");
        for subject in ["key-0", "key-1", "key-2"] {
            let wanted = RunReservation { subject, ..place("replica-0", &tenant) };
            assert!(db.store.reserve_run(wanted, limits).await.unwrap().is_err());
        }
    }
}

async fn a_stored_run_has_its_place_by_that(db: Db) {
    db.store.register_replica("me", LEASE).await.unwrap();
    let mut script = Script::owned();
    let own = RunReservation { run: script.id, ..place("me", TENANT) };
    assert_eq!(take(&db, own, 1).await, Ok(()));
    assert_eq!(take(&db, place("me", TENANT), 1).await, Err(LimitReached::OfTenant(1)));
    assert_eq!(take(&db, place("me", "other"), 1).await, Ok(()));
    db.commit("me", &script.start()).await;
    assert_eq!(take(&db, place("me", TENANT), 1).await, Err(LimitReached::OfTenant(1)));
    assert_eq!(take(&db, place("me", TENANT), 2).await, Ok(()), "it counts once");
    let mut child = Script::with(|new| new.parent_run_id = Some(script.id));
    db.commit("me", &child.start()).await;
    assert_eq!(take(&db, place("me", TENANT), 3).await, Ok(()), "a child counts not at all");
    let end = script.write(vec![completed(json!({}))]);
    db.commit("me", &end).await;
    assert_eq!(take(&db, place("me", TENANT), 3).await, Ok(()), "nor does one that has ended");
    assert_eq!(take(&db, place("me", TENANT), 3).await, Err(LimitReached::OfTenant(3)));
}

async fn repeats_of_a_run_share_a_place(db: Db) {
    db.store.register_replica("me", LEASE).await.unwrap();
    db.store.register_replica("you", LEASE).await.unwrap();
    let keyed = |owner| RunReservation { idempotency_key: Some("k"), ..place(owner, TENANT) };
    let (first, second) = (keyed("me"), keyed("you"));
    assert_eq!(take(&db, first, 1).await, Ok(()));
    assert_eq!(take(&db, second, 1).await, Ok(()));
    let again = RunReservation { id: Uuid::now_v7(), ..second };
    assert_eq!(take(&db, again, 1).await, Ok(()));
    assert_eq!(take(&db, place("you", TENANT), 2).await, Ok(()), "they are one");
    assert!(take(&db, RunReservation { tenant: "a", ..keyed("me") }, 1).await.is_ok());
    db.store.release_reservations(&[first.id, again.id]).await.unwrap();
    assert!(take(&db, place("you", TENANT), 2).await.is_err(), "one of them has it still");
    db.store.release_reservations(&[second.id]).await.unwrap();
    assert_eq!(take(&db, place("you", TENANT), 2).await, Ok(()));
}

async fn places_that_are_not_held_are_given_back(db: Db) {
    for replica in ["me", "you"] {
        db.store.register_replica(replica, LEASE).await.unwrap();
    }
    let (held, lost, others) = (place("me", TENANT), place("me", TENANT), place("you", TENANT));
    for place in [held, lost, others] {
        assert_eq!(take(&db, place, 3).await, Ok(()));
    }
    let limit = || take(&db, place("you", TENANT), 3);
    db.store.release_other_reservations("me", &[held.id], LEASE).await.unwrap();
    assert!(limit().await.is_err(), "its answer may be on its way");
    db.store.release_other_reservations("me", &[held.id], Duration::ZERO).await.unwrap();
    assert_eq!(limit().await, Ok(()));
    assert!(limit().await.is_err());
    db.store.release_other_reservations("me", &[], Duration::ZERO).await.unwrap();
    assert_eq!(limit().await, Ok(()));
}

/// Lets the replica `dies` be declared dead.
async fn dies(db: &Db) -> Swept {
    db.store.register_replica("lives", LEASE).await.unwrap();
    let mut watch = Watch::default();
    loop {
        let silent = db.store.silent_replicas("lives", &mut watch).await.unwrap();
        if silent.contains(&"dies".to_owned()) {
            return db.store.sweep(&["dies".to_owned()]).await.unwrap();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

async fn a_dead_replica_has_no_places(db: Db) {
    db.store.register_replica("dies", Duration::from_secs(1)).await.unwrap();
    assert_eq!(take(&db, place("dies", TENANT), 1).await, Ok(()));
    assert!(take(&db, place("lives", TENANT), 1).await.is_err());
    dies(&db).await;
    assert_eq!(take(&db, place("lives", TENANT), 1).await, Ok(()));
}

async fn a_run_that_never_began_needs_a_place_again(db: Db) {
    db.store.register_replica("dies", Duration::from_secs(1)).await.unwrap();
    let queued = enqueue(&db, TENANT, "key-1").await;
    let limits = of_tenant(1);
    assert_eq!(claim(&db.store, "dies", limits).await, [queued]);
    let other = enqueue(&db, TENANT, "key-1").await;
    assert!(claim(&db.store, "lives", limits).await.is_empty());
    assert_eq!(dies(&db).await.requeued, [queued]);
    assert_eq!(db.store.claim_exempt_run("lives", queued).await.unwrap(), None);
    assert_eq!(claim(&db.store, "lives", limits).await, [other], "it came back behind the other");
    assert!(claim(&db.store, "lives", limits).await.is_empty());
}

#[tokio::test]
async fn a_tenant_whose_places_are_locked_slows_no_other() {
    let db = Db::postgres().await;
    db.store.register_replica("me", LEASE).await.unwrap();
    let limits = of_tenant(3);
    enqueue(&db, "a", "key-1").await;
    let other = enqueue(&db, "b", "key-1").await;
    let mut holder = PgConnection::connect(&db.url).await.unwrap();
    let lock = "BEGIN; SELECT pg_advisory_xact_lock(7412, hashtext('a'))";
    sqlx::raw_sql(lock).execute(&mut holder).await.unwrap();
    // A busy machine may be slow once.
    let mut shortest = Duration::MAX;
    for other in [other, enqueue(&db, "b", "key-1").await, enqueue(&db, "b", "key-1").await] {
        let since = Instant::now();
        let mut running = db.store.running(limits).await.unwrap();
        let mut last_served = String::new();
        let claimed = db.store.claim_within("me", 1, &mut last_served, &mut running).await.unwrap();
        assert_eq!(claimed.iter().map(|it| it.run.id).collect::<Vec<_>>(), [other]);
        assert!(RunCounts::has_held_back(&running), "the others are looked at again");
        shortest = shortest.min(since.elapsed());
    }
    assert!(shortest < Duration::from_secs(2), "{shortest:?}");
    let refused = db.store.reserve_run(place("me", "a"), limits).await;
    assert!(matches!(refused, Err(StoreError::Unavailable(_))), "{refused:?}");
    assert_eq!(take(&db, place("me", "b"), 4).await, Ok(()));
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.unwrap();
    assert_eq!(claim(&db.store, "me", limits).await.len(), 1);
    assert_eq!(take(&db, place("me", "a"), 3).await, Ok(()));
}
