//! The chain of the audit log: what was closed is found as it was, and nothing else passes.

use chrono::TimeDelta;
use toolloop::store::{AuditFilter, CheckedStretch, Closing};

use super::*;

on_both! {
    what_was_closed_is_found_as_it_was,
    every_change_is_found,
    late_records_are_closed_with_the_next,
    two_replicas_close_each_stretch_once,
    retention_deletes_whole_stretches,
}

/// Everything that is there is complete.
fn closing(records: usize) -> Closing {
    let now = now() + TimeDelta::seconds(1);
    Closing { records, settled: now, aged: now }
}

/// Writes so many records, a run each.
async fn write(db: &Db, records: usize) {
    for place in 0..records {
        let mut script = Script::owned();
        let asked = call("file_ops", &format!("{{\"path\":\"{place}\"}}"));
        let mut first = script.start();
        first.audit = vec![AuditRecord { pattern: Some("*".into()), ..audited(&asked, "allowed") }];
        db.commit("me", &first).await;
    }
}

async fn close(db: &Db, records: usize) -> usize {
    let mut closed = 0;
    let sign = |hash: &[u8]| Some([b"signed ", hash].concat());
    while db.store.close_stretch(TENANT, closing(records), &sign).await.unwrap().is_some() {
        closed += 1;
    }
    closed
}

async fn checked(db: &Db) -> Vec<CheckedStretch> {
    let is_signed = |hash: &[u8], signature: &[u8]| signature == [b"signed ", hash].concat();
    db.store.checked_stretches(TENANT, &page(100, None), &is_signed).await.unwrap()
}

async fn faults(db: &Db) -> Vec<(i64, String)> {
    let found = checked(db).await.into_iter();
    found
        .flat_map(|checked| {
            checked.faults.into_iter().map(move |fault| (checked.stretch.number, fault))
        })
        .collect()
}

async fn what_was_closed_is_found_as_it_was(db: Db) {
    assert_eq!(close(&db, 10).await, 0, "nothing to close");
    write(&db, 25).await;
    // Neither enough nor old enough.
    let young = Closing { records: 100, aged: now() - TimeDelta::hours(1), ..closing(1) };
    assert_eq!(db.store.close_stretch(TENANT, young, &|_| None).await.unwrap(), None);
    let coming = Closing { settled: now() - TimeDelta::minutes(5), ..closing(1) };
    assert_eq!(db.store.close_stretch(TENANT, coming, &|_| None).await.unwrap(), None);
    assert_eq!(close(&db, 10).await, 3);
    let found = checked(&db).await;
    let records: Vec<u32> = found.iter().map(|checked| checked.stretch.records).collect();
    assert_eq!((records, faults(&db).await), (vec![10, 10, 5], vec![]));
    assert_eq!(found[1].stretch.previous, found[0].stretch.hash);
    let wrong = |_: &[u8], _: &[u8]| false;
    let unsigned = db.store.checked_stretches(TENANT, &page(1, Some(1)), &wrong).await.unwrap();
    assert_eq!((unsigned.len(), unsigned[0].stretch.number, unsigned[0].faults.len()), (1, 2, 1));
    assert_eq!(db.store.audited_tenants().await.unwrap(), [TENANT]);
    let other = db.store.checked_stretches("other", &page(9, None), &wrong).await.unwrap();
    assert_eq!(other, []);
    // What is open is not judged.
    write(&db, 3).await;
    assert_eq!(faults(&db).await, []);
    let rows = db.store.audit(TENANT, &AuditFilter::default(), &page(1, None)).await.unwrap();
    assert_eq!(rows[0].pattern.as_deref(), Some("*"));
}

