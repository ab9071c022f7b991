//! The writer over a real store: many runs at once, each with its own answer, in its own order.

use std::time::Duration;

use futures::FutureExt;
use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use toolloop::store::writer::{AppendError, Writer};
use toolloop::store::{AttemptOutcome, DeliveryFilter, DeliveryStatus};

use super::*;

on_both! {
    many_runs_share_commits_and_one_is_fenced,
    writes_of_a_run_stay_in_order_without_waiting,
    a_refused_write_fails_alone,
    an_id_taken_in_the_same_breath_is_refused,
    drivers_of_one_id_are_never_mixed,
    an_end_gives_way_to_a_cancel,
    a_shutdown_commits_queued_writes,
    a_closed_store_is_reported_when_patience_ends,
    an_attempt_in_progress_does_not_undo_a_redelivery,
    a_delivery_whose_row_cannot_be_read_fails_alone,
}

const PATIENCE: Duration = Duration::from_mins(1);

fn writer(db: &Db) -> Writer {
    Writer::spawn(db.store.clone(), "me".into(), PATIENCE, Arc::new(|_| {}), Arc::new(|_, _| {}))
}

/// Drives a whole run through the writer, waiting for each write.
async fn drive(writer: Writer, mut script: Script) -> Result<Uuid, AppendError> {
    let writer = writer.appender();
    writer.append(script.start()).await?;
    for iteration in 1..=3 {
        let read = call("file_ops", "{}");
        let happened = vec![
            responded(iteration, &[&read]),
            dispatched(&read, Effect::Read),
            answered(&read, None),
        ];
        writer.append(script.write(happened)).await?;
    }
    writer.append(script.write(vec![completed(json!({"n": 17}))])).await?;
    Ok(script.id)
}

async fn many_runs_share_commits_and_one_is_fenced(db: Db) {
    let writer = writer(&db);
    let mut stolen = Script::owned();
    db.commit("you", &stolen.start()).await;
    stolen.new = None;
    let mut runs = JoinSet::new();
    for _ in 0..200 {
        runs.spawn(drive(writer.clone(), Script::owned()));
    }
    assert_eq!(
        writer.append(stolen.write(vec![responded(1, &[])])).await,
        Err(AppendError::Fenced)
    );
    let finished = runs.join_all().await;
    assert_eq!(finished.len(), 200);
    for run in finished {
        let run = run.unwrap();
        assert_eq!(db.status(run).await, RunStatus::Completed);
        let seqs: Vec<i64> = db.journal(run).await.iter().map(|event| event.seq).collect();
        assert_eq!(seqs, (1..=12).collect::<Vec<_>>());
    }
    assert_eq!(db.journal(stolen.id).await.len(), 2);
}

async fn writes_of_a_run_stay_in_order_without_waiting(db: Db) {
    let writer = writer(&db);
    let mut appends = Vec::new();
    let mut scripts: Vec<_> = (0..20).map(|_| (Script::owned(), writer.appender())).collect();
    for round in 0..10 {
        for (script, writer) in &mut scripts {
            let write =
                if round == 0 { script.start() } else { script.write(vec![responded(round, &[])]) };
            appends.push(writer.append(write));
        }
    }
    for append in appends {
        assert_eq!(append.await, Ok(()));
    }
    for (script, _) in &scripts {
        assert_eq!(db.journal(script.id).await.len(), 11);
    }
}

async fn a_refused_write_fails_alone(db: Db) {
    let writer = writer(&db);
    let mut bad = Script::owned();
    writer.append(bad.start()).await.unwrap();
    writer.append(bad.write(vec![responded(1, &[])])).await.unwrap();
    let mut appends = JoinSet::new();
    for _ in 0..20 {
        appends.spawn(drive(writer.clone(), Script::owned()));
    }
    // The same iteration twice: a row that the database refuses.
    assert_eq!(writer.append(bad.write(vec![responded(1, &[])])).await, Err(AppendError::Refused));
    assert!(appends.join_all().await.iter().all(Result::is_ok));
    assert!(writer.is_available());
    assert_eq!(db.journal(bad.id).await.len(), 3);
}

async fn an_id_taken_in_the_same_breath_is_refused(db: Db) {
    let writer = writer(&db);
    let mut first = Script::owned();
    let mut second = Script::with(|new| new.id = first.id);
    let (first, second) = (writer.append(first.start()), writer.append(second.start()));
    assert_eq!((first.await, second.await), (Ok(()), Err(AppendError::IdTaken)));
}

