//! The requests of parked runs: each is stored with its event, answered once, and void when the run ends. No
//! run stays parked for ever.

use std::sync::Arc;
use std::time::Duration;

use chrono::TimeDelta;
use toolloop::event::{ApprovalBasis, Awaited, Resolution, WaitKind};
use toolloop::store::{
    Answer, ApprovalFilter, ApprovalRecord, ApprovalStatus, AuditFilter, CancelOutcome,
};

use super::*;

on_both! {
    a_parked_run_has_no_owner_and_waits,
    the_last_answer_queues_the_run,
    an_answer_is_taken_once_and_for_its_own_call,
    an_answer_before_the_park_is_not_lost,
    answers_race_the_park,
    the_last_two_answers_race,
    approvals_expire_at_their_deadline,
    approvals_of_an_ended_run_are_void,
    a_cancel_request_that_meets_the_park_is_not_lost,
    a_review_has_no_deadline_and_takes_no_other_answer,
    pending_approvals_are_listed,
    all_parents_of_ended_children_are_queued,
}

fn awaited(call: &ToolCall, kind: WaitKind, expires_in: TimeDelta) -> Awaited {
    Awaited {
        basis: ApprovalBasis::default(),
        circumstances: Circumstances::default(),
        decision: None,
        escalation_target: None,
        actions: Arc::default(),
        call_id: call.id,
        kind,
        tool: call.name.clone(),
        arguments: json!({"path": "a\u{0}b"}),
        reason: "it would be lost".into(),
        expires_at: Some(now() + expires_in),
        condition: None,
        child_run_id: None,
        input: None,
    }
}

pub(super) fn requested(call: &ToolCall) -> RunEvent {
    RunEvent::ApprovalRequested(awaited(call, WaitKind::Approval, TimeDelta::hours(1)))
}

fn parked(mut write: RunWrite) -> RunWrite {
    write.park = Some(RunStatus::AwaitingApproval);
    write
}

/// A run of `me` that asks for these calls, and the write that parks it with the last of its
/// events.
async fn asking(db: &Db, calls: &[&ToolCall]) -> (Script, RunWrite) {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let events =
        std::iter::once(responded(1, calls)).chain(calls.iter().map(|call| requested(call)));
    let write = parked(script.write(events.collect()));
    (script, write)
}

fn approved() -> Answer {
    Answer {
        seq: 0,
        resolution: Resolution::Approved {
            arguments: None,
            clears: toolloop::run::Labels::default(),
            actions: [].into(),
        },
        decided_by: "ann".into(),
        reason: Some("fine".into()),
        audit: None,
    }
}

fn found_out() -> Answer {
    Answer { resolution: Resolution::DidNotHappen, ..approved() }
}

impl Db {
    async fn answer(&self, run: Uuid, call: &ToolCall, answer: &Answer) -> Option<RunStatus> {
        let asked = self.asked(run).await;
        let asked = asked.iter().find(|asked| asked.call_id == call.id);
        let answer = Answer { seq: asked.map_or(0, |asked| asked.seq), ..answer.clone() };
        self.store.answer(TENANT, run, call.id, &answer).await.unwrap().map(|run| run.status)
    }

    async fn asked(&self, run: Uuid) -> Vec<ApprovalRecord> {
        let filter = ApprovalFilter { run_id: Some(run), ..ApprovalFilter::default() };
        let mut rows = self.store.approvals(TENANT, &filter, &page(99, None)).await.unwrap();
        rows.sort_by_key(|row| row.seq);
        rows
    }

    async fn stands(&self, run: Uuid) -> Vec<&'static str> {
        self.asked(run).await.iter().map(|row| row.status.as_str()).collect()
    }
}

