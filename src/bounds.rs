//! Parsers of untrusted input: addresses, globs, pages, patterns, schemas, templates, expressions,
//! YAML, names and texts of requests, models, tools, remote lists and files.
//!
//! Everything here bounds size, nesting, time and result, and refuses what exceeds a bound. The
//! libraries behind these parsers are called nowhere else. The callers decide what a refusal means.

pub mod address;
pub mod command_line;
pub mod expression;
pub mod frames;
pub mod glob;
pub mod html;
pub mod json;
pub mod key_locks;
pub mod memory;
pub mod mistakes;
pub mod name;
pub mod nearest;
pub mod networks;
pub mod parse_errors;
pub mod patch;
pub mod pattern;
pub mod retry_after;
pub mod schema;
pub mod secrets;
pub mod shared_answer;
pub mod tally;
pub mod template;
pub mod text;
pub mod yaml;

use std::panic::{AssertUnwindSafe, catch_unwind};

use tokio::runtime::{Handle, RuntimeFlavor};

/// Bytes of stack for work that may recurse deeply: parsers and evaluators use much of it.
const LARGE_STACK: usize = 32 * 1024 * 1024;
/// The nice value of threads for such work, which may take long: all other threads go first.
const NICE: i32 = 10;

/// Why something is refused: a phrase that follows its name, e.g. `is longer than 1024 bytes`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Runs work that may take long without blocking the other tasks of an async worker.
pub fn off_worker<T>(work: impl FnOnce() -> T) -> T {
    let is_worker = Handle::try_current()
        .is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if is_worker { tokio::task::block_in_place(work) } else { work() }
}

/// Runs work that may recurse deeply on a large stack; `None` if the thread fails.
fn on_large_stack<T: Send>(work: impl FnOnce() -> T + Send) -> Option<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(LARGE_STACK);
        let caught = || {
            let _ = rustix::process::setpriority_process(None, NICE); // of this thread alone
            catch_unwind(AssertUnwindSafe(work)).ok()
        };
        thread.spawn_scoped(scope, caught).ok()?.join().ok().flatten()
    })
}
