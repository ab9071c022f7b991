//! Runs that other runs started: taken by name, cancelled with the run that started them, never left
//! behind.

use std::time::Duration;

use chrono::TimeDelta;
use toolloop::store::{CancelOutcome, Swept};

use super::*;

on_both! {
    a_run_is_taken_by_its_name,
    cancelling_a_run_cancels_its_children,
    cancelling_a_run_that_cannot_be_read_cancels_its_children,
    ancestors_are_told_from_the_root_on,
    parents_in_a_circle_are_followed_once,
    a_descendant_that_cannot_be_read_hides_no_other,
    a_sweep_cancels_children_of_ended_runs,
}

fn child_of(parent: &Script, status: RunStatus) -> Script {
    let mut child = Script::with(|new| {
        new.parent_run_id = Some(parent.id);
        new.status = status;
    });
    child.epoch = i64::from(status == RunStatus::Running);
    child
}

async fn a_run_is_taken_by_its_name(db: Db) {
    let (mut one, mut other) = (Script::queued(), Script::queued());
    db.commit("me", &one.start()).await;
    db.commit("me", &other.start()).await;
    let claimed = db.store.claim_run("you", other.id).await.unwrap().unwrap();
    assert_eq!(
        (claimed.run.id, claimed.run.epoch, claimed.run.owner.as_deref()),
        (other.id, 1, Some("you"))
    );
    assert_eq!(
        (claimed.definition.as_str(), &claimed.run.scopes),
        (r#"{"name":"reader"}"#, &other.caller.scopes)
    );
    assert_eq!(
        db.store.claim_run("you", other.id).await.unwrap(),
        None,
        "it is not queued any more"
    );
    assert_eq!(db.store.claim_run("you", Uuid::now_v7()).await.unwrap(), None);
    assert_eq!(
        db.store.claim("you", 10, "").await.unwrap().remove(0).run.id,
        one.id,
        "the other one still waits"
    );
}

async fn cancelling_a_run_cancels_its_children(db: Db) {
    let (mut parent, mut stranger) = (Script::owned(), Script::queued());
    let (mut running, mut queued) =
        (child_of(&parent, RunStatus::Running), child_of(&parent, RunStatus::Queued));
    let mut grandchild = child_of(&running, RunStatus::Queued);
    let mut ended = child_of(&parent, RunStatus::Running);
    for script in
        [&mut parent, &mut stranger, &mut running, &mut queued, &mut grandchild, &mut ended]
    {
        db.commit("me", &script.start()).await;
    }
    db.commit("me", &ended.write(vec![completed(json!({}))])).await;
    // One whose row cannot be read is asked, too, and keeps it from no other.
    db.execute(&format!("UPDATE runs SET kind = 'odd' WHERE id = '{}'", running.id)).await;
    let outcome = db.store.request_cancel(TENANT, parent.id, "key", Some("enough")).await.unwrap();
    assert!(
        matches!(&outcome, Some(CancelOutcome::Requested(run)) if run.id == parent.id),
        "{outcome:?}"
    );
    let mut asked = db.store.cancel_requests("me").await.unwrap();
    asked.sort_unstable();
    let mut expected =
        vec![(parent.id, Some("enough".into())), (running.id, Some("enough".into()))];
    expected.sort_unstable();
    assert_eq!(asked, expected);
    let waiting = db.store.claim_cancelled("you", 10).await.unwrap();
    let mut waiting: Vec<Uuid> = waiting.iter().map(|claimed| claimed.run.id).collect();
    waiting.sort_unstable();
    assert_eq!(waiting, [queued.id, grandchild.id], "made in this order");
    assert_eq!(db.status(ended.id).await, RunStatus::Completed);
    assert_eq!(db.status(stranger.id).await, RunStatus::Queued);
    let again = db.store.request_cancel(TENANT, parent.id, "key", None).await.unwrap();
    assert!(matches!(again, Some(CancelOutcome::Requested(_))), "{again:?}");
}

async fn cancelling_a_run_that_cannot_be_read_cancels_its_children(db: Db) {
    let mut parent = Script::owned();
    let mut child = child_of(&parent, RunStatus::Running);
    for script in [&mut parent, &mut child] {
        db.commit("me", &script.start()).await;
    }
    db.execute(&format!("UPDATE runs SET kind = 'odd' WHERE id = '{}'", parent.id)).await;
    for _ in 0..2 {
        let outcome = db.store.request_cancel(TENANT, parent.id, "key", None).await.unwrap();
        assert_eq!(outcome, Some(CancelOutcome::Unreadable));
    }
    let mut asked = db.store.cancel_requests("me").await.unwrap();
    asked.sort_unstable();
    let mut expected = vec![(parent.id, None), (child.id, None)];
    expected.sort_unstable();
    assert_eq!(asked, expected);
}

async fn ancestors_are_told_from_the_root_on(db: Db) {
    let mut root = Script::owned();
    let mut child = child_of(&root, RunStatus::Running);
    let mut grandchild = child_of(&child, RunStatus::Queued);
    for script in [&mut root, &mut child, &mut grandchild] {
        db.commit("me", &script.start()).await;
    }
    db.execute(&format!("UPDATE runs SET kind = 'odd' WHERE id = '{}'", root.id)).await;
    let above = |tenant, run| db.store.ancestors(tenant, run);
    let expected = [(root.id, "reader".to_owned()), (child.id, "reader".to_owned())];
    assert_eq!(above(TENANT, grandchild.id).await.unwrap(), expected);
    assert!(above(TENANT, root.id).await.unwrap().is_empty());
    assert!(above("other", grandchild.id).await.unwrap().is_empty());
}

/// Only in damaged rows; no statement may go round in it.
async fn parents_in_a_circle_are_followed_once(db: Db) {
    let mut root = Script::owned();
    let mut child = child_of(&root, RunStatus::Running);
    let mut grandchild = child_of(&child, RunStatus::Running);
    for script in [&mut root, &mut child, &mut grandchild] {
        db.commit("me", &script.start()).await;
        db.commit("me", &script.write(vec![completed(json!(1))])).await;
    }
    let circle = format!("UPDATE runs SET parent_run_id = '{}' WHERE id = '{}'", child.id, root.id);
    db.execute(&circle).await;
    let mut above = db.store.ancestors(TENANT, grandchild.id).await.unwrap();
    above.sort_unstable();
    let mut expected = vec![(root.id, "reader".to_owned()), (child.id, "reader".to_owned())];
    expected.sort_unstable();
    assert_eq!(above, expected);
    let above = db.store.ancestors(TENANT, child.id).await.unwrap();
    assert_eq!(above, [(root.id, "reader".to_owned())]);
    let later = now() + TimeDelta::seconds(1);
    assert_eq!(db.store.delete_ended(later, 9, &no_files).await.unwrap(), 3);
}

async fn a_descendant_that_cannot_be_read_hides_no_other(db: Db) {
    let mut root = Script::owned();
    db.commit("me", &root.start()).await;
    let mut tokens = 0;
    for _ in 0..2 {
        let mut child = child_of(&root, RunStatus::Running);
        db.commit("me", &child.start()).await;
        let begun = RunEvent::IterationStarted {
            attempt: 1,
            iteration: 1,
            answer_only: false,
            limit: None,
        };
        db.commit("me", &child.write(vec![begun, responded(1, &[])])).await;
        tokens += db.store.run(TENANT, child.id).await.unwrap().unwrap().usage.total_tokens();
        let damage = "UPDATE runs SET consumption = '{' WHERE id =";
        db.execute(&format!("{damage} '{}'", child.id)).await;
    }
    let below = db.store.descendants(TENANT, root.id).await.unwrap();
    assert_eq!((below.usage.total_tokens(), below.iterations), (tokens, 2));
}

async fn a_sweep_cancels_children_of_ended_runs(db: Db) {
    db.store.register_replica("me", Duration::from_hours(1)).await.unwrap();
    db.store.register_replica("you", Duration::from_hours(1)).await.unwrap();
    let (mut parent, mut living) = (Script::owned(), Script::owned());
    let (mut running, mut queued) =
        (child_of(&parent, RunStatus::Running), child_of(&parent, RunStatus::Queued));
    let mut spared = child_of(&living, RunStatus::Queued);
    for script in [&mut parent, &mut living, &mut running, &mut queued, &mut spared] {
        db.commit("me", &script.start()).await;
    }
    assert_eq!(db.store.sweep(&[]).await.unwrap(), Swept::default());
    db.commit("me", &parent.write(vec![completed(json!({}))])).await;
    let swept = db.store.sweep(&[]).await.unwrap();
    assert_eq!(swept, Swept::default());
    let claimed = db.store.claim_cancelled("you", 10).await.unwrap();
    assert_eq!(claimed.iter().map(|claimed| claimed.run.id).collect::<Vec<_>>(), [queued.id]);
    assert_eq!(
        db.store.cancel_requests("me").await.unwrap().len(),
        1,
        "its owner ends the one that is driven"
    );
    assert_eq!(db.status(spared.id).await, RunStatus::Queued);
    assert_eq!(db.store.sweep(&[]).await.unwrap(), Swept::default(), "once is enough");
}