async fn a_parked_run_has_no_owner_and_waits(db: Db) {
    let shell = call("shell", "{}");
    let (script, write) = asking(&db, &[&shell]).await;
    db.commit("me", &write).await;
    db.commit_again("me", &write).await;
    let row = db.store.run(TENANT, script.id).await.unwrap().unwrap();
    assert_eq!((row.status, row.owner, row.crash_count), (RunStatus::AwaitingApproval, None, 0));
    assert!(db.store.claim("you", 9, "").await.unwrap().is_empty());
    assert_eq!(db.store.release("me").await.unwrap(), 0);
    let asked = db.asked(script.id).await.remove(0);
    let sent = &write.events[1];
    assert_eq!((asked.seq, asked.at, asked.call_id), (sent.seq, sent.at, shell.id));
    assert_eq!(
        (asked.kind, asked.status, asked.agent.as_deref()),
        (WaitKind::Approval, ApprovalStatus::Pending, Some("reader"))
    );
    assert_eq!((asked.tool.as_str(), asked.reason.as_str()), ("shell", "it would be lost"));
    assert_eq!(asked.arguments, json!({"path": "a\u{0}b"}));
    assert_eq!((asked.decided_by, asked.resolution), (None, None));
    let listed = &db.store.tool_calls(TENANT, script.id, &page(9, None)).await.unwrap()[0];
    assert_eq!(
        (listed.state.as_str(), listed.decision.as_deref()),
        ("awaiting_approval", Some("escalated"))
    );
}

async fn the_last_answer_queues_the_run(db: Db) {
    let (one, two) = (call("one", "{}"), call("two", "{}"));
    let (mut script, write) = asking(&db, &[&one, &two]).await;
    db.commit("me", &write).await;
    let audit = audited(&one, "allowed");
    let first = Answer { audit: Some(audit.clone()), ..approved() };
    assert_eq!(db.answer(script.id, &one, &first).await, Some(RunStatus::AwaitingApproval));
    assert!(db.store.claim("you", 9, "").await.unwrap().is_empty());
    assert_eq!(db.answer(script.id, &two, &approved()).await, Some(RunStatus::Queued));
    let claimed = db.store.claim("you", 9, "").await.unwrap().remove(0);
    assert_eq!((claimed.run.id, claimed.run.crash_count, claimed.run.epoch), (script.id, 0, 2));
    script.epoch = 2;
    db.commit("you", &script.write(vec![completed(json!(1))])).await;
    assert_eq!(db.stands(script.id).await, ["approved", "approved"]);
    let rows = db.store.audit(TENANT, &AuditFilter::default(), &page(9, None)).await.unwrap();
    assert_eq!((rows.len(), rows[0].subject.as_str()), (1, "ann"));
    assert!(is_record_of(&rows[0], &audit), "{rows:?}");
}

async fn an_answer_is_taken_once_and_for_its_own_call(db: Db) {
    let shell = call("shell", "{}");
    let (script, write) = asking(&db, &[&shell]).await;
    assert_eq!(db.answer(script.id, &shell, &approved()).await, None, "not asked yet");
    db.commit("me", &write).await;
    assert_eq!(db.answer(script.id, &shell, &found_out()).await, None, "another kind");
    assert_eq!(db.answer(script.id, &call("shell", "{}"), &approved()).await, None, "another call");
    assert_eq!(
        db.store.answer("other", script.id, shell.id, &approved()).await.unwrap(),
        None,
        "another tenant"
    );
    let deny = Answer { resolution: Resolution::Denied, ..approved() };
    let answers = [approved(), deny.clone(), approved(), deny];
    let answers = answers.iter().map(|answer| db.answer(script.id, &shell, answer));
    let taken = futures::future::join_all(answers).await.into_iter().flatten().count();
    assert_eq!(taken, 1);
    let asked = db.asked(script.id).await.remove(0);
    assert_eq!(
        (asked.decided_by.as_deref(), asked.decision_reason.as_deref()),
        (Some("ann"), Some("fine"))
    );
    assert_eq!(Some(asked.status), asked.resolution.as_ref().map(ApprovalStatus::after));
    assert!(asked.decided_at.is_some());
}

async fn an_answer_before_the_park_is_not_lost(db: Db) {
    let shell = call("shell", "{}");
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    db.commit("me", &script.write(vec![responded(1, &[&shell]), requested(&shell)])).await;
    assert_eq!(db.answer(script.id, &shell, &approved()).await, Some(RunStatus::Running));
    let warned = RunEvent::BudgetWarned { condition: 0, warning: "much".into() };
    db.commit("me", &parked(script.write(vec![warned]))).await;
    assert_eq!(db.status(script.id).await, RunStatus::Queued, "it waits for nothing any more");
    assert_eq!(db.store.claim("you", 9, "").await.unwrap().len(), 1);
}

