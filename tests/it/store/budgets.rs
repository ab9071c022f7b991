//! Budgets that runs share: never overspent, whoever asks, and balanced whatever happened to whom.

use std::time::Duration;

use tokio::task::JoinSet;
use toolloop::run::{Amounts, Caps, Refusal, Reserved};
use toolloop::store::SharedBudget;

use super::*;

on_both! {
    parallel_runs_never_overspend,
    a_refusal_names_the_cap_and_takes_nothing,
    settling_states_totals_and_may_be_repeated,
    a_budget_is_opened_once,
    a_run_outside_of_a_tree_is_granted_everything,
    a_sweep_settles_what_nobody_drives,
    a_budget_goes_with_its_run,
}

const NONE: Amounts =
    Amounts { tokens: 0, micro_usd: 0, tool_calls: 0, iterations: 0, files: 0, lines: 0 };
const CAPS: Caps = Caps {
    tokens: Some(1000),
    micro_usd: Some(500),
    tool_calls: 4,
    iterations: 10,
    files: 3,
    lines: 20,
};

fn iteration(tokens: u64) -> Amounts {
    Amounts { tokens, iterations: 1, ..NONE }
}

async fn budget(db: &Db, root: Uuid) -> SharedBudget {
    db.store.shared_budget(root).await.unwrap().unwrap()
}

async fn parallel_runs_never_overspend(db: Db) {
    let handle = async || match db.store.kind() {
        "postgres" => store::open(&db.url, 12).await.unwrap(),
        _ => db.store.clone(),
    };
    let replicas = [db.store.clone(), handle().await, handle().await];
    let root = Uuid::now_v7();
    db.store.open_budget(root, CAPS, NONE).await.unwrap();
    let mut runs = JoinSet::new();
    for number in 0..64 {
        let store = replicas[number % 3].clone();
        runs.spawn(async move {
            let run = Uuid::now_v7();
            // One that is settled makes room for nobody: what it took is spent.
            let granted =
                store.reserve(root, run, iteration(20)).await.unwrap() == Reserved::Granted;
            store
                .settle(root, run, if granted { iteration(20) } else { NONE }, true)
                .await
                .unwrap();
            u64::from(granted)
        });
    }
    let granted: u64 = runs.join_all().await.into_iter().sum();
    assert_eq!(granted, 10);
    let SharedBudget { spent, reserved, .. } = budget(&db, root).await;
    assert_eq!((spent, reserved), (Amounts { tokens: 200, iterations: 10, ..NONE }, NONE));
}

async fn a_refusal_names_the_cap_and_takes_nothing(db: Db) {
    let (root, run) = (Uuid::now_v7(), Uuid::now_v7());
    let spent =
        Amounts { tokens: 900, micro_usd: 400, tool_calls: 3, iterations: 9, files: 2, lines: 15 };
    db.store.open_budget(root, CAPS, spent).await.unwrap();
    let table = [
        (iteration(101), "max_total_tokens", 900, 1000),
        (Amounts { micro_usd: 101, ..NONE }, "max_cost_usd", 400, 500),
        (Amounts { tool_calls: 2, ..NONE }, "max_tool_calls", 3, 4),
        (Amounts { iterations: 2, ..NONE }, "max_iterations", 9, 10),
        (Amounts { files: 2, ..NONE }, "max_files_modified", 2, 3),
        (Amounts { files: 1, lines: 6, ..NONE }, "max_lines_changed", 15, 20),
    ];
    for (wanted, limit, used, max) in table {
        let reserved = db.store.reserve(root, run, wanted).await.unwrap();
        assert_eq!(reserved, Reserved::Refused(Refusal { limit, used, max }), "{wanted:?}");
    }
    assert_eq!(budget(&db, root).await, SharedBudget { caps: CAPS, spent, reserved: NONE });
    let rest =
        Amounts { tokens: 100, micro_usd: 100, tool_calls: 1, iterations: 1, files: 1, lines: 5 };
    assert_eq!(
        db.store.reserve(root, run, rest).await.unwrap(),
        Reserved::Granted,
        "exactly what is left"
    );
    assert_eq!(budget(&db, root).await.reserved, rest);
    let more = db.store.reserve(root, run, iteration(0)).await.unwrap();
    assert_eq!(
        more,
        Reserved::Refused(Refusal { limit: "max_iterations", used: 10, max: 10 }),
        "reserved is as good as spent"
    );
    let free = Caps { tokens: None, micro_usd: None, ..CAPS };
    let root = Uuid::now_v7();
    db.store.open_budget(root, free, NONE).await.unwrap();
    let much = Amounts { tokens: 1 << 40, micro_usd: 1 << 40, ..NONE };
    assert_eq!(db.store.reserve(root, run, much).await.unwrap(), Reserved::Granted);
}

