//! The process between the service and the programs: it outlives both, and ensures that no process
//! outlives a plan.
//!
//! Its standard input is a socket to the service. The plan arrives through it; the proxy's listening
//! socket, if there is one, and the report are sent back. When the service closes the socket or dies, the
//! supervisor ends all programs. It polls what the kernel does not limit: processes of the superuser,
//! memory of all programs together, and time. Without a namespace, orphaned processes become its children.

use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::RecvFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, waitpid};

use super::handles;
use super::network;
use super::plan::{MAX_PLAN, Plan, Report, Stopped};
use super::runner;
use super::syscalls::{Forked, close_others, enter_namespaces, exit_now, fork};
use super::tree::{end_descendants, usage_of};
use crate::tools::removal::remove_path;

/// When the resource usage of programs is first polled, and the later interval.
const FIRST_LOOK: Duration = Duration::from_millis(5);
const LATER_LOOKS: Duration = Duration::from_millis(100);

/// The exit code where programs have ended the runner: that of a process that was killed.
const LOST: i32 = 128 + 9;

/// The main function of a supervisor, whose socket is its standard input.
pub(super) fn supervise() -> io::Result<()> {
    close_others()?;
    rustix::process::setsid()?;
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))?;
    let (mut plan, input) = receive()?;
    let made = if plan.namespaces { own_namespaces(plan.network) } else { Ok(()) };
    let report = if let Err(error) = made {
        Report { failure: Some(format!("namespaces: {error}")), ..Report::default() }
    } else {
        let own_temporary = (!plan.namespaces).then(|| private_directory(&plan.temporary));
        if let Some(directory) = own_temporary.transpose()? {
            replace_temporary(&mut plan, directory);
        }
        if plan.is_spoken_to && !plan.network {
            let _ = write_all(rustix::stdio::stdin(), network::BEGINS); // its end is seen below
        }
        let report = programs(&plan, input);
        if !plan.namespaces {
            end_descendants();
            let _ = remove_path(Path::new(&plan.temporary));
        }
        report?
    };
    let text = serde_json::to_vec(&report)?;
    write_all(rustix::stdio::stdin(), &text)
}

/// The plan, after its length in four bytes. The directory that came with them becomes this
/// process's working directory. The input follows if the programs read any.
fn receive() -> io::Result<(Plan, Option<OwnedFd>)> {
    let mut socket = Socket;
    let mut length = [0; 4];
    let handle = handles::receive(rustix::stdio::stdin(), &mut length, RecvFlags::WAITALL)?;
    let directory = handle.ok_or(io::ErrorKind::InvalidData)?;
    rustix::process::fchdir(&directory)?;
    let length = u32::from_be_bytes(length) as usize;
    if length > MAX_PLAN {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut text = vec![0; length];
    socket.read_exact(&mut text)?;
    let plan: Plan = serde_json::from_slice(&text)?;
    let input = if plan.is_spoken_to {
        let input = handles::receive(rustix::stdio::stdin(), &mut [0], RecvFlags::WAITALL)?;
        Some(input.ok_or(io::ErrorKind::InvalidData)?)
    } else {
        None
    };
    Ok((plan, input))
}

/// This process's standard input without a buffer.
struct Socket;

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(rustix::stdio::stdin(), into)?)
    }
}

fn write_all(to: impl AsFd, mut text: &[u8]) -> io::Result<()> {
    while !text.is_empty() {
        match rustix::io::write(&to, text) {
            Ok(written) => text = &text[written..],
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Enters namespaces in which only this user exists, with the same id; with `has_network`, also one whose
/// only network is the proxy.
fn own_namespaces(has_network: bool) -> io::Result<()> {
    let (user, group) = (rustix::process::geteuid(), rustix::process::getegid());
    enter_namespaces(has_network)?;
    let same = |id: u32| format!("{id} {id} 1");
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/uid_map", same(user.as_raw()))?;
    std::fs::write("/proc/self/gid_map", same(group.as_raw()))?;
    if has_network { network::send_listener() } else { Ok(()) }
}

/// A directory that exists for one plan.
fn private_directory(base: &str) -> io::Result<String> {
    let own = format!("{base}/{}", rustix::process::getpid().as_raw_nonzero());
    let _ = remove_path(Path::new(&own)); // of another process of that number, long gone
    rustix::fs::mkdir(own.as_str(), rustix::fs::Mode::from_raw_mode(0o700))?;
    Ok(own)
}

fn replace_temporary(plan: &mut Plan, directory: String) {
    for (_, value) in &mut plan.environment {
        if *value == plan.temporary {
            value.clone_from(&directory);
        }
    }
    plan.temporary = directory;
}

/// Starts the runner and monitors it until it ends or must be ended.
fn programs(plan: &Plan, input: Option<OwnedFd>) -> io::Result<Report> {
    let (reads, writes) = pipe_with(PipeFlags::CLOEXEC)?;
    let runner = match fork()? {
        Forked::Parent(runner) => runner,
        Forked::Child => {
            drop(reads);
            // The socket is the supervisor's alone: where it is closed, the service sees the end.
            if rustix::stdio::dup2_stdin(&writes).is_ok() {
                let report = runner::run(plan, input);
                let _ = serde_json::to_vec(&report).map(|text| write_all(&writes, &text));
            }
            exit_now(0);
        }
    };
    drop(writes);
    drop(input);
    let stopped = watched(plan, runner, &reads);
    // All at once, so that none of them can start another one in the meantime.
    let _ = kill_process_group(runner, Signal::KILL);
    let _ = kill_process(runner, Signal::KILL);
    if !matches!(stopped, Ok(None)) && !plan.namespaces {
        end_descendants();
    }
    while let Err(rustix::io::Errno::INTR) = waitpid(Some(runner), WaitOptions::empty()) {}
    let Some(stopped) = stopped? else {
        let mut text = Vec::new();
        std::fs::File::from(reads).take(MAX_PLAN as u64).read_to_end(&mut text)?;
        // Without a namespace a program can end the runner, and nothing beyond it.
        let lost = |_| Report { exit_code: Some(LOST), ..Report::default() };
        return Ok(serde_json::from_slice(&text).unwrap_or_else(lost));
    };
    Ok(Report { stopped: Some(stopped), ..Report::default() })
}

/// Why programs have to be ended; `None` where they are done.
fn watched(plan: &Plan, runner: Pid, report: &OwnedFd) -> io::Result<Option<Stopped>> {
    let end = Instant::now() + Duration::from_millis(plan.timeout_ms);
    let mut pause = FIRST_LOOK;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        let wait = Timespec::try_from(pause.min(left)).map_err(io::Error::other)?;
        let service = rustix::stdio::stdin();
        let mut sources =
            [PollFd::new(report, PollFlags::IN), PollFd::from_borrowed_fd(service, PollFlags::IN)];
        match poll(&mut sources, Some(&wait)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        if !sources[1].revents().is_empty() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        if !sources[0].revents().is_empty() {
            return Ok(None);
        }
        if left.is_zero() {
            return Ok(Some(Stopped::Timeout));
        }
        let usage = usage_of(runner, plan.limits.processes.saturating_add(2));
        if usage.memory > plan.limits.memory {
            return Ok(Some(Stopped::Memory));
        }
        // The runner is one of them.
        if usage.tasks > plan.limits.processes.saturating_add(1) {
            return Ok(Some(Stopped::Processes));
        }
        pause = (pause * 2).min(LATER_LOOKS);
    }
}
