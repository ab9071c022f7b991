//! Runs programs that can access only what they were granted, and ends them in time.
//!
//! [`Sandbox::run`] starts a supervisor (a fork of a small process of this same binary, see
//! `fork_server`), sends it a plan and reads the output of the programs. All programs end when the future
//! is dropped, and when the service dies, because the supervisor outlives the service. How well programs
//! are confined depends on the kernel. That is found out by a probe, reported as a [`SandboxLevel`], and
//! never assumed.
//!
//! The sandbox does not decide what may run and what may be accessed: tools do, from a permit.

mod confinement;
mod fork_server;
mod handles;
mod long_running_program;
mod mounts;
mod network;
mod output;
pub mod plan;
pub mod reach;
mod runner;
mod seccomp;
mod startable_programs;
mod supervisor;
mod supervisor_handle;
mod syscalls;
mod tree;
pub mod tree_cache;
pub mod walk;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use tokio::net::TcpListener;
use tokio::sync::{OnceCell, oneshot};

use crate::run::SandboxLevel;
pub use fork_server::serve_forks;
pub use long_running_program::{LongRunningProgram, RunningProgram};
use output::MaxOutput;
pub use output::{Output, shortened};
use plan::{Confinement, MAX_PLAN, PROXY_PORT, Plan, Reach, Report, Step};
pub use plan::{Limits, Stopped};
pub use startable_programs::StartablePrograms;
use supervisor_handle::Supervisors;

/// The argument that makes the binary the fork server of supervisors.
pub const FORK_SERVER: &str = "sandbox-run";
/// How long a supervisor may take beyond its plan's own time.
const GRACE: Duration = Duration::from_secs(5);
/// How long a probe of the kernel's features may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes of standard error that are kept: no result shows more of it.
const MAX_STDERR: usize = 64 * 1024;
/// Bytes that are kept of what a probe writes.
const OF_PROBE: MaxOutput = MaxOutput { stdout: 1000, stderr: 1000 };
/// Probes that are made if the supervisor cannot be started or is late; the last failure counts.
const PROBES: u32 = 3;
/// Why it is not known what the kernel supports, if all probes were late.
const TOO_BUSY: &str = "the machine is too busy to find out";

/// Confines this process to its open files: no other files, no network, no further privileges, and no
/// more memory and time than these limits.
///
/// # Errors
/// The limits cannot be set. What this kernel does not have, Landlock or seccomp, is left out.
pub fn confine(limits: &Limits) -> io::Result<()> {
    confinement::limit(limits, false)?;
    confinement::limit_program(limits)?;
    confinement::drop_capabilities()?;
    let _ = confinement::landlock(&[], None);
    let _ = seccomp::refuse_calls(false, false);
    Ok(())
}

/// What the operator sets for all programs.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where programs are looked for.
    pub path: Vec<PathBuf>,
    /// Names of variables that programs see beside the usual ones.
    pub environment: Vec<String>,
    /// Whether nothing runs where the sandbox is not enforced.
    pub require: bool,
    pub timeout: Duration,
    /// Bytes of each stream.
    pub max_output: usize,
    pub limits: Limits,
    /// Whether namespaces are made where that is possible.
    pub namespaces: bool,
    /// The binary that supervisors are copies of.
    pub supervisor: PathBuf,
}

/// Where programs run.
pub struct Sandbox {
    settings: Settings,
    kernel: OnceCell<Kernel>,
    /// What is assumed of the kernel until it was probed.
    unknown: Kernel,
    supervisors: Supervisors,
}

/// The confinement that the kernel supports.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kernel {
    pub confinement: Confinement,
    /// Why there are no namespaces.
    pub without_namespaces: Option<String>,
    /// Why programs can have no network of their own, where there are namespaces.
    pub without_network: Option<String>,
}

impl Kernel {
    pub fn level(&self) -> SandboxLevel {
        self.confinement.level()
    }
}

/// Serves the only socket to which programs can connect, for as long as the future is polled.
pub type WayOut = Box<dyn FnOnce(TcpListener) -> BoxFuture<'static, ()> + Send>;

/// Programs to run for one call.
pub struct Job<'a> {
    pub steps: Vec<Step>,
    /// Beneath the workspace, or absolute.
    pub directory: String,
    pub workspace: &'a OwnedFd,
    /// Beside the usual variables.
    pub environment: Vec<(String, String)>,
    pub input: Option<String>,
    pub reach: Reach,
    pub timeout: Duration,
    /// Bytes of one file, where that is less than the operator's.
    pub largest_file: Option<u64>,
    /// Bytes of standard output that are kept, where that is less than the operator's.
    pub max_stdout: Option<usize>,
    /// Their network access, if the kernel can give them a network of their own.
    pub way_out: Option<WayOut>,
    /// Sees each line of standard error and says whether it is part of the output.
    pub each_line: Option<&'a mut (dyn FnMut(&str) -> bool + Send)>,
    /// Dropped when none of the programs exists any more, for whatever reason.
    pub held: Option<oneshot::Sender<()>>,
}