async fn answers_race_the_park(db: Db) {
    for _ in 0..40 {
        let shell = call("shell", "{}");
        let mut script = Script::owned();
        db.commit("me", &script.start()).await;
        db.commit("me", &script.write(vec![responded(1, &[&shell]), requested(&shell)])).await;
        let warned = RunEvent::BudgetWarned { condition: 0, warning: "much".into() };
        let park = parked(script.write(vec![warned]));
        let answer = approved();
        let (answered, committed) =
            tokio::join!(db.answer(script.id, &shell, &answer), db.commit_one("me", &park));
        assert_eq!(committed, WriteOutcome::Committed);
        assert_eq!(db.status(script.id).await, RunStatus::Queued, "answered while {answered:?}");
    }
}

async fn the_last_two_answers_race(db: Db) {
    for _ in 0..40 {
        let (one, two) = (call("one", "{}"), call("two", "{}"));
        let (script, write) = asking(&db, &[&one, &two]).await;
        db.commit("me", &write).await;
        let answer = approved();
        let taken =
            tokio::join!(db.answer(script.id, &one, &answer), db.answer(script.id, &two, &answer));
        assert!(matches!(taken, (Some(_), Some(_))), "{taken:?}");
        assert_eq!(db.status(script.id).await, RunStatus::Queued, "{taken:?}");
    }
}

async fn approvals_expire_at_their_deadline(db: Db) {
    let (late, soon) = (call("late", "{}"), call("soon", "{}"));
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let due = RunEvent::ApprovalRequested(awaited(
        &soon,
        WaitKind::Approval,
        TimeDelta::milliseconds(-1),
    ));
    let write = script.write(vec![responded(1, &[&late, &soon]), requested(&late), due]);
    db.commit("me", &parked(write)).await;
    assert_eq!(
        db.answer(script.id, &soon, &approved()).await,
        None,
        "too late, although no sweep has noticed"
    );
    assert_eq!(db.store.expire_approvals().await.unwrap(), 1);
    assert_eq!(db.store.expire_approvals().await.unwrap(), 0);
    assert_eq!(db.stands(script.id).await, ["pending", "expired"]);
    assert_eq!(
        db.status(script.id).await,
        RunStatus::AwaitingApproval,
        "something else is waited for"
    );
    assert_eq!(db.answer(script.id, &late, &approved()).await, Some(RunStatus::Queued));
    assert_eq!(db.asked(script.id).await[1].resolution, Some(Resolution::Expired));

    let (mut alone, write) = asking(&db, &[&late]).await;
    db.commit("me", &write).await;
    assert_eq!(db.store.expire_approvals().await.unwrap(), 0);
    let soon = RunEvent::ApprovalRequested(awaited(&soon, WaitKind::Approval, TimeDelta::zero()));
    assert_eq!(db.answer(alone.id, &late, &approved()).await, Some(RunStatus::Queued));
    let claimed = db.store.claim("me", 9, "").await.unwrap();
    alone.epoch = claimed.iter().find(|claimed| claimed.run.id == alone.id).unwrap().run.epoch;
    db.commit("me", &parked(alone.write(vec![soon]))).await;
    assert_eq!(db.store.expire_approvals().await.unwrap(), 1);
    assert_eq!(db.status(alone.id).await, RunStatus::Queued);
}

async fn approvals_of_an_ended_run_are_void(db: Db) {
    let shell = call("shell", "{}");
    let (cancelled, write) = asking(&db, &[&shell]).await;
    db.commit("me", &write).await;
    db.cancel(cancelled.id).await;
    assert_eq!(db.stands(cancelled.id).await, ["void"]);
    assert_eq!(db.answer(cancelled.id, &shell, &approved()).await, None);

    let failed = || RunEvent::interrupted("as it must");
    let mut later = Script::owned();
    db.commit("me", &later.start()).await;
    db.commit("me", &later.write(vec![responded(1, &[&shell]), requested(&shell)])).await;
    db.commit("me", &later.write(vec![failed()])).await;
    assert_eq!(db.stands(later.id).await, ["void"]);

    let mut at_once = Script::owned();
    db.commit("me", &at_once.start()).await;
    db.commit("me", &at_once.write(vec![responded(1, &[&shell]), requested(&shell), failed()]))
        .await;
    assert_eq!(db.stands(at_once.id).await, ["void"]);
}

