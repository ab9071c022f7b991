//! The parent process of the programs of a plan: it confines itself, and thereby all of them, then runs
//! the steps one after another and reports how the last one ended.
//!
//! In a namespace it is the first process, so that its end is the end of all. The supervisor decides
//! whether to end it early.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, Resource, Rlimit, Signal, WaitOptions, wait, waitpid};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::confinement::{drop_capabilities, landlock, limit, limit_program, open, read_only};
use super::mounts;
use super::plan::{
    Command, Confinement, GrantKind, PROXY_PORT, Plan, Redirection, Report, Step, Stopped, Target,
    When,
};
use super::seccomp::refuse_calls;
use super::syscalls::{Forked, exec, exit_now, fork, reset_signal};
use super::tree::tasks_of_user;
use crate::run::SandboxLevel;

/// Exit codes of shells: not found, found but not executable, ended by a signal.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;
const SIGNALLED: i32 = 128;

/// Tasks of other calls, and of the service, that may be added to those of its user while a call
/// lasts.
const TASKS_OF_OTHERS: u64 = 1024;
/// More than any kernel has.
const MOST_TASKS: u64 = 1 << 22;
/// The kernel version from which on `pid_max` is counted for each namespace.
const PID_MAX_OF_NAMESPACE: (u32, u32) = (6, 14);

/// What the programs of a plan get from the runner.
struct Prepared {
    /// What the first program reads.
    input: OwnedFd,
    /// The limit for all tasks of the user, if no namespace counts those of the programs.
    most_tasks: Option<u64>,
}

/// How a step ended.
#[derive(Debug, Clone, Copy, Default)]
struct Ended {
    code: i32,
    signal: Option<i32>,
}

/// Runs a plan in this process, which can do nothing else afterwards.
pub(super) fn run(plan: &Plan, spoken: Option<OwnedFd>) -> Report {
    let mut report = Report::default();
    let prepared = match prepare(plan, spoken, &mut report.confinement) {
        Ok(prepared) => prepared,
        Err(failure) => {
            report.failure = Some(failure);
            return report;
        }
    };
    if report.confinement.level() < plan.at_least {
        report.failure =
            Some(format!("this machine holds programs only so: {:?}", report.confinement));
        return report;
    }
    match steps(plan, prepared) {
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

/// Confines this process.
fn prepare(
    plan: &Plan,
    spoken: Option<OwnedFd>,
    confinement: &mut Confinement,
) -> Result<Prepared, String> {
    let said = |what: &'static str| move |error: io::Error| format!("{what}: {error}");
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))
        .map_err(|error| format!("the supervisor's death: {error}"))?;
    rustix::process::umask(Mode::from_raw_mode(0o077));
    // However many programs there are, the supervisor must get processor time to end them.
    let _ = rustix::process::nice(10);
    leave_a_processor();
    rustix::process::setpgid(None, None)
        .map_err(|error| format!("the group of the programs: {error}"))?;
    // Where memory runs out, programs are ended and not the service.
    let _ = std::fs::write("/proc/self/oom_score_adj", "1000");
    let input = spoken.map_or_else(|| input(plan), Ok).map_err(said("the input"))?;
    make_trees(plan).map_err(said("a directory that may be written"))?;
    let mut reached = open(&plan.reach.grants).map_err(said("what may be reached"))?;
    if plan.namespaces {
        // Best effort: the supervisor counts where the kernel does not. An older kernel would limit
        // the whole machine.
        if kernel_version().is_some_and(|version| version >= PID_MAX_OF_NAMESPACE) {
            let most = (301 + plan.limits.processes).to_string();
            let _ = std::fs::write("/proc/sys/kernel/pid_max", most);
        }
        mounts::set_up(plan, &reached).map_err(said("mounts"))?;
        confinement.namespaces = true;
        confinement.network = plan.network;
    }
    let own = super::plan::Access { read: true, write: true, execute: false };
    let temporary = rustix::fs::open(plan.temporary.as_str(), OFlags::PATH, Mode::empty());
    if let Ok(handle) = temporary {
        reached.push(super::confinement::ReachablePath {
            handle,
            access: own,
            kind: GrantKind::Tree,
        });
    }
    enter(&plan.directory).map_err(said("the directory to start in"))?;
    let is_counted = !rustix::process::geteuid().is_root();
    let counts_processes = plan.namespaces && is_counted;
    let most_tasks = (!plan.namespaces && is_counted)
        .then(|| tasks_of_user() + plan.limits.processes + TASKS_OF_OTHERS);
    limit(&plan.limits, counts_processes).map_err(said("limits"))?;
    drop_capabilities().map_err(said("capabilities"))?;
    let port = confinement.network.then_some(PROXY_PORT);
    confinement.landlock =
        landlock(&reached, port).map_err(|error| format!("Landlock: {error}"))?;
    confinement.seccomp = match refuse_calls(plan.namespaces, confinement.network) {
        Ok(()) => true,
        Err(_) if plan.at_least < SandboxLevel::Enforced => false,
        Err(error) => return Err(format!("seccomp: {error}")),
    };
    Ok(Prepared { input, most_tasks })
}

/// Takes all processors but one, which stays with the service however busy the programs are.
fn leave_a_processor() {
    let Ok(mut allowed) = sched_getaffinity(None) else { return };
    let first = (0..CpuSet::MAX_CPU).find(|processor| allowed.is_set(*processor));
    if let Some(first) = first
        && allowed.count() > 1
    {
        allowed.unset(first);
        let _ = sched_setaffinity(None, &allowed);
    }
}