/// The result of a [`Job`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobResult {
    /// Of the last one; `None` where they were ended.
    pub exit_code: Option<i32>,
    pub stopped: Option<Stopped>,
    pub stdout: Output,
    pub stderr: Output,
    pub duration: Duration,
    pub level: SandboxLevel,
}

/// Why programs did not run.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The machine cannot confine them as the operator requires.
    #[error(
        "the sandbox is {found} on this machine and the operator requires an enforced one; see \
         `toolloop doctor`",
        found = <&str>::from(*found)
    )]
    TooWeak { found: SandboxLevel },
    #[error("the programs could not be started: {0}")]
    NotStarted(String),
    #[error(
        "the programs, with the list of files that they may read, are larger than {MAX_PLAN} bytes"
    )]
    TooLarge,
    #[error("the supervisor of the programs failed: {0}")]
    Io(#[from] io::Error),
}

impl Sandbox {
    pub fn new(settings: Settings) -> Self {
        let supervisors = Supervisors::new(&settings.supervisor);
        let without_namespaces = Some(TOO_BUSY.to_owned());
        let unknown = Kernel { without_namespaces, ..Kernel::default() };
        Self { settings, kernel: OnceCell::new(), unknown, supervisors }
    }

    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The confinement that the kernel supports, probed once; none while the machine is too busy to find out.
    pub async fn kernel(&self) -> &Kernel {
        let probed = async {
            let kernel = probe(&self.settings, &self.supervisors).await;
            self.supervisors.let_go(); // at the start of a service that may never run a program
            kernel
        };
        self.kernel.get_or_try_init(|| probed).await.unwrap_or(&self.unknown)
    }

    /// How well programs are confined, where that is known.
    pub fn known_level(&self) -> Option<SandboxLevel> {
        self.known_kernel().map(Kernel::level)
    }

    /// Why no program runs here, where that is known: a sentence.
    pub fn refusal(&self) -> Option<String> {
        let refused = self.check(self.known_kernel()?).err()?;
        Some(format!("No program runs: {refused}."))
    }

    /// Checks that the kernel can confine programs as the operator requires.
    fn check(&self, kernel: &Kernel) -> Result<(), SandboxError> {
        let found = kernel.level();
        if self.settings.require && found < SandboxLevel::Enforced {
            return Err(SandboxError::TooWeak { found });
        }
        Ok(())
    }

    /// The result of [`Self::kernel`], if it is known already.
    pub fn known_kernel(&self) -> Option<&Kernel> {
        self.kernel.get()
    }

    /// Runs programs to their end, or to the end of their time.
    ///
    /// # Errors
    /// [`SandboxError`] where nothing ran.
    pub async fn run(&self, job: Job<'_>) -> Result<JobResult, SandboxError> {
        let kernel = self.kernel().await;
        self.check(kernel)?;
        let since = Instant::now();
        let Job { steps, directory, workspace, environment, input, reach, timeout, .. } = job;
        let Job { largest_file, max_stdout, way_out, each_line, held, .. } = job;
        let temporary = temporary()?;
        let way_out = way_out.filter(|_| kernel.confinement.network);
        let own = self.settings.limits;
        let file_size = largest_file.map_or(own.file_size, |bytes| bytes.min(own.file_size));
        let plan = Plan {
            steps,
            directory,
            environment: self.environment(&temporary, environment, way_out.is_some()),
            network: way_out.is_some(),
            input,
            is_spoken_to: false,
            reach,
            limits: Limits { file_size, ..own },
            timeout_ms: u64::try_from(timeout.as_millis()).unwrap_or(u64::MAX),
            temporary,
            namespaces: kernel.confinement.namespaces,
            at_least: if self.settings.require {
                SandboxLevel::Enforced
            } else {
                SandboxLevel::Unavailable
            },
        };
        let max_output = self.settings.max_output;
        let most = MaxOutput {
            stdout: max_stdout.unwrap_or(max_output).min(max_output),
            stderr: max_output.min(MAX_STDERR),
        };
        let supervised = async {
            let started = self.supervisors.start(workspace, &plan, None).await?;
            started.holding(held).ended(&plan, most, way_out, each_line).await
        };
        let ended = tokio::time::timeout(timeout + GRACE, supervised).await;
        let (report, stdout, stderr) = ended.map_err(|_| self.supervisors.late())??;
        if let Some(failure) = report.failure {
            return Err(SandboxError::NotStarted(failure));
        }
        Ok(JobResult {
            exit_code: report.exit_code,
            stopped: report.stopped,
            stdout,
            stderr,
            duration: since.elapsed(),
            level: kernel.level(),
        })
    }

