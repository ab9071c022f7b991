//! One run at a time per session, whichever replica asks, and each in its turn.

use std::collections::{BTreeSet, HashMap};

use chrono::TimeDelta;
use tokio::task::JoinSet;
use toolloop::store::{AuditFilter, ListedSession, SessionDeleted, SessionPlace};

use super::*;

on_both! {
    one_run_holds_a_session,
    of_many_at_once_one_holds,
    a_batch_may_hold_the_same_session_twice,
    a_run_that_does_not_know_the_last_one_is_refused,
    those_that_wait_are_claimed_in_their_turn,
    no_run_overtakes_those_that_wait,
    the_holder_keeps_its_session_through_crashes_and_parking,
    a_cancelled_one_does_not_keep_others_waiting,
    a_cancelled_one_stays_before_those_that_came_later,
    displaced_runs_are_known_until_they_are_asked_to_cancel,
    many_claim_at_once_and_each_session_has_one_run,
    a_session_is_derived_from_its_runs,
    journals_come_in_one_piece,
    a_session_is_deleted_with_all_its_runs,
    a_list_shows_what_the_runs_of_a_session_say,
}

const HOLDS: SessionPlace = SessionPlace::Holds { turn: 1 };

fn turn(turn: i64) -> SessionPlace {
    SessionPlace::Holds { turn }
}

fn placed(session: &str, place: SessionPlace) -> Script {
    let waits = !matches!(place, SessionPlace::Holds { .. });
    let mut script = Script::with(|new| {
        new.session_id = Some(session.into());
        new.session_place = Some(place);
        new.status = if waits { RunStatus::Queued } else { RunStatus::Running };
    });
    script.epoch = i64::from(!waits);
    script
}

async fn end(db: &Db, script: &mut Script) {
    db.commit("me", &script.write(vec![responded(1, &[]), completed(json!(1))])).await;
}

/// Claims for `me`, and goes on with what was claimed.
async fn claim(db: &Db, scripts: &mut [Script]) -> Vec<Uuid> {
    let claimed = db.store.claim("me", 10, "").await.unwrap();
    for claimed in &claimed {
        let script = scripts.iter_mut().find(|script| script.id == claimed.run.id).unwrap();
        script.epoch = claimed.run.epoch;
    }
    claimed.into_iter().map(|claimed| claimed.run.id).collect()
}

async fn live(db: &Db, session: &str) -> Vec<Uuid> {
    db.store.session(TENANT, session, 0).await.unwrap().unwrap().live
}

async fn one_run_holds_a_session(db: Db) {
    let (mut first, mut second) = (placed("s", HOLDS), placed("s", HOLDS));
    let begin = first.start();
    db.commit("me", &begin).await;
    assert_eq!(db.commit_one("me", &second.start()).await, WriteOutcome::IdTaken);
    assert_eq!(db.store.run(TENANT, second.id).await.unwrap(), None);
    db.commit_again("me", &begin).await;
    // Another session, and the same one of another tenant.
    db.commit("me", &placed("t", HOLDS).start()).await;
    let mut other = placed("s", HOLDS);
    other.caller = Arc::new(Caller { tenant: "other".into(), ..Caller::clone(&other.caller) });
    db.commit("me", &other.start()).await;
    // A run that another one delegated to, and one from before sessions were held.
    let mut child = placed("s", HOLDS);
    child.new =
        child.new.map(|new| Arc::new(NewRun { session_place: None, ..NewRun::clone(&new) }));
    db.commit("me", &child.start()).await;
    end(&db, &mut first).await;
    db.commit("me", &placed("u", HOLDS).start()).await;
}

async fn of_many_at_once_one_holds(db: Db) {
    let db = Arc::new(db);
    for round in 0..20 {
        let session = format!("s{round}");
        let mut tasks = JoinSet::new();
        for starter in 0..6 {
            let (db, mut script) = (db.clone(), placed(&session, HOLDS));
            tasks.spawn(async move {
                db.commit_one(&format!("replica-{starter}"), &script.start()).await
            });
        }
        let outcomes = tasks.join_all().await;
        let count = |outcome| outcomes.iter().filter(|other| **other == outcome).count();
        assert_eq!((count(WriteOutcome::Committed), count(WriteOutcome::IdTaken)), (1, 5));
        assert_eq!(live(&db, &session).await.len(), 1);
    }
}