/// The winner goes on while the losers' beginnings, which its own write would continue, still wait.
async fn drivers_of_one_id_are_never_mixed(db: Db) {
    let writer = writer(&db);
    let mut winner = Script::owned();
    let mut losers: Vec<Script> = (0..3).map(|_| Script::with(|new| new.id = winner.id)).collect();
    let winning = writer.appender();
    let begun = winning.append(winner.start());
    let refused: Vec<_> = losers.iter_mut().map(|loser| writer.append(loser.start())).collect();
    let goes_on = winning.append(winner.write(vec![responded(1, &[])]));
    let ends = winning.append(winner.write(vec![completed(json!({"n": 17}))]));
    assert_eq!(begun.await, Ok(()));
    for loser in refused {
        assert_eq!(loser.await, Err(AppendError::IdTaken));
    }
    assert_eq!((goes_on.await, ends.await), (Ok(()), Ok(())));
    assert_eq!(db.status(winner.id).await, RunStatus::Completed);
    assert_eq!(db.journal(winner.id).await.len(), 4);
}

/// What came before the end is stored, whatever else is in the same commit; ends that a cancel has led
/// to, or that nothing else can follow, are stored.
async fn an_end_gives_way_to_a_cancel(db: Db) {
    let writer = writer(&db);
    let answered = || responded(1, &[]);
    let requested = || RunEvent::RunCancelRequested { reason: None };
    let cancelled = || RunEvent::cancelled("iteration", (1, 1), None, String::new(), 0);
    let given_way = Err(AppendError::Cancelling);
    for (events, outcome, status, length) in [
        (vec![answered(), completed(json!(1))], given_way, RunStatus::Running, 3),
        (vec![completed(json!(1))], given_way, RunStatus::Running, 2),
        (vec![answered()], Ok(()), RunStatus::Running, 3),
        (vec![answered(), requested(), cancelled()], Ok(()), RunStatus::Cancelled, 5),
        (vec![RunEvent::interrupted("unreadable")], Ok(()), RunStatus::Failed, 3),
    ] {
        let (mut script, mut other) = (Script::owned(), Script::owned());
        let (appender, beside) = (writer.appender(), writer.appender());
        appender.append(script.start()).await.unwrap();
        beside.append(other.start()).await.unwrap();
        db.store.request_cancel(TENANT, script.id, "key", Some("enough")).await.unwrap();
        let of_other = beside.append(other.write(vec![answered(), completed(json!(2))]));
        let found = appender.append(script.write(events.clone())).await;
        assert_eq!((found, of_other.await), (outcome, Ok(())), "{events:?}");
        let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
        assert_eq!((row.status, db.journal(script.id).await.len()), (status, length), "{events:?}");
        assert_eq!(row.next_seq, i64::try_from(length).unwrap() + 1);
        assert_eq!(db.status(other.id).await, RunStatus::Completed);
    }
}

async fn a_shutdown_commits_queued_writes(db: Db) {
    let writer = writer(&db);
    let mut scripts: Vec<Script> = (0..30).map(|_| Script::owned()).collect();
    // These are not waited for: dropping the future does not undo the write.
    for script in &mut scripts {
        drop(writer.append(script.start()));
        drop(writer.append(script.write(vec![responded(1, &[])])));
    }
    writer.shutdown().await;
    for script in &mut scripts {
        assert_eq!(db.journal(script.id).await.len(), 3);
    }
    assert_eq!(
        writer.append(scripts[0].write(vec![completed(json!(1))])).await,
        Err(AppendError::Unavailable)
    );
}

async fn a_closed_store_is_reported_when_patience_ends(db: Db) {
    let writer = Writer::spawn(
        db.store.clone(),
        "me".into(),
        Duration::from_millis(200),
        Arc::new(|_| {}),
        Arc::new(|_, _| {}),
    );
    db.store.close().await;
    assert_eq!(writer.append(Script::owned().start()).await, Err(AppendError::Unavailable));
    assert!(!writer.is_available());
}

/// Connections are cut in the middle of everything; nothing acknowledged is lost, nothing is
/// doubled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_cutting_connections_harms_no_run() {
    let db = Db::postgres().await;
    let writer = writer(&db);
    let mut runs = JoinSet::new();
    for _ in 0..60 {
        runs.spawn(drive(writer.clone(), Script::owned()));
    }
    let cut_all = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
               WHERE datname = current_database() AND pid <> pg_backend_pid()";
    let mut axe = PgConnection::connect(&db.url).await.unwrap();
    let mut cuts = 0;
    while !runs.is_empty() {
        cuts += sqlx::query_scalar::<_, i64>(cut_all).fetch_one(&mut axe).await.unwrap();
        // As many runs as end until the next cut.
        for _ in 0..20 {
            let Some(run) = runs.join_next().await else { break };
            let run = run.unwrap().unwrap();
            assert_eq!(db.journal_patiently(run).await.len(), 12);
        }
    }
    assert!(cuts >= 2, "only {cuts} connections were cut");
}