async fn every_change_is_found(db: Db) {
    // The n-th record, from the oldest.
    let nth = |n: usize| format!("(SELECT id FROM audit_log ORDER BY at, id LIMIT 1 OFFSET {n})");
    write(&db, 80).await;
    assert_eq!(close(&db, 10).await, 8);
    let copy = "tenant, at, action, run_id, call_id, duration_ms, subject, tool, rule, decision, \
                reason, outcome, arguments, definition_hash, pattern";
    let other_id = "00000000-0000-7000-8000-000000000001";
    let swap = format!(
        "UPDATE audit_log SET call_id = NULL, at = (SELECT at FROM audit_log b WHERE b.id = {two}) \
         WHERE id = {one}",
        one = nth(3),
        two = nth(4),
    );
    let changes = [
        (format!("UPDATE audit_log SET decision = 'blocked' WHERE id = {}", nth(15)), "changed"),
        (format!("UPDATE audit_log SET outcome = 'failed' WHERE id = {}", nth(15)), "changed"),
        (format!("UPDATE audit_log SET subject = 'else' WHERE id = {}", nth(15)), "changed"),
        (format!("UPDATE audit_log SET arguments = '{{}}' WHERE id = {}", nth(15)), "changed"),
        (format!("UPDATE audit_log SET duration_ms = NULL WHERE id = {}", nth(15)), "changed"),
        (swap, "changed"),
        (format!("DELETE FROM audit_log WHERE id = {}", nth(15)), "missing"),
        (
            format!(
                "INSERT INTO audit_log ({copy}, id) SELECT {copy}, '{other_id}' FROM audit_log \
                 WHERE id = {}",
                nth(15)
            ),
            "in no stretch",
        ),
        ("DELETE FROM audit_stretches WHERE number = 3".into(), "is missing"),
        ("DELETE FROM audit_stretches WHERE number = 1".into(), "no record says"),
        ("UPDATE audit_stretches SET records = 9 WHERE number = 2".into(), "missing"),
        (
            "UPDATE audit_stretches SET hash = (SELECT hash FROM audit_stretches WHERE number = 2) \
             WHERE number = 4"
                .into(),
            "does not continue",
        ),
        (
            "UPDATE audit_stretches SET members = (SELECT members FROM audit_stretches \
             WHERE number = 2) WHERE number = 4"
                .into(),
            "missing",
        ),
        ("UPDATE audit_stretches SET signature = NULL WHERE number = 4".into(), "not signed"),
    ];
    assert_eq!(faults(&db).await, []);
    for (change, expected) in changes {
        let tables = ["audit_log", "audit_stretches"];
        for table in tables {
            db.execute(&format!("DROP TABLE IF EXISTS kept_{table}")).await;
            db.execute(&format!("CREATE TABLE kept_{table} AS SELECT * FROM {table}")).await;
        }
        db.execute(&change).await;
        let found = faults(&db).await;
        assert!(found.iter().any(|(_, fault)| fault.contains(expected)), "{change}: {found:?}");
        for table in tables {
            db.execute(&format!("DELETE FROM {table}")).await;
            db.execute(&format!("INSERT INTO {table} SELECT * FROM kept_{table}")).await;
        }
        assert_eq!(faults(&db).await, [], "put back after {change}");
    }
}

async fn late_records_are_closed_with_the_next(db: Db) {
    write(&db, 10).await;
    let mut late = Script::owned();
    let mut first = late.start();
    let at = now();
    first.audit = vec![AuditRecord { at, ..audited(&call("file_ops", "{}"), "allowed") }];
    write(&db, 10).await;
    assert_eq!(close(&db, 20).await, 1);
    db.commit("me", &first).await;
    write(&db, 5).await;
    assert_eq!((close(&db, 10).await, faults(&db).await), (1, vec![]));
    let stretches = checked(&db).await;
    assert_eq!((stretches[1].stretch.records, stretches[1].stretch.first_at), (6, at));
}

async fn two_replicas_close_each_stretch_once(db: Db) {
    write(&db, 40).await;
    let other = toolloop::store::open(&db.url, 12).await;
    let others: Vec<Arc<Store>> = match other {
        Ok(other) => vec![Arc::clone(&db.store), other],
        Err(_) => vec![Arc::clone(&db.store), Arc::clone(&db.store)], // one process a file
    };
    let mut tasks = tokio::task::JoinSet::new();
    for store in others {
        tasks.spawn(async move {
            for _ in 0..20 {
                store.close_stretch(TENANT, closing(5), &|_| None).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    close(&db, 5).await;
    let found = checked(&db).await;
    let numbers: Vec<i64> = found.iter().map(|checked| checked.stretch.number).collect();
    assert_eq!(numbers, (1..=8).collect::<Vec<i64>>());
    assert!(found.iter().all(|checked| checked.stretch.records == 5));
}

async fn retention_deletes_whole_stretches(db: Db) {
    write(&db, 20).await;
    assert_eq!(close(&db, 10).await, 2);
    let before = checked(&db).await[1].stretch.last_at;
    write(&db, 15).await;
    assert_eq!(close(&db, 10).await, 2);
    let count = async || {
        db.store.audit(TENANT, &AuditFilter::default(), &page(200, None)).await.unwrap().len()
    };
    assert_eq!(db.store.delete_audit(before, 100).await.unwrap(), 10, "the second is not over");
    assert_eq!(count().await, 26, "the deletion is recorded");
    let just_after = before + TimeDelta::microseconds(1);
    assert_eq!(db.store.delete_audit(just_after, 100).await.unwrap(), 10);
    assert_eq!(db.store.delete_audit(just_after, 100).await.unwrap(), 0);
    let left: Vec<i64> = checked(&db).await.iter().map(|checked| checked.stretch.number).collect();
    assert_eq!((left, faults(&db).await), (vec![3, 4], vec![]));
    // The chain goes on, and a deletion that nobody recorded is found.
    write(&db, 5).await;
    assert_eq!((close(&db, 10).await, faults(&db).await), (1, vec![]));
    db.execute("DELETE FROM audit_stretches WHERE number = 3").await;
    let found = faults(&db).await;
    assert!(found.iter().any(|(_, fault)| fault.contains("no record says")), "{found:?}");
}
