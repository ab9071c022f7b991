//! Processor time, fair between tenants.
//!
//! The requests and runs of a tenant are driven as [`Turns`], which count the time that each of their
//! polls takes ([`shares`]). While the processors are busy and several tenants are active, what belongs
//! to one that takes more than its share is polled by few threads beside those of the runtime, in turn
//! with others like it ([`lane`]): the other tenants' tasks find the runtime's threads free. Nothing is
//! refused, and a tenant that is alone has everything.
//!
//! A task that has a connection to the database is polled at once, also one of such a tenant: it would
//! keep it from others while it waits ([`Hold`]).

mod lane;
mod shares;

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
use std::time::Instant;

use parking_lot::Mutex;
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, oneshot};

use self::shares::Share;

/// Whose time a task takes; known from when its caller is.
#[derive(Debug, Clone, Default)]
pub struct CpuAccount(Arc<Account>);

#[derive(Debug, Default)]
struct Account {
    share: OnceLock<Arc<Share>>,
    /// What the task has that others wait for.
    holds: AtomicUsize,
}

thread_local! {
    /// Whose task this thread polls.
    static CURRENT: RefCell<Option<CpuAccount>> = const { RefCell::new(None) };
}

impl CpuAccount {
    pub fn tenant(tenant: &str) -> Self {
        let payer = Self::default();
        payer.set(tenant);
        payer
    }

    /// Takes note of the tenant; the first one counts.
    pub fn set(&self, tenant: &str) {
        self.0.share.get_or_init(|| shares::of(tenant));
    }

    /// Lets a task that has become known as one of a tenant with too much go on in the lane.
    pub async fn move_to_lane(&self) {
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

    /// Does something in the name of the task. A tenant that is alone is not counted.
    fn pays<T>(&self, work: impl FnOnce() -> T) -> T {
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
        if let Some(share) = self.0.share.get() {
            share.charge(begun);
        }
        done
    }
}

/// Whether the task of this thread is of a tenant that takes more than its share.
pub fn is_over() -> bool {
    CURRENT.with_borrow(|current| current.as_ref().is_some_and(|it| it.share_if_over().is_some()))
}

/// Says that its task has something that others wait for, as long as it lives: such a task is polled at
/// once.
#[derive(Debug)]
pub struct Hold {
    payer: Option<CpuAccount>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Hold {
    /// For what there is one of; at once.
    pub fn new() -> Self {
        Self::of(CpuAccount::current(), None)
    }

    /// For what there are few of, and which a tenant that takes more than its share cannot have all of:
    /// it waits for those that it has. A task that holds something already has no need to.
    pub async fn of_scarce() -> Self {
        let payer = CpuAccount::current();
        let over =
            payer.as_ref().filter(|payer| payer.is_free()).and_then(CpuAccount::share_if_over);
        let place = match over {
            Some(share) => share.place().await,
            None => None,
        };
        Self::of(payer, place)
    }

    fn of(payer: Option<CpuAccount>, place: Option<OwnedSemaphorePermit>) -> Self {
        if let Some(payer) = &payer {
            payer.0.holds.fetch_add(1, Ordering::Relaxed);
        }
        Self { payer, _place: place }
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

/// Why there is no result of work that was to be done on another thread.
#[derive(Debug)]
pub struct Failed {
    /// What it panicked with; `None` where the service stops.
    pub panic: Option<Box<dyn Any + Send>>,
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.panic.is_some() { "it panicked" } else { "the service stops" })
    }
}

/// Does work that takes long on a thread that may be blocked: in the lane where the tenant has taken
/// more than its share.
///
/// # Errors
/// [`Failed`].
pub async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failed> {
    let current = CpuAccount::current();
    let over = current.as_ref().and_then(CpuAccount::share_if_over).cloned();
    let caught = move || catch_unwind(AssertUnwindSafe(work));
    let paid = move || match current {
        Some(payer) => payer.pays(caught),
        None => caught(),
    };
    let Some(share) = over else {
        return result(tokio::task::spawn_blocking(paid).await.ok());
    };
    let (answer, done) = oneshot::channel();
    let handle = Handle::current();
    lane::push(
        share,
        Box::new(move || {
            let _entered = handle.enter();
            let _ = answer.send(paid()); // the receiver may be gone
        }),
    );
    result(done.await.ok())
}

fn result<T>(done: Option<thread::Result<T>>) -> Result<T, Failed> {
    done.map_or(Err(None), |done| done.map_err(Some)).map_err(|panic| Failed { panic })
}

/// A future that is polled when it is its tenant's turn.
pub struct Turns<T>(Arc<Turn<T>>);

struct Turn<T> {
    payer: CpuAccount,
    place: Mutex<Place<T>>,
}

type Task<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Where the future is.
enum Place<T> {
    Here(Task<T>),
    /// In the lane; with who has to be woken when it is back.
    Away(Option<Waker>),
    Done(thread::Result<T>),
    /// It has ended, or its task was dropped.
    Gone,
}

impl<T: Send + 'static> Turns<T> {
    pub fn new(payer: CpuAccount, future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Arc::new(Turn { payer, place: Mutex::new(Place::Here(Box::pin(future))) }))
    }
}

impl<T: Send + 'static> Future for Turns<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        let turn = &self.0;
        let mut place = turn.place.lock();
        match mem::replace(&mut *place, Place::Gone) {
            Place::Here(mut future) => {
                let payer = &turn.payer;
                if let Some(share) = payer.share_if_over().filter(|_| payer.is_free()) {
                    *place = Place::Away(None);
                    drop(place);
                    let (turn, waker) = (Arc::clone(turn), context.waker().clone());
                    let handle = Handle::current();
                    lane::push(
                        Arc::clone(share),
                        Box::new(move || {
                            let _entered = handle.enter();
                            turn.poll_in_lane(future, waker);
                        }),
                    );
                    return Poll::Pending;
                }
                let polled = payer.pays(|| future.as_mut().poll(context));
                if polled.is_pending() {
                    *place = Place::Here(future);
                }
                polled
            }
            Place::Away(_) => {
                *place = Place::Away(Some(context.waker().clone()));
                Poll::Pending
            }
            Place::Done(Ok(done)) => Poll::Ready(done),
            Place::Done(Err(panic)) => resume_unwind(panic),
            Place::Gone => Poll::Pending,
        }
    }
}

impl<T> Turn<T> {
    /// On a thread of the lane.
    fn poll_in_lane(&self, mut future: Task<T>, waker: Waker) {
        if matches!(*self.place.lock(), Place::Gone) {
            return;
        }
        let mut context = Context::from_waker(&waker);
        let poll = || self.payer.pays(|| future.as_mut().poll(&mut context));
        let polled = catch_unwind(AssertUnwindSafe(poll));
        let mut place = self.place.lock();
        let Place::Away(awaited) = &mut *place else { return };
        let awaited = awaited.take();
        let roused = match polled {
            Ok(Poll::Pending) => {
                *place = Place::Here(future);
                awaited
            }
            Ok(Poll::Ready(done)) => {
                *place = Place::Done(Ok(done));
                awaited.or(Some(waker))
            }
            Err(panic) => {
                *place = Place::Done(Err(panic));
                awaited.or(Some(waker))
            }
        };
        drop(place);
        if let Some(waker) = roused {
            waker.wake();
        }
    }
}

impl<T> Drop for Turns<T> {
    fn drop(&mut self) {
        let left = mem::replace(&mut *self.0.place.lock(), Place::Gone);
        drop(left);
    }
}

#[cfg(test)]
#[path = "fairness/fairness_tests.rs"]
mod tests;
