//! The process that the programs of a plan are children of: it confines itself, and so all of them,
//! then runs the steps one after another and says how the last one ended.
//!
//! It is the first process of its namespace where there is one, so that its end is the end of all.
//! When to end early is the supervisor's to decide.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Signal, WaitOptions, waitpid};

use super::confinement::{drop_capabilities, landlock, limit, limit_program, open};
use super::mounts;
use super::plan::{
    Command, GrantKind, Holds, Level, PROXY_PORT, Plan, Redirection, Report, Step, Stopped, Target,
    When,
};
use super::seccomp::refuse_calls;
use super::syscalls::{Forked, exec, exit_now, fork, reset_signal};

/// Exit codes of shells: not found, found but not executable, ended by a signal.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;
const SIGNALLED: i32 = 128;

/// How a step ended.
#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    code: i32,
    signal: Option<i32>,
}

/// Runs a plan in this process, which is given up for it.
pub(super) fn run(plan: &Plan) -> Report {
    let mut report = Report::default();
    let input = match prepare(plan, &mut report.holds) {
        Ok(input) => input,
        Err(failure) => {
            report.failure = Some(failure);
            return report;
        }
    };
    if report.holds.level() < plan.at_least {
        report.failure = Some(format!("this machine holds programs only so: {:?}", report.holds));
        return report;
    }
    match steps(plan, input) {
        Ok(ended) => {
            report.exit_code = Some(ended.code);
            report.stopped = match ended.signal {
                Some(libc::SIGXCPU) => Some(Stopped::CpuSeconds),
                Some(libc::SIGXFSZ) => Some(Stopped::FileSize),
                _ => None,
            };
        }
        Err(error) => report.failure = Some(error.to_string()),
    }
    report
}

/// Confines this process. Answers what the first program reads.
fn prepare(plan: &Plan, holds: &mut Holds) -> Result<OwnedFd, String> {
    let said = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("the supervisor's death: {error}"))?;
    rustix::process::umask(Mode::from_raw_mode(0o077));
    let _ = rustix::process::nice(5);
    let input = input(plan).map_err(said("the input"))?;
    make_trees(plan).map_err(said("a directory that may be written"))?;
    let mut reached = open(&plan.reach.grants).map_err(said("what may be reached"))?;
    if plan.namespaces {
        // Best effort: the supervisor counts where the kernel does not.
        let _ =
            std::fs::write("/proc/sys/kernel/pid_max", (301 + plan.limits.processes).to_string());
        mounts::set_up(plan, &reached).map_err(said("mounts"))?;
        holds.namespaces = true;
        holds.network = plan.network;
    }
    let own = super::plan::Access { read: true, write: true, execute: false };
    let temporary = rustix::fs::open(plan.temporary.as_str(), OFlags::PATH, Mode::empty());
    if let Ok(handle) = temporary {
        reached.push(super::confinement::Reached { handle, access: own, kind: GrantKind::Tree });
    }
    enter(&plan.directory).map_err(said("the directory to start in"))?;
    let counts_processes = plan.namespaces && !rustix::process::geteuid().is_root();
    limit(&plan.limits, counts_processes).map_err(said("limits"))?;
    drop_capabilities().map_err(said("capabilities"))?;
    let port = holds.network.then_some(PROXY_PORT);
    holds.landlock = landlock(&reached, port).map_err(|error| format!("Landlock: {error}"))?;
    holds.seccomp = match refuse_calls(!plan.namespaces, holds.network) {
        Ok(()) => true,
        Err(_) if plan.at_least < Level::Enforced => false,
        Err(error) => return Err(format!("seccomp: {error}")),
    };
    Ok(input)
}