    fn environment(
        &self,
        temporary: &str,
        more: Vec<(String, String)>,
        has_network: bool,
    ) -> Vec<(String, String)> {
        let path = std::env::join_paths(&self.settings.path).unwrap_or_default();
        let usual = [
            ("PATH", path.to_string_lossy().into_owned()),
            ("HOME", temporary.to_owned()),
            ("LANG", "C.UTF-8".to_owned()),
            ("TMPDIR", temporary.to_owned()),
        ];
        let mut all = if has_network { proxied() } else { Vec::new() };
        let configured = self.settings.environment.iter();
        let configured =
            configured.filter_map(|name| Some((name.clone(), std::env::var(name).ok()?)));
        let usual = usual.into_iter().map(|(name, value)| (name.to_owned(), value));
        for (name, value) in more.into_iter().chain(configured).chain(usual) {
            if !all.iter().any(|(known, _)| *known == name) {
                all.push((name, value));
            }
        }
        all
    }
}

/// Environment variables that make programs use the proxy, and override configured ones.
fn proxied() -> Vec<(String, String)> {
    let proxy = format!("http://127.0.0.1:{PROXY_PORT}");
    let names = ["http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"];
    let proxies = names.map(|name| (name, proxy.as_str()));
    let others = [("no_proxy", ""), ("NO_PROXY", ""), ("NODE_USE_ENV_PROXY", "1")];
    let all = proxies.into_iter().chain(others);
    all.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// Finds out which confinement the kernel supports, with an empty plan.
///
/// # Errors
/// The supervisors were late, which says nothing of the kernel.
async fn probe(settings: &Settings, supervisors: &Supervisors) -> io::Result<Kernel> {
    let tried = |namespaces: bool, network: bool| async move {
        let here = rustix::fs::open("/", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty());
        let here = here.map_err(io::Error::from)?;
        let plan = Plan {
            directory: "/".to_owned(),
            limits: settings.limits,
            timeout_ms: 1000,
            temporary: temporary()?,
            namespaces,
            network,
            ..Plan::default()
        };
        let supervised = async {
            supervisors.start(&here, &plan, None).await?.ended(&plan, OF_PROBE, None, None).await
        };
        let (report, ..) = tokio::time::timeout(PROBE_TIMEOUT, supervised)
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        confinement_in(report)
    };
    let mut kernel = Kernel::default();
    if !settings.namespaces {
        kernel.without_namespaces = Some("switched off".to_owned());
    }
    for network in [true, false].into_iter().filter(|_| settings.namespaces) {
        let mut attempts = 1;
        let reason = loop {
            match tried(true, network).await {
                Ok(confinement) => {
                    return Ok(Kernel { confinement, without_namespaces: None, ..kernel });
                }
                // The machine is busy, which says nothing of what it can do.
                Err(SandboxError::Io(_)) if attempts < PROBES => attempts += 1,
                Err(SandboxError::Io(error)) if is_late(&error) => return Err(error),
                Err(reason) => break Some(reason.to_string()),
            }
        };
        let which =
            if network { &mut kernel.without_network } else { &mut kernel.without_namespaces };
        *which = reason;
    }
    match tried(false, false).await {
        Err(SandboxError::Io(error)) if is_late(&error) => return Err(error),
        confinement => kernel.confinement = confinement.unwrap_or_default(),
    }
    Ok(kernel)
}

/// The confinement that a probe reports, unless it failed or was ended.
fn confinement_in(report: Report) -> Result<Confinement, SandboxError> {
    match (report.failure, report.stopped) {
        (Some(failure), _) => Err(SandboxError::NotStarted(failure)),
        (None, Some(Stopped::Timeout)) => Err(io::Error::from(io::ErrorKind::TimedOut).into()),
        (None, Some(other)) => Err(SandboxError::NotStarted(<&str>::from(other).to_owned())),
        (None, None) => Ok(report.confinement),
    }
}

fn is_late(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::TimedOut
}

/// The directory for temporary files of programs, which only this user can access.
fn temporary() -> io::Result<String> {
    let user = rustix::process::geteuid();
    let directory = std::env::temp_dir().join(format!("toolloop-{}", user.as_raw()));
    let made = std::fs::DirBuilder::new().mode(0o700).create(&directory);
    match made {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(e),
        _ => {}
    }
    let found = std::fs::symlink_metadata(&directory)?;
    if !found.is_dir() || found.uid() != user.as_raw() || found.mode() & 0o077 != 0 {
        let path = directory.display();
        let message = format!("{path} is not a private directory of this user");
        return Err(io::Error::other(message));
    }
    directory.into_os_string().into_string().map_err(|_| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_that_was_late_says_nothing_of_the_kernel() {
        let confinement = Confinement { landlock: 6, seccomp: true, ..Confinement::default() };
        let whole = Report { confinement: confinement.clone(), ..Report::default() };
        assert_eq!(confinement_in(whole).ok(), Some(confinement));
        let ended = |stopped| Report { stopped: Some(stopped), ..Report::default() };
        let late = confinement_in(ended(Stopped::Timeout)).err();
        assert!(matches!(late, Some(SandboxError::Io(error)) if is_late(&error)));
        let failed = Report { failure: Some("mounts".to_owned()), ..Report::default() };
        for failed in [failed, ended(Stopped::Memory)] {
            assert!(matches!(confinement_in(failed), Err(SandboxError::NotStarted(_))));
        }
    }
}
