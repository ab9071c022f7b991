//! The binary: allocator, tokio runtime and command line.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime.block_on(toolloop::cli::run(std::env::args_os())),
        Err(error) => {
            eprintln!("toolloop: cannot start the async runtime: {error}");
            ExitCode::FAILURE
        }
    }
}
