//! The threads for tenants that take more than their share.
//!
//! Each such tenant has a queue of its own, and the queues are served round-robin. At most half as many jobs of a
//! tenant run at the same time as there are processors. The threads have the normal priority: threads that they
//! start, including those of the runtime, would inherit a lower one.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, LazyLock};
use std::thread;

use parking_lot::{Condvar, Mutex};

use super::shares::{self, Share};

/// Threads per processor; more than one, because all jobs of one tenant may be blocked.
const THREADS: usize = 4;

pub(super) type Job = Box<dyn FnOnce() + Send>;

static POOL: LazyLock<ThrottledPool> = LazyLock::new(ThrottledPool::begin);

struct ThrottledPool {
    queues: Arc<TenantQueues>,
    has_threads: bool,
}

struct TenantQueues {
    all: Mutex<VecDeque<TenantQueue>>,
    job_added: Condvar,
    /// Jobs of one tenant that run at the same time.
    max_running: usize,
}

/// The queue of one tenant.
struct TenantQueue {
    share: Arc<Share>,
    waiting: VecDeque<Job>,
    running: usize,
}

/// Adds a job.
pub(super) fn push(share: Arc<Share>, job: Job) {
    if POOL.has_threads {
        POOL.queues.push(share, job);
    } else {
        job();
    }
}

impl ThrottledPool {
    fn begin() -> Self {
        let processors = shares::processors();
        let queues = Arc::new(TenantQueues::new(shares::max_concurrency()));
        let begun = (0..processors * THREADS).filter(|_| {
            let queues = Arc::clone(&queues);
            let thread = thread::Builder::new().name("over-share".to_owned());
            thread.spawn(move || queues.run_jobs()).is_ok()
        });
        let has_threads = begun.count() > 0;
        Self { queues, has_threads }
    }
}

impl TenantQueues {
    fn new(max_running: usize) -> Self {
        Self { all: Mutex::default(), job_added: Condvar::new(), max_running }
    }

    fn push(&self, share: Arc<Share>, job: Job) {
        let mut queues = self.all.lock();
        match queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.share, &share)) {
            Some(queue) => queue.waiting.push_back(job),
            None => queues.push_back(TenantQueue { share, waiting: [job].into(), running: 0 }),
        }
        self.job_added.notify_one();
    }

    fn run_jobs(&self) {
        loop {
            let (share, job) = self.next();
            // The job reports its result itself; dropping its values may panic, too.
            let _ = catch_unwind(AssertUnwindSafe(job));
            self.finish(&share);
        }
    }

    /// Waits for the next job.
    fn next(&self) -> (Arc<Share>, Job) {
        let mut queues = self.all.lock();
        loop {
            if let Some(next) = take_next(&mut queues, self.max_running) {
                return next;
            }
            self.job_added.wait(&mut queues);
        }
    }

    fn finish(&self, share: &Arc<Share>) {
        let mut queues = self.all.lock();
        if let Some(queue) = queues.iter_mut().find(|queue| Arc::ptr_eq(&queue.share, share)) {
            queue.running -= 1;
        }
        queues.retain(|queue| queue.running > 0 || !queue.waiting.is_empty());
    }
}

/// The first job of the first tenant below its limit; that tenant moves to the end.
fn take_next(queues: &mut VecDeque<TenantQueue>, max_running: usize) -> Option<(Arc<Share>, Job)> {
    let may = |queue: &TenantQueue| queue.running < max_running && !queue.waiting.is_empty();
    let mut queue = queues.remove(queues.iter().position(may)?)?;
    let job = queue.waiting.pop_front();
    queue.running += usize::from(job.is_some());
    let share = Arc::clone(&queue.share);
    queues.push_back(queue);
    Some((share, job?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_are_served_round_robin_and_each_has_few_running_jobs() {
        let (done, queues) = (Arc::new(Mutex::new(Vec::new())), TenantQueues::new(1));
        let (first, second) = (Arc::<Share>::default(), Arc::<Share>::default());
        let job = |name: &'static str| -> Job {
            let done = Arc::clone(&done);
            Box::new(move || done.lock().push(name))
        };
        for name in ["a1", "a2", "a3"] {
            queues.push(Arc::clone(&first), job(name));
        }
        queues.push(Arc::clone(&second), job("b1"));
        let (of_first, job) = queues.next();
        job();
        let (of_second, job) = queues.next();
        job();
        assert!(take_next(&mut queues.all.lock(), 1).is_none(), "each has one under way");
        queues.finish(&of_second);
        assert_eq!(queues.all.lock().len(), 1);
        queues.finish(&of_first);
        queues.next().1();
        assert_eq!(*done.lock(), ["a1", "b1", "a2"]);
    }
}