/// The request finds the run running, and the run parks without having heard of it.
async fn a_cancel_request_that_meets_the_park_is_not_lost(db: Db) {
    let shell = call("shell", "{}");
    let (script, write) = asking(&db, &[&shell]).await;
    let outcome = db.store.request_cancel(TENANT, script.id, "key", Some("enough")).await.unwrap();
    assert!(matches!(outcome, Some(CancelOutcome::Requested(_))), "{outcome:?}");
    db.commit("me", &write).await;
    let claimed = db.store.claim("you", 9, "").await.unwrap().remove(0);
    assert_eq!(claimed.run.cancel_reason.as_deref(), Some("enough"));
}

async fn a_review_has_no_deadline_and_takes_no_other_answer(db: Db) {
    let shell = call("shell", r#"{"command": "make"}"#);
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let asks = vec![responded(1, &[&shell]), dispatched(&shell, Effect::Once), review(&shell)];
    let park = RunWrite { park: Some(RunStatus::NeedsReview), ..script.write(asks) };
    db.commit("me", &park).await;
    assert_eq!(db.status(script.id).await, RunStatus::NeedsReview);
    let calls = db.store.tool_calls(TENANT, script.id, &page(9, None)).await.unwrap();
    assert_eq!(calls[0].state, "unknown");
    let asked = db.asked(script.id).await.remove(0);
    assert_eq!((asked.kind, asked.seq, asked.expires_at), (WaitKind::Review, 5, None));
    assert_eq!(db.store.expire_approvals().await.unwrap(), 0);
    assert_eq!(db.answer(script.id, &shell, &approved()).await, None, "that is not the question");
    assert_eq!(db.answer(script.id, &shell, &found_out()).await, Some(RunStatus::Queued));
    assert_eq!(db.stands(script.id).await, ["resolved"]);
}

async fn pending_approvals_are_listed(db: Db) {
    let mut asked = Vec::new();
    for _ in 0..5 {
        let shell = call("shell", "{}");
        let (script, write) = asking(&db, &[&shell]).await;
        db.commit("me", &write).await;
        asked.push((script.id, shell));
        tokio::time::sleep(Duration::from_millis(1)).await; // an order by time
    }
    assert!(db.answer(asked[2].0, &asked[2].1, &approved()).await.is_some());
    let pending =
        ApprovalFilter { status: Some(ApprovalStatus::Pending), ..ApprovalFilter::default() };
    let mut seen = Vec::new();
    let mut after = None;
    loop {
        let rows = db.store.approvals(TENANT, &pending, &page(2, after.take())).await.unwrap();
        let Some(last) = rows.last() else { break };
        after = Some(store::RunCursor { at: last.at, id: last.call_id.to_string() });
        seen.extend(rows.iter().map(|row| row.run_id));
    }
    let expected: Vec<Uuid> = [4, 3, 1, 0].map(|n: usize| asked[n].0).to_vec();
    assert_eq!(seen, expected);
    assert!(db.store.approvals("other", &pending, &page(9, None)).await.unwrap().is_empty());
    let one = ApprovalFilter { call_id: Some(asked[2].1.id), ..ApprovalFilter::default() };
    assert_eq!(
        db.store.approvals(TENANT, &one, &page(9, None)).await.unwrap()[0].status,
        ApprovalStatus::Approved
    );
}

async fn all_parents_of_ended_children_are_queued(db: Db) {
    const PARENTS: usize = 300; // more than are settled in one transaction
    let mut children = Vec::new();
    for _ in 0..PARENTS {
        let mut parent = Script::owned();
        db.commit("me", &parent.start()).await;
        let delegation = call("agent:worker", "{}");
        let child = Uuid::now_v7(); // of which there is no row any more
        let awaited = awaited(&delegation, WaitKind::Child, TimeDelta::hours(1));
        let awaited = Awaited { child_run_id: Some(child), expires_at: None, ..awaited };
        let events = vec![responded(1, &[&delegation]), RunEvent::ToolCallAwaitingChild(awaited)];
        db.commit("me", &parked(parent.write(events))).await;
        children.push(child);
    }
    let other = [Uuid::now_v7()];
    assert_eq!(db.store.answer_parents(Some(&other)).await.unwrap(), 0);
    assert_eq!(db.store.answer_parents(Some(&children)).await.unwrap(), PARENTS as u64);
    assert_eq!(db.store.queued().await.unwrap(), PARENTS as u64);
    assert_eq!(db.store.answer_parents(None).await.unwrap(), 0);
}
