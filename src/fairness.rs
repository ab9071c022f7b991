//! Processor time, fair between tenants.
//!
//! Each request and each run of a tenant is wrapped in a [`FairTask`], which measures the time of each poll
//! ([`shares`]). While the processors are busy and several tenants are active, tasks of a tenant that takes more than
//! its share are polled by a few separate threads, round-robin with other such tenants ([`throttled_pool`]). So the
//! threads of the runtime stay free for other tenants. Nothing is refused, and a tenant that is alone can use all
//! processors.
//!
//! A task that holds a scarce resource, such as a database connection, is polled at once, even one of such a tenant:
//! otherwise other tasks would wait for that resource ([`Hold`]).

mod shares;
mod throttled_pool;

use std::any::Any;
use std::cell::RefCell;
use std::fmt;
use std::future::{Future, poll_fn};
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};

use self::shares::Share;

/// Threads that work on files at the same time.
const FILE_THREADS: usize = 64;
static FILES: Semaphore = Semaphore::const_new(FILE_THREADS);

/// The tenant to which a task's processor time is charged; unknown until its caller is authenticated.
#[derive(Debug, Clone, Default)]
pub struct CpuAccount(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    share: OnceLock<Arc<Share>>,
    /// The number of scarce resources that the task holds.
    holds: AtomicUsize,
}

thread_local! {
    /// The account of the task that this thread polls.
    static CURRENT: RefCell<Option<CpuAccount>> = const { RefCell::new(None) };
}

impl CpuAccount {
    pub fn tenant(tenant: &str) -> Self {
        let payer = Self::default();
        payer.set(tenant);
        payer
    }

    /// Sets the tenant; only the first call has an effect.
    pub fn set(&self, tenant: &str) {
        self.0.share.get_or_init(|| shares::of(tenant));
    }

    /// Moves the task to the throttled pool, if its tenant turns out to take more than its share.
    pub async fn move_to_pool(&self) {
        let mut has_stepped = self.share_if_over().is_none();
        poll_fn(|context| {
            if mem::replace(&mut has_stepped, true) {
                return Poll::Ready(());
            }
            context.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    fn share_if_over(&self) -> Option<&Arc<Share>> {
        self.0.share.get().filter(|share| share.is_over())
    }

    fn is_free(&self) -> bool {
        self.0.holds.load(Ordering::Relaxed) == 0
    }

    fn current() -> Option<Self> {
        CURRENT.with_borrow(Clone::clone)
    }

    /// Does work on the account of the task. Nothing is counted while there is only one tenant.
    fn run_charged<T>(&self, work: impl FnOnce() -> T) -> T {
        struct Reset(Option<CpuAccount>);
        impl Drop for Reset {
            fn drop(&mut self) {
                CURRENT.set(self.0.take());
            }
        }
        if !shares::are_several() && self.share_if_over().is_none() {
            return work();
        }
        let _reset = Reset(CURRENT.replace(Some(self.clone())));
        let begun = Instant::now();
        let done = work();
        self.charge(begun.elapsed());
        done
    }

    fn charge(&self, took: Duration) {
        if let Some(share) = self.0.share.get() {
            share.charge(took);
        }
    }
}

/// Guard: the task holds a scarce resource, and so is polled at once.
#[derive(Debug)]
pub struct Hold {
    payer: Option<CpuAccount>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Hold {
    /// For a resource of which there is one; does not wait.
    pub fn new() -> Self {
        Self::of(CpuAccount::current(), None)
    }

    /// For a resource of which there are few. A tenant that takes more than its share may hold only some of them, so
    /// its task waits here until another one is released. A task that already holds a resource does not wait.
    pub async fn of_scarce() -> Self {
        let payer = CpuAccount::current();
        let over =
            payer.as_ref().filter(|payer| payer.is_free()).and_then(CpuAccount::share_if_over);
        let permit = match over {
            Some(share) => share.permit().await,
            None => None,
        };
        Self::of(payer, permit)
    }

    fn of(payer: Option<CpuAccount>, permit: Option<OwnedSemaphorePermit>) -> Self {
        if let Some(payer) = &payer {
            payer.0.holds.fetch_add(1, Ordering::Relaxed);
        }
        Self { payer, _permit: permit }
    }
}

impl Default for Hold {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        if let Some(payer) = &self.payer {
            payer.0.holds.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Why work on another thread has no result.
#[derive(Debug)]
pub struct WorkError {
    /// The panic; `None` if the service is stopping.
    pub panic: Option<Box<dyn Any + Send>>,
}

impl fmt::Display for WorkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.panic.is_some() { "it panicked" } else { "the service stops" })
    }
}

/// Does long work on a blocking thread, or in the throttled pool if the tenant takes more than its share.
///
/// # Errors
/// [`WorkError`].
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkError> {
    let (over, paid) = on_account(work);
    match over {
        Some(share) => in_pool(share, paid).await,
        None => result(tokio::task::spawn_blocking(paid).await.ok()),
    }
}

/// Does work on files of workspaces on a blocking thread. Their volume may hang: it blocks few threads then, and none
/// of the throttled pool.
///
/// # Errors
/// [`WorkError`].
pub async fn on_files<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, WorkError> {
    let (over, paid) = on_account(work);
    let own = match over {
        Some(share) => share.file_permit().await,
        None => None,
    };
    let place = FILES.acquire().await.ok(); // never closed
    let working = move || {
        let done = paid();
        drop((own, place));
        done
    };
    result(tokio::task::spawn_blocking(working).await.ok())
}

/// Work on the account of the current task, with its panics caught, and the share of its tenant, if it takes more
/// and the task holds nothing scarce.
fn on_account<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> (Option<Arc<Share>>, impl FnOnce() -> thread::Result<T> + Send + 'static) {
    let current = CpuAccount::current();
    let free = current.as_ref().filter(|payer| payer.is_free());
    let over = free.and_then(CpuAccount::share_if_over).cloned();
    let caught = move || catch_unwind(AssertUnwindSafe(work));
    let paid = move || match current {
        Some(payer) => payer.run_charged(caught),
        None => caught(),
    };
    (over, paid)
}

/// Waits for work that a thread of a library does, such as a query of the embedded database, and charges the time that
/// it says it took. It takes a thread of the throttled pool, if the tenant takes more than its share.
///
/// # Errors
/// [`WorkError`].
pub async fn charged<T: Send + 'static>(
    work: impl Future<Output = (T, Duration)> + Send + 'static,
) -> Result<T, WorkError> {
    let Some(payer) = CpuAccount::current() else { return Ok(work.await.0) };
    let over = payer.share_if_over().filter(|_| payer.is_free()).cloned();
    let Some(share) = over else {
        let _hold = Hold::of(Some(payer.clone()), None);
        let (done, took) = work.await;
        payer.charge(took);
        return Ok(done);
    };
    let waiting = move || {
        let done = catch_unwind(AssertUnwindSafe(|| Handle::current().block_on(work)));
        done.map(|(done, took)| {
            payer.charge(took);
            done
        })
    };
    in_pool(share, waiting).await
}

/// Does a job on a thread of the throttled pool.
async fn in_pool<T: Send + 'static>(
    share: Arc<Share>,
    job: impl FnOnce() -> thread::Result<T> + Send + 'static,
) -> Result<T, WorkError> {
    let (answer, done) = oneshot::channel();
    let handle = Handle::current();
    throttled_pool::push(
        share,
        Box::new(move || {
            let _entered = handle.enter();
            let _ = answer.send(job()); // the receiver may be gone
        }),
    );
    result(done.await.ok())
}

fn result<T>(done: Option<thread::Result<T>>) -> Result<T, WorkError> {
    done.map_or(Err(None), |done| done.map_err(Some)).map_err(|panic| WorkError { panic })
}

/// A future that is polled by the runtime, or in the throttled pool while its tenant takes more than its share.
pub struct FairTask<T>(Arc<Shared<T>>);

struct Shared<T> {
    payer: CpuAccount,
    state: Mutex<State<T>>,
}

type BoxedFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// The state of the future.
enum State<T> {
    Idle(BoxedFuture<T>),
    /// In the throttled pool, with the waker of the latest poll.
    InPool(Option<Waker>),
    Done(thread::Result<T>),
    /// The future has ended or was dropped.
    Gone,
}

impl<T: Send + 'static> FairTask<T> {
    pub fn new(payer: CpuAccount, future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Arc::new(Shared { payer, state: Mutex::new(State::Idle(Box::pin(future))) }))
    }
}

