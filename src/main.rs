//! The binary: allocator, tokio runtime and command line; or the supervisor of sandboxed programs,
//! or the reader of a PDF document, which need neither of the last two.

use std::process::ExitCode;

use toolloop::tools::pdf;
use toolloop::tools::sandbox;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// `mi_option_purge_delay` of mimalloc.h, which the crate does not name: the milliseconds after which
/// freed memory is given back to the system.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;

/// Has the allocator give freed memory back at once: a few requests of a megabyte would otherwise
/// leave hundreds of them with the process. `MIMALLOC_PURGE_DELAY` in the environment has precedence.
#[expect(unsafe_code, reason = "the allocator has no safe interface to its options")]
fn give_memory_back() {
    // SAFETY: The function checks the number of the option and writes a number into a static table.
    // No other thread exists yet that could read it.
    unsafe { libmimalloc_sys::mi_option_set_default(PURGE_DELAY, 0) }
}

fn main() -> ExitCode {
    give_memory_back();
    if std::env::args_os().nth(1).is_some_and(|command| command == sandbox::SUPERVISOR) {
        return sandbox::supervise();
    }
    if std::env::args_os().nth(1).is_some_and(|command| command == pdf::READER) {
        return pdf::reader();
    }
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(toolloop::cli::run(std::env::args_os())),
        Err(error) => {
            eprintln!("toolloop: cannot start the async runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
