//! Budgets that runs share: never overspent, whichever run asks, and balanced whatever happens.

use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;
use toolloop::run::{Amounts, CapExceeded, Caps, Reserved};
use toolloop::store::{Ownership, Requeue, Settled, SharedBudget};

use super::ownership::until_blocked;
use super::*;

on_both! {
    parallel_runs_never_overspend,
    a_refusal_names_the_cap_and_takes_nothing,
    a_run_reserves_in_all_budgets_above_it_or_in_none,
    what_is_taken_anyway_is_reserved_beyond_what_is_left,
    settling_states_totals_and_may_be_repeated,
    a_budget_is_opened_once,
    a_run_outside_of_a_tree_is_granted_everything,
    a_sweep_settles_runs_without_a_driver,
    a_budget_goes_with_its_run,
    a_former_owner_changes_no_budget,
    the_spending_of_a_run_only_grows,
}

const NONE: Amounts = Amounts {
    tokens: 0,
    micro_usd: 0,
    tool_calls: 0,
    iterations: 0,
    files: 0,
    lines: 0,
    requests: 0,
};
const CAPS: Caps = Caps {
    tokens: Some(1000),
    micro_usd: Some(500),
    tool_calls: 4,
    iterations: 10,
    files: 3,
    lines: 20,
    requests: Some(8),
};

fn iteration(tokens: u64) -> Amounts {
    Amounts { tokens, iterations: 1, ..NONE }
}

/// The owner of the runs here.
const ME: Ownership<'_> = Ownership { owner: "me", epoch: 1 };

/// A run that is driven.
async fn driven(db: &Db) -> Uuid {
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    script.id
}

async fn open(db: &Db, root: Uuid, caps: Caps, spent: Amounts) {
    db.store.open_budget(root, ME, caps, spent).await.unwrap();
}

async fn reserve(db: &Db, root: Uuid, run: Uuid, wanted: Amounts) -> Reserved {
    db.store.reserve((&[root], run), ME, wanted).await.unwrap().unwrap()
}

async fn settle(db: &Db, root: Uuid, run: Uuid, spent: Amounts, ended: bool) {
    let settled = db.store.settle((&[root], run), ME, spent, ended).await.unwrap();
    assert_eq!(settled, Settled::Done);
}

async fn budget(db: &Db, root: Uuid) -> SharedBudget {
    db.store.shared_budget(root).await.unwrap().unwrap()
}

async fn parallel_runs_never_overspend(db: Db) {
    let handle = async || match db.store.kind() {
        "postgres" => store::open(&db.url, 12, false).await.unwrap(),
        _ => db.store.clone(),
    };
    let replicas = [db.store.clone(), handle().await, handle().await];
    let root = driven(&db).await;
    open(&db, root, CAPS, NONE).await;
    let mut runs = JoinSet::new();
    for number in 0..64 {
        let store = replicas[number % 3].clone();
        let run = driven(&db).await;
        runs.spawn(async move {
            // One that is settled makes no room: what it took is spent.
            let reserved = store.reserve((&[root], run), ME, iteration(20)).await.unwrap();
            let granted = reserved == Some(Reserved::Granted);
            let spent = if granted { iteration(20) } else { NONE };
            let settled = store.settle((&[root], run), ME, spent, true).await.unwrap();
            assert_eq!(settled, Settled::Done);
            u64::from(granted)
        });
    }
    let granted: u64 = runs.join_all().await.into_iter().sum();
    assert_eq!(granted, 10);
    let SharedBudget { spent, reserved, .. } = budget(&db, root).await;
    assert_eq!((spent, reserved), (Amounts { tokens: 200, iterations: 10, ..NONE }, NONE));
}