impl<T: Send + 'static> Future for FairTask<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let shared = &self.0;
        let mut state = shared.state.lock();
        match mem::replace(&mut *state, State::Gone) {
            State::Idle(mut future) => {
                let payer = &shared.payer;
                if let Some(share) = payer.share_if_over().filter(|_| payer.is_free()) {
                    *state = State::InPool(None);
                    drop(state);
                    let (shared, waker) = (Arc::clone(shared), context.waker().clone());
                    let handle = Handle::current();
                    throttled_pool::push(
                        Arc::clone(share),
                        Box::new(move || {
                            let _entered = handle.enter();
                            shared.poll_in_pool(future, waker);
                        }),
                    );
                    return Poll::Pending;
                }
                let polled = payer.run_charged(|| future.as_mut().poll(context));
                if polled.is_pending() {
                    *state = State::Idle(future);
                }
                polled
            }
            State::InPool(_) => {
                *state = State::InPool(Some(context.waker().clone()));
                Poll::Pending
            }
            State::Done(Ok(done)) => Poll::Ready(done),
            State::Done(Err(panic)) => resume_unwind(panic),
            State::Gone => Poll::Pending,
        }
    }
}

impl<T> Shared<T> {
    /// Polls the future on a thread of the throttled pool.
    fn poll_in_pool(&self, mut future: BoxedFuture<T>, waker: Waker) {
        if matches!(*self.state.lock(), State::Gone) {
            return;
        }
        let mut context = Context::from_waker(&waker);
        let poll = || self.payer.run_charged(|| future.as_mut().poll(&mut context));
        let polled = catch_unwind(AssertUnwindSafe(poll));
        let mut state = self.state.lock();
        let State::InPool(newer_waker) = &mut *state else { return };
        let newer_waker = newer_waker.take();
        let to_wake = match polled {
            Ok(Poll::Pending) => {
                *state = State::Idle(future);
                newer_waker
            }
            Ok(Poll::Ready(done)) => {
                *state = State::Done(Ok(done));
                newer_waker.or(Some(waker))
            }
            Err(panic) => {
                *state = State::Done(Err(panic));
                newer_waker.or(Some(waker))
            }
        };
        drop(state);
        if let Some(waker) = to_wake {
            waker.wake();
        }
    }
}

impl<T> Drop for FairTask<T> {
    fn drop(&mut self) {
        let unfinished = mem::replace(&mut *self.0.state.lock(), State::Gone);
        drop(unfinished);
    }
}

#[cfg(test)]
#[path = "fairness/fairness_tests.rs"]
mod tests;
