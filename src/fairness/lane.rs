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

static LANE: LazyLock<Lane> = LazyLock::new(Lane::begin);

struct Lane {
    lines: Arc<Lines>,
    has_threads: bool,
}

struct Lines {
    all: Mutex<VecDeque<Line>>,
    grew: Condvar,
    /// Jobs of one tenant that run at the same time.
    at_once: usize,
}

/// The queue of one tenant.
struct Line {
    share: Arc<Share>,
    waiting: VecDeque<Job>,
    under_way: usize,
}

/// Adds a job.
pub(super) fn push(share: Arc<Share>, job: Job) {
    if LANE.has_threads {
        LANE.lines.push(share, job);
    } else {
        job();
    }
}

impl Lane {
    fn begin() -> Self {
        let processors = shares::processors();
        let lines = Arc::new(Lines::new(shares::at_once()));
        let begun = (0..processors * THREADS).filter(|_| {
            let lines = Arc::clone(&lines);
            let thread = thread::Builder::new().name("over-share".to_owned());
            thread.spawn(move || lines.work()).is_ok()
        });
        let has_threads = begun.count() > 0;
        Self { lines, has_threads }
    }
}

impl Lines {
    fn new(at_once: usize) -> Self {
        Self { all: Mutex::default(), grew: Condvar::new(), at_once }
    }

    fn push(&self, share: Arc<Share>, job: Job) {
        let mut lines = self.all.lock();
        match lines.iter_mut().find(|line| Arc::ptr_eq(&line.share, &share)) {
            Some(line) => line.waiting.push_back(job),
            None => lines.push_back(Line { share, waiting: [job].into(), under_way: 0 }),
        }
        self.grew.notify_one();
    }

    fn work(&self) {
        loop {
            let (share, job) = self.next();
            // The job reports its result itself; dropping its values may panic, too.
            let _ = catch_unwind(AssertUnwindSafe(job));
            self.done(&share);
        }
    }

    /// Waits for the next job.
    fn next(&self) -> (Arc<Share>, Job) {
        let mut lines = self.all.lock();
        loop {
            if let Some(next) = taken(&mut lines, self.at_once) {
                return next;
            }
            self.grew.wait(&mut lines);
        }
    }

    fn done(&self, share: &Arc<Share>) {
        let mut lines = self.all.lock();
        if let Some(line) = lines.iter_mut().find(|line| Arc::ptr_eq(&line.share, share)) {
            line.under_way -= 1;
        }
        lines.retain(|line| line.under_way > 0 || !line.waiting.is_empty());
    }
}

/// The first job of the first tenant below its limit; that tenant moves to the end.
fn taken(lines: &mut VecDeque<Line>, at_once: usize) -> Option<(Arc<Share>, Job)> {
    let may = |line: &Line| line.under_way < at_once && !line.waiting.is_empty();
    let mut line = lines.remove(lines.iter().position(may)?)?;
    let job = line.waiting.pop_front();
    line.under_way += usize::from(job.is_some());
    let share = Arc::clone(&line.share);
    lines.push_back(line);
    Some((share, job?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenants_take_turns_and_each_has_few_at_the_same_time() {
        let (done, lines) = (Arc::new(Mutex::new(Vec::new())), Lines::new(1));
        let (first, second) = (Arc::<Share>::default(), Arc::<Share>::default());
        let job = |name: &'static str| -> Job {
            let done = Arc::clone(&done);
            Box::new(move || done.lock().push(name))
        };
        for name in ["a1", "a2", "a3"] {
            lines.push(Arc::clone(&first), job(name));
        }
        lines.push(Arc::clone(&second), job("b1"));
        let (of_first, job) = lines.next();
        job();
        let (of_second, job) = lines.next();
        job();
        assert!(taken(&mut lines.all.lock(), 1).is_none(), "each has one under way");
        lines.done(&of_second);
        assert_eq!(lines.all.lock().len(), 1);
        lines.done(&of_first);
        lines.next().1();
        assert_eq!(*done.lock(), ["a1", "b1", "a2"]);
    }
}
