//! The service's end of a supervisor. Starting the binary costs more than most programs that run
//! under it, so after a call one more supervisor is kept ready for a minute.

use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::{TcpListener, UnixStream};
use tokio::process::{Child, ChildStderr, ChildStdout, Command};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use super::output::{self, Output};
use super::plan::{MAX_PLAN, Plan, Report};
use super::{SUPERVISOR, SandboxError, WayOut, handles, network};

/// How long a supervisor waits for a plan.
const KEPT: Duration = Duration::from_mins(1);
/// Bytes of a report.
const MAX_REPORT: u64 = 64 * 1024;

/// Starts supervisors.
pub(super) struct Supervisors {
    binary: PathBuf,
    ready: Arc<Mutex<Option<Supervised>>>,
}

impl Supervisors {
    pub(super) fn new(binary: &Path) -> Self {
        Self { binary: binary.to_owned(), ready: Arc::default() }
    }

    /// A supervisor that works on this plan.
    pub(super) async fn start(
        &self,
        workspace: &OwnedFd,
        plan: &Plan,
        input: Option<&OwnedFd>,
    ) -> Result<Supervised, SandboxError> {
        let text = serde_json::to_vec(plan).map_err(io::Error::other)?;
        let length = u32::try_from(text.len()).ok().filter(|n| *n as usize <= MAX_PLAN);
        let length = length.ok_or(SandboxError::TooLarge)?;
        let ready = self.ready.lock().take();
        if let Some(mut ready) = ready
            && ready.give(workspace, length, &text, input).await.is_ok()
        {
            return Ok(ready);
        }
        let mut started = Supervised::start(&self.binary)?;
        started.give(workspace, length, &text, input).await?;
        Ok(started)
    }

    /// Has a supervisor ready for the next call, if that comes soon.
    pub(super) fn keep_ready(&self) {
        let mut ready = self.ready.lock();
        if ready.is_some() {
            return;
        }
        let Ok(started) = Supervised::start(&self.binary) else { return }; // the next call tells
        let process = started.id();
        *ready = Some(started);
        let place = Arc::downgrade(&self.ready);
        tokio::spawn(async move {
            tokio::time::sleep(KEPT).await;
            if let Some(place) = place.upgrade() {
                place.lock().take_if(|ready| ready.id() == process);
            }
        });
    }
}

/// A supervisor, which ends where this is dropped.
pub(super) struct Supervised {
    /// None when it has ended.
    child: Option<Child>,
    socket: UnixStream,
    /// Dropped when it has ended.
    held: Option<oneshot::Sender<()>>,
}

/// The supervisor ends its programs when the socket is closed, and itself after them.
impl Drop for Supervised {
    fn drop(&mut self) {
        if let (Some(mut child), Some(held)) = (self.child.take(), self.held.take())
            && let Ok(runtime) = Handle::try_current()
        {
            runtime.spawn(async move {
                let _ = child.wait().await; // its end is of no interest
                drop(held);
            });
        }
    }
}

impl Supervised {
    fn start(binary: &Path) -> io::Result<Self> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        let child = Command::new(binary)
            .arg(SUPERVISOR)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        Ok(Self { child: Some(child), socket: UnixStream::from_std(ours)?, held: None })
    }

    fn id(&self) -> Option<u32> {
        self.child.as_ref().and_then(Child::id)
    }

    /// Drops that when the supervisor has ended.
    pub(super) fn holding(self, held: Option<oneshot::Sender<()>>) -> Self {
        let mut holding = self;
        holding.held = held;
        holding
    }

    /// Sends a plan, behind its length and with the directory that it is about.
    async fn give(
        &mut self,
        workspace: &OwnedFd,
        length: u32,
        text: &[u8],
        input: Option<&OwnedFd>,
    ) -> io::Result<()> {
        let (socket, head) = (&self.socket, length.to_be_bytes());
        socket.async_io(Interest::WRITABLE, || handles::send(socket, &head, workspace)).await?;
        self.socket.write_all(text).await?;
        let (socket, Some(input)) = (&self.socket, input) else { return Ok(()) };
        socket.async_io(Interest::WRITABLE, || handles::send(socket, b"i", input)).await
    }

    /// What the programs write, to be read while they run.
    pub(super) fn streams(&mut self) -> io::Result<(ChildStdout, ChildStderr)> {
        let missing = || io::Error::other("a stream of the supervisor is missing");
        let child = self.child.as_mut().ok_or_else(missing)?;
        let stdout = child.stdout.take().ok_or_else(missing)?;
        Ok((stdout, child.stderr.take().ok_or_else(missing)?))
    }

    /// Where programs that were given a network ask for what is outside; none where nothing was started.
    pub(super) async fn listener(&self) -> io::Result<Option<TcpListener>> {
        taken_over(&self.socket).await
    }

    /// What became of programs whose streams are read elsewhere.
    pub(super) async fn report(mut self) -> io::Result<Report> {
        let mut text = Vec::new();
        (&mut self.socket).take(MAX_REPORT).read_to_end(&mut text).await?;
        if let Some(child) = &mut self.child {
            child.wait().await?;
        }
        self.child = None;
        serde_json::from_slice(&text).map_err(|_| io::Error::other("it ended without a report"))
    }

    /// What became of the programs, and what they wrote.
    pub(super) async fn ended(
        mut self,
        plan: &Plan,
        most: usize,
        way_out: Option<WayOut>,
        each_line: Option<&mut (dyn FnMut(&str) -> bool + Send)>,
    ) -> Result<(Report, Output, Output), SandboxError> {
        let (stdout, stderr) = self.streams()?;
        let talk = async {
            let listener = if plan.network { taken_over(&self.socket).await? } else { None };
            let mut text = Vec::new();
            let mut socket = (&mut self.socket).take(MAX_REPORT);
            let reported = socket.read_to_end(&mut text);
            match (listener, way_out) {
                (Some(listener), Some(way_out)) => {
                    let serving = way_out(listener);
                    tokio::select! {
                        read = reported => read?,
                        () = serving => return Err(io::Error::other("its proxy has ended")),
                    }
                }
                _ => reported.await?,
            };
            io::Result::Ok(text)
        };
        let (talked, stdout, stderr) = tokio::join!(
            talk,
            output::captured(stdout, most, None),
            output::captured(stderr, most, each_line)
        );
        let (stdout, stderr) = (stdout?, stderr?);
        if let Some(child) = &mut self.child {
            child.wait().await?;
        }
        self.child = None;
        let report = talked.and_then(|text| {
            serde_json::from_slice(&text).map_err(|_| {
                let said = if plan.steps.is_empty() { "" } else { stderr.text.trim() };
                io::Error::other(format!("it ended without a report {said}"))
            })
        })?;
        Ok((report, stdout, stderr))
    }
}

async fn taken_over(socket: &UnixStream) -> io::Result<Option<TcpListener>> {
    let Some(listener) = network::taken_over(socket).await? else { return Ok(None) };
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener).map(Some)
}