async fn a_refusal_names_the_cap_and_takes_nothing(db: Db) {
    let (root, run) = (driven(&db).await, driven(&db).await);
    let spent = Amounts {
        tokens: 900,
        micro_usd: 400,
        tool_calls: 3,
        iterations: 9,
        files: 2,
        lines: 15,
        requests: 6,
    };
    open(&db, root, CAPS, spent).await;
    let table = [
        (iteration(101), "max_total_tokens", 900, 1000),
        (Amounts { micro_usd: 101, ..NONE }, "max_cost_usd", 400, 500),
        (Amounts { tool_calls: 2, ..NONE }, "max_tool_calls", 3, 4),
        (Amounts { iterations: 2, ..NONE }, "max_iterations", 9, 10),
        (Amounts { files: 2, ..NONE }, "max_files_modified", 2, 3),
        (Amounts { files: 1, lines: 6, ..NONE }, "max_lines_changed", 15, 20),
        (Amounts { requests: 3, ..NONE }, "network.max_requests", 6, 8),
    ];
    for (wanted, limit, used, max) in table {
        let reserved = reserve(&db, root, run, wanted).await;
        let Reserved::Refused(refusal) = reserved else { panic!("{wanted:?}") };
        assert_eq!((refusal.limit, refusal.used, refusal.max), (limit, used, max), "{wanted:?}");
    }
    assert_eq!(budget(&db, root).await, SharedBudget { caps: CAPS, spent, reserved: NONE });
    let rest = Amounts {
        tokens: 100,
        micro_usd: 100,
        tool_calls: 1,
        iterations: 1,
        files: 1,
        lines: 5,
        requests: 2,
    };
    assert_eq!(reserve(&db, root, run, rest).await, Reserved::Granted, "exactly what is left");
    assert_eq!(budget(&db, root).await.reserved, rest);
    let more = reserve(&db, root, run, iteration(0)).await;
    let refusal = CapExceeded { limit: "max_iterations", used: 9, reserved: 1, wanted: 1, max: 10 };
    assert_eq!(more, Reserved::Refused(refusal), "reserved is as good as spent");
    let free = Caps { tokens: None, micro_usd: None, requests: None, ..CAPS };
    let root = driven(&db).await;
    open(&db, root, free, NONE).await;
    let much = Amounts { tokens: 1 << 40, micro_usd: 1 << 40, requests: 1 << 40, ..NONE };
    assert_eq!(reserve(&db, root, run, much).await, Reserved::Granted);
}

async fn a_run_reserves_in_all_budgets_above_it_or_in_none(db: Db) {
    let (root, middle) = (driven(&db).await, driven(&db).await);
    let one = driven(&db).await;
    let mut script = Script::owned();
    db.commit("me", &script.start()).await;
    let other = script.id;
    open(&db, root, CAPS, iteration(100)).await;
    open(&db, middle, Caps::of_model_calls(Some(300), None).unwrap(), iteration(50)).await;
    let reserve = async |run: Uuid, wanted: Amounts| {
        db.store.reserve((&[root, middle, run], run), ME, wanted).await.unwrap().unwrap()
    };
    assert_eq!(reserve(one, iteration(200)).await, Reserved::Granted);
    let refusal =
        CapExceeded { limit: "max_total_tokens", used: 50, reserved: 200, wanted: 200, max: 300 };
    assert_eq!(reserve(other, iteration(200)).await, Reserved::Refused(refusal));
    for (of, spent) in [(root, 100), (middle, 50)] {
        let budget = budget(&db, of).await;
        assert_eq!((budget.spent, budget.reserved), (iteration(spent), iteration(200)), "{of}");
    }
    let reserved = reserve(other, Amounts { tool_calls: 5, ..NONE }).await;
    assert!(matches!(reserved, Reserved::Refused(refusal) if refusal.limit == "max_tool_calls"));
    for _ in 0..2 {
        let settled = db.store.settle((&[root, middle, one], one), ME, iteration(20), true).await;
        assert_eq!(settled.unwrap(), Settled::Done);
    }
    assert_eq!(reserve(other, iteration(200)).await, Reserved::Granted, "there is room again");
    for (of, tokens) in [(root, 120), (middle, 70)] {
        let budget = budget(&db, of).await;
        let spent = Amounts { iterations: 2, ..iteration(tokens) };
        assert_eq!((budget.spent, budget.reserved), (spent, iteration(200)), "{of}");
    }
    // Of a run that has ended unsettled, the sweep settles all holds.
    db.commit("me", &script.write(vec![completed(json!({}))])).await;
    db.store.sweep(&[]).await.unwrap();
    for of in [root, middle] {
        assert_eq!(budget(&db, of).await.reserved, NONE, "{of}");
    }
}

async fn what_is_taken_anyway_is_reserved_beyond_what_is_left(db: Db) {
    let (root, run, other) = (driven(&db).await, driven(&db).await, driven(&db).await);
    open(&db, root, CAPS, iteration(900)).await;
    assert!(db.store.reserve_beyond((&[root], run), ME, iteration(300)).await.unwrap());
    assert_eq!(budget(&db, root).await.reserved, iteration(300));
    let more = reserve(&db, root, other, iteration(50)).await;
    assert!(matches!(more, Reserved::Refused(refusal) if refusal.may_settle()), "{more:?}");
    settle(&db, root, run, iteration(150), true).await;
    let more = reserve(&db, root, other, iteration(50)).await;
    assert!(matches!(more, Reserved::Refused(refusal) if refusal.used == 1050), "{more:?}");
    let former = Ownership { owner: "another", epoch: 1 };
    assert!(!db.store.reserve_beyond((&[root], other), former, iteration(1)).await.unwrap());
    assert_eq!(budget(&db, root).await.reserved, NONE);
}