async fn a_batch_may_hold_the_same_session_twice(db: Db) {
    let mut scripts = [placed("s", HOLDS), placed("s", HOLDS), placed("t", HOLDS), Script::owned()];
    let batch: Vec<RunWrite> = scripts.iter_mut().map(Script::start).collect();
    let outcomes = db.store.commit("me", &batch).await.unwrap().outcomes;
    let held = outcomes[..2].iter().filter(|outcome| **outcome == WriteOutcome::Committed).count();
    assert_eq!((held, &outcomes[2..]), (1, &[WriteOutcome::Committed; 2][..]));
}

async fn a_run_that_does_not_know_the_last_one_is_refused(db: Db) {
    let mut first = placed("s", HOLDS);
    db.commit("me", &first.start()).await;
    end(&db, &mut first).await;
    assert_eq!(db.commit_one("me", &placed("s", HOLDS).start()).await, WriteOutcome::IdTaken);
    let mut second = placed("s", turn(2));
    db.commit("me", &second.start()).await;
    end(&db, &mut second).await;
    assert_eq!(db.commit_one("me", &placed("s", turn(2)).start()).await, WriteOutcome::IdTaken);
    db.commit("me", &placed("s", turn(3)).start()).await;
}

async fn those_that_wait_are_claimed_in_their_turn(db: Db) {
    let places = [HOLDS, SessionPlace::Waits, SessionPlace::Waits, SessionPlace::Next];
    let mut scripts = places.map(|place| placed("s", place));
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    let ids: Vec<Uuid> = scripts.iter().map(|script| script.id).collect();
    let turns = [ids[0], ids[3], ids[1], ids[2]];
    assert_eq!(db.store.queued().await.unwrap(), 3);
    for holder in 0..4 {
        assert_eq!(live(&db, "s").await, turns[holder..]);
        assert_eq!(claim(&db, &mut scripts).await.len(), 0, "one of them holds it");
        end(&db, scripts.iter_mut().find(|script| script.id == turns[holder]).unwrap()).await;
        assert_eq!(
            claim(&db, &mut scripts).await,
            turns[holder + 1..].iter().take(1).copied().collect::<Vec<_>>()
        );
    }
    assert_eq!((live(&db, "s").await, db.store.queued().await.unwrap()), (vec![], 0));
}

async fn no_run_overtakes_those_that_wait(db: Db) {
    let mut scripts = [placed("s", HOLDS), placed("s", SessionPlace::Waits)];
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    end(&db, &mut scripts[0]).await;
    let mut late = placed("s", turn(2));
    assert_eq!(db.commit_one("me", &late.start()).await, WriteOutcome::IdTaken);
    assert_eq!(claim(&db, &mut scripts).await, [scripts[1].id]);
}

async fn the_holder_keeps_its_session_through_crashes_and_parking(db: Db) {
    let mut scripts = [placed("s", HOLDS), placed("s", SessionPlace::Waits)];
    for script in &mut scripts {
        let begin = script.start();
        db.commit("gone", &begin).await;
    }
    let holder = scripts[0].id;
    db.store.release("gone").await.unwrap();
    assert_eq!(db.status(holder).await, RunStatus::Queued);
    assert_eq!(claim(&db, &mut scripts).await, [holder]);
    let shell = call("shell", "{}");
    let asks = vec![responded(1, &[&shell]), review(&shell)];
    let park = RunWrite { park: Some(RunStatus::NeedsReview), ..scripts[0].write(asks) };
    db.commit("me", &park).await;
    assert_eq!(db.status(holder).await, RunStatus::NeedsReview);
    assert_eq!(claim(&db, &mut scripts).await.len(), 0);
    db.cancel(holder).await;
    assert_eq!(claim(&db, &mut scripts).await, [scripts[1].id]);
}

