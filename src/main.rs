//! The binary: allocator, tokio runtime and command line; or the process that supervisors of
//! sandboxed programs are copies of, or the reader of a PDF document, which need neither of the last two.

use std::process::ExitCode;
use std::time::Duration;

use toolloop::tools::pdf;
use toolloop::tools::sandbox;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, which the crate does not name: the milliseconds after which
/// freed memory is given back to the system.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Long enough for a busy process to use freed memory again without a page fault; several requests
/// of megabytes would leave hundreds of them with a process that kept it for longer.
const KEPT_MILLISECONDS: std::ffi::c_long = 10;

/// How often the process looks whether freed memory is due, since the allocator does so only when
/// it allocates.
const PURGE_INTERVAL: Duration = Duration::from_secs(1);

/// `MIMALLOC_PURGE_DELAY` in the environment has precedence.
#[expect(unsafe_code, reason = "the allocator has no safe interface to its options")]
fn set_purge_delay() {
    // SAFETY: The function checks the number of the option and writes a number into a static table.
    // No other thread exists yet that could read it.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, KEPT_MILLISECONDS) }
}

#[expect(unsafe_code, reason = "the allocator has no safe interface for it")]
async fn purge_regularly() {
    let mut ticks = toolloop::clock::every(PURGE_INTERVAL);
    loop {
        ticks.tick().await;
        // SAFETY: It may be called on any thread at any time.
        unsafe { libmimalloc_sys::mi_collect(false) }
    }
}

fn main() -> ExitCode {
    set_purge_delay();
    if std::env::args_os().nth(1).is_some_and(|command| command == sandbox::FORK_SERVER) {
        return sandbox::serve_forks();
    }
    if std::env::args_os().nth(1).is_some_and(|command| command == pdf::READER) {
        return pdf::reader();
    }
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            runtime.spawn(purge_regularly());
            runtime.block_on(toolloop::cli::run(std::env::args_os()))
        }
        Err(error) => {
            eprintln!("toolloop: cannot start the async runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
