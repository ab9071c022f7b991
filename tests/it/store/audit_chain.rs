//! The chain of the audit log: what was closed is found as it was, and nothing else passes.

use chrono::TimeDelta;
use toolloop::store::{
    AuditFilter, ChainHead, CheckedStretch, Closed, Closing, KnownHead, Signatures,
};

use super::*;

on_both! {
    a_closed_chain_is_found_unchanged,
    every_change_is_found,
    a_chain_that_was_made_again_is_found,
    the_beginning_of_signing_is_recorded,
    late_records_are_closed_with_the_next,
    late_records_do_not_close_others_again,
    records_of_one_instant_are_closed_once,
    two_replicas_close_each_stretch_once,
    a_record_that_is_written_long_after_its_decision_is_no_fault,
    late_records_that_are_too_old_stay_outside,
    retention_deletes_whole_stretches,
    retention_leaves_records_that_are_not_closed,
    a_known_head_that_is_gone_stops_the_closing,
    retention_and_other_replicas_move_the_head,
    a_signed_deletion_of_another_service_moves_the_head,
    late_and_repeated_closing_is_reported,
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
    close_with(db, records, &|hash| Some([b"signed ", hash].concat())).await
}

type Sign = dyn Fn(&[u8]) -> Option<Vec<u8>> + Sync;

async fn close_with(db: &Db, records: usize, sign: &Sign) -> usize {
    let mut closed = 0;
    while let Closed::Stretch(_) = close_one(db, closing(records), sign).await {
        closed += 1;
    }
    closed
}

async fn close_one(db: &Db, closing: Closing, sign: &Sign) -> Closed {
    db.store.close_stretch(TENANT, closing, None, sign).await.unwrap()
}

fn is_signed(hash: &[u8], signature: &[u8]) -> bool {
    signature == [b"signed ", hash].concat()
}

const KEY: Signatures<'_> = Signatures { is_signed: Some(&is_signed), unsigned_until: 0 };
const NO_KEY: Signatures<'_> = Signatures { is_signed: None, unsigned_until: 0 };

async fn checked(db: &Db) -> Vec<CheckedStretch> {
    db.store.checked_stretches(TENANT, &page(100, None), KEY).await.unwrap()
}

async fn faults(db: &Db) -> Vec<(i64, String)> {
    faults_with(db, KEY).await
}

async fn faults_with(db: &Db, signatures: Signatures<'_>) -> Vec<(i64, String)> {
    // Page by page, as it is asked for.
    let mut found = Vec::new();
    loop {
        let after = found.last().map(|checked: &CheckedStretch| checked.stretch.number);
        let next = db.store.checked_stretches(TENANT, &page(3, after), signatures).await.unwrap();
        if next.is_empty() {
            break;
        }
        found.extend(next);
    }
    let found = found.into_iter();
    found
        .flat_map(|checked| {
            checked.faults.into_iter().map(move |fault| (checked.stretch.number, fault))
        })
        .collect()
}

async fn a_closed_chain_is_found_unchanged(db: Db) {
    assert_eq!(close(&db, 10).await, 0, "nothing to close");
    write(&db, 25).await;
    // Neither enough nor old enough.
    let young = Closing { records: 100, aged: now() - TimeDelta::hours(1), ..closing(1) };
    assert_eq!(close_one(&db, young, &|_| None).await, Closed::Nothing(None));
    let coming = Closing { settled: now() - TimeDelta::minutes(5), ..closing(1) };
    assert_eq!(close_one(&db, coming, &|_| None).await, Closed::Nothing(None));
    assert_eq!(close(&db, 10).await, 3);
    let found = checked(&db).await;
    let records: Vec<u32> = found.iter().map(|checked| checked.stretch.records).collect();
    // One more than was written: that signing began.
    assert_eq!((records, faults(&db).await), (vec![10, 10, 6], vec![]));
    assert_eq!(found[1].stretch.previous, found[0].stretch.hash);
    let wrong = |_: &[u8], _: &[u8]| false;
    let wrong = Signatures { is_signed: Some(&wrong), unsigned_until: 9 };
    let unsigned = db.store.checked_stretches(TENANT, &page(1, Some(1)), wrong).await.unwrap();
    assert_eq!((unsigned.len(), unsigned[0].stretch.number, unsigned[0].faults.len()), (1, 2, 1));
    assert_eq!(db.store.audited_tenants().await.unwrap(), [TENANT]);
    let other = db.store.checked_stretches("other", &page(9, None), wrong).await.unwrap();
    assert_eq!(other, []);
    // What is open is not judged.
    write(&db, 3).await;
    assert_eq!(faults(&db).await, []);
    let rows = db.store.audit(TENANT, &AuditFilter::default(), &page(1, None)).await.unwrap();
    assert_eq!(rows[0].pattern.as_deref(), Some("*"));
}