/// Nothing else ends while the first commit waits, so it is the time that lets the second one begin.
#[tokio::test]
async fn postgres_a_commit_that_waits_for_a_lock_does_not_keep_others_waiting() {
    let db = Db::postgres().await;
    let writer = writer(&db);
    let (mut locked, mut free) = (Script::owned(), Script::owned());
    writer.append(locked.start()).await.unwrap();
    writer.append(free.start()).await.unwrap();
    let mut other = PgConnection::connect(&db.url).await.unwrap();
    let mut lock = other.begin().await.unwrap();
    sqlx::query("SELECT FROM runs WHERE id = $1 FOR UPDATE")
        .bind(locked.id)
        .execute(&mut *lock)
        .await
        .unwrap();
    let mut waiting = Box::pin(writer.append(locked.write(vec![responded(1, &[])])));
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity \
                 WHERE datname = current_database() AND wait_event_type = 'Lock')";
    let mut watch = PgConnection::connect(&db.url).await.unwrap();
    while !sqlx::query_scalar::<_, bool>(waits).fetch_one(&mut watch).await.unwrap() {}
    assert_eq!(writer.append(free.write(vec![responded(1, &[])])).await, Ok(()));
    assert_eq!(waiting.as_mut().now_or_never(), None, "its row is locked");
    lock.rollback().await.unwrap();
    assert_eq!(waiting.await, Ok(()));
}

async fn an_attempt_in_progress_does_not_undo_a_redelivery(db: Db) {
    let mut told = Script::with(|new| new.webhook = Some("https://example.com".into()));
    db.commit("me", &told.start()).await;
    let lane = db.store.due_lanes("", 9).await.unwrap().remove(0);
    let claimed = db.store.claim_deliveries(&lane, 1, PATIENCE).await.unwrap().remove(0);
    db.store.redeliver(TENANT, claimed.id).await.unwrap().unwrap();
    let failed = AttemptOutcome {
        status: DeliveryStatus::Failed,
        response_status: None,
        error: Some("no answer".into()),
        pause: Duration::ZERO,
        was_sent: true,
    };
    db.store.settle_delivery(&claimed, &failed).await.unwrap();
    let again = db.store.claim_deliveries(&lane, 9, PATIENCE).await.unwrap();
    assert!(again.iter().any(|delivery| delivery.id == claimed.id), "{again:?}");
}

async fn a_delivery_whose_row_cannot_be_read_fails_alone(db: Db) {
    let mut ids = Vec::new();
    for _ in 0..2 {
        let mut told = Script::with(|new| new.webhook = Some("https://example.com".into()));
        db.commit("me", &told.start()).await;
        ids.push(told.id);
    }
    let [damaged, whole] = *ids else { unreachable!() };
    let set =
        |column: &str| format!("UPDATE webhook_outbox SET {column} WHERE run_id = '{damaged}'");
    db.execute(&set("response_status = -1")).await;
    let lane = db.store.due_lanes("", 9).await.unwrap().remove(0);
    let claimed = db.store.claim_deliveries(&lane, 9, PATIENCE).await.unwrap();
    assert!(!claimed.is_empty() && claimed.iter().all(|it| it.run_id == whole), "{claimed:?}");
    db.execute(&set("response_status = NULL")).await;
    let failed = db.store.failed_deliveries(TENANT, damaged).await.unwrap();
    assert!(!failed.is_empty(), "they are due again for ever");
    for delivery in failed {
        assert_eq!(delivery.status, DeliveryStatus::Failed, "{delivery:?}");
        assert_eq!(delivery.error.as_deref(), Some("its row cannot be read"));
    }
}

/// The first change of a delivery is given up as in a deadlock.
const GIVES_WAY_ONCE: &str = "
CREATE SEQUENCE changed;
CREATE FUNCTION give_way() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('changed') = 1 THEN
        RAISE SQLSTATE '40P01' USING MESSAGE = 'deadlock detected';
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER give_way BEFORE UPDATE ON webhook_outbox
    FOR EACH STATEMENT EXECUTE FUNCTION give_way();
";

#[tokio::test]
async fn postgres_a_redelivery_that_gives_way_is_tried_again() {
    let db = Db::postgres().await;
    let mut told = Script::with(|new| new.webhook = Some("https://example.com".into()));
    db.commit("me", &told.start()).await;
    let all = DeliveryFilter::default();
    let id = db.store.deliveries(TENANT, &all, &page(9, None)).await.unwrap()[0].id;
    db.execute(GIVES_WAY_ONCE).await;
    let again = db.store.redeliver(TENANT, id).await.unwrap();
    assert_eq!(again.map(|delivery| delivery.id), Some(id));
}

impl Db {
    /// Reads again where the connection was one of those that were cut.
    async fn journal_patiently(&self, run: Uuid) -> Vec<Event> {
        loop {
            match self.store.events(TENANT, run, 0, 100).await {
                Err(error) if error.is_transient() => {}
                journal => return journal.unwrap(),
            }
        }
    }
}
