//! The process that supervisors are copies of.
//!
//! It is this binary, started once and then forked for each plan: a start would spend milliseconds
//! on loading and relocating what the service needs and a supervisor does not. It has one thread,
//! reads no plan, and ends when the service closes its socket; supervisors go on by themselves.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::process::ExitCode;

use rustix::net::RecvFlags;

use super::handles;
use super::supervisor::supervise;
use super::syscalls::{
    Forked, close_others, exit_now, fork, ignore_ends_of_children, reset_signal,
};

/// What a request for a supervisor consists of, beside its [`Streams`].
const REQUEST: &[u8] = b"s";

/// The standard streams of a supervisor: the socket that its plan comes through, and where programs
/// write.
pub(super) struct Streams<T> {
    pub socket: T,
    pub stdout: T,
    pub stderr: T,
}

/// Asks for a supervisor.
pub(super) fn request(server: BorrowedFd<'_>, streams: &Streams<BorrowedFd<'_>>) -> io::Result<()> {
    handles::send(server, REQUEST, &[streams.socket, streams.stdout, streams.stderr])
}

/// The main function of the fork server, whose requests come through its standard input.
pub fn serve_forks() -> ExitCode {
    match served() {
        Err(error) if error.kind() != io::ErrorKind::UnexpectedEof => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    }
}

fn served() -> io::Result<()> {
    close_others()?;
    rustix::process::setsid()?;
    ignore_ends_of_children();
    loop {
        let streams = requested()?;
        match fork() {
            Ok(Forked::Child) => {
                reset_signal(libc::SIGCHLD);
                exit_now(i32::from(become_supervisor(streams).is_err()));
            }
            // Where there is no copy, the service sees the end of the socket.
            Ok(Forked::Parent(_)) | Err(_) => {}
        }
    }
}

fn requested() -> io::Result<Streams<OwnedFd>> {
    let mut request = [0; REQUEST.len()];
    let stdin = rustix::stdio::stdin();
    let mut handles =
        handles::receive_several(stdin, &mut request, RecvFlags::WAITALL)?.into_iter();
    let mut next = || handles.next().ok_or(io::Error::from(io::ErrorKind::InvalidData));
    Ok(Streams { socket: next()?, stdout: next()?, stderr: next()? })
}

fn become_supervisor(streams: Streams<OwnedFd>) -> io::Result<()> {
    rustix::stdio::dup2_stdin(&streams.socket)?;
    rustix::stdio::dup2_stdout(&streams.stdout)?;
    rustix::stdio::dup2_stderr(&streams.stderr)?;
    drop(streams);
    supervise()
}
