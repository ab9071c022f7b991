use std::pin::pin;
use std::sync::Barrier;
use std::time::Duration;

use futures::FutureExt as _;
use tokio::time::sleep;

use super::*;

/// A payer that is over its share whatever others do.
fn over() -> CpuAccount {
    let payer = CpuAccount::default();
    let share = Share::default();
    share.set_over();
    let _ = payer.0.share.set(Arc::new(share));
    payer
}

fn thread_name() -> String {
    thread::current().name().unwrap_or_default().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn tasks_over_their_share_are_polled_in_the_pool() {
    let task = async {
        let before = thread_name();
        sleep(Duration::from_millis(1)).await;
        let spawned = tokio::spawn(async { thread_name() }).await.unwrap();
        (before, thread_name(), spawned)
    };
    let (before, after, spawned) = FairTask::new(over(), task).await;
    assert_eq!((before.as_str(), after.as_str()), ("over-share", "over-share"));
    assert_ne!(spawned, "over-share");
    assert_ne!(
        FairTask::new(CpuAccount::tenant("fair"), async { thread_name() }).await,
        "over-share"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn queries_over_their_share_take_a_thread_of_the_pool() {
    let query = || async { (thread_name(), Duration::from_millis(1)) };
    let task = async move {
        sleep(Duration::from_millis(1)).await;
        let without_hold = charged(query()).await.unwrap();
        let hold = Hold::new();
        sleep(Duration::from_millis(1)).await;
        let with_hold = charged(query()).await.unwrap();
        drop(hold);
        (without_hold, with_hold)
    };
    let (without_hold, with_hold) = FairTask::new(over(), task).await;
    assert_eq!(without_hold, "over-share");
    assert_ne!(with_hold, "over-share", "others may wait for what it holds");
    let panics = async { charged(async { panic!("bad") as ((), Duration) }).await };
    assert!(FairTask::new(over(), panics).await.unwrap_err().panic.is_some());
}

#[tokio::test(flavor = "multi_thread")]
async fn holders_of_scarce_resources_leave_the_pool() {
    let task = async {
        let hold = Hold::new();
        sleep(Duration::from_millis(1)).await;
        let meanwhile = thread_name();
        drop(hold);
        sleep(Duration::from_millis(1)).await;
        (meanwhile, thread_name())
    };
    let (meanwhile, after) = FairTask::new(over(), task).await;
    assert_ne!(meanwhile, "over-share");
    assert_eq!(after, "over-share");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_task_moves_to_the_pool_once_its_tenant_is_known() {
    let known = over();
    let task = async move {
        let before = thread_name();
        known.move_to_pool().await;
        (before, known)
    };
    let (before, known) = task.await;
    assert_ne!(before, "over-share");
    let task = async move {
        known.move_to_pool().await;
        thread_name()
    };
    assert_eq!(FairTask::new(over(), task).await, "over-share");
    CpuAccount::default().move_to_pool().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn panics_and_drops_reach_waiting_tasks() {
    let task = tokio::spawn(FairTask::new(over(), async { panic!("oh") }));
    assert!(task.await.unwrap_err().is_panic());

    let (alive, mut dropped) = oneshot::channel::<()>();
    let task = tokio::spawn(FairTask::new(over(), async move {
        sleep(Duration::from_mins(10)).await;
        drop(alive);
    }));
    sleep(Duration::from_millis(5)).await;
    assert!(dropped.try_recv().is_err());
    task.abort();
    assert!(dropped.await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn long_work_is_done_beside_its_task() {
    let task = async { (blocking(thread_name).await.unwrap(), thread_name()) };
    let (worked, polled) = FairTask::new(over(), task).await;
    assert_eq!((worked.as_str(), polled.as_str()), ("over-share", "over-share"));
    assert_ne!(blocking(thread_name).await.unwrap(), "over-share");
    let holding = async {
        let _hold = Hold::new();
        blocking(thread_name).await.unwrap()
    };
    let worked = FairTask::new(over(), holding).await;
    assert_ne!(worked, "over-share", "others may wait for what it holds");
    assert!(FairTask::new(over(), blocking(|| panic!("oh"))).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn work_on_files_that_hangs_holds_few_threads_and_none_of_the_pool() {
    let (all, begun) = (Arc::new(Barrier::new(FILE_THREADS + 1)), Arc::new(AtomicUsize::new(0)));
    let waiting = || {
        let (all, begun) = (Arc::clone(&all), Arc::clone(&begun));
        move || {
            begun.fetch_add(1, Ordering::Relaxed);
            all.wait();
        }
    };
    let hanging: Vec<_> = (0..FILE_THREADS).map(|_| tokio::spawn(on_files(waiting()))).collect();
    while begun.load(Ordering::Relaxed) < FILE_THREADS {
        sleep(Duration::from_millis(1)).await;
    }
    let mut next = pin!(on_files(thread_name));
    assert!(next.as_mut().now_or_never().is_none());
    blocking(|| ()).await.unwrap();
    blocking(waiting()).await.unwrap();
    for task in hanging {
        task.await.unwrap().unwrap();
    }
    next.await.unwrap();
    assert_ne!(FairTask::new(over(), on_files(thread_name)).await.unwrap(), "over-share");
    assert!(FairTask::new(over(), on_files(|| panic!("oh"))).await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn many_tasks_of_one_tenant_all_end() {
    let tasks = (0..200).map(|number| {
        tokio::spawn(FairTask::new(over(), async move {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            number
        }))
    });
    let tasks: Vec<_> = tasks.collect();
    for (number, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.unwrap(), number);
    }
}