async fn settling_states_totals_and_may_be_repeated(db: Db) {
    let (root, run) = (driven(&db).await, driven(&db).await);
    open(&db, root, CAPS, iteration(100)).await;
    for _ in 0..2 {
        assert_eq!(reserve(&db, root, run, iteration(200)).await, Reserved::Granted);
    }
    assert_eq!(budget(&db, root).await.reserved, Amounts { tokens: 400, iterations: 2, ..NONE });
    for _ in 0..2 {
        settle(&db, root, run, iteration(50), false).await;
        let SharedBudget { spent, reserved, .. } = budget(&db, root).await;
        assert_eq!((spent, reserved), (Amounts { tokens: 150, iterations: 2, ..NONE }, NONE));
    }
    let most = Amounts { tokens: 80, iterations: 2, tool_calls: 1, files: 2, lines: 9, ..NONE };
    settle(&db, root, run, most, true).await;
    settle(&db, root, root, Amounts { lines: 4, ..iteration(110) }, true).await;
    let expected =
        Amounts { tokens: 190, iterations: 3, tool_calls: 1, files: 2, lines: 13, ..NONE };
    assert_eq!(budget(&db, root).await.spent, expected, "the sum of what the runs say");
}

async fn a_budget_is_opened_once(db: Db) {
    let root = driven(&db).await;
    open(&db, root, CAPS, iteration(100)).await;
    settle(&db, root, root, iteration(300), false).await;
    open(&db, root, Caps { iterations: 99, ..CAPS }, iteration(100)).await;
    assert_eq!(
        budget(&db, root).await,
        SharedBudget { caps: CAPS, spent: iteration(300), reserved: NONE }
    );
}

async fn a_run_outside_of_a_tree_is_granted_everything(db: Db) {
    let (root, run) = (Uuid::now_v7(), Uuid::now_v7());
    assert_eq!(reserve(&db, root, run, iteration(u64::MAX >> 1)).await, Reserved::Granted);
    settle(&db, root, run, iteration(5), true).await;
    assert_eq!(db.store.shared_budget(root).await.unwrap(), None);
}

async fn a_sweep_settles_runs_without_a_driver(db: Db) {
    let mut root = Script::owned();
    let tree = root.id;
    let mut crashed = Script::with(|new| new.parent_run_id = Some(root.id));
    let mut ended = Script::with(|new| new.parent_run_id = Some(root.id));
    let mut driven = Script::with(|new| new.parent_run_id = Some(root.id));
    db.store.register_replica("me", Duration::from_hours(1)).await.unwrap();
    for (script, owner) in
        [(&mut root, "me"), (&mut ended, "me"), (&mut driven, "me"), (&mut crashed, "unknown")]
    {
        db.commit(owner, &script.start()).await;
        open(&db, tree, CAPS, NONE).await;
        let by = Ownership { owner, ..ME };
        let reserved = db.store.reserve((&[tree], script.id), by, iteration(30)).await.unwrap();
        assert_eq!(reserved, Some(Reserved::Granted));
    }
    let begun =
        RunEvent::IterationStarted { attempt: 1, iteration: 1, answer_only: false, limit: None };
    db.commit("me", &ended.write(vec![begun.clone(), responded(1, &[]), completed(json!({}))]))
        .await;
    db.commit("unknown", &crashed.write(vec![begun, responded(1, &[])])).await;
    let swept = db.store.sweep(&[]).await.unwrap();
    assert_eq!(swept.requeued, [crashed.id]);
    let SharedBudget { spent, reserved, .. } = budget(&db, tree).await;
    assert_eq!(
        spent,
        Amounts { tokens: 240, micro_usd: 14, iterations: 2, ..NONE },
        "what their rows say"
    );
    assert_eq!(
        reserved,
        Amounts { tokens: 60, iterations: 2, ..NONE },
        "of the two that are driven"
    );
    // A row that cannot be read keeps its own hold alone.
    let mut damaged = Script::with(|new| new.parent_run_id = Some(tree));
    db.commit("me", &damaged.start()).await;
    let reserved = db.store.reserve((&[tree], damaged.id), ME, iteration(30)).await.unwrap();
    assert_eq!(reserved, Some(Reserved::Granted));
    for script in [&mut damaged, &mut driven] {
        db.commit("me", &script.write(vec![completed(json!({}))])).await;
    }
    db.execute(&format!("UPDATE runs SET consumption = '{{' WHERE id = '{}'", damaged.id)).await;
    db.store.sweep(&[]).await.unwrap();
    let SharedBudget { reserved, .. } = budget(&db, tree).await;
    assert_eq!(reserved, Amounts { tokens: 60, iterations: 2, ..NONE });
}

