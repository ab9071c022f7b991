//! The binary: allocator, tokio runtime and command line; or the supervisor of sandboxed programs,
//! which needs neither of the last two.

use std::process::ExitCode;

use toolloop::tools::sandbox;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    if std::env::args_os().nth(1).is_some_and(|command| command == sandbox::SUPERVISOR) {
        return sandbox::supervise();
    }
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(toolloop::cli::run(std::env::args_os())),
        Err(error) => {
            eprintln!("toolloop: cannot start the async runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
