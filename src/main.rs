//! The binary: allocator, tokio runtime and command line; or the process that supervisors of
//! sandboxed programs are copies of, or the reader of a PDF document, which need neither of the last two.

use std::process::ExitCode;
use std::time::Duration;

use toolloop::tools::pdf;
use toolloop::tools::sandbox;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Options of mimalloc.h that the crate does not name: the milliseconds after which freed memory is
/// given back to the system, and how many times that a whole run of free pages is kept.
const PURGE_DELAY: libmimalloc_sys::mi_option_t = 15;
const ARENA_PURGE_MULT: libmimalloc_sys::mi_option_t = 24;

/// Long enough to use memory again within one request without a page fault; several requests of
/// megabytes would leave hundreds of them with a process that kept it for longer.
const KEPT_MILLISECONDS: std::ffi::c_long = 1;
const KEPT_TIMES: std::ffi::c_long = 2;
/// Bytes from which on the C library, which serves SQLite, gives freed memory back at once.
#[cfg(target_env = "gnu")]
const MAX_KEPT_BY_C: std::ffi::c_int = 128 * 1024;

/// How often the process looks whether freed memory is due, since the allocator does so only when
/// it allocates.
const PURGE_INTERVAL: Duration = Duration::from_secs(1);

/// How long a start takes at most, as a rule.
const START: Duration = Duration::from_secs(5);

/// `MIMALLOC_PURGE_DELAY` and `MIMALLOC_ARENA_PURGE_MULT` in the environment have precedence.
#[expect(unsafe_code, reason = "the allocators have no safe interface to their options")]
fn limit_kept_memory() {
    // SAFETY: The functions check the number of the option and write a number into a static table.
    // No other thread exists yet that could read it.
    unsafe {
        libmimalloc_sys::mi_option_set_default(PURGE_DELAY, KEPT_MILLISECONDS);
        libmimalloc_sys::mi_option_set_default(ARENA_PURGE_MULT, KEPT_TIMES);
    }
    // SAFETY: As above. One arena is enough for the few threads of SQLite; each further one keeps
    // what it once needed.
    #[cfg(target_env = "gnu")]
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, 1);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAX_KEPT_BY_C);
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAX_KEPT_BY_C);
    }
}

/// Once the start is over, gives back the memory of code and constants that only the start has needed. What is needed again comes
/// from the file's cache.
#[expect(unsafe_code, reason = "memory is given back by its address")]
async fn forget_start() {
    tokio::time::sleep(START).await;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let Ok(program) = std::env::current_exe() else { return };
    let is_constant = |line: &&str| {
        (line.contains(" r-xp ") || line.contains(" r--p 00000000 "))
            && line.ends_with(&*program.to_string_lossy())
    };
    for line in maps.lines().filter(is_constant) {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        let Some((start, end)) = range else { continue };
        let address = |text| usize::from_str_radix(text, 16);
        let (Ok(start), Ok(end)) = (address(start), address(end)) else { continue };
        // SAFETY: The pages are a file's, and nothing can write to them: they are the same when they are read again.
        unsafe {
            libc::madvise(
                std::ptr::with_exposed_provenance_mut(start),
                end - start,
                libc::MADV_DONTNEED,
            )
        };
    }
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
    limit_kept_memory();
    if std::env::args_os().nth(1).is_some_and(|command| command == sandbox::FORK_SERVER) {
        return sandbox::serve_forks();
    }
    if std::env::args_os().nth(1).is_some_and(|command| command == pdf::READER) {
        return pdf::reader();
    }
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => {
            runtime.spawn(purge_regularly());
            runtime.spawn(forget_start());
            runtime.block_on(toolloop::cli::run(std::env::args_os()))
        }
        Err(error) => {
            eprintln!("toolloop: cannot start the async runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