async fn settling_states_totals_and_may_be_repeated(db: Db) {
    let (root, run) = (Uuid::now_v7(), Uuid::now_v7());
    db.store.open_budget(root, CAPS, iteration(100)).await.unwrap();
    for _ in 0..2 {
        assert_eq!(db.store.reserve(root, run, iteration(200)).await.unwrap(), Reserved::Granted);
    }
    assert_eq!(budget(&db, root).await.reserved, Amounts { tokens: 400, iterations: 2, ..NONE });
    for _ in 0..2 {
        db.store.settle(root, run, iteration(50), false).await.unwrap();
        let SharedBudget { spent, reserved, .. } = budget(&db, root).await;
        assert_eq!((spent, reserved), (Amounts { tokens: 150, iterations: 2, ..NONE }, NONE));
    }
    db.store
        .settle(
            root,
            run,
            Amounts { tokens: 80, iterations: 2, tool_calls: 1, files: 2, lines: 9, ..NONE },
            true,
        )
        .await
        .unwrap();
    db.store.settle(root, root, Amounts { lines: 4, ..iteration(110) }, true).await.unwrap();
    let expected =
        Amounts { tokens: 190, iterations: 3, tool_calls: 1, files: 2, lines: 13, ..NONE };
    assert_eq!(budget(&db, root).await.spent, expected, "the sum of what the runs say");
}

async fn a_budget_is_opened_once(db: Db) {
    let root = Uuid::now_v7();
    db.store.open_budget(root, CAPS, iteration(100)).await.unwrap();
    db.store.settle(root, root, iteration(300), false).await.unwrap();
    db.store.open_budget(root, Caps { iterations: 99, ..CAPS }, iteration(100)).await.unwrap();
    assert_eq!(
        budget(&db, root).await,
        SharedBudget { caps: CAPS, spent: iteration(300), reserved: NONE }
    );
}

async fn a_run_outside_of_a_tree_is_granted_everything(db: Db) {
    let (root, run) = (Uuid::now_v7(), Uuid::now_v7());
    assert_eq!(
        db.store.reserve(root, run, iteration(u64::MAX >> 1)).await.unwrap(),
        Reserved::Granted
    );
    db.store.settle(root, run, iteration(5), true).await.unwrap();
    assert_eq!(db.store.shared_budget(root).await.unwrap(), None);
}

async fn a_sweep_settles_what_nobody_drives(db: Db) {
    let mut root = Script::owned();
    let tree = root.id;
    let mut crashed = Script::with(|new| new.parent_run_id = Some(root.id));
    let mut ended = Script::with(|new| new.parent_run_id = Some(root.id));
    let mut driven = Script::with(|new| new.parent_run_id = Some(root.id));
    db.store.register_replica("me").await.unwrap();
    db.store.open_budget(root.id, CAPS, NONE).await.unwrap();
    for (script, owner) in
        [(&mut root, "me"), (&mut ended, "me"), (&mut driven, "me"), (&mut crashed, "nobody knows")]
    {
        db.commit(owner, &script.start()).await;
        db.store.reserve(tree, script.id, iteration(30)).await.unwrap();
    }
    let begun =
        RunEvent::IterationStarted { attempt: 1, iteration: 1, answer_only: false, limit: None };
    db.commit("me", &ended.write(vec![begun.clone(), responded(1, &[]), completed(json!({}))]))
        .await;
    db.commit("nobody knows", &crashed.write(vec![begun, responded(1, &[])])).await;
    let swept = db.store.sweep("sweeper", Duration::from_hours(1)).await.unwrap();
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
}

async fn a_budget_goes_with_its_run(db: Db) {
    let mut root = Script::owned();
    db.commit("me", &root.start()).await;
    db.store.open_budget(root.id, CAPS, NONE).await.unwrap();
    db.commit("me", &root.write(vec![completed(json!({}))])).await;
    assert!(db.store.shared_budget(root.id).await.unwrap().is_some());
    assert_eq!(db.store.delete_ended(now() + chrono::TimeDelta::seconds(5), 10).await.unwrap(), 1);
    assert_eq!(db.store.shared_budget(root.id).await.unwrap(), None);
}
