//! A program that runs across calls and communicates with the service over pipes, in the same confinement
//! as the programs of a call.
//!
//! Its supervisor ends it, and all processes that it started, when the service drops it or dies. The
//! messages are not interpreted here.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;
use tokio_util::task::AbortOnDropHandle;

use super::plan::{Command, Plan, Reach, Step, Stopped, When};
use super::supervisor_handle::SupervisorHandle;
use super::{Sandbox, SandboxError, WayOut, temporary};
use crate::run::SandboxLevel;

/// How long it may take until the supervisor begins with the plan.
const MAX_START: Duration = Duration::from_secs(20);
/// Longer than any machine runs.
const FOREVER: Duration = Duration::from_hours(24 * 365 * 100);

/// A program that runs until the service ends it.
pub struct LongRunningProgram {
    /// Absolute.
    pub program: String,
    /// As they are written, the program's name first.
    pub arguments: Vec<String>,
    /// Its own, open; paths of `reach` may be relative to it.
    pub directory: OwnedFd,
    /// Beside the usual variables.
    pub environment: Vec<(String, String)>,
    pub reach: Reach,
    /// Its network access, if it has one and the kernel supports it.
    pub way_out: Option<WayOut>,
}

/// A program that runs until this is dropped.
pub struct RunningProgram {
    pub input: pipe::Sender,
    pub output: pipe::Receiver,
    pub errors: pipe::Receiver,
    pub handle: ProgramHandle,
    /// The proxy that answers its network requests.
    _way_out: Option<AbortOnDropHandle<()>>,
}

/// Waits for the end of the program.
pub struct ProgramHandle(SupervisorHandle);

impl Sandbox {
    /// Starts a program and leaves it running.
    ///
    /// # Errors
    /// [`SandboxError`] if it cannot be started as the operator requires, or in time. If it cannot be
    /// executed, it ends.
    pub async fn start_long_running(
        &self,
        program: LongRunningProgram,
    ) -> Result<RunningProgram, SandboxError> {
        let kernel = self.kernel().await;
        self.check(kernel)?;
        let settings = self.settings();
        let LongRunningProgram { program, arguments, directory, environment, reach, way_out } =
            program;
        let way_out = way_out.filter(|_| kernel.confinement.network);
        let temporary = temporary()?;
        let command = Command {
            program,
            arguments,
            environment: Vec::new(),
            redirections: Vec::new(),
            is_read_only: false,
        };
        let plan = Plan {
            steps: vec![Step { when: When::Always, negated: false, commands: vec![command] }],
            directory: ".".to_owned(),
            environment: self.environment(&temporary, environment, way_out.is_some()),
            network: way_out.is_some(),
            is_spoken_to: true,
            reach,
            limits: settings.limits,
            timeout_ms: u64::try_from(FOREVER.as_millis()).unwrap_or(u64::MAX),
            temporary,
            namespaces: kernel.confinement.namespaces,
            at_least: if settings.require {
                SandboxLevel::Enforced
            } else {
                SandboxLevel::Unavailable
            },
            ..Plan::default()
        };
        let (reads, writes) = pipe_with(PipeFlags::CLOEXEC).map_err(io::Error::from)?;
        let starting = async {
            let mut started = self.supervisors.start(&directory, &plan, Some(&reads)).await?;
            let streams = started.streams()?;
            let listener = started.listener().await?;
            Ok::<_, SandboxError>((started, streams, listener))
        };
        let begun = tokio::time::timeout(MAX_START, starting).await;
        let (started, (output, errors), listener) =
            begun.map_err(|_| self.supervisors.late())??;
        let input = pipe::Sender::from_owned_fd(writes)?;
        let serving = listener.zip(way_out).map(|(listener, way_out)| way_out(listener));
        let way_out = serving.map(|serving| AbortOnDropHandle::new(tokio::spawn(serving)));
        Ok(RunningProgram {
            input,
            output,
            errors,
            handle: ProgramHandle(started),
            _way_out: way_out,
        })
    }
}

impl ProgramHandle {
    /// Waits for the end, and says in a phrase what caused it.
    pub async fn wait_for_end(self) -> String {
        match self.0.report().await {
            Err(error) => format!("its supervisor failed: {error}"),
            Ok(report) => match (report.failure, report.stopped, report.exit_code) {
                (Some(failure), ..) => format!("it could not be started: {failure}"),
                (_, Some(Stopped::Memory), _) => "it took more memory than programs may".into(),
                (_, Some(Stopped::Processes), _) => {
                    "it started more processes than programs may".into()
                }
                (_, Some(Stopped::CpuSeconds), _) => {
                    "it took more of the processor than programs may".into()
                }
                (_, Some(Stopped::FileSize), _) => {
                    "it wrote a larger file than programs may".into()
                }
                (_, Some(Stopped::Timeout), _) | (_, None, None) => "it was ended".into(),
                (_, None, Some(code)) => format!("it ended with exit code {code}"),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::PathBuf;

    use super::*;
    use crate::tools::sandbox::{Limits, Settings};

    /// `yes` takes any argument, reads nothing and does not end, like a fork server that was stopped.
    fn hanging(namespaces: bool) -> Sandbox {
        Sandbox::new(Settings {
            path: Vec::new(),
            environment: Vec::new(),
            require: false,
            timeout: Duration::from_secs(1),
            max_output: 1000,
            limits: Limits::default(),
            namespaces,
            supervisor: PathBuf::from("/usr/bin/yes"),
        })
    }

    #[tokio::test(start_paused = true)]
    async fn a_start_that_hangs_fails() {
        let program = LongRunningProgram {
            program: "/bin/true".to_owned(),
            arguments: vec!["true".to_owned()],
            directory: File::open("/").unwrap().into(),
            environment: Vec::new(),
            reach: Reach::default(),
            way_out: None,
        };
        let started = hanging(false).start_long_running(program).await;
        let error = started.err().map(|error| error.to_string()).unwrap_or_default();
        assert!(error.contains("timed out"), "{error:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_machine_that_is_too_busy_is_asked_again_what_it_supports() {
        for namespaces in [true, false] {
            let sandbox = hanging(namespaces);
            assert_eq!(sandbox.kernel().await.level(), SandboxLevel::Unavailable);
            assert_eq!(sandbox.known_kernel(), None);
        }
    }
}