/// Changes of the stretches themselves, and the fault that each is told as.
fn changes_of_stretches(earlier: &dyn Fn(&str, i64) -> String) -> Vec<(String, &'static str)> {
    vec![
        (format!("UPDATE audit_stretches SET closed_at = {} WHERE number = 4", earlier("closed_at", 1)), "changed"),
        (format!("UPDATE audit_stretches SET first_at = {} WHERE number = 8", earlier("first_at", 1)), "changed"),
        (format!("UPDATE audit_stretches SET last_at = {} WHERE number = 9", earlier("last_at", -1)), "changed"),
        ("UPDATE audit_stretches SET signature = NULL".into(), "unsigned"),
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
        ("UPDATE audit_stretches SET signature = NULL WHERE number = 4".into(), "unsigned"),
    ]
}

async fn every_change_is_found(db: Db) {
    // The n-th record, from the oldest.
    let nth = |n: usize| format!("(SELECT id FROM audit_log ORDER BY at, id LIMIT 1 OFFSET {n})");
    write(&db, 80).await;
    assert_eq!(close(&db, 10).await, 9);
    let copy = "tenant, at, action, run_id, call_id, duration_ms, subject, tool, rule, decision, \
                reason, outcome, arguments, definition_hash, pattern";
    let other_id = "00000000-0000-7000-8000-000000000001";
    let unit = if db.url.starts_with("sqlite") { "" } else { " * interval '1 microsecond'" };
    let earlier = |column: &str, micros: i64| format!("{column} - {micros}{unit}");
    let insert = |at: &str, n: usize| {
        let values = copy.replace(" at,", &format!(" {at},"));
        format!(
            "INSERT INTO audit_log ({copy}, id) SELECT {values}, '{other_id}' FROM audit_log \
             WHERE id = {}",
            nth(n)
        )
    };
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
        (format!("DELETE FROM audit_log WHERE id = {}", nth(15)), "1 of its records is missing: "),
        (format!("UPDATE audit_log SET reason = '' WHERE id = {}", nth(15)), "changed"),
        (insert("at", 15), "belong to no stretch"),
        (insert("at", 77), "belong to no stretch"),
        (insert("at", 80), "belong to no stretch"),
        (insert(&earlier("at", 1), 0), "belong to no stretch"),
        (insert(&earlier("at", 1), 10), "belong to no stretch"),
        (insert(&earlier("at", 1), 78), "belong to no stretch"),
        (
            format!(
                "INSERT INTO audit_log ({copy}, id) SELECT {moved}, id FROM audit_log WHERE id = {}",
                nth(15),
                moved = copy.replace(" at,", &format!(" {},", earlier("at", 60_000_000))),
            ),
            "belong to no stretch",
        ),
    ];
    assert_eq!(faults(&db).await, []);
    for (change, expected) in changes.into_iter().chain(changes_of_stretches(&earlier)) {
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

/// Writing to the database is not enough to make another chain where there is a key.
async fn a_chain_that_was_made_again_is_found(db: Db) {
    write(&db, 30).await;
    close(&db, 10).await;
    assert_eq!(faults(&db).await, []);
    db.execute("DELETE FROM audit_log WHERE action = 'audit.signing_changed'").await;
    db.execute("UPDATE audit_log SET subject = 'another'").await;
    db.execute("DELETE FROM audit_stretches").await;
    assert_eq!(close_with(&db, 10, &|_| None).await, 3);
    let found = faults(&db).await;
    assert!(found.len() == 3 && found.iter().all(|(_, it)| it.contains("unsigned")), "{found:?}");
    // The service goes on with its key.
    write(&db, 10).await;
    close(&db, 10).await;
    let numbers: Vec<i64> = faults(&db).await.into_iter().map(|(number, _)| number).collect();
    assert_eq!(numbers, [1, 2, 3]);
    assert_eq!(faults_with(&db, NO_KEY).await, [], "which is not seen without the key");
}

async fn the_beginning_of_signing_is_recorded(db: Db) {
    write(&db, 20).await;
    assert_eq!(close_with(&db, 10, &|_| None).await, 2);
    write(&db, 20).await;
    assert_eq!(close(&db, 10).await, 3);
    write(&db, 1).await;
    assert_eq!(close_with(&db, 10, &|_| None).await, 2);
    let action = Some(AuditAction::SigningChanged);
    let filter = AuditFilter { action, ..AuditFilter::default() };
    let rows = db.store.audit(TENANT, &filter, &page(9, None)).await.unwrap();
    let told: Vec<&str> = rows.iter().map(|row| row.arguments.as_str()).collect();
    assert_eq!(told, [r#"{"number":6,"signed":false}"#, r#"{"number":3,"signed":true}"#]);
    let from = |unsigned_until| Signatures { unsigned_until, ..KEY };
    let numbers = async |signatures| {
        faults_with(&db, signatures).await.into_iter().map(|(n, _)| n).collect::<Vec<i64>>()
    };
    assert_eq!(numbers(KEY).await, [1, 2, 6, 7]);
    assert_eq!(numbers(from(2)).await, [6, 7]);
    assert_eq!(numbers(from(7)).await, [6], "signing does not end unseen");
    assert_eq!(numbers(NO_KEY).await, [6]);
}

async fn late_records_are_closed_with_the_next(db: Db) {
    write(&db, 10).await;
    let mut late = Script::owned();
    let mut first = late.start();
    let at = now();
    first.audit = vec![AuditRecord { at, ..audited(&call("file_ops", "{}"), "allowed") }];
    write(&db, 10).await;
    assert_eq!(close(&db, 20).await, 2);
    db.commit("me", &first).await;
    write(&db, 5).await;
    // Until then it looks as if it had been added.
    let found = faults(&db).await;
    assert!(found.len() == 1 && found[0].1.contains("belong to no stretch"), "{found:?}");
    // At once, however young it is.
    let young = Closing { records: 100, aged: now() - TimeDelta::hours(1), ..closing(1) };
    let sign = |hash: &[u8]| Some([b"signed ", hash].concat());
    assert!(matches!(close_one(&db, young, &sign).await, Closed::Stretch(_)));
    assert_eq!(faults(&db).await, []);
    let stretches = checked(&db).await;
    assert_eq!((stretches[2].stretch.records, stretches[2].stretch.first_at), (6, at));
    assert_eq!(close(&db, 10).await, 0);
}

/// Writes a record of a decision that was made so much earlier.
async fn write_late(db: &Db, late: TimeDelta) -> DateTime<Utc> {
    let mut script = Script::owned();
    let mut first = script.start();
    let at = now() - late;
    first.audit = vec![AuditRecord { at, ..audited(&call("file_ops", "{}"), "allowed") }];
    db.commit("me", &first).await;
    at
}

/// Gives the newest record another time, as only a person with access to the database can.
async fn date_newest(db: &Db, at: DateTime<Utc>) {
    let micros = at.timestamp_micros();
    let at = match db.store.kind() {
        "postgres" => format!("timestamptz 'epoch' + {micros} * interval '1 microsecond'"),
        _ => micros.to_string(),
    };
    let newest = "(SELECT id FROM audit_log ORDER BY at DESC, id DESC LIMIT 1)";
    db.execute(&format!("UPDATE audit_log SET at = {at} WHERE id = {newest}")).await;
}

/// E.g. of a request early in a long call, or of a run that waited for the store.
async fn a_record_that_is_written_long_after_its_decision_is_no_fault(db: Db) {
    write(&db, 10).await;
    assert_eq!(close(&db, 20).await, 2);
    let decided_at = write_late(&db, TimeDelta::hours(5)).await;
    assert_eq!(faults(&db).await, [], "it is of the time at which it was written");
    assert_eq!(close(&db, 20).await, 1);
    assert_eq!(faults(&db).await, []);
    let rows = db.store.audit(TENANT, &AuditFilter::default(), &page(1, None)).await.unwrap();
    assert_eq!(rows[0].decided_at, Some(decided_at));
    assert!(now() - rows[0].at < TimeDelta::hours(1), "{rows:?}");
}

async fn late_records_that_are_too_old_stay_outside(db: Db) {
    write(&db, 10).await;
    assert_eq!(close(&db, 20).await, 2);
    for (hours, is_closed) in [(2, false), (0, true)] {
        let at = checked(&db).await[0].stretch.first_at - TimeDelta::hours(hours);
        write(&db, 1).await;
        date_newest(&db, at).await;
        assert_eq!(close(&db, 20).await, usize::from(is_closed), "{hours}");
        let found = faults(&db).await;
        assert!(found.len() == 1 && found[0].1.contains("1 records"), "{found:?}");
    }
}

/// The last record of a stretch and the first of the next one can be of one instant.
async fn records_of_one_instant_are_closed_once(db: Db) {
    let begun = now() - TimeDelta::minutes(1);
    for second in [0, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13] {
        let mut script = Script::owned();
        let mut first = script.start();
        let at = begun + TimeDelta::seconds(second);
        first.audit = vec![AuditRecord { at, ..audited(&call("file_ops", "{}"), "allowed") }];
        db.commit("me", &first).await;
    }
    let mut closed = 0;
    for _ in 0..10 {
        let outcome = close_one(&db, closing(3), &|_| None).await;
        closed += usize::from(matches!(outcome, Closed::Stretch(_)));
    }
    assert_eq!((closed, faults_with(&db, NO_KEY).await), (5, vec![]));
}

async fn late_records_do_not_close_others_again(db: Db) {
    write(&db, 4).await;
    let between = now();
    write(&db, 5).await;
    assert_eq!(close_with(&db, 3, &|_| None).await, 3);
    for micros in 0..2 {
        let mut late = Script::owned();
        let mut first = late.start();
        let at = between + TimeDelta::microseconds(micros);
        first.audit = vec![AuditRecord { at, ..audited(&call("file_ops", "{}"), "allowed") }];
        db.commit("me", &first).await;
        let outcome = close_one(&db, closing(3), &|_| None).await;
        let Closed::Stretch(stretch) = outcome else { panic!("{outcome:?}") };
        assert_eq!((stretch.records, stretch.first_at), (1, at));
        let outcome = close_one(&db, closing(3), &|_| None).await;
        assert!(matches!(outcome, Closed::Nothing(_)), "{outcome:?}");
    }
    assert_eq!(faults_with(&db, NO_KEY).await, []);
}

async fn two_replicas_close_each_stretch_once(db: Db) {
    write(&db, 40).await;
    let other = toolloop::store::open(&db.url, 12, false).await;
    let others: Vec<Arc<Store>> = match other {
        Ok(other) => vec![Arc::clone(&db.store), other],
        Err(_) => vec![Arc::clone(&db.store), Arc::clone(&db.store)], // one process a file
    };
    let mut tasks = tokio::task::JoinSet::new();
    for store in others {
        tasks.spawn(async move {
            for _ in 0..20 {
                store.close_stretch(TENANT, closing(5), None, &|_| None).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    close_with(&db, 5, &|_| None).await;
    let found = checked(&db).await;
    let numbers: Vec<i64> = found.iter().map(|checked| checked.stretch.number).collect();
    assert_eq!(numbers, (1..=8).collect::<Vec<i64>>());
    assert!(found.iter().all(|checked| checked.stretch.records == 5));
}

async fn retention_deletes_whole_stretches(db: Db) {
    write(&db, 20).await;
    assert_eq!(close(&db, 10).await, 3);
    let before = checked(&db).await[1].stretch.last_at;
    write(&db, 15).await;
    assert_eq!(close(&db, 10).await, 2);
    let count = async || {
        db.store.audit(TENANT, &AuditFilter::default(), &page(200, None)).await.unwrap().len()
    };
    assert_eq!(
        db.store.delete_audit(before, 100, &|_| None).await.unwrap(),
        10,
        "the second is not over"
    );
    assert_eq!(count().await, 27, "the deletion is recorded");
    let just_after = before + TimeDelta::microseconds(1);
    assert_eq!(db.store.delete_audit(just_after, 100, &|_| None).await.unwrap(), 10);
    assert_eq!(db.store.delete_audit(just_after, 100, &|_| None).await.unwrap(), 0);
    let left: Vec<i64> = checked(&db).await.iter().map(|checked| checked.stretch.number).collect();
    assert_eq!((left, faults(&db).await), (vec![3, 4, 5], vec![]));
    // The chain goes on, and a deletion that was not recorded is found.
    write(&db, 5).await;
    assert_eq!((close(&db, 10).await, faults(&db).await), (1, vec![]));
    db.execute("DELETE FROM audit_stretches WHERE number = 3").await;
    let found = faults(&db).await;
    assert!(found.iter().any(|(_, fault)| fault.contains("no record says")), "{found:?}");
}

async fn retention_leaves_records_that_are_not_closed(db: Db) {
    let later = || now() + TimeDelta::seconds(1);
    let actions = async || {
        let rows = db.store.audit(TENANT, &AuditFilter::default(), &page(200, None)).await;
        rows.unwrap().iter().map(|row| row.action.as_str()).collect::<Vec<_>>()
    };
    write(&db, 5).await;
    assert_eq!(
        db.store.delete_audit(later(), 1000, &|_| None).await.unwrap(),
        0,
        "no stretch has them yet"
    );
    assert_eq!(actions().await.len(), 5);
    close(&db, 10).await;
    assert_eq!(db.store.delete_audit(later(), 1000, &|_| None).await.unwrap(), 6);
    assert_eq!((actions().await, checked(&db).await), (vec!["audit.deleted"], vec![]));
    // The chain goes on where all of it was deleted.
    write(&db, 3).await;
    assert_eq!((close(&db, 10).await, faults(&db).await), (1, vec![]));
    let numbers: Vec<i64> = checked(&db).await.iter().map(|it| it.stretch.number).collect();
    assert_eq!(numbers, [3]);
    db.execute("UPDATE audit_stretches SET previous = hash WHERE number = 3").await;
    assert!(faults(&db).await.iter().any(|(_, fault)| fault.contains("no record says")));
    // The record of a deletion is followed by none of its own.
    assert!(db.store.delete_audit(later(), 1000, &|_| None).await.unwrap() >= 4);
    assert_eq!(close_with(&db, 10, &|_| None).await, 1);
    assert_eq!(db.store.delete_audit(later(), 1000, &|_| None).await.unwrap(), 0);
    assert_eq!(actions().await, ["audit.deleted"]);
}

/// The head as a service knows it that closed the newest stretch.
async fn known(db: &Db, retention: Option<TimeDelta>) -> KnownHead<'static> {
    let newest = checked(db).await.pop().unwrap();
    KnownHead { head: ChainHead::from(&newest.stretch), retention, is_signed: Some(&is_signed) }
}

async fn close_behind(db: &Db, known: &KnownHead<'_>) -> Closed {
    db.store.close_stretch(TENANT, closing(10), Some(known), &|_| None).await.unwrap()
}

async fn a_known_head_that_is_gone_stops_the_closing(db: Db) {
    write(&db, 30).await;
    assert_eq!(close(&db, 10).await, 4);
    let known = known(&db, None).await;
    assert_eq!(close_behind(&db, &known).await, Closed::Nothing(Some(known.head.clone())));
    write(&db, 10).await;
    let tables = ["audit_log", "audit_stretches"];
    for table in tables {
        db.execute(&format!("CREATE TABLE kept_{table} AS SELECT * FROM {table}")).await;
    }
    let forged = format!(
        "INSERT INTO audit_log (tenant, at, id, action, subject, decision, outcome, arguments) SELECT \
         tenant, max(at), '00000000-0000-7000-8000-000000000009', 'audit.deleted', 'service', 'allowed', \
         'succeeded', '{{\"records\": 30, \"through\": 4, \"hash\": \"{}\", \"before\": \"{}\"}}' \
         FROM audit_log GROUP BY tenant",
        hex::encode(&known.head.hash),
        now().to_rfc3339(),
    );
    for (change, head) in [
        ("DELETE FROM audit_stretches".to_owned(), None),
        ("DELETE FROM audit_stretches WHERE number > 2".into(), Some(2)),
        ("UPDATE audit_stretches SET hash = previous WHERE number = 4".into(), Some(4)),
        (format!("DELETE FROM audit_stretches; {forged}"), None),
    ] {
        db.execute(&change).await;
        let before = checked(&db).await.len();
        let Closed::Replaced(stored) = close_behind(&db, &known).await else { panic!("{change}") };
        assert_eq!(stored.map(|head| head.number), head, "{change}");
        assert_eq!(checked(&db).await.len(), before, "nothing is closed after {change}");
        // Another process, which knows nothing, makes a chain of it, which this one does not accept.
        assert!(close(&db, 10).await > 0, "{change}");
        assert!(matches!(close_behind(&db, &known).await, Closed::Replaced(_)), "{change}");
        for table in tables {
            db.execute(&format!("DELETE FROM {table}")).await;
            db.execute(&format!("INSERT INTO {table} SELECT * FROM kept_{table}")).await;
        }
    }
    assert!(matches!(close_behind(&db, &known).await, Closed::Stretch(_)), "all is as it was");
}

async fn retention_and_other_replicas_move_the_head(db: Db) {
    write(&db, 10).await;
    close(&db, 10).await;
    let mut known = known(&db, Some(TimeDelta::hours(1))).await;
    // Another one closes more than is looked back at.
    write(&db, 60).await;
    assert!(close(&db, 10).await >= 6);
    let Closed::Nothing(Some(head)) = close_behind(&db, &known).await else { panic!() };
    assert!(head.number > known.head.number + 3);
    // A deletion of what is younger than the retention, and that is not signed, is none of ours.
    let deletion = now();
    assert!(db.store.delete_audit(deletion, 10_000, &|_| None).await.unwrap() > 60);
    assert!(matches!(close_behind(&db, &known).await, Closed::Replaced(_)));
    known.is_signed = None; // without a key there is nothing to judge it by
    assert!(matches!(close_behind(&db, &known).await, Closed::Stretch(_) | Closed::Nothing(_)));
    known.is_signed = Some(&is_signed);
    known.retention = Some(TimeDelta::zero());
    assert!(matches!(close_behind(&db, &known).await, Closed::Stretch(_) | Closed::Nothing(_)));
    known.head = head;
    assert!(matches!(close_behind(&db, &known).await, Closed::Stretch(_) | Closed::Nothing(_)));
    assert_eq!(faults_with(&db, NO_KEY).await, []);
}

/// E.g. while services are restarted one after the other with a shorter retention.
async fn a_signed_deletion_of_another_service_moves_the_head(db: Db) {
    write(&db, 20).await;
    close(&db, 10).await;
    let known = known(&db, None).await;
    let sign: &Sign = &|hash| Some([b"signed ", hash].concat());
    let all = now() + TimeDelta::seconds(1);
    assert!(db.store.delete_audit(all, 1000, sign).await.unwrap() > 20);
    let change = async |from: &str, to: &str| {
        db.execute(&format!(
            "UPDATE audit_log SET arguments = replace(arguments, '{from}', '{to}') \
             WHERE action = 'audit.deleted'"
        ))
        .await;
    };
    change("\"through\":", "\"through\":1").await; // the signature is of another deletion
    assert!(matches!(close_behind(&db, &known).await, Closed::Replaced(None)));
    change("\"through\":1", "\"through\":").await;
    assert!(matches!(close_behind(&db, &known).await, Closed::Stretch(_)));
    assert_eq!(faults_with(&db, NO_KEY).await, []);
}

async fn late_and_repeated_closing_is_reported(db: Db) {
    let late = async |db: &Db| {
        let late = checked(db).await.into_iter().filter(|it| it.closed_late);
        late.map(|it| it.stretch.number).collect::<Vec<_>>()
    };
    write(&db, 1).await;
    date_newest(&db, now() - TimeDelta::hours(3)).await;
    assert_eq!(close(&db, 1).await, 2);
    assert_eq!((late(&db).await, faults(&db).await), (vec![1], vec![]));
    write(&db, 2).await;
    close(&db, 10).await;
    assert_eq!((late(&db).await, faults(&db).await), (vec![1], vec![]));
    // The chain is made anew by a service that signs.
    db.execute("DELETE FROM audit_stretches").await;
    close(&db, 10).await;
    let found = faults(&db).await;
    assert!(found.iter().any(|(n, it)| *n == 1 && it.contains("2 audit records say")), "{found:?}");
}