/// The input as a file in memory, or nothing.
fn input(plan: &Plan) -> io::Result<OwnedFd> {
    let Some(text) = &plan.input else {
        return Ok(rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?);
    };
    let memory = rustix::fs::memfd_create(c"input", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut file = File::from(memory);
    file.write_all(text.as_bytes())?;
    rustix::fs::seek(&file, rustix::fs::SeekFrom::Start(0))?;
    Ok(file.into())
}

/// Directories beneath the workspace that may be written are there, as rules name them.
fn make_trees(plan: &Plan) -> io::Result<()> {
    let trees = plan.reach.grants.iter().filter(|grant| {
        grant.kind == GrantKind::Tree && grant.access.write && !grant.path.starts_with('/')
    });
    for grant in trees {
        let mut holder: Option<OwnedFd> = None;
        for name in grant.path.split('/').filter(|name| *name != ".") {
            let at = holder.as_ref().map_or(rustix::fs::CWD, AsFd::as_fd);
            match rustix::fs::mkdirat(at, name, Mode::from_raw_mode(0o700)) {
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
            let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            holder = Some(rustix::fs::openat(at, name, flags, Mode::empty())?);
        }
    }
    Ok(())
}

fn enter(directory: &str) -> io::Result<()> {
    Ok(rustix::process::fchdir(super::confinement::open_path(directory)?)?)
}

fn steps(plan: &Plan, input: OwnedFd) -> io::Result<Ended> {
    let mut last = Ended::default();
    let mut input = Some(input);
    for Step { when, negated, commands } in &plan.steps {
        let runs = match when {
            When::Always => true,
            When::Succeeded => last.code == 0,
            When::Failed => last.code != 0,
        };
        if runs {
            last = pipeline(plan, commands, input.take())?;
            if *negated {
                last.code = i32::from(last.code == 0);
            }
        }
    }
    Ok(last)
}

/// Runs programs at the same time, each reading what the one before it writes; waits for all.
fn pipeline(plan: &Plan, commands: &[Command], first: Option<OwnedFd>) -> io::Result<Ended> {
    let nothing = || rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
    let mut reads = match first {
        Some(input) => input,
        None => nothing()?,
    };
    let mut started: Vec<Pid> = Vec::new();
    for (index, command) in commands.iter().enumerate() {
        let is_last = index + 1 == commands.len();
        let pipe = if is_last { None } else { Some(pipe_with(PipeFlags::CLOEXEC)?) };
        let (next, writes) = pipe.unzip();
        match fork()? {
            Forked::Parent(pid) => started.push(pid),
            Forked::Child => {
                let (code, error) = become_program(plan, command, &reads, writes.as_ref());
                let _ = writeln!(io::stderr(), "{}: {error}", command.program);
                exit_now(code);
            }
        }
        if let Some(next) = next {
            reads = next;
        }
    }
    drop(reads);
    let last = started.last().copied();
    let killed = Signal::KILL.as_raw();
    let mut ended = Ended { code: SIGNALLED + killed, signal: Some(killed) };
    while !started.is_empty() {
        // Orphans of the programs fall to this process and are collected on the way.
        match waitpid(None, WaitOptions::empty()) {
            Ok(Some((pid, status))) => {
                if Some(pid) == last {
                    ended = match (status.exit_status(), status.terminating_signal()) {
                        (Some(code), _) => Ended { code, signal: None },
                        (None, signal) => Ended { code: SIGNALLED + signal.unwrap_or(0), signal },
                    };
                }
                started.retain(|waited| *waited != pid);
            }
            Ok(None) | Err(rustix::io::Errno::INTR) => {}
            // Nothing is left to wait for: what had not told its end was taken away.
            Err(rustix::io::Errno::CHILD) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(ended)
}

/// Answers only where it failed, with the code to exit with.
fn become_program(
    plan: &Plan,
    command: &Command,
    reads: &OwnedFd,
    writes: Option<&OwnedFd>,
) -> (i32, io::Error) {
    let prepared = || -> io::Result<(CString, Vec<CString>, Vec<CString>)> {
        // The runtime ignores it for itself; programs in pipes rely on it.
        reset_signal(libc::SIGPIPE);
        rustix::stdio::dup2_stdin(reads)?;
        if let Some(writes) = writes {
            rustix::stdio::dup2_stdout(writes)?;
        }
        command.redirections.iter().try_for_each(redirect)?;
        limit_program(&plan.limits)?;
        let text = |text: &str| CString::new(text).map_err(io::Error::other);
        let program = text(&command.program)?;
        let arguments = command.arguments.iter().map(|a| text(a)).collect::<Result<_, _>>()?;
        let own = |name: &str| command.environment.iter().any(|(other, _)| other == name);
        let shared = plan.environment.iter().filter(|(name, _)| !own(name));
        let environment = shared.chain(&command.environment);
        let environment = environment.map(|(name, value)| text(&format!("{name}={value}")));
        Ok((program, arguments, environment.collect::<Result<_, _>>()?))
    };
    match prepared() {
        Ok((program, arguments, environment)) => {
            let error = exec(&program, &arguments, &environment);
            let code = match error.kind() {
                io::ErrorKind::NotFound => NOT_FOUND,
                _ => NOT_EXECUTABLE,
            };
            (code, error)
        }
        Err(error) => (1, error),
    }
}

fn redirect(redirection: &Redirection) -> io::Result<()> {
    let opened = |path: &str, flags: OFlags| -> io::Result<OwnedFd> {
        // A pipe without another end must not hold the step up.
        let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{path}: {e}")))?;
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
        Ok(file)
    };
    let write = OFlags::WRONLY | OFlags::CREATE;
    let file = match &redirection.to {
        Target::Read(path) => opened(path, OFlags::RDONLY)?,
        Target::Write(path) => opened(path, write | OFlags::TRUNC)?,
        Target::Append(path) => opened(path, write | OFlags::APPEND)?,
        Target::Stream(other) => match other {
            0 => rustix::io::dup(rustix::stdio::stdin())?,
            1 => rustix::io::dup(rustix::stdio::stdout())?,
            _ => rustix::io::dup(rustix::stdio::stderr())?,
        },
    };
    match redirection.stream {
        0 => rustix::stdio::dup2_stdin(&file)?,
        1 => rustix::stdio::dup2_stdout(&file)?,
        _ => rustix::stdio::dup2_stderr(&file)?,
    }
    Ok(())
}