async fn a_cancelled_one_stays_before_those_that_came_later(db: Db) {
    let places = [HOLDS, SessionPlace::Next, SessionPlace::Next];
    let mut scripts = places.map(|place| placed("s", place));
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    let turns = live(&db, "s").await;
    assert_eq!(turns.len(), 3);
    db.store.request_cancel(TENANT, turns[1], "key", None).await.unwrap();
    assert_eq!(live(&db, "s").await, turns, "it took the last one for one that came before");
}

async fn displaced_runs_are_known_until_they_are_asked_to_cancel(db: Db) {
    let mut scripts = [HOLDS, SessionPlace::Waits].map(|place| placed("s", place));
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    assert!(db.store.displaced_runs(9).await.unwrap().is_empty());
    let mut scripts = [SessionPlace::Next, SessionPlace::Next].map(|place| placed("s", place));
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    let turns = live(&db, "s").await;
    let displaced = db.store.displaced_runs(9).await.unwrap().into_iter();
    let mut displaced: Vec<(Uuid, Uuid)> = displaced.map(|(_, run, by, _)| (run, by)).collect();
    displaced.sort();
    let mut expected = vec![(turns[0], turns[1]), (turns[0], turns[2]), (turns[1], turns[2])];
    expected.sort();
    assert_eq!(displaced, expected);
    for run in &turns[..2] {
        db.store.request_cancel(TENANT, *run, "key", None).await.unwrap();
    }
    assert!(db.store.displaced_runs(9).await.unwrap().is_empty());
}

async fn a_cancelled_one_does_not_keep_others_waiting(db: Db) {
    let mut scripts =
        [HOLDS, SessionPlace::Waits, SessionPlace::Waits].map(|place| placed("s", place));
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    db.cancel(scripts[1].id).await;
    end(&db, &mut scripts[0]).await;
    assert_eq!(claim(&db, &mut scripts).await, [scripts[2].id]);
}

async fn many_claim_at_once_and_each_session_has_one_run(db: Db) {
    let db = Arc::new(db);
    let mut scripts: Vec<Script> = Vec::new();
    for session in 0..5 {
        for _ in 0..4 {
            let mut script = placed(&format!("s{session}"), SessionPlace::Waits);
            db.commit("me", &script.start()).await;
            scripts.push(script);
        }
    }
    let order: HashMap<Uuid, usize> =
        scripts.iter().enumerate().map(|(at, script)| (script.id, at)).collect();
    let mut done: Vec<usize> = Vec::new();
    while done.len() < scripts.len() {
        let mut tasks = JoinSet::new();
        for _ in 0..3 {
            let db = db.clone();
            tasks.spawn(async move { db.store.claim("me", 3, "").await.unwrap() });
        }
        let claimed: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
        let mut sessions: Vec<_> =
            claimed.iter().map(|claimed| claimed.run.session_id.clone()).collect();
        sessions.sort();
        sessions.dedup();
        assert_eq!(sessions.len(), claimed.len(), "two runs of one session were claimed");
        for claimed in claimed {
            let script = scripts.iter_mut().find(|script| script.id == claimed.run.id).unwrap();
            script.epoch = claimed.run.epoch;
            end(&db, script).await;
            done.push(order[&claimed.run.id]);
        }
    }
    for session in 0..5 {
        let of_session: Vec<usize> = done.iter().copied().filter(|at| at / 4 == session).collect();
        assert!(of_session.is_sorted(), "{of_session:?}");
    }
}

async fn a_session_is_derived_from_its_runs(db: Db) {
    assert_eq!(db.store.session(TENANT, "s", 5).await.unwrap(), None);
    let mut ended = Vec::new();
    for number in 1..=4 {
        let mut script = placed("s", turn(number));
        db.commit("me", &script.start()).await;
        end(&db, &mut script).await;
        ended.push(script);
    }
    // This one has no answer.
    let mut silent = placed("s", turn(5));
    db.commit("me", &silent.start()).await;
    db.commit(
        "me",
        &silent.write(vec![RunEvent::cancelled("iteration", (1, 1), None, String::new(), 1)]),
    )
    .await;
    let mut holder = placed("s", turn(6));
    db.commit("me", &holder.start()).await;
    let mut child = Script::with(|new| {
        new.session_id = Some("s".into());
        new.parent_run_id = Some(ended[0].id);
        new.agent = "helper".into();
    });
    db.commit("me", &child.start()).await;
    let session = db.store.session(TENANT, "s", 3).await.unwrap().unwrap();
    assert_eq!(
        (session.agent.as_str(), session.turn, session.live),
        ("reader", 6, vec![holder.id])
    );
    assert_eq!(session.ended, ended[1..].iter().map(|script| script.id).collect::<Vec<_>>());
    assert!(session.created_at < session.last_run_at);
    assert_eq!(db.store.session("other", "s", 3).await.unwrap(), None);
}