async fn a_budget_goes_with_its_run(db: Db) {
    let mut root = Script::owned();
    db.commit("me", &root.start()).await;
    open(&db, root.id, CAPS, NONE).await;
    db.commit("me", &root.write(vec![completed(json!({}))])).await;
    assert!(db.store.shared_budget(root.id).await.unwrap().is_some());
    assert_eq!(
        db.store.delete_ended(now() + chrono::TimeDelta::seconds(5), 10, &no_files).await.unwrap(),
        1
    );
    assert_eq!(db.store.shared_budget(root.id).await.unwrap(), None);
}

/// A run that another replica has taken over, its budget, and its owner now.
async fn taken_over(db: &Db) -> (Uuid, Ownership<'static>) {
    let run = driven(db).await;
    open(db, run, CAPS, iteration(10)).await;
    assert_eq!(reserve(db, run, run, iteration(100)).await, Reserved::Granted);
    assert!(db.store.give_back("me", run, 1, Requeue::AtOnce).await.unwrap());
    db.store.claim_run("you", run).await.unwrap().unwrap();
    (run, Ownership { owner: "you", epoch: 2 })
}

async fn a_former_owner_changes_no_budget(db: Db) {
    let (run, you) = taken_over(&db).await;
    let before = budget(&db, run).await;
    for zombie in [ME, Ownership { epoch: 2, ..ME }, Ownership { epoch: 1, ..you }] {
        assert_eq!(db.store.reserve((&[run], run), zombie, iteration(1)).await.unwrap(), None);
        let settled = db.store.settle((&[run], run), zombie, iteration(900), true).await.unwrap();
        assert_eq!(settled, Settled::Fenced);
        assert_eq!(budget(&db, run).await, before);
    }
    let settled = db.store.settle((&[run], run), you, iteration(30), false).await.unwrap();
    let SharedBudget { spent, reserved, .. } = budget(&db, run).await;
    assert_eq!((settled, spent, reserved), (Settled::Done, iteration(30), NONE));

    let other = driven(&db).await;
    let stranger = Ownership { owner: "you", epoch: 1 };
    db.store.open_budget(other, stranger, CAPS, iteration(900)).await.unwrap();
    assert_eq!(db.store.shared_budget(other).await.unwrap(), None);
}

async fn the_spending_of_a_run_only_grows(db: Db) {
    let run = driven(&db).await;
    open(&db, run, CAPS, NONE).await;
    settle(&db, run, run, Amounts { tool_calls: 1, ..iteration(50) }, false).await;
    settle(&db, run, run, Amounts { tool_calls: 2, ..iteration(30) }, false).await;
    let expected = Amounts { tool_calls: 2, ..iteration(50) };
    assert_eq!(budget(&db, run).await.spent, expected);
    settle(&db, run, run, iteration(60), true).await;
    assert_eq!(budget(&db, run).await.spent, Amounts { tokens: 60, ..expected });
}

/// The run is taken over while its former owner already waits for the budget: what it wanted is
/// refused, and nothing stays reserved.
#[tokio::test]
async fn postgres_a_reservation_that_waited_sees_who_owns_the_run_now() {
    let db = Db::postgres().await;
    let run = driven(&db).await;
    open(&db, run, CAPS, NONE).await;
    let mut observer = PgConnection::connect(&db.url).await.unwrap();
    let mut connection = PgConnection::connect(&db.url).await.unwrap();
    let mut other = connection.begin().await.unwrap();
    sqlx::query("SELECT 1 FROM budgets FOR UPDATE").execute(&mut *other).await.unwrap();
    let store = db.store.clone();
    let zombie = tokio::spawn(async move {
        loop {
            match store.reserve((&[run], run), ME, iteration(1)).await {
                // A busy machine lets it wait for longer than a statement may take.
                Err(error) if error.is_transient() => {}
                reserved => break reserved.unwrap(),
            }
        }
    });
    until_blocked(&mut observer).await;
    assert!(db.store.give_back("me", run, 1, Requeue::AtOnce).await.unwrap());
    db.store.claim_run("you", run).await.unwrap().unwrap();
    other.commit().await.unwrap();
    assert_eq!(zombie.await.unwrap(), None);
    assert_eq!(budget(&db, run).await.reserved, NONE);
}