/// The first two numbers of the kernel's version.
fn kernel_version() -> Option<(u32, u32)> {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
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

/// Creates the writable directories of the workspace that rules name and that do not exist.
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

fn steps(plan: &Plan, Prepared { input, most_tasks }: Prepared) -> io::Result<Ended> {
    let mut last = Ended::default();
    let mut input = Some(input);
    for Step { when, negated, commands } in &plan.steps {
        let runs = match when {
            When::Always => true,
            When::Succeeded => last.code == 0,
            When::Failed => last.code != 0,
        };
        if runs {
            last = pipeline(plan, commands, input.take(), most_tasks)?;
            if *negated {
                last.code = i32::from(last.code == 0);
            }
        }
    }
    Ok(last)
}

/// Runs programs at the same time, each reading what the one before it writes; waits for all.
fn pipeline(
    plan: &Plan,
    commands: &[Command],
    first: Option<OwnedFd>,
    most_tasks: Option<u64>,
) -> io::Result<Ended> {
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
                let (code, error) =
                    become_program(plan, command, &reads, writes.as_ref(), most_tasks);
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
        // Whatever group they have moved to. Orphans of theirs are collected on the way.
        match wait(WaitOptions::empty()) {
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
            // No child is left: those without a reported end were removed by others.
            Err(rustix::io::Errno::CHILD) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(ended)
}

/// Returns only on failure, with the exit code.
fn become_program(
    plan: &Plan,
    command: &Command,
    reads: &OwnedFd,
    writes: Option<&OwnedFd>,
    most_tasks: Option<u64>,
) -> (i32, io::Error) {
    let prepared = || -> io::Result<(CString, Vec<CString>, Vec<CString>)> {
        // Rust's runtime ignores SIGPIPE; programs in pipelines rely on it.
        reset_signal(libc::SIGPIPE);
        rustix::stdio::dup2_stdin(reads)?;
        if let Some(writes) = writes {
            rustix::stdio::dup2_stdout(writes)?;
        }
        command.redirections.iter().try_for_each(redirect)?;
        if !plan.namespaces {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
        }
        if command.is_read_only {
            read_only(&plan.temporary).map_err(io::Error::other)?;
        }
        most_tasks.map_or(Ok(()), limit_tasks)?;
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

/// Limits the tasks of this user. Some may be out of sight, in other containers: the limit is raised
/// until one more task is possible.
fn limit_tasks(mut most: u64) -> io::Result<()> {
    let limit = rustix::process::getrlimit(Resource::Nproc);
    let possible = limit.maximum.unwrap_or(MOST_TASKS);
    loop {
        let most_now = most.min(possible);
        let soft = Rlimit { current: Some(most_now), maximum: limit.maximum };
        rustix::process::setrlimit(Resource::Nproc, soft)?;
        match fork() {
            Ok(Forked::Child) => exit_now(0),
            Ok(Forked::Parent(pid)) => {
                waitpid(Some(pid), WaitOptions::empty())?;
                let both = Rlimit { current: Some(most_now), maximum: Some(most_now) };
                return Ok(rustix::process::setrlimit(Resource::Nproc, both)?);
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && most_now < possible => {
                most = most.saturating_mul(2);
            }
            Err(error) => return Err(error),
        }
    }
}

fn redirect(redirection: &Redirection) -> io::Result<()> {
    let file = match &redirection.to {
        Target::Read(path) => opened(path, OFlags::RDONLY)?,
        Target::Write(path) => {
            let file = opened_to_write(path, OFlags::empty())?;
            if is_regular(&rustix::fs::fstat(&file)?) {
                rustix::fs::ftruncate(&file, 0)?;
            }
            file
        }
        Target::Append(path) => opened_to_write(path, OFlags::APPEND)?,
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

/// The file of a redirection.
fn opened(path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    // A pipe without another end must not block the step.
    let flags = flags | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = rustix::fs::open(path, flags, Mode::from_raw_mode(0o600))
        .map_err(|e| io::Error::new(io::Error::from(e).kind(), format!("{path}: {e}")))?;
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// The same for one that is written, with its content as it was. A file with more than one hard
/// link may lie elsewhere, too, and is refused.
fn opened_to_write(path: &str, flags: OFlags) -> io::Result<OwnedFd> {
    let file = opened(path, flags | OFlags::WRONLY | OFlags::CREATE)?;
    let found = rustix::fs::fstat(&file)?;
    if is_regular(&found) && found.st_nlink > 1 {
        let links = found.st_nlink;
        let message =
            format!("{path}: has {links} hard links; writing it would change files elsewhere");
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, message));
    }
    // A file that was created for a redirection has the time 0 until it is opened. Without namespaces, no
    // process of the sandbox may set times.
    if is_regular(&found) && found.st_mtime == 0 && found.st_size == 0 {
        let now = rustix::fs::Timespec { tv_sec: 0, tv_nsec: rustix::fs::UTIME_NOW };
        let times = rustix::fs::Timestamps { last_access: now, last_modification: now };
        rustix::fs::futimens(&file, &times).or_else(|_| rustix::fs::ftruncate(&file, 0))?;
    }
    Ok(file)
}

fn is_regular(found: &rustix::fs::Stat) -> bool {
    rustix::fs::FileType::from_raw_mode(found.st_mode) == rustix::fs::FileType::RegularFile
}