async fn journals_come_in_one_piece(db: Db) {
    let mut scripts = [Script::owned(), Script::owned(), Script::owned()];
    for script in &mut scripts {
        let begin = script.start();
        db.commit("me", &begin).await;
    }
    for script in &mut scripts {
        end(&db, script).await;
    }
    let wanted = [scripts[2].id, scripts[0].id];
    let events = db.store.journals(TENANT, &wanted).await.unwrap();
    let journals: Vec<&[Event]> = events.chunk_by(|a, b| a.run_id == b.run_id).collect();
    assert_eq!(journals.len(), 2);
    for journal in journals {
        assert!(wanted.contains(&journal[0].run_id));
        assert_eq!(journal, db.journal(journal[0].run_id).await);
    }
    assert_eq!(db.store.journals("other", &wanted).await.unwrap(), []);
    assert_eq!(db.store.journals(TENANT, &[]).await.unwrap(), []);
}

async fn a_session_is_deleted_with_all_its_runs(db: Db) {
    let delete =
        async |tenant: &str| db.store.delete_session(tenant, "s", "key", &no_files).await.unwrap();
    assert_eq!(delete(TENANT).await, SessionDeleted::Unknown);
    let (mut first, mut kept) = (placed("s", HOLDS), placed("t", HOLDS));
    let read = call("file_ops", "{}");
    db.commit("me", &first.start()).await;
    let mut called = first.write(vec![
        responded(1, &[&read]),
        dispatched(&read, Effect::Read),
        answered(&read, None),
    ]);
    called.audit = vec![audited(&read, "allowed")];
    db.commit("me", &called).await;
    // Of no session, but part of it.
    let mut child = Script::with(|new| new.parent_run_id = Some(first.id));
    db.commit("me", &child.start()).await;
    db.commit("me", &kept.start()).await;
    assert_eq!(
        (delete(TENANT).await, delete("other").await),
        (SessionDeleted::Busy, SessionDeleted::Unknown)
    );
    assert_eq!(db.status(first.id).await, RunStatus::Running);
    db.commit("me", &first.write(vec![completed(json!(1))])).await;
    assert_eq!(delete(TENANT).await, SessionDeleted::Busy, "its child goes on");
    end(&db, &mut child).await;
    assert_eq!(delete(TENANT).await, SessionDeleted::Gone);
    for run in [first.id, child.id] {
        assert_eq!(
            (db.store.run(TENANT, run).await.unwrap(), db.journal(run).await),
            (None, vec![])
        );
        assert_eq!(db.store.tool_calls(TENANT, run, &page(9, None)).await.unwrap(), []);
    }
    let audit = db.store.audit(TENANT, &AuditFilter::default(), &page(9, None)).await.unwrap();
    let kinds: Vec<_> = audit.iter().map(|row| (row.action, row.subject.as_str())).collect();
    let subject = first.caller.subject.as_str();
    assert_eq!(kinds, [(AuditAction::SessionDeleted, "key"), (AuditAction::ToolCall, subject)]);
    assert_eq!(db.status(kept.id).await, RunStatus::Running);
    assert_eq!(delete(TENANT).await, SessionDeleted::Unknown);
    // Its name may be used again.
    db.commit("me", &placed("s", HOLDS).start()).await;
}

/// A list shows of a session what these runs of it say, of which the oldest is first.
async fn is_listed(db: &Db, session: &str, runs: &[&Script]) {
    let newest = runs.last();
    let expected = newest.map(|newest| ListedSession {
        id: newest.id,
        session_id: session.to_owned(),
        agent: newest.origin.agent.clone(),
        run_count: i64::try_from(runs.len()).unwrap(),
        newest_runs: runs[runs.len().saturating_sub(10)..].iter().map(|run| run.id).collect(),
        created_at: runs[0].origin.created_at,
        last_run_at: newest.origin.created_at,
    });
    assert_eq!(db.store.listed_session(TENANT, session).await.unwrap(), expected);
    for agent in [None, newest.map(|newest| newest.origin.agent.as_str())] {
        let all = db.store.sessions(TENANT, agent, &page(9, None)).await.unwrap();
        let found = all.into_iter().find(|listed| listed.session_id == session);
        assert_eq!(found, expected, "{agent:?}");
    }
}

async fn a_list_shows_what_the_runs_of_a_session_say(db: Db) {
    let noon = now() - TimeDelta::hours(1);
    let later = now() + TimeDelta::hours(1);
    let accepted = |session: &str, number: usize| {
        Script::with(|new| {
            new.session_id = Some(session.to_owned());
            new.agent = format!("agent-{number}");
            // The last two of twelve at once: the greater id is the newer one.
            new.created_at = noon + TimeDelta::minutes(i64::try_from(number.min(10)).unwrap());
        })
    };
    is_listed(&db, "s", &[]).await;
    let mut runs: Vec<Script> = (0..12).map(|number| accepted("s", number)).collect();
    let mut left = BTreeSet::new();
    // Not in the order of their times.
    for number in (0..12_usize).map(|step| step * 7 % 12) {
        db.commit("me", &runs[number].start()).await;
        left.insert(number);
        is_listed(&db, "s", &left.iter().map(|number| &runs[*number]).collect::<Vec<_>>()).await;
    }
    for parent in [0, 11] {
        let mut child = Script::with(|new| {
            new.session_id = Some("s".to_owned());
            new.parent_run_id = Some(runs[parent].id);
        });
        db.commit("me", &child.start()).await;
        end(&db, &mut child).await;
    }
    is_listed(&db, "s", &runs.iter().collect::<Vec<_>>()).await;
    // The newest and the oldest, with their children, and one between them.
    for (number, deleted) in [(11, 2), (0, 2), (5, 1)] {
        end(&db, &mut runs[number]).await;
        assert_eq!(db.store.delete_ended(later, 99, &no_files).await.unwrap(), deleted);
        left.remove(&number);
        is_listed(&db, "s", &left.iter().map(|number| &runs[*number]).collect::<Vec<_>>()).await;
    }
    let mut others = [accepted("t", 1), accepted("t", 0), accepted("s", 3)];
    others[2].caller =
        Arc::new(Caller { tenant: "other".into(), ..Caller::clone(&runs[0].caller) });
    for other in &mut others {
        db.commit("me", &other.start()).await;
    }
    let listed = db.store.sessions(TENANT, None, &page(9, None)).await.unwrap();
    let names: Vec<&str> = listed.iter().map(|session| session.session_id.as_str()).collect();
    assert_eq!(names, ["s", "t"], "by their newest runs");
    // All of a session at once, and some of another.
    for number in &left {
        end(&db, &mut runs[*number]).await;
    }
    end(&db, &mut others[0]).await;
    assert_eq!(db.store.delete_ended(later, 99, &no_files).await.unwrap(), 10);
    is_listed(&db, "s", &[]).await;
    is_listed(&db, "t", &[&others[1]]).await;
    // Under its name another begins, and is deleted as a whole.
    let mut again = [accepted("s", 2), accepted("s", 1)];
    for run in &mut again {
        db.commit("me", &run.start()).await;
        end(&db, run).await;
    }
    is_listed(&db, "s", &[&again[1], &again[0]]).await;
    let deleted = db.store.delete_session(TENANT, "s", "key", &no_files).await.unwrap();
    assert_eq!(deleted, SessionDeleted::Gone);
    is_listed(&db, "s", &[]).await;
    is_listed(&db, "t", &[&others[1]]).await;
    let other = db.store.listed_session("other", "s").await.unwrap().unwrap();
    assert_eq!((other.id, other.run_count), (others[2].id, 1));
}
